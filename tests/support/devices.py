"""A device that the CPU stands for, and an audit of the operations that block the host."""

from __future__ import annotations

import functools
import sys
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchhooks.device import accelerator, readback
from torchhooks.device.accelerator import pack, unpack
from torchhooks.device.host import Host, host
from torchhooks.device.readback import Batch, Delivery, Elapsed, Readback, is_remote
from torchhooks.fetches.fetch import Evaluator
from torchhooks.loop.schedule import ScheduledHook
from torchhooks.loop.session_creator import SessionCreator
from torchhooks.position import items
from torchhooks.position.progress import Progress


class FakeDevice:
    """A context manager in which CPU tensors are read back as from a device whose copies take ``lag`` runs.

    It tests, without a GPU, whether a hook copes with values that arrive late:

    >>> from support.devices import FakeDevice
    >>> from torchhooks.testing import trace
    >>> with FakeDevice(lag=2) as device:
    ...     seen = trace(NanTensorHook("loss", fail_on_nan_loss=False), losses=[1, float("nan"), 1, 1, 1])
    loss is NaN at step 2: training stops
    >>> seen.steps, device.waits  # stopped two runs later; the host waited once, when the loop closed
    ([1, 2, 3, 4], 1)

    Work can be queued on several streams: see :meth:`on_stream`. A copy has the values of the moment at which it was
    started, even if the tensor is updated before it completes. What has arrived on the host, such as the values of a
    ``when_ready`` callback, is an ordinary CPU tensor.

    Args:
        lag: the number of runs in which work that starts now is polled before it is done.
        speed: seconds that pass on the device's clock for each second of ``time.monotonic()``.

    Attributes:
        copies: how many tensors were copied.
        batches: how many batches of copies were started.
        streams: the name of the stream on which each batch was copied, see :meth:`on_stream`.
        allocations: the sizes, in bytes, of the memory on the host that was allocated for copies.
        waits: how many times the thread that entered the device waited for work that was not done.
        waits_elsewhere: the same of other threads, such as threads that write checkpoints.
        progress: how far the device is, in runs. Each poll that finds unfinished work advances it by one, because a run
            that finds its oldest work unfinished polls nothing else.
    """

    def __init__(self, lag: int = 1, speed: float = 1.0) -> None:
        self.lag = lag
        self.speed = speed
        self.copies = self.batches = self.waits = self.waits_elsewhere = self.progress = 0
        self._thread = threading.get_ident()
        self.on_wait: Callable[[str], object] | None = None
        """Called at each wait of any thread, with what it is for."""
        self.streams: list[Hashable] = []
        self.allocations: list[int] = []
        self._stream = "default"
        self._stream_lag: int | None = None
        self._entered: list[AbstractContextManager[None]] = []

    @contextmanager
    def on_stream(self, name: str, lag: int | None = None) -> Iterator[None]:
        """Queue work on the stream ``name`` in this ``with`` block, like ``torch.cuda.stream``.

        Args:
            name: any name; outside of the block the stream is ``"default"``.
            lag: the lag of events that are recorded on the stream, if it differs from the device's.
        """
        before = self._stream, self._stream_lag
        self._stream, self._stream_lag = name, lag
        try:
            yield
        finally:
            self._stream, self._stream_lag = before

    # The methods of a Copier:

    def prepare(self, nbytes: int) -> None:
        """Do nothing: copies need no memory that is allocated before."""

    def memory(self, nbytes: int) -> torch.Tensor:
        self.allocations.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def stream(self, device: torch.device) -> Hashable:
        return self._stream

    def start(self, tensors: Sequence[torch.Tensor], stream: Hashable) -> _FakeTransfer:
        self.batches += 1
        self.copies += len(tensors)
        self.streams.append(stream)
        return _FakeTransfer(self, self.lag, tensors)

    def event(self, device: torch.device) -> _FakeEvent:
        return _FakeEvent(self, self.lag if self._stream_lag is None else self._stream_lag)

    moment = event

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        self.note_wait("a tensor that is read at once")
        return _on_host(tensor.detach().clone())

    def note_wait(self, what: str) -> None:
        """Count a wait of the current thread for ``what``."""
        if self.on_wait is not None:
            self.on_wait(f"a wait for {what}")
        if threading.get_ident() == self._thread:
            self.waits += 1
        else:
            self.waits_elsewhere += 1

    def __enter__(self) -> FakeDevice:
        self._thread = threading.get_ident()
        simulation = host.simulating("cpu", self, _is_on_fake_host)
        simulation.__enter__()
        self._entered.append(simulation)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.pop().__exit__(*exc_info)

    def __repr__(self) -> str:
        return f"FakeDevice(lag={self.lag}, speed={self.speed})"


