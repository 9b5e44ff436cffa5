"""The writers that hooks write to, and the START of a session, which hooks with the same writer share."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torchhooks.common.attempts import Attempts
from torchhooks.common.checks import folder
from torchhooks.common.text import shown
from torchhooks.summary.operations import SummaryWriterCache, add_session_log, shared_name, write_config

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class WriterTarget:
    """Where one hook writes: to the ``summary_writer`` that it was given, which may be a list, or to ``output_dir``.

    Args:
        output_dir: the folder of an event file.
        summary_writer: a writer, or a list or tuple of several.
        starts_session: whether the hook writes the session's START.

    Raises:
        ValueError: both places are given, or an empty list.
        TypeError: ``output_dir`` is not a path.
    """

    def __init__(self, output_dir: Any, summary_writer: Any, *, starts_session: bool = False) -> None:
        if output_dir is not None:
            folder(output_dir, "output_dir")
        if output_dir is not None and summary_writer is not None:
            raise ValueError(f"output_dir={output_dir!r}, summary_writer={summary_writer!r}: give one, not both")
        if isinstance(summary_writer, (str, bytes, os.PathLike)):
            raise TypeError(
                f"summary_writer={shown(summary_writer)}: must be a writer, such as JsonLinesWriter(...): for the "
                "folder of an event file, give output_dir="
            )
        self._is_several = isinstance(summary_writer, (list, tuple))
        if self._is_several and not summary_writer:
            raise ValueError(f"summary_writer={summary_writer!r}: give at least one writer, or None")
        given = summary_writer if self._is_several else [summary_writer]
        self._parts = [_OneWriter(output_dir, one, starts_session=starts_session) for one in given]
        self.writer: Any = None
        """The writer, or a tuple of several, from :meth:`open` to :meth:`close`; ``None`` if there is nowhere to write.

        The functions of :mod:`torchhooks.summary` take either.
        """

    def open(self) -> Any:
        """Open the writers, and return :attr:`writer`."""
        writers = tuple(part.open() for part in self._parts)
        self.writer = writers if self._is_several else writers[0]
        return self.writer

    def close(self) -> None:
        """Flush the writers, even if one fails. Close the writer of an ``output_dir`` if no other target has it."""
        self.writer = None
        attempt = Attempts()
        for part in self._parts:
            attempt(part.close)
        attempt.raise_errors("several writers could not be closed")

    def claim(self, tags: Iterable[str], hook: object) -> dict[str, object]:
        """Record that ``hook`` writes ``tags``; return the tags that another hook writes there, and that hook."""
        tags = tuple(tags)
        return {tag: other for part in self._parts for tag, other in part.claim(tags, hook).items()}

    def session_created(self, step: int, last_written: int | None, metadata: Mapping[str, Any] = _NO_METADATA) -> bool:
        """Record that the loop has a session, at ``step``. After a recovery, have the writers purge repeated points.

        The writers get the ``metadata`` of the first session of the loop, if there is any.

        Returns whether the point of ``last_written``, the last step that the hook wrote, was removed by any of them, so
        that the hook has to write again from ``step`` on.
        """
        # A list, not a generator: every writer has to purge.
        removed = [part.session_created(step, last_written, metadata) for part in self._parts]
        return any(removed)

    def start_session(self, begun_at: int, step: int) -> None:
        """Write the session's START once, in the first run, which took the session from ``begun_at`` to ``step``."""
        for part in self._parts:
            part.start_session(begun_at, step)

    @property
    def start_is_written(self) -> bool:
        """Whether the session's START is written at each place."""
        return all(part.start_is_written for part in self._parts)

    def start_session_alone(self, begun_at: int, step: int) -> None:
        """Write a START for a hook that has none of its own, in the first run, unless another hook there does."""
        for part in self._parts:
            part.start_session_alone(begun_at, step)

    def session_started_by_another(self) -> bool:
        """Return whether another hook writes the session's START, at each place of this one."""
        return all(part.session_started_by_another() for part in self._parts)

    @classmethod
    def flush_all(cls) -> None:
        """Flush every open writer. Before a checkpoint, because a restored run does not write earlier points again."""
        _OneWriter.flush_all()


