"""Saver: writes the whole state of a training run to a folder, and restores it.

What a checkpoint contains is described in :mod:`torchhooks.checkpoints.state`;
``torch.load("run/model.ckpt-700/state.pt")`` reads it without this library. How checkpoints are written atomically,
ordered and found again is described in :mod:`torchhooks.checkpoints.files`.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from torchhooks.checkpoints.claim import take_back
from torchhooks.checkpoints.files import (
    Checkpoint,
    Folder,
    Retention,
    is_checkpoint_name,
    list_checkpoints,
)
from torchhooks.checkpoints.manifest import as_json
from torchhooks.checkpoints.per_rank import (
    Share,
    all_or_none,
    exchange,
    leads,
    read_for_all,
    share_of,
    warn_of_buckets,
    write_checkpoint,
)
from torchhooks.checkpoints.reading import (
    best_checkpoint,
    latest_checkpoint,
    load_file,
    load_weights,
    read_checkpoint,
    read_metadata,
    read_newest,
    scored_checkpoints,
)
from torchhooks.checkpoints.sharded import like_own, sharded_parts
from torchhooks.checkpoints.state import SessionLike, changed_metadata, compare, load_gradients, parts_of
from torchhooks.checkpoints.undo import Undo, finish, plain_modules
from torchhooks.common.checks import seconds, whole_number
from torchhooks.common.errors import CheckpointError, PeerError, add_note, brief, interrupt_in
from torchhooks.common.files import Disk
from torchhooks.common.log import logger
from torchhooks.common.random_states import set_random_states
from torchhooks.common.stateful import Stateful
from torchhooks.common.text import call_repr, shortened
from torchhooks.device.snapshot import Held, Snapshot
from torchhooks.ranks.ranks import LoopRanks

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

_NOT_STRICT = "MonitoredLoop(..., scaffold=Scaffold(saver=Saver(strict=False)))"
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

    A checkpoint is written atomically, and older ones are removed only after that. Checkpoints that an earlier process
    wrote to the folder count towards the number to keep.

    With the session of a loop of several ranks, every rank has to make each call, in its training thread. The chief
    writes and chooses the files, the other ranks read them, and an error on one rank is raised on all. Only
    :meth:`close` may be called by one rank alone.

    Args:
        max_to_keep: how many checkpoints of one name stay in a folder; ``None`` or 0 keeps all.
        keep_checkpoint_every_n_hours: in addition, keep the first checkpoint for good, and after that one each time
            so many hours have passed.
        async_save: copy the state to CPU memory, return, and write the files in a background thread. The next call
            raises an error of that thread. The memory, one copy of the state, is kept for the next save until
            :meth:`close`, which has to be called at the end. For tensors on an accelerator it is pinned, in blocks of
            up to 256 MB, or of one larger tensor, which torch rounds up to a power of two.
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
        self.async_save = async_save
        """Whether a background thread writes the file."""
        self._strict = strict
        self.disk = Disk()
        """What files are written through. Tests replace it, to simulate failures."""
        self._folders: dict[str, Folder] = {}
        # The thread that writes sets the error before it ends, and _finish() reads it after joining the thread. So one
        # thread has it at a time, and it needs no lock. The same holds for the folders and for the held memory.
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._held: Held = []

    def save(
        self,
        session: SessionLike,
        path: _Path,
        global_step: int,
        *,
        score: float | None = None,
        refusals: Iterable[Callable[[], str | None]] = (),
        async_save: bool = False,
    ) -> str:
        """Write the state of ``session`` as it is now. The folder is created if necessary.

        With ``async_save``, first wait for the previous save, so that there is one copy of the state at a time;
        :attr:`is_writing` tells whether that takes time. If the
        previous save failed, its error is raised here, but this checkpoint is written all the same.

        Args:
            session: what to save.
            path: the path of the checkpoint without the step, ``"run/model.ckpt"``.
            global_step: the number in the name of the checkpoint.
            score: how good the state is, higher is better. :func:`best_checkpoint` compares scores.
            refusals: called before the file is written, with ``async_save`` in the background thread. If one of them
                returns a reason, it is logged, and nothing is written.
            async_save: write this checkpoint in a background thread, even if the Saver writes others in the foreground.

        Returns:
            The path of the checkpoint, ``"run/model.ckpt-700"``. With ``async_save``, it may not be there yet.

        Raises:
            CheckpointError: it could not be written, or something in the state cannot be saved. The older checkpoints
                are unchanged.
        """
        prefix, step = _checked_path(path), whole_number(global_step, "global_step", 0)
        earlier = self._finish()
        try:
            sharded = sharded_parts(parts_of(session))
            writes = bool(sharded) or leads(session.ranks)
            snapshot = Snapshot(self._held) if (async_save or self.async_save) and writes else None
            self._held = []  # until the snapshot is complete: after an error, copies into it may still be in flight
            share, about = share_of(session, sharded, snapshot), _about(session, score)
            ranks = session.ranks if sharded else LoopRanks(session.ranks, alone=True)
            if snapshot is not None:
                # The thread that writes gathers while the training thread may gather too, so it needs ranks of its
                # own. They are made here, because that is a step that all ranks make in the training thread.
                ranks = ranks.for_saving()

            def start() -> None:
                if writes:
                    self._start(partial(self._write, ranks, share, about, refusals, prefix, step), snapshot, step)
                _raise(earlier)

            all_or_none(session.ranks, start)
        except Exception as error:
            if earlier is not None and error is not earlier:
                add_note(error, f"The checkpoint before it was not written either: {brief(earlier)}")
            raise
        except BaseException:
            self._error = earlier  # close() raises it
            raise
        return f"{prefix}-{step}"

    def restore(self, session: SessionLike, path: _Path) -> None:
        """Load the checkpoint at ``path``, as returned by ``save``. Everything is checked before anything is loaded.

        Tensors are loaded to the devices of those in the session, wherever they were saved from. Random states are set
        too, on as many accelerators as there are. If anything raises, everything is put back as it was, except that a
        Ctrl-C in the last moment is raised once everything is loaded.

        Raises:
            DamagedCheckpointError: the checkpoint is missing or damaged. :meth:`restore_latest` uses an older one.
            CheckpointError: it does not match the session, or could run code.
        """
        checkpoint = os.fspath(path)

        def choose() -> tuple[str, dict[str, Any]]:
            take_back(os.path.dirname(checkpoint) or os.curdir)
            return checkpoint, read_checkpoint(checkpoint, session)

        self.wait_for_all(session)
        self._restore(session, choose)

    def restore_latest(self, session: SessionLike, directory: _Path) -> str | None:
        """Load the newest checkpoint in ``directory`` that is not damaged, with a warning for each damaged one.

        Returns:
            The path of the checkpoint that was loaded, ``None`` if the folder has none.

        Raises:
            CheckpointError: there are checkpoints and all are damaged, or the newest undamaged one does not match.
        """
        self.wait_for_all(session)
        return self._restore(session, partial(read_newest, directory, partial(load_file, session=session)))

    def wait_for_all(self, session: SessionLike) -> None:
        """Call :meth:`wait` on every rank of ``session``, and raise on all of them if one of them raised."""
        all_or_none(session.ranks, self.wait)

    def wait(self) -> None:
        """Wait for a checkpoint that is being written by this process, and raise the error if it failed."""
        error = self._finish()
        if error is not None:
            raise error

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background, so that the next save would wait."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Call :meth:`wait`, and release the memory for copies. The Saver can still be used and closed again."""
        try:
            self.wait()
        finally:
            self._held = []
            for folder in self._folders.values():
                folder.release()

    def _start(self, write: Callable[[], None], snapshot: Snapshot | None, step: int) -> None:
        """Call ``write()``, with a snapshot in a thread."""
        if snapshot is None:
            write()
            return
        held = snapshot.end()
        gate, started = threading.Lock(), threading.Event()
        # Not a daemon: Python waits for it at the end of the process.
        thread = threading.Thread(
            target=self._write_later, args=(gate, started, snapshot, write), name=f"save step {step}"
        )
        # The thread that trains holds the gate, so that the new thread blocks at once. Otherwise start() would return
        # only when Python next switches threads, up to 5 ms later.
        gate.acquire()
        try:
            thread.start()
            self._thread = thread  # only now: a thread that was not started cannot be joined
            # In this order: the thread looks at the event once it has the gate. If a Ctrl-C comes before, the thread
            # writes nothing, because save() raises and the caller knows of no checkpoint.
            started.set()
            gate.release()
        except BaseException as error:
            if gate.locked():
                gate.release()
            if not isinstance(error, RuntimeError):
                raise
            logger.warning(
                "no thread could be started (%s): the checkpoint of step %d is written in the foreground", error, step
            )
            snapshot.wait()
            write()
        self._held = held  # the thread still reads it: the next save joins the thread before it copies into this memory

    def _write_later(
        self, gate: threading.Lock, started: threading.Event, snapshot: Snapshot, write: Callable[[], None]
    ) -> None:
        try:
            with gate:
                if not started.is_set():
                    return  # a Ctrl-C ended start() after the thread began: save() has raised it
            snapshot.wait()  # in this thread: training continues while the copies from a device are under way
            write()
        except BaseException as error:  # every kind: the next call of the saver raises it in the thread that trains
            self._error = error

    def _write(
        self,
        ranks: LoopRanks,
        share: Share,
        about: dict[str, Any],
        refusals: Iterable[Callable[[], str | None]],
        prefix: str,
        step: int,
    ) -> None:
        reasons = exchange(ranks, lambda: next((reason for each in refusals if (reason := each()) is not None), None))
        reason = next((each for each in reasons if each is not None), None)
        if reason is not None:
            logger.warning("no checkpoint of step %d: %s", step, reason)
            return
        path, name = os.path.split(os.path.abspath(prefix))
        folder = self._folders.setdefault(path, Folder(path, self.disk, self._retention))
        message = f"{os.path.join(path, name)}-{step} was not written"
        try:
            write_checkpoint(ranks, share, folder, name, step, about)
        except (CheckpointError, PeerError):  # the second is a RuntimeError too
            raise
        except (RuntimeError, OSError) as error:
            interrupt = interrupt_in(error)  # raised in a write that torch called, which reports another error
            if interrupt is not None:
                raise interrupt from None
            if not isinstance(error, OSError):
                raise CheckpointError(f"{message}: {error}") from error
            way_out = _WAYS_OUT.get(error.errno or 0, "The older checkpoints are unchanged.")
            raise CheckpointError(f"{message}: {error.strerror or error}. {way_out}") from error

    def _finish(self) -> BaseException | None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def _restore(self, session: SessionLike, choose: Callable[[], tuple[str, dict[str, Any]] | None]) -> str | None:
        """Load the checkpoint that ``choose()`` returns, with its path, and return the path."""
        found = read_for_all(session, choose, partial(load_file, session=session))
        if found is None:
            return None
        path, saved, is_whole = found
        pairs = all_or_none(session.ranks, lambda: self._compared(session, path, saved, is_whole))
        position = session.position
        # A loader that is being iterated continues where it is: a recovery cannot take back the items it gave.
        pairs = {name: pair for name, pair in pairs.items() if position is None or not position.iterates(pair[0])}
        parts = {name: part for name, (part, _) in pairs.items()}
        last: dict[str, Any] = {name: pairs.pop(name) for name in plain_modules(parts)}
        groups = [] if session.optimizer is None else session.optimizer.param_groups
        undo = Undo().random_states().gradients(parameter for group in groups for parameter in group["params"])
        undo.loads({name: parts[name] for name in pairs})
        step, is_last = session.global_step, False

        def load_last() -> None:
            for part, state in last.values():
                part.load_state_dict(like_own(part, state), strict=self._strict)

        try:
            all_or_none(session.ranks, lambda: self._load_all(session, saved, pairs, path))
            is_last = True
            load_last()
        except BaseException as error:
            if is_last:
                finish(load_last, error)
            else:
                session.global_step = step
                undo.put_back(error)
            raise
        if is_whole:
            warn_of_buckets(session)
        changes = list(changed_metadata(saved.get("metadata"), session.metadata)) if session.metadata else []
        if changes and "metadata" in saved:
            logger.warning("the loop differs from the checkpoint %s: %s", path, shortened(changes, 8))
        return path

    def _compared(
        self, session: SessionLike, path: str, saved: dict[str, Any], is_whole: bool
    ) -> dict[str, tuple[Stateful, Any]]:
        """Return each object of ``session`` and the state to load into it; raise or warn about what does not match."""
        pairs, misfits = compare(session, saved, without_own=not is_whole)
        if misfits:
            report = "\n  ".join([f"{path} does not match this session:", *misfits])
            if self._strict:
                raise CheckpointError(f"{report}\nMake them match, or load what matches: {_NOT_STRICT}")
            logger.warning("%s\nThe rest is loaded.", report)
        return pairs

    def _load_all(
        self, session: SessionLike, saved: dict[str, Any], pairs: dict[str, tuple[Stateful, Any]], path: str
    ) -> None:
        for name, (part, state) in pairs.items():
            self._load(name, part, state, path)
        load_gradients(session, saved)
        session.global_step = saved["global_step"]
        is_whole = "random" in saved  # not if another number of ranks has saved it
        if is_whole:
            set_random_states(saved["random"])
            session.accumulated.load_state_dict(saved.get("running_values"))
        if session.position is not None:
            undoing = partial(_undoing, session)
            session.position.load_state_dict(saved.get("position"), saved.get("random"), undoing)

    def _load(self, name: str, part: Stateful, state: Any, path: str) -> None:
        try:
            state = like_own(part, state)
            if isinstance(part, torch.nn.Module):
                part.load_state_dict(state, strict=self._strict)
            else:
                part.load_state_dict(state)
        except BaseException as error:
            add_note(error, f"while loading {name!r} from {path}; what was loaded before it is put back")
            raise

    def __repr__(self) -> str:
        max_to_keep, every_n_hours = self._retention
        return call_repr(
            self,
            max_to_keep=max_to_keep,
            keep_checkpoint_every_n_hours=every_n_hours,
            async_save=self.async_save,
            strict=self._strict,
        )


