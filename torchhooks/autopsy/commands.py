"""The commands ``nan`` and ``replay`` of ``python -m torchhooks``."""

from __future__ import annotations

import glob
import os
import shlex
from typing import Any

from torchhooks.autopsy.request import ASIDE, checkpoint_before, folder_of, read
from torchhooks.autopsy.request import NAME as NAN
from torchhooks.common.checks import whole_number
from torchhooks.common.errors import CheckpointError


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers ``commands`` of ``python -m torchhooks``."""
    command = commands.add_parser("nan", help="print where a NaN came from, as far as that is known")
    command.add_argument("path", help="the checkpoint_dir of the training run")
    command.set_defaults(call=lambda given: _nan(given.path))
    command = commands.add_parser("replay", help="print the command that stops before a step, in a debugger")
    command.add_argument("path", help="the checkpoint_dir of the training run")
    command.add_argument("--step", type=int, required=True, help="the global step")
    command.set_defaults(call=lambda given: _replay(given.path, given.step))


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


def _replay(path: str, step: int) -> int:
    whole_number(step, "step", 1)
    command, where = "the command that starts the script", "in its folder"
    for request in (read(path), read(folder_of(path, step), ASIDE)):
        if request is not None:
            command, where = shlex.join(request["environment"]["command"]), f"in {request['environment']['folder']}"
    before = checkpoint_before(path, step)
    print(f"TORCHHOOKS_STOP_BEFORE={step} {command}")
    print(f"Run this {where}. The loop calls breakpoint() before the run that makes step {step}.")
    print(f"It begins with {'no checkpoint' if before is None else before.path}, and makes the runs up to there.")
    return 0
