"""Several ranks: the same last run on all of them, and no rank that waits for one that failed."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import itertools
import math
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
from support.rank_processes import run_ranks
from support.rank_threads import (
    Hub,
    Periodic,
    Recorder,
    Schedule,
    ThreadRanks,
    ThreadTransport,
    check,
    in_threads,
    threads_end,
)
from support.waiting import wait_until
from torch.utils.data import DataLoader, IterableDataset

import torchhooks.ranks.agreement as agreement_rules
import torchhooks.ranks.peers
import torchhooks.ranks.ranks
from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    Coordinator,
    EvaluationHook,
    LifecycleError,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    PeerError,
    Ranks,
    Saver,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
    latest_checkpoint,
    list_checkpoints,
    over_ranks,
)
from torchhooks.common.files import Disk
from torchhooks.common.log import logger
from torchhooks.lifecycle.extension import LoopPlan
from torchhooks.loop.rank_sync import RankSync
from torchhooks.loop.schedule import Schedule as HookSchedule
from torchhooks.progress.loop_state import Stop, StoppedBy
from torchhooks.ranks.agreement import (
    BY_STOP_ITERATION,
    CLOSE,
    END,
    ENTER,
    EPOCH,
    FAILED,
    FAILED_LATER,
    GATHERING,
    GONE,
    HAS_CALLS,
    HAS_EPOCH,
    IN_LOOPS,
    ITEM,
    LEFT,
    RUN_FAILED,
    STOP,
    Agreement,
    AllLeft,
    CallForPromises,
    Conflict,
    Decision,
    Failure,
    Meeting,
    Round,
    RoundPhase,
    Row,
    RunFailed,
)
from torchhooks.ranks.peers import Peers, end_process
from torchhooks.ranks.ranks import LoopRanks, checked_ranks
from torchhooks.ranks.transport import ContactLostError, GlooTransport, mark_as_known
from torchhooks.testing import RecordingHook

QUICK = {"tick_secs": 0.01}

distributed: Any = torch.distributed  # whose annotations leave out the stores


# -- the rules ------------------------------------------------------------------------------------------------------


def failed_in(run: int, **counts: int) -> Row:
    return Row(status=RUN_FAILED, made=run - 1, begun=run, counted=run - 1)._replace(**counts)


def in_run(run: int) -> Row:
    return Row(made=run - 1, begun=run)


def after_run(run: int) -> Row:
    return Row(made=run, begun=run)


def at(kind: int, run: int = 2, meeting: int = 1, **more: int) -> Row:
    return Row(made=run, begun=run, meeting=meeting, kind=kind, **more)


def test_nothing_happens_while_no_rank_asks() -> None:
    assert Agreement().settle([Row(made=3), Row(made=4)]) == []


def test_the_largest_promise_is_the_last_run() -> None:
    agreement = Agreement()
    assert agreement.settle([Row(made=3, asked=STOP), Row(made=4)]) == [CallForPromises()]
    assert agreement.promising
    rows = [Row(made=3, asked=STOP, promise=4), Row(made=4, promise=5)]
    assert agreement.settle(rows) == [Decision(5, STOP, (0,))]


def test_no_round_begins_before_all_ranks_have_made_the_last_run() -> None:
    agreement = Agreement()
    agreement.settle([Row(asked=2), Row()])
    assert agreement.settle([Row(asked=2, promise=1), Row(promise=1)]) == [Decision(1, 2, ())]
    assert agreement.settle([Row(asked=4, made=1), Row(made=0)]) == []
    assert agreement.settle([Row(asked=4, made=1), Row(made=1)]) == [CallForPromises()]


def test_a_meeting_is_over_when_all_ranks_have_arrived() -> None:
    agreement = Agreement()
    assert agreement.settle([Row(meeting=1, kind=ENTER, value=5), Row()]) == []
    rows = [Row(meeting=1, kind=ENTER, value=5), Row(meeting=1, kind=ENTER, value=3)]
    assert agreement.settle(rows) == [Meeting(3, True)]
    assert agreement.settle(rows) == []


def test_a_rank_in_a_later_run_conflicts_with_a_meeting() -> None:
    rows = [Row(made=3, begun=4), at(END, 3)]
    assert Agreement().settle(rows) == [Conflict(1, 3, END, 0, 4)]


def test_a_rank_may_still_be_ending_the_run_in_which_another_one_left_by_stop_iteration() -> None:
    agreement, left = Agreement(), at(CLOSE, 3, detail=BY_STOP_ITERATION)
    for _ in range(9):
        assert agreement.settle([left, in_run(4)]) == []
    assert agreement.settle([left, left]) == [Meeting(leaver=0, stop=True)]


@pytest.mark.parametrize(
    ("detail", "begun", "ticks"), [(0, 4, 0), (BY_STOP_ITERATION, 4, 10), (BY_STOP_ITERATION, 5, 0)]
)
def test_a_rank_that_goes_on_conflicts_with_one_that_left(detail: int, begun: int, ticks: int) -> None:
    agreement, rows = Agreement(), [at(CLOSE, 3, detail=detail), in_run(begun)]
    for _ in range(ticks):
        assert agreement.settle(rows) == []
    assert agreement.settle(rows) == [Conflict(0, 3, CLOSE, 1, begun)]


def table_of_meetings() -> dict[tuple[str, str], str]:
    """Return the table in the docstring of the agreement: what follows if two ranks are at these places."""
    assert agreement_rules.__doc__ is not None
    _, head, body, *_ = re.split(r"^=[= ]+\n", agreement_rules.__doc__, flags=re.MULTILINE)
    (_, *others), *rows = [re.split(" {2,}", line.replace("`", "")) for line in (head + body).splitlines()]
    return {(one, another): text for one, *texts in rows for another, text in zip(others, texts, strict=True)}


TABLE = table_of_meetings()
IN_GATHERING, LATER = "gathering", "a later run"
KINDS = {"ENTER": ENTER, "ITEM": ITEM, "END": END, "CLOSE": CLOSE}


def place(name: str, **more: int) -> Row:
    """Return the row of a rank that is at the place of this name after run 2."""
    if name == IN_GATHERING:
        return after_run(2)._replace(gatherings=1)
    return in_run(3) if name == LATER else at(KINDS[name], detail=name == "ENTER", **more)


def test_the_table_of_meetings_is_complete() -> None:
    assert [*TABLE] == [(one, another) for one in KINDS for another in (*KINDS, IN_GATHERING, LATER)]
    assert all(TABLE[one, another] == TABLE[another, one] for one in KINDS for another in KINDS)


@pytest.mark.parametrize(("one", "another"), TABLE)
@pytest.mark.parametrize("first", [0, 1])
def test_what_follows_where_two_ranks_are_is_what_the_table_says(one: str, another: str, first: int) -> None:
    def settle(agreement: Agreement, **more: int) -> Any:
        rows = [place(one, **more), place(another)]
        events = agreement.settle(rows if first == 0 else rows[::-1])
        return next((each for each in events if not isinstance(each, CallForPromises)), None)

    agreement = Agreement()
    event = settle(agreement)
    match TABLE[one, another]:
        case "an error" if another == IN_GATHERING:
            assert event is None  # the rank in the gathering raises the error
        case "an error":
            assert isinstance(event, Conflict)
            assert {event.rank, event.other} == {0, 1}
            assert event.rank == first or another in KINDS
        case "joins":
            assert event == Conflict(first, 2, CLOSE, 1 - first, 2)
            assert Agreement().settle([at(CLOSE, detail=HAS_CALLS), place(IN_GATHERING)]) == []
        case "all go on":
            assert (event.stop, agreement.stopped) == (False, False)
        case "all end":
            assert event == Meeting(leaver=0, stop=True)
        case "parting":
            leaver = first if one == "CLOSE" else 1 - first
            assert (event.leaver, event.stays, event.stop, event.is_parting) == (leaver, 1 - leaver, True, True)
            asked = settle(Agreement(), asked=STOP)
            assert (asked.stop, asked.is_parting, asked.askers) == (True, False, (first,))
        case "END passes":
            assert event == Meeting()
            for name, expected in [("CLOSE", Meeting(leaver=0, stop=True)), ("ITEM", None), ("END", Meeting())]:
                later = Agreement()
                settle(later)
                rows = [place("CLOSE"), place(name, meeting=2)]
                (event,) = later.settle(rows)
                assert event == (expected or Meeting(leaver=0, stop=True, stays=1))
        case text:
            pytest.fail(text)


@pytest.mark.parametrize("depth", [1, 2])
def test_loops_of_another_depth_are_another_place(depth: int) -> None:
    assert Agreement().settle([at(ENTER, detail=depth), at(ENTER, detail=1)]) == (
        [Meeting()] if depth == 1 else [Conflict(0, 2, ENTER, 1, 2, ENTER)]
    )


def test_a_rank_that_left_its_loops_is_named_where_it_begins_another() -> None:
    rows = [at(ITEM), at(ENTER, detail=1, loops=GONE)]
    assert Agreement().settle(rows) == [Conflict(1, 2, CLOSE, 0, 2, ITEM)]


@pytest.mark.parametrize(
    ("other", "waits"),
    [
        (at(ITEM), True),
        (at(ENTER, detail=2), True),
        (at(ENTER, detail=1), False),  # of another loop, which the first rank may begin too
        (after_run(2)._replace(gatherings=1), True),
        (after_run(2)._replace(epochs=1), True),  # it calls the hooks of the end of an epoch
        (after_run(2), False),
        (after_run(1)._replace(gatherings=1), False),  # before the run after which the first rank left
    ],
)
def test_a_rank_that_left_its_loops_has_fifty_ticks_to_come_to_the_end_of_the_block(other: Row, waits: bool) -> None:
    gone = after_run(2)._replace(loops=GONE)
    agreement = Agreement()
    assert [agreement.settle([gone, other]) for _ in range(50)] == [[]] * 50
    events = agreement.settle([gone, other])
    assert events == ([Conflict(0, 2, CLOSE, 1, 2, other.kind)] if waits else [])
    other, agreement = at(ITEM), Agreement()
    assert agreement.settle([gone, other]) == []
    assert agreement.settle([at(CLOSE), other]) == [Meeting(leaver=0, stop=True, stays=1)]


def test_a_rank_that_left_its_loops_is_named_at_once_where_another_makes_a_later_run_in_them() -> None:
    gone = after_run(2)._replace(loops=GONE)
    assert Agreement().settle([gone, in_run(3)._replace(loops=IN_LOOPS)]) == [Conflict(0, 2, CLOSE, 1, 3)]
    # A run outside of every until_stop, which the first rank may come to.
    assert Agreement().settle([gone, in_run(3)]) == []


def test_a_rank_that_gathers_in_the_run_after_which_another_left_raises_the_error_itself() -> None:
    assert Agreement().settle([at(CLOSE), in_run(2)._replace(gatherings=1)]) == []


def test_the_end_of_the_data_passes_a_rank_that_left_its_loops() -> None:
    agreement, gone = Agreement(), after_run(2)._replace(loops=GONE)
    assert agreement.settle([gone, at(END)]) == [Meeting(end_passes=True)]
    assert agreement.settle([at(CLOSE), at(CLOSE, meeting=2)]) == [Meeting(leaver=0, stop=True)]
    assert Agreement().settle([after_run(1)._replace(loops=GONE), at(END)]) == []
    assert Agreement().settle([after_run(2), at(END)]) == []
    # It may have come to another loop meanwhile, as other ranks that have left may.
    enters = at(ENTER, detail=1, loops=GONE)
    assert Agreement().settle([enters, enters]) == [Meeting()]
    agreement = Agreement()
    assert agreement.settle([enters, at(END)]) == [Meeting(end_passes=True)]
    assert agreement.settle([enters._replace(meeting=2), at(ENTER, meeting=2, detail=1)]) == [Meeting()]
    enters = at(ENTER, detail=1, loops=IN_LOOPS)
    assert Agreement().settle([enters, at(END)]) == [Conflict(1, 2, END, 0, 2, ENTER)]


def test_a_rank_that_leaves_joins_the_end_of_an_epoch_that_is_due_on_it_too() -> None:
    ending = after_run(2)._replace(epochs=1)
    assert Agreement().settle([at(CLOSE, detail=HAS_EPOCH), ending]) == []
    # It may be in that call already, so its meeting is not over, wherever the other rank is meanwhile.
    ended, agreement = at(CLOSE, meeting=2)._replace(epochs=1), Agreement()
    assert agreement.settle([at(CLOSE, detail=HAS_EPOCH), ended]) == []
    assert agreement.settle([at(CLOSE)._replace(epochs=1), ended]) == [Meeting(leaver=0, stop=True)]
    saved = at(CLOSE, meeting=2)._replace(gatherings=1)
    assert Agreement().settle([at(CLOSE, detail=HAS_CALLS), saved]) == []
    assert Agreement().settle([at(CLOSE, detail=HAS_CALLS), ending]) == [Conflict(0, 2, CLOSE, 1, 2)]
    assert Agreement().settle([at(CLOSE, detail=HAS_EPOCH), place(IN_GATHERING)]) == [Conflict(0, 2, CLOSE, 1, 2)]


@pytest.mark.parametrize(
    ("other", "conflict"),
    [
        (place(IN_GATHERING), Conflict(0, 2, EPOCH, 1, 2, GATHERING)),
        (in_run(3), Conflict(0, 2, EPOCH, 1, 3)),
        (at(END), Conflict(1, 2, END, 0, 2)),
        (at(ITEM), Conflict(1, 2, ITEM, 0, 2)),
        (after_run(2), None),  # it is on its way there
        (in_run(2), None),
    ],
)
def test_a_rank_that_calls_hooks_at_the_end_of_an_epoch_waits_for_none_that_goes_on_in_it(
    other: Row, conflict: Conflict | None
) -> None:
    assert Agreement().settle([after_run(2)._replace(epochs=1), other]) == ([] if conflict is None else [conflict])


def test_ranks_part_when_all_have_come_to_a_meeting_or_after_ten_ticks() -> None:
    rows = [at(CLOSE), at(ITEM), after_run(2)]
    agreement = Agreement()
    assert [agreement.settle(rows) for _ in range(10)] == [[]] * 10
    assert agreement.settle(rows) == [Conflict(0, 2, CLOSE, 1, 2, ITEM)]
    agreement = Agreement()
    assert agreement.settle(rows) == []
    assert agreement.settle([at(CLOSE), at(ITEM), at(ITEM)]) == [Meeting(leaver=0, stop=True, stays=1)]
    assert Agreement().settle([at(CLOSE), at(END), after_run(2)]) == []
    assert Agreement().settle([at(CLOSE), at(END), at(ITEM)]) == [Conflict(0, 2, CLOSE, 2, 2, ITEM)]


def test_a_stop_that_is_asked_for_takes_effect_at_the_meeting() -> None:
    agreement = Agreement()
    rows = [at(ITEM), at(ITEM, asked=STOP)]
    assert agreement.settle(rows) == [CallForPromises(), Meeting(stop=True, askers=(1,))]
    assert agreement.settle([Row(status=LEFT), Row(status=LEFT)]) == [AllLeft()]


def test_a_stop_that_the_data_prevent_takes_effect_where_they_end() -> None:
    agreement = Agreement()
    agreement.settle([Row(made=2, begun=2, asked=STOP), Row(made=2, begun=2)])
    agreement.settle([Row(made=2, begun=2, asked=STOP, promise=3), Row(made=2, begun=2, promise=3)])
    rows = [Row(made=2, begun=2, meeting=1, kind=END)] * 2
    assert agreement.settle(rows) == [Meeting(stop=True, askers=())]


def test_a_rank_that_failed_because_of_another_waits_for_its_failure() -> None:
    agreement, rows = Agreement(), [Row(status=FAILED_LATER, begun=4), Row()]
    assert [agreement.settle(rows) for _ in range(11)] == [[]] * 10 + [[Failure(0, 4, (0,))]]


def test_the_rank_that_failed_first_is_named() -> None:
    rows = [Row(status=FAILED_LATER, begun=4), Row(), Row(status=FAILED, begun=5)]
    assert Agreement().settle(rows) == [Failure(2, 5, (0, 2))]


def test_a_rank_that_left_may_join_no_run_that_failed() -> None:
    rows = [at(CLOSE, 3, meeting=0), failed_in(4)]
    assert Agreement().settle(rows) == [Failure(1, 4, (1,))]


def test_the_ranks_go_on_after_a_run_that_failed_on_all_of_them() -> None:
    agreement = Agreement()
    for _ in range(3):
        assert [agreement.settle([failed_in(4), in_run(4)]) for _ in range(10)] == [[]] * 10
        assert agreement.settle([failed_in(4), failed_in(4)]) == [RunFailed()]


@pytest.mark.parametrize(
    ("other", "patience"),
    [
        (in_run(4), 10),  # it may still fail
        (after_run(3), 300),  # it may still begin that run
        (after_run(4), 0),
        (in_run(5), 0),
        (failed_in(5), 0),
        (failed_in(4, counted=4), 0),  # on that rank, it counts
        (Row(status=LEFT, made=3, begun=3), 0),
        (Row(made=3, begun=3, meeting=1, kind=CLOSE), 0),
    ],
    ids=lambda value: "" if isinstance(value, Row) else str(value),
)
def test_and_not_after_one_that_failed_on_some(other: Row, patience: int) -> None:
    agreement, rows = Agreement(), [other, failed_in(4)]
    failed = (0, 1) if other.status == RUN_FAILED else (1,)
    first = min(failed)
    failure = Failure(first, rows[first].begun, failed, True)
    assert [agreement.settle(rows) for _ in range(patience + 1)] == [[]] * patience + [[failure]]


def test_a_rank_that_holds_for_a_round_is_released_before_it_fails_as_well() -> None:
    agreement = Agreement()
    agreement.settle([in_run(4), after_run(3)._replace(asked=STOP)])
    rows = [failed_in(4, promise=4), after_run(3)._replace(asked=STOP, promise=3)]
    assert agreement.settle(rows) == [Decision(4, STOP, (1,))]
    assert agreement.settle([failed_in(4), failed_in(4)]) == [RunFailed()]


def test_a_stop_that_this_rank_asks_for_is_asked_promised_decided_and_applied() -> None:
    round_ = Round()
    phases = [round_.phase]
    round_.ask(STOP, "hook: enough")
    phases.append(round_.phase)
    round_.promise()
    phases.append(round_.phase)
    round_.decide(Decision(5, STOP, (0,)), "hook: enough (rank 0)")
    phases.append(round_.phase)
    round_.apply()
    assert [*phases, round_.phase] == list(RoundPhase)
    assert (round_.last, round_.why, round_.stops) == (5, "hook: enough (rank 0)", True)


def test_what_is_asked_too_late_for_a_round_is_asked_in_the_next_one() -> None:
    round_ = Round()
    round_.ask(2 | STOP, "hook: enough")
    round_.asked_in = 5
    late = round_.decide(Decision(5, 2, ()), "")
    assert (late.phase, late.bits, late.why, late.asked_in) == (RoundPhase.ASKED, STOP, "hook: enough", 5)


def test_a_rank_that_asked_in_an_earlier_run_than_the_last_one_does_not_hold_there() -> None:
    round_ = Round()
    round_.ask(STOP, "hook: enough")
    round_.asked_in = 4
    assert round_.decide(Decision(5, 2, ()), "").asked_in is None


# -- ranks that are threads -----------------------------------------------------------------------------------------


@pytest.fixture
def fast_switches() -> Iterator[None]:
    """Let threads interleave more than they usually do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.exhaustive) for first in (50, 100, 150))])
