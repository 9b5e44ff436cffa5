"""Event files that are written as they come: TensorBoard's writer with another way to the disk.

torch's SummaryWriter hands every event to a thread. Waking it costs several times what writing a small event does, and
what is in its queue is lost when the process is killed. Here a small event is in the file when ``add_scalar`` returns.
A large one, whose checksum takes Python a while, still goes to a thread, and what comes behind it waits in line.

Needs tensorboard, so that nothing here may be imported before it is used.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.writer import FileWriter

_LARGE = 4096
"""Bytes: the checksum of as much takes about as long as waking a thread."""

_uid = itertools.count()


class EventFile:
    """One event file, with the methods of tensorboard's own ``EventFileWriter``. Any thread may call them.

    Args:
        folder: where the file is made, under a name of its own.
        suffix: the end of its name.

    Raises:
        OSError: from every method, when the system refuses; that of an event that was under way comes out of the next.
    """

    def __init__(self, folder: str, suffix: str = "") -> None:
        self._folder = folder
        self._suffix = suffix
        self._lock = threading.RLock()
        self._thread: ThreadPoolExecutor | None = None
        self._in_line: deque[Future[None]] = deque()
        self.reopen()

    def get_logdir(self) -> str:
        """The folder."""
        return self._folder

    def reopen(self) -> None:
        """Go on in a new file."""
        os.makedirs(self._folder, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_uid)}"
        # Unbuffered: an event that was added survives whatever happens to the process.
        self._file = open(os.path.join(self._folder, name + self._suffix), "wb", buffering=0)  # noqa: SIM115
        self._records = RecordWriter(_Whole(self._file))
        self.add_event(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add_event(self, event: Any) -> None:
        """Write ``event``, an ``Event`` of tensorboard's."""
        data = event.SerializeToString()
        with self._lock:
            if self._in_line:
                self._settle(wait=False)
            if len(data) <= _LARGE and not self._in_line:
                self._records.write(data)
            else:
                self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="torchhooks-events")
                self._in_line.append(self._thread.submit(self._records.write, data))

    def flush(self) -> None:
        """Wait for what is under way."""
        with self._lock:
            self._settle(wait=True)

    def close(self) -> None:
        """Wait for what is under way and close the file. Again is harmless."""
        with self._lock:
            try:
                self._settle(wait=True)
            finally:
                if self._thread is not None:
                    self._thread.shutdown()
                    self._thread = None
                self._file.close()

    def _settle(self, wait: bool) -> None:
        while self._in_line and (wait or self._in_line[0].done()):
            self._in_line.popleft().result()


class _Whole:
    """Writes all of what it is given: an unbuffered file may take a part, as on a disk that is nearly full."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        written = self._file.write(data)
        while written < len(data):
            data = data[written:]
            written = self._file.write(data)


class _DirectFileWriter(FileWriter):
    def __init__(self, folder: str, suffix: str) -> None:
        # Not the base class's, which opens a file with a thread of its own.
        self.event_writer = EventFile(folder, suffix)


class DirectSummaryWriter(SummaryWriter):
    """torch's SummaryWriter on an :class:`EventFile`."""

    file_writer: Any
    all_writers: Any

    takes_walltime = True
    """That ``add_scalar`` and its like take the wall time of the event, in seconds."""

    def add_scalar(self, tag: str, scalar_value: Any, *args: Any, **kwargs: Any) -> None:
        """As torch's; a number takes the short way."""
        if type(scalar_value) is float and not (kwargs.keys() - {"walltime"}) and len(args) == 1:
            value = summary_pb2.Summary.Value(tag=tag, simple_value=scalar_value)
            event = event_pb2.Event(summary=summary_pb2.Summary(value=[value]))
            self._get_file_writer().add_event(event, args[0], **kwargs)
        else:
            super().add_scalar(tag, scalar_value, *args, **kwargs)

    def add_points(self, points: Iterable[tuple[str, float]], step: int, walltime: float | None = None) -> None:
        """Write a point of each of several curves, by tag, as one event."""
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=float(value)) for tag, value in points]
        event = event_pb2.Event(summary=summary_pb2.Summary(value=values))
        self._get_file_writer().add_event(event, step, walltime)

    def add_session_log(self, session_log: Any, global_step: int | None = None) -> None:
        """Write a ``SessionLog`` of tensorboard's (``tf.summary.FileWriter.add_session_log``)."""
        self._get_file_writer().add_event(event_pb2.Event(session_log=session_log), global_step)

    def close(self) -> None:
        """Write what is under way and close the file, also if that raises. Again is harmless."""
        if self.all_writers is not None:
            writer, self.file_writer, self.all_writers = self.file_writer, None, None
            writer.close()

    def _get_file_writer(self) -> Any:
        if self.all_writers is None or self.file_writer is None:
            self.file_writer = _DirectFileWriter(str(self.log_dir), self.filename_suffix)
            self.all_writers = {self.file_writer.get_logdir(): self.file_writer}
        return self.file_writer
