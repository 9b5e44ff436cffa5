"""Measure the cost of monitoring every step on a GPU: steps per second of the bare loop, by hand, and with torchhooks.

    python benchmarks/gpu.py [--check]

The model is so small that the host can hardly keep the GPU busy, so anything that makes the host wait for the GPU slows
down the loop. Both monitored loops write the loss to TensorBoard and check it for NaN in every step, and report
steps/sec every 100 steps. The loop by hand reads the loss with ``.item()``.

The second table checks the reported steps/sec: for each period it is compared with the time between two CUDA events
that the step itself records at both ends of the period.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torchhooks import MonitoredLoop, NanTensorHook, SessionRunHook, StepCounterHook, SummarySaverHook
from torchhooks.testing import RecordingWriter

from common import (
    Budget,
    Rounds,
    Training,
    describe,
    finish,
    machine,
    median_ratio,
    mlp,
    parser,
    repeat,
    table,
    take_turns,
)

PERIOD = 100
BARE, BY_HAND, OURS = "bare loop", "by hand, .item() in every step", "torchhooks"

Drive = Callable[[int], object]
Period = tuple[int, float, float]
"""The last step of the period, the reported steps/sec, and steps/sec according to CUDA events."""


def by_hand(training: Training, writer: SummaryWriter) -> Drive:
    """Monitor the step as it is usually written by hand."""
    log = logging.getLogger("by_hand")
    number, last = 0, time.monotonic()

    def drive(runs: int) -> None:
        nonlocal number, last
        for _ in range(runs):
            loss = training.step(training.batch).item()
            number += 1
            if math.isnan(loss):
                raise FloatingPointError(f"the loss is NaN at step {number}")
            writer.add_scalar("loss", loss, number)
            if number % PERIOD == 0:
                now = time.monotonic()
                rate, last = PERIOD / (now - last), now
                log.info("global_step/sec: %g", rate)
                writer.add_scalar("global_step/sec", rate, number)

    return drive


def hooked(training: Training, folder: Path, stack: ExitStack) -> Drive:
    """Monitor the step with hooks."""
    hooks: list[SessionRunHook] = [
        NanTensorHook("loss"),
        SummarySaverHook(save_steps=1, output_dir=folder, summary_op={"loss": "loss"}),
        StepCounterHook(PERIOD, output_dir=folder),
    ]
    loop = stack.enter_context(MonitoredLoop(training.step, training.model, training.optimizer, hooks=hooks))
    return repeat(loop.run, training.batch)


def steps_per_sec(drive: Drive, runs: int) -> float:
    """Measure steps per second, from an idle GPU to an idle GPU."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    drive(runs)
    torch.cuda.synchronize()
    return runs / (time.perf_counter() - started)


def measure(training: Training, runs: int, rounds: int) -> Rounds:
    """Measure steps per second of the three candidates."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        writer = stack.enter_context(SummaryWriter(f"{name}/hand"))
        candidates = {
            BARE: repeat(training.step, training.batch),
            BY_HAND: by_hand(training, writer),
            OURS: hooked(training, Path(name, "hooks"), stack),
        }
        measures = {name: partial(steps_per_sec, drive, runs) for name, drive in candidates.items()}
        return take_turns(measures, rounds)


def reported(training: Training, runs: int) -> list[Period]:
    """Return, for each period, what StepCounterHook reported and what CUDA events measured."""
    events = [torch.cuda.Event(enable_timing=True)]  # never recorded: makes events[n] the event after step n

    def step(batch: Tensor) -> Tensor:
        loss = training.step(batch)
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        return loss

    writer = RecordingWriter()
    hooks: list[SessionRunHook] = [NanTensorHook("loss"), StepCounterHook(PERIOD, summary_writer=writer)]
    with MonitoredLoop(step, training.model, training.optimizer, hooks=hooks) as loop:
        repeat(loop.run, training.batch)(runs)
    torch.cuda.synchronize()
    return [
        (end, rate, PERIOD * 1e3 / events[end - PERIOD].elapsed_time(events[end]))
        for end, rate in writer.scalars["global_step/sec"]
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=5_000, help="steps per round and candidate (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=7, help="number of rounds (default: %(default)s)")
    chosen = options.parse_args()
    if not torch.cuda.is_available():
        print("not run: no CUDA device")
        return
    for name in ("torchhooks", "by_hand"):
        logging.getLogger(name).addHandler(logging.NullHandler())  # log records are created and discarded
        logging.getLogger(name).setLevel(logging.INFO)
    where, training = machine(), mlp("cuda")
    print(describe(where), end="\n\n")
    rounds = measure(training, chosen.runs, chosen.rounds)
    ratios = {name: median_ratio(figures, rounds[BARE]) for name, figures in rounds.items()}
    rows = [(name, max(figures), median(figures), f"{ratios[name]:.3f}") for name, figures in rounds.items()]
    print(table(["", "steps/sec: best", "median", "relative to the bare loop"], rows), end="\n\n")
    periods = reported(training, chosen.runs)
    errors = [abs(rate / true - 1) * 100 for _, rate, true in periods]
    rows_of_errors = [("median", median(errors)), ("worst", max(errors))]
    print(table(["reported steps/sec of a period", "error, %"], rows_of_errors), end="\n\n")
    budgets = [
        Budget("steps/sec, relative to the bare loop", ratios[OURS], 0.98, "x", at_least=True),
        Budget("error of the reported steps/sec, worst period", max(errors), 1, "%"),
    ]
    figures = {"steps_per_sec": rounds, "periods": periods}
    finish(chosen.results, "gpu", check=chosen.check, budgets=budgets, machine=where, **figures)


if __name__ == "__main__":
    main()
