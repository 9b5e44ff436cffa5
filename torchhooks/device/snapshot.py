"""Copies of a state in CPU memory, from which a background thread writes while training continues."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from torchhooks.device.accelerator import ALIGNMENT
from torchhooks.device.host import DeviceEvent, host

Held = list[tuple[str, torch.Tensor]]
"""The memory of a snapshot, in blocks, each with the type of device from which is copied into it."""

_BLOCK = 1 << 28  # bytes; torch rounds pinned memory up to a power of two, which for each tensor would be much more
_PIECE = 1 << 22  # bytes


class _Original(NamedTuple):
    storage: torch.UntypedStorage
    tensors: list[tuple[torch.Tensor, torch.Tensor]]  # the copies, and the originals that share the storage


class Snapshot:
    """Copies tensors to the CPU, with their values at the time of :meth:`end`. Copies share memory as originals do."""

    def __init__(self, held: Held) -> None:
        # What end() of the previous snapshot returned. Reused, because the system takes longer to provide memory than
        # to copy into it.
        self._held = held
        # The originals are kept too: once a temporary one is freed, another one could get its address.
        self._originals: dict[tuple[torch.device, int, int], _Original] = {}
        self._events: list[DeviceEvent] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that :meth:`end` makes a copy of ``tensor``; its values are there after :meth:`wait`."""
        tensor = plain_tensor(tensor)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return tensor.to("cpu", copy=True)  # waits for the device
        storage = tensor.untyped_storage()
        where = (storage.device, storage.data_ptr(), storage.nbytes())
        copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
        self._originals.setdefault(where, _Original(storage, [])).tensors.append((copy, tensor))
        return copy

    def end(self) -> Held:
        """Copy, and return the memory. Copies from devices may still be in flight."""
        pieces: list[tuple[np.ndarray, np.ndarray]] = []  # of copies and originals, both on the CPU
        originals = list(self._originals.values())
        for (storage, tensors), memory in zip(originals, self._memory_for(originals), strict=True):
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
        return self._held

    def wait(self) -> None:
        """Wait for the copies from devices, and release the originals."""
        for event in self._events:
            event.wait()
        self._originals.clear()

    def _memory_for(self, originals: list[_Original]) -> list[torch.UntypedStorage]:
        """Return memory for a copy of each storage, carved from a few blocks."""
        blocks: list[tuple[str, int]] = []  # the type of device, and the size
        places: list[tuple[int, int, int]] = []  # the block of each copy, its offset in that, its size
        open_blocks: dict[str, int] = {}
        for storage, _ in originals:
            kind, nbytes = storage.device.type, storage.nbytes()
            number = open_blocks.get(kind)
            if number is None or blocks[number][1] + nbytes > _BLOCK:
                number = open_blocks[kind] = len(blocks)
                blocks.append((kind, 0))
            offset = blocks[number][1]
            places.append((number, offset, nbytes))
            blocks[number] = kind, offset + -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._provide(blocks)
        memory = [block.untyped_storage() for _, block in self._held]
        # Slices of a storage are storages on the same memory, so each copy is written to the file on its own.
        return [memory[number][offset : offset + nbytes] for number, offset, nbytes in places]

    def _provide(self, blocks: list[tuple[str, int]]) -> None:
        """Have the held memory consist of ``blocks``, reusing blocks that are not much too large."""
        kept: list[torch.Tensor | None] = [
            block if place < len(blocks) and kind == blocks[place][0] and _fits(blocks[place][1], block) else None
            for place, (kind, block) in enumerate(self._held)
        ]
        self._held.clear()  # what is not kept is freed before new memory is allocated
        kept += [None] * (len(blocks) - len(kept))
        for (kind, nbytes), block in zip(blocks, kept[: len(blocks)], strict=True):
            self._held.append((kind, _allocated(kind, nbytes) if block is None else block))


def _allocated(kind: str, nbytes: int) -> torch.Tensor:
    copier = host.copier(kind)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu") if copier is None else copier.memory(nbytes)


def _fits(nbytes: int, block: torch.Tensor) -> bool:
    return nbytes <= block.nbytes <= nbytes + nbytes // 4


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without its autograd history, and with pending conjugation and negation carried out."""
    return tensor.detach().resolve_conj().resolve_neg()


def _bytes(storage: torch.UntypedStorage) -> np.ndarray:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


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
