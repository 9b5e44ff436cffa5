"""The file of a ledger: ``ledger/rank-0.jsonl`` in the folder of a training run, one JSON object per line.

Lines are only ever appended. A process begins with a line about its environment, which has ``"ledger"``, the format::

    {"ledger": 2, "process": 2, "loop": 1, "resumed_at": 30, "world_size": 1, "torch": "2.13.0", ...}

The names of tensors stand in a line of their own, written again when they change, and each run is a line::

    {"names": {"parameters": ["0.weight", "0.bias"]}}
    {"loop": 1, "run": 31, "step": 31, "epoch": 1, "batch": 14, "process": 2, "digests": {"item": "0f3a55e1c2d46b87",
     ...}, "values": {"loss": 0.53}, "drawn": ["torch"], "format": 2}

A run that was made again, after a kill, has several lines, of which the last one counts. What a reader leaves out:

=============  ====================================================================================================
older          The lines of an older training run in the same folder: a process began with ``"resumed_at": 0``.
undone         The lines of runs after the checkpoint that a process resumed from, if no process made them again.
old_format     Lines of an older format have other digests for the same values. They have no ``"format"``.
unreadable     Lines that no LedgerHook writes, such as the torn last one of a killed process.
=============  ====================================================================================================
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, BinaryIO, NamedTuple, TypeGuard

from torchhooks.common.digests import WIDTH
from torchhooks.common.errors import TorchHooksError
from torchhooks.common.files import write_all
from torchhooks.common.text import shown

FORMAT = 2
FOLDER = "ledger"

QUANTITIES = ("item", "arguments", "random", "outputs", "gradients", "parameters", "optimizers", "state")
"""What the digests of a run may be of, in causal order: what differs first has caused what differs after it."""

NO_GRADIENT = "-" * WIDTH
"""In place of a digest: the optimizer made no step, or the parameter had no gradient."""

_NAMED = frozenset({"random", "optimizers", "state"})  # the quantities that have digests by name
_BLOCK = 1 << 20
_LONGEST = 1 << 24  # bytes of a line; that of a model of 100,000 tensors has 3 MB
_LARGEST = 1 << 63  # of a number in a line: what is larger was not written by a hook
_encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one for each line
_FILE = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.jsonl")

Environment = dict[str, Any]
"""The line that a process begins with."""


Shape = tuple[bool, ...]
"""Whether a run has a digest of each of the :data:`QUANTITIES`, and whether it has any value."""


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
    def has(self) -> Shape:
        return (*[name in self.digests for name in QUANTITIES], bool(self.values))

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
        # Unbuffered, so that the line of a run survives a kill right after it. It is not synced, so a power failure may
        # take the last lines with it.
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
        numbers = (line.get("process") for line in map(_parsed, _lines_backwards(self.path)))
        return next((number for number in numbers if _is_count(number)), 0)

    def environment(self, process: int) -> Environment:
        """Return the line that a process began with; an empty one if that cannot be read."""
        lines = (_parsed(data) for data in _lines_backwards(self.path) if b'"ledger"' in data)
        return next((line for line in lines if "ledger" in line and line.get("process") == process), {})

    def after(self, run: int, loop: int, process: int) -> tuple[dict[int, Entry], int]:
        """Return what was written last of each run of ``loop`` after number ``run``, and how many have an old format.

        Before a process other than ``process`` that began with the first run, the lines are of an older training run.

        Reads the file backwards, so that a long ledger costs no more than the runs that are asked for.
        """
        entries: dict[int, Entry] = {}
        old: set[int] = set()
        for data in _lines_backwards(self.path):
            line = _parsed(data)
            if "ledger" in line:
                if line.get("loop") == loop and line.get("resumed_at") == 0 and line.get("process") != process:
                    break
                continue
            entry = _entry(line)
            if entry is None or entry.loop != loop:
                continue
            if entry.run <= run:
                break  # what stands before it are runs that the checkpoint has
            if entry.format == FORMAT:
                # Backwards, the line that was written last comes first.
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


# -- a line that is read ----------------------------------------------------------------------------------------------


def _written() -> re.Pattern[bytes]:
    """Return what matches the line of a run as a LedgerHook writes it, which is read without making its objects.

    Its groups are the loop, the run, the digests of each quantity, the values, and what was drawn from. All that it
    matches is valid JSON, and has the types of an :class:`Entry`. Any other line is parsed as JSON.
    """
    number = rb"(?:0|[1-9][0-9]{0,17})"
    place = rb"(?:" + number + rb"|null)"
    text = rb'"[ !#-\[\]-~]*"'  # of printable ASCII, without an escape
    real = rb"-?(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{1,30})?(?:e[+-]?[0-9]{1,3})?"

    def listed(item: bytes) -> bytes:
        # The *+ gives nothing back: a line that does not match is not tried again with each shorter list.
        return rb"(?:" + item + rb"(?:," + item + rb")*+)?"

    named = rb"\{" + listed(text + b":" + text) + rb"\}"
    digests = b"".join(
        rb'(?:"%s":(%s)(?:,(?=")|(?=\})))?' % (name.encode(), named if name in _NAMED else text) for name in QUANTITIES
    )
    values = rb"\{" + listed(text + b":(?:" + text + b"|" + real + b")") + rb"\}"
    return re.compile(
        rb'\{"loop":([1-9][0-9]{0,17}),"run":(%b),"step":%b,"epoch":%b,"batch":%b,"process":%b,"digests":\{%b\},'
        rb'"values":(%b),"drawn":(\[%b\]),"format":%d\}\n?'
        % (number, number, place, place, number, digests, values, listed(text), FORMAT)
    )


_match = _written().fullmatch
_RANDOM, _VALUES = QUANTITIES.index("random"), len(QUANTITIES)  # places in Line.parts
_named_texts = re.compile(rb'"([^"]*)":"([^"]*)"').findall  # of a part of a line that _match has


@lru_cache(maxsize=64)
def _drawn(one: bytes | None, other: bytes | None) -> list[bytes]:
    """Return the generators that either of two runs has drawn from."""
    return re.findall(rb'"([^"]*)"', (one or b"") + (other or b""))


class Line:
    """The line of a run, of which an object is only made where that is needed.

    Args:
        data: the bytes of the line.
        loop, run: the numbers of the loop and of the run.
        parts: the digests of each quantity, the values, and what was drawn from, as they are written; ``None`` if the
            line was parsed as JSON.
        entry: what it was parsed to.
    """

    __slots__ = ("_entry", "data", "environment", "loop", "names", "parts", "run")

    names: Mapping[str, list[str]]
    """The names of the tensors of its quantities."""
    environment: Environment | None
    """The line that its process began with; ``None`` if that is missing."""

    def __init__(
        self, data: bytes, loop: int, run: int, parts: tuple[bytes | None, ...] | None, entry: Entry | None = None
    ) -> None:
        self.data, self.loop, self.run, self.parts, self._entry = data, loop, run, parts, entry

    @property
    def entry(self) -> Entry:
        if self._entry is None:
            self._entry = Entry(**json.loads(self.data))
        return self._entry

    @property
    def has(self) -> Shape:
        if self.parts is None:
            return self.entry.has
        return (*[part is not None for part in self.parts[:_VALUES]], self.parts[_VALUES] != b"{}")

    def is_equal(self, other: Line) -> bool:
        """Whether both have the same digests and values, as far as that can be told without parsing all of them."""
        mine, theirs = self.parts, other.parts
        if mine is None or theirs is None:
            return False
        if mine[:_RANDOM] != theirs[:_RANDOM] or mine[_RANDOM + 1 : -1] != theirs[_RANDOM + 1 : -1]:
            return False
        if mine[_RANDOM] == theirs[_RANDOM]:
            return True
        random, other_random = mine[_RANDOM], theirs[_RANDOM]
        if random is None or other_random is None:
            return False
        # Two processes seldom have one state of a generator without a seed.
        states, others = dict(_named_texts(random)), dict(_named_texts(other_random))
        return all(
            states.get(name) == others.get(name) or name not in states or name not in others
            for name in _drawn(mine[-1], theirs[-1])
        )


def _line(data: bytes) -> Line | dict[str, Any]:
    """Return the line of a run; or the object in any other line, an empty one if it cannot be read."""
    matched = _match(data)
    if matched is not None:
        parts = matched.groups()
        return Line(data, int(parts[0]), int(parts[1]), parts[2:])
    line = _parsed(data)
    if "ledger" in line or "names" in line:
        return line
    entry = _entry(line)
    return line if entry is None or entry.format != FORMAT else Line(data, entry.loop, entry.run, None, entry)


def _parsed(data: bytes) -> dict[str, Any]:
    """Return the object in a line; an empty one if the line cannot be read."""
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def _entry(line: dict[str, Any]) -> Entry | None:
    """Return the run in a line; ``None`` if the line is another one. Of an older format, only its numbers are sure."""
    try:
        entry = Entry(**line)
    except TypeError:  # a later version of torchhooks, or no run at all
        return None
    numbers = (entry.loop, entry.run, entry.process, entry.format)
    if not (all(map(_is_count, numbers)) and entry.loop > 0 and _is_whole(entry.step)):
        return None
    if not all(place is None or _is_whole(place) for place in (entry.epoch, entry.batch)):
        return None
    return entry if entry.format != FORMAT or _is_of_this_format(entry) else None


def _is_of_this_format(entry: Entry) -> bool:
    if not (isinstance(entry.digests, dict) and isinstance(entry.values, dict) and isinstance(entry.drawn, list)):
        return False
    for quantity, digest in entry.digests.items():
        if quantity in _NAMED:
            if not (isinstance(digest, dict) and _is_texts(digest.values())):
                return False
        elif not isinstance(digest, str):
            return False
    return _is_texts(entry.drawn) and all(map(_is_value, entry.values.values()))


def _is_whole(number: object) -> TypeGuard[int]:
    # Not isinstance(), for which the true of JSON is a number.
    return type(number) is int and -_LARGEST < number < _LARGEST


def _is_count(number: object) -> TypeGuard[int]:
    return type(number) is int and 0 <= number < _LARGEST


def _is_texts(texts: Iterable[object]) -> bool:
    return all(type(text) is str for text in texts)


def _is_value(value: object) -> bool:
    return isinstance(value, (float, str)) or _is_whole(value)


def _lines_backwards(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        place = file.seek(0, os.SEEK_END)
        rest = b""
        while place:
            size = min(_BLOCK, place)
            place -= size
            file.seek(place)
            # The first piece may be the end of a line that begins in the block before.
            first, *lines = (file.read(size) + rest).split(b"\n")
            yield from reversed(lines)
            rest = first
        yield rest


# -- a ledger that is read --------------------------------------------------------------------------------------------


class RunSet:
    """Numbers of runs, of which each takes a bit."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: dict[int, int] | None = None) -> None:
        # In blocks of 1024: Python copies an int to set a bit in it, and one int for all runs would be long.
        self._blocks: dict[int, int] = {} if blocks is None else blocks

    def add(self, run: int) -> None:
        block = run >> 10
        self._blocks[block] = self._blocks.get(block, 0) | 1 << (run & 1023)

    def cut(self, run: int) -> RunSet:
        """Remove the runs after number ``run``, and return them."""
        start, rest = (run + 1) >> 10, (1 << ((run + 1) & 1023)) - 1
        removed = {block: bits for block, bits in self._blocks.items() if block > start}
        for block in removed:
            del self._blocks[block]
        bits = self._blocks.get(start, 0)
        if bits & ~rest:
            removed[start], self._blocks[start] = bits & ~rest, bits & rest
        return RunSet(removed)

    def update(self, other: RunSet) -> None:
        for block, bits in other._blocks.items():
            self._blocks[block] = self._blocks.get(block, 0) | bits

    def __sub__(self, other: RunSet) -> RunSet:
        return RunSet({block: bits & ~other._blocks.get(block, 0) for block, bits in self._blocks.items()})

    def __and__(self, other: RunSet) -> RunSet:
        return RunSet({block: bits & other._blocks.get(block, 0) for block, bits in self._blocks.items()})

    def __len__(self) -> int:
        return sum(bits.bit_count() for bits in self._blocks.values())


