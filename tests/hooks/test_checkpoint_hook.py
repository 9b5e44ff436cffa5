"""CheckpointSaverHook: when it saves, with which saver, when it calls listeners, and what it never saves."""

from __future__ import annotations

import errno
import math
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import shapes
from support.devices import FakeDevice
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog

from torchhooks import (
    AbortedError,
    BestCheckpointHook,
    CheckpointError,
    CheckpointSaverHook,
    CheckpointSaverListener,
    Coordinator,
    EvaluationHook,
    MonitoredLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    Saver,
    Scaffold,
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
    latest_checkpoint,
    list_checkpoints,
)
from torchhooks.common.files import Disk
from torchhooks.testing import FakeClock, RecordingHook, trace

NAN = math.nan
Lines = list[tuple[str, str]]
Calls = list[tuple[Any, ...]]


def steps(directory: Path) -> list[int]:
    """Return the steps of the checkpoints, in the order of writing."""
    return [checkpoint.step for checkpoint in list_checkpoints(directory)]


def warnings_in(lines: Lines) -> list[str]:
    return [text for level, text in lines if level == "WARNING"]


class Listener(CheckpointSaverListener):
    """A listener that records its calls, and asks to stop or raises at a step."""

    def __init__(
        self,
        calls: Calls | None = None,
        name: str = "l",
        stop_from: float = math.inf,
        raises: Mapping[str, type[BaseException]] | None = None,
    ) -> None:
        self.calls: Calls = [] if calls is None else calls
        self.name, self.stop_from, self.raises = name, stop_from, raises or {}

    def note(self, method: str, *step: int) -> None:
        self.calls.append((self.name, method, *step))
        if method in self.raises:
            raise self.raises[method]

    def begin(self) -> None:
        self.note("begin")

    def before_save(self, session: Session, step: int) -> None:
        self.note("before_save", step)

    def after_save(self, session: Session, step: int) -> bool:
        self.note("after_save", step)
        return step >= self.stop_from

    def end(self, session: Session, step: int) -> None:
        self.note("end", step)


def saves(listener: Listener) -> list[int]:
    return [call[2] for call in listener.calls if call[1] == "before_save"]


# -- when -------------------------------------------------------------------------------------------------------------


# The script (see support.shapes), the period, the last step of each process but the last one, and what happens. S4 is a
# checkpoint of step 4. The last one is saved again if the training run is finished, which the checkpoint then says.
SAVED: list[tuple[str, str, dict[str, int], str, str]] = [
    ("at the start, in its period, at the end", "10{r}", {"save_steps": 4}, "", "S0 0 1 2 3 S4 4 5 6 7 S8 8 9 S10"),
    ("at the start of a loop without a run", "", {"save_steps": 4}, "", "S0"),
    ("at the end only", "2{3{r},}", {"save_steps": 99}, "", "S0 00 01 02 , 10 11 12 , S6"),
    ("again what was restored", "10{r}", {"save_steps": 4}, "5", "S0 0 1 2 3 S4 4 S5 / S5 5 6 7 8 S9 9 S10"),
    ("not again at a stop what was just saved", "8{r}", {"save_steps": 4}, "4", "S0 0 1 2 3 S4 / S4 4 5 6 7 S8 S8"),
    (
        "in an epoch, and behind it",
        "2{3{r},}",
        {"save_steps": 2},
        "",
        "S0 00 01 S2 02 , 10 S4 11 12 , S6 S6",
    ),
    ("behind the code of the epoch", "2{3{r},}", {"save_steps": 3}, "", "S0 00 01 02 , S3 10 11 12 , S6 S6"),
    ("by epochs", "2{3{r},}", {"every_n_epochs": 1}, "", "S0 00 01 02 , S3 10 11 12 , S6 S6"),
    ("by two epochs", "4{2{r},}", {"every_n_epochs": 2}, "5", "S0 00 01 , 10 11 , S4 20 S5 , / S5 21 , 30 31 , S8 S8"),
    ("by epochs without an outer loop", "2{r}2{r}", {"every_n_epochs": 1}, "", "S0 0 1 S2 0 1 S4 S4"),
    ("by epochs that a break ends", "2{3{r!1},}", {"every_n_epochs": 1}, "", "S0 00 01 , S2 10 11 , S4 S4"),
    ("at a stop", "2{2{r},}", {"every_n_epochs": 1}, "2", "S0 00 01 S2 , / S2 , S2 10 11 , S4 S4"),
    ("behind an item of several runs", "2{ppp}", {"save_steps": 2}, "", "S0 0 0 0 S3 1 1 1 S6 S6"),
    ("in the middle of an item longer than the period", "1{r2{r}}", {"save_steps": 1}, "", "S0 0 S2 00 S2 01 S3 S3"),
    ("behind a break", "2{3{r!1},}", {"save_steps": 2}, "", "S0 00 01 , S2 10 11 , S4 S4"),
    ("behind a break out of the outermost loop", "4{!2r}", {"save_steps": 2}, "", "S0 0 1 S2 S2"),
    ("behind the runs after an inner loop", "2{2{r}r}", {"save_steps": 1}, "", "S0 00 S1 01 0 S3 10 S4 11 1 S6 S6"),
    ("once at a stop in the last item", "3{2{r}}", {"save_steps": 2}, "4", "S0 00 01 S2 10 11 S4 / S4 20 21 S6 S6"),
    ("in two loops", "3{r}2{r}", {"save_steps": 2}, "", "S0 0 1 S2 2 0 S4 1 S5"),
]


class Traced(CheckpointSaverListener):
    """Adds each checkpoint, with its step, to a trace."""

    def __init__(self, trace: list[str]) -> None:
        self._trace = trace

    def after_save(self, session: Session, step: int) -> None:
        self._trace.append(f"S{step}")


@pytest.mark.parametrize(
    ("script", "period", "stops", "done"), [row[1:] for row in SAVED], ids=[row[0] for row in SAVED]
)
def test_saves(script: str, period: dict[str, Any], stops: str, done: str, tmp_path: Path) -> None:
    traces = []
    for stop in [*map(int, stops.split()), None]:
        trace: list[str] = []
        hooks: list[SessionRunHook] = [CheckpointSaverHook(tmp_path, listeners=[Traced(trace)], **period)]
        hooks += [] if stop is None else [StopAtStepHook(last_step=stop)]
        shapes.train(MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path), script, trace)
        traces.append(" ".join(trace))
    assert " / ".join(traces) == done


