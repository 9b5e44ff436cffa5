"""Recovery: after which errors a run is repeated, from which checkpoint, how often, and what hooks observe of it."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices import FakeDevice

from torchhooks import (
    AbortedError,
    CheckpointError,
    CheckpointSaverHook,
    CheckpointSaverListener,
    Coordinator,
    Due,
    LifecycleError,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    Saver,
    Scaffold,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepContext,
    StopAtStepHook,
    SummarySaverHook,
    latest_checkpoint,
    list_checkpoints,
)
from torchhooks.common.files import Disk
from torchhooks.lifecycle.recovery import Recovery, is_device_error
from torchhooks.testing import FakeClock, RecordingHook, RecordingWriter, trace

Lines = list[tuple[str, str]]
Calls = list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchhooks.lifecycle.recovery._FIRST_PAUSE_SECS", 1e-4)
    monkeypatch.setattr("torchhooks.lifecycle.recovery._LONGEST_PAUSE_SECS", 1e-3)


class Model(torch.nn.Module):
    """Counts steps in a buffer, which shows a step that was made twice or lost."""

    w: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.zeros(()))


class Training:
    """A step function that raises ``faults`` after it has changed the model, by the number of the call, from 1."""

    def __init__(self, faults: Mapping[int, BaseException | type[BaseException]] | None = None) -> None:
        self.model = Model()
        self.calls = 0
        self.faults = faults or {}

    def step(self) -> torch.Tensor:
        self.calls += 1
        self.model.w += 1
        if self.calls in self.faults:
            raise self.faults[self.calls]
        return self.model.w

    def loop(
        self, directory: Path, *hooks: SessionRunHook, max_recoveries: int = 5, **arguments: Any
    ) -> MonitoredLoop[torch.Tensor]:
        """Return a loop that restores from ``directory``. To save checkpoints, pass a saver in ``hooks``."""
        arguments.setdefault("checkpoint_dir", directory)
        return MonitoredLoop(self.step, self.model, hooks=hooks, max_recoveries=max_recoveries, **arguments)


def saving(directory: Path, every: int = 2, **arguments: Any) -> CheckpointSaverHook:
    return CheckpointSaverHook(directory, save_steps=every, **arguments)


def steps_of(loop: MonitoredLoop[Any], runs: int) -> list[int]:
    """Return the global step after each run."""
    made = []
    with loop:
        for _ in loop.until_stop(range(runs), resume=False):
            loop.run()
            made.append(loop.global_step)
    return made


def fails(loop: MonitoredLoop[Any], kind: type[BaseException], runs: int = 9) -> BaseException:
    """Return the error that the runs raise."""
    with pytest.raises(kind) as caught:
        steps_of(loop, runs)
    return caught.value


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def recoveries(lines: Lines) -> list[str]:
    return [text for level, text in lines if text.startswith("recovering") and level == "WARNING"]


def of_method(calls: Calls, method: str) -> list[tuple[Any, ...]]:
    return [call for call in calls if method in call[:2]]


# -- one fault --------------------------------------------------------------------------------------------------------


class FaultySaver(Saver):
    """Raises ``faults`` by method and number of the call, from 1."""

    def __init__(self, faults: Mapping[tuple[str, int], BaseException | type[BaseException]]) -> None:
        super().__init__()
        self.faults = dict(faults)
        self.count = {"save": 0, "restore_latest": 0}

    def maybe_fail(self, method: str) -> None:
        self.count[method] += 1
        error = self.faults.pop((method, self.count[method]), None)
        if error is not None:
            raise error

    def save(self, session: Any, path: Any, global_step: int, **arguments: Any) -> str:
        self.maybe_fail("save")
        return super().save(session, path, global_step, **arguments)

    def restore_latest(self, session: Any, directory: Any) -> str | None:
        self.maybe_fail("restore_latest")
        return super().restore_latest(session, directory)


class FaultyListener(CheckpointSaverListener):
    """Raises at the checkpoint with the given number, once."""

    def __init__(self, method: str, at: int, error: type[BaseException] = AbortedError) -> None:
        self.method, self.at, self.error = method, at, error
        self.seen = 0

    def maybe_fail(self, method: str) -> None:
        self.seen += method == self.method
        if self.seen == self.at and method == self.method:
            raise self.error

    def before_save(self, session: Session, step: int) -> None:
        self.maybe_fail("before_save")

    def after_save(self, session: Session, step: int) -> None:
        self.maybe_fail("after_save")


Build = Callable[[Path], tuple[Training, MonitoredLoop[torch.Tensor]]]


def fault_of_hook(method: str, number: int, after_the_saver: bool) -> Build:
    def build(directory: Path) -> tuple[Training, MonitoredLoop[torch.Tensor]]:
        training = Training()
        pair = [RecordingHook(raises={(method, number): AbortedError}), saving(directory)]
        return training, training.loop(directory, *(reversed(pair) if after_the_saver else pair))

    return build


def fault_of_step(call: int) -> Build:
    def build(directory: Path) -> tuple[Training, MonitoredLoop[torch.Tensor]]:
        training = Training({call: AbortedError})
        return training, training.loop(directory, saving(directory))

    return build


def fault_of_listener(method: str, checkpoint: int) -> Build:
    def build(directory: Path) -> tuple[Training, MonitoredLoop[torch.Tensor]]:
        training = Training()
        return training, training.loop(directory, saving(directory, listeners=[FaultyListener(method, checkpoint)]))

    return build


def fault_of_saver(*where: tuple[str, int], call: int | None = None) -> Build:
    def build(directory: Path) -> tuple[Training, MonitoredLoop[torch.Tensor]]:
        training = Training({} if call is None else {call: AbortedError})
        scaffold = Scaffold(saver=FaultySaver(dict.fromkeys(where, AbortedError)))
        return training, training.loop(directory, saving(directory), scaffold=scaffold)

    return build


# The loop with the fault, the global step after each run in seven items, and the restored step.
FAULTS = {
    "step-of-an-idle-run": (fault_of_step(4), [1, 2, 3, 3, 4, 5, 6], 2),
    "step-of-a-run-that-is-due-to-be-saved": (fault_of_step(5), [1, 2, 3, 4, 5, 6, 7], 4),
    "first-step": (fault_of_step(1), [1, 2, 3, 4, 5, 6, 7], 0),
    "before_run-of-a-hook-before-the-saver": (fault_of_hook("before_run", 4, False), [1, 2, 3, 3, 4, 5, 6], 2),
    "before_run-of-a-hook-after-the-saver": (fault_of_hook("before_run", 4, True), [1, 2, 3, 3, 4, 5, 6], 2),
    "after_run-of-a-hook-before-the-saver": (fault_of_hook("after_run", 4, False), [1, 2, 3, 3, 4, 5, 6], 2),
    "after_run-of-a-hook-after-the-saver": (fault_of_hook("after_run", 4, True), [1, 2, 3, 3, 4, 5, 6], 2),
    "restore-when-recovering": (fault_of_saver(("restore_latest", 2), call=4), [1, 2, 3, 3, 4, 5, 6], 2),
    "save-when-recovering": (fault_of_saver(("save", 3), call=4), [1, 2, 3, 3, 4, 5, 6], 2),
}


@pytest.mark.parametrize(("build", "steps", "restored"), FAULTS.values(), ids=FAULTS)
def test_a_failed_run_is_repeated_from_the_newest_checkpoint(
    build: Build, steps: list[int], restored: int, tmp_path: Path, lines: Lines
) -> None:
    training, loop = build(tmp_path)
    assert steps_of(loop, 7) == steps
    assert {text for _, text in lines if text.startswith("restored")} == {
        f"restored step {restored} from {tmp_path}/model.ckpt-{restored}"
    }
    assert training.model.w == steps[-1]


FAULTS_OF_SAVES = {  # at the third checkpoint, of step 4; and from which step a recovery continues
    "listener-before_save": (fault_of_listener("before_save", 3), 2),
    "listener-after_save": (fault_of_listener("after_save", 3), 4),
    "saver": (fault_of_saver(("save", 3)), 2),
}


@pytest.mark.parametrize(("build", "restored"), FAULTS_OF_SAVES.values(), ids=FAULTS_OF_SAVES)
def test_an_error_of_a_save_between_two_items_is_raised_and_not_recovered_from(
    build: Build, restored: int, tmp_path: Path, lines: Lines
) -> None:
    training, loop = build(tmp_path)
    error = fails(loop, AbortedError)
    assert (training.calls, loop.global_step) == (4, 4)
    assert "in a call of CheckpointSaverHook" in notes(error)
    assert recoveries(lines) == []


@pytest.mark.parametrize(("build", "restored"), FAULTS_OF_SAVES.values(), ids=FAULTS_OF_SAVES)
def test_so_it_is_if_the_script_catches_it_and_no_item_is_yielded_twice(
    build: Build, restored: int, tmp_path: Path, lines: Lines
) -> None:
    training, loop = build(tmp_path)
    items = []
    with loop:
        data = iter([*range(7)])
        while True:
            with contextlib.suppress(AbortedError):
                for item in loop.until_stop(data, resume=False):
                    items.append(item)
                    loop.run()
                break
    assert items == [*range(7)]
    assert (training.calls, loop.global_step) == (7, 7)
    assert recoveries(lines) == []


@pytest.mark.parametrize(("build", "restored"), FAULTS_OF_SAVES.values(), ids=FAULTS_OF_SAVES)
def test_without_until_stop_a_save_is_a_part_of_the_run_which_is_recovered_from(
    build: Build, restored: int, tmp_path: Path, lines: Lines
) -> None:
    _, loop = build(tmp_path)
    made: list[int] = []
    with loop:
        while len(made) < 5 and not loop.should_stop():
            loop.run()
            made.append(loop.global_step)
    assert made == [1, 2, 3, restored + 1, restored + 2]  # the run that failed was made again, after the restored step
    assert len(recoveries(lines)) == 1


def test_run_returns_what_the_repeated_run_returned(tmp_path: Path) -> None:
    training = Training({2: AbortedError})
    with training.loop(tmp_path, saving(tmp_path, every=1)) as loop:
        loop.run()
        assert loop.run() == 2


def test_the_run_is_repeated_with_the_same_arguments(tmp_path: Path) -> None:
    given: list[Any] = []

    def step(x: int, *, y: int) -> None:
        given.append((x, y))
        if len(given) == 1:
            raise AbortedError

    with MonitoredLoop(step, hooks=[saving(tmp_path)], checkpoint_dir=tmp_path) as loop:
        loop.run(3, y=4)
    assert given == [(3, 4), (3, 4)]


def test_hooks_get_a_new_session_and_then_the_whole_run_again(tmp_path: Path) -> None:
    calls: Calls = []
    hooks = [RecordingHook(name=name, calls=calls) for name in "ab"]
    hooks[1] = RecordingHook(name="b", calls=calls, raises={("before_run", 2): AbortedError})
    steps_of(Training().loop(tmp_path, saving(tmp_path, every=1), *hooks), 2)
    first = calls.index(("b", "raises", "AbortedError"))
    assert calls[first + 1 :] == [
        ("a", "after_create_session", 1),
        ("b", "after_create_session", 1),
        ("a", "before_run", False),
        ("b", "before_run", False),
        ("a", "after_run", None, 2),
        ("b", "after_run", None, 2),
        *[(name, method, *step) for method, step in (("end", [2]), ("teardown", [])) for name in "ab"],
    ]


def test_begin_is_not_called_again(tmp_path: Path) -> None:
    hook = RecordingHook()
    steps_of(Training({2: AbortedError, 4: AbortedError}).loop(tmp_path, saving(tmp_path), hook), 5)
    assert len(of_method(hook.calls, "begin")) == 1
    assert len(of_method(hook.calls, "after_create_session")) == 3


def test_the_state_of_hooks_is_restored_before_their_after_create_session(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counting(SessionRunHook):
        runs = 0

        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            seen.append(self.runs)

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            self.runs += 1

        def state_dict(self) -> dict[str, int]:
            return {"runs": self.runs}

        def load_state_dict(self, state: Mapping[str, int]) -> None:
            self.runs = state["runs"]

    steps_of(Training({4: AbortedError}).loop(tmp_path, Counting(), saving(tmp_path)), 6)
    assert seen == [0, 2]


def test_an_optimizer_step_of_a_failed_run_is_not_counted(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.1)
    faults = [None, None, AbortedError, None, None]

    def step() -> None:
        optimizer.step()
        fault = faults.pop(0)
        if fault is not None:
            raise fault

    hooks = [saving(tmp_path, every=1)]
    loop = MonitoredLoop(step, optimizer=optimizer, hooks=hooks, checkpoint_dir=tmp_path, step_unit="optimizer_step")
    assert steps_of(loop, 4) == [1, 2, 3, 4]


# -- which errors -----------------------------------------------------------------------------------------------------


class LostDeviceError(RuntimeError):
    """An error of a third-party library."""


class CableError(AbortedError):
    """A subclass of AbortedError."""


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (AbortedError("gone"), {}),
        (CableError("gone"), {}),
        (LostDeviceError("gone"), {"recoverable_errors": [LostDeviceError]}),
        (LostDeviceError("gone"), {"recoverable_errors": (ValueError, RuntimeError)}),
    ],
)
def test_recovers_from_these_kinds_and_their_subclasses(
    error: BaseException, arguments: dict[str, Any], tmp_path: Path
) -> None:
    loop = Training({2: error}).loop(tmp_path, saving(tmp_path), **arguments)
    assert steps_of(loop, 4) == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError("gone"), {}),
        (KeyboardInterrupt("gone"), {}),
        (LostDeviceError("gone"), {"recoverable_errors": [CableError]}),
        (AbortedError("gone"), {"recoverable_errors": [CableError]}),
        (AbortedError("gone"), {"recoverable_errors": ()}),
    ],
)
def test_other_errors_are_raised_at_once_and_without_a_note_on_recovery(
    error: BaseException, arguments: dict[str, Any], tmp_path: Path
) -> None:
    training = Training({2: error})
    assert fails(training.loop(tmp_path, saving(tmp_path), **arguments), type(error)) is error
    assert training.calls == 2
    assert "recovered" not in notes(error)


def test_stop_iteration_is_not_recovered_from(tmp_path: Path) -> None:
    loop = Training({3: StopIteration}).loop(tmp_path, saving(tmp_path), recoverable_errors=[Exception])
    assert steps_of(loop, 9) == [1, 2]


def test_an_error_in_the_body_is_not_recovered_from(tmp_path: Path) -> None:
    with pytest.raises(AbortedError), Training().loop(tmp_path, saving(tmp_path)):
        raise AbortedError


@pytest.mark.parametrize("given", [AbortedError, None, 3])
def test_rejects_recoverable_errors_that_are_not_a_collection(given: Any) -> None:
    with pytest.raises(TypeError, match=r"recoverable_errors=.*: give exception types, such as \(AbortedError,\)"):
        MonitoredLoop(lambda: None, recoverable_errors=given)


@pytest.mark.parametrize("kind", [AbortedError(), int, "AbortedError"])
def test_rejects_what_is_not_an_exception_class_by_name(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"recoverable_errors=\[.*\]: give"):
        MonitoredLoop(lambda: None, recoverable_errors=[kind])


@pytest.mark.parametrize("number", [-1, 2.5, True, "10", None])
def test_rejects_an_invalid_number_of_recoveries(number: Any) -> None:
    with pytest.raises(ValueError, match="max_recoveries="):
        MonitoredLoop(lambda: None, max_recoveries=number)


# -- nothing to restore from ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("directory", ["empty", "not-there", None])
def test_without_a_checkpoint_the_error_is_raised_and_says_so(directory: str | None, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    training = Training({2: AbortedError})
    checkpoint_dir = None if directory is None else tmp_path / directory
    error = fails(training.loop(tmp_path, checkpoint_dir=checkpoint_dir), AbortedError)
    assert notes(error).startswith("torchhooks: not recovered from, because there is no checkpoint to restore")
    assert training.calls == 2


def test_an_error_that_is_not_recovered_from_ends_the_loop_if_it_leaves_it(tmp_path: Path) -> None:
    hook = RecordingHook()
    with pytest.raises(AbortedError), Training({1: AbortedError("gone")}).loop(tmp_path, hook) as loop:
        loop.run()
    assert (loop.should_stop(), loop.stop_reason) == (True, "AbortedError: gone")
    assert [call[0] for call in hook.calls[2:]] == ["before_run", "teardown"]


def test_after_a_recovery_that_failed_no_run_can_be_made_even_if_the_script_catches_it(tmp_path: Path) -> None:
    hook = RecordingHook(raises={("after_create_session", 2): OSError("no space")})
    loop = Training({2: AbortedError("gone")}).loop(tmp_path, saving(tmp_path), hook)
    items = loop.until_stop(range(9))
    next(items)
    loop.run()
    with pytest.raises(OSError, match="no space"):
        loop.run()
    assert (loop.should_stop(), loop.stop_reason) == (True, "OSError: no space")
    for call in (loop.run, lambda: next(items), lambda: next(loop.until_stop("ab"))):
        with pytest.raises(LifecycleError, match="after a recovery that failed with OSError: no space") as raised:
            call()
        assert isinstance(raised.value.__cause__, OSError)
    loop.close()
    assert not of_method(hook.calls, "end")


def test_recovery_waits_for_a_checkpoint_that_is_still_being_written(tmp_path: Path) -> None:
    saver = Saver(async_save=True)
    saver.disk = SlowDisk()
    loop = Training({1: AbortedError}).loop(tmp_path, saving(tmp_path, every=9), scaffold=Scaffold(saver=saver))
    assert steps_of(loop, 2) == [1, 2]


def test_recovery_waits_for_the_separate_saver_of_a_hook_as_well(tmp_path: Path) -> None:
    saver = Saver(async_save=True)
    saver.disk = SlowDisk()
    loop = Training({3: AbortedError}).loop(tmp_path, saving(tmp_path, saver=saver))
    assert steps_of(loop, 3) == [1, 2, 3]


class SlowDisk(Disk):
    """Delays the renames that make a checkpoint visible."""

    def rename(self, path: str, new_path: str) -> None:
        threading.Event().wait(0.05)
        super().rename(path, new_path)


def test_the_error_of_a_background_write_is_raised_by_the_recovery(tmp_path: Path) -> None:
    class FullDisk(Disk):
        def rename(self, path: str, new_path: str) -> None:
            if new_path.endswith("-2"):
                raise OSError(errno.ENOSPC, "No space left on device")
            super().rename(path, new_path)

    saver = Saver(async_save=True)
    saver.disk = FullDisk()
    loop = Training({3: AbortedError("gone")}).loop(tmp_path, saving(tmp_path, saver=saver))
    error = fails(loop, CheckpointError)
    assert "model.ckpt-2 was not written" in str(error)
    assert isinstance(error.__context__, AbortedError)


# -- while a session is being created ---------------------------------------------------------------------------------


@pytest.fixture
def resumable(tmp_path: Path) -> Path:
    """Return a folder with the checkpoints of a training run of two steps."""
    steps_of(Training().loop(tmp_path, saving(tmp_path)), 2)
    return tmp_path


def test_recovers_when_the_first_restore_fails(resumable: Path, lines: Lines) -> None:
    scaffold = Scaffold(saver=FaultySaver({("restore_latest", 1): AbortedError("gone")}))
    assert steps_of(Training().loop(resumable, scaffold=scaffold), 2) == [3, 4]
    assert len(recoveries(lines)) == 1


def test_recovers_when_the_first_after_create_session_fails(resumable: Path) -> None:
    calls: Calls = []
    a = RecordingHook(name="a", calls=calls)
    b = RecordingHook(name="b", calls=calls, raises={"after_create_session": AbortedError})
    assert steps_of(Training().loop(resumable, a, b), 1) == [3]
    assert of_method(calls, "after_create_session") == [
        (name, "after_create_session", 2) for name in ("a", "b", "a", "b")
    ]


def test_an_init_fn_that_fails_is_not_recovered_from_without_a_checkpoint(tmp_path: Path) -> None:
    def init_fn(scaffold: Scaffold, session: Session) -> None:
        raise AbortedError

    with pytest.raises(AbortedError) as caught:
        Training().loop(tmp_path, saving(tmp_path), scaffold=Scaffold(init_fn=init_fn))
    assert "no checkpoint to restore" in notes(caught.value)


def test_an_init_fn_is_not_called_when_recovering(tmp_path: Path) -> None:
    inits: list[int] = []
    scaffold = Scaffold(init_fn=lambda scaffold, session: inits.append(session.global_step))
    steps_of(Training({2: AbortedError}).loop(tmp_path, saving(tmp_path), scaffold=scaffold), 3)
    assert inits == [0]


def test_another_recoverable_error_while_recovering_is_recovered_from_too(tmp_path: Path, lines: Lines) -> None:
    hook = RecordingHook(raises={("after_create_session", 2): CableError("again")})
    loop = Training({2: AbortedError("gone")}).loop(tmp_path, saving(tmp_path), hook)
    assert steps_of(loop, 3) == [1, 1, 2]
    assert recoveries(lines) == [
        "recovering now from AbortedError: gone (recovery 1 in a row)",
        "recovering in 0.0001 s from CableError: again (recovery 2 in a row)",
    ]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, StopIteration])
def test_any_other_error_while_recovering_is_raised(kind: type[BaseException], tmp_path: Path) -> None:
    hook = RecordingHook(raises={("after_create_session", 2): kind})
    gone = AbortedError("gone")
    loop = Training({2: gone}).loop(tmp_path, saving(tmp_path), hook)
    loop.run()
    with pytest.raises(kind) as caught:
        loop.run()
    assert caught.value.__context__ is gone
    assert loop.should_stop()
    loop.close()


def test_a_when_ready_callback_during_a_recovery_can_raise_a_recoverable_error(tmp_path: Path, lines: Lines) -> None:
    class Doubting(SessionRunHook):
        """Raises a recoverable error when the value of its second run arrives."""

        runs = 0

        def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
            return SessionRunArgs("loss")

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            self.runs += 1
            run_context.when_ready(run_values.results, self.doubt if self.runs == 2 else float)

        def doubt(self, loss: torch.Tensor) -> None:
            raise AbortedError("doubtful")

    with FakeDevice(lag=50):
        loop = Training({3: AbortedError("gone")}).loop(tmp_path, saving(tmp_path, every=100), Doubting())
        assert steps_of(loop, 4) == [1, 2, 1, 2]
    assert recoveries(lines) == ["recovering now from AbortedError: doubtful (recovery 1 in a row)"]


# -- how often, and how soon ------------------------------------------------------------------------------------------


def pauses_of(number: int, recovery: Recovery | None = None) -> list[float]:
    recovery = recovery or Recovery()
    pauses: list[float] = []
    for _ in range(number):
        pauses.append(0.0)
        recovery.pause(AbortedError("gone"), lambda secs: pauses.__setitem__(-1, secs))
    return pauses


@pytest.fixture
def _real_pauses(monkeypatch: pytest.MonkeyPatch, _quick: None) -> None:
    monkeypatch.undo()


@pytest.mark.usefixtures("_real_pauses")
def test_the_first_recovery_has_no_pause_and_each_further_pause_is_twice_as_long() -> None:
    assert pauses_of(9) == [0, 1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.usefixtures("_real_pauses")
def test_the_pause_stays_at_its_maximum() -> None:
    assert pauses_of(3000)[-1] == 60


@pytest.mark.usefixtures("_real_pauses")
def test_a_successful_run_resets_the_pause() -> None:
    recovery = Recovery()
    pauses_of(3, recovery)
    recovery.run_went_well()
    assert pauses_of(2, recovery) == [0, 1]


def in_a_row(lines: Lines) -> list[int]:
    return [int(text.split("(recovery ")[1].split()[0]) for text in recoveries(lines)]


def test_only_recoveries_of_the_same_run_are_in_a_row(tmp_path: Path, lines: Lines) -> None:
    faults = dict.fromkeys([2, 3, 4, 6], AbortedError)
    steps_of(Training(faults).loop(tmp_path, saving(tmp_path)), 6)
    assert in_a_row(lines) == [1, 2, 3, 1]


def test_a_recovery_at_creation_is_not_in_a_row_with_another(resumable: Path, lines: Lines) -> None:
    hook = RecordingHook(raises={"after_create_session": AbortedError})
    steps_of(Training({3: AbortedError}).loop(resumable, hook), 4)
    assert in_a_row(lines) == [1, 1]


def test_recoveries_are_limited(tmp_path: Path) -> None:
    training = Training(dict.fromkeys(range(2, 99), AbortedError))
    error = fails(training.loop(tmp_path, saving(tmp_path), max_recoveries=3), AbortedError)
    assert training.calls == 2 + 3
    assert "because of max_recoveries=3: 3 were made within the last 3600 s" in notes(error)


def test_no_recovery_is_made_if_none_is_allowed(tmp_path: Path) -> None:
    training = Training({2: AbortedError})
    error = fails(training.loop(tmp_path, saving(tmp_path), max_recoveries=0), AbortedError)
    assert training.calls == 2
    assert "because of max_recoveries=0" in notes(error)


def test_successful_runs_do_not_reset_the_limit(tmp_path: Path) -> None:
    training = Training(dict.fromkeys([2, 4, 6], AbortedError))
    fails(training.loop(tmp_path, saving(tmp_path), max_recoveries=2), AbortedError)
    assert training.calls == 6


def test_recoveries_before_the_last_hour_are_not_counted(clock: FakeClock) -> None:
    recovery = Recovery(max_recoveries=1)
    allowed = []
    for secs in (0, 3599, 1, 10):
        clock.advance(secs)
        allowed.append(recovery.grant(AbortedError()))
    assert allowed == [True, False, True, False]


def test_recoveries_during_a_recovery_count(tmp_path: Path) -> None:
    scaffold = Scaffold(saver=FaultySaver({("restore_latest", n): AbortedError for n in range(2, 99)}))
    training = Training({1: AbortedError})
    fails(training.loop(tmp_path, saving(tmp_path), scaffold=scaffold, max_recoveries=4), AbortedError)
    assert isinstance(scaffold.saver, FaultySaver)
    assert scaffold.saver.count["restore_latest"] == 1 + 4


def test_each_recovery_is_logged_with_its_error_and_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gone = AbortedError("gone")
    with caplog.at_level(logging.WARNING, "torchhooks"):
        steps_of(Training({2: gone, 3: CableError}).loop(tmp_path, saving(tmp_path)), 3)
    logged = [record.exc_info for record in caplog.records if record.exc_info]
    assert [info[0] for info in logged] == [AbortedError, CableError]
    assert (logged[0][1], bool(gone.__traceback__)) == (gone, True)


# -- CUDA -------------------------------------------------------------------------------------------------------------

ASSERTED = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch has the class since 2.8")
def test_an_accelerator_error_is_an_error_of_the_device() -> None:
    assert is_device_error(torch.AcceleratorError("an error in another language"))


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), RuntimeError(""), ValueError(ASSERTED)],
)
def test_other_errors_are_no_errors_of_the_device(error: Exception) -> None:
    assert not is_device_error(error)


@pytest.mark.parametrize("depth", [1, 3])
def test_an_error_in_a_group_is_recognised(depth: int) -> None:
    error: Exception = RuntimeError(ASSERTED)
    for _ in range(depth):
        error = ExceptionGroup("several hooks failed", [ValueError("another one"), error])
    assert is_device_error(error)


def test_the_cause_of_an_error_in_a_group_is_recognised() -> None:
    error = ValueError("the metric")
    error.__cause__ = RuntimeError(ASSERTED)
    assert is_device_error(ExceptionGroup("several", [KeyError("another one"), error]))


def test_an_error_of_the_device_is_not_recovered_from(tmp_path: Path) -> None:
    training = Training({2: RuntimeError(ASSERTED)})
    loop = training.loop(tmp_path, saving(tmp_path), recoverable_errors=[RuntimeError])
    error = fails(loop, RuntimeError)
    assert training.calls == 2
    assert "the process may have lost its CUDA context: restart it" in notes(error)


@pytest.mark.parametrize("cause", [True, False])
def test_an_error_with_such_an_error_in_its_chain_is_not_recovered_from(cause: bool, tmp_path: Path) -> None:
    def step() -> None:
        try:
            raise RuntimeError(ASSERTED)
        except RuntimeError as error:
            if cause:
                raise AbortedError("the GPU failed") from error
            raise AbortedError("the GPU failed")  # noqa: B904

    error = fails(MonitoredLoop(step, hooks=[saving(tmp_path)], checkpoint_dir=tmp_path), AbortedError)
    assert "lost its CUDA context" in notes(error)


def test_a_cycle_of_causes_is_examined_once() -> None:
    one, other = AbortedError("one"), AbortedError("other")
    one.__cause__, other.__cause__ = other, one
    assert not is_device_error(one)


def test_a_step_function_that_fails_after_a_good_run_is_retried_in_the_same_row(tmp_path: Path, lines: Lines) -> None:
    class Asking(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            run_context.when_ready(torch.ones(1), lambda value: None, max_lag_runs=0)  # something to do after the run

    tries: list[int] = []

    def step_fn(context: StepContext[torch.Tensor]) -> None:
        context.run_with_hooks()
        tries.append(len(tries))
        if len(tries) < 4:
            raise AbortedError

    with FakeDevice(), Training().loop(tmp_path, Asking(), saving(tmp_path, every=1)) as loop:
        loop.run_step_fn(step_fn)
    assert in_a_row(lines) == [1, 2, 3]


def test_a_run_that_is_made_again_inside_a_step_function_ends_the_row(tmp_path: Path, lines: Lines) -> None:
    training = Training({2: AbortedError, 4: AbortedError})

    with training.loop(tmp_path, saving(tmp_path, every=1)) as loop:

        def step_fn(context: StepContext[torch.Tensor]) -> None:
            loop.run()
            loop.run()
            loop.run()

        loop.run_step_fn(step_fn)
    assert in_a_row(lines) == [1, 1]


def test_an_error_of_a_thread_during_a_repeated_run_begins_another_row(tmp_path: Path, lines: Lines) -> None:
    coords: list[Coordinator] = []

    class Grabbing(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            coords.append(coord)

    training = Training({2: AbortedError})
    step = training.step

    def step_and_fail() -> torch.Tensor:
        if training.calls == 2:
            coords[-1].request_stop(AbortedError("of a thread"))
        return step()

    hooks = [Grabbing(), saving(tmp_path, every=1)]
    steps_of(MonitoredLoop(step_and_fail, training.model, hooks=hooks, checkpoint_dir=tmp_path), 4)
    assert in_a_row(lines) == [1, 1]  # the run itself went well


# -- what a failed run undoes, and what stays -------------------------------------------------------------------------


def test_a_stop_requested_in_a_failed_run_is_void(tmp_path: Path) -> None:
    hooks = [RecordingHook(stop_at=3), RecordingHook(raises={("after_run", 3): AbortedError})]
    assert steps_of(Training().loop(tmp_path, saving(tmp_path, every=1), *hooks), 5) == [1, 2, 3, 4, 5]


def test_a_stop_requested_in_before_run_of_a_failed_run_is_void(tmp_path: Path) -> None:
    class AskingOnce(SessionRunHook):
        asked = False

        def before_run(self, run_context: SessionRunContext) -> None:
            if not self.asked:
                self.asked = True
                run_context.request_stop()

    loop = Training({1: AbortedError}).loop(tmp_path, saving(tmp_path), AskingOnce())
    assert steps_of(loop, 3) == [1, 2, 3]


def test_a_nan_in_a_failed_run_does_not_stop_the_loop(tmp_path: Path) -> None:
    hooks = [
        NanTensorHook("loss", False),
        saving(tmp_path, every=1),
        RecordingHook(raises={("after_run", 2): AbortedError}),
    ]
    traced = trace(*hooks, losses=[0.5, math.nan, 0.25, 0.5], checkpoint_dir=tmp_path)
    assert (traced.steps, traced.stop_reason) == ([1, 2, 3], "data ended")
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0, 1, 2, 3]


class AskingLater(SessionRunHook):
    """Requests a stop when the value of its second run arrives."""

    runs = 0

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        self.runs += 1
        return SessionRunArgs("loss")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self.runs == 2:
            run_context.when_ready(run_values.results, lambda _: run_context.request_stop("late"))


def test_a_late_stop_request_of_a_failed_run_is_void(tmp_path: Path) -> None:
    hooks = [saving(tmp_path, every=1), AskingLater(), RecordingHook(raises={("after_run", 2): AbortedError})]
    with FakeDevice(lag=5), Training().loop(tmp_path, *hooks) as loop:
        for _ in loop.until_stop(range(30)):
            loop.run()
    assert loop.stop_reason == "data ended"


def carry_on(context: StepContext[Any]) -> None:
    with contextlib.suppress(AbortedError):
        context.run_with_hooks()


def test_a_late_stop_request_of_a_run_whose_error_was_caught_is_void() -> None:
    hooks = [AskingLater(), RecordingHook(raises={("after_run", 2): AbortedError})]
    with FakeDevice(lag=5), MonitoredLoop(lambda: torch.tensor(1.0), hooks=hooks) as loop:
        for _ in loop.until_stop(range(30)):
            loop.run_step_fn(carry_on)
    assert loop.stop_reason == "data ended"


def test_checkpoints_are_saved_again_after_a_run_with_nan_whose_error_was_caught(tmp_path: Path) -> None:
    losses = iter([1.0, math.nan, 1.0, 1.0])
    failing = RecordingHook(raises={("after_run", 2): AbortedError})
    with MonitoredLoop(lambda: next(losses), hooks=[failing, NanTensorHook("loss"), saving(tmp_path, every=1)]) as loop:
        for _ in range(4):
            loop.run_step_fn(carry_on)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0, 1, 3, 4]


@pytest.mark.parametrize("recovers", [True, False])
@pytest.mark.parametrize("by_step_fn", [True, False])
def test_a_late_stop_request_of_an_earlier_run_stays(recovers: bool, by_step_fn: bool, tmp_path: Path) -> None:
    class AskingLate(SessionRunHook):
        """Requests a stop when the value of its first run arrives, and is not due again."""

        asked = False

        def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
            return SessionRunArgs("loss")

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            self.asked = True
            run_context.when_ready(run_values.results, lambda _: run_context.request_stop("enough"))

        def next_due(self) -> Due:
            return Due() if self.asked else Due(runs=1)

    training = Training({3: AbortedError} if recovers else {})
    with FakeDevice(lag=50), training.loop(tmp_path, saving(tmp_path, every=3), AskingLate()) as loop:
        for _ in loop.until_stop(range(9)):
            loop.run_step_fn(lambda context: context.run_with_hooks()) if by_step_fn else loop.run()
    assert (loop.global_step, loop.stop_reason) == (1 if recovers else 3, "AskingLate: enough")


def test_timers_are_not_reset(tmp_path: Path) -> None:
    writer = RecordingWriter()
    summaries = SummarySaverHook(save_steps=3, summary_writer=writer, summary_op={"loss": "loss"})
    steps_of(Training({3: AbortedError}).loop(tmp_path, saving(tmp_path), summaries), 7)
    assert [step for step, _ in writer.scalars["loss"]] == [1, 4, 7]


def test_session_start_is_written_once(tmp_path: Path) -> None:
    writer = RecordingWriter()
    summaries = SummarySaverHook(save_steps=1, summary_writer=writer, summary_op={"loss": "loss"})
    steps_of(Training({3: AbortedError}).loop(tmp_path, saving(tmp_path), summaries), 7)
    assert [record for record in writer.records if record[0] == "session_log"] == [("session_log", "START", 1)]


def test_skipped_runs_are_counted_across_a_recovery(tmp_path: Path, lines: Lines) -> None:
    logging_hook = LoggingTensorHook(["global_step"], every_n_iter=3)
    steps_of(Training({4: AbortedError}).loop(tmp_path, saving(tmp_path), logging_hook), 7)
    logged = [text.split(" (")[0] for _, text in lines if text.startswith("global_step =")]
    assert logged == ["global_step = 1", "global_step = 3", "global_step = 6"]


def test_a_number_of_steps_to_make_does_not_restart(tmp_path: Path) -> None:
    loop = Training({4: AbortedError}).loop(tmp_path, saving(tmp_path), StopAtStepHook(num_steps=5))
    assert steps_of(loop, 99)[-1] == 5


def test_the_time_spent_waiting_for_data_is_still_measured(tmp_path: Path) -> None:
    with Training({2: AbortedError}).loop(tmp_path, saving(tmp_path)) as loop:
        for _ in loop.until_stop(range(3)):
            loop.run()
            assert loop.session.measure_data_wait() is not None


# -- the session ------------------------------------------------------------------------------------------------------


def test_the_loop_has_the_new_session_and_the_old_one_raises(tmp_path: Path) -> None:
    with Training({1: AbortedError}).loop(tmp_path, saving(tmp_path)) as loop:
        old = loop.session
        loop.run()
        assert loop.session is not old
        assert loop.session.run("global_step") == 1
        with pytest.raises(LifecycleError, match=r"closed, .* or recovered: after a recovery, use loop\.session"):
            old.run("global_step")


def test_hooks_are_given_the_new_session(tmp_path: Path) -> None:
    sessions: list[Session] = []

    class Keeping(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            sessions.append(run_context.session)

        def end(self, session: Session) -> None:
            sessions.append(session)

    with Training({2: AbortedError}).loop(tmp_path, saving(tmp_path), Keeping()) as loop:
        loop.run()
        loop.run()
        current = loop.session
    assert [session is current for session in sessions] == [False, True, True]


def test_the_outputs_of_the_failed_run_are_freed_before_the_step_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest keeps log records, and with them the error, its frames and their variables.
    monkeypatch.setattr(logging.getLogger("torchhooks"), "propagate", False)
    outputs: list[weakref.ref[torch.Tensor]] = []

    def step() -> torch.Tensor:
        assert not outputs or outputs[-1]() is None
        loss = torch.ones(3)
        outputs.append(weakref.ref(loss))
        return loss

    hook = RecordingHook(raises={"after_run": AbortedError})
    with MonitoredLoop(step, hooks=[saving(tmp_path), hook], checkpoint_dir=tmp_path) as loop:
        loop.run()
    assert len(outputs) == 2


class Watching(SessionRunHook):
    """Records each session, and the end of a thread that it starts for it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self.events.append("created")

        def watch() -> None:
            with coord.stop_on_exception():
                coord.wait_for_stop()
                self.events.append("ended")

        thread = threading.Thread(target=watch, daemon=True)
        coord.register_thread(thread)
        thread.start()


