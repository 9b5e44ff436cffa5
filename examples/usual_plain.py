"""The usual training script without torchhooks (usual_plain.py) and with it (usual.py).

Both show a progress bar, validate after each epoch, lower the learning rate when the validation loss no longer falls,
keep the best model and stop early. They report the same lines, and the trained models are bit-identical. Only usual.py
continues where it was killed: start it again.
"""

import math
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

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

    os.makedirs(folder, exist_ok=True)
    best_loss, best_epoch = math.inf, 0
    for epoch in range(EPOCHS):
        model.train()
        loss_sum = 0.0
        for inputs, targets in tqdm(train_loader, leave=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(inputs)
        model.eval()
        with torch.no_grad():
            val_loss = validate(model)
        lr = optimizer.param_groups[0]["lr"]
        print(f"epoch {epoch}: loss {loss_sum / len(train_set):.4f}, validation loss {val_loss:.4f}, lr {lr:g}")
        scheduler.step(val_loss)
        if val_loss < best_loss:
            best_loss, best_epoch = val_loss, epoch
            torch.save(model.state_dict(), f"{folder}/best.pt")
        if epoch - best_epoch >= PATIENCE:
            break
    model.load_state_dict(torch.load(f"{folder}/best.pt"))
    return model


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/usual_plain")
