"""The state of a loop: its phase, its step, when a hook is next due, and who ends it and why.

No other object knows. Only the training thread changes the phase:

=============================  ========================================================================================
change                         where
=============================  ========================================================================================
``IDLE`` to ``RUNNING``        a run begins, or hooks are called between two runs, which must not begin one
``RUNNING`` to ``IDLE``        the run is over, or was left by an error, and no stop is decided
any to ``STOPPING``            no run is in progress, and a hook, the caller, a thread or a signal has decided to stop
any to ``FAILED``              a recovery or another rank has failed, so that no further run can be made
any to ``CLOSED``              the loop is closed
``STOPPING`` to ``RUNNING``    the one run that is allowed after a thread's stop, and the calls that a stop waits for
=============================  ========================================================================================

Other threads and signal handlers only record what they ask for. A stop that one of them decides during a run takes
effect when the run is over.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable
from signal import Signals
from typing import Any, NamedTuple

from torchhooks.common.checks import whole_number
from torchhooks.common.errors import LifecycleError, PeerError, brief
from torchhooks.common.log import logger
from torchhooks.progress.signals import SignalWatch

NO_OUTPUTS: Any = type("NoOutputs", (), {"__repr__": lambda self: "NO_OUTPUTS"})()
"""The outputs before the first run, and from the start of a step until it returns."""

_LOST_WORKER_SECS = 2.0  # a batch system signals the processes of a job within milliseconds of each other


class Phase(enum.Enum):
    """What a loop is doing."""

    IDLE = "idle"
    RUNNING = "running"
    STOPPING = "stopping"
    FAILED = "failed"
    CLOSED = "closed"


# Looking up a member of an Enum takes longer than a global, and an idle run compares the phase twice.
IDLE, RUNNING = Phase.IDLE, Phase.RUNNING


class StoppedBy(enum.Enum):
    """Who decided that a loop stops."""

    HOOK = "hook"
    CALLER = "caller"
    THREAD = "thread"
    COORDINATOR = "coordinator"
    """A thread, through the coordinator of the session, whose request ends with the session."""
    SIGNAL = "signal"
    ERROR = "error"
    END = "end"


class Stop(NamedTuple):
    """The decision that a loop makes no further run."""

    reason: str
    by: StoppedBy

    def to_text(self) -> str:
        """Return what :meth:`from_text` reads, for another process."""
        return f"{self.by.value} {self.reason}"

    @classmethod
    def from_text(cls, text: str) -> Stop:
        by, _, reason = text.partition(" ")
        return cls(reason, StoppedBy(by))


class LeftBySignalError(BaseException):
    """Leaves the ``with`` block of a loop that a signal has stopped, which swallows it.

    Not an ``Exception``, so that ``except Exception`` in the script does not keep it.
    """


class Ending(NamedTuple):
    """How the script ends a loop. Made once, for :meth:`torchhooks.loop.life.Life.close`."""

    error: BaseException | None = None
    """What leaves the ``with`` block, or what a call between two items could not raise."""
    finished: str | None = None
    """Why the training run is finished, as far as this rank knows; ``None`` if it is not."""
    left_by_signal: bool = False
    """Whether the loop itself left the ``with`` block, because of a signal."""


class RunInProgress:
    """A run in which a stop can be requested."""

    # Class attributes are defaults: a context is created in every run with hooks, and each assignment costs time.
    void: bool = False
    """Whether the run failed, so that a stop requested in it does not count."""
    counts: bool = False
    """Whether the run counts although it failed, because its ``after_run`` calls had begun."""

    @property
    def why_stopped(self) -> str:
        """Which hook, or what else, asked to stop, and why."""
        raise NotImplementedError

    def fail(self) -> None:
        """Note that the run failed: a stop that was requested in it does not count."""
        self.void = True
        self.end()

    def end(self) -> None:
        """Let go of what belongs to the run alone."""


class CallerRequest(RunInProgress):
    """A stop that the caller requested during a run, and not a hook."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    @property
    def why_stopped(self) -> str:
        return self._reason


