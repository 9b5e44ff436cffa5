"""Which hooks take part in which run: each hook's place in the loop, and when it is next due."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from operator import attrgetter

from torchhooks.common.errors import add_note
from torchhooks.common.text import shown
from torchhooks.common.timers import Due
from torchhooks.fetches.evaluation import Caller
from torchhooks.fetches.names import Fetch
from torchhooks.lifecycle.extension import LoopPlan
from torchhooks.lifecycle.hook import (
    PeriodicHook,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StandardHook,
    overrides,
)
from torchhooks.lifecycle.trigger import Trigger
from torchhooks.progress.signals import HookSignals
from torchhooks.progress.training_state import TrainingState
from torchhooks.ranks.ranks import LoopRanks

_FAST_INT = 2**30 - 1
"""The greatest integer that CPython compares in its fast path. A queue ends there, so that idle runs compare fast. A
run after that many steps costs one call more."""


class HookSlot(Caller):
    """One hook in the order of a loop, with its trigger and the methods that a run calls."""

    hook: SessionRunHook

    def __init__(self, index: int, hook: SessionRunHook, trigger: Trigger, is_numbered: bool = True) -> None:
        super().__init__(hook)
        self.index = index
        self._is_numbered = is_numbered  # a hook of an extension is not: the script knows nothing of it
        self.trigger = trigger
        # Bound methods, looked up once instead of in every run.
        self.before_run = hook.before_run
        self.after_run: Callable[[SessionRunContext, SessionRunValues], None] = hook.after_run
        self.end = hook.end
        self.says_when = overrides(hook, "next_due")
        """Whether the hook says when it is due."""
        self.counts_missed = self.says_when and overrides(hook, "sat_out")
        self.plain_request: object = None
        """Cache: this exact request fetches values and nothing else, so later runs need not check or record it."""
        self.seen = 0
        """The number of the last run that the hook knows of, because it took part or was told that it was skipped."""

    def catch_up(self, runs: int) -> None:
        """Tell the hook how many runs it missed, up to the run number ``runs``."""
        missed, self.seen = runs - self.seen, runs
        if missed and self.counts_missed:
            self.hook.sat_out(missed)

    def miss_run(self) -> None:
        """Note that a run failed before the hook's ``after_run`` was over: the hook does not know of it."""
        self.seen += 1
        self.trigger.miss_run()

    def plan(self, runs: int) -> None:
        """Ask the hook when it is next due, after ``runs`` runs."""
        try:
            due = self.hook.next_due()
        except BaseException as error:
            add_note(error, f"torchhooks: in next_due of {self}")
            raise
        if due is not None and not isinstance(due, Due):
            raise TypeError(f"next_due of {self} returned {shown(due)}: return a Due, such as Due(step=100), or None")
        self.trigger.plan(due, runs)

    def declared_fetches(self) -> Fetch:
        return None

    def why_alone(self) -> str | None:
        return self.trigger.why_alone()

    def __str__(self) -> str:
        try:
            name = repr(self.hook)
        except Exception:  # a broken __repr__ must not hide the error that names the hook
            name = f"a {type(self.hook).__name__}"
        return f"{name} (hook {self.index})" if self._is_numbered else name


class PeriodicSlot(HookSlot):
    """A hook with a timer, for which the loop decides whether it is due, and begins its work."""

    hook: PeriodicHook

    def __init__(
        self, index: int, hook: PeriodicHook, training: TrainingState, is_collective: bool, is_numbered: bool = True
    ) -> None:
        trigger = Trigger(
            hook.timer,
            counts_runs=hook.counts_runs,
            triggers_at_once=hook.triggers_at_once,
            is_collective=is_collective,
            signals=hook.due_signals,
        )
        super().__init__(index, hook, trigger, is_numbered)
        self._training = training
        self._overridden = hook.after_run if overrides(hook, "after_run") else None
        self.after_run = self._after_run

    def _after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._overridden is not None:  # first: a summary hook marks the start of a session before its first point
            self._overridden(run_context, run_values)
        if self.trigger.due:
            # Before the work, which takes a part of the next period, as in TensorFlow.
            state = self._training.loop_state
            self.trigger.fire(state.global_step, state.runs)
            self.hook.run_due(run_context, run_values.results)

    def declared_fetches(self) -> Fetch:
        return self.hook.fetches


