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

from torchhooks.ledger.check import Options, Verdict, prove, text_of

pytestmark = pytest.mark.slow

NOT_FOUND = {"signal_in_validation_before_a_guard"}
"""Defects that show only if a signal comes outside of the runs."""


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


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_a_loop_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_forks(monkeypatch)
    monkeypatch.chdir(tmp_path)
    verdict = verdict_of(Path(defects.__file__), name, tmp_path, steps=10)
    assert verdict.is_exact == (name in NOT_FOUND), "\n".join(text_of(verdict))
