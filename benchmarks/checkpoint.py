"""How long a training stands still for a checkpoint: Saver, on the training's thread and behind it, beside torch.save.

    python benchmarks/checkpoint.py [--check] [--megabytes 1000 ...] [--folder FOLDER]

The state is a model and Adam's two moments of it. By hand, a checkpoint goes to a new file and the one before it is
removed, which is what Saver(max_to_keep=1) does; only fsync makes that safe, so this is what Saver is measured by.
torch.save alone leaves the file to the system, which writes it later or, if the power fails, never.

"Until it is on disk" ends when the file would survive that. While it is written behind, small real steps are made:
their speed meanwhile is a part of that of the same steps before, and "lost" is what they took longer. Once they are
made with all of torch's threads, and once with one fewer, which leaves a core to the thread that writes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

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
    over,
    parser,
    table,
    take_turns,
    us_a_run,
)

BY_HAND, SYNCED = "torch.save by hand", "torch.save by hand, and fsync"
OURS, BEHIND = "Saver()", "Saver(async_save=True)"
A_CORE_LEFT = "the same, a core left to it"
TENSOR = (1000, 1000)  # 4 MB
TENSORS_EACH = 3
LEAST_MEGABYTES = 4 * TENSORS_EACH


class Measured(NamedTuple):
    """Seconds, a figure a round; of those that are written behind by name."""

    megabytes: int
    still: Rounds
    first: dict[str, float]
    """The very first save, which has to get the memory for its copy."""
    durable: Rounds
    """From the call of a save that is written behind until it is on disk."""
    speed: Rounds
    """Of the steps made meanwhile: a part of what it was before."""
    lost: Rounds
    """What these took longer than before."""


def make_session(megabytes: int) -> tuple[Session, int]:
    """A model and its Adam, as after a step; and how many megabytes that really is."""
    number = megabytes // LEAST_MEGABYTES
    model = nn.ParameterList([torch.randn(TENSOR) for _ in range(number)])
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model:
        parameter.grad = torch.randn(TENSOR)
    optimizer.step()
    optimizer.zero_grad()
    return Session(model, optimizer), number * LEAST_MEGABYTES


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes, when the disk has nothing to do: what one candidate left to the system is its own."""
    os.sync()
    started = perf_counter()
    function()
    return perf_counter() - started


class ByHand:
    """torch.save, to another file each time."""

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
    """Saver, on the thread that trains."""

    def __init__(self, session: Session, folder: Path, *, async_save: bool = False) -> None:
        self._session, self._folder = session, folder
        self._saver = Saver(max_to_keep=1, async_save=async_save)
        self._number = 0

    def __call__(self) -> float:
        return seconds(self._save)

    def _save(self) -> None:
        self._number += 1
        self._saver.save(self._session, self._folder / "model.ckpt", self._number)


class Behind(Ours):
    """Saver, behind the thread that trains, and what the training notices of it."""

    def __init__(self, session: Session, folder: Path, threads: int) -> None:
        super().__init__(session, folder, async_save=True)
        training = mlp()
        self._train = over(training.step, training.batch)
        self._threads = threads
        self._pool = ThreadPoolExecutor(1)
        self.still: list[float] = []
        self.durable: list[float] = []
        self.speed: list[float] = []
        self.lost: list[float] = []

    def __call__(self) -> float:
        with threads(self._threads):
            usual = us_a_run(self._train, 1000) / 1e6
        still = super().__call__()
        started = perf_counter()
        written = self._pool.submit(self._saver.wait)
        steps = 0
        with threads(self._threads):
            while not written.done():
                self._train(10)
                steps += 10
        written.result()
        meanwhile = perf_counter() - started
        self.still.append(still)
        self.durable.append(still + meanwhile)
        self.speed.append(steps * usual / meanwhile)
        self.lost.append(meanwhile - steps * usual)
        return still


