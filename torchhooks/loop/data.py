"""Iterating over the data until the loop stops: what ``MonitoredLoop.until_stop`` does."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any, TypeVar

from torchhooks.common.log import logger
from torchhooks.lifecycle.ending import IDLE, RUNNING, LeftBySignalError, State, Stop, StoppedBy
from torchhooks.loop.between_runs import BetweenRuns
from torchhooks.position.place import Place
from torchhooks.position.position import Position
from torchhooks.position.progress import DataWaits
from torchhooks.position.resuming import name_of
from torchhooks.position.starting import ends_with_item

T = TypeVar("T")

_DATA_ENDED: Any = object()
_LEFT_AT_GUARD = (
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
_EMPTY = "%s yielded no item: check that its data are not empty, and not an iterator that is used up"


class Data:
    """The ``until_stop`` loops of one monitored loop.

    Args:
        between_runs: takes up stops, and recovers from errors.
        position: where the loops are in their data.
        waits: how long they have waited for their data.
    """

    def __init__(self, between_runs: BetweenRuns, position: Position, waits: DataWaits) -> None:
        self._between_runs = between_runs
        self._ending, self._schedule, self._items = between_runs.ending, between_runs.schedule, between_runs.items
        self._others = between_runs.peers
        self._position = position
        self._waits = waits
        self._stop_is_seen = False  # by the body of a loop, through should_stop()
        self._items_without_run = 0
        self._why_no_run: str | None = None
        self._stop_is_settled = False  # the calls for it were made, and the data go no further
        self._asked_if_finished = False
        self.is_in_with_block = False
        """Whether the loop was entered with ``with``, which an exception can leave."""

    def until_stop(
        self, iterable: Iterable[T], resume: bool, limit: int | None, site: object, start: int | None = None
    ) -> Generator[Any, None, None]:
        """Yield the items of ``iterable`` until the loop stops or the data end; with ``start``, numbered from it."""
        self._ending.check_not_ended("until_stop()")  # iterating over nothing would hide it
        self._items.end_epoch()
        self._stop_if_finished()
        is_between_runs = self._ending.state is IDLE and self._ending.stop is None
        others = self._others if is_between_runs else None  # inside a run, not all iterate
        if others is not None:
            limit = others.enter(iterable, limit)
        if self._is_halted():  # before iter(), which may draw random numbers
            self._cut_short()
            self._leave_at_signal()
            return
        schedule, position, ending = self._schedule, self._position, self._ending
        waits, items = self._waits, self._items
        waits.depth = depth = waits.depth + 1
        waiting, waited = items.waiting, waits.secs  # looked at before every item
        place = position.begin(iterable, ending.state is RUNNING, site)
        place.limit = limit
        item: Any = None
        try:
            iterator = self._iterator(place, iterable, resume)
            while True:
                again = False
                if schedule.pending or ending.stop is not None or waiting:
                    again = not self._settle(place)
                    if ending.stop is not None:
                        position.stop(place)
                        break
                if not again:
                    try:
                        if limit is not None and place.taken >= limit:
                            item = _DATA_ENDED
                        elif waited and depth in waited:
                            asked = time.monotonic()
                            item = next(iterator, _DATA_ENDED)
                            waited[depth] += time.monotonic() - asked
                        else:
                            item = next(iterator, _DATA_ENDED)
                    except Exception as error:
                        if not self._is_halted(error):
                            raise
                        continue  # settles the stop
                    if item is _DATA_ENDED:
                        if others is not None:
                            others.data_ended()
                        place.end(schedule.runs)
                        if not schedule.runs:
                            self._note_items(place, iterable)
                        if depth == 1:
                            ending.data_have_ended = True
                        break
                    place.current_item = item
                    runs = schedule.runs
                    if runs - place.runs > 1:
                        place.multiple_runs = True
                    place.runs = runs
                    place.taken += 1
                    if place.may_nest:
                        position.begin_item(place)
                    if ending.data_have_ended:
                        ending.data_have_ended = False
                # An item that was taken is always yielded, even if a stop was requested meanwhile: it would be lost.
                yield item if start is None else (start + place.taken - 1, item)
        finally:
            waits.depth -= 1
            self._leave(place)
        if ending.stop is not None and place.state.is_stopped:
            self._leave_at_signal()
        else:
            self._end_epoch(self._position.end_epoch(place))

    def _stop_if_finished(self) -> None:
        """Stop before the first run if a hook finds that the restored training run is finished."""
        if self._asked_if_finished or self._ending.state is not IDLE:
            return
        self._asked_if_finished = True
        session = self._between_runs.session
        if self._schedule.runs or not session.was_restored:
            return
        hooks = self._schedule.all_hooks
        found = [(str(each), type(each.hook).__name__, each.hook.why_finished(session)) for each in hooks]
        # Decided here by all ranks, and not proposed: a stop that is proposed may let one more run be made.
        rows = session.ranks.gather([row for row in found if row[2] is not None], "whether the run is finished")
        for hook, name, reason in [row for rows_of_rank in rows for row in rows_of_rank][:1]:
            self._ending.decide(Stop(f"{name}: {reason}", StoppedBy.HOOK))
            if session.ranks.is_chief:
                logger.warning(
                    "%s: this training run is finished, so until_stop yields nothing, and no run is made. To train on, "
                    "change the hook, or give another checkpoint_dir for a new training run",
                    hook,
                )

    def _leave_at_signal(self) -> None:
        """Leave the ``with`` block of the loop if a signal has stopped it: the grace period is short.

        Code after the loops, such as a validation, would run with a part of an epoch.
        """
        if self.is_in_with_block and self._ending.by_signal and self._ending.state is State.STOPPING:
            raise LeftBySignalError

    def repeated(
        self, iterable: Iterable[T], resume: bool, site: object, start: int | None = None
    ) -> Generator[Any, None, None]:
        """Yield the items of ``iterable`` again and again until the loop stops: each pass is an epoch."""
        is_first = True  # an earlier process may have been done with that pass, which then yields nothing
        for _ in self.until_stop(range(sys.maxsize), resume, None, (site, "passes")):
            is_empty = True
            for item in self.until_stop(iterable, resume, None, (site, "pass"), start):
                is_empty = False
                yield item
            if is_empty and not is_first and self._ending.stop is None:
                logger.warning(_NOTHING_TO_REPEAT)
                return
            is_first = False

    def _end_epoch(self, ended: int | None) -> None:
        """Call the hooks that are due at the end of an epoch, after which ``ended`` epochs have; ``None`` is no end."""
        if ended is None:
            return
        accumulated, due = self._schedule.accumulated, self._schedule.due_at_end_of(ended)
        accumulated.epoch_ended()  # first, so that a checkpoint from a call below says so
        if due and self._ending.state in (RUNNING, State.CLOSED):
            # The body left by a break, and the next run begins, or the loop closes: an error is the run's.
            self._between_runs.lifecycle.end_epoch(due)
            return
        while due and self._is_healthy():
            # Made again after a recovery, with another session.
            if self._between_runs.make(functools.partial(self._between_runs.lifecycle.end_epoch, due)):
                break
            accumulated.epoch_ended()  # of what the recovery restored

    def _iterator(self, place: Place, iterable: Iterable[Any], resume: bool) -> Iterator[Any]:
        """Return the items to yield at ``place``; none if a signal, or exactly ``StopIteration``, prevents it."""
        try:
            iterator = self._position.iterator(place, iterable, resume, self._is_halted)
        except Exception as error:
            if type(error) is StopIteration:  # in a generator, it would become a RuntimeError
                self._ending.fail(error)
            elif not self._is_halted(error):
                raise
            iterator = iter(())
        self._ending.defer_lost_workers()  # now that a DataLoader has installed torch's handler
        return iterator

    def _is_halted(self, error: Exception | None = None) -> bool:
        """Handle news, and return whether the loop stops.

        An ``error`` out of iterating over the data does not stop it, unless it may be due to a signal.
        """
        if error is not None:
            if not self._ending.is_due_to_signal(error):
                return False
            logger.warning(
                "the data raised an error after signal %s, which stops the loop", self._ending.signal, exc_info=error
            )
            self._schedule.set_pending()
        try:
            return self._between_runs.is_to_stop()
        except StopIteration as clean:  # out of a hook, while recovering from a thread's error
            if type(clean) is not StopIteration:
                raise
            return True

    def _note_items(self, place: Place, iterable: object) -> None:
        """Note that no run was made until the data of ``place``, an ``iterable``, ended."""
        if not place.is_in_position:
            return
        if place.has_new_item:
            self._items_without_run = place.taken if place.inner is None else self._items_without_run
        else:
            self._why_no_run = (_NONE_LEFT if place.resumed else _EMPTY) % name_of(iterable)

    def check_end(self) -> None:
        """Log warnings when the loop is closed: the data ended without a run, or were not resumed where they should."""
        # A stop may come before the loop that is to be resumed.
        had_time = self._ending.reason in ("data ended", "closed")
        is_explained = not had_time or not self._position.check_reached()
        if self._items_without_run and not self._schedule.runs:
            logger.warning(
                "until_stop yielded %d items until the data ended, but there was no run, so no hook was called and no "
                "step was counted: call loop.run(...) instead of the step, or put the step into with loop.step()",
                self._items_without_run,
            )
        elif self._why_no_run and not self._schedule.runs and not is_explained:
            logger.warning("no run was made, because %s", self._why_no_run)

    def stop_is_seen(self) -> None:
        """Note that the body of a loop was told to stop, and make the calls for a stop: the body may leave the loop."""
        if self._items.depth() and not self._stop_is_settled and not self._stop_is_seen and self._is_healthy():
            self._stop_is_seen = True
            self._between_runs.make(self._items.stop)

    def _cut_short(self) -> None:
        """Make the calls for a stop now: the body of an outer loop continues without the items of an inner one."""
        if self._ending.state is RUNNING:
            return  # in a run, as in the evaluation of a hook: the item of that run settles the stop
        self._position.skip_inner()
        self.stop_is_seen()
        self._stop_is_settled = True

    def _settle(self, place: Place) -> bool:
        """Make the calls that wait for the end of an item, and at a stop the calls for a stop.

        Returns:
            False if one of them failed and the loop recovered, so that the item has to be yielded again.
        """
        # A body that was told to stop may have left the item early.
        self._items.end_epoch()
        place.settle(done=place.has_new_item and not self._stop_is_seen)
        continues = self._items.waiting and self._ending.stop is None
        if continues and ends_with_item(place, knows_length=self._others is None):
            self._items.wait_for_outer()
        due = self._items.due()
        if place.is_in_position and self._is_healthy() and due and not self._between_runs.make(self._items.make_due):
            place.settle(done=False)
            return False
        if self._is_halted() and place.is_in_position and not self._stop_is_settled and self._is_healthy():
            self._stop_is_settled = True
            self._between_runs.make(functools.partial(self._items.stop, due))
        if self._ending.stop is None:
            place.settle(done=False)  # another item may be taken, which does not change the state
        return True

    def _is_healthy(self) -> bool:
        """Return whether calls can be made now: the session works, and no run is in progress."""
        return self._ending.state in (State.IDLE, State.STOPPING)

    def _leave(self, place: Place) -> None:
        stopping = self._ending.stop is not None or self._ending.signal is not None
        if stopping and self._stop_is_seen:
            if place.is_in_position and not place.state.is_stopped and not self._stop_is_settled:
                logger.warning(_LEFT_AT_GUARD, self._schedule.runs)
            self._stop_is_settled = True  # the body left because of the stop
        # A body that leaves for a reason of its own has ended this loop, even if a stop was requested in its last run.
        is_stop = stopping and (place.state.is_stopped or self._stop_is_seen)
        self._position.leave(place, is_stop)
        if place.state.is_left and not is_stop and self._is_healthy():
            ended = self._position.end_epoch(place)
            if ended is not None:  # a break may leave several loops, of which the innermost is the epoch
                self._items.owe_epoch_end(functools.partial(self._end_epoch, ended))
                self._schedule.interrupt()  # the next run makes the call first, if nothing does so before
        if self._items.waiting and not self._items.depth():
            self._schedule.set_pending()
