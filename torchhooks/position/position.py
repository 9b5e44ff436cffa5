"""The position of a training run in its data, from which another process continues with the next item.

Each ``until_stop`` has a :class:`Place`. The open ones, outermost first, are the position. Once there was an
``until_stop``, every checkpoint contains the position under ``"position"``:

* ``"path"``: the :class:`Entry` of each place, outermost first: how many items it has taken, its :class:`State`, which
  says whether the last of them is done, and the random states with which it was started;
* ``"loaders"``: by depth and number, the state of a loader: the states of its generators, and its ``state_dict()``;
* ``"epochs"``: how many have ended in the whole training run, and whether one is in progress;

A checkpoint is usually taken between two items, when the last one is done, however many runs it took. A checkpoint that
is taken within an item cannot know how many runs are left in it. Such an item counts as done if exactly one run was
made in it, in no inner ``until_stop``. Otherwise it is yielded again: seeing a batch twice does less harm than missing
half an epoch.

What a resumed process does with its data is a :class:`Plan`, which :func:`plan_resume` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from torchhooks.common.log import logger
from torchhooks.common.random_states import random_states, set_random_states
from torchhooks.common.stateful import Stateful
from torchhooks.position.loaders import Loaders
from torchhooks.position.place import Entry, Place, Saved, State
from torchhooks.position.resuming import (
    Plan,
    Way,
    is_plain_iterator,
    lines_of,
    name_of,
    plan_resume,
)
from torchhooks.position.starting import items_of, skipped, started

Undo = Callable[[], object]


class RunCounter(Protocol):
    """What a :class:`Position` needs of the loop's schedule."""

    runs: int


