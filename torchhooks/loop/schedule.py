"""Which hooks take part in which run: each hook's place in the loop, and when it is next due."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from operator import attrgetter
from typing import Any

from torchhooks.common.errors import add_note
from torchhooks.common.text import shown
from torchhooks.common.timers import Due
from torchhooks.fetches.evaluation import Caller, FetchableSession
from torchhooks.fetches.names import Fetch, Step
from torchhooks.fetches.running import RunningValues
from torchhooks.lifecycle.hook import PeriodicHook, SessionRunHook, StandardHook, overrides
from torchhooks.lifecycle.loop_state import LoopState
from torchhooks.lifecycle.signals import HookSignals
from torchhooks.ranks.ranks import Ranks

NEVER_STEP = sys.maxsize
"""A global step, or a number of runs, that is never reached."""

_FAST_INT = 2**30 - 1
"""The greatest integer that CPython compares in its fast path. A queue ends there, so that idle runs compare fast. A
run after that many steps costs one call more."""


class HookSlot(Caller):
    """One hook in the order of a loop, and when it is next due."""

    hook: SessionRunHook

    def __init__(self, index: int, hook: SessionRunHook) -> None:
        super().__init__(hook)
        self.index = index
        # Bound methods, looked up once instead of in every run.
        self.before_run = hook.before_run
        self.after_run = hook.after_run
        self.end = hook.end
        self.says_when = overrides(hook, "next_due")
        """Whether the hook says when it is due."""
        self.counts_missed = self.says_when and overrides(hook, "sat_out")
        self.plain_request: object = None
        """Cache: this exact request fetches values and nothing else, so later runs need not check or record it."""
        self.seen = 0
        """The number of the last run that the hook knows of, because it took part or was told that it was skipped."""
        self.due_step = 0
        self.due_run = 0
        self.due_moment = math.inf
        self.due_epochs: int | None = None
        self.signals = set(hook.due_signals)
        """The signals that the hook waits for, or has waited for."""
        self.is_triggered_externally = False
        """Whether one of them has arrived, and the hook was not called for it yet."""
        self.when: Callable[[Any], object] | None = None

    def catch_up(self, runs: int) -> None:
        """Tell the hook how many runs it missed, up to the run number ``runs``."""
        missed, self.seen = runs - self.seen, runs
        if missed and self.counts_missed:
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
            self.signals.add(due.signal)
        self.when = due.when

    def declared_fetches(self) -> Fetch:
        return self.hook.fetches if isinstance(self.hook, PeriodicHook) else None

    def why_alone(self) -> str | None:
        if self.when is not None:
            return (
                "the hook is due by what the step of each rank returned (Due.when): let next_due() return a step or "
                "None"
            )
        if self.due_moment != math.inf:
            return "the hook is due by the clock of each rank: set collective = True in its class"
        if self.signals:
            return "the hook is due by a signal that one rank gets: set collective = True in its class"
        return None

    def __str__(self) -> str:
        try:
            name = repr(self.hook)
        except Exception:  # a broken __repr__ must not hide the error that names the hook
            name = f"a {type(self.hook).__name__}"
        return name if self.index < 0 else f"{name} (hook {self.index})"


class CollectiveSlot(HookSlot):
    """The place of a hook that all ranks have to call in the same run, so that the chief's clock decides for all."""

    chief_moment = math.inf
    """When the hook is due by the clock. Ranks other than the chief ignore it.

    Two threads set it without a lock. The thread that talks to the other ranks sets it to infinity once it has asked
    for the hook. The training thread sets the next moment after each run of the hook, so also after the run asked for.
    """

    def ask(self, runs: int) -> None:
        """Ask the hook when it is next due, and keep the moment apart, where no run looks at it."""
        super().ask(runs)
        self.chief_moment, self.due_moment = self.due_moment, math.inf


