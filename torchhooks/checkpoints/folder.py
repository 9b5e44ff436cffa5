"""Folders of checkpoints: written atomically, numbered in the order of writing, and removed when there are too many.

A checkpoint is a folder, and its manifest names its files, their sizes and their sums:

model.ckpt-700/
    state.pt                                    of torch.save: everything, or what is not sharded
    rank-1.pt, rank-2.pt                        with DTensors: what belongs to another rank alone
    .metadata, __0_0.distcp, __1_0.distcp       with DTensors: of torch.distributed.checkpoint
    manifest.json                               written last

So a manifest tells whether its checkpoint is complete, and the manifests are all that is known about a folder of
checkpoints. There is no index that could disagree with them. A save removes checkpoints that have a valid manifest, and
what has the very name of the new one.

How a checkpoint is written:

    make a temporary folder next to it; write the files into it, the manifest last; fsync each, and the folder
    rename; fsync the folder of checkpoints              # from here on it survives a kill and a power failure
    remove the checkpoints that are no longer kept, each after it was renamed to a temporary name

A folder cannot be renamed to the name of another one. So an older checkpoint of the same step is moved aside first, and
:func:`put_back` gives it its name again if the process is killed in between.

A kill may leave a temporary folder. Its name has the host, the process and the time when that began, so the next save
knows whether that still writes it, and removes it if not. If the process cannot be seen, as in another container,
the lock of the folder decides. A checkpoint that is incomplete, changed or copied is
named in a warning, ignored, and left in place. Only one process at a time may write to a folder; a second one logs a
warning (:class:`FolderLock`).

The manifest is JSON, in one line that ends in the CRC-32 of what precedes:

    {"format": 4, "name": "model.ckpt-700", "order": 8, "step": 700, "time": 1752000000.0, "kept": false,
     "world_size": 1, "score": null, "finished": null, "metadata": {"lr": 0.1},
     "files": {"state.pt": [51234, 1234567890]}, "crc32": 987654321}

``order`` numbers the checkpoints of a folder as they are written. ``files`` has the size and the CRC-32 of each file.
``finished`` says why the training run is finished, if it is: ``"data ended"``. ``metadata`` is the loop's, or null if
JSON cannot hold it, such as a tensor. ``state.pt`` has it too.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

from torchhooks.common.errors import CheckpointError, DamagedCheckpointError, brief
from torchhooks.common.files import Disk, fcntl, place
from torchhooks.common.log import logger
from torchhooks.common.processes import host_in_names, process_name, start_time

MANIFEST = "manifest.json"
STATE = "state.pt"
FORMAT = 4
_CHUNK = 1 << 20  # bytes to read at a time: a checkpoint may be larger than the memory
_LATEST = 1 << 40  # no clock says a later time, in seconds since 1970
_END = b', "crc32": %d}\n'
_NAME = re.compile(r"(?!.*tfevents)[^.].*-\d+", re.DOTALL)

Files = dict[str, tuple[int, int]]
"""The size and the CRC-32 of each file, by name."""

Manifest = dict[str, Any]
"""The entries of a manifest."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint in a folder.

    Args:
        path: where it is, as accepted by ``Saver.restore``.
        step: the global step that it was saved under.
        bytes: the size of its files.
        time: when it was written, in seconds since 1970.
        order: a number that increases from each checkpoint of the folder to the next, whatever their steps.
        kept: whether it is kept for good. No Saver removes it, however many newer ones there are.
        score: how good it is, if ``Saver.save`` was told: higher is better.
        finished: why the training run is finished, such as ``"data ended"``; ``None`` if it continues from here.
    """

    path: str
    step: int
    bytes: int
    time: float
    order: int
    kept: bool = False
    score: float | None = None
    finished: str | None = None

    @property
    def name(self) -> str:
        """The name in its folder."""
        return os.path.basename(self.path)

    @property
    def prefix(self) -> str:
        """The name without the step."""
        return self.name.rpartition("-")[0]


class Retention(NamedTuple):
    """Which checkpoints of one name stay in a folder.

    The newest ``max_to_keep`` stay, and so does every checkpoint that is kept for good: the first one, and each one
    that is written at least ``every_n_hours`` after the last one kept for good. The manifest of a new checkpoint
    records that it is, so that a Saver with other settings keeps it too.
    """

    max_to_keep: int | None  # None or 0 keeps all
    every_n_hours: float | None  # None keeps none for good

    def kept(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints that are kept for good, out of all of one name, oldest first."""
        hours, kept, last = self.every_n_hours, [], -math.inf
        for checkpoint in checkpoints:
            # abs(): a clock that was set back must not suspend the rule until it has caught up.
            if checkpoint.kept or (hours is not None and abs(checkpoint.time - last) >= hours * 3600):
                kept.append(checkpoint)
                last = checkpoint.time
        return kept

    def surplus(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints to remove, out of all of one name, oldest first."""
        kept = self.kept(checkpoints)
        older = checkpoints[: -self.max_to_keep] if self.max_to_keep else []
        return [checkpoint for checkpoint in older if checkpoint not in kept]


FolderCache = dict[str, tuple[tuple[int, ...], Checkpoint | None]]
"""By the name of an entry, a stamp that changes with the entry, and the checkpoint that it is, if it is one."""

_in_progress: set[str] = set()  # the temporary folders that this process writes into
_without_locks: set[str] = set()  # folders that a warning was logged about
_damaged: dict[str, tuple[int, ...]] = {}  # by its path, the stamp of what a warning was logged about


class Folder:
    """A folder of checkpoints that this process writes to. It is created when the first one is written."""

    def __init__(self, path: str, disk: Disk, retention: Retention) -> None:
        self._path = path
        self.disk = disk
        self._retention = retention
        self._used = False
        self._cache: FolderCache = {}
        self._lock: FolderLock | None = None
        self._warned = False

    def release(self) -> None:
        """Let other processes save into the folder without a warning, until the next save."""
        self._lock = None

    def temporary(self, name: str, kind: str = "tmp") -> str:
        """Return a path for a temporary folder of the checkpoint ``name``, which says what process writes it."""
        return os.path.join(self._path, f".{name}.{process_name(os.getpid())}-{secrets.token_hex(4)}.{kind}")

    def begin(self, temporary: str) -> None:
        """Create the folder ``temporary``. The caller has to call :meth:`end` with it, whatever happens."""
        with _threads:
            if not self._used:  # a folder that vanished is not created again: its checkpoints are missing
                os.makedirs(self._path, exist_ok=True)
            self._lock_folder()
            put_back(self._path)
            # Before the new one needs the space, and after put_back(), which gives what can be saved its name again.
            for path in _abandoned(self._path, "tmp"):
                if os.path.isdir(path) and not os.path.islink(path):
                    with suppress(OSError):
                        self.disk.remove(path)
                        logger.warning("removed %s, left by a killed process", path)
            _in_progress.add(temporary)
            self.disk.create_folder(temporary)

    def end(self, temporary: str) -> None:
        """Remove the folder ``temporary``, unless it has become a checkpoint."""
        _in_progress.discard(temporary)
        if os.path.lexists(temporary):
            with suppress(OSError):
                self.disk.remove(temporary)

    def commit(self, prefix: str, step: int, temporary: str, files: Files, about: Mapping[str, object]) -> None:
        """Make the folder ``temporary``, whose ``files`` are synced, a checkpoint; remove what is not kept.

        If it raises an OSError, the older ones are unchanged. ``about`` is further entries of the manifest.
        """
        with _threads:
            found, now = _survey(self._path, self._cache, warns_again=False), self.disk.now()
            path = os.path.join(self._path, f"{prefix}-{step}")
            new = Checkpoint(path, step, 0, now, found[-1].order + 1 if found else 1)
            alike = [other for other in found if other.prefix == prefix and other.path != path] + [new]
            manifest = {
                "format": FORMAT,
                "name": new.name,
                "order": new.order,
                "step": step,
                "time": now,
                "kept": new in self._retention.kept(alike),
                **about,
                "files": files,
            }
            # Each line has to be on the disk before the next is begun. The other files are: a manifest is the sign that
            # they are complete.
            with self.disk.create(os.path.join(temporary, MANIFEST)) as file:
                self.disk.write(file, encoded(manifest))
                self.disk.sync(file)
            self.disk.sync_folder(temporary)  # the names of the files, which the checkpoint must not lack
            self._replace(temporary, path)  # now it is a checkpoint, which a power failure does not undo
            self._used = True
            # Last: until here, a kill leaves the older ones, which a process would restore.
            for old in self._retention.surplus(alike):
                self._remove_quietly(old.path, self._remove)

    def mark_finished(self, name: str, why: str) -> None:
        """Have the manifest of the checkpoint ``name``, the newest, say why the training run is finished.

        Raises:
            OSError: it cannot be written; a FileNotFoundError if there is no such checkpoint.
        """
        path = os.path.join(self._path, name)
        temporary = os.path.join(path, f".{MANIFEST}.tmp")
        with _threads:
            manifest = read_manifest(path)
            # With a new number, because the mirror tells checkpoints apart by it.
            orders = [manifest["order"], *(each.order for each in _survey(self._path, self._cache))]
            manifest |= {"finished": why, "order": max(orders) + 1}
            del manifest["crc32"]
            with suppress(FileNotFoundError):  # left by a killed process
                self.disk.remove(temporary)
            # The manifest is replaced by a rename, so a kill leaves the old one or the new one, and never a part of
            # one. It is synced before that: after a power failure, the name may be on the disk without the contents.
            with self.disk.create(temporary) as file:
                self.disk.write(file, encoded(manifest))
                self.disk.sync(file)
            self.disk.rename(temporary, os.path.join(path, MANIFEST))
            self.disk.sync_folder(path)

    def _remove_quietly(self, path: str, remove: Callable[[str], object]) -> None:
        """Call ``remove(path)`` once the new checkpoint is there, which an error must not call unwritten."""
        try:
            remove(path)
        except OSError as error:
            logger.warning("%s could not be removed: %s. The next save tries again.", path, error)

    def _replace(self, temporary: str, path: str) -> None:
        """Rename ``temporary`` to ``path``, and sync. A checkpoint or a file at ``path`` is first moved aside."""
        aside = None
        # No call replaces a folder by another. A kill between the two renames leaves no checkpoint of this name, so
        # put_back() undoes the first one.
        if is_checkpoint(path) or os.path.islink(path) or os.path.isfile(path):
            aside = self.temporary(os.path.basename(path), "old")
            self.disk.rename(path, aside)
        try:
            self.disk.rename(temporary, path)
        except BaseException:
            if aside is not None:
                self.disk.rename(aside, path)
            raise
        self.disk.sync_folder(self._path)  # before the older one is removed, which the disk may do first otherwise
        if aside is not None:
            self._remove_quietly(aside, self.disk.remove)

    def _remove(self, path: str) -> None:
        """Remove a checkpoint. It is renamed first: a kill in the middle would leave one without some of its files."""
        temporary = self.temporary(os.path.basename(path))
        self.disk.rename(path, temporary)
        self.disk.remove(temporary)

    def _lock_folder(self) -> None:
        """Log a warning if another process also saves into the folder, or if that cannot be found out."""
        # The lock is on the folder itself. If the script has replaced the folder by another one of the same name, the
        # old lock warns no process that saves into the new one, so a lock is taken again.
        if fcntl is None or (self._lock is not None and self._lock.is_on(self._path)):
            return
        try:
            self._lock = FolderLock.acquire(self._path)
        except BlockingIOError:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "another process also saves checkpoints into %s, and each removes the other's: give one of "
                    "them another folder",
                    self._path,
                )
        except FileNotFoundError:
            raise  # the folder is gone
        except OSError as error:
            if self._path not in _without_locks:
                _without_locks.add(self._path)
                logger.warning(
                    "the file system of %s has no locks (%s): a second process that saves into it is not noticed",
                    self._path,
                    error.strerror or error,
                )


# -- other processes ---------------------------------------------------------------------------------------------------

# Held while a thread changes a folder: two savers of one process may write to one folder, and they share its lock.
# Reentrant, so that a thread in which a save was interrupted at an odd moment can save again.
_threads = threading.RLock()
_TEMPORARY = re.compile(
    r"\.(?P<name>.+-\d+)\.(?P<host>\w+)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}\.(?P<kind>tmp|old)", re.DOTALL
)


class FolderLock:
    """A lock on a folder that tells other processes that this one saves into it. All savers of a process share it.

    It is on the folder itself, so that nothing is written. The system releases it when the process ends, however that
    happens. A forked process, such as a worker of a DataLoader, gives up its copy, or the lock would stay for as long
    as the worker does.
    """

    _held: ClassVar[weakref.WeakValueDictionary[tuple[int, int], FolderLock]] = weakref.WeakValueDictionary()
    _at_fork = False

    def __init__(self, inode: tuple[int, int], file: int) -> None:
        self._inode, self._file = inode, file
        self.release = weakref.finalize(self, os.close, file)

    @classmethod
    def acquire(cls, folder: str) -> FolderLock:
        """Return this process's lock on ``folder``, which stays until it is dropped.

        Raises:
            BlockingIOError: another process has it.
            OSError: the file system has no locks.
        """
        inode = _inode(folder)
        # The system grants the lock to an open file and not to a process. If a second saver of this process opened the
        # folder again, it would be refused like another process.
        if inode in cls._held:
            return cls._held[inode]
        # The object is made before the lock is taken: after a Ctrl-C at any moment, a lock of this process without an
        # object would look like another one's. An object that is dropped releases its lock.
        lock = cls(inode, os.open(folder, os.O_RDONLY))
        try:
            fcntl.flock(lock._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            lock.release()
            raise
        if not cls._at_fork:
            os.register_at_fork(after_in_child=cls._give_up)
            cls._at_fork = True
        cls._held[inode] = lock
        return lock

    def is_on(self, folder: str) -> bool:
        """Return whether it locks the folder that is now at the path ``folder``."""
        return self.release.alive and self._inode == _inode(folder)

    @classmethod
    def _give_up(cls) -> None:
        global _threads
        _threads = threading.RLock()  # a thread of the parent process, which is not in this one, may have held it
        # The file is closed and not unlocked. Parent and child share the open file, so LOCK_UN in the child would also
        # take the lock from the parent.
        for lock in list(cls._held.values()):
            lock.release()
        cls._held.clear()


def _inode(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def put_back(folder: str) -> None:
    """Give checkpoints that a killed process had moved aside their names again, if nothing has replaced them."""
    with _threads:  # another one of this process may have just moved a checkpoint aside
        for aside, path in _abandoned(folder, "old").items():
            with suppress(FileNotFoundError):  # another process has just put it back
                if not os.path.lexists(path):
                    os.rename(aside, path)
                elif os.path.isdir(aside) and not os.path.islink(aside):
                    shutil.rmtree(aside, ignore_errors=True)
                else:
                    os.remove(aside)


def _abandoned(folder: str, kind: str) -> dict[str, str]:
    """Return what no process writes any more: temporary paths in ``folder``, each with the path of its checkpoint."""
    found = map(_TEMPORARY.fullmatch, os.listdir(folder) if os.path.isdir(folder) else [])
    matches = [match for match in found if match is not None and match["kind"] == kind]
    return {os.path.join(folder, m[0]): os.path.join(folder, m["name"]) for m in matches if _is_abandoned(folder, m)}


def _is_abandoned(folder: str, match: re.Match[str]) -> bool:
    """Return whether the process that a temporary name tells of is gone, or has failed to remove what it names."""
    is_here = match["host"] == host_in_names()
    if is_here:
        pid, start = int(match["pid"]), int(match["start"])
        if start_time(pid) == start:
            return pid == os.getpid() and os.path.join(folder, match[0]) not in _in_progress
        # Gone, since a process of the same number that began at another time is another one. Or it is in a container
        # that has the name of this one, and whose processes have numbers of their own.
    # A process that cannot be seen from here has locked the folder if it saves into it.
    try:
        FolderLock.acquire(folder)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return is_here
    return True


# -- what is in a folder -----------------------------------------------------------------------------------------------


def _survey(folder: str, cache: FolderCache, *, warns_again: bool = True) -> list[Checkpoint]:
    """Return the complete checkpoints in ``folder``, oldest first, and log a warning about each that is damaged.

    Manifests and sizes are checked here; :func:`verify` checks contents. What has not changed since an earlier call
    with the same ``cache`` is not read again. Unless it ``warns_again``, nothing is logged that another call has
    logged, as the restore before a save does.
    """
    names = _names(folder)
    for name in cache.keys() - set(names):
        del cache[name]
    damaged: dict[str, DamagedCheckpointError] = {}
    for name in names:
        path = os.path.join(folder, name)
        stamp = _stamp(path)
        if name in cache and cache[name][0] == stamp:
            continue
        try:
            cache[name] = stamp, inspect(path)
        except DamagedCheckpointError as error:
            damaged[name] = error
            cache[name] = stamp, None
    found = [checkpoint for _, checkpoint in cache.values() if checkpoint is not None]
    prefixes = {checkpoint.prefix for checkpoint in found}
    ours = [name for name in damaged if _is_ours(folder, name) or name.rpartition("-")[0] in prefixes]
    stamps = {name: (os.path.abspath(os.path.join(folder, name)), cache[name][0]) for name in ours}
    ours = [name for name in ours if warns_again or _damaged.get(stamps[name][0]) != stamps[name][1]]
    _damaged.update(stamps.values())
    files = [name for name in ours if os.path.isfile(os.path.join(folder, name))]
    for name in sorted(set(ours).difference(files[1:])):
        logger.warning("%s It is skipped.", damaged[name])
    if files[1:]:
        logger.warning("%s has %d more such files. They are skipped.", folder, len(files) - 1)
    # Two have one number if the newest was moved away and is put back after the next save.
    return sorted(found, key=attrgetter("order", "time"))


def _names(folder: str) -> list[str]:
    """Return the names of checkpoints, damaged or not, and of files that are named like one."""
    named = {name: os.path.join(folder, name) for name in os.listdir(folder) if _NAME.fullmatch(name)}
    return sorted(name for name, path in named.items() if is_checkpoint(path) or os.path.isfile(path))


def _is_ours(folder: str, name: str) -> bool:
    """Return whether the entry ``name`` has a manifest, or the default name of a checkpoint."""
    return name.rpartition("-")[0].endswith(".ckpt") or has_manifest(os.path.join(folder, name))


def is_checkpoint(path: str) -> bool:
    """Return whether ``path`` is a checkpoint, damaged or not: a folder that has its name, and a file that it has."""
    named = _NAME.fullmatch(os.path.basename(os.path.normpath(path)))
    return has_manifest(path) or (named is not None and os.path.isfile(os.path.join(path, STATE)))


def _stamp(path: str) -> tuple[int, ...]:
    stamp: tuple[int, ...] = ()
    for each in (os.path.join(path, MANIFEST), os.path.join(path, STATE), path):
        with suppress(OSError):
            status = os.stat(each)
            stamp += status.st_size, status.st_mtime_ns, status.st_ino
    return stamp


def inspect(path: str) -> Checkpoint:
    """Return what the manifest of the checkpoint at ``path`` says.

    Raises:
        DamagedCheckpointError: there is no valid one, or a file has another size.
    """
    return _inspect(path)[0]


def _inspect(path: str) -> tuple[Checkpoint, Files]:
    if os.path.exists(path) and not os.path.isdir(path):
        raise DamagedCheckpointError(
            f"{path} is no folder, as a checkpoint is: an earlier version of torchhooks or another program wrote it."
        )
    try:
        about = read_manifest(path)
        files: Files = {name: (size, checksum) for name, (size, checksum) in about["files"].items()}
        size, kept, name = sum(size for size, _ in files.values()), about["kept"] is True, about["name"]
        order, step, score, finished = about["order"], about["step"], about["score"], about.get("finished")
        if not (type(order) is int and type(step) is int):  # true and false are of a subclass of int
            raise TypeError(f"order {order!r}, step {step!r}")
        time, score = float(about["time"]), None if score is None else float(score)
        # Python's json reads NaN too, for which every comparison is false.
        if not abs(time) < _LATEST:
            raise ValueError(f"time {time!r}")
    except FileNotFoundError as error:
        if not os.path.isdir(path):
            raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        raise DamagedCheckpointError(
            f"{path} has no manifest.json: it is no checkpoint, or was not copied completely."
        ) from error
    # All of these come from a file with other contents: json raises a RecursionError for many nested brackets, and
    # float() an OverflowError for a very large number. Any of them has to skip this checkpoint, not to stop a start.
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} has a damaged {MANIFEST}: {brief(error)}.") from error
    checkpoint = Checkpoint(path, step, size, time, order, kept, score, finished)
    if name != os.path.basename(os.path.normpath(path)):
        raise DamagedCheckpointError(f"{path} is a copy of {name}: to use it, rename it to that.")
    for name, (size, _) in files.items():
        try:
            # Only a forged manifest has a path as a name. It must not lead to a file outside of the folder.
            found = os.stat(os.path.join(path, os.path.basename(name))).st_size
        except OSError as error:
            raise DamagedCheckpointError(f"{path} is damaged: {name} cannot be read: {error.strerror}.") from error
        if found != size:
            raise DamagedCheckpointError(f"{path} is damaged: {name} is cut short, or has another size than before.")
    return checkpoint, files


def verify(path: str) -> None:
    """Read all of the checkpoint at ``path``; raise DamagedCheckpointError if its checksums do not match."""
    _, files = _inspect(path)
    try:
        damaged = damaged_file(path, files)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} is damaged, or cannot be read: {brief(error)}.") from error
    if damaged is not None:
        raise DamagedCheckpointError(f"{path} is damaged: {damaged} is not what was written.")


def list_checkpoints(directory: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the complete checkpoints in ``directory``, in the order in which they were written.

    A folder that does not exist has none. Damaged checkpoints are left out, with a warning. Sizes are checked here;
    :meth:`torchhooks.Saver.restore` checks contents. Files that no Saver wrote are ignored. A checkpoint has the
    attributes ``path``, ``name``, ``step``, ``bytes``, ``time`` (in seconds since 1970), ``order``, ``kept``, ``score``
    and ``finished``, which says why the training run is finished, if it is.

    >>> with MonitoredTrainingLoop(step, model, optimizer, checkpoint_dir="run", save_checkpoint_steps=4) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    saving a checkpoint of step 0 into run
    ...
    >>> [(checkpoint.name, checkpoint.step) for checkpoint in list_checkpoints("run")]
    [('model.ckpt-0', 0), ...]

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return list_again(place(directory), {})


def list_again(folder: str, cache: FolderCache) -> list[Checkpoint]:
    """Return what :func:`list_checkpoints` does, with a warning only about what changed since a call with ``cache``."""
    try:
        return _survey(folder, cache)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}. Make it readable.") from error


def split_checkpoint(path: str) -> tuple[str, str | None]:
    """Return a folder of checkpoints, and the name of the one in it that ``path`` is; ``None`` if it is the folder.

    What does not exist is a checkpoint if its name ends like ``.ckpt-700``, or if others of its name are there.
    """
    folder, name = os.path.split(path.rstrip(os.sep))
    folder = folder or (os.sep if path.startswith(os.sep) else os.curdir)
    if os.path.isdir(path):
        is_one = is_checkpoint(path)
    elif os.path.lexists(path):
        is_one = True
    else:
        prefix, _, step = name.rpartition("-")
        others = _names(folder) if os.path.isdir(folder) and bool(_NAME.fullmatch(name)) else []
        named_alike = (os.path.join(folder, other) for other in others if other.rpartition("-")[0] == prefix)
        is_one = (prefix.endswith(".ckpt") and step.isdecimal()) or any(map(has_manifest, named_alike))
    return (folder, name) if is_one else (path, None)


def is_checkpoint_name(prefix: str) -> bool:
    """Return whether checkpoints that are named ``prefix-700`` are found again in their folder."""
    name = f"{prefix}-0"
    return bool(prefix) and os.path.basename(name) == name and "\0" not in name and bool(_NAME.fullmatch(name))


def has_checkpoints(directory: str | os.PathLike[str]) -> bool:
    """Return whether ``directory`` has checkpoints, complete or not. Files of others that are named so do not count."""
    folder = place(directory)
    names = _names(folder) if os.path.isdir(folder) else []
    return any(os.path.isdir(os.path.join(folder, name)) and _is_ours(folder, name) for name in names)


# -- the manifest ------------------------------------------------------------------------------------------


def has_manifest(path: str) -> bool:
    """Return whether ``path`` is a folder with a manifest."""
    return os.path.exists(os.path.join(path, MANIFEST))


def file_sums(path: str, names: list[str]) -> Files:
    """Return the size and the CRC-32 of the files ``names`` in the folder ``path``."""
    found, buffer = {}, memoryview(bytearray(_CHUNK))
    for name in names:
        size = checksum = 0
        with open(os.path.join(path, name), "rb", buffering=0) as file:
            while length := file.readinto(buffer):
                size, checksum = size + length, zlib.crc32(buffer[:length], checksum)
        found[name] = size, checksum
    return found


def encoded(manifest: Manifest) -> bytes:
    """Return the contents of the file for ``manifest``."""
    text = json.dumps(manifest).encode()[:-1]
    return text + _END % zlib.crc32(text)


def as_json(metadata: Mapping[str, object]) -> dict[str, object] | None:
    """Return ``metadata``, or ``None`` if something else is read from JSON than what was written to it."""
    try:
        # Compared as text: NaN is not equal to itself, and a member of an IntEnum is equal to the number that JSON has.
        same = repr(json.loads(json.dumps(metadata))) == repr(metadata)
    except (TypeError, ValueError):
        return None
    return dict(metadata) if same else None


def read_manifest(path: str) -> Manifest:
    """Return the manifest of the folder ``path``.

    Raises:
        ValueError: it is not what was written.
        OSError: it cannot be read.
    """
    with open(os.path.join(path, MANIFEST), "rb") as file:
        return decoded(file.read())


def decoded(data: bytes) -> Manifest:
    """Return the manifest in a file with the contents ``data``; raise ValueError if it is not what was written."""
    text = data.rpartition(_END[:5])[0]
    if data != text + _END % zlib.crc32(text):
        raise ValueError("its checksum does not match")
    manifest: Manifest = json.loads(data)
    if manifest["format"] != FORMAT:
        raise ValueError(f"it has format {manifest['format']!r}, and this version of torchhooks reads {FORMAT}")
    return manifest


def damaged_file(path: str, files: Files) -> str | None:
    """Return the name of a file in the folder ``path`` that is not what was written, ``None`` if all are."""
    for name, expected in files.items():
        if os.path.basename(name) != name or file_sums(path, [name])[name] != tuple(expected):
            return name
    return None


def file_of_rank(rank: int) -> str:
    """Return the name of the file with the entries that ``rank`` writes."""
    return f"rank-{rank}.pt" if rank else STATE
