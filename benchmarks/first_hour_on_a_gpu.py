"""Answer, on the first accelerator at hand, what no CPU can answer about torchhooks, and write a report.

    python benchmarks/first_hour_on_a_gpu.py [--minutes 8] [--simulated] [--only PART ...] [--repeat 1] [--gigabytes 4]
                                             [--results FOLDER]

The parts, the most important ones first:

    transformer  124 million parameters: bare, by hand, with hooks; waits; rates compared with CUDA events
    saves        a save of its state, in the background and not, next to torch.save with and without fsync
    first_save   the longest step around the first save in the background, whose memory is pinned meanwhile
    tests        the tests marked cuda and accelerator
    graph        a step that is the replay of a CUDA graph
    resume       a script in fp16 that is killed, stopped and resumed: the bits
    saving       a save with a NaN guard and async_save during a long step, with the waits counted
    streams      two requests on two streams, a hundred rounds
    memory       memory under large fetches, of batches, and under replays of a CUDA graph
    compiled     CUDA graphs and torch.compile(mode="reduce-overhead") with all hooks, values compared with eager
    fsdp2        FSDP2 with one rank, resumed
    nccl         FSDP2 and DDP on every GPU with NCCL, resumed
    two_gpus     a save from the second GPU creates no context on the first one
    check        python -m torchhooks check of the script of resume
    in_place     an asynchronous save of 4 GB that is updated in place at once, bits compared
    peers        the same monitoring by hand, and with Fabric, Accelerate and Lightning if they are installed
    speed        benchmarks/gpu.py
    lost         a lost context
    pinning      how long pinning memory takes while the device is busy, by size
    hooks        benchmarks/accelerator.py

Each part has a process of its own, which is ended when the part's time is up, and what it has found by then is kept:
the report, Markdown, is printed and written to ``FOLDER/first_hour_on_a_gpu.md`` piece by piece. After ``--minutes``,
the parts that are left are not run. A part that needs something that this machine lacks says so and is skipped; on a
CPU, some parts run on a FakeDevice or on small sizes. The exit code is 1 if a part failed or was ended.

On a Mac, the values of ``mps`` travel without waiting here, which torchhooks does not do by default: see
``torchhooks.device.accelerator.WAITED_FOR``. ``--simulated`` tries the script out on the simulated device of the tests.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from common import RESULTS, describe, machine, table
from gpu_parts import DEVICE, Options, Part, Skip, basics, beside, graph, ranks, resuming, transformer

PARTS: dict[Part, float] = {
    transformer.transformer: 75,
    transformer.saves: 45,
    transformer.first_save: 30,
    basics.tests: 120,
    graph.graph: 25,
    resuming.resume: 60,
    basics.saving: 15,
    basics.streams: 10,
    basics.memory: 25,
    basics.compiled: 60,
    ranks.fsdp2: 60,
    ranks.nccl: 120,
    basics.two_gpus: 30,
    resuming.check: 90,
    basics.in_place: 40,
    beside.peers: 60,
    basics.speed: 90,
    basics.lost: 30,
    basics.pinning: 20,
    basics.hooks: 40,
}
"""The seconds that each part may take; those of ``--simulated`` and of a CPU may take four times as long."""

SKIPPED, FAILED = 3, 1
VERDICTS = {0: "passed", FAILED: "FAILED", SKIPPED: "skipped"}


class Report:
    """The report: what is added is printed, and in the file at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> None:
        """Remove the report of before."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("", encoding="utf-8")

    def add(self, text: str) -> None:
        """Add a paragraph or a table."""
        print(text, end="\n\n", flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n\n")


def work(part: Part, options: Options, report: Report) -> None:
    """Carry out a part in this process, and end it with the code of the verdict."""
    os.setsid()  # so that the part can be ended with all that it has started
    for name in ("torchhooks", "by_hand", "peer_loops", "lightning"):  # the report is the only output
        logging.getLogger(name).addHandler(logging.NullHandler())  # records are made, and dropped
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).propagate = False
    try:
        for piece in part(options):
            report.add(piece)
    except Skip as skip:
        report.add(f"{skip}.")
        sys.exit(SKIPPED)
    except Exception as error:
        report.add(f"```text\n{''.join(traceback.format_exception(error))[-6000:]}\n```")
        sys.exit(FAILED)


def run(part: Part, options: Options, report: Report) -> str:
    """Carry out a part in a process of its own, within ``options.secs``, and return its verdict."""
    report.add(f"## {part.__name__}\n\n{part.__doc__}")
    started = time.monotonic()
    # Its server has imported torch, which takes seconds, but has not initialized CUDA, which no fork survives.
    process = multiprocessing.get_context("forkserver").Process(target=work, args=(part, options, report))
    process.start()
    assert process.pid is not None
    try:
        process.join(options.secs)
        verdict = VERDICTS.get(process.exitcode or 0, f"FAILED with exit code {process.exitcode}")
        if process.is_alive():
            verdict = f"ended after {options.secs:.0f} s"
    finally:  # also after a Ctrl-C, which does not reach it
        with suppress(ProcessLookupError):  # nothing is left of it
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
    report.add(f"**{part.__name__}: {verdict}**, {time.monotonic() - started:.1f} s.")
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.__name__ for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help="the parts to run")
    parser.add_argument("--minutes", type=float, default=8.0, help="how long it may take (default: %(default)s)")
    parser.add_argument("--simulated", action="store_true", help="run on the simulated device of the tests")
    parser.add_argument("--repeat", type=int, default=1, help="how often to run the tests (default: %(default)s)")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the large state (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the report (default: %(default)s)")
    chosen = parser.parse_args()
    end = time.monotonic() + 60 * chosen.minutes
    multiprocessing.set_forkserver_preload(["torch", "torchhooks", "torch.utils.tensorboard"])
    report = Report(chosen.results / "first_hour_on_a_gpu.md")
    report.begin()
    report.add(f"# First hour on {DEVICE}\n\nMachine: {describe(machine())}.")
    verdicts: dict[str, str] = {}
    for part, limit in PARTS.items():
        if part.__name__ not in chosen.only:
            continue
        secs = min(limit if DEVICE not in ("cpu", "simulated") else 4 * limit, end - time.monotonic())
        if secs < 5:
            verdicts[part.__name__] = "not run: no time was left"
            continue
        options = Options(chosen.repeat, chosen.gigabytes, chosen.results, secs)
        verdicts[part.__name__] = run(part, options, report)
    report.add("## Summary\n\n" + table(["part", ""], verdicts.items()))
    sys.exit(any(verdict not in ("passed", "skipped") for verdict in verdicts.values()))


if __name__ == "__main__":
    main()
