"""What is on the host, and how values get there from devices and back: one copier for each type of device.

The copier for accelerators copies without blocking the host, through pinned memory, and times the device by events. It
needs streams, events and pinned memory, which ``torch.accelerator``, ``torch.Stream`` and ``torch.Event`` offer for
every accelerator that has them, also for one that a package registers with PyTorch. See :func:`copier_of`.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, Protocol

import torch

_SMALL_NUMEL = 1024  # below this many elements, launching a copy costs more than the copy itself
ALIGNMENT = 64
"""Pieces of memory start at multiples of so many bytes, at which a tensor of any dtype can start."""

WAITED_FOR = {"mps"}
"""Types of accelerators for whose values the host waits, although they may have all that the copies need.

``benchmarks/first_hour_on_a_gpu.py`` has not been run on ``mps`` yet. ``WAITED_FOR.discard("mps")`` before the first
loop of the process lets values travel without waiting there, too.
"""


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


# -- accelerators ------------------------------------------------------------------------------------------------------


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


class Ring:
    """A block of memory from which pieces are taken in turn, each after the last one."""

    # The thread that trains takes pieces. The thread that writes a checkpoint gives the pieces of its Arrival back. A
    # piece that is kept for long leaves no room in front of it: what finds none travels without the ring.

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._taken: deque[Piece] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Piece | None:
        """Take the next ``nbytes`` bytes, or the first ones if the end is near; ``None`` if they are not free."""
        size, end = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT, self.memory.numel()
        with self._lock:
            while self._taken and self._taken[0].is_free():
                self._taken.popleft()
            start = 0
            if self._taken:
                oldest, start = self._taken[0].start, self._taken[-1].stop
                if start <= oldest:  # already around
                    end = oldest
                elif start + size > end:
                    start, end = 0, oldest
            if start + size > end:
                return None
            self._taken.append(Piece(start, start + size))
            return self._taken[-1]


class Piece:
    """A piece of the memory of a :class:`Ring`."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self._is_used = True
        self._event: _Event | None = None

    def give_back(self, after: _Event | None = None) -> None:
        """Let others take the memory, once the device has reached ``after``."""
        # Without a lock, because the garbage collector may call this in a thread that has it.
        self._event, self._is_used = after, False

    def is_free(self) -> bool:
        return not self._is_used and (self._event is None or self._event.done())


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


def _on(stream: Any) -> AbstractContextManager[object]:
    """Make ``stream`` the current one of this thread in a ``with`` block."""
    if stream.device.type == "cuda":
        return torch.cuda.stream(stream)
    # Threads share streams. A ``with`` block keeps the previous stream in the object, so each gets one of its own.
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


class AcceleratorCopier:
    """The :class:`Copier` for accelerators. Copies through pinned memory, which it reuses."""

    def __init__(self) -> None:
        self._ring: Ring | None = None
        self._lock = threading.Lock()
        self._clocks: dict[torch.device, torch.Stream] = {}
        self._late: dict[torch.device, torch.Stream] = {}

    def prepare(self, nbytes: int) -> None:
        if self._ring is None:
            with self._lock:
                # Looked at again: another loop may have allocated it while this thread waited for the lock.
                self._ring = self._ring or Ring(self.memory(nbytes))

    def memory(self, nbytes: int) -> torch.Tensor:
        return pinned(nbytes)

    def stream(self, device: torch.device) -> Hashable:
        return torch.accelerator.current_stream(device)

    def start(self, tensors: Sequence[torch.Tensor], stream: Any) -> _Transfer:
        assert self._ring is not None
        with _on(stream):
            return _Transfer(tensors, self._ring, self.fetch_late)

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
        piece = None if self._ring is None else self._ring.take(tensor.nbytes)
        if self._ring is None or piece is None:
            return tensor.to(device)  # waits for the device
        sent = _view(self._ring, piece, tensor).copy_(tensor).to(device, non_blocking=True)
        piece.give_back(after=_Event(device))
        return sent


def _view(ring: Ring, piece: Piece, like: torch.Tensor) -> torch.Tensor:
    memory = ring.memory[piece.start : piece.start + like.nbytes]
    return memory.view(like.dtype).view(like.shape)


class _Transfer:
    """Copies queued on the stream that is current when the transfer is created."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], ring: Ring, fetch_late: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._ring, self._fetch_late = ring, fetch_late
        self._pieces: list[Piece] = []
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
            self._pieces.pop().give_back()
        return self._copies

    def __del__(self) -> None:
        if self._event is not None:
            for piece in self._pieces:  # never received
                piece.give_back(after=self._event)

    def _copy(self, packed: torch.Tensor) -> torch.Tensor:
        """Queue a copy of ``packed``. If the ring has no room for it, return it as it is: :meth:`_kept` copies it."""
        # More memory is not pinned now: CUDA might wait for the device, and what is pinned is lost to other processes.
        piece = self._ring.take(packed.nbytes)
        if piece is None:
            return packed
        self._pieces.append(piece)
        return _view(self._ring, piece, packed).copy_(packed, non_blocking=True)

    def _kept(self, packed: torch.Tensor) -> torch.Tensor:
        """Return a copy that callbacks may keep. The device has computed ``packed``."""
        return packed.clone() if packed.is_cpu else self._fetch_late(packed)


class _Event:
    """An event on the current stream of ``device``."""

    def __init__(self, device: torch.device, timed: bool = False) -> None:
        self._device = device
        with self._current():
            if device.type == "cuda":
                # Blocking: a thread that waits sleeps, instead of taking a core from the thread that trains.
                self.event: torch.Event = torch.cuda.Event(enable_timing=timed, blocking=True)
                self.event.record()
            else:
                self.event = torch.Event(device, enable_timing=timed)
                self.event.record(torch.accelerator.current_stream(device))

    def _current(self) -> AbstractContextManager[object]:
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
