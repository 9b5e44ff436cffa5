"""TensorBoard's summary writer with event files that are written immediately.

torch's SummaryWriter hands every event to a background thread. Waking that thread takes several times as long as
writing a small event, and the events in its queue are lost when the process is killed. Here, a small event is in the
file when ``add_scalar`` returns. A large event still goes to a background thread, because Python takes a while to
compute its checksum; events that follow it are queued, so that the file keeps their order.

This module needs tensorboard at import time. Import it only when an event file is about to be opened.
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
"""Bytes; computing the checksum of this many takes about as long as waking a thread."""

_file_numbers = itertools.count()


class EventFile:
    """One event file, with the methods of tensorboard's ``EventFileWriter``. They may be called from any thread.

    Its name is unique in ``folder`` and ends in ``suffix``. Any method may raise an OSError: that of a queued event is
    raised by a later call, at the latest by :meth:`close`.
    """

    def __init__(self, folder: str, suffix: str = "") -> None:
        self._folder = folder
        self._suffix = suffix
        self._lock = threading.RLock()
        self._thread: ThreadPoolExecutor | None = None
        self._queued: deque[Future[None]] = deque()
        self.reopen()

    def get_logdir(self) -> str:
        return self._folder

    def reopen(self) -> None:
        """Continue in a new file."""
        os.makedirs(self._folder, exist_ok=True)
        unique = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        path = os.path.join(self._folder, f"events.out.tfevents.{unique}{self._suffix}")
        # Unbuffered, so that an event that was added survives a kill.
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._records = RecordWriter(_CompleteWrites(self._file))
        self.add_event(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add_event(self, event: Any) -> None:
        """Write ``event``, a tensorboard ``Event``, or queue it if it is large or follows one that is queued."""
        data = event.SerializeToString()
        with self._lock:
            if self._queued:
                self._finish_queued(wait=False)
            if len(data) <= _LARGE and not self._queued:
                self._records.write(data)
            else:
                self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="torchhooks-events")
                self._queued.append(self._thread.submit(self._records.write, data))

    def flush(self) -> None:
        """Wait until all queued events are written."""
        with self._lock:
            self._finish_queued(wait=True)

    def close(self) -> None:
        """Wait until all queued events are written, and close the file. Closing twice is harmless."""
        with self._lock:
            try:
                self._finish_queued(wait=True)
            finally:
                if self._thread is not None:
                    self._thread.shutdown()
                    self._thread = None
                self._file.close()

    def _finish_queued(self, wait: bool) -> None:
        """Remove written events from the queue, or wait for all of them. Raise the first error among them."""
        while self._queued and (wait or self._queued[0].done()):
            self._queued.popleft().result()


class _CompleteWrites:
    """A file whose ``write`` writes all the data; an unbuffered file on a nearly full disk may write only a part."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data) :]


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
            value = summary_pb2.Summary.Value(tag=tag, simple_value=scalar_value)
            event = event_pb2.Event(summary=summary_pb2.Summary(value=[value]))
            self._get_file_writer().add_event(event, args[0], **kwargs)
        else:
            super().add_scalar(tag, scalar_value, *args, **kwargs)

    def add_points(self, points: Iterable[tuple[str, float]], step: int, walltime: float | None = None) -> None:
        """Write a point of each of several curves, given as (tag, value), as one event."""
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=float(value)) for tag, value in points]
        event = event_pb2.Event(summary=summary_pb2.Summary(value=values))
        self._get_file_writer().add_event(event, step, walltime)

    def add_session_log(self, session_log: Any, global_step: int | None = None) -> None:
        """Write a tensorboard ``SessionLog`` (``tf.summary.FileWriter.add_session_log``)."""
        self._get_file_writer().add_event(event_pb2.Event(session_log=session_log), global_step)

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
