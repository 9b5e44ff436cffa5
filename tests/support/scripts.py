"""Scripts that run in processes of their own, forked from one that has imported torch, which takes seconds."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path

from support.processes import begin, context


def start(script: Path, output: Path, *arguments: str) -> BaseProcess:
    """Start ``script`` in its folder. What it prints goes into the file ``output``."""
    process = context.Process(target=_main, args=(str(script), str(output), arguments))
    process.start()
    return process


def _main(script: str, output: str, arguments: tuple[str, ...]) -> None:
    os.chdir(os.path.dirname(script))
    begin(output)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores SIGINT
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)  # torch.compile's
    runpy.run_path(script, run_name="__main__")
