"""Timers that decide when a periodic hook runs.

The rules are those of ``tf.train.SecondOrStepTimer``: a timer that has never triggered triggers at once, no timer
triggers twice for one step, and a period starts at the last trigger, not at a multiple of the period.

    timer = SecondOrStepTimer(every_steps=10)
    if timer.should_trigger_for_step(step):
        elapsed_secs, elapsed_steps = timer.update_last_triggered_step(step)
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from torchhooks.checks import period, whole_number
from torchhooks.text import shown


class Due(NamedTuple):
    """When a hook is next due: in the first run that meets one of the given conditions; never if none is given.

    Args:
        step: the run is about to bring the global step to this number or past it.
        moment: ``time.monotonic()`` has reached this many seconds.
        runs: the run is this many runs from now; 1 is the next run.
        when: ``when(outputs)`` is true, where ``outputs`` is what the step returned. It is called after every step for
            which the hook is not due otherwise, possibly twice, so it should be fast and have no side effects. In a run
            in which a hook feeds something it is not called, and counts as true.
    """

    step: int | None = None
    moment: float | None = None
    runs: int | None = None
    when: Callable[[Any], object] | None = None


NOW = Due(step=-1)
"""Due in the next run, at any step: the answer of a timer that has never triggered."""

NEVER = Due()
"""Never due again."""


class SecondOrStepTimer:
    """A timer that triggers at most once every ``every_secs`` seconds, or every ``every_steps`` steps.

    Unlike TensorFlow, the clock is ``time.monotonic()``, so that setting the system time does not change a period.

    Args:
        every_secs: seconds from one trigger to the next, 0 or more and finite.
        every_steps: steps from one trigger to the next, 1 or more and less than 2**63.

    Raises:
        ValueError: both or neither are given, or the period is invalid.
    """

    told: bool | None = None
    """With a period in seconds and several ranks, whether the chief's clock has triggered.

    ``None``, the default, means that the timer looks at its own clock.
    """

    def __init__(self, every_secs: float | None = None, every_steps: int | None = None) -> None:
        if (every_secs is None) == (every_steps is None):
            raise ValueError(
                f"SecondOrStepTimer(every_secs={every_secs!r}, every_steps={every_steps!r}): "
                f"give exactly one of the two, {'not both' if every_secs is not None else 'none was given'}"
            )
        self._every_secs = None if every_secs is None else period(every_secs, "every_secs")
        self._every_steps = None if every_steps is None else whole_number(every_steps, "every_steps", 1)
        self.reset()

    @classmethod
    def named(cls, **periods: Any) -> Self:
        """Return a timer of the one period that is not ``None``: seconds if its name ends in ``secs``, else steps."""
        given = {name: value for name, value in periods.items() if value is not None}
        if len(given) != 1:
            listed = ", ".join(f"{name}={shown(value)}" for name, value in periods.items())
            raise ValueError(f"{listed}: give exactly one of them{', and None for the other' if given else ''}")
        ((name, value),) = given.items()
        if name.endswith("secs"):
            return cls(every_secs=period(value, name))
        return cls(every_steps=whole_number(value, name, 1))

    def reset(self) -> None:
        """Forget the last trigger, so that the next step triggers."""
        self._last_step: int | None = None
        self._last_time: float | None = None

    def should_trigger_for_step(self, step: int) -> bool:
        """Return whether a full period has passed since the last trigger; always false for the step of that trigger."""
        if self._last_step is None or self._last_time is None:
            return True
        if step == self._last_step:
            return False
        if self._every_steps is not None:
            return step >= self._last_step + self._every_steps
        assert self._every_secs is not None
        return time.monotonic() >= self._last_time + self._every_secs if self.told is None else self.told

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Start a new period now, at ``step``.

        Return the seconds and the steps since the last trigger; ``(None, None)`` for the first.
        """
        now = time.monotonic()
        last_step, last_time = self._last_step, self._last_time
        self._last_step, self._last_time = step, now
        if self.told:
            self.told = False
        if last_step is None or last_time is None:
            return None, None
        return now - last_time, step - last_step

    def last_triggered_step(self) -> int | None:
        """Return the step of the last trigger, or ``None`` if there was none."""
        return self._last_step

    def next_due(self) -> Due:
        """Return the step or the moment before which :meth:`should_trigger_for_step` cannot be true."""
        if self._last_step is None or self._last_time is None or self.told:
            return NOW
        if self._every_steps is not None:
            return Due(step=self._last_step + self._every_steps)
        assert self._every_secs is not None
        return Due(moment=self._last_time + self._every_secs)

    def __repr__(self) -> str:
        if self._every_steps is not None:
            return f"SecondOrStepTimer(every_steps={self._every_steps})"
        return f"SecondOrStepTimer(every_secs={self._every_secs})"


class NeverTriggerTimer:
    """A timer that never triggers, for a hook that only has work to do at the end."""

    told: bool | None = None

    def reset(self) -> None:
        """Do nothing."""

    def should_trigger_for_step(self, step: int) -> bool:
        return False

    def update_last_triggered_step(self, step: int) -> tuple[None, None]:
        return None, None

    def last_triggered_step(self) -> None:
        """Return ``None``."""

    def next_due(self) -> Due:
        return NEVER

    def __repr__(self) -> str:
        return "NeverTriggerTimer()"
