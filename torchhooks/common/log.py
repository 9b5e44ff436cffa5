"""The logger of the library, and the fallback for applications that do not configure logging."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any, TextIO

_application_logger = logging.getLogger("torchhooks")  # which applications configure


class _Fallback(logging.StreamHandler[TextIO]):
    """Writes to stderr for as long as no other handler gets the records."""

    logger_level = logging.NOTSET  # that of the logger before this handler was added

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr  # looked up for each line, because a notebook or a test may replace it
        if stream is not None and not _has_other_handlers(logging.getLogger(record.name)):
            self.stream = stream
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        with suppress(Exception):  # logging reports the error to stderr, which may be what failed
            super().handleError(record)


_fallback = _Fallback()
_fallback.setFormatter(logging.Formatter(logging.BASIC_FORMAT))


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """Logs the lines of the library through the logger ``"torchhooks"``."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a line. A training run must not end because the line cannot be written to a closed stderr."""
        # The application may have configured logging since the last line. Decided before the level is looked at: that
        # of the fallback would let lines pass that the root logger is configured to hide.
        if _has_other_handlers(self.logger):
            _remove_fallback()
        elif _fallback not in self.logger.handlers:
            # Before the first loop, as in Saver.restore(). Python's handler of last resort prints the message alone.
            _add_fallback(logging.WARNING)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the line is from the caller of this method
        try:
            self.logger.log(level, msg, *args, **kwargs)  # not super().log(), which would only call this again
        except Exception:
            if _stderr_works():
                raise
            # Otherwise logging itself raised this, when it reported the error of a handler to stderr.


logger = _Logger(_application_logger)


def show_lines() -> None:
    """Log lines of level INFO and above to stderr, unless the application has configured logging.

    Called for each new loop. If the application configures logging later, the next line removes the fallback, so that
    each line appears once, and only if the configured level allows it.
    """
    known = list(logging.Logger.manager.loggerDict.items())  # another thread may be adding a logger
    loggers = [logging.root, *(each for name, each in known if f"{name}.".startswith("torchhooks."))]
    if any(handler is not _fallback for each in loggers for handler in getattr(each, "handlers", ())):
        _remove_fallback()
    elif _fallback not in _application_logger.handlers or _fallback.level:
        _add_fallback(logging.NOTSET)
        _application_logger.setLevel(_application_logger.level or logging.INFO)


def _has_other_handlers(origin: logging.Logger) -> bool:
    """Return whether the records of the logger ``origin`` reach another handler than the fallback."""
    each: logging.Logger | None = origin
    while each is not None:
        for handler in each.handlers:  # not any(), which would create a generator for each logger and line
            if handler is not _fallback:
                return True
        each = each.parent if each.propagate else None
    return False


def _add_fallback(level: int) -> None:
    """Have the fallback write what the logger lets pass, from ``level`` up."""
    _fallback.logger_level = _application_logger.level
    _fallback.setLevel(level)
    _application_logger.addHandler(_fallback)


def _remove_fallback() -> None:
    if _fallback in _application_logger.handlers:
        _application_logger.removeHandler(_fallback)
        # Put back what show_lines() changed. Any other level than INFO was set by the application.
        if not _fallback.level and _application_logger.level == logging.INFO:
            _application_logger.setLevel(_fallback.logger_level)


_rank = 0


def speak_as(rank: int) -> None:
    """Log as ``rank`` from now on: only warnings and errors, with the rank, unless it is 0, the chief."""
    global _rank
    _rank = rank
    if rank:
        _application_logger.addFilter(_is_worth_repeating)
    else:
        _application_logger.removeFilter(_is_worth_repeating)


def _is_worth_repeating(record: logging.LogRecord) -> bool:
    """Return whether to log ``record``, which other ranks probably log too, after adding the rank to it."""
    record.msg = f"rank {_rank}: {record.msg}"
    return record.levelno >= logging.WARNING


def _stderr_works() -> bool:
    try:
        sys.stderr.write("")
    except Exception:
        return False
    return True
