"""What a restore refuses before it loads anything, and what it puts back when something raises in the middle."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.states import Box
from torch import nn

from torchhooks.checkpoints.gradients import Gradients
from torchhooks.checkpoints.saver import Saver
from torchhooks.common.errors import CheckpointError
from torchhooks.lifecycle.session import Session

Lines = list[tuple[str, str]]
Make = Callable[[list[Any]], torch.optim.Optimizer]


def save(folder: Path, session: Session) -> str:
    return Saver().save(session, folder / "model.ckpt", 1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


# Refused.

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.1),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, 0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, 0.1),
}


@pytest.mark.parametrize("other", OPTIMIZERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_of_another_class_is_refused(tmp_path: Path, name: str, other: str) -> None:
    saved, model = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = OPTIMIZERS[name](list(saved.parameters()))
    train(saved, optimizer)
    path = save(tmp_path, Session(saved, optimizer))
    session, before = Session(model, OPTIMIZERS[other](list(model.parameters()))), model.weight.clone()
    if name == other:
        Saver().restore(session, path)
        assert torch.equal(model.weight, saved.weight)
        return
    with pytest.raises(CheckpointError, match=f"is of the class {other}, in the file it is of the class {name}"):
        Saver().restore(session, path)
    assert torch.equal(model.weight, before)
    assert session.optimizer is not None
    assert session.optimizer.state_dict()["state"] == {}


def without_classes(monkeypatch: pytest.MonkeyPatch, folder: Path, session: Session) -> str:
    """Save ``session`` as an earlier version did."""
    with monkeypatch.context() as patch:
        patch.setattr("torchhooks.checkpoints.state._OF_ONE_CLASS", ())
        return save(folder, session)


def test_an_earlier_checkpoint_is_refused_because_of_the_names_of_its_hyperparameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    session = Session(model, OPTIMIZERS["SGD"](list(model.parameters())))
    path = without_classes(monkeypatch, tmp_path, session)
    Saver().restore(session, path)
    with pytest.raises(
        CheckpointError,
        match=r"group 0 has other hyperparameters, missing in the file: 'betas', .*; only in the file: 'momentum'",
    ):
        Saver().restore(Session(model, OPTIMIZERS["Adam"](list(model.parameters()))), path)


def test_a_scheduler_of_another_class_is_refused(tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["SGD"]([torch.zeros(1)])
    steps: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    cosine: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    path = save(tmp_path, Session(state={"scheduler": steps}))
    with pytest.raises(CheckpointError, match=r"scheduler: is of the class CosineAnnealingLR, in the file .* StepLR"):
        Saver().restore(Session(state={"scheduler": cosine}), path)


def test_a_hyperparameter_that_a_group_has_and_the_file_has_not_is_refused(tmp_path: Path) -> None:
    weight = torch.zeros(1)
    path = save(tmp_path, Session(optimizer=torch.optim.SGD([weight], 0.1)))
    other = torch.optim.SGD([{"params": [weight], "scale": 2.0}], 0.1)
    with pytest.raises(CheckpointError, match="group 0 has other hyperparameters, missing in the file: 'scale'"):
        Saver().restore(Session(optimizer=other), path)


def test_what_an_optimizer_adds_to_its_groups_in_its_first_step_does_not_prevent_a_recovery(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
            return super().step(closure)

    model = nn.Linear(2, 2)
    optimizer = Counting(model.parameters(), 0.1, momentum=0.9)
    session = Session(model, optimizer)
    path = save(tmp_path, session)
    train(model, optimizer)
    Saver().restore(session, path)
    assert "steps" not in optimizer.param_groups[0]


def test_parameters_of_other_names_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=True)
    names = list(model.named_parameters())
    path = save(tmp_path, Session(optimizer=torch.optim.SGD(names, 0.1)))
    with pytest.raises(CheckpointError, match=r"group 0 has the parameters bias, weight, in the file weight, bias"):
        Saver().restore(Session(optimizer=torch.optim.SGD(names[::-1], 0.1)), path)


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.int64),
        (torch.int64, torch.float32),
        (torch.int64, torch.int32),
        (torch.complex64, torch.float32),
        (torch.uint16, torch.int32),
    ],
)
def test_a_dtype_that_would_round_is_refused(tmp_path: Path, saved: torch.dtype, own: torch.dtype) -> None:
    path = save(tmp_path, Session(with_buffer(torch.ones(2, dtype=saved))))
    model = with_buffer(torch.zeros(2, dtype=own))
    with pytest.raises(
        CheckpointError, match=f"dtype that cannot hold what is in the file: 'tensor' {own} instead of {saved}"
    ):
        Saver().restore(Session(model), path)
    assert model.get_buffer("tensor").sum() == 0


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
        (torch.int8, torch.float32),
        (torch.int32, torch.int64),
        (torch.bool, torch.int8),
        (torch.float32, torch.complex64),
    ],
)
def test_a_dtype_that_holds_every_value_is_loaded_with_a_warning(
    tmp_path: Path, lines: Lines, saved: torch.dtype, own: torch.dtype
) -> None:
    path = save(tmp_path, Session(with_buffer(torch.ones(2, dtype=saved))))
    model = with_buffer(torch.zeros(2, dtype=own))
    Saver().restore(Session(model), path)
    assert model.get_buffer("tensor").sum() == 2
    assert ("WARNING", f"model: of another dtype than in the file: 'tensor' {own} instead of {saved}") in lines


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.register_buffer("tensor", tensor)
    return model


def test_a_model_on_the_meta_device_is_refused_because_nothing_can_be_loaded_into_it(tmp_path: Path) -> None:
    path = save(tmp_path, Session(nn.Linear(2, 2)))
    with pytest.raises(CheckpointError, match=r"on the meta device, .* to_empty\(\) first: 'weight', 'bias'"):
        Saver().restore(Session(nn.Linear(2, 2, device="meta")), path)


def test_a_meta_tensor_in_a_state_is_refused_with_this_reason_alone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        save(tmp_path, Session(state={"box": Box(torch.ones(2, device="meta"))}))
    reason = "on the meta device, where it has no values: give it some with to_empty()"
    assert str(raised.value) == f"This cannot be saved: box['value'] is {reason}."


def test_a_bool_as_the_global_step_is_refused_with_its_reason(tmp_path: Path) -> None:
    session = Session()
    for step in (True, torch.tensor(True), np.True_):
        with pytest.raises(ValueError, match=r"global_step=.*: must be a whole number, 0 or more, not a bool"):
            Saver().save(session, tmp_path / "model.ckpt", step)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"global_step=.*: must be a whole number, 0 or more, not a bool"):
            session.global_step = step  # type: ignore[assignment]


# Put back.


class Last(nn.Module):
    """A model with a tied weight, a buffer and an extra state, whose last part may raise when it is loaded."""

    def __init__(self, number: float, raises: BaseException | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.register_buffer("number", torch.tensor(number))
        self.extra, self.raises = [number], raises

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error


def make(number: float, raises: Mapping[str, BaseException] | None = None) -> Session:
    """Return a session with a state of every kind; ``raises`` is what the loading of each kind raises."""
    raises = raises or {}
    torch.manual_seed(int(number))
    model = Last(number, raises.get("model"))
    optimizer = torch.optim.Adam(model.parameters(), lr=number)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(int(number)):
        train(model, optimizer)
        scheduler.step()
    boxes = {name: Box([number], raises.get(name)) for name in ("a", "z")}
    hooks = {"hook": Box(number, raises.get("hooks.hook"))}
    session = Session(
        model,
        optimizer,
        {"a": boxes["a"], "scheduler": scheduler, "z": boxes["z"]},
        hooks=hooks,
        gradients=Gradients(optimizer),
    )
    session.global_step = int(number)
    return session


def everything(session: Session) -> dict[str, Any]:
    assert session.model is not None
    assert session.optimizer is not None
    parts: dict[str, Any] = {**session.state, **session.hooks, "optimizer": session.optimizer, "model": session.model}
    return {
        **{name: part.state_dict() for name, part in parts.items()},
        "gradients": [parameter.grad for parameter in session.model.parameters()],
        "step": session.global_step,
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def draws() -> tuple[Any, ...]:
    return random.random(), np.random.rand(), torch.rand(1).item()


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["model", "a", "scheduler", "z", "hooks.hook", "global_step", "random"])
def test_whatever_raises_in_a_restore_leaves_everything_as_it_was(
    tmp_path: Path, place: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, error = save(tmp_path, make(3)), kind()
    session, expected = make(2, {place: error}), make(2)
    if place in ("global_step", "random", "scheduler"):
        interrupt(monkeypatch, place, session, error)
    torch.manual_seed(7)
    number = draws()
    torch.manual_seed(7)
    states = random.getstate(), np.random.get_state()
    with pytest.raises(kind) as raised:
        Saver().restore(session, path)
    monkeypatch.undo()
    assert raised.value is error
    for set_state, state in zip((random.setstate, np.random.set_state), states, strict=True):
        before = random.getstate() if set_state is random.setstate else np.random.get_state()
        assert repr(before) == repr(state)
    assert torch.rand(1).item() == number[2]
    assert same(everything(session), everything(expected))
    assert session.model is not None
    train(session.model, session.optimizer)  # type: ignore[arg-type]


def interrupt(monkeypatch: pytest.MonkeyPatch, place: str, session: Session, error: BaseException) -> None:
    """Have ``error`` raised once when ``place`` is restored."""
    errors: Iterator[BaseException] = iter([error])

    def once(*args: Any) -> Any:
        for each in errors:
            raise each
        return original(*args)

    if place == "scheduler":
        scheduler: Any = session.state["scheduler"]
        original: Any = scheduler.load_state_dict
        monkeypatch.setattr(scheduler, "load_state_dict", once)
    elif place == "random":
        original = np.random.set_state
        monkeypatch.setattr(np.random, "set_state", once)
    else:
        original = random.setstate
        monkeypatch.setattr(random, "setstate", once)


def test_a_restore_that_fails_names_what_it_cannot_put_back(tmp_path: Path) -> None:
    path = save(tmp_path, Session(state={"box": Box(1)}))
    with pytest.raises(ZeroDivisionError) as raised:
        Saver().restore(Session(state={"box": Box(2, ZeroDivisionError())}), path)
    assert "'box' may not be what it was before: ZeroDivisionError" in raised.value.__notes__


def test_a_part_whose_state_cannot_be_read_yet_is_restored(tmp_path: Path) -> None:
    class Later(Box):
        def state_dict(self) -> dict[str, Any]:
            raise AttributeError("there is no session yet")

    box = Later()
    Saver().restore(Session(state={"box": box}), save(tmp_path, Session(state={"box": Box(1)})))
    assert box.value == 1


def test_a_loader_is_not_asked_for_its_state_and_is_put_back(tmp_path: Path) -> None:
    class Loader(Box):
        def __iter__(self) -> Iterator[int]:
            return iter([])

        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("torchdata's loader would start its workers")

    loader = Loader("own")
    path = save(tmp_path, Session(state={"loader": Box(1), "z": Box(1)}))
    with pytest.raises(ZeroDivisionError):
        Saver().restore(Session(state={"loader": loader, "z": Box(2, ZeroDivisionError())}), path)
    assert loader.value == "own"
