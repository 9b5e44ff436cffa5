"""The two ends of a loop: what is done when it is created, and when it is closed, and in which order.

:meth:`Life.start` and :meth:`Life.close` are the order. Each call of a hook, and each part that may hang, is made while
the parts that watch the loop are there: they start first and end last.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from functools import partial

from torchhooks.checkpoints.training_state import register_step_post_hook
from torchhooks.common.errors import Attempts, add_note, brief
from torchhooks.common.log import logger
from torchhooks.device.readback import Readback
from torchhooks.lifecycle.extension import Extension, Training, called
from torchhooks.loop.advice import CLOSED, CREATED, GIVEN, Advice
from torchhooks.loop.arguments import LoopArguments
from torchhooks.loop.boundaries import Boundaries
from torchhooks.loop.open_loops import note_open_loop
from torchhooks.loop.rank_sync import RankSync
from torchhooks.loop.recoveries import Recoveries
from torchhooks.loop.schedule import Schedule
from torchhooks.loop.sessions import Sessions
from torchhooks.loop.until_stop import DataLoops
from torchhooks.progress.loop_state import Ending, LoopState, Phase


class Life:
    """Starts one loop, and closes it.

    Args:
        arguments: what the loop was created with.
        state: what the loop is doing.
        schedule: the hooks.
        readback: the values that are on their way to the host.
        sessions: creates the session.
        rank_sync: keeps the loop in step with the other ranks; ``None`` in a process that is alone.
        advice: what a script probably does not mean.
        recoveries: recovers from an error while the session is created, and knows which errors the script has caught.
        boundaries: makes the calls that wait when the loop closes.
        data: the loops over the data.
    """

    def __init__(
        self,
        arguments: LoopArguments,
        state: LoopState,
        schedule: Schedule,
        readback: Readback,
        sessions: Sessions,
        rank_sync: RankSync | None,
        advice: Advice,
        recoveries: Recoveries,
        boundaries: Boundaries,
        data: DataLoops,
    ) -> None:
        self._arguments, self._state, self._schedule, self._readback = arguments, state, schedule, readback
        self._sessions, self._rank_sync, self._advice = sessions, rank_sync, advice
        self._recoveries, self._boundaries, self._data = recoveries, boundaries, data
        self._extensions: list[Extension] = []  # of which begin() was called
        self._begun = 0  # of how many hooks begin() was called
        self._attempt = Attempts()
        self._watching = ExitStack()  # closes what watches the loop, the last that was started first

    # -- the start ----------------------------------------------------------------------------------------------------

    def start(self, loop: object) -> None:
        """Handle signals, reach the other ranks, call every hook's ``begin``, and create the session of ``loop``."""
        arguments, state, schedule = self._arguments, self._state, self._schedule
        note_open_loop(loop, arguments, state)  # first: it refuses a loop that has a hook of another one
        self._advice.say(GIVEN)  # before begin(), which such a hook may fail
        schedule.attach_triggers()  # before begin(), in which a hook may look at its trigger
        state.signals.install()
        if self._rank_sync is not None:
            weakref.finalize(loop, self._rank_sync.peers.abandon).atexit = False
            self._rank_sync.start(arguments.settings.step_unit, arguments.checkpoint_dir, arguments.checkpoint)
        self._begin_extensions()  # before the hooks, which may save, restore and wait for other ranks
        self._watching.callback(schedule.signals.close)
        for slot in schedule.all_hooks:
            schedule.signals.wait_for(slot.trigger.signals)
        for slot in schedule.all_hooks:
            self._begun += 1  # first: what fails in begin() gets its teardown too
            self._sessions.call(slot, "begin", slot.hook.begin)
        self._count_steps_of_optimizer()  # after begin(), whose steps are none of the training
        self._recoveries.create_session()
        self._advice.say(CREATED)
        state.set_pending()  # the end of the first run looks up what hooks will ask for

    def _begin_extensions(self) -> None:
        arguments, rank_sync = self._arguments, self._rank_sync
        training = Training(
            self._state,
            self._sessions.position,
            arguments.ranks,
            None if rank_sync is None else rank_sync.peers,
            arguments.checkpoint_dir,
            arguments.saved_to,
        )
        for extension in arguments.extensions:
            self._extensions.append(extension)  # first: what fails in begin() is closed too
            self._watching.callback(self._close_extension, extension)
            called(extension, extension.begin, training, arguments.settings)

    def _close_extension(self, extension: Extension) -> None:
        self._attempt(called, extension, extension.close, *self._outcome())

    def _count_steps_of_optimizer(self) -> None:
        if not self._state.steps_per_run:
            optimizer = self._arguments.optimizer
            assert optimizer is not None
            # Not a method: the optimizer would keep a loop that nothing else refers to.
            counter = register_step_post_hook(optimizer, partial(_count_optimizer_step, self._state))
            self._watching.callback(counter.remove)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, ending: Ending) -> None:
        """Close the loop, once: agree with the other ranks, end the hooks, and end what watches them.

        Raises:
            BaseException: the error of ``ending`` if another one came before it, or what a call at the end raised.
        """
        state, rank_sync, attempt = self._state, self._rank_sync, self._attempt
        error = ending.error
        if state.phase is Phase.CLOSED:
            return
        if rank_sync is not None and (failure := rank_sync.close(error, self._boundaries)) is not None:
            self.close(Ending(failure))
            raise failure
        self._recoveries.caught.look()
        if error is None and state.failure is not None:
            lost = "end() of the hooks is not called: the last save and the last reports are missing"
            logger.warning("the script caught %s, which has ended the loop. So %s", brief(state.failure), lost)
        cause = self._recoveries.cause_of_end(error)
        state.close(error)
        if rank_sync is not None:
            state.take_signal_of_another_rank()
        if type(error) is StopIteration:
            error = None
        error = error if cause is None else cause
        traceback = None if error is None else error.__traceback__
        try:
            self._end_everything(ending.finished)
            self._sessions.session.close()  # after teardown, which may use it
            state.void_run()
            self._recoveries.caught.close()
            if ending.left_by_signal:  # only now: until its hook's end() has waited for it, a checkpoint may be missing
                self._log_stop()
        finally:  # also after an interrupt between two of the calls
            logged = self._close_watching(error)  # last: each call above may hang
        if error is None:
            attempt.raise_errors("several errors while the loop was closed")
            return
        error.with_traceback(traceback)  # joining the threads may have raised this very error once more
        for index, other in enumerate(attempt.errors):
            if other is not error:
                add_note(error, f"torchhooks: and while the loop was closed after this: {brief(other)}")
                if index >= logged:
                    logger.error("while the loop was closed after an error", exc_info=other)
        if cause is not None:
            raise cause  # with the error that it has caused as its context

    def _end_everything(self, finished: str | None) -> None:
        """Close every component, even if some fail, and collect the errors."""
        sessions, participants, attempt = self._sessions, self._schedule.all_hooks, self._attempt
        attempt(self._readback.drain)  # first: a callback may fail, after which end() is not called
        if self._state.failure is None and not attempt.errors:
            attempt(sessions.finish, finished)  # first, so that each checkpoint from here on says so
            self._boundaries.close(attempt)
            self._data.check_end()
            self._advice.say(CLOSED)
            for slot in participants:
                attempt(sessions.call, slot, "sat_out", slot.catch_up, self._state.runs)
                attempt(sessions.end, slot)
        attempt(self._readback.close)  # after end(), which may ask for values
        sessions.session.close_savers(attempt)  # after end(), which may save
        attempt(sessions.join_threads)
        for extension in self._extensions:  # before the teardown of a hook that copies what it writes
            attempt(called, extension, extension.finish, *self._outcome())
        for slot in participants[: self._begun]:
            attempt(sessions.call, slot, "teardown", slot.hook.teardown)
        if sessions.gradients is not None:
            sessions.gradients.close()
        if sessions.services.unsaved is not None:
            sessions.services.unsaved.close()
        if self._rank_sync is not None:  # last, with the errors of all of the above
            attempt(self._rank_sync.leave, list(attempt.errors))

    def _close_watching(self, error: BaseException | None) -> int:
        """Close what watches the loop, and deliver the signals. Return how many errors of the close were logged."""
        try:
            self._watching.close()
        finally:
            logged = self._state.log_before_delivery(error, self._attempt.errors)
            self._attempt(self._state.signals.restore)  # may end the process
        return logged

    def _outcome(self) -> tuple[str, bool]:
        """Return why the loop has ended, and whether that is an error, also one of its close."""
        state, errors = self._state, self._attempt.errors
        if state.failure is None and errors:
            return brief(errors[0]), True
        return state.reason or "closed", state.failure is not None

    def _log_stop(self) -> None:
        """Log which signal stopped the loop, and from where another process continues."""
        saved = self._sessions.session.saved_step
        what = "no checkpoint was saved" if saved is None else f"the newest checkpoint is that of step {saved}"
        if self._attempt.errors:  # perhaps of the save of that checkpoint
            what = "there were errors while the loop was closed"
        logger.info("stopped by %s at step %d: %s", self._state.reason, self._state.global_step, what)


def _count_optimizer_step(state: LoopState, *_: object) -> None:
    state.global_step += 1
