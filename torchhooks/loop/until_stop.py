"""Iterating over the data until the loop stops: what ``MonitoredLoop.until_stop`` does."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from torchhooks.common.log import logger
from torchhooks.data.cursor import ENDED, Cursor
from torchhooks.data.position import DATA_ENDED, Point
from torchhooks.loop.boundaries import Boundaries
from torchhooks.loop.open_loops import follows_another
from torchhooks.loop.rank_sync import RankSync
from torchhooks.loop.schedule import Schedule
from torchhooks.loop.sessions import Sessions
from torchhooks.progress.loop_state import IDLE, RUNNING, LeftBySignalError, Phase, Stop, StoppedBy
from torchhooks.progress.training_state import TrainingState

T = TypeVar("T")

_NOTHING_TO_REPEAT = (
    "until_stop(..., repeat=True) got no item in a whole pass, so it ends: give it an iterable that can be iterated "
    "again, such as a list or a DataLoader, and not an iterator"
)
_FINISHED = (
    "this training run is finished: %s, at step %d. So until_stop yields nothing, and no run is made. To train on, %s; "
    "for a new training run, give another checkpoint_dir%s"
)
_ONE_LOOP = ". If this loop is for the next epoch, create one loop for all epochs instead"


class DataLoops:
    """The ``until_stop`` loops of one monitored loop.

    The generators of :meth:`until_stop` take items. Where the body asks for the next one, and where a loop ends, the
    ``boundaries`` do what is due.

    Args:
        training: the state of the loop.
        schedule: the hooks.
        sessions: the session.
        rank_sync: keeps the loop in step with the other ranks; ``None`` in a process that is alone.
        boundaries: does what is due between two runs.
        most_items: a depth, and how many items the loops of it take at most; ``None`` for no limit.
    """

    def __init__(
        self,
        training: TrainingState,
        schedule: Schedule,
        sessions: Sessions,
        rank_sync: RankSync | None,
        boundaries: Boundaries,
        most_items: tuple[int, int] | None,
    ) -> None:
        self._training, self._schedule, self._sessions, self._rank_sync = training, schedule, sessions, rank_sync
        self._boundaries, self._most_items = boundaries, most_items
        self._asked_if_finished = False
        self.unraised: BaseException | None = None
        """An error that a generator cannot raise, so that the close of the loop does."""
        self.is_in_with_block = False
        """Whether the loop was entered with ``with``, which an exception can leave."""

    def until_stop(
        self, iterable: Iterable[T], resume: bool, limit: int | None, start: int | None = None
    ) -> Generator[Any, None, None]:
        """Yield the items of ``iterable`` until the loop stops or the data end; with ``start``, numbered from it."""
        try:
            cursor = self._open(iterable, limit)
            if cursor is None:
                return
            training, boundaries = self._training, self._boundaries
            state, waiting = training.loop_state, training.agenda.item_calls  # the dict itself: it is never replaced
            try:
                for item in self._items(cursor, iterable, resume):
                    # An item that was taken is always yielded, even if a stop was requested meanwhile, or it is lost.
                    cursor.take(item, state.runs)
                    if state.data_have_ended:
                        state.data_go_on()
                    yield item if start is None else (start + cursor.taken - 1, item)
                    # The body asks for the next item. Most of the time, nothing has to be done before that.
                    if cursor.may_nest or state.pending or waiting or state.stop is not None:
                        boundaries.end_item(cursor)
                        if state.stop is not None:
                            if state.phase is Phase.FAILED:
                                state.check_not_ended("until_stop()")  # to end without a word would hide it
                            break
            finally:
                # Here also after a break, which closes the generator. Python drops what is raised then, so these calls
                # reach no hook.
                training.data_waits.leave()
                boundaries.close_loop(cursor)
            # Not after a break, at which Python closes the generator: then the next call to the loop, or its close,
            # makes the call for the end of the epoch.
            if training.position.is_at_stop:
                self._leave_at_signal()
            else:
                boundaries.end_epoch()
        except StopIteration as error:  # of a call, in any of these places
            self._end_because_of(error)

    def _open(self, iterable: Iterable[T], limit: int | None) -> Cursor | None:
        """Return the cursor of a loop that begins; ``None`` if a stop keeps it from beginning."""
        state = self._training.loop_state
        state.check_not_ended("until_stop()")  # iterating over nothing would hide it
        self._boundaries.end_epoch()
        self._stop_if_finished()
        is_between_runs = state.phase is IDLE and state.stop is None
        # Inside of a run, not all ranks iterate. Before notice_stop(), because the ranks may decide on a stop where
        # they meet.
        if self._rank_sync is not None and is_between_runs:
            limit = self._rank_sync.enter(iterable, limit, self._training.position.depth + 1)
        if self._boundaries.notice_stop():  # before iter(), which may draw random numbers
            self._boundaries.stop_at(Point.BEFORE_LOOP)
            self._boundaries.raise_parting()
            self._leave_at_signal()
            return None
        cursor = self._training.position.open(iterable, state.phase is RUNNING)
        self._training.data_waits.enter()
        cursor.take_at_most(limit, self._most_items)
        return cursor

    def _items(self, cursor: Cursor, iterable: Iterable[T], resume: bool) -> Generator[T, None, None]:
        """Take the items that are left, until the data end or a signal ends them, and measure how long that takes."""
        waits = self._training.data_waits
        waited, depth = waits.secs, waits.depth  # the dict itself: it is never replaced by another
        try:
            rest = self._resume(cursor, iterable, resume)
            iterator = rest if cursor.limit is None else islice(rest, max(cursor.limit - cursor.taken, 0))
            self._stop_if_data_had_ended(cursor)
            # Before the first item too: to skip the items that are done may take minutes, in which a signal may arrive.
            self._boundaries.end_item(cursor)
            if self._training.loop_state.stop is not None:
                return
            try:
                asked = time.monotonic() if depth in waited else None
                for item in iterator:
                    if asked is not None:
                        waited[depth] += time.monotonic() - asked
                    yield item
                    if waited:
                        asked = time.monotonic() if depth in waited else None
            except Exception as error:
                if not self._boundaries.notice_stop(error):
                    raise
                self._boundaries.end_item(cursor)
            else:
                if self._rank_sync is not None:
                    self._rank_sync.warn_of_items_left(iterable, rest, cursor.taken)
                self._data_ended(cursor, iterable)
        except StopIteration as error:
            self._end_because_of(error)

    def _end_because_of(self, error: StopIteration) -> None:
        """End the loop because of ``error``, which no generator can raise; one of a subclass is raised at its close."""
        state = self._training.loop_state
        if type(error) is StopIteration:
            state.end_cleanly(error)
        else:
            self.unraised = error
            state.fail(error)

    def _data_ended(self, cursor: Cursor, iterable: object) -> None:
        state = self._training.loop_state
        if self._rank_sync is not None and cursor.is_in_position:
            self._rank_sync.data_ended(cursor.depth)
        if cursor.is_in_position and not state.runs:
            # Before end(), which lets go of the data that the message names.
            self._training.position.note_no_run(cursor)
        cursor.end()
        if cursor.depth == 1:
            state.data_ended()
        self._training.position.data_ended(cursor)

    def _stop_if_finished(self) -> None:
        """Stop before the first run if the restored training run is finished, by its checkpoint or by a hook."""
        state = self._training.loop_state
        if self._asked_if_finished or state.phase is not IDLE:
            return
        self._asked_if_finished = True
        session = self._sessions.session
        if state.runs or not session.was_restored:
            return
        why = self._training.position.why_finished
        if why is not None and (why != DATA_ENDED or not self._training.position.has_place):
            self._stop_as_finished(why)
            return
        hooks = self._schedule.all_hooks
        found = [(str(each), type(each.hook).__name__, each.hook.why_finished(session)) for each in hooks]
        # Decided here by all ranks, and not proposed: a stop that is proposed may let one more run be made.
        rows = session.ranks.gather([row for row in found if row[2] is not None], "whether the run is finished")
        for hook, name, reason in [row for rows_of_rank in rows for row in rows_of_rank][:1]:
            state.decide(Stop(f"{name}: {reason}", StoppedBy.HOOK))
            if session.ranks.is_chief:
                logger.warning(
                    "%s: this training run is finished, so until_stop yields nothing, and no run is made. To train on, "
                    "change the hook, or give another checkpoint_dir for a new training run",
                    hook,
                )

    def _stop_if_data_had_ended(self, cursor: Cursor) -> None:
        """Stop if the data had ended in the checkpoint, unless the outermost loop has more items now."""
        why = self._training.position.why_finished
        has_more = cursor.resumed.has_more
        if why is None or cursor.depth != 1 or has_more is None or self._training.loop_state.stop is not None:
            return
        if all(self._sessions.session.ranks.gather(has_more, "whether the data have more items")):
            self._training.position.train_on()
        else:
            self._stop_as_finished(why)

    def _stop_as_finished(self, why: str) -> None:
        """Stop, because the restored checkpoint is from the end of the training run."""
        state = self._training.loop_state
        # Decided here by all ranks, and not proposed: a stop that is proposed may let one more run be made.
        state.decide(Stop(why, StoppedBy.END))
        if self._sessions.session.ranks.is_chief:
            named = f"name its checkpoint, checkpoint_dir={self._sessions.restored_from!r}"
            more = "give it more data than before, such as a longer range, or use until_stop(..., resume=False)"
            ended, folder = why == DATA_ENDED, self._sessions.session.checkpoint_dir
            next_epoch = _ONE_LOOP if folder is not None and follows_another(folder) else ""
            logger.warning(
                _FINISHED,
                *("the data ended" if ended else why, state.global_step, more if ended else named, next_epoch),
            )

    def decide_finish(self, leaves_with_block: bool) -> str | None:
        """Return why the training run is finished, now that the loop closes without an error; ``None`` if it is not.

        Only a script that leaves the ``with`` block of the loop is known to have left the outermost loop for good:
        ``close()`` may be called in a ``finally``, after an error.
        """
        state, position = self._training.loop_state, self._training.position
        outermost = position.trained_loop
        if leaves_with_block:
            for cursor in position.open_loops:  # those whose generator a variable holds
                self._boundaries.close_loop(cursor)
        if outermost is None or state.failure is not None:
            return None
        if state.by_signal and position.stopped_at_end:
            return DATA_ENDED
        if state.stop is not None:
            return None
        if outermost.state is ENDED:
            return DATA_ENDED
        if not leaves_with_block:
            return None
        return f"the script left the outermost loop {outermost.where}"

    def enter_with_block(self) -> None:
        """Note that the loop was entered with ``with``."""
        self.is_in_with_block = True

    def _leave_at_signal(self) -> None:
        """Leave the ``with`` block of the loop if a signal has stopped it: the grace period is short.

        Code after the loops, such as a validation, would run with a part of an epoch.
        """
        state = self._training.loop_state
        if self.is_in_with_block and state.by_signal and state.phase is Phase.STOPPING:
            raise LeftBySignalError

    def refuse_run(self, call: str) -> None:
        """Raise the reason why no run can be made by ``call``, unless one more is allowed.

        If a signal has stopped the loop, in an item, leave the ``with`` block instead. The item has further runs, in a
        plain ``for`` or ``while``, so it is not done, and another process makes its runs again.
        """
        state = self._training.loop_state
        is_left = self.is_in_with_block and state.by_signal and state.phase is Phase.STOPPING
        if is_left and self._training.position.depth and not state.in_step_fn:
            self._boundaries.stop_at(Point.IN_ITEM)
            self._leave_at_signal()
        state.refuse(call, self._sessions.coord.raise_requested_exception)

    def repeated(self, iterable: Iterable[T], resume: bool, start: int | None = None) -> Generator[Any, None, None]:
        """Yield the items of ``iterable`` again and again until the loop stops: each pass is an epoch."""
        is_first = True  # an earlier process may have been done with that pass, which then yields nothing
        # A range, which a resumed process continues at its item, and no iterator such as itertools.count(), which it
        # could not. This is the longest range that len() accepts.
        for _ in self.until_stop(range(sys.maxsize), resume, None):
            is_empty = True
            for item in self.until_stop(iterable, resume, None, start):
                is_empty = False
                yield item
            if is_empty and not is_first and self._training.loop_state.stop is None:
                logger.warning(_NOTHING_TO_REPEAT)
                return
            is_first = False

    def _resume(self, cursor: Cursor, iterable: Iterable[T], resume: bool) -> Iterator[T]:
        """Return what is left of ``iterable``; nothing if a signal prevents it."""
        try:
            iterator = self._training.position.resume(cursor, iterable, resume, self._boundaries.notice_stop)
        except Exception as error:
            if isinstance(error, StopIteration) or not self._boundaries.notice_stop(error):
                raise
            iterator = iter(())
        self._training.loop_state.defer_lost_workers()  # now that a DataLoader has installed torch's handler
        return iterator

    def check_end(self) -> None:
        """Note, when the loop is closed, that the script has not come back to the loop of the checkpoint."""
        if self._training.loop_state.reason in ("data ended", "closed"):  # a stop may come before that loop
            self._training.position.give_up_repeating()
