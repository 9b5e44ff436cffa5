"""An error of a run that the script catches: the run does not count, and the loop goes on, as in TensorFlow."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices import FakeDevice

from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    Coordinator,
    Due,
    LifecycleError,
    MonitoredLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepContext,
    StopAtStepHook,
    list_checkpoints,
)
from torchhooks.__main__ import main
from torchhooks.testing import RecordingHook

Lines = list[tuple[str, str]]
Loop = MonitoredLoop[float]
Make = Callable[[Loop, int], object]


def step(number: int) -> float:
    if number < 0:
        raise ValueError(f"bad batch {number}.\nMore of it")
    return 0.5


def by_run(loop: Loop, number: int) -> None:
    loop.run(number)


def by_step(loop: Loop, number: int) -> None:
    with loop.step() as outputs:
        outputs["loss"] = step(number)


def by_step_fn(loop: Loop, number: int) -> None:
    loop.run_step_fn(lambda step_context: step_context.run_with_hooks(number))


ways = pytest.mark.parametrize("make", [by_run, by_step, by_step_fn])


def skipping(loop: Loop, numbers: list[int], make: Make = by_run, error: type[BaseException] = ValueError) -> list[int]:
    """Train in a ``with`` block, skip what fails, and return it."""
    skipped = []
    with loop:
        for number in loop.until_stop(numbers):
            try:
                make(loop, number)
            except error:
                skipped.append(number)
    return skipped


def methods(hook: RecordingHook) -> list[str]:
    return [call[0] for call in hook.calls]


def warnings(lines: Lines) -> list[str]:
    return [text for level, text in lines if level == "WARNING"]


# -- the run ----------------------------------------------------------------------------------------------------------


@ways
def test_a_bad_batch_is_skipped_and_two_lines_say_so(make: Make, lines: Lines) -> None:
    hook = RecordingHook()
    loop: Loop = MonitoredLoop(step, hooks=[hook])
    assert skipping(loop, [1, 2, -3, 4, -5, 6], make) == [-3, -5]
    assert (loop.global_step, loop.stop_reason) == (4, "data ended")
    assert methods(hook).count("before_run") == 6
    assert methods(hook)[-3:] == ["after_run", "end", "teardown"]
    assert warnings(lines) == [
        "in run 3, epoch 0, item 2: ValueError: bad batch -3. The run does not count; the script caught the error and "
        "goes on. Further errors are only counted",
        "the script caught 2 errors, after which the loop went on",
    ]


@ways
def test_an_error_of_a_step_has_a_note_with_the_run_the_epoch_and_the_item(make: Make) -> None:
    def train(loop: Loop) -> None:
        with loop:
            for numbers in loop.until_stop([[1, 2], [3, -4]]):
                for number in loop.until_stop(numbers):
                    make(loop, number)

    with pytest.raises(ValueError, match="bad batch") as raised:
        train(MonitoredLoop(step))
    assert raised.value.__notes__ == ["torchhooks: in run 4, epoch 1, item 1"]


def test_outside_of_until_stop_the_note_has_the_run_alone() -> None:
    loop = MonitoredLoop(step)
    loop.run(1)
    with pytest.raises(ValueError, match="bad batch") as raised, loop:
        loop.run(-1)
    assert raised.value.__notes__ == ["torchhooks: in run 2"]


@ways
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, AbortedError])
def test_so_it_is_with_any_error(make: Make, error: type[BaseException]) -> None:
    hook = RecordingHook(raises={("before_run", 2): error})
    loop: Loop = MonitoredLoop(step, hooks=[hook])
    assert skipping(loop, [1, 2, 3], make, error) == [2]
    assert loop.global_step == 2
    assert methods(hook)[-2:] == ["end", "teardown"]


@ways
def test_what_the_last_run_raised_ends_nothing_either(make: Make) -> None:
    hook = RecordingHook()
    assert skipping(MonitoredLoop(step, hooks=[hook]), [1, -2], make) == [-2]
    assert methods(hook)[-2:] == ["end", "teardown"]


def test_an_error_that_leaves_the_loop_is_not_called_caught(lines: Lines) -> None:
    with pytest.raises(ValueError, match="bad batch"), MonitoredLoop(step) as loop:
        loop.run(-1)
    assert warnings(lines) == []


def test_an_error_after_others_that_were_caught_is_not_counted(lines: Lines) -> None:
    loop = MonitoredLoop(step)
    with contextlib.suppress(ValueError):
        loop.run(-1)
    with pytest.raises(ValueError, match="bad batch -2"), loop:
        loop.run(-2)
    assert warnings(lines)[-1] == "the script caught one error, after which the loop went on"


def test_one_error_that_is_raised_again_and_again_is_counted_each_time(lines: Lines) -> None:
    def fail() -> None:
        raise error

    error = ValueError("always this one")
    with MonitoredLoop(fail) as loop:
        for _ in range(3):
            with contextlib.suppress(ValueError):
                loop.run()
    assert error.__notes__ == ["torchhooks: in run 1"]
    assert warnings(lines)[-1] == "the script caught 3 errors, after which the loop went on"


class NotelessError(Exception):
    """Refuses notes."""

    def add_note(self, note: str) -> None:
        raise TypeError("no notes")


def test_an_error_that_takes_no_note_is_recognized_as_well(lines: Lines) -> None:
    def fail(number: int) -> None:
        raise NotelessError(number)

    loop = MonitoredLoop(fail)
    with contextlib.suppress(NotelessError):
        loop.run(1)
    with pytest.raises(NotelessError), loop:
        loop.run(2)
    assert warnings(lines)[-1] == "the script caught one error, after which the loop went on"


def test_a_run_in_the_except_clause_is_made(lines: Lines) -> None:
    with MonitoredLoop(step) as loop:
        for number in loop.until_stop([1, -2, 3]):
            try:
                loop.run(number)
            except ValueError:
                loop.run(abs(number))
    assert loop.global_step == 3
    assert len(warnings(lines)) == 2


@ways
@pytest.mark.parametrize("hooks", [[], ["loss"]], ids=["idle", "with a hook"])
def test_nothing_of_the_error_is_kept(make: Make, hooks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A script frees memory after a run that ran out of it."""
    held: list[weakref.ref[Any]] = []

    def fail(number: int) -> float:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        raise MemoryError

    monkeypatch.setitem(globals(), "step", fail)  # by_step() calls it
    gc.disable()
    try:
        loop: Loop = MonitoredLoop(fail, hooks=[RecordingHook(fetch) for fetch in hooks])
        assert skipping(loop, [1, 2], make, MemoryError) == [1, 2]
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


