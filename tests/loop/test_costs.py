"""The cost of hooks: measured with ``hook_costs=True``, and without any overhead otherwise."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest

import torchhooks.fetches.accumulated
import torchhooks.loop.costs
import torchhooks.loop.run
from torchhooks import (
    Due,
    EverySteps,
    LoggingTensorHook,
    MonitoredLoop,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    running_mean,
)
from torchhooks.common.timers import NEVER
from torchhooks.testing import FakeClock, FakeDevice, RecordingHook, log_lines, trace


class Stopwatch(FakeClock):
    """Replaces ``time.perf_counter``, with which costs are measured."""


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    watch = Stopwatch()
    monkeypatch.setattr(time, "perf_counter", watch)
    return watch


class Row(NamedTuple):
    """One line of the table."""

    calls: int
    ms: float
    us_each: float
    percent: float


class Costs(NamedTuple):
    """The logged table, and the line above it."""

    head: str
    rows: dict[str, Row]


def costs(*hooks: SessionRunHook, losses: Any = (0.5, 0.25, 0.125, 0.5), **arguments: Any) -> Costs:
    """Return what a loop with these hooks logs at its end."""
    lines = [text for _, text in trace(*hooks, losses=losses, hook_costs=True, **arguments).lines]
    (text,) = [line for line in lines if line.startswith("hooks took")]
    head, _, *rows = text.splitlines()
    cells = [row.removesuffix(" %").rsplit(maxsplit=4) for row in rows]
    return Costs(head, {name.strip(): Row(int(calls), *map(float, rest)) for name, calls, *rest in cells})


def logged(make: Callable[[], MonitoredLoop[Any]]) -> list[str]:
    """Return the lines of a loop of three runs."""
    with log_lines() as lines, make() as loop:
        for _ in range(3):
            loop.run()
    return [text for _, text in lines]


class Taking(SessionRunHook):
    """Takes some seconds in each method."""

    def __init__(self, watch: Stopwatch, before: float = 0.0, after: float = 0.0, end: float = 0.0) -> None:
        self.watch = watch
        self.before, self.after, self.at_end = before, after, end

    def before_run(self, run_context: SessionRunContext) -> None:
        self.watch.advance(self.before)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.watch.advance(self.after)

    def end(self, session: Session) -> None:
        self.watch.advance(self.at_end)


class Failing(Taking):
    """Raises in ``before_run``, after it took its seconds."""

    def before_run(self, run_context: SessionRunContext) -> None:
        super().before_run(run_context)
        raise ValueError


# -- off --------------------------------------------------------------------------------------------------------------


def callers() -> list[str]:
    """Return the files of the calls that are in progress, the last call first."""
    return [frame.filename for frame in inspect.stack(0)[2:]]


class Called(SessionRunHook):
    """Records the file of the function that calls it."""

    def __init__(self) -> None:
        self.callers: set[str] = set()

    def before_run(self, run_context: SessionRunContext) -> None:
        self.callers.add(callers()[0])

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.callers.add(callers()[0])


def test_by_default_nothing_is_reported() -> None:
    assert trace(RecordingHook("loss")).lines == []


def test_by_default_no_wrapper_is_between_the_loop_and_its_hooks() -> None:
    hook, measured = Called(), Called()
    trace(hook)
    trace(measured, hook_costs=True)
    assert hook.callers == {torchhooks.loop.run.__file__}
    assert measured.callers == {torchhooks.loop.costs.__file__}


def test_by_default_running_fetches_are_added_without_a_wrapper() -> None:
    hook = LoggingTensorHook({"mean": running_mean("loss")}, every_n_iter=2)
    wrapped: list[bool] = []

    class Outputs(dict[str, float]):
        def __getitem__(self, name: str) -> float:
            adding, *others = callers()
            assert adding == torchhooks.fetches.accumulated.__file__
            wrapped.append(torchhooks.loop.costs.__file__ in others)
            return super().__getitem__(name)

    trace(hook, losses=[Outputs(loss=0.5)] * 3)
    trace(hook, losses=[Outputs(loss=0.5)] * 3, hook_costs=True)
    assert wrapped == [False] * 3 + [True] * 3


def test_by_default_the_clock_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    monkeypatch.setattr(time, "perf_counter", lambda: reads.append("read"))
    trace(RecordingHook("loss"), StepCounterHook(1))
    assert reads == []


# -- on ---------------------------------------------------------------------------------------------------------------


def test_the_time_in_every_method_is_counted(watch: Stopwatch) -> None:
    taken = costs(Taking(watch, before=0.25, after=0.5, end=1.0))
    assert taken.head == "hooks took 100.00 % of 4 s, 4 runs"
    assert taken.rows == {"0 Taking": Row(calls=9, ms=4000.0, us_each=round(4e6 / 9, 2), percent=100.0)}


def test_the_shares_add_up(watch: Stopwatch) -> None:
    hooks = [Taking(watch, after=secs) for secs in (0.25, 0.5, 0.125)]
    taken = costs(*hooks, RecordingHook())
    assert sum(row.percent for row in taken.rows.values()) == pytest.approx(100, abs=0.02)


def test_the_most_expensive_hook_comes_first(watch: Stopwatch) -> None:
    taken = costs(Taking(watch, after=0.25), Taking(watch, after=0.5), RecordingHook())
    assert list(taken.rows) == ["1 Taking", "0 Taking", "2 RecordingHook"]


def test_the_time_of_the_step_is_not_counted_for_hooks(watch: Stopwatch) -> None:
    def step() -> None:
        watch.advance(0.75)

    lines = logged(lambda: MonitoredLoop(step, hooks=[Taking(watch, after=0.25)], hook_costs=True))
    assert lines[0].startswith("hooks took 25.00 % of 3 s, 3 runs")


class Watching(SessionRunHook):
    """Has a slow ``Due.when``, which never finds anything."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        raise AssertionError

    def next_due(self) -> Due:
        return Due(when=lambda outputs: self.watch.advance(0.25))


