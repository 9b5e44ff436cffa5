"""Signals that request a clean stop, and signals by which other processes ask for a hook.

A :class:`SignalWatch` records those that stop the loop, until the end of the run, and delivers them to the old handlers
when the loop closes. :class:`HookSignals` has those of the timer ``OnSignal``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, ClassVar

from torchhooks.common.errors import add_note, brief
from torchhooks.common.log import logger
from torchhooks.common.text import shown
from torchhooks.common.timers import checked_signal

_TORCH_HANDLER = "torch.utils.data._utils.signal_handling"  # the module of torch's handler of SIGCHLD
_POLL_SECS = 0.1
_SAME_REQUEST_SECS = 1.0  # timeout(1) signals the process and then its group, so the process gets one request twice


class SignalWatch:
    """Records signals between :meth:`install` and :meth:`restore`.

    The handler only records the signal and calls ``wake``. :meth:`restore` reinstates the old handlers and delivers the
    signals to them again. By default, SIGTERM then ends the process (exit code 143) and SIGINT raises KeyboardInterrupt
    (130 if it is not caught, or 1 if a function that runs at exit evaluates a string of Python code).

    The second signal of one kind interrupts at once. SIGINT raises KeyboardInterrupt. Any other signal is delivered to
    its old handler, unless it arrives within a second of the first.

    Several watches may be open at a time and closed in any order. The newest one records a signal; closing it passes
    the signal to the one before it. Processes that are forked in between, such as the workers of a DataLoader, use the
    old handlers.
    """

    lost_worker: ClassVar[BaseException | None] = None
    """The error of a DataLoader worker's death that was noticed while the main thread did something else.

    One for all watches, because torch has one handler for all DataLoaders.
    """

    def __init__(self, signals: Iterable[str | signal.Signals] | None, wake: Callable[[], object] = bool) -> None:
        self.received: str | None = None
        """The name of the first signal that was received, such as ``"SIGTERM"``."""
        self.undelivered: list[signal.Signals] = []
        """The signals that :meth:`restore` has to deliver, in the order of their arrival."""
        self._signals = checked_signals(signals)
        self._wake = wake
        self._arrived: dict[int, float] = {}
        self._old: dict[int, Any] = {}
        self._open = False
        self._pid = os.getpid()

    def install(self) -> None:
        """Handle the signals from now on; outside the main thread, where Python does not allow it, log a warning."""
        if self._signals and threading.current_thread() is not threading.main_thread():
            names = ", ".join(number.name for number in self._signals)
            logger.warning("not in the main thread, so %s will not stop this loop: create it in the main thread", names)
            return
        self._open = True
        for number in dict.fromkeys(self._signals):
            self._put(number, self._handle)

    def restore(self) -> None:
        """Reinstate the old handlers and deliver the received signals to them. A second call is a no-op."""
        # First of all: from here on the handler passes signals on. A signal that it recorded after the delivery below
        # would be lost. The same goes for a handler that cannot be removed.
        self._open = False
        try:
            self._remove_handlers()
        except BaseException:  # an interrupt between two of them
            self._remove_handlers()
            raise
        if self.undelivered:
            for stream in (sys.stdout, sys.stderr):  # a process that a signal ends does not flush its buffers
                with contextlib.suppress(Exception):
                    stream.flush()
            self._deliver()

    def deliver_too(self, name: str) -> None:
        """Have :meth:`restore` deliver a signal that another process has received. Other threads ignore it."""
        if threading.current_thread() is threading.main_thread():
            self.undelivered.append(signal.Signals[name])

    def wait(self, secs: float) -> bool:
        """Wait for ``secs`` seconds, or until a signal has arrived, and return whether one has."""
        end = time.monotonic() + secs
        # An Event that the handler sets could deadlock: the handler may interrupt its wait() while that has its lock.
        while self.received is None and (left := end - time.monotonic()) > 0:
            threading.Event().wait(min(left, _POLL_SECS))
        return self.received is not None

    def wait_if_lost(self, error: BaseException, secs: float) -> bool:
        """Return whether ``error``, out of iterating over the data, may be due to a signal that has arrived.

        A signal to the process group may end a worker before it reaches this process. So wait up to ``secs`` seconds
        for it if a lost process caused ``error``.
        """
        if _is_lost_process(error):
            if self.lost_worker is not None:
                add_note(error, f"torchhooks: {brief(self.lost_worker)}")
                SignalWatch.lost_worker = None
            if self._open and self._signals:
                self.wait(secs)
        return self.received is not None

    def defer_lost_workers(self) -> None:
        """Keep the death of a DataLoader worker from interrupting anything but the wait for data.

        torch's handler of SIGCHLD raises wherever the main thread happens to be, as in the middle of the step or of a
        save. A signal to the process group ends the workers too, and the run in progress has to be completed. The
        DataLoader notices the death itself when it waits for data of that worker.
        """
        if not self._open or not hasattr(signal, "SIGCHLD") or signal.SIGCHLD in self._old:
            return
        if threading.current_thread() is not threading.main_thread():
            return  # the handler raises in the main thread, and Python allows no other thread to replace it
        handler = signal.getsignal(signal.SIGCHLD)
        if getattr(handler, "__module__", None) in (_TORCH_HANDLER, __name__):
            self._put(signal.SIGCHLD, self._child_ended)

    def _put(self, number: int, handler: Callable[[int, FrameType | None], object]) -> None:
        old = signal.getsignal(number)
        # Before the installation: an interrupt may come between any two instructions.
        self._old[number] = signal.SIG_DFL if old is None else old  # None: not installed from Python
        signal.signal(number, handler)

    def _remove_handlers(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python does not allow it there
        for number, old in self._old.items():
            # Loops may be closed in any order. If a newer watch has this one for its old handler, it gets that of this
            # one.
            above, watch = None, _owner(signal.getsignal(number))
            while watch is not None and watch is not self:
                above, watch = watch, _owner(watch._old.get(number))  # noqa: SLF001 - its own class
            if watch is self and above is None:
                signal.signal(number, old)
            elif watch is self and above is not None:
                above._old[number] = old  # noqa: SLF001 - its own class

    def _deliver(self) -> None:
        number = self.undelivered.pop(0)  # before the old handler runs: it may raise, or never return
        try:
            signal.raise_signal(number)
        finally:  # also if the handler raised, as SIGINT's does
            if self.undelivered:
                self._deliver()

    # Python runs handlers in the main thread, between any two instructions: of the step, of a hook, of a handler. So
    # they take no lock, which the code that they interrupt may hold, and log nothing, because logging has locks. They
    # set attributes, which other threads can read at any time, and the loop does the rest at the end of the run.

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._open or os.getpid() != self._pid:  # closed, or in a forked child
            self._pass_on(number, frame)
        elif (first := self._arrived.setdefault(number, now)) is now:  # atomic: a handler can be interrupted by itself
            # In this order: a loop that finds that a signal was received ends, and then has to deliver the signal.
            self.undelivered.append(signal.Signals(number))
            if self.received is None:
                self.received = signal.Signals(number).name
            self.defer_lost_workers()
            self._wake()  # last, because the end of the run that it causes looks at what is set above
        elif number == signal.SIGINT or now - first >= _SAME_REQUEST_SECS:
            if number in self.undelivered:
                self.undelivered.remove(signal.Signals(number))  # it is delivered here
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            self._pass_on(number, frame)

    def _child_ended(self, number: int, frame: FrameType | None) -> None:
        try:
            self._pass_on(number, frame)
        except RuntimeError as error:
            if not self._open or os.getpid() != self._pid or _waits_for_data(frame):
                raise
            SignalWatch.lost_worker = error

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Do with the signal what would have been done without this watch."""
        old = self._old.get(number, signal.SIG_DFL)
        if callable(old):
            old(number, frame)
        elif old == signal.SIG_DFL:
            # Python cannot call the default action. It can install it, and send the signal once more.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


