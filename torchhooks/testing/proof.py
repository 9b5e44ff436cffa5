"""Tests of a training script: does it resume exactly, and is it still what it was?"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from torchhooks.common.checks import whole_number
from torchhooks.lifecycle.extension import Extension, LoopPlan, register_extension, unregister_extension
from torchhooks.lifecycle.hook import SessionRunContext, SessionRunHook, SessionRunValues
from torchhooks.tools.ledger.comparing import Comparison, compare_ledgers, lines_of
from torchhooks.tools.ledger.hook import WHAT, LedgerHook
from torchhooks.tools.ledger.lines import FOLDER, LedgerError, read_ledgers

UPDATE = "TORCHHOOKS_UPDATE_GOLDEN"
"""The environment variable that has :func:`assert_same_run` write what it would compare with."""

_Path = str | os.PathLike[str]


class _InterruptedError(BaseException):
    """Ends a training run where a kill would. Not an ``Exception``, so that no ``except Exception`` keeps it."""


class _Interrupt(SessionRunHook):
    """Ends the process's part of the training run after so many runs of the whole of it."""

    def __init__(self, runs: int) -> None:
        self._runs = runs

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_context.session.total_runs >= self._runs:
            raise _InterruptedError


def assert_resumes_exactly(
    train: Callable[[Path], object], folder: _Path, *, steps: int, stops: Sequence[int], what: Sequence[str] = WHAT
) -> None:
    """Assert that a training run that is interrupted and started again ends with the same bits as an uninterrupted one.

    Two training runs of ``steps`` runs are made without an interruption, and one for each of ``stops``, which is
    interrupted after that run and started again. Every run of each is compared with the uninterrupted one: the data,
    the random states, the outputs, the gradients, the parameters and what is in ``state``.

    >>> def train(folder):
    ...     torch.manual_seed(0)
    ...     model = torch.nn.Linear(4, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...
    ...     def step(inputs):
    ...         loss = model(inputs).square().mean()
    ...         optimizer.zero_grad()
    ...         loss.backward()
    ...         optimizer.step()
    ...         return loss
    ...
    ...     hooks = [CheckpointSaverHook(folder, every_n_steps=2)]
    ...     with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=folder) as loop:
    ...         for inputs in loop.until_stop(batches):
    ...             loop.run(inputs)
    >>> from torchhooks.testing import assert_resumes_exactly
    >>> assert_resumes_exactly(train, "proof", steps=8, stops=[3, 6])
    saving a checkpoint of step 0 into proof/uninterrupted
    ...

    Args:
        train: the training run, which is called with a folder of its own. It makes everything itself: the model, the
            data, the hooks. It is called several times in this process, each time with other seeds than before, so it
            has to set its own.
        folder: an empty folder for the checkpoints and ledgers, such as pytest's ``tmp_path``.
        steps: after how many runs a training run ends, unless it ends before.
        stops: after which runs one is interrupted, as a kill would. Choose them with different remainders, in and
            between the epochs.
        what: what is compared, see :class:`torchhooks.LedgerHook`.

    Raises:
        AssertionError: a run differs, is missing or additional; or nothing was proved, because no start continued from
            a checkpoint.
    """
    whole_number(steps, "steps", 1)
    root = Path(folder)
    whole = _Training(train, root / "uninterrupted", what)
    whole.start(steps)
    # A second one, because a script that does not repeat itself would make every resume look wrong.
    again = _Training(train, root / "again", what)
    again.start(steps)
    found = _compared(whole, again)
    if found.difference is not None:
        raise AssertionError(
            f"two training runs without an interruption differ, so nothing can be said of a resume.\n{_report(found)}\n"
            "Set the seeds in the function: torch.manual_seed(0), and those of random and NumPy where they are used."
        )
    resumed_at = []
    for stop in stops:
        stopped = _Training(train, root / f"stopped-{whole_number(stop, 'stops', 1)}", what)
        stopped.start(stop)
        stopped.start(steps)
        resumed_at.append(stopped.resumed_at())
        found = _compared(whole, stopped)
        if not found.is_same:
            raise AssertionError(
                f"interrupted after run {stop} and resumed after run {resumed_at[-1]}, the training run is not what it "
                f"is without an interruption.\n{_report(found)}"
            )
    if not any(resumed_at):
        raise AssertionError(
            f"nothing was proved: after stops={list(stops)}, no start continued from a checkpoint. Save checkpoints "
            "before these runs, into the folder that the function gets, and restore from it with checkpoint_dir="
        )


