"""What a restore refuses before it loads anything, and what it puts back when something raises in the middle."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.states import Box
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchhooks.checkpoints.gradients import Gradients
from torchhooks.checkpoints.saver import Saver, load_weights
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


def make_plain(number: int) -> Session:
    """Return a session with nothing but classes of torch, whose model is loaded last."""
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    optimizer = torch.optim.Adam(model.parameters(), lr=number)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(number):
        train(model, optimizer)
        scheduler.step()
    optimizer.zero_grad()
    session = Session(model, optimizer, {"scheduler": scheduler}, gradients=Gradients(optimizer))
    session.global_step = number
    return session


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["scheduler", "global_step", "random"])
def test_a_model_that_is_loaded_last_is_as_it_was_whatever_raises_before(
    tmp_path: Path, place: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, error = save(tmp_path, make_plain(3)), kind()
    session, expected = make_plain(2), everything(make_plain(2))
    interrupt(monkeypatch, place, session, error)
    with pytest.raises(kind) as raised:
        Saver().restore(session, path)
    monkeypatch.undo()
    assert raised.value is error
    assert same(everything(session), expected)


class Operators(TorchDispatchMode):
    """Counts the operators that copy a large tensor, and raises ``error`` in the first one called ``raises_in``."""

    def __init__(self, raises_in: str = "", error: BaseException | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.raises_in, self.error = raises_in, error
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in ("aten::_to_copy", "aten::clone") and args[0].numel() >= 64 * 64:
            self.copies.append(name)
        error = self.error
        if name == self.raises_in and error is not None:
            self.error = None
            raise error
        return func(*args, **(kwargs or {}))


def test_a_restore_makes_no_copy_of_a_model_that_only_copies_what_it_loads(tmp_path: Path) -> None:
    path = save(tmp_path, make_plain(3))
    session = make_plain(2)
    with Operators() as operators:
        Saver().restore(session, path)
    assert operators.copies == []
    assert same(everything(session), everything(make_plain(3)))
    assert session.model is not None
    with Operators() as operators:
        load_weights(path, session.model)
    assert operators.copies == []


@pytest.mark.parametrize("whole", [True, False])
def test_a_ctrl_c_while_such_a_model_is_loaded_comes_after_all_of_it(tmp_path: Path, whole: bool) -> None:
    path = save(tmp_path, make_plain(3))
    session, expected = make_plain(2), make_plain(3)
    assert session.model is not None
    assert expected.model is not None
    load: Any = partial(Saver().restore, session, path) if whole else partial(load_weights, path, session.model)
    with pytest.raises(KeyboardInterrupt), Operators("aten::copy_", KeyboardInterrupt()):
        load()
    assert same(session.model.state_dict(), expected.model.state_dict())
    if whole:
        assert same(everything(session), everything(expected))


def test_a_part_that_looks_at_the_weights_is_loaded_after_them(tmp_path: Path) -> None:
    class Masters(Box):
        def load_state_dict(self, state_dict: Any) -> None:
            self.value = model.weight.item()

    model = nn.Linear(1, 1)
    path = save(tmp_path, Session(model, state={"masters": Masters(1)}))
    weight = model.weight.item()
    nn.init.zeros_(model.weight)
    masters = Masters(1)
    Saver().restore(Session(model, state={"masters": masters}), path)
    assert masters.value == weight


class Failing(nn.Linear):
    """A module whose load fails once, after some of its tensors."""

    fails = True

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.fails:
            self.fails = False
            raise ZeroDivisionError


def fail_in_hook(module: nn.Module, keys: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("hooked", [True, False])
def test_a_module_with_a_load_of_its_own_is_put_back(tmp_path: Path, whole: bool, hooked: bool) -> None:
    make_module = nn.Linear if hooked else Failing
    path = save(tmp_path, Session(nn.Linear(2, 2)))
    model = make_module(2, 2)
    before = model.weight.detach().clone()
    if hooked:
        model.register_load_state_dict_post_hook(fail_in_hook)
    load: Any = partial(Saver().restore, Session(model), path) if whole else partial(load_weights, path, model)
    with pytest.raises(ZeroDivisionError):
        load()
    assert torch.equal(model.weight, before)


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
