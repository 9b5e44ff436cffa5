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

import torch

from torchhooks.autopsy import request as requests
from torchhooks.checkpoints.folder import Checkpoint, inspect, is_checkpoint, verify
from torchhooks.checkpoints.saver import list_checkpoints, read_checkpoint
from torchhooks.common.checks import check_exists
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError
from torchhooks.common.files import replacing
from torchhooks.common.text import installed_version, plain
from torchhooks.fetches.names import canonical
from torchhooks.ledger import commands as of_ledgers
from torchhooks.mirror import commands as of_runs
from torchhooks.watch import commands as of_watches


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 0, or 1 if something is wrong; the help of a command says what."""
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
    command.set_defaults(call=lambda given: _checkpoints(given.path, given.export))
    command = commands.add_parser("nan", help="print where a NaN came from, as far as that is known")
    command.add_argument("path", help="the checkpoint_dir of the training run")
    command.set_defaults(call=lambda given: _nan(given.path))
    of_runs.add_commands(commands)
    of_ledgers.add_commands(commands)
    of_watches.add_commands(commands)
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    end = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:end])
    given.arguments = words[end + 1 :]  # of the script that is checked
    try:
        return int(given.call(given))
    except (CheckpointError, OSError, ValueError) as error:
        print(plain(_said_of(error)), file=sys.stderr)
        return 1


def _said_of(error: Exception) -> str:
    """Return what ``error`` says, without the number of an error of the operating system."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _checkpoints(path: str, export: str | None) -> int:
    check_exists(path)
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
    text = f"{checkpoint.name}  step {checkpoint.step}  {checkpoint.bytes:,} bytes  {written}  {outcome}{kept}"
    print(plain(text))
    return outcome == "intact"


def _export(path: str, file: str) -> None:
    saved = read_checkpoint(path)
    if "model" not in saved:
        raise CheckpointError(f"{path} has no model: nothing is exported")
    with replacing(file) as temporary:
        torch.save({canonical(name): value for name, value in saved["model"].items()}, temporary)
    print(plain(f"{file}: the model of {path}"))


def _nan(path: str) -> int:
    """Print the question to the next process in ``path``, and the newest report."""
    check_exists(path)
    request = requests.read_request(path)
    if request is not None:
        where = os.path.join(path, requests.NAME)
        print(plain(f"{where}: {request.message}. Start the script again to find out where it came from."))
    reports = glob.glob(os.path.join(glob.escape(path), "nan-*", "report*.md"))
    for report in sorted(reports, key=os.path.getmtime)[-1:]:
        with open(report, encoding="utf-8") as file:
            print(plain(file.read()), end="")
    if request is None and not reports:
        raise CheckpointError(
            f"{path} has neither {requests.NAME} nor a report: no process that saves there has found a NaN"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
