"""Signals stop a loop cleanly after the current run, and reach their old handlers once the loop is closed."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    CheckpointSaverListener,
    Coordinator,
    GlobalStepWaiterHook,
    LooperThread,
    MonitoredLoop,
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    latest_checkpoint,
)
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
    assert (epochs, after) == ([0], [0, 0]), "saved at creation, and at the item: before the end of the epoch"
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
    assert caught.value.__notes__[-1] == "torchhooks: not recovered from, because signal SIGTERM arrived"
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


def test_a_single_name_is_rejected() -> None:
    with pytest.raises(TypeError, match="give a list of names"):
        MonitoredLoop(lambda: 0.5, signals="SIGTERM")


PROGRAM = """
    import os, signal, sys
    from torchhooks import MonitoredLoop, SessionRunHook
    class Failing(SessionRunHook):
        def end(self, session):
            raise ValueError("the end failed")
    with MonitoredLoop(lambda: 0.5, hooks=[Failing()], signals=["SIGTERM"]) as loop:
        for step in loop.until_stop(range(9)):
            loop.run()
            os.kill(os.getpid(), signal.SIGTERM)
        print("printed", loop.stop_reason)
    print("not reached")
"""


def test_the_process_ends_by_the_signal_and_loses_neither_errors_nor_output() -> None:
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, check=False)
    assert ran.returncode == -signal.SIGTERM
    assert ran.stdout == "printed signal SIGTERM\n"
    assert "ValueError: the end failed" in ran.stderr


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
