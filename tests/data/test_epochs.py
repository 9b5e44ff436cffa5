"""Epochs: when one ends, whom it calls and with what, how it is counted over a resume, and what is saved behind it."""

import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support import shapes
from support.rank_threads import Hub, ThreadRanks, in_threads
from support.torch_state import is_profiling
from torch import nn
from torch.utils.data import DataLoader

from torchhooks import (
    AbortedError,
    BestCheckpointHook,
    CallFnHook,
    CheckpointSaverHook,
    EvaluationHook,
    EveryEpochs,
    JsonLinesWriter,
    LifecycleError,
    LoggingTensorHook,
    MonitoredLoop,
    ProfilerHook,
    SessionRunContext,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    StopIfHigherHook,
    StopIfLowerHook,
    StopIfNoDecreaseHook,
    StopIfNoIncreaseHook,
    SummarySaverHook,
    latest_checkpoint,
    running_mean,
)
from torchhooks.common.timers import Due
from torchhooks.lifecycle.hook import SessionRunArgs, SessionRunValues


class Noting(SessionRunHook):
    """Notes each call for the end of an epoch: its name, the step, and the values of what it asks for."""

    def __init__(self, calls: list[Any], n: int = 1, name: str = "end", fetches: Any = "loss") -> None:
        self._calls, self._n, self._name, self._fetches = calls, n, name, fetches
        self.runs = 0
        """How many runs the hook was called in."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        self.runs += not run_context.ends_epoch
        return SessionRunArgs(self._fetches)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_context.ends_epoch:
            self._calls.append((self._name, run_context.session.global_step, run_values.results))

    def next_due(self) -> Due:
        return Due(epochs=self._n)


def same(value: float) -> float:
    return value


def epochs_of(calls: list[Any], epochs: Iterable[Any], loop: MonitoredLoop[float], items: Iterable[float]) -> None:
    """Train for some epochs, and note the code behind each of them."""
    for _ in loop.until_stop(epochs):
        for item in loop.until_stop(items):
            loop.run(item)
        calls.append("behind")


class StopsAfter(SessionRunHook):
    """Stands for a process that ends in the middle of its work: stops the loop after a step of this process."""

    def __init__(self, runs: int) -> None:
        self._left = runs

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._left -= 1
        if not self._left:
            run_context.request_stop("interrupted")


def saving(folder: Path, **options: Any) -> CheckpointSaverHook:
    return CheckpointSaverHook(folder, **(options or {"save_steps": 1000}))


# -- when an epoch ends -----------------------------------------------------------------------------------------------


def test_hooks_are_called_at_the_end_of_each_epoch_before_the_code_behind_it_with_the_values_of_the_last_run() -> None:
    calls: list[Any] = []
    with MonitoredLoop(same, hooks=[Noting(calls)]) as loop:
        epochs_of(calls, range(2), loop, [3.0, 1.0])
    assert calls == [("end", 2, 1.0), "behind", ("end", 4, 1.0), "behind"]


# The script (see support.shapes), the period of the hook in epochs, the last step, and what happens. E2 is a call of
# the hook, for the end of an epoch at step 2.
ENDS = [
    ("each epoch, before the code behind it", "2{2{r},}", 1, None, "00 01 E2 , 10 11 E4 ,"),
    ("every second", "5{2{r}}", 2, None, "00 01 10 11 E4 20 21 30 31 E8 40 41"),
    ("every third", "5{2{r}}", 3, None, "00 01 10 11 20 21 E6 30 31 40 41"),
    ("the last one", "3{2{r}}", 3, None, "00 01 10 11 20 21 E6"),
    ("fewer epochs than the period", "2{2{r}}", 3, None, "00 01 10 11"),
    ("without an outer loop", "2{r},", 1, None, "0 1 E2 ,"),
    ("three loops", "2{2{2{r}}}", 1, None, "000 001 E2 010 011 E4 100 101 E6 110 111 E8"),
    ("two loops in an item", "2{2{r}1{r}}", 1, None, "00 01 E2 00 E3 10 11 E5 10 E6"),
    ("a loop without runs is none", "2{1{r}2{}}", 1, None, "00 E1 10 E2"),
    ("several runs in an item", "2{2{rr}}", 1, None, "00 00 01 01 E4 10 10 11 11 E8"),
    ("a stop in an epoch", "5{2{r},}", 1, 3, "00 01 E2 , 10 ,"),
    ("a stop in the last batch, after which the next process ends the epoch", "5{2{r},}", 1, 2, "00 01 ,"),
    ("a break in an epoch, before the next item", "2{,4{r!1}}", 1, None, ", 00 01 E2 , 10 11 E4"),
    ("a break in an epoch, before the next loop", "1{4{r!1}2{r}}", 1, None, "00 01 E2 00 01 E4"),
]


class Traced(SessionRunHook):
    """Adds a call for the end of an epoch, with its step, to a trace."""

    def __init__(self, trace: list[str], period: int) -> None:
        self._trace, self._period = trace, period

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_context.ends_epoch:
            self._trace.append(f"E{run_context.session.global_step}")

    def next_due(self) -> Due:
        return Due(epochs=self._period)


@pytest.mark.parametrize(
    ("script", "period", "last_step", "done"), [row[1:] for row in ENDS], ids=[row[0] for row in ENDS]
)
def test_an_epoch_ends(script: str, period: int, last_step: int | None, done: str) -> None:
    trace: list[str] = []
    stop = [] if last_step is None else [StopAtStepHook(last_step=last_step)]
    shapes.train(MonitoredLoop(lambda: None, hooks=[Traced(trace, period), *stop]), script, trace)
    assert " ".join(trace) == done


def fail_after(loop: MonitoredLoop[float], runs: int) -> None:
    """Train for epochs of two items, and raise as an error of the script would."""
    for _ in loop.until_stop(range(3)):
        for item in loop.until_stop([1.0, 2.0]):
            if loop.global_step == runs:
                raise KeyError
            loop.run(item)


def test_an_epoch_does_not_end_by_an_exception() -> None:
    calls: list[Any] = []
    with pytest.raises(KeyError), MonitoredLoop(same, hooks=[Noting(calls)]) as loop:
        fail_after(loop, 1)
    assert calls == []


def test_an_epoch_does_not_end_by_an_exception_that_the_script_handles() -> None:
    calls: list[Any] = []
    with MonitoredLoop(same, hooks=[Noting(calls)]) as loop:
        with pytest.raises(KeyError):
            fail_after(loop, 0)
        for item in loop.until_stop([5.0]):
            loop.run(item)
    assert calls == [("end", 1, 5.0)]


def test_an_epoch_ends_at_its_limit() -> None:
    calls: list[Any] = []
    with MonitoredLoop(same, hooks=[Noting(calls)]) as loop:
        for _ in loop.until_stop(range(2)):
            for item in loop.until_stop(itertools.repeat(4.0), limit=3):
                loop.run(item)
    assert calls == [("end", 3, 4.0), ("end", 6, 4.0)]


def test_an_epoch_without_an_item_is_none() -> None:
    calls: list[Any] = []
    with MonitoredLoop(same, hooks=[Noting(calls)]) as loop:
        for items in loop.until_stop([[1.0], [], [2.0]]):
            for item in loop.until_stop(items):
                loop.run(item)
            calls.append(loop.epoch)
    assert calls == [("end", 1, 1.0), 0, 0, ("end", 2, 2.0), 1]


def test_the_loop_of_a_validation_in_the_script_is_no_epoch() -> None:
    calls: list[Any] = []
    with MonitoredLoop(same, hooks=[Noting(calls)]) as loop:
        for _ in loop.until_stop(range(2)):
            for item in loop.until_stop([1.0]):
                loop.run(item)
            for _ in loop.until_stop([7, 8]):
                pass  # no run
            calls.append(loop.epoch)
    assert calls == [("end", 1, 1.0), 0, ("end", 2, 1.0), 1]


def test_hooks_are_called_in_their_order() -> None:
    calls: list[Any] = []
    hooks = [Noting(calls, name="first"), Noting(calls, 2, "second"), Noting(calls, name="third")]
    with MonitoredLoop(same, hooks=hooks) as loop:
        epochs_of([], range(2), loop, [1.0])
    assert [(name, step) for name, step, _ in calls] == [
        ("first", 1),
        ("third", 1),
        ("first", 2),
        ("second", 2),
        ("third", 2),
    ]


def test_runs_are_idle_for_hooks_that_are_due_at_the_end_of_epochs() -> None:
    hook, called = Noting([]), []
    model = nn.Linear(1, 1)
    hooks = [
        hook,
        CallFnHook(lambda loss: called.append(loss), every_n_epochs=1),
        LoggingTensorHook(["loss"], every_n_epochs=1),
        StopIfLowerHook("loss", -1.0, every_n_epochs=1),
        EvaluationHook(lambda: 1.0, every_n_epochs=1),
    ]
    with MonitoredLoop(same, model, hooks=hooks) as loop:
        epochs_of([], range(2), loop, [1.0] * 10)
    assert hook.runs == 0
    assert called == [1.0, 1.0]


# -- an epoch that is left early --------------------------------------------------------------------------------------


def break_after(loop: MonitoredLoop[float], runs: int) -> None:
    for number, item in enumerate(loop.until_stop([1.0, 2.0, 3.0, 4.0]), 1):
        loop.run(item)
        if number == runs:
            break


def return_after(loop: MonitoredLoop[float], runs: int) -> None:
    for number, item in enumerate(loop.until_stop([1.0, 2.0, 3.0, 4.0]), 1):
        loop.run(item)
        if number == runs:
            return


def test_runs_after_a_break_are_idle_again() -> None:
    modules: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        modules.add(frame.f_globals["__name__"])

    with MonitoredLoop(float, hooks=[StopAtStepHook(last_step=100)]) as loop:
        for epoch in loop.until_stop(range(2)):
            for number, item in enumerate(loop.until_stop([1.0, 2.0])):
                sys.setprofile(note if epoch and number else None)
                loop.run(item)
                sys.setprofile(None)
                if not epoch:
                    break
    assert {name for name in modules if name.startswith("torchhooks.")} == {"torchhooks.loop.monitored_loop"}


@pytest.mark.parametrize("leave", [break_after, return_after])
def test_a_break_ends_an_epoch(leave: Callable[..., None]) -> None:
    calls: list[Any] = []
    with MonitoredLoop(same, hooks=[Noting(calls)]) as loop:
        for epoch in loop.until_stop(range(2)):
            leave(loop, epoch + 2)
    assert calls == [("end", 2, 2.0), ("end", 5, 3.0)]


@pytest.mark.parametrize("holds", [False, True])
def test_a_break_ends_an_epoch_also_if_a_stop_was_requested_in_its_last_run(holds: bool) -> None:
    calls: list[Any] = []
    held = []
    with MonitoredLoop(same, hooks=[Noting(calls)]) as loop:
        batches = [loop.until_stop([1.0, 2.0, 3.0])]
        if holds:
            held.append(batches[0])  # so that Python does not close the generator at the break
        for item in batches.pop():
            loop.run(item)
            if item == 2:
                loop.request_stop()
                break
    assert calls == [("end", 2, 2.0)]


def test_after_a_close_in_the_middle_of_an_epoch_its_number_stays() -> None:
    epochs = []
    loop = MonitoredLoop(same)
    for epoch in loop.until_stop(range(3)):
        for item in loop.until_stop([1.0, 2.0, 3.0, 4.0]):
            loop.run(item)
            if loop.global_step == 6:
                loop.close()
        epochs.append((epoch, loop.epoch))
    assert epochs == [(0, 0), (1, 1)]


TOUCHES: dict[str, Callable[[Any], object]] = {
    "should_stop": lambda loop: loop.should_stop(),
    "run": lambda loop: loop.run(9.0),
    "until_stop": lambda loop: list(loop.until_stop([])),
    "enumerate": lambda loop: list(loop.enumerate([])),
    "close": lambda loop: loop.close(),
    "body": lambda loop: loop.step().__enter__(),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_the_hooks_are_called_by_the_next_touch_of_the_loop_after_a_break(touch: str) -> None:
    calls: list[Any] = []
    hook = Noting(calls)
    with MonitoredLoop(same, hooks=[hook]) as loop:
        break_after(loop, 2)
        TOUCHES[touch](loop)
        assert calls == [("end", 2, 2.0)]
        if touch == "body":
            loop.step().__exit__(None, None, None)
    assert calls == [("end", 2, 2.0)]


def test_values_of_an_evaluation_are_those_of_the_epoch_that_the_body_has_just_left() -> None:
    evaluation = EvaluationHook(lambda global_step: {"step": float(global_step)}, every_n_epochs=1)
    seen = []
    with MonitoredLoop(same, hooks=[evaluation]) as loop:
        for epoch in loop.until_stop(range(2)):
            break_after(loop, epoch + 1)
            seen.append(evaluation.values["step"])
    assert seen == [1.0, 3.0]


def test_the_epoch_has_its_number_after_a_break() -> None:
    seen = []
    with MonitoredLoop(same, hooks=[]) as loop:
        for _ in loop.until_stop(range(2)):
            break_after(loop, 1)
            seen.append(loop.epoch)
    assert seen == [0, 1]


def test_the_outer_loop_can_be_left_from_the_inner_one() -> None:
    calls: list[Any] = []

    def train(loop: MonitoredLoop[float]) -> None:
        for _ in loop.until_stop(range(3)):
            for item in loop.until_stop([1.0, 2.0]):
                loop.run(item)
                if loop.global_step == 3:
                    return

    with MonitoredLoop(same, hooks=[Noting(calls)]) as loop:
        train(loop)
    assert calls == [("end", 2, 2.0), ("end", 3, 1.0)]


def test_a_generator_that_a_variable_holds_ends_its_epoch_when_it_is_closed() -> None:
    calls: list[Any] = []
    with MonitoredLoop(same, hooks=[Noting(calls)]) as loop:
        items = loop.until_stop([1.0, 2.0])
        for item in items:
            loop.run(item)
            break
        assert calls == []
        items.close()
        loop.should_stop()
        assert calls == [("end", 1, 1.0)]


def test_a_generator_that_a_variable_holds_ends_its_epoch_when_the_loop_around_it_goes_on() -> None:
    calls: list[Any] = []
    with MonitoredLoop(same, hooks=[Noting(calls)]) as loop:
        for _ in loop.until_stop(range(3)):
            items = loop.until_stop([1.0, 2.0])
            for item in items:
                loop.run(item)
                break
        items.close()
    assert [step for _, step, _ in calls] == [1, 2, 3]


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_loop_epoch_and_loop_batch_are_the_numbers_of_the_current_items() -> None:
    seen: list[Any] = []
    with MonitoredLoop(same) as loop:
        seen.append((loop.epoch, loop.batch))
        for _ in loop.until_stop(range(2)):
            for item in loop.until_stop([1.0, 1.0]):
                loop.run(item)
                seen.append((loop.epoch, loop.batch))
            seen.append((loop.epoch, loop.batch))
        seen.append((loop.epoch, loop.batch))
    assert seen == [(None, None), (0, 0), (0, 1), (0, None), (1, 0), (1, 1), (1, None), (1, None)]


def test_the_fetches_epoch_and_batch_are_the_same_values() -> None:
    seen: list[Any] = []

    class Both(SessionRunHook):
        def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
            return SessionRunArgs(["epoch", "batch"])

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            session = run_context.session
            seen.append(run_values.results)
            assert run_values.results == [loop.epoch, loop.batch] == [session.epoch, session.batch]

    with MonitoredLoop(same, hooks=[Both()]) as loop:
        epochs_of([], range(2), loop, [1.0, 1.0])
    assert seen == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_the_epoch_at_its_end_is_still_the_one_that_ended() -> None:
    calls: list[Any] = []
    with MonitoredLoop(same, hooks=[Noting(calls, fetches="epoch")]) as loop:
        epochs_of([], range(3), loop, [1.0])
    assert [epoch for _, _, epoch in calls] == [0, 1, 2]


def test_enumerate_numbers_the_items_from_start() -> None:
    with MonitoredLoop(same) as loop:
        assert list(loop.enumerate("ab")) == [(0, "a"), (1, "b")]
        assert list(loop.enumerate("ab", 5)) == [(5, "a"), (6, "b")]
        assert list(loop.enumerate("abc", start=5, limit=2)) == [(5, "a"), (6, "b")]


@pytest.mark.parametrize("start", [-1, 0.5, "a"])
def test_enumerate_refuses_a_start_that_is_no_whole_number(start: Any) -> None:
    with MonitoredLoop(same) as loop, pytest.raises((TypeError, ValueError), match="start"):
        loop.enumerate("ab", start)


# -- a resume ---------------------------------------------------------------------------------------------------------


def resumed(folder: Path, stops: list[int], epochs: int = 3, items: int = 3, n: int = 1) -> list[Any]:
    """Train in as many processes as there are ``stops``, each of them stopped after so many runs, and one more."""
    calls: list[Any] = []
    for runs in [*stops, 0]:
        hooks = [Noting(calls, n, fetches="epoch"), saving(folder), *([StopsAfter(runs)] if runs else [])]
        with MonitoredLoop(same, hooks=hooks, checkpoint_dir=folder) as loop:
            for _ in loop.until_stop(range(epochs)):
                for i, item in loop.enumerate([float(each) for each in range(items)]):
                    loop.run(item)
                    calls.append((loop.epoch, i))
                    assert loop.batch == i
    return calls


@pytest.mark.parametrize("stops", [[1], [2], [3], [4], [6], [1, 1, 1], [3, 3], [5, 1], [1, 2, 3, 1]])
@pytest.mark.parametrize("n", [1, 2])
def test_epochs_are_counted_over_a_resume_and_enumerate_continues_its_numbers(
    tmp_path: Path, stops: list[int], n: int
) -> None:
    uninterrupted = resumed(tmp_path / "whole", [], n=n)
    assert resumed(tmp_path / "parts", stops, n=n) == uninterrupted
    assert [epoch for name, *_, epoch in (call for call in uninterrupted if call[0] == "end")] == [[0, 1, 2], [1]][
        n - 1
    ]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_epochs_that_the_body_leaves_are_counted_over_a_resume(tmp_path: Path, stop: int) -> None:
    def train(folder: Path, stops: list[int]) -> list[Any]:
        calls: list[Any] = []
        for runs in [*stops, 0]:
            hooks = [Noting(calls, fetches="epoch"), saving(folder), *([StopsAfter(runs)] if runs else [])]
            with MonitoredLoop(same, hooks=hooks, checkpoint_dir=folder) as loop:
                for _ in loop.until_stop(range(3)):
                    for i, item in loop.enumerate([1.0, 2.0, 3.0]):
                        loop.run(item)
                        calls.append((loop.epoch, i))
                        if i == 1:
                            break
        return calls

    assert train(tmp_path / "parts", [stop]) == train(tmp_path / "whole", [])


def test_a_resume_in_the_last_item_ends_the_epoch_with_the_restored_running_values(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    for stop in (StopsAfter(2), None):
        mean = LoggingTensorHook({"mean": running_mean("loss")}, every_n_epochs=1)
        hooks = [mean, saving(tmp_path), *([stop] if stop else [])]
        with MonitoredLoop(same, hooks=hooks, checkpoint_dir=tmp_path) as loop:
            epochs_of([], range(2), loop, [3.0, 1.0])
    means = [text for _, text in lines if text.startswith("mean")]
    assert [text.split(" (")[0] for text in means] == ["mean = 2.0", "mean = 2.0"]


@pytest.mark.parametrize("stops", [[2, 2], [1, 3, 1], [3, 1, 2]])
def test_running_values_survive_several_resumes(tmp_path: Path, stops: list[int], lines: list[tuple[str, str]]) -> None:
    for runs in [*stops, 0]:
        mean = LoggingTensorHook({"mean": running_mean("loss")}, every_n_epochs=1)
        hooks = [mean, saving(tmp_path), *([StopsAfter(runs)] if runs else [])]
        with MonitoredLoop(same, hooks=hooks, checkpoint_dir=tmp_path) as loop:
            epochs_of([], range(2), loop, [1.0, 2.0, 3.0, 4.0, 5.0])
    means = [text.split(" (")[0] for _, text in lines if text.startswith("mean")]
    assert means == ["mean = 3.0", "mean = 3.0"]


def test_the_values_of_an_evaluation_are_those_of_the_checkpoint_in_the_code_behind_an_epoch(tmp_path: Path) -> None:
    seen = []
    for stop in (StopsAfter(2), None):
        evaluation = EvaluationHook(lambda global_step: {"step": float(global_step)}, every_n_epochs=1, name="val")
        hooks = [evaluation, saving(tmp_path), *([stop] if stop else [])]
        with MonitoredLoop(same, hooks=hooks, checkpoint_dir=tmp_path) as loop:
            for _ in loop.until_stop(range(2)):
                for item in loop.until_stop([3.0, 1.0]):
                    loop.run(item)
                if not loop.should_stop():
                    seen.append(dict(evaluation.values))
    assert seen == [{"step": 2.0}, {"step": 4.0}]
    evaluation = EvaluationHook(lambda: 0.0, every_n_epochs=1, name="val")
    with MonitoredLoop(same, hooks=[evaluation], checkpoint_dir=tmp_path):
        assert evaluation.values == {"step": 4.0}


# -- repeat=True ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [[1.0, 2.0, 3.0], torch.utils.data.DataLoader([1.0, 2.0, 3.0], batch_size=None)],  # type: ignore[arg-type]
    ids=["list", "loader"],
)
def test_repeat_starts_over_until_the_loop_stops_and_each_pass_is_an_epoch(data: Any) -> None:
    calls: list[Any] = []
    with MonitoredLoop(same, hooks=[Noting(calls, fetches="epoch"), StopAtStepHook(last_step=8)]) as loop:
        items = [loop.run(item) for item in loop.until_stop(data, repeat=True)]
    assert items == [1.0, 2.0, 3.0] * 2 + [1.0, 2.0]
    assert calls == [("end", 3, 0), ("end", 6, 1)]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6, 7])
def test_repeat_continues_after_a_resume(tmp_path: Path, stop: int) -> None:
    calls: list[Any] = []
    for last_step in (stop, 8):
        hooks = [Noting(calls, fetches="epoch"), saving(tmp_path), StopAtStepHook(last_step=last_step)]
        with MonitoredLoop(same, hooks=hooks, checkpoint_dir=tmp_path) as loop:
            for i, item in loop.enumerate([1.0, 2.0, 3.0], repeat=True):
                loop.run(item)
                calls.append((i, item, loop.epoch, loop.batch))
    items = [(i, i + 1.0, epoch, i) for epoch in range(3) for i in range(3)]
    assert calls == [*items[:3], ("end", 3, 0), *items[3:6], ("end", 6, 1), *items[6:8]]


def test_repeat_of_an_exhausted_iterator_ends_with_a_warning(lines: list[tuple[str, str]]) -> None:
    with MonitoredLoop(same) as loop:
        items = [loop.run(item) for item in loop.until_stop(iter([1.0, 2.0]), repeat=True)]
    assert items == [1.0, 2.0]
    assert [text for level, text in lines if level == "WARNING" and "repeat=True" in text]


def test_repeat_of_nothing_ends_with_a_warning(lines: list[tuple[str, str]]) -> None:
    with MonitoredLoop(same) as loop:
        assert list(loop.until_stop([], repeat=True)) == []
    assert [text for level, text in lines if level == "WARNING" and "repeat=True" in text]


# A limit of the whole training run: num_steps would count those of each process.
LIMIT_AND_REPEAT = (
    r"limit=3, repeat=True: give one of them; to end at step 3, also after a restart, use StopAtStepHook\(last_step=3\)"
)


def test_repeat_refuses_a_limit() -> None:
    with MonitoredLoop(same) as loop, pytest.raises(ValueError, match=LIMIT_AND_REPEAT):
        loop.until_stop([1.0], repeat=True, limit=3)


def test_a_break_leaves_all_passes() -> None:
    calls: list[Any] = []
    with MonitoredLoop(same, hooks=[Noting(calls)]) as loop:
        for item in loop.until_stop([1.0, 2.0], repeat=True):
            loop.run(item)
            if loop.global_step == 3:
                break
        loop.should_stop()
        assert calls == [("end", 2, 2.0), ("end", 3, 1.0)]
        assert loop.batch is None


# -- savers -----------------------------------------------------------------------------------------------------------


class Value:
    """A variable of the script that is saved."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("model.ckpt-*"))


