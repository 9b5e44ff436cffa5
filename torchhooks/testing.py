"""For people who write hooks: a clock that stands still, things that write down what happens to them, a small loop.

A hook, and three tests of it that take no time and need no files:

    from torchhooks import SessionRunArgs, SessionRunHook
    from torchhooks.testing import RecordingHook, trace

    class StopWhenGood(SessionRunHook):
        def __init__(self, target):
            self.target = target

        def before_run(self, run_context):
            return SessionRunArgs("loss")

        def after_run(self, run_context, run_values):
            if run_values.results < self.target:
                run_context.request_stop(f"loss {run_values.results:.3f}")

    def test_stops_in_the_run_that_got_below_the_target():
        assert trace(StopWhenGood(0.2), losses=[0.5, 0.3, 0.1, 0.05]).steps == [1, 2, 3]

    def test_says_why_it_stopped():
        assert "loss 0.100" in trace(StopWhenGood(0.2), losses=[0.5, 0.3, 0.1]).stop_reason

    def test_the_hooks_after_it_still_see_the_last_run():
        after = RecordingHook("global_step")
        trace(StopWhenGood(0.2), after, losses=[0.1])
        assert ("after_run", 1, 1) in after.calls

Everything here is a real implementation of what it stands for: :func:`trace` runs a real
:class:`torchhooks.MonitoredLoop`. For a step, a model or a clock of one's own, make the loop oneself, inside
``with FakeClock() as clock, log_lines() as lines:``.

:class:`FakeDevice` makes the CPU behave as a device that is read back late, :func:`sync_audit` tells which hook makes
the host wait for one.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchhooks.devices import FakeDevice, Sync, sync_audit
from torchhooks.fetch import map_leaves
from torchhooks.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from torchhooks.log import logger, show_lines
from torchhooks.loop import MonitoredLoop
from torchhooks.session import Scaffold, Session
from torchhooks.timer import count

if TYPE_CHECKING:
    from torchhooks.coordinator import Coordinator

__all__ = [
    "FakeClock",
    "FakeDevice",
    "RecordingHook",
    "RecordingWriter",
    "Sync",
    "Trace",
    "log_lines",
    "plain",
    "sync_audit",
    "trace",
]

_Raisable = BaseException | type[BaseException]
_Faults = Mapping[str, _Raisable] | Mapping[tuple[str, int], _Raisable]
_METHODS = ("begin", "after_create_session", "before_run", "after_run", "end", "teardown")


class FakeClock:
    """A clock that moves only when it is told to, in place of ``time.monotonic`` while it is entered.

        with FakeClock() as clock:
            timer.update_last_triggered_step(1)
            clock.advance(2.5)

    It may be entered again, also inside itself or another one; every exit puts back what its entry found.

    Args:
        start: what it shows at first, in seconds.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._replaced: list[Callable[[], float]] = []

    def __call__(self) -> float:
        """The time, in seconds."""
        return self._now

    def advance(self, secs: float) -> None:
        """Let ``secs`` seconds pass: a finite number, 0 or more, or it is a ValueError."""
        if not 0 <= secs < math.inf:
            raise ValueError(f"FakeClock.advance({secs!r}): a monotonic clock never goes back, give 0 or more seconds")
        self._now += secs

    def __enter__(self) -> FakeClock:
        self._replaced.append(time.monotonic)
        time.monotonic = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        time.monotonic = self._replaced.pop()

    def __repr__(self) -> str:
        return f"FakeClock({self._now})"