class Position:
    """The places of one loop, and the restored position that its next ``until_stop`` resumes.

    Args:
        schedule: counts the runs.
        state: what else is in the loop's checkpoints.
        step: the step function of the loop.
    """

    def __init__(
        self,
        schedule: RunCounter,
        state: Mapping[str, Stateful],
    ) -> None:
        self._schedule = schedule
        self._loaders = Loaders(state)
        self._root = Place(None, None, 0)
        self._root.state = State.LEFT  # there is no outer loop that would continue after the outermost until_stop
        self._open: list[Place] = []
        self._multiple_runs: set[str] = set()
        """The keys of the places in which some item had more than one run."""
        self._epochs_ended = 0
        self._is_in_epoch = False
        self._items_of_last: tuple[int, int | None] | None = None
        self._warned = False  # of places that are not inside of each other
        # From the restored checkpoint:
        self._path: list[Entry] = []
        self._random: Saved | None = None  # None if it was saved by another number of ranks
        self._undoing: Callable[[], Undo] | None = None
        self._undo: Undo | None = None
        self._unreached: str | None = None  # what yielded nothing, as long as the place of the checkpoint has not begun

    # -- for until_stop -----------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """How many ``until_stop`` loops are open."""
        return len(self._open)

    @property
    def epoch(self) -> int | None:
        """The number of the epoch in progress, or of the last one, in the whole training run; ``None`` before any."""
        if self._is_in_epoch:
            return self._epochs_ended
        return self._epochs_ended - 1 if self._epochs_ended else None

    @property
    def batch(self) -> int | None:
        """The index of the current item of the innermost loop; ``None`` if none is open, or an inner one has ended."""
        place = self._innermost
        return None if place is self._root or place.nests else place.taken - 1

    @property
    def current_item(self) -> Any:
        """The item of the innermost loop whose body is running; ``None`` if there is none."""
        return self._innermost.current_item

    @property
    def epoch_items(self) -> tuple[int, int | None] | None:
        """How many items of the epoch that :attr:`epoch` numbers were taken, and how many it has, if that is known."""
        place = self._innermost
        if place is self._root or place.nests:
            return self._items_of_last
        return place.taken, items_of(place)

    @property
    def all_items(self) -> tuple[int, int] | None:
        """How many items the innermost loop has taken, and will have taken at the end; ``None`` if that is not known.

        That is, if it has as many items each time.
        """
        taken = total = 1
        for place in self._open:
            length = items_of(place)
            if length is None:
                return None
            taken, total = (taken - 1) * length + place.taken, total * length
        return (taken, total) if self._open else None

    def begin_item(self, place: Place) -> None:
        """Record that the body begins an item of ``place`` in which an inner loop may begin, and with it an epoch."""
        place.begin_item()
        if not place.nests and not self._is_in_epoch:
            self._is_in_epoch = place.began_epoch = True

    def end_epoch(self, place: Place) -> int | None:
        """Record that the data of ``place`` ended. Return how many epochs have ended if that was one."""
        if not place.is_epoch or (self._schedule.runs == place.runs_before and not place.resumed):
            self._take_back_epoch(place)
            return None
        self._epochs_ended += 1
        self._is_in_epoch = False
        return self._epochs_ended

    def _take_back_epoch(self, place: Place) -> None:
        """Record that no epoch began with the first item of ``place``: it is not the innermost loop around runs."""
        if place.began_epoch:
            self._is_in_epoch = place.began_epoch = False

    def begin(self, iterable: Iterable[Any], inside_run: bool, site: object = None) -> Place:
        """Return a new place: inside of the open places or, ``inside_run``, not part of the position.

        ``site`` is where ``until_stop`` was called: a frame, and a position in its code.
        """
        if inside_run:
            return Place(None, None, self._schedule.runs)
        self._leave_repeated(site)
        outer = self._innermost
        place = Place(None if is_plain_iterator(iterable) else iterable, outer, self._schedule.runs, site)
        outer.add(place)
        self._take_back_epoch(outer)
        place.multiple_runs = place.key in self._multiple_runs
        self._open.append(place)
        return place

    def _leave_repeated(self, site: object) -> None:
        """Leave the place that began at ``site`` too, and those inside of it.

        A loop cannot begin inside of itself. So the body left it, and a variable still refers to its generator.
        """
        same = [index for index, place in enumerate(self._open) if site is not None and place.site == site]
        for place in reversed(self._open[same[0] :] if same else []):
            self.leave(place, False)

    def iterator(
        self, place: Place, iterable: Iterable[Any], resume: bool, halted: Callable[..., bool]
    ) -> Iterator[Any]:
        """Return the items to yield at ``place``: what is left, if the restored position contains it.

        Items that are done are skipped until ``halted()`` returns true, or ``halted(error)`` after an error.
        """
        if place.outer is None:
            return iter(iterable)
        self._capture_before(place)
        entry = self._restored_in(place.outer)
        saved = self._loaders.take_saved(place.key)
        self._loaders.remember(place.key, iterable)
        if entry is None:
            self.check_reached()
        elif entry.number == place.number:
            self._unreached = None
        elif entry.number > place.number and resume:
            self._unreached = name_of(iterable)
        plan = plan_resume(
            place,
            iterable,
            entry,
            self._random,
            resume=resume,
            innermost=place.depth == len(self._path),
            has_own_state=self._loaders.has_own_state(iterable, saved),
        )
        if plan.innermost or self._schedule.runs:
            self._undo_repeated()
        for line in lines_of(plan, place, iterable):
            logger.log(line.level, line.message, *line.arguments)
        return self._carry_out(plan, place, iterable, saved if resume else {}, halted)

    def leave(self, place: Place, stopping: bool) -> None:
        """Record that an ``until_stop`` is over and, if the body left it, whether because the loop is stopping."""
        if place in self._open:
            self._open.remove(place)
            if place.is_epoch:
                self._items_of_last = place.taken, items_of(place)
            if place.state.is_open:
                place.leave(self._schedule.runs, stopping)
            place.site = None
            if place.outer is not None and not stopping:
                # The body may draw numbers before the next place in the same item: in another process, the same ones.
                place.outer.random_after_inner = random_states()
            if place.multiple_runs or self._schedule.runs - place.runs > 1:
                self._multiple_runs.add(place.key)

    def stop(self, place: Place) -> None:
        """Record that ``place`` takes no further item because the loop stops."""
        if place in self._open:
            place.stop(self._schedule.runs)

    def check_reached(self) -> bool:
        """Return whether the ``until_stop`` in which the checkpoint was saved began in time; if not, log a warning."""
        unreached, self._unreached = self._unreached, None
        if unreached is not None:
            logger.warning("%s yielded nothing. %s", unreached, _NOT_REACHED)
        return unreached is None

    def skip_inner(self) -> None:
        """Record that an ``until_stop`` in the current item yields nothing because the loop stops."""
        outer = self._innermost
        inner, restored = outer.inner, self._restored_in(outer)
        if inner is None:
            begins_new = bool(self._open) and self._schedule.runs == outer.runs and restored is None
        else:
            begins_new = not inner.state.is_stopped and (restored is None or restored.number <= inner.number)
        if begins_new:
            # A checkpoint that is saved now contains what the body did on its way here, to be undone when it resumes.
            place = Place(None, outer, self._schedule.runs)
            place.state = State.NOT_BEGUN
            outer.add(place)
        outer.inner_skipped = True
        if self._undo is not None and not self._schedule.runs:  # the body repeats what the restored checkpoint contains
            self._undo()
            self._undo = None
            if self._random is not None:
                set_random_states(self._random)

    def run_is_made_again(self) -> None:
        """Record that a run failed and is made again, with the current items."""
        for place in self._open:
            place.multiple_runs = place.multiple_runs or self._schedule.runs - place.runs > 1
            place.runs = self._schedule.runs

    # -- for checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> Saved | None:
        """Return the position as it is now; ``None`` if there was no ``until_stop``."""
        path, current = self._current_path()
        if not path:
            return None
        if len(path) < len(self._open) and not self._warned:
            self._warned = True
            name = name_of(self._open[-1].iterable)
            logger.warning("%s is iterated alongside another until_stop. %s", name, _USE_ONE)
        return {
            "path": [entry.to_save() for entry in path],
            "loaders": self._loaders.state_dict(current),
            "epochs": {"ended": self._epochs_ended, "in_progress": self._is_in_epoch},
        }

    def load_state_dict(
        self, state: Mapping[str, Any] | None, random: Saved | None, undoing: Callable[[], Undo] | None = None
    ) -> None:
        """Resume ``state`` with the next ``until_stop``; ``random`` are the random states of the checkpoint, or
        ``None`` if another number of ranks has saved it, so that this process has others.

        ``undoing()`` returns a function that undoes what has changed in the training state since that call. It is
        called where the resumed process begins to repeat code that the checkpoint's process had run, and what it
        returns where that ends.

        Does nothing if there was an ``until_stop`` already, as in a recovery: the data continues where it is, because
        the items that were yielded cannot be taken back.
        """
        if self._root.inner is not None:
            return
        self._path = [] if state is None else [Entry.from_saved(entry) for entry in state["path"]]
        self._loaders.load_state_dict({} if state is None else state["loaders"])
        self._epochs_ended = 0 if state is None else state["epochs"]["ended"]
        self._is_in_epoch = state is not None and state["epochs"]["in_progress"]
        self._random = random
        self._undoing = undoing

    def iterates(self, part: object) -> bool:
        """Return whether ``part`` is being iterated, so that its state must not be loaded."""
        return any(place.iterable is part for place in self._open)

    # -- the current position -----------------------------------------------------------------------------------------

    @property
    def _innermost(self) -> Place:
        return self._open[-1] if self._open else self._root

    def _current_path(self) -> tuple[list[Entry], str | None]:
        """Return the path, and the key of the place whose loader is to be resumed by its own state."""
        path: list[Entry] = []
        outer = self._root
        while True:
            restored, place = self._restored_in(outer), outer.inner
            # This process has not come to the place of the checkpoint yet, so what is left is what was left then.
            if restored is not None and (place is None or place.number < restored.number):
                return path + self._path[outer.depth :], None
            if place is None:
                return path, None
            if restored is not None and place.untouched:
                return path + self._path[outer.depth :], place.key if restored.state.item_is_done else None
            entry = place.entry(self._schedule.runs)
            path.append(entry)
            if entry.state in (State.ENDED, State.NOT_BEGUN):
                return path, None  # no loader continues in the middle of its data
            if entry.state.item_is_done:
                return path, place.key
            outer = place

    def _restored_in(self, outer: Place) -> Entry | None:
        """Return the restored entry of a place inside ``outer``, if its current item is the item that had it."""
        same_item = outer is self._root or (outer.resumed is not None and outer.taken == outer.resumed + 1)
        return self._path[outer.depth] if same_item and outer.depth < len(self._path) else None

    # -- resuming -----------------------------------------------------------------------------------------------------

    def _capture_before(self, place: Place) -> None:
        """Capture the training state before the body repeats what it did in the process that saved the checkpoint.

        It does so from the first ``until_stop`` on, up to the interrupted one. Changes before the first, such
        as another learning rate for the resumed training run, are not repeated.
        """
        if place.depth == 1 and place.number == 0 and self._undoing is not None:
            if len(self._path) > 1 or (self._path and self._path[0].number):
                self._undo = self._undoing()
            self._undoing = None

    def _undo_repeated(self) -> None:
        """Undo what the body changed on its way to the place that was interrupted: the checkpoint contains it already.

        Not if there were runs on the way: they changed the state as well.
        """
        if self._undo is not None:
            if not self._schedule.runs:
                self._undo()
            self._undo = None

    def _carry_out(
        self, plan: Plan, place: Place, iterable: Iterable[Any], saved: Saved, halted: Callable[..., bool]
    ) -> Iterator[Any]:
        """Return the items to yield according to ``plan``; ``saved`` is the restored state of their loader."""
        place.resume(plan.entry, plan.taken, plan.repeats_item)
        if plan.way is Way.FRESH:
            if plan.random is not None:
                set_random_states(plan.random)
            self._loaders.restore(iterable, saved)
            return started(place, iterable)
        if plan.otherwise is not None and not self._loaders.restore(iterable, saved):
            plan = plan.otherwise
            place.resume(plan.entry, plan.taken, plan.repeats_item)
        if plan.gives_up_item:
            self._path = self._path[: place.depth]
            logger.warning("%s continues after the item that was in progress. %s", name_of(iterable), _IN_PROGRESS)
        iterator = _remaining(plan, place, iterable, halted)
        # Iterating and skipping drew random numbers, also from generators that were restored before. From here on they
        # continue as in the checkpoint.
        self._loaders.restore(iterable, saved, again=True)
        if plan.random is not None:
            set_random_states(plan.random)
        return iterator


