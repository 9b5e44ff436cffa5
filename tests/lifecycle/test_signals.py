"""Signals stop a loop cleanly after the current run, and reach their old handlers once the loop is closed."""

import errno
import inspect
import itertools
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, BinaryIO

import pytest
import torch
from support.processes import fork_program

import torchhooks.progress.loop_state
import torchhooks.progress.signals
from torchhooks import (
    AbortedError,
    CheckpointError,
    CheckpointSaverHook,
    CheckpointSaverListener,
    Coordinator,
    GlobalStepWaiterHook,
    LifecycleError,
    LooperThread,
    MonitoredLoop,
    Saver,
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    latest_checkpoint,
)
from torchhooks.common.files import Disk
from torchhooks.progress.loop_state import LoopState, Stop, StoppedBy
from torchhooks.progress.signals import SignalWatch, print_no_traceback_of
from torchhooks.testing import RecordingHook

MODEL = torch.nn.Linear(1, 1)


@pytest.fixture
def delivered() -> Iterator[list[str]]:
    """Collect the signals that reach the handlers from before the loop."""
    names: list[str] = []

    def handle(number: int, frame: Any) -> None:
        names.append(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield names
    for number, handler in before.items():
        signal.signal(number, handler)


def signalling(step: int, number: signal.Signals) -> Any:
    """Return a step function that raises a signal in its ``step``-th call."""
    made = []

    def run() -> float:
        made.append(0.5)
        if len(made) == step:
            signal.raise_signal(number)
        return 0.5

    return run


class Waiting(SessionRunHook):
    """Starts a thread that runs until the loop ends, and raises a signal 50 ms later."""

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        LooperThread.loop(coord, 0.01, target=int)
        threading.Timer(0.05, signal.raise_signal, (signal.SIGTERM,)).start()


def test_a_signal_ends_the_wait_of_a_hook_in_a_run(delivered: list[str]) -> None:
    with MonitoredLoop(lambda: 0.5, hooks=[Waiting(), GlobalStepWaiterHook(9)], signals=["SIGTERM"]) as loop:
        for _ in loop.until_stop(range(9)):
            loop.run()
    assert (loop.global_step, loop.stop_reason, delivered) == (1, "signal SIGTERM", ["SIGTERM"])


def test_an_evaluation_in_a_run_leaves_the_save_for_the_stop_to_the_item(tmp_path: Path, delivered: list[str]) -> None:
    after: list[int] = []

    class Evaluating(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            if run_context.session.global_step == 2:
                signal.raise_signal(signal.SIGTERM)
            assert len(list(loop.until_stop([7, 8]))) in (0, 2)

    class Noting(CheckpointSaverListener):
        def after_save(self, session: Session, step: int) -> None:
            after.append(len(epochs))

    epochs: list[int] = []
    hooks = [Evaluating(), CheckpointSaverHook(tmp_path, save_steps=100, listeners=[Noting()])]
    with MonitoredLoop(lambda: None, hooks=hooks, signals=["SIGTERM"]) as loop:
        for epoch in loop.until_stop(range(3)):
            for _ in loop.until_stop(range(5)):
                loop.run()
            epochs.append(epoch)
    assert (epochs, after) == ([], [0, 0]), "saved at creation, and at the item, where the signal leaves the loop"
    assert delivered == ["SIGTERM"]


def test_a_signal_ends_the_pause_before_a_recovery(tmp_path: Path, delivered: list[str]) -> None:
    failing = RecordingHook(raises={("before_run", number): AbortedError for number in range(1, 99)})

    def run() -> None:
        threading.Timer(0.05, signal.raise_signal, (signal.SIGTERM,)).start()
        loop.run()

    saver = CheckpointSaverHook(tmp_path, save_steps=9)
    loop = MonitoredLoop(lambda: 0.5, MODEL, hooks=[saver, failing], checkpoint_dir=tmp_path, signals=["SIGTERM"])
    with pytest.raises(AbortedError) as caught, loop:
        run()
    assert caught.value.__notes__[-1].endswith("because signal SIGTERM arrived")
    assert delivered == ["SIGTERM"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_the_run_in_which_a_signal_arrives_is_completed_and_is_the_last(
    number: signal.Signals, delivered: list[str]
) -> None:
    hook = RecordingHook()
    with MonitoredLoop(signalling(3, number), hooks=[hook], signals=[number]) as loop:
        for _ in loop.until_stop(range(9)):
            loop.run()
        assert delivered == []
    assert (loop.global_step, loop.stop_reason) == (3, f"signal {number.name}")
    assert hook.calls[-3:] == [("after_run", None, 3), ("end", 3), ("teardown",)]
    assert delivered == [number.name]


def test_the_state_is_saved_after_the_last_run(tmp_path: Path, delivered: list[str]) -> None:
    saver = CheckpointSaverHook(tmp_path, save_steps=100)
    step = signalling(3, signal.SIGTERM)
    with MonitoredLoop(step, MODEL, hooks=[saver], checkpoint_dir=tmp_path, signals=["SIGTERM"]) as loop:
        for _ in loop.until_stop(range(9)):
            loop.run()
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-3")


def test_a_signal_between_two_runs_prevents_the_next(delivered: list[str]) -> None:
    with MonitoredLoop(lambda: 0.5, signals=["SIGTERM"]) as loop:
        loop.run()
        signal.raise_signal(signal.SIGTERM)
        assert loop.should_stop()
    assert (loop.global_step, loop.stop_reason) == (1, "signal SIGTERM")


def test_the_old_handlers_are_reinstated_at_the_end(delivered: list[str]) -> None:
    old = signal.getsignal(signal.SIGTERM)
    with MonitoredLoop(lambda: 0.5, signals=["SIGTERM"]):
        assert signal.getsignal(signal.SIGTERM) is not old
    assert signal.getsignal(signal.SIGTERM) is old


def test_the_old_handlers_are_reinstated_after_an_error(delivered: list[str]) -> None:
    old = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="body"), MonitoredLoop(lambda: 0.5, signals=["SIGTERM"]):
        raise ValueError("body")
    assert signal.getsignal(signal.SIGTERM) is old


def test_the_old_handlers_are_reinstated_if_the_loop_cannot_be_created(delivered: list[str]) -> None:
    old = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError):
        MonitoredLoop(lambda: 0.5, hooks=[RecordingHook(raises={"begin": KeyError})], signals=["SIGTERM"])
    assert signal.getsignal(signal.SIGTERM) is old


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    hook = RecordingHook()

    def step() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError

    with pytest.raises(KeyboardInterrupt), MonitoredLoop(step, hooks=[hook], signals=["SIGINT"]) as loop:
        loop.run()
    assert hook.calls[-2:] == [("before_run", False), ("teardown",)]


def test_without_signals_nothing_is_handled() -> None:
    old = signal.getsignal(signal.SIGTERM)
    with MonitoredLoop(lambda: 0.5):
        assert signal.getsignal(signal.SIGTERM) is old


def test_a_forked_child_uses_the_old_handler() -> None:
    with MonitoredLoop(lambda: 0.5, signals=["SIGUSR1"]) as loop:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGUSR1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert not loop.should_stop()
    assert os.WTERMSIG(status) == signal.SIGUSR1


def test_outside_the_main_thread_a_warning_says_that_signals_do_not_stop_the_loop(lines: list[tuple[str, str]]) -> None:
    thread = threading.Thread(target=lambda: MonitoredLoop(lambda: 0.5, signals=["SIGTERM"]).close())
    thread.start()
    thread.join()
    assert [level for level, text in lines if "not in the main thread, so SIGTERM" in text] == ["WARNING"]


@pytest.mark.parametrize("name", ["TERM", "SIGKILL", 99999])
def test_a_signal_that_cannot_be_handled_is_rejected_by_name(name: Any) -> None:
    with pytest.raises(ValueError, match=str(name)):
        MonitoredLoop(lambda: 0.5, signals=[name])


@pytest.mark.parametrize(
    ("signals", "message"),
    [
        ("SIGINT", r"signals='SIGINT': give a list of names, \['SIGINT'\]"),
        (signal.SIGINT, r"signals=<Signals.SIGINT: 2>: give a list of names, \['SIGINT'\]"),
        (15, r"signals=15: give a list of names, \['SIGTERM'\]"),
    ],
)
def test_what_is_no_list_of_names_is_rejected(signals: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        MonitoredLoop(lambda: 0.5, signals=signals)


def test_none_means_no_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with MonitoredLoop(lambda: 0.5, signals=None) as loop:
        loop.run()
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("received", [None, "SIGINT"])
def test_a_signal_that_another_rank_has_received_is_delivered_here_too(
    delivered: list[str], received: str | None
) -> None:
    state = LoopState(["SIGTERM", "SIGINT"])
    state.signals.install()
    if received is not None:
        signal.raise_signal(signal.Signals[received])
    state.decide(Stop("signal SIGTERM (rank 1)", StoppedBy.SIGNAL))
    state.take_signal_of_another_rank()
    assert delivered == []
    state.signals.restore()
    assert delivered == [received or "SIGTERM"]


@pytest.mark.parametrize("stop", [None, Stop("request_stop: signal SIGTERM", StoppedBy.CALLER)])
def test_and_no_signal_after_another_stop(delivered: list[str], stop: Stop | None) -> None:
    state = LoopState(["SIGTERM"])
    state.signals.install()
    if stop is not None:
        state.decide(stop)
    state.take_signal_of_another_rank()
    state.signals.restore()
    assert delivered == []


def test_a_thread_delivers_no_signal_of_another_rank(delivered: list[str]) -> None:
    watch = SignalWatch(())
    thread = threading.Thread(target=watch.deliver_too, args=("SIGTERM",))
    thread.start()
    thread.join()
    watch.restore()
    assert delivered == []


PROGRAM = """
    import os, signal, sys
    from torchhooks import MonitoredLoop, SessionRunHook
    class Failing(SessionRunHook):
        def end(self, session):
            raise ValueError("the end failed")
    with MonitoredLoop(lambda: 0.5, hooks=[Failing()], signals=["SIGTERM"]) as loop:
        for step in loop.until_stop(range(9)):
            loop.run()
            print("printed", step)
            os.kill(os.getpid(), signal.SIGTERM)
        print("not reached")
    print("not reached")
"""


def test_the_process_ends_by_the_signal_and_loses_neither_errors_nor_output() -> None:
    ran = fork_program(PROGRAM)
    assert ran.returncode == -signal.SIGTERM
    assert ran.stdout == "printed 0\n"
    assert "ValueError: the end failed" in ran.stderr


def test_a_signal_leaves_the_with_block_from_the_middle_of_an_epoch(
    delivered: list[str], lines: list[tuple[str, str]], tmp_path: Path
) -> None:
    epochs, cleaned = [], []
    saver = CheckpointSaverHook(tmp_path, save_steps=100)
    with MonitoredLoop(lambda: None, MODEL, hooks=[saver], checkpoint_dir=tmp_path, signals=["SIGTERM"]) as loop:
        try:
            for epoch in loop.until_stop(range(3)):
                for number in loop.until_stop(range(5)):
                    loop.run()
                    if (epoch, number) == (1, 2):
                        signal.raise_signal(signal.SIGTERM)
                epochs.append(epoch)
        except Exception:
            epochs.append(-1)
        finally:
            cleaned.append(True)
        epochs.append(-2)
    assert (epochs, cleaned, delivered) == ([0], [True], ["SIGTERM"])
    assert ("INFO", "stopped by signal SIGTERM at step 8: the newest checkpoint is that of step 8") in lines
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-8")


def test_a_checkpoint_that_could_not_be_written_is_not_called_the_newest(
    delivered: list[str], lines: list[tuple[str, str]], tmp_path: Path
) -> None:
    class FullAfterTheFirst(Disk):
        def sync(self, file: BinaryIO) -> None:
            if (tmp_path / "model.ckpt-0").exists():
                raise OSError(errno.ENOSPC, "No space left on device")
            super().sync(file)

    def train() -> None:
        with MonitoredLoop(lambda: None, MODEL, hooks=hooks, checkpoint_dir=tmp_path, signals=["SIGTERM"]) as loop:
            for _ in loop.until_stop(range(3)):
                loop.run()
                signal.raise_signal(signal.SIGTERM)

    saver = Saver(async_save=True)
    saver.disk = FullAfterTheFirst()
    hooks = [CheckpointSaverHook(tmp_path, save_steps=100, saver=saver)]
    with pytest.raises(CheckpointError, match="No space left"):
        train()
    assert any(level == "INFO" and "SIGTERM at step 1: there were errors" in text for level, text in lines)
    assert delivered == ["SIGTERM"]


def in_plain_loops(way: str, folder: Path, stop_in: tuple[int, int] | None, **arguments: Any) -> tuple[Any, list[Any]]:
    """Make four runs in each of three epochs, and return the loop, and the batches for which a run began."""
    begun: list[Any] = []
    hooks = [CheckpointSaverHook(folder, save_steps=100)]
    step = None if way == "step" else lambda: None
    with MonitoredLoop(step, MODEL, hooks=hooks, checkpoint_dir=folder, signals=["SIGTERM"], **arguments) as loop:
        for epoch in loop.until_stop(range(3)):
            for number in range(4):
                if way == "step":
                    with loop.step():
                        begun.append((epoch, number))
                else:
                    loop.run()
                    begun.append((epoch, number))
                if (epoch, number) == stop_in:
                    signal.raise_signal(signal.SIGTERM)
            begun.append("epoch")
        begun.append("end")
    return loop, begun


@pytest.mark.parametrize("way", ["run", "step"])
def test_a_run_in_a_plain_loop_after_a_signal_saves_and_leaves(
    way: str, delivered: list[str], lines: list[tuple[str, str]], tmp_path: Path
) -> None:
    loop, begun = in_plain_loops(way, tmp_path, (1, 0))
    assert begun[-3:] == ["epoch", (1, 0), (1, 1)]
    assert (loop.global_step, loop.stop_reason, delivered) == (6, "signal SIGTERM", ["SIGTERM"])
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/model.ckpt-6"
    lines.clear()
    resumed, begun = in_plain_loops(way, tmp_path, None)
    assert (begun[0], resumed.global_step) == ((1, 0), 6 + 8)
    said = [text for level, text in lines if level == "WARNING" and "not exact" in text]
    assert said[0].startswith("the last item of until_stop's range had 2 runs when the checkpoint was saved")


def test_a_run_after_should_stop_has_said_so_leaves_too(delivered: list[str], tmp_path: Path) -> None:
    hooks = [CheckpointSaverHook(tmp_path, save_steps=100)]
    with MonitoredLoop(lambda: None, MODEL, hooks=hooks, checkpoint_dir=tmp_path, signals=["SIGTERM"]) as loop:
        for _ in loop.until_stop(range(5)):
            loop.run()
            if loop.global_step == 2:
                signal.raise_signal(signal.SIGTERM)
                assert loop.should_stop()
                loop.run()
                raise AssertionError("the block was left")
    assert (loop.global_step, delivered) == (2, ["SIGTERM"])
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/model.ckpt-2"


def test_the_first_of_several_runs_of_an_item_does_not_make_the_item_done(tmp_path: Path, delivered: list[str]) -> None:
    def train(stops: bool) -> list[int]:
        hooks, items = [CheckpointSaverHook(tmp_path, save_steps=100)], []
        with MonitoredLoop(lambda: None, MODEL, hooks=hooks, checkpoint_dir=tmp_path, signals=["SIGTERM"]) as loop:
            for item in loop.until_stop(range(5)):
                items.append(item)
                for _ in range(2):
                    if stops and loop.global_step == 4:
                        signal.raise_signal(signal.SIGTERM)
                    loop.run()
        return items

    assert (train(stops=True), train(stops=False)) == ([0, 1, 2], [2, 3, 4])


def test_a_run_after_an_inner_loop_is_left_behind_that_loop(tmp_path: Path, delivered: list[str]) -> None:
    def train(stops: bool) -> list[Any]:
        hooks, seen = [CheckpointSaverHook(tmp_path, save_steps=100)], list[Any]()
        with MonitoredLoop(lambda: None, MODEL, hooks=hooks, checkpoint_dir=tmp_path, signals=["SIGTERM"]) as loop:
            for epoch in loop.until_stop(range(2)):
                for batch in loop.until_stop(range(2)):
                    loop.run()
                    seen.append((epoch, batch))
                if stops:
                    signal.raise_signal(signal.SIGTERM)
                for number in range(3):
                    loop.run()
                    seen.append(f"{epoch} after {number}")
        return seen

    assert train(stops=True) == [(0, 0), (0, 1), "0 after 0"]
    assert train(stops=False)[:4] == ["0 after 0", "0 after 1", "0 after 2", (1, 0)]


def test_a_run_after_a_signal_outside_of_every_until_stop_is_an_error(delivered: list[str]) -> None:
    def train() -> None:
        with MonitoredLoop(lambda: None, signals=["SIGTERM"]) as loop:
            signal.raise_signal(signal.SIGTERM)
            loop.run()
            loop.run()

    with pytest.raises(LifecycleError, match="after a stop"):
        train()


def test_a_signal_in_the_code_after_an_epoch_leaves_with_the_next_item(delivered: list[str]) -> None:
    epochs = []
    with MonitoredLoop(lambda: None, signals=["SIGTERM"]) as loop:
        for epoch in loop.until_stop(range(3)):
            for _ in loop.until_stop(range(2)):
                loop.run()
            signal.raise_signal(signal.SIGTERM)
            epochs.append(epoch)
        epochs.append(-1)
    assert (epochs, loop.global_step, delivered) == ([0], 2, ["SIGTERM"])


def test_a_loop_that_no_with_block_closes_ends_as_by_a_hook(delivered: list[str]) -> None:
    loop = MonitoredLoop(lambda: signal.raise_signal(signal.SIGTERM), signals=["SIGTERM"])
    for _ in loop.until_stop(range(9)):
        loop.run()
    loop.close()
    assert (loop.global_step, delivered) == (1, ["SIGTERM"])


def interrupted(hook: SessionRunHook) -> KeyboardInterrupt:
    """Return the Ctrl-C that comes out of a loop whose second run got it."""

    def run() -> None:
        with MonitoredLoop(lambda: signal.raise_signal(signal.SIGINT), hooks=[hook], signals=["SIGINT"]) as loop:
            for _ in loop.until_stop(range(9)):
                loop.run()

    with pytest.raises(KeyboardInterrupt) as raised:
        run()
    return raised.value


def test_a_ctrl_c_comes_out_of_the_with_block_alone() -> None:
    interrupt = interrupted(RecordingHook())
    assert (interrupt.__cause__, interrupt.__suppress_context__) == (None, True)


def test_an_error_of_the_end_is_the_cause_of_a_ctrl_c() -> None:
    interrupt = interrupted(RecordingHook(raises={"end": ValueError("the end failed")}))
    assert isinstance(interrupt.__cause__, BaseExceptionGroup)
    assert "the end failed" in str(interrupt.__cause__.exceptions)


def test_a_ctrl_c_that_nothing_catches_prints_no_traceback() -> None:
    ran = fork_program("""
        import signal
        from torchhooks import MonitoredLoop
        with MonitoredLoop(lambda: signal.raise_signal(signal.SIGINT), signals=["SIGINT"]) as loop:
            for epoch in loop.until_stop(range(2)):
                for item in loop.until_stop(range(9)):
                    loop.run()
    """)
    assert ran.returncode == 130 or ran.returncode == -signal.SIGINT
    assert ran.stderr.splitlines() == [
        "INFO:torchhooks:stopped by signal SIGINT at step 1: no checkpoint was saved",
    ]


def test_only_the_traceback_of_that_ctrl_c_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, tb: printed.append(error))
    silent, others = KeyboardInterrupt(), [KeyboardInterrupt(), KeyError()]
    print_no_traceback_of(silent)
    for error in (silent, *others):
        sys.excepthook(type(error), error, None)
    assert printed == others


def test_an_error_after_a_ctrl_c_was_caught_prints_its_traceback() -> None:
    ran = fork_program("""
        import signal
        from torchhooks import MonitoredLoop
        try:
            with MonitoredLoop(lambda: signal.raise_signal(signal.SIGINT), signals=["SIGINT"]) as loop:
                for item in loop.until_stop(range(9)):
                    loop.run()
        except KeyboardInterrupt:
            pass
        raise OSError("later")
    """)
    assert ran.returncode == 1
    assert ran.stderr.endswith("OSError: later\n")


def test_an_item_that_was_taken_when_the_signal_arrived_is_still_used(delivered: list[str]) -> None:
    taken: list[int] = []
    used: list[int] = []

    def items() -> Iterator[int]:
        for item in range(9):
            taken.append(item)
            if item == 3:
                signal.raise_signal(signal.SIGTERM)
            yield item

    with MonitoredLoop(used.append, signals=["SIGTERM"]) as loop:
        for item in loop.until_stop(items()):
            loop.run(item)
    assert taken == used == [0, 1, 2, 3]


def raise_signals(*numbers: signal.Signals) -> None:
    for number in numbers:
        signal.raise_signal(number)


# -- several signals --------------------------------------------------------------------------------------------------


def test_a_first_ctrl_c_after_a_sigterm_still_saves(tmp_path: Path, delivered: list[str]) -> None:
    def step() -> None:
        raise_signals(signal.SIGTERM, signal.SIGINT)

    saver = CheckpointSaverHook(tmp_path, save_steps=100)
    with MonitoredLoop(step, MODEL, hooks=[saver], checkpoint_dir=tmp_path, signals=["SIGTERM", "SIGINT"]) as loop:
        for _ in loop.until_stop(range(9)):
            loop.run()
    assert (loop.stop_reason, delivered) == ("signal SIGTERM", ["SIGTERM", "SIGINT"])
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-1")


def test_the_second_ctrl_c_after_a_sigterm_interrupts(delivered: list[str]) -> None:
    def step() -> None:
        raise_signals(signal.SIGTERM, signal.SIGINT, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), MonitoredLoop(step, signals=["SIGTERM", "SIGINT"]) as loop:
        loop.run()
    assert delivered == ["SIGTERM"], "and the exception has delivered SIGINT"


def test_a_third_ctrl_c_interrupts_the_closing_too() -> None:
    class Impatient(SessionRunHook):
        def teardown(self) -> None:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    hook = Impatient()
    with pytest.raises(KeyboardInterrupt), MonitoredLoop(lambda: None, hooks=[hook], signals=["SIGINT"]):
        raise_signals(signal.SIGINT, signal.SIGINT)


@pytest.mark.parametrize("secs", [0.5, 1.5])
def test_a_second_sigterm_reaches_its_old_handler_at_once_unless_it_repeats_the_first(
    secs: float, delivered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0] + 0.0)
    watch = SignalWatch(["SIGTERM"])
    watch.install()
    signal.raise_signal(signal.SIGTERM)
    now[0] += secs
    signal.raise_signal(signal.SIGTERM)
    assert delivered == ([] if secs < 1 else ["SIGTERM"])
    watch.restore()
    assert delivered == ["SIGTERM"]


