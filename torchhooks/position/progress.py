"""What a run changes: the global step, the last outputs, and the time spent waiting for data."""

from __future__ import annotations

from typing import Any

from torchhooks.common.checks import whole_number

NO_OUTPUTS: Any = type("NoOutputs", (), {"__repr__": lambda self: "NO_OUTPUTS"})()
"""The outputs before the first run, and from the start of a step until it returns."""


class Progress:
    """How far one session has come. The loop updates it in every run, so its attributes are slots."""

    __slots__ = ("begun_at", "global_step", "outputs")

    def __init__(self) -> None:
        self.global_step = 0
        self.begun_at = 0
        """The global step before the first run: restored, set by hand, or 0."""
        self.outputs: Any = NO_OUTPUTS
        """What the step returned in the last run."""

    def set_step(self, step: int) -> None:
        """Set the global step, and ``begun_at`` with it while there are no outputs.

        Raises:
            ValueError: ``step`` is not a whole number, 0 or more.
        """
        self.global_step = number = whole_number(step, "global_step", 0)
        if self.outputs is NO_OUTPUTS:
            self.begun_at = number


class DataWaits:
    """How long the nested ``until_stop`` loops have waited for their data, in seconds, by depth.

    Reading the clock twice for every item is not free, so a depth is measured only after a call of :meth:`total`.
    """

    def __init__(self) -> None:
        self.depth = 0
        """How many ``until_stop`` loops are open."""
        self.secs: dict[int, float] = {}

    def total(self) -> float | None:
        """Return how long all loops have waited since the first call at their depth; ``None`` if there was none."""
        if self.depth:
            self.secs.setdefault(self.depth, 0.0)
        return sum(self.secs.values()) if self.secs else None
