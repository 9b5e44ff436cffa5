"""What the files of a training run say: how far it is, how fast, its last checkpoint, and whether it is alive."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torchhooks.checkpoints.folder import Checkpoint, has_manifest, inspect, is_checkpoint
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError
from torchhooks.common.processes import STOPPED, process_state
from torchhooks.tools.mirror.curves import Point, read_curves
from torchhooks.tools.mirror.layout import MARKER, CopyContents, is_copied, read_marker
from torchhooks.tools.mirror.store import Store
from torchhooks.tools.run_record import NAME as RECORD
from torchhooks.tools.run_record import PERIOD_SECS, WHY_SILENT, Record, decoded_record, lock_stacks, read_record

_SILENT_SECS = 3 * PERIOD_SECS
_COPY_SECS = 120.0  # how late the record may be in a copy: RECORD_SECS of the hook, and an upload


class State(NamedTuple):
    """Whether a training run is alive.

    Args:
        word: ``"running"``, ``"closing"``, ``"stalled"``, ``"ended"``, ``"failed"``, ``"killed"``, ``"silent"`` or
            ``"unknown"``.
        text: the same for people, with the process, and with what stopped it.
    """

    word: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Status:
    """What is known of the training run in a folder."""

    state: State
    record: Record | None
    step: int | None
    """The newest step that is in any file, and when it was made."""
    time: float | None
    checkpoint: Checkpoint | None
    """The newest whole checkpoint."""
    damaged: list[str]
    """What is wrong with each checkpoint that is not whole."""
    curves: dict[str, list[Point]]

    @property
    def is_alive(self) -> bool:
        """Whether it makes steps, as far as that is known."""
        return self.state.word == "running"

    @property
    def is_well(self) -> bool:
        """Whether it makes steps, has ended well, or is about to."""
        has_failed = self.record is not None and self.record.failed
        return self.is_alive or (self.state.word in ("closing", "ended") and not has_failed)

    @property
    def speed(self) -> float | None:
        """Steps per second: as the loop measures it, or else over the last points of the curves."""
        if self.record is not None:
            return self.record.steps_per_sec
        points = max(self.curves.values(), key=len, default=[])[-20:]
        passed = points[-1].time - points[0].time if points else 0.0
        return (points[-1].step - points[0].step) / passed if passed > 0 else None

    def as_plain(self) -> dict[str, Any]:
        """Return what ``status --json`` prints; times are in seconds since 1970."""
        newest = self.checkpoint
        return {
            "state": self.state.word,
            "message": self.state.text,
            "is_alive": self.is_alive,
            "record": None if self.record is None else self.record._asdict(),
            "step": self.step,
            "time": self.time,
            "steps_per_sec": self.speed,
            "secs_left": self.secs_left,
            "checkpoint": None if newest is None else {"name": newest.name, "step": newest.step, "time": newest.time},
            "damaged": self.damaged,
            "values": {tag: points[-1]._asdict() for tag, points in self.curves.items()},
        }

    @property
    def secs_left(self) -> float | None:
        """How long it takes to the last step, if there is one and the loop is alive."""
        last = None if self.record is None else self.record.last_step
        if last is None or self.step is None or not self.speed or not self.is_alive:
            return None
        secs = max(0.0, (last - self.step) / self.speed)
        return secs if secs < math.inf else None


def read_status(folder: str) -> Status:
    """Return the status of the training run in ``folder``.

    Raises:
        OSError: the folder cannot be read.
    """
    checkpoints, damaged = _checkpoints_in(folder)

    def read(name: str, start: int, end: int) -> bytes:
        with open(os.path.join(folder, name), "rb") as file:
            file.seek(start)
            return file.read(end - start)

    record, age = read_record(folder), None
    with suppress(OSError):  # the time of the file, as the clock of the machine that trains may differ
        age = time.time() - os.stat(os.path.join(folder, RECORD)).st_mtime
    status = _status(record, age, _SILENT_SECS, checkpoints, damaged, read_curves(_sizes_in(folder), read))
    # The record cannot say this of its process: the thread that writes it needs the lock too.
    keeps = None if record is None or record.ended else lock_stacks(folder, record.world_size)
    if record is None or keeps is None:
        return status
    rank, stacks = keeps
    where = f"in process {record.pid}" if record.world_size == 1 else f"on rank {rank}"
    if record.is_alive is False:
        text = f"{status.state.text}; a call kept Python's global lock {where}, {stacks} has its stacks"
        return replace(status, state=State("killed", text))
    text = f"stalled: a call keeps Python's global lock {where}, {stacks} has its stacks"
    return replace(status, state=State("stalled", text))


def read_status_of_copy(store: Store) -> Status:
    """Return the status of the training run whose copy is in ``store``, from a small part of it.

    Raises:
        CheckpointError: there is no copy.
        StoreError: the store does not answer.
    """
    sizes = store.list()
    if read_marker(store) is None:
        raise CheckpointError(f"{store.url} has no {MARKER}, so it is no copy of a training run")
    contents = CopyContents(store, sizes)
    own = [entry for entry in contents.whole.values() if "/" not in entry.name]
    checkpoints = [Checkpoint(entry.name, entry.step, entry.bytes, entry.time, entry.order) for entry in own]
    damaged = [f"{place}: {why}" for place, why in sorted(contents.unreadable.items()) if "/" not in place]
    curves = read_curves(
        {name: size for name, size in sizes.items() if is_copied(name)},
        lambda name, start, end: store.read(name, start, end) or b"",
    )
    data = store.read(RECORD)
    record = None if data is None else decoded_record(data)
    if record is not None:
        record = record._replace(ended=record.stopped is not None)  # copied in a teardown, before the loop says so
    return _status(record, store.age(RECORD), _SILENT_SECS + _COPY_SECS, checkpoints, damaged, curves)


def _status(
    record: Record | None,
    age: float | None,
    silent_secs: float,
    checkpoints: list[Checkpoint],
    damaged: list[str],
    curves: dict[str, list[Point]],
) -> Status:
    """Return the status, with all times by the clock of this machine if the ``age`` of the record is known."""
    ahead = 0.0
    if record is not None and age is not None:
        # The times of points and checkpoints are from the same clock as the record, so they are moved with it.
        ahead = time.time() - age - record.time
        times = (record.began + ahead, record.time + ahead, record.run_time + ahead)
        record = record._replace(began=times[0], time=times[1], run_time=times[2])
    curves = {tag: [point._replace(time=point.time + ahead) for point in points] for tag, points in curves.items()}
    newest = max(checkpoints, key=lambda checkpoint: checkpoint.order, default=None)
    known = [(point.step, point.time) for points in curves.values() for point in points[-1:]]
    if newest is not None:
        newest = replace(newest, time=newest.time + ahead)
        known.append((newest.step, newest.time))
    if record is not None and record.step is not None:  # it may have gone back, to a restored step
        known = [(record.step, record.run_time), *(each for each in known if each[1] > record.time)]
    step, moment = max(known, key=lambda each: each[1], default=(None, None))
    return Status(
        state=state_of(record, silent_secs),
        record=record,
        step=step,
        time=moment,
        checkpoint=newest,
        damaged=damaged,
        curves=curves,
    )


def _sizes_in(folder: str) -> dict[str, int]:
    """Return the size of each file in ``folder``, and in the folders in it that are no checkpoints."""
    sizes = {}
    for place in ("", *(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")):
        path = os.path.join(folder, place)
        if not place or not has_manifest(path):
            # The saver may have just removed a checkpoint, and the loop renamed a file.
            with suppress(FileNotFoundError), os.scandir(path) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        if entry.is_file():
                            sizes[f"{place}/{entry.name}".lstrip("/")] = entry.stat().st_size
    return sizes


def _checkpoints_in(folder: str) -> tuple[list[Checkpoint], list[str]]:
    """Return the whole checkpoints in ``folder``, and what is wrong with each of the others."""
    whole, damaged = [], []
    paths = sorted(entry.path for entry in os.scandir(folder) if entry.name[0] != ".")
    for path in paths:
        if is_checkpoint(path):
            try:
                whole.append(inspect(path))
            except DamagedCheckpointError as error:
                if os.path.exists(path):  # or else the saver has just removed it
                    damaged.append(str(error))
    if not whole and not all(map(os.path.exists, paths)):  # the saver has just replaced the only one
        return _checkpoints_in(folder)
    return whole, damaged


def state_of(record: Record | None, silent_secs: float = _SILENT_SECS) -> State:
    """Return whether the loop that wrote ``record`` is alive."""
    if record is None:
        return State("unknown", "no process says that it trains here")
    if record.ended:
        word = "failed" if record.failed else "ended"
        return State(word, f"{word} {ago(record.time)}: {record.stopped}")
    process = f"process {record.pid} on {record.host}"
    closes = "" if record.stopped is None else f" while it closes ({record.stopped})"
    is_alive, silence = record.is_alive, time.time() - record.time
    # Before the silence is judged: that a process is gone is known at once, without waiting for silent_secs.
    if is_alive is False:
        where = closes if record.stalled is None else f", stalled {record.stalled}{closes}"
        return State("killed", f"killed{where}: {process} is gone, {ago(record.time)} or later")
    if is_alive and process_state(record.pid) in STOPPED:
        text = f"stalled: {process} is stopped by a signal, and has written nothing for {span(silence)}"
        return State("stalled", text)
    if silence > silent_secs:
        return _silent(process, closes, silence, is_alive)
    ranks = f", {record.world_size} ranks" if record.world_size > 1 else ""
    if record.stalled is not None:
        length = span(time.time() - record.run_time)
        return State("stalled", f"stalled for {length} {record.stalled}{closes}, {process}{ranks}")
    if record.stopped is not None:
        return State("closing", f"closes after {record.stopped}, {process}{ranks}")
    return State("running", f"running, {process}{ranks}, since {ago(record.began)}")


def _silent(process: str, closes: str, silence: float, is_alive: bool | None) -> State:
    """Return the state of a loop whose record was not written for ``silence`` seconds."""
    length = span(silence)
    if is_alive is None:
        return State("silent", f"no sign of life of {process} since {length} ago{closes}: killed, or out of reach")
    if closes:
        return State("stalled", f"stalled for {length}{closes}, {process}")
    return State("silent", f"{process} is there, but has written nothing for {length}: {WHY_SILENT}")


def lines_of(status: Status) -> Iterator[tuple[str, str]]:
    """Yield what to print of ``status``, as a name and a text."""
    record = status.record
    yield "state", status.state.text
    if record is not None and record.report is not None:
        yield "report", record.report
    if status.step is not None and status.time is not None:
        last = None if record is None else record.last_step
        of = f" of {last} ({status.step / last:.0%})" if last else ""
        yield "step", f"{status.step}{of}, {ago(status.time)}"
    if status.speed is not None:
        left = "" if status.secs_left is None else f", {span(status.secs_left)} left"
        yield "speed", f"{status.speed:.3g} steps/s{left}"
    newest = status.checkpoint
    if newest is not None:
        yield "checkpoint", f"{newest.name}, whole, {newest.bytes:,} bytes, {ago(newest.time)}"
    else:
        yield "checkpoint", "none that is whole"
    for text in status.damaged:
        yield "damaged", text
    for tag, points in status.curves.items():
        yield tag, f"{points[-1].value:.6g} at step {points[-1].step}"


def ago(moment: float) -> str:
    """Return how long ago ``moment`` is, in seconds since 1970."""
    return f"{span(time.time() - moment)} ago"


def span(secs: float) -> str:
    """Return a length of time in one unit: ``"42 s"``."""
    secs = max(0.0, secs)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= 2 * length:
            return f"{math.floor(secs / length)} {unit}"
    return f"{math.floor(secs)} s"
