"""The command ``check``: run a script as it is, kill it, start it again, and compare it with itself.

Every process runs the script as ``python script ARGUMENTS`` would, with two variables in its environment: the scratch
folder in which all that torchhooks writes is placed, and the file of what :mod:`torchhooks.tools.ledger.checked` does
in this process.

1. Two training runs are made without an interruption. If they differ, nothing can be said of a resume.
2. One training run is killed and stopped in different places, and goes on each time.
3. If the script ends within the steps, it is started once more: no run may be made.
4. A difference is reproduced before it is named, and what may be its cause is looked up in the script's variables.
"""

from __future__ import annotations

import datetime
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torchhooks.common.text import json_text, plain, print_error, shortened
from torchhooks.tools.ledger.comparing import NOT_COMPARABLE, LeftOut, compare_ledgers, differing_parts
from torchhooks.tools.ledger.keeper import CheckError, Keeper
from torchhooks.tools.ledger.lines import QUANTITIES, LedgerError, read_ledgers
from torchhooks.tools.ledger.processes import Ended, Training
from torchhooks.tools.ledger.verdict import DATA, Kill, Verdict, Walks, as_plain, causes, masked, starting_over, text_of

_LEAST_STEPS = 10
_MOST_LINES = 12  # of the error of a script
_LEAST_TIMEOUT = 60.0  # seconds for a process that resumes, which may be slower than one that does not
_SLOWER = 10  # how many times as long it may take


class Options(NamedTuple):
    """What the command line of ``check`` says.

    Args:
        steps: how many runs are compared.
        epoch_items: how many items an epoch is limited to, if no epoch ends within the steps; 0 for no limit.
        kills: in how many more runs the script is killed.
        ranks: in how many processes the script runs.
        ignores_output: whether what the script prints is not compared.
        ignored: the paths of variables that may start over.
        timeout: how many seconds a process of the script may take.
    """

    steps: int = 60
    epoch_items: int = 8
    kills: int = 0
    ranks: int = 1
    ignores_output: bool = False
    ignored: Sequence[str] = ()
    timeout: float = 600.0


