"""``TORCHHOOKS_STOP_BEFORE``: the state before one step, in a debugger."""

from __future__ import annotations

from torchhooks.common.log import logger
from torchhooks.common.timers import NEVER, Due
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import SessionRunContext, SessionRunHook
from torchhooks.lifecycle.session import Session


class StopBefore(SessionRunHook):
    """Calls ``breakpoint()`` before the run that makes the global step ``step``, of several ranks on the chief."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._is_over = False

    def __repr__(self) -> str:
        return f"the breakpoint before step {self._step}"

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        if session.global_step >= self._step:
            self._is_over = True
            logger.warning(
                "stop_before=%d: the loop begins at step %d, and no checkpoint before it was found: it does not stop",
                *(self._step, session.global_step),
            )

    def before_run(self, run_context: SessionRunContext) -> None:
        session = run_context.session
        if self._is_over or session.global_step + 1 < self._step:
            return
        self._is_over = True
        if session.ranks.is_chief:
            self._stop(session, run_context.inputs())

    def _stop(self, session: Session, inputs: object) -> None:
        """Stop with everything that matters in a variable."""
        model, optimizer, state = session.model, session.optimizer, session.state  # noqa: F841 - for the debugger
        logger.warning("before step %d: look at model, optimizer, state, inputs and session", self._step)
        breakpoint()

    def next_due(self) -> Due:
        return NEVER if self._is_over else Due(step=self._step)