class _StoppingGuard(SessionRunHook):
    """Raises StopIteration from a guard of checkpoints, each time it is asked for which ``stops(count)`` is true."""

    def __init__(self, stops: Callable[[int], bool]) -> None:
        self.stops, self.asked = stops, 0

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        session.guard_checkpoints(self.refusal)

    def refusal(self) -> None:
        self.asked += 1
        if self.stops(self.asked):
            raise StopIteration("enough")


def test_the_end_saves_what_a_stop_before_the_save_prevented(tmp_path: Path) -> None:
    hooks = [_StoppingGuard(lambda count: count == 2), CheckpointSaverHook(tmp_path, save_steps=3)]
    with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for _ in loop.until_stop(range(8)):
            loop.run()
    assert (loop.stop_reason, loop.global_step) == ("StopIteration: enough", 3)
    assert steps(tmp_path) == [0, 3]


@pytest.mark.parametrize("save_steps", [3, 5])  # a save is due at the stop, or only at the end
def test_a_guard_that_stops_at_the_end_too_prevents_the_last_checkpoint(
    tmp_path: Path, save_steps: int, lines: Lines
) -> None:
    hooks = [_StoppingGuard(lambda count: count >= 2), CheckpointSaverHook(tmp_path, save_steps=save_steps)]
    with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for _ in loop.until_stop(range(3)):
            loop.run()
    assert steps(tmp_path) == [0]
    assert warnings_in(lines) == ["no checkpoint of step 3: StopIteration: enough"]


def test_an_error_of_a_guard_at_the_end_that_is_a_kind_of_stop_iteration_is_raised(tmp_path: Path) -> None:
    class OutOfData(StopIteration):
        pass

    class Guard(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            self.session = session
            session.guard_checkpoints(self.refusal)

        def refusal(self) -> None:
            if self.session.global_step == 1:
                raise OutOfData("of the guard")

    hooks = [Guard(), CheckpointSaverHook(tmp_path, save_steps=5)]
    loop = MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path)
    loop.run()
    with pytest.raises(OutOfData, match="of the guard"):
        loop.close()
    assert steps(tmp_path) == [0]


def test_the_end_waits_for_a_saver_of_the_script_that_can_only_wait(tmp_path: Path) -> None:
    class OwnSaver:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def save(self, session: Session, path: str, step: int, **_: Any) -> str:
            self.calls.append(f"save {step}")
            return f"{path}-{step}"

        def wait(self) -> None:
            self.calls.append("wait")

    saver: Any = OwnSaver()
    with MonitoredLoop(lambda: None, hooks=[CheckpointSaverHook(tmp_path, save_steps=5, saver=saver)]) as loop:
        loop.run()
    assert saver.calls == ["save 0", "save 1", "wait"]


def test_a_period_begins_at_the_step_that_was_saved_last(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.1)

    def step() -> None:
        for _ in range(3):
            optimizer.step()

    hooks = [CheckpointSaverHook(tmp_path, save_steps=4)]
    loop = MonitoredLoop(step, optimizer=optimizer, hooks=hooks, checkpoint_dir=tmp_path, step_unit="optimizer_step")
    with loop:
        for _ in range(4):
            loop.run()
    assert steps(tmp_path) == [0, 6, 12]


@pytest.mark.parametrize("in_an_item", [False, True])
def test_saves_at_its_place_in_the_list_or_after_the_item(in_an_item: bool, tmp_path: Path) -> None:
    calls: Calls = []
    a, b = (RecordingHook(name=name, calls=calls) for name in "ab")
    saver = CheckpointSaverHook(tmp_path, save_steps=1, listeners=[Listener(calls)])
    with MonitoredLoop(lambda: 0.1, hooks=[a, saver, b]) as loop:
        for _ in loop.until_stop([0]) if in_an_item else [0]:
            loop.run()
    run = calls[calls.index(("b", "before_run", False)) + 1 :]
    after_runs, save = [("a", "after_run"), ("b", "after_run")], [("l", "before_save"), ("l", "after_save")]
    expected = [*after_runs, *save] if in_an_item else [after_runs[0], *save, after_runs[1]]
    assert [call[:2] for call in run[:4]] == expected


def test_is_called_in_no_run_in_which_it_has_nothing_to_save(tmp_path: Path) -> None:
    class Counting(CheckpointSaverHook):
        runs = 0

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            self.runs += 1
            super().after_run(run_context, run_values)

    hook = Counting(tmp_path, save_steps=4)
    trace(hook, losses=[0.1] * 11, checkpoint_dir=tmp_path)
    assert hook.runs == 2


def test_a_hook_that_is_reused_starts_over(tmp_path: Path) -> None:
    listener = Listener()
    hook = CheckpointSaverHook(tmp_path, save_steps=4, listeners=[listener])
    trace(hook, losses=[0.1] * 5)
    listener.calls.clear()
    trace(hook, losses=[0.1] * 5, start_step=100)
    assert saves(listener) == [100, 104, 105]


