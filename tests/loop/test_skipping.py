"""Not calling a hook while it is not due changes nothing: every loop is run twice, with skipping and without it."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from torchhooks import (
    AbortedError,
    Due,
    FeedFnHook,
    FinalOpsHook,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    Scaffold,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
)
from torchhooks.testing import FakeClock, RecordingHook, RecordingWriter, log_lines, plain, trace

Diary = list[tuple[Any, ...]]


# -- hooks of one's own that say when they are due --------------------------------------------------------------------


class Distance(NamedTuple):
    """How far from one piece of work to the next: at the first of what is given; never again if nothing is."""

    steps: int | None = None
    runs: int | None = None
    secs: float | None = None


class Deed(NamedTuple):
    """What is done in the n-th piece of work, apart from writing it down."""

    number: int
    do: Callable[[SessionRunContext], object]


class Worker(SessionRunHook):
    """Works now and then, the distances going round; overrides ``before_run`` and ``after_run``."""

    def __init__(self, diary: Diary, distances: list[Distance], deed: Deed | None) -> None:
        self.diary = diary
        self.distances, self.deed = distances, deed

    def begin(self) -> None:
        self.runs, self.worked = 0, 0
        self.step: int | None = 0
        self.run: int | None = 0
        self.moment: float | None = 0.0
        self.due = False

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self.due = self.is_due(run_context.session.global_step + 1)
        return SessionRunArgs("loss") if self.due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.runs += 1
        if self.due:
            self.work(run_context, run_values)

    def is_due(self, step: int) -> bool:
        by_step = self.step is not None and step >= self.step
        by_run = self.run is not None and self.runs >= self.run
        return by_step or by_run or (self.moment is not None and time.monotonic() >= self.moment)

    def work(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        steps, runs, secs = self.distances[self.worked % len(self.distances)]
        step = run_context.session.global_step
        self.worked += 1
        self.step = None if steps is None else step + steps
        self.run = None if runs is None else self.runs + runs - 1
        self.moment = None if secs is None else time.monotonic() + secs
        self.diary.append((step, self.runs, time.monotonic(), plain(run_values.results)))
        if self.deed is not None and self.deed.number == self.worked:
            self.deed.do(run_context)

    def end(self, session: Session) -> None:
        self.diary.append(("end", session.global_step))

    def teardown(self) -> None:
        self.diary.append(("teardown",))

    def next_due(self) -> Due | None:
        return Due(self.step, self.moment, None if self.run is None else self.run - self.runs + 1)

    def sat_out(self, runs: int) -> None:
        self.runs += runs

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.distances})"


class LateWorker(Worker):
    """The same, overriding ``after_run`` only: the real step decides."""

    before_run = SessionRunHook.before_run

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.due = self.is_due(run_context.session.global_step)
        super().after_run(run_context, run_values)


class Watcher(SessionRunHook):
    """Writes down the runs in which the loss is large; takes part when it is, or when it cannot be told."""

    def __init__(self, diary: Diary, limit: float) -> None:
        self.diary, self.limit = diary, limit

    def begin(self) -> None:
        self.runs = 0

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        return SessionRunArgs(["loss"])

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.look(run_context, *run_values.results)

    def look(self, run_context: SessionRunContext, loss: torch.Tensor) -> None:
        self.runs += 1
        if self.is_large(loss):
            self.diary.append((run_context.session.global_step, self.runs, loss.item()))

    def is_large(self, loss: torch.Tensor) -> bool:
        return not loss.item() < self.limit

    def next_due(self) -> Due | None:
        return Due(when=self.is_large)

    def sat_out(self, runs: int) -> None:
        self.runs += runs


class LateWatcher(Watcher):
    """The same, overriding ``after_run`` only."""

    before_run = SessionRunHook.before_run

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.look(run_context, run_context.session.run("loss"))


def stop(run_context: SessionRunContext) -> None:
    run_context.request_stop("enough")


def go_to(step: int, run_context: SessionRunContext) -> None:
    run_context.session.global_step = step


def fail(error: type[Exception], run_context: SessionRunContext) -> None:
    raise error("on purpose")


# -- random loops -----------------------------------------------------------------------------------------------------


class World:
    """What the hooks of one loop write to and read from."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.writers = [RecordingWriter(), RecordingWriter()]
        self.diary: Diary = []


