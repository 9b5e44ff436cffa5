"""``python -m torchhooks check``: a script runs as it is, and the verdict is that of the script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from torchhooks import CheckpointSaverHook, MonitoredLoop
from torchhooks.__main__ import main
from torchhooks.common.files import CHECK_PLAN, PLACES
from torchhooks.data import cursor
from torchhooks.ledger import checked
from torchhooks.ledger.lines import read_ledgers

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
if chosen.defect == "no loop":
    raise SystemExit("no data")
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


class Checker:
    """Checks a script in a folder of its own, which this process is in."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._capsys = folder, capsys
        (folder / "train.py").write_text(SCRIPT)

    def printed(self, *words: str) -> tuple[int, str, str]:
        """Return the exit status of the command with these words, its output, and its errors."""
        code = main(["check", "train.py", *words])
        assert [path.name for path in self._folder.iterdir()] == ["train.py"], "all was written to the scratch folder"
        return code, *self._capsys.readouterr()

    def __call__(self, defect: str = "", steps: int = 14, *words: str, **script: int) -> Checked:
        of_script = ["--defect", defect, *(f"--{name}={value}" for name, value in script.items())]
        code, output, errors = self.printed("--steps", str(steps), "--json", *words, "--", *of_script)
        assert not errors
        return Checked(code, json.loads(output))


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Checker:
    monkeypatch.chdir(tmp_path)
    return Checker(tmp_path, capsys)


pytestmark = pytest.mark.slow


def test_an_exact_script_passes_and_is_resumed_in_four_places(check: Checker) -> None:
    code, found = check(steps=14)
    assert (code, found["exact"]) == (0, True)
    assert found["comparison"]["runs"] == 14
    assert found["resumed_at"] == sorted(set(found["resumed_at"]))
    assert all(found["resumed_at"])


def test_a_script_that_ends_within_the_steps_makes_no_run_when_it_is_started_once_more(check: Checker) -> None:
    code, found = check(steps=30, epochs=3, items=5)
    assert (code, found["comparison"]["runs"], found["runs_after_end"]) == (0, 15, 0)
    assert len(found["resumed_at"]) == 5


def test_epochs_are_shortened_if_none_ends_within_the_steps(check: Checker) -> None:
    code, found = check("", 12, "--epoch-items", "5", items=50)
    assert (code, found["epoch_items"]) == (0, 5)
    assert check("", 12, "--epoch-items", "0", items=50).found["epoch_items"] == 0


@pytest.mark.parametrize("defect", ["scale", "plain order", "sum"])
def test_a_defect_is_found_reproduced_and_named(defect: str, check: Checker) -> None:
    code, found = check(defect, steps=16)
    assert (code, found["exact"], found["deterministic"], found["reproduced"]) == (1, False, True, True)
    difference = found["comparison"]["difference"]
    if defect == "scale":
        assert difference["quantity"] == "outputs"
    elif defect == "sum":
        assert difference is None
        assert found["lines_lost"], "the means of the epochs that were interrupted"


@pytest.mark.parametrize(
    ("defect", "text"),
    [
        ("", "resumes exactly: "),
        ("scale", "look at        scale starts over: 1.0 after the resume, 0."),
        ("sum", "look at        total starts over: "),
        ("no seed", "two training runs without an interruption differ"),
    ],
)
def test_the_verdict_is_printed_for_people(defect: str, text: str, check: Checker) -> None:
    code, output, errors = check.printed("--steps", "12", "--", "--defect", defect)
    assert (code, errors) == (int(bool(defect)), "")
    assert text in output


def test_a_script_without_a_seed_is_not_blamed_for_its_resume(check: Checker) -> None:
    code, found = check("no seed", steps=10)
    assert (code, found["deterministic"]) == (1, False)


@pytest.mark.parametrize(
    ("defect", "steps", "message"),
    [
        ("no saver", 10, "saves no checkpoints"),
        ("", 3, "must be 10 or more"),
        ("fails", 10, "RuntimeError: no second start"),
        ("no loop", 10, "made no loop of torchhooks, and ended with status 1:\nno data"),
    ],
)
def test_what_cannot_be_checked_is_said(defect: str, steps: int, message: str, check: Checker) -> None:
    code, found = check(defect, steps)
    assert code == 2
    assert message in found["error"]


def test_keep_leaves_what_the_processes_have_written(check: Checker) -> None:
    code, _, errors = check.printed("--steps", "10", "--keep")
    folder = Path(errors.split()[-1])
    assert code == 0
    assert (folder / "interrupted" / "places").is_dir()


def test_a_loop_under_check_records_everything_saves_often_and_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens in the processes of the script, here without one of its own."""
    ledger, seen_file, probe = (str(tmp_path / "places" / name) for name in ("ledger", "seen", "probe"))
    plan = checked.ProcessPlan(ledger, 100, seen_file, probe, kill_after=3, kill_by=0, depth=2, epoch_items=4)
    (tmp_path / "places").mkdir()
    plan.write(str(tmp_path / "plan"))
    monkeypatch.setenv(CHECK_PLAN, str(tmp_path / "plan"))
    monkeypatch.setenv(PLACES, str(tmp_path / "places"))
    seen = checked.Seen()
    # Of this process: the tests after this one must not find it.
    monkeypatch.setattr(checked.Cut, "_seen", seen)
    monkeypatch.setattr(checked.Cut, "_runs_of_earlier_loops", 0)
    monkeypatch.setattr(cursor, "short_epochs", None)
    model = nn.Linear(1, 1)
    saver = CheckpointSaverHook(tmp_path / "run", every_n_steps=1000)
    with MonitoredLoop(model, model, hooks=[saver], checkpoint_dir=tmp_path / "run") as loop:
        for _ in loop.until_stop(range(2)):
            for inputs in loop.until_stop(list(torch.ones(6, 1))):
                loop.run(inputs)
    assert saver.timer.every_steps == 10
    assert not (tmp_path / "run").exists()
    (entries,) = (each.entries for each in read_ledgers(plan.ledger))
    assert [run for _, run in sorted(entries)] == [*range(1, 9)], "two epochs of four items"
    assert checked.Seen.read(plan.seen) == checked.Seen(1, 8, 2, True, True, 0) == seen
