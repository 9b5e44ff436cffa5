"""What the benchmarks share: a step, timing on a machine that others use too, tables, and what was measured where.

Nothing here is timed once. The candidates of a comparison take turns in every round, so that what else the machine does
hits them alike, and a difference or a ratio is taken within each round before the median of the rounds is.
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
"""What each candidate measured, a figure a round."""


# -- the steps ------------------------------------------------------------------------------------------------------


class Training(NamedTuple):
    """A training as a person has it: ``step(batch)`` returns the loss and does everything that makes a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor], Tensor]
    batch: Tensor


def nothing() -> Training:
    """A step that does nothing: what is left is the cost of everything around it."""
    model, optimizer, batch = _parts("cpu")
    loss = torch.tensor(0.125)
    return Training(model, optimizer, lambda batch: loss, batch)


def mlp(device: str = "cpu", *, rows: int = 32) -> Training:
    """Two layers, backward and SGD: a real step, which puts out of the caches what the loop around it left there."""
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
    """A step that notes how long it was from the end of each call to the start of the next: what the loop costs.

    Measured from inside, the time of the step itself and its noise are left out, and so are the start and the end of
    a loop.
    """

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        self._step = step
        self.reset()

    def reset(self) -> None:
        """Forget the calls so far."""
        self.runs = 0
        self.gaps: list[int] = []
        """Nanoseconds between calls, one fewer than there were calls."""
        self._ended = 0

    @property
    def us_a_step(self) -> float:
        """Microseconds between two calls, on average."""
        return fmean(self.gaps) / 1e3

    def __call__(self, batch: Tensor) -> Tensor:
        """One step."""
        started = perf_counter_ns()
        if self.runs:
            self.gaps.append(started - self._ended)
        self.runs += 1
        loss = self._step(batch)
        self._ended = perf_counter_ns()
        return loss


# -- timing ---------------------------------------------------------------------------------------------------------


def take_turns(candidates: Mapping[str, Callable[[], float]], rounds: int) -> Rounds:
    """What the candidates measure, ``rounds`` times each. One round more comes first and is thrown away."""
    figures: Rounds = {name: [] for name in candidates}
    names = list(candidates)
    gc.collect()
    gc.freeze()  # so that collecting between two candidates does not go through all of torch each time
    for number in range(rounds + 1):
        shift = number % len(names)  # so that nobody always comes after the same other one
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


def over(run: Callable[[Tensor], object], batch: Tensor) -> Callable[[int], None]:
    """What calls ``run(batch)`` so many times."""

    def drive(runs: int) -> None:
        for _ in range(runs):
            run(batch)

    return drive


def us_a_run(drive: Callable[[int], object], runs: int) -> float:
    """Microseconds a run of ``drive(runs)``."""
    started = perf_counter()
    drive(runs)
    return (perf_counter() - started) / runs * 1e6


def beyond(figures: Rounds, name: str, base: str) -> list[float]:
    """How much more than ``base`` it was, round by round."""
    return [figure - less for figure, less in zip(figures[name], figures[base], strict=True)]


def median_ratio(figures: Iterable[float], others: Iterable[float]) -> float:
    """The median of the rounds' ratios."""
    return median(figure / other for figure, other in zip(figures, others, strict=True))


# -- telling --------------------------------------------------------------------------------------------------------


class Budget(NamedTuple):
    """A promise and what became of it."""

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
    """A Markdown table. Floats get three digits, ``None`` is left empty; all columns but the first are numbers."""
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
    """Each budget, the figure, and ``ok`` or ``over``."""
    rows = [
        (b.what, f"{_cell(b.figure)} {b.unit}".strip(), f"{'>=' if b.at_least else '<='} {b.limit:g}", verdict(b))
        for b in budgets
    ]
    return table(["budget", "figure", "limit", ""], rows)


def verdict(budget: Budget) -> str:
    """One word."""
    return "ok" if budget.is_met else "over"


def machine() -> dict[str, Any]:
    """Where the figures come from."""
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
    """The machine in a line."""
    return ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)


def save(folder: Path, name: str, **document: Any) -> None:
    """Write ``document`` and the command to ``folder/name.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]])
    # Four digits behind the point are more than is measured; one line a key reads and diffs better than one a number.
    rounded = json.loads(json.dumps({"command": command, **document}), parse_float=lambda text: round(float(text), 4))
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in rounded.items()]
    (folder / f"{name}.json").write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


def finish(folder: Path, name: str, *, check: bool, budgets: Sequence[Budget], **document: Any) -> None:
    """Print the budgets, write everything down, and exit with an error if one is over and ``check`` asks for that."""
    print(budget_table(budgets))
    judged = [{**budget._asdict(), "ok": budget.is_met} for budget in budgets]
    save(folder, name, budgets=judged, **document)
    over = [budget.what for budget in budgets if not budget.is_met]
    if check and over:
        raise SystemExit(f"over budget: {'; '.join(over)}")


def parser(text: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with an error if a budget is over")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes (default: %(default)s)")
    return parser
