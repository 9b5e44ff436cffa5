"""Host time per step while hooks are due in every run, and how long the device takes for all steps.

    python benchmarks/accelerator.py [--simulated] [--secs 0.1] [--runs 20] [--rounds 3] [--check] [--results FOLDER]

A step is a small network after other work of the device, which takes ``--secs``. The host should queue a step in much
less time than that, and the device should have something to do all the time. Each candidate has its hooks due in every
run. ``.item()`` is what a script does that prints its loss. It runs on the accelerator of this machine; without one, or
with ``--simulated``, on the simulated device of the tests, which needs a C++ compiler.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor
from torchhooks import (
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    summary,
)
from torchhooks.testing import RecordingWriter

from common import Budget, Rounds, describe, finish, machine, parser, table, take_turns

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import accelerators, simulated


class Figures(NamedTuple):
    """What one measurement of a candidate found."""

    host_ms: float  # the median of the runs
    device_ms: float  # per run, of all runs
    waits: int  # of the host, as far as the device tells


def due_in_every_run(folder: str) -> list[SessionRunHook]:
    """Return six hooks, the first of which logs the loss."""
    histograms = {name: summary.histogram(name, name) for name in ("0.weight", "0.bias")}
    return [
        LoggingTensorHook(["loss"], every_n_iter=1),
        NanTensorHook(["loss", "0.weight"]),
        SummarySaverHook(1, output_dir=folder, summary_op=histograms),
        SummarySaverHook(1, summary_writer=RecordingWriter(), summary_op={"loss": "loss"}),
        StepCounterHook(1, summary_writer=RecordingWriter(), memory=True),
        StopAtStepHook(last_step=10**9),
    ]


def measure(secs: float, runs: int, number: int | None) -> Figures:
    """Make ``runs`` runs with ``number`` hooks, or with ``.item()`` in a plain loop if it is ``None``."""
    device = accelerators.DEVICE
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch, targets = torch.randn(32, 64, device=device), torch.zeros(32, dtype=torch.long, device=device)

    def step() -> Tensor:
        accelerators.keep_busy(secs)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch), targets)
        loss.backward()
        optimizer.step()
        return loss

    if number is None:
        return timed(lambda: step().item(), runs)
    with TemporaryDirectory() as folder:
        hooks: Sequence[SessionRunHook] = due_in_every_run(folder)[:number]
        with MonitoredLoop(step, model, optimizer, hooks=hooks) as loop:
            figures = timed(loop.run, runs)
    return figures


def timed(run: Callable[[], object], runs: int) -> Figures:
    """Call ``run`` twice to warm up, and then ``runs`` times."""
    for _ in range(2):
        run()
    torch.accelerator.synchronize()
    if accelerators.DEVICE == simulated.NAME:
        simulated.forget_waits()
    host: list[float] = []
    started = time.perf_counter()
    for _ in range(runs):
        began = time.perf_counter()
        run()
        host.append(time.perf_counter() - began)
    waits = len(simulated.waits()) if accelerators.DEVICE == simulated.NAME else 0
    torch.accelerator.synchronize()
    return Figures(1e3 * median(host), 1e3 * (time.perf_counter() - started) / runs, waits)


CANDIDATES: dict[str, int | None] = {
    "0 hooks": 0,
    "1 hook": 1,
    "6 hooks": 6,
    "a plain loop, .item() in each step": None,
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--simulated", action="store_true", help="use the simulated device")
    options.add_argument("--secs", type=float, default=0.1, help="device time of a step (default: %(default)s)")
    options.add_argument("--runs", type=int, default=20, help="runs for each figure (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=3, help="rounds (default: %(default)s)")
    chosen = options.parse_args()
    if accelerators.use(simulated_one=chosen.simulated) == "cpu":
        raise SystemExit("there is no accelerator, and no C++ compiler for the simulated one")
    logging.getLogger("torchhooks").addHandler(logging.NullHandler())  # the table is the only output
    logging.getLogger("torchhooks").propagate = False
    seen: dict[str, list[Figures]] = {name: [] for name in CANDIDATES}

    def candidate(name: str) -> Callable[[], float]:
        def run() -> float:
            seen[name].append(measure(chosen.secs, chosen.runs, CANDIDATES[name]))
            return seen[name][-1].host_ms

        return run

    figures: Rounds = take_turns({name: candidate(name) for name in CANDIDATES}, chosen.rounds)
    kept = {name: rounds[1:] for name, rounds in seen.items()}  # the first round is discarded
    rows = [
        (
            name,
            median(figures[name]),
            median(each.device_ms for each in rounds),
            f"{max(each.waits for each in rounds)}" if accelerators.DEVICE == simulated.NAME else "",
        )
        for name, rounds in kept.items()
    ]
    where = machine()
    print(f"Machine: {describe(where)}. Device: {accelerators.DEVICE}.\n")
    print(table([f"a device step of {1e3 * chosen.secs:g} ms", "host: ms a step", "device: ms", "waits"], rows) + "\n")
    bare = median(each.device_ms for each in kept["0 hooks"])
    slower = 100 * (median(each.device_ms for each in kept["6 hooks"]) / bare - 1)
    budgets = [
        Budget("host time with 6 hooks, of a device step", 100 * median(figures["6 hooks"]) / bare, 50, "%"),
        Budget("device time with 6 hooks, beyond 0 hooks", slower, 3, "%"),
        Budget("waits with 6 hooks", max(each.waits for each in kept["6 hooks"]), 0, ""),
    ]
    finish(chosen.results, "accelerator", check=chosen.check, budgets=budgets, machine=where, rounds=kept)


if __name__ == "__main__":
    main()
