"""What the probe of ``check`` finds of a script, and what it leaves out."""
# ruff: noqa: SLF001 - a frame is what the probe is given

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.forks import forget_tests
from torch import nn

from torchhooks.ledger.probe import Found, Probed, Suspect, forgotten, reachable, suspects


@pytest.fixture(autouse=True)
def _no_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_tests(monkeypatch, but=__name__)


class Meter:
    """An object of a script, with attributes of each kind."""

    of_class = 3
    __slots__ = ("__dict__", "slot", "unset")

    def __init__(self, total: float = 0.0) -> None:
        self.total = total
        self.slot = 1

    @property
    def unreadable(self) -> None:
        raise RuntimeError

    def update(self, value: float) -> None:
        self.total += value


class Model(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.temperature = 1.0


def found(value: Any, *saved: object) -> dict[str, Found]:
    """Return what is found of the variable ``value``, by the rest of its name."""
    names = reachable(sys._getframe(), saved)
    return {name.removeprefix("value in found()"): each for name, each in names.items() if "value in found" in name}


def changes(value: Any, change: Any, *saved: object) -> set[str]:
    """Return the names under which a change of ``value`` is seen."""
    before = found(value, *saved)
    change(value)
    after = found(value, *saved)
    return {name for name in before if before[name] != after[name]}


def test_numbers_are_found_with_their_text() -> None:
    assert found(1.5)[""].text == "1.5"
    assert found("word")[""].text == "'word'"
    assert found(np.float32(2))[""].digest == found(np.float32(2))[""].digest != found(np.float32(3))[""].digest


def test_attributes_slots_and_numbers_of_classes_are_found() -> None:
    names = found(Meter())
    assert {name: each.text for name, each in names.items()} == {".total": "0.0", ".slot": "1", ".of_class": "3"}
    assert changes(Meter(), lambda meter: setattr(meter, "of_class", 4)) == {".of_class"}
    assert changes(SimpleNamespace(best=1.0), lambda each: setattr(each, "best", 0.5)) == {".best"}


def test_the_operators_of_torch_are_no_module_of_the_script() -> None:
    assert isinstance(torch.ops.__dict__["_dir"], list)
    assert "_dir" not in reachable(None, [])


def test_functions_are_looked_into() -> None:
    count = [0]

    def step(more: list[int] = [1]) -> None:  # noqa: B006
        count[0] += more[0]

    step.calls = 0  # type: ignore[attr-defined]
    step()
    assert reachable(sys._getframe(), ())["count in step()"].digest == found([1])[""].digest
    assert found(step)[".calls"].text == "0"
    assert ".__defaults__[0]" in found(step)
    assert changes(functools.partial(Meter.update, Meter()), lambda each: each(1.0)) == {".args[0].total"}
    assert found(len) == {}


def test_the_object_of_a_method_has_the_name_of_its_class() -> None:
    meter = Meter(2.0)
    method = meter.update
    del meter
    assert method.__name__ == "update"
    assert reachable(sys._getframe(), ())["Meter.total"].text == "2.0"


def test_a_class_of_the_script_is_looked_into_and_another_one_is_not() -> None:
    assert ".of_class" in found(Meter)
    assert found(dict) == {}


def test_containers_of_numbers_are_found_as_a_whole() -> None:
    assert changes([1, 2], lambda each: each.reverse()) == {""}
    assert changes(deque([1]), lambda each: each.append(2)) == {""}
    assert changes({"a": 1}, lambda each: each.update(a=2)) == {""}
    assert changes({1}, lambda each: each.add(2)) == {""}
    assert changes([torch.zeros(1)], lambda each: each[0].add_(1)) == {""}


def test_members_of_other_containers_have_names_of_their_own() -> None:
    assert changes([Meter(), Meter()], lambda each: each[1].update(1.0)) == {"[1].total"}
    assert changes({"a": Meter()}, lambda each: each["a"].update(1.0)) == {"['a'].total"}
    assert changes({(1, 2): Meter()}, lambda each: next(iter(each.values())).update(1.0)) == {"[...].total"}
    assert found({Meter()}) == {}
    inside: list[Any] = [Meter()]
    inside.append(inside)
    assert ".total" in "".join(found(inside))


def test_generators_are_found_by_their_state() -> None:
    for generator in (random.Random(0), np.random.default_rng(0)):
        assert changes(generator, lambda each: each.random()) == {""}
    assert changes(torch.Generator(), lambda each: torch.rand(1, generator=each)) == {""}


def test_iterators_are_found_by_their_place() -> None:
    def numbers() -> Iterator[int]:
        number = 0
        while True:
            number += 1
            yield number

    assert changes(numbers(), next) == {" (a generator)"}, "it had not begun"
    begun = numbers()
    next(begun)
    assert changes(begun, next) == {".number"}
    over = iter(numbers())
    over.close()  # type: ignore[attr-defined]
    assert found(over) == {}
    for each in (iter([1, 2]), iter(range(3)), enumerate([5, 6]), zip([1, 2], strict=False), itertools.count()):
        assert changes(each, next), each


def test_loaders_are_found_by_their_data_and_their_place() -> None:
    class Data(torch.utils.data.Dataset[int]):
        read = 0

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            self.read += 1
            return index

    loader = torch.utils.data.DataLoader(Data())
    assert changes(loader, lambda each: next(iter(each))) == {".dataset.read"}
    assert changes(iter(loader), next) == {" (an iterator)"}
    sampler = torch.utils.data.RandomSampler(range(4), generator=torch.Generator())
    loader = torch.utils.data.DataLoader(Data(), sampler=sampler, generator=torch.Generator())
    assert changes(loader, lambda each: next(iter(each))) >= {".generator"}


def test_modules_and_what_has_a_state_are_parts() -> None:
    model, other = Model(), Model()
    optimizer = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    names = found([model, other, optimizer], model)
    assert [name for name, each in names.items() if each.is_part] == ["[1]", "[2]"]
    assert changes([other], lambda each: torch.nn.init.zeros_(each[0].weight), model) == {"[0]"}
    assert found(nn.ModuleList([model]), model) == {}, "all of it is saved"
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    assert changes(scheduler, lambda each: each.step()) == {""}


def test_attributes_of_a_module_are_found_also_of_one_that_is_saved() -> None:
    model = nn.Sequential(Model())
    assert reachable(sys._getframe(), [model])["Sequential.0.temperature"].text == "1.0"


def test_of_a_large_tensor_the_first_elements_count() -> None:
    large = torch.zeros(1 << 20)
    assert changes(large, lambda each: each[0].fill_(1)) == {""}
    assert changes(large, lambda each: each[-1].fill_(1)) == set()
    assert changes(np.zeros(1 << 17), lambda each: each.__setitem__(0, 1)) == {""}


def test_what_cannot_be_read_and_what_lies_deep_is_passed_over() -> None:
    class Broken:
        def __getattr__(self, name: str) -> None:
            raise RuntimeError(name)

    assert found(Broken()) == {}
    deep: list[Any] = [Meter()]
    for _ in range(20):
        deep = [deep, Meter()]
    assert len(found(deep)) < 40


# -- what differs ------------------------------------------------------------------------------------------------------


def probed(run: int, is_first: bool = False, saved: str = "s", **values: str) -> Probed:
    return Probed(
        run, is_first, {name: Found(each, each, name == "part") for name, each in values.items()}, {"m": saved}
    )


def test_what_starts_over_comes_before_what_is_another_one_and_after_what_is_saved() -> None:
    one = [probed(run, run == 1, total=str(run), part=f"{run}", other="x", time=f"{run} o'clock") for run in (1, 2, 3)]
    other = [probed(run, run == 1, total=str(run), part=f"{run}", other="x", time="later") for run in (1, 2, 3)]
    resumed = probed(3, True, saved="t", total="7", part="1", other="x", time="noon", new="1")
    assert [each.name for each in suspects(one, other, [one[0], resumed], 3)] == ["m", "part", "total"]
    changed, over, another = map(str, suspects(one, other, [one[0], resumed], 3))
    assert changed == "m is another one before run 3: code between two runs changes it"
    assert over == "part starts over: 1 after the resume, 3 without an interruption"
    assert another == "total is another one: 7 after the resume, 3 without an interruption"
    assert str(Suspect("list", 1)) == "list is another one"
    assert [each.name for each in suspects(one, other, [one[0], resumed], None)] == ["m", "part", "total"]


def test_only_the_process_that_made_the_run_counts() -> None:
    one = [probed(run, run == 1, total=str(run)) for run in (1, 2, 3)]
    stopped = [one[0], probed(2, True, total="2"), probed(3, True, total="0")]
    assert suspects(one, one, stopped, 2) == []
    assert [each.run for each in suspects(one, one, stopped, 3)] == [3]
    assert [each.run for each in suspects(one, one, stopped, None)] == [3], "whichever differs"
    assert suspects(one, one, [one[0], probed(9, True, total="0")], 9) == [], "a run that the others have not made"
    assert suspects(one, one, [one[0]], None) == []


def test_an_object_that_is_another_one_at_the_end_is_forgotten() -> None:
    one = [probed(run, run == 1, part=str(run), number=str(run)) for run in (1, 2, 3)]
    stopped = [one[0], probed(3, True, part="1", number="1")]
    assert [each.name for each in forgotten(one, one, stopped)] == ["part"]
    assert forgotten(one, one, stopped[:1]) == []
    assert forgotten([], [], []) == []
