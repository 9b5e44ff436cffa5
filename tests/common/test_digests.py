"""Digests: which values and items differ, and that reading one changes nothing."""

from __future__ import annotations

import copy
import pickle
import random
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from torchhooks.common.digests import differ, digest, digests, item_digest, mixed_sum


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


# -- values -----------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.complex64]


def changed(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors that differ from ``tensor`` in one element, or in the order of elements or rows."""
    others = []
    for place in {0, len(tensor) // 2, len(tensor) - 1}:
        others.append(tensor.clone())
        others[-1][place] = 3 if tensor[place] != 3 and tensor.dtype != torch.bool else ~tensor[place].bool()
    orders = [tensor.flip(0), tensor.roll(4096), torch.cat([tensor[1:2], tensor[:1], tensor[2:]])]
    return others + [each for each in orders if each.shape == tensor.shape and not each.equal(tensor)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 4096, 10_000])
def test_another_element_or_order_is_another_digest(size: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(size).remainder(7).to(dtype)
    first, same, *rest = digests([tensor, tensor.clone(), *changed(tensor)])
    assert first == same == digest(tensor)
    assert first not in rest


@pytest.mark.parametrize("size", [1, 5, 4096, 10_000])
def test_so_it_is_of_the_sum_that_a_device_makes(size: int) -> None:
    tensor = torch.arange(size).remainder(7)
    sums = [mixed_sum(each).item() for each in (tensor, tensor.clone(), *changed(tensor))]
    assert sums[0] == sums[1]
    assert sums[0] not in sums[2:]


def test_a_sum_of_a_large_tensor_is_made_in_chunks_that_know_their_place() -> None:
    tensor = torch.zeros((1 << 22) + 5, dtype=torch.int64)
    one, other = tensor.clone(), tensor.clone()
    one[2], other[(1 << 22) + 2] = 1, 1
    assert mixed_sum(one) != mixed_sum(other)


def test_a_parameter_has_the_digest_of_its_tensor() -> None:
    assert digest(torch.nn.Parameter(torch.ones(3))) == digest(torch.ones(3))


def test_rows_of_complex_numbers_that_are_not_contiguous_are_read() -> None:
    tensor = torch.arange(6).to(torch.complex64).reshape(2, 3).T
    first, same, other = digests([tensor, tensor.contiguous(), tensor + 1])
    assert first == same != other


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_of_a_layout_that_is_not_read_the_shape_counts() -> None:
    rows = [torch.eye(size).to_sparse_csr() for size in (2, 2, 3)]
    first, same, other = digests(rows)
    assert first == same != other


def test_every_bit_of_an_element_counts() -> None:
    tensors = [torch.zeros(4, dtype=torch.int64)]
    for bit in range(64):
        tensors.append(tensors[0].clone())
        tensors[-1][2] = 1 << bit if bit < 63 else -(2**63)
    assert len({*digests(tensors)}) == len({mixed_sum(each).item() for each in tensors}) == 65


def test_rows_that_change_places_are_another_value() -> None:
    rows = torch.randn(64, 4096)
    assert digest(rows) != digest(rows.flip(0))
    assert mixed_sum(rows.view(torch.int32).flatten()) != mixed_sum(rows.flip(0).view(torch.int32).flatten())


class Counter:
    def __init__(self, count: int, data: Any) -> None:
        self.count, self.data = count, data


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("ab", b"ab"),
        (["ab", "c"], ["a", "bc"]),
        ([1, [2]], [[1], 2]),
        ((1, 2), [1, 2]),
        ({"a": 1}, {"b": 1}),
        ({1, 2}, {1, 3}),
        (np.zeros(3), np.zeros((3, 1))),
        (np.array([None, 1]), np.array([None, 2])),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2).to_sparse()),
        (torch.eye(2).to_sparse(), torch.eye(2).flip(0).to_sparse()),
        (Counter(1, []), Counter(2, [])),
        (Counter(1, [torch.zeros(1)]), Counter(1, [torch.ones(1)])),
        (random.Random(0), random.Random(1)),
        (np.random.default_rng(0), np.random.default_rng(1)),
        (np.random.RandomState(0), np.random.RandomState(1)),
        (torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)),
        (len, max),
        (Counter, Batch),
    ],
)
def test_other_values_have_other_digests(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)
    assert digest(one) == digest(copy.deepcopy(one))


def test_identity_and_the_order_of_keys_do_not_count() -> None:
    shared = torch.ones(2)
    assert digest([shared, shared]) == digest([torch.ones(2), torch.ones(2)])
    assert digest(Counter(1, [shared, shared])) == digest(Counter(1, [torch.ones(2), torch.ones(2)]))
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(torch.eye(3)[:, 1]) == digest(torch.eye(3)[:, 1].clone())


def test_the_mode_of_a_module_does_not_count() -> None:
    model = torch.nn.Linear(2, 2)
    before = digest(model)
    assert digest(model.eval().requires_grad_(False)) == before
    with torch.no_grad():
        model.bias[0] += 1
    assert digest(model) != before


def test_the_digest_of_an_optimizer_is_the_same_after_its_state_was_loaded() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    one, other = torch.optim.Adam(weights), torch.optim.Adam(weights)
    for weight in reversed(weights):
        weight.grad = torch.ones(2)
    one.step()
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert digest(one.state_dict()) == digest(other.state_dict())


def test_a_value_that_is_part_of_itself_has_a_digest() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert digest(endless) == digest(copy.deepcopy(endless)) != digest([1, [1]])


def test_a_digest_changes_no_random_state_and_iterates_over_nothing() -> None:
    states, numbers = torch.get_rng_state(), iter([1, 2, 3])
    digest([numbers, torch.ones(3), np.ones(3)])
    assert list(numbers) == [1, 2, 3]
    assert torch.equal(torch.get_rng_state(), states)