def test_a_step_that_the_optimizer_made_stays_counted() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    hook = RecordingHook("global_step")

    def fails_late(number: int) -> None:
        optimizer.step()
        step(number)

    loop: Any = MonitoredLoop(fails_late, optimizer=optimizer, hooks=[hook], step_unit="optimizer_step")
    assert skipping(loop, [1, -2, 3]) == [-2]
    assert loop.global_step == 3
    assert hook.results == [1, 3]


def test_a_hook_that_became_due_in_it_is_called_in_the_next_run() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def fails_late(number: int) -> None:
        optimizer.step()
        step(number)

    stop = StopAtStepHook(last_step=2)
    loop: Any = MonitoredLoop(fails_late, optimizer=optimizer, hooks=[stop], step_unit="optimizer_step")
    assert skipping(loop, [1, -2, 3, 4, 5]) == [-2]
    assert (loop.global_step, loop.stop_reason) == (3, "StopAtStepHook: step 3")


def test_a_stop_that_a_hook_asked_for_in_it_is_gone_and_one_of_the_caller_is_not() -> None:
    loop: Loop
    loop = MonitoredLoop(step, hooks=[RecordingHook(stop_at=2), RecordingHook(raises={("after_run", 2): ValueError})])
    assert skipping(loop, [1, 2, 3]) == [2]
    assert loop.stop_reason == "data ended"

    def ask(number: int) -> None:
        loop.request_stop("enough")
        step(number)

    loop = MonitoredLoop(ask)  # type: ignore[arg-type]
    assert skipping(loop, [-1, 2, 3]) == [-1]
    assert (loop.global_step, loop.stop_reason) == (0, "request_stop: enough")