def test_a_second_sigterm_ends_the_process_by_default() -> None:
    program = """
        import signal
        import torchhooks.progress.signals
        torchhooks.progress.signals._SAME_REQUEST_SECS = 0.0
        watch = torchhooks.progress.signals.SignalWatch(["SIGTERM"])
        watch.install()
        signal.raise_signal(signal.SIGTERM)
        print("recorded", flush=True)
        signal.raise_signal(signal.SIGTERM)
        print("not reached")
    """
    ran = fork_program(program)
    assert (ran.returncode, ran.stdout) == (-signal.SIGTERM, "recorded\n")


# -- several loops ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_loops_closed_in_any_order_leave_the_old_handlers(order: tuple[int, ...], delivered: list[str]) -> None:
    old = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    given = [["SIGTERM"], ["SIGTERM", "SIGINT", "SIGTERM"], ["SIGINT", "SIGTERM"]]
    loops = [MonitoredLoop(lambda: 0.5, signals=signals) for signals in given]
    left = set(order)
    for index in order:
        loops[index].close()
        left.discard(index)
        assert (signal.getsignal(signal.SIGTERM) is old[0]) is not bool(left)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == old
    signal.raise_signal(signal.SIGTERM)
    assert delivered == ["SIGTERM"]


def test_an_inner_loop_that_outlives_the_outer_one_still_stops(delivered: list[str]) -> None:
    outer, inner = (MonitoredLoop(lambda: 0.5, signals=["SIGTERM"]) for _ in range(2))
    outer.close()
    signal.raise_signal(signal.SIGTERM)
    assert (inner.should_stop(), delivered) == (True, [])
    inner.close()
    assert delivered == ["SIGTERM"]