def test_random_schedules_end_the_same_on_all_ranks(first: int, fast_switches: None) -> None:
    ends = {check(Schedule.drawn(seed)) for seed in range(first, first + 50)}
    assert ends == {"stopped", "failed"}


class BadBatches(NamedTuple):
    """A training run in which batches are bad on all ranks, and perhaps one on a single rank."""

    seed: int
    size: int
    items: int
    common: frozenset[int]
    single: tuple[int, int] | None
    stop: tuple[int, int] | None
    known: bool
    by_hook: str | None

    @classmethod
    def drawn(cls, seed: int) -> BadBatches:
        draw = random.Random(seed)
        size, items = draw.choice([2, 2, 3]), draw.randint(4, 12)

        def somewhere(share: float) -> tuple[int, int] | None:
            return (draw.randrange(items), draw.randrange(size)) if draw.random() < share else None

        common = frozenset(item for item in range(items) if draw.random() < 0.3)
        method = draw.choice([None, "before_run", "after_run"])
        return cls(seed, size, items, common, somewhere(0.4), somewhere(0.6), draw.random() < 0.7, method)

    def train(self, ranks: ThreadRanks, hub: Hub) -> Any:
        draw, items = random.Random(self.seed * 100 + ranks.rank), range(self.items)

        class Acting(SessionRunHook):
            def before_run(self, run_context: SessionRunContext) -> None:
                fail_in("before_run")

            def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
                fail_in("after_run")
                if plan.stop == (run_context.session.global_step, ranks.rank):
                    run_context.request_stop("enough")

        def fail_in(method: str | None) -> None:
            number = taken[-1]
            if method == plan.by_hook and (number in plan.common or plan.single == (number, ranks.rank)):
                raise ValueError("bad batch")

        def step() -> None:
            time.sleep(0.002 * draw.random())
            fail_in(None)

        plan, taken, skipped = self, [], []
        with MonitoredLoop(step, hooks=[Acting()], ranks=ranks) as loop:
            for number in loop.until_stop(items if self.known else iter(items)):
                taken.append(number)
                time.sleep(0.002 * draw.random())
                try:
                    loop.run()
                except ValueError:
                    skipped.append(number)
        return taken, skipped, loop.global_step


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.exhaustive) for first in (30, 60, 90))])
def test_bad_batches_are_skipped_on_all_ranks_or_end_all_of_them(first: int) -> None:
    for plan in map(BadBatches.drawn, range(first, first + 30)):
        results = in_threads(plan.size, plan.train, tick_secs=0.005)
        if any(isinstance(result, PeerError) for result in results):
            assert plan.single is not None, plan
            assert all(isinstance(result, PeerError) for result in results), (plan, results)
        else:
            assert results == results[:1] * plan.size, plan


def test_a_stop_that_is_agreed_for_a_run_that_failed_on_all_ranks_takes_effect_before_the_next() -> None:
    plan = BadBatches.drawn(117)  # rank 1 asks after run 2, run 3 fails on both, and run 4 on rank 0 alone
    assert (plan.size, plan.stop, plan.single) == (2, (2, 1), (3, 0))
    for _ in range(40):  # the agreement may come one run later
        results = in_threads(plan.size, plan.train, tick_secs=0.005)
        if results == [([0, 1, 2], [0, 2], 3)] * 2:
            return
    pytest.fail("run 4 was made each time")


@pytest.mark.ranks
def test_a_hook_that_is_due_by_the_clock_is_called_on_all_ranks_however_slow_one_of_them_is(
    fast_switches: None,
) -> None:
    for seed in range(20):  # of the random delays
        asks = {1: (6, "before_run")}
        schedule = Schedule(seed, tick_secs=0.0, items=12, asks=asks, period_secs=0.0, delayed=1)
        assert check(schedule) == "stopped"


