"""Each way of writing a training loop ends the same if it is interrupted and resumed, or a warning says why not.

:mod:`patterns` has the ways. docs/loops.md has a table of them, which must agree with what is tested here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.patterns import (
    AFTER_AN_EPOCH,
    PATTERNS,
    SAID_AT_INFO,
    SILENT_AFTER_AN_EPOCH,
    START_OVER,
    Job,
    try_pattern,
)
from support.processes import start

FOR_DISPLAY = {
    "helper_function",
    "held_generator",
    "started_again_at_its_end",
    "step_in_body_accumulated",  # a checkpoint is saved after an even number of items
    "step_in_body_left_by_break",
}
"""Exact patterns that count or collect something, on which nothing depends."""

TABLE = ROOT / "docs" / "loops.md"


# torchdata calls a function that torch deprecates. A schedule that was loaded may step before the optimizer.
IGNORED = "'set_vital' is deprecated", "Detected call of"


class Attempts:
    """Tries patterns in new processes, in the given order: as many at a time as there are processors.

    Under xdist, only the one that is asked for, since the other processes of xdist need the other processors.
    """

    def __init__(self, directory: Path, names: list[str]) -> None:
        self.directory, self.names = directory, names
        self.ahead = 1 if "PYTEST_XDIST_WORKER" in os.environ else os.cpu_count() or 1
        self.processes: dict[str, BaseProcess] = {}

    def results(self, name: str) -> dict[str, Any]:
        """Return the results of a pattern, by scenario, once it is done."""
        index = self.names.index(name)
        for each in self.names[index : index + self.ahead]:
            if each not in self.processes:
                self.processes[each] = start(self.output(each), try_pattern, self.directory, each, ignored=IGNORED)
        process = self.processes[name]
        process.join()
        assert process.exitcode == 0, self.output(name).read_text()
        results: dict[str, Any] = json.loads((self.directory / f"{name}.json").read_text())
        return results

    def output(self, name: str) -> Path:
        return self.directory / f"{name}.txt"

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def attempts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attempts]:
    """The attempts to train with every pattern whose test was selected."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__)]
    names = [call.params["name"] for call in calls if call is not None and "name" in call.params]
    attempts = Attempts(tmp_path_factory.mktemp("patterns"), names)
    yield attempts
    attempts.close()


def rows() -> list[tuple[list[str], str]]:
    """Return the names of the patterns in each row of the table in the documentation, and its outcome."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    named = ((re.search(r"<!-- (.*?) -->", line), line) for line in lines)
    return [(names[1].split(), line.split(" | ")[1].strip()) for names, line in named if names]


FIRST_OF_EACH_ROW = {names[0] for names, _ in rows()}
CASES = [pytest.param(name, marks=[] if name in FIRST_OF_EACH_ROW else [pytest.mark.exhaustive]) for name in PATTERNS]


def warned(logged: str) -> str:
    """Return the warnings among the lines of a log."""
    lines = logged.splitlines()
    levels = {line: "WARNING" if any(text in line for text in SAID_AT_INFO) else line.split(":")[0] for line in lines}
    return "\n".join(line for line in lines if levels[line] == "WARNING")


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_training_run_ends_as_an_uninterrupted_one_or_a_warning_says_why_not(
    name: str, attempts: Attempts
) -> None:
    warnings, results = PATTERNS[name].warnings, attempts.results(name)
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
        if not any(warning in warned(results[scenario]["logged"]) for warning in warnings)
    }
    known = {AFTER_AN_EPOCH} if name in SILENT_AFTER_AN_EPOCH else set()
    assert {scenario: parts for scenario, parts in silent.items() if scenario not in known} == {}
    assert known <= set(silent), "it is no longer silent: remove it from the list"
    if not warnings:
        assert [scenario for scenario, result in results.items() if "in another order" in result["logged"]] == []
        start_over = [scenario for scenario, result in results.items() if START_OVER in result["logged"]]
        assert name in FOR_DISPLAY or start_over == []
    assert bool(differ.keys() - known) == bool(warnings), "a pattern that is exact needs no warning"


def test_another_seed_ends_elsewhere_in_everything_but_the_schedule() -> None:
    outcomes = []
    for seed in (1, 2):
        job = Job(seed=seed)
        job.generator()
        PATTERNS["scheduler_per_batch"].train(job)
        outcomes.append(job.outcome())
    one, other = outcomes
    assert {part for part in one if one[part] == other[part]} == {"scheduler"}


def test_the_table_in_the_documentation_has_every_pattern_and_its_outcome() -> None:
    expected = {name: "warned" if pattern.warnings else "exact" for name, pattern in PATTERNS.items()}
    in_the_table = [(name, outcome) for names, outcome in rows() for name in names]
    assert len(dict(in_the_table)) == len(in_the_table), "a pattern is in two rows"
    assert dict(in_the_table) == expected
