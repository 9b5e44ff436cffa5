"""How several ranks agree on the run after which they stop: the rules, without threads and without communication.

Every rank sends one :class:`Row` in each tick and receives the rows of all ranks, its own included. An
:class:`Agreement` derives from these tables alone what happens, so all ranks come to the same result:

1. A rank asks: for a stop, or for a collective hook that is due. The next tick tells all ranks.
2. Each rank promises the number of the run in progress, and holds at the end of that run.
3. The largest promise is the last run of the round. Every rank continues to it and then does what was asked.

Between two runs, a rank arrives at *meetings*: where it begins a loop over data, asks for the next item of a loop that
has inner ones, comes to the end of its data, and leaves the loop. A meeting is over once all ranks have arrived at it
after the same number of runs. A rank at a meeting promises the next run, so that no rank stops before the meeting while
others stop at it: they would save different positions in the data. If a stop was asked for or decided before the
meeting is over, all ranks stop there.

What follows if two ranks are at different places after the same number of runs. ``ENTER`` counts as the same place only
in loops of the same depth. A *gathering* is a call of ``Ranks.gather`` between two runs, as in a save that is due:

=============  =========  =========  ==============  ==============  =========  ===========
one / another  ``ENTER``  ``ITEM``   ``END``         ``CLOSE``       gathering  a later run
=============  =========  =========  ==============  ==============  =========  ===========
``ENTER``      all go on  an error   an error        parting         an error   an error
``ITEM``       an error   all go on  an error        parting         an error   an error
``END``        an error   an error   all go on       ``END`` passes  an error   an error
``CLOSE``      parting    parting    ``END`` passes  all end         joins      an error
=============  =========  =========  ==============  ==============  =========  ===========

* *An error*: a ``Conflict``, which is a PeerError on all ranks and says where the two are. The rank in a gathering
  raises a LifecycleError itself.
* *Parting*: the script has left its loops on one rank, and goes on on another one. If a stop was asked for, all ranks
  stop here. Otherwise all of them save here, where they are together for the last time, and then raise a PeerError.
* ``END`` *passes*: the data are over for both. The rank at ``END`` continues, to ``CLOSE`` or to one of the others.
* *Joins*: if a save is due on the rank that leaves, too, it makes that save with the other one, and comes back to
  ``CLOSE``. If none is, this is an error. It joins the calls for the end of an epoch in the same way, in which an
  evaluation may need all ranks: they are due on a rank that has left an epoch by ``break`` where the data of another
  one end.

A rank that has left its outermost loop by ``break`` says so at once, because it may never arrive at ``CLOSE``: what the
script calls next may need the other ranks. If another rank makes a later run in that loop, this is an error. ``END``
passes as if the first one were at ``CLOSE``, also if it has come to ``ENTER`` of another loop. If another rank waits
for it, at ``ITEM``, at ``ENTER`` inside of that loop, in a gathering, or where hooks are called at the end of an epoch,
it has fifty ticks to arrive. Then it is an error. So it is if a rank calls its hooks for the end of an epoch in which
another one gathers, or makes a later run.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from typing import NamedTuple

LIVE, LEFT, FAILED, RUN_FAILED, FAILED_LATER = range(5)
"""What a rank is: in its loop, out of it after a clean end, failed, or failed in a call that needed another rank.

``RUN_FAILED`` says that a run failed on the rank, whose script may catch the error. If it failed on all ranks, they go
on.
"""

STOP = 1
"""The bit that asks for a stop. The higher bits ask for collective hooks."""

ENTER, ITEM, END, CLOSE = range(1, 5)
"""Where a meeting is.

At the start of ``until_stop``, where it asks for the next item of a loop that has inner ones, at the end of its data,
or where the loop closes.
"""

GATHERING, EPOCH = 5, 6
"""Where a rank is that has a Conflict at no meeting: in a gathering, or in the calls for the end of an epoch."""

HAS_CALLS, HAS_EPOCH, BY_STOP_ITERATION = 1, 2, 4
"""The bits of ``detail`` at CLOSE.

A save is due on the rank; the hooks were not called yet for the end of its epoch; it leaves because a run raised
``StopIteration``.
"""

OUTSIDE, IN_LOOPS, GONE = range(3)
"""What the script does on a rank.