def check(script: Sequence[str], options: Options, as_json: bool = False, keep: bool = False) -> int:
    """Print whether ``script`` resumes exactly. Return 0 if it does, 1 if not, 2 if nothing can be said of it.

    Args:
        script: the path of a file, or ``-m`` and the name of a module, and the arguments of the script.
        options: how many runs are compared, and how.
        as_json: whether to print one JSON object.
        keep: whether the scratch folder stays.
    """
    progress = Progress(script)
    try:
        with _interrupted_by_signals(), Keeper() as keeper:
            if keep:
                keeper.keep()
                print(f"the processes of the script write into {keeper.folder}", file=sys.stderr)
            verdict = prove(script, keeper, options, progress)
    except (CheckError, LedgerError) as error:
        progress.end()
        print_error(str(error), as_json)
        return NOT_COMPARABLE
    progress.end()
    print(json_text(as_plain(verdict)) if as_json else "\n".join(map(plain, text_of(verdict))))
    return verdict.status


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Have signals that end this process do it as Ctrl-C does, so that nothing of it is left."""
    # A signal that is ignored, as nohup does with SIGHUP, stays ignored.
    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


class Progress:
    """Tells people on the standard error which process of the script is running, and how long each has taken."""

    def __init__(self, script: Sequence[str]) -> None:
        self._script = script[1] if script[0] == "-m" else os.path.basename(script[0])
        self._began = time.monotonic()
        self._number = 0
        self._is_in_line = False

    def tell(self, line: str, ended: Ended | None) -> None:
        """Print ``line`` before a process, and how long it took after it."""
        if ended is None:
            self._number += 1
            print(plain(f"{self._number:2}  {line:62}"), end="", file=sys.stderr, flush=True)
        else:
            print(f"{ended.secs:7.1f} s", file=sys.stderr, flush=True)
        self._is_in_line = ended is None

    def expect(self, first: Ended, kills: int) -> None:
        """Say how many processes will follow the first one, and how long they will take in all."""
        starting = min(first.seen.secs, first.secs)
        # A new Python imports what the forks have from here, which has taken most of the time of this process so far.
        secs = 2 * first.secs + (kills + 2) * starting + time.process_time()
        self.note(f"about {kills + 3} more, {secs:.0f} s in all; more if something differs")

    def note(self, text: str) -> None:
        print(plain(f"    {text}"), file=sys.stderr, flush=True)

    def end(self) -> None:
        """Say how long all of it has taken."""
        secs = time.monotonic() - self._began
        begin = "\n" if self._is_in_line else ""
        times = "once" if self._number == 1 else f"{self._number} times"
        print(f"{begin}{plain(self._script)} was started {times}, in {secs:.1f} s", file=sys.stderr, flush=True)


class Silent(Progress):
    """Tells nothing."""

    def __init__(self) -> None:
        pass

    def tell(self, line: str, ended: Ended | None) -> None:
        pass

    def note(self, text: str) -> None:
        pass


def prove(
    script: Sequence[str],
    keeper: Keeper,
    options: Options,
    progress: Progress | None = None,
    reproduce: bool = True,
) -> Verdict:
    """Run ``script`` in processes of its own, and return what was found.

    Args:
        script: the path of a file, or ``-m`` and the name of a module, and the arguments of the script.
        keeper: starts the processes.
        options: how many runs are compared, and how.
        progress: what tells people of the processes; by default, nothing does.
        reproduce: whether a difference is reproduced.

    Raises:
        CheckError: it makes no loop, no run or no checkpoint, it fails, it takes too long, or no process continued from
            a checkpoint.
    """
    progress = progress or Silent()
    _check_arguments(script, options)
    begin = partial(Training, [*script], keeper, ranks=options.ranks, timeout=options.timeout, tell=progress.tell)
    whole = _uninterrupted(script, begin, options, progress)
    one, other = whole.one, whole.other
    found = compare_ledgers(read_ledgers(one.ledger), read_ledgers(other.ledger))
    left_out = _left_out(one, other)
    if left_out is None or found.only_one or found.only_other:
        verdict = Verdict(options.steps, found, is_deterministic=False, epoch_items=one.epoch_items)
        return verdict._replace(written=one.written(), connected=one.connected())
    verdict = _interrupted("interrupted", whole, options, left_out)
    if not verdict.is_exact:
        if reproduce:
            progress.note("once more, since there is a difference")
            again = _interrupted("repeated", whole, options, left_out)
            verdict = verdict._replace(was_reproduced=again.place == verdict.place)
        return verdict
    # Asked only now: a script that begins with the first run each time seems exact, and no checkpoint was restored.
    if not any(verdict.resumed_at):
        raise CheckError(
            "no process continued from a checkpoint, so nothing is proved: save more often than every "
            f"{whole.made} runs, or give --steps more than {options.steps}"
        )
    return verdict


def _check_arguments(script: Sequence[str], options: Options) -> None:
    if options.steps < _LEAST_STEPS:
        raise CheckError(
            f"--steps {options.steps}: must be {_LEAST_STEPS} or more, to kill the script in different places"
        )
    if not options.timeout > 0:
        raise CheckError(f"--timeout {options.timeout:g}: must be more than 0 seconds")
    if script[0] != "-m" and not os.path.isfile(script[0]):
        raise CheckError(f"{script[0]}: is no file; give a script, or -m and the name of a module")


# -- without an interruption ------------------------------------------------------------------------------------------


class _Whole(NamedTuple):
    """Two training runs without an interruption, and how further ones are made.

    Args:
        one, other: the training runs.
        begin: makes another one with a name.
        kills: where to kill it.
        timeout: how many seconds one of its processes may take.
    """

    one: Training
    other: Training
    begin: Callable[..., Training]
    kills: list[Kill]
    timeout: float

    @property
    def made(self) -> int:
        """How many runs they have made."""
        return self.one.processes[0].seen.runs


def _uninterrupted(
    script: Sequence[str], begin: Callable[..., Training], options: Options, progress: Progress
) -> _Whole:
    steps = options.steps
    one = begin("one")
    first = one.start(steps, line=f"{steps} runs without an interruption")
    folders = first.seen.folders
    if folders and (first.code or any(map(_is_real, folders))):
        # The script may have looked at the real folders before torchhooks named them.
        one = begin("placed", folders=folders)
        first = one.start(steps, line=f"{steps} runs, with {shortened(folders, 2)} in the scratch folder")
    _check_first(one, script)
    begin = partial(begin, folders=first.seen.folders)
    epochs = _epochs(one)
    # No epoch has ended within the steps, so what the script does between two epochs would not be compared.
    if options.epoch_items and first.seen.depth > 1 and len({*epochs.values()}) == 1:
        begin = partial(begin, depth=first.seen.depth, epoch_items=options.epoch_items)
        one = begin("short")
        first = one.start(steps, line=f"{steps} runs in epochs of {options.epoch_items} items")
        epochs = _epochs(one)
    # By the runs that were made: the script may have ended before the steps.
    kills = _kills(first.seen.runs, epochs, options.kills)
    progress.expect(first, len(kills))
    # In a process of its own, where a set has another order, unless the person wants it otherwise.
    other = begin("other", hash_seed=os.environ.get("PYTHONHASHSEED", "1"))
    other.start(steps, line=f"{steps} runs once more, in a new Python")
    _check_first(other, script)
    return _Whole(one, other, begin, kills, min(options.timeout, max(_LEAST_TIMEOUT, _SLOWER * first.secs)))


def _is_real(folder: str) -> bool:
    """Return whether there is such a folder without ``check``, in which the script does not run."""
    return os.path.lexists(folder) and not os.path.join(os.getcwd(), "").startswith(os.path.join(folder, ""))


def _check_first(training: Training, script: Sequence[str]) -> None:
    first = training.processes[0]
    name, seen = script[1] if script[0] == "-m" else script[0], first.seen
    if first.stood:
        raise CheckError(
            f"{name} has not ended within {first.secs:.0f} s, and made {_runs(training.runs_made())}: "
            f"it stands {first.stood}. Give more time by --timeout, or fewer runs by --steps"
        )
    if seen.is_one_of_several:
        raise CheckError(
            f"{name} trains in several processes that are no ranks of one process group, so their runs have no order: "
            "check one of them by itself, or have torchrun start ranks: --nproc-per-node N starts them as it does"
        )
    if not seen.loops or not seen.runs:
        what = "no loop of torchhooks" if not seen.loops else "no run"
        raise CheckError(
            f"{name} made {what}, and ended with status {first.code}:\n{first.errors[-2000:]}\nIf it starts its ranks "
            "where they cannot be seen, have torchrun start them: --nproc-per-node N starts the script as it does"
        )
    if first.code != 0:
        raise CheckError(f"{name} ended with status {first.code} without a kill:\n{first.errors[-2000:]}")
    if not seen.saves:
        raise CheckError(f"{name} saves no checkpoints: give the loop a CheckpointSaverHook")
    if not seen.restores:
        raise CheckError(f"{name} restores no checkpoints: give the loop checkpoint_dir=")


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def _check_folders(stopped: Training) -> None:
    """Raise if processes did not look where the ones before have saved.

    Raises:
        CheckError: they have other folders, since the name has the time in it, or changes in another way.
    """
    folders = [each.seen.checkpoint_dirs[0] for each in stopped.processes if each.seen.checkpoint_dirs]
    changed = [*dict.fromkeys(folders)]
    has_time = any(map(_has_date, changed))
    if len(changed) > 1 and (has_time or len(changed) == len(folders)):
        what = "the date or time" if has_time else "a part that changes"
        raise CheckError(
            f"the name of the checkpoint folder has {what} in it, {' and then '.join(changed[:2])}, so that a process "
            "does not resume what another one has saved: give the script a folder that stays the same"
        )


def _notes_of_folders(stopped: Training) -> Iterator[str]:
    """Yield what to know of folders whose names depend on the time."""
    by_process = [{*each.seen.folders} for each in stopped.processes if each.seen.folders]
    folders = set[str]().union(*by_process)
    same = {each for each in folders if all(each in those for those in by_process)}
    dated = sorted(filter(_has_date, folders))
    if dated:
        found = "a process that starts at another time does not find what is there"
        yield f"the date or time is in the name of {shortened(dated, 2)}: {found}"
    others = sorted(folders - same - {*dated})
    if others:
        yield f"not every process writes to {shortened(others, 2)}"


def _has_date(path: str) -> bool:
    """Return whether the date of today, or the time in seconds, is in a path."""
    today = datetime.datetime.now()
    forms = "%Y-%m-%d %Y_%m_%d %Y.%m.%d %Y%m%d %y%m%d %y-%m-%d %d-%m-%Y %d%m%Y %m-%d %m%d %b%d %b-%d %b_%d %d%b"
    dates = [re.escape(date) for date in today.strftime(forms).split()]
    seconds = str(int(today.timestamp()))[:5] + r"\d{5}"  # for a day
    return any(
        re.search(rf"(?<!\d){each}(\d{{3,4}}|\d{{6}})?(?!\d)", path, re.IGNORECASE) for each in [*dates, seconds]
    )


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
    # The seed is the number of runs, so that the same script is killed in the same places again.
    places |= dict.fromkeys(random.Random(made).sample(free, min(more, len(free))), signal.SIGKILL)
    return [Kill(run, by) for run, by in sorted(places.items())]


# -- with interruptions -----------------------------------------------------------------------------------------------


def _interrupted(name: str, whole: _Whole, options: Options, left_out: LeftOut) -> Verdict:
    """Kill a training run in each place, go on each time, and compare it with ``whole``."""
    made, steps = whole.made, options.steps
    stopped = whole.begin(name, timeout=whole.timeout)

    def read_before(uninterrupted: Training) -> Training:
        """Return a training run that was read before the runs before which ``stopped`` was read."""
        wanted = stopped.walked().judged
        # A process reads what the script holds for a few seconds only. The uninterrupted one may have stopped reading
        # before a run at which a resumed one began.
        if wanted <= {each.run for each in uninterrupted.walked().moments} | {*range(made + 1, steps + 1)}:
            return uninterrupted
        again = whole.begin(f"{uninterrupted.name}-again-{name}")
        moments = sorted({1, made, *wanted})
        again.start(steps, moments, line=f"{steps} runs once more, to look at what the script holds")
        return again

    try:
        _interrupt(stopped, whole.kills, steps, made)
    except _FailedError as error:
        resumed_at = [ended.seen.resumed_at for ended in stopped.processes[1:-1]]
        verdict = Verdict(made, None, resumed_at=resumed_at, failed=_end_of(str(error)))
    else:
        _check_folders(stopped)
        verdict = _verdict(read_before(whole.one), read_before(whole.other), stopped, made, options, left_out)
    notes = [*verdict.notes, *_notes_of_folders(stopped)]
    verdict = verdict._replace(kills=whole.kills, epoch_items=stopped.epoch_items, notes=notes)
    return verdict._replace(written=stopped.written(), connected=stopped.connected())


def _interrupt(training: Training, kills: list[Kill], steps: int, made: int) -> None:
    """Kill a training run in each place, and go on each time."""
    for number, kill in enumerate(kills):
        begin = "resumed and " if number else ""
        how = "killed" if kill.by is signal.SIGKILL else f"stopped by {kill.by.name}"
        ended = training.start(steps, [made], kill.run, kill.by, line=f"{begin}{how} after run {kill.run}")
        _check_resumed(ended, stopped=kill.by is signal.SIGTERM)
    # It may have ended by itself. If it has not, a process that is started after its last run would rightly make
    # further ones.
    for line in ["resumed, to the end", *(["started once more after its end"] if made < steps else [])]:
        _check_resumed(training.start(steps, [made], line=line))


def _check_resumed(ended: Ended, stopped: bool = False) -> None:
    """Raise if the script has failed. If it was stopped, it may say so by its status, but not by 1.

    Raises:
        _FailedError: with what it wrote to the standard error, or where it stands.
    """
    if ended.stood:
        raise _FailedError(
            f"TimeoutError: after {ended.secs:.0f} s, it stands {ended.stood}; without an interruption it ended in time"
        )
    # What has started ranks fails in its own way if these are stopped.
    is_fault = ended.code > 0 and not (stopped and ended.seen.is_started_by_script)
    # After an exception, Python ends with 1. By another status, a script may tell a scheduler that it was stopped.
    if (ended.code == 1 and is_fault) or (is_fault and not stopped):
        raise _FailedError(ended.errors)


def _end_of(errors: str) -> str:
    """Return what a script has written to the standard error at last: its exception, without where it was raised."""
    lines = errors.strip().splitlines()
    raised = [number for number, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    return "\n".join(lines[raised[-1] if raised else 0 :][-_MOST_LINES:])


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
        # A set, because a run that is made again prints its lines again. What only one of the uninterrupted training
        # runs has printed is no line that a resume could have lost.
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
    # The last process was started after the end only if the script has ended within the steps.
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
