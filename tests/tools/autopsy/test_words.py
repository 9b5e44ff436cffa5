"""The words of a report, of what an examination may have found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchhooks.tools.autopsy.figures import Figures
from torchhooks.tools.autopsy.operations import Origin, Source
from torchhooks.tools.autopsy.report import (
    BatchFile,
    Report,
    as_markdown,
    lines_of,
    report_of_cause,
    shown_figures,
    write_report,
)
from torchhooks.tools.autopsy.request import Environment, Request
from torchhooks.tools.autopsy.watching import ModuleCall, WatchedRun

THERE = Environment(command=[], host="node7", device="cpu", torch="2")
REQUEST = Request(
    step=5,
    kind="NaN",
    message="loss is NaN at step 5",
    hook="",
    rank=0,
    ranks=1,
    checkpoint=None,
    noticed_at=5,
    digests={"loss": "a", "input x": "b"},
    environment=THERE,
    time=0.0,
)
BROKEN = ModuleCall("0", "Linear", [], [Figures([1], "float32", not_finite=1.0)])
MADE = Origin(0, 0, 5, "forward", "NaN", operation="aten.div")
GONE: dict[str, Any] = {"came_back": False, "digests": REQUEST.digests, "environment": THERE}


def report_of(rank: int = 0, **found: Any) -> Report:
    found = {"runs": [WatchedRun(step=5, state={})], **found}
    return Report(request=REQUEST, step=5, rank=rank, restored_step=0, watched_from=1, **found)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, "The cause was not found: no operator of torch made it of finite values in this process."),
        (
            {"runs": [WatchedRun(step=5, state={}, modules=[BROKEN])]},
            "The first module that made it of finite inputs is 0 (Linear).",
        ),
        ({"origin": MADE}, "Cause: aten.div made a NaN in the forward pass, outside of the model."),
        (
            {"origin": replace(MADE, phase="before")},
            "Cause: a NaN in a tensor that was there before the operators that were watched ().",
        ),
        (
            {"origin": replace(MADE, phase="before", source=Source("/a/b.py", 7, "x[0] = nan"))},
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
            GONE | {"environment": replace(THERE, host="node8")},
            "Not as at the first time: host node7 -> node8.",
        ),
        (
            {**GONE, "environment": None},
            "The digests are the same (loss a then, a now; input x b then, b now), and the result is not: an operator "
            "that is not deterministic, noise or a variable of the script that a checkpoint does not contain, or a "
            "fault of the hardware: node7, cpu.",
        ),
        (
            GONE | {"digests": {}},
            "other data, an operator that is not deterministic, noise or a variable of the script that a checkpoint "
            "does not contain, or a fault of the hardware: node7, cpu.",
        ),
    ],
)
def test_what_was_found_is_said(found: dict[str, Any], said: str) -> None:
    assert said in lines_of(report_of(**found), "nan-5/report.md")


def test_the_part_of_a_rank_is_said() -> None:
    assert shown_figures(Figures([4, 2], "float32", part=[2, 2])) == "float32 4x2 (of which this rank has 2x2)"


def test_a_batch_that_could_not_be_saved_is_said() -> None:
    text = as_markdown(report_of(batch_file=BatchFile(missing="the disk is full")))
    assert "There is no batch.pt: the disk is full" in text
    assert "## Files" not in as_markdown(report_of())


def test_the_rank_that_made_it_first_is_reported_with_the_others(tmp_path: Path) -> None:
    later, unknown, first = (
        report_of(0, origin=replace(MADE, phase="backward")),
        report_of(1),
        report_of(2, origin=MADE),
    )
    report = report_of_cause([later, unknown, first])
    report.lines = lines_of(report, str(tmp_path / "report.md"))
    write_report(str(tmp_path / "report.md"), report)
    assert report.lines[0] == "autopsy of step 5: loss is NaN at step 5, again (rank 2 of 3)."
    saved = json.loads((tmp_path / "report.json").read_text())
    assert [each["rank"] for each in saved["ranks"]] == [0, 1, 2]
    assert (tmp_path / "report.md").read_text().startswith("# Autopsy of step 5\n")
