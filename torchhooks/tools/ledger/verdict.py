"""What ``check`` says of a script: which differences count, what they come from, and in which order that is told.

================  =====================================================================================  ===========
class             what it is                                                                             exit status
================  =====================================================================================  ===========
computed          random states, outputs, gradients, parameters, optimizers or the state differ, a line  1
                  that is printed, or which runs are made; or the script fails when it is resumed
starts over       a variable starts over, and nothing has used it within the compared runs               1
data only         the item or the arguments differ, and nothing that is computed from them               0, a note
harmless          a variable that is missing after a resume and no part of the training run              0, a note
nothing said      two training runs without an interruption differ, or nothing could be compared         2
================  =====================================================================================  ===========

A variable is *carried* if it has another value before the last run than before the first one, and the same in both
training runs without an interruption. It *starts over* if it is carried, and another one when a process has resumed,
and still before the second run of that process: what is there again by then was made again.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchhooks.common.text import shortened
from torchhooks.tools.ledger import comparing
from torchhooks.tools.ledger.comparing import DIFFERENT, NOT_COMPARABLE, SAME, Comparison, lines_of
from torchhooks.tools.ledger.walk import RUNNING_FOR, Differing, Moment, Node, Walked, at, differing

_MOST_CAUSES = 4
_MANY_MEMBERS = 3  # of a container, which are told in one line
_MODES = (".training", ".requires_grad")
DATA = frozenset({"item", "arguments"})
"""The quantities that nothing is computed in."""

_NO_SEED = (
    "look for a missing seed (torch.manual_seed, random.seed, numpy.random.seed), for the order of a set, or for an "
    "operator that is not deterministic"
)
_OTHER_RUNS = (
    "Look for a limit that counts the runs of this process, such as StopAtStepHook(num_steps=) or a counter of the "
    "script, and for epochs or batches that are not iterated by until_stop"
)
_RULE = "rule 6 of docs/loops.md"
_OF_LINES = "A variable that starts over, such as a sum over an epoch, or code that runs again"


class Kill(NamedTuple):
    """After which run a process gets which signal."""

    run: int
    by: signal.Signals


class Suspect(NamedTuple):
    """What is another value before a run that was made after a resume.

    Args:
        name: how the script reaches it.
        run: the number of the run.
        without, after: its value without an interruption, and after the resume; empty but for numbers and strings.
        starts_over: whether it is what it was before the first run of all.
        is_part: whether it is a module, an optimizer or another object that could be in ``state``, or has one in it.
        is_saved: whether checkpoints contain it, so that code between two runs has changed it.
        is_missing: whether it does not exist after the resume.
        is_reordered: whether only the order of its members is another one.
        lacks: of a dict that only lacks entries after the resume, how many it lacks.
    """

    name: str
    run: int
    without: str = ""
    after: str = ""
    starts_over: bool = False
    is_part: bool = False
    is_saved: bool = False
    is_missing: bool = False
    is_reordered: bool = False
    lacks: int = 0

    def __str__(self) -> str:
        if self.is_saved:
            return f"{self.name} is another one before run {self.run}: code between two runs changes it"
        if self.lacks:
            return f"{self.name} lacks {self.lacks} of its entries after the resume"
        if self.is_missing:
            return f"{self.name} is missing after the resume"
        what = "starts over" if self.starts_over else "is in another order" if self.is_reordered else "is another one"
        values = f": {self.after} after the resume, {self.without} without an interruption" if self.without else ""
        return f"{self.name} {what}{values}"


class Verdict(NamedTuple):
    """What ``check`` found.

    Args:
        steps: how many runs were compared.
        comparison: the training run that was interrupted, compared with the uninterrupted one; or, if these are not
            the same, two uninterrupted ones.
        kills: what ended its processes.
        resumed_at: after which runs processes have continued from a checkpoint.
        lost, added: lines that only one of them has printed.
        runs_after_end: how many runs a finished training run made when it was started once more.
        suspects: what the difference may come from.
        forgotten: what starts over, and nothing has used.
        notes: what differs and does not count.
        unseen: what cannot be seen of the script.
        failed: the error of the script when it was resumed; empty if there was none.
        written: the files that the script itself opens for writing.
        connected: the other machines to which it opens connections.
        epoch_items: how many items an epoch was limited to; 0 if it was not.
        data_only: whether the data differ and nothing that is computed from them.
        is_deterministic: whether two uninterrupted ones are the same.
        was_reproduced: whether the difference came again.
    """

    steps: int
    comparison: Comparison | None
    kills: Sequence[Kill] = ()
    resumed_at: Sequence[int] = ()
    lost: Sequence[str] = ()
    added: Sequence[str] = ()
    runs_after_end: int = 0
    suspects: Sequence[Suspect] = ()
    forgotten: Sequence[Suspect] = ()
    notes: Sequence[str] = ()
    unseen: Sequence[str] = ()
    failed: str = ""
    written: Sequence[str] = ()
    connected: Sequence[str] = ()
    epoch_items: int = 0
    data_only: bool = False
    is_deterministic: bool = True
    was_reproduced: bool = True

    @property
    def is_computed_same(self) -> bool:
        """Whether all that is computed, printed and made is the same."""
        if self.failed or self.lost or self.runs_after_end or self.comparison is None or not self.is_deterministic:
            return False
        return self.comparison.is_same or self.data_only

    @property
    def is_exact(self) -> bool:
        return self.is_computed_same and not self.forgotten

    @property
    def status(self) -> int:
        """The exit status of the command."""
        if self.is_exact:
            return SAME
        return DIFFERENT if self.is_deterministic and self.was_reproduced else NOT_COMPARABLE

    @property
    def place(self) -> tuple[object, ...]:
        """What has to come again for a difference to be reproduced."""
        difference = None if self.comparison is None else self.comparison.difference
        where = None if difference is None or self.data_only else (difference.one.run, difference.quantity)
        names = [each.name for each in self.forgotten]
        return where, [*self.lost], bool(self.runs_after_end), bool(self.failed), names


# -- causes -----------------------------------------------------------------------------------------------------------


class Walks(NamedTuple):
    """What the script held: in two training runs without an interruption, and in the one that was interrupted."""

    one: Walked
    other: Walked
    stopped: Walked

    @property
    def nodes(self) -> dict[str, Node]:
        return self.one.nodes | self.other.nodes | self.stopped.nodes


class _Changed(NamedTuple):
    suspect: Suspect
    rank: tuple[int, ...]
    is_carried: bool = False
    is_back: bool = False
    """Whether it has the right value before the second run of the process."""
    is_judged: bool = False
    """Whether there is a second run, and it is neither a mode, nor a library's own, nor set again before it is read."""


