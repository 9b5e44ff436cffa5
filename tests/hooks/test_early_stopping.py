"""Early stopping: TensorFlow's rules, their state, and the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices import FakeDevice

from torchhooks import (
    CheckpointSaverHook,
    EvaluationHook,
    EverySteps,
    LifecycleError,
    MonitoredLoop,
    SecondOrStepTimer,
    SessionRunHook,
    StopIfHigherHook,
    StopIfLowerHook,
    StopIfNoDecreaseHook,
    StopIfNoIncreaseHook,
)
from torchhooks.testing import trace

Create = Callable[[Any], SessionRunHook]
NAN = math.nan


@pytest.mark.parametrize(
    ("create", "losses", "stop"),
    [
        (lambda metric: StopIfHigherHook(metric, 0.5), [0.1, 0.5, 0.6, 0.7], 3),
        (lambda metric: StopIfHigherHook(metric, 0.5, min_steps=4), [0.1, 0.9, 0.9, 0.6, 0.7], 4),
        (lambda metric: StopIfHigherHook(metric, 0.5), [NAN, 0.1, 0.2], None),
        (lambda metric: StopIfLowerHook(metric, 0.5), [0.9, 0.5, 0.4, 0.3], 3),
        (lambda metric: StopIfLowerHook(metric, -math.inf), [0.9, 0.5, 0.4, 0.3], None),
        (lambda metric: StopIfNoDecreaseHook(metric, 2), [0.5, 0.4, 0.4, 0.4, 0.3], 4),
        (lambda metric: StopIfNoDecreaseHook(metric, 2), [0.5, 0.6, 0.4, 0.5, 0.3, 0.2], None),
        (lambda metric: StopIfNoDecreaseHook(metric, 2, min_steps=3), [0.1, 0.2, 0.9, 0.9, 0.9, 0.9], 5),
        (lambda metric: StopIfNoDecreaseHook(metric, 1), [0.5, 0.5, 0.5], 2),
        (lambda metric: StopIfNoIncreaseHook(metric, 2), [0.5, 0.6, 0.6, 0.1, 0.7], 4),
        (lambda metric: StopIfNoIncreaseHook(metric, 3), [0.5, 0.4, 0.4, 0.6], None),
        # NaN neither counts as the best value, nor prevents others from being so.
        (lambda metric: StopIfNoDecreaseHook(metric, 2), [NAN, 0.5, 0.6, 0.4], None),
        (lambda metric: StopIfNoDecreaseHook(metric, 2), [0.5, NAN, NAN, 0.4], 3),
        (lambda metric: StopIfNoDecreaseHook(metric, 2), [NAN, NAN, NAN, 0.4], 3),
    ],
)
def test_stops_by_the_rule_of_tensorflow(create: Create, losses: list[float], stop: int | None) -> None:
    assert trace(create("loss"), losses=losses).global_step == (len(losses) if stop is None else stop)


@pytest.mark.parametrize(
    ("create", "losses", "stop"),
    [
        (lambda: StopIfNoDecreaseHook("loss", 2, min_delta=0.1), [0.5, 0.45, 0.41, 0.1], 3),
        (lambda: StopIfNoDecreaseHook("loss", 2, min_delta=0.1), [0.5, 0.45, 0.39, 0.3, 0.28], 5),
        (lambda: StopIfNoDecreaseHook("loss", 1, min_delta=0.25), [0.5, 0.25, 0.0], 2),  # not larger
        (lambda: StopIfNoIncreaseHook("loss", 2, min_delta=0.1), [0.5, 0.55, 0.59, 0.9], 3),
        (lambda: StopIfNoIncreaseHook("loss", 2, min_delta=0.1), [0.5, 0.55, 0.61, 0.75], None),
    ],
)
def test_a_change_up_to_min_delta_is_no_improvement(
    create: Callable[[], SessionRunHook], losses: list[float], stop: int | None
) -> None:
    assert trace(create(), losses=losses).global_step == (len(losses) if stop is None else stop)


@pytest.mark.parametrize("min_delta", [-0.1, math.nan, math.inf, "0.1", True, None])
def test_min_delta_is_a_finite_number(min_delta: Any) -> None:
    with pytest.raises(ValueError, match="must be a finite number, 0 or more"):
        StopIfNoDecreaseHook("loss", 2, min_delta=min_delta)


def test_the_reason_is_logged_and_is_that_of_the_stop() -> None:
    ran = trace(StopIfNoDecreaseHook("loss", 2), losses=[{"loss": 0.5}] * 4)
    reason = (
        'No decrease in metric "loss" for 2 steps, which is greater than or equal to max steps (2) configured for '
        "early stopping."
    )
    assert ("INFO", reason) in ran.lines
    assert ran.stop_reason == f"StopIfNoDecreaseHook: {reason}"


@pytest.mark.parametrize(
    ("hook", "relation"),
    [(StopIfHigherHook("loss", 0.25), "greater than"), (StopIfLowerHook("loss", 0.75), "less than")],
    ids=["higher", "lower"],
)
def test_the_reason_of_a_threshold_names_the_value_and_the_step(hook: SessionRunHook, relation: str) -> None:
    ran = trace(hook, losses=[{"loss": 0.5}])
    assert f'At step 1, metric "loss" has value 0.5 which is {relation} the configured threshold' in str(
        ran.stop_reason
    )


# -- when it looks ----------------------------------------------------------------------------------------------------


def evaluations(*hooks: Callable[[EvaluationHook], SessionRunHook], **given: Any) -> tuple[list[int], int]:
    """Return at which steps the model was evaluated, and at which one the loop ended."""
    steps: list[int] = []

    def accuracy(global_step: int) -> float:
        steps.append(global_step)
        return 0.5

    evaluation = EvaluationHook(accuracy, **given)
    ran = trace(*(hook(evaluation) for hook in hooks), evaluation, losses=[0.1] * 30)
    return steps, ran.global_step


@pytest.mark.parametrize(
    "given",
    [{"every_n_steps": 4}, {"timer": EverySteps(4)}, {"timer": SecondOrStepTimer(every_steps=4)}],
    ids=repr,
)
def test_looks_at_an_evaluation_whenever_it_is_made(given: dict[str, Any]) -> None:
    stop = lambda evaluation: StopIfNoIncreaseHook(evaluation["accuracy"], 8)  # noqa: E731
    assert evaluations(stop, **given) == ([4, 8, 12], 12)


def test_with_a_period_in_seconds_no_evaluation_is_made_for_it_alone() -> None:
    stop = lambda evaluation: StopIfNoIncreaseHook(evaluation["accuracy"], 8)  # noqa: E731
    assert evaluations(stop, timer=SecondOrStepTimer(every_secs=4)) == ([5, 10, 15], 15)


def test_the_evaluation_before_the_first_run_counts() -> None:
    stop = lambda evaluation: StopIfNoIncreaseHook(evaluation["accuracy"], 8)  # noqa: E731
    assert evaluations(stop, every_n_steps=4, at_start=True) == ([0, 4, 8], 8)


@pytest.mark.parametrize("given", [{"every_n_steps": 4}, {"timer": EverySteps(4)}], ids=repr)
def test_a_period_of_its_own_is_at_multiples(given: dict[str, Any]) -> None:
    assert trace(StopIfHigherHook("loss", 0.5, **given), losses=[0.9] * 9, start_step=2).global_step == 4


def test_runs_in_which_it_does_not_look_are_idle() -> None:
    calls: list[int] = []

    class Counted(StopIfHigherHook):
        def before_run(self, run_context: Any) -> Any:
            calls.append(run_context.session.global_step + 1)
            return super().before_run(run_context)

    evaluation = EvaluationHook(lambda: 0.5, every_n_steps=4)
    trace(evaluation, Counted(evaluation["evaluation"], 0.9), losses=[0.1] * 9)
    assert calls == [1, 4, 8]  # in the first run it looks for an evaluation before it


# -- patience in epochs -----------------------------------------------------------------------------------------------


def in_epochs(hooks: list[SessionRunHook], losses: list[float], folder: Path | None = None, stop: int = 99) -> Any:
    """Train epochs of two runs, in which the step returns ``losses``, one for each epoch; return the loop."""
    saver = [] if folder is None else [CheckpointSaverHook(folder, save_steps=100)]
    with MonitoredLoop(lambda loss: {"loss": loss}, hooks=[*hooks, *saver], checkpoint_dir=folder) as loop:
        for epoch in loop.until_stop(range(len(losses))):
            for _ in loop.until_stop(range(2)):
                loop.run(losses[epoch])
                if loop.global_step == stop:
                    loop.request_stop()
    return loop


@pytest.mark.parametrize(
    ("losses", "epoch"),
    [
        ([0.5, 0.3, 0.4, 0.35, 0.3, 0.1], 4),  # the third epoch after the best one
        ([0.5, 0.3, 0.4, 0.35, 0.2, 0.1], 5),
        ([0.5, 0.5, 0.5, 0.5, 0.5], 3),
    ],
)
@pytest.mark.parametrize("is_increase", [False, True])
def test_patience_in_epochs_ends_with_so_many_epochs(losses: list[float], epoch: int, is_increase: bool) -> None:
    if is_increase:
        hook: SessionRunHook = StopIfNoIncreaseHook("loss", max_epochs_without_increase=3)
        loop = in_epochs([hook], [-loss for loss in losses])
    else:
        loop = in_epochs([StopIfNoDecreaseHook("loss", max_epochs_without_decrease=3)], losses)
    assert (loop.epoch, loop.global_step) == (epoch, 2 * epoch + 2)


def test_an_evaluation_before_the_first_epoch_is_one_epoch_before_it() -> None:
    errors = iter([0.1, 0.5, 0.4, 0.3])
    evaluation = EvaluationHook(lambda: {"error": next(errors)}, every_n_epochs=1, at_start=True)
    loop = in_epochs([evaluation, StopIfNoDecreaseHook(evaluation["error"], max_epochs_without_decrease=2)], [0.0] * 5)
    assert loop.epoch == 1
    assert 'No decrease in metric "error" for 2 epochs' in str(loop.stop_reason)


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_epochs_are_counted_on_in_another_process(stop: int, tmp_path: Path) -> None:
    losses = [0.3, 0.4, 0.4, 0.4, 0.4]
    in_epochs([StopIfNoDecreaseHook("loss", max_epochs_without_decrease=3)], losses, tmp_path, stop)
    for _ in range(2):
        loop = in_epochs([StopIfNoDecreaseHook("loss", max_epochs_without_decrease=3)], losses, tmp_path)
        assert (loop.epoch, loop.global_step) == (3, 8)


def test_epochs_that_cannot_be_counted_are_an_error() -> None:
    hook = StopIfNoDecreaseHook("loss", max_epochs_without_decrease=3, every_n_steps=1)
    loop = MonitoredLoop(lambda: {"loss": 0.5}, hooks=[hook])
    with pytest.raises(LifecycleError, match="counts epochs, and there is none"):
        loop.run()
    loop.close()


# -- the state --------------------------------------------------------------------------------------------------------


def test_a_resumed_training_run_continues_to_count(tmp_path: Path) -> None:
    ends: list[int] = []
    for runs in (3, 9):
        stop = StopIfNoDecreaseHook("loss", 5)
        hooks = [stop, CheckpointSaverHook(tmp_path, save_steps=100)]
        ran = trace(*hooks, losses=[0.5 if ends else 0.4] * runs, checkpoint_dir=tmp_path)
        ends.append(ran.global_step)
    assert ends == [3, 6]  # the least value was that of step 1, in the first process


def test_the_state_of_a_device_is_that_of_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    with FakeDevice(lag=50):
        stop = StopIfNoDecreaseHook("loss", 5)
        trace(stop, CheckpointSaverHook(tmp_path, save_steps=100), losses=[0.5, 0.25, 0.75])
    state = torch.load(tmp_path / "model.ckpt-3" / "state.pt", weights_only=True)["hooks.StopIfNoDecreaseHook"]
    assert state == {"best": 0.25, "best_at": [2, 0], "last_at": [3, 0]}


@pytest.mark.parametrize("saver_first", [False, True], ids=["saver last", "saver first"])
def test_a_training_run_that_it_ended_makes_no_run_when_it_is_started_again(tmp_path: Path, saver_first: bool) -> None:
    ends: list[int] = []
    for _ in range(3):
        evaluation = EvaluationHook(lambda: {"error": 0.5}, every_n_steps=10)
        patience = StopIfNoDecreaseHook(evaluation["error"], 20)
        saver = CheckpointSaverHook(tmp_path, save_steps=10)
        hooks = [saver, evaluation, patience] if saver_first else [evaluation, patience, saver]
        ran = trace(*hooks, losses=[0.1] * 100, checkpoint_dir=tmp_path)
        line = f"{patience!r}: the metric has not decreased for 20 steps already"
        assert ran.lines.count(("INFO", line)) == (1 if ends else 0)
        assert str(ran.stop_reason).startswith('StopIfNoDecreaseHook: No decrease in metric "error" for 20 steps, ')
        ends.append(ran.global_step)
    assert ends == [30, 30, 30]


def test_in_a_loop_that_asks_should_stop_it_ends_in_the_first_run_when_it_is_started_again(tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        hooks = [StopIfNoDecreaseHook("loss", 2), CheckpointSaverHook(tmp_path, save_steps=10)]
        with MonitoredLoop(lambda: {"loss": 0.5}, hooks=hooks, checkpoint_dir=tmp_path) as loop:
            while not loop.should_stop():
                loop.run()
        runs.append(loop.global_step)
        assert str(loop.stop_reason).startswith('StopIfNoDecreaseHook: No decrease in metric "loss" for 2 steps')
    assert runs == [3, 4]


def resumed(
    tmp_path: Path, create: Callable[[int], SessionRunHook], first: list[float], second: list[float]
) -> tuple[int, list[str]]:
    """Return where a training run ended that was started a second time, and its lines with "already"."""
    saver = CheckpointSaverHook(tmp_path, save_steps=100)
    trace(create(0), saver, losses=first, checkpoint_dir=tmp_path)
    ran = trace(create(1), saver, losses=second, checkpoint_dir=tmp_path)
    return ran.global_step, [text for _, text in ran.lines if "already" in text]


@pytest.mark.parametrize(
    ("create", "first", "end"),
    [
        # The second process makes no run, even if its first value would be the best one.
        (lambda process: StopIfNoDecreaseHook("loss", 2), [0.5] * 9, 3),
        (lambda process: StopIfNoIncreaseHook("loss", 2, min_delta=0.5), [0.5] * 9, 3),
        (lambda process: StopIfNoDecreaseHook("loss", 2, min_steps=5), [0.5] * 9, 7),
        (lambda process: StopIfNoDecreaseHook("loss", [4, 2][process]), [0.5] * 3, 3),  # the patience was reduced
    ],
)
def test_a_patience_that_is_used_up_in_the_checkpoint_stops_before_the_first_run(
    tmp_path: Path, create: Callable[[int], SessionRunHook], first: list[float], end: int
) -> None:
    step, lines = resumed(tmp_path, create, first, [0.1] * 9)
    assert (step, len(lines)) == (end, 1)


@pytest.mark.parametrize(
    ("create", "first", "end"),
    [
        (lambda process: StopIfNoDecreaseHook("loss", [2, 5][process]), [0.5] * 9, 12),  # the patience was raised
        (lambda process: StopIfNoDecreaseHook("loss", 2, min_steps=[0, 10][process]), [0.5] * 9, 12),
        (lambda process: StopIfNoDecreaseHook("loss", 2), [0.5] * 2, 11),
        # The metric was not looked at for longer than the patience, and may have improved since.
        (lambda process: StopIfNoDecreaseHook("loss", 3, every_n_steps=5), [0.5] * 9, 18),
    ],
)
def test_a_patience_that_is_not_used_up_lets_a_resumed_training_run_continue(
    tmp_path: Path, create: Callable[[int], SessionRunHook], first: list[float], end: int
) -> None:
    second = [0.1 / run for run in range(1, 10)]
    step, lines = resumed(tmp_path, create, first, second)
    assert lines == []
    assert step == end


def test_the_count_starts_again_in_another_loop() -> None:
    hook = StopIfNoDecreaseHook("loss", 2)
    assert [trace(hook, losses=[loss] * 9).global_step for loss in (0.1, 0.5)] == [3, 3]


def test_two_hooks_have_two_names_in_a_checkpoint(tmp_path: Path) -> None:
    hooks = [StopIfNoDecreaseHook("loss", 5), StopIfNoDecreaseHook("loss", 9, name="patient")]
    trace(*hooks, CheckpointSaverHook(tmp_path, save_steps=100))
    saved = torch.load(tmp_path / "model.ckpt-3" / "state.pt", weights_only=True)
    assert {"hooks.StopIfNoDecreaseHook", "hooks.patient"} <= set(saved)


# -- the device -------------------------------------------------------------------------------------------------------


def test_a_value_on_a_device_is_not_waited_for_and_stops_a_few_runs_later() -> None:
    stops = [StopIfLowerHook("loss", 0.5), StopIfNoDecreaseHook("loss", 100)]
    loss, waits = torch.tensor(0.25), []
    with FakeDevice(lag=3) as device, MonitoredLoop(lambda: loss, hooks=stops) as loop:
        while not loop.should_stop():
            loop.run()
        waits.append(device.waits)
    assert waits == [0]
    assert 'At step 1, metric "loss"' in str(loop.stop_reason)


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: StopIfNoDecreaseHook("loss", 0), "max_steps_without_decrease=0:"),
        (lambda: StopIfNoIncreaseHook("loss", 2.5), "max_steps_without_increase=2.5:"),  # type: ignore[arg-type]
        (lambda: StopIfNoDecreaseHook("loss", max_epochs_without_decrease=0), "max_epochs_without_decrease=0:"),
        (
            lambda: StopIfNoDecreaseHook("loss"),
            "max_epochs_without_decrease=None: give StopIfNoDecreaseHook exactly one",
        ),
        (
            lambda: StopIfNoIncreaseHook("loss", 2, max_epochs_without_increase=1),
            "give StopIfNoIncreaseHook exactly one",
        ),
        (lambda: StopIfHigherHook("loss", 1, min_steps=-1), "min_steps=-1:"),
        (lambda: StopIfHigherHook("loss", NAN), "threshold=nan: must be a number to compare the metric with"),
        (lambda: StopIfLowerHook("loss", "low"), "threshold='low': must be a number"),  # type: ignore[arg-type]
        (lambda: StopIfLowerHook("loss", None), "threshold=None: must be a number"),  # type: ignore[arg-type]
        (
            lambda: StopIfLowerHook("loss", 1, every_n_steps=2, timer=EverySteps(3)),
            r"every_n_steps=2, timer=EverySteps\(3\): .* not both",
        ),
    ],
)
def test_refuses_invalid_arguments_and_shows_them(create: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create()


def test_a_metric_that_is_not_one_number_is_an_error_of_the_run() -> None:
    with pytest.raises(TypeError, match=r"loss is a tensor of shape \(3,\): the metric of a StopIfHigherHook"):
        trace(StopIfHigherHook("loss", 0.5), losses=[torch.ones(3)])
