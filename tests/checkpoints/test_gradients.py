"""Checkpoints in the middle of a gradient accumulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.torch_state import hooks_on_optimizer

from torchhooks import AbortedError, CheckpointSaverHook, MonitoredLoop, StopAtStepHook, latest_checkpoint

EVERY = 4


class Training:
    """Accumulates the gradients of four batches before each step of the optimizer."""

    def __init__(self, zero_first: bool = False, set_to_none: bool = True) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.zero_first, self.set_to_none = zero_first, set_to_none

    def step(self, batch: int) -> torch.Tensor:
        if self.zero_first and batch % EVERY == 0:
            self.optimizer.zero_grad(set_to_none=self.set_to_none)
        loss = self.model(torch.full((2, 3), float(batch % 5))).square().mean()
        loss.backward()
        if batch % EVERY == EVERY - 1:
            self.optimizer.step()
            if not self.zero_first:
                self.optimizer.zero_grad(set_to_none=self.set_to_none)
        detached: torch.Tensor = loss.detach()
        return detached

    def run(self, directory: Path, last_step: int, **arguments: Any) -> list[torch.Tensor]:
        hooks = [CheckpointSaverHook(directory, save_steps=1), StopAtStepHook(last_step=last_step)]
        with MonitoredLoop(
            self.step, self.model, self.optimizer, hooks=hooks, checkpoint_dir=directory, **arguments
        ) as loop:
            for batch in loop.until_stop(range(20)):
                loop.run(batch)
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def gradients_in(directory: Path) -> Any:
    return torch.load(f"{latest_checkpoint(directory)}/state.pt", weights_only=True).get("gradients")


@pytest.mark.parametrize(("stop", "zero_first"), [(1, True), (3, False), (4, True), (5, False), (11, True)])
def test_an_accumulation_continues_in_the_next_process(stop: int, zero_first: bool, tmp_path: Path) -> None:
    whole = Training(zero_first).run(tmp_path / "whole", 16)
    Training(zero_first).run(tmp_path / "resumed", stop)
    resumed = Training(zero_first).run(tmp_path / "resumed", 16)
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize(("stop", "accumulates"), [(3, True), (4, False)])
def test_a_checkpoint_has_gradients_only_while_they_accumulate(
    stop: int, accumulates: bool, zero_first: bool, tmp_path: Path
) -> None:
    Training(zero_first).run(tmp_path, stop)
    assert (gradients_in(tmp_path) is not None) == accumulates


def test_an_accumulation_counted_in_steps_of_the_optimizer_continues(tmp_path: Path) -> None:
    whole = Training().run(tmp_path / "whole", 4, step_unit="optimizer_step")
    saver = CheckpointSaverHook(tmp_path / "resumed", save_steps=1)
    first = Training()
    with MonitoredLoop(first.step, first.model, first.optimizer, hooks=[saver], step_unit="optimizer_step") as loop:
        for batch in loop.until_stop(range(20), limit=6):
            loop.run(batch)
        loop.session.saver.save(loop.session, tmp_path / "resumed" / "model.ckpt", loop.global_step)
    resumed = Training().run(tmp_path / "resumed", 4, step_unit="optimizer_step")
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


def test_a_recovery_drops_what_a_failed_run_has_accumulated(tmp_path: Path) -> None:
    whole = Training().run(tmp_path / "whole", 16)
    failing = Training()
    step, calls = failing.step, iter(range(99))

    def failing_step(batch: int) -> torch.Tensor:
        loss = step(batch)
        if next(calls) == 6:
            raise AbortedError
        return loss

    failing.step = failing_step  # type: ignore[method-assign]
    recovered = failing.run(tmp_path / "recovered", 16)
    assert all(torch.equal(one, other) for one, other in zip(whole, recovered, strict=True))


def test_a_closed_loop_leaves_no_hook_on_the_optimizer(tmp_path: Path) -> None:
    training = Training()
    training.run(tmp_path, 2)
    assert hooks_on_optimizer(training.optimizer) == 0
