"""Scripts: those in examples/ as modules, and any others in processes forked from one that has imported torch."""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
import sys
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

from support.packages import import_or_skip_all
from support.paths import ROOT
from support.processes import begin, context


def example(name: str) -> ModuleType:
    """Return the script ``examples/name.py`` as a module of its own."""
    path = ROOT / "examples" / f"{name}.py"
    import_or_skip_all(path.read_text(encoding="utf-8"))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