@contextmanager
def threads(number: int) -> Iterator[None]:
    """As many threads for each operator of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(megabytes: int, rounds: int, folder: Path | None) -> Measured:
    """All of them, in turns."""
    session, really = make_session(megabytes)
    most = torch.get_num_threads()
    with TemporaryDirectory(dir=folder) as name:
        behind = {
            BEHIND: Behind(session, Path(name, "behind"), most),
            A_CORE_LEFT: Behind(session, Path(name, "a_core_left"), max(1, most - 1)),
        }
        still = take_turns(
            {
                BY_HAND: ByHand(session, Path(name, "by_hand"), sync=False),
                SYNCED: ByHand(session, Path(name, "synced"), sync=True),
                OURS: Ours(session, Path(name, "ours")),
                **behind,
            },
            rounds,
        )
    # take_turns threw away the first round
    return Measured(
        really,
        still,
        {name: saver.still[0] for name, saver in behind.items()},
        {name: saver.durable[1:] for name, saver in behind.items()},
        {name: saver.speed[1:] for name, saver in behind.items()},
        {name: saver.lost[1:] for name, saver in behind.items()},
    )


def show(measured: Measured) -> str:
    """The tables."""
    still = measured.still
    durable = {SYNCED: still[SYNCED], OURS: still[OURS], BEHIND: measured.durable[BEHIND]}
    rows = [
        (
            name,
            min(still[name]) * 1e3,
            median(still[name]) * 1e3,
            f"{median_ratio(still[name], still[SYNCED]):.2f} x",
            median(durable[name]) * 1e3 if name in durable else None,
        )
        for name in (BY_HAND, SYNCED, OURS, BEHIND)
    ]
    header = ["stands still: least", "median", "beside by hand and fsync", "until it is on disk"]
    behind = [
        (
            name,
            measured.first[name] * 1e3,
            median(still[name]) * 1e3,
            f"{median_ratio(still[name], still[OURS]):.2f} x",
            f"{median(measured.speed[name]):.2f} x",
            median(measured.lost[name]) * 1e3,
        )
        for name in (BEHIND, A_CORE_LEFT)
    ]
    behind_header = ["stands still: first", "later", "beside Saver()", "steps' speed meanwhile", "lost meanwhile"]
    what = f"ms, a state of {measured.megabytes:,} MB"
    return f"{table([what, *header], rows)}\n\n{table([what, *behind_header], behind)}"


def budgets(measured: Measured) -> list[Budget]:
    """A promise about how it is written, one about how little of that is noticed."""
    still, size = measured.still, f"{measured.megabytes:,} MB"
    sync, behind = median_ratio(still[OURS], still[SYNCED]), median_ratio(still[BEHIND], still[OURS])
    return [
        Budget(f"{size}, Saver(): beside torch.save and fsync", sync, 1.15, "x"),
        Budget(f"{size}, Saver(async_save=True): stands still, beside Saver()", behind, 0.25, "x"),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--megabytes", type=int, nargs="+", default=[1000], help="sizes (default: 1000)")
    options.add_argument("--rounds", type=int, default=9, help="rounds (default: %(default)s)")
    options.add_argument("--folder", type=Path, help="where to write (default: the system's folder for such files)")
    chosen = options.parse_args()
    if min(chosen.megabytes) < LEAST_MEGABYTES:
        options.error(f"--megabytes {min(chosen.megabytes)}: must be {LEAST_MEGABYTES} or more")
    logging.getLogger("torchhooks").addHandler(logging.NullHandler())
    where = machine()
    print(describe(where), end="\n\n")
    done: list[Measured] = []
    for megabytes in chosen.megabytes:
        done.append(measure(megabytes, chosen.rounds, chosen.folder))
        print(show(done[-1]), end="\n\n")
    judged = [budget for measured in done for budget in budgets(measured)]
    sizes = [measured._asdict() for measured in done]
    finish(chosen.results, "checkpoint", check=chosen.check, budgets=judged, machine=where, sizes=sizes)


if __name__ == "__main__":
    main()
