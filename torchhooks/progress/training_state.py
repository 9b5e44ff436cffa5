"""The state of a training run: the one object from which the parts of a loop, its hooks, savers and tools read.

A loop makes one, and each of its sessions is one, with the same parts. No other object keeps a copy of a part: what
needs one is given the whole, and asks it.

It is the lowest module but for ``common``, so that every package can name it. The types of its parts stand in packages
above it. They are imported for the type checker alone: the one exception in the contract of the layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchhooks.common.stateful import Stateful
from torchhooks.progress.loop_state import NO_OUTPUTS, LoopState

if TYPE_CHECKING:
    import torch

    from torchhooks.checkpoints.contents import Gradients, Replicas, StatefulHook
    from torchhooks.checkpoints.savers import RestoresCheckpoints, SavesCheckpoints
    from torchhooks.checkpoints.unsaved import UnsavedParts
    from torchhooks.data.agenda import Agenda
    from torchhooks.data.cursor import DataWaits
    from torchhooks.data.position import DataPosition
    from torchhooks.device.readback import Readback
    from torchhooks.fetches.names import Step
    from torchhooks.fetches.running import RunningValues
    from torchhooks.lifecycle.hook import StandardHook
    from torchhooks.lifecycle.session import Finding, Session
    from torchhooks.ranks.peers import Peers
    from torchhooks.ranks.ranks import LoopRanks


# With eq, a dataclass would compare its fields, here models and tensors, and have no hash.
@dataclass(kw_only=True, eq=False, repr=False, slots=True, weakref_slot=True)
class TrainingState:
    """What is trained, how far it is, and what the parts of its loop share.

    No attribute is replaced but by the methods of this class. The parts change through their methods, with one
    exception: :class:`torchhooks.progress.loop_state.LoopState` lists the assignments on the way of every step.
    """

    model: torch.nn.Module | None
    """The model of the loop, ``None`` without one."""
    optimizer: torch.optim.Optimizer | None
    """The optimizer of the loop, ``None`` without one."""
    state: Mapping[str, Stateful]
    """Further objects to save and restore, by name, which the loop was given."""
    saver: RestoresCheckpoints[Session]
    """What writes checkpoints, that of the scaffold or a :class:`torchhooks.Saver` with its defaults."""
    hooks: Mapping[str, StatefulHook]
    """The hooks that have a state, by the name under which a checkpoint keeps it."""
    metadata: Mapping[str, Any]
    """Plain data for every checkpoint, which the loop was given."""
    checkpoint_dir: str | None
    """The folder from which the loop restores, as an absolute path; ``None`` if it restores nothing."""
    saved_to: str | None
    """The folder of the first hook that saves checkpoints, as an absolute path; ``None`` without one."""
    ranks: LoopRanks
    """The :class:`torchhooks.Ranks` of the loop, with the ``rank`` of this process, ``size`` and ``is_chief``."""
    loop_state: LoopState
    """What the loop is doing, the global step, and the outputs of the last run."""
    position: DataPosition
    """How far the loop is in its data."""
    gradients: Gradients | None
    """The gradients that the optimizer has not used yet; ``None`` if nothing watches the optimizer."""
    unsaved: UnsavedParts | None
    """What changes and is in no checkpoint; ``None`` if the loop saves none."""
    replicas: Replicas
    """Whether the ranks have the same parameters."""
    accumulated: RunningValues
    """What running fetches accumulate in every run, to evaluate it and to save it."""
    step_function: Step
    """The step of the script."""
    agenda: Agenda
    """What waits to be done between two runs."""
    data_waits: DataWaits
    """How long the loop has waited for its data."""
    readback: Readback
    """The values that are on their way to the host."""
    loop_hooks: Sequence[StandardHook]
    """The hooks of torchhooks in the loop, for what one of them has to know of another."""
    savers: list[SavesCheckpoints[Session]]
    """The savers to wait for before a restore and when the loop closes. A hook appends its saver."""
    call_epoch_hooks: Callable[[], object]
    """Calls the hooks for the end of an epoch that the script left by ``break``, if they were not called."""
    tell_extensions: Callable[[Session, Finding], object]
    """Tells the extensions of the loop what a hook has found in a session."""
    warned: set[str] = field(default_factory=set)
    """What a warning was logged about that is logged once per loop."""
    peers: Peers | None = None
    """The thread that talks to the other ranks; ``None`` in a process that is alone."""
    # What a session has for itself. It sets these when it begins.
    was_restored: bool = field(default=False, init=False)
    """Whether this session began with a checkpoint."""
    _began: float = field(default=0.0, init=False)
    _paused_secs: float = field(default=0.0, init=False)

    def attach_peers(self, peers: Peers) -> None:
        """Note the thread that talks to the other ranks: it is made when there is a loop that it can speak of."""
        self.peers = peers

    def begin_with_checkpoint(self) -> None:
        """Note that this session began with a checkpoint, and not at step 0."""
        self.was_restored = True

    # -- how far it is ------------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """The number of steps made so far, earlier processes included. Can be set."""
        return self.loop_state.global_step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self.loop_state.set_step(step)

    @property
    def total_runs(self) -> int:
        """The number of runs made so far, earlier processes included. A run may count no step, or several."""
        return self.loop_state.total_runs

    @property
    def begun_at(self) -> int:
        """The global step before this session's first run, which was restored or set; otherwise 0."""
        return self.loop_state.begun_at

    @property
    def outputs(self) -> Any:
        """What the step returned in the last run; ``None`` before the first one."""
        outputs = self.loop_state.outputs
        return None if outputs is NO_OUTPUTS else outputs

    @property
    def epoch(self) -> int | None:
        """The number of the epoch in progress, or of the last one, from 0 on. See ``MonitoredLoop.epoch``."""
        return self.position.epoch

    @property
    def batch(self) -> int | None:
        """The number of the current item of the innermost ``until_stop``, from 0; ``None`` outside of one.

        Items that earlier processes took of this pass count too.
        """
        return self.position.batch

    @property
    def last_batch(self) -> int | None:
        """What the fetch ``"batch"`` returns: :attr:`batch`, or outside of an item the number of the last one."""
        return self.position.last_batch

    @property
    def epoch_items(self) -> tuple[int, int | None] | None:
        """How many items of the epoch :attr:`epoch` were taken, and how many it has, which can be unknown, ``None``.

        ``None`` before any ``until_stop``.
        """
        return self.position.epoch_items

    @property
    def why_finished(self) -> str | None:
        """Why the training run is finished, ``"data ended"`` for example; ``None`` if it is not.

        So it is in ``end`` if the script left the ``with`` block of the loop because its data ended, or by ``break`` or
        ``return``, and after the checkpoint of such an end was restored, until a run is made.
        """
        return self.position.why_finished

    @property
    def secs(self) -> float:
        """The seconds since this session was created, without pauses that are over, on the host's clock."""
        return time.monotonic() - self._began - self._paused_secs

    # -- how it ends --------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the loop."""
        return self.loop_state.failure

    @property
    def stopped_by_signal(self) -> bool:
        """Whether a signal stopped the loop before its data ended, on any rank. All ranks see the same in ``end``.

        The training run is expected to be resumed then. So ``end`` skips what belongs to the end of the training run,
        such as a last evaluation, which would also use up the time until the process is killed.
        """
        return self.loop_state.by_signal and self.why_finished is None

    @property
    def was_finished(self) -> bool:
        """Whether the training run was finished before this process, which has made no run.

        Then ``end`` reports nothing, because that was reported, and nothing is saved.
        """
        return self.why_finished is not None and not self.loop_state.runs

    @property
    def interrupted(self) -> bool:
        """Whether a signal, or another rank, asked the loop to stop. A hook that waits inside a run has to check it.

        Raises:
            PeerError: another rank has failed.
        """
        if self.peers is not None:
            self.peers.check()
            if self.peers.is_stop_decided:
                return True
        return self.loop_state.signal is not None

    def drain(self) -> None:
        """Make all pending ``when_ready`` calls. This waits for the device."""
        self.readback.drain()
