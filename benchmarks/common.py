"""Shared parts of the benchmarks: training steps, timing on a machine that is also used by others, tables and budgets.

Nothing is timed only once. The candidates of a comparison take turns in every round, so that other load on the machine
affects all of them alike. Differences and ratios are computed within each round, and then the median is taken.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RESULTS = Path(__file__).parent / "results"

Rounds = dict[str, list[float]]
"""For each candidate, one figure per round."""


# -- the steps ------------------------------------------------------------------------------------------------------


class Training(NamedTuple):
    """What a user's script has: ``step(batch)`` makes one complete training step and returns the loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor], Tensor]
    batch: Tensor


def empty() -> Training:
    """Return a step that does nothing, so that only the cost of everything around it is measured."""
    model, optimizer, batch = _parts("cpu")
    loss = torch.tensor(0.125)
    return Training(model, optimizer, lambda batch: loss, batch)


def evicting() -> Training:
    """Return a step that does nothing but write 4 MB, which evicts the loop from the first two levels of CPU caches."""
    training, megabytes = empty(), torch.zeros(1 << 20)

    def step(batch: Tensor) -> Tensor:
        megabytes.add_(1)
        return training.step(batch)

    return training._replace(step=step)


def mlp(device: str = "cpu", *, rows: int = 32) -> Training:
    """Return a real step: two layers, backward and SGD. It evicts the code and data of the loop from the CPU caches."""
    model, optimizer, batch = _parts(device, rows)
    targets = torch.zeros(rows, dtype=torch.long, device=device)

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), targets)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step, batch)


def _parts(device: str, rows: int = 32) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(rows, 64, device=device)


class Stamped:
    """A step that measures the time from the end of each call to the start of the next, which is the cost of the loop.

    Measuring from inside the step leaves out the time of the step and its noise, and the start and end of the loop.
    """

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        self._step = step
        self.reset()

    def reset(self) -> None:
        """Discard the calls so far."""
        self.runs = 0
        self.gaps: list[int] = []
        """Nanoseconds between calls: one figure fewer than there were calls."""
        self._ended = 0

    @property
    def us_per_step(self) -> float:
        """Mean time between two calls, in microseconds."""
        return fmean(self.gaps) / 1e3

    def __call__(self, batch: Tensor) -> Tensor:
        """Make one step."""
        started = perf_counter_ns()
        if self.runs:
            self.gaps.append(started - self._ended)
        self.runs += 1
        loss = self._step(batch)
        self._ended = perf_counter_ns()
        return loss


# -- timing ---------------------------------------------------------------------------------------------------------


def take_turns(candidates: Mapping[str, Callable[[], float]], rounds: int) -> Rounds:
    """Call every candidate once per round and return the figures. One extra round comes first and is discarded."""
    figures: Rounds = {name: [] for name in candidates}
    names = list(candidates)
    gc.collect()
    gc.freeze()  # otherwise each collection between two candidates would scan all of torch
    for number in range(rounds + 1):
        shift = number % len(names)  # so that no candidate always follows the same other one
        for name in names[shift:] + names[:shift]:
            gc.collect()
            gc.disable()
            try:
                figure = candidates[name]()
            finally:
                gc.enable()
            if number:
                figures[name].append(figure)
    gc.unfreeze()
    return figures


def repeat(run: Callable[[Tensor], object], batch: Tensor) -> Callable[[int], None]:
    """Return a function that calls ``run(batch)`` as many times as its argument says."""

    def drive(runs: int) -> None:
        for _ in range(runs):
            run(batch)

    return drive


def us_per_run(drive: Callable[[int], object], runs: int) -> float:
    """Call ``drive(runs)`` and return the microseconds per run."""
    started = perf_counter()
    drive(runs)
    return (perf_counter() - started) / runs * 1e6


def beyond(figures: Rounds, name: str, base: str) -> list[float]:
    """Return by how much ``name`` exceeds ``base`` in each round."""
    return [figure - less for figure, less in zip(figures[name], figures[base], strict=True)]


def median_ratio(figures: Iterable[float], others: Iterable[float]) -> float:
    """Return the median of the ratios of the rounds."""
    return median(figure / other for figure, other in zip(figures, others, strict=True))


# -- reporting ------------------------------------------------------------------------------------------------------


class Budget(NamedTuple):
    """A limit, and the figure that was measured."""

    what: str
    figure: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the figure is within the limit."""
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit


def table(header: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    """Return a Markdown table. Floats get three digits, ``None`` is an empty cell, and numbers are aligned right."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        " | ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in [cells[0], rule, *cells[1:]]
    ]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def budget_table(budgets: Iterable[Budget]) -> str:
    """Return a table of the budgets with their figures, limits, and ``ok`` or ``over``."""
    rows = [
        (b.what, f"{_cell(b.figure)} {b.unit}".strip(), f"{'>=' if b.at_least else '<='} {b.limit:g}", verdict(b))
        for b in budgets
    ]
    return table(["budget", "figure", "limit", ""], rows)


def verdict(budget: Budget) -> str:
    """Return ``"ok"`` or ``"over"``."""
    return "ok" if budget.is_met else "over"


def machine() -> dict[str, Any]:
    """Return a description of this machine and its software, to be stored with the figures."""
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "gpu": cuda,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def describe(machine: Mapping[str, Any]) -> str:
    """Return the description of a machine as one line."""
    return ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)


def save(folder: Path, name: str, **document: Any) -> None:
    """Write ``document`` and the command line to ``folder/name.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]])
    # Four decimals are more than is measured. One line per key is easier to read and diff than one per number.
    rounded = json.loads(json.dumps({"command": command, **document}), parse_float=lambda text: round(float(text), 4))
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in rounded.items()]
    (folder / f"{name}.json").write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


def finish(folder: Path, name: str, *, check: bool, budgets: Sequence[Budget], **document: Any) -> None:
    """Print the budgets and save the results. With ``check``, exit with an error if a budget is exceeded."""
    print(budget_table(budgets))
    judged = [{**budget._asdict(), "ok": budget.is_met} for budget in budgets]
    save(folder, name, budgets=judged, **document)
    over = [budget.what for budget in budgets if not budget.is_met]
    if check and over:
        raise SystemExit(f"over budget: {'; '.join(over)}")


def parser(text: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with an error if a budget is exceeded")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file (default: %(default)s)")
    return parser
