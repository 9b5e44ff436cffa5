"""The benchmarks run. benchmarks/RESULTS.md has what they measure; these tests check no figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import scripts, simulated
from support.paths import ROOT
from support.waiting import wait_until

ARGUMENTS = {
    "accelerator": ["--simulated", "--secs", "0.02", "--runs", "4", "--rounds", "1"],
    "autopsy": ["--widths", "8", "--rounds", "1"],
    "checkpoint": ["--megabytes", "12", "--states", "8x2", "--rounds", "1"],
    "diff_of_ledgers": ["--runs", "20", "200", "--rounds", "1"],
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


# A plain pytest runs one, and pytest --all the others.
MARKS: dict[str, list[Any]] = {"histograms": []}


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


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, [pytest.mark.release])) for name in ARGUMENTS])
def ran(request: pytest.FixtureRequest) -> Ran:
    return run(request.param)


def test_a_benchmark_prints_tables_and_every_budget_and_whether_it_was_met_and_records_the_machine(ran: Ran) -> None:
    assert ran.printed.count("\n| ---") >= 2
    assert {"cpu", "cores", "python", "torch"} <= ran.document["machine"].keys()
    for budget in ran.document["budgets"]:
        (line,) = [line for line in ran.printed.splitlines() if f"| {budget['what']} " in line]
        assert line.rstrip(" |").endswith("ok" if budget["ok"] else "over")


def first_hour(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "first_hour_on_a_gpu.py"), "--results", str(folder)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert (folder / "first_hour_on_a_gpu.md").read_text() == done.stdout, done.stderr
    return done


@pytest.mark.release
def test_the_first_hour_on_a_gpu_runs_on_a_cpu_as_far_as_it_can(tmp_path: Path) -> None:
    parts = ["first_save", "tests", "graph", "streams", "saving", "in_place", "lost"]
    done = first_hour(tmp_path, "--gigabytes", "0.01", "--only", *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in parts:
        assert f"## {part}\n" in done.stdout
    if not torch.accelerator.is_available():
        assert "**tests: skipped**" in done.stdout
        assert "**streams: passed**" in done.stdout


SLOW_PART = """
import subprocess, sys, time
from pathlib import Path
from first_hour_on_a_gpu import Options, Report, run

def slow(options):
    "Take too long, and so does what it has started."
    yield "found until then"
    Path("started").write_text(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid))
    time.sleep(300)

if __name__ == "__main__":
    run(slow, Options(repeat=1, gigabytes=1.0, results=Path(), secs=5.0), Report(Path("report.md")))
"""


@pytest.mark.release
def test_a_part_of_the_first_hour_is_ended_with_all_that_it_has_started_when_its_time_is_up(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SLOW_PART)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])}
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, check=True)
    report = (tmp_path / "report.md").read_text()
    assert "found until then" in report
    assert "**slow: ended after 5 s**" in report
    child = int((tmp_path / "started").read_text())
    wait_until(lambda: not is_alive(child))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.release
def test_parts_of_the_first_hour_for_which_no_time_is_left_are_not_run(tmp_path: Path) -> None:
    done = first_hour(tmp_path, "--minutes", "0.01", "--only", "transformer", "saves")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("not run: no time was left") == 2
