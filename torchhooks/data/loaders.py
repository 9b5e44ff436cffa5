"""The loaders of the ``until_stop`` loops, and their random generators: their states in a checkpoint."""

from __future__ import annotations

import random
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader

from torchhooks.common.errors import brief
from torchhooks.common.log import logger
from torchhooks.common.random_states import random_states, set_random_states, without_arrays
from torchhooks.common.stateful import Stateful, has_state
from torchhooks.data.cursor import Saved, name_of

if TYPE_CHECKING:  # NumPy loads its random numbers when they are first used
    RandomGenerator: TypeAlias = torch.Generator | random.Random | np.random.Generator | np.random.RandomState

_OPAQUE = (type, types.ModuleType, np.ndarray, torch.Tensor, torch.nn.Module)
# How far find_generators() looks into a loader. A generator is a few attributes deep, in a sampler or a transform.
# Whatever is much larger than that is the data, which it would take seconds to walk through.
_MOST_DEPTH = 8
_MOST_OBJECTS = 2000
_MOST_MEMBERS = 100  # of a list or a tuple: a larger one is the data


class Loaders:
    """The loaders of one loop, by the keys of their cursors.

    A state consists of the states of the loader's random generators and, if it has one, its own ``state_dict()``.

    Args:
        state: what else is in the loop's checkpoints. A loader in it is not saved or loaded twice.
    """

    def __init__(self, state: Mapping[str, Stateful]) -> None:
        self._state = state
        self._live: dict[str, Callable[[], object]] = {}
        self._saved: dict[str, Saved] = {}
        """The states in the restored checkpoint of loaders that have not been iterated since."""
        self._restored_generators: list[RandomGenerator] = []
        self._stateless: set[str] = set()

    def load_state_dict(self, saved: Mapping[str, Saved]) -> None:
        """Keep the ``saved`` states for the loaders to come."""
        self._saved = dict(saved)

    def state_dict(self, current: str | None) -> dict[str, Saved]:
        """Return the states of all loaders by key. That with the key ``current`` continues at the next item."""
        live = [(key, loader) for key, reference in self._live.items() if (loader := reference()) is not None]
        return {**self._saved, **{key: self._state_of(loader, key == current) for key, loader in live}}

    def take_saved(self, key: str) -> Saved:
        """Return the restored state of the loader that is called ``key``, and forget it; empty if there is none."""
        return self._saved.pop(key, {})

    def remember(self, key: str, iterable: object) -> None:
        """Keep a reference to ``iterable``, if it has something to save, under the last of its keys."""
        live = {other: loader for other, loader in self._live.items() if loader() is not None}
        self._live = {other: loader for other, loader in live.items() if loader() is not iterable}
        if has_state(iterable) or _keeps_workers(iterable) or find_generators(iterable):
            try:
                # A strong reference would keep a loader, and its worker processes, after the script has dropped it.
                self._live[key] = weakref.ref(iterable)
            except TypeError:  # no weak references to classes with __slots__
                self._live[key] = lambda: iterable

    def has_own_state(self, loader: object, saved: Saved) -> bool:
        """Return whether the checkpoint has the state of ``loader`` itself, in ``saved`` or elsewhere."""
        return has_state(loader) and ("state" in saved or self._is_in_state(loader))

    def restore(self, loader: Any, saved: dict[str, Any], again: bool = False) -> bool:
        """Load ``saved`` into ``loader``, and return whether it accepted its own state, if there is one.

        Generators that were restored already are restored only if ``again``.
        """
        # In this order: creating workers draws a number, and to load its state a loader may.
        if saved.get("has_workers"):
            create_workers(loader)
        accepted = self._load_own_state(loader, saved)
        self._restore_generators(loader, saved, again)
        return accepted

    def _load_own_state(self, loader: Any, saved: dict[str, Any]) -> bool:
        """Load the ``state_dict()`` in ``saved``, once, and return False if ``loader`` turns out to have no state."""
        if "state" not in saved or not has_state(loader):
            return True
        try:
            # Taken out of the dict, because restore() may be called again once the loader is iterated. The generators
            # are set again then, and the loader itself must not be set back.
            loader.load_state_dict(saved.pop("state"))
        except Exception:
            if self._own_state(loader):
                raise
            return False
        return True

    def _restore_generators(self, loader: object, saved: Mapping[str, Any], again: bool) -> None:
        for generator, state in matched_generators(loader, saved.get("generators", {})):
            if again or not any(generator is other for other in self._restored_generators):
                set_generator_state(generator, state)
                self._restored_generators.append(generator)

    def _state_of(self, loader: object, current: bool) -> Saved:
        state: Saved = {"generators": generator_states(loader)}
        if has_workers(loader):
            state["has_workers"] = True
        # The state of a DataLoader is a position within an epoch. Between epochs its generators are enough.
        if has_state(loader) and not self._is_in_state(loader) and (current or not isinstance(loader, DataLoader)):
            state |= self._own_state(loader)
        return state

    def _own_state(self, loader: Any) -> dict[str, Any]:
        """Return the ``state_dict()`` of ``loader``; nothing, with one warning for each kind of loader, if it raises.

        Without a warning for a DataLoader that Accelerate has prepared: the wrapper has the method, which asks the
        DataLoader in it for an attribute that none has. Its place is restored by skipping items.
        """
        try:
            return {"state": loader.state_dict()}
        except Exception as error:
            owner = error.obj if isinstance(error, AttributeError) else None
            if isinstance(owner, DataLoader) and owner is not loader:
                return {}
            if (name := name_of(loader)) not in self._stateless:
                self._stateless.add(name)
                logger.warning("the state_dict() of %s raised %s. %s", name, brief(error), _AS_PLAIN)
            return {}

    def _is_in_state(self, loader: object) -> bool:
        return any(loader is part for part in self._state.values())


