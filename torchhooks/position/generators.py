"""Random generators that the data hold: finding them, and reading and setting their states."""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from torchhooks.common.random_states import without_arrays

_MOST_OBJECTS = 2000
_MOST_DEPTH = 8
_MOST_MEMBERS = 100  # of a list or a dict: a larger one is the data
_OPAQUE = (str, bytes, int, float, complex, type, types.ModuleType, np.ndarray, torch.Tensor, torch.nn.Module)


def find_generators(holder: object) -> dict[str, Any]:
    """Return the generators that ``holder`` reaches through attributes and small containers, by their path.

    Finds ``torch.Generator``, ``numpy.random.Generator``, ``numpy.random.RandomState`` and ``random.Random``, in a
    sampler, a dataset, or what a wrapper such as tqdm iterates. Each is found once, under its shortest path.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    pending: deque[tuple[str, Any, int]] = deque([("", holder, 0)])
    while pending and len(seen) < _MOST_OBJECTS:
        path, value, depth = pending.popleft()
        if id(value) in seen or value is None or isinstance(value, _OPAQUE):
            continue
        seen.add(id(value))
        if isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
            found[path] = value
        elif depth < _MOST_DEPTH:
            pending.extend((f"{path}{name}", member, depth + 1) for name, member in _members(value))
    return found


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple, set, frozenset, deque)) and len(value) <= _MOST_MEMBERS:
        yield from ((f"[{index}]", member) for index, member in enumerate(value))
    elif isinstance(value, Mapping) and len(value) <= _MOST_MEMBERS:
        yield from ((f"[{key!r}]", member) for key, member in value.items())
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    for name, member in getattr(value, "__dict__", {}).items():
        if name != "_iterator":  # of a DataLoader: its workers, which are not restored
            yield f".{name}", member
    for index, cell in enumerate(getattr(value, "__closure__", None) or ()):
        try:
            yield f".__closure__[{index}]", cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def generator_states(holder: object) -> dict[str, Any]:
    """Return the states of the generators of ``holder`` by path, as plain data."""
    return {path: _state(generator) for path, generator in find_generators(holder).items()}


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return without_arrays(generator.bit_generator.state)
    return without_arrays(generator.get_state(legacy=False))


def set_generator_state(generator: Any, state: Any) -> None:
    """Set the state of a generator that :func:`generator_states` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def matched_generators(holder: object, states: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the generators of ``holder`` that are among the saved ``states``, with their state."""
    found = find_generators(holder)
    return [(found[path], state) for path, state in states.items() if path in found]