def causes(walks: Walks, run: int | None, ignored: Sequence[str] = ()) -> list[Suspect]:
    """Return what may have made run number ``run`` another one: what differs when its process began.

    After that comes what started over in an earlier process, and was not used in it.

    Args:
        walks: what the script held.
        run: the first run that differs; ``None`` if only what is printed does.
        ignored: the paths that are not named.
    """
    nodes = walks.nodes
    begun = [each for each in walks.stopped.moments if each.is_first and each.run > 1]
    near = None
    if run is not None:
        # The process that made the run. What earlier ones lacked follows at the end, from starting_over().
        begun = [each for each in begun if each.run <= run][-1:]
        near = [each for each in walks.stopped.moments if each.run <= run][-1:]
    found: list[Suspect] = []
    for resumed in begun:
        changed = sorted(_changed(walks, nodes, resumed, *(near or ())), key=lambda each: each.rank)
        found = [each.suspect for each in changed if not is_ignored(each.suspect.name, ignored)]
        if found:
            break
    over, _ = starting_over(walks, ignored, run)
    named = {each.name for each in found}
    saved = [f'state["{each.name}"]' for each in found if each.is_saved]
    found += [each for each in over if each.name not in named]
    return [each for each in found if not is_ignored(each.name, saved)]  # what such a part has in it is no news


