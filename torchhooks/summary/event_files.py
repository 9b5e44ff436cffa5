"""TensorBoard's summary writer with event files that are written immediately.

torch's SummaryWriter hands every event to a background thread. Waking that thread takes several times as long as
writing a small event, and the events in its queue are lost when the process is killed. Here, a small event is in the
file when ``add_scalar`` returns. A large event still goes to a background thread, because Python takes a while to
compute its checksum; events that follow it are queued, so that the file keeps their order.

This module needs tensorboard at import time. Import it only when an event file is about to be opened.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from tensorboard.compat.proto import event_pb2
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.writer import FileWriter

from torchhooks.common.errors import add_note
from torchhooks.common.files import warn_if_removed

_LARGE = 4096
"""Bytes; computing the checksum of this many takes about as long as waking a thread."""

_MAX_QUEUED = 10
"""Events; the same as in torch's SummaryWriter."""

_CHECK_SECS = 10
"""Seconds between two checks that the file was not removed; a check on every write would be noticeable."""

_AT_NEXT_EVENT = -math.inf
"""In place of the time of the next check: the file was removed, so the next event opens a new one."""

_file_numbers = itertools.count()


class EventFile:
    """One event file, with the methods of tensorboard's ``EventFileWriter``. They may be called from any thread.

    Its name is unique in ``folder`` and ends in ``suffix``. If the file is removed while it is open, a warning is
    logged, and later events go to a new file. Any method may raise an OSError: that of a queued event is raised by a
    later call, at the latest by :meth:`close`.
    """

    def __init__(self, folder: str, suffix: str = "") -> None:
        self._folder = os.path.abspath(folder)  # a later os.chdir must not change where a new file goes
        self._suffix = suffix
        self._lock = threading.RLock()
        self._thread: ThreadPoolExecutor | None = None
        self._queued: deque[Future[None]] = deque()
        self._open()

    def get_logdir(self) -> str:
        return self._folder

    def reopen(self) -> None:
        """Close the file, and continue in a new one."""
        with self._lock:
            self._finish_queued()
            self._file.close()
            self._open()

    def add_event(self, event: Any) -> None:
        """Write ``event``, a tensorboard ``Event``, or queue it if it is large or follows one that is queued.

        Waits if ten events are queued, so that the queue does not grow without limit on a slow disk.
        """
        data = event.SerializeToString()
        with self._lock:
            if time.monotonic() >= self._next_check:
                self._check_removed()
                if self._next_check == _AT_NEXT_EVENT:
                    self.reopen()
            if self._queued:
                self._finish_queued(at_most=_MAX_QUEUED - 1)
            if (len(data) > _LARGE or self._queued) and self._enqueue(data):
                return
            self._write(data)

    def flush(self) -> None:
        """Wait until all queued events are written."""
        with self._lock:
            self._finish_queued()
            self._check_removed()

    def close(self) -> None:
        """Wait until all queued events are written, and close the file. Closing twice is harmless."""
        with self._lock:
            try:
                self._finish_queued()
                self._file.warn_if_removed()
            finally:
                if self._thread is not None:
                    self._thread.shutdown()
                    self._thread = None
                self._file.close()

    def _open(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        # TensorBoard reads files in the order of their names, hence the leading zeros.
        unique = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers):06d}"
        self._file = _RecordFile(os.path.join(self._folder, f"events.out.tfevents.{unique}{self._suffix}"))
        self._next_check = time.monotonic() + _CHECK_SECS
        try:
            self.add_event(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        except BaseException:
            self._file.close()
            raise

    def _enqueue(self, data: bytes) -> bool:
        """Hand ``data`` to the background thread, and return whether that was possible."""
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="torchhooks-events")
        try:
            self._queued.append(self._thread.submit(self._write, data))
        except RuntimeError:  # no thread can be started: the system has too many, or the interpreter is exiting
            self._finish_queued()
            # Dropped because it keeps what it was given although it raised, and would write it with the next event.
            self._thread = None
            return False
        return True

    def _write(self, data: bytes) -> None:
        self._file.write(as_record(data))

    def _finish_queued(self, at_most: int = 0) -> None:
        """Remove written events from the queue. Wait until ``at_most`` are left, and raise the first error.

        This always returns: the background thread takes no lock that a caller may hold while it waits, and an error
        does not end the thread.
        """
        errors = []
        while self._queued and (len(self._queued) > at_most or self._queued[0].done()):
            # Removed only when it is written. An interrupted wait would otherwise let the next event overtake it.
            error = self._queued[0].exception()
            self._queued.popleft()
            if error is not None:
                errors.append(error)
        if errors:
            if len(errors) > 1:
                add_note(errors[0], f"{len(errors)} events were not written to {self._file.path}")
            raise errors[0]

    def _check_removed(self) -> None:
        if self._next_check != _AT_NEXT_EVENT:
            self._next_check = time.monotonic() + _CHECK_SECS
        if self._file.warn_if_removed():
            self._finish_queued()
            self._file.close()
            # Not opened here, because the folder that was removed should not come back if there is nothing to write.
            self._next_check = _AT_NEXT_EVENT


