"""A hook that shows how far the loop is."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from torchhooks.common.checks import period, whole_number
from torchhooks.common.errors import LifecycleError, NoRunYetError
from torchhooks.common.log import fallback, logger
from torchhooks.common.text import by_tag, printable, shown
from torchhooks.common.timers import NEVER, NOW, Due, SecondOrStepTimer
from torchhooks.common.trees import GroupRates, map_leaves
from torchhooks.device.readback import to_host
from torchhooks.fetches.evaluation import watched_names
from torchhooks.fetches.names import Fetch, Value
from torchhooks.hooks.reporting import check_available_at_end, warn_of_missing_gradients
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import SessionRunArgs, SessionRunContext, SessionRunValues, StandardHook
from torchhooks.lifecycle.session import Session

_REFRESH_SECS = 0.1


class _Count(NamedTuple):
    """How far the loop is: in steps, or with ``per="epoch"`` in items of the epoch."""

    done: int
    total: int | None
    epoch: int | None = None


class ProgressBarHook(StandardHook):
    """Shows a progress bar, with the rate, the remaining time and chosen values. Needs tqdm.

    In a terminal, ``ProgressBarHook(1000, ["loss"])`` shows
    ``40%|####      | 400/1000 [00:08<00:12, 48.9step/s, loss=0.125]``, which is refreshed at most ten times a second.
    In a notebook the bar is a widget. Where there is neither, as in a batch job, the hook logs the same without the bar
    every 30 seconds. Here, the output is a file:

    >>> import io
    >>> values = {"mean loss": running_mean("loss", reset="epoch")}
    >>> hook = ProgressBarHook(values=values, per="epoch", file=io.StringIO())
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     for epoch in loop.until_stop(range(2)):
    ...         for inputs in loop.until_stop(batches):
    ...             loss = loop.run(inputs)
    epoch 0:  12% 1/8 [..., mean loss=...]
    epoch 0: 100% 8/8 [..., mean loss=...]
    epoch 1: 100% 8/8 [..., mean loss=...]

    :doc:`Progress bar </built-in-hooks>` says what else is shown, and where.

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
        values: Fetch = (),
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

    @property
    def fetches_to_come(self) -> Fetch:
        return self._tensors

    def begin(self) -> None:
        self._stream = sys.stderr if self._file is None else self._file
        self._draws = self.writes and (_is_terminal(self._stream) or _is_notebook(self._bar_class))
        self._timer = SecondOrStepTimer(every_secs=_REFRESH_SECS if self._draws else self._log_every_secs)
        self._shown: _Count | None = None

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._begins = True  # the next run is the first of the loop, of an epoch, or after a recovery
        self._begun = time.time(), session.global_step
        # Not again after a recovery, when the handlers have the filter already.
        if self._draws and not self._filtered:
            self._filtered = _terminal_handlers()
            for handler in self._filtered:
                # A filter of a handler is called right before that handler writes, in the thread that logs. So the bar
                # is removed only for lines that reach the terminal.
                handler.addFilter(self._clear_bar)
        if self._bar is None and not self._per_epoch:
            self._open_bar(_Count(session.global_step, self._total), self._begun)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        step = run_context.session.global_step + 1
        self._due = run_context.ends_epoch or self._timer.should_trigger_for_step(step)
        if self._due and not run_context.ends_epoch:
            # The period begins before the step, so that each step that takes longer than a period is shown.
            self._timer.update_last_triggered_step(step)
        return self._request if self._due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        count = self._count(run_context.session)
        if self._begins:
            self._begun = time.time(), count.done
        self._begins = run_context.ends_epoch
        if self._due:
            if run_values.results is not None:
                warn_of_missing_gradients(run_context.session, self._tensors, run_values.results)
            show = functools.partial(self._show_run, count, self._begun, run_context.ends_epoch)
            run_context.when_ready(run_values.results or (), show)

    def end(self, session: Session) -> None:
        last = self._shown
        if last is None:
            return  # no run was made
        count = self._count(session)
        if not self._per_epoch:
            count = count._replace(total=last.total)  # the data, whose lengths told it, are no longer iterated
        if (count.done, count.epoch) != (last.done, last.epoch):
            self._show(count, self._begun, self._last_values(session))

    def teardown(self) -> None:
        for handler in self._filtered:
            handler.removeFilter(self._clear_bar)
        self._filtered = []
        self._close_bar()

    def next_due(self) -> Due:
        if not self.writes:
            return NEVER
        # The rate of an epoch is measured from its first run on.
        due: Due = NOW if self._begins else self._timer.next_due()
        return due._replace(epochs=1) if self._per_epoch else due

    def _count(self, session: Session) -> _Count:
        if not self._per_epoch:
            return _Count(session.global_step, session.expected_last_step if self._total is None else self._total)
        if session.epoch_items is None:
            raise LifecycleError(f"{self!r}: there is no epoch: iterate with loop.until_stop(data), or leave out per")
        return _Count(*session.epoch_items, session.epoch)

    def _last_values(self, session: Session) -> Mapping[str, Value]:
        """Return the values that are available at the end of the loop."""
        values: dict[str, Value] = {}
        for tag, fetch in self._tensors.items():
            if not watched_names(fetch):
                with contextlib.suppress(NoRunYetError):  # an argument of the step
                    values[tag] = session.run(fetch, who=self)
        on_host: Mapping[str, Value] = to_host(values)
        return on_host

    def _show_run(self, count: _Count, begun: tuple[float, int], ends_epoch: bool, values: tuple[Value, ...]) -> None:
        self._show(count, begun, dict(zip(self._tensors, values, strict=True)))
        if ends_epoch:
            self._close_bar()

    def _show(self, count: _Count, begun: tuple[float, int], values: Mapping[str, Value]) -> None:
        """Draw the bar, or log it. If there is none yet for the epoch, it began at the time and the item ``begun``."""
        if self._shown is not None and self._shown.epoch != count.epoch:
            self._close_bar()  # the epoch was left without its end, by a recovery
        self._shown = count
        if self._bar is None:
            self._open_bar(count, begun)
        texts = [f"{tag}={_brief(map_leaves(printable, value))}" for tag, value in values.items()]
        self._bar.set_postfix_str(", ".join(texts), refresh=False)
        self._bar.total = count.total
        self._bar.update(count.done - self._bar.n)
        if not self._draws:
            logger.info("%s", str(self._bar).strip())

    def _open_bar(self, count: _Count, begun: tuple[float, int]) -> None:
        options: dict[str, Any] = {"unit": "step"}
        if count.epoch is not None:
            options = {"unit": "batch", "desc": f"epoch {count.epoch}"}
        if self._draws:
            options["file"] = self._stream
        else:
            # disable=False, because TQDM_DISABLE in the environment turns bars off, and not the lines of the log.
            options |= {"file": io.StringIO(), "ncols": 0, "disable": False}  # ncols=0: only the numbers
        started, initial = begun
        # Each update is drawn, because the hook's timer has chosen it.
        self._bar = self._bar_class(total=count.total, initial=initial, mininterval=0, miniters=0, **options)
        # tqdm takes the time at which a bar is created for its start. The bar of an epoch is created when its first
        # values are on the host, which may be some runs later.
        self._bar.start_t = self._bar.last_print_t = started

    def _close_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def _clear_bar(self, record: logging.LogRecord) -> bool:
        """Remove the bar from the terminal, where a handler writes ``record``. The next refresh draws it again."""
        bar = self._bar
        if bar is not None:
            bar.clear()
        return True


