"""Signals that request a clean stop: noticed at the end of a run, and delivered to the old handlers at the end."""

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
    """Records signals between :meth:`install` and :meth:`restore`.

    The handler only sets :attr:`received` and calls ``wake``. :meth:`restore` reinstates the old handlers and delivers
    the signal to them again. By default, SIGTERM then ends the process (exit code 143) and SIGINT raises
    KeyboardInterrupt (130 if it is not caught). A second SIGINT before that raises KeyboardInterrupt at once.

    Processes that are forked in between, such as the workers of a DataLoader, use the old handlers.
    """

    def __init__(self, signals: Iterable[str | signal.Signals], wake: Callable[[], object] = bool) -> None:
        self.received: str | None = None
        """The name of the first signal that was received, such as ``"SIGTERM"``."""
        if isinstance(signals, str):
            raise TypeError(f"signals={signals!r}: give a list of names, [{signals!r}]")
        self._signals = [_signal(given) for given in signals]
        self._wake = wake
        self._old: dict[int, Any] = {}
        self._pid = os.getpid()

    def install(self) -> None:
        """Handle the signals from now on; outside the main thread, where Python does not allow it, log a warning."""
        if self._signals and threading.current_thread() is not threading.main_thread():
            names = ", ".join(number.name for number in self._signals)
            logger.warning("not in the main thread, so %s will not stop this loop: create it in the main thread", names)
            return
        for number in self._signals:
            old = signal.signal(number, self._handle)
            self._old[number] = signal.SIG_DFL if old is None else old  # None: not installed from Python

    def restore(self) -> None:
        """Reinstate the old handlers and deliver the received signal to them. A second call is a no-op."""
        old, self._old = self._old, {}
        for number, handler in old.items():
            signal.signal(number, handler)
        if old and self.received is not None:
            name, self.received = self.received, None
            for stream in (sys.stdout, sys.stderr):  # a process that a signal ends does not flush its buffers
                with contextlib.suppress(Exception):
                    stream.flush()
            signal.raise_signal(signal.Signals[name])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # in a forked child
            signal.signal(number, self._old.get(number, signal.SIG_DFL))
            signal.raise_signal(number)
        elif self.received is None:
            self.received = signal.Signals(number).name
            self._wake()
        elif number == signal.SIGINT:
            self.received = None  # this exception delivers it, so restore() must not
            raise KeyboardInterrupt


def _signal(given: str | signal.Signals) -> signal.Signals:
    try:
        number = signal.Signals[given] if isinstance(given, str) else signal.Signals(given)
    except (KeyError, ValueError):
        raise ValueError(f"signals has {given!r}: give names of signals of this system, such as 'SIGTERM'") from None
    if number.name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"signals has {number.name!r}, which no process can handle: leave it out")
    return number
