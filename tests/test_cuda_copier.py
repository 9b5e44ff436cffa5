"""CudaCopier on a simulated ``torch.cuda``: which device, stream and memory it uses. It needs no GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from torchhooks.cuda import CudaCopier

ONE = torch.device("cuda", 1)


class SimulatedCuda:
    """What the copier uses of ``torch.cuda``: the current device and stream of each thread, and events.

    Attributes:
        log: what was done, each with the index of the device that was current: ``("query", 1)``.
        blocking: for each event, whether a thread that waits for it sleeps.
        done: whether queries find that the device has completed its work.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, int]] = []
        self.blocking: list[bool] = []
        self.done = True
        self._current = threading.local()
        patch.setattr(torch.cuda, "device", self.on_device)
        patch.setattr(torch.cuda, "stream", self.on_stream)
        patch.setattr(torch.cuda, "Event", self.new_event)

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        before = self.current_device
        self._current.device = device.index
        try:
            yield
        finally:
            self._current.device = before

    @contextmanager
    def on_stream(self, stream: object) -> Iterator[None]:
        yield

    @property
    def current_device(self) -> int:
        """The current device of this thread: 0 in a new one, as in CUDA."""
        return getattr(self._current, "device", 0)

    def new_event(self, enable_timing: bool = False, blocking: bool = False) -> SimulatedEvent:
        self.blocking.append(blocking)
        return SimulatedEvent(self)

    def note(self, what: str) -> None:
        self.log.append((what, self.current_device))


class SimulatedEvent:
    def __init__(self, cuda: SimulatedCuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.cuda.note("record")

    def query(self) -> bool:
        self.cuda.note("query")
        return self.cuda.done

    def synchronize(self) -> None:
        self.cuda.note("synchronize")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    return SimulatedCuda(monkeypatch)


def in_another_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


# -- events -----------------------------------------------------------------------------------------------------------


def test_a_thread_that_waits_stays_on_the_device_of_the_event(cuda: SimulatedCuda) -> None:
    event = CudaCopier().event(ONE)
    cuda.done = False
    in_another_thread(event.done)
    in_another_thread(event.wait)
    assert cuda.log == [("record", 1), ("query", 1), ("query", 1), ("synchronize", 1)]


def test_an_event_that_has_passed_is_not_synchronized(cuda: SimulatedCuda) -> None:
    CudaCopier().event(ONE).wait()
    assert ("synchronize", 1) not in cuda.log


def test_a_thread_that_waits_for_an_event_sleeps(cuda: SimulatedCuda) -> None:
    CudaCopier().event(ONE)
    assert cuda.blocking == [True]
