"""Checkpoint files: written atomically, numbered in the order of writing, and removed when there are too many.

A checkpoint is one file, ``model.ckpt-700``: the output of ``torch.save``, followed by one line, the seal, which
``torch.load`` ignores:

    {"seal": 1, "name": "model.ckpt-700", "order": 8, "step": 700, "bytes": 51234, "time": 1752000000.0} 1c2a99f0

``order`` numbers the checkpoints of a folder as they are written, ``bytes`` is the length of the file before the seal,
and the last word is a CRC-32. A checkpoint that is kept for good also has ``"kept": true``. ``torch.save`` writes a zip
archive, which has a CRC-32 of each record already, so the checksum of the seal covers the rest of the file, those of
the records included, and no tensor has to be read again to compute it.

So a seal tells whether its file is complete, and the seals in a folder are all that is known about it. There is no
index that could disagree with the files, and only a file whose own seal says that it is a checkpoint is ever removed.

How a checkpoint is written:

    write to a temporary file in the same folder; seal; fsync
    rename; fsync the folder                             # from here on it survives a kill and a power failure
    remove the checkpoints that are no longer kept

A kill may leave a temporary file, or a checkpoint that was about to be removed. The next save removes either; until
then the checkpoint can be used. A file that is incomplete, changed or copied is named in a warning, ignored, and left
in place. Only one process at a time may write to a folder; a second one logs a warning.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import BinaryIO, NamedTuple

from torchhooks.checkpoints.claim import Claim, take_back, writing
from torchhooks.checkpoints.manifest import NAME as MANIFEST
from torchhooks.checkpoints.manifest import Files, damaged_file, encoded, has_manifest, read_manifest
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError, brief
from torchhooks.common.files import Disk, no_link
from torchhooks.common.log import logger

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

_NAME = re.compile(r"(?!.*tfevents)[^.].*-\d+", re.DOTALL)
# Earlier versions kept an index of the folder in checkpoints.json.
_LEFTOVER = re.compile(r"checkpoints\.json|\.(?:.+-\d+|checkpoints\.json)\.[0-9a-f]{16}\.tmp", re.DOTALL)
_SEAL = b'\n{"seal": 1, '
_SEAL_LIMIT = 4096  # a name has at most 255 characters, of at most 12 bytes each in JSON
_CHECKSUM_LENGTH = len(b"00000000\n")
_HEADER = struct.Struct("<26xHH")  # of a zip record; it ends in the lengths of the name and the extra field after it
_MAGIC = b"PK\x03\x04"  # of a zip record
_FIRST_RECORD = b"archive/data.pkl"  # torch.save names it after the file, but a Saver's has no name
_OF_SHARDS = "rank-0.pt"  # in every folder that is a checkpoint
_MOST_WARNINGS = 8  # in one look at a folder, which may have thousands of files that others have named like checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint in a folder.

    Args:
        path: where it is, as accepted by ``Saver.restore``.
        step: the global step that it was saved under.
        bytes: the size of the file.
        time: when it was written, in seconds since 1970.
        order: a number that increases from each checkpoint of the folder to the next, whatever their steps.
        checksum: the last word of the file, in hexadecimal digits.
        kept: whether it is kept for good. No Saver removes it, however many newer ones there are.
    """

    path: str
    step: int
    bytes: int
    time: float
    order: int
    checksum: str
    kept: bool = False

    @property
    def name(self) -> str:
        """The name of the file in its folder."""
        return os.path.basename(self.path)

    @property
    def prefix(self) -> str:
        """The name without the step."""
        return self.name.rpartition("-")[0]


