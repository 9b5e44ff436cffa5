"""Counting the elements of a tensor in the bins of TensorBoard's histograms, where the tensor is.

The bins come from torch's SummaryWriter: their edges are 0 and 1e-12 * 1.1**k, with both signs. Sorting the elements
takes most of the time of torch's method. Here, an element is counted by the upper 16 bits of its
floating-point representation, its *cell*. There are more cells than bins, and no cell has two edges in it. In a cell
with an edge, the offset in :class:`_Cells` moves the elements beyond the edge into the next cell, which is in the next
bin. So every element is counted in exactly the bin that ``numpy.histogram`` would find for it.

On a device, all of this is queued without waiting, and only the counts travel to the host. Of a tensor whose parts are
on several ranks, each rank counts its own part, and the counts are added up.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch

from torchhooks.common.trees import as_snapshot
from torchhooks.device.host import has_float64, host
from torchhooks.device.readback import is_remote
from torchhooks.fetches.over_ranks import ValueInParts
from torchhooks.ranks.dtensors import is_sharded, without_partial
from torchhooks.ranks.transport import all_gather

END = 9e19
"""Magnitudes from here on have no bin."""

_CELLS = 1 << 16

# Elements. Below 32768, torch's operators use one thread and the CPU's caches, and need no memory that matters.
_CHUNK_ON_HOST = 32_000
# On a device, each chunk costs the host about 20 kernel launches, and the device about 30 bytes per element.
_CHUNK_ON_DEVICE = 1 << 24


class Counts(NamedTuple):
    """The distribution of the elements of a tensor, as tensors on its device.

    Args:
        bins: int64, the number of elements in each bin, and at last the number of elements without a bin.
        moments: float64: the minimum, the maximum, the sum and the sum of squares of the elements that have a bin.
    """

    bins: torch.Tensor
    moments: torch.Tensor


@functools.cache
def edges() -> list[float]:
    """Return the edges of the bins, as torch's SummaryWriter computes them."""
    positive = []
    edge = 1e-12
    while edge < 1e20:
        positive.append(edge)
        edge *= 1.1
    return [*(-edge for edge in reversed(positive)), 0.0, *positive]


def can_count(value: Any) -> bool:
    """Return whether :func:`count` takes ``value``: an ordinary tensor, on the CPU or on a device with a copier."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_nested:
        return False
    return host.holds(value) or (host.copier(value.device.type) is not None and has_float64(value.device))


def count(tensor: torch.Tensor) -> Counts:
    """Count the elements of ``tensor``, which :func:`can_count` accepts, without waiting for its device."""
    on_device = is_remote(tensor)
    flat = _flat(tensor.detach())
    kind = torch.float32 if _fits_float32(flat.dtype) else torch.float64
    cells = _cells(kind, flat.device)
    if flat.is_cpu:
        # Filled by torch, so many zeros would be worth a second thread, which is slow to start on a busy machine.
        counts = torch.from_numpy(np.zeros(_CELLS, dtype=np.int64))
    else:
        counts = torch.zeros(_CELLS, dtype=torch.int64, device=flat.device)
    size = _CHUNK_ON_DEVICE if on_device else _CHUNK_ON_HOST
    ones = counts.new_ones(1).expand(size)
    if not on_device:
        ones = ones.contiguous()  # takes more memory and half of the time
    moments = []
    for chunk in flat.split(size):
        values = chunk.to(kind)
        cells.add_to(counts, values, ones)
        moments.append(cells.moments(values, may_look=not on_device))
    bins = counts.new_zeros(len(edges())).scatter_add_(0, cells.bins, counts)
    return Counts(as_snapshot(bins), as_snapshot(_merged(torch.stack(moments))))


def count_array(values: np.ndarray[Any, Any]) -> Counts:
    """Count the elements of an array that torch may not have the dtype of."""
    return count(torch.from_numpy(np.array(values, dtype=np.float64)))


def counts_of(value: Any, *, is_shared: bool = False, is_written: bool = True) -> Any:
    """Return the counts of ``value``, or ``None`` if :func:`count` does not take it.

    With ``is_shared``, every rank calls this in the same run, so that each one can count its part of a DTensor. What
    this rank does not write is not counted, unless it is such a part.
    """
    if is_shared and is_sharded(value) and can_count(value.detach().to_local()):
        return Shards(value)
    if not is_written:
        return value
    return count(value) if can_count(value) else None


class Shards(ValueInParts):
    """A DTensor whose parts :func:`count` takes, to be counted without putting them together."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor.detach()

    def combined(self) -> Counts:
        """Return the counts of all elements, each of which is counted once, however many ranks have it."""
        tensor = without_partial(self._tensor)
        counts = count(tensor.to_local())
        mesh = tensor.device_mesh
        for dimension, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                counts = _total(all_gather([*counts], mesh.size(dimension), mesh.get_group(dimension)))
        return counts

    def __repr__(self) -> str:
        return f"the histogram of a DTensor of shape {tuple(self._tensor.shape)}"


def _total(rows: list[list[torch.Tensor]]) -> Counts:
    """Return the counts of all elements, given the fields of the counts of each part."""
    bins, moments = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return Counts(as_snapshot(bins.sum(0)), as_snapshot(_merged(moments)))


def _merged(moments: torch.Tensor) -> torch.Tensor:
    """Return the moments of all elements, given the moments of each part as a row."""
    low, high, total, squares = moments.unbind(1)
    return torch.stack([low.amin(), high.amax(), total.sum(), squares.sum()])


