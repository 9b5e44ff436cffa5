"""Tensors of which each rank has a part: torch's ``DTensor``, as FSDP2 uses it."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_sharded(value: object) -> bool:
    """Return whether ``value`` is a DTensor."""
    return dtensors_exist() and isinstance(value, sys.modules["torch.distributed.tensor"].DTensor)


def reshard(module: torch.nn.Module) -> None:
    """Have FSDP2 put shards back in place of whole parameters, which it leaves in a module after a forward pass."""
    modules: list[Any] = [*module.modules()] if dtensors_exist() else []
    for each in modules:
        if hasattr(each, "reshard") and hasattr(each, "unshard"):
            each.reshard()


def dtensors_exist() -> bool:
    """Return whether the process may have a DTensor."""
    return hasattr(sys.modules.get("torch.distributed.tensor"), "DTensor")  # loaded by whatever creates DTensors


def without_partial(tensor: Any) -> Any:
    """Return the DTensor with the sums in place of summands, if its ranks have these. A collective in that case."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    whole = torch.distributed.tensor.Replicate()
    return tensor.redistribute(placements=[whole if each.is_partial() else each for each in tensor.placements])
