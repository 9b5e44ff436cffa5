"""Which of several processes this one is, and what a loop knows of the others.

:class:`Ranks` is what a user configures, and several loops may be given the same one. Each loop makes a
:class:`LoopRanks` of its own from it, which has its connection to the other ranks and is the ``session.ranks`` of its
hooks. :mod:`torchhooks.ranks.transport` moves the bytes.
"""

from __future__ import annotations

import copy
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchhooks.common.checks import seconds
from torchhooks.common.errors import LifecycleError, PeerError, TorchHooksError, add_note
from torchhooks.common.log import logger, speak_as
from torchhooks.common.text import call_repr, shown
from torchhooks.ranks.transport import GlooTransport, all_gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class OtherPurposeError(LifecycleError):
    """The ranks gathered values for different purposes."""


class Ranks:
    """The processes that train one model together, as ``torchrun`` starts them.

    A :class:`torchhooks.MonitoredLoop` creates one by itself. Create one to change a period, and pass it as ``ranks``.
    Hooks find the ranks of their loop in ``session.ranks``, which has the same attributes and methods. Several loops
    may be given the same ``Ranks``, which is then about the newest of them that is open.

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
            code 70. If that rank does not answer, this time begins with the tick that it did not answer.
        join_secs: how long to wait for the other ranks when the loop is created, in seconds.
        group: the process group of the loop, as ``torch.distributed.new_group`` returns it; ``None`` for the default
            one. The loop knows no other ranks: its ranks are numbered within the group, agree with each other, and save
            checkpoints of their own, so each group needs its own folder.

    Raises:
        ValueError: an argument is not a number of seconds, 0 or more, or this process is not in ``group``.
    """

    _new_transport: Callable[..., Any] = GlooTransport

    def __init__(
        self,
        *,
        tick_secs: float = 0.1,
        lost_after_secs: float = 60.0,
        stuck_secs: float = 30.0,
        join_secs: float = 600.0,
        group: Any = None,
    ) -> None:
        self.tick_secs: float = seconds(tick_secs, "tick_secs")
        self.lost_after_secs: float = seconds(lost_after_secs, "lost_after_secs")
        self.stuck_secs: float = seconds(stuck_secs, "stuck_secs")
        self.join_secs: float = seconds(join_secs, "join_secs")
        self.group = group
        self._rank_and_size = _rank_and_size_in(group) or (0, 1)
        if self._rank_and_size[0] < 0:
            raise ValueError(
                "group: this process is not in it. Create the loop in the processes of the group only, or give each "
                "process its own group"
            )

    @property
    def rank(self) -> int:
        """The number of this process, from 0 on."""
        loop = _newest_loop.get(self)
        return self._rank_and_size[0] if loop is None else loop.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        loop = _newest_loop.get(self)
        return self._rank_and_size[1] if loop is None else loop.size

    @property
    def is_chief(self) -> bool:
        """Whether this process is rank 0, which writes and reports."""
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
        return self in _newest_loop

    def gather(self, value: T, purpose: str = "a hook") -> list[T]:
        """Return the ``value`` of every rank, in the order of the ranks.

        Every rank has to call this, in the training thread, at the same point between two steps. The values are
        pickled. With one process, the list has one item.

        Args:
            value: any picklable object.
            purpose: what the values are for, the same text on all ranks.

        Raises:
            PeerError: a rank failed, left or does not answer.
            LifecycleError: ranks gather for different purposes, or in different runs. All of them raise it.
        """
        loop = _newest_loop.get(self)
        return [value] if loop is None else loop.gather(value, purpose)

    def __repr__(self) -> str:
        return call_repr(self, **_arguments(self))


_newest_loop: weakref.WeakKeyDictionary[Ranks, Ranks] = weakref.WeakKeyDictionary()
"""The LoopRanks that connected last, for each Ranks that a loop was given.

So that the ``gather`` of a Ranks that a script has created works too. Kept here, because a Ranks is the user's.
"""


