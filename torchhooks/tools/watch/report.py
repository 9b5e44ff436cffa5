"""What a person reads of a loop that stands still: one line for the log, and ``report.md``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from torchhooks.ranks.peers import rank_names
from torchhooks.tools.watch.places import IN_COLLECTIVE, IN_STEP, NOT_WAITING


class RankState(NamedTuple):
    """What one rank says of itself. It is sent to all ranks, in less than 1,000 bytes.

    Args:
        run: the number of the run in progress, over all processes of the training run.
        when: ``"in"`` that run; ``"after"`` it where the loop is created or closed, and no run is to come.
        secs: for how long nothing was completed.
        phase, where, waits: see :class:`torchhooks.tools.watch.places.Place`.
        children: which child processes are not well, as a text.
        stands_still: whether nothing was completed for long until this very moment.
        is_excused: whether it is no stall yet, because a person has paused the rank, or it is in what may take long.
        is_late: whether the rank has waited long for this answer, because another one could not give it.
        request: the folder of a report that was asked for; ``""`` for a stall.
    """

    run: int = 0
    secs: int = 0
    phase: str = ""
    where: str = ""
    waits: int = NOT_WAITING
    children: str = ""
    stands_still: bool = False
    is_excused: bool = False
    is_late: bool = False
    request: str = ""
    when: str = "in"

    def to_text(self) -> str:
        # ASCII and cut, so that the whole is never cut in the middle.
        values = [each[:240].encode("ascii", "replace").decode() if isinstance(each, str) else each for each in self]
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> RankState:
        return cls(*json.loads(text))

    @property
    def run_text(self) -> str:
        return f"{self.when} run {self.run}" if self.run else "before its first run"


def first_line(states: Sequence[RankState]) -> str:
    """Return where the ranks are in one line: those that the others wait for come first."""
    groups = _groups(states)
    if len(states) == 1:
        return f"It is {states[0].run_text}: {_place(states[0])}."
    return " ".join(_sentence(ranks, state, is_missing, len(states)) for ranks, state, is_missing in groups)


def short_line(states: Sequence[RankState]) -> str:
    """Return what ``status`` says after ``"stalled for 6 min"``."""
    ranks, state, _ = _groups(states)[0]
    who = "" if len(states) == 1 else f"{rank_names(ranks, len(states))}: "
    return f"{state.run_text} ({who}{state.phase})"


def report(states: Sequence[RankState], line: str, files: str) -> str:
    """Return the text of ``report.md``; ``files`` says where the stacks are."""
    rows = (
        f"| {rank} | {state.run} | {state.secs} s | {state.phase} | {state.where} | {state.children or '-'} |"
        for rank, state in enumerate(states)
    )
    head = "| rank | run | nothing completed for | phase | where | child processes |\n|---|---|---|---|---|---|"
    return f"{line}\n\n{head}\n{chr(10).join(rows)}\n\n{files}\n"


def _groups(states: Sequence[RankState]) -> list[tuple[list[int], RankState, bool]]:
    """Return the ranks that are at the same place, that place, and whether other ranks wait for them, these first."""

    def key(rank: int) -> tuple[int, int, str, str]:
        state = states[rank]
        return state.waits, state.run, state.phase, state.where

    most = max(state.waits for state in states)
    groups = [[*ranks] for _, ranks in groupby(sorted(range(len(states)), key=key), key)]
    # Who waits least is missing to the others. If all wait alike, or none does, the fewest are the odd ones.
    groups.sort(key=lambda ranks: (states[ranks[0]].waits, len(ranks)))
    return [(ranks, _joined_state(ranks, states), states[ranks[0]].waits < most) for ranks in groups]


def _joined_state(ranks: Iterable[int], states: Sequence[RankState]) -> RankState:
    """Return where all of ``ranks`` are, with the child processes of each."""
    first, *_ = own = [states[rank] for rank in ranks]
    return first._replace(children="; ".join(filter(None, (state.children for state in own))))


def _sentence(ranks: list[int], state: RankState, is_missing: bool, size: int) -> str:
    name, one = rank_names(ranks, size), len(ranks) == 1
    does = ("is not there: it is" if one else "are not there: they are") if is_missing else "is" if one else "are"
    if not is_missing and state.waits == IN_COLLECTIVE:
        does = "waits" if one else "wait"
    return f"{name[0].upper()}{name[1:]} {does} {state.run_text}: {_place(state)}."


def _place(state: RankState) -> str:
    phase = "" if state.waits and state.phase == IN_STEP else state.phase
    return "; ".join(filter(None, (", ".join(filter(None, (phase, state.where))), state.children)))
