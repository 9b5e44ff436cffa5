"""The scalars of a training run, read from its event files and JSON lines, also while it trains."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from torchhooks.checkpoints.manifest import has_manifest

_MOST_POINTS = 1000  # of a curve in event files; tensorboard takes samples of a longer one, with the last point


class Point(NamedTuple):
    """One value of a curve, at a step and a time in seconds since 1970."""

    step: int
    time: float
    value: float


def read_curves(folder: str) -> dict[str, list[Point]]:
    """Return the points of each curve by its tag, in the order of the steps."""
    found: dict[str, dict[int, Point]] = {}
    for place in [folder, *_subfolders(folder)]:
        with suppress(FileNotFoundError):  # the saver has just removed a checkpoint
            for tag, point in (*_events_in(place), *_lines_in(place)):
                found.setdefault(tag, {})[point.step] = point
    return {tag: [points[step] for step in sorted(points)] for tag, points in sorted(found.items())}


def _subfolders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        folders = [entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(path for path in folders if not has_manifest(path))


def _events_in(folder: str) -> Iterator[tuple[str, Point]]:
    if not any("tfevents" in name for name in os.listdir(folder)):
        return
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    accumulator = EventAccumulator(folder, size_guidance={"tensors": _MOST_POINTS}).Reload()
    for tag in accumulator.Tags()["tensors"]:
        if accumulator.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            for event in accumulator.Tensors(tag):
                value = float(tensor_util.make_ndarray(event.tensor_proto))
                yield tag, Point(event.step, event.wall_time, value)


def _lines_in(folder: str) -> Iterator[tuple[str, Point]]:
    for name in sorted(os.listdir(folder)):
        if name.endswith(".jsonl"):
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                for line in file:
                    yield from _points_of(line)


def _points_of(line: str) -> Iterator[tuple[str, Point]]:
    try:
        values = json.loads(line)
        step, time = int(values.pop("step")), float(values.pop("time"))
        points = [(tag, Point(step, time, float(value))) for tag, value in values.items()]
    except (ValueError, TypeError, LookupError, AttributeError):
        return  # the last line may be incomplete, and another program may have written the file
    yield from points
