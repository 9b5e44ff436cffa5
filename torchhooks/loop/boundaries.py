"""What happens between two runs, and in which order.

A run ends, the body of ``until_stop`` asks for its next item, an epoch ends, the script notices a stop, a function of
``run_step_fn`` returns, the loop closes: at each of these boundaries some of the lines below are due. The order is the
same at all of them. An x says at which boundary a line is due, and the last column why it comes before those below.

=== ============================= === ==== ===== ==== ==== ===== =======================================================
no  line                          run item epoch stop func close because
=== ============================= === ==== ===== ==== ==== ===== =======================================================
1   checks of the first runs       x                             what they find is an error of the script, not of a hook
2   values                         x                             a callback of ``when_ready`` may ask for a stop
3   triggers                       x                             a hook that is asked for is due in the next run
4   inner loops left by break           x                        one of them may end an epoch
5   hooks of the epoch                  x    x     x         x   a checkpoint contains what they do
6   calls of the item              x    x                    x   a stop saves only what was not saved just now
7   meeting of the ranks                x                        one of them may ask for a stop
8   caught errors, stop requests   x    x          x    x        the ranks agree on a stop, and it ends the threads
9   agreement of the ranks         x    x          x             a rank waits for the others before it leaves the run
10  the run is over                x                    x        in a run, a thread's error is not recovered from
11  errors of threads              x    x          x    x        one of them may stop the loop
12  place of the stop                   x          x             the calls save it
13  calls for the stop                  x          x             the ranks part with what these save
14  parting of the ranks                x
=== ============================= === ==== ===== ==== ==== ===== =======================================================

The columns are methods of :class:`Boundaries`: ``end_run`` with ``after_run``, ``end_item``, ``end_epoch``,
``should_stop``, ``end_step_fn`` and ``close``. Where an ``until_stop`` begins, the lines of the column ``stop`` are
due, and where a run begins, line 5.

An error of lines 1 to 9 at the end of a run is one of the run, which the loop may recover from. An error of a hook at
another boundary is never recovered from: it is left to the script, and exactly ``StopIteration`` ends the loop cleanly.
If the script catches an error, the loop is as it was before the run or the calls, and line 8 notices it. At the close,
each call is made, and the errors are collected.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial

from torchhooks.common.errors import Attempts
from torchhooks.common.log import logger
from torchhooks.common.source import Line, leaves_at_end_of_body, lines_of_script
from torchhooks.data.cursor import IN_ITEM, Cursor
from torchhooks.data.position import Point
from torchhooks.loop.epoch_end import EpochEnd
from torchhooks.loop.rank_sync import RankSync
from torchhooks.loop.recoveries import Recoveries
from torchhooks.loop.schedule import Schedule
from torchhooks.progress.loop_state import IDLE, RUNNING, Phase
from torchhooks.progress.training_state import TrainingState
from torchhooks.ranks.agreement import HAS_CALLS, HAS_EPOCH

_LEFT_AT_SHOULD_STOP = (
    "the body left until_stop because should_stop() was true after run %d. What else it does with an item is missing "
    "for the last one, in the checkpoint and after resuming. until_stop ends by itself: leave out the break, or put it "
    "at the end of the body"
)


class Boundaries:
    """Does what is due between two runs of one loop, in the order of this module's table.

    Args:
        training: the state of the loop.
        schedule: the hooks, and when one is due.
        rank_sync: keeps the loop in step with the other ranks; ``None`` in a process that is alone.
        recoveries: recovers from an error, or leaves it to the script.
        epoch_end: calls the hooks for the end of an epoch.
    """

    def __init__(
        self,
        training: TrainingState,
        schedule: Schedule,
        rank_sync: RankSync | None,
        recoveries: Recoveries,
        epoch_end: EpochEnd,
    ) -> None:
        self._training, self._schedule, self._rank_sync = training, schedule, rank_sync
        self._recoveries, self._epoch_end = recoveries, epoch_end
        # Where the body was told to stop by should_stop(), after which it may leave its item early.
        self._told_to_stop_at: list[Line] = []

    # -- the boundaries -----------------------------------------------------------------------------------------------

    def end_run(self) -> None:
        """End a run that has something to do at its end. An error is one of the run; :meth:`after_run` follows."""
        self._training.loop_state.begin_end_of_run()  # first of all: a thread or a signal may set it again at any time
        self._make_checks()  # before the callbacks: what these find is an error of the script
        self._take_values()  # before the requests: a callback may ask for a stop
        self._take_triggers()  # before the calls of the item: what is asked for from here on is due in the next run
        self._make_calls_of_left_item()  # before the requests: a call may ask for a stop
        self._take_up()  # before the ranks, which agree on a stop
        self._keep_promise_to_ranks()

    def after_run(self) -> None:
        """Leave a run that :meth:`end_run` has ended. An error is not one of the run, which is not made again."""
        self._run_is_over()  # first: in a run, the loop does not recover from a thread's error
        self._recover_from_thread()

    def end_item(self, cursor: Cursor) -> None:
        """Do what is due where the body of the loop of ``cursor`` asks for its next item, also for the first one."""
        self._close_inner(cursor)  # before the hooks of the epoch: this may end it
        self.end_epoch()  # before the calls of the item: a checkpoint contains what these hooks do
        saved = self._end_item(cursor)  # before the stop, at which only the others save
        self._meet_for_next(cursor)  # after the calls, in which the ranks gather
        if self.notice_stop() and cursor.is_in_position:
            self.stop_at(Point.BETWEEN_ITEMS, saved)
        self.raise_parting()  # last: the ranks part with a checkpoint

    def end_epoch(self) -> None:
        """Call the hooks for the end of an epoch, unless that was done. It does not replace the session."""
        ended = self._training.agenda.take_epoch()  # first: a hook may come here again, as by evaluation.values
        if ended is not None and self._training.loop_state.phase is not Phase.FAILED:
            self._make(partial(self._epoch_end.call, ended))

    def should_stop(self) -> bool:
        """Do what is due where the script asks whether to stop, and return the answer."""
        if self._training.agenda.epochs_ended is not None:
            self.end_epoch()  # before the stop: a checkpoint contains what these hooks do
        is_stopping = self._notice_stop()
        if is_stopping:
            self.stop_at(Point.AT_SHOULD_STOP)
        return is_stopping

    def end_step_fn(self) -> None:
        """Do what is due after a function of ``run_step_fn``, whose errors the loop would have recovered from."""
        self._take_up()  # before the threads, which a stop ends
        self.after_run()

    def close(self, attempt: Attempts) -> None:
        """Make the calls that wait, now that the loop closes. Each is made, though others fail."""
        attempt(self.end_epoch)
        for who in self._training.agenda.due_at(0):
            attempt(self._training.agenda.make_item_calls, [who], [])

    # -- their lines --------------------------------------------------------------------------------------------------

    def _make(self, calls: Callable[[], object]) -> None:
        """Make ``calls`` between two runs: the only way to call a hook there.

        An error is left to the script, and never recovered from. Exactly ``StopIteration`` ends the loop cleanly. If
        a run begins, it is raised, as another ``StopIteration`` of the run; else there is no code of the script that
        could catch it. If the loop closes, an error is raised as it is.
        """
        state, rank_sync = self._training.loop_state, self._rank_sync
        if state.phase is Phase.CLOSED:
            calls()
            return
        begins_run = state.begin_calls()  # none of the calls may begin a run
        try:
            if rank_sync is None or begins_run:
                calls()
            else:
                with rank_sync.calls_between_runs():
                    calls()
        except BaseException as error:
            if type(error) is StopIteration and not begins_run:
                state.void_run()
                state.end_cleanly(error)
            else:
                self._recoveries.leave_between_runs(error)
                raise
        finally:
            # If a run begins, the phase is that of the run, which leaves it at its own end.
            if not begins_run:
                state.run_is_over()

    def _make_checks(self) -> None:
        checks = self._training.agenda.run_calls
        for check in [*checks]:
            if check():  # if it raises, it is made again, and so are those after it
                checks.remove(check)
        # The next run may be an idle one, whose end would not come here without this.
        if checks:
            self._training.loop_state.set_pending()

    def _take_values(self) -> None:
        readback = self._training.readback
        if readback.waiting:
            # First, because a callback may raise. The values after it still need the end of a later run.
            self._training.loop_state.set_pending()
            readback.end_run()

    def _take_triggers(self) -> None:
        if self._schedule.is_triggered_externally:
            self._schedule.take_triggers()

    def _make_calls_of_left_item(self) -> None:
        """Make the calls of an item that the body left by ``break``: no loop asks for another item."""
        if self._training.agenda.item_calls and not self._training.agenda.depth():
            self._make_all_item_calls()

    def _make_all_item_calls(self) -> None:
        self._training.agenda.make_item_calls(self._training.agenda.due_at(0), [])

    def _end_item(self, cursor: Cursor) -> list[object]:
        """Make the calls that wait for the end of the item; return who has nothing left to do at a stop in it."""
        state = self._training.loop_state
        cursor.item_done()  # first: a checkpoint that one of the calls saves contains the item
        agenda, saved = self._training.agenda, list[object]()
        if not (agenda.item_calls and cursor.is_in_position and state.is_between_runs):
            return saved
        # At the end of an inner loop, the code after it still belongs to the item of the outer one. Not at a stop,
        # which leaves no outer item to wait for.
        if state.stop is None and cursor.depth > 1 and cursor.ends_with_item:
            agenda.postpone(agenda.depth())
        if due := agenda.due_at(agenda.depth()):
            self._make(partial(agenda.make_item_calls, due, saved))
        return saved

    def _meet_for_next(self, cursor: Cursor) -> None:
        """Meet the other ranks, if the body asks for the next item of a loop that has inner ones.

        So no body begins on any rank if a stop was asked for since the last run, and a rank that has left the loop is
        noticed.
        """
        state = self._training.loop_state
        if self._rank_sync is None or not (cursor.nests and cursor.is_in_position and cursor.has_new_item):
            return
        if not cursor.ends_with_item and state.phase is IDLE and state.stop is None:
            self._rank_sync.next_item()

    def _take_up(self) -> None:
        """Take up what has come since the last time: an error that the script has caught, and requests to stop."""
        self._recoveries.caught.look()
        self._training.loop_state.take_up_requests()

    def notice_stop(self, error: Exception | None = None) -> bool:
        """Take up what threads and signals have asked for since the last call, and return whether the loop stops.

        An ``error`` out of iterating over the data does not stop it, unless it may be due to a signal.
        """
        state = self._training.loop_state
        if error is not None:
            if not state.is_due_to_signal(error):
                return False
            logger.warning(
                "the data raised an error after signal %s, which stops the loop", state.signal, exc_info=error
            )
            state.set_pending()
        try:
            return self._notice_stop()
        except StopIteration as clean:  # out of a hook, while recovering from a thread's error
            if type(clean) is not StopIteration:
                raise
            return True

    def _notice_stop(self) -> bool:
        state = self._training.loop_state
        # ``pending`` stays set: at the end of a run there is more to do than here, and only that end clears it.
        if state.stop is None and state.pending:
            self._take_up()
            if self._rank_sync is not None:
                self._rank_sync.check()  # before the threads: a rank that failed is why those of this one fail
            self._recover_from_thread()
        return state.stop is not None

    def _keep_promise_to_ranks(self) -> None:
        if self._rank_sync is not None:
            self._rank_sync.end_run()

    def _run_is_over(self) -> None:
        """Leave the run, which went well: the next error begins a new series of recoveries, also one of a thread."""
        state = self._training.loop_state
        state.run_is_over()
        if not state.in_step_fn:  # which is called again as a whole, so it has to succeed as a whole
            self._recoveries.policy.run_went_well()

    def _recover_from_thread(self) -> None:
        error = self._recoveries.error_of_thread()
        # Of several ranks, none replaces its session.
        if error is not None and self._training.agenda.item_calls and self._rank_sync is None:
            # First the calls of the session that is about to be replaced.
            self._make(self._make_all_item_calls)
            error = self._recoveries.error_of_thread()  # one of them may have ended the loop
        if error is not None:
            self._recoveries.recover_from_thread(error)

    # -- the end of a loop --------------------------------------------------------------------------------------------

    def _close_inner(self, cursor: Cursor) -> None:
        """Close the loops that are still open inside of ``cursor``, whose body asks for its next item.

        The body left them by a ``break``, and a variable still refers to the generator. If that asks for another item
        all the same, the two are iterated side by side.
        """
        if not cursor.may_nest:
            return
        if cursor.is_side_by_side:
            self._training.position.drop(cursor)
            return
        for inner in self._training.position.inside(cursor):
            inner.outlive_item()
            self.close_loop(inner)
        self._training.position.item_done(cursor)

    def close_loop(self, cursor: Cursor) -> None:
        """Close a loop whose data ended, which stops, or which the body left. The end of an epoch is noticed here only.

        The hooks are called for the end of the epoch right after the loop. If the body left it by ``break``, that is
        when the script next asks the loop for something, and at the latest when the next run begins: a generator that a
        ``break`` closes must not raise, Python would drop the exception.
        """
        state, position = self._training.loop_state, self._training.position
        if not position.is_open(cursor):
            return
        if self._told_to_stop_at and cursor.state is IN_ITEM:
            asked, self._told_to_stop_at = self._told_to_stop_at, []  # once, though a break leaves several loops
            if not leaves_at_end_of_body(asked, lines_of_script()[0]):
                logger.warning(_LEFT_AT_SHOULD_STOP, state.runs)
        position.close(cursor)
        if self._rank_sync is not None and cursor.depth == 1:
            left = ""
            if cursor.left and state.stop is None:
                what, line = "the loop over epochs" if cursor.nests else "its loop", lines_of_script()[0]
                left = f"left {what} {line.way_out()} after run {state.runs}, {line}"
            self._rank_sync.loops_are_over(left)
        # At a stop, the epoch goes on in another process. But a body that leaves for a reason of its own has ended its
        # loop, even if a stop was requested in its last run.
        if not position.is_at_stop and state.is_between_runs:
            ended = position.count_epoch(cursor)
            if ended is not None:  # a break may leave several loops, of which the innermost is the epoch
                self._training.agenda.end_epoch(ended)
                if cursor.left:
                    state.interrupt()  # the next run makes the calls first, if nothing does so before
        if self._training.agenda.item_calls and not self._training.agenda.depth():
            state.set_pending()

    # -- a stop -------------------------------------------------------------------------------------------------------

    def stop_at(self, point: Point, saved: Container[object] = ()) -> None:
        """Keep the place at which the script notices a stop first, and make the calls for a stop there.

        Not in a run, as in the evaluation of a hook: the item of that run takes up the stop.

        Args:
            point: where in the script.
            saved: whose call for the item was made just now, and left nothing to do.
        """
        is_in_loop = self._training.agenda.depth() > 0
        if self._training.position.is_at_stop or self._training.loop_state.phase is RUNNING:
            return
        if point is Point.AT_SHOULD_STOP:
            if not is_in_loop:
                return  # a stop outside of all loops has no place: what the hooks save, they save in end()
            # Where the body asked is kept, because the warning depends on what follows there, and comes only if the
            # body then leaves its item.
            self._told_to_stop_at = lines_of_script()
        elif self.has_parted and point is not Point.IN_ITEM:
            self.save_at_parting()  # with the calls that were just made, as on the rank that has left its loops
            return
        self._training.position.stop_at(point)
        if is_in_loop:
            self._make_stop_calls(saved)

    def _make_stop_calls(self, saved: Container[object] = ()) -> None:
        due = [who for who in self._training.agenda.stop_calls if who not in saved]
        if self._training.loop_state.is_between_runs:
            self._make(lambda: self._training.agenda.make_stop_calls(due))

    # -- where the ranks part: see RankSync.close() -------------------------------------------------------------------

    @property
    def has_parted(self) -> bool:
        """Whether all ranks make the calls for a stop where they are, because one of them has left its loops there."""
        return self._rank_sync is not None and self._rank_sync.has_parted

    def raise_parting(self) -> None:
        """Raise the PeerError if the ranks have stopped because one of them has left its loops."""
        if self._rank_sync is not None:
            self._rank_sync.raise_parting()

    def due_at_close(self) -> int:
        """Return which calls are due: HAS_CALLS for the end of an item, which this rank has left; HAS_EPOCH."""
        if not self._training.loop_state.is_between_runs:
            return 0
        outermost = self._training.position.trained_loop
        inner = None if outermost is None else outermost.inner
        # If the body has left an inner loop too, or is still in one, another rank may be elsewhere in its data.
        is_alike = not self._training.agenda.depth() and not (inner is not None and inner.left)
        has_calls = self._training.agenda.item_calls and is_alike
        return (HAS_CALLS if has_calls else 0) | (HAS_EPOCH if self._training.agenda.epochs_ended is not None else 0)

    def make_at_close(self, calls: int) -> None:
        """Make these ``calls``, which another rank makes where the script has left its loops on this one."""
        if calls & HAS_EPOCH:
            self.end_epoch()
        elif calls & HAS_CALLS:
            self._make(self._make_all_item_calls)

    def save_at_parting(self) -> None:
        """Make the calls for a stop, where the ranks part, if all of them are at the same place in their data.

        Otherwise they could not resume from what is saved here.
        """
        if not self._training.position.is_at_stop:
            self._training.position.stop_at(Point.IN_BODY)
            if self._rank_sync is not None and self._rank_sync.is_same_everywhere(
                self._training.position.place_of_stop
            ):
                self._make_stop_calls()
