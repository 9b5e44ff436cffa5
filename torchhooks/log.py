"""The logger of the library, and the fallback for applications that do not configure logging."""

import logging
import sys
from typing import TextIO

logger = logging.getLogger("torchhooks")


class _StderrHandler(logging.StreamHandler[TextIO]):
    logger_level = logging.NOTSET  # that of the logger before this handler was added

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # looked up for each line, because a notebook or a test may replace it
        super().emit(record)


_fallback = _StderrHandler()
_fallback.setFormatter(logging.Formatter(logging.BASIC_FORMAT))


def show_lines() -> None:
    """Log lines of level INFO and above to stderr, unless the application has configured logging.

    Called for each new loop. If the application has configured logging since the last call, the fallback is removed, so
    that each line appears once.
    """
    known = list(logging.Logger.manager.loggerDict.items())  # another thread may be adding a logger
    loggers = [logging.root, *(each for name, each in known if f"{name}.".startswith("torchhooks."))]
    handlers = [handler for each in loggers for handler in getattr(each, "handlers", ())]
    if not handlers:
        _fallback.logger_level = logger.level
        logger.addHandler(_fallback)
        logger.setLevel(logger.level or logging.INFO)
    elif _fallback in handlers and len(handlers) > 1:
        logger.removeHandler(_fallback)
        if logger.level == logging.INFO:  # any other level was set by the application
            logger.setLevel(_fallback.logger_level)
