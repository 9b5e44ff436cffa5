"""Whether a loop ends, who asked for it, and why: the only object that knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torchhooks.common.errors import LifecycleError, brief
from torchhooks.common.log import logger
from torchhooks.lifecycle.signals import SignalWatch

_SIGNAL = "signal "  # how the reason begins if a signal stopped the loop
_LOST_WORKER_SECS = 2.0  # a batch system signals the processes of a job within milliseconds of each other


class Run(Protocol):
    """A run in which a stop can be requested: a ``SessionRunContext``."""

    void: bool
    """Whether the run failed, so that a stop requested in it does not count."""

    @property
    def why_stopped(self) -> str:
        """Which hook asked to stop, and why."""
        ...


@dataclass
class StopRequest:
    """A stop that the caller requested during a run, and not a hook."""

    why_stopped: str
    void: bool = False


class Ending:
    """Collects stop requests from hooks, threads and signals, and decides when they take effect.

    Args:
        signals: the signals that stop the loop.
        wake: called when a stop is requested outside the run in progress, so that the loop notices it.
    """

    def __init__(self, signals: SignalWatch, wake: Callable[[], object]) -> None:
        self._signals = signals
        self._wake = wake
        self.requests: list[Run] = []
        """The runs in which, or after which, a hook requested a stop."""
        self.stopping = False
        """Whether the loop makes no further run."""
        self.closed = False
        self.reason: str | None = None
        """Who ended the loop, and why."""
        self.failure: BaseException | None = None
        """The error that ended the loop."""
        self.busy = False
        """Whether a run is in progress."""
        self.run: Run | None = None
        """The run in progress, if a hook is called in it."""
        self.propose: Callable[[str], object] | None = None
        """With several ranks, what is called with the reason for a stop: it proposes the stop to the other ranks."""
        self.last_run_allowed = False
        """Whether one more run may be made: a thread can ask to stop after the caller looked at ``should_stop()``."""

    def request(self, run: Run) -> None:
        """Take a hook's request to stop after ``run``; if that run is over, after the one in progress."""
        if not run.void:
            self.requests.append(run)
            if run is not self.run:
                self._wake()

    def stop_as_requested(self) -> None:
        """Stop for the first reason that a hook gave, now that its run is over."""
        self.stop(self.requests[0].why_stopped)

    def void_run(self) -> None:
        """Drop the run in progress, which failed, together with a stop that was requested in it."""
        run, self.run = self.run, None
        if run is not None:
            run.void = True
            self.requests = [other for other in self.requests if other is not run]

    def notice(self) -> None:
        """Stop if a hook asked for it after its run was over, or if a signal arrived."""
        for run in self.requests:
            if run is not self.run:
                self.stop(run.why_stopped)
        if self.signal is not None:
            self.stop(f"{_SIGNAL}{self.signal}")

    def stop(self, reason: str, *, by_thread: bool = False) -> None:
        """Make no further run; with several ranks, propose it, and stop once all of them have agreed on the run."""
        if self.propose is None or self.closed:
            self.make_no_further_run(reason, by_thread=by_thread)
        else:
            self.propose(reason)

    def make_no_further_run(self, reason: str, *, by_thread: bool = False) -> None:
        """Stop here. Only the first reason counts."""
        self.last_run_allowed = by_thread and (self.last_run_allowed or not self.stopping)
        if not self.stopping:
            self.reason = reason
            self.stopping = True

    def fail(self, error: BaseException) -> None:
        """Stop because of ``error``; exactly ``StopIteration`` is a clean end."""
        if type(error) is not StopIteration:
            self.failure = error
        self.make_no_further_run(brief(error))

    def refuse(self, call: str, raise_thread_error: Callable[[], object], in_step_fn: bool) -> None:
        """Raise the reason why no run can be made, except for the one run that is allowed after a thread's stop.

        Args:
            call: what the error names: ``"run()"``.
            raise_thread_error: raises the error of a background thread, if one failed.
            in_step_fn: whether the run is one of a function passed to ``run_step_fn``, which may make several.

        Raises:
            LifecycleError: a run is in progress, or the loop has stopped, failed or is closed.
        """
        if self.busy:
            raise LifecycleError(
                f"{call} was called inside a run: a step, a hook or the body of step() cannot start another; "
                "session.run(fetches) evaluates fetches without a step"
            )
        if self.closed:
            raise LifecycleError(f"{call} was called on a closed loop: make a new one")
        if self.failure is not None:
            raise LifecycleError(
                f"{call} was called after a run that failed with {brief(self.failure)}: the loop has ended, "
                "make a new one"
            ) from self.failure
        try:
            raise_thread_error()
        except BaseException as error:
            self.failure = error
            raise
        if not self.last_run_allowed:
            raise LifecycleError(
                f"{call} was called after a stop ({self.reason}): check should_stop() first, or iterate with "
                "until_stop()"
            )
        self.last_run_allowed = in_step_fn

    @property
    def by_signal(self) -> bool:
        """Whether a signal stopped the loop, on this rank or on another one. All ranks have the same reason."""
        return self.reason is not None and self.reason.startswith(_SIGNAL)

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

    def data_ended(self) -> None:
        """Note that the outermost ``until_stop`` has no more items, which is a reason but not a stop."""
        if not self.stopping:
            self.reason = "data ended"

    def data_continues(self) -> None:
        """Forget that the data of an earlier ``until_stop`` ended: another one yields an item."""
        if not self.stopping:
            self.reason = None
