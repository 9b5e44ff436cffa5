"""The same step and the same monitoring beside the peers: microseconds a step that each of them costs.

    pip install -e '.[peers]' && python benchmarks/peers.py [--check] [--only ignite lightning]

Figures are processor time: what the training's thread spends between two steps, taken from inside of the step, and what
other threads of the process spend from the first step to the end, beyond the bare ``for`` loop measured right before.
What the training's own thread does to start and end a peer's loop is left out. The last column is the time between two
steps alone, by the wall clock: it leaves out what a peer's thread takes from the steps, such as that of torch's
SummaryWriter.

Each peer lives in a process of its own; they take turns. How each is used stands in its file in ``peer_loops/``; one
that is not installed is left out and named.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
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

from common import Budget, Rounds, Stamped, describe, finish, machine, mlp, nothing, parser, table, take_turns
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
    "plain": "nothing on",
    "monitored": "monitored",
    "nan": "and a NaN check",
    "idle": "each idle hook",
    "wall": "monitored, wall clock between steps",
}
STEPS = {"nothing": nothing, "real": mlp}

Figures = dict[str, Rounds]
"""By peer, then by column."""


# -- in a peer's own process ----------------------------------------------------------------------------------------


def serve(name: str, connection: Connection, folder: str) -> None:
    """Import a peer, say what it can be measured in, and measure what is asked for until nothing more is.

    What the peer prints and logs goes to a file; an error is sent back as its text.
    """
    log = os.open(f"{folder}/{name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        peer = importlib.import_module(f"peer_loops.{name}")
        logging.basicConfig(level=logging.INFO, force=True)  # after the import, at which some configure it themselves
        wall = ("wall",) if "monitored" in peer.COLUMNS else ()
        connection.send(((*peer.COLUMNS, *wall), version(peer.PACKAGE) if peer.PACKAGE else None))
        while (asked := connection.recv()) is not None:
            which, column, steps = asked
            with TemporaryDirectory() as run_folder:
                connection.send(measure(peer, which, column, steps, run_folder))
    except Exception:
        connection.send(traceback.format_exc())


class Billed(Stamped):
    """A step that notes processor time: this thread's between two calls, and all other threads' from the first on."""

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
    def us_a_step(self) -> float:
        return super().us_a_step + (_others_ns() - self._others_before) / self.runs / 1e3


def _others_ns() -> int:
    return process_time_ns() - thread_time_ns()


def measure(peer: Any, which: str, column: str, steps: int, folder: str) -> float:
    """Microseconds a step beyond those of the bare loop."""
    training = STEPS[which]()
    step = Stamped(training.step) if column == "wall" else Billed(training.step)
    for _ in range(steps):
        step(training.batch)
    bare = step.us_a_step
    step.reset()
    column = "monitored" if column == "wall" else column
    peer.train(Job(column, steps, step, training.model, training.optimizer, training.batch, folder))
    if step.runs != steps:
        raise AssertionError(f"made {step.runs} steps instead of {steps}")
    us_a_step = step.us_a_step  # now that what threads had left to do is done
    if column in ("monitored", "nan"):
        check_written(Path(folder), steps)
    return us_a_step - bare


def check_written(folder: Path, steps: int) -> None:
    """Raise if a peer did not write what it was measured with: two curves with a point every so many steps."""
    points: dict[str, int] = {}
    for each in {file.parent for file in folder.rglob("*tfevents*")}:
        events = EventAccumulator(str(each), {"scalars": 0, "tensors": 0}).Reload()
        points |= {tag: len(events.Scalars(tag)) for tag in events.Tags()["scalars"]}
        points |= {tag: len(events.Tensors(tag)) for tag in events.Tags()["tensors"]}
    due = steps // PERIOD - 1  # some report from the second period on
    loss = [tag for tag in points if "loss" in tag and points[tag] >= due]
    rate = [tag for tag in points if ("sec" in tag or "time" in tag) and points[tag] >= due]
    if not (loss and rate):
        raise AssertionError(f"wrote {points}, which is not a loss and a rate every {PERIOD} of {steps} steps")


# -- the turns ------------------------------------------------------------------------------------------------------


class Peer:
    """A peer's process, from here."""

    def __init__(self, name: str, folder: str) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(name, theirs, folder), daemon=True)
        self._process.start()
        self.columns: Sequence[str]
        self.columns, self.version = self._answer()

    def measure(self, which: str, column: str, steps: int) -> float:
        """One figure."""
        self._connection.send((which, column, steps))
        return float(self._answer())

    def end(self) -> None:
        """Let the process go."""
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


