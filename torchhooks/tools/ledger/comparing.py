"""Where two ledgers differ first, in which quantity, and what that may come from."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torchhooks.common.digests import WIDTH
from torchhooks.common.text import shortened, shown
from torchhooks.tools.ledger.lines import QUANTITIES, Entry, Environment, Ledger, LedgerError, Line, Omissions, Shape

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

_CLAIMED = {
    "arguments": ("item",),
    "random": ("arguments",),
    "outputs": ("arguments", "random"),
    "gradients": ("outputs",),
    "parameters": ("gradients",),
    "optimizers": ("parameters",),
    "state": ("parameters", "optimizers"),
}
"""The quantities of which the sentence of a cause says that they are the same."""

_AFTER_OUTPUTS = ("gradients", "parameters", "optimizers", "state")
_ENVIRONMENT = ("torch", "python", "numpy", "torchhooks", "device", "threads", "deterministic", "commit", "dirty")
_MOST_CHARACTERS = 200  # of a value in a line for people
_COMMIT = 12  # characters of a commit, as git shows it


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
    environment: Sequence[str] = ()
    """How the environments of the two processes differ, see :func:`differing_environment`."""

    @property
    def cause(self) -> str:
        """What it may come from: another environment first, since two seeds are not the fault of a sampler."""
        cause = CAUSES[self.quantity]
        missing = [name for name in _CLAIMED.get(self.quantity, ()) if name not in self.same]
        if missing:
            cause = f"With no {' and '.join(missing)} to compare, {cause.partition(': ')[2]}"
        if not self.environment:
            return cause
        return f"{'; '.join(self.environment)}. If that is meant to make no difference: {cause[0].lower()}{cause[1:]}"

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
    return f"{value:.9g}" if isinstance(value, float) else _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


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
    compared = _compared(one.has, other.has, rtol, left_out or {})
    differing = _differing(one, other, compared, names or {}, rtol, left_out or {})
    if not differing:
        return None
    quantity, *also = differing
    return Difference(rank, one, other, quantity, differing[quantity], compared[: compared.index(quantity)], also)


def _compared(one: Shape, other: Shape, rtol: float | None, left_out: LeftOut) -> list[str]:
    """Return which quantities are compared of two runs: those that both have, as far as ``rtol`` allows it."""
    compared = []
    for quantity, mine, theirs in zip(QUANTITIES, one, other, strict=False):
        if not mine or not theirs or not left_out.get(quantity, "all"):
            continue
        if rtol is not None and (quantity in _AFTER_OUTPUTS or (quantity == "outputs" and not (one[-1] or other[-1]))):
            continue  # there is no number that could be near another one
        compared.append(quantity)
    return compared


def _differing(
    one: Entry,
    other: Entry,
    compared: Sequence[str],
    names: Mapping[str, Sequence[str]],
    rtol: float | None,
    left_out: LeftOut,
) -> dict[str, list[str]]:
    """Return what differs among the ``compared`` quantities, with the names of the parts that do."""
    differing: dict[str, list[str]] = {}
    for quantity in compared:
        mine, theirs = one.digests[quantity], other.digests[quantity]
        without = left_out.get(quantity)
        if quantity == "random":
            # A generator that neither has drawn from does not count: without a seed, the operating system seeds it, so
            # that it has another state in each process.
            drawn = {*one.drawn, *other.drawn}
            parts = [name for name in mine if name in drawn and theirs.get(name, mine[name]) != mine[name]]
            is_same = not parts
        elif quantity == "outputs":
            parts = _differing_values(one.values, other.values, rtol)
            parts = [name for name in parts if name not in (without or ())]
            # Without a tolerance, the digest decides: outputs may have more than numbers, and only these are values.
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
    return differing


def differing_parts(one: Sequence[Ledger], other: Sequence[Ledger], left_out: LeftOut) -> dict[str, set[str]]:
    """Return all that differs in any run of two training runs: by quantity, the names of its parts, if they have any.

    A quantity that differs where no part of it does has the name ``""``.
    """
    found: dict[str, set[str]] = {}
    for mine, theirs in zip(one, other, strict=True):
        for line, opposite in _pairs(mine, theirs):
            if line.is_equal(opposite):
                continue
            compared = _compared(line.has, opposite.has, None, left_out)
            names = _common_names(line, opposite)
            differing = _differing(line.entry, opposite.entry, compared, names, None, left_out)
            for quantity, parts in differing.items():
                found.setdefault(quantity, set()).update(parts or [""])
    return found


def _pairs(one: Ledger, other: Ledger) -> Iterator[tuple[Line, Line]]:
    """Yield the lines of the runs that both have, in order."""
    # Both files are read once and in step, so that only a line of each is held in memory.
    lines, others = one.lines(), other.lines()
    line, opposite = next(lines, None), next(others, None)
    while line is not None and opposite is not None:
        key, other_key = (line.loop, line.run), (opposite.loop, opposite.run)
        if key == other_key:
            yield line, opposite
        if key <= other_key:
            line = next(lines, None)
        if other_key <= key:
            opposite = next(others, None)


def _common_names(one: Line, other: Line) -> dict[str, list[str]]:
    """Return the names of the tensors of those quantities whose tensors have the same names in both."""
    return {quantity: names for quantity, names in one.names.items() if other.names.get(quantity) == names}


def _differing_values(
    mine: Mapping[str, float | str], theirs: Mapping[str, float | str], rtol: float | None
) -> list[str]:
    def is_close(name: str) -> bool:
        if name not in mine or name not in theirs:
            return False
        one, other = _number(mine[name]), _number(theirs[name])
        if one is None or other is None:
            return mine[name] == theirs[name]
        return one == other or (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=rtol or 0.0)

    return [name for name in {**mine, **theirs} if not is_close(name)]


def _number(value: float | str) -> float | None:
    try:
        return float(value)  # also of "nan" and "inf"
    except ValueError:
        return None


def _differing_tensors(mine: str, theirs: str, names: Sequence[str]) -> list[str]:
    """Return the names of the tensors whose digests, one after the other in a text, differ."""
    # The names stand in another line, which may be lost: then the quantity differs without the names of its tensors.
    if len(mine) != len(theirs) or len(mine) != WIDTH * len(names):
        return []
    return [
        name
        for place, name in enumerate(names)
        if mine[WIDTH * place : WIDTH * (place + 1)] != theirs[WIDTH * place : WIDTH * (place + 1)]
    ]


# -- the environment --------------------------------------------------------------------------------------------------


def differing_environment(one: Environment, other: Environment) -> list[str]:
    """Return how the first lines of two processes differ: ``["argv: --seed 0 / --seed 1", "torch: 2.13.0 / 2.12.0"]``.

    What only one of them says is left out.
    """
    differing = []
    if one.get("argv") != other.get("argv") and "argv" in one and "argv" in other:
        differing.append(f"argv: {' / '.join(_differing_arguments(one['argv'], other['argv']))}")
    for name in _ENVIRONMENT:
        if name in one and name in other and one[name] != other[name]:
            length = _COMMIT if name == "commit" else None
            differing.append(f"{name}: {_field(one[name])[:length]} / {_field(other[name])[:length]}")
    return differing


def _field(value: object) -> str:
    return _cut(value if isinstance(value, str) else shown(value))


def _differing_arguments(one: object, other: object) -> tuple[str, str]:
    """Return the arguments that only one of two command lines has."""
    mine, theirs = _arguments(one), _arguments(other)
    if mine is None or theirs is None:
        return _field(one), _field(other)
    only_mine, only_theirs = Counter(mine) - Counter(theirs), Counter(theirs) - Counter(mine)
    if not only_mine and not only_theirs:  # in another order
        only_mine, only_theirs = Counter(mine), Counter(theirs)
    texts = [_cut(" ".join(each.elements())) or "nothing" for each in (only_mine, only_theirs)]
    return texts[0], texts[1]


def _arguments(argv: object) -> list[str] | None:
    """Return the arguments of a command line, an option together with its value: ``["train.py", "--seed 0"]``."""
    if not isinstance(argv, list) or not all(isinstance(word, str) for word in argv):
        return None
    arguments: list[str] = []
    is_option = False
    for word in argv:
        is_value = is_option and not _is_option(word)
        if is_value:
            arguments[-1] += f" {shlex.quote(word)}"
        else:
            arguments.append(shlex.quote(word))
        is_option = not is_value and _is_option(word) and "=" not in word
    return arguments


def _is_option(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


# -- two training runs ------------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Two training runs, as far as both have the same runs."""

    runs: int
    """How many runs both have, of all ranks together, and at least one quantity of them."""
    ranks: int
    quantities: list[str]
    """What was compared, up to the first difference."""
    environment: list[str]
    """How the environments of the processes differ that made these runs."""
    only_one: int
    only_other: int
    """How many runs only one of them has."""
    difference: Difference | None
    old_lines: int = 0
    """How many lines of an older format were left out."""
    rtol: float | None = None
    """The relative difference up to which outputs were compared; ``None`` if bits were."""
    runs_by_quantity: Mapping[str, int] = {}
    """In how many runs each of the quantities was compared."""
    not_compared: Sequence[str] = ()
    """The quantities that a run of one of them has, and that were compared in none."""
    runs_not_compared: int = 0
    """How many runs both have, but no quantity of them."""
    folders: tuple[str, str] = ("", "")
    omissions: tuple[Omissions, Omissions] = (Omissions(), Omissions())
    """How many lines of each were left out."""

    @property
    def is_same(self) -> bool:
        """Whether both have the same runs, with the same bits."""
        return self.difference is None and not self.only_one and not self.only_other


