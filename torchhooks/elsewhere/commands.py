"""The commands ``status`` and ``mirror`` of ``python -m torchhooks``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from torchhooks.elsewhere.copy import Copy
from torchhooks.elsewhere.status import lines_of, read_status
from torchhooks.elsewhere.store import Secrets, Store, is_url

_COPY_SECS = 120.0  # how old a copy may be, with the time that the upload takes


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers ``commands`` of ``python -m torchhooks``."""
    command = commands.add_parser("status", help="say how far a training run is, how fast, and whether it is alive")
    command.add_argument("path", help="the folder of the training run, or the address of its copy")
    command.add_argument("--json", action="store_true", help="print it as JSON")
    command.set_defaults(call=lambda given: status(given.path, given.json))
    command = commands.add_parser("mirror", help="copy a training run to a store such as S3, or from it")
    command.add_argument("source", help="the folder of the training run, or the address of its copy")
    command.add_argument("target", help="the address of the copy, or the folder")
    command.set_defaults(call=lambda given: mirror(given.source, given.target))


def status(path: str, as_json: bool = False) -> int:
    """Print the status of the training run in ``path``. Return 0, or 1 if it was killed or has failed."""
    if is_url(path):
        with tempfile.TemporaryDirectory() as folder:
            if (code := _fetch(path, lambda: Copy(folder, Store(path)).outline())) != 0:
                return code
            found = read_status(folder, _COPY_SECS)
    else:
        found = read_status(path)
    if as_json:
        print(json.dumps(found.as_plain(), indent=2))
    else:
        lines = list(lines_of(found))
        width = max(len(name) for name, _ in lines)
        for name, text in lines:
            print(f"{name:{width}}  {text}")
    record = found.record
    has_ended_well = record is not None and record.stopped is not None and not record.failed
    return 0 if found.is_alive or has_ended_well else 1


def mirror(source: str, target: str) -> int:
    """Copy the newest checkpoints and the other files of a training run to a store, or from it. Return 0, or 1."""
    if is_url(source) == is_url(target) or (is_url(target) and not os.path.isdir(source)):
        print("give a folder of this machine and an address, such as run s3://bucket/run-17", file=sys.stderr)
        return 1
    folder, url = (target, source) if is_url(source) else (source, target)

    def copy() -> None:
        kept = Copy(folder, Store(url))
        copied = kept.pull() if is_url(source) else kept.push()
        what = ", ".join(copied) if copied else "no newer checkpoint"
        print(Secrets(url).hide(f"{source} was copied to {target}: {what}"))

    return _fetch(url, copy)


def _fetch(url: str, call: Callable[[], object]) -> int:
    """Return 0 after ``call()``, or 1 after an error of the store ``url``, which is printed without credentials."""
    try:
        call()
    except Exception as error:
        print(Secrets(url).hide(f"{url}: {type(error).__name__}: {error}"), file=sys.stderr)
        return 1
    return 0
