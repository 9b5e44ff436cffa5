"""The user's step as a function: what it takes, what it was given, what may be fed to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from torchhooks.errors import FeedError
from torchhooks.hook import RunMetadata, SessionRunArgs, SessionRunHook
from torchhooks.log import logger
from torchhooks.stateful import Stateful, has_state
from torchhooks.text import shortened
from torchhooks.watch import ModuleWatch


class Step:
    """What there is to know of a step beyond calling it.

    Args:
        function: any callable; a module is asked for the signature of its ``forward``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise TypeError(f"step={function!r}: must be a function, called as step(*args, **kwargs)")
        self.function = function
        signature = _signature(function)
        self._signature = signature
        parameters = {} if signature is None else signature.parameters
        self.parameters = frozenset(parameters)
        """The names of what it takes."""
        self._takes_any = signature is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._feedable = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What the step is called with, by parameter name, defaults included."""
        bound = self._bound(args, kwargs)
        if bound is None:
            return dict(kwargs)
        bound.apply_defaults()
        inputs = dict(bound.arguments)
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                inputs.update(inputs.pop(name, {}))
        return inputs

    def check_feeds(
        self, asked: Iterable[tuple[object, SessionRunArgs]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise if something is fed that the step does not take, or that the caller gave too.

        Raises:
            TypeError: the step has no such parameter.
            FeedError: the caller gave it, by name or by position.
        """
        feeders = {name: who for who, request in asked for name in request.feed_dict or ()}
        by_position = self._bound(args, {})
        given = {*kwargs, *(() if by_position is None else by_position.arguments)}
        for name, who in feeders.items():
            if name in given:
                raise FeedError(
                    f"{who} feeds {name!r}, which the caller of run() gave too: leave it out of the call, or the hook "
                    "out of the loop"
                )
            if not self._takes_any and name not in self._feedable:
                raise TypeError(
                    f"{who} feeds {name!r}, which the step does not take. It takes: {shortened(self._feedable)}."
                )

    def make(self, args: Any, kwargs: Any, watch: ModuleWatch, trace: bool) -> tuple[Any, RunMetadata]:
        """Call the step while ``watch`` watches, and under torch's profiler if there is to be a ``trace``."""
        try:
            if not trace:
                return self.function(*args, **kwargs), RunMetadata()
            from torch.profiler import profile

            with profile() as recorded:
                outputs = self.function(*args, **kwargs)
            return outputs, RunMetadata(recorded)
        finally:
            watch.close()

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments | None:
        try:
            return None if self._signature is None else self._signature.bind_partial(*args, **kwargs)
        except TypeError:  # a decorator with functools.wraps may take other arguments than the function it speaks for
            return None


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    function = getattr(function, "_orig_mod", function)  # what torch.compile wraps
    try:
        return inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except (TypeError, ValueError):  # some builtins do not say what they take
        return None


def takes_one_argument(function: Callable[..., Any]) -> bool:
    """Whether ``function`` has exactly one parameter left to give, by position, as far as it says."""
    signature = _signature(function)
    if signature is None:
        return True
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return len(kinds) == 1 and kinds[0] not in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


def check_hooks(hooks: Iterable[SessionRunHook]) -> tuple[SessionRunHook, ...]:
    """``hooks``, copied, or a TypeError that names what is no hook."""
    if not isinstance(hooks, Iterable):
        example = f"[{hooks!r}]" if isinstance(hooks, SessionRunHook) else "[StopAtStepHook(last_step=1000)]"
        raise TypeError(f"hooks={hooks!r}: give a list of hooks, {example}")
    copied = tuple(hooks)
    for index, hook in enumerate(copied):
        if isinstance(hook, type) and issubclass(hook, SessionRunHook):
            raise TypeError(f"hooks[{index}] is the class {hook.__name__}: give an instance, {hook.__name__}(...)")
        if not isinstance(hook, SessionRunHook):
            raise TypeError(f"hooks[{index}]={hook!r} is no hook: a hook is an instance of SessionRunHook")
    return copied


def check_hook_states(hooks: Iterable[SessionRunHook]) -> dict[str, Stateful]:
    """The hooks that have a state, by the name under which it is saved: their ``name``, or that of their class."""
    named: dict[str, Any] = {}
    saver: SessionRunHook | None = None
    for hook in hooks:
        if getattr(hook, "saves_checkpoints", False):
            saver = saver or hook
        if has_state(hook):
            name = getattr(hook, "name", None) or type(hook).__name__
            if name in named:
                raise ValueError(
                    f"{named[name]!r} and {hook!r} would both keep their state as {name!r} in checkpoints: give one of "
                    "them another name, in an attribute called name"
                )
            named[name] = hook
            if saver is not None:
                logger.warning(
                    "%r stands behind %r, so that checkpoints have its state from before the run: move it to the front",
                    hook,
                    saver,
                )
    return named


def check_model(model: Any) -> None:
    """Raise a TypeError if ``model`` is neither a module nor None."""
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model={model!r}: must be a torch.nn.Module; put several into one torch.nn.ModuleDict")


def check_optimizer(optimizer: Any, step_unit: str) -> None:
    """Raise if ``optimizer`` is none, or if it cannot count steps where it has to."""
    if step_unit not in ("run", "optimizer_step"):
        raise ValueError(f'step_unit={step_unit!r}: must be "run" or "optimizer_step"')
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer={optimizer!r}: must be a torch.optim.Optimizer. Of several, give the one that counts, and the "
            'others in state={"name": optimizer}'
        )
    if step_unit == "optimizer_step" and not hasattr(optimizer, "register_step_post_hook"):
        raise ValueError(
            f'step_unit="optimizer_step" counts the steps of an optimizer, and optimizer={optimizer!r}: give the '
            'torch.optim.Optimizer that the step uses, or step_unit="run"'
        )


def check_state(state: Mapping[str, Stateful] | None) -> Mapping[str, Stateful]:
    """``state``, copied, or a TypeError that names what has no state."""
    copied = dict(state or {})
    for name, part in copied.items():
        if not has_state(part):
            raise TypeError(f"state[{name!r}]={part!r}: must have state_dict() and load_state_dict()")
    return copied
