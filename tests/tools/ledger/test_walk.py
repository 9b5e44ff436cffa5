"""What ``check`` sees of a script, what it calls for that, and what it says that it cannot see."""
# ruff: noqa: SLF001, SIM115 - a frame is what a walk begins with, and an open file what it may come to

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import csv
import enum
import functools
import gc
import io
import itertools
import multiprocessing
import queue
import random
import sqlite3
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from torchhooks import EvaluationHook, LoggingTensorHook, MonitoredLoop, SessionRunHook, Variables
from torchhooks.tools.ledger.walk import Held, Moment, Node, Walked, Walker, append, at, differing


@pytest.fixture(autouse=True)
def _no_other_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a walk begin with this module alone: a whole session has imported hundreds that are no library."""
    monkeypatch.setattr(
        "torchhooks.tools.ledger.walk.sys", types.SimpleNamespace(modules={__name__: sys.modules[__name__]})
    )


def read(value: Any, *saved: Any, run: int = 1, **held: Any) -> tuple[Moment, dict[str, Node]]:
    """Return the moment of a script with the variable ``value``."""
    parts = {f"part{number}": part for number, part in enumerate(saved)}
    moment, nodes = Walker().read(Held(sys._getframe(), parts, **held), run, run == 1)
    names = [name for name in moment.roots if name == "value in read()" or name.startswith(("state[", *held))]
    return moment._replace(roots={name: moment.roots[name] for name in names}), nodes


def changes(value: Any, change: Callable[[Any], object], *saved: Any) -> set[str]:
    """Return the names under which a change of ``value`` is seen."""
    before, nodes = read(value, *saved)
    change(value)
    after, more = read(value, *saved, run=2)
    return {each.name.removeprefix("value in read()") for each in differing(nodes | more, before, after)}


class Meter:
    """An object of a script, with attributes of each kind."""

    of_class = 3
    __slots__ = ("__dict__", "slot", "unset")

    def __init__(self, total: float = 0.0) -> None:
        self.total = total
        self.slot = 1

    @property
    def unreadable(self) -> None:
        raise AssertionError("was called")

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"was asked for {name}")

    def update(self, value: float) -> None:
        self.total += value


class Average:
    """A part that forgets something in its state."""

    def __init__(self) -> None:
        self.value, self.forgotten = 0.0, 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Masked(nn.Linear):
    mask: Any = None

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("scale", torch.ones(1), persistent=False)


class Counting(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1


class Collate:
    calls = 0


def smoothed(method: Any) -> Any:
    total = [0.0]

    @functools.wraps(method)
    def wrapper(self: Any) -> None:
        total[0] += 1
        method(self)

    return wrapper


class Kept:
    """A descriptor that keeps what is set."""

    def __init__(self) -> None:
        self.store: dict[int, Any] = {}

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self.store.get(0)

    def __set__(self, instance: Any, value: Any) -> None:
        self.store[0] = value


class Decorated:
    scale = Kept()

    @smoothed
    def update(self) -> None: ...


class Task(enum.Enum):
    EASY = "easy"
    HARD = "hard"


class Pair(NamedTuple):
    items: list[Any]


class Names(list[Any]):
    pass


class Table(dict[Any, Any]):
    pass


def setting(name: str, value: Any) -> Callable[[Any], object]:
    return lambda each: setattr(each, name, value)


def putting(key: Any, value: Any) -> Callable[[Any], object]:
    return lambda each: each.__setitem__(key, value)


def numbers() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def taking(values: Any) -> Iterator[Any]:
    for _ in values:
        yield None


def started(iterator: Any) -> Any:
    next(iterator)
    return iterator


async def waiting() -> None:
    number = 0
    while True:
        number += 1
        await pause()


@types.coroutine
def pause() -> Iterator[None]:
    yield


async def counted() -> Any:
    for number in range(5):
        yield number


def cache() -> Any:
    return functools.lru_cache(lambda number: torch.ones(number))


def with_hook(part: Any, register: str) -> Any:
    calls = {"n": 0}

    def hook(*_: Any) -> None:
        calls["n"] += 1

    getattr(part, register)(hook)
    return part


def hooked_parameter() -> nn.Module:
    model = nn.Linear(2, 2)
    with_hook(model.weight, "register_hook")
    return model


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)


def of_sklearn() -> Any:
    return pytest.importorskip("sklearn.preprocessing").StandardScaler()


def scaler() -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu")
    made.scale(torch.ones(1))
    return made


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def loader(**options: Any) -> Any:
    return torch.utils.data.DataLoader(range(9), **options)  # type: ignore[arg-type]


def shuffled() -> Any:
    return torch.utils.data.RandomSampler(range(9), generator=generator())


def forward(model: Any) -> None:
    model(torch.ones(1, 2)).sum().backward()


def seeded(each: Any) -> None:
    each.manual_seed(5)


TRIPLE = (torch.ones(2), 1, 0.5)
HERE = __file__

KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], set[str]]] = {
    "an argument of the command line": (lambda: argparse.Namespace(best=0.0), setting("best", 1.0), {".best"}),
    "a simple namespace": (lambda: types.SimpleNamespace(best=0.0), setting("best", 1.0), {".best"}),
    "a replay buffer": (list, lambda each: each.append(TRIPLE), {""}),
    "a replay buffer of limited length": (
        lambda: collections.deque(maxlen=9),
        lambda each: each.extend([TRIPLE] * 3),
        {""},
    ),
    "a replay buffer that grows": (lambda: [TRIPLE], lambda each: each.append(TRIPLE), {""}),
    "a list of dicts": (list, lambda each: each.append({"a": 1}), {""}),
    "a dict of lists": (dict, putting("a", [1]), {""}),
    "a dict with a default": (lambda: collections.defaultdict(list), putting("loss", [1.0]), {"['loss']"}),
    "a history": (lambda: {"loss": []}, lambda each: each["loss"].append(1.0), {"['loss']"}),
    "a list of numbers that grows": (lambda: [0.0] * 300, lambda each: each.append(1.0), {""}),
    "a number far behind": (lambda: [0.0] * 300, putting(290, 1.0), {""}),
    "the last element of a large tensor": (lambda: torch.zeros(70_000), putting(69_999, 1.0), {""}),
    "the cache of a function": (cache, lambda each: each(3), {".cache"}),
    "a queue": (queue.Queue, lambda each: each.put(1), {".queue", ".unfinished_tasks"}),
    "a user dict": (collections.UserDict, putting("a", 1), {".data"}),
    "a counter": (collections.Counter, lambda each: each.update("a"), {""}),
    "bytes": (lambda: bytearray(b"a"), lambda each: each.append(1), {""}),
    "an array of Python": (lambda: array.array("i", [1]), lambda each: each.append(1), {""}),
    "a buffer": (io.BytesIO, lambda each: each.write(b"x"), {""}),
    "what a thread holds": (threading.local, setting("x", 1), {".x"}),
    "a shared number": (lambda: multiprocessing.Value("i", 0), setting("value", 3), {""}),
    "itertools.tee": (lambda: itertools.tee(iter(range(5)))[0], next, {""}),
    "itertools.product": (lambda: itertools.product(range(5)), next, {""}),
    "itertools.permutations": (lambda: itertools.permutations(range(5)), next, {""}),
    "itertools.zip_longest": (lambda: itertools.zip_longest(range(5)), next, {""}),
    "itertools.cycle": (lambda: itertools.cycle([1, 2, 3]), next, {""}),
    "itertools.count": (itertools.count, next, {""}),
    "an iterator of a list": (lambda: iter([1, 2, 3]), next, {""}),
    "an iterator of a set": (lambda: iter({1, 2, 3}), next, {""}),
    "an iterator of keys": (lambda: iter({1: 1, 2: 2}.keys()), next, {""}),
    "an iterator of a deque": (lambda: iter(collections.deque([1, 2])), next, {""}),
    "enumerate": (lambda: enumerate([5, 6]), next, {""}),
    "zip": (lambda: zip([1, 2], strict=False), next, {""}),
    "the place in a file": (lambda: open(HERE), lambda each: each.readline(), {""}),
    "a reader of rows": (lambda: csv.reader(open(HERE)), next, {""}),
    "an array of NumPy": (lambda: np.arange(5), putting(0, 9), {""}),
    "bits of NumPy": (lambda: np.random.PCG64(1), lambda each: each.random_raw(), {""}),
    "a generator of Python": (lambda: random.Random(0), lambda each: each.random(), {""}),
    "a generator of NumPy": (lambda: np.random.default_rng(0), lambda each: each.random(), {""}),
    "a generator of torch": (generator, seeded, {""}),
    "a part that is not saved": (Average, setting("forgotten", 2), {".forgotten"}),
    "the generator of a sampler": (shuffled, lambda each: seeded(each.generator), {".generator"}),
    "the generator of a loader's sampler": (
        lambda: loader(sampler=shuffled()),
        lambda each: seeded(each.sampler.generator),
        {".sampler.generator"},
    ),
    "what a loader collates with": (
        lambda: loader(collate_fn=Collate()),
        lambda each: setattr(each.collate_fn, "calls", 4),
        {".collate_fn.calls"},
    ),
    "an iterator of a loader": (lambda: iter(loader()), next, {""}),
    "what scales the data": (
        lambda: of_sklearn().partial_fit(np.ones((2, 2))),
        lambda each: each.partial_fit(np.zeros((2, 2))),
        {""},
    ),
    "a context variable": (lambda: contextvars.ContextVar("x", default=0), lambda each: each.set(3), {""}),
    "a coroutine": (waiting, lambda each: each.send(None), {""}),
    "an asynchronous generator": (
        counted,
        lambda each: next(iter(each.asend(None).__await__()), None),
        {""},
    ),
    "a generator function": (lambda: started(numbers()), next, {""}),
    "a generator function that began": (numbers, next, {""}),
    "a running for loop of a generator function": (lambda: started(taking([1, 2, 3])), next, {""}),
    "an attribute that comes later": (types.SimpleNamespace, setting("cache", torch.ones(2)), {".cache"}),
    "an attribute of an object that comes later": (Meter, setting("cache", torch.ones(2)), {".cache"}),
    "None that becomes a tuple": (lambda: [None], putting(0, (1, torch.ones(1))), {""}),
    "None that becomes a dict": (lambda: Meter(None), setting("total", {"a": [1], "b": {}}), {".total"}),  # type: ignore[arg-type]
    "a slot": (Meter, setting("slot", 2), {".slot"}),
    "a number of the class": (Meter, setting("of_class", 4), {".of_class"}),
    "a class": (lambda: type("Config", (), {"lr": 0.1, "__module__": __name__}), setting("lr", 0.2), {".lr"}),
    "a set of objects": (set, lambda each: each.add((1, 2)), {""}),
    "a set of texts": (lambda: {"a"}, lambda each: each.add("b"), {""}),
    "an argument of a partial": (
        lambda: functools.partial(Meter.update, Meter()),
        lambda each: each(1.0),
        {".args[0].total"},
    ),
    "the object of a method": (lambda: Meter().update, lambda each: each(1.0), {"Meter.total"}),
    "an attribute of a list": (Names, setting("place", 3), {""}),
    "an attribute of a dict": (Table, setting("place", 3), {""}),
    "a list in a named tuple": (lambda: Pair([]), lambda each: each.items.append(1), {".items"}),
    "a weak dict": (weakref.WeakKeyDictionary, putting(Meter, 1), {".data"}),
    "a module": (Masked, lambda each: nn.init.zeros_(each.weight), {""}),
    "a module in a list": (lambda: [Meter(), Masked()], lambda each: nn.init.zeros_(each[1].weight), {"[1]"}),
    "a script module": (
        lambda: torch.jit.script(nn.Linear(2, 2)),
        lambda each: each.weight.data.add_(1),
        {""},
    ),
    "a scheduler": (lambda: torch.optim.lr_scheduler.StepLR(optimizer(), 1), lambda each: each.step(), {""}),
    "a scaler of gradients": (scaler, lambda each: each.update(2.0), {""}),
    "an optimizer": (optimizer, lambda each: each.param_groups[0].update(lr=1), {""}),
    "the order of a list": (lambda: [1, 2], lambda each: each.reverse(), {""}),
    "an object in a dict": (lambda: {"a": Meter()}, lambda each: each["a"].update(1.0), {"['a'].total"}),
    "an object by a strange key": (lambda: {(1, 2): Meter()}, lambda each: each[1, 2].update(1.0), {"[...].total"}),
    "what a decorator of a method closes over": (Decorated, lambda each: each.update(), {"total in update()"}),
    "a descriptor": (Decorated, setting("scale", torch.ones(1)), {"Decorated.scale.store"}),
    "an attribute of a member of an enumeration": (lambda: Task.HARD, setting("difficulty", 2), {".difficulty"}),
    "an attribute of a member, by its class": (
        lambda: Task,
        lambda each: setattr(each.EASY, "level", 2),
        {".EASY.level"},
    ),
    "an attribute that the script gives to an object of torchhooks": (
        lambda: LoggingTensorHook(["loss"], 1),
        setting("best", 1.0),
        {".best"},
    ),
    "an attribute of a parameter": (
        lambda: nn.Sequential(nn.Linear(1, 1)),
        lambda each: setattr(each[0].weight, "slow", torch.ones(1)),
        {""},
    ),
    "Variables that are not saved": (lambda: Variables(best=1.0), setting("best", 2.0), {".best"}),
}
"""Kinds of state that a script may forget: how it is made, what changes it, and the names under which that is seen."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_each_kind_of_state_is_seen(kind: str) -> None:
    make, change, names = KINDS[kind]
    assert changes(make(), lambda value: None) == set(), "nothing has changed"
    assert changes(make(), change) == names


