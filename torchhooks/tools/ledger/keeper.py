"""The process that starts the processes of a script for ``check``, and leaves nothing of them.

It is forked once, and outlives ``check`` for as long as it takes to clean up: whatever ends ``check``, a Ctrl-C, an
error or SIGKILL, closes the socket between the two. Then it ends every process that the script has started, in whatever
session, and removes the scratch folder.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import torch

from torchhooks.common.errors import TorchHooksError
from torchhooks.tools.ledger.as_main import STACKS_SIGNAL

_POLL_SECS = 0.005
_GRACE_SECS = 60.0  # how long the other ranks may take to end after one has ended
_LEFT_SECS = 2.0  # how long what a process has left running may take to end by itself
_STACKS_SECS = 2.0  # how long a process may take to write where its threads stand
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux: the orphans below this process become its children
_PROCESSES = "/proc"  # of Linux
_SIZE = struct.Struct("!Q")


_IMPORTED_LATE = ("torch._dynamo", "torch.utils.tensorboard")
"""What optimizers import, and hooks that write curves: once here instead of in each fork."""


def can_fork() -> bool:
    """Return whether the script may run in forks that have imported torch: not after a process has seen a device."""
    return not torch.accelerator.is_available()


class CheckError(TorchHooksError):
    """Nothing can be said of the script, and why."""


class Start(NamedTuple):
    """The processes of a script to start together: one, or one for each rank.

    Args:
        become: called in each new process, which it makes that of the script, with the number of the rank.
        ranks: how many.
        over: a file by which a process that the script has started says that all are to be ended.
        secs: how long they may take.
        stacks: the beginning of the paths to which they write where their threads stand.
    """

    become: Callable[[int], object]
    ranks: int
    over: str
    secs: float
    stacks: str


class Ending(NamedTuple):
    """How the processes of a script have ended.

    Args:
        codes: the exit status of each rank, negative for a signal.
        is_over: whether a process that the script has started has made all runs that were asked for.
        is_late: whether they were ended because they took too long.
        stacks: where their threads stood then.
    """

    codes: list[int]
    is_over: bool = False
    is_late: bool = False
    stacks: Sequence[str] = ()


class Keeper:
    """The client of the process that keeps the processes of a script. A context manager.

    Args:
        folder: the scratch folder, which stays; by default a new one, which is removed.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = ""
        """The scratch folder."""
        self._stays = folder is not None
        if not hasattr(os, "fork"):
            raise CheckError("check starts the script in forks, which this operating system does not have")
        if can_fork():
            for name in _IMPORTED_LATE:
                importlib.import_module(name)
        self.process = 0
        """The number of the process that starts those of the script."""
        try:
            with _signals_wait() as before:  # a Ctrl-C between the two processes would leave one of them
                self._socket, theirs = socket.socketpair()
                self.process = os.fork()
                if not self.process:
                    # The other end must be open in check only: the end of check is what closes it.
                    self._socket.close()
                    _keep(theirs, folder, before)
                # Otherwise _receive() would wait for ever if the keeper was killed.
                theirs.close()
            self.folder = self._receive()
        # A Ctrl-C that waited is raised here, when the number of the keeper is known, so that close() ends it.
        except BaseException:
            self.close()
            raise

    def run(self, start: Start) -> Ending:
        """Start the processes of a script, and return how they have ended.

        Raises:
            CheckError: the process that keeps them was killed.
        """
        data = pickle.dumps(start)
        self._socket.sendall(_SIZE.pack(len(data)) + data)
        answer: Ending = self._receive()
        return answer

    def keep(self) -> None:
        """Have the scratch folder stay."""
        self._stays = True
        self._socket.sendall(_SIZE.pack(0))

    def close(self) -> None:
        """End everything that the script has started, and remove the scratch folder."""
        # The end of the connection tells the keeper to clean up. A second Ctrl-C waits until it has done so.
        with _signals_wait(), suppress(OSError):
            self._socket.close()
            if self.process:
                os.waitpid(self.process, 0)
            if not self._stays and self.folder:  # there is nothing left of it, unless the process was killed
                shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self) -> Any:
        data = _received(self._socket)
        if data is None:
            raise CheckError("the process that check starts the script in was killed")
        answer = pickle.loads(data)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@contextmanager
