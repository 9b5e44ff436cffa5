"""Hugging Face Accelerate chooses the device and the precision and accumulates gradients; torchhooks logs and resumes.

    python examples/accelerate_loop.py runs/accelerate

Kill it at any time and start it again: it continues where it was, and ends with the same bits.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchhooks import CheckpointSaverHook, LoggingTensorHook, MonitoredLoop


def main(folder: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4)
    set_seed(0)
    points = torch.randn(1000, 2)
    inside = (points.norm(dim=1) < 1.2).long()
    loader = DataLoader(TensorDataset(points, inside), batch_size=20, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=52)

    # From here on, the names are what Accelerate returns: the step and the loop use these.
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss

    hooks = [LoggingTensorHook(["loss", "lr"], every_n_steps=50), CheckpointSaverHook(every_n_steps=10)]
    with MonitoredLoop(
        step,
        model,
        optimizer,
        hooks=hooks,
        state={"scheduler": scheduler},
        checkpoint_dir=folder,
        step_unit="optimizer_step",
        signals=["SIGTERM"],
    ) as loop:
        for _ in loop.until_stop(range(4)):
            for number, (inputs, targets) in loop.enumerate(loader):
                accelerator.step = number  # its own count of batches would start over in a new process
                loop.run(inputs, targets)
    print(f"{loop.global_step} optimizer steps in bfloat16 on {accelerator.device}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate")
