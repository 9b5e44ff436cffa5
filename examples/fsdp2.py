"""A model that FSDP2 shards over the ranks, with the hooks of any other training run, on two ranks of a CPU:

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py

It fits a small network to a function. The gradients' norm is a ``DTensor``, and so are the parameters: hooks get the
full tensors, and NanTensorHook looks at the part of each rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchhooks import FinalOpsHook, LoggingTensorHook, MonitoredLoop, NanTensorHook, StepCounterHook, over_ranks


def main() -> dict[str, Tensor]:
    """Train, and return the mean loss of the last batches and the first weights."""
    torch.manual_seed(0)
    inputs = torch.linspace(-3, 3, 4000).unsqueeze(1)
    data = TensorDataset(inputs, inputs.sin())
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=50, sampler=sampler)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [*model.children(), model]:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {"loss": loss, "norm": norm}

    final = FinalOpsHook({"loss": over_ranks("loss", "mean"), "weight": "0.weight"})
    hooks = [
        NanTensorHook(["loss", "norm"]),
        LoggingTensorHook({"loss": over_ranks("loss", "mean"), "gradient norm": "norm"}, every_n_steps=40),
        StepCounterHook(40, examples_per_step=50),
        final,
    ]
    with MonitoredLoop(step, model, optimizer, hooks=hooks) as loop:
        for epoch in loop.until_stop(range(3)):
            sampler.set_epoch(epoch)
            for batch in loop.until_stop(loader):
                loop.run(*batch)
    values: dict[str, Tensor] = final.final_ops_values
    return values


if __name__ == "__main__":
    dist.init_process_group("gloo")
    values = main()
    shape = [*values["weight"].shape]
    print(f"rank {dist.get_rank()}: loss {values['loss']:.5f}, the first weights have the shape {shape}")
    dist.destroy_process_group()
