"""Hooks on several ranks: each takes part on every rank, and the chief writes."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import dtensors
from support.events import curve
from support.packages import import_or_skip
from support.rank_processes import run_ranks
from support.rank_threads import Hub, ThreadRanks, in_threads

import torchhooks.hooks.best
import torchhooks.summary.operations
from torchhooks import (
    BestCheckpointHook,
    CheckpointSaverHook,
    EvaluationHook,
    EverySteps,
    FetchError,
    FinalOpsHook,
    LifecycleError,
    LoggingTensorHook,
    MonitoredLoop,
    MonitoredTrainingLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    PeerError,
    ProfilerHook,
    ProgressBarHook,
    Ranks,
    Scaffold,
    SecondOrStepTimer,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
    StopIfHigherHook,
    StopIfNoIncreaseHook,
    SummarySaverHook,
    over_ranks,
    param_norm,
    running_mean,
    summary,
)
from torchhooks.common.log import logger, speak_as
from torchhooks.common.timers import Due
from torchhooks.fetches.evaluation import Caller
from torchhooks.fetches.over_ranks import RanksEvaluator
from torchhooks.lifecycle.trigger import Trigger
from torchhooks.ranks.ranks import LoopRanks
from torchhooks.summary.histograms import count
from torchhooks.testing import FakeClock, RecordingWriter, log_lines

QUICK = {"tick_secs": 0.01}

distributed: Any = torch.distributed  # whose annotations leave out the stores


def train(
    ranks: Ranks,
    hub: Hub,
    hooks: list[Any],
    losses: Callable[[int, int], Any] = lambda rank, run: float(10 * rank + run),
    runs: int = 3,
    **arguments: Any,
) -> tuple[int, str | None]:
    """Make ``runs`` runs, in which the step returns ``losses(rank, run)`` once all ranks are in it."""

    def step() -> Any:
        hub.gather("step", ranks.rank, 0)
        return losses(ranks.rank, loop.global_step + 1)

    with MonitoredLoop(step, hooks=hooks, ranks=ranks, **arguments) as loop:
        for _ in loop.until_stop(range(runs)):
            loop.run()
    return loop.global_step, loop.stop_reason


class Wants(SessionRunHook):
    """Requests a fetch in every run, and keeps the values."""

    def __init__(self, fetch: Any) -> None:
        self.fetch = fetch
        self.values: list[Any] = []

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(self.fetch)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.values.append(run_values.results)


# -- output on the chief --------------------------------------------------------------------------------------------


def test_only_the_chief_logs_tensors(lines: list[tuple[str, str]]) -> None:
    in_threads(2, lambda ranks, hub: train(ranks, hub, [LoggingTensorHook(["loss"], every_n_iter=2, at_end=True)]))
    assert [text.partition(" (")[0] for _, text in lines] == ["loss = 1.0", "loss = 3.0", "loss = 3.0"]


def test_only_the_chief_writes_summaries(tmp_path: Path) -> None:
    writers = [RecordingWriter(), RecordingWriter()]

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        ops = {"loss": over_ranks("loss", "mean"), "own": "loss"}
        hooks = [SummarySaverHook(save_steps=1, summary_writer=writers[ranks.rank], summary_op=ops)]
        train(ranks, hub, hooks)

    assert in_threads(2, main) == [None, None]
    assert writers[0].scalars == {"loss": [(1, 6.0), (2, 7.0), (3, 8.0)], "own": [(1, 1.0), (2, 2.0), (3, 3.0)]}
    assert (writers[1].records, writers[1].flushed) == ([], 0)


def test_a_rank_that_is_not_the_chief_opens_no_event_file(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        folder = tmp_path / str(ranks.rank)
        hooks = [
            SummarySaverHook(1, output_dir=folder, summary_op={"loss": "loss"}),
            StepCounterHook(output_dir=folder),
        ]
        train(ranks, hub, hooks)

    assert in_threads(2, main) == [None, None]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_checkpoint_saver_that_is_not_the_chief_opens_no_event_file(tmp_path: Path) -> None:
    class SavesNothing:
        def save(self, session: Any, path: str, step: int) -> str:
            return path

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        train(ranks, hub, [CheckpointSaverHook(tmp_path, save_steps=1, saver=SavesNothing())])

    assert in_threads(2, main) == [None, None]
    assert len([*tmp_path.glob("*tfevents*")]) == 1


def test_the_same_hook_writes_in_a_later_loop_of_one_process() -> None:
    hook = LoggingTensorHook(["loss"], every_n_secs=0)
    hook.attach_to_loop(ThreadRanks(Hub(2), 1, random.Random(0)), collective=True, checkpoint_dir=None)
    with log_lines() as lines, MonitoredLoop(lambda: 1.0, hooks=[hook], ranks=False) as loop:
        loop.run()
        loop.run()
    assert len(lines) == 2


def test_examples_per_second_count_the_examples_of_all_ranks(lines: list[tuple[str, str]]) -> None:
    in_threads(2, lambda ranks, hub: train(ranks, hub, [StepCounterHook(2, examples_per_step=8)], runs=5))
    rates = [float(text.partition(": ")[2]) for _, text in lines if "/sec" in text]
    assert len(rates) == 4  # of the chief alone: steps 3 and 5
    assert rates[1::2] == [pytest.approx(16 * rate, rel=1e-4) for rate in rates[::2]]


def tokens_per_step(lines: list[tuple[str, str]]) -> list[float]:
    """Return the tokens (or examples) per second of each report, divided by the steps per second."""
    texts = [text for _, text in lines]
    steps = [float(text.partition(": ")[2]) for text in texts if text.startswith("global_step/sec")]
    counts = [float(text.rpartition(": ")[2]) for text in texts if text.startswith(("tokens/sec", "examples/sec"))]
    return [count / step for count, step in zip(counts, steps, strict=True)]


@pytest.mark.parametrize("what", ["examples_per_step", "tokens_per_step"])
def test_the_examples_and_tokens_of_a_step_are_added_up_over_the_ranks(lines: list[tuple[str, str]], what: str) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        arguments: dict[str, Any] = {what: 8 + ranks.rank}
        train(ranks, hub, [StepCounterHook(2, **arguments)], runs=5)

    in_threads(3, main)
    assert tokens_per_step(lines) == [pytest.approx(8 + 9 + 10, rel=1e-3)] * 2


@pytest.mark.parametrize(
    "arguments", [{"every_n_steps": 2}, {"timer": EverySteps(2)}, {"every_n_steps": None, "every_n_secs": 0.0}]
)
def test_the_tokens_of_a_fetch_are_added_up_over_the_ranks(
    lines: list[tuple[str, str]], arguments: dict[str, Any]
) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        hook = StepCounterHook(tokens_per_step="loss", **arguments)
        train(ranks, hub, [hook], lambda rank, run: 10**rank, runs=6 if "every_n_secs" not in arguments else 300)

    assert in_threads(3, main) == [None] * 3
    found = tokens_per_step(lines)
    assert len(found) >= 2
    assert found == [pytest.approx(111, rel=1e-3)] * len(found)


def test_a_counter_on_the_chief_alone_takes_the_other_ranks_to_be_like_it(lines: list[tuple[str, str]]) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        train(
            ranks, hub, [] if ranks.rank else [StepCounterHook(2, tokens_per_step="loss")], lambda rank, run: 7, runs=5
        )

    assert in_threads(2, main) == [None] * 2
    assert tokens_per_step(lines) == [pytest.approx(14, rel=1e-3)] * 2


def test_the_clock_of_the_chief_decides_when_a_built_in_hook_is_due() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> list[Any]:
        seen: list[Any] = []

        def mean_loss(loss: float) -> float:
            seen.append(loop.global_step)
            return loss

        def step() -> float:
            hub.gather("step", ranks.rank, 0)
            return 1.0

        # The clock of rank 1 never says that the hook is due, and that of rank 2 always does.
        period = (0.005, 1e9, 0.0)[ranks.rank]
        hooks = [LoggingTensorHook({"loss": over_ranks(mean_loss, "mean")}, every_n_secs=period)]
        with MonitoredLoop(step, hooks=hooks, ranks=ranks) as loop:
            while not loop.should_stop():
                loop.run()
                if len(seen) == 4:
                    loop.request_stop()
        return seen

    first, *others = in_threads(3, main)
    assert len(first) >= 4
    assert others == [first, first]


def test_a_final_op_is_evaluated_over_all_ranks() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        hook = FinalOpsHook({"loss": over_ranks("loss", "max"), "least": over_ranks("loss", "min")})
        train(ranks, hub, [hook])
        return hook.final_ops_values

    assert in_threads(3, main) == [{"loss": 23.0, "least": 3.0}] * 3


def test_a_nan_on_one_rank_fails_all_and_is_named() -> None:
    def losses(rank: int, run: int) -> float:
        return math.nan if (rank, run) == (1, 2) else 1.0

    peer, error = in_threads(2, lambda ranks, hub: train(ranks, hub, [NanTensorHook("loss")], losses))
    assert isinstance(error, NanLossDuringTrainingError)
    assert isinstance(peer, PeerError)
    assert str(peer).startswith("rank 1 failed in run 2: NanLossDuringTrainingError: loss is NaN at step 2")


def test_a_nan_on_one_rank_stops_all_and_is_named() -> None:
    def losses(rank: int, run: int) -> float:
        return math.nan if (rank, run) == (1, 2) else 1.0

    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        return train(ranks, hub, [NanTensorHook("loss", fail_on_nan_loss=False)], losses, 100)

    first, second = in_threads(2, main)
    assert first == second
    assert first[1] == "NanTensorHook: loss is NaN at step 2 (rank 1)"


class Saves:
    """A Saver that records what it is asked to save."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, float]] = []

    def wait(self) -> None: ...

    def wait_for_all(self, session: Any) -> None: ...

    def close(self) -> None: ...

    def save(self, session: Any, path: str, step: int, *, score: float) -> None:
        self.steps.append((Path(path).name, step, score))


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[Saves]:
    """The savers of the BestCheckpointHooks that the test creates."""
    created: list[Saves] = []

    def create(**_: Any) -> Saves:
        created.append(Saves())
        return created[-1]

    monkeypatch.setattr(torchhooks.hooks.best, "Saver", create)
    return created


