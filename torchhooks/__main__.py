"""The command ``python -m torchhooks``: what is in a folder of checkpoints, and how the training run there is doing.

``checkpoints`` is here. The other commands belong to the tools: see :mod:`torchhooks.tools.commands`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch

from torchhooks.checkpoints.folder import Checkpoint, inspect, is_checkpoint, verify
from torchhooks.checkpoints.modules import bare_state
from torchhooks.checkpoints.saver import list_checkpoints, read_checkpoint
from torchhooks.common.checks import check_exists
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError
from torchhooks.common.files import replacing
from torchhooks.common.text import installed_version, json_text, plain, print_error


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and the parser of each command."""
    parser = argparse.ArgumentParser(prog="python -m torchhooks")
    parser.add_argument("--version", action="version", version=f"torchhooks {installed_version()}")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("checkpoints", help="list checkpoints, verify them, and export the weights of one")
    command.add_argument("path", help="a folder of checkpoints, or one checkpoint")
    command.add_argument(
        "--export",
        metavar="FILE",
        help="write the state_dict() of the model in the newest undamaged checkpoint, with the names of the bare model",
    )
    command.set_defaults(call=lambda given: _checkpoints(given.path, given.export, given.json))
    if "torchhooks.tools.plugins" in sys.modules:  # nothing else needs the folder of the tools
        from torchhooks.tools.commands import add_commands

        add_commands(commands)
    # Last, so that the commands of the tools have the option too.
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print one JSON object, as in torchhooks/schemas")
    return parser, commands.choices


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 0, or 1 if something is wrong; the help of a command says what."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    end = words.index("--") if "--" in words else len(words)
    given = parsers()[0].parse_args(words[:end])
    given.arguments = words[end + 1 :]  # of the script that is checked
    try:
        return int(given.call(given))
    except (CheckpointError, OSError, ValueError) as error:
        print_error(_said_of(error), given.json)
        return 1


def _said_of(error: Exception) -> str:
    """Return what ``error`` says, without the number of an error of the operating system."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _checkpoints(path: str, export: str | None, as_json: bool) -> int:
    """Say which checkpoints are intact, and export the newest one. Return 0 if all are."""
    check_exists(path)
    is_one = os.path.isfile(path) or is_checkpoint(path)
    found = [inspect(os.path.normpath(path))] if is_one else list_checkpoints(path)
    damage = {}
    for checkpoint in found:
        damage[checkpoint.path] = _damage(checkpoint.path)
        # At once, because verify() reads all files of a checkpoint, which takes long for a large one.
        if not as_json:
            print(plain(_line_of(checkpoint, damage[checkpoint.path])))
    intact = [checkpoint for checkpoint in found if damage[checkpoint.path] is None]
    if not intact and (export is not None or not as_json):
        raise CheckpointError(f"{path} has no undamaged checkpoint")
    # Checkpoints that are cut short are not in the list.
    unreadable = [] if is_one else sorted(_checkpoints_in(path) - damage.keys())
    if export is not None:
        _export(intact[-1].path, export)
    if as_json:
        listed = [asdict(checkpoint) | {"damage": damage[checkpoint.path]} for checkpoint in found]
        print(json_text({"checkpoints": listed, "unreadable": unreadable, "exported": export}))
    elif export is not None:
        print(plain(f"{export}: the model of {intact[-1].path}"))
    return 0 if intact and len(intact) == len(found) + len(unreadable) else 1


def _checkpoints_in(folder: str) -> set[str]:
    return {entry.path for entry in os.scandir(folder) if entry.name[0] != "." and is_checkpoint(entry.path)}


def _damage(path: str) -> str | None:
    """Return what is damaged in the checkpoint at ``path``; ``None`` if all of it is what was written."""
    try:
        verify(path)
    except DamagedCheckpointError as error:
        return str(error)
    return None


def _line_of(checkpoint: Checkpoint, damage: str | None) -> str:
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.time))
    kept = ", kept for good" if checkpoint.kept else ""
    outcome = "intact" if damage is None else damage
    return f"{checkpoint.name}  step {checkpoint.step}  {checkpoint.bytes:,} bytes  {written}  {outcome}{kept}"


def _export(path: str, file: str) -> None:
    # Before the checkpoint is read, which takes long for a large one.
    check_exists(os.path.dirname(file) or ".")
    saved = read_checkpoint(path)
    if "model" not in saved:
        raise CheckpointError(f"{path} has no model: nothing is exported")
    # An older export stays whole if this process is killed, or the disk is full, while torch writes the new one.
    with replacing(file) as temporary:
        torch.save(bare_state(saved["model"]), temporary)


if __name__ == "__main__":
    sys.exit(main())
