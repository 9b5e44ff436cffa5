"""Objects whose state can be kept in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


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
