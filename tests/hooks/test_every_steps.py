"""EverySteps, and hooks that are given a timer in place of a period of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices import FakeDevice
from support.events import steps

from torchhooks import (
    BestCheckpointHook,
    CheckpointSaverHook,
    EverySteps,
    LoggingTensorHook,
    MonitoredLoop,
    NeverTriggerTimer,
    SecondOrStepTimer,
    SessionRunHook,
    StepCounterHook,
    SummarySaverHook,
    list_checkpoints,
)
from torchhooks.common.timers import NOW, Due
from torchhooks.testing import FakeClock, RecordingWriter, log_lines, trace

Timer = EverySteps | SecondOrStepTimer | NeverTriggerTimer


# -- the timer --------------------------------------------------------------------------------------------------------


def test_triggers_at_multiples() -> None:
    timer = EverySteps(3)
    assert [step for step in range(10) if timer.should_trigger_for_step(step)] == [3, 6, 9]


@pytest.mark.parametrize(("start", "due"), [(0, 5), (4, 5), (5, 10), (101, 105)])
def test_is_due_at_the_first_multiple_after_the_start(start: int, due: int) -> None:
    timer = EverySteps(5)
    timer.start_at(start)
    assert timer.next_due() == Due(step=due)
    assert [step for step in range(start, due + 1) if timer.should_trigger_for_step(step)] == [due]


def test_is_due_at_once_before_it_knows_the_start() -> None:
    assert EverySteps(5).next_due() == NOW


def test_a_step_beyond_a_multiple_triggers_and_does_not_move_the_next_one() -> None:
    timer = EverySteps(5)
    timer.start_at(0)
    assert timer.should_trigger_for_step(7)
    timer.update_last_triggered_step(7)
    assert not timer.should_trigger_for_step(9)
    assert timer.should_trigger_for_step(10)


def test_elapsed_time_and_steps_are_those_since_the_last_trigger(clock: FakeClock) -> None:
    timer = EverySteps(5)
    assert timer.update_last_triggered_step(5) == (None, None)
    clock.advance(2.5)
    assert timer.update_last_triggered_step(11) == (2.5, 6)
    assert timer.last_triggered_step() == 11


def test_reset_forgets_the_last_trigger() -> None:
    timer = EverySteps(5)
    timer.update_last_triggered_step(5)
    timer.reset()
    assert (timer.last_triggered_step(), timer.next_due(), timer.should_trigger_for_step(5)) == (None, NOW, True)


def test_a_start_at_an_earlier_step_lets_a_multiple_trigger_again() -> None:
    timer = EverySteps(5)
    timer.update_last_triggered_step(10)
    timer.start_at(7)
    assert timer.last_triggered_step() is None
    assert timer.should_trigger_for_step(10)


@pytest.mark.parametrize("n", [0, -1, 2.5, True, None, "ten", 2**63])
def test_refuses_an_invalid_period(n: Any) -> None:
    with pytest.raises(ValueError, match=f"n={n!r}: must be"):
        EverySteps(n)


# -- hooks ------------------------------------------------------------------------------------------------------------


def accuracy() -> float:
    return 0.5


HOOKS: dict[str, tuple[Callable[..., SessionRunHook], dict[str, Any]]] = {
    "SummarySaverHook": (lambda **given: SummarySaverHook(summary_op={"a": "loss"}, **given), {"save_steps": 5}),
    "StepCounterHook": (StepCounterHook, {"every_n_steps": 5}),
    "LoggingTensorHook": (lambda **given: LoggingTensorHook(["loss"], **given), {"every_n_iter": 5}),
    "CheckpointSaverHook": (lambda **given: CheckpointSaverHook("run", **given), {"save_steps": 5}),
    "BestCheckpointHook": (lambda **given: BestCheckpointHook("run", "loss", mode="max", **given), {"save_secs": 5}),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_refuses_a_timer_and_a_period(name: str) -> None:
    create, period = HOOKS[name]
    ((argument, value),) = period.items()
    with pytest.raises(ValueError, match=rf"{argument}={value}, timer=EverySteps\(3\): give"):
        create(**period, timer=EverySteps(3))


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("timer", [5, "often", EverySteps], ids=repr)
def test_a_hook_refuses_what_is_not_a_timer(name: str, timer: Any) -> None:
    with pytest.raises(TypeError, match=r"timer=.*: must be an EverySteps, an EveryEpochs, an AtSteps, an OnSignal, a"):
        HOOKS[name][0](timer=timer)


@pytest.mark.parametrize("name", HOOKS)
def test_a_timer_is_in_the_repr_of_its_hook(name: str) -> None:
    assert "timer=EverySteps(3)" in repr(HOOKS[name][0](timer=EverySteps(3)))


@pytest.mark.parametrize("timer", [EverySteps(4), SecondOrStepTimer(every_steps=4)], ids=repr)
def test_two_hooks_with_one_timer_share_one_evaluation(timer: Timer) -> None:
    seen: list[int] = []

    def measured(global_step: int) -> float:
        seen.append(global_step)
        return 0.5

    writer = RecordingWriter()
    hooks = [
        LoggingTensorHook({"a": measured}, timer=timer),
        SummarySaverHook(summary_writer=writer, summary_op={"a": measured}, timer=timer),
    ]
    ran = trace(*hooks, losses=[0.1] * 9)
    due = [4, 8] if isinstance(timer, EverySteps) else [1, 5, 9]
    assert seen == due
    assert [step for step, _ in writer.scalars["a"]] == due
    assert len([text for _, text in ran.lines if text.startswith("a = ")]) == len(due)


def test_hooks_of_every_kind_report_at_the_steps_of_one_timer_in_seconds(tmp_path: Path) -> None:
    # One of them decides before the step, the other after it: a trigger of one counts for the other.
    writer, timer = RecordingWriter(), SecondOrStepTimer(every_secs=3)
    hooks = [
        CheckpointSaverHook(tmp_path, timer=timer),
        SummarySaverHook(summary_writer=writer, summary_op={"a": "loss"}, timer=timer),
    ]
    trace(*hooks, losses=[0.1] * 8)
    # The period ends during the third run. The saver, which is asked after the step, triggers; the other a run later.
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0, 3, 6, 8]
    assert [step for step, _ in writer.scalars["a"]] == [1, 4, 7]


def test_a_summary_that_comes_late_does_not_void_the_points_of_other_hooks(tmp_path: Path) -> None:
    for losses, start in (([0.1] * 12, 0), ([0.1] * 6, 3)):
        hooks = [
            StepCounterHook(output_dir=tmp_path, timer=EverySteps(2)),
            SummarySaverHook(output_dir=tmp_path, summary_op={"loss": "loss"}, timer=EverySteps(8)),
        ]
        trace(*hooks, losses=losses, start_step=start)
    assert steps(tmp_path, "global_step/sec") == [2, 6, 8]
    assert steps(tmp_path, "loss") == [8]


@pytest.mark.parametrize(("start", "steps"), [(0, [0, 4, 8, 9]), (101, [101, 104, 108, 110])])
def test_checkpoints_are_saved_at_multiples_also_after_a_resume(start: int, steps: list[int], tmp_path: Path) -> None:
    trace(CheckpointSaverHook(tmp_path, timer=EverySteps(4)), losses=[0.1] * 9, start_step=start)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == steps


def test_a_saver_that_never_triggers_saves_at_the_start_and_at_the_end(tmp_path: Path) -> None:
    trace(CheckpointSaverHook(tmp_path, timer=NeverTriggerTimer()), losses=[0.1] * 9)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0, 9]


@pytest.mark.parametrize(("start", "steps"), [(0, [4, 8]), (101, [104, 108])])
def test_the_rate_is_reported_at_multiples_also_after_a_resume(start: int, steps: list[int]) -> None:
    writer = RecordingWriter()
    counter = StepCounterHook(summary_writer=writer, timer=EverySteps(4))
    trace(counter, losses=[0.1] * 9, start_step=start, secs=0.5)
    assert writer.scalars == {"global_step/sec": [(step, 2.0) for step in steps]}


def test_a_counter_with_a_timer_says_when_the_step_does_not_advance() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "step_unit": "optimizer_step"}
    ran = trace(StepCounterHook(timer=EverySteps(4)), losses=[0.1] * 9, **given)
    assert [text for level, text in ran.lines if level == "WARNING"] != []


class Accumulating:
    """A step that calls ``optimizer.step()`` in every third run."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.runs = 0

    def __call__(self) -> int:
        self.runs += 1
        if self.runs % 3 == 0:
            self.optimizer.step()
        return self.runs

    def train(self, runs: int, *hooks: SessionRunHook) -> None:
        given: dict[str, Any] = {"hooks": hooks, "step_unit": "optimizer_step"}
        with MonitoredLoop(self, self.model, self.optimizer, **given) as loop:
            for _ in range(runs):
                loop.run()


