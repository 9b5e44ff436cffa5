"""Which hooks take part in which run: each hook's place in the loop, and when it is next due."""

from __future__ import annotations

import gc
import math
import sys
import time
import weakref
from collections.abc import Callable, Collection, Container, Iterable
from operator import attrgetter
from typing import Any

from torchhooks.common.errors import add_note
from torchhooks.common.requester import Requester
from torchhooks.common.text import shown
from torchhooks.common.timers import Due, signals_of
from torchhooks.fetches.accumulated import AccumulatedValues
from torchhooks.fetches.step import Step
from torchhooks.lifecycle.ending import Ending, State
from torchhooks.lifecycle.hook import SessionRunHook, WritingHook, overrides
from torchhooks.lifecycle.requests import Requests
from torchhooks.position.progress import Progress
from torchhooks.ranks.ranks import Ranks

NEVER_STEP = sys.maxsize
"""A global step, or a number of runs, that is never reached."""

_FAST_INT = 2**30 - 1
"""The greatest integer that CPython compares in its fast path. A queue ends there, so that idle runs compare fast. A
run after that many steps costs one call more."""


class ScheduledHook(Requester):
    """One hook in the order of a loop, and when it is next due."""

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
        self.says_when = overrides(hook, "next_due")
        """Whether the hook says when it is due."""
        self.plain_request: object = None
        """The last request that was found to fetch values and nothing else: no feed, trace or watched submodule."""
        self.seen = 0
        """The number of the last run that the hook knows of, because it took part or was told that it was skipped."""
        self.due_step = 0
        self.due_run = 0
        self.due_moment = math.inf
        self.due_epochs: int | None = None
        self.requests = set(signals_of(hook))
        """The signals that the hook waits for, or has waited for."""
        self.is_asked = False
        """Whether one of them has arrived, and the hook was not called for it yet."""
        self.when: Callable[[Any], object] | None = None

    def catch_up(self, runs: int) -> None:
        """Tell the hook how many runs it missed, up to the run number ``runs``."""
        missed, self.seen = runs - self.seen, runs
        if missed and self.says_when:
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
        self.due_epochs = due.epochs
        if due.signal is not None:
            self.requests.add(due.signal)
        self.when = due.when

    def why_alone(self) -> str | None:
        if self.when is not None:
            return (
                "the hook is due by what the step of each rank returned (Due.when): let next_due() return a step or "
                "None"
            )
        if self.due_moment != math.inf:
            return "the hook is due by the clock of each rank: set collective = True in its class"
        if self.requests:
            return "the hook is due by a signal that one rank gets: set collective = True in its class"
        return None

    def __str__(self) -> str:
        try:
            name = repr(self.hook)
        except Exception:  # a broken __repr__ must not hide the error that names the hook
            name = f"a {type(self.hook).__name__}"
        return f"{name} (hook {self.index})"


class CollectiveHook(ScheduledHook):
    """The place of a hook that all ranks have to call in the same run, so that the chief's clock decides for all."""

    chief_moment = math.inf
    """When the hook is due by the clock. Ranks other than the chief ignore it."""

    def ask(self, runs: int) -> None:
        """Ask the hook when it is next due, and keep the moment apart, where no run looks at it."""
        super().ask(runs)
        self.chief_moment, self.due_moment = self.due_moment, math.inf


_OPEN: weakref.WeakValueDictionary[int, Ending] = weakref.WeakValueDictionary()
"""By the ``id`` of a hook, the ending of the loop that was given it last."""


def claim_hooks(hooks: Iterable[SessionRunHook], ending: Ending) -> None:
    """Raise a ValueError if another open loop has one of ``hooks``, whose state belongs to one loop."""
    for hook in hooks:
        if _is_in_open_loop(hook):
            gc.collect()  # the other loop may have been dropped without being closed
        if _is_in_open_loop(hook):
            raise ValueError(
                f"{hook!r} is in another loop, which is still open: close that loop, or make another hook for this one"
            )
        _OPEN[id(hook)] = ending


def _is_in_open_loop(hook: SessionRunHook) -> bool:
    other = _OPEN.get(id(hook))
    return other is not None and other.state is not State.CLOSED and other.failure is None


