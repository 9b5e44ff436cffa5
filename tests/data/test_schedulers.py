"""A learning-rate scheduler that is not in the checkpoints, and one that only a checkpoint has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from torchhooks import (
    AbortedError,
    BestCheckpointHook,
    CheckpointError,
    CheckpointSaverHook,
    MonitoredLoop,
    Saver,
    Scaffold,
    Session,
    SessionRunHook,
)
from torchhooks.testing import RecordingHook

Lines = list[tuple[str, str]]

FORGOTTEN = (
    "the optimizer has a learning-rate scheduler, whose state is not in the checkpoints: a resumed training run would "
    'start the schedule over. Give the loop state={"scheduler": scheduler}'
)


def half() -> float:
    return 0.5


def make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def forgotten(lines: Lines) -> list[str]:
    return [text for level, text in lines if level == "WARNING" and "scheduler" in text]


def train(folder: Path, optimizer: Any, *hooks: SessionRunHook, **arguments: Any) -> None:
    saving = CheckpointSaverHook(folder, save_steps=1)
    with MonitoredLoop(half, None, optimizer, hooks=[*hooks, saving], checkpoint_dir=folder, **arguments) as loop:
        for _ in range(3):
            loop.run()


def test_a_forgotten_scheduler_is_a_warning_once_per_loop_at_the_first_checkpoint(tmp_path: Path, lines: Lines) -> None:
    optimizer = make_optimizer()
    lr_scheduler.StepLR(optimizer, 1)
    train(tmp_path / "a", optimizer)
    assert forgotten(lines) == [FORGOTTEN]
    train(tmp_path / "b", optimizer)
    assert forgotten(lines) == [FORGOTTEN] * 2


def test_a_scheduler_that_is_made_after_the_first_checkpoint_is_found_too(tmp_path: Path, lines: Lines) -> None:
    optimizer = make_optimizer()
    hooks = [CheckpointSaverHook(tmp_path, save_steps=1)]
    with MonitoredLoop(half, None, optimizer, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        assert forgotten(lines) == []
        lr_scheduler.StepLR(optimizer, 1)
        loop.run()
        loop.run()
    assert forgotten(lines) == [FORGOTTEN]


def test_a_recovery_and_a_second_saver_do_not_repeat_the_warning(tmp_path: Path, lines: Lines) -> None:
    optimizer = make_optimizer()
    lr_scheduler.StepLR(optimizer, 1)
    failing = RecordingHook(raises={("before_run", 2): AbortedError})
    best = BestCheckpointHook(tmp_path, lambda loss: loss, save_steps=1, mode="min")
    train(tmp_path, optimizer, failing, best)
    assert [call[0] for call in failing.calls].count("after_create_session") == 2
    assert forgotten(lines) == [FORGOTTEN]


def test_the_scheduler_of_a_second_optimizer_counts(tmp_path: Path, lines: Lines) -> None:
    second = make_optimizer()
    lr_scheduler.StepLR(second, 1)
    train(tmp_path, make_optimizer(), state={"second": second})
    assert forgotten(lines) == [FORGOTTEN.replace("the optimizer", "state['second']")]


def test_the_saved_scheduler_of_one_optimizer_is_not_that_of_another(tmp_path: Path, lines: Lines) -> None:
    first, second = make_optimizer(), make_optimizer()
    schedulers = [lr_scheduler.StepLR(each, 1) for each in (first, second)]
    train(tmp_path / "a", first, state={"second": second, "scheduler": schedulers[0]})
    (line,) = forgotten(lines)
    assert line.startswith("state['second'] has a learning-rate scheduler")
    assert line.endswith('Give the loop state={"scheduler2": scheduler}')
    train(tmp_path / "b", first, state={"second": second, "scheduler": schedulers[0], "another": schedulers[1]})
    assert forgotten(lines) == [line]


class Wrapper:
    """Has its schedulers in a list in its state."""

    def __init__(self, *schedulers: lr_scheduler.LRScheduler) -> None:
        self.schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class OtherLibrarys:
    """A scheduler like timm's, without last_epoch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        lr_scheduler.StepLR(optimizer, 1)  # which it uses inside

    def state_dict(self) -> dict[str, Any]:
        return {"metric": 0.5}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class SchedulerHook(Wrapper, SessionRunHook):
    """A hook that steps its scheduler."""


