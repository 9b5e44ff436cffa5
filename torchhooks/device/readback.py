"""Values on their way from a device to the host, for ``when_ready`` callbacks.

The values that a hook passes to ``when_ready`` are copied without blocking the host. A copy is queued on the stream
that is current at the request, so that it follows the kernels that compute the values. An event marks its completion,
and later runs poll that event. The requests of a few runs share one batch, and small tensors of one dtype and shape
share one copy, so that reading back one value per step costs little more than the snapshot of the value. The bytes in
flight are bounded by :data:`MAX_BYTES`.

It works for the accelerator that torch has, see :func:`torchhooks.device.accelerator.copier_of`. On other devices, and
on ``mps`` by default, the copy is made at once and the host waits for it.

Only this package waits for a device. Each line that does has a name or a comment that says so.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from torchhooks.common.errors import Attempts, LifecycleError, add_note
from torchhooks.common.trees import Leaf, Tree, copied, is_snapshot, map_leaves
from torchhooks.device.accelerator import Copier, DeviceEvent, Pending, Transfer, host

BATCH_RUNS = 16
"""How many runs at most share a batch. With more, copies cost hardly less and log lines appear later."""

BATCH_SECS = 0.05
"""How many seconds a request waits for others to share its batch. Steps that long hide the cost of another copy."""

BATCH_BYTES = 1 << 20
"""How many bytes at most wait for others to share their batch. Copying so many hides the cost of another copy."""

MAX_BYTES = 1 << 25
"""How many bytes at most wait on devices. With more, the host waits for the oldest batch at the end of a run.

So much pinned memory is allocated, once per process, when the first loop is created after the accelerator is
initialized; set it before that.
"""

_NEVER = sys.maxsize


class DeviceTimestamp:
    """A point in time, on the host's clock and, if there is a copier for ``device``, on the device's."""

    __slots__ = ("device", "event", "secs")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.secs = time.monotonic()
        copier = host.copier(device.type)
        self.event = None if copier is None else copier.moment(device)


class DeviceDuration:
    """The time between two moments: a value that ``when_ready`` turns into seconds, of device time if possible."""

    __slots__ = ("across_devices", "events", "host_secs")

    def __init__(self, start: DeviceTimestamp, end: DeviceTimestamp) -> None:
        self.host_secs = end.secs - start.secs
        """The seconds on the host's clock."""
        self.across_devices = start.device != end.device
        """Whether the moments are of two devices, so that no device has measured the time between them."""
        self.events: tuple[DeviceEvent, ...] = ()
        """The events that the device has to reach before the time is known; none if the time is known already."""
        # Both of them: the start may be an event of another stream, which the device reaches after the end.
        if start.event is not None and end.event is not None and not self.across_devices:
            self.events = start.event, end.event

    def wait(self) -> None:
        """Block until the device has reached :attr:`events`."""
        for event in self.events:
            event.wait()  # waits for the device

    def secs(self) -> float:
        """Return the seconds. The device must have reached :attr:`events`."""
        if not self.events:
            return self.host_secs
        start, end = self.events
        return end.secs_since(start)


_Routes = dict[torch.device, tuple[Copier, Hashable]]


class Delivery(NamedTuple):
    """A callback that waits for its values, with the hook and the step that errors name."""

    values: Tree
    callback: Callable[[Tree], object]
    tensors: list[torch.Tensor]
    events: list[DeviceEvent]
    routes: _Routes
    made_by: object
    step: int
    deadline: int  # the number of the run at whose end the callback is called at the latest

    def arrived(self, copies: dict[int, torch.Tensor]) -> Tree:
        """Return the values on the host, given ``copies`` by the id of the original. May block for those without."""
        return map_leaves(functools.partial(_arrived_leaf, copies), self.values)


