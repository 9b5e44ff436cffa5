"""Curves as lines of JSON, which pandas, ``jq`` and ``grep`` read without TensorBoard.

    with JsonLinesWriter("run/curves.jsonl") as writer:
        hooks = [SummarySaverHook(10, summary_writer=writer, summary_op=ops), StepCounterHook(summary_writer=writer)]

The points that a hook writes for one step are one line, with the time in seconds since 1970:

    {"step": 10, "time": 1763712000.5, "loss": 0.25, "lr": 0.001}
    {"step": 11, "time": 1763712000.6, "global_step/sec": 52.1}

``pandas.read_json("run/curves.jsonl", lines=True).groupby("step").first()`` returns one row per step, and
``jq -c 'select(.loss) | [.step, .loss]' run/curves.jsonl`` prints the points of one curve.
"""

from __future__ import annotations

import io
import json
import math
import operator
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Self

from torchhooks.common.checks import explains_wrong_calls
from torchhooks.common.files import Disk, warn_if_removed
from torchhooks.common.log import logger
from torchhooks.summary import operations as summary

_LINE_START = b'{"step": '
_disk = Disk()
_private = partial(os.open, mode=0o600)  # no other user can open a new file before it has the mode of the old one


class JsonLinesWriter:
    """A ``summary_writer`` that appends scalars to a file, as one JSON object per line.

    >>> with JsonLinesWriter("runs/curves.jsonl") as writer:
    ...     hook = SummarySaverHook(save_steps=4, summary_writer=writer, summary_op={"lr": "lr"})
    ...     with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...         for inputs in loop.until_stop(batches):
    ...             loss = loop.run(inputs)
    >>> from pathlib import Path
    >>> print(Path("runs/curves.jsonl").read_text(), end="")
    {"step": 1, "time": ..., "lr": 0.1}
    {"step": 5, "time": ..., "lr": 0.1}

    The points that a hook writes for one step are one line, with the time in seconds since 1970.
    ``pandas.read_json("runs/curves.jsonl", lines=True).groupby("step").first()`` returns one row per step.

    A line is in the file when the call returns, so a process that is killed loses none. JSON has no NaN or infinity:
    these are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float()`` and pandas read.

    The lines of steps that a training run repeats are removed: after a restore of step 100, every line whose step is
    101 or more. *A training run that begins at step 0 removes every line that has a step*, with a warning, just as
    TensorBoard then discards everything. Lines without a step stay. The first hook of this library that writes to the
    file removes them, in its first run, so a hook of your own that also writes in that run must come later in the
    list. After a recovery within the process, they are removed immediately, and SummarySaverHook and StepCounterHook
    write the repeated steps again, unlike with event files.

    Give each loop a file of its own, even one that runs within a step of another loop: their steps are not told apart.
    Several writers of one process can have the same path. Only one process at a time may write to a file, which is not
    checked; with several ranks, write on one of them.

    Args:
        path: the file. It is created with its folder if it does not exist. An incomplete last line, which a killed
            process left, is removed. If the file is removed while it is open, a warning is logged, and the next line
            creates it again.

    Raises:
        ValueError: the file has a line that is not a JSON object. The file is not changed.
        OSError: from any method, if the operating system reports an error. A line that does not fit is not written.
    """

    takes_walltime = True  # so hooks pass the wall time of each point

    _lock = threading.Lock()  # of all writers: a purge by one must not miss a line that another appends
    _open_files: ClassVar[weakref.WeakSet[io.FileIO]] = weakref.WeakSet()
    _torn: ClassVar[dict[str, int]] = {}  # from the path of a file that ends in a part of a line to the end before it

    @explains_wrong_calls
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        if os.path.isdir(path):
            raise ValueError(
                f"path={path!r}: this is a folder: give a file, such as {os.path.join(path, 'curves.jsonl')!r}"
            )
        self.log_dir = os.path.realpath(self._path)
        """The place by which hooks recognize that they write to the same file."""
        self._folder, name = os.path.split(self.log_dir)
        self._copy_path = os.path.join(self._folder, f".{name}.tmp")
        self._file: io.FileIO | None = None
        with self._lock:
            self._check_lines(self._opened())
            self._remove_copy()  # a process that was killed during a purge leaves one

    def add_scalar(self, tag: str, value: Any, step: int, walltime: float | None = None) -> None:
        """Write a line with one point.

        Args:
            tag: the name of the curve, other than ``"step"`` and ``"time"``.
            value: a real number, or a tensor or array with exactly one element; a tensor on a device is waited for.
            step: the global step.
            walltime: in seconds since 1970; by default, now.

        Raises:
            TypeError: ``value`` is not a number, or ``step`` is not a whole number.
            ValueError: ``value`` has several elements, or ``tag`` is not allowed.
        """
        self.add_points([(tag, value)], step, walltime)

    def add_points(self, points: Iterable[tuple[str, Any]], step: int, walltime: float | None = None) -> None:
        """Write one line with a point of each of several curves, as pairs (tag, value); see :meth:`add_scalar`."""
        line: dict[str, Any] = {"step": _whole(step), "time": float(time.time() if walltime is None else walltime)}
        for tag, value in points:
            if tag in ("step", "time"):
                raise ValueError(f"tag {tag!r}: every line has a {tag!r} of its own; give the curve another name")
            line[tag] = _as_json(tag, value)
        self._append(json.dumps(line, allow_nan=False).encode() + b"\n")

    def purge_from(self, step: int) -> None:
        """Remove the lines of ``step`` and later, atomically. Hooks call it before these steps are repeated.

        Raises:
            ValueError: another program added a line that is not a JSON object. The file is not changed.
        """
        step = _whole(step)
        with self._lock:
            self._opened()
            try:
                removed = self._copy_below(step)
                if removed:
                    self._replace_by_copy()
            finally:
                self._remove_copy()
        if removed:
            log = logger.info if step > 1 else logger.warning  # the whole curve, which may not be intended
            lines = "1 line" if removed == 1 else f"{removed} lines"
            log("%s: removed %s of step %d and later, which the training run repeats", self.log_dir, lines, step)

    def flush(self) -> None:
        """Do nothing: every line is in the file already."""

    def close(self) -> None:
        """Close the file. Closing twice is harmless, and a later write opens the file again."""
        with self._lock:
            if self._file is not None and not self._file.closed:
                try:
                    if not warn_if_removed(self._file, self.log_dir) and self.log_dir in self._torn:
                        self._cut(self._file)
                finally:
                    self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"JsonLinesWriter({self._path!r})"

    def _opened(self) -> io.FileIO:
        """Return the open file, whose last line is complete.

        Open it again after a close, after a purge by any writer of the path, or if it was removed.
        """
        if self._file is not None and not self._file.closed and warn_if_removed(self._file, self.log_dir):
            self._file.close()
        if self._file is None or self._file.closed:
            os.makedirs(self._folder, exist_ok=True)
            # Unbuffered, so that a line survives a kill. In append mode, so that writers do not overwrite each other.
            self._file = open(self.log_dir, "ab", buffering=0)  # noqa: SIM115
            self._open_files.add(self._file)
            weakref.finalize(self, self._file.close)
        if self.log_dir in self._torn:
            self._cut(self._file)
        return self._file

    def _append(self, line: bytes) -> None:
        """Write ``line`` completely or not at all."""
        with self._lock:
            file = self._opened()
            end, rest = file.seek(0, os.SEEK_END), line
            try:
                while rest:  # a nearly full disk takes only a part
                    rest = rest[file.write(rest) :]
            except BaseException:
                self._torn[self.log_dir] = end
                with suppress(OSError):  # tried again before the next line, by any writer of this path
                    self._cut(file)
                raise

    def _cut(self, file: io.FileIO) -> None:
        """Remove the part of a line that a failed write left at the end of ``file``."""
        end = self._torn[self.log_dir]
        with open(self.log_dir, "rb") as torn:
            torn.seek(end)
            rest = torn.read()
        if rest and _is_torn(rest):  # otherwise another program has replaced the file or repaired it
            file.truncate(end)
        del self._torn[self.log_dir]

    def _check_lines(self, file: io.FileIO) -> None:
        """Check that every line is a JSON object, and repair the end of the file."""
        end, line = 0, b"\n"
        with open(self.log_dir, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    self._step_of(line, number)
                except ValueError:
                    if not _is_torn(line):
                        raise
                    file.truncate(end)
                    message = "%s: removed an incomplete last line of %d bytes, left by a process that was killed"
                    logger.warning(message, self.log_dir, len(line))
                    return
                end += len(line)
        if not line.endswith(b"\n"):
            file.write(b"\n")

    def _copy_below(self, step: int) -> int:
        """Write the lines to keep to a new file, and return how many are left out."""
        removed = 0
        self._remove_copy()  # mode "x" then fails if there is one again: it never writes to the target of a link
        with open(self.log_dir, "rb") as old, open(self._copy_path, "xb", opener=_private) as copy:
            if hasattr(os, "fchmod"):  # not on Windows before Python 3.13
                os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(old.fileno()).st_mode))
            # Not truncated at the first line to remove: lines of several hooks interleave, so one to keep may follow.
            for number, line in enumerate(old, start=1):
                if self._step_of(line, number) >= step:
                    removed += 1
                else:
                    copy.write(line)
            if removed:
                _disk.sync(copy)
        return removed

    def _replace_by_copy(self) -> None:
        # The next write of each writer opens the new file. Besides, Windows does not replace a file that is open.
        for file in self._open_files:
            if file.name == self.log_dir:
                file.close()
        copy = os.stat(self._copy_path)
        try:
            _disk.rename(self._copy_path, self.log_dir)
        except OSError:
            # A server of NFS that gets a request twice reports that the second one found no file to rename.
            if not os.path.samestat(os.stat(self.log_dir), copy):
                raise
        _disk.sync_folder(self._folder)

    def _remove_copy(self) -> None:
        with suppress(FileNotFoundError):
            os.remove(self._copy_path)

    def _step_of(self, line: bytes, number: int) -> float:
        """Return the step of a line, or -inf if it has none."""
        try:
            step = json.loads(line).get("step") if line.strip() else None
        except (ValueError, AttributeError, RecursionError):
            raise ValueError(
                f"{self.log_dir}: line {number} is not a JSON object: {line[:40]!r}. Every line has to be one; remove "
                "this line, or choose another path. The file was not changed."
            ) from None
        return step if isinstance(step, (int, float)) and not isinstance(step, bool) else -math.inf


def _is_torn(line: bytes) -> bool:
    """Return whether ``line``, which is not JSON, is the beginning of a line that a writer was about to write."""
    return not line.endswith(b"\n") and (line.startswith(_LINE_START) or _LINE_START.startswith(line))


def _as_json(tag: str, value: Any) -> int | float | str:
    number = summary.scalar(tag, tag).number(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _whole(step: int) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"step={step!r}: must be a whole number") from None
