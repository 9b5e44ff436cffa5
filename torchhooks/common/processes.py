"""Which process a number means, and whether it is still there.

The system gives the number of a process that has ended to another one, and each container counts from 1. So a process
is known by its number, by when it began, and by the system in which both have their meaning.
"""

from __future__ import annotations

import functools
import os
import re
import socket

from torchhooks.common.files import fcntl

STOPPED = ("T", "t")
"""What :func:`process_state` returns of a process that a signal or a debugger has stopped."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def process_name(pid: int) -> str:
    """Return how temporary names tell of the process ``pid`` of this machine."""
    return f"{host_in_names()}-{pid}-{start_time(pid)}"


def host_in_names() -> str:
    """Return the name of this machine without the signs that separate it in a name."""
    return re.sub(r"\W", "_", socket.gethostname())


def start_time(pid: int) -> int:
    """Return when the process ``pid`` began, in ticks of the machine's clock: 0 if that is not known, -1 if it is gone.

    Without ``/proc``, as on macOS, only its number is looked up; on Windows, every process but this one counts as gone.
    """
    fields = _stat(pid)
    if fields:
        # The number 19 is field 22 in "man proc": the number and the name are cut off, and this counts from 0. A dead
        # process has an entry too, until its parent has waited for it.
        return -1 if fields[0] in ("Z", "X") else int(fields[19])
    # The system has /proc, so it is the process that is missing.
    if os.path.exists("/proc/self/stat"):
        return -1
    if pid == os.getpid():
        return 0
    if fcntl is None:  # Windows
        return -1  # os.kill() would end it
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return -1
    # A process of another user, which os.kill() may not signal. So it exists.
    except OSError:
        pass
    return 0


def process_state(pid: int) -> str:
    """Return the letter by which ``/proc`` tells the state of the process ``pid``, ``"T"`` if a signal has stopped it.

    Empty if it is gone, or without ``/proc``.
    """
    return next(iter(_stat(pid)), "")


def _stat(pid: int) -> list[str]:
    """Return what follows the name in the ``stat`` of a process; nothing if it is gone, or without ``/proc``."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()  # the name may have spaces and parentheses
    except OSError:
        return []


@functools.cache
def system_id() -> str | None:
    """Return what tells where the number of a process has its meaning: the boot of the machine, and the container.

    ``None`` if that cannot be found out, as without ``/proc``.
    """
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def is_alive(pid: int, began: int, system: str | None, host: str) -> bool | None:
    """Return whether a process is there; ``None`` if that cannot be seen from here.

    Args:
        pid: its number.
        began: its :func:`start_time`; 0 if that is not known.
        system: its :func:`system_id`.
        host: the name of its machine, by which a process without ``system`` is known.
    """
    # The number of a process means nothing in another container or on another machine, and a folder that several of
    # them share has the records of all.
    here = system_id()
    is_here = host == socket.gethostname() if None in (system, here) else system == here
    if not is_here or (fcntl is None and pid != os.getpid()):
        return None
    now = start_time(pid)
    return now >= 0 and (not began or not now or now == began)