@pytest.mark.parametrize("options", [{"every_n_epochs": 1}, {"timer": EveryEpochs()}])
def test_a_saver_saves_the_end_of_an_epoch_after_the_code_behind_it(tmp_path: Path, options: dict[str, Any]) -> None:
    behind, inside = Value(), []
    hooks = [saving(tmp_path, **options)]
    with MonitoredLoop(same, hooks=hooks, state={"behind": behind}, checkpoint_dir=tmp_path) as loop:
        for _ in loop.until_stop(range(2)):
            for item in loop.until_stop([1.0, 2.0, 3.0]):
                loop.run(item)
            behind.value = loop.global_step
            inside.append(saved_steps(tmp_path)[1:])
    assert inside == [[], [3]]
    assert saved_steps(tmp_path) == [0, 3, 6]
    for step in (3, 6):
        later = Value()
        with MonitoredLoop(same, state={"behind": later}, checkpoint_dir=tmp_path / f"model.ckpt-{step}"):
            assert later.value == step


def test_a_checkpoint_of_the_end_of_an_epoch_begins_with_the_next_one(tmp_path: Path) -> None:
    calls: list[Any] = []
    hooks = [Noting(calls), saving(tmp_path, every_n_epochs=1)]
    with pytest.raises(KeyError), MonitoredLoop(same, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        fail_after(loop, 3)
    with MonitoredLoop(same, hooks=[Noting(calls)], checkpoint_dir=tmp_path) as loop:
        assert (loop.global_step, loop.epoch) == (2, 0)
        epochs_of(calls, range(3), loop, [1.0, 2.0])
    assert calls == [("end", 2, 2.0), ("end", 4, 2.0), "behind", ("end", 6, 2.0), "behind"]


def batches(kind: str) -> Any:
    if kind in ("loader", "limit"):
        return DataLoader([1.0, 2.0, 3.0][: 2 if kind == "loader" else 3])  # type: ignore[arg-type]
    return {"tuple": (1.0, 2.0), "range": range(1, 3), "list": [1.0, 2.0]}[kind]


@pytest.mark.parametrize("kind", ["tuple", "range", "loader", "list", "limit"])
def test_a_save_at_the_last_item_of_an_inner_loop_waits_for_the_outer_item(tmp_path: Path, kind: str) -> None:
    behind = Value()
    with MonitoredLoop(
        float, hooks=[saving(tmp_path, every_n_steps=2)], state={"behind": behind}, checkpoint_dir=tmp_path
    ) as loop:
        for _ in loop.until_stop(range(2)):
            for item in loop.until_stop(batches(kind), limit=2 if kind == "limit" else None):
                loop.run(item)
            behind.value = loop.global_step
    assert saved_steps(tmp_path) == [0, 2, 4]
    later = Value()
    with MonitoredLoop(float, state={"behind": later}, checkpoint_dir=tmp_path / "model.ckpt-2") as loop:
        assert later.value == 2
        for _ in loop.until_stop(range(2)):
            limit = 2 if kind == "limit" else None
            total = [loop.run(item) for item in loop.until_stop(batches(kind), limit=limit)]
            assert bool(total) == (later.value != 0 or loop.global_step > 2)
            later.value = 1


def test_the_best_checkpoint_has_the_metric_of_the_end_and_the_state_behind_the_epoch(tmp_path: Path) -> None:
    behind = Value()
    evaluation = EvaluationHook(lambda global_step: abs(4.0 - global_step), every_n_epochs=1, name="val")
    best = BestCheckpointHook(tmp_path, evaluation["evaluation"], mode="min", every_n_epochs=1)
    with MonitoredLoop(same, hooks=[evaluation, best], state={"behind": behind}) as loop:
        for _ in loop.until_stop(range(4)):
            for item in loop.until_stop([1.0, 2.0]):
                loop.run(item)
            behind.value += 1
    path = latest_checkpoint(tmp_path / "best")
    assert path is not None
    assert path.endswith("-4")
    later = Value()
    with MonitoredLoop(same, hooks=[evaluation, best], state={"behind": later}, checkpoint_dir=path):
        assert later.value == 2


# -- the hooks of the library -----------------------------------------------------------------------------------------


STOPPING: dict[str, Callable[[], SessionRunHook]] = {
    "StopIfHigherHook": lambda: StopIfHigherHook("loss", 3.5, every_n_epochs=1),
    "StopIfLowerHook": lambda: StopIfLowerHook(lambda global_step: -float(global_step), -3.5, every_n_epochs=1),
    "StopIfNoDecreaseHook": lambda: StopIfNoDecreaseHook("loss", 2, every_n_epochs=1),
    "StopIfNoIncreaseHook": lambda: StopIfNoIncreaseHook(lambda global_step: -float(global_step), 2, every_n_epochs=1),
}


@pytest.mark.parametrize("kind", STOPPING)
def test_a_hook_that_stops_at_the_end_of_an_epoch_is_heard_in_the_code_behind_it(kind: str) -> None:
    seen = []
    with MonitoredLoop(lambda loss: float(loop.global_step), hooks=[STOPPING[kind]()]) as loop:
        for _ in loop.until_stop(range(9)):
            for item in loop.until_stop([1.0, 2.0]):
                assert not loop.should_stop()
                loop.run(item)
            seen.append(loop.should_stop())
    assert seen == [False, True] or (kind == "StopIfHigherHook" and seen == [False, False, True])
    assert str(loop.stop_reason).startswith(kind)


def test_call_fn_hook_counter_and_log(lines: list[tuple[str, str]]) -> None:
    called = []
    counter = StepCounterHook(every_n_epochs=2)
    log = LoggingTensorHook({"mean": running_mean("loss")}, every_n_epochs=2)
    call = CallFnHook(lambda loss, epoch: called.append((loss, epoch)), every_n_epochs=2)
    with MonitoredLoop(same, hooks=[counter, log, call]) as loop:
        epochs_of([], range(6), loop, [1.0, 3.0])
    assert called == [(3.0, 1), (3.0, 3), (3.0, 5)]
    assert len([text for _, text in lines if text.startswith("mean = 2.0")]) == 3
    assert len([text for _, text in lines if "/sec" in text]) == 3


@pytest.mark.parametrize(
    ("n", "runs", "profiled"), [(1, 1, [5, 9]), (2, 1, [9]), (1, 2, [5, 6, 9, 10]), (2, 2, [9, 10])]
)
def test_the_profiler_records_the_first_runs_after_each_nth_epoch(
    tmp_path: Path, n: int, runs: int, profiled: list[int]
) -> None:
    seen = []

    def step(value: float) -> float:
        if is_profiling():
            seen.append(loop.global_step + 1)
        return value

    hook = ProfilerHook(output_dir=str(tmp_path), every_n_epochs=n, runs=runs)
    with MonitoredLoop(step, hooks=[hook]) as loop:
        epochs_of([], range(3), loop, [1.0] * 4)
    assert seen == profiled


def test_summaries_over_the_epoch(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "curves.jsonl")
    hook = SummarySaverHook(summary_writer=writer, summary_op={"loss": "loss"}, step="epoch", every_n_epochs=1)
    with MonitoredLoop(same, hooks=[hook]) as loop:
        epochs_of([], range(3), loop, [1.0, 2.0])
    text = (tmp_path / "curves.jsonl").read_text().splitlines()
    assert [line.split(",")[0] for line in text] == ['{"step": 0', '{"step": 1', '{"step": 2']


def test_a_step_of_summaries_that_is_no_whole_number_is_an_error(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "curves.jsonl")
    hook = SummarySaverHook(summary_writer=writer, summary_op={"a": "loss"}, step="loss", every_n_epochs=1)
    with pytest.raises(TypeError, match="whole number"), MonitoredLoop(same, hooks=[hook]) as loop:
        epochs_of([], range(3), loop, [0.5])


PERIODIC: list[Callable[..., SessionRunHook]] = [
    lambda **options: CallFnHook(lambda loss: None, **options),
    lambda **options: LoggingTensorHook(["loss"], **options),
    lambda **options: StepCounterHook(**options),
    lambda **options: EvaluationHook(lambda: 0.5, **options),
    lambda **options: CheckpointSaverHook("x", **options),
    lambda **options: SummarySaverHook(summary_op={"loss": "loss"}, **options),
    lambda **options: ProfilerHook(**options),
    lambda **options: StopIfLowerHook("loss", 1.0, **options),
    lambda **options: StopIfHigherHook("loss", 1.0, **options),
    lambda **options: StopIfNoDecreaseHook("loss", 1, **options),
    lambda **options: StopIfNoIncreaseHook("loss", 1, **options),
    lambda **options: BestCheckpointHook("x", "loss", mode="min", **options),
]


@pytest.mark.parametrize("make", PERIODIC)
def test_a_wrong_keyword_lists_the_right_ones(make: Callable[..., SessionRunHook]) -> None:
    with pytest.raises(TypeError, match=r"takes no every_n_epoch=\..*every_n_epochs") as caught:
        make(every_n_epoch=1)
    assert "every_n_steps=" in str(caught.value)


@pytest.mark.parametrize("make", PERIODIC)
@pytest.mark.parametrize("n", [0, -1, 1.5, "a"])
def test_a_wrong_number_of_epochs_is_an_error(make: Callable[..., SessionRunHook], n: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"every_n_epochs|n="):
        make(every_n_epochs=n)


@pytest.mark.parametrize("make", PERIODIC)
def test_a_period_in_epochs_and_another_one_is_an_error(make: Callable[..., SessionRunHook]) -> None:
    with pytest.raises(ValueError, match=r"every_n_epochs=1|EveryEpochs"):
        make(every_n_epochs=1, every_n_secs=1)


# -- errors at the end of an epoch ------------------------------------------------------------------------------------


class Fails(SessionRunHook):
    """Raises once at the end of an epoch."""

    def __init__(self, error: BaseException, method: str) -> None:
        self._error: BaseException | None = error
        self._method = method

    def _raise(self, run_context: SessionRunContext, method: str) -> None:
        if run_context.ends_epoch and method == self._method and self._error is not None:
            error, self._error = self._error, None
            raise error

    def before_run(self, run_context: SessionRunContext) -> None:
        self._raise(run_context, "before_run")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._raise(run_context, "after_run")

    def next_due(self) -> Due:
        return Due(epochs=1)


def left_by_break(loop: MonitoredLoop[float]) -> None:
    break_after(loop, 4)


def run_to_the_end(loop: MonitoredLoop[float]) -> None:
    for item in loop.until_stop([1.0, 2.0, 3.0, 4.0]):
        loop.run(item)


@pytest.mark.parametrize("method", ["before_run", "after_run"])
@pytest.mark.parametrize("train", [run_to_the_end, left_by_break])
def test_an_error_is_raised_once_and_not_recovered_from(
    tmp_path: Path, method: str, train: Callable[[MonitoredLoop[float]], None]
) -> None:
    calls: list[Any] = []
    hooks = [Noting(calls, fetches="epoch"), Fails(AbortedError("lost"), method), saving(tmp_path, save_steps=4)]
    with MonitoredLoop(same, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for epoch in loop.until_stop(range(2)):
            try:
                train(loop)
                loop.should_stop()
            except AbortedError:
                assert epoch == 0
    ends = [epoch for name, *_, epoch in calls if name == "end"]
    assert ends == ([0, 1] if method == "after_run" else [1])  # the hook before it was called, and is not called again
    assert loop.stop_reason == "data ended"


@pytest.mark.parametrize("error", [KeyError("x"), AbortedError("x")])
@pytest.mark.parametrize("touch", TOUCHES)
def test_an_error_at_the_end_of_an_epoch_left_by_break_comes_out_of_the_next_touch(
    tmp_path: Path, touch: str, error: Exception
) -> None:
    hooks = [Fails(error, "after_run"), saving(tmp_path, save_steps=2)]
    with MonitoredLoop(same, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        break_after(loop, 4)
        with pytest.raises(type(error), match="x"):
            TOUCHES[touch](loop)
    assert loop.global_step == 4  # not restored, and without the run that would have begun


@pytest.mark.parametrize("way", ["run", "body"])
def test_a_run_may_fail_with_the_error_that_the_end_of_an_epoch_had(way: str) -> None:
    error = OSError("upload")  # as the result() of a future raises it, each time the same

    def fail(*_: object) -> float:
        if loop.global_step > 1:
            raise error
        return 0.5

    def run() -> None:
        if way == "run":
            loop.run()
        else:
            with loop.step() as outputs:
                outputs["loss"] = fail()

    caught = 0
    with MonitoredLoop(fail if way == "run" else None, hooks=[Fails(error, "after_run")]) as loop:
        for item in loop.until_stop(range(9)):
            run()
            if item == 1:
                break
        for _ in range(4):
            try:
                run()
            except OSError:
                caught += 1
    assert (caught, loop.global_step) == (4, 2)


def test_after_a_recovery_the_hooks_of_an_epoch_left_by_break_are_called_before_the_next_run(tmp_path: Path) -> None:
    calls: list[Any] = []
    failures = iter([AbortedError("lost")])

    def step_fn(context: Any) -> None:
        for failure in failures:
            raise failure
        calls.append("function")
        context.run_with_hooks(9.0)

    hooks = [Noting(calls), saving(tmp_path, save_steps=2)]
    with MonitoredLoop(same, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        break_after(loop, 3)
        loop.run_step_fn(step_fn)
    assert [call if call == "function" else call[:2] for call in calls] == ["function", ("end", 2)]  # the restored step


def test_runs_in_a_step_function_say_nothing_of_epochs() -> None:
    def step_fn(context: Any) -> None:
        context.run_with_hooks(1.0)

    with MonitoredLoop(same, hooks=[LoggingTensorHook(["loss"], every_n_epochs=1)]) as loop:
        loop.run_step_fn(step_fn)
        loop.run(1.0)
        loop.run(1.0)
    assert loop.global_step == 3


@pytest.mark.parametrize("method", ["before_run", "after_run"])
@pytest.mark.parametrize("train", [run_to_the_end, left_by_break])
def test_another_error_propagates_with_the_name_of_the_hook(
    method: str, train: Callable[[MonitoredLoop[float]], None]
) -> None:
    def train_twice() -> None:
        for _ in loop.until_stop(range(2)):
            train(loop)

    with pytest.raises(KeyError) as caught, MonitoredLoop(same, hooks=[Fails(KeyError("x"), method)]) as loop:
        train_twice()
    assert any("Fails" in note for note in caught.value.__notes__)
    assert loop.global_step == 4


def test_stop_iteration_at_the_end_of_an_epoch_that_is_left_ends_the_loop_cleanly() -> None:
    with MonitoredLoop(same, hooks=[Fails(StopIteration("enough"), "after_run")]) as loop:
        for _ in loop.until_stop(range(3)):
            left_by_break(loop)
    assert loop.stop_reason == "StopIteration: enough"


def test_stop_iteration_at_the_end_of_an_epoch_ends_the_loop_cleanly() -> None:
    behind: list[Any] = []
    with MonitoredLoop(same, hooks=[Fails(StopIteration("enough"), "after_run")]) as loop:
        epochs_of(behind, range(3), loop, [1.0])
    assert loop.global_step == 1
    assert loop.stop_reason == "StopIteration: enough"


def test_a_hook_cannot_run_the_loop_at_the_end_of_an_epoch() -> None:
    hook = CallFnHook(lambda loss: loop.run(loss), every_n_epochs=1)
    with pytest.raises(LifecycleError), MonitoredLoop(same, hooks=[hook]) as loop:
        run_to_the_end(loop)


# -- several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sized", [True, False])
def test_epochs_end_on_all_ranks(sized: bool, tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> list[Any]:
        calls: list[Any] = []

        def step(item: float) -> float:
            return float(sum(hub.gather("step", ranks.rank, item)))

        hooks = [Noting(calls), Noting(calls, 2, "second")]
        with MonitoredLoop(step, hooks=hooks, ranks=ranks) as loop:
            for _ in loop.until_stop(range(3)):
                items = [1.0, 2.0, 3.0]
                for item in loop.until_stop(items if sized else iter(items)):
                    loop.run(item)
                calls.append((loop.epoch, loop.should_stop()))
        return calls

    results = in_threads(2, main)
    ends = [("end", 3, 6.0), ("end", 6, 6.0), ("second", 6, 6.0), ("end", 9, 6.0)]
    assert results[0] == results[1]
    assert [call for call in results[0] if len(call) == 3] == ends


def test_a_stop_that_one_rank_requests_at_the_end_of_an_epoch_is_that_of_all() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> tuple[Any, ...]:
        def ask(loss: float) -> None:
            if ranks.rank == 1:
                loop.request_stop("enough")

        with MonitoredLoop(
            lambda: float(sum(hub.gather("step", ranks.rank, 1.0))),
            hooks=[CallFnHook(ask, every_n_epochs=1)],
            ranks=ranks,
        ) as loop:
            for _ in loop.until_stop(range(30)):
                for _ in loop.until_stop(range(5)):
                    loop.run()
        return loop.global_step, loop.stop_reason

    results = in_threads(2, main)
    assert results[0] == results[1], results
    assert 5 <= results[0][0] < 150


# -- where no epoch can be counted ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outer", "warms_up"), [(False, False), (True, False), (True, True)])
def test_every_n_epochs_is_refused_where_no_epoch_can_be_counted(outer: bool, warms_up: bool) -> None:
    hooks = [CallFnHook(lambda: None, every_n_epochs=1)]
    said = (
        "an item of until_stop's range has several runs" if outer else "this run was made outside of every until_stop"
    )

    def train(loop: MonitoredLoop[None]) -> None:
        with loop:
            if warms_up:
                loop.run()
            for _ in loop.until_stop(range(2)) if outer else range(2):
                for _ in range(3):
                    loop.run()

    loop = MonitoredLoop(lambda: None, hooks=hooks)
    with pytest.raises(LifecycleError, match=rf"^CallFnHook.*, and {said}"):
        train(loop)
    assert loop.global_step == 2 + warms_up


def test_one_run_before_the_data_is_a_warning_with_every_n_epochs(lines: list[tuple[str, str]]) -> None:
    ends: list[int] = []
    hook = CallFnHook(lambda global_step: ends.append(global_step), every_n_epochs=1)
    with MonitoredLoop(lambda: None, hooks=[hook]) as loop:
        loop.run()  # compiles the model, for example
        for _ in loop.until_stop(range(2)):
            for _ in loop.until_stop(range(3)):
                loop.run()
    assert ends == [4, 7]
    (warning,) = [text for level, text in lines if level == "WARNING"]
    assert "is due at the end of an epoch, and this run was made" in warning
