"""The command ``nan`` of ``python -m torchhooks``: where a NaN came from, as far as that is known."""

from __future__ import annotations

import glob
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchhooks.common.checks import check_exists
from torchhooks.common.errors import CheckpointError
from torchhooks.common.text import json_text, plain
from torchhooks.tools.autopsy import request as requests


def add_commands(commands: Any) -> None:
    """Add the command to the subparsers ``commands`` of ``python -m torchhooks``."""
    command = commands.add_parser("nan", help="print where a NaN came from, as far as that is known")
    command.add_argument("path", help="the checkpoint_dir of the training run")
    command.set_defaults(call=lambda given: nan(given.path, given.json))


def nan(path: str, as_json: bool) -> int:
    """Print the question to the next process in ``path``, NaNs that the script has caught, and the newest report.

    Raises:
        CheckpointError: there is neither a question nor a report.
    """
    check_exists(path)
    request, caught = requests.read_request(path), requests.caught_requests(path)
    reports = glob.glob(os.path.join(glob.escape(path), "nan-*", "report*.md"))
    # The newest by its time, and not by its step: a later process may have looked at an earlier step.
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
