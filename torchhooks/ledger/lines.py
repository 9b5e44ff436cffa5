"""The file of a ledger: ``ledger/rank-0.jsonl`` in the folder of a training run, one JSON object per line.

Lines are only ever appended. A process begins with a line about its environment, which has ``"ledger"``, the format::

    {"ledger": 2, "process": 2, "loop": 1, "resumed_at": 30, "world_size": 1, "torch": "2.13.0", ...}

The names of tensors stand in a line of their own, written again when they change, and each run is a line::

    {"names": {"parameters": ["0.weight", "0.bias"]}}
    {"loop": 1, "run": 31, "step": 31, "epoch": 1, "batch": 14, "process": 2, "digests": {"item": "0f3a55e1c2d46b87",
     ...}, "values": {"loss": 0.53}, "drawn": ["torch"], "format": 2}

A run that was made again, after a kill, has several lines, of which the last one counts. A line that cannot be read,
such as the torn last one of a killed process, is passed over. Lines of an older format have other digests for the same
values, so they are left out. They have no ``"format"``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchhooks.common.digests import WIDTH
from torchhooks.common.errors import TorchHooksError
from torchhooks.common.files import write_all

FORMAT = 2
FOLDER = "ledger"

QUANTITIES = ("item", "arguments", "random", "outputs", "gradients", "parameters", "optimizers", "state")
"""What the digests of a run may be of, in causal order: what differs first has caused what differs after it."""

NO_GRADIENT = "-" * WIDTH
"""In place of a digest: the optimizer made no step, or the parameter had no gradient."""

_BLOCK = 1 << 20
_encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one for each line
_FILE = re.compile(r"rank-(\d+)\.jsonl")

Environment = dict[str, Any]
"""The line that a process begins with."""


class LedgerError(TorchHooksError):
    """There is no ledger, or it cannot be read."""


@dataclass
class Entry:
    """One run, as a ledger has it.

    Args:
        loop: the number of the loop in its process, from 1 on.
        run: the number of the run in the whole training run, from 1 on.
        step: the global step after the run.
        epoch, batch: the numbers of the epoch and of the item in it, from 0 on; ``None`` outside of ``until_stop``.
        process: the number of the process, from 1 on.
        digests: by quantity, one digest, digests by name, or the digests of tensors one after the other.
        values: the numbers among the outputs, by name.
        drawn: the random generators that were drawn from since the process began.
        format: the format of the digests.
    """

    loop: int
    run: int
    step: int
    epoch: int | None
    batch: int | None
    process: int
    digests: dict[str, Any] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    format: int = 1  # of a line that does not say it

    @property
    def place(self) -> str:
        """Where the run stands in the data: ``"epoch 2, item 36"``."""
        parts = [("epoch", self.epoch), ("item", self.batch)]
        return ", ".join(f"{name} {number}" for name, number in parts if number is not None)


class LedgerFile:
    """The file of one rank, to which its process appends.

    Args:
        folder: the folder of the training run.
        rank: the rank.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.path = os.path.join(folder, FOLDER, f"rank-{rank}.jsonl")
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        # Unbuffered, so that the line of a run survives a kill right after it.
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - close() closes it
        if self._ends_torn():
            write_all(self._file, b"\n")  # a torn line stays as it is, and the next one begins after it

    def append(self, line: Mapping[str, object]) -> None:
        write_all(self._file, _encode(line).encode() + b"\n")

    def append_entry(self, entry: Entry) -> None:
        self.append(vars(entry))

    def close(self) -> None:
        self._file.close()

    def last_process(self) -> int:
        """Return the number of the last process that wrote here; 0 if there was none."""
        return next((line["process"] for line in _lines_backwards(self.path) if "process" in line), 0)

    def after(self, run: int, loop: int) -> tuple[dict[int, Entry], int]:
        """Return what was written last of each run of ``loop`` after number ``run``, and how many have an old format.

        Reads the file backwards, so that a long ledger costs no more than the runs that are asked for.
        """
        entries: dict[int, Entry] = {}
        old: set[int] = set()
        for line in _lines_backwards(self.path):
            entry = _entry(line)
            if entry is None or entry.loop != loop:
                continue
            if entry.run <= run:
                break  # what stands before it are runs that the checkpoint has
            if entry.format == FORMAT:
                entries.setdefault(entry.run, entry)
            else:
                old.add(entry.run)
        return entries, len(old - entries.keys())

    def _ends_torn(self) -> bool:
        with open(self.path, "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"


@dataclass
class Ledger:
    """What the file of one rank has.

    Args:
        rank: the rank.
        environments: the lines that processes began with, in order.
        entries: the last line of each run, by the numbers of the loop and of the run.
        names: the names of the tensors of a quantity, as they were written last.
        left_out: how many lines of an older format it has, which are not among the entries.
    """

    rank: int
    environments: list[Environment]
    entries: dict[tuple[int, int], Entry]
    names: dict[str, list[str]]
    left_out: int = 0


def read_ledgers(path: str | os.PathLike[str]) -> list[Ledger]:
    """Return the ledger of each rank in ``path``, the folder of a training run or its folder ``ledger``.

    Raises:
        LedgerError: there is none, it has a newer format, or all of its lines have an older one.
    """
    folder = os.fspath(path)
    inner = os.path.join(folder, FOLDER)
    if os.path.isdir(inner):
        folder = inner
    names = os.listdir(folder) if os.path.isdir(folder) else []
    ranks = sorted(int(match[1]) for match in map(_FILE.fullmatch, names) if match)
    if not ranks:
        raise LedgerError(f"{folder} has no ledger: give the folder of a training run that has a LedgerHook")
    return [_read(os.path.join(folder, f"rank-{rank}.jsonl"), rank) for rank in ranks]


def _read(path: str, rank: int) -> Ledger:
    ledger = Ledger(rank, [], {}, {})
    with open(path, "rb") as file:
        for data in file:
            line = _parsed(data)
            if "ledger" in line:
                if not isinstance(line["ledger"], int) or line["ledger"] > FORMAT:
                    raise LedgerError(
                        f"{path} has format {line['ledger']!r}, and this version of torchhooks reads {FORMAT}"
                    )
                ledger.environments.append(line)
            elif isinstance(line.get("names"), dict):
                ledger.names |= line["names"]
            elif (entry := _entry(line)) is not None:
                if entry.format == FORMAT:
                    ledger.entries[entry.loop, entry.run] = entry
                else:
                    ledger.left_out += 1
    if ledger.left_out and not ledger.entries:
        raise LedgerError(
            f"{path} has lines of format 1 only, and this version of torchhooks compares lines of format {FORMAT}: "
            "write both ledgers with one version"
        )
    return ledger


def _entry(line: dict[str, Any]) -> Entry | None:
    try:
        return Entry(**line) if "run" in line else None
    except TypeError:  # of a later version of torchhooks
        return None


def _parsed(data: bytes) -> dict[str, Any]:
    """Return the object in a line; an empty one if the line cannot be read."""
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def _lines_backwards(path: str) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        place = file.seek(0, os.SEEK_END)
        rest = b""
        while place:
            size = min(_BLOCK, place)
            place -= size
            file.seek(place)
            first, *lines = (file.read(size) + rest).split(b"\n")
            yield from map(_parsed, reversed(lines))
            rest = first
        yield _parsed(rest)
