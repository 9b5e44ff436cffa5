"""Saver: writes the whole state of a training run to a folder, and restores it.

:mod:`torchhooks.checkpoints.saving` and :mod:`torchhooks.checkpoints.restoring` have the two flows, and
:mod:`torchhooks.checkpoints.contents` says what a checkpoint contains;
``torch.load("run/model.ckpt-700/state.pt")`` reads it without this library. How checkpoints are written atomically,
ordered and found again is described in :mod:`torchhooks.checkpoints.folder`.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

from torchhooks.checkpoints.contents import Entries, parts_of, tensors_of
from torchhooks.checkpoints.folder import (
    Checkpoint,
    Folder,
    Retention,
    is_checkpoint_name,
    list_checkpoints,
    put_back,
)
from torchhooks.checkpoints.reading import (
    best_checkpoint,
    latest_checkpoint,
    load_weights,
    read_checkpoint,
    read_metadata,
    read_newest,
    scored_checkpoints,
)
from torchhooks.checkpoints.restoring import restore
from torchhooks.checkpoints.savers import Refusal
from torchhooks.checkpoints.saving import Contents, check_is_visible, collect, write_checkpoint
from torchhooks.checkpoints.sharded import sharded_parts
from torchhooks.checkpoints.steps import gather_from_all, run_on_all, writes_for_all
from torchhooks.common.checks import seconds, whole_number
from torchhooks.common.errors import CheckpointError, PeerError, add_note, brief, interrupt_in
from torchhooks.common.files import Disk, place
from torchhooks.common.log import logger
from torchhooks.common.text import call_repr
from torchhooks.device.snapshot import Size, Snapshot, SnapshotMemory, place_of
from torchhooks.progress.training_state import TrainingState
from torchhooks.ranks.ranks import LoopRanks, Ranks

__all__ = [
    "Checkpoint",
    "Saver",
    "best_checkpoint",
    "latest_checkpoint",
    "list_checkpoints",
    "load_weights",
    "read_checkpoint",
    "read_metadata",
    "scored_checkpoints",
]

_Path = str | os.PathLike[str]


class Saver:
    """Writes checkpoints, restores them, and removes old ones (``tf.train.Saver``).

    Pass one to :class:`torchhooks.Scaffold` or :class:`torchhooks.CheckpointSaverHook`, or call it between two runs:

    >>> saver = Saver(max_to_keep=2)
    >>> with MonitoredLoop(step, model, optimizer) as loop:
    ...     for inputs in loop.until_stop(batches[:3]):
    ...         loss = loop.run(inputs)
    ...         path = saver.save(loop.session, "run/model.ckpt", loop.global_step)
    ...     saver.restore(loop.session, "run/model.ckpt-2")
    >>> loop.global_step, path
    (2, 'run/model.ckpt-3')

    A checkpoint is written atomically, and older ones are removed only after that. With several ranks, every rank makes
    each call, in its training thread, and an error on one rank is raised on all; only :meth:`close` may be called by
    one rank alone.

    Args:
        max_to_keep: how many checkpoints of one name stay in a folder, those of earlier processes included; ``None`` or
            0 keeps all.
        keep_checkpoint_every_n_hours: in addition, keep the first checkpoint for good, and after that one each time
            so many hours have passed.
        async_save: copy the state to CPU memory, return, and write the files in a background thread. The next call
            raises an error of that thread. :meth:`close`, which has to be called at the end, releases the memory.
        strict: whether a checkpoint that does not match the session is an error. Otherwise the parts that match are
            loaded, and a warning names the others.

    Raises:
        ValueError: an argument is not a whole number, or not a number of hours.

    Unlike TensorFlow, the first checkpoint is among those kept for good, the hours between them continue when a
    training run is resumed, and checkpoints of another name in the same folder are counted separately.
    """

    def __init__(
        self,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        *,
        async_save: bool = False,
        strict: bool = True,
    ) -> None:
        self._retention = _checked_retention(max_to_keep, keep_checkpoint_every_n_hours)
        self.max_to_keep = max_to_keep
        """How many checkpoints of one name stay in a folder; ``None`` or 0 for all."""
        self.async_save = async_save
        """Whether a background thread writes the file."""
        self._strict = strict
        self.disk: Disk = Disk()
        """What files are written through. Tests replace it, to simulate failures."""
        # Both threads use the folders and the memory, one at a time: a save first waits for the one before it.
        self._folders: dict[str, Folder] = {}
        self._memory = SnapshotMemory()
        self._unseen: list[Size] = []  # of the last snapshot: what tensors_of(session) does not tell of
        self._background = BackgroundWriter()
        # With several ranks, the first checkpoint in a folder, until every rank has looked whether it sees it.
        self._to_see: str | None = None
        self._seen_by_all: set[str] = set()

    def save(
        self,
        session: TrainingState,
        path: _Path,
        global_step: int,
        *,
        score: float | None = None,
        refusals: Iterable[Refusal] = (),
        async_save: bool = False,
    ) -> str:
        """Write the state of ``session`` as it is now. The folder is created if necessary.

        With ``async_save``, first wait for the previous save, so that there is one copy of the state at a time;
        :attr:`is_writing` tells whether that takes time. If the previous save failed, its error is raised here, but
        this checkpoint is written all the same.

        Args:
            session: what to save.
            path: the path of the checkpoint without the step, ``"run/model.ckpt"``.
            global_step: the number in the name of the checkpoint.
            score: how good the state is, higher is better. :func:`best_checkpoint` compares scores.
            refusals: called before the file is written, with ``async_save`` in the background thread. If one of them
                returns a reason, it is logged, and nothing is written.
            async_save: write this checkpoint in a background thread, even if the Saver writes others in the foreground.

        Returns:
            The path of the checkpoint, ``"run/model.ckpt-700"``. With ``async_save``, it may not be there yet. It is
            not written, and a line in the log says so, if one of ``refusals`` gives a reason, and while a resumed
            script is on its way to the loop in which its checkpoint was saved.

        Raises:
            CheckpointError: it could not be written, or something in the state cannot be saved. The older checkpoints
                are unchanged.
        """
        prefix, step = _checked_path(path), whole_number(global_step, "global_step", 0)
        if session.position.is_repeating:
            logger.info("no checkpoint of step %d: the loop in which the restored one was saved has not begun", step)
            return f"{prefix}-{step}"
        # Before the state is read: the thread before still reads the memory for copies, and its error is known only
        # now.
        earlier = self._background.wait()
        try:
            # With async_save, a rank cannot look for the first checkpoint when save() returns. Now it has been written.
            self._look_for_first(session.ranks)
            ranks, parts = session.ranks, parts_of(session)
            sharded = sharded_parts(parts)
            writes = bool(sharded) or writes_for_all(ranks)
            snapshot = Snapshot(self._memory) if (async_save or self.async_save) and writes else None
            contents = collect(session, parts, sharded, score, snapshot)
            if snapshot is not None:
                self._unseen = snapshot.sizes_without({*map(place_of, tensors_of(session))})
            # Without shards the chief has everything by now, and writes alone: each step of the write is its own then.
            writers = ranks if sharded else LoopRanks(ranks, alone=True)
            if snapshot is not None:
                # The thread that writes gathers while the training thread may gather too, so it needs ranks of its
                # own. They are made here, because that is a step that all ranks make in the training thread.
                writers = writers.for_saving()
            # A script may change the current directory while the thread writes.
            write = partial(self._write, writers, contents, refusals, os.path.abspath(prefix), step)

            def start() -> None:
                if writes:
                    self._start(write, snapshot, step)
                # In a step of all ranks, because the write before may have failed on this rank alone. This checkpoint
                # is handed over first: the error must not cost a second checkpoint.
                if earlier is not None:
                    raise earlier

            run_on_all(ranks, "start to write", start)
            if (
                ranks.is_connected
                and ranks.share_folder
                and os.path.dirname(writes_to := os.path.abspath(prefix)) not in self._seen_by_all
            ):
                self._to_see = f"{writes_to}-{step}"
                if not (async_save or self.async_save):
                    self._look_for_first(ranks)
        except Exception as error:
            if earlier is not None and error is not earlier:
                add_note(error, f"The checkpoint before it was not written either: {brief(earlier)}")
            self._background.forget(earlier)  # not after a Ctrl-C, which does not tell of it: then close() raises it
            raise
        return f"{prefix}-{step}"

    def prepare(self, session: TrainingState) -> bool:
        """Return whether a save in the background finds memory for its copy. If not, a thread begins to allocate it.

        A save copies the state from a device into pinned memory, which takes two thirds of a second to allocate for
        each GB. A save that does not find it waits. A :class:`torchhooks.CheckpointSaverHook` calls this when the
        session is created, when the optimizer has made its state, and before a save, which it puts off until the memory
        is there.

        The size is that of the model, the optimizer, and the modules and optimizers in the ``state`` of the loop. What
        else the last save has copied counts too.

        Args:
            session: what will be saved.
        """
        places = dict.fromkeys(map(place_of, tensors_of(session)))
        return self._memory.prepare([*((device.type, nbytes) for device, _, nbytes in places), *self._unseen])

    def mark_finished(self, session: TrainingState, path: _Path, global_step: int) -> None:
        """Have the checkpoint that :meth:`save` has just written say that the training run is finished, and why.

        Only its manifest changes. With several ranks, every rank calls this. Does nothing if the checkpoint is not
        there, because something refused or removed it.

        Raises:
            CheckpointError: it could not be written.
        """
        why = session.why_finished
        self._wait_on_all(session.ranks)  # it may still be being written

        def mark() -> None:
            folder, name = os.path.split(os.path.abspath(f"{_checked_path(path)}-{global_step}"))
            if why is not None and writes_for_all(session.ranks) and folder in self._folders:
                with _as_checkpoint_errors(os.path.join(folder, name)), suppress(FileNotFoundError):
                    self._folders[folder].mark_finished(name, why)

        run_on_all(session.ranks, "say that the training run is finished", mark)

    def restore(self, session: TrainingState, path: _Path) -> None:
        """Load the checkpoint at ``path``, as returned by ``save``. Everything is checked before anything is loaded.

        Tensors are loaded to the devices of those in the session, wherever they were saved from. Random states are set
        too, on as many accelerators as there are. If an object raises while its state is loaded, the objects before it
        are loaded already.

        Raises:
            DamagedCheckpointError: the checkpoint is missing or damaged. :meth:`restore_latest` uses an older one.
            CheckpointError: it does not match the session, or could run code.
        """
        checkpoint = place(path)

        def choose() -> tuple[str, Entries]:
            put_back(os.path.dirname(checkpoint) or os.curdir)
            return checkpoint, read_checkpoint(checkpoint, session)

        # The checkpoint may be the one that the background thread is still writing.
        self._wait_on_all(session.ranks)
        restore(session, choose, strict=self._strict)

    def restore_latest(self, session: TrainingState, directory: _Path) -> str | None:
        """Load the newest checkpoint in ``directory`` that is not damaged, with a warning for each damaged one.

        Returns:
            The path of the checkpoint that was loaded, ``None`` if the folder has none.

        Raises:
            CheckpointError: there are checkpoints and all are damaged, or the newest undamaged one does not match.
        """
        self._wait_on_all(session.ranks)
        choose = partial(read_newest, directory, session)
        return restore(session, choose, strict=self._strict)

    def wait_for_all(self, session: TrainingState) -> None:
        """Call :meth:`wait` on every rank of ``session``, and raise on all of them if one of them raised."""
        self._wait_on_all(session.ranks)

    def wait(self) -> None:
        """Wait for a checkpoint that is being written by this process, and raise the error if it failed."""
        error = self._background.wait()
        if error is not None:
            self._background.forget(error)
            raise error

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background, so that the next save would wait."""
        return self._background.is_busy

    def close(self) -> None:
        """Call :meth:`wait`, and release the memory for copies. The Saver can still be used and closed again."""
        try:
            self.wait()
        finally:
            self._background.end()
            self._memory.release()
            # After the wait: as long as a file is being written, another process that saves here has to be warned.
            for folder in self._folders.values():
                folder.release()

    def _wait_on_all(self, ranks: Ranks) -> None:
        run_on_all(ranks, "wait for the one before it", self.wait)
        self._look_for_first(ranks)

    def _look_for_first(self, ranks: Ranks) -> None:
        """Have every rank look for the first checkpoint that was written into a folder, if that was not done yet."""
        path, self._to_see = self._to_see, None
        if path is not None and check_is_visible(ranks, path):
            self._seen_by_all.add(os.path.dirname(path))

    def _start(self, write: Callable[[], None], snapshot: Snapshot | None, step: int) -> None:
        """Call ``write()``, with a snapshot in the background."""
        if snapshot is None:
            write()
            return
        blocks = snapshot.end()

        def write_copies() -> None:
            snapshot.wait()  # in that thread: training continues while the copies from a device are under way
            write()

        try:
            self._background.start(write_copies)
        except RuntimeError as error:
            logger.warning(
                "no thread could be started (%s): the checkpoint of step %d is written in the foreground", error, step
            )
            write_copies()
        self._memory.give_back(blocks)  # the thread still reads it: the next save waits before it takes this memory

    def _write(self, ranks: LoopRanks, contents: Contents, refusals: Iterable[Refusal], prefix: str, step: int) -> None:
        """Write and commit what was collected, unless a rank refuses."""
        reasons = gather_from_all(ranks, "ask for refusals", lambda: _first_reason(refusals))
        reason = next((each for each in reasons if each is not None), None)
        if reason is not None:
            logger.warning("no checkpoint of step %d: %s", step, reason)
            return
        path, name = os.path.split(prefix)
        folder = self._folders.setdefault(path, Folder(path, self.disk, self._retention))
        with _as_checkpoint_errors(f"{prefix}-{step}"):
            write_checkpoint(ranks, contents, folder, name, step)

    def __repr__(self) -> str:
        max_to_keep, every_n_hours = self._retention
        return call_repr(
            self,
            max_to_keep=max_to_keep,
            keep_checkpoint_every_n_hours=every_n_hours,
            async_save=self.async_save,
            strict=self._strict,
        )