def twice(loss: torch.Tensor) -> torch.Tensor:
    return loss * 2


Recipe = Callable[[World], SessionRunHook]
Recipes = st.SearchStrategy[Recipe]


def counter(period: dict[str, Any], writer: int, world: World) -> SessionRunHook:
    return StepCounterHook(**period, summary_writer=world.writers[writer])


def saver(period: dict[str, Any], writer: int | None, world: World) -> SessionRunHook:
    summary_writer = None if writer is None else world.writers[writer]
    return SummarySaverHook(**period, summary_writer=summary_writer, summary_op={"loss": "loss", "twice": twice})


def reporter(period: dict[str, Any], at_end: bool, world: World) -> SessionRunHook:
    return LoggingTensorHook(["loss", "global_step"], **period, at_end=at_end)


def stopper(argument: str, step: int, world: World) -> SessionRunHook:
    return StopAtStepHook(**{argument: step})


def worker(kind: type[Worker], distances: list[Distance], deed: Deed | None, world: World) -> SessionRunHook:
    return kind(world.diary, distances, deed)


def watcher(kind: type[Watcher], limit: float, world: World) -> SessionRunHook:
    return kind(world.diary, limit)


def failing(method: str, run: int, error: type[Exception], world: World) -> SessionRunHook:
    return RecordingHook("loss", raises={(method, run): error}, calls=world.diary)


def any_other(kind: Callable[..., SessionRunHook], argument: Any, world: World) -> SessionRunHook:
    return kind(argument)


def recipes(function: Callable[..., SessionRunHook], *arguments: st.SearchStrategy[Any]) -> Recipes:
    return st.builds(partial, st.just(function), *arguments)


def periods(steps: str, secs: str) -> st.SearchStrategy[dict[str, Any]]:
    return small.map(lambda n: {steps: n, secs: None}) | quarters.map(lambda n: {steps: None, secs: n})


small = st.integers(1, 5)
quarters = st.integers(0, 20).map(lambda n: n / 4)
errors = st.sampled_from([StopIteration, ValueError, AbortedError, KeyError])


def doing(deeds: st.SearchStrategy[Any]) -> st.SearchStrategy[Deed]:
    return st.builds(Deed, st.integers(1, 4), deeds)


distances = st.lists(
    st.builds(Distance, st.none() | small, st.none() | small, st.none() | quarters), min_size=1, max_size=3
)
workers = st.sampled_from([Worker, LateWorker])
# Due now and then, so that there are idle runs.
scheduled = st.one_of(
    recipes(counter, periods("every_n_steps", "every_n_secs"), st.integers(0, 1)),
    recipes(saver, periods("save_steps", "save_secs"), st.none() | st.integers(0, 1)),
    recipes(reporter, periods("every_n_iter", "every_n_secs"), st.booleans()),
    recipes(reporter, st.just({}), st.just(True)),
    recipes(stopper, st.sampled_from(["num_steps", "last_step"]), st.integers(1, 30)),
    recipes(worker, workers, distances, st.none() | doing(st.just(stop) | st.builds(partial, st.just(fail), errors))),
    recipes(watcher, st.sampled_from([Watcher, LateWatcher]), st.sampled_from([0.25, 1.0])),
    recipes(any_other, st.just(partial(NanTensorHook, "loss")), st.booleans()),
    recipes(any_other, st.just(FinalOpsHook), st.just({"loss": "loss", "step": "global_step"})),
    recipes(any_other, st.just(GlobalStepWaiterHook), st.just(0)),
)
# Called in every run.
always = st.one_of(
    recipes(any_other, st.just(partial(NanTensorHook, twice)), st.booleans()),
    recipes(any_other, st.just(FeedFnHook), st.just(lambda: {"bonus": 1.0})),
    recipes(failing, st.sampled_from(["before_run", "after_run", "end"]), st.integers(1, 8), errors),
)


class Turn(NamedTuple):
    """One run: how it goes, and what happens before it."""

    pause: float
    secs: float
    loss: float
    steps: int
    error: type[Exception] | None
    go_to: int | None
    go_to_inside: int | None


