"""Curves as lines of JSON, which pandas, ``jq`` and ``grep`` read without TensorBoard."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torchhooks.common.checks import whole_number
from torchhooks.common.files import place, replacing, write_all
from torchhooks.common.log import logger
from torchhooks.common.text import float_name
from torchhooks.summary import operations as summary
from torchhooks.summary.writers import SummaryWriter


class JsonLinesWriter(SummaryWriter):
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

    The points that a hook writes for one step are one line, with the time in seconds since 1970. A line is in the file
    when the call returns, so a process that is killed loses none. See :doc:`JSON lines </logging-and-trackers>`.

    Args:
        path: the file, to which lines are appended. It is created with its folder if it does not exist. An incomplete
            last line, which a killed process or a full disk left, is removed before the next line is written.

    Raises:
        ValueError: a line that is not a JSON object is in the way, because lines are removed or because it is the last
            one and has no line break. The file is not changed.
        OSError: from any method, if the operating system reports an error.
    """

    # Of all writers of this process: a purge by one of them must not miss a line that another one appends to the same
    # file. Another process is not kept out.
    _lock = threading.Lock()

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = place(path)
        if os.path.isdir(path):
            raise ValueError(
                f"path={path!r}: this is a folder: give a file, such as {os.path.join(path, 'curves.jsonl')!r}"
            )
        # Without links: a purge renames its file to this path, and would replace the link instead of what it leads to.
        self._file = self.log_dir = os.path.realpath(self._path)
        # An incomplete last line is removed now, and a folder that cannot be created is an error now and not at the
        # first point.
        with self._lock, self._opened():
            pass

    def add_scalar(self, tag: str, value: object, step: int, walltime: float | None = None) -> None:
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

    def add_points(self, points: Iterable[tuple[str, object]], step: int, walltime: float | None = None) -> None:
        """Write one line with a point of each of several curves, as pairs (tag, value); see :meth:`add_scalar`."""
        now = float(time.time() if walltime is None else walltime)
        line: dict[str, float | str] = {"step": whole_number(step, "step"), "time": now}
        for tag, value in points:
            if tag in ("step", "time"):
                raise ValueError(f"tag {tag!r}: every line has a {tag!r} of its own; give the curve another name")
            line[tag] = _as_json(tag, value)
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        with self._lock, self._opened() as file:
            write_all(file, data)

    def purge_from(self, step: int) -> None:
        """Remove the lines of ``step`` and later, atomically. Hooks call it before these steps are repeated.

        Raises:
            ValueError: a line is not a JSON object. The file is not changed.
        """
        step, path = whole_number(step, "step"), self._file
        with self._lock:
            with self._opened(), open(path, "rb") as lines:
                stays = [self._step_of(line, number) < step for number, line in enumerate(lines, start=1)]
            removed = stays.count(False)
            if removed:
                with replacing(path) as copy_path, open(path, "rb") as lines, open(copy_path, "wb") as copy:
                    # Not cut off at the first line to remove: lines of several hooks interleave.
                    copy.writelines(itertools.compress(lines, stays))
                    shutil.copymode(path, copy_path)
                    # Before the copy gets the name of the file, so that a power failure leaves one of them whole. The
                    # blocks that opened the two end before the rename, because Windows renames no open file.
                    copy.flush()
                    os.fsync(copy.fileno())
        if removed:
            number_of = "1 line" if removed == 1 else f"{removed} lines"
            logger.info("%s: removed %s of step %d and later, which the training run repeats", path, number_of, step)

    def __repr__(self) -> str:
        return f"JsonLinesWriter({self._path!r})"

    @contextmanager
    def _opened(self) -> Iterator[io.FileIO]:
        """Open the file to append whole lines. Remove a part of a line, which a kill or a full disk left at its end."""
        # The file is opened for each line, because a purge by another writer replaces it: a file that was kept open
        # would then be one that has no name, and its lines would be lost.
        os.makedirs(os.path.dirname(self._file), exist_ok=True)
        # Unbuffered, so that a line survives a kill. In append mode, so that writers do not overwrite each other.
        with open(self._file, "a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end - 1, 0))
            if file.read(1) not in (b"", b"\n"):
                with open(self._file, "rb") as lines:
                    number, line = deque(enumerate(lines, start=1), maxlen=1).pop()
                try:
                    self._step_of(line, number)
                except ValueError:
                    if not line.startswith(b"{"):
                        raise  # no line of this writer begins like that
                    file.truncate(end - len(line))
                    message = "%s: removed an incomplete last line of %d bytes, left by a write that was interrupted"
                    logger.warning(message, self._file, len(line))
                else:
                    file.write(b"\n")
            yield file

    def _step_of(self, line: bytes, number: int) -> float:
        """Return the step of a line, or -inf if it has none."""
        try:
            step = json.loads(line).get("step")
        except (ValueError, AttributeError, RecursionError):
            raise ValueError(
                f"{self._file}: line {number} is not a JSON object: {line[:40]!r}. Every line has to be one; remove "
                "this line, or choose another path. The file was not changed."
            ) from None
        return step if isinstance(step, (int, float)) else -math.inf


def _as_json(tag: str, value: object) -> int | float | str:
    number = summary.scalar(tag, tag).number(value)
    return number if math.isfinite(number) else float_name(number)
