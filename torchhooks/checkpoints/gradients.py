"""Gradients that an optimizer has not used yet: what a checkpoint in the middle of an accumulation needs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

_SAMPLED = 2  # parameters at each end: to look at all of them after every step would cost as much as a small step


def register_step_post_hook(optimizer: Any, hook: Callable[..., None]) -> Any:
    """Have ``hook`` called after each completed step of ``optimizer``, or of the optimizer that it wraps."""
    try:
        return optimizer.register_step_post_hook(hook)
    except (
        AttributeError
    ):  # Accelerate's wrapper inherits the method, but has no hooks: it never calls torch's __init__
        if not hasattr(optimizer, "optimizer"):
            raise
        return register_step_post_hook(optimizer.optimizer, hook)


class Gradients:
    """The gradients of an optimizer's parameters, as long as they accumulate.

    After ``optimizer.step()`` most scripts leave the used gradients in place until the next ``zero_grad()``. They are
    not worth saving. So each step is noted, and gradients count only if they changed since the last one.

    Args:
        optimizer: watched until :meth:`close`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps = 0
        """How many steps the optimizer has made."""
        self._optimizer = optimizer
        self._used: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._handle: Any = register_step_post_hook(optimizer, self._note_step)

    def close(self) -> None:
        """Stop watching the optimizer."""
        self._handle.remove()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the accumulated gradients by the number of their parameter; ``None`` if there are none."""
        if not self._accumulate():
            return None
        return {str(i): p.grad for i, p in enumerate(self.parameters()) if p.grad is not None}

    def load_state_dict(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Set the gradients that :meth:`state_dict` returned; for ``None``, drop what has accumulated."""
        if state is None and not self._accumulate():
            return  # used gradients stay where they are: a CUDA graph may write to their memory
        for i, parameter in enumerate(self.parameters()):
            grad = None if state is None else state.get(str(i))
            parameter.grad = None if grad is None else grad.to(parameter.device, copy=True)
        self._used = []

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the optimizer, in the order of their numbers."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _sampled(self) -> list[torch.Tensor]:
        groups = self._optimizer.param_groups
        parameters = [*groups[0]["params"][:_SAMPLED], *groups[-1]["params"][-_SAMPLED:]]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _note_step(self, *_: Any) -> None:
        self.steps += 1
        # Adding to a gradient in place changes its version; a new tensor is another one.
        self._used = [(weakref.ref(grad), grad._version) for grad in self._sampled()]  # noqa: SLF001 - torch's own count of changes in place

    def _accumulate(self) -> bool:
        used = [(reference(), version) for reference, version in self._used]
        return any(all(grad is not u or grad._version != v for u, v in used) for grad in self._sampled())  # noqa: SLF001 - torch's own count of changes in place