class Batch(NamedTuple):
    """Deliveries whose values are copied together."""

    deliveries: list[Delivery]
    nbytes: int
    transfers: list[tuple[Transfer, list[torch.Tensor]]]  # with the originals, which must outlive their copies
    pending: list[Pending]
    deadline: int

    def done(self) -> bool:
        """Return whether all values have arrived. Never blocks."""
        return all(part.done() for part in self.pending)

    def wait(self) -> None:
        """Block until all values have arrived."""
        for part in self.pending:
            part.wait()

    def copies(self) -> dict[int, torch.Tensor]:
        """Return the copies of the values, which have arrived, by the ids of the originals."""
        return {
            id(original): copy
            for transfer, originals in self.transfers
            for original, copy in zip(originals, transfer.tensors(), strict=True)
        }


def start_batch(deliveries: list[Delivery], nbytes: int) -> Batch:
    """Start the copies for ``deliveries``, of ``nbytes`` bytes. Never blocks, unless memory has to be pinned first."""
    groups: dict[tuple[torch.device, Hashable], tuple[Copier, dict[int, torch.Tensor]]] = {}
    for delivery in deliveries:
        for tensor in delivery.tensors:
            device = tensor.device
            copier, stream = delivery.routes[device]
            groups.setdefault((device, stream), (copier, {}))[1][id(tensor)] = tensor
    transfers = []
    for (_, stream), (copier, originals) in groups.items():
        tensors = list(originals.values())
        copier.prepare(MAX_BYTES)
        transfers.append((copier.start(tensors, stream), tensors))
    events = [event for delivery in deliveries for event in delivery.events]
    pending: list[Pending] = [*(transfer for transfer, _ in transfers), *events]
    deadline = min(delivery.deadline for delivery in deliveries)
    return Batch(deliveries, nbytes, transfers, pending, deadline)


