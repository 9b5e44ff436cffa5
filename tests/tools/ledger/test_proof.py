"""``assert_resumes_exactly``: exact scripts pass, and each kind of defect is found and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import forgetful
from support.forgetful import Parts, Train

from torchhooks import LedgerHook, Variables
from torchhooks.testing import assert_resumes_exactly, assert_same_run

STEPS, STOPS = 16, [3, 8, 13]


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


@pytest.mark.parametrize(
    "train",
    [
        exact_with_a_body_and_accumulation,
        pytest.param(exact, marks=pytest.mark.exhaustive),
        pytest.param(exact_with_a_run_before_the_inner_loop, marks=pytest.mark.exhaustive),
    ],
)
def test_an_exact_script_passes(train: Train, tmp_path: Path) -> None:
    assert_resumes_exactly(train, tmp_path, steps=STEPS, stops=STOPS)


@pytest.mark.parametrize(
    ("train", "quantity"),
    [
        (forgetful.list_shuffled_in_place, "item"),
        (forgetful.draws_outside_of_the_loop, "arguments"),
        (forgetful.counter_of_the_trainer, "outputs"),
        (forgetful.scheduler_per_step, "parameters"),
        pytest.param(forgetful.variable_of_the_body, "arguments", marks=pytest.mark.exhaustive),
        pytest.param(forgetful.iterator_in_the_step, "outputs", marks=pytest.mark.exhaustive),
        pytest.param(forgetful.second_optimizer, "parameters", marks=pytest.mark.exhaustive),
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
    with pytest.raises(AssertionError, match=r"not in both +[1-9]"):
        assert_resumes_exactly(forgetful.epochs_that_variables_count, tmp_path, steps=18, stops=[8])


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
    with pytest.raises(AssertionError, match=r"parameters DIFFER: 0\.weight"):
        assert_same_run(tmp_path / "third", golden)
    assert_same_run(tmp_path / "third", golden, rtol=1e-3)