def test_due_when_counts_as_a_call(watch: Stopwatch) -> None:
    assert costs(Watching(watch)).rows == {"0 Watching": Row(calls=5, ms=1000.0, us_each=200000.0, percent=100.0)}


class Idle(SessionRunHook):
    """Is never due."""

    def next_due(self) -> Due:
        return NEVER


class Fetching(SessionRunHook):
    """Fetches the given fetches in every run."""

    def __init__(self, fetches: Any) -> None:
        self.fetches = fetches

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(self.fetches)


def test_an_evaluation_counts_for_the_first_hook_that_asked(watch: Stopwatch) -> None:
    def slow() -> None:
        watch.advance(0.5)

    rows = costs(RecordingHook(), Fetching(slow), Fetching(slow)).rows
    assert {name: row.ms for name, row in rows.items()} == {"1 Fetching": 2000.0, "0 RecordingHook": 0, "2 Fetching": 0}


@pytest.mark.parametrize("every", [1, 3])
def test_running_fetches_have_a_line_of_their_own(watch: Stopwatch, every: int) -> None:
    def slow() -> float:
        watch.advance(0.5)
        return 1.0

    hook = LoggingTensorHook({"mean": running_mean(slow)}, timer=EverySteps(every))
    taken = costs(hook, RecordingHook() if every == 1 else Idle())
    assert taken.head == "hooks took 100.00 % of 2 s, 4 runs"
    assert taken.rows["running fetches"] == Row(calls=4, ms=2000.0, us_each=500_000.0, percent=100.0)
    assert {row.ms for name, row in taken.rows.items() if name != "running fetches"} == {0}


def test_without_running_fetches_there_is_no_line_for_them() -> None:
    assert "running fetches" not in costs(RecordingHook("loss")).rows


class Reading(Fetching):
    """Takes some seconds in its ``when_ready`` callback."""

    def __init__(self, watch: Stopwatch, secs: float) -> None:
        super().__init__("loss")
        self.watch, self.secs = watch, secs

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        run_context.when_ready(run_values.results, lambda _: self.watch.advance(self.secs))


@pytest.mark.parametrize("lag", [None, 2])
def test_a_callback_counts_for_its_hook_even_if_it_runs_later(watch: Stopwatch, lag: int | None) -> None:
    with nullcontext() if lag is None else FakeDevice(lag):
        rows = costs(Reading(watch, 0.5), RecordingHook()).rows
    assert {name: row.ms for name, row in rows.items()} == {"0 Reading": 2000.0, "1 RecordingHook": 0}


def test_runs_without_a_hook_are_not_calls_of_it() -> None:
    rows = costs(LoggingTensorHook(["loss"], every_n_iter=2), RecordingHook()).rows
    assert rows["0 LoggingTensorHook"].calls == 2 * 2 + 1
    assert rows["1 RecordingHook"].calls == 4 * 2 + 1


def test_a_hook_that_was_never_called_took_no_time(watch: Stopwatch) -> None:
    rows = costs(Failing(watch, before=0.25), RecordingHook(), catch=ValueError).rows
    assert rows["1 RecordingHook"] == Row(calls=0, ms=0, us_each=0, percent=0)


def test_without_hooks_the_table_is_empty(watch: Stopwatch) -> None:
    lines = logged(lambda: MonitoredLoop(lambda: watch.advance(1.0), hook_costs=True))
    assert lines[0].splitlines()[0] == "hooks took 0.00 % of 3 s, 3 runs"


@pytest.mark.parametrize("losses", [[0.5, ValueError], [0.5, KeyboardInterrupt]])
def test_the_table_is_logged_after_an_error_too(watch: Stopwatch, losses: list[Any]) -> None:
    taken = costs(Taking(watch, before=0.25), losses=losses, catch=(ValueError, KeyboardInterrupt))
    assert taken.head == "hooks took 100.00 % of 0.5 s, 1 runs"


def test_the_time_in_a_call_that_raised_counts(watch: Stopwatch) -> None:
    rows = costs(Failing(watch, before=0.25), RecordingHook(), catch=ValueError).rows
    assert rows["0 Failing"] == Row(calls=1, ms=250.0, us_each=250_000.0, percent=100.0)


def test_a_fake_monotonic_clock_does_not_affect_the_measurement() -> None:
    with FakeClock():
        taken = costs(RecordingHook("loss"))
    assert taken.rows["0 RecordingHook"].ms > 0


def test_measuring_changes_nothing_that_hooks_observe() -> None:
    calls: dict[bool, list[Any]] = {}
    for measured in (False, True):
        hook = RecordingHook({"loss": "loss"}, stop_at=2)
        trace(hook, hook_costs=measured)
        calls[measured] = hook.calls
    assert calls[True] == calls[False]
