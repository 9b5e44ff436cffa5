"""How far one ``until_stop`` is in its data: a part of :class:`torchhooks.position.position.Position`."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from torchhooks.common.digests import Digest, digest
from torchhooks.common.random_states import random_states

Saved = dict[str, Any]
"""A part of a checkpoint."""


class Stage(Enum):
    OPEN = auto()
    ENDED = auto()  # its data ended
    LEFT = auto()  # left early, for example by a break, while the loop continued
    STOPPED = auto()  # left because the loop stopped


class Place:
    """How far one ``until_stop`` is. :class:`torchhooks.loop.data.Data` updates it as it takes items."""

    def __init__(self, iterable: object, outer: Place | None, runs: int, site: object = None) -> None:
        self.iterable = iterable  # None once the data ended, and for an iterator, which cannot be iterated again
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.number = 0  # how many others began before it in the same item of the outer one
        self.item = 0 if outer is None else outer.taken  # the item of the outer one in which it began
        self.epoch = 0  # how often until_stop was called before at the same place in the code
        self.limit: int | None = None  # the greatest number of items to take
        self.taken: int = 0  # how many items were taken, including those of earlier processes
        self.runs = runs  # how many runs had been made when the last item was taken
        self.several = False  # whether some item had several runs, here or in the same place of an earlier outer item
        self.cut = False  # whether another until_stop began in the current item, and yielded nothing because of a stop
        self.was_cut = False  # whether it yielded nothing itself because of a stop
        self.ended = False  # whether the data ended
        self.counts = outer is not None  # not inside a run, as in the evaluation of a hook
        self.nests = self.counts  # whether an inner loop may begin in the next item, as one did in the last
        self.finished = False  # whether the body of the user's loop is done with the current item
        self.through = False  # whether until_stop ended because the loop stops, and not because the body left it
        self.done = False  # whether the last item does not have to be yielded again; set by leave()
        self.stage = Stage.OPEN
        self.resumed: int | None = None  # how many items were done when it was resumed from a checkpoint
        self.before: Saved | None = None  # the random states before the iteration, if it may draw random numbers
        self.probes: list[Saved] = []  # the last items that were recorded to be compared; see torchhooks.position.probe
        self.last: Any = None  # the last value of a range
        self.item_random: Saved | None = None  # when the current item was yielded, if an inner loop may begin in it
        self.between: Saved | None = None  # the random states when the place before it in the same item ended
        self.ended_inside: Saved | None = None  # the random states when the last inner place of the item ended
        self.held: Any = None  # the current item, no longer than until_stop has it in hand
        self.left_at: Digest | None = None  # the digest of the item at which the loop was left
        self.site, self.outer = site, outer
        self._inner: Place | None = None

    def add(self, inner: Place) -> None:
        """Record that ``inner`` begins in the current item."""
        inner.number = 0 if self.inner is None else self.inner.number + 1
        inner.between = self.ended_inside
        self.nests = True
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
    def untouched(self) -> bool:
        """Whether it was resumed from a checkpoint and has not taken an item since."""
        return self.taken == self.resumed and not self.ended

    def begin_item(self) -> None:
        """Record the random states with which the body begins the item that was taken last.

        Before an inner loop begins, the body may draw its order. Drawn again after a resume, it has to be the same.
        """
        self.nests = self._inner is not None and self._inner.item == self.taken - 1
        self.item_random = random_states() if self.nests or self.taken == (self.resumed or 0) + 1 else None
        self.ended_inside = None

    def is_done(self, runs: int) -> bool:
        """Return whether the current item is done after ``runs`` runs of the loop."""
        if self.finished and self.stage is Stage.OPEN:
            return True
        if self.stage is not Stage.OPEN or not self.taken:
            return self.done or not self.taken
        return self.inner is None and self._is_single(runs - self.runs)

    def leave(self, runs: int, stopping: bool) -> None:
        """Record that no further item is taken."""
        self.left_at, self.held = None if self.ended else digest(self.held), None
        if self.ended:
            self.stage = Stage.ENDED
            self.note_last()
            self.iterable = None
            return
        made = runs - self.runs
        if not self.through:
            self.done = self._inner_stage in (None, Stage.ENDED) and self._is_single(made)
        elif self._inner_stage is not None:
            self.done = self._inner_stage is not Stage.STOPPED
        else:
            self.done = self.finished or (made == 0 and not self.several and not self.cut) or self._is_single(made)
        self.stage = Stage.STOPPED if stopping else Stage.LEFT

    def note_last(self) -> None:
        """Update :attr:`last`."""
        fresh = self.taken - (self.resumed or 0)
        if isinstance(self.iterable, range) and fresh:
            self.last = self.iterable[fresh - 1]

    def _is_single(self, made: int) -> bool:
        """Return whether ``made`` runs are all that belong to the current item, as far as one can tell."""
        return made == 1 and not self.several and not self.cut

    @property
    def _inner_stage(self) -> Stage | None:
        return None if self.inner is None else self.inner.stage
