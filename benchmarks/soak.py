"""A million runs with hooks on: what a run costs and what is held in memory stay where they were.

    python benchmarks/soak.py [--check] [--runs 1000000]

Every tenth of the runs is a row. ``us a run`` is the median over stretches of it. Then come the blocks that Python has
allocated, which counts everything; what a stretch under tracemalloc left behind; and the memory of the process.
"""

from __future__ import annotations

import gc
import logging
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torchhooks import (
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    summary,
)

from common import Budget, describe, finish, machine, nothing, over, parser, table, us_a_run

PARTS = 10
STRETCHES = 20
PERIOD = 100


class Part(NamedTuple):
    """A tenth of the runs."""

    runs: int
    us: float
    blocks: int
    traced: int
    rss: int


class Watcher(SessionRunHook):
    """A user's hook: asks for something in every run."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs({"loss": "loss", "step": "global_step"})

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.seen = run_values.results["step"]


def hooks(folder: Path, runs: int) -> list[SessionRunHook]:
    """Everything that a run can pass through; half of it in every run."""
    return [
        StopAtStepHook(last_step=runs),
        NanTensorHook("loss"),
        Watcher(),
        StepCounterHook(PERIOD, output_dir=folder),
        SummarySaverHook(
            PERIOD, output_dir=folder, summary_op=[summary.scalar("loss", "loss"), summary.histogram("w", "0.weight")]
        ),
        LoggingTensorHook(["loss", "global_step"], every_n_iter=PERIOD),
    ]


def rss() -> int:
    """The memory of this process in bytes; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def traced(drive: Callable[[int], None], runs: int) -> int:
    """The bytes that are still there of what so many runs allocated."""
    gc.collect()
    tracemalloc.start()
    drive(runs)
    gc.collect()
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return left


def parts(runs: int) -> Iterator[Part]:
    """Make the runs; each part is told as soon as it is over."""
    gc.collect()
    gc.freeze()  # what was imported is not looked at by every collection
    each = runs // PARTS
    stretch = each // (STRETCHES + 1)
    training = nothing()
    with TemporaryDirectory() as name:
        chosen = hooks(Path(name), each * PARTS)
        with MonitoredLoop(training.step, training.model, training.optimizer, hooks=chosen) as loop:
            drive = over(loop.run, training.batch)
            for number in range(1, PARTS + 1):
                costs = [us_a_run(drive, stretch) for _ in range(STRETCHES)]
                left = traced(drive, each - STRETCHES * stretch)
                yield Part(number * each, median(costs), sys.getallocatedblocks(), left, rss())
            if not loop.should_stop():
                raise AssertionError(f"the loop did not stop at {each * PARTS}, it is at {loop.global_step}")


def budgets(parts: Sequence[Part]) -> list[Budget]:
    """The first half is the warm-up: Python's method cache, say, keeps some thousand strings until it is full."""
    half, last = parts[PARTS // 2 - 1], parts[-1]
    blocks = (last.blocks - half.blocks) / (last.runs - half.runs) * 1e6
    return [
        Budget("cost a run: the last part beside the median part", last.us / median(p.us for p in parts), 1.25, "x"),
        Budget("blocks kept since half-time, a million runs", blocks, 1000, ""),
        Budget("left of what the last stretch under tracemalloc allocated", last.traced / 1024, 64, "KiB"),
        Budget("growth of the process since half-time", (last.rss - half.rss) / 2**20, 4, "MiB"),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=1_000_000, help="how many (default: %(default)s)")
    chosen = options.parse_args()
    if chosen.runs < PARTS * (STRETCHES + 1):
        options.error(f"--runs {chosen.runs}: must be {PARTS * (STRETCHES + 1)} or more")
    where = machine()
    torch.set_num_threads(1)
    logging.getLogger("torchhooks").addHandler(logging.NullHandler())  # the lines are made, and go nowhere
    logging.getLogger("torchhooks").setLevel(logging.INFO)
    print(describe(where), end="\n\n")
    done = list(parts(chosen.runs))
    rows = [(f"{p.runs:,}", p.us, f"{p.blocks:,}", f"{p.traced / 1024:.1f}", f"{p.rss / 2**20:.1f}") for p in done]
    print(table(["runs", "us a run", "blocks", "left of a stretch, KiB", "process, MiB"], rows), end="\n\n")
    rounds = [part._asdict() for part in done]
    finish(chosen.results, "soak", check=chosen.check, budgets=budgets(done), machine=where, parts=rounds)


if __name__ == "__main__":
    main()
