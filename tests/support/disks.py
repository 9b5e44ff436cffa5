"""Disks that are full, or that fail."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

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
