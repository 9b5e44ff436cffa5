"""Each way of writing a training loop ends the same if it is interrupted and resumed, or a warning says why not.

:mod:`patterns` has the ways. docs/loops.md has a table of them, which must agree with what is tested here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT, environment
from support.patterns import PATTERNS, Job

TABLE = ROOT / "docs" / "loops.md"


class Server:
    """Tries patterns in new processes, and tells when one is done."""

    def __init__(self, directory: Path, names: list[str]) -> None:
        self.directory = directory
        self.done: set[str] = set()
        # torchdata calls a function that torch deprecates. A schedule that was loaded may step before the optimizer.
        ignored = [f"-Wignore:{text}:UserWarning" for text in ("'set_vital' is deprecated", "Detected call of")]
        most = str(os.cpu_count() or 1)
        # One thread, because a fork copies only the thread that makes it.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-Werror", *ignored, "tests/support/patterns.py", str(directory), most],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(**threads),
        )
        assert self._process.stdin is not None
        self._process.stdin.write("\n".join(names))
        self._process.stdin.close()

    def results(self, name: str) -> dict[str, Any]:
        """Return the results of a pattern, by scenario, once it is done."""
        assert self._process.stdout is not None
        while name not in self.done:
            line = self._process.stdout.readline()
            assert line, "the server ended"
            self.done.add(line.rstrip("\n"))
        results: dict[str, Any] = json.loads((self.directory / f"{name}.json").read_text())
        return results

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server, which tries every pattern whose test was selected."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__)]
    names = [call.params["name"] for call in calls if call is not None and "name" in call.params]
    server = Server(tmp_path_factory.mktemp("patterns"), list(dict.fromkeys(names)))
    yield server
    server.close()


@pytest.mark.parametrize("name", PATTERNS)
def test_a_resumed_training_run_ends_as_an_uninterrupted_one_or_a_warning_says_why_not(
    name: str, server: Server
) -> None:
    warnings, results = PATTERNS[name].warnings, server.results(name)
    assert "error" not in results, results["error"]
    whole = results.pop("whole")
    assert {scenario: result["error"] for scenario, result in results.items() if "error" in result} == {}
    differ = {
        scenario: [part for part, digest in result["outcome"].items() if digest != whole[part]]
        for scenario, result in results.items()
        if result["outcome"] != whole
    }
    silent = {
        scenario: parts
        for scenario, parts in differ.items()
        if not any(warning in results[scenario]["logged"] for warning in warnings)
    }
    assert silent == {}
    if not warnings:
        assert [scenario for scenario, result in results.items() if "in another order" in result["logged"]] == []
    assert bool(differ) == bool(warnings), "a pattern that is exact needs no warning"


def test_another_seed_ends_elsewhere_in_everything_but_the_schedule() -> None:
    outcomes = []
    for seed in (1, 2):
        job = Job(seed=seed)
        job.generator()
        PATTERNS["scheduler_per_batch"].train(job)
        outcomes.append(job.outcome())
    one, other = outcomes
    assert {part for part in one if one[part] == other[part]} == {"scheduler"}


def rows() -> dict[str, str]:
    """Return what the table in the documentation says of each pattern."""
    found: dict[str, str] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if names := re.search(r"<!-- (.*?) -->", line):
            outcome = line.split(" | ")[1].strip()
            for name in names[1].split():
                assert name not in found, f"{name} is in two rows"
                found[name] = outcome
    return found


def test_the_table_in_the_documentation_has_every_pattern_and_its_outcome() -> None:
    expected = {name: "warned" if pattern.warnings else "exact" for name, pattern in PATTERNS.items()}
    assert rows() == expected
