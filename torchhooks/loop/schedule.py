"""Which hooks take part in which run: each hook's place in the loop, and when it is next due."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Container, Iterable
from operator import attrgetter
from typing import Any

from torchhooks.common.errors import add_note
from torchhooks.common.requester import Requester
from torchhooks.common.text import shown
from torchhooks.common.timers import Due
from torchhooks.fetches.accumulated import AccumulatedValues
from torchhooks.fetches.step import Step
from torchhooks.lifecycle.hook import SessionRunHook, WritingHook, overrides
from torchhooks.position.progress import Progress
from torchhooks.ranks.ranks import Ranks

NEVER_STEP = sys.maxsize
"""A global step, or a number of runs, that is never reached."""

_FAST_INT = 2**30 - 1
"""The greatest integer that CPython compares in its fast path. A look ends there, so that idle runs compare fast; a run
after that many steps costs one call more."""


class Seat(Requester):
    """One hook's place in a loop, and when the hook is next due."""

    hook: SessionRunHook

    def __init__(self, index: int, hook: SessionRunHook) -> None:
        super().__init__(hook)
        self.index = index
        self.progress = Progress()
        """How far the loop is in its current session."""
        # Bound methods, looked up once instead of in every run.
        self.before_run = hook.before_run
        self.after_run = hook.after_run
        self.end = hook.end
        self.schedules = overrides(hook, "next_due")
        """Whether the hook says when it is due."""
        self.plain_request: object = None
        """The last request that was found to fetch values and nothing else: no feed, trace or watched submodule."""
        self.seen = 0
        """The number of the last run that the hook knows of, because it took part or was told that it was skipped."""
        self.due_step = 0
        self.due_run = 0
        self.due_moment = math.inf
        self.when: Callable[[Any], object] | None = None
        self.measured: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None

    def measure(self, measured: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Wrap every method that the loop calls in runs in ``measured(method)``, for profiling."""
        self.before_run, self.after_run = measured(self.before_run), measured(self.after_run)
        self.end = measured(self.end)
        self.measured = measured  # next_due() returns another Due.when each time, to be wrapped when it does

    def catch_up(self, runs: int) -> None:
        """Tell the hook how many runs it missed, up to the run number ``runs``."""
        missed, self.seen = runs - self.seen, runs
        if missed and self.schedules:
            self.hook.sat_out(missed)

    def ask(self, runs: int) -> None:
        """Ask the hook when it is next due, after ``runs`` runs."""
        try:
            due = self.hook.next_due()
        except BaseException as error:
            add_note(error, f"torchhooks: in next_due of {self}")
            raise
        if due is None:
            due = Due(step=-1)
        elif not isinstance(due, Due):
            raise TypeError(f"next_due of {self} returned {shown(due)}: return a Due, such as Due(step=100), or None")
        self.due_step = NEVER_STEP if due.step is None else due.step
        self.due_run = NEVER_STEP if due.runs is None else runs + due.runs
        self.due_moment = math.inf if due.moment is None else due.moment
        self.when = due.when if due.when is None or self.measured is None else self.measured(due.when)

    def why_alone(self) -> str | None:
        if self.when is not None:
            return (
                "the hook is due by what the step of each rank returned (Due.when): let next_due() return a step or "
                "None"
            )
        if self.due_moment != math.inf:
            return "the hook is due by the clock of each rank: set collective = True in its class"
        return None

    def __str__(self) -> str:
        try:
            name = repr(self.hook)
        except Exception:  # a broken __repr__ must not hide the error that names the hook
            name = f"a {type(self.hook).__name__}"
        return f"{name} (hook {self.index})"


class CollectiveSeat(Seat):
    """The place of a hook that all ranks have to call in the same run, so that the chief's clock decides for all."""

    chief_moment = math.inf
    """When the hook is due by the clock. Ranks other than the chief ignore it."""

    def ask(self, runs: int) -> None:
        """Ask the hook when it is next due, and keep the moment apart, where no run looks at it."""
        super().ask(runs)
        self.chief_moment, self.due_moment = self.due_moment, math.inf


class Look:
    """One point of a run at which hooks are chosen: before the step, or after it.

    Hooks without ``next_due`` are ``always`` chosen. Of the others, the earliest due step, run and moment are kept, so
    that one comparison each shows that no other hook is due.
    """

    __slots__ = ("always", "moment", "run", "scheduled", "step")

    def __init__(self, seats: Iterable[Seat]) -> None:
        seats = tuple(seats)
        self.always = [seat for seat in seats if not seat.schedules]
        self.scheduled = [seat for seat in seats if seat.schedules]

    def update(self) -> None:
        """Find the earliest due step, run and moment, after one of them changed."""
        step = run = _FAST_INT
        moment = math.inf
        for seat in self.scheduled:  # one loop instead of three min(): this runs after every run with hooks
            if seat.due_step < step:
                step = seat.due_step
            if seat.due_run < run:
                run = seat.due_run
            if seat.due_moment < moment:
                moment = seat.due_moment
        self.step, self.run = step, run
        self.moment = None if moment == math.inf else moment

    def due(self, step: int, run: int) -> list[Seat]:
        """Return the hooks that take part in run number ``run``, which ends at ``step``, in order; a new list."""
        now = -math.inf if self.moment is None else time.monotonic()
        due = [s for s in self.scheduled if step >= s.due_step or run >= s.due_run or now >= s.due_moment]
        return in_order([*self.always, *due])


_by_index = attrgetter("index")


def in_order(seats: Iterable[Seat]) -> list[Seat]:
    """Return ``seats`` in the order of the hooks."""
    return sorted(seats, key=_by_index)


class Schedule:
    """The hooks of one loop that take part in runs, and the earliest point at which one of them is due.

    A run is idle, so that the loop calls no hook, if it begins below the global step :attr:`idle_step`, after fewer
    than :attr:`idle_runs` runs, before :attr:`moment`, and its step ends before :attr:`moment_after` and interests none
    of the :attr:`watchers`. The loop compares these in every run, so each is a plain attribute.

    """

    def __init__(self, hooks: Iterable[SessionRunHook], ranks: Ranks) -> None:
        def seat(index: int, hook: SessionRunHook) -> Seat:
            if isinstance(hook, WritingHook):
                hook.join(ranks)
            return (CollectiveSeat if ranks.size > 1 and hook.collective else Seat)(index, hook)

        self.all_seats = [seat(index, hook) for index, hook in enumerate(hooks)]
        self.collective = [seat for seat in self.all_seats if isinstance(seat, CollectiveSeat)]
        """The hooks that all ranks call in the same run, if there are several ranks."""
        before = [seat for seat in self.all_seats if overrides(seat.hook, "before_run")]
        after = [seat for seat in self.all_seats if seat not in before and overrides(seat.hook, "after_run")]
        self.before = Look(before)
        self.after = Look(after)
        self.seats = in_order([*before, *after])
        """The hooks with a run method. The others cost nothing."""
        self.runs = 0
        """How many runs reached their ``after_run``."""
        self.accumulated = AccumulatedValues()
        """What is accumulated for the hooks in every run."""
        self.news = False
        """Whether the end of the run has something to handle: the only thing that an idle run checks."""
        self._update()

    def wake(self) -> None:
        """Have the end of the run handled. Safe to call from a signal handler or another thread."""
        self.news = True

    def interrupt(self) -> None:
        """Have the next run, or the end of the one in progress, handled like one with hooks. Any thread may call it."""
        self.idle_step = self.idle_runs = -1
        self.news = True

    def trigger(self, seat: Seat) -> None:
        """Have the hook in ``seat`` called in the next run, whatever it said when it was asked."""
        seat.due_run = self.runs + 1
        seat.hook.trigger()
        self._update()

    def _update(self) -> None:
        """Find the earliest step, run and moment at which a hook is due, at either look."""
        before, after = self.before, self.after
        before.update()
        after.update()
        if after.always:
            after.step = -1  # a hook is due after every step
        self.idle_step = -1 if before.always else min(before.step, after.step) - 1
        self.idle_runs = min(before.run, after.run) - 1
        self.moment, self.moment_after = before.moment, after.moment
        self.watchers = [seat for seat in self.seats if seat.when is not None]
        self.accumulates = bool(self.accumulated.sources)
        """Whether values are added to :attr:`accumulated` in every run."""
        self.looks_after = bool(self.watchers) or after.moment is not None or self.accumulates
        """Whether there is more to check after the step than the global step."""

    def begin_session(self, session: object, progress: Progress, step: Step) -> None:
        """Forget what was accumulated, and follow ``progress`` from now on."""
        for seat in self.all_seats:
            seat.progress = progress
        self.accumulated.begin_session(session, progress, step)

    def start(self) -> None:
        """Ask every hook when it is due: a session was created."""
        for seat in self.seats:
            seat.catch_up(self.runs)
        self.accumulated.find_in(self.all_seats)
        self.ask(self.seats)

    def ask(self, seats: Iterable[Seat]) -> None:
        """Ask the hooks in ``seats`` that schedule themselves when they are next due."""
        for seat in seats:
            if seat.schedules:
                seat.ask(self.runs)
        self._update()

    def noticed_by(self, outputs: Any, seats: Container[Seat] = ()) -> list[Seat]:
        """Return the hooks, other than ``seats``, whose ``Due.when`` is true of what the step returned."""
        found = []
        for seat in self.watchers:
            try:
                when = seat.when
                if seat not in seats and when(outputs):  # type: ignore[misc]  # a watcher has one
                    found.append(seat)
            except BaseException as error:
                add_note(error, f"torchhooks: in Due.when of {seat}")
                raise
        return found

    def insert_due(self, seats: list[Seat], current: Seat, look: Look, step: int, run: int) -> None:
        """Insert into ``seats``, after ``current``, the hooks that became due because it set the global step."""
        rest = [s for s in look.due(step, run) if s.index > current.index and s not in seats]
        place = seats.index(current) + 1
        seats[place:] = in_order([*seats[place:], *rest])

    def fail_at(self, seat: object) -> None:
        """Note that the ``after_run`` of ``seat`` raised: the hooks before it know of the run, the others do not."""
        reached = False
        for other in self.seats:
            reached = reached or other is seat
            other.seen += reached
