"""Copies from an accelerator that do not block the host, through pinned memory, and events that time the device.

They need streams, events and pinned memory, which ``torch.accelerator``, ``torch.Stream`` and ``torch.Event`` offer for
every accelerator that has them, also for one that a package registers with PyTorch. See :func:`copier_of`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_SMALL_NUMEL = 1024  # below this many elements, launching a copy costs more than the copy itself
ALIGNMENT = 64
"""Pieces of memory start at multiples of so many bytes, at which a tensor of any dtype can start."""

WAITED_FOR = {"mps"}
"""Types of accelerators for whose values the host waits, although they may have all that the copies need.

``benchmarks/first_hour_on_a_gpu.py`` has not been run on ``mps`` yet. ``WAITED_FOR.discard("mps")`` before the first
loop of the process lets values travel without waiting there, too.
"""


def pack(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Stack small tensors of one dtype and shape, so that they share one copy; yield each stack after its indexes."""
    groups: dict[Hashable, list[int]] = {}
    for index, tensor in enumerate(tensors):
        key = (tensor.dtype, tensor.shape) if tensor.numel() <= _SMALL_NUMEL else index
        groups.setdefault(key, []).append(index)
    for indexes in groups.values():
        if len(indexes) == 1:
            yield indexes, tensors[indexes[0]].unsqueeze(0)  # a view: stacking would copy it on the device
        else:
            yield indexes, torch.stack([tensors[index] for index in indexes])


def unpack(packed: Iterable[tuple[list[int], torch.Tensor]]) -> list[torch.Tensor]:
    """Return the tensors that were given to :func:`pack`, in their original order."""
    tensors: dict[int, torch.Tensor] = {}
    for indexes, stack in packed:
        tensors |= zip(indexes, stack.unbind(), strict=True)
    return [tensors[index] for index in range(len(tensors))]


def pinned(nbytes: int) -> torch.Tensor:
    """Allocate pinned memory. CUDA may wait for the device to do so."""
    with torch.inference_mode(False):  # an inference tensor cannot be written to outside of inference mode
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class Slab:
    """A block of memory from which pieces are taken and given back, by any thread."""

    # The thread that trains takes pieces. The thread that writes a checkpoint gives the pieces of its Arrival back.

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._taken: list[slice] = []  # in the order of the addresses
        self._lock = threading.Lock()
        self._leaving: deque[tuple[_Event, list[slice]]] = deque()  # pieces that a copy may still use

    def take(self, nbytes: int) -> slice | None:
        """Return where ``nbytes`` bytes of the memory are free, and take them; ``None`` if there is no such place."""
        size, start = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT, 0
        with self._lock:
            self._free_what_left()
            for place, piece in enumerate([*self._taken, slice(self.memory.numel(), None)]):
                if piece.start - start >= size:
                    found = slice(start, start + size)
                    self._taken.insert(place, found)
                    return found
                start = piece.stop
        return None

    def give_back(self, piece: slice) -> None:
        """Make ``piece`` free for others to take."""
        with self._lock:
            self._taken.remove(piece)

    def give_back_after(self, event: _Event, pieces: list[slice]) -> None:
        """Make ``pieces`` free for others to take once the device has reached ``event``."""
        # Without the lock: the garbage collector may call this in a thread that has it.
        self._leaving.append((event, pieces))

    def _free_what_left(self) -> None:
        for _ in range(len(self._leaving)):
            event, pieces = self._leaving.popleft()
            if event.done():
                for piece in pieces:
                    self._taken.remove(piece)
            else:
                self._leaving.append((event, pieces))


def is_initialized(kind: str) -> bool:
    """Return whether the process uses accelerators of this type already, as far as the type can say."""
    module = torch.get_device_module(kind)
    return bool(getattr(module, "is_initialized", module.is_available)())


