"""Programs that are given as text, each in a new interpreter."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path


def run_program(program: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``program`` to its end, with ``arguments`` in ``sys.argv``, and return its exit code and what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
