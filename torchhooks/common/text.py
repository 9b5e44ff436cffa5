"""Wording that error messages, log lines, reprs and configs share."""

from __future__ import annotations

import difflib
import inspect
import os
import reprlib
from collections.abc import Callable, Mapping
from typing import Any


def call_repr(instance: object, /, *args: Any, **kwargs: Any) -> str:
    """Return the call that creates ``instance`` again, without keyword arguments that have their default value."""
    parameters = inspect.signature(type(instance)).parameters
    arguments = [shown(value) for value in args]
    arguments += [
        f"{name}={shown(value)}"
        for name, value in kwargs.items()
        if name not in parameters or value is not parameters[name].default
    ]
    return f"{type(instance).__name__}({', '.join(arguments)})"


def bound_arguments(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """Return the arguments of a call of ``method``, without the first, which is ``self``; defaults are left out.

    Raises:
        TypeError: the arguments do not fit the signature.
    """
    signature = inspect.signature(method)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    return signature.bind(*args[1:], **kwargs)


def bound_repr(instance: object, bound: inspect.BoundArguments) -> str:
    """Return the call that creates ``instance`` again, which was created with the arguments ``bound``.

    Required arguments are shown by position, but a number after the first argument by name.
    """
    args: list[Any] = []
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        parameter = bound.signature.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += value
        elif parameter.kind is parameter.VAR_KEYWORD:
            named |= value
        elif parameter.default is not parameter.empty or parameter.kind is parameter.KEYWORD_ONLY or named:
            if value is not parameter.default:
                named[name] = value
        elif args and isinstance(value, int | float):
            named[name] = value
        else:
            args.append(value)
    return call_repr(instance, *args, **named)


def did_you_mean(name: str, names: list[str]) -> str:
    """Return a question that suggests the ``names`` most like ``name``, after a space; ``""`` if none is like it."""
    inner = name.partition(".")[2]  # "0.weight" of "model.0.weight"
    near = [inner] if inner in names else difflib.get_close_matches(name, names, n=3)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


class _Shown(reprlib.Repr):
    """The repr of plain data. A module or an optimizer would fill the screen, and a tensor may be on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 12
        self.maxstring = self.maxlong = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python refuses to print more than 4300 digits
            return f"<int of {x.bit_length()} bits>"

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, os.PathLike):
            return super().repr1(os.fspath(x), level)
        bulky = hasattr(x, "state_dict") or hasattr(x, "shape")
        return f"{type(x).__name__}(...)" if bulky and not isinstance(x, type) else super().repr_instance(x, level)


shown = _Shown().repr
"""Return the repr of a value for a message, not too long: only the type of a module, an optimizer or a tensor."""


def shortened(names: list[str], limit: int = 24) -> str:
    """Return ``names`` as one line; a long list ends in the number of names left out."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def flat_config(config: Mapping[Any, Any]) -> dict[str, bool | int | float | str]:
    """Return ``config`` without nested mappings: ``{"model": {"width": 3}}`` becomes ``{"model.width": 3}``.

    A value other than a number or a string becomes its repr.
    """
    flat: dict[str, bool | int | float | str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}.{rest}": part for rest, part in flat_config(value).items()}
        else:
            flat[str(name)] = value if isinstance(value, (bool, int, float, str)) else shown(value)
    return flat
