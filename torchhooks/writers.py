"""The writers that hooks write to, and the START of a session, which hooks with the same writer share."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, ClassVar

from torchhooks.summary import SummaryWriterCache, add_session_log, resolved


class WriterTarget:
    """The writer of one hook: the ``summary_writer`` that it was given, or the one that is cached for ``output_dir``.

    Targets are at the same place if their writers have the same ``log_dir``, or are the same object.
    """

    _lock = threading.Lock()
    _all_open: ClassVar[weakref.WeakSet[WriterTarget]] = weakref.WeakSet()

    def __init__(self, output_dir: Any, summary_writer: Any, *, starts_session: bool = False) -> None:
        if output_dir is not None and summary_writer is not None:
            raise ValueError(f"output_dir={output_dir!r}, summary_writer={summary_writer!r}: give one, not both")
        # Resolved now, because a script may change the current directory before the writer is opened or closed.
        self._output_dir = None if output_dir is None else resolved(output_dir)
        self._given = summary_writer
        self._had_session = False
        self.starts_session = starts_session
        """Whether the hook writes the session's START."""
        self.start_is_written = False
        self.writer: Any = None
        """The writer, from :meth:`open` to :meth:`close`; ``None`` if the hook has nowhere to write."""

    def open(self) -> Any:
        """Open the writer, and return it."""
        self._had_session = self.start_is_written = False
        self.writer = self._given if self._output_dir is None else SummaryWriterCache.get(self._output_dir)
        with self._lock:
            self._all_open.add(self)
        return self.writer

    def close(self) -> None:
        """Flush the writer, and close it unless it was given to the hook."""
        writer, self.writer = self.writer, None
        with self._lock:
            self._all_open.discard(self)
        if self._output_dir is not None:
            SummaryWriterCache.close(self._output_dir)
        elif writer is not None:
            writer.flush()

    def session_created(self, step: int, last_written: int | None) -> bool:
        """Record that the loop has a session, at ``step``. After a recovery, have the writer purge repeated points.

        Returns whether the point of ``last_written``, the last step that the hook wrote, was removed, so that the hook
        has to write again from ``step`` on.
        """
        recovered, self._had_session = self._had_session, True
        if not recovered or not self._can_purge():
            return False
        self.writer.purge_from(step + 1)
        return last_written is not None and last_written > step

    def start_session(self, begun_at: int, step: int) -> None:
        """Write the session's START once, in the first run, which took the session from ``begun_at`` to ``step``.

        A START makes TensorBoard discard the points of its step and later ones that it has already read. So the first
        hook at a place writes the START of every hook there: that of a later hook would void the first hook's point.
        """
        if self.starts_session and not self.start_is_written:
            for target in self._all_at_this_place():
                if target.starts_session and not target.start_is_written:
                    target.start_is_written = True
                    self._write_start(begun_at, step)

    def start_session_alone(self, begun_at: int, step: int) -> None:
        """Write a START for a hook that has none of its own, in the first run, unless another hook at the place does.

        A writer that can purge is told in any session. In event files, only one that continues from a later step than 0
        has this START: TensorFlow does not write it.
        """
        if self.session_started_by_another():
            return
        if self._can_purge():
            self._write_start(begun_at, step)
        elif begun_at:
            # TensorBoard's server takes the first START in a folder for the beginning, and discards nothing.
            self._write_start(begun_at, step)
            self._write_start(begun_at, step)

    def session_started_by_another(self) -> bool:
        """Return whether another hook writes the session's START at this place."""
        return any(target.starts_session for target in self._all_at_this_place() if target is not self)

    @classmethod
    def flush_all(cls) -> None:
        """Flush every open writer. Before a checkpoint, because a restored run does not write earlier points again."""
        with cls._lock:
            targets = list(cls._all_open)
        for target in targets:
            if target.writer is not None:
                target.writer.flush()

    def _write_start(self, begun_at: int, step: int) -> None:
        # With the first step that the session makes. Unlike TensorFlow's, which has the step after the first run, it
        # voids exactly the points that are written again, even if the first run makes no step or several.
        if self._can_purge():
            self.writer.purge_from(begun_at + 1 if begun_at else 0)
        elif self.writer is not None:
            add_session_log(self.writer, "START", begun_at + 1 if begun_at else min(step, 1))

    def _can_purge(self) -> bool:
        return callable(getattr(self.writer, "purge_from", None))

    def _all_at_this_place(self) -> list[WriterTarget]:
        with self._lock:
            targets = list(self._all_open)
        return [target for target in targets if _place(target.writer) == _place(self.writer)]


def _place(writer: Any) -> object:
    folder = getattr(writer, "log_dir", None)
    return id(writer) if folder is None else os.path.abspath(folder)
