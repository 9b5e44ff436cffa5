"""How far one ``until_stop`` is in its data: a part of :class:`torchhooks.position.position.Position`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from torchhooks.common.digests import Digest, digest
from torchhooks.common.random_states import random_states

Saved = dict[str, Any]
"""A part of a checkpoint."""


class State(Enum):
    """How far an iteration is, and how the body of the user's loop left its last item. A checkpoint has the value.

    The last item is yielded again by the process that resumes, unless the body is done with it.
    """

    IN_ITEM = "in item"  # the body works on the last item, if one was taken
    ITEM_DONE = "item done"  # the body is done with the last item, and may get another one
    STOPPED_IN_ITEM = "stopped in item"  # the loop stopped, and the last item may have been processed only in part
    STOPPED = "stopped"  # the loop stopped after an item that is done, or before the first one
    LEFT_IN_ITEM = "left in item"  # as LEFT, in an item that is not known to be done
    LEFT = "left"  # the body left early, for example by a break, while the loop continued
    ENDED = "ended"  # the data ended; in a checkpoint also if the body left early and the outer iteration continued
    NOT_BEGUN = "not begun"  # it yielded nothing because the loop had stopped

    @property
    def is_open(self) -> bool:
        """Whether further items may be taken."""
        return self in (State.IN_ITEM, State.ITEM_DONE)

    @property
    def is_stopped(self) -> bool:
        """Whether it is over because the loop stopped."""
        return self in (State.STOPPED_IN_ITEM, State.STOPPED, State.NOT_BEGUN)

    @property
    def is_left(self) -> bool:
        """Whether the body left it for a reason of its own."""
        return self in (State.LEFT_IN_ITEM, State.LEFT)

    @property
    def item_is_done(self) -> bool:
        """Whether the last item does not have to be yielded again."""
        return self not in (State.IN_ITEM, State.STOPPED_IN_ITEM, State.LEFT_IN_ITEM)


class Entry(NamedTuple):
    """What a checkpoint contains of one place."""

    number: int
    """How many others began before it in the same item of the outer one."""
    taken: int
    """How many items were taken, the last of which may be in progress."""
    state: State
    runs: int = 0
    """How many runs were made in the item in progress, or after the data ended; they are made again."""
    nests: bool = False
    """Whether an inner loop has begun in some item."""
    multiple_runs: bool = False
    """Whether some item had several runs, so that one run is not known to be the whole item."""
    last: Any = None
    """The last value of a range."""
    digest: Digest | None = None
    """The digest of the last item."""
    before: Saved | None = None
    """The random states before the iteration, if it may draw random numbers."""
    random_at_item: Saved | None = None
    """The random states when the last item was yielded, if an inner loop may have begun in it."""
    random_between: Saved | None = None
    """The random states when the place before it in the same item ended."""

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> Entry:
        """Return the entry that :meth:`to_save` returned."""
        return cls(**{**saved, "state": State(saved["state"])})

    def without_ranks(self) -> Entry:
        """Return what the entry says for any number of ranks, of which each has random states of its own."""
        names = ("before", "random_at_item", "random_between")
        return self._replace(runs=0, **dict.fromkeys(names))  # type: ignore[arg-type]

    def to_save(self) -> Saved:
        """Return the entry as plain data, which ``torch.load(..., weights_only=True)`` can read back."""
        return {**self._asdict(), "state": self.state.value}


class Place:
    """How far one ``until_stop`` is. :class:`torchhooks.loop.data.Data` updates it as it takes items.

    The attributes that change with every item are plain ones, so that an item costs as little as possible.
    """

    def __init__(self, iterable: object, outer: Place | None, runs: int, site: object = None) -> None:
        self.iterable = iterable  # None once the data ended, and for an iterator, which cannot be iterated again
        self.outer = outer  # None for one inside a run, as in the evaluation of a hook, and for the outermost
        self.site = site  # where until_stop was called; None once it is over, because it refers to a frame
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.number = 0  # how many others began before it in the same item of the outer one
        self.item = 0 if outer is None else outer.taken  # the item of the outer one in which it began
        self.runs_at_end = runs  # how many runs had been made when its data ended
        self.runs_before = runs  # how many runs had been made when it began
        self.nests = False  # whether an inner loop has begun in some item, so that this is no epoch
        self.nested_before = False  # the same in the checkpoint that it was resumed from
        self.began_epoch = False  # whether an epoch began with its first item, as far as one could tell then
        self.has_ended_before = False  # whether its data had ended in the checkpoint that it was resumed from
        self.limit: int | None = None  # the greatest number of items to take
        # What changes with the items. The state is not set with each of them: IN_ITEM is also the state of a new item.
        self.state = State.IN_ITEM
        self.taken: int = 0  # how many items were taken, in earlier processes too
        self.current_item: Any = None  # no longer than until_stop has it in hand
        self.runs = runs  # how many runs had been made when the last item was taken
        self.multiple_runs = False  # whether some item had several, here or in the same place of an earlier outer item
        self.may_nest = outer is not None  # whether an inner loop may begin in the next item, as one did in the last
        self.inner_skipped = False  # whether a stop let another until_stop in the current item yield nothing
        # What a checkpoint contains besides: see Entry.
        self.resumed: int | None = None  # how many items were done when it was resumed from a checkpoint
        self.last: Any = None
        self.last_digest: Digest | None = None  # known once no further item is taken
        self.before: Saved | None = None
        self.random_at_item: Saved | None = None
        self.random_between: Saved | None = None
        self.random_after_inner: Saved | None = None  # when the last inner place of the item ended
        self._inner: Place | None = None

    def add(self, inner: Place) -> None:
        """Record that ``inner`` begins in the current item."""
        inner.number = 0 if self.inner is None else self.inner.number + 1
        inner.random_between = self.random_after_inner
        self.may_nest = self.nests = True
        self._inner = inner

    @property
    def inner(self) -> Place | None:
        """The inner place that began last in the current item."""
        return self._inner if self._inner is not None and self._inner.item == self.taken else None

    @property
    def key(self) -> str:
        """The name of its loader in a checkpoint."""
        return f"{self.depth}.{self.number}"

    @property
    def is_in_position(self) -> bool:
        """Whether it is a part of the position: not if it began inside a run, as in the evaluation of a hook."""
        return self.outer is not None

    @property
    def has_new_item(self) -> bool:
        """Whether it has taken an item in this process."""
        return self.taken > (self.resumed or 0)

    @property
    def is_epoch(self) -> bool:
        """Whether its end is the end of an epoch: the innermost loop around some runs, which has not ended before."""
        return self.is_in_position and not self.nests and self.taken > 0 and not self.has_ended_before

    @property
    def untouched(self) -> bool:
        """Whether it was resumed from a checkpoint and has not taken an item since."""
        return self.taken == self.resumed and self.state is not State.ENDED

    def resume(self, entry: Entry | None, taken: int | None, repeats_item: bool) -> None:
        """Continue ``entry``, if there is one, after ``taken`` items, with its last item again if ``repeats_item``."""
        self.resumed = taken
        if entry is not None:
            self.has_ended_before = entry.state is State.ENDED
            self.nested_before = entry.nests
            self.taken = taken or 0
            self.last, self.before = entry.last, entry.before
            self.multiple_runs = entry.multiple_runs
            self.random_at_item = entry.random_at_item if repeats_item else None
            self.random_between = entry.random_between

    def begin_item(self) -> None:
        """Record the random states with which the body begins the item that was taken last.

        Before an inner loop begins, the body may draw its order. Drawn again after a resume, it has to be the same.
        """
        self.may_nest = self._inner is not None and self._inner.item == self.taken - 1
        self.random_at_item = random_states() if self.may_nest or self.taken == (self.resumed or 0) + 1 else None
        self.random_after_inner = None

    def settle(self, done: bool) -> None:
        """Record whether the body is ``done`` with the current item."""
        if self.state.is_open:  # a generator that a variable still holds may go on after it was left
            self.state = State.ITEM_DONE if done else State.IN_ITEM

    def end(self, runs: int) -> None:
        """Record that the data ended after ``runs`` runs."""
        self.state = State.ENDED
        self.runs_at_end = runs
        self.note_last()
        self.iterable = self.current_item = None

    def stop(self, runs: int) -> None:
        """Record that no further item is taken because the loop stops, after ``runs`` runs, when the body came back."""
        made, inner = runs - self.runs, self.inner
        if inner is not None:
            done = not inner.state.is_stopped
        else:
            # The body came back for another item, so it skipped an item in which it made no run. But an item
            # of several runs, or of an inner loop that yielded nothing, may have been cut off before its first run.
            done = self.state is State.ITEM_DONE or (made <= 1 and self._has_one_run)
        self._close(State.STOPPED if done or not self.taken else State.STOPPED_IN_ITEM)

    def leave(self, runs: int, stopping: bool) -> None:
        """Record that the body left it after ``runs`` runs, and whether because the loop is ``stopping``."""
        # If the body left an inner place too, or that one stopped, it was on its way out of both: it did not come to
        # the end of the item.
        inner_ended = self.inner is None or self.inner.state is State.ENDED
        done = not self.taken or (inner_ended and runs - self.runs == 1 and self._has_one_run)
        if stopping:
            self._close(State.STOPPED if done else State.STOPPED_IN_ITEM)
        else:
            self._close(State.LEFT if done else State.LEFT_IN_ITEM)

    def _close(self, state: State) -> None:
        self.state = state
        self.last_digest, self.current_item = digest(self.current_item), None

    def entry(self, runs: int) -> Entry:
        """Return what a checkpoint contains after ``runs`` runs."""
        self.note_last()
        state = self.state
        if state is State.IN_ITEM:
            # The body may be anywhere in the item. One run, in no inner place, is taken for the whole item.
            one_run = self.inner is None and runs - self.runs == 1 and self._has_one_run
            state = State.ITEM_DONE if one_run or not self.taken else State.IN_ITEM
        elif state.is_left and self.outer is not None and self.outer.state.is_open:
            state = State.ENDED  # the outer loop went on without the items that are left
        runs_since = 0 if state.item_is_done else runs - self.runs
        if self.state is State.ENDED and self.depth == 1:  # inside of another loop, that one has the runs in its item
            runs_since = runs - self.runs_at_end
        return Entry(
            number=self.number,
            taken=self.taken,
            state=state,
            runs=runs_since,
            nests=self.nests or self.nested_before,
            multiple_runs=self.multiple_runs,
            last=self.last,
            digest=digest(self.current_item) if state.is_open else self.last_digest,
            before=self.before,
            random_at_item=self.random_at_item,
            random_between=self.random_between,
        )

    def note_last(self) -> None:
        """Update :attr:`last`."""
        if isinstance(self.iterable, range) and self.has_new_item:
            self.last = self.iterable[self.taken - (self.resumed or 0) - 1]

    @property
    def _has_one_run(self) -> bool:
        """Whether one run is all that belongs to the current item, as far as one can tell."""
        return not self.multiple_runs and not self.inner_skipped
