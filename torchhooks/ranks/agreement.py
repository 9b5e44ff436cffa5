"""How several ranks agree on the run after which they stop: the rules, without threads and without communication.

Every rank sends one :class:`Row` in each tick and receives the rows of all ranks, its own included. An
:class:`Agreement` derives from these tables alone what happens, so all ranks come to the same result:

1. A rank asks: for a stop, or for a collective hook that is due. The next tick tells all ranks.
2. Each rank promises the number of the run in progress, and holds at the end of that run.
3. The largest promise is the last run of the round. Every rank continues to it and then does what was asked.

Where a rank's data begin or end, and where it leaves the loop, it arrives at a *meeting* between two runs. A meeting is
over once all ranks have arrived at it after the same number of runs. If one of them is in a later run, it will never
arrive, and that is an error on all of them. A rank at a meeting promises the next run, so that no rank stops before the
meeting while others stop at it: they would save different positions in the data. A stop that is decided before the
meeting is over takes effect there.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

LIVE, LEFT, FAILED, RUN_FAILED, FAILED_LATER = range(5)
"""What a rank is: in its loop, out of it after a clean end, failed, or failed in a call that needed another rank.

``RUN_FAILED`` says that a run failed on the rank, whose script may catch the error. If it failed on all ranks, they go
on.
"""

STOP = 1
"""The bit that asks for a stop. The higher bits ask for collective hooks."""

ENTER, END, CLOSE = range(1, 4)
"""Where a meeting is: at the start of ``until_stop``, at the end of its data, or where the loop closes."""

UNKNOWN_LENGTH = -1

WHERE = {ENTER: "entered until_stop()", END: "came to the end of its data", CLOSE: "left the loop"}


class Row(NamedTuple):
    """What one rank says in one tick.

    Args:
        status: one of LIVE, LEFT, FAILED, RUN_FAILED and FAILED_LATER.
        asked: the bits that the rank asks for.
        promise: the number of the run after which the rank holds; only read in the tick after one with new bits.
        made: how many runs the rank has made.
        begun: the number of the last run that the rank has certainly begun.
        meeting: at how many meetings the rank has arrived.
        kind: the kind of the last of them.
        value: at ENTER, the number of items, or UNKNOWN_LENGTH.
        states: how many times the ranks have told each other where they are; one more if this rank asks for it.
        counted: if a run failed, how many runs count. Otherwise 0.
    """

    status: int = LIVE
    asked: int = 0
    promise: int = 0
    made: int = 0
    begun: int = 0
    meeting: int = 0
    kind: int = 0
    value: int = UNKNOWN_LENGTH
    states: int = 0
    counted: int = 0


class CallForPromises(NamedTuple):
    """A rank asked for something, so all ranks have to promise in the next tick."""


class Decision(NamedTuple):
    """What was asked for in ``bits`` happens after run number ``last``, on all ranks. ``askers`` asked for a stop."""

    last: int
    bits: int
    askers: tuple[int, ...]


class Meeting(NamedTuple):
    """All ranks arrived at the meeting.

    Args:
        least: at ENTER, the smallest number of items on a rank; UNKNOWN_LENGTH if no rank knows its number.
        all_known: whether every rank knows its number of items.
        leaver: the first rank that leaves the loop, if there is one.
        stop: whether the loop ends here, on all ranks.
    """

    least: int
    all_known: bool
    leaver: int | None
    stop: bool


class Conflict(NamedTuple):
    """``rank`` is at a meeting of this ``kind`` after ``run``, and ``other`` at ``other_run`` will not arrive at it."""

    rank: int
    run: int
    kind: int
    other: int
    other_run: int


class Failure(NamedTuple):
    """``rank`` failed in run number ``run``, or else after it. ``ranks`` are all that failed."""

    rank: int
    run: int
    ranks: tuple[int, ...]
    in_run: bool = True


class RunFailed(NamedTuple):
    """The same run failed on all ranks. Each may go on, if its script catches the error."""


class AllLeft(NamedTuple):
    """All ranks have left their loops."""


Event = CallForPromises | Decision | Meeting | Conflict | Failure | RunFailed | AllLeft


def _place_of_failure(row: Row) -> tuple[int, ...]:
    """Return what is equal on all ranks if the same run failed on them."""
    return row.status, row.made, row.begun, row.counted


_OPEN, _PROMISING, _SETTLED = range(3)

# How many ticks to wait for the row that explains another one. That is a second with the default tick_secs: long enough
# for the rank that failed first to say so, and short against lost_after_secs, if it cannot.
_PATIENCE_TICKS = 10

# How many ticks a rank whose run failed waits for one that has not begun that run: half a minute by default.
_LONG_PATIENCE_TICKS = 300

_MADE_AND_BEGUN = slice(Row._fields.index("made"), Row._fields.index("begun") + 1)


class Agreement:
    """What the tables of all ticks add up to. Equal on all ranks after each tick."""

    def __init__(self) -> None:
        self.last = 0
        """The last run of the round that was decided last."""
        self.bits = 0
        """What happens after it."""
        self.meetings = 0
        """How many meetings are over."""
        self.stopped = False
        """Whether every rank has made the last run."""
        self._phase = _OPEN
        self._patience, self._long_patience = _PATIENCE_TICKS, _LONG_PATIENCE_TICKS

    @property
    def promising(self) -> bool:
        """Whether the next row has to contain a promise."""
        return self._phase == _PROMISING

    def settle(self, table: Sequence[Row]) -> list[Event]:
        """Take in the rows of one tick, in the order of the ranks, and return what follows from them."""
        failed = tuple(rank for rank, row in enumerate(table) if row.status >= FAILED)
        if failed:
            first = min(failed, key=lambda rank: (table[rank].status, rank))
            if table[first].status == FAILED_LATER and len(failed) < len(table) and self._patience:
                self._patience -= 1  # the rank that failed first will say so, or contact with it will be lost
                return []
            if table[first].status == RUN_FAILED and len({_place_of_failure(row) for row in table}) == 1:
                self._patience, self._long_patience = _PATIENCE_TICKS, _LONG_PATIENCE_TICKS
                return [RunFailed()]
            if table[first].status == RUN_FAILED and self._may_all_fail(table, failed):
                return self._settle_round(table)  # which may be what holds the other ranks
            return [Failure(first, table[first].begun, failed, table[first].made < table[first].begun)]
        if all(row.status == LEFT for row in table):
            return [AllLeft()]
        if self.stopped:
            return []
        events = self._settle_round(table)
        return events if self.stopped else events + self._settle_meeting(table)

    def _may_all_fail(self, table: Sequence[Row], failed: Sequence[int]) -> bool:
        """Return whether the ranks that have not failed may still fail where the others did, and wait a tick for that.

        A rank that is in the same run fails soon, or not at all. One that has not begun it may still load its data.
        """
        run = table[failed[0]][_MADE_AND_BEGUN]
        others = [row for row in table if row.status != RUN_FAILED]
        if len({_place_of_failure(table[rank]) for rank in failed}) > 1 or any(row.status != LIVE for row in others):
            return False
        if any(row[_MADE_AND_BEGUN] > run or row.meeting > self.meetings for row in others):
            return False
        if any(row[_MADE_AND_BEGUN] == run for row in others):
            self._patience -= 1
        self._long_patience -= 1
        return self._patience >= 0 and self._long_patience >= 0

    def _settle_round(self, table: Sequence[Row]) -> list[Event]:
        events: list[Event] = []
        if self._phase == _PROMISING:
            self._phase = _SETTLED
            self.last, self.bits = max(row.promise for row in table), 0
            for row in table:
                self.bits |= row.asked
            askers = tuple(rank for rank, row in enumerate(table) if row.asked & STOP)
            return [Decision(self.last, self.bits, askers)]
        # Judged from one table, so that no rank begins a round while another is still on its way to the last run.
        if self._phase == _SETTLED and all(row.made >= self.last for row in table):
            self._phase = _OPEN
            self.stopped = bool(self.bits & STOP)
        if self._phase == _OPEN and not self.stopped and any(row.asked for row in table):
            self._phase = _PROMISING
            events.append(CallForPromises())
        return events

    def _settle_meeting(self, table: Sequence[Row]) -> list[Event]:
        waiting = [rank for rank, row in enumerate(table) if row.meeting > self.meetings]
        if not waiting:
            return []
        first = min(waiting, key=lambda rank: (table[rank].made, -table[rank].kind, rank))
        run, kind = table[first].made, table[first].kind
        # A rank in a later run is in calls that need the rank that waits here, and will not come back from them.
        for rank, row in enumerate(table):
            at = max(row.made, row.begun)
            if at == run + 1 and kind == CLOSE and self._patience:
                self._patience -= 1  # the same StopIteration may end that run, in which the first rank left
                return []
            if at > run:
                return [Conflict(first, run, kind, rank, at)]
        if len(waiting) < len(table):
            return []
        kinds = {row.kind for row in table}
        if kinds == {ENTER, END}:
            other = next(rank for rank, row in enumerate(table) if row.kind != kind)
            return [Conflict(first, run, kind, other, run)]
        self.meetings += 1
        leaver = next((rank for rank, row in enumerate(table) if row.kind == CLOSE), None)
        asked = self._phase == _SETTLED and bool(self.bits & STOP)
        # All ranks are at the same place in their data, and a further run may never follow.
        self.stopped = leaver is not None or asked
        if self.stopped:
            self._phase = _OPEN  # nothing is left to promise
        known = [row.value for row in table if row.value != UNKNOWN_LENGTH]
        return [Meeting(min(known, default=UNKNOWN_LENGTH), len(known) == len(table), leaver, self.stopped)]


# -- what one rank knows of a round ------------------------------------------------------------------------------------


class RoundPhase(enum.IntEnum):
    """How far a round is. A rank that has not asked itself skips ``ASKED``."""

    OPEN = 0
    """This rank knows of no rank that asks."""
    ASKED = 1
    """This rank asks. Its next tick tells the others. If it asked in a run, it holds at the end of that run."""
    PROMISED = 2
    """All ranks know that one of them asks. Each promises the run in progress, and holds at the end of it."""
    DECIDED = 3
    """The largest promise is the last run of the round. Every rank continues to it."""
    APPLIED = 4
    """The training thread has reached the end of the last run: it stops, or has the hooks called in the next run."""


class Round:
    """What this rank knows of one round. Its phase only grows.

    A stop and a collective hook that is due take the same way. A request that comes too late for a round that is being
    decided is taken over into the next one. After a stop there is no next round.
    """

    def __init__(self) -> None:
        self.phase = RoundPhase.OPEN
        self.bits = 0
        """What this rank asks for; from ``DECIDED`` on, what any rank asked for."""
        self.why = ""
        """Why this rank asks for a stop; from ``DECIDED`` on, why the first rank did, and which ranks did."""
        self.asked_in: int | None = None
        """The run in which the training thread asked for a stop, until it is decided whether that is the last run."""
        self.last = 0
        """From ``DECIDED`` on, the last run."""

    @property
    def stops(self) -> bool:
        """Whether all ranks stop after the last run of this round."""
        return self.phase >= RoundPhase.DECIDED and bool(self.bits & STOP)

    def ask(self, bits: int, why: str = "") -> None:
        """Ask for ``bits``; ``why`` is the reason of a stop. Only the first reason counts."""
        if self.phase < RoundPhase.DECIDED and bits:
            if bits & STOP and not self.bits & STOP:
                self.why = why
            self.bits |= bits
            self.phase = max(self.phase, RoundPhase.ASKED)

    def promise(self) -> None:
        """All ranks promise in the next tick."""
        self.phase = RoundPhase.PROMISED

    def decide(self, event: Decision, why: str) -> Round:
        """Take in what all ranks decided, and return the next round."""
        late = Round()
        late.ask(self.bits & ~event.bits, self.why)
        # Holding at the end of an earlier run than the other ranks would make them wait forever.
        if self.asked_in is not None and self.asked_in >= event.last and not event.bits & STOP:
            late.asked_in = self.asked_in
        self.phase, self.bits, self.why, self.last = RoundPhase.DECIDED, event.bits, why, event.last
        self.asked_in = None
        return late

    def apply(self, why: str = "") -> None:
        """The training thread is at the end of the last run. ``why`` is the reason of a stop that no rank asked for."""
        if why:
            self.bits, self.why = STOP, why
        self.phase = RoundPhase.APPLIED
