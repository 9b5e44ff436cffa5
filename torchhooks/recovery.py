"""The policy of recovery: which errors to recover from, how often, and after what pause."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from torchhooks.checks import exception_types, whole_number
from torchhooks.errors import AbortedError, add_note, brief
from torchhooks.log import logger

_FIRST_PAUSE_SECS = 1.0
_LONGEST_PAUSE_SECS = 60.0

# Parts of the messages of CUDA errors after which no code in this process can use the device again: those for which
# CUDA's documentation says that the process must be terminated, uncorrectable errors, and how cuBLAS reports them.
_POISONED = (
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "misaligned address",
    "invalid program counter",
    "not supported on global/shared address space",
    "hardware stack error",
    "peer gpu memory over nvlink or a hardware error",
    "uncorrectable",
    "cublas_status_execution_failed",
)


class Recovery:
    """Decides whether to recover from an error, and after what pause.

    Unlike TensorFlow, which retries forever and without a pause, at most ``max_recoveries`` are made within
    ``window_secs``. The first one after a successful run is made at once, the second after one second, and each further
    one after twice the previous pause, up to one minute. If there are several ``ranks``, none is made.
    """

    def __init__(
        self,
        errors: Iterable[type[BaseException]] = (AbortedError,),
        max_recoveries: int = 10,
        window_secs: float = 3600.0,
        ranks: int = 1,
    ) -> None:
        self._errors = exception_types(errors, "recoverable_errors", "(AbortedError,)")
        self._max_recoveries = whole_number(max_recoveries, "max_recoveries", 0)
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
        return isinstance(error, self._errors) and type(error) is not StopIteration

    def allows(self, error: BaseException) -> bool:
        """Return whether to recover from ``error``; if it is covered but not allowed, a note on it says why."""
        if not self.covers(error):
            return False
        now, made = time.monotonic(), self._made
        while made and made[0] <= now - self._window_secs:
            made.popleft()
        if self._ranks > 1:  # the others are in calls that need this one
            why = f"{self._ranks} ranks cannot restore in the middle of a run: torchrun --max-restarts restarts them"
        elif is_poisoned(error):
            why = "this process has lost its CUDA context: restart it"
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


def is_poisoned(error: BaseException) -> bool:
    """Return whether ``error`` or an error in its chain is a CUDA error that makes the device unusable."""
    texts = [brief(link).lower() for link in _chain(error)]
    return any("cuda" in text and any(words in text for words in _POISONED) for text in texts)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, the error it was raised from or while handling, and so on, like a printed traceback."""
    seen: set[int] = set()  # a chain can be a cycle
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        shows_context = link.__cause__ is None and not link.__suppress_context__
        link = link.__context__ if shows_context else link.__cause__
