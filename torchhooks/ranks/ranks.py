"""Which of several processes this one is, and how they reach each other.

The only module that knows ``torch.distributed``, including its private parts. It is not imported before it is needed.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import ctypes
import datetime
import faulthandler
import os
import pickle
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import torch

from torchhooks.common.checks import seconds
from torchhooks.common.errors import LifecycleError, PeerError, TorchHooksError, brief
from torchhooks.common.log import logger, speak_as
from torchhooks.common.text import call_repr, shown
from torchhooks.ranks.agreement import Pace

_FIRST_POLL_SECS, _LONGEST_POLL_SECS = 0.0002, 0.005
_TEXT_BYTES = 1000
_MISSING_SECS = 2.0
_STUCK_EXIT_CODE = 70
_TOLD = "_torchhooks_told"  # the name of an attribute of errors


class ContactLostError(TorchHooksError):
    """A tick did not arrive: a rank is gone, or does not answer. Becomes a PeerError."""


class Transport(Protocol):
    """How the ranks of one loop reach each other."""

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """Return the ``numbers`` of all ranks, in their order.

        Raises:
            ContactLostError: a rank did not answer.
        """
        ...

    def exchange_text(self, text: str) -> list[str]:
        """Return the ``text`` of all ranks, at most 1,000 bytes of it."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of all ranks; in the training thread."""
        ...

    def for_saving(self) -> Transport:
        """Return a transport whose :meth:`gather` is for the thread that writes checkpoints; on every rank."""
        ...

    def missing(self) -> list[int]:
        """Return the ranks that do not answer, as far as that can be found out."""
        ...

    def abort(self) -> bool:
        """Try to make blocked communication of the training thread fail; return whether there is a way."""
        ...


class OtherPurposeError(LifecycleError):
    """The ranks gathered values for different purposes."""