class RecordingHook(SessionRunHook):
    """Writes down every call it gets in ``calls``; asks, feeds, stops and raises as it is told to.

    A run in which it asked for the loss, the second hook of the list being told to raise in its second run:

        calls = []
        hooks = [
            RecordingHook("loss", name="a", calls=calls),
            RecordingHook(name="b", calls=calls, raises={("before_run", 2): ValueError}),
        ]

    gives, between the calls of ``begin`` and ``teardown``:

        ("a", "after_create_session", 0)          the global step
        ("b", "after_create_session", 0)
        ("a", "before_run", False)                run_context.stop_requested
        ("b", "before_run", False)
        ("a", "after_run", 0.5, 1)                the results, the global step
        ("b", "after_run", None, 1)
        ("a", "before_run", False)
        ("b", "before_run", False)
        ("b", "raises", "ValueError")

    ``end`` is written down with the global step. Tensors and arrays are written down as numbers and lists; ``results``
    holds them as they came, one entry for each ``after_run``.

    Args:
        fetches: what it asks for in every run; any fetch.
        feed_dict: what it feeds to the step in every run.
        stop_at: it asks to stop in the ``after_run`` of this run, the first one being 1.
        raises: method -> exception, a type or an instance, raised at the first call of that method, or
            ``(method, n)`` -> exception, raised at the n-th. ``after_run`` is counted with ``before_run``: 2 is the run
            that was the hook's second. Each is raised once.
        name: what its entries start with.
        calls: the list to write to, to have the entries of several hooks in one; otherwise a new one.

    Raises:
        ValueError: an unknown method in ``raises``, or an ordinal below 1.
    """

    def __init__(
        self,
        fetches: Any = None,
        *,
        feed_dict: Mapping[str, Any] | None = None,
        stop_at: int | None = None,
        raises: _Faults | None = None,
        name: str | None = None,
        calls: list[tuple[Any, ...]] | None = None,
    ) -> None:
        self.calls: list[tuple[Any, ...]] = [] if calls is None else calls
        self.results: list[Any] = []
        self.name = name
        self._fetches, self._feed_dict, self._raises = fetches, feed_dict, raises
        self._stop_at = None if stop_at is None else count(stop_at, "stop_at")
        self._faults = dict(_fault(where, error) for where, error in (raises or {}).items())
        self._count: Counter[str] = Counter()

    def begin(self) -> None:
        """Note it, and count runs from 1 again. What it was told to raise and did raise is not raised again."""
        self._count = Counter(begin=self._count["begin"])
        self._note("begin")

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Note the global step."""
        self._note("after_create_session", session.global_step)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Note whether a stop was asked for already; ask and feed."""
        self._note("before_run", run_context.stop_requested)
        if self._fetches is None and self._feed_dict is None:
            return None
        return SessionRunArgs(self._fetches, self._feed_dict)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Note the results and the global step; ask to stop if this is the run."""
        self.results.append(run_values.results)
        if self._count["before_run"] == self._stop_at:
            run_context.request_stop(f"run {self._stop_at}")
        self._note("after_run", plain(run_values.results), run_context.session.global_step)

    def end(self, session: Session) -> None:
        """Note the global step."""
        self._note("end", session.global_step)

    def teardown(self) -> None:
        """Note it."""
        self._note("teardown")

    def _note(self, method: str, *details: Any) -> None:
        self._count[method] += 1
        self._write(method, *details)
        ordinal = self._count["before_run" if method == "after_run" else method]
        error = self._faults.pop((method, ordinal), None)
        if error is not None:
            self._write("raises", (error if isinstance(error, type) else type(error)).__name__)
            raise error

    def _write(self, *entry: Any) -> None:
        self.calls.append(entry if self.name is None else (self.name, *entry))

    def __repr__(self) -> str:
        told = {"feed_dict": self._feed_dict, "stop_at": self._stop_at, "raises": self._raises, "name": self.name}
        arguments = [] if self._fetches is None else [repr(self._fetches)]
        arguments += [f"{key}={value!r}" for key, value in told.items() if value is not None]
        return f"RecordingHook({', '.join(arguments)})"


def _fault(where: str | tuple[str, int], error: _Raisable) -> tuple[tuple[str, int], _Raisable]:
    method, ordinal = (where, 1) if isinstance(where, str) else where
    if method not in _METHODS:
        raise ValueError(f"RecordingHook(raises={{{where!r}: ...}}): a hook's methods are {', '.join(_METHODS)}")
    return (method, count(ordinal, f"raises[{where!r}]")), error


class RecordingWriter:
    """A summary writer that keeps what it is given, in the order it came: give it to a hook as ``summary_writer``.

        writer = RecordingWriter()
        trace(StepCounterHook(2, summary_writer=writer), losses=[0.1] * 5)
        assert writer.scalars == {"global_step/sec": [(3, 1.0), (5, 1.0)]}

    Attributes:
        records: ``(kind, tag, value, step)``, the kind being what follows ``add_``, and ``("session_log", status,
            step)``, the status being ``"START"`` or ``"CHECKPOINT"``. Tensors and arrays are kept as numbers and lists.
        flushed: how often it was flushed.
        closed: how often it was closed.
    """

    def __init__(self) -> None:
        self.records: list[tuple[Any, ...]] = []
        self.flushed = 0
        self.closed = 0

    @property
    def scalars(self) -> dict[str, list[tuple[int, Any]]]:
        """The scalars by tag: the steps and the values in the order they came."""
        curves: dict[str, list[tuple[int, Any]]] = {}
        for kind, *record in self.records:
            if kind == "scalar":
                tag, value, step = record
                curves.setdefault(tag, []).append((step, value))
        return curves

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Keep a number."""
        self._keep("scalar", tag, value, step)

    def add_histogram(self, tag: str, value: Any, step: int) -> None:
        """Keep the values of a histogram."""
        self._keep("histogram", tag, value, step)

    def add_image(self, tag: str, value: Any, step: int) -> None:
        """Keep an image."""
        self._keep("image", tag, value, step)

    def add_text(self, tag: str, value: Any, step: int) -> None:
        """Keep a text."""
        self._keep("text", tag, value, step)

    def add_figure(self, tag: str, value: Any, step: int) -> None:
        """Keep a figure, the object itself."""
        self._keep("figure", tag, value, step)

    def add_session_log(self, session_log: Any, step: int) -> None:
        """Keep what a ``SessionLog`` event says: that a session started, or that a checkpoint was written."""
        statuses = session_log.DESCRIPTOR.fields_by_name["status"].enum_type.values_by_number
        self.records.append(("session_log", statuses[session_log.status].name, step))

    def flush(self) -> None:
        """Count it."""
        self.flushed += 1

    def close(self) -> None:
        """Count it."""
        self.closed += 1

    def _keep(self, kind: str, tag: str, value: Any, step: int) -> None:
        self.records.append((kind, tag, plain(value), step))

    def __repr__(self) -> str:
        return f"<RecordingWriter: {len(self.records)} records, flushed {self.flushed}, closed {self.closed} times>"


