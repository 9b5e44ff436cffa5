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
_LONGEST_LINE = 1 << 26
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

    **A loop within a step of another**, or created before another is closed, removes nothing if both write here, in
    its first run as after a recovery: the other's lines stay. But its own lines go as the other's do: those written
    before the other's first run is over, when that is one from step 0, and those of steps that the other makes again.
    A file of its own has none of this.

    Any number of them may have one path, in one process: they write to one file. Another process cannot: an empty file
    beside it, ``.curves.jsonl.lock`` for ``curves.jsonl``, is locked while the writer is open; it stays, for the next.

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
        """Write a line with a point of each of several curves, by tag; else as :meth:`add_scalar`.

        Raises:
            ValueError: also, when the line has more than 64 MiB, which would not be read again. Nothing is written.
        """
        step = _whole(step)
        line: dict[str, Any] = {"step": step, "time": float(time.time() if walltime is None else walltime)}
        for tag, value in points:
            if tag in ("step", "time"):
                raise ValueError(f"tag {tag!r}: every line has a {tag!r} of its own; give the curve another name")
            line[tag] = _as_json(tag, value)
        encoded = json.dumps(line, allow_nan=False).encode() + b"\n"
        if len(encoded) > _LONGEST_LINE:
            raise ValueError(
                f"step {step}: a line with {len(line) - 2} tags has {len(encoded)} bytes, at most {_LONGEST_LINE} can "
                "be read again: write them in several calls, or with several hooks"
            )
        self._opened().append(encoded, step)

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

    _claimed: io.FileIO | None = None
    _raw: io.FileIO | None = None

    def __init__(self, path: str) -> None:
        folder, name = os.path.split(path)
        self._path = path
        self._copy_path = os.path.join(folder, f".{name}.tmp")
        self._lock = threading.Lock()
        os.makedirs(folder, exist_ok=True)
        try:
            # A file that nobody else opens: whoever closes a file lets go of every lock that the process has on it.
            self._claimed = _open(os.path.join(folder, f".{name}.lock"))
            _claim(self._claimed, path)
            with suppress(FileNotFoundError):
                os.remove(self._copy_path)  # a kill has left it
            self._raw = _open(path)
            self._highest = self._look_through(self._raw)
        except BaseException:
            self._close()  # not when the error is forgotten, by which time another _File may have the claim
            raise

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
            copy = _open(self._copy_path)
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

    def _close(self) -> None:
        for file in (self._raw, self._claimed):
            if file is not None:
                file.close()

    def __del__(self) -> None:
        self._close()


def _open(path: str) -> io.FileIO:
    return open(path, "a+b", buffering=0)


def _claim(file: io.FileIO, path: str) -> None:
    """Lock ``file``, so that no other process writes to ``path``."""
    if fcntl is None:
        return
    try:
        # Not flock, which the workers of a DataLoader would inherit: they outlive a process that is killed by seconds.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        reader.detach()  # which would close the file


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
