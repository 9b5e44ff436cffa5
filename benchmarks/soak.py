"""Make a million runs with hooks, and check that neither the cost of a run nor the memory in use grows.

    python benchmarks/soak.py [--check] [--runs 1000000]

Each row is a tenth of the runs. "us per run" is the median over the chunks of that tenth. "blocks" is the number of
memory blocks that Python has allocated. "kept by a chunk" is the memory that is still allocated after a chunk of runs
under tracemalloc. "process" is the resident memory of the process.
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

from common import Budget, describe, empty, finish, machine, parser, repeat, table, us_per_run

PARTS = 10
CHUNKS = 20
PERIOD = 100


class Part(NamedTuple):
    """The figures of one tenth of the runs."""

    runs: int
    us: float
    blocks: int
    traced: int
    rss: int


class Watcher(SessionRunHook):
    """A user's hook that asks for values in every run."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs({"loss": "loss", "step": "global_step"})

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.seen = run_values.results["step"]


def hooks(folder: Path, runs: int) -> list[SessionRunHook]:
    """Return hooks that together use every part of a run. Half of them are called in every run."""
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
    """Return the resident memory of this process in bytes, or 0 if the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def traced(drive: Callable[[int], None], runs: int) -> int:
    """Make the runs and return how many of the bytes that they allocated are still in use."""
    gc.collect()
    tracemalloc.start()
    drive(runs)
    gc.collect()
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return left


def parts(runs: int) -> Iterator[Part]:
    """Make the runs, and yield the figures of each part when it is complete."""
    gc.collect()
    gc.freeze()  # collections need not scan what was imported
    each = runs // PARTS
    chunk = each // (CHUNKS + 1)
    training = empty()
    with TemporaryDirectory() as name:
        chosen = hooks(Path(name), each * PARTS)
        with MonitoredLoop(training.step, training.model, training.optimizer, hooks=chosen) as loop:
            drive = repeat(loop.run, training.batch)
            for number in range(1, PARTS + 1):
                costs = [us_per_run(drive, chunk) for _ in range(CHUNKS)]
                left = traced(drive, each - CHUNKS * chunk)
                yield Part(number * each, median(costs), sys.getallocatedblocks(), left, rss())
            if not loop.should_stop():
                raise AssertionError(f"the loop is at step {loop.global_step} and did not stop at {each * PARTS}")


def budgets(parts: Sequence[Part]) -> list[Budget]:
    """Return the budgets. The first half is warm-up: Python's method cache, for one, keeps strings until it is full."""
    half, last = parts[PARTS // 2 - 1], parts[-1]
    blocks = (last.blocks - half.blocks) / (last.runs - half.runs) * 1e6
    return [
        Budget("cost per run: last part relative to the median part", last.us / median(p.us for p in parts), 1.25, "x"),
        Budget("blocks kept since the halfway point, per million runs", blocks, 1000, ""),
        Budget("memory kept by the last chunk under tracemalloc", last.traced / 1024, 64, "KiB"),
        Budget("growth of the process since the halfway point", (last.rss - half.rss) / 2**20, 4, "MiB"),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=1_000_000, help="number of runs (default: %(default)s)")
    chosen = options.parse_args()
    if chosen.runs < PARTS * (CHUNKS + 1):
        options.error(f"--runs {chosen.runs}: must be {PARTS * (CHUNKS + 1)} or more")
    where = machine()
    torch.set_num_threads(1)
    logging.getLogger("torchhooks").addHandler(logging.NullHandler())  # log records are created and discarded
    logging.getLogger("torchhooks").setLevel(logging.INFO)
    print(describe(where), end="\n\n")
    done = list(parts(chosen.runs))
    rows = [(f"{p.runs:,}", p.us, f"{p.blocks:,}", f"{p.traced / 1024:.1f}", f"{p.rss / 2**20:.1f}") for p in done]
    print(table(["runs", "us per run", "blocks", "kept by a chunk, KiB", "process, MiB"], rows), end="\n\n")
    rounds = [part._asdict() for part in done]
    finish(chosen.results, "soak", check=chosen.check, budgets=budgets(done), machine=where, parts=rounds)


if __name__ == "__main__":
    main()