@dataclass(slots=True)
class _Stretch:
    """A part of the file in which the runs of one loop only increase, written by one process."""

    first: int
    last: int
    start: int
    end: int
    """From which byte on it is in the file, and where it ends; lines of other loops may stand between its own."""
    names: dict[str, list[str]]
    environment: Environment | None


class Omissions(NamedTuple):
    """How many lines of a ledger are left out; see the top of this module."""

    older: int = 0
    undone: int = 0
    old_format: int = 0
    unreadable: int = 0


class Ledger:
    """What the file of one rank has: the last line of each run, without those that are left out.

    The file is read twice. The first time, here, finds out which lines count. They are read again by iterating, in the
    order of their loops and runs, and never held all at once.

    Args:
        path: the file.
        rank: the rank.
        folder: the folder that messages name.

    Raises:
        LedgerError: it has a newer format.
    """

    def __init__(self, path: str, rank: int, folder: str) -> None:
        self.path, self.rank, self.folder = path, rank, folder
        self.environments: list[Environment] = []
        """The lines that processes began with, in order."""
        self.names: dict[str, list[str]] = {}
        """The names of the tensors of a quantity, as they were written last."""
        self.runs: dict[int, RunSet] = {}
        """The numbers of the runs, by loop."""
        self.world_size = 0
        """How many ranks wrote ledgers since the training run began; 0 if that is not known."""
        self.of_other_ranks = 0
        """How many lines the files of further ranks have, which an older training run had."""
        self._stretches: dict[int, list[_Stretch]] = {}
        self._open: dict[int, _Stretch] = {}  # to which a line can still be added, by loop
        self._names: dict[int, dict[str, list[str]]] = {}
        self._new_names: dict[str, list[str]] = {}
        self._environments: dict[int, Environment] = {}
        self._suspended: set[int] = set()
        """The loops that a new start has not come to yet: it may continue them, or begin them, too."""
        self._older: dict[int, RunSet] = {}
        self._undone: dict[int, RunSet] = {}
        self._old_format = self._unreadable = 0
        self._scan()

    def __len__(self) -> int:
        return sum(map(len, self.runs.values()))

    def __iter__(self) -> Iterator[Entry]:
        """Yield the runs in order, by the numbers of their loops and by their own."""
        return (line.entry for line in self.lines())

    def lines(self) -> Iterator[Line]:
        """Yield the lines of the runs in order."""
        with open(self.path, "rb", buffering=_BLOCK) as file:
            for loop, stretches in sorted(self._stretches.items()):
                for stretch in stretches:
                    yield from _read(file, loop, stretch)

    @property
    def is_empty(self) -> bool:
        """Whether no line of the file can be read."""
        return not (self.environments or self.runs or self.names or self._old_format)

    @property
    def omissions(self) -> Omissions:
        older = undone = 0
        nothing = RunSet()
        for loop, runs in self.runs.items():
            # A line counts once: not if the same run has a newer line, whatever became of that.
            lost = self._undone.get(loop, nothing) - runs
            undone += len(lost)
            older += len(self._older.get(loop, nothing) - runs - lost)
        return Omissions(older + self.of_other_ranks, undone, self._old_format, self._unreadable)

    # -- which lines count --------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        end = 0
        with open(self.path, "rb", buffering=_BLOCK) as file:
            for data, size in _lines_of(file):
                start, end = end, end + size
                matched = _match(data)
                if matched is not None:  # nearly every line
                    loop, run = matched.group(1, 2)
                    self._add(int(loop), int(run), start, end)
                    continue
                line = _line(data)
                if isinstance(line, Line):
                    self._add(line.loop, line.run, start, end)
                elif "ledger" in line:
                    self._begin_process(line)
                elif "names" in line:
                    self._add_names(line["names"])
                elif data.strip():
                    self._add_other(line)
        # Since the new start, no process has come to these loops: they are those of the older training run.
        for loop in self._suspended:
            self._leave_out_older(loop)

    def _begin_process(self, line: Environment) -> None:
        written = line["ledger"]
        if not _is_count(written) or written > FORMAT:
            raise self._newer(written)
        loop, run = line.get("loop"), line.get("resumed_at")
        if loop is None and run is None:  # as in a file that was written by hand
            self._environments, self._open = {}, {}
        elif _is_count(loop) and _is_count(run):
            self._environments[loop] = line
            ranks = line.get("world_size")
            if _is_count(ranks):
                # The first loop begins a new training run, which may have fewer ranks. All others belong to this one.
                self.world_size = ranks if loop == 1 and not run else max(self.world_size, ranks)
            self._resume(loop, run)
        else:
            self._unreadable += 1
            return
        self.environments.append(line)

    def _resume(self, loop: int, run: int) -> None:
        """Leave out the lines of ``loop`` that a process has undone by continuing after ``run``."""
        self._suspended.discard(loop)
        if run:
            self._cut(loop, run)
        else:
            self._leave_out_older(loop)
            # A loop without a checkpoint begins again in each process, whatever happens to the loops after it.
            self._suspended |= {other for other in self.runs if other > loop}

    def _leave_out_older(self, loop: int) -> None:
        self._cut(loop, -1)
        self._older.setdefault(loop, RunSet()).update(self._undone.pop(loop, RunSet()))

    def _cut(self, loop: int, run: int) -> None:
        """Leave out the lines of ``loop`` after number ``run``."""
        self._open.pop(loop, None)
        if loop in self.runs:
            self._undone.setdefault(loop, RunSet()).update(self.runs[loop].cut(run))
            stretches = self._stretches[loop]
            while stretches and stretches[-1].first > run:
                stretches.pop()
            # What the cut leaves of a stretch is read again from the same bytes, and _read() stops at its last run.
            if stretches:
                stretches[-1].last = min(stretches[-1].last, run)

    def _add(self, loop: int, run: int, start: int, end: int) -> None:
        if self._new_names:
            self._use_new_names(loop)
        if self._suspended:
            self._suspended.discard(loop)
        stretch = self._open.get(loop)
        if stretch is None or run < stretch.last:
            stretches = self._stretches.setdefault(loop, [])
            if stretches and run <= stretches[-1].last:
                self._cut(loop, run - 1)  # this process makes runs again, after a recovery
            environment = self._environments.get(loop) or (self.environments[-1] if self.environments else None)
            stretch = _Stretch(run, run, start, end, self._names.get(loop, {}), environment)
            self._open[loop] = stretch
            stretches.append(stretch)
        stretch.last, stretch.end = run, end  # of two lines of one run, the second one counts
        self.runs.setdefault(loop, RunSet()).add(run)

    def _add_names(self, names: object) -> None:
        if isinstance(names, dict) and all(isinstance(texts, list) and _is_texts(texts) for texts in names.values()):
            self.names |= names
            self._new_names |= names
        else:
            self._unreadable += 1

    def _use_new_names(self, loop: int) -> None:
        """Have the names that were read last be those of the loop whose line comes after them."""
        names = self._names.get(loop, {})
        if not self._new_names.items() <= names.items():
            self._names[loop] = names | self._new_names
            # A stretch has one set of names, so the next line begins another stretch.
            self._open.pop(loop, None)
        self._new_names = {}

    def _add_other(self, line: dict[str, Any]) -> None:
        entry = _entry(line)
        if entry is None:
            self._unreadable += 1
        elif entry.format > FORMAT:
            raise self._newer(entry.format)
        else:
            self._old_format += 1

    def _newer(self, written: object) -> LedgerError:
        return LedgerError(f"{self.path} has format {shown(written)}, and this version of torchhooks reads {FORMAT}")