class Retention(NamedTuple):
    """Which checkpoints of one name stay in a folder.

    The newest ``max_to_keep`` stay, and so does every checkpoint that is kept for good: the first one, and each one
    that is written at least ``every_n_hours`` after the last one kept for good. The seal of a new checkpoint records
    that it is, so that a Saver with other settings keeps it too.
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


class Sink:
    """A file that is being written, as ``torch.save`` sees it.

    torch replaces an error of ``write`` by one about positions in the file. So the first error is stored until
    :meth:`check` raises it, and nothing is written after it.
    """

    def __init__(self, disk: Disk, file: BinaryIO) -> None:
        self.size = 0
        self.file = file
        self._disk = disk
        self._error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self._error is None:
            try:
                self._disk.write(self.file, data)
            except BaseException as error:  # a Ctrl-C arrives here too
                self._error = error
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is synced as a whole."""

    def check(self) -> None:
        """Raise the first error of :meth:`write`, if there was one."""
        if self._error is not None:
            raise self._error


Seals = dict[str, tuple[tuple[int, ...], Checkpoint | None]]
"""By the name of a file, a stamp that changes with the file, and the checkpoint that it is, if it is one."""


_without_locks: set[str] = set()  # folders that a warning was logged about


class Folder:
    """A folder of checkpoints that this process writes to. It is created when the first one is written."""

    def __init__(self, path: str, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._used = False
        self._seals: Seals = {}
        self._claim: Claim | None = None
        self._warned = False

    def release(self) -> None:
        """Let other processes save into the folder without a warning, until the next :meth:`add`."""
        self._claim = None

    def add(self, prefix: str, step: int, fill: Callable[[Sink], object], retention: Retention) -> None:
        """Write a checkpoint with what ``fill`` writes to the sink, then remove those that are no longer kept.

        If it raises an OSError, the older ones are unchanged.
        """
        with writing():
            self._prepare()
            self._add(prefix, step, lambda new: self._write(new, fill), retention)

    def begin_folder(self, prefix: str, step: int) -> str:
        """Create a temporary folder for a checkpoint that is one, and return its path."""
        with writing():
            self._prepare()
            temporary = self._temporary(f"{prefix}-{step}", "tmp")
            os.mkdir(temporary)
            return temporary

    def commit_folder(self, prefix: str, step: int, temporary: str, files: Files, retention: Retention) -> None:
        """Make the folder ``temporary``, whose ``files`` are synced, a checkpoint; remove those that are not kept."""

        def write(new: Checkpoint) -> None:
            about = {"name": new.name, "order": new.order, "step": step, "time": new.time, "kept": new.kept}
            with self._disk.create(os.path.join(temporary, MANIFEST)) as file:
                self._disk.write(file, encoded({**about, "files": files}))
                self._disk.sync(file)
            self._disk.sync_folder(temporary)
            self._replace(temporary, new.path)

        with writing():
            self._add(prefix, step, write, retention)

    def _prepare(self) -> None:
        if not self._used:  # a folder that vanished is not created again: its checkpoints are missing
            os.makedirs(self._path, exist_ok=True)
        self._claim_folder()
        take_back(self._path)
        self._remove_leftovers()

    def _temporary(self, name: str, kind: str) -> str:
        return os.path.join(self._path, f".{name}.{secrets.token_hex(8)}.{kind}")

    def _replace(self, temporary: str, path: str) -> None:
        """Rename ``temporary`` to ``path``, and sync.

        A checkpoint at ``path`` is first moved aside if one of the two is a folder, because the system replaces only a
        file by a file. After a kill, :func:`take_back` gives it its name again.
        """
        aside = None
        if has_manifest(path) or (os.path.isdir(temporary) and os.path.isfile(path)):
            aside = self._temporary(os.path.basename(path), "old")
            self._disk.rename(path, aside)
        try:
            self._disk.rename(temporary, path)
        except BaseException:
            if aside is not None:
                self._disk.rename(aside, path)
            raise
        self._disk.sync_folder(self._path)
        if aside is not None:
            self._remove(aside)

    def _remove(self, path: str) -> None:
        """Remove a checkpoint; a folder only after it has a name that is none of a checkpoint."""
        if os.path.islink(path) or not os.path.isdir(path):
            self._disk.remove(path)
            return
        temporary = self._temporary(os.path.basename(path), "tmp")
        self._disk.rename(path, temporary)
        shutil.rmtree(temporary)

    def _add(self, prefix: str, step: int, write: Callable[[Checkpoint], None], retention: Retention) -> None:
        found, now = _survey(self._path, self._seals), self._disk.now()
        path = os.path.join(self._path, f"{prefix}-{step}")
        new = Checkpoint(path, step, 0, now, found[-1].order + 1 if found else 1, "")
        alike = [other for other in found if other.prefix == prefix and other.path != path] + [new]
        write(replace(new, kept=new in retention.kept(alike)))
        self._used = True
        for old in retention.surplus(alike):
            try:
                self._remove(old.path)
            except OSError as error:
                logger.warning("%s could not be removed: %s. The next save tries again.", old.path, error)

    def _write(self, new: Checkpoint, fill: Callable[[Sink], object]) -> None:
        temporary = self._temporary(new.name, "tmp")
        try:
            with self._disk.create(temporary) as file:
                with suppress(OSError):  # without locks, which were warned about
                    _lock(file)
                sink = Sink(self._disk, file)
                fill(sink)
                _seal(sink, new)
                self._disk.sync(file)
            self._replace(temporary, new.path)
        except BaseException:
            with suppress(OSError):
                self._disk.remove(temporary)
            raise

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
                    "another process also saves checkpoints into %s, and each removes those of the other: give one of "
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
        """Remove the temporary files of processes that were killed, and the index of an earlier version."""
        with os.scandir(self._path) as entries:
            leftovers = [entry for entry in entries if _LEFTOVER.fullmatch(entry.name)]
        for path in [entry.path for entry in leftovers if entry.is_file(follow_symlinks=False)]:
            with suppress(OSError):  # locked: another process is writing it
                with open(path, "r+b", opener=no_link) as file:
                    _lock(file)
                self._disk.remove(path)
                logger.warning("removed %s, left by a killed process or an earlier version", path)
        folders = [entry for entry in leftovers if entry.name[0] == "." and entry.is_dir(follow_symlinks=False)]
        for path in [entry.path for entry in folders if self._claim is not None]:
            shutil.rmtree(path, ignore_errors=True)
            logger.warning("removed %s, left by a killed process", path)


def _lock(file: BinaryIO) -> None:
    """Mark ``file`` as being written until it is closed or the process ends; ``OSError`` if another process has."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _seal(sink: Sink, new: Checkpoint) -> None:
    """Append the seal, and raise what went wrong when ``sink`` was written."""
    seal = {"name": new.name, "order": new.order, "step": new.step, "bytes": sink.size, "time": new.time}
    seal |= {"kept": True} if new.kept else {}
    sink.write(_SEAL + json.dumps(seal)[1:].encode() + b" ")
    sink.check()
    with zipfile.ZipFile(sink.file) as archive:
        checksum = _checksum(sink.file, archive.infolist(), sink.size)
    sink.write(checksum.encode() + b"\n")
    sink.check()


def _survey(folder: str, seals: Seals) -> list[Checkpoint]:
    """Return the complete checkpoints in ``folder``, oldest first, and log a warning about each that is damaged.

    Sizes and seals are checked here; :func:`verify` checks contents. Files that have not changed since an earlier call
    with the same ``seals`` are not read again.
    """
    names = _names(folder)
    for name in seals.keys() - set(names):
        del seals[name]
    damaged: dict[str, DamagedCheckpointError] = {}
    for name in names:
        path = os.path.join(folder, name)
        stamp = _stamp(path)
        if name in seals and seals[name][0] == stamp:
            continue
        try:
            seals[name] = stamp, read_seal(path)
        except DamagedCheckpointError as error:
            damaged[name] = error
            seals[name] = stamp, None
    prefixes = _prefixes(seals)
    told = [str(error) for name, error in damaged.items() if _may_be_ours(folder, name, prefixes)]
    for text in told[:_MOST_WARNINGS]:
        logger.warning("%s It is skipped.", text)
    if len(told) > _MOST_WARNINGS:
        logger.warning("%s has %d more such files. They are skipped.", folder, len(told) - _MOST_WARNINGS)
    found = [checkpoint for _, checkpoint in seals.values() if checkpoint is not None]
    # Two have one number if the newest was moved away and is put back after the next save.
    return sorted(found, key=attrgetter("order", "time"))


def _names(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if _NAME.fullmatch(entry.name)]
        return sorted(entry.name for entry in found if not _is_folder(entry) or has_manifest(entry.path))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether ``entry`` is a folder, or a link that leads to itself, which is no file either."""
    try:
        return entry.is_dir()
    except OSError as error:
        return error.errno == errno.ELOOP


def _prefixes(seals: Seals) -> set[str]:
    return {checkpoint.prefix for _, checkpoint in seals.values() if checkpoint is not None}


def _may_be_ours(folder: str, name: str, prefixes: set[str]) -> bool:
    """Return whether the file ``name``, which has no valid seal, may be a damaged checkpoint.

    It may if it is named like one, by default or like the others in the folder, or if it begins like one.
    """
    return name.rpartition("-")[0].endswith(".ckpt") or name.rpartition("-")[0] in prefixes or _begins(folder, name)


def _begins(folder: str, name: str, *, short: bool = False) -> bool:
    """Return whether a file begins as ``torch.save`` begins a checkpoint; if ``short``, also if it ends before that."""
    path = os.path.join(folder, name)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            head = file.read(_HEADER.size + len(_FIRST_RECORD))
    except OSError:
        return short  # it cannot be read, so it may be a checkpoint
    complete = head.startswith(_MAGIC) and head[_HEADER.size :] == _FIRST_RECORD
    return complete or (short and len(head) < _HEADER.size + len(_FIRST_RECORD) and _MAGIC.startswith(head[:4]))


def _stamp(path: str) -> tuple[int, ...]:
    with suppress(OSError):
        status = os.stat(os.path.join(path, MANIFEST) if os.path.isdir(path) else path)
        return status.st_size, status.st_mtime_ns, status.st_ino
    return ()


def read_seal(path: str) -> Checkpoint:
    """Return what the seal at the end of a file says, or the manifest of a folder.

    Raises:
        DamagedCheckpointError: there is no valid one.
    """
    if os.path.isdir(path):
        return _read_folder(path)[0]
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe would block
            raise DamagedCheckpointError(f"{path} is not a regular file.")
        with open(path, "rb") as file:
            size = file.seek(0, io.SEEK_END)
            start = file.seek(max(0, size - _SEAL_LIMIT))
            tail = file.read()
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        place = tail.rindex(_SEAL)
        text, checksum = tail[place + 1 :].decode().removesuffix("\n").rsplit(" ", 1)
        seal = json.loads(text)
        order, step, kept = seal["order"], seal["step"], seal.get("kept") is True
        if not (type(order) is int and type(step) is int):  # true and false are of a subclass of int
            raise TypeError(f"order {order!r}, step {step!r}")
        checkpoint = Checkpoint(path, step, size, float(seal["time"]), order, checksum, kept)
        name, whole = seal["name"], seal["bytes"] == start + place and len(checksum) == 8 and tail.endswith(b"\n")
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is cut short, or was not written by a Saver: it has no seal.") from error
    if not whole:
        raise DamagedCheckpointError(f"{path} has another size than its seal says.")
    if name != checkpoint.name:
        raise DamagedCheckpointError(f"{path} is a copy of {name}: to use it, rename it to that.")
    return checkpoint


def _read_folder(path: str) -> tuple[Checkpoint, Files]:
    try:
        about, checksum = read_manifest(path)
        files: Files = about["files"]
        size, kept = sum(size for size, _ in files.values()), about["kept"] is True
        checkpoint = Checkpoint(path, about["step"], size, about["time"], about["order"], checksum, kept)
        name = about["name"]
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} has a damaged {MANIFEST}: {brief(error)}.") from error
    if name != checkpoint.name:
        raise DamagedCheckpointError(f"{path} is a copy of {name}: to use it, rename it to that.")
    return checkpoint, files


