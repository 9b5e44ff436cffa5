"""What an ``until_stop`` of a resumed process does, as a table: the cursor in the checkpoint, the new one, the plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from torchhooks.data.cursor import BETWEEN_ITEMS, ENDED, IN_ITEM, Cursor, CursorState, SavedCursor
from torchhooks.data.resuming import Plan, Way, lines_of, plan_resume

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

DONE = SavedCursor(order=0, taken=3, state=BETWEEN_ITEMS, before=BEFORE)
REPEATS = DONE._replace(state=IN_ITEM, runs=2, random_at_item=AT_ITEM)
RANGE_DONE = SavedCursor(order=0, taken=3, state=BETWEEN_ITEMS, last=2)
RANGE_IN_ITEM = RANGE_DONE._replace(state=IN_ITEM, random_at_item=AT_ITEM)
NOT_BEGUN = SavedCursor(order=0, taken=0, state=BETWEEN_ITEMS)

REPEATED = "the last item of until_stop's Loader had 2 runs"


@dataclass
class Case:
    """A row of the table. ``lines`` are how the lines begin."""

    saved: SavedCursor | None
    iterable: Iterable[Any]
    plan: Plan
    lines: tuple[str, ...] = ()
    order: int = 0
    depth: int = 1
    resume: bool = True
    innermost: bool = True
    has_own_state: bool = False


def fresh(**attributes: Any) -> Plan:
    return Plan(way=Way.FRESH, **attributes)


def continued(way: Way, entry: SavedCursor, taken: int, **attributes: Any) -> Plan:
    return Plan(**{"way": way, "saved": entry, "taken": taken, "random": AT_SAVE, "innermost": True, **attributes})


def after(item: int, name: str) -> str:
    return f"until_stop's {name} continues at item {item};"


SKIP_DONE = continued(Way.SKIP, DONE, 3)
SKIP_IN_ITEM = continued(Way.SKIP, REPEATS, 2, random=AT_ITEM)

CASES = {
    # Loops of the checkpoint that are not this one.
    "no checkpoint": Case(None, LOADER, fresh()),
    "after the place of the checkpoint": Case(DONE, LOADER, fresh(), order=1),
    "before the place of the checkpoint": Case(
        DONE._replace(order=1, random_between=BETWEEN), LOADER, Plan(way=Way.NOTHING, random=BETWEEN)
    ),
    "before a place at which no random states were recorded": Case(
        DONE._replace(order=1), LOADER, Plan(way=Way.NOTHING, random=AT_SAVE)
    ),
    # resume=False.
    "anew, without a checkpoint": Case(None, LOADER, fresh(), resume=False),
    "anew, at the place": Case(REPEATS, LOADER, fresh(taken=0), resume=False),
    "anew, before the place": Case(DONE._replace(order=1), LOADER, fresh(), resume=False),
    "anew, after the place": Case(DONE, LOADER, fresh(), order=1, resume=False),
    # A stop before the first item.
    "not begun": Case(
        NOT_BEGUN, LOADER, fresh(random=AT_SAVE, innermost=True), depth=2
    ),
    "an iterator before its first item": Case(
        NOT_BEGUN, ITERATOR, fresh(random=AT_SAVE, innermost=True)
    ),
    "begun, without an item": Case(
        DONE._replace(taken=0), LOADER, continued(Way.SKIP, DONE._replace(taken=0), 0),
    ),
    # Nothing is left.
    "ended": Case(
        DONE._replace(state=ENDED), LOADER,
        continued(Way.NOTHING, DONE._replace(state=ENDED), 3),
    ),
    "ended inside another": Case(
        DONE._replace(state=ENDED), [1, 2, 3],
        continued(Way.NOTHING, DONE._replace(state=ENDED), 3), depth=2,
    ),
    # Ranges.
    "a range": Case(
        RANGE_DONE, range(9), continued(Way.REST, RANGE_DONE, 3, rest=range(3, 9)), (after(3, "range"),)
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
        RANGE_DONE._replace(state=ENDED), range(5),
        continued(Way.REST, RANGE_DONE._replace(state=ENDED), 3, rest=range(3, 5)), (after(3, "range"),),
    ),
    # Iterators.
    "an iterator": Case(
        DONE, ITERATOR, continued(Way.AS_IT_IS, DONE, 0),
        ("until_stop's list_iterator is an iterator",),
    ),
    "an iterator in an item": Case(
        REPEATS, itertools.islice([1], 1), continued(Way.AS_IT_IS, REPEATS, 0, random=AT_ITEM),
        ("until_stop's islice is an iterator",),
    ),
    # Loaders with a state.
    "its own state": Case(
        DONE, LOADER, continued(Way.OWN_STATE, DONE, 3, otherwise=SKIP_DONE),
        (after(3, "Loader"),), has_own_state=True,
    ),
    "its own state, in an item": Case(
        REPEATS, LOADER,
        continued(
            Way.OWN_STATE, REPEATS, 3, gives_up_item=True, otherwise=SKIP_IN_ITEM
        ),
        (REPEATED, after(2, "Loader")), has_own_state=True,
    ),
    # Everything else skips.
    "a loader": Case(DONE, LOADER, SKIP_DONE, (after(3, "Loader"),)),
    "a loader of unknown length": Case(DONE, UNSIZED, SKIP_DONE, (after(3, "DataLoader"),)),
    "a stream": Case(DONE, DataLoader(Stream()), SKIP_DONE, (after(3, "DataLoader"),)),
    "a loader in an item": Case(REPEATS, LOADER, SKIP_IN_ITEM, (REPEATED, after(2, "Loader"))),
    "in an item without runs": Case(
        REPEATS._replace(runs=0), LOADER, SKIP_IN_ITEM._replace(saved=REPEATS._replace(runs=0)),
        (after(2, "Loader"),),
    ),
    "in an item whose random states were not recorded": Case(
        REPEATS._replace(random_at_item=None), LOADER,
        continued(Way.SKIP, REPEATS._replace(random_at_item=None), 2), (REPEATED, after(2, "Loader")),
    ),
    "in the first item": Case(
        REPEATS._replace(taken=1, runs=0), LOADER,
        continued(Way.SKIP, REPEATS._replace(taken=1, runs=0), 0, random=AT_ITEM),
    ),
    "in an item with an inner place": Case(
        REPEATS, LOADER, SKIP_IN_ITEM._replace(innermost=False), innermost=False
    ),
    "left with a break": Case(
        DONE._replace(left=True), [1, 2, 3],
        SKIP_DONE._replace(saved=DONE._replace(left=True)),
        ("until_stop's list continues at item 3. The script left it before",),
    ),
}  # fmt: skip


def cursor_of(case: Case) -> Cursor:
    outer = Cursor(None, None, 0)
    if case.depth > 1:
        outer = Cursor(None, outer, 0)
    cursor = Cursor(case.iterable, outer, 0)
    cursor.order = case.order
    return cursor


@pytest.mark.parametrize("name", CASES)
def test_what_a_resumed_process_does(name: str) -> None:
    case = CASES[name]
    cursor = cursor_of(case)
    attributes = {name: getattr(cursor, name) for name in Cursor.__slots__}
    plan = plan_resume(
        cursor,
        case.iterable,
        case.saved,
        AT_SAVE,
        resume=case.resume,
        innermost=case.innermost,
        has_own_state=case.has_own_state,
    )
    assert plan == case.plan
    texts = [line.message % line.arguments for line in lines_of(plan, cursor, case.iterable)]
    assert [text[: len(start)] for text, start in zip(texts, case.lines, strict=True)] == list(case.lines)
    assert {name: getattr(cursor, name) for name in Cursor.__slots__} == attributes  # nothing was changed


@pytest.mark.parametrize("state", CursorState)
def test_a_cursor_is_plain_data_and_the_same_when_it_is_read_back(state: CursorState, tmp_path: Any) -> None:
    cursor = REPEATS._replace(state=state, digest={"": ["int", 0, 1]})
    torch.save(cursor.to_save(), tmp_path / "cursor")
    assert SavedCursor.from_saved(torch.load(tmp_path / "cursor", weights_only=True)) == cursor
