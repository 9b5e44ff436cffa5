"""Checkpoints as files: whole or not there, in the order in which they were written. Knows nothing of what is in them.

A checkpoint is one file, ``model.ckpt-700``: what ``torch.save`` writes, and after it one line, the seal, which
``torch.load`` does not mind:

    {"seal": 1, "name": "model.ckpt-700", "order": 8, "step": 700, "bytes": 51234, "time": 1752000000.0} 1c2a99f0

``order`` counts the checkpoints of the folder as they were written, ``bytes`` is the length of what stands before the
seal, and the last word is a CRC-32. ``torch.save`` writes a zip archive, which has a CRC-32 of each record already; so
this one leaves out the contents of the records and sums up the rest, their own sums included: no tensor is read again.
So a file says by itself whether it is whole. ``checkpoints.json`` beside it, the index, lists the checkpoints in order,
and which of them are kept for good.

How one is written
------------------

    write, under a temporary name in the same folder; seal; fsync
    rename; fsync the folder                             # from here on it is whole, whatever happens
    the index, in the same way
    remove those that are one too many                   # the index, which no longer lists them, names them for removal

What a kill leaves, and what becomes of it
------------------------------------------
* a temporary file: removed before the next checkpoint is written, once no process holds its lock;
* a checkpoint that is whole but not in the index: used, for it is newer than all that are;
* one that was to be removed: removed with the next ones.

Whatever else is wrong, a file cut short, missing, copied or changed, an index missing or unreadable, is named in a
warning and left as it is; the rest is used. One process at a time writes to a folder.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import struct
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, NamedTuple

from torchhooks.errors import CheckpointError, DamagedCheckpointError, brief
from torchhooks.log import logger

try:
    import fcntl
except ImportError:  # Windows, which does not let anybody remove a file that is open
    fcntl = None  # type: ignore[assignment]

INDEX = "checkpoints.json"

_NAME = re.compile(r"(?!.*tfevents)(?P<prefix>[^.].*)-(?P<step>\d+)", re.DOTALL)
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp", re.DOTALL)
_SEAL = b'\n{"seal": 1, '
_SEAL_LIMIT = 4096  # a name has at most 255 characters, of at most 12 bytes each in JSON
_CHECKSUM_LENGTH = len(b"00000000\n")
_LENGTHS = struct.Struct("<HH")  # of a record's name and of what stands between that and its contents
_LENGTHS_OFFSET = 26
_CHUNK = 1 << 16  # more would be read again around each record when the sum is made
_WRITING = threading.Lock()  # two savers of one process may write to one folder


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint in a folder.

    Args:
        path: where it is: what ``Saver.restore`` takes.
        step: the global step that it was saved under.
        bytes: the size of the file.
        time: when it was written, in seconds since 1970.
        order: a number that grows from one checkpoint of the folder to the next, whatever their steps.
        checksum: the last word of the file, in hexadecimal digits.
        kept: whether it is kept for good and not counted by ``max_to_keep``.
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
    """Which of the older checkpoints stay.

    Args:
        max_to_keep: how many, the newest included; ``None`` or 0: all.
        every_n_hours: the least time between two that are kept for good, in hours; ``None``: none is.
    """

    max_to_keep: int | None
    every_n_hours: float | None


class Disk:
    """What writing a checkpoint asks of the operating system. A test gives a Saver one that fails or is killed."""

    def create(self, path: str) -> BinaryIO:
        """Open a new file for writing."""
        return open(path, "x+b", buffering=_CHUNK)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Append ``data``."""
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Return once everything that was written would survive a power failure."""
        file.flush()
        os.fsync(file.fileno())

    def rename(self, path: str, new_path: str) -> None:
        """Give a file another name, in place of what had that name."""
        os.replace(path, new_path)

    def sync_folder(self, path: str) -> None:
        """Return once the names in a folder would survive a power failure."""
        if fcntl is None:
            return  # Windows opens no folders
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.remove(path)

    def now(self) -> float:
        """The time, in seconds since 1970."""
        return time.time()


class Sink:
    """A file being written: where ``torch.save`` writes to.

    torch turns an error of ``write`` into one about positions in the file, so the first error is kept back until
    :meth:`check`, and nothing is written after it.
    """

    def __init__(self, disk: Disk, file: BinaryIO) -> None:
        self.size = 0
        self.file = file
        self._disk = disk
        self._error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append ``data``."""
        if self._error is None:
            try:
                self._disk.write(self.file, data)
            except BaseException as error:  # a Ctrl-C arrives here too
                self._error = error
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing: the file is synced as a whole."""

    def check(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error


@dataclass
class Index:
    """The checkpoints of a folder.

    Args:
        checkpoints: in the order in which they were written.
        removing: the names of files that were to be removed.
        last: the highest order that was given.
        keep_after: by prefix, the time from which on a surplus checkpoint is kept for good.
        lost: whether this was put together without an index.
    """

    checkpoints: list[Checkpoint] = field(default_factory=list)
    removing: list[str] = field(default_factory=list)
    last: int = 0
    keep_after: dict[str, float] = field(default_factory=dict)
    lost: bool = False

    def add(self, checkpoint: Checkpoint) -> None:
        """Append the newest; one of the same name has been replaced by it."""
        others = [other for other in self.checkpoints if other.name != checkpoint.name]
        self.checkpoints = [*others, checkpoint]
        self.last = checkpoint.order

    def retire(self, prefix: str, retention: Retention, now: float) -> None:
        """Mark those of ``prefix`` that are one too many: for removal, or as kept for good."""
        period = None if retention.every_n_hours is None else retention.every_n_hours * 3600
        if period is not None:
            self.keep_after.setdefault(prefix, now + period)
        for checkpoint in self._surplus(prefix, retention.max_to_keep):
            place = self.checkpoints.index(checkpoint)
            if period is not None and checkpoint.time > self.keep_after[prefix]:
                self.checkpoints[place] = replace(checkpoint, kept=True)
                self._next_to_keep(prefix, checkpoint.time, period)
            else:
                del self.checkpoints[place]
                self.removing.append(checkpoint.name)
        live = {checkpoint.name for checkpoint in self.checkpoints}
        self.removing = [name for name in self.removing if name not in live]

    def keep_surplus(self, prefix: str, max_to_keep: int | None) -> None:
        """Keep for good what would be one too many: without its index nobody knows whether it was to be kept."""
        for checkpoint in self._surplus(prefix, max_to_keep):
            self.checkpoints[self.checkpoints.index(checkpoint)] = replace(checkpoint, kept=True)

    def _surplus(self, prefix: str, max_to_keep: int | None) -> list[Checkpoint]:
        counted = [checkpoint for checkpoint in self.checkpoints if checkpoint.prefix == prefix and not checkpoint.kept]
        return counted[:-max_to_keep] if max_to_keep else []

    def _next_to_keep(self, prefix: str, kept: float, period: float) -> None:
        # TensorFlow adds one period. After a pause of several that would keep one checkpoint after the other.
        periods = int((kept - self.keep_after[prefix]) / period) + 1
        self.keep_after[prefix] += periods * period


class Folder:
    """A folder of checkpoints, as its writer sees it.

    Args:
        path: of the folder; made when the first checkpoint is written.
        disk: what to write through.
    """

    def __init__(self, path: str, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._used = False
        self._looked_at = False

    def add(self, prefix: str, step: int, fill: Callable[[Sink], object], retention: Retention) -> None:
        """Write a checkpoint, what ``fill`` puts into the sink, and remove those that are one too many.

        Raises:
            OSError: it could not be written. The older ones are as they were.
        """
        with _WRITING:
            try:
                self._add(prefix, step, fill, retention)
            except BaseException:
                self._looked_at = False  # it may have left something
                raise

    def _add(self, prefix: str, step: int, fill: Callable[[Sink], object], retention: Retention) -> None:
        index = self._index(prefix, retention)
        now = self._disk.now()
        index.add(self._write(f"{prefix}-{step}", step, index.last + 1, now, fill))
        self._used = True
        index.retire(prefix, retention, now)
        self._write_index(index)
        self._remove(index.removing)

    def _index(self, prefix: str, retention: Retention) -> Index:
        index = read_index(self._path) if self._looked_at else None
        if index is None:
            index = self._first_look()
        if index.lost:
            index.keep_surplus(prefix, retention.max_to_keep)
        return index

    def _first_look(self) -> Index:
        if not self._used:  # one that vanished is not made again: what was in it is missed
            os.makedirs(self._path, exist_ok=True)
        self._remove_stale()
        self._looked_at = True
        return survey(self._path)

    def _write(self, name: str, step: int, order: int, now: float, fill: Callable[[Sink], object]) -> Checkpoint:
        path = os.path.join(self._path, name)
        with self._replacing(path) as sink:
            fill(sink)
            sink.check()
            seal = {"name": name, "order": order, "step": step, "bytes": sink.size, "time": now}
            sink.write(_SEAL + json.dumps(seal)[1:].encode() + b" ")
            sink.check()
            with zipfile.ZipFile(sink.file) as archive:
                checksum = _checksum(sink.file, archive.infolist(), sink.size)
            sink.write(checksum.encode() + b"\n")
        return Checkpoint(path, step, sink.size, now, order, checksum)

    def _write_index(self, index: Index) -> None:
        with self._replacing(os.path.join(self._path, INDEX)) as sink:
            sink.write(_index_text(index).encode())

    @contextmanager
    def _replacing(self, path: str) -> Iterator[Sink]:
        """A file that is at ``path`` once the block has ended, and never before it is whole."""
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
        try:
            with self._disk.create(temporary) as file:
                with suppress(OSError):  # a file system without locks: then nobody removes what a kill leaves
                    _lock(file)
                sink = Sink(self._disk, file)
                yield sink
                sink.check()
                self._disk.sync(file)
            self._disk.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                self._disk.remove(temporary)
            raise
        self._disk.sync_folder(folder)

    def _remove(self, names: list[str]) -> None:
        for name in names:
            path = os.path.join(self._path, name)
            try:
                self._disk.remove(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("%s could not be removed: %s. It is tried again at the next checkpoint.", path, error)

    def _remove_stale(self) -> None:
        for name in filter(_TEMPORARY.fullmatch, os.listdir(self._path)):
            path = os.path.join(self._path, name)
            with suppress(OSError):
                with open(path, "r+b") as file:
                    _lock(file)
                self._disk.remove(path)
                logger.warning("%s, left by a process that ended while it wrote, was removed", path)


def _lock(file: BinaryIO) -> None:
    """Mark ``file`` as being written, until it is closed or the process ends; ``OSError`` if another process has."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def survey(folder: str) -> Index:
    """The index of a folder, put right by what is really there. What is wrong is logged; nothing is changed.

    Sizes and seals are looked at, contents are not: that is for :func:`verify`.
    """
    names = _names(folder)
    index = read_index(folder) or Index(lost=True)
    listed = {checkpoint.name: checkpoint for checkpoint in index.checkpoints}
    for name in listed.keys() - set(names):
        logger.warning("%s is in the index but not in the folder: it is skipped", listed[name].path)
    found = [_look_at(os.path.join(folder, name), listed.get(name), index) for name in names]
    checkpoints = [checkpoint for checkpoint in found if checkpoint is not None]
    checkpoints.sort(key=lambda checkpoint: checkpoint.order)
    last = max([index.last, *(checkpoint.order for checkpoint in checkpoints)])
    return replace(index, checkpoints=checkpoints, last=last)


