"""Several ranks as threads of one process, so that hundreds of schedules can be tried in seconds.

The loops, their agreement and their tick threads are the real ones. Only the transport and the collective of the step
are simulated: each is a gathering of values in memory, with a random delay before it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.utils import _python_dispatch

import torchhooks.ranks.ranks
from torchhooks import MonitoredLoop, PeerError, Ranks, SessionRunContext, SessionRunHook, StopAtStepHook
from torchhooks.common.errors import TorchHooksError
from torchhooks.common.timers import Due
from torchhooks.ranks.transport import ContactLostError

HANG_SECS = 20.0


class Hub:
    """Gathers one value of each rank at a time, on several channels."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.gone: set[int] = set()
        self.here: set[int] = set()
        self.killed: set[int] = set()
        self.hung = False
        self.loops: Counter[int] = Counter()
        """How many loops each rank has connected."""
        self.closed: set[tuple[int, int]] = set()
        """The rank and the number of the loop of each connection that is closed."""
        self._changed = threading.Condition()
        self._open: dict[str, dict[int, Any]] = {}

    def gather(self, channel: str, rank: int, value: Any, stop: Callable[[], object] = bool) -> list[Any]:
        """Return the values of all ranks; raise RuntimeError if one is gone."""
        deadline = time.monotonic() + HANG_SECS
        with self._changed:
            rows = self._open.setdefault(channel, {})
            assert rank not in rows
            rows[rank] = value
            if len(rows) == self.size:
                del self._open[channel]
                self._changed.notify_all()
            while len(rows) < self.size:
                try:
                    stop()
                except BaseException:
                    del rows[rank]
                    raise
                if self.gone - set(rows):
                    raise RuntimeError(f"connection closed by rank {min(self.gone - set(rows))}")
                if time.monotonic() > deadline:
                    self.hung = True
                    raise RuntimeError("hang")
                self._changed.wait(0.05)
        return [rows[rank] for rank in range(self.size)]

    def find_missing(self, rank: int) -> list[int]:
        """Return the ranks that do not call this."""
        with self._changed:
            self.here.add(rank)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self.here | self.killed | self.gone) == self.size, 5.0)
            return sorted(set(range(self.size)) - self.here)

    def kill(self, rank: int) -> None:
        """End the process of ``rank``: its connections close, and it says nothing any more."""
        self.killed.add(rank)
        self.leave(rank)

    def leave(self, rank: int) -> None:
        """Close the connections of ``rank``: its process ended."""
        with self._changed:
            self.gone.add(rank)
            self._changed.notify_all()


class ThreadTransport:
    """The transport of one rank, with a random delay of up to ``delay_secs`` before each tick."""

    def __init__(
        self,
        hub: Hub,
        rng: random.Random,
        delay_secs: float,
        *,
        rank: int,
        failure: Callable[[], TorchHooksError | None],
        lost_after_secs: float,
        **_: float,
    ) -> None:
        self._hub, self._rank, self._rng, self._delay_secs = hub, rank, rng, delay_secs
        self._failure, self._lost_after_secs = failure, lost_after_secs
        hub.loops[rank] += 1
        self._loop = hub.loops[rank]  # those of all ranks that have the same number reach each other
        self._channel = f"training {self._loop}"
        self.aborts = False
        hub.gather("connect", rank, None)

    def exchange(self, numbers: list[int], purpose: str = "") -> list[list[int]]:
        pause(self._rng, self._delay_secs)
        if self._rank in self._hub.killed:
            raise ContactLostError("this rank was killed")
        return self._gather(numbers)

    def exchange_text(self, text: str, purpose: str) -> list[str]:
        return self._gather(text)

    def _gather(self, value: Any) -> list[Any]:
        try:
            return self._hub.gather(f"ticks {self._loop}", self._rank, value)
        except RuntimeError as error:
            raise ContactLostError(str(error)) from error

    def gather(self, value: Any) -> list[Any]:
        def stop() -> None:
            error = self._failure()
            if error is not None:
                raise error

        try:
            return self._hub.gather(self._channel, self._rank, value, stop)
        except RuntimeError as error:
            if isinstance(error, TorchHooksError):
                raise
            # As the real one does: the thread of the ticks finds out which rank it was.
            end = time.monotonic() + self._lost_after_secs
            while time.monotonic() < end:
                stop()
                time.sleep(0.001)
            raise PeerError(str(error)) from error

    def for_saving(self) -> ThreadTransport:
        another = copy.copy(self)
        another._channel = f"saving {self._loop}"  # noqa: SLF001 - its own class
        return another

    def find_missing(self) -> list[int]:
        return [] if self._rank in self._hub.killed else self._hub.find_missing(self._rank)

    def abort(self) -> bool:
        return self.aborts

    def leave(self) -> None:
        """Go on: the values of ranks that are threads need no connection."""

    def close(self) -> None:
        self._hub.closed.add((self._rank, self._loop))


