"""The logger of the library, and the fallback for applications that do not configure logging."""

import logging
import sys
from contextlib import suppress
from typing import TextIO

logger = logging.getLogger("torchhooks")


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


def show_lines() -> None:
    """Log lines of level INFO and above to stderr, unless the application has configured logging.

    Called for each new loop. If the application configures logging later, the next line removes the fallback, so that
    each line appears once, and only if the configured level allows it.
    """
    known = list(logging.Logger.manager.loggerDict.items())  # another thread may be adding a logger
    loggers = [logging.root, *(each for name, each in known if f"{name}.".startswith("torchhooks."))]
    if any(handler is not _fallback for each in loggers for handler in getattr(each, "handlers", ())):
        _remove_fallback()
        logger.removeFilter(_is_enabled_as_configured)
    elif _fallback not in logger.handlers:
        _fallback.logger_level = logger.level
        logger.addHandler(_fallback)
        logger.addFilter(_is_enabled_as_configured)
        logger.setLevel(logger.level or logging.INFO)


def _is_enabled_as_configured(record: logging.LogRecord) -> bool:
    """Return whether to log ``record``, after removing the fallback if the application has configured logging.

    A filter is called before any handler. The level of the fallback would let records pass that the root logger, whose
    level is not looked at for a record of another logger, is configured to hide.
    """
    if _has_other_handlers(logger):
        _remove_fallback()
    return logger.isEnabledFor(record.levelno)


def _has_other_handlers(origin: logging.Logger) -> bool:
    """Return whether the records of the logger ``origin`` reach another handler than the fallback."""
    each: logging.Logger | None = origin
    while each is not None:
        if any(handler is not _fallback for handler in each.handlers):
            return True
        each = each.parent if each.propagate else None
    return False


def _remove_fallback() -> None:
    if _fallback in logger.handlers:
        logger.removeHandler(_fallback)
        if logger.level == logging.INFO:  # any other level was set by the application
            logger.setLevel(_fallback.logger_level)


_rank = 0


def speak_as(rank: int) -> None:
    """Log as ``rank`` from now on: only warnings and errors, with the rank, unless it is 0, the chief."""
    global _rank
    _rank = rank
    if rank:
        logger.addFilter(_is_worth_repeating)
    else:
        logger.removeFilter(_is_worth_repeating)


def _is_worth_repeating(record: logging.LogRecord) -> bool:
    """Return whether to log ``record``, which other ranks probably log too, after adding the rank to it."""
    record.msg = f"rank {_rank}: {record.msg}"
    return record.levelno >= logging.WARNING


def _call_handlers(record: logging.LogRecord) -> None:
    """Call all handlers. A training run must not end because a line cannot be written to a closed stderr."""
    try:
        if logger.hasHandlers():
            type(logger).callHandlers(logger, record)
        elif record.levelno >= logging.WARNING:
            # Before the first loop, as in Saver.restore(). Python's handler of last resort prints the message alone.
            _fallback.handle(record)
    except Exception:
        if _stderr_works():
            raise
        # Otherwise logging itself raised this, when it reported the error of a handler to stderr.


def _stderr_works() -> bool:
    try:
        sys.stderr.write("")
    except Exception:
        return False
    return True


logger.callHandlers = _call_handlers  # type: ignore[method-assign]
