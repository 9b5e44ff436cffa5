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
        self._created = False
        self._within = False
        self.writer: Any = None
        """The writer, from :meth:`open` to :meth:`close`; ``None`` if there is nowhere to write to."""

    def open(self) -> Any:
        """Get the writer, and return it."""
        self.writer = self._given
        self._started = False
        self._created = False
        if self._output_dir is not None:
            self.writer = SummaryWriterCache.get(self._output_dir)
        # All of a loop are opened before its session is created: one that has a session is of a loop around this one.
        self._within = self._takes_back() and any(target._created for target in self._at_this_place())
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

    def session_created(self, step: int, last_written: int | None) -> bool:
        """Take note that there is a session; if it is one after a recovery, a writer that can takes points back.

        Not in a loop within another one that writes to the same place: the other's points would go too.

        Args:
            step: what the session has reached.
            last_written: the step of the hook's last point, if there is one.

        Returns:
            Whether that point was taken back, so that the hook has to write again from here on.
        """
        recovered, self._created = self._created, True
        if not recovered or not self._takes_back() or self._within:
            return False
        self.writer.purge_from(step + 1)
        return last_written is not None and last_written > step

    def start_session(self, begun_at: int, step: int) -> None:
        """Write the session's START, in the first run, which brought it from ``begun_at`` to ``step``; but only once.

        That of every hook which writes one to the same place goes with it: a START makes TensorBoard forget what it has
        read of its step and beyond, so the second hook's must not come after the first one's summaries.
        """
        if self._starts_session and not self._started:
            for target in self._of_this_loop():
                if target._starts_session and not target._started:
                    target._started = True
                    self.add_start(begun_at, step)

    def start_session_alone(self, begun_at: int, step: int) -> None:
        """As :meth:`start_session`, where nobody else does: after a restore, and if the writer takes points back."""
        if not self.session_started_by_another():
            # Twice: TensorBoard's server takes the first START in a folder for the beginning, and forgets nothing.
            for _ in range(2 if begun_at else 1 if self._takes_back() else 0):
                self.add_start(begun_at, step)

    def add_start(self, begun_at: int, step: int) -> None:
        """Write one START, if there is a writer: at the first step that is made, however many the first run makes.

        A writer that can takes points back instead; but not in a loop within another one that writes there.
        """
        if self._takes_back():
            if not self._within:
                self.writer.purge_from(begun_at + 1 if begun_at else 0)
        elif self.writer is not None:
            add_session_log(self.writer, "START", begun_at + 1 if begun_at else min(step, 1))

    @classmethod
    def flush_all(cls) -> None:
        """Have every writer that is in use put what it has where it survives a kill, before a checkpoint is saved."""
        with cls._lock:
            targets = list(cls._all_open)
        for target in targets:
            if target.writer is not None:
                target.writer.flush()

    def session_started_by_another(self) -> bool:
        """Whether another hook writes the session's START to the same place."""
        return any(target._starts_session for target in self._of_this_loop() if target is not self)

    def _takes_back(self) -> bool:
        return callable(getattr(self.writer, "purge_from", None))

    def _of_this_loop(self) -> list[WriterTarget]:
        """Those at this place without the ones of a loop around this one, or within it."""
        return [target for target in self._at_this_place() if target._within == self._within]

    def _at_this_place(self) -> list[WriterTarget]:
        with self._lock:
            targets = list(self._all_open)
        return [target for target in targets if _place(target.writer) == _place(self.writer)]


def _place(writer: Any) -> object:
    folder = getattr(writer, "log_dir", None)
    return id(writer) if folder is None else os.path.abspath(folder)
