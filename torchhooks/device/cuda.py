"""Copies from CUDA devices that do not block the host, through pinned memory, and events that time a device."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch

_SMALL_NUMEL = 1024  # below this many elements, launching a copy costs more than the copy itself
ALIGNMENT = 64
"""Pieces of memory start at multiples of so many bytes, at which a tensor of any dtype can start."""


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

    # The thread that trains takes pieces. The thread that writes a checkpoint gives those of its Arrival back.

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._taken: list[slice] = []  # in the order of the addresses
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> slice | None:
        """Return where ``nbytes`` bytes of the memory are free, and take them; ``None`` if there is no such place."""
        size, start = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT, 0
        with self._lock:
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


class CudaCopier:
    """The :class:`torchhooks.device.host.Copier` for CUDA. Copies into a slab of pinned memory, which it reuses."""

    def __init__(self) -> None:
        self._slab: Slab | None = None
        self._lock = threading.Lock()

    def prepare(self, nbytes: int) -> None:
        if self._slab is None and torch.cuda.is_initialized():
            with self._lock:
                # Looked at again: another loop may have allocated it while this thread waited for the lock.
                self._slab = self._slab or Slab(self.memory(nbytes))

    def memory(self, nbytes: int) -> torch.Tensor:
        return pinned(nbytes)

    def stream(self, device: torch.device) -> Hashable:
        return torch.cuda.current_stream(device)

    def start(self, tensors: Sequence[torch.Tensor], stream: Any) -> _CudaTransfer:
        assert self._slab is not None
        with torch.cuda.stream(stream):
            return _CudaTransfer(tensors, self._slab)

    def event(self, device: torch.device) -> _CudaEvent:
        return _CudaEvent(device, timed=True)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu")  # waits for the device


class _CudaTransfer:
    """Copies queued on the stream that is current when the transfer is created."""

    def __init__(self, tensors: Sequence[torch.Tensor], slab: Slab) -> None:
        self._slab = slab
        self._pieces: list[slice] = []
        stacks = list(pack(tensors))  # all of them first: after an error, such as a lack of memory, no piece is taken
        self._packed = [(indexes, self._copy(packed)) for indexes, packed in stacks]
        event = _CudaEvent(tensors[0].device)
        self.done, self.wait = event.done, event.wait

    def tensors(self) -> list[torch.Tensor]:
        copies = unpack((indexes, _kept(host)) for indexes, host in self._packed)
        for piece in self._pieces:
            self._slab.give_back(piece)
        return copies

    def _copy(self, packed: torch.Tensor) -> torch.Tensor:
        """Queue a copy of ``packed``. If the slab has no room for it, return it as it is: :func:`_kept` copies it."""
        # More memory is not pinned now: CUDA might wait for the device, and what is pinned is lost to other processes.
        piece = self._slab.take(packed.nbytes)
        if piece is None:
            return packed
        self._pieces.append(piece)
        memory = self._slab.memory[piece.start : piece.start + packed.nbytes]
        return memory.view(packed.dtype).view(packed.shape).copy_(packed, non_blocking=True)


def _kept(packed: torch.Tensor) -> torch.Tensor:
    """Return a copy for callbacks to keep as long as they like. What it is a copy of has been computed."""
    if packed.is_cpu:
        return packed.clone()
    with torch.cuda.stream(torch.cuda.Stream(packed.device)):  # the stream of the step may be far from done
        return packed.to("cpu")  # waits for this copy only


class _CudaEvent:
    """An event on the current stream of ``device``."""

    def __init__(self, device: torch.device, timed: bool = False) -> None:
        self._device = device
        with torch.cuda.device(device):
            # Blocking: a thread that waits sleeps, instead of taking a core from the thread that trains.
            self.event = torch.cuda.Event(enable_timing=timed, blocking=True)
            self.event.record()

    # CUDA creates a context on the current device if there is none, which takes hundreds of megabytes. In a new thread
    # that is device 0, also in a process that uses another one.

    def done(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self.event.query())

    def wait(self) -> None:
        with torch.cuda.device(self._device):
            if not self.event.query():  # so that sync_audit sees only the calls that block
                self.event.synchronize()  # waits for the device

    def secs_since(self, earlier: _CudaEvent) -> float:
        with torch.cuda.device(self._device):
            return float(earlier.event.elapsed_time(self.event)) / 1000
