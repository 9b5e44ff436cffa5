"""Every public name is in the reference, and has a docstring with an example that runs.

An example is a doctest. It begins with the setup that docs/reference/index.md shows, in an empty folder, and the log
lines of torchhooks are printed. ``...`` matches anything.
"""

from __future__ import annotations

import doctest
import inspect
import logging
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.packages import import_or_skip_all
from support.paths import ROOT

import torchhooks
import torchhooks.testing
from torchhooks import summary

REFERENCE = ROOT / "docs" / "reference"

PUBLIC: dict[str, Any] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (torchhooks, torchhooks.__all__),
        (summary, ("scalar", "histogram", "image", "text", "figure")),
        (torchhooks.testing, torchhooks.testing.__all__),
    )
    for name in names
}


class Printed(logging.Handler):
    """Prints log lines to what is standard output at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage())


@pytest.fixture
def logs_are_printed() -> Iterator[None]:
    logger, handler = logging.getLogger("torchhooks"), Printed()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def setup() -> Iterator[dict[str, Any]]:
    """The variables that the setup in docs/reference/index.md defines."""
    [code] = re.findall(r"^```python\n(.*?)^```$", (REFERENCE / "index.md").read_text(), re.MULTILINE | re.DOTALL)
    variables: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng():
        exec(code, variables)
        yield variables


def examples(name: str) -> list[doctest.DocTest]:
    """Return the doctests of a public object and its public members."""
    module = inspect.getmodule(PUBLIC[name])
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(PUBLIC[name], name, module, globs={}) if test.examples]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_class_has_an_example_and_all_examples_run(
    name: str, setup: dict[str, Any], logs_are_printed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(PUBLIC[name], types.ModuleType):
        return
    tests = examples(name)
    assert tests or not isinstance(PUBLIC[name], type), f"{name} has no example"
    for test in tests:
        import_or_skip_all("\n".join(example.source for example in test.examples))
        test.globs = dict(setup)
        report: list[str] = []
        failures, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
        assert not failures, "".join(report)


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    entry = r":: ({}\b|torchhooks\.testing$|torchhooks\.summary$)"
    assert [name for name in PUBLIC if not re.search(entry.format(re.escape(name)), pages, re.MULTILINE)] == []


# What another module of the library reads or sets, and a user has no use for.
OF_THE_LIBRARY = {
    "SessionRunContext": {"caller", "step_before", "void"},
    "CheckpointSaverHook": {"saves_checkpoints"},
    "BestCheckpointHook": {"saves_checkpoints"},
}


@pytest.mark.parametrize("name", OF_THE_LIBRARY)
def test_the_reference_leaves_out_what_only_the_library_uses(name: str) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    [left_out] = re.findall(rf"autoclass:: torchhooks\.{name}(?:\(\))?\n   :exclude-members: (.*)", pages)
    assert OF_THE_LIBRARY[name] <= set(left_out.split(", "))
    assert OF_THE_LIBRARY[name] <= set(dir(getattr(torchhooks, name)))


def test_a_context_shows_what_a_hook_has_a_use_for() -> None:
    context = torchhooks.SessionRunContext
    shown = {name for name in {*dir(context), *context.__annotations__} if not name.startswith("_")}
    of_the_library = {"at_end_of_epoch", "call_arguments", "caller", "counts", "end", "fail", "finished", "step_before"}
    assert shown - of_the_library - {"void"} == {
        "after_item",
        "ends_epoch",
        "inputs",
        "original_args",
        "request_stop",
        "session",
        "stop_reason",
        "stop_requested",
        "waits_for_item",
        "when_ready",
        "why_stopped",
    }
