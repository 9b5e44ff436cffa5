"""The training runs that ``check`` makes of a script: in forks of this process, in new ones, or one for each rank."""

from __future__ import annotations

import atexit
import getpass
import logging
import multiprocessing.util
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from torchhooks.common.files import PLACES
from torchhooks.common.user_code import is_users_file
from torchhooks.tools.ledger import CHECK_PLAN, as_main
from torchhooks.tools.ledger.checked import ProcessPlan, Seen, tell_of_saves
from torchhooks.tools.ledger.keeper import Keeper, Start, can_fork
from torchhooks.tools.ledger.lines import FOLDER
from torchhooks.tools.ledger.walk import Walked

_LONGEST_TMP = 70  # bytes: the name of a socket in a temporary folder may have 107


class Ended(NamedTuple):
    """A process of the script that is over, or the processes of all ranks.

    Args:
        code: the exit status, negative for a signal; of several ranks, of the first that did not end with 0. It is 0
            if the script has started the processes that made all runs, and was ended then.
        printed: the lines that the first rank printed.
        errors: what that process wrote to the standard error.
        seen: what the first rank has seen of the script.
        steps: after how many runs it had to end.
        secs: how long it took.
        stood: where the script stood if it was ended because it took too long; otherwise empty.
    """

    code: int
    printed: list[str]
    errors: str
    seen: Seen
    steps: int
    secs: float
    stood: str


def _tell_nothing(text: str, ended: Ended | None) -> None:
    pass


