"""Disks that are full, that fail, or that stop a save at each of its moments."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import pytest

from torchhooks.common.files import Disk


@contextmanager
def no_space_after(size: int) -> Iterator[None]:
    """Have the operating system refuse to extend a file beyond ``size`` bytes. Python ignores the signal for this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def use_disk(monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    """Let each Saver that is created from now on write to ``disk``."""
    monkeypatch.setattr("torchhooks.checkpoints.saver.Disk", lambda: disk)


class Moment(NamedTuple):
    """A moment of a save: ``"before"`` or ``"after"`` the call ``call`` with this ``number`` in the save ``save``."""

    call: str
    number: int
    when: str
    save: int


class DiskOfMoments(Disk):
    """A disk that calls ``reached(moment)`` in each moment of a save, numbers from 1. A process may be killed in each.

    A test that only needs what a kill leaves copies the folder instead: see :func:`copy_folder`.
    """

    def __init__(self, reached: Callable[[Moment], object]) -> None:
        self._reached = reached
        self._save = 0
        self._calls: Counter[str] = Counter()

    @contextmanager
    def _moments(self, call: str) -> Iterator[None]:
        self._calls[call] += 1
        number = self._calls[call]
        self._reached(Moment(call, number, "before", self._save))
        yield
        self._reached(Moment(call, number, "after", self._save))

    def create(self, path: str) -> BinaryIO:
        if not path.endswith("manifest.json"):  # the second file of a save
            self._save += 1
            self._calls.clear()
        with self._moments("create"):
            return super().create(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        with self._moments("write"):
            super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        with self._moments("sync"):
            super().sync(file)

    def rename(self, path: str, new_path: str) -> None:
        with self._moments("rename"):
            super().rename(path, new_path)

    def sync_folder(self, path: str) -> None:
        with self._moments("sync_folder"):
            super().sync_folder(path)

    def remove(self, path: str) -> None:
        with self._moments("remove"):
            super().remove(path)


def killing_at(moment: Moment, pids: Sequence[int]) -> Callable[[Moment], None]:
    """Return a function for a DiskOfMoments that kills all of the processes in this moment, the last one last."""

    def reached(now: Moment) -> None:
        if now == moment:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    return reached


def copy_folder(folder: str, copy: str) -> None:
    """Copy what a kill would leave in ``folder`` now: nothing that is only in the memory of the process."""

    def copy_file(source: str, target: str) -> None:
        with suppress(FileNotFoundError):  # renamed meanwhile by another thread, as the record of a training run is
            shutil.copy2(source, target, follow_symlinks=False)

    os.makedirs(folder, exist_ok=True)
    shutil.copytree(folder, copy, symlinks=True, copy_function=copy_file)


class FailingDisk:
    """Where a module opens its unbuffered files. Once it is full, these take a part of what is written to them.

    Attributes:
        error: what a write raises after it has written a part, and ``None`` while there is space.
        truncates: whether a file can be truncated.
    """

    PART = 20  # bytes

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.error: BaseException | None = None
        self.truncates = True
        monkeypatch.setattr(module, "open", self._open, raising=False)

    def fill(self) -> None:
        """Let all writes fail, and let no file be truncated."""
        self.error = OSError(errno.ENOSPC, "No space left on device")
        self.truncates = False

    def repair(self) -> None:
        """Let all calls succeed again."""
        self.error, self.truncates = None, True

    def _open(self, path: str, mode: str, buffering: int = -1, **options: Any) -> Any:
        file = open(path, mode, buffering, **options)  # noqa: SIM115 - its caller closes it
        return file if buffering else _File(file, self)


class _File:
    def __init__(self, file: Any, disk: FailingDisk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: bytes) -> int:
        if self._disk.error is not None:
            self._file.write(data[: FailingDisk.PART])
            raise self._disk.error
        return int(self._file.write(data))

    def truncate(self, size: int) -> int:
        if not self._disk.truncates:
            raise OSError(errno.EIO, "Input/output error")
        return int(self._file.truncate(size))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