class LoopState:
    """What a loop is doing. It collects requests to stop, and decides when they take effect.

    A run is idle, so that the loop calls no hook, if it begins below the global step :attr:`idle_step`, after fewer
    than :attr:`idle_runs` runs and before :attr:`moment`, and no hook is due after its step.

    Created in the training thread. Its attributes are set by its methods, but for these, on the way of every step or of
    every run with hooks, where calls would cost as much as what they do:

    =====================  =========================================================================
    where                  what is set
    =====================  =========================================================================
    ``MonitoredLoop.run``  ``phase``, ``outputs``, ``global_step``, ``runs``
    ``Body``               ``phase``
    ``Runner.begin``       ``outputs``, ``context``, also in ``_begin_due``
    ``Runner.finish``      ``outputs``, ``global_step``, ``runs``, ``context``, also in ``_complete``
                           and ``_after_run``
    =====================  =========================================================================

    Args:
        signals: the names of the signals that stop the loop.
        function: the step function.
        steps_per_run: the global steps that a run counts when its step has returned. 0 if the optimizer's steps count.
        note_open: called with whether ``end()`` of the hooks is still to be called, when that changes.
    """

    # Every step pays for what a run without hooks looks at, and more so when the step has emptied the caches of the
    # processor. So these attributes stand together in one object, in the order in which they are read.
    __slots__ = (
        *("phase", "stop", "global_step", "idle_step", "runs", "idle_runs", "moment", "outputs", "function"),
        *("steps_per_run", "checks_after", "pending"),
        *("begun_at", "data_have_ended", "failure", "last_run_allowed", "propose", "stop_requests", "context"),
        *("signals", "earlier_runs", "note_open", "in_step_fn"),
        *("__weakref__", "_thread"),
    )

    def __init__(
        self,
        signals: Iterable[str | Signals] = (),
        function: Callable[..., Any] = lambda: None,
        steps_per_run: int = 1,
        note_open: Callable[[bool], object] = lambda is_open: None,
    ) -> None:
        self._thread = threading.get_ident()
        self.phase = Phase.IDLE
        self.stop: Stop | None = None
        """Why the loop makes no further run, once that is decided. The phase follows when no run is in progress."""
        self.pending = False
        """Whether the end of the run has something to handle."""
        self.runs = 0
        """How many runs were made. A run with hooks counts when its ``after_run`` calls begin."""
        self.note_open = note_open
        """Called with whether ``end()`` of the hooks is still to be called, when that changes."""
        self.earlier_runs = 0
        """How many runs earlier processes made, less the runs of this loop that a restore took back."""
        self.idle_step = self.idle_runs = -1
        """The global step, and the number of runs, below which no hook is due, before a step or after it.

        -1 after :meth:`interrupt`, until the schedule is made again.
        """
        self.moment: float | None = None
        """When a hook is due before a step, by ``time.monotonic()``; ``None`` if none is due by the clock."""
        self.checks_after = False
        """Whether a hook may be due after a step for another reason than the global step."""
        self.function, self.steps_per_run = function, steps_per_run
        self.failure: BaseException | None = None
        """The error that ended the loop."""
        self.context: RunInProgress | None = None
        """The context of the run in progress, if a hook is called in it."""
        self.stop_requests: list[RunInProgress] = []
        """The runs in which, or after which, a hook requested a stop."""
        self.data_have_ended = False
        """Whether the outermost ``until_stop`` has no more items, which is a reason but not a stop."""
        self.propose: Callable[[Stop], object] | None = None
        """With several ranks, what proposes a stop to the other ranks, instead of deciding it."""
        self.last_run_allowed = False
        """Whether one more run may be made: a thread can ask to stop after the caller looked at ``should_stop()``."""
        self.in_step_fn = False
        """Whether a function passed to ``run_step_fn`` is being called, which may make several runs."""
        self.signals = SignalWatch(signals, self.set_pending)
        """The signals that stop the loop."""
        self.begin_session()

    # -- the session --------------------------------------------------------------------------------------------------

    def begin_session(self) -> None:
        """Begin at step 0, without outputs of a run. Restoring a checkpoint sets the global step."""
        self.global_step = 0
        self.begun_at = 0
        """The global step before the first run of the session: restored, set by hand, or 0."""
        self.outputs: Any = NO_OUTPUTS
        """What the step returned in the last run."""

    def set_step(self, step: int) -> None:
        """Set the global step, and ``begun_at`` with it while there are no outputs.

        Raises:
            ValueError: ``step`` is not a whole number, 0 or more.
        """
        self.global_step = number = whole_number(step, "global_step", 0)
        if self.outputs is NO_OUTPUTS:
            self.begun_at = number

    @property
    def total_runs(self) -> int:
        """How many runs the training run consists of, as its checkpoints count them."""
        return self.earlier_runs + self.runs

    def restore(self, step: int, runs: int) -> None:
        """Continue at the global step ``step``, after so many ``runs``, as a checkpoint says."""
        self.set_step(step)
        self.earlier_runs = runs - self.runs

    def begin_here(self) -> None:
        """Have the session begin at the present step, because the runs before it failed. TensorFlow's START says so."""
        self.begun_at = self.global_step

    def count_optimizer_step(self, *_: object) -> None:
        """Count a step of the optimizer, which calls this when it has made one."""
        self.global_step += 1

    # -- when a hook is due -------------------------------------------------------------------------------------------

    def expect(self, step: int, runs: int, moment: float | None, checks_after: bool) -> None:
        """Have runs be idle below this global step, after fewer runs, and before this moment."""
        # Another thread may call interrupt() just now, and these lines overwrite what it set. It sets ``pending`` too,
        # so that the end of this run or of the next one does what it asks for.
        self.idle_step, self.idle_runs, self.moment, self.checks_after = step, runs, moment, checks_after

    def is_idle(self) -> bool:
        """Return whether no hook is due in the next run. ``MonitoredLoop.run`` has the same test, written out."""
        return (
            self.global_step < self.idle_step
            and self.runs < self.idle_runs
            and (self.moment is None or time.monotonic() < self.moment)
        )

    def set_pending(self) -> None:
        """Have the end of the run handled. Safe to call from a signal handler or another thread."""
        self.pending = True

    def interrupt(self) -> None:
        """Have the next run, or the end of the one in progress, handled like one with hooks. Any thread may call it."""
        self.idle_step = self.idle_runs = -1
        self.pending = True

    # -- the run in progress ------------------------------------------------------------------------------------------

    def begin_end_of_run(self) -> None:
        """Note that the end of the run is handled from here on. A thread or a signal may ask for the next one again."""
        self.pending = False

    def begin_with_hooks(self, context: RunInProgress) -> None:
        """Begin a run, or the end of an epoch, in which hooks are called with ``context``."""
        self.context = context

    def release_outputs(self) -> None:
        """Let go of the last outputs: the session is closed."""
        self.outputs = NO_OUTPUTS

    def end_with_hooks(self, enclosing: RunInProgress | None = None) -> None:
        """Note that hooks are called with the context of the ``enclosing`` run again, or in no run."""
        self.context = enclosing

    def begin_calls(self) -> bool:
        """Enter ``RUNNING`` for calls between two runs, which must not begin one. Return whether it was entered."""
        was_running, self.phase = self.phase is RUNNING, RUNNING
        return was_running

    def run_is_over(self) -> None:
        """Leave ``RUNNING``: the run, or the calls between two runs, are over, also by an error."""
        if self.phase is RUNNING:
            self.phase = IDLE if self.stop is None else Phase.STOPPING

    def void_run(self) -> None:
        """Drop the run in progress, which failed, together with a stop that was requested in it."""
        run, self.context = self.context, None
        if run is not None:
            run.fail()
            self.stop_requests = [other for other in self.stop_requests if other is not run]

    # -- a function of run_step_fn ------------------------------------------------------------------------------------

    def enter_step_fn(self) -> bool:
        """Note that a function of ``run_step_fn`` is called. Return what :meth:`leave_step_fn` has to get."""
        outside, self.in_step_fn = self.in_step_fn, True
        return outside

    def leave_step_fn(self, outside: bool) -> None:
        """Note that the function has returned or raised; ``outside`` says whether it was called by another one."""
        self.in_step_fn = outside

    def allow_last_run(self, is_allowed: bool) -> None:
        """Allow one more run after a stop, or no further one."""
        self.last_run_allowed = is_allowed

    # -- stops --------------------------------------------------------------------------------------------------------

    def agree_by(self, propose: Callable[[Stop], object]) -> None:
        """Have ``propose`` tell the other ranks of a stop, which takes effect once all have agreed on the run."""
        self.propose = propose

    def data_go_on(self) -> None:
        """Note that there is an item after the end of an outermost loop: of another one, which was open meanwhile."""
        self.data_have_ended = False

    def data_ended(self) -> None:
        """Note that the outermost ``until_stop`` has no more items."""
        self.data_have_ended = True

    def request(self, run: RunInProgress) -> None:
        """Take a hook's request to stop after ``run``; if that run is over, after the one in progress."""
        if not run.void:
            self.stop_requests.append(run)
            if run is not self.context:
                self.set_pending()

    def request_by_caller(self, reason: str) -> None:
        """Take the caller's request to stop: after the run in progress, or now. Any thread may call this."""
        if self.phase is RUNNING:
            self.request(CallerRequest(reason))
        elif threading.get_ident() == self._thread:
            self.propose_stop(reason, StoppedBy.CALLER)
        else:
            self.propose_stop(reason, StoppedBy.THREAD)

    def stop_as_requested(self) -> None:
        """Stop for the first reason that a hook gave, now that its run is over."""
        self.propose_stop(self.stop_requests[0].why_stopped, StoppedBy.HOOK)

    def take_up_requests(self) -> None:
        """Stop if a hook asked for it after its run was over, or if a signal did.

        Requests stay in the list, so the same stop may be proposed again. It has no effect: only the first reason
        counts, and with several ranks the agreement opens no round after a stop.
        """
        for run in self.stop_requests:
            if run is not self.context:
                self.propose_stop(run.why_stopped, StoppedBy.HOOK)
        if self.signal is not None:
            self.propose_stop(f"signal {self.signal}", StoppedBy.SIGNAL)
        self._take_up_stop()

    def propose_stop(self, reason: str, by: StoppedBy) -> None:
        """Make no further run; with several ranks, propose it, and stop once all of them have agreed on the run."""
        if self.propose is None or self.phase is Phase.CLOSED:
            self.decide(Stop(reason, by))
        else:
            self.propose(Stop(reason, by))

    def decide(self, stop: Stop) -> None:
        """Make no further run. Only the first reason counts. Any thread may call this."""
        # With several ranks, all make the same last run.
        by_thread = stop.by in (StoppedBy.THREAD, StoppedBy.COORDINATOR) and self.propose is None
        self.last_run_allowed = by_thread and (self.last_run_allowed or self.stop is None)
        if self.stop is None:
            self.stop = stop
            self.set_pending()
        self._take_up_stop()

    def _take_up_stop(self) -> None:
        # Another thread must not overwrite a state that the training thread sets at the same time.
        if self.stop is not None and self.phase is IDLE and threading.get_ident() == self._thread:
            self.phase = Phase.STOPPING

    def forget_stop_of_session(self) -> None:
        """Drop a stop that a thread of the session asked for: the next session has other threads."""
        if self.stop is not None and self.stop.by is StoppedBy.COORDINATOR:
            self.stop, self.last_run_allowed = None, False
            if self.phase is Phase.STOPPING:
                self.phase = IDLE

    def end_cleanly(self, error: StopIteration) -> None:
        """Make no further run because of ``error``, which came where no code of the script can catch it."""
        self.run_is_over()
        self.decide(Stop(brief(error), StoppedBy.ERROR))

    def fail(self, error: BaseException, cause: BaseException | None = None) -> None:
        """End the loop because of ``error``, after which no run can be made, even if the script catches it.

        ``cause`` is the error of this rank that has ended the loop, if that is what ``error`` says.
        """
        self.run_is_over()
        self.failure, self.phase = error, Phase.FAILED
        self.note_open(False)
        self.decide(Stop(brief(error if cause is None else cause), StoppedBy.ERROR))

    def fail_to_begin(self, error: BaseException) -> None:
        """Note that the loop was not created because of ``error``. ``StopIteration`` is no clean end before a run."""
        self.failure = error

    def close(self, error: BaseException | None) -> None:
        """Close the loop, because of ``error`` if one left the ``with`` block; exactly ``StopIteration`` is clean."""
        self.phase = Phase.CLOSED
        self.note_open(False)
        if error is not None:
            self.decide(Stop(brief(error), StoppedBy.ERROR))
        if self.failure is None and type(error) is not StopIteration:
            self.failure = error
        self.decide(Stop(self.reason or "closed", StoppedBy.END))

    def refuse(self, call: str, raise_thread_error: Callable[[], object]) -> None:
        """Raise the reason why no run can be made, except for the one run that is allowed after a thread's stop.

        Args:
            call: what the error names: ``"run()"``.
            raise_thread_error: raises the error of a background thread, if one failed.

        Raises:
            LifecycleError: a run is in progress, or the loop has stopped, failed or is closed.
        """
        self.check_may_call(call)
        if not self.last_run_allowed:
            raise_thread_error()
            raise LifecycleError(
                f"{call} was called after a stop ({self.reason}): check should_stop() first, or iterate with "
                "until_stop()"
            )
        self.last_run_allowed = self.in_step_fn  # whose function may make several runs
        self.set_pending()  # so that the end of that run, if it is idle, leaves the loop stopped

    def check_may_call(self, call: str) -> None:
        """Raise the reason why ``call`` cannot be made now, unless that is a stop."""
        if self.phase is RUNNING:
            raise LifecycleError(
                f"{call} was called inside a run: a step, a hook or the body of step() cannot start another; "
                "session.run(fetches) evaluates fetches without a step"
            )
        self.check_not_ended(call)

    def check_not_ended(self, call: str) -> None:
        """Raise the reason why no run can be made any more, even if the script has caught it before.

        Raises:
            PeerError: another rank has failed, or this one alone.
            StopIteration: one of a subclass, which an iteration could not raise.
            LifecycleError: the loop is closed, or has failed in another way. The message names ``call``.
        """
        if self.phase is Phase.CLOSED:
            raise LifecycleError(f"{call} was called on a closed loop: make a new one")
        if isinstance(self.failure, PeerError | StopIteration):
            raise self.failure
        if self.failure is not None:
            raise LifecycleError(
                f"{call} was called after a recovery that failed with {brief(self.failure)}: the loop has ended, "
                "make a new one"
            ) from self.failure

    @property
    def reason(self) -> str | None:
        """Who ended the loop, and why: ``"StopAtStepHook: step 1000"`` or ``"data ended"``."""
        if self.stop is not None:
            return self.stop.reason
        return "data ended" if self.data_have_ended else None

    @property
    def is_between_runs(self) -> bool:
        """Whether hooks can be called: no run is in progress, and the loop has not ended."""
        return self.phase is IDLE or self.phase is Phase.STOPPING

    @property
    def by_signal(self) -> bool:
        """Whether a signal stopped the loop, on this rank or on another one."""
        return self.stop is not None and self.stop.by is StoppedBy.SIGNAL

    # -- signals ------------------------------------------------------------------------------------------------------

    @property
    def signal(self) -> str | None:
        """The name of the first signal that asked to stop."""
        return self.signals.received

    def take_signal_of_another_rank(self) -> None:
        """Have the signal that stopped the loop delivered here too, when it closes, if another rank has received it.

        Otherwise a batch system that signals one process would end that one alone, and the others would go on after the
        loop, with a model that is not trained to its end.
        """
        if self.by_signal and self.signal is None and self.stop is not None:
            _, name, *_ = self.stop.reason.split()  # "signal SIGTERM (rank 1)"
            self.signals.deliver_too(name)

    def wait_for_signal(self, secs: float) -> None:
        """Wait for ``secs`` seconds, or until a signal arrives."""
        self.signals.wait(secs)

    def log_before_delivery(self, error: BaseException | None, others: list[BaseException]) -> int:
        """Log the errors if a signal is about to be delivered, because that may end the process.

        Return how many of ``others`` were logged.
        """
        if not self.signals.undelivered:
            return 0
        for each in others if error is None else [error, *others]:
            logger.error("an error, logged now because signal %s may end the process", self.signal, exc_info=each)
        return len(others)

    def is_due_to_signal(self, error: BaseException) -> bool:
        """Return whether ``error``, out of iterating over the data, may be due to a signal, which ends the loop.

        A signal to the process group also reaches the workers of a DataLoader. One of them may end first, so this waits
        a short time for the signal.
        """
        return self.signals.wait_if_lost(error, _LOST_WORKER_SECS)

    def defer_lost_workers(self) -> None:
        """Keep the death of a DataLoader worker from interrupting a step or a save."""
        self.signals.defer_lost_workers()
