"""Real ranks: processes with gloo on the loopback interface, forked from a server that has imported torch once."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support.processes import begin, context

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
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = []
    for rank, (_, writer) in enumerate(pipes):
        parts = (str(folder), rank, size, writer, function, arguments)
        processes.append(context.Process(target=_main, args=parts))
        processes[-1].start()
        writer.close()
    ended, deadline = [], time.monotonic() + 1.5 * DEADLINE_SECS
    for rank, (process, (reader, _)) in enumerate(zip(processes, pipes, strict=True)):
        process.join(max(deadline - time.monotonic(), 0.1))
        if process.exitcode is None and process.pid is not None:
            # The watch of a loop has replaced the timer below, so faulthandler prints the stacks at this signal.
            os.kill(process.pid, signal.SIGABRT)
            process.join(5)
            process.kill()
            process.join()
        code = process.exitcode
        try:
            value = reader.recv() if reader.poll() else None
        except EOFError:  # the process was killed
            value = None
        ended.append(Ended(code, value, (folder / f"output-{rank}").read_text()))
    return ended


def _main(folder: str, rank: int, size: int, writer: Any, function: Callable[..., Any], arguments: Any) -> None:
    begin(os.path.join(folder, f"output-{rank}"))
    logging.basicConfig(level=logging.INFO, force=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    faulthandler.enable(file=2)
    faulthandler.dump_traceback_later(DEADLINE_SECS, exit=True, file=2)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.distributed.barrier()  # a rank that ended at once could leave another one without a connection
    try:
        writer.send(function(rank, *arguments))
    except BaseException:
        traceback.print_exc()
        raise
