"""Creating the sessions of a loop: restoring a checkpoint, or initializing, and telling the hooks."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from operator import attrgetter

from torchhooks.checkpoints.contents import Gradients, Replicas
from torchhooks.checkpoints.folder import Checkpoint, FolderCache, list_again
from torchhooks.checkpoints.saver import Saver, latest_checkpoint, list_checkpoints
from torchhooks.checkpoints.unsaved import UnsavedParts
from torchhooks.common.errors import DamagedCheckpointError
from torchhooks.common.log import logger
from torchhooks.common.text import shortened
from torchhooks.data.agenda import Agenda
from torchhooks.data.cursor import DataWaits
from torchhooks.data.position import DATA_ENDED, DataPosition
from torchhooks.device.readback import Readback
from torchhooks.fetches.running import RunningValues
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.extension import Extension, LoopPlan, called
from torchhooks.lifecycle.hook import StandardHook
from torchhooks.lifecycle.recovery import Recovery
from torchhooks.lifecycle.session import Finding, Session
from torchhooks.lifecycle.settings import LoopSettings, named_states
from torchhooks.loop.open_loops import is_of_a_loop
from torchhooks.loop.rank_sync import RankSync
from torchhooks.loop.schedule import HookSlot, Schedule, note_hook
from torchhooks.progress.loop_state import LoopState, StoppedBy
from torchhooks.progress.training_state import TrainingState

_ASKED_TO_STOP = (StoppedBy.HOOK, StoppedBy.CALLER, StoppedBy.THREAD, StoppedBy.COORDINATOR)


class Sessions:
    """Creates the session of a loop and, after an error, the next one, and keeps what all of them share.

    Apart from :class:`torchhooks.loop.runner.Runner`, because a session lasts for many runs: what restores a checkpoint
    and starts threads stays out of the way of a run.

    Args:
        training: the state of the loop.
        settings: how a session is initialized, and how long to wait for threads.
        plan: from which checkpoint the loop begins.
        extensions: join the loop.
        schedule: the hooks, and when one is due.
        rank_sync: keeps the loop in step with the other ranks; ``None`` in a process that is alone.
        recovery: from which errors the loop recovers.
    """

    session: Session
    coord: Coordinator
    """The background threads of the current session."""
    fatal: BaseException | None = None
    """The error of a background thread that stopped the loop, although it is one of ``recoverable_errors``."""
    restored_from: str | None = None
    """The checkpoint that the current session began with, as the user writes it."""

    def __init__(
        self,
        training: TrainingState,
        settings: LoopSettings,
        plan: LoopPlan,
        extensions: tuple[Extension, ...],
        schedule: Schedule,
        rank_sync: RankSync | None,
        recovery: Recovery,
    ) -> None:
        self._training, self._settings, self._plan, self._extensions = training, settings, plan, extensions
        self._schedule, self._rank_sync, self._recovery = schedule, rank_sync, recovery
        self._chosen: str | None = None  # the checkpoint that the caller gave instead of a folder
        if training.checkpoint_dir is not None and plan.checkpoint is not None:
            self._chosen = os.path.join(training.checkpoint_dir, plan.checkpoint)
        self._cache: FolderCache = {}
        self._order_before: int | None = None  # of the newest checkpoint there when the loop began
        self.renew()

    def renew(self) -> None:
        """Make a new session, which :meth:`create` restores or initializes."""
        training = self._training
        training.loop_state.begin_session()
        self.session = Session.of(training)
        if self._rank_sync is not None:
            self.session.guard_checkpoints(self._rank_sync.why_no_checkpoint)
        training.accumulated.begin_session(self.session)
        self.coord = Coordinator()

    def stop_for(self, error: BaseException) -> None:
        """Note that the loop stops because of ``error``, of a background thread: it is raised when the loop closes."""
        self.fatal = error

    def create(self, recovers: bool = False) -> None:
        """Restore or initialize the current session, and call every hook's ``after_create_session``."""
        session, restored = self.session, self._restore()
        self.restored_from = None
        if restored is not None:
            path = self.restored_from = self._as_given(restored)
            # A caller who names a checkpoint wants to train on from it, even if the script had left its loop by then.
            # If the data had ended, until_stop finds out whether there are more now.
            if restored == self._chosen and self._training.position.why_finished not in (None, DATA_ENDED):
                self._training.position.train_on()
            logger.info("restored step %d from %s", session.global_step, path)
            if session.global_step and not recovers and self._training.position.state_dict() is None:
                logger.info("%s has no position in the data: what is not in the loop's state starts over", path)
        if restored is not None:
            session.begin_with_checkpoint()
        self._settings.scaffold.prepare(session, session.was_restored)
        for slot in self._schedule.all_hooks:
            slot.trigger.start_at(session.global_step)  # one by one: the hook before this one may have set the step
            self.call(slot, "after_create_session", slot.hook.after_create_session, session, self.coord)
        # After every after_create_session, which may set the global step, or force a hook.
        self._schedule.start()
        for extension in self._extensions:
            called(extension, extension.start, session)

    def _restore(self) -> str | None:
        """Restore the newest checkpoint, or the caller's choice unless this loop has saved since.

        Returns:
            The path of the checkpoint, ``None`` if there is none.
        """
        session = self.session
        if self._chosen is None:
            return (
                None
                if session.checkpoint_dir is None
                else session.saver.restore_latest(session, session.checkpoint_dir)
            )
        for path in self._saved_since():
            try:
                session.saver.restore(session, path)
            except DamagedCheckpointError as error:
                logger.warning("%s It is skipped.", error)
            else:
                return path
        try:
            session.saver.restore(session, self._chosen)
        except DamagedCheckpointError as error:
            given = self._plan.folder
            others = [checkpoint.name for checkpoint in list_checkpoints(os.path.dirname(self._chosen))]
            listed = f"{shortened(others)}; checkpoint_dir={given!r} restores the newest that is undamaged"
            raise DamagedCheckpointError(f"{error} {given} has {listed if others else 'no checkpoint'}.") from error
        return self._chosen

    def _saved_since(self) -> list[str]:
        """Return the paths of the checkpoints that were saved since the first call of this method, newest first."""
        folder = self._training.saved_to or self._training.checkpoint_dir
        assert folder is not None
        checkpoints = list_again(folder, self._cache)
        if self._order_before is None:
            self._order_before = checkpoints[-1].order if checkpoints else 0
            self._tell_of_later(checkpoints)
        # By the order of writing and not by the step: from an earlier checkpoint, this loop comes to the same steps
        # again.
        return [checkpoint.path for checkpoint in reversed(checkpoints) if checkpoint.order > self._order_before]

    def _tell_of_later(self, checkpoints: list[Checkpoint]) -> None:
        """Log which of ``checkpoints`` were saved after the chosen one, from which another history begins."""
        orders = [checkpoint.order for checkpoint in checkpoints if checkpoint.path == self._chosen]
        later = [checkpoint.name for checkpoint in checkpoints if orders and checkpoint.order > orders[0]]
        if later and self._plan.savers and self._training.ranks.is_chief:
            logger.info(
                "%s has checkpoints that were saved after %s: %s. They stay until newer ones replace them. To continue "
                "later from what this loop saves, give the next one checkpoint_dir=%r",
                self._plan.folder,
                self._plan.checkpoint,
                shortened(later),
                self._plan.folder,
            )

    def _as_given(self, path: str) -> str:
        """Return ``path`` as the user writes it, if it is in the loop's ``checkpoint_dir``."""
        folder, name = os.path.split(path)
        given = self._plan.folder
        return path if given is None or folder != self._training.checkpoint_dir else os.path.join(given, name)

    def finish(self, why: str | None) -> None:
        """Have the checkpoints say from now on that the training run is finished, if it is on all ranks."""
        session, state = self.session, self._training.loop_state
        if state.stop is not None and state.stop.by in _ASKED_TO_STOP:
            return  # all ranks have agreed on the stop, so none is finished; one may have left with an error after it
        reasons = session.ranks.gather(why, "whether the training run is finished")
        if why is None or None in reasons:
            return
        # The data may have ended on one rank where the script has left its loop on another one. All say the same.
        why = next((each for each in reasons if each is not None and each != DATA_ENDED), why)
        self._training.position.finish(why)
        is_told = session.ranks.is_chief and self._plan.has_checkpoints
        if is_told and why != DATA_ENDED:
            logger.info("finished: %s; for a pause, such as a time limit, call loop.request_stop() instead", why)

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint to restore."""
        folder = self._training.checkpoint_dir
        return self._chosen is not None or (folder is not None and latest_checkpoint(folder) is not None)

    def call(self, slot: HookSlot, name: str, method: Callable[..., object], *args: object) -> None:
        """Call a hook's ``method`` outside a run; an exception gets a note that names the hook."""
        try:
            method(*args)
        except BaseException as error:
            note_hook(error, slot, name, self._training.global_step)
            raise

    def end(self, slot: HookSlot) -> None:
        """Call the ``end`` of a hook, of a collective one on all ranks at once."""
        if self._rank_sync is not None and slot in self._schedule.collective:
            self._rank_sync.align()
        self.call(slot, "end", slot.end, self.session)

    def join_threads(self, coord: Coordinator | None = None, *, handled: BaseException | None = None) -> None:
        """Stop the background threads, wait for them, and raise the error of the first that failed.

        An error of ``recoverable_errors`` is logged instead, unless it has stopped the loop: the training is over, or a
        recovery replaces the threads anyway. The rule is TensorFlow's.

        Args:
            coord: their coordinator; ``None`` for that of the current session.
            handled: the error from which the loop recovers, which is neither raised nor logged.
        """
        coord = self.coord if coord is None else coord
        coord.request_stop()
        try:
            # As in TensorFlow, a thread that does not stop is no error: a line names it, and the loop closes without
            # it.
            coord.join(stop_grace_period_secs=self._settings.stop_grace_period_secs, ignore_live_threads=True)
        except BaseException as error:
            # An error that no thread has reported is, for example, a Ctrl-C during the wait.
            if error is not coord.error or error is self.fatal or not self._recovery.covers(error):
                raise
            if error is not handled:
                logger.error("a background thread failed, and is not needed any more", exc_info=error)


