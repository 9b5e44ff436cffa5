"""A training script for several ranks without torchhooks (ddp_plain.py) and with it (ddp.py), on two ranks of a CPU:

    torchrun --standalone --nproc-per-node 2 examples/ddp.py

The trained models are bit-identical.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> nn.Module:
    torch.manual_seed(0)
    points = torch.randn(4000, 2)
    inside = (points.norm(dim=1) < 1.2).long()
    data = TensorDataset(points, inside)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (inputs, targets) in enumerate(loader):
            loss = step(inputs, targets)
            if i % 50 == 0 and dist.get_rank() == 0:
                print(f"loss = {loss.item():.4f}")
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
