"""What follows an error: the loop recovers from it, or leaves it to the script.

A recovery closes the session, and creates a new one from the newest checkpoint. It is made where TensorFlow makes it:

=====================================  ================================================================
an error of                            after the recovery
=====================================  ================================================================
a run by ``loop.run()``                ``loop.run`` makes the run again
``loop.run_step_fn()``                 the function is called again
a run that this function makes         the same: the error is left to the function
a hook before the body of ``step()``   the run is begun again
that body, or a hook after it          the loop goes on without the run
a background thread, between two runs  the loop goes on
the creation of the first session      the session is created again
=====================================  ================================================================

An error anywhere else, such as one of a save between two items or of a hook at the end of an epoch, is left to the
script. If the script catches it, the loop goes on: see :mod:`torchhooks.loop.caught`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from torchhooks.common.errors import add_note, brief
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.recovery import Recovery
from torchhooks.loop.caught import CaughtErrors, Place
from torchhooks.loop.first_runs import FirstRuns
from torchhooks.loop.rank_sync import RankSync
from torchhooks.loop.schedule import Schedule
from torchhooks.loop.sessions import Sessions
from torchhooks.progress.loop_state import RUNNING, Phase, StoppedBy
from torchhooks.progress.training_state import TrainingState

T = TypeVar("T")


class Recoveries:
    """Recovers from errors of one loop, or leaves them to the script and the other ranks.

    Args:
        training: the state of the loop.
        schedule: the hooks, and when one is due.
        sessions: the session, and what creates the next one.
        rank_sync: keeps the loop in step with the other ranks; ``None`` in a process that is alone.
        policy: which errors to recover from, how often, and after what pause.
        caught: tells errors that the script has caught from one that leaves the loop.
        first_runs: whether the first run is over.
    """

    def __init__(
        self,
        training: TrainingState,
        schedule: Schedule,
        sessions: Sessions,
        rank_sync: RankSync | None,
        policy: Recovery,
        caught: CaughtErrors,
        first_runs: FirstRuns,
    ) -> None:
        self._training, self._schedule = training, schedule
        self._sessions, self._rank_sync, self._first_runs = sessions, rank_sync, first_runs
        self.policy, self.caught = policy, caught
        self._is_run_of_step_fn = False  # whether such a function makes the run in progress, to which errors are left
        self._watch_threads()

    def _watch_threads(self) -> None:
        coord = self._sessions.coord
        # With the coordinator, by which a late stop of a session that was replaced is told from one of the present
        # session.
        coord.on_stop(partial(self._thread_stopped, coord))

    # -- an error of a run --------------------------------------------------------------------------------------------

    def recover_or_leave(self, error: BaseException, *, of_function: bool = False, made_again: bool = True) -> bool:
        """Recover from ``error``, which interrupted a run, or leave it to the script. Return whether it recovered.

        Args:
            error: what was raised.
            of_function: whether it comes out of a function of ``run_step_fn``.
            made_again: whether the caller makes the run again. If not, a function of ``run_step_fn`` gets the error,
                because the function can be called again.

        Raises:
            BaseException: what ``error`` is the consequence of: an error of a background thread, or of another rank. Or
                else a recovery failed.
        """
        state = self._training.loop_state
        # Of a hook of an epoch that was left by break, called where this run began. The phase tells it from an error of
        # the run itself, which may be the same object.
        if state.phase is not RUNNING and self.caught.left_between_runs(error):
            return False
        # Before void_run(), which drops the context that says whether the run counts.
        cause, place = self._cause_of(error), self.caught.place(in_run=True)
        state.void_run()
        self._schedule.void_run()
        is_of_function = self._is_run_of_step_fn or (state.in_step_fn and not made_again)
        try:
            may_recover = not is_of_function and self._may_recover(cause)
        except BaseException as another:  # of a save in the background
            self._leave_run(another, place)
            raise
        if not may_recover:
            self._leave_run(error, place, of_function=of_function)
            return False
        try:
            self._recover(cause, run_failed=True)
        except BaseException as another:
            self._failed(another)
            raise
        self.caught.recovered(error)
        state.run_is_over()
        return True

    def call_step_fn(self, step_fn: Callable[[Any], T], context: object) -> T:
        """Call ``step_fn(context)``, a function passed to ``run_step_fn``."""
        state = self._training.loop_state
        outside = state.enter_step_fn()
        try:
            return step_fn(context)
        finally:
            state.leave_step_fn(outside)

    def run_of_step_fn(self, run: Callable[..., T], args: tuple[object, ...], kwargs: Mapping[str, object]) -> T:
        """Make a run with ``run(*args, **kwargs)`` whose errors are left to the function passed to ``run_step_fn``."""
        outside, self._is_run_of_step_fn = self._is_run_of_step_fn, True
        try:
            return run(*args, **kwargs)
        finally:
            self._is_run_of_step_fn = outside

    # -- an error that is left to the script --------------------------------------------------------------------------

    def _leave_run(self, error: BaseException, place: Place, *, of_function: bool = False) -> None:
        """Leave ``error``, of a run, to the script and the other ranks.

        Raises:
            BaseException: what ``error`` is the consequence of: an error of a background thread, or of another rank.
        """
        self._leave(error, place, of_function=of_function)
        cause = self._cause_of(error)
        if cause is not error:
            raise cause

    def leave_between_runs(self, error: BaseException) -> None:
        """Leave ``error``, of a call between two runs, to the script and the other ranks. It is never recovered from.

        Raises:
            PeerError: ``error`` is the consequence of another rank's failure.
        """
        place = self.caught.place(in_run=False)
        self._training.loop_state.void_run()
        self._schedule.void_run()
        self._leave(error, place)

    def _leave(self, error: BaseException, place: Place, *, of_function: bool = False) -> None:
        state, session = self._training.loop_state, self._sessions.session
        state.run_is_over()  # as before the run: if the script catches the error, the loop goes on
        had_cause = self._sessions.coord.error is not None
        # Not once more when it leaves the function that made the run.
        if not self.caught.leaves(error, place, of_function=of_function, had_cause=had_cause):
            return
        if not self._first_runs.are_over and not session.was_restored:
            state.begin_here()  # TensorFlow's START is that of a run that did not fail
        # Before the other ranks are told: that waits for them, and may raise their error in place of this one.
        session.run_failed(error)
        if self._rank_sync is not None:
            self._rank_sync.run_failed(error, in_run=place.in_run)

    def _cause_of(self, error: BaseException) -> BaseException:
        """Return the error of a background thread if ``error``, of a run, is its consequence; otherwise ``error``.

        A thread that reads from a server may lose its connection, so that the step gets ``queue.Empty``. The rule is
        TensorFlow's: of two errors of which the loop recovers from one, the one of the thread is the cause.
        """
        thread_error = self._sessions.coord.error
        if thread_error is None or not isinstance(error, Exception):
            return error
        return error if self.policy.covers(thread_error) is self.policy.covers(error) else thread_error

    def cause_of_end(self, error: BaseException | None) -> BaseException | None:
        """Return the error of a background thread that came before ``error``, which ends the loop, or ``None``."""
        thread_error = self._sessions.coord.error
        if error is None or type(error) is StopIteration or thread_error is None or thread_error is error:
            return None
        is_earlier = not self.policy.covers(thread_error) and not self.caught.came_before_thread(error)
        return thread_error if is_earlier else None

    # -- an error of a thread -----------------------------------------------------------------------------------------

    def error_of_thread(self) -> BaseException | None:
        """Return the error of a background thread from which the loop is to recover now; ``None`` if there is none.

        Not in a run, and not after a stop, which needs no threads any more.
        """
        state, sessions = self._training.loop_state, self._sessions
        error = sessions.coord.error
        if state.stop is not None or state.phase is RUNNING or state.in_step_fn or error is None:
            return None
        return None if error is sessions.fatal or not self.policy.covers(error) else error

    def recover_from_thread(self, error: BaseException) -> None:
        """Recover from ``error``, of a background thread, between two runs.

        If the loop does not recover from it, it stops, as after any other error of a thread.
        """
        state = self._training.loop_state
        state.set_pending()  # the end of the next run ends the series of recoveries
        if not self._may_recover(error):
            self._sessions.stop_for(error)
            state.propose_stop(f"a thread failed with {brief(error)}", StoppedBy.COORDINATOR)
            return
        try:
            self._recover(error)
        except BaseException as another:
            self._failed(another)
            raise

    def _thread_stopped(self, coord: Coordinator) -> None:
        """Stop the loop because a background thread asked to, unless the loop may recover from the thread's error."""
        state, sessions, error = self._training.loop_state, self._sessions, coord.error
        # The thread that asks calls this. When the loop closes, and when a recovery leaves a session, that is the loop
        # itself, which stops the threads: it has set the phase, or replaced the coordinator, before.
        if state.phase is Phase.CLOSED or coord is not sessions.coord:
            return
        if error is not None and self.policy.covers(error):
            if state.stop is not None or state.data_have_ended:
                return  # the training is over: the error is logged when the threads are joined
            if sessions.session.checkpoint_dir is not None:
                state.set_pending()  # the end of the run, or should_stop(), recovers
                return
            sessions.stop_for(error)
        state.propose_stop(f"thread {threading.current_thread().name}", StoppedBy.COORDINATOR)

    # -- the recovery -------------------------------------------------------------------------------------------------

    def create_session(self) -> None:
        """Create the first session; recover from an error on the way, if that is allowed."""
        try:
            self._sessions.create()
        except BaseException as error:
            if not self._may_recover(error):
                raise
            self._recover(error)
            # No run was made, but a recovery of the first run is to be made at once, as if there had been none.
            self.policy.run_went_well()

    def _may_recover(self, error: BaseException) -> bool:
        """Return whether to recover from ``error``, which a run, a thread or the creation of a session raised.

        If it is one of ``recoverable_errors`` and the loop does not recover, a note on the error says why.
        """
        state = self._training.loop_state
        if not self.policy.covers(error):
            return False
        # In this order: grant() counts the recovery, and the wait for the savers may be long. Both come after what
        # forbids a recovery at once.
        why, stop = None, state.stop
        # The signal itself, and not only the stop: it becomes one at the next boundary, which is still to come.
        if state.signal is not None:
            why = f"signal {state.signal} arrived"
        elif stop is not None and stop.by is not StoppedBy.COORDINATOR:  # which the next session knows nothing of
            why = f"the loop stops ({stop.reason})"
        elif not self.policy.grant(error):
            return False
        else:
            self._sessions.session.wait_for_savers()  # the newest checkpoint may still be being written
            if not self._sessions.has_checkpoint():
                why = "there is no checkpoint to restore"
        if why is not None:
            add_note(error, f"torchhooks: not recovered from, because {why}")
        return why is None

    def _recover(self, error: BaseException, *, run_failed: bool = False) -> None:
        """Close the session, pause unless this is the first recovery in a row, and create the next session.

        An error on the way is recovered from likewise, if that is allowed.
        """
        state = self._training.loop_state
        while True:
            try:
                # First, while the session is there to which the callbacks that wait belong.
                self._training.drain()
                self._leave_session(error)
                if run_failed:
                    self._training.position.run_is_made_again()
                self.policy.pause(error, state.wait_for_signal)
                # The signal has cut the pause short. The time until the kill is short too, so no session is created.
                if state.signal is not None:
                    raise error
                self._sessions.create(recovers=True)  # in this process the data continue where they are
            except BaseException as another:
                if not self._may_recover(another):
                    raise
                error = another
            else:
                state.set_pending()  # the end of the next run ends the series of recoveries
                if self._training.agenda.epochs_ended is not None:
                    state.interrupt()  # the schedule of the new session forgot it: the next run calls the hooks
                return

    def _leave_session(self, error: BaseException) -> None:
        """Replace the session that failed with ``error`` by a new one, and wait for its threads.

        Raises:
            BaseException: another error of a thread, which the loop does not recover from.
        """
        sessions = self._sessions
        session, coord = sessions.session, sessions.coord
        self._training.agenda.clear()
        self._training.loop_state.forget_stop_of_session()
        # Before the old threads are stopped: _thread_stopped() has to see that their coordinator is not the present
        # one.
        sessions.renew()
        self._watch_threads()
        session.close()
        # Before the next session is created, whose hooks start their threads again: two would do the same work at a
        # time.
        sessions.join_threads(coord, handled=error)
        for later in coord.later_errors:
            if not self.policy.covers(later):
                raise later

    def _failed(self, error: BaseException) -> None:
        """End the loop, which has no session any more, so that the script cannot go on after ``error``."""
        state = self._training.loop_state
        if type(error) is StopIteration:
            state.end_cleanly(error)
        else:
            state.fail(error)