class ThreadRanks(Ranks):
    """Ranks that are threads."""

    rank: int = 0
    size: int = 1

    def __init__(self, hub: Hub, rank: int, rng: random.Random, delay_secs: float = 0.0, **periods: float) -> None:
        super().__init__(**periods)
        self.rank, self.size = rank, hub.size
        self._new_transport = functools.partial(ThreadTransport, hub, rng, delay_secs)


@contextlib.contextmanager
def logging_as_no_rank() -> Iterator[None]:
    """Keep each loop from having this process log as the rank of the loop: the process is all ranks at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchhooks.ranks.ranks, "speak_as", lambda rank: None)
        yield


def in_threads(size: int, main: Callable[[ThreadRanks, Hub], Any], **periods: float) -> list[Any]:
    """Call ``main(ranks, hub)`` in a thread for each rank, and return what each returned or raised."""
    hub, results = Hub(size), [None] * size

    def rank_main(rank: int) -> None:
        try:
            results[rank] = main(ThreadRanks(hub, rank, random.Random(rank), **{"tick_secs": 0.001, **periods}), hub)
        except BaseException as error:
            results[rank] = error  # type: ignore[call-overload]
        finally:
            hub.leave(rank)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    with logging_as_no_rank(), _torch_modes_put_back():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


@contextlib.contextmanager
def threads_end() -> Iterator[None]:
    """Wait at the end of the block for all threads that were started in it, such as those that talk to other ranks.

    For a test that replaces what such a thread may call after the rank itself has ended.
    """
    before = {*threading.enumerate()}
    yield
    for thread in {*threading.enumerate()} - before:
        thread.join(60)


@contextlib.contextmanager
def _torch_modes_put_back() -> Iterator[None]:
    """Put back the flags by which torch knows, for the whole process, that a dispatch mode is on.

    Each mode puts back what it found, which of two threads may be the other one's. Torch 2.7 then compiles nothing.
    """
    flags = {name: value for name, value in vars(_python_dispatch).items() if isinstance(value, bool)}
    yield
    vars(_python_dispatch).update(flags)


def pause(rng: random.Random, secs: float) -> None:
    """Sleep for a random time, which is often none."""
    if secs and rng.random() < 0.5:
        time.sleep(rng.random() * secs)


class Recorder(SessionRunHook):
    """Records which calls a loop made."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.position: Any = None
        """Where a checkpoint of the end says that the loop is in its data."""

    def end(self, session: Any) -> None:
        self.calls.append("end")
        position = session.position.state_dict()
        names = ("order", "taken", "state", "runs", "last")
        self.position = position and [[cursor[name] for name in names] for cursor in position["path"]]

    def teardown(self) -> None:
        self.calls.append("teardown")


class Asks(SessionRunHook):
    """Requests a stop in one method of one run."""

    def __init__(self, run: int, method: str) -> None:
        self._run, self._method = run, method

    def before_run(self, run_context: SessionRunContext) -> None:
        if self._method == "before_run" and run_context.session.global_step + 1 == self._run:
            run_context.request_stop("asked")

    def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
        if self._method == "after_run" and run_context.session.global_step == self._run:
            run_context.request_stop("asked")


class Periodic(SessionRunHook):
    """A collective hook that is due by the clock, which differs between the ranks."""

    collective = True

    def __init__(self, period_secs: float) -> None:
        self._period_secs = period_secs
        self.steps: list[int] = []
        self._triggered = False

    def force_due(self) -> None:
        self._triggered = True

    def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
        if self._triggered:
            self._triggered = False
            self.steps.append(run_context.session.global_step)

    def next_due(self) -> Due:
        return Due(moment=time.monotonic() + self._period_secs)