def starting_over(walks: Walks, ignored: Sequence[str] = (), run: int | None = None) -> tuple[list[Suspect], list[str]]:
    """Return what starts over in a process, and the names of what is missing after a resume and is no part.

    With ``run``, only processes count that began before that run: what differs in later ones follows from it.
    """
    nodes = walks.nodes
    over: dict[str, tuple[tuple[int, ...], Suspect]] = {}
    missing: dict[str, None] = {}
    for resumed in walks.stopped.moments:
        # A process that begins with the first run has resumed nothing, so all of it rightly starts over.
        if not resumed.is_first or resumed.run <= 1 or (run is not None and resumed.run > run):
            continue
        for each in _changed(walks, nodes, resumed):
            suspect = each.suspect
            if suspect.is_saved or not each.is_judged or not each.is_carried or each.is_back:
                continue
            if is_ignored(suspect.name, ignored):
                continue
            if suspect.is_missing and not suspect.is_part:
                missing[suspect.name] = None
            else:
                over.setdefault(suspect.name, (each.rank, suspect))
    in_order = [suspect for _, suspect in sorted(over.values())]
    return in_order, [name for name in missing if name not in over]


def is_ignored(name: str, ignored: Sequence[str]) -> bool:
    """Return whether ``name`` is one of the paths ``ignored``, or lies below one."""
    return any(name == each or name.startswith((f"{each}.", f"{each}[", f"{each} in ")) for each in ignored)


def _changed(
    walks: Walks, nodes: Mapping[str, Node], resumed: Moment, near: Moment | None = None
) -> Iterator[_Changed]:
    """Yield what differs before the first run of a process, and whether it still does at the later moment ``near``."""
    mine, again = walks.one.before(resumed.run), walks.other.before(resumed.run)
    if mine is None or again is None:
        return
    changed: set[str] = set()
    for moment in (resumed,) if near is None or near.run < resumed.run else (resumed, near):
        one, other = walks.one.before(moment.run), walks.other.before(moment.run)
        uninterrupted = [each.saved if each is not None else {} for each in (one, other)]
        for name, state in moment.saved.items():
            texts = {saved.get(name) for saved in uninterrupted}
            # A state in which two uninterrupted training runs differ, such as a clock, says nothing about a resume.
            if name not in changed and len(texts) == 1 and None not in texts and state not in texts:
                changed.add(name)
                yield _Changed(Suspect(name, moment.run, is_saved=True), (0,))
    moments = walks.stopped.moments
    place = next(number for number, each in enumerate(moments) if each is resumed)
    second = moments[place + 1] if place + 1 < len(moments) and not moments[place + 1].is_first else None
    start, last = walks.one.moments[0], walks.one.moments[-1]
    # Other variables are dead at another place of the code, and a resumed process may stand at one.
    targets = {*mine.targets, *resumed.targets, *(mine.dead if mine.dead == resumed.dead else ())}
    for each in differing(nodes, mine, resumed):
        expected = at(nodes, mine, each.steps)
        if each.one is None or at(nodes, again, each.steps) != expected:
            continue  # only there after a resume; or a time, or what the operating system has seeded
        first, now = at(nodes, start, each.steps), at(nodes, resumed, each.steps)
        later = second if near is None or near.run <= resumed.run else near
        is_back = later is not None and _is_same(walks, nodes, later, each)
        is_other_kind = each.is_of_library or each.steps[0] in targets or each.steps[-1] in _MODES
        has_none = each.other is None or (each.other.kind, each.other.text) == ("number", "None")
        is_missing = bool(each.lacks) or (has_none and _is_made_once(walks, nodes, each))
        suspect = Suspect(
            each.name,
            resumed.run,
            each.one.text if each.other is not None else "",
            each.other.text if each.other is not None else "",
            starts_over=now == first and now is not None,
            is_part=each.one.is_part or (each.other is not None and each.other.is_part),
            is_missing=each.other is None or is_missing,
            lacks=each.lacks,
            is_reordered=each.other is not None and bool(each.one.bag) and each.one.bag == each.other.bag,
        )
        # What has an innocent reason comes last: a for loop sets it, the process has made it again, or it is a cache.
        rank = (
            1 if not is_other_kind and not is_back and not (suspect.is_missing and not suspect.is_part) else 2,
            _order(each.one, suspect),
            not suspect.starts_over,
            len(each.steps),
        )
        is_carried = first != at(nodes, last, each.steps)
        yield _Changed(suspect, rank, is_carried, is_back, second is not None and not is_other_kind)


