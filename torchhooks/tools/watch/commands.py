"""The command ``stacks`` of ``python -m torchhooks``: where all threads of a live training run are."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

from torchhooks.common.checks import check_exists
from torchhooks.common.errors import CheckpointError
from torchhooks.common.files import replacing
from torchhooks.common.processes import STOPPED, process_state
from torchhooks.common.text import json_text, plain
from torchhooks.tools.run_record import NAME, REQUEST, WHY_SILENT, Record, lock_stacks, read_record

_WAIT_SECS = 30.0  # a live loop looks for a request every two seconds; the rest is for a slow disk
_POLL_SECS = 0.1


def add_commands(commands: Any) -> None:
    """Add the command to the subparsers ``commands`` of ``python -m torchhooks``."""
    command = commands.add_parser("stacks", help="write the stacks of all threads of a live training run, on all ranks")
    command.add_argument("path", help="the folder of the training run")
    command.set_defaults(call=lambda given: stacks(given.path, given.json))


def stacks(path: str, as_json: bool = False) -> int:
    """Ask the training run in ``path`` for its stacks, print its report and where they are, and return 0.

    Raises:
        CheckpointError: no loop trains there, its process is gone or stopped, or it does not answer.
    """
    check_exists(path)
    record = read_record(path)
    if record is None or record.ended:
        raise CheckpointError(f"{os.path.join(path, NAME)} names no loop that trains here now, so there are no stacks")
    # Another name each time, so that the report of an earlier request is not taken for the answer.
    name = f"stacks-{uuid.uuid4().hex[:8]}"
    request, report = os.path.join(path, REQUEST), Path(path, name, "report.md")
    with replacing(request) as temporary:
        Path(temporary).write_text(name, encoding="utf-8")
    end = time.monotonic() + _WAIT_SECS
    while not report.exists():
        # In every round: the process may be killed or stopped while this command waits for it.
        why = _why_no_answer(path, record)
        if why is None and time.monotonic() > end:
            why = f"has not answered for {_WAIT_SECS:g} s: it is gone, or stopped, or out of reach"
            if record.is_alive:
                why = f"is there, but has not answered for {_WAIT_SECS:g} s: {WHY_SILENT}"
        if why is not None:
            # Or the next loop in this folder would answer a request that was given up.
            Path(request).unlink(missing_ok=True)
            raise CheckpointError(f"process {record.pid} on {record.host} {why}")
        time.sleep(_POLL_SECS)
    text = report.read_text(encoding="utf-8")
    if as_json:
        files = sorted(str(file) for file in report.parent.iterdir() if file != report)
        print(json_text({"folder": str(report.parent), "report": text, "files": files}))
    else:
        print(plain(f"{text}\n{report.parent} has the stacks"))
    return 0


def _why_no_answer(path: str, record: Record) -> str | None:
    """Return why the process of ``record`` cannot answer now; ``None`` if it may."""
    if record.is_alive is False:
        return "is gone, so there are no stacks"
    if record.is_alive and process_state(record.pid) in STOPPED:
        return "is stopped by a signal: it answers after kill -CONT"
    keeps = lock_stacks(path, record.world_size)
    if keeps is None:
        return None
    rank, stacks = keeps
    where = "" if record.world_size == 1 else f" on rank {rank}"
    return f"is in a call that keeps Python's global lock{where}: {stacks} has its stacks"
