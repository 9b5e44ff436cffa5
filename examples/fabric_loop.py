"""Lightning Fabric chooses the device and the precision, and torchhooks logs, saves and resumes.

    python examples/fabric_loop.py runs/fabric

Kill it at any time and start it again: it continues where it was, and ends with the same bits.
"""

import sys

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchhooks import CheckpointSaverHook, LoggingTensorHook, MonitoredLoop


def main(folder: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(0)
    points = torch.randn(1000, 2)
    inside = (points.norm(dim=1) < 1.2).long()
    loader = DataLoader(TensorDataset(points, inside), batch_size=50, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    # From here on, the names are what Fabric returns: the step, the scheduler and the loop use these.
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        return loss

    hooks = [LoggingTensorHook(["loss", "lr"], every_n_steps=20), CheckpointSaverHook(every_n_steps=15)]
    state = {"scheduler": scheduler}
    with MonitoredLoop(
        step, model, optimizer, hooks=hooks, state=state, checkpoint_dir=folder, signals=["SIGTERM"]
    ) as loop:
        for _ in loop.until_stop(range(4)):
            for inputs, targets in loop.until_stop(loader):
                loop.run(inputs, targets)
            scheduler.step()
    print(f"{loop.global_step} steps in bfloat16 on {fabric.device}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/fabric")