def verify(path: str) -> None:
    """Read all of the checkpoint at ``path``; raise DamagedCheckpointError if its checksums do not match."""
    checkpoint = read_seal(path)
    if os.path.isdir(path):
        try:
            damaged = damaged_file(path, _read_folder(path)[1])
        except OSError as error:
            raise DamagedCheckpointError(f"{path} is damaged, or cannot be read: {brief(error)}.") from error
        if damaged is not None:
            raise DamagedCheckpointError(f"{path} is damaged: {damaged} is not what was written.")
        return
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            checksum = _checksum(file, archive.infolist(), checkpoint.bytes - _CHECKSUM_LENGTH)
            damaged = archive.testzip() if checksum == checkpoint.checksum else "the part around its records"
    except Exception as error:  # a changed byte can lead to any error
        raise DamagedCheckpointError(f"{path} is damaged, or cannot be read: {brief(error)}.") from error
    if damaged is not None:
        raise DamagedCheckpointError(f"{path} is damaged: {damaged} is not what was written.")


def _checksum(file: BinaryIO, records: list[zipfile.ZipInfo], end: int) -> str:
    """Return the CRC-32 of a file up to ``end``, without the contents of the records of its archive."""
    checksum = place = 0
    for record in sorted(records, key=lambda record: record.header_offset):
        file.seek(record.header_offset)
        contents = record.header_offset + _HEADER.size + sum(_HEADER.unpack(file.read(_HEADER.size)))
        file.seek(place)
        checksum = zlib.crc32(file.read(contents - place), checksum)
        place = contents + record.compress_size
    file.seek(place)
    return f"{zlib.crc32(file.read(end - place), checksum):08x}"


