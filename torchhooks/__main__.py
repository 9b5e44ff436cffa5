"""The command ``python -m torchhooks``: what is in a folder of checkpoints, and how the training run there is doing.

``checkpoints`` and ``nan`` are here, ``status`` and ``mirror`` in ``mirror.commands``, ``diff`` in ``ledger.commands``,
``stacks`` in ``watch.commands``.
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from torchhooks.checkpoints.folder import Checkpoint, inspect, is_checkpoint, verify
from torchhooks.checkpoints.modules import bare_state
from torchhooks.checkpoints.saver import list_checkpoints, read_checkpoint
from torchhooks.common.checks import check_exists
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError
from torchhooks.common.files import replacing
from torchhooks.common.text import installed_version, json_text, plain, print_error
from torchhooks.tools.autopsy import request as requests
from torchhooks.tools.ledger import commands as of_ledgers
from torchhooks.tools.mirror import commands as of_runs
from torchhooks.tools.watch import commands as of_watches


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
    command = commands.add_parser("nan", help="print where a NaN came from, as far as that is known")
    command.add_argument("path", help="the checkpoint_dir of the training run")
    command.set_defaults(call=lambda given: _nan(given.path, given.json))
    of_runs.add_commands(commands)
    of_ledgers.add_commands(commands)
    of_watches.add_commands(commands)
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
        if not as_json:  # at once, because a large checkpoint takes long
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
    check_exists(os.path.dirname(file) or ".")
    saved = read_checkpoint(path)
    if "model" not in saved:
        raise CheckpointError(f"{path} has no model: nothing is exported")
    with replacing(file) as temporary:
        torch.save(bare_state(saved["model"]), temporary)


def _nan(path: str, as_json: bool) -> int:
    """Print the question to the next process in ``path``, NaNs that the script has caught, and the newest report."""
    check_exists(path)
    request, caught = requests.read_request(path), requests.caught_requests(path)
    reports = glob.glob(os.path.join(glob.escape(path), "nan-*", "report*.md"))
    report = max(reports, key=os.path.getmtime, default=None)
    if request is None and report is None and not caught:
        raise CheckpointError(
            f"{path} has neither {requests.NAME} nor a report: no process that saves there has found a NaN"
        )
    text = None if report is None else Path(report).read_text(encoding="utf-8")
    if as_json:
        asked = None if request is None else asdict(request)
        went_on = [asdict(one) for _, one in caught]
        print(json_text({"request": asked, "caught": went_on, "file": report, "report": text}))
        return 0
    for file, one in caught:
        print(plain(f"{file}: {one.message}. The script caught the error, and the training went on."))
    if request is not None:
        where = os.path.join(path, requests.NAME)
        print(plain(f"{where}: {request.message}. Start the script again to find out where it came from."))
    if text is not None:
        print(plain(text), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
