"""The tests that need an accelerator, on a simulated one, in processes of their own: it cannot be unregistered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import simulated
from support.paths import ROOT

FILES = sorted(
    str(file.relative_to(ROOT))
    for file in (ROOT / "tests").rglob("test_*.py")
    if "mark.accelerator" in file.read_text(encoding="utf-8") and file != Path(__file__)
)
HERE = [file for file in FILES if file.startswith("tests/device/")]


@pytest.mark.slow
@pytest.mark.parametrize("files", [HERE, [file for file in FILES if file not in HERE]], ids=["device", "others"])
def test_the_tests_that_need_an_accelerator_pass_on_a_simulated_one(files: list[str]) -> None:
    simulated.needs_compiler()
    coverage = sys.modules.get("coverage")  # imported if it measures
    measuring = None if coverage is None else coverage.Coverage.current()
    command = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--simulated", "-m", "accelerator", *files]
    if measuring is not None:  # pytest-cov combines what is next to its own file
        data = measuring.get_option("run:data_file")
        command = ["-m", "coverage", "run", "--parallel-mode", f"--data-file={data}", *command]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_some_tests_need_an_accelerator() -> None:
    assert "tests/device/test_accelerator.py" in HERE
    assert "tests/checkpoints/test_saver.py" in FILES
