"""Threads beside the loop: how they are told to stop, and how their errors come out (``tf.train.Coordinator``).

A hook that works in the background starts its thread in ``after_create_session``, where it is given the loop's
coordinator; the loop asks for the stop and joins the thread when it closes:

    class WatchDisk(SessionRunHook):
        def after_create_session(self, session, coord):
            LooperThread.loop(coord, timer_interval_secs=60, target=self.check_free_space)

A thread of another kind registers itself, looks whether it is to stop, and reports its errors:

    def read(coord, source):
        with coord.stop_on_exception():
            while not coord.should_stop():
                queue.put(source.read())

    thread = threading.Thread(target=read, args=(coord, source))
    coord.register_thread(thread)
    thread.start()

The first request for a stop decides: if it came with an error, ``join`` raises that error once the threads are done.
Unlike TensorFlow, errors that are reported after it are not dropped: they are logged, with their tracebacks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial

# Threads end in real time: a test that replaces time.monotonic must not change how long they are given.
from time import monotonic as real_monotonic
from types import TracebackType
from typing import Any, NamedTuple, Self

from torchhooks.timer import seconds

logger = logging.getLogger("torchhooks")

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

_STOP_POLL_SECS = 0.1
"""How late ``join`` may notice a stop: nothing waits for the end of a thread and for an event at once."""


class _Reported(NamedTuple):
    """The error that stopped the threads, and its traceback as it was then: raised twice, it must not grow."""

    error: BaseException
    traceback: TracebackType | None


class Coordinator:
    """Tells a set of threads to stop, waits for them, and raises the error of the first one that failed.

    Every method may be called from every thread.

    Args:
        clean_stop_exception_types: exceptions that ask for a stop when they are reported, and are no errors; their
            subclasses count too. Unlike TensorFlow, the default is exactly ``StopIteration``, of which a subclass is an
            error, as everywhere in torchhooks.

    Raises:
        TypeError: something in ``clean_stop_exception_types`` is no exception type.
    """

    def __init__(self, clean_stop_exception_types: Iterable[type[BaseException]] | None = None) -> None:
        given = clean_stop_exception_types
        self._clean_types = None if given is None else _exception_types(given)
        # Reentrant, because a signal handler may ask for a stop while its own thread is in one of these methods.
        self._lock = threading.RLock()
        self._stop_event = threading.Event()
        self._reported: _Reported | None = None
        self._joined = False
        self._threads: list[threading.Thread] = []
        self._callbacks: list[Callable[[], object]] = []
        self.later_errors: list[BaseException] = []
        """What was reported after the error that :meth:`join` raises."""

    def request_stop(self, ex: BaseException | _ExcInfo | None = None) -> None:
        """Ask all threads to stop; from here on :meth:`should_stop` is true.

        The first error is what :meth:`join` raises; later ones are logged. Unlike TensorFlow, that is so even if a stop
        without an error was requested before, and the error need not be one that is being handled at the moment.

        Args:
            ex: why: an exception, or what ``sys.exc_info()`` returned. Anything else stops too, and :meth:`join` raises
                a ValueError that says so.

        Raises:
            BaseException: ``ex`` itself, if the threads were joined already and nobody else would raise it.
        """
        late = self._stop(_as_exception(ex))
        if late is not None:
            try:
                raise late
            finally:
                del ex, late  # this frame is in their traceback: they would keep themselves alive

    def _stop(self, error: BaseException | None) -> BaseException | None:
        """Stop, and return ``error`` if it is one that the coordinator cannot raise any more."""
        if error is not None and self._stops_cleanly(error):
            error = None
        callbacks: list[Callable[[], object]] = []
        with self._lock:
            if error is not None and self._joined:
                return error
            kept = error is not None and self._reported is None
            if error is not None and kept:
                self._reported = _Reported(error, error.__traceback__)
            elif error is not None:
                self.later_errors.append(error)
            if not self._stop_event.is_set():
                self._stop_event.set()
                callbacks = list(self._callbacks)
        for callback in callbacks:
            with self.stop_on_exception():
                callback()
        if error is not None:
            _log(error, kept)
        return None

    def _stops_cleanly(self, error: BaseException) -> bool:
        if self._clean_types is None:
            return type(error) is StopIteration
        return isinstance(error, self._clean_types)

    def on_stop(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` once the stop has been requested, in the thread that requested it; now if it was already.

        :meth:`should_stop` is true before the call. So whoever stores what the callback overwrites, and only then finds
        ``should_stop()`` false, knows that the callback is still to come. It stays registered: after a
        :meth:`clear_stop` the next stop calls it again. An error that it raises while a stop is being requested is
        one of the errors for :meth:`join`, and the other callbacks are called all the same.

        Unlike TensorFlow, which has no callbacks.
        """
        with self._lock:
            self._callbacks.append(callback)
            stopped = self._stop_event.is_set()
        if stopped:
            callback()

    def clear_stop(self) -> None:
        """Go back to before the stop: the request, its error and :attr:`joined` are forgotten, callbacks are kept."""
        with self._lock:
            self._joined = False
            self._reported = None
            self.later_errors.clear()
            self._stop_event.clear()

    def should_stop(self) -> bool:
        """Whether a stop was requested."""
        return self._stop_event.is_set()

    def stop_on_exception(self) -> AbstractContextManager[None]:
        """A ``with`` block out of which an exception, ``KeyboardInterrupt`` included, goes to :meth:`request_stop`.

        The exception ends there: it comes out of :meth:`join`. After the threads were joined it passes through.
        """
        return _StopOnException(self._stop)

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until a stop is requested, for at most ``timeout`` seconds.

        Returns:
            Whether a stop was requested.
        """
        return self._stop_event.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    def register_thread(self, thread: threading.Thread) -> None:
        """Let :meth:`join` wait for ``thread`` too."""
        with self._lock:
            self._threads.append(thread)

    def live_threads(self) -> list[threading.Thread]:
        """The registered threads that are running now, in the order in which they were registered."""
        with self._lock:
            return [thread for thread in dict.fromkeys(self._threads) if thread.is_alive()]

    def join(
        self,
        threads: Iterable[threading.Thread] | None = None,
        stop_grace_period_secs: float = 120,
        ignore_live_threads: bool = False,
    ) -> None:
        """Wait for the threads to end, then raise the error that stopped them, if there was one.

        As long as nobody has asked for a stop, the wait has no limit. A thread that was not started is not waited for.
        Afterwards the registered threads are forgotten.

        Args:
            threads: threads to wait for beside the registered ones.
            stop_grace_period_secs: how long they may all take to end once ``join`` sees that a stop was requested.
            ignore_live_threads: only warn about those that are alive after that. Unlike TensorFlow, which says nothing
                about them when there is an error to raise, the warning comes beside an error too.

        Raises:
            BaseException: the error that was reported, with its type and its traceback.
            RuntimeError: no error was reported, and threads are alive after the grace period.
            ValueError: ``stop_grace_period_secs`` is no such period.
        """
        grace_secs = seconds(stop_grace_period_secs, "stop_grace_period_secs")
        with self._lock:
            everybody = list(dict.fromkeys((*self._threads, *(threads or ()))))
        self._wait_for_end_or_stop(everybody)
        alive = _alive_after(everybody, grace_secs)
        with self._lock:
            self._joined = True
            self._threads.clear()
            failed = self._reported is not None
        if alive and (failed or ignore_live_threads):
            logger.warning("%s", _laggards(alive, grace_secs))
        self.raise_requested_exception()
        if alive and not ignore_live_threads:
            raise RuntimeError(f"{_laggards(alive, grace_secs)}, or give ignore_live_threads=True")

    def _wait_for_end_or_stop(self, threads: Iterable[threading.Thread]) -> None:
        for thread in threads:
            while thread.is_alive() and not self.should_stop():
                thread.join(_STOP_POLL_SECS)

    @property
    def joined(self) -> bool:
        """Whether :meth:`join` has waited for the threads."""
        return self._joined

    def raise_requested_exception(self) -> None:
        """Raise the error that came with the request for the stop, if there is one; :meth:`clear_stop` forgets it."""
        with self._lock:
            if self._reported is not None:
                raise self._reported.error.with_traceback(self._reported.traceback)


class LooperThread(threading.Thread):
    """A daemon thread that does one thing again and again until its coordinator stops (``tf.train.LooperThread``).

    Give it a ``target``, or subclass it and override :meth:`run_loop`. It registers itself with ``coord``. An error
    ends it and goes to ``coord``, which asks everybody else to stop.

    Ticks are ``timer_interval_secs`` apart, counted from the start: how long the work takes does not shift them, and
    those that it has missed are made up for. Unlike TensorFlow, the clock is ``time.monotonic()``.

    Args:
        coord: tells it when to stop.
        timer_interval_secs: seconds from one tick to the next, the first being at once; ``None``: without a pause.
        target: called at every tick, with ``args`` and ``kwargs``.

    Raises:
        ValueError: ``coord`` is no :class:`Coordinator`, the interval cannot be, or there are arguments but no target.
        TypeError: ``target`` cannot be called.
    """

    def __init__(
        self,
        coord: Coordinator,
        timer_interval_secs: float | None,
        target: Callable[..., object] | None = None,
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(coord, Coordinator):
            raise ValueError(f"LooperThread(coord={coord!r}): must be a Coordinator, after_create_session is given one")
        interval = None if timer_interval_secs is None else seconds(timer_interval_secs, "timer_interval_secs")
        self._work = _bound(target, args, kwargs)
        super().__init__(target=target, daemon=True)  # the target, because it becomes part of the thread's name
        self._coord = coord
        self._interval_secs = interval
        coord.register_thread(self)

    @classmethod
    def loop(
        cls,
        coord: Coordinator,
        timer_interval_secs: float | None,
        target: Callable[..., object] | None,
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Self:
        """Make a thread that calls ``target(*args, **kwargs)`` at every tick, start it and return it."""
        looper = cls(coord, timer_interval_secs, target=target, args=args, kwargs=kwargs)
        looper.start()
        return looper

    def run(self) -> None:
        """What the thread does: start, a tick after the other until the stop, end. Override the parts, not this."""
        with self._coord.stop_on_exception():
            self.start_loop()
            if self._interval_secs is None:
                while not self._coord.should_stop():
                    self.run_loop()
            else:
                self._run_at_ticks(self._interval_secs)
            self.stop_loop()

    def _run_at_ticks(self, interval_secs: float) -> None:
        next_tick = time.monotonic()
        while not self._coord.wait_for_stop(next_tick - time.monotonic()):
            next_tick += interval_secs
            self.run_loop()

    def start_loop(self) -> None:
        """Called once in the thread, before the first tick."""

    def stop_loop(self) -> None:
        """Called once in the thread, after the stop was requested; not after an error in this thread."""

    def run_loop(self) -> None:
        """Called at every tick: calls the target, if there is one."""
        if self._work is not None:
            self._work()


class _StopOnException:
    """``with`` block that hands its exception over; a class, because a generator's frame would join the traceback."""

    def __init__(self, stop: Callable[[BaseException], BaseException | None]) -> None:
        self._stop = stop

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return error is not None and self._stop(error) is None