def as_record(data: bytes) -> bytes:
    """Return ``data`` as a record of an event file: its length and itself, each with its checksum.

    tensorboard's ``RecordWriter`` does the same, and takes four times as long for the checksums.
    """
    length = _U64.pack(len(data))
    return b"".join((length, _U32.pack(_masked_crc(length)), data, _U32.pack(_masked_crc(data))))


def _masked_crc(data: bytes) -> int:
    """Return the CRC-32C of ``data``, masked as in TensorFlow's records."""
    crc, table = 0xFFFFFFFF, _CRC_TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc_of_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


_CRC_TABLE = [_crc_of_byte(byte) for byte in range(256)]
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class _RecordFile:
    """A new file at ``path`` that has whole records only, even if the disk is full and a write fails half-way.

    TensorBoard stops reading a file at an incomplete record.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # Unbuffered, so that an event that was added survives a kill.
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()  # an interrupted caller may write while the background thread does
        self._size = 0
        self._is_torn = False

    def write(self, record: bytes) -> None:
        """Write ``record`` completely or not at all."""
        with self._lock:
            self._cut()
            self._is_torn = True
            try:
                rest = record
                while rest:  # a nearly full disk takes only a part
                    rest = rest[self._file.write(rest) :]
                self._size += len(record)
                self._is_torn = False
            except BaseException:
                with suppress(OSError):  # tried again before the next record
                    self._cut()
                raise

    def close(self) -> None:
        with self._lock:
            with suppress(OSError):  # the error of the write was raised
                self._cut()
            self._file.close()

    def warn_if_removed(self) -> bool:
        """Return whether the file was removed while it is open, and log a warning if it was."""
        return not self._file.closed and warn_if_removed(self._file, self.path)

    def _cut(self) -> None:
        """Remove an incomplete record from the end of the file."""
        if self._is_torn and not self._file.closed:
            self._file.truncate(self._size)
            self._file.seek(self._size)
            self._is_torn = False


class _DirectFileWriter(FileWriter):
    def __init__(self, folder: str, suffix: str) -> None:
        # The constructor of the base class is not called: it opens a file with a background thread.
        self.event_writer = EventFile(folder, suffix)


class DirectSummaryWriter(SummaryWriter):
    """A torch SummaryWriter that writes to an :class:`EventFile`."""

    file_writer: Any
    all_writers: Any

    takes_walltime = True
    """Tells hooks that the ``add_...`` methods take the wall time of the event, in seconds since 1970."""

    def add_scalar(self, tag: str, scalar_value: Any, *args: Any, **kwargs: Any) -> None:
        """Write a point of a curve. Takes the arguments of torch's method."""
        # Fast path for the call that hooks make. torch's method turns the number into an array and back.
        if type(scalar_value) is float and not (kwargs.keys() - {"walltime"}) and len(args) == 1:
            event = event_pb2.Event()
            event.summary.value.add(tag=tag, simple_value=scalar_value)  # in place, instead of copied twice
            self._get_file_writer().add_event(event, args[0], **kwargs)
        else:
            super().add_scalar(tag, scalar_value, *args, **kwargs)

    def add_points(self, points: Iterable[tuple[str, float]], step: int, walltime: float | None = None) -> None:
        """Write a point of each of several curves, given as (tag, value), as one event."""
        event = event_pb2.Event()
        for tag, value in points:
            event.summary.value.add(tag=tag, simple_value=float(value))
        self._get_file_writer().add_event(event, step, walltime)

    def add_session_log(self, session_log: Any, global_step: int | None = None) -> None:
        """Write a tensorboard ``SessionLog`` (``tf.summary.FileWriter.add_session_log``)."""
        self._get_file_writer().add_event(event_pb2.Event(session_log=session_log), global_step)

    def flush(self) -> None:
        """Wait until all queued events are written."""
        writer = self.file_writer  # read once, because another thread may close this writer
        if writer is not None:
            writer.flush()

    def close(self) -> None:
        """Write all queued events and close the file, even if writing fails. Closing twice is harmless."""
        if self.all_writers is not None:
            # Cleared first, so that a write after a failed close opens a new file.
            writer, self.file_writer, self.all_writers = self.file_writer, None, None
            writer.close()

    def _get_file_writer(self) -> Any:
        # Overrides torch's: all of its methods write through this one, which also opens a new file after a close.
        if self.all_writers is None or self.file_writer is None:
            self.file_writer = _DirectFileWriter(str(self.log_dir), self.filename_suffix)
            self.all_writers = {self.file_writer.get_logdir(): self.file_writer}
        return self.file_writer
