"""The command ``check``: run a script as it is, kill it, start it again, and compare it with itself.

Every process runs the script as ``python script ARGUMENTS`` would, with two variables in its environment: the scratch
folder in which all that torchhooks writes is placed, and what :mod:`torchhooks.ledger.checked` does in this process.

1. Two training runs are made without an interruption. If they differ, nothing can be said of a resume.
2. One training run is killed and stopped in different places, and goes on each time.
3. If the script ends within the steps, it is started once more: no run may be made.
4. A difference is reproduced before it is named, and what may be its cause is looked up in the script's variables.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torchhooks.common.text import json_text, plain, print_error, shortened
from torchhooks.ledger.comparing import NOT_COMPARABLE, LeftOut, compare_ledgers, differing_parts
from torchhooks.ledger.lines import QUANTITIES, LedgerError, read_ledgers
from torchhooks.ledger.processes import Ended, Training, can_fork
from torchhooks.ledger.verdict import DATA, Kill, Verdict, Walks, as_plain, causes, masked, starting_over, text_of

_LEAST_STEPS = 10
_IMPORTED_LATE = ("torch._dynamo", "torch.utils.tensorboard")  # by optimizers, and by hooks that write curves
_MOST_LINES = 12  # of the error of a script


class CheckError(Exception):
    """Nothing can be said of the script, and why."""


class Options(NamedTuple):
    """What the command line of ``check`` says.

    Args:
        steps: how many runs are compared.
        epoch_items: how many items an epoch is limited to, if no epoch ends within the steps; 0 for no limit.
        kills: in how many more runs the script is killed.
        ranks: in how many processes the script runs.
        ignores_output: whether what the script prints is not compared.
        ignored: the paths of variables that may start over.
    """

    steps: int = 60
    epoch_items: int = 8
    kills: int = 0
    ranks: int = 1
    ignores_output: bool = False
    ignored: Sequence[str] = ()


def check(script: str, arguments: Sequence[str], options: Options, as_json: bool = False, keep: bool = False) -> int:
    """Print whether ``script`` resumes exactly. Return 0 if it does, 1 if not, 2 if nothing can be said of it."""
    scratch = os.path.realpath(tempfile.mkdtemp(prefix="torchhooks-check-"))
    say = _say if sys.stderr.isatty() and not as_json else _say_nothing
    try:
        with _interrupted_by_signals():
            verdict = prove([sys.executable, script, *arguments], scratch, options, say)
    except (CheckError, LedgerError) as error:
        print_error(str(error), as_json)
        return NOT_COMPARABLE
    finally:
        say("")
        if keep:
            print(f"the processes of the script have written into {scratch}", file=sys.stderr)
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    print(json_text(as_plain(verdict)) if as_json else "\n".join(map(plain, text_of(verdict))))
    return verdict.status


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Have signals that end this process do it as Ctrl-C does: they do not reach the sessions of the script."""
    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _say(text: str) -> None:
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    pass


