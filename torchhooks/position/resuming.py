"""What an ``until_stop`` of a resumed process does with its data: a plan, made before anything is changed.

:func:`plan_resume` decides, from what the checkpoint contains of a place and from the new place.
:class:`torchhooks.position.position.Position` logs :func:`lines_of` the plan and carries it out.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from torchhooks.common.stateful import has_state
from torchhooks.position.place import Entry, Place, Saved, State

MAY_HAVE_GROWN = (range, list, tuple)
"""What a later process may pass with more items at its end, and what draws no random numbers."""


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
    entry: Entry | None = None
    """What the checkpoint contains of the place, if that is continued."""
    taken: int | None = None
    """How many items are done when the iteration begins; ``None`` if the checkpoint does not contain the place."""
    rest: range | None = None
    """What is left of a range."""
    random: Saved | None = None
    """The random states with which the body continues; ``None`` for the current ones."""
    gives_up_item: bool = False
    """Whether the item in progress cannot be yielded again, so that the places inside of it are not resumed."""
    innermost: bool = False
    """Whether the loop was interrupted here: the checkpoint contains what the body changed on its way here."""
    runs_before: int = 0
    """How many runs were made on the way here. The checkpoint contains them too."""
    is_at_end: bool = False
    """Whether nothing more will be yielded, so that a reminder is due if another ``until_stop`` begins."""
    otherwise: Plan | None = None
    """What to do if the loader does not accept its own state."""

    @property
    def repeats_item(self) -> bool:
        """Whether the item in progress is yielded again."""
        return self.entry is not None and not self.entry.state.item_is_done and not self.gives_up_item

    @property
    def continues(self) -> bool:
        """Whether items are done, in whose bodies the script may have changed its variables."""
        return self.entry is not None and self.entry.taken > (not self.entry.state.item_is_done)


def plan_resume(
    place: Place,
    iterable: Iterable[Any],
    entry: Entry | None,
    random: Saved | None,
    *,
    resume: bool = True,
    innermost: bool = True,
    has_own_state: bool = False,
) -> Plan:
    """Return how ``place`` begins to iterate over ``iterable``. Changes and logs nothing.

    Args:
        entry: what the checkpoint contains of a place in this item of the outer loop.
        random: the random states of the checkpoint, if it has this process's.
        resume: False to begin at the start, whatever the checkpoint contains.
        innermost: whether the checkpoint contains no place inside of ``entry``.
        has_own_state: whether the checkpoint contains the state of ``iterable`` itself.
    """
    if not resume:
        # What the checkpoint contains of places inside of this one still counts in its first item.
        return Plan(way=Way.FRESH, taken=0 if entry is not None and entry.number == place.number else None)
    if entry is None or entry.number < place.number:
        return Plan(way=Way.FRESH)
    if entry.number > place.number:  # places before the open one were finished
        # For what the body draws between the place before that one and that one.
        return Plan(way=Way.NOTHING, random=entry.random_between or random)
    runs_before = place.runs - (0 if place.outer is None else place.outer.runs)
    if entry.taken == 0 and entry.before is None:  # the loop stopped before it began
        return Plan(way=Way.FRESH, random=random, innermost=innermost, runs_before=runs_before)
    done = entry.state.item_is_done
    plan = Plan(
        way=Way.SKIP,
        entry=entry,
        taken=entry.taken if done else entry.taken - 1,
        # The body of an item that is yielded again starts with the random states of the first time.
        random=random if done else entry.random_at_item or random,
        innermost=innermost,
        runs_before=runs_before,
    )
    if entry.state is State.ENDED and not (place.depth == 1 and isinstance(iterable, MAY_HAVE_GROWN)):
        return plan._replace(way=Way.NOTHING)
    if is_plain_iterator(iterable):
        return plan._replace(way=Way.AS_IT_IS, taken=0)  # how many it gave to earlier processes says nothing
    if done and place.depth == 1 and not entry.state.is_left:
        # Inside of another loop, the body of that one continues after this one, with its variables.
        plan = plan._replace(is_at_end=entry.taken > 0 and _is_at_end(place.limit, iterable, entry))
    without_item = plan if done else plan._replace(taken=entry.taken, random=random, gives_up_item=True)
    if isinstance(iterable, range) and entry.last is not None:
        if entry.last not in iterable:  # another range than the checkpoint's
            plan = without_item
        return plan._replace(way=Way.REST, rest=rest_of_range(iterable, entry.last, done))
    if has_own_state:  # after loading it, a loader continues after the item in progress
        return without_item._replace(way=Way.OWN_STATE, otherwise=plan)
    return plan


class Line(NamedTuple):
    """A line of the log, as :func:`logging.log` takes it."""

    level: int
    message: str
    arguments: tuple[Any, ...]


def lines_of(plan: Plan, place: Place, iterable: Iterable[Any]) -> Iterator[Line]:
    """Yield what to log of ``plan`` before it is carried out."""
    name, entry = name_of(iterable), plan.entry
    if plan.runs_before:
        yield Line(logging.WARNING, _RUNS_BEFORE, (plan.runs_before, name))
    # In the first item of an outer loop that continues, earlier items may have taken from the same iterator.
    is_later = plan.way is Way.FRESH and _is_first_after_resume(place.outer) and is_plain_iterator(iterable)
    if plan.way is Way.AS_IT_IS or is_later:
        hint = _NOT_AN_ITERATOR + (_NOT_A_SLICE if isinstance(iterable, itertools.islice) else "")
        level = logging.WARNING if is_later or (entry is not None and entry.taken) else logging.INFO
        yield Line(level, "%s is an iterator, so it continues where it is. %s", (name, hint))
        return
    if entry is None:
        return
    in_progress = not entry.state.item_is_done
    if in_progress and entry.runs and plan.innermost:
        yield Line(logging.WARNING, _REPEATED, (name, entry.runs))
    done = entry.taken - in_progress
    if entry.state is State.ENDED and entry.runs:
        yield Line(logging.WARNING, _RUNS_AFTER, (entry.runs, name))
    if plan.way is Way.NOTHING:
        if place.depth == 1:  # a loop inside of another one ends with each of its items
            yield Line(logging.INFO, _AGAIN, (name,))
    elif done and plan.innermost:
        if entry.state.is_left:
            yield Line(logging.WARNING, "%s continues after item %d. %s", (name, done, _AFTER_A_BREAK))
        else:
            yield Line(logging.INFO, _AT_END if plan.is_at_end else _CONTINUES, (name, done))


_RUNS_BEFORE = (
    "%d runs were made before %s continued. The checkpoint contains them already: make them in an until_stop of their "
    "own."
)
_RUNS_AFTER = (
    "%d runs were made after %s had ended, and the checkpoint contains them. They are made again if the script makes "
    "them: make them in an until_stop of their own, or write epochs as until_stop(range(...))."
)
_REPEATED = (
    "the last item of %s had %d runs when the checkpoint was saved. It is yielded again, so these runs are made twice. "
    "To continue within an item, iterate over its parts with another until_stop, and make one run for each."
)
_AGAIN = "%s had already ended. To iterate it again, use until_stop(..., resume=False)."
_NOT_AN_ITERATOR = (
    "To have it resumed, pass until_stop an iterable, such as the loader itself or a list, and write epochs as "
    "until_stop(range(...)) around it."
)
_NOT_A_SLICE = " For its first n items, use until_stop(loader, limit=n)."
_CONTINUES = "%s continues at item %d; sums over its items must be in Variables"
_AT_END = "%s continues after item %d, the last one."
_AFTER_A_BREAK = (
    "The process that saved the checkpoint left it with a break. If that was the end of the training run, do not start "
    "it again."
)


def _is_first_after_resume(outer: Place | None) -> bool:
    """Return whether ``outer`` is in the first item after the items that an earlier process has done."""
    return outer is not None and bool(outer.resumed) and outer.taken == (outer.resumed or 0) + 1


def rest_of_range(values: range, last: int, done: bool) -> range:
    """Return the part of ``values`` that comes after ``last``, and ``last`` itself if it is not ``done``."""
    passed, between = divmod(last - values.start, values.step)
    return values[max(passed + (done or between != 0), 0) :]


def _is_at_end(limit: int | None, iterable: Iterable[Any], entry: Entry) -> bool:
    """Return whether ``iterable``, after the items of ``entry``, is known to yield nothing more."""
    if limit is not None and entry.taken >= limit:
        return True
    if isinstance(iterable, range):
        return entry.last is not None and not rest_of_range(iterable, entry.last, True)
    return isinstance(iterable, (*MAY_HAVE_GROWN, DataLoader)) and length_of(iterable) == entry.taken


def length_of(iterable: Any) -> int | None:
    """Return how many items ``iterable`` says it has; ``None`` if it does not, or may yield more."""
    if isinstance(iterable, DataLoader) and isinstance(iterable.dataset, IterableDataset):
        return None  # asking for its length makes torch warn if it yields more items than that
    try:
        return len(iterable)
    except Exception:  # a sampler need not have a length
        return None


def is_plain_iterator(iterable: object) -> bool:
    """Return whether ``iterable`` is an iterator, which cannot be iterated again, and has no state."""
    return isinstance(iterable, Iterator) and not has_state(iterable)


def name_of(iterable: object) -> str:
    """Return how the log names ``iterable``."""
    return f"until_stop's {type(iterable).__name__}"