class BackgroundWriter:
    """The thread that writes, one checkpoint at a time. The Future of a write carries its error.

    Only the training thread calls this. Python waits for the thread at the end of the process.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._error: BaseException | None = None  # of a write that is over, until it was raised
        self._process = os.getpid()

    def start(self, write: Callable[[], None]) -> None:
        """Have the thread call ``write()``. The call before has to be over.

        Raises:
            RuntimeError: no thread can be started.
        """
        if self._executor is None:
            # It stays for the next save: starting a thread may take 5 ms, until Python switches back to this one.
            self._executor = ThreadPoolExecutor(1, "torchhooks saver")
        # A Ctrl-C may come at any moment of submit(), and take the Future that it returns with it. So this one is known
        # before. If the thread has not taken it up, it is cancelled, and the thread writes nothing: save() raises, and
        # the caller knows of no checkpoint. If it has, wait() waits for it, as for any other.
        writing = Future[None]()
        try:
            self._writing = writing
            self._executor.submit(_carry_out, writing, write)
        except BaseException as error:
            if writing.cancel():
                self._writing = None
            if isinstance(error, RuntimeError):
                self._executor = None  # it has queued the call all the same
            raise

    @property
    def is_busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def wait(self) -> BaseException | None:
        """Wait for the thread, and return its error, again each time until :meth:`forget` is called."""
        if self._process != os.getpid():
            # A forked process has no such thread, and the errors are its parent's.
            self._executor = self._writing = self._error = None
            self._process = os.getpid()
        if self._writing is not None:
            error = None if self._writing.cancelled() else self._writing.exception()
            if error is not None:
                self.end()  # what catches the error may keep the saver for long
                if self._error is not None:
                    add_note(error, f"The checkpoint before it was not written either: {brief(self._error)}")
            # In this order: after a Ctrl-C between the two, the error is asked for again.
            self._error = error or self._error
            self._writing = None
        return self._error

    def forget(self, error: BaseException | None) -> None:
        """Note that ``error`` was raised."""
        if self._error is error:
            self._error = None

    def end(self) -> None:
        """Let the thread end. It is started again when it is needed."""
        executor, self._executor = self._executor, None
        if executor is not None:
            # A Future is done a moment before its thread lets go of the call, and of the copies that the call holds.
            # The wait for this moment frees them for certain. A write that goes on, after a Ctrl-C, is not waited for.
            executor.shutdown(wait=not self.is_busy)


def _carry_out(future: Future[None], call: Callable[[], None]) -> None:
    """Call ``call()`` unless ``future`` was cancelled, and set its result."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        call()
    except BaseException as error:  # every kind: the next call of the saver raises it in the training thread
        future.set_exception(error)
    else:
        future.set_result(None)


