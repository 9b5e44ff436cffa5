"""Fetches for the norms of a model's gradients and parameters.

Each is computed on the device by torch's fused operators, only in the runs in which a hook asks for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


# Cached, so that several hooks that ask for the same norm share one value: equal fetches are evaluated once in a run.
@functools.cache
def grad_norm(norm_type: float = 2.0) -> Callable[..., Any]:
    """Return a fetch for the norm of all gradients of the model, as one vector.

    >>> hook = LoggingTensorHook({"gradient": grad_norm(), "largest": grad_norm(float("inf"))}, every_n_iter=4)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    gradient = ..., largest = ...
    gradient = ..., largest = ... (... sec)

    Fetches are evaluated after the step, so these are the gradients that the step leaves: clipped, if it clips them.
    The value is ``None`` if there is no gradient, as after ``optimizer.zero_grad()``: call it first in the step.

    Args:
        norm_type: the order of the norm, such as 2 or ``float("inf")``.

    Returns:
        A fetch, whose value is a tensor without dimensions, or ``None``. It is computed on the device of the model.
    """

    def grad_norm(model: torch.nn.Module) -> Any:
        return _norm([each.grad for each in model.parameters() if each.grad is not None], norm_type)

    return grad_norm


@functools.cache
def param_norm(norm_type: float = 2.0) -> Callable[..., Any]:
    """Return a fetch for the norm of all parameters of the model, as one vector.

    >>> model = torch.nn.Linear(4, 1, bias=False)
    >>> weight = torch.nn.init.ones_(model.weight)
    >>> Session(model).run(param_norm())
    tensor(2.)

    In a hook, it is a fetch like any other: ``LoggingTensorHook({"norm": param_norm()}, every_n_iter=100)``. Fetches
    are evaluated after the step, so the norm is that of the updated parameters. It is computed on the device of the
    model.

    Args:
        norm_type: the order of the norm, such as 2 or ``float("inf")``.

    Returns:
        A fetch, whose value is a tensor without dimensions; ``None`` for a model without parameters.
    """

    def param_norm(model: torch.nn.Module) -> Any:
        return _norm(list(model.parameters()), norm_type)

    return param_norm


def _norm(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor | None:
    dense = [each.coalesce().values() if each.is_sparse else each for each in tensors]
    return torch.nn.utils.get_total_norm(dense, norm_type) if dense else None
