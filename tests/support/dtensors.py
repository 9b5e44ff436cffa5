"""DTensors and FSDP2, imported by the first call, since this takes a second of every collection otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def fully_shard(module: torch.nn.Module, **arguments: Any) -> Any:
    """Shard the parameters of ``module`` with FSDP2, and return it."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, **arguments)


def distributed(whole: torch.Tensor, mesh: Any, placement: str = "Shard(0)") -> Any:
    """Return ``whole`` as a DTensor whose placement is written as in Python."""
    from torch.distributed import tensor

    return tensor.distribute_tensor(whole, mesh, [eval(placement, vars(tensor))])


def from_local(local: torch.Tensor, mesh: Any, placement: str = "Shard(0)") -> Any:
    """Return the DTensor of which this rank has the part ``local``."""
    from torch.distributed import tensor

    return tensor.DTensor.from_local(local, mesh, [eval(placement, vars(tensor))])


@contextmanager
def simulated_group(size: int) -> Iterator[None]:
    """Make a process group of which the other processes are simulated: they take no part in any collective."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def mesh_of_two() -> Iterator[Any]:
    """Yield a mesh of two processes, of which the other one is simulated."""
    from torch.distributed.device_mesh import init_device_mesh

    with simulated_group(2):
        yield init_device_mesh("cpu", (2,))


@contextmanager
def mesh_of_one() -> Iterator[Any]:
    """Yield a mesh of this process alone, with real collectives."""
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()
