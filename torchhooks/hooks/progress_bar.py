"""A hook that shows how far the loop is."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import logging
import sys
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from torchhooks.common.checks import period, whole_number
from torchhooks.common.errors import LifecycleError, NoRunYetError
from torchhooks.common.log import fallback, logger
from torchhooks.common.text import shown
from torchhooks.common.timers import NEVER, NOW, Due, SecondOrStepTimer
from torchhooks.common.trees import GroupRates, map_leaves
from torchhooks.device.readback import Elapsed, Moment, to_host
from torchhooks.fetches.fetch import watched_names
from torchhooks.hooks.reporting import check_available_at_end
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import ReportingHook, SessionRunArgs, SessionRunContext, SessionRunValues
from torchhooks.lifecycle.session import Session
from torchhooks.ranks.ranks import Ranks
from torchhooks.summary.lines import by_tag, printable

_REFRESH_SECS = 0.1
_SAMPLES = 50
"""How many refreshes the rate is measured over: 5 seconds, or more if steps take longer than a refresh."""

_Times = tuple[float, tuple[float, ...], tuple[Any, ...]]  # seconds, the pauses within them, and the values


class _Sample(NamedTuple):
    """A refresh, and the pauses between it and the next one."""

    moment: Moment
    done: int
    pauses: list[Elapsed]


class _Count(NamedTuple):
    """How far the loop is at a refresh: in steps, or with ``per="epoch"`` in items of the epoch."""

    done: int
    total: int | None
    epoch: int | None = None


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

    With several ranks, the chief alone shows the bar, with its own values.

    With ``per="epoch"`` there is a bar for each epoch, which stays with the values at its end; in a log, a line:

    >>> values = {"mean loss": running_mean("loss", reset="epoch")}
    >>> hook = ProgressBarHook(values=values, per="epoch", file=io.StringIO())
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     for epoch in loop.until_stop(range(2)):
    ...         for inputs in loop.until_stop(batches):
    ...             loss = loop.run(inputs)
    epoch 0, batch 1/8: mean loss = ...
    epoch 0, batch 8/8: ... batches/sec, mean loss = ...
    epoch 1, batch 8/8: ... batches/sec, mean loss = ...

    While there is a bar, write text with ``tqdm.write(text)``: a ``print`` leaves a part of the bar on the screen.

    Args:
        total: the global step at which the loop will end. By default, the step of a StopAtStepHook, or what follows
            from the lengths of the data that ``until_stop`` is given, if each item is one step. If it is not known, no
            remaining time is shown.
        values: a dict from tag to fetch, or a list of fetches, of the values to show, in the given order.
        per: ``"epoch"`` for a bar for each epoch, which counts its batches: items of the innermost ``until_stop``.
        log_every_secs: the period of log lines, in seconds, where there is no terminal.
        file: the stream to write the bar to; by default ``sys.stderr``.

    Raises:
        ImportError: tqdm is not installed.
        ValueError: ``total``, ``per`` or ``log_every_secs`` is not valid, two fetches in a list have the same name, or
            with ``per="epoch"``, a value is available only while a step runs.
        TypeError: ``values`` is neither a dict nor a list.
        LifecycleError: from the run, with ``per="epoch"``, the loop is not in an ``until_stop``.
    """

    def __init__(
        self,
        total: int | None = None,
        values: Any = (),
        *,
        per: str | None = None,
        log_every_secs: float = 30.0,
        file: Any = None,
    ) -> None:
        self._total = None if total is None else whole_number(total, "total", 1)
        if per not in (None, "epoch"):
            raise ValueError(f'per={shown(per)}: must be "epoch", for a bar for each epoch, or None, for one bar')
        if per is not None and total is not None:
            raise ValueError(f"total={total}, per='epoch': the data tell how many items an epoch has; leave out total")
        self._per_epoch = per is not None
        self._tensors = {} if isinstance(values, dict | list | tuple) and not values else by_tag(values, "values")
        if self._per_epoch:
            check_available_at_end(self, self._tensors)
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
        self._epoch: int | None = None  # the epoch of the samples
        self._epoch_ended = False  # whether the next run is the first of an epoch
        self._shown: _Count | None = None
        self._rate: float | None = None

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._samples.clear()  # after a recovery, the steps go back
        session.on_pause(self._add_pause)
        if self._shows_bar and self._bar is None:
            self._filtered = _terminal_handlers()
            for handler in self._filtered:
                handler.addFilter(self._clear_bar)
            if not self._per_epoch:
                self._open_bar(_Count(session.global_step, self._total))

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        step = run_context.session.global_step + 1
        self._due = run_context.ends_epoch or self._timer.should_trigger_for_step(step)
        if not self._due or run_context.ends_epoch:
            return self._request if self._due else None
        # The period begins before the step, so that each step that takes longer than a period is shown.
        self._timer.update_last_triggered_step(step)
        return self._request

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        begins, self._epoch_ended = self._epoch_ended, run_context.ends_epoch
        if not (self._due or begins):
            return
        session = run_context.session
        count = self._count(session)
        if count.epoch != self._epoch:
            self._samples.clear()
            self._epoch = count.epoch
        self._samples.append(_Sample(Moment(session.device), count.done, []))
        if not self._due:
            return
        first, last = self._samples[0], self._samples[-1]
        duration = Elapsed(first.moment, last.moment)
        secs = duration if duration.events else duration.host_secs
        pauses = tuple(pause for sample in self._samples for pause in sample.pauses)
        show = functools.partial(self._measure_and_show, count, count.done - first.done, run_context.ends_epoch)
        run_context.when_ready((secs, pauses, run_values.results or ()), show)

    def end(self, session: Session) -> None:
        if not self.writes or (self._per_epoch and session.epoch_items is None):
            return
        count, shown = self._count(session), self._shown
        if shown is not None and not self._per_epoch:
            count = count._replace(total=shown.total)  # the data, whose lengths told it, are no longer iterated
        if shown is None or (shown.done, shown.epoch) != (count.done, count.epoch):
            self._show(count, self._last_values(session), self._per_epoch)
        elif self._bar is not None:
            self._bar.refresh()

    def teardown(self) -> None:
        for handler in self._filtered:
            handler.removeFilter(self._clear_bar)
        self._filtered = []
        self._close_bar()

    def trigger(self) -> None:
        """Do nothing: ``run_context.ends_epoch`` tells the end of an epoch, and the timer goes by the clock alone."""

    def next_due(self) -> Due:
        if not self.writes:
            return NEVER
        # The rate of an epoch is measured from its first run on.
        due: Due = NOW if self._epoch_ended else self._timer.next_due()
        return due._replace(epochs=1) if self._per_epoch else due

    def _add_pause(self, pause: Elapsed) -> None:
        if self._samples:
            self._samples[-1].pauses.append(pause)

    def _count(self, session: Session) -> _Count:
        if not self._per_epoch:
            return _Count(session.global_step, session.expected_last_step if self._total is None else self._total)
        if session.epoch_items is None:
            raise LifecycleError(f"{self!r}: there is no epoch: iterate with loop.until_stop(data), or leave out per")
        return _Count(*session.epoch_items, session.epoch)

    def _last_values(self, session: Session) -> Any:
        """Return the values that are available at the end of the loop; none if there was no run."""
        values: dict[str, Any] = {}
        for tag, fetch in self._tensors.items() if self._shown is not None else ():
            if not watched_names(fetch):
                with contextlib.suppress(NoRunYetError):  # an argument of the step
                    values[tag] = session.run(fetch, who=self)
        return to_host(values)

    def _measure_and_show(self, count: _Count, done: int, is_last: bool, times: _Times) -> None:
        """Show ``count``, which is ``done`` more than the first sample."""
        duration, pauses, values = times
        secs = duration - sum(pauses)
        self._rate = done / secs if done > 0 and secs > 0 else None
        self._show(count, dict(zip(self._tensors, values, strict=True)), is_last)

    def _show(self, count: _Count, values: Mapping[str, Any], is_last: bool) -> None:
        """Show ``count``, and close the bar if ``is_last``: the next bar is for another epoch."""
        self._shown = count
        texts = {tag: map_leaves(printable, value) for tag, value in values.items()}
        if not self._shows_bar:
            self._log(count, texts)
            return
        if self._bar is not None and count.epoch != self._bar_epoch:
            self._close_bar()
        if self._bar is None:
            self._open_bar(count)
        self._bar.n, self._bar.total, self._bar.measured_rate = count.done, count.total, self._rate
        if texts:
            parts = [f"{tag}={_brief(value)}" for tag, value in texts.items()]
            self._bar.set_postfix_str(", ".join(parts), refresh=False)
        self._bar.refresh()
        if is_last:
            self._close_bar()

    def _open_bar(self, count: _Count) -> None:
        of_epoch = {} if count.epoch is None else {"desc": f"epoch {count.epoch}"}
        unit = "step" if count.epoch is None else "batch"
        self._bar_epoch = count.epoch
        self._bar = self._bar_class(total=count.total, initial=count.done, unit=unit, file=self._stream, **of_epoch)

    def _close_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def _log(self, count: _Count, texts: dict[str, Any]) -> None:
        done, total, epoch = count
        unit, what = ("steps", "step") if epoch is None else ("batches", f"epoch {epoch}, batch")
        parts = [] if self._rate is None else [f"{self._rate:.3g} {unit}/sec"]
        if self._rate is not None and total is not None and done < total:
            parts.append(f"{datetime.timedelta(seconds=round((total - done) / self._rate))} left")
        parts += [f"{tag} = {_brief(value)}" for tag, value in texts.items()]
        line = f"{what} {done}" if total is None else f"{what} {done}/{total}"
        logger.info("%s", f"{line}: {', '.join(parts)}" if parts else line)

    def _clear_bar(self, record: logging.LogRecord) -> bool:
        """Remove the bar from the terminal before a handler writes ``record`` there."""
        bar = self._bar
        if bar is not None:
            bar.clear()
        return True


@functools.cache
def _bar_class() -> Any:
    """Return tqdm's bar for this terminal or notebook, with a rate that is set from outside."""
    try:
        with warnings.catch_warnings():  # without ipywidgets, lines are logged, which needs no warning
            warnings.filterwarnings("ignore", "IProgress not found")
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
    loggers = [logging.root, fallback, *logging.Logger.manager.loggerDict.values()]
    handlers = {handler for each in loggers for handler in getattr(each, "handlers", ())}
    return [each for each in handlers if isinstance(each, logging.StreamHandler) and _is_terminal(each.stream)]


def _brief(value: Any) -> str:
    """Return a number, or rates, with four digits, or the text of any other value."""
    if isinstance(value, float | np.floating | GroupRates):
        return f"{value:.4g}"
    return str(value)