class LoopRanks(Ranks):
    """The ranks of one loop: which process this is, and the connection to the others once the loop has made it.

    The rank and the size are the process group's when the loop is created: the group may be newer than
    ``configured``, and the script may destroy it before it closes the loop.

    Args:
        configured: the Ranks that the loop was given.
        alone: whether the loop is one of this process alone, even if there are others.
    """

    # Attributes and not properties as in Ranks, whose values come from here.
    rank: int = 0
    size: int = 1

    def __init__(self, configured: Ranks, *, alone: bool = False) -> None:
        super().__init__(**_arguments(configured))
        self.rank, self.size = (0, 1) if alone else _rank_and_size_in(self.group) or (configured.rank, configured.size)
        self.may_be_late = self.size == 1 and not alone
        """Whether the script may create the process group after the loop, which is then one of this process alone."""
        self.local_hooks: Sequence[object] = ()
        """The hooks of this rank's loop that not every rank has."""
        self.share_folder = True
        """Whether all ranks have to see the same checkpoints."""
        self.gathering: str | None = None
        """What the call of :meth:`gather` in progress is for. Only the thread in that call uses it."""
        self.gatherings = 0
        """How many such calls this rank has begun."""
        self.run_number: Callable[[], int] | None = None
        """Returns the number of the run that this rank is in, or has made last; ``None`` if that may differ."""
        self._new_transport = configured._new_transport  # noqa: SLF001 - its own class
        self._configured = weakref.ref(configured)  # weak, because _newest_loop would otherwise keep it for ever
        self._transport: GlooTransport | None = None
        self._saving: LoopRanks | None = None

    @property
    def is_connected(self) -> bool:
        return self._transport is not None

    def gather(self, value: T, purpose: str = "a hook", *, details: str = "") -> list[T]:
        """Return the ``value`` of every rank, as :meth:`Ranks.gather` does.

        ``details``, in parentheses after a space, say more of the purpose on this rank if it waits in vain.
        """
        if self._transport is None:
            return [value]
        self.gathering = purpose + details
        self.gatherings += 1  # before the others can see this rank past it
        run = None if self.run_number is None else self.run_number()
        try:
            rows = self._transport.gather((purpose, run, value))
        except PeerError as error:
            add_note(error, f"torchhooks: rank {self.rank} gathered values for {purpose}{details}")
            raise
        finally:
            self.gathering = None
        for rank, (theirs, their_run, _) in enumerate(rows):
            if theirs != purpose:
                raise OtherPurposeError(
                    f"rank {self.rank} gathers values for {purpose}, and rank {rank} for {theirs}: call Ranks.gather "
                    "in the same order on all ranks, or look for an earlier error on one of them"
                )
            if None not in (run, their_run) and their_run != run:
                raise LifecycleError(
                    f"rank {self.rank} gathers values for {purpose} in run {run}, and rank {rank} in run {their_run}: "
                    "make the same runs on all ranks. If the script skips an item, for example after an error that it "
                    "catches, skip it on all of them"
                )
        return [each for *_, each in rows]

    def note_loop(self, *, share_folder: bool, local_hooks: Sequence[object]) -> None:
        """Note what the ranks have found out about their loops: see :attr:`share_folder` and :attr:`local_hooks`."""
        self.share_folder, self.local_hooks = share_folder, local_hooks

    def count_runs_with(self, run_number: Callable[[], int]) -> None:
        """Have every gathering check that all ranks are in the run with the same number, by ``run_number()``."""
        self.run_number = run_number

    def for_saving(self) -> LoopRanks:
        """Return ranks for the thread that writes checkpoints. Every rank has to call this, in the training thread.

        That thread gathers while the training thread may gather too, so it has a connection of its own.
        """
        if self._transport is None:
            return self
        if self._saving is None:
            saving = copy.copy(self)
            saving.run_number = None  # the training threads go on, each at its own pace
            saving._transport = self._transport.for_saving()  # noqa: SLF001 - its own class
            self._saving = saving
        return self._saving

    def has_locally(self, hook: object) -> bool:
        """Return whether this rank has ``hook``, and another one has none of this class and period."""
        return any(hook is each for each in self.local_hooks)

    def serves(self, device: torch.device) -> bool:
        """Return whether :meth:`gather_on_device` takes tensors on ``device``, which is no CPU."""
        distributed = sys.modules.get("torch.distributed")
        if device.type == "cpu" or distributed is None or not distributed.is_initialized():
            return False
        return f"{device.type}:" in str(distributed.get_backend_config(self.group))

    def gather_on_device(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return ``tensors``, all of one device, of every rank, without waiting for the device.

        One call of the process group's ``all_gather``. Every rank has to call this as it has to call :meth:`gather`.
        """
        return all_gather(tensors, self.size, self.group)

    def connect(self, failure: Callable[[], TorchHooksError | None]) -> GlooTransport:
        """Reach the other ranks; each of them has to call this. ``failure()`` says why not to wait for one any more.

        Raises:
            LifecycleError: they did not all do so within ``join_secs``.
        """
        self._transport = self._new_transport(
            rank=self.rank,
            size=self.size,
            join_secs=self.join_secs,
            lost_after_secs=self.lost_after_secs,
            failure=failure,
            group=self.group,
        )
        if (configured := self._configured()) is not None:
            _newest_loop[configured] = self
        _connected.append(self)
        speak_as(self.rank)
        return self._transport

    def disconnect(self) -> None:
        """Called when the loop is closed: this process logs as for the newest loop that is left, or like any other."""
        self.run_number = None  # after an error, the ranks have made different numbers of runs
        if self in _connected:
            _connected.remove(self)
        if self._transport is not None:
            self._transport.leave()
        configured = self._configured()
        others = [ranks for ranks in _connected if ranks._configured() is configured]  # noqa: SLF001 - its own class
        if configured is not None and others:
            _newest_loop[configured] = others[-1]
        speak_as(_connected[-1].rank if _connected else 0)

    def warn_of_environment(self) -> None:
        """Log a warning if this process is alone so far, while ``torchrun`` says that there are others."""
        size = os.environ.get("WORLD_SIZE", "")
        if self.may_be_late and _rank_and_size_in() is None and size.isdecimal() and int(size) > 1:
            self.may_be_late = False  # one warning is enough
            logger.warning("WORLD_SIZE is %s, and torch.distributed is not initialized: %s", size, _ALONE)

    def warn_if_late(self) -> None:
        """Log a warning if the process group is newer than the loop."""
        now = _rank_and_size_in()
        if self.may_be_late and now is not None and now[1] > 1:
            logger.warning("init_process_group() was called after the loop was created: %s", _ALONE)
        self.may_be_late = False

    def __repr__(self) -> str:
        return repr(Ranks(**_arguments(self)))


_ALONE = (
    "the loop is one of this process alone, which stops, saves and logs as if there were no other. Call "
    "init_process_group() before the loop is created, or pass ranks=False to MonitoredLoop if that is meant"
)


_connected: list[LoopRanks] = []
"""The ranks of the loops that are not closed, in the order in which they were created."""


def checked_ranks(given: object) -> LoopRanks:
    """Return the ranks of a new loop, for its ``ranks`` argument. Logs a warning if there are other processes.

    Raises:
        TypeError: ``given`` is neither ``None``, False nor a Ranks.
    """
    if given is not None and given is not False and not isinstance(given, Ranks):
        raise TypeError(f"ranks={shown(given)}: give a Ranks, False for a loop of this process alone, or None")
    ranks = LoopRanks(given if isinstance(given, Ranks) else Ranks(), alone=given is False)
    ranks.warn_of_environment()
    return ranks


def _rank_and_size_in(group: ProcessGroup | None = None) -> tuple[int, int] | None:
    """Return the rank in ``group``, by default the default process group, and its size; ``None`` if there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(group), distributed.get_world_size(group)


def _arguments(ranks: Ranks) -> dict[str, Any]:
    return {name: getattr(ranks, name) for name in ("tick_secs", "lost_after_secs", "stuck_secs", "join_secs", "group")}


# -- tensors of which each rank has a part: torch's DTensor, as FSDP2 uses it -----------------------------------------


def is_sharded(value: object) -> bool:
    """Return whether ``value`` is a DTensor."""
    return dtensors_exist() and isinstance(value, sys.modules["torch.distributed.tensor"].DTensor)


def reshard(module: torch.nn.Module) -> None:
    """Have FSDP2 put shards back in place of whole parameters, which it leaves in a module after a forward pass."""
    modules: list[Any] = [*module.modules()] if dtensors_exist() else []
    for each in modules:
        if hasattr(each, "reshard") and hasattr(each, "unshard"):
            each.reshard()


def dtensors_exist() -> bool:
    """Return whether the process may have a DTensor."""
    return hasattr(sys.modules.get("torch.distributed.tensor"), "DTensor")  # loaded by whatever creates DTensors


def without_partial(tensor: Any) -> Any:
    """Return the DTensor with the sums in place of summands, if its ranks have these. A collective in that case."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    whole = torch.distributed.tensor.Replicate()
    return tensor.redistribute(placements=[whole if each.is_partial() else each for each in tensor.placements])
