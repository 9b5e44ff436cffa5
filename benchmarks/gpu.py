"""Measure the cost of monitoring every step on a GPU, as a whole and hook by hook, next to monitoring by hand.

    python benchmarks/gpu.py [--check] [--device cuda] [--secs 120]

There are two workloads. The launch-bound one is a model so small that the host can hardly keep the GPU busy, so that
anything the host does or waits for slows down the loop. In the device-bound one, each step takes the GPU 5 ms more, so
that only waits slow down the loop.

All monitored loops write the loss to TensorBoard and check it for NaN in every step, and report steps/sec every 100
steps. The loop by hand reads the loss with ``.item()``. The other rows have one of the hooks each. "Lag" is how many
runs later a value that a hook requests in every run arrives. "Device memory" and "pinned memory" are the peak and the
total beyond the total of the bare loop.

The last table checks the reported steps/sec: for each period it is compared with the time between two CUDA events
that the step itself records at both ends of the period.

Each table is printed as soon as its figures are there. ``--secs`` limits the time of all of them, by fewer steps in a
round.

``--device cpu`` runs everything but the last table on a CPU, to try out the script. Its figures mean nothing.
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
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torchhooks import (
    CheckpointSaverHook,
    MonitoredLoop,
    NanTensorHook,
    Saver,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    SummarySaverHook,
)
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
DEVICE_SECS = 0.005
BARE, BY_HAND, OURS = "bare loop", "by hand, .item() in every step", "torchhooks, all three hooks"

Drive = Callable[[int], object]
Period = tuple[int, float, float]
"""The last step of the period, the reported steps/sec, and steps/sec according to CUDA events."""


class Memory(NamedTuple):
    """The peak of the memory on the device, and the pinned memory of the process, in bytes."""

    device: int
    pinned: int


# -- workloads --------------------------------------------------------------------------------------------------------


def device_bound(training: Training, device: str) -> Training:
    """Return the same step with a kernel that takes the device ``DEVICE_SECS`` more."""
    cycles = cycles_of(DEVICE_SECS) if device == "cuda" else 0

    def step(batch: Tensor) -> Tensor:
        if cycles:
            torch.cuda._sleep(cycles)  # noqa: SLF001 - torch's only way to keep a device busy
        else:
            time.sleep(DEVICE_SECS)
        return training.step(batch)

    return training._replace(step=step)


def cycles_of(secs: float) -> int:
    """Return the number of cycles that the device takes for ``secs``, at its full clock rate."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 10_000_000
    for _ in range(100):  # long enough for the clock rate to rise
        begin.record()
        torch.cuda._sleep(cycles)  # noqa: SLF001 - torch's only way to keep a device busy
        end.record()
        end.synchronize()
    return int(cycles * secs / (begin.elapsed_time(end) / 1e3))


# -- candidates -------------------------------------------------------------------------------------------------------


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


