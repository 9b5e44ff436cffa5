"""A training script that follows the ten rules of docs/loops.md, of parts that a number chooses.

``python tests/support/random_scripts.py NUMBER`` runs it in the current folder. ``check`` must find nothing in any.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from torchhooks import CheckpointSaverHook, LoggingTensorHook, MonitoredLoop, StopAtStepHook, Variables, running_mean

Pair = tuple[Tensor, Tensor]


class Stream(IterableDataset[Pair]):
    def __init__(self, pairs: list[Pair]) -> None:
        self.pairs = pairs

    def __iter__(self) -> Iterator[Pair]:
        yield from self.pairs


class Noisy(TensorDataset):
    """Draws random numbers in the main process, when an item is read."""

    def __getitem__(self, index: Any) -> Pair:
        inputs, targets = (tensor[index] for tensor in self.tensors)
        return inputs + 0.1 * torch.randn_like(inputs) + 0.1 * random.random(), targets


def train(number: int) -> None:
    chosen = random.Random(number)
    choose = chosen.choice

    def maybe() -> bool:
        return chosen.random() < 0.5

    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)

    norm: list[nn.Module] = choose([[], [nn.BatchNorm1d(8)], [nn.LayerNorm(8)]])
    model = nn.Sequential(nn.Linear(4, 8), *norm, nn.ReLU(), nn.Dropout(choose([0.0, 0.2])), nn.Linear(8, 1))
    makes: list[Callable[[Any], Any]] = [
        lambda parameters: torch.optim.SGD(parameters, 0.05),
        lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, 0.01),
        lambda parameters: torch.optim.AdamW(parameters, 0.01, amsgrad=True),
    ]
    optimizer = choose(makes)(model.parameters())
    state: dict[str, Any] = {}

    # What comes beside the model.
    schedulers: list[Callable[[], Any]] = [
        lambda: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100),
    ]
    scheduler = state["scheduler"] = choose(schedulers)() if maybe() else None
    steps_scheduler_each_run = maybe()
    average = state["average"] = torch.optim.swa_utils.AveragedModel(model) if maybe() else None
    teacher = state["teacher"] = copy.deepcopy(model).eval() if maybe() else None
    variables = state["variables"] = Variables(total=0.0, best=float("inf"), seen=0)
    state = {name: part for name, part in state.items() if part is not None}

    # The data.
    items = choose([4, 5, 7])
    inputs, targets = torch.randn(2 * items, 4), torch.randn(2 * items, 1)
    pairs = [*zip(inputs.split(2), targets.split(2), strict=True)]
    own = torch.Generator().manual_seed(number)
    makes_data: list[Any] = [
        lambda: pairs,
        lambda: DataLoader(TensorDataset(inputs, targets), batch_size=2, shuffle=True),
        lambda: DataLoader(TensorDataset(inputs, targets), batch_size=2, shuffle=True, generator=own),
        lambda: DataLoader(Noisy(inputs, targets), batch_size=2, shuffle=True),
        lambda: DataLoader(Stream(pairs), batch_size=None),
    ]
    data = choose(makes_data)()
    limit = choose([None, None, items - 1])

    accumulates = choose([1, 1, 2, 3])
    draws = maybe()

    def lossy(x: Tensor, y: Tensor) -> Any:
        if draws:
            x = x + 0.01 * random.random() + 0.01 * float(np.random.rand())
        loss = (model(x) - y).square().mean()
        if teacher is not None:
            loss = loss + 0.1 * (model(x) - teacher(x).detach()).square().mean()
        return loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None and steps_scheduler_each_run:
            scheduler.step()
        if average is not None:
            average.update_parameters(model)
        if teacher is not None:
            with torch.no_grad():
                for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)

    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = lossy(x, y)
        loss.backward()
        variables.seen += 1
        if variables.seen % accumulates == 0:
            update()
        return {"loss": loss}

    hooks: list[Any] = [LoggingTensorHook({"loss": running_mean("loss")}, every_n_steps=choose([2, 5]))]
    period: dict[str, Any] = choose([{"every_n_steps": 3}, {"every_n_epochs": 1}])
    hooks.append(CheckpointSaverHook("run", async_save=maybe(), **period))
    if maybe():
        hooks.insert(0, StopAtStepHook(last_step=choose([11, 17])))
    validates, in_the_body, numbers = maybe(), maybe(), maybe()
    options: dict[str, Any] = {"step_unit": "optimizer_step"} if maybe() else {}
    options |= {"hooks": hooks, "state": state, "checkpoint_dir": "run", "signals": ["SIGTERM"]}
    with MonitoredLoop(step, model, optimizer, **options) as loop:
        for epoch in loop.until_stop(range(4)):
            model.train()
            variables.total = 0.0
            batches: Any = loop.enumerate(data, limit=limit) if numbers else loop.until_stop(data, limit=limit)
            for batch in batches:
                x, y = batch[1] if numbers else batch
                if in_the_body:
                    with loop.step() as outputs:
                        outputs.update(step(x, y))
                    made: Any = outputs
                else:
                    made = loop.run(x, y)
                variables.total += made["loss"].item()
            if validates:
                model.eval()
                with torch.no_grad():
                    variables.best = min(variables.best, float((model(inputs) - targets).square().mean()))
                model.train()
            if scheduler is not None and not steps_scheduler_each_run:
                scheduler.step()
            print(f"epoch {epoch}: mean {variables.total:.6f}, best {variables.best:.6f}")


if __name__ == "__main__":
    train(int(sys.argv[1]))
