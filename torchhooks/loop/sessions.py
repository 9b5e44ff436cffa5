"""Creating the sessions of a loop: restoring a checkpoint, or initializing, and telling the hooks."""

from __future__ import annotations

import os
from collections.abc import Callable

from torchhooks.checkpoints.folder import Checkpoint, FolderCache, list_again
from torchhooks.checkpoints.saver import SavesCheckpoints, latest_checkpoint, list_checkpoints
from torchhooks.checkpoints.training_state import Gradients
from torchhooks.checkpoints.unsaved import UnsavedParts
from torchhooks.common.errors import DamagedCheckpointError
from torchhooks.common.log import logger
from torchhooks.common.text import shortened
from torchhooks.data.agenda import Agenda
from torchhooks.data.position import DATA_ENDED, DataPosition
from torchhooks.device.readback import Readback
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.extension import called
from torchhooks.lifecycle.hook import RunServices, StandardHook
from torchhooks.lifecycle.recovery import Recovery
from torchhooks.lifecycle.session import Finding, LoopServices, Session
from torchhooks.loop.arguments import LoopArguments
from torchhooks.loop.open_loops import is_of_a_loop
from torchhooks.loop.rank_sync import RankSync
from torchhooks.loop.schedule import HookSlot, Schedule, note_hook
from torchhooks.progress.loop_state import LoopState, StoppedBy

_ASKED_TO_STOP = (StoppedBy.HOOK, StoppedBy.CALLER, StoppedBy.THREAD, StoppedBy.COORDINATOR)


