"""The benchmarks run. What they measure is in benchmarks/RESULTS.md, not here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
ARGUMENTS = {"overhead": ["--runs", "200", "--rounds", "1"], "soak": ["--runs", "1000"]}


class Ran(NamedTuple):
    printed: str
    document: dict[str, Any]


@pytest.fixture(scope="module", params=ARGUMENTS)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp(request.param)
    script = ROOT / "benchmarks" / f"{request.param}.py"
    command = [sys.executable, str(script), *ARGUMENTS[request.param], "--results", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Ran(done.stdout, json.loads((folder / f"{request.param}.json").read_text(encoding="utf-8")))


def test_a_benchmark_prints_every_budget_and_whether_it_was_met(ran: Ran) -> None:
    for budget in ran.document["budgets"]:
        (line,) = [line for line in ran.printed.splitlines() if f"| {budget['what']} " in line]
        assert line.rstrip(" |").endswith("ok" if budget["ok"] else "over")


def test_a_benchmark_says_where_its_figures_come_from(ran: Ran) -> None:
    assert {"cpu", "cores", "python", "torch"} <= ran.document["machine"].keys()


def test_a_benchmark_prints_markdown_tables(ran: Ran) -> None:
    assert ran.printed.count("\n| ---") >= 2