def test_a_line_says_that_the_run_counts_if_a_hook_failed_after_the_step(lines: Lines) -> None:
    hook = RecordingHook(raises={("after_run", 2): ValueError("full")})
    loop: Loop = MonitoredLoop(step, hooks=[hook])
    assert skipping(loop, [1, 2, 3]) == [2]
    assert loop.global_step == 3
    assert warnings(lines)[0].startswith("in run 2, epoch 0, item 1: ValueError: full. The run counts; the script ")


def test_an_error_that_the_loop_recovers_from_is_not_called_caught(tmp_path: Path, lines: Lines) -> None:
    def make(make: Make) -> None:
        failing = RecordingHook(raises={("before_run", 2): AbortedError})
        saver = CheckpointSaverHook(tmp_path, save_steps=1)
        with MonitoredLoop(step, hooks=[saver, failing], checkpoint_dir=tmp_path) as loop:
            for number in loop.until_stop(range(3), resume=False):
                make(loop, number)

    for way in (by_run, by_step, by_step_fn):
        make(way)
    assert sum("recovering now" in text for text in warnings(lines)) == 3
    assert not any("the script caught" in text for text in warnings(lines))


def test_after_runs_that_all_failed_nothing_is_said_of_data_without_a_run(lines: Lines) -> None:
    skipping(MonitoredLoop(step), [-1, -2])
    assert [text for text in warnings(lines) if "there was no run" in text] == []


@pytest.mark.parametrize("first", [True, False], ids=["before it", "behind it"])
def test_a_hook_is_due_again_only_if_it_was_not_called_because_another_one_failed(first: bool) -> None:
    class EveryThird(SessionRunHook):
        def begin(self) -> None:
            self.next_step, self.seen = 3, [0]

        def next_due(self) -> Due:
            return Due(step=self.next_step)

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            self.seen.append(run_context.session.global_step)
            self.next_step += 3

    every_third, failing = EveryThird(), RecordingHook(raises={("after_run", 3): ValueError})
    loop: Loop = MonitoredLoop(step, hooks=[every_third, failing] if first else [failing, every_third])
    assert skipping(loop, list(range(9))) == [2]
    assert every_third.seen == ([0, 3, 6, 9] if first else [0, 4, 6, 9])


# -- between two runs -------------------------------------------------------------------------------------------------


class Failing(SessionRunHook):
    """Has a call that fails at the end of the item in which it is called for the n-th time."""

    def __init__(self, number: int, error: Exception) -> None:
        self.left, self.error = number, error

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.left -= 1
        if not self.left:
            run_context.after_item(self.fail)

    def fail(self) -> None:
        raise self.error


def test_an_error_at_the_end_of_an_item_that_is_caught_around_the_loop_over_the_data_does_not_end_the_loop(
    lines: Lines,
) -> None:
    hook = RecordingHook()
    with MonitoredLoop(step, hooks=[Failing(2, OSError("disk")), hook]) as loop:
        for _ in loop.until_stop(range(2)):
            with contextlib.suppress(OSError):
                for number in loop.until_stop(range(4)):
                    loop.run(number)
    assert loop.global_step == 2 + 4
    assert loop.stop_reason == "data ended"
    assert methods(hook)[-2:] == ["end", "teardown"]
    assert warnings(lines)[0].startswith("in run 2, epoch 0, item 1: OSError: disk. The run counts; the script caught")


# -- StopIteration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [by_run, by_step_fn])
def test_a_warning_says_where_a_step_raised_stop_iteration_when_that_leaves_the_block(make: Make, lines: Lines) -> None:
    def exhausted(number: int) -> float:
        return next(iter(()))

    hook = RecordingHook()
    with MonitoredLoop(exhausted, hooks=[hook]) as loop:
        with contextlib.suppress(StopIteration):
            make(loop, 1)
        assert not any("StopIteration%" in text or "which ends the loop" in text for _, text in lines)
        make(loop, 2)
    assert methods(hook)[-2:] == ["end", "teardown"]
    assert "the step raised StopIteration (test_caught.py:" in warnings(lines)[-2]