def compare_ledgers(
    one: Sequence[Ledger], other: Sequence[Ledger], rtol: float | None = None, left_out: LeftOut | None = None
) -> Comparison:
    """Return where two training runs differ first, apart from what is ``left_out``.

    Raises:
        LedgerError: they cannot be compared: other ranks, no run in common, or no quantity of these.
    """
    if [ledger.rank for ledger in one] != [ledger.rank for ledger in other]:
        raise LedgerError(f"the training runs have {len(one)} and {len(other)} ranks: only equal ones can be compared")
    folders = one[0].folder, other[0].folder
    # Counted by the numbers of the runs: the lines themselves are only read up to the first difference.
    both = sum(
        len(runs & theirs.runs[loop])
        for mine, theirs in zip(one, other, strict=True)
        for loop, runs in mine.runs.items()
        if loop in theirs.runs
    )
    if not both:
        raise LedgerError("the training runs have no run in common")
    reading = _Reading(rtol, left_out or {})
    for mine, theirs in zip(one, other, strict=True):
        reading.read(mine, theirs)
    counts = reading.counts()
    if not counts:
        raise LedgerError(reading.nothing_compared(folders))
    without = reading.without_quantity()
    omissions = _sum(one), _sum(other)
    return Comparison(
        both - without,
        len(one),
        [name for name in QUANTITIES if name in counts],
        [*reading.environment],
        sum(map(len, one)) - both,
        sum(map(len, other)) - both,
        reading.first,
        sum(each.old_format for each in omissions),
        rtol,
        counts,
        reading.not_compared(counts),
        without,
        folders,
        omissions,
    )


