"""The file in the folder of a training run that says how far it is, for other processes: ``.run.json``.

    {"pid": 4711, "host": "node7", "world_size": 1, "began": 1752000000.0, "began_at": 0, "time": 1752000600.0,
     "run_time": 1752000598.0, "step": 700, "steps_per_sec": 1.2, "last_step": 1000, "stalled": null, "report": null,
     "stopped": null, "failed": false}

A thread writes it every ten seconds, and the loop once more when it ends. So the training thread does nothing for it.
The same thread looks for ``.stacks``, by which ``python -m torchhooks stacks`` asks where all threads are.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, get_type_hints

from torchhooks.common.files import replacing
from torchhooks.common.log import logger
from torchhooks.lifecycle.session import Session

NAME = ".run.json"
REQUEST = ".stacks"
LOCK_STACKS = ".stall-rank-%d.txt"
"""The file of each rank that is empty unless a call keeps Python's global lock: it then has the stacks."""
PERIOD_SECS = 10.0
_LOOK_SECS = 2.0  # for a request
_RATE_SAMPLES = 7  # so that the speed is about the last minute
REQUEST_NAME = re.compile(r"stacks-[0-9a-f]{8}")
"""The name of the folder for the answer: the contents of the file."""
_MOST = 2**53  # no number in a record is beyond it, nor beyond what a float holds exactly


class Watched(NamedTuple):
    """What a watch knows of a loop.

    Args:
        run_time: when the last completed run was first seen, or when the loop began, in seconds since 1970.
        stalled: where the loop stands still, in a few words; ``None`` if it does not.
        report: the first line of the report about that.
    """

    run_time: float
    stalled: str | None = None
    report: str | None = None


class Record(NamedTuple):
    """What a loop says of itself.

    Args:
        pid, host, world_size: the process of the first rank, and how many ranks there are.
        began, began_at: when the loop began, in seconds since 1970, and at which step.
        time, step, steps_per_sec: how far it was at that time, and how fast; the speed is ``None`` at first.
        run_time, stalled, report: see :class:`Watched`.
        last_step: where it is expected to end, if that is known.
        stopped: why it has ended; ``None`` while it runs, or if its process was killed.
        failed: whether that is an error.
    """

    pid: int
    host: str
    world_size: int
    began: float
    began_at: int
    time: float
    step: int
    run_time: float
    steps_per_sec: float | None = None
    last_step: int | None = None
    stalled: str | None = None
    report: str | None = None
    stopped: str | None = None
    failed: bool = False


def read_record(folder: str) -> Record | None:
    """Return what the loop says that trains, or has trained, in ``folder``; ``None`` if it says nothing readable."""
    try:
        with open(os.path.join(folder, NAME), "rb") as file:
            return decoded_record(file.read())
    except OSError:
        return None


def decoded_record(data: bytes) -> Record | None:
    """Return the record in a file with the contents ``data``; ``None`` if it is not what a loop has written."""
    try:
        found = json.loads(data)
        record = Record(**{name: found[name] for name in Record._fields})
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    kinds = get_type_hints(Record)
    is_valid = all(_is_of(getattr(record, name), kind) for name, kind in kinds.items())
    return record if is_valid and record.pid > 0 else None


def _is_of(value: object, kind: Any) -> bool:
    """Return whether ``value`` is of ``kind``, and a number that a loop can have written."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) and (not isinstance(value, (int, float)) or -_MOST <= value <= _MOST)


class RunRecord:
    """Writes the record of one loop into ``folder``.

    Args:
        folder: the folder of checkpoints.
        world_size: how many ranks there are.
        session: returns the current session.
        watched: returns what a watch knows of the loop.
        on_request: called with the folder into which the command ``stacks`` wants the stacks of all threads.
    """

    def __init__(
        self,
        folder: str,
        world_size: int,
        session: Callable[[], Session],
        watched: Callable[[], Watched],
        on_request: Callable[[str], object],
    ) -> None:
        self._path, self._request_path = os.path.join(folder, NAME), os.path.join(folder, REQUEST)
        self._session, self._watched, self._on_request = session, watched, on_request
        began, step = time.time(), session().global_step
        self._samples: deque[tuple[float, int]] = deque(maxlen=_RATE_SAMPLES)
        self._record = Record(os.getpid(), socket.gethostname(), world_size, began, step, began, step, began)
        self._closed = threading.Event()
        self._has_failed = False
        self._lock = threading.Lock()  # or the thread could replace the last record by one of a moment before

    def start(self) -> None:
        """Write the record now and every ten seconds, in a thread that does not keep a loop that is dropped."""
        self.write()
        writing = partial(_write_again, weakref.ref(self), self._closed)
        threading.Thread(target=writing, name="torchhooks run record", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def look_for_request(self) -> None:
        """Pass on what ``python -m torchhooks stacks`` asks for."""
        with suppress(OSError, ValueError):  # usually, there is no such file
            with open(self._request_path, encoding="utf-8") as file:
                name = file.read()
            os.remove(self._request_path)
            if REQUEST_NAME.fullmatch(name):
                self._on_request(name)

    def write(self, stopped: str | None = None, failed: bool = False) -> None:
        """Write the record: ``stopped`` is why the loop has ended, if it has."""
        with self._lock:
            if self._record.stopped is None:
                self._write(stopped, failed)

    def _write(self, stopped: str | None, failed: bool) -> None:
        session, now = self._session(), time.time()
        step = session.global_step
        self._samples.append((now, step))
        first_time, first_step = self._samples[0]
        passed = now - first_time
        rate = (step - first_step) / passed if passed > 0 and step >= first_step else self._record.steps_per_sec
        run_time, stalled, report = self._watched()
        last_step = session.expected_last_step if stopped is None else self._record.last_step
        self._record = self._record._replace(
            time=now,
            step=step,
            run_time=run_time,
            steps_per_sec=rate,
            last_step=last_step,
            stalled=stalled,
            report=report,
            stopped=stopped,
            failed=failed,
        )
        self._replace(json.dumps(self._record._asdict()))

    def _replace(self, text: str) -> None:
        try:
            with replacing(self._path) as temporary, open(temporary, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:  # a full disk, or a folder that was removed, must not end the training run
            if not self._has_failed:
                self._has_failed = True
                what = "%s cannot be written (%s): python -m torchhooks status will not know how far this loop is"
                logger.warning(what, self._path, error.strerror or error)


def _write_again(record: weakref.ref[RunRecord], closed: threading.Event) -> None:
    pauses, pause = 0, min(PERIOD_SECS, _LOOK_SECS)
    while not closed.wait(pause):
        if (found := record()) is None:
            return
        found.look_for_request()
        pauses += 1
        if pauses * pause >= PERIOD_SECS:
            pauses = 0
            found.write()
        del found
