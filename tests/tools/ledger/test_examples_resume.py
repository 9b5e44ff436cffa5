"""``check`` finds nothing in the examples and recipes that resume, nor in scripts of parts that a number chooses."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support import random_scripts
from support.examples import shared
from support.forks import check_in_a_process
from support.paths import ROOT

pytestmark = pytest.mark.slow

RECIPES = ROOT / "docs" / "recipes.md"
CALLS = {
    "Reinforcement learning": "",
    "A trainer class of your own": "",
    "Pass over a batch": "train_without('runs/whole')",
    "Twenty training runs in one process": "",
}
"""The recipes that resume, and what calls their function."""

NUMBERS = range(int(os.environ.get("TORCHHOOKS_RANDOM_SCRIPTS", "6")))


def assert_exact(folder: Path, *command: str, steps: int) -> None:
    found = check_in_a_process(folder, steps, *command)
    assert found["exact"], found["text"]


def test_every_recipe_that_resumes_is_checked() -> None:
    sections = RECIPES.read_text(encoding="utf-8").split("\n## ")
    resumed = [each for each in sections if "CheckpointSaverHook(" in each and "checkpoint_dir" in each]
    assert {each.partition("\n")[0] for each in resumed} == {*CALLS}


@pytest.mark.parametrize("heading", shared(CALLS, 2))
def test_a_recipe_resumes_exactly(heading: str, tmp_path: Path) -> None:
    text = RECIPES.read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    common, code = (re.findall(r"```python\n(.*?)```", each, re.DOTALL)[0] for each in (text, section))
    (tmp_path / "recipe.py").write_text(f"{common}\n{code}\n{CALLS[heading]}\n")
    assert_exact(tmp_path, "recipe.py", steps=30)


EXAMPLES = {
    "usual": [],
    "gpt": [],
    "resume": ["--train", "run"],
    "accelerate_loop": [],
    "optuna_sweep": [],
    "fabric_loop": [],
}
"""The examples that save checkpoints, with their arguments."""


def test_every_example_that_saves_checkpoints_is_checked() -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    assert {name for name, text in texts.items() if "checkpoint_dir=" in text} == {*EXAMPLES}


@pytest.mark.parametrize("name", shared(EXAMPLES, 3))
def test_an_example_resumes_exactly(name: str, tmp_path: Path) -> None:
    assert_exact(tmp_path, str(ROOT / "examples" / f"{name}.py"), *EXAMPLES[name], steps=10 if name == "gpt" else 30)


@pytest.mark.parametrize("number", shared(NUMBERS, 3))
def test_a_script_of_random_parts_resumes_exactly(number: int, tmp_path: Path) -> None:
    assert_exact(tmp_path, random_scripts.__file__, str(number), steps=24)