def test_a_signal_reaches_the_loop_that_is_still_open(delivered: list[str]) -> None:
    outer, inner = (MonitoredLoop(lambda: 0.5, signals=["SIGTERM"]) for _ in range(2))
    signal.raise_signal(signal.SIGTERM)
    inner.close()
    assert (outer.should_stop(), delivered) == (True, [])
    outer.close()
    assert delivered == ["SIGTERM"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_handler_on_top_of_that_of_a_closed_loop_keeps_working(number: signal.Signals, delivered: list[str]) -> None:
    loop = MonitoredLoop(lambda: 0.5, signals=[number])
    ours = signal.getsignal(number)
    signal.signal(number, lambda *arguments: ours(*arguments))  # type: ignore[operator,misc]
    loop.close()
    signal.raise_signal(number)
    signal.raise_signal(number)
    assert delivered == [number.name] * 2
    signal.signal(number, ours)
    signal.raise_signal(number)
    assert delivered == [number.name] * 3


def test_a_loop_closed_in_another_thread_passes_its_signals_on(delivered: list[str]) -> None:
    loop = MonitoredLoop(lambda: 0.5, signals=["SIGTERM"])
    thread = threading.Thread(target=loop.close)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGTERM)
    assert delivered == ["SIGTERM"]


@pytest.mark.parametrize("old", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_closed_loop_passes_signals_on_as_if_it_did_not_handle_them(old: signal.Handlers) -> None:
    before = signal.signal(signal.SIGURG, old)  # its default is to do nothing
    try:
        loop = MonitoredLoop(lambda: 0.5, signals=["SIGURG"])
        thread = threading.Thread(target=loop.close)
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGURG)
        if old is signal.SIG_DFL:
            assert signal.getsignal(signal.SIGURG) is old
        assert loop.stop_reason == "closed"
    finally:
        signal.signal(signal.SIGURG, before)


