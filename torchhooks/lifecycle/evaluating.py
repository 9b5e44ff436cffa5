"""Fetches that are evaluated only when they are due, and putting back what an evaluation disturbs."""

from __future__ import annotations

import operator
from typing import Any

from torchhooks.checkpoints.state import SessionLike, modules_of
from torchhooks.checkpoints.undo import Undo
from torchhooks.common.timers import Timer
from torchhooks.fetches.fetch import ComposedFetch, accumulated_parts, watched_names
from torchhooks.ranks.dtensors import reshard


def undisturbed(session: SessionLike) -> Undo:
    """Capture what an evaluation may disturb in ``session``: random states, gradients and the training mode."""
    modules = modules_of(session)
    groups = [] if session.optimizer is None else session.optimizer.param_groups
    own = [(module, [*module.parameters()]) for module in modules]
    parameters = [*(p for _, each in own for p in each), *(p for group in groups for p in group["params"])]

    def put_back_shards() -> None:
        for module, before in own:
            if any(map(operator.is_not, before, module.parameters())):
                reshard(module)  # the forward pass of the evaluation has put whole parameters in place of DTensors

    return Undo().random_states().gradients(parameters).add("shards", put_back_shards).modes(modules)


class IfDue(ComposedFetch):
    """A fetch that is evaluated only if ``timer`` triggers after the step was counted, because a run may count no step.

    A hook requests it in a run that may be due, and looks at :attr:`evaluated` to learn whether the run was.
    """

    is_fixed = False

    session: SessionLike
    """The session, which the hook sets in ``after_create_session``."""

    def __init__(self, fetch: Any, timer: Timer) -> None:
        self.watched_names = watched_names(fetch)
        self.accumulated_parts = accumulated_parts(fetch)
        self.at_once = False
        """Whether the next run is due, whatever the timer says."""
        self.evaluated = False
        """Whether the fetch was evaluated in the last run that requested it."""
        self._fetch = fetch
        self._timer = timer

    @property
    def fetch(self) -> Any:
        self.evaluated = self.at_once or self._timer.should_trigger_for_step(self.session.global_step)
        return self._fetch if self.evaluated else ()

    def compose(self, value: Any) -> Any:
        return value
