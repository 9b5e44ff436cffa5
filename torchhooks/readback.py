"""Device to host without a stall: the only place that may wait for a device.

What hooks ask for with ``when_ready`` is copied to pinned memory behind the step, on the stream that the step uses. An
event tells when a copy has arrived; it is looked at in later runs, without waiting. Requests of a few runs travel in
one batch, and what is small and alike in one copy, so that a value a step costs little more than taking it.

Which devices work so is in :data:`copiers`. On others, such as ``mps`` and ``xpu``, the copy is made at once, and
waited for.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from torchhooks.errors import LifecycleError, add_note
from torchhooks.fetch import ComposedFetch, as_snapshot, is_snapshot, map_leaves

BATCH_RUNS = 16
"""How many runs' requests travel together at the most. More would save little and show a line later."""

BATCH_SECS = 0.05
"""How many seconds a request waits for others: where steps are long, a copy of its own costs nothing."""

_SMALL = 1024  # elements: below this a copy costs what it costs to launch it
_KEPT_BYTES = 1 << 26
_NEVER = sys.maxsize


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

    def stream(self, device: torch.device) -> Hashable:
        """Where at present everything goes that ``device`` is given to do."""
        ...

    def start(self, tensors: Sequence[torch.Tensor], stream: Any) -> Transfer:
        """Begin to copy ``tensors``, all of one device, behind what ``stream`` has been given so far."""
        ...

    def event(self, device: torch.device) -> DeviceEvent:
        """Mark this point of the current stream of ``device``."""
        ...

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, which is of this type of device, is really there."""
        ...

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` on the host, at once. Waits."""
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

    @property
    def host_secs(self) -> float:
        """The seconds on the host's clock."""
        return self._end.secs - self._start.secs

    def secs(self) -> float:
        """The seconds, once the event is reached."""
        if self._start.event is None or self._end.event is None:
            return self.host_secs
        return self._end.event.secs_since(self._start.event)


_Routes = dict[torch.device, tuple[Copier, Hashable]]


class Request(NamedTuple):
    """A call that is to be made when its values have arrived, and who is named if it raises."""

    values: Any
    callback: Callable[[Any], object]
    tensors: list[torch.Tensor]
    events: list[DeviceEvent]
    routes: _Routes
    made_by: object
    step: int
    deadline: int


def _call(request: Request, values: Any) -> None:
    request.callback(values)


class _Batch(NamedTuple):
    requests: list[Request]
    transfers: list[tuple[Transfer, list[torch.Tensor]]]  # the originals have to live until the copies have arrived
    pending: list[Transfer | DeviceEvent]
    deadline: int

    def done(self) -> bool:
        return all(part.done() for part in self.pending)

    def wait(self) -> None:
        for part in self.pending:
            part.wait()


