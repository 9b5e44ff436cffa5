"""What another process asks for in a folder, and what the copy of the folder does not bring back."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
from pathlib import Path
from typing import Any

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
from torchhooks.__main__ import main
from torchhooks.elsewhere.status import read_status
from torchhooks.lifecycle.run_record import NAME
from torchhooks.testing import log_lines


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


@pytest.mark.parametrize("between", ["curves.has_manifest", "status.is_checkpoint"])
def test_a_status_that_a_save_comes_in_between_has_a_checkpoint(between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saver replaces the only checkpoint after the folder was listed, and before what is in it is read."""
    train(10)
    old, new = Path("run", "model.ckpt-0"), Path("run", "model.ckpt-10")
    new.rename("later")
    place = f"torchhooks.elsewhere.{between}"
    called = pkgutil.resolve_name(place)

    def replace(path: str) -> bool:
        if old.exists():
            shutil.rmtree(old)
            os.rename("later", new)
        return bool(called(path))

    monkeypatch.setattr(place, replace)
    found = read_status("run")
    assert found.checkpoint is not None
    assert (found.checkpoint.name, found.damaged) == (new.name, [])


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: value} for name in ("pid", "time", "step", "world_size") for value in ("x", None)),
        {"last_step": "x"},
        {"steps_per_sec": "x"},
        {"stopped": 5},
    ],
)
def test_a_damaged_record_is_none(wrong: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    train(10)
    path = Path("run", NAME)
    path.write_text(json.dumps({**json.loads(path.read_text()), "stopped": None, **wrong}))
    assert main(["status", "run"]) == 1
    assert "no process says that it trains here" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["run", "run/copy", "."])
def test_a_copy_in_the_folder_or_around_it_is_refused(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be copied itself, and the copy of it too."""
    Path("run").mkdir()
    url = Path(place).absolute().as_uri()
    message = "cannot be in that folder, or around it: give another address"
    with pytest.raises(ValueError, match=message):
        MonitoredLoop(print, hooks=[MirrorHook("run", url)])
    assert main(["mirror", "run", url]) == 1
    assert message in capsys.readouterr().err
    assert list(Path("run").iterdir()) == []


@pytest.mark.parametrize(("folder", "warns"), [("other", True), ("run/best", True), ("run", False), (".", False)])
def test_a_copy_of_another_folder_than_the_one_with_the_checkpoints_is_a_warning(folder: str, warns: bool) -> None:
    hooks = [CheckpointSaverHook("run", save_steps=10), MirrorHook(folder, f"memory://{folder}")]
    with log_lines() as lines, MonitoredLoop(print, torch.nn.Linear(1, 1), hooks=hooks, checkpoint_dir="run"):
        pass
    text = f"the checkpoints of this loop are in {Path('run').absolute()}, of which memory://{folder} is no copy"
    assert any(line.startswith(text) for _, line in lines) == warns
