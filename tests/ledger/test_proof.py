"""``assert_resumes_exactly``: exact scripts pass, and each kind of defect is found and named."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchhooks import CheckpointSaverHook, LedgerHook, MonitoredLoop, Variables
from torchhooks.testing import assert_resumes_exactly, assert_same_run

STEPS, STOPS = 16, [3, 8, 13]

Train = Callable[[Path], object]


class Parts:
    """What the scripts below have in common: a small model with dropout, its optimizer, its data and its saver."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.examples = [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(6)]

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        self.optimizer.zero_grad()
        loss = (self.model(inputs) - targets).square().mean()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}

    def loop(self, step: Callable[..., object] | None = None, **options: Any) -> MonitoredLoop[Any]:
        hooks = [CheckpointSaverHook(self.folder, every_n_steps=2)]
        arguments = {"hooks": hooks, "checkpoint_dir": self.folder, **options}
        return MonitoredLoop(self.step if step is None else step, self.model, self.optimizer, **arguments)


def exact(folder: Path) -> None:
    parts = Parts(folder)
    loader: Any = torch.utils.data.DataLoader(parts.examples, batch_size=None, shuffle=True)  # type: ignore[arg-type]
    scheduler, variables = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1, 0.9), Variables(total=0.0)
    with parts.loop(state={"scheduler": scheduler, "variables": variables}) as loop:
        for _ in loop.until_stop(range(3)):
            for inputs, targets in loop.until_stop(loader):
                variables.total += loop.run(inputs, targets)["loss"].item()
            scheduler.step()


def exact_with_a_body_and_accumulation(folder: Path) -> None:
    parts = Parts(folder)
    with parts.loop(step_unit="optimizer_step") as loop:
        for _ in loop.until_stop(range(3)):
            for number, (inputs, targets) in loop.enumerate(parts.examples):
                with loop.step() as outputs:
                    loss = (parts.model(inputs) - targets).square().mean()
                    loss.backward()
                    if number % 2:
                        parts.optimizer.step()
                        parts.optimizer.zero_grad()
                    outputs["loss"] = loss


def exact_with_a_run_before_the_inner_loop(folder: Path) -> None:
    parts = Parts(folder)
    with parts.loop() as loop:
        for _ in loop.until_stop(range(3)):
            loop.run(torch.randn(2, 4), torch.randn(2, 1))  # repeated by a resume, and then undone
            for inputs, targets in loop.until_stop(parts.examples):
                loop.run(inputs, targets)


@pytest.mark.parametrize("train", [exact, exact_with_a_body_and_accumulation, exact_with_a_run_before_the_inner_loop])
def test_an_exact_script_passes(train: Train, tmp_path: Path) -> None:
    assert_resumes_exactly(train, tmp_path, steps=STEPS, stops=STOPS)


def list_shuffled_in_place(folder: Path) -> None:
    parts = Parts(folder)
    with parts.loop() as loop:
        for _ in loop.until_stop(range(3)):
            random.shuffle(parts.examples)
            for inputs, targets in loop.until_stop(parts.examples):
                loop.run(inputs, targets)


def variable_of_the_body(folder: Path) -> None:
    parts, scale = Parts(folder), 1.0
    with parts.loop() as loop:
        for _ in loop.until_stop(range(3)):
            for inputs, targets in loop.until_stop(parts.examples):
                scale *= 0.99
                loop.run(inputs * scale, targets)


def counter_of_the_trainer(folder: Path) -> None:
    class Trainer(Parts):
        made = 0

        def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
            self.made += 1
            return super().step(inputs * min(self.made / 10, 1.0), targets)

    trainer = Trainer(folder)
    with trainer.loop() as loop:
        for _ in loop.until_stop(range(3)):
            for inputs, targets in loop.until_stop(trainer.examples):
                loop.run(inputs, targets)


def iterator_in_the_step(folder: Path) -> None:
    parts = Parts(folder)
    noise = iter([torch.full((2, 4), 0.1 * number) for number in range(50)])

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return parts.step(inputs + next(noise), targets)

    with parts.loop(step) as loop:
        for _ in loop.until_stop(range(3)):
            for inputs, targets in loop.until_stop(parts.examples):
                loop.run(inputs, targets)


