"""Advice: every line at its moment, once, on the chief, and never the end of a training run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_threads import Hub, ThreadRanks, in_threads
from torch import nn

from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    LoggingTensorHook,
    MonitoredLoop,
    PeriodicHook,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from torchhooks.loop import advice
from torchhooks.loop.advice import CLOSED, CREATED, FIRST_RUN, GIVEN
from torchhooks.testing import log_lines

Lines = list[tuple[str, str]]


class Idle(SessionRunHook):
    """Overrides no method of a hook."""

    def helper(self) -> None: ...


class Outer(SessionRunHook):
    """Has a periodic hook in an attribute."""

    def __init__(self) -> None:
        self.inner = LoggingTensorHook(["loss"], every_n_iter=1)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None: ...


class Counting(SessionRunHook):
    """Has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None: ...


class Due(PeriodicHook):
    """Is due at a step that the training run does not reach."""


class Train:
    """A loop around a step that does not return what hooks ask for."""

    def __init__(self, *hooks: SessionRunHook, **arguments: Any) -> None:
        with MonitoredLoop(lambda: {"loss": 1.0}, hooks=hooks, **arguments) as loop:
            for _ in range(2):
                loop.run()


def other_optimizer(folder: Path) -> dict[str, Any]:
    trained = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    return {"model": nn.Linear(1, 1), "optimizer": trained, "checkpoint_dir": folder}


def empty_loop(folder: Path) -> None:
    with MonitoredLoop(lambda: 1.0) as loop:
        for _ in loop.until_stop(()):
            loop.run()


ADVICE: dict[str, tuple[Callable[[Path], object], str]] = {
    "unused_methods": (lambda folder: Train(Idle()), "hooks[0] is a Idle, which has helper(), but overrides no method"),
    "inner_hooks": (
        lambda folder: Train(Outer()),
        "hooks[0] is a Outer, which has a LoggingTensorHook in its attribute",
    ),
    "no_saver": (lambda folder: Train(checkpoint_dir=folder), "has no checkpoint, and no hook saves one: add"),
    "missing_parts": (
        lambda folder: Train(checkpoint_dir=folder),
        "checkpoints will contain no model and no optimizer",
    ),
    "other_parameters": (lambda folder: Train(**other_optimizer(folder)), "the optimizer trains no parameter"),
    "another_folder": (
        lambda folder: Train(CheckpointSaverHook(folder / "a", save_steps=1), checkpoint_dir=folder / "b"),
        "the loop will never resume from what CheckpointSaverHook",
    ),
    "names_to_come": (
        lambda folder: Train(LoggingTensorHook(["acc"], every_n_steps=9)),
        "will ask for 'acc', which the first run did not return",
    ),
    "late_hooks": (
        lambda folder: Train(CheckpointSaverHook(folder, save_steps=9), Counting()),
        "checkpoints contain its state from before the run: move it to the front",
    ),
    "no_run": (empty_loop, "no run was made, because until_stop's tuple yielded no item"),
    "never_due": (lambda folder: Train(Due(every_n_steps=9)), "was never due: the training run had 2 steps"),
}


def functions() -> Iterator[str]:
    for name, function in inspect.getmembers(advice, inspect.isfunction):
        if function.__module__ == advice.__name__ and not name.startswith("_"):
            yield name


def test_every_function_has_a_moment_and_a_script() -> None:
    names = [function.__name__ for function in (*GIVEN, *CREATED, *FIRST_RUN, *CLOSED)]
    assert sorted(names) == [*functions()] == sorted(ADVICE)


@pytest.mark.parametrize("name", ADVICE)
def test_each_line_is_said_once(name: str, tmp_path: Path) -> None:
    train, said = ADVICE[name]
    with log_lines() as lines:
        train(tmp_path / "run")
    assert len([text for _, text in lines if said in text]) == 1


def test_a_recovery_repeats_nothing(tmp_path: Path) -> None:
    failures = iter([False, True])

    def step() -> dict[str, float]:
        if next(failures, False):
            raise AbortedError("preempted")
        return {"loss": 1.0}

    hooks = [CheckpointSaverHook(tmp_path, save_steps=1), LoggingTensorHook(["acc"], every_n_steps=9), Idle(), Outer()]
    with log_lines() as lines, MonitoredLoop(step, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for _ in range(4):
            loop.run()
    assert "restored step 1" in " ".join(text for _, text in lines)
    for said in (
        "hooks[2] is a Idle",
        "hooks[3] is a Outer",
        "checkpoints will contain no model",
        "will ask for 'acc'",
    ):
        assert len([text for _, text in lines if said in text]) == 1


def test_the_chief_alone_gives_advice() -> None:
    def train(ranks: ThreadRanks, hub: Hub) -> None:
        Train(Idle(), Due(every_n_steps=9), ranks=ranks)

    with log_lines() as lines:
        assert in_threads(2, train) == [None, None]
    assert len([text for _, text in lines if "is a Idle" in text]) == 1
    assert len([text for _, text in lines if "was never due" in text]) == 1


class Nameless(CheckpointSaverHook):
    def __repr__(self) -> str:
        raise RuntimeError("no name yet")


def test_a_hook_that_cannot_be_written_hides_no_advice(tmp_path: Path) -> None:
    with log_lines() as lines:
        Train(Nameless(tmp_path / "a", save_steps=1), checkpoint_dir=tmp_path / "b")
    assert len([text for _, text in lines if "the loop will never resume from what a Nameless saves" in text]) == 1


class Failing(LoggingTensorHook):
    @property
    def fetches_to_come(self) -> None:
        raise RuntimeError("not yet")


def test_advice_that_fails_ends_no_training_run(tmp_path: Path) -> None:
    with log_lines() as lines:
        Train(Failing(["loss"], every_n_steps=9), CheckpointSaverHook(tmp_path, save_steps=9), Counting())
    assert ("WARNING", "a check of the loop, which only gives advice, has failed") in lines
    assert len([text for _, text in lines if "move it to the front" in text]) == 1, "of the next function"


class FailingToBegin(SessionRunHook):
    def begin(self) -> None:
        raise ZeroDivisionError


def test_a_hook_that_calls_another_one_is_named_though_a_begin_fails() -> None:
    with log_lines() as lines, pytest.raises(ZeroDivisionError):
        MonitoredLoop(lambda: None, hooks=[Outer(), Idle(), FailingToBegin()])
    assert [text.partition(",")[0] for _, text in lines] == ["hooks[1] is a Idle", "hooks[0] is a Outer"]
