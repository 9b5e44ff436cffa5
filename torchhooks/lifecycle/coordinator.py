"""Background threads of a loop: how they are told to stop, and how their errors surface (``tf.train.Coordinator``).

A hook that works in the background starts its thread in ``after_create_session``, which receives the coordinator of the
loop. When the loop closes, it requests the stop and joins the thread::

    class WatchDisk(SessionRunHook):
        def after_create_session(self, session, coord):
            LooperThread.loop(coord, timer_interval_secs=60, target=self.check_free_space)

A thread of another kind is registered, checks whether it should stop, and reports its errors::

    def read(coord, source):
        with coord.stop_on_exception():
            while not coord.should_stop():
                queue.put(source.read())

    thread = threading.Thread(target=read, args=(coord, source))
    coord.register_thread(thread)
    thread.start()

The first error that is reported stops all threads, and ``join`` raises it once they have ended. Later
errors are logged, with their tracebacks.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

# Threads end in real time: a test that replaces time.monotonic must not change their grace period.
from time import monotonic as real_monotonic
from types import TracebackType
from typing import Any, Self

from torchhooks.common.checks import exception_types, seconds
from torchhooks.common.log import logger

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

_STOP_POLL_SECS = 0.1  # how late join may notice a stop: Python cannot wait for a thread and an event at the same time


class Coordinator:
    """Tells a set of threads to stop, waits for them, and raises the error of the first that failed.

    The loop has one, which hooks get in ``after_create_session`` (``tf.train.Coordinator``). It can also be used alone:

    >>> import threading
    >>> coord = Coordinator()
    >>> def check():
    ...     with coord.stop_on_exception():
    ...         while not coord.wait_for_stop(timeout=0.01):
    ...             raise OSError("disk full")
    >>> thread = threading.Thread(target=check)
    >>> coord.register_thread(thread)
    >>> try:
    ...     thread.start()
    ...     coord.join()
    ... except OSError as error:
    ...     print("failed:", error)
    Error reported to Coordinator: OSError('disk full')
    failed: disk full

    Every method is thread-safe. The first error that is reported stops all threads. Later errors are logged with
    their tracebacks, and kept in :attr:`later_errors`.

    Args:
        clean_stop_exception_types: exceptions that request a stop when they are reported but are not errors, including
            their subclasses. The default is exactly ``StopIteration``: a subclass of it is an error, as everywhere in
            torchhooks.

    Raises:
        TypeError: ``clean_stop_exception_types`` contains something other than exception types.

    Unlike TensorFlow, later errors are not dropped, and subclasses of ``StopIteration`` are errors by default.
    """

    def __init__(self, clean_stop_exception_types: Iterable[type[BaseException]] | None = None) -> None:
        given, example = clean_stop_exception_types, "(StopIteration, queue.Empty)"
        self._clean_types = None if given is None else exception_types(given, "clean_stop_exception_types", example)
        # Reentrant, because a signal handler may request a stop while its own thread is in one of these methods.
        self._lock = threading.RLock()
        self._stop_event = threading.Event()
        self._error: BaseException | None = None
        # As it was when the error was reported: each raise adds frames, which must not accumulate.
        self._traceback: TracebackType | None = None
        self.joined = False
        """Whether :meth:`join` has waited for the threads."""
        self._threads: list[threading.Thread] = []
        self._callbacks: list[Callable[[], object]] = []
        self.later_errors: list[BaseException] = []
        """The errors reported after the error that :meth:`join` raises."""

    def request_stop(self, ex: BaseException | _ExcInfo | None = None) -> None:
        """Ask all threads to stop; from then on :meth:`should_stop` returns true.

        :meth:`join` raises the first error and later ones are logged, also if a stop without an error was requested
        before.

        Args:
            ex: the reason: an exception, or what ``sys.exc_info()`` returned. Anything else also stops the threads, and
                makes :meth:`join` raise a ValueError that says so.

        Raises:
            BaseException: ``ex`` itself, if the threads were already joined, so that no ``join`` would raise it.

        Unlike TensorFlow, ``ex`` need not be an exception that is being handled, and counts after a stop without error.
        """
        late = self._stop(_as_exception(ex))
        if late is not None:
            try:
                raise late
            finally:
                del ex, late  # the traceback of the error refers to this frame: break the reference cycle

    def _stop(self, error: BaseException | None) -> BaseException | None:
        """Stop the threads. Return ``error`` if it was reported too late for :meth:`join` to raise it."""
        types, is_first = self._clean_types, False
        is_clean = type(error) is StopIteration if types is None else isinstance(error, types)
        if is_clean:
            error = None
        with self._lock:
            if error is not None:
                if self.joined:
                    return error
                is_first = self._error is None
                if is_first:
                    self._error, self._traceback = error, error.__traceback__
                else:
                    self.later_errors.append(error)
            callbacks = [] if self._stop_event.is_set() else list(self._callbacks)
            self._stop_event.set()
        # Not with the lock held: a callback is code of a user, which may wait for a thread that needs the lock.
        for callback in callbacks:
            with self.stop_on_exception():
                callback()
        if is_first:
            logger.info("Error reported to Coordinator: %r", error)
        elif error is not None:
            logger.error("Error reported to Coordinator after the one that join() raises: %r", error, exc_info=error)
        return None

    def on_stop(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` when a stop is requested, in the requesting thread; at once if it already was.

        :meth:`should_stop` returns true before the call. A thread that writes a value which the callback overwrites,
        and then finds ``should_stop()`` false, can therefore rely on the callback still to come. The callback stays
        registered: after :meth:`clear_stop`, the next stop calls it again. An error that it raises while a stop is
        being requested is reported like an error of a thread, and the other callbacks are still called.

        Unlike TensorFlow, which has no callbacks.
        """
        with self._lock:
            self._callbacks.append(callback)
            # With the lock, under which _stop() copies the callbacks and sets the event: so exactly one of the two
            # threads makes this call.
            stopped = self._stop_event.is_set()
        if stopped:
            callback()

    def clear_stop(self) -> None:
        """Undo the stop: forget the request, its errors and :attr:`joined`, and keep the callbacks."""
        with self._lock:
            self.joined = False
            self._error = self._traceback = None
            self.later_errors.clear()
            self._stop_event.clear()

    @property
    def error(self) -> BaseException | None:
        """The first error that was reported, which :meth:`join` raises; ``None`` if there is none."""
        return self._error

    def should_stop(self) -> bool:
        """Return whether a stop was requested."""
        return self._stop_event.is_set()

    def stop_on_exception(self) -> AbstractContextManager[None]:
        """Return a context manager that passes an exception in its block to :meth:`request_stop`.

        This includes ``KeyboardInterrupt``. The block suppresses the exception, and :meth:`join` raises it. After the
        threads were joined, the exception propagates from the block.
        """
        return _StopOnException(self._stop)

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait for a stop, for at most ``timeout`` seconds, and return whether one was requested."""
        # For a longer wait, such as an infinite one, Python raises an OverflowError.
        return self._stop_event.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    def register_thread(self, thread: threading.Thread) -> None:
        """Add ``thread`` to the threads that :meth:`join` waits for."""
        with self._lock:
            self._threads.append(thread)

    def live_threads(self) -> list[threading.Thread]:
        """Return the registered threads that are alive, in the order of their registration."""
        with self._lock:
            return [thread for thread in dict.fromkeys(self._threads) if thread.is_alive()]

    def join(
        self,
        threads: Iterable[threading.Thread] | None = None,
        stop_grace_period_secs: float = 120,
        ignore_live_threads: bool = False,
    ) -> None:
        """Wait for the threads to end, then raise the first reported error, if there is one.

        There is no time limit until a stop is requested. Threads that were not started are skipped. Afterwards, the
        registered threads are forgotten.

        Args:
            threads: threads to wait for in addition to the registered ones.
            stop_grace_period_secs: seconds that all threads together may take to end after a stop was requested.
            ignore_live_threads: whether to log a warning, instead of raising an error, if threads are still alive after
                that. The warning is also logged if there is a reported error to raise.

        Raises:
            BaseException: the reported error, with its type and its traceback.
            RuntimeError: no error was reported, and threads are alive after the grace period.
            ValueError: ``stop_grace_period_secs`` is not a number of seconds, 0 or more.

        Unlike TensorFlow, which logs no warning of live threads if there is an error to raise.
        """
        grace_secs = seconds(stop_grace_period_secs, "stop_grace_period_secs")
        with self._lock:
            all_threads = list(dict.fromkeys((*self._threads, *(threads or ()))))
        for thread in all_threads:
            while thread.is_alive() and not self.should_stop():
                thread.join(_STOP_POLL_SECS)
        alive = _alive_after(all_threads, grace_secs)
        with self._lock:
            self.joined = True
            self._threads.clear()
            # With ``joined``, in one go: an error that a thread reports meanwhile is either raised below or, because it
            # is late, in the thread itself.
            failed = self._error is not None
        if alive:
            names = ", ".join(repr(thread.name) for thread in alive)
            message = (
                f"threads still running {grace_secs:g} s after a stop was requested: {names}. Have them check "
                "coord.should_stop() or wait with coord.wait_for_stop(); or increase stop_grace_period_secs"
            )
            if not failed and not ignore_live_threads:
                raise RuntimeError(f"{message}, or pass ignore_live_threads=True")
            logger.warning("%s", message)
        self.raise_requested_exception()

    def raise_requested_exception(self) -> None:
        """Raise the first reported error, if there is one; :meth:`clear_stop` forgets it."""
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(self._traceback)


class LooperThread(threading.Thread):
    """A daemon thread that repeats one task until its coordinator stops (``tf.train.LooperThread``).

    Pass a ``target``, or subclass it and override :meth:`run_loop`. The thread registers itself with ``coord``. An
    error ends it and is reported to ``coord``, which asks all other threads to stop. In a hook, the coordinator of the
    loop requests the stop when the loop closes, and the error is raised from the loop:

    >>> import time
    >>> class Heartbeat(SessionRunHook):
    ...     def begin(self):
    ...         self.beats = 0
    ...
    ...     def after_create_session(self, session, coord):
    ...         LooperThread.loop(coord, 0.001, self.beat)
    ...
    ...     def beat(self):
    ...         self.beats += 1
    >>> heart = Heartbeat()
    >>> with MonitoredLoop(step, model, optimizer, hooks=[heart]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    ...         time.sleep(0.01)
    >>> heart.beats > 1
    True

    Ticks are ``timer_interval_secs`` apart, counted from the start of the thread: the duration of the task does not
    shift them, and missed ticks are caught up on. The clock is ``time.monotonic()``.

    Args:
        coord: tells the thread when to stop.
        timer_interval_secs: seconds from one tick to the next, the first being at once; ``None`` for no pause.
        target: called at every tick, with ``args`` and ``kwargs``.

    Raises:
        ValueError: ``coord`` is not a :class:`Coordinator`, ``timer_interval_secs`` is not a number of seconds, 0 or
            more, or there are arguments but no target.
        TypeError: ``target`` is not callable.

    Unlike TensorFlow, whose clock is ``time.time()``.
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
            raise ValueError(
                f"LooperThread(coord={coord!r}): must be a Coordinator, such as the one that after_create_session gets"
            )
        interval = timer_interval_secs
        self._interval_secs = None if interval is None else seconds(interval, "timer_interval_secs")
        if target is None and (args or kwargs):
            raise ValueError(
                f"LooperThread(args={args!r}, kwargs={kwargs!r}): arguments need a target: give one, or override "
                "run_loop()"
            )
        if target is not None and not callable(target):
            raise TypeError(f"LooperThread(target={target!r}): must be callable; pass its arguments in args and kwargs")
        # A daemon, as in TensorFlow: a thread that does not end in the grace period must not keep the process from
        # ending.
        super().__init__(target=target, daemon=True)  # Thread gets the target because its name becomes part of ours
        self._task = None if target is None else functools.partial(target, *(args or ()), **(kwargs or {}))
        self._coord = coord
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
        """Create a thread that calls ``target(*args, **kwargs)`` at every tick, start it and return it."""
        looper = cls(coord, timer_interval_secs, target=target, args=args, kwargs=kwargs)
        looper.start()
        return looper

    def run(self) -> None:
        """Call ``start_loop``, ``run_loop`` at every tick until the stop, and ``stop_loop``: override those instead."""
        with self._coord.stop_on_exception():
            self.start_loop()
            if self._interval_secs is None:
                while not self._coord.should_stop():
                    self.run_loop()
            else:
                next_tick = time.monotonic()
                while not self._coord.wait_for_stop(next_tick - time.monotonic()):
                    next_tick += self._interval_secs
                    self.run_loop()
            self.stop_loop()

    def start_loop(self) -> None:
        """Called once in the thread, before the first tick."""

    def stop_loop(self) -> None:
        """Called once in the thread, after the stop was requested; not after an error in this thread."""

    def run_loop(self) -> None:
        """Called at every tick: calls the target, if there is one."""
        if self._task is not None:
            self._task()


class _StopOnException:
    """The context manager of ``stop_on_exception``. A generator would add its own frame to the traceback."""

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


def _alive_after(threads: Iterable[threading.Thread], grace_secs: float) -> list[threading.Thread]:
    """Wait for the threads, ``grace_secs`` for all of them together, and return the threads that are still alive."""
    deadline = real_monotonic() + grace_secs
    running = [thread for thread in threads if thread.is_alive()]
    for thread in running:
        thread.join(min(max(0.0, deadline - real_monotonic()), threading.TIMEOUT_MAX))
    return [thread for thread in running if thread.is_alive()]