def list_checkpoints(directory: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the complete checkpoints in ``directory``, in the order in which they were written.

    A folder that does not exist has none. Damaged checkpoints are left out, with a warning. Sizes are checked here;
    :meth:`torchhooks.Saver.restore` checks contents. Files that no Saver wrote are ignored. A checkpoint has the
    attributes ``path``, ``name``, ``step``, ``bytes``, ``time`` (in seconds since 1970), ``order`` and ``kept``.

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


def list_again(folder: str, seals: Seals) -> list[Checkpoint]:
    """Return what :func:`list_checkpoints` does, with a warning only about what changed since a call with ``seals``."""
    try:
        return _survey(folder, seals)
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
        is_one = has_manifest(path) or (bool(_NAME.fullmatch(name)) and os.path.exists(os.path.join(path, _OF_SHARDS)))
    elif os.path.lexists(path):
        is_one = True
    else:
        prefix, _, step = name.rpartition("-")
        others = _names(folder) if os.path.isdir(folder) and bool(_NAME.fullmatch(name)) else []
        named_alike = (os.path.join(folder, other) for other in others if other.rpartition("-")[0] == prefix)
        is_one = (prefix.endswith(".ckpt") and step.isdecimal()) or any(map(_is_sealed, named_alike))
    return (folder, name) if is_one else (path, None)


def _is_sealed(path: str) -> bool:
    try:
        read_seal(path)
    except DamagedCheckpointError:
        return False
    return True


def is_checkpoint_name(prefix: str) -> bool:
    """Return whether checkpoints that are named ``prefix-700`` are found again in their folder."""
    name = f"{prefix}-0"
    return bool(prefix) and os.path.basename(name) == name and "\0" not in name and bool(_NAME.fullmatch(name))


def has_checkpoints(directory: str | os.PathLike[str]) -> bool:
    """Return whether ``directory`` has checkpoints, complete or not. Files of others that are named so do not count."""
    folder = os.fspath(directory)
    names = _names(folder) if os.path.isdir(folder) else []
    for name in names:
        with suppress(DamagedCheckpointError):
            read_seal(os.path.join(folder, name))
            return True
        if os.path.isdir(os.path.join(folder, name)):
            return True  # a damaged one
    return any(_begins(folder, name, short=_may_be_ours(folder, name, set())) for name in names)