class Ranks:
    """The processes that train one model together, as ``torchrun`` starts them.

    A :class:`torchhooks.MonitoredLoop` creates one by itself. Create one to change a period, and pass it as ``ranks``.
    Hooks find it in ``session.ranks``.

    >>> ranks = Ranks(lost_after_secs=300)
    >>> with MonitoredLoop(step, model, optimizer, ranks=ranks) as loop:
    ...     loss = loop.run(batches[0])
    >>> ranks.rank, ranks.size, ranks.is_chief  # in a process that is alone
    (0, 1, True)

    Args:
        tick_secs: how often the ranks exchange a few numbers, in seconds.
        lost_after_secs: after how many seconds without an answer a rank counts as lost. It has to be longer than any
            call on any rank that keeps Python's global lock.
        stuck_secs: how long a process may stay in a call after another rank has failed, before it is ended with exit
            code 70.
        join_secs: how long to wait for the other ranks when the loop is created, in seconds.

    Raises:
        ValueError: an argument is not a number of seconds, 0 or more.
    """

    rank: int = 0
    """The number of this process, from 0 on."""
    size: int = 1
    """The number of processes."""

    def __init__(
        self,
        *,
        tick_secs: float = 0.1,
        lost_after_secs: float = 60.0,
        stuck_secs: float = 30.0,
        join_secs: float = 600.0,
    ) -> None:
        self.tick_secs = seconds(tick_secs, "tick_secs")
        self.lost_after_secs = seconds(lost_after_secs, "lost_after_secs")
        self.stuck_secs = seconds(stuck_secs, "stuck_secs")
        self.join_secs = seconds(join_secs, "join_secs")
        self.hooks_of_some: list[object] = []
        """The hooks of this rank's loop that not every rank has."""
        self.gathered_for = ""
        """What the values that are being gathered are for, in parentheses after a space; empty if nothing is known."""
        self.pace: Pace | None = None
        """On the chief, how far the ranks are in comparison; ``None`` elsewhere, and in a loop of one process."""
        self._transport: Transport | None = None
        self._saving: tuple[Transport, Ranks] | None = None
        self.gatherings = 0
        """How many times :meth:`gather` was called with several ranks."""
        self.locate()

    def locate(self) -> None:
        """Set ``rank`` and ``size`` to those of the default process group, if there is one by now."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    @property
    def is_chief(self) -> bool:
        """Whether this process is rank 0, the one that writes and reports."""
        return self.rank == 0

    @property
    def may_have_dtensors(self) -> bool:
        """Whether a value may be a ``DTensor``, as under FSDP2, which one rank alone can use too."""
        distributed = sys.modules.get("torch.distributed")
        if self.size > 1 or distributed is None or "torch.distributed.tensor" not in sys.modules:
            return self.size > 1
        # Not with ranks=False, where the other ranks take no part in making a tensor whole.
        return bool(distributed.is_initialized() and distributed.get_world_size() == 1)

    @property
    def is_connected(self) -> bool:
        """Whether a loop has connected several ranks, so that :meth:`gather` communicates."""
        return self._transport is not None

    def gather(self, value: Any, purpose: str = "a hook") -> list[Any]:
        """Return the ``value`` of every rank, in the order of the ranks.

        Every rank has to call this, in the training thread, at the same point between two steps. The values are
        pickled. With one process, the list has one item.

        Args:
            value: any picklable object.
            purpose: what the values are for, the same text on all ranks.

        Raises:
            PeerError: a rank failed, left or does not answer.
            LifecycleError: ranks gather for different purposes. All of them raise it.
        """
        if self._transport is None:
            return [value]
        self.gatherings += 1
        rows = self._transport.gather((purpose, value))
        for rank, (theirs, _) in enumerate(rows):
            if theirs != purpose:
                raise OtherPurposeError(
                    f"rank {self.rank} gathers values for {purpose}, and rank {rank} for {theirs}: call Ranks.gather "
                    "in the same order on all ranks, or look for an earlier error on one of them"
                )
        return [each for _, each in rows]

    def for_saving(self) -> Ranks:
        """Return ranks for the thread that writes checkpoints. Every rank has to call this, in the training thread."""
        if self._transport is None:
            return self
        if self._saving is None or self._saving[0] is not self._transport:  # that of an earlier loop
            saving = copy.copy(self)
            saving._transport = self._transport.for_saving()  # noqa: SLF001 - its own class
            self._saving = self._transport, saving
        return self._saving[1]

    def gather_on_device(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]] | None:
        """Return ``tensors``, all of one device, of every rank, without waiting for the device.

        One call of the default process group's ``all_gather``. ``None`` if the tensors are on the CPU, or if that group
        does not serve their device. Every rank has to call this as it has to call :meth:`gather`.
        """
        distributed = sys.modules.get("torch.distributed")
        kind = tensors[0].device.type
        if kind == "cpu" or distributed is None or not distributed.is_initialized():
            return None
        if f"{kind}:" not in str(distributed.get_backend_config()):
            return None
        return all_gather(tensors, self.size)

    def connect(self, failure: Callable[[], TorchHooksError | None]) -> Transport:
        """Reach the other ranks; each of them has to call this. ``failure()`` says why not to wait for one any more.

        Raises:
            LifecycleError: they did not all do so within ``join_secs``.
        """
        self._transport = _GlooTransport(self, failure)
        _connected.append(self)
        speak_as(self.rank)
        return self._transport

    def disconnect(self) -> None:
        """Called when the loop is closed: this process logs as for the newest loop that is left, or like any other."""
        if self in _connected:
            _connected.remove(self)
        speak_as(_connected[-1].rank if _connected else 0)

    def __repr__(self) -> str:
        return call_repr(
            self,
            tick_secs=self.tick_secs,
            lost_after_secs=self.lost_after_secs,
            stuck_secs=self.stuck_secs,
            join_secs=self.join_secs,
        )


_connected: list[Ranks] = []
"""Those of the loops that are not closed, in the order in which they were created."""


def checked_ranks(given: Any) -> Ranks:
    """Return the Ranks that a loop uses, for its ``ranks`` argument.

    Raises:
        TypeError: ``given`` is neither ``None``, False nor a Ranks.
    """
    if given is not None and given is not False and not isinstance(given, Ranks):
        raise TypeError(f"ranks={shown(given)}: give a Ranks, False for a loop of this process alone, or None")
    ranks = given if isinstance(given, Ranks) else Ranks()
    ranks.locate()  # the process group may be newer than ``given``
    if given is False:
        ranks.rank, ranks.size = 0, 1
    return ranks


def is_communication_error(error: BaseException) -> bool:
    """Return whether ``error`` is of a kind that torch.distributed raises when another rank is gone."""
    distributed = sys.modules.get("torch.distributed")
    kinds = (getattr(distributed, "DistError", PeerError), PeerError)
    return (type(error) is RuntimeError and not hasattr(error, _TOLD)) or isinstance(error, kinds)


def mark_as_told(error: BaseException) -> None:
    """Note that the other ranks know of ``error``, which therefore is no consequence of lost contact with them."""
    with contextlib.suppress(Exception):  # some classes forbid it
        setattr(error, _TOLD, True)


def end_process(reason: str) -> None:
    """End this process with exit code 70, because nothing in Python gets its training thread out of a blocked call."""
    logger.critical("%s: ending this process with code %d; stderr has the stacks", reason, _STUCK_EXIT_CODE)
    faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
    os._exit(_STUCK_EXIT_CODE)


class _GlooTransport:
    """Two gloo groups of this loop alone: for the ticks, and for the training thread.

    A group serves one thread only. Both survive the script's ``destroy_process_group()``, because torch does not know
    them, and their keys in the store are new in every process, so that those of an earlier attempt do no harm.
    """

    def __init__(self, ranks: Ranks, failure: Callable[[], TorchHooksError | None]) -> None:
        self._ranks = ranks
        self._failure = failure
        self._size = ranks.size
        deadline = time.monotonic() + ranks.join_secs
        try:
            token = _broadcast_token(deadline)
            self._ticks, self._training, self._store = _create_groups(token, ranks, deadline)
        except (RuntimeError, ContactLostError) as error:
            raise LifecycleError(
                f"rank {ranks.rank} created a MonitoredLoop, but not every one of the {self._size} ranks did so within "
                f"{ranks.join_secs:g} s: create it on every rank, or pass ranks=False for a loop of one process alone "
                f"({brief(error)})"
            ) from error

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64)
        return [row.tolist() for row in self._gather(self._ticks, mine, self._lost)]

    def exchange_text(self, text: str) -> list[str]:
        data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        rows = self._gather(self._ticks, torch.frombuffer(bytearray(data), dtype=torch.uint8), self._lost)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows]

    def gather(self, value: Any) -> list[Any]:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        try:
            sizes = [int(row) for row in self._gather(self._training, torch.tensor([len(data)]), self._interrupted)]
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(data)] = data
            rows = self._gather(self._training, padded, self._interrupted)
        except ContactLostError as error:
            end = time.monotonic() + self._ranks.lost_after_secs
            while time.monotonic() < end:  # the ticks will find out which rank it was
                self._interrupted(0.0)
                _pause(_LONGEST_POLL_SECS)
            raise PeerError(f"another rank did not take part in Ranks.gather: {error}", reason=str(error)) from error
        return [pickle.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)]

    def for_saving(self) -> Transport:
        another = copy.copy(self)
        another._training = _create_group("saving", self._store, self._ranks, time.monotonic() + self._ranks.join_secs)  # noqa: SLF001 - its own class
        return another

    def missing(self) -> list[int]:
        """Write a key of this rank into the store, and return the ranks that have not written theirs after a while.

        In a thread, because the store may be in a process that does not answer.
        """
        here: list[int] = []

        def ask() -> None:
            self._store.set(f"here/{self._ranks.rank}", "1")
            end = time.monotonic() + _MISSING_SECS
            while time.monotonic() < end and len(here) < self._size:
                here[:] = [rank for rank in range(self._size) if self._store.check([f"here/{rank}"])]
                _pause(0.05)

        thread = threading.Thread(target=_quietly, args=(ask,), daemon=True)
        thread.start()
        thread.join(2 * _MISSING_SECS)
        if not here and self._size == 2:
            return [1 - self._ranks.rank]
        return [rank for rank in range(self._size) if rank not in here] if here else []

    def abort(self) -> bool:
        """Abort NCCL's groups, which frees a blocked call. Gloo has no way."""
        distributed = sys.modules["torch.distributed"]
        abort = getattr(distributed.distributed_c10d, "_abort_process_group", None)
        if abort is None or not distributed.is_initialized() or "nccl" not in str(distributed.get_backend_config()):
            return False
        _quietly(abort)
        return True

    def _gather(self, group: Any, mine: torch.Tensor, lost: Callable[[float], None]) -> list[torch.Tensor]:
        """Return the tensors of all ranks, waiting without holding anything that the interpreter needs to exit."""
        rows = [torch.zeros_like(mine) for _ in range(self._size)]
        _pause(0.0)
        try:
            work, began = group.allgather([rows], [mine], _without_timeout()), time.monotonic()
            pause = _FIRST_POLL_SECS
            while not work.is_completed():
                _pause(pause)
                pause = min(2 * pause, _LONGEST_POLL_SECS)
                try:
                    lost(time.monotonic() - began)
                except BaseException:
                    _keep_for_ever(group)
                    raise
            work.wait()
        except RuntimeError as error:
            if isinstance(error, TorchHooksError):
                raise
            raise ContactLostError(brief(error).partition(". This is typically")[0]) from error
        return rows

    def _lost(self, secs: float) -> None:
        if secs > self._ranks.lost_after_secs:
            raise ContactLostError(f"no answer for {self._ranks.lost_after_secs:g} s")

    def _interrupted(self, secs: float) -> None:
        """Raise the failure of another rank: the one that is awaited may be it."""
        failure = self._failure()
        if failure is not None:
            raise failure