# -- interrupts -------------------------------------------------------------------------------------------------------


class InterruptedAt:
    """Raises KeyboardInterrupt at the ``number``-th instruction of the functions with one of ``names``."""

    def __init__(self, names: Container[str], number: int) -> None:
        self.names, self.left = names, number

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_name not in self.names or frame.f_globals["__name__"] != "torchhooks.progress.signals":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> None:
        self.before = sys.gettrace()
        frame: Any = inspect.currentframe()
        frame.f_trace_opcodes = True  # Python 3.12 looks at this only where tracing begins
        sys.settrace(self)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize("methods", [("install", "_put"), ("_remove_handlers", "_owner")], ids=["install", "remove"])
def test_an_interrupt_anywhere_in_the_installation_or_the_removal_leaves_no_handler(
    methods: tuple[str, str], delivered: list[str]
) -> None:
    old, number = handlers(), 0
    interrupted = True
    while interrupted:
        number += 1
        interrupted = False
        try:
            with InterruptedAt(methods, number):
                MonitoredLoop(lambda: 0.5, signals=["SIGTERM", "SIGINT"]).close()
        except KeyboardInterrupt:
            interrupted = True
        assert handlers() == old, number
    assert number > 50


def test_an_interrupt_between_two_calls_of_the_closing_leaves_no_handler(delivered: list[str]) -> None:
    class Interrupting(list[Any]):
        def __iter__(self) -> Any:
            raise KeyboardInterrupt

    old = handlers()
    loop = MonitoredLoop(lambda: 0.5, signals=["SIGTERM"])
    loop.session.savers = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        loop.close()
    assert handlers() == old


