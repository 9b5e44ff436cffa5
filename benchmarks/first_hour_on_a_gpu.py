"""Answer, on the first accelerator at hand, what no CPU can answer about torchhooks, and print a report.

    python benchmarks/first_hour_on_a_gpu.py [--simulated] [--only PART ...] [--repeat 20] [--gigabytes 10]
                                             [--results FOLDER]

The parts, in this order:

    tests       the tests marked cuda and accelerator, 20 times; tests that fail only sometimes are named
    pinning     how long pinning memory takes while the device is busy, by size
    streams     two requests on two streams, a hundred rounds
    saving      a save with a NaN guard and async_save during a long step, with the waits counted
    memory      memory under large fetches, and under replays of a CUDA graph
    hooks       benchmarks/accelerator.py
    speed       benchmarks/gpu.py
    in_place    an asynchronous save of 10 GB that is updated in place at once, bits compared
    compiled    CUDA graphs and torch.compile(mode="reduce-overhead") with all hooks, values compared with eager
    lost        a lost context, in a process of its own
    two_gpus    a save from the second GPU creates no context on the first one

On a Mac, the values of ``mps`` travel without waiting here, which torchhooks does not do by default: see
``torchhooks.device.accelerator.WAITED_FOR``. ``--simulated`` tries the script out on the simulated device of the tests.

A part that needs something that this machine lacks says so and is skipped; on a CPU, some parts run on a FakeDevice or
on small sizes. The report is Markdown. It is printed, and written to ``FOLDER/first_hour_on_a_gpu.md``. The exit code
is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import subprocess
import sys
import time
import traceback
import warnings
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchhooks import (
    CheckpointSaverHook,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    Saver,
    Session,
    SessionRunHook,
    StepCounterHook,
    SummarySaverHook,
    list_checkpoints,
    summary,
)
from torchhooks.device.accelerator import WAITED_FOR, host
from torchhooks.device.readback import MAX_BYTES, Readback
from torchhooks.lifecycle.recovery import is_device_error
from torchhooks.testing import RecordingWriter

from common import RESULTS, describe, machine, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import accelerators, simulated
from support.accelerators import BUSY, Reader
from support.devices import FakeDevice

ROOT = Path(__file__).parents[1]
CUDA = torch.cuda.is_available()
DEVICE = accelerators.use(simulated_one=True) if "--simulated" in sys.argv else accelerators.DEVICE
ACCELERATOR = DEVICE != "cpu"
WAITED_FOR.discard(DEVICE)


class Skip(Exception):  # noqa: N818 - not an error
    """A part cannot run on this machine."""


class Options(NamedTuple):
    """The arguments that the parts need."""

    repeat: int
    gigabytes: float
    results: Path


def need_cuda(why: str = "needs a CUDA device") -> None:
    """Skip the part without a CUDA device."""
    if not CUDA:
        raise Skip(why)


def need_accelerator() -> None:
    """Skip the part without an accelerator."""
    if not ACCELERATOR:
        raise Skip("needs an accelerator")


def keep_busy(secs: float = BUSY) -> None:
    """Queue work that takes the device about ``secs``; nothing without a device."""
    if ACCELERATOR:
        accelerators.keep_busy(secs)


def synchronize() -> None:
    """Wait until the device is idle."""
    if ACCELERATOR:
        torch.accelerator.synchronize()


@contextmanager
def fake_device_without_accelerator(lag: int) -> Iterator[str]:
    """Have the CPU stand for a device if there is no other, and return how to call it in the report."""
    with nullcontext() if ACCELERATOR else FakeDevice(lag):
        yield f"on {DEVICE}" if ACCELERATOR else f"on a FakeDevice(lag={lag}), because there is no accelerator"


def waits_of(call: Callable[[], object]) -> list[str]:
    """Return what this thread waits for in ``call``, as far as the device tells."""
    if DEVICE == simulated.NAME:
        simulated.forget_waits()
        call()
        return simulated.waits()
    if CUDA:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return [str(each.message) for each in caught if "called a synchronizing" in str(each.message)]
    fake: Any = host.copier("cpu")
    waited = fake.waits if fake else 0
    call()
    return ["a wait for the FakeDevice"] * (fake.waits - waited) if fake else []


# -- the parts --------------------------------------------------------------------------------------------------------


def tests(options: Options) -> str:
    """Run the tests marked ``cuda`` and ``accelerator`` again and again."""
    need_accelerator()
    outcomes: dict[str, Counter[str]] = {}
    texts: dict[str, str] = {}
    with TemporaryDirectory() as name:
        for number in range(options.repeat):
            path = Path(name, f"{number}.xml")
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                *(["--simulated"] if DEVICE == simulated.NAME else []),
                "-m",
                "cuda or accelerator",
                "-n",
                "0",
                "-p",
                "no:cacheprovider",
                f"--junitxml={path}",
            ]
            done = subprocess.run([*command, "tests"], cwd=ROOT, capture_output=True, text=True, check=False)
            if not path.exists():
                raise RuntimeError(f"pytest wrote no results:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            for case in ElementTree.parse(path).iter("testcase"):
                test = f"{case.get('classname')}.{case.get('name')}"
                problem = next((child for child in case if child.tag in ("failure", "error")), None)
                skipped = any(child.tag == "skipped" for child in case)
                outcome = "failed" if problem is not None else "skipped" if skipped else "passed"
                outcomes.setdefault(test, Counter())[outcome] += 1
                if problem is not None:
                    texts[test] = problem.get("message", "")[:300]
    failing = {test: counts for test, counts in outcomes.items() if counts["failed"]}
    lines = [f"{len(outcomes)} tests, {options.repeat} times; {len(failing)} failed at least once."]
    for test, counts in sorted(failing.items()):
        kind = "FLAKY" if counts["passed"] else "ALWAYS FAILS"
        lines.append(f"* {kind}: {test}: {counts['failed']} of {counts.total()} times: {texts[test]}")
    report = "\n".join(lines)
    if failing:
        raise AssertionError(report)
    return report


def pinning(options: Options) -> str:
    """Measure how long pinning takes, on an idle and on a busy device."""
    need_accelerator()
    rows: list[tuple[str, float, float]] = []
    kept = [torch.empty(1, pin_memory=True)]  # torch would hand out again what is freed
    for exponent in range(12, 31, 2):
        secs = []
        for busy in (0, 20 * BUSY):
            synchronize()
            if busy:
                keep_busy(busy)
            started = time.perf_counter()
            kept.append(torch.empty(1 << exponent, dtype=torch.uint8, pin_memory=True))
            secs.append(time.perf_counter() - started)
        rows.append((f"{1 << exponent:,} bytes", secs[0] * 1e3, secs[1] * 1e3))
    begin, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    begin.record()
    keep_busy(20 * BUSY)
    end.record()
    end.synchronize()
    text = f"The device was busy for {begin.elapsed_time(end):.0f} ms.\n\n"
    return text + table(["pinned", "ms, device idle", "ms, device busy"], rows)


def streams(options: Options) -> str:
    """Request values on two streams, and compare each with what was computed there."""
    wrong = 0
    with fake_device_without_accelerator(lag=3) as where:
        side: Any = torch.Stream(device=DEVICE) if ACCELERATOR else nullcontext()
        for number in range(100):
            readback, got = Readback(), list[Tensor]()
            readback.request(torch.full((1000,), float(number), device=DEVICE), got.append)
            with side:
                keep_busy()
                readback.request(torch.full((1000,), -float(number), device=DEVICE), got.append)
            for _ in range(3):
                readback.end_run()
            readback.close()
            wrong += not (bool(got[0].eq(number).all()) and bool(got[1].eq(-number).all()))
    assert wrong == 0, f"{wrong} of 100 rounds had a wrong value, {where}"
    return f"100 rounds, every value right, {where}."


def saving(options: Options) -> str:
    """Save with a NaN guard while the device is busy, and count what the host waits for."""
    busy, rows = 40 * BUSY, []
    for async_save in (True, False):
        weight, saver = torch.nn.Linear(1000, 1000).to(DEVICE), Saver(async_save=async_save)
        with TemporaryDirectory() as folder, fake_device_without_accelerator(lag=1000) as where:
            hooks = [
                NanTensorHook("loss"),
                Reader(),
                CheckpointSaverHook(folder, save_steps=5, saver=saver),
            ]
            with MonitoredLoop(
                lambda: torch.ones((), device=DEVICE), weight, hooks=hooks, checkpoint_dir=folder
            ) as loop:
                for _ in range(9):
                    loop.run()
                saver.wait()
                synchronize()
                keep_busy(busy)
                started = time.perf_counter()
                waits = waits_of(loop.run)
                secs = time.perf_counter() - started
                began = time.perf_counter()
                synchronize()
                rest = time.perf_counter() - began
            saver.close()
            steps = [checkpoint.step for checkpoint in list_checkpoints(folder)]
        assert steps == [0, 5, 10], f"checkpoints of steps {steps}"
        if async_save:
            assert not waits, f"an asynchronous save waited, {where}: {waits}"
        rows.append(("asynchronous" if async_save else "synchronous", secs * 1e3, rest * 1e3, float(len(waits))))
    header = [
        "a save while the device is busy",
        "ms for the run that saves",
        "ms that the device took after it",
        "waits",
    ]
    return f"{where}:\n\n{table(header, rows)}"


def memory(options: Options) -> str:
    """Fetch large values from a device that lags, and values of a CUDA graph that is replayed."""
    need_accelerator()
    if not hasattr(torch.get_device_module(DEVICE), "max_memory_allocated"):
        raise Skip(f"torch does not tell the peak of the memory of {DEVICE}")
    lines = []
    reader = Reader(keep=False)

    def step() -> Tensor:
        keep_busy()
        return torch.ones(1 << 20, device=DEVICE)

    with MonitoredLoop(step, hooks=[reader]) as loop:
        loop.run()
        synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(300):
            loop.run()
        used = torch.accelerator.max_memory_allocated() - before
    assert len(reader.read) == 301, f"{len(reader.read)} of 301 values arrived"
    assert used <= MAX_BYTES + (16 << 20), f"{used:,} bytes in flight, with MAX_BYTES={MAX_BYTES:,}"
    lines.append(f"* 300 fetches of 4 MB each: at most {used / 1e6:.1f} MB of device memory in flight.")

    if not CUDA:
        return "\n".join(lines)

    static, graph = torch.zeros(1 << 18, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.add_(1)
    static.zero_()

    def replay() -> Tensor:
        graph.replay()
        return static

    reader = Reader(lambda loss: loss[:3])
    with MonitoredLoop(replay, hooks=[reader, NanTensorHook("loss")]) as loop:
        for _ in range(20):
            loop.run()
        synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(2000):
            loop.run()
        synchronize()
        grown = torch.cuda.memory_allocated() - before
    wrong = [number for number, value in reader.read if not bool(value.eq(number).all())]
    assert not wrong, f"values of other replays in runs {wrong[:10]}"
    assert grown <= 8 << 20, f"{grown:,} bytes more after 2000 replays"
    lines.append(f"* 2000 replays of a CUDA graph: every value is that of its replay, memory grew by {grown:,} bytes.")
    return "\n".join(lines)


def hooks(options: Options) -> str:
    """Run benchmarks/accelerator.py."""
    need_accelerator()
    command = [sys.executable, str(ROOT / "benchmarks" / "accelerator.py"), "--results", str(options.results)]
    command += ["--simulated"] if DEVICE == simulated.NAME else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return done.stdout


def speed(options: Options) -> str:
    """Run benchmarks/gpu.py."""
    small = [] if CUDA else ["--device", "cpu", "--runs", "20", "--rounds", "1"]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--results", str(options.results), *small]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return ("" if CUDA else "On a CPU, to try out the script; the figures mean nothing.\n\n") + done.stdout


def in_place(options: Options) -> str:
    """Save a large state asynchronously, update it in place at once, and compare the bits of the checkpoint."""
    gigabytes = options.gigabytes if DEVICE not in ("cpu", simulated.NAME) else min(options.gigabytes, 0.1)
    sizes = [1 << 28, 100_000_000, 1 << 20, 12_345, 1]  # elements: larger than a block of memory, and smaller
    parameters: list[Tensor] = []
    for size in itertools.cycle(sizes if gigabytes > 0.1 else sizes[2:]):
        if sum(parameter.nbytes for parameter in parameters) >= gigabytes * 1e9:
            break
        parameters.append(torch.randn(size, device=DEVICE))
    expected = [parameter.to("cpu", copy=True) for parameter in parameters]
    session, saver = Session(torch.nn.ParameterList(parameters)), Saver(max_to_keep=1, async_save=True)
    rows = []
    with TemporaryDirectory(dir=options.results) as folder, torch.no_grad():
        for number in (1, 2):
            for parameter, value in zip(parameters, expected, strict=True):
                parameter.copy_(value)
            synchronize()
            keep_busy(20 * BUSY)
            started = time.perf_counter()
            path = saver.save(session, Path(folder, "model.ckpt"), number)
            secs = time.perf_counter() - started
            for parameter in parameters:
                parameter.fill_(math.nan)
            saver.wait()
            rows.append((f"save {number}", secs, time.perf_counter() - started))
        saved = torch.load(f"{path}/state.pt", weights_only=True, mmap=True)["model"].values()
        wrong = [
            place for place, (one, other) in enumerate(zip(saved, expected, strict=True)) if not torch.equal(one, other)
        ]
        assert not wrong, f"tensors {wrong} differ from what was saved"
        del saved
        saver.close()
    total = sum(value.nbytes for value in expected) / 1e9
    where = f"on {DEVICE}"
    text = f"{len(parameters)} tensors, {total:.1f} GB, {where}: all bits are those before the update.\n\n"
    return text + table(["", "s until save() returned", "s until the file was there"], rows)


class Net(NamedTuple):
    """A model with its optimizer and a fixed batch, the same for each mode."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batch: Tensor

    def step(self) -> Tensor:
        """Make one training step."""
        self.optimizer.zero_grad(set_to_none=False)
        loss: Tensor = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


