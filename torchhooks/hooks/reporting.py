"""Hooks that report values: in log lines while the loop runs, and once at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np

from torchhooks.common.log import logger
from torchhooks.common.text import by_tag, kind_of, printable, shown, tag_of, tagged_line
from torchhooks.common.timers import GivenTimer, NeverTriggerTimer, check_one_period, given_timer
from torchhooks.common.trees import map_leaves
from torchhooks.device.readback import to_host
from torchhooks.fetches.evaluation import watched_names
from torchhooks.fetches.names import Fetch, Value, check_feed_names, reads_gradients
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.evaluating import evaluating
from torchhooks.lifecycle.hook import (
    PeriodicHook,
    SessionRunContext,
    SessionRunHook,
    StandardHook,
)
from torchhooks.lifecycle.session import Session
from torchhooks.summary import operations as summary
from torchhooks.summary.writers import WriterTarget

_MOST_PRINTED = 100  # elements of a final value: a matrix of thousands would fill the screen


class LoggingTensorHook(PeriodicHook):
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

    With several ranks, every rank evaluates the fetches in the same runs, and the chief logs its own values, or those
    of all ranks: ``over_ranks("loss", "mean")``.

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

    triggers_at_once = True

    def __init__(
        self,
        tensors: Fetch,
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Value]], str] | None = None,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
    ) -> None:
        periods = {"every_n_steps": every_n_steps, "every_n_epochs": every_n_epochs}
        check_one_period(timer, every_n_iter=every_n_iter, every_n_secs=every_n_secs, **periods)
        timer = given_timer(timer, **periods)
        if every_n_iter is not None or every_n_secs is not None or timer is not None:
            self.set_timer(timer, every_n_iter=every_n_iter, every_n_secs=every_n_secs)
        elif at_end:
            self.set_timer(NeverTriggerTimer())
        else:
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
        self._at_end = self.works_at_end = at_end
        self._formatter = formatter
        self.fetches = tuple(self._tensors.values())
        self.counts_runs = timer is None
        self.needs_step = not self.counts_runs

    def run_due(self, run_context: SessionRunContext, values: tuple[Value, ...]) -> None:
        if self.writes:
            warn_of_missing_gradients(run_context.session, self._tensors, values)
            # The seconds are read now. On a GPU the line is logged some runs later, perhaps after the next trigger.
            run_context.when_ready(values, partial(self._log, self._tensors, self.elapsed_secs))

    def end(self, session: Session) -> None:
        if self._at_end and not session.was_finished:
            values = session.run_available(self._tensors, who=self)
            # Before elapsed_secs is read, which fire() sets: outside of a run, the loop does not call it.
            self.trigger.fire(session.global_step)
            if values and self.writes:
                self._log(values, self.elapsed_secs, to_host(tuple(values.values())))

    def _log(self, tags: Iterable[str], elapsed_secs: float | None, values: tuple[Value, ...]) -> None:
        texts = {tag: map_leaves(printable, value) for tag, value in zip(tags, values, strict=True)}
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
    """Evaluates a fetch once, at a clean end of the loop (``tf.train.FinalOpsHook``), and logs the values.

    >>> def error(model, inputs):
    ...     return (model(inputs) - inputs.sum(dim=1, keepdim=True)).abs().mean()
    >>> final = FinalOpsHook({"error": error, "step": "global_step"}, {"inputs": torch.randn(100, 4)})
    >>> with MonitoredLoop(step, model, optimizer, hooks=[final]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    final ops at step 8: error = ..., step = 8
    >>> final.final_ops_values
    {'error': tensor(...), 'step': 8}

    With several ranks, every rank evaluates, and the chief logs and writes its own values. A fetch that only a run can
    give a value is left out, with a warning, if the loop made no run. After a training run that was finished before,
    the values are there again, and nothing is logged or written twice.

    Args:
        final_ops: any fetch, for instance a closure that computes the test accuracy.
        final_ops_feed_dict: values for parameters of closures, by name.
        output_dir, summary_writer: where to write a last point of each value that is one number, under its name; see
            :doc:`Write curves </built-in-hooks>`. A curve of the same name needs another folder.

    Raises:
        TypeError: ``final_ops_feed_dict`` is not a mapping, or one of its keys is not a str.
        ValueError: a value in ``final_ops`` is available only while a step runs; or both ``output_dir`` and
            ``summary_writer`` are given.

    Unlike TensorFlow, the hook logs the values, and evaluates like an :class:`EvaluationHook`: with the model in
    evaluation mode and without gradients. Afterwards the random states, the mode of each module and the gradients are
    what they were. If a signal stopped the loop, nothing is evaluated, because the training run will be resumed.
    """

    def __init__(
        self,
        final_ops: Fetch,
        final_ops_feed_dict: Mapping[str, Value] | None = None,
        *,
        output_dir: object = None,
        summary_writer: object = None,
    ) -> None:
        self._final_ops = final_ops
        self._feed_dict = final_ops_feed_dict
        self._target = WriterTarget(output_dir, summary_writer)
        self.final_ops_values: Value = None
        """The values, in the structure of ``final_ops``; ``None`` before the end."""
        if final_ops_feed_dict is not None and not isinstance(final_ops_feed_dict, Mapping):
            raise TypeError(
                f"final_ops_feed_dict={shown(final_ops_feed_dict)}: give a mapping from parameter name to value"
            )
        check_feed_names(final_ops_feed_dict or {}, type(self).__name__)
        check_available_at_end(self, final_ops)

    @property
    def fetches_to_come(self) -> Fetch:
        # These names are checked after the first run. A name that only the feed_dict has would be reported as unknown.
        return None if self._feed_dict else self._final_ops

    def begin(self) -> None:
        # A hook may serve several loops. After a loop that fails, there must be no values of the loop before.
        self.final_ops_values = None
        if self.writes:
            self._target.open()

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._target.session_created(session)

    def end(self, session: Session) -> None:
        if self._final_ops is None or session.stopped_by_signal:
            return
        # Also on ranks that do not write: the fetches may contain collectives.
        with session.paused(), evaluating(session):
            self.final_ops_values = session.run_available(self._final_ops, self._feed_dict, who=self)
        if self.writes and not session.was_finished:
            self._report(_tagged(self._final_ops, to_host(self.final_ops_values)), session.global_step)

    def teardown(self) -> None:
        self._target.close()

    def _report(self, values: Mapping[str, Value], step: int) -> None:
        texts = {tag: map_leaves(_short, value) for tag, value in values.items() if value is not None}
        if texts:
            logger.info("final ops at step %d: %s", step, tagged_line(texts))
        if self._target.writers:
            points = [point for tag, value in values.items() if (point := _point(tag, value)) is not None]
            summary.write_summaries(self._target.writers, points, step)


def _tagged(fetches: Fetch, values: Value) -> dict[str, Value]:
    """Return ``values`` by the tags under which they are logged. What has no value is left out."""
    if isinstance(values, Mapping):
        return {str(tag): value for tag, value in values.items()}
    if isinstance(fetches, list | tuple):
        return {tag_of(fetch): value for fetch, value in zip(fetches, values, strict=True)}
    return {tag_of(fetches): values}


def _short(value: Value) -> Value:
    printed = printable(value)
    return kind_of(value) if getattr(printed, "size", 1) > _MOST_PRINTED else printed


def _point(tag: str, value: Value) -> summary.Summary | None:
    """Return the last point of a curve; ``None`` if ``value`` is not one number."""
    try:
        point: summary.Summary = summary.scalar(tag, tag).compose(value)
    except (TypeError, ValueError):
        return None
    return point


def warn_of_missing_gradients(session: Session, fetches: Mapping[str, Fetch], values: Iterable[Value]) -> None:
    """Log a warning, once a loop, if one of ``values``, those of ``fetches``, is ``None`` instead of a gradient."""
    for tag, value in zip(fetches, values, strict=True):
        if value is None and "gradients" not in session.warned and reads_gradients(fetches[tag]):
            session.warned.add("gradients")
            logger.warning(
                "%s is None: fetches are evaluated after the step, which has left no gradient there. If it ends with "
                "optimizer.zero_grad(), call that at its beginning instead, or return what to log from the step",
                tag,
            )


def check_available_at_end(hook: SessionRunHook, fetches: Fetch) -> None:
    """Raise a ValueError for what only a step can provide, at creation rather than at the end of a long run."""
    for name in watched_names(fetches):
        raise ValueError(
            f"{hook!r}: {name!r} is available only while a step runs, not at the end; return it from the step instead, "
            "under a name that does not end in :output, :input or :grad"
        )
