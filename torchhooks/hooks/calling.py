"""Hooks that call a function of the user: with values of a run, or for values to pass to the step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping

import torch

from torchhooks.common.errors import NoRunYetError
from torchhooks.common.text import shown
from torchhooks.common.timers import GivenTimer, NeverTriggerTimer, given_timer
from torchhooks.device.readback import to_host
from torchhooks.fetches.names import Value, closure_parameters, describe
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import PeriodicHook, SessionRunArgs, SessionRunContext, StandardHook
from torchhooks.lifecycle.session import Session

Arguments = tuple[tuple[Value, ...], dict[str, Value]]
"""What a function is called with: by position and by name."""


class _Arguments:
    """A closure with the parameters of ``function``, whose value is what ``function`` would have been called with."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        # The evaluation asks inspect.signature() which names a closure needs, and __call__ itself names none.
        self.__signature__ = inspect.Signature(closure_parameters(function))

    def __call__(self, *args: Value, **kwargs: Value) -> Arguments:
        return args, kwargs

    def __repr__(self) -> str:
        return f"the arguments of {describe(self._function)}"


def names_nothing(function: Callable[..., object]) -> bool:
    """Return whether ``function`` takes arguments, as ``*args`` or ``**kwargs``, but names none that it needs."""
    if isinstance(function, (functools.partial, torch.nn.Module)):
        return False  # a partial function has its arguments, and the signature of a module is __call__'s
    try:
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    named = closure_parameters(function)
    if inspect.Parameter.VAR_POSITIONAL in kinds:  # options, such as print() has, are not what it is called with
        named = tuple(each for each in named if each.kind is not each.KEYWORD_ONLY or each.default is each.empty)
    return not named and bool(kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})


class CallFnHook(PeriodicHook):
    """Calls a function periodically, with values that it names as its parameters.

    >>> def report(loss, lr, global_step):
    ...     print(f"step {global_step}: loss {loss:.3f}, learning rate {lr:g}")
    >>> with MonitoredLoop(step, model, optimizer, hooks=[CallFnHook(report, every_n_steps=4)]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    step 4: loss ..., learning rate 0.1
    step 8: loss ..., learning rate 0.1

    The parameters are a closure's: names of fetches, such as outputs and inputs of the step, and ``model``,
    ``optimizer``, ``session`` and ``outputs``, which is everything that the step returned. Tensors are on the CPU, with
    the values at the end of the run. On a GPU, the host does not wait for them, and the function is called a few runs
    later; what it reads from ``model`` or ``session`` is then the later run's. What the function returns is
    ignored. An exception from it propagates.

    Args:
        function: the function to call. With several ranks, it is called on every rank.
        every_n_steps, timer, every_n_secs, every_n_epochs: when to call it; give at most one, see
            :doc:`Choose a period </built-in-hooks>`.
        at_end: whether to call at a clean end of the loop as well, unless the function was called for that step.
        at_start: whether to call before the first run as well; in it, if the function names what only a run has, such
            as an output of the step.

    Raises:
        ValueError: two periods are given; there is no period, no ``at_start`` and no ``at_end``; or the period is not
            valid.
        TypeError: ``function`` is not callable, or takes ``*args`` or ``**kwargs`` and names no parameter.
        FetchError: from the run, a parameter without a default is not an available name.
    """

    def __init__(
        self,
        function: Callable[..., object],
        every_n_steps: int | None = None,
        timer: GivenTimer | None = None,
        at_end: bool = False,
        *,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        at_start: bool = False,
    ) -> None:
        if not callable(function):
            raise TypeError(f"function={shown(function)}: must be a function whose parameters are names of fetches")
        if names_nothing(function):
            raise TypeError(
                f"function={describe(function)}: it would be called without arguments, because it is called with what "
                "its parameters name, and it names none: give a function that does, such as lambda loss: print(loss)"
            )
        self._function = function
        self._at_start, self._at_end = at_start, at_end
        self.works_at_end = at_end
        timer = given_timer(timer, every_n_steps, every_n_secs, every_n_epochs)
        if timer is None and not (at_start or at_end):
            raise ValueError(
                "CallFnHook never calls its function: give every_n_steps, every_n_secs, every_n_epochs, timer, "
                "at_start=True or at_end=True"
            )
        self.set_timer(NeverTriggerTimer() if timer is None else timer)
        self.collective = bool(self.timer.signals)  # by their clocks, ranks may call the function in different runs
        self.fetches = _Arguments(function)

    def begin(self) -> None:
        super().begin()
        self._called_at: int | None = None
        self._has_begun = False

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        super().after_create_session(session, coord)
        # The loop also calls this for the session after a recovery, which is no second start.
        if self._at_start and not self._has_begun:
            try:
                arguments = session.run(self.fetches, who=self)
            except NoRunYetError:
                self.trigger.force()
            else:
                self._called_at = session.global_step
                self._call(to_host(arguments))
        self._has_begun = True

    def run_due(self, run_context: SessionRunContext, values: Arguments) -> None:
        # Noted here and not in _call(): on a GPU that is made some runs later, when the global step is another one, and
        # end() compares the step whose values the function gets.
        self._called_at = run_context.session.global_step
        run_context.when_ready(values, self._call)

    def end(self, session: Session) -> None:
        if self._at_end and session.global_step != self._called_at and not session.was_finished:
            arguments = session.run_available(self.fetches, who=self)
            if arguments is not None:
                self._call(to_host(arguments))

    def _call(self, arguments: Arguments) -> None:
        args, kwargs = arguments
        self._function(*args, **kwargs)


class FeedFnHook(StandardHook):
    """Passes keyword arguments to the step in every run (``tf.train.FeedFnHook``).

    >>> data = iter(batches)
    >>> feed = FeedFnHook(lambda: {"inputs": next(data)})
    >>> with MonitoredLoop(step, model, optimizer, hooks=[feed]) as loop:
    ...     while not loop.should_stop():
    ...         loss = loop.run()
    >>> loop.global_step, loop.stop_reason
    (8, 'StopIteration')

    The hook cannot feed the body of ``with loop.step()``, which has no parameters.

    Args:
        feed_fn: called before each step; returns the keyword arguments, a mapping from parameter name to value. If it
            raises ``StopIteration``, for instance because the data is exhausted, the loop ends cleanly.

    Raises:
        TypeError: ``feed_fn`` is not callable; from the run, it returned something other than a mapping.
        FeedError: from the run, another hook or the caller of ``run`` passes one of the arguments too.
    """

    def __init__(self, feed_fn: Callable[[], Mapping[str, object]]) -> None:
        if not callable(feed_fn):
            raise TypeError(
                f"feed_fn={shown(feed_fn)}: must be a function that returns a mapping, from parameter to value"
            )
        self._feed_fn = feed_fn

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(feed_dict=self._feed_fn())
