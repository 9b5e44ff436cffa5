"""What another process asks for in a folder, and what the copy of the folder does not bring back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchhooks import (
    CheckpointSaverHook,
    MirrorHook,
    MonitoredLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    list_checkpoints,
)


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(steps: int, nan_at: int | None = None) -> int:
    """Train with a copy, and return the step at which the loop began; -1 if there was a NaN."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().mean()
        if loop.global_step + 1 == nan_at:
            loss = (loss * 0 - 1).sqrt()
        loss.backward()
        optimizer.step()
        return loss.detach()

    url = Path("copy").absolute().as_uri()
    hooks = [NanTensorHook("loss"), CheckpointSaverHook("run", save_steps=10), MirrorHook("run", url)]
    try:
        with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir="run") as loop:
            begun_at = loop.global_step
            for inputs in loop.until_stop(torch.ones(steps, 4, 4)):
                loop.run(inputs)
    except NanLossDuringTrainingError:
        return -1
    return begun_at


def test_the_copy_brings_no_request_for_an_autopsy_back_that_was_made() -> None:
    """It would begin again before the step with the NaN, and abandon what was trained since."""
    for _ in range(2):
        assert train(30, nan_at=15) == -1
    assert Path("run/nan-15/report.md").exists()
    assert [train(30), train(40)] == [10, 30]
    assert list_checkpoints("run")[-1].step == 40
