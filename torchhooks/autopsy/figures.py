"""Figures of a tensor: its range, its mean absolute value, and how much of it is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from torchhooks.ranks.dtensors import is_sharded

_CHUNK = 1 << 22  # elements that are looked at together, because a full device has no room for copies of a large tensor


def part_of(tensor: Any) -> torch.Tensor:
    """Return the part of ``tensor`` that this rank has."""
    if is_sharded(tensor):
        with torch.no_grad():
            return tensor.to_local()  # type: ignore[no-any-return]
    return tensor  # type: ignore[no-any-return]


def has_numbers(value: Any) -> bool:
    """Return whether ``value`` is a tensor whose elements can be NaN."""
    return (
        isinstance(value, torch.Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.layout is torch.strided
        and not (value.is_meta or value.is_nested)
        and value.numel() > 0
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements of ``tensor`` are finite. Waits for its device."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    try:
        low, high = torch.aminmax(tensor)  # one kernel; a NaN is both the least and the greatest
    except RuntimeError:  # torch cannot compare elements of this dtype, such as float8
        return bool(torch.isfinite(tensor.float()).all())
    return math.isfinite(low.item()) and math.isfinite(high.item())


def not_finite(named: list[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the tensors in ``named`` that are not finite. Waits once for the device if there is none."""
    parts = [part_of(tensor).detach() for _, tensor in named]
    try:
        if not parts or math.isfinite(torch.nn.utils.get_total_norm(parts, math.inf).item()):
            return []
    except RuntimeError:  # of a dtype that has no norm
        pass
    return [name for (name, _), part in zip(named, parts, strict=True) if not is_finite(part)]


def kind_of(tensor: torch.Tensor) -> str:
    """Return what is not finite in ``tensor``: ``"NaN"`` if anything is, or else ``"infinity"``."""
    return "NaN" if bool(torch.isnan(tensor.detach()).any()) else "infinity"


class Figures:
    """The figures of one tensor, computed where it is, and read later by :meth:`to_save`."""

    def __init__(self, tensor: Any) -> None:
        self._about: dict[str, Any] = {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        part = part_of(tensor)
        if part is not tensor:
            self._about["part"] = list(part.shape)
        self._numbers = _numbers(part.detach()) if has_numbers(part) else None
        self._count = part.numel()

    def to_save(self) -> dict[str, Any]:
        """Return the figures as plain data. Waits for the device."""
        if self._numbers is None:
            return self._about
        low, high, total, finite = self._numbers.tolist()
        known = {"min": low, "max": high, "mean_abs": total / finite} if finite else {}
        return {**self._about, **known, "not_finite": 1 - finite / self._count}


def _numbers(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the least and the greatest finite element, the sum of their absolute values, and their number."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj()).norm(dim=-1)
    try:
        rows = [_row(each) for each in _chunks(tensor)]
    except (RuntimeError, torch.OutOfMemoryError):  # the figures are not worth the training run
        return None
    table = torch.stack(rows)
    return torch.stack([table[:, 0].amin(), table[:, 1].amax(), table[:, 2].sum(), table[:, 3].sum()])


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from tensor.reshape(-1).split(_CHUNK)


def _row(values: torch.Tensor) -> torch.Tensor:
    finite = torch.isfinite(values)
    values = values.double() if values.device.type != "mps" else values.float()
    low, high = values.masked_fill(~finite, math.inf), values.masked_fill(~finite, -math.inf)
    kept = values.masked_fill(~finite, 0)
    return torch.stack([low.amin(), high.amax(), kept.abs().sum(), finite.sum().to(values.dtype)])


def figures_of(value: Any, limit: int = 8) -> list[Figures]:
    """Return the figures of the first tensors in ``value``, a tensor or a structure of tensors."""
    return [Figures(each) for each in tensors_in(value)[:limit]]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value``."""
    leaves = torch.utils._pytree.tree_leaves(value)  # noqa: SLF001 - the structures that modules and operators take
    return [each for each in leaves if isinstance(each, torch.Tensor)]
