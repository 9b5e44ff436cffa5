"""Each way of writing a training loop that follows the rules ends the same if it is interrupted and resumed.

:mod:`patterns` has the ways, and :mod:`defects` those that do not resume exactly. docs/loops.md has a table of them,
which must agree with what is tested here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.defects import DEFECTS, try_defect
from support.packages import import_or_skip
from support.paths import ROOT
from support.patterns import PATTERNS, Job, try_pattern
from support.processes import Process, start

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
        self.processes: dict[str, Process] = {}

    def results(self, name: str) -> dict[str, Any]:
        """Return the results of a pattern, by scenario, once it is done."""
        index = self.names.index(name)
        for each in self.names[index : index + self.ahead]:
            if each not in self.processes:
                function = try_defect if each in DEFECTS else try_pattern
                self.processes[each] = start(self.output(each), function, self.directory, each, ignored=IGNORED)
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


# A plain pytest tries the usual loop, and a few kinds of data and of saving: each takes five processes.
QUICK = {"nested_range", "async_save", "stateful_loader", "caught_out_of_the_run"}
# The gate tries one of every row, and pytest --all all of them.
GATE = {names[0] for names, outcome in rows() if outcome == "exact"}
CASES = [
    pytest.param(
        name, marks=[] if name in QUICK else [pytest.mark.exhaustive] if name in GATE else [pytest.mark.release]
    )
    for name in PATTERNS
]


NOT_FOUND_BY_CHECK = ["signal_in_validation_before_a_guard"]


def different(results: dict[str, Any]) -> dict[str, list[str]]:
    """Return which parts end elsewhere than in the uninterrupted training run, by scenario."""
    assert "error" not in results, results["error"]
    whole = results.pop("whole")
    return {
        scenario: [part for part, digest in result["outcome"].items() if digest != whole[part]]
        for scenario, result in results.items()
        if result["outcome"] != whole
    }


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_training_run_ends_as_an_uninterrupted_one(name: str, attempts: Attempts) -> None:
    if (module := PATTERNS[name].needs) is not None:
        import_or_skip(module)
    results = attempts.results(name)
    errors = {scenario: result["error"] for scenario, result in results.items() if "error" in result}
    assert errors == {}
    assert different(results) == {}
    assert [
        scenario for scenario, result in results.items() if "is not the one it was before" in result["logged"]
    ] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NOT_FOUND_BY_CHECK)
def test_a_defect_that_check_does_not_find_ends_elsewhere(name: str, attempts: Attempts) -> None:
    """The others are in tests/tools/ledger/test_defects.py."""
    results = attempts.results(name)
    differ = different(results)
    assert differ
    assert [scenario for scenario in differ if "WARNING:torchhooks:" not in results[scenario]["logged"]] == []


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
    expected = dict.fromkeys(PATTERNS, True) | dict.fromkeys(DEFECTS, False)
    in_the_table = [(name, outcome) for names, outcome in rows() for name in names]
    assert len(dict(in_the_table)) == len(in_the_table), "a pattern is in two rows"
    assert {name: outcome == "exact" for name, outcome in in_the_table} == expected
    assert {outcome for _, outcome in in_the_table} == {"exact", "warned", "not exact"}
