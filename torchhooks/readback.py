"""Device to host without a stall: the only place that may wait for a device.

What hooks ask for with ``when_ready`` is copied to pinned memory behind the step, on the stream that the step uses. An
event tells when a copy has arrived; it is looked at in later runs, without waiting. Requests of a few runs travel in
one batch, and the small values of a batch in one copy, so that a value a step costs little more than taking it.

Which devices work so is in :data:`copiers`. On others, such as ``mps`` and ``xpu``, the copy is made at once, and
waited for.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from torchhooks.errors import LifecycleError, add_note
from torchhooks.fetch import is_snapshot, map_leaves

BATCH_RUNS = 16
"""How many runs' requests travel together at the most. More would save little and show a line later."""

BATCH_SECS = 0.05
"""How many seconds a request waits for others: where steps are long, a copy of its own costs nothing."""

_SMALL = 1024  # elements: below this a copy costs what it costs to launch it
_KEPT_BYTES = 1 << 26


class Transfer(Protocol):
    """Copies that are under way."""

    def done(self) -> bool:
        """Whether they have arrived. Never waits."""
        ...

    def wait(self) -> None:
        """Wait until they have."""
        ...

    def tensors(self) -> Sequence[torch.Tensor]:
        """The copies, in the order of the originals; they belong to the caller. Only once they have arrived."""
        ...


class DeviceEvent(Protocol):
    """A point of a device's stream: what was queued before it and what comes after."""

    def done(self) -> bool:
        """Whether the device has come to it. Never waits."""
        ...

    def wait(self) -> None:
        """Wait until it has."""
        ...

    def secs_since(self, earlier: Any) -> float:
        """The device's time from ``earlier`` to this, once it has come to both."""
        ...


