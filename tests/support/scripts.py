"""Scripts that run in processes of their own, forked from one that has imported torch, which takes seconds."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from support.rank_processes import context


def start(script: Path, output: Path, *arguments: str) -> BaseProcess:
    """Start ``script`` in its folder. What it prints goes into the file ``output``."""
    process = context.Process(target=_main, args=(str(script), str(output), arguments))
    process.start()
    return process


def _main(script: str, output: str, arguments: tuple[str, ...]) -> None:
    os.chdir(os.path.dirname(script))
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores SIGINT
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)  # torch.compile's
    torch.set_num_threads(1)  # threads that wait for each other are slow on a busy machine
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115  # until exit
    runpy.run_path(script, run_name="__main__")
