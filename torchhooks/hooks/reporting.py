"""Hooks that report values: in log lines while the loop runs, and once at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torchhooks.fetch import check_feed_names, map_leaves, watched_names
from torchhooks.hook import ReportingHook, SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from torchhooks.log import logger
from torchhooks.readback import to_host
from torchhooks.session import Session
from torchhooks.text import call_repr, shown
from torchhooks.timer import Due, NeverTriggerTimer, SecondOrStepTimer


class LoggingTensorHook(ReportingHook):
    """Logs values periodically (``tf.train.LoggingTensorHook``): ``loss = 0.1, step = 7 (2.500 sec)``.

    The hook counts runs, not global steps: ``every_n_iter=4`` logs the 1st, 5th and 9th run. From the second line on,
    the seconds are those since the previous line.

    With several ranks, every rank evaluates the fetches in the same runs, and the chief logs. ``over_ranks("loss",
    "mean")`` logs the mean of all ranks instead of the chief's value.

    Args:
        tensors: a dict from tag to fetch, which is logged sorted by tag; or a list of fetches, which is logged in its
            order under the names of the fetches.
        every_n_iter: the period in runs.
        every_n_secs: the period in seconds, in place of ``every_n_iter``.
        at_end: whether to log at a clean end of the loop, in addition to a period or without one.
        formatter: a function that returns the whole line, given a dict from tag to a printable value.

    Raises:
        ValueError: neither a period nor ``at_end`` is given, or both periods are, or a period is not valid; there is
            nothing to log, or two fetches in a list have the same name; or a value is available only while a step runs,
            with ``at_end``.
        TypeError: ``tensors`` is neither a dict nor a list, or ``formatter`` is not callable.
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
        self._timer: SecondOrStepTimer | NeverTriggerTimer = NeverTriggerTimer()
        if every_n_iter is not None or every_n_secs is not None:
            self._timer = SecondOrStepTimer.named(every_n_iter=every_n_iter, every_n_secs=every_n_secs)
        elif not at_end:
            raise ValueError("LoggingTensorHook never logs: give every_n_iter, every_n_secs or at_end=True")
        if formatter is not None and not callable(formatter):
            raise TypeError(
                f"formatter={shown(formatter)}: must be a function that turns a dict of values by tag into text"
            )
        self._tensors = _by_tag(tensors)
        if at_end:
            _check_available_at_end(self, self._tensors)
        self.collective = every_n_secs is not None
        self._at_end = at_end
        self._formatter = formatter
        self._request = SessionRunArgs(tuple(self._tensors.values()))

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
            if self.writes:
                run_context.when_ready(
                    run_values.results,
                    lambda values: self._log(dict(zip(self._tensors, values, strict=True)), elapsed_secs),
                )
        self._iterations += 1

    def end(self, session: Session) -> None:
        if self._at_end:
            values = session.run_available(self._tensors, who=self)
            elapsed_secs, _ = self._timer.update_last_triggered_step(self._iterations)
            if values and self.writes:
                self._log(to_host(values), elapsed_secs)

    def next_due(self) -> Due:
        due = self._timer.next_due()
        # The steps of this timer are runs.
        return due if due.step is None else Due(runs=max(due.step - self._iterations, 0) + 1)

    def sat_out(self, runs: int) -> None:
        self._iterations += runs

    def _log(self, values: Mapping[str, Any], elapsed_secs: float | None) -> None:
        printable = {tag: map_leaves(_printable, value) for tag, value in values.items()}
        if self._formatter is not None:
            with np.printoptions(suppress=True):  # TensorFlow's hook prints arrays without exponents
                line = self._formatter(printable)
        else:
            line = ", ".join([f"{tag} = {_text(value)}" for tag, value in printable.items()])
            line += "" if elapsed_secs is None else f" ({elapsed_secs:.3f} sec)"
        logger.info("%s", line)

    def __repr__(self) -> str:
        return call_repr(self, self._given, **self._arguments)


class FinalOpsHook(SessionRunHook):
    """Evaluates a fetch once, at a clean end of the loop (``tf.train.FinalOpsHook``), on every rank.

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
        _check_available_at_end(self, final_ops)

    def begin(self) -> None:
        self.final_ops_values = None

    def end(self, session: Session) -> None:
        if self._final_ops is not None:
            self.final_ops_values = session.run_available(self._final_ops, self._feed_dict, who=self)

    def __repr__(self) -> str:
        return call_repr(self, self._final_ops, final_ops_feed_dict=self._feed_dict)


def _check_available_at_end(hook: SessionRunHook, fetches: Any) -> None:
    """Raise a ValueError for what only a step can provide, at creation rather than at the end of a long run."""
    for name in watched_names(fetches):
        raise ValueError(
            f"{hook!r}: {name!r} is available only while a step runs, not at the end; return it from the step instead, "
            "under a name that does not end in :output, :input or :grad"
        )


def _by_tag(tensors: Any) -> dict[str, Any]:
    """Return the fetches by the tags under which they are logged, in the order of the line."""
    if not isinstance(tensors, (Mapping, list, tuple)):
        raise TypeError(
            f"tensors={shown(tensors)}: give a dict from tag to fetch, or a list of fetches, such as ['loss']"
        )
    if not tensors:
        raise ValueError(
            f"tensors={shown(tensors)}: there is nothing to log; give at least one fetch, such as ['loss']"
        )
    if isinstance(tensors, Mapping):
        return {tag: tensors[tag] for tag in sorted(tensors)}
    tagged: dict[str, Any] = {}
    for fetch in tensors:
        tag = fetch if isinstance(fetch, str) else getattr(fetch, "__name__", type(fetch).__name__)
        if tag in tagged:
            raise ValueError(f"tensors={shown(tensors)}: two would be logged as {tag!r}; give a dict from tag to fetch")
        tagged[tag] = fetch
    return tagged


def _printable(value: Any) -> Any:
    """Return a tensor as a NumPy scalar or array; in float32 if NumPy lacks its dtype."""
    if isinstance(value, torch.Tensor):
        try:
            value = value.numpy()
        except (TypeError, RuntimeError):  # sparse, conjugate, or a dtype that NumPy lacks
            value = value.to_dense().resolve_conj()
            value = (value if value.is_complex() else value.float()).numpy()
    return value[()] if isinstance(value, np.ndarray) else value


class _Bare:
    """Has the ``str`` of its value as ``repr``: a list prints reprs, and that of a NumPy scalar includes its type."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return str(self._value)


def _text(value: Any) -> str:
    if isinstance(value, (np.generic, float, int, str)):
        return str(value)
    with np.printoptions(suppress=True):
        return str(map_leaves(lambda leaf: _Bare(leaf) if isinstance(leaf, (np.generic, np.ndarray)) else leaf, value))
