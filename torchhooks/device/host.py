"""Which tensors are on the host, and how values get there from devices and back: one copier for each type of device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol

import torch

from torchhooks.device.accelerator import copier_of


class Pending(Protocol):
    """Work that a device may not have completed yet."""

    def done(self) -> bool:
        """Return whether the device has completed it. Never blocks."""

    def wait(self) -> None:
        """Block until the device has completed it."""


class Transfer(Pending, Protocol):
    """Copies in flight from a device to the host."""

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return the copies, in the order of the originals, for the caller to keep. Called once, when they are done."""


class DeviceEvent(Pending, Protocol):
    """A point in a device's stream, done when the device has completed what was queued before it."""

    def secs_since(self, earlier: Any) -> float:
        """Return the device time from ``earlier`` to this event, in seconds. Called when both are done."""


class Copier(Protocol):
    """What a type of device has to offer for copies that do not block the host."""

    def prepare(self, nbytes: int) -> None:
        """Allocate memory for ``nbytes`` bytes of copies, unless there is some. Called before the device is busy."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """Allocate ``nbytes`` bytes on the host, into which copies from the device do not block. May block itself."""

    def stream(self, device: torch.device) -> Hashable:
        """Return the stream on which work for ``device`` is queued at present."""

    def start(self, tensors: Sequence[torch.Tensor], stream: Any) -> Transfer:
        """Queue copies of ``tensors``, all of one device, on ``stream``."""

    def event(self, device: torch.device) -> DeviceEvent:
        """Record an event on the current stream of ``device``."""

    def moment(self, device: torch.device) -> DeviceEvent:
        """Record an event that comes after what is on the current stream of ``device``, and all earlier moments."""

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` on the host. Blocks."""

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy of ``tensor``, which is on the host, on ``device``. Blocks only if there is no memory."""


class Host:
    """Where values have to arrive before Python can read them without waiting. There is one, :data:`host`."""

    def __init__(self) -> None:
        self._copiers: dict[str, Copier | None] = {"cpu": None, "meta": None}
        self.holds: Callable[[torch.Tensor], bool] = attrgetter("is_cpu")  # in every run, so without a Python frame
        """Return whether a tensor is on the host."""

    def copier(self, kind: str) -> Copier | None:
        """Return the copier for a type of device; ``None`` if it does not support copies without blocking."""
        try:
            return self._copiers[kind]
        except KeyError:  # also if the type was registered with torch just now
            found = copier_of(kind)
            if found is not None:
                self._copiers[kind] = found
            return found

    def prepare(self, nbytes: int) -> None:
        """Allocate memory for ``nbytes`` bytes of copies if an accelerator is in use. Called before it is busy."""
        accelerator = torch.accelerator.current_accelerator()
        copier = None if accelerator is None else self.copier(accelerator.type)
        if copier is not None:
            copier.prepare(nbytes)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor``, which is on a device. Blocks."""
        copier = self.copier(tensor.device.type)
        return tensor.to("cpu") if copier is None else copier.fetch(tensor)  # waits for the device

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy of ``tensor``, which is on the host, on ``device``. Blocks only without a copier."""
        if not tensor.dim():
            return torch.full((), tensor.item(), dtype=tensor.dtype, device=device)
        copier = self.copier(device.type)
        return tensor.to(device) if copier is None else copier.send(tensor, device)  # waits for the device

    @contextmanager
    def simulating(self, kind: str, copier: Copier, holds: Callable[[torch.Tensor], bool]) -> Iterator[None]:
        """Bring tensors of the device type ``kind`` to the host by ``copier``, except what the host ``holds``.

        For tests, in which the CPU stands for a device.
        """
        before = self._copiers, self.holds
        self._copiers, self.holds = {**self._copiers, kind: copier}, holds
        try:
            yield
        finally:
            self._copiers, self.holds = before


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Return whether ``device`` computes in float64."""
    if device.type == "xpu":  # allocates what it cannot compute
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    try:
        torch.empty((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):  # of mps and others
        return False
    return True


host = Host()
