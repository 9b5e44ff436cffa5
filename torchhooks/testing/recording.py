"""A clock, a hook and a writer that record what happens, and a small training loop."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torchhooks.common.checks import whole_number
from torchhooks.common.text import call_repr
from torchhooks.common.trees import Tree, map_leaves
from torchhooks.fetches.evaluation import watched_names
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from torchhooks.lifecycle.session import Scaffold, Session
from torchhooks.loop.monitored_loop import MonitoredLoop
from torchhooks.summary.writers import SummaryWriter

Call = tuple[Any, ...]
"""A call of a method: its name, and what it was about."""

_Raisable = BaseException | type[BaseException]
_Faults = Mapping[str, _Raisable] | Mapping[tuple[str, int], _Raisable]
_METHODS = ("begin", "after_create_session", "before_run", "after_run", "end", "teardown")


class FakeClock:
    """A clock that moves only when it is told to. A context manager that replaces ``time.monotonic``.

    >>> from torchhooks.testing import FakeClock
    >>> timer = SecondOrStepTimer(every_secs=60)
    >>> with FakeClock() as clock:
    ...     last = timer.update_last_triggered_step(1)
    ...     clock.advance(59.5)
    ...     early = timer.should_trigger_for_step(2)
    ...     clock.advance(0.5)
    ...     early, timer.should_trigger_for_step(3)
    (False, True)

    It can be entered again, even inside itself or another clock. Each exit restores what its entry replaced.

    The whole process sees this clock. A wait of other code for at most some seconds, such as torch's for the
    workers of a DataLoader, has no limit while the clock stands still.

    Args:
        start: the initial time, in seconds.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._replaced: list[Callable[[], float]] = []

    def __call__(self) -> float:
        """Return the current time, in seconds."""
        return self._now

    def advance(self, secs: float) -> None:
        """Let ``secs`` seconds pass.

        Raises:
            ValueError: ``secs`` is negative or not finite.
        """
        if not 0 <= secs < math.inf:
            raise ValueError(f"FakeClock.advance({secs!r}): a monotonic clock never goes back, give 0 or more seconds")
        self._now += secs

    def __enter__(self) -> FakeClock:
        self._replaced.append(time.monotonic)
        # In the module itself, so that all code sees it that calls time.monotonic(). Code that has imported the
        # function, as threading does, keeps the real clock.
        time.monotonic = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        time.monotonic = self._replaced.pop()

    def __repr__(self) -> str:
        return f"FakeClock({self._now})"


class RecordingHook(SessionRunHook):
    """A hook that records every call in ``calls``, and that fetches, feeds, stops and raises as its arguments say.

    >>> from torchhooks.testing import RecordingHook, trace
    >>> hook = RecordingHook("loss", raises={("before_run", 2): ValueError})
    >>> seen = trace(hook, losses=[0.5, 0.25], catch=ValueError)
    >>> for call in hook.calls:
    ...     print(call)
    ('begin',)
    ('after_create_session', 0)
    ('before_run', False)
    ('after_run', 0.5, 1)
    ('before_run', False)
    ('raises', 'ValueError')
    ('teardown',)

    An entry has the name of the method. After it, entries of ``after_create_session`` and ``end`` have the global step,
    entries of ``before_run`` have ``run_context.stop_requested``, and entries of ``after_run`` have the results and the
    global step, with numbers and lists in place of tensors and arrays. The original results are in ``results``, one
    item for each ``after_run``.

    Args:
        fetches: the fetch to request in every run.
        feed_dict: what to feed to the step in every run.
        stop_at: request a stop in the ``after_run`` of this run; the first run is 1.
        raises: the exceptions to raise, each once. A key is a method, for its first call, or ``(method, n)``, for its
            n-th call; a value is an exception or its type. For ``after_run``, n counts the calls of ``before_run``: 2
            is the second run of the hook. Each loop counts from 1 again, except for ``begin``.
        name: the first item of each entry; by default there is none.
        calls: the list to append the entries to, so that hooks can share one; by default a new list.

    Raises:
        ValueError: ``raises`` has an unknown method, or ``n`` or ``stop_at`` is less than 1.
    """

    def __init__(
        self,
        fetches: object = None,
        *,
        feed_dict: Mapping[str, object] | None = None,
        stop_at: int | None = None,
        raises: _Faults | None = None,
        name: str | None = None,
        calls: list[Call] | None = None,
    ) -> None:
        self.calls: list[Call] = [] if calls is None else calls
        self.results: list[Tree] = []
        self.name = "" if name is None else name
        self._fetches, self._feed_dict, self._raises = fetches, feed_dict, raises
        self._stop_at = None if stop_at is None else whole_number(stop_at, "stop_at", 1)
        self._faults = dict(_fault(where, error) for where, error in (raises or {}).items())
        self._count: Counter[str] = Counter()

    def begin(self) -> None:
        self._count = Counter(begin=self._count["begin"])  # a new loop, whose first run is 1
        self._note("begin")

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._note("after_create_session", session.global_step)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self._note("before_run", run_context.stop_requested)
        if self._fetches is None and self._feed_dict is None:
            return None
        return SessionRunArgs(self._fetches, self._feed_dict)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.results.append(run_values.results)
        if self._count["before_run"] == self._stop_at:
            run_context.request_stop(f"run {self._stop_at}")
        self._note("after_run", plain(run_values.results), run_context.session.global_step)

    def end(self, session: Session) -> None:
        self._note("end", session.global_step)

    def teardown(self) -> None:
        self._note("teardown")

    def _note(self, method: str, *details: object) -> None:
        name = (self.name,) if self.name else ()
        # Before the error is raised, so that the list has the call that raised it too.
        self.calls.append((*name, method, *details))
        self._count[method] += 1
        ordinal = self._count["before_run" if method == "after_run" else method]
        error = self._faults.pop((method, ordinal), None)
        if error is not None:
            self.calls.append((*name, "raises", (error if isinstance(error, type) else type(error)).__name__))
            raise error

    def __repr__(self) -> str:
        fetches = [] if self._fetches is None else [self._fetches]
        options = {
            "feed_dict": self._feed_dict,
            "stop_at": self._stop_at,
            "raises": self._raises,
            "name": self.name or None,
        }
        return call_repr(self, *fetches, **options)


