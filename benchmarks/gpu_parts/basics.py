"""What a simulated device answers already, on a real one: the tests, streams, saves, memory, graphs, a lost context."""

from __future__ import annotations

import itertools
import math
import sys
import time
import weakref
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from support import simulated
from support.accelerators import BUSY, Reader
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
from torchhooks.device.readback import MAX_BYTES, Readback
from torchhooks.lifecycle.recovery import is_device_error
from torchhooks.testing import RecordingWriter

from common import table
from gpu_parts import (
    ACCELERATOR,
    CUDA,
    DEVICE,
    ROOT,
    Options,
    Skip,
    blocks,
    fake_device_without_accelerator,
    keep_busy,
    need_accelerator,
    need_cuda,
    printed_by,
    run,
    synchronize,
    time_left,
    waits_of,
)


def tests(options: Options) -> Iterator[str]:
    """Run the tests marked ``cuda`` and ``accelerator``, and with ``--repeat`` again and again."""
    need_accelerator()
    started, outcomes, messages = time.monotonic(), dict[str, Counter[str]](), dict[str, str]()
    simulated_one = ["--simulated"] if DEVICE == simulated.NAME else []
    with TemporaryDirectory() as name:
        for number in range(options.repeat):
            path = Path(name, f"{number}.xml")
            chosen = ["-m", "cuda or accelerator", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={path}"]
            command = ["-m", "pytest", "-v", "--color=no", "--tb=no", *simulated_one, *chosen, "tests"]
            lines = []
            for line in printed_by([sys.executable, *command], codes=(0, 1)):
                lines.append(line)
                if " FAILED" in line or " ERROR" in line:  # at once: the part may be ended before they are summed up
                    yield f"* {line.strip()}"
            if not path.exists():
                raise RuntimeError("pytest wrote no results:\n" + "\n".join(lines[-30:]))
            for test, outcome, message in outcomes_in(path):
                outcomes.setdefault(test, Counter())[outcome] += 1
                messages[test] = message or messages.get(test, "")
            if time_left(options, started) < time.monotonic() - started:
                break
    total = Counter(outcome for counts in outcomes.values() for outcome in counts.elements())
    yield f"{len(outcomes)} tests, {number + 1 if outcomes else 0} times: {dict(total)}."
    failing = {test: counts for test, counts in sorted(outcomes.items()) if counts["failed"]}
    for test, counts in failing.items():
        kind = "FLAKY" if counts["passed"] else "ALWAYS FAILS"
        yield f"* {kind}: {test}: {counts['failed']} of {counts.total()} times: {messages[test]}"
    assert not failing, f"{len(failing)} tests failed"


def outcomes_in(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the tests in a file of JUnit, whether each passed, failed or was skipped, and why it failed."""
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag: child.get("message", "") for child in case}
        failed = kinds.get("failure", kinds.get("error"))
        outcome = "skipped" if "skipped" in kinds else "passed" if failed is None else "failed"
        yield f"{case.get('classname')}.{case.get('name')}", outcome, (failed or "")[:300]


def pinning(options: Options) -> Iterator[str]:
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
    yield f"The device was busy for {begin.elapsed_time(end):.0f} ms."
    yield table(["pinned", "ms, device idle", "ms, device busy"], rows)


def streams(options: Options) -> Iterator[str]:
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
    yield f"100 rounds, every value right, {where}."


def saving(options: Options) -> Iterator[str]:
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
    yield f"{where}:\n\n{table(header, rows)}"


def memory(options: Options) -> Iterator[str]:
    """Fetch large values from a device that lags, and values of a CUDA graph that is replayed."""
    need_accelerator()
    if not hasattr(torch.accelerator, "max_memory_allocated"):
        raise Skip("torch.accelerator tells the peak of the memory since torch 2.9")
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
    yield f"* 300 fetches of 4 MB each: at most {used / 1e6:.1f} MB of device memory in flight."

    batches = alive_batches()
    yield f"* Batches alive at most, with hooks that wait for a value of every run: {batches}."
    assert set(batches.values()) == {1}, "a request keeps the arguments of its run"
    if not CUDA:
        return

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
    yield f"* 2000 replays of a CUDA graph: every value is that of its replay, memory grew by {grown:,} bytes."


def alive_batches() -> dict[str, int]:
    """Return how many batches are in device memory at most while hooks wait for values, by the hook."""
    model = torch.nn.Linear(8, 8).to(DEVICE)
    most: dict[str, int] = {}
    hooks: dict[str, SessionRunHook] = {
        "a NaN check": NanTensorHook("loss"),
        "a curve": SummarySaverHook(1, summary_writer=RecordingWriter(), summary_op={"loss": "loss"}),
        "a log line": LoggingTensorHook(["loss"], every_n_iter=1),
    }
    for name, hook in hooks.items():
        alive: list[weakref.ref[Tensor]] = []
        with MonitoredLoop(lambda batch: model(batch).sum(), model, hooks=[hook]) as loop:
            for _ in range(200):
                keep_busy(BUSY / 10)
                alive.append(weakref.ref(batch := torch.randn(4, 8, device=DEVICE)))
                loop.run(batch)
                del batch
                most[name] = max(most.get(name, 1), sum(ref() is not None for ref in alive))
    return most


def hooks(options: Options) -> Iterator[str]:
    """Run benchmarks/accelerator.py."""
    need_accelerator()
    simulated_one = ["--simulated"] if DEVICE == simulated.NAME else []
    script = ROOT / "benchmarks" / "accelerator.py"
    yield from blocks(printed_by([sys.executable, str(script), "--results", str(options.results), *simulated_one]))


def speed(options: Options) -> Iterator[str]:
    """Run benchmarks/gpu.py."""
    small = [] if CUDA else ["--device", "cpu", "--runs", "20", "--rounds", "1"]
    if not CUDA:
        yield "On a CPU, to try out the script; the figures mean nothing."
    limit = ["--secs", f"{max(options.secs - 20, 5):.0f}"]
    script = ROOT / "benchmarks" / "gpu.py"
    yield from blocks(printed_by([sys.executable, str(script), "--results", str(options.results), *limit, *small]))


def in_place(options: Options) -> Iterator[str]:
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
    yield f"{len(parameters)} tensors, {total:.1f} GB, {where}: all bits are those before the update."
    yield table(["", "s until save() returned", "s until the file was there"], rows)


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


def compiled(options: Options) -> Iterator[str]:
    """Compare what hooks see of eager steps, of a captured graph and of compiled steps."""
    need_cuda("CUDA graphs and mode='reduce-overhead' need a CUDA device")
    runs = 50
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

        yield compare("a CUDA graph", monitored(replay, parts, f"{folder}/graph", runs), expected)

        parts = net()
        forward = torch.compile(parts.model, mode="reduce-overhead")

        def reduced() -> Tensor:
            parts.optimizer.zero_grad()
            loss: Tensor = forward(parts.batch).square().mean()
            loss.backward()
            parts.optimizer.step()
            return loss

        yield compare("reduce-overhead", monitored(reduced, parts, f"{folder}/compiled", runs), expected)


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


def lost(options: Options) -> Iterator[str]:
    """Lose the context of a process, and see whether the loop knows that it cannot recover."""
    assert is_device_error(ExceptionGroup("several", [RuntimeError("CUDA error: device-side assert triggered")]))
    need_cuda("needs a CUDA device, whose context a device-side assert destroys; recognising its text was checked")
    yield f"```text\n{run(['-c', LOST], options.secs).strip()}\n```"


def two_gpus(options: Options) -> Iterator[str]:
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
    yield run(["-c", script], options.secs).strip()
