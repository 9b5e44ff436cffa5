"""docs/stability.md says what the code does."""

from __future__ import annotations

import importlib
import re
import tomllib

import pytest
from support.paths import ROOT

from torchhooks.__main__ import main
from torchhooks.checkpoints import folder
from torchhooks.tools.ledger import lines
from torchhooks.tools.mirror import layout

PAGE = (ROOT / "docs" / "stability.md").read_text()


def rows() -> dict[str, str]:
    """Return the rows of all tables, by their first cell."""
    return {key.strip(): rest for key, rest in re.findall(r"^\| ([^|]*)\|(.*)$", PAGE, re.MULTILINE)}


def test_the_commands_are_all_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"\{([a-z,]+)\}", capsys.readouterr().out)[0]
    sentence = rows()["Commands"].partition(";")[0]
    assert sorted(re.findall("`([a-z]+)`", sentence)) == sorted(commands.split(","))


def test_the_formats_are_those_of_the_code() -> None:
    numbers = [int(cell.strip(" |")) for key, cell in rows().items() if "`" in key and cell.strip(" |").isdigit()]
    assert numbers == [folder.FORMAT, lines.FORMAT, layout.FORMAT]


def test_the_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert rows()["Python"].split("|")[0].strip() == f"{pythons[0]} to {pythons[-1]}"
    [torch] = [line.removeprefix("torch>=") for line in project["dependencies"] if line.startswith("torch>=")]
    assert rows()["PyTorch"].split("|")[0].strip() == f"{torch} and newer"


def test_the_public_modules_are_those_of_the_reference() -> None:
    reference = (ROOT / "docs" / "reference" / "index.md").read_text()
    [sentence] = re.findall(r"All public names are in (.*?)\. ", reference)
    modules = re.findall("`([a-z.]+)`", sentence)
    assert re.findall(r"`([a-z.]+)\.__all__`", rows()["Names in Python"]) == modules
    assert all(importlib.import_module(module).__all__ for module in modules)
