"""Tests of ``check`` without processes of their own, which take seconds to import torch."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.processes import call
from support.schemas import answer
from torchhooks.common.text import json_text
from torchhooks.tools.ledger import processes
from torchhooks.tools.ledger.check import Options, prove
from torchhooks.tools.ledger.keeper import Keeper
from torchhooks.tools.ledger.verdict import as_plain, text_of


def forget_tests(monkeypatch: pytest.MonkeyPatch, but: str = "") -> None:
    """Take all test modules but one out of this process, in which check would look as if they were of the script.

    A whole session has imported 200 of them.
    """
    for name in [*sys.modules]:
        if name.startswith("test_") and name != but:
            monkeypatch.delitem(sys.modules, name)


def use_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every process of a script as a fork of this one. So a set has the same order in all of them."""

    forget_tests(monkeypatch)
    # A walk begins with the script alone, and not with what else this process has imported from the project.
    monkeypatch.setattr("torchhooks.tools.ledger.walk.sys", SimpleNamespace(modules=_MainModule()))
    monkeypatch.setattr(processes, "become_new", processes.become_fork)


class _MainModule(Mapping[str, Any]):
    """The main module of this process, which is another one in each fork."""

    def __getitem__(self, name: str) -> Any:
        return sys.modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(["__main__"])

    def __len__(self) -> int:
        return 1


def check_in_a_process(folder: Path, steps: int, *command: str, ranks: int = 1, forks: bool = True) -> dict[str, Any]:
    """Return what ``check --json`` prints of a script, and as ``"text"`` what it prints for people.

    The process is forked from one that is small, so that its own forks are fast. Differences are not reproduced.
    """
    ended = call(_check, folder, Options(steps, ranks=ranks), command, forks)
    assert ended.code == 0, ended.output
    found = answer("check", (folder / "verdict.json").read_text())
    return found | {"text": (folder / "verdict.txt").read_text()}


def _check(folder: Path, options: Options, command: tuple[str, ...], forks: bool) -> None:
    warnings.resetwarnings()  # what the script warns of is not an error
    os.chdir(folder)
    scratch = folder / "scratch"
    scratch.mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if forks:
            use_forks(monkeypatch)
        with Keeper(str(scratch)) as keeper:
            verdict = prove(command, keeper, options, reproduce=False)
    (folder / "verdict.json").write_text(json_text(as_plain(verdict)))
    (folder / "verdict.txt").write_text("\n".join(text_of(verdict)))