def assert_same_run(folder: _Path, golden: _Path, rtol: float | None = None) -> None:
    """Assert that the training run in ``folder``, which has a LedgerHook, is the one that ``golden`` has.

    With the environment variable ``TORCHHOOKS_UPDATE_GOLDEN=1``, the ledger is copied to ``golden`` instead.

    Args:
        folder: the folder of the training run.
        golden: a folder with the ledger of an earlier one, to keep in the repository.
        rtol: compare the numbers that the step returned, up to this relative difference, instead of bits, for golden
            runs that have to hold on several machines.

    Raises:
        AssertionError: a run differs, is missing or additional, or there is no ``golden`` yet.
    """
    if os.environ.get(UPDATE):
        # copytree() refuses a folder that exists, and runs of an older ledger must not stay.
        shutil.rmtree(golden, ignore_errors=True)
        shutil.copytree(Path(folder, FOLDER), Path(golden, FOLDER))
        return
    try:
        found = compare_ledgers(read_ledgers(golden), read_ledgers(folder), rtol)
    except LedgerError as error:
        raise AssertionError(f"{error}. Set {UPDATE}=1 to write {os.fspath(golden)}") from error
    if not found.is_same:
        raise AssertionError(f"the training run is not the one in {os.fspath(golden)}.\n{_report(found)}")


class _Proof(Extension):
    """Has a loop keep a ledger, and end where a kill would."""

    def __init__(self, ledger: LedgerHook, interrupt: _Interrupt) -> None:
        self._ledger, self._interrupt = ledger, interrupt

    def plan(self, plan: LoopPlan) -> LoopPlan:
        # The interrupt comes last, so that every other hook has had its after_run in the run after which the process is
        # killed, as by a kill between two runs.
        return replace(plan, first=(self._ledger, *plan.first), last=(*plan.last, self._interrupt))


class _Training:
    """One training run, of one or several starts, with its ledger."""

    starts = 0

    def __init__(self, train: Callable[[Path], object], folder: Path, what: Sequence[str]) -> None:
        self._train, self._folder, self._what = train, folder, what
        self.ledger = folder.with_name(f"{folder.name}-ledger")

    def start(self, runs: int) -> None:
        """Start the training run, and interrupt it after so many runs."""
        _Training.starts += 1
        # As in a new process, the generators are in a state that the training run does not know.
        random.seed(_Training.starts)
        np.random.seed(_Training.starts)
        torch.manual_seed(_Training.starts)
        self._folder.mkdir(parents=True, exist_ok=True)

        def make(_: LoopPlan) -> _Proof:
            return _Proof(LedgerHook(self.ledger, what=self._what), _Interrupt(runs))

        register_extension(make)
        try:
            with suppress(_InterruptedError):
                self._train(self._folder)
        # Also after an error, because it would join the loops of all later tests of the process.
        finally:
            unregister_extension(make)

    def resumed_at(self) -> int:
        """Return after which run the last start has continued; 0 if there was no checkpoint."""
        number: int = read_ledgers(self.ledger)[0].environments[-1]["resumed_at"]
        return number


def _compared(one: _Training, other: _Training) -> Comparison:
    try:
        return compare_ledgers(read_ledgers(one.ledger), read_ledgers(other.ledger))
    except LedgerError as error:
        raise AssertionError(f"{error}: the function has to make a MonitoredLoop, and runs with it") from error


def _report(found: Comparison) -> str:
    return "\n".join(f"{name:15}{text}" for name, text in lines_of(found) if name != "environment")