@pytest.mark.parametrize(
    ("periods", "message"),
    [
        ({}, "CheckpointSaverHook has no period: give one of save_secs=, save_steps=, every_n_steps="),
        ({"save_secs": 1, "save_steps": 1}, "save_secs=1, save_steps=1: give exactly one of them"),
    ],
)
def test_needs_exactly_one_period(periods: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointSaverHook(tmp_path, **periods)


@pytest.mark.parametrize("save_steps", [0, -1, 2.5, True])
def test_refuses_an_invalid_number_of_steps(save_steps: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"save_steps={save_steps}:"):
        CheckpointSaverHook(tmp_path, save_steps=save_steps)


# -- where, and with which saver --------------------------------------------------------------------------------------


def test_the_name_of_a_checkpoint_can_be_chosen(tmp_path: Path) -> None:
    hook = CheckpointSaverHook(tmp_path, save_steps=4, checkpoint_basename="net")
    trace(hook, losses=[0.1], checkpoint_dir=tmp_path)
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/net-1"


# The folders of the hooks that save, the one of the loop, None without, and the warning.
WARNINGS: list[tuple[str, list[str | None], str | None, str]] = [
    ("saves what is not restored", ["a"], None, r"saves checkpoints, but .* MonitoredLoop\(.*, checkpoint_dir='a'\)"),
    ("saves and restores", ["a"], "a", ""),
    ("saves into the folder of the loop", [None], "a", ""),
    ("saves into another folder", ["a"], "b", "^checkpoint_dir='b': the loop will never resume from .*CheckpointSaver"),
    ("saves into another folder too", ["a", "b"], "b", ""),
    ("saves into another one and that of the loop", ["a", None], "b", ""),
    ("saves nothing", [], "a", r"^a has no checkpoint, and no .* CheckpointSaverHook\('a', save_secs=600\)"),
    ("restores only", [], "full", ""),
]


@pytest.mark.parametrize(
    ("folders", "restores", "warning"), [row[1:] for row in WARNINGS], ids=[row[0] for row in WARNINGS]
)
def test_a_loop_warns_if_nothing_would_be_resumed(
    folders: list[str | None],
    restores: str | None,
    warning: str,
    tmp_path: Path,
    lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Saver().save(Session(), "full/model.ckpt", 1)
    hooks = [CheckpointSaverHook(folder, save_steps=9) for folder in folders]
    MonitoredLoop(lambda: 0.5, hooks=hooks, checkpoint_dir=restores).close()
    said = warnings_in(lines)
    assert len(said) == bool(warning)
    assert all(re.search(warning, text) for text in said)


class NotingSaver(Saver):
    """A Saver that records the steps that it saved."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.saved: list[int] = []

    def save(self, session: Any, path: Any, global_step: int, **arguments: Any) -> str:
        self.saved.append(global_step)
        return super().save(session, path, global_step, **arguments)


@pytest.mark.parametrize(
    ("of_the_hook", "saves"),
    [
        (lambda saver: {}, "session"),
        (lambda saver: {"saver": saver}, "hook"),
        (lambda saver: {"scaffold": Scaffold(saver=saver)}, "hook"),
        (lambda saver: {"scaffold": Scaffold()}, "session"),
    ],
    ids=["neither", "a saver", "a scaffold with one", "a scaffold without one"],
)
def test_the_saver_of_the_hook_comes_before_that_of_the_session(
    of_the_hook: Callable[[Saver], dict[str, Any]], saves: str, tmp_path: Path
) -> None:
    savers = {"hook": NotingSaver(), "session": NotingSaver()}
    hook = CheckpointSaverHook(tmp_path, save_steps=1, **of_the_hook(savers["hook"]))
    scaffold = Scaffold(saver=savers["session"])
    MonitoredLoop(lambda: None, hooks=[hook], scaffold=scaffold, checkpoint_dir=tmp_path).close()
    assert {name: saver.saved for name, saver in savers.items() if saver.saved} == {saves: [0]}


def test_a_saver_and_a_scaffold_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"saver=Saver\(.*\), scaffold=.*: give CheckpointSaverHook one of them"):
        CheckpointSaverHook(tmp_path, save_steps=1, saver=Saver(), scaffold=Scaffold())


def test_the_newest_checkpoint_is_the_one_written_last(tmp_path: Path) -> None:
    with MonitoredLoop(
        lambda: None, hooks=[CheckpointSaverHook(tmp_path, save_steps=3)], checkpoint_dir=tmp_path
    ) as loop:
        for _ in range(7):
            loop.run()
        loop.session.global_step = 2  # the user returns to an earlier state
    assert steps(tmp_path) == [0, 3, 6, 2]
    with MonitoredLoop(lambda: None, checkpoint_dir=tmp_path) as loop:
        assert loop.global_step == 2


def test_checkpoints_of_an_earlier_loop_count_among_those_kept(tmp_path: Path) -> None:
    for _ in range(2):
        hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=Saver(max_to_keep=3))
        trace(hook, losses=[0.1] * 2, checkpoint_dir=tmp_path)
    assert steps(tmp_path) == [2, 3, 4]


def session_logs(directory: Path) -> list[tuple[str, int, str]]:
    found = []
    for file in sorted(directory.glob("*.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            if event.HasField("session_log"):
                log = event.session_log
                found.append((SessionLog.SessionStatus.Name(log.status), event.step, log.checkpoint_path))
    return found


def test_the_event_file_in_the_folder_has_every_checkpoint(tmp_path: Path) -> None:
    trace(CheckpointSaverHook(tmp_path, save_steps=2), losses=[0.1] * 3, checkpoint_dir=tmp_path)
    assert session_logs(tmp_path) == [("CHECKPOINT", step, f"{tmp_path}/model.ckpt-{step}") for step in (0, 2, 3)]


def test_also_after_a_loop_that_failed(tmp_path: Path) -> None:
    hook = CheckpointSaverHook(tmp_path, save_steps=2)
    trace(hook, losses=[0.1, 0.1, ValueError], catch=ValueError, checkpoint_dir=tmp_path)
    assert [step for _, step, _ in session_logs(tmp_path)] == [0, 2]


def test_the_time_it_takes_is_not_counted_as_training(tmp_path: Path, clock: FakeClock, lines: Lines) -> None:
    class Slow(CheckpointSaverListener):
        def before_save(self, session: Session, step: int) -> None:
            clock.advance(100)

    hooks = [StepCounterHook(2), CheckpointSaverHook(tmp_path, save_steps=1, listeners=[Slow()])]
    with MonitoredLoop(lambda: clock.advance(1), hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for _ in range(3):
            loop.run()
    assert ("INFO", "global_step/sec: 1") in lines


# -- listeners --------------------------------------------------------------------------------------------------------


def test_listeners_are_called_in_order_around_every_checkpoint(tmp_path: Path) -> None:
    calls: Calls = []
    listeners = [Listener(calls, name) for name in "lm"]
    hooks = [StopAtStepHook(last_step=1), CheckpointSaverHook(tmp_path, save_steps=1, listeners=listeners)]
    trace(*hooks, losses=[0.1] * 2, checkpoint_dir=tmp_path)
    around = [[(name, method, step) for method in ("before_save", "after_save") for name in "lm"] for step in (0, 1)]
    assert calls == [
        *[(name, "begin") for name in "lm"],
        *around[0],
        *around[1],
        *[(name, "end", 1) for name in "lm"],
    ]


def test_the_checkpoint_is_there_after_and_not_before(tmp_path: Path) -> None:
    seen: list[str | None] = []

    class Looking(CheckpointSaverListener):
        def before_save(self, session: Session, step: int) -> None:
            seen.append(latest_checkpoint(tmp_path))

        after_save = before_save

    hook = CheckpointSaverHook(tmp_path, save_steps=1, listeners=[Looking()])
    MonitoredLoop(lambda: None, hooks=[hook], checkpoint_dir=tmp_path).close()
    assert seen == [None, f"{tmp_path}/model.ckpt-0"]


def test_a_listener_may_stop_the_loop(tmp_path: Path) -> None:
    hook = CheckpointSaverHook(tmp_path, save_steps=2, listeners=[Listener(stop_from=4)])
    traced = trace(hook, losses=[0.1] * 9, checkpoint_dir=tmp_path)
    assert traced.steps == [1, 2, 3, 4]
    assert traced.stop_reason == "CheckpointSaverHook: a checkpoint listener asked to at step 4"


def test_at_creation_and_at_the_end_that_is_ignored(tmp_path: Path) -> None:
    listener = Listener(stop_from=0)
    hook = CheckpointSaverHook(tmp_path, save_steps=9, listeners=[listener])
    traced = trace(hook, losses=[0.1] * 3, checkpoint_dir=tmp_path)
    assert (saves(listener), traced.steps, traced.stop_reason) == ([0, 3], [1, 2, 3], "data ended")


def test_a_listener_that_stops_the_loop_at_its_end_leaves_the_checkpoint(tmp_path: Path, lines: Lines) -> None:
    class Stopping(Listener):
        def after_save(self, session: Session, step: int) -> bool:
            if step == 3:
                raise StopIteration("enough")
            return super().after_save(session, step)

    listener = Stopping()
    hook = CheckpointSaverHook(tmp_path, save_steps=9, listeners=[listener])
    traced = trace(hook, losses=[0.1] * 3, checkpoint_dir=tmp_path)
    assert (steps(tmp_path), traced.error, warnings_in(lines)) == ([0, 3], None, [])
    assert listener.calls[-1] == ("l", "end", 3)


@pytest.mark.parametrize("listeners", [5, Listener(), [Listener], [5]])
def test_listeners_are_a_list_of_instances(listeners: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="give a list of instances of CheckpointSaverListener"):
        CheckpointSaverHook(tmp_path, save_steps=9, listeners=listeners)


def test_every_listener_is_called_also_after_one_asked_to_stop(tmp_path: Path) -> None:
    calls: Calls = []
    listeners = [Listener(calls, "l", stop_from=1), Listener(calls, "m")]
    trace(CheckpointSaverHook(tmp_path, save_steps=1, listeners=listeners), losses=[0.1] * 9)
    assert [call for call in calls if call[1:] == ("after_save", 1)] == [("l", "after_save", 1), ("m", "after_save", 1)]


@pytest.mark.parametrize(("method", "saved"), [("before_save", []), ("after_save", [0])])
def test_an_error_of_a_listener_is_raised(method: str, saved: list[int], tmp_path: Path) -> None:
    hook = CheckpointSaverHook(tmp_path, save_steps=1, listeners=[Listener(raises={method: KeyError})])
    with pytest.raises(KeyError) as caught:
        MonitoredLoop(lambda: None, hooks=[hook], checkpoint_dir=tmp_path)
    assert steps(tmp_path) == saved
    assert "in after_create_session of CheckpointSaverHook" in caught.value.__notes__[0]


# -- what is not saved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail", [True, False], ids=["fails", "stops"])
@pytest.mark.parametrize("saver_first", [True, False], ids=["saver-first", "saver-last"])
@pytest.mark.parametrize("lag", [None, 0, 1, 3, 50])
def test_nothing_is_saved_of_the_run_of_a_nan_nor_after_it(
    fail: bool, saver_first: bool, lag: int | None, tmp_path: Path
) -> None:
    listener = Listener()
    hooks = [CheckpointSaverHook(tmp_path, save_steps=1, listeners=[listener]), NanTensorHook("loss", fail)]
    hooks = hooks if saver_first else hooks[::-1]
    with nullcontext() if lag is None else FakeDevice(lag):
        trace(
            *hooks,
            losses=[0.5, 0.25, NAN, 0.5, 0.5],
            checkpoint_dir=tmp_path,
            catch=NanLossDuringTrainingError,
        )
    assert steps(tmp_path) == saves(listener) == [0, 1, 2]


def test_flags_that_are_not_read_yet_are_read_before_a_checkpoint(tmp_path: Path) -> None:
    hooks = [NanTensorHook("loss", fail_on_nan_loss=False), CheckpointSaverHook(tmp_path, save_steps=5)]
    with FakeDevice(lag=50):
        traced = trace(*hooks, losses=[0.5, NAN, 0.5, 0.5, 0.5, 0.5], checkpoint_dir=tmp_path)
    assert steps(tmp_path) == [0]
    assert ("WARNING", "no checkpoint of step 5: loss is NaN at step 2") in traced.lines


def test_nothing_is_saved_at_the_end_of_a_loop_that_a_nan_stopped(tmp_path: Path) -> None:
    hooks = [CheckpointSaverHook(tmp_path, save_steps=100), NanTensorHook("loss", fail_on_nan_loss=False)]
    traced = trace(*hooks, losses=[0.5, 0.25, NAN], checkpoint_dir=tmp_path)
    assert steps(tmp_path) == [0]
    assert "no checkpoint of step 3" in str(traced.lines)


def test_an_infinity_prevents_saving_if_the_nan_hook_looks_for_it(tmp_path: Path) -> None:
    hooks = [CheckpointSaverHook(tmp_path, save_steps=1), NanTensorHook("loss", False, also_inf=True)]
    trace(*hooks, losses=[0.5, math.inf], checkpoint_dir=tmp_path)
    assert steps(tmp_path) == [0, 1]


class Scaled(torch.nn.Module):
    """A model whose output is its input times its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x)
        return output


WATCHED = {
    "an-output": "loss",
    "a-closure-of-an-output": lambda loss: loss * 2,
    "a-closure-of-an-input": lambda x: x * 2,
    "what-a-submodule-made": "inner:output",
    "what-a-submodule-received": "inner:input",
    "several": {"loss": "loss", "x": lambda x: x},
}


@pytest.mark.parametrize("watched", WATCHED.values(), ids=WATCHED)
def test_whatever_is_watched_a_saver_before_the_nan_hook_does_not_save_a_nan(watched: Any, tmp_path: Path) -> None:
    model = Scaled()
    hooks = [CheckpointSaverHook(tmp_path, save_steps=1), NanTensorHook(watched, fail_on_nan_loss=False)]
    with MonitoredLoop(lambda x: model(x).sum(), model, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for value in loop.until_stop([0.5, NAN, 0.5]):
            loop.run(torch.tensor([value]))
    assert steps(tmp_path) == [0, 1]


def test_what_is_watched_is_evaluated_once_a_run(tmp_path: Path) -> None:
    asked: list[float] = []

    def watched(loss: torch.Tensor) -> torch.Tensor:
        asked.append(loss.item())
        return loss

    trace(CheckpointSaverHook(tmp_path, save_steps=1), NanTensorHook(watched), losses=[0.5, 0.25])
    assert asked == [0.5, 0.25]


@pytest.mark.parametrize("saver_first", [True, False], ids=["saver-first", "saver-last"])
def test_a_nan_of_a_run_that_a_recovery_undid_does_not_prevent_saving(saver_first: bool, tmp_path: Path) -> None:
    failing = RecordingHook(raises={("after_run", 2): AbortedError})
    hooks = [CheckpointSaverHook(tmp_path, save_steps=1), NanTensorHook("loss")]
    hooks = hooks if saver_first else hooks[::-1]
    traced = trace(failing, *hooks, losses=[0.5, NAN, 0.25, 0.5], checkpoint_dir=tmp_path)
    assert steps(tmp_path) == [0, 1, 2, 3]
    assert not [text for _, text in traced.lines if "no checkpoint" in text]


def test_any_hook_may_refuse_a_checkpoint(tmp_path: Path, lines: Lines) -> None:
    class Doubting(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            session.guard_checkpoints(lambda: "of doubts" if session.global_step == 2 else None)

    listener = Listener()
    hooks = [CheckpointSaverHook(tmp_path, save_steps=1, listeners=[listener]), Doubting()]
    with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for _ in range(3):
            loop.run()
    assert saves(listener) == [0, 1, 3]
    assert warnings_in(lines) == ["no checkpoint of step 2: of doubts"]


def test_the_first_of_several_refusals_is_the_reason() -> None:
    session = Session()
    for reasons in ({}, {"why": "first"}, {"why": "second"}):
        session.guard_checkpoints(partial(reasons.get, "why"))
    assert session.why_no_checkpoint() == "first"


def test_without_guards_no_checkpoint_is_refused() -> None:
    assert Session().why_no_checkpoint() is None


# -- on a device ------------------------------------------------------------------------------------------------------

FAR = 1000
"""A lag, in runs, that is longer than any test."""


class Waiting(SessionRunHook):
    """Passes the loss to a callback in every run, and records in which runs it arrived."""

    def begin(self) -> None:
        self.arrived: list[float] = []

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        value = torch.tensor(float(run_context.session.global_step))
        run_context.when_ready(value, lambda value: self.arrived.append(value.item()))


def save_on(device: FakeDevice, saver: Saver, folder: Path, *hooks: SessionRunHook, losses: list[float]) -> int:
    """Run a loop with ``hooks`` that saves in every run; return how often it waited for the device until it closed."""
    weight, pending = torch.nn.Linear(1, 1), iter(losses)
    saving = CheckpointSaverHook(folder, save_steps=1, saver=saver)
    with device:
        loop = MonitoredLoop(lambda: torch.tensor(next(pending)), weight, hooks=[*hooks, saving], checkpoint_dir=folder)
        with loop:
            for _ in losses:
                if not loop.should_stop():
                    loop.run()
            waits = device.waits
    saver.close()
    return waits


@pytest.mark.parametrize("guarded", [True, False])
def test_an_asynchronous_save_does_not_wait_for_the_device(guarded: bool, tmp_path: Path) -> None:
    hooks = [Waiting(), *([NanTensorHook("loss")] if guarded else [])]
    saver = Saver(async_save=True)
    assert save_on(FakeDevice(FAR), saver, tmp_path, *hooks, losses=[0.5, 0.25, 0.125]) == 0
    assert steps(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("saver_first", [True, False])
@pytest.mark.parametrize("value", [NAN, [0.5, NAN]], ids=["a number", "a list"])
def test_a_nan_that_is_still_on_the_device_is_not_committed(
    saver_first: bool, value: Any, tmp_path: Path, lines: Lines
) -> None:
    hooks = [
        CheckpointSaverHook(tmp_path, save_steps=1, saver=Saver(async_save=True)),
        NanTensorHook("loss", fail_on_nan_loss=False),
    ]
    losses = iter([0.5, value, 0.5])
    with (
        FakeDevice(FAR),
        MonitoredLoop(
            lambda: torch.tensor(next(losses)), hooks=hooks if saver_first else hooks[::-1], checkpoint_dir=tmp_path
        ) as loop,
    ):
        for _ in range(3):
            if not loop.should_stop():
                loop.run()
    loop.session.wait_for_savers()
    assert steps(tmp_path) == [0, 1]
    assert str(warnings_in(lines)).count("no checkpoint of step 2") == 1


@pytest.mark.parametrize("lag", [None, 0])
def test_after_a_nan_that_is_known_nothing_is_handed_to_the_thread_that_writes(
    lag: int | None, tmp_path: Path, lines: Lines
) -> None:
    listener = Listener()
    hooks = [
        NanTensorHook("loss", fail_on_nan_loss=False, max_lag_steps=lag),
        CheckpointSaverHook(tmp_path, save_steps=1, saver=Saver(async_save=True), listeners=[listener]),
    ]
    losses = iter([0.5, NAN])
    device = nullcontext() if lag is None else FakeDevice(FAR)
    with device, MonitoredLoop(lambda: torch.tensor(next(losses)), hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for _ in range(2):
            loop.run()
    assert saves(listener) == [0, 1]
    assert "no checkpoint of step 2" in str(warnings_in(lines))


def test_a_later_checkpoint_than_the_nan_is_not_committed_either(tmp_path: Path, lines: Lines) -> None:
    hooks = [
        NanTensorHook("loss", fail_on_nan_loss=False),
        CheckpointSaverHook(tmp_path, save_steps=3, saver=Saver(async_save=True)),
    ]
    losses = iter([0.5, NAN, 0.5])
    with (
        FakeDevice(FAR),
        MonitoredLoop(lambda: torch.tensor(next(losses)), hooks=hooks, checkpoint_dir=tmp_path) as loop,
    ):
        for _ in range(3):
            loop.run()
    loop.session.wait_for_savers()
    assert steps(tmp_path) == [0]
    assert "no checkpoint of step 3" in str(warnings_in(lines))


def test_before_a_synchronous_save_every_callback_is_called(tmp_path: Path) -> None:
    hook = Waiting()
    with (
        FakeDevice(FAR),
        MonitoredLoop(
            lambda: torch.tensor(0.5),
            hooks=[hook, CheckpointSaverHook(tmp_path, save_steps=2)],
            checkpoint_dir=tmp_path,
        ) as loop,
    ):
        for _ in range(2):
            loop.run()
        assert hook.arrived == [1.0, 2.0]


class Summing(Waiting):
    """Has a state that the callbacks change."""

    def state_dict(self) -> dict[str, Any]:
        return {"arrived": self.arrived}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.arrived = state["arrived"]


def test_an_asynchronous_save_has_what_the_callbacks_of_a_hook_with_a_state_changed(tmp_path: Path) -> None:
    saver = Saver(async_save=True)
    save_on(FakeDevice(FAR), saver, tmp_path, Summing(), losses=[0.5, 0.25])
    saved = torch.load(f"{latest_checkpoint(tmp_path)}/state.pt", weights_only=True)
    assert [state["arrived"] for name, state in saved.items() if name.startswith("hooks.")] == [[1.0, 2.0]]


def test_an_asynchronous_save_asks_a_guard_that_cannot_answer_later(tmp_path: Path, lines: Lines) -> None:
    class Doubting(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            session.guard_checkpoints(lambda: "of doubts" if session.global_step == 1 else None)

    saver = Saver(async_save=True)
    save_on(FakeDevice(FAR), saver, tmp_path, Doubting(), NanTensorHook("loss"), losses=[0.5, 0.25])
    assert steps(tmp_path) == [0, 2]
    assert warnings_in(lines) == ["no checkpoint of step 1: of doubts"]


def test_an_error_of_a_refusal_in_the_background_is_raised_by_the_next_call(tmp_path: Path) -> None:
    def refuse() -> str:
        raise RuntimeError("the device is lost")

    saver = Saver(async_save=True)
    saver.save(Session(), tmp_path / "model.ckpt", 1, refusals=[refuse])
    with pytest.raises(RuntimeError, match="the device is lost"):
        saver.wait()
    assert steps(tmp_path) == []


# -- hooks with a state -----------------------------------------------------------------------------------------------


class Counting(SessionRunHook):
    """A hook that counts its runs in all processes; the count is its state."""

    def __init__(self, name: str | None = None) -> None:
        self.runs = 0
        self.seen: list[int] = []
        if name is not None:
            self.name = name

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self.seen.append(self.runs)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.runs += 1

    def state_dict(self) -> dict[str, int]:
        return {"runs": self.runs}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.runs = state["runs"]

    def __repr__(self) -> str:
        return "Counting()"


def saved_names(directory: Path) -> set[str]:
    newest = latest_checkpoint(directory)
    assert newest is not None
    always = {"global_step", "runs", "num_threads", "position", "random"}
    return set(torch.load(f"{newest}/state.pt", weights_only=True)) - always


@pytest.mark.parametrize(
    ("hooks", "names"),
    [
        ([Counting()], {"hooks.Counting"}),
        ([Counting("batches")], {"hooks.batches"}),
        ([Counting(), Counting("batches"), StopAtStepHook(2)], {"hooks.Counting", "hooks.batches"}),
    ],
)
def test_the_state_of_a_hook_is_saved_under_its_name(
    hooks: list[SessionRunHook], names: set[str], tmp_path: Path
) -> None:
    trace(*hooks, CheckpointSaverHook(tmp_path, save_steps=9), losses=[0.1], checkpoint_dir=tmp_path)
    assert saved_names(tmp_path) == names


@pytest.mark.parametrize("name", [None, "batches"])
def test_two_of_one_name_are_refused(name: str | None) -> None:
    pattern = f"Counting\\(\\) and Counting\\(\\) would both save their state as '{name or 'Counting'}'.*another name"
    with pytest.raises(ValueError, match=pattern):
        MonitoredLoop(lambda: None, hooks=[Counting(name), Counting(name)])


def test_a_state_is_restored_before_after_create_session(tmp_path: Path) -> None:
    for runs in (3, 2):
        hook = Counting()
        saver = CheckpointSaverHook(tmp_path, save_steps=9)
        trace(hook, saver, losses=[0.1] * runs, checkpoint_dir=tmp_path)
    assert (hook.seen, hook.runs) == ([3], 5)


def test_one_after_the_saver_is_warned_about(tmp_path: Path, lines: Lines) -> None:
    saver = CheckpointSaverHook(tmp_path, save_steps=9)
    with MonitoredLoop(lambda: None, hooks=[saver, Counting()], checkpoint_dir=tmp_path) as loop:
        loop.run()
        loop.run()
    assert warnings_in(lines) == [
        f"Counting() comes after {saver!r}, so without until_stop, checkpoints contain its state from before the run: "
        "move it to the front"
    ]


def test_one_before_the_saver_is_not(tmp_path: Path, lines: Lines) -> None:
    hooks = [Counting(), CheckpointSaverHook(tmp_path, save_steps=9)]
    with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        loop.run()
    assert not warnings_in(lines)


def test_one_that_only_reports_may_come_after_the_saver(tmp_path: Path, lines: Lines) -> None:
    hooks = [CheckpointSaverHook(tmp_path, save_steps=9), EvaluationHook(lambda: 1.0, every_n_steps=1)]
    with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        loop.run()
    assert not warnings_in(lines)


@pytest.mark.parametrize("nested", [False, True])
def test_one_after_the_saver_in_an_until_stop_is_not(tmp_path: Path, lines: Lines, nested: bool) -> None:
    counting = Counting()
    hooks = [CheckpointSaverHook(tmp_path, save_steps=2), counting]
    with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for _ in loop.until_stop(range(4)):
            for _ in loop.until_stop(range(2)) if nested else [0]:
                loop.run()
    assert not warnings_in(lines)


def test_a_hook_that_can_save_and_not_load_has_no_state(tmp_path: Path) -> None:
    class Telling(SessionRunHook):
        def state_dict(self) -> dict[str, int]:
            return {}

    trace(Telling(), CheckpointSaverHook(tmp_path, save_steps=9), losses=[0.1], checkpoint_dir=tmp_path)
    assert saved_names(tmp_path) == set()


def test_a_second_saver_of_a_folder_saves_a_step_again_only_for_its_listeners(tmp_path: Path, lines: Lines) -> None:
    listener = Listener()
    for listeners, saves in (([], 2), ([listener], 4)):
        lines.clear()
        folder = tmp_path / str(saves)
        hooks = [
            CheckpointSaverHook(folder, save_steps=9),
            CheckpointSaverHook(folder, save_steps=9, listeners=listeners),
        ]
        with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=folder) as loop:
            loop.run()
        assert len([text for _, text in lines if text.startswith("saving a checkpoint")]) == saves
    around = ["before_save", "after_save"]
    assert [call[1] for call in listener.calls] == ["begin", *around, *around, "end"]


def test_at_a_stop_two_savers_of_a_folder_save_once(tmp_path: Path, lines: Lines) -> None:
    hooks = [CheckpointSaverHook(tmp_path, save_steps=9) for _ in range(2)]
    with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for _ in loop.until_stop(range(8)):
            loop.run()
            if loop.global_step == 3:
                loop.request_stop()
    assert len([text for _, text in lines if text.startswith("saving a checkpoint of step 3")]) == 1
    assert steps(tmp_path) == [0, 3]


# -- saving in the background -----------------------------------------------------------------------------------------


class GatedDisk(Disk):
    """A disk that renames no file until the gate is open, and fails for given names."""

    def __init__(self, *fails: str) -> None:
        self.gate = threading.Event()
        self.fails = fails

    def rename(self, path: str, new_path: str) -> None:
        assert self.gate.wait(10)
        if new_path.endswith(self.fails):
            raise OSError(errno.ENOSPC, "No space left on device")
        super().rename(path, new_path)


def in_background(
    directory: Path, *fails: str, own: bool | None, skips: bool = False, **hook: Any
) -> tuple[GatedDisk, Callable[..., Any]]:
    """Return a disk, and a function that creates a loop which saves to it in the background.

    The saver is the hook's own, or the session's. With ``None``, it is the session's, and only the hook has async_save.
    """
    if skips:
        hook["async_save"] = "skip"
    saver, disk = Saver(async_save=own is not None), GatedDisk(*fails)
    saver.disk = disk
    if own is None:
        hook.setdefault("async_save", True)
    saves = CheckpointSaverHook(directory, save_steps=1, saver=saver if own else None, **hook)
    scaffold = Scaffold(saver=None if own else saver)

    def make(*hooks: SessionRunHook, step: Callable[[], Any] = lambda: None) -> MonitoredLoop[Any]:
        return MonitoredLoop(step, hooks=[saves, *hooks], scaffold=scaffold, checkpoint_dir=directory)

    return disk, make


OWN = pytest.mark.parametrize("own", [True, False, None], ids=["of-the-hook", "of-the-session", "by-the-argument"])


@OWN
def test_training_continues_while_a_checkpoint_is_written(own: bool | None, tmp_path: Path) -> None:
    disk, make = in_background(tmp_path, own=own)
    loop = make(step=disk.gate.set)  # the step opens the gate: if the save waited, no step would ever be made
    assert steps(tmp_path) == []
    loop.run()
    loop.close()
    assert steps(tmp_path) == [0, 1]


@OWN
def test_by_choice_a_checkpoint_is_skipped_while_one_is_being_written(
    own: bool | None, tmp_path: Path, lines: Lines
) -> None:
    disk, make = in_background(tmp_path, own=own, skips=True)
    with make() as loop:
        for _ in range(2):
            loop.run()
        disk.gate.set()
    skipped = "no checkpoint of step {}: the one before it is still being written"
    assert warnings_in(lines) == [skipped.format(1), skipped.format(2)]
    assert steps(tmp_path) == [0, 2]  # the end of the loop saves what was skipped


def test_a_stop_saves_also_while_a_checkpoint_is_being_written(tmp_path: Path, lines: Lines) -> None:
    disk, make = in_background(tmp_path, own=True, skips=True)
    opener = threading.Timer(0.02, disk.gate.set)
    with make(StopAtStepHook(last_step=1)) as loop:
        for _ in loop.until_stop(range(9)):
            opener.start()
            loop.run()
    assert warnings_in(lines) == []
    assert steps(tmp_path) == [0, 1]


class BusySaver(Saver):
    """A saver that always still writes the previous checkpoint."""

    @property
    def is_writing(self) -> bool:
        return True


def test_a_stop_saves_what_was_skipped_in_the_same_item_before_the_code_behind_the_loop(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    saves = CheckpointSaverHook(tmp_path, every_n_steps=2, saver=BusySaver(), async_save="skip")
    with MonitoredLoop(
        lambda: None, model, hooks=[saves, StopAtStepHook(last_step=3)], checkpoint_dir=tmp_path
    ) as loop:
        for _ in loop.until_stop(range(2)):
            for _ in range(3):  # the second run is due, and the third one stops
                loop.run()
        weight = model.weight.item()
        torch.nn.init.constant_(model.weight, 9.0)
    (saved,) = torch.load(tmp_path / "model.ckpt-3" / "state.pt", weights_only=True)["model"]["weight"]
    assert saved.item() == weight


@pytest.mark.parametrize("value", ["wait", None, 2])
def test_other_choices_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"async_save={value!r}: give CheckpointSaverHook True")):
        CheckpointSaverHook("run", save_steps=1, async_save=value)


@OWN
def test_the_end_of_the_loop_waits_for_it(own: bool | None, tmp_path: Path) -> None:
    disk, make = in_background(tmp_path, own=own)
    loop = make()
    opener = threading.Timer(0.02, disk.gate.set)
    opener.start()
    loop.close()
    opener.join()
    assert steps(tmp_path) == [0]


@OWN
def test_so_does_the_end_of_a_loop_that_failed(own: bool | None, tmp_path: Path) -> None:
    disk, make = in_background(tmp_path, own=own)
    opener = threading.Timer(0.02, disk.gate.set)

    def step() -> None:
        opener.start()
        raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"), make(step=step) as loop:
        loop.run()
    opener.join()
    assert steps(tmp_path) == [0]


@OWN
def test_an_error_in_the_background_is_raised_by_the_next_checkpoint(own: bool | None, tmp_path: Path) -> None:
    disk, make = in_background(tmp_path, "-0", own=own)
    loop = make()
    disk.gate.set()
    with pytest.raises(CheckpointError, match=r"model\.ckpt-0 .*No space left"):
        loop.run()
    loop.close()
    assert steps(tmp_path) == [1]


@OWN
def test_or_at_the_end(own: bool | None, tmp_path: Path) -> None:
    disk, make = in_background(tmp_path, "-1", own=own)
    disk.gate.set()
    loop = make()
    loop.run()
    with pytest.raises(CheckpointError, match=r"model\.ckpt-1 .*No space left"):
        loop.close()
    assert steps(tmp_path) == [0]


@OWN
def test_or_is_noted_on_the_error_of_a_loop_that_failed(own: bool | None, tmp_path: Path) -> None:
    disk, make = in_background(tmp_path, "-0", own=own)
    disk.gate.set()
    failing = RecordingHook(raises={"before_run": ValueError("gone")})
    with pytest.raises(ValueError, match="gone") as caught, make(failing) as loop:
        loop.run()
    assert "model.ckpt-0 was not written" in "\n".join(caught.value.__notes__)


@OWN
def test_the_end_of_listeners_is_called_after_everything_is_written(own: bool | None, tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Looking(CheckpointSaverListener):
        def end(self, session: Session, step: int) -> None:
            seen.append(steps(tmp_path))

    disk, make = in_background(tmp_path, own=own, listeners=[Looking()])
    disk.gate.set()
    loop = make()
    loop.run()
    loop.close()
    assert seen == [[0, 1]]


# -- closing ----------------------------------------------------------------------------------------------------------


class ClosedSaver(Saver):
    """A Saver that counts how often it is closed, and raises ``error`` each time."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error
        self.closed = 0

    def close(self) -> None:
        super().close()
        self.closed += 1
        if self.error is not None:
            raise self.error


def test_a_saver_that_several_hooks_use_is_closed_once_and_its_error_is_one(tmp_path: Path) -> None:
    saver = ClosedSaver(CheckpointError("disk full"))
    hooks = [
        CheckpointSaverHook(tmp_path, save_steps=4, saver=saver, checkpoint_basename=name) for name in ("one", "two")
    ]
    loop = MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path, scaffold=Scaffold(saver=saver))
    with pytest.raises(CheckpointError) as raised:
        loop.close()
    assert (raised.value, saver.closed) == (saver.error, 1)


def test_a_saver_is_waited_for_once_and_its_error_is_one(tmp_path: Path) -> None:
    class Waiting(Saver):
        def wait(self) -> None:
            raise CheckpointError("disk full")

    session, saver = Session(), Waiting()
    session.savers += [saver, saver]
    with pytest.raises(CheckpointError, match="disk full"):
        session.wait_for_savers()


def test_the_saver_of_a_session_that_failed_is_closed_even_if_the_next_one_cannot_be_created(tmp_path: Path) -> None:
    class Unreadable(Saver):
        restored = 0

        def restore_latest(self, session: Any, directory: Any) -> str | None:
            self.restored += 1
            if self.restored > 1:
                raise CheckpointError("the folder is gone")
            return super().restore_latest(session, directory)

    saver = ClosedSaver()
    hook = CheckpointSaverHook(tmp_path, save_steps=4, saver=saver)

    def step() -> None:
        raise AbortedError

    loop = MonitoredLoop(step, hooks=[hook], checkpoint_dir=tmp_path, scaffold=Scaffold(saver=Unreadable()))
    with pytest.raises(CheckpointError, match="the folder is gone"), loop:
        loop.run()
    assert saver.closed == 1


def test_an_interrupt_of_a_listener_at_the_end_is_not_part_of_a_group(tmp_path: Path) -> None:
    interrupted = Listener(raises={"end": KeyboardInterrupt})
    hook = CheckpointSaverHook(
        tmp_path, save_steps=4, listeners=[interrupted], saver=ClosedSaver(CheckpointError("no"))
    )
    with pytest.raises(KeyboardInterrupt):
        MonitoredLoop(
            lambda: None, hooks=[hook, RecordingHook(raises={"end": KeyError})], checkpoint_dir=tmp_path
        ).close()


# -- the folder, said once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [False, True])
def test_hooks_without_a_folder_take_the_one_of_the_loop(chosen: bool, tmp_path: Path, lines: Lines) -> None:
    place = tmp_path / "model.ckpt-0" if chosen else tmp_path
    if chosen:
        MonitoredLoop(lambda: 0.5, hooks=[CheckpointSaverHook(tmp_path, save_steps=9)]).close()
        lines.clear()
    hooks = [CheckpointSaverHook(save_steps=9), BestCheckpointHook(metric="loss", save_steps=1, mode="min")]
    with MonitoredLoop(lambda: 0.5, hooks=hooks, checkpoint_dir=place) as loop:
        loop.run()
    assert (steps(tmp_path), steps(tmp_path / "best")) == ([0, 1], [1])
    assert [text for level, text in lines if level == "WARNING" and "no model" not in text] == []


@pytest.mark.parametrize(
    "hook", [CheckpointSaverHook(save_steps=9), BestCheckpointHook(metric="loss", save_steps=1, mode="min")]
)
def test_a_hook_without_a_folder_needs_a_loop_with_one(hook: SessionRunHook) -> None:
    with pytest.raises(ValueError, match=r"^\w+\(.*\) has no checkpoint_dir, and the loop has none"):
        MonitoredLoop(lambda: 0.5, hooks=[hook])