OF_SAVED: dict[str, tuple[Callable[[], Any], Callable[[Any], object], set[str]]] = {
    "what a forward hook closes over": (
        lambda: with_hook(nn.Linear(2, 2), "register_forward_hook"),
        forward,
        {"calls in hook()['n']"},
    ),
    "what a hook of a parameter closes over": (hooked_parameter, forward, {"calls in hook()['n']"}),
    "what a hook of an optimizer closes over": (
        lambda: with_hook(optimizer(), "register_step_pre_hook"),
        lambda each: each.step(),
        {"calls in hook()['n']"},
    ),
    "an attribute of an optimizer": (
        lambda: Counting(nn.Linear(1, 1).parameters(), lr=0.1),
        lambda each: each.step(),
        {".calls"},
    ),
    "what a state forgets": (Average, setting("forgotten", 2), {".forgotten"}),
    "a tensor that is no buffer": (Masked, setting("mask", torch.ones(2)), {".mask"}),
    "a buffer that is not saved": (Masked, lambda each: each.scale.fill_(2), {".scale"}),
    "an attribute of a module of torch": (lambda: nn.Dropout(0.1), setting("p", 0.9), {".p"}),
    "an attribute of a module in it": (
        lambda: nn.Sequential(Masked()),
        lambda each: setattr(each[0], "mask", 1),
        {"[0].mask"},
    ),
    "an attribute of a parameter": (
        lambda: nn.Linear(1, 1),
        lambda each: setattr(each.weight, "slow", torch.ones(1)),
        {".weight"},
    ),
    "the mode": (lambda: nn.Linear(1, 1), lambda each: each.eval(), {".training"}),
    "what needs gradients": (lambda: nn.Linear(1, 1), lambda each: each.requires_grad_(False), {".requires_grad"}),
}


