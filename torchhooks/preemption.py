"""Signals that ask a training to stop: noticed at the end of a run, never swallowed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torchhooks.log import logger


class SignalWatch:
    """Takes note of signals, between :meth:`install` and :meth:`restore`.

    The handler sets :attr:`received`, calls ``wake`` and does nothing else. :meth:`restore` puts the old handlers back
    and delivers the signal again, to them: by default SIGTERM then ends the process (exit code 143), and SIGINT raises
    KeyboardInterrupt (130 if nobody catches it). A second SIGINT raises KeyboardInterrupt at once.

    Processes that are forked meanwhile, such as a DataLoader's workers, go by the old handlers.

    Args:
        signals: their names, or members of :class:`signal.Signals`.
        wake: called in the handler, once :attr:`received` is set.

    Raises:
        ValueError: this system has no such signal, or none that can be handled.
    """

    def __init__(self, signals: Iterable[str | signal.Signals], wake: Callable[[], object] = bool) -> None:
        self.received: str | None = None
        """The name of the first signal that came, such as ``"SIGTERM"``."""
        if isinstance(signals, str):
            raise TypeError(f"signals={signals!r}: give a list of names, [{signals!r}]")
        self._signals = [_signal(given) for given in signals]
        self._wake = wake
        self._old: dict[int, Any] = {}
        self._pid = os.getpid()

    def install(self) -> None:
        """Handle the signals from now on. Outside of the main thread, where Python cannot, a warning says so."""
        if self._signals and threading.current_thread() is not threading.main_thread():
            names = ", ".join(number.name for number in self._signals)
            logger.warning("not the main thread, so %s will not stop this loop: make it in the main thread", names)
            return
        for number in self._signals:
            self._old[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put the old handlers back, and deliver what came to them. Again is harmless."""
        old, self._old = self._old, {}
        for number, handler in old.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if old and self.received is not None:
            name, self.received = self.received, None
            for stream in (sys.stdout, sys.stderr):  # what was printed must not end with the process
                with contextlib.suppress(Exception):
                    stream.flush()
            signal.raise_signal(signal.Signals[name])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        old = self._old.get(number, signal.SIG_DFL)
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL if old is None else old)
            signal.raise_signal(number)
        elif self.received is None:
            self.received = signal.Signals(number).name
            self._wake()
        elif number == signal.SIGINT:
            self.received = None  # it is delivered now
            raise KeyboardInterrupt


def _signal(given: str | signal.Signals) -> signal.Signals:
    try:
        number = signal.Signals[given] if isinstance(given, str) else signal.Signals(given)
    except (KeyError, ValueError):
        raise ValueError(f"signals has {given!r}: give names of signals of this system, such as 'SIGTERM'") from None
    if number.name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"signals has {number.name!r}, which no process can handle")
    return number
