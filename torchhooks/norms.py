"""Fetches for the norms of a model's gradients and parameters.

    SummarySaverHook(100, output_dir="runs/1", summary_op={"loss": "loss", "grad": grad_norm(), "param": param_norm()})

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

        LoggingTensorHook({"grad_norm": grad_norm()}, every_n_iter=100)

    Fetches are evaluated after the step, so these are the gradients that the step leaves: clipped, if it clips them.
    The value is ``None`` if there is no gradient, as after ``optimizer.zero_grad()``: call it first in the step.

    Args:
        norm_type: the order of the norm, such as 2 or ``float("inf")``.
    """

    def grad_norm(model: torch.nn.Module) -> Any:
        return _norm([each.grad for each in model.parameters() if each.grad is not None], norm_type)

    return grad_norm


@functools.cache
def param_norm(norm_type: float = 2.0) -> Callable[..., Any]:
    """Return a fetch for the norm of all parameters of the model, as one vector.

        SummarySaverHook(100, output_dir="runs/1", summary_op={"param_norm": param_norm()})

    Args:
        norm_type: the order of the norm, such as 2 or ``float("inf")``.
    """

    def param_norm(model: torch.nn.Module) -> Any:
        return _norm(list(model.parameters()), norm_type)

    return param_norm


def _norm(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor | None:
    dense = [each.coalesce().values() if each.is_sparse else each for each in tensors]
    return torch.nn.utils.get_total_norm(dense, norm_type) if dense else None