def test_two_decisions_before_the_training_thread_looks_both_count() -> None:
    ranks, hook = LoopRanks(Ranks()), Periodic(math.inf)
    ranks.size = 2
    training = Session(ranks=ranks)
    schedule = HookSchedule(training, LoopPlan(hooks=(hook,)), [True], [])
    schedule.start()
    rank_sync = RankSync(training, schedule)
    handle = rank_sync.peers._handle  # noqa: SLF001 - a thread calls it, and no test can time it to come twice at once
    handle(Decision(0, 2, ()), [])  # the hook is due in run 1
    handle(Decision(1, STOP, (0,)), [Stop("asked", StoppedBy.CALLER).to_text(), ""])
    rank_sync.end_run()
    assert schedule.all_hooks[0].trigger.is_forced
    assert rank_sync.peers.is_stop_decided


def test_a_stop_at_a_step_is_exact() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> int:
        hooks = [StopAtStepHook(last_step=7)]
        with MonitoredLoop(lambda: hub.gather("step", ranks.rank, 0), hooks=hooks, ranks=ranks) as loop:
            while not loop.should_stop():
                loop.run()
        return loop.global_step

    assert in_threads(3, main) == [7] * 3


def test_the_reason_of_a_stop_names_the_rank() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> str | None:
        with MonitoredLoop(lambda: hub.gather("step", ranks.rank, 0), ranks=ranks) as loop:
            while not loop.should_stop():
                loop.run()
                if ranks.rank == 1 and loop.global_step == 3:
                    loop.request_stop("good enough")
        return loop.stop_reason

    assert in_threads(2, main) == ["request_stop: good enough (rank 1)"] * 2


def test_ranks_with_less_data_limit_the_others(lines: list[tuple[str, str]]) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> int:
        with MonitoredLoop(lambda item: hub.gather("step", ranks.rank, 0), ranks=ranks) as loop:
            for _epoch in range(3):
                for item in loop.until_stop(range(5 + ranks.rank)):
                    loop.run(item)
        return loop.global_step

    assert in_threads(2, main) == [15, 15]
    # Once, and not in every epoch.
    message = "rank 1 has 6 items of data and another rank only 5: until_stop yields 5 on every rank"
    assert lines == [("WARNING", message)]


def test_the_limit_of_one_rank_counts_for_all() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> int:
        with MonitoredLoop(lambda item: hub.gather("step", ranks.rank, 0), ranks=ranks) as loop:
            for item in loop.until_stop(iter(range(9)), limit=4 if ranks.rank else None):
                loop.run(item)
        return loop.global_step

    assert in_threads(2, main) == [4, 4]


class Stream:
    """Items that can be iterated again, whose number is not known. It draws a random number for each."""

    def __init__(self, items: int) -> None:
        self._items = items
        self.yielded = 0

    def __iter__(self) -> Iterator[float]:
        for _ in range(self._items):
            self.yielded += 1
            yield torch.rand(()).item()


class SavedStream(Stream):
    """A stream that saves how many items it has yielded."""

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.yielded = state["yielded"]


class FailingStream(Stream):
    """A stream that fails where the items of another rank end."""

    def __iter__(self) -> Iterator[float]:
        yield from super().__iter__()
        raise OSError("no more")


@pytest.mark.parametrize(
    ("data", "items", "yielded"),
    [
        (lambda: Stream(6), "more items of data", 5 + 4 + 4),  # it looks once
        (lambda: Stream(4), None, 3 * 4),
        (lambda: FailingStream(4), None, 3 * 4),
        (lambda: SavedStream(6), "an unknown number of items of data", 3 * 4),
    ],
)
def test_a_rank_that_does_not_know_its_length_warns_once_of_items_that_are_left(
    data: Callable[[], Stream], items: str | None, yielded: int, lines: list[tuple[str, str]]
) -> None:
    drawn: list[float] = []

    def main(ranks: ThreadRanks, hub: Hub) -> int:
        stream = data()
        with MonitoredLoop(lambda item: hub.gather("step", ranks.rank, 0), ranks=ranks) as loop:
            for _epoch in range(3):
                if ranks.rank:
                    torch.manual_seed(0)
                for item in loop.until_stop(stream if ranks.rank else range(4)):
                    loop.run(item)
                if ranks.rank:
                    drawn.append(torch.rand(()).item())
        return stream.yielded

    assert in_threads(2, main) == [0, yielded]
    message = f"rank 1 has {items} and another rank only 4: until_stop yields 4 on every rank"
    assert lines == ([] if items is None else [("WARNING", message)])
    assert len({*drawn}) == 1  # looking for another item takes no random number


def test_an_iterator_keeps_the_items_that_are_left(lines: list[tuple[str, str]]) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> list[int]:
        rest = iter(range(6))
        with MonitoredLoop(lambda item: hub.gather("step", ranks.rank, 0), ranks=ranks) as loop:
            for item in loop.until_stop(rest if ranks.rank else range(4)):
                loop.run(item)
        return [*rest]

    assert in_threads(2, main) == [[0, 1, 2, 3, 4, 5], [4, 5]]
    message = "rank 1 has an unknown number of items of data and another rank only 4: until_stop yields 4 on every rank"
    assert lines == [("WARNING", message)]


