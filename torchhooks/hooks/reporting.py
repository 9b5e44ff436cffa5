"""Hooks that tell: log lines, curves, steps per second, what came out at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torchhooks.fetch import map_leaves
from torchhooks.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues, call_repr
from torchhooks.log import logger
from torchhooks.readback import to_host
from torchhooks.session import Session
from torchhooks.timer import Due, NeverTriggerTimer, SecondOrStepTimer, count
from torchhooks.writers import WriterTarget

_RATE = "global_step/sec"


class StepCounterHook(SessionRunHook):
    """Reports steps per second (``tf.train.StepCounterHook``): a log line, and a curve ``global_step/sec``.

    The first run starts the clock; a report comes each time a full period has passed since the last, so
    ``every_n_steps=10`` reports at 11, 21, 31. A period in which the step went back gets no report, and when one passed
    without any step, a warning says so once.

    Args:
        every_n_steps: steps from one report to the next.
        every_n_secs: seconds from one report to the next; pass ``every_n_steps=None`` with it.
        output_dir: the folder of the event file, or
        summary_writer: the writer. With neither, there is the log line only.

    Raises:
        ValueError: not exactly one period was given, or two places to write to.
    """

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        output_dir: Any = None,
        summary_writer: Any = None,
    ) -> None:
        self._arguments = {
            "every_n_steps": every_n_steps,
            "every_n_secs": every_n_secs,
            "output_dir": output_dir,
            "summary_writer": summary_writer,
        }
        if (every_n_steps is None) == (every_n_secs is None):
            raise ValueError(
                f"every_n_steps={every_n_steps!r}, every_n_secs={every_n_secs!r}: give StepCounterHook one of "
                "them, and None for the other"
            )
        self._every_n_steps = every_n_steps
        self._timer = SecondOrStepTimer(every_steps=every_n_steps, every_secs=every_n_secs)
        self._target = WriterTarget(output_dir, summary_writer)
        self.begin_counting()

    def begin_counting(self) -> None:
        """Forget what was counted in an earlier loop."""
        self._timer.reset()
        self._runs = 0
        self._checked_at = (0, -1)
        self._warned = False

    def begin(self) -> None:
        self.begin_counting()
        self._target.open()

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = run_context.session.global_step
        self._runs += 1
        if self._timer.should_trigger_for_step(step):
            self._report(*self._timer.update_last_triggered_step(step), step)
            self._checked_at = self._runs, step
        elif self._period_is_over():
            self._warn_if_no_step_was_made(step)
            self._checked_at = self._runs, step

    def teardown(self) -> None:
        self._target.close()

    def next_due(self) -> Due:
        due = self._timer.next_due()
        if self._every_n_steps is None or self._runs == 0:
            return due
        return due._replace(runs=self._checked_at[0] + self._every_n_steps - self._runs)

    def sat_out(self, runs: int) -> None:
        self._runs += runs

    def _report(self, elapsed_secs: float | None, elapsed_steps: int | None, step: int) -> None:
        if elapsed_secs is None or elapsed_steps is None or elapsed_steps < 0:
            return
        rate = elapsed_steps / elapsed_secs if elapsed_secs > 0 else math.inf
        logger.info("%s: %g", _RATE, rate)
        if self._target.writer is not None:
            self._target.writer.add_scalar(_RATE, rate, step)

    def _period_is_over(self) -> bool:
        if self._every_n_steps is not None:
            return self._runs >= self._checked_at[0] + self._every_n_steps
        moment = self._timer.next_due().moment
        return moment is not None and time.monotonic() >= moment

    def _warn_if_no_step_was_made(self, step: int) -> None:
        if step == self._checked_at[1] and not self._warned:
            self._warned = True
            logger.warning(
                "the global step has been %d for a whole period of %r: if the step calls no optimizer.step(), count in "
                'MonitoredLoop(..., step_unit="run")',
                step,
                self,
            )

    def __repr__(self) -> str:
        return call_repr(self, **self._arguments)


class LoggingTensorHook(SessionRunHook):
    """Logs values every so often (``tf.train.LoggingTensorHook``): ``loss = 0.1, step = 7 (2.500 sec)``.

    It counts its own runs, whatever the global step: ``every_n_iter=4`` logs the 1st, the 5th, the 9th. The seconds,
    from the second line on, are those since the line before.

    Args:
        tensors: a dict, tag to fetch, logged sorted by tag; or a list of fetches, logged in its order under their
            names.
        every_n_iter: runs from one line to the next, or
        every_n_secs: seconds from one line to the next.
        at_end: whether to log at the end as well, or, without a period, only then.
        formatter: makes the whole line of a dict, tag to printable value.

    Raises:
        ValueError: no period and not ``at_end``, two periods, or one that cannot be.
    """

    def __init__(
        self,
        tensors: Any,
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        self._arguments = {
            "every_n_iter": every_n_iter,
            "every_n_secs": every_n_secs,
            "at_end": at_end,
            "formatter": formatter,
        }
        self._given = tensors
        if every_n_iter is not None and every_n_secs is not None:
            raise ValueError(f"every_n_iter={every_n_iter!r}, every_n_secs={every_n_secs!r}: give one, not both")
        if every_n_iter is None and every_n_secs is None and not at_end:
            raise ValueError("LoggingTensorHook never logs: give every_n_iter, every_n_secs or at_end=True")
        if every_n_iter is not None:
            count(every_n_iter, "every_n_iter")
        self._timer: SecondOrStepTimer | NeverTriggerTimer = NeverTriggerTimer()
        if every_n_iter is not None or every_n_secs is not None:
            self._timer = SecondOrStepTimer(every_secs=every_n_secs, every_steps=every_n_iter)
        self._tensors = _by_tag(tensors)
        self._at_end = at_end
        self._formatter = formatter
        self._request = SessionRunArgs(self._tensors)

    def begin(self) -> None:
        self._timer.reset()
        self._iterations = 0
        self._due = False

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self._due = self._timer.should_trigger_for_step(self._iterations)
        return self._request if self._due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._due:
            elapsed_secs, _ = self._timer.update_last_triggered_step(self._iterations)
            run_context.when_ready(run_values.results, lambda values: self._log(values, elapsed_secs))
        self._iterations += 1

    def end(self, session: Session) -> None:
        if self._at_end:
            values = session.run_available(self._tensors, who=self)
            elapsed_secs, _ = self._timer.update_last_triggered_step(self._iterations)
            if values:
                self._log(to_host(values), elapsed_secs)

    def next_due(self) -> Due:
        due = self._timer.next_due()
        if due.step is None:
            return due
        return Due(runs=max(due.step - self._iterations, 0) + 1)

    def sat_out(self, runs: int) -> None:
        self._iterations += runs

    def _log(self, values: Mapping[str, Any], elapsed_secs: float | None) -> None:
        printable = {tag: map_leaves(_printable, value) for tag, value in values.items()}
        with np.printoptions(suppress=True):
            if self._formatter is not None:
                line = self._formatter(printable)
            else:
                line = ", ".join(f"{tag} = {value!s}" for tag, value in printable.items())
                line += "" if elapsed_secs is None else f" ({elapsed_secs:.3f} sec)"
        logger.info("%s", line)

    def __repr__(self) -> str:
        return call_repr(self, self._given, **self._arguments)


class FinalOpsHook(SessionRunHook):
    """Evaluates something once, when training has ended well (``tf.train.FinalOpsHook``).

    Args:
        final_ops: any fetch: a closure that computes the test accuracy, say.
        final_ops_feed_dict: values for parameters of closures, by name.
    """

    def __init__(self, final_ops: Any, final_ops_feed_dict: Mapping[str, Any] | None = None) -> None:
        self._final_ops = final_ops
        self._feed_dict = final_ops_feed_dict
        self._values: Any = None

    @property
    def final_ops_values(self) -> Any:
        """The values, in the shape of ``final_ops``; ``None`` before the end."""
        return self._values

    def begin(self) -> None:
        self._values = None

    def end(self, session: Session) -> None:
        if self._final_ops is not None:
            self._values = session.run_available(self._final_ops, self._feed_dict, who=self)

    def __repr__(self) -> str:
        return call_repr(self, self._final_ops, final_ops_feed_dict=self._feed_dict)


def _by_tag(tensors: Any) -> dict[str, Any]:
    """Fetches by the tags under which they are logged, in the order of the line."""
    if isinstance(tensors, Mapping):
        return {tag: tensors[tag] for tag in sorted(tensors)}
    if isinstance(tensors, str) or not isinstance(tensors, (list, tuple)):
        raise TypeError(f"tensors={tensors!r}: give a dict, tag to fetch, or a list of fetches, such as ['loss']")
    tagged: dict[str, Any] = {}
    for fetch in tensors:
        tag = fetch if isinstance(fetch, str) else getattr(fetch, "__name__", type(fetch).__name__)
        if tag in tagged:
            raise ValueError(f"tensors={tensors!r}: two of them would be logged as {tag!r}; give a dict, tag to fetch")
        tagged[tag] = fetch
    return tagged


def _printable(value: Any) -> Any:
    """A tensor as numpy prints it; the precisions that numpy lacks as float32."""
    if not isinstance(value, torch.Tensor):
        return value
    try:
        array = value.resolve_conj().numpy()
    except TypeError:
        array = value.float().numpy()
    return array[()]
