"""Who takes part in which run: the hooks' places in the loop, and the earliest moment at which one of them is due."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Container, Iterable
from operator import attrgetter
from typing import Any

from torchhooks.errors import add_note
from torchhooks.hook import SessionRunHook
from torchhooks.timer import Due

NEVER_STEP = sys.maxsize
"""A step, or a number of runs, that is never reached."""


class Seat:
    """One hook's place in a loop, and when it is next due."""

    __slots__ = (
        "after_run",
        "before_run",
        "due_moment",
        "due_run",
        "due_step",
        "end",
        "hook",
        "index",
        "plain",
        "schedules",
        "seen",
        "timed",
        "when",
    )

    def __init__(self, index: int, hook: SessionRunHook) -> None:
        self.index = index
        self.hook = hook
        self.before_run = hook.before_run
        self.after_run = hook.after_run
        self.end = hook.end
        self.schedules = _overrides(hook, "next_due")
        self.plain: object = None
        """The request that was last found to ask for values, of which none has to be watched for, and nothing else."""
        self.seen = 0
        """The number of the last run that this hook knows of: it took part, or was told that it sat out."""
        self.due_step = 0
        self.due_run = 0
        self.due_moment = math.inf
        self.when: Callable[[Any], object] | None = None
        self.timed: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
        """What measures ``when``, which is another one each time."""

    def catch_up(self, runs: int) -> None:
        """Tell the hook of the runs that went by without it, if there were any, up to the one numbered ``runs``."""
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
        self.due_step = NEVER_STEP if due.step is None else due.step
        self.due_run = NEVER_STEP if due.runs is None else runs + due.runs
        self.due_moment = math.inf if due.moment is None else due.moment
        self.when = due.when if due.when is None or self.timed is None else self.timed(due.when)

    def __str__(self) -> str:
        try:
            name = repr(self.hook)
        except Exception:  # an object that cannot even be printed must not hide the error that names it
            name = f"a {type(self.hook).__name__}"
        return f"{name} (hook {self.index})"


def _overrides(hook: SessionRunHook, method: str) -> bool:
    return getattr(getattr(hook, method), "__func__", None) is not getattr(SessionRunHook, method)


class Look:
    """One moment of a run at which it is decided who takes part: before the step, or after it.

    Hooks that never say when they are due are ``always`` there. Of the others the earliest dues are kept, so that one
    comparison each tells that nobody else is due.
    """

    __slots__ = ("always", "moment", "run", "scheduled", "step")

    def __init__(self, seats: Iterable[Seat]) -> None:
        seats = tuple(seats)
        self.always = [seat for seat in seats if not seat.schedules]
        self.scheduled = [seat for seat in seats if seat.schedules]

    def reckon(self) -> None:
        """Find the earliest dues again, after one of them changed."""
        step = run = NEVER_STEP
        moment = math.inf
        for seat in self.scheduled:
            if seat.due_step < step:
                step = seat.due_step
            if seat.due_run < run:
                run = seat.due_run
            if seat.due_moment < moment:
                moment = seat.due_moment
        self.step, self.run = step, run
        self.moment = None if moment == math.inf else moment

    def due(self, step: int, run: int) -> list[Seat]:
        """Who takes part in the run numbered ``run``, which ends at ``step``, in the order of the hooks."""
        if self.moment is None:
            if step < self.step and run < self.run:
                return self.always
            now = -math.inf
        else:
            now = time.monotonic()
        late = [s for s in self.scheduled if step >= s.due_step or run >= s.due_run or now >= s.due_moment]
        return in_order(self.always, late)


_by_index = attrgetter("index")


def in_order(some: list[Seat], others: list[Seat]) -> list[Seat]:
    """Both lists together, in the order of the hooks."""
    if not others:
        return some
    return sorted([*some, *others], key=_by_index) if some else others


class Schedule:
    """The hooks of one loop that have something to do in runs.

    Before :attr:`step`, the run numbered :attr:`run` and :attr:`moment` nobody is due, neither before the step of a run
    nor after it.

    Args:
        hooks: all hooks of the loop.
    """

    __slots__ = ("after", "before", "everybody", "looks", "moment", "news", "run", "runs", "seats", "step", "watchers")

    def __init__(self, hooks: Iterable[SessionRunHook]) -> None:
        self.everybody = [Seat(index, hook) for index, hook in enumerate(hooks)]
        early = [seat for seat in self.everybody if _overrides(seat.hook, "before_run")]
        late = [seat for seat in self.everybody if seat not in early and _overrides(seat.hook, "after_run")]
        self.before = Look(early)
        self.after = Look(late)
        self.seats = in_order(early, late)
        """Those with a run method. The others cost nothing."""
        self.runs = 0
        """How many runs got to their ``after_run``."""
        self.news = False
        """Whether there is something to look at when the run is over: the one thing that an idle run looks at."""
        self._reckon()

    def wake(self) -> None:
        """Have the end of the run looked at; a handler of signals may call this."""
        self.news = True

    def _reckon(self) -> None:
        """Find out until when nobody is due at either look: before which step, which run and which moment."""
        before, after = self.before, self.after
        before.reckon()
        after.reckon()
        if after.always:
            after.step = -1  # somebody takes part behind every step
        self.step = -1 if before.always else min(before.step, after.step)
        self.run = min(before.run, after.run)
        self.watchers = [seat for seat in self.seats if seat.when is not None]
        self.looks = bool(self.watchers) or after.moment is not None
        """Whether, behind the step, there is more to look at than the step count."""
        self.moment = min((m for m in (before.moment, after.moment) if m is not None), default=None)

    def start(self) -> None:
        """Ask everybody when they are due: a session was created."""
        for seat in self.seats:
            seat.catch_up(self.runs)
        self.ask(self.seats)

    def ask(self, seats: Iterable[Seat]) -> None:
        """Ask those of ``seats`` who have a say when they are next due."""
        for seat in seats:
            if seat.schedules:
                seat.ask(self.runs)
        self._reckon()

    def finds_somebody(self, outputs: Any) -> bool:
        """Whether behind the step somebody is due whom the step count does not call."""
        if self.after.moment is not None and time.monotonic() >= self.after.moment:
            return True
        return bool(self.watchers and self.noticed_by(outputs))

    def noticed_by(self, outputs: Any, seats: Container[Seat] = ()) -> list[Seat]:
        """Who, beside ``seats``, takes part in a run because of what its step returned."""
        found = []
        for seat in self.watchers:
            try:
                when = seat.when
                if seat not in seats and when(outputs):  # type: ignore[misc]  # all of these have one
                    found.append(seat)
            except BaseException as error:
                add_note(error, f"torchhooks: in Due.when of {seat}")
                raise
        return found

    def behind(self, seat: Seat, pending: list[Seat], look: Look, step: int, run: int) -> list[Seat]:
        """Who is still to be called after ``seat``: the rest of ``pending`` and who has become due with ``step``."""
        rest = [other for other in pending if other.index > seat.index]
        return in_order(rest, [s for s in look.due(step, run) if s.index > seat.index and s not in rest])

    def fail_at(self, seat: object) -> None:
        """Note that the run whose ``after_run`` has just begun was left in that of ``seat``.

        Those in front of it have seen the run, or sat it out; the others do not count it.
        """
        reached = False
        for other in self.seats:
            reached = reached or other is seat
            other.seen += reached
