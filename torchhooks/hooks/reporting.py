"""Hooks that tell: log lines, curves, steps per second, what came out at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torchhooks import summary
from torchhooks.coordinator import Coordinator
from torchhooks.fetch import map_leaves
from torchhooks.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues, call_repr
from torchhooks.log import logger
from torchhooks.readback import to_host
from torchhooks.session import Session
from torchhooks.timer import Due, NeverTriggerTimer, SecondOrStepTimer, count, seconds
from torchhooks.watch import watched_names
from torchhooks.writers import WriterTarget

_RATE = "global_step/sec"


class StepCounterHook(SessionRunHook):
    """Reports steps per second (``tf.train.StepCounterHook``): a log line, and a curve ``global_step/sec``.

    The first run starts the clock; a report comes each time a full period has passed since the last, so
    ``every_n_steps=10`` reports at 11, 21, 31. A period in which the step went back gets no report, and when one passed
    without any step, a warning says so once.

    Unlike TensorFlow, a loop that goes on from a later step than 0 has ``SessionLog.START`` written in its first run,
    from which TensorBoard knows that the curve beyond this step is void; if no SummarySaverHook does so there.

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
        self._timer = _timer(every_n_secs, every_n_steps=every_n_steps)
        self._target = WriterTarget(output_dir, summary_writer)

    def begin(self) -> None:
        self._timer.reset()
        self._runs = 0
        self._checked_at = (0, -1)
        self._warned = False
        if self._target.open() is not None:
            summary.check_writer(self._target.writer)

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._resumed = session.global_step > 0

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = run_context.session.global_step
        self._runs += 1
        if self._runs == 1 and self._resumed:
            self._start_session(step)
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

    def _start_session(self, step: int) -> None:
        if self._target.writer is not None and not self._target.session_started_by_another():
            summary.add_session_log(self._target.writer, "START", step)

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
        ValueError: no period and not ``at_end``, two periods, or one that cannot be; nothing to log, or two fetches of
            one name; or something that cannot be had at the end, with ``at_end``.
        TypeError: ``tensors`` is neither a dict nor a list, or ``formatter`` is no function.
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
        if formatter is not None and not callable(formatter):
            raise TypeError(f"formatter={formatter!r}: must be a function that makes a line of a dict, tag to value")
        self._timer: SecondOrStepTimer | NeverTriggerTimer = NeverTriggerTimer()
        if every_n_iter is not None or every_n_secs is not None:
            self._timer = _timer(every_n_secs, every_n_iter=every_n_iter)
        self._tensors = _by_tag(tensors)
        if at_end:
            _check_can_be_had_at_the_end(self, self._tensors)
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
                line = ", ".join(f"{tag} = {_text(value)}" for tag, value in printable.items())
                line += "" if elapsed_secs is None else f" ({elapsed_secs:.3f} sec)"
        logger.info("%s", line)

    def __repr__(self) -> str:
        return call_repr(self, self._given, **self._arguments)


class FinalOpsHook(SessionRunHook):
    """Evaluates something once, when training has ended well (``tf.train.FinalOpsHook``).

    Args:
        final_ops: any fetch: a closure that computes the test accuracy, say.
        final_ops_feed_dict: values for parameters of closures, by name.

    Raises:
        TypeError: ``final_ops_feed_dict`` is no mapping.
        ValueError: something in ``final_ops`` cannot be had at the end.
    """

    def __init__(self, final_ops: Any, final_ops_feed_dict: Mapping[str, Any] | None = None) -> None:
        self._final_ops = final_ops
        self._feed_dict = final_ops_feed_dict
        self._values: Any = None
        if final_ops_feed_dict is not None and not isinstance(final_ops_feed_dict, Mapping):
            raise TypeError(f"final_ops_feed_dict={final_ops_feed_dict!r}: give a mapping, parameter name to value")
        _check_can_be_had_at_the_end(self, final_ops)

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


def _timer(every_n_secs: float | None, **every_n: int | None) -> SecondOrStepTimer:
    """The timer of one of the two periods; an error about it names the argument as it was given."""
    ((name, steps),) = every_n.items()
    if steps is not None:
        return SecondOrStepTimer(every_steps=count(steps, name))
    assert every_n_secs is not None
    return SecondOrStepTimer(every_secs=seconds(every_n_secs, "every_n_secs"))


def _check_can_be_had_at_the_end(hook: SessionRunHook, fetches: Any) -> None:
    """Raise now, and not when the training is over."""
    for name in watched_names(fetches):
        raise ValueError(
            f"{hook!r}: {name!r} is seen only while a step is made, not at the end; let the step return its value"
        )


def _by_tag(tensors: Any) -> dict[str, Any]:
    """Fetches by the tags under which they are logged, in the order of the line."""
    if not isinstance(tensors, (Mapping, list, tuple)):
        raise TypeError(f"tensors={tensors!r}: give a dict, tag to fetch, or a list of fetches, such as ['loss']")
    if not tensors:
        raise ValueError(f"tensors={tensors!r}: there is nothing to log; give at least one fetch, such as ['loss']")
    if isinstance(tensors, Mapping):
        return {tag: tensors[tag] for tag in sorted(tensors)}
    tagged: dict[str, Any] = {}
    for fetch in tensors:
        tag = fetch if isinstance(fetch, str) else getattr(fetch, "__name__", type(fetch).__name__)
        if tag in tagged:
            raise ValueError(f"tensors={tensors!r}: two of them would be logged as {tag!r}; give a dict, tag to fetch")
        tagged[tag] = fetch
    return tagged


def _printable(value: Any) -> Any:
    """A tensor as numpy's number or array; the precisions that numpy lacks as float32."""
    if isinstance(value, torch.Tensor):
        dense = value.to_dense().resolve_conj()
        try:
            value = dense.numpy()
        except TypeError:
            value = dense.float().numpy()
    return value[()] if isinstance(value, np.ndarray) else value


class _Bare:
    """Prints as its value does alone: inside of a list, numpy would print the type too."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return str(self._value)


def _text(value: Any) -> str:
    return str(map_leaves(lambda leaf: _Bare(leaf) if isinstance(leaf, (np.generic, np.ndarray)) else leaf, value))
