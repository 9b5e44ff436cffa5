"""The user's step: its parameters, its inputs by name, and which feeds it accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from torchhooks.common.errors import FeedError, LifecycleError
from torchhooks.common.text import shortened, shown


class Step:
    """The user's function, and what its signature says.

    Args:
        function: any callable; ``None`` for a loop without one, which has :func:`no_step`. For a module, the signature
            is its ``forward``'s.

    Raises:
        TypeError: ``function`` is not callable.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        if function is not None and not callable(function):
            raise TypeError(f"step={shown(function)}: must be a function, called as step(*args, **kwargs)")
        self.function = no_step if function is None else function
        self._signature = None if function is None else _signature(function)
        parameters = {} if self._signature is None else self._signature.parameters
        self.parameters = frozenset(parameters)
        """The names of its parameters."""
        self._takes_any = self._signature is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._feedable = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the step is called with, by parameter name, defaults included."""
        bound = self._bound(args, kwargs)
        if bound is None:
            return dict(kwargs)
        bound.apply_defaults()
        inputs = dict(bound.arguments)
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                inputs.update(inputs.pop(name, {}))
        return inputs

    def check_feeds(self, feeders: Mapping[str, object], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check what hooks feed against the signature and against what the caller of ``run`` passed.

        Args:
            feeders: the hook that feeds each parameter, by parameter name.
            args: the positional arguments of ``run``.
            kwargs: the keyword arguments of ``run``.

        Raises:
            TypeError: the step has no such parameter.
            FeedError: the caller passed it too, by name or by position.
        """
        by_position = self._bound(args, {})
        given = {*kwargs, *(() if by_position is None else by_position.arguments)}
        for name, who in feeders.items():
            if name in given:
                raise FeedError(
                    f"{who} feeds {name!r}, which the caller of run() passed too: leave it out of the call, or the "
                    "hook out of the loop"
                )
            if not self._takes_any and name not in self._feedable:
                takes = f": {shortened(self._feedable)}" if self._feedable else " no arguments by name"
                raise TypeError(f"{who} feeds {name!r}, which the step does not take. It takes{takes}.")

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments | None:
        try:
            return None if self._signature is None else self._signature.bind_partial(*args, **kwargs)
        except TypeError:  # functools.wraps shows the signature of the wrapped function, which may take other arguments
            return None


def no_step(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error: the step function of a loop that has none."""
    raise LifecycleError(
        "run() was called on a loop without a step function: make the step in the body of with loop.step(), or pass a "
        "function to MonitoredLoop(step, ...)"
    )


def takes_one_argument(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` can be called with exactly one positional argument, as far as its signature says."""
    signature = _signature(function)
    if signature is None:
        return True
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return len(kinds) == 1 and kinds[0] not in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    function = getattr(function, "_orig_mod", function)  # torch.compile's wrapper hides the signature
    try:
        return inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except (TypeError, ValueError):  # some builtins have no signature
        return None
