"""Warnings of what a training run trains and its checkpoints lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from torchhooks import CheckpointSaverHook, MonitoredLoop

Lines = list[tuple[str, str]]

NO_OPTIMIZER = "SGD made a step, but the loop was not given it, so checkpoints do not contain its state"
NO_MODEL = "SGD trains 2 tensors that checkpoints do not contain, because the loop was not given their module"


class Training:
    """A training run with two models and optimizers."""

    def __init__(self, start: int = 1) -> None:
        self.models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in self.models]
        self.runs = 0
        self.start = start

    def step(self) -> None:
        self.runs += 1
        self.optimizers[0].step()
        if self.runs >= self.start:
            self.optimizers[1].step()


def warnings(lines: Lines) -> list[str]:
    return [text.split(":")[0] for level, text in lines if level == "WARNING" and "checkpoints do not" in text]


@pytest.mark.parametrize(
    ("model", "optimizer", "expected"),
    [
        (True, True, []),
        (True, False, [NO_OPTIMIZER]),
        (False, True, [NO_MODEL]),
        (False, False, [NO_OPTIMIZER, NO_MODEL]),
    ],
)
@pytest.mark.parametrize("body", [False, True])
def test_a_model_or_an_optimizer_that_was_not_given_is_warned_of_once_in_each_process(
    model: bool, optimizer: bool, expected: list[str], body: bool, tmp_path: Path, lines: Lines
) -> None:
    for _ in range(2):
        lines.clear()
        training = Training(start=100)
        given: dict[str, Any] = {"model": training.models[0]} if model else {}
        given |= {"optimizer": training.optimizers[0]} if optimizer else {}
        hooks = [CheckpointSaverHook(tmp_path, save_steps=2)]
        step: Any = None if body else training.step
        with MonitoredLoop(step, hooks=hooks, checkpoint_dir=tmp_path, **given) as loop:
            for _ in range(4):
                if body:
                    with loop.step():
                        training.step()
                else:
                    loop.run()
        assert warnings(lines) == expected


def test_without_checkpoints_nothing_is_warned_of(lines: Lines) -> None:
    training = Training()
    with MonitoredLoop(training.step) as loop:
        loop.run()
    assert lines == []


@pytest.mark.parametrize("part", ["second", "list", "modules", "own"])
def test_what_is_in_the_state_is_saved(part: str, tmp_path: Path, lines: Lines) -> None:
    training = Training()

    class Own:
        """A part of a script, which saves a model."""

        def state_dict(self) -> dict[str, Any]:
            return {"inner": [training.models[1].state_dict()]}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    model, optimizer = training.models[1], training.optimizers[1]
    states: dict[str, dict[str, Any]] = {
        "second": {"model": model},
        "list": {"models": torch.nn.ModuleList([model])},
        "modules": {"model": torch.nn.Sequential(model)},
        "own": {"own": Own()},
    }
    state = {**states[part], "optimizer": optimizer}
    with MonitoredLoop(
        training.step, training.models[0], training.optimizers[0], state=state, checkpoint_dir=tmp_path
    ) as loop:
        loop.run()
        loop.run()
    assert warnings(lines) == []


def test_a_second_optimizer_is_warned_of(tmp_path: Path, lines: Lines) -> None:
    training = Training()
    with MonitoredLoop(training.step, training.models[0], training.optimizers[0], checkpoint_dir=tmp_path) as loop:
        loop.run()
    assert warnings(lines) == [NO_OPTIMIZER, NO_MODEL]


def test_an_optimizer_that_the_given_one_wraps_is_known(tmp_path: Path, lines: Lines) -> None:
    class Wrapper(torch.optim.Optimizer):
        """An optimizer of another library, which holds the real one."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer.param_groups, {})
            self.inner = optimizer

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    training = Training()
    wrapper = Wrapper(training.optimizers[0])
    with MonitoredLoop(wrapper.step, training.models[0], wrapper, checkpoint_dir=tmp_path) as loop:
        loop.run()
    assert warnings(lines) == []


def test_steps_outside_of_runs_and_of_other_loops_are_not_looked_at(tmp_path: Path, lines: Lines) -> None:
    training, other = Training(start=100), Training(start=100)
    with MonitoredLoop(training.step, training.models[0], training.optimizers[0], checkpoint_dir=tmp_path) as loop:
        other.step()
        with MonitoredLoop(other.step) as inner:
            inner.run()
        loop.run()
    assert warnings(lines) == []


def test_optimizers_are_looked_at_in_the_first_runs_only(tmp_path: Path) -> None:
    hooks = _global_optimizer_post_hooks
    before = len(hooks)
    training = Training(start=100)
    saves = [CheckpointSaverHook(tmp_path, save_steps=1)]
    loop = MonitoredLoop(training.step, training.models[0], training.optimizers[0], hooks=saves)
    seen = [len(hooks) - before]
    for _ in range(3):
        loop.run()
        seen.append(len(hooks) - before)
    assert seen == [1, 1, 1, 0]  # removed when a run begins, because torch iterates over them within a run
    loop.close()
    with MonitoredLoop(training.step, checkpoint_dir=tmp_path / "other"):
        assert len(hooks) == before + 1
    assert len(hooks) == before


def test_a_hook_of_the_script_on_all_optimizers_is_called_in_each_step(tmp_path: Path) -> None:
    training, calls = Training(), []
    hooks = [CheckpointSaverHook(tmp_path, save_steps=100)]
    with MonitoredLoop(training.step, training.models[0], training.optimizers[0], hooks=hooks) as loop:
        handle = register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(optimizer))  # after the loop's
        for _ in range(4):
            loop.run()
    handle.remove()
    assert calls == training.optimizers * 4
