"""Processes forked from one server for all tests, which has imported torch, pytest and other large modules once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "torch._dynamo",  # imported by the first optimizer
        "torchhooks",
        "torchhooks.summary.tensorboard",  # imported by the first event file
        # Imported by files of tests, of which a process calls a function.
        "hypothesis",
        "pytest",
        "tensorboard.backend.event_processing.plugin_event_accumulator",
        "support.defects",
        "support.patterns",
        "support.rank_processes",
        "support.rank_training",
    ]
)


class Ended(NamedTuple):
    """How a process ended: its exit code, negative if it died of a signal, and what it printed."""

    code: int | None
    output: str


def call(function: Callable[..., object], *arguments: Any, ignored: tuple[str, ...] = ()) -> Ended:
    """Call the function in a new process, wait for its end, and return how it ended. See :func:`start`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        process = start(output, function, *arguments, ignored=ignored)
        process.join()
        return Ended(process.exitcode, output.read_text())


def start(output: Path, function: Callable[..., object], *arguments: Any, ignored: tuple[str, ...] = ()) -> BaseProcess:
    """Start a process that calls ``function(*arguments)`` and prints into the file ``output``.

    In the process, warnings are errors, except for user warnings that begin with one of the texts in ``ignored``.
    """
    output.touch()
    process = context.Process(target=_main, args=(str(output), function, arguments, ignored))
    process.start()
    return process


def _main(output: str, function: Callable[..., object], arguments: tuple[Any, ...], ignored: tuple[str, ...]) -> None:
    begin(output)
    warnings.simplefilter("error")
    for text in ignored:
        warnings.filterwarnings("ignore", text, UserWarning)
    function(*arguments)


def begin(output: str) -> None:
    """Prepare a process that was forked from the server, and let it and its children print into the file ``output``."""
    threads = Path(f"/proc/{os.getppid()}/task")
    assert not threads.exists() or len(list(threads.iterdir())) == 1  # a fork copies only the thread that makes it
    gc.freeze()  # so that a collection does not copy the memory that is shared with the server
    # That of the server would otherwise be the default, and the workers of a DataLoader import torch again.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)  # threads that wait for each other are slow on a busy machine
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    system: Any = sys  # __stderr__ is final for type checkers
    system.stdout, system.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115  # until exit
    system.__stderr__ = system.stderr
