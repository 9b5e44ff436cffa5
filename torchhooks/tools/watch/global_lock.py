"""A call that keeps Python's global lock, so that no thread can look: faulthandler writes the stacks, without the lock.

A timer of faulthandler counts the clock, also while the whole process is stopped by a signal or frozen with its
container. It then writes in the instant in which the process goes on. So what it has written counts only if no look
came for a while afterwards.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import subprocess
import sys
import threading
import weakref
from typing import IO

from torchhooks.common.files import fcntl, is_checked
from torchhooks.common.log import logger
from torchhooks.tools.run_record import LOCK_SECS, LOCK_STACKS
from torchhooks.tools.watch import guard

# Held while the timer, of which a process has one, is set or cancelled, so that a fork finds it in neither.
_timer = threading.Lock()
_is_set = False
_is_registered = False


class GlobalLockWatch:
    """Has the stacks written if it is not armed again in time.

    Args:
        folder: the folder of the training run, for the file with the stacks; ``None`` for none.
        rank: which rank this is.
        aborts: whether such a call ends the process.
        look_secs: how often it is armed.
    """

    def __init__(self, folder: str | None, rank: int, aborts: bool, look_secs: float) -> None:
        self._path = None if folder is None else os.path.join(folder, LOCK_STACKS % rank)
        self._aborts, self._look_secs = aborts, look_secs
        self._can_open = self._path is not None
        self._file: IO[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        # No other process can end the first one of a container, nor one on Windows, where none can be stopped either.
        # The executable of a frozen program is that program, and not Python.
        self._exits = aborts and (os.getpid() == 1 or fcntl is None or hasattr(sys, "frozen"))
        self._closed, self._pid = False, os.getpid()
        # Also if the loop is dropped: faulthandler would write into what gets the number of the closed file.
        self._owned = contextlib.ExitStack()
        if aborts and self._path is None:
            self._owned.callback(_cancel, self._pid)
        weakref.finalize(self, self._owned.close)

    def arm(self, secs: float) -> bytes:
        """Count ``secs`` seconds from now. Return the stacks of a call that took longer; usually there is none."""
        # stall_secs=math.inf leaves faulthandler's timer, of which a process has one, to the script.
        if secs == math.inf:
            return b""
        with _timer:  # also because a look would create the file that close() has just removed
            if self._closed:
                return b""
            stacks = self._taken()
            target = self._target()
            if self._aborts and not self._exits and not is_checked():
                self._tell_guard(secs + LOCK_SECS)  # until then, a process that goes on has looked
            if target is not None:
                _set(secs, target, self._exits)
            return stacks

    def close(self) -> bytes:
        """End the time, and remove the file. Return the stacks of a call that took too long until just now."""
        with _timer:
            self._closed = True
            stacks = self._taken() if os.getpid() == self._pid else b""
            self._owned.close()
            return stacks

    def _taken(self) -> bytes:
        """Return what faulthandler has written, and empty the file; nothing if it wrote after a pause."""
        if self._file is None:
            return b""
        written = os.fstat(self._file.fileno())
        if not written.st_size:
            return b""
        _cancel(self._pid)  # or it would write meanwhile
        with contextlib.suppress(OSError):  # the clock of the file system may not be that of this machine
            os.utime(self._file.name)
        passed = os.fstat(self._file.fileno()).st_mtime - written.st_mtime
        self._file.seek(0)
        stacks = self._file.read()
        self._file.seek(0)
        self._file.truncate()
        return stacks if passed > LOCK_SECS else b""

    def _target(self) -> IO[bytes] | IO[str] | None:
        """Return where faulthandler writes."""
        if self._path is None:
            return sys.__stderr__ if self._aborts else None
        if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:  # another process has removed it
            self._file = None
        if self._file is None and self._can_open and os.path.isdir(os.path.dirname(self._path)):
            _keep(self._path)
            try:
                # Stays open: faulthandler takes the number of an open file, to which it can write without the lock.
                self._file = open(self._path, "w+b", buffering=0)  # noqa: SIM115 - closed in _remove()
                self._owned.callback(_remove, self._file, self._pid)
            except OSError:  # a folder to read checkpoints from, perhaps
                self._can_open = False
        return self._file

    def _tell_guard(self, secs: float) -> None:
        """Have another process kill this one unless it is told again within ``secs`` seconds."""
        if self._guard is None:
            # -I and -S keep PYTHONPATH, sitecustomize and site-packages out of the guard, which begins at once.
            command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), f"{self._look_secs:g}"]
            try:
                self._guard = subprocess.Popen(
                    [*command, self._path or ""], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0
                )
            except OSError:  # no more processes, or Python is embedded in another program
                self._exits = True
                return
            assert self._guard.stdin is not None
            # A guard that is stopped reads nothing. A write that waits for it would hold _timer, for which a fork
            # waits.
            os.set_blocking(self._guard.stdin.fileno(), False)
            self._owned.callback(_end, self._guard, self._pid)
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):  # it was killed, or it is stopped and has much to read
            os.write(self._guard.stdin.fileno(), guard.LIMIT.pack(secs))


def _keep(path: str) -> None:
    """Keep the stacks that a killed process has left at ``path``."""
    with contextlib.suppress(OSError):
        if os.path.getsize(path):
            kept = path.replace(".txt", ".killed.txt")
            os.replace(path, kept)
            logger.warning("a call kept Python's global lock in the last process here: %s has its stacks", kept)


def _set(secs: float, file: IO[bytes] | IO[str], exits: bool) -> None:
    global _is_set, _is_registered
    # Python cannot remove what is registered for a fork, so this is done once, and only if there is a timer.
    if not _is_registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before_fork, after_in_parent=_timer.release, after_in_child=_timer.release)
        _is_registered = True
    _is_set = True
    faulthandler.dump_traceback_later(secs, file=file, exit=exits)


def _cancel(set_by: int) -> None:
    global _is_set
    if _is_set and os.getpid() == set_by:  # and not in a process that was forked from it
        _is_set = False
        faulthandler.cancel_dump_traceback_later()


def _before_fork() -> None:
    """Cancel the timer, until the next look of this process.

    The forked process has no thread of the timer, for whose end faulthandler would wait: when that process ends, or
    sets the timer itself.
    """
    _timer.acquire()
    _cancel(os.getpid())


def _remove(file: IO[bytes], opened_by: int) -> None:
    _cancel(opened_by)
    if os.getpid() == opened_by:
        with contextlib.suppress(OSError):
            # Another process may have removed this file, and have put its file in the same place.
            if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
                os.remove(file.name)
    file.close()


def _end(process: subprocess.Popen[bytes], started_by: int) -> None:
    if os.getpid() == started_by and process.stdin is not None:
        process.stdin.close()
        # A guard that is stopped does not see that its input has ended.
        process.kill()
        process.wait()
