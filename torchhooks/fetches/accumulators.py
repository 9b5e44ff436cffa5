"""Accumulators of running fetches, on the host and on devices. ``accumulated`` says what is accumulated."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchhooks.common.requester import Requester
from torchhooks.common.text import shown
from torchhooks.common.trees import as_snapshot
from torchhooks.fetches.fetch import describe

MOST_NUMBERS = 4096
"""How many numbers on the host wait at most until they are added up."""

_ROWS = 256  # the same on a device, in runs; more would hardly save launches

_Number = Any  # int, float or complex
_Partial = tuple[Any, Any, int]
"""The sum and the maximum of some runs, as far as they are needed, and the number of these runs."""


class Accumulator:
    """The total of one running fetch of one hook."""

    def __init__(self, op: str, source: Source, name: str) -> None:
        self.op = op
        self.source = source
        self.name = name
        """The name under which a checkpoint has it."""
        # A total is never changed in place, so that it can be reported, saved and put back without a copy.
        self.total: Any = None
        self.count = 0
        self.reported: tuple[Any, int] = (None, 0)
        """The total and the count of the last report."""
        self.reported_at = -1
        """The global step of the last report."""
        self.made_again = False
        """Whether the loop is making runs again that were reported before a recovery."""
        self._before: tuple[Any, ...] | None = None  # the last report, for taking it back

    def add(self, partial: _Partial) -> None:
        part = partial[1] if self.op == "max" else partial[0]
        total = self.total
        if total is None:
            self.total = part
        else:
            if isinstance(total, torch.Tensor) and isinstance(part, torch.Tensor) and total.device != part.device:
                total = total.to(part.device, non_blocking=True)  # restored from a checkpoint, so it is on the CPU
            self.total = _maximum(total, part) if self.op == "max" else total + part
        self.count += partial[2]

    def reset(self) -> None:
        self.total, self.count, self.made_again = None, 0, False

    def report(self, step: int) -> Any:
        """Return the value and start over. Without a run since the last report, return that again."""
        if self.count:
            self._before = self.total, self.count, self.made_again, self.reported, self.reported_at
            self.reported, self.reported_at = (self.total, self.count), step
            self.reset()
        total, count = self.reported
        if not count:
            return None
        return self.source.as_value(total / count if self.op == "mean" else total, self.op)

    def keep(self) -> None:
        """Take back the report of the current run."""
        if self._before is not None and not self.count:
            self.total, self.count, self.made_again, self.reported, self.reported_at = self._before
            self._before = None

    def state_dict(self) -> dict[str, Any]:
        source = self.source
        shape = None if source.shape is None else list(source.shape)
        return {"total": self.total, "count": self.count, "dtype": source.dtype, "shape": shape}

    def load_state_dict(self, state: Mapping[str, Any] | None, step: int) -> None:
        self.reset()
        self.made_again = self.reported_at > step
        if state is None or not state["count"]:
            return
        total = state["total"]
        # A number on the host can be added to one on any device without waiting.
        self.total = total.item() if isinstance(total, torch.Tensor) and not total.dim() else total
        self.count = state["count"]
        if self.source.shape is None:
            self.source.dtype, self.source.shape = state["dtype"], torch.Size(state["shape"])


class Source:
    """A fetch whose values are accumulated: once, however many hooks ask for its mean, sum or maximum."""

    def __init__(self, fetch: Any, requester: Requester) -> None:
        self.fetch = fetch
        self.requester = requester
        """The first hook that asked for it, for error messages."""
        self.name = fetch if isinstance(fetch, str) else None
        self.accumulators: list[Accumulator] = []
        self.is_number = False
        """Whether the values so far were numbers on the host: a fast path."""
        self.dtype: torch.dtype | None = None
        """That of the first value, if it is a tensor."""
        self.shape: torch.Size | None = None
        """That of all values; ``None`` before the first."""
        self.numbers: list[_Number] = []
        self.tensors: _Partial = (None, None, 0)

    @property
    def ops(self) -> set[str]:
        return {"max" if accumulator.op == "max" else "sum" for accumulator in self.accumulators}

    def checked(self, value: Any) -> Any:
        """Return ``value`` as a number or a detached tensor, if it can be added to the earlier values."""
        if isinstance(value, (np.ndarray, np.generic)):
            value = torch.as_tensor(value)
        dtype, shape = None, torch.Size()
        if hasattr(value, "full_tensor"):  # a DTensor, whose full value is a collective call
            if not all(placement.is_replicate() for placement in value.placements):
                raise TypeError(
                    f"{self.asked} is over a DTensor, which has a part on each rank: give the part of this rank, "
                    "lambda loss: loss.to_local(), for example"
                )
            value = value.to_local()
        if isinstance(value, torch.Tensor):
            value, dtype, shape = value.detach(), value.dtype, value.shape
        elif not isinstance(value, numbers.Number):
            raise TypeError(f"{self.asked} is over {shown(value)}: what is accumulated has to be a number or a tensor")
        if (dtype.is_complex if dtype is not None else isinstance(value, complex)) and "max" in self.ops:
            raise TypeError(f"{self.asked} is over complex numbers, which have no maximum: give their abs()")
        if self.shape is None:
            self.dtype, self.shape = dtype, shape
        elif self.shape != shape:
            raise ValueError(
                f"{self.asked} is over values of shape {tuple(self.shape)}, and of shape {tuple(shape)} in this run: "
                "reduce them to one shape in a closure, with .mean() for example"
            )
        return value

    @property
    def asked(self) -> str:
        """The first running fetch of this source, for error messages."""
        return f"running_{self.accumulators[0].op}({describe(self.fetch)})"

    def take(self) -> None:
        """Add the values that are waiting on the host, and tensors, to the accumulators."""
        if self.numbers:
            taken, self.numbers = self.numbers, []
            largest = _largest(taken) if "max" in self.ops else None
            self.add((sum(taken), largest, len(taken)))
        if self.tensors[2]:
            partial, self.tensors = self.tensors, (None, None, 0)
            self.add(partial)

    def add(self, partial: _Partial) -> None:
        for accumulator in self.accumulators:
            accumulator.add(partial)

    def drop(self) -> None:
        self.numbers, self.tensors = [], (None, None, 0)

    def as_value(self, result: Any, op: str) -> Any:
        """Return the ``result`` of ``op`` with the dtype and the shape that a hook gets."""
        if self.dtype is None:
            return result
        dtype = self.dtype
        if op != "max":
            dtype = _float32_or_wider(dtype) if op == "mean" or dtype.is_floating_point else _wide(dtype)
        value = result if isinstance(result, torch.Tensor) else torch.tensor(result)
        return as_snapshot(value.to(dtype).reshape(self.shape or ()))


class Rows:
    """The numbers of several sources on one device, in one row for each run."""

    def __init__(self, sources: Sequence[Source], like: torch.Tensor) -> None:
        self.sources = sources
        self._buffer = torch.empty(_ROWS, len(sources), dtype=like.dtype, device=like.device)
        self._rows = self._buffer.unbind()
        self._used = 0

    def add(self, values: Sequence[torch.Tensor]) -> None:
        row = self._rows[self._used]
        scalars = [value.reshape(()) if value.dim() else value for value in values]
        if len(scalars) == 1:
            row.copy_(scalars[0])
        else:
            torch.stack(scalars, out=row)
        self._used += 1
        if self._used == _ROWS:
            self.take()

    def take(self) -> None:
        """Add the rows to the accumulators."""
        if not self._used:
            return
        rows = self._buffer[: self._used]
        ops = {op for source in self.sources for op in source.ops}
        sums = rows.sum(0, dtype=_wide(rows.dtype, rows.device)) if "sum" in ops else None
        largest = rows.amax(0) if "max" in ops else None
        for index, source in enumerate(self.sources):
            source.add((_item(sums, index), _item(largest, index), self._used))
        self._used = 0


def add_tensors(pairs: list[tuple[Source, torch.Tensor]]) -> None:
    """Add tensors of one device and dtype, in one launch for sums and one for maxima where torch has such kernels."""
    sums: list[tuple[torch.Tensor, torch.Tensor]] = []
    maxima: list[tuple[torch.Tensor, torch.Tensor]] = []
    for source, value in pairs:
        total, largest, count = source.tensors
        if count:
            sums += [] if total is None else [(total, value)]
            maxima += [] if largest is None else [(largest, value)]
        else:
            ops, dtype = source.ops, value.dtype
            kept = _wide(dtype) if not dtype.is_floating_point and not dtype.is_complex else _float32_or_wider(dtype)
            total = value.to(kept, copy=True) if "sum" in ops else None
            largest = value.clone() if "max" in ops else None
        source.tensors = total, largest, count + 1
    if sums:
        _foreach(torch._foreach_add_, sums)
    if maxima:
        _foreach(torch._foreach_maximum_, maxima)


def _foreach(function: Callable[[Any, Any], object], pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    totals, values = zip(*pairs, strict=True)
    function(totals, values)


def _wide(dtype: torch.dtype, device: torch.device | None = None) -> torch.dtype:
    """Return the dtype in which numbers of ``dtype`` are added up."""
    if dtype.is_complex:
        return torch.complex128
    if dtype.is_floating_point:
        return torch.float32 if device is not None and device.type == "mps" else torch.float64
    return torch.int64


def _float32_or_wider(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype`` if it is float32 or wider, or complex64 or wider; otherwise float32."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    return torch.float64 if dtype == torch.float64 else torch.float32


def _item(values: torch.Tensor | None, index: int) -> torch.Tensor | None:
    return None if values is None else values[index]


def _largest(values: Sequence[_Number]) -> _Number:
    """Return the greatest of ``values``, or NaN if one of them is NaN."""
    nan = next((value for value in values if value != value), None)
    return max(values) if nan is None else nan


def _maximum(a: Any, b: Any) -> Any:
    if isinstance(b, torch.Tensor):
        return torch.maximum(a if isinstance(a, torch.Tensor) else torch.full_like(b, a), b)
    if isinstance(a, torch.Tensor):
        return torch.maximum(a, torch.full_like(a, b))
    return _largest([a, b])
