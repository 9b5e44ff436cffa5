"""On an accelerator: evaluation, early stopping, called functions, profiles and the bar do not block the host."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import accelerators
from support.accelerators import DEVICE, keep_busy, no_waits

from torchhooks import (
    BestCheckpointHook,
    CallFnHook,
    EvaluationHook,
    EverySteps,
    LoggingTensorHook,
    MonitoredLoop,
    ProfilerHook,
    ProgressBarHook,
    SessionRunHook,
    StepCounterHook,
    StopIfHigherHook,
    StopIfNoDecreaseHook,
    SummarySaverHook,
    best_checkpoint,
    grad_norm,
    param_norm,
    running_mean,
    summary,
)
from torchhooks.testing import RecordingWriter

pytestmark = pytest.mark.accelerator


class Training(accelerators.Training):
    """A small network with dropout, whose steps keep the device busy."""

    def __init__(self) -> None:
        super().__init__()
        self.model[1] = torch.nn.Dropout()

    def step(self) -> torch.Tensor:
        loss = super().step()
        keep_busy(0.001)  # the device lags, so that a wait would take long
        return loss

    def evaluate(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        torch.rand(3, device=DEVICE)
        return {"error": model(self.batch).square().mean()}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_hook_makes_the_host_wait() -> None:
    training, every = Training(), EverySteps(4)
    evaluation = EvaluationHook(training.evaluate, timer=every, at_start=True, at_end=True)
    hooks: list[SessionRunHook] = [
        evaluation,
        StopIfNoDecreaseHook(evaluation["error"], 1000),
        StopIfHigherHook("loss", 1e9),
        CallFnHook(lambda loss, global_step: None, timer=every),
        LoggingTensorHook(["loss"], timer=every),
        SummarySaverHook(
            summary_writer=RecordingWriter(),
            summary_op=[grad_norm(), param_norm(), summary.scalar("loss", running_mean("loss", reset="epoch"))],
            timer=every,
        ),
        StepCounterHook(4, summary_writer=RecordingWriter(), tokens_per_step=lambda: torch.ones((), device=DEVICE)),
    ]
    with MonitoredLoop(training.step, training.model, training.optimizer, hooks=hooks) as loop:
        loop.run()  # initialises what torch initialises lazily
        with no_waits():
            for _ in range(19):
                loop.run()
    assert set(evaluation.values) == {"error"}


def test_a_progress_bar_does_not_make_the_host_wait() -> None:
    pytest.importorskip("tqdm")
    training, terminal = Training(), Terminal()
    hook = ProgressBarHook(20, ["loss"], file=terminal)
    with MonitoredLoop(training.step, training.model, training.optimizer, hooks=[hook]) as loop:
        loop.run()
        with no_waits():
            for _ in range(19):
                loop.run()
    assert "20/20" in terminal.getvalue()


def test_the_results_are_those_of_each_step_and_training_is_not_disturbed() -> None:
    losses: list[list[float]] = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        training, writer = Training(), RecordingWriter()
        evaluation = EvaluationHook(training.evaluate, every_n_steps=4, summary_writer=writer)
        training.run(*([evaluation] if evaluates else []), runs=20)
        losses.append([loss.item() for loss in training.losses])
    assert losses[0] == losses[1]
    assert [step for step, _ in writer.scalars["error"]] == [4, 8, 12, 16, 20]
    assert len({value for _, value in writer.scalars["error"]}) == 5


def test_a_function_is_called_with_the_values_of_its_run_on_the_cpu() -> None:
    seen: dict[int, torch.Tensor] = {}

    def note(loss: torch.Tensor, global_step: int) -> None:
        seen[global_step] = loss

    training = Training()
    training.run(CallFnHook(note, every_n_steps=5), runs=20)
    assert {step: loss.device.type for step, loss in seen.items()} == dict.fromkeys((5, 10, 15, 20), "cpu")
    assert all(loss.item() == training.losses[step - 1].item() for step, loss in seen.items())


def test_a_threshold_that_is_crossed_ends_the_loop() -> None:
    loop = Training().run(StopIfHigherHook("loss", -1.0), runs=1000)
    assert loop.global_step < 1000
    assert 'At step 1, metric "loss"' in str(loop.stop_reason)


def test_the_best_checkpoint_takes_the_result_of_an_evaluation(tmp_path: Path) -> None:
    training = Training()
    evaluation = EvaluationHook(training.evaluate, every_n_steps=5)
    training.run(evaluation, BestCheckpointHook(tmp_path, evaluation["error"], save_steps=5, mode="min"), runs=20)
    assert best_checkpoint(tmp_path / "best") is not None


@pytest.mark.cuda
@pytest.mark.parametrize("runs", [1, 2])
def test_a_profile_contains_the_kernels(runs: int, tmp_path: Path) -> None:
    Training().run(ProfilerHook(save_steps=5, output_dir=tmp_path, runs=runs), runs=9)
    (file,) = tmp_path.iterdir()
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
