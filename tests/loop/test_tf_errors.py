"""Where an error, a stop and a thread meet: TensorFlow was asked in 1,005 scripts, and the same must come out.

``data/tf_traces/README.md`` explains the files. What differs on purpose is listed there by its reason.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.paths import TRACES
from support.tf_errors import Body, play, scripts

from torchhooks.lifecycle.recovery import Recovery


@functools.cache
def answers() -> dict[str, list[dict[str, Any]]]:
    """Return what TensorFlow did in each script: several things in a few, in which its answer varies."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, (TRACES / "errors.jsonl").read_text().splitlines()):
        found.setdefault(row.pop("name"), []).append(row)
    return found


@functools.cache
def on_purpose() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads((TRACES / "errors_on_purpose.json").read_text())
    return found


def group_of(name: str) -> str:
    return "made up" if name.startswith("fz.") else name.partition(".")[0] if name[:2] not in ("b2", "b3") else "others"


GROUPS: dict[str, list[tuple[str, Body]]] = {}
for _name, _body in scripts():
    GROUPS.setdefault(group_of(_name), []).append((_name, _body))


@pytest.fixture
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = Recovery.pause

    def shortened(self: Recovery, error: BaseException, wait: Callable[[float], object]) -> None:
        pause(self, error, lambda secs: None)

    monkeypatch.setattr(Recovery, "pause", shortened)


@pytest.mark.usefixtures("_no_pauses")
@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=[pytest.mark.exhaustive] if group == "made up" else []) for group in GROUPS]
)
def test_does_what_tensorflow_did_but_for_what_differs_on_purpose(group: str, tmp_path: Path) -> None:
    different = []
    for number, (name, body) in enumerate(GROUPS[group]):
        happened = json.loads(json.dumps(play(body, tmp_path / str(number))))
        if happened not in answers()[name]:
            different.append(name)
    listed = set(itertools.chain.from_iterable(on_purpose().values()))
    assert different == [name for name, _ in GROUPS[group] if name in listed]


def test_all_scripts_are_there() -> None:
    names = [name for name, _ in scripts()]
    assert (len(names), len(set(names))) == (1005, 1005)
    assert list(answers()) == names
    listed = list(itertools.chain.from_iterable(on_purpose().values()))
    assert len(listed) == len(set(listed)) == 212
    assert set(listed) <= set(names)
