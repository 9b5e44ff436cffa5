"""What type checkers make of ``tests/typing/api.py``, and of a program that is wrong in many lines.

Mypy and pyright come with the group ``dev``, and not with the group ``tests``. So ``.ci/run`` runs this file once more.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

import torchhooks

pytestmark = pytest.mark.slow

API = ROOT / "tests/typing/api.py"

CHECKERS = [
    pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}"))
    for name in ("mypy", "pyright")
]

# By lines, with the code of mypy's error. Pyright has other codes, and finds the same lines.
WRONG = """
from typing import Any

from torchhooks import *


def step(x: float) -> float:
    return x


def no_context() -> int:
    return 3


class GivesText(SessionRunHook):
    def before_run(self, run_context: SessionRunContext) -> str:  # E: override
        return "loss"


class TakesNothing(SessionRunHook):
    def end(self) -> None: ...  # E: override


class IsNoHook:
    def begin(self) -> None: ...


loop = MonitoredLoop(step)
loop.step(1)  # E: call-arg
MonitoredLoop(3)  # E: arg-type
MonitoredLoop(step, "model")  # E: arg-type
MonitoredLoop(step, None, None, [StopAtStepHook(3)])  # E: call-arg
MonitoredLoop(step, hook=[])  # E: call-arg
MonitoredLoop(step, hooks=["loss"])  # E: list-item
MonitoredLoop(step, hooks=[StopAtStepHook])  # E: list-item
MonitoredLoop(step, hooks=[IsNoHook()])  # E: list-item
MonitoredLoop(step, hooks=StopAtStepHook(3))  # E: arg-type
MonitoredLoop(step, state={"best": 3})  # E: dict-item
MonitoredLoop(step, metadata=[3])  # E: arg-type
load_weights("run", {"weight": 3})  # E: arg-type
Variables(pickled=3)  # E: arg-type
Variables({"best": 3})  # E: call-arg
text: str = loop.run(1.0)  # E: assignment
loop.until_stop(3)  # E: arg-type
for item in loop.until_stop([1, 2]):
    item.upper()  # E: attr-defined
loop.run_step_fn(no_context)  # E: arg-type
loop.global_step = 3  # E: misc
loop.session = loop.session  # E: misc
loop.session.global_step = "3"  # E: assignment
loop.stop_reason.upper()  # E: union-attr
StopAtStepHook(last_step="3")  # E: arg-type
BestCheckpointHook("run", "loss", save_steps=5, mode="least")  # E: arg-type
MonitoredTrainingLoop(step, save_checkpoint_steps="5")  # E: arg-type
LoggingTensorHook(["loss"], formatter=3)  # E: arg-type
LoggingTensorHook(["loss"], timer=3)  # E: arg-type
SessionRunArgs(feed_dict=["x"])  # E: arg-type
"""


def errors_of(checker: str, file: Path, cache: Path) -> tuple[int, list[str]]:
    """Return how many files ``checker`` has checked, and its errors in ``file``: ``"3: arg-type"``."""
    python = [sys.executable, "-m", checker]
    # In a process of its own: mypy changes how often this one would collect its garbage.
    if checker == "mypy":
        config = f"[mypy]\nstrict = true\nmypy_path = {ROOT}\nfollow_imports = silent\n"
        (cache / "mypy.ini").write_text(config)
        command = [*python, "--config-file", f"{cache}/mypy.ini", "--cache-dir", str(cache), str(file)]
        ran = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False)
        count = re.search(r"(?:checked|in) (\d+) (?:source )?files?", ran.stdout.splitlines()[-1])
        assert count is not None, ran.stdout + ran.stderr
        errors = re.findall(rf"^(?:.*/)?{file.name}:(\d+): error: .*\[([\w-]+)\]$", ran.stdout, re.MULTILINE)
        return int(count[1]), [f"{line}: {code}" for line, code in errors]
    # In ROOT, where it finds the package.
    command = [*python, "--pythonpath", sys.executable, "--outputjson", str(file)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = json.loads(ran.stdout)
    found = [(each["range"]["start"]["line"] + 1, each["rule"]) for each in said["generalDiagnostics"]]
    return said["summary"]["filesAnalyzed"], [f"{line}: {rule}" for line, rule in found]


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is kept, if pytest keeps one, so that mypy is quick but for the first time."""
    kept = getattr(request.config, "cache", None)  # not there with -p no:cacheprovider
    return tmp_path_factory.mktemp("typing") if kept is None else Path(kept.mkdir("typing"))


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_public_api_has_the_types_that_a_program_expects(checker: str, cache: Path) -> None:
    assert errors_of(checker, API, cache) == (1, [])


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_wrong_program_has_an_error_in_each_wrong_line_and_in_no_other(
    checker: str, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    marks = [(number, re.search(r"# E: (\S+)$", line)) for number, line in enumerate(WRONG.splitlines(), start=1)]
    expected = [f"{number}: {mark[1]}" for number, mark in marks if mark]
    count, found = errors_of(checker, tmp_path / "wrong.py", cache)
    if checker == "pyright":
        expected, found = ([line.partition(":")[0] for line in lines] for lines in (expected, found))
    assert (count, found) == (1, expected)


@pytest.mark.parametrize("checker", CHECKERS)
def test_another_type_than_the_api_has_is_an_error(checker: str, cache: Path, tmp_path: Path) -> None:
    text = API.read_text(encoding="utf-8")
    lines = text.splitlines()
    numbers = [number for number, line in enumerate(lines) if re.search(r"assert_type\(.*, .+\)$", line)]
    for number in numbers:
        lines[number] = re.sub(r", [^,]+(\[.*\])?\)$", ", bytes)", lines[number])
    (tmp_path / "other.py").write_text("\n".join(lines))
    _, found = errors_of(checker, tmp_path / "other.py", cache)
    assert len(numbers) > 30
    assert [int(error.partition(":")[0]) - 1 for error in found] == numbers


def test_the_program_uses_everything_public() -> None:
    used = set(re.findall(r"\w+", API.read_text(encoding="utf-8")))
    assert set(torchhooks.__all__) - used == set()
