"""``torch.save`` for checkpoints: without checksums, as a manifest has one, and without keeping the state in memory."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import torch


def save(state: dict[str, Any], file: Any) -> None:
    """Write ``state`` to the open ``file``; keep no reference to its tensors."""
    # In torch 2.6, the class that torch.save derives from Pickler has a method that refers to every storage. A
    # class is part of a reference cycle, so all of them stayed in memory until the garbage collector ran.
    derived: list[Any] = []

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls) -> None:
            derived.append(cls)

    sums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # every byte is in the sum that the manifest has
    try:
        torch.save(state, file, pickle_module=SimpleNamespace(__name__="pickle", Pickler=Pickler))
    finally:
        torch.serialization.set_crc32_options(sums)
        for pickler in derived:
            pickler.persistent_id = None
