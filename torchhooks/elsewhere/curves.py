"""The scalars of a training run, read from its event files and JSON lines, also while it trains."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from torchhooks.checkpoints.manifest import has_manifest

_MOST_POINTS = 1000  # of a curve in event files; tensorboard takes samples of a longer one, with the last point


class Point(NamedTuple):
    """One value of a curve, at a step and a time in seconds since 1970."""

    step: int
    time: float
    value: float


class Curves:
    """The curves in a folder and the folders in it. Each call of :meth:`read` continues where the last one ended."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._accumulators: dict[str, Any] = {}

    def read(self) -> dict[str, list[Point]]:
        """Return the points of each curve by its tag, in the order of the steps."""
        found: dict[str, dict[int, Point]] = {}
        for folder in [self._folder, *self._subfolders()]:
            with suppress(FileNotFoundError):  # the saver has just removed a checkpoint
                for tag, point in (*self._events_in(folder), *_lines_in(folder)):
                    found.setdefault(tag, {})[point.step] = point
        return {tag: [points[step] for step in sorted(points)] for tag, points in sorted(found.items())}

    def _subfolders(self) -> list[str]:
        with os.scandir(self._folder) as entries:
            folders = [entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        return sorted(folder for folder in folders if not has_manifest(folder))

    def _events_in(self, folder: str) -> Iterator[tuple[str, Point]]:
        if not any("tfevents" in name for name in os.listdir(folder)):
            return
        from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
        from tensorboard.util import tensor_util

        if folder not in self._accumulators:
            self._accumulators[folder] = EventAccumulator(folder, size_guidance={"tensors": _MOST_POINTS})
        accumulator = self._accumulators[folder].Reload()
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