class WithoutLength:
    """An iterable whose ``len()`` raises, like a DataLoader over most iterable datasets."""

    def __len__(self) -> int:
        raise TypeError("no length")

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Estimated(IterableDataset[int]):
    """An iterable dataset that has more items than its ``len()`` says."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize("data", [WithoutLength(), DataLoader(Estimated(), batch_size=None)], ids=["raises", "guesses"])
def test_data_whose_len_cannot_be_relied_on_are_of_unknown_length(data: Iterable[int]) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> tuple[int, str | None]:
        with MonitoredLoop(lambda item: hub.gather("step", ranks.rank, 0), ranks=ranks) as loop:
            for item in loop.until_stop(data):
                loop.run(item)
        return loop.global_step, loop.stop_reason

    assert in_threads(2, main) == [(3, "data ended")] * 2


def uneven(ranks: ThreadRanks, hub: Hub) -> None:
    with MonitoredLoop(lambda item: hub.gather("step", ranks.rank, 0), ranks=ranks) as loop:
        for item in loop.until_stop(iter(range(3 + ranks.rank))):
            loop.run(item)


def test_data_of_unknown_length_that_end_early_are_an_error_on_all_ranks() -> None:
    for error in in_threads(2, uneven):
        assert isinstance(error, PeerError)
        assert (error.rank, error.run, error.reason) == (0, 3, "came to the end of its data")


def test_a_failure_is_a_peer_error_with_the_rank_the_run_and_the_reason() -> None:
    def step(ranks: ThreadRanks, hub: Hub, item: int) -> None:
        if ranks.rank == 1 and item == 2:
            raise ValueError("boom")
        hub.gather("step", ranks.rank, 0)

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        with MonitoredLoop(step, ranks=ranks) as loop:
            for item in loop.until_stop(range(5)):
                loop.run(ranks, hub, item)

    peer, culprit = in_threads(2, main)
    assert repr(culprit) == "ValueError('boom')"
    assert isinstance(peer, PeerError)
    assert (peer.rank, peer.run, peer.reason) == (1, 3, "ValueError: boom")
    assert str(peer) == "rank 1 failed in run 3: ValueError: boom"


@pytest.mark.parametrize(("runs", "where"), [(0, "before its first run"), (2, "after run 2")])
def test_a_failure_between_two_runs_is_said_to_be_there(runs: int, where: str) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        with MonitoredLoop(lambda: 1.0, hooks=[Periodic(math.inf)], ranks=ranks) as loop:
            for _ in range(2):
                for _ in loop.until_stop(range(runs)):
                    loop.run()
                if ranks.rank:
                    raise ValueError("between epochs")

    peer, _ = in_threads(2, main)
    assert str(peer) == f"rank 1 failed {where}: ValueError: between epochs"
    assert peer.run == runs


def test_the_reason_of_a_loop_that_another_rank_ended_is_that_rank() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> str | None:
        def step() -> None:
            if ranks.rank:
                failed.set()
                raise ValueError("boom")
            assert failed.wait(60)  # or this error would be the first
            raise RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:42")

        loop = MonitoredLoop(step, ranks=ranks)
        with contextlib.suppress(PeerError, ValueError), loop:
            loop.run()
        return loop.stop_reason

    failed = threading.Event()
    peer, own = in_threads(2, main)
    assert peer.startswith("PeerError: rank 1 failed")
    assert own == "ValueError: boom"


def methods(hook: RecordingHook) -> list[str]:
    return [call[0] for call in hook.calls]


def skipping(ranks: ThreadRanks, step: Callable[[int], object], *hooks: SessionRunHook) -> tuple[Any, list[int], int]:
    """Train, and skip what raises a ValueError. Return the error that ended it, what was skipped, and the step."""
    skipped, out = [], None
    loop = MonitoredLoop(step, hooks=hooks, ranks=ranks)
    try:
        with loop:
            for number in loop.until_stop(range(12)):
                try:
                    loop.run(number)
                except ValueError:
                    skipped.append(number)
    except Exception as error:
        out = error
    return out, skipped, loop.global_step


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("secs", [0.0, 0.02], ids=["at once", "one after the other"])
def test_a_batch_that_is_bad_on_all_ranks_is_skipped(size: int, secs: float) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        def step(number: int) -> None:
            time.sleep(secs * ranks.rank)
            if number in (2, 3, 7):
                raise ValueError("bad batch")

        recorder = RecordingHook()
        out, skipped, steps = skipping(ranks, step, StopAtStepHook(last_step=6), recorder)
        return out, skipped, steps, methods(recorder)[-2:]

    assert in_threads(size, main, tick_secs=0.01) == [(None, [2, 3, 7], 6, ["end", "teardown"])] * size


def test_a_batch_that_is_bad_on_one_rank_ends_all_of_them() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        def step(number: int) -> None:
            if number == 2 and ranks.rank == 1:
                raise ValueError("bad batch")

        return skipping(ranks, step)

    (peer, *of_peer), (own, *of_own) = in_threads(2, main)
    said = "rank 1 failed in run 3: ValueError: bad batch"
    assert (type(peer), str(peer), of_peer[0]) == (PeerError, said, [])
    assert (type(own), str(own), of_own) == (PeerError, said, [[2], 2])
    assert isinstance(own.__cause__, ValueError)
    assert (own.rank, own.run, own.reason) == (1, 3, "ValueError: bad batch")


def test_so_it_does_if_the_script_does_not_ask_for_another_run() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        def step() -> None:
            if ranks.rank == 1:
                raise ValueError("bad batch")

        recorder = RecordingHook()
        with MonitoredLoop(step, hooks=[recorder], ranks=ranks) as loop, contextlib.suppress(ValueError):
            loop.run()
        return methods(recorder)

    for out in in_threads(2, main):
        assert isinstance(out, PeerError)
        assert str(out) == "rank 1 failed in run 1: ValueError: bad batch"


def test_an_error_of_all_ranks_that_one_of_them_does_not_catch_ends_the_others() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        def step(number: int) -> None:
            time.sleep(0.002)
            if number == 2:
                raise ValueError("bad batch") if ranks.rank == 0 else KeyError("bad batch")

        return skipping(ranks, step)

    (other, skipped, _), (own, *_) = in_threads(2, main, tick_secs=0.01)
    assert (type(other), skipped) == (PeerError, [2])
    assert (type(own), str(other)) == (KeyError, "rank 1 failed after run 2: KeyError: 'bad batch'")


@pytest.mark.parametrize("status", [RUN_FAILED, FAILED])
def test_a_thread_that_saves_waits_for_the_others_until_it_is_known_that_this_rank_has_failed(status: int) -> None:
    ranks = LoopRanks(Ranks())
    ranks.size = 2
    training = Session(ranks=ranks)
    peers = RankSync(training, HookSchedule(training, LoopPlan(), [], [])).peers
    peers._outcome = peers._outcome._replace(status=status)  # noqa: SLF001 - no test can time a save to wait just then
    assert (peers._why_not_to_wait() is None) is (status == RUN_FAILED)  # noqa: SLF001


@pytest.mark.exhaustive
@pytest.mark.parametrize("culprits", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_a_save_in_the_background_outlasts_a_run_that_failed_on_all_ranks(
    culprits: tuple[int, ...], tmp_path: Path
) -> None:
    class SlowDisk(Disk):
        def sync(self, file: Any) -> None:
            time.sleep(0.3)

    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        def step(number: int) -> None:
            if number in (1, 2) and ranks.rank in culprits:
                time.sleep(0 if ranks.rank else 0.15)  # rank 1 waits for it, while its thread waits for the chief
                raise ValueError("bad batch")

        saver = Saver(async_save=True)
        saver.disk = SlowDisk()
        saving = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver)
        return skipping(ranks, step, saving, StopAtStepHook(last_step=2))

    results = in_threads(2, main, tick_secs=0.05)
    if culprits == (0, 1):
        assert results == [(None, [1, 2], 2)] * 2
        assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)][-2:] == [1, 2]
    else:
        assert all(isinstance(out, PeerError) for out, _, _ in results)


def test_a_loop_that_closes_after_its_script_has_caught_the_failure_of_another_rank_says_so(
    lines: list[tuple[str, str]],
) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        def step() -> None:
            if ranks.rank == 1:
                raise ValueError("bad batch")

        with MonitoredLoop(step, ranks=ranks) as loop, contextlib.suppress(PeerError):
            while True:
                loop.run()

    _, own = in_threads(2, main)
    assert isinstance(own, ValueError)
    said = [text for level, text in lines if level == "WARNING"]
    assert len(said) == 1
    failure = "PeerError: rank 1 failed in run 1: ValueError: bad batch"
    assert said[0].startswith(f"the script caught {failure}, which has ended the loop")


def test_batches_that_are_bad_in_different_runs_end_all_ranks() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        def step(number: int) -> None:
            if number == 2 + ranks.rank:
                raise ValueError("bad batch")

        return skipping(ranks, step)

    for out, _, _ in in_threads(2, main):
        assert isinstance(out, PeerError)
        assert str(out) == "rank 0 failed in run 3: ValueError: bad batch"


def test_an_error_of_a_hook_that_all_ranks_catch_ends_none() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        failing = RecordingHook(raises={("after_run", 3): ValueError, ("before_run", 5): ValueError})
        return skipping(ranks, lambda number: None, failing, StopAtStepHook(last_step=8))

    assert in_threads(2, main, tick_secs=0.01) == [(None, [2, 4], 8)] * 2


def test_a_stop_is_exact_although_a_run_fails_on_all_ranks_while_they_agree_on_it() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        class Asking(SessionRunHook):
            def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
                if ranks.rank and run_context.session.global_step == 3:
                    run_context.request_stop("enough")

        def step(number: int) -> None:
            time.sleep(0.01 * ranks.rank)
            if number >= 3:
                raise ValueError("bad batch")

        return skipping(ranks, step, Asking())

    results = in_threads(2, main, tick_secs=0.01)
    assert [out for out, _, _ in results] == [None, None]
    assert results[0] == results[1]


@pytest.mark.parametrize("error", [AbortedError("connection lost"), ValueError("disk")])
def test_an_error_of_a_thread_stops_all_ranks_after_the_same_run(error: Exception, tmp_path: Path) -> None:
    class Reporting(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            self.coord = coord

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            if run_context.session.global_step == 3:
                self.coord.request_stop(error)

    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        recorder, hooks = RecordingHook(), [Reporting()] if ranks.rank else []
        loop = MonitoredLoop(lambda: time.sleep(0.002), hooks=[*hooks, recorder], ranks=ranks, checkpoint_dir=tmp_path)
        out = None
        try:
            with loop:
                for _ in loop.until_stop(range(100)):
                    loop.run()
        except Exception as raised:
            out = raised
        return out, loop.global_step, methods(recorder)[-2:]

    (other, *ended), (own, *of_own) = in_threads(2, main)
    assert (other, own) == (None, error)
    assert ended == of_own
    assert ended[0] < 100
    assert ended[1] == ["end", "teardown"]
    not_recovered = ["not recovered from" in note for note in getattr(error, "__notes__", [])]
    assert not_recovered == [True] * isinstance(error, AbortedError)


def test_a_rank_whose_process_ended_after_the_loop_is_not_lost() -> None:
    class EndsSlowly(SessionRunHook):
        def __init__(self, ranks: ThreadRanks, hub: Hub) -> None:
            self._rank, self._hub = ranks.rank, hub

        def end(self, session: Any) -> None:
            if self._rank < 2:
                wait_until(lambda: 2 in self._hub.gone)
                time.sleep(0.05)  # ticks

    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        with MonitoredLoop(lambda: 1.0, hooks=[EndsSlowly(ranks, hub), StopAtStepHook(2)], ranks=ranks) as loop:
            while not loop.should_stop():
                loop.run()
        rank_sync: Any = loop._runner.rank_sync  # noqa: SLF001 - nothing public tells that no error was prepared
        return rank_sync.peers.failure

    assert in_threads(3, main) == [None, None, None]


def test_a_failure_between_runs_reaches_a_rank_that_asks_should_stop() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        with MonitoredLoop(lambda: 1.0, ranks=ranks) as loop:
            if ranks.rank == 1:
                raise ValueError("boom")
            while not loop.should_stop():
                pass

    peer, _ = in_threads(2, main)
    assert isinstance(peer, PeerError)


def test_a_peer_error_is_no_aborted_error() -> None:
    # In-process recovery would make the run again on one rank alone.
    assert issubclass(PeerError, RuntimeError)
    assert not issubclass(PeerError, torchhooks.AbortedError)


def test_two_ranks_that_fail_at_once_keep_their_errors() -> None:
    def step(ranks: ThreadRanks, hub: Hub) -> None:
        hub.gather("step", ranks.rank, 0)
        raise ValueError(f"rank {ranks.rank}")

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        with MonitoredLoop(step, ranks=ranks) as loop:
            loop.run(ranks, hub)

    assert [str(error) for error in in_threads(2, main)] == ["rank 0", "rank 1"]


def test_a_rank_keeps_its_error_if_another_one_has_ended_with_the_same_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tell_failure = Peers.tell_failure

    def tell_until_the_other_has_ended(peers: Peers, error: BaseException, *arguments: Any) -> Any:
        failure, end = tell_failure(peers, error, *arguments), time.monotonic() + 60
        while str(error) == "rank 1" and peers.failure is None and time.monotonic() < end:
            time.sleep(0.001)
        return failure

    monkeypatch.setattr(Peers, "tell_failure", tell_until_the_other_has_ended)

    def main(ranks: ThreadRanks, hub: Hub, catches: bool) -> None:
        def step() -> None:
            hub.gather("step", ranks.rank, 0)
            raise ValueError(f"rank {ranks.rank}")

        with MonitoredLoop(step, ranks=ranks) as loop:
            try:
                loop.run()
            except ValueError:
                if not catches or ranks.rank == 0:
                    raise
                loop.run()

    errors = in_threads(2, functools.partial(main, catches=False))
    assert [str(error) for error in errors] == ["rank 0", "rank 1"]
    assert errors[1].__notes__[-1] == "torchhooks: meanwhile, rank 0 failed before its first run: ValueError: rank 0"
    # A rank that goes on is told at its next run.
    assert [type(error) for error in in_threads(2, functools.partial(main, catches=True))] == [ValueError, PeerError]


def test_no_rank_recovers_alone() -> None:
    def step(ranks: ThreadRanks) -> None:
        if ranks.rank == 1:
            raise torchhooks.AbortedError("lost")

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        with MonitoredLoop(step, ranks=ranks) as loop:
            while not loop.should_stop():
                loop.run(ranks)

    peer, error = in_threads(2, main)
    assert isinstance(peer, PeerError)
    assert isinstance(error, torchhooks.AbortedError)
    assert "2 ranks cannot restore in the middle of a run: torchrun --max-restarts" in "".join(error.__notes__)


def test_nothing_is_saved_after_another_rank_failed() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> str | None:
        with MonitoredLoop(lambda: 1.0, ranks=ranks) as loop:
            if ranks.rank == 1:
                raise ValueError("boom")
            while loop.session.why_no_checkpoint() is None:
                time.sleep(0.001)
            result: str | None = loop.session.why_no_checkpoint()
        return result

    hub_result = in_threads(2, main)
    assert isinstance(hub_result[0], PeerError)


def test_a_hook_list_that_differs_is_an_error_that_names_it() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        MonitoredLoop(lambda: 1.0, hooks=[Periodic(1.0)] if ranks.rank else [], ranks=ranks).close()

    errors = in_threads(2, main)
    assert all(isinstance(error, LifecycleError) for error in errors)
    assert "the collective hooks are [] on rank 0 and [Periodic] on rank 1" in str(errors[0])


def test_a_folder_on_one_rank_alone_is_an_error_that_names_it(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        MonitoredLoop(lambda: 1.0, checkpoint_dir=None if ranks.rank else tmp_path, ranks=ranks).close()

    chief, other = in_threads(2, main)
    assert isinstance(chief, LifecycleError)
    assert isinstance(other, LifecycleError)
    assert str(chief).startswith(f"checkpoint_dir is {tmp_path} on rank 0 and None on rank 1: give all ranks the same")


def test_another_folder_on_another_rank_is_an_error_that_names_both(tmp_path: Path) -> None:
    def loop_of(ranks: ThreadRanks, hub: Hub) -> None:
        MonitoredLoop(lambda: 1.0, checkpoint_dir=tmp_path / str(ranks.rank), ranks=ranks).close()

    def hook_of(ranks: ThreadRanks, hub: Hub) -> None:
        hooks = [CheckpointSaverHook(tmp_path / str(ranks.rank), save_steps=1)]
        MonitoredLoop(lambda: 1.0, hooks=hooks, ranks=ranks).close()

    hint = "give all ranks the same folder, on a disk that all of them see. A checkpoint has the states of all ranks"
    first, second = tmp_path / "0", tmp_path / "1"
    assert str(in_threads(2, loop_of)[1]) == f"checkpoint_dir is {second} on rank 1 and {first} on rank 0: {hint}"
    assert str(in_threads(2, hook_of)[0]) == f"the hooks save into [{first}] on rank 0 and [{second}] on rank 1: {hint}"


def test_ranks_that_get_the_checkpoints_from_a_copy_may_have_folders_of_their_own(tmp_path: Path) -> None:
    class Copies(SessionRunHook):
        brings_checkpoints = True

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        folder = tmp_path / str(ranks.rank)
        hooks = [CheckpointSaverHook(folder, save_steps=1), Copies()]
        MonitoredLoop(lambda: 1.0, hooks=hooks, checkpoint_dir=folder, ranks=ranks).close()

    assert in_threads(2, main) == [None, None]


def test_another_name_of_the_same_folder_is_none(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        MonitoredLoop(lambda: 1.0, checkpoint_dir=tmp_path / ("link" if ranks.rank else "run"), ranks=ranks).close()

    assert in_threads(2, main) == [None, None]


def test_another_checkpoint_to_begin_with_is_an_error_that_names_both(tmp_path: Path) -> None:
    for step in (1, 2):
        Saver().save(Session(), tmp_path / "model.ckpt", step)

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        MonitoredLoop(lambda: 1.0, checkpoint_dir=tmp_path / f"model.ckpt-{1 + ranks.rank}", ranks=ranks).close()

    assert str(in_threads(2, main)[0]).startswith(
        "the checkpoint to restore is model.ckpt-1 on rank 0 and model.ckpt-2 on rank 1: create the loop with the same"
    )


def evaluation(name: str = "evaluation") -> EvaluationHook:
    return EvaluationHook(lambda: {"accuracy": 0.5}, every_n_steps=2, name=name)


@pytest.mark.parametrize(
    ("hooks", "named"),
    [
        (
            lambda: [evaluation(), LoggingTensorHook(["loss"], every_n_iter=2)],
            "EvaluationHook with EverySteps(2), LoggingTensorHook every 2 steps",
        ),
        (lambda: [NanTensorHook("loss"), RecordingHook()], "NanTensorHook, RecordingHook"),
        (lambda: [NanTensorHook("loss"), NanTensorHook("loss2")], "NanTensorHook('loss'), NanTensorHook('loss2')"),
    ],
)
def test_another_order_of_the_hooks_is_an_error_where_the_loop_is_created(
    hooks: Callable[[], list[SessionRunHook]], named: str
) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        order = hooks()[:: -1 if ranks.rank else 1]
        MonitoredLoop(lambda: 1.0, hooks=order, ranks=ranks).close()

    chief, other = in_threads(2, main)
    assert isinstance(chief, LifecycleError)
    assert isinstance(other, LifecycleError)
    assert str(chief).startswith(f"the hooks are [{named}")
    assert str(chief).endswith(": give every rank the same hooks, in the same order")


@pytest.mark.parametrize(
    "hooks_of",
    [
        lambda rank: [*[RecordingHook()][rank:], NanTensorHook("loss"), LoggingTensorHook(["loss"], every_n_iter=2)],
        lambda rank: [LoggingTensorHook(["loss"], every_n_iter=2 + rank), NanTensorHook("loss")],
        lambda rank: [NanTensorHook(f"loss{rank}"), NanTensorHook(f"loss{1 + rank}")],
        lambda rank: [NanTensorHook("loss"), NanTensorHook("loss")],
        lambda rank: [BrokenRepr(), BrokenRepr()],
    ],
)
def test_hooks_that_one_rank_alone_has_change_no_order(hooks_of: Callable[[int], list[SessionRunHook]]) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        MonitoredLoop(lambda: 1.0, hooks=hooks_of(ranks.rank), ranks=ranks).close()

    assert in_threads(2, main) == [None, None]


class BrokenRepr(SessionRunHook):
    def __repr__(self) -> str:
        raise ValueError("no repr")


def test_another_step_unit_is_an_error_that_names_it() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        unit = "optimizer_step" if ranks.rank else "run"
        MonitoredLoop(lambda: 1.0, None, optimizer, step_unit=unit, ranks=ranks).close()

    assert "step_unit is run on rank 0 and optimizer_step on rank 1" in str(in_threads(2, main)[0])


def test_the_clock_of_the_chief_decides_when_a_collective_hook_is_due() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> list[int]:
        # The clock of rank 1 never says that the hook is due.
        hook = Periodic(0.005 if ranks.is_chief else 1e9)

        def step() -> None:
            hub.gather("step", ranks.rank, 0)

        with MonitoredLoop(step, hooks=[hook], ranks=ranks) as loop:
            while not loop.should_stop():
                loop.run()
                if len(hook.steps) == 3:
                    loop.request_stop()
        return hook.steps

    first, second = in_threads(2, main)
    assert len(first) >= 3
    assert first == second


def test_ranks_of_a_training_loop_save_together(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> int:
        with torchhooks.MonitoredTrainingLoop(
            lambda: hub.gather("step", ranks.rank, 0),
            checkpoint_dir=tmp_path,
            hooks=[StopAtStepHook(3)],
            ranks=ranks,
        ) as loop:
            while not loop.should_stop():
                loop.run()
        return loop.global_step

    assert in_threads(2, main) == [3, 3]


def test_too_many_collective_hooks_are_refused() -> None:
    ranks = ThreadRanks(Hub(2), 0, random.Random(0))
    with pytest.raises(ValueError, match="61 collective hooks: a loop of several ranks takes at most 60"):
        MonitoredLoop(lambda: 1.0, hooks=[Periodic(1.0) for _ in range(61)], ranks=ranks)


def test_gather_returns_the_values_of_all_ranks() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> list[Any]:
        with MonitoredLoop(lambda: 1.0, ranks=ranks) as loop:
            result: list[Any] = loop.session.ranks.gather(ranks.rank * 10)
        return result

    assert in_threads(3, main) == [[0, 10, 20]] * 3


def test_ranks_that_are_given_to_a_loop_are_not_changed_and_gather_for_it() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> tuple[bool, list[Any]]:
        before = dict(vars(ranks))
        with MonitoredLoop(lambda: 1.0, hooks=[Periodic(math.inf)], ranks=ranks) as loop:
            loop.run()
            ranks.gather(0)
        return vars(ranks) == before and ranks.is_connected, ranks.gather(ranks.rank)

    assert in_threads(2, main) == [(True, [0, 1])] * 2
    assert Ranks().gather(7) == [7]


def test_one_ranks_serves_two_loops_at_once_and_a_third_one_after_them() -> None:
    def train(ranks: ThreadRanks, hub: Hub, hooks: list[SessionRunHook]) -> MonitoredLoop[Any]:
        return MonitoredLoop(lambda: hub.gather("step", ranks.rank, 0), hooks=hooks, ranks=ranks)

    def main(ranks: ThreadRanks, hub: Hub) -> list[Any]:
        periodic = Periodic(0.0)
        with train(ranks, hub, [periodic, StopAtStepHook(4)]) as outer, train(ranks, hub, [StopAtStepHook(3)]) as inner:
            for loop in (inner, outer):
                while not loop.should_stop():
                    loop.run()
            gathered = [loop.session.ranks.gather(loop.global_step) for loop in (outer, inner)]
        with train(ranks, hub, [StopAtStepHook(2)]) as last:
            while not last.should_stop():
                last.run()
        return [*gathered, last.global_step, isinstance(outer.session.ranks, Ranks)]

    assert in_threads(2, main) == [[[4, 4], [3, 3], 2, True]] * 2


def test_one_ranks_gathers_for_the_outer_loop_once_the_inner_one_is_closed() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> bool:
        with MonitoredLoop(lambda: 1.0, ranks=ranks) as outer:
            with MonitoredLoop(lambda: 1.0, ranks=ranks):
                pass
            outer_ranks: Any = outer.session.ranks
            gathered: list[Any] = []
            outer_ranks.gather = lambda value, purpose: gathered.append(value)
            ranks.gather(7)
            del outer_ranks.gather  # the end of the loop gathers too
        return gathered == [7]

    assert in_threads(2, main) == [True, True]


@pytest.mark.parametrize("fails", [False, True])
def test_the_connections_of_a_loop_are_closed_with_it(fails: bool) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> bool:
        for number in (1, 2):
            with contextlib.suppress(ValueError, PeerError), MonitoredLoop(lambda: 1.0, ranks=ranks) as loop:
                loop.run()
                assert (ranks.rank, number) not in hub.closed
                if fails and ranks.rank:
                    raise ValueError
        wait_until(lambda: {(ranks.rank, 1), (ranks.rank, 2)} <= hub.closed)
        return (ranks.rank, 1) in hub.closed

    assert in_threads(2, main) == [True, True]


def test_what_values_are_gathered_for_is_forgotten_if_the_gathering_fails() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        of_loop = LoopRanks(ranks)
        of_loop.connect(lambda: PeerError("rank 1 failed", 1))
        if ranks.rank == 0:
            with pytest.raises(PeerError, match="rank 1 failed"):
                of_loop.gather(0, details=" (of the first run)")
        return of_loop.gathering

    assert in_threads(2, main) == [None, None]


def test_values_can_be_gathered_after_the_loop_however_late_a_rank_comes() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> list[list[Any]]:
        with MonitoredLoop(lambda: 1.0, ranks=ranks) as loop:
            for _ in loop.until_stop(range(2)):
                loop.run()
        gathered = []
        for _ in range(2):
            if ranks.rank == 0:
                time.sleep(0.2)  # such as an export of the model
            gathered.append(loop.session.ranks.gather(ranks.rank))
        return gathered

    assert in_threads(2, main, stuck_secs=0.05) == [[[0, 1], [0, 1]]] * 2


def skips_an_item(ranks: ThreadRanks, hub: Hub) -> None:
    """Make four runs with a collective in each. Rank 1 makes only three, because it catches an error before one."""

    def prepare(number: int) -> None:
        if ranks.rank == 1 and number == 1:
            raise ValueError("damaged item")

    with MonitoredLoop(lambda: hub.gather("step", ranks.rank, 0), ranks=ranks) as loop:
        for number in loop.until_stop(range(4)):
            try:
                prepare(number)
            except ValueError:
                continue
            loop.run()


def test_an_error_that_one_rank_catches_before_a_run_is_an_error_where_the_data_end() -> None:
    errors = in_threads(2, skips_an_item)
    assert [type(error) for error in errors] == [PeerError] * 2
    assert str(errors[0]) == str(errors[1])
    assert re.fullmatch(
        r"rank 1 came to the end of its data, and closed its loop, after run 3, test_ranks\.py:\d+; "
        r"rank 0 goes on with run 4: give every rank the same number of items, and make a run for the same of them",
        str(errors[0]),
    )


def test_values_of_different_runs_are_not_gathered() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        with MonitoredLoop(lambda: None, ranks=ranks) as loop:
            for _ in range(3 if ranks.rank else 4):
                loop.run()
            loop.session.ranks.gather(0, "the best metric")

    errors = in_threads(2, main)
    assert [type(error) for error in errors] == [LifecycleError] * 2
    assert str(errors[0]).startswith(
        "rank 0 gathers values for the best metric in run 4, and rank 1 in run 3: make the same runs on all ranks."
    )
    assert str(errors[1]).startswith("rank 1 gathers values for the best metric in run 3, and rank 0 in run 4: ")


def test_a_stop_takes_effect_where_no_data_arrive() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> str | None:
        with MonitoredLoop(lambda: 1.0, ranks=ranks) as loop:
            while not loop.should_stop():
                for _ in loop.until_stop([]):
                    loop.run()
                if ranks.rank:
                    loop.request_stop("asked")
        return loop.stop_reason

    assert in_threads(2, main) == ["request_stop: asked (rank 1)"] * 2


def test_gather_raises_when_another_rank_fails_instead() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        with MonitoredLoop(lambda: 1.0, ranks=ranks) as loop:
            if ranks.rank == 1:
                raise ValueError("boom")
            loop.session.ranks.gather(1, "the best metric")

    error = in_threads(2, main)[0]
    assert isinstance(error, PeerError)
    assert error.__notes__ == ["torchhooks: rank 0 gathered values for the best metric"]


def test_an_error_at_a_meeting_names_the_meeting() -> None:
    rank_0_is_there = threading.Event()

    def items(rank: int) -> Iterator[int]:
        yield from range(2 + rank)
        rank_0_is_there.set()

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        with MonitoredLoop(lambda: 1.0, ranks=ranks) as loop:
            for _ in loop.until_stop(items(ranks.rank)):
                loop.run()
                if loop.global_step == 3:
                    assert rank_0_is_there.wait(60)
                    raise ValueError("boom")

    error = in_threads(2, main)[0]
    assert isinstance(error, PeerError)
    (note,) = error.__notes__
    assert note.startswith("torchhooks: rank 0 waited for the others where it ")
    assert note.endswith("end of its data")


def test_gather_on_a_rank_that_has_failed_raises_instead_of_waiting() -> None:
    class Gathers(SessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            self.ranks = session.ranks

        def teardown(self) -> None:
            self.ranks.gather(1)

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        with MonitoredLoop(lambda: 1.0, hooks=[Gathers()] if ranks.rank == 1 else [], ranks=ranks):
            if ranks.rank == 1:
                raise ValueError("boom")

    _, error = in_threads(2, main)
    assert repr(error) == "ValueError('boom')"
    assert "PeerError: this rank failed: ValueError: boom" in "".join(error.__notes__)


class _FailsInEnd(SessionRunHook):
    def end(self, session: Any) -> None:
        raise OSError("disk full")


def test_an_end_that_fails_on_one_rank_is_its_error_alone() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> int:
        hooks = [StopAtStepHook(2), *([_FailsInEnd()] if ranks.rank else [])]
        with MonitoredLoop(lambda: hub.gather("step", ranks.rank, 0), hooks=hooks, ranks=ranks) as loop:
            while not loop.should_stop():
                loop.run()
        return loop.global_step

    ended, error = in_threads(2, main)
    assert ended == 2
    assert repr(error) == "OSError('disk full')"


def test_a_loop_that_is_dropped_without_closing_is_reported() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        loop = MonitoredLoop(lambda: 1.0, ranks=ranks)
        if ranks.rank == 1:
            del loop
            gc.collect()
            hub.gather("dropped", 1, None)
            noticed.wait(60)  # or the end of its thread would count as that of its process
            return
        hub.gather("dropped", 0, None)
        try:
            with loop:
                while not loop.should_stop():
                    loop.run()
        finally:
            noticed.set()

    noticed = threading.Event()

    peer, _ = in_threads(2, main)
    assert isinstance(peer, PeerError)
    assert peer.reason == "its loop was never closed"


def test_a_step_that_ends_by_stop_iteration_on_all_ranks_is_a_clean_end() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> tuple[list[str], str | None]:
        data, recorder = iter(range(3)), Recorder()

        def step() -> int:
            hub.gather("step", ranks.rank, 0)
            return next(data)

        with MonitoredLoop(step, hooks=[recorder], ranks=ranks) as loop:
            while not loop.should_stop():
                loop.run()
        return recorder.calls, loop.stop_reason

    assert in_threads(2, main) == [(["end", "teardown"], "StopIteration")] * 2


def test_a_stuck_rank_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()
    reasons: list[str] = []

    def end_process(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    monkeypatch.setattr(torchhooks.ranks.peers, "end_process", end_process)

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        def step() -> None:
            if ranks.rank == 1:
                assert begun.wait(60)  # or the other rank would notice the error before its run
                raise ValueError("boom")
            begun.set()
            ended.wait(60)  # a collective that never returns

        with MonitoredLoop(step, ranks=ranks) as loop:
            loop.run()

    with threads_end():
        in_threads(2, main, stuck_secs=0.01)
    assert reasons == [
        "rank 1 failed in run 1: ValueError: boom. The training thread has not come back for 0.01 s from a call"
    ]


def test_the_time_without_an_answer_counts_for_a_stuck_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, in_step = threading.Event(), {0: False, 1: False}
    now = [0.0]
    reasons: list[str] = []
    answer = ThreadTransport.exchange

    def exchange(self: ThreadTransport, numbers: list[int], purpose: str = "") -> list[list[int]]:
        rank = self._rank
        if in_step[rank]:
            now[0] += 60
            raise ContactLostError("no answer for 60 s to a tick")
        table = answer(self, numbers, purpose)
        in_step[rank] = all(Row(*row).begun for row in table)  # the next tick begins in the step
        return table

    def end_process(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    monkeypatch.setattr(ThreadTransport, "exchange", exchange)
    monkeypatch.setattr(torchhooks.ranks.peers, "end_process", end_process)
    monkeypatch.setattr(torchhooks.ranks.peers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(torchhooks.ranks.peers, "_LEAST_STUCK_SECS", 0.01)

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        with MonitoredLoop(lambda: ended.wait(60), ranks=ranks) as loop:  # as a collective that never returns
            loop.run()

    with threads_end():  # that of the other rank may come to end_process later
        in_threads(2, main, stuck_secs=50)
    assert ended.is_set()
    assert all(reason.endswith("not come back for 50 s from a call") for reason in reasons)


def test_a_rank_that_does_not_come_back_between_epochs_is_reported_and_not_ended(
    monkeypatch: pytest.MonkeyPatch, lines: list[tuple[str, str]]
) -> None:
    reported, is_out = threading.Event(), threading.Event()
    critical = logger.critical

    def report(*arguments: Any) -> None:
        critical(*arguments)
        reported.set()

    monkeypatch.setattr(logger, "critical", report)

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        with MonitoredLoop(lambda: None, ranks=ranks) as loop:
            for _epoch in loop.until_stop(range(2)):
                for _ in loop.until_stop(range(3)):
                    loop.run()
                if ranks.rank == 1:
                    assert is_out.wait(60)  # of its inner loop, which would notice the error
                    raise ValueError("boom")
                is_out.set()
                assert reported.wait(60)  # a long evaluation

    with threads_end():
        error, _ = in_threads(2, main, stuck_secs=0.01)
    assert isinstance(error, PeerError)
    (text,) = [text for level, text in lines if level == "CRITICAL"]
    assert text.startswith(
        "rank 1 failed after run 3: ValueError: boom. For 0.01 s since then, this rank has been in code"
    )


def test_a_rank_whose_thread_fails_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, table: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Agreement, "settle", broken)
    for error in in_threads(2, uneven):
        assert isinstance(error, PeerError)
        assert error.reason == "ZeroDivisionError"


# -- one process ----------------------------------------------------------------------------------------------------


def test_one_process_is_the_chief_of_one_rank() -> None:
    with MonitoredLoop(lambda: 1.0) as loop:
        ranks = loop.session.ranks
        assert (ranks.rank, ranks.size, ranks.is_chief, ranks.gather("x")) == (0, 1, True, ["x"])


def test_one_process_starts_no_thread_but_its_watch() -> None:
    before = threading.enumerate()
    with MonitoredLoop(lambda: 1.0):
        started = [thread.name for thread in threading.enumerate() if thread not in before]
    assert started == ["torchhooks watch"]


def test_ranks_that_are_no_ranks_are_refused() -> None:
    with pytest.raises(TypeError, match="ranks=3: give a Ranks, False for a loop of this process alone, or None"):
        MonitoredLoop(lambda: 1.0, ranks=3)  # type: ignore[arg-type]


def test_a_period_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="tick_secs=-1:"):
        Ranks(tick_secs=-1)


def test_the_repr_of_ranks_can_be_pasted_back() -> None:
    assert repr(Ranks(tick_secs=0.5)) == "Ranks(tick_secs=0.5)"
    assert repr(checked_ranks(Ranks(tick_secs=0.5))) == "Ranks(tick_secs=0.5)"


def calls_of_idle_runs(loop: MonitoredLoop[float]) -> int:
    """Return how many functions ten idle runs call."""
    counts = itertools.count()
    sys.setprofile(lambda frame, event, argument: next(counts) if event.endswith("call") else None)
    try:
        for _ in range(10):
            loop.run()
    finally:
        sys.setprofile(None)
    return next(counts)


def test_an_idle_run_makes_no_additional_call() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> int:
        with MonitoredLoop(lambda: 1.0, ranks=ranks) as loop:
            loop.run()
            result: int = calls_of_idle_runs(loop)
        return result

    with MonitoredLoop(lambda: 1.0, ranks=False) as alone:
        alone.run()
        expected = calls_of_idle_runs(alone)
    assert in_threads(2, main) == [expected] * 2


# -- gloo in one process --------------------------------------------------------------------------------------------


@pytest.fixture
def two_transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The gloo transports of two ranks, both in this process, with a store in memory. See ``LOST_SOON``."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = distributed.HashStore()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torchhooks.ranks.transport, "_broadcast_token", lambda deadline, group: "token")
    failures: list[PeerError | None] = [None, None]

    def make(rank: int) -> Any:
        periods = {"lost_after_secs": getattr(request, "param", 60.0), "join_secs": 60.0}
        transport: Any = GlooTransport(rank=rank, size=2, failure=lambda: failures[rank], **periods)
        transport.failures, transport.rank = failures, rank
        return transport

    return both(make, [0, 1])


LOST_SOON = pytest.mark.parametrize("two_transports", [0.5], indirect=True, ids=["lost after 0.5 s"])


def both(call: Callable[[Any], Any], arguments: list[Any]) -> list[Any]:
    """Return ``call(argument)`` for each argument, each called in a thread, so that they can communicate."""
    results: list[Any] = [None] * len(arguments)

    def main(index: int) -> None:
        try:
            results[index] = call(arguments[index])
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=main, args=(index,)) for index in range(len(arguments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_gloo_exchanges_numbers(two_transports: list[Any]) -> None:
    assert both(lambda each: each.exchange([each.rank, -1]), two_transports) == [[[0, -1], [1, -1]]] * 2


def test_gloo_exchanges_text(two_transports: list[Any]) -> None:
    texts = both(lambda each: each.exchange_text("é" * 700 if each.rank else "", "a text"), two_transports)
    assert texts == [["", "é" * 500]] * 2


def test_gloo_gathers_objects(two_transports: list[Any]) -> None:
    gathered = both(lambda each: each.gather({"rank": each.rank, "data": "x" * each.rank}), two_transports)
    assert gathered == [[{"rank": 0, "data": ""}, {"rank": 1, "data": "x"}]] * 2


def test_a_thread_that_saves_has_a_group_of_its_own(two_transports: list[Any]) -> None:
    saving = both(lambda each: each.for_saving(), two_transports)
    assert both(lambda each: each.gather(each.rank), saving) == [[0, 1], [0, 1]]


@LOST_SOON
def test_a_rank_that_does_not_answer_is_lost(two_transports: list[Any]) -> None:
    with pytest.raises(ContactLostError, match=r"^no answer for 0\.5 s to a tick$"):
        two_transports[0].exchange([1])


def test_gather_is_interrupted_by_a_failure(two_transports: list[Any]) -> None:
    two_transports[0].failures[0] = PeerError("rank 1 failed", 1)
    with pytest.raises(PeerError, match="rank 1 failed"):
        two_transports[0].gather(1)


def test_ranks_that_answer_are_not_missing(two_transports: list[Any]) -> None:
    assert both(lambda each: each.find_missing(), two_transports) == [[], []]


def test_a_rank_that_does_not_answer_is_missing(two_transports: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchhooks.ranks.transport, "_MISSING_SECS", 0.2)
    assert two_transports[0].find_missing() == [1]


def test_gloo_cannot_be_aborted(two_transports: list[Any]) -> None:
    assert two_transports[0].abort() is False


@LOST_SOON
def test_gather_names_the_rank_with_which_contact_was_lost(
    two_transports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: Any) -> None:
        raise ContactLostError("connection reset")

    monkeypatch.setattr(two_transports[0], "_gather", lose)
    with pytest.raises(PeerError, match=r"another rank did not take part in Ranks\.gather: connection reset"):
        two_transports[0].gather(1)


def test_a_call_that_torch_refuses_is_a_lost_contact(
    two_transports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("connection reset. This is typically caused by a remote worker")

    monkeypatch.setattr(torchhooks.ranks.transport, "_without_timeout", refuse)
    with pytest.raises(ContactLostError, match=r"^the connection was closed during a tick$"):
        two_transports[0].exchange([1])


def test_a_store_that_does_not_answer_leaves_the_other_of_two_ranks(
    two_transports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("no store")

    monkeypatch.setattr(two_transports[1], "_store", Gone())
    assert two_transports[1].find_missing() == [0]


def test_nccl_is_aborted(two_transports: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[bool] = []
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setattr(distributed.distributed_c10d, "_abort_process_group", lambda: aborted.append(True))
    assert two_transports[0].abort()
    assert aborted == [True]


@pytest.fixture
def group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An initialised process group with this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself, on import
def test_an_optimizer_whose_state_is_divided_over_the_ranks_is_refused(group_of_one: None) -> None:
    zero = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    model = torch.nn.Linear(1, 1)
    optimizer = zero(model.parameters(), torch.optim.SGD, lr=0.1)
    for arguments in ({"optimizer": optimizer}, {"state": {"other": optimizer}}):
        with pytest.raises(ValueError, match=r"ZeroRedundancyOptimizer, whose state each rank has a part of.*FSDP2"):
            MonitoredLoop(lambda: 1.0, model, **arguments)


def test_ranks_are_those_of_the_process_group(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "get_rank", lambda group: 2)
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 4)
    ranks = Ranks()
    assert (ranks.rank, ranks.size, ranks.is_chief) == (2, 4, False)


def test_ranks_from_before_the_process_group_are_those_of_the_loop(
    group_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    monkeypatch.setattr(distributed, "get_rank", lambda group: 2)
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 4)
    assert (ranks.rank, ranks.size) == (0, 1)
    monkeypatch.setattr(Ranks, "_new_transport", staticmethod(lambda **_: None))
    of_loop = checked_ranks(ranks)
    assert (of_loop.rank, of_loop.size) == (2, 4)
    of_loop.connect(lambda: None)
    assert (ranks.rank, ranks.size) == (2, 4)


@pytest.mark.parametrize("ranks", [None, False, Ranks()])
def test_a_process_group_that_is_newer_than_the_loop_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, lines: list[tuple[str, str]], ranks: Any
) -> None:
    with MonitoredLoop(lambda: 1.0, ranks=ranks) as loop:
        monkeypatch.setattr(torchhooks.ranks.ranks, "_rank_and_size_in", lambda group=None: (1, 4))
        for _ in range(2):
            loop.run()
    late = [text for _, text in lines if text.startswith("init_process_group() was called after the loop was created")]
    assert len(late) == (ranks is not False)


@pytest.mark.parametrize(("size", "ranks", "warns"), [("4", None, True), ("4", False, False), ("1", None, False)])
def test_a_loop_before_the_process_group_is_warned_of_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, lines: list[tuple[str, str]], size: str, ranks: Any, warns: bool
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    with MonitoredLoop(lambda: 1.0, ranks=ranks) as loop:
        created = list(lines)
        loop.run()
    assert any("WORLD_SIZE is 4, and torch.distributed is not initialized" in text for _, text in created) == warns
    assert lines == created


@pytest.mark.parametrize("closed", [[1, 0], [0, 1]], ids=["the newer one first", "the older one first"])
def test_a_rank_logs_as_such_until_its_last_loop_is_closed(
    monkeypatch: pytest.MonkeyPatch, lines: list[tuple[str, str]], closed: list[int]
) -> None:
    monkeypatch.setattr(Ranks, "_new_transport", staticmethod(lambda **_: None))
    monkeypatch.setattr(torchhooks.ranks.ranks, "_connected", [])
    loops = [LoopRanks(Ranks()), LoopRanks(Ranks())]
    for ranks in loops:
        ranks.rank = 1
        ranks.connect(lambda: None)
    loops[closed[0]].disconnect()
    logger.info("hidden")
    logger.warning("from rank 1")
    loops[closed[1]].disconnect()
    logger.warning("from this process")
    assert lines == [("WARNING", "rank 1: from rank 1"), ("WARNING", "from this process")]


def test_one_of_several_ranks_that_is_alone_in_its_loop_makes_no_tensor_whole(
    group_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("torch.distributed.tensor")  # without it, there are no DTensors
    assert Ranks().may_have_dtensors
    monkeypatch.setattr(distributed, "get_world_size", lambda group=None: 2)
    assert Ranks().may_have_dtensors
    assert not checked_ranks(False).may_have_dtensors


def test_an_error_that_allows_no_attributes_is_raised_as_it_is() -> None:
    class FrozenError(RuntimeError):
        def __setattr__(self, name: str, value: object) -> None:
            raise TypeError(name)

    mark_as_known(FrozenError())


def test_ranks_that_are_used_again_save_over_the_new_connection() -> None:
    given = ThreadRanks(Hub(1), 0, random.Random(0))
    loops = [LoopRanks(given), LoopRanks(given)]
    for ranks in loops:
        ranks.connect(lambda: None)
    first = loops[0].for_saving()
    assert loops[0].for_saving() is first
    assert loops[1].for_saving() is not first


def test_gloo_connects_over_the_process_group(group_of_one: None) -> None:
    transport = LoopRanks(Ranks()).connect(lambda: None)
    assert transport.exchange([7]) == [[7]]


def test_no_thread_saves_over_the_connections_of_a_closed_loop(group_of_one: None) -> None:
    ranks = LoopRanks(Ranks())
    transport = ranks.connect(lambda: None)
    saving = ranks.for_saving()
    assert saving.gather(7) == [7]
    ranks.disconnect()
    assert ranks.gather(7) == [7]  # over the process group
    transport.close()
    for late in (lambda: saving.gather(7), lambda: LoopRanks.for_saving(ranks) and transport.for_saving()):
        with pytest.raises(LifecycleError, match="a Saver with async_save=True writes after the loop was closed"):
            late()


def test_values_cannot_be_gathered_after_the_loop_without_a_process_group(
    group_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = LoopRanks(Ranks())
    ranks.connect(lambda: None)
    ranks.disconnect()
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    with pytest.raises(LifecycleError, match=r"call it before destroy_process_group\(\)"):
        ranks.gather(7)


def test_a_rank_that_connects_alone_gets_a_lifecycle_error(group_of_one: None) -> None:
    ranks = LoopRanks(Ranks(join_secs=0.3))
    ranks.size = 2
    with pytest.raises(LifecycleError, match=r"2 ranks did so within 0\.3 s"):
        ranks.connect(lambda: None)


def test_a_connection_that_fails_at_once_is_not_said_to_have_taken_long(
    group_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(token: str) -> None:
        raise RuntimeError("socket: Too many open files")

    monkeypatch.setattr(torchhooks.ranks.transport, "_own_part_of_the_store", fail)
    with pytest.raises(LifecycleError, match=r"could not connect to the other ranks \(RuntimeError: socket: Too many"):
        LoopRanks(Ranks()).connect(lambda: None)


def test_a_broadcast_that_no_rank_answers_is_given_up(monkeypatch: pytest.MonkeyPatch, group_of_one: None) -> None:
    class Pending:
        def is_completed(self) -> bool:
            return False

    monkeypatch.setattr(distributed, "broadcast", lambda *_, **__: Pending())
    with pytest.raises(LifecycleError, match="no answer to the first broadcast"):
        LoopRanks(Ranks(join_secs=0.0)).connect(lambda: None)


def test_threads_are_parked_when_the_process_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    exiting, slept = threading.Event(), threading.Event()
    monkeypatch.setattr(torchhooks.ranks.transport, "_exiting", exiting)
    atexit_function: Any = vars(torchhooks.ranks.transport)["_park"]
    atexit_function(-1)  # as in a forked process
    assert not exiting.is_set()
    atexit_function(os.getpid())
    assert exiting.is_set()
    wait: Any = vars(torchhooks.ranks.transport)["_pause"]

    def park() -> None:
        wait(0.0)
        slept.set()

    threading.Thread(target=park, daemon=True).start()
    assert not slept.wait(0.05)


def test_a_process_is_ended_with_code_70_and_the_stacks(
    monkeypatch: pytest.MonkeyPatch, lines: list[tuple[str, str]], tmp_path: Path
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with (tmp_path / "stderr").open("w+") as stderr:
        monkeypatch.setattr(sys, "__stderr__", stderr)
        end_process("stuck")
        stderr.seek(0)
        assert "most recent call first" in stderr.read()
    assert codes == [70]
    assert lines == [("CRITICAL", "stuck: ending this process with code 70; stderr has the stacks")]


# -- real processes -------------------------------------------------------------------------------------------------


class _Step:
    """A step with a collective in it."""

    def __init__(self) -> None:
        self.total = torch.ones(1)

    def __call__(self, *_: Any) -> float:
        torch.distributed.all_reduce(self.total)
        return 1.0


class _AsksOn(SessionRunHook):
    def __init__(self, rank: int, run: int) -> None:
        self._rank, self._run = rank, run

    def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
        if run_context.session.ranks.rank == self._rank and run_context.session.global_step == self._run:
            run_context.request_stop("asked")


def many_schedules(rank: int, size: int, seed: int) -> list[tuple[int, str | None]]:
    """Make many loops in a row, in each of which a random rank asks to stop in a random way."""
    rng = random.Random(seed)
    own = random.Random(seed * 10 + rank)
    ends = []
    for _ in range(25):
        asker, run, way = (
            rng.randrange(size),
            rng.randint(1, 10),
            rng.choice(["hook", "signal", "thread", "step", "data"]),
        )
        hooks: list[SessionRunHook] = [_AsksOn(asker, run)] if way == "hook" else []
        hooks += [StopAtStepHook(last_step=run)] if way == "step" else []
        items: Any = range(run + rank) if way == "data" else itertools.count()
        with MonitoredLoop(_Step(), hooks=hooks, signals=["SIGUSR1"], ranks=Ranks(**QUICK)) as loop:
            for _item in loop.until_stop(items):
                loop.run()
                if own.random() < 0.2:
                    time.sleep(own.random() * 0.005)
                if rank == asker and loop.global_step == run:
                    if way == "signal":
                        os.kill(os.getpid(), signal.SIGUSR1)
                    elif way == "thread":
                        threading.Thread(target=loop.request_stop, args=["asked"]).start()
        assert way not in ("step", "data") or loop.global_step == run, (way, run, loop.global_step)
        ends.append((loop.global_step, loop.stop_reason))
    return ends


def with_signals_ignored(rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function(rank, *arguments)`` in a process that a delivered SIGUSR1 does not end."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    return function(rank, *arguments)


@pytest.mark.ranks
@pytest.mark.parametrize(("size", "seed"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.ranks)])
def test_every_rank_makes_the_same_last_run(tmp_path: Path, size: int, seed: int) -> None:
    ended = run_ranks(tmp_path, size, with_signals_ignored, many_schedules, size, seed)
    assert [each.code for each in ended] == [0] * size, ended[0].output
    assert all(each.value == ended[0].value for each in ended)
    assert len(ended[0].value) == 25


def one_goes(rank: int, way: str) -> str:
    """Make runs until rank 1 goes in some way after its third; return what rank 0 and 2 see of it."""
    recorder = Recorder()
    ranks = Ranks(tick_secs=0.02, lost_after_secs=15.0, stuck_secs=15.0)

    def step() -> None:
        if rank == 1 and loop.global_step == 3:
            if way == "raise":
                raise ValueError("boom")
            if way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "exit":
                sys.exit(3)
            if way == "exit at once":
                os._exit(3)
        torch.distributed.all_reduce(torch.ones(1))

    begin = time.monotonic()
    try:
        with MonitoredLoop(step, hooks=[recorder], ranks=ranks) as loop:
            for _ in loop.until_stop(iter(range(3)) if rank == 1 and way == "fewer" else itertools.count()):
                loop.run()
                if rank == 1 and way == "break" and loop.global_step == 3:
                    break
    except PeerError as error:
        assert recorder.calls == ["teardown"]
        assert time.monotonic() - begin < 30
        return f"{error.rank}, {error.run}: {error.reason}"
    return "ended"


@pytest.mark.parametrize(
    ("way", "seen", "code"),
    [
        pytest.param("raise", "1, 4: ValueError: boom", 1, marks=pytest.mark.ranks),
        ("kill", "1, 3: ", -signal.SIGKILL),
        pytest.param("exit", "1, 4: SystemExit: 3", 3, marks=pytest.mark.release),
        pytest.param("exit at once", "1, 3: ", 3, marks=pytest.mark.release),
        pytest.param("break", "1, 3: left its loop by break", 0, marks=pytest.mark.ranks),
        pytest.param("fewer", "1, 3: came to the end", 0, marks=pytest.mark.release),
    ],
)
def test_when_one_rank_goes_the_others_end_with_a_peer_error(tmp_path: Path, way: str, seen: str, code: int) -> None:
    ended = run_ranks(tmp_path, 3, one_goes, way)
    assert [each.code for each in ended] == [0, code, 0], [each.output for each in ended]
    for each in (ended[0], ended[2]):
        assert each.value.startswith(seen), each


def is_signalled(rank: int, folder: str, name: str) -> str:
    """Make runs until rank 1, and no other, gets a signal."""
    hooks = [CheckpointSaverHook(folder, save_steps=1000)]
    with MonitoredLoop(lambda: time.sleep(0.001), hooks=hooks, checkpoint_dir=folder, signals=[name]) as loop:
        for _ in loop.until_stop(itertools.count()):
            loop.run()
            if rank == 1 and loop.global_step == 20:
                os.kill(os.getpid(), signal.Signals[name])
        print("not reached")
    return "went on after the loop"


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_one_rank_ends_all_ranks_by_it(tmp_path: Path, name: str) -> None:
    ended = run_ranks(tmp_path, 3, is_signalled, str(tmp_path / "run"), name)
    for each in ended:
        assert each.value is None, each
        assert each.code == -signal.Signals[name], each
        step = list_checkpoints(tmp_path / "run")[-1].step
        line = f"stopped by signal {name} (rank 1) at step {step}: the newest checkpoint is that of step {step}"
        assert line in each.output
        assert "not reached" not in each.output


def leaves_a_child(rank: int, folder: str) -> tuple[float, str]:
    """Make runs until rank 1 is killed, whose child keeps its connections open; return when and what the others see."""

    def step() -> None:
        time.sleep(0.01)
        if rank == 1 and loop.global_step == 3:
            child = os.fork()
            if not child:
                time.sleep(120)
                os._exit(0)
            Path(folder, "child").write_text(f"{child} {time.time()}")
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with MonitoredLoop(step, ranks=Ranks(tick_secs=0.02, lost_after_secs=4.0)) as loop:
            for _ in loop.until_stop(itertools.count()):
                loop.run()
    except PeerError as error:
        return time.time(), str(error)
    return time.time(), "ended"


@pytest.mark.ranks
def test_a_killed_rank_whose_child_keeps_its_connections_open_is_lost_in_time(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, 3, leaves_a_child, str(tmp_path))
    child, killed = (tmp_path / "child").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    for seen, text in (ended[0].value, ended[2].value):
        assert "contact with rank 1 was lost after run" in text
        assert "no answer for 4 s to a tick" in text
        assert seen - float(killed) < 4 + 5


def freeze(rank: int, pids: Any) -> str:
    ranks = Ranks(tick_secs=0.02, lost_after_secs=4.0, stuck_secs=4.0)
    (Path(pids) / f"pid-{rank}").write_text(str(os.getpid()))
    with MonitoredLoop(_Step(), ranks=ranks) as loop:
        while not loop.should_stop():
            loop.run()
            if rank == 1 and loop.global_step == 3:
                os.kill(os.getpid(), signal.SIGSTOP)
    return "ended"


def thaw_after(folder: Path, others: list[int]) -> None:
    """Let rank 1 continue once the processes of the ``others`` have ended."""
    deadline = time.monotonic() + 60
    files = [folder / f"pid-{rank}" for rank in (*others, 1)]
    while time.monotonic() < deadline and not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.02)
    pids = [int(file.read_text()) for file in files]
    while time.monotonic() < deadline and any(_runs(pid) for pid in pids[:-1]):
        time.sleep(0.02)
    os.kill(pids[-1], signal.SIGCONT)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_frozen_rank_ends_the_others_with_code_70_where_a_collective_blocks(tmp_path: Path) -> None:
    thawer = threading.Thread(target=thaw_after, args=(tmp_path, [0]))
    thawer.start()
    ended = run_ranks(tmp_path, 2, freeze, str(tmp_path))
    thawer.join()
    assert ended[0].code == 70, ended
    assert "contact with rank 1 was lost after run 3: no answer for 4 s" in ended[0].output
    assert "most recent call first" in ended[0].output
    # The connection of the rank that continues is closed. About once in twenty times, on a busy machine, gloo's call
    # waits nevertheless instead of raising an error.
    assert ended[1].code in (1, 70), ended
    expected = "PeerError: " if ended[1].code == 1 else "contact with another rank was lost after run 3"
    assert expected in ended[1].output


def never_closed(rank: int) -> int:
    loop = MonitoredLoop(_Step(), ranks=Ranks(**QUICK))
    for _ in loop.until_stop(range(5)):
        loop.run()
    return loop.global_step


def test_loops_that_are_never_closed_let_their_processes_exit(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, 2, never_closed)
    assert [each[:2] for each in ended] == [(0, 5)] * 2, ended


def many_loops(rank: int, folder: str) -> tuple[int, int, list[Any]]:
    """Return how many descriptors and threads closed loops have left behind, and what is gathered after them."""

    def count() -> list[int]:
        return [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]

    _, threads = count()
    faulthandler.cancel_dump_traceback_later()  # the deadline of this process, whose thread a loop would end
    wait_until(lambda: count()[1] < threads, lambda: f"{count()[1]} threads")  # the kernel may list it a little longer
    before, loops = count(), []
    for _ in range(4):
        saver = CheckpointSaverHook(folder, save_steps=1, saver=Saver(async_save=True))
        with MonitoredLoop(lambda: 1.0, hooks=[saver], ranks=Ranks(tick_secs=0.01)) as loop:
            loop.run()
            loop.session.ranks.for_saving()
        loops.append(loop)  # so that the garbage collector does not help
    wait_until(lambda: count() == before, lambda: f"{count()} descriptors and threads, {before} before")
    descriptors, threads = (now - then for now, then in zip(count(), before, strict=True))
    return descriptors, threads, loops[0].session.ranks.gather(rank)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_closed_loops_leave_no_sockets_and_threads_behind(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, 2, many_loops, str(tmp_path / "run"))
    assert [each.value for each in ended] == [(0, 0, [0, 1])] * 2, ended


def in_groups(rank: int, folder: str) -> Any:
    """Train in one of two groups, of which one stops early, and return what this rank sees of it."""
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    own = rank % 2
    try:
        Ranks(group=groups[1 - own])
    except ValueError as error:
        refused = str(error)
    values: list[float] = []

    class Sees(SessionRunHook):
        def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
            return SessionRunArgs(over_ranks("loss", "sum"))

        def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            values.append(run_values.results)

    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, own)
    torch.nn.init.constant_(model.bias, own)
    run = f"{folder}/{own}"
    hooks = [Sees(), CheckpointSaverHook(run, save_steps=100), StopAtStepHook(3 + 4 * own)]
    ranks = Ranks(tick_secs=0.01, group=groups[own])
    with MonitoredLoop(lambda: float(rank), model, hooks=hooks, checkpoint_dir=run, ranks=ranks) as loop:
        while not loop.should_stop():
            loop.run()
    session = loop.session.ranks
    place = session.rank, session.size, session.is_chief
    return place, loop.global_step, values[-1], session.gather(rank), refused.partition(".")[0]


def test_the_ranks_of_a_group_know_no_others(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, 4, in_groups, str(tmp_path))
    refused = "group: this process is not in it"
    assert [each.value for each in ended] == [
        ((0, 2, True), 3, 2.0, [0, 2], refused),
        ((0, 2, True), 7, 4.0, [1, 3], refused),
        ((1, 2, False), 3, 2.0, [0, 2], refused),
        ((1, 2, False), 7, 4.0, [1, 3], refused),
    ], ended
    newest = [latest_checkpoint(tmp_path / str(own)) for own in (0, 1)]
    assert [each and os.path.basename(each) for each in newest] == ["model.ckpt-3", "model.ckpt-7"]
    weights = [torch.load(f"{path}/state.pt", weights_only=True)["model"]["weight"].item() for path in newest]
    assert weights == [0, 1]


def group_destroyed(rank: int) -> int:
    with MonitoredLoop(_Step(), ranks=Ranks(**QUICK)) as loop:
        for _ in loop.until_stop(range(5)):
            loop.run()
        torch.distributed.destroy_process_group()
        steps: list[int] = loop.session.ranks.gather(loop.global_step)
    return sum(steps)


def test_a_group_that_is_destroyed_before_the_loop_closes_is_no_error(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, 2, group_destroyed)
    assert [each[:2] for each in ended] == [(0, 10)] * 2, ended


def forked_workers(rank: int) -> int:
    data: Any = list(range(12))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    with MonitoredLoop(_Step(), ranks=Ranks(**QUICK)) as loop:
        for _epoch in loop.until_stop(range(2)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
        pid = os.fork()
        if not pid:
            atexit._run_exitfuncs()  # noqa: SLF001 - as a forked worker does at its end, without the thread
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    return loop.global_step


@pytest.mark.filterwarnings("ignore:This process")
def test_forked_workers_neither_hang_nor_abort(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, 2, forked_workers)
    assert [each[:2] for each in ended] == [(0, 12)] * 2, ended


def only_on(rank: int, lonely: int, hold: str) -> str:
    if rank != lonely:
        while not Path(hold).exists():
            time.sleep(0.02)
        return "waited"
    try:
        MonitoredLoop(_Step(), ranks=Ranks(join_secs=1.0))
    except LifecycleError as error:
        return str(error)
    finally:
        Path(hold).touch()
    return "created"


@pytest.mark.ranks
@pytest.mark.parametrize("lonely", [0, 1])
def test_a_loop_on_one_rank_only_is_an_error_after_a_bounded_time(tmp_path: Path, lonely: int) -> None:
    ended = run_ranks(tmp_path, 2, only_on, lonely, str(tmp_path / "hold"))
    assert f"rank {lonely} created a MonitoredLoop, but not every one of the 2 ranks did so within 1 s" in (
        ended[lonely].value
    ), ended


def alone(rank: int) -> tuple[int, int, int]:
    with MonitoredLoop(lambda: 1.0, hooks=[StopAtStepHook(2 + rank)], ranks=False) as loop:
        while not loop.should_stop():
            loop.run()
    return loop.global_step, loop.session.ranks.rank, loop.session.ranks.size


def test_ranks_false_makes_loops_of_their_own(tmp_path: Path) -> None:
    assert [each.value for each in run_ranks(tmp_path, 2, alone)] == [(2, 0, 1), (3, 0, 1)]


def main_thread_secs(rank: int, with_ticks: bool) -> float:
    """Return the CPU time of the main thread for many idle runs."""
    with MonitoredLoop(lambda: 1.0, ranks=Ranks(tick_secs=0.01) if with_ticks else False) as loop:
        begin = time.thread_time()
        for _ in range(200_000):
            loop.run()
        spent = time.thread_time() - begin
        torch.distributed.barrier()
    return spent


@pytest.mark.slow
def test_ticks_cost_the_main_thread_next_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    without = min(each.value for each in run_ranks(tmp_path / "a", 2, main_thread_secs, False))
    with_ticks = min(each.value for each in run_ranks(tmp_path / "b", 2, main_thread_secs, True))
    # The limit is far above the cost, because the machine may be doing something else in one of the two.
    assert with_ticks < 3 * without


def attempt(rank: int, port: int, dies: bool) -> int:
    """Train with the store of ``port`` as the one that the ranks share."""
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    torch.distributed.distributed_c10d._get_default_store = lambda: store  # noqa: SLF001 - torch's
    with MonitoredLoop(_Step(), hooks=[StopAtStepHook(5)], ranks=Ranks(**QUICK)) as loop:
        while not loop.should_stop():
            loop.run()
            if dies and rank == 1 and loop.global_step == 3:
                os._exit(1)
    return loop.global_step


@pytest.mark.ranks
def test_a_restart_works_with_a_store_that_keeps_its_keys(tmp_path: Path) -> None:
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for number, dies in enumerate([True, False]):
        folder = tmp_path / str(number)
        folder.mkdir()
        ended = run_ranks(folder, 2, attempt, store.port, dies)
        keys = store.num_keys()
    assert keys > 0
    assert [each[:2] for each in ended] == [(0, 5)] * 2, ended
