"""The words of a report, of what an examination may have found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchhooks.autopsy.report import as_markdown, lines_of, shown_figures, write_report

REQUEST: dict[str, Any] = {
    "step": 5,
    "kind": "NaN",
    "message": "loss is NaN at step 5",
    "digests": {"loss": "a", "input x": "b"},
    "environment": {"host": "node7", "device": "cpu"},
}
RUN: dict[str, Any] = {
    "step": 5,
    "value": 1.0,
    "lr": [0.1],
    "gradient_norm": None,
    "optimizer_steps": 1,
    "largest": {},
    "gradients": {},
}
REPORT: dict[str, Any] = {
    "request": REQUEST,
    "came_back": True,
    "problem": None,
    "step": 5,
    "rank": 0,
    "of_ranks": 1,
    "eager": False,
    "not_finite_at_start": [],
    "not_finite_first": None,
    "restored_step": 0,
    "watched_from": 1,
    "origin": None,
    "module": None,
    "modules": [],
    "batch": None,
    "epoch": None,
    "runs": [RUN],
    "notes": [],
    "has_state": False,
    "digests": REQUEST["digests"],
    "environment": REQUEST["environment"],
    "outputs": {},
    "parameters": {},
    "batch_file": None,
}
MADE = {"kind": "NaN", "phase": "forward", "operation": "aten.div", "step": 5}
GONE: dict[str, Any] = {"came_back": False}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, "The cause was not found: no operator of torch made it of finite values in this process."),
        ({"module": {"path": "0"}}, "The first module that made it of finite inputs is 0."),
        ({"origin": MADE}, "Cause: aten.div made a NaN in the forward pass, outside of the model."),
        (
            {"origin": {**MADE, "phase": "before"}},
            "Cause: a NaN in a tensor that was there before the operators that were watched ().",
        ),
        (
            {"origin": {**MADE, "phase": "before", "source": {"file": "/a/b.py", "line": 7, "text": "x[0] = nan"}}},
            "Cause: a NaN in a tensor that was there before the operators that were watched (), first used in "
            "b.py:7: x[0] = nan.",
        ),
        ({"not_finite_at_start": ["bias"]}, "The state: bias is not finite when this process began."),
        ({"eager": True}, "This run was made in eager mode, without torch.compile, and shows the same."),
        ({}, "The report is nan-5/report.md."),
        (GONE | {"eager": True}, "This run was made in eager mode: the NaN may be one of the compiled code alone."),
        (
            GONE | {"digests": {"loss": "c", "input x": "b"}},
            "Random numbers are not the same: loss a then, c now. A source of noise is not seeded, or not saved.",
        ),
        (
            GONE | {"digests": {"loss": "a", "input x": "c"}},
            "The data are not the same: input x b then, c now. What loads or augments them is not seeded.",
        ),
        (
            GONE | {"environment": {"host": "node8", "device": "cpu"}},
            "Not as at the first time: host node7 -> node8.",
        ),
        (
            GONE | {"digests": {}},
            "an operator that is not deterministic, noise from a source that a checkpoint does not contain, or a fault "
            "of the hardware: node7, cpu.",
        ),
    ],
)
def test_what_was_found_is_said(found: dict[str, Any], said: str) -> None:
    assert said in lines_of({**REPORT, **found}, "nan-5")


def test_the_part_of_a_rank_is_said() -> None:
    figures = {"shape": [4, 2], "dtype": "float32", "part": [2, 2]}
    assert shown_figures(figures) == "float32 4x2 (of which this rank has 2x2)"


def test_a_batch_that_could_not_be_saved_is_said() -> None:
    text = as_markdown({**REPORT, "batch_file": {"missing": "the disk is full"}}, [])
    assert "There is no batch.pt: the disk is full" in text
    assert "## Files" not in as_markdown(REPORT, [])


def test_the_rank_that_made_it_first_is_reported_with_the_others(tmp_path: Path) -> None:
    later = {**REPORT, "origin": {**MADE, "phase": "backward"}}
    unknown, first = {**REPORT, "rank": 1}, {**REPORT, "rank": 2, "origin": MADE}
    report = write_report(str(tmp_path), [later, unknown, first], REQUEST)
    assert report["lines"][0] == "autopsy of step 5: loss is NaN at step 5, again (rank 2 of 3)."
    saved = json.loads((tmp_path / "report.json").read_text())
    assert [each["rank"] for each in saved["ranks"]] == [0, 1, 2]
    assert (tmp_path / "report.md").read_text().startswith("# Autopsy of step 5\n")