def net() -> Net:
    """Return a new network, always with the same values."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(DEVICE)
    return Net(model, torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(16, 32, device=DEVICE))


def monitored(step: Callable[[], Any], parts: Net, folder: str, runs: int) -> dict[str, list[Any]]:
    """Run ``step`` with all hooks, and return what they saw."""
    writer, reader = RecordingWriter(), Reader(["loss", "0.weight"])
    hooks: list[SessionRunHook] = [
        StepCounterHook(10, summary_writer=RecordingWriter()),
        SummarySaverHook(
            1, summary_writer=writer, summary_op={"loss": "loss", "h": summary.histogram("h", "0.weight")}
        ),
        LoggingTensorHook(["loss"], every_n_iter=10),
        NanTensorHook(["loss", "0.weight", "0.weight.grad"], also_inf=True),
        CheckpointSaverHook(folder, save_steps=10, saver=Saver(async_save=True)),
        reader,
    ]
    with MonitoredLoop(step, parts.model, parts.optimizer, hooks=hooks, checkpoint_dir=folder) as loop:
        for _ in loop.until_stop(range(runs)):
            loop.run()
    losses = [loss for _, (loss, _) in reader.read]
    return {"losses": losses, "weights": [weight for _, (_, weight) in reader.read], "points": writer.scalars["loss"]}


def compiled(options: Options) -> str:
    """Compare what hooks see of eager steps, of a captured graph and of compiled steps."""
    need_cuda("CUDA graphs and mode='reduce-overhead' need a CUDA device")
    runs, lines = 50, []
    with TemporaryDirectory() as folder:
        eager = net()
        expected = monitored(eager.step, eager, f"{folder}/eager", runs)

        parts = net()
        start = [parameter.detach().clone() for parameter in parts.model.parameters()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                parts.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = parts.step()
        with torch.no_grad():
            for parameter, value in zip(parts.model.parameters(), start, strict=True):
                parameter.copy_(value)

        def replay() -> Tensor:
            graph.replay()
            return static

        lines.append(compare("a CUDA graph", monitored(replay, parts, f"{folder}/graph", runs), expected))

        parts = net()
        forward = torch.compile(parts.model, mode="reduce-overhead")

        def reduced() -> Tensor:
            parts.optimizer.zero_grad()
            loss: Tensor = forward(parts.batch).square().mean()
            loss.backward()
            parts.optimizer.step()
            return loss

        lines.append(compare("reduce-overhead", monitored(reduced, parts, f"{folder}/compiled", runs), expected))
    return "\n".join(lines)


def compare(name: str, seen: dict[str, list[Any]], expected: dict[str, list[Any]]) -> str:
    """Return by how much what hooks saw differs from the eager run; an error if it is more than rounding."""
    assert len(seen["points"]) == len(expected["points"]), f"{name}: {len(seen['points'])} points"
    errors = {
        kind: max(float((one - other).abs().max()) for one, other in zip(seen[kind], expected[kind], strict=True))
        for kind in ("losses", "weights")
    }
    assert max(errors.values()) <= 1e-4, f"{name} differs from eager: {errors}"
    return f"* {name}: largest difference from eager: losses {errors['losses']:.2g}, weights {errors['weights']:.2g}."


LOST = """
import sys, torch
from torchhooks import MonitoredLoop
from torchhooks.lifecycle.recovery import is_device_error

