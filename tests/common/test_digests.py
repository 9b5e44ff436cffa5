"""Digests of values: which values are equal, however they look, and that reading one calls and changes nothing."""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import inspect
import io
import itertools
import pickle
import random
import threading
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchhooks import Variables
from torchhooks.common import digests as module
from torchhooks.common.digests import TooManyValuesError, digest, digests, mixed_sum

# -- tensors ----------------------------------------------------------------------------------------------------------

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


# -- pairs ------------------------------------------------------------------------------------------------------------


class Meter:
    of_class = 3

    def __init__(self, count: Any, data: Any = None) -> None:
        self.count, self.data = count, data


class Slotted:
    __slots__ = ("data", "unset")

    def __init__(self, data: Any) -> None:
        self.data = data


class Names(list[Any]):
    place = 0


class Table(dict[Any, Any]):
    pass


class Text(str):
    pass


class Level(Enum):
    LOW = 1
    HIGH = 2


@dataclass
class Batch:
    inputs: Any


Point = namedtuple("Point", "x y")


def with_attribute(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


def moved(iterator: Any, places: int) -> Any:
    for _ in range(places):
        next(iterator)
    return iterator


def numbers(start: int = 0) -> Iterator[int]:
    yield from [start, 5, 6, 7]


def closing_over(value: Any) -> Callable[[], Any]:
    return lambda: value


def cached(*arguments: int) -> Any:
    @functools.lru_cache
    def square(number: int) -> int:
        return number * number

    for each in arguments:
        square(each)
    return square


def in_a_ring(*values: Any, doubled: bool = False) -> Any:
    """Return objects that refer to the next and the one before."""
    ring = [Meter(value) for value in values * (2 if doubled else 1)]
    for place, each in enumerate(ring):
        each.data = [ring[place - 1], ring[(place + 1) % len(ring)]]
    return ring[0]


def table(*numbers: int) -> Any:
    return pytest.importorskip("pandas").DataFrame({"a": numbers})


def trained(kind: Any, steps: int, **options: Any) -> Any:
    """Return a model and its optimizer after some steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return optimizer


def loaded(optimizer: Any) -> Any:
    other = trained(type(optimizer), 0, lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other


def opened(mode: str, text: str = "one\ntwo\n", read: int = 0) -> Any:
    file = open(Path(__file__).parent / "test_digests.py", mode) if mode == "r" else io.StringIO(text)  # noqa: SIM115
    file.read(read)
    return file


EQUAL: dict[str, Callable[[], tuple[Any, Any]]] = {
    "a number of NumPy": lambda: (np.float64(0.5), 0.5),
    "numbers of NumPy in a list": lambda: ([np.float32(2), np.int64(3), np.bool_(True)], [2.0, 3, True]),
    "NaN": lambda: (float("nan"), -float("nan")),
    "NaN of NumPy": lambda: (np.float64("nan"), float("nan")),
    "the order of keys": lambda: ({"a": 1, "b": [2]}, {"b": [2], "a": 1}),
    "the order of a set": lambda: (set("abcdefgh"), set("hgfedcba")),
    "a set of containers": lambda: ({(1, "a"), (2, "b")}, {(2, "b"), (1, "a")}),
    "the order of a dict of any keys": lambda: ({1: "a", None: 2, (1, 2): 3}, {(1, 2): 3, None: 2, 1: "a"}),
    "shared members": lambda: ([[1, [2]]] * 2, [[1, [2]], [1, [2]]]),
    "shared tensors": lambda: ([torch.ones(2)] * 2, [torch.ones(2), torch.ones(2)]),
    "strides": lambda: (torch.eye(3)[:, 1], torch.eye(3)[:, 1].clone()),
    "whether it needs a gradient": lambda: (torch.ones(2, requires_grad=True), torch.ones(2)),
    "a parameter": lambda: (torch.nn.Parameter(torch.ones(2)), torch.ones(2)),
    "a sparse tensor that is not coalesced": lambda: (
        torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (2,)),
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([3.0]), (2,)),
    ),
    "a view of an array": lambda: (np.arange(6).reshape(2, 3).T, np.ascontiguousarray(np.arange(6).reshape(2, 3).T)),
    "a path whose text was asked for": lambda: (PurePosixPath("a/b"), PurePosixPath("a", "b")),
    "an attribute that was deleted and set": lambda: (Meter(1), with_attribute(Meter(2), count=1)),
    "a restored generator": lambda: (random.Random(3), pickle.loads(pickle.dumps(random.Random(3)))),
    "a restored generator of NumPy": lambda: (np.random.default_rng(3), copy.deepcopy(np.random.default_rng(3))),
    "a generator of torch": lambda: (torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)),
    "the mode of a module": lambda: (torch.nn.Dropout(0.5), torch.nn.Dropout(0.5).eval()),
    "an optimizer that was loaded": lambda: (trained(torch.optim.Adam, 2), loaded(trained(torch.optim.Adam, 2))),
    "locks": lambda: ([threading.Lock()], [threading.Lock()]),
    "a ring that was entered elsewhere": lambda: (in_a_ring(1, 2, 1, 2), in_a_ring(1, 2, 1, 2).data[0].data[0]),
    "a ring of equal links": lambda: (in_a_ring(1, 2), in_a_ring(1, 2, doubled=True)),
    "functions of the same code": lambda: (closing_over([1]), closing_over([1])),
    "iterators at the same place": lambda: (moved(iter([1, 2, 3]), 1), moved(iter([1, 2, 3]), 1)),
    "an order of a set that is being iterated": lambda: (iter({1, 2, 3}), iter({3, 2, 1})),
    "a fraction": lambda: (Fraction(2, 4), Fraction(1, 2)),
    "a table": lambda: (table(1, 2), table(1, 2).iloc[[0, 1]]),
}
"""Values that are equal and look different."""

OTHER: dict[str, Callable[[], tuple[Any, Any]]] = {
    "int and bool": lambda: (1, True),
    "int and float": lambda: (1, 1.0),
    "text and bytes": lambda: ("ab", b"ab"),
    "zeros": lambda: (0.0, -0.0),
    "complex zeros": lambda: (complex(0.0, 0.0), complex(0.0, -0.0)),
    "a number and a tensor": lambda: (1.0, torch.tensor(1.0, dtype=torch.float64)),
    "a number and an array": lambda: (1.0, np.array(1.0)),
    "an array and a tensor": lambda: (np.ones(2), torch.ones(2, dtype=torch.float64)),
    "list and tuple": lambda: ([1, 2], (1, 2)),
    "list and deque": lambda: ([1, 2], deque([1, 2])),
    "lengths of deques": lambda: (deque([1], maxlen=2), deque([1], maxlen=3)),
    "texts that run together": lambda: (["ab", "c"], ["a", "bc"]),
    "where a list ends": lambda: ([1, [2]], [[1], 2]),
    "an empty list inside": lambda: ([[], 1], [1, []]),
    "a key and its value": lambda: ({"a": "b"}, {"b": "a"}),
    "two keys": lambda: ({1: 2, 3: 4}, {1: 4, 3: 2}),
    "sets": lambda: ({1, 2}, {1, 3}),
    "a set and a list": lambda: ({1}, [1]),
    "frozenset and set": lambda: (frozenset({1}), {1}),
    "orders": lambda: ([1, 2, 3], [3, 2, 1]),
    "the last number of many": lambda: ([0.0] * 5000, [*[0.0] * 4999, 1e-9]),
    "an integer of many digits": lambda: (10**5000, 10**5000 + 1),
    "such an integer in a list": lambda: ([10**5000], [10**5000 + 1]),
    "a subclass": lambda: (Names([1]), [1]),
    "an attribute of a list": lambda: (Names([1]), with_attribute(Names([1]), place=2)),
    "an attribute of a dict": lambda: (Table(a=1), with_attribute(Table(a=1), place=2)),
    "a text and its subclass": lambda: (Text("a"), "a"),
    "texts of a subclass": lambda: (Text("a"), Text("b")),
    "members of an enumeration": lambda: (Level.LOW, Level.HIGH),
    "a counter": lambda: (Counter("aab"), Counter("ab")),
    "a default": lambda: (defaultdict(list), defaultdict(set)),
    "a user dict": lambda: (UserDict(a=1), UserDict(a=2)),
    "an ordered dict": lambda: (OrderedDict(a=1), OrderedDict(a=2)),
    "a bytearray": lambda: (bytearray(b"a"), bytearray(b"b")),
    "arrays of objects": lambda: (np.array([None, [1]], dtype=object), np.array([None, [2]], dtype=object)),
    "shapes": lambda: (np.zeros(3), np.zeros((3, 1))),
    "shapes of tensors": lambda: (torch.zeros(2), torch.zeros(2, 1)),
    "dtypes": lambda: (torch.zeros(2), torch.zeros(2, dtype=torch.float16)),
    "a bit of NaN": lambda: (
        torch.tensor([float("nan")]),
        torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
    ),
    "sparse": lambda: (torch.eye(2).to_sparse(), torch.eye(2).flip(0).to_sparse()),
    "quantized": lambda: (
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        torch.quantize_per_tensor(torch.ones(2), 0.2, 0, torch.qint8),
    ),
    "nested": lambda: (
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        torch.nested.nested_tensor([torch.ones(1), torch.zeros(2)], layout=torch.jagged),
    ),
    "attributes": lambda: (Meter(1), Meter(2)),
    "an attribute that one lacks": lambda: (SimpleNamespace(a=1), SimpleNamespace(a=1, b=None)),
    "names of attributes": lambda: (SimpleNamespace(a=1), SimpleNamespace(b=1)),
    "slots": lambda: (Slotted(1), Slotted(2)),
    "a data class": lambda: (Batch(torch.zeros(1)), Batch(torch.ones(1))),
    "a named tuple": lambda: (Point(1, 2), Point(2, 1)),
    "a namespace": lambda: (argparse.Namespace(lr=1), argparse.Namespace(lr=2)),
    "a decimal": lambda: (Decimal("1.0"), Decimal("1.00")),
    "a range": lambda: (range(3), range(4)),
    "paths": lambda: (Path("a"), Path("b")),
    "functions": lambda: (len, max),
    "what a function closes over": lambda: (closing_over([1]), closing_over([2])),
    "constants of functions": lambda: (lambda: 1, lambda: 2),
    "a default of a function": lambda: (lambda a=1: a, lambda a=2: a),
    "an attribute of a function": lambda: (with_attribute(closing_over(1), calls=1), closing_over(1)),
    "arguments of a partial": lambda: (functools.partial(max, [1]), functools.partial(max, [2])),
    "a cache": lambda: (cached(1), cached(1, 2)),
    "bound methods": lambda: ([1].append, [2].append),
    "methods": lambda: (Meter(1).__init__, Meter(2).__init__),  # type: ignore[misc]
    "classes": lambda: (Meter, Batch),
    "generators": lambda: (random.Random(0), random.Random(1)),
    "a generator function": lambda: (moved(numbers(), 1), moved(numbers(), 2)),
    "the running loop of a generator function": lambda: (moved(numbers(5), 1), moved(numbers(5), 2)),
    "iterators": lambda: (iter([1, 2]), moved(iter([1, 2]), 1)),
    "counts": lambda: (itertools.count(1), itertools.count(2)),
    "cycles": lambda: (moved(itertools.cycle([1, 1, 1]), 1), moved(itertools.cycle([1, 1, 2]), 1)),
    "products": lambda: (itertools.product([1, 2]), moved(itertools.product([1, 2]), 1)),
    "the place in a file": lambda: (opened("r"), opened("r", read=3)),
    "the content of a buffer": lambda: (opened("", "one"), opened("", "two")),
    "the parameters of a module": lambda: (torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)),
    "an attribute of a module": lambda: (torch.nn.Dropout(0.1), torch.nn.Dropout(0.2)),
    "a hook of a module": lambda: (torch.nn.Identity(), with_attribute(torch.nn.Identity(), _forward_hooks={1: print})),
    "states of an optimizer": lambda: (trained(torch.optim.Adam, 1), trained(torch.optim.Adam, 2)),
    "rates of an optimizer": lambda: (trained(torch.optim.SGD, 0, lr=0.1), trained(torch.optim.SGD, 0, lr=0.2)),
    "links of a ring": lambda: (in_a_ring(1, 2, 1, 3), in_a_ring(1, 3, 1, 3)),
    "lengths of rings": lambda: (in_a_ring(1, 2, 2), in_a_ring(1, 2, 2, 2)),
    "where a ring was entered": lambda: (in_a_ring(1, 2), in_a_ring(2, 1)),
    "a table": lambda: (table(1, 2), table(1, 3)),
}
"""Values that look alike and are different."""


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.filterwarnings("ignore")
def test_equal_values_that_look_different_have_one_digest(name: str) -> None:
    one, other = EQUAL[name]()
    assert digest(one) == digest(other)


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.filterwarnings("ignore")
def test_different_values_that_look_alike_have_two(name: str) -> None:
    one, other = OTHER[name]()
    assert digest(one) == digest(one) != digest(other)


@pytest.mark.parametrize("name", ["list and tuple", "attributes", "links of a ring", "a counter", "shapes of tensors"])
def test_a_copy_has_the_digest_of_the_value(name: str) -> None:
    one, _ = OTHER[name]()
    assert digest(copy.deepcopy(one)) == digest(one)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        (torch.ones(2), torch.zeros(1, dtype=torch.int64)),
        [torch.ones(2), 1, "a"],
        {"x": torch.ones(2), "label": 3, 5: None},
        (1, 2),
        [],
        (),
        {},
        {"a": 1},
    ],
    ids=str,
)
def test_a_batch_has_the_same_digest_inside_of_another_value(value: Any) -> None:
    """There is a faster way for batches."""
    graph = module.ValueGraph()
    root = graph.add(value)
    assert graph.hashes()[root].hex() == digest(value)


def test_the_order_of_keys_counts_where_it_matters() -> None:
    one, other = {"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}}
    assert digest(one) == digest(other)
    assert digest(one, ordered=True) != digest(other, ordered=True)
    assert digest(one, ordered=True) == digest(copy.deepcopy(one), ordered=True)


def test_variables_that_were_not_saved_are_read_by_value() -> None:
    assert digest(Variables(best=1.0)) != digest(Variables(best=2.0))


def test_a_value_that_is_part_of_itself_has_a_digest() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    other: list[Any] = [2]
    other.append(other)
    assert digest(endless) == digest(copy.deepcopy(endless)) != digest([1, [1]])
    assert digest(endless) != digest(other)


# -- large and deep ---------------------------------------------------------------------------------------------------


def agents(number: int) -> list[Meter]:
    """Return agents that know all others."""
    group = [Meter(place) for place in range(number)]
    for agent in group:
        agent.data = group
    return group


def links(number: int, value: int = 0) -> Meter:
    """Return the first of so many links, each of which refers to the next one and to the one before."""
    first = last = Meter(0, [None, None])
    for _ in range(number - 1):
        link = Meter(0, [last, None])
        last.data[1] = link
        last = link
    last.count = value
    return first


def test_agents_that_refer_to_one_another_have_a_digest_at_once() -> None:
    group = agents(14)
    group[13].count = 99
    assert digest(agents(14)) == digest(agents(14)) != digest(group)


def test_a_list_of_links_has_a_digest_that_its_last_link_changes() -> None:
    assert digest(links(500)) == digest(links(500))
    assert len({digest(links(500)), digest(links(501)), digest(links(500, value=1))}) == 3


def test_nothing_is_too_deep() -> None:
    def deep(value: int) -> list[Any]:
        inner: list[Any] = [value]
        for _ in range(20_000):
            inner = [inner]
        return inner

    assert digest(deep(1)) == digest(deep(1)) != digest(deep(2))


@pytest.mark.parametrize("make", [links, agents, lambda number: [(each, [each]) for each in range(number)]])
def test_the_work_grows_with_the_number_of_objects(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0
    make_hash = hashlib.blake2b

    def counting(data: bytes, digest_size: int) -> Any:
        nonlocal hashed
        hashed += 1
        return make_hash(data, digest_size=digest_size)

    monkeypatch.setattr(module, "blake2b", counting)
    digest(make(100))
    few, hashed = hashed, 0
    digest(make(1600))
    assert hashed < 40 * few


def test_too_many_values_have_no_digest_rather_than_one_of_a_part() -> None:
    assert inspect.signature(module.ValueGraph).parameters["most"].default == 1_000_000
    with pytest.raises(TooManyValuesError):
        module.ValueGraph(most=100).add([[number] for number in range(100)])
    module.ValueGraph(most=301).add([[number, [number]] for number in range(100)])
    assert digest([0.5] * 1_000_001) != digest([0.5] * 1_000_002), "one text"


# -- nothing is called ------------------------------------------------------------------------------------------------


class Untouchable:
    """An object that fails when anything of it is called."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def fail(self, *_: Any) -> Any:
        raise AssertionError("was called")

    __eq__ = __repr__ = __iter__ = __len__ = __getitem__ = __hash__ = __bool__ = __getattr__ = fail
    __reduce__ = __reduce_ex__ = __getstate__ = state_dict = load_state_dict = __index__ = fail
    read = property(fail)


class Meta(type):
    """A metaclass that fails when a class of it is compared, hashed or asked for what it has not."""

    def fail(cls, *_: Any) -> Any:
        raise AssertionError("was called")

    __eq__ = __hash__ = __getattr__ = __instancecheck__ = __subclasscheck__ = __bool__ = __len__ = __iter__ = fail


class Strange(metaclass=Meta):
    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def __class__(self) -> Any:
        raise AssertionError("was called")

    @__class__.setter
    def __class__(self, value: Any) -> None: ...


class UntouchableModule(torch.nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("was called")

    named_parameters = parameters = __iter__ = state_dict


class UntouchableList(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("was called")

    __len__ = __getitem__ = __iter__  # type: ignore[assignment]


def test_no_code_of_the_script_is_called() -> None:
    for make in (Untouchable, Strange, UntouchableList, lambda value: Table(a=Untouchable(value))):
        assert digest(make([1])) == digest(make([1])) != digest(make([2]))
    assert digest(UntouchableModule(1, 1)) != digest(UntouchableModule(1, 1))


def test_a_digest_changes_no_random_state_and_iterates_over_nothing() -> None:
    states, left = torch.get_rng_state(), iter([1, 2, 3])
    generated = numbers()
    digest([left, generated, torch.ones(3), np.ones(3)])
    assert list(left) == [1, 2, 3]
    assert list(generated) == [0, 5, 6, 7]
    assert torch.equal(torch.get_rng_state(), states)


def test_a_tensor_of_a_class_of_the_script_is_read_without_its_operators() -> None:
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise AssertionError("was called")

    def named(value: float) -> torch.Tensor:
        return torch.Tensor._make_subclass(Named, torch.full((2,), value))  # noqa: SLF001 - as_subclass calls it

    assert digest(named(1.0)) == digest(named(1.0)) != digest(named(2.0))