class HookQueue:
    """One point of a run at which hooks are chosen: before the step, or after it.

    Hooks without ``next_due`` are ``always`` chosen. Of the others, the earliest due step, run and moment are kept, so
    that one comparison each shows that no other hook is due.
    """

    __slots__ = ("always", "moment", "run", "step", "waiting")

    def __init__(self, participants: Iterable[HookSlot]) -> None:
        participants = tuple(participants)
        self.always = [slot for slot in participants if not slot.says_when]
        self.waiting = [slot for slot in participants if slot.says_when]

    def update(self) -> None:
        """Find the earliest due step, run and moment, after one of them changed."""
        step = run = _FAST_INT
        moment = math.inf
        for slot in self.waiting:  # one loop instead of three min(): this runs after every run with hooks
            if slot.due_step < step:
                step = slot.due_step
            if slot.due_run < run:
                run = slot.due_run
            if slot.due_moment < moment:
                moment = slot.due_moment
        self.step, self.run = step, run
        self.moment = None if moment == math.inf else moment

    def due(self, step: int, run: int) -> list[HookSlot]:
        """Return the hooks that take part in run number ``run``, which ends at ``step``, in order; a new list."""
        now = -math.inf if self.moment is None else time.monotonic()
        due = [s for s in self.waiting if step >= s.due_step or run >= s.due_run or now >= s.due_moment]
        return sorted([*self.always, *due], key=by_index) if self.always and due else due or [*self.always]


def note_hook(error: BaseException, slot: object, method: str, global_step: int) -> None:
    """Add a note to ``error`` that names the hook, its method and the global step."""
    add_note(error, f"torchhooks: in {method} of {slot}, at global step {global_step}")


by_index = attrgetter("index")
"""The key by which hooks are sorted into the order of the loop."""


