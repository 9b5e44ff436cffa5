"""When the loop calls a hook, and whether the hook is due: one :class:`Trigger` for each hook and loop owns both.

Called is not due. The loop *calls* a hook in the first run that reaches what its ``next_due`` has returned. A hook that
has a timer is *due* in a run in which it is called and its timer triggers, or in which it was forced. A hook without a
timer decides by itself whether it has work in a run in which it is called.

The life of a trigger, in the order of one run:

=============  ======================================  ================================================================
moment         who                                     what
=============  ======================================  ================================================================
start_at       the loop, before after_create_session   a session begins at a step, so the timer does
force          the loop, or the hook itself            a signal has arrived, the chief's clock has come to the moment,
                                                       or the hook has asked for it: the next run is due
choose         the loop, before the step or after it   whether to call the hook, and whether it is due
withdraw       the hook, or the loop                   the run is not due: the hook puts its work off, the run has
                                                       counted no step, or it has failed. What has made it due stays, so
                                                       that a later run is
fire           the loop, before ``run_due``            the work begins, and a new period with it
plan           the loop, after all ``after_run``       when to call the hook next
=============  ======================================  ================================================================

A trigger never fires twice for one global step, also if it is forced. A timer that counts runs has a new number in each
run, and the end of an epoch is due without a decision.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torchhooks.common.timers import NOW, Due, Timer

NEVER_STEP = sys.maxsize
"""A global step, or a number of runs, that is never reached."""


class Trigger:
    """When the loop calls one hook, and whether the hook is due.

    Args:
        timer: the timer of the hook; ``None`` for a hook that decides by itself.
        counts_runs: whether the timer counts runs instead of global steps.
        triggers_at_once: whether a timer that has never triggered triggers in the first run. Otherwise its first period
            begins with the session.
        is_collective: whether all ranks call the hook in the same runs, so that no rank looks at its own clock.
        signals: the names of the signals that the hook waits for.
    """

    __slots__ = (
        *("step", "run", "moment", "chief_moment", "epochs", "when"),
        *("due", "is_forced", "has_signal", "elapsed_secs", "uncounted_runs"),
        *("timer", "counts_runs", "triggers_at_once", "is_collective", "signals"),
    )

    def __init__(
        self,
        timer: Timer | None = None,
        *,
        counts_runs: bool = False,
        triggers_at_once: bool = False,
        is_collective: bool = False,
        signals: Iterable[str] = (),
    ) -> None:
        self.timer, self.counts_runs, self.triggers_at_once = timer, counts_runs, triggers_at_once
        self.is_collective = is_collective
        self.signals = set(signals)
        """The signals that the hook waits for, or has waited for."""
        self.step = self.run = NEVER_STEP
        """The global step, and the number of the run, from which on the loop calls the hook."""
        self.moment = math.inf
        """The moment from which on the loop calls the hook, by ``time.monotonic()``."""
        self.chief_moment = math.inf
        """That moment for a collective hook: no run looks at it, but the chief's thread, which asks all ranks.

        Two threads set it without a lock. The thread that talks to the other ranks sets it to infinity once it has
        asked for the hook. The training thread sets the next moment after each run of the hook, so also after the run
        that was asked for.
        """
        self.epochs: int | None = None
        """The hook is called at the end of an epoch whose number this one divides."""
        self.when: Callable[[Any], object] | None = None
        """The hook is called after a step of whose outputs this is true."""
        self.due = False
        """Whether the hook is due in the run in progress, or at the end of an epoch. False between two runs."""
        self.is_forced = False
        """Whether the next run is due whatever the timer says. It stays if that run counts no step."""
        self.has_signal = False
        """The inbox of the signal handler, which sets it in the middle of anything. The loop takes it between runs."""
        self.uncounted_runs = 0
        self.elapsed_secs: float | None = None
        """The seconds from the trigger before the last one to the last one; ``None`` if there was none before."""

    def start_at(self, step: int) -> None:
        """Begin a session at ``step``. A period of the timer goes on, also after a recovery, as in TensorFlow."""
        self.due = False
        timer = self.timer
        if timer is not None:
            timer.start_at(step)
            if not self.triggers_at_once and timer.last_triggered_step() is None:
                timer.update_last_triggered_step(step)

    def choose(self, step: int, run: int, now: float) -> bool:
        """Return whether the loop calls the hook in a run, and decide whether it is due: see :meth:`is_due_at`."""
        is_called = step >= self.step or run >= self.run or now >= self.moment
        self.due = is_called and self.is_due_at(step, run, now)
        return is_called

    def is_due_at(self, step: int, run: int, now: float) -> bool:
        """Return whether the run with the number ``run``, which brings the global step to ``step``, is due at ``now``.

        It changes nothing, so a fetch may ask before the loop decides.
        """
        timer = self.timer
        if timer is None:
            return False
        number = run - self.uncounted_runs if self.counts_runs else step
        if self.is_forced:
            return number != timer.last_triggered_step()
        # Of a collective hook, no rank asks its own clock: the ranks would come to different answers. force() stands
        # for the chief's.
        return timer.triggers_at(number, -math.inf if self.is_collective else now)

    def force(self) -> None:
        """Have the loop call the hook in the next run, which is due whatever the timer says.

        A hook may call this outside of a run: in ``after_create_session``, and at the end of an epoch. Otherwise, the
        loop does.
        """
        self.is_forced = True
        self.run = -1

    def end_epoch(self) -> None:
        """Be due at the end of an epoch that the hook has asked for, without a decision by the timer."""
        self.due = self.timer is not None  # otherwise nothing fires, and it would stay due

    def withdraw(self) -> None:
        """Be due in a later run instead of this one."""
        self.due = False

    def fire(self, step: int, run: int = 0) -> None:
        """Begin a new period at ``step``, in the run with the number ``run``: the hook does its work now.

        A hook that works between two runs calls this too. Until the loop plans again, the hook is not due.
        """
        self.due = self.is_forced = False
        if self.timer is not None:
            number = run - self.uncounted_runs if self.counts_runs else step
            self.elapsed_secs, _ = self.timer.update_last_triggered_step(number)

    def plan(self, due: Due | None, run: int) -> None:
        """Have the loop call the hook when ``due`` says, counted from ``run``, the number of the last run."""
        step, moment, runs, self.when, self.epochs, signal = NOW if due is None else due
        self.step, self.run = NEVER_STEP, NEVER_STEP if runs is None else run + runs
        if step is not None and self.counts_runs:
            self.run = min(self.run, step + self.uncounted_runs)
        elif step is not None:
            self.step = step
        if self.timer is None:
            self.is_forced = False  # the hook was called, and has decided by itself
        elif self.is_forced:
            # It has not fired since it was forced: there was no run yet, or one that has counted no step or failed. So
            # the next run is due.
            self.run = -1
        self.moment = math.inf if moment is None else moment
        if self.is_collective:
            self.chief_moment, self.moment = self.moment, math.inf
        if signal is not None:
            self.signals.add(signal)

    def miss_run(self) -> None:
        """Note that a run failed before the hook's ``after_run`` was over: a timer of runs does not count it."""
        self.uncounted_runs += 1

    def take_moment(self, now: float) -> bool:
        """Return, once, whether to ask all ranks for a collective hook, because ``now`` is its moment on the chief."""
        is_reached = now >= self.chief_moment
        if is_reached:
            self.chief_moment = math.inf
        return is_reached

    def signal_arrived(self) -> None:
        """Called by the signal handler, in the middle of anything."""
        self.has_signal = True

    def take_signal(self) -> bool:
        """Return whether a signal has arrived since the last call."""
        has_signal = self.has_signal
        if has_signal:
            # Cleared only if it was seen: a signal that arrives after the look above would otherwise be lost.
            self.has_signal = False
        return has_signal

    def why_alone(self) -> str | None:
        """Return why the loop may call the hook in a run in which another rank does not, and the way out."""
        if self.when is not None:
            return (
                "the hook is due by what the step of each rank returned (Due.when): let next_due() return a step or "
                "None"
            )
        if self.is_collective:
            return None  # the ranks agree about its moments and signals
        if self.moment != math.inf:
            return "the hook is due by the clock of each rank: set collective = True in its class"
        if self.signals:
            return "the hook is due by a signal that one rank gets: set collective = True in its class"
        return None
