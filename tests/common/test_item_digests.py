"""Digests of items, as checkpoints have them: which items differ, and that reading one changes nothing."""

from __future__ import annotations

import pickle
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from torchhooks.common.item_digests import differ, item_digest


@dataclass
class Batch:
    inputs: Any


class Untouchable:
    """An object that fails when it is compared, printed, or iterated."""

    def fail(self, *_: Any) -> Any:
        raise AssertionError("was touched")

    __eq__ = __repr__ = __iter__ = __len__ = __getitem__ = __hash__ = fail


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, 1.0),
        ("a" * 200, "a" * 100 + "b" + "a" * 99 + "c"),
        (b"a", "a"),
        (np.zeros(3), np.zeros(4)),
        (np.array(["a"]), np.array(["b"])),
        (torch.zeros(3), torch.zeros(3, 1)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.eye(200)[:50].t(), torch.eye(200)[1:51].t()),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.ones(3, dtype=torch.bfloat16), torch.full((3,), 2, dtype=torch.bfloat16)),
        (torch.empty(3, device="meta"), torch.empty(4, device="meta")),
        ({"a": [1, 2]}, {"a": [1, 3]}),
        ((1, "x"), (1, "y")),
        (UserDict(a=1), UserDict(a=2)),
        (Batch(torch.zeros(3)), Batch(torch.ones(3))),
    ],
)
def test_items_that_are_not_the_same_differ(one: Any, other: Any) -> None:
    assert differ(item_digest(one), item_digest(other))
    assert not differ(item_digest(one), item_digest(pickle.loads(pickle.dumps(one))))


@pytest.mark.parametrize(
    "item",
    [
        torch.empty(0, 3),
        torch.zeros(3).to_sparse(),
        torch.zeros(3).to(torch.float8_e4m3fn),
        torch.zeros(3, requires_grad=True) * 2,
        np.array([Untouchable()]),
        float("nan"),
        10**5000,
        "\ud800",
        {None: 1, (1, 2): 3},
        {Untouchable: [[[Untouchable()]]]},
    ],
    ids=lambda item: str(type(item).__name__),
)
def test_odd_items_have_a_digest(item: Any) -> None:
    assert item_digest(item) is not None
    assert not differ(item_digest(item), item_digest(item))


def test_noise_does_not_count_where_the_item_draws_it() -> None:
    one, other = {"x": torch.zeros(3), "label": 1}, {"x": torch.ones(3), "label": 1}
    assert differ(item_digest(one), item_digest(other))
    assert not differ(item_digest(one), item_digest(other), noisy=True)
    assert differ(item_digest(one), item_digest({**other, "label": 2}), noisy=True)


def test_a_generator_is_not_iterated() -> None:
    numbers = iter([1, 2, 3])
    assert item_digest([numbers, (number for number in numbers)]) is not None
    assert list(numbers) == [1, 2, 3]


def test_a_large_item_has_a_small_digest() -> None:
    endless: list[Any] = [1]
    endless += [endless, endless]
    for item in (list(range(10**6)), {str(key) * 99: "long" * 999 for key in range(99)}, endless, torch.zeros(10**6)):
        assert len(pickle.dumps(item_digest(item))) < 10_000


def test_an_item_that_cannot_be_read_has_none_and_differs_from_nothing() -> None:
    class Lazy(UserDict[str, int]):
        def items(self) -> Any:
            raise OSError

    assert item_digest(Lazy()) is None
    assert not differ(item_digest(Lazy()), item_digest(1))
    assert not differ(item_digest(1), item_digest(Lazy()))


def test_what_the_body_took_out_or_changed_in_place_does_not_count() -> None:
    batch = {"inputs": torch.zeros(3), "labels": torch.ones(3)}
    before = item_digest(batch)
    batch.pop("labels")
    batch["inputs"].add_(1)
    assert not differ(before, item_digest(batch))


def test_a_digest_draws_no_random_number_and_uses_the_host() -> None:
    states = torch.get_rng_state()
    with torch.device("meta"):
        assert differ(item_digest(torch.zeros(3, device="cpu")), item_digest(torch.ones(3, device="cpu")))
    assert torch.equal(torch.get_rng_state(), states)


def test_the_digests_are_those_that_checkpoints_of_older_versions_have() -> None:
    item = {
        "x": torch.arange(6.0).reshape(2, 3),
        "strided": torch.arange(6.0).reshape(2, 3).T,
        "array": np.arange(3, dtype=np.int64),
        "number": 3,
        "text": "a",
        "half": torch.tensor(1.0, dtype=torch.bfloat16),
        "deep": [(1, b"b")],
        "np": np.float32(2),
    }
    assert item_digest(item) == {
        "[x]": ["torch.float32 [2, 3]", 0, "c1191589"],
        "[strided]": ["torch.float32 [3, 2]", 0, "e282217c"],
        "[array]": ["int64 [3]", 0, "aade5e09"],
        "[number]": ["builtins.int", 0, "8c3fea82"],
        "[text]": ["builtins.str", 0, "99cec451"],
        "[half]": ["torch.bfloat16 []", 0, "1c55928d"],
        "[deep][0][0]": ["builtins.int", 0, "8fbb3eec"],
        "[deep][0][1]": ["builtins.bytes", 0, "0700fecf"],
        "[np]": ["float32 []", 0, "f15eaa91"],
    }
