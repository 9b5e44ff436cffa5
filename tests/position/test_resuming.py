"""What an ``until_stop`` of a resumed process does, as a table: the entry of the checkpoint, the place, the plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from torchhooks.position.place import Entry, Place, State
from torchhooks.position.resuming import Plan, Way, lines_of, plan_resume

AT_SAVE = {"random": "at the save"}
AT_ITEM = {"random": "at the item"}
BETWEEN = {"random": "between two places"}
BEFORE = {"random": "before the iteration"}


class Loader:
    """A loader of the script's own, without a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Unsized:
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


LOADER = Loader()
SIZED: Iterable[Any] = DataLoader([1, 2, 3])  # type: ignore[arg-type]
UNSIZED: Iterable[Any] = DataLoader([1, 2, 3], sampler=Unsized())  # type: ignore[arg-type]
ITERATOR = iter([1, 2, 3])

DONE = Entry(number=0, taken=3, state=State.ITEM_DONE, before=BEFORE)
IN_ITEM = DONE._replace(state=State.IN_ITEM, runs=2, random_at_item=AT_ITEM)
RANGE_DONE = Entry(number=0, taken=3, state=State.ITEM_DONE, last=2)
RANGE_IN_ITEM = RANGE_DONE._replace(state=State.IN_ITEM, random_at_item=AT_ITEM)

REPEATED = "the last item of until_stop's Loader had 2 runs when the checkpoint was saved. It is yielded again"


@dataclass
class Case:
    """A row of the table. ``lines`` are how the lines begin."""

    entry: Entry | None
    iterable: Iterable[Any]
    plan: Plan
    lines: tuple[str, ...] = ()
    number: int = 0
    depth: int = 1
    limit: int | None = None
    runs_before: int = 0
    resume: bool = True
    innermost: bool = True
    has_own_state: bool = False


def fresh(**attributes: Any) -> Plan:
    return Plan(way=Way.FRESH, **attributes)


def continued(way: Way, entry: Entry, taken: int, **attributes: Any) -> Plan:
    return Plan(**{"way": way, "entry": entry, "taken": taken, "random": AT_SAVE, "innermost": True, **attributes})


def after(item: int, name: str, hint: str = "") -> str:
    if hint:
        return f"until_stop's {name} continues after item {item}{hint}"
    return f"until_stop's {name} continues at item {item}; sums over its items must be in Variables"


SKIP_DONE = continued(Way.SKIP, DONE, 3)
SKIP_IN_ITEM = continued(Way.SKIP, IN_ITEM, 2, random=AT_ITEM)