def test_with_accumulated_gradients_a_multiple_triggers_in_the_run_that_reaches_it() -> None:
    seen: list[tuple[int, int]] = []

    def measured(global_step: int, loss: int) -> float:
        seen.append((global_step, loss))
        return 0.5

    timer, writer = EverySteps(2), RecordingWriter()
    with log_lines() as lines:
        Accumulating().train(
            14,
            LoggingTensorHook({"a": measured, "step": "global_step"}, timer=timer),
            SummarySaverHook(summary_writer=writer, summary_op={"a": measured}, timer=timer),
        )
    assert seen == [(2, 6), (4, 12)]
    assert [step for step, _ in writer.scalars["a"]] == [2, 4]
    assert len([text for _, text in lines if text.startswith("a = ")]) == 2


def test_values_of_a_device_are_not_waited_for() -> None:
    timer = EverySteps(2)
    writer = RecordingWriter()
    hooks = [
        LoggingTensorHook(["loss"], timer=timer),
        SummarySaverHook(summary_writer=writer, summary_op={"loss": "loss"}, timer=timer),
    ]
    waits = []
    loss = torch.tensor(0.5)
    with FakeDevice(lag=3) as device, MonitoredLoop(lambda: loss, hooks=hooks) as loop:
        for _ in range(9):
            loop.run()
        waits.append(device.waits)
    assert waits == [0]
    assert writer.scalars["loss"] == [(step, 0.5) for step in (2, 4, 6, 8)]
