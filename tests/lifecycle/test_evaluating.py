"""What an evaluation disturbs is put back, whatever raises meanwhile."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from torchhooks.lifecycle.evaluating import Undo


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


def test_an_error_is_raised_once_the_rest_was_put_back() -> None:
    done: list[str] = []
    undo = Undo().add("a", lambda: done.append("a")).add("b", raising(ValueError("b")))
    with pytest.raises(ValueError, match="b"):
        undo.put_back()
    assert done == ["a"]


def test_an_interrupt_is_raised_in_place_of_an_error() -> None:
    undo = Undo().add("a", raising(KeyboardInterrupt())).add("b", raising(ValueError()))
    with pytest.raises(KeyboardInterrupt):
        undo.put_back()


def test_only_what_is_named_is_put_back() -> None:
    model = torch.nn.Linear(1, 1)
    undo = Undo().random_states().modes([model])
    model.eval()
    states = torch.get_rng_state()
    torch.rand(1)
    undo.put_back(only="modes")
    assert model.training
    assert not torch.equal(torch.get_rng_state(), states)