def test_an_interrupt_by_the_delivery_comes_out_itself_after_other_errors(
    lines: list[tuple[str, str]], delivered: list[str]
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores SIGINT
    hook = RecordingHook(raises={"end": ValueError("the end failed")})
    with pytest.raises(KeyboardInterrupt) as caught, MonitoredLoop(lambda: 0.5, hooks=[hook], signals=["SIGINT"]):
        signal.raise_signal(signal.SIGINT)
    assert isinstance(caught.value.__cause__, BaseExceptionGroup)
    assert [str(error) for error in caught.value.__cause__.exceptions] == ["the end failed"]
    assert [text for level, text in lines if level == "ERROR"] == [
        "an error, logged now because signal SIGINT may end the process"
    ]


def test_every_signal_is_delivered_even_if_the_first_one_raises(delivered: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), MonitoredLoop(lambda: 0.5, signals=["SIGTERM", "SIGINT"]):
        raise_signals(signal.SIGINT, signal.SIGTERM)
    assert delivered == ["SIGTERM"]


FAILING = """
    import os, signal
    from torchhooks import MonitoredLoop
    def step():
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("the step failed")
    with MonitoredLoop(step, signals=["SIGTERM"]) as loop:
        loop.run()
"""


def test_an_error_in_the_step_after_a_signal_is_shown_before_the_signal_ends_the_process() -> None:
    ran = fork_program(FAILING)
    assert ran.returncode == -signal.SIGTERM
    assert re.search(r"in step\n(    .*\n)?ValueError: the step failed", ran.stderr)  # Python 3.13 shows the line


def test_an_error_in_the_step_after_a_ctrl_c_comes_out() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def step() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("the step failed")

    with pytest.raises(ValueError, match="the step failed"), MonitoredLoop(step, signals=["SIGINT"]) as loop:
        loop.run()


# -- exit codes -------------------------------------------------------------------------------------------------------

EXIT = """
    import atexit, signal, sys
    from torchhooks import MonitoredLoop
    if "eval" in sys.argv:  # after which CPython no longer knows that KeyboardInterrupt ended the program
        atexit.register(lambda: eval("1"))
    if "plain" in sys.argv:
        raise KeyboardInterrupt
    with MonitoredLoop(lambda: 0.5, signals=["SIGTERM", "SIGINT"]) as loop:
        signal.raise_signal(signal.Signals[sys.argv[1]])
"""


def exit_code(*arguments: str) -> int:
    return fork_program(EXIT, *arguments).returncode


def test_sigterm_and_ctrl_c_end_the_process_by_the_signal() -> None:
    assert exit_code("SIGTERM") == exit_code("SIGTERM", "eval") == -signal.SIGTERM
    assert exit_code("SIGINT") == -signal.SIGINT


def test_the_exit_code_of_a_ctrl_c_is_that_of_any_keyboard_interrupt() -> None:
    assert exit_code("SIGINT", "eval") == exit_code("SIGINT", "eval", "plain")


# -- errors of the data -----------------------------------------------------------------------------------------------

LOST = "DataLoader worker (pid 7) is killed by signal: Terminated. "


class Lost:
    """Yields three items, then raises ``error`` after calling ``before``."""

    def __init__(self, error: Exception, before: Callable[[], object] = bool) -> None:
        self.error, self.before = error, before

    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        self.before()
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError(LOST), ValueError("any other")])
def test_an_error_of_the_data_after_a_signal_is_part_of_the_stop(
    error: Exception, tmp_path: Path, delivered: list[str], lines: list[tuple[str, str]]
) -> None:
    saver = CheckpointSaverHook(tmp_path, save_steps=100)
    with MonitoredLoop(lambda _: 0.5, MODEL, hooks=[saver], checkpoint_dir=tmp_path, signals=["SIGTERM"]) as loop:
        for item in loop.until_stop(Lost(error, lambda: signal.raise_signal(signal.SIGTERM))):
            loop.run(item)
    assert (loop.stop_reason, delivered) == ("signal SIGTERM", ["SIGTERM"])
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-3")
    assert ("WARNING", "the data raised an error after signal SIGTERM, which stops the loop") in lines