class Sessions:
    """Creates the session of a loop and, after an error, the next one, and keeps what all of them share.

    Apart from :class:`torchhooks.loop.runner.Runner`, because a session lasts for many runs: what restores a checkpoint
    and starts threads stays out of the way of a run.

    Args:
        end_epoch: calls the hooks for the end of an epoch that the script left by ``break``, if they were not called.
    """

    session: Session
    run_services: RunServices
    """What the contexts of all runs of the current session share."""
    coord: Coordinator
    """The background threads of the current session."""
    fatal: BaseException | None = None
    """The error of a background thread that stopped the loop, although it is one of ``recoverable_errors``."""
    restored_from: str | None = None
    """The checkpoint that the current session began with, as the user writes it."""

    def __init__(
        self,
        arguments: LoopArguments,
        state: LoopState,
        schedule: Schedule,
        readback: Readback,
        rank_sync: RankSync | None,
        recovery: Recovery,
        end_epoch: Callable[[], object],
    ) -> None:
        self._arguments = arguments
        # A script may change the current directory while it trains.
        self._folder = None if arguments.checkpoint_dir is None else os.path.abspath(arguments.checkpoint_dir)
        self._chosen: str | None = None  # the checkpoint that the caller gave instead of a folder
        if self._folder is not None and arguments.checkpoint is not None:
            self._chosen = os.path.join(self._folder, arguments.checkpoint)
        self._saved_to = arguments.saved_to or self._folder
        self._cache: FolderCache = {}
        self._order_before: int | None = None  # of the newest checkpoint there when the loop began
        self._state, self._schedule, self._rank_sync, self._recovery = state, schedule, rank_sync, recovery
        self._readback = readback
        self._savers: list[SavesCheckpoints[Session]] = []  # of the session before
        self.position = DataPosition(state, arguments.state)
        """How far the loop is in its data."""
        self.agenda = Agenda(lambda: self.position.depth)
        """What waits to be done between two runs."""
        self.gradients = _watched_gradients(arguments)
        """The gradients that the optimizer has not used yet; ``None`` if the loop saves none."""
        self.services = LoopServices(
            position=self.position,
            loop_state=state,
            agenda=self.agenda,
            end_epoch=end_epoch,
            accumulated=schedule.accumulated,
            inputs=arguments.step.parameters,
            drain=readback.drain,
            interrupted=self._is_interrupted,
            steps_per_run=arguments.steps_per_run,
            unsaved=_watched_parts(arguments, state),
            found=self._tell_extensions,
        )
        """What all sessions of the loop share."""
        self.renew()

    def renew(self) -> None:
        """Make a new session, which :meth:`create` restores or initializes."""
        arguments = self._arguments
        self._state.begin_session()
        self.session = Session(
            arguments.model,
            arguments.optimizer,
            arguments.state,
            arguments.scaffold.saver,
            hooks=arguments.hook_states,
            checkpoint_dir=self._folder,
            metadata=arguments.metadata,
            gradients=self.gradients,
            ranks=arguments.ranks,
            services=self.services,
            loop_hooks=[hook for hook in arguments.hooks if isinstance(hook, StandardHook)],
        )
        if self._rank_sync is not None:
            self.session.guard_checkpoints(self._rank_sync.why_no_checkpoint)
        # A hook may not get to add its saver again, if the new session cannot be created. It is closed all the same.
        earlier = {id(saver): saver for saver in self._savers}
        self.session.savers += [saver for saver in earlier.values() if saver is not self.session.saver]
        self._savers = self.session.savers
        self._schedule.begin_session(self.session, arguments.step)
        self.run_services = RunServices(self.session, arguments.step, self._readback, self._state, self.agenda)
        self.coord = Coordinator()

    def create(self, recovers: bool = False) -> None:
        """Restore or initialize the current session, and call every hook's ``after_create_session``."""
        session, restored = self.session, self._restore()
        self.restored_from = None
        if restored is not None:
            path = self.restored_from = self._as_given(restored)
            if restored == self._chosen and self.position.why_finished not in (None, DATA_ENDED):
                self.position.train_on()
            logger.info("restored step %d from %s", session.global_step, path)
            if session.global_step and not recovers and self.position.state_dict() is None:
                logger.info("%s has no position in the data: what is not in the loop's state starts over", path)
        session.was_restored = restored is not None
        self._arguments.scaffold.prepare(session, session.was_restored)
        for slot in self._schedule.all_hooks:
            slot.trigger.start_at(session.global_step)  # one by one: the hook before this one may have set the step
            self.call(slot, "after_create_session", slot.hook.after_create_session, session, self.coord)
        self._schedule.start()
        for extension in self._arguments.extensions:
            called(extension, extension.start, session)

    def _restore(self) -> str | None:
        """Restore the newest checkpoint, or the caller's choice unless this loop has saved since.

        Returns:
            The path of the checkpoint, ``None`` if there is none.
        """
        session = self.session
        if self._chosen is None:
            return None if self._folder is None else session.saver.restore_latest(session, self._folder)
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
            given = self._arguments.checkpoint_dir
            others = [checkpoint.name for checkpoint in list_checkpoints(os.path.dirname(self._chosen))]
            listed = f"{shortened(others)}; checkpoint_dir={given!r} restores the newest that is undamaged"
            raise DamagedCheckpointError(f"{error} {given} has {listed if others else 'no checkpoint'}.") from error
        return self._chosen

    def _saved_since(self) -> list[str]:
        """Return the paths of the checkpoints that were saved since the first call of this method, newest first."""
        assert self._saved_to is not None
        checkpoints = list_again(self._saved_to, self._cache)
        if self._order_before is None:
            self._order_before = checkpoints[-1].order if checkpoints else 0
            self._tell_of_later(checkpoints)
        return [checkpoint.path for checkpoint in reversed(checkpoints) if checkpoint.order > self._order_before]

    def _tell_of_later(self, checkpoints: list[Checkpoint]) -> None:
        """Log which of ``checkpoints`` were saved after the chosen one, from which another history begins."""
        orders = [checkpoint.order for checkpoint in checkpoints if checkpoint.path == self._chosen]
        later = [checkpoint.name for checkpoint in checkpoints if orders and checkpoint.order > orders[0]]
        if later and self._arguments.has_saver and self._arguments.ranks.is_chief:
            logger.info(
                "%s has checkpoints that were saved after %s: %s. They stay until newer ones replace them. To continue "
                "later from what this loop saves, give the next one checkpoint_dir=%r",
                self._arguments.checkpoint_dir,
                self._arguments.checkpoint,
                shortened(later),
                self._arguments.checkpoint_dir,
            )

    def _as_given(self, path: str) -> str:
        """Return ``path`` as the user writes it, if it is in the loop's ``checkpoint_dir``."""
        folder, name = os.path.split(path)
        given = self._arguments.checkpoint_dir
        return path if given is None or folder != self._folder else os.path.join(given, name)

    def finish(self, why: str | None) -> None:
        """Have the checkpoints say from now on that the training run is finished, if it is on all ranks."""
        session, arguments, state = self.session, self._arguments, self._state
        if state.stop is not None and state.stop.by in _ASKED_TO_STOP:
            return  # all ranks have agreed on the stop, so none is finished; one may have left with an error after it
        reasons = session.ranks.gather(why, "whether the training run is finished")
        if why is None or None in reasons:
            return
        # The data may have ended on one rank where the script has left its loop on another one. All say the same.
        why = next((each for each in reasons if each is not None and each != DATA_ENDED), why)
        self.position.finish(why)
        is_told = session.ranks.is_chief and (arguments.has_saver or self._folder is not None)
        if is_told and why != DATA_ENDED:
            logger.info("finished: %s; for a pause, such as a time limit, call loop.request_stop() instead", why)

    def _tell_extensions(self, session: Session, finding: Finding) -> None:
        for extension in self._arguments.extensions:
            try:
                called(extension, extension.found, session, finding)
            except Exception as error:  # what the hook has found is what the caller has to see, and others too
                logger.error("an extension that was told of a finding has failed: %s", finding.message, exc_info=error)

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint to restore."""
        return self._chosen is not None or (self._folder is not None and latest_checkpoint(self._folder) is not None)

    def call(self, slot: HookSlot, name: str, method: Callable[..., object], *args: object) -> None:
        """Call a hook's ``method`` outside a run; an exception gets a note that names the hook."""
        try:
            method(*args)
        except BaseException as error:
            note_hook(error, slot, name, self._state.global_step)
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
            coord.join(stop_grace_period_secs=self._arguments.settings.stop_grace_period_secs, ignore_live_threads=True)
        except BaseException as error:
            if error is not coord.error or error is self.fatal or not self._recovery.covers(error):
                raise
            if error is not handled:
                logger.error("a background thread failed, and is not needed any more", exc_info=error)

    def _is_interrupted(self) -> bool:
        """Return whether a hook that waits has to give up.

        Raises:
            PeerError: another rank has failed.
        """
        if self._rank_sync is not None:
            self._rank_sync.check()
            if self._rank_sync.peers.is_stop_decided:
                return True
        return self._state.signal is not None


def _watched_parts(arguments: LoopArguments, state: LoopState) -> UnsavedParts | None:
    if not arguments.has_saver or not arguments.ranks.is_chief:
        return None
    parts = {"model": arguments.model, "optimizer": arguments.optimizer, **arguments.state}
    return UnsavedParts(state, is_of_a_loop, parts)


def _watched_gradients(arguments: LoopArguments) -> Gradients | None:
    optimizer = arguments.optimizer
    saves = arguments.checkpoint_dir is not None or arguments.has_saver
    if optimizer is None or not saves or not hasattr(optimizer, "register_step_post_hook"):
        return None
    return Gradients(optimizer)