def _checked_retention(max_to_keep: int | None, every_n_hours: float | None) -> Retention:
    whole_number(0 if max_to_keep is None else max_to_keep, "max_to_keep", 0)
    if every_n_hours is not None and not 0 < seconds(every_n_hours, "keep_checkpoint_every_n_hours") < math.inf:
        raise ValueError(f"keep_checkpoint_every_n_hours={every_n_hours!r}: must be more than 0; None is never")
    return Retention(max_to_keep, every_n_hours)


def _checked_path(path: _Path) -> str:
    prefix = os.fspath(path)
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


def _about(session: SessionLike, score: float | None) -> dict[str, Any]:
    """Return entries of the manifest: how good the state is, and what the loop says about itself."""
    return {
        "world_size": session.ranks.size if session.ranks.is_connected else 1,
        "score": None if score is None else float(score),
        "metadata": as_json(session.metadata),
    }


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _undoing(session: SessionLike) -> Callable[[], None]:
    """Return a function that puts back what has changed in the states of ``session`` since this call."""
    position = session.position
    parts: dict[str, Any] = dict(parts_of(session))
    if session.gradients is not None:
        parts["gradients"] = session.gradients

    def load(name: str, part: Stateful, state: Any) -> bool:
        if position is not None and position.iterates(part):
            return False
        try:
            part.load_state_dict(state)
        except Exception as error:
            logger.warning("the body of the loop changed %s a second time: %s", name, brief(error))
            return False
        return True

    undo = Undo().states(parts, load)

    def put_back() -> None:
        changed = undo.put_back()
        if changed:
            logger.info("put back %s, which code that the checkpoint follows had changed again", shortened(changed, 8))

    return put_back
