"""The loaders of the ``until_stop`` loops: their states in a checkpoint, and restoring them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from torchhooks.common.errors import brief
from torchhooks.common.log import logger
from torchhooks.common.random_states import random_states, set_random_states
from torchhooks.common.stateful import Stateful, has_state
from torchhooks.position.generators import find_generators, generator_states, matched_generators, set_generator_state
from torchhooks.position.place import Saved
from torchhooks.position.resuming import name_of


class Loaders:
    """The loaders of one loop, by the keys of their places.

    A state consists of the states of the loader's random generators and, if it has one, its own ``state_dict()``.

    Args:
        state: what else is in the loop's checkpoints. A loader in it is not saved or loaded twice.
    """

    def __init__(self, state: Mapping[str, Stateful]) -> None:
        self._state = state
        self._live: dict[str, Callable[[], Any]] = {}
        self._saved: dict[str, Saved] = {}
        """The states in the restored checkpoint of loaders that have not been iterated since."""
        self._restored_generators: list[Any] = []
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

    def remember(self, key: str, iterable: Any) -> None:
        """Keep a reference to ``iterable``, if it has something to save, under the last of its keys."""
        live = {other: loader for other, loader in self._live.items() if loader() is not None}
        self._live = {other: loader for other, loader in live.items() if loader() is not iterable}
        if has_state(iterable) or _keeps_workers(iterable) or find_generators(iterable):
            try:
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
        accepted = True
        if saved.get("has_workers"):
            create_workers(loader)
        if "state" in saved and has_state(loader):
            try:
                loader.load_state_dict(saved.pop("state"))
            except Exception:
                if self._own_state(loader):
                    raise
                accepted = False
        for generator, state in matched_generators(loader, saved.get("generators", {})):
            if again or not any(generator is other for other in self._restored_generators):
                set_generator_state(generator, state)
                self._restored_generators.append(generator)
        return accepted

    def _state_of(self, loader: Any, current: bool) -> Saved:
        state: Saved = {"generators": generator_states(loader)}
        if has_workers(loader):
            state["has_workers"] = True
        # The state of a DataLoader is a position within an epoch. Between epochs its generators are enough.
        if has_state(loader) and not self._is_in_state(loader) and (current or not isinstance(loader, DataLoader)):
            state |= self._own_state(loader)
        return state

    def _own_state(self, loader: Any) -> dict[str, Any]:
        """Return the ``state_dict()`` of ``loader``; nothing, with one warning for each kind of loader, if it raises.

        A loader that Accelerate has prepared has the method, but no state.
        """
        try:
            return {"state": loader.state_dict()}
        except Exception as error:
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


def create_workers(loader: Any) -> None:
    """Create the persistent workers that an earlier process had by now, without changing the random states.

    A loader of torch draws a number when it creates them, and not when it is iterated again.
    """
    if _keeps_workers(loader) and not has_workers(loader):
        random, generators = random_states(), find_generators(loader)
        states = generator_states(loader)
        iter(loader)
        set_random_states(random)
        for path, generator in generators.items():
            set_generator_state(generator, states[path])


_AS_PLAIN = "So it is treated as a loader without a state, and is resumed by skipping the items that are done."
