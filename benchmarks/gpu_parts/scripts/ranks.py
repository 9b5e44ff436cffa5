"""Train on several ranks with FSDP2 or DDP, on CUDA with NCCL. Prints the bits that the ranks end with."""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA is initialized

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchhooks import CheckpointSaverHook, LoggingTensorHook, MonitoredLoop, NanTensorHook, StopAtStepHook, over_ranks

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--device", default="cuda")
parser.add_argument("--wrap", choices=["fsdp2", "ddp"], default="fsdp2")
parser.add_argument("--stop-at", type=int, default=40)
chosen = parser.parse_args()
is_cuda = chosen.device == "cuda"
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
if is_cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if is_cuda else "gloo")

torch.use_deterministic_algorithms(is_cuda)
torch.manual_seed(0)
inputs = torch.linspace(-3, 3, 4000).unsqueeze(1)
data = TensorDataset(inputs, inputs.sin())
sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
loader = DataLoader(data, batch_size=50, sampler=sampler)
model: nn.Module = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
if chosen.wrap == "ddp":
    model = nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if is_cuda else None)
else:
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in [*model.children(), model]:
        fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def step(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"loss": loss, "norm": norm}


hooks = [
    NanTensorHook(["loss", "norm"]),
    LoggingTensorHook({"loss": over_ranks("loss", "mean"), "norm": "norm"}, every_n_steps=10),
    StopAtStepHook(last_step=chosen.stop_at),
    CheckpointSaverHook(every_n_steps=10, async_save=True),
]
with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=chosen.folder) as loop:
    for epoch in loop.until_stop(range(5)):
        sampler.set_epoch(epoch)
        for batch in loop.until_stop(loader):
            loop.run(*batch)
parts = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in model.parameters()]
bits = sum(int(part.detach().cpu().view(torch.int32).sum(dtype=torch.int64)) for part in parts)
if dist.get_rank() == 0:
    print(f"{chosen.wrap}, {dist.get_world_size()} ranks, {dist.get_backend()}: step {loop.global_step}, bits {bits}")
dist.destroy_process_group()