@dataclass
class Schedule:
    """What happens in one training run, all of it drawn from a seed."""

    seed: int
    size: int = 2
    tick_secs: float = 0.001
    items: int = 30
    stop_at: int | None = None
    asks: dict[int, tuple[int, str]] = field(default_factory=dict)
    fails: tuple[int, int, str] | None = None
    sized: bool = False
    uneven: tuple[int, int] | None = None
    epochs: int = 1
    nested: bool = False
    """Whether the epochs are items of an until_stop() too."""
    loop: str = "until_stop"
    period_secs: float | None = None
    delayed: int | None = None
    """The rank whose training thread is slow between two runs, as on a busy machine."""
    uses_body: bool = False
    """Whether the step is made in the body of ``loop.step()``."""

    @classmethod
    def drawn(cls, seed: int) -> Schedule:
        """Return the schedule of ``seed``."""
        rng = random.Random(seed)
        schedule = cls(seed, size=rng.choice([2, 2, 3, 4]), tick_secs=rng.choice([0.0, 0.0005, 0.003]))
        schedule.items = rng.randint(0, 30)
        schedule.sized, schedule.epochs = rng.random() < 0.4, rng.choice([1, 1, 2, 3])
        schedule.loop = rng.choice(["until_stop", "until_stop", "should_stop"])
        if rng.random() < 0.5 or schedule.loop == "should_stop":
            schedule.stop_at = rng.randint(1, 40)
        for rank in range(schedule.size):
            if rng.random() < 0.3:
                schedule.asks[rank] = rng.randint(1, 30), rng.choice(["before_run", "after_run", "thread", "body"])
        if rng.random() < 0.35:
            way = rng.choice(["raise", "raise_in_hook", "break", "kill", "raise_in_body"])
            schedule.fails = rng.randrange(schedule.size), rng.randint(1, 25), way
        if rng.random() < 0.2 and schedule.loop == "until_stop":
            schedule.uneven = rng.randrange(schedule.size), rng.randint(0, schedule.items)
        if rng.random() < 0.4:
            schedule.period_secs = rng.choice([0.0, 0.001, 0.01])
        schedule.uses_body = rng.random() < 0.5
        schedule.nested = rng.random() < 0.5
        schedule.delayed = rng.randrange(schedule.size) if rng.random() < 0.2 else None
        return schedule


@dataclass
class Result:
    """How one rank ended."""

    step: int = 0
    reason: str | None = None
    error: BaseException | None = None
    calls: list[str] = field(default_factory=list)
    periodic: list[int] = field(default_factory=list)
    position: Any = None


class _Killed(BaseException):
    pass


class _RaisesInHook(SessionRunHook):
    def __init__(self, run: int) -> None:
        self._run = run

    def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
        if run_context.session.global_step == self._run:
            raise ValueError("from a hook")


def make(schedule: Schedule) -> list[Result]:
    """Make the training run of ``schedule``, and return how each rank ended."""
    hub, results = Hub(schedule.size), [Result() for _ in range(schedule.size)]

    def rank_main(rank: int) -> None:
        try:
            _train(schedule, hub, rank, results[rank])
        except BaseException as error:
            results[rank].error = error
        finally:
            hub.leave(rank)

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(schedule.size)]
    with logging_as_no_rank():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * HANG_SECS)
    assert not any(thread.is_alive() for thread in threads), f"a rank hangs: {schedule}"
    assert not hub.hung, f"a step hangs: {schedule}"
    return results


def _train(schedule: Schedule, hub: Hub, rank: int, result: Result) -> None:
    rng = random.Random(schedule.seed * 100 + rank)
    slow_secs, tick_delay_secs = rng.choice([0.0, 0.0, 0.001]), rng.choice([0.0, 0.0, 0.002])
    fails_at, way = (schedule.fails[1:]) if schedule.fails and schedule.fails[0] == rank else (None, "")
    asks_at, how = schedule.asks.get(rank, (None, ""))

    def step() -> float:
        run = loop.global_step + 1
        if run == fails_at and way == "kill":
            hub.kill(rank)
            raise _Killed
        pause(rng, slow_secs)
        if run == fails_at and way == "raise":
            raise ValueError("from the step")
        runs = hub.gather("step", rank, run)
        assert len(set(runs)) == 1, f"ranks make different runs: {runs}"
        return 1.0

    def run_body() -> None:
        with loop.step() as outputs:
            outputs["loss"] = step()

    recorder, periodic = Recorder(), Periodic(schedule.period_secs or 0.0)
    hooks: list[SessionRunHook] = [recorder]
    hooks += [StopAtStepHook(last_step=schedule.stop_at)] if schedule.stop_at else []
    hooks += [Asks(asks_at, how)] if asks_at and how in ("before_run", "after_run") else []
    hooks += [periodic] if schedule.period_secs is not None else []
    hooks += [_RaisesInHook(fails_at)] if fails_at and way == "raise_in_hook" else []
    ranks = ThreadRanks(hub, rank, rng, tick_delay_secs, tick_secs=schedule.tick_secs, stuck_secs=HANG_SECS)
    result.calls, result.periodic = recorder.calls, periodic.steps
    with MonitoredLoop(step, hooks=hooks, ranks=ranks) as loop:
        if schedule.delayed == rank:
            _delay(loop)
        run: Callable[[], object] = run_body if schedule.uses_body else loop.run
        try:
            if asks_at and how == "thread":
                threading.Timer(rng.random() * 0.02, loop.request_stop, ["asked"]).start()
            for _ in _items(schedule, loop, rank):
                run()
                pause(rng, slow_secs)
                if asks_at == loop.global_step and how == "body":
                    loop.request_stop("asked")
                if fails_at == loop.global_step and way == "raise_in_body":
                    raise ValueError("from the body")
                if fails_at == loop.global_step and way == "break":
                    break
        finally:
            result.step = loop.global_step
    result.step, result.reason, result.position = loop.global_step, loop.stop_reason, recorder.position


