"""Processes forked from one server for all tests, which has imported torch, pytest and other large modules once.

:func:`start` and :func:`call` call a function of a test, :func:`start_program` and :func:`fork_program` run a program
that is given as text, and :func:`run_program` is for the few that need a new interpreter. The processes of pytest-xdist
share the server, which the one that distributes the tests starts.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from support.paths import environment

_ADDRESS = "TORCHHOOKS_TESTS_FORK_SERVER"


class Request(NamedTuple):
    """What the server is asked for: a process that runs ``program``, with these files as its standard ones."""

    program: str
    arguments: list[str]
    files: list[str]
    folder: str
    environment: dict[str, str]
    path: list[str]
    new_session: bool


class Process:
    """A process that was forked from the server.

    Attributes:
        pid: its number.
        output: the file into which it prints.
    """

    def __init__(self, request: Request) -> None:
        start_server()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ[_ADDRESS])
        self._connection.sendall(pickle.dumps(request))
        self._answers = self._connection.makefile("r")
        self.pid = int(self._answers.readline())
        weakref.finalize(self, self._connection.close)  # of a process that nobody waits for
        self.output = Path(request.files[1])
        self._exitcode: int | None = None

    @property
    def exitcode(self) -> int | None:
        """How the process ended, negative if it died of a signal; ``None`` as long as it runs."""
        self.join(0)
        return self._exitcode

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, for at most ``timeout`` seconds."""
        if self._exitcode is None and select.select([self._connection], [], [], timeout)[0]:
            self._exitcode = int(self._answers.readline())
            self._answers.close()
            self._connection.close()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def send_signal(self, number: signal.Signals) -> None:
        if self.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        self.join()


class Ended(NamedTuple):
    """How a process ended: its exit code, negative if it died of a signal, and what it printed."""

    code: int | None
    output: str


def start_server() -> None:
    """Start the server, unless there is one. Other processes find it by a variable of the environment."""
    if _ADDRESS in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="torchhooks-")  # short, since so is the address of a socket
    address = os.path.join(folder.name, "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)  # a client waits until the server has imported everything
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env=environment(),
        )
    os.environ[_ADDRESS] = address

    @atexit.register
    def end() -> None:
        os.environ.pop(_ADDRESS, None)
        server.communicate()  # closes its stdin, at which it ends
        folder.cleanup()


# -- functions of tests -----------------------------------------------------------------------------------------------


def call(function: Callable[..., object], *arguments: Any, ignored: tuple[str, ...] = ()) -> Ended:
    """Call the function in a new process, wait for its end, and return how it ended. See :func:`start`."""
    with tempfile.TemporaryDirectory() as folder:
        process = start(Path(folder, "output"), function, *arguments, ignored=ignored)
        process.join()
        return Ended(process.exitcode, process.output.read_text())


def start(
    output: Path, function: Callable[..., object], *arguments: Any, ignored: tuple[str, ...] | None = ()
) -> Process:
    """Start a process that calls ``function(*arguments)`` and prints into the file ``output``.

    In the process, warnings are errors, except for user warnings that begin with one of the texts in ``ignored``; with
    ``None``, no warning is one.
    """
    called = pickle.dumps((function, arguments, ignored))
    program = f"import pickle, support.processes; support.processes.run(*pickle.loads({called!r}))"
    return start_program(program, output=output)


def run(function: Callable[..., object], arguments: tuple[Any, ...], ignored: tuple[str, ...] | None) -> None:
    """Do in the new process what :func:`start` says."""
    prepare()
    if ignored is not None:
        warnings.simplefilter("error")
    for text in ignored or ():
        warnings.filterwarnings("ignore", text, UserWarning)
    function(*arguments)
    main: Any = sys.modules["__main__"]
    main.only_exit = True  # see fork_server.py


def prepare() -> None:
    """Prepare a process that was forked from the server for training."""
    import torch  # not by the process that starts the server: it would take a second more

    threads = Path(f"/proc/{os.getppid()}/task")
    assert not threads.exists() or len(list(threads.iterdir())) == 1  # a fork copies only the thread that makes it
    # That of the server would otherwise be the default, and the workers of a DataLoader import torch again.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)  # threads that wait for each other are slow on a busy machine
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # what is printed before a kill is not lost


# -- programs ---------------------------------------------------------------------------------------------------------


def start_program(
    program: str, *arguments: str, output: Path, errors: Path | None = None, new_session: bool = False
) -> Process:
    """Start a process that runs ``program``, with ``arguments`` in ``sys.argv``, in the current folder.

    What it prints goes into the file ``output``, and to ``errors`` if that is another one.
    """
    errors = output if errors is None else errors
    for file in (output, errors):
        file.write_bytes(b"")
    return Process(
        Request(
            textwrap.dedent(program),
            ["-c", *arguments],
            [os.devnull, str(output), str(errors)],
            os.getcwd(),
            dict(os.environ),
            [*sys.path],
            new_session,
        )
    )


def fork_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Do the same to its end, and return its exit code and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = start_program(program, *arguments, output=output, errors=errors)
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(program, process.exitcode, output.read_text(), errors.read_text())


def run_program(program: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``program`` in a new interpreter, which takes more than a second to import torch."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
