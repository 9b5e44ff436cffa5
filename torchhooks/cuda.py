"""Copies from CUDA devices that do not block the host, through pinned memory, and events that time a device."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch

_SMALL_NUMEL = 1024  # below this many elements, launching a copy costs more than the copy itself
_MAX_KEPT_BYTES = 1 << 26


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


class CudaCopier:
    """The :class:`torchhooks.readback.Copier` for CUDA. Copies into pinned memory, which it reuses."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def stream(self, device: torch.device) -> Hashable:
        return torch.cuda.current_stream(device)

    def start(self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> _CudaTransfer:
        with torch.cuda.stream(stream):
            return _CudaTransfer(tensors, self)

    def event(self, device: torch.device) -> _CudaEvent:
        with torch.cuda.device(device):
            return _CudaEvent()

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu")  # waits for the device

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a pinned buffer of at least ``nbytes`` bytes, for :meth:`give_back` to take back."""
        size = 1 << max(nbytes - 1, 1023).bit_length()  # a power of two, so that later copies can reuse the buffer
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        with torch.inference_mode(False):  # an inference tensor cannot be written to outside of inference mode
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keep ``buffer`` for later copies, unless it is large: pinned memory is lost to the rest of the system."""
        if buffer.numel() <= _MAX_KEPT_BYTES:
            self._free[buffer.numel()].append(buffer)


class _CudaTransfer:
    """Copies queued on the stream that is current when the transfer is created."""

    def __init__(self, tensors: Sequence[torch.Tensor], copier: CudaCopier) -> None:
        self._copier = copier
        self._buffers: list[torch.Tensor] = []
        self._packed = [(indexes, self._copy(packed)) for indexes, packed in pack(tensors)]
        self._event = torch.cuda.Event()
        self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()  # waits for the device

    def tensors(self) -> list[torch.Tensor]:
        # Cloned, because the callbacks may keep them for as long as they like and the buffers are reused now.
        copies = unpack((indexes, host.clone()) for indexes, host in self._packed)
        for buffer in self._buffers:
            self._copier.give_back(buffer)
        return copies

    def _copy(self, packed: torch.Tensor) -> torch.Tensor:
        buffer = self._copier.take(packed.nbytes)
        self._buffers.append(buffer)
        return buffer[: packed.nbytes].view(packed.dtype).view(packed.shape).copy_(packed, non_blocking=True)


class _CudaEvent:
    """A timed event on the stream that is current when it is created."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()  # waits for the device

    def secs_since(self, earlier: _CudaEvent) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1000
