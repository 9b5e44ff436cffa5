"""What is known of data before they are iterated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from torchhooks.position.starting import draws_order_first


class LazySampler(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_a_loader_and_sampler_of_torch_are_known_to_draw_their_order_first() -> None:
    class Derived(DataLoader[Any]): ...

    data: Any = [0, 1, 2]
    assert draws_order_first(DataLoader(data, sampler=RandomSampler(data)))
    assert draws_order_first(DataLoader(data, batch_size=None))
    assert not draws_order_first(DataLoader(data, sampler=LazySampler()))
    assert not draws_order_first(DataLoader(Stream()))
    assert not draws_order_first(Derived(data))
    assert not draws_order_first([1])