def test_so_it_is_if_the_body_of_step_raised_it(lines: Lines) -> None:
    with MonitoredLoop() as loop, loop.step():
        next(iter(()))
    assert "the step raised StopIteration (test_caught.py:" in warnings(lines)[0]


def test_nothing_is_said_of_a_stop_iteration_of_a_hook_or_of_the_script(lines: Lines) -> None:
    with MonitoredLoop(step, hooks=[RecordingHook(raises={"before_run": StopIteration})]) as loop:
        loop.run(1)
    with MonitoredLoop(step):
        raise StopIteration
    assert warnings(lines) == []


# -- background threads -----------------------------------------------------------------------------------------------


class Reporting(SessionRunHook):
    """Has a thread report an error in the n-th ``before_run``."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.left, self.error = number, error

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self.coord = coord

    def before_run(self, run_context: SessionRunContext) -> None:
        self.left -= 1
        if not self.left:
            thread = threading.Thread(target=self.coord.request_stop, args=[self.error])
            thread.start()
            thread.join()


@pytest.mark.parametrize("make", [by_run, by_step_fn])
@pytest.mark.parametrize("error", [ValueError("queue.Empty"), StopIteration("queue.Empty")])
def test_a_run_that_fails_because_a_thread_lost_its_connection_is_recovered_from(
    make: Make, error: Exception, tmp_path: Path, lines: Lines
) -> None:
    consequence = RecordingHook(raises={("before_run", 2): error})
    saver = CheckpointSaverHook(tmp_path, save_steps=1)
    hooks = [saver, Reporting(2, AbortedError("connection lost")), consequence]
    with MonitoredLoop(step, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for number in loop.until_stop(range(4)):
            make(loop, number)
    assert (loop.global_step, loop.stop_reason) == (4, "data ended")
    assert any("recovering now from AbortedError: connection lost" in text for text in warnings(lines))
    assert [text for level, text in lines if level == "ERROR"] == []


@pytest.mark.parametrize("error", [ValueError("disk"), AbortedError("no checkpoint to restore")])
def test_an_error_of_a_thread_while_a_batch_is_loaded_loses_nothing(error: Exception, tmp_path: Path) -> None:
    def load() -> Iterator[int]:
        yield 1
        reporting.coord.request_stop(error)
        yield 2
        yield 3

    reporting, recorder = Reporting(99, error), RecordingHook()
    loop = MonitoredLoop(step, hooks=[reporting, CheckpointSaverHook(tmp_path, save_steps=100), recorder])
    for number in loop.until_stop(load()):
        loop.run(number)
    with pytest.raises(type(error)) as raised:
        loop.close()
    assert raised.value is error
    assert loop.global_step == 2
    assert methods(recorder)[-3:] == ["after_run", "end", "teardown"]
    assert list_checkpoints(tmp_path)[-1].step == 2


@pytest.mark.parametrize("make", [by_run, by_step_fn])
def test_a_run_raises_the_error_of_a_thread_if_the_loop_would_recover_from_its_own(make: Make, tmp_path: Path) -> None:
    consequence = RecordingHook(raises={("before_run", 2): AbortedError})
    hooks = [CheckpointSaverHook(tmp_path, save_steps=1), Reporting(2, KeyError("thread")), consequence]
    loop = MonitoredLoop(step, hooks=hooks, checkpoint_dir=tmp_path)
    make(loop, 1)
    with pytest.raises(KeyError, match="thread") as raised:
        make(loop, 2)
    assert isinstance(raised.value.__context__, AbortedError)
    assert loop.should_stop()
    with pytest.raises(KeyError, match="thread"):
        loop.close()


def test_an_error_of_the_constructor_after_one_in_a_thread_is_its_context() -> None:
    class Failing(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            coord.request_stop(KeyError("thread"))
            raise StopIteration("constructor")

    with pytest.raises(KeyError, match="thread") as raised:
        MonitoredLoop(step, hooks=[Failing()])
    assert type(raised.value.__context__) is StopIteration


def test_an_error_of_the_body_after_one_in_a_thread_is_its_context() -> None:
    reporting = Reporting(1, KeyError("thread"))

    def train() -> None:
        with MonitoredLoop(step, hooks=[reporting]) as loop:
            loop.run(1)
            raise OSError("body")

    with pytest.raises(KeyError, match="thread") as raised:
        train()
    assert isinstance(raised.value.__context__, OSError)


@pytest.mark.parametrize("data", [False, True], ids=["after the last run", "at the end of the data"])
def test_a_recoverable_error_of_a_thread_does_not_fail_a_job_that_is_done(
    data: bool, tmp_path: Path, lines: Lines
) -> None:
    class Late(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            self.coord = coord

        def fail(self) -> None:
            self.coord.request_stop(AbortedError("connection lost"))

    late, recorder = Late(), RecordingHook()
    saver = CheckpointSaverHook(tmp_path, save_steps=100)
    loop = MonitoredLoop(step, hooks=[late, saver, recorder], checkpoint_dir=None if data else tmp_path)
    with loop:
        for number in loop.until_stop(range(3)) if data else range(3):
            loop.run(number)
        late.fail()
    assert methods(recorder)[-2:] == ["end", "teardown"]
    assert list_checkpoints(tmp_path)[-1].step == 3
    assert ("ERROR", "a background thread failed, and is not needed any more") in lines


def test_a_recovery_that_a_stop_prevents_is_noted_with_its_reason(tmp_path: Path) -> None:
    def step_fn(step_context: StepContext[float]) -> None:
        step_context.run_with_hooks(1)
        raise AbortedError

    hooks = [CheckpointSaverHook(tmp_path, save_steps=1), StopAtStepHook(last_step=1)]
    loop = MonitoredLoop(step, hooks=hooks, checkpoint_dir=tmp_path)
    with pytest.raises(AbortedError) as raised, loop:
        loop.run_step_fn(step_fn)
    why = "the loop stops (StopAtStepHook: step 1)"
    assert raised.value.__notes__ == [f"torchhooks: not recovered from, because {why}", "torchhooks: after run 1"]


def test_a_stop_of_a_thread_ends_with_its_session(tmp_path: Path) -> None:
    failing = RecordingHook(raises={("before_run", 2): AbortedError})
    hooks = [CheckpointSaverHook(tmp_path, save_steps=1), Reporting(2, StopIteration()), failing]
    with MonitoredLoop(step, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for number in loop.until_stop(range(4)):
            loop.run(number)
    assert (loop.global_step, loop.stop_reason) == (4, "data ended")


def test_a_stop_that_a_thread_asked_the_loop_for_stays(tmp_path: Path) -> None:
    def fail(number: int) -> float:
        thread = threading.Thread(target=loop.request_stop, args=["time is up"])
        thread.start()
        thread.join()
        if next(failures):
            raise AbortedError
        return 0.5

    failures = iter([True, False, False])
    saver = CheckpointSaverHook(tmp_path, save_steps=1)
    loop = MonitoredLoop(fail, hooks=[saver], checkpoint_dir=tmp_path)
    with loop:
        for number in loop.until_stop(range(4)):
            loop.run(number)
    assert (loop.global_step, loop.stop_reason) == (1, "request_stop: time is up")


def test_the_run_that_is_allowed_after_the_stop_of_a_thread_leaves_the_loop_stopped() -> None:
    class Stopping(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            self.coord = coord

    hook = Stopping()
    with MonitoredLoop(lambda: hook.coord.request_stop(), hooks=[hook]) as loop:
        loop.run()
        loop.run()  # an idle one, which a script makes that did not ask should_stop()
        assert "stopped (thread MainThread)" in repr(loop)
        with pytest.raises(LifecycleError, match="after a stop"):
            loop.run()


# -- values that arrive later -----------------------------------------------------------------------------------------


class Refusing(SessionRunHook):
    """Raises an error about each negative loss, which arrives some runs later."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs("loss")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        def refuse(loss: Any) -> None:
            if loss < 0:
                raise ValueError(f"loss {loss:g}")

        run_context.when_ready(run_values.results, refuse, max_lag_runs=2)


