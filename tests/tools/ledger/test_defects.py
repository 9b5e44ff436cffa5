"""Scripts that do not resume exactly: ``check`` finds each of them, and names what it comes from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import defects, forgetful
from support.defects import DEFECTS
from support.examples import shared
from support.forgetful import FORGETFUL
from support.forks import check_in_a_process
from support.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", shared(FORGETFUL, 6))
def test_a_defect_of_a_script_is_found_and_named(name: str, tmp_path: Path) -> None:
    found = check_in_a_process(tmp_path, 16, forgetful.__file__, name, forks=name != "order_of_a_set")
    assert not found["exact"]
    assert re.search(FORGETFUL[name][1], found["text"]), found["text"]


def first_difference(found: dict[str, Any]) -> str:
    """Return what differs first, in the words of docs/proof.md."""
    difference = found["comparison"]["difference"]
    if difference is not None:
        return str(difference["quantity"])
    return "exact" if found["exact"] else "runs"


def row_of(name: str) -> str:
    """Return the row of docs/loops.md that has the way with this name."""
    text = (ROOT / "docs" / "loops.md").read_text(encoding="utf-8")
    (row,) = (row for row in text.splitlines() if re.search(rf"<!-- .*\b{name}\b.* -->", row))
    return row


@pytest.mark.parametrize("name", shared(DEFECTS, 6))
def test_a_defect_of_a_loop_is_found_as_the_documentation_says(name: str, tmp_path: Path) -> None:
    found = check_in_a_process(tmp_path, 10, defects.__file__, name)
    said = re.search(r"`check`: ([^.]*)\.", row_of(name))
    answers = said[1].split(" or ") if said else ["exact"]
    assert first_difference(found) in answers, found["text"]
    if said and " | warned | " in row_of(name):
        logged = [path.read_text() for path in (tmp_path / "scratch" / "interrupted").glob("*.err")]
        assert any("WARNING:torchhooks:" in each for each in logged)
