"""Objects whose state can be kept in a checkpoint, and the plain data that it consists of."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any, Protocol

import numpy as np
import torch

from torchhooks.common.trees import Tree


class Stateful(Protocol):
    """An object that a checkpoint can hold: a module, an optimizer, a scheduler, a scaler, a loader, a hook.

    A class needs no base class for that, only the two methods. An object that is passed in ``state`` of the loop, and a
    hook that has them, are in every checkpoint:

    >>> class Moving:  # an average that continues after a restart
    ...     def __init__(self):
    ...         self.value = 0.0
    ...
    ...     def state_dict(self):
    ...         return {"value": self.value}
    ...
    ...     def load_state_dict(self, state_dict):
    ...         self.value = state_dict["value"]
    >>> average = Moving()
    >>> average.value = 0.25
    >>> path = Saver().save(Session(state={"average": average}), "run/model.ckpt", 100)
    >>> restarted = Moving()
    >>> Saver().restore(Session(state={"average": restarted}), path)
    >>> restarted.value
    0.25

    A state consists of tensors, numbers, strings and ``None``, in dicts, lists, tuples and sets: loading an object of
    another type could run code. Saving anything else is a :class:`torchhooks.CheckpointError` that says where it is.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return everything that is needed to continue from here."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Continue from ``state_dict``, which an earlier :meth:`state_dict` returned."""
        ...


def has_state(value: object) -> bool:
    """Return whether ``value`` has both methods of :class:`Stateful`."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def has_readable_state(value: object) -> bool:
    """Return whether the state of ``value`` can be read without an effect: it is no loader, which may start workers."""
    return has_state(value) and (isinstance(value, torch.nn.Module) or not isinstance(value, Iterable))


# -- plain data: what torch loads with weights_only=True, so that no file can run code ---------------------------------

# Exactly these types, which torch's weights_only unpickler accepts in every version since 2.6. It refuses subclasses.
_LEAVES = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout}
)
_CONTAINERS = frozenset({dict, OrderedDict, Counter, list, tuple, set, bytearray})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_LAYOUTS = frozenset(
    {torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)
_MOST_BITS = 2000  # torch reads integers of at most 255 bytes


class PlainCopy:
    """Copies containers, and lists in ``problems`` whatever in them could not be loaded again."""

    def __init__(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.problems: list[str] = []
        self.way_out = ""
        """What to return instead of an object of another type, if a problem is one."""
        self._copy = copy
        self._inside: set[int] = set()
        # By the place of a storage, the first tensor on it, which keeps the place, and the path of that tensor.
        self._views: dict[tuple[torch.device, int], tuple[torch.Tensor, tuple[object, ...]]] = {}

    def __call__(self, value: object, keys: tuple[object, ...]) -> Tree:
        if isinstance(value, torch.Tensor) and type(value) in _TENSORS and _has_values(value):
            # First, because a state may have thousands of small tensors.
            return self._copy(value) if self._has_one_dtype(value, keys) else None
        if isinstance(value, np.generic):
            value = value.item()
        problem = _problem(value)
        if problem is None and id(value) in self._inside:
            problem = "part of itself"
        if problem is not None:
            if problem == type_of(value):
                self.way_out = (
                    " Loading an object of another type could run code: have state_dict() return tensors, numbers, "
                    "strings and None, in dicts, lists, tuples and sets, or name a variable in Variables(pickled=...)."
                )
            self._note(keys, problem)
            return None
        return self._container(value, keys) if type(value) in _CONTAINERS else value

    def _has_one_dtype(self, tensor: torch.Tensor, keys: tuple[object, ...]) -> bool:
        """Return whether no tensor of another dtype views the memory of ``tensor``, which torch refuses to save."""
        if tensor.layout is not torch.strided:
            return True
        try:
            address = tensor.untyped_storage().data_ptr()
        except RuntimeError as error:  # such as a zero tensor of forward-mode differentiation
            self._note(keys, f"a tensor whose memory cannot be read: {error}")
            return False
        first, other = self._views.setdefault((tensor.device, address), (tensor, keys))
        if first.dtype == tensor.dtype or not address:
            return True
        self._note(keys, f"a view of the memory of {_path(other)} as another dtype: leave it out, or clone() it")
        return False

    def _note(self, keys: tuple[object, ...], problem: str) -> None:
        self.problems.append(f"{_path(keys)} is {problem}")

    def _container(self, value: Tree, keys: tuple[object, ...]) -> Tree:
        # Only while its items are copied: a container may be in a state twice, but not in itself.
        self._inside.add(id(value))
        try:
            if isinstance(value, dict):
                return self._dict(value, keys)
            return type(value)([self(item, (*keys, place)) for place, item in enumerate(value)])
        finally:
            self._inside.discard(id(value))

    def _dict(self, value: dict[Tree, Tree], keys: tuple[object, ...]) -> dict[Tree, Tree]:
        plain = type(value)()
        for key, item in value.items():
            plain[key if type(key) is str else self(key, (*keys, key))] = self(item, (*keys, key))
        # torch keeps the version of each module in an attribute of this dict, _metadata. Without it, load_state_dict()
        # would take the state for one of an old version, and convert it.
        if isinstance(value, OrderedDict):
            vars(plain).update(self._dict(vars(value), keys))
        return plain


def deep_copy(value: Tree) -> Tree:
    """Return what ``copy.deepcopy(value)`` does, also with tensors in a compressed sparse layout, which torch lacks."""
    memo: dict[int, torch.Tensor] = {}

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout not in (torch.strided, torch.sparse_coo):
            memo[id(tensor)] = tensor.detach().clone()
        return tensor

    # Called for its walk alone: clone() gets each tensor, and what is returned is dropped. deepcopy() takes what memo
    # has under the id of an object for the copy of it.
    PlainCopy(clone)(value, ("",))
    return copy.deepcopy(value, memo)


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.layout in _LAYOUTS and not (tensor.is_meta or tensor.is_nested)


def _path(keys: tuple[object, ...]) -> str:
    return f"{keys[0]}{''.join(f'[{key!r}]' for key in keys[1:])}"


def _problem(value: object) -> str | None:
    """Return why ``value``, apart from its contents, could not be loaded again; ``None`` if it could."""
    if isinstance(value, torch.Tensor):
        return _tensor_problem(value)
    if type(value) is int and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length()} bits, torch reads up to {_MOST_BITS}"
    if type(value) is bytes and not value:
        return "empty bytes, which torch does not read: use None"
    if isinstance(value, np.ndarray):
        return "a NumPy array: convert it with torch.from_numpy()"
    return None if type(value) in _LEAVES or type(value) in _CONTAINERS else type_of(value)


def _tensor_problem(tensor: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(tensor):
        return "without a shape yet: call the model first"
    if hasattr(tensor, "to_local"):
        return (
            "a DTensor: return its to_local(), and give the object an attribute per_rank = True, so that each rank "
            "saves its own shard"
        )
    if tensor.is_nested:
        return "a nested tensor, which cannot be loaded again: use the list of its unbind()"
    if type(tensor) in _TENSORS and not tensor.is_meta:
        return f"of the layout {tensor.layout}, which torch does not save: convert it with to_dense()"
    if type(tensor) in _TENSORS:
        return "on the meta device, where it has no values: give it some with to_empty()"
    return f"{type_of(tensor)}, a subclass of Tensor: convert it to a plain tensor"


def type_of(value: object) -> str:
    return "of type " + f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