def _keeps_workers(loader: object) -> bool:
    return getattr(loader, "persistent_workers", False) is True


def has_workers(loader: object) -> bool:
    """Return whether ``loader`` has persistent workers, which exist since it was first iterated."""
    return _keeps_workers(loader) and getattr(loader, "_iterator", None) is not None


def create_workers(loader: Iterable[object]) -> None:
    """Create the persistent workers that an earlier process had by now, without changing the random states.

    A loader of torch draws a number when it creates them, and not when it is iterated again.
    """
    if _keeps_workers(loader) and not has_workers(loader):
        process, generators = random_states(), find_generators(loader)
        states = generator_states(loader)
        iter(loader)
        set_random_states(process)
        for path, generator in generators.items():
            set_generator_state(generator, states[path])


# -- the random generators of a loader ---------------------------------------------------------------------------------


def find_generators(holder: object) -> dict[str, RandomGenerator]:
    """Return the random generators of ``holder`` by their path: a loader, or what a wrapper such as tqdm iterates.

    Looks at attributes, such as the ``generator`` of a loader, of its samplers and of its dataset, and at the members
    of lists and tuples. Each generator is found once, under its shortest path.
    """
    generators = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    found: dict[str, RandomGenerator] = {}
    seen: set[int] = set()
    level: list[tuple[str, object]] = [("", holder)]
    for _ in range(_MOST_DEPTH + 1):
        inner: list[tuple[str, object]] = []
        for path, value in level:
            if id(value) not in seen and len(seen) < _MOST_OBJECTS and not isinstance(value, _OPAQUE):
                seen.add(id(value))
                if isinstance(value, generators):
                    found[path] = value
                else:
                    inner += [(path + name, member) for name, member in _members(value)]
        level = inner
    return found


def _members(value: object) -> list[tuple[str, object]]:
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", member) for index, member in enumerate(value) if len(value) <= _MOST_MEMBERS]
    # The iterator of a DataLoader is its workers, which are not restored.
    return [(f".{name}", member) for name, member in getattr(value, "__dict__", {}).items() if name != "_iterator"]


def generator_states(holder: object) -> dict[str, object]:
    """Return the states of the generators of ``holder`` by path, as plain data."""
    return {path: _state(generator) for path, generator in find_generators(holder).items()}


def _state(generator: RandomGenerator) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return without_arrays(generator.bit_generator.state)
    return without_arrays(generator.get_state(legacy=False))


def set_generator_state(generator: RandomGenerator, state: Any) -> None:
    """Set the state of a generator that :func:`generator_states` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def matched_generators(holder: object, states: Mapping[str, Any]) -> list[tuple[RandomGenerator, Any]]:
    """Return the generators of ``holder`` that are among the saved ``states``, with their state."""
    found = find_generators(holder)
    return [(found[path], state) for path, state in states.items() if path in found]


_AS_PLAIN = "So it is treated as a loader without a state, and is resumed by skipping the items that are done."
