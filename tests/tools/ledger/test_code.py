"""Which variables a ``for`` loop sets, and which are set again before they are read."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from torchhooks.tools.ledger.code import names_dead_at, names_set_by_for


class Here:
    """Where a function calls :meth:`run`."""

    def __init__(self) -> None:
        self.dead: set[str] = set()

    def run(self, *_: Any) -> float:
        frame: FrameType = sys._getframe(1)  # noqa: SLF001 - as a walk does
        self.dead = {*names_dead_at(frame.f_code, frame.f_lasti)}
        return 0.5


def validated(here: Here) -> float:
    loss, best, last, total = float("nan"), 1.0, None, 0.0
    for _epoch in range(2):
        total = 0.0
        for item in [1, 2]:
            here.run(item)
            last = item
            total += item
        loss = total / 2
        best = min(best, loss)
    return best if last is None else loss


def with_a_file(here: Here) -> int:
    first = second = 1
    with contextlib.nullcontext():
        for _ in range(2):
            here.run()
            second = 2
    return first + second


def caught(here: Here) -> Any:
    numbers, seen, read = iter([1, 2]), 0, 0
    while True:
        try:
            number = next(numbers)
            here.run()
            read = number
        except StopIteration:
            return seen, read


def closed_over(here: Here) -> Callable[[], int]:
    count = 0

    def read() -> int:
        return count

    for _ in range(2):
        here.run()
        count = 1
    return read


def never_read(here: Here) -> None:
    outputs = None
    for _ in range(2):
        outputs = here.run()  # noqa: F841 - it is not read


@pytest.mark.parametrize(
    ("function", "dead", "alive"),
    [
        (validated, {"loss", "last"}, {"best", "total", "item"}),
        (with_a_file, {"second"}, {"first"}),
        (caught, set(), {"seen", "read", "number"}),
        (closed_over, set(), {"count"}),
        (never_read, {"outputs"}, set()),
    ],
)
def test_a_variable_that_is_set_again_before_it_is_read_is_dead(
    function: Callable[[Here], object], dead: set[str], alive: set[str]
) -> None:
    here = Here()
    function(here)
    assert dead <= here.dead
    assert not alive & here.dead


def test_of_a_script_a_variable_that_a_function_names_is_alive(tmp_path: Path) -> None:
    source = """
read = loss = unread = 0.0

def report():
    return read

for epoch in range(2):
    here.run()
    read = loss = unread = 1.0
print(report(), loss)
"""
    here = Here()
    exec(compile(source, "train.py", "exec"), {"here": here})
    assert {"unread", "loss"} <= here.dead
    assert "read" not in here.dead


def test_variables_that_a_for_loop_sets() -> None:
    def loops(pairs: Any) -> None:
        for number, (first, *rest) in pairs:
            for pairs[0] in rest:
                print(number, first)

    assert names_set_by_for(loops.__code__) == {"number", "first", "rest"}
