"""A training run that is stopped and resumed in another process ends with the same bits as an uninterrupted one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.processes import call
from torch import nn

from torchhooks import CheckpointSaverHook, MonitoredLoop, Saver, Scaffold, StopAtStepHook
from torchhooks.testing import plain

STEPS = 8  # one epoch and a half
ITEMS, BATCH = 15, 3
Outcome = dict[str, str]


class Shuffled:
    """Endless batches, in a new order for each epoch. The state says which one is next."""

    def __init__(self, seed: int) -> None:
        self.inputs = torch.linspace(-1, 1, ITEMS).unsqueeze(1)
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield self.take()

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.order:
            self.order = torch.randperm(ITEMS, generator=self.generator).tolist()
        batch, self.order = self.order[:BATCH], self.order[BATCH:]
        return self.inputs[batch], self.inputs[batch].sin()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "order": self.order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.order = state["order"]


class Training:
    """A training run in which everything has a state: dropout, batch norm, Adam, a schedule, three sources of noise."""

    def __init__(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        layers = nn.Linear(1, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.data = Shuffled(seed)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        noise = 0.01 * torch.randn_like(inputs) + 0.01 * random.random() + 0.01 * np.random.rand()
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(inputs + noise), targets)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        self.optimizer.step()
        self.schedule.step()
        return loss

    def run(self, last_step: int, directory: Path | None = None, async_save: bool = False) -> Outcome:
        """Resume from the folder, train up to a step, and return the outcome."""
        hooks = [StopAtStepHook(last_step=last_step)]
        saving = [] if directory is None else [CheckpointSaverHook(directory, save_steps=3)]
        with MonitoredLoop(
            self.step,
            self.model,
            self.optimizer,
            hooks=[*hooks, *saving],
            scaffold=Scaffold(saver=Saver(async_save=async_save)),
            state={"schedule": self.schedule, "data": self.data},
            checkpoint_dir=directory,
        ) as loop:
            for inputs, targets in loop.until_stop(self.data) if loop.global_step < last_step else ():
                loop.run(inputs, targets)
        return self.outcome(loop.global_step)

    def outcome(self, step: int) -> Outcome:
        states = {
            "step": step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random numbers": [random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()],
            "next batch": self.data.take(),
        }
        return {name: repr(plain(state)) for name, state in states.items()}


CASES = [(stop, way) for way in ("sync", "async") for stop in range(STEPS + 1)]


def train(directory: Path) -> None:
    for stop, way in CASES:
        Training(seed=1).run(stop, directory / f"{way}-{stop}", way == "async")


def resume(directory: Path) -> None:
    outcomes = {
        f"{way}-{stop}": Training(seed=100 + stop).run(STEPS, directory / f"{way}-{stop}", way == "async")
        for stop, way in CASES
    }
    (directory / "outcomes.json").write_text(json.dumps(outcomes))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The outcome of each training run that one process stopped and another one resumed."""
    directory = tmp_path_factory.mktemp("resumed")
    for part in (train, resume):
        ended = call(part, directory)
        assert ended.code == 0, ended.output
    outcomes: dict[str, Outcome] = json.loads((directory / "outcomes.json").read_text())
    return outcomes


@pytest.fixture(scope="module")
def uninterrupted() -> Outcome:
    return Training(seed=1).run(STEPS)


@pytest.mark.parametrize(("stop", "way"), CASES)
def test_a_training_run_stopped_after_any_step_ends_the_same_in_another_process(
    stop: int, way: str, resumed: dict[str, Outcome], uninterrupted: Outcome
) -> None:
    assert resumed[f"{way}-{stop}"] == uninterrupted


def test_saving_on_the_way_changes_nothing(uninterrupted: Outcome, tmp_path: Path) -> None:
    assert Training(seed=1).run(STEPS, tmp_path) == uninterrupted


def test_another_seed_ends_elsewhere_in_everything_but_the_step(uninterrupted: Outcome) -> None:
    other = Training(seed=2).run(STEPS)
    assert {name for name in other if other[name] == uninterrupted[name]} == {"step", "schedule"}


def test_a_training_run_stopped_several_times_ends_the_same(uninterrupted: Outcome, tmp_path: Path) -> None:
    for stop in (2, 3, 3, 7):
        Training(seed=1 if stop == 2 else stop).run(stop, tmp_path)
    assert Training(seed=9).run(STEPS, tmp_path) == uninterrupted