CASES = {
    # Places of the checkpoint that are not this one.
    "no checkpoint": Case(None, LOADER, fresh()),
    "after the place of the checkpoint": Case(DONE, LOADER, fresh(), number=1),
    "before the place of the checkpoint": Case(
        DONE._replace(number=1, random_between=BETWEEN), LOADER, Plan(way=Way.NOTHING, random=BETWEEN)
    ),
    "before a place at which no random states were recorded": Case(
        DONE._replace(number=1), LOADER, Plan(way=Way.NOTHING, random=AT_SAVE)
    ),
    # resume=False.
    "anew, without a checkpoint": Case(None, LOADER, fresh(), resume=False),
    "anew, at the place": Case(IN_ITEM, LOADER, fresh(taken=0), resume=False),
    "anew, before the place": Case(DONE._replace(number=1), LOADER, fresh(), resume=False),
    "anew, after the place": Case(DONE, LOADER, fresh(), number=1, resume=False),
    # A stop before the first item.
    "not begun": Case(
        Entry(number=0, taken=0, state=State.NOT_BEGUN), LOADER, fresh(random=AT_SAVE, innermost=True), depth=2
    ),
    "an iterator before its first item": Case(
        Entry(number=0, taken=0, state=State.STOPPED), ITERATOR, fresh(random=AT_SAVE, innermost=True)
    ),
    "begun, without an item": Case(
        DONE._replace(taken=0, state=State.STOPPED), LOADER,
        continued(Way.SKIP, DONE._replace(taken=0, state=State.STOPPED), 0),
    ),
    # Nothing is left.
    "ended": Case(
        DONE._replace(state=State.ENDED), LOADER,
        continued(Way.NOTHING, DONE._replace(state=State.ENDED), 3),
        ("until_stop's Loader had already ended. To iterate it again, use until_stop(..., resume=False).",),
    ),
    "ended inside another": Case(
        DONE._replace(state=State.ENDED), [1, 2, 3],
        continued(Way.NOTHING, DONE._replace(state=State.ENDED), 3), depth=2,
    ),
    # Ranges.
    "a range": Case(
        RANGE_DONE, range(9), continued(Way.REST, RANGE_DONE, 3, rest=range(3, 9)), (after(3, "range"),)
    ),
    "a range at its end": Case(
        RANGE_DONE, range(3), continued(Way.REST, RANGE_DONE, 3, rest=range(3, 3), is_at_end=True),
        (after(3, "range", ", the last one."),),
    ),
    "a range at its end, inside another": Case(
        RANGE_DONE, range(3), continued(Way.REST, RANGE_DONE, 3, rest=range(3, 3)), (after(3, "range"),), depth=2
    ),
    "a range in an item": Case(
        RANGE_IN_ITEM, range(9), continued(Way.REST, RANGE_IN_ITEM, 2, rest=range(2, 9), random=AT_ITEM),
        (after(2, "range"),),
    ),
    "a range in an item with an inner place": Case(
        RANGE_IN_ITEM, range(9),
        continued(Way.REST, RANGE_IN_ITEM, 2, rest=range(2, 9), random=AT_ITEM, innermost=False), innermost=False,
    ),
    "another range, without the item in progress": Case(
        RANGE_IN_ITEM, range(1, 9, 2),
        continued(Way.REST, RANGE_IN_ITEM, 3, rest=range(3, 9, 2), gives_up_item=True), (after(2, "range"),),
    ),
    "a range that has grown": Case(
        RANGE_DONE._replace(state=State.ENDED), range(5),
        continued(Way.REST, RANGE_DONE._replace(state=State.ENDED), 3, rest=range(3, 5)), (after(3, "range"),),
    ),
    # Iterators.
    "an iterator": Case(
        DONE, ITERATOR, continued(Way.AS_IT_IS, DONE, 0),
        ("until_stop's list_iterator is an iterator, so it continues where it is. To have it resumed",),
    ),
    "an iterator in an item": Case(
        IN_ITEM, itertools.islice([1], 1), continued(Way.AS_IT_IS, IN_ITEM, 0, random=AT_ITEM),
        ("until_stop's islice is an iterator, so it continues where it is. To have it resumed",),
    ),
    # Loaders with a state.
    "its own state": Case(
        DONE, LOADER, continued(Way.OWN_STATE, DONE, 3, otherwise=SKIP_DONE),
        (after(3, "Loader"),), has_own_state=True,
    ),
    "its own state, in an item": Case(
        IN_ITEM, LOADER,
        continued(
            Way.OWN_STATE, IN_ITEM, 3, gives_up_item=True, otherwise=SKIP_IN_ITEM
        ),
        (REPEATED, after(2, "Loader")), has_own_state=True,
    ),
    # Everything else skips.
    "a loader": Case(DONE, LOADER, SKIP_DONE, (after(3, "Loader"),)),
    "a loader at its end": Case(
        DONE, SIZED, SKIP_DONE._replace(is_at_end=True), (after(3, "DataLoader", ", the last one."),)
    ),
    "a loader of unknown length": Case(DONE, UNSIZED, SKIP_DONE, (after(3, "DataLoader"),)),
    "a stream": Case(DONE, DataLoader(Stream()), SKIP_DONE, (after(3, "DataLoader"),)),
    "a limit": Case(
        DONE, LOADER, SKIP_DONE._replace(is_at_end=True), (after(3, "Loader", ", the last one."),), limit=3
    ),
    "a list at its end": Case(
        DONE, [1, 2, 3], SKIP_DONE._replace(is_at_end=True), (after(3, "list", ", the last one."),)
    ),
    "a loader in an item": Case(IN_ITEM, LOADER, SKIP_IN_ITEM, (REPEATED, after(2, "Loader"))),
    "stopped in an item": Case(
        IN_ITEM._replace(state=State.STOPPED_IN_ITEM), LOADER,
        SKIP_IN_ITEM._replace(entry=IN_ITEM._replace(state=State.STOPPED_IN_ITEM)), (REPEATED, after(2, "Loader")),
    ),
    "in an item without runs": Case(
        IN_ITEM._replace(runs=0), LOADER, SKIP_IN_ITEM._replace(entry=IN_ITEM._replace(runs=0)),
        (after(2, "Loader"),),
    ),
    "in an item whose random states were not recorded": Case(
        IN_ITEM._replace(random_at_item=None), LOADER,
        continued(Way.SKIP, IN_ITEM._replace(random_at_item=None), 2), (REPEATED, after(2, "Loader")),
    ),
    "in the first item": Case(
        IN_ITEM._replace(taken=1, runs=0), LOADER,
        continued(Way.SKIP, IN_ITEM._replace(taken=1, runs=0), 0, random=AT_ITEM),
    ),
    "in an item with an inner place": Case(
        IN_ITEM, LOADER, SKIP_IN_ITEM._replace(innermost=False), innermost=False
    ),
    "left with a break": Case(
        DONE._replace(state=State.LEFT), [1, 2, 3],
        SKIP_DONE._replace(entry=DONE._replace(state=State.LEFT)),
        (after(3, "list", ". The process that saved the checkpoint left it with a break."),),
    ),
    "left with a break in an item": Case(
        IN_ITEM._replace(state=State.LEFT_IN_ITEM), LOADER,
        SKIP_IN_ITEM._replace(entry=IN_ITEM._replace(state=State.LEFT_IN_ITEM)),
        (REPEATED, after(2, "Loader", ". The process that saved the checkpoint left it with a break.")),
    ),
    # Runs on the way.
    "after runs": Case(
        DONE, LOADER, SKIP_DONE._replace(runs_before=2),
        ("2 runs were made before until_stop's Loader continued. The checkpoint", after(3, "Loader")), runs_before=2,
    ),
    "not begun, after runs": Case(
        Entry(number=0, taken=0, state=State.NOT_BEGUN), LOADER, fresh(random=AT_SAVE, innermost=True, runs_before=1),
        ("1 runs were made before until_stop's Loader continued. The checkpoint",), runs_before=1,
    ),
}  # fmt: skip


