"""``nan.json``: what a hook leaves next to the checkpoints when it finds a NaN, for the process that starts next.

:func:`leave` writes it, and :func:`read_request` reads it, also one that is damaged or of another version. The
functions at the end turn a dataclass into JSON and back, for this file and for the report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import json
import os
import platform
import re
import sys
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, TypeVar, cast, get_args, get_origin, get_type_hints

import torch

from torchhooks.common.digests import digest
from torchhooks.common.errors import brief
from torchhooks.common.files import alone_at, replacing
from torchhooks.common.log import logger
from torchhooks.common.random_states import random_states
from torchhooks.fetches.names import Fetch, describe
from torchhooks.lifecycle.hook import StandardHook
from torchhooks.lifecycle.session import Session
from torchhooks.tools.autopsy.figures import values_in

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

NAME = "nan.json"
ASIDE = "request.json"
"""The name of the request in the folder of the report, where it asks for nothing any more."""
_FAILED = "failed.txt"
"""Why the examination failed, in the folder of the report."""

NAN, BROKEN_STATE = "NaN", "state"
"""Kinds of requests: a hook found a NaN, or an autopsy found that the state was broken before the runs it watched."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Which program ran, and on what."""

    command: list[str]
    host: str
    device: str
    torch: str
    device_name: str | None = None
    device_uuid: str | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """A question to the process that starts next: what made the value NaN at :attr:`step`?"""

    step: int
    kind: str
    """:data:`NAN` or :data:`BROKEN_STATE`."""
    message: str
    hook: str
    """The hook that found the NaN, by its key in :func:`examined_hooks`."""
    rank: int
    ranks: int
    checkpoint: int | None
    """The step of the newest checkpoint."""
    noticed_at: int
    """The global step when the hook noticed the NaN: on a device, some runs later."""
    digests: dict[str, str]
    environment: Environment
    time: float
    attempts: int = 0
    """How many processes have begun to look at the step, and have not come to an end."""


def folder_of(checkpoint_dir: str, step: int) -> str:
    """Return the folder of the report about ``step``."""
    return os.path.join(checkpoint_dir, f"nan-{step}")


def shown_path(path: str) -> str:
    """Return ``path`` as a person would write it: relative to the current directory, if it is in there."""
    try:
        short = os.path.relpath(path)
    except OSError:  # the script has removed its current directory
        return path
    return path if short.startswith(os.pardir) else short


def examined_hooks(hooks: Iterable[object]) -> dict[str, StandardHook]:
    """Return those of ``hooks`` that an autopsy can be about, by a key that tells them apart in every process.

    The key is the name of the hook, or its class and what it looks at. Of several equal ones, all but the first have a
    number.
    """
    found: dict[str, StandardHook] = {}
    for hook in hooks:
        if isinstance(hook, StandardHook) and hook.examined is not None:
            key = hook.name or f"{type(hook).__name__} of {_described(hook.examined)}"
            keys = itertools.chain([key], (f"{key}, number {number}" for number in itertools.count(2)))
            found[next(each for each in keys if each not in found)] = hook
    return found


def _described(fetch: Fetch) -> str:
    try:
        # A repr() may have the address of a function, which is another one in each process.
        return re.sub(r" at 0x[0-9a-fA-F]+", "", describe(fetch))
    except Exception:  # of a __repr__ of the script, perhaps of a fetch of another hook than the one in question
        return f"a {type(fetch).__name__}"


def key_of(hook: object, hooks: Iterable[object]) -> str:
    """Return the key of ``hook``, one of ``hooks``, in :func:`examined_hooks`."""
    keys = (key for key, each in examined_hooks(hooks).items() if each is hook)
    return next(keys, type(hook).__name__)


# -- a hook has found a NaN -------------------------------------------------------------------------------------------

# Not an attribute of the session, because the packages below torchhooks.tools know nothing of the tools.
_examined: weakref.WeakKeyDictionary[Session, int] = weakref.WeakKeyDictionary()
"""By session, the step that was examined in it: the NaN that is found again there asks for nothing."""


def note_examined(session: Session, step: int) -> None:
    """Have no request left about ``step`` in this session, whose autopsy has just been made."""
    _examined[session] = step


def leave(session: Session, step: int, message: str, hook: object, inputs: Mapping[str, object]) -> bool:
    """Write ``nan.json``: ``hook`` has found at ``step`` what ``message`` says, in a run with ``inputs``.

    Nothing is written without a ``checkpoint_dir``, or about a step whose autopsy has just been made, or has failed.
    Of several ranks, and of several errors that the script has caught, the request about the earliest step is kept. An
    error is logged: the NaN itself is what the caller has to see. Return whether there is a request.
    """
    folder = session.checkpoint_dir
    if folder is None or _examined.get(session) == step:
        return False
    failed = os.path.join(folder_of(folder, step), _FAILED)
    if os.path.exists(failed):
        logger.info("step %d is not examined again: %s says why. Remove it to try once more", step, shown_path(failed))
        return False
    path = os.path.join(folder, NAME)
    try:
        request = Request(
            step=step,
            kind=NAN,
            message=message,
            hook=key_of(hook, session.loop_hooks),
            rank=session.ranks.rank,
            ranks=session.ranks.size,
            checkpoint=session.saved_step,
            noticed_at=session.global_step,
            digests=digests(session, step, inputs),
            environment=environment(session),
            time=time.time(),
        )
        os.makedirs(folder, exist_ok=True)
        # Read and written under one lock: two ranks that find their NaNs at once would both read that there is no
        # request, and the later one could replace the earlier one.
        with alone_in(folder):
            earlier = None
            with contextlib.suppress(ValueError):  # of a damaged one, which is replaced
                earlier = read_request(folder)
            began = time.time() - session.secs  # a request of before is about another training run
            if earlier is not None and earlier.time >= began:
                request = min(earlier, request, key=lambda one: (one.step, one.rank))
            write_json(path, request)
    except Exception as error:  # also of a repr() of the script
        logger.warning(
            "%s was not written, so the next process does not look for the cause: %s", shown_path(path), brief(error)
        )
        return False
    logger.info("start the script again to find out where it came from: %s says what to look at", shown_path(path))
    return True


