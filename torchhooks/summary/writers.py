"""Writers: what one may have, TensorBoard's one for each folder, and where a hook writes.

All hooks that write to one place share its writer, and the START of a session.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from torchhooks.common.checks import folder
from torchhooks.common.errors import Attempts
from torchhooks.common.files import place
from torchhooks.common.text import shown
from torchhooks.progress.training_state import TrainingState

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter as TensorBoardWriter

_Path = str | os.PathLike[str]


class SummaryWriter:
    """Base class of writers of curves: all that hooks ask of one. Pass writers to hooks as ``summary_writer``.

    >>> class Printer(SummaryWriter):
    ...     def add_scalar(self, tag, value, step):
    ...         print(step, tag, value)
    >>> hook = SummarySaverHook(save_steps=4, summary_writer=Printer(), summary_op={"rate": "lr"})
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    1 rate 0.1
    5 rate 0.1

    Hooks also take a writer that does not derive from this class: ``torch.utils.tensorboard.SummaryWriter``, or any
    object with ``add_scalar`` and ``flush``. Of such an object, they also call ``add_histogram``, ``add_image``,
    ``add_text``, ``add_figure`` and ``purge_from``, if it has them.
    """

    log_dir: str | os.PathLike[str] | None = None
    """The place that is written to. Two writers with one place share the beginning of a session."""

    def add_scalar(self, tag: str, value: float, step: int) -> object:
        """Write one point of the curve ``tag``. Every writer overrides this."""
        raise TypeError(f"{type(self).__name__} has no add_scalar(tag, value, step): override it")

    def flush(self) -> object:
        """Make everything written so far survive a crash of the process. Hooks call it before each checkpoint."""

    def close(self) -> object:
        """Release what the writer has opened. Hooks never close a writer that they were given."""

    def add_points(self, points: Iterable[tuple[str, float]], step: int, walltime: float | None = None) -> None:
        """Write a point of each of several curves, as pairs (tag, value). Hooks write all scalars through this.

        Args:
            points: the pairs. By default, :meth:`add_scalar` is called with each.
            step: the global step.
            walltime: the time of the points in seconds since 1970; by default, now.
        """
        for tag, value in points:
            self.add_scalar(tag, value, step)

    # What a writer cannot write unless it overrides the method. Hooks find out by writes(), before the first run.

    def add_histogram(self, tag: str, values: np.ndarray, step: int) -> object:
        """Write the distribution of the elements of ``values``, a flat float64 array."""

    def add_histogram_raw(self, tag: str, *raw: Any) -> object:
        """Write a distribution that is counted already. ``raw`` are the further arguments of torch's method, and step.

        A writer that overrides this, and no subclass of it :meth:`add_histogram` alone, never gets the elements: only
        the counts of their bins are copied from a device.
        """

    def add_image(self, tag: str, image: np.ndarray, step: int) -> object:
        """Write an image: a ``uint8`` array of shape (channels, height, width)."""

    def add_text(self, tag: str, text: str, step: int) -> object:
        """Write a text."""

    def add_figure(self, tag: str, figure: object, step: int) -> object:
        """Write a matplotlib figure."""

    # What hooks tell every writer. The defaults do nothing.

    def start_run(self) -> object:
        """Begin: a loop opens the writer. A tracker starts its run here, because that takes time."""

    def add_config(self, config: Mapping[str, object]) -> object:
        """Write what describes the training run as a whole, the ``metadata`` of its loop."""

    def purge_from(self, step: int) -> object:
        """Remove the points of ``step`` and later, which a resumed training run repeats. Called in its first run."""

    def add_session_log(
        self, status: Literal["START", "CHECKPOINT"], step: int, checkpoint_path: _Path | None = None
    ) -> object:
        """Note that a session starts with ``step`` or was saved at ``step``, as in the event files of TensorFlow.

        On a START, TensorBoard discards what it has read for ``step`` and later, so it precedes the points of that
        step.
        """

    # How hooks find out what a writer takes, and write all but scalars. An adapter overrides these.

    def writes(self, kind: str) -> bool:
        """Return whether the writer has its own ``add_<kind>``, such as ``add_histogram`` or ``add_image``."""
        return getattr(type(self), f"add_{kind}") is not getattr(SummaryWriter, f"add_{kind}")

    def why_not(self, kind: str, wanted_by: object) -> str:
        """Return the message of the error that ``wanted_by`` needs what the writer does not write."""
        return _message(self, f"add_{kind}", wanted_by)

    @property
    def takes_counts(self) -> bool:
        """Whether the writer wants histograms as counts of bins, so that it needs no elements."""
        return overrides_first(self, "add_histogram_raw", "add_histogram")

    def write(self, kind: str, tag: str, value: Iterable[object], step: int, walltime: float | None) -> None:
        """Write a summary other than a scalar: call ``add_<kind>(tag, *value, step)``."""
        getattr(self, f"add_{kind}")(tag, *value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()


class ForeignWriter(SummaryWriter):
    """A writer that does not derive from SummaryWriter. Only this class looks for the methods of one by their names."""

    def __init__(self, writer: object) -> None:
        for name in ("add_scalar", "flush"):
            if not callable(getattr(writer, name, None)):
                raise TypeError(_message(writer, name, "every hook that writes"))
        self.writer: Any = writer
        self.log_dir = getattr(writer, "log_dir", None)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.writer.add_scalar(tag, value, step)

    def flush(self) -> None:
        self.writer.flush()

    def purge_from(self, step: int) -> None:
        if callable(getattr(self.writer, "purge_from", None)):
            self.writer.purge_from(step)

    def writes(self, kind: str) -> bool:
        return callable(getattr(self.writer, f"add_{kind}", None))

    def why_not(self, kind: str, wanted_by: object) -> str:
        return _message(self.writer, f"add_{kind}", wanted_by)

    @property
    def takes_counts(self) -> bool:
        return overrides_first(self.writer, "add_histogram_raw", "add_histogram")

    def write(self, kind: str, tag: str, value: Iterable[object], step: int, walltime: float | None) -> None:
        getattr(self.writer, f"add_{kind}")(tag, *value, step)


def _message(writer: object, method: str, wanted_by: object) -> str:
    needs = f"summary writer {type(writer).__name__} has no {method}(), which {wanted_by} needs"
    return f"{needs}; add one with TensorBoard's signature, or give torch.utils.tensorboard.SummaryWriter"


def overrides_first(writer: object, method: str, other: str) -> bool:
    """Return whether ``writer``, or the first of its classes that has one of two methods, has ``method``."""
    # A subclass of torch's writer may override add_histogram alone, and wants to be called then.
    for names in (getattr(writer, "__dict__", {}), *map(vars, type(writer).__mro__)):
        if method in names or other in names:
            return method in names
    return False


def as_writer(writer: object) -> SummaryWriter:
    """Return ``writer`` if it derives from SummaryWriter, and otherwise an adapter for it.

    Raises:
        TypeError: ``writer`` has no ``add_scalar``, or no ``flush``.
    """
    if isinstance(writer, SummaryWriter):
        return writer
    # Not imported here: if the module is not loaded, the writer cannot be torch's.
    torchs = getattr(sys.modules.get("torch.utils.tensorboard.writer"), "SummaryWriter", ())
    if isinstance(writer, torchs):
        adapted: SummaryWriter = _import_tensorboard("torchhooks.summary.tensorboard").TorchWriter(writer)
        return adapted
    return ForeignWriter(writer)


class SummaryWriterCache:
    """One TensorBoard writer per directory, shared by all hooks that write there (``tf.summary.FileWriterCache``).

    >>> writer = SummaryWriterCache.get("runs/1")
    >>> writer.add_scalar("accuracy", 0.9, 100)
    >>> writer is SummaryWriterCache.get("runs/1/")
    True
    >>> SummaryWriterCache.close("runs/1")
    """

    _lock = threading.RLock()  # reentrant, because clear() calls close()
    _open: ClassVar[dict[str, TensorBoardWriter]] = {}
    # A closed writer that is still referenced can be written to, and torch then opens a new file for it. The next close
    # of the directory has to close that file as well.
    _handed_out: ClassVar[weakref.WeakKeyDictionary[TensorBoardWriter, str]] = weakref.WeakKeyDictionary()

    @classmethod
    def get(cls, logdir: _Path) -> TensorBoardWriter:
        """Return the writer of ``logdir``, created at first use.

        All names of a directory are the same: ``"a"``, ``"a/"``, ``Path("a")``, its absolute path, a symbolic link.
        """
        key = shared_name(logdir)
        with cls._lock:
            if key not in cls._open:
                cls._open[key] = writer = _new_writer(key)
                cls._handed_out[writer] = key
            return cls._open[key]

    @classmethod
    def close(cls, logdir: _Path) -> None:
        """Flush, close and forget the writers of ``logdir``. Does nothing if there is none."""
        key = shared_name(logdir)
        with cls._lock, ExitStack() as closing:  # the stack closes all of them, even if closing one fails
            for writer, directory in cls._handed_out.items():
                if directory == key:
                    closing.callback(writer.close)
            cls._open.pop(key, None)  # after the loop, because this may be the only reference to the writer

    @classmethod
    def clear(cls) -> None:
        """Flush, close and forget all writers."""
        with cls._lock, ExitStack() as closing:
            for directory in set(cls._handed_out.values()):
                closing.callback(cls.close, directory)


def shared_name(logdir: _Path) -> str:
    """Return the one name that all names of the directory ``logdir`` stand for; ``gs://...`` stays as it is."""
    path = place(os.fsdecode(logdir))
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def _new_writer(folder: str) -> TensorBoardWriter:
    if "://" in folder:  # a remote store, such as gs://, which TensorBoard's own writer supports
        return _import_tensorboard("torch.utils.tensorboard").SummaryWriter(folder)  # type: ignore[no-any-return]
    return _import_tensorboard("torchhooks.summary.tensorboard").DirectSummaryWriter(folder)  # type: ignore[no-any-return]


