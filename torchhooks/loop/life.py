"""The two ends of a loop: what is done when it is created, and when it is closed, and in which order.

:meth:`Life.start` and :meth:`Life.close` are the order. Each call of a hook, and each part that may hang, is made while
the parts that watch the loop are there: they start first and end last.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack

from torchhooks.checkpoints.contents import register_step_post_hook
from torchhooks.common.errors import Attempts, add_note, brief
from torchhooks.common.log import logger
from torchhooks.lifecycle.extension import Extension, LoopPlan, called
from torchhooks.lifecycle.settings import LoopSettings
from torchhooks.loop.advice import CLOSED, CREATED, GIVEN, Advice
from torchhooks.loop.boundaries import Boundaries
from torchhooks.loop.open_loops import note_open_loop
from torchhooks.loop.rank_sync import RankSync
from torchhooks.loop.recoveries import Recoveries
from torchhooks.loop.schedule import Schedule
from torchhooks.loop.sessions import Sessions
from torchhooks.loop.until_stop import DataLoops
from torchhooks.progress.loop_state import Ending, Phase
from torchhooks.progress.training_state import TrainingState


class Life:
    """Starts one loop, and closes it.

    Args:
        training: the state of the loop.
        settings: what the loop was given.
        plan: what it begins with.
        extensions: join it.
        schedule: the hooks.
        sessions: creates the session.
        rank_sync: keeps the loop in step with the other ranks; ``None`` in a process that is alone.
        advice: what a script probably does not mean.
        recoveries: recovers from an error while the session is created, and knows which errors the script has caught.
        boundaries: makes the calls that wait when the loop closes.
        data: the loops over the data.
    """

    def __init__(
        self,
        training: TrainingState,
        settings: LoopSettings,
        plan: LoopPlan,
        extensions: tuple[Extension, ...],
        schedule: Schedule,
        sessions: Sessions,
        rank_sync: RankSync | None,
        advice: Advice,
        recoveries: Recoveries,
        boundaries: Boundaries,
        data: DataLoops,
    ) -> None:
        self._training, self._settings, self._plan, self._schedule = training, settings, plan, schedule
        self._sessions, self._rank_sync, self._advice = sessions, rank_sync, advice
        self._recoveries, self._boundaries, self._data = recoveries, boundaries, data
        self._extensions = extensions
        self._joined: list[Extension] = []  # the extensions of which begin() was called
        self._begun = 0  # of how many hooks begin() was called
        self._attempt = Attempts()
        self._watching = ExitStack()  # closes what watches the loop, the last that was started first

    # -- the start ----------------------------------------------------------------------------------------------------

    def start(self, loop: object) -> None:
        """Handle signals, reach the other ranks, call every hook's ``begin``, and create the session of ``loop``."""
        training, plan, schedule = self._training, self._plan, self._schedule
        state = training.loop_state
        note_open_loop(loop, plan, training)  # first: it refuses a loop that has a hook of another one
        self._advice.say(GIVEN)  # before begin(), which such a hook may fail
        schedule.attach_triggers()  # before begin(), in which a hook may look at its trigger
        # Before the other ranks are waited for and before any begin(), which may take long: a signal meanwhile does not
        # end the process, and the first until_stop notices it.
        state.signals.install()
        if self._rank_sync is not None:
            # A script may drop a loop without closing it. The other ranks are then told, and do not wait for this one
            # for ever.
            weakref.finalize(loop, self._rank_sync.peers.abandon).atexit = False
            self._rank_sync.start(self._settings.step_unit, plan.folder, plan.checkpoint)
        self._begin_extensions()  # before the hooks, which may save, restore and wait for other ranks
        self._watching.callback(schedule.signals.close)
        # All of them before the first begin(): the default action of SIGUSR1, for example, would end the process.
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
        for extension in self._extensions:
            self._joined.append(extension)  # first: what fails in begin() is closed too
            self._watching.callback(self._close_extension, extension)
            called(extension, extension.begin, self._training, self._settings)

    def _close_extension(self, extension: Extension) -> None:
        self._attempt(called, extension, extension.close, *self._outcome())

    def _count_steps_of_optimizer(self) -> None:
        state, optimizer = self._training.loop_state, self._training.optimizer
        if not state.steps_per_run:
            assert optimizer is not None
            # Of the loop's state: with a method of the loop, the optimizer would keep one that nothing else refers to.
            counter = register_step_post_hook(optimizer, state.count_optimizer_step)
            self._watching.callback(counter.remove)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, ending: Ending) -> None:
        """Close the loop, once: agree with the other ranks, end the hooks, and end what watches them.

        Raises:
            BaseException: the error of ``ending`` if another one came before it, or what a call at the end raised.
        """
        state, rank_sync, attempt = self._training.loop_state, self._rank_sync, self._attempt
        error = ending.error
        if state.phase is Phase.CLOSED:
            return
        # While the loop is open: until all ranks have left their loops, this one may have to make calls of its hooks
        # with them.
        if rank_sync is not None and (failure := rank_sync.close(error, self._boundaries)) is not None:
            self.close(Ending(failure))
            raise failure
        # Before state.close(): if the script has caught the last error, this marks the loop as open once more. After
        # it, the mark would stay, and the process would end with a warning of a loop that was never closed.
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
        state = self._training.loop_state
        sessions, participants, attempt = self._sessions, self._schedule.all_hooks, self._attempt
        attempt(self._training.readback.drain)  # first: a callback may fail, after which end() is not called
        if state.failure is None and not attempt.errors:
            attempt(sessions.finish, finished)  # first, so that each checkpoint from here on says so
            # Before end(), in which the last checkpoint is saved: it contains what these calls do.
            self._boundaries.close(attempt)
            # Before end() too: until the script has come to the loop of the checkpoint, nothing is saved. It will not
            # come there any more. And before the advice, which then does not explain the missing runs in another way.
            self._data.check_end()
            self._advice.say(CLOSED)
            for slot in participants:
                attempt(sessions.call, slot, "sat_out", slot.catch_up, state.runs)
                attempt(sessions.end, slot)
        attempt(self._training.readback.close)  # after end(), which may ask for values
        sessions.session.close_savers(attempt)  # after end(), which may save
        # After end(), as in TensorFlow: until then, a hook can count on its threads.
        attempt(sessions.join_threads)
        for extension in self._joined:  # before the teardown of a hook that copies what it writes
            attempt(called, extension, extension.finish, *self._outcome())
        for slot in participants[: self._begun]:
            attempt(sessions.call, slot, "teardown", slot.hook.teardown)
        training = self._training
        if training.gradients is not None:
            training.gradients.close()
        if training.unsaved is not None:
            training.unsaved.close()
        if self._rank_sync is not None:  # last, with the errors of all of the above
            attempt(self._rank_sync.leave, list(attempt.errors))

    def _close_watching(self, error: BaseException | None) -> int:
        """Close what watches the loop, and deliver the signals. Return how many errors of the close were logged."""
        state = self._training.loop_state
        try:
            self._watching.close()
        finally:
            logged = state.log_before_delivery(error, self._attempt.errors)
            self._attempt(state.signals.restore)  # may end the process
        return logged

    def _outcome(self) -> tuple[str, bool]:
        """Return why the loop has ended, and whether that is an error, also one of its close."""
        state, errors = self._training.loop_state, self._attempt.errors
        if state.failure is None and errors:
            return brief(errors[0]), True
        return state.reason or "closed", state.failure is not None

    def _log_stop(self) -> None:
        """Log which signal stopped the loop, and from where another process continues."""
        state = self._training.loop_state
        saved = self._sessions.session.saved_step
        what = "no checkpoint was saved" if saved is None else f"the newest checkpoint is that of step {saved}"
        if self._attempt.errors:  # perhaps of the save of that checkpoint
            what = "there were errors while the loop was closed"
        logger.info("stopped by %s at step %d: %s", state.reason, state.global_step, what)
