"""Measure how long the runs take that an autopsy watches, compared with the same runs when nothing is watched.

    python benchmarks/autopsy.py [--check] [--widths 32 256] [--rounds 7]

A transformer of two layers is trained until its loss is NaN, and once more by a loop that finds nan.json. The last runs
are watched then. Before each of them, the state is saved, which takes as long as a checkpoint and is part of the time.
The run with the NaN is a column of its own: at its end the report is written. The time is that of the CPU, of the
training thread, because other programs on the machine disturb a long run more than a short one.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import thread_time

import torch
from torch import nn
from torchhooks import CheckpointSaverHook, MonitoredLoop, NanLossDuringTrainingError, NanTensorHook

from common import Budget, Rounds, describe, finish, machine, median_ratio, parser, table

UNWATCHED, WATCHED, LAST = "unwatched", "watched", "with the report"
STEPS, WATCHED_STEPS = 30, 5
BUDGET_WIDTH = 32


def ms_of_runs(width: int, folder: Path) -> list[float]:
    """Train until the NaN, and return the milliseconds of each run."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(100, width), encoder, nn.Linear(width, 100))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randint(100, (STEPS, 4, 16))

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        if loop.global_step == STEPS - 1:
            loss = (loss - 1e3).log()
        loss.backward()
        optimizer.step()
        return loss.detach()

    times: list[float] = []
    saver = CheckpointSaverHook(folder, save_steps=STEPS // 2)
    hooks = [NanTensorHook("loss"), saver]
    with (
        contextlib.suppress(NanLossDuringTrainingError),
        MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=folder) as loop,
    ):
        for tokens in loop.until_stop(batches):
            started = thread_time()
            try:
                loop.run(tokens)
            finally:
                times.append((thread_time() - started) * 1e3)
    return times


def measure(width: int, rounds: int) -> Rounds:
    """Return the milliseconds of a run, in each round."""
    figures: Rounds = {UNWATCHED: [], WATCHED: [], LAST: []}
    for _ in range(rounds):
        with TemporaryDirectory() as folder:
            first, second = (ms_of_runs(width, Path(folder)) for _ in range(2))
        figures[UNWATCHED].append(median(first[-WATCHED_STEPS - 1 : -1]))
        figures[WATCHED].append(median(second[-WATCHED_STEPS - 1 : -1]))
        figures[LAST].append(second[-1])
    return figures


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--widths", type=int, nargs="+", default=[BUDGET_WIDTH, 256])
    arguments.add_argument("--rounds", type=int, default=7)
    args = arguments.parse_args()
    logging.disable()
    torch.set_num_threads(1)  # as other programs share the machine

    print(f"Machine: {describe(machine())}.\n")
    figures = {width: measure(width, args.rounds) for width in args.widths}
    rows: list[list[str | float]] = [
        [
            f"width {width}",
            *(median(each[name]) for name in (UNWATCHED, WATCHED, LAST)),
            *(median_ratio(each[name], each[UNWATCHED]) for name in (WATCHED, LAST)),
        ]
        for width, each in figures.items()
    ]
    header = ["ms of a run", UNWATCHED, WATCHED, LAST, f"{WATCHED}, ratio", f"{LAST}, ratio"]
    print(table(header, rows), end="\n\n")
    judged = BUDGET_WIDTH if BUDGET_WIDTH in figures else min(figures)
    ratio = median_ratio(figures[judged][WATCHED], figures[judged][UNWATCHED])
    budget = Budget(f"watched run of width {judged} relative to the same run unwatched", ratio, 10, "x")
    document = {str(width): each for width, each in figures.items()}
    finish(args.results, "autopsy", check=args.check, budgets=[budget], machine=machine(), ms=document)


if __name__ == "__main__":
    main()