def step():
    index = torch.tensor([5], device="cuda")
    return torch.ones(2, device="cuda")[index].sum()

calls = []
def recovering():
    calls.append(1)
    step()
    torch.cuda.synchronize()

try:
    with MonitoredLoop(recovering, recoverable_errors=[RuntimeError]) as loop:
        loop.run()
except BaseException as error:
    print(type(error).__mro__[:3], getattr(error, "error_code", "no error_code"))
    print(str(error).splitlines()[0])
    print("notes:", getattr(error, "__notes__", []))
    print("an error of the device:", is_device_error(error), "calls:", len(calls))
    sys.exit(0 if is_device_error(error) and len(calls) == 1 else 3)
print("no error was raised")
sys.exit(4)
"""


def lost(options: Options) -> str:
    """Lose the context of a process, and see whether the loop knows that it cannot recover."""
    assert is_device_error(ExceptionGroup("several", [RuntimeError("CUDA error: device-side assert triggered")]))
    need_cuda("needs a CUDA device, whose context a device-side assert destroys; recognising its text was checked")
    done = subprocess.run(
        [sys.executable, "-c", LOST], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout}\n{done.stderr[-2000:]}"
    return f"```text\n{done.stdout.strip()}\n```"


def two_gpus(options: Options) -> str:
    """Save from the second GPU, and look at the memory of the first one."""
    if not CUDA or torch.cuda.device_count() < 2:
        raise Skip(f"needs two CUDA devices, there are {torch.cuda.device_count() if CUDA else 0}")
    script = """
