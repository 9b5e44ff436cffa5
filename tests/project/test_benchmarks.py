"""The benchmarks run. benchmarks/RESULTS.md has what they measure; these tests check no figures."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import scripts, simulated
from support.paths import ROOT

ARGUMENTS = {
    "accelerator": ["--simulated", "--secs", "0.02", "--runs", "4", "--rounds", "1"],
    "autopsy": ["--widths", "8", "--rounds", "1"],
    "checkpoint": ["--megabytes", "12", "--states", "8x2", "--rounds", "1"],
    "gpu": ["--device", "cpu", "--runs", "40", "--rounds", "1"],
    "histograms": ["--elements", "10000", "--rounds", "1"],
    "ledger": ["--runs", "50", "--rounds", "1", "--megabytes", "2"],
    "overhead": ["--runs", "200", "--rounds", "1"],
    "ranks": ["--runs", "200", "--rounds", "1", "--secs", "0.5"],
    "running": ["--runs", "200", "--rounds", "1"],
    "soak": ["--runs", "1000"],
}


class Ran(NamedTuple):
    printed: str
    document: dict[str, Any]


QUICK = "histograms", "overhead"


def run(name: str) -> Ran:
    """Run a benchmark in a new process."""
    if "--simulated" in ARGUMENTS[name]:
        simulated.needs_compiler()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, name)
        arguments = *ARGUMENTS[name], "--results", folder
        process = scripts.start(ROOT / "benchmarks" / f"{name}.py", output, *arguments)
        process.join()
        printed = output.read_text()
        assert process.exitcode == 0, printed
        return Ran(printed, json.loads(output.with_suffix(".json").read_text()))


@pytest.fixture(params=[pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ARGUMENTS])
def ran(request: pytest.FixtureRequest) -> Ran:
    return run(request.param)


def test_a_benchmark_prints_tables_and_every_budget_and_whether_it_was_met_and_records_the_machine(ran: Ran) -> None:
    assert ran.printed.count("\n| ---") >= 2
    assert {"cpu", "cores", "python", "torch"} <= ran.document["machine"].keys()
    for budget in ran.document["budgets"]:
        (line,) = [line for line in ran.printed.splitlines() if f"| {budget['what']} " in line]
        assert line.rstrip(" |").endswith("ok" if budget["ok"] else "over")


@pytest.mark.slow
def test_the_first_hour_on_a_gpu_runs_on_a_cpu_as_far_as_it_can(tmp_path: Path) -> None:
    parts = ["tests", "streams", "saving", "in_place", "lost"]
    command = [sys.executable, str(ROOT / "benchmarks" / "first_hour_on_a_gpu.py"), "--only", *parts]
    options = ["--repeat", "0", "--gigabytes", "0.01", "--results", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in parts:
        assert f"## {part}: " in done.stdout
    assert (tmp_path / "first_hour_on_a_gpu.md").read_text() in done.stdout
    if not torch.accelerator.is_available():
        assert "## tests: skipped" in done.stdout
        assert "## streams: passed" in done.stdout