def all_gather(tensors: list[torch.Tensor], size: int, group: Any = None) -> list[list[torch.Tensor]]:
    """Return ``tensors`` of the ``size`` ranks of ``group``, by default the default process group.

    They are sent as bytes in one call, and have the same shapes and dtypes on all of its ranks.
    """
    pieces = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    data = torch.cat(pieces)
    rows = [torch.empty_like(data) for _ in range(size)]
    torch.distributed.all_gather(rows, data, group=group)
    lengths = [piece.numel() for piece in pieces]

    def read(row: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(row.split(lengths), tensors, strict=True)
        # Cloned, because a part may begin where no element of its dtype can.
        return [part.clone().view(each.dtype).reshape(each.shape) for part, each in parts]

    return [read(row) for row in rows]


def _keep_for_ever(group: Any) -> None:
    """Never free ``group``, because freeing it would wait for its call in progress, which may never return."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _without_timeout() -> Any:
    """Return options for a call whose end is decided here, and not by the timeout with which its group was created."""
    c10d: Any = torch.distributed.distributed_c10d
    options = c10d.AllgatherOptions()
    options.timeout = datetime.timedelta(days=30)
    return options


def _broadcast_token(deadline: float) -> str:
    """Return a text that is the same on all ranks, and new."""
    distributed = torch.distributed
    device = "cpu" if "cpu" in str(distributed.get_backend_config()) else torch.get_default_device()
    if device != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    token = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8, device=device)
    work = distributed.broadcast(token, src=0, async_op=True)
    while not work.is_completed():
        _pause(_FIRST_POLL_SECS)
        if time.monotonic() > deadline:
            raise ContactLostError("no answer")
    work.wait()
    return bytes(token.tolist()).hex()


def _create_groups(token: str, ranks: Ranks, deadline: float) -> tuple[Any, Any, Any]:
    """Return the group of the ticks, that of the training thread, and a part of the store of their own."""
    c10d = torch.distributed.distributed_c10d
    store = c10d.PrefixStore(f"torchhooks/{token}", c10d._get_default_store())  # noqa: SLF001 - torch's only way to it
    atexit.register(_park, os.getpid())
    ticks, training = (_create_group(name, store, ranks, deadline) for name in ("ticks", "training"))
    return ticks, training, store


def _create_group(name: str, store: Any, ranks: Ranks, deadline: float) -> Any:
    c10d = torch.distributed.distributed_c10d
    timeout = datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.1))
    if hasattr(c10d, "ProcessGroupGloo"):
        return c10d.ProcessGroupGloo(c10d.PrefixStore(name, store), ranks.rank, ranks.size, timeout)
    # A torch whose private names have changed.
    return torch.distributed.new_group(backend="gloo", timeout=timeout)  # pragma: no cover


_exiting = threading.Event()


def _pause(secs: float) -> None:
    """Sleep, or forever if the interpreter is exiting.

    A daemon thread that then returns from a call of torch's to Python would end the process with SIGABRT.
    """
    time.sleep(secs)
    while _exiting.is_set() and threading.current_thread() is not threading.main_thread():
        time.sleep(3600)


def _park(pid: int) -> None:
    """Let the threads of this process sleep before it exits. A forked process has none of them."""
    if os.getpid() == pid and not _exiting.is_set():
        _exiting.set()
        time.sleep(4 * _LONGEST_POLL_SECS)


def _quietly(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception as error:
        logger.debug("while looking for the ranks that are missing", exc_info=error)