def place_of(case: Case) -> Place:
    outer = Place(None, None, 0)
    if case.depth > 1:
        outer = Place(None, outer, 0)
    place = Place(case.iterable, outer, case.runs_before)
    place.number, place.limit = case.number, case.limit
    return place


@pytest.mark.parametrize("name", CASES)
def test_what_a_resumed_process_does(name: str) -> None:
    case = CASES[name]
    place = place_of(case)
    attributes = dict(vars(place))
    plan = plan_resume(
        place,
        case.iterable,
        case.entry,
        AT_SAVE,
        resume=case.resume,
        innermost=case.innermost,
        has_own_state=case.has_own_state,
    )
    assert plan == case.plan
    texts = [line.message % line.arguments for line in lines_of(plan, place, case.iterable)]
    assert [text[: len(start)] for text, start in zip(texts, case.lines, strict=True)] == list(case.lines)
    assert vars(place) == attributes  # nothing was changed


@pytest.mark.parametrize("state", State)
def test_an_entry_is_plain_data_and_the_same_when_it_is_read_back(state: State, tmp_path: Any) -> None:
    entry = IN_ITEM._replace(state=state, digest={"": ["int", 0, 1]})
    torch.save(entry.to_save(), tmp_path / "entry")
    assert Entry.from_saved(torch.load(tmp_path / "entry", weights_only=True)) == entry
