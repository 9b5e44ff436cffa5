"""Measure the peak memory and the seconds of ``python -m torchhooks diff``, by the number of runs.

    python benchmarks/diff_of_ledgers.py [--check] [--runs 20000 200000] [--rounds 3] [--tensors 10]

Two ledgers have the lines that a LedgerHook writes without ``what``, for a model of 10 tensors. They are the same but
for the states of two random generators that nobody draws from, as in two processes. "import torchhooks" is a process
that does nothing else. Memory is the largest that a process had at any time, as the operating system tells it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

from torchhooks.common.digests import WIDTH
from torchhooks.tools.ledger.lines import FORMAT

from common import Budget, describe, finish, machine, parser, table

IMPORT = "import torchhooks"
LIMIT_MB = 40.0


class Ended(NamedTuple):
    """A process that is over."""

    secs: float
    megabytes: float


def lines(runs: int, tensors: int, process_seed: int) -> Iterator[str]:
    """Yield the lines of a ledger. Only what the operating system seeds depends on ``process_seed``."""
    draw, of_process = random.Random(0), random.Random(process_seed)
    first = {
        "ledger": FORMAT,
        "process": 1,
        "loop": 1,
        "resumed_at": 0,
        "rank": 0,
        "world_size": 1,
        "argv": ["train.py"],
    }
    yield encoded(first)
    yield encoded({"names": {"parameters": [f"{number}.weight" for number in range(tensors)]}})
    python, numpy = (f"{of_process.getrandbits(32):08x}" for _ in range(2))
    for run in range(1, runs + 1):
        item, outputs = (f"{draw.getrandbits(4 * WIDTH):0{WIDTH}x}" for _ in range(2))
        states = {"python": python, "numpy": numpy, "torch": f"{draw.getrandbits(32):08x}"}
        parameters = f"{draw.getrandbits(4 * WIDTH * tensors):0{WIDTH * tensors}x}"
        digests = {"item": item, "arguments": item, "random": states, "outputs": outputs, "parameters": parameters}
        epoch, batch = divmod(run - 1, 1000)
        place = {"loop": 1, "run": run, "step": run, "epoch": epoch, "batch": batch, "process": 1}
        yield encoded(
            {**place, "digests": digests, "values": {"loss": draw.random()}, "drawn": ["torch"], "format": FORMAT}
        )


def encoded(line: dict[str, object]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def write(folder: Path, runs: int, tensors: int, process_seed: int) -> float:
    """Write a ledger, and return its megabytes."""
    path = folder / "ledger" / "rank-0.jsonl"
    path.parent.mkdir(parents=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(lines(runs, tensors, process_seed))
    return path.stat().st_size / 1e6


def measure(arguments: Sequence[str], folder: str) -> Ended:
    """Run Python in ``folder``, and return what that took."""
    started = perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    secs = perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"python {' '.join(arguments)} ended with status {process.returncode}")
    kilobytes = usage.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return Ended(secs, kilobytes * 1024 / 1e6)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, nargs="+", default=[20_000, 200_000], help="runs (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=3, help="number of rounds (default: %(default)s)")
    options.add_argument("--tensors", type=int, default=10, help="tensors of the model (default: %(default)s)")
    chosen = options.parse_args()
    where = machine()
    print(describe(where), end="\n\n")
    commands = {IMPORT: ["-c", "import torchhooks"]}
    sizes = []
    with TemporaryDirectory() as folder:
        for runs in chosen.runs:
            one, other = (Path(folder, f"{name}-{runs}") for name in ("one", "other"))
            write(one, runs, chosen.tensors, 1)
            sizes.append((f"{runs:,} runs", write(other, runs, chosen.tensors, 2)))
            commands[f"diff, {runs:,} runs"] = ["-m", "torchhooks", "diff", str(one), str(other)]
        rounds = [{name: measure(command, folder) for name, command in commands.items()} for _ in range(chosen.rounds)]
    memory = {name: [ended[name].megabytes for ended in rounds] for name in commands}
    secs = {name: [ended[name].secs for ended in rounds] for name in commands}
    print(table(["ledger", "MB of a file"], sizes), end="\n\n")
    rows = [(name, median(memory[name]), min(secs[name]), median(secs[name])) for name in commands]
    print(table(["a process", "peak memory, MB", "secs: min", "median"], rows), end="\n\n")
    least, *_, most = [median(memory[name]) for name in commands if name != IMPORT]
    what = f"memory of diff that {max(chosen.runs) - min(chosen.runs):,} runs add"
    budgets = [Budget(what, most - least, LIMIT_MB, "MB")]
    finish(
        chosen.results,
        "diff_of_ledgers",
        check=chosen.check,
        budgets=budgets,
        machine=where,
        megabytes=memory,
        secs=secs,
    )


if __name__ == "__main__":
    main()