def _lines_of(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield each line and its number of bytes. A line that is too long is yielded as one that cannot be read."""
    for data in iter(partial(file.readline, _LONGEST), b""):
        size = len(data)
        # A file without ends of lines must not be read into the memory as a whole.
        if size == _LONGEST and data[-1] != 10:
            data = b"{"  # cannot be read either
            while rest := file.readline(_LONGEST):
                size += len(rest)
                if rest[-1] == 10:
                    break
        yield data, size


def _read(file: BinaryIO, loop: int, stretch: _Stretch) -> Iterator[Line]:
    file.seek(stretch.start)
    left = stretch.end - stretch.start
    before: Line | None = None
    for data, size in _lines_of(file):
        line = _line(data)
        if isinstance(line, Line) and line.loop == loop:
            if line.run > stretch.last:
                break
            # A line is held back until the next run comes: a second line of the same run takes its place.
            if before is not None and line.run != before.run:
                yield before
            line.names, line.environment = stretch.names, stretch.environment
            before = line
        left -= size
        if left <= 0:
            break
    if before is not None:
        yield before


def read_ledgers(path: str | os.PathLike[str]) -> list[Ledger]:
    """Return the ledger of each rank in ``path``, the folder of a training run or its folder ``ledger``.

    Raises:
        LedgerError: there is none, it cannot be read, it has a newer format, or all of its lines have an older one.
    """
    folder = os.fspath(path)
    inner = os.path.join(folder, FOLDER)
    place = inner if os.path.isdir(inner) else folder
    names = os.listdir(place) if os.path.isdir(place) else []
    ranks = sorted(int(match[1]) for match in map(_FILE.fullmatch, names) if match)
    if not ranks:
        raise LedgerError(f"{folder} has no ledger: give the folder of a training run that has a LedgerHook")
    ledgers = [_ledger(os.path.join(place, f"rank-{rank}.jsonl"), rank, folder) for rank in ranks]
    if all(ledger.is_empty for ledger in ledgers):
        raise LedgerError(f"{folder} has no ledger with a line that can be read: give the folder of a training run")
    first = ledgers[0]
    # A training run with fewer ranks does not touch the files of the others, which an older one has left.
    older = [ledger for ledger in ledgers if ledger.world_size > ledger.rank >= first.world_size > 0]
    first.of_other_ranks = sum(map(len, older))
    return [ledger for ledger in ledgers if ledger not in older]


def _ledger(path: str, rank: int, folder: str) -> Ledger:
    if not os.path.isfile(path):  # a pipe would never end
        raise LedgerError(f"{path} is not a file: give the folder of a training run that has a LedgerHook")
    try:
        ledger = Ledger(path, rank, folder)
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror}") from error
    if ledger.omissions.old_format and not len(ledger):
        raise LedgerError(
            f"{path} has lines of format 1 only, and this version of torchhooks compares lines of format {FORMAT}: "
            "write both ledgers with one version"
        )
    return ledger
