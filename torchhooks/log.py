"""The logger of the library, and how its lines reach a person who configured no logging."""

import logging
import sys
from typing import TextIO

logger = logging.getLogger("torchhooks")


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Our own handler, told apart from anybody else's by its type; writes to what ``sys.stderr`` is at the time."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
        self.set_level = logger.level == logging.NOTSET
        """Whether the level of the logger is our doing, and not that of the person."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # which a notebook or a test may have replaced
        super().emit(record)


def show_lines() -> None:
    """See to it that a person who configured no logging sees the lines on stderr, and one who did sees them once.

    Decided at each call anew: if there is a handler of somebody else's by now, ours goes.
    """
    handlers = [*logger.handlers, *logging.getLogger().handlers]
    for name, child in list(logging.Logger.manager.loggerDict.items()):
        if name.startswith("torchhooks.") and isinstance(child, logging.Logger):
            handlers += child.handlers
    ours = [handler for handler in handlers if isinstance(handler, _StderrHandler)]
    if len(handlers) > len(ours):
        for handler in ours:
            logger.removeHandler(handler)
            if handler.set_level and logger.level == logging.INFO:
                logger.setLevel(logging.NOTSET)
    elif not ours:
        _show_on_stderr()


def _show_on_stderr() -> None:
    handler = _StderrHandler()
    logger.addHandler(handler)
    if handler.set_level:
        logger.setLevel(logging.INFO)
