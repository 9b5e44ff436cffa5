"""Which tensors are on the host, and how the values of the others get there: one copier for each type of device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol

import torch

from torchhooks.device.cuda import CudaCopier


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

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` on the host. Blocks."""


class Host:
    """Where values have to arrive before Python can read them without waiting. There is one, :data:`host`."""

    def __init__(self) -> None:
        self.copiers: Mapping[str, Copier] = {"cuda": CudaCopier()}
        """The copier for each device type that supports copies without blocking."""
        self.holds: Callable[[torch.Tensor], bool] = attrgetter("is_cpu")  # in every run, so without a Python frame
        """Return whether a tensor is on the host."""

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor``, which is on a device. Blocks."""
        copier = self.copiers.get(tensor.device.type)
        return tensor.to("cpu") if copier is None else copier.fetch(tensor)  # waits for the device

    @contextmanager
    def simulating(self, kind: str, copier: Copier, holds: Callable[[torch.Tensor], bool]) -> Iterator[None]:
        """Bring tensors of the device type ``kind`` to the host by ``copier``, except those that the host ``holds``.

        For tests, such as those on a :class:`torchhooks.testing.FakeDevice`.
        """
        before = self.copiers, self.holds
        self.copiers, self.holds = {**self.copiers, kind: copier}, holds
        try:
            yield
        finally:
            self.copiers, self.holds = before


host = Host()
