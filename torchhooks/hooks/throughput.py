"""What StepCounterHook reports in addition to steps: tokens, floating-point operations, and memory."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from torchhooks.common.text import shown
from torchhooks.device.host import has_float64

TOKENS_RATE, FLOPS_RATE, MFU = "tokens/sec", "flops/sec", "mfu"
DEVICE_MEMORY, HOST_MEMORY = "memory/device_peak", "memory/host"

PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Operations per second in bfloat16, or in float16 where there is none, without sparsity, from NVIDIA's data sheets."""


def known_peak_flops(name: str) -> float | None:
    """Return the peak of the GPU with this name, as ``torch.cuda.get_device_name()`` returns it."""
    padded = f"{name.replace('-', ' ')} "
    return next((peak for known, peak in PEAK_FLOPS.items() if f"{known} " in padded), None)


class FlopCount:
    """Counts the floating-point operations of the first step, however many runs it takes."""

    # At most one of all instances: modes have to be left in the opposite order, and hooks are called in one order.
    _counting: ClassVar[list[FlopCount]] = []

    def __init__(self) -> None:
        self._total = self._steps_before = 0
        self._mode: Any = None
        self.per_step: float | None = None
        """The operations per step; ``None`` until one is complete."""

    def start(self, step: int) -> None:
        """Begin to count in a run that begins at ``step``."""
        if self.per_step is None and not self._counting:
            self._counting.append(self)
            self._steps_before = step if not self._total else self._steps_before
            # Imported here, because only some need it.
            self._mode = importlib.import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
            self._mode.__enter__()

    def stop(self, step: int) -> None:
        """Count no further in this run, which ended at ``step``."""
        if self._mode is not None:
            self.abandon(keep=True)
            if step > self._steps_before:
                self.per_step = self._total / (step - self._steps_before)

    def abandon(self, *, keep: bool = False) -> None:
        """Leave the mode that counts, also after a run that failed. ``keep`` what it has counted."""
        if self._mode is not None:
            mode, self._mode = self._mode, None
            self._counting.remove(self)
            mode.__exit__(None, None, None)
            self._total += mode.get_total_flops() if keep else 0


class Tokens:
    """Adds up the tokens of each step, where they are, without waiting for a device."""

    def __init__(self) -> None:
        self.total: Any = 0
        """The total, a number or a tensor."""

    def add(self, value: Any) -> None:
        """Add a number, or a tensor with one element."""
        if isinstance(value, torch.Tensor):
            value = value.detach().reshape(())
            if not isinstance(self.total, torch.Tensor):
                # float64, because float32 has no odd numbers beyond 16.7 million; int64 where there is no float64.
                exact = torch.float32 if value.is_floating_point() else torch.int64
                dtype = torch.float64 if has_float64(value.device) else exact
                self.total = torch.full((), self.total, dtype=dtype, device=value.device)
        # Not in-place, because the value of an earlier period may be in flight.
        self.total = self.total + value

    def take(self) -> Any:
        """Return the total, a number or a tensor, and start again from 0."""
        total, self.total = self.total, 0
        return total


def memory(device: torch.device) -> Iterator[tuple[str, float]]:
    """Yield the curves of memory, in bytes: the peak on ``device`` since the last call, and the host's at present."""
    module: Any = torch.get_device_module(device.type) if device.type != "cpu" else None
    if hasattr(module, "max_memory_allocated"):  # not on mps
        yield DEVICE_MEMORY, float(module.max_memory_allocated(device))
        module.reset_peak_memory_stats(device)
    resident = _resident_bytes()
    if resident is not None:
        yield HOST_MEMORY, resident


def described(values: dict[str, float]) -> str:
    """Return the values as one log line."""
    texts = {
        TOKENS_RATE: "tokens/sec: {:g}",
        FLOPS_RATE: "flops/sec: {:.4g}",
        MFU: "mfu: {:.1%}",
        DEVICE_MEMORY: "peak device memory: {:.4g} GiB",
        HOST_MEMORY: "host memory: {:.4g} GiB",
    }
    in_gib = (DEVICE_MEMORY, HOST_MEMORY)
    return ", ".join(
        text.format(values[tag] / 2**30 if tag in in_gib else values[tag])
        for tag, text in texts.items()
        if tag in values
    )


def positive_number(name: str, value: Any, what: str) -> float:
    """Return ``value`` as a float, or raise a ValueError that calls it ``name``."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name}={shown(value)}: must be {what}, more than 0 and at most 1.8e308")
    return number


def _resident_bytes() -> float | None:
    """Return how much memory the process has at present; ``None`` where the system has no /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
