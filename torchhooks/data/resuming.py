"""What an ``until_stop`` of a resumed process does with its data: a plan, and taking the items that are done.

:func:`plan_resume` decides, from the loop's cursor in the checkpoint and its new one, before anything is changed.
:meth:`torchhooks.data.position.DataPosition.resume` logs :func:`lines_of` the plan and carries it out, with
:func:`started` and :func:`remaining`.

A checkpoint has up to five kinds of random states, so that whatever is drawn again is drawn as the first time:

===============================  ===================================  =================================================
states                           of the moment                        set again
===============================  ===================================  =================================================
``"random"`` of the checkpoint   when it was saved                    last, where the loop of the checkpoint continues
``SavedCursor.before``           before the loop's ``iter()``         before the items that are done are passed over
``SavedCursor.random_at_item``   when the last item was yielded       when that item is yielded again
``SavedCursor.random_between``   when the loop before this one, in    where an earlier loop of that item, which is over,
                                 the same outer item, ended           yields nothing
``"loaders"``, generators        when the checkpoint was saved        before the loader is iterated, and after what is
                                                                      passed over
===============================  ===================================  =================================================
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple, TypeVar

from torchhooks.common.item_digests import differ, item_digest
from torchhooks.common.log import logger
from torchhooks.common.random_states import random_states, same_random_states, set_random_states
from torchhooks.data.cursor import (
    ENDED,
    IN_ITEM,
    IN_MEMORY,
    Cursor,
    Saved,
    SavedCursor,
    is_plain_iterator,
    length_of,
    name_of,
)
from torchhooks.data.loaders import (
    create_workers,
    generator_states,
    has_workers,
    matched_generators,
    set_generator_state,
)

T = TypeVar("T")


class Way(Enum):
    """How to get the items that are left."""

    FRESH = auto()  # iterate as if there were no checkpoint, with the restored generators
    NOTHING = auto()  # no item is left
    REST = auto()  # iterate the rest of a range
    AS_IT_IS = auto()  # an iterator continues where it is
    OWN_STATE = auto()  # the loader loads its own state
    SKIP = auto()  # take the items that are done, and drop them


class Plan(NamedTuple):
    """How an ``until_stop`` begins."""

    way: Way
    saved: SavedCursor | None = None
    """The loop's cursor in the checkpoint, if that is continued."""
    taken: int | None = None
    """How many items are done when the iteration begins; ``None`` if the checkpoint does not contain the loop."""
    rest: range | None = None
    """What is left of a range."""
    random: Saved | None = None
    """The random states with which the body continues; ``None`` for the current ones."""
    gives_up_item: bool = False
    """Whether the item in progress cannot be yielded again, so that the loops inside of it are not resumed."""
    innermost: bool = False
    """Whether the checkpoint contains no loop inside of this one."""
    otherwise: Plan | None = None
    """What to do if the loader does not accept its own state."""

    @property
    def repeats_item(self) -> bool:
        """Whether the item in progress is yielded again."""
        return self.saved is not None and self.saved.state is IN_ITEM and not self.gives_up_item


def plan_resume(
    cursor: Cursor,
    iterable: Iterable[object],
    saved: SavedCursor | None,
    random: Saved | None,
    *,
    resume: bool = True,
    innermost: bool = True,
    has_own_state: bool = False,
) -> Plan:
    """Return how the loop of ``cursor`` begins to iterate over ``iterable``. Changes and logs nothing.

    Args:
        saved: the cursor in the checkpoint of a loop in this item of the outer loop.
        random: the random states of the checkpoint, if it has this process's.
        resume: False to begin at the start, whatever the checkpoint contains.
        innermost: whether the checkpoint contains no loop inside of the one of ``saved``.
        has_own_state: whether the checkpoint contains the state of ``iterable`` itself.
    """
    if not resume:
        # What the checkpoint contains of loops inside of this one still counts in its first item.
        return Plan(way=Way.FRESH, taken=0 if saved is not None and saved.order == cursor.order else None)
    if saved is None or saved.order < cursor.order:
        return Plan(way=Way.FRESH)
    if saved.order > cursor.order:  # this loop was over, and a later one had begun
        # For what the body draws between the loop before that one and that one.
        return Plan(way=Way.NOTHING, random=saved.random_between or random)
    if not saved.has_begun:
        return Plan(way=Way.FRESH, random=random, innermost=innermost)
    in_item = saved.state is IN_ITEM
    plan = Plan(
        way=Way.SKIP,
        saved=saved,
        taken=saved.done,
        # The body of an item that is yielded again starts with the random states of the first time.
        random=(in_item and saved.random_at_item) or random,
        innermost=innermost,
    )
    if saved.state is ENDED and not (cursor.depth == 1 and _may_have_grown(iterable, cursor.limit, saved.taken)):
        return plan._replace(way=Way.NOTHING)
    if is_plain_iterator(iterable):
        return plan._replace(way=Way.AS_IT_IS, taken=0)  # how many it gave to earlier processes says nothing
    without_item = plan._replace(taken=saved.taken, random=random, gives_up_item=True) if in_item else plan
    if isinstance(iterable, range) and saved.last is not None:
        if saved.last not in iterable:  # another range than the checkpoint's
            plan = without_item
        return plan._replace(way=Way.REST, rest=rest_of_range(iterable, saved.last, not in_item))
    if has_own_state:  # after loading it, a loader continues after the item in progress
        return without_item._replace(way=Way.OWN_STATE, otherwise=plan)
    return plan