def _sum(ledgers: Sequence[Ledger]) -> Omissions:
    return Omissions(*map(sum, zip(*(ledger.omissions for ledger in ledgers), strict=True)))


class _Reading:
    """What is known of two training runs after a part of their lines."""

    def __init__(self, rtol: float | None, left_out: LeftOut) -> None:
        self._rtol, self._left_out = rtol, left_out
        self.first: Difference | None = None
        self.environment: dict[str, None] = {}
        self._shapes: Counter[tuple[Shape, Shape]] = Counter()

    def read(self, one: Ledger, other: Ledger) -> None:
        """Compare the lines of one rank, up to the first run that differs in any rank."""
        environments: tuple[Environment | None, ...] = ()
        for line, opposite in _pairs(one, other):
            # The ranks are read one after the other. Only a run that is no later than the difference of an earlier rank
            # can still be the first one that differs.
            if self.first is not None and (line.loop, line.run) > (self.first.one.loop, self.first.one.run):
                break
            if environments != (line.environment, opposite.environment):
                environments = line.environment, opposite.environment
                self.environment |= dict.fromkeys(_environment_of(line.environment, opposite.environment))
            shape = line.has
            is_equal = line.is_equal(opposite)
            # There are few different shapes. What was compared is found out once for each of them, and not once for a
            # run.
            self._shapes[shape, shape if is_equal else opposite.has] += 1
            if not is_equal and self._differs(one.rank, line, opposite):
                break

    def _differs(self, rank: int, line: Line, opposite: Line) -> bool:
        """Compare two lines of the same run, and keep their difference if it is the first one."""
        names = _common_names(line, opposite)
        difference = compare_entries(line.entry, opposite.entry, rank, names, self._rtol, self._left_out)
        if difference is None:
            return False
        differing = differing_environment(line.environment or {}, opposite.environment or {})
        difference = difference._replace(environment=differing)
        self.first = difference if self.first is None else min(self.first, difference, key=_place_in_time)
        return True

    def counts(self) -> dict[str, int]:
        """Return in how many runs each quantity was compared."""
        counts: Counter[str] = Counter()
        for shapes, runs in self._shapes.items():
            counts.update(dict.fromkeys(_compared(*shapes, self._rtol, self._left_out), runs))
        return dict(counts)

    def without_quantity(self) -> int:
        """Return in how many runs nothing was compared."""
        of_shapes = self._shapes.items()
        return sum(runs for shapes, runs in of_shapes if not _compared(*shapes, self._rtol, self._left_out))

    def not_compared(self, counts: Mapping[str, int]) -> list[str]:
        """Return which quantities one of them has, and were not compared."""
        has = {name for place in (0, 1) for name in self._quantities(place)}
        return [name for name in QUANTITIES if name in has and name not in counts and self._left_out.get(name, "all")]

    def _quantities(self, place: int) -> list[str]:
        """Return which quantities the first or the second of the training runs has in any run."""
        shapes = [pair[place] for pair in self._shapes]
        return [name for number, name in enumerate(QUANTITIES) if any(shape[number] for shape in shapes)]

    def nothing_compared(self, folders: tuple[str, str]) -> str:
        """Return why nothing was compared."""
        texts = [f"{folder} has {', '.join(self._quantities(place)) or 'none'}" for place, folder in enumerate(folders)]
        if self._rtol is None:
            return f"the training runs have no quantity in common: {'; '.join(texts)}. Give both LedgerHooks one what="
        return (
            f"the training runs have nothing in common that can be compared with a tolerance: {'; '.join(texts)}. "
            "Among the outputs, that is numbers; what comes after them is compared without --rtol"
        )


