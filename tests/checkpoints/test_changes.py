"""Which of several objects changed their state since a given moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchhooks.checkpoints.changes import StateMark

Part = Any


class Kept:
    """An object whose state is ``value``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value() if callable(self.value) else self.value}

    def load_state_dict(self, state: Any) -> None: ...


def trained() -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def halve_rates(parts: dict[str, Any]) -> None:
    for group in parts["optimizer"].param_groups:
        group["lr"] *= 0.5


def shift(parts: dict[str, Any]) -> None:
    with torch.no_grad():
        parts["model"].bias.add_(1)


def shift_uncounted(parts: dict[str, Any]) -> None:
    parts["model"].weight.data.add_(1)


def replace(parts: dict[str, Any]) -> None:
    parts["model"].bias = torch.nn.Parameter(torch.ones(2))


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], list[str]]] = {
    "nothing": (lambda parts: None, []),
    "a step of the optimizer": (lambda parts: parts["optimizer"].step(), ["model", "optimizer"]),
    "a step of the scheduler": (lambda parts: parts["scheduler"].step(), ["optimizer", "scheduler"]),
    "a learning rate": (halve_rates, ["optimizer"]),
    "a parameter": (shift, ["model"]),
    "a parameter, not counted by torch": (shift_uncounted, ["model"]),
    "another tensor": (replace, ["model"]),
    "modes and gradients, which are no state": (lambda parts: parts["model"].eval().zero_grad(), []),
}


@pytest.mark.parametrize("name", CHANGES)
def test_names_the_parts_that_changed(name: str) -> None:
    change, changed = CHANGES[name]
    parts = trained()
    mark = StateMark(parts)
    change(parts)
    assert mark.changed() == changed


@pytest.mark.parametrize(
    "value",
    [
        lambda: torch.ones(3),
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.zeros(2, device="meta"),
        float("nan"),
        {"a": [1, (2, "b")], "c": None},
        torch.get_rng_state,
    ],
)
def test_a_state_that_is_made_each_time_is_the_same_if_its_values_are(value: Any) -> None:
    mark = StateMark({"part": Kept(value)})
    assert mark.changed() == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([1, 2], [1]),
        ([1, 2], [1, 3]),
        ({"a": 1}, {"b": 1}),
        (1, True),
        (torch.ones(2), None),
        (lambda: torch.ones(2), lambda: torch.zeros(2)),
        (lambda: torch.ones(2), lambda: torch.ones(2, dtype=torch.float64)),
        (lambda: torch.ones(2), lambda: torch.ones(3)),
    ],
)
def test_another_value_is_a_change(before: Any, after: Any) -> None:
    part = Kept(before)
    mark = StateMark({"part": part})
    part.value = after
    assert mark.changed() == ["part"]


def test_a_container_that_is_changed_in_place_is_a_change() -> None:
    part = Kept([1])
    mark = StateMark({"part": part})
    part.value.append(2)
    assert mark.changed() == ["part"]


def test_copies_no_tensor() -> None:
    part = Kept(torch.ones(4))
    mark = StateMark({"part": part})
    part.value.zero_()  # a copy would still be ones
    part.value.fill_(1)
    assert mark.changed() == ["part"]  # by the count of its changes: the values are the same