def prove(
    command: list[str],
    scratch: str,
    options: Options,
    say: Callable[[str], None] = _say_nothing,
    reproduce: bool = True,
) -> Verdict:
    """Run the script of ``command`` in processes of its own, and return what was found.

    Args:
        command: Python, the script, and its arguments.
        scratch: an empty folder.
        options: how many runs are compared, and how.
        say: what is called with a line for people before each process.
        reproduce: whether a difference is reproduced.

    Raises:
        CheckError: it makes no loop, no run or no checkpoint, it fails, or no process continued from a checkpoint.
    """
    steps = options.steps
    if steps < _LEAST_STEPS:
        raise CheckError(f"--steps {steps}: must be {_LEAST_STEPS} or more, to kill the script in different places")
    if can_fork():
        for name in _IMPORTED_LATE:  # once here instead of in each fork
            importlib.import_module(name)
    training = partial(Training, command, ranks=options.ranks)
    say(f"{steps} runs without an interruption")
    one = training(os.path.join(scratch, "one"))
    first = one.start(steps)
    _check_first(first, command)
    epochs = _epochs(one)
    epoch_items = options.epoch_items if first.seen.depth > 1 and len({*epochs.values()}) == 1 else 0
    if epoch_items:
        say(f"{steps} runs in epochs of {epoch_items} items")
        training = partial(training, depth=first.seen.depth, epoch_items=epoch_items)
        one = training(os.path.join(scratch, "short"))
        first, epochs = one.start(steps), _epochs(one)
    say(f"{steps} runs once more, in another process")
    # In a process of its own, where a set has another order.
    other = training(os.path.join(scratch, "other"), hash_seed="1")
    _check_first(other.start(steps), command)
    found = compare_ledgers(read_ledgers(one.ledger), read_ledgers(other.ledger))
    left_out = _left_out(one, other)
    if left_out is None or found.only_one or found.only_other:
        return Verdict(steps, found, is_deterministic=False, epoch_items=epoch_items, written=one.written())
    made = first.seen.runs
    kills = _kills(made, epochs, options.kills)

    def interrupted(name: str) -> Verdict:
        stopped = training(os.path.join(scratch, name))
        try:
            _interrupt(stopped, kills, steps, made, say)
        except _FailedError as error:
            resumed_at = [ended.seen.resumed_at for ended in stopped.processes[1:-1]]
            written = stopped.written()
            verdict = Verdict(made, None, resumed_at=resumed_at, failed=_end_of(str(error)), written=written)
        else:
            verdict = _verdict(read_before(one, stopped), read_before(other, stopped), stopped, made, options, left_out)
        return verdict._replace(kills=kills, epoch_items=epoch_items)

    def read_before(uninterrupted: Training, stopped: Training) -> Training:
        """Return a training run that was read before the runs before which ``stopped`` was read."""
        wanted = stopped.walked().judged
        if wanted <= {each.run for each in uninterrupted.walked().moments} | {*range(made + 1, steps + 1)}:
            return uninterrupted
        say(f"{steps} runs once more, to look at what the script holds")
        again = training(f"{uninterrupted.folder}-again-{os.path.basename(stopped.folder)}")
        again.start(steps, sorted({1, made, *wanted}))
        return again

    verdict = interrupted("interrupted")
    if not verdict.is_exact:
        if reproduce:
            say("once more, since there is a difference")
            verdict = verdict._replace(was_reproduced=interrupted("repeated").place == verdict.place)
        return verdict
    if not any(verdict.resumed_at):
        raise CheckError(
            "no process continued from a checkpoint, so nothing is proved: save more often than every "
            f"{made} runs, or give --steps more than {steps}"
        )
    return verdict


def _check_first(first: Ended, command: list[str]) -> None:
    script, seen = command[1], first.seen
    if not seen.loops or not seen.runs:
        what = "no loop of torchhooks" if not seen.loops else "no run"
        raise CheckError(f"{script} made {what}, and ended with status {first.code}:\n{first.errors[-2000:]}")
    if first.code != 0:
        raise CheckError(f"{script} ended with status {first.code} without a kill:\n{first.errors[-2000:]}")
    if not seen.saves:
        raise CheckError(f"{script} saves no checkpoints: give the loop a CheckpointSaverHook")
    if not seen.restores:
        raise CheckError(f"{script} restores no checkpoints: give the loop checkpoint_dir=")


def _epochs(training: Training) -> dict[tuple[int, int], int | None]:
    """Return the epoch of each run, by the numbers of its loop and of the run in it, in order."""
    return {(entry.loop, entry.run): entry.epoch for entry in read_ledgers(training.ledger)[0]}


