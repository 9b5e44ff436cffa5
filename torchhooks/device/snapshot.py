"""Copies of a state, from which a background thread writes a checkpoint while training continues.

A :class:`Snapshot` copies tensors into a :class:`SnapshotMemory`. From a device, the copies are queued on the stream of
the step, which so changes the tensors only after them. That needs pinned memory, which takes two thirds of a second to
allocate for each GB. So :meth:`SnapshotMemory.prepare` has a thread allocate it before a snapshot needs it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from torchhooks.common.memory import bytes_of
from torchhooks.device.accelerator import ALIGNMENT, DeviceEvent, host

Size = tuple[str, int]
"""The type of the device that a storage is on, and how many bytes it has."""

Block = tuple[str, torch.Tensor]
"""Memory on the host, after the type of the device from which a snapshot copies into it."""

Place = tuple[torch.device, int, int]
"""Where a storage is: its device, its address and how many bytes it has."""

# Bytes. A block has several tensors, because torch rounds pinned memory up to a power of two. It takes 40 ms to pin:
# meanwhile, a driver may keep the thread that trains from queueing work.
_BLOCK = 1 << 26
_AT_ONCE = 1 << 24  # bytes; so many are pinned in about 10 ms, which a save may take
_PIECE = 1 << 22  # bytes


def place_of(tensor: torch.Tensor) -> Place:
    """Return where the storage of ``tensor`` is."""
    storage = tensor.untyped_storage()
    return storage.device, storage.data_ptr(), storage.nbytes()


class SnapshotMemory:
    """The memory on the host for one snapshot after the other. Allocating it takes longer than copying into it.

    Only the training thread calls the methods. A snapshot takes the memory, and gives it back when all copies are
    queued. After an error it is not given back, because copies into it may still be in flight.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._pinning: _Pinning | None = None

    def prepare(self, sizes: Collection[Size]) -> bool:
        """Return whether there is memory for storages of these ``sizes``. If not, a thread begins to allocate it."""
        if self._pinning is not None:
            if not self._pinning.is_done:
                return False
            if self._pinning.error is not None:
                return True  # take() meets the same error, and raises it
            self._take_over()
        _, missing = arrange(sizes, self._blocks)
        pinned = [(kind, nbytes) for kind, nbytes in missing if host.copier(kind) is not None]
        if sum(nbytes for _, nbytes in pinned) <= _AT_ONCE:
            return True
        try:
            self._pinning = _Pinning(pinned)
        except RuntimeError:  # no more threads can be started: take() allocates it
            return True
        return False

    def take(self, sizes: Collection[Size]) -> tuple[list[Block], list[torch.UntypedStorage]]:
        """Hand over the blocks, and memory in them for each of ``sizes``, after allocating what is missing."""
        self._take_over()
        blocks, self._blocks = self._blocks, []
        places, missing = arrange(sizes, blocks)
        used = {number for number, _ in places}
        room = sum(block.nbytes for number, (_, block) in enumerate(blocks) if number in used)
        if room + sum(nbytes for _, nbytes in missing) > 5 * sum(map(_rounded, sizes)) // 4 + _AT_ONCE:
            blocks.clear()  # much more than is needed: the state has become smaller
            places, missing = arrange(sizes, blocks)
        # What is not used is freed before more is allocated. The places keep their numbers.
        kept: list[Block | None] = [block if number in used else None for number, block in enumerate(blocks)]
        blocks.clear()
        kept += [(kind, _allocated(kind, nbytes)) for kind, nbytes in missing]
        # Slices of a storage are storages on the same memory, so each copy is written to the file on its own.
        storages = [None if block is None else block[1].untyped_storage() for block in kept]
        memory = []
        for (number, offset), (_, nbytes) in zip(places, sizes, strict=True):
            storage = storages[number]
            assert storage is not None  # it is used
            memory.append(storage[offset : offset + nbytes])
        return [block for block in kept if block is not None], memory

    def give_back(self, blocks: list[Block]) -> None:
        """Keep what :meth:`take` handed over for the next snapshot, which has to wait until nothing reads it."""
        self._blocks = blocks

    def release(self) -> None:
        """Free the memory, and wait for the block that a thread may be allocating."""
        if self._pinning is not None:
            self._pinning.cancel()
            self._take_over()
        self._blocks = []

    def _take_over(self) -> None:
        """Wait for the thread, and take over what it has allocated."""
        if self._pinning is not None:
            self._pinning.wait()
            pinning, self._pinning = self._pinning, None
            self._blocks += pinning.blocks