class LogLine(NamedTuple):
    """A line of the log, as :func:`logging.log` takes it."""

    level: int
    message: str
    arguments: tuple[object, ...]


def lines_of(plan: Plan, cursor: Cursor, iterable: Iterable[object]) -> Iterator[LogLine]:
    """Yield what to log of ``plan`` before it is carried out."""
    name, saved = name_of(iterable), plan.saved
    # In the first item of an outer loop that continues, earlier items may have taken from the same iterator.
    is_later = plan.way is Way.FRESH and _is_first_after_resume(cursor.outer) and is_plain_iterator(iterable)
    if plan.way is Way.AS_IT_IS or is_later:
        hint = _NOT_AN_ITERATOR + (_NOT_A_SLICE if isinstance(iterable, itertools.islice) else "")
        level = logging.WARNING if is_later or (saved is not None and saved.taken) else logging.INFO
        yield LogLine(level, "%s is an iterator, so it continues where it is. %s", (name, hint))
        return
    if saved is None:
        return
    if saved.runs and plan.innermost:
        yield LogLine(logging.WARNING, _REPEATED, (name, saved.runs))
    # After an inner loop, the body of the outer one continues, with its variables.
    continues = plan.way is not Way.NOTHING and not (cursor.depth == 1 and is_over(plan, cursor, iterable))
    if saved.left:
        yield LogLine(logging.WARNING, _AFTER_A_BREAK, (name, saved.done))
    elif saved.done and plan.innermost and continues:
        yield LogLine(logging.INFO, _CONTINUES, (name, saved.done))


_REPEATED = (
    "the last item of %s had %d runs when the checkpoint was saved. It is yielded again, so these runs are made twice, "
    "which is not exact. To continue within an item, iterate over its parts with another until_stop, and make one run "
    "for each."
)
_NOT_AN_ITERATOR = (
    "To have it resumed, pass until_stop an iterable, such as the loader itself or a list, and write epochs as "
    "until_stop(range(...)) around it."
)
_NOT_A_SLICE = " For its first n items, use until_stop(loader, limit=n)."
_CONTINUES = "%s continues at item %d; sums over its items must be in Variables"
_AFTER_A_BREAK = (
    "%s continues at item %d. The script left it before in the run of a stop, or without a with block around the loop, "
    "so the training run does not count as finished. If it was finished, do not start it again."
)


def _is_first_after_resume(outer: Cursor | None) -> bool:
    """Return whether ``outer`` is in the first item after the items that an earlier process has done."""
    items = None if outer is None else outer.resumed.items
    return outer is not None and bool(items) and outer.taken == (items or 0) + 1


def rest_of_range(values: range, last: int, done: bool) -> range:
    """Return the part of ``values`` that comes after ``last``, and ``last`` itself if it is not ``done``."""
    passed, between = divmod(last - values.start, values.step)
    return values[max(passed + (done or between != 0), 0) :]


def _may_have_grown(iterable: Iterable[object], limit: int | None, taken: int) -> bool:
    """Return whether ``iterable``, which had ended after ``taken`` items, may have more now."""
    length = length_of(iterable)
    return isinstance(iterable, IN_MEMORY) or (
        length is not None and taken < (length if limit is None else min(length, limit))
    )


def is_over(plan: Plan, cursor: Cursor, iterable: Iterable[object]) -> bool:
    """Return whether ``iterable`` is known to yield nothing more."""
    if plan.way is Way.NOTHING:
        return True
    if plan.rest is not None:
        return not plan.rest
    if plan.taken is None:
        return False
    return plan.taken == length_of(iterable) or (cursor.limit is not None and plan.taken >= cursor.limit)


# -- carrying the plan out ---------------------------------------------------------------------------------------------


def started(cursor: Cursor, iterable: Iterable[T]) -> Iterator[T]:
    """Return ``iter(iterable)``, after recording the random states if the iteration may draw random numbers."""
    # Also if it has a state, because asking for that may fail later.
    if not (isinstance(iterable, IN_MEMORY) or is_plain_iterator(iterable)):
        cursor.before = {
            "random": random_states(),
            "generators": generator_states(iterable),
            "persistent": has_workers(iterable),
            "length": length_of(iterable),
        }
    return iter(iterable)


def remaining(plan: Plan, cursor: Cursor, iterable: Iterable[T], notice_stop: Callable[..., bool]) -> Iterator[T]:
    """Return the items that ``plan`` leaves to yield.

    Items that are done are skipped until ``notice_stop()`` returns true, or ``notice_stop(error)`` after an error.
    """
    if plan.way is Way.NOTHING:
        return iter(())
    if plan.rest is not None:
        # Before the lengths are compared: cursor.total() adds the items that are done to the length of a range.
        cursor.iterable = plan.rest
        _warn_of_length(plan, cursor, iterable)
        rest: Iterable[Any] = plan.rest  # the items of a range are numbers, whatever T is
        return iter(rest)
    if plan.way is Way.SKIP:
        return skipped(plan, cursor, iterable, notice_stop)
    if plan.way is Way.OWN_STATE:
        _warn_of_length(plan, cursor, iterable)
    return iter(iterable)


