"""Hooks that report values: in log lines while the loop runs, and once at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from torchhooks.common.log import logger
from torchhooks.common.text import shown
from torchhooks.common.timers import Due, GivenTimer, NeverTriggerTimer, Timer, differs_by_rank, given_timer, hook_timer
from torchhooks.common.trees import map_leaves
from torchhooks.device.readback import to_host
from torchhooks.fetches.fetch import check_feed_names, watched_names
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.evaluating import IfDue
from torchhooks.lifecycle.hook import (
    ReportingHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StandardHook,
)
from torchhooks.lifecycle.session import Session
from torchhooks.summary.lines import by_tag, printable, tagged_line


class LoggingTensorHook(ReportingHook):
    """Logs values periodically (``tf.train.LoggingTensorHook``): ``loss = 0.1, step = 7 (2.500 sec)``.

    >>> hooks = [LoggingTensorHook({"loss": "loss", "step": "global_step"}, every_n_iter=4)]
    >>> with MonitoredLoop(step, model, optimizer, hooks=hooks) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    loss = ..., step = 1
    loss = ..., step = 5 (... sec)

    The hook counts runs, not global steps: ``every_n_iter=4`` logs the 1st, 5th and 9th run. A ``timer`` gets global
    steps: ``timer=EverySteps(4)`` logs at steps 4, 8 and 12. From the second line on, the seconds are those since the
    previous line. On a GPU, the host does not wait for the values, and a line is logged a few runs later.

    The method of a format string can be the ``formatter``:

    >>> line = "step {step}: loss {loss:.2f}"
    >>> hooks = [LoggingTensorHook({"loss": "loss", "step": "global_step"}, at_end=True, formatter=line.format_map)]
    >>> with MonitoredLoop(step, model, optimizer, hooks=hooks) as loop:
    ...     loss = loop.run(batches[0])
    step 1: loss ...

    With several ranks, every rank evaluates the fetches in the same runs, and the chief logs. ``over_ranks("loss",
    "mean")`` logs the mean of all ranks instead of the chief's value.

    Args:
        tensors: a dict from tag to fetch, or a list of fetches, which are logged under their names. They are logged in
            the given order. As in TensorFlow, a dict is sorted by tag with ``every_n_iter``, ``every_n_secs`` or
            ``at_end`` alone.
        every_n_iter, every_n_secs, every_n_steps, every_n_epochs, timer: when to log; give at most one, see
            :doc:`Choose a period </built-in-hooks>`.
        at_end: whether to log at a clean end of the loop, in addition to a period or without one.
        formatter: a function that returns the whole line, given a dict from tag to value, with NumPy scalars and
            arrays in place of tensors.

    Raises:
        ValueError: neither a period nor ``at_end`` is given, or two periods are, or a period is not valid; there is
            nothing to log, or two fetches in a list have the same name; or a value is available only while a step runs,
            with ``at_end``.
        TypeError: ``tensors`` is neither a dict nor a list, or ``formatter`` is not callable.
        FetchError: from the run, a fetch has no value.
    """

    def __init__(
        self,
        tensors: Any,
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
    ) -> None:
        timer = given_timer(timer, every_n_steps=every_n_steps, every_n_epochs=every_n_epochs)
        self._timer: Timer = NeverTriggerTimer()
        if every_n_iter is not None or every_n_secs is not None or timer is not None:
            self._timer = hook_timer(self, timer, every_n_iter=every_n_iter, every_n_secs=every_n_secs)
        elif not at_end:
            raise ValueError(
                "LoggingTensorHook never logs: give every_n_iter, every_n_steps, every_n_secs, every_n_epochs, timer "
                "or at_end=True"
            )
        if formatter is not None and not callable(formatter):
            raise TypeError(
                f"formatter={shown(formatter)}: must be a function that turns a dict of values by tag into text"
            )
        self._tensors = by_tag(tensors, in_order=timer is not None)
        if at_end:
            check_available_at_end(self, self._tensors)
        self.collective = every_n_secs is not None or differs_by_rank(timer)
        self._at_end = at_end
        self._formatter = formatter
        fetches = tuple(self._tensors.values())
        # With every_n_iter or every_n_secs, the hook has TensorFlow's rule, which decides before the step.
        self._if_due = None if timer is None else IfDue(fetches, self._timer)
        self._request = SessionRunArgs(fetches if self._if_due is None else self._if_due)

    def begin(self) -> None:
        self._timer.reset()
        self._iterations = 0
        self._due = False

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._timer.start_at(session.global_step)
        if self._if_due is not None:
            self._if_due.session = session

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        step = self._iterations if self._if_due is None else run_context.session.global_step + 1
        self._due = self._timer.should_trigger_for_step(step)
        return self._request if self._due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._due and (self._if_due is None or self._if_due.evaluated):
            elapsed_secs, _ = self._timer.update_last_triggered_step(self._step(run_context.session))
            if self.writes:
                run_context.when_ready(
                    run_values.results,
                    lambda values: self._log(dict(zip(self._tensors, values, strict=True)), elapsed_secs),
                )
        self._iterations += 1

    def end(self, session: Session) -> None:
        if self._at_end:
            values = session.run_available(self._tensors, who=self)
            elapsed_secs, _ = self._timer.update_last_triggered_step(self._step(session))
            if values and self.writes:
                self._log(to_host(values), elapsed_secs)

    def next_due(self) -> Due:
        due = self._timer.next_due()
        if due.step is None or self._if_due is not None:
            return due
        # The steps of the hook's own period are runs.
        return Due(runs=max(due.step - self._iterations, 0) + 1)

    def sat_out(self, runs: int) -> None:
        self._iterations += runs

    def _step(self, session: Session) -> int:
        """Return what the timer counts: runs, or global steps if the timer was given."""
        return self._iterations if self._if_due is None else session.global_step

    def _log(self, values: Mapping[str, Any], elapsed_secs: float | None) -> None:
        texts = {tag: map_leaves(printable, value) for tag, value in values.items()}
        if self._formatter is None:
            line = tagged_line(texts)
            line += "" if elapsed_secs is None else f" ({elapsed_secs:.3f} sec)"
        elif all([isinstance(text, (np.generic, float, int, str)) for text in texts.values()]):  # noqa: C419 - faster
            line = self._formatter(texts)
        else:
            with np.printoptions(suppress=True):  # TensorFlow's hook prints arrays without exponents
                line = self._formatter(texts)
        logger.info("%s", line)


class FinalOpsHook(StandardHook):
    """Evaluates a fetch once, at a clean end of the loop (``tf.train.FinalOpsHook``), on every rank.

    >>> def error(model, inputs):
    ...     return (model(inputs) - inputs.sum(dim=1, keepdim=True)).abs().mean()
    >>> final = FinalOpsHook({"error": error, "step": "global_step"}, {"inputs": torch.randn(100, 4)})
    >>> with MonitoredLoop(step, model, optimizer, hooks=[final]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    >>> final.final_ops_values
    {'error': tensor(...), 'step': 8}

    The model is in the mode in which the loop left it: a function that needs ``model.eval()`` calls it. A fetch that
    only a run can give a value is left out, with a warning, if the loop made no run.

    Args:
        final_ops: any fetch, for instance a closure that computes the test accuracy.
        final_ops_feed_dict: values for parameters of closures, by name.

    Raises:
        TypeError: ``final_ops_feed_dict`` is not a mapping, or one of its keys is not a str.
        ValueError: a value in ``final_ops`` is available only while a step runs.
    """

    def __init__(self, final_ops: Any, final_ops_feed_dict: Mapping[str, Any] | None = None) -> None:
        self._final_ops = final_ops
        self._feed_dict = final_ops_feed_dict
        self.final_ops_values: Any = None
        """The values, in the structure of ``final_ops``; ``None`` before the end."""
        if final_ops_feed_dict is not None and not isinstance(final_ops_feed_dict, Mapping):
            raise TypeError(
                f"final_ops_feed_dict={shown(final_ops_feed_dict)}: give a mapping from parameter name to value"
            )
        check_feed_names(final_ops_feed_dict or {}, type(self).__name__)
        check_available_at_end(self, final_ops)

    def begin(self) -> None:
        self.final_ops_values = None

    def end(self, session: Session) -> None:
        if self._final_ops is not None:
            self.final_ops_values = session.run_available(self._final_ops, self._feed_dict, who=self)


def check_available_at_end(hook: SessionRunHook, fetches: Any) -> None:
    """Raise a ValueError for what only a step can provide, at creation rather than at the end of a long run."""
    for name in watched_names(fetches):
        raise ValueError(
            f"{hook!r}: {name!r} is available only while a step runs, not at the end; return it from the step instead, "
            "under a name that does not end in :output, :input or :grad"
        )
