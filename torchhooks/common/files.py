"""Files: the calls of the operating system that a save makes, and whether an open file was removed."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from torchhooks.common.log import logger

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

CHUNK = 1 << 16  # a larger buffer would be read again around each record when the checksum is computed


def write_all(file: io.FileIO, data: bytes) -> None:
    """Write all of ``data`` to an unbuffered file, of which a nearly full disk takes only a part in one call."""
    while data:
        data = data[file.write(data) :]


def warn_if_removed(file: io.FileIO, path: str) -> bool:
    """Return whether the open ``file`` at ``path`` was removed. Log a warning, unless another file replaced it.

    Without this, writes to it succeed and are lost. A file that was moved is not removed: what is written to it stays.
    """
    status = os.fstat(file.fileno())
    if status.st_nlink:
        return False
    try:
        return not os.path.samestat(os.stat(path), status)  # some file systems count no links at all
    except FileNotFoundError:
        logger.warning("%s was removed while it was open for writing: what was written to it is lost", path)
        return True


@contextmanager
def alone_at(path: str) -> Iterator[None]:
    """Wait for a lock on the file ``path``, and hold it. Where the system has no locks, go on at once."""
    if fcntl is None:
        yield
        return
    with open(path, "a") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Disk:
    """The calls of the operating system that a save makes. Tests replace it, to have a save fail at any of them."""

    def create_folder(self, path: str) -> None:
        os.mkdir(path)

    def create(self, path: str) -> BinaryIO:
        """Create a file, and follow no link to another one."""
        return open(path, "x+b", buffering=CHUNK, opener=no_link)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Return once everything that was written would survive a power failure."""
        file.flush()
        os.fsync(file.fileno())

    def rename(self, path: str, new_path: str) -> None:
        os.replace(path, new_path)

    def sync_folder(self, path: str) -> None:
        """Return once the names in a folder would survive a power failure."""
        if fcntl is None:
            return  # Windows opens no folders
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, path: str) -> None:
        """Remove a file, a link, or a folder with what is in it."""
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.remove(path)

    def now(self) -> float:
        """Return the time, in seconds since 1970."""
        return time.time()


def no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