class Histogram(NamedTuple):
    """The arguments of ``add_histogram_raw`` of torch's SummaryWriter, without the bins at both ends that are empty."""

    min: float
    max: float
    num: int
    sum: float
    sum_squares: float
    bucket_limits: list[float]
    bucket_counts: list[int]


def as_histogram(counts: Counts) -> tuple[Histogram | None, int]:
    """Return what to write of ``counts``, which are on the host, and the number of elements that have no bin.

    The histogram is ``None`` if no element has a bin.
    """
    *bins, left_out = counts.bins.tolist()
    used = np.flatnonzero(bins)
    if not used.size:
        return None, left_out
    low, high, total, squares = counts.moments.tolist()
    first, last = int(used[0]), int(used[-1])
    # As in torch: a format with upper limits only shows the lower limit of the first bin as an empty bin before it.
    limits = edges()[first : last + 2]
    return Histogram(low, high, sum(bins), total, squares, limits, [0, *bins[first : last + 1]]), left_out


def _fits_float32(dtype: torch.dtype) -> bool:
    """Return whether float32 has every value of ``dtype``."""
    return dtype in (torch.float32, torch.bool) or dtype.itemsize <= 2


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` in any order, if possible without copying them."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    # In the order of the memory, a transposed tensor or one in torch.channels_last can be flattened as a view.
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).reshape(-1)


class _Cells(NamedTuple):
    """How to count elements by the upper 16 bits of a floating-point type, as tensors on one device.

    Args:
        bits: the integer type with as many bits.
        shift: how many bits an element has below its upper 16.
        offsets: for each cell, what to add to the bits of its elements, so that those beyond its edge, if it has one,
            are in the next cell.
        bins: for each cell, the index of the bin of the elements that are in it then.
        end: :data:`END`, or the next larger number of this type. A comparison would round END down.
    """

    bits: torch.dtype
    shift: int
    offsets: torch.Tensor
    bins: torch.Tensor
    end: float

    def add_to(self, counts: torch.Tensor, values: torch.Tensor, ones: torch.Tensor) -> None:
        """Add the number of ``values`` in each cell to ``counts``. ``ones`` has at least as many ones."""
        bits = values.view(self.bits)
        cell = (bits >> self.shift).add_(_CELLS // 2)
        moved = self.offsets.index_select(0, cell).add_(bits).bitwise_right_shift_(self.shift)
        counts.scatter_add_(0, moved.long().add_(_CELLS // 2), ones[: len(moved)])

    def moments(self, values: torch.Tensor, *, may_look: bool) -> torch.Tensor:
        """Return the minimum, the maximum, the sum and the sum of squares of the elements that have a bin."""
        if not values.numel():  # a rank may have no part of a small tensor
            nothing = torch.tensor([math.inf, -math.inf, 0.0, 0.0], dtype=torch.float64, device="cpu")
            return host.send(nothing, values.device)
        low, high = values.aminmax()
        if may_look and -self.end < low and high < self.end:  # false if an element is NaN
            doubles = values.double()
        else:
            kept = values.abs() < self.end
            low, high = torch.where(kept, values, math.inf).amin(), torch.where(kept, values, -math.inf).amax()
            doubles = torch.where(kept, values, 0).double()
        return torch.stack([low.double(), high.double(), doubles.sum(), doubles.square().sum()])


@functools.cache
def _cells(dtype: torch.dtype, device: torch.device) -> _Cells:
    if device.type != "cpu":
        on_host = _cells(dtype, torch.device("cpu"))
        offsets, bins = (host.send(table, device) for table in (on_host.offsets, on_host.bins))
        return _Cells(on_host.bits, on_host.shift, offsets, bins, on_host.end)
    is_single = dtype is torch.float32
    floating: Any = np.float32 if is_single else np.float64
    signed = torch.int32 if is_single else torch.int64
    shift = 16 if is_single else 48
    magnitudes = np.array([edge for edge in edges() if 0 <= edge < END] + [END])
    nearest = magnitudes.astype(floating)
    at_or_above = np.where(nearest < magnitudes, np.nextafter(nearest, floating(np.inf)), nearest)
    at_or_below = np.where(nearest > magnitudes, np.nextafter(nearest, floating(0)), nearest)
    # Where the bins begin, as the bits of a magnitude. An edge itself is in the bin above it, so the edge of a negative
    # edge is the bin nearer to 0. END has no bin on either side.
    begin_above_0 = torch.from_numpy(at_or_above).view(signed).numpy().astype(np.int64)
    begin_below_0 = torch.from_numpy(at_or_below).view(signed).numpy() + np.int64(1)
    begin_below_0[-1] = begin_above_0[-1]
    half, size = _CELLS // 2, 1 << shift
    cell_begins = np.arange(half, dtype=np.int64) << shift
    pushes, bin_of = np.zeros(_CELLS, np.int64), np.empty(_CELLS, np.int64)
    zero, no_bin = len(edges()) // 2, len(edges()) - 1
    # As signed integers, the bits of negative numbers come first.
    for first, begins, sign in ((0, begin_below_0, -1), (half, begin_above_0, 1)):
        inside = begins % size
        pushes[first + (begins >> shift)] = np.where(inside, size - inside, 0)
        begun = np.searchsorted(begins, cell_begins, side="right")
        bin_of[first : first + half] = np.where(begun < len(begins), zero + sign * begun - (sign > 0), no_bin)
    tables = torch.from_numpy(pushes).to(signed), torch.from_numpy(bin_of)
    return _Cells(signed, shift, *tables, float(at_or_above[-1]))