def outer_position(states: list[Saved | None]) -> Saved | None:
    """Return what the positions of several ranks say for another number of ranks; ``None`` if nothing.

    These are the outer loops, if all ranks were at the same item. The innermost loop, whose data are divided over the
    ranks, has not begun.
    """
    positions = [state for state in states if state is not None]
    if len(positions) < len(states):
        return None
    paths = [[Entry.from_saved(entry).without_ranks() for entry in state["path"]] for state in positions]
    path: list[Entry] = []
    for entries in zip(*paths, strict=False):
        entry, is_last = entries[0], any(len(each) == len(path) + 1 for each in paths)
        if is_last and not (entry.nests and entry.state.item_is_done) and entry.state is not State.ENDED:
            entry = Entry(number=entry.number, taken=0, state=State.NOT_BEGUN)
            entries = tuple(Entry(number=each.number, taken=0, state=State.NOT_BEGUN) for each in entries)
        if any(each != entry for each in entries):
            break
        path.append(entry)
        if is_last:
            break
    if not path or path[0].state is State.NOT_BEGUN:
        return None
    return {**positions[0], "path": [entry.to_save() for entry in path], "loaders": {}}


def _remaining(plan: Plan, place: Place, iterable: Iterable[Any], halted: Callable[..., bool]) -> Iterator[Any]:
    """Return what is left of ``iterable``."""
    if plan.way is Way.NOTHING:
        return iter(())
    if plan.rest is not None:
        place.iterable = plan.rest
        return iter(plan.rest)
    if plan.way is Way.SKIP and plan.entry is not None:
        return skipped(place, iterable, plan.entry, halted)
    return iter(iterable)


_NOT_REACHED = (
    "Loops are told apart by their order, and the checkpoint was saved in a later one, which this process has not "
    "begun. Begin the same loops in every process: a loop that had finished yields nothing, so do not skip it by hand."
)
_IN_PROGRESS = "That item cannot be yielded again, and may have been processed only in part."
_USE_ONE = "Checkpoints contain the position of the first one only: pass one until_stop an iterable of both."