class HookQueue:
    """One point of a run at which hooks are chosen: before the step, or after it.

    Hooks without ``next_due`` are ``always`` chosen. Of the others, the earliest due step, run and moment are kept, so
    that one comparison each shows that no other hook is due.
    """

    __slots__ = ("always", "moment", "run", "step", "waiting")

    def __init__(self, participants: Iterable[ScheduledHook]) -> None:
        participants = tuple(participants)
        self.always = [scheduled for scheduled in participants if not scheduled.says_when]
        self.waiting = [scheduled for scheduled in participants if scheduled.says_when]

    def update(self) -> None:
        """Find the earliest due step, run and moment, after one of them changed."""
        step = run = _FAST_INT
        moment = math.inf
        for scheduled in self.waiting:  # one loop instead of three min(): this runs after every run with hooks
            if scheduled.due_step < step:
                step = scheduled.due_step
            if scheduled.due_run < run:
                run = scheduled.due_run
            if scheduled.due_moment < moment:
                moment = scheduled.due_moment
        self.step, self.run = step, run
        self.moment = None if moment == math.inf else moment

    def due(self, step: int, run: int) -> list[ScheduledHook]:
        """Return the hooks that take part in run number ``run``, which ends at ``step``, in order; a new list."""
        now = -math.inf if self.moment is None else time.monotonic()
        due = [s for s in self.waiting if step >= s.due_step or run >= s.due_run or now >= s.due_moment]
        return in_order([*self.always, *due]) if self.always and due else due or [*self.always]


_by_index = attrgetter("index")


def in_order(participants: Iterable[ScheduledHook]) -> list[ScheduledHook]:
    """Return ``participants`` in the order of the hooks."""
    return sorted(participants, key=_by_index)