def _names(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if _NAME.fullmatch(entry.name) and not entry.is_dir())


def _look_at(path: str, listed: Checkpoint | None, index: Index) -> Checkpoint | None:
    """The checkpoint at ``path`` if it can be used; ``listed`` is what the index says of it."""
    try:
        checkpoint = read_seal(path)
    except DamagedCheckpointError as error:
        logger.warning("%s It is skipped.", error)
        return None
    if checkpoint.order > index.last:
        if not index.lost:
            logger.warning("%s is whole but not in the index, as after a kill: it is used", path)
        return checkpoint
    if listed is not None and listed.order == checkpoint.order:
        return replace(checkpoint, kept=listed.kept)
    if checkpoint.name not in index.removing:
        logger.warning("%s is older than the index and not what that lists: it is skipped", path)
    return None


def read_seal(path: str) -> Checkpoint:
    """What a checkpoint says of itself, without reading it whole.

    Raises:
        DamagedCheckpointError: it is missing, cut short, or no checkpoint at all.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, io.SEEK_END)
            start = file.seek(max(0, size - _SEAL_LIMIT))
            tail = file.read()
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    place = tail.rfind(_SEAL)
    try:
        text, checksum = tail[place + 1 :].decode().removesuffix("\n").rsplit(" ", 1)
        seal = json.loads(text)
        checkpoint = Checkpoint(path, seal["step"], size, seal["time"], seal["order"], checksum)
        name, whole = seal["name"], seal["bytes"] == start + place and len(checksum) == 8 and tail.endswith(b"\n")
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path} is cut short, or was not written by a Saver: it has no seal.") from error
    if not whole:
        raise DamagedCheckpointError(f"{path} has another size than its seal says.")
    if name != os.path.basename(path):
        raise DamagedCheckpointError(f"{path} is a copy of {name}: give it that name again to use it.")
    return checkpoint


def verify(path: str) -> Checkpoint:
    """Read the checkpoint at ``path`` whole and compare its checksum.

    Raises:
        DamagedCheckpointError: it is not what was written.
    """
    checkpoint = read_seal(path)
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            checksum = _checksum(file, archive.infolist(), checkpoint.bytes - _CHECKSUM_LENGTH)
            damaged = archive.testzip() if checksum == checkpoint.checksum else "what is around its records"
    except Exception as error:  # there is no telling what a changed byte leads to
        raise DamagedCheckpointError(f"{path} is damaged, or cannot be read: {brief(error)}.") from error
    if damaged is not None:
        raise DamagedCheckpointError(f"{path} is damaged: {damaged} is not what was written.")
    return checkpoint


def _checksum(file: BinaryIO, records: list[zipfile.ZipInfo], end: int) -> str:
    """The CRC-32 of an archive, and what follows it up to ``end``, without the contents of its records."""
    checksum = place = 0
    for record in sorted(records, key=lambda record: record.header_offset):
        file.seek(record.header_offset + _LENGTHS_OFFSET)
        contents = file.tell() + _LENGTHS.size + sum(_LENGTHS.unpack(file.read(_LENGTHS.size)))
        file.seek(place)
        checksum = zlib.crc32(file.read(contents - place), checksum)
        place = contents + record.compress_size
    file.seek(place)
    return f"{zlib.crc32(file.read(end - place), checksum):08x}"


def _index_text(index: Index) -> str:
    fields = ("name", "order", "step", "bytes", "time", "checksum", "kept")
    rows = [{name: getattr(checkpoint, name) for name in fields} for checkpoint in index.checkpoints]
    others = {"removing": index.removing, "last": index.last, "keep_after": index.keep_after}
    return json.dumps({"checkpoints": rows, **others}, indent=1) + "\n"


def read_index(folder: str) -> Index | None:
    """The index of a folder as it stands there; ``None``, and a warning, if it cannot be used."""
    path = os.path.join(folder, INDEX)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        checkpoints = [_listed(folder, **row) for row in content["checkpoints"]]
        return Index(checkpoints, list(content["removing"]), int(content["last"]), dict(content["keep_after"]))
    except FileNotFoundError:
        if _names(folder):
            logger.warning("%s is missing: the checkpoints are found by their seals", path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be used (%s): the checkpoints are found by their seals", path, error)
    return None


def _listed(folder: str, name: str, **row: Any) -> Checkpoint:
    return Checkpoint(os.path.join(folder, name), **row)


def list_checkpoints(directory: str | os.PathLike[str]) -> list[Checkpoint]:
    """The whole checkpoints in ``directory``, in the order in which they were written; none if there is no such folder.

    What cannot be used is left out, and named in a warning. Sizes are checked here, checksums by ``Saver.restore``.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    folder = os.fspath(directory)
    try:
        return survey(folder).checkpoints
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}. Make it readable.") from error


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The path of the newest whole checkpoint in ``directory``, ``None`` if there is none.

    Unlike TensorFlow, which believes its index, it is looked whether the file is there and whole. The newest is the one
    written last: after going back to an older one, that is not the one of the highest step.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    checkpoints = list_checkpoints(directory)
    return checkpoints[-1].path if checkpoints else None


def has_checkpoints(directory: str | os.PathLike[str]) -> bool:
    """Whether ``directory`` has files that go by the names of checkpoints, whole or not."""
    folder = os.fspath(directory)
    return os.path.isdir(folder) and bool(_names(folder))
