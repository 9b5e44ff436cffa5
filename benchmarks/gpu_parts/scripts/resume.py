"""A deterministic training run on a device: on CUDA in fp16, with a GradScaler. Prints the bits that it ends with."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA is initialized

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchhooks import CheckpointSaverHook, MonitoredLoop, NanTensorHook, StopAtStepHook

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--device", default="cuda")
parser.add_argument("--die-at", type=int, default=0, help="the step after which the process gets the signal")
parser.add_argument("--signal", default="SIGKILL")
chosen = parser.parse_args()
if chosen.device == "simulated":
    from support import simulated

    simulated.register()
is_cuda = chosen.device == "cuda"

torch.use_deterministic_algorithms(is_cuda)
torch.manual_seed(0)
data = TensorDataset(torch.randn(1000, 3, 16, 16), torch.randint(10, (1000,)))
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=2 if is_cuda else 0, pin_memory=is_cuda)
layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU()]
if chosen.device == "simulated":  # which has no convolution
    layers = [nn.Flatten(), nn.Linear(3 * 256, 64 * 49), nn.ReLU()]
model = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 49, 10)).to(chosen.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=is_cuda)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
scaler = torch.amp.GradScaler(chosen.device, enabled=is_cuda)


def step(images: Tensor, labels: Tensor) -> Tensor:
    images, labels = images.to(chosen.device, non_blocking=True), labels.to(chosen.device, non_blocking=True)
    optimizer.zero_grad()
    with torch.autocast(chosen.device, torch.float16, enabled=is_cuda):
        loss = nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    return loss


hooks = [NanTensorHook("loss"), StopAtStepHook(last_step=80), CheckpointSaverHook(every_n_steps=20, async_save=True)]
state: dict[str, Any] = {"schedule": schedule, "scaler": scaler}
with MonitoredLoop(
    step, model, optimizer, state=state, hooks=hooks, checkpoint_dir=chosen.folder, signals=["SIGTERM"]
) as loop:
    begun_at = loop.global_step
    for _ in loop.until_stop(range(3)):
        for batch in loop.until_stop(loader):
            loop.run(*batch)
            if loop.global_step == chosen.die_at:
                os.kill(os.getpid(), getattr(signal, chosen.signal))
bits = sum(int(parameter.cpu().view(torch.int32).sum(dtype=torch.int64)) for parameter in model.parameters())
print(f"steps {begun_at} to {loop.global_step}, bits {bits}")
