"""Fetches that are evaluated only when they are due, and putting back what an evaluation disturbs."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from torchhooks.common.random_states import random_states, set_random_states
from torchhooks.common.timers import Timer
from torchhooks.fetches.fetch import ComposedFetch, accumulated_parts, watched_names
from torchhooks.ranks.dtensors import reshard


class Trained(Protocol):
    """The part of a session that an evaluation can disturb, and its global step."""

    @property
    def model(self) -> torch.nn.Module | None: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...

    @property
    def state(self) -> Mapping[str, Any]: ...

    @property
    def global_step(self) -> int: ...


class Undisturbed:
    """What an evaluation may disturb in ``session``, to be put back: random states, training mode and gradients.

    Of the model and of the modules in the loop's state, such as an average of the weights.
    """

    def __init__(self, session: Trained) -> None:
        groups = [] if session.optimizer is None else session.optimizer.param_groups
        given = [session.model, *session.state.values()]
        self._modules = [(each, [*each.parameters()]) for each in given if isinstance(each, torch.nn.Module)]
        own = [parameter for _, parameters in self._modules for parameter in parameters]
        self._random = random_states()
        self._modes = [(module, module.training) for each, _ in self._modules for module in each.modules()]
        self._gradients = [(p, p.grad) for p in [*own, *(p for group in groups for p in group["params"])]]

    def evaluation_mode(self) -> None:
        """Put the modules into evaluation mode."""
        for module, _ in self._modules:
            module.eval()

    def restore(self) -> None:
        self.restore_modes()
        for module, parameters in self._modules:
            if any(map(operator.is_not, parameters, module.parameters())):
                reshard(module)  # the forward pass of the evaluation has put whole parameters in place of DTensors
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        set_random_states(self._random)

    def restore_modes(self) -> None:
        for module, training in self._modes:
            if module.training is not training:
                module.train(training)  # not only the attribute: some modules merge or freeze weights in train()
        for module, training in self._modes:
            module.training = training  # train() of a module changes those inside of it


class IfDue(ComposedFetch):
    """A fetch that is evaluated only if ``timer`` triggers after the step was counted, because a run may count no step.

    A hook requests it in a run that may be due, and looks at :attr:`evaluated` to learn whether the run was.
    """

    is_fixed = False

    session: Trained
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
