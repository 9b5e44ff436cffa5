"""Which hook an autopsy is about, also of several, and of those that an extension adds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchhooks import (
    CheckpointSaverHook,
    Extension,
    LoopPlan,
    MonitoredLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    register_extension,
    unregister_extension,
)
from torchhooks.tools.autopsy.request import examined_hooks

NAN_AT = 6


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(*hooks: SessionRunHook) -> None:
    """Train until the NaN of step 6, which is the root of a negative number."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().mean()
        if loop.global_step + 1 == NAN_AT:
            loss = (loss * 0 - 1).sqrt()
        loss.backward()
        optimizer.step()
        return loss.detach()

    saver = CheckpointSaverHook("run", save_steps=2)
    try:
        with MonitoredLoop(step, model, optimizer, hooks=[*hooks, saver], checkpoint_dir="run") as loop:
            for inputs in loop.until_stop(torch.ones(20, 4, 4)):
                with suppress(ZeroDivisionError):
                    loop.run(inputs)
    except NanLossDuringTrainingError:
        return
    raise AssertionError("there was no NaN")


def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("run", f"nan-{NAN_AT}", "report.json").read_text())
    return found


@contextmanager
def adding(change: Callable[[LoopPlan], LoopPlan]) -> Iterator[None]:
    class Adding(Extension):
        def plan(self, plan: LoopPlan) -> LoopPlan:
            return change(plan)

    factory = register_extension(lambda plan: Adding())
    try:
        yield
    finally:
        unregister_extension(factory)


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_hook_that_an_extension_adds_is_examined(place: str) -> None:
    hook = NanTensorHook("loss")
    changes: dict[str, Callable[[LoopPlan], LoopPlan]] = {
        "first": lambda plan: replace(plan, first=(hook, *plan.first)),
        "last": lambda plan: replace(plan, last=(*plan.last, hook)),
    }
    with adding(changes[place]):
        train()
        train()
    found = report()
    assert found["step"] == NAN_AT
    assert found["origin"]["operation"] == "aten.sqrt.default"
    assert found["not_finite_first"]["step"] == NAN_AT, "the last hook of the examination was called after the others"


def test_hooks_are_known_by_name_or_by_what_they_look_at() -> None:
    named = NanTensorHook("loss")
    named.name = "of the loss"
    hooks = [NanTensorHook("loss"), named, NanTensorHook("acc"), NanTensorHook("loss", also_inf=True), SessionRunHook()]
    assert examined_hooks(hooks) == {
        "NanTensorHook of loss": hooks[0],
        "of the loss": named,
        "NanTensorHook of acc": hooks[2],
        "NanTensorHook of loss, number 2": hooks[3],
    }


def test_the_cause_is_looked_for_though_another_hook_was_added_in_front() -> None:
    train(NanTensorHook("loss"))
    train(NanTensorHook("global_step"), NanTensorHook("loss", max_lag_steps=0))
    assert report()["origin"]["operation"] == "aten.sqrt.default"


class Nameless:
    """A fetch that cannot be written."""

    def compute(self) -> float:
        return 0.0

    def __repr__(self) -> str:
        raise RuntimeError("no name yet")


def test_a_fetch_of_another_hook_that_cannot_be_written_hides_nothing() -> None:
    for _ in range(2):
        train(NanTensorHook(Nameless()), NanTensorHook("loss"))
    assert report()["request"]["hook"] == "NanTensorHook of loss"


class FailingOnce(SessionRunHook):
    """Raises an error after the run before the NaN."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_context.session.global_step == NAN_AT - 1:
            raise ZeroDivisionError("of a hook")


def test_the_value_of_a_run_in_which_a_later_hook_failed_is_reported() -> None:
    for _ in range(2):
        train(NanTensorHook("loss"), FailingOnce())
    values = {run["step"]: run["value"] for run in report()["runs"]}
    assert all(isinstance(values[step], float) for step in (NAN_AT - 1, NAN_AT))