def _as_exception(ex: object) -> BaseException | None:
    match ex:
        case None | BaseException():
            return ex
        case (_, BaseException() as error, _):
            return error
    return ValueError(
        f"request_stop(ex={ex!r}): give an exception, or what sys.exc_info() returns while one is being handled"
    )


def _exception_types(given: Iterable[type[BaseException]]) -> tuple[type[BaseException], ...]:
    types = tuple(given) if isinstance(given, Iterable) else (None,)
    if all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in types):
        return types
    raise TypeError(
        f"Coordinator(clean_stop_exception_types={given!r}): give exception types, such as (StopIteration, queue.Empty)"
    )


def _bound(
    target: Callable[..., object] | None, args: Iterable[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[], object] | None:
    if target is None and (args or kwargs):
        raise ValueError(
            f"LooperThread(args={args!r}, kwargs={kwargs!r}): these are for a target, and there is none: "
            "give one, or override run_loop()"
        )
    if target is not None and not callable(target):
        raise TypeError(f"LooperThread(target={target!r}): must be callable; its arguments go into args and kwargs")
    return None if target is None else partial(target, *(args or ()), **(kwargs or {}))


def _log(error: BaseException, kept: bool) -> None:
    if kept:
        logger.info("Coordinator stops everybody because of %r", error)
    else:
        logger.error("Coordinator raises an earlier error, and not this one: %r", error, exc_info=error)


def _alive_after(threads: Iterable[threading.Thread], grace_secs: float) -> list[threading.Thread]:
    """Wait for the threads, all together ``grace_secs``; return those that are alive then."""
    deadline = real_monotonic() + grace_secs
    running = [thread for thread in threads if thread.is_alive()]
    for thread in running:
        thread.join(min(max(0.0, deadline - real_monotonic()), threading.TIMEOUT_MAX))
    return [thread for thread in running if thread.is_alive()]


def _laggards(threads: Iterable[threading.Thread], grace_secs: float) -> str:
    names = ", ".join(repr(thread.name) for thread in threads)
    return (
        f"threads still running {grace_secs:g} s after a stop was requested: {names}. "
        "Let them look at coord.should_stop(), wait with coord.wait_for_stop(), or allow more stop_grace_period_secs"
    )
