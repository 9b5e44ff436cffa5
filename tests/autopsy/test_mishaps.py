"""An autopsy that is interrupted, asked for by a damaged file, or has nowhere to write its report."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchhooks import CheckpointSaverHook, MonitoredLoop, NanLossDuringTrainingError, NanTensorHook
from torchhooks.__main__ import main
from torchhooks.testing import log_lines

NAN_AT = 10


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Masked(nn.Module):
    """Has a buffer that is not finite, as the mask of an attention is not."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), -float("inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ (self.mask + 1).softmax(-1)  # type: ignore[no-any-return]


def train(before_step: Callable[[int], object] = bool, nan_at: int = NAN_AT) -> Any:
    """Train until the loss is NaN at ``nan_at``, and return the error."""
    torch.manual_seed(0)
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        before_step(loop.global_step + 1)
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().mean()
        if loop.global_step + 1 == nan_at:
            loss = (loss * 0 - 1).sqrt()
        loss.backward()
        optimizer.step()
        return loss.detach()

    hooks = [NanTensorHook("loss"), CheckpointSaverHook("run", save_steps=4)]
    try:
        with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir="run") as loop:
            for inputs in loop.until_stop(torch.ones(20, 4, 4)):
                loop.run(inputs)
    except NanLossDuringTrainingError as error:
        return error
    raise AssertionError("there was no NaN")


def operation() -> str:
    report = json.loads(Path("run", f"nan-{NAN_AT}", "report.json").read_text())
    return report["origin"]["operation"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("error", "at"), [(KeyboardInterrupt, NAN_AT), (KeyboardInterrupt, 9), (RuntimeError("out of memory"), 9)]
)
def test_an_autopsy_that_is_interrupted_is_made_by_the_next_process(error: Any, at: int) -> None:
    def interrupt(step: int) -> None:
        if step == at:
            raise error

    train()
    with log_lines() as lines, pytest.raises(BaseException, match=r"^(out of memory)?$"):
        train(interrupt)
    assert ("WARNING", f"no autopsy was made: the loop ended at step {at - 1}, before step {NAN_AT}") in lines
    assert Path("run/nan.json").exists()
    train()
    assert operation() == "aten.sqrt.default"


def _without(name: str) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != name}))

    return damage


def _with_text_as_step(path: Path) -> None:
    path.write_text(path.read_text().replace(f'"step": {NAN_AT}', f'"step": "{NAN_AT}"'))


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(""),
        lambda path: path.write_bytes(path.read_bytes()[:200]),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text("[1]"),
        _with_text_as_step,
        _without("message"),
        _without("environment"),
        _as_folder,
    ],
)
def test_a_damaged_request_is_named_and_replaced_by_the_next_one(
    damage: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    train()
    path = Path("run", "nan.json")
    damage(path)
    assert main(["nan", "run"]) == 1
    assert f"{path} " in capsys.readouterr().err
    with log_lines() as lines:
        train()
    (warning,) = [text for _, text in lines if text.startswith("no autopsy: ")]
    assert warning.startswith(f"no autopsy: {path} ")
    assert warning.endswith(": remove it")
    if path.is_dir():
        path.rmdir()
        train()
    train()
    assert operation() == "aten.sqrt.default"


def test_what_an_autopsy_found_is_said_where_its_report_cannot_be_written() -> None:
    train()
    Path("run", f"nan-{NAN_AT}").touch()
    with log_lines() as lines:
        train()
    assert any(text.startswith("Cause: aten.sqrt.default made a NaN") for _, text in lines)
    assert any(text.startswith("the report of the autopsy was not written into ") for _, text in lines)
    assert not any(text.startswith("The report is") for _, text in lines)
    os.remove(f"run/nan-{NAN_AT}")
    train()
    assert operation() == "aten.sqrt.default"
