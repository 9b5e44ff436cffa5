"""TensorBoard's summary writer with event files that are written immediately.

torch's SummaryWriter hands every event to a background thread. Waking that thread takes several times as long as
writing a small event, and the events in its queue are lost when the process is killed. Here, every event is in the file
when the method that writes it returns.

This module needs tensorboard at import time. Import it only when an event file is about to be opened.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from tensorboard.compat.proto import event_pb2
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from torch.utils.tensorboard.writer import FileWriter

from torchhooks.common.files import place, write_all
from torchhooks.common.log import logger
from torchhooks.common.text import flat_config
from torchhooks.summary.writers import ForeignWriter

_file_numbers = itertools.count()
_FILE_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.")
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class EventFile:
    """One event file, with the methods of tensorboard's ``EventFileWriter``. They may be called from any thread.

    Its name is unique in ``folder`` and ends in ``suffix``. The next event goes to a new file after a failed write,
    because TensorBoard stops reading a file at an incomplete record, and, with a warning, after the file was removed.
    """

    def __init__(self, folder: str, suffix: str = "") -> None:
        self._folder = os.path.abspath(place(folder))  # a later os.chdir must not change where a new file goes
        self._suffix = suffix
        self._lock = threading.RLock()  # reentrant, because add_event() calls reopen()
        self._open()

    def get_logdir(self) -> str:
        return self._folder

    def reopen(self) -> None:
        """Close the file, and continue in a new one."""
        with self._lock:
            self._file.close()
            self._open()

    def add_event(self, event: event_pb2.Event) -> None:
        """Write ``event``, a tensorboard ``Event``."""
        record = _record(event.SerializeToString())
        with self._lock:
            removed = self._path
            if self._file.closed:
                self.reopen()
            elif not os.path.exists(removed):  # the system would accept what is written, and no reader could find it
                self.reopen()
                logger.warning("%s was removed, and with it its points; the next ones go to %s", removed, self._path)
            self._write(record)

    def flush(self) -> None:
        """Do nothing: every event is in the file already."""

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        with self._lock:
            self._file.close()

    def _open(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        # TensorBoard reads files in the order of their names, hence the leading zeros. A process that ended in this
        # second, or whose clock was ahead, may have left a name that would be read after this one.
        process = f"{socket.gethostname()}.{os.getpid()}.{next(_file_numbers):06d}{self._suffix}"
        name = _file_name(int(time.time()), process)
        older = [found for found in map(_FILE_NAME.match, os.listdir(self._folder)) if found]
        newest = max(older, key=lambda found: found.string, default=None)
        if newest is not None and newest.string > name:
            name = _file_name(int(newest[1]) + 1, process)
        self._path = os.path.join(self._folder, name)
        # Unbuffered, so that an event that was added survives a kill.
        self._file = open(self._path, "xb", buffering=0)  # noqa: SIM115
        version = event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")
        self._write(_record(version.SerializeToString()))

    def _write(self, record: bytes) -> None:
        try:
            write_all(self._file, record)
        except BaseException:
            self._file.close()
            raise


def _file_name(second: int, process: str) -> str:
    return f"events.out.tfevents.{second:010d}.{process}"


def _record(data: bytes) -> bytes:
    """Return ``data`` as a record: its length and itself, each with a checksum."""
    return b"".join((_header(len(data)), data, _U32.pack(masked_crc32c(data))))


@functools.lru_cache(maxsize=256)  # the events of one hook have two or three lengths
def _header(length: int) -> bytes:
    packed = _U64.pack(length)
    return packed + _U32.pack(masked_crc32c(packed))


class _DirectFileWriter(FileWriter):
    def __init__(self, folder: str, suffix: str) -> None:
        # The constructor of the base class is not called: it opens a file with a background thread.
        self.event_writer = EventFile(folder, suffix)


class DirectSummaryWriter(SummaryWriter):
    """A torch SummaryWriter that writes to an :class:`EventFile`."""

    file_writer: Any  # torch declares both as None
    all_writers: Any

    def _get_file_writer(self) -> Any:
        # Overrides torch's: all of its methods write through this one, which also opens a new file after a close.
        if self.all_writers is None or self.file_writer is None:
            self.file_writer = _DirectFileWriter(str(self.log_dir), self.filename_suffix)
            self.all_writers = {self.file_writer.get_logdir(): self.file_writer}
        return self.file_writer


class TorchWriter(ForeignWriter):
    """The adapter for torch's SummaryWriter and its subclasses, which take wall times and events."""

    def __init__(self, writer: SummaryWriter) -> None:
        super().__init__(writer)
        # A subclass may override a method and take fewer arguments: tag, value and step.
        self._overridden = {
            kind
            for kind in ("scalar", "histogram", "histogram_raw", "image", "text", "figure")
            if getattr(type(writer), f"add_{kind}") is not getattr(SummaryWriter, f"add_{kind}")
        }

    def add_points(self, points: Iterable[tuple[str, float]], step: int, walltime: float | None = None) -> None:
        if "scalar" in self._overridden:
            super().add_points(points, step)
            return
        event = event_pb2.Event()  # one for all points, which is what costs time
        for tag, value in points:
            event.summary.value.add(tag=tag, simple_value=value)
        self._add_event(event, step, walltime)

    def add_config(self, config: Mapping[str, object]) -> None:
        """Write TensorBoard's hparams, into the event file of the curves."""
        # Without the first part, which has a list of metrics, TensorBoard's dashboard lists all curves. The last part
        # says that the training run is over. torch's add_hparams would write all of it into a folder of its own.
        _, started, _ = hparams(flat_config(config), {})
        self.writer._get_file_writer().add_summary(started)  # noqa: SLF001 - torch has no public way to add an event

    def add_session_log(
        self, status: Literal["START", "CHECKPOINT"], step: int, checkpoint_path: str | os.PathLike[str] | None = None
    ) -> None:
        path = None if checkpoint_path is None else os.fspath(checkpoint_path)
        log = event_pb2.SessionLog(status=status, checkpoint_path=path)
        self._add_event(event_pb2.Event(session_log=log), step)

    def write(self, kind: str, tag: str, value: Iterable[object], step: int, walltime: float | None) -> None:
        if kind in self._overridden:
            super().write(kind, tag, value, step, walltime)
        else:
            getattr(self.writer, f"add_{kind}")(tag, *value, step, walltime=walltime)

    def _add_event(self, event: event_pb2.Event, step: int, walltime: float | None = None) -> None:
        # torch's SummaryWriter has no public method that writes an event and opens a new file after a close.
        self.writer._get_file_writer().add_event(event, step, walltime)  # noqa: SLF001