def _is_made_once(walks: Walks, nodes: Mapping[str, Node], each: Differing) -> bool:
    """Return whether a value was set once in the uninterrupted training run, and is not set yet after the resume."""
    values = [at(nodes, moment, each.steps) for moment in walks.one.moments]
    now = None if each.other is None else values[0]
    return values[0] == now and sum(one != other for one, other in itertools.pairwise(values)) == 1


def _is_same(walks: Walks, nodes: Mapping[str, Node], moment: Moment, each: Differing) -> bool:
    expected = walks.one.before(moment.run)
    return expected is not None and at(nodes, expected, each.steps) == at(nodes, moment, each.steps)


def _order(node: Node, suspect: Suspect) -> int:
    """Return what is named first: what only has another order, then generators and iterators; numbers last."""
    if suspect.is_reordered:
        return 0
    if node.kind != "number":
        return {"generator": 1, "iterator": 2, "text": 4}.get(node.kind, 3)
    # Among numbers, one that is no count: scripts have many counts that nothing depends on.
    return 5 if re.fullmatch(r"-?\d+|True|False|None", node.text) is None else 6


# -- what is printed --------------------------------------------------------------------------------------------------

_TIME = re.compile(
    r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d([.,]\d+)?)?)?|\d{1,2}:\d\d(:\d\d([.,]\d+)?)?"
    r"|\d+(\.\d+)?(e[+-]?\d+)?\s*(ns|us|ms|s|secs?|seconds?|min|minutes?|h|hours?|(it|steps?|examples?|samples?|"
    r"batch(es)?|tokens?|img|images?)(/|\s+per\s+)(s|sec|second)|/s|(it|s)/(it|s)|[KMG]i?B)(?![\w])"
)


def masked(line: str) -> str:
    """Return a printed line without its times, dates, rates and sizes, which differ in every process."""
    return _TIME.sub("#", line)


def text_of(verdict: Verdict) -> list[str]:
    """Return the lines that ``check`` prints."""
    lines = [*_main_lines(verdict)]
    lines += [_line("note", note) for note in verdict.notes]
    if verdict.is_deterministic and not verdict.failed:
        lines.append(_line("not seen", shortened([RUNNING_FOR, *verdict.unseen], 6)))
    if verdict.written:
        lines.append(_line("not moved", f"files that the script itself writes: {shortened([*verdict.written], 4)}"))
    if verdict.connected:
        machines = shortened([*verdict.connected], 4)
        lines.append(_line("not held back", f"what the script itself sends to {machines}"))
    return lines


def _main_lines(verdict: Verdict) -> Iterator[str]:
    found = verdict.comparison
    if not verdict.is_deterministic and found is not None:
        yield "two training runs without an interruption differ, so nothing can be said of a resume:"
        yield from (_line(name, text) for name, text in lines_of(found) if name != "likely cause")
        yield _NO_SEED
        return
    short = f" (epochs of {verdict.epoch_items} items)" if verdict.epoch_items else ""
    yield f"two training runs of {verdict.steps} runs{short}: the same bits"
    at_runs = ", ".join(f"{kill.run}{' by SIGTERM' if kill.by is signal.SIGTERM else ''}" for kill in verdict.kills)
    yield f"ended after the runs {at_runs}; resumed after the runs {', '.join(map(str, verdict.resumed_at))}"
    if verdict.is_exact and found is not None:
        yield f"resumes exactly: {_what(found)}"
    elif not verdict.was_reproduced:
        yield "a difference did not come again, so the script is not deterministic, and nothing can be said: it was"
        yield from _report(verdict)
    else:
        not_kept = "computes the same bits, but does not keep all that changes"
        what = not_kept if verdict.is_computed_same else "does NOT resume exactly"
        yield f"{what}, and again when repeated:"
        yield from _report(verdict)