@dataclass
class Training:
    """One training run of the script, in one process or several, in a folder of the scratch folder."""

    script: list[str]
    """The path of a file, or ``-m`` and the name of a module, and the arguments of the script."""
    keeper: Keeper
    name: str
    ranks: int = 1
    hash_seed: str | None = None
    """``PYTHONHASHSEED`` of a process of its own; without it, a fork of this process."""
    depth: int = 0
    epoch_items: int = 0
    """How many items a loop of ``until_stop`` with this depth takes at most; 0 for no limit."""
    folders: Sequence[str] = ()
    """What the script writes to by torchhooks, as far as earlier training runs have shown it."""
    timeout: float = 600.0
    """How many seconds a process may take."""
    tell: Callable[[str, Ended | None], object] = _tell_nothing
    """Called with a line for people before a process, and again when it has ended."""
    printed: list[str] = field(default_factory=list)
    processes: list[Ended] = field(default_factory=list)

    @property
    def folder(self) -> str:
        return os.path.join(self.keeper.folder, self.name)

    @property
    def places(self) -> str:
        return self._file("places")

    @property
    def ledger(self) -> str:
        return os.path.join(self.places, "ledger-of-check")

    def runs_made(self) -> int:
        """Return how many runs the first rank has written to the ledger, also if it was killed."""
        path = Path(self.ledger, FOLDER, "rank-0.jsonl")
        return path.read_bytes().count(b'{"loop":') if path.exists() else 0

    def walked(self) -> Walked:
        """Return what the script held before its runs."""
        return Walked.of(self._file("walk.jsonl"))

    def written(self) -> list[str]:
        """Return the files that the script itself has opened for writing, and that are not in the scratch folder."""
        return [file for file in self._lines("written") if not file.startswith(os.path.join(self.keeper.folder, ""))]

    def connected(self) -> list[str]:
        """Return the other machines to which the script itself has opened a connection."""
        return self._lines("connected")

    def _file(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _lines(self, name: str) -> list[str]:
        path = Path(self._file(name))
        return [*dict.fromkeys(path.read_text(encoding="utf-8").splitlines())] if path.exists() else []

    def start(
        self,
        steps: int,
        moments: Sequence[int] = (),
        kill_after: int = 0,
        kill_by: signal.Signals = signal.SIGKILL,
        line: str = "",
    ) -> Ended:
        """Run the script until the run number ``steps``, or until it is killed after another one.

        What it holds is read before the runs ``moments``, and for a few seconds before each run. ``line`` says for
        people what this process is for.
        """
        os.makedirs(self.ledger, exist_ok=True)
        self.tell(line, None)
        began = time.monotonic()
        plan = ProcessPlan(
            ledger=self.ledger,
            steps=steps,
            seen=self._file("seen.json"),
            walk=self._file("walk.jsonl"),
            moments=[*moments],
            kill_after=kill_after,
            kill_by=int(kill_by),
            depth=self.depth,
            epoch_items=self.epoch_items,
            keeper=self.keeper.process,
            over=self._file("over"),
            places=self.places,
            folders=[*self.folders],
            written=self._file("written"),
            connected=self._file("connected"),
            stacks=self._file("stacks"),
            began=time.time(),
        )
        # The process before this one has written it. What it had seen is not what this one has, and its number there
        # would look like that of a second first rank (see Cut).
        if os.path.exists(plan.seen):
            os.remove(plan.seen)
        plan.write(self._file("plan.json"))
        # The files of what the processes print: by the number of the process, and the rank.
        outputs = self._file(f"{len(self.processes) + 1}-")
        common = self._variables()
        variables = [common | of_rank for of_rank in environments_of_ranks(self.ranks)]
        run = become_fork if self._is_forked() else become_new
        become = partial(run, self.script, variables, outputs)
        ending = self.keeper.run(Start(become, self.ranks, plan.over, self.timeout, plan.stacks))
        failed = next((rank for rank, code in enumerate(ending.codes) if code), 0)
        printed, errors = (
            Path(path).read_text(encoding="utf-8", errors="replace") if os.path.exists(path) else ""
            for path in (f"{outputs}0.out", f"{outputs}{failed}.err")
        )
        code = 0 if ending.is_over else ending.codes[failed]
        stood = _where(ending.stacks) if ending.is_late else ""
        secs = time.monotonic() - began
        ended = Ended(code, printed.splitlines(), errors, Seen.read(plan.seen), steps, secs, stood)
        self.printed += ended.printed
        self.processes.append(ended)
        self.tell(line, ended)
        return ended

    def _is_forked(self) -> bool:
        return self.ranks == 1 and self.hash_seed is None and can_fork()

    def _variables(self) -> dict[str, str]:
        # Nothing leaves the machine, so W&B is switched off, and MLflow gets a file instead of a server. Without
        # buffers, a process that is killed loses nothing that it has printed, which is compared.
        variables = {
            CHECK_PLAN: self._file("plan.json"),
            PLACES: self.places,
            "PYTHONUNBUFFERED": "1",
            "WANDB_MODE": "disabled",
        }
        if re.match(r"(https?|databricks)\b", os.environ.get("MLFLOW_TRACKING_URI", "")):
            variables["MLFLOW_TRACKING_URI"] = f"sqlite:///{self._file('mlflow.db')}"
        if self.hash_seed is not None:
            variables["PYTHONHASHSEED"] = self.hash_seed
        # A killed process leaves its temporary files. What torch.compile has compiled is not made again for each.
        temporary = self._file("tmp")
        if len(os.fsencode(temporary)) <= _LONGEST_TMP:
            os.makedirs(temporary, exist_ok=True)
            variables["TMPDIR"] = temporary
            with suppress(KeyError, OSError):  # a user without a name
                # The folder that torch itself takes without TMPDIR, where earlier processes of the user may have
                # compiled.
                user = re.sub(r"[\\/:*?\"<>|]", "_", getpass.getuser())
                compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
                variables["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled)
        return variables


def environments_of_ranks(ranks: int) -> list[dict[str, str]]:
    """Return what the environment of each rank has as torchrun would set it: nothing, if there is only one."""
    if ranks == 1:
        return [{}]
    with socket.socket() as listening:
        # The system picks a port that is free. It is closed again, because the first rank listens there.
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    # As torchrun does. Another number of threads may add up in another order, and round in another way.
    common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


# -- in the processes of the script -----------------------------------------------------------------------------------


def become_new(script: list[str], variables: Sequence[dict[str, str]], outputs: str, rank: int) -> None:
    """Make this process a new Python that runs the script."""
    _open_files(outputs, rank)
    command = [sys.executable, as_main.__file__, *script]
    # In place of this fork, and not as its child: the keeper waits for this number, and sends signals to it.
    os.execve(sys.executable, command, {**os.environ, **variables[rank]})


def become_fork(script: list[str], variables: Sequence[dict[str, str]], outputs: str, rank: int) -> None:
    """Run the script in this process, which has imported torch already, and exit.

    Ten times as fast as :func:`become_new`. This process must not have used a device, or started threads of torch.
    """
    code = 1
    try:
        os.environ.update(variables[rank])
        # This process has looked up its temporary folder before, and the script has another TMPDIR.
        tempfile.tempdir = None
        _open_files(outputs, rank)
        sys.stdin = os.fdopen(0, "r", closefd=False)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, "utf-8", closefd=False) for number in (1, 2))
        # As in a new process, the operating system seeds what the script does not seed.
        random.seed()
        np.random.seed()
        torch.seed()
        # As long as the root logger has a handler, logging.basicConfig() of the script does nothing.
        for handler in logging.getLogger().handlers[:]:
            logging.getLogger().removeHandler(handler)
        atexit._clear()  # noqa: SLF001 - the functions of this process, which clean up what its parent still needs
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # noqa: SLF001 - these, too
        # What the script itself leaves to the end is called.
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # noqa: SLF001
        # multiprocessing has registered its function at its import, and _clear() has removed it.
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]  # noqa: SLF001
        as_main.prepare(vars(ProcessPlan.read(os.environ[CHECK_PLAN])))
        # After prepare(), which says where C code writes. In a new process, the first loop does this: only then is
        # torch sure to be imported.
        tell_of_saves()
        code = as_main.run(script)
        # The fork ends without the end of the interpreter, which would call both.
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - waits for the script's threads
        atexit._run_exitfuncs()  # noqa: SLF001
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _open_files(outputs: str, rank: int) -> None:
    # A script that reads its standard input must find the same there in each process.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, kind in enumerate(("out", "err"), start=1):
        os.dup2(os.open(f"{outputs}{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)


# -- where a script stands --------------------------------------------------------------------------------------------


def _where(stacks: Sequence[str]) -> str:
    """Return where scripts stand that have written ``stacks``: the line of the script, and what it calls there."""
    places = dict.fromkeys(filter(None, map(_place_of, stacks)))
    return "; ".join(places) or "at a place that cannot be told"


_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')  # as faulthandler writes it


def _place_of(stack: str) -> str:
    # A signal usually comes to the main thread, in which the script runs. faulthandler calls it the current one.
    _, _, current = stack.rpartition("Current thread")
    frames = [match.groups() for match in map(_FRAME.match, current.partition("\n\n")[0].splitlines()) if match]
    if not frames:
        return ""
    file, _, function = frames[0]
    inner = f"in {function} of {os.path.basename(file)}"
    of_user = next((frame for frame in frames if is_users_file(frame[0])), None)
    if of_user is None:
        return inner
    place = f"at line {of_user[1]} of {os.path.basename(of_user[0])} ({of_user[2]})"
    return place if of_user is frames[0] else f"{place}, {inner}"
