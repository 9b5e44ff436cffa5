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
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

from tensorboard.compat.proto import event_pb2
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.writer import FileWriter

from torchhooks.common.files import warn_if_removed, write_all
from torchhooks.summary.checksums import masked_crc32c

_file_numbers = itertools.count()
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class EventFile:
    """One event file, with the methods of tensorboard's ``EventFileWriter``. They may be called from any thread.

    Its name is unique in ``folder`` and ends in ``suffix``. The next event goes to a new file after a failed write,
    because TensorBoard stops reading a file at an incomplete record, and after the file was removed, with a warning.
    """

    def __init__(self, folder: str, suffix: str = "") -> None:
        self._folder = os.path.abspath(folder)  # a later os.chdir must not change where a new file goes
        self._suffix = suffix
        self._lock = threading.RLock()
        self._open()

    def get_logdir(self) -> str:
        return self._folder

    def reopen(self) -> None:
        """Close the file, and continue in a new one."""
        with self._lock:
            self._file.close()
            self._open()

    def add_event(self, event: Any) -> None:
        """Write ``event``, a tensorboard ``Event``."""
        record = _record(event.SerializeToString())
        with self._lock:
            if self._file.closed or self._is_removed():
                self.reopen()
            self._write(record)

    def flush(self) -> None:
        """Log a warning if the file was removed. Every event is in the file already."""
        with self._lock:
            # No new file yet: the folder that was removed should not come back if nothing more is written.
            if not self._file.closed and self._is_removed():
                self._file.close()

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        with self._lock:
            try:
                self.flush()
            finally:
                self._file.close()

    def _open(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        # TensorBoard reads files in the order of their names, hence the leading zeros.
        unique = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers):06d}"
        self._path = os.path.join(self._folder, f"events.out.tfevents.{unique}{self._suffix}")
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

    def _is_removed(self) -> bool:
        return warn_if_removed(self._file, self._path)


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
        """Log a warning if the file was removed. Every event is in the file already."""
        writer = self.file_writer  # read once, because another thread may close this writer
        if writer is not None:
            writer.flush()

    def close(self) -> None:
        """Close the file. Closing twice is harmless, and a later write opens a new file."""
        writer, self.file_writer, self.all_writers = self.file_writer, None, None
        if writer is not None:
            writer.close()

    def _get_file_writer(self) -> Any:
        # Overrides torch's: all of its methods write through this one, which also opens a new file after a close.
        if self.all_writers is None or self.file_writer is None:
            self.file_writer = _DirectFileWriter(str(self.log_dir), self.filename_suffix)
            self.all_writers = {self.file_writer.get_logdir(): self.file_writer}
        return self.file_writer