@pytest.mark.parametrize("kind", OF_SAVED)
def test_what_checkpoints_lack_of_a_saved_part_is_seen(kind: str) -> None:
    make, change, names = OF_SAVED[kind]
    value = make()
    assert changes(value, change, value) == names


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (Masked, lambda each: nn.init.zeros_(each.weight)),
        (lambda: nn.Linear(2, 2), forward),
        (lambda: torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), lambda each: each.param_groups[0].update(lr=1)),
        (lambda: Variables(best=1), setting("best", 2)),
        (Average, setting("value", 0.0)),
    ],
)
def test_what_checkpoints_have_is_a_constant(make: Any, change: Any) -> None:
    value = make()
    assert changes(value, change, value) == set()
    assert changes([value], lambda each: change(each[0]), value) == set()


def test_a_module_in_a_saved_one_is_saved_and_so_are_its_tensors() -> None:
    model = nn.Sequential(Masked())
    assert changes([model[0], model[0].weight], lambda each: nn.init.zeros_(each[1]), model) == set()


def test_what_checkpoints_contain_is_read_as_it_is() -> None:
    model = nn.Linear(1, 1)
    before, _ = read(None, model)
    nn.init.zeros_(model.weight)
    assert before.saved.keys() == {"part0"}
    assert read(None, model)[0].saved != before.saved
    trained = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 1)).sum().backward()
    trained.step()
    before, _ = read(None, trained)
    trained.state[model.weight]["momentum_buffer"].zero_()
    assert read(None, trained)[0].saved != before.saved


