"""Accumulators of running fetches, on the host and on devices. ``accumulated`` says what is accumulated."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchhooks.common.requester import Requester
from torchhooks.common.text import shown
from torchhooks.common.trees import as_snapshot, snapshot
from torchhooks.device.host import has_float64, host
from torchhooks.device.readback import is_remote
from torchhooks.fetches.fetch import Evaluator, describe

MOST_NUMBERS = 4096
"""How many numbers on the host wait at most until they are added up."""

_ROWS = 256  # the same on a device, in runs; more would hardly save launches

_Number = Any  # int, float or complex
_Partial = tuple[Any, Any, Any, int]
"""The sum, the maximum and the minimum of some runs, as far as they are needed, and the number of these runs."""
_NOTHING: _Partial = (None, None, None, 0)
_PARTS = {"mean": 0, "sum": 0, "max": 1, "min": 2}
KEPT: Any = type("Kept", (), {"__repr__": lambda self: "<kept>"})()
"""What :meth:`Source.checked` returns for a value that needs no adding up."""
_PLAIN_NUMBERS = (float, int)


class Accumulator:
    """The total of one running fetch of one hook.

    ``weights`` is the sum of the weights, for a weighted mean. ``of_epoch`` says whether it is over the epoch so far,
    so that a report does not reset it.
    """

    def __init__(
        self, op: str, source: Source, name: str, *, weights: Accumulator | None = None, of_epoch: bool = False
    ) -> None:
        self.op = op
        self.source = source
        self.name = name
        """The name under which a checkpoint has it."""
        self.weights = weights
        self.of_epoch = of_epoch
        # A total is never changed in place, so that it can be reported, saved and put back without a copy.
        self.total: Any = None
        self.count = 0
        self.reported: tuple[Any, int] = (None, 0)
        """The total and the count of the last report."""
        self.reported_at = -1
        """The global step of the last report."""
        self.made_again = False
        """Whether the loop is making runs again that were reported before a recovery."""
        self.ended = False
        """Whether it is over an epoch that has ended, so that the next run starts over."""
        self._before: tuple[Any, ...] | None = None  # the last report, for taking it back

    def add(self, partial: _Partial) -> None:
        part = partial[_PARTS[self.op]]
        total = self.total
        if total is None:
            self.total = part
        else:
            if isinstance(total, torch.Tensor) and isinstance(part, torch.Tensor) and total.device != part.device:
                total = host.send(total, part.device)  # restored from a checkpoint, so it is on the CPU
            self.total = total + part if _PARTS[self.op] == 0 else _extreme(self.op, total, part)
        self.count += partial[3]

    def reset(self) -> None:
        self.total, self.count, self.made_again, self.ended = None, 0, False, False

    def report(self, step: int) -> Any:
        """Return the value, and start over unless it covers the epoch. Without a run since, return it again."""
        total, count = self.report_total(step)
        if not count:
            return None
        if self.op == "mean":
            total = _ratio(total, count if self.weights is None else self.weights.report_total(step)[0])
        return self.source.as_value(total, self.op)

    def report_total(self, step: int) -> tuple[Any, int]:
        """Return the total and the number of its runs, and start over unless it covers the epoch."""
        if self.count and self.of_epoch:
            self.reported = self.total, self.count
        elif self.count:
            self._before = self.total, self.count, self.made_again, self.reported, self.reported_at
            self.reported, self.reported_at = (self.total, self.count), step
            self.reset()
        return self.reported

    def keep(self) -> None:
        """Take back the report of the current run."""
        if self.weights is not None:
            self.weights.keep()
        if self._before is not None and not self.count:
            self.total, self.count, self.made_again, self.reported, self.reported_at = self._before
            self._before = None

    def state_dict(self) -> dict[str, Any]:
        source = self.source
        shape = None if source.shape is None else list(source.shape)
        state = {"total": self.total, "count": self.count, "dtype": source.dtype, "shape": shape}
        return {**state, "ended": self.ended} if self.of_epoch else state

    def load_state_dict(self, state: Mapping[str, Any] | None, step: int) -> None:
        self.reset()
        self.made_again = self.reported_at > step
        if state is None or not state["count"]:
            return
        total = state["total"]
        # A number on the host can be added to one on any device without waiting.
        self.total = total.item() if isinstance(total, torch.Tensor) and not total.dim() else total
        self.count = state["count"]
        self.ended = state.get("ended", False)
        if self.source.shape is None:
            self.source.dtype, self.source.shape = state["dtype"], torch.Size(state["shape"])


class LatestValue:
    """The last value of a fetch for one hook. It is used like an :class:`Accumulator`."""

    op = "latest"
    made_again = of_epoch = ended = False  # a recovery and the end of an epoch change nothing

    def __init__(self, source: LatestSource, name: str) -> None:
        self.source = source
        self.name = name
        """The name under which a checkpoint has it."""
        self.value: Any = math.nan

    def report(self, step: int) -> Any:
        return self.value

    def keep(self) -> None:
        """Do nothing: a report does not change the value."""

    def reset(self) -> None:
        self.value = math.nan

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any] | None, step: int) -> None:
        self.value = math.nan if state is None else state["value"]


class Source:
    """A fetch whose values are accumulated: once, however many hooks ask for its mean, sum, maximum or minimum."""

    def __init__(self, fetch: Any, requester: Requester) -> None:
        self.fetch = fetch
        self.requester = requester
        """The first hook that asked for it, for error messages."""
        self.name = fetch if isinstance(fetch, str) else None
        self.accumulators: list[Any] = []
        self.is_number = False
        """Whether the values so far were numbers on the host: a fast path."""
        self.dtype: torch.dtype | None = None
        """The first value's, if it is a tensor."""
        self.shape: torch.Size | None = None
        """All values'; ``None`` before the first."""
        self.numbers: list[_Number] = []
        self.tensors = _NOTHING

    @property
    def ops(self) -> set[str]:
        return {"sum" if accumulator.op == "mean" else accumulator.op for accumulator in self.accumulators}

    def evaluate(self, evaluator: Evaluator) -> Any:
        """Return the value of one run."""
        return evaluator.evaluate_uncopied(self.fetch, self.requester)

    def checked(self, value: Any) -> Any:
        """Return ``value`` as a number or a detached tensor, if it can be added to the earlier values."""
        if isinstance(value, (np.ndarray, np.generic)):
            value = torch.as_tensor(value)
        dtype, shape = None, torch.Size()
        if hasattr(value, "full_tensor"):
            value = self._local(value)
        if isinstance(value, torch.Tensor):
            value, dtype, shape = value.detach(), value.dtype, value.shape
        elif not isinstance(value, numbers.Number):
            raise TypeError(f"{self.asked} is over {shown(value)}: what is accumulated has to be a number or a tensor")
        if dtype.is_complex if dtype is not None else isinstance(value, complex):
            has_not = [name for op, name in (("max", "maximum"), ("min", "minimum")) if op in self.ops]
            if has_not:
                raise TypeError(f"{self.asked} is over complex numbers, which have no {has_not[0]}: give their abs()")
        if self.shape is None:
            self.dtype, self.shape = dtype, shape
        elif self.shape != shape:
            raise ValueError(
                f"{self.asked} is over values of shape {tuple(self.shape)}, and of shape {tuple(shape)} in this run: "
                "reduce them to one shape in a closure, with .mean() for example"
            )
        return value

    def _local(self, value: Any) -> Any:
        """Return what this rank has of ``value``, if that is all of it."""
        if not hasattr(value, "full_tensor"):  # of a DTensor, whose full value is a collective call
            return value
        if not all(placement.is_replicate() for placement in value.placements):
            raise TypeError(
                f"{self.asked} is over a DTensor, which has a part on each rank: give the part of this rank, "
                "lambda loss: loss.to_local(), for example"
            )
        return value.to_local()

    @property
    def asked(self) -> str:
        """The first running fetch of this source, for error messages."""
        return f"running_{self.accumulators[0].op}({describe(self.fetch)})"

    def take(self) -> None:
        """Add the values that are waiting on the host, and tensors, to the accumulators."""
        if self.numbers:
            taken, self.numbers = self.numbers, []
            ops = self.ops
            largest = _extreme_number("max", taken) if "max" in ops else None
            smallest = _extreme_number("min", taken) if "min" in ops else None
            self.add((sum(taken), largest, smallest, len(taken)))
        if self.tensors[3]:
            partial, self.tensors = self.tensors, _NOTHING
            self.add(partial)

    def add(self, partial: _Partial) -> None:
        for accumulator in self.accumulators:
            accumulator.add(partial)

    def drop(self) -> None:
        self.numbers, self.tensors = [], _NOTHING

    def as_value(self, result: Any, op: str) -> Any:
        """Return the ``result`` of ``op`` with the dtype and the shape that a hook gets."""
        if self.dtype is None:
            return result
        dtype = self.dtype
        if _PARTS[op] == 0:
            dtype = _float32_or_wider(dtype) if op == "mean" or dtype.is_floating_point else _wide(dtype)
        value = result if isinstance(result, torch.Tensor) else torch.tensor(result)
        return as_snapshot(value.to(dtype).reshape(self.shape or ()))


