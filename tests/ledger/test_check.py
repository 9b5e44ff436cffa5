"""``python -m torchhooks check``: a script runs as it is, and the verdict is that of the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.paths import environment

SCRIPT = """
import argparse, os
import torch
from torch import nn
from torchhooks import CheckpointSaverHook, MonitoredLoop, SummarySaverHook, Variables, latest_checkpoint

options = argparse.ArgumentParser()
options.add_argument("--defect", default="")
options.add_argument("--epochs", type=int, default=3)
options.add_argument("--items", type=int, default=6)
chosen = options.parse_args()
if chosen.defect != "no seed":
    torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
examples = list(torch.randn(chosen.items, 2, 4))
scale, total, variables = 1.0, 0.0, Variables(total=0.0)

def step(inputs):
    global scale
    if chosen.defect == "scale":
        scale *= 0.99
    optimizer.zero_grad()
    loss = (model(inputs) * scale - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    return {"loss": loss}

hooks = [SummarySaverHook(100, output_dir="run", summary_op="loss")]
if chosen.defect != "no saver":
    hooks.append(CheckpointSaverHook("run", every_n_steps=1000))
if chosen.defect == "fails" and latest_checkpoint("run"):
    raise RuntimeError("no second start")
with MonitoredLoop(
    step, model, optimizer, hooks=hooks, state={"variables": variables}, checkpoint_dir="run", signals=["SIGTERM"]
) as loop:
    for epoch in loop.until_stop(range(chosen.epochs)):
        variables.total = total = 0.0
        order = examples if chosen.defect == "plain order" else loop.until_stop(examples)
        for inputs in order:
            loss = loop.run(inputs)["loss"].item()
            variables.total += loss
            total += loss
        print(f"epoch {epoch}: {total if chosen.defect == 'sum' else variables.total:.6f}")
"""


class Checked(NamedTuple):
    code: int
    found: dict[str, Any]
    errors: str


def check(folder: Path, defect: str = "", steps: int = 14, *arguments: str, **script: int) -> Checked:
    (folder / "train.py").write_text(SCRIPT)
    of_script = ["--defect", defect, *(f"--{name}={value}" for name, value in script.items())]
    command = [sys.executable, "-m", "torchhooks", "check", "train.py", "--steps", str(steps), "--json", *arguments]
    done = subprocess.run(
        [*command, "--", *of_script], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert [path.name for path in folder.iterdir()] == ["train.py"], "everything was written to the scratch folder"
    return Checked(done.returncode, json.loads(done.stdout), done.stderr)


pytestmark = pytest.mark.slow


def test_an_exact_script_passes_and_is_resumed_in_three_places(tmp_path: Path) -> None:
    code, found, errors = check(tmp_path, steps=14)
    assert (code, found["exact"], errors) == (0, True, "")
    assert found["comparison"]["runs"] == 14
    assert found["resumed_at"] == sorted(set(found["resumed_at"]))
    assert all(found["resumed_at"])


def test_a_script_that_ends_within_the_steps_makes_no_run_when_it_is_started_once_more(tmp_path: Path) -> None:
    code, found, _ = check(tmp_path, steps=30, epochs=2)
    assert (code, found["comparison"]["runs"], found["runs_after_end"]) == (0, 12, 0)
    assert len(found["resumed_at"]) == 4


def test_epochs_are_shortened_if_none_ends_within_the_steps(tmp_path: Path) -> None:
    code, found, _ = check(tmp_path, "", 12, "--epoch-items", "5", items=50)
    assert (code, found["epoch_items"]) == (0, 5)
    assert check(tmp_path, "", 12, "--epoch-items", "0", items=50).found["epoch_items"] == 0


@pytest.mark.parametrize(
    ("defect", "quantity"),
    [("scale", "outputs"), ("plain order", "item"), ("sum", None)],
)
def test_a_defect_is_found_reproduced_and_named(defect: str, quantity: str | None, tmp_path: Path) -> None:
    code, found, _ = check(tmp_path, defect, steps=16)
    assert (code, found["exact"], found["deterministic"], found["reproduced"]) == (1, False, True, True)
    if quantity == "outputs":
        assert found["comparison"]["difference"]["quantity"] == quantity
    elif quantity is None:
        assert found["comparison"]["difference"] is None
        assert found["lines_lost"], "the means of the epochs that were interrupted"


def test_a_script_without_a_seed_is_not_blamed_for_its_resume(tmp_path: Path) -> None:
    code, found, _ = check(tmp_path, "no seed", steps=10)
    assert (code, found["deterministic"]) == (1, False)


@pytest.mark.parametrize(
    ("defect", "steps", "message"),
    [
        ("no saver", 10, "saves no checkpoints"),
        ("", 3, "must be 10 or more"),
        ("fails", 10, "RuntimeError: no second start"),
    ],
)
def test_what_cannot_be_checked_is_said(defect: str, steps: int, message: str, tmp_path: Path) -> None:
    code, found, _ = check(tmp_path, defect, steps)
    assert code == 2
    assert message in found["error"]


def test_a_script_that_makes_no_loop_is_said_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('no data')")
    command = [sys.executable, "-m", "torchhooks", "check", str(tmp_path / "broken.py")]
    done = subprocess.run(command, env={**os.environ, **environment()}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "made no loop of torchhooks, and ended with status 1" in done.stderr
    assert "no data" in done.stderr
