"""Checks of plain arguments. Each returns the checked value, or raises an error that calls it ``name``."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from torchhooks.text import shown


def whole_number(value: Any, name: str, at_least: int | None = None) -> int:
    """Return ``value`` as an int; raise ValueError if it is not a whole number, or less than ``at_least``."""
    a_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    try:
        number = None if a_bool else operator.index(value)
    except TypeError:
        number = None
    if number is None or (at_least is not None and number < at_least):
        limit = "" if at_least is None else f", {at_least} or more"
        raise ValueError(f"{name}={shown(value)}: must be a whole number{limit}{', not a bool' if a_bool else ''}")
    return number


def seconds(value: float, name: str) -> float:
    """Return ``value`` as a period in seconds; raise ValueError if it is not one."""
    try:
        period = float(value)
    except (TypeError, ValueError):
        period = math.nan
    if not period >= 0:
        raise ValueError(f"{name}={shown(value)}: a period is a number of seconds, 0 or more")
    return period


def exception_types(value: Any, name: str, example: str) -> tuple[type[BaseException], ...]:
    """Return ``value`` as a tuple; raise TypeError if it is not an iterable of exception types."""
    types = tuple(value) if isinstance(value, Iterable) else (None,)
    if all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in types):
        return types
    raise TypeError(f"{name}={shown(value)}: give exception types, such as {example}")
