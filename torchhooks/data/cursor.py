"""How far one ``until_stop`` loop is in its data, now and in a checkpoint.

The cursor of a loop has three states (:class:`CursorState`). It is *in an item* while the body works on the item that
was taken last. It is *between items* once the body asks for the next one: the item is then done. It has *ended*
when the data have, or when the body has left an inner loop by ``break``. A process that resumes yields an item that is
not done again.

A save never happens inside an item, with four exceptions:

* *before the first item* of a loop, also where a stop keeps the loop from beginning: this counts as between items;
* *where* ``should_stop()`` *has answered True*: the item is done. If the body has left an inner loop by ``break``, the
  outer loop is in its item and the inner one has ended;
* *by* ``saver.save()`` *in the body*: the item is done;
* *at a stop by a signal, in an item whose runs are made in a plain* ``for`` *or* ``while``: the item is not done. The
  resume makes its runs again, with a warning, so it is not exact.

In the body, an item counts as done if one run was made in it or an inner loop is over. Otherwise, it is in progress.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from torchhooks.common.item_digests import ItemDigest, item_digest
from torchhooks.common.random_states import random_states
from torchhooks.common.stateful import has_state

Saved = dict[str, Any]
"""A part of a checkpoint."""


IN_MEMORY = (range, list, tuple)
"""What draws no random numbers, and what a later process may pass with more items at its end."""


class CursorState(Enum):
    """Where the body of a loop is. A checkpoint has the value."""

    IN_ITEM = "in item"  # the body works on the item that was taken last
    BETWEEN_ITEMS = "between items"  # the body is done with that item, or no item was taken yet
    ENDED = "ended"  # the data ended, or the body left an inner loop by break


# Looking up a member of an Enum takes longer than a global, and until_stop sets the state for each item.
IN_ITEM, BETWEEN_ITEMS, ENDED = CursorState.IN_ITEM, CursorState.BETWEEN_ITEMS, CursorState.ENDED


class Resumed(NamedTuple):
    """What a loop has found of itself in the checkpoint."""

    items: int | None = None
    """How many of its items were done; ``None`` if the checkpoint does not contain the loop."""
    has_more: bool | None = None
    """Whether the data have further items; ``None`` if the loop of the checkpoint is a later one."""


_NOT_RESUMED = Resumed()


class SavedCursor(NamedTuple):
    """What a checkpoint contains of one loop."""

    order: int
    """How many other loops began before this one in the same item of the outer loop."""
    taken: int
    """How many items were taken. The last one is in progress if the state is ``IN_ITEM``."""
    state: CursorState
    runs: int = 0
    """How many runs were made in an item in progress that has no inner loop. They are made again."""
    left: bool = False
    """Whether the body left the outermost loop by ``break``."""
    nests: bool = False
    """Whether an inner loop has begun in some item."""
    several_runs: bool = False
    """Whether some item had several runs, so that one run is not known to be the whole item."""
    last: int | None = None
    """The last value of a range."""
    digest: ItemDigest | None = None
    """The digest of the last item."""
    before: Saved | None = None
    """What the iteration began with, if it may draw random numbers.

    The random states of the process and of the data's generators, whether the data kept workers, and their length.
    """
    random_at_item: Saved | None = None
    """The random states when the last item was yielded, if an inner loop may have begun in it."""
    random_between: Saved | None = None
    """The random states when the loop before this one ended, in the same item of the outer loop."""
    total: int | None = None
    """How many items the loop has from its first to its last, in all processes; ``None`` if that is not known."""

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> SavedCursor:
        """Return the cursor that :meth:`to_save` returned."""
        return cls(**{**saved, "state": CursorState(saved["state"])})

    def to_save(self) -> Saved:
        """Return plain data, which ``torch.load(..., weights_only=True)`` can read back."""
        return {**self._asdict(), "state": self.state.value}

    def without_ranks(self) -> SavedCursor:
        """Return the cursor for any number of ranks: each rank has random states of its own."""
        names = ("before", "random_at_item", "random_between")
        total = None if self.last is None else self.total  # a loader has another length on another number of ranks
        return self._replace(runs=0, total=total, **dict.fromkeys(names))  # type: ignore[arg-type]

    @property
    def has_begun(self) -> bool:
        """Whether the loop had begun to iterate. It had not if a stop kept it from its first item."""
        return self.taken > 0 or self.before is not None

    @property
    def done(self) -> int:
        """How many items are done."""
        return self.taken - (self.state is IN_ITEM)


class Cursor:
    """How far one ``until_stop`` loop is. The loop updates the cursor as it takes items.

    What changes with every item is a plain attribute, so that an item costs as little as possible.

    Args:
        iterable: the data; ``None`` for an iterator, which cannot be iterated again.
        outer: the cursor of the loop around this one; ``None`` for a loop inside a run, as in the evaluation of a hook.
        runs: how many runs have been made.
    """

    __slots__ = (
        *("may_nest", "taken", "runs", "state", "current_item", "several_runs"),  # of every item
        *("iterable", "outer", "depth", "order", "limit", "runs_before", "left", "is_side_by_side", "nests"),
        *("random_after_inner", "item_of_outer", "_inner", "resumed", "had_ended", "last", "digest", "before"),
        *("random_at_item", "random_between"),
    )

    def __init__(self, iterable: object, outer: Cursor | None, runs: int) -> None:
        self.iterable = iterable  # None once the data ended
        self.outer = outer
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.order = 0  # how many other loops began before it in the same item of the outer loop
        self.limit: int | None = None  # the greatest number of items to take
        self.state = BETWEEN_ITEMS
        self.taken = 0  # how many items were taken, in earlier processes too
        self.current_item: object = None
        self.runs = self.runs_before = runs  # when the last item was taken, and when the loop began
        self.several_runs = False  # whether some item had several runs
        self.left = False  # whether the body left the loop by break
        self.is_side_by_side = False  # whether the outer loop took another item while a variable held the generator
        # Inner loops.
        self.nests = False  # whether an inner loop has begun in some item, so that this loop is no epoch
        self.may_nest = outer is not None  # whether an inner loop may begin in the next item
        self.random_after_inner: Saved | None = None  # when the last inner loop of the item ended
        self.item_of_outer = 0 if outer is None else outer.taken  # in which it began
        self._inner: Cursor | None = None
        # From the checkpoint, and for the next one: see SavedCursor.
        self.resumed = _NOT_RESUMED
        self.had_ended = False
        self.last: int | None = None
        self.digest: ItemDigest | None = None
        self.before: Saved | None = None
        self.random_at_item: Saved | None = None
        self.random_between: Saved | None = None

    @property
    def key(self) -> str:
        """The name of the loop's data in a checkpoint."""
        return f"{self.depth}.{self.order}"

    @property
    def is_in_position(self) -> bool:
        """Whether the loop is part of the position in the data: it did not begin inside a run."""
        return self.outer is not None

    @property
    def has_new_item(self) -> bool:
        """Whether the loop has taken an item in this process."""
        return self.taken > (self.resumed.items or 0)

    @property
    def is_epoch(self) -> bool:
        """Whether this is the innermost loop around some runs, which had not ended in the checkpoint."""
        return self.is_in_position and not self.nests and self.taken > 0 and not self.had_ended

    @property
    def inner(self) -> Cursor | None:
        """The inner loop that began last in the current item."""
        # The inner loop may be one of an earlier item. It is compared here, so that take() has nothing to reset.
        return self._inner if self._inner is not None and self._inner.item_of_outer == self.taken else None

    @property
    def length(self) -> int | None:
        """How many items the loop has, as far as its data and its limit say; ``None`` if that is not known."""
        if self.state is ENDED:
            return self.taken
        length = length_of(self.iterable)
        if length is not None and isinstance(self.iterable, range):
            length += self.resumed.items or 0  # after a resume, a range is only what was left of it
        return min((each for each in (length, self.limit) if each is not None), default=None)

    @property
    def where(self) -> str:
        """At which item the loop is, for messages: ``"in epoch 3 of 90"``."""
        length = self.length
        of = "" if length is None or length == sys.maxsize else f" of {length}"  # the latter repeats its data for ever
        return f"{'in epoch' if self.nests else 'at item'} {self.taken}{of}"

    @property
    def ends_with_item(self) -> bool:
        """Whether the data are known to end with the current item.

        On several ranks they all know it, or none does: a rank that has more items than another one has a limit.
        """
        length = self.length
        return length is not None and self.taken >= length

    def add(self, inner: Cursor) -> None:
        """Record that ``inner`` begins in the current item."""
        inner.order = 0 if self.inner is None else self.inner.order + 1
        inner.random_between = self.random_after_inner
        self.may_nest = self.nests = True
        self._inner = inner

    def outlive_item(self) -> None:
        """Record that the outer loop takes another item while a variable may still hold this loop's generator."""
        self.is_side_by_side = True
        self.may_nest = True  # so that until_stop looks at the cursor if the script asks this loop for another item

    def return_to(self, inner: Cursor) -> None:
        """Record that ``inner``, which has begun in the current item, is the inner loop that counts."""
        self._inner = inner

    def drop(self, inner: Cursor) -> None:
        """Forget ``inner``, which turned out to be iterated side by side with this loop."""
        if self._inner is inner:
            self._inner, self.may_nest, self.nests = None, False, False

    def resume(self, saved: SavedCursor | None, resumed: Resumed) -> None:
        """Continue ``saved``, if there is one, after the items of ``resumed``, which are done."""
        self.resumed, taken = resumed, resumed.items
        if saved is not None:
            self.taken = taken or 0
            self.had_ended, self.nests, self.several_runs = saved.state is ENDED, saved.nests, saved.several_runs
            self.last, self.before, self.random_between = saved.last, saved.before, saved.random_between
            self.random_at_item = saved.random_at_item if saved.taken != taken else None

    def take_at_most(self, limit: int | None, most_items: tuple[int, int] | None) -> None:
        """Limit the items of the loop to ``limit``, and at the depth that ``most_items`` names to its number."""
        if most_items is not None and self.depth == most_items[0]:
            limit = most_items[1] if limit is None else min(limit, most_items[1])
        self.limit = limit

    def take(self, item: object, runs: int) -> None:
        """Record that the body begins with ``item``, after ``runs`` runs."""
        if runs - self.runs > 1:
            self.several_runs = True
        self.runs = runs
        self.taken += 1
        self.current_item = item
        self.state = IN_ITEM
        if self.may_nest:
            self._begin_item()

    def _begin_item(self) -> None:
        """Record the random states with which the body begins the item that was taken last.

        Before an inner loop begins, the body may draw its order. Drawn again after a resume, it has to be the same.
        Recording costs time, so it is done for items in which an inner loop is to be expected: the first one, and one
        after an item that had an inner loop.
        """
        is_first = self.taken == (self.resumed.items or 0) + 1
        self.may_nest = is_first or (self._inner is not None and self._inner.item_of_outer == self.taken - 1)
        self.random_at_item = random_states() if self.may_nest else None
        self.random_after_inner = None

    def item_done(self) -> None:
        """Record that the body is done with the current item, or has not begun with the first one."""
        self.state = BETWEEN_ITEMS

    def end(self) -> None:
        """Record that the data ended."""
        # First, because it looks at the range, which is let go of in the next line.
        self._note_last()
        self.state, self.iterable, self.current_item = ENDED, None, None

    def leave(self, runs: int) -> None:
        """Record that the body left the loop by ``break``, ``return`` or an exception, after ``runs`` runs.

        The outer loop goes on without the items that are left. The outermost loop continues in another process.
        """
        self.left = True
        if self.depth > 1:
            self.state = ENDED
        elif self.state is IN_ITEM and self.counts_as_done(runs):
            self.state = BETWEEN_ITEMS
        self._note_last()
        # A digest is kept and not the item: a cursor lives on after its loop, and an item may be a batch in the memory
        # of a device.
        self.digest, self.current_item = item_digest(self.current_item), None

    def saved(self, state: CursorState, runs: int) -> SavedCursor:
        """Return what a checkpoint contains of the loop in ``state``, after ``runs`` runs."""
        self._note_last()
        return SavedCursor(
            order=self.order,
            taken=self.taken,
            state=state,
            runs=runs - self.runs if state is IN_ITEM and not self.nests else 0,
            left=self.left and self.depth == 1,
            nests=self.nests,
            several_runs=self.several_runs,
            last=self.last,
            digest=self.digest if self.current_item is None else item_digest(self.current_item),
            before=self.before,
            random_at_item=self.random_at_item,
            random_between=self.random_between,
            total=self.total(None if self.before is None else self.before["length"]),
        )

    def total(self, length: int | None) -> int | None:
        """Return how many items the loop has from its first to its last, in all processes, without ``break``.

        Args:
            length: the length of the data, unless they are in memory: asking for it may call a sampler of the user.
        """
        if isinstance(self.iterable, IN_MEMORY):
            length = len(self.iterable)
            if isinstance(self.iterable, range):
                length += self.resumed.items or 0  # after a resume, a range is only what was left of it
        return min((each for each in (length, self.limit) if each is not None), default=None)

    def counts_as_done(self, runs: int) -> bool:
        """Return whether the current item counts as done, after ``runs`` runs, though the body still works on it.

        It does if an inner loop is over, or one run was made. Without a run the item is in progress, and so it is if
        there may be several: to see an item twice does less harm than to miss half of an epoch.
        """
        return self.inner is not None or (runs - self.runs == 1 and not self.several_runs)

    def _note_last(self) -> None:
        if isinstance(self.iterable, range) and self.has_new_item:
            self.last = self.iterable[self.taken - (self.resumed.items or 0) - 1]


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


class DataWaits:
    """How long the nested ``until_stop`` loops have waited for their data, in seconds, by depth.

    Reading the clock twice for every item is not free, so a depth is measured only after a call of :meth:`total`.
    """

    def __init__(self) -> None:
        self.depth = 0
        """How many ``until_stop`` loops are open."""
        self.secs: dict[int, float] = {}  # never another dict: until_stop holds this one

    def enter(self) -> None:
        """Note that a loop begins, inside of the open ones."""
        self.depth += 1

    def leave(self) -> None:
        """Note that the innermost loop is over."""
        self.depth -= 1

    def total(self) -> float | None:
        """Return how long all loops have waited since the first call at their depth; ``None`` if there was none."""
        if self.depth:
            self.secs.setdefault(self.depth, 0.0)
        return sum(self.secs.values()) if self.secs else None