class HookQueue:
    """One point of a run at which hooks are chosen: before the step, or after it.

    Hooks without ``next_due`` are ``always`` called. Of the others, the earliest step, run and moment are kept, so that
    one comparison each shows that no other hook is called; and the ``watchers``, which look at what the step returned.
    """

    __slots__ = ("always", "moment", "run", "step", "waiting", "watchers")

    def __init__(self, participants: Iterable[HookSlot]) -> None:
        participants = tuple(participants)
        self.always = [slot for slot in participants if not slot.says_when]
        self.waiting = [slot for slot in participants if slot.says_when]

    def update(self, step: int = _FAST_INT) -> None:
        """Find the earliest step, run and moment, after one of them changed; ``step`` is the latest that it can be."""
        run = _FAST_INT
        moment, watchers = math.inf, list[HookSlot]()
        for slot in self.waiting:  # one loop instead of three min(): this runs after every run with hooks
            trigger = slot.trigger
            if trigger.step < step:
                step = trigger.step
            if trigger.run < run:
                run = trigger.run
            if trigger.moment < moment:
                moment = trigger.moment
            if trigger.when is not None:
                watchers.append(slot)
        self.step, self.run, self.watchers = step, run, watchers
        self.moment = None if moment == math.inf else moment

    def choose(self, step: int, run: int) -> list[HookSlot]:
        """Return the hooks to call in run number ``run``, which ends at ``step``, in order, in a new list.

        Their triggers say which of them are due.
        """
        now = time.monotonic()  # one look for all, so that hooks that share a timer in seconds are due together
        called = []
        for slot in self.waiting:
            if slot.trigger.choose(step, run, now):
                called.append(slot)
        return sorted([*self.always, *called], key=by_index) if self.always and called else called or [*self.always]

    def choose_again(self, participants: list[HookSlot], current: HookSlot, step: int, run: int) -> None:
        """Choose the hooks after ``current`` once more, because it has set the global step, into ``participants``."""
        now = time.monotonic()
        called = [slot for slot in self.waiting if slot.index > current.index and slot.trigger.choose(step, run, now)]
        # A hook that was chosen before, and would not be now, stays: it is called in a run that is not due.
        participants += [slot for slot in called if slot not in participants]
        participants.sort(key=by_index)


def note_hook(error: BaseException, slot: object, method: str, global_step: int) -> None:
    """Add a note to ``error`` that names the hook, its method and the global step."""
    add_note(error, f"torchhooks: in {method} of {slot}, at global step {global_step}")


by_index = attrgetter("index")
"""The key by which hooks are sorted into the order of the loop."""


def attach_hooks(plan: LoopPlan, ranks: LoopRanks, chief_only: Collection[SessionRunHook]) -> list[bool]:
    """Tell the hooks of torchhooks in ``plan`` what their loop knows. Return which hooks of the plan are collective.

    These are called in the same run on all ranks, if there are several. The hooks in ``chief_only`` are not: no other
    rank has them, so none waits for another rank.
    """
    collective: list[bool] = []
    for hook in plan.all_hooks:
        is_alone = ranks.size == 1 or any(hook is each for each in chief_only)
        collective.append(hook.collective and not is_alone)
        if isinstance(hook, StandardHook):
            hook.attach_to_loop(ranks, collective[-1], plan.folder)
    return collective


