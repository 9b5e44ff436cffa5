"""Which process saves checkpoints into a folder, and what a killed one had moved aside there."""

from __future__ import annotations

import os
import re
import shutil
import threading
import weakref
from typing import ClassVar

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

_ASIDE = re.compile(r"\.(.+-\d+)\.[0-9a-f]{16}\.old", re.DOTALL)
# Two savers of one process may write to one folder. Reentrant, so that a thread in which a save was interrupted at an
# odd moment can save again.
_writing = threading.RLock()


def writing() -> threading.RLock:
    """Return the lock that a thread holds while it writes to a folder of checkpoints."""
    return _writing


class Claim:
    """A lock on a folder that tells other processes that this one saves into it. All savers of a process share it.

    It is on the folder itself, so that nothing is written. The system releases it when the process ends, however that
    happens. A forked process, such as a worker of a DataLoader, gives up its copy, or the lock would stay for as long
    as the worker does.
    """

    _all: ClassVar[weakref.WeakValueDictionary[tuple[int, int], Claim]] = weakref.WeakValueDictionary()
    _at_fork = False

    def __init__(self, place: tuple[int, int], file: int) -> None:
        self.place, self.file = place, file
        self.close = weakref.finalize(self, os.close, file)
        """Release the lock, if that has not been done."""

    @classmethod
    def of(cls, folder: str) -> Claim:
        """Return the claim of this process to ``folder``.

        Raises:
            BlockingIOError: another process has it.
            OSError: the file system has no locks.
        """
        status = os.stat(folder)
        place = status.st_dev, status.st_ino
        if place in cls._all:
            return cls._all[place]
        # Before the lock is taken: after an interrupt at any moment, an unknown lock of this process would look like
        # another one's. A claim that is dropped releases its lock.
        claim = cls(place, os.open(folder, os.O_RDONLY))
        try:
            fcntl.flock(claim.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            claim.close()
            raise
        if not cls._at_fork:
            os.register_at_fork(after_in_child=cls._give_up)
            cls._at_fork = True
        cls._all[place] = claim
        return claim

    def holds(self, folder: str) -> bool:
        """Return whether it is for the folder that is now at the path ``folder``."""
        status = os.stat(folder)
        return self.close.alive and self.place == (status.st_dev, status.st_ino)

    @classmethod
    def _give_up(cls) -> None:
        global _writing
        _writing = threading.RLock()  # a thread of the parent process, which is not in this one, may have held it
        for claim in list(cls._all.values()):
            claim.close()
        cls._all.clear()


def take_back(folder: str) -> None:
    """Give checkpoints that a killed process had moved aside their names again, if nothing has replaced them.

    A checkpoint that another process, which is alive, has just moved aside is left to that process.
    """
    if not _asides(folder):
        return
    with _writing:
        try:
            claim = Claim.of(folder)  # noqa: F841 - held to the end of this function
        except BlockingIOError:
            return
        except OSError:  # without locks
            pass
        for name, aside in _asides(folder):
            path, aside = os.path.join(folder, name), os.path.join(folder, aside)
            if not os.path.lexists(path):
                os.rename(aside, path)
            elif os.path.isdir(aside) and not os.path.islink(aside):
                shutil.rmtree(aside, ignore_errors=True)
            else:
                os.remove(aside)


def _asides(folder: str) -> list[tuple[str, str]]:
    """Return the names that checkpoints had before they were moved aside, and the names that they have now."""
    found = map(_ASIDE.fullmatch, os.listdir(folder) if os.path.isdir(folder) else [])
    return [(match[1], match[0]) for match in found if match is not None]