# -- CRC-32C, the checksum of TensorFlow's records --------------------------------------------------------------------

# A small record is read byte by byte, as by tensorboard, in a quarter of its time. NumPy reads a large one in rows. As
# a checksum is linear, the checksum of a row is the sum (xor) of a number for each byte, which its place in the row
# gives. What the rows before it have come to is added to its first four bytes.

_LARGE = 512
"""Bytes; NumPy takes as long for this many as the loop over them."""

_WIDTH = 256


def masked_crc32c(data: bytes) -> int:
    """Return the CRC-32C of ``data`` with the mask of TensorFlow's records."""
    crc = _of_large(data) if len(data) >= _LARGE else _of_small(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _of_small(data: bytes) -> int:
    crc, table = 0xFFFFFFFF, _small_table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _of_large(data: bytes) -> int:
    padded = np.zeros(-(-len(data) // _WIDTH) * _WIDTH, np.uint8)  # in front: leading zeros do not change a checksum
    padded[-len(data) :] = np.frombuffer(data, np.uint8)
    padded[-len(data) :][:4] ^= 0xFF  # the initial value
    rows = padded.reshape(-1, _WIDTH)
    crc = 0
    first, second, third, fourth = _tables()[:4].tolist()
    for row in np.bitwise_xor.reduce(_tables()[np.arange(_WIDTH), rows], axis=1).tolist():
        crc = row ^ first[crc & 0xFF] ^ second[crc >> 8 & 0xFF] ^ third[crc >> 16 & 0xFF] ^ fourth[crc >> 24]
    return crc ^ 0xFFFFFFFF


@functools.cache
def _tables() -> np.ndarray:
    """Return, for each place in a row, the checksum of each byte followed by zeros up to the end of the row."""
    table: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = table >> 1 ^ (table & 1) * np.uint32(0x82F63B78)
    tables = [table]
    for _ in range(_WIDTH - 1):
        tables.append(table[tables[-1] & 0xFF] ^ tables[-1] >> 8)
    return np.stack(tables[::-1])


@functools.cache
def _small_table() -> list[int]:
    return [int(checksum) for checksum in _tables()[-1]]
