"""The hook that evaluates the model while it is trained."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from torchhooks.common.errors import FetchError, LifecycleError
from torchhooks.common.log import logger
from torchhooks.common.text import did_you_mean, kind_of, printable, shown, tagged_line
from torchhooks.common.timers import Due, GivenTimer, NeverTriggerTimer, called_within, given_timer
from torchhooks.device.readback import is_remote, to_host
from torchhooks.fetches.evaluation import ComposedFetch, leaves
from torchhooks.fetches.names import Closure, Fetch, Value, describe
from torchhooks.hooks.calling import names_nothing
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.evaluating import evaluating
from torchhooks.lifecycle.hook import PeriodicHook, SessionRunContext, SessionRunValues
from torchhooks.lifecycle.session import Session
from torchhooks.summary import operations as summary
from torchhooks.summary.writers import WriterTarget

Results = Mapping[str, Value]
"""What an evaluation returned, by name."""


class _Result(NamedTuple):
    """What one evaluation returned, by name. Tensors may still be on their device."""

    step: int
    wall_time: float
    values: Results


class _Results:
    """A closure whose value is what ``get(session)`` returns: results of ``function``, or ``None``."""

    def __init__(self, get: Callable[[Session], Results | None], function: Closure) -> None:
        self._get = get
        self._function = function

    def __call__(self, session: Session) -> Results | None:
        return self._get(session)

    def __repr__(self) -> str:
        return f"the evaluation {describe(self._function)}"


class _Values(dict[str, float]):
    """The latest results by name, with an error that says which there are."""

    def __missing__(self, name: object) -> NoReturn:
        if self:
            raise KeyError(f"{name}: the evaluation returned {', '.join(self)}")
        raise KeyError(
            f"{name}: nothing was evaluated yet. If the loop stops before the first evaluation, the code after its "
            "loops runs too: write if loop.should_stop(): break before it, pass at_start=True, or use "
            f"values.get({name!r})"
        )


class EvaluationHook(PeriodicHook):
    """Evaluates the model periodically, and logs the results and writes them as curves.

    >>> validation = torch.randn(100, 4)
    >>> def evaluate(model):
    ...     errors = model(validation) - validation.sum(dim=1, keepdim=True)
    ...     return {"error": errors.abs().mean(), "worst": errors.abs().max()}
    >>> evaluation = EvaluationHook(evaluate, every_n_steps=4, output_dir="run")
    >>> enough = StopIfLowerHook(evaluation["error"], 0.5)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[evaluation, enough]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    evaluation at step 4: error = ..., worst = ...
    evaluation at step 8: error = ..., worst = ...
    At step 8, metric "error" has value ... which is less than the configured threshold (0.5) for early stopping.
    >>> sorted(evaluation.values)
    ['error', 'worst']

    The function is called with the model in evaluation mode and without gradients. Afterwards the random states, the
    training mode of each module and the gradients are what they were. ``evaluation["error"]`` is a fetch of a result
    for other hooks, wherever they are in the list. It is the new result in a run in which the evaluation is due, and
    otherwise the latest. :doc:`Evaluation and validation </evaluation>` has the details.

    With several ranks, the function is called on every rank, and the chief logs and writes its own results.

    Args:
        evaluate: called as a closure is: its parameters can be ``model``, ``global_step`` and the names of other
            fetches. It returns one number, or a mapping from names to numbers. A single number has the name of the
            function, or ``"evaluation"`` if the function has none.
        every_n_steps, timer, every_n_secs, every_n_epochs: when to evaluate; give at most one, see
            :doc:`Choose a period </built-in-hooks>`.
        at_start: whether to evaluate before the first run as well, unless a checkpoint with results was restored. The
            function then cannot ask for outputs of the step.
        at_end: whether to evaluate at a clean end of the loop, unless that step has been evaluated, or a signal stopped
            the loop.
        name: the name of its state in checkpoints, which contain the latest results. By default, the function's name.
        output_dir, summary_writer: where to write; see :doc:`Write curves </built-in-hooks>`. Without either, the
            results are only logged. A curve of the training loss needs another name there.
        log: whether to log the results; if not, they are for other hooks, as ``evaluation["name"]``.

    Raises:
        ValueError: two periods or more than one place to write to is given; there is no period, no ``at_start`` and no
            ``at_end``; or the period is not valid. From the run, a result is a tensor of several elements.
        TypeError: ``evaluate`` is not callable; from the run, a result is not a number.
        FetchError: from the run, the function returned no value of a name that a hook requested.
    """

    state_is_optional = True
    """Whether a checkpoint can be restored that has no state of this hook, or has one without the hook."""

    def __init__(
        self,
        evaluate: Closure,
        every_n_steps: int | None = None,
        timer: GivenTimer | None = None,
        at_start: bool = False,
        at_end: bool = False,
        output_dir: object = None,
        summary_writer: object = None,
        *,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        name: str | None = None,
        log: bool = True,
    ) -> None:
        if not callable(evaluate):
            raise TypeError(f"evaluate={shown(evaluate)}: must be a function that returns a number or a mapping")
        if names_nothing(evaluate):
            raise TypeError(
                f"evaluate={describe(evaluate)}: it would be called without arguments, because it is called with what "
                "its parameters name, and it names none: name them, such as def evaluate(model, global_step)"
            )
        self._function = evaluate
        function_name = getattr(evaluate, "__name__", "")
        self._name = function_name if function_name.isidentifier() else "evaluation"
        self.name = self._name if name is None else name
        """The name of the state in checkpoints."""
        timer = given_timer(timer, every_n_steps, every_n_secs, every_n_epochs)
        self.given_timer: GivenTimer = _chosen(timer, has_other_times=at_start or at_end)
        """The timer to give to hooks that are due together with this one."""
        self.set_timer(self.given_timer)
        # One object for all results: a run evaluates each distinct fetch once, so hooks that fetch several results of
        # an evaluation have it made once.
        self.fetches = _Results(self._fetched, evaluate)
        self._at_start, self._at_end, self._logs = at_start, at_end, log
        self.works_at_end = at_end
        self._target = WriterTarget(output_dir, summary_writer, starts_session=True)
        self._session: Session | None = None
        self._latest: _Result | None = None
        self._unreported: list[_Result] = []
        self._values: dict[str, float] = _Values()
        self._values_step: int | None = None

    @property
    def values(self) -> dict[str, float]:
        """The latest results by name, as numbers, also of an earlier process; empty before the first.

        After an epoch with ``every_n_epochs``, these are the results of that epoch. So reading them makes the calls for
        the end of an epoch that the body left by ``break``, and on a GPU it waits for the results.
        """
        if self._session is not None:
            self._session.finish_epoch()  # no earlier: a generator that a break closes must call nothing that may raise
        return self._values

    def __getitem__(self, name: str) -> EvaluationValue:
        """Return a fetch of the result ``name``."""
        return EvaluationValue(self, name, self.fetches)

    @property
    def fetches_to_come(self) -> Fetch:
        return self._function

    @property
    def now(self) -> EvaluationNow:
        """What ``evaluation.now["accuracy"]`` subscripts: a fetch that evaluates whenever it is requested.

        >>> evaluation = EvaluationHook(lambda global_step: {"error": 1 / global_step}, every_n_steps=5)
        >>> final = FinalOpsHook(evaluation.now["error"])
        >>> with MonitoredLoop(step, model, optimizer, hooks=[evaluation, final]) as loop:
        ...     for inputs in loop.until_stop(batches):
        ...         loss = loop.run(inputs)
        evaluation at step 5: error = 0.2
        final ops at step 8: error = 0.125
        evaluation at step 8: error = 0.125
        >>> final.final_ops_values
        0.125
        """
        return EvaluationNow(self, self._function)

    def may_return(self, name: str) -> bool:
        """Return whether the function returns a result ``name``, as far as is known: before the first, it may."""
        return not self._values or name in self._values

    def begin(self) -> None:
        super().begin()
        self._begun = self._has_run = False
        self._values, self._values_step = _Values(), None
        self._unreported = []
        if self.writes:
            self._target.open()

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._target.session_created(session)
        self._session = session
        # Without this line, a step that is made again after a recovery would get the result of the session before.
        self._latest = None
        # After a recovery, later steps are made again.
        self._unreported = [result for result in self._unreported if result.step <= session.global_step]
        super().after_create_session(session, coord)
        if self._at_start and not self._begun and self._values_step is None:
            self._target.start_session()  # or the START would void this point
            result = self._evaluate(session)
            if not any(map(is_remote, leaves(result.values))):  # otherwise reported in the first run, without waiting
                self._report_now()
        self._begun = True

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._has_run = True
        self._target.start_session()
        # Emptied first: if a report raises, teardown() must not make the others a second time.
        results, self._unreported = self._unreported, []
        for result in results:
            run_context.when_ready(result.values, functools.partial(self._report, result))

    def end(self, session: Session) -> None:
        # A process that a signal has stopped is resumed, and its last state would be evaluated at a step that a
        # training run without the signal does not evaluate.
        if self._at_end and not (session.stopped_by_signal or session.was_finished):
            self.current(session)
        self._report_now()

    def teardown(self) -> None:
        # After the loop, reading the values must not make calls in a session that is closed.
        self._session = None
        try:
            self._report_now()  # what was evaluated after the end, or in a run that failed
        finally:
            self._target.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the latest results and their step."""
        return {"step": self._values_step, "values": dict(self._values)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set what :meth:`state_dict` returned."""
        self._values_step, self._values = state_dict["step"], _Values(state_dict["values"])

    def next_due(self) -> Due:
        # The first run marks the start of the session for the writer, and reports an evaluation before it.
        return super().next_due() if self._has_run else called_within(1, super().next_due())

    def current(self, session: Session) -> Results:
        """Return the results for the present step of ``session``, after evaluating the model if there are none yet."""
        self.check_session(session)
        latest = self._latest
        if latest is None or latest.step != session.global_step:
            latest = self._evaluate(session)
        return latest.values

    def _fetched(self, session: Session) -> Results | None:
        """Return the results that a hook fetches: new ones if the evaluation is due, otherwise the latest."""
        self.check_session(session)
        if self.trigger.due:
            return self.current(session)
        if self._latest is not None:
            return self._latest.values
        return self._values or None  # of an earlier process

    def latest(self) -> tuple[int, Results] | None:
        """Return the step and the results of the latest evaluation in this session; ``None`` if there was none."""
        return None if self._latest is None else (self._latest.step, self._latest.values)

    def check_session(self, session: Session) -> None:
        """Raise if the hook is not in the loop of ``session``."""
        if session is not self._session:
            raise LifecycleError(f"{self!r} is not in this loop: add it to hooks, for its results to be requested")

    def _evaluate(self, session: Session) -> _Result:
        with session.paused(), evaluating(session):
            returned = session.run(self._function, who=self)
        named = returned if isinstance(returned, Mapping) else {self._name: returned}
        for name, value in named.items():  # in the run that computed the values
            _check_result(self._function, name, value, is_whole=returned is value)
        # After the checks: an evaluation that has raised must be made again in the run after a recovery. The time is
        # taken now, because a result on a GPU is written some runs later.
        self._latest = _Result(session.global_step, time.time(), named)
        self._unreported.append(self._latest)
        return self._latest

    def _report_now(self) -> None:
        results, self._unreported = self._unreported, []
        for result in results:
            self._report(result, to_host(result.values))

    def _report(self, result: _Result, values: Results) -> None:
        """Log and write the results of one evaluation, whose ``values`` are on the host."""
        self._values = _Values({name: summary.scalar(name, name).number(value) for name, value in values.items()})
        self._values_step = result.step
        texts = {name: printable(value) for name, value in values.items()}
        if self.writes and self._logs:
            logger.info("evaluation at step %d: %s", result.step, tagged_line(texts) or "no values")
        if self._target.writers:
            summary.write_summaries(self._target.writers, _points(values), result.step, result.wall_time)


NOT_EVALUATED = float("nan")
"""The value of a result before the first evaluation. Another NaN is not this object."""


class EvaluationNow:
    """What ``evaluation.now`` is."""

    def __init__(self, evaluation: EvaluationHook, function: Closure) -> None:
        self._evaluation = evaluation
        self._results = _Results(evaluation.current, function)

    def __getitem__(self, name: str) -> EvaluationValue:
        """Return a fetch of the result ``name`` for the step at which it is requested."""
        return EvaluationValue(self._evaluation, name, self._results, "evaluation.now")


class EvaluationValue(ComposedFetch):
    """One result of an evaluation: the fetch that ``evaluation["accuracy"]`` returns."""

    def __init__(
        self,
        evaluation: EvaluationHook,
        name: str,
        results: Callable[..., Results | None],
        holder: str = "evaluation",
    ) -> None:
        self._holder = holder
        # Where the user gives no tag, a hook logs a fetch under its __name__, as it does with a function.
        self.name = self.__name__ = name
        self.timer = evaluation.given_timer
        """The timer of the evaluation."""
        self.evaluates_at_end = evaluation.works_at_end
        """Whether the evaluation has ``at_end``."""
        self._evaluation = evaluation
        self.fetch = results

    def compose(self, value: Results | None) -> Value:
        if value is None:
            return NOT_EVALUATED
        if self.name not in value:
            names = [*map(str, value)]
            returned = f"It returned: {', '.join(names)}." if names else "It returned an empty dict."
            raise FetchError(
                f"{self!r} was requested, but the evaluation returned no {self.name!r}."
                f"{did_you_mean(str(self.name), names)} {returned}"
            )
        return value[self.name]

    @property
    def now(self) -> EvaluationValue:
        """The fetch of this result that evaluates whenever it is requested."""
        return self._evaluation.now[self.name]

    def latest(self) -> tuple[int, Value] | None:
        """Return the step and the value of the latest evaluation in this session; ``None`` if there was none."""
        latest = self._evaluation.latest()
        return None if latest is None else (latest[0], self.compose(latest[1]))

    def __repr__(self) -> str:
        return f"{self._holder}[{self.name!r}]"


def _chosen(timer: GivenTimer | None, has_other_times: bool) -> GivenTimer:
    if timer is None and not has_other_times:
        raise ValueError(
            "EvaluationHook never evaluates: give every_n_steps, every_n_secs, every_n_epochs, timer, at_start=True or "
            "at_end=True"
        )
    return NeverTriggerTimer() if timer is None else timer


def _check_result(function: Closure, name: str, value: Value, *, is_whole: bool) -> None:
    """Raise if ``value``, the result ``name`` of ``function`` or all that it returned, is not a number."""
    try:
        summary.scalar(name, name).compose(value)
    except (TypeError, ValueError) as error:
        got = shown(value) if is_whole else shown({name: value})
        kind = f", {kind_of(value)}" if hasattr(type(value), "shape") else ""
        raise type(error)(
            f"{describe(function)} returned {got}{kind}: an evaluation returns one number, or a dict from name to "
            'number, such as {"val_loss": loss}'
        ) from None


def _points(values: Results) -> list[summary.Summary]:
    return [summary.scalar(name, name).compose(value) for name, value in values.items()]