def _import_tensorboard(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        way_out = "pip install tensorboard, or give a summary_writer of your own"
        raise ImportError(f"event files need tensorboard, which cannot be imported: {way_out}") from error


# -- where a hook writes -----------------------------------------------------------------------------------------------


class WriterTarget:
    """Where one hook writes: to the ``summary_writer`` that it was given, which may be a list, or to ``output_dir``.

    Args:
        output_dir: the folder of an event file.
        summary_writer: a writer, or a list or tuple of several.
        starts_session: whether every session has a START in event files, and not only a resumed one.

    Raises:
        ValueError: both places are given, or an empty list.
        TypeError: ``output_dir`` is not a path.
    """

    def __init__(self, output_dir: object, summary_writer: object, *, starts_session: bool = False) -> None:
        if output_dir is not None:
            folder(output_dir, "output_dir")
        if output_dir is not None and summary_writer is not None:
            raise ValueError(f"output_dir={output_dir!r}, summary_writer={summary_writer!r}: give one, not both")
        if isinstance(summary_writer, (str, bytes, os.PathLike)):
            raise TypeError(
                f"summary_writer={shown(summary_writer)}: must be a writer, such as JsonLinesWriter(...): for the "
                "folder of an event file, give output_dir="
            )
        if isinstance(summary_writer, (list, tuple)) and not summary_writer:
            raise ValueError(f"summary_writer={summary_writer!r}: give at least one writer, or None")
        # Resolved once: os.chdir or a changed link must not make close() look for another writer than open() created.
        self._folder = None if output_dir is None else shared_name(output_dir)  # type: ignore[arg-type]  # checked above
        given = summary_writer if isinstance(summary_writer, (list, tuple)) else [summary_writer]
        self._given = [one for one in given if one is not None]
        self.starts_session = starts_session
        self.writers: tuple[SummaryWriter, ...] = ()
        """The writers, from :meth:`open` to :meth:`close`; empty if there is nowhere to write."""
        self.is_started = True
        """Whether this hook has no START left to write."""
        self._places: list[_Place] = []  # of the writers

    def open(self) -> tuple[SummaryWriter, ...]:
        """Open the writers, and return them."""
        self.writers, self._places = (), []
        for one in self._given if self._folder is None else (None,):
            self._open(one)
        self.is_started = not self.writers
        return self.writers

    def _open(self, given: object) -> None:
        with _lock:  # so that no other hook closes the writer before this one is known
            writer = as_writer(SummaryWriterCache.get(self._folder) if self._folder is not None else given)
            name = id(given) if writer.log_dir is None else shared_name(writer.log_dir)
            place = _places.setdefault(name, _Place(name))
            place.targets.add(self)
            place.folder = self._folder or place.folder
            self.writers += (writer,)
            self._places.append(place)
            writer.start_run()

    def close(self) -> None:
        """Flush the writers, even if one fails. Close the writer of an ``output_dir`` if no other target has it."""
        writers, self.writers = self.writers, ()
        attempt = Attempts()
        for writer in writers:
            attempt(writer.flush)
        with _lock:
            places, self._places = self._places, []
            for place in places:
                place.targets.discard(self)
                if place.is_started and not place.targets and isinstance(place.name, str):
                    _written[place.name] = os.getpid()
                if place.folder is not None and not place.targets:
                    attempt(SummaryWriterCache.close, place.folder)
        attempt.raise_errors("several writers could not be closed")

    def session_created(self, session: TrainingState) -> None:
        """Record the session of the loop. Write its metadata, unless there was an earlier session at the place."""
        with _lock:
            for writer, place in zip(self.writers, self._places, strict=True):
                if place.session is None and not place.is_started:
                    place.session = session
                    if session.metadata:
                        writer.add_config(session.metadata)

    def start_session(self) -> None:
        """Write the START of the session, unless it is written. Called in the first run, before any point."""
        if self.is_started:
            return
        with _lock:  # the loop of another thread must not write a point until the START is written
            for writer, place in zip(self.writers, self._places, strict=True):
                place.start_session(writer, self)
        self.is_started = True

    def writer_at(self, place: _Place) -> SummaryWriter:
        """Return the open writer of this target at ``place``."""
        return self.writers[self._places.index(place)]

    @staticmethod
    def flush_all() -> None:
        """Flush every open writer. Before a checkpoint, because a restored run does not write earlier points again."""
        with _lock:
            targets = {target for place in _places.values() for target in place.targets}
        for target in targets:
            for writer in target.writers:  # read once, because the loop of another thread may close the target
                writer.flush()


class _Place:
    """A folder, or a writer without a folder, and what the hooks that write there share while they have it open.

    The loops of several threads, and a loop within another one, may write to the same place. The place then has one
    file, which is closed with the last of the loops, and the START of the first loop alone: on a START, TensorBoard
    discards the points of its step and of later steps that it has read, and some may be points of another loop.
    """

    def __init__(self, name: str | int) -> None:
        self.name = name
        """The folder of the writer, or the id of a writer without one."""
        self.targets: weakref.WeakSet[WriterTarget] = weakref.WeakSet()  # forgets those of a loop that is never closed
        self.folder: str | None = None
        """The folder whose cached writer is closed with the last target."""
        self.session: TrainingState | None = None
        """The first session here, until its START is written."""
        self.is_started = False

    def start_session(self, writer: SummaryWriter, target: WriterTarget) -> None:
        """Write the START of the first session here, unless it is written. ``writer`` is the one of ``target`` here."""
        session, self.session = self.session, None
        if session is None:
            return
        self.is_started = True
        is_resumed = session.was_restored or session.begun_at > 0
        if not is_resumed and _written.get(self.name) == os.getpid():
            return  # the next fold or phase of a script: TensorBoard would discard the curves of the one before
        # Unlike TensorFlow's START, which has the step after the first run, this one has the first step of the session:
        # it voids what is written again, even if the first run makes no step, or several.
        step = session.begun_at + 1 if session.begun_at else min(session.global_step, 1)
        if is_resumed:
            writer.purge_from(step)
        # This target first: the others are in no order.
        starting = [each for each in (target, *self.targets) if each.starts_session]
        if starting:
            starting[0].writer_at(self).add_session_log("START", step)
        elif is_resumed:
            # Twice, because TensorBoard's server takes the first START in a folder for its beginning, and the sessions
            # that began at step 0 wrote none, as in TensorFlow.
            writer.add_session_log("START", step)
            writer.add_session_log("START", step)


# Guards the places. Reentrant, because the writer of a user may run a loop.
_lock = threading.RLock()
_places: weakref.WeakValueDictionary[str | int, _Place] = weakref.WeakValueDictionary()
_written: dict[str | int, int] = {}
"""The folders to which a loop has written that is closed, with the id of its process."""