class HookSignals:
    """Tells a loop of the signals that its hooks wait for, between its start and its end.

    Args:
        arrive: called with the name of a signal that has arrived, in its handler.
        stopping: the signals that stop the loop, which therefore cannot ask for anything else.
    """

    def __init__(self, arrive: Callable[[str], object], stopping: Iterable[str] = ()) -> None:
        self._arrive = arrive
        self._stopping = frozenset(stopping)
        self._watches: dict[str, _HookSignalWatch] = {}

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
                # Kept before it is installed, so that close() removes it even after an interrupt between the two lines.
                self._watches[name] = _HookSignalWatch(name, self._arrive)
                self._watches[name].install()

    def close(self) -> None:
        """Wait for nothing any more. The signals have the effect again that they had before."""
        for watch in self._watches.values():
            watch.restore()


class _HookSignalWatch(SignalWatch):
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


def print_no_traceback_of(interrupt: KeyboardInterrupt) -> None:
    """Have Python print nothing if ``interrupt`` ends the process: how the loop was left is of no interest then."""
    print_error = sys.excepthook

    def print_others(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if error is not interrupt:
            print_error(kind, error, tb)

    sys.excepthook = print_others


def received_signal() -> str | None:
    """Return the name of a signal that has asked a loop of this process to stop. For the main thread."""
    watches = (_owner(signal.getsignal(number)) for number in signal.valid_signals())
    return next((watch.received for watch in watches if watch is not None and watch.received), None)


def checked_signals(signals: Iterable[str | signal.Signals] | None) -> tuple[signal.Signals, ...]:
    """Return the signals with these names, or raise a TypeError or ValueError that says what to give."""
    if signals is None:
        return ()
    if isinstance(signals, str) or not isinstance(signals, Iterable):
        name = signals if isinstance(signals, str) else getattr(signals, "name", "SIGTERM")
        raise TypeError(f"signals={shown(signals)}: give a list of names, [{name!r}]")
    return tuple(checked_signal(given) for given in signals)


def _owner(handler: object) -> SignalWatch | None:
    watch = getattr(handler, "__self__", None)
    return watch if isinstance(watch, SignalWatch) else None


def _waits_for_data(frame: FrameType | None) -> bool:
    """Return whether ``frame`` is in ``next(iterator)`` of a DataLoader, so that an error is one of the data."""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if frame.f_code.co_name == "__next__" and module.startswith(("torch.utils.data.", "torchdata.")):
            return True
        frame = frame.f_back
    return False


def _is_lost_process(error: BaseException) -> bool:
    """Return whether a DataLoader worker that ended, or a connection to it, caused ``error``."""
    if isinstance(error, EOFError | ConnectionError):
        return True
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # torch fetches a tensor from the worker: if that is gone, there is no file with the name of its socket.
        if frame.f_globals.get("__name__", "").startswith("multiprocessing."):
            return True
    return isinstance(error, RuntimeError) and str(error).startswith(("DataLoader worker", "Pin memory thread"))
