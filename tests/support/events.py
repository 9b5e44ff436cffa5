"""Event files, as TensorBoard reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read(folder: str | Path) -> Any:
    """Return TensorBoard's reader of all that is in the event files in ``folder``."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes a second

    kinds = ("scalars", "images", "tensors", "histograms")
    return EventAccumulator(str(folder), size_guidance=dict.fromkeys(kinds, 0)).Reload()


def curve(folder: str | Path, tag: str) -> list[tuple[int, float]]:
    """Return the points (step, value) of the curve ``tag``."""
    return [(point.step, point.value) for point in read(folder).Scalars(tag)]


def steps(folder: str | Path, tag: str) -> list[int]:
    """Return the steps of the points of the curve ``tag``."""
    return [step for step, _ in curve(folder, tag)]
