"""Where the files of the project are, and how a process finds them."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "tests" / "data" / "tf_traces"


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that imports torchhooks and ``support``, with more ``variables``."""
    path = os.pathsep.join(map(str, [ROOT, ROOT / "tests"]))
    return {**os.environ, "PYTHONPATH": path, **variables}