def second_optimizer_without_state(folder: Path) -> None:
    parts = Parts(folder)
    other = torch.optim.SGD(parts.model.parameters(), 0.01, momentum=0.9)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = parts.step(inputs, targets)
        other.step()
        return outputs

    with parts.loop(step) as loop:
        for _ in loop.until_stop(range(3)):
            for inputs, targets in loop.until_stop(parts.examples):
                loop.run(inputs, targets)


def scheduler_without_state(folder: Path) -> None:
    parts = Parts(folder)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(parts.optimizer, 0.5)
    with parts.loop() as loop:
        for _ in loop.until_stop(range(3)):
            for inputs, targets in loop.until_stop(parts.examples):
                loop.run(inputs, targets)
                parts.optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
                scheduler.step()


def draws_outside_of_the_loop(folder: Path) -> None:
    parts = Parts(folder)
    mixed = iter(torch.utils.data.DataLoader(range(40), shuffle=True))  # type: ignore[arg-type]
    with parts.loop() as loop:
        for _ in loop.until_stop(range(3)):
            for inputs, targets in loop.until_stop(parts.examples):
                loop.run(inputs, targets * next(mixed))


@pytest.mark.parametrize(
    ("train", "quantity"),
    [
        (list_shuffled_in_place, "item"),
        (variable_of_the_body, "arguments"),
        (draws_outside_of_the_loop, "arguments"),
        (counter_of_the_trainer, "outputs"),
        (iterator_in_the_step, "outputs"),
        (second_optimizer_without_state, "parameters"),
        (scheduler_without_state, "parameters"),
    ],
)
def test_a_defect_is_found_and_named(train: Train, quantity: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=rf"interrupted after run \d+ and resumed(.|\n)*{quantity} DIFFER"):
        assert_resumes_exactly(train, tmp_path, steps=STEPS, stops=STOPS)


def test_a_script_without_a_seed_is_not_blamed_for_its_resume(tmp_path: Path) -> None:
    def train(folder: Path) -> None:
        parts = Parts(folder)
        torch.seed()
        with parts.loop() as loop:
            for inputs, targets in loop.until_stop(parts.examples):
                loop.run(inputs, targets)

    with pytest.raises(AssertionError, match="two training runs without an interruption differ"):
        assert_resumes_exactly(train, tmp_path, steps=6, stops=[2])


def test_nothing_is_proved_without_a_checkpoint_to_resume_from(tmp_path: Path) -> None:
    def train(folder: Path) -> None:
        parts = Parts(folder)
        with parts.loop(hooks=[]) as loop:
            for inputs, targets in loop.until_stop(parts.examples):
                loop.run(inputs, targets)

    with pytest.raises(AssertionError, match="nothing was proved"):
        assert_resumes_exactly(train, tmp_path, steps=6, stops=[2, 4])


def test_missing_runs_are_a_difference(tmp_path: Path) -> None:
    def train(folder: Path) -> None:  # the epochs of a resumed process are fewer
        parts = Parts(folder)
        variables = Variables(epoch=0)
        with parts.loop(state={"variables": variables}) as loop:
            for epoch in range(variables.epoch, 3):
                variables.epoch = epoch + 1
                for inputs, targets in loop.until_stop(parts.examples):
                    loop.run(inputs, targets)

    with pytest.raises(AssertionError, match=r"not in both +[1-9]"):
        assert_resumes_exactly(train, tmp_path, steps=18, stops=[8])


def golden_run(folder: Path, rate: float = 0.01) -> None:
    parts = Parts(folder)
    parts.optimizer.param_groups[0]["lr"] = rate
    with parts.loop(hooks=[LedgerHook(folder)], checkpoint_dir=None) as loop:
        for inputs, targets in loop.until_stop(parts.examples):
            loop.run(inputs, targets)


def test_a_golden_run_is_written_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = tmp_path / "golden"
    golden_run(tmp_path / "first")
    with pytest.raises(AssertionError, match="TORCHHOOKS_UPDATE_GOLDEN=1"):
        assert_same_run(tmp_path / "first", golden)
    with monkeypatch.context() as patch:
        patch.setenv("TORCHHOOKS_UPDATE_GOLDEN", "1")
        assert_same_run(tmp_path / "first", golden)
    golden_run(tmp_path / "second")
    assert_same_run(tmp_path / "second", golden)
    golden_run(tmp_path / "third", rate=0.0100001)
    with pytest.raises(AssertionError, match="outputs DIFFER: loss"):
        assert_same_run(tmp_path / "third", golden)
    assert_same_run(tmp_path / "third", golden, rtol=1e-3)
