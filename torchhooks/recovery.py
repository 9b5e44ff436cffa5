"""When to try again after an error, and how long to wait before."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from torchhooks.errors import AbortedError, add_note, brief
from torchhooks.log import logger

_FIRST_PAUSE_SECS = 1.0
_LONGEST_PAUSE_SECS = 60.0
_MOST_DOUBLINGS = 64  # more would not fit into a float

# What CUDA says when the context is lost for good: nothing in this process can use the device again. Those of which its
# documentation says that the process must be terminated, the uncorrectable ones, and what cuBLAS makes of them.
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
    """Which errors are recovered from, how often, and after how long a pause.

    Unlike TensorFlow, which tries for ever and at once, the tries are bounded: the first after a run that went well is
    made at once, each further one after twice the pause of the one before it.

    Args:
        errors: the exceptions to recover from; subclasses count.
        max_recoveries: how many to make within ``window_secs`` seconds.
        window_secs: see there.

    Raises:
        TypeError: ``errors`` is no collection of exception classes.
        ValueError: ``max_recoveries`` is no number of recoveries.
    """

    def __init__(
        self,
        errors: Iterable[type[BaseException]] = (AbortedError,),
        max_recoveries: int = 10,
        window_secs: float = 3600.0,
    ) -> None:
        self._errors = _exception_classes(errors)
        self._max_recoveries = _number_of_recoveries(max_recoveries)
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
                error,
                f"torchhooks: not recovered from, because of max_recoveries={self._max_recoveries}: there were "
                f"{len(self._made)} within {self._window_secs:g} s",
            )
            return False
        self._made.append(now)
        return True

    def pause(self, error: BaseException, wait: Callable[[float], object]) -> None:
        """Say that a recovery from ``error`` is made, and ``wait`` before it, if it is not the first in a row."""
        self._in_a_row += 1
        pause = 0.0
        if self._in_a_row > 1:
            doublings = min(self._in_a_row - 2, _MOST_DOUBLINGS)
            pause = min(_FIRST_PAUSE_SECS * 2**doublings, _LONGEST_PAUSE_SECS)
        when = f"in {pause:g} s" if pause else "now"
        # With its traceback: if this goes well, nobody sees the error again.
        logger.warning(
            "recovering %s from %s (recovery %d in a row)", when, brief(error), self._in_a_row, exc_info=error
        )
        if pause:
            wait(pause)


def is_poisoned(error: BaseException) -> bool:
    """Whether ``error``, or one that it came of, is one of CUDA's after which the process cannot use the device."""
    texts = [brief(link).lower() for link in _chain(error)]
    return any("cuda" in text and any(words in text for words in _POISONED) for text in texts)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, what it was raised from or while handling, and so on."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        unset = link.__cause__ is None and not link.__suppress_context__
        link = link.__context__ if unset else link.__cause__


def _exception_classes(given: object) -> tuple[type[BaseException], ...]:
    if not isinstance(given, Iterable):
        raise TypeError(f"recoverable_errors={given!r}: give a tuple of exception classes, such as (AbortedError,)")
    kinds = tuple(given)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError(f"recoverable_errors has {kind!r}: give exception classes, such as AbortedError")
    return kinds


def _number_of_recoveries(given: int) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        number = -1
    if number < 0 or isinstance(given, bool):
        raise ValueError(f"max_recoveries={given!r}: must be a whole number, 0 or more")
    return number