def test_one_metric_decides_on_all_ranks_which_checkpoint_is_the_best(saves: list[Saves], tmp_path: Path) -> None:
    def losses(rank: int, run: int) -> float:
        return float([run, -run][rank])  # which gets better on the chief, and worse on the other rank

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        train(ranks, hub, [BestCheckpointHook(tmp_path / str(ranks.rank), "loss", save_steps=1, mode="max")], losses)

    assert in_threads(2, main) == [None, None]
    assert [each.steps for each in saves] == [[("model.1.ckpt", step, float(step)) for step in (1, 2, 3)]] * 2


def test_a_metric_over_ranks_decides(saves: list[Saves], tmp_path: Path) -> None:
    def losses(rank: int, run: int) -> float:
        return float([run, -2 * run][rank])

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        metric = over_ranks("loss", "mean")
        train(ranks, hub, [BestCheckpointHook(tmp_path / str(ranks.rank), metric, save_steps=1, mode="max")], losses)

    assert in_threads(2, main) == [None, None]
    assert [each.steps for each in saves] == [[("model.1.ckpt", 1, -0.5)]] * 2


def test_no_rank_saves_its_best_after_a_nan_on_one(
    saves: list[Saves], tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    def losses(rank: int, run: int) -> Any:
        return {"loss": math.nan if rank else 1.0, "metric": float(run)}

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        best = BestCheckpointHook(tmp_path / str(ranks.rank), "metric", save_steps=1, mode="max")
        train(ranks, hub, [NanTensorHook("loss", fail_on_nan_loss=False), best], losses, runs=1)

    assert in_threads(2, main) == [None, None]
    assert [each.steps for each in saves] == [[], []]
    assert lines.count(("WARNING", "no checkpoint of step 1: loss is NaN at step 1")) == 2


def test_a_trigger_that_follows_the_chief_does_not_look_at_its_clock(clock: FakeClock) -> None:
    timer = SecondOrStepTimer(every_secs=10)
    trigger = Trigger(timer, triggers_at_once=True, is_collective=True)
    assert trigger.is_due_at(1, 1, clock())  # the first step triggers on every rank
    trigger.fire(1)
    trigger.plan(timer.next_due(), 1)
    assert (trigger.moment, trigger.chief_moment) == (math.inf, clock() + 10)
    clock.advance(100)
    assert not trigger.is_due_at(2, 2, clock())
    trigger.force()
    assert not trigger.is_due_at(1, 2, clock())  # already triggered for this step
    assert trigger.is_due_at(2, 2, clock())
    trigger.fire(2)
    assert trigger.elapsed_secs == 100.0
    assert not trigger.is_due_at(3, 3, clock())


# -- chief_only_hooks -----------------------------------------------------------------------------------------------


def test_chief_only_hooks_exist_on_the_chief_only() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> int:
        hook = Wants("global_step")
        with MonitoredTrainingLoop(
            lambda: hub.gather("step", ranks.rank, 0) and 1.0,
            hooks=[StopAtStepHook(2)],
            chief_only_hooks=[hook],
            ranks=ranks,
        ) as loop:
            while not loop.should_stop():
                loop.run()
        return len(hook.values)

    assert in_threads(2, main) == [2, 0]


def test_a_chief_only_hook_with_a_period_in_seconds_is_due_by_the_chiefs_clock(lines: list[tuple[str, str]]) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> bool:
        hooks = [LoggingTensorHook(["loss"], every_n_secs=0)]
        with MonitoredTrainingLoop(
            lambda: hub.gather("step", ranks.rank, 0) and 1.0,
            hooks=[StopAtStepHook(3)],
            chief_only_hooks=hooks,
            ranks=ranks,
        ) as loop:
            while not loop.should_stop():
                loop.run()
        return hooks[0].collective  # what the hook is in a loop whose ranks all have it, and still is

    assert in_threads(2, main) == [True, True]
    assert len([text for _, text in lines if text.startswith("loss")]) == 3


def test_a_chief_only_hook_that_saves_checkpoints_exists_on_every_rank(saves: list[Saves], tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        best = BestCheckpointHook(tmp_path / str(ranks.rank), "loss", save_steps=1, mode="max")
        with MonitoredTrainingLoop(lambda: 1.0, chief_only_hooks=[best], ranks=ranks) as loop:
            for _ in loop.until_stop(range(2)):
                loop.run()

    assert in_threads(2, main) == [None, None]
    assert [each.steps for each in saves] == [[("model.1.ckpt", 1, 1.0)]] * 2


def test_a_best_checkpoint_hook_on_the_chief_alone_is_an_error_where_the_loop_is_created(
    tmp_path: Path,
) -> None:
    def hooks_of(rank: int) -> list[SessionRunHook]:
        return [] if rank else [BestCheckpointHook(tmp_path, "loss", save_steps=1, mode="max")]

    assert all("the collective hooks are" in str(error) for error in refused(hooks_of))


def test_every_rank_has_the_default_hooks(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        scaffold = Scaffold(summary_op={"loss": over_ranks("loss", "sum")})
        folder = tmp_path / str(ranks.rank)
        with MonitoredTrainingLoop(
            lambda: float(ranks.rank + 1), scaffold=scaffold, summary_dir=folder, ranks=ranks
        ) as loop:
            for _ in loop.until_stop(range(1)):
                loop.run()

    assert in_threads(2, main) == [None, None]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert curve(tmp_path / "0", "loss") == [(1, 3.0)]


class Counting(SessionRunHook):
    def __init__(self) -> None:
        self.runs = 0

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.runs += 1

    def state_dict(self) -> dict[str, int]:
        return {"runs": self.runs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.runs = state["runs"]


def test_the_state_of_a_hook_that_only_the_chief_has_is_restored_there(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub, last_step: int) -> int:
        hook = Counting()
        with MonitoredTrainingLoop(
            lambda: hub.gather("step", ranks.rank, 0),
            checkpoint_dir=tmp_path,
            hooks=[StopAtStepHook(last_step=last_step)],
            chief_only_hooks=[hook],
            ranks=ranks,
        ) as loop:
            for _ in loop.until_stop(range(9)):
                loop.run()
        return hook.runs

    assert in_threads(2, lambda ranks, hub: main(ranks, hub, 3)) == [3, 0]
    assert in_threads(2, lambda ranks, hub: main(ranks, hub, 5)) == [5, 0]


def test_new_results_of_an_evaluation_are_logged_and_written_by_the_chief(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> dict[str, float]:
        accuracy = EvaluationHook(lambda: {"rank": ranks.rank}, 2, output_dir=tmp_path / str(ranks.rank))
        train(ranks, hub, [accuracy], runs=2)
        return accuracy.values

    assert in_threads(2, main) == [{"rank": 0}, {"rank": 1}]
    assert [text for _, text in lines] == ["evaluation at step 2: rank = 0"]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_an_evaluation_by_the_clock_is_due_by_that_of_the_chief() -> None:
    hook = EvaluationHook(lambda: 0.5, timer=SecondOrStepTimer(every_secs=60))
    assert hook.collective
    assert not EvaluationHook(lambda: 0.5, every_n_steps=2).collective


def test_the_chief_alone_shows_progress_and_writes_profiles(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    import_or_skip("tqdm")

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        folder = tmp_path / str(ranks.rank)
        train(ranks, hub, [ProgressBarHook(3, file=StringIO()), ProfilerHook(save_steps=1, output_dir=folder)])

    assert in_threads(2, main) == [None, None]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert len([text for _, text in lines if text.startswith("100% 3/3 ")]) == 1


# -- over_ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "expected"), [("mean", 11.0), ("sum", 33.0), ("min", 1.0), ("max", 21.0)])
def test_over_ranks_combines_the_values_of_all_ranks(op: str, expected: float) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        hook = Wants(over_ranks("loss", op))
        train(ranks, hub, [hook], runs=1)
        return hook.values

    assert in_threads(3, main) == [[expected]] * 3


class WantsThird(Wants):
    """Requests its fetch in every third run."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:  # type: ignore[override]
        return super().before_run(run_context) if run_context.session.global_step % 3 == 2 else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_values.results is not None:
            super().after_run(run_context, run_values)


def test_over_ranks_of_a_running_mean_covers_the_runs_of_the_hook_that_requests_it() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        mean = over_ranks(running_mean("loss"), "mean")
        hooks = [Wants(mean), WantsThird(mean)]
        train(ranks, hub, hooks)
        return [hook.values for hook in hooks]

    assert in_threads(2, main) == [[[6.0, 7.0, 8.0], [7.0]]] * 2


class WantsSecond(Wants):
    """Requests its fetch in every second run."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:  # type: ignore[override]
        return super().before_run(run_context) if run_context.session.global_step % 2 else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_values.results is not None:
            super().after_run(run_context, run_values)


VALUES: dict[str, tuple[Callable[[int], Any], str, Any]] = {
    "an int": (lambda rank: rank + 1, "sum", 3),
    "the mean of ints": (lambda rank: rank + 1, "mean", 1.5),
    "a float": (lambda rank: 0.1 * rank, "max", 0.1),
    "a bool": (lambda rank: rank == 1, "sum", 1),
    "float32": (lambda rank: torch.tensor(0.5 + rank), "mean", torch.tensor(1.0)),
    "one element": (lambda rank: torch.tensor([[0.5 + rank]]), "mean", torch.tensor(1.0)),
    "bfloat16": (lambda rank: torch.tensor(1.5 * rank, dtype=torch.bfloat16), "sum", torch.tensor(1.5).bfloat16()),
    "int64": (lambda rank: torch.tensor(2**50 + rank), "max", torch.tensor(2**50 + 1)),
    "bool tensor": (lambda rank: torch.tensor(rank == 1), "sum", torch.tensor(1)),
    "an array": (lambda rank: np.array(rank), "sum", 1.0),
    "a number of NumPy": (lambda rank: np.float32(rank), "sum", 1.0),
}


@pytest.mark.parametrize("name", VALUES)
def test_over_ranks_keeps_the_kind_of_a_value(name: str) -> None:
    make, op, expected = VALUES[name]

    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        hook = Wants(over_ranks(lambda: make(ranks.rank), op))
        train(ranks, hub, [hook], runs=1)
        return hook.values[0]

    for value in in_threads(2, main):
        assert type(value) is type(expected)
        torch.testing.assert_close(value, expected, rtol=0, atol=0)


def combined(fetch: Callable[[int], Any], losses: Callable[[int, int], Any], size: int = 3) -> list[Any]:
    """Return the value that a hook gets for ``fetch(rank)`` on each rank, or the error."""

    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        hook = Wants(fetch(ranks.rank))
        train(ranks, hub, [hook], losses, runs=1)
        return hook.values[0]

    return in_threads(size, main)


@pytest.mark.parametrize("op", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("missing", [{}, {"loss": None}], ids=["no such name", "None"])
def test_ranks_without_a_value_are_left_out(op: str, missing: dict[str, Any]) -> None:
    values = combined(
        lambda rank: over_ranks("loss", op, optional=True),
        lambda rank, run: {"loss": torch.tensor(float(rank))} if rank else missing,
    )
    assert [float(value) for value in values] == [{"mean": 1.5, "sum": 3.0, "min": 1.0, "max": 2.0}[op]] * 3


def test_an_optional_value_may_require_a_gradient() -> None:
    values = combined(
        lambda rank: over_ranks("loss", "sum", optional=True),
        lambda rank, run: {"loss": torch.ones((), requires_grad=True) * rank},
    )
    assert [(float(value), value.requires_grad) for value in values] == [(3.0, False)] * 3


def test_a_value_that_is_none_is_left_out() -> None:
    values = combined(lambda rank: over_ranks("loss", "mean"), lambda rank, run: {"loss": 4.0 if rank == 2 else None})
    assert values == [4.0] * 3


def test_a_value_that_no_rank_has_is_nan() -> None:
    values = combined(lambda rank: over_ranks("loss", "min", optional=True), lambda rank, run: {})
    assert np.isnan(values).tolist() == [True] * 3


def test_a_name_that_one_rank_lacks_is_an_error_unless_it_is_optional() -> None:
    errors = combined(lambda rank: over_ranks("loss", "mean"), lambda rank, run: {"loss": 1.0} if rank else {})
    assert "asked for 'loss', which does not exist" in str(errors[0])


def test_none_on_a_machine_with_a_device_needs_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    errors = combined(lambda rank: over_ranks("loss", "mean"), lambda rank, run: {"loss": 1.0 if rank else None})
    assert "is None on this rank: give over_ranks optional=True" in str(errors[0])


def test_a_rank_with_the_weight_0_is_left_out_of_a_mean_though_its_value_is_nan() -> None:
    values = combined(
        lambda rank: over_ranks("loss", "mean", weight="n"),
        lambda rank, run: {"loss": 10.0 * rank if rank else math.nan, "n": rank},
    )
    assert values == [pytest.approx((10 + 2 * 20) / 3)] * 3


@pytest.mark.parametrize("weight", ["n", lambda n: n, running_mean("n")], ids=["a name", "a closure", "a running mean"])
def test_a_mean_is_weighted_by_a_fetch(weight: Any) -> None:
    values = combined(
        lambda rank: over_ranks("loss", "mean", weight=weight), lambda rank, run: {"loss": 10.0 * rank, "n": 1 + rank}
    )
    assert values == [pytest.approx((2 * 10 + 3 * 20) / 6)] * 3


def test_a_mean_is_weighted_by_a_number_of_each_rank() -> None:
    values = combined(lambda rank: over_ranks("loss", "mean", weight=1 + rank), lambda rank, run: torch.tensor(rank))
    assert [value.item() for value in values] == [pytest.approx(8 / 6)] * 3


def test_ranks_without_a_value_have_no_weight() -> None:
    values = combined(
        lambda rank: over_ranks("loss", "mean", weight="n", optional=True),
        lambda rank, run: {"loss": 10.0 * rank, "n": rank} if rank else {},
    )
    assert values == [pytest.approx((10 + 2 * 20) / 3)] * 3


def test_a_weight_that_is_no_number_is_an_error_that_shows_it() -> None:
    errors = combined(
        lambda rank: over_ranks("loss", "mean", weight="n"), lambda rank, run: {"loss": 1.0, "n": torch.ones(2)}
    )
    assert "has the weight Tensor" in str(errors[0])
    assert "give a fetch of one number" in str(errors[0])


def test_only_a_mean_has_weights() -> None:
    with pytest.raises(ValueError, match=r"over_ranks\('loss', 'sum', weight='n'\): only a mean has weights"):
        over_ranks("loss", "sum", weight="n")


def test_in_one_process_an_optional_value_is_the_value_or_nan() -> None:
    hook = Wants([over_ranks("loss", "mean", weight="n", optional=True), over_ranks("other", "max", optional=True)])
    with MonitoredLoop(lambda: 2.0, hooks=[hook]) as loop:
        loop.run()
    (value, missing) = hook.values[0]
    assert value == 2.0
    assert np.isnan(missing)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ranks that are threads gather: the purposes and the values."""
    values: list[Any] = []
    gather = LoopRanks.gather

    def recorded(self: LoopRanks, value: Any, purpose: str, **options: Any) -> list[Any]:
        values.append((purpose, value))
        return gather(self, value, purpose, **options)

    monkeypatch.setattr(LoopRanks, "gather", recorded)
    return values


def test_all_fetches_of_a_run_are_combined_in_one_exchange(gathered: list[Any]) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        writer = RecordingWriter()
        first, second = Wants(over_ranks("loss", "mean")), Wants({"a": [over_ranks("loss", "sum")], "b": "loss"})
        third = SummarySaverHook(1, summary_writer=writer, summary_op={"loss": over_ranks("loss", "max")})
        train(ranks, hub, [first, second, third], runs=1)
        return first.values, second.values, writer.scalars

    results = in_threads(2, main)
    assert [result[:2] for result in results] == [([6.0], [{"a": [12.0], "b": own}]) for own in (1.0, 11.0)]
    assert results[0][2] == {"loss": [(1, 11.0)]}
    exchanges = [value for purpose, value in gathered if purpose == "over_ranks"]
    assert len(exchanges) == 2  # one on each rank
    assert exchanges[0][0] == ["mean of loss", "sum of loss", "max of loss"]


def test_a_run_without_such_a_fetch_makes_no_exchange(gathered: list[Any]) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        hooks = [LoggingTensorHook({"loss": over_ranks("loss", "mean")}, every_n_iter=100), NanTensorHook("loss")]
        train(ranks, hub, hooks, runs=50)

    assert in_threads(2, main) == [None, None]
    assert [purpose for purpose, _ in gathered].count("over_ranks") == 2  # in the first run


def test_in_one_process_over_ranks_is_the_value_itself() -> None:
    hook = Wants([over_ranks("loss", "mean"), over_ranks(lambda loss: loss + 1, "max")])
    with MonitoredLoop(lambda: 2.0, hooks=[hook]) as loop:
        loop.run()
        assert loop.session.run(over_ranks("loss", "sum")) == 2.0
    assert hook.values == [[2.0, 3.0]]


def test_a_list_logs_a_fetch_over_ranks_under_the_name_of_the_fetch(lines: list[tuple[str, str]]) -> None:
    with MonitoredLoop(lambda: 2.0, hooks=[LoggingTensorHook([over_ranks("loss", "mean")], every_n_iter=1)]) as loop:
        loop.run()
    assert lines == [("INFO", "loss = 2.0")]


def test_the_session_combines_what_every_rank_asks_for_between_runs() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        with MonitoredLoop(lambda: ranks.rank, ranks=ranks) as loop:
            loop.run()
            result: Any = loop.session.run({"mean": over_ranks("loss", "mean"), "own": "loss"})
        return result

    assert in_threads(2, main) == [{"mean": 0.5, "own": 0}, {"mean": 0.5, "own": 1}]


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"over_ranks\('loss', 'median'\): give one of 'mean', 'sum', 'min', 'max'"):
        over_ranks("loss", "median")


def evaluation_of(rank: int, values: list[float], **arguments: Any) -> EvaluationHook:
    """Return a hook whose result ``"x"`` is what is left of ``values``, the chief's, and 10 more on the next rank."""
    return EvaluationHook(lambda: {"x": values.pop(0) + 10 * rank}, **arguments)


def test_a_result_of_an_evaluation_is_combined_over_ranks_for_every_hook(
    saves: list[Saves], tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        evaluation = evaluation_of(ranks.rank, [1.0, 3.0, 2.0], every_n_steps=2)
        mean, writer = over_ranks(evaluation["x"], "mean"), RecordingWriter()
        wants = WantsSecond(mean)
        hooks = [
            LoggingTensorHook([mean], timer=EverySteps(2)),
            SummarySaverHook(timer=EverySteps(2), summary_writer=writer, summary_op={"x": mean}),
            StopIfNoIncreaseHook(mean, max_steps_without_increase=2),
            BestCheckpointHook(tmp_path / str(ranks.rank), mean, save_steps=2, mode="max"),
            evaluation,
            wants,
        ]
        step, reason = train(ranks, hub, hooks, runs=20)
        return step, str(reason).rpartition(" (")[0], wants.values, writer.scalars  # without the ranks that asked

    (step, reason, values, scalars), other = in_threads(2, main)
    assert step == 6
    assert reason.startswith('StopIfNoIncreaseHook: No increase in metric "x" for 2 steps')
    assert values == [6.0, 8.0, 7.0]
    assert scalars == {"x": [(2, 6.0), (4, 8.0), (6, 7.0)]}
    assert other == (6, reason, values, {})
    assert [text.partition(" (")[0] for _, text in lines if text.startswith("x = ")] == [
        "x = 6.0",
        "x = 8.0",
        "x = 7.0",
    ]
    assert [each.steps for each in saves] == [[("model.1.ckpt", 2, 6.0), ("model.1.ckpt", 4, 8.0)]] * 2


def test_a_result_of_an_evaluation_is_weighted_by_another_one() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        evaluation = EvaluationHook(lambda: {"x": 10.0 * ranks.rank, "examples": 1 + 2 * ranks.rank}, every_n_steps=2)
        wants = WantsSecond(over_ranks(evaluation["x"], "mean", weight=evaluation["examples"]))
        train(ranks, hub, [evaluation, wants], runs=2)
        return wants.values

    assert in_threads(2, main) == [[7.5]] * 2


def test_a_patience_that_is_used_up_in_the_checkpoint_lets_no_rank_make_a_run(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> list[int]:
        ends: list[int] = []
        for _ in range(3):
            stop = StopIfNoIncreaseHook(over_ranks("loss", "mean"), 2)
            hooks = [stop, CheckpointSaverHook(tmp_path, save_steps=100)]
            ends.append(train(ranks, hub, hooks, lambda rank, run: float(-run), 20, checkpoint_dir=tmp_path)[0])
        return ends

    first, other = in_threads(2, main)
    assert first == other
    assert [end - first[0] for end in first] == [0, 0, 0]
    assert len([text for _, text in lines if "the metric has not increased for" in text]) == 2 * 2


def test_an_evaluation_before_the_first_run_is_combined_over_ranks_too() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        evaluation = evaluation_of(ranks.rank, [1.0, 0.0], every_n_steps=100, at_start=True)
        stop = StopIfHigherHook(over_ranks(evaluation["x"], "sum"), 11.5)
        step, reason = train(ranks, hub, [evaluation, stop], runs=5)
        return step, str(reason).rpartition(" (")[0]

    reason = (
        'StopIfHigherHook: At step 0, metric "x" has value 12.0 which is greater than the configured threshold (11.5)'
    )
    assert in_threads(2, main) == [(1, f"{reason} for early stopping.")] * 2


def test_the_clock_of_the_chief_decides_when_all_ranks_look_at_a_metric() -> None:
    looked: list[list[int]] = [[], []]

    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        def metric(global_step: int) -> float:
            looked[ranks.rank].append(global_step)
            return 1.0

        # Without the chief's clock, the clocks of the ranks would never trigger, or in other runs.
        timer = SecondOrStepTimer(every_secs=600 if ranks.rank else 0.01)
        stop = StopIfHigherHook(over_ranks(metric, "sum"), 1.5, timer=timer)
        return train(ranks, hub, [stop], runs=100_000)[0]

    (step, other) = in_threads(2, main)
    assert step == other < 100_000
    assert looked[0] == looked[1] == [looked[0][0]]


@pytest.mark.parametrize("fetch", [None, over_ranks("loss", "mean"), summary.scalar("loss", "loss")])
def test_what_cannot_be_combined_is_refused(fetch: Any) -> None:
    with pytest.raises(TypeError, match="give the fetch to combine, such as 'loss'"):
        over_ranks(fetch, "mean")


def test_the_repr_of_a_fetch_over_ranks_can_be_pasted_back() -> None:
    assert repr(over_ranks("loss", "mean")) == "over_ranks('loss', 'mean')"


@pytest.mark.parametrize("value", ["text", torch.zeros(2), torch.tensor(1j), [1.0]])
def test_a_value_that_is_not_one_number_is_an_error_that_says_so(value: Any) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        train(ranks, hub, [Wants(over_ranks(lambda: value, "mean"))])

    # A rank waits ten ticks for the other one to fail in the same run, which may take longer on a busy machine.
    errors = in_threads(2, main, tick_secs=0.02)
    assert all(isinstance(error, FetchError) for error in errors)
    assert "on this rank: only one number can be combined over ranks" in str(errors[0])


def test_ranks_that_request_different_things_get_an_error_that_names_them() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        fetch = over_ranks("loss", "mean") if ranks.rank else over_ranks(lambda: 2.0, "sum")
        train(ranks, hub, [Wants(fetch)])

    for error in in_threads(2, main):
        assert isinstance(error, FetchError)
        assert str(error) == (
            "rank 0 combines ['sum of <lambda>'] over ranks in this run, and rank 1 ['mean of loss']: request the same "
            "with over_ranks on every rank"
        )


def test_ranks_that_request_the_same_in_another_order_get_an_error_instead_of_swapped_values() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        fetches = [over_ranks("loss", "mean"), over_ranks(other, "mean")]
        train(ranks, hub, [Wants(fetch) for fetch in (fetches if ranks.rank else reversed(fetches))])

    def other() -> float:
        return 1.0

    for error in in_threads(2, main):
        assert isinstance(error, FetchError)
        assert "['mean of other', 'mean of loss']" in str(error)


class ByClock(Wants):
    """A hook that is due by the clock of its rank."""

    def next_due(self) -> Due:
        return Due(moment=0.0)


class ByOutputs(Wants):
    """A hook that is due by what the step returned."""

    def next_due(self) -> Due:
        return Due(when=lambda outputs: True)


class NotPrintable(Wants):
    def __repr__(self) -> str:
        raise ZeroDivisionError


def refused(hooks_of: Callable[[int], list[SessionRunHook]]) -> list[Any]:
    """Return what each of two ranks raises, of which the chief requests something that it must not."""
    return in_threads(2, lambda ranks, hub: train(ranks, hub, hooks_of(ranks.rank), runs=2))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda rank: [] if rank else [Wants(over_ranks("loss", "mean"))],
            "but not every rank has the hook",
        ),
        (
            lambda rank: [] if rank else [NotPrintable(over_ranks("loss", "mean"))],
            "but not every rank has the hook",
        ),
        (
            lambda rank: [ByClock(over_ranks("loss", "mean"))],
            "but the hook is due by the clock of each rank: set collective = True",
        ),
        (
            lambda rank: [ByOutputs(over_ranks("loss", "mean"))],
            "but the hook is due by what the step of each rank returned",
        ),
    ],
)
def test_a_fetch_over_ranks_is_refused_where_it_would_hang(make: Callable[[int], Any], why: str) -> None:
    errors = refused(make)
    assert all(isinstance(error, (FetchError, PeerError)) for error in errors)
    error = next(error for error in errors if isinstance(error, FetchError))
    assert "asked for over_ranks('loss', 'mean'), which all ranks have to evaluate in the same run, but" in str(error)
    assert why in str(error)


def test_one_of_two_hooks_of_a_class_on_the_chief_alone_is_told_from_the_other() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        common = LoggingTensorHook({"loss": over_ranks("loss", "mean")}, every_n_iter=1)
        only = LoggingTensorHook({"lr": over_ranks("loss", "sum")}, every_n_iter=2)
        return train(ranks, hub, [common] if ranks.rank else [only, common])

    error, _ = in_threads(2, main)
    assert isinstance(error, FetchError)
    assert "LoggingTensorHook({'lr': over_ranks('loss', 'sum')}, every_n_iter=2)" in str(error)

    def allowed(ranks: ThreadRanks, hub: Hub) -> Any:
        common = LoggingTensorHook({"loss": over_ranks("loss", "mean")}, every_n_iter=1)
        only = LoggingTensorHook({"own": "loss"}, every_n_iter=2)
        return train(ranks, hub, [common] if ranks.rank else [only, common])

    assert in_threads(2, allowed) == [(3, "data ended")] * 2


def test_a_final_op_over_ranks_is_refused_on_the_chief_alone() -> None:
    error, other = refused(lambda rank: [] if rank else [FinalOpsHook(over_ranks("loss", "mean"))])
    assert isinstance(error, FetchError)
    assert "FinalOpsHook(over_ranks('loss', 'mean')) asked for over_ranks('loss', 'mean')" in str(error)
    assert other == (2, "data ended")  # whose training run was over


class Gathers(SessionRunHook):
    """A hook that evaluates something with every rank in its second run."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_context.session.global_step == 2:
            run_context.session.run(over_ranks("loss", "mean"))


@pytest.mark.parametrize(
    ("hook", "period"),
    [
        (lambda n, folder: CheckpointSaverHook(folder, save_steps=n), "every {} steps"),
        (
            lambda n, folder: BestCheckpointHook(folder, lambda: 1.0, mode="max", timer=EverySteps(n)),
            "with EverySteps({})",
        ),
    ],
)
def test_another_period_of_a_collective_hook_on_another_rank_is_an_error(
    hook: Callable[[int, Path], SessionRunHook], period: str, tmp_path: Path
) -> None:
    errors = in_threads(2, lambda ranks, hub: train(ranks, hub, [hook(2 + ranks.rank, tmp_path)], runs=10))
    for rank, error in enumerate(errors):
        assert isinstance(error, LifecycleError)
        here, there = (period.format(2 + each) for each in (rank, 1 - rank))
        name = type(hook(2, tmp_path)).__name__
        assert f"are [{name} {here}] on rank {rank} and [{name} {there}] on rank {1 - rank}" in str(error)


class LogMean(LoggingTensorHook):
    """A hook of a user's, whose arguments do not tell its period."""

    def __init__(self, often: int) -> None:
        super().__init__([over_ranks("loss", "mean")], often)


def test_a_fetch_over_ranks_is_refused_if_the_hook_has_another_period_on_another_rank() -> None:
    errors = in_threads(2, lambda ranks, hub: train(ranks, hub, [LogMean(2 + ranks.rank)], runs=10))
    error = next(error for error in errors if isinstance(error, FetchError))
    assert "not every rank" in str(error)


def test_the_chief_alone_warns_of_a_folder_that_no_hook_saves_into(
    lines: list[tuple[str, str]], tmp_path: Path
) -> None:
    ended = in_threads(2, lambda ranks, hub: train(ranks, hub, [], checkpoint_dir=tmp_path))
    assert [run for run, _ in ended] == [3, 3]
    (warning,) = [text for level, text in lines if level == "WARNING"]
    assert warning.startswith(f"{tmp_path} has no checkpoint, ")


def test_the_chief_alone_warns_of_checkpoints_that_are_not_restored(
    lines: list[tuple[str, str]], tmp_path: Path
) -> None:
    ended = in_threads(2, lambda ranks, hub: train(ranks, hub, [CheckpointSaverHook(tmp_path, save_steps=3)]))
    assert [run for run, _ in ended] == [3, 3]
    (warning,) = [text for level, text in lines if level == "WARNING"]
    assert "nothing will be restored" in warning


def test_a_rank_that_waits_alone_gets_an_error_after_a_bounded_time() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        return train(ranks, hub, [] if ranks.rank else [Gathers()], runs=5)

    error, other = in_threads(2, main, stuck_secs=0.2)
    assert isinstance(error, LifecycleError)
    assert str(error).startswith(
        "rank 0 waits in run 2 for values of the other ranks for over_ranks (Session.run asked for "
        "over_ranks('loss', 'mean')), and rank 1 is in run 3 already"
    )
    assert isinstance(other, PeerError)
    assert other.rank == 0


def test_a_rank_that_waits_alone_for_a_rank_at_a_meeting_gets_an_error_after_a_bounded_time() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        return train(ranks, hub, [] if ranks.rank else [Gathers()], runs=2)

    error, other = in_threads(2, main, stuck_secs=0.2)
    assert isinstance(error, LifecycleError)
    assert "waits in run 2" in str(error)
    assert "and rank 1 left the loop after that run: call Ranks.gather, and" in str(error)
    assert isinstance(other, PeerError)


def test_a_collective_hook_on_the_chief_alone_is_an_error_where_the_loop_is_created() -> None:
    def hooks_of(rank: int) -> list[SessionRunHook]:
        return [] if rank else [LoggingTensorHook({"loss": over_ranks("loss", "mean")}, every_n_secs=60)]

    for error in refused(hooks_of):
        assert isinstance(error, LifecycleError)
        assert "the collective hooks are" in str(error)


@pytest.fixture
def group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An initialised process group with this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class OnDevice:
    """What ``Ranks.gather_on_device`` asks a tensor on a device; the tensor itself is on the CPU."""

    def __init__(self, tensor: torch.Tensor, kind: str) -> None:
        self.tensor, self.device = tensor, torch.device(kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def test_tensors_on_a_device_are_gathered_in_one_call_of_the_process_group(
    group_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    values = [torch.tensor(True), torch.arange(6.0).reshape(2, 3).t(), torch.tensor([], dtype=torch.int64)]
    (row,) = LoopRanks(Ranks()).gather_on_device([OnDevice(value, "cuda") for value in values]) or [[]]  # type: ignore[misc]
    for value, expected in zip(row, values, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=0)


def test_tensors_that_the_process_group_does_not_serve_go_over_the_host(group_of_one: None) -> None:
    assert not LoopRanks(Ranks()).serves(torch.device("meta"))
    assert LoopRanks(Ranks()).serves(torch.device("cuda"))


def test_tensors_on_a_device_are_combined_without_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoopRanks, "serves", lambda self, device: True)
    monkeypatch.setattr(LoopRanks, "gather_on_device", lambda self, tensors: self.gather(tensors))

    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        weighted = over_ranks(lambda: torch.tensor(3.0 * ranks.rank), "mean", weight=1 + 2 * ranks.rank)
        hook = Wants([over_ranks(lambda: torch.tensor(2 * ranks.rank), "sum"), over_ranks("loss", "min"), weighted])
        train(ranks, hub, [hook], runs=1)
        return [torch.as_tensor(value).tolist() for value in hook.values[0]]

    assert in_threads(2, main) == [[2, 1.0, 2.25]] * 2


@pytest.mark.parametrize("placement", ["Shard(0)", "Replicate()"])
def test_a_dtensor_becomes_the_full_tensor_once_in_a_run(group_of_one: None, placement: str) -> None:
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    weight = dtensors.distributed(torch.arange(4.0), mesh, placement)
    evaluator = RanksEvaluator(Session(), {"weight": weight})
    one, other = (evaluator.evaluate(["weight"], Caller(name="a hook"))[0] for _ in range(2))
    assert type(one) is torch.Tensor
    assert torch.equal(one, torch.arange(4.0))
    assert one is other or placement == "Replicate()"


def test_a_sharded_dtensor_is_refused_for_a_hook_that_not_every_rank_has(group_of_one: None) -> None:
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    session, hook = Session(), Wants("weight")
    session.ranks.local_hooks = [hook]
    evaluator = RanksEvaluator(session, {"weight": dtensors.distributed(torch.arange(4.0), mesh)})
    with pytest.raises(FetchError, match=r"asked for a DTensor of shape \(4,\), which all ranks"):
        evaluator.evaluate("weight", Caller(hook))


def test_a_process_logs_as_its_rank_until_the_loop_is_closed(lines: list[tuple[str, str]]) -> None:
    speak_as(3)
    logger.info("hidden")
    logger.warning("%s is %d", "loss", 1)
    LoopRanks(Ranks()).disconnect()
    logger.info("seen")
    assert lines == [("WARNING", "rank 3: loss is 1"), ("INFO", "seen")]


# -- real processes -------------------------------------------------------------------------------------------------


def sharded(rank: int) -> list[str]:
    """Train an FSDP2 model, and return what hooks got of its DTensors."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 6, bias=False)
    before = model.weight.detach().clone()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    dtensors.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    results: list[str] = []

    def step(inputs: torch.Tensor) -> dict[str, Any]:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        return {"loss": loss, "norm": norm}

    def full_weight(model: Any) -> Any:
        return model.weight.full_tensor()

    def local_mean(model: Any) -> Any:
        return model.weight.to_local().mean()

    writer = RecordingWriter()
    wants = Wants({"weight": "weight", "norm": "norm", "again": ["weight"], "mean": over_ranks(local_mean, "mean")})
    hooks: list[SessionRunHook] = [
        NanTensorHook({"weight": "weight", "norm": "norm", "grad": "weight.grad"}),
        wants,
        LoggingTensorHook({"norm": "norm"}, every_n_iter=1),
        SummarySaverHook(1, summary_writer=writer, summary_op=[{"norm": "norm"}, summary.histogram("w", full_weight)]),
    ]
    with MonitoredLoop(step, model, optimizer, hooks=hooks, ranks=Ranks(**QUICK)) as loop:
        for _ in loop.until_stop(range(2)):
            loop.run(torch.ones(3, 4))
        final = loop.session.run("weight")
    value = wants.values[1]
    assert type(value["weight"]) is torch.Tensor
    assert value["again"][0] is value["weight"]
    assert torch.equal(value["weight"], final)
    assert not torch.equal(value["weight"], before)
    assert value["weight"].shape == (6, 4)
    assert float(value["mean"]) == pytest.approx(float(final.mean()), abs=1e-6)  # near 0, and in float32
    assert type(value["norm"]) is torch.Tensor
    if rank == 0:
        results.append(f"{float(value['norm']):.6f}")
        results += [f"{point[1]:.6f}" for point in writer.scalars["norm"][1:]]
        assert np.array_equal([r for r in writer.records if r[0] == "histogram"][1][2], final.flatten().tolist())
    return results


def norms_of_shards(rank: int) -> float:
    """Fetch norms of a model with DTensors in it, without a full tensor; return the norm."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)  # rank 1 has no part of it
    dtensors.fully_shard(model, mesh=mesh)
    ordinary = torch.nn.Linear(1, 1)  # not sharded
    parts: list[Any] = [*model.parameters()]
    tensors = [each.detach() for each in (*(part.full_tensor() for part in parts), *ordinary.parameters())]
    expected = torch.nn.utils.get_total_norm(tensors)
    norm = Wants({2: param_norm(), "inf": param_norm(math.inf), "mean": over_ranks(param_norm(), "mean")})

    def refuse(tensor: Any) -> None:
        raise AssertionError("a full tensor was requested")

    type(parts[0]).full_tensor = refuse  # in this process
    with MonitoredLoop(lambda: 1.0, torch.nn.Sequential(model, ordinary), hooks=[norm], ranks=Ranks(**QUICK)) as loop:
        loop.run()
    (norms,) = norm.values
    assert [float(norms[key]) for key in (2, "mean")] == pytest.approx([float(expected)] * 2)
    assert float(norms["inf"]) == max(float(tensor.abs().max()) for tensor in tensors)
    return float(expected)


def test_norms_of_dtensors_are_computed_in_their_shards(tmp_path: Path) -> None:
    chief, other = run_ranks(tmp_path, 2, norms_of_shards)
    assert (chief.code, other.code) == (0, 0), (chief, other)
    assert chief.value == other.value


def test_the_norm_of_dtensors_is_refused_for_a_hook_that_not_every_rank_has(group_of_one: None) -> None:
    model: Any = dtensors.fully_shard(torch.nn.Linear(1, 1))
    session, hook = Session(model), Wants(param_norm())
    assert float(param_norm()(model)) == float(session.run(param_norm()))
    session.ranks.local_hooks, session.ranks.size = [hook], 2
    with pytest.raises(FetchError, match="asked for the norm of 2 tensors with DTensors among them, which all ranks"):
        RanksEvaluator(session).evaluate({"norm": param_norm()}, Caller(hook))


def test_the_rank_that_writes_counts_a_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[torch.Tensor] = []

    def noted(value: torch.Tensor) -> Any:
        counted.append(value)
        return count(value)

    monkeypatch.setattr(torchhooks.summary.operations, "count", noted)

    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        writer = None if ranks.rank else RecordsCounts()
        op = [{"loss": over_ranks("loss", "sum")}, summary.histogram("w", lambda: torch.ones(3))]
        train(ranks, hub, [SummarySaverHook(1, summary_writer=writer, summary_op=op)], runs=1)
        return writer and (writer.scalars, writer.counts["w"][2])

    assert in_threads(2, main) == [({"loss": [(1, 12.0)]}, 3), None]
    assert len(counted) == 1


class RecordsCounts(RecordingWriter):
    """A writer that takes the counts of histograms."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Any] = {}

    def add_histogram_raw(self, tag: str, *counts: Any) -> None:
        self.counts[tag] = counts


@pytest.mark.parametrize("size", [1, 2])
def test_dtensors_reach_hooks_as_full_tensors(tmp_path: Path, size: int) -> None:
    chief, *others = ended = run_ranks(tmp_path, size, sharded)
    assert [each.code for each in ended] == [0] * size, chief.output
    norm = chief.value[0]
    assert chief.value == [norm, norm]
    assert chief.output.count("norm = ") == 2
    assert not any("norm = " in each.output for each in others)


def sharded_on_the_chief(rank: int) -> str:
    model = torch.nn.Linear(4, 6)
    dtensors.fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    hooks = [LoggingTensorHook(["weight"], every_n_iter=1)] if rank == 0 else []
    try:
        # After the backward pass, the parameters are sharded.
        step = lambda: model(torch.ones(1, 4)).sum().backward()  # noqa: E731
        with MonitoredLoop(step, model, hooks=hooks, ranks=Ranks(**QUICK)) as loop:
            for _ in loop.until_stop(range(3)):
                loop.run()
    except (FetchError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


@pytest.mark.ranks
def test_a_dtensor_is_refused_in_a_hook_of_the_chief_alone(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, 2, sharded_on_the_chief)
    assert [each.code for each in ended] == [0, 0], ended
    assert "asked for a DTensor of shape (6, 4), which all ranks" in ended[0].value
    assert ended[1].value.startswith("PeerError: rank 0 failed in run 1: FetchError"), ended


def logs(rank: int, folder: str) -> None:
    hooks = [NanTensorHook("loss", fail_on_nan_loss=False), StepCounterHook(2), LoggingTensorHook(["loss"], 2)]
    with MonitoredLoop(lambda: math.nan if rank else 1.0, hooks=hooks, ranks=Ranks(**QUICK)) as loop:
        for _ in loop.until_stop(range(5)):
            loop.run()
    logging.getLogger("torchhooks").info("after the loop")


def test_other_ranks_log_warnings_and_errors_only_with_the_rank(tmp_path: Path) -> None:
    chief, other = run_ranks(tmp_path, 2, logs, str(tmp_path))
    assert (chief.code, other.code) == (0, 0), (chief, other)
    assert chief.output.splitlines()[0].startswith("INFO:torchhooks:loss = 1.0"), chief
    assert other.output.splitlines() == [
        "WARNING:torchhooks:rank 1: loss is NaN at step 1: training stops",
        "INFO:torchhooks:after the loop",
    ]
