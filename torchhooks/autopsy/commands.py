"""The commands ``nan``, ``replay`` and ``skip`` of ``python -m torchhooks``."""

from __future__ import annotations

import glob
import os
import shlex
from typing import Any

from torchhooks.autopsy.request import ASIDE, checkpoint_before, folder_of, put_aside, read, write_json
from torchhooks.autopsy.request import NAME as NAN
from torchhooks.checkpoints.saver import list_checkpoints
from torchhooks.common.checks import whole_number
from torchhooks.common.errors import CheckpointError
from torchhooks.position.passing import NAME as SKIPS
from torchhooks.position.passing import Steps, read_skips


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers ``commands`` of ``python -m torchhooks``."""
    command = commands.add_parser("nan", help="print where a NaN came from, as far as that is known")
    command.add_argument("path", help="the checkpoint_dir of the training run")
    command.set_defaults(call=lambda given: _nan(given.path))
    command = commands.add_parser("replay", help="print the command that stops before a step, in a debugger")
    command.add_argument("path", help="the checkpoint_dir of the training run")
    command.add_argument("--step", type=int, required=True, help="the global step")
    command.set_defaults(call=lambda given: _replay(given.path, given.step))
    command = commands.add_parser("skip", help="pass over the items of some runs when the script resumes")
    command.add_argument("path", help="the checkpoint_dir of the training run")
    command.add_argument("--steps", required=True, metavar="FIRST-LAST", help="such as 81230-81240, or 47")
    command.set_defaults(call=lambda given: _skip(given.path, given.steps))


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


def _skip(path: str, given: str) -> int:
    first, _, last = given.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal() or not 2 <= int(first) <= int(last or first):
        raise CheckpointError(f"--steps {given}: give two steps, 2 or more, the smaller first, such as 81230-81240")
    steps = Steps(int(first), int(last or first))
    earlier = read_skips(path)
    for other in earlier:
        if other.first <= steps.last and steps.first <= other.last:
            raise CheckpointError(f"--steps {given}: {os.path.join(path, SKIPS)} names {other.name} already")
    newest = next(reversed(list_checkpoints(path)), None)
    if newest is None or newest.step >= steps.first:
        found = "no checkpoint" if newest is None else f"{newest.name}, which comes after them,"
        raise CheckpointError(
            f"--steps {given}: {path} has {found} to resume from: move the checkpoints of step {steps.first} and later "
            "away, so that the training run continues before it"
        )
    write_json(os.path.join(path, SKIPS), {"steps": [*earlier, steps]})
    request = read(path)
    if request is not None:  # its runs are made again in vain
        put_aside(path, request)
    count = steps.last - steps.first + 1
    items = f"item of step {steps.first}" if count == 1 else f"{count} items of steps {steps.name}"
    print(f"Start the script again: from {newest.path} on, it passes over the {items}.")
    return 0