class Readback:
    """Copies values to the host and passes them to callbacks, in the order of the requests."""

    # It has no lock, because only one thread uses it at a time: for a loop the thread that trains, and for an
    # Arrival the thread to which the Arrival is handed. What all of them share is the copier, which has locks.

    def __init__(self, wake: Callable[[], object] = bool) -> None:
        self._wake = wake  # called when a callback has to wait for its values, to have end_run() called
        self.waiting = False
        """Whether any callback is waiting for its values."""
        self._runs = 0
        self._send_by_run, self._send_by_time = 0, 0.0  # the queued requests are sent once either is reached
        self._queued_bytes = self._bytes = 0  # of queued requests, and of all that have not arrived
        self._queued: list[Delivery] = []
        self._in_flight: deque[Batch] = deque()
        self._arrived: deque[tuple[Delivery, dict[int, torch.Tensor]]] = deque()
        self._delivering: Delivery | None = None
        self._closed = False
        host.prepare(MAX_BYTES)

    def request(
        self,
        values: object,
        callback: Callable[[Tree], object],
        made_by: object = "an unknown caller",
        step: int = 0,
        max_lag_runs: int | None = None,
    ) -> None:
        """Call ``callback(host_values)`` when copies of ``values`` have arrived on the host.

        ``host_values`` has the structure of ``values``, with CPU tensors in place of device tensors and seconds in
        place of a :class:`DeviceDuration`. The values are those at the time of the request: later updates do not reach
        them. If nothing has to be copied from a device, the callback is called at once.

        The callback is called at most ``max_lag_runs`` runs from now, if necessary by blocking for the device at the
        end of that run; 0 is the current run, and ``None`` sets no deadline. The note on an error in the callback names
        ``made_by`` and the global ``step``. Requests that the callback makes inherit both.
        """
        if self._closed:
            raise LifecycleError(
                f"when_ready({values!r}): the loop is closed, so the callback would never be called; make the request "
                "before the loop closes"
            )
        if _all_on_host(values):
            callback(values)
            return
        needs = _Needs()
        values = map_leaves(needs.add, values)
        if not needs.tensors and not needs.events:
            callback(to_host(values) if needs.conversion else values)
            return
        if needs.snapshots:
            values = map_leaves(_snapshot, values)
        if self._delivering is not None:
            made_by, step = self._delivering.made_by, self._delivering.step
        if not self._queued:
            self._send_by_run, self._send_by_time = self._runs + BATCH_RUNS - 1, time.monotonic() + BATCH_SECS
        deadline = _NEVER
        if max_lag_runs is not None:
            deadline = self._runs + max_lag_runs
            # Half of the time is for filling the batch, the other half for the copy to arrive without blocking.
            self._send_by_run = min(self._send_by_run, self._runs + max_lag_runs // 2)
        nbytes = sum(tensor.nbytes for tensor in needs.tensors)
        self._queued_bytes += nbytes
        self._bytes += nbytes
        if self._queued_bytes >= BATCH_BYTES:
            self._send_by_run = self._runs
        routes = _routes_of(needs.tensors)
        self._queued.append(Delivery(values, callback, needs.tensors, needs.events, routes, made_by, step, deadline))
        self.waiting = True
        self._wake()

    @property
    def caller(self) -> object:
        """What made the request whose callback is running, ``made_by``; ``None`` if no callback is."""
        return None if self._delivering is None else self._delivering.made_by

    def end_run(self) -> None:
        """Send the queued requests if it is time, and call the callbacks of what has arrived.

        Called at the end of a run. Blocks only for a request whose deadline is this run, and while more than
        :data:`MAX_BYTES` are waiting.
        """
        if self._queued and (self._runs >= self._send_by_run or time.monotonic() >= self._send_by_time):
            while self._in_flight and self._bytes > MAX_BYTES:  # so that there is memory for the copies
                self._receive()
            self.send()
        while self._in_flight and (self._in_flight[0].done() or self._is_overdue() or self._bytes > MAX_BYTES):
            self._receive()
        # Before the callbacks: the run is over even if one raises, and what they request counts from the next run.
        self._runs += 1
        self._deliver()
        self.waiting = bool(self._queued or self._in_flight)  # after the callbacks, which can make requests

    def drain(self) -> None:
        """Wait for all values, call every callback that is waiting for them, and then raise the errors of callbacks."""
        attempt = Attempts(Exception)
        while self._queued or self._in_flight or self._arrived:
            attempt(self.send)
            while self._in_flight:
                attempt(self._receive)
            attempt(self._deliver)
        self.waiting = False
        attempt.raise_errors("several errors in when_ready callbacks")

    def close(self) -> None:
        """Drain, and refuse further requests."""
        try:
            self.drain()
        finally:
            self._closed = True

    def _is_overdue(self) -> bool:
        return any(self._runs >= batch.deadline for batch in self._in_flight)

    # Each of these removes items from its queue before it handles them, so an error costs only the item that raised it.

    def send(self) -> None:
        """Start the copies of the queued requests. Never blocks."""
        queued, self._queued = self._queued, []
        nbytes, self._queued_bytes = self._queued_bytes, 0
        self._bytes -= nbytes  # until they are in flight: after an error, they are lost
        if queued:
            self._in_flight.append(start_batch(queued, nbytes))
            self._bytes += nbytes

    def _receive(self) -> None:
        """Move the deliveries of the oldest batch to the arrived ones. Blocks if the batch is not done."""
        batch = self._in_flight.popleft()
        self._bytes -= batch.nbytes
        try:
            batch.wait()
            copies = batch.copies()
        except Exception:
            raise
        except BaseException:  # Ctrl-C: it is received by the next call
            self._in_flight.appendleft(batch)
            self._bytes += batch.nbytes
            raise
        self._arrived.extend((delivery, copies) for delivery in batch.deliveries)

    def _deliver(self) -> None:
        while self._arrived:
            delivery, copies = self._arrived.popleft()
            values = delivery.arrived(copies)
            self._delivering = delivery
            try:
                delivery.callback(values)
            except BaseException as error:
                who = f"a when_ready callback of {delivery.made_by}"
                add_note(error, f"torchhooks: in {who}, for step {delivery.step}")
                raise
            finally:
                self._delivering = None


class Arrival:
    """Values of this moment on their way to the host, for another thread to wait for. Copies are queued at once."""

    # The thread that trains creates it, so that the copies precede the next step on the stream. The thread that writes
    # a checkpoint waits for these copies only: the callbacks of hooks stay with the thread that trains.

    def __init__(self, values: object) -> None:
        self._got: list[Tree] = []
        self._readback = Readback()
        self._readback.request(values, self._got.append)
        self._readback.send()
        self.on_host = bool(self._got)
        """Whether all of the values were on the host, so that :meth:`wait` does not block."""

    def wait(self) -> Tree:
        """Block until the values have arrived, and return them, with CPU tensors in place of device tensors."""
        self._readback.drain()
        return self._got[0]


def is_remote(value: object) -> bool:
    """Return whether ``value`` is a tensor on a device, so that reading it would block the host."""
    if not isinstance(value, torch.Tensor):
        return False
    return not host.holds(value)


def to_host(values: object) -> Tree:
    """Return ``values`` with CPU tensors in place of device tensors and seconds in place of times. Blocks."""
    return map_leaves(_leaf_to_host, values)


def _leaf_to_host(value: Tree) -> Tree:
    if isinstance(value, DeviceDuration):
        value.wait()
        return value.secs()
    return host.fetch(value) if is_remote(value) else value


def _arrived_leaf(copies: dict[int, torch.Tensor], leaf: object) -> Tree:
    copy = copies.get(id(leaf))
    return _leaf_to_host(leaf) if copy is None else copy


def _all_on_host(values: Tree) -> bool:
    """Return whether ``values`` can be handed over as they are. A fast path: false if a closer look is needed."""
    parts = [values]
    for part in parts:
        kind = type(part)
        if kind is torch.Tensor:
            if not host.holds(part):
                return False
        elif isinstance(part, tuple):
            parts += part  # extends the list that the loop iterates over
        elif not (part is None or kind is float or kind is int or kind is str or isinstance(part, Leaf)):
            return False
    return True


class _Needs:
    """The copies and waits that the values of one request need. :meth:`add` is called with each leaf."""

    __slots__ = ("conversion", "events", "snapshots", "tensors")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []  # to copy without blocking
        self.events: list[DeviceEvent] = []  # to wait for
        self.conversion = False  # whether to_host() has to convert some leaves
        self.snapshots = False  # whether some leaves may be updated before the callback is called

    def add(self, leaf: Tree) -> Tree:
        if isinstance(leaf, torch.Tensor):
            if not is_remote(leaf):
                self.snapshots = True
            elif _can_copy_async(leaf):
                leaf = _snapshot(leaf)
                self.tensors.append(leaf)
            else:
                self.conversion = self.snapshots = True
        elif isinstance(leaf, DeviceDuration):
            self.conversion = True
            self.events += leaf.events
        elif isinstance(leaf, np.ndarray):
            self.snapshots = True
        return leaf


def _routes_of(tensors: Iterable[torch.Tensor]) -> _Routes:
    """Return the copier and the current stream for each device of ``tensors``."""
    # Looked up for every request: its snapshots were queued on these streams, and only copies on the same streams
    # follow them. The batch may be sent later, when other streams are current.
    routes: _Routes = {}
    for tensor in tensors:
        device = tensor.device
        if device not in routes:
            copier = host.copier(device.type)
            assert copier is not None  # otherwise, the tensor is not copied without blocking
            routes[device] = copier, copier.stream(device)
    return routes


def _can_copy_async(tensor: torch.Tensor) -> bool:
    # Tensors of other layouts, and subclasses that wrap several tensors, have no single block of memory to copy.
    return (
        host.copier(tensor.device.type) is not None
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    )


def _snapshot(leaf: object) -> Tree:
    """Return ``leaf``, or a copy of it if the step, a hook or the caller may update it in place."""
    return leaf if isinstance(leaf, torch.Tensor) and is_snapshot(leaf) else copied(leaf)
