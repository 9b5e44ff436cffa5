"""What a plain pytest leaves out, and how to run it: tests/conftest.py, with a few tests of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from support.paths import ROOT

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_plain(): ...

@pytest.mark.slow
def test_slow(): ...

@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_of_several_cases(number): ...

@pytest.mark.release
def test_before_a_release(): ...
"""


@pytest.fixture(autouse=True)
def _few_tests(pytester: pytest.Pytester) -> Iterator[None]:
    profile = settings.get_current_profile_name()
    pytester.makepyprojecttoml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folder = pytester.mkdir("tests")
    text = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    (folder / "conftest.py").write_text(f"import sys\nsys.path.append({str(ROOT / 'tests')!r})\n{text}")
    (folder / "test_few.py").write_text(TESTS)
    yield
    settings.load_profile(profile)  # the run in this process may have loaded another one


SAID = "left out: 1 release, 1 exhaustive, 1 slow; run all tests with pytest --all"


@pytest.mark.parametrize("arguments", ["-n0", pytest.param("-n1", marks=pytest.mark.slow)])
def test_the_last_lines_say_what_was_left_out(arguments: str, pytester: pytest.Pytester) -> None:
    ran = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments.split())
    assert ran.parseoutcomes()["passed"] == 2
    assert ran.outlines[-2] == SAID


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [("--all -n0", 5), ("--rest -n0", 2), ("tests/test_few.py::test_slow", 1), ("-m slow", 1)],
)
def test_what_is_named_runs_in_this_process_and_nothing_is_left_out(
    arguments: str, passed: int, pytester: pytest.Pytester
) -> None:
    ran = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments.split())
    assert ran.parseoutcomes()["passed"] == passed
    assert not any("left out" in line or "bringing up nodes" in line for line in ran.outlines)