import sys, tempfile, torch, pathlib
import torch.cuda
from torchhooks import Saver, Session
torch.cuda.set_device(1)
weight = torch.nn.Linear(1000, 1000, device="cuda:1")
saver = Saver(async_save=True)
with tempfile.TemporaryDirectory() as folder:
    torch.cuda._sleep(200_000_000)
    saver.save(Session(weight), pathlib.Path(folder, "model.ckpt"), 1)
    saver.close()
print("context on GPU 0:", torch._C._cuda_hasPrimaryContext(0))
sys.exit(1 if torch._C._cuda_hasPrimaryContext(0) else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout}\n{done.stderr[-2000:]}"
    return done.stdout.strip()


PARTS: list[Callable[[Options], str]] = [
    tests,
    pinning,
    streams,
    saving,
    memory,
    hooks,
    speed,
    in_place,
    compiled,
    lost,
    two_gpus,
]


# -- the report -------------------------------------------------------------------------------------------------------


def run(part: Callable[[Options], str], options: Options) -> tuple[str, str]:
    """Run a part, and return whether it passed, failed or was skipped, and its section of the report."""
    started = time.perf_counter()
    try:
        verdict, text = "passed", part(options)
    except Skip as skip:
        verdict, text = "skipped", f"{skip}."
    except Exception as error:
        verdict, text = "FAILED", f"```text\n{''.join(traceback.format_exception(error))[-6000:]}\n```"
    secs = time.perf_counter() - started
    return verdict, f"## {part.__name__}: {verdict}\n\n{part.__doc__} ({secs:.1f} s)\n\n{text}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.__name__ for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help="the parts to run")
    parser.add_argument("--simulated", action="store_true", help="run on the simulated device of the tests")
    parser.add_argument("--repeat", type=int, default=20, help="how often to run the tests (default: %(default)s)")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="size of the large state (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the report (default: %(default)s)")
    chosen = parser.parse_args()
    chosen.results.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    logging.getLogger("torchhooks").addHandler(logging.NullHandler())  # the report is the only output
    logging.getLogger("torchhooks").propagate = False
    options = Options(chosen.repeat, chosen.gigabytes, chosen.results)
    sections = [f"# First hour on {DEVICE}\n\nMachine: {describe(machine())}.\n"]
    print(sections[0], flush=True)
    verdicts: dict[str, str] = {}
    for part in PARTS:
        if part.__name__ in chosen.only:
            verdicts[part.__name__], section = run(part, options)
            sections.append(section)
            print(section, flush=True)
    sections.append("## Summary\n\n" + table(["part", ""], verdicts.items()) + "\n")
    print(sections[-1])
    (chosen.results / "first_hour_on_a_gpu.md").write_text("\n".join(sections), encoding="utf-8")
    sys.exit("FAILED" in verdicts.values())


if __name__ == "__main__":
    main()
