"""A program that kills the process that started it, once that no longer says that it can run Python.

``python guard.py PID SECS STACKS`` reads from its standard input how many seconds may pass until it is told again,
counts them in steps of ``SECS``, and ends when that process does. ``STACKS`` is the file that its message names. Time
in which either process is stopped or frozen does not count: this one then counts no steps either.

It imports nothing of torchhooks: without torch it takes a few megabytes, and is there at once.
"""

import contextlib
import os
import select
import signal
import struct
import sys

LIMIT = struct.Struct("d")
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")  # a signal to the whole process group


def main(pid: int, look_secs: float, stacks: str) -> None:
    # The training process may handle such a signal and save for minutes. It needs its guard until it ends.
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    limit, quiet = float("inf"), 0.0
    while os.getppid() == pid:
        if select.select([0], [], [], look_secs)[0]:
            said = os.read(0, LIMIT.size * 512)
            if not said:
                return  # it has ended, or its loop has
            # Only the last number counts. A pipe never divides a write of eight bytes, so the last eight are whole.
            (limit,) = LIMIT.unpack(said[-LIMIT.size :])
            quiet = 0.0
        elif not _is_stopped(pid):
            quiet += look_secs
            if quiet > limit:
                _kill(pid, quiet, stacks)
                return


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    return False


def _kill(pid: int, quiet: float, stacks: str) -> None:
    where = f"{stacks} has its stacks" if stacks else "stderr has its stacks"
    print(
        f"CRITICAL torchhooks: a call has kept Python's global lock in process {pid} for {quiet:.0f} s, and "
        f'stall_action is "abort": killing it; {where}',
        file=sys.stderr,
        flush=True,
    )
    # A handler in Python, such as one of the loop for SIGTERM, would wait for the lock.
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
