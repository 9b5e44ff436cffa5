"""Counting the elements of a tensor in the bins of TensorBoard's histograms, where the tensor is.

The bins are those of torch's SummaryWriter: their edges are 0 and 1e-12 * 1.1**k, with both signs. On the CPU, NumPy
counts chunk by chunk. On a device, all of it is queued without waiting, and only the counts travel to the host.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch

from torchhooks.common.memory import array_of
from torchhooks.common.trees import as_snapshot
from torchhooks.device.accelerator import has_float64, host
from torchhooks.device.readback import is_remote
from torchhooks.fetches.names import Value

END = 9e19
"""Magnitudes from here on have no bin."""

_CHUNK_ON_HOST = 1 << 18  # elements: of float64 in a buffer of 2 MB
_CHUNK_ON_DEVICE = 1 << 24  # of about 30 bytes each


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


def can_count(value: Value) -> bool:
    """Return whether :func:`count` takes ``value``: an ordinary tensor, on the CPU or on a device with a copier."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_nested:
        return False
    return host.holds(value) or (host.copier(value.device.type) is not None and has_float64(value.device))


def count(tensor: torch.Tensor) -> Counts:
    """Count the elements of ``tensor``, at least one, without waiting for its device. :func:`can_count` accepts it."""
    flat = _flat(tensor.detach().resolve_neg())
    if not is_remote(tensor):
        return _count_on_host(flat)
    counted = [_count_on_device(part) for part in flat.split(_CHUNK_ON_DEVICE)]
    bins, moments = (torch.stack(each) for each in zip(*counted, strict=True))
    low, high, total, squares = moments.unbind(1)
    together = torch.stack([low.amin(), high.amax(), total.sum(), squares.sum()])
    return Counts(as_snapshot(bins.sum(0)), as_snapshot(together))


def count_array(values: np.ndarray) -> Counts:
    """Count the elements of an array that torch may not have the dtype of."""
    return count(torch.from_numpy(np.array(values, dtype=np.float64)))


def _count_on_host(flat: torch.Tensor) -> Counts:
    limits = np.array(edges())
    bins = np.zeros(len(limits), dtype=np.int64)
    low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    buffer = np.empty(min(len(flat), _CHUNK_ON_HOST))  # used again, because new memory takes longer than the sums
    for chunk in flat.split(_CHUNK_ON_HOST):
        # NumPy sorts float16 slowly, and does not have bfloat16.
        is_short = chunk.is_floating_point() and chunk.dtype.itemsize <= 2
        values = array_of(chunk.float() if is_short else chunk)
        if values.dtype.kind != "f":
            values = values.astype(np.float64)
        if not (float(values.min()) > -END and float(values.max()) < END):  # also if an element is NaN
            values = values[np.abs(values) < np.float64(END)]
            bins[-1] += len(chunk) - values.size
        if not values.size:
            continue
        bins[:-1] += np.histogram(values, limits)[0]
        doubles = buffer[: values.size]
        doubles[:] = values
        low, high = min(low, float(values.min())), max(high, float(values.max()))
        total += float(doubles.sum())
        squares += float(doubles @ doubles)
    moments = torch.tensor([low, high, total, squares], dtype=torch.float64, device="cpu")
    return Counts(as_snapshot(torch.from_numpy(bins)), as_snapshot(moments))


def _count_on_device(values: torch.Tensor) -> Counts:
    doubles = values.double()
    # Elements without a bin are not cut out by this mask, which would wait for the device: they get the last place.
    there = doubles.abs() < END
    index = torch.bucketize(doubles, _edges_on(values.device), right=True) - 1
    bins = torch.zeros(len(edges()), dtype=torch.int64, device=values.device)
    # Not bincount(), which waits for the device to know the largest index.
    bins.scatter_add_(0, torch.where(there, index, len(bins) - 1), torch.ones_like(index))
    low, high = torch.where(there, doubles, math.inf).amin(), torch.where(there, doubles, -math.inf).amax()
    kept = torch.where(there, doubles, 0.0)
    return Counts(bins, torch.stack([low, high, kept.sum(), kept.square().sum()]))


@functools.cache
def _edges_on(device: torch.device) -> torch.Tensor:
    return host.send(torch.tensor(edges(), dtype=torch.float64, device="cpu"), device)


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
    """Return the histogram of ``counts``, which are on the host, and the number of elements that have no bin.

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


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` in any order, if possible without copying them."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    # In the order of the memory, a transposed tensor or one in torch.channels_last can be flattened as a view.
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).reshape(-1)
