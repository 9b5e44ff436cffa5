"""Where two ledgers differ first, in which quantity, and what that may come from."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torchhooks.common.digests import WIDTH
from torchhooks.common.text import shortened
from torchhooks.ledger.lines import QUANTITIES, Entry, Environment, Ledger, LedgerError

SAME, DIFFERENT, NOT_COMPARABLE = 0, 1, 2
"""The exit statuses of ``diff`` and ``check``."""

CAUSES = {
    "item": "The data come in another order: look for a list that is shuffled in place, a sampler or a cache with a "
    "state, or an iterator that starts over",
    "arguments": "The item of until_stop is the same: look for a variable of the loop's body that starts over, or for "
    "data that do not go through until_stop",
    "random": "The data are the same: look for a DataLoader or a next() outside of until_stop, which draws numbers",
    "outputs": "All that the step was given is the same: look for a variable, an iterator, a generator or a second "
    "model that the step uses and no checkpoint has, or an operator that is not deterministic",
    "gradients": "The outputs are the same: look for a buffer of gradients of your own, or an operator whose backward "
    "pass is not deterministic",
    "parameters": "The gradients are the same: look for an optimizer, a scheduler or a scaler that no checkpoint has, "
    "or for code between two runs that changes parameters",
    "optimizers": "The parameters are the same: look for a scheduler that no checkpoint has",
    "state": "The model and the optimizers are the same: look for code between two runs that changes this object",
}
"""What a difference in a quantity may come from, if all quantities before it are the same."""

_AFTER_OUTPUTS = ("gradients", "parameters", "optimizers", "state")
_COMPARED = ("torch", "python", "numpy", "torchhooks", "device", "threads", "deterministic", "argv", "commit", "dirty")


class Difference(NamedTuple):
    """The first run in which two ledgers differ."""

    rank: int
    one: Entry
    other: Entry
    quantity: str
    """The first quantity that differs, in causal order."""
    parts: list[str]
    """The names of what differs in it; empty if the quantity is one digest."""
    same: list[str]
    """The quantities before it, which are the same."""
    also: list[str]
    """The quantities after it that differ too."""

    @property
    def cause(self) -> str:
        return CAUSES[self.quantity]

    @property
    def place(self) -> str:
        """``"step 40017 (epoch 3, item 17)"``, with the number of the run if it is not that of the step."""
        run = "" if self.one.run == self.one.step else f"run {self.one.run}"
        where = ", ".join(filter(None, [run, self.one.place]))
        return f"step {self.one.step}{f' ({where})' if where else ''}"

    @property
    def line(self) -> str:
        """``"inputs same · outputs DIFFER: loss 0.5 / 0.7"``."""
        what = f": {shortened(self.parts, 4)}" if self.parts else ""
        if self.quantity == "outputs":
            mine, theirs = self.one.values, self.other.values
            pairs = [f"{name} {_shown(mine.get(name))} / {_shown(theirs.get(name))}" for name in self.parts]
            what = f": {shortened(pairs, 4)}" if pairs else ""
        return " · ".join([*(f"{name} same" for name in self.same), f"{self.quantity} DIFFER{what}"])


def _shown(value: float | str | None) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


LeftOut = Mapping[str, Collection[str]]
"""By quantity, the names of its parts that are not compared; no name for all of it."""


def compare_entries(
    one: Entry,
    other: Entry,
    rank: int = 0,
    names: Mapping[str, Sequence[str]] | None = None,
    rtol: float | None = None,
    left_out: LeftOut | None = None,
) -> Difference | None:
    """Return how two lines of the same run differ; ``None`` if all that both have is the same.

    With ``rtol``, the numbers of the outputs are compared and not their bits, and nothing that comes after them.
    """
    differing, compared = _differing(one, other, names or {}, rtol, left_out or {})
    if not differing:
        return None
    quantity, *also = differing
    return Difference(rank, one, other, quantity, differing[quantity], compared[: compared.index(quantity)], also)


def _differing(
    one: Entry, other: Entry, names: Mapping[str, Sequence[str]], rtol: float | None, left_out: LeftOut
) -> tuple[dict[str, list[str]], list[str]]:
    """Return what differs by quantity, with the names of the parts that do, and which quantities were compared."""
    differing: dict[str, list[str]] = {}
    compared = []
    for quantity in QUANTITIES:
        mine, theirs = one.digests.get(quantity), other.digests.get(quantity)
        if mine is None or theirs is None or (rtol is not None and quantity in _AFTER_OUTPUTS):
            continue
        without = left_out.get(quantity)
        if without is not None and not without:
            continue
        compared.append(quantity)
        if quantity == "random":
            drawn = {*one.drawn, *other.drawn}  # the operating system has seeded the others
            parts = [name for name in mine if name in drawn and theirs.get(name, mine[name]) != mine[name]]
            is_same = not parts
        elif quantity == "outputs":
            parts = _differing_values(one.values, other.values, rtol)
            parts = [name for name in parts if name not in (without or ())]
            is_same = not parts if rtol is not None or without else mine == theirs
        elif isinstance(mine, dict):
            parts = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
            parts = [name for name in parts if name not in (without or ())]
            is_same = not parts
        else:
            is_same = mine == theirs
            parts = [] if is_same else _differing_tensors(mine, theirs, names.get(quantity, ()))
        if not is_same:
            differing[quantity] = parts
    return differing, compared


def differing_parts(one: Sequence[Ledger], other: Sequence[Ledger], left_out: LeftOut) -> dict[str, set[str]]:
    """Return all that differs in any run of two training runs: by quantity, the names of its parts, if they have any.

    A quantity that differs where no part of it does has the name ``""``.
    """
    found: dict[str, set[str]] = {}
    for mine, theirs in zip(one, other, strict=True):
        names = mine.names if mine.names == theirs.names else {}
        for key in mine.entries.keys() & theirs.entries.keys():
            differing, _ = _differing(mine.entries[key], theirs.entries[key], names, None, left_out)
            for quantity, parts in differing.items():
                found.setdefault(quantity, set()).update(parts or [""])
    return found


def _differing_values(mine: Mapping[str, float], theirs: Mapping[str, float], rtol: float | None) -> list[str]:
    def is_close(name: str) -> bool:
        if name not in mine or name not in theirs:
            return False
        one, other = float(mine[name]), float(theirs[name])
        return one == other or (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=rtol or 0.0)

    return [name for name in {**mine, **theirs} if not is_close(name)]


def _differing_tensors(mine: str, theirs: str, names: Sequence[str]) -> list[str]:
    """Return the names of the tensors whose digests, one after the other in a text, differ."""
    if len(mine) != len(theirs) or len(mine) != WIDTH * len(names):
        return []
    return [
        name
        for place, name in enumerate(names)
        if mine[WIDTH * place : WIDTH * (place + 1)] != theirs[WIDTH * place : WIDTH * (place + 1)]
    ]


class Comparison(NamedTuple):
    """Two training runs, as far as both have the same runs."""

    runs: int
    """How many runs both have, of all ranks together."""
    ranks: int
    quantities: list[str]
    """What was compared."""
    environment: list[str]
    """How the environments differ."""
    only_one: int
    only_other: int
    """How many runs only one of them has."""
    difference: Difference | None
    old_lines: int = 0
    """How many lines of an older format were left out."""

    @property
    def is_same(self) -> bool:
        """Whether both have the same runs, with the same bits."""
        return self.difference is None and not self.only_one and not self.only_other


def compare_ledgers(
    one: Sequence[Ledger], other: Sequence[Ledger], rtol: float | None = None, left_out: LeftOut | None = None
) -> Comparison:
    """Return where two training runs differ first, apart from what is ``left_out``.

    Raises:
        LedgerError: they cannot be compared: other ranks, or no run in common.
    """
    if [each.rank for each in one] != [each.rank for each in other]:
        raise LedgerError(f"the training runs have {len(one)} and {len(other)} ranks: only equal ones can be compared")
    pairs = [(mine, theirs) for mine, theirs in zip(one, other, strict=True)]
    both = {(mine.rank, *key) for mine, theirs in pairs for key in mine.entries.keys() & theirs.entries.keys()}
    if not both:
        raise LedgerError("the training runs have no run in common")
    first: Difference | None = None
    quantities: dict[str, None] = {}
    for rank, (mine, theirs) in enumerate(pairs):
        for key in sorted(mine.entries.keys() & theirs.entries.keys()):
            if first is not None and key > (first.one.loop, first.one.run):
                break  # another rank differs before that
            entry, opposite = mine.entries[key], theirs.entries[key]
            both_have = entry.digests.keys() & opposite.digests.keys()
            quantities |= dict.fromkeys(each for each in both_have if (left_out or {}).get(each, "all"))
            names = mine.names if mine.names == theirs.names else {}
            found = compare_entries(entry, opposite, rank, names, rtol, left_out)
            if found is not None:
                first = found if first is None else min(first, found, key=_place_in_time)
                break
    sizes = [sum(len(each.entries) for each in ledgers) - len(both) for ledgers in (one, other)]
    environment = _differing_environment(one[0].environments, other[0].environments)
    in_order = [each for each in QUANTITIES if each in quantities]
    old = sum(ledger.left_out for ledger in (*one, *other))
    return Comparison(len(both), len(pairs), in_order, environment, sizes[0], sizes[1], first, old)


def _place_in_time(difference: Difference) -> tuple[int, int, int]:
    """Return what orders differences of ranks: in the same run, the earlier quantity is the cause."""
    return difference.one.loop, difference.one.run, QUANTITIES.index(difference.quantity)


def _differing_environment(one: Sequence[Environment], other: Sequence[Environment]) -> list[str]:
    mine, theirs = next(iter(one), {}), next(iter(other), {})  # none if the first line is torn
    return [f"{name} {mine.get(name)} / {theirs.get(name)}" for name in _COMPARED if mine.get(name) != theirs.get(name)]


# -- what is printed ---------------------------------------------------------------------------------------------------


def lines_of(found: Comparison) -> list[tuple[str, str]]:
    """Return what ``diff`` prints: the heading and the text of each line."""
    lines = [("environment", "; ".join(found.environment) or "the same")]
    ranks = "" if found.ranks == 1 else f" of {found.ranks} ranks"
    difference = found.difference
    if difference is None:
        number = "1 run" if found.runs == 1 else f"{found.runs} runs"
        lines.append(("the same bits", f"{number}{ranks}: {shortened(found.quantities, 8)}"))
    else:
        rank = "" if found.ranks == 1 else f", rank {difference.rank}"
        lines += [("first differs", f"{difference.place}{rank}"), ("", difference.line)]
        if difference.also:
            lines.append(("", f"after that: {', '.join(difference.also)}"))
        lines.append(("likely cause", difference.cause))
    if found.only_one or found.only_other:
        lines.append(("not in both", f"{found.only_one} runs of the first, {found.only_other} of the second"))
    if found.old_lines:
        number = (
            "1 line of an older format, which has"
            if found.old_lines == 1
            else (f"{found.old_lines} lines of an older format, which have")
        )
        lines.append(("left out", f"{number} other digests for the same values"))
    return lines


def as_plain(found: Comparison) -> dict[str, object]:
    """Return what ``diff --json`` prints."""
    difference = found.difference
    plain: dict[str, object] = {
        "same": difference is None,
        "runs": found.runs,
        "ranks": found.ranks,
        "quantities": found.quantities,
        "environment": found.environment,
        "only_in_one": found.only_one,
        "only_in_other": found.only_other,
        "old_lines": found.old_lines,
        "difference": None,
    }
    if difference is not None:
        entry = difference.one
        plain["difference"] = {
            "rank": difference.rank,
            "loop": entry.loop,
            "run": entry.run,
            "step": entry.step,
            "epoch": entry.epoch,
            "batch": entry.batch,
            "quantity": difference.quantity,
            "parts": difference.parts,
            "same": difference.same,
            "also": difference.also,
            "cause": difference.cause,
        }
    return plain
