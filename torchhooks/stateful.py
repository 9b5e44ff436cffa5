"""Objects whose state can be kept in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """An object that a checkpoint can hold: a module, an optimizer, a scheduler, a scaler, a loader, a hook."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return everything that is needed to continue from here."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Continue from ``state_dict``, which an earlier :meth:`state_dict` returned."""
        ...


def has_state(value: object) -> bool:
    """Return whether ``value`` has both methods of :class:`Stateful`."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
