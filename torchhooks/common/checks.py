"""Checks of plain arguments. Each returns the checked value, or raises an error that calls it ``name``."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from torchhooks.common.errors import hide_internal_frames
from torchhooks.common.text import did_you_mean, shortened, shown

_Function = TypeVar("_Function", bound=Callable[..., Any])


def whole_number(value: Any, name: str, at_least: int | None = None) -> int:
    """Return ``value`` as an int.

    Raises:
        ValueError: it is not a whole number, or it is less than ``at_least``, or 2**63 or more.
    """
    a_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    try:
        number = None if a_bool else operator.index(value)
    except TypeError:
        number = None
    if number is None or (at_least is not None and number < at_least):
        limit = "" if at_least is None else f", {at_least} or more"
        as_int = f", such as {int(value)}" if isinstance(value, float) and value.is_integer() else ""
        raise ValueError(f"{name}={shown(value)}: must be a whole number{limit}{as_int}{', not a bool' * a_bool}")
    if number >= 1 << 63:  # event files and checkpoints hold steps of 64 bits
        raise ValueError(f"{name}={shown(number)}: must be less than 2**63, as every global step is")
    return number


def seconds(value: float, name: str) -> float:
    """Return ``value`` as a number of seconds, which may be infinite; raise ValueError if it is not one."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except OverflowError:
        raise ValueError(f"{name}={shown(value)}: must fit into a float, whose largest number is 1.8e308") from None
    except (TypeError, ValueError):
        number = math.nan
    if not number >= 0:
        raise ValueError(f"{name}={shown(value)}: a period is a number of seconds, 0 or more")
    return number


def period(value: float, name: str) -> float:
    """Return ``value`` as a period in seconds, after which something happens again; raise ValueError if it is not one.

    An infinite period is refused, because it is more often the result of a wrong computation than meant.
    """
    secs = seconds(value, name)
    if secs == math.inf:
        raise ValueError(
            f"{name}={shown(value)}: a period must be finite; 1e9 seconds are longer than any training run"
        )
    return secs


def folder(value: Any, name: str) -> Any:
    """Return ``value``; raise TypeError if it is not a path, and ValueError if it is a path of a file."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise TypeError(f"{name}={shown(value)}: must be the path of a folder, a str or os.PathLike{by_name(value)}")
    if os.path.isfile(value):
        raise ValueError(f"{name}={shown(value)}: this is a file: give a folder, which is created if necessary")
    return value


def by_name(value: Any) -> str:
    """Return the end of an error, ``""`` unless ``value`` looks as if it was meant for another positional argument."""
    is_other = isinstance(value, (Collection, os.PathLike)) or callable(value)
    return "; pass arguments after the first by name" if is_other else ""


def exception_types(value: Any, name: str, example: str) -> tuple[type[BaseException], ...]:
    """Return ``value`` as a tuple; raise TypeError if it is not an iterable of exception types."""
    types = tuple(value) if isinstance(value, Iterable) else (None,)
    if all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in types):
        return types
    raise TypeError(f"{name}={shown(value)}: give exception types, such as {example}")


# -- calls ------------------------------------------------------------------------------------------------------------


def explains_wrong_calls(function: _Function) -> _Function:
    """Decorate a function that users call: a wrong call of it gets an error that says what it takes, at their line.

    An error that ``function`` raises about its arguments has no frames of torchhooks either.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide_internal_frames(error, lambda: _wrong_call(function, args, kwargs))
            raise

    return call  # type: ignore[return-value]


def check_keywords(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise a TypeError if the call ``name()`` was ``given`` a keyword that is not ``known``."""
    names = list(known)
    for keyword in given:
        if keyword not in names:
            takes = ", ".join(f"{each}=" for each in names)
            raise TypeError(f"{name} takes no {keyword}=.{did_you_mean(keyword, names)} It takes {takes}")


def _wrong_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return what is wrong with ``function(*args, **kwargs)``, whose arguments do not fit the signature."""
    parameters = list(inspect.signature(function).parameters.values())
    name = function.__name__
    if name == "__init__":
        name, parameters, args = type(args[0]).__name__, parameters[1:], args[1:]
    elif parameters and parameters[0].name == "self":
        name, parameters, args = f"{type(args[0]).__name__}.{name}", parameters[1:], args[1:]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    parameters = [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    names = [each.name for each in parameters]
    if not takes_any:
        try:
            check_keywords(name, kwargs, names)
        except TypeError as error:
            return str(error)
    by_position = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
    if len(args) > len(by_position):
        first = f"only {shortened(by_position)} can be" if by_position else "no argument can be"
        others = [f"{each}=" for each in names if each not in by_position]
        by_keyword = f": give the others by name, {shortened(others)}" if others else ""
        return f"{name}(..., {shown(args[len(by_position)])}): {first} given by position{by_keyword}"
    for given in by_position[: len(args)]:
        if given in kwargs:
            return f"{name} got {given}= by name, and the value of {given} by position too: give one of them"
    given_names = {*by_position[: len(args)], *kwargs}
    missing = [each for each in parameters if each.default is each.empty and each.name not in given_names]
    if not missing:
        return None
    example = _choices(missing[0])
    return f"{name} needs {shortened([f'{each.name}=' for each in missing])}: give it{example}. It takes " + shortened(
        [f"{each}=" for each in names]
    )


def _choices(parameter: inspect.Parameter) -> str:
    """Return the values that ``parameter`` can have, if its annotation, which is text, lists them."""
    kind, _, listed = str(parameter.annotation).removesuffix("]").partition("[")
    if kind != "Literal":
        return ""
    return ", " + " or ".join(f"{parameter.name}={value.strip()}" for value in listed.split(","))