def skipped(plan: Plan, cursor: Cursor, iterable: Iterable[T], notice_stop: Callable[..., bool]) -> Iterator[T]:
    """Return what is left of ``iterable`` after the items that are done, which are taken and dropped."""
    begun_at = time.monotonic()
    if cursor.before is not None:
        _set_random_before(cursor.before, iterable)
    iterator = iter(iterable)
    count, item = 0, _NOTHING
    fetching: Saved = {}  # the random states before the item to compare
    while count < cursor.taken:
        # To take many items may last for minutes, and the grace period of a SIGTERM may be shorter.
        if notice_stop():
            return iterator
        # Only before the last item, because reading the random states takes time, and only that item is compared.
        if count == cursor.taken - 1:
            fetching = random_states()
        try:
            item = next(iterator, _NOTHING)
        except Exception as error:
            if not notice_stop(error):
                raise
            return iterator
        if item is _NOTHING:
            break
        count += 1
    in_progress: list[T] = []
    if plan.repeats_item:  # taken now, before the caller sets the random states of the checkpoint
        fetching = random_states()
        in_progress = list(itertools.islice(iterator, 1))
        item = in_progress[0] if in_progress else _NOTHING
    # If the data set draws random numbers for each item, the skipped ones have other noise: nothing was run.
    noisy = bool(fetching) and not same_random_states(fetching, random_states())
    if item is not _NOTHING and plan.saved is not None and differ(plan.saved.digest, item_digest(item), noisy):
        number, lengths = count + plan.repeats_item, _lengths_if_changed(plan, cursor, iterable)
        of = f"%s, which has {lengths[0]} items now and had {lengths[1]} before," if lengths else "%s"
        logger.warning(f"item %d of {of} is not the one it was before. %s", number, name_of(iterable), _OTHER_ITEMS)
    elif count == cursor.taken:
        _warn_of_length(plan, cursor, iterable)
    if count < cursor.taken:
        expected = f"the checkpoint was saved after {cursor.taken} items of {name_of(iterable)}"
        logger.warning("%s, which now has only %d: it is treated as ended", expected, count)
    elif count and not isinstance(iterable, list | tuple):
        secs = time.monotonic() - begun_at
        logger.info("skipped %d items of %s in %.3f sec. %s", count, name_of(iterable), secs, _NO_NEED)
    return itertools.chain(in_progress, iterator)


def _warn_of_length(plan: Plan, cursor: Cursor, iterable: Iterable[object]) -> None:
    """Log a warning if a loop that continues has another number of items than in the checkpoint."""
    if lengths := _lengths_if_changed(plan, cursor, iterable):
        limited = " with its limit" if cursor.limit in lengths else ""
        logger.warning("%s%s has %d items now, and had %d before. %s", name_of(iterable), limited, *lengths, _LENGTH)


def _lengths_if_changed(plan: Plan, cursor: Cursor, iterable: Iterable[object]) -> tuple[int, int] | None:
    """Return how many items ``iterable`` has, and how many it had in the checkpoint; ``None`` if these are the same.

    An outermost loop may have got more, as when training goes on for more epochs.
    """
    length, before = length_of(iterable), None if cursor.before is None else cursor.before["length"]
    if length is not None and before is not None and length != before:
        return length, before
    total, total_before = cursor.total(length), None if plan.saved is None else plan.saved.total
    if plan.saved is None or plan.saved.state is ENDED or total is None or total_before is None:
        return None  # what had ended has another line, or trains on
    if not (total < total_before if cursor.depth == 1 else total != total_before):
        return None
    own = min(each for each in (length, cursor.limit) if each is not None)  # what the script has written
    return (total if own == total_before else own), total_before


def _set_random_before(before: Saved, iterable: Iterable[object]) -> None:
    """Set the random states of the first time, so that the items of ``iterable`` come in the same order."""
    if before["persistent"]:
        create_workers(iterable)
    set_random_states(before["random"])
    for generator, state in matched_generators(iterable, before["generators"]):
        set_generator_state(generator, state)


_NOTHING: Any = object()
_LENGTH = (
    "So the loop that continues ends earlier or later than it would have. A length may depend on the number of the "
    "epoch, as with sampler.set_epoch(epoch) in the body of the outer loop, and not on what code before the loop "
    "changes: that code runs again when the loop is resumed."
)
_OTHER_ITEMS = (
    "So some items will be missed and others repeated. The usual causes are another batch size or another length of "
    "the data set, a list that is shuffled in place (shuffle a copy), and an iterable that counts its epochs (set its "
    "epoch in the body of the outer loop). A body that changes its items in place looks the same."
)
_NO_NEED = "A loader with state_dict(), such as torchdata's StatefulDataLoader, resumes without skipping."
