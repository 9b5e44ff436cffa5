"""The file in the folder of a training run that says how far it is, for other processes: ``.run.json``.

    {"pid": 4711, "process_start": 1234567, "system": "5f6b2c1e-... pid:[4026531836]", "host": "node7", "world_size": 1,
     "began": 1752000000.0, "began_at": 0, "time": 1752000600.0, "run_time": 1752000598.0, "step": 700,
     "steps_per_sec": 1.2, "last_step": 1000, "stalled": null, "report": null, "stopped": null, "failed": false,
     "ended": false}

It begins before the hooks' ``begin``, without a step, has ``stopped`` before their ``teardown``, and is ``ended`` last:
each of these calls may hang. In between, a thread writes it every ten seconds, so the training thread does nothing for
it. The same thread looks for ``.stacks``, by which ``python -m torchhooks stacks`` asks where all threads are.
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
from torchhooks.common.processes import is_alive, start_time, system_id
from torchhooks.lifecycle.session import Session
from torchhooks.progress.training_state import TrainingState

NAME = ".run.json"
REQUEST = ".stacks"
LOCK_STACKS = ".stall-rank-%d.txt"
"""The file of each rank that is empty unless a call keeps Python's global lock: it then has the stacks."""
_LOCK_STACKS = re.compile(re.escape(LOCK_STACKS).replace("%d", r"(\d{1,9})"))
LOCK_SECS = 2.0
"""A loop that goes on empties that file within so many seconds."""
# The command status takes a process for silent after three of these periods.
PERIOD_SECS = 10.0
WHY_SILENT = "a call keeps Python's global lock, its disk does not answer, or the script has dropped the loop"
"""Why a process that is there may write nothing."""
# How often the thread looks for a request. The command stacks gives up after thirty seconds, and most of these are for
# a slow disk.
_LOOK_SECS = 2.0
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
        time, step, steps_per_sec: how far it was at that time, and how fast. The step is ``None`` until the session is
            created, and the speed a little longer.
        run_time, stalled, report: see :class:`Watched`.
        last_step: where it is expected to end, if that is known.
        stopped: why it closes, or has ended; ``None`` while it trains, or if its process was killed.
        failed: whether that is an error.
        ended: whether it is closed. If it has stopped, and this is false, it closes.
        process_start, system: what tells the process from another one with its number: see
            :func:`torchhooks.common.processes.start_time` and :func:`~torchhooks.common.processes.system_id`.
    """

    pid: int
    host: str
    world_size: int
    began: float
    began_at: int | None
    time: float
    step: int | None
    run_time: float
    # A new field needs a default: the record may be one of an earlier version, which has no such field.
    steps_per_sec: float | None = None
    last_step: int | None = None
    stalled: str | None = None
    report: str | None = None
    stopped: str | None = None
    failed: bool = False
    ended: bool = False
    process_start: int = 0
    system: str | None = None

    @property
    def is_alive(self) -> bool | None:
        """Whether its process is there; ``None`` if that cannot be seen from here."""
        return is_alive(self.pid, self.process_start, self.system, self.host)


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
        # The file may be damaged, or come from another version of torchhooks. Fields that this version does not know
        # are passed over.
        found = json.loads(data)
        record = Record(**{name: found[name] for name in Record._fields if name in found})
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = get_type_hints(Record)
    is_valid = all(_is_of(getattr(record, name), kind) for name, kind in kinds.items())
    return record if is_valid and record.pid > 0 else None


def lock_stacks(folder: str, world_size: int) -> tuple[int, str] | None:
    """Return on which rank a call keeps Python's global lock, and the file with its stacks; ``None`` if on none.

    A loop that goes on empties the file: after a pause of the whole process, it was written an instant before.
    """
    for name in sorted(os.listdir(folder)):
        named, path = _LOCK_STACKS.fullmatch(name), os.path.join(folder, name)
        # An earlier job with more ranks may have left the files of ranks that this one does not have.
        if named is not None and int(named[1]) < world_size:
            with suppress(OSError):  # the loop has just ended
                found = os.stat(path)
                if found.st_size and time.time() - found.st_mtime > LOCK_SECS:
                    return int(named[1]), path
    return None


def _is_of(value: object, kind: Any) -> bool:
    """Return whether ``value`` is of ``kind``, and a number that a loop can have written."""
    # In Python, a bool is an int: true would pass for a number.
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) and (not isinstance(value, (int, float)) or -_MOST <= value <= _MOST)


class RunRecord:
    """Writes the record of one loop into the folder to which it saves.

    Args:
        training: the state of the loop.
        watched: returns what a watch knows of the loop.
        on_request: called with the folder into which the command ``stacks`` wants the stacks of all threads.
    """

    def __init__(
        self,
        training: TrainingState,
        watched: Callable[[], Watched],
        on_request: Callable[[str], object],
    ) -> None:
        folder = training.saved_to
        assert folder is not None
        self._path, self._request_path = os.path.join(folder, NAME), os.path.join(folder, REQUEST)
        self._session: Callable[[], Session] | None = None
        self._watched, self._on_request = watched, on_request
        self._samples: deque[tuple[float, int]] = deque(maxlen=_RATE_SAMPLES)
        now, pid = time.time(), os.getpid()
        self._record = Record(
            pid,
            socket.gethostname(),
            training.ranks.size,
            began=now,
            began_at=None,
            time=now,
            step=None,
            run_time=now,
            process_start=start_time(pid),
            system=system_id(),
        )
        self._closed = threading.Event()
        self._has_failed = False
        # Three threads write: the training thread, the thread of start(), and the one in which the watch reports a
        # stall. Without the lock, one of them could replace the last record by one of a moment before.
        self._lock = threading.Lock()

    def start(self) -> None:
        """Write the record now and every ten seconds, in a thread that does not keep a loop that is dropped."""
        self.write()
        # The event is passed by itself, so that the thread can wait for it without a reference to this object.
        writing = partial(_write_again, weakref.ref(self), self._closed)
        # A daemon, because Python waits for other threads at its end, and a script may never close its loop.
        threading.Thread(target=writing, name="torchhooks run record", daemon=True).start()

    def begin_session(self, session: Callable[[], Session]) -> None:
        """Say from now on how far the loop is. ``session`` returns its session, another one after a recovery."""
        with self._lock:
            self._session = session
            # A recovery calls this again, and the loop still began where it began.
            if self._record.began_at is None:
                self._record = self._record._replace(began_at=session().global_step)
            self._write()

    def finish(self, stopped: str, failed: bool) -> None:
        """Say that the loop closes, and why. What is left are the hooks' ``teardown`` and the other ranks."""
        with self._lock:
            self._record = self._record._replace(stopped=stopped, failed=failed)
            self._write()

    def close(self, stopped: str, failed: bool) -> None:
        """Say that the loop has ended, and end the thread."""
        # Before the lock, which the thread may hold in a write to a slow disk: it then ends after that write.
        self._closed.set()
        with self._lock:
            self._record = self._record._replace(stopped=stopped, failed=failed, ended=True)
            self._write()

    def look_for_request(self) -> None:
        """Pass on what ``python -m torchhooks stacks`` asks for."""
        with suppress(OSError, ValueError):  # usually, there is no such file
            with open(self._request_path, encoding="utf-8") as file:
                name = file.read()
            # Removed before it is answered, so that the next look does not answer it again. A request that is refused
            # is removed, too.
            os.remove(self._request_path)
            # Any process that can write to the folder may have made the file: no other folder is written to for it.
            if REQUEST_NAME.fullmatch(name):
                self._on_request(name)

    def write(self) -> None:
        """Write the record, unless the loop has ended."""
        with self._lock:
            # The thread and the report of a stall may come here after close(): the last record must stay the last.
            if not self._record.ended:
                self._write()

    def _write(self) -> None:
        record, now = self._record, time.time()
        # A process that was forked inside the loop has a copy of this object, and may leave the loop. The file still
        # belongs to its parent, which trains on.
        if os.getpid() != record.pid:
            return
        # Only until the first session: a process that gets there trains in the folder, too, and takes the file over.
        if self._session is None and self._is_of_another():
            return
        run_time, stalled, report = self._watched()
        # The watch looks once a second. It may not have seen yet that the loop went on from its last stall.
        if record.ended:
            stalled = report = None
        record = record._replace(time=now, run_time=run_time, stalled=stalled, report=report)
        if self._session is not None:
            session = self._session()
            step = session.global_step
            self._samples.append((now, step))
            first_time, first_step = self._samples[0]
            passed = now - first_time
            # A recovery sets the step back. Until the samples from before it are gone, the last known speed stays.
            rate = (step - first_step) / passed if passed > 0 and step >= first_step else record.steps_per_sec
            # The hooks tell it, which are not asked any more once they are torn down.
            last_step = session.expected_last_step if record.stopped is None else record.last_step
            record = record._replace(step=step, steps_per_sec=rate, last_step=last_step)
        self._record = record
        self._replace(json.dumps(record._asdict()))

    def _is_of_another(self) -> bool:
        """Return whether another process trains in the folder. One that was started by mistake may fail at once."""
        there = read_record(os.path.dirname(self._path))
        return there is not None and there.pid != self._record.pid and not there.ended and there.is_alive is True

    def _replace(self, text: str) -> None:
        try:
            with replacing(self._path) as temporary, open(temporary, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:  # a full disk, or a folder that was removed, must not end the training run
            # Once, as the thread tries again every ten seconds.
            if not self._has_failed:
                self._has_failed = True
                what = "%s cannot be written (%s): python -m torchhooks status will not know how far this loop is"
                logger.warning(what, self._path, error.strerror or error)


def _write_again(record: weakref.ref[RunRecord], closed: threading.Event) -> None:
    # Tests make the period shorter than the time between two looks.
    pauses, pause = 0, min(PERIOD_SECS, _LOOK_SECS)
    while not closed.wait(pause):
        if (found := record()) is None:
            return
        found.look_for_request()
        pauses += 1
        if pauses * pause >= PERIOD_SECS:
            pauses = 0
            found.write()
        # Or this variable would keep a dropped loop alive while the thread waits.
        del found