# -- where it begins --------------------------------------------------------------------------------------------------


def roots(**held: Any) -> set[str]:
    moment, _ = Walker().read(Held(sys._getframe(), **held), 1, True)
    return {*moment.roots}


def test_a_walk_begins_with_variables_of_functions_and_modules() -> None:
    local = 1
    assert local
    found = roots()
    assert {"local in test_a_walk_begins_with_variables_of_functions_and_modules()", f"{__name__}.TRIPLE"} <= found
    assert not {name for name in found if name.startswith("torch")}


def test_the_object_of_a_method_has_the_name_of_its_class() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.found = roots()

    assert "Trainer" in Trainer().found


def test_it_begins_with_hooks_of_the_script_and_with_functions_in_others() -> None:
    class Own(SessionRunHook):
        pass

    found = roots(hooks=[Own(), EvaluationHook(lambda: 1.0, every_n_steps=1), LoggingTensorHook(["loss"], 1)])
    assert "Own" in found
    assert any(name.startswith("EvaluationHook.") for name in found), found
    assert not any(name.startswith("LoggingTensorHook") for name in found)


def test_it_begins_with_the_step() -> None:
    count = [0]

    def step() -> None:
        count[0] += 1

    def moment() -> tuple[Moment, dict[str, Node]]:
        return Walker().read(Held(None, step=step), 1, True)

    before, nodes = moment()
    step()
    after, more = moment()
    assert [each.name for each in differing(nodes | more, before, after) if "step" in each.name] == ["count in step()"]


