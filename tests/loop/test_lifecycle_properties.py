"""Whatever hooks and faults there are: what a loop always does, and what it never does."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from torchhooks import (
    AbortedError,
    Coordinator,
    Due,
    LifecycleError,
    MonitoredLoop,
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

RUNS = 5
LETTERS = {"begin": "b", "after_create_session": "c", "before_run": "r", "after_run": "R", "end": "e", "teardown": "t"}
# All that one hook may ever see, letter for letter: nothing at all, or begin first and teardown last, end once at most,
# and after_run only after its own before_run, of which there is none if the script has caught an error of the run.
EARLY, LATE = re.compile("(b(c(rR?)*)?e?t)?"), re.compile("(b(cR*)?e?t)?")

Where = tuple[str, int]


class Exhausted(StopIteration):
    """A subclass, and so an error."""


# -- hooks and faults, made up ----------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """One hook.

    Args:
        faults: what it raises in the n-th call of a method.
        asks_at: the n-th call of a run method in which it asks to stop.
        period: it takes part in every so many runs, and says so; ``None``: it does not say.
        early: whether it has a before_run.
    """

    faults: dict[Where, type[BaseException]]
    asks_at: Where | None
    period: int | None
    early: bool


class Body(NamedTuple):
    """What the step raises in its n-th call; what the body raises in front of its n-th run; what it catches."""

    step_faults: dict[int, type[BaseException]]
    raises_at: tuple[int, type[BaseException]] | None
    swallows: bool


@dataclass
class Diary:
    """What happened."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    raised: dict[BaseException, str] = field(default_factory=dict)
    swallowed: list[BaseException] = field(default_factory=list)
    logged: list[BaseException] = field(default_factory=list)
    stops: list[bool] = field(default_factory=list)
    loop: MonitoredLoop[None] | None = None
    out: BaseException | None = None

    def fail(self, kind: type[BaseException], where: str) -> None:
        error = kind(f"in {where}")
        self.raised[error] = where
        raise error


class Early(SessionRunHook):
    def __init__(self, name: str, plan: Plan, diary: Diary) -> None:
        self.name, self.plan, self.diary = name, plan, diary
        self.counts: Counter[str] = Counter()

    def note(self, method: str, run_context: SessionRunContext | None = None) -> None:
        self.counts[method] += 1
        now = method, self.counts[method]
        self.diary.calls.append((self.name, method))
        if run_context is not None and now == self.plan.asks_at:
            self.diary.calls.append((self.name, "asks"))
            run_context.request_stop()
        if now in self.plan.faults:
            self.diary.fail(self.plan.faults[now], method)

    def begin(self) -> None:
        self.note("begin")

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self.note("after_create_session")

    def before_run(self, run_context: SessionRunContext) -> None:
        self.note("before_run", run_context)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.note("after_run", run_context)

    def end(self, session: Session) -> None:
        self.note("end")

    def teardown(self) -> None:
        self.note("teardown")

    def next_due(self) -> Due | None:
        return None if self.plan.period is None else Due(runs=self.plan.period)


class Late(Early):
    before_run = SessionRunHook.before_run  # type: ignore[assignment]


kinds = st.sampled_from([StopIteration, Exhausted, ValueError, KeyboardInterrupt, AbortedError])
run_calls = st.tuples(st.sampled_from(["before_run", "after_run"]), st.integers(1, RUNS))
one_time_calls = st.tuples(st.sampled_from(["begin", "after_create_session", "end", "teardown"]), st.just(1))
plans = st.builds(
    Plan,
    # Most hooks raise nothing and never stop: a loop of which something is left is the more interesting one.
    faults=st.just({}) | st.dictionaries(run_calls | one_time_calls, kinds, max_size=3),
    asks_at=st.none() | run_calls,
    period=st.none() | st.integers(1, 3),
    early=st.booleans(),
)
bodies = st.builds(
    Body,
    step_faults=st.just({}) | st.dictionaries(st.integers(1, RUNS), kinds, max_size=1),
    raises_at=st.none() | st.tuples(st.integers(1, RUNS), kinds),
    swallows=st.booleans(),
)


# -- the loop around them ---------------------------------------------------------------------------------------------


class Catching(logging.Handler):
    def __init__(self, errors: list[BaseException]) -> None:
        super().__init__()
        self.errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            self.errors.append(record.exc_info[1])


@contextmanager
def logged_errors(errors: list[BaseException]) -> Iterator[None]:
    handler = Catching(errors)
    logging.getLogger("torchhooks").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("torchhooks").removeHandler(handler)


