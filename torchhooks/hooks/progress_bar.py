"""A hook that shows how far the loop is."""

from __future__ import annotations

import datetime
import functools
import importlib
import logging
import sys
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from torchhooks.common.checks import period, whole_number
from torchhooks.common.log import logger
from torchhooks.common.text import call_repr
from torchhooks.common.timers import NEVER, Due, SecondOrStepTimer
from torchhooks.common.trees import GroupRates, map_leaves
from torchhooks.device.readback import Elapsed, Moment
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import ReportingHook, SessionRunArgs, SessionRunContext, SessionRunValues
from torchhooks.lifecycle.session import Session
from torchhooks.ranks.ranks import Ranks
from torchhooks.summary.lines import by_tag, printable

_REFRESH_SECS = 0.1
_SAMPLES = 50
"""How many refreshes the rate is measured over: 5 seconds, or more if steps take longer than a refresh."""

_Times = tuple[float, tuple[float, ...], tuple[Any, ...]]  # seconds, those of the pauses within them, and the values


class _Sample(NamedTuple):
    """A refresh, and the pauses between it and the next one."""

    moment: Moment
    step: int
    pauses: list[Elapsed]


class ProgressBarHook(ReportingHook):
    """Shows a progress bar, with the rate, the remaining time and chosen values. Needs tqdm.

    In a terminal, ``ProgressBarHook(1000, ["loss"])`` shows
    ``40%|####      | 400/1000 [00:08<00:12, 48.9step/s, loss=0.125]``. The bar is refreshed at most ten times a second,
    and the other runs do not call the hook. The rate is measured as a StepCounterHook does: without the first step and
    without pauses, and on a GPU by the device's clock. The host does not wait for the device.

    In a notebook the bar is a widget. Where there is neither a notebook nor a terminal, as in a batch job, the hook
    logs lines such as ``step 400/1000: 48.9 steps/sec, 0:00:12 left, loss = 0.125`` instead, in the first run, in each
    period after it, and at the end. Here, the output is a file:

    >>> import io
    >>> with MonitoredLoop(step, model, optimizer, hooks=[ProgressBarHook(8, ["loss"], file=io.StringIO())]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    step 1/8: loss = ...
    step 8/8...

    A line that is logged to the terminal replaces the bar, which appears again below it with the next refresh.

    To show a result of an EvaluationHook, use ``{"val": evaluation.last("val_loss")}``: a refresh that requests
    ``evaluation["val_loss"]`` evaluates the model.

    With several ranks, the chief alone shows the bar, with its own values.

    Args:
        total: the global step at which the loop will end; without it, no remaining time is shown.
        values: a dict from tag to fetch, or a list of fetches, of the values to show.
        log_every_secs: the period of log lines, in seconds, where there is no terminal.
        file: the stream to write the bar to; by default ``sys.stderr``.

    Raises:
        ImportError: tqdm is not installed.
        ValueError: ``total`` or ``log_every_secs`` is not valid, or two fetches in a list have the same name.
        TypeError: ``values`` is neither a dict nor a list.
    """

    def __init__(
        self, total: int | None = None, values: Any = (), *, log_every_secs: float = 30.0, file: Any = None
    ) -> None:
        self._arguments = {"total": total, "values": values, "log_every_secs": log_every_secs, "file": file}
        self._total = None if total is None else whole_number(total, "total", 1)
        self._tensors = {} if isinstance(values, dict | list | tuple) and not values else by_tag(values)
        self._request = SessionRunArgs(tuple(self._tensors.values())) if self._tensors else None
        self._log_every_secs = period(log_every_secs, "log_every_secs")
        self._file = file
        self._bar_class = _bar_class()  # here, so that a missing tqdm is an error before the training run starts
        self._bar: Any = None
        self._filtered: list[logging.Handler] = []

    def join(self, ranks: Ranks, collective: bool) -> None:
        self.writes = ranks.is_chief

    def begin(self) -> None:
        self._stream = sys.stderr if self._file is None else self._file
        self._shows_bar = self.writes and (_is_terminal(self._stream) or _is_notebook(self._bar_class))
        self._timer = SecondOrStepTimer(every_secs=_REFRESH_SECS if self._shows_bar else self._log_every_secs)
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)
        self._shown: int | None = None
        self._rate: float | None = None

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._samples.clear()  # after a recovery, the steps go back
        session.on_pause(self._add_pause)
        if self._shows_bar and self._bar is None:
            step = session.global_step
            self._bar = self._bar_class(total=self._total, initial=step, unit="step", file=self._stream)
            self._filtered = _terminal_handlers()
            for handler in self._filtered:
                handler.addFilter(self._clear_bar)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        step = run_context.session.global_step + 1
        self._due = self._timer.should_trigger_for_step(step)
        if not self._due:
            return None
        # The period begins before the step, so that each step that takes longer than a period is shown.
        self._timer.update_last_triggered_step(step)
        return self._request

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if not self._due:
            return
        session = run_context.session
        step = session.global_step
        self._samples.append(_Sample(Moment(session.device), step, []))
        first, last = self._samples[0], self._samples[-1]
        duration = Elapsed(first.moment, last.moment)
        secs = duration if duration.events else duration.host_secs
        pauses = tuple(pause for sample in self._samples for pause in sample.pauses)
        show = functools.partial(self._show, step, step - first.step)
        run_context.when_ready((secs, pauses, run_values.results or ()), show)

    def end(self, session: Session) -> None:
        step = session.global_step
        if self._bar is not None:
            self._bar.n = step
            self._bar.refresh()
        elif self.writes and step != self._shown:
            self._log(step, {})

    def teardown(self) -> None:
        for handler in self._filtered:
            handler.removeFilter(self._clear_bar)
        self._filtered = []
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def next_due(self) -> Due:
        return self._timer.next_due() if self.writes else NEVER

    def _add_pause(self, pause: Elapsed) -> None:
        if self._samples:
            self._samples[-1].pauses.append(pause)

    def _show(self, step: int, steps: int, times: _Times) -> None:
        """Show that the loop was at ``step``, after ``steps`` steps since the first sample."""
        duration, pauses, values = times
        secs = duration - sum(pauses)
        self._rate = steps / secs if steps > 0 and secs > 0 else None
        texts = {tag: map_leaves(printable, value) for tag, value in zip(self._tensors, values, strict=True)}
        if self._bar is None:
            self._log(step, texts)
            return
        self._bar.n = step
        self._bar.measured_rate = self._rate
        if texts:
            shown = [f"{tag}={_brief(value)}" for tag, value in texts.items()]
            self._bar.set_postfix_str(", ".join(shown), refresh=False)
        self._bar.refresh()

    def _log(self, step: int, texts: dict[str, Any]) -> None:
        self._shown = step
        parts = [] if self._rate is None else [f"{self._rate:.3g} steps/sec"]
        if self._rate is not None and self._total is not None and step < self._total:
            parts.append(f"{datetime.timedelta(seconds=round((self._total - step) / self._rate))} left")
        parts += [f"{tag} = {_brief(value)}" for tag, value in texts.items()]
        done = f"step {step}" if self._total is None else f"step {step}/{self._total}"
        logger.info("%s", f"{done}: {', '.join(parts)}" if parts else done)

    def _clear_bar(self, record: logging.LogRecord) -> bool:
        """Remove the bar from the terminal before a handler writes ``record`` there."""
        bar = self._bar
        if bar is not None:
            bar.clear()
        return True

    def __repr__(self) -> str:
        return call_repr(self, **self._arguments)