def new_training_state(
    settings: LoopSettings,
    plan: LoopPlan,
    extensions: tuple[Extension, ...],
    call_epoch_hooks: Callable[[], object],
    note_open: Callable[[bool], object],
) -> TrainingState:
    """Return the state of a new loop.

    Args:
        settings: what the loop was given.
        plan: its hooks, which know their folders.
        extensions: what to tell of a finding.
        call_epoch_hooks: calls the hooks for the end of an epoch that was left by ``break``, if they were not called.
        note_open: called with whether ``end()`` of the hooks is still to be called, when that changes.
    """
    loop_state = LoopState(settings.signals, settings.step.function, int(plan.counts_runs), note_open)
    saver = Saver() if settings.scaffold.saver is None else settings.scaffold.saver
    position = DataPosition(loop_state, settings.state)
    saved_to = next(filter(None, map(attrgetter("checkpoint_dir"), plan.savers)), None)
    return TrainingState(
        model=settings.model,
        optimizer=settings.optimizer,
        state=settings.state,
        saver=saver,
        hooks=named_states(plan.all_hooks),
        metadata=settings.metadata,
        # A script may change the current directory while it trains.
        checkpoint_dir=None if plan.folder is None else os.path.abspath(plan.folder),
        saved_to=None if saved_to is None else os.path.abspath(saved_to),
        ranks=settings.ranks,
        loop_state=loop_state,
        position=position,
        gradients=_watched_gradients(settings, plan),
        unsaved=_watched_parts(settings, plan, loop_state),
        replicas=Replicas(),
        accumulated=RunningValues(),
        step_function=settings.step,
        agenda=Agenda(lambda: position.depth),
        data_waits=DataWaits(),
        readback=Readback(loop_state.set_pending),
        loop_hooks=[hook for hook in plan.all_hooks if isinstance(hook, StandardHook)],
        savers=[saver],
        call_epoch_hooks=call_epoch_hooks,
        tell_extensions=partial(_tell, extensions),
    )


def _tell(extensions: tuple[Extension, ...], session: Session, finding: Finding) -> None:
    for extension in extensions:
        try:
            called(extension, extension.found, session, finding)
        except Exception as error:  # what the hook has found is what the caller has to see, and others too
            logger.error("an extension that was told of a finding has failed: %s", finding.message, exc_info=error)


def _watched_parts(settings: LoopSettings, plan: LoopPlan, loop_state: LoopState) -> UnsavedParts | None:
    if not plan.savers or not settings.ranks.is_chief:
        return None
    parts = {"model": settings.model, "optimizer": settings.optimizer, **settings.state}
    return UnsavedParts(loop_state, is_of_a_loop, parts)


def _watched_gradients(settings: LoopSettings, plan: LoopPlan) -> Gradients | None:
    optimizer = settings.optimizer
    if optimizer is None or not plan.has_checkpoints or not hasattr(optimizer, "register_step_post_hook"):
        return None
    return Gradients(optimizer)
