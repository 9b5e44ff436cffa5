"""Undo: what is captured and put back, whatever raises meanwhile."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch

from torchhooks.checkpoints.undo import Undo


class Kept:
    """An object whose state is ``value``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def raising(error: BaseException) -> Any:
    def undo() -> None:
        raise error

    return undo


def test_what_was_captured_last_is_put_back_first() -> None:
    order: list[int] = []
    undo = Undo()
    for number in range(3):
        undo.add("number", partial(order.append, number))
    undo.put_back()
    assert order == [2, 1, 0]


def test_the_first_error_is_raised_once_the_rest_was_put_back() -> None:
    done: list[str] = []
    undo = Undo().add("a", lambda: done.append("a")).add("b", raising(ValueError("b"))).add("c", raising(KeyError("c")))
    with pytest.raises(KeyError, match="c"):
        undo.put_back()
    assert done == ["a"]


def test_an_interrupt_is_raised_in_place_of_an_error() -> None:
    undo = Undo().add("a", raising(KeyboardInterrupt())).add("b", raising(ValueError()))
    with pytest.raises(KeyboardInterrupt):
        undo.put_back()


def test_an_error_that_is_the_reason_gets_a_note_and_is_left_to_the_caller() -> None:
    reason = ZeroDivisionError()
    Undo().add("a", raising(ValueError("lost"))).put_back(reason)
    assert reason.__notes__ == ["'a' may not be what it was before: ValueError: lost"]


def test_only_what_is_named_is_put_back() -> None:
    model = torch.nn.Linear(1, 1)
    undo = Undo().random_states().modes([model])
    model.eval()
    states = torch.get_rng_state()
    torch.rand(1)
    undo.put_back(only="modes")
    assert model.training
    assert not torch.equal(torch.get_rng_state(), states)


@pytest.mark.parametrize("value", [float("nan"), {"a": [1, (2, torch.ones(2))]}, OrderedDict(a=None), torch.Size([1])])
def test_a_state_that_has_not_changed_is_not_loaded(value: Any) -> None:
    part = Kept(value)
    undo = Undo().states({"part": part}, lambda name, part, state: pytest.fail(name))
    assert undo.put_back() == []


@pytest.mark.parametrize(
    ("before", "after"),
    [([1, 2], [1]), ({"a": 1}, {"b": 1}), (1, True), (torch.ones(2), None), (torch.ones(2), torch.ones(2).double())],
)
def test_a_state_that_has_changed_is_loaded_and_named(before: Any, after: Any) -> None:
    def load(name: str, part: Any, state: Any) -> bool:
        part.load_state_dict(state)
        return True

    part, other = Kept(before), Kept(0)
    undo = Undo().states({"part": part, "other": other}, load)
    part.value = after
    assert undo.put_back() == ["part"]
    assert repr(part.value) == repr(before)


def test_a_tensor_that_is_changed_in_place_is_put_back() -> None:
    def load(name: str, part: Any, state: Any) -> bool:
        part.load_state_dict(state)
        return True

    model = torch.nn.BatchNorm1d(2)
    undo = Undo().states({"model": model}, load)
    model.weight.data[1] += 1
    undo.put_back()
    assert model.weight.tolist() == [1, 1]
