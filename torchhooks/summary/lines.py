"""Values as text: what hooks log, by tag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torchhooks.common.text import shown
from torchhooks.common.trees import GroupRates, map_leaves


def tagged_line(values: Mapping[str, Any]) -> str:
    """Return printable ``values`` by tag as one line: ``"loss = 0.1, step = 7"``."""
    return ", ".join([f"{tag} = {_text(value)}" for tag, value in values.items()])


def by_tag(tensors: Any, name: str = "tensors", *, in_order: bool = True) -> dict[str, Any]:
    """Return the fetches by the tags under which they are logged, in the order of the line.

    A dict is sorted by tag unless ``in_order``.
    """
    if not isinstance(tensors, (Mapping, list, tuple)):
        raise TypeError(
            f"{name}={shown(tensors)}: give a dict from tag to fetch, or a list of fetches, such as ['loss']"
        )
    if not tensors:
        raise ValueError(f"{name}={shown(tensors)}: there is nothing to log; give at least one fetch, such as ['loss']")
    if isinstance(tensors, Mapping):
        return {tag: tensors[tag] for tag in (tensors if in_order else sorted(tensors))}
    tagged: dict[str, Any] = {}
    for fetch in tensors:
        tag = fetch if isinstance(fetch, str) else getattr(fetch, "__name__", type(fetch).__name__)
        if tag in tagged:
            raise ValueError(f"{name}={shown(tensors)}: two would be logged as {tag!r}; give a dict from tag to fetch")
        tagged[tag] = fetch
    return tagged


def printable(value: Any) -> Any:
    """Return a tensor as a NumPy scalar or array, in float32 if NumPy lacks its dtype; anything else as it is."""
    if isinstance(value, torch.Tensor):
        try:
            value = value.numpy()
        except (TypeError, RuntimeError):  # sparse, conjugate, or a dtype that NumPy lacks
            value = value.to_dense().resolve_conj()
            value = (value if value.is_complex() else value.float()).numpy()
    return value[()] if isinstance(value, np.ndarray) else value


class _Bare:
    """Has the ``str`` of its value as ``repr``: a list prints reprs, and a NumPy scalar's includes its type."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return str(self._value)


def _text(value: Any) -> str:
    if isinstance(value, (np.generic, float, int, str)):
        return str(value)
    if isinstance(value, GroupRates):
        return f"{value}"
    with np.printoptions(suppress=True):
        return str(map_leaves(lambda leaf: _Bare(leaf) if isinstance(leaf, (np.generic, np.ndarray)) else leaf, value))
