"""The parts of ``first_hour_on_a_gpu.py``: one function each, which yields its findings as Markdown, piece by piece.

A part runs in a process of its own, and is ended if it takes longer than it may. What it has yielded by then is kept,
so it yields each table as soon as it has it. It raises :class:`Skip` if this machine lacks something that it needs, and
any other error if what torchhooks promises does not hold.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torchhooks.device.accelerator import WAITED_FOR, host

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support import accelerators, simulated
from support.accelerators import BUSY
from support.devices import FakeDevice

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("scripts")
IS_SIMULATED = "--simulated" in sys.argv
DEVICE = accelerators.use(simulated_one=True) if IS_SIMULATED else accelerators.DEVICE
ACCELERATOR = DEVICE != "cpu"
CUDA = DEVICE == "cuda"
WAITED_FOR.discard(DEVICE)


class Skip(Exception):  # noqa: N818 - not an error
    """A part cannot run on this machine."""


class Options(NamedTuple):
    """The arguments that the parts need."""

    repeat: int
    gigabytes: float
    results: Path
    secs: float
    """How long the part may take."""


Part = Callable[[Options], Iterator[str]]


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


def time_left(options: Options, started: float) -> float:
    """Return how many seconds a part that has started at ``started``, by ``time.monotonic()``, still has."""
    return options.secs - (time.monotonic() - started)


@contextmanager
def fake_device_without_accelerator(lag: int) -> Iterator[str]:
    """Have the CPU stand for a device if there is no other, and return how to call it in the report."""
    with nullcontext() if ACCELERATOR else FakeDevice(lag):
        yield f"on {DEVICE}" if ACCELERATOR else f"on a FakeDevice(lag={lag}), because there is no accelerator"


def waits_of(call: Callable[[], object]) -> list[str]:
    """Return what this thread waits for in ``call``, as far as the device tells."""
    synchronize()
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
        return [f"{Path(each.filename).name}:{each.lineno}" for each in caught if "called a sync" in str(each.message)]
    fake: Any = host.copier("cpu")
    waited = fake.waits if fake else 0
    call()
    return ["a wait for the FakeDevice"] * (fake.waits - waited) if fake else []


def printed_by(command: Sequence[str], codes: Collection[int] = (0,)) -> Iterator[str]:
    """Run ``command``, and yield each line that it prints; raise a RuntimeError if it ends with none of ``codes``."""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        last: deque[str] = deque(maxlen=30)
        for line in process.stdout:
            last.append(line)
            yield line.rstrip("\n")
    if process.returncode not in codes:
        raise RuntimeError(f"exit code {process.returncode}:\n{''.join(last)}")


def blocks(lines: Iterable[str]) -> Iterator[str]:
    """Join the ``lines`` between two empty ones."""
    block: list[str] = []
    for line in lines:
        if line:
            block.append(line)
        elif block:
            yield "\n".join(block)
            block = []
    if block:
        yield "\n".join(block)


def run(arguments: Sequence[str], secs: float, *codes: int) -> str:
    """Run Python with ``arguments`` and return what it prints; an AssertionError if it ends with another code."""
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=secs, check=False
    )
    printed = f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert done.returncode in (codes or (0,)), f"exit code {done.returncode}:\n{printed}"
    return done.stdout


def script(name: str, *arguments: object, ranks: int = 0) -> list[str]:
    """Return the arguments of Python to run ``scripts/name.py`` on the device, with ``ranks`` under torchrun."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    return [*launch, str(SCRIPTS / f"{name}.py"), "--device", DEVICE, *map(str, arguments)]


def environment() -> dict[str, str]:
    """Return the environment of a script, which registers the simulated device itself."""
    path = os.pathsep.join(map(str, [ROOT, ROOT / "tests"]))
    return {**os.environ, "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "GLOO_SOCKET_IFNAME": "lo"}