@dataclass(frozen=True)
class Trace:
    """What :func:`trace` saw.

    Args:
        steps: the global step after each run that returned.
        lines: what was logged, as ``(level, text)``: ``("INFO", "loss = 0.1")``.
        stop_reason: the loop's, who stopped it and why.
        global_step: the loop's, at the end.
        error: what came out of the loop, if it was one of those to ``catch``.
    """

    steps: list[int]
    lines: list[tuple[str, str]]
    stop_reason: str | None
    global_step: int
    error: BaseException | None = None


def trace(
    *hooks: SessionRunHook,
    losses: Iterable[Any] = (0.5, 0.25, 0.125),
    secs: float = 1.0,
    start_step: int = 0,
    catch: type[BaseException] | tuple[type[BaseException], ...] = (),
    **loop_arguments: Any,
) -> Trace:
    """Run a real MonitoredLoop with ``hooks`` around a step that returns ``losses``, until they end or a hook stops it.

        assert trace(StopAtStepHook(last_step=3), losses=[0.1] * 9).steps == [1, 2, 3]
        assert trace(NanTensorHook("loss"), losses=[0.1, math.nan], catch=NanLossDuringTrainingError).steps == [1]

    Args:
        hooks: the hooks, in order.
        losses: what the step returns, one each time it is called: a number as a float32 tensor, an exception (a type
            or an instance) is raised, anything else as it is; a mapping, for instance, to have more outputs.
        secs: how long a step takes, on a :class:`FakeClock`.
        start_step: the global step from which it goes on.
        catch: exceptions that end up in ``error`` of what is returned. All others come out, so that a test fails.
        loop_arguments: for the loop: ``model``, ``optimizer``, ``step_unit``, ...
    """
    pending = deque(losses)
    steps: list[int] = []
    loop, error = None, None
    with FakeClock() as clock, log_lines() as lines:
        step, scaffold = _step(pending, clock, secs), _starting_at(start_step)
        try:
            with MonitoredLoop(step, hooks=hooks, scaffold=scaffold, **loop_arguments) as loop:
                for _ in loop.until_stop(_while(pending), resume=False):
                    loop.run()
                    steps.append(loop.global_step)
        except catch as caught:
            error = caught
    reason, last = (None, start_step) if loop is None else (loop.stop_reason, loop.global_step)
    return Trace(steps, lines, reason, last, error)


def _step(pending: deque[Any], clock: FakeClock, secs: float) -> Callable[[], Any]:
    def step() -> Any:
        clock.advance(secs)
        loss = pending.popleft()
        if isinstance(loss, BaseException) or (isinstance(loss, type) and issubclass(loss, BaseException)):
            raise loss
        return torch.tensor(float(loss)) if isinstance(loss, int | float) else loss

    return step


def _while(pending: deque[Any]) -> Iterator[int]:
    while pending:
        yield len(pending)


def _starting_at(step: int) -> Scaffold:
    def init_fn(scaffold: Scaffold, session: Session) -> None:
        session.global_step = step

    return Scaffold(init_fn=init_fn)


@contextmanager
def log_lines() -> Iterator[list[tuple[str, str]]]:
    """A list that gets what is logged under ``"torchhooks"`` meanwhile, INFO and above, as ``(level, text)``."""
    lines: list[tuple[str, str]] = []
    handler = _LineHandler(lines)
    logger.addHandler(handler)
    # The library's own handler, if an earlier loop put it there, goes now and not when the next loop is made: its going
    # would set the level back.
    show_lines()
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


class _LineHandler(logging.Handler):
    def __init__(self, lines: list[tuple[str, str]]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.levelname, record.getMessage()))


def plain(values: Any) -> Any:
    """``values`` with numbers and lists in place of tensors and arrays, also in dicts, lists, tuples, dataclasses."""
    return map_leaves(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, values)