class WeightedSource(Source):
    """The products of a fetch and a weight."""

    def __init__(self, fetch: Any, weight: Any, requester: Requester) -> None:
        super().__init__(fetch, requester)
        self.weight = weight
        self.name = None  # it is no name of which the value could be looked up

    def evaluate(self, evaluator: Evaluator) -> Any:
        """Return the product of one run, where the value is."""
        value = evaluator.evaluate_uncopied(self.fetch, self.requester)
        weight = evaluator.evaluate_uncopied(self.weight, self.requester)
        if type(value) in _PLAIN_NUMBERS and type(weight) in _PLAIN_NUMBERS:
            return value * weight
        return self._product(self._factor(value), self._factor(weight))

    def _factor(self, value: Any) -> Any:
        if isinstance(value, (np.ndarray, np.generic)):
            value = torch.as_tensor(value)
        value = self._local(value)
        if isinstance(value, torch.Tensor):  # in a dtype in which the product does not overflow
            dtype = value.dtype
            is_exact = not dtype.is_floating_point and not dtype.is_complex
            return value.detach().to(torch.int64 if is_exact else _float32_or_wider(dtype))
        if not isinstance(value, numbers.Number):
            raise TypeError(f"{self.asked} multiplies {shown(value)}: a value and its weight are numbers or tensors")
        return value

    def _product(self, value: Any, weight: Any) -> Any:
        if isinstance(weight, torch.Tensor):
            shape = value.shape if isinstance(value, torch.Tensor) else torch.Size()
            if weight.numel() == 1:
                weight = weight.reshape(())
            elif weight.shape != shape:
                raise ValueError(
                    f"{self.asked} is over values of shape {tuple(shape)} with weights of shape {tuple(weight.shape)}: "
                    "give one number for each run, such as weight=lambda x: len(x), or a tensor of their shape"
                )
            if isinstance(value, torch.Tensor) and value.device != weight.device:
                if is_remote(value):
                    weight = host.send(weight, value.device)
                else:
                    value = host.send(value, weight.device)
        return value * weight

    @property
    def asked(self) -> str:
        """The first running fetch of this source, for error messages."""
        return f"running_{self.accumulators[0].op}({describe(self.fetch)}, weight={describe(self.weight)})"


