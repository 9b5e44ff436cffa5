"""The policy of recovery: which errors to recover from, how often, and after what pause."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from torchhooks.common.errors import AbortedError, add_note, brief, chain
from torchhooks.common.log import logger

_FIRST_PAUSE_SECS = 1.0
_LONGEST_PAUSE_SECS = 60.0

# What torch raises when the device fails, after which this process may be unable to use it. A lack of memory is
# another error. torch has the class since 2.8; before that, only the text says it.
_DEVICE_FAILED: tuple[type[BaseException], ...] = tuple(filter(None, [getattr(torch, "AcceleratorError", None)]))


class Recovery:
    """Decides whether to recover from an error, and after what pause.

    Unlike TensorFlow, which retries forever and without a pause, at most ``max_recoveries`` are made within
    ``window_secs``. The first one after a successful run is made at once, the second after one second, and each further
    one after twice the previous pause, up to one minute. If there are several ``ranks``, none is made.
    """

    def __init__(
        self,
        errors: tuple[type[BaseException], ...] = (AbortedError,),
        max_recoveries: int = 10,
        window_secs: float = 3600.0,
        ranks: int = 1,
    ) -> None:
        self._errors = errors
        self._max_recoveries = max_recoveries
        self._window_secs = window_secs
        self._ranks = ranks
        self._made: deque[float] = deque()
        self._in_a_row = 0
        self._last_pause = 0.0

    def run_went_well(self) -> None:
        """Reset the pause, so that the next recovery is made at once."""
        self._in_a_row = 0

    def covers(self, error: BaseException) -> bool:
        """Return whether ``error`` is of a kind to recover from."""
        # StopIteration itself ends a loop cleanly, even if recoverable_errors is (Exception,).
        return isinstance(error, self._errors) and type(error) is not StopIteration

    def grant(self, error: BaseException) -> bool:
        """Return whether to recover from ``error``, and count the recovery. If it is refused, a note says why."""
        if not self.covers(error):
            return False
        now, made = time.monotonic(), self._made
        while made and made[0] <= now - self._window_secs:
            made.popleft()
        if self._ranks > 1:  # the others are in calls that need this one
            why = f"{self._ranks} ranks cannot restore in the middle of a run: torchrun --max-restarts restarts them"
        elif is_device_error(error):
            why = "the process may have lost its CUDA context: restart it"
        elif len(made) >= self._max_recoveries:
            limit = f"max_recoveries={self._max_recoveries}"
            why = f"of {limit}: {len(made)} were made within the last {self._window_secs:g} s"
        else:
            made.append(now)
            return True
        add_note(error, f"torchhooks: not recovered from, because {why}")
        return False

    def pause(self, error: BaseException, wait: Callable[[float], object]) -> None:
        """Log the recovery from ``error``, then call ``wait(secs)`` unless it is the first in a row."""
        self._in_a_row += 1
        pause = 0.0 if self._in_a_row == 1 else min(max(_FIRST_PAUSE_SECS, 2 * self._last_pause), _LONGEST_PAUSE_SECS)
        self._last_pause = pause
        when = f"in {pause:g} s" if pause else "now"
        # With the traceback, because after a successful recovery the error is reported nowhere else.
        logger.warning(
            "recovering %s from %s (recovery %d in a row)", when, brief(error), self._in_a_row, exc_info=error
        )
        if pause:
            wait(pause)


def is_device_error(error: BaseException) -> bool:
    """Return whether ``error``, or one in its chain or in a group, is an error of the device itself."""
    return any(
        isinstance(one, _DEVICE_FAILED) or (isinstance(one, RuntimeError) and str(one).startswith("CUDA error"))
        for one in chain(error)
    )
