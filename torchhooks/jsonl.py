"""Curves as lines of JSON: what pandas, ``jq`` and ``grep`` read, without TensorBoard.

    with JsonLinesWriter("run/curves.jsonl") as writer:
        hooks = [SummarySaverHook(10, summary_writer=writer, summary_op=ops), StepCounterHook(summary_writer=writer)]

The points of one step that a hook has together are one line:

    {"step": 10, "time": 1763712000.5, "loss": 0.25, "lr": 0.001}
    {"step": 11, "time": 1763712000.6, "global_step/sec": 52.1}

``pandas.read_json("run/curves.jsonl", lines=True).groupby("step").first()`` has one row a step, and
``jq -c 'select(.loss) | [.step, .loss]' run/curves.jsonl`` the points of one curve.
"""

from __future__ import annotations

import errno
import io
import json
import math
import operator
import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, ClassVar, Self

from torchhooks import summary
from torchhooks.checkpoint_files import Disk
from torchhooks.errors import LifecycleError
from torchhooks.log import logger

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_BEGINNING = b'{"step": '
_LONGEST_LINE = 1 << 20
_CHUNK = 1 << 20
_disk = Disk()


class JsonLinesWriter:
    """A ``summary_writer`` that appends one JSON object a line to a file, for curves only.

    A line is in the file when the call returns, so that a process that is killed loses none. It has ``"step"``,
    ``"time"`` in seconds since 1970, and the points by tag. NaN and the infinities are the strings ``"NaN"``,
    ``"Infinity"`` and ``"-Infinity"``, since JSON has no such numbers; ``float()`` and pandas read them.

    **One curve.** What an earlier process wrote of steps that the training now makes again is removed from the file in
    the first run, by the first hook of this library that writes here: after a restore of step 100, each line whose step
    is 101 or more. *A training that begins at step 0 removes every line that has a step*, as TensorBoard forgets
    everything then; a warning says how many. To keep them give each training a file of its own. After a recovery in the
    process the same is done at once, and the hooks write these steps again, in which a SummarySaverHook or
    StepCounterHook with this writer differs from one with event files. Lines without a step, which are not its own,
    stay. A hook of yours that writes here in its first run stands behind these in the list.

    Any number of them may have one path, in one process: they write to one file. Another process cannot.

    Args:
        path: the file. It is opened now, made if missing, with its folder. A last line that a kill cut short goes.

    Raises:
        ValueError: the file has something in it that is no JSON object on a line. It is left as it is.
        LifecycleError: another process is writing to it.
        OSError: as from every method, when the system refuses. A line that did not fit is not begun.
    """

    takes_walltime = True
    """That the wall time of a point is given, in seconds since 1970."""

    _lock = threading.Lock()
    _files: ClassVar[weakref.WeakValueDictionary[str, _File]] = weakref.WeakValueDictionary()

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self.log_dir = os.path.realpath(self._path)
        """By which hooks know that they write to one place."""
        self._file: _File | None = None
        self._opened()

    def add_scalar(self, tag: str, value: Any, step: int, walltime: float | None = None) -> None:
        """Write a line with one point.

        Args:
            tag: the name of the curve; ``"step"`` and ``"time"`` are taken.
            value: a real number, or a tensor or array with exactly one element; a tensor on a device is waited for.
            step: the global step.
            walltime: when that was, in seconds since 1970; now, if it is not given.

        Raises:
            TypeError: ``value`` is no number.
            ValueError: it is several, or the tag cannot be one.
        """
        self.add_points([(tag, value)], step, walltime)

    def add_points(self, points: Iterable[tuple[str, Any]], step: int, walltime: float | None = None) -> None:
        """Write a line with a point of each of several curves, by tag; else as :meth:`add_scalar`."""
        step = _whole(step)
        line: dict[str, Any] = {"step": step, "time": float(time.time() if walltime is None else walltime)}
        for tag, value in points:
            if tag in ("step", "time"):
                raise ValueError(f"tag {tag!r}: every line has a {tag!r} of its own; give the curve another name")
            line[tag] = _as_json(tag, value)
        self._opened().append(json.dumps(line, allow_nan=False).encode() + b"\n", step)

    def purge_from(self, step: int) -> None:
        """Remove the lines of ``step`` and beyond, for steps that are about to be made again.

        Hooks of this library call it, for all who write to the file. What stays is written to a new file, which then
        takes the place of the old one: a kill leaves the one or the other.

        Raises:
            ValueError: somebody has written to the file what is no JSON object on a line. It is left as it is.
        """
        self._opened().purge_from(_whole(step))

    def flush(self) -> None:
        """Nothing: every line is in the file already."""

    def close(self) -> None:
        """Let go of the file. Again is harmless; what is written later opens it once more."""
        self._file = None

    def _opened(self) -> _File:
        file = self._file
        if file is None:
            with self._lock:
                self._file = self._files[self.log_dir] = file = self._files.get(self.log_dir) or _File(self.log_dir)
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"JsonLinesWriter({self._path!r})"