def _what(found: Comparison) -> str:
    ranks = "" if found.ranks == 1 else f" of {found.ranks} ranks"
    # The data may differ if nothing does that is computed.
    other = () if found.difference is None else (found.difference.quantity, *found.difference.also)
    return f"{found.runs} runs{ranks}: {shortened([each for each in found.quantities if each not in other], 8)}"


def _report(verdict: Verdict) -> Iterator[str]:
    found = verdict.comparison
    if verdict.failed:
        yield "the script fails when it is resumed:"
        yield from verdict.failed.splitlines()
        return
    if found is not None and not found.is_same and not verdict.data_only:
        # What is known by name is said instead of what it may be.
        left = {"environment", "likely cause"} if verdict.suspects else {"environment"}
        yield from (_line(name, text) for name, text in lines_of(found) if name not in left)
        if found.difference is None:
            yield _line("likely cause", _OTHER_RUNS)
    elif verdict.is_computed_same and found is not None:
        yield _line("the same", _what(found))
    if verdict.runs_after_end:
        runs = "1 run was" if verdict.runs_after_end == 1 else f"{verdict.runs_after_end} runs were"
        yield _line("after its end", f"{runs} made by a process that was started once more")
    yield from (_line("not printed", line) for line in verdict.lost[:3])
    yield from (_line("but", line) for line in verdict.added[:3])
    if verdict.lost and found is not None and found.difference is None and not verdict.suspects:
        yield _line("likely cause", _OF_LINES)
    yield from _listed("look at", verdict.suspects)
    yield from _listed("starts over", verdict.forgotten, "nothing has used it")
    if verdict.suspects or verdict.forgotten:
        yield _line("", f"Keep numbers and lists in Variables, and put objects into state={{...}}: {_RULE}")
    if verdict.forgotten:
        yield _line("", f"What does not matter can be left out: --ignore '{verdict.forgotten[0].name}'")


def _listed(heading: str, suspects: Sequence[Suspect], more: str = "") -> Iterator[str]:
    texts = _grouped(suspects)
    for number, text in enumerate(texts[:_MOST_CAUSES]):
        yield _line("" if number else heading, f"{text}{f', and {more} yet' if more else ''}")
    if len(texts) > _MOST_CAUSES:
        yield _line("", f"and {len(texts) - _MOST_CAUSES} more")


def _grouped(suspects: Sequence[Suspect]) -> list[str]:
    """Return what is said of ``suspects``: of many members of one container, once."""
    members: dict[str, list[Suspect]] = {}
    for each in suspects:
        members.setdefault(each.name.partition("[")[0], []).append(each)
    texts: dict[str, None] = {}
    for each in suspects:
        container, _, rest = each.name.partition("[")
        alike = members[container]
        if not rest or len(alike) < _MANY_MEMBERS:
            texts[str(each)] = None
            continue
        what = "start over" if all(member.starts_over for member in alike) else "are other ones"
        texts[f"{container}: {len(alike)} of its members {what}, such as [{alike[0].name.partition('[')[2]}"] = None
    return [*texts]


def _line(heading: str, text: str) -> str:
    return f"{heading:15}{text}"


def as_plain(verdict: Verdict) -> dict[str, Any]:
    """Return what ``check --json`` prints."""
    return {
        "exact": verdict.is_exact,
        "deterministic": verdict.is_deterministic,
        "reproduced": verdict.was_reproduced,
        "steps": verdict.steps,
        "epoch_items": verdict.epoch_items,
        "ended_after": [{"run": kill.run, "by": kill.by.name} for kill in verdict.kills],
        "resumed_at": verdict.resumed_at,
        "failed": verdict.failed,
        "lines_lost": verdict.lost,
        "lines_added": verdict.added,
        "runs_after_end": verdict.runs_after_end,
        "suspects": [each._asdict() for each in verdict.suspects],
        "forgotten": [each._asdict() for each in verdict.forgotten],
        "notes": verdict.notes,
        "not_seen": [RUNNING_FOR, *verdict.unseen],
        "data_only": verdict.data_only,
        "files_written": verdict.written,
        "connected_to": verdict.connected,
        "comparison": None if verdict.comparison is None else comparing.as_plain(verdict.comparison),
    }
