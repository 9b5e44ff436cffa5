"""Measure what a LedgerHook costs the host: a line for each run, beside a loop without hooks.

    python benchmarks/ledger.py [--check] [--runs 2000] [--rounds 7] [--megabytes 40]

The first table is about a small batch, 32 rows of 32 numbers with their labels, and a step that does nothing. "lines"
appends a line of the same length to a file, which is what any ledger has to do. The second is about the digests of a
large model's parameters, beside zlib.crc32 over the same bytes; a line has one digest for each tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch import nn
from torchhooks import LedgerHook, MonitoredLoop

from common import Budget, Rounds, beyond, describe, finish, machine, median_ratio, parser, table, take_turns

BARE, LINES = "no hook", "lines"
THREE, DEFAULT = "LedgerHook(what=['inputs', 'random', 'outputs'])", "LedgerHook(): also parameters, 2 tensors"
CRC, PARAMETERS = "zlib.crc32", "LedgerHook(what='parameters')"
LIMIT_US, LIMIT_RATIO = 60.0, 1.3


def per_run(runs: int, hooks: Callable[[], Sequence[LedgerHook]]) -> float:
    """Return the microseconds for a run of a loop with ``hooks``, whose step does nothing."""
    batch, loss = (torch.randn(32, 32), torch.randint(10, (32,))), torch.tensor(0.5)
    with MonitoredLoop(lambda inputs, labels: {"loss": loss}, nn.Linear(32, 10), hooks=hooks()) as loop:
        started = perf_counter()
        for inputs, labels in loop.until_stop([batch] * runs):
            loop.run(inputs, labels)
        ended = perf_counter()
    return (ended - started) / runs * 1e6


def measure_small(runs: int, rounds: int, folder: Path) -> Rounds:
    """Return the microseconds for a run of each way, in turns."""

    def lines() -> float:
        data = b"x" * 330 + b"\n"
        with open(folder / "lines", "ab", buffering=0) as file:
            started = perf_counter()
            for _ in range(runs):
                file.write(data)
            return (perf_counter() - started) / runs * 1e6

    return take_turns(
        {
            BARE: lambda: per_run(runs, list),
            LINES: lines,
            THREE: lambda: per_run(runs, lambda: [LedgerHook(folder, what=["inputs", "random", "outputs"])]),
            DEFAULT: lambda: per_run(runs, lambda: [LedgerHook(folder)]),
        },
        rounds,
    )


def measure_parameters(megabytes: int, rounds: int, folder: Path) -> Rounds:
    """Return the milliseconds that the digests of a model's parameters take of a run, in turns with the sums alone."""
    model = nn.ParameterList([torch.randn(250_000) for _ in range(megabytes)])  # each of one megabyte
    arrays = [each.detach().numpy() for each in model]

    def sums() -> float:
        started = perf_counter()
        for array in arrays:
            zlib.crc32(array.data)
        return (perf_counter() - started) * 1e3

    loop = MonitoredLoop(lambda: None, model, hooks=[LedgerHook(folder, what="parameters")])

    def run() -> float:
        started = perf_counter()
        loop.run()
        return (perf_counter() - started) * 1e3

    figures = take_turns({CRC: sums, PARAMETERS: run}, rounds)
    loop.close()
    return figures


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=2000, help="runs in a round (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=7, help="number of rounds (default: %(default)s)")
    options.add_argument("--megabytes", type=int, default=40, help="size of the model (default: %(default)s)")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    where = machine()
    print(describe(where), end="\n\n")
    with TemporaryDirectory() as folder:
        small = measure_small(chosen.runs, chosen.rounds, Path(folder))
        large = measure_parameters(chosen.megabytes, chosen.rounds, Path(folder, "large"))
    rows = [(name, min(figures), median(figures)) for name, figures in small.items()]
    print(table(["us per run, a small batch", "min", "median"], rows), end="\n\n")
    rows = [(name, min(figures), median(figures)) for name, figures in large.items()]
    print(table([f"ms per run, {chosen.megabytes} MB of parameters", "min", "median"], rows), end="\n\n")
    ratio = median_ratio(large[PARAMETERS], large[CRC])
    budgets = [
        Budget("inputs, random states and outputs, small batch", min(beyond(small, THREE, BARE)), LIMIT_US, "us"),
        Budget("parameters, relative to zlib.crc32 over the same bytes", ratio, LIMIT_RATIO, "x"),
    ]
    finish(chosen.results, "ledger", check=chosen.check, budgets=budgets, machine=where, small=small, large=large)


if __name__ == "__main__":
    main()
