"""The processes of a script that ``check`` runs: new ones, forks of this one, or one for each rank."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from torchhooks.common.files import CHECK_PLAN, PLACES
from torchhooks.ledger.checked import ProcessPlan, Seen
from torchhooks.ledger.walk import Walked

_GRACE_SECS = 60.0  # how long the other ranks may take to end after one has ended
_LEFT_SECS = 2.0  # how long what a process has left running may take to end by itself
_WRITES = os.O_WRONLY | os.O_RDWR


class Ended(NamedTuple):
    """A process of the script that is over, or the processes of all ranks.

    Args:
        code: the exit status, negative for a signal; of several ranks, of the first that did not end with 0.
        printed: the lines that the first rank printed.
        errors: what that process wrote to the standard error.
        seen: what the first rank has seen of the script.
        steps: after how many runs it had to end.
    """

    code: int
    printed: list[str]
    errors: str
    seen: Seen
    steps: int


@dataclass
class Training:
    """One training run of the script, in one process or several, in a scratch folder of its own."""

    command: list[str]
    folder: str
    ranks: int = 1
    hash_seed: str | None = None
    """``PYTHONHASHSEED`` of a process of its own; without it, a fork of this process."""
    depth: int = 0
    epoch_items: int = 0
    """How many items a loop of ``until_stop`` with this depth takes at most; 0 for no limit."""
    printed: list[str] = field(default_factory=list)
    processes: list[Ended] = field(default_factory=list)

    @property
    def places(self) -> str:
        return os.path.join(self.folder, "places")

    @property
    def ledger(self) -> str:
        return os.path.join(self.places, "ledger-of-check")

    @property
    def _written(self) -> str:
        return os.path.join(self.folder, "written")

    def walked(self) -> Walked:
        """Return what the script held before its runs."""
        return Walked.of(os.path.join(self.folder, "walk.jsonl"))

    def written(self) -> list[str]:
        """Return the files that the script itself has opened for writing, in the processes that were forks."""
        path = Path(self._written)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [file for file in dict.fromkeys(lines) if not file.startswith(os.path.join(self.folder, ""))]

    def start(
        self,
        steps: int,
        moments: Sequence[int] = (),
        kill_after: int = 0,
        kill_by: signal.Signals = signal.SIGKILL,
    ) -> Ended:
        """Run the script until the run number ``steps``, or until it is killed after another one.

        What it holds is read before the runs ``moments``, and for a few seconds before each run.
        """
        os.makedirs(self.ledger, exist_ok=True)
        plan, seen, walk = (os.path.join(self.folder, name) for name in ("plan.json", "seen.json", "walk.jsonl"))
        if os.path.exists(seen):
            os.remove(seen)
        ProcessPlan(
            self.ledger, steps, seen, walk, [*moments], kill_after, int(kill_by), self.depth, self.epoch_items
        ).write(plan)
        variables = {CHECK_PLAN: plan, PLACES: self.places, "PYTHONUNBUFFERED": "1", "WANDB_MODE": "disabled"}
        if self.hash_seed is not None:
            variables["PYTHONHASHSEED"] = self.hash_seed
        # The files of what the processes print: by the number of the process, and the rank.
        outputs = os.path.join(self.folder, f"{len(self.processes) + 1}-")
        if self.ranks == 1 and self.hash_seed is None and can_fork():
            code, failed = run_in_fork(self.command, variables, f"{outputs}0", self._written), 0
        else:
            code, failed = run_in_new_processes(self.command, variables, outputs, self.ranks)
        printed, errors = (
            Path(path).read_text(encoding="utf-8", errors="replace")
            for path in (f"{outputs}0.out", f"{outputs}{failed}.err")
        )
        ended = Ended(code, printed.splitlines(), errors, Seen.read(seen), steps)
        self.printed += ended.printed
        self.processes.append(ended)
        return ended


def can_fork() -> bool:
    """Return whether the script may run in forks of this process: not after it has seen a device."""
    return hasattr(os, "fork") and not torch.accelerator.is_available()


def run_in_new_processes(command: list[str], variables: dict[str, str], outputs: str, ranks: int) -> tuple[int, int]:
    """Run ``command`` in a new process for each rank. Return how it ended, and the rank that ended so.

    What a rank prints goes to the files ``outputs``, which is the beginning of a path, ``RANK.out`` and ``RANK.err``.
    """
    environments = [{**os.environ, **variables, **each} for each in environments_of_ranks(ranks)]
    with ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        for rank, environment in enumerate(environments):
            out, errors = (stack.enter_context(open(f"{outputs}{rank}.{kind}", "wb")) for kind in ("out", "err"))
            each = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True
            )
            processes.append(each)
            stack.callback(_end_session, each.pid)
            stack.callback(each.wait)
            stack.callback(each.kill)  # after a Ctrl-C
        deadline = None
        while any(each.poll() is None for each in processes):
            time.sleep(0.01)
            if deadline is None and any(each.poll() is not None for each in processes):
                deadline = time.monotonic() + _GRACE_SECS
            if deadline is not None and time.monotonic() > deadline:
                for each in processes:
                    each.kill()
    codes = [each.wait() for each in processes]
    failed = next((rank for rank, code in enumerate(codes) if code), 0)
    return codes[failed], failed


def environments_of_ranks(ranks: int) -> list[dict[str, str]]:
    """Return what the environment of each rank has as torchrun would set it: nothing, if there is only one."""
    if ranks == 1:
        return [{}]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def run_in_fork(command: list[str], variables: dict[str, str], outputs: str, written: str) -> int:
    """Run the script of ``command`` in a fork of this process, which has imported torch already. Return how it ended.

    Ten times as fast as :func:`run_in_new_processes`. This process must not have used a device, or started threads of
    torch.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        _become(command, variables, outputs, written)
    try:
        _, status = os.waitpid(child, 0)
    except BaseException:  # a Ctrl-C
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    finally:
        _end_session(child)
    return os.waitstatus_to_exitcode(status)