def _kills(made: int, epochs: Mapping[tuple[int, int], int | None], more: int) -> list[Kill]:
    """Return where to kill a training run of so many runs: early and late, and where it is stopped by ``SIGTERM``.

    A stop saves in the run in which it comes, so the next process begins there: once in the middle of an epoch, and
    once at its end. Different remainders matter to scripts that accumulate over several items.
    """
    in_order = [*epochs.values()]
    ends = [run for run in range(1, made) if in_order[run - 1 : run] != in_order[run : run + 1]]
    places = {
        max(made * 3 // 11, 1): signal.SIGKILL,
        max(made * 6 // 11, 2): signal.SIGTERM,
        max(made * 10 // 11, 3): signal.SIGKILL,
    }
    ends = [run for run in ends if run not in places]
    places |= dict.fromkeys(sorted(ends, key=lambda run: abs(run - made * 8 // 11))[:1], signal.SIGTERM)
    free = [run for run in range(1, made) if run not in places]
    places |= dict.fromkeys(random.Random(made).sample(free, min(more, len(free))), signal.SIGKILL)
    return [Kill(run, by) for run, by in sorted(places.items())]


def _interrupt(training: Training, kills: list[Kill], steps: int, made: int, say: Callable[[str], None]) -> None:
    """Kill a training run in each place, and go on each time."""
    for number, kill in enumerate(kills, 1):
        say(f"{number} of {len(kills) + 1}: {kill.by.name} after run {kill.run}")
        ended = training.start(steps, [made], kill.run, kill.by)
        if _fails(ended, stopped=kill.by is signal.SIGTERM):
            raise _FailedError(ended.errors)
    for text in ["to the end", *(["once more after the end"] if made < steps else [])]:  # it has ended by itself
        say(text)
        ended = training.start(steps, [made])
        if _fails(ended):
            raise _FailedError(ended.errors)


def _end_of(errors: str) -> str:
    """Return what a script has written to the standard error at last: its exception, without where it was raised."""
    lines = errors.strip().splitlines()
    raised = [number for number, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    return "\n".join(lines[raised[-1] if raised else 0 :][-_MOST_LINES:])


def _fails(ended: Ended, stopped: bool = False) -> bool:
    """Return whether the script has failed. If it was stopped, it may say so by its status, but not by 1."""
    return ended.code == 1 or (ended.code > 0 and not stopped)


class _FailedError(Exception):
    """The script has failed when it was resumed."""


def _verdict(
    one: Training, other: Training, stopped: Training, made: int, options: Options, left_out: LeftOut
) -> Verdict:
    expected, resumed = read_ledgers(one.ledger), read_ledgers(stopped.ledger)
    found = compare_ledgers(expected, resumed, left_out=left_out)
    differing = differing_parts(expected, resumed, left_out)
    data_only = bool(differing) and differing.keys() <= DATA and not (found.only_one or found.only_other)
    lost: list[str] = []
    added: list[str] = []
    if not options.ignores_output:
        printed = {masked(line) for line in stopped.printed}
        common = Counter(map(masked, one.printed)) & Counter(map(masked, other.printed))
        lost = [line for line in dict.fromkeys(one.printed) if masked(line) in common.keys() - printed]
        if lost:
            known = {masked(line) for line in one.printed}
            added = [line for line in dict.fromkeys(stopped.printed) if masked(line) not in known]
    run = None
    if found.difference is not None:
        entry = found.difference.one  # moments have the numbers of the runs of all loops in one row
        run = entry.run + sum(len(runs) for loop, runs in expected[0].runs.items() if loop < entry.loop)
    walks = Walks(one.walked(), other.walked(), stopped.walked())
    over, missing = starting_over(walks, options.ignored)
    runs_after_end = stopped.processes[-1].seen.runs if made < stopped.processes[-1].steps else 0
    is_other = bool(lost or runs_after_end) or not (found.is_same or data_only)
    notes = [*_notes_of(left_out)]
    if data_only:
        parts = " and ".join(name for name in QUANTITIES if name in differing)
        notes.append(f"other {parts} after a resume, and nothing that is computed differs")
    if is_other:
        over = []  # it follows from the difference, or is one of its causes
    elif missing:
        notes.append(f"missing after a resume, and not used: {shortened(missing, 4)}")
    return Verdict(
        made,
        found,
        resumed_at=[ended.seen.resumed_at for ended in stopped.processes[1:]],
        lost=lost,
        added=added,
        runs_after_end=runs_after_end,
        suspects=causes(walks, None if data_only else run, options.ignored) if is_other else [],
        forgotten=over,
        notes=notes,
        unseen=sorted({each for walked in walks for moment in walked.moments for each in moment.unseen}),
        written=stopped.written(),
        data_only=data_only,
    )


def _notes_of(left_out: LeftOut) -> Iterator[str]:
    for quantity, parts in left_out.items():
        what = f"{', '.join(sorted(parts))} in {quantity}" if parts else quantity
        yield f"not compared: {what}, which two training runs without an interruption do not have in common"


def _left_out(one: Training, other: Training) -> LeftOut | None:
    """Return what two training runs do not have in common while all that is computed is the same, such as a time.

    ``None`` if they differ in more than that.
    """
    differing = differing_parts(read_ledgers(one.ledger), read_ledgers(other.ledger), {})
    left_out: dict[str, set[str]] = {}
    for quantity, parts in differing.items():
        if quantity in DATA or (quantity in ("outputs", "state") and "" in parts):
            left_out[quantity] = set()
        elif quantity in ("outputs", "state"):
            left_out[quantity] = parts
        else:
            return None
    return left_out
