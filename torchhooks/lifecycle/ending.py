"""The state of a loop: whether it runs, stops, has failed or is closed, who asked for it, and why.

No other object knows. Only the training thread changes the state:

=============================  ========================================================================================
change                         where
=============================  ========================================================================================
``IDLE`` to ``RUNNING``        a run begins, or calls are made between two items, which must not begin a run
``RUNNING`` to ``IDLE``        the run is over, and no stop is decided
any to ``STOPPING``            no run is in progress, and a hook, the caller, a thread or a signal has decided to stop
any to ``FAILED``              a run, or the iteration over the data, raised an error that is not recovered from
any to ``CLOSED``              the loop is closed
``STOPPING`` to ``RUNNING``    the one run that is allowed after a thread's stop
=============================  ========================================================================================

Other threads and signal handlers only record what they ask for. A stop that one of them decides during a run takes
effect when the run is over.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torchhooks.common.errors import LifecycleError, brief
from torchhooks.common.log import logger
from torchhooks.lifecycle.signals import SignalWatch

_LOST_WORKER_SECS = 2.0  # a batch system signals the processes of a job within milliseconds of each other


class State(enum.Enum):
    """What a loop is doing."""

    IDLE = "idle"
    RUNNING = "running"
    STOPPING = "stopping"
    FAILED = "failed"
    CLOSED = "closed"


# Looking up a member of an Enum takes longer than a global, and an idle run compares the state twice.
IDLE, RUNNING = State.IDLE, State.RUNNING


class StoppedBy(enum.Enum):
    """Who decided that a loop stops."""

    HOOK = "hook"
    CALLER = "caller"
    THREAD = "thread"
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


class Run(Protocol):
    """A run in which a stop can be requested: a ``SessionRunContext``."""

    void: bool
    """Whether the run failed, so that a stop requested in it does not count."""

    @property
    def why_stopped(self) -> str:
        """Which hook asked to stop, and why."""
        ...


@dataclass
class CallerRequest:
    """A stop that the caller requested during a run, and not a hook."""

    why_stopped: str
    void: bool = False


class Ending:
    """Keeps the state of a loop, collects requests to stop, and decides when they take effect.

    Created in the training thread.

    Args:
        signals: the signals that stop the loop.
        wake: called when a stop is requested outside the run in progress, so that the loop notices it.
    """

    def __init__(self, signals: SignalWatch, wake: Callable[[], object]) -> None:
        self._signals = signals
        self._wake = wake
        self._thread = threading.get_ident()
        self.state = State.IDLE
        self.stop: Stop | None = None
        """Why the loop makes no further run, once that is decided. The state follows when no run is in progress."""
        self.failure: BaseException | None = None
        """The error that ended the loop."""
        self.run: Run | None = None
        """The run in progress, if a hook is called in it."""
        self.requests: list[Run] = []
        """The runs in which, or after which, a hook requested a stop."""
        self.data_have_ended = False
        """Whether the outermost ``until_stop`` has no more items, which is a reason but not a stop."""
        self.propose: Callable[[Stop], object] | None = None
        """With several ranks, what proposes a stop to the other ranks, instead of deciding it."""
        self.last_run_allowed = False
        """Whether one more run may be made: a thread can ask to stop after the caller looked at ``should_stop()``."""

    # -- the run in progress ------------------------------------------------------------------------------------------

    def run_is_over(self) -> None:
        """Leave ``RUNNING``: the run or the calls between two items are over."""
        if self.state is RUNNING:
            self.state = IDLE if self.stop is None else State.STOPPING

    def void_run(self) -> None:
        """Drop the run in progress, which failed, together with a stop that was requested in it."""
        run, self.run = self.run, None
        if run is not None:
            run.void = True
            self.requests = [other for other in self.requests if other is not run]

    # -- stops --------------------------------------------------------------------------------------------------------

    def request(self, run: Run) -> None:
        """Take a hook's request to stop after ``run``; if that run is over, after the one in progress."""
        if not run.void:
            self.requests.append(run)
            if run is not self.run:
                self._wake()

    def request_by_caller(self, reason: str) -> None:
        """Take the caller's request to stop: after the run in progress, or now. Any thread may call this."""
        if self.state is RUNNING:
            self.request(CallerRequest(reason))
        elif threading.get_ident() == self._thread:
            self.propose_stop(reason, StoppedBy.CALLER)
        else:
            self.propose_stop(reason, StoppedBy.THREAD)

    def stop_as_requested(self) -> None:
        """Stop for the first reason that a hook gave, now that its run is over."""
        self.propose_stop(self.requests[0].why_stopped, StoppedBy.HOOK)

    def notice(self) -> None:
        """Stop if a hook asked for it after its run was over, or if a signal did."""
        for run in self.requests:
            if run is not self.run:
                self.propose_stop(run.why_stopped, StoppedBy.HOOK)
        if self.signal is not None:
            self.propose_stop(f"signal {self.signal}", StoppedBy.SIGNAL)
        self._take_up_stop()

    def propose_stop(self, reason: str, by: StoppedBy) -> None:
        """Make no further run; with several ranks, propose it, and stop once all of them have agreed on the run."""
        if self.propose is None or self.state is State.CLOSED:
            self.decide(Stop(reason, by))
        else:
            self.propose(Stop(reason, by))

    def decide(self, stop: Stop) -> None:
        """Make no further run. Only the first reason counts. Any thread may call this."""
        by_thread = stop.by is StoppedBy.THREAD and self.propose is None  # all ranks make the same last run
        self.last_run_allowed = by_thread and (self.last_run_allowed or self.stop is None)
        if self.stop is None:
            self.stop = stop
            self._wake()
        self._take_up_stop()

    def _take_up_stop(self) -> None:
        # Another thread must not overwrite a state that the training thread sets at the same time.
        if self.stop is not None and self.state is IDLE and threading.get_ident() == self._thread:
            self.state = State.STOPPING

    def fail(self, error: BaseException) -> None:
        """End the loop because of ``error``; exactly ``StopIteration`` is a clean end."""
        self.run_is_over()
        if type(error) is not StopIteration:
            self.failure, self.state = error, State.FAILED
        self.decide(Stop(brief(error), StoppedBy.ERROR))

    def blame(self, error: BaseException) -> None:
        """Say that ``error``, of another rank, is what ended the loop. The error of this rank is its consequence."""
        self.failure, self.stop = error, Stop(brief(error), StoppedBy.ERROR)

    def close(self, error: BaseException | None) -> None:
        """Close the loop, because of ``error`` if one left the ``with`` block; exactly ``StopIteration`` is clean."""
        self.state = State.CLOSED
        if error is not None:
            self.decide(Stop(brief(error), StoppedBy.ERROR))
        if self.failure is None and type(error) is not StopIteration:
            self.failure = error
        self.decide(Stop(self.reason or "closed", StoppedBy.END))

    def refuse(self, call: str, raise_thread_error: Callable[[], object], in_step_fn: bool) -> None:
        """Raise the reason why no run can be made, except for the one run that is allowed after a thread's stop.

        Args:
            call: what the error names: ``"run()"``.
            raise_thread_error: raises the error of a background thread, if one failed.
            in_step_fn: whether the run is one of a function passed to ``run_step_fn``, which may make several.

        Raises:
            LifecycleError: a run is in progress, or the loop has stopped, failed or is closed.
        """
        if self.state is RUNNING:
            raise LifecycleError(
                f"{call} was called inside a run: a step, a hook or the body of step() cannot start another; "
                "session.run(fetches) evaluates fetches without a step"
            )
        self.check_not_ended(call)
        try:
            raise_thread_error()
        except BaseException as error:
            self.fail(error)
            raise
        if not self.last_run_allowed:
            raise LifecycleError(
                f"{call} was called after a stop ({self.reason}): check should_stop() first, or iterate with "
                "until_stop()"
            )
        self.last_run_allowed = in_step_fn

    def check_not_ended(self, call: str) -> None:
        """Raise a LifecycleError that names ``call`` if the loop has failed or is closed."""
        if self.state is State.CLOSED:
            raise LifecycleError(f"{call} was called on a closed loop: make a new one")
        if self.failure is not None:
            raise LifecycleError(
                f"{call} was called after a run that failed with {brief(self.failure)}: the loop has ended, "
                "make a new one"
            ) from self.failure

    @property
    def reason(self) -> str | None:
        """Who ended the loop, and why: ``"StopAtStepHook: step 1000"`` or ``"data ended"``."""
        if self.stop is not None:
            return self.stop.reason
        return "data ended" if self.data_have_ended else None

    @property
    def by_signal(self) -> bool:
        """Whether a signal stopped the loop, on this rank or on another one."""
        return self.stop is not None and self.stop.by is StoppedBy.SIGNAL

    # -- signals ------------------------------------------------------------------------------------------------------

    @property
    def signal(self) -> str | None:
        """The name of the first signal that asked to stop."""
        return self._signals.received

    def wait_for_signal(self, secs: float) -> None:
        """Wait for ``secs`` seconds, or until a signal arrives."""
        self._signals.wait(secs)

    def log_before_delivery(self, error: BaseException | None, others: list[BaseException]) -> int:
        """Log the errors if a signal is about to be delivered, because that may end the process.

        Return how many of ``others`` were logged.
        """
        if not self._signals.undelivered:
            return 0
        for each in others if error is None else [error, *others]:
            logger.error("an error, logged now because signal %s may end the process", self.signal, exc_info=each)
        return len(others)

    def is_due_to_signal(self, error: BaseException) -> bool:
        """Return whether ``error``, out of iterating over the data, may be due to a signal, which ends the loop.

        A signal to the process group also reaches the workers of a DataLoader. One of them may end first, so this waits
        a short time for the signal.
        """
        return self._signals.wait_if_lost(error, _LOST_WORKER_SECS)

    def defer_lost_workers(self) -> None:
        """Keep the death of a DataLoader worker from interrupting a step or a save."""
        self._signals.defer_lost_workers()
