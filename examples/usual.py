"""The usual training script without torchhooks (usual_plain.py) and with it (usual.py).

Both show a progress bar, validate after each epoch, lower the learning rate when the validation loss no longer falls,
keep the best model and stop early. They report the same lines, and the trained models are bit-identical. Only usual.py
continues where it was killed: start it again.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchhooks import (
    BestCheckpointHook,
    CheckpointSaverHook,
    EvaluationHook,
    LoggingTensorHook,
    MonitoredLoop,
    ProgressBarHook,
    StopIfNoDecreaseHook,
    best_checkpoint,
    load_weights,
    running_mean,
)

EPOCHS, PATIENCE = 60, 8


def main(folder: str) -> nn.Module:
    torch.manual_seed(0)
    points = torch.randn(1500, 2)
    inside = (points.norm(dim=1) + 0.2 * torch.randn(1500) < 1.2).long()
    train_set, val_set = TensorDataset(points[:1000], inside[:1000]), TensorDataset(points[1000:], inside[1000:])
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)  # the last batch has 40 points
    # With its own generator: a pass over a DataLoader draws a random number, which an EvaluationHook would put back.
    val_loader = DataLoader(val_set, batch_size=200, generator=torch.Generator())
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=2)

    def validate(model: nn.Module) -> float:
        return sum(F.cross_entropy(model(x), y, reduction="sum").item() for x, y in val_loader) / len(val_set)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    mean_loss = running_mean("loss", weight=lambda inputs: len(inputs), reset="epoch")
    evaluation = EvaluationHook(validate, every_n_epochs=1)
    val_loss = evaluation["validate"]
    hooks = [
        ProgressBarHook(),
        evaluation,
        LoggingTensorHook(
            {"epoch": "epoch", "loss": mean_loss, "val_loss": val_loss, "lr": "lr"},
            every_n_epochs=1,
            formatter="epoch {epoch}: loss {loss:.4f}, validation loss {val_loss:.4f}, lr {lr:g}".format_map,
        ),
        StopIfNoDecreaseHook(val_loss, max_epochs_without_decrease=PATIENCE),
        CheckpointSaverHook(folder, every_n_epochs=1),
        BestCheckpointHook(folder, val_loss, mode="min"),
    ]
    state = {"scheduler": scheduler}
    with MonitoredLoop(
        step, model, optimizer, hooks=hooks, state=state, checkpoint_dir=folder, signals=["SIGTERM"]
    ) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for inputs, targets in loop.until_stop(train_loader):
                loop.run(inputs, targets)
            scheduler.step(evaluation.values["validate"])
    load_weights(best_checkpoint(folder), model)
    return model


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/usual")