It is outside of every ``until_stop``; it is in one; or it has left the outermost one by ``break`` or ``return``, and
has not come to the end of the block since, nor has another loop begun.
"""

UNKNOWN_LENGTH = -1

WHERE = {
    ENTER: "entered until_stop()",
    ITEM: "asked for the next item",
    END: "came to the end of its data",
    CLOSE: "left the loop",
    GATHERING: "gathers values",
    EPOCH: "came to the end of an epoch",
}


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
        detail: at ENTER, the depth of the loop, which is 1 outside of all others. At CLOSE, HAS_CALLS, HAS_EPOCH and
            BY_STOP_ITERATION.
        states: how many times the ranks have told each other where they are; one more if this rank asks for it.
        counted: if a run failed, how many runs count. Otherwise 0.
        gatherings: in how many gatherings the training thread has taken part, with the one in progress.
        epochs: at the ends of how many epochs the hooks were called, with the one in progress.
        loops: OUTSIDE, IN_LOOPS or GONE.
    """

    status: int = LIVE
    asked: int = 0
    promise: int = 0
    made: int = 0
    begun: int = 0
    meeting: int = 0
    kind: int = 0
    value: int = UNKNOWN_LENGTH
    detail: int = 0
    states: int = 0
    counted: int = 0
    gatherings: int = 0
    epochs: int = 0
    loops: int = OUTSIDE

    @property
    def run(self) -> int:
        """The run that the rank has made last, or is in."""
        return max(self.made, self.begun)


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
        stays: the first rank that goes on, where another one leaves.
        askers: which ranks asked for the stop; ``None`` if no rank did, empty if a Decision has told it before.
        end_passes: whether it is over for the ranks at END alone, because the others have left that loop.
    """

    least: int = UNKNOWN_LENGTH
    all_known: bool = False
    leaver: int | None = None
    stop: bool = False
    stays: int | None = None
    askers: tuple[int, ...] | None = None
    end_passes: bool = False

    @property
    def is_parting(self) -> bool:
        """Whether a rank leaves and another one goes on, without a stop."""
        return self.stays is not None and self.askers is None


class Conflict(NamedTuple):
    """``rank`` is at a meeting of this ``kind`` after ``run``, and ``other`` at ``other_run`` will not arrive at it.

    ``other_kind`` is the meeting at which ``other`` is, or 0. ``rank`` may have left its loops, and be at no meeting.
    """

    rank: int
    run: int
    kind: int
    other: int
    other_run: int
    other_kind: int = 0


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

# How many ticks a rank that has left its loops has to come to the end of the block: five seconds by default, in which a
# script prints and plots. If it calls there what needs the other ranks, which wait for it, it never comes.
_LEAVING_TICKS = 50

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
        self._leaving_patience = _LEAVING_TICKS

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
        if any(row[_MADE_AND_BEGUN] > run or row.meeting > self.meetings or row.kind == CLOSE for row in others):
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
        # CLOSE is the last meeting of a rank, whatever number the others have come to. One that joins the calls of
        # another rank comes back to it: its thread may be in them already.
        waiting = {
            rank: row
            for rank, row in enumerate(table)
            if (not joined_calls(row, table) if row.kind == CLOSE else row.meeting > self.meetings)
        }
        missed = self._settle_order(table) or self._settle_gone(table, waiting)
        if missed or not waiting:
            return missed
        first = min(waiting, key=lambda rank: (table[rank].made, -table[rank].kind, rank))
        # A rank in a later run is in calls that need the rank that waits here, and will not come back from them.
        for other, row in enumerate(table):
            if row.run > table[first].made:
                if row.run == table[first].made + 1 and table[first].detail & BY_STOP_ITERATION and self._wait_a_tick():
                    return []  # the same StopIteration may end that run, in which the first rank left
                return [self._conflict(table, first, other)]
        if table[first].kind == CLOSE:
            return self._settle_leaving(table, waiting)
        gone = {rank for rank, row in enumerate(table) if row.loops == GONE and row.run == table[first].made}
        at_end = {rank for rank, row in waiting.items() if row.kind == END}
        end_passes = table[first].kind == END and bool(gone) and at_end | gone == {*range(len(table))}
        for other, row in enumerate(table):
            is_elsewhere = other in waiting and _place_of_meeting(row) != _place_of_meeting(table[first])
            # The hooks of the end of an epoch may need the rank that waits here, where no epoch has ended.
            if (is_elsewhere and not end_passes) or (row.epochs > table[first].epochs and row.run == table[first].made):
                return [self._conflict(table, first, other)]
        if end_passes:
            return [self._end_meeting(Meeting(end_passes=True))]
        if len(waiting) < len(table):
            return []
        known = [row.value for row in table if row.value != UNKNOWN_LENGTH]
        askers = self._askers(table)
        lengths = min(known, default=UNKNOWN_LENGTH), len(known) == len(table)
        return [self._end_meeting(Meeting(*lengths, stop=askers is not None, askers=askers))]

    def _settle_order(self, table: Sequence[Row]) -> list[Event]:
        """Settle whether a rank goes on in an epoch, for whose end another one calls its hooks already."""
        if len({row.epochs for row in table}) == 1:  # as most of the time
            return []
        for (rank, row), (other, another) in itertools.permutations(enumerate(table), 2):
            gathers = _gathers_without(another, row) and row.run == another.run
            if row.epochs > another.epochs and (gathers or another.run > row.run):
                return [Conflict(rank, row.run, EPOCH, other, another.run, GATHERING if gathers else 0)]
        return []

    def _settle_gone(self, table: Sequence[Row], waiting: dict[int, Row]) -> list[Event]:
        """Settle whether a rank waits in vain for one that has left its loops, and is not at CLOSE yet."""
        gone = [rank for rank, row in enumerate(table) if row.loops == GONE]
        for rank, other in itertools.product(gone, range(len(table))):
            row = table[other]
            if row.loops == IN_LOOPS and row.run > table[rank].run:
                return [self._conflict(table, rank, other)]
            goes_on = other in waiting and (row.kind == ITEM or (row.kind == ENTER and row.detail > 1))
            waits = goes_on or _gathers_without(row, table[rank]) or row.epochs > table[rank].epochs
            if waits and row.run == table[rank].run:
                self._leaving_patience -= 1
                may_come = rank not in waiting and self._leaving_patience >= 0
                return [] if may_come else [self._conflict(table, rank, other)]
        return []

    def _settle_leaving(self, table: Sequence[Row], waiting: dict[int, Row]) -> list[Event]:
        """Settle a meeting at which a rank leaves the loop. No rank is in a later run."""
        leaver = next(rank for rank, row in waiting.items() if row.kind == CLOSE)
        for other, row in enumerate(table):
            joins = table[leaver].detail
            calls_hooks = row.epochs > table[leaver].epochs and row.run == table[leaver].run and not joins & HAS_EPOCH
            if calls_hooks or (_gathers_without(row, table[leaver]) and not joins & HAS_CALLS):
                return [self._conflict(table, leaver, other)]
        others = {rank: row for rank, row in waiting.items() if row.kind != CLOSE}
        places = {_place_of_meeting(row) for row in others.values()}
        stays = next((rank for rank, row in others.items() if row.kind != END), None)
        if len(waiting) < len(table) or len(places) > 1:
            if stays is None or (len(places) == 1 and self._wait_a_tick()):
                return []
            return [self._conflict(table, leaver, stays)]
        if others and stays is None:
            return [self._end_meeting(Meeting())]
        return [self._end_meeting(Meeting(leaver=leaver, stop=True, stays=stays, askers=self._askers(table)))]

    def _end_meeting(self, meeting: Meeting) -> Meeting:
        self.meetings += 1
        # All ranks are at the same place in their data, and a further run may never follow.
        self.stopped = meeting.stop
        if self.stopped:
            self._phase = _OPEN  # nothing is left to promise
        return meeting

    def _askers(self, table: Sequence[Row]) -> tuple[int, ...] | None:
        """Return which ranks ask for a stop that is not decided; an empty tuple if one is; ``None`` for no stop."""
        if self._phase == _SETTLED and self.bits & STOP:
            return ()
        return tuple(rank for rank, row in enumerate(table) if row.asked & STOP) or None

    def _conflict(self, table: Sequence[Row], rank: int, other: int) -> Conflict:
        one, another = table[rank], table[other]
        other_kind = another.kind if another.meeting > self.meetings else 0
        return Conflict(rank, one.run, CLOSE if one.loops == GONE else one.kind, other, another.run, other_kind)

    def _wait_a_tick(self) -> bool:
        """Return whether there is patience for one more tick."""
        self._patience -= 1
        return self._patience >= 0


def joined_calls(row: Row, table: Sequence[Row]) -> int:
    """Return which of the calls that are due on the rank of ``row``, at CLOSE, another rank makes already."""
    calls = HAS_CALLS * any(another.gatherings > row.gatherings for another in table)
    return row.detail & (calls | HAS_EPOCH * any(another.epochs > row.epochs for another in table))


def _gathers_without(row: Row, another: Row) -> bool:
    """Return whether the rank of ``row`` is in a gathering between two runs, in which ``another`` takes no part."""
    return row.gatherings > another.gatherings and row.made == row.begun


def _place_of_meeting(row: Row) -> tuple[int, int]:
    return row.kind, row.detail if row.kind == ENTER else 0


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
