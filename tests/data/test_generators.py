"""Random generators in the data: which are found, under which path, and that their states come back."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from torchhooks.data.loaders import find_generators, generator_states, set_generator_state


class Holder:
    """Holds what it is given as attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (torch.Generator, lambda generator: torch.rand(3, generator=generator).tolist()),
    "random": (random.Random, lambda generator: [generator.random(), generator.gauss(0, 1)]),
    "numpy, PCG64": (np.random.default_rng, lambda generator: generator.random(3).tolist()),
    "numpy, MT19937": (lambda: np.random.Generator(np.random.MT19937()), lambda rng: rng.random(3).tolist()),
    "numpy, Philox": (lambda: np.random.Generator(np.random.Philox()), lambda rng: rng.integers(9, size=3).tolist()),
    "numpy, RandomState": (np.random.RandomState, lambda generator: generator.rand(3).tolist()),
}


@pytest.mark.parametrize(("make", "draw"), GENERATORS.values(), ids=GENERATORS)
def test_a_state_that_was_saved_comes_back(make: Callable[[], Any], draw: Callable[[Any], Any]) -> None:
    one, other = make(), make()
    draw(one)
    file = io.BytesIO()
    torch.save(generator_states(Holder(rng=one)), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    set_generator_state(other, saved[".rng"])
    assert draw(other) == draw(one)


@pytest.mark.parametrize(
    ("holder", "path"),
    [
        (lambda g: g, ""),
        (lambda g: Holder(a=Holder(b=g)), ".a.b"),
        (lambda g: [1, (g,)], "[1][0]"),
        (lambda g: Holder(loaders=(Holder(), Holder(generator=g))), ".loaders[1].generator"),
    ],
    ids=["itself", "attributes", "sequences", "an object in a tuple"],
)
def test_finds_a_generator(holder: Callable[[Any], Any], path: str) -> None:
    generator = random.Random(1)
    assert find_generators(holder(generator)) == {path: generator}


def test_finds_each_generator_once_under_its_shortest_path() -> None:
    generator = torch.Generator()
    dataset = TensorDataset(torch.zeros(4))
    loader = DataLoader(dataset, sampler=RandomSampler(dataset, generator=generator), generator=generator)
    assert list(find_generators(Holder(wrapped=loader))) == [".wrapped.generator"]


def test_a_cycle_ends() -> None:
    holder = Holder(rng=random.Random(1))
    holder.again = holder  # type: ignore[attr-defined]
    assert list(find_generators(holder)) == [".rng"]


@pytest.mark.parametrize(
    "holder",
    [
        Holder(items=[random.Random(1)] * 101),
        Holder(items={"key": random.Random(1)}),
        Holder(model=torch.nn.Linear(1, 1), text="abc", module=random, kind=random.Random, nothing=None),
        Holder(_iterator=Holder(rng=random.Random(1))),
    ],
    ids=["a long list", "a dict", "opaque objects", "the workers of a loader"],
)
def test_does_not_search_the_data_themselves(holder: Holder) -> None:
    assert find_generators(holder) == {}


def test_does_not_search_deeper_than_a_few_levels() -> None:
    holder: Any = random.Random(1)
    for _ in range(20):
        holder = [holder]
    assert find_generators(holder) == {}


def test_the_search_is_bounded() -> None:
    def wide(depth: int) -> Holder:
        return Holder(**{f"a{number}": wide(depth - 1) for number in range(20)}) if depth else Holder()

    holder = wide(3)
    holder.zzz = Holder(a=Holder(b=Holder(c=Holder(d=random.Random(1)))))  # type: ignore[attr-defined]
    assert find_generators(holder) == {}