class LatestSource(Source):
    """A fetch of which the last value is kept, and which need not have one in every run."""

    def evaluate(self, evaluator: Evaluator) -> Any:
        """Return the value of one run, or ``None`` if there is none."""
        return evaluator.evaluate_if_there(self.fetch, self.requester)

    def checked(self, value: Any) -> Any:
        """Keep a copy of ``value``, and return what says so."""
        if value is not None:
            value = torch.as_tensor(value) if isinstance(value, (np.ndarray, np.generic)) else self._local(value)
            if not isinstance(value, (torch.Tensor, numbers.Number, str)):  # which a checkpoint may not take
                raise TypeError(f"{self.asked} is over {shown(value)}: give one number or tensor")
            kept = snapshot(value)
            for latest in self.accumulators:
                latest.value = kept
        return KEPT

    @property
    def asked(self) -> str:
        """The fetch, for error messages."""
        return f"latest({describe(self.fetch)})"


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
        smallest = rows.amin(0) if "min" in ops else None
        for index, source in enumerate(self.sources):
            source.add((_item(sums, index), _item(largest, index), _item(smallest, index), self._used))
        self._used = 0


def add_tensors(pairs: list[tuple[Source, torch.Tensor]]) -> None:
    """Add tensors of one device and dtype, in one launch for each kind of total where torch has such kernels."""
    sums: list[tuple[torch.Tensor, torch.Tensor]] = []
    maxima: list[tuple[torch.Tensor, torch.Tensor]] = []
    minima: list[tuple[torch.Tensor, torch.Tensor]] = []
    for source, value in pairs:
        total, largest, smallest, count = source.tensors
        if count:
            sums += [] if total is None else [(total, value)]
            maxima += [] if largest is None else [(largest, value)]
            minima += [] if smallest is None else [(smallest, value)]
        else:
            ops, dtype = source.ops, value.dtype
            kept = _wide(dtype) if not dtype.is_floating_point and not dtype.is_complex else _float32_or_wider(dtype)
            total = value.to(kept, copy=True) if "sum" in ops else None
            largest = value.clone() if "max" in ops else None
            smallest = value.clone() if "min" in ops else None
        source.tensors = total, largest, smallest, count + 1
    if sums:
        _foreach(torch._foreach_add_, sums)
    if maxima:
        _foreach(torch._foreach_maximum_, maxima)
    if minima:
        _foreach(torch._foreach_minimum_, minima)