def test_on_a_device_the_error_of_a_hook_is_caught_some_runs_later(lines: Lines) -> None:
    with FakeDevice(lag=2):
        recorder = RecordingHook()
        loop: Any = MonitoredLoop(torch.tensor, hooks=[Refusing(), recorder])
        assert skipping(loop, [1.0, -2.0, 3.0, -4.0, 5.0, 6.0, 7.0]) == [3.0, 5.0]  # type: ignore[list-item]
    assert loop.global_step == 7
    assert methods(recorder)[-3:] == ["after_run", "end", "teardown"]
    assert "in run 3, epoch 0, item 2: ValueError: loss -2. The run counts" in warnings(lines)[0]


# -- NaN --------------------------------------------------------------------------------------------------------------


class Losses:
    """A step that returns losses one after the other."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = iter(losses)

    def __call__(self) -> torch.Tensor:
        return torch.tensor(next(self.losses))


def train_on(
    losses: list[float], folder: Path, *hooks: SessionRunHook, runs: int | None = None, plain: bool = False
) -> tuple[int, Loop]:
    """Train, and catch the errors about NaN; return their number, and the loop."""
    caught, count = 0, len(losses) if runs is None else runs
    saver = CheckpointSaverHook(folder, save_steps=1)
    with MonitoredLoop(Losses(losses), hooks=[*hooks, saver], checkpoint_dir=folder) as loop:
        for _ in range(count) if plain else loop.until_stop(range(count)):
            try:
                loop.run()
            except NanLossDuringTrainingError:
                caught += 1
    return caught, loop  # type: ignore[return-value]


@pytest.mark.parametrize("first", [True, False], ids=["before the saver", "behind it"])
@pytest.mark.parametrize("every_run", [False, True])
def test_checkpoints_are_saved_again_after_a_finite_loss(first: bool, every_run: bool, tmp_path: Path) -> None:
    hook = NanTensorHook("loss")
    if every_run:
        hook.next_due = lambda: None  # type: ignore[method-assign]
    losses = [1.0, math.nan, math.nan, 1.0, 1.0]
    saver = CheckpointSaverHook(tmp_path, save_steps=1)
    hooks = [hook, saver] if first else [saver, hook]
    caught = []
    with MonitoredLoop(Losses(losses), hooks=hooks) as loop:
        for number in loop.until_stop(range(5)):
            try:
                loop.run()
            except NanLossDuringTrainingError:
                caught.append(number)
    assert caught == [1, 2]
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0, 1, 4, 5]


@pytest.mark.parametrize("lag", [0, 2])
def test_so_it_is_on_a_device(lag: int, tmp_path: Path) -> None:
    with FakeDevice(lag=lag):
        caught, loop = train_on([1.0, 1.0, math.nan, 1.0, 1.0, 1.0, 1.0], tmp_path, NanTensorHook("loss"), plain=True)
    assert caught == 1
    assert loop.global_step == 7
    saved = [checkpoint.step for checkpoint in list_checkpoints(tmp_path)]
    assert 3 not in saved
    assert saved[-1] == 7


def test_a_finite_loss_that_arrives_after_the_nan_that_stops_a_loop_makes_no_state_good(tmp_path: Path) -> None:
    nan = NanTensorHook("loss", fail_on_nan_loss=False, max_lag_steps=3)
    saver = CheckpointSaverHook(tmp_path, save_steps=100)  # a save would wait for the device
    with FakeDevice(lag=2), MonitoredLoop(Losses([1.0, 1.0, math.nan, *[1.0] * 9]), hooks=[nan, saver]) as loop:
        for _ in loop.until_stop(range(12)):
            loop.run()
    assert 3 < loop.global_step < 12
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0]


def test_a_finite_loss_counts_also_if_the_next_one_is_no_number(tmp_path: Path) -> None:
    losses = iter([1.0, math.nan, 1.0, torch.ones(2)])
    saver = CheckpointSaverHook(tmp_path, save_steps=1)
    with MonitoredLoop(lambda: next(losses), hooks=[saver, NanTensorHook("loss")]) as loop:
        for _ in range(4):
            with contextlib.suppress(NanLossDuringTrainingError):
                loop.run()
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0, 1, 3, 4]


def test_a_nan_at_the_end_that_was_caught_is_not_saved(tmp_path: Path) -> None:
    caught, _ = train_on([1.0, 1.0, math.nan], tmp_path, NanTensorHook("loss"))
    assert caught == 1
    assert list_checkpoints(tmp_path)[-1].step == 2


def test_the_question_of_a_nan_that_was_caught_is_put_aside_with_the_next_checkpoint(
    tmp_path: Path, lines: Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    questions: list[bool] = []

    class Looking(SessionRunHook):
        def before_run(self, run_context: SessionRunContext) -> None:
            questions.append((tmp_path / "nan.json").exists())

    train_on([1.0, 1.0, math.nan, 1.0, 1.0, 1.0], tmp_path, Looking(), NanTensorHook("loss"))
    assert questions == [False, False, False, True, False, False]
    assert [path.name for path in (tmp_path / "nan-3").iterdir()] == ["request.json"]
    assert any("loss is NaN at step 3, and the training went on: nan.json is put aside" in text for _, text in lines)
    assert main(["nan", str(tmp_path)]) == 0
    assert "loss is NaN at step 3. The script caught the error, and the training went on" in capsys.readouterr().out
    assert main(["nan", str(tmp_path), "--json"]) == 0
    (caught,) = json.loads(capsys.readouterr().out)["caught"]
    assert caught["step"] == 3
    lines.clear()
    _, loop = train_on([1.0], tmp_path, NanTensorHook("loss"), runs=7)  # another process begins where that one ended
    assert loop.global_step == 7
    assert any(text.startswith("restored step 6") for _, text in lines)


def test_a_checkpoint_in_another_folder_puts_no_question_aside(tmp_path: Path) -> None:
    hooks = [NanTensorHook("loss"), CheckpointSaverHook(tmp_path / "other", save_steps=1)]
    loop = MonitoredLoop(Losses([math.nan, 1.0, 1.0]), hooks=hooks, checkpoint_dir=tmp_path / "run")
    with loop:
        for _ in loop.until_stop(range(3)):
            with contextlib.suppress(NanLossDuringTrainingError):
                loop.run()
    assert list_checkpoints(tmp_path / "other")[-1].step == 3
    assert (tmp_path / "run" / "nan.json").exists()


def test_the_question_stays_if_the_process_ends_before_the_next_checkpoint(tmp_path: Path, lines: Lines) -> None:
    train_on([1.0, 1.0, math.nan], tmp_path, NanTensorHook("loss"))
    assert json.loads((tmp_path / "nan.json").read_text())["step"] == 3
    # The next process looks for the cause, finds the same NaN in the run that it makes again, catches it, and goes on.
    caught, loop = train_on([math.nan, 1.0], tmp_path, NanTensorHook("loss"), runs=5)
    assert (caught, loop.global_step) == (1, 4)
    assert {path.name for path in (tmp_path / "nan-3").iterdir()} >= {"report.md", "request.json"}
    assert not (tmp_path / "nan.json").exists()
    assert list_checkpoints(tmp_path)[-1].step == 4


# -- after the end ----------------------------------------------------------------------------------------------------


@ways
def test_a_closed_loop_refuses_runs_also_after_an_error_that_was_caught(make: Make) -> None:
    loop: Loop = MonitoredLoop(step)
    skipping(loop, [-1], make)
    with pytest.raises(LifecycleError, match="closed loop"):
        make(loop, 1)


def until_an_error(loop: Loop) -> Iterator[int]:
    for number in loop.until_stop(range(3)):
        loop.run(-number)
        yield number


def test_an_error_that_leaves_a_generator_of_the_script_can_be_caught_around_it(lines: Lines) -> None:
    hook = RecordingHook()
    with MonitoredLoop(step, hooks=[hook]) as loop:
        with contextlib.suppress(ValueError):
            list(until_an_error(loop))
        assert list(loop.until_stop("ab")) == ["a", "b"]
    assert methods(hook)[-2:] == ["end", "teardown"]
    assert warnings(lines)[0].startswith("in run 2, epoch 0, item 1: ValueError: bad batch -1. The run does not count")
