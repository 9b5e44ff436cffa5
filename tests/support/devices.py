"""A device that the CPU stands for."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from torchhooks.device.accelerator import host, pack, unpack


class FakeDevice:
    """A context manager in which CPU tensors are read back as from a device whose copies take ``lag`` runs.

    It tests, without a GPU, whether a hook copes with values that arrive late:

    >>> from support.devices import FakeDevice
    >>> from torchhooks.testing import trace
    >>> with FakeDevice(lag=2) as device:
    ...     seen = trace(NanTensorHook("loss", fail_on_nan_loss=False), losses=[1, float("nan"), 1, 1, 1])
    loss is NaN at step 2: training stops
    >>> seen.steps, device.waits  # stopped two runs later; the host waited once, when the loop closed
    ([1, 2, 3, 4], 1)

    Work can be queued on several streams: see :meth:`on_stream`. A copy has the values of the moment at which it was
    started, even if the tensor is updated before it completes. What has arrived on the host, such as the values of a
    ``when_ready`` callback, is an ordinary CPU tensor.

    Args:
        lag: the number of runs in which work that starts now is polled before it is done.
        speed: seconds that pass on the device's clock for each second of ``time.monotonic()``.

    Attributes:
        copies: how many tensors were copied.
        batches: how many batches of copies were started.
        streams: the name of the stream on which each batch was copied, see :meth:`on_stream`.
        allocations: the sizes, in bytes, of the memory on the host that was allocated for copies.
        waits: how many times the thread that entered the device waited for work that was not done.
        waits_elsewhere: the same of other threads, such as threads that write checkpoints.
        progress: how far the device is, in runs. Each poll that finds unfinished work advances it by one, because a run
            that finds its oldest work unfinished polls nothing else.
    """

    def __init__(self, lag: int = 1, speed: float = 1.0) -> None:
        self.lag = lag
        self.speed = speed
        self.copies = self.batches = self.waits = self.waits_elsewhere = self.progress = 0
        self._thread = threading.get_ident()
        self.streams: list[Hashable] = []
        self.allocations: list[int] = []
        self._stream = "default"
        self._stream_lag: int | None = None
        self._entered: list[AbstractContextManager[None]] = []

    @contextmanager
    def on_stream(self, name: str, lag: int | None = None) -> Iterator[None]:
        """Queue work on the stream ``name`` in this ``with`` block, like ``torch.cuda.stream``.

        Args:
            name: any name; outside of the block the stream is ``"default"``.
            lag: the lag of events that are recorded on the stream, if it differs from the device's.
        """
        before = self._stream, self._stream_lag
        self._stream, self._stream_lag = name, lag
        try:
            yield
        finally:
            self._stream, self._stream_lag = before

    # The methods of a Copier:

    def prepare(self, nbytes: int) -> None:
        """Do nothing: copies need no memory that is allocated before."""

    def memory(self, nbytes: int) -> torch.Tensor:
        self.allocations.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def stream(self, device: torch.device) -> Hashable:
        return self._stream

    def start(self, tensors: Sequence[torch.Tensor], stream: Hashable) -> _FakeTransfer:
        self.batches += 1
        self.copies += len(tensors)
        self.streams.append(stream)
        return _FakeTransfer(self, self.lag, tensors)

    def event(self, device: torch.device) -> _FakeEvent:
        return _FakeEvent(self, self.lag if self._stream_lag is None else self._stream_lag)

    moment = event

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        self.note_wait()
        return _on_host(tensor.detach().clone())

    def note_wait(self) -> None:
        """Count a wait of the current thread."""
        if threading.get_ident() == self._thread:
            self.waits += 1
        else:
            self.waits_elsewhere += 1

    def __enter__(self) -> FakeDevice:
        self._thread = threading.get_ident()
        simulation = host.simulating("cpu", self, _is_on_fake_host)
        simulation.__enter__()
        self._entered.append(simulation)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.pop().__exit__(*exc_info)

    def __repr__(self) -> str:
        return f"FakeDevice(lag={self.lag}, speed={self.speed})"


class _FakeEvent:
    def __init__(self, device: FakeDevice, lag: int) -> None:
        self._device = device
        self._done_at = device.progress + lag
        self.secs = time.monotonic() * device.speed

    def done(self) -> bool:
        if self._device.progress >= self._done_at:
            return True
        self._device.progress += 1
        return False

    def wait(self) -> None:
        if self._device.progress < self._done_at:
            self._device.note_wait()
            self._device.progress = self._done_at

    def secs_since(self, earlier: _FakeEvent) -> float:
        if self._device.progress < max(self._done_at, earlier._done_at):
            raise RuntimeError("the device has not reached both events")  # like CUDA's error "device not ready"
        return self.secs - earlier.secs


class _FakeTransfer(_FakeEvent):
    def __init__(self, device: FakeDevice, lag: int, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(device, lag)
        self._packed = [(indexes, packed.clone()) for indexes, packed in pack(tensors)]

    def tensors(self) -> list[torch.Tensor]:
        return [_on_host(tensor) for tensor in unpack(self._packed)]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor.is_on_fake_host = True  # type: ignore[attr-defined]
    return tensor


def _is_on_fake_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and hasattr(tensor, "is_on_fake_host")
