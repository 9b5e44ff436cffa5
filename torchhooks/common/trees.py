"""Structures of lists, tuples, mappings and dataclasses: mapping their leaves, and copies of the tensors in them."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

Tree = Any
"""A structure of lists, tuples, mappings and dataclasses to any depth, or one of its leaves."""


class Leaf:
    """A class that is a leaf of every tree, also if it is a tuple or a dataclass."""


class GroupRates(list[Any]):
    """The learning rates of an optimizer with several parameter groups, which have the names :attr:`names`."""

    def __init__(self, rates: Iterable[float | torch.Tensor], names: list[str]) -> None:
        super().__init__(rates)
        self.names = names

    def __format__(self, spec: str) -> str:
        """Return the rates in the format ``spec``: as one number where they are equal."""
        texts = [format(rate, spec) if spec else str(rate) for rate in self]
        return texts[0] if all(rate == self[0] for rate in self) else f"[{', '.join(texts)}]"


_OfLeaf = Callable[[Any], object]
_Mapper = Callable[[_OfLeaf, Tree], Tree]


class _Mappers(dict[type, _Mapper | None]):
    """How to map the leaves of each type of structure, ``None`` for a type of leaf; found out once for each type."""

    def __missing__(self, kind: type) -> _Mapper | None:
        self[kind] = mapper = _mapper_for(kind)
        return mapper


_mappers = _Mappers()


def map_leaves(function: _OfLeaf, tree: object) -> Tree:
    """Return ``tree`` with ``function`` applied to everything that is not a list, tuple, mapping or dataclass.

    A mapping other than a dict or OrderedDict comes back as a dict, and a subclass of list other than
    :class:`GroupRates` as a list, because their constructors are unknown. A dataclass that can be called, and an
    object with ``compute()``, is a leaf.
    """
    mapper = _mappers[type(tree)]
    return function(tree) if mapper is None else mapper(function, tree)


def is_fixed(tree: object) -> bool:
    """Return whether ``tree`` always has the same leaves: it is a leaf, or a tuple of trees that are fixed."""
    return all(map(is_fixed, tree)) if type(tree) is tuple else _mappers[type(tree)] is None


def _mapper_for(kind: type) -> _Mapper | None:
    if issubclass(kind, Leaf) or callable(getattr(kind, "compute", None)):
        return None
    if issubclass(kind, list):
        return _map_rates if kind is GroupRates else _map_list
    if issubclass(kind, tuple):
        return _map_tuple
    if issubclass(kind, Mapping):
        return _map_mapping
    calls = any("__call__" in vars(base) for base in kind.__mro__)
    return _map_dataclass if dataclasses.is_dataclass(kind) and not calls else None


# List comprehensions, because a generator would turn a StopIteration that a closure raises into a RuntimeError.


def _map_list(function: _OfLeaf, tree: Tree) -> Tree:
    return [map_leaves(function, item) for item in tree]


def _map_rates(function: _OfLeaf, tree: GroupRates) -> GroupRates:
    return GroupRates([map_leaves(function, rate) for rate in tree], tree.names)


def _map_tuple(function: _OfLeaf, tree: Tree) -> Tree:
    items = [function(item) if _mappers[type(item)] is None else map_leaves(function, item) for item in tree]
    # The constructor of a named tuple takes its fields one by one, and the constructor of a torch.Size or a
    # torch.return_types.max takes an iterable of all of them.
    return getattr(tree, "_make", type(tree))(items)


def _map_mapping(function: _OfLeaf, tree: Tree) -> Tree:
    mapped = {key: map_leaves(function, item) for key, item in tree.items()}
    return OrderedDict(mapped) if type(tree) is OrderedDict else mapped


def _map_dataclass(function: _OfLeaf, tree: Tree) -> Tree:
    result = copy.copy(tree)
    for field in dataclasses.fields(tree):
        # The __setattr__ of a frozen dataclass raises an error.
        object.__setattr__(result, field.name, map_leaves(function, getattr(tree, field.name)))
    return result


def snapshot(value: Tree) -> Tree:
    """Return ``value`` with detached copies of its tensors and copies of its arrays, which no update changes."""
    kind = type(value)
    if kind is float or kind is int:
        return value
    return as_snapshot(value.detach().clone()) if kind is torch.Tensor else map_leaves(copied, value)


def copied(leaf: object) -> Tree:
    """Return a copy of a tensor, detached, or of an array; anything else as it is."""
    if isinstance(leaf, torch.Tensor):
        # Detached first, so that autograd does not record the clone.
        return as_snapshot(leaf.detach().clone())
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def as_snapshot(fresh: torch.Tensor) -> torch.Tensor:
    """Mark ``fresh``, a tensor that no other code has a reference to, as never updated, and return it."""
    fresh.is_torchhooks_snapshot = True  # type: ignore[attr-defined]
    return fresh


def is_snapshot(tensor: torch.Tensor) -> bool:
    """Return whether :func:`as_snapshot` has marked ``tensor``, so that it need not be copied again."""
    return hasattr(tensor, "is_torchhooks_snapshot")


def detached(value: object) -> Tree:
    """Return ``value`` with every tensor detached, without copying any."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)


def changes_in_place(tensor: torch.Tensor) -> int:
    """Return torch's own count of the changes of ``tensor`` in place, which is equal for views of the same memory."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - there is no public name