def _end_session(leader: int) -> None:
    """End what a process of the script has started and, since it was killed, not ended: workers, a manager."""
    deadline = time.monotonic() + _LEFT_SECS
    with suppress(ProcessLookupError):  # usually, nothing is left
        os.killpg(leader, signal.SIGTERM)
        # The resource tracker of multiprocessing ignores SIGTERM. It removes what is in shared memory, and ends.
        while time.monotonic() < deadline:
            time.sleep(0.01)
            os.killpg(leader, 0)
        os.killpg(leader, signal.SIGKILL)


def _become(command: list[str], variables: dict[str, str], outputs: str, written: str) -> NoReturn:
    """Run the script of ``command`` in this process, which is a new fork, as Python would, and exit."""
    code = 1
    try:
        os.setsid()  # a Ctrl-C in the terminal is for the parent, which ends the whole session
        os.environ.update(variables)
        # A script that reads its standard input must find the same there in each process.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0, "r", closefd=False)
        for number, path in enumerate((f"{outputs}.out", f"{outputs}.err"), start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, "utf-8", closefd=False) for number in (1, 2))
        sys.argv = command[1:]
        sys.path[0] = os.path.dirname(os.path.abspath(command[1]))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        # As in a new process, the operating system seeds what the script does not seed.
        random.seed()
        np.random.seed()
        torch.seed()
        for handler in logging.getLogger().handlers[:]:
            logging.getLogger().removeHandler(handler)
        atexit._clear()  # noqa: SLF001 - the functions of this process, which clean up what its parent still needs
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # noqa: SLF001 - these, too
        # What the script itself leaves to the end is called.
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # noqa: SLF001
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]  # noqa: SLF001
        _note_files(written)
        code = _run(command[1])
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _note_files(written: str) -> None:
    """Have this process note in ``written`` the files in the current folder that it opens for writing."""
    noted = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    here = os.path.join(os.getcwd(), "")

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and isinstance(args[2], int) and args[2] & _WRITES:
            path = os.path.abspath(args[0])
            if path.startswith(here) and "__pycache__" not in path:
                os.write(noted, f"{path}\n".encode())

    save = torch.save

    def noted_save(obj: object, f: Any, *args: Any, **keywords: Any) -> None:
        if isinstance(f, (str, os.PathLike)):  # opened by C++, without an audit event
            note("open", (os.fspath(f), "w", os.O_WRONLY))
        save(obj, f, *args, **keywords)

    sys.addaudithook(note)
    torch.save = noted_save


def _run(script: str) -> int:
    # As runpy.run_path does. But what spawned workers send has the main module under its name in multiprocessing.
    module = ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    try:
        exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        # The fork ends without the end of the interpreter, which would call both.
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - waits for the script's threads
        atexit._run_exitfuncs()  # noqa: SLF001
    return 0
