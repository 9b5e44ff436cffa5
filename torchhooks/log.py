"""The logger of the library, and how its lines reach a person who configured no logging."""

import logging

logger = logging.getLogger("torchhooks")


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Our own handler, told apart from anybody else's by its type."""


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
            logger.setLevel(logging.NOTSET)
    elif not ours:
        _show_on_stderr()


def _show_on_stderr() -> None:
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
