"""``nan.json``: what a hook leaves next to the checkpoints when it finds a NaN, for the process that starts next."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import secrets
import sys
import time
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from torchhooks.autopsy.figures import has_numbers, is_finite, part_of, tensors_in
from torchhooks.checkpoints.files import Checkpoint, list_checkpoints, verify
from torchhooks.checkpoints.manifest import STATE
from torchhooks.checkpoints.reading import load_file
from torchhooks.common.digests import fingerprints
from torchhooks.common.errors import DamagedCheckpointError, brief
from torchhooks.common.files import alone_at
from torchhooks.common.log import logger
from torchhooks.common.random_states import random_states
from torchhooks.lifecycle.session import Session

NAME = "nan.json"
ASIDE = "request.json"
"""Its name in the folder of the report, where it asks for nothing any more."""

Request = dict[str, Any]
"""What ``nan.json`` contains."""

_TYPES = {"step": int, "kind": str, "message": str, "hook": str, "rank": int, "digests": dict, "environment": dict}
"""Of the entries that are needed."""


def folder_of(checkpoint_dir: str, step: int) -> str:
    """Return the folder of the report about ``step``."""
    return os.path.join(checkpoint_dir, f"nan-{step}")


def shown_path(path: str) -> str:
    """Return ``path`` as a person would write it: from the current directory, if it is in there."""
    short = os.path.relpath(path)
    return path if short.startswith(os.pardir) else short


def name_of(hook: object) -> str:
    """Return what tells ``hook`` from others, also in another process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(hook))


def leave(session: Session, step: int, message: str, hook: object, inputs: Mapping[str, Any]) -> None:
    """Write ``nan.json``: ``hook`` has found at ``step`` what ``message`` says, in a run with ``inputs``.

    Nothing is written without a ``checkpoint_dir``, or about a step whose autopsy has just been made. Of several ranks,
    the one with the earliest step is kept. An error is logged: the NaN itself is what the caller has to see.
    """
    folder = session.checkpoint_dir
    if folder is None or session.examined_step == step:
        return
    path = os.path.join(folder, NAME)
    request = {
        "step": step,
        "kind": "NaN",
        "message": message,
        "hook": name_of(hook),
        "rank": session.ranks.rank,
        "ranks": session.ranks.size,
        "begun_at": session.begun_at,
        "checkpoint": session.saved_step,
        "runs_since_checkpoint": None if session.saved_step is None else step - session.saved_step,
        "noticed_at": session.global_step,
        "digests": digests(session, step, inputs),
        "environment": environment(session),
        "time": time.time(),
    }
    try:
        os.makedirs(folder, exist_ok=True)
        with alone_at(os.path.join(folder, ".nan.lock")):
            earlier = None
            with contextlib.suppress(ValueError):  # of a damaged one, which is replaced
                earlier = read(folder)
            if (
                earlier is not None
                and earlier.get("begun_at") == request["begun_at"]
                and earlier["rank"] != request["rank"]
            ):
                request = min(earlier, request, key=lambda each: (each["step"], each["rank"]))
            write_json(path, request)
    except (OSError, ValueError) as error:
        logger.warning(
            "%s was not written, so the next process does not look for the cause: %s", shown_path(path), brief(error)
        )
        return
    logger.info("start the script again to find out where it came from: %s says what to look at", shown_path(path))


def digests(session: Session, step: int, inputs: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of what a run of ``step`` depends on. Equal ones say that it was the same run."""
    found = {f"input {name}": _digest(value) for name, value in inputs.items() if tensors_in(value)}
    if session.global_step == step:  # otherwise the NaN was noticed some runs later
        for name, state in random_states().items():
            values = state if isinstance(state, list) else [state]
            texts = [repr(each.tolist() if isinstance(each, torch.Tensor) else each) for each in values]
            found[f"random state of {name}"] = _checksum("".join(texts))
    return found


def _digest(value: Any) -> str:
    return _checksum("".join(fingerprints([part_of(each).detach() for each in tensors_in(value)])))


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def environment(session: Session) -> dict[str, Any]:
    """Return which program runs, and on what."""
    device = session.device
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    found: dict[str, Any] = {
        "command": [*sys.orig_argv],
        "folder": os.getcwd(),
        "script": None if script is None else os.path.abspath(script),
        "host": platform.node(),
        "device": str(device),
        "torch": str(torch.__version__),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device_name"] = properties.name
        found["device_uuid"] = str(getattr(properties, "uuid", ""))
    return found


def read(folder: str, name: str = NAME) -> Request | None:
    """Return what ``nan.json`` in ``folder`` contains, ``None`` if there is none.

    Raises:
        ValueError: it cannot be read, or is not what :func:`leave` writes.
    """
    path = os.path.join(folder, name)
    try:
        with open(path, encoding="utf-8") as file:
            request = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({brief(error)}): remove it") from error
    if not isinstance(request, dict) or any(type(request.get(key)) is not kind for key, kind in _TYPES.items()):
        raise ValueError(f"{path} is not what torchhooks writes: remove it")
    return request


def write_json(path: str, value: Any) -> None:
    """Write ``value`` to the file at ``path``, all of it or nothing."""
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, default=str)
            file.write("\n")
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def put_aside(folder: str, request: Request) -> None:
    """Move ``nan.json``, which contains ``request``, into the folder of its report."""
    aside = folder_of(folder, request["step"])
    os.makedirs(aside, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # another rank was faster
        os.replace(os.path.join(folder, NAME), os.path.join(aside, ASIDE))


def checkpoint_before(folder: str, step: int) -> Checkpoint | None:
    """Return the newest undamaged checkpoint in ``folder`` of a step before ``step``; ``None`` if there is none.

    One with a model that is not finite comes last: what made it so comes before it.
    """
    broken = None
    for checkpoint in reversed(list_checkpoints(folder)):
        if checkpoint.step < step:
            try:
                verify(checkpoint.path)
                if _is_finite(checkpoint.path):
                    return checkpoint
            except DamagedCheckpointError as error:
                logger.warning("%s It is skipped.", error)
            else:
                broken = broken or checkpoint
    return broken


def _is_finite(path: str) -> bool:
    """Return whether the model in the checkpoint at ``path`` is finite, as far as it is in one file."""
    if "model" not in (saved := load_file(path) if os.listdir(path).count(STATE) else {}):
        return True
    return all(is_finite(each) for each in tensors_in(saved["model"]) if has_numbers(each))
