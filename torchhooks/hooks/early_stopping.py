"""Hooks that stop a loop by the value of a metric (``tf.estimator.experimental``'s early stopping)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torchhooks.common.checks import whole_number
from torchhooks.common.errors import LifecycleError
from torchhooks.common.log import logger
from torchhooks.common.text import kind_of, shown
from torchhooks.common.timers import Due, EveryEpochs, EverySteps, GivenTimer, called_within, given_timer
from torchhooks.fetches.names import Fetch, Value, describe
from torchhooks.fetches.over_ranks import EvaluationResult
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import PeriodicHook, SessionRunArgs, SessionRunContext, SessionRunValues
from torchhooks.lifecycle.session import Session


class _StopByMetric(PeriodicHook):
    """Looks at a metric when a timer triggers, and stops the loop if :meth:`reason_to_stop` returns a reason."""

    def __init__(
        self,
        metric: Fetch,
        min_steps: int,
        every_n_steps: int | None,
        every_n_secs: float | None,
        every_n_epochs: int | None,
        timer: GivenTimer | None,
        default: GivenTimer,
    ) -> None:
        self.fetches = metric
        self._min_steps = whole_number(min_steps, "min_steps", 0)
        self._evaluated = metric if isinstance(metric, EvaluationResult) else None
        self._described = describe(metric) if self._evaluated is None else self._evaluated.name
        timer = given_timer(timer, every_n_steps, every_n_secs, every_n_epochs)
        if timer is None:
            timer = default if self._evaluated is None else self._evaluated.timer
        self.set_timer(timer)

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        super().after_create_session(session, coord)
        self._looked_at_start = self._evaluated is None

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        # In the first run and not in after_create_session(): the EvaluationHook may come later in the list of hooks,
        # and then evaluates its start after this hook was called there.
        if self._evaluated is not None and not self._looked_at_start:
            self._looked_at_start = True
            session = run_context.session
            step = session.global_step
            latest = self._evaluated.latest()  # of an evaluation before the first run
            if latest is not None and latest[0] == step:
                value = session.run(self.fetches, who=self)
                epoch = self._epoch(session) - (session.batch == 0)  # the epoch that now begins had not begun then
                run_context.when_ready(value, functools.partial(self._look, run_context, step, epoch))
        return super().before_run(run_context)

    def run_due(self, run_context: SessionRunContext, values: Value) -> None:
        # Bound to this step and epoch, because the callback may run several steps later.
        session = run_context.session
        look = functools.partial(self._look, run_context, session.global_step, self._epoch(session))
        run_context.when_ready(values, look)

    def next_due(self) -> Due:
        return super().next_due() if self._looked_at_start else called_within(1, super().next_due())

    def reason_to_stop(self, step: int, epoch: int, value: float) -> str | None:
        """Return why to stop, given the ``value`` of the metric at ``step`` in ``epoch``, or ``None``."""

    def _epoch(self, session: Session) -> int:
        """Return the number of the epoch in progress, or of the one that ends; -1 before the first."""
        return -1 if session.epoch is None else session.epoch

    def _look(self, run_context: SessionRunContext, step: int, epoch: int, value: Value) -> None:
        """Stop the loop if the ``value`` of the metric at ``step``, which is on the host, is a reason to."""
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise TypeError(
                f"{self._described} is {kind_of(value)}: the metric of a {type(self).__name__} must be one number"
            ) from None
        reason = None if step < self._min_steps else self.reason_to_stop(step, epoch, number)
        if reason is not None:
            logger.info("%s", reason)
            run_context.request_stop(reason)


def _non_negative(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={shown(value)}: must be a finite number, 0 or more")
    return float(value)


class _Place(NamedTuple):
    """Where a value of the metric is from."""

    step: int
    epoch: int


class _StopIfNoImprovement(_StopByMetric):
    _change: str
    _best: float | None
    _best_at: _Place | None
    _last_at: _Place | None  # of the last value
    _reason: str | None = None  # to stop in the first run

    def _tolerate(self, max_steps: int | None, max_epochs: int | None, min_delta: float, name: str | None) -> None:
        self._min_delta = _non_negative(min_delta, "min_delta")
        given = {f"max_steps_without_{self._change}": max_steps, f"max_epochs_without_{self._change}": max_epochs}
        if (max_steps is None) == (max_epochs is None):
            listed = ", ".join(f"{name}={shown(value)}" for name, value in given.items())
            raise ValueError(f"{listed}: give {type(self).__name__} exactly one of them")
        self._unit = "steps" if max_epochs is None else "epochs"
        argument = f"max_{self._unit}_without_{self._change}"
        self._most = whole_number(given[argument], argument, 1)
        self.name = "" if name is None else name
        """The name of the state in checkpoints; if it is empty, the name of the class."""
        self._forget()

    def begin(self) -> None:
        super().begin()
        # Before a restore, which sets these to what the checkpoint has. A hook may serve several loops.
        self._forget()

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        super().after_create_session(session, coord)
        # By the last value rather than the global step: the metric may have improved since that value.
        last = self._last_at
        self._reason = None if last is None or last.step < self._min_steps else self._reason_at(last)
        if last is not None and self._reason is not None:
            logger.info(
                "%r: the metric has not %sd for %d %s already", self, self._change, self._age_at(last), self._unit
            )

    def why_finished(self, session: Session) -> str | None:
        return self._reason

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        # A loop with until_stop has asked why_finished() and makes no run. A loop with should_stop() and run() makes
        # one more run, as TensorFlow does, and this ends it.
        if self._reason is not None:
            run_context.request_stop(self._reason)
            self._reason = None
        super().after_run(run_context, run_values)

    def next_due(self) -> Due:
        return super().next_due() if self._reason is None else called_within(1, super().next_due())

    def _epoch(self, session: Session) -> int:
        if self._unit == "epochs" and session.epoch is None and session.global_step:
            raise LifecycleError(
                f"{self!r} counts epochs, and there is none: iterate over the data of an epoch with "
                "loop.until_stop(loader), or count steps"
            )
        return super()._epoch(session)

    def reason_to_stop(self, step: int, epoch: int, value: float) -> str | None:
        self._last_at = place = _Place(step, epoch)
        # The count begins with the first value also if that is NaN, which is never the best one.
        if self._best_at is None:
            self._best_at = place
        if not math.isnan(value) and (self._best is None or self._is_better(value, self._best)):
            self._best, self._best_at = value, place
        return self._reason_at(place)

    def _age_at(self, place: _Place) -> int:
        """Return how many steps or epochs before ``place`` the best value is from."""
        best = self._best_at or place
        return place.step - best.step if self._unit == "steps" else place.epoch - best.epoch

    def _reason_at(self, place: _Place) -> str | None:
        age = self._age_at(place)
        if age < self._most:
            return None
        return (
            f'No {self._change} in metric "{self._described}" for {age} {self._unit}, which is greater than or equal '
            f"to max {self._unit} ({self._most}) configured for early stopping."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far, its step and epoch, and the step and epoch of the last value."""
        places = {"best_at": self._best_at, "last_at": self._last_at}
        # As lists: a file that is loaded with weights_only=True has no NamedTuple of this package.
        return {"best": self._best, **{name: place and [*place] for name, place in places.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set what :meth:`state_dict` returned."""
        self._best = state_dict["best"]
        self._best_at, self._last_at = (at and _Place(*at) for at in (state_dict["best_at"], state_dict["last_at"]))

    def _forget(self) -> None:
        self._best = self._best_at = self._last_at = None

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
    steps, or ``max_epochs_without_decrease`` epochs, old. The least value and where it is from are in the checkpoints,
    so that a training run that is resumed does not start to count again. A training run that the hook has ended makes
    no run if it is started again, as with a :class:`torchhooks.StopAtStepHook`. On a GPU, the host does not wait for
    the value, and the loop stops a few runs later. NaN is never the least value.

    Args:
        metric: any fetch of one number. A result of an EvaluationHook is looked at whenever that hook evaluates.
        max_steps_without_decrease, max_epochs_without_decrease: how many steps or epochs to tolerate, 1 or more; give
            one of them.
        min_steps: values of earlier steps are ignored.
        every_n_steps, every_n_secs, every_n_epochs, timer: when to look at the metric; give at most one, see
            :doc:`Choose a period </built-in-hooks>`. By default, when the evaluation does; for other fetches, in every
            step, or at the end of every epoch if epochs are counted.
        name: the name of its state in checkpoints. Two hooks of this class need two names.
        min_delta: a decrease counts only if it is larger than this.

    Raises:
        ValueError: a number or ``min_delta`` is not valid, not exactly one of steps and epochs is given, or two periods
            are.
        TypeError: from the run, the metric is not one number.
        LifecycleError: from the run, epochs are counted and there is none.

    Unlike TensorFlow, NaN is never the least value, and there are ``min_delta`` and epochs.
    """

    _change = "decrease"

    def __init__(
        self,
        metric: Fetch,
        max_steps_without_decrease: int | None = None,
        min_steps: int = 0,
        *,
        max_epochs_without_decrease: int | None = None,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
        name: str | None = None,
        min_delta: float = 0.0,
    ) -> None:
        default = EverySteps(1) if max_epochs_without_decrease is None else EveryEpochs(1)
        super().__init__(metric, min_steps, every_n_steps, every_n_secs, every_n_epochs, timer, default)
        self._tolerate(max_steps_without_decrease, max_epochs_without_decrease, min_delta, name)


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
        max_steps_without_increase, max_epochs_without_increase: how many steps or epochs to tolerate, 1 or more; give
            one of them.
    """

    _change = "increase"

    def __init__(
        self,
        metric: Fetch,
        max_steps_without_increase: int | None = None,
        min_steps: int = 0,
        *,
        max_epochs_without_increase: int | None = None,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
        name: str | None = None,
        min_delta: float = 0.0,
    ) -> None:
        default = EverySteps(1) if max_epochs_without_increase is None else EveryEpochs(1)
        super().__init__(metric, min_steps, every_n_steps, every_n_secs, every_n_epochs, timer, default)
        self._tolerate(max_steps_without_increase, max_epochs_without_increase, min_delta, name)


class _StopAtThreshold(_StopByMetric):
    _relation: str

    def __init__(
        self,
        metric: Fetch,
        threshold: float,
        min_steps: int = 0,
        *,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
    ) -> None:
        super().__init__(metric, min_steps, every_n_steps, every_n_secs, every_n_epochs, timer, EverySteps(1))
        self._given_threshold = threshold
        try:
            self._threshold = math.nan if isinstance(threshold, bool | str) else float(threshold)
        except (TypeError, ValueError, OverflowError):
            self._threshold = math.nan
        if math.isnan(self._threshold):
            raise ValueError(f"threshold={shown(threshold)}: must be a number to compare the metric with")

    def reason_to_stop(self, step: int, epoch: int, value: float) -> str | None:
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
