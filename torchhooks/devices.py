"""For tests, on any machine: a device whose copies take their time, and who made the host wait for one.

Both are part of :mod:`torchhooks.testing`.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchhooks.cuda import pack, unpack
from torchhooks.fetch import Evaluator
from torchhooks.hook import SessionRunHook
from torchhooks.loop import MonitoredLoop
from torchhooks.readback import Copier, Readback, copiers
from torchhooks.schedule import Schedule, Seat


class FakeDevice:
    """While it is entered, CPU tensors are read back as if they were on a device that is ``lag`` runs behind.

        with FakeDevice(lag=3) as device:
            ...                                        # runs of a loop; values come three runs after they were sent
        assert device.waits == 0                       # and nobody waited for them

    A copy has the values of the moment at which it was begun, whatever happens to the tensor meanwhile. What has come
    to the host, a ``when_ready`` callback's values for instance, is an ordinary CPU tensor.

    Args:
        lag: how many runs look in vain whether something is done that began now.
        speed: seconds that pass on the device's clock for each on ``time.monotonic()``.

    Attributes:
        copies: how many tensors were copied.
        batches: how many times a batch of copies was begun.
        waits: how often the host waited for something that was not done.
    """

    def __init__(self, lag: int = 1, speed: float = 1.0) -> None:
        self.lag = lag
        self.speed = speed
        self.copies = 0
        self.batches = 0
        self.waits = 0
        # The device's own count of runs: in each one, what is oldest is looked at in vain at most once.
        self._vain_looks = 0
        self._replaced: list[Copier | None] = []

    def stream(self, device: torch.device) -> Hashable:
        """There is one."""
        return device

    def start(self, tensors: Sequence[torch.Tensor], stream: Hashable) -> _FakeTransfer:
        """Begin to copy ``tensors``."""
        self.batches += 1
        self.copies += len(tensors)
        return _FakeTransfer(self, tensors)

    def event(self, device: torch.device) -> _FakeEvent:
        """Mark this point of the device's time."""
        return _FakeEvent(self)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is none of those that have come to the host."""
        return not hasattr(tensor, "_is_on_host")

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, waited for."""
        self.waits += 1
        return _on_host(tensor.detach().clone())

    def __enter__(self) -> FakeDevice:
        self._replaced.append(copiers.get("cpu"))
        copiers["cpu"] = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        replaced = self._replaced.pop()
        if replaced is None:
            del copiers["cpu"]
        else:
            copiers["cpu"] = replaced

    def __repr__(self) -> str:
        return f"FakeDevice(lag={self.lag}, speed={self.speed})"


class _FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._done_at = device._vain_looks + device.lag
        self._secs = time.monotonic() * device.speed

    def done(self) -> bool:
        if self._device._vain_looks >= self._done_at:
            return True
        self._device._vain_looks += 1
        return False

    def wait(self) -> None:
        if self._device._vain_looks < self._done_at:
            self._device.waits += 1
            self._device._vain_looks = self._done_at

    def secs_since(self, earlier: _FakeEvent) -> float:
        return self._secs - earlier._secs


class _FakeTransfer(_FakeEvent):
    def __init__(self, device: FakeDevice, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(device)
        self._packed = [(indexes, packed.clone()) for indexes, packed in pack(tensors)]

    def tensors(self) -> list[torch.Tensor]:
        return [_on_host(tensor) for tensor in unpack(self._packed)]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor._is_on_host = True  # type: ignore[attr-defined]
    return tensor


class Sync(NamedTuple):
    """One time that the host waited for a device, or would have.

    Args:
        hook: the hook that did it, or that asked for the fetch that did.
        method: the hook's method, ``"fetch"`` for what it asked for in ``before_run``, or ``"Due.when"``.
        step: the global step at that moment.
        operation: what waited: an operator on the CPU, torch's own message on a GPU.
    """

    hook: object
    method: str
    step: int
    operation: str

    def __str__(self) -> str:
        return f"{self.hook!r} in {self.method} at step {self.step}: {self.operation}"


@contextmanager
def sync_audit(device: str | None = None) -> Iterator[list[Sync]]:
    """A list that gets every wait for a device that a hook or a fetch causes meanwhile.

        with sync_audit() as syncs:
            for batch in batches:
                loop.run(batch)
        assert not syncs, "\\n".join(map(str, syncs))

    On a GPU torch tells of each operation that synchronises (``torch.cuda.set_sync_debug_mode``). On the CPU, inside of
    a :class:`FakeDevice`, operators that would synchronise on a GPU are counted instead: ``item()``, ``nonzero()``,
    indexing with a mask and their like; what reads memory without an operator, ``numpy()`` and ``tolist()``, is not
    seen there. What the step does is its own affair, and so is what a ``when_ready`` callback does with values that
    have arrived.

    Args:
        device: ``"cuda"`` or ``"cpu"``, for a test that is to go the same way everywhere; if not given, ``"cuda"``
            where there is one.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"sync_audit(device={device!r}): give 'cuda' or 'cpu', or nothing for the one there is")
    syncs: list[Sync] = []

    def note(operation: str) -> None:
        sync = _attributed(operation)
        if sync is not None:
            syncs.append(sync)

    if device == "cuda" or (device is None and torch.cuda.is_available()):
        with _cuda_syncs(note):
            yield syncs
    else:
        with nullcontext() if "cpu" in copiers else FakeDevice(), _SyncCounter(note):
            yield syncs


@contextmanager
def _cuda_syncs(note: Callable[[str], None]) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*debug mode is a prototype")
        warnings.filterwarnings("always", message=".*called a synchronizing CUDA operation")
        show = warnings.showwarning

        def showwarning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if "called a synchronizing CUDA operation" in str(message):
                note(str(message))
            else:
                show(message, *args, **kwargs)

        warnings.showwarning = showwarning
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


_SYNCHRONISE = (
    *("_local_scalar_dense", "allclose", "equal", "is_nonzero", "nonzero", "masked_select", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
)


class _SyncCounter(TorchDispatchMode):
    """Sees the operators that would make the host wait if their tensors were on a GPU."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _SYNCHRONISE or _looks_for_the_places(name, args):
            self._note(f"aten.{name}")
        return func(*args, **(kwargs or {}))


def _looks_for_the_places(name: str, args: Sequence[Any]) -> bool:
    """Whether this indexes with a mask, so that the host has to know how much it has; filling with a number has not."""
    if name not in ("index", "index_put", "index_put_") or (name != "index" and args[2].dim() == 0):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


_ARRIVED = {Readback.request.__code__, Readback._deliver.__code__}
_EVALUATE = Evaluator.evaluate.__code__
_LOOK = Schedule.noticed_by.__code__


def _attributed(operation: str) -> Sync | None:
    """Who is being called at this moment, from the stack; ``None`` if no hook and no fetch is."""
    found: tuple[object, str] | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code, instance = frame.f_code, frame.f_locals.get("self")
        if found is None:
            if code in _ARRIVED:
                return None
            if code is _EVALUATE and isinstance(frame.f_locals["who"], Seat):
                found = frame.f_locals["who"].hook, "fetch"
            elif code is _LOOK:
                found = frame.f_locals["seat"].hook, "Due.when"
            elif isinstance(instance, SessionRunHook) and hasattr(SessionRunHook, code.co_name):
                found = instance, code.co_name
        elif isinstance(instance, MonitoredLoop):
            return Sync(*found, instance.global_step, operation)
        frame = frame.f_back
    return None