@functools.cache
def _bar_class() -> Any:
    """Return tqdm's bar for this terminal or notebook, with a rate that is set from outside."""
    try:
        base = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        way_out = "pip install 'torchhooks[progress]', or remove the hook"
        raise ImportError(f"ProgressBarHook needs tqdm, which cannot be imported: {way_out}") from error

    def format_dict(bar: Any) -> dict[str, Any]:
        return {**base.format_dict.fget(bar), "rate": bar.measured_rate}

    # Without an interval, tqdm starts no thread that refreshes bars.
    members = {"measured_rate": None, "format_dict": property(format_dict), "monitor_interval": 0}
    return type("MeasuredBar", (base,), members)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream at all, as in pythonw, or a closed one
        return False


def _is_notebook(bar_class: type) -> bool:
    return any(base.__name__ == "tqdm_notebook" for base in bar_class.__mro__)


def _terminal_handlers() -> list[logging.Handler]:
    """Return the logging handlers that write to a terminal."""
    loggers = [logging.root, *list(logging.Logger.manager.loggerDict.values())]
    handlers = {handler for each in loggers for handler in getattr(each, "handlers", ())}
    return [each for each in handlers if isinstance(each, logging.StreamHandler) and _is_terminal(each.stream)]


def _brief(value: Any) -> str:
    """Return a number, or rates, with four digits, or the text of any other value."""
    if isinstance(value, float | np.floating | GroupRates):
        return f"{value:.4g}"
    return str(value)
