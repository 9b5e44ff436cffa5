"""Scripts: those in examples/ as modules, and any others in processes forked from one that has imported torch."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import warnings
from pathlib import Path
from types import ModuleType

from support.packages import import_or_skip_all
from support.paths import ROOT
from support.processes import Process, prepare, start_program


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


def start(script: Path, output: Path, *arguments: str) -> Process:
    """Start ``script`` in its folder. What it prints goes into the file ``output``."""
    return start_program(f"import support.scripts; support.scripts.run({str(script)!r})", *arguments, output=output)


def run(script: str) -> None:
    """Do in the new process what :func:`start` says."""
    prepare()
    folder = os.path.dirname(script)
    os.chdir(folder)
    sys.argv[0] = script
    sys.path.insert(0, folder)
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)  # torch.compile's
    runpy.run_path(script, run_name="__main__")
