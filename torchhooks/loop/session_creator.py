"""Creating the session of a loop, and another one when the loop recovers from an error."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from torchhooks.checkpoints.files import Checkpoint, Seen, list_again
from torchhooks.checkpoints.gradients import Gradients
from torchhooks.checkpoints.saver import latest_checkpoint, list_checkpoints
from torchhooks.common.errors import DamagedCheckpointError, add_note
from torchhooks.common.log import logger
from torchhooks.common.text import shortened
from torchhooks.device.readback import Readback
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.ending import Ending, State, StoppedBy
from torchhooks.lifecycle.hook import RunServices
from torchhooks.lifecycle.recovery import Recovery
from torchhooks.lifecycle.session import Session
from torchhooks.loop.arguments import LoopArguments
from torchhooks.loop.peers import Peers
from torchhooks.loop.run import Lifecycle, note_hook
from torchhooks.loop.schedule import Schedule, ScheduledHook
from torchhooks.position.items import Items
from torchhooks.position.position import Position
from torchhooks.position.progress import DataWaits, Progress


class SessionCreator:
    """Creates the session of a loop, and closes it and creates the next one to recover from an error.

    Background threads get ``stop_grace_period_secs`` to end.
    """

    coord: Coordinator
    """The background threads of the current session."""
    lifecycle: Lifecycle
    progress: Progress
    session: Session

    def __init__(
        self,
        arguments: LoopArguments,
        *,
        schedule: Schedule,
        readback: Readback,
        position: Position,
        data_waits: DataWaits,
        items: Items,
        ending: Ending,
        recovery: Recovery,
        gradients: Gradients | None,
        peers: Peers | None,
    ) -> None:
        self._arguments = arguments
        # A script may change the current directory while it trains.
        self._folder = None if arguments.checkpoint_dir is None else os.path.abspath(arguments.checkpoint_dir)
        self._chosen: str | None = None  # the checkpoint that the caller gave instead of a folder
        if self._folder is not None and arguments.checkpoint is not None:
            self._chosen = os.path.join(self._folder, arguments.checkpoint)
        self._saved_to = arguments.saved_to or self._folder
        self._seen: Seen = {}
        self._order_before: int | None = None  # of the newest checkpoint there when the loop began
        self._schedule = schedule
        self._readback = readback
        self._position = position
        self._data_waits = data_waits
        self._items = items
        self._ending = ending
        self._recovery = recovery
        self._gradients = gradients
        self._peers = peers
        self._warned: set[str] = set()  # by the sessions, of what is warned of once
        self._renew()

    def call(self, scheduled: ScheduledHook, name: str, method: Callable[..., object], *args: Any) -> None:
        """Call a hook's ``method`` outside a run; an exception gets a note that names the hook."""
        try:
            method(*args)
        except BaseException as error:
            note_hook(error, scheduled, name, self.progress)
            raise

    def end(self, scheduled: ScheduledHook) -> None:
        """Call the ``end`` of a hook, of a collective one on all ranks at once."""
        if self._peers is not None and scheduled in self._schedule.collective:
            self._peers.align()
        self.call(scheduled, "end", scheduled.end, self.session)

    def create(self, recovers: bool = False) -> None:
        """Restore or initialize the current session, and call every hook's ``after_create_session``."""
        session, restored = self.session, self._restore()
        if restored is not None:
            path = self._as_given(restored)
            logger.info("restored step %d from %s", session.global_step, path)
            if session.global_step and not recovers and self._position.state_dict() is None:
                logger.info("%s has no position in the data: what is not in the loop's state starts over", path)
        elif self._folder is not None:
            self._warn_if_nothing_saves()
        session.was_restored = restored is not None
        self._arguments.scaffold.prepare(session, session.was_restored)
        self.coord.on_stop(functools.partial(self._thread_stopped, self.coord))
        for scheduled in self._schedule.all_hooks:
            self.call(scheduled, "after_create_session", scheduled.hook.after_create_session, session, self.coord)
        self._schedule.start()

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
        checkpoints = list_again(self._saved_to, self._seen)
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

    def _warn_if_nothing_saves(self) -> None:
        """Warn on the chief that this training run cannot be resumed, though the caller named a folder for it."""
        if not self._arguments.ranks.is_chief:
            return
        if not self._arguments.has_saver:
            given = self._arguments.checkpoint_dir
            way_out = f"add CheckpointSaverHook({given!r}, save_secs=600)"
            logger.warning("%s has no checkpoint, and no hook saves one: %s", given, way_out)

    def _as_given(self, path: str) -> str:
        """Return ``path`` as the user writes it, if it is in the loop's ``checkpoint_dir``."""
        folder, name = os.path.split(path)
        given = self._arguments.checkpoint_dir
        return path if given is None or folder != self._folder else os.path.join(given, name)

    def may_recover(self, error: BaseException) -> bool:
        """Return whether to recover from ``error``, which a run or the creation of a session raised.

        If it is one of ``recoverable_errors`` and the loop does not recover, a note on the error says why.
        """
        if self._ending.stop is not None or not self._recovery.allows(error):
            return False
        if self._ending.signal is not None:
            add_note(error, f"torchhooks: not recovered from, because signal {self._ending.signal} arrived")
            return False
        self.session.wait_for_savers()  # the newest checkpoint may still be being written
        if self._chosen is None and (self._folder is None or latest_checkpoint(self._folder) is None):
            add_note(error, "torchhooks: not recovered from, because there is no checkpoint to restore")
            return False
        return True

    def recover(self, error: BaseException) -> None:
        """Close the session, pause unless this is the first recovery in a row, and create the next session.

        An error on the way is recovered from likewise, if that is allowed.
        """
        while True:
            try:
                self._readback.drain()
                self._leave(error)
                self._recovery.pause(error, self._ending.wait_for_signal)
                if self._ending.signal is not None:
                    raise error
                self.create(recovers=True)  # in this process the data continue where they are
            except BaseException as another:
                if not self.may_recover(another):
                    raise
                error = another
            else:
                return

    def join_threads(self, coord: Coordinator | None = None) -> None:
        """Stop the background threads, wait for them, and raise the error of the first that failed."""
        coord = self.coord if coord is None else coord
        coord.request_stop()
        coord.join(stop_grace_period_secs=self._arguments.stop_grace_period_secs, ignore_live_threads=True)

    def _renew(self) -> None:
        arguments = self._arguments
        self.progress = Progress()
        earlier = {id(saver): saver for saver in self.session.savers} if hasattr(self, "session") else {}
        self.session = Session(
            arguments.model,
            arguments.optimizer,
            arguments.state,
            arguments.scaffold.saver,
            hooks=arguments.hook_states,
            checkpoint_dir=self._folder,
            metadata=arguments.metadata,
            warned=self._warned,
            position=self._position,
            gradients=self._gradients,
            progress=self.progress,
            data_waits=self._data_waits,
            items=self._items,
            inputs=arguments.step.parameters,
            drain=self._readback.drain,
            interrupted=self._is_interrupted,
            stopped_by_signal=lambda: self._ending.by_signal,
            ranks=arguments.ranks,
            accumulated=self._schedule.accumulated,
        )
        self._schedule.begin_session(self.session, self.progress, arguments.step)
        # A hook may not get to add its saver again, if the new session cannot be created. It is closed all the same.
        self.session.savers += [saver for saver in earlier.values() if saver is not self.session.saver]
        self.coord = Coordinator()
        services = RunServices(self.session, arguments.step, self._readback, self._ending, self._items)
        lifecycle: Callable[..., Lifecycle] = Lifecycle
        if self._peers is not None:
            lifecycle = self._peers.lifecycle
            self.session.guard_checkpoints(self._peers.why_no_checkpoint)
        self.lifecycle = lifecycle(
            services=services,
            progress=self.progress,
            schedule=self._schedule,
            steps_per_run=arguments.steps_per_run,
        )

    def _is_interrupted(self) -> bool:
        """Return whether a hook that waits has to give up.

        Raises:
            PeerError: another rank has failed.
        """
        if self._peers is not None:
            self._peers.check()
            if self._peers.is_stop_decided:
                return True
        return self._ending.signal is not None

    def _leave(self, error: BaseException) -> None:
        """Replace the session that failed with ``error`` by a new one, and wait for its threads.

        Raises:
            BaseException: another error of a thread, which the loop does not recover from.
        """
        session, coord = self.session, self.coord
        self._items.clear()
        self._renew()
        session.close()
        try:
            self.join_threads(coord)
        except BaseException as another:
            if another is not error:
                raise
        else:  # a run failed, not a thread: it is made again
            self._position.run_is_made_again()
        for later in coord.later_errors:
            if not self._recovery.covers(later):
                raise later

    def _thread_stopped(self, coord: Coordinator) -> None:
        """Stop the loop because a background thread asked to, unless the loop will recover from the thread's error."""
        if self._ending.state is State.CLOSED or coord is not self.coord:
            return
        try:
            coord.raise_requested_exception()
        except BaseException as error:
            if self._recovery.covers(error) and self._folder is not None:
                self._schedule.set_pending()  # the end of the run, or should_stop(), recovers
                return
        self._ending.propose_stop(f"thread {threading.current_thread().name}", StoppedBy.THREAD)