def test_a_variable_that_has_the_item_or_what_is_in_it_is_a_constant() -> None:
    def both(*item: Any) -> tuple[Moment, dict[str, Node]]:
        inputs, numbers = item
        assert [id(inputs), id(numbers)] == [*map(id, item)]
        return Walker().read(Held(sys._getframe(), item=item), 1, True)

    (before, nodes), (after, more) = both(torch.ones(2), [1]), both(torch.zeros(2), [2])
    assert not [each.name for each in differing(nodes | more, before, after) if "in both()" in each.name]


@pytest.mark.parametrize("around", [enumerate, lambda data: zip(itertools.count(), data, strict=False), iter])
def test_an_iterator_around_that_of_the_loop_is_the_place_of_a_for_loop(around: Any) -> None:
    with MonitoredLoop(lambda: None) as loop:
        assert changes(around(loop.until_stop(range(5))), next) == set()


def test_the_handle_of_a_hook_has_no_value() -> None:
    model = nn.Linear(1, 1)
    one, other = (model.register_forward_hook(print) for _ in range(2))
    assert changes([one], lambda each: each.__setitem__(0, other)) == set()


def test_two_equal_numbers_are_both_named() -> None:
    value = types.SimpleNamespace(one=0, other=0)
    assert changes(value, lambda each: vars(each).update(one=5, other=5)) == {".one", ".other"}


