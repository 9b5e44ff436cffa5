"""Real ranks: processes with gloo on the loopback interface, forked from a server that has imported torch once."""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support.processes import start

DEADLINE_SECS = 90.0


class Ended(NamedTuple):
    """How the process of one rank ended: its exit code, what its function returned, and what it printed."""

    code: int | None
    value: Any
    output: str


def run_ranks(folder: Path, size: int, function: Callable[..., Any], *arguments: Any) -> list[Ended]:
    """Call ``function(rank, *arguments)`` in ``size`` processes with a process group, and return how each ended.

    A process that hangs prints its stacks and ends with code 1, or is killed.
    """
    parts = (str(folder), size, function, arguments)
    processes = [start(folder / f"output-{rank}", _main, rank, *parts, ignored=None) for rank in range(size)]
    ended, deadline = [], time.monotonic() + 1.5 * DEADLINE_SECS
    for rank, process in enumerate(processes):
        process.join(max(deadline - time.monotonic(), 0.1))
        if process.is_alive():
            # The watch of a loop has replaced the timer below, so faulthandler prints the stacks at this signal.
            process.send_signal(signal.SIGABRT)
            process.join(5)
            process.kill()
        returned = folder / f"returned-{rank}"
        value = pickle.loads(returned.read_bytes()) if returned.exists() else None
        ended.append(Ended(process.exitcode, value, process.output.read_text()))
    return ended


def _main(rank: int, folder: str, size: int, function: Callable[..., Any], arguments: Any) -> None:
    logging.basicConfig(level=logging.INFO, force=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    faulthandler.enable(file=2)
    faulthandler.dump_traceback_later(DEADLINE_SECS, exit=True, file=2)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.distributed.barrier()  # a rank that ended at once could leave another one without a connection
    value = pickle.dumps(function(rank, *arguments))
    unfinished = Path(folder, f"returning-{rank}")
    unfinished.write_bytes(value)
    unfinished.rename(Path(folder, f"returned-{rank}"))
