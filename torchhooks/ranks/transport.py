"""How the ranks of one loop reach each other: with gloo.

Only this module uses private parts of ``torch.distributed`` to communicate. That package is not imported before it is
needed: a process that is alone never creates a :class:`GlooTransport`.

Three threads of a process can be in calls of a transport at once: the thread of the ticks, the training thread, and the
thread that writes checkpoints. A gloo group matches the calls of its ranks by their order alone, so each of the three
threads has a group of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import ctypes
import datetime
import os
import pickle
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchhooks.common.errors import LifecycleError, PeerError, TorchHooksError, brief
from torchhooks.common.log import logger

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

T = TypeVar("T")

# About the time of an exchange between processes of one machine. The pause doubles from poll to poll, so that a thread
# that waits for long uses little of a core, up to a time that is short against a tick and against a step.
_FIRST_POLL_SECS, _LONGEST_POLL_SECS = 0.0002, 0.005

# One call without an exchange of the lengths first. Enough for the first lines of an error, without its traceback.
_TEXT_BYTES = 1000

# The ranks that are alive lose contact within milliseconds of each other, because the connections of all break.
_MISSING_SECS = 2.0

# A call may end long after its group was created, whose timeout would end it: a rank that saves a large checkpoint is
# waited for. Gloo needs some number. Whether there is a point in waiting is decided at each poll.
_NO_TIMEOUT = datetime.timedelta(days=30)

_KNOWN = "_torchhooks_known_to_all_ranks"  # the name of an attribute of errors
_SAVED_LATE = (
    "a Saver with async_save=True writes after the loop was closed, which has released the connections of its thread: "
    "save and close it inside the loop, or use a Saver without async_save"
)


class ContactLostError(TorchHooksError):
    """A tick did not arrive: a rank is gone, or does not answer. Becomes a PeerError."""


class GlooTransport:
    """Two gloo groups of one loop alone: for the ticks, and for the training thread.

    Both survive the script's ``destroy_process_group()``, because torch does not know them. Their keys in the store are
    new in every process, so the keys of an earlier attempt do no harm.

    Args:
        rank: the number of this process.
        size: the number of processes.
        join_secs: how long to wait for the other ranks to create their groups.
        lost_after_secs: after how many seconds without an answer to a tick a rank counts as lost.
        failure: returns why a call of :meth:`gather` is not to wait any longer; ``None`` while it is.
        group: the process group over which the ranks meet first; ``None`` for the default one.

    Raises:
        LifecycleError: not every rank created its groups within ``join_secs``.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        join_secs: float,
        lost_after_secs: float,
        failure: Callable[[], TorchHooksError | None],
        group: Any = None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._join_secs = join_secs
        self._lost_after_secs = lost_after_secs
        self._failure = failure
        self._group = group
        self._has_left = False
        self._saving: list[GlooTransport] = []
        deadline = time.monotonic() + join_secs
        try:
            self._store = _own_part_of_the_store(_broadcast_token(deadline, group))
            atexit.register(_park, os.getpid())
            self._ticks: ProcessGroupGloo | None = self._create_group("ticks", deadline)
            self._training: ProcessGroupGloo | None = self._create_group("training", deadline)
        except (RuntimeError, ContactLostError) as error:
            if time.monotonic() < deadline:
                raise LifecycleError(
                    f"rank {rank} created a MonitoredLoop, and could not connect to the other ranks "
                    f"({brief(error)}): look for the error of another rank, or for one that ended without creating the "
                    "loop; ranks=False makes a loop of one process alone"
                ) from error
            raise LifecycleError(
                f"rank {rank} created a MonitoredLoop, but not every one of the {size} ranks did so within "
                f"{join_secs:g} s: create it on every rank, or pass ranks=False for a loop of one process alone "
                f"({brief(error)})"
            ) from error

    def exchange(self, numbers: list[int], purpose: str = "a tick") -> list[list[int]]:
        """Return the ``numbers`` of all ranks, in their order; in the thread of the ticks.

        Raises:
            ContactLostError: a rank did not answer. The error names the ``purpose``.
        """
        mine = torch.tensor(numbers, dtype=torch.int64)
        return [row.tolist() for row in self._gather(self._ticks, mine, purpose, self._check_tick)]

    def exchange_text(self, text: str, purpose: str) -> list[str]:
        """Return the ``text`` of all ranks, at most 1,000 bytes of it; in the thread of the ticks."""
        data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self._gather(self._ticks, mine, purpose, self._check_tick)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows]

    def gather(self, value: T) -> list[T]:
        """Return the ``value`` of all ranks; in the training thread."""
        if self._has_left:
            return self._gather_after_loop(value)
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        try:
            length = torch.tensor([len(data)])
            sizes = [int(row) for row in self._gather(self._training, length, "a gathering", self._check_gathering)]
            padded = torch.zeros(max(sizes), dtype=torch.uint8)  # gloo gathers tensors of one size
            padded[: len(data)] = data
            rows = self._gather(self._training, padded, "a gathering", self._check_gathering)
        except ContactLostError as error:
            end = time.monotonic() + self._lost_after_secs
            while time.monotonic() < end:
                self._check_gathering(
                    "a gathering", 0.0
                )  # raises once the thread of the ticks has found out which rank it was
                _pause(_LONGEST_POLL_SECS)
            raise PeerError(f"another rank did not take part in Ranks.gather: {error}", reason=str(error)) from error
        return [pickle.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)]

    def _gather_after_loop(self, value: T) -> list[T]:
        distributed = torch.distributed
        if not distributed.is_initialized():
            raise LifecycleError(
                "Ranks.gather was called after the loop was closed and the process group destroyed: call it before "
                "destroy_process_group()"
            )
        rows: list[Any] = [None] * self._size
        distributed.all_gather_object(rows, value, group=self._group)
        return rows

    def for_saving(self) -> GlooTransport:
        """Return a transport whose :meth:`gather` is for the thread that writes checkpoints; on every rank."""
        if self._has_left:
            raise LifecycleError(_SAVED_LATE)
        another = copy.copy(self)
        another._training = self._create_group("saving", time.monotonic() + self._join_secs)  # noqa: SLF001 - its own class
        self._saving.append(another)
        return another

    def leave(self) -> None:
        """Have later calls of :meth:`gather` use no connection of the loop, which is closed on this rank."""
        self._has_left = True

    def close(self) -> None:
        """Free the groups, and with them their threads and sockets. Called once all ranks have left."""
        for each in (self, *self._saving):
            each._ticks = each._training = None  # noqa: SLF001 - its own class

    def find_missing(self) -> list[int]:
        """Return the ranks that do not answer: that have not written their key into the store after a while.

        In a thread, because the store may be in a process that does not answer. Such a thread stays blocked.
        """
        here: list[int] = []

        def ask() -> None:
            self._store.set(f"here/{self._rank}", "1")
            end = time.monotonic() + _MISSING_SECS
            while time.monotonic() < end and len(here) < self._size:
                here[:] = [rank for rank in range(self._size) if self._store.check([f"here/{rank}"])]
                _pause(0.05)  # a question for each rank each time, and the store may serve thousands of them

        thread = threading.Thread(target=_quietly, args=(ask,), daemon=True)
        thread.start()
        thread.join(2 * _MISSING_SECS)  # a call of the store in progress may take some time more
        if not here and self._size == 2:
            return [1 - self._rank]
        return [rank for rank in range(self._size) if rank not in here] if here else []

    def abort(self) -> bool:
        """Abort NCCL's groups, which frees a blocked call of the training thread; return whether there are any."""
        distributed = sys.modules["torch.distributed"]
        abort = getattr(distributed.distributed_c10d, "_abort_process_group", None)
        if abort is None or not distributed.is_initialized() or "nccl" not in str(distributed.get_backend_config()):
            return False
        _quietly(abort)
        return True

    def _create_group(self, name: str, deadline: float) -> ProcessGroupGloo:
        c10d = torch.distributed.distributed_c10d
        # Not 0, which gloo takes for no timeout at all.
        timeout = datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.1))
        return c10d.ProcessGroupGloo(c10d.PrefixStore(name, self._store), self._rank, self._size, timeout)

    def _gather(
        self, group: ProcessGroupGloo | None, mine: torch.Tensor, purpose: str, check: Callable[[str, float], None]
    ) -> list[torch.Tensor]:
        """Return the tensors of all ranks. ``check(purpose, secs)`` raises if it is pointless to wait after ``secs``.

        This polls and does not block: a daemon thread in a blocking call of torch would keep the interpreter from
        exiting well, and the training thread could not be told that the rank it waits for is gone.
        """
        if group is None:
            raise LifecycleError(_SAVED_LATE)
        rows = [torch.zeros_like(mine) for _ in range(self._size)]
        _pause(0.0)  # the thread of the ticks begins no call once the interpreter exits
        try:
            work, began = group.allgather([rows], [mine], _without_timeout()), time.monotonic()  # type: ignore[attr-defined]
            pause = _FIRST_POLL_SECS
            while not work.is_completed():
                _pause(pause)
                pause = min(2 * pause, _LONGEST_POLL_SECS)
                try:
                    check(purpose, time.monotonic() - began)
                except BaseException:
                    _keep_for_ever(group)
                    raise
            work.wait()
        except RuntimeError as error:
            if isinstance(error, TorchHooksError):
                raise
            raise ContactLostError(f"the connection was closed during {purpose}") from error  # whatever gloo's text is
        return rows

    def _check_tick(self, purpose: str, secs: float) -> None:
        if secs > self._lost_after_secs:
            raise ContactLostError(f"no answer for {self._lost_after_secs:g} s to {purpose}")

    def _check_gathering(self, purpose: str, secs: float) -> None:
        """Raise why not to wait: another rank failed, and this rank may be waiting for it."""
        failure = self._failure()
        if failure is not None:
            raise failure


