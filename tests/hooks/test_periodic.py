"""PeriodicHook: when a hook of one's own is due, and what it gets."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_threads import Hub, ThreadRanks, in_threads

from torchhooks import (
    AbortedError,
    AtSteps,
    CheckpointSaverHook,
    EveryEpochs,
    EverySteps,
    MonitoredLoop,
    OnSignal,
    PeriodicHook,
    SecondOrStepTimer,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    over_ranks,
    running_mean,
)
from torchhooks.common.timers import Due
from torchhooks.testing import trace


class Report(PeriodicHook):
    """Records what it gets."""

    fetches: Any = ("global_step", "loss")

    def begin(self) -> None:
        super().begin()
        self.values: list[Any] = []
        self.elapsed: list[float | None] = []
        self.called = 0

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self.called += 1
        return super().before_run(run_context)

    def run_due(self, run_context: SessionRunContext, values: Any) -> None:
        self.values.append(values)
        self.elapsed.append(self.elapsed_secs)

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.values]


def due(losses: int = 9, **arguments: Any) -> list[int]:
    """Return the steps at which a hook with these arguments is due."""
    told = {name: arguments.pop(name) for name in ("start_step", "secs") if name in arguments}
    hook = Report(**arguments)
    trace(hook, losses=[0.5] * losses, **told)
    return hook.steps


# -- when -------------------------------------------------------------------------------------------------------------


def test_a_period_in_steps_is_due_at_its_multiples_with_the_values_of_that_run() -> None:
    hook = Report(2)
    trace(hook, losses=[3, 2, 1, 0, 5])
    assert hook.values == [(2, 2), (4, 0)]


@pytest.mark.parametrize(("start", "steps"), [(0, [4, 8]), (3, [4, 8, 12]), (4, [8, 12])])
def test_after_a_resume_the_multiples_are_the_same(start: int, steps: list[int]) -> None:
    assert due(every_n_steps=4, start_step=start) == steps


def test_a_period_in_seconds_begins_with_the_session_and_then_with_each_trigger() -> None:
    hook = Report(every_n_secs=3)
    trace(hook, losses=[0.5] * 9)  # a step takes a second
    assert hook.steps == [4, 8]  # asked before the step, 3 seconds after the start, and after the end of step 4
    assert hook.elapsed == [4.0, 4.0]


@pytest.mark.parametrize(
    ("timer", "steps"),
    [
        (EverySteps(4), [4, 8]),
        (AtSteps([2, 7]), [2, 7]),
        (SecondOrStepTimer(every_steps=4), [4, 8]),
        (SecondOrStepTimer(every_secs=3), [4, 8]),
    ],
    ids=repr,
)
def test_it_takes_every_timer(timer: Any, steps: list[int]) -> None:
    assert due(timer=timer) == steps


@pytest.mark.parametrize("period", [{"every_n_epochs": 2}, {"timer": EveryEpochs(2)}], ids=str)
def test_a_period_in_epochs_is_due_between_two_runs(period: dict[str, Any]) -> None:
    hook, after = Report(**period), []
    with MonitoredLoop(lambda loss: loss, hooks=[hook]) as loop:
        for _ in loop.until_stop(range(4)):
            for loss in loop.until_stop([0.5, 0.25]):
                loop.run(loss)
            after.append(len(hook.values))
    assert hook.values == [(4, 0.25), (8, 0.25)]
    assert after == [0, 1, 1, 2]


def test_a_signal_is_due_in_the_next_run() -> None:
    hook = Report(timer=OnSignal("SIGUSR1"))
    with MonitoredLoop(lambda: 0.5, hooks=[hook]) as loop:
        for number in range(4):
            if number in (0, 2):
                signal.raise_signal(signal.SIGUSR1)
            loop.run()
    assert hook.steps == [1, 3]


def test_steps_that_are_made_again_after_a_recovery_are_due_again(tmp_path: Path) -> None:
    hook = Report(2)
    losses = [0.5] * 4 + [AbortedError] + [0.5] * 3
    trace(CheckpointSaverHook(tmp_path, save_steps=3), hook, losses=losses, checkpoint_dir=tmp_path)
    assert hook.steps == [2, 4, 4, 6]


def test_in_runs_that_are_not_due_it_is_not_called() -> None:
    hook = Report(4)
    trace(hook, losses=[0.5] * 9)
    assert hook.called == 2


def test_a_hook_can_be_used_again() -> None:
    hook = Report(every_n_secs=3)
    for _ in range(2):
        trace(hook, losses=[0.5] * 5)
        assert hook.steps == [4]


# -- runs that count no step, or several ------------------------------------------------------------------------------


class Accumulating:
    """A step that calls ``optimizer.step()`` as often as ``moves`` say, run after run."""

    def __init__(self, moves: Sequence[int]) -> None:
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.0)
        self.moves = moves
        self.evaluated = 0

    def train(self, *hooks: SessionRunHook) -> None:
        def step(run: int, move: int) -> float:
            for _ in range(move):
                self.optimizer.step()
            return float(run)

        with MonitoredLoop(step, None, self.optimizer, hooks=hooks, step_unit="optimizer_step") as loop:
            for run, move in enumerate(self.moves, 1):
                loop.run(run, move)


@pytest.mark.parametrize(
    ("period", "moves", "values"),
    [
        ({"every_n_steps": 2}, [0, 1, 0, 0, 1, 0, 1], [(2, 5.0)]),
        ({"every_n_steps": 1}, [0, 0, 1, 0, 0, 1], [(1, 3.0), (2, 6.0)]),
        ({"every_n_secs": 0}, [0, 0, 1, 0, 0, 1], [(1, 3.0), (2, 6.0)]),
        # The run that begins at step 3 could reach 4; the one that begins at 6 could not reach 8.
        ({"every_n_steps": 4}, [3, 3, 3, 3], [(6, 2.0), (12, 4.0)]),
        ({"every_n_steps": 1}, [2, 2], [(2, 1.0), (4, 2.0)]),
    ],
    ids=repr,
)
def test_a_run_that_counts_no_step_is_due_in_the_next_one(
    period: dict[str, Any], moves: list[int], values: list[tuple[int, float]]
) -> None:
    hook = Report(**period)
    Accumulating(moves).train(hook)
    assert hook.values == values


def test_a_step_set_at_the_end_of_an_epoch_is_where_the_next_run_begins() -> None:
    class Jumps(SessionRunHook):
        def next_due(self) -> Due:
            return Due(epochs=1)

        def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            run_context.session.global_step = 10

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(counts: bool) -> float:
        if counts:
            optimizer.step()
        return 0.5

    hook = Report(1)
    with MonitoredLoop(step, model, optimizer, hooks=[Jumps(), hook], step_unit="optimizer_step") as loop:
        for _ in loop.until_stop(range(9)):
            loop.run(True)
            break
        loop.run(False)
        loop.run(True)
    assert hook.steps == [1, 11]


def test_in_a_run_that_counts_no_step_nothing_is_evaluated() -> None:
    seen: list[int] = []
    hook = Report(1)
    hook.fetches = ("global_step", lambda global_step: seen.append(global_step))
    Accumulating([0, 0, 1, 0, 1]).train(hook)
    assert seen == [1, 2]


def test_a_running_mean_covers_the_runs_that_count_no_step() -> None:
    hook = Report(1)
    hook.fetches = ("global_step", running_mean("loss"))
    Accumulating([0, 0, 1, 0, 1]).train(hook)
    assert hook.values == [(1, 2.0), (2, 4.5)]


def test_a_running_fetch_in_the_class_is_accumulated_from_the_first_run() -> None:
    class Mean(Report):
        fetches = ("global_step", running_mean("loss"))

    hook = Mean(2)
    assert trace(hook, losses=[1, 2, 3, 5]).lines == []  # no warning
    assert hook.values == [(2, 1.5), (4, 4.0)]


def test_a_signal_is_kept_until_a_run_counts_a_step() -> None:
    hook = Report(timer=OnSignal("SIGUSR1"))

    class Raise(SessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            signal.raise_signal(signal.SIGUSR1)

    Accumulating([0, 0, 1, 1]).train(Raise(), hook)
    assert hook.values == [(1, 3.0)]


# -- what it fetches --------------------------------------------------------------------------------------------------


def test_without_fetches_there_are_no_values() -> None:
    class Silent(Report):
        fetches = None

        def run_due(self, run_context: SessionRunContext, values: Any) -> None:
            self.values.append((run_context.session.global_step, values))

    hook = Silent(2)
    trace(hook, losses=[0.5] * 4)
    assert hook.values == [(2, None), (4, None)]


def test_fetches_are_asked_for_when_a_run_is_due() -> None:
    class Alternating(Report):
        def run_due(self, run_context: SessionRunContext, values: Any) -> None:
            super().run_due(run_context, values)
            self.fetches = "loss" if self.fetches == "global_step" else "global_step"

    hook = Alternating(1)
    hook.fetches = "global_step"
    trace(hook, losses=[0.5] * 3)
    assert hook.values == [1, 0.5, 3]


def test_what_a_submodule_returns_can_be_fetched() -> None:
    class Output(Report):
        fetches = ("global_step", "0:output")

    hook, model = Output(2), torch.nn.Sequential(torch.nn.Linear(1, 1))
    with MonitoredLoop(lambda: model(torch.ones(1)), model, hooks=[hook]) as loop:
        loop.run()
        output = loop.run()
    assert hook.values == [(2, output.detach())]


# -- several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "collective"),
    [({"every_n_steps": 2}, False), ({"every_n_epochs": 1}, False), ({"every_n_secs": 2}, True)],
    ids=repr,
)
def test_a_period_in_seconds_is_decided_for_all_ranks(period: dict[str, Any], collective: bool) -> None:
    assert Report(**period).collective is collective


@pytest.mark.parametrize("timer", [OnSignal("SIGUSR1"), SecondOrStepTimer(every_secs=2)], ids=repr)
def test_a_timer_that_differs_by_rank_is_decided_for_all_ranks(timer: Any) -> None:
    assert Report(timer=timer).collective


def test_a_class_that_is_collective_stays_so() -> None:
    class Together(Report):
        collective = True

    assert Together(2).collective


def test_all_ranks_are_due_in_the_same_runs_and_one_writes() -> None:
    hooks: dict[int, Report] = {}

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        hook = hooks[ranks.rank] = Report(2)
        hook.fetches = ("global_step", over_ranks("loss", "sum"))
        with MonitoredLoop(lambda: float(ranks.rank + 1), hooks=[hook], ranks=ranks) as loop:
            for _ in loop.until_stop(range(5)):
                loop.run()

    assert in_threads(2, main) == [None, None]
    assert [hooks[rank].values for rank in (0, 1)] == [[(2, 3.0), (4, 3.0)]] * 2
    assert [hooks[rank].writes for rank in (0, 1)] == [True, False]


# -- arguments --------------------------------------------------------------------------------------------------------


def test_the_repr_has_the_period() -> None:
    assert repr(Report(10)) == "Report(every_n_steps=10)"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Report has no period: .* every_n_steps=, every_n_secs=, every_n_epochs= and timer="),
        ({"every_n_steps": 2, "every_n_secs": 3}, "every_n_steps=2, every_n_secs=3: .* not two"),
        ({"every_n_steps": 0}, "every_n_steps=0: .* 1 or more"),
    ],
    ids=str,
)
def test_refuses_what_is_no_period(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Report(**given)


def test_a_constructor_that_calls_no_other_is_an_error() -> None:
    class Own(PeriodicHook):
        def __init__(self, path: str) -> None:
            self.path = path

    with pytest.raises(TypeError, match=r"Own has no timer: call super\(\)\.__init__\(every_n_steps=\.\.\.\)"):
        MonitoredLoop(lambda: 0.5, hooks=[Own("run")])