def live(plans: list[Plan], body: Body) -> Diary:
    diary = Diary()
    hooks = [(Early if plan.early else Late)(f"hook {index}", plan, diary) for index, plan in enumerate(plans)]
    counts: Counter[str] = Counter()

    def step() -> None:
        counts["step"] += 1
        diary.calls.append(("step", "step"))
        if counts["step"] in body.step_faults:
            diary.fail(body.step_faults[counts["step"]], "step")
        diary.calls.append(("step", "counted"))

    with logged_errors(diary.logged):
        try:
            with MonitoredLoop(step, hooks=hooks) as diary.loop:
                train(diary.loop, body, diary)
        except BaseException as error:
            diary.out = error
    return diary


def train(loop: MonitoredLoop[None], body: Body, diary: Diary) -> None:
    for number in range(1, RUNS + 1):
        if body.raises_at is not None and body.raises_at[0] == number:
            diary.fail(body.raises_at[1], "body")
        if not loop.should_stop():
            run(loop, body, diary)
        diary.stops.append(loop.should_stop())


def run(loop: MonitoredLoop[None], body: Body, diary: Diary) -> None:
    diary.calls.append(("loop", "run"))
    try:
        loop.run()
    except Exception as error:
        if not body.swallows:
            raise
        diary.swallowed.append(error)


# -- what must hold ---------------------------------------------------------------------------------------------------


def failed(diary: Diary) -> bool:
    """Whether something other than a clean StopIteration was raised before the end, and was not caught."""
    creation = ("begin", "after_create_session")
    uncaught = {error: where for error, where in diary.raised.items() if error not in diary.swallowed}
    before_the_end = {error: where for error, where in uncaught.items() if where not in ("end", "teardown")}
    return any(type(error) is not StopIteration or where in creation for error, where in before_the_end.items())


def came_out(diary: Diary) -> list[BaseException]:
    """Return the errors that closing the loop raised: one, a group, or an interrupt with the others as its cause."""
    cause = None if diary.out is None else diary.out.__cause__
    raised = [diary.out, cause] if isinstance(cause, BaseExceptionGroup) else [diary.out]
    groups = [error.exceptions if isinstance(error, BaseExceptionGroup) else [error] for error in raised if error]
    return [error for group in groups for error in group]


def heard_of(error: BaseException, where: str, diary: Diary) -> bool:
    """Return whether ``error`` was raised or logged, or requested a clean end."""
    told = any(error is other for other in (*came_out(diary), *diary.logged, *diary.swallowed))
    return told or (type(error) is StopIteration and where not in ("end", "teardown"))


def seen_by(name: str, diary: Diary) -> str:
    return "".join(LETTERS.get(method, "") for who, method in diary.calls if who == name)


def steps_after_somebody_asked(diary: Diary) -> int:
    methods = [method for _, method in diary.calls]
    return methods[methods.index("asks") :].count("step") if "asks" in methods else 0


@given(plans=st.lists(plans, max_size=4), body=bodies)
@examples(300)
def test_whatever_hooks_and_steps_raise_the_lifecycle_is_kept(plans: list[Plan], body: Body) -> None:
    diary = live(plans, body)
    every_hook_sees_a_whole_life_and_only_one(plans, diary)
    end_is_called_for_everybody_if_nothing_failed_and_for_nobody_else(plans, diary)
    assert [error for error, where in diary.raised.items() if not heard_of(error, where, diary)] == []  # none is lost
    assert {*came_out(diary), *diary.logged} <= set(diary.raised)  # and none was raised by nobody
    assert diary.stops == sorted(diary.stops)  # a loop that stopped never goes on
    assert steps_after_somebody_asked(diary) <= 1 or diary.swallowed  # a request in a run that fails goes with it
    the_hooks_are_called_in_the_order_of_the_list(diary)
    if diary.loop is not None:
        assert diary.loop.global_step == diary.calls.count(("step", "counted"))
        a_loop_that_is_over_stays_so_and_says_why(diary.loop, diary)


def every_hook_sees_a_whole_life_and_only_one(plans: list[Plan], diary: Diary) -> None:
    for index, plan in enumerate(plans):
        assert (EARLY if plan.early else LATE).fullmatch(seen_by(f"hook {index}", diary))


def end_is_called_for_everybody_if_nothing_failed_and_for_nobody_else(plans: list[Plan], diary: Diary) -> None:
    ends = [name for name, method in diary.calls if method == "end"]
    assert ends == ([] if failed(diary) else [f"hook {index}" for index in range(len(plans))])


def the_hooks_are_called_in_the_order_of_the_list(diary: Diary) -> None:
    phases: list[list[str]] = []
    last = ""
    for who, method in diary.calls:
        if method in LETTERS:
            phases += [] if method == last else [[]]
            phases[-1].append(who)
        last = last if method == "asks" else method
    assert all(phase == sorted(phase) for phase in phases)


def a_loop_that_is_over_stays_so_and_says_why(loop: MonitoredLoop[None], diary: Diary) -> None:
    calls = list(diary.calls)
    with pytest.raises(LifecycleError):
        loop.run()
    loop.close()
    assert diary.calls == calls
    assert loop.should_stop()
    assert loop.stop_reason
