"""The position of a training run in its data, from which another process continues with the next item.

Each ``until_stop`` has a :class:`Cursor`. The open ones, outermost first, are the position. Once there was an
``until_stop``, every checkpoint contains the position under ``"position"``:

* ``"path"``: the :class:`SavedCursor` of each loop, outermost first. Only the last one can be between two items or
  ended; the item of each of the others is in progress;
* ``"loaders"``: by depth and order, the state of the data: the states of their generators, and their ``state_dict()``;
* ``"epochs"``: how many have ended in the whole training run, whether one is in progress, and the number of the last
  item.

The :mod:`cursor <torchhooks.data.cursor>` says where the body of a loop can be, and what a save there counts as done.
What a resumed process does with its data is a :class:`Plan`, which :func:`plan_resume` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

from torchhooks.common.log import logger
from torchhooks.common.random_states import random_states, set_random_states
from torchhooks.common.stateful import Stateful
from torchhooks.data.cursor import (
    BETWEEN_ITEMS,
    ENDED,
    IN_ITEM,
    Cursor,
    CursorState,
    Resumed,
    Saved,
    SavedCursor,
    is_plain_iterator,
    name_of,
)
from torchhooks.data.loaders import Loaders
from torchhooks.data.resuming import Plan, Way, is_over, lines_of, plan_resume, remaining, started
from torchhooks.progress.loop_state import LoopState

T = TypeVar("T")

DATA_ENDED = "data ended"
"""Why a training run is finished whose outermost loop has no more items."""


class Point(Enum):
    """Where in the script the position is taken, which decides what counts as done."""

    BEFORE_LOOP = "a stop keeps a loop from its first item"
    BETWEEN_ITEMS = "the body asks for its next item"
    IN_BODY = "the body is in an item, as where it calls saver.save()"
    AT_SHOULD_STOP = "the body is told to stop by should_stop(), after which it may leave its item"
    IN_ITEM = "the body has further runs for its item, which are made again"


class Return(Enum):
    """Where the script is on its way to the loop in which the checkpoint was saved."""

    DONE = "it has come there, or does not repeat code before it"
    ON_THE_WAY = "it repeats code before that loop: until it comes there, nothing is saved"
    MISSED = "it has begun a later loop instead, or ended"


class Finish(NamedTuple):
    """That the training run is finished, by the restored checkpoint or since the script has left its loop."""

    why: str | None = None
    """:data:`DATA_ENDED`, or how the script has left the outermost loop; ``None`` if it is not finished."""
    runs: int = 0
    """How many runs this process had made. One more makes it void."""


class CheckpointReload(Protocol):
    """What loads the checkpoint again: :class:`torchhooks.checkpoints.restoring.SecondLoad`."""

    def note_changes(self) -> object: ...
    def load(self, runs_were_made: bool) -> object: ...


class _StopPosition(NamedTuple):
    """Where a stop was noticed. What the script does with its data after that is not saved."""

    path: list[SavedCursor]
    current: str | None
    """The key of the data that are to be resumed by their own state."""
    is_in_epoch: bool
    is_at_end: bool
    """Whether the outermost loop had no item left, and nothing of its last one was left to do."""


_NONE_LEFT = (
    "%s has no item after the last one of the checkpoint. To train on, give it more items, or use "
    "until_stop(..., resume=False)"
)
_EMPTY = "%s yielded no item: check that its data are not empty, and not an iterator that is used up"


class DataPosition:
    """The cursors of one loop, and the restored position that its next ``until_stop`` resumes.

    Args:
        loop_state: counts the runs.
        state: what else is in the loop's checkpoints.
        resumes: whether there is a loop that continues from a restored position.
    """

    def __init__(self, loop_state: LoopState, state: Mapping[str, Stateful], *, resumes: bool = True) -> None:
        self._loop_state, self._resumes = loop_state, resumes
        self._loaders = Loaders(state)
        self._root = Cursor(None, None, 0)
        self._open: list[Cursor] = []
        self._epochs_ended = 0
        self._items_of_last: tuple[int, int | None] | None = None
        self._last_batch: int | None = None
        self._stop: _StopPosition | None = None
        self._several_runs: set[str] = set()  # the keys of the loops in which some item had several runs
        self._trained: Cursor | None = None  # the last outermost loop that had a run, but for the present one
        self._finish = Finish()
        self._trains_on = False  # whether a restored training run was finished, and goes on
        # From the restored checkpoint:
        self._path: list[SavedCursor] = []
        self._random: Saved | None = None  # None if another number of ranks has saved it
        self._continues_epoch = False
        self.second_load: CheckpointReload | None = None
        """What to call where the checkpoint's loop continues; ``None`` if no code before it is repeated."""
        self.way_back = Return.DONE
        """Where the script is on its way to the checkpoint's loop."""
        self.items_without_run = 0
        """How many items an innermost loop has yielded until its data ended, before any run was made."""
        self.why_no_item: str | None = None
        """Why a loop has yielded no item, before any run was made."""

    # -- where the loop is --------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """How many ``until_stop`` loops are open."""
        return len(self._open)

    @property
    def epoch(self) -> int | None:
        """The number of the epoch in progress, or of the last one, in the whole training run; ``None`` before any."""
        number: int = self._epochs_ended - (not self._is_in_epoch)
        return number if number >= 0 else None

    @property
    def epochs_ended(self) -> int:
        """How many epochs have ended in the whole training run."""
        return self._epochs_ended

    @property
    def batch(self) -> int | None:
        """The index of the current item of the innermost loop; ``None`` without one, or if an inner loop has ended."""
        cursor = self._innermost
        return None if cursor is self._root or cursor.nests or not cursor.taken else cursor.taken - 1

    @property
    def last_batch(self) -> int | None:
        """The index of the current item of the innermost loop, or of the last one, also of an earlier process."""
        cursor = self._innermost
        return cursor.taken - 1 if cursor.taken and not cursor.nests else self._last_batch

    @property
    def trained_loop(self) -> Cursor | None:
        """The outermost loop in which the last run was made; ``None`` if there was none, as after a restart."""
        last = self._root.inner
        return last if last is not None and self._loop_state.runs > last.runs_before else self._trained

    @property
    def current_item(self) -> object:
        """The item of the innermost loop whose body is running; ``None`` if there is none."""
        return self._innermost.current_item

    @property
    def has_loops(self) -> bool:
        """Whether an ``until_stop`` has begun in this process."""
        return self._root.inner is not None

    def why_no_epoch(self) -> str | None:
        """Return why the run that was just made is in no epoch that can be counted, and the way out."""
        if not self._open:
            return (
                "this run was made outside of every until_stop, so no epoch ends: iterate over the data with "
                "for batch in loop.until_stop(loader)"
            )
        cursor = self._open[0]
        if len(self._open) == 1 and cursor.inner is None and self._loop_state.runs - cursor.runs > 1:
            return (
                f"an item of {name_of(cursor.iterable)} has several runs, so all of its items together are one epoch: "
                "iterate over the batches with another until_stop, for batch in loop.until_stop(loader), or make one "
                "run for each item"
            )
        return None

    @property
    def epoch_items(self) -> tuple[int, int | None] | None:
        """How many items of the epoch that :attr:`epoch` numbers were taken, and how many it has, if that is known."""
        cursor = self._innermost
        if cursor is self._root or cursor.nests:
            return self._items_of_last
        return cursor.taken, cursor.length

    @property
    def all_items(self) -> tuple[int, int] | None:
        """How many items the innermost loop has taken, and will have taken at the end; ``None`` if that is not known.

        That is, if it has as many items each time.
        """
        taken = total = 1
        for cursor in self._open:
            length = cursor.length
            if length is None:
                return None
            taken, total = (taken - 1) * length + cursor.taken, total * length
        return (taken, total) if self._open else None

    @property
    def _innermost(self) -> Cursor:
        return self._open[-1] if self._open else self._root

    @property
    def _is_in_epoch(self) -> bool:
        if self._stop is not None:  # a stop in the middle of an epoch is not its end
            return self._stop.is_in_epoch
        return self._continues_epoch or self._innermost.is_epoch

    # -- for until_stop -----------------------------------------------------------------------------------------------

    def open(self, iterable: Iterable[object], inside_run: bool) -> Cursor:
        """Return the cursor of a new loop: inside of the open loops or, ``inside_run``, not part of the position."""
        if inside_run:
            return Cursor(None, None, self._loop_state.runs)
        outer = self._innermost
        # These look at what was there before this loop: it may be the first, or the first of another outermost loop.
        if self.repeats_code:
            self.way_back = Return.ON_THE_WAY
            assert self.second_load is not None  # set by the restore of the position
            self.second_load.note_changes()
        if outer is self._root:
            self._trained = self.trained_loop
        cursor = Cursor(None if is_plain_iterator(iterable) else iterable, outer, self._loop_state.runs)
        outer.add(cursor)
        cursor.several_runs = cursor.key in self._several_runs
        self._open.append(cursor)
        return cursor

    def resume(
        self, cursor: Cursor, iterable: Iterable[T], resume: bool, notice_stop: Callable[..., bool]
    ) -> Iterator[T]:
        """Return the items to yield: what is left, if the restored position contains the loop of ``cursor``.

        Items that are done are skipped until ``notice_stop()`` returns true, or ``notice_stop(error)`` after an error.
        """
        if cursor.outer is None:
            return iter(iterable)
        restored = self._restored_in(cursor.outer)
        if self.is_repeating and (restored is None or restored.order < cursor.order):
            self.give_up_repeating()
        saved = self._loaders.take_saved(cursor.key)
        self._loaders.remember(cursor.key, iterable)
        plan = plan_resume(
            cursor,
            iterable,
            restored,
            self._random,
            resume=resume,
            innermost=cursor.depth == len(self._path),
            has_own_state=self._loaders.has_own_state(iterable, saved),
        )
        is_earlier = plan.way is Way.NOTHING and plan.saved is None
        has_more = None if is_earlier else not is_over(plan, cursor, iterable)
        for line in lines_of(plan, cursor, iterable):
            logger.log(line.level, line.message, *line.arguments)
        # Only now it shows whether the data take their own state, which the other plan does without.
        if plan.otherwise is not None and not self._loaders.restore(iterable, saved):
            plan = plan.otherwise
        if plan.gives_up_item:
            self._path = self._path[: cursor.depth]
            logger.warning("%s continues after the item that was in progress. %s", name_of(iterable), _IN_PROGRESS)
        # After the path was cut: a loop whose item in progress is given up is itself the one to continue.
        is_reached = restored is not None and restored.order == cursor.order and cursor.depth == len(self._path)
        cursor.resume(plan.saved, Resumed(plan.taken, has_more))
        return self._carry_out(plan, cursor, iterable, saved if resume else {}, is_reached, notice_stop)

    def _carry_out(
        self,
        plan: Plan,
        cursor: Cursor,
        iterable: Iterable[T],
        saved: Saved,
        is_reached: bool,
        notice_stop: Callable[..., bool],
    ) -> Iterator[T]:
        """Return the items that ``plan`` leaves, after restoring what the body and the data continue with."""
        is_fresh = plan.way is Way.FRESH
        # First the items that are done: to take them draws numbers, also from generators that were restored before.
        iterator = iter(()) if is_fresh else remaining(plan, cursor, iterable, notice_stop)
        self._loaders.restore(iterable, saved, again=not is_fresh)
        if self.is_repeating and is_reached:
            assert self.second_load is not None
            # Where a finished training run goes on with resume=False, what earlier loops have just trained stays.
            if not (is_fresh and self._trains_on and self._loop_state.runs):
                self.second_load.load(self._loop_state.runs > 0)
            self.way_back, self.second_load = Return.DONE, None
        # The random states of the process are set once, after all of the above, which may draw from them. Only the
        # iter() of a fresh loop comes later: it draws from these states, as it did the first time.
        if plan.random is not None:
            set_random_states(plan.random)
        return started(cursor, iterable) if is_fresh else iterator

    def close(self, cursor: Cursor) -> None:
        """Record that a loop is over: its data ended, the loop stops, or the body left it."""
        self._open.remove(cursor)
        if cursor.several_runs or self._loop_state.runs - cursor.runs > 1:
            self._several_runs.add(cursor.key)
        if cursor.is_epoch:
            self._items_of_last = cursor.taken, cursor.length
            self._last_batch = cursor.taken - 1
        if cursor.state is not ENDED:
            cursor.leave(self._loop_state.runs)
        if self._stop is None and cursor.outer is not None:
            # The body may draw numbers before the next loop in the same item: in another process, the same ones.
            cursor.outer.random_after_inner = random_states()

    def count_epoch(self, cursor: Cursor) -> int | None:
        """Record that the loop of ``cursor`` is over. Return how many epochs have ended if that was one."""
        if not cursor.is_epoch or (self._loop_state.runs == cursor.runs_before and not cursor.resumed.items):
            return None
        self._epochs_ended += 1
        self._continues_epoch = False
        return self._epochs_ended

    def inside(self, cursor: Cursor) -> list[Cursor]:
        """Return the open cursors inside of ``cursor``, the innermost first."""
        return self._open[: self._open.index(cursor) : -1] if cursor in self._open else []

    @property
    def open_loops(self) -> list[Cursor]:
        """The open cursors, the innermost first."""
        return self._open[::-1]

    def is_open(self, cursor: Cursor) -> bool:
        """Return whether ``cursor`` is one of the open cursors."""
        return cursor in self._open

    def drop(self, cursor: Cursor) -> None:
        """Warn that ``cursor`` is iterated side by side with the loop around it, and forget its position."""
        assert cursor.outer is not None
        cursor.outer.drop(cursor)
        cursor.outer, cursor.may_nest, cursor.is_side_by_side = None, False, False
        logger.warning(_SIDE_BY_SIDE, name_of(cursor.iterable))

    def run_is_made_again(self) -> None:
        """Record that a run failed and is made again, with the current items."""
        # The item begins again, as if no run had been made in it: otherwise a checkpoint that is saved now would take
        # it for done. That it once had several runs is kept.
        for cursor in self._open:
            cursor.several_runs = cursor.several_runs or self._loop_state.runs - cursor.runs > 1
            cursor.runs = self._loop_state.runs

    # -- the way to the checkpoint's loop -----------------------------------------------------------------------------

    @property
    def is_repeating(self) -> bool:
        """Whether the script has not come to the checkpoint's loop yet: until then, nothing is saved."""
        return self.way_back is Return.ON_THE_WAY

    @property
    def repeats_code(self) -> bool:
        """Whether the script runs code, on its way to the checkpoint's loop, that the checkpoint's process had run."""
        return self._root.inner is None and (len(self._path) > 1 or (bool(self._path) and self._path[0].order > 0))

    def item_done(self, cursor: Cursor) -> None:
        """Note that the body is done with an item of ``cursor``: the checkpoint's loop may be one in that item."""
        items = cursor.resumed.items
        if self.is_repeating and items is not None and cursor.taken > items:
            self.give_up_repeating()

    def data_ended(self, cursor: Cursor) -> None:
        """Note that ``cursor`` has no more items, in which the checkpoint's loop could begin."""
        if self.is_repeating and cursor.resumed.items is not None:
            self.give_up_repeating()

    def note_no_run(self, cursor: Cursor) -> None:
        """Note that no run was made until the data of ``cursor`` ended."""
        if not cursor.has_new_item:
            self.why_no_item = (_NONE_LEFT if cursor.resumed.items else _EMPTY) % name_of(cursor.iterable)
        elif cursor.inner is None:
            self.items_without_run = cursor.taken

    def repeat_code_before(self, second_load: CheckpointReload) -> None:
        """Call ``second_load`` where the checkpoint's loop continues: the script repeats code on its way there."""
        self.second_load = second_load

    def give_up_repeating(self) -> None:
        """Note, with a warning, that the script has passed over the checkpoint's loop. From now on, it may save."""
        if self.is_repeating:
            self.way_back, self.second_load = Return.MISSED, None
            logger.warning(_NOT_REACHED)

    def _restored_in(self, outer: Cursor) -> SavedCursor | None:
        """Return the restored cursor of a loop inside ``outer``, if its current item is the item that had it."""
        items = outer.resumed.items
        same_item = outer is self._root or (items is not None and outer.taken == items + 1)
        return self._path[outer.depth] if same_item and outer.depth < len(self._path) else None

    # -- stops --------------------------------------------------------------------------------------------------------

    @property
    def is_at_stop(self) -> bool:
        """Whether a stop was noticed, so that the position does not change any more."""
        return self._stop is not None

    def stop_at(self, point: Point) -> None:
        """Keep the position as it is now, where a stop is noticed first."""
        if point is not Point.BEFORE_LOOP or self._root.inner is None or self.is_repeating:
            self._stop = _StopPosition(*self._current(point), self._is_in_epoch, self._is_at_end)
            return
        outer = self._innermost
        order = 0 if outer.inner is None else outer.inner.order + 1
        path = [cursor.saved(IN_ITEM, self._loop_state.runs) for cursor in self._open]
        path.append(SavedCursor(order, 0, BETWEEN_ITEMS, random_between=outer.random_after_inner))
        self._stop = _StopPosition(path, None, self._is_in_epoch, is_at_end=False)

    @property
    def loops(self) -> list[int]:
        """The loops that the position consists of, outermost first, each by its order."""
        if self._stop is not None:
            return [each.order for each in self._stop.path]
        return [cursor.order for cursor, _ in self._places()]

    @property
    def place_of_stop(self) -> list[tuple[int, int, CursorState]]:
        """At which item of which loops a stop was noticed, from the outermost one."""
        return [] if self._stop is None else [(each.order, each.taken, each.state) for each in self._stop.path]

    @property
    def _is_at_end(self) -> bool:
        if len(self._open) != 1:
            return False
        cursor = self._open[0]
        # The end of an epoch is reported when its loop ends, and a stop prevents that.
        return cursor.state is BETWEEN_ITEMS and cursor.nests and cursor.length == cursor.taken

    # -- the end of the training run ----------------------------------------------------------------------------------

    @property
    def why_finished(self) -> str | None:
        """Why the training run is finished, by the checkpoint or since its loop was left; ``None`` if it is not.

        :data:`DATA_ENDED`, or how the script has left the outermost loop. Void once a run is made.
        """
        return self._finish.why if self._loop_state.runs == self._finish.runs else None

    @property
    def has_place(self) -> bool:
        """Whether the restored checkpoint says where the data continue."""
        return bool(self._path)

    @property
    def stopped_at_end(self) -> bool:
        """Whether a stop was noticed when the data of the outermost loop had ended, and not in their middle."""
        return self._stop is not None and self._stop.is_at_end

    def finish(self, why: str) -> None:
        """Have the checkpoints say from now on that the training run is finished.

        Their place in the data is in the loop that trained, and not in a later one, such as that of a last test: given
        more data, another process continues there.
        """
        self._set_finished(why)
        if not self._open and self.trained_loop is not None:
            self._root.return_to(self.trained_loop)

    def _set_finished(self, why: str | None) -> None:
        self._finish = Finish(why, self._loop_state.runs)

    def train_on(self) -> None:
        """Continue a training run that was finished: it has more data than before, or its checkpoint was chosen."""
        self._trains_on = self._trains_on or self._finish.why is not None
        self._finish = Finish()
        # The log warns of a loop that was left without finishing the training run. This one was left and finished.
        self._path[:1] = [cursor._replace(left=False) for cursor in self._path[:1]]

    # -- for checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> Saved | None:
        """Return the position as it is now; ``None`` if there was no ``until_stop``."""
        path, current = self._current() if self._stop is None else self._stop[:2]
        if not path:
            return None
        return {
            "path": [cursor.to_save() for cursor in path],
            "loaders": self._loaders.state_dict(current),
            "epochs": {"ended": self._epochs_ended, "in_progress": self._is_in_epoch, "last_batch": self.last_batch},
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, random: Saved | None, finished: str | None) -> None:
        """Resume ``state`` with the next ``until_stop``.

        ``random`` are the random states of the checkpoint, or ``None`` if another number of ranks has saved it, so that
        this process has others. ``finished`` says why the training run is finished, if it is.

        Does nothing if there was an ``until_stop`` already, as in a recovery: the data continues where it is, because
        the items that were yielded cannot be taken back. Nor without a loop.
        """
        if self._root.inner is not None or not self._resumes:
            return
        self._path = [] if state is None else [SavedCursor.from_saved(each) for each in state["path"]]
        self._loaders.load_state_dict({} if state is None else state["loaders"])
        self._epochs_ended = 0 if state is None else state["epochs"]["ended"]
        self._continues_epoch = state is not None and state["epochs"]["in_progress"]
        self._last_batch = None if state is None else state["epochs"]["last_batch"]
        self._random = random
        self._set_finished(finished)

    def iterates(self, part: object) -> bool:
        """Return whether ``part`` is being iterated, so that its state must not be loaded."""
        return any(cursor.iterable is part for cursor in self._open)

    def _current(self, point: Point = Point.IN_BODY) -> tuple[list[SavedCursor], str | None]:
        """Return the path, and the key of the data that are to be resumed by their own state."""
        if self._root.inner is None or self.is_repeating:
            return self._path, None  # what is left is what was left in the checkpoint
        places = self._places(point)
        path = [cursor.saved(state, self._loop_state.runs) for cursor, state in places]
        last, state = places[-1]
        return path, last.key if state is BETWEEN_ITEMS else None

    def _places(self, point: Point = Point.IN_BODY) -> list[tuple[Cursor, CursorState]]:
        """Return the loops that the position consists of, outermost first, and where the body of each is."""
        first = self._root.inner
        if first is None:
            return []
        *around, last = self._open or [first]
        places, state = [(cursor, IN_ITEM) for cursor in around], last.state
        if state is IN_ITEM:
            in_item, is_told = point is Point.IN_ITEM, point is Point.AT_SHOULD_STOP
            if last.inner is not None and (in_item or (is_told and last.inner.left)):
                return [*places, (last, IN_ITEM), (last.inner, ENDED)]
            is_done = last.counts_as_done(self._loop_state.runs) and not in_item
            state = BETWEEN_ITEMS if is_done else IN_ITEM
        return [*places, (last, state)]


