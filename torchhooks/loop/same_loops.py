"""Checking, when a loop of several ranks is created, that all ranks have created the same one."""

from __future__ import annotations

from torchhooks.common.errors import LifecycleError
from torchhooks.common.log import logger
from torchhooks.fetches.over_ranks import over_ranks_in
from torchhooks.loop.schedule import Schedule, ScheduledHook
from torchhooks.ranks.ranks import LoopRanks
from torchhooks.ranks.roster import hooks_of_some, identity, other_periods


def compare_loops(ranks: LoopRanks, schedule: Schedule, *, step_unit: str, checkpoint_dir: str | None) -> list[object]:
    """Exchange what has to be the same on all ranks, and return the hooks of this rank that not every rank has.

    Raises:
        LifecycleError: the loop of another rank is a different one.
    """
    names = [type(scheduled.hook).__name__ for scheduled in schedule.collective]
    mine = {
        "step_unit is": step_unit,
        "checkpoint_dir is": "None" if checkpoint_dir is None else "a folder",
        "the collective hooks are": f"[{', '.join(names)}]",
    }
    hooks = [scheduled.hook for scheduled in schedule.all_hooks]
    others = ranks.gather({**mine, "hooks": [identity(hook) for hook in hooks]}, "the loop")
    for rank, other in enumerate(others):
        for name, value in mine.items():
            if other[name] != value:
                raise LifecycleError(
                    f"{name} {value} on rank {ranks.rank} and {other[name]} on rank {rank}: "
                    "create the loop with the same arguments on every rank"
                )
    rosters = [other["hooks"] for other in others]
    for rank, roster in enumerate(rosters):
        for place, here, there in other_periods(rosters[ranks.rank], roster):
            _compare_periods(ranks, schedule, schedule.all_hooks[place], here, f"{there} on rank {rank}")
    return hooks_of_some(hooks, rosters)


def _compare_periods(ranks: LoopRanks, schedule: Schedule, scheduled: ScheduledHook, here: str, there: str) -> None:
    """Raise a LifecycleError if the hook of ``scheduled``, which has another period elsewhere, needs every rank."""
    message = f"{type(scheduled.hook).__name__} has {here} on rank {ranks.rank} and {there}"
    if scheduled in schedule.collective or over_ranks_in(vars(scheduled.hook)):
        raise LifecycleError(f"{message}: it needs every rank in the same run, so give it the same period")
    if ranks.is_chief:
        logger.warning("%s: if it fetches a DTensor, a rank that is alone in a run waits forever", message)
