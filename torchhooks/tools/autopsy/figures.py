"""Figures of a tensor: its range, its mean absolute value, and how much of it is not finite."""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils import get_total_norm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchhooks.ranks.ranks import is_sharded

MOST_FIGURES = 8
"""Of how many tensors figures are kept, of the arguments or results of one call."""

_CHUNK = 1 << 22  # elements that are looked at together, because a full device has no room for copies of a large tensor


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` that are in the memory of this rank, as a tensor of a plain kind.

    Of a DTensor, its local part; of a sparse or nested tensor, its values; of another wrapper, the first tensor in it.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested:
        return tensor
    # to_local() and values() would add nodes to the autograd graph of the step.
    with torch.no_grad():
        if is_sharded(tensor):
            return tensor.to_local()  # type: ignore[attr-defined, no-any-return]
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            return part_of(getattr(tensor, names[0]))
        if tensor.layout is torch.sparse_coo:
            return tensor._values()  # noqa: SLF001 - values() asks for a tensor that was coalesced
        if tensor.is_nested or tensor.layout in _COMPRESSED:
            return tensor.values()
    return tensor


_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def has_numbers(value: torch.Tensor) -> bool:
    """Return whether the elements of ``value`` can be NaN, and can be looked at."""
    return (
        (value.is_floating_point() or value.is_complex())
        and value.layout is torch.strided
        and not (value.is_meta or value.is_nested)
        and value.numel() > 0
        and not value._is_zerotensor()  # noqa: SLF001 - of jvp: it has no memory, and to read it ends the process
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)  # noqa: SLF001 - of vmap: it has no values
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements of ``tensor`` are finite. Waits for its device."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        if cmath.isfinite(tensor.sum().item()):  # one kernel; a sum of finite numbers may be infinite
            return True
        return bool(torch.isfinite(tensor).all())
    except RuntimeError:  # torch cannot add elements of this dtype, such as float8
        return bool(torch.isfinite(tensor.float()).all())


def not_finite(named: list[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the tensors in ``named`` that are not finite. Waits once for the device if there is none."""
    parts = [part_of(tensor).detach() for _, tensor in named]
    try:
        if any(part.device.type != "cpu" for part in parts) and math.isfinite(get_total_norm(parts, math.inf).item()):
            return []
    except RuntimeError:  # of a dtype that has no norm
        pass
    return [name for (name, _), part in zip(named, parts, strict=True) if not is_finite(part)]


def kind_of(tensor: torch.Tensor) -> str:
    """Return what is not finite in ``tensor``: ``"NaN"`` if anything is, or else ``"infinity"``."""
    return "NaN" if bool(torch.isnan(tensor.detach()).any()) else "infinity"


@dataclass(frozen=True)
class Figures:
    """The range of one tensor, of its finite elements, and how much of it is not finite."""

    shape: list[int]
    dtype: str
    part: list[int] | None = None
    """The shape of this rank's part, on which the numbers below are, of a DTensor."""
    min: float | None = None
    max: float | None = None
    mean_abs: float | None = None
    not_finite: float | None = None
    """The share of elements that are not finite; ``None`` of elements that always are, such as integers."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Figures:
        """Return the figures of ``tensor``, without numbers if torch cannot compute them. Waits for its device."""
        local = part_of(tensor)
        shape, dtype = list((local if tensor.is_nested else tensor).shape), str(tensor.dtype).removeprefix("torch.")
        part = list(local.shape) if local is not tensor and is_sharded(tensor) else None
        try:
            numbers = _numbers(local.detach()) if has_numbers(local) else None
        except Exception:  # a full device, or a tensor of an odd kind: the figures are not worth the training run
            numbers = None
        if numbers is None:
            return cls(shape, dtype, part)
        low, high, total, finite = numbers
        share = 1 - finite / local.numel()
        return (
            cls(shape, dtype, part, low, high, total / finite, share)
            if finite
            else cls(shape, dtype, part, not_finite=share)
        )


def figures_of(value: object) -> list[Figures]:
    """Return the figures of the first tensors in ``value``, a tensor or a structure of tensors."""
    return [Figures.of(each) for each in tensors_in(value)[:MOST_FIGURES]]


def _numbers(tensor: torch.Tensor) -> list[float]:
    """Return the least and the greatest finite element, the sum of their absolute values, and their number."""
    if tensor.is_complex():
        # Complex numbers have no order, so their absolute values count. view_as_real() refuses a lazy conjugate.
        tensor = torch.view_as_real(tensor.resolve_conj()).norm(dim=-1)
    # The usual case takes two kernels and no copy: if the sum is finite, so is each element.
    if tensor.dtype in (torch.float32, torch.float64) and tensor.numel() <= _CHUNK:
        total = torch.linalg.vector_norm(tensor, 1).item()
        if math.isfinite(total):
            low, high = torch.aminmax(tensor)
            return [low.item(), high.item(), total, tensor.numel()]
    table = torch.stack([_row(chunk) for chunk in tensor.reshape(-1).split(_CHUNK)])
    return torch.stack([table[:, 0].amin(), table[:, 1].amax(), table[:, 2].sum(), table[:, 3].sum()]).tolist()


def _row(values: torch.Tensor) -> torch.Tensor:
    finite = torch.isfinite(values)
    # The sum of a few large float16 is more than a float16 can hold. MPS has no float64.
    values = values.double() if values.device.type != "mps" else values.float()
    low, high = values.masked_fill(~finite, math.inf), values.masked_fill(~finite, -math.inf)
    kept = values.masked_fill(~finite, 0)
    return torch.stack([low.amin(), high.amax(), kept.abs().sum(), finite.sum().to(values.dtype)])


def values_in(value: object) -> list[torch.Tensor | np.ndarray]:
    """Return the tensors and the arrays of NumPy in ``value``."""
    leaves = torch.utils._pytree.tree_leaves(value)  # noqa: SLF001 - the structures that modules and operators take
    return [each for each in leaves if isinstance(each, torch.Tensor | np.ndarray)]


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors in ``value``, and its arrays of floating-point numbers as tensors."""
    if isinstance(value, torch.Tensor):  # what nearly all operators return
        return [value]
    found = (_as_tensor(each) if isinstance(each, np.ndarray) else each for each in values_in(value))
    return [each for each in found if each is not None]


def _as_tensor(array: np.ndarray) -> torch.Tensor | None:
    """Return ``array`` as a tensor, with the same memory if possible; ``None`` if no element of it can be NaN."""
    if array.dtype.name not in ("float16", "float32", "float64", "complex64", "complex128"):
        return None
    # from_numpy() refuses negative strides and a foreign order of bytes, and warns of an array that is only read.
    is_shared = array.flags.writeable and array.dtype.isnative and min(array.strides, default=0) >= 0
    return torch.from_numpy(array if is_shared else array.astype(array.dtype.newbyteorder("="), "C"))