class Readback:
    """Brings values to the host and hands them to callbacks, in the order of the requests.

    Args:
        wake: called when there is a call that has to wait, so that :meth:`end_run` be called.
    """

    def __init__(self, wake: Callable[[], object] = bool) -> None:
        self._wake = wake
        self.waiting = False
        """Whether there is a call that has not been made yet."""
        self._runs = 0
        self._send_by, self._send_at = 0, 0.0  # the run at whose end, or the moment at which, what was asked for goes
        self._routes: _Routes = {}
        self._asked: list[Request] = []
        self._batches: deque[_Batch] = deque()
        self._arrived: deque[tuple[Request, dict[int, torch.Tensor]]] = deque()
        self._calling: Request | None = None
        self._closed = False
        self.call: Callable[[Request, Any], object] = _call
        """What makes a call whose values have arrived."""

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
            values: any structure of tensors, times (:class:`Elapsed`) and whatever else, as they are now. If nothing in
                it is on a device, the call is made at once.
            callback: what to call. What it asks for in its turn goes by the name and the step of this request.
            made_by: who is named if it raises.
            step: the step that is named then.
            max_lag_runs: make the call at the end of this many runs from now at the latest, and wait if need be; 0 is
                this run.

        Raises:
            LifecycleError: the loop has been closed.
        """
        if self._closed:
            raise LifecycleError(f"when_ready({values!r}): the loop is closed, and nobody would make the call")
        if _all_here(values):
            callback(values)
            return
        parts = _Parts()
        values = map_leaves(parts.sort, values)
        if not parts.tensors and not parts.events:
            callback(to_host(values) if parts.waited_for else values)
            return
        if parts.updated_here:
            values = map_leaves(_kept, values)
        if self._calling is not None:
            made_by, step = self._calling.made_by, self._calling.step
        if not self._asked:
            self._send_by, self._send_at = self._runs + BATCH_RUNS - 1, time.monotonic() + BATCH_SECS
        deadline = _NEVER
        if max_lag_runs is not None:
            deadline = self._runs + max_lag_runs
            # Half of the time for gathering, the other half for arriving without being waited for.
            self._send_by = min(self._send_by, self._runs + max_lag_runs // 2)
        routes = self._routes_of(parts.tensors)
        self._asked.append(Request(values, callback, parts.tensors, parts.events, routes, made_by, step, deadline))
        self.waiting = True
        self._wake()

    def end_run(self) -> None:
        """A run has ended: send what has gathered, make the calls for what has arrived. Waits only for a deadline."""
        if self._asked and (self._runs >= self._send_by or time.monotonic() >= self._send_at):
            self._send()
        self._routes = {}
        while self._batches and (self._batches[0].done() or self._is_overdue()):
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
            for part in (self._send, self._receive_all, self._deliver):
                try:
                    part()
                except Exception as error:
                    errors.append(error)
        self._routes = {}
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

    def _routes_of(self, tensors: Iterable[torch.Tensor]) -> _Routes:
        """How the copies of this run go: behind what has made the values, wherever they are sent from."""
        routes = self._routes
        for tensor in tensors:
            device = tensor.device
            if device not in routes:
                copier = copiers[device.type]
                routes[device] = copier, copier.stream(device)
        return routes

    def _is_overdue(self) -> bool:
        return any(self._runs >= batch.deadline for batch in self._batches)

    # Each of the following takes what it is about to handle off its queue first, so that an error leaves the others.

    def _send(self) -> None:
        asked, self._asked = self._asked, []
        groups: dict[tuple[torch.device, Hashable], tuple[Copier, dict[int, torch.Tensor]]] = {}
        for request in asked:
            for tensor in request.tensors:
                device = tensor.device
                copier, stream = request.routes[device]
                groups.setdefault((device, stream), (copier, {}))[1][id(tensor)] = tensor
        transfers = []
        for (_, stream), (copier, originals) in groups.items():
            tensors = list(originals.values())
            transfers.append((copier.start(tensors, stream), tensors))
        if asked:
            events = [event for request in asked for event in request.events]
            pending: list[Transfer | DeviceEvent] = [*(transfer for transfer, _ in transfers), *events]
            self._batches.append(_Batch(asked, transfers, pending, min(request.deadline for request in asked)))

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

    def _receive_all(self) -> None:
        while self._batches:
            self._receive()

    def _deliver(self) -> None:
        while self._arrived:
            request, copies = self._arrived.popleft()
            values = map_leaves(functools.partial(_landed, copies), request.values)
            self._calling = request
            try:
                self.call(request, values)
            except BaseException as error:
                add_note(error, f"torchhooks: in a when_ready callback of {request.made_by}, for step {request.step}")
                raise
            finally:
                self._calling = None


def is_remote(value: Any) -> bool:
    """Whether ``value`` is a tensor on a device, so that looking at it would wait."""
    if not isinstance(value, torch.Tensor):
        return False
    return not value.is_cpu or ("cpu" in copiers and copiers["cpu"].holds(value))


def to_host(values: Any) -> Any:
    """``values`` with CPU tensors in place of device tensors, and seconds in place of times. Waits for the device."""
    return map_leaves(_leaf_to_host, values)


def _leaf_to_host(value: Any) -> Any:
    if isinstance(value, Elapsed):
        if value.event is not None:
            value.event.wait()  # waits for the device
        return value.secs()
    if not is_remote(value):
        return value
    copier = copiers.get(value.device.type)
    return value.to("cpu") if copier is None else copier.fetch(value)  # waits for the device


def _landed(copies: dict[int, torch.Tensor], leaf: Any) -> Any:
    copy = copies.get(id(leaf))
    return _leaf_to_host(leaf) if copy is None else copy


def _all_here(values: Any) -> bool:
    """Whether ``values`` are what most are, with nothing to be brought, waited for or copied: a quick look."""
    parts = [values]
    for part in parts:
        kind = type(part)
        if kind is torch.Tensor:
            if "cpu" in copiers or not part.is_cpu:
                return False
        elif isinstance(part, tuple):
            parts += part  # which the loop comes to
        elif not (part is None or kind is float or kind is int or kind is str or isinstance(part, ComposedFetch)):
            return False
    return True


class _Parts:
    """What there is in the values of one request: :meth:`sort` is given every leaf."""

    __slots__ = ("events", "tensors", "updated_here", "waited_for")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []  # those that come from a device without a stall
        self.events: list[DeviceEvent] = []
        self.waited_for = False  # whether something has to be brought to the host in another way
        self.updated_here = False  # whether something else may be updated before the call is made

    def sort(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if not is_remote(leaf):
                self.updated_here = True
            elif _travels(leaf):
                leaf = _kept(leaf)
                self.tensors.append(leaf)
            else:
                self.waited_for = self.updated_here = True
        elif isinstance(leaf, Elapsed):
            self.waited_for = True
            if leaf.event is not None:
                self.events.append(leaf.event)
        elif isinstance(leaf, np.ndarray):
            self.updated_here = True
        return leaf


def _travels(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, which is on a device, can come from there without a stall."""
    # Those of other layouts, and of subclasses that are made of several tensors, have no one piece of memory to copy.
    return (
        tensor.device.type in copiers
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    )


