"""Is it time? Timers answer that and do nothing else.

The rules are those of ``tf.train.SecondOrStepTimer``: a timer that never triggered triggers at once, no timer
triggers twice for one step, and a period runs from the last trigger, not from multiples of the period.

    timer = SecondOrStepTimer(every_steps=10)
    if timer.should_trigger_for_step(step):
        elapsed_secs, elapsed_steps = timer.update_last_triggered_step(step)
"""

import math
import operator
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self


class Due(NamedTuple):
    """When a hook next wants to take part in a run: at the first of what is given; never again if nothing is.

    Args:
        step: in the run that is to bring the global step to this number, or past it.
        moment: in the first run once ``time.monotonic()`` has reached this many seconds.
        runs: in this many runs from now; 1 is the next one.
        when: in the first run in which ``when(outputs)`` is true, ``outputs`` being what the step returned. It is
            called behind every step that the hook has no part in so far, perhaps twice, so it should be quick and
            change nothing. In a run in which a hook feeds something it is not asked, and taken as true.
    """

    step: int | None = None
    moment: float | None = None
    runs: int | None = None
    when: Callable[[Any], object] | None = None


NOW = Due(step=-1)
"""Due in the next run, whatever the step: what a timer that never triggered says."""

NEVER = Due()
"""Not due again."""


class SecondOrStepTimer:
    """Triggers at most once every ``every_secs`` seconds or every ``every_steps`` steps.

    Unlike TensorFlow, the clock is ``time.monotonic()``: setting the wall clock moves no period.

    Args:
        every_secs: seconds from one trigger to the next, 0 or more.
        every_steps: steps from one trigger to the next, 1 or more.

    Raises:
        ValueError: both or neither were given, or a period that cannot be.
    """

    def __init__(self, every_secs: float | None = None, every_steps: int | None = None) -> None:
        if (every_secs is None) == (every_steps is None):
            raise ValueError(
                f"SecondOrStepTimer(every_secs={every_secs!r}, every_steps={every_steps!r}): "
                f"give one of the two, {'not both' if every_secs is not None else 'none was given'}"
            )
        self._every_secs = None if every_secs is None else seconds(every_secs, "every_secs")
        self._every_steps = None if every_steps is None else count(every_steps, "every_steps")
        self.reset()

    @classmethod
    def named(cls, **periods: Any) -> Self:
        """A timer of the one period that is not None, seconds if its name ends so; errors call it by that name."""
        given = {name: period for name, period in periods.items() if period is not None}
        if len(given) != 1:
            shown = ", ".join(f"{name}={period!r}" for name, period in periods.items())
            raise ValueError(f"{shown}: give exactly one of them{', and None for the other' if given else ''}")
        ((name, period),) = given.items()
        if name.endswith("secs"):
            return cls(every_secs=seconds(period, name))
        return cls(every_steps=count(period, name))

    def reset(self) -> None:
        """Forget every trigger, so that the next step triggers."""
        self._last_step: int | None = None
        self._last_time: float | None = None

    def should_trigger_for_step(self, step: int) -> bool:
        """Whether a full period has passed since the last trigger; never twice for one ``step``."""
        if self._last_step is None or self._last_time is None:
            return True
        if step == self._last_step:
            return False
        if self._every_steps is not None:
            return step >= self._last_step + self._every_steps
        assert self._every_secs is not None
        return time.monotonic() >= self._last_time + self._every_secs

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Start a period at ``step`` and now.

        Returns:
            The seconds and the steps since the last trigger, ``(None, None)`` at the first.
        """
        now = time.monotonic()
        last_step, last_time = self._last_step, self._last_time
        self._last_step, self._last_time = step, now
        if last_step is None or last_time is None:
            return None, None
        return now - last_time, step - last_step

    def last_triggered_step(self) -> int | None:
        """The step of the last trigger, ``None`` if there was none."""
        return self._last_step

    def next_due(self) -> Due:
        """The step or the moment before which :meth:`should_trigger_for_step` cannot be true."""
        if self._last_step is None or self._last_time is None:
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
    """A timer that never triggers: for a hook that has work only at the end."""

    def reset(self) -> None:
        """Nothing to forget."""

    def should_trigger_for_step(self, step: int) -> bool:
        """Always false."""
        return False

    def update_last_triggered_step(self, step: int) -> tuple[None, None]:
        """Always ``(None, None)``: no period ever starts."""
        return None, None

    def last_triggered_step(self) -> None:
        """Always ``None``."""

    def next_due(self) -> Due:
        """Never."""
        return NEVER

    def __repr__(self) -> str:
        return "NeverTriggerTimer()"


def seconds(value: float, name: str) -> float:
    """``value`` as a period in seconds, or a ValueError that says what a period is."""
    try:
        period = float(value)
    except (TypeError, ValueError):
        period = math.nan
    if not period >= 0:
        raise ValueError(f"{name}={value!r}: a period is a number of seconds, 0 or more")
    return period


def count(value: int, name: str) -> int:
    """``value`` as a number of steps or runs, or a ValueError that says what that is."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be a whole number, 1 or more")
    return number