def alone_in(folder: str) -> AbstractContextManager[None]:
    """Wait for the other ranks that share ``folder`` and write there: they find their NaNs at once."""
    # Without the lock, they would also write to one temporary file, nan.json.tmp. The system releases the lock of a
    # process that is killed.
    return alone_at(os.path.join(folder, ".nan.lock"))


def digests(session: Session, step: int, inputs: Mapping[str, object]) -> dict[str, str]:
    """Return digests of what a run of ``step`` depends on. Equal digests say that it was the same run."""
    found = {f"input {name}": digest(values) for name, value in inputs.items() if (values := values_in(value))}
    if session.global_step == step:  # otherwise the NaN was noticed some runs later, with other random states
        for name, state in random_states().items():
            found[f"random state of {name}"] = digest(state)
    return found


def environment(session: Session) -> Environment:
    """Return which program runs, and on what."""
    device = session.device
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Environment(
        # A script may change sys.argv, which has no options of Python, such as -m, either.
        command=[*sys.orig_argv],
        host=platform.node(),
        device=str(device),
        torch=str(torch.__version__),
        device_name=None if gpu is None else gpu.name,
        device_uuid=None if gpu is None else str(getattr(gpu, "uuid", "")),
    )


# -- the next process -------------------------------------------------------------------------------------------------


def read_request(folder: str) -> Request | None:
    """Return the request in ``folder``; ``None`` if there is none.

    Raises:
        ValueError: ``nan.json`` cannot be read, or :func:`leave` of this version would not write it.
    """
    try:
        return _read(os.path.join(folder, NAME))
    except FileNotFoundError:
        return None


def _read(path: str) -> Request:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({brief(error)}): remove it") from error
    try:
        request = from_json(Request, value)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not what torchhooks writes: remove it") from error
    if request.kind not in (NAN, BROKEN_STATE):
        raise ValueError(f"{path} is of the kind {request.kind!r}, of another version of torchhooks: remove it")
    return request


def put_aside(folder: str, request: Request) -> None:
    """Move ``nan.json``, which contains ``request``, into the folder of its report."""
    aside = folder_of(folder, request.step)
    os.makedirs(aside, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # another rank was faster
        os.replace(os.path.join(folder, NAME), os.path.join(aside, ASIDE))


def put_aside_as_caught(session: Session) -> None:
    """Put the request of this training run aside: the script has caught the error, and a later state is saved.

    A process that looked for the cause now would begin before that state, and lose it.
    """
    folder = session.checkpoint_dir
    if folder is None:
        return
    try:
        with alone_in(folder):
            request = read_request(folder)
            if request is None:
                return  # another rank was faster
            put_aside(folder, request)
    except (OSError, ValueError) as error:
        logger.warning("%s was not put aside: %s", shown_path(os.path.join(folder, NAME)), brief(error))
        return
    logger.info(
        "%s, and the training went on: %s is put aside into %s",
        *(request.message, NAME, shown_path(folder_of(folder, request.step))),
    )


def caught_requests(folder: str) -> list[tuple[str, Request]]:
    """Return the path and the contents of each request in ``folder`` that was put aside because training went on."""
    found = []
    for path in glob.glob(os.path.join(glob.escape(folder), "nan-*", ASIDE)):
        if set(os.listdir(os.path.dirname(path))) == {ASIDE}:  # no report, and no reason why there is none
            with contextlib.suppress(ValueError):
                found.append((path, _read(path)))
    return sorted(found, key=lambda one: one[1].step)


def give_up(folder: str, request: Request, why: str) -> None:
    """Put ``nan.json`` aside, because no examination is possible, so that no process tries it again."""
    try:
        # First, because it makes the folder that the other file goes into.
        put_aside(folder, request)
        write(os.path.join(folder_of(folder, request.step), _FAILED), why.encode())
    except OSError as error:
        logger.warning("%s was not put aside: %s", shown_path(os.path.join(folder, NAME)), brief(error))


# -- JSON -------------------------------------------------------------------------------------------------------------


def write_json(path: str, record: DataclassInstance) -> None:
    """Write ``record`` to the file at ``path``, all of it or nothing."""
    write(path, (json.dumps(dataclasses.asdict(record), indent=1, default=str) + "\n").encode())


def write(path: str, data: bytes) -> None:
    """Write ``data`` to the file at ``path``, all of it or nothing."""
    # There is no fsync: this survives a kill -9, and after a power failure the NaN can be found once more.
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(data)


def from_json(kind: type[T], value: object) -> T:
    """Return the dataclass ``kind`` with the entries of ``value``. Entries that it does not have are passed over.

    Raises:
        KeyError: an entry without a default is missing.
        TypeError: an entry has another type.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    hints = get_type_hints(kind)
    needed = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]  # type: ignore[arg-type]
    return kind(**{name: _checked(hints[name], value[name]) for name in hints if name in value or name in needed})


def _checked(hint: object, value: object) -> object:
    if dataclasses.is_dataclass(hint):
        return from_json(cast(type, hint), value)
    kind = get_args(hint) if isinstance(hint, UnionType) else get_origin(hint) or hint
    if not isinstance(value, cast(type, kind)):
        raise TypeError(f"{value!r} is no {hint}")
    return value
