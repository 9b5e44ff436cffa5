"""The coordinator and its looper threads. In these tests, threads end because of an event, never because of a delay."""

import gc
import itertools
import logging
import math
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchhooks import MonitoredLoop
from torchhooks.lifecycle.coordinator import Coordinator, LooperThread

TINY = 0.05
LONG = 60.0


class Interrupted(StopIteration):
    pass


@pytest.fixture
def coord() -> Coordinator:
    return Coordinator()


@pytest.fixture
def stuck() -> Iterator[threading.Thread]:
    """A running thread that ignores every stop request until the test is over."""
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="stuck", daemon=True)
    thread.start()
    yield thread
    release.set()
    thread.join()


def started(target: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def fail(error: BaseException) -> None:
    raise error


def failing(coord: Coordinator, error: BaseException) -> None:
    with coord.stop_on_exception():
        fail(error)


def errors_logged(caplog: pytest.LogCaptureFixture) -> list[BaseException | None]:
    return [r.exc_info[1] for r in caplog.records if r.levelno == logging.ERROR and r.exc_info]


# -- the stop ---------------------------------------------------------------------------------------------------------


def test_a_new_coordinator_is_not_stopped(coord: Coordinator) -> None:
    assert not coord.should_stop()
    assert not coord.wait_for_stop(0)


def test_a_request_stops(coord: Coordinator) -> None:
    coord.request_stop()
    assert coord.should_stop()
    assert coord.wait_for_stop()


def test_a_waiting_thread_is_woken_by_the_stop(coord: Coordinator) -> None:
    woken: list[bool] = []
    thread = started(lambda: woken.append(coord.wait_for_stop(LONG)))
    coord.request_stop()
    coord.join([thread])
    assert woken == [True]


def test_a_wait_may_be_infinite(coord: Coordinator) -> None:
    coord.request_stop()
    assert coord.wait_for_stop(float("inf"))


def test_clear_stop_undoes_the_stop_the_error_and_the_join(coord: Coordinator) -> None:
    coord.request_stop(KeyError("batch"))
    with pytest.raises(KeyError):
        coord.join()
    coord.clear_stop()
    assert not coord.should_stop()
    assert not coord.joined
    coord.join()


# -- which error is raised --------------------------------------------------------------------------------------------


def test_join_raises_the_error_that_stopped(coord: Coordinator) -> None:
    error = KeyError("batch")
    coord.request_stop(error)
    with pytest.raises(KeyError) as raised:
        coord.join()
    assert raised.value is error


def test_an_exc_info_tuple_is_an_error_too(coord: Coordinator) -> None:
    try:
        fail(KeyError("batch"))
    except KeyError:
        coord.request_stop(sys.exc_info())
    with pytest.raises(KeyError, match="batch"):
        coord.join()


def test_join_raises_again_when_called_again(coord: Coordinator) -> None:
    coord.request_stop(KeyError("batch"))
    for _ in range(2):
        with pytest.raises(KeyError):
            coord.join()


def test_the_traceback_is_the_one_of_the_thread(coord: Coordinator) -> None:
    thread = started(failing, coord, KeyError("batch"))
    with pytest.raises(KeyError) as raised:
        coord.join([thread])
    assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][-2:] == ["failing", "fail"]


def test_the_traceback_does_not_grow_with_every_raise(coord: Coordinator) -> None:
    lengths = []
    failing(coord, KeyError("batch"))
    for _ in range(3):
        with pytest.raises(KeyError) as raised:
            coord.raise_requested_exception()
        lengths.append(len(traceback.extract_tb(raised.value.__traceback__)))
    assert len(set(lengths)) == 1


def test_the_first_error_is_raised_and_the_second_logged(coord: Coordinator, caplog: pytest.LogCaptureFixture) -> None:
    second = ValueError("second")
    coord.request_stop(KeyError("first"))
    coord.request_stop(second)
    with pytest.raises(KeyError):
        coord.join()
    assert errors_logged(caplog) == [second]


def test_an_error_after_a_clean_stop_is_raised(coord: Coordinator) -> None:
    coord.request_stop()
    coord.request_stop(ValueError("late"))
    with pytest.raises(ValueError, match="late"):
        coord.join()


