"""What a loop carries from item to item is found in the script's source."""

from __future__ import annotations

import random
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchhooks.position.script import Kept, carried

NAMES = {"random": random, "np": np, "torch": torch, "data": [1, 2, 3], "run": float}


def names_in(
    folder: Path,
    source: str,
    kept: list[Any] | None = None,
    step: object = None,
    paths: tuple[str, ...] = (),
    **values: Any,
) -> list[str] | None:
    """Return what is carried in a script that calls ``until_stop`` once; ``kept`` are names of it."""
    found: list[str] | None = None

    def until_stop(items: Any) -> Iterator[Any]:
        frame = sys._getframe(1)  # noqa: SLF001
        return begin(items, (frame, frame.f_lasti))

    def begin(items: Any, site: Any) -> Iterator[Any]:
        nonlocal found
        names = {**site[0].f_globals, **site[0].f_locals}
        found = carried(site, step, Kept.of([names[name] for name in kept or []], paths))
        yield from items

    path = folder / "script.py"
    path.write_text(textwrap.dedent(source))
    exec(compile(path.read_text(), path, "exec"), {**NAMES, "until_stop": until_stop, **values})
    return found


CARRIED = {
    "i: int = 0\nfor x in until_stop(data):\n    n: int = i + x\n    i: int = n": ["i"],
    "i = 0\nfor x in until_stop(data):\n    i += 1": ["i"],
    "i = 0\nfor x in until_stop(data):\n    i = i + 1": ["i"],
    "a = b = 0\nfor x in until_stop(data):\n    a, b = x, a": ["a"],
    "best = 9\nfor x in until_stop(data):\n    if x < best:\n        best = x": ["best"],
    "first = True\nfor x in until_stop(data):\n    if first:\n        first = False": ["first"],
    "h = 0\nfor x in until_stop(data):\n    run(x + h)\n    if x % 2:\n        h = x": ["h"],
    "h = 0\nfor x in until_stop(data):\n    if x % 2:\n        h = x\n    run(h)": ["h"],
    "h = 0\nfor x in until_stop(data):\n    for y in [1]:\n        h = y\n    run(h)": ["h"],
    "h = 0\nfor x in until_stop(data):\n    try:\n        h = run(x)\n    except OSError:\n        0\n    run(h)": [
        "h"
    ],
    "out = []\nfor x in until_stop(data):\n    out.append(x)": ["out"],
    "out = {}\nfor x in until_stop(data):\n    out[x] = run(x)": ["out"],
    "out = torch.zeros(9)\nfor x in until_stop(data):\n    out[x] += 1": ["out"],
    "other = iter(data)\nfor x in until_stop(data):\n    run(next(other))": ["other"],
    "for i, x in enumerate(until_stop(data)):\n    run(x + i)": ["enumerate(...)"],
    "for x, y in zip(until_stop(data), data):\n    run(x)": ["zip(...)"],
    "from itertools import islice\nfor x in islice(until_stop(data), 2):\n    run(x)": ["islice(...)"],
    "items = until_stop(data)\nfor i, x in enumerate(items):\n    run(x) if i else 0": ["enumerate(...)"],
    "i, items = 0, None\nitems = until_stop(data)\nwhile (x := next(items, None)) is not None:\n    i += 1": ["i"],
    "i = 0\ndef train():\n    global i\n    for x in until_stop(data):\n        i += 1\ntrain()": ["i"],
    "out = [run(x) for x in until_stop(data)]": ["what the comprehension has collected"],
    "total = sum(run(x) for x in until_stop(data))": ["what the comprehension has collected"],
    "rng = np.random.default_rng(1)\nfor x in until_stop(data):\n    run(rng.random())": ["the generator rng"],
    "rng = random.Random(1)\ndef draw():\n    return rng.random()\nfor x in until_stop(data):\n    run(rng.random())": [
        "the generator rng"
    ],
}