def start(names: Sequence[str], folder: str) -> tuple[list[Peer], dict[str, str]]:
    """The peers that are here and run, and what is wrong with the others."""
    peers, left_out = [], {}
    for name in names:
        try:
            peer = Peer(name, folder)
            for column in peer.columns:
                peer.measure("nothing", column, 3 * PERIOD)
            peers.append(peer)
        except RuntimeError as error:
            left_out[name] = str(error).strip().splitlines()[-1]
    return peers, left_out


def all_turns(peers: Sequence[Peer], which: str, steps: int, rounds: int) -> Figures:
    """By peer and column, a figure a round."""
    candidates = {
        f"{peer.name} {column}": partial(peer.measure, which, column, steps)
        for peer in peers
        for column in peer.columns
    }
    figures: Rounds = take_turns(candidates, rounds)
    by_peer = {peer.name: {column: figures[f"{peer.name} {column}"] for column in peer.columns} for peer in peers}
    for columns in by_peer.values():
        if "idle" in columns:
            extra = zip(columns["idle"], columns["plain"], strict=True)
            columns["idle"] = [(more - less) / IDLE_HOOKS for more, less in extra]
    return by_peer


def shown(figures: Figures, which: str, labels: Mapping[str, str]) -> str:
    """A row a peer, the least monitored first."""

    def cost(columns: dict[str, list[float]]) -> float:
        return median(columns.get("monitored", columns["plain"]))

    rows = [
        [labels[name], *(median(columns[column]) if column in columns else None for column in HEADER)]
        for name, columns in sorted(figures.items(), key=lambda item: cost(item[1]))
    ]
    step = {"nothing": "a step that does nothing", "real": "a small real step"}[which]
    return table([f"us a step, {step}", *HEADER.values()], rows)


def budgets(figures: Figures, which: str) -> list[Budget]:
    """Less than every peer; at most 1.2 times of what it costs by hand."""
    found = []
    ours, hand = figures.get("torchhooks", {}), figures.get("by_hand", {})
    peers = [name for name in figures if name not in ("torchhooks", "by_hand")]
    for column in ("monitored", "nan") if ours else ():
        what = f"{which} step, {HEADER[column]}: beside"
        others = {name: median(figures[name][column]) for name in peers if column in figures[name]}
        if others:
            least = min(others, key=others.__getitem__)
            ratio = median(ours[column]) / others[least]
            found.append(Budget(f"{what} the least peer, {LABELS[least]}", ratio, 1, "x"))
        if hand:
            ratio = median(ours[column]) / median(hand[column])
            found.append(Budget(f"{what} the same by hand", ratio, 1.2, "x"))
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=2_000, help="steps a round and figure (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=7, help="rounds (default: %(default)s)")
    options.add_argument("--only", nargs="+", choices=LABELS, default=list(LABELS), help="which peers (default: all)")
    chosen = options.parse_args()
    where = machine()
    with TemporaryDirectory() as folder:
        peers, left_out = start(chosen.only, folder)
        figures = {which: all_turns(peers, which, chosen.steps, chosen.rounds) for which in STEPS}
        for peer in peers:
            peer.end()
    labels = {peer.name: f"{LABELS[peer.name]} {peer.version or ''}".strip() for peer in peers}
    print(describe(where), end="\n\n")
    for which in STEPS:
        print(shown(figures[which], which, labels), end="\n\n")
    for name, why in left_out.items():
        print(f"left out: {LABELS[name]} ({why})", end="\n\n")
    judged = [budget for which in STEPS for budget in budgets(figures[which], which)]
    finish(chosen.results, "peers", check=chosen.check, budgets=judged, machine=where, left_out=left_out, us=figures)


if __name__ == "__main__":
    main()
