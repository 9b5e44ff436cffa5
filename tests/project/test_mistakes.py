"""What somebody who knows PyTorch gets wrong, and what torchhooks says: tests/data/mistakes.md, message by message."""

from __future__ import annotations

import doctest
import re
import traceback
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
MOST_INTERNAL_FRAMES = 2  # between the line of the user and the message
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


def what_is_said(code: str) -> tuple[list[str], list[str]]:
    """Run ``code``; return the warnings and the error, and the frames between the user's line and the error."""
    names = the_users_names()
    said: list[str] = []
    frames: list[str] = []
    with log_lines() as lines:
        try:
            exec(compile(code, USER, "exec"), names)
        except Exception as error:
            said = [f"{type(error).__name__}: {error}"]
            for frame in traceback.extract_tb(error.__traceback__):
                frames = [] if frame.filename == USER else [*frames, frame.name]
    return [*(f"{level}: {text}" for level, text in lines if level != "INFO"), *said], frames


@pytest.mark.parametrize("mistake", mistakes(), ids=lambda mistake: mistake.name)
def test_a_mistake_is_answered_with_the_value_the_rule_and_the_way_out(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said, frames = what_is_said(mistake.code)
    given = "".join(f"{line}\n" for line in said)
    assert doctest.OutputChecker().check_output(mistake.said, given, doctest.ELLIPSIS), given
    assert len(frames) <= MOST_INTERNAL_FRAMES


def test_the_page_has_all_mistakes_and_each_once() -> None:
    names = [mistake.name for mistake in mistakes()]
    assert len(names) == len(set(names)) == PAGE.read_text(encoding="utf-8").count("### ")
    assert len(names) >= 93


def test_what_a_user_function_raises_keeps_its_frames() -> None:
    def broken() -> float:
        raise ValueError("in the function of the user")

    with (
        pytest.raises(ValueError, match="in the function") as caught,
        torchhooks.MonitoredLoop(lambda: 1.0, hooks=[torchhooks.EvaluationHook(broken, every_n_steps=1)]) as loop,
    ):
        loop.run()
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "broken"
    assert "complete" in names  # the frames in between say how it was called


def test_a_mistake_in_torchhooks_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchhooks.loop.arguments.check_optimizer", None)  # to call it is a TypeError
    with pytest.raises(TypeError, match="'NoneType' object is not callable") as caught:
        torchhooks.MonitoredLoop(lambda: 1.0)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename.endswith("arguments.py")
