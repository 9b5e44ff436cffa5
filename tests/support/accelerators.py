"""The accelerator of this process: a real one, or the simulated one of ``pytest --simulated``. See ``simulated.py``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from support import simulated
from torchhooks import MonitoredLoop, SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues


def _type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


DEVICE = _type()
"""The type of the accelerator, ``"cpu"`` if there is none. The tests marked ``accelerator`` are skipped then."""


def use(*, simulated_one: bool) -> str:
    """Register the simulated accelerator if it is asked for or there is no other, and return the type of device."""
    global DEVICE
    if simulated.compiler() is not None and (simulated_one or DEVICE == "cpu"):
        simulated.register()
        DEVICE = _type()
    return DEVICE


BUSY = 0.004
"""Seconds that are much longer than a run takes on the host, so that the device lags far."""

_CYCLES_PER_SEC = 1.5e9


def keep_busy(secs: float = BUSY) -> None:
    """Queue work on the current stream that takes about ``secs``."""
    if DEVICE == simulated.NAME:
        simulated.sleep(secs)
    elif DEVICE == "cuda":
        torch.cuda._sleep(int(secs * _CYCLES_PER_SEC))  # noqa: SLF001 - torch's only way to keep a device busy
    else:
        busy = torch.ones(1024, 1024, device=DEVICE)
        for _ in range(int(secs * 1000)):
            busy = busy @ busy


def warm_up(secs: float = 1.0) -> None:
    """Keep the device busy until it runs at its full clock rate."""
    end = time.monotonic() + secs
    while time.monotonic() < end and DEVICE != simulated.NAME:
        keep_busy()
        torch.accelerator.synchronize()


@contextmanager
def no_waits() -> Iterator[None]:
    """Fail if this thread waits for the device, as far as the device tells."""
    torch.accelerator.synchronize()
    if DEVICE == simulated.NAME:
        simulated.forget_waits()
        yield
        assert simulated.waits() == []
    elif DEVICE == "cuda":
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    else:
        yield


class Training:
    """A small network, one batch for all steps, and what the step returned, for comparison."""

    def __init__(self, device: str | None = None) -> None:
        device = device or DEVICE
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.batch = torch.randn(32, 8, device=device)
        self.losses: list[torch.Tensor] = []

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())
        return loss

    def run(self, *hooks: SessionRunHook, runs: int = 40) -> MonitoredLoop[torch.Tensor]:
        with MonitoredLoop(self.step, self.model, self.optimizer, hooks=hooks) as loop:
            for _ in loop.until_stop(range(runs)):
                loop.run()
        return loop


class Reader(SessionRunHook):
    """Requests a value in every run, and keeps what arrives, with its step; without ``keep``, only the step."""

    def __init__(self, fetches: Any = "loss", max_lag_runs: int | None = None, keep: bool = True) -> None:
        self.fetches, self.max_lag_runs, self.keep = fetches, max_lag_runs, keep
        self.read: list[tuple[int, Any]] = []

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(self.fetches)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = run_context.session.global_step
        run_context.when_ready(
            run_values.results,
            lambda values: self.read.append((step, values if self.keep else None)),
            max_lag_runs=self.max_lag_runs,
        )

    @property
    def values(self) -> list[Any]:
        return [value.tolist() for _, value in self.read]
