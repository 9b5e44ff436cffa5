"""Checks of arguments, each of which returns the checked value or raises an error, and of optional libraries."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import operator
import os
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from torchhooks.common.files import place
from torchhooks.common.text import did_you_mean, shown

_Function = TypeVar("_Function", bound=Callable[..., Any])


def whole_number(value: Any, name: str, at_least: int | None = None) -> int:
    """Return ``value`` as an int.

    Raises:
        ValueError: it is not a whole number, or it is less than ``at_least``, or 2**63 or more.
    """
    a_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    try:
        # Unlike int(), operator.index() takes integers of NumPy and torch, and refuses 2.5 instead of truncating it.
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
    # Not number < 0, which is false for NaN.
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


def folder(value: object, name: str) -> Any:
    """Return where the folder ``value`` is, see :func:`torchhooks.common.files.place`.

    Raises:
        TypeError: it is not a path.
        ValueError: it is the path of a file.
    """
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise TypeError(f"{name}={shown(value)}: must be the path of a folder, a str or os.PathLike{by_name(value)}")
    # Before place(): under check, the file of the real training run is not in the scratch folder.
    if os.path.isfile(value):
        raise ValueError(f"{name}={shown(value)}: this is a file: give a folder, which is created if necessary")
    return value if isinstance(value, bytes) else place(value)


def check_exists(path: str) -> None:
    """Raise a FileNotFoundError if nothing is at ``path``, which a command was given."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} does not exist")


def by_name(value: object) -> str:
    """Return the end of an error, ``""`` unless ``value`` looks as if it was meant for another positional argument."""
    is_other = isinstance(value, (Collection, os.PathLike)) or callable(value)
    return "; pass arguments after the first by name" if is_other else ""


def exception_types(value: object, name: str, example: str) -> tuple[type[BaseException], ...]:
    """Return ``value`` as a tuple; raise TypeError if it is not an iterable of exception types."""
    types = tuple(value) if isinstance(value, Iterable) else (None,)
    if all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in types):
        return types
    raise TypeError(f"{name}={shown(value)}: give exception types, such as {example}")


# -- calls ------------------------------------------------------------------------------------------------------------


def suggests_keywords(create: _Function) -> _Function:
    """Decorate a constructor: a keyword that it does not take is a TypeError that lists the right ones."""
    parameters = list(inspect.signature(create).parameters.values())[1:]  # without self
    names = [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)

    @functools.wraps(create)
    def checked(self: object, *args: object, **kwargs: object) -> None:
        if not takes_any:
            check_keywords(type(self).__name__, kwargs, names)
        create(self, *args, **kwargs)

    return checked  # type: ignore[return-value]


def check_keywords(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise a TypeError if the call ``name()`` was ``given`` a keyword that is not ``known``."""
    names = list(known)
    for keyword in given:
        if keyword not in names:
            takes = ", ".join(f"{each}=" for each in names)
            raise TypeError(f"{name} takes no {keyword}=.{did_you_mean(keyword, names)} It takes {takes}")


# -- libraries ---------------------------------------------------------------------------------------------------------


def import_optional(library: str, extra: str) -> Any:
    """Import ``library``, which the extra ``extra`` of torchhooks installs.

    Raises:
        ImportError: it cannot be imported. The message says how to install it.
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        way_out = f"pip install torchhooks[{extra}], or pip install {library}"
        raise ImportError(f"{library} cannot be imported: {way_out}") from error
