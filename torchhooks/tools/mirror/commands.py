"""The commands ``status`` and ``mirror`` of ``python -m torchhooks``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchhooks.common.checks import check_exists
from torchhooks.common.errors import CheckpointError
from torchhooks.common.text import json_text, plain, shortened
from torchhooks.tools.mirror.copy import Copy, OtherJobError
from torchhooks.tools.mirror.status import lines_of, read_status, read_status_of_copy
from torchhooks.tools.mirror.store import Secrets, Store, StoreError, is_url


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers ``commands`` of ``python -m torchhooks``."""
    command = commands.add_parser("status", help="say how far a training run is, how fast, and whether it is alive")
    command.add_argument("path", help="the folder of the training run, or the address of its copy")
    command.set_defaults(call=lambda given: status(given.path, given.json))
    command = commands.add_parser("mirror", help="copy a training run to a store such as S3, or from it")
    command.add_argument("source", help="the folder of the training run, or the address of its copy")
    command.add_argument("target", help="the address of the copy, or the folder")
    command.set_defaults(call=lambda given: mirror(given.source, given.target, given.json))


def status(path: str, as_json: bool = False) -> int:
    """Print the status of the training run in ``path``. Return 0 if it makes steps or has ended well, or else 1."""
    if is_url(path):
        with _named(path):
            found = read_status_of_copy(Store(path))
    else:
        check_exists(path)
        found = read_status(path)
    if as_json:
        print(json_text(found.as_plain()))
    else:
        lines = list(lines_of(found))
        width = max(len(name) for name, _ in lines)
        for name, text in lines:
            print(plain(f"{name:{width}}  {text}").replace("\n", "\\n"))
    return 0 if found.is_well else 1


def mirror(source: str, target: str, as_json: bool = False) -> int:
    """Copy the newest checkpoints and the other files of a training run to a store, or from it. Return 0, or 1."""
    if is_url(source) == is_url(target):
        raise ValueError(
            f"{_shown(source)} and {_shown(target)}: give a folder and the address of a copy, such as "
            "s3://bucket/run-17. The address of a folder of this machine begins with file://, as file:///copies/run-17 "
            "does"
        )
    if is_url(target):
        check_exists(source)
    folder, url = (target, source) if is_url(source) else (source, target)
    with _named(url):
        copy = Copy(folder, Store(url), lambda: sys.maxsize)  # only a hook knows how many the saver keeps
        if is_url(source):
            # A download takes nothing over, so the job that writes to the copy goes on.
            copy.open(takes_over=False)
            copied = copy.restore()
        else:
            # This takes the copy over: a job that still uploads to it copies nothing any more.
            copy.open()
            copied = copy.push_checkpoints()
            while copy.push_files() is None:  # a newer checkpoint came in between
                copied += copy.push_checkpoints()
            copy.open()  # once more: what the store has, and not what it has confirmed
            if missing := copy.missing():
                raise StoreError(f"not everything was copied, it lacks {shortened(missing)}")
    if as_json:
        print(json_text({"source": _shown(source), "target": _shown(target), "checkpoints": copied}))
    else:
        what = ", ".join(copied) if copied else "no newer checkpoint"
        print(plain(f"{_shown(source)} was copied to {_shown(target)}: {what}"))
    return 0


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Raise an error of the store ``url`` as one that names it, without credentials."""
    try:
        yield
        return
    except OtherJobError:
        reason = "another job has taken the copy over"
    except (ImportError, StoreError) as error:
        reason = str(error)
    raise CheckpointError(f"{_shown(url)}: {reason}")


def _shown(path: str) -> str:
    """Return ``path``, without credentials if it is an address."""
    return Secrets(path).url if is_url(path) else path
