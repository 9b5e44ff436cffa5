"""A run whose step is the body of a ``with`` statement: what :meth:`torchhooks.MonitoredLoop.step` returns."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any

from torchhooks.common.errors import LifecycleError, add_note, brief
from torchhooks.common.log import logger
from torchhooks.lifecycle.ending import IDLE, RUNNING
from torchhooks.loop.between_runs import BetweenRuns
from torchhooks.loop.run import Begun
from torchhooks.position.progress import NO_OUTPUTS

_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


class Body:
    """A context manager that begins a run when it is entered and finishes the run when it is left.

    All runs of a loop share one object, because creating one for each run would double the cost of an idle run. The
    loop sets :attr:`offered` whenever it returns the object, which can then be entered once.

    Args:
        between_runs: ends a run, and recovers from errors.
        steps_per_run: 0 if the optimizer's steps are counted.
    """

    def __init__(self, between_runs: BetweenRuns, steps_per_run: int) -> None:
        self._between_runs = between_runs
        self._ending, self._schedule, self._sessions = between_runs.ending, between_runs.schedule, between_runs.sessions
        self._steps_per_run = steps_per_run
        self._outputs: dict[str, Any] | None = None  # of the body in progress
        self._begun: Begun | None = None  # the run in progress, if a hook was called before the body
        self.offered = False
        """Whether the loop has returned this object and it has not been entered since."""

    @property
    def global_step(self) -> int:
        """The global step of the loop."""
        return self._sessions.progress.global_step

    def __enter__(self) -> dict[str, Any]:
        ending, schedule = self._ending, self._schedule
        progress = schedule.progress
        if not self.offered or ending.state is not IDLE or ending.stop is not None:
            self._check_entry()
        self.offered = False
        ending.state = RUNNING
        try:
            # Fast path: no hook is due before the body. Inlined because it runs on every step, as in MonitoredLoop.run.
            if (
                progress.global_step < schedule.idle_step
                and schedule.runs < schedule.idle_runs
                and (schedule.moment is None or time.monotonic() < schedule.moment)
            ):
                progress.outputs = NO_OUTPUTS  # releases the last outputs before the body needs the memory
            else:
                self._begun = self._sessions.lifecycle.begin_body()
            outputs: dict[str, Any] = {}
            self._outputs = outputs
            return outputs
        except BaseException as error:
            if not self._between_runs.recovered_for_next_run(error):
                raise
        # Unlike an error of the body, one of a hook before it leaves the run to be begun again.
        self.offered = True
        return self.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        outputs, self._outputs = self._outputs, None
        if error is not None or outputs is None:
            return self._failed(error, outputs)
        ending, schedule, lifecycle = self._ending, self._schedule, self._sessions.lifecycle
        try:
            begun = self._begun
            if begun is None:
                progress = schedule.progress
                progress.outputs = outputs
                progress.global_step = step = progress.global_step + self._steps_per_run
                # Fast path: no hook is due after the body either.
                if step <= schedule.idle_step and not (
                    schedule.checks_after
                    and (
                        (schedule.moment_after is not None and time.monotonic() >= schedule.moment_after)
                        or (schedule.watchers and schedule.noticed_by(outputs))
                        or (schedule.accumulates and schedule.accumulated.add(outputs, (), {}))
                    )
                ):
                    schedule.runs += 1
                else:
                    lifecycle.finish(None, _NO_KWARGS, outputs)
            else:
                self._begun = None
                lifecycle.finish_body(begun, outputs)
            if not schedule.pending:
                ending.state = IDLE
                return False
            self._between_runs.end_run()
        except BaseException as failure:
            if not self._recovered(failure):
                raise
        else:
            ending.run_is_over()
            if schedule.pending:
                self._between_runs.recover_from_thread()
        return False

    def abandon(self, error: BaseException | None) -> LifecycleError | None:
        """Drop a body that was not left before its loop was closed, because of ``error`` if that is given.

        Return the error that says so, unless there is another one.
        """
        if self._outputs is None:
            return None
        self._outputs = None
        unfinished = LifecycleError(
            "the loop was closed inside a body of step(), whose run does not count: leave the body before the loop, "
            "with a with statement around it"
        )
        self._stop_recording(unfinished if error is None else error)
        self._ending.run_is_over()
        return unfinished if error is None else None

    def _check_entry(self) -> None:
        """Raise the reason why no run can begin here, unless one is allowed after a thread's stop."""
        if not self.offered and self._ending.state is not RUNNING:
            raise LifecycleError(
                "the object that step() returned was entered twice: write with loop.step() as outputs for each run"
            )
        self._between_runs.refuse("step()")

    def _failed(self, error: BaseException | None, outputs: dict[str, Any] | None) -> bool:
        """End the run that ``error`` interrupted, and return whether the loop has recovered from it."""
        if error is None or outputs is None:
            return False  # the loop was closed before, and has raised an error about this body
        self._stop_recording(error)
        if type(error) is GeneratorExit:  # Python drops it without a message
            logger.error(
                "a body of step() was not finished, because the generator that contains it was closed: the run failed, "
                "and the loop has ended"
            )
        if type(error) is StopIteration:  # of the caller's own next(), for the caller's own try
            self._ending.void_run()
            self._sessions.lifecycle.abandon()
            self._ending.run_is_over()
            return False
        return self._recovered(error)

    def _recovered(self, error: BaseException) -> bool:
        """Recover from ``error``, or end the loop; return which."""
        if not self._between_runs.recovered_for_next_run(error):
            return False
        logger.warning(
            "the run that failed is not made again, because only a step function can be called again: the loop "
            "continues after the body of step(), at global step %d",
            self.global_step,
        )
        return True

    def _stop_recording(self, error: BaseException) -> None:
        """Remove what watches and traces the body; if that fails, note it on ``error``."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.recording is not None:
            try:
                begun.recording.stop()
            except BaseException as other:
                add_note(error, f"torchhooks: and while the body was left after this: {brief(other)}")
