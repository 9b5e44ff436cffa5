"""Fetches for the norms of a model's gradients and parameters.

Each is computed on the device by torch's fused operators, only in the runs in which a hook asks for it. Of a model with
DTensors, it is the norm of the whole tensors, which every rank has to request in the same run.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any

import torch

from torchhooks.common.text import shown
from torchhooks.fetches.over_ranks import ValueInParts
from torchhooks.ranks.dtensors import is_sharded, without_partial
from torchhooks.ranks.transport import all_gather


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
        norm_type: the order of the norm, more than 0, such as 2 or ``float("inf")``.

    Returns:
        A fetch, whose value is a tensor without dimensions, or ``None``. It is computed on the device of the model.

    Raises:
        ValueError: ``norm_type`` is not such a number.
    """
    _check_order(norm_type)

    def grad_norm(model: torch.nn.Module, session: Any = None) -> Any:
        return _norm([each.grad for each in model.parameters() if each.grad is not None], norm_type, session)

    return grad_norm


@functools.cache
def param_norm(norm_type: float = 2.0) -> Callable[..., Any]:
    """Return a fetch for the norm of all parameters of the model, as one vector.

    >>> model = torch.nn.Linear(4, 1, bias=False)
    >>> weight = torch.nn.init.ones_(model.weight)
    >>> Session(model).run(param_norm())
    tensor(2.)

    In a hook, it is a fetch like any other: ``LoggingTensorHook({"norm": param_norm()}, every_n_iter=100)``. Fetches
    are evaluated after the step, so the parameters are the updated ones. It is computed on the device of the
    model.

    Args:
        norm_type: the order of the norm, more than 0, such as 2 or ``float("inf")``.

    Returns:
        A fetch, whose value is a tensor without dimensions; ``None`` for a model without parameters.

    Raises:
        ValueError: ``norm_type`` is not such a number.
    """
    _check_order(norm_type)

    def param_norm(model: torch.nn.Module, session: Any = None) -> Any:
        return _norm(list(model.parameters()), norm_type, session)

    return param_norm


def _check_order(norm_type: Any) -> None:
    if isinstance(norm_type, bool) or not isinstance(norm_type, numbers.Real) or not float(norm_type) > 0:
        raise ValueError(f'norm_type={shown(norm_type)}: must be a number, more than 0, such as 2 or float("inf")')


def _norm(tensors: list[torch.Tensor], norm_type: float, session: Any) -> Any:
    dense = [each.coalesce().values() if each.is_sparse else each for each in tensors]
    if not any(map(is_sharded, dense)):
        return torch.nn.utils.get_total_norm(dense, norm_type) if dense else None
    norm = _NormOfShards(dense, norm_type)
    return norm if session is not None and session.ranks.size > 1 else norm.combined()


class _NormOfShards(ValueInParts):
    """The norm of tensors with DTensors among them, possibly of several meshes, which torch's operators do not mix."""

    def __init__(self, tensors: list[Any], norm_type: float) -> None:
        self._tensors = tensors
        self._norm_type = norm_type

    def combined(self) -> Any:
        parts: dict[Any, list[torch.Tensor]] = {}
        for tensor in self._tensors:
            where: tuple[Any, ...] = (None, ())
            if is_sharded(tensor):
                tensor = without_partial(tensor.detach())
                sharded = [i for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
                where, tensor = (tensor.device_mesh, tuple(sharded)), tensor.to_local()
            parts.setdefault(where, []).append(tensor.detach())
        return self._total([self._whole(tensors, *where) for where, tensors in parts.items()])

    def _whole(self, tensors: list[torch.Tensor], mesh: Any, sharded: tuple[int, ...]) -> torch.Tensor:
        """Return the norm of what ``tensors`` are the local parts of."""
        filled = [tensor for tensor in tensors if tensor.numel()]  # a rank may have no part of a small tensor
        norm = torch.nn.utils.get_total_norm(filled, self._norm_type) if filled else tensors[0].new_zeros(())
        for dimension in sharded:
            rows = all_gather([norm], mesh.size(dimension), mesh.get_group(dimension))
            norm = self._total([part for (part,) in rows])
        return norm

    def _total(self, norms: list[torch.Tensor]) -> Any:
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), self._norm_type)

    def __repr__(self) -> str:
        return f"the norm of {len(self._tensors)} tensors with DTensors among them"
