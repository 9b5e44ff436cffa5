"""Which of several objects changed their state since a given moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torchhooks.common.digests import leaf_digest
from torchhooks.common.stateful import Stateful


class StateMark:
    """The state of ``parts``, by name, at the moment of the call, to compare with later.

    Copies no tensors. A change of a tensor is noticed by torch's count of its in-place changes and, for one on the CPU,
    by a checksum of a sample. So a change on a device through ``tensor.data``, which torch does not count, is missed.
    """

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self._parts = parts
        self._before = self._states()

    def changed(self) -> list[str]:
        """Return the names of the parts whose state is not what it was."""
        now = self._states()
        return [name for name, before in self._before.items() if not _same(before, now[name])]

    def _states(self) -> dict[str, Any]:
        return {name: _noted(part.state_dict()) for name, part in self._parts.items()}


class _Noted(NamedTuple):
    """A tensor, and what it was like when it was noted."""

    tensor: torch.Tensor
    digest: list[Any]

    @property
    def is_as_noted(self) -> bool:
        return leaf_digest(self.tensor) == self.digest


def _noted(value: Any) -> Any:
    """Return a copy of the containers in ``value``, with each tensor noted."""
    if isinstance(value, torch.Tensor):
        return _Noted(value.detach(), leaf_digest(value))
    if isinstance(value, Mapping):
        return {key: _noted(item) for key, item in value.items()}
    return [_noted(item) for item in value] if isinstance(value, (list, tuple)) else value


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, _Noted) and isinstance(now, _Noted):
        return _same_tensor(before, now)
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_same(item, now[key]) for key, item in before.items())
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_same, before, now))
    # NaN differs from itself, and some objects cannot be compared.
    return before is now or (type(before) is type(now) and repr(before) == repr(now))


def _same_tensor(before: _Noted, now: _Noted) -> bool:
    try:
        if not before.tensor.is_set_to(now.tensor):  # a state_dict() that returns a new tensor each time
            same = before.tensor.device == now.tensor.device and torch.equal(before.tensor, now.tensor)
            return same and before.is_as_noted and before.tensor.dtype == now.tensor.dtype
    except RuntimeError:  # a layout that torch cannot compare
        pass
    return before.digest == now.digest
