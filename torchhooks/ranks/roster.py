"""Comparing the hooks of several ranks, which know each other's hooks only by the names of their classes and reprs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

# Arguments in a repr, such as "save_steps=10" or "timer=EverySteps(10)". Not parsed with ast: in Python 3.11, threads
# that parse at the same time get a SystemError.
_STEP_PERIOD = re.compile(r"\b(?:every_n_iter|every_n_steps|save_steps)=\d+|\btimer=\w+\((?:every_steps=)?\d+\)")


class Identity(NamedTuple):
    """What the ranks tell each other of a hook: its class, and its repr without what differs between processes."""

    kind: str
    text: str


def identity(hook: object) -> Identity:
    """Return what the other ranks get to know of ``hook``."""
    kind = f"{type(hook).__module__}.{type(hook).__qualname__}"
    try:
        return Identity(kind, re.sub(r"0x[0-9a-fA-F]+", "", repr(hook)))
    except Exception:  # a broken __repr__ must not end the training run
        return Identity(kind, kind)


def hooks_of_some(hooks: list[Any], rosters: list[list[Identity]]) -> list[object]:
    """Return those of ``hooks`` that not every rank has, given the identities of the hooks of all ranks.

    If all ranks have as many hooks of a class, these are the same hooks. Otherwise, their reprs tell.
    """
    counts = [Counter(each.kind for each in roster) + Counter(roster) for roster in rosters]

    def everywhere(key: Any) -> bool:
        return len({count[key] for count in counts}) == 1

    return [hook for hook in hooks if not everywhere(identity(hook).kind) and not everywhere(identity(hook))]


def other_periods(own: list[Identity], others: list[Identity]) -> Iterator[tuple[int, str, str]]:
    """Yield the place of each hook whose period in steps is another one on another rank, and the two periods.

    Periods in seconds may differ, because the chief's clock decides.
    """
    theirs = _texts(others)
    for kind, mine in _texts(own).items():
        if len(mine) != len(theirs.get(kind, [])):
            continue  # it is not known which of them are the same hooks
        places = [place for place, each in enumerate(own) if each.kind == kind]
        for place, one, other in zip(places, map(step_period, mine), map(step_period, theirs[kind]), strict=True):
            if one and other and one != other:
                yield place, one, other


def step_period(text: str) -> str:
    """Return the period in steps in ``text``, the repr of a hook, such as ``"save_steps=10"``; ``""`` for none."""
    return ", ".join(_STEP_PERIOD.findall(text))


def _texts(roster: list[Identity]) -> dict[str, list[str]]:
    """Return the reprs of hooks by class, in the order of the list."""
    texts: dict[str, list[str]] = {}
    for kind, text in roster:
        texts.setdefault(kind, []).append(text)
    return texts