@pytest.mark.parametrize("error", [RuntimeError(LOST), EOFError(), ConnectionResetError()])
def test_a_signal_right_after_the_loss_of_a_worker_counts_too(
    error: Exception, delivered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchhooks.progress.loop_state, "_LOST_WORKER_SECS", 300.0)
    later = threading.Timer(0.05, signal.raise_signal, (signal.SIGTERM,))
    with MonitoredLoop(lambda _: 0.5, signals=["SIGTERM"]) as loop:
        for item in loop.until_stop(Lost(error, later.start)):
            loop.run(item)
    assert (loop.global_step, loop.stop_reason, delivered) == (3, "signal SIGTERM", ["SIGTERM"])


def test_a_signal_right_after_the_socket_of_a_worker_is_gone_counts_too(
    tmp_path: Path, delivered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchhooks.progress.loop_state, "_LOST_WORKER_SECS", 300.0)

    def items() -> Iterator[int]:
        yield 0
        threading.Timer(0.05, signal.raise_signal, (signal.SIGTERM,)).start()
        multiprocessing.connection.Client(str(tmp_path / "gone"))  # raises FileNotFoundError

    with MonitoredLoop(lambda _: 0.5, signals=["SIGTERM"]) as loop:
        for item in loop.until_stop(items()):
            loop.run(item)
    assert (loop.global_step, loop.stop_reason, delivered) == (1, "signal SIGTERM", ["SIGTERM"])


