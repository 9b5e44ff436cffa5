"""Folders of checkpoints: written atomically, numbered in the order of writing, and removed when there are too many.

A checkpoint is a folder, ``model.ckpt-700/``, whose manifest (:mod:`torchhooks.checkpoints.manifest`) names its files,
their sizes and their sums. So a manifest tells whether its checkpoint is complete, and the manifests are all that is
known about a folder of checkpoints. There is no index that could disagree with them, and only what has a valid manifest
is ever removed.

How a checkpoint is written:

    make a temporary folder next to it; write the files into it, the manifest last; fsync each, and the folder
    rename; fsync the folder of checkpoints              # from here on it survives a kill and a power failure
    remove the checkpoints that are no longer kept, each after it was renamed to a temporary name

A folder cannot be renamed to the name of another one. So an older checkpoint of the same step is moved aside first, and
:func:`torchhooks.checkpoints.claim.take_back` gives it its name again if the process is killed in between.

A kill may leave a temporary folder. The next save removes it, unless the process that writes it is alive, which a lock
on it tells. A checkpoint that is incomplete, changed or copied is named in a warning, ignored, and left in place. Only
one process at a time may write to a folder; a second one logs a warning.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from torchhooks.checkpoints.claim import Claim, take_back, writing
from torchhooks.checkpoints.manifest import FORMAT, STATE, Files, damaged_file, encoded, has_manifest, read_manifest
from torchhooks.checkpoints.manifest import NAME as MANIFEST
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError, brief
from torchhooks.common.files import Disk
from torchhooks.common.log import logger

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

_NAME = re.compile(r"(?!.*tfevents)[^.].*-\d+", re.DOTALL)
_TEMPORARY = re.compile(r"\..+-\d+\.[0-9a-f]{16}\.tmp", re.DOTALL)


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
    """

    path: str
    step: int
    bytes: int
    time: float
    order: int
    kept: bool = False
    score: float | None = None

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


Seen = dict[str, tuple[tuple[int, ...], Checkpoint | None]]
"""By the name of an entry, a stamp that changes with the entry, and the checkpoint that it is, if it is one."""

_in_progress: dict[str, Claim | None] = {}  # by path, the temporary folders that several ranks write into
_without_locks: set[str] = set()  # folders that a warning was logged about


class Folder:
    """A folder of checkpoints that this process writes to. It is created when the first one is written."""

    def __init__(self, path: str, disk: Disk, retention: Retention) -> None:
        self._path = path
        self.disk = disk
        self._retention = retention
        self._used = False
        self._seen: Seen = {}
        self._claim: Claim | None = None
        self._warned = False

    def release(self) -> None:
        """Let other processes save into the folder without a warning, until the next save."""
        self._claim = None

    def temporary(self, name: str, kind: str = "tmp") -> str:
        """Return a path for a temporary folder of the checkpoint ``name``."""
        return os.path.join(self._path, f".{name}.{secrets.token_hex(8)}.{kind}")

    def begin(self, temporary: str) -> None:
        """Create the folder ``temporary``. The caller has to call :meth:`end` with it, whatever happens."""
        with writing():
            if not self._used:  # a folder that vanished is not created again: its checkpoints are missing
                os.makedirs(self._path, exist_ok=True)
            self._claim_folder()
            take_back(self._path)
            self._remove_leftovers()
            _in_progress[temporary] = None
            self.disk.create_folder(temporary)
            _in_progress[temporary] = _locked(temporary)

    def end(self, temporary: str) -> None:
        """Remove the folder ``temporary``, unless it has become a checkpoint."""
        _in_progress.pop(temporary, None)
        if os.path.lexists(temporary):
            with suppress(OSError):
                self.disk.remove(temporary)

    def commit(self, prefix: str, step: int, temporary: str, files: Files, about: dict[str, Any]) -> None:
        """Make the folder ``temporary``, whose ``files`` are synced, a checkpoint; remove what is not kept.

        If it raises an OSError, the older ones are unchanged. ``about`` is further entries of the manifest.
        """
        with writing():
            found, now = _survey(self._path, self._seen), self.disk.now()
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
            with self.disk.create(os.path.join(temporary, MANIFEST)) as file:
                self.disk.write(file, encoded(manifest))
                self.disk.sync(file)
            self.disk.sync_folder(temporary)
            self._replace(temporary, path)
            self._used = True
            for old in self._retention.surplus(alike):
                try:
                    self._remove(old.path)
                except OSError as error:
                    logger.warning("%s could not be removed: %s. The next save tries again.", old.path, error)

    def _replace(self, temporary: str, path: str) -> None:
        """Rename ``temporary`` to ``path``, and sync. A checkpoint or a file at ``path`` is first moved aside."""
        aside = None
        if is_checkpoint(path) or os.path.islink(path) or os.path.isfile(path):
            aside = self.temporary(os.path.basename(path), "old")
            self.disk.rename(path, aside)
        try:
            self.disk.rename(temporary, path)
        except BaseException:
            if aside is not None:
                self.disk.rename(aside, path)
            raise
        self.disk.sync_folder(self._path)
        if aside is not None:
            self.disk.remove(aside)

    def _remove(self, path: str) -> None:
        """Remove a checkpoint, after it has a name that is none of a checkpoint."""
        temporary = self.temporary(os.path.basename(path))
        self.disk.rename(path, temporary)
        self.disk.remove(temporary)

    def _claim_folder(self) -> None:
        """Log a warning if another process also saves into the folder, or if that cannot be found out."""
        if fcntl is None or (self._claim is not None and self._claim.holds(self._path)):
            return
        try:
            self._claim = Claim.of(self._path)
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
                    "the file system of %s has no locks (%s): a second process that saves into it is not noticed, and "
                    "what a killed process leaves is not removed",
                    self._path,
                    error.strerror or error,
                )

    def _remove_leftovers(self) -> None:
        """Remove the temporary folders of processes that were killed."""
        with os.scandir(self._path) as entries:
            found = [entry for entry in entries if _TEMPORARY.fullmatch(entry.name)]
            leftovers = [entry.path for entry in found if entry.is_dir(follow_symlinks=False)]
        for path in leftovers:
            # Without locks, it is not known whether another process writes it.
            if path not in _in_progress and (fcntl is None or _locked(path) is not None):
                with suppress(OSError):
                    self.disk.remove(path)
                    logger.warning("removed %s, left by a killed process", path)


