"""Accelerate's wrappers: loaders whose state_dict() raises, and an optimizer without hooks of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.packages import import_or_skip
from torch.utils.data import DataLoader

from torchhooks import CheckpointSaverHook, MonitoredLoop, StopAtStepHook

Lines = list[tuple[str, str]]
BATCHES, EPOCHS = 6, 3


class PreparedLoader:
    """What ``Accelerator.prepare`` makes of a DataLoader: it has ``state_dict`` by inheritance, which raises."""

    def __init__(self, base: Any) -> None:
        self.base_dataloader = base

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError
        return getattr(self.base_dataloader, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.base_dataloader)

    def state_dict(self) -> Any:
        return self.dl_state_dict

    def load_state_dict(self, state_dict: Any) -> None:
        self.base_dataloader.load_state_dict(state_dict)


class DisguisedLoader(PreparedLoader):
    """The same, and like Accelerate's an instance of DataLoader as far as ``isinstance`` can tell."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.base_dataloader.__class__


class PreparedOptimizer(torch.optim.Optimizer):
    """What ``Accelerator.prepare`` makes of an optimizer: torch's ``__init__`` was never called."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.synchronizes = True

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.synchronizes:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.synchronizes:
            self.optimizer.step(closure)


def plain_loader() -> DataLoader[Any]:
    values: Any = torch.arange(2.0 * BATCHES).unsqueeze(1)
    return DataLoader(values, 2, shuffle=True)


def faked(disguised: bool) -> tuple[Callable[[float], None], torch.nn.Module, Any, Any]:
    """Return a step that accumulates two batches, the model, the optimizer and the loader."""
    model, runs = torch.nn.Linear(1, 1), iter(range(99))
    optimizer = PreparedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    def step(inputs: Any) -> None:
        optimizer.synchronizes = next(runs) % 2 == 1
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer, (DisguisedLoader if disguised else PreparedLoader)(plain_loader())


def real() -> tuple[Callable[[float], None], torch.nn.Module, Any, Any]:
    accelerator = import_or_skip("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, plain_loader())

    def step(inputs: Any) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    return step, model, optimizer, loader


KINDS: dict[str, Callable[[], Any]] = {"fake": lambda: faked(False), "disguised": lambda: faked(True), "real": real}


def train(kind: str, directory: Path, last_step: int, seed: int, step_unit: str = "optimizer_step") -> Any:
    """Return the batches, the steps after them, and the parameters at the end."""
    torch.manual_seed(seed)
    step, model, optimizer, loader = KINDS[kind]()
    hooks = [StopAtStepHook(last_step=last_step), CheckpointSaverHook(directory, save_steps=1)]
    seen = []
    with MonitoredLoop(
        step, model, optimizer, hooks=hooks, checkpoint_dir=directory, step_unit=step_unit, stop_grace_period_secs=1
    ) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for inputs in loop.until_stop(loader):
                loop.run(inputs)
                seen.append((loop.global_step, inputs.flatten().tolist()))
    return seen, [parameter.tolist() for parameter in model.parameters()]


def warnings(lines: Lines) -> list[str]:
    """Return the warnings, except of the lists in which the tests here note what they see."""
    return [text for level, text in lines if level == "WARNING"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_of_the_wrapped_optimizer_count(kind: str, tmp_path: Path) -> None:
    seen, _ = train(kind, tmp_path, 99, seed=1)
    assert [step for step, _ in seen] == [run // 2 for run in range(1, EPOCHS * BATCHES + 1)]


@pytest.mark.parametrize("step_unit", [pytest.param("run", marks=pytest.mark.exhaustive), "optimizer_step"])
@pytest.mark.parametrize("stop", [2, pytest.param(6, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_loader_is_resumed_by_skipping_without_a_warning(
    kind: str, stop: int, step_unit: str, tmp_path: Path, lines: Lines
) -> None:
    whole, end = train(kind, tmp_path / "whole", 99, 1, step_unit)
    lines.clear()
    first, _ = train(kind, tmp_path / "parts", stop, 1, step_unit)
    second, resumed_end = train(kind, tmp_path / "parts", 99, 2, step_unit)
    assert warnings(lines) == []
    assert first + second == whole
    if step_unit == "optimizer_step" or stop % 2 == 0:
        assert resumed_end == end


class Stream:
    """Five numbers. The state is the next one; ``error`` is what loading it raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.next = 0
        self.error = error

    def __iter__(self) -> Iterator[int]:
        while self.next < 5:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> Any:
        return {"next": self.next}

    def load_state_dict(self, state: Any) -> None:
        if self.error is not None:
            raise self.error
        self.next = state["next"]


class Stateless(Stream):
    def state_dict(self) -> Any:
        raise self.error or KeyError


def over(directory: Path, stream: Any, *hooks: Any) -> list[int]:
    made = []
    hooks = *hooks, CheckpointSaverHook(directory, save_steps=9)
    with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=directory) as loop:
        for item in loop.until_stop(stream):
            loop.run()
            made.append(item)
    return made


def test_a_loader_that_has_lost_its_state_is_resumed_by_skipping(tmp_path: Path, lines: Lines) -> None:
    over(tmp_path, Stream(), StopAtStepHook(last_step=2))
    assert over(tmp_path, Stateless(ValueError("no state"))) == [2, 3, 4]
    assert warnings(lines) == [
        "the state_dict() of until_stop's Stateless raised ValueError: no state. So it is treated as a loader without "
        "a state, and is resumed by skipping the items that are done."
    ]


def test_a_data_loader_whose_state_fails_otherwise_is_warned_of(tmp_path: Path, lines: Lines) -> None:
    class Loader(DataLoader[int]):
        def __init__(self, error: Exception | None) -> None:
            super().__init__(range(5), batch_size=None)  # type: ignore[arg-type]
            self.error = error

        def state_dict(self) -> Any:
            if self.error is None:
                return self.misspelled  # type: ignore[attr-defined]
            raise self.error

        def load_state_dict(self, state: Any) -> None:
            pass

    for number, error in enumerate([None, ValueError("a lost worker")]):
        over(tmp_path / str(number), Loader(error), StopAtStepHook(last_step=2))
    assert [re.search("misspelled|a lost worker", text) is not None for text in warnings(lines)] == [True, True]


def test_a_loader_that_refuses_its_state_is_an_error(tmp_path: Path) -> None:
    over(tmp_path, Stream(), StopAtStepHook(last_step=2))
    with pytest.raises(ValueError, match="of another data set"):
        over(tmp_path, Stream(ValueError("of another data set")))


def test_an_optimizer_that_wraps_nothing_and_has_no_hooks_is_an_error() -> None:
    class Bare(torch.optim.Optimizer):
        param_groups: list[Any] = []  # noqa: RUF012

        def __init__(self) -> None: ...

    with pytest.raises(AttributeError, match="_optimizer_step_post_hooks"):
        MonitoredLoop(lambda: None, optimizer=Bare(), step_unit="optimizer_step")
