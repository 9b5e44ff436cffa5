"""Wording that error messages, log lines and reprs share."""

from __future__ import annotations

import difflib
import inspect
from typing import Any


def call_repr(instance: object, *args: Any, **kwargs: Any) -> str:
    """Return the call that creates ``instance`` again, without keyword arguments that have their default value."""
    parameters = inspect.signature(type(instance)).parameters
    shown = [repr(value) for value in args]
    shown += [
        f"{name}={value!r}"
        for name, value in kwargs.items()
        if name not in parameters or value is not parameters[name].default
    ]
    return f"{type(instance).__name__}({', '.join(shown)})"


def did_you_mean(name: str, names: list[str]) -> str:
    """Return a question that suggests the ``names`` most like ``name``, after a space; ``""`` if none is like it."""
    near = difflib.get_close_matches(name, names, n=3)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def shortened(names: list[str], limit: int = 24) -> str:
    """Return ``names`` as one line; a long list ends in the number of names left out."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