def test_the_first_error_is_logged_when_it_is_reported(coord: Coordinator, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torchhooks")
    coord.request_stop(KeyError("batch"))
    assert [(r.levelname, "KeyError('batch')" in r.message) for r in caplog.records] == [("INFO", True)]


def test_a_stop_after_the_stop_logs_nothing(coord: Coordinator, caplog: pytest.LogCaptureFixture) -> None:
    coord.request_stop()
    coord.request_stop()
    coord.request_stop(StopIteration())
    assert not caplog.records


@pytest.mark.parametrize("ex", ["batch", KeyError, (None, None, None), (KeyError, KeyError())])
def test_a_reason_that_is_not_an_exception_stops_and_makes_join_raise_a_value_error(
    coord: Coordinator, ex: Any
) -> None:
    coord.request_stop(ex)
    assert coord.should_stop()
    with pytest.raises(ValueError, match=r"request_stop\(ex=.*give an exception"):
        coord.join()


def test_an_error_after_the_join_is_raised_at_once(coord: Coordinator) -> None:
    coord.join()
    with pytest.raises(KeyError, match="batch"):
        coord.request_stop(KeyError("batch"))


def test_a_clean_stop_after_the_join_raises_nothing(coord: Coordinator) -> None:
    coord.join()
    coord.request_stop(StopIteration())
    assert coord.should_stop()


def test_raise_requested_exception_is_silent_without_one(coord: Coordinator) -> None:
    coord.request_stop()
    coord.raise_requested_exception()


# -- clean stops ------------------------------------------------------------------------------------------------------


def test_stop_iteration_is_a_clean_stop(coord: Coordinator) -> None:
    coord.request_stop(StopIteration())
    coord.join()
    assert coord.should_stop()


def test_a_subclass_of_stop_iteration_is_an_error(coord: Coordinator) -> None:
    coord.request_stop(Interrupted())
    with pytest.raises(Interrupted):
        coord.join()


def test_given_clean_types_count_with_their_subclasses() -> None:
    coord = Coordinator(clean_stop_exception_types=[LookupError])
    coord.request_stop(KeyError("batch"))
    coord.join()
    assert coord.should_stop()


def test_given_clean_types_replace_stop_iteration() -> None:
    coord = Coordinator(clean_stop_exception_types=[LookupError])
    coord.request_stop(StopIteration())
    with pytest.raises(StopIteration):
        coord.join()


@pytest.mark.parametrize("types", [StopIteration, [StopIteration, int], ["StopIteration"]])
def test_clean_types_that_are_not_exception_types_are_rejected(types: Any) -> None:
    with pytest.raises(TypeError, match=r"clean_stop_exception_types=.*give exception types"):
        Coordinator(clean_stop_exception_types=types)


# -- stop_on_exception ------------------------------------------------------------------------------------------------


def test_the_block_reports_its_exception(coord: Coordinator) -> None:
    failing(coord, KeyError("batch"))
    assert coord.should_stop()
    with pytest.raises(KeyError):
        coord.raise_requested_exception()


def test_the_block_reports_even_a_keyboard_interrupt(coord: Coordinator) -> None:
    failing(coord, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        coord.join()


def test_a_block_that_ends_normally_requests_no_stop(coord: Coordinator) -> None:
    with coord.stop_on_exception():
        pass
    assert not coord.should_stop()


def test_after_the_join_an_exception_propagates_from_the_block(coord: Coordinator) -> None:
    coord.join()
    with pytest.raises(KeyError, match="batch"):
        failing(coord, KeyError("batch"))


# -- on_stop ----------------------------------------------------------------------------------------------------------


def test_callbacks_run_in_the_requesting_thread_after_the_stop_is_set(coord: Coordinator) -> None:
    seen: list[tuple[threading.Thread, bool]] = []
    coord.on_stop(lambda: seen.append((threading.current_thread(), coord.should_stop())))
    thread = started(coord.request_stop)
    coord.join([thread])
    assert seen == [(thread, True)]


def test_a_callback_runs_once_for_two_requests(coord: Coordinator) -> None:
    calls: list[str] = []
    coord.on_stop(lambda: calls.append("stop"))
    coord.request_stop()
    coord.request_stop()
    assert calls == ["stop"]


def test_a_callback_added_after_the_stop_runs_at_once(coord: Coordinator) -> None:
    calls: list[str] = []
    coord.request_stop()
    coord.on_stop(lambda: calls.append("stop"))
    assert calls == ["stop"]


def test_callbacks_survive_clear_stop(coord: Coordinator) -> None:
    calls: list[str] = []
    coord.on_stop(lambda: calls.append("stop"))
    coord.request_stop()
    coord.clear_stop()
    assert calls == ["stop"]
    coord.request_stop()
    assert calls == ["stop", "stop"]


def test_a_callback_may_use_the_coordinator(coord: Coordinator) -> None:
    coord.on_stop(coord.request_stop)
    coord.on_stop(coord.live_threads)
    coord.request_stop()
    coord.join()


def test_a_failing_callback_is_raised_by_join_and_the_next_one_called(coord: Coordinator) -> None:
    calls: list[str] = []
    coord.on_stop(lambda: fail(KeyError("callback")))
    coord.on_stop(lambda: calls.append("stop"))
    coord.request_stop()
    with pytest.raises(KeyError, match="callback"):
        coord.join()
    assert calls == ["stop"]


def test_a_write_followed_by_should_stop_misses_no_callback() -> None:
    for _ in range(200):
        coord, due, both = Coordinator(), ["never"], threading.Barrier(2)

        def stop(coord: Coordinator = coord, both: threading.Barrier = both) -> None:
            both.wait()
            coord.request_stop()

        coord.on_stop(lambda due=due: due.__setitem__(0, "now"))  # type: ignore[misc]
        thread = started(stop)
        both.wait()
        due[0] = "later"
        if coord.should_stop():
            due[0] = "now"
        thread.join()
        assert due == ["now"]


# -- join -------------------------------------------------------------------------------------------------------------


def test_join_waits_for_registered_and_given_threads(coord: Coordinator) -> None:
    ended: list[str] = []

    def work(name: str) -> None:
        coord.wait_for_stop()
        ended.append(name)

    registered, given = started(work, "registered"), started(work, "given")
    coord.register_thread(registered)
    coord.request_stop()
    coord.join([given])
    assert sorted(ended) == ["given", "registered"]


def test_join_ends_when_the_threads_end_without_a_stop(coord: Coordinator) -> None:
    coord.join([started(lambda: None)])
    assert coord.joined
    assert not coord.should_stop()


def test_join_waits_until_a_stop_is_requested(coord: Coordinator) -> None:
    class StopsWhenWaitedFor(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            coord.request_stop()
            super().join(timeout)

    thread = StopsWhenWaitedFor(target=coord.wait_for_stop, daemon=True)
    thread.start()
    coord.join([thread], stop_grace_period_secs=LONG)
    assert not thread.is_alive()


def test_join_skips_a_thread_that_was_never_started(coord: Coordinator) -> None:
    coord.join([threading.Thread()])
    assert coord.joined


def test_join_forgets_the_registered_threads(coord: Coordinator, stuck: threading.Thread) -> None:
    coord.register_thread(stuck)
    coord.request_stop()
    coord.join(stop_grace_period_secs=0, ignore_live_threads=True)
    assert coord.live_threads() == []
    coord.join()


def test_a_thread_that_ignores_the_stop_is_named(coord: Coordinator, stuck: threading.Thread) -> None:
    coord.register_thread(stuck)
    coord.request_stop()
    with pytest.raises(RuntimeError, match=r"0\.05 s .*: 'stuck'\. .*should_stop.*ignore_live_threads=True"):
        coord.join(stop_grace_period_secs=TINY)
    assert coord.joined


@pytest.mark.parametrize("clock", [time.monotonic, lambda: 1000.0], ids=["real clock", "frozen clock"])
def test_the_grace_period_is_shared_by_all_threads(
    coord: Coordinator, monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]
) -> None:
    monkeypatch.setattr(time, "monotonic", clock)
    release = threading.Event()
    threads = [started(release.wait) for _ in range(30)]
    coord.request_stop()
    before = time.perf_counter()
    coord.join(threads, stop_grace_period_secs=TINY, ignore_live_threads=True)
    release.set()
    assert time.perf_counter() - before < 30 * TINY


def test_a_clock_that_jumps_does_not_shorten_the_grace_period(
    coord: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, given = threading.Event(), list[float | None]()

    class EndsWhenWaitedFor(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            given.append(timeout)
            release.set()
            super().join(timeout)

    monkeypatch.setattr(time, "monotonic", itertools.count(0, 1000).__next__)
    thread = EndsWhenWaitedFor(target=release.wait, daemon=True)
    thread.start()
    coord.request_stop()
    coord.join([thread], stop_grace_period_secs=LONG)
    assert given == [pytest.approx(LONG, abs=LONG / 2)]


def test_the_grace_period_may_be_infinite(coord: Coordinator) -> None:
    thread = started(coord.wait_for_stop)
    coord.request_stop()
    coord.join([thread], stop_grace_period_secs=float("inf"))
    assert not thread.is_alive()


def test_live_threads_may_be_ignored_with_a_warning(
    coord: Coordinator, stuck: threading.Thread, caplog: pytest.LogCaptureFixture
) -> None:
    coord.request_stop()
    coord.join([stuck], stop_grace_period_secs=TINY, ignore_live_threads=True)
    assert [(r.name, r.levelname, "'stuck'" in r.message) for r in caplog.records] == [("torchhooks", "WARNING", True)]


def test_a_reported_error_is_raised_and_live_threads_are_only_warned_about(
    coord: Coordinator, stuck: threading.Thread, caplog: pytest.LogCaptureFixture
) -> None:
    coord.request_stop(KeyError("batch"))
    with pytest.raises(KeyError):
        coord.join([stuck], stop_grace_period_secs=TINY)
    assert [(r.levelname, "'stuck'" in r.message) for r in caplog.records] == [("WARNING", True)]


@pytest.mark.parametrize("secs", [-1, float("nan"), None])
def test_an_invalid_grace_period_is_rejected(coord: Coordinator, secs: Any) -> None:
    with pytest.raises(ValueError, match="stop_grace_period_secs="):
        coord.join(stop_grace_period_secs=secs)


def test_live_threads_are_the_registered_ones_that_are_running(coord: Coordinator, stuck: threading.Thread) -> None:
    ended = started(lambda: None)
    ended.join()
    for thread in (ended, stuck, threading.Thread(), stuck):
        coord.register_thread(thread)
    assert coord.live_threads() == [stuck]


# -- LooperThread -----------------------------------------------------------------------------------------------------


def test_a_looper_registers_itself_as_a_daemon(coord: Coordinator) -> None:
    looper = LooperThread.loop(coord, None, coord.wait_for_stop)
    assert looper.daemon
    assert coord.live_threads() == [looper]
    coord.request_stop()
    coord.join()
    assert not looper.is_alive()


@pytest.mark.parametrize("interval", [None, 0, 0.001])
def test_a_looper_calls_its_target_until_the_stop(coord: Coordinator, interval: float | None) -> None:
    calls: list[tuple[int, int]] = []

    def work(a: int, *, b: int) -> None:
        calls.append((a, b))
        if len(calls) == 3:
            coord.request_stop()

    LooperThread.loop(coord, interval, work, args=(1,), kwargs={"b": 2})
    coord.join()
    assert calls == [(1, 2)] * 3


class Recording(LooperThread):
    def __init__(self, coord: Coordinator, fail_in: str | None = None) -> None:
        super().__init__(coord, 0)
        self.calls: list[str] = []
        self.fail_in = fail_in

    def record(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fail_in:
            raise KeyError(call)

    def start_loop(self) -> None:
        self.record("start_loop")

    def run_loop(self) -> None:
        self.record("run_loop")
        self._coord.request_stop()

    def stop_loop(self) -> None:
        self.record("stop_loop")


def test_a_looper_starts_runs_and_stops(coord: Coordinator) -> None:
    looper = Recording(coord)
    looper.start()
    coord.join()
    assert looper.calls == ["start_loop", "run_loop", "stop_loop"]


def test_a_looper_of_a_stopped_coordinator_never_calls_run_loop(coord: Coordinator) -> None:
    coord.request_stop()
    looper = Recording(coord)
    looper.start()
    coord.join()
    assert looper.calls == ["start_loop", "stop_loop"]


@pytest.mark.parametrize("method", ["start_loop", "run_loop"])
def test_a_looper_that_fails_calls_nothing_further(coord: Coordinator, method: str) -> None:
    looper = Recording(coord, fail_in=method)
    looper.start()
    with pytest.raises(KeyError, match=method):
        coord.join()
    assert looper.calls[-1] == method


def test_an_error_in_stop_loop_after_a_clean_stop_is_raised(coord: Coordinator) -> None:
    Recording(coord, fail_in="stop_loop").start()
    with pytest.raises(KeyError, match="stop_loop"):
        coord.join()


def test_a_looper_without_a_target_does_nothing(coord: Coordinator) -> None:
    LooperThread(coord, None).run_loop()


def test_a_looper_is_named_after_its_target(coord: Coordinator) -> None:
    assert LooperThread(coord, None, target=coord.wait_for_stop).name.endswith("(wait_for_stop)")


def test_loop_makes_an_instance_of_its_class(coord: Coordinator) -> None:
    class Named(LooperThread):
        pass

    assert isinstance(Named.loop(coord, None, coord.request_stop), Named)
    coord.join()


class PassingTime(Coordinator):
    """Waits on a simulated clock, which starts at 1000 and advances by the time waited for."""

    now = 1000.0

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.now += max(timeout, 0.0)
        return self.should_stop()


@pytest.mark.parametrize(
    ("work_secs", "begins"),
    [
        ([0, 0, 0, 0], [1000, 1010, 1020, 1030]),
        ([3, 4, 5, 6], [1000, 1010, 1020, 1030]),
        ([25, 0, 0, 0], [1000, 1025, 1025, 1030]),
    ],
    ids=["at once", "within the interval", "late, then caught up"],
)
def test_ticks_do_not_drift(monkeypatch: pytest.MonkeyPatch, work_secs: list[float], begins: list[float]) -> None:
    coord, seen = PassingTime(), list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: coord.now)

    def work() -> None:
        seen.append(coord.now)
        coord.now += work_secs[len(seen) - 1]
        if len(seen) == len(work_secs):
            coord.request_stop()

    LooperThread(coord, 10, work).run()
    assert seen == begins


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"coord": None}, ValueError, "coord=None.*must be a Coordinator"),
        ({"timer_interval_secs": -1}, ValueError, "timer_interval_secs=-1"),
        ({"args": (1,)}, ValueError, r"args=\(1,\).*: arguments need a target: give one, or override"),
        ({"kwargs": {"a": 1}}, ValueError, r"kwargs=\{'a': 1\}.*: arguments need a target: give one, or override"),
        ({"target": 3}, TypeError, "target=3.*must be callable"),
    ],
)
def test_a_looper_rejects_invalid_arguments(
    coord: Coordinator, kwargs: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        LooperThread(**{"coord": coord, "timer_interval_secs": 1, **kwargs})
    assert coord.live_threads() == []


# -- memory -----------------------------------------------------------------------------------------------------------


class Batch:
    pass


def fail_with_a_batch(batches: list[weakref.ref[Batch]]) -> None:
    batch = Batch()
    batches.append(weakref.ref(batch))
    raise KeyError("batch")


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
def test_what_a_failed_thread_referenced_is_freed_with_the_error(coord: Coordinator) -> None:
    batches: list[weakref.ref[Batch]] = []
    LooperThread.loop(coord, None, fail_with_a_batch, args=(batches,))
    try:
        coord.join()
    except KeyError:
        coord.clear_stop()
    assert batches[0]() is None


@pytest.mark.usefixtures("no_gc")
def test_what_a_late_error_referenced_is_freed_with_it(coord: Coordinator) -> None:
    batches: list[weakref.ref[Batch]] = []
    coord.join()
    try:
        with coord.stop_on_exception():
            fail_with_a_batch(batches)
    except KeyError as error:
        with pytest.raises(KeyError):
            coord.request_stop(error)
    assert batches[0]() is None


@pytest.mark.parametrize("secs", [-1, math.nan, 10**400, "long"], ids=["negative", "nan", "huge", "str"])
def test_a_loop_with_an_invalid_grace_period_is_refused_when_it_is_created(secs: Any) -> None:
    with pytest.raises(ValueError, match="stop_grace_period_secs="):
        MonitoredLoop(lambda: None, stop_grace_period_secs=secs)
