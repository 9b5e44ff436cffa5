"""The policy of recovery: which errors to recover from, how often, and after what pause."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from torchhooks.common.errors import AbortedError, add_note, brief
from torchhooks.common.log import logger

_FIRST_PAUSE_SECS = 1.0
_LONGEST_PAUSE_SECS = 60.0

# The codes and messages of CUDA errors after which no code in this process can use the device again: those for which
# CUDA's documentation (driver_types.h) says that the process must be terminated, a destroyed context, uncorrectable
# errors, and how the libraries on top of CUDA report them. CUDNN_STATUS_INTERNAL_ERROR is not among them, because it
# is also reported for a lack of memory.
_POISONED_CODES = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999})
_LIBRARIES = ("cuda", "cublas", "cudnn", "cufft", "cusolver", "cusparse")
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
    "context is destroyed",
    "tensor memory not completely freed",
    "mps client has been terminated",
    "async error has occured in external entity",
    "cuda error: unknown error",
    "status_execution_failed",
    "cufft_exec_failed",
    "cudnn_status_mapping_error",
    # The names of the errors, as CUDA's driver and runtime spell them, without underscores.
    "cudaerrorassert",
    "cudaerrorcontextisdestroyed",
    "cudaerrorhardwarestackerror",
    "cudaerrorillegaladdress",
    "cudaerrorillegalinstruction",
    "cudaerrorinvalidaddressspace",
    "cudaerrorinvalidpc",
    "cudaerrorlaunchfailed",
    "cudaerrorlaunchfailure",
    "cudaerrorlaunchtimeout",
    "cudaerrormisalignedaddress",
)

# The errors of which error_code is one of CUDA. torch has the class since 2.8.
_CODED: tuple[type[BaseException], ...] = tuple(filter(None, [getattr(torch, "AcceleratorError", None)]))


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
    """Return whether ``error``, or one in its chain or in a group, is a CUDA error that makes the device unusable."""
    return any(map(_is_poisoned, _chain(error)))


def _is_poisoned(error: BaseException) -> bool:
    if isinstance(error, _CODED) and getattr(error, "error_code", None) in _POISONED_CODES:
        return True
    text = brief(error).lower()
    if not any(library in text for library in _LIBRARIES):
        return False
    names = text.replace("_", "")  # CUDA_ERROR_ILLEGAL_ADDRESS of the driver is cudaErrorIllegalAddress of the runtime
    return any(words in text or words in names for words in _POISONED)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, the errors of a group, what it was raised from or while handling, like a printed traceback."""
    seen: set[int] = set()  # a chain can be a cycle
    links = [error]
    for link in links:
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        shows_context = link.__cause__ is None and not link.__suppress_context__
        before = link.__context__ if shows_context else link.__cause__
        links += [] if before is None else [before]  # extends the list that the loop iterates over
        links += link.exceptions if isinstance(link, BaseExceptionGroup) else []
