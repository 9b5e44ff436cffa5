"""The logger of the library, and where its lines go if the application does not configure logging."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO


class _Stderr(logging.StreamHandler[TextIO]):
    def __init__(self) -> None:
        # Not the constructor of StreamHandler, which sets the stream, here a property.
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter(logging.BASIC_FORMAT))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr  # looked up for each line, because a notebook or a test may replace it


# Nothing is added to the logger of the application, so nothing has to be removed once it configures logging.
fallback = logging.Logger("torchhooks")
"""Where the lines go if the application does not configure logging."""
fallback.addHandler(_Stderr())

_rank = 0


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """Logs the lines of the library through the logger ``"torchhooks"``; to stderr if no handler would get them."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a line. A training run must not end because the line cannot be written to a closed stderr."""
        if _rank:
            if level < logging.WARNING:
                return  # the chief logs it too
            msg = f"rank {_rank}: {msg}"
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the line is from the caller of this method
        try:
            # Decided for each line: the application may configure logging in the middle of a training run.
            if self.logger.hasHandlers():
                self.logger.log(level, msg, *args, **kwargs)  # not super().log(), which would only call this again
            elif level >= (self.logger.level or logging.INFO) and level > self.logger.manager.disable:
                fallback.log(level, msg, *args, **kwargs)
        except Exception:
            if _stderr_works():
                raise
            # Otherwise logging itself raised this, when it reported the error of a handler to stderr.


logger = _Logger(logging.getLogger("torchhooks"))


def speak_as(rank: int) -> None:
    """Log as ``rank`` from now on: only warnings and errors, with the rank, unless it is 0, the chief."""
    global _rank
    _rank = rank


def _stderr_works() -> bool:
    try:
        sys.stderr.write("")
    except Exception:
        return False
    return True
