"""Items that depend on random numbers drawn for the items before them are recognized in a resumed process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, Subset

from torchhooks import CheckpointSaverHook, MonitoredLoop, StopAtStepHook
from torchhooks.common.random_states import random_states
from torchhooks.position.place import Place
from torchhooks.position.probe import Replay, probed
from torchhooks.position.starting import draws_order_first

ITEMS = 40


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + 0.1 * torch.rand(1)


class Stream(IterableDataset[torch.Tensor]):
    """Items with noise, in a fixed order."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(ITEMS):
            yield index + torch.rand(1)


class ShuffleBuffer(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer = [torch.tensor(float(index)) for index in range(ITEMS)]
        while buffer:
            yield buffer.pop(int(torch.randint(len(buffer), ())))


class Ahead:
    """A wrapper that fetches one item ahead."""

    def __init__(self, loader: Iterable[torch.Tensor]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[torch.Tensor]:
        iterator = iter(self.loader)
        item = next(iterator)
        for ahead in iterator:
            yield item
            item = ahead
        yield item


class Endless:
    """A wrapper that starts its loader again when it ends."""

    def __init__(self, loader: Iterable[torch.Tensor]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader


class LazySampler(Sampler[int]):
    """A sampler that draws each index when it is asked for, without those that were drawn before."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(ITEMS))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


class Wrapper(Ahead):
    """A wrapper that changes nothing, such as a progress bar."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.loader


DEPENDENT: dict[str, Any] = {
    "shuffle buffer": lambda: DataLoader(ShuffleBuffer(), batch_size=1),
    "an item ahead": lambda: Ahead(DataLoader(Noisy(), batch_size=1, shuffle=True)),
    "endless": lambda: Endless(DataLoader(Subset(Noisy(), range(9)), batch_size=1, shuffle=True)),
    "lazy sampler": lambda: DataLoader(Noisy(), batch_size=1, sampler=LazySampler()),
}
INDEPENDENT: dict[str, Any] = {
    "loader": lambda: DataLoader(Noisy(), batch_size=1, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=1),
    "wrapper": lambda: Wrapper(DataLoader(Noisy(), batch_size=1, shuffle=True)),
    "no noise": lambda: Wrapper(DataLoader(range(ITEMS), batch_size=1, shuffle=True)),  # type: ignore[arg-type]
}


def seen(data: Any, seed: int, directory: Path | None = None, last_step: int = 30) -> list[float]:
    """Return the items with which steps were made. The step draws random numbers too."""
    torch.manual_seed(seed)
    items: list[float] = []

    def step(item: torch.Tensor) -> None:
        items.append(item.item())
        torch.rand(1)

    hooks: list[Any] = [StopAtStepHook(last_step=last_step)]
    hooks += [] if directory is None else [CheckpointSaverHook(directory, save_steps=99)]
    with MonitoredLoop(step, hooks=hooks, checkpoint_dir=directory) as loop:
        for item in loop.until_stop(data):
            loop.run(item)
    return items


def resumed(make: Any, stop: int, directory: Path) -> list[float]:
    return seen(make(), 1, directory, stop) + seen(make(), 2, directory)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


INEXACT = {"shuffle buffer": (15, 24), "an item ahead": (10, 12, 24), "endless": (11, 15, 24), "lazy sampler": (15, 24)}


@pytest.mark.parametrize(("kind", "stop"), [(kind, stop) for kind, stops in INEXACT.items() for stop in stops])
def test_a_warning_says_that_items_depend_on_numbers_drawn_between_the_steps(
    kind: str, stop: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert resumed(DEPENDENT[kind], stop, tmp_path) != seen(DEPENDENT[kind](), 1)
    (warning,) = warnings_in(caplog)
    assert "is not the one it was before. It depends on random numbers that were drawn for the items before" in warning
    assert "Draw them from a generator of their own in an attribute" in warning


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("kind", DEPENDENT)
def test_the_first_items_are_the_same_again(
    kind: str, stop: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert resumed(DEPENDENT[kind], stop, tmp_path) == seen(DEPENDENT[kind](), 1)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("stop", [3, 10, 15, 24])
@pytest.mark.parametrize("kind", INDEPENDENT)
def test_noise_that_no_later_item_depends_on_causes_no_warning(
    kind: str, stop: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert resumed(INDEPENDENT[kind], stop, tmp_path) == seen(INDEPENDENT[kind](), 1)
    assert warnings_in(caplog) == []


def taken(iterator: Iterator[Any], place: Place, count: int) -> list[Any]:
    """Take items as until_stop does."""
    items = []
    for _ in range(count):
        items.append(next(iterator))
        place.taken += 1
    return items


def test_random_states_are_recorded_before_fewer_and_fewer_items() -> None:
    place, recorded = Place(None, None, 0), []
    iterator = probed((torch.rand(1) for _ in range(99)), place)
    for _ in range(40):
        taken(iterator, place, 1)
        recorded += [probe["item"] for probe in place.probes[-1:] if probe["item"] == place.taken]
    assert recorded == [2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17, 20, 23, 26, 30, 34, 39]
    assert [probe["item"] for probe in place.probes] == recorded[-8:]


def test_nothing_is_recorded_of_items_that_draw_no_numbers() -> None:
    place = Place(None, None, 0)
    assert taken(probed(iter(range(9)), place), place, 9) == list(range(9))
    assert place.probes == []


def test_a_process_that_resumed_continues_to_record() -> None:
    place = Place(None, None, 0)
    place.taken = 20
    taken(probed((torch.rand(1) for _ in range(9)), place), place, 1)
    assert [probe["item"] for probe in place.probes] == [21]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4_001, 4_002])
def test_the_items_end_with_the_data(count: int) -> None:
    place = Place(None, None, 0)
    iterator = probed(iter(range(count)), place)
    assert taken(iterator, place, count) == list(range(count))
    assert next(iterator, None) is None


@pytest.mark.parametrize("count", [1, 5])
def test_an_error_of_the_data_is_raised(count: int) -> None:
    def failing() -> Iterator[int]:
        yield from range(count)
        raise OSError("data")

    place = Place(None, None, 0)
    iterator = probed(failing(), place)
    assert taken(iterator, place, count) == list(range(count))
    with pytest.raises(OSError, match="data"):
        next(iterator)


def looks(monkeypatch: pytest.MonkeyPatch, taken: Callable[[], int]) -> list[int]:
    """Return a list to which each reading of the random states appends how many items were taken."""
    looked: list[int] = []

    def recorded() -> Any:
        looked.append(taken())
        return random_states()

    monkeypatch.setattr("torchhooks.position.probe.random_states", recorded)
    return looked


def test_items_that_draw_no_numbers_are_rarely_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(None, None, 0)
    looked = looks(monkeypatch, lambda: place.taken)
    taken(probed(iter(range(9_000)), place), place, 9_000)
    assert looked == [1, 1, 4_001, 4_001, 8_001, 8_001]  # before the item and after it


class Plain:
    """An iterable of its own class, which draws nothing."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5_000))


def test_the_first_item_shows_that_the_data_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with MonitoredLoop(lambda item: None) as loop:
        looked = looks(monkeypatch, lambda: loop.global_step)
        for item in loop.until_stop(Plain()):
            loop.run(item)
    assert looked == [4_001, 4_001]


def test_a_replay_names_an_item_that_differs() -> None:
    place = Place(None, None, 0)
    taken(probed((torch.rand(1) for _ in range(9)), place), place, 3)
    same = Replay((torch.rand(1) for _ in range(9)), place.probes, 3)
    other = Replay((torch.rand(1) + 1 for _ in range(9)), place.probes, 3)
    for replay in (same, other):
        assert replay.differs is None
        list(zip(range(3), replay, strict=False))
    assert (same.differs, other.differs) == (None, 3)


def test_a_loader_and_sampler_of_torch_are_known_to_draw_their_order_first() -> None:
    class Derived(DataLoader[Any]): ...

    assert draws_order_first(DataLoader(Noisy(), sampler=RandomSampler(Noisy())))
    assert draws_order_first(DataLoader(Noisy(), batch_size=None))
    assert not draws_order_first(DataLoader(Noisy(), sampler=LazySampler()))
    assert not draws_order_first(DataLoader(Stream()))
    assert not draws_order_first(Derived(Noisy()))
    assert not draws_order_first([1])