def _foreach(function: Callable[[Any, Any], object], pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    totals, values = zip(*pairs, strict=True)
    function(totals, values)


def _wide(dtype: torch.dtype, device: torch.device | None = None) -> torch.dtype:
    """Return the dtype in which numbers of ``dtype`` are added up."""
    if dtype.is_complex:
        return torch.complex128
    if dtype.is_floating_point:
        return torch.float64 if device is None or has_float64(device) else torch.float32
    return torch.int64


def _float32_or_wider(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype`` if it is float32 or wider, or complex64 or wider; otherwise float32."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    return torch.float64 if dtype == torch.float64 else torch.float32


def _item(values: torch.Tensor | None, index: int) -> torch.Tensor | None:
    return None if values is None else values[index]


def _ratio(total: Any, divisor: Any) -> Any:
    if isinstance(divisor, torch.Tensor) and isinstance(total, torch.Tensor) and divisor.device != total.device:
        divisor = host.send(divisor, total.device)
    elif not isinstance(divisor, torch.Tensor) and not divisor:  # all weights are 0
        return total * math.nan
    return total / divisor


def _extreme_number(op: str, values: Sequence[_Number]) -> _Number:
    """Return the greatest or the least of ``values``, or NaN if one of them is NaN."""
    nan = next((value for value in values if value != value), None)
    if nan is not None:
        return nan
    return max(values) if op == "max" else min(values)


def _extreme(op: str, a: Any, b: Any) -> Any:
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        return _extreme_number(op, [a, b])
    like = b if isinstance(b, torch.Tensor) else a
    a, b = (each if isinstance(each, torch.Tensor) else torch.full_like(like, each) for each in (a, b))
    return torch.maximum(a, b) if op == "max" else torch.minimum(a, b)