@contextmanager
def _as_checkpoint_errors(path: str) -> Iterator[None]:
    """Raise errors of the file system and of torch as a CheckpointError that says what to do."""
    try:
        yield
    except (CheckpointError, PeerError):  # the second is a RuntimeError too
        raise
    except (RuntimeError, OSError) as error:
        interrupt = interrupt_in(error)  # raised in a write that torch called, which reports another error
        if interrupt is not None:
            raise interrupt from None
        message = f"{path} was not written"
        if not isinstance(error, OSError):
            raise CheckpointError(f"{message}: {error}") from error
        way_out = _WAYS_OUT.get(error.errno or 0, "The older checkpoints are unchanged.")
        raise CheckpointError(f"{message}: {error.strerror or error}. {way_out}") from error


def _first_reason(refusals: Iterable[Refusal]) -> str | None:
    return next((reason for refusal in refusals if (reason := refusal()) is not None), None)


def _checked_retention(max_to_keep: int | None, every_n_hours: float | None) -> Retention:
    whole_number(0 if max_to_keep is None else max_to_keep, "max_to_keep", 0)
    if every_n_hours is not None and not 0 < seconds(every_n_hours, "keep_checkpoint_every_n_hours") < math.inf:
        raise ValueError(f"keep_checkpoint_every_n_hours={every_n_hours!r}: must be more than 0; None is never")
    return Retention(max_to_keep, every_n_hours)


def _checked_path(path: _Path) -> str:
    prefix = place(path)
    if not is_checkpoint_name(os.path.basename(prefix)):
        raise ValueError(
            f"path={path!r}: must end in a name that does not begin with a dot and has no 'tfevents' in it, such as "
            "'run/model.ckpt'"
        )
    return prefix


_WAYS_OUT = {
    errno.ENOSPC: "Free some space, or keep fewer with max_to_keep.",
    errno.EDQUOT: "Free some space, or keep fewer with max_to_keep.",
    errno.EFBIG: "Raise the limit on the size of files, or save less.",
    errno.EACCES: "Make the folder writable, or choose another.",
    errno.EPERM: "Make the folder writable, or choose another.",
    errno.EROFS: "Choose a folder that can be written to.",
    errno.ENOENT: "The folder is gone, with the checkpoints in it: put it back, or choose another.",
    errno.EEXIST: "A file has the name of the folder: choose another path.",
    errno.ENOTDIR: "A file has the name of the folder: choose another path.",
    errno.ENOTEMPTY: "A folder has the name of the checkpoint: choose another path.",
}
