"""The newest scalars of a training run, read from the ends of its event files and JSON lines, also while it trains."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

_END_BYTES = 1 << 18  # of each file; thousands of points
_HEADER = struct.Struct("<QI")


class Point(NamedTuple):
    """One value of a curve, at a step and a time in seconds since 1970."""

    step: int
    time: float
    value: float


def read_curves(sizes: Mapping[str, int], read: Callable[[str, int, int], bytes]) -> dict[str, list[Point]]:
    """Return the last points of each curve by its tag, in the order of the steps.

    Args:
        sizes: the size of each file by its name.
        read: returns the bytes of a file from one position to another.
    """
    found: dict[tuple[str, str], list[Point]] = {}
    # Names of event files have the time of their creation, so the points of a resumed process come last.
    for name in sorted(sizes):
        folder, _, base = name.rpartition("/")
        points_in = _events_in if "tfevents" in base else _lines_in if base.endswith(".jsonl") else None
        if points_in is not None:
            start = max(0, sizes[name] - _END_BYTES)
            for tag, point in points_in(read(name, start, sizes[name]), start > 0):
                found.setdefault((tag, folder), []).append(point)
    curves: dict[str, dict[int, Point]] = {}
    for (tag, _), points in sorted(found.items()):
        end = math.inf
        for point in reversed(points):
            if point.step < end:  # or else it was made before a restart from an earlier step
                end = point.step
                curves.setdefault(tag, {})[point.step] = point
    return {tag: [points[step] for step in sorted(points)] for tag, points in curves.items()}


def _events_in(data: bytes, is_cut: bool) -> Iterator[tuple[str, Point]]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.util.tensor_util import make_ndarray

    for record in _records_in(data, is_cut):
        event = Event.FromString(record)
        for value in event.summary.value:
            if value.HasField("simple_value"):
                yield value.tag, Point(event.step, event.wall_time, value.simple_value)
            elif value.HasField("tensor") and value.metadata.plugin_data.plugin_name in ("", "scalars"):
                array = make_ndarray(value.tensor)
                if array.size == 1 and array.dtype.kind in "fiu":
                    yield value.tag, Point(event.step, event.wall_time, float(array.item()))


def _records_in(data: bytes, is_cut: bool) -> Iterator[bytes]:
    """Yield the whole records in ``data``, which begins in the middle of one if it ``is_cut``."""
    from torchhooks.summary.tensorboard import masked_crc32c

    position = 0
    while position + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, position)
        if checksum != masked_crc32c(data[position : position + 8]):
            if not is_cut:
                return  # damaged: TensorBoard stops here too
            # Where the checksum of a length is right, a record begins.
            position += 1
            continue
        end = position + _HEADER.size + length
        record = data[position + _HEADER.size : end]
        if data[end : end + 4] != struct.pack("<I", masked_crc32c(record)):
            return  # being written, or damaged
        yield record
        position, is_cut = end + 4, False


def _lines_in(data: bytes, is_cut: bool) -> Iterator[tuple[str, Point]]:
    for line in data.decode("utf-8", "replace").split("\n")[is_cut:]:
        try:
            values = json.loads(line)
            step, time = int(values.pop("step")), float(values.pop("time"))
            points = [(tag, Point(step, time, float(value))) for tag, value in values.items()]
            if not math.isfinite(time):
                raise ValueError(time)
        except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            continue  # the last line may be incomplete, and another program may have written the file
        yield from points