@functools.cache
def _bar_class() -> Any:
    """Return tqdm's bar for this terminal or notebook."""
    try:
        with warnings.catch_warnings():  # without ipywidgets, lines are logged, which needs no warning
            warnings.filterwarnings("ignore", "IProgress not found")
            base = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        way_out = "pip install 'torchhooks[progress]', or remove the hook"
        raise ImportError(f"ProgressBarHook needs tqdm, which cannot be imported: {way_out}") from error
    # Without an interval, tqdm starts no thread that refreshes bars.
    return type("ProgressBar", (base,), {"monitor_interval": 0})


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream at all, as in pythonw, or a closed one
        return False


def _is_notebook(bar_class: type) -> bool:
    return any(base.__name__ == "tqdm_notebook" for base in bar_class.__mro__)


def _terminal_handlers() -> list[logging.Handler]:
    loggers = [logging.root, fallback, *logging.Logger.manager.loggerDict.values()]
    handlers = {handler for each in loggers for handler in getattr(each, "handlers", ())}
    return [each for each in handlers if isinstance(each, logging.StreamHandler) and _is_terminal(each.stream)]


def _brief(value: object) -> str:
    """Return a number, or rates, with four digits, or the text of any other value."""
    if isinstance(value, float | np.floating | GroupRates):
        return f"{value:.4g}"
    return str(value)
