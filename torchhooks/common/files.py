"""Files: written as a whole or not at all, locked, and the calls of the operating system that a save makes."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

try:
    import fcntl as fcntl  # checkpoints lock with it too
except ImportError:  # Windows, where an open file cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

CHUNK = 1 << 16  # a larger buffer would be read again around each record when the checksum is computed


PLACES = "TORCHHOOKS_PLACES"
"""The environment variable by which ``python -m torchhooks check`` names its scratch folder to the script."""

placed: set[str] = set()
"""The paths that :func:`place` has moved in this process."""


def is_checked() -> bool:
    """Return whether the script runs under ``check``, so that nothing may leave this machine."""
    return bool(os.environ.get(PLACES))


def place(path: str | os.PathLike[str]) -> str:
    """Return where a path of a training run is: unchanged, but under ``check`` in its scratch folder.

    Everything that torchhooks writes to, and restores from, goes through here.
    """
    given, scratch = os.fspath(path), os.environ.get(PLACES)
    if not scratch:
        return given
    # A path goes through here more than once: a hook places the folder of its event file, and so does the event file.
    # So what lies in the scratch folder already stays where it is.
    whole = os.path.abspath(given)
    # With the separator at its end: the folder /tmp/ab is not inside of /tmp/a.
    inside = os.path.join(scratch, "")
    if whole.startswith(inside):
        return given
    # Under check, what the script itself opens or lists at these paths is looked for in the scratch folder too.
    placed.add(whole)
    return inside + whole.lstrip(os.sep)


def write_all(file: io.FileIO, data: bytes) -> None:
    """Write all of ``data`` to an unbuffered file, of which a nearly full disk takes only a part in one call."""
    while data:
        data = data[file.write(data) :]


@contextmanager
def alone_at(path: str) -> Iterator[None]:
    """Wait for a lock on the file ``path``, and hold it. Where the system has no locks, go on at once."""
    if fcntl is None:
        yield
        return
    # The kernel gives the lock up when the file is closed, so also when this process is killed. The file has to stay:
    # if it were removed, two processes could hold locks of two files of the same name.
    with open(path, "a") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def replacing(path: str, temporary: str | None = None) -> Iterator[str]:
    """Replace the file at ``path`` by the one that the ``with`` block writes to the path that it gets.

    A reader finds the old file or the new one, never a part. After an error, the old file stays, and no other is left.
    The path is ``temporary``, which has to be given if two processes may write the file at once.
    """
    # In the same folder, because a rename is atomic within one file system only. What a kill -9 leaves under the
    # default name is overwritten by the next write.
    temporary = f"{path}.tmp" if temporary is None else temporary
    try:
        yield temporary
        # A kill cannot undo the rename. A power failure may leave an empty file, unless the block has synced what it
        # wrote.
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            os.remove(temporary)


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
        # rmtree() refuses a link, and what the link leads to is no part of the checkpoint.
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.remove(path)

    def now(self) -> float:
        """Return the time, in seconds since 1970."""
        return time.time()


def no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
