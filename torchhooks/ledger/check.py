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
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torchhooks.common.text import json_text, plain, print_error, shortened
from torchhooks.ledger import comparing
from torchhooks.ledger.comparing import DIFFERENT, NOT_COMPARABLE, SAME, Comparison, compare_ledgers, lines_of
from torchhooks.ledger.lines import LedgerError, read_ledgers
from torchhooks.ledger.probe import Suspect, forgotten, suspects
from torchhooks.ledger.processes import Ended, Training, can_fork

_LEAST_STEPS = 10
_IMPORTED_LATE = ("torch._dynamo", "torch.utils.tensorboard")  # by optimizers, and by hooks that write curves
_NO_SEED = (
    "look for a missing seed (torch.manual_seed, random.seed, numpy.random.seed), for the order of a set, or for an "
    "operator that is not deterministic"
)


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
    """

    steps: int = 60
    epoch_items: int = 8
    kills: int = 0
    ranks: int = 1
    ignores_output: bool = False


class Kill(NamedTuple):
    """After which run a process gets which signal."""

    run: int
    by: signal.Signals


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
        forgotten: objects with a state that are in no checkpoint, and end as other ones.
        written: the files that the script itself opens for writing.
        epoch_items: how many items an epoch was limited to; 0 if it was not.
        is_deterministic: whether two uninterrupted ones are the same.
        was_reproduced: whether the difference came again.
    """

    steps: int
    comparison: Comparison
    kills: Sequence[Kill] = ()
    resumed_at: Sequence[int] = ()
    lost: Sequence[str] = ()
    added: Sequence[str] = ()
    runs_after_end: int = 0
    suspects: Sequence[Suspect] = ()
    forgotten: Sequence[Suspect] = ()
    written: Sequence[str] = ()
    epoch_items: int = 0
    is_deterministic: bool = True
    was_reproduced: bool = True

    @property
    def is_exact(self) -> bool:
        is_same = self.is_deterministic and self.comparison.is_same
        return is_same and not (self.lost or self.forgotten or self.runs_after_end)


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
    return SAME if verdict.is_exact else DIFFERENT


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
    if not found.is_same:
        return Verdict(steps, found, is_deterministic=False, epoch_items=epoch_items)
    made = first.seen.runs
    kills = _kills(made, epochs, options.kills)

    def interrupted(name: str) -> Verdict:
        stopped = training(os.path.join(scratch, name))
        _interrupt(stopped, kills, steps, made, say)
        verdict = _verdict(one, other, stopped, made, options.ignores_output)
        return verdict._replace(kills=kills, epoch_items=epoch_items)

    verdict = interrupted("interrupted")
    if not verdict.is_exact:
        if reproduce:
            say("once more, since there is a difference")
            verdict = verdict._replace(was_reproduced=_place(interrupted("repeated")) == _place(verdict))
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
    return {key: entry.epoch for key, entry in sorted(read_ledgers(training.ledger)[0].entries.items())}


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
        _check_resumed(training.start(steps, made, kill.run, kill.by), stopped=kill.by is signal.SIGTERM)
    say("to the end")
    _check_resumed(training.start(steps, made))
    if made < steps:  # the script has ended by itself
        say("once more after the end")
        _check_resumed(training.start(steps, made))


def _check_resumed(ended: Ended, stopped: bool = False) -> None:
    """Raise an error if the script has failed. If it was stopped, it may say so by its status, but not by 1."""
    if ended.code == 1 or (ended.code > 0 and not stopped):
        raise CheckError(
            f"the script ended with status {ended.code} when it was resumed after run {ended.seen.resumed_at}:\n"
            f"{ended.errors[-2000:]}"
        )