def _fault(where: str | tuple[str, int], error: _Raisable) -> tuple[tuple[str, int], _Raisable]:
    method, ordinal = (where, 1) if isinstance(where, str) else where
    if method not in _METHODS:
        raise ValueError(f"RecordingHook(raises={{{where!r}: ...}}): a hook's methods are {', '.join(_METHODS)}")
    return (method, whole_number(ordinal, f"raises[{where!r}]", 1)), error


class RecordingWriter(SummaryWriter):
    """A summary writer that keeps what it is given. Pass it to a hook as ``summary_writer``.

    >>> from torchhooks.testing import RecordingWriter, trace
    >>> writer = RecordingWriter()
    >>> seen = trace(StepCounterHook(2, summary_writer=writer), losses=[0.1] * 5)
    global_step/sec: 1
    global_step/sec: 1
    >>> writer.scalars["global_step/sec"]
    [(3, 1.0), (5, 1.0)]

    Attributes:
        records: one tuple for each call, in order. ``(kind, tag, value, step)`` for ``add_<kind>``, with numbers and
            lists in place of tensors and arrays; ``("session_log", status, step)`` for session logs, with the status
            ``"START"`` or ``"CHECKPOINT"``.
        flushed: how many times it was flushed.
        closed: how many times it was closed.
    """

    def __init__(self) -> None:
        self.records: list[Call] = []
        self.flushed = self.closed = 0

    @property
    def scalars(self) -> dict[str, list[tuple[int, Tree]]]:
        """The scalars by tag, as lists of ``(step, value)`` in the order of the calls."""
        curves: dict[str, list[tuple[int, Tree]]] = {}
        for kind, *record in self.records:
            if kind == "scalar":
                tag, value, step = record
                curves.setdefault(tag, []).append((step, value))
        return curves

    def add_scalar(self, tag: str, value: object, step: int) -> None:
        self._record("scalar", tag, value, step)

    def add_histogram(self, tag: str, value: object, step: int) -> None:
        self._record("histogram", tag, value, step)

    def add_image(self, tag: str, value: object, step: int) -> None:
        self._record("image", tag, value, step)

    def add_text(self, tag: str, value: object, step: int) -> None:
        self._record("text", tag, value, step)

    def add_figure(self, tag: str, value: object, step: int) -> None:
        self._record("figure", tag, value, step)

    def add_session_log(
        self, status: Literal["START", "CHECKPOINT"], step: int, checkpoint_path: str | os.PathLike[str] | None = None
    ) -> None:
        self.records.append(("session_log", status, step))

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed += 1

    def _record(self, kind: str, tag: str, value: object, step: int) -> None:
        self.records.append((kind, tag, plain(value), step))

    def __repr__(self) -> str:
        return f"<RecordingWriter: {len(self.records)} records, flushed {self.flushed}, closed {self.closed} times>"


@dataclass(frozen=True)
class Trace:
    """What :func:`trace` observed.

    >>> from torchhooks.testing import trace
    >>> trace(StopAtStepHook(last_step=1))
    Trace(steps=[1], lines=[], stop_reason='StopAtStepHook: step 1', global_step=1, error=None)

    Args:
        steps: the global step after each run that returned.
        lines: the log lines, as ``(level, text)``: ``("INFO", "loss = 0.1")``.
        stop_reason: the loop's ``stop_reason`` at the end.
        global_step: the loop's global step at the end.
        error: the exception that the loop raised, if it is one of those to ``catch``.
    """

    steps: list[int]
    lines: list[tuple[str, str]]
    stop_reason: str | None
    global_step: int
    error: BaseException | None = None


