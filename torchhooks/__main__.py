"""The command ``python -m torchhooks``: what is in a folder of checkpoints, and how the training run there is doing.

``checkpoints`` is here, ``nan`` in ``autopsy.commands``, and ``status`` and ``mirror`` in ``elsewhere.commands``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

import torch

from torchhooks.autopsy import commands as of_nans
from torchhooks.checkpoints.files import Checkpoint, inspect, is_checkpoint, verify
from torchhooks.checkpoints.saver import list_checkpoints, read_checkpoint
from torchhooks.checkpoints.sharded import canonical
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError
from torchhooks.elsewhere import commands as of_runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 0, or 1 if a checkpoint is damaged or there is none."""
    parser = argparse.ArgumentParser(prog="python -m torchhooks")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("checkpoints", help="list checkpoints, verify them, and export the weights of one")
    command.add_argument("path", help="a folder of checkpoints, or one checkpoint")
    command.add_argument(
        "--export",
        metavar="FILE",
        help="write the state_dict() of the model in the newest undamaged checkpoint, with the names of the bare model",
    )
    command.set_defaults(call=lambda given: _checkpoints(given.path, given.export))
    of_nans.add_commands(commands)
    of_runs.add_commands(commands)
    given = parser.parse_args(arguments)
    try:
        return int(given.call(given))
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
    # With checkpoints that are cut short, which are not in the list.
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


if __name__ == "__main__":
    sys.exit(main())
