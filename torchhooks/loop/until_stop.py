"""Iterating over the data until the loop stops: what ``MonitoredLoop.until_stop`` does."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Container, Generator, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from torchhooks.common.log import logger
from torchhooks.common.source import Line, leaves_at_end_of_body, lines_of_script
from torchhooks.data.cursor import ENDED, IN_ITEM, Cursor, name_of, shortened_limit
from torchhooks.data.position import DATA_ENDED, Point, Return
from torchhooks.lifecycle.loop_state import IDLE, RUNNING, LeftBySignalError, Phase, Stop, StoppedBy
from torchhooks.loop.open_loops import follows_another
from torchhooks.loop.runner import Runner
from torchhooks.ranks.agreement import HAS_CALLS, HAS_EPOCH

T = TypeVar("T")

_LEFT_AT_SHOULD_STOP = (
    "the body left until_stop because should_stop() was true after run %d. What else it does with an item is missing "
    "for the last one, in the checkpoint and after resuming. until_stop ends by itself: leave out the break, or put it "
    "at the end of the body"
)
_NOTHING_TO_REPEAT = (
    "until_stop(..., repeat=True) got no item in a whole pass, so it ends: give it an iterable that can be iterated "
    "again, such as a list or a DataLoader, and not an iterator"
)
_NONE_LEFT = (
    "%s has no item after the last one of the checkpoint. To train on, give it more items, or use "
    "until_stop(..., resume=False)"
)
_FINISHED = (
    "this training run is finished: %s, at step %d. So until_stop yields nothing, and no run is made. To train on, %s; "
    "for a new training run, give another checkpoint_dir%s"
)
_ONE_LOOP = ". If this loop is for the next epoch, create one loop for all epochs instead"
_EMPTY = "%s yielded no item: check that its data are not empty, and not an iterator that is used up"


class DataLoops:
    """The ``until_stop`` loops of one monitored loop.

    The generators of :meth:`until_stop` take items, make the calls that wait for the end of an item, notice the end of
    an epoch, and take up stops.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner, self._state, self._schedule = runner, runner.state, runner.schedule
        self._rank_sync = runner.rank_sync
        self._deferred, self._position = runner.deferred, runner.sessions.position
        self._waits = runner.sessions.services.data_waits
        # Where the body was told to stop by should_stop(), after which it may leave its item early.
        self._told_to_stop_at: list[Line] = []
        self._items_without_run = 0
        self._why_no_run: str | None = None
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
            state, waiting = self._state, self._deferred.waiting  # the dict itself: it is never replaced by another
            try:
                for item in self._items(cursor, iterable, resume):
                    # An item that was taken is always yielded, even if a stop was requested meanwhile, or it is lost.
                    cursor.take(item, state.runs)
                    state.data_have_ended = False
                    given = item if start is None else (start + cursor.taken - 1, item)
                    yield given
                    # The body asks for the next item. Most of the time, nothing has to be done before that.
                    if cursor.may_nest or state.pending or waiting or state.stop is not None:
                        while not self._between_items(cursor):
                            yield given  # again: a call failed, and the loop has recovered
                        if state.stop is not None:
                            if state.phase is Phase.FAILED:
                                state.check_not_ended("until_stop()")  # to end without a word would hide it
                            break
            finally:
                self._waits.depth -= 1
                self._close(cursor)
            # Not after a break, at which Python closes the generator: then the next call to the loop, or its close,
            # makes the call for the end of the epoch.
            if self._position.is_at_stop:
                self._leave_at_signal()
            else:
                self._deferred.make_owed_epoch_end()
        except StopIteration as error:  # of a call, in any of these places
            self._end_because_of(error)

    def _open(self, iterable: Iterable[T], limit: int | None) -> Cursor | None:
        """Return the cursor of a loop that begins; ``None`` if a stop keeps it from beginning."""
        state = self._state
        state.check_not_ended("until_stop()")  # iterating over nothing would hide it
        self._deferred.make_owed_epoch_end()
        self._stop_if_finished()
        is_between_runs = state.phase is IDLE and state.stop is None
        if self._rank_sync is not None and is_between_runs:  # inside a run, not all ranks iterate
            limit = self._rank_sync.enter(iterable, limit, self._position.depth + 1)
        if self._notice_stop():  # before iter(), which may draw random numbers
            self._stop_before_loop()
            self._raise_parting()
            self._leave_at_signal()
            return None
        self._waits.depth += 1
        cursor = self._position.open(iterable, state.phase is RUNNING)
        cursor.limit = shortened_limit(cursor.depth, limit)
        return cursor

    def _items(self, cursor: Cursor, iterable: Iterable[T], resume: bool) -> Generator[T, None, None]:
        """Take the items that are left, until the data end or a signal ends them, and measure how long that takes."""
        waited, depth = self._waits.secs, self._waits.depth  # the dict itself: it is never replaced by another
        try:
            rest = self._resume(cursor, iterable, resume)
            iterator = rest if cursor.limit is None else islice(rest, max(cursor.limit - cursor.taken, 0))
            self._stop_if_data_had_ended(cursor)
            self._between_items(cursor)  # whatever it returns: there is no item yet that would have to be yielded again
            if self._state.stop is not None:
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
                if not self._notice_stop(error):
                    raise
                self._between_items(cursor)
            else:
                if self._rank_sync is not None:
                    self._rank_sync.warn_of_items_left(iterable, rest, cursor.taken)
                self._data_ended(cursor, iterable)
        except StopIteration as error:
            self._end_because_of(error)

    def _end_because_of(self, error: StopIteration) -> None:
        """End the loop because of ``error``, which no generator can raise; one of a subclass is raised at its close."""
        if type(error) is StopIteration:
            self._state.end_cleanly(error)
        else:
            self.unraised = error
            self._state.fail(error)

    def _between_items(self, cursor: Cursor) -> bool:
        """Make the calls that wait for the end of an item, and take up a stop: nowhere else.

        Returns:
            False if one of the calls failed and the loop recovered, so that the item has to be yielded again.
        """
        calls = self._deferred
        # An inner loop that the body left by break, with its generator still held, ends with the item.
        if cursor.may_nest:
            self._close_inner(cursor)
        # That may have ended an epoch. Its hooks come before the saves below, which contain what they do.
        calls.make_owed_epoch_end()
        # From here on the item is done, for the saves too.
        cursor.item_done()
        # At the end of an inner loop, the code after it still belongs to the item of the outer one. Not at a stop,
        # which leaves no outer item to wait for.
        if calls.waiting and self._state.stop is None and cursor.depth > 1 and cursor.ends_with_item:
            calls.wait_for_outer()
        # After an error in one of the calls, the restored session has not seen the item: it is made again.
        done: list[object] = []
        is_due = calls.due() and cursor.is_in_position and self._is_healthy()
        if is_due and not self._runner.make(lambda: done.extend(calls.make_due())):
            cursor.state = IN_ITEM
            return False
        # After these calls, in which the ranks gather. Before looking for a stop, which one of them may ask for.
        if self._rank_sync is not None and self._meets_for_next(cursor):
            self._rank_sync.next_item()
        # Last, because the calls above may ask for a stop. It saves here, except what has just been saved.
        if self._notice_stop() and cursor.is_in_position and not self._position.is_at_stop:
            if self._has_parted:
                self.save_at_parting()  # with the calls that were just made, as on the rank that has left its loops
            else:
                self._position.stop_at(Point.BETWEEN_ITEMS)
                self._make_stop_calls(done)
        self._raise_parting()
        return True

    def _meets_for_next(self, cursor: Cursor) -> bool:
        """Return whether the ranks meet where the body asks for the next item of ``cursor``.

        They do in a loop that has inner ones, so that no body begins on any rank if a stop was asked for since the last
        run, and that a rank which has left the loop is noticed.
        """
        state = self._state
        if not (cursor.nests and cursor.is_in_position and cursor.has_new_item):
            return False
        return not cursor.ends_with_item and state.phase is IDLE and state.stop is None

    @property
    def _has_parted(self) -> bool:
        return self._rank_sync is not None and self._rank_sync.has_parted

    def _raise_parting(self) -> None:
        if self._rank_sync is not None:
            self._rank_sync.raise_parting()

    def _data_ended(self, cursor: Cursor, iterable: object) -> None:
        if self._rank_sync is not None and cursor.is_in_position:
            self._rank_sync.data_ended(cursor.depth)
        if cursor.is_in_position and not self._state.runs:
            self._note_items(cursor, iterable)
        cursor.end()
        if cursor.depth == 1:
            self._state.data_have_ended = True
        self._position.data_ended(cursor)

    def _close_inner(self, cursor: Cursor) -> None:
        """Close the loops that are still open inside of ``cursor``, whose body asks for its next item.

        The body left them by a ``break``, and a variable still refers to the generator. If that asks for another item
        all the same, the two are iterated side by side.
        """
        if cursor.is_side_by_side:
            self._position.drop(cursor)
            return
        for inner in self._position.inside(cursor):
            inner.outlive_item()
            self._close(inner)
        self._position.item_done(cursor)

    def _close(self, cursor: Cursor) -> None:
        """Close a loop whose data ended, which stops, or which the body left. The end of an epoch is noticed here only.

        The hooks are called for the end of the epoch right after the loop; if the body left the loop, Python would
        drop their errors there, and so :class:`torchhooks.data.deferred.DeferredCalls` says when they are called.
        """
        if not self._position.is_open(cursor):
            return
        if self._told_to_stop_at and cursor.state is IN_ITEM:
            asked, self._told_to_stop_at = self._told_to_stop_at, []
            if not leaves_at_end_of_body(asked, lines_of_script()[0]):
                logger.warning(_LEFT_AT_SHOULD_STOP, self._state.runs)
        self._position.close(cursor)
        if self._rank_sync is not None and cursor.depth == 1:
            left = ""
            if cursor.left and self._state.stop is None:
                what, line = "the loop over epochs" if cursor.nests else "its loop", lines_of_script()[0]
                left = f"left {what} {line.way_out()} after run {self._state.runs}, {line}"
            self._rank_sync.loops_are_over(left)
        # At a stop, the epoch goes on in another process. But a body that leaves for a reason of its own has ended its
        # loop, even if a stop was requested in its last run.
        if not self._position.is_at_stop and self._is_healthy():
            ended = self._position.count_epoch(cursor)
            if ended is not None:  # a break may leave several loops, of which the innermost is the epoch
                self._deferred.owe_epoch_end(functools.partial(self._call_epoch_hooks, ended))
                if cursor.left:
                    self._state.interrupt()  # the next run makes the call first, if nothing does so before
        if self._deferred.waiting and not self._deferred.depth():
            self._state.set_pending()

    def _stop_if_finished(self) -> None:
        """Stop before the first run if the restored training run is finished, by its checkpoint or by a hook."""
        if self._asked_if_finished or self._state.phase is not IDLE:
            return
        self._asked_if_finished = True
        session = self._runner.session
        if self._state.runs or not session.was_restored:
            return
        why = self._position.why_finished
        if why is not None and (why != DATA_ENDED or not self._position.has_place):
            self._stop_as_finished(why)
            return
        hooks = self._schedule.all_hooks
        found = [(str(each), type(each.hook).__name__, each.hook.why_finished(session)) for each in hooks]
        # Decided here by all ranks, and not proposed: a stop that is proposed may let one more run be made.
        rows = session.ranks.gather([row for row in found if row[2] is not None], "whether the run is finished")
        for hook, name, reason in [row for rows_of_rank in rows for row in rows_of_rank][:1]:
            self._state.decide(Stop(f"{name}: {reason}", StoppedBy.HOOK))
            if session.ranks.is_chief:
                logger.warning(
                    "%s: this training run is finished, so until_stop yields nothing, and no run is made. To train on, "
                    "change the hook, or give another checkpoint_dir for a new training run",
                    hook,
                )

    def _stop_if_data_had_ended(self, cursor: Cursor) -> None:
        """Stop if the data had ended in the checkpoint, unless the outermost loop has more items now."""
        why = self._position.why_finished
        has_more = cursor.resumed.has_more
        if why is None or cursor.depth != 1 or has_more is None or self._state.stop is not None:
            return
        if all(self._runner.session.ranks.gather(has_more, "whether the data have more items")):
            self._position.train_on()
        else:
            self._stop_as_finished(why)

    def _stop_as_finished(self, why: str) -> None:
        """Stop, because the restored checkpoint is from the end of the training run."""
        # Decided here by all ranks, and not proposed: a stop that is proposed may let one more run be made.
        self._state.decide(Stop(why, StoppedBy.END))
        if self._runner.session.ranks.is_chief:
            named = f"name its checkpoint, checkpoint_dir={self._runner.sessions.restored_from!r}"
            more = "give it more data than before, such as a longer range, or use until_stop(..., resume=False)"
            ended, folder = why == DATA_ENDED, self._runner.session.checkpoint_dir
            next_epoch = _ONE_LOOP if folder is not None and follows_another(folder) else ""
            logger.warning(
                _FINISHED,
                *("the data ended" if ended else why, self._state.global_step, more if ended else named, next_epoch),
            )

    def decide_finish(self, leaves_with_block: bool) -> str | None:
        """Return why the training run is finished, now that the loop closes without an error; ``None`` if it is not.

        Only a script that leaves the ``with`` block of the loop is known to have left the outermost loop for good:
        ``close()`` may be called in a ``finally``, after an error.
        """
        state, position = self._state, self._position
        outermost = position.trained_loop
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
        for cursor in position.open_loops:  # those whose generator a variable holds
            self._close(cursor)
        return f"the script left the outermost loop {outermost.where}"

    def _leave_at_signal(self) -> None:
        """Leave the ``with`` block of the loop if a signal has stopped it: the grace period is short.

        Code after the loops, such as a validation, would run with a part of an epoch.
        """
        if self.is_in_with_block and self._state.by_signal and self._state.phase is Phase.STOPPING:
            raise LeftBySignalError

    def refuse_run(self, call: str) -> None:
        """Raise the reason why no run can be made by ``call``, unless one more is allowed.

        If a signal has stopped the loop, in an item, leave the ``with`` block instead. The item has further runs, in a
        plain ``for`` or ``while``, so it is not done, and another process makes its runs again.
        """
        state, position = self._state, self._position
        is_left = self.is_in_with_block and state.by_signal and state.phase is Phase.STOPPING
        if is_left and self._deferred.depth() and not self._runner.in_step_fn:
            if not position.is_at_stop:
                position.stop_at(Point.IN_ITEM)
                self._make_stop_calls()
            self._leave_at_signal()
        self._runner.refuse(call)

    def repeated(self, iterable: Iterable[T], resume: bool, start: int | None = None) -> Generator[Any, None, None]:
        """Yield the items of ``iterable`` again and again until the loop stops: each pass is an epoch."""
        is_first = True  # an earlier process may have been done with that pass, which then yields nothing
        for _ in self.until_stop(range(sys.maxsize), resume, None):
            is_empty = True
            for item in self.until_stop(iterable, resume, None, start):
                is_empty = False
                yield item
            if is_empty and not is_first and self._state.stop is None:
                logger.warning(_NOTHING_TO_REPEAT)
                return
            is_first = False

    def _call_epoch_hooks(self, ended: int) -> None:
        """Call the hooks that are due at the end of an epoch, after which ``ended`` epochs have."""
        if not self._state.global_step:  # in a later epoch, the few runs since a resume say nothing
            self._runner.warn_of_no_step()
        accumulated, due = self._schedule.accumulated, self._schedule.due_at_end_of(ended)
        accumulated.epoch_ended()  # first, so that a checkpoint from a call below says so
        if self._rank_sync is not None:
            self._rank_sync.epoch_ends([slot.hook for slot in due])
        if not due:
            self._schedule.plan(())  # after a break, no run is idle until the schedule is made again
        if due and self._state.phase in (RUNNING, Phase.CLOSED):
            # The body left by a break, and the next run begins, or the loop closes: an error is the run's.
            self._runner.run_epoch_hooks(due)
            return
        while due and self._is_healthy():
            # Made again after a recovery, with another session.
            if self._runner.make(functools.partial(self._runner.run_epoch_hooks, due)):
                break
            accumulated.epoch_ended()  # of what the recovery restored

    def _resume(self, cursor: Cursor, iterable: Iterable[T], resume: bool) -> Iterator[T]:
        """Return what is left of ``iterable``; nothing if a signal prevents it."""
        try:
            iterator = self._position.resume(cursor, iterable, resume, self._notice_stop)
        except Exception as error:
            if isinstance(error, StopIteration) or not self._notice_stop(error):
                raise
            iterator = iter(())
        self._state.defer_lost_workers()  # now that a DataLoader has installed torch's handler
        return iterator

    def _notice_stop(self, error: Exception | None = None) -> bool:
        """Take up what threads and signals have asked for since the last call, and return whether the loop stops.

        An ``error`` out of iterating over the data does not stop it, unless it may be due to a signal.
        """
        if error is not None:
            if not self._state.is_due_to_signal(error):
                return False
            logger.warning(
                "the data raised an error after signal %s, which stops the loop", self._state.signal, exc_info=error
            )
            self._state.set_pending()
        try:
            return self._runner.check_for_stop()
        except StopIteration as clean:  # out of a hook, while recovering from a thread's error
            if type(clean) is not StopIteration:
                raise
            return True

    def _note_items(self, cursor: Cursor, iterable: object) -> None:
        """Note that no run was made until the data of ``cursor``, an ``iterable``, ended."""
        if cursor.has_new_item:
            self._items_without_run = cursor.taken if cursor.inner is None else self._items_without_run
        else:
            self._why_no_run = (_NONE_LEFT if cursor.resumed.items else _EMPTY) % name_of(iterable)

    def check_end(self) -> None:
        """Log warnings when the loop is closed: the data ended without a run, or were not resumed where they should."""
        # A stop may come before the loop that is to be resumed.
        had_time = self._state.reason in ("data ended", "closed")
        if had_time:
            self._position.give_up_repeating()
        position = self._position
        is_explained = not had_time or position.way_back is Return.MISSED or position.why_finished is not None
        if self._runner.caught.count:
            return  # there were runs, which failed
        if self._items_without_run and not self._state.global_step:
            logger.warning(
                "until_stop yielded %d items until the data ended, but there was no run, so no hook was called and no "
                "step was counted: call loop.run(...) instead of the step, or put the step into with loop.step()",
                self._items_without_run,
            )
        elif self._why_no_run and not self._state.runs and not is_explained:
            logger.warning("no run was made, because %s", self._why_no_run)

    def stop_is_seen(self) -> None:
        """Note that the body of a loop was told to stop, and make the calls for a stop: the body may leave the loop."""
        if self._deferred.depth() and not self._position.is_at_stop and self._is_healthy():
            self._told_to_stop_at = lines_of_script()
            self._position.stop_at(Point.AT_SHOULD_STOP)
            self._make_stop_calls()

    # With several ranks, where the loop closes on this one: see RankSync.close().

    def due_at_close(self) -> int:
        """Return which calls are due: HAS_CALLS for the end of an item, which this rank has left; HAS_EPOCH."""
        if not self._is_healthy():
            return 0
        outermost = self._position.trained_loop
        inner = None if outermost is None else outermost.inner
        # If the body has left an inner loop too, or is still in one, another rank may be elsewhere in its data.
        is_alike = not self._deferred.depth() and not (inner is not None and inner.left)
        has_calls = self._deferred.waiting and is_alike
        return (HAS_CALLS if has_calls else 0) | (HAS_EPOCH if self._deferred.epoch_end is not None else 0)

    def make_at_close(self, calls: int) -> None:
        """Make these ``calls``."""
        if calls & HAS_EPOCH:
            self._deferred.make_owed_epoch_end()
        elif calls & HAS_CALLS:
            self._runner.make(self._deferred.make_all)

    def save_at_parting(self) -> None:
        """Make the calls for a stop, where the ranks part, if all of them are at the same place in their data.

        Otherwise they could not resume from what is saved here.
        """
        if not self._position.is_at_stop:
            self._position.stop_at(Point.IN_BODY)
            places = self._runner.session.ranks.gather(self._position.place_of_stop, "where the ranks part")
            if places.count(places[0]) == len(places):
                self._make_stop_calls()

    def _stop_before_loop(self) -> None:
        """Take up a stop that keeps an ``until_stop`` from beginning."""
        if self._state.phase is RUNNING:
            return  # in a run, as in the evaluation of a hook: the item of that run takes up the stop
        if self._has_parted:
            self.save_at_parting()  # the loop is begun on no other rank, so its position is none
        elif not self._position.is_at_stop:
            self._position.stop_at(Point.BEFORE_LOOP)
            if self._deferred.depth():
                self._make_stop_calls()

    def _make_stop_calls(self, done: Container[object] = ()) -> None:
        """Make the calls for a stop, such as saves, except of those in ``done``, who have just done the same."""
        if self._is_healthy():
            self._runner.make(functools.partial(self._deferred.stop, done))

    def _is_healthy(self) -> bool:
        """Return whether calls can be made now: the session works, and no run is in progress."""
        return self._state.phase in (Phase.IDLE, Phase.STOPPING)
