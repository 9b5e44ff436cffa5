"""Wording that error messages, log lines, reprs and configs share."""

from __future__ import annotations

import difflib
import inspect
import json
import math
import os
import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torchhooks.common.memory import array_of, ordinary
from torchhooks.common.trees import GroupRates, Tree, map_leaves


def call_repr(instance: object, /, *args: object, **kwargs: object) -> str:
    """Return the call that creates ``instance`` again, without keyword arguments that have their default value."""
    parameters = inspect.signature(type(instance)).parameters
    arguments = [shown(value) for value in args]
    arguments += [
        f"{name}={shown(value)}"
        for name, value in kwargs.items()
        # By identity, because == of an argument may be another tensor, or code of the script.
        if name not in parameters or value is not parameters[name].default
    ]
    return f"{type(instance).__name__}({', '.join(arguments)})"


def bound_arguments(method: Callable[..., object], /, *args: object, **kwargs: object) -> inspect.BoundArguments:
    """Return the arguments of a call of ``method``, without the first, which is ``self``; defaults are left out.

    Raises:
        TypeError: the arguments do not fit the signature.
    """
    signature = inspect.signature(method)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    return signature.bind(*args[1:], **kwargs)


def bound_repr(instance: object, bound: inspect.BoundArguments) -> str:
    """Return the call that creates ``instance`` again, which was created with the arguments ``bound``.

    Required arguments are shown by position, but a number after the first argument by name. So is a first argument that
    is a path, and ``...`` is the default of what is required although it comes after one that is not.
    """
    args: list[object] = []
    named: dict[str, object] = {}
    for name, value in bound.arguments.items():
        parameter = bound.signature.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += value
        elif parameter.kind is parameter.VAR_KEYWORD:
            named |= value
        elif name == next(iter(bound.signature.parameters)) and isinstance(value, str | os.PathLike):
            args.append(value)
        elif parameter.default not in (parameter.empty, ...) or parameter.kind is parameter.KEYWORD_ONLY or named:
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
        bits = x.bit_length()
        # Python refuses to print more than 4300 digits, and reprlib of Python 3.14 then shows an address.
        return f"<int of {bits} bits>" if bits > 10_000 else super().repr_int(x, level)

    def repr_instance(self, x: object, level: int) -> str:
        if isinstance(x, os.PathLike):
            return super().repr1(os.fspath(x), level)
        bulky = hasattr(x, "state_dict") or hasattr(type(x), "shape")
        return f"{type(x).__name__}(...)" if bulky and not isinstance(x, type) else super().repr_instance(x, level)


shown = _Shown().repr
"""Return the repr of a value for a message, not too long: only the type of a module, an optimizer or a tensor."""


def plain(text: str) -> str:
    """Return ``text`` without what could control a terminal, such as its cursor or its colours: that is escaped.

    New lines and tabs stay.
    """
    return "".join([char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text])


def json_text(value: object) -> str:
    """Return ``value`` as JSON over several lines.

    JSON has no NaN and no infinity, so they become the strings that :class:`torchhooks.JsonLinesWriter` writes.
    """
    return json.dumps(map_leaves(_finite, value), indent=2, allow_nan=False)


def _finite(value: object) -> object:
    return float_name(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_error(message: str, as_json: bool) -> None:
    """Print why a command could not do what it was asked: on stderr, or as JSON where the answer would be."""
    if as_json:
        print(json_text({"error": message}))
    else:
        print(plain(message), file=sys.stderr)


def float_name(value: float) -> str:
    """Return the name of NaN or an infinity in JSON."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def kind_of(value: object) -> str:
    """Return what a message says of a ``value`` that should be a number: the shape of a tensor or an array."""
    if isinstance(value, GroupRates):
        names = shortened([f'"lr/{name}"' for name in value.names], 4)
        return f"the learning rates of {len(value)} parameter groups, which are {names}"
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "a nested tensor"
        is_real = not (value.is_complex() or value.is_quantized)
        kind = "tensor" if type(value) in (torch.Tensor, torch.nn.Parameter) else type(value).__name__
        return f"a {kind} of shape {tuple(value.shape)}{'' if is_real else f' and dtype {value.dtype}'}"
    shape = getattr(value, "shape", None)
    return shown(value) if shape is None else f"an array of shape {tuple(shape)}"


def installed_version() -> str:
    """Return the version of torchhooks."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torchhooks")
    except PackageNotFoundError:  # a checkout on the path that is not installed
        return "0+unknown"


def shortened(names: list[str], limit: int = 24) -> str:
    """Return ``names`` as one line; a long list ends in the number of names left out."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def flat_config(config: Mapping[Any, object]) -> dict[str, bool | int | float | str]:
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


# -- values, by tag ----------------------------------------------------------------------------------------------------


def tagged_line(values: Mapping[str, object]) -> str:
    """Return printable ``values`` by tag as one line: ``"loss = 0.1, step = 7"``."""
    return ", ".join([f"{tag} = {_text(value)}" for tag, value in values.items()])


def by_tag(tensors: object, name: str = "tensors", *, in_order: bool = True) -> dict[str, Any]:
    """Return the fetches by the tags under which they are logged, in the order of the line.

    A dict is sorted by tag unless ``in_order``.
    """
    if not isinstance(tensors, (Mapping, list, tuple)):
        raise TypeError(
            f"{name}={shown(tensors)}: give a dict from tag to fetch, or a list of fetches, such as ['loss']"
        )
    if not tensors:
        raise ValueError(f"{name}={shown(tensors)}: there is nothing to log; give at least one fetch, such as ['loss']")
    if isinstance(tensors, Mapping):
        return {tag: tensors[tag] for tag in (tensors if in_order else sorted(tensors))}
    tagged: dict[str, Any] = {}
    for fetch in tensors:
        tag = tag_of(fetch)
        if tag in tagged:
            raise ValueError(f"{name}={shown(tensors)}: two would be logged as {tag!r}; give a dict from tag to fetch")
        tagged[tag] = fetch
    return tagged


def tag_of(fetch: object) -> str:
    """Return the tag under which the value of ``fetch`` is logged if the user gives none."""
    return fetch if isinstance(fetch, str) else getattr(fetch, "__name__", type(fetch).__name__)


def printable(value: Tree) -> Tree:
    """Return a tensor as a NumPy scalar or array, in float32 if NumPy lacks its dtype; anything else as it is.

    A tensor that cannot be one, such as a nested one, is a text.
    """
    if isinstance(value, torch.Tensor):
        try:
            value = array_of(value)
        except (TypeError, RuntimeError):  # sparse, conjugate, or a dtype that NumPy lacks
            value = _printable(value)
    return value[()] if isinstance(value, np.ndarray) else value


def _printable(tensor: torch.Tensor) -> object:
    try:
        tensor = ordinary(tensor)
        return array_of(tensor if tensor.is_complex() else tensor.float())
    except (TypeError, RuntimeError):
        return kind_of(tensor)


class _Bare:
    """Has the ``str`` of its value as ``repr``: a list prints reprs, and a NumPy scalar's includes its type."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        return str(self._value)


def _text(value: object) -> str:
    if isinstance(value, (np.generic, float, int, str)):
        return str(value)
    if isinstance(value, GroupRates):
        return f"{value}"
    with np.printoptions(suppress=True):
        return str(map_leaves(lambda leaf: _Bare(leaf) if isinstance(leaf, (np.generic, np.ndarray)) else leaf, value))
