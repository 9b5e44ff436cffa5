"""When to try again after an error, and how long to wait before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from torchhooks.errors import AbortedError, add_note, brief
from torchhooks.log import logger

_FIRST_PAUSE_SECS = 1.0
_LONGEST_PAUSE_SECS = 60.0

# What CUDA says when the context is lost for good: nothing in this process can use the device again.
_POISONED = (
    "device-side assert",
    "illegal memory access",
    "unspecified launch failure",
    "misaligned address",
    "ecc error",
    "uncorrectable",
    "cublas_status_execution_failed",
)


class Recovery:
    """Which errors are recovered from, how often, and after how long a pause.

    Unlike TensorFlow, which tries for ever and at once, the tries are bounded: the first after a run that went well is
    made at once, each further one after twice the pause of the one before it.

    Args:
        errors: the exceptions to recover from; subclasses count.
        max_recoveries: how many to make within ``window_secs`` seconds.
        window_secs: see there.

    Raises:
        TypeError: something in ``errors`` is no exception class.
    """

    def __init__(
        self,
        errors: Iterable[type[BaseException]] = (AbortedError,),
        max_recoveries: int = 10,
        window_secs: float = 3600.0,
    ) -> None:
        self._errors = tuple(errors)
        for kind in self._errors:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise TypeError(f"recoverable_errors has {kind!r}: give exception classes, such as AbortedError")
        if max_recoveries < 0:
            raise ValueError(f"max_recoveries={max_recoveries!r}: must be 0 or more")
        self._max_recoveries = max_recoveries
        self._window_secs = window_secs
        self._made: deque[float] = deque()
        self._in_a_row = 0

    def run_went_well(self) -> None:
        """The next recovery is a first one again."""
        self._in_a_row = 0

    def covers(self, error: BaseException) -> bool:
        """Whether ``error`` is of a kind that is recovered from."""
        return isinstance(error, self._errors) and type(error) is not StopIteration

    def allows(self, error: BaseException) -> bool:
        """Whether to recover from ``error``; if it is one to recover from and it is not done, a note on it says why."""
        if not self.covers(error):
            return False
        if is_poisoned(error):
            add_note(
                error, "torchhooks: not recovered from, because this process has lost its CUDA context: start again"
            )
            return False
        now = time.monotonic()
        while self._made and self._made[0] <= now - self._window_secs:
            self._made.popleft()
        if len(self._made) >= self._max_recoveries:
            add_note(
                error, f"torchhooks: not recovered from: {len(self._made)} times in {self._window_secs:g} s already"
            )
            return False
        self._made.append(now)
        return True

    def pause(self, error: BaseException, wait: Callable[[float], object]) -> None:
        """Say that a recovery from ``error`` is made, and ``wait`` before it, if it is not the first in a row."""
        self._in_a_row += 1
        pause = 0.0
        if self._in_a_row > 1:
            pause = min(_FIRST_PAUSE_SECS * 2 ** (self._in_a_row - 2), _LONGEST_PAUSE_SECS)
        when = f"in {pause:g} s" if pause else "now"
        logger.warning("recovering %s from %s (recovery %d in a row)", when, brief(error), self._in_a_row)
        if pause:
            wait(pause)


def is_poisoned(error: BaseException) -> bool:
    """Whether ``error`` is one of CUDA's after which the process cannot use the device any more."""
    text = brief(error).lower()
    return "cuda" in text and any(words in text for words in _POISONED)
