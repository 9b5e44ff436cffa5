"""The command ``nan`` of ``python -m torchhooks``."""

from __future__ import annotations

import glob
import os
from typing import Any

from torchhooks.autopsy.request import NAME as NAN
from torchhooks.autopsy.request import read
from torchhooks.common.errors import CheckpointError


def add_commands(commands: Any) -> None:
    """Add the command to the subparsers ``commands`` of ``python -m torchhooks``."""
    command = commands.add_parser("nan", help="print where a NaN came from, as far as that is known")
    command.add_argument("path", help="the checkpoint_dir of the training run")
    command.set_defaults(call=lambda given: _nan(given.path))


def _nan(path: str) -> int:
    request = read(path)
    if request is not None:
        print(
            f"{os.path.join(path, NAN)}: {request['message']}. Start the script again to find out where it came from."
        )
    reports = glob.glob(os.path.join(glob.escape(path), "nan-*", "report.md"))
    for report in sorted(reports, key=os.path.getmtime)[-1:]:
        with open(report, encoding="utf-8") as file:
            print(file.read(), end="")
    if request is None and not reports:
        raise CheckpointError(f"{path} has neither {NAN} nor a report: no process that saves there has found a NaN")
    return 0
