"""Digests: which items differ, and that reading one changes nothing."""

from __future__ import annotations

import pickle
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from torchhooks.common.digests import differ, digest, fingerprints


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
    assert differ(digest(one), digest(other))
    assert not differ(digest(one), digest(pickle.loads(pickle.dumps(one))))


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
    assert digest(item) is not None
    assert not differ(digest(item), digest(item))


def test_a_generator_is_not_iterated() -> None:
    numbers = iter([1, 2, 3])
    assert digest([numbers, (number for number in numbers)]) is not None
    assert list(numbers) == [1, 2, 3]


def test_a_large_item_has_a_small_digest() -> None:
    endless: list[Any] = [1]
    endless += [endless, endless]
    for item in (list(range(10**6)), {str(key) * 99: "long" * 999 for key in range(99)}, endless, torch.zeros(10**6)):
        assert len(pickle.dumps(digest(item))) < 10_000


def test_an_item_that_cannot_be_read_has_none_and_differs_from_nothing() -> None:
    class Lazy(UserDict[str, int]):
        def items(self) -> Any:
            raise OSError

    assert digest(Lazy()) is None
    assert not differ(digest(Lazy()), digest(1))
    assert not differ(digest(1), digest(Lazy()))


def test_what_the_body_took_out_or_changed_in_place_does_not_count() -> None:
    batch = {"inputs": torch.zeros(3), "labels": torch.ones(3)}
    before = digest(batch)
    batch.pop("labels")
    batch["inputs"].add_(1)
    assert not differ(before, digest(batch))


def test_a_digest_draws_no_random_number_and_uses_the_host() -> None:
    states = torch.get_rng_state()
    with torch.device("meta"):
        assert differ(digest(torch.zeros(3, device="cpu")), digest(torch.ones(3, device="cpu")))
    assert torch.equal(torch.get_rng_state(), states)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("size", [1, 5, 4096, 10_000])
def test_a_fingerprint_tells_a_tensor_from_one_with_another_element_or_order(size: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(size).remainder(7).to(dtype)
    others = []
    for place in {0, size // 2, size - 1}:
        others.append(tensor.clone())
        others[-1][place] = 3 if tensor[place] != 3 and dtype != torch.bool else ~tensor[place].bool()
    others += [tensor.flip(0)] if size > 1 and not tensor.equal(tensor.flip(0)) else []
    first, same, *rest = fingerprints([tensor, tensor.clone(), *others])
    assert first == same
    assert first not in rest


def test_the_fingerprint_of_a_tensor_without_plain_elements_is_empty() -> None:
    tensors = [torch.eye(2).to_sparse(), torch.empty(2, device="meta"), torch.zeros(())]
    assert [bool(each) for each in fingerprints(tensors)] == [False, False, True]
