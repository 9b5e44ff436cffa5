"""A training script without torchhooks (plain.py) and with it (wrapped.py). The trained models are bit-identical."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def main() -> nn.Module:
    torch.manual_seed(0)
    points = torch.randn(4000, 2)
    inside = (points.norm(dim=1) < 1.2).long()
    loader = DataLoader(TensorDataset(points, inside), batch_size=20, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(3):
        for i, (inputs, targets) in enumerate(loader):
            loss = step(inputs, targets)
            if (i + 1) % 100 == 0:
                print(f"loss = {loss.item():.4f}")
    return model


if __name__ == "__main__":
    main()