class Copier(Protocol):
    """What a kind of device can do without a stall."""

    def start(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Begin to copy ``tensors``, all of one device, as they are at this point of its current stream."""
        ...

    def event(self, device: torch.device) -> DeviceEvent:
        """Mark this point of the current stream of ``device``."""
        ...


class Moment:
    """A moment on the host's clock and, where ``device`` has one that can be read later, on the device's."""

    __slots__ = ("event", "secs")

    def __init__(self, device: torch.device) -> None:
        self.secs = time.monotonic()
        copier = copiers.get(device.type)
        self.event = None if copier is None else copier.event(device)


class Elapsed:
    """The time between two moments, a value that ``when_ready`` turns into seconds: the device's if it has a clock."""

    __slots__ = ("_end", "_start")

    def __init__(self, start: Moment, end: Moment) -> None:
        self._start = start
        self._end = end

    @property
    def event(self) -> DeviceEvent | None:
        """What has to be reached before the time is known; ``None`` if it is."""
        return None if self._start.event is None else self._end.event

    def secs(self) -> float:
        """The seconds, once the event is reached."""
        if self._start.event is None or self._end.event is None:
            return self._end.secs - self._start.secs
        return self._end.event.secs_since(self._start.event)


class _Request(NamedTuple):
    values: Any
    callback: Callable[[Any], object]
    tensors: list[torch.Tensor]
    events: list[DeviceEvent]
    made_by: object
    step: int
    deadline: int | None


class _Batch(NamedTuple):
    requests: list[_Request]
    transfers: list[tuple[Transfer, list[torch.Tensor]]]
    pending: list[Transfer | DeviceEvent]

    def done(self) -> bool:
        return all(part.done() for part in self.pending)

    def wait(self) -> None:
        for part in self.pending:
            part.wait()


class Readback:
    """Brings values to the host and hands them to callbacks, in the order of the requests."""

    def __init__(self) -> None:
        self.waiting = False
        """Whether there is a call that has not been made yet."""
        self._runs = 0
        self._first_run, self._first_secs = 0, 0.0
        self._cannot_stay = False  # something was asked for that the next step may update: copy it before
        self._asked: list[_Request] = []
        self._batches: deque[_Batch] = deque()
        self._arrived: deque[tuple[_Request, dict[int, torch.Tensor]]] = deque()
        self._closed = False

    def request(
        self,
        values: Any,
        callback: Callable[[Any], object],
        made_by: object = None,
        step: int = 0,
        max_lag_runs: int | None = None,
    ) -> None:
        """Call ``callback`` with ``values``, CPU tensors in place of device tensors, when they have arrived.

        Args:
            values: any structure of tensors, times (:class:`Elapsed`) and whatever else. If nothing in it is on a
                device, the call is made at once.
            callback: what to call.
            made_by: who is named if it raises.
            step: the step that is named then.
            max_lag_runs: make the call at the end of this many runs from now at the latest, and wait if need be; 0 is
                this run.

        Raises:
            LifecycleError: the loop has been closed.
        """
        if self._closed:
            raise LifecycleError(f"when_ready({values!r}): the loop is closed, and nobody would make the call")
        tensors: list[torch.Tensor] = []
        events: list[DeviceEvent] = []
        _find_remote(values, tensors, events)
        if not tensors and not events:
            callback(to_host(values))
            return
        if not self._asked:
            self._first_run, self._first_secs = self._runs, time.monotonic()
        deadline = None if max_lag_runs is None else self._runs + max_lag_runs
        self._asked.append(_Request(values, callback, tensors, events, made_by, step, deadline))
        self._cannot_stay = self._cannot_stay or not all(map(is_snapshot, tensors))
        self.waiting = True

    def end_run(self) -> None:
        """A run has ended: send what has gathered, make the calls for what has arrived. Waits only for a deadline."""
        if self._asked and (self._cannot_stay or self._is_full() or self._is_overdue(self._asked)):
            self._send()
        while self._batches and (self._batches[0].done() or self._is_overdue(self._batches[0].requests)):
            self._receive()
        self._runs += 1
        self._deliver()
        self.waiting = bool(self._asked or self._batches)

    def drain(self) -> None:
        """Make every call that has not been made yet, and wait for what is under way.

        Raises:
            Exception: what a callback raised; several as an ExceptionGroup, after all calls were made.
        """
        errors: list[Exception] = []
        while self._asked or self._batches or self._arrived:
            self._send()
            while self._batches:
                self._receive()
            try:
                self._deliver()
            except Exception as error:
                errors.append(error)
        self.waiting = False
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup("several errors in when_ready callbacks", errors)

    def close(self) -> None:
        """Drain, and refuse further requests."""
        try:
            self.drain()
        finally:
            self._closed = True

    def _is_full(self) -> bool:
        return self._runs - self._first_run + 1 >= BATCH_RUNS or time.monotonic() - self._first_secs >= BATCH_SECS

    def _is_overdue(self, requests: Iterable[_Request]) -> bool:
        return any(request.deadline is not None and self._runs >= request.deadline for request in requests)

    def _send(self) -> None:
        by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
        for request in self._asked:
            for tensor in request.tensors:
                by_device.setdefault(tensor.device, {})[id(tensor)] = tensor
        transfers = []
        for device, originals in by_device.items():
            tensors = list(originals.values())
            transfers.append((copiers[device.type].start(tensors), tensors))
        events = [event for request in self._asked for event in request.events]
        self._batches.append(_Batch(self._asked, transfers, [*(transfer for transfer, _ in transfers), *events]))
        self._asked = []
        self._cannot_stay = False

    def _receive(self) -> None:
        """Take the oldest batch, which is waited for if it has not arrived."""
        batch = self._batches.popleft()
        batch.wait()
        copies = {
            id(original): copy
            for transfer, originals in batch.transfers
            for original, copy in zip(originals, transfer.tensors(), strict=True)
        }
        self._arrived.extend((request, copies) for request in batch.requests)

    def _deliver(self) -> None:
        while self._arrived:
            request, copies = self._arrived.popleft()
            values = map_leaves(functools.partial(_arrived, copies), request.values)
            try:
                request.callback(to_host(values))
            except BaseException as error:
                add_note(error, f"torchhooks: in a when_ready callback of {request.made_by}, for step {request.step}")
                raise


def is_remote(value: Any) -> bool:
    """Whether ``value`` is a tensor on a device, so that looking at it would wait."""
    return isinstance(value, torch.Tensor) and (not value.is_cpu or "cpu" in copiers)


def to_host(values: Any) -> Any:
    """``values`` with CPU tensors in place of device tensors, and seconds in place of times. Waits for the device."""
    if type(values) is torch.Tensor and values.is_cpu:
        return values
    return map_leaves(_leaf_to_host, values)


def _leaf_to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.is_cpu else value.to("cpu")  # waits for the device
    if isinstance(value, Elapsed):
        if value.event is not None:
            value.event.wait()  # waits for the device
        return value.secs()
    return value


def _arrived(copies: dict[int, torch.Tensor], leaf: Any) -> Any:
    return copies.get(id(leaf), leaf)


def _find_remote(values: Any, tensors: list[torch.Tensor], events: list[DeviceEvent]) -> None:
    """Collect what has to come from a device, of those from which it comes without a stall."""

    def collect(leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            # Sparse ones have no one piece of memory to copy; they are waited for when the call is made.
            if leaf.device.type in copiers and leaf.layout is torch.strided:
                tensors.append(leaf)
        elif isinstance(leaf, Elapsed) and leaf.event is not None:
            events.append(leaf.event)

    map_leaves(collect, values)


# -- CUDA ---------------------------------------------------------------------------------------------------------


class CudaCopier:
    """Copies into pinned memory, behind whatever the current stream has been given to do."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def start(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Begin one copy for all small tensors of a dtype, and one for each of the others."""
        with torch.cuda.device(tensors[0].device):
            return _CudaTransfer(tensors, self)

    def event(self, device: torch.device) -> DeviceEvent:
        """Record an event that keeps the time."""
        with torch.cuda.device(device):
            return _CudaEvent()

    def take(self, nbytes: int) -> torch.Tensor:
        """Pinned memory of at least ``nbytes`` bytes."""
        size = 1 << max(nbytes - 1, 1023).bit_length()
        free = self._free.setdefault(size, [])
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def give_back(self, memory: torch.Tensor) -> None:
        """Take ``memory`` back for later copies, unless it is so large that keeping it would be felt."""
        if memory.numel() <= _KEPT_BYTES:
            self._free[memory.numel()].append(memory)


class _CudaTransfer:
    def __init__(self, tensors: Sequence[torch.Tensor], copier: CudaCopier) -> None:
        self._originals = tensors
        self._copier = copier
        self._copies: list[torch.Tensor | None] = [None] * len(tensors)
        self._buffers: list[torch.Tensor] = []
        for indexes in _groups(tensors):
            self._copy(indexes)
        self._event = torch.cuda.Event()
        self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()  # waits for the device

    def tensors(self) -> list[torch.Tensor]:
        copies = [copy.clone() for copy in self._copies if copy is not None]
        for buffer in self._buffers:
            self._copier.give_back(buffer)
        self._buffers = []
        return copies

    def _copy(self, indexes: list[int]) -> None:
        parts = [self._originals[index] for index in indexes]
        packed = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        buffer = self._copier.take(packed.nbytes)
        self._buffers.append(buffer)
        host = buffer[: packed.nbytes].view(packed.dtype)
        host.view(packed.shape).copy_(packed, non_blocking=True)
        offset = 0
        for index, part in zip(indexes, parts, strict=True):
            self._copies[index] = host[offset : offset + part.numel()].view(part.shape)
            offset += part.numel()


class _CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()  # waits for the device

    def secs_since(self, earlier: _CudaEvent) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1000


def _groups(tensors: Sequence[torch.Tensor]) -> Iterable[list[int]]:
    """The tensors, by index, that travel in one copy: the small ones of one dtype together."""
    small: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel() <= _SMALL:
            small.setdefault(tensor.dtype, []).append(index)
        else:
            yield [index]
    yield from small.values()


copiers: dict[str, Copier] = {"cuda": CudaCopier()}
"""What copies without a stall, by device type."""
