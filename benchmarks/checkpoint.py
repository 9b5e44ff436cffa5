"""Measure saving and restoring: Saver, with and without async_save, torch.save, torch.distributed.checkpoint.

    python benchmarks/checkpoint.py [--check] [--states 600x60 ...] [--megabytes 1000 ...] [--folder FOLDER]

The first tables have the processor time and the additional peak memory of one call, each in a process of its own, as at
the start of a training run. "600x60" is a model of 600 MB in 60 tensors. The others have how long a save blocks.

The state is a model and the two moments that Adam keeps of it. By hand, each checkpoint goes to a new file and then the
previous one is removed, which is what Saver(max_to_keep=1) does. Without fsync this could lose both files in a power
failure, because the operating system writes the data later. So Saver is compared with torch.save and fsync.

"Until on disk" ends when the file would survive a power failure. While a background thread writes the file, the
benchmark makes small real steps. "Step speed" is their speed during the write relative to before, and "time lost" is
how much longer they took. They are made once with all of torch's threads, and once with one fewer, which leaves a core
for the thread that writes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from torch import nn
from torchhooks import Saver, Session

from common import (
    Budget,
    Rounds,
    describe,
    finish,
    machine,
    median_ratio,
    mlp,
    parser,
    repeat,
    table,
    take_turns,
    us_per_run,
)

BY_HAND, SYNCED = "torch.save", "torch.save and fsync"
OURS, ASYNC = "Saver()", "Saver(async_save=True)"
ASYNC_SPARE_CORE = "the same, one core left free"
TENSOR = (1000, 1000)  # 4 MB
TENSORS_EACH = 3
LEAST_MEGABYTES = 4 * TENSORS_EACH


DCP_SAVE, LOAD, RESTORE, DCP_LOAD = "dcp.save", "torch.load and load_state_dict", "Saver().restore", "dcp.load"
ONCE = (SYNCED, OURS, ASYNC, DCP_SAVE, LOAD, RESTORE, DCP_LOAD)
"""What is measured once in each process. The first ones write what the last ones read."""


class Once(NamedTuple):
    """The figures of one call."""

    cpu: float
    """Processor time in seconds, until everything is on disk."""
    wall: float
    """How long the call took, in seconds."""
    peak: float
    """By how much the peak memory of the process grew, in megabytes."""


def once(name: str, state: str, folder: Path) -> Once:
    """Make the call ``name`` in this process."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")  # takes a second
    warnings.simplefilter("ignore")  # dcp warns of the process group that is missing
    torch.set_num_threads(1)
    megabytes, tensors = map(int, state.split("x"))
    model = nn.ParameterList([torch.ones(megabytes * 250_000 // tensors) for _ in range(tensors)])
    saver = Saver(async_save=name == ASYNC)

    def synced_save() -> None:
        with Path(folder, "plain.pt").open("wb") as file:
            torch.save({"model": model.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    calls: dict[str, Callable[[], object]] = {
        SYNCED: synced_save,
        OURS: lambda: saver.save(Session(model), folder / "model.ckpt", 1),
        ASYNC: lambda: saver.save(Session(model), folder / "async.ckpt", 1),
        DCP_SAVE: lambda: dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp"),
        LOAD: lambda: model.load_state_dict(torch.load(folder / "plain.pt", weights_only=True)["model"]),
        RESTORE: lambda: saver.restore(Session(model), folder / "model.ckpt-1"),
        DCP_LOAD: lambda: dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "dcp"),
    }
    before, began, started = _peak(), process_time(), perf_counter()
    calls[name]()
    wall = perf_counter() - started
    saver.close()
    return Once(process_time() - began, wall, _peak() - before)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def measure_once(state: str, rounds: int, folder: Path | None) -> dict[str, list[Once]]:
    """Make every call in a process of its own, in turns."""
    figures: dict[str, list[Once]] = {name: [] for name in ONCE}
    for _ in range(rounds):
        with TemporaryDirectory(dir=folder) as place:
            for name in ONCE:
                command = [sys.executable, __file__, "--once", name, state, place]
                printed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
                figures[name].append(Once(*json.loads(printed)))
    return figures


def show_once(state: str, figures: dict[str, list[Once]]) -> str:
    """Return the table of one state."""
    rows = [
        (
            name,
            median(each.cpu for each in several) * 1e3,
            f"{_relative(figures, name):.2f} x",
            median(each.wall for each in several) * 1e3,
            f"{median(each.peak for each in several):,.0f} MB",
        )
        for name, several in figures.items()
    ]
    megabytes, tensors = state.split("x")
    header = ["processor time", "relative to torch", "the call took", "additional peak memory"]
    return table([f"ms, {megabytes} MB in {int(tensors):,} tensors", *header], rows)


def _relative(figures: dict[str, list[Once]], name: str) -> float:
    base = SYNCED if name in (OURS, ASYNC, DCP_SAVE, SYNCED) else LOAD
    return median_ratio([each.cpu for each in figures[name]], [each.cpu for each in figures[base]])


def once_budgets(state: str, figures: dict[str, list[Once]]) -> list[Budget]:
    """Return the limits on processor time. Many small tensors cost a save the check of each."""
    save_limit = 1.1 if int(state.split("x")[1]) < 1000 else 1.3
    return [
        Budget(f"{state}, Saver(): processor time, relative to torch.save", _relative(figures, OURS), save_limit, "x"),
        Budget(f"{state}, restore: processor time, relative to torch.load", _relative(figures, RESTORE), 1.2, "x"),
    ]


class Measured(NamedTuple):
    """The figures of one size: seconds, except for ``speed``. Those after ``blocked`` are for ``async_save`` only."""

    megabytes: int
    blocked: Rounds
    """How long the call took."""
    first: dict[str, float]
    """How long the very first call took, which allocates the memory for its copy."""
    durable: Rounds
    """From the call until the file is on disk."""
    speed: Rounds
    """The speed of the steps made during the write, relative to before."""
    lost: Rounds
    """How much longer these steps took than before."""


def make_session(megabytes: int) -> tuple[Session, int]:
    """Return a model and its Adam as after one step, and the exact size of their state in megabytes."""
    number = megabytes // LEAST_MEGABYTES
    model = nn.ParameterList([torch.randn(TENSOR) for _ in range(number)])
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model:
        parameter.grad = torch.randn(TENSOR)
    optimizer.step()
    optimizer.zero_grad()
    return Session(model, optimizer), number * LEAST_MEGABYTES


def seconds(function: Callable[[], object]) -> float:
    """Measure a call. Sync first, so that no candidate pays for writes that another one left pending."""
    os.sync()
    started = perf_counter()
    function()
    return perf_counter() - started


class ByHand:
    """torch.save, to a new file each time."""

    def __init__(self, session: Session, folder: Path, *, sync: bool) -> None:
        self._session, self._folder, self._sync = session, folder, sync
        self._number = 0
        folder.mkdir()

    def __call__(self) -> float:
        return seconds(self._save)

    def _save(self) -> None:
        session = self._session
        assert session.model is not None
        assert session.optimizer is not None
        self._number += 1
        with self._path(self._number).open("wb") as file:
            torch.save({"model": session.model.state_dict(), "optimizer": session.optimizer.state_dict()}, file)
            if self._sync:
                file.flush()
                os.fsync(file.fileno())
        self._path(self._number - 1).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"model-{number}.pt"


class Ours:
    """Saver, writing on the training thread."""

    def __init__(self, session: Session, folder: Path, *, async_save: bool = False) -> None:
        self._session, self._folder = session, folder
        self._saver = Saver(max_to_keep=1, async_save=async_save)
        self._number = 0

    def __call__(self) -> float:
        return seconds(self._save)

    def _save(self) -> None:
        self._number += 1
        self._saver.save(self._session, self._folder / "model.ckpt", self._number)


class Async(Ours):
    """Saver, writing on a background thread, and its effect on steps made during the write."""

    def __init__(self, session: Session, folder: Path, threads: int) -> None:
        super().__init__(session, folder, async_save=True)
        training = mlp()
        self._train = repeat(training.step, training.batch)
        self._threads = threads
        self._pool = ThreadPoolExecutor(1)
        self.blocked: list[float] = []
        self.durable: list[float] = []
        self.speed: list[float] = []
        self.lost: list[float] = []

    def __call__(self) -> float:
        with threads(self._threads):
            usual = us_per_run(self._train, 1000) / 1e6
        blocked = super().__call__()
        started = perf_counter()
        written = self._pool.submit(self._saver.wait)
        steps = 0
        with threads(self._threads):
            while not written.done():
                self._train(10)
                steps += 10
        written.result()
        meanwhile = perf_counter() - started
        self.blocked.append(blocked)
        self.durable.append(blocked + meanwhile)
        self.speed.append(steps * usual / meanwhile)
        self.lost.append(meanwhile - steps * usual)
        return blocked


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let each operator of torch use ``number`` threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(megabytes: int, rounds: int, folder: Path | None) -> Measured:
    """Measure all candidates, in turns."""
    session, exact_megabytes = make_session(megabytes)
    most = torch.get_num_threads()
    with TemporaryDirectory(dir=folder) as name:
        asynchronous = {
            ASYNC: Async(session, Path(name, "async"), most),
            ASYNC_SPARE_CORE: Async(session, Path(name, "async_spare_core"), max(1, most - 1)),
        }
        blocked = take_turns(
            {
                BY_HAND: ByHand(session, Path(name, "by_hand"), sync=False),
                SYNCED: ByHand(session, Path(name, "synced"), sync=True),
                OURS: Ours(session, Path(name, "ours")),
                **asynchronous,
            },
            rounds,
        )
    # take_turns discarded its first round, so the first figure of the others is discarded too.
    return Measured(
        exact_megabytes,
        blocked,
        {name: saver.blocked[0] for name, saver in asynchronous.items()},
        {name: saver.durable[1:] for name, saver in asynchronous.items()},
        {name: saver.speed[1:] for name, saver in asynchronous.items()},
        {name: saver.lost[1:] for name, saver in asynchronous.items()},
    )


def show(measured: Measured) -> str:
    """Return the two tables of one size."""
    blocked = measured.blocked
    durable = {SYNCED: blocked[SYNCED], OURS: blocked[OURS], ASYNC: measured.durable[ASYNC]}
    rows = [
        (
            name,
            min(blocked[name]) * 1e3,
            median(blocked[name]) * 1e3,
            f"{median_ratio(blocked[name], blocked[SYNCED]):.2f} x",
            median(durable[name]) * 1e3 if name in durable else None,
        )
        for name in (BY_HAND, SYNCED, OURS, ASYNC)
    ]
    header = ["blocked: min", "median", "relative to torch.save and fsync", "until on disk"]
    async_rows = [
        (
            name,
            measured.first[name] * 1e3,
            median(blocked[name]) * 1e3,
            f"{median_ratio(blocked[name], blocked[OURS]):.2f} x",
            f"{median(measured.speed[name]):.2f} x",
            median(measured.lost[name]) * 1e3,
        )
        for name in (ASYNC, ASYNC_SPARE_CORE)
    ]
    async_header = ["blocked: first save", "later saves", "relative to Saver()", "step speed", "time lost"]
    what = f"ms, {measured.megabytes:,} MB of state"
    return f"{table([what, *header], rows)}\n\n{table([what, *async_header], async_rows)}"


def budgets(measured: Measured) -> list[Budget]:
    """Return a limit for writing on the training thread, and one for how long ``async_save`` blocks it."""
    blocked, size = measured.blocked, f"{measured.megabytes:,} MB"
    sync, asynchronous = median_ratio(blocked[OURS], blocked[SYNCED]), median_ratio(blocked[ASYNC], blocked[OURS])
    return [
        Budget(f"{size}, Saver(): relative to torch.save and fsync", sync, 1.15, "x"),
        Budget(f"{size}, Saver(async_save=True): blocked, relative to Saver()", asynchronous, 0.25, "x"),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--megabytes", type=int, nargs="+", default=[1000], help="sizes of the state (default: 1000)")
    options.add_argument("--states", nargs="+", default=["600x60", "60x20000"], help="models, as megabytes x tensors")
    options.add_argument("--once", nargs=3, help=argparse.SUPPRESS)
    options.add_argument("--rounds", type=int, default=9, help="number of rounds (default: %(default)s)")
    options.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    chosen = options.parse_args()
    if min(chosen.megabytes) < LEAST_MEGABYTES:
        options.error(f"--megabytes {min(chosen.megabytes)}: must be {LEAST_MEGABYTES} or more")
    logging.getLogger("torchhooks").addHandler(logging.NullHandler())
    if chosen.once:
        name, state, folder = chosen.once
        print(json.dumps(once(name, state, Path(folder))))
        return
    where = machine()
    print(describe(where), end="\n\n")
    figures: dict[str, dict[str, list[Once]]] = {}
    for state in chosen.states:
        figures[state] = measure_once(state, chosen.rounds, chosen.folder)
        print(show_once(state, figures[state]), end="\n\n", flush=True)
    done: list[Measured] = []
    for megabytes in chosen.megabytes:
        done.append(measure(megabytes, chosen.rounds, chosen.folder))
        print(show(done[-1]), end="\n\n")
    judged = [budget for state, several in figures.items() for budget in once_budgets(state, several)]
    judged += [budget for measured in done for budget in budgets(measured)]
    sizes = [measured._asdict() for measured in done]
    finish(chosen.results, "checkpoint", check=chosen.check, budgets=judged, machine=where, sizes=sizes, once=figures)


if __name__ == "__main__":
    main()
