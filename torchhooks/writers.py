"""Which writer a hook writes to."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, ClassVar

from torchhooks.summary import SummaryWriterCache, add_session_log


class WriterTarget:
    """Where one hook writes: to the writer it was given, or to that of a folder, opened when the hook begins.

    Args:
        output_dir: the folder; its writer comes from the cache and is closed with the loop.
        summary_writer: the writer; it is flushed with the loop and stays open.
        starts_session: whether the hook writes the session's START there.

    Raises:
        ValueError: both were given.
    """

    _lock = threading.Lock()
    _all_open: ClassVar[weakref.WeakSet[WriterTarget]] = weakref.WeakSet()

    def __init__(self, output_dir: Any, summary_writer: Any, *, starts_session: bool = False) -> None:
        if output_dir is not None and summary_writer is not None:
            raise ValueError(f"output_dir={output_dir!r}, summary_writer={summary_writer!r}: give one, not both")
        self._output_dir = output_dir
        self._given = summary_writer
        self._starts_session = starts_session
        self._started = False
        self.writer: Any = None
        """The writer, from :meth:`open` to :meth:`close`; ``None`` if there is nowhere to write to."""

    def open(self) -> Any:
        """Get the writer, and return it."""
        self.writer = self._given
        self._started = False
        if self._output_dir is not None:
            self.writer = SummaryWriterCache.get(self._output_dir)
        with self._lock:
            self._all_open.add(self)
        return self.writer

    def close(self) -> None:
        """Flush the writer, and close it if it was opened here."""
        writer, self.writer = self.writer, None
        with self._lock:
            self._all_open.discard(self)
        if self._output_dir is not None:
            SummaryWriterCache.close(self._output_dir)
        elif writer is not None:
            writer.flush()

    def start_session(self, step: int) -> None:
        """Write the session's START, as that of ``step``, unless that was done.

        That of every hook which writes one to the same place goes with it: a START makes TensorBoard forget what it has
        read of its step and beyond, so the second hook's must not come after the first one's summaries.
        """
        if self._starts_session and not self._started:
            for target in self._at_this_place():
                if target._starts_session and not target._started:
                    target._started = True
                    self.add_start(step)

    def add_start(self, step: int) -> None:
        """Write one START, if there is a writer."""
        if self.writer is not None:
            add_session_log(self.writer, "START", step)

    def session_started_by_another(self) -> bool:
        """Whether another hook writes the session's START to the same place."""
        return any(target._starts_session for target in self._at_this_place() if target is not self)

    def _at_this_place(self) -> list[WriterTarget]:
        with self._lock:
            targets = list(self._all_open)
        return [target for target in targets if _place(target.writer) == _place(self.writer)]


def _place(writer: Any) -> object:
    folder = getattr(writer, "log_dir", None)
    return id(writer) if folder is None else os.path.abspath(folder)