def _signals_wait() -> Iterator[dict[signal.Signals, Any]]:
    """Have what ends a process wait until the end of the block. Yield what handled it before."""
    # Not by a mask: a signal of the process comes to any thread that has none, and Python handles it in this one.
    came: list[int] = []
    before: dict[signal.Signals, Any] = {}
    # In any other thread, signal.signal() raises an error.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield before
    finally:
        for number, handler in before.items():
            # None stands for a handler that was not set from Python, and that Python cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        # After the handlers of before are back: a signal that came is now handled as if it came here.
        for number in map(signal.Signals, came):
            signal.raise_signal(number)


def _received(connection: socket.socket) -> bytes | None:
    """Return the next message, which is empty if the folder is to stay; ``None`` at the end of the connection."""
    with suppress(OSError):
        size = _exactly(connection, _SIZE.size)
        if size is not None:
            return _exactly(connection, _SIZE.unpack(size)[0])
    return None


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            return None
        data += more
    return data


# -- in the process that keeps ----------------------------------------------------------------------------------------


def _keep(connection: socket.socket, folder: str | None, handlers: dict[signal.Signals, Any]) -> NoReturn:
    """Start what is asked for, until the connection ends. Then leave nothing."""
    stays = folder is not None
    ignored = [number for number, handler in handlers.items() if handler is signal.SIG_IGN]  # by nohup, say
    try:
        os.setsid()  # a Ctrl-C in the terminal is for check, whose end this process waits for
        # The keeper has to outlive check. Only the end of the connection ends it.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        for file in range(3):  # a reader of the output of check waits for the end of check, not of this process
            os.dup2(os.open(os.devnull, os.O_RDWR), file)
        # Without this, a daemon of the script, whose parent has ended, would become a child of init, and nothing would
        # find it. The call is missing on other systems than Linux.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        if folder is None:
            folder = os.path.realpath(tempfile.mkdtemp(prefix="torchhooks-check-"))
        _send(connection, folder)
        while (data := _received(connection)) is not None:
            if not data:
                stays = True
                continue
            try:
                answer: object = _run(pickle.loads(data), connection, ignored)
            except _LeftError:
                break
            except Exception as error:
                answer = CheckError(f"the script could not be started: {error!r}")
            _send(connection, answer)
    finally:
        # First the processes, which may still write to the folder.
        with suppress(Exception):
            _end_all()
        if not stays and folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        # Not sys.exit(): the functions of atexit and the buffers of files in this fork are those of check.
        os._exit(0)


def _send(connection: socket.socket, answer: object) -> None:
    data = pickle.dumps(answer)
    with suppress(OSError):
        connection.sendall(_SIZE.pack(len(data)) + data)


class _LeftError(Exception):
    """``check`` has ended."""


def _run(start: Start, connection: socket.socket, ignored: Sequence[int]) -> Ending:
    with suppress(OSError):
        # An earlier process of the same training run may have left it, and it would end this one at once.
        os.remove(start.over)
    began = time.monotonic()
    running: dict[int, int] = {}  # the rank of each process
    leaders: list[int] = []
    ending = Ending([0] * start.ranks)
    first_end = None
    try:
        for rank in range(start.ranks):
            process = os.fork()
            if not process:
                _become(start.become, rank, connection, ignored)
            running[process] = rank
            leaders.append(process)
        while running:
            ended = _reap()
            for process in ended.keys() & running.keys():
                ending.codes[running.pop(process)] = ended[process]
                first_end = first_end or time.monotonic()
            is_late = time.monotonic() > began + start.secs
            if os.path.exists(start.over):
                return ending._replace(is_over=True)
            if is_late and running:
                return ending._replace(is_late=True, stacks=_stacks([*running], start.stacks))
            # A rank that waits for one that has ended may hang for ever.
            if first_end is not None and time.monotonic() > first_end + _GRACE_SECS:
                for rank in running.values():
                    ending.codes[rank] = -signal.SIGKILL
                return ending
            # This is the pause between two looks, which the end of check cuts short. MSG_PEEK leaves a message for
            # _keep().
            if select.select([connection], [], [], _POLL_SECS)[0] and not connection.recv(1, socket.MSG_PEEK):
                raise _LeftError
        return ending
    finally:
        for process in running:
            # A loop would answer SIGTERM with a save. None of these was waited for, so no other process has its number.
            os.kill(process, signal.SIGKILL)
        _end_all()
        # Without /proc, as on macOS, _end_all() finds no process.
        if not os.path.isdir(_PROCESSES):
            _end_sessions(leaders)


