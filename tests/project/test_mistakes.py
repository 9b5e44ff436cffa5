"""What somebody who knows PyTorch gets wrong, and what torchhooks says: tests/data/mistakes.md, message by message."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.paths import ROOT
from torch.utils.data import DataLoader, TensorDataset

import torchhooks
from torchhooks.testing import log_lines

PAGE = ROOT / "tests" / "data" / "mistakes.md"
MISTAKE = re.compile(r"^### (?P<name>[^\n]+)\n\n```python\n(?P<code>.*?)```\n\n```text\n(?P<said>.*?)```$", re.M | re.S)
USER = "<the user's script>"


class Mistake(NamedTuple):
    name: str
    code: str
    said: str


def mistakes() -> list[Mistake]:
    return [Mistake(**found.groupdict()) for found in MISTAKE.finditer(PAGE.read_text(encoding="utf-8"))]


def the_users_names() -> dict[str, object]:
    """Return what the code of each mistake finds: the names of torchhooks, and the script that the page begins with."""
    names: dict[str, object] = {"__name__": "script", "torch": torch, "summary": torchhooks.summary}
    names |= {"DataLoader": DataLoader, "TensorDataset": TensorDataset}
    names |= {name: getattr(torchhooks, name) for name in torchhooks.__all__}
    (script,) = re.findall(r"^```python\n(.*?)```$", PAGE.read_text(encoding="utf-8").partition("###")[0], re.M | re.S)
    exec(compile(script, USER, "exec"), names)
    return names


def what_is_said(code: str) -> list[str]:
    """Run ``code``; return the warnings and the error."""
    said: list[str] = []
    with log_lines() as lines:
        try:
            exec(compile(code, USER, "exec"), the_users_names())
        except Exception as error:
            said = [f"{type(error).__name__}: {error}"]
    return [*(f"{level}: {text}" for level, text in lines if level != "INFO"), *said]


@pytest.mark.parametrize("mistake", mistakes(), ids=lambda mistake: mistake.name)
def test_a_mistake_is_answered_with_the_value_the_rule_and_the_way_out(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = "".join(f"{line}\n" for line in what_is_said(mistake.code))
    assert doctest.OutputChecker().check_output(mistake.said, given, doctest.ELLIPSIS), given


def test_the_page_has_all_mistakes_and_each_once() -> None:
    names = [mistake.name for mistake in mistakes()]
    assert len(names) == len(set(names)) == PAGE.read_text(encoding="utf-8").count("### ")
    assert len(names) == 40
