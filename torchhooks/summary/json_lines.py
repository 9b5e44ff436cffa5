"""Curves as lines of JSON, which pandas, ``jq`` and ``grep`` read without TensorBoard."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Self

from torchhooks.common.checks import whole_number
from torchhooks.common.files import Disk, warn_if_removed, write_all
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
    ``pandas.read_json("runs/curves.jsonl", lines=True).groupby("step").first()`` returns one row per step, and
    ``jq -c 'select(.loss) | [.step, .loss]' runs/curves.jsonl`` prints the points of one curve.

    A line is in the file when the call returns, so a process that is killed loses none. JSON has no NaN or infinity:
    these are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float()`` and pandas read.

    The lines of steps that a training run repeats are removed: after a restore of step 100, every line whose step is
    101 or more. *A training run that begins at step 0 removes every line that has a step*, with a warning, just as
    TensorBoard then discards everything. Lines without a step stay. The first hook of this library that writes to the
    file removes them, in its first run, so a hook of your own that also writes in that run must come later in the
    list. After a recovery within the process, they are removed immediately, and SummarySaverHook and StepCounterHook
    write the repeated steps again, unlike with event files.

    Give each loop a file of its own, even a loop within a step of another loop: their steps are not told apart.
    Several writers of one process can have the same path. Only one process at a time may write to a file, which is not
    checked; with several ranks, write on one of them.

    Args:
        path: the file. It is created with its folder if it does not exist. An incomplete last line, which a killed
            process left, is removed. If the file is removed while it is open, a warning is logged, and the next line
            creates it again.

    Raises:
        ValueError: the end of the file is no JSON; or, when lines are removed, one of them is not a JSON object. The
            file is not changed.
        OSError: from any method, if the operating system reports an error. A line that does not fit is not written.
    """

    takes_walltime = True  # so hooks pass the wall time of each point

    _lock = threading.Lock()  # of all writers: a purge by one must not miss a line that another appends

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
            self._opened()
            self._remove_copy()  # a process that was killed during a purge leaves one

    def add_scalar(self, tag: str, value: Any, step: int, walltime: float | None = None) -> None:
        """Write a line with one point.

        Args:
            tag: the name of the curve, other than ``"step"`` and ``"time"``.
            value: a real number, or a tensor or array with exactly one element; a tensor on a device is waited for.
            step: the global step.
            walltime: in seconds since 1970; by default, now.

        Raises:
            TypeError: ``value`` is not a number.
            ValueError: ``value`` has several elements, ``step`` is not a whole number, or ``tag`` is not allowed.
        """
        self.add_points([(tag, value)], step, walltime)

    def add_points(self, points: Iterable[tuple[str, Any]], step: int, walltime: float | None = None) -> None:
        """Write one line with a point of each of several curves, as pairs (tag, value); see :meth:`add_scalar`."""
        now = float(time.time() if walltime is None else walltime)
        line: dict[str, Any] = {"step": whole_number(step, "step"), "time": now}
        for tag, value in points:
            if tag in ("step", "time"):
                raise ValueError(f"tag {tag!r}: every line has a {tag!r} of its own; give the curve another name")
            line[tag] = _as_json(tag, value)
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        with self._lock:
            file = self._opened()
            end = file.seek(0, os.SEEK_END)
            try:
                write_all(file, data)
            except BaseException:
                with suppress(OSError):  # then it is removed before the next line
                    file.truncate(end)
                raise

    def purge_from(self, step: int) -> None:
        """Remove the lines of ``step`` and later, atomically. Hooks call it before these steps are repeated.

        Raises:
            ValueError: another program added a line that is not a JSON object. The file is not changed.
        """
        step = whole_number(step, "step")
        with self._lock:
            file = self._opened()
            try:
                removed = self._copy_below(step)
                if removed:
                    file.close()  # Windows does not replace an open file
                    _disk.rename(self._copy_path, self.log_dir)
                    _disk.sync_folder(self._folder)
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
                warn_if_removed(self._file, self.log_dir)
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"JsonLinesWriter({self._path!r})"

    def _opened(self) -> io.FileIO:
        """Return the open file, whose last line is complete. Open it again if it was closed, purged or removed."""
        if self._file is not None and not self._file.closed and warn_if_removed(self._file, self.log_dir):
            self._file.close()
        if self._file is None or self._file.closed:
            os.makedirs(self._folder, exist_ok=True)
            # Unbuffered, so that a line survives a kill. In append mode, so that writers do not overwrite each other.
            self._file = open(self.log_dir, "a+b", buffering=0)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        self._repair(self._file)
        return self._file

    def _repair(self, file: io.FileIO) -> None:
        """Complete or remove a last line that has no line break. A kill or a full disk leaves one."""
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        if file.read(1) in (b"", b"\n"):
            return
        with open(self.log_dir, "rb") as lines:
            number, line = deque(enumerate(lines, start=1), maxlen=1).pop()
        try:
            self._step_of(line, number)
        except ValueError:
            if not line.startswith(_LINE_START) and not _LINE_START.startswith(line):
                raise  # no writer has begun this line
            file.truncate(end - len(line))
            message = "%s: removed an incomplete last line of %d bytes, left by a write that was interrupted"
            logger.warning(message, self.log_dir, len(line))
        else:
            file.write(b"\n")

    def _copy_below(self, step: int) -> int:
        """Write the lines to keep to a new file, and return how many are left out."""
        removed = 0
        self._remove_copy()  # mode "x" then fails if there is one again: it never writes to the target of a link
        with open(self.log_dir, "rb") as old, open(self._copy_path, "xb", opener=_private) as copy:
            shutil.copymode(self.log_dir, self._copy_path)
            # Not truncated at the first line to remove: lines of several hooks interleave, so one to keep may follow.
            for number, line in enumerate(old, start=1):
                if self._step_of(line, number) >= step:
                    removed += 1
                else:
                    copy.write(line)
            if removed:
                _disk.sync(copy)
        return removed

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


def _as_json(tag: str, value: Any) -> int | float | str:
    number = summary.scalar(tag, tag).number(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