def trace(
    *hooks: SessionRunHook,
    losses: Iterable[object] = (0.5, 0.25, 0.125),
    secs: float = 1.0,
    start_step: int = 0,
    catch: type[BaseException] | tuple[type[BaseException], ...] = (),
    activations: Mapping[str, Sequence[object]] | None = None,
    **loop_arguments: Any,
) -> Trace:
    """Run a MonitoredLoop with ``hooks``, one run for each of ``losses``, until they end or a hook stops the loop.

    >>> from torchhooks.testing import trace
    >>> trace(StopAtStepHook(last_step=3), losses=[0.1] * 9).steps
    [1, 2, 3]
    >>> seen = trace(NanTensorHook("loss"), losses=[0.1, float("nan")], catch=NanLossDuringTrainingError)
    loss is NaN at step 2: training fails
    >>> seen.steps, type(seen.error).__name__
    ([1], 'NanLossDuringTrainingError')

    Args:
        hooks: the hooks, in order.
        losses: what the step returns, one in each run. A number is returned as a float32 tensor. An exception or its
            type is raised. Anything else, such as a mapping of several outputs, is returned as it is.
        secs: how many seconds each step takes, on a :class:`FakeClock`.
        start_step: the global step before the first run.
        catch: exceptions to return in ``Trace.error``. All others are raised.
        activations: for a hook that fetches what submodules return, receive, or get as a gradient: by its name, such as
            ``"fc1:output"``, one value in each run. No model is needed.
        loop_arguments: passed to the loop: ``model``, ``optimizer``, ``step_unit`` and so on.

    Raises:
        ValueError: a name in ``activations`` is none of a submodule, or has not as many values as there are losses.
    """
    pending = deque(losses)
    of_submodules = _by_run(activations, len(pending))
    steps: list[int] = []
    loop, error = None, None

    def step() -> object:
        clock.advance(secs)
        # Both at once: a loss that is raised uses up its activations too, so that the next run, after a recovery, has
        # its own.
        loss, of_run = pending.popleft(), of_submodules.popleft()
        if isinstance(loss, BaseException) or (isinstance(loss, type) and issubclass(loss, BaseException)):
            raise loss
        outputs = _as_tensor(loss)
        if activations is None:
            return outputs
        # What the step returns under the name of an activation comes before what a submodule would give.
        named = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
        return {**named, **of_run}

    def init_fn(scaffold: Scaffold, session: Session) -> None:
        session.global_step = start_step

    with FakeClock() as clock, log_lines() as lines:
        try:
            with MonitoredLoop(step, hooks=hooks, scaffold=Scaffold(init_fn), **loop_arguments) as loop:
                # No resume: the losses belong to this call, even if a checkpoint of another one is restored.
                for _ in loop.until_stop(_while_any(pending), resume=False):
                    loop.run()
                    steps.append(loop.global_step)
        except catch as caught:
            error = caught
    # There is no loop if its constructor, or the begin of a hook, has raised the error.
    reason, last = (None, start_step) if loop is None else (loop.stop_reason, loop.global_step)
    return Trace(steps, lines, reason, last, error)


def _by_run(activations: Mapping[str, Sequence[object]] | None, runs: int) -> deque[dict[str, object]]:
    """Return the activations of each of ``runs`` runs, by name."""
    given = {} if activations is None else activations
    for name, values in given.items():
        if not watched_names(name):
            raise ValueError(
                f"activations={{{name!r}: ...}}: name the output, the input or the gradient of a submodule, such as "
                "'fc1:output', 'fc1:input' or 'fc1:grad'"
            )
        if len(values) != runs:
            raise ValueError(f"activations={{{name!r}: ...}} has {len(values)} values, and there are {runs} losses")
    return deque({name: _as_tensor(values[run]) for name, values in given.items()} for run in range(runs))


def _as_tensor(value: object) -> object:
    return torch.tensor(float(value)) if isinstance(value, int | float) else value


def _while_any(pending: deque[object]) -> Iterator[int]:
    while pending:
        yield len(pending)


@contextmanager
def log_lines() -> Iterator[list[tuple[str, str]]]:
    """Collect the log lines of ``"torchhooks"`` and its children, INFO and above, as ``(level, text)``.

    >>> from torchhooks.testing import log_lines
    >>> hook = LoggingTensorHook({"step": "global_step"}, every_n_iter=1)
    >>> with log_lines() as lines, MonitoredLoop(step, model, hooks=[hook]) as loop:
    ...     loss = loop.run(batches[0])
    step = 1
    >>> lines
    [('INFO', 'step = 1')]
    """
    lines: list[tuple[str, str]] = []
    logger, handler = logging.getLogger("torchhooks"), _LineHandler(lines)
    logger.addHandler(handler)
    level = logger.level
    # Without a level, the logger has that of the root logger, WARNING, and drops the lines before the handler sees
    # them.
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


def plain(values: object) -> Tree:
    """Return ``values``, of any structure, with numbers and lists in place of tensors and arrays.

    >>> from torchhooks.testing import plain
    >>> plain({"loss": torch.tensor(0.5), "shape": torch.ones(2, 2).shape, "weight": torch.ones(2)})
    {'loss': 0.5, 'shape': torch.Size([2, 2]), 'weight': [1.0, 1.0]}
    """
    return map_leaves(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, values)
