"""The loops of this process that are open: two of them must not have one hook, or write the same checkpoints."""

from __future__ import annotations

import gc
import os
import threading
import weakref

from torchhooks.fetches.names import bare_optimizer
from torchhooks.lifecycle.extension import LoopPlan
from torchhooks.progress.loop_state import Phase
from torchhooks.progress.training_state import TrainingState


def note_open_loop(loop: object, plan: LoopPlan, training: TrainingState) -> None:
    """Note that ``loop``, which begins with ``plan`` and has the state ``training``, is open from now on.

    A loop that is closed or has failed is not open, nor is one that nothing refers to any more.

    Raises:
        ValueError: another open loop has one of the hooks, whose state belongs to one loop; or it saves where this one
            saves or restores, or restores where this one saves.
    """
    this = _OpenLoop(loop, plan, training)
    with _lock:
        if any(map(this.conflict_with, _open_loops())):
            gc.collect()  # the other loop may have been dropped without being closed
        for conflict in filter(None, map(this.conflict_with, _open_loops())):
            raise ValueError(conflict)
        _open.append(this)
        for folder in this.saves:
            _number_of_loops[folder] = _number_of_loops.get(folder, 0) + 1


def follows_another(folder: str) -> bool:
    """Return whether two loops of this process or more save checkpoints in ``folder``, one after the other."""
    return _number_of_loops.get(os.path.realpath(folder), 0) > 1


def is_of_a_loop(part: object) -> bool:
    """Return whether ``part`` is the optimizer of an open loop, or in its ``state``."""
    # Without the lock: a step of any optimizer of the process can lead here, and must not wait for a loop that is
    # created. A copy, because another thread may change the list meanwhile.
    return any(each.has_part(part) for each in tuple(_open))


class _OpenLoop:
    """A loop as the others of its process see it. It keeps nothing of the loop alive."""

    def __init__(self, loop: object, plan: LoopPlan, training: TrainingState) -> None:
        self._loop, self._plan, self._training = weakref.ref(loop), weakref.ref(plan), weakref.ref(training)
        self._process = os.getpid()
        self._rank = training.ranks.rank
        folders = (hook.checkpoint_dir for hook in plan.savers)
        self.saves = {os.path.realpath(folder): folder for folder in folders if folder is not None}
        self._restores: dict[str, str] = {}
        if plan.folder is not None and plan.checkpoint is None:  # one that was chosen stays the same
            self._restores = {os.path.realpath(plan.folder): plan.folder}

    @property
    def is_open(self) -> bool:
        """Whether the loop can still make runs and save, in this process."""
        training = self._training()
        is_here = self._loop() is not None and self._process == os.getpid()  # a forked process has none of them
        if not is_here or training is None:
            return False
        return training.loop_state.phase is not Phase.CLOSED and training.failure is None

    def has_part(self, part: object) -> bool:
        """Return whether the loop is open, and has ``part``."""
        training = self._training() if self.is_open else None
        return training is not None and any(
            bare_optimizer(own) is part for own in (training.optimizer, *training.state.values())
        )

    def conflict_with(self, other: _OpenLoop) -> str | None:
        """Return what is wrong if both this loop and ``other`` are open; ``None`` if nothing is."""
        mine, others = self._plan(), other._plan()
        if mine is None or others is None:  # dropped just now, in another thread
            return None
        for hook in mine.all_hooks:
            if any(hook is each for each in others.all_hooks):
                way_out = "close that loop, or make another hook for this one"
                return f"{hook!r} is in another loop, which is still open: {way_out}"
        if other._rank != self._rank:  # threads may be the ranks of one training run
            return None
        two = "or give them two folders"
        named = "give them two folders, or name the checkpoint to restore, such as model.ckpt-600 in it"
        for own, of_other, does, would, way_out in (
            (self.saves, other.saves, "saves checkpoints there", "would replace them by others", two),
            (self._restores, other.saves, "saves checkpoints there", "would restore them", named),
            (self.saves, other._restores, "restores checkpoints from there", "would save others there", two),
        ):
            for folder in own.keys() & of_other.keys():
                return (
                    f"{own[folder]}: {other._loop()!r} is open and {does}, and {self._loop()!r} {would}. Call close() "
                    f"of the first one before you create the second, also in a notebook, {way_out}"
                )
        return None


_open: list[_OpenLoop] = []
_number_of_loops: dict[str, int] = {}
"""By folder, how many loops of this process save checkpoints there, or have done so."""
_lock = threading.RLock()  # the garbage collector may call code of the script, which creates a loop


def _open_loops() -> list[_OpenLoop]:
    """Return the loops that are open, after forgetting those that are open no more."""
    _open[:] = [each for each in _open if each.is_open]
    return [*_open]