class Schedule:
    """The hooks of one loop that take part in runs, and the earliest point at which one of them is due.

    What a run is compared with stands in :class:`torchhooks.progress.loop_state.LoopState`.

    Args:
        training: the state of the loop.
        plan: the hooks of the loop. The first of the script has the number 0.
        collective: which of these hooks all ranks call in the same run, as :func:`attach_hooks` returns it.
        stopping: the signals that stop the loop.
    """

    def __init__(
        self,
        training: TrainingState,
        plan: LoopPlan,
        collective: Iterable[bool],
        stopping: Iterable[str],
    ) -> None:
        def placed(index: int, hook: SessionRunHook, is_collective: bool) -> HookSlot:
            is_numbered = 0 <= index < len(plan.hooks)
            if isinstance(hook, PeriodicHook):
                return PeriodicSlot(index, hook, training, is_collective, is_numbered)
            return HookSlot(index, hook, Trigger(is_collective=is_collective, signals=hook.due_signals), is_numbered)

        self._training = training
        self.all_hooks = [*map(placed, itertools.count(-len(plan.first)), plan.all_hooks, collective)]
        self.collective = [slot for slot in self.all_hooks if slot.trigger.is_collective]
        """The hooks that all ranks call in the same run, if there are several ranks."""
        before = [slot for slot in self.all_hooks if overrides(slot.hook, "before_run")]
        rest = [slot for slot in self.all_hooks if slot not in before]
        after = [slot for slot in rest if overrides(slot.hook, "after_run") or isinstance(slot, PeriodicSlot)]
        self.before = HookQueue(before)
        self.after = HookQueue(after)
        self.run_hooks = sorted([*before, *after], key=by_index)
        """The hooks with a run method. The others cost nothing."""
        self.signals = HookSignals(self._arrive, stopping)
        """The signals by which other processes ask for a hook."""
        self.is_triggered_externally = False
        """Whether a hook was asked, and :meth:`take_triggers` was not called since."""
        self._update()

    def force(self, slot: HookSlot) -> None:
        """Have the hook in ``slot`` called in the next run, and be due in it, whatever it said when it was asked."""
        slot.trigger.force()
        slot.hook.force_due()
        self._update()

    def take_triggers(self) -> None:
        """Have the hooks that other processes asked for called in the next run. Called in the training thread.

        With several ranks, the thread that talks to the others asks all of them for a collective hook.
        """
        self.is_triggered_externally = False  # cleared first, because a signal may set it at any time
        for slot in self.run_hooks:
            if not slot.trigger.is_collective and slot.trigger.take_signal():
                self.force(slot)
        self._update()  # also if no hook was called, after state.interrupt()

    def _arrive(self, name: str) -> None:
        # In a signal handler: it only sets attributes, of each hook first, and then those that a run looks at.
        for slot in self.run_hooks:
            if name in slot.trigger.signals:
                slot.trigger.signal_arrived()
        self.is_triggered_externally = True
        self._training.loop_state.interrupt()

    def _update(self) -> None:
        """Find the earliest step, run and moment at which a hook is due, before the step or after it."""
        state = self._training.loop_state
        before, after = self.before, self.after
        before.update()
        after.update(-1 if after.always else _FAST_INT)  # such a hook is due after every step
        self.moment_after = after.moment
        self.watchers = sorted(before.watchers + after.watchers, key=by_index)
        self.accumulates = bool(self._training.accumulated.sources)
        """Whether values are accumulated in every run."""
        state.expect(
            step=-1 if before.always else min(before.step, after.step) - 1,
            # One less than what is due: an idle run is compared with the numbers before it, and ends one further on.
            runs=min(before.run, after.run) - 1,
            moment=before.moment,
            checks_after=bool(self.watchers) or after.moment is not None or self.accumulates,
        )
        # Last, because a signal may have come while the lines above were carried out: the next run takes it.
        if self.is_triggered_externally:
            state.interrupt()

    def attach_triggers(self) -> None:
        """Give the hooks their triggers in this loop. Not earlier: the loop is refused if another one has a hook."""
        for slot in self.all_hooks:
            if isinstance(slot, PeriodicSlot):
                slot.hook.attach_trigger(slot.trigger)

    def start(self) -> None:
        """Ask every hook when it is due: a session was created."""
        for slot in self.run_hooks:
            # Before plan(): what a hook counts of the runs that it missed before a recovery may decide when it is next
            # due.
            slot.catch_up(self._training.loop_state.runs)
        # Before plan(), which ends with the question whether values are accumulated in every run.
        self._training.accumulated.find_in(self.all_hooks)
        # Read before plan(), which takes a hook without a timer for one that was called.
        forced = [slot.trigger for slot in self.run_hooks if slot.trigger.is_forced]
        self.plan(self.run_hooks)
        for trigger in forced:  # not called yet: the run for which it was forced failed, and a recovery makes it again
            trigger.force()
        if forced:
            self._update()
        # Last, for the same reason. A signal may have come while the hooks began.
        if self.is_triggered_externally:
            self.take_triggers()

    def plan(self, participants: Iterable[HookSlot]) -> None:
        """Ask the hooks in ``participants`` that schedule themselves when they are next due."""
        for slot in participants:
            if slot.says_when:
                slot.plan(self._training.loop_state.runs)
                if slot.trigger.signals:
                    self.signals.wait_for(slot.trigger.signals)
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
            or bool(self.accumulates and self._training.accumulated.add(outputs, args or (), kwargs))
        )

    def due_at_end_of(self, epochs: int) -> list[HookSlot]:
        """Return the hooks that are due at the end of an epoch, when ``epochs`` of them have ended, in order."""
        return [each for each in self.run_hooks if each.trigger.epochs and not epochs % each.trigger.epochs]

    def noticed_by(self, outputs: object, participants: Container[HookSlot] = ()) -> list[HookSlot]:
        """Return the hooks, other than ``participants``, whose ``Due.when`` is true of what the step returned."""
        found = []
        for slot in self.watchers:
            try:
                when = slot.trigger.when
                if slot not in participants and when(outputs):  # type: ignore[misc]  # a watcher has one
                    found.append(slot)
            except BaseException as error:
                add_note(error, f"torchhooks: in Due.when of {slot}")
                raise
        return found

    def void_run(self) -> None:
        """Have no hook be due any more: the run in progress has failed."""
        for slot in self.run_hooks:
            slot.trigger.withdraw()

    def fail_at(self, slot: object) -> None:
        """Note that the ``after_run`` of ``slot`` raised: the hooks before it know of the run, others do not."""
        reached = False
        for other in self.run_hooks:
            reached = reached or other is slot
            if reached:
                other.miss_run()