def _environment_of(one: Environment | None, other: Environment | None) -> list[str]:
    if one is None or other is None:
        return ["not known, because the first line of a process is missing"]
    return differing_environment(one, other)


def _place_in_time(difference: Difference) -> tuple[int, int, int]:
    """Return what orders differences of ranks: in the same run, the earlier quantity is the cause."""
    return difference.one.loop, difference.one.run, QUANTITIES.index(difference.quantity)


# -- what is printed ---------------------------------------------------------------------------------------------------


def lines_of(found: Comparison) -> list[tuple[str, str]]:
    """Return what ``diff`` prints: the heading and the text of each line."""
    lines = [("environment", "; ".join(found.environment) or "the same")]
    difference = found.difference
    if difference is None:
        lines += _lines_of_compared(found)
    else:
        rank = "" if found.ranks == 1 else f", rank {difference.rank}"
        lines += [("first differs", f"{difference.place}{rank}"), ("", difference.line)]
        if difference.also:
            lines.append(("", f"after that: {', '.join(difference.also)}"))
        lines.append(("likely cause", difference.cause))
    if found.only_one or found.only_other:
        lines.append(("not in both", f"{found.only_one} runs of the first, {found.only_other} of the second"))
    return [*lines, *_lines_of_omissions(found)]


def _lines_of_compared(found: Comparison) -> Iterator[tuple[str, str]]:
    ranks = "" if found.ranks == 1 else f" of {found.ranks} ranks"
    by_numbers = [] if found.rtol is None else ["outputs"]
    texts = {name: _of_some_runs(name, found) for name in found.quantities}
    bits = [text for name, text in texts.items() if name not in by_numbers]
    if bits:
        yield "the same bits", f"{_number_of('run', found.runs)}{ranks}: {', '.join(bits)}"
    if "outputs" in by_numbers and "outputs" in texts:
        yield f"within {found.rtol:g}", f"{_number_of('run', found.runs)}{ranks}: the numbers in {texts['outputs']}"
    not_compared = [*found.not_compared]
    if found.runs_not_compared:
        not_compared.append(f"{_number_of('run', found.runs_not_compared)} without a quantity that both have")
    if not_compared:
        yield "not compared", ", ".join(not_compared)


def _of_some_runs(name: str, found: Comparison) -> str:
    """Return the name of a quantity, with the number of runs if it was not compared in all of them."""
    runs = found.runs_by_quantity.get(name, found.runs)
    return name if runs == found.runs else f"{name} ({_number_of('run', runs)})"


def _lines_of_omissions(found: Comparison) -> Iterator[tuple[str, str]]:
    if found.old_lines:
        has = "has" if found.old_lines == 1 else "have"
        lines = f"{_number_of('line', found.old_lines)} of an older format, which {has}"
        yield "left out", f"{lines} other digests for the same values"
    for folder, omissions in zip(found.folders, found.omissions, strict=True):
        for number, text in (
            (omissions.older, "of an older training run in {}"),
            (omissions.undone, "in {} of runs that were not made again after a resume"),
            (omissions.unreadable, "in {} that cannot be read"),
        ):
            if number:
                yield "left out", f"{_number_of('line', number)} {text.format(folder)}"


def _number_of(what: str, number: int) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def as_plain(found: Comparison) -> dict[str, object]:
    """Return what ``diff --json`` prints."""
    difference = found.difference
    plain: dict[str, object] = {
        "same": difference is None,
        "rtol": found.rtol,
        "runs": found.runs,
        "runs_not_compared": found.runs_not_compared,
        "ranks": found.ranks,
        "quantities": found.quantities,
        "runs_by_quantity": dict(found.runs_by_quantity),
        "not_compared": [*found.not_compared],
        "environment": found.environment,
        "only_in_one": found.only_one,
        "only_in_other": found.only_other,
        "old_lines": found.old_lines,
        "left_out_of_one": _omitted(found.omissions[0]),
        "left_out_of_other": _omitted(found.omissions[1]),
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
            "environment": [*difference.environment],
            "cause": difference.cause,
        }
    return plain


def _omitted(omissions: Omissions) -> dict[str, int]:
    return {"older": omissions.older, "undone": omissions.undone, "unreadable": omissions.unreadable}
