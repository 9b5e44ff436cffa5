"""What it costs to keep ranks in step: ticks in a thread, compared with a collective in each step.

Two processes with gloo on the loopback interface make runs in which no hook is due, in three ways: as a loop of one
process each, in step with each other, and with a blocking ``all_reduce`` of one number after each step, which is how
other libraries find out whether any rank wants to stop.

A model then says what a tick costs as ranks are added. It is a model, not a measurement: the cost of handling a table
is measured for each number of ranks, but the cost of the exchange is measured with 2 and with 4 ranks only, and
continued as a straight line, because gloo's allgather makes one step per other rank. How long a tick takes follows from
a latency that is assumed.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing
from torchhooks import MonitoredLoop, Ranks
from torchhooks.ranks.agreement import Agreement, Row

from common import Budget, describe, finish, machine, parser, table, take_turns, us_per_run

multiprocessing: Any = torch.multiprocessing  # whose annotations leave out start_processes()
multiprocessing.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "torchhooks"])  # imported once

WITHOUT, TICKS, COLLECTIVE = "without", "ticks, 10 per second", "all_reduce in each step"
EMPTY, REAL = "empty step", "small real step"
WORLDS = (2, 8, 64, 256, 1024, 4096)
LATENCY_US = 50.0
"""Microseconds for one step of the exchange between two machines; assumed, not measured."""


def empty_step() -> float:
    """Do nothing."""
    return 1.0


def real_step() -> Callable[[], float]:
    """Return a step of about 100 us."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(16, 32)

    def step() -> float:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        return 1.0

    return step


def cost(step: Callable[[], float], way: str, runs: int) -> float:
    """Return the microseconds of a run. Every rank calls this in the same order."""
    one = torch.ones(1)

    def drive(runs: int) -> None:
        for _ in range(runs):
            loop.run()
            if way == COLLECTIVE:
                torch.distributed.all_reduce(one)

    with MonitoredLoop(step, ranks=Ranks() if way == TICKS else False) as loop:
        drive(10)
        torch.distributed.barrier()
        us: float = us_per_run(drive, runs)
    return us


def tick_cost(secs: float) -> float:
    """Return the microseconds of CPU time that a tick takes, in its thread and in gloo's threads."""
    figures: list[float] = []
    with MonitoredLoop(empty_step, ranks=Ranks(tick_secs=0.02)) as loop:
        rank_sync: Any = loop._runner.rank_sync  # noqa: SLF001 - no public attribute counts ticks
        peers = rank_sync.peers
        loop.session.ranks.gather(None)
        for _ in range(5):
            before = time.process_time(), peers._ticks  # noqa: SLF001 - as above
            time.sleep(secs / 5)  # the main thread does nothing, so the process's time is the time of the ticks
            ticks = peers._ticks - before[1]  # noqa: SLF001 - as above
            figures.append((time.process_time() - before[0]) / max(ticks, 1))
        loop.session.ranks.gather(None)
    return min(figures) * 1e6


def exchange_cost(size: int) -> float:
    """Return the microseconds of CPU time that gloo's allgather of a tick's numbers takes on one rank."""
    mine = torch.zeros(len(Row()), dtype=torch.int64)
    rows = [torch.zeros_like(mine) for _ in range(size)]
    figures: list[float] = []
    for _ in range(5):
        before = time.process_time()
        for _ in range(200):
            torch.distributed.all_gather(rows, mine)
        figures.append((time.process_time() - before) / 200 * 1e6)
    return min(figures)


def rank_main(rank: int, size: int, folder: str, runs: int, rounds: int, secs: float) -> None:
    """Measure, in one process of ``size``, and write what rank 0 measured to a file."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{size}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    document: dict[str, Any] = {"tick_us": tick_cost(secs), "exchange_us": exchange_cost(size)}
    if size == 2:
        for name, step in ((EMPTY, empty_step), (REAL, real_step())):
            candidates = {way: _bound(step, way, runs) for way in (WITHOUT, TICKS, COLLECTIVE)}
            document[name] = take_turns(candidates, rounds)
    if rank == 0:
        Path(folder, f"{size}.json").write_text(json.dumps(document), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _bound(step: Callable[[], float], way: str, runs: int) -> Callable[[], float]:
    return lambda: cost(step, way, runs if way != COLLECTIVE else max(runs // 10, 10))


def table_cost(size: int) -> float:
    """Return the microseconds that a rank takes to handle the table of a tick of ``size`` ranks."""
    numbers = [list(Row(made=5, begun=5 + rank % 2)) for rank in range(size)]
    tensors = [torch.tensor(row) for row in numbers]
    agreement = Agreement()

    def drive(ticks: int) -> None:
        for _ in range(ticks):
            agreement.settle([Row(*tensor.tolist()) for tensor in tensors])

    drive(1)
    return min(us_per_run(drive, max(2000 // size, 2)) for _ in range(5))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=20_000, help="runs per figure (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=9, help="rounds (default: %(default)s)")
    options.add_argument("--secs", type=float, default=3.0, help="seconds of ticks (default: %(default)s)")
    chosen = options.parse_args()
    where = machine()
    print(describe(where), end="\n\n")
    measured: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in (2, 4):
            arguments = (size, folder, chosen.runs, chosen.rounds, chosen.secs)
            multiprocessing.start_processes(rank_main, arguments, nprocs=size, start_method="forkserver")
            measured[size] = json.loads(Path(folder, f"{size}.json").read_text(encoding="utf-8"))

    rows = []
    for way in (WITHOUT, TICKS, COLLECTIVE):
        figures = [measured[2][name][way] for name in (EMPTY, REAL)]
        rows.append((way, *(number for each in figures for number in (min(each), median(each)))))
    print(table(["us per run, 2 ranks", f"{EMPTY}: min", "median", f"{REAL}: min", "median"], rows), end="\n\n")

    per_rank = max((measured[4]["exchange_us"] - measured[2]["exchange_us"]) / 2, 0.0)
    modelled = []
    for size in WORLDS:
        cpu = measured[2]["tick_us"] + per_rank * (size - 2) + table_cost(size) - table_cost(2)
        modelled.append((size, cpu, LATENCY_US * (size - 1) / 1e3, cpu / 1e4 / 0.1, cpu / 1e4 / 0.5))
    ticks = ", ".join(f"{measured[size]['tick_us']:.0f} with {size} ranks" for size in measured)
    print(f"CPU time of a tick, in us: {ticks}. Each further rank adds {per_rank:.1f} for the exchange.", end="\n\n")
    header = ["ranks (a model)", "CPU per tick, us", "duration, ms", "% of a core, 0.1 s", "% of a core, 0.5 s"]
    print(table(header, [(f"{size:,}", *figures) for size, *figures in modelled]), end="\n\n")

    ratio = min(measured[2][REAL][TICKS]) / min(measured[2][REAL][WITHOUT])
    budgets = [
        Budget("a small real step with ticks, relative to without, by the minima", ratio, 1.1, "x"),
        Budget("ticks of 2 ranks, 10 per second, share of a core", measured[2]["tick_us"] / 1e3, 1.0, "%"),
    ]
    results = {"measured": measured, "model": modelled}
    finish(chosen.results, "ranks", check=chosen.check, budgets=budgets, machine=where, **results)


if __name__ == "__main__":
    main()
