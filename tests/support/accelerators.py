"""The accelerator of this process: a real one, or the simulated one of ``pytest --simulated``. See ``simulated.py``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from support import simulated


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
