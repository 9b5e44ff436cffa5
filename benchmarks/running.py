"""Measure running means of every run's values, compared with adding the values up by hand.

    python benchmarks/running.py [--check] [--device cuda]

By hand, the values are added to a tensor, or read with ``.item()`` in every run and added to a number. On a GPU, the
latter waits for the step. A running mean is measured as the difference between two loops with the same hook, which is
never due: one hook logs the mean of each value, the other the value itself. Figures are microseconds per run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torchhooks import LoggingTensorHook, MonitoredLoop, running_mean

from common import (
    Budget,
    Rounds,
    Stamped,
    Training,
    beyond,
    describe,
    empty,
    finish,
    machine,
    median_ratio,
    mlp,
    parser,
    repeat,
    table,
    take_turns,
    us_per_run,
)

FAR = 10**9
"""A number of runs that no benchmark reaches."""

BARE, TENSOR, ITEM = "bare for loop", "added to a tensor by hand", "added with .item() by hand"
LOOP, MEAN = "loop without a running mean", "loop with running_mean"
VALUES = (1, 10)
"""How many values of each run are averaged."""

Drive = Callable[[int], object]
Step = Callable[[Tensor], dict[str, Tensor]]


def with_values(training: Training, number: int) -> Step:
    """Return the step with ``number`` values in a dict: the loss, and the same loss under other names."""
    names, step = [f"value{index}" for index in range(number)], training.step

    def returning(batch: Tensor) -> dict[str, Tensor]:
        return dict.fromkeys(names, step(batch))

    return returning


def by_hand(step: Step, batch: Tensor, start: Callable[[Tensor], Any], add: Callable[[Any, Tensor], Any]) -> Drive:
    """Add up each value of the step in every run, with ``add(total, value)``."""
    totals: dict[str, Any] = {name: start(value) for name, value in step(batch).items()}
    count = 0

    def drive(runs: int) -> None:
        nonlocal count
        for _ in range(runs):
            for name, value in step(batch).items():
                totals[name] = add(totals[name], value)
            count += 1

    return drive


def add_tensor(total: Tensor, value: Tensor) -> Tensor:
    """Add ``value`` where it is."""
    total += value.detach()
    return total


def add_item(total: float, value: Tensor) -> float:
    """Add ``value`` on the host."""
    return total + value.item()


def candidates(training: Training, number: int, stack: ExitStack) -> dict[str, Drive]:
    """Return the candidates that average ``number`` values of each run."""
    step, batch = with_values(training, number), training.batch
    names = list(step(batch))

    def loop(tensors: dict[str, Any]) -> Drive:
        hook = LoggingTensorHook(tensors, every_n_iter=FAR)
        return repeat(stack.enter_context(MonitoredLoop(step, training.model, hooks=[hook])).run, batch)

    return {
        BARE: repeat(step, batch),
        TENSOR: by_hand(step, batch, lambda value: torch.zeros_like(value, requires_grad=False), add_tensor),
        ITEM: by_hand(step, batch, lambda value: 0.0, add_item),
        LOOP: loop({name: name for name in names}),
        MEAN: loop({name: running_mean(name) for name in names}),
    }


def timed(training: Training, number: int, runs: int, rounds: int) -> Rounds:
    """Measure microseconds per run, step included, until the device is done."""
    on_gpu = training.batch.is_cuda

    def us(drive: Drive) -> float:
        def complete(runs: int) -> None:
            drive(runs)
            if on_gpu:
                torch.cuda.synchronize()

        return us_per_run(complete, runs)

    with ExitStack() as stack:
        return take_turns(
            {name: partial(us, drive) for name, drive in candidates(training, number, stack).items()}, rounds
        )


def timed_from_inside(training: Training, number: int, runs: int, rounds: int) -> Rounds:
    """Measure microseconds between two steps; the figure of a round is the median of its runs."""
    step = Stamped(training.step)

    def us(drive: Drive) -> float:
        step.reset()
        drive(runs)
        return median(step.gaps) / 1e3

    with ExitStack() as stack:
        drives = candidates(training._replace(step=step), number, stack)
        return take_turns({name: partial(us, drive) for name, drive in drives.items()}, rounds)


def costs(figures: Rounds) -> dict[str, list[float]]:
    """Return what averaging costs in each round."""
    return {
        TENSOR: beyond(figures, TENSOR, BARE),
        ITEM: beyond(figures, ITEM, BARE),
        "running_mean": beyond(figures, MEAN, LOOP),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", default="cpu", help="device of the real step (default: %(default)s)")
    options.add_argument("--runs", type=int, default=10_000, help="runs per round and candidate (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=30, help="number of rounds (default: %(default)s)")
    chosen = options.parse_args()
    where = machine()
    torch.set_num_threads(1)
    print(describe(where), end="\n\n")
    few = max(chosen.runs // 20, 20)
    measured: dict[str, Rounds] = {}
    for number in VALUES:
        values = f"{number} value{'s' if number > 1 else ''}"
        if chosen.device == "cpu":
            measured[f"empty step, {values}"] = timed(empty(), number, chosen.runs, chosen.rounds)
            measured[f"real step, {values}"] = timed_from_inside(mlp(), number, few, chosen.rounds)
        else:
            measured[f"step on a GPU, {values}"] = timed(mlp(chosen.device), number, few, chosen.rounds)
    rows = [
        (f"{title}: {name}", min(figures), median(figures))
        for title, rounds in measured.items()
        for name, figures in {f"{BARE}, in total": rounds[BARE], **costs(rounds)}.items()
    ]
    print(table(["us per run", "min", "median"], rows), end="\n\n")
    budgets = [
        Budget(
            f"running_mean relative to adding to a tensor by hand, {title}",
            median_ratio(costs(rounds)["running_mean"], costs(rounds)[TENSOR]),
            1.5,
            "x",
        )
        for title, rounds in measured.items()
        if title.startswith("empty")
    ]
    finish(chosen.results, "running", check=chosen.check, budgets=budgets, machine=where, us=measured)


if __name__ == "__main__":
    main()
