"""The signals by which other processes ask a hook for something while the loop runs, for the timer OnSignal."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from types import FrameType

from torchhooks.common.log import logger
from torchhooks.lifecycle.signals import SignalWatch


class Requests:
    """Tells a loop of the signals that its hooks wait for, between its start and its end.

    Args:
        arrive: called with the name of a signal that has arrived, in its handler.
        stopping: the signals that stop the loop, which therefore cannot ask for anything else.
    """

    def __init__(self, arrive: Callable[[str], object], stopping: Iterable[str] = ()) -> None:
        self._arrive = arrive
        self._stopping = frozenset(stopping)
        self._watches: dict[str, _RequestWatch] = {}

    def wait_for(self, signals: Iterable[str]) -> None:
        """Wait for signals, given by their names.

        Raises:
            ValueError: a signal stops the loop.
        """
        for name in signals:
            if name in self._stopping:
                raise ValueError(
                    f"OnSignal({name!r}): {name} stops this loop, because its signals=... has it: give one of them "
                    "another signal"
                )
            if name not in self._watches:
                self._watches[name] = _RequestWatch(name, self._arrive)
                self._watches[name].install()

    def close(self) -> None:
        """Wait for nothing any more. The signals have the effect again that they had before."""
        for watch in self._watches.values():
            watch.restore()


class _RequestWatch(SignalWatch):
    """Calls ``arrive`` for each signal of one kind, which is not delivered to the old handler."""

    def __init__(self, name: str, arrive: Callable[[str], object]) -> None:
        super().__init__([name])
        self._name = name
        self._arrive = arrive

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            super().install()
        else:
            logger.warning(
                "not in the main thread, so %s will reach no OnSignal of this loop: create it in the main thread",
                self._name,
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a forked process, such as the worker of a DataLoader: it must not end because of a request
        if not self._open:
            self._pass_on(number, frame)
        else:
            self._arrive(self._name)