def _kept(leaf: Any) -> Any:
    """``leaf``, or a copy if somebody may update it: the step, another hook, or whoever gave it."""
    if isinstance(leaf, torch.Tensor) and not is_snapshot(leaf):
        return as_snapshot(leaf.detach().clone())
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


# -- many tensors in few copies -----------------------------------------------------------------------------------


def pack(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """What travels in one copy, small tensors of one dtype and shape being stacked, and which of ``tensors`` it has."""
    groups: dict[Hashable, list[int]] = {}
    for index, tensor in enumerate(tensors):
        alike = (tensor.dtype, tensor.shape) if tensor.numel() <= _SMALL else index
        groups.setdefault(alike, []).append(index)
    for indexes in groups.values():
        if len(indexes) == 1:
            yield indexes, tensors[indexes[0]].unsqueeze(0)
        else:
            yield indexes, torch.stack([tensors[index] for index in indexes])


def unpack(packed: Iterable[tuple[list[int], torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors that were packed, in their order."""
    tensors = {
        index: tensor for indexes, stack in packed for index, tensor in zip(indexes, stack.unbind(), strict=True)
    }
    return [tensors[index] for index in range(len(tensors))]


# -- CUDA ---------------------------------------------------------------------------------------------------------


class CudaCopier:
    """Copies into pinned memory, behind whatever a stream has been given to do."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def stream(self, device: torch.device) -> Hashable:
        """The current stream of ``device``."""
        return torch.cuda.current_stream(device)

    def start(self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> Transfer:
        """Begin the copies."""
        with torch.cuda.stream(stream):
            return _CudaTransfer(tensors, self)

    def event(self, device: torch.device) -> DeviceEvent:
        """Record an event that keeps the time."""
        with torch.cuda.device(device):
            return _CudaEvent()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Always."""
        return True

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory that is not pinned."""
        return tensor.to("cpu")  # waits for the device

    def take(self, nbytes: int) -> torch.Tensor:
        """Pinned memory of at least ``nbytes`` bytes."""
        size = 1 << max(nbytes - 1, 1023).bit_length()
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        with torch.inference_mode(False):  # which could not be written to once that mode is left
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def give_back(self, memory: torch.Tensor) -> None:
        """Take ``memory`` back for later copies, unless it is so large that keeping it would be felt."""
        if memory.numel() <= _KEPT_BYTES:
            self._free[memory.numel()].append(memory)


class _CudaTransfer:
    """Copies on the stream that is current when it is made."""

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
        copies = unpack((indexes, host.clone()) for indexes, host in self._packed)
        for buffer in self._buffers:
            self._copier.give_back(buffer)
        return copies

    def _copy(self, packed: torch.Tensor) -> torch.Tensor:
        buffer = self._copier.take(packed.nbytes)
        self._buffers.append(buffer)
        return buffer[: packed.nbytes].view(packed.dtype).view(packed.shape).copy_(packed, non_blocking=True)


class _CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()  # waits for the device

    def secs_since(self, earlier: _CudaEvent) -> float:
        earlier.wait()  # if it is of another stream: its own has come to it long ago
        return float(earlier._event.elapsed_time(self._event)) / 1000


copiers: dict[str, Copier] = {"cuda": CudaCopier()}
"""What copies without a stall, by device type."""
