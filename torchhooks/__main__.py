"""The command ``python -m torchhooks``: lists, verifies and exports checkpoints, and says where a NaN came from.

``checkpoints PATH`` is about checkpoints. ``nan``, ``replay`` and ``skip`` are about a training run with a NaN: they
print the report of an autopsy, print how to stop before a step, and have the items of some runs passed over.
"""

from __future__ import annotations

import argparse
import glob
import os
import shlex
import sys
import time
from collections.abc import Sequence

import torch

from torchhooks.autopsy.request import ASIDE, checkpoint_before, folder_of, put_aside, read, write_json
from torchhooks.autopsy.request import NAME as NAN
from torchhooks.checkpoints.files import Checkpoint, inspect, is_checkpoint, verify
from torchhooks.checkpoints.saver import list_checkpoints, read_checkpoint
from torchhooks.checkpoints.sharded import canonical
from torchhooks.common.checks import whole_number
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError
from torchhooks.position.passing import NAME as SKIPS
from torchhooks.position.passing import Steps, read_skips


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 0, or 1 if there is nothing that it asks for, or it is damaged."""
    parser = argparse.ArgumentParser(prog="python -m torchhooks")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("checkpoints", help="list checkpoints, verify them, and export the weights of one")
    command.add_argument("path", help="a folder of checkpoints, or one checkpoint")
    command.add_argument(
        "--export",
        metavar="FILE",
        help="write the state_dict() of the model in the newest undamaged checkpoint, with the names of the bare model",
    )
    command.set_defaults(run=lambda given: _checkpoints(given.path, given.export))
    command = commands.add_parser("nan", help="print where a NaN came from, as far as that is known")
    command.add_argument("path", help="the checkpoint_dir of the training run")
    command.set_defaults(run=lambda given: _nan(given.path))
    command = commands.add_parser("replay", help="print the command that stops before a step, in a debugger")
    command.add_argument("path", help="the checkpoint_dir of the training run")
    command.add_argument("--step", type=int, required=True, help="the global step")
    command.set_defaults(run=lambda given: _replay(given.path, given.step))
    command = commands.add_parser("skip", help="pass over the items of some runs when the script resumes")
    command.add_argument("path", help="the checkpoint_dir of the training run")
    command.add_argument("--steps", required=True, metavar="FIRST-LAST", help="the global steps, such as 81230-81240")
    command.set_defaults(run=lambda given: _skip(given.path, given.steps))
    given = parser.parse_args(arguments)
    try:
        return int(given.run(given))
    except (CheckpointError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


def _checkpoints(path: str, export: str | None) -> int:
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} does not exist")
    is_one = os.path.isfile(path) or is_checkpoint(path)
    found = [inspect(os.path.normpath(path))] if is_one else list_checkpoints(path)
    intact = [checkpoint for checkpoint in found if _show(checkpoint)]
    if not intact:
        raise CheckpointError(f"{path} has no undamaged checkpoint")
    if export is not None:
        _export(intact[-1].path, export)
    # With those that are cut short, which are not in the list.
    named = 1 if is_one else sum(is_checkpoint(entry.path) for entry in os.scandir(path) if entry.name[0] != ".")
    return 0 if len(intact) == named else 1


def _show(checkpoint: Checkpoint) -> bool:
    """Print a line about ``checkpoint``, and return whether all of it is what was written."""
    outcome = "intact"
    try:
        verify(checkpoint.path)
    except DamagedCheckpointError as error:
        outcome = str(error)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.time))
    kept = ", kept for good" if checkpoint.kept else ""
    print(f"{checkpoint.name}  step {checkpoint.step}  {checkpoint.bytes:,} bytes  {written}  {outcome}{kept}")
    return outcome == "intact"


def _export(path: str, file: str) -> None:
    saved = read_checkpoint(path)
    if "model" not in saved:
        raise CheckpointError(f"{path} has no model: nothing is exported")
    temporary = f"{file}.tmp"
    try:
        torch.save({canonical(name): value for name, value in saved["model"].items()}, temporary)
        os.replace(temporary, file)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    print(f"{file}: the model of {path}")


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
    print(f"Start the script again: from {newest.path} on, it passes over the {count} items of steps {steps.name}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