class Schedule:
    """The hooks of one loop that take part in runs, and the earliest point at which one of them is due.

    A run is idle, so that the loop calls no hook, if it begins below the global step :attr:`idle_step`, after fewer
    than :attr:`idle_runs` runs, before :attr:`moment`, and its step ends before :attr:`moment_after` and interests none
    of the :attr:`watchers`. The loop compares these in every run, so each is a plain attribute.

    Args:
        hooks: the hooks of the loop, in order.
        ranks: the ranks of the loop.
        chief_only: the hooks that no other rank has, so that none waits for another rank.
        stopping: the signals that stop the loop.
    """

    def __init__(
        self,
        hooks: Iterable[SessionRunHook],
        ranks: Ranks,
        chief_only: Collection[SessionRunHook] = (),
        stopping: Iterable[str] = (),
    ) -> None:
        def placed(index: int, hook: SessionRunHook) -> ScheduledHook:
            is_alone = ranks.size == 1 or any(hook is each for each in chief_only)
            collective = hook.collective and not is_alone
            if isinstance(hook, WritingHook):
                hook.join(ranks, collective)
            return (CollectiveHook if collective else ScheduledHook)(index, hook)

        self.all_hooks = [placed(index, hook) for index, hook in enumerate(hooks)]
        self.collective = [scheduled for scheduled in self.all_hooks if isinstance(scheduled, CollectiveHook)]
        """The hooks that all ranks call in the same run, if there are several ranks."""
        before = [scheduled for scheduled in self.all_hooks if overrides(scheduled.hook, "before_run")]
        after = [
            scheduled
            for scheduled in self.all_hooks
            if scheduled not in before and overrides(scheduled.hook, "after_run")
        ]
        self.before = HookQueue(before)
        self.after = HookQueue(after)
        self.run_hooks = in_order([*before, *after])
        """The hooks with a run method. The others cost nothing."""
        self.runs = 0
        """How many runs reached their ``after_run``."""
        self.progress = Progress()
        """How far the current session is."""
        self.accumulated = AccumulatedValues()
        """What is accumulated for the hooks in every run."""
        self.pending = False
        """Whether the end of the run has something to handle: the only thing that an idle run checks."""
        self.requests = Requests(self._arrive, stopping)
        """What other processes ask the hooks for."""
        self.is_asked = False
        """Whether a hook was asked, and :meth:`take_requests` was not called since."""
        self._update()

    def set_pending(self) -> None:
        """Have the end of the run handled. Safe to call from a signal handler or another thread."""
        self.pending = True

    def interrupt(self) -> None:
        """Have the next run, or the end of the one in progress, handled like one with hooks. Any thread may call it."""
        self.idle_step = self.idle_runs = -1
        self.pending = True

    def trigger(self, scheduled: ScheduledHook) -> None:
        """Have the hook in ``scheduled`` called in the next run, whatever it said when it was asked."""
        scheduled.due_run = self.runs + 1
        scheduled.hook.trigger()
        self._update()

    def take_requests(self) -> None:
        """Have the hooks that other processes asked for called in the next run. Called in the training thread.

        With several ranks, the thread that talks to the others asks all of them for a collective hook.
        """
        self.is_asked = False  # cleared first, because a signal may set it at any time
        for scheduled in self.run_hooks:
            if scheduled.is_asked and not isinstance(scheduled, CollectiveHook):
                scheduled.is_asked = False
                self.trigger(scheduled)
        self._update()  # also if no hook was called, after interrupt()

    def _arrive(self, request: str) -> None:
        # In a signal handler: it only sets attributes, of each hook first, and then those that a run looks at.
        for scheduled in self.run_hooks:
            if request in scheduled.requests:
                scheduled.is_asked = True
        self.is_asked = True
        self.interrupt()

    def _update(self) -> None:
        """Find the earliest step, run and moment at which a hook is due, before the step or after it."""
        before, after = self.before, self.after
        before.update()
        after.update()
        if after.always:
            after.step = -1  # a hook is due after every step
        self.idle_step = -1 if before.always else min(before.step, after.step) - 1
        self.idle_runs = min(before.run, after.run) - 1
        self.moment, self.moment_after = before.moment, after.moment
        self.watchers = [scheduled for scheduled in self.run_hooks if scheduled.when is not None]
        self.accumulates = bool(self.accumulated.sources)
        """Whether values are added to :attr:`accumulated` in every run."""
        self.checks_after = bool(self.watchers) or after.moment is not None or self.accumulates
        """Whether there is more to check after the step than the global step."""

    def begin_session(self, session: object, progress: Progress, step: Step) -> None:
        """Forget what was accumulated, and follow ``progress`` from now on."""
        for scheduled in self.all_hooks:
            scheduled.progress = progress
        self.progress = progress
        self.accumulated.begin_session(session, progress, step)

    def start(self) -> None:
        """Ask every hook when it is due: a session was created."""
        for scheduled in self.run_hooks:
            scheduled.catch_up(self.runs)
        self.accumulated.find_in(self.all_hooks)
        self.ask(self.run_hooks)
        if self.is_asked:
            self.take_requests()

    def ask(self, participants: Iterable[ScheduledHook]) -> None:
        """Ask the hooks in ``participants`` that schedule themselves when they are next due."""
        for scheduled in participants:
            if scheduled.says_when:
                scheduled.ask(self.runs)
                if scheduled.requests:
                    self.requests.wait_for(scheduled.requests)
        self._update()

    def due_at_end_of(self, epochs: int) -> list[ScheduledHook]:
        """Return the hooks that are due at the end of an epoch, when ``epochs`` of them have ended, in order."""
        return [each for each in self.run_hooks if each.due_epochs is not None and not epochs % each.due_epochs]

    def noticed_by(self, outputs: Any, participants: Container[ScheduledHook] = ()) -> list[ScheduledHook]:
        """Return the hooks, other than ``participants``, whose ``Due.when`` is true of what the step returned."""
        found = []
        for scheduled in self.watchers:
            try:
                when = scheduled.when
                if scheduled not in participants and when(outputs):  # type: ignore[misc]  # a watcher has one
                    found.append(scheduled)
            except BaseException as error:
                add_note(error, f"torchhooks: in Due.when of {scheduled}")
                raise
        return found

    def insert_due(
        self, participants: list[ScheduledHook], current: ScheduledHook, queue: HookQueue, step: int, run: int
    ) -> None:
        """Insert into ``participants``, after ``current``, the hooks that became due because it set the global step."""
        rest = [s for s in queue.due(step, run) if s.index > current.index and s not in participants]
        place = participants.index(current) + 1
        participants[place:] = in_order([*participants[place:], *rest])

    def fail_at(self, scheduled: object) -> None:
        """Note that the ``after_run`` of ``scheduled`` raised: the hooks before it know of the run, others do not."""
        reached = False
        for other in self.run_hooks:
            reached = reached or other is scheduled
            other.seen += reached