NOT_CARRIED = [
    "for i, x in until_stop(enumerate(data)):\n    run(x)",
    "for _, x in enumerate(until_stop(data)):\n    run(x)",
    "for i, x in enumerate(until_stop(data)):\n    run(x)",
    "for x in until_stop(list(zip(data, data))):\n    run(x[0])",
    "for x in until_stop(data):\n    run(x)",
    "for x in until_stop(data):\n    x += 1\n    run(x)",
    "for x in until_stop(data):\n    y = x + 1\n    y += 1",
    "for x in until_stop(data):\n    if x:\n        y = 1\n    else:\n        y = 2\n    run(y)\n    y = 3",
    "for x in until_stop(data):\n    if x < 0:\n        continue\n    else:\n        y = 2\n    run(y)",
    "for x in until_stop(data):\n    with open('/dev/null') as file:\n        run(len(file.read()))",
    "for x in until_stop(data):\n    out = []\n    out.append(x)",
    "for x in until_stop(data):\n    i = 0\n    while i < 2:\n        i += 1",
    "for x in until_stop(data):\n    run(random.random() + np.random.rand() + float(torch.rand(1)))",
    "for x in until_stop(data):\n    total = sum(y for y in [x])",
    "from random import choice\nfor x in until_stop(data):\n    run(choice([x]))",
    "i = 0\nfor x in until_stop(data):\n    run(i)\n    i: int",
    "i = 0\nfor y in data:\n    i += 1\nfor x in until_stop(data):\n    run(i)",
]


@pytest.mark.parametrize("source", CARRIED)
def test_what_a_loop_carries_is_named(source: str, tmp_path: Path) -> None:
    assert names_in(tmp_path, source) == CARRIED[source]


@pytest.mark.parametrize("source", NOT_CARRIED)
def test_what_an_item_sets_itself_is_not_named(source: str, tmp_path: Path) -> None:
    assert names_in(tmp_path, source) == []


SELF = """
    class Trainer:
        def __init__(self):
            self.count, self.losses, self.vars = 0, [], Holder()
            self.rng = np.random.default_rng(1)

        def train(self):
            for x in until_stop(data):
                self.count += 1
                self.losses.append(x)
                self.vars.total += 1
                run(self.rng.random())

    class Holder:
        total = 0

    trainer = Trainer()
    trainer.train()
    """


def test_attributes_are_named(tmp_path: Path) -> None:
    names = ["self.count", "self.losses", "self.vars.total", "the generator self.rng"]
    assert names_in(tmp_path, SELF) == names


def test_what_a_checkpoint_has_is_not_named(tmp_path: Path) -> None:
    source = "for x in until_stop(data):\n    holder.total += 1\n    holder.values.append(holder.rng.random())"

    class Holder:
        total, values = 0, ()
        rng: object = None

    holder = Holder()
    holder.values, holder.rng = [], random.Random(1)  # type: ignore[assignment]
    assert names_in(tmp_path, source, holder=holder) == ["holder.total", "holder.values", "the generator holder.rng"]
    assert names_in(tmp_path, source, ["holder"], holder=holder) == []


def test_a_generator_of_the_step_function_is_named(tmp_path: Path) -> None:
    rng = random.Random(1)

    def step() -> float:
        return rng.random()

    source = "for x in until_stop(data):\n    run(x)"
    assert names_in(tmp_path, source, step=step) == ["the generator rng of the step"]
    assert names_in(tmp_path, source, ["rng"], step=step, rng=rng) == []


def test_the_generator_of_a_loader_that_is_iterated_later_is_not_named(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader([1, 2], shuffle=True, generator=torch.Generator())  # type: ignore[arg-type, var-annotated]
    source = "for x in until_stop(data):\n    for y in loader:\n        run(y)"
    generators = ["the generator loader.generator"]
    assert names_in(tmp_path, source, loader=loader) == generators
    assert names_in(tmp_path, source, loader=loader, paths=(".generator",)) == []


def test_properties_of_the_script_are_not_called(tmp_path: Path) -> None:
    def raises(*_: object) -> Any:
        raise AssertionError

    holder: Any = type("Holder", (), {"value": property(raises, raises)})()
    source = "for x in until_stop(data):\n    if not data:\n        holder.value.append(1)\n        holder.value += 1"
    assert names_in(tmp_path, source, holder=holder) == ["holder.value"]


@pytest.mark.parametrize("text", ["", "for x in", "\n\n\n\n"])
def test_another_source_by_now_is_not_known(text: str, tmp_path: Path) -> None:
    def change() -> Callable[..., Any]:
        (tmp_path / "script.py").write_text(text)
        return float

    source = "i = 0\nchange()\nfor x in until_stop(data):\n    i += 1"
    assert names_in(tmp_path, source, change=change) is None


def test_a_script_without_a_loop_is_not_known(tmp_path: Path) -> None:
    assert names_in(tmp_path, "it = until_stop(data)\nnext(it)\nnext(it)") is None