def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 1)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 1),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
        lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.1),
        lambda optimizer: Wrapper(lr_scheduler.StepLR(optimizer, 1)),
        sequential,
        OtherLibrarys,
    ],
)
def test_a_scheduler_in_the_state_is_no_warning(
    make: Callable[[torch.optim.Optimizer], Any], tmp_path: Path, lines: Lines
) -> None:
    optimizer = make_optimizer()
    part = make(optimizer)
    assert hasattr(optimizer.step, "_wrapped_by_lr_sched")
    if callable(part.state_dict().get("anneal_func")):
        pytest.skip("SWALR of torch 2.7 has a function in its state, which cannot be saved")
    train(tmp_path, optimizer, state={"any name": part})
    assert forgotten(lines) == []


def test_a_scheduler_in_the_state_of_a_hook_is_no_warning(tmp_path: Path, lines: Lines) -> None:
    optimizer = make_optimizer()
    train(tmp_path, optimizer, SchedulerHook(lr_scheduler.StepLR(optimizer, 1)))
    assert forgotten(lines) == []


def test_something_else_in_the_state_does_not_count(tmp_path: Path, lines: Lines) -> None:
    optimizer = make_optimizer()
    lr_scheduler.StepLR(optimizer, 1)
    train(tmp_path, optimizer, state={"ema": nn.Linear(1, 1), "empty": Wrapper()})
    assert forgotten(lines) == [FORGOTTEN]


def test_reduce_on_plateau_and_no_scheduler_are_no_warning(tmp_path: Path, lines: Lines) -> None:
    optimizer = make_optimizer()
    train(tmp_path / "a", optimizer)
    train(tmp_path / "b", None)
    lr_scheduler.ReduceLROnPlateau(optimizer)
    train(tmp_path / "c", optimizer)
    assert forgotten(lines) == []


def test_an_optimizer_that_once_had_a_scheduler_is_no_warning(tmp_path: Path, lines: Lines) -> None:
    earlier, optimizer = make_optimizer(), make_optimizer()
    lr_scheduler.StepLR(earlier, 1)
    optimizer.load_state_dict(earlier.state_dict())
    assert "initial_lr" in optimizer.param_groups[0]
    train(tmp_path, optimizer)
    assert forgotten(lines) == []


class Wrapped(torch.optim.Optimizer):
    """Passes everything on to another optimizer, like Accelerate's wrapper."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_the_scheduler_of_a_wrapped_optimizer_counts(tmp_path: Path, lines: Lines) -> None:
    optimizer = make_optimizer()
    lr_scheduler.StepLR(optimizer, 1)
    train(tmp_path, Wrapped(optimizer))
    assert forgotten(lines) == [FORGOTTEN]


def test_without_checkpoints_there_is_no_warning(lines: Lines) -> None:
    optimizer = make_optimizer()
    lr_scheduler.StepLR(optimizer, 1)
    with MonitoredLoop(half, None, optimizer) as loop:
        loop.run()
    assert forgotten(lines) == []


def checkpoint_with(folder: Path, *names: str) -> str:
    scheduler = lr_scheduler.StepLR(make_optimizer(), 1)
    return Saver().save(Session(state=dict.fromkeys(names, scheduler)), folder / "model.ckpt", 3)


@pytest.mark.parametrize(
    ("names", "entries"),
    [
        (["scheduler"], '"scheduler": scheduler'),
        (["ema", "lr sched"], '"ema": ema, "lr sched": ...'),
    ],
)
def test_the_error_about_a_scheduler_that_only_the_checkpoint_has_says_how_to_name_it(
    names: list[str], entries: str, tmp_path: Path
) -> None:
    checkpoint_with(tmp_path, *names)
    with pytest.raises(CheckpointError) as raised:
        MonitoredLoop(half, checkpoint_dir=tmp_path)
    only = ", ".join(map(repr, names))
    assert f"  only in the file: {only}. Give the loop state={{{entries}}}\n" in str(raised.value)


def test_a_restore_that_is_not_strict_says_it_too(tmp_path: Path, lines: Lines) -> None:
    checkpoint_with(tmp_path, "scheduler")
    MonitoredLoop(half, checkpoint_dir=tmp_path, scaffold=Scaffold(saver=Saver(strict=False))).close()
    assert "only in the file: 'scheduler'. Give the loop state" in forgotten(lines)[0]


def test_a_model_or_a_hook_that_only_the_checkpoint_has_is_not_one_to_name_in_the_state(tmp_path: Path) -> None:
    hooks = {"mine": SchedulerHook()}
    Saver().save(Session(nn.Linear(1, 1), hooks=hooks), tmp_path / "model.ckpt", 3)
    with pytest.raises(CheckpointError) as raised:
        MonitoredLoop(half, checkpoint_dir=tmp_path)
    assert "only in the file: 'model'\nMake them match" in str(raised.value)