def _delay(loop: Any) -> None:
    """Let the training thread sleep for some ticks where it is about to look at what the thread of the ticks found."""
    rank_sync = loop._runner.rank_sync  # noqa: SLF001 - no public call is between the two threads
    changed = rank_sync.peers._changed  # noqa: SLF001 - as above
    wait, end_run = changed.wait, rank_sync.end_run

    def wait_longer() -> None:
        wait()
        changed.release()
        time.sleep(0.005)
        changed.acquire()

    def end_run_later() -> None:
        time.sleep(0.005)
        end_run()

    changed.wait, rank_sync.end_run = wait_longer, end_run_later


def _items(schedule: Schedule, loop: MonitoredLoop[float], rank: int) -> Iterator[int]:
    if schedule.loop == "should_stop":
        while not loop.should_stop():
            yield 0
        return
    items = schedule.uneven[1] if schedule.uneven and schedule.uneven[0] == rank else schedule.items
    epochs = range(schedule.epochs)
    for _ in loop.until_stop(epochs) if schedule.nested else epochs:
        data: Any = range(items)
        yield from loop.until_stop(list(data) if schedule.sized else iter(data))


def check(schedule: Schedule) -> str:
    """Make the training run of ``schedule``, and return how it ended; raise AssertionError if that is wrong."""
    results = make(schedule)
    errors = [result.error for result in results]
    where = f"{schedule}: {results}"
    if errors == [None] * schedule.size:
        assert len({result.step for result in results}) == 1, where
        leaves = schedule.fails is not None and schedule.fails[2] == "break"  # which each rank words from its side
        assert leaves or len({result.reason for result in results}) == 1, where
        assert all(result.calls == ["end", "teardown"] for result in results), where
        assert len({tuple(result.periodic) for result in results}) == 1, where
        assert leaves or schedule.uneven or all(result.position == results[0].position for result in results), where
        _check_step(schedule, results[0], where)
        return "stopped"
    if schedule.fails and schedule.fails[2] == "raise_in_body" and results[schedule.fails[0]].step == schedule.fails[1]:
        others = [result for rank, result in enumerate(results) if rank != schedule.fails[0]]
        if all(result.error is None for result in others):  # it was raised after the agreed last run
            assert {result.step for result in others} == {schedule.fails[1]}, where
            return "failed"
    assert schedule.fails or (schedule.uneven and not schedule.sized), where
    culprits = [rank for rank, error in enumerate(errors) if not isinstance(error, PeerError)]
    assert all(error is not None for error in errors), where
    assert all("end" not in result.calls and result.calls[-1:] == ["teardown"] for result in results), where
    if culprits:
        assert schedule.fails is not None, where
        assert culprits == [schedule.fails[0]], where
    for error in errors:
        if isinstance(error, PeerError):
            guilty = {schedule.fails[0]} if schedule.fails else set()
            guilty |= set(range(schedule.size)) if schedule.uneven else set()
            assert error.rank in guilty, where
    return "failed"


def _check_step(schedule: Schedule, result: Result, where: str) -> None:
    if schedule.stop_at is not None:
        assert result.step <= schedule.stop_at, where
    least = min(schedule.items, schedule.uneven[1]) if schedule.uneven else schedule.items
    if schedule.loop == "until_stop":
        assert result.step <= least * schedule.epochs, where
    if not schedule.asks and not schedule.fails:
        ends = [schedule.stop_at] if schedule.stop_at is not None else []
        ends += [least * schedule.epochs] if schedule.loop == "until_stop" else []
        assert result.step == min(ends), where
