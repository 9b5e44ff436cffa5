"""Measure how long a histogram stops the training run: SummarySaverHook compared with torch's SummaryWriter.

    python benchmarks/histograms.py [--check] [--elements 10000 ...] [--rounds 7] [--device cuda]

The tensor is a float32 parameter with normally distributed elements. By hand, the step calls torch's add_histogram,
which copies a tensor on a device to the host and sorts its elements. SummarySaverHook writes the same histogram: it
counts the elements where they are. The step itself does nothing. The time is the host's. A GPU is idle before
each histogram, so that waiting for it counts only as far as the histogram itself is waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch.utils.tensorboard import SummaryWriter
from torchhooks import MonitoredLoop, SummarySaverHook
from torchhooks.summary.operations import histogram

from common import Budget, Rounds, describe, finish, machine, median_ratio, parser, table, take_turns

ELEMENTS = [10**4, 10**5, 10**6, 10**7, 10**8]
TORCHS, OURS = "torch's add_histogram", "SummarySaverHook"
BUDGET_ELEMENTS = 10**7


def measure(elements: int, rounds: int, device: str, folder: Path) -> Rounds:
    """Return the milliseconds that one histogram takes of the host's time, in each round."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(elements, device=device))

    def timed(write: Callable[[], object]) -> Callable[[], float]:
        def ms() -> float:
            if device == "cuda":
                torch.cuda.synchronize()  # waits for the device
            started = perf_counter()
            write()
            return (perf_counter() - started) * 1e3

        return ms

    figures: Rounds = {}
    steps = iter(range(10**9))
    hook = SummarySaverHook(1, output_dir=folder / "ours", summary_op=histogram("weight", "weight"))
    with (
        SummaryWriter(str(folder / "torchs")) as writer,
        MonitoredLoop(lambda: None, model=model, hooks=[hook], step_unit="run") as loop,
    ):
        candidates = {
            TORCHS: timed(lambda: writer.add_histogram("weight", model.weight, next(steps))),
            OURS: timed(loop.run),
        }
        figures.update(take_turns(candidates, rounds))
    return figures


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--elements", type=int, nargs="+", default=ELEMENTS)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = arguments.parse_args()
    logging.disable(logging.INFO)

    print(f"Machine: {describe(machine())}.\n")
    figures: dict[int, Rounds] = {}
    for elements in args.elements:
        with TemporaryDirectory() as folder:
            figures[elements] = measure(elements, args.rounds, args.device, Path(folder))
    rows: list[list[str | float]] = [
        [f"{elements:.0e}", median(each[TORCHS]), median(each[OURS]), median_ratio(each[OURS], each[TORCHS])]
        for elements, each in figures.items()
    ]
    print(table([f"elements, {args.device}: ms of the host", TORCHS, OURS, "ratio"], rows), end="\n\n")
    judged = BUDGET_ELEMENTS if BUDGET_ELEMENTS in figures else max(figures)
    each = figures[judged]
    if args.device == "cuda":
        budget = Budget(f"host's time for a histogram of {judged:,} elements", median(each[OURS]), 1, "ms")
    else:
        ratio = median_ratio(each[OURS], each[TORCHS])
        budget = Budget(f"histogram of {judged:,} elements relative to torch's writer", ratio, 0.4, "x")
    document = {str(elements): each for elements, each in figures.items()}
    finish(args.results, "histograms", check=args.check, budgets=[budget], machine=machine(), ms=document)


if __name__ == "__main__":
    main()
