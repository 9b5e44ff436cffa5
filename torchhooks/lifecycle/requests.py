"""What other processes ask a loop for while it runs: signals and files, for the timers OnSignal and OnFile."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType

from torchhooks.common.log import logger
from torchhooks.lifecycle.signals import SignalWatch

LOOK_SECS = 1.0


class Requests:
    """Tells a loop of the signals and the files that it was told to wait for, between its start and its end.

    Args:
        arrive: called with the name of a signal that has arrived, in its handler, or with the absolute path of a file
            that has appeared, in the thread that looks for files.
        stopping: the signals that stop the loop, which therefore cannot ask for anything else.
    """

    def __init__(self, arrive: Callable[[str], object], stopping: Iterable[str] = ()) -> None:
        self._arrive = arrive
        self.every_look: Callable[[], object] = bool
        """Called each time that the thread has looked for files."""
        self._stopping = frozenset(stopping)
        self._watched: set[str] = set()
        self._watches: list[_RequestWatch] = []
        # By path, what to call. Replaced, and never changed: the thread that looks has the old or the new one.
        self._files: dict[str, Callable[[str], object]] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def wait_for(self, requests: Iterable[str]) -> None:
        """Wait for signals, given by their names, and for files, given by their absolute paths.

        Raises:
            ValueError: a signal stops the loop.
        """
        for request in requests:
            if request in self._watched:
                continue
            self._watched.add(request)
            if os.path.isabs(request):
                self.wait_for_file(request, self._arrive)
            elif request in self._stopping:
                raise ValueError(
                    f"OnSignal({request!r}): {request} stops this loop, because its signals=... has it: give one of "
                    "them another signal"
                )
            else:
                self._watches.append(_RequestWatch(request, self._arrive))
                self._watches[-1].install()

    def wait_for_file(self, path: str, call: Callable[[str], object]) -> None:
        """Call ``call(path)`` whenever a file appears at the absolute ``path``, or now if there is one."""
        self._files = {**self._files, path: call}
        self._look_for(path, call)  # so that it is certain when a file counts that is there already
        if self._thread is None:
            # The thread does not keep a loop that is dropped without being closed.
            looking = partial(_look, weakref.ref(self), self._closed)
            self._thread = threading.Thread(target=looking, name="torchhooks requests", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for nothing any more. The signals have the effect again that they had before."""
        self._closed.set()
        for watch in self._watches:
            watch.restore()

    def look(self) -> None:
        """Look for each file once. The thread calls this."""
        for path, call in self._files.items():
            self._look_for(path, call)
        self.every_look()

    def _look_for(self, path: str, call: Callable[[str], object]) -> None:
        """Remove the file ``path``, and say that it has appeared, if it is there."""
        try:
            os.remove(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            logger.warning(
                "%s is a request that cannot be removed (%s): it and later ones are ignored", path, error.strerror
            )
            self._files = {other: called for other, called in self._files.items() if other != path}
            return
        call(path)


def _look(requests: weakref.ref[Requests], closed: threading.Event) -> None:
    while not closed.wait(LOOK_SECS):
        if (found := requests()) is None:
            return
        found.look()
        del found


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