@pytest.mark.parametrize(
    ("make", "change", "lacks"),
    [
        (lambda: {"a": 1, "b": 2}, lambda each: each.pop("a"), 1),
        (lambda: {"a": 1}, lambda each: each.clear(), 1),
        (lambda: {"a": 1, "b": 2}, lambda each: (each.pop("a"), each.update(b=3)), 0),
        (lambda: {"a": 1, "b": 2}, lambda each: (each.pop("a"), each.update(c=3)), 0),
        (lambda: {"a": Meter(), "b": Meter()}, lambda each: each.pop("a"), 1),
        (lambda: dict.fromkeys(range(5000)), lambda each: each.pop(7), 1),
        (lambda: [1, 2], lambda each: each.pop(), 0),
    ],
)
def test_a_dict_that_only_lacks_entries_is_known(make: Any, change: Any, lacks: int) -> None:
    value = make()
    before, nodes = read(value)
    change(value)
    after, more = read(value, run=2)
    assert [each.lacks for each in differing(nodes | more, before, after)] == [lacks]


def test_a_large_container_is_read_once_as_long_as_it_is_the_same() -> None:
    value, walker = {"numbers": [*range(5000)], "words": {str(number): number for number in range(5000)}}, Walker()

    def moment() -> tuple[Moment, dict[str, Node]]:
        found, nodes = walker.read(Held(sys._getframe(1)), 1, True)
        name = f"value in {test_a_large_container_is_read_once_as_long_as_it_is_the_same.__name__}()"
        return found._replace(roots={name: found.roots[name]}), nodes

    (first, nodes), (second, none) = moment(), moment()
    assert first.roots == second.roots
    assert not nodes.keys() & none.keys()
    value["words"]["7"] = 8  # type: ignore[index]
    (third, more), (fresh, _) = moment(), Walker().read(Held(sys._getframe()), 1, True)
    assert [each.name[-9:] for each in differing(nodes | more, first, third)] == ["['words']"]
    assert third.roots.items() <= fresh.roots.items(), "another process, which has not read it before"


def test_variables_that_for_loops_set_are_known() -> None:
    for _number, (_one, *_rest) in enumerate([(1, 2, 3)]):
        moment, _ = Walker().read(Held(sys._getframe()), 1, True)
    suffix = " in test_variables_that_for_loops_set_are_known()"
    assert {f"{name}{suffix}" for name in ("_number", "_one", "_rest")} == {
        name for name in moment.targets if name.endswith(suffix)
    }


# -- what it does not do ----------------------------------------------------------------------------------------------


def test_no_garbage_is_collected_while_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def looked_at(*_: object) -> list[str]:
        seen.append(gc.isenabled())
        return []

    monkeypatch.setattr("torchhooks.tools.ledger.walk._names", looked_at)
    Walker().read(Held(None), 1, True)
    assert seen == [False, False]
    assert gc.isenabled()


def test_what_cannot_be_seen_is_said() -> None:
    with open(HERE) as lines:
        next(lines)
        assert "the place in a text file that is being read" in read(lines)[0].unseen
    assert "what other processes hold" in read(loader(num_workers=1))[0].unseen
    with closing(sqlite3.connect(":memory:")) as connection:
        assert "an object of sqlite3.Connection" in read(connection)[0].unseen
    del connection
    plain = [Meter(), Average(), Names(), Table(), Pair([]), types.SimpleNamespace(), object(), of_sklearn()]
    assert not [each for each in read(plain)[0].unseen if "an object of" in each]