def _become(become: Callable[[int], object], rank: int, connection: socket.socket, ignored: Sequence[int]) -> NoReturn:
    """Make this process, which is a new fork, that of the script."""
    try:
        # Otherwise check would not see that the keeper was killed, as long as a process of the script is there.
        connection.close()
        # A session for each rank, by which _end_sessions() finds what the rank leaves.
        os.setsid()
        # What a process ignores, a new program that it becomes ignores too. The script gets what it has without check:
        # the keeper ignores these signals, and nohup may have check ignore some.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        become(rank)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _reap() -> dict[int, int]:
    """Return the children that have ended, also those that others have left, and their exit statuses."""
    ended = {}
    with suppress(ChildProcessError):
        while (waited := os.waitpid(-1, os.WNOHANG))[0]:
            ended[waited[0]] = os.waitstatus_to_exitcode(waited[1])
    return ended


def _end_all() -> None:
    """End what the script has started and, since it was killed, not ended: workers, a manager, a daemon."""
    deadline = time.monotonic() + _LEFT_SECS
    told: set[int] = set()
    while True:
        _reap()
        # Looked up each time, because a process may start others until it ends.
        left = _descendants()
        if not left:
            return
        is_late = time.monotonic() > deadline
        for process in left:
            if process not in told or is_late:
                told.add(process)
                with suppress(ProcessLookupError):
                    # The resource tracker of multiprocessing ignores SIGTERM. It removes what is in shared memory, and
                    # ends.
                    os.kill(process, signal.SIGKILL if is_late else signal.SIGTERM)
        if time.monotonic() > deadline + 10:
            return  # one that waits for a disk cannot be ended
        time.sleep(_POLL_SECS)


def _end_sessions(leaders: Sequence[int]) -> None:
    """End what is left in the sessions of ``leaders``, on a system that does not tell which processes there are."""
    deadline = time.monotonic() + _LEFT_SECS
    for leader in leaders:
        with suppress(OSError):  # usually, nothing is left
            os.killpg(leader, signal.SIGTERM)
            while time.monotonic() < deadline:
                time.sleep(_POLL_SECS)
                _reap()
                # Raises an error once the session is empty, which ends the wait.
                os.killpg(leader, 0)
            os.killpg(leader, signal.SIGKILL)


def _descendants() -> list[int]:
    """Return the processes below this one. Where the system does not tell, there are none."""
    children: dict[int, list[int]] = {}
    for path in Path(_PROCESSES).glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            # A dead child of another process is for that process to wait for. One of this process counts until _reap().
            if state != "Z" or int(parent) == os.getpid():
                children.setdefault(int(parent), []).append(int(path.parent.name))
    below = [*children.get(os.getpid(), ())]
    for process in below:
        below += children.get(process, ())  # extends the list that the loop iterates over
    return below


def _stacks(leaders: Sequence[int], prefix: str) -> list[str]:
    """Return where the threads of processes stand, and of what they have started that runs Python."""
    texts = []
    for process in [*leaders, *(each for each in _descendants() if each not in leaders)]:
        if STACKS_SIGNAL is None or not _catches(process, STACKS_SIGNAL):
            continue
        # All of them: a process that the script has forked has the handler of its parent, and writes to its file.
        files = sorted(Path(f"{prefix}-{process}").parent.glob(f"{os.path.basename(prefix)}-*"))
        sizes = {path: path.stat().st_size for path in files}
        with suppress(ProcessLookupError):
            os.kill(process, STACKS_SIGNAL)
        deadline, before = time.monotonic() + _STACKS_SECS, -1
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = sum(path.stat().st_size for path in files)
            # Nothing says when faulthandler is done: the files have grown, and then stayed as they are for one look.
            if now == before and now > sum(sizes.values()):
                break
            before = now
        texts += [text for path, size in sizes.items() if (text := path.read_text(errors="replace")[size:])]
    return texts


def _catches(process: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which would end it otherwise."""
    with suppress(OSError, ValueError):
        for line in Path(f"{_PROCESSES}/{process}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
