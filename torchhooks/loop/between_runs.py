"""What a loop does between two runs: it takes up stops and news, and recovers from what failed, or ends."""

from __future__ import annotations

import os
from collections.abc import Callable

from torchhooks.common.log import logger
from torchhooks.device.readback import Readback
from torchhooks.lifecycle.ending import RUNNING, Ending
from torchhooks.lifecycle.recovery import Recovery
from torchhooks.lifecycle.session import Session
from torchhooks.loop.peers import Peers
from torchhooks.loop.run import Lifecycle
from torchhooks.loop.schedule import Schedule
from torchhooks.loop.session_creator import SessionCreator
from torchhooks.position.items import Items


class BetweenRuns:
    """Ends a run, takes up stops, and recovers from errors, for the loop, its bodies and its data alike."""

    def __init__(
        self,
        *,
        ending: Ending,
        schedule: Schedule,
        readback: Readback,
        items: Items,
        sessions: SessionCreator,
        recovery: Recovery,
        peers: Peers | None,
    ) -> None:
        self.ending = ending
        self.schedule = schedule
        self._readback = readback
        self.items = items
        self.sessions = sessions
        self._recovery = recovery
        self.peers = peers
        self._awaits_success = False  # the loop recovered, and has made no run since
        self.in_step_fn = False
        """Whether the run is one of a function passed to ``run_step_fn``, which as a whole is made again."""

    @property
    def session(self) -> Session:
        """The current session."""
        return self.sessions.session

    @property
    def lifecycle(self) -> Lifecycle:
        """What makes the runs of the current session."""
        return self.sessions.lifecycle

    def end_run(self) -> None:
        """Make the ``when_ready`` calls whose values have arrived, and notice stop requests. Only called if needed."""
        schedule, readback = self.schedule, self._readback
        schedule.pending = False  # cleared first, because a thread or a signal may set it at any time
        if readback.waiting:
            schedule.set_pending()
            readback.end_run()
        if self.items.waiting and not self.items.depth():
            self.items.finish()
        if self._awaits_success:
            self._awaits_success = False
            self._recovery.run_went_well()
        self.ending.notice()
        if schedule.is_asked:
            schedule.take_requests()
        if self.sessions.coord.should_stop():
            schedule.set_pending()
        if self.peers is not None:
            self.peers.end_run()
        elif self.session.ranks.may_be_late:
            self.session.ranks.warn_if_late()

    def is_to_stop(self) -> bool:
        """Notice requests to stop, recover from the error of a thread, and return whether the loop is to end."""
        ending = self.ending
        if ending.stop is None and self.schedule.pending:
            ending.notice()
            if self.peers is not None:
                self.peers.check()
            self.recover_from_thread()
        return ending.stop is not None

    def refuse(self, call: str = "run()") -> None:
        """Raise the reason why no run can be made, except for the one run that is allowed after a thread's stop."""
        self.ending.refuse(call, self.sessions.coord.raise_requested_exception, self.in_step_fn)

    # -- errors -------------------------------------------------------------------------------------------------------

    def recovered_from(self, error: BaseException) -> bool:
        """Recover from ``error``, which interrupted a run, or end the loop. Return whether to make the run again."""
        self.ending.void_run()
        try:
            if not self.in_step_fn and self.sessions.may_recover(error):
                self.sessions.recover(error)
                self.ending.run_is_over()
                self.items.end_epoch()  # if the error came from its hooks, before the run
                return True
        except BaseException as another:
            self.run_failed(another)
            raise
        if not self.in_step_fn or not self._recovery.covers(error):
            self.run_failed(error)
        self.ending.run_is_over()
        return False

    def warn_of_stop_iteration(self, error: BaseException) -> None:
        """Log where the step raised ``error``, if it ends the loop without an error, as in TensorFlow."""
        if type(error) is not StopIteration or getattr(error, "__notes__", None):  # a hook's has a note
            return
        tb = error.__traceback__
        while tb is not None and tb.tb_next is not None:
            tb = tb.tb_next
        where = "" if tb is None else f" ({os.path.basename(tb.tb_frame.f_code.co_filename)}:{tb.tb_lineno})"
        logger.warning(
            "the step raised StopIteration%s, which ends the loop. If the data ended, iterate over them with "
            "until_stop, which starts over with repeat=True",
            where,
        )

    def recovered_for_next_run(self, error: BaseException) -> bool:
        """Recover from ``error``, or end the loop; return which. The next run that succeeds resets the pause."""
        self._awaits_success = recovered = self.recovered_from(error)
        self.schedule.set_pending()
        return recovered

    def recover_from_thread(self) -> None:
        """Recover from a background thread's error between two runs, if it is one to recover from."""
        ending, coord = self.ending, self.sessions.coord
        if ending.stop is not None or ending.state is RUNNING or self.in_step_fn or not coord.should_stop():
            return
        try:
            coord.raise_requested_exception()
        except BaseException as error:
            if not self._recovery.covers(error):
                return  # the thread's stop request ends the loop
            if ending.failure is None:  # the session that they belong to is about to be replaced
                self.make(self.items.finish)
            if not self.recovered_for_next_run(error):
                self.sessions.coord.clear_stop()  # or joining the threads would raise it a second time
                raise

    def run_failed(self, error: BaseException) -> None:
        """End the loop because of ``error``, and tell the other ranks.

        Raises:
            PeerError: ``error`` is the consequence of another rank's failure.
        """
        self.ending.fail(error)
        if self.peers is not None:
            self.peers.failed(error)

    def make(self, calls: Callable[[], object]) -> bool:
        """Make ``calls``, whose errors count as a run's; return whether they succeeded."""
        self.ending.state = RUNNING  # none of them may start a run
        try:
            calls()
        except BaseException as error:
            if self.recovered_from(error):
                return False
            if type(error) is not StopIteration:  # which ends the loop cleanly
                raise
        finally:
            self.ending.run_is_over()
        return True
