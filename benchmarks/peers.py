"""Compare torchhooks with other training libraries: the overhead per step of the same monitoring around the same step.

    pip install -e . --group peers && python benchmarks/peers.py [--check] [--only ignite lightning]

It prints a line per library and round, and makes as many rounds as fit into five minutes, or ``--minutes``.

Figures are processor time beyond the bare ``for`` loop, which is measured right before: the time that the training
thread spends between two steps, measured from inside the step, plus the time of all other threads of the process from
the first step to the end. What the training thread does to start and end a library's loop is not counted. The last
column is wall time, between two steps only. It does not include the time that a background thread, such as the thread
of torch's SummaryWriter, takes away from the steps.

Each library (peer) runs in its own process, and the processes take turns. ``peer_loops/`` has one file per peer, which
shows how it is used. A peer that is not installed is skipped, and listed as such.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time_ns, thread_time_ns
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from common import Budget, Rounds, Stamped, describe, empty, finish, machine, mlp, parser, table
from peer_loops import IDLE_HOOKS, PERIOD, Job

LABELS = {
    "smallest_wrapper": "smallest wrapper",
    "by_hand": "by hand, `if step % 100 == 0`",
    "torchhooks": "torchhooks",
    "fabric": "Fabric (own loop)",
    "accelerate": "Accelerate (own loop)",
    "skorch": "skorch",
    "keras": "Keras 3 on torch",
    "ignite": "Ignite",
    "torchtnt": "torchtnt",
    "mmengine": "MMEngine",
    "hf_trainer": "HF Trainer",
    "lightning": "Lightning",
}
HEADER = {
    "plain": "everything off",
    "monitored": "monitored",
    "nan": "with a NaN check",
    "idle": "per idle hook",
    "wall": "monitored, wall time between steps",
}
STEPS = {"empty": empty, "real": mlp}

Figures = dict[str, Rounds]
"""The figures by library, then by column."""


# -- in the process of one peer ----------------------------------------------------------------------------------------


def serve(name: str, connection: Connection, folder: str) -> None:
    """Import a peer, send back its columns and version, and then measure what is requested until ``None`` arrives.

    What the peer prints and logs goes to a file. An error is sent back as text.
    """
    log = os.open(f"{folder}/{name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        peer = importlib.import_module(f"peer_loops.{name}")
        logging.basicConfig(level=logging.INFO, force=True)  # after the import, since some configure logging
        wall = ("wall",) if "monitored" in peer.COLUMNS else ()
        connection.send(((*peer.COLUMNS, *wall), version(peer.PACKAGE) if peer.PACKAGE else None))
        while (asked := connection.recv()) is not None:
            which, column, steps = asked
            with TemporaryDirectory() as run_folder:
                connection.send(measure(peer, which, column, steps, run_folder))
    except Exception:
        connection.send(traceback.format_exc())


class Billed(Stamped):
    """A step that measures processor time: of this thread between calls, and of all other threads since the first."""

    def reset(self) -> None:
        super().reset()
        self._others_before = 0

    def __call__(self, batch: Tensor) -> Tensor:
        started = thread_time_ns()
        if self.runs:
            self.gaps.append(started - self._ended)
        else:
            self._others_before = _others_ns()
        self.runs += 1
        loss = self._step(batch)
        self._ended = thread_time_ns()
        return loss

    @property
    def us_per_step(self) -> float:
        return super().us_per_step + (_others_ns() - self._others_before) / self.runs / 1e3


def _others_ns() -> int:
    return process_time_ns() - thread_time_ns()


def measure(peer: Any, which: str, column: str, steps: int, folder: str) -> float:
    """Measure microseconds per step beyond the bare loop."""
    training = STEPS[which]()
    step = Stamped(training.step) if column == "wall" else Billed(training.step)
    for _ in range(steps):
        step(training.batch)
    bare = step.us_per_step
    step.reset()
    column = "monitored" if column == "wall" else column
    peer.train(Job(column, steps, step, training.model, training.optimizer, training.batch, folder))
    if step.runs != steps:
        raise AssertionError(f"made {step.runs} steps instead of {steps}")
    us_per_step = step.us_per_step  # read after train(), which waits for what background threads have left to do
    if column in ("monitored", "nan"):
        check_written(Path(folder), steps)
    return us_per_step - bare


def check_written(folder: Path, steps: int) -> None:
    """Raise if a peer did not write the two curves, loss and rate, with a point per period."""
    points: dict[str, int] = {}
    for each in {file.parent for file in folder.rglob("*tfevents*")}:
        events = EventAccumulator(str(each), {"scalars": 0, "tensors": 0}).Reload()
        points |= {tag: len(events.Scalars(tag)) for tag in events.Tags()["scalars"]}
        points |= {tag: len(events.Tensors(tag)) for tag in events.Tags()["tensors"]}
    due = steps // PERIOD - 1  # some libraries report from the second period on
    loss = [tag for tag in points if "loss" in tag and points[tag] >= due]
    rate = [tag for tag in points if ("sec" in tag or "time" in tag) and points[tag] >= due]
    if not (loss and rate):
        raise AssertionError(f"wrote {points}: expected a loss and a rate every {PERIOD} of {steps} steps")


# -- the turns ------------------------------------------------------------------------------------------------------


class Peer:
    """The process of one peer, seen from the main process."""

    def __init__(self, name: str, folder: str) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(name, theirs, folder), daemon=True)
        self._process.start()
        self.columns: Sequence[str]
        self.columns, self.version = self._answer()

    def measure(self, which: str, column: str, steps: int) -> float:
        """Have the peer measure one figure."""
        self._connection.send((which, column, steps))
        return float(self._answer())

    def end(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join()

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            answer = "its process ended without an answer"
        if isinstance(answer, str):
            raise RuntimeError(f"{self.name}: {answer}")
        return answer


def say(line: str) -> None:
    """Print a line about the progress, apart from the results."""
    print(line, file=sys.stderr, flush=True)


def start(names: Sequence[str], folder: str) -> tuple[list[Peer], dict[str, str]]:
    """Start the peers; return the working ones, and for each of the others its error."""
    peers, left_out = [], {}
    for name in names:
        try:
            peer = Peer(name, folder)
            for column in peer.columns:
                peer.measure("empty", column, 3 * PERIOD)
            peers.append(peer)
            say(f"started {LABELS[name]}")
        except RuntimeError as error:
            left_out[name] = str(error).strip().splitlines()[-1]
    return peers, left_out


def all_turns(peers: Sequence[Peer], which: str, steps: int, rounds: int, secs: float) -> Figures:
    """Measure every column of every peer, in turns: for ``rounds``, or one or more that fit into ``secs``."""
    began = ended = time.monotonic()
    longest = 0.0
    by_peer: Figures = {peer.name: {column: [] for column in peer.columns} for peer in peers}
    for number in range(1, rounds + 1):
        if number > 1 and ended + longest > began + secs:
            say(f"{which} step: no time for round {number} of {rounds}")
            break
        shift = number % max(len(peers), 1)  # so that no peer always follows the same other one
        for peer in [*peers[shift:], *peers[:shift]]:
            measured = {column: peer.measure(which, column, steps) for column in peer.columns}
            for column, figure in measured.items():
                by_peer[peer.name][column].append(figure)
            shown = ", ".join(f"{column} {figure:.2f}" for column, figure in measured.items())
            say(f"{which} step, round {number} of {rounds}, {LABELS[peer.name]}: {shown}")
        longest, ended = max(longest, time.monotonic() - ended), time.monotonic()
    for columns in by_peer.values():
        if "idle" in columns:
            extra = zip(columns["idle"], columns["plain"], strict=True)
            columns["idle"] = [(more - less) / IDLE_HOOKS for more, less in extra]
    return by_peer


def shown(figures: Figures, which: str, labels: Mapping[str, str]) -> str:
    """Return a table with one row per peer, lowest cost of monitoring first."""

    def cost(columns: dict[str, list[float]]) -> float:
        return median(columns.get("monitored", columns["plain"]))

    rows = [
        [labels[name], *(median(columns[column]) if column in columns else None for column in HEADER)]
        for name, columns in sorted(figures.items(), key=lambda item: cost(item[1]))
    ]
    step = {"empty": "empty step", "real": "small real step"}[which]
    return table([f"us per step, {step}", *HEADER.values()], rows)


def budgets(figures: Figures, which: str) -> list[Budget]:
    """Return the budgets: less than every other library, and at most 1.2 times the cost by hand."""
    found = []
    ours, hand = figures.get("torchhooks", {}), figures.get("by_hand", {})
    peers = [name for name in figures if name not in ("torchhooks", "by_hand")]
    for column in ("monitored", "nan") if ours else ():
        what = f"{which} step, {HEADER[column]}: relative to"
        others = {name: median(figures[name][column]) for name in peers if column in figures[name]}
        if others:
            least = min(others, key=others.__getitem__)
            ratio = median(ours[column]) / others[least]
            found.append(Budget(f"{what} the fastest peer, {LABELS[least]}", ratio, 1, "x"))
        if hand:
            ratio = median(ours[column]) / median(hand[column])
            found.append(Budget(f"{what} the same by hand", ratio, 1.2, "x"))
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=2_000, help="steps per round and figure (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=3, help="most rounds to make (default: %(default)s)")
    options.add_argument("--minutes", type=float, default=5, help="time for all of it (default: %(default)s)")
    options.add_argument("--only", nargs="+", choices=LABELS, default=list(LABELS), help="which peers (default: all)")
    chosen = options.parse_args()
    ends_at = time.monotonic() + 60 * chosen.minutes
    where = machine()
    with TemporaryDirectory() as folder:
        peers, left_out = start(chosen.only, folder)
        figures: dict[str, Figures] = {}
        for which in STEPS:
            share = (ends_at - time.monotonic()) / (len(STEPS) - len(figures))
            figures[which] = all_turns(peers, which, chosen.steps, chosen.rounds, share)
        for peer in peers:
            peer.end()
    labels = {peer.name: f"{LABELS[peer.name]} {peer.version or ''}".strip() for peer in peers}
    print(describe(where), end="\n\n")
    for which in STEPS:
        print(shown(figures[which], which, labels), end="\n\n")
    for name, why in left_out.items():
        print(f"skipped: {LABELS[name]} ({why})", end="\n\n")
    judged = [budget for which in STEPS for budget in budgets(figures[which], which)]
    finish(chosen.results, "peers", check=chosen.check, budgets=judged, machine=where, left_out=left_out, us=figures)


if __name__ == "__main__":
    main()