def copier_of(kind: str) -> AcceleratorCopier | None:
    """Return the copier for a type of device; ``None`` if it is no accelerator that can copy without blocking."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind or kind in WAITED_FOR or not is_initialized(kind):
        return None
    try:
        device = torch.device(kind, torch.accelerator.current_device_index())
        private_stream(device).wait_stream(torch.accelerator.current_stream(device))
        _Event(device, timed=True).done()
        pinned(1)
    except RuntimeError:  # has no streams, no events or no pinned memory
        return None
    return AcceleratorCopier()


def private_stream(device: torch.device) -> torch.Stream:
    """Return a stream that is not the current one."""
    # Backends hand out streams in turns, so the step may get any of them. Few steps ask for one of high priority.
    stream = torch.Stream(device, priority=-1)
    is_current = stream == torch.accelerator.current_stream(device)
    return torch.Stream(device, priority=-1) if is_current else stream


def _on(stream: Any) -> AbstractContextManager[Any]:
    """Make ``stream`` the current one of this thread in a ``with`` block."""
    if stream.device.type == "cuda":
        return torch.cuda.stream(stream)
    # Threads share streams. A ``with`` block keeps the previous stream in the object, so each gets one of its own.
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


class AcceleratorCopier:
    """The :class:`torchhooks.device.host.Copier` for accelerators. Copies through pinned memory, which it reuses."""

    def __init__(self) -> None:
        self._slab: Slab | None = None
        self._lock = threading.Lock()
        self._clocks: dict[torch.device, torch.Stream] = {}
        self._late: dict[torch.device, torch.Stream] = {}

    def prepare(self, nbytes: int) -> None:
        if self._slab is None:
            with self._lock:
                # Looked at again: another loop may have allocated it while this thread waited for the lock.
                self._slab = self._slab or Slab(self.memory(nbytes))

    def memory(self, nbytes: int) -> torch.Tensor:
        return pinned(nbytes)

    def stream(self, device: torch.device) -> Hashable:
        return torch.accelerator.current_stream(device)

    def start(self, tensors: Sequence[torch.Tensor], stream: Any) -> _Transfer:
        assert self._slab is not None
        with _on(stream):
            return _Transfer(tensors, self._slab, self.fetch_late)

    def event(self, device: torch.device) -> _Event:
        return _Event(device)

    def moment(self, device: torch.device) -> _Event:
        # On one stream for all moments, which waits for the current one: events of streams that run at the same time
        # say nothing about the time between what is queued on them.
        if device not in self._clocks:
            self._clocks[device] = private_stream(device)
        clock = self._clocks[device]
        clock.wait_stream(torch.accelerator.current_stream(device))
        with _on(clock):
            return _Event(device, timed=True)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu")  # waits for the device

    def fetch_late(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor``, which has been computed. Waits for this copy only."""
        device = tensor.device
        if self._late.get(device) in (None, torch.accelerator.current_stream(device)):
            self._late[device] = private_stream(device)
        with _on(self._late[device]):  # the stream of the step may be far from done
            return tensor.to("cpu")  # waits for this copy

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        piece = None if self._slab is None else self._slab.take(tensor.nbytes)
        if self._slab is None or piece is None:
            return tensor.to(device)  # waits for the device
        sent = _view(self._slab, piece, tensor).copy_(tensor).to(device, non_blocking=True)
        self._slab.give_back_after(_Event(device), [piece])
        return sent


def _view(slab: Slab, piece: slice, like: torch.Tensor) -> torch.Tensor:
    memory = slab.memory[piece.start : piece.start + like.nbytes]
    return memory.view(like.dtype).view(like.shape)


class _Transfer:
    """Copies queued on the stream that is current when the transfer is created."""

    def __init__(self, tensors: Sequence[torch.Tensor], slab: Slab, fetch_late: Any) -> None:
        self._slab, self._fetch_late = slab, fetch_late
        self._pieces: list[slice] = []
        self._event: _Event | None = None
        self._copies: list[torch.Tensor] | None = None
        try:
            self._packed = [(indexes, self._copy(packed)) for indexes, packed in pack(tensors)]
        finally:  # also after an error, such as a lack of memory: some copies may have been queued
            event = self._event = _Event(tensors[0].device)
        self.done, self.wait = event.done, event.wait

    def tensors(self) -> list[torch.Tensor]:
        if self._copies is None:
            self._copies = unpack((indexes, self._kept(host)) for indexes, host in self._packed)
        while self._pieces:
            self._slab.give_back(self._pieces[-1])
            self._pieces.pop()
        return self._copies

    def __del__(self) -> None:
        if self._pieces and self._event is not None:  # never received
            self._slab.give_back_after(self._event, self._pieces)

    def _copy(self, packed: torch.Tensor) -> torch.Tensor:
        """Queue a copy of ``packed``. If the slab has no room for it, return it as it is: :meth:`_kept` copies it."""
        # More memory is not pinned now: CUDA might wait for the device, and what is pinned is lost to other processes.
        piece = self._slab.take(packed.nbytes)
        if piece is None:
            return packed
        self._pieces.append(piece)
        return _view(self._slab, piece, packed).copy_(packed, non_blocking=True)

    def _kept(self, packed: torch.Tensor) -> torch.Tensor:
        """Return a copy for callbacks to keep as long as they like. What it is a copy of has been computed."""
        return packed.clone() if packed.is_cpu else self._fetch_late(packed)


class _Event:
    """An event on the current stream of ``device``."""

    def __init__(self, device: torch.device, timed: bool = False) -> None:
        self._device = device
        with self._current():
            if device.type == "cuda":
                # Blocking: a thread that waits sleeps, instead of taking a core from the thread that trains.
                self.event: Any = torch.cuda.Event(enable_timing=timed, blocking=True)
                self.event.record()
            else:
                self.event = torch.Event(device, enable_timing=timed)
                self.event.record(torch.accelerator.current_stream(device))

    def _current(self) -> AbstractContextManager[Any]:
        # CUDA creates a context on the current device if there is none, which takes hundreds of megabytes. In a new
        # thread that is device 0, also in a process that uses another one.
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def done(self) -> bool:
        with self._current():
            return bool(self.event.query())

    def wait(self) -> None:
        with self._current():
            if not self.event.query():  # so that a tool that reports waits sees only the calls that block
                self.event.synchronize()  # waits for the device

    def secs_since(self, earlier: _Event) -> float:
        with self._current():
            return float(earlier.event.elapsed_time(self.event)) / 1000
