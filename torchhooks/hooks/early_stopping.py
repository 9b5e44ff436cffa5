"""Hooks that stop a loop by the value of a metric (``tf.estimator.experimental``'s early stopping)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from torchhooks.common.checks import whole_number
from torchhooks.common.log import logger
from torchhooks.common.text import shown
from torchhooks.common.timers import Due, EverySteps, GivenTimer, differs_by_rank, due_now, given_timer, hook_timer
from torchhooks.fetches.fetch import describe
from torchhooks.fetches.over_ranks import Evaluated
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.evaluating import IfDue
from torchhooks.lifecycle.hook import ReportingHook, SessionRunArgs, SessionRunContext, SessionRunValues
from torchhooks.lifecycle.session import Session


class _StopByMetric(ReportingHook):
    """Looks at a metric when a timer triggers, and stops the loop if :meth:`reason_to_stop` returns a reason."""

    def __init__(
        self,
        metric: Any,
        min_steps: int,
        every_n_steps: int | None,
        every_n_secs: float | None,
        every_n_epochs: int | None,
        timer: GivenTimer | None,
    ) -> None:
        self._metric = metric
        self._min_steps = whole_number(min_steps, "min_steps", 0)
        self._evaluated = metric if isinstance(metric, Evaluated) else None
        self._described = describe(metric) if self._evaluated is None else self._evaluated.name
        timer = given_timer(timer, every_n_steps, every_n_secs, every_n_epochs)
        if timer is None:
            timer = EverySteps(1) if self._evaluated is None else self._evaluated.timer
        self._timer = hook_timer(self, timer)
        self.collective = differs_by_rank(timer)
        self._if_due = IfDue(metric, self._timer)
        self._request = SessionRunArgs(self._if_due)

    def begin(self) -> None:
        self._timer.reset()

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._if_due.session = session
        self._timer.start_at(session.global_step)
        if self._timer.last_triggered_step() is None:
            self._timer.update_last_triggered_step(session.global_step)
        self._looked_at_start = self._evaluated is None

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self._if_due.evaluated = False
        if self._evaluated is not None and not self._looked_at_start:
            self._looked_at_start = True
            session = run_context.session
            step = session.global_step
            latest = self._evaluated.latest()  # of an evaluation before the first run
            if latest is not None and latest[0] == step:
                value = session.run(self._metric, who=self)
                run_context.when_ready(value, functools.partial(self._look, run_context, step))
        return self._request if self._timer.should_trigger_for_step(run_context.session.global_step + 1) else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._if_due.evaluated:
            step = run_context.session.global_step
            self._timer.update_last_triggered_step(step)
            # Bound to this step, because the callback may run several steps later.
            run_context.when_ready(run_values.results, functools.partial(self._look, run_context, step))

    def next_due(self) -> Due:
        return self._timer.next_due() if self._looked_at_start else due_now(self._timer)

    def reason_to_stop(self, step: int, value: float) -> str | None:
        """Return why to stop, given the ``value`` of the metric at ``step``, or ``None``."""

    def _look(self, run_context: SessionRunContext, step: int, value: Any) -> None:
        """Stop the loop if the ``value`` of the metric at ``step``, which is on the host, is a reason to."""
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"{self._described} is {value!r}: the metric of a {type(self).__name__} must be one number"
            ) from None
        reason = None if step < self._min_steps else self.reason_to_stop(step, number)
        if reason is not None:
            logger.info("%s", reason)
            run_context.request_stop(reason)


def _non_negative(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={shown(value)}: must be a finite number, 0 or more")
    return float(value)


class _StopIfNoImprovement(_StopByMetric):
    _change: str
    _best: float | None
    _best_step: int | None
    _last_step: int | None  # the step of the last value
    _reason: str | None = None  # to stop in the first run

    def _tolerate(self, max_steps: int, min_delta: float, name: str | None) -> None:
        self._min_delta = _non_negative(min_delta, "min_delta")
        self._max_steps = whole_number(max_steps, f"max_steps_without_{self._change}", 1)
        self.name = name
        """The name of the state in checkpoints; ``None`` for the name of the class."""
        self._forget()

    def begin(self) -> None:
        super().begin()
        self._forget()

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        super().after_create_session(session, coord)
        # By the last value rather than the global step: the metric may have improved since that value.
        step = self._last_step
        self._reason = None if step is None or step < self._min_steps else self._reason_at(step)
        if step is not None and self._reason is not None:
            logger.info(
                "%r: the metric has not %sd for %d steps already",
                *(self, self._change, step - (self._best_step or 0)),
            )

    def why_finished(self, session: Session) -> str | None:
        return self._reason

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._reason is not None:
            run_context.request_stop(self._reason)
            self._reason = None
        super().after_run(run_context, run_values)

    def next_due(self) -> Due:
        return super().next_due() if self._reason is None else due_now(self._timer)

    def reason_to_stop(self, step: int, value: float) -> str | None:
        if self._best_step is None:
            self._best_step = step
        if not math.isnan(value) and (self._best is None or self._is_better(value, self._best)):
            self._best, self._best_step = value, step
        self._last_step = step
        return self._reason_at(step)

    def _reason_at(self, step: int) -> str | None:
        assert self._best_step is not None
        steps = step - self._best_step
        if steps < self._max_steps:
            return None
        return (
            f'No {self._change} in metric "{self._described}" for {steps} steps, which is greater than or equal to max '
            f"steps ({self._max_steps}) configured for early stopping."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far, its step, and the step of the last value."""
        return {"best": self._best, "best_step": self._best_step, "last_step": self._last_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set what :meth:`state_dict` returned."""
        self._best, self._best_step, self._last_step = (state_dict[name] for name in ("best", "best_step", "last_step"))

    def _forget(self) -> None:
        self._best = self._best_step = self._last_step = None

    def _is_better(self, value: float, best: float) -> bool:
        return best - value > self._min_delta if self._change == "decrease" else value - best > self._min_delta


class StopIfNoDecreaseHook(_StopIfNoImprovement):
    """Stops the loop if a metric has not decreased for some steps (``tf.estimator``'s ``stop_if_no_decrease_hook``).

    >>> errors = iter([0.3, 0.1, 0.2, 0.1])
    >>> evaluation = EvaluationHook(lambda: {"error": next(errors)}, every_n_steps=2)
    >>> patience = StopIfNoDecreaseHook(evaluation["error"], max_steps_without_decrease=4)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[evaluation, patience]) as loop:
    ...     while not loop.should_stop():
    ...         loss = loop.run(batches[0])
    evaluation at step 2: error = 0.3
    evaluation at step 4: error = 0.1
    evaluation at step 6: error = 0.2
    evaluation at step 8: error = 0.1
    No decrease in metric "error" for 4 steps, which is greater than or equal to max steps (4) configured ...

    The loop stops if a value is not less than the least value so far, which is at least ``max_steps_without_decrease``
    steps old. The least value and its step are in the checkpoints, so that a training run that is resumed does not
    start to count again. A training run that the hook has ended makes no run if it is started again, as with
    a :class:`torchhooks.StopAtStepHook`. On a GPU, the host does not wait for the value, and the loop stops a few runs
    later. NaN is never the least value.

    Args:
        metric: any fetch of one number. A result of an EvaluationHook is looked at whenever that hook evaluates.
        max_steps_without_decrease: how many steps to tolerate, 1 or more.
        min_steps: values of earlier steps are ignored.
        every_n_steps, every_n_secs, every_n_epochs, timer: when to look at the metric; give at most one, see
            :doc:`Choose a period </built-in-hooks>`. By default, when the evaluation does, or in every step for other
            fetches.
        name: the name of its state in checkpoints. Two hooks of this class need two names.
        min_delta: a decrease counts only if it is larger than this.

    Raises:
        ValueError: a number of steps or ``min_delta`` is not valid, or two periods are given.
        TypeError: from the run, the metric is not one number.

    Unlike TensorFlow, NaN is never the least value, and there is ``min_delta``.
    """

    _change = "decrease"

    def __init__(
        self,
        metric: Any,
        max_steps_without_decrease: int,
        min_steps: int = 0,
        *,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
        name: str | None = None,
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(metric, min_steps, every_n_steps, every_n_secs, every_n_epochs, timer)
        self._tolerate(max_steps_without_decrease, min_delta, name)


class StopIfNoIncreaseHook(_StopIfNoImprovement):
    """Stops the loop if a metric has not increased for some steps (``tf.estimator``'s ``stop_if_no_increase_hook``).

    >>> evaluation = EvaluationHook(lambda: {"accuracy": 0.5}, every_n_steps=2)
    >>> patience = StopIfNoIncreaseHook(evaluation["accuracy"], max_steps_without_increase=4)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[evaluation, patience]) as loop:
    ...     while not loop.should_stop():
    ...         loss = loop.run(batches[0])
    evaluation at step 2: accuracy = 0.5
    evaluation at step 4: accuracy = 0.5
    evaluation at step 6: accuracy = 0.5
    No increase in metric "accuracy" for 4 steps, which is greater than or equal to max steps (4) configured ...

    Like :class:`torchhooks.StopIfNoDecreaseHook`, with the greatest value in place of the least one. The other
    arguments and the errors are the same.

    Args:
        max_steps_without_increase: how many steps to tolerate, 1 or more.
    """

    _change = "increase"

    def __init__(
        self,
        metric: Any,
        max_steps_without_increase: int,
        min_steps: int = 0,
        *,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
        name: str | None = None,
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(metric, min_steps, every_n_steps, every_n_secs, every_n_epochs, timer)
        self._tolerate(max_steps_without_increase, min_delta, name)


class _StopAtThreshold(_StopByMetric):
    _relation: str

    def __init__(
        self,
        metric: Any,
        threshold: float,
        min_steps: int = 0,
        *,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
    ) -> None:
        super().__init__(metric, min_steps, every_n_steps, every_n_secs, every_n_epochs, timer)
        self._given_threshold = threshold
        try:
            self._threshold = math.nan if isinstance(threshold, bool | str) else float(threshold)
        except (TypeError, ValueError, OverflowError):
            self._threshold = math.nan
        if math.isnan(self._threshold):
            raise ValueError(f"threshold={shown(threshold)}: must be a number to compare the metric with")

    def reason_to_stop(self, step: int, value: float) -> str | None:
        crossed = value > self._threshold if self._relation == "greater than" else value < self._threshold
        if not crossed:
            return None
        return (
            f'At step {step}, metric "{self._described}" has value {value} which is {self._relation} the configured '
            f"threshold ({self._given_threshold}) for early stopping."
        )


class StopIfHigherHook(_StopAtThreshold):
    """Stops the loop once a metric is greater than a threshold (``tf.estimator``'s ``stop_if_higher_hook``).

    >>> accuracies = iter([0.7, 0.95, 0.8, 0.99])
    >>> evaluation = EvaluationHook(lambda: {"accuracy": next(accuracies)}, every_n_steps=2)
    >>> enough = StopIfHigherHook(evaluation["accuracy"], 0.9, min_steps=5)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[evaluation, enough]) as loop:
    ...     while not loop.should_stop():
    ...         loss = loop.run(batches[0])
    evaluation at step 2: accuracy = 0.7
    evaluation at step 4: accuracy = 0.95
    evaluation at step 6: accuracy = 0.8
    evaluation at step 8: accuracy = 0.99
    At step 8, metric "accuracy" has value 0.99 which is greater than the configured threshold (0.9) for early stopping.

    On a GPU, the host does not wait for the value, and the loop stops a few runs later.

    Args:
        metric: any fetch of one number. A result of an EvaluationHook is looked at whenever that hook evaluates.
        threshold: the number to compare it with.
        min_steps: values of earlier steps are ignored.
        every_n_steps, every_n_secs, every_n_epochs, timer: when to look at the metric; give at most one, see
            :doc:`Choose a period </built-in-hooks>`. By default, when the evaluation does, or in every step for other
            fetches.

    Raises:
        ValueError: ``threshold`` is not a number, ``min_steps`` is not valid, or two periods are given.
        TypeError: from the run, the metric is not one number.
    """

    _relation = "greater than"


class StopIfLowerHook(_StopAtThreshold):
    """Stops the loop once a metric is less than a threshold (``tf.estimator``'s ``stop_if_lower_hook``).

    >>> with MonitoredLoop(step, model, optimizer, hooks=[StopIfLowerHook("loss", 0.01)]) as loop:
    ...     while not loop.should_stop():
    ...         loss = loop.run(batches[0])
    At step ..., metric "loss" has value ... which is less than the configured threshold (0.01) for early stopping.
    >>> bool(loss < 0.01)
    True

    It has the arguments and errors of :class:`torchhooks.StopIfHigherHook`.
    """

    _relation = "less than"