class _File:
    """The one open file of a path; closed when nobody holds it any more."""

    _raw: io.FileIO | None = None

    def __init__(self, path: str) -> None:
        self._path = path
        self._copy_path = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.tmp")
        self._lock = threading.Lock()
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._raw = _open_and_claim(path)
        with suppress(FileNotFoundError):
            os.remove(self._copy_path)  # a kill has left it
        self._highest = self._look_through(self._raw)

    def append(self, line: bytes, step: int) -> None:
        """Write ``line`` whole, or nothing of it."""
        with self._lock:
            assert self._raw is not None
            end, written = self._raw.seek(0, os.SEEK_END), 0
            try:
                while written < len(line):  # once, but on a disk that is nearly full
                    written += self._raw.write(line[written:])
            except BaseException:
                self._raw.truncate(end)
                raise
            self._highest = max(self._highest, step)

    def purge_from(self, step: int) -> None:
        """Put a file without the lines of ``step`` and beyond in the place of this one, if it has any."""
        with self._lock:
            if step > self._highest:
                return
            assert self._raw is not None
            copy = _open_and_claim(self._copy_path)
            try:
                removed = self._copy_below(step, self._raw, copy)
                shutil.copymode(self._path, self._copy_path)
                _disk.rename(self._copy_path, self._path)
            except BaseException:
                copy.close()
                os.remove(self._copy_path)
                raise
            self._raw.close()
            self._raw, self._highest = copy, step - 1
            _disk.sync_folder(os.path.dirname(self._path))
        say = logger.info if step > 1 else logger.warning
        lines = "1 line" if removed == 1 else f"{removed} lines"
        say("%s: removed %s of step %d and beyond, which the training now makes again", self._path, lines, step)

    def _look_through(self, raw: io.FileIO) -> float:
        """See that the file is what it should be, mend its end, and return the highest step; -inf if there is none."""
        highest, end, line = -math.inf, 0, b"\n"
        for number, line in enumerate(_lines(raw), start=1):
            try:
                highest = max(highest, self._step_of(line, number))
            except ValueError:
                if not _is_torn(line):
                    raise
                raw.truncate(end)
                logger.warning("%s: removed its last line, %d bytes, which a kill had cut short", self._path, len(line))
                return highest
            end += len(line)
        if not line.endswith(b"\n"):
            raw.write(b"\n")
        return highest

    def _copy_below(self, step: int, raw: io.FileIO, copy: io.FileIO) -> int:
        """Copy what is to stay to where it survives a power failure, and return how many lines are not."""
        removed = 0
        buffered = io.BufferedWriter(copy, _CHUNK)
        for number, line in enumerate(_lines(raw), start=1):
            if self._step_of(line, number) >= step:
                removed += 1
            else:
                buffered.write(line)
        _disk.sync(buffered)
        buffered.detach()
        return removed

    def _step_of(self, line: bytes, number: int) -> float:
        """The step of a line; -inf if it has none."""
        try:
            step = json.loads(line).get("step") if line.strip() else None
        except (ValueError, AttributeError, RecursionError):
            raise ValueError(
                f"{self._path}: line {number} is no JSON object, {line[:40]!r}: each line of the file has to be one. "
                "Take the line out, or choose another path; nothing was changed."
            ) from None
        return step if isinstance(step, (int, float)) and not isinstance(step, bool) else -math.inf

    def __del__(self) -> None:
        if self._raw is not None:
            self._raw.close()


def _open_and_claim(path: str) -> io.FileIO:
    """Open a file to append to it, unless another process has."""
    while True:
        raw = open(path, "a+b", buffering=0)  # noqa: SIM115
        try:
            _claim(raw, path)
            if os.path.samestat(os.fstat(raw.fileno()), os.stat(path)):
                return raw
        except BaseException:
            raw.close()
            raise
        raw.close()  # another process has put a new one in its place, and let go of this one


def _claim(raw: io.FileIO, path: str) -> None:
    if fcntl is None:
        return
    try:
        # Not flock, which the workers of a DataLoader would inherit: they outlive a process that is killed by seconds.
        fcntl.lockf(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return  # a file system that has no locks
        raise LifecycleError(
            f"{path}: another process is writing to this file, and one at a time may. End it, have it close() its "
            "writer, or give each process a file of its own; of several ranks, one is enough."
        ) from None


def _lines(raw: io.FileIO) -> Iterator[bytes]:
    raw.seek(0)
    reader = io.BufferedReader(raw, _CHUNK)
    try:
        yield from iter(lambda: reader.readline(_LONGEST_LINE), b"")
    finally:
        reader.detach()  # which would close the file, and with it let go of the claim


def _is_torn(line: bytes) -> bool:
    """Whether ``line``, which is no JSON, is the beginning of one of ours at the end of the file."""
    begins = line[: len(_BEGINNING)] == _BEGINNING[: len(line)]
    return begins and not line.endswith(b"\n") and len(line) < _LONGEST_LINE


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
