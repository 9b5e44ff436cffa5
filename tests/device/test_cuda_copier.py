"""CudaCopier on a simulated ``torch.cuda``: which device, stream and memory it uses. It needs no GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchhooks import LoggingTensorHook
from torchhooks.device.cuda import CudaCopier, Slab
from torchhooks.device.host import host
from torchhooks.device.readback import MAX_BYTES, Readback
from torchhooks.testing import sync_audit, trace

ONE = torch.device("cuda", 1)


class SimulatedCuda:
    """What the copier uses of ``torch.cuda``: the current device and stream of each thread, and events.

    Attributes:
        log: what was done, each with the index of the device that was current: ``("query", 1)``.
        blocking: for each event, whether a thread that waits for it sleeps.
        done: whether queries find that the device has completed its work.
        pinned: the sizes of the memory that was pinned.
        streams: the streams that were made current.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, int]] = []
        self.blocking: list[bool] = []
        self.done = True
        self.pinned: list[int] = []
        self.streams: list[Any] = []
        self._current = threading.local()
        patch.setattr(torch.cuda, "device", self.on_device)
        patch.setattr(torch.cuda, "stream", self.on_stream)
        patch.setattr(torch.cuda, "Event", self.new_event)
        patch.setattr(torch.cuda, "Stream", lambda device: ("a stream of its own", device))
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr("torchhooks.device.cuda.pinned", self.allocate)

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
        self.streams.append(stream)
        yield

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.pinned.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

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

    def elapsed_time(self, end: SimulatedEvent) -> float:
        self.cuda.note("elapsed_time")
        return 250.0


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


def test_the_time_between_two_events_is_read_on_their_device(cuda: SimulatedCuda) -> None:
    copier = CudaCopier()
    start, end = copier.event(ONE), copier.event(ONE)
    assert end.secs_since(start) == 0.25
    assert cuda.log[-1] == ("elapsed_time", 1)


def test_a_thread_that_waits_for_an_event_sleeps(cuda: SimulatedCuda) -> None:
    CudaCopier().event(ONE)
    assert cuda.blocking == [True]


# -- memory -----------------------------------------------------------------------------------------------------------


def prepared(nbytes: int) -> CudaCopier:
    copier = CudaCopier()
    copier.prepare(nbytes)
    return copier


def test_memory_is_pinned_once(cuda: SimulatedCuda) -> None:
    copier = prepared(1 << 16)
    for numel in (1, 10, 1000, 10_000, 100_000):
        copier.prepare(1 << 16)
        transfers = [copier.start([torch.full((numel,), value)], "stream") for value in (1.0, 2.0, 3.0)]
        for value, transfer in enumerate(transfers, 1):
            (came,) = transfer.tensors()
            assert came.eq(value).all()
            assert came.numel() == numel
    assert cuda.pinned == [1 << 16]


def test_no_memory_is_pinned_before_cuda_is_initialized(cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    prepared(1 << 16)
    assert cuda.pinned == []


@pytest.fixture
def copier(cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaCopier]:
    """A copier that copies from the CPU as from a GPU."""
    copier = CudaCopier()

    def holds(tensor: torch.Tensor) -> bool:
        return False

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream of the step")
    with host.simulating("cpu", copier, holds), host.simulating("cuda", copier, holds):
        yield copier


def test_values_travel_through_the_memory_and_none_is_overwritten(cuda: SimulatedCuda, copier: CudaCopier) -> None:
    readback, got = Readback(), list[float]()
    for run in range(200):
        cuda.done = run % 7 == 6
        readback.request(torch.full((5000,), float(run)), lambda value: got.append(value[0].item()), max_lag_runs=20)
        readback.end_run()
    readback.drain()
    assert got == [float(run) for run in range(200)]
    assert cuda.pinned == [MAX_BYTES]
    assert set(cuda.streams) == {"the stream of the step"}


def test_an_audit_does_not_need_a_fake_device(copier: CudaCopier) -> None:
    hook = LoggingTensorHook({"loss": lambda loss: loss.item()}, every_n_iter=1)
    with sync_audit("cpu") as syncs:
        trace(hook, losses=[0.5])
    assert [sync[:3] for sync in syncs] == [(hook, "fetch", 1)]


class Remote(torch.Tensor):
    """A tensor that says that it is on a device."""

    is_cpu = False


def test_what_the_memory_has_no_room_for_is_copied_on_a_stream_of_its_own(cuda: SimulatedCuda) -> None:
    copier = prepared(1000)
    value = torch.arange(2000.0).as_subclass(Remote)
    transfer = copier.start([value], "the stream of the step")
    assert cuda.streams == ["the stream of the step"]
    (came,) = transfer.tensors()
    assert cuda.streams[1:] == [("a stream of its own", value.device)]
    assert came.tolist() == value.tolist()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=60))
def test_pieces_of_a_slab_never_overlap(moves: list[tuple[bool, int]]) -> None:
    slab = Slab(torch.zeros(1024, dtype=torch.uint8))
    taken: list[slice] = []
    for takes, number in moves:
        if takes:
            piece = slab.take(number)
            if piece is not None:
                assert number <= piece.stop - piece.start
                assert piece.stop <= 1024
                assert piece.start % 64 == 0
                assert all(piece.stop <= other.start or other.stop <= piece.start for other in taken)
                taken.append(piece)
        elif taken:
            slab.give_back(taken.pop(number % len(taken)))
    for piece in taken:
        slab.give_back(piece)
    assert slab.take(1024) == slice(0, 1024)