turns = st.builds(
    Turn,
    pause=st.sampled_from([0.0, 0.0, 0.25, 3.0]),
    secs=st.sampled_from([0.0, 0.25, 0.5, 1.0, 4.0]),
    loss=st.sampled_from([0.5] * 12 + [float("nan"), float("inf")]),
    steps=st.sampled_from([1, 1, 1, 0, 2, 5]),
    error=st.sampled_from([None] * 30 + [ValueError, StopIteration]),
    go_to=st.sampled_from([None] * 15 + [0, 3, 17]),
    go_to_inside=st.sampled_from([None] * 15 + [0, 3, 17]),
)
# The hook that sets the step in after_run is the last: hooks after it would be chosen by the step before that.
jumper = recipes(worker, workers, distances, doing(st.builds(partial, st.just(go_to), st.integers(0, 20))))
hook_lists = st.builds(
    operator.add,
    st.lists(scheduled, max_size=5) | st.lists(scheduled | always, max_size=5),
    st.just([]) | st.lists(jumper, max_size=1),
)


class Training:
    """A step that does what its turn says."""

    def __init__(self, world: World, to_come: list[Turn], first_step: int) -> None:
        self.world, self.to_come, self.first_step = world, deque(to_come), first_step
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.0)

    def start(self, scaffold: Scaffold, session: Session) -> None:
        self.session, session.global_step = session, self.first_step

    def step(self, bonus: float = 0.0) -> torch.Tensor:
        turn = self.to_come.popleft()
        self.world.clock.advance(turn.secs)
        for _ in range(turn.steps):
            self.optimizer.step()
        if turn.go_to_inside is not None:
            self.session.global_step = turn.go_to_inside
        if turn.error is not None:
            raise turn.error("in the step")
        return torch.tensor(turn.loss + bonus)


def drive(loop: MonitoredLoop[torch.Tensor], training: Training, steps: list[int]) -> None:
    while training.to_come and not loop.should_stop():
        turn = training.to_come[0]
        training.world.clock.advance(turn.pause)
        if turn.go_to is not None:
            loop.session.global_step = turn.go_to
        loop.run()
        steps.append(loop.global_step)


def outcome(cookbook: list[Recipe], to_come: list[Turn], start: int, unit: str, skipping: bool) -> dict[str, Any]:
    """All that can be seen of one loop, NaN as text."""
    world = World()
    hooks = [recipe(world) for recipe in cookbook]
    for hook in [] if skipping else hooks:
        hook.next_due = lambda: None  # type: ignore[method-assign]
    training, scaffold = Training(world, to_come, start), Scaffold()
    scaffold.init_fn = training.start
    steps: list[int] = []
    loop, error = None, None
    with world.clock, log_lines() as lines:
        try:
            with MonitoredLoop(
                training.step, None, training.optimizer, hooks=hooks, scaffold=scaffold, step_unit=unit
            ) as loop:
                drive(loop, training, steps)
        except Exception as caught:
            error = caught
    assert loop is not None
    return {
        "steps": steps,
        "left": len(training.to_come),
        "lines": lines,
        "summaries": repr([(writer.records, writer.flushed, writer.closed) for writer in world.writers]),
        "diary": repr(world.diary),
        "final": repr([plain(hook.final_ops_values) for hook in hooks if isinstance(hook, FinalOpsHook)]),
        "stop_reason": loop.stop_reason,
        "error": error and (repr(error), error.__notes__ if hasattr(error, "__notes__") else []),
        "end": (loop.global_step, world.clock()),
    }


class CountsCalls(Worker):
    """Counts how often it is called."""

    called = 0

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self.called += 1
        return super().before_run(run_context)


@pytest.mark.parametrize(
    ("distance", "called"),
    [(Distance(steps=10), 10), (Distance(runs=10), 10), (Distance(secs=25.0), 4), (Distance(), 1)],
)
def test_a_hook_that_is_not_due_is_not_called(distance: Distance, called: int) -> None:
    hook = CountsCalls([], [distance], None)
    trace(hook, losses=[0.5] * 100)
    assert hook.called == called


@pytest.mark.not_measured
@examples(150)
@given(
    cookbook=hook_lists,
    to_come=st.lists(turns, max_size=25),
    start=st.sampled_from([0, 0, 7]),
    unit=st.sampled_from(["run", "optimizer_step"]),
)
def test_skipping_idle_hooks_cannot_be_observed(
    cookbook: list[Recipe], to_come: list[Turn], start: int, unit: str
) -> None:
    assert outcome(cookbook, to_come, start, unit, skipping=True) == outcome(
        cookbook, to_come, start, unit, skipping=False
    )
