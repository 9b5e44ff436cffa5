"""Checking, when a loop of several ranks is created, that all ranks have created the same one.

The ranks know each other's hooks only by class, period and arguments.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torchhooks.common.errors import LifecycleError
from torchhooks.common.log import logger
from torchhooks.common.timers import AtSteps, EveryEpochs, EverySteps
from torchhooks.fetches.over_ranks import over_ranks_in
from torchhooks.loop.schedule import Schedule, ScheduledHook
from torchhooks.ranks.ranks import LoopRanks


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
        for place, here, there in _other_periods(rosters[ranks.rank], roster):
            _compare_periods(ranks, schedule, schedule.all_hooks[place], here, f"{there} on rank {rank}")
    return _hooks_of_some(hooks, rosters)


def _compare_periods(ranks: LoopRanks, schedule: Schedule, scheduled: ScheduledHook, here: str, there: str) -> None:
    """Raise a LifecycleError if the hook of ``scheduled``, which has another period elsewhere, needs every rank."""
    message = f"{type(scheduled.hook).__name__} has {here} on rank {ranks.rank} and {there}"
    if scheduled in schedule.collective or over_ranks_in(vars(scheduled.hook)):
        raise LifecycleError(f"{message}: it needs every rank in the same run, so give it the same period")
    if ranks.is_chief:
        logger.warning("%s: if it fetches a DTensor, a rank that is alone in a run waits forever", message)


class Identity(NamedTuple):
    """What the ranks tell each other of a hook."""

    kind: str
    """The module and name of its class."""
    period: str
    """When it is due, such as ``"a period of 10 steps"`` or ``"EverySteps(10)"``; ``""`` if its clock decides."""
    arguments: Any
    """What it was created with, in nested tuples: text and numbers, the names of functions, and the types of others."""


def identity(hook: object) -> Identity:
    """Return what the other ranks get to know of ``hook``."""
    created_with = getattr(hook, "created_with", None)
    arguments = None if created_with is None else _plain(created_with.arguments)
    return Identity(f"{type(hook).__module__}.{type(hook).__qualname__}", _period(hook), arguments)


def _hooks_of_some(hooks: list[Any], rosters: list[list[Identity]]) -> list[object]:
    """Return the ``hooks`` that not every rank has, given the identities of the hooks of all ranks.

    If all ranks have as many hooks of a class, these are the same hooks. Otherwise, periods and arguments tell.
    """
    counts = [Counter(each.kind for each in roster) + Counter(roster) for roster in rosters]

    def everywhere(key: Any) -> bool:
        return len({count[key] for count in counts}) == 1

    return [hook for hook in hooks if not everywhere(identity(hook).kind) and not everywhere(identity(hook))]


def _other_periods(own: list[Identity], others: list[Identity]) -> Iterator[tuple[int, str, str]]:
    """Yield the place of each hook whose period in steps or epochs differs on another rank, and the two periods.

    Periods in seconds may differ, because the chief's clock decides.
    """
    for kind in dict.fromkeys(each.kind for each in own):
        places = [place for place, each in enumerate(own) if each.kind == kind]
        theirs = [each.period for each in others if each.kind == kind]
        if len(places) != len(theirs):
            continue  # it is not known which of them are the same hooks
        for place, other in zip(places, theirs, strict=True):
            if own[place].period and other and own[place].period != other:
                yield place, own[place].period, other


def _period(hook: object) -> str:
    timer = getattr(hook, "due_timer", None)
    if isinstance(timer, EverySteps | EveryEpochs | AtSteps):
        return repr(timer)
    steps = getattr(timer, "every_steps", None)
    return "" if steps is None else f"a period of {steps} steps"


def _plain(value: Any) -> Any:
    """Return ``value`` without what differs between processes, such as addresses."""
    if isinstance(value, Mapping):
        return tuple((str(key), _plain(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if value is None or isinstance(value, str | int | float):
        return str(value)
    return value.__qualname__ if inspect.isroutine(value) or isinstance(value, type) else type(value).__qualname__