class _OneWriter:
    """One writer of a hook: the given one, or the one cached for ``output_dir``.

    Targets are at the same place if their writers have the same ``log_dir``, or are the same object. The loops of
    several threads, and a loop that runs within another one, may have targets at the same place: they write to one
    file, which is closed with the last of them. A loop that starts while another one has a session writes no START to
    event files, because that would void the points of the other loop.
    """

    _lock = threading.Lock()
    _start_lock = threading.RLock()  # reentrant, because the writer of a user may run a loop; taken before _lock
    _all_open: ClassVar[weakref.WeakSet[_OneWriter]] = weakref.WeakSet()

    def __init__(self, output_dir: Any, summary_writer: Any, *, starts_session: bool) -> None:
        # Resolved once: os.chdir or a changed link must not make close() look for another writer than open() created.
        self._folder = None if output_dir is None else shared_name(output_dir)
        self._given = summary_writer
        self._has_session = False
        self._is_within_another = False
        self.starts_session = starts_session
        """Whether the hook writes the session's START."""
        self.start_is_written = self.config_is_written = False
        self.tags: dict[str, object] = {}
        """The tags that are known to be written, and the hook that writes them."""
        self.writer: Any = None
        """The writer, from :meth:`open` to :meth:`close`; ``None`` if the hook has nowhere to write."""
        self.place: object = None
        """Where it writes, found out once, because that reads links from the disk."""

    def open(self) -> Any:
        """Open the writer, and return it."""
        self._has_session = self.start_is_written = self.config_is_written = False
        self.tags = {}
        with self._lock:  # so that no other target closes the writer before this one is known
            self.writer = self._given if self._folder is None else SummaryWriterCache.get(self._folder)
            self.place = _place(self.writer)
            # Targets of one loop are all opened before it has a session. A target that has one is of another loop.
            self._is_within_another = any(target._has_session for target in self._others_at_this_place())  # noqa: SLF001 - its own class
            self._all_open.add(self)
        if hasattr(self.writer, "start_run"):  # of a tracker: better now than in the first run, because it takes time
            self.writer.start_run()
        return self.writer

    def close(self) -> None:
        """Flush the writer. Close it too if no other target has it, unless it was given to the hook."""
        with self._lock:
            writer, self.writer = self.writer, None
            self._all_open.discard(self)
            is_shared = any(target.writer is writer for target in self._all_open)
            if self._folder is not None and not is_shared:
                SummaryWriterCache.close(self._folder)
                return
        if writer is not None:
            writer.flush()

    def claim(self, tags: tuple[str, ...], hook: object) -> dict[str, object]:
        if self.writer is None:
            return {}
        with self._lock:
            others = self._others_at_this_place()
            taken = {tag: other.tags[tag] for other in others for tag in tags if tag in other.tags}
            self.tags.update((tag, hook) for tag in tags if tag not in taken)
        return taken

    def session_created(self, step: int, last_written: int | None, metadata: Mapping[str, Any]) -> bool:
        recovered, self._has_session = self._has_session, True
        if metadata and not recovered and self.writer is not None:
            with self._lock:
                is_written = any(target.config_is_written for target in self._others_at_this_place())
                self.config_is_written = True
            if not is_written:
                write_config(self.writer, metadata)
        if not recovered or not self._can_purge():
            return False
        self.writer.purge_from(step + 1)
        return last_written is not None and last_written > step

    def start_session(self, begun_at: int, step: int) -> None:
        """Write the session's START once.

        A START makes TensorBoard discard the points of its step and later ones that it has already read. So the first
        hook at a place writes the START of every hook there: a later hook's START would void the first hook's point.
        """
        if not self.starts_session or self.start_is_written:
            return
        with self._start_lock:  # a loop of another thread must not write a point until its START is written here
            if self.start_is_written:
                return
            with self._lock:
                others = [] if self._is_within_another and not self._can_purge() else self._others_at_this_place()
            for target in (self, *others):
                if target.starts_session and not target.start_is_written:
                    self._write_start(begun_at, step)
                    target.start_is_written = True

    def start_session_alone(self, begun_at: int, step: int) -> None:
        """Write a START, unless another hook at the place does.

        A writer that can purge is told in any session. In event files, only a session that continues from a later step
        than 0 has this START: TensorFlow does not write it.
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
        with self._lock:
            return any(target.starts_session for target in self._others_at_this_place())

    @classmethod
    def flush_all(cls) -> None:
        """Flush every open writer."""
        with cls._lock:
            targets = list(cls._all_open)
        for target in targets:
            writer = target.writer  # read once, because the loop of another thread may close the target
            if writer is not None:
                writer.flush()

    def _write_start(self, begun_at: int, step: int) -> None:
        # With the first step that the session makes. Unlike TensorFlow's, which has the step after the first run, it
        # voids exactly the points that are written again, even if the first run makes no step or several.
        if self._can_purge():
            self.writer.purge_from(begun_at + 1 if begun_at else 0)
        elif self.writer is not None and not self._is_within_another:
            add_session_log(self.writer, "START", begun_at + 1 if begun_at else min(step, 1))

    def _can_purge(self) -> bool:
        return callable(getattr(self.writer, "purge_from", None))

    def _others_at_this_place(self) -> list[_OneWriter]:
        """Return the other open targets at the place of this one. The caller holds the lock."""
        return [target for target in self._all_open if target is not self and target.place == self.place]


def _place(writer: Any) -> object:
    folder = getattr(writer, "log_dir", None)
    return id(writer) if folder is None else shared_name(folder)