def test_what_cannot_be_read_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("torchhooks.tools.ledger.walk._roots", fail)
    assert read(1) == (Moment(1, True, {}, unseen=["the variables: RuntimeError: no"]), {})


def test_a_lazy_object_in_a_library_is_left_alone() -> None:
    class Lazy:
        def __getattr__(self, name: str) -> None:
            raise ImportError(name)

    kind = type("Kind", (), {"__module__": "argparse", "lazy": Lazy(), "count": 0})
    assert changes(kind(), setting("other", 1)) == {".other"}


def test_what_is_too_large_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchhooks.tools.ledger.walk._MOST_MEMBERS", 50)
    moment, nodes = read([Meter(number) for number in range(60)])
    assert "a list of 60 values" in moment.unseen
    assert nodes[moment.roots["value in read()"]].edges == {}
    monkeypatch.setattr("torchhooks.tools.ledger.walk._MOST_NODES", 100)
    assert read(1) == (Moment(1, True, {}, unseen=["the variables, which hold more than 100 values"]), {})


# -- moments ----------------------------------------------------------------------------------------------------------


def test_moments_are_kept_in_a_file(tmp_path: Any) -> None:
    path, walker = str(tmp_path / "walk.jsonl"), Walker()
    meter = Meter()
    for run in (1, 2, 3):
        moment, nodes = walker.read(Held(sys._getframe()), run, run == 1)
        append(path, moment, nodes)
        meter.update(1.0)
    walked = Walked.of(path)
    assert [(each.run, each.is_first) for each in walked.moments] == [(1, True), (2, False), (3, False)]
    one, other = walked.before(1), walked.before(3)
    assert one is not None
    assert other is not None
    (found,) = [each for each in differing(walked.nodes, one, other) if each.name.startswith("meter in")]
    assert found.name == "meter in test_moments_are_kept_in_a_file().total"
    assert (found.one.text, found.other.text) == ("0.0", "2.0")  # type: ignore[union-attr]
    assert at(walked.nodes, one, found.steps) != at(walked.nodes, other, found.steps)
    assert at(walked.nodes, None, found.steps) is at(walked.nodes, one, (*found.steps, ".more")) is None
    assert walked.before(9) is None
    assert Walked.of(str(tmp_path / "none")).moments == []


def test_of_a_value_in_several_places_the_shortest_path_is_named() -> None:
    meter = Meter()
    assert changes([[[meter]], meter], lambda each: each[1].update(1.0)) == {"[1].total"}


def test_a_part_in_an_object_makes_it_one() -> None:
    moment, nodes = read([types.SimpleNamespace(average=Masked()), types.SimpleNamespace(average=1.0)])
    root = nodes[moment.roots["value in read()"]]
    assert [nodes[root.edges[f"[{place}]"]].is_part for place in range(2)] == [True, False]


def test_weights_of_a_saved_module_are_a_part_and_other_tensors_are_none() -> None:
    model = nn.Linear(1, 1)
    for value, is_part in ((dict(model.state_dict()), True), ({"loss": torch.ones(1)}, False)):
        copied = {name: each.clone() for name, each in value.items()}
        moment, nodes = read(copied, model)
        assert nodes[moment.roots["value in read()"]].is_part == is_part


class Counter:
    seen = 0

    def count(self) -> None:
        self.seen += 1


@pytest.mark.parametrize("make", [set, frozenset, weakref.WeakSet])
def test_an_object_in_a_set_is_not_named_again(make: Any) -> None:
    counter, other = Counter(), Masked()
    held = make([counter, other])
    assert changes([[held], counter], lambda each: counter.count()) == {"[1].seen"}
    assert changes([held, other], lambda each: counter.count()) == {"[0][...].seen"}
