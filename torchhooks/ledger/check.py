"""The command ``check``: run a script as it is, kill it, start it again, and compare it with itself.

Every process runs the script as ``python script ARGUMENTS`` would, with two variables in its environment: the scratch
folder in which all that torchhooks writes is placed, and what :mod:`torchhooks.ledger.checked` does in this process.

1. Two processes make ``--steps`` runs without an interruption. If they differ, nothing can be said of a resume.
2. One training run is killed twice and stopped once, in an early, a middle and a late run, and goes on each time.
3. If the script ends within the steps, it is started once more: no run may be made.
4. A difference is reproduced before it is named.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import logging
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from torchhooks.common.files import CHECK_PLAN, PLACES
from torchhooks.ledger import comparing
from torchhooks.ledger.checked import ProcessPlan, Seen
from torchhooks.ledger.comparing import DIFFERENT, NOT_COMPARABLE, SAME, Comparison, compare_ledgers, lines_of
from torchhooks.ledger.lines import LedgerError, read_ledgers

_LEAST_STEPS = 10
_NO_SEED = (
    "look for a missing seed (torch.manual_seed, and those of random and NumPy), for the order of a set, or for an "
    "operator that is not deterministic"
)


class CheckError(Exception):
    """Nothing can be said of the script, and why."""


class Ended(NamedTuple):
    """A process of the script that is over."""

    code: int
    printed: list[str]
    errors: str
    seen: Seen


@dataclass
class Training:
    """One training run of the script, in one process or several, in a scratch folder of its own."""

    command: list[str]
    folder: str
    hash_seed: str | None = None
    """``PYTHONHASHSEED`` of a process of its own; without it, a fork of this process."""
    depth: int = 0
    epoch_items: int = 0
    """How many items a loop of ``until_stop`` with this depth takes at most; 0 for no limit."""
    printed: list[str] = field(default_factory=list)
    processes: list[Ended] = field(default_factory=list)

    @property
    def places(self) -> str:
        return os.path.join(self.folder, "places")

    @property
    def ledger(self) -> str:
        return os.path.join(self.places, "ledger-of-check")

    def start(self, steps: int, kill_after: int = 0, kill_by: int = int(signal.SIGKILL)) -> Ended:
        """Run the script until the run number ``steps``, or until it is killed after another one."""
        os.makedirs(self.ledger, exist_ok=True)
        plan, seen = os.path.join(self.folder, "plan.json"), os.path.join(self.folder, "seen.json")
        if os.path.exists(seen):
            os.remove(seen)
        ProcessPlan(self.ledger, steps, seen, kill_after, kill_by, self.depth, self.epoch_items).write(plan)
        variables = {CHECK_PLAN: plan, PLACES: self.places, "PYTHONUNBUFFERED": "1", "WANDB_MODE": "disabled"}
        if self.hash_seed is not None:
            variables["PYTHONHASHSEED"] = self.hash_seed
        is_fork = self.hash_seed is None and _can_fork()
        run = partial(_fork, folder=self.folder) if is_fork else _spawn
        code, output, errors = run(self.command, variables)
        ended = Ended(code, output.splitlines(), errors, Seen.read(seen))
        self.printed += ended.printed
        self.processes.append(ended)
        return ended


def _spawn(command: list[str], variables: dict[str, str]) -> tuple[int, str, str]:
    """Run ``command`` in a new process, and return how it ended and what it printed."""
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def _can_fork() -> bool:
    # A process that has seen a device must not be forked.
    return hasattr(os, "fork") and not torch.accelerator.is_available()


def _fork(command: list[str], variables: dict[str, str], folder: str) -> tuple[int, str, str]:
    """Run the script of ``command`` in a fork of this process, which has imported torch already.

    Ten times as fast as :func:`_spawn`. This process must not have used a device, or started threads of torch.
    """
    paths = os.path.join(folder, "stdout"), os.path.join(folder, "stderr")
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        _become(command, variables, paths)
    try:
        _, status = os.waitpid(child, 0)
    except BaseException:  # a Ctrl-C
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    output, errors = (Path(path).read_text(encoding="utf-8", errors="replace") for path in paths)
    return os.waitstatus_to_exitcode(status), output, errors


def _become(command: list[str], variables: dict[str, str], paths: tuple[str, str]) -> NoReturn:
    """Run the script of ``command`` in this process, which is a new fork, as Python would, and exit."""
    code = 1
    try:
        os.environ.update(variables)
        for number, path in enumerate(paths, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, "utf-8", closefd=False) for number in (1, 2))
        sys.argv = command[1:]
        sys.path[0] = os.path.dirname(os.path.abspath(command[1]))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # As in a new process, the operating system seeds what the script does not seed.
        random.seed()
        np.random.seed()
        torch.seed()
        for handler in logging.getLogger().handlers[:]:
            logging.getLogger().removeHandler(handler)
        code = _run(command[1])
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _run(script: str) -> int:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()  # noqa: SLF001 - the fork ends without the end of the interpreter, which would call it
    return 0


class Verdict(NamedTuple):
    """What ``check`` found.

    Args:
        steps: how many runs were compared.
        resumed_at: after which runs processes have continued from a checkpoint.
        comparison: the training run that was interrupted, compared with the uninterrupted one.
        lost, added: lines that only one of them has printed.
        epoch_items: how many items an epoch was limited to; 0 if it was not.
        runs_after_end: how many runs a finished training run made when it was started once more.
        is_deterministic: whether two uninterrupted ones are the same.
        was_reproduced: whether the difference came again.
    """

    steps: int
    resumed_at: list[int]
    comparison: Comparison
    lost: list[str]
    added: list[str]
    epoch_items: int = 0
    runs_after_end: int = 0
    is_deterministic: bool = True
    was_reproduced: bool = True

    @property
    def is_exact(self) -> bool:
        found = self.comparison
        same_runs = found.difference is None and not found.only_one and not found.only_other
        return same_runs and not self.lost and not self.runs_after_end


class Options(NamedTuple):
    """What the command line of ``check`` says.

    Args:
        steps: how many runs are compared.
        epoch_items: how many items an epoch is limited to, if no epoch ends within the steps; 0 for no limit.
        ignores_output: whether what the script prints is not compared.
    """

    steps: int = 60
    epoch_items: int = 8
    ignores_output: bool = False


def check(script: str, arguments: Sequence[str], options: Options, as_json: bool = False, keep: bool = False) -> int:
    """Print whether ``script`` resumes exactly. Return 0 if it does, 1 if not, 2 if nothing can be said of it."""
    scratch = tempfile.mkdtemp(prefix="torchhooks-check-")
    try:
        verdict = prove([sys.executable, script, *arguments], scratch, options)
    except (CheckError, LedgerError) as error:
        print(json.dumps({"error": str(error)}) if as_json else error, file=sys.stdout if as_json else sys.stderr)
        return NOT_COMPARABLE
    finally:
        if keep:
            print(f"the processes of the script have written into {scratch}", file=sys.stderr)
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps(as_plain(verdict), indent=2) if as_json else "\n".join(text_of(verdict)))
    return SAME if verdict.is_exact and verdict.is_deterministic else DIFFERENT


def prove(command: list[str], scratch: str, options: Options) -> Verdict:
    """Run the script of ``command`` in processes of its own, and return what was found.

    Raises:
        CheckError: it makes no loop, no run or no checkpoint, it fails, or no process continued from a checkpoint.
    """
    steps = options.steps
    if steps < _LEAST_STEPS:
        raise CheckError(f"--steps {steps}: must be {_LEAST_STEPS} or more, to kill the script in different places")
    if _can_fork():
        importlib.import_module("torch._dynamo")  # as every optimizer does; once here instead of in each fork
    training = partial(Training, command)
    whole = training(os.path.join(scratch, "whole"), hash_seed="1")
    first = whole.start(steps)
    _check_first(first, command)
    epochs = {entry.epoch for ledger in read_ledgers(whole.ledger) for entry in ledger.entries.values()}
    epoch_items = options.epoch_items if first.seen.depth > 1 and len(epochs) == 1 else 0
    if epoch_items:
        training = partial(training, depth=first.seen.depth, epoch_items=epoch_items)
        whole = training(os.path.join(scratch, "short"), hash_seed="1")
        first = whole.start(steps)
    again = training(os.path.join(scratch, "again"))
    again.start(steps)
    found = compare_ledgers(read_ledgers(whole.ledger), read_ledgers(again.ledger))
    if found.difference is not None or found.only_one or found.only_other:
        return Verdict(steps, [], found, [], [], is_deterministic=False)
    made = first.seen.runs

    def verdict_of(name: str) -> Verdict:
        stopped = training(os.path.join(scratch, name))
        _interrupt(stopped, steps, made)
        return _verdict(whole, again, stopped, made, options.ignores_output)._replace(epoch_items=epoch_items)

    verdict = verdict_of("interrupted")
    if not verdict.is_exact:
        return verdict._replace(was_reproduced=_place(verdict_of("repeated")) == _place(verdict))
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


def _interrupt(training: Training, steps: int, made: int) -> None:
    """Kill a training run early, stop it in a middle run by SIGTERM, kill it late, and go on each time."""
    # Different remainders matter to scripts that accumulate over several items.
    places = sorted({max(made * 3 // 11, 1), max(made * 6 // 11, 2), max(made * 10 // 11, 3)})
    for place, by in zip(places, (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL), strict=False):
        _check_resumed(training.start(steps, place, int(by)))
    _check_resumed(training.start(steps))
    if made < steps:  # the script has ended by itself
        _check_resumed(training.start(steps))


def _check_resumed(ended: Ended) -> None:
    if ended.code > 0 and ended.code != 128 + signal.SIGTERM:
        raise CheckError(
            f"the script ended with status {ended.code} when it was resumed after run {ended.seen.resumed_at}:\n"
            f"{ended.errors[-2000:]}"
        )


def _verdict(whole: Training, again: Training, stopped: Training, made: int, ignore_output: bool) -> Verdict:
    found = compare_ledgers(read_ledgers(whole.ledger), read_ledgers(stopped.ledger))
    lost: list[str] = []
    added: list[str] = []
    if not ignore_output:
        common = Counter(whole.printed) & Counter(again.printed)
        lost = [line for line in common if line not in stopped.printed]
        if lost:
            added = [line for line in dict.fromkeys(stopped.printed) if line not in whole.printed]
    resumed_at = [ended.seen.resumed_at for ended in stopped.processes[1:]]
    after_end = stopped.processes[-1].seen.runs if len(stopped.processes) > 4 else 0
    return Verdict(made, resumed_at, found, lost, added, runs_after_end=after_end)


def _place(verdict: Verdict) -> tuple[object, ...]:
    difference = verdict.comparison.difference
    where = None if difference is None else (difference.one.run, difference.quantity)
    return where, verdict.lost, bool(verdict.runs_after_end)


def text_of(verdict: Verdict) -> list[str]:
    """Return the lines that ``check`` prints."""
    if not verdict.is_deterministic:
        report = [f"{name:15}{text}" for name, text in lines_of(verdict.comparison) if name != "likely cause"]
        return [
            "two training runs without an interruption differ, so nothing can be said of a resume:",
            *report,
            _NO_SEED,
        ]
    at = ", ".join(map(str, verdict.resumed_at))
    short = f" (epochs of {verdict.epoch_items} items)" if verdict.epoch_items else ""
    lines = [
        f"two training runs of {verdict.steps} runs{short}: the same bits",
        f"killed, stopped by SIGTERM, killed, and resumed after the runs {at}",
    ]
    if verdict.is_exact:
        return [*lines, f"resumes exactly: {lines_of(verdict.comparison)[-1][1]}"]
    if not verdict.was_reproduced:
        return [
            *lines,
            "a difference did not come again, so the script is not deterministic: it was",
            *_report(verdict),
        ]
    return [*lines, "does NOT resume exactly, and again when repeated:", *_report(verdict)]


def _report(verdict: Verdict) -> list[str]:
    found = verdict.comparison
    lines = []
    if found.difference is not None or found.only_one or found.only_other:
        lines += [f"{name:15}{text}" for name, text in lines_of(found) if name != "environment"]
    if verdict.runs_after_end:
        lines.append(f"after its end  {verdict.runs_after_end} runs were made by a process that was started once more")
    if verdict.lost:
        lines += [f"not printed    {line}" for line in verdict.lost[:3]]
        lines += [f"but            {line}" for line in verdict.added[:3]]
        if found.difference is None:
            lines.append(
                "likely cause   A variable that starts over, such as a sum over an epoch: keep it in Variables"
            )
    return lines


def as_plain(verdict: Verdict) -> dict[str, Any]:
    """Return what ``check --json`` prints."""
    return {
        "exact": verdict.is_exact and verdict.is_deterministic,
        "deterministic": verdict.is_deterministic,
        "reproduced": verdict.was_reproduced,
        "steps": verdict.steps,
        "epoch_items": verdict.epoch_items,
        "resumed_at": verdict.resumed_at,
        "lines_lost": verdict.lost,
        "lines_added": verdict.added,
        "runs_after_end": verdict.runs_after_end,
        "comparison": comparing.as_plain(verdict.comparison),
    }
