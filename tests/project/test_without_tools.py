"""torchhooks without the folder ``tools/``: the core needs none of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

DEADLINE_SECS = 600
TESTS = ("lifecycle", "loop", "hooks")
OF_TOOLS = (  # they look at what a tool does in a loop
    "tests/loop/test_caught.py::test_the_question_of_a_nan_that_was_caught_is_put_aside_with_the_next_checkpoint",
    "tests/loop/test_caught.py::test_a_checkpoint_in_another_folder_puts_no_question_aside",
    "tests/loop/test_caught.py::test_the_question_stays_if_the_process_ends_before_the_next_checkpoint",
    "tests/hooks/test_progress_bar.py::test_no_thread_refreshes_the_bar",
)
SCRIPT = """
import sys
import torch, torchhooks
from torchhooks import CheckpointSaverHook, MonitoredLoop, NanTensorHook, StopAtStepHook

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hooks = [CheckpointSaverHook(save_steps=2), NanTensorHook("loss"), StopAtStepHook(last_step=4)]
with MonitoredLoop(lambda: model(torch.ones(1)), model, optimizer, hooks=hooks, checkpoint_dir="run") as loop:
    while not loop.should_stop():
        loop.run()
print(loop.stop_reason, [name for name in sys.modules if name.startswith("torchhooks.tools")])
try:
    from torchhooks import *
    torchhooks.MirrorHook
except AttributeError as error:
    print(error)
"""


@pytest.fixture
def without_tools(tmp_path: Path) -> Path:
    """A copy of the package and of its tests, from which the tools were removed."""
    ignored = shutil.ignore_patterns("__pycache__", "_build", "tools")
    for name in ("docs", "tests", "torchhooks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Not the options of this session, such as those that measure coverage, which is that of the package itself.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV"))}
    environment["PYTHONPATH"] = str(folder)
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECS, check=False
    )


@pytest.mark.slow
def test_a_training_run_needs_no_tool(without_tools: Path) -> None:
    (without_tools / "torchhooks/tools/__pycache__").mkdir(parents=True)  # as git leaves it
    ran = python(without_tools, "-c", SCRIPT)
    missing = "module 'torchhooks' has no attribute 'MirrorHook': it is in torchhooks/tools, which is not there"
    assert ran.stdout.splitlines() == ["StopAtStepHook: step 4 []", missing], ran.stderr
    listed = python(without_tools, "-m", "torchhooks", "checkpoints", "run")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["model.ckpt-0", "model.ckpt-2", "model.ckpt-4"]
    assert not (without_tools / "run/.run.json").exists()


@pytest.mark.slow
def test_the_core_is_tested_without_the_tools(without_tools: Path) -> None:
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", *(f"--deselect={name}" for name in OF_TOOLS)]
    ran = python(without_tools, "-m", "pytest", *options, *(f"tests/{folder}" for folder in TESTS))
    assert ran.returncode == 0, ran.stdout[-3000:]
    passed = int(ran.stdout.rsplit(" passed", 1)[0].split()[-1].replace(",", ""))
    assert passed > 3000, "the folders of the tests are there"