def _verdict(one: Training, other: Training, stopped: Training, made: int, ignores_output: bool) -> Verdict:
    found = compare_ledgers(read_ledgers(one.ledger), read_ledgers(stopped.ledger))
    lost: list[str] = []
    added: list[str] = []
    if not ignores_output:
        common = Counter(one.printed) & Counter(other.printed)
        lost = [line for line in common if line not in stopped.printed]
        if lost:
            added = [line for line in dict.fromkeys(stopped.printed) if line not in one.printed]
    resumed_at = [ended.seen.resumed_at for ended in stopped.processes[1:]]
    ended_itself = made < stopped.processes[-1].steps
    probed = one.probed(), other.probed(), stopped.probed()
    run = None
    if found.difference is not None:
        entry = found.difference.one  # the probe numbers the runs of all loops in one row
        run = entry.run + sum(loop < entry.loop for loop, _ in read_ledgers(one.ledger)[0].entries)
    return Verdict(
        made,
        found,
        resumed_at=resumed_at,
        lost=lost,
        added=added,
        runs_after_end=stopped.processes[-1].seen.runs if ended_itself else 0,
        suspects=suspects(*probed, run) if run is not None or lost else [],
        forgotten=forgotten(*probed),
        written=stopped.written(),
    )


def _place(verdict: Verdict) -> tuple[object, ...]:
    difference = verdict.comparison.difference
    where = None if difference is None else (difference.one.run, difference.quantity)
    return where, verdict.lost, bool(verdict.runs_after_end), [each.name for each in verdict.forgotten]


# -- what is printed ---------------------------------------------------------------------------------------------------


def text_of(verdict: Verdict) -> list[str]:
    """Return the lines that ``check`` prints."""
    if not verdict.is_deterministic:
        return [
            "two training runs without an interruption differ, so nothing can be said of a resume:",
            *(_line(name, text) for name, text in lines_of(verdict.comparison) if name != "likely cause"),
            _NO_SEED,
        ]
    short = f" (epochs of {verdict.epoch_items} items)" if verdict.epoch_items else ""
    at = ", ".join(f"{kill.run}{' by SIGTERM' if kill.by is signal.SIGTERM else ''}" for kill in verdict.kills)
    lines = [
        f"two training runs of {verdict.steps} runs{short}: the same bits",
        f"ended after the runs {at}; resumed after the runs {', '.join(map(str, verdict.resumed_at))}",
    ]
    if verdict.is_exact:
        lines.append(f"resumes exactly: {lines_of(verdict.comparison)[-1][1]}")
    elif not verdict.was_reproduced:
        lines += ["a difference did not come again, so the script is not deterministic: it was", *_report(verdict)]
    else:
        lines += ["does NOT resume exactly, and again when repeated:", *_report(verdict)]
    if verdict.written:
        lines.append(_line("not moved", f"files that the script itself writes: {shortened([*verdict.written], 4)}"))
    return lines


def _report(verdict: Verdict) -> list[str]:
    found = verdict.comparison
    lines = []
    if not found.is_same:
        lines += [_line(name, text) for name, text in lines_of(found) if name != "environment"]
    if verdict.runs_after_end:
        runs = "1 run was" if verdict.runs_after_end == 1 else f"{verdict.runs_after_end} runs were"
        lines.append(_line("after its end", f"{runs} made by a process that was started once more"))
    lines += [_line("not printed", line) for line in verdict.lost[:3]]
    lines += [_line("but", line) for line in verdict.added[:3]]
    if verdict.lost and found.difference is None and not verdict.suspects:
        lines.append(_line("likely cause", "A variable that starts over, such as a sum over an epoch"))
    lines += [_line("" if number else "look at", str(each)) for number, each in enumerate(verdict.suspects[:4])]
    lines += [
        _line("not saved", f"{each.name}, which is another one before the last run: put it into state={{...}}")
        for each in verdict.forgotten[:4]
    ]
    if verdict.suspects:
        lines.append(
            _line("", "Keep numbers and lists in Variables, and put objects into state={...}: rule 6 of docs/loops.md")
        )
    return lines


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
        "lines_lost": verdict.lost,
        "lines_added": verdict.added,
        "runs_after_end": verdict.runs_after_end,
        "suspects": [each._asdict() for each in verdict.suspects],
        "forgotten": [each._asdict() for each in verdict.forgotten],
        "files_written": verdict.written,
        "comparison": comparing.as_plain(verdict.comparison),
    }