def _locked(path: str) -> Claim | None:
    """Return the claim to the temporary folder ``path``; ``None`` if another process has it, or there are no locks."""
    with suppress(OSError):
        return Claim.of(path)
    return None


def _survey(folder: str, seen: Seen) -> list[Checkpoint]:
    """Return the complete checkpoints in ``folder``, oldest first, and log a warning about each that is damaged.

    Manifests and sizes are checked here; :func:`verify` checks contents. What has not changed since an earlier call
    with the same ``seen`` is not read again.
    """
    names = _names(folder)
    for name in seen.keys() - set(names):
        del seen[name]
    damaged: dict[str, DamagedCheckpointError] = {}
    for name in names:
        path = os.path.join(folder, name)
        stamp = _stamp(path)
        if name in seen and seen[name][0] == stamp:
            continue
        try:
            seen[name] = stamp, inspect(path)
        except DamagedCheckpointError as error:
            damaged[name] = error
            seen[name] = stamp, None
    found = [checkpoint for _, checkpoint in seen.values() if checkpoint is not None]
    prefixes = {checkpoint.prefix for checkpoint in found}
    ours = [name for name in damaged if _is_ours(folder, name) or name.rpartition("-")[0] in prefixes]
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
        order, step, score = about["order"], about["step"], about["score"]
        if not (type(order) is int and type(step) is int):  # true and false are of a subclass of int
            raise TypeError(f"order {order!r}, step {step!r}")
        time, score = float(about["time"]), None if score is None else float(score)
    except FileNotFoundError as error:
        if not os.path.isdir(path):
            raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        raise DamagedCheckpointError(
            f"{path} has no manifest.json: it is no checkpoint, or was not copied completely."
        ) from error
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} has a damaged {MANIFEST}: {brief(error)}.") from error
    checkpoint = Checkpoint(path, step, size, time, order, kept, score)
    if name != os.path.basename(os.path.normpath(path)):
        raise DamagedCheckpointError(f"{path} is a copy of {name}: to use it, rename it to that.")
    for name, (size, _) in files.items():
        try:
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
    attributes ``path``, ``name``, ``step``, ``bytes``, ``time`` (in seconds since 1970), ``order``, ``kept`` and
    ``score``.

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
    return list_again(os.fspath(directory), {})


def list_again(folder: str, seen: Seen) -> list[Checkpoint]:
    """Return what :func:`list_checkpoints` does, with a warning only about what changed since a call with ``seen``."""
    try:
        return _survey(folder, seen)
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
    folder = os.fspath(directory)
    names = _names(folder) if os.path.isdir(folder) else []
    return any(os.path.isdir(os.path.join(folder, name)) and _is_ours(folder, name) for name in names)