class _FakeEvent:
    what = "an event"

    def __init__(self, device: FakeDevice, lag: int) -> None:
        self._device = device
        self._done_at = device.progress + lag
        self.secs = time.monotonic() * device.speed

    def done(self) -> bool:
        if self._device.progress >= self._done_at:
            return True
        self._device.progress += 1
        return False

    def wait(self) -> None:
        if self._device.progress < self._done_at:
            self._device.note_wait(self.what)
            self._device.progress = self._done_at

    def secs_since(self, earlier: _FakeEvent) -> float:
        if self._device.progress < max(self._done_at, earlier._done_at):
            raise RuntimeError("the device has not reached both events")  # like CUDA's error "device not ready"
        return self.secs - earlier.secs


class _FakeTransfer(_FakeEvent):
    what = "copies"

    def __init__(self, device: FakeDevice, lag: int, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(device, lag)
        self._packed = [(indexes, packed.clone()) for indexes, packed in pack(tensors)]

    def tensors(self) -> list[torch.Tensor]:
        return [_on_host(tensor) for tensor in unpack(self._packed)]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor.is_on_fake_host = True  # type: ignore[attr-defined]
    return tensor


def _is_on_fake_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and hasattr(tensor, "is_on_fake_host")


class Sync(NamedTuple):
    """An operation that blocked the host on a device, or would have blocked it on a GPU. See :func:`sync_audit`.

    >>> from support.devices import Sync
    >>> print(Sync(NanTensorHook("loss"), "after_run", 3, "aten.equal"))
    NanTensorHook('loss') in after_run at step 3: aten.equal

    Args:
        hook: the hook of the loop that made the operation, or whose fetch did. What a hook calls, such as another hook,
            is part of its method.
        method: the hook's method; ``"fetch"`` for what it asked for in ``before_run``; ``"Due.when"``;
            ``"when_ready"`` for a value that was waited for at the deadline that the hook set; ``"after_item"`` for
            what the hook did between two items of ``until_stop``.
        step: the global step at that moment.
        operation: the name of the operator or function, torch's warning on a GPU, or what was waited for.
    """

    hook: object
    method: str
    step: int
    operation: str

    def __str__(self) -> str:
        return f"{self.hook!r} in {self.method} at step {self.step}: {self.operation}"


@contextmanager
def sync_audit(device: str | None = None) -> Iterator[list[Sync]]:
    """List every operation of a hook or a fetch that would block the host on a GPU, with its hook, method and step.

    >>> from support.devices import sync_audit
    >>> class Report(SessionRunHook):
    ...     def before_run(self, run_context):
    ...         return SessionRunArgs("loss")
    ...     def after_run(self, run_context, run_values):
    ...         self.loss = run_values.results.item()
    ...     def __repr__(self):
    ...         return "Report()"
    >>> with sync_audit("cpu") as syncs, MonitoredLoop(step, model, optimizer, hooks=[Report()]) as loop:
    ...     loss = loop.run(batches[0])
    >>> print(*syncs, sep="\\n")
    Report() in after_run at step 1: ...

    On CUDA, torch reports the operators and copies that synchronize (``torch.cuda.set_sync_debug_mode``). On other
    accelerators, the audit looks at the operators itself: ``item()``, ``nonzero()``, indexing with a mask and the like,
    and copies between the device and the host that block, such as ``cpu()`` and ``tolist()``. Without an accelerator,
    it runs on a :class:`FakeDevice` and lists the operators that would synchronize. There it does not see ``cpu()``,
    ``numpy()`` and ``tolist()``, which read memory without an operator.

    On all, the audit lists calls of ``synchronize()`` of ``torch.accelerator``, ``torch.Event``, ``torch.Stream`` and
    their counterparts in ``torch.cuda``, and of ``Tensor.pin_memory()``, the pinned memory that torchhooks allocates,
    and the waits of torchhooks itself: for a value whose deadline has come, and for everything that is pending before a
    checkpoint is saved.

    It does not see ``torch.empty(..., pin_memory=True)`` on a device, waits inside of C++ extensions, and allocations
    for which a device itself waits. It sees only the thread that runs the hook. It does not list operations of
    the step, operations of ``when_ready`` callbacks, whose values are on the host, and the wait for pending values when
    the loop closes.

    Args:
        device: the type of the accelerator, such as ``"cuda"``, or ``"cpu"``, for a test that has to do the same on
            every machine. The default is the accelerator if there is one, else ``"cpu"``.

    Raises:
        ValueError: ``device`` is something else.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = "cpu" if accelerator is None else accelerator.type
    if device not in (None, "cpu", available):
        choice = "None or 'cpu'" if accelerator is None else f"None, {available!r} or 'cpu'"
        raise ValueError(f"sync_audit(device={device!r}): on this machine, give {choice}")
    syncs: list[Sync] = []
    calls = _Calls()

    def note(operation: str) -> None:
        if (sync := calls.attribute(operation)) is not None:
            syncs.append(sync)

    with _followed(calls), _waiting_functions(note):
        if (device or available) == "cuda":
            with _cuda_syncs(note):
                yield syncs
        elif (device or available) != "cpu":
            with _SyncingOperators(note, is_remote), _BlockingCopies(note):
                yield syncs
        else:
            with (
                nullcontext() if host.copier("cpu") else FakeDevice(),
                _waits_for_fake(note),
                _SyncingOperators(note, torch.is_tensor),
            ):
                yield syncs


@contextmanager
def _waits_for_fake(note: Callable[[str], None]) -> Iterator[None]:
    fake: Any = host.copier("cpu")  # a FakeDevice: nothing else pretends that a CPU is a device
    before, fake.on_wait = fake.on_wait, note
    try:
        yield
    finally:
        fake.on_wait = before


_FUNCTIONS: list[tuple[Any, str, str]] = [
    (torch.cuda, "synchronize", "torch.cuda.synchronize"),
    (torch.cuda.Event, "synchronize", "torch.cuda.Event.synchronize"),
    (torch.cuda.Stream, "synchronize", "torch.cuda.Stream.synchronize"),
    (torch.accelerator, "synchronize", "torch.accelerator.synchronize"),
    (torch.Tensor, "pin_memory", "Tensor.pin_memory"),
    (accelerator, "pinned", "an allocation of pinned memory"),
]
"""Functions that wait for a device, or may, and that torch's debug mode does not report: owner, attribute, name."""


@contextmanager
def _waiting_functions(note: Callable[[str], None]) -> Iterator[None]:
    """Call ``note`` for each call of one of ``_FUNCTIONS``."""
    with ExitStack() as stack:
        for owner, attribute, name in _FUNCTIONS:
            stack.enter_context(_replaced(owner, attribute, _noting(getattr(owner, attribute), name, note)))
        stack.enter_context(_profiled(note))
        yield


@contextmanager
def _profiled(note: Callable[[str], None]) -> Iterator[None]:
    """Call ``note`` for each call of ``synchronize()`` of the classes whose attributes cannot be replaced."""
    before = sys.getprofile()

    def profile(frame: Any, event: Any, argument: Any) -> None:
        if event == "c_call" and argument.__name__ == "synchronize":
            kind = type(argument.__self__)
            if kind in (torch.Event, torch.Stream):
                note(f"torch.{kind.__name__}.synchronize")
        if before is not None:
            before(frame, event, argument)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


_INHERITED: Any = object()


@contextmanager
def _replaced(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a class or a module in this ``with`` block."""
    before = vars(owner).get(attribute, _INHERITED)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        if before is _INHERITED:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, before)


def _noting(function: Callable[..., Any], name: str, note: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        note(name)
        return function(*args, **kwargs)

    return noting


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


_SYNCING = (
    *("_local_scalar_dense", "allclose", "equal", "is_nonzero", "nonzero", "masked_select", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
)


class _SyncingOperators(TorchDispatchMode):
    """Calls ``note`` for each operator that blocks the host, or would, if ``is_there`` says where its tensor is."""

    def __init__(self, note: Callable[[str], None], is_there: Callable[[Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note, self._is_there = note, is_there

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if (name in _SYNCING or _indexes_with_mask(name, args)) and self._is_there(args[0]):
            self._note(f"aten.{name}")
        return func(*args, **(kwargs or {}))


class _BlockingCopies(TorchDispatchMode):
    """Calls ``note`` for each copy between a device and the host that blocks the host."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "lift_fresh" and is_remote(result):  # what torch.tensor() calls last
            self._note(f"a copy from cpu to {result.device}")
        elif name in ("_to_copy", "copy_") and not (args[-1] is True or (kwargs or {}).get("non_blocking")):
            source = args[0] if name == "_to_copy" else args[1]
            if is_remote(source) != is_remote(result):
                self._note(f"a copy from {source.device} to {result.device}")
        return result


def _indexes_with_mask(name: str, args: Sequence[Any]) -> bool:
    """Return whether this operator blocks the host to learn how many elements a mask selects."""
    if name not in ("index", "index_put", "index_put_") or (name != "index" and args[2].dim() == 0):
        return False  # writing a single number to a mask does not need to know how many elements there are
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


# -- which hook an operation is attributed to --------------------------------------------------------------------------


class _HookCall(NamedTuple):
    """A call of a hook's method, or of something else that the hook has the loop do."""

    hook: object
    method: str
    progress: Progress


class _Wait(NamedTuple):
    """A wait of torchhooks for a device; for the values of ``delivery``, if that is known."""

    delivery: Delivery | None = None


class _Callback(NamedTuple):
    """A call of a ``when_ready`` callback: of ``delivery``, unless its values were on the host at once."""

    delivery: Delivery | None = None


class _EndOfRun(NamedTuple):
    """The point at which the loop makes the ``when_ready`` callbacks of a run."""


class _Calls(threading.local):
    """What torchhooks is calling in the current thread."""

    def __init__(self) -> None:
        self.open: list[_HookCall | _Wait | _Callback | _EndOfRun] = []
        """The calls that have not returned, the innermost last."""
        self._last: dict[int, _HookCall] = {}  # by the id of the hook

    def of_hook(self, scheduled: ScheduledHook, method: str) -> _HookCall:
        """Return the call of ``method`` for the hook in ``scheduled``."""
        call = self._last[id(scheduled.hook)] = _HookCall(scheduled.hook, method, scheduled.progress)
        return call

    def after_item(self, who: object) -> _HookCall | None:
        """Return the call for ``who`` between two items; ``None`` if nothing of its loop was called before."""
        known = self._last.get(id(who)) or next(reversed(self._last.values()), None)
        return None if known is None else _HookCall(who, "after_item", known.progress)

    def attribute(self, operation: str) -> Sync | None:
        """Return a :class:`Sync` for ``operation``; ``None`` if it is of no hook and no fetch."""
        waits, delivery = False, None
        for call in reversed(self.open):
            match call:
                case _HookCall(hook, method, progress):
                    return Sync(hook, method, progress.global_step, operation)
                case _Wait(of):
                    waits, delivery = True, delivery or of
                case _Callback() if not waits:
                    return None  # the values of a callback are on the host
                case _Callback(of):
                    delivery = delivery or of
                case _EndOfRun():
                    return delivery and Sync(delivery.made_by.hook, "when_ready", delivery.step, operation)
        return None


@contextmanager
def _followed(calls: _Calls) -> Iterator[None]:
    """Keep ``calls`` up to date in this ``with`` block."""

    def of_fetch(evaluator: Evaluator, fetch: Any, requester: object) -> _HookCall | None:
        # What a hook evaluates by itself, with session.run(), is part of the method in which it does so.
        return calls.of_hook(requester, "fetch") if isinstance(requester, ScheduledHook) else None

    functions: list[tuple[Any, str, Callable[..., Any]]] = [
        (SessionCreator, "call", lambda sessions, scheduled, name, *_: calls.of_hook(scheduled, name)),
        (ScheduledHook, "ask", lambda scheduled, runs: calls.of_hook(scheduled, "next_due")),
        (ScheduledHook, "catch_up", lambda scheduled, runs: calls.of_hook(scheduled, "sat_out")),
        (Evaluator, "evaluate", of_fetch),
        (Evaluator, "evaluate_uncopied", of_fetch),
        (items, "make_call", lambda who, call: calls.after_item(who)),
        (Readback, "end_run", lambda _: _EndOfRun()),
        (Readback, "request", lambda *_, **__: _Callback()),  # calls back at once if the values are on the host
        (readback, "start_batch", lambda deliveries, nbytes: _Wait(_most_urgent(deliveries))),
        (Batch, "wait", lambda batch: _Wait(_most_urgent(batch.deliveries))),
        (Batch, "copies", lambda batch: _Wait(_most_urgent(batch.deliveries))),
        (Delivery, "arrived", lambda delivery, copies: _Wait(delivery)),
        (Delivery, "call_back", lambda delivery, values: _Callback(delivery)),
        (Host, "fetch", lambda host, tensor: _Wait()),
        (Elapsed, "wait", lambda elapsed: _Wait()),
    ]
    with ExitStack() as stack:
        for owner, name, call_of in functions:
            stack.enter_context(_replaced(owner, name, _following(getattr(owner, name), call_of, calls)))
        for attribute, method in ("before_run", "before_run"), ("after_run", "after_run"), ("when", "Due.when"):
            stack.enter_context(_replaced(ScheduledHook, attribute, _FollowedAttribute(attribute, method, calls)))
        yield


def _most_urgent(deliveries: list[Delivery]) -> Delivery:
    return min(deliveries, key=lambda delivery: delivery.deadline)


def _following(function: Callable[..., Any], call_of: Callable[..., Any], calls: _Calls) -> Callable[..., Any]:
    """Return ``function``, with ``call_of`` its arguments among the open ``calls`` until it returns."""

    @functools.wraps(function)
    def followed(*args: Any, **kwargs: Any) -> Any:
        call = call_of(*args, **kwargs)
        if call is None:
            return function(*args, **kwargs)
        calls.open.append(call)
        try:
            return function(*args, **kwargs)
        finally:
            calls.open.pop()

    return followed


class _FollowedAttribute:
    """A descriptor for an attribute of ScheduledHook, a function of the hook: the loop gets a followed function."""

    def __init__(self, name: str, method: str, calls: _Calls) -> None:
        self._name, self._method, self._calls = name, method, calls

    def __get__(self, scheduled: ScheduledHook, owner: type[ScheduledHook]) -> Any:
        function = vars(scheduled)[self._name]
        if function is None:
            return None
        return _following(function, lambda *_: self._calls.of_hook(scheduled, self._method), self._calls)

    def __set__(self, scheduled: ScheduledHook, function: Any) -> None:
        vars(scheduled)[self._name] = function