def test_threads_of_the_old_session_end_before_the_new_one_is_created(tmp_path: Path) -> None:
    watching = Watching()
    steps_of(Training({2: AbortedError}).loop(tmp_path, saving(tmp_path), watching), 3)
    assert watching.events == ["created", "ended", "created", "ended"]


def test_threads_of_a_session_whose_creation_failed_end_as_well(tmp_path: Path) -> None:
    watching, faulty = Watching(), RecordingHook(raises={("after_create_session", 2): AbortedError})
    steps_of(Training({2: AbortedError}).loop(tmp_path, saving(tmp_path), watching, faulty), 3)
    assert watching.events == ["created", "ended"] * 3


def test_an_error_of_a_thread_that_is_asked_to_stop_is_raised(tmp_path: Path) -> None:
    class Failing(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            def watch() -> None:
                with coord.stop_on_exception():
                    coord.wait_for_stop()
                    raise OSError("the queue is gone")

            thread = threading.Thread(target=watch, daemon=True)
            coord.register_thread(thread)
            thread.start()

    loop = Training({2: AbortedError}).loop(tmp_path, saving(tmp_path), Failing())
    loop.run()
    with pytest.raises(OSError, match="the queue is gone"):
        loop.run()
    loop.close()


class Reporting(SessionRunHook):
    """Reports one error per session, from a thread that ends before the first run of the session."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.sessions: list[int] = []

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self.sessions.append(session.global_step)
        if self.errors:
            thread = threading.Thread(target=coord.request_stop, args=(self.errors.pop(0),))
            thread.start()
            thread.join()


def test_an_error_of_a_thread_is_recovered_from_before_the_next_run(tmp_path: Path) -> None:
    reporting, training = Reporting(AbortedError("the queue is gone")), Training({})
    assert steps_of(training.loop(tmp_path, saving(tmp_path), reporting), 3) == [1, 2, 3]
    assert reporting.sessions == [0, 0]


def test_should_stop_recovers_from_an_error_of_a_thread_without_a_run(tmp_path: Path) -> None:
    reporting = Reporting(AbortedError("the queue is gone"))
    with Training({}).loop(tmp_path, saving(tmp_path), reporting) as loop:
        assert not loop.should_stop()
        assert reporting.sessions == [0, 0]


def test_run_step_fn_recovers_from_an_error_of_a_thread_without_a_run(tmp_path: Path) -> None:
    reporting = Reporting(AbortedError("the queue is gone"))
    with Training({}).loop(tmp_path, saving(tmp_path), reporting) as loop:
        assert loop.run_step_fn(lambda context: len(reporting.sessions)) == 1
        assert reporting.sessions == [0, 0]


def test_a_completed_run_is_not_repeated_for_an_error_of_a_thread(tmp_path: Path) -> None:
    class ReportingIn(SessionRunHook):
        """Reports an error from a thread in its second run."""

        def __init__(self) -> None:
            self.seen: list[int] = []

        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            self.coord = coord

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            self.seen.append(run_context.session.global_step)
            if len(self.seen) == 2:
                thread = threading.Thread(target=self.coord.request_stop, args=(AbortedError("gone"),))
                thread.start()
                thread.join()

    hook = ReportingIn()
    batches: list[int] = []
    with MonitoredLoop(batches.append, hooks=[hook, saving(tmp_path, every=1)], checkpoint_dir=tmp_path) as loop:
        for batch in loop.until_stop(range(4)):
            loop.run(batch)
            position = loop.session.position
            assert position is not None
            assert [place["state"] for place in (position.state_dict() or {})["path"]] == ["between items"]
    assert (batches, hook.seen) == ([0, 1, 2, 3], [1, 2, 3, 4])


def test_without_a_checkpoint_an_error_of_a_thread_stops_the_loop_and_is_raised_when_it_closes(tmp_path: Path) -> None:
    error, recorder = AbortedError("the queue is gone"), RecordingHook()
    loop = Training({}).loop(tmp_path, Reporting(error), recorder)
    assert list(loop.until_stop(range(9))) == []
    with pytest.raises(AbortedError) as caught:
        loop.close()
    assert caught.value is error
    assert notes(error) == "torchhooks: not recovered from, because there is no checkpoint to restore"
    assert (loop.global_step, loop.stop_reason) == (0, "a thread failed with AbortedError: the queue is gone")
    assert [call[0] for call in recorder.calls[2:]] == ["end", "teardown"]


def test_without_a_checkpoint_dir_an_error_of_a_thread_stops_the_loop() -> None:
    loop = MonitoredLoop(lambda: None, hooks=[Reporting(AbortedError("the queue is gone"))])
    assert loop.should_stop()
    with pytest.raises(AbortedError, match="the queue is gone"):
        loop.close()


def test_a_later_error_of_a_thread_is_not_swallowed(tmp_path: Path) -> None:
    class ReportingTwo(Reporting):
        """Reports all errors in the first session."""

        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            while self.errors:
                super().after_create_session(session, coord)

    loop = Training({}).loop(tmp_path, saving(tmp_path), ReportingTwo(AbortedError("gone"), MemoryError("no more")))
    assert str(fails(loop, MemoryError)) == "no more"


def test_the_pauses_grow_only_without_a_run_in_between(tmp_path: Path, lines: Lines) -> None:
    errors = [AbortedError(str(number)) for number in range(3)]

    class ReportingOnce(Reporting):
        """Reports an error before the first run, and one in each of the next two runs."""

        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            self.coord = coord
            if not self.sessions:
                super().after_create_session(session, coord)
            self.sessions.append(session.global_step)

        def before_run(self, run_context: SessionRunContext) -> None:
            if self.errors:
                super().after_create_session(run_context.session, self.coord)

    steps_of(Training({}).loop(tmp_path, saving(tmp_path), ReportingOnce(*errors)), 4)
    assert [text.rpartition("(")[2] for text in recoveries(lines)] == ["recovery 1 in a row)"] * 3


def test_an_error_of_a_thread_that_is_not_recoverable_stops_the_loop(tmp_path: Path) -> None:
    loop = Training({}).loop(tmp_path, saving(tmp_path), Reporting(OSError("the queue is gone")))
    assert loop.should_stop()
    with pytest.raises(OSError, match="the queue is gone"):
        loop.close()


# -- what is restored -------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_skipped_for_an_older_one(tmp_path: Path, lines: Lines) -> None:
    class Damaging(CheckpointSaverListener):
        def after_save(self, session: Session, step: int) -> None:
            if step == 4:
                path = Path(f"{tmp_path}/model.ckpt-4/state.pt")
                path.write_bytes(path.read_bytes()[:-40])

    training = Training({5: AbortedError})
    assert steps_of(training.loop(tmp_path, saving(tmp_path, listeners=[Damaging()])), 5) == [1, 2, 3, 4, 3]
    assert any("model.ckpt-4" in text and "skipped" in text for _, text in lines)


def test_the_newest_checkpoint_is_restored_not_the_highest_step(tmp_path: Path) -> None:
    with Training({5: AbortedError}).loop(tmp_path, saving(tmp_path)) as loop:
        for _ in range(4):
            loop.run()
        loop.session.global_step = 1
        loop.session.saver.save(loop.session, tmp_path / "model.ckpt", 1)
        loop.run()
        assert loop.global_step == 2


def test_a_recovered_session_is_saved_again(tmp_path: Path) -> None:
    steps_of(Training({4: AbortedError}).loop(tmp_path, saving(tmp_path)), 3)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0, 2, 3]
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/model.ckpt-3"


# -- run_step_fn ------------------------------------------------------------------------------------------------------


def test_a_step_fn_is_called_again_with_the_new_session(tmp_path: Path) -> None:
    sessions: list[Session] = []

    def step_fn(context: StepContext[torch.Tensor]) -> torch.Tensor:
        sessions.append(context.session)
        return context.run_with_hooks()

    with Training({2: AbortedError}).loop(tmp_path, saving(tmp_path)) as loop:
        loop.run_step_fn(step_fn)
        assert loop.run_step_fn(step_fn) == 1
        assert sessions[2] is loop.session
    assert [session is sessions[0] for session in sessions] == [True, True, False]


def test_an_error_of_the_step_fn_itself_is_recovered_from(tmp_path: Path) -> None:
    faults = [None, AbortedError, None]

    def step_fn(context: StepContext[torch.Tensor]) -> int:
        context.run_with_hooks()
        fault = faults.pop(0)
        if fault is not None:
            raise fault
        return context.session.global_step

    with Training().loop(tmp_path, saving(tmp_path, every=9)) as loop:
        assert [loop.run_step_fn(step_fn), loop.run_step_fn(step_fn)] == [1, 1]


def test_a_step_fn_can_handle_the_error_itself(tmp_path: Path, lines: Lines) -> None:
    def step_fn(context: StepContext[torch.Tensor]) -> str:
        try:
            context.run_with_hooks()
        except AbortedError:
            return "handled"
        return "went well"

    with Training({1: AbortedError}).loop(tmp_path, saving(tmp_path)) as loop:
        assert [loop.run_step_fn(step_fn), loop.run_step_fn(step_fn)] == ["handled", "went well"]
    assert not recoveries(lines)


def test_a_successful_step_fn_ends_a_row_of_recoveries(tmp_path: Path, lines: Lines) -> None:
    with Training(dict.fromkeys([2, 3, 5], AbortedError)).loop(tmp_path, saving(tmp_path)) as loop:
        for _ in range(4):
            loop.run_step_fn(lambda context: context.run_with_hooks())
    assert in_a_row(lines) == [1, 2, 1]


def test_a_step_fn_that_fails_without_a_checkpoint_ends_the_loop(tmp_path: Path) -> None:
    hook = RecordingHook()
    with pytest.raises(AbortedError) as caught, Training({1: AbortedError}).loop(tmp_path, hook) as loop:
        loop.run_step_fn(lambda context: context.run_with_hooks())
    assert "no checkpoint to restore" in notes(caught.value)
    assert not of_method(hook.calls, "end")


# -- everything together ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("calls_all", [False, True], ids=["idle-skipped", "all-called"])
def test_a_fault_in_every_third_call_of_the_step_loses_nothing(every: int, calls_all: bool, tmp_path: Path) -> None:
    training = Training(dict.fromkeys(range(2, 99, 3), AbortedError))
    hooks = [saving(tmp_path, every), StopAtStepHook(last_step=9)]
    for hook in hooks if calls_all else ():
        hook.next_due = lambda: None  # type: ignore[method-assign]
    seen: list[tuple[float, int]] = []
    with training.loop(tmp_path, *hooks, max_recoveries=99) as loop:
        while not loop.should_stop():
            seen.append((float(loop.run()), loop.global_step))
    assert all(w == step for w, step in seen)
    assert (loop.stop_reason, float(training.model.w)) == ("StopAtStepHook: step 9", 9.0)