def outer_position(states: list[Saved | None]) -> Saved | None:
    """Return what the positions of several ranks say for another number of ranks; ``None`` if nothing.

    These are the outer loops, if all ranks were at the same item. The innermost loop, whose data are divided over the
    ranks, has not begun.
    """
    positions = [state for state in states if state is not None]
    if len(positions) < len(states):
        return None
    paths = [[SavedCursor.from_saved(cursor).without_ranks() for cursor in state["path"]] for state in positions]
    path: list[SavedCursor] = []
    for cursors in zip(*paths, strict=False):
        cursor, is_last = cursors[0], any(len(each) == len(path) + 1 for each in paths)
        if is_last and not (cursor.nests and cursor.state is BETWEEN_ITEMS) and cursor.state is not ENDED:
            cursors = tuple(SavedCursor(each.order, 0, BETWEEN_ITEMS) for each in cursors)
            cursor = cursors[0]
        if any(each != cursor for each in cursors):
            break
        path.append(cursor)
        if is_last:
            break
    if not path or not path[0].has_begun:
        return None
    return {**positions[0], "path": [cursor.to_save() for cursor in path], "loaders": {}}


_NOT_REACHED = (
    "this process has passed over the until_stop in which the checkpoint was saved. Loops are told apart by their "
    "order: begin the same loops in every process. A loop that had finished yields nothing, so do not skip it by hand. "
    "To begin again with the data, use until_stop(..., resume=False); for a new training run, give another "
    "checkpoint_dir"
)
_IN_PROGRESS = "That item cannot be yielded again, and may have been processed only in part."
_SIDE_BY_SIDE = (
    "%s is iterated side by side with another until_stop, as zip() does. A checkpoint has the place of the first one "
    "only, and the second starts over when it is resumed: pass one until_stop an object that iterates over both"
)
