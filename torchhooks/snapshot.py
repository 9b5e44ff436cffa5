"""Copies of a state in CPU memory, from which a background thread writes while training continues."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import torch

from torchhooks.readback import DeviceEvent, copiers

Held = list[tuple[tuple[torch.device, int], torch.UntypedStorage]]
"""The memory of a snapshot, each piece with the device and the size of its original."""
_PIECE = 1 << 22  # bytes


class Snapshot:
    """Copies tensors to the CPU, with their values at the time of the call. Copies share memory as the originals do."""

    def __init__(self, held: Held) -> None:
        # What end() of the previous snapshot returned. Reused in the order of the state, because the system takes
        # longer to provide memory than to copy into it.
        self._held = held
        # The originals are kept too: once a temporary one is freed, another one could get its address.
        self._copies: dict[tuple[torch.device, int, int], tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._pieces: list[tuple[np.ndarray, np.ndarray]] = []  # of copies and originals, both on the CPU
        self._events: list[DeviceEvent] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor``, whose values are there once :meth:`end` and :meth:`wait` have returned."""
        tensor = plain_tensor(tensor)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return tensor.to("cpu", copy=True)  # waits for the device
        storage = tensor.untyped_storage()
        where = (storage.device, storage.data_ptr(), storage.nbytes())
        if where not in self._copies:
            self._copies[where] = storage, self._copy_of(storage)
        copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return copy.set_(self._copies[where][1], tensor.storage_offset(), tensor.size(), tensor.stride())

    def end(self) -> Held:
        """Finish the copies from the CPU, and return the memory. Copies from devices may still be in flight."""
        _copy(self._pieces)
        self._pieces.clear()
        del self._held[len(self._copies) :]
        devices = {storage.device for storage, _ in self._copies.values()}
        self._events = [copiers[device.type].event(device) for device in devices if device.type in copiers]
        return self._held

    def wait(self) -> None:
        """Wait for the copies from devices, and release the originals."""
        for event in self._events:
            event.wait()
        self._copies.clear()

    def _copy_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        place, like, kind = len(self._copies), (storage.device, storage.nbytes()), storage.device.type
        if [kept for kept, _ in self._held[place : place + 1]] != [like]:
            del self._held[place : place + 1]  # freed before the new memory is allocated
            memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=kind == "cuda")
            self._held.insert(place, (like, memory.untyped_storage()))
        copy = self._held[place][1]
        if kind == "cpu" and kind not in copiers:
            to, of = _bytes(copy), _bytes(storage)
            self._pieces += [(to[at : at + _PIECE], of[at : at + _PIECE]) for at in range(0, len(of), _PIECE)]
        else:
            # Non-blocking where streams keep the order: the next step changes the original only after this copy.
            copy.copy_(storage, non_blocking=kind in copiers)
        return copy


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
    with suppress(RuntimeError):  # no more threads can be started: those that there are copy everything
        for _ in range(number - 1):
            helper = threading.Thread(target=work)
            helper.start()
            helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