class Lag(SessionRunHook):
    """Requests the loss in every run, and records how many runs later it arrives."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs("loss")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        session, step = run_context.session, run_context.session.global_step
        run_context.when_ready(run_values.results, lambda _: self.runs.append(session.global_step - step))


def hooks_of(folder: Path) -> dict[str, list[SessionRunHook]]:
    """Return the hooks of each candidate."""
    nan, every = partial(NanTensorHook, "loss"), partial(SummarySaverHook, save_steps=1, summary_op={"loss": "loss"})
    return {
        "no hooks": [],
        "NanTensorHook": [nan()],
        "NanTensorHook of all weights": [NanTensorHook(lambda model: list(model.parameters()))],
        "SummarySaverHook": [every(output_dir=folder / "summary")],
        "StepCounterHook": [StepCounterHook(PERIOD, output_dir=folder / "counter")],
        "CheckpointSaverHook, asynchronous": [
            CheckpointSaverHook(folder / "saver", save_steps=PERIOD, saver=Saver(1, async_save=True))
        ],
        OURS: [nan(), every(output_dir=folder / "all"), StepCounterHook(PERIOD, output_dir=folder / "all")],
    }


def hooked(training: Training, hooks: list[SessionRunHook], stack: ExitStack) -> Drive:
    """Monitor the step with ``hooks``."""
    loop = stack.enter_context(MonitoredLoop(training.step, training.model, training.optimizer, hooks=hooks))
    return repeat(loop.run, training.batch)


# -- measuring --------------------------------------------------------------------------------------------------------


def synchronize(training: Training) -> None:
    """Wait until the device is idle."""
    if training.batch.is_cuda:
        torch.cuda.synchronize()


def us_per_step(training: Training, drive: Drive, runs: int) -> float:
    """Measure microseconds per step, from an idle device to an idle device."""
    synchronize(training)
    started = time.perf_counter()
    drive(runs)
    synchronize(training)
    return (time.perf_counter() - started) / runs * 1e6


def runs_within(training: Training, secs: float, most: int, rounds: int) -> int:
    """Return how many steps in a round, at most so many, let all candidates make their ``rounds`` within ``secs``."""
    repeat(training.step, training.batch)(5)
    step = us_per_step(training, repeat(training.step, training.batch), 20) / 1e6
    candidates = len(hooks_of(Path())) + 2
    # One round is discarded, the memory and the lags take another one, and monitoring takes its time.
    return max(min(most, int(secs / (1.3 * step * candidates * (rounds + 2)))), 20)


def memory_of(training: Training, drive: Drive, runs: int) -> Memory:
    """Return what the loop uses at most."""
    if not training.batch.is_cuda:
        drive(runs)
        return Memory(0, 0)
    synchronize(training)
    torch.cuda.reset_peak_memory_stats()
    drive(runs)
    synchronize(training)
    stats = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    return Memory(torch.cuda.max_memory_allocated(), stats.get("allocated_bytes.current", 0))


def measure(training: Training, runs: int, rounds: int) -> tuple[Rounds, dict[str, Memory], list[int]]:
    """Return microseconds per step of all candidates, the memory that each uses, and the lags of values in runs."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        writer = stack.enter_context(SummaryWriter(f"{name}/hand"))
        candidates = {
            BARE: repeat(training.step, training.batch),
            BY_HAND: by_hand(training, writer),
            **{who: hooked(training, hooks, stack) for who, hooks in hooks_of(Path(name)).items()},
        }
        measures = {who: partial(us_per_step, training, drive, runs) for who, drive in candidates.items()}
        rounds_of = take_turns(measures, rounds)
        memory = {who: memory_of(training, drive, max(runs // 10, 1)) for who, drive in candidates.items()}
        lag = Lag()
        hooked(training, [lag], stack)(runs)
        lags = lag.runs.copy()  # without what arrives when the loop closes
    return rounds_of, memory, lags or [0]


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


# -- reporting --------------------------------------------------------------------------------------------------------


def report(workload: str, figures: Rounds, memory: dict[str, Memory], lags: list[int]) -> dict[str, float]:
    """Print the tables of a workload, and return the speed of each candidate relative to the bare loop."""
    ratios = {name: median_ratio(figures[BARE], rounds) for name, rounds in figures.items()}
    rows = [
        (
            name,
            min(rounds),
            median(rounds),
            median(one - bare for one, bare in zip(rounds, figures[BARE], strict=True)),
            1e6 / median(rounds),
            f"{ratios[name]:.3f}",
            (memory[name].device - memory[BARE].device) / 1e6,
            (memory[name].pinned - memory[BARE].pinned) / 1e6,
        )
        for name, rounds in figures.items()
    ]
    header = [workload, "us per step: min", "median", "beyond the bare loop", "steps/sec", "relative to the bare loop"]
    print(table([*header, "device memory, MB", "pinned memory, MB"], rows), end="\n\n", flush=True)
    ordered = sorted(lags)
    shares = [("median", 0.5), ("99 %", 0.99), ("all", 1.0)]
    lag_rows = [(name, float(ordered[math.ceil(share * len(ordered)) - 1])) for name, share in shares]
    print(
        table([f"{workload}: share of values", "arrive after at most so many runs"], lag_rows), end="\n\n", flush=True
    )
    return ratios


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=5_000, help="steps per round and candidate (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=7, help="number of rounds (default: %(default)s)")
    options.add_argument("--secs", type=float, default=120.0, help="how long it may take (default: %(default)s)")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="(default: %(default)s)")
    chosen = options.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("not run: no CUDA device")
        return
    for name in ("torchhooks", "by_hand"):
        logging.getLogger(name).addHandler(logging.NullHandler())  # log records are created and discarded
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).propagate = False
    where, training = machine(), mlp(chosen.device)
    print(describe(where), end="\n\n", flush=True)
    workloads = {"launch-bound": (training, 0.90), "device-bound": (device_bound(training, chosen.device), 0.98)}
    figures, budgets = {}, []
    for workload, (kind, limit) in workloads.items():
        runs = runs_within(kind, 0.45 * chosen.secs, chosen.runs, chosen.rounds)
        rounds, memory, lags = measure(kind, runs, chosen.rounds)
        figures[workload] = {"us_per_step": rounds, "memory": memory, "lags": sorted(set(lags))}
        ratio = report(workload, rounds, memory, lags)[OURS]
        budgets.append(Budget(f"steps/sec, {workload}, relative to the bare loop", ratio, limit, "x", at_least=True))
    runs = max(runs_within(training, 0.1 * chosen.secs, chosen.runs, 0), 3 * PERIOD)
    periods = reported(training, runs) if chosen.device == "cuda" else []
    if periods:
        errors = sorted(abs(rate / true - 1) * 100 for _, rate, true in periods)
        tenth = errors[math.ceil(0.9 * len(errors)) - 1]
        rows = [("median", median(errors)), ("90 %", tenth), ("worst", errors[-1])]
        print(table(["reported steps/sec of a period", "error, %"], rows), end="\n\n", flush=True)
        budgets.append(Budget("error of the reported steps/sec, 90 % of the periods", tenth, 1, "%"))
    finish(
        chosen.results, "gpu", check=chosen.check, budgets=budgets, machine=where, workloads=figures, periods=periods
    )


if __name__ == "__main__":
    main()
