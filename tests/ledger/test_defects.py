"""Scripts that do not resume exactly: ``check`` finds each of them, and names what it comes from."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support import defects, forgetful
from support.defects import DEFECTS
from support.forgetful import FORGETFUL
from support.forks import use_forks
from support.paths import ROOT

from torchhooks.ledger.check import Options, Verdict, prove, text_of

pytestmark = pytest.mark.slow


def verdict_of(script: Path, name: str, folder: Path, steps: int) -> Verdict:
    return prove([sys.executable, str(script), name], str(folder), Options(steps), reproduce=False)


@pytest.mark.parametrize("name", FORGETFUL)
def test_a_defect_of_a_script_is_found_and_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "order_of_a_set":
        use_forks(monkeypatch)
    monkeypatch.chdir(tmp_path)
    verdict = verdict_of(Path(forgetful.__file__), name, tmp_path, steps=16)
    printed = "\n".join(text_of(verdict))
    assert not verdict.is_exact
    assert re.search(FORGETFUL[name][1], printed), printed


def first_difference(verdict: Verdict) -> str:
    """Return what differs first, in the words of docs/proof.md."""
    difference = verdict.comparison.difference
    if difference is not None:
        return difference.quantity
    return "exact" if verdict.is_exact else "runs"


def row_of(name: str) -> str:
    """Return the row of docs/loops.md that has the way with this name."""
    text = (ROOT / "docs" / "loops.md").read_text(encoding="utf-8")
    (row,) = (row for row in text.splitlines() if re.search(rf"<!-- .*\b{name}\b.* -->", row))
    return row


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_a_loop_is_found_as_the_documentation_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_forks(monkeypatch)
    monkeypatch.chdir(tmp_path)
    verdict = verdict_of(Path(defects.__file__), name, tmp_path, steps=10)
    said = re.search(r"`check`: ([^.]*)\.", row_of(name))
    answers = said[1].split(" or ") if said else ["exact"]
    assert first_difference(verdict) in answers, "\n".join(text_of(verdict))
    if said and " | warned | " in row_of(name):
        logged = [path.read_text() for path in (tmp_path / "interrupted").glob("*.err")]
        assert any("WARNING:torchhooks:" in each for each in logged)