def flight_record() -> bytes:
    """Return what torch.distributed has recorded of its collectives, as JSON; nothing if it records nothing.

    It records them with the environment variable ``TORCH_FR_BUFFER_SIZE``.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return b""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # noqa: SLF001 - newer than torch 2.7
    record: bytes = b"" if dump is None else dump()
    return record if b'"entries"' in record else b""


def is_communication_error(error: BaseException) -> bool:
    """Return whether ``error`` is of a kind that torch.distributed raises when another rank is gone."""
    distributed = sys.modules.get("torch.distributed")
    kinds = (getattr(distributed, "DistError", PeerError), PeerError)
    return (type(error) is RuntimeError and not hasattr(error, _KNOWN)) or isinstance(error, kinds)


def mark_as_known(error: BaseException) -> None:
    """Note that the other ranks know of ``error``, which therefore is no consequence of lost contact with them."""
    with contextlib.suppress(Exception):  # some classes forbid it
        setattr(error, _KNOWN, True)


def all_gather(tensors: list[torch.Tensor], size: int, group: ProcessGroup | None = None) -> list[list[torch.Tensor]]:
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


def _keep_for_ever(group: ProcessGroupGloo) -> None:
    """Never free ``group``, because freeing it would wait for its call in progress, which may never return."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _without_timeout() -> Any:
    """Return options for a call whose end is decided here, and not by the timeout with which its group was created."""
    c10d: Any = torch.distributed.distributed_c10d
    options = c10d.AllgatherOptions()
    options.timeout = _NO_TIMEOUT
    return options


def _broadcast_token(deadline: float, group: ProcessGroup | None) -> str:
    """Return a text that is the same on all ranks of ``group``, and new."""
    distributed = torch.distributed
    device = "cpu" if "cpu" in str(distributed.get_backend_config(group)) else torch.get_default_device()
    if device != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    token = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8, device=device)
    src = 0 if group is None else distributed.get_global_rank(group, 0)
    work = distributed.broadcast(token, src=src, group=group, async_op=True)
    while not work.is_completed():
        _pause(_FIRST_POLL_SECS)
        if time.monotonic() > deadline:
            raise ContactLostError("no answer to the first broadcast")
    work.wait()
    return bytes(token.tolist()).hex()


def _own_part_of_the_store(token: str) -> Store:
    """Return a part of the default process group's store that no other loop uses, nor one of an earlier process."""
    c10d = torch.distributed.distributed_c10d
    return c10d.PrefixStore(f"torchhooks/{token}", c10d._get_default_store())  # noqa: SLF001 - torch's only way to it


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
        # After one such pause each thread has looked; the other three are for a busy machine.
        time.sleep(4 * _LONGEST_POLL_SECS)


def _quietly(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception as error:
        logger.debug("while looking for the ranks that are missing", exc_info=error)