class _Pinning:
    """A thread that allocates blocks of pinned memory, one after the other, while training continues.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, sizes: list[Size]) -> None:
        self.blocks: list[Block] = []
        self.error: Exception | None = None
        self._sizes, self._is_cancelled = sizes, False
        self._process = os.getpid()  # a forked process has no such thread
        # Waited for instead of the thread: until Python 3.13, a Ctrl-C in Thread.join() breaks the thread.
        self._done = threading.Event()
        # Not a daemon: a process must not end in the middle of a call of the driver.
        threading.Thread(target=self._work, name="torchhooks pinning").start()

    @property
    def is_done(self) -> bool:
        return self._done.is_set() or self._process != os.getpid()

    def wait(self) -> None:
        """Wait until the thread is done."""
        if not self.is_done:
            self._done.wait()

    def cancel(self) -> None:
        """Let the thread end after the block that it is allocating."""
        self._is_cancelled = True

    def _work(self) -> None:
        try:
            for kind, nbytes in self._sizes:
                if self._is_cancelled:
                    return
                self.blocks.append((kind, _allocated(kind, nbytes)))
        except Exception as error:
            self.error = error
        finally:
            self._done.set()


def arrange(sizes: Collection[Size], blocks: Sequence[Block]) -> tuple[list[tuple[int, int]], list[Size]]:
    """Return the number of a block and an offset in it for each of ``sizes``, and the blocks to add to ``blocks``.

    The largest storage comes first, and each goes into the first block that has room. So the order of ``sizes`` does
    not matter, and blocks that were added for some sizes are enough for the same sizes again, and for a part of them.
    """
    rounded = [*map(_rounded, sizes)]
    kinds = [kind for kind, _ in sizes]
    used = [0] * len(blocks)
    open_blocks: dict[str, list[tuple[int, int]]] = {}  # by the type of device: their numbers, and their sizes
    for number, (kind, block) in enumerate(blocks):
        open_blocks.setdefault(kind, []).append((number, block.nbytes))
    places = [(0, 0)] * len(rounded)
    kinds_added: list[str] = []
    growing: dict[str, int] = {}
    for index in sorted(range(len(rounded)), key=rounded.__getitem__, reverse=True):
        kind, nbytes = kinds[index], rounded[index]
        number = next((number for number, room in open_blocks.get(kind, ()) if used[number] + nbytes <= room), -1)
        if number < 0:
            number = growing.get(kind, -1)
            if number < 0 or used[number] + nbytes > _BLOCK:
                number = growing[kind] = len(used)
                used.append(0)
                kinds_added.append(kind)
        places[index] = number, used[number]
        used[number] += nbytes
    return places, list(zip(kinds_added, used[len(blocks) :], strict=True))


def _rounded(size: Size) -> int:
    # At least one: two storages at one address count as the same for torch.save, also if one of them is empty.
    return max(-(-size[1] // ALIGNMENT), 1) * ALIGNMENT


def _allocated(kind: str, nbytes: int) -> torch.Tensor:
    copier = host.copier(kind)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu") if copier is None else copier.memory(nbytes)


class _Original(NamedTuple):
    storage: torch.UntypedStorage
    tensors: list[tuple[torch.Tensor, torch.Tensor]]  # the copies, and the originals that share the storage


class Snapshot:
    """Copies tensors to the CPU, with their values at the time of :meth:`end`. Copies share memory as originals do."""

    def __init__(self, memory: SnapshotMemory) -> None:
        self._memory = memory
        # The originals are kept too: once a temporary one is freed, another one could get its address.
        self._originals: dict[Place, _Original] = {}
        self._events: list[DeviceEvent] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that :meth:`end` makes a copy of ``tensor``; its values are there after :meth:`wait`."""
        tensor = plain_tensor(tensor)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return tensor.to("cpu", copy=True)  # waits for the device
        copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
        if not tensor.untyped_storage().nbytes():  # all empty storages have one address
            return copy.set_(torch.UntypedStorage(0), tensor.storage_offset(), tensor.size(), tensor.stride())
        original = self._originals.setdefault(place_of(tensor), _Original(tensor.untyped_storage(), []))
        original.tensors.append((copy, tensor))
        return copy

    def sizes_without(self, places: Collection[Place]) -> list[Size]:
        """Return the sizes of the storages that are copied, but of those at ``places``."""
        return [(place[0].type, place[2]) for place in self._originals if place not in places]

    def end(self) -> list[Block]:
        """Copy, and return the memory, to be given back. Copies from devices may still be in flight."""
        pieces: list[tuple[np.ndarray, np.ndarray]] = []  # of copies and originals, both on the CPU
        originals = list(self._originals.values())
        blocks, storages = self._memory.take(self.sizes_without(()))
        for (storage, tensors), memory in zip(originals, storages, strict=True):
            kind = storage.device.type
            if host.copier(kind) is not None:
                # The stream keeps the order: the next step changes the original only after this copy.
                memory.copy_(storage, non_blocking=True)
            elif kind == "cpu":
                to, of = _bytes(memory), _bytes(storage)
                pieces += [(to[at : at + _PIECE], of[at : at + _PIECE]) for at in range(0, len(of), _PIECE)]
            else:
                memory.copy_(storage)  # waits for the device
            for copy, tensor in tensors:
                copy.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
        _copy(pieces)
        copiers = {storage.device: host.copier(storage.device.type) for storage, _ in originals}
        self._events = [copier.event(device) for device, copier in copiers.items() if copier is not None]
        return blocks

    def wait(self) -> None:
        """Wait for the copies from devices, and release the originals."""
        for event in self._events:
            event.wait()
        self._originals.clear()


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without its autograd history, and with pending conjugation and negation carried out."""
    return tensor.detach().resolve_conj().resolve_neg()


def _bytes(storage: torch.UntypedStorage) -> np.ndarray:
    return np.frombuffer(bytes_of(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)), np.uint8)


def _copy(pieces: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copy the second array of each pair to the first, in as many threads as torch uses for one operator."""
    # In torch's own copy every thread waits for all others at every tensor. That takes several times as long when
    # another process, such as a data loader, uses one of the cores. Here each thread takes the next piece at once.
    left = iter(pieces)

    def work() -> None:
        for to, of in left:
            np.copyto(to, of)  # releases the GIL

    number = min(torch.get_num_threads(), sum(len(of) for _, of in pieces) // _PIECE)
    helpers: list[threading.Thread] = []
    with suppress(RuntimeError):  # no more threads can be started: the running ones copy everything
        for _ in range(number - 1):
            helper = threading.Thread(target=work)
            helper.start()
            helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