class Schedule:
    """The hooks of one loop that take part in runs, and the earliest point at which one of them is due.

    What a run is compared with stands in the loop's ``state``: see :class:`torchhooks.lifecycle.loop_state.LoopState`.

    Args:
        state: the state of the loop.
        hooks: the hooks of the loop, in order.
        ranks: the ranks of the loop.
        chief_only: the hooks that no other rank has, so that none waits for another rank.
        stopping: the signals that stop the loop.
        first_index: the number of the first hook, -1 if the script has not given it.
    """

    def __init__(
        self,
        state: LoopState,
        hooks: Iterable[SessionRunHook],
        ranks: Ranks,
        chief_only: Collection[SessionRunHook] = (),
        stopping: Iterable[str] = (),
        first_index: int = 0,
    ) -> None:
        def placed(index: int, hook: SessionRunHook) -> HookSlot:
            is_alone = ranks.size == 1 or any(hook is each for each in chief_only)
            collective = hook.collective and not is_alone
            if isinstance(hook, StandardHook):
                hook.attach_ranks(ranks, collective)
            return (CollectiveSlot if collective else HookSlot)(index, hook)

        self.all_hooks = [placed(index, hook) for index, hook in enumerate(hooks, first_index)]
        self.collective = [slot for slot in self.all_hooks if isinstance(slot, CollectiveSlot)]
        """The hooks that all ranks call in the same run, if there are several ranks."""
        before = [slot for slot in self.all_hooks if overrides(slot.hook, "before_run")]
        after = [slot for slot in self.all_hooks if slot not in before and overrides(slot.hook, "after_run")]
        self.before = HookQueue(before)
        self.after = HookQueue(after)
        self.run_hooks = sorted([*before, *after], key=by_index)
        """The hooks with a run method. The others cost nothing."""
        self.state = state
        self.accumulated = RunningValues()
        """What is accumulated for the hooks in every run."""
        self.signals = HookSignals(self._arrive, stopping)
        """The signals by which other processes ask for a hook."""
        self.is_triggered_externally = False
        """Whether a hook was asked, and :meth:`take_triggers` was not called since."""
        self._update()

    def force_due(self, slot: HookSlot) -> None:
        """Have the hook in ``slot`` called in the next run, whatever it said when it was asked."""
        slot.due_run = self.state.runs + 1
        slot.hook.force_due()
        self._update()

    def take_triggers(self) -> None:
        """Have the hooks that other processes asked for called in the next run. Called in the training thread.

        With several ranks, the thread that talks to the others asks all of them for a collective hook.
        """
        self.is_triggered_externally = False  # cleared first, because a signal may set it at any time
        for slot in self.run_hooks:
            if slot.is_triggered_externally and not isinstance(slot, CollectiveSlot):
                slot.is_triggered_externally = False
                self.force_due(slot)
        self._update()  # also if no hook was called, after state.interrupt()

    def _arrive(self, name: str) -> None:
        # In a signal handler: it only sets attributes, of each hook first, and then those that a run looks at.
        for slot in self.run_hooks:
            if name in slot.signals:
                slot.is_triggered_externally = True
        self.is_triggered_externally = True
        self.state.interrupt()

    def _update(self) -> None:
        """Find the earliest step, run and moment at which a hook is due, before the step or after it."""
        before, after = self.before, self.after
        before.update()
        after.update()
        if after.always:
            after.step = -1  # a hook is due after every step
        # Another thread may call state.interrupt() just now, and these lines overwrite what it set. It sets ``pending``
        # too, so that the end of this run or of the next one does what it asks for.
        state = self.state
        state.idle_step = -1 if before.always else min(before.step, after.step) - 1
        state.idle_runs = min(before.run, after.run) - 1
        state.moment, self.moment_after = before.moment, after.moment
        self.watchers = [slot for slot in self.run_hooks if slot.when is not None]
        self.accumulates = bool(self.accumulated.sources)
        """Whether values are added to :attr:`accumulated` in every run."""
        state.checks_after = bool(self.watchers) or after.moment is not None or self.accumulates

    def begin_session(self, session: FetchableSession, step: Step) -> None:
        """Forget what was accumulated."""
        self.accumulated.begin_session(session, step)

    def start(self) -> None:
        """Ask every hook when it is due: a session was created."""
        for slot in self.run_hooks:
            slot.catch_up(self.state.runs)
        self.accumulated.find_in(self.all_hooks)
        self.ask(self.run_hooks)
        if self.is_triggered_externally:
            self.take_triggers()

    def ask(self, participants: Iterable[HookSlot]) -> None:
        """Ask the hooks in ``participants`` that schedule themselves when they are next due."""
        for slot in participants:
            if slot.says_when:
                slot.ask(self.state.runs)
                if slot.signals:
                    self.signals.wait_for(slot.signals)
        self._update()

    def check_after(self, outputs: object, args: tuple[object, ...] | None, kwargs: Mapping[str, object]) -> bool:
        """Add to what is accumulated in every run, after a step that returned ``outputs``.

        Only called if ``state.checks_after``, and up to ``state.idle_step``.

        Returns:
            Whether a hook is due after the step all the same: by the clock, or by ``Due.when``.
        """
        return (
            (self.moment_after is not None and time.monotonic() >= self.moment_after)
            or bool(self.watchers and self.noticed_by(outputs))
            # Last: where a hook is due, the evaluation of the run adds the values.
            or bool(self.accumulates and self.accumulated.add(outputs, args or (), kwargs))
        )

    def due_at_end_of(self, epochs: int) -> list[HookSlot]:
        """Return the hooks that are due at the end of an epoch, when ``epochs`` of them have ended, in order."""
        return [each for each in self.run_hooks if each.due_epochs is not None and not epochs % each.due_epochs]

    def noticed_by(self, outputs: object, participants: Container[HookSlot] = ()) -> list[HookSlot]:
        """Return the hooks, other than ``participants``, whose ``Due.when`` is true of what the step returned."""
        found = []
        for slot in self.watchers:
            try:
                when = slot.when
                if slot not in participants and when(outputs):  # type: ignore[misc]  # a watcher has one
                    found.append(slot)
            except BaseException as error:
                add_note(error, f"torchhooks: in Due.when of {slot}")
                raise
        return found

    def insert_due(
        self, participants: list[HookSlot], current: HookSlot, queue: HookQueue, step: int, run: int
    ) -> None:
        """Insert into ``participants``, after ``current``, the hooks that became due because it set the global step."""
        rest = [s for s in queue.due(step, run) if s.index > current.index and s not in participants]
        place = participants.index(current) + 1
        participants[place:] = sorted([*participants[place:], *rest], key=by_index)

    def fail_at(self, slot: object) -> None:
        """Note that the ``after_run`` of ``slot`` raised: the hooks before it know of the run, others do not."""
        reached = False
        for other in self.run_hooks:
            reached = reached or other is slot
            other.seen += reached