@pytest.mark.parametrize("signals", [[], ["SIGTERM"]])
@pytest.mark.parametrize("error", [RuntimeError(LOST), ValueError("any other")])
def test_an_error_of_the_data_without_a_signal_is_an_error(
    error: Exception, signals: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without signals, nothing is waited for.
    monkeypatch.setattr(torchhooks.progress.loop_state, "_LOST_WORKER_SECS", 0.0 if signals else 300.0)
    with pytest.raises(type(error)) as caught, MonitoredLoop(lambda: 0.5, signals=signals) as loop:
        list(loop.until_stop(Lost(error)))
    assert caught.value is error


def test_an_error_while_finished_items_are_skipped_is_part_of_the_stop(tmp_path: Path, delivered: list[str]) -> None:
    def loop() -> MonitoredLoop[float]:
        saver = CheckpointSaverHook(tmp_path, save_steps=1)
        return MonitoredLoop(lambda: 0.5, MODEL, hooks=[saver], checkpoint_dir=tmp_path, signals=["SIGTERM"])

    with loop() as first:
        for item in first.until_stop(Items()):
            first.run()
            if item == 4:
                first.request_stop()
    with loop() as second:
        assert list(second.until_stop(Items(lost_at=3))) == []
    assert (second.stop_reason, delivered) == ("signal SIGTERM", ["SIGTERM"])
    with loop() as third:
        assert list(third.until_stop(Items())) == [5, 6, 7, 8]


def test_an_error_of_iter_after_a_signal_is_part_of_the_stop(delivered: list[str]) -> None:
    class Interrupted:
        def __iter__(self) -> Iterator[int]:
            signal.raise_signal(signal.SIGTERM)
            raise RuntimeError("a worker was lost")

    with MonitoredLoop(lambda: 0.5, signals=["SIGTERM"]) as loop:
        assert list(loop.until_stop(Interrupted())) == []
    assert (loop.stop_reason, delivered) == ("signal SIGTERM", ["SIGTERM"])


class Items:
    """Yields nine items; before the item ``lost_at``, a signal arrives and the worker is lost."""

    def __init__(self, lost_at: int | None = None) -> None:
        self.lost_at = lost_at

    def __iter__(self) -> Iterator[int]:
        for item in range(9):
            if item == self.lost_at:
                signal.raise_signal(signal.SIGTERM)
                raise RuntimeError(LOST)
            yield item


def test_the_death_of_a_worker_interrupts_only_the_wait_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of SIGCHLD that torch installs raises wherever the main thread is."""
    raised: list[int] = []

    def handler(number: int, frame: Any) -> None:
        raised.append(number)
        raise RuntimeError(LOST)

    handler.__module__ = "torch.utils.data._utils.signal_handling"
    before = signal.signal(signal.SIGCHLD, handler)
    monkeypatch.setattr(torchhooks.progress.loop_state, "_LOST_WORKER_SECS", 0.0)

    def __next__() -> None:  # noqa: N807
        signal.raise_signal(signal.SIGCHLD)

    def body(item: int) -> float:
        with MonitoredLoop(lambda: 0.5, signals=["SIGTERM"]) as inner:
            assert list(inner.until_stop([1])) == [1]
            signal.raise_signal(signal.SIGCHLD)
        return 0.5

    def iterate(items: Iterable[int]) -> None:
        with MonitoredLoop(body, signals=["SIGTERM"]) as loop:
            for item in loop.until_stop(items):
                loop.run(item)

    waiting = FunctionType(__next__.__code__, {"__name__": "torch.utils.data.dataloader", "signal": signal})
    lost = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    try:
        with pytest.raises(RuntimeError) as caught:
            iterate(Lost(lost))
        assert caught.value is lost
        assert raised == [signal.SIGCHLD] * 3
        assert lost.__notes__[0] == f"torchhooks: RuntimeError: {LOST}"
        with pytest.raises(RuntimeError, match="killed by signal"):
            iterate(Lost(ValueError("not reached"), waiting))
        assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)
        SignalWatch.lost_worker = None


def test_a_loop_in_another_thread_leaves_torchs_handler_of_lost_workers_alone() -> None:
    dataset: Any = [1.0, 2.0]
    for _ in torch.utils.data.DataLoader(dataset, num_workers=1):  # has torch install its handler
        pass
    before = signal.getsignal(signal.SIGCHLD)
    results: list[float] = []

    def train() -> None:
        with MonitoredLoop(float) as loop:
            results.extend(loop.run(value) for value in loop.until_stop(dataset))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert results == [1.0, 2.0]
    assert signal.getsignal(signal.SIGCHLD) is before
