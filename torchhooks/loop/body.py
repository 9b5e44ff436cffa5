"""A run whose step is the body of a ``with`` statement: what :meth:`torchhooks.MonitoredLoop.step` returns."""

from __future__ import annotations

from types import TracebackType

from torchhooks.common.errors import LifecycleError, add_note, brief
from torchhooks.common.log import logger
from torchhooks.lifecycle.hook import NO_KWARGS
from torchhooks.loop.boundaries import Boundaries
from torchhooks.loop.recoveries import Recoveries
from torchhooks.loop.runner import Run, Runner
from torchhooks.loop.until_stop import DataLoops
from torchhooks.progress.loop_state import IDLE, RUNNING
from torchhooks.progress.training_state import TrainingState


class Body:
    """A context manager that begins a run when it is entered and finishes the run when it is left.

    All runs of a loop share one object, because creating one for each run would double the cost of an idle run. The
    loop sets :attr:`offered` whenever it returns the object, which can then be entered once.
    """

    def __init__(
        self, training: TrainingState, runner: Runner, boundaries: Boundaries, recoveries: Recoveries, data: DataLoops
    ) -> None:
        self._training, self._runner, self._data = training, runner, data
        self._boundaries, self._recoveries = boundaries, recoveries
        self._outputs: dict[str, object] | None = None  # of the body in progress
        self._run: Run | None = None  # the run in progress, if a hook was called before the body
        self.offered = False
        """Whether the loop has returned this object and it has not been entered since."""

    @property
    def global_step(self) -> int:
        """The global step of the loop."""
        return self._training.global_step

    def __enter__(self) -> dict[str, object]:
        state = self._training.loop_state
        if not self.offered or state.phase is not IDLE or state.stop is not None:
            self._check_entry()
        self.offered = False
        state.phase = RUNNING
        try:
            self._run = self._runner.begin(None, NO_KWARGS)
            outputs: dict[str, object] = {}
            self._outputs = outputs
            return outputs
        except BaseException as error:
            if not self._recoveries.recover_or_leave(error, made_again=False):
                raise
        # Unlike an error of the body, one of a hook before it leaves the run to be begun again.
        self.offered = True
        return self.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        outputs, self._outputs = self._outputs, None
        if error is not None or outputs is None:
            return self._failed(error, outputs)
        run, self._run = self._run, None
        try:
            self._runner.finish(run, outputs)
            state = self._training.loop_state
            # Read only now that the run is counted, as in MonitoredLoop.run.
            if not state.pending:
                state.phase = IDLE
                return False
            self._boundaries.end_run()
        except BaseException as failure:
            if not self._recovered(failure):
                raise
        else:
            self._boundaries.after_run()
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
        self._abandon_run(unfinished if error is None else error)
        self._training.loop_state.run_is_over()
        return unfinished if error is None else None

    def _check_entry(self) -> None:
        """Raise the reason why no run can begin here, unless one is allowed after a thread's stop."""
        if not self.offered and self._training.loop_state.phase is not RUNNING:
            raise LifecycleError(
                "the object that step() returned was entered twice: write with loop.step() as outputs for each run"
            )
        self._data.refuse_run("step()")

    def _failed(self, error: BaseException | None, outputs: dict[str, object] | None) -> bool:
        """End the run that ``error`` interrupted, and return whether the loop has recovered from it."""
        if error is None or outputs is None:
            return False  # the loop was closed before, and has raised an error about this body
        self._abandon_run(error)
        if type(error) is GeneratorExit:  # Python drops it without a message
            logger.error(
                "a body of step() was not finished, because the generator that contains it was closed: the run does "
                "not count"
            )
        return self._recovered(error)

    def _recovered(self, error: BaseException) -> bool:
        """Recover from ``error``, or leave it to the script; return which."""
        if not self._recoveries.recover_or_leave(error, made_again=False):
            return False
        logger.warning(
            "the run that failed is not made again, because only a step function can be called again: the loop "
            "continues after the body of step(), at global step %d",
            self.global_step,
        )
        return True

    def _abandon_run(self, error: BaseException) -> None:
        """Forget the run that ``error`` interrupted. If what recorded it cannot be removed, note that on ``error``."""
        run, self._run = self._run, None
        try:
            self._runner.abandon(run)
        except BaseException as other:
            add_note(error, f"torchhooks: and while the body was left after this: {brief(other)}")
