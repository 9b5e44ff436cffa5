"""What a restore refuses before it loads anything, and in which order it loads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.states import Box
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchhooks import (
    CheckpointSaverHook,
    EvaluationHook,
    MonitoredLoop,
    SessionRunHook,
    StopAtStepHook,
    StopIfNoDecreaseHook,
)
from torchhooks.checkpoints.comparing import compare
from torchhooks.checkpoints.contents import Gradients
from torchhooks.checkpoints.saver import Saver, load_weights
from torchhooks.common.errors import CheckpointError
from torchhooks.lifecycle.session import Session
from torchhooks.testing import log_lines

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


def test_a_scheduler_of_another_class_is_refused(tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["SGD"]([torch.zeros(1)])
    steps: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    cosine: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    path = save(tmp_path, Session(state={"scheduler": steps}))
    with pytest.raises(CheckpointError, match=r"scheduler: is of the class CosineAnnealingLR, in the file .* StepLR"):
        Saver().restore(Session(state={"scheduler": cosine}), path)


def test_a_hyperparameter_that_a_group_has_and_the_file_has_not_is_refused(tmp_path: Path) -> None:
    weight = torch.zeros(1)
    path = save(tmp_path, Session(optimizer=torch.optim.SGD([{"params": [weight], "factor": 2.0}], 0.1)))
    other = torch.optim.SGD([{"params": [weight], "scale": 2.0}], 0.1)
    message = "group 0 has other hyperparameters, missing in the file: 'scale'; only in the file: 'factor'"
    with pytest.raises(CheckpointError, match=message):
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
        with pytest.raises(ValueError, match=r"global_step=.*not a bool"):
            Saver().save(session, tmp_path / "model.ckpt", step)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"global_step=.*not a bool"):
            session.global_step = step  # type: ignore[assignment]


# Loaded.


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
        if name == self.raises_in and error is not None and isinstance(args[0], nn.Parameter):  # not while reading
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


def test_a_part_whose_state_cannot_be_read_yet_is_restored(tmp_path: Path) -> None:
    class Later(Box):
        def state_dict(self) -> dict[str, Any]:
            raise AttributeError("there is no session yet")

    box = Later()
    Saver().restore(Session(state={"box": box}), save(tmp_path, Session(state={"box": Box(1)})))
    assert box.value == 1


@pytest.mark.parametrize(
    ("lr", "betas", "said"),
    [
        (0.1, (0.9, 0.999), ""),
        (0.01, (0.9, 0.999), "lr 0.01 in the script, 0.1 from the checkpoint"),
        (0.01, (0.5, 0.9), "0.1 from the checkpoint; betas [0.5, 0.9] in the script, [0.9, 0.999] from the checkpoint"),
    ],
)
def test_hyperparameters_that_the_checkpoint_replaces_are_said_but_not_what_a_scheduler_did(
    lr: float, betas: tuple[float, float], said: str, tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    def train(lr: float, betas: tuple[float, float]) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr, betas)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        hooks = [CheckpointSaverHook(save_steps=9)]
        with MonitoredLoop(
            optimizer.step, model, optimizer, hooks=hooks, state={"s": scheduler}, checkpoint_dir=tmp_path
        ) as loop:
            loop.run()
            scheduler.step()

    train(0.1, (0.9, 0.999))
    train(lr, betas)
    found = [text for level, text in lines if "in the script" in text]
    assert len(found) == bool(said)
    assert all(said in text for text in found)


# -- the order of an optimizer's parameters, and the number of threads -------------------------------------------------


def in_order(*numbers: int, groups: int = 1, renamed: bool = False, wrapped: bool = False) -> Session:
    """Return a session whose optimizer has the parameters of its model in the order of ``numbers``."""
    layers = {"last" if renamed else "first": nn.Linear(2, 2), "second": nn.Linear(2, 2)}
    model = nn.Sequential(OrderedDict(layers))
    parameters = [[*model.parameters()][number] for number in numbers]
    size = len(parameters) // groups
    split = [{"params": parameters[i : i + size]} for i in range(0, len(parameters), size)]
    optimizer = torch.optim.Adam(split)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    given: Any = torch.compile(model, backend="eager") if wrapped else model
    return Session(given, optimizer)


@pytest.mark.parametrize(
    ("saved", "own", "moved"),
    [
        ({}, {}, None),
        ({}, {"numbers": (2, 3, 0, 1)}, "'second.weight' is number 0 of group 0, and was number 2 of group 0"),
        ({}, {"numbers": (0, 3, 2, 1)}, "'second.bias' is number 1 of group 0, and was number 3 of group 0"),
        ({"groups": 2}, {"groups": 2, "numbers": (2, 3, 0, 1)}, "'second.weight' is number 0 of group 0, and was num"),
        ({"groups": 2}, {"groups": 2, "numbers": (0, 2, 1, 3)}, "'second.weight' is number 1 of group 0, and was num"),
        ({}, {"wrapped": True}, None),
        ({"wrapped": True}, {}, None),
        ({"wrapped": True}, {"numbers": (1, 0, 2, 3)}, "'first.bias' is number 0 of group 0, and was number 1"),
    ],
)
def test_parameters_in_another_order_are_refused_before_their_state_goes_to_others(
    saved: dict[str, Any], own: dict[str, Any], moved: str | None, tmp_path: Path
) -> None:
    first, second = ({"numbers": (0, 1, 2, 3), **each} for each in (saved, own))
    path = save(tmp_path, in_order(*first.pop("numbers"), **first))
    session = in_order(*second.pop("numbers"), **second)
    if moved is None:
        Saver().restore(session, path)
        return
    before = everything(session)
    with pytest.raises(CheckpointError, match="optimizer: has its parameters in another order than in the file") as got:
        Saver().restore(session, path)
    assert moved in str(got.value)
    assert "such as model.parameters(), and no set" in str(got.value)
    assert same(everything(session), before)
    Saver(strict=False).restore(session, path)  # all but the optimizer


def test_parameters_in_the_order_of_a_model_with_another_name_are_compared_as_before(tmp_path: Path) -> None:
    path = save(tmp_path, in_order(0, 1, 2, 3))
    renamed = in_order(0, 1, 2, 3, renamed=True)
    renamed.model.register_load_state_dict_pre_hook(rename_first)  # type: ignore[union-attr]
    Saver().restore(renamed, path)
    moved = in_order(0, 1, 3, 2, renamed=True)
    moved.model.register_load_state_dict_pre_hook(rename_first)  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"'second\.bias' is number 2 of group 0, and was number 3"):
        Saver().restore(moved, path)


def rename_first(module: nn.Module, state: dict[str, Any], *_: object) -> None:
    for name in [name for name in state if name.startswith("first.")]:
        state[name.replace("first.", "last.")] = state.pop(name)


def test_the_names_of_a_module_in_state_count_too(tmp_path: Path) -> None:
    def session(*numbers: int) -> Session:
        second = nn.Linear(1, 1)
        parameters = [*second.parameters()]
        optimizer = torch.optim.SGD([parameters[number] for number in numbers], 0.1, momentum=0.9)
        return Session(nn.Linear(1, 1), state={"second": second, "of_second": optimizer})

    path = save(tmp_path, session(0, 1))
    Saver().restore(session(0, 1), path)
    with pytest.raises(CheckpointError, match=r"of_second: has its parameters in another order .*'second\.bias' is"):
        Saver().restore(session(1, 0), path)


def test_a_checkpoint_without_names_is_compared_as_before(tmp_path: Path) -> None:
    path = save(tmp_path, in_order(0, 1, 2, 3))
    file = Path(path, "state.pt")
    entries = torch.load(file, weights_only=True)
    del entries["parameter_names"], entries["num_threads"]
    with log_lines() as lines:
        pairs, misfits = compare(in_order(2, 3, 0, 1), entries, without_rank=False)
    assert (sorted(pairs), misfits, lines) == (["model", "optimizer"], {}, [])


def test_an_optimizer_that_was_given_a_set_does_not_train_on_with_the_moments_of_others(tmp_path: Path) -> None:
    def train(numbers: tuple[int, ...], last_step: int) -> None:
        session = in_order(*numbers)
        hooks = [CheckpointSaverHook(save_steps=100), StopAtStepHook(last_step=last_step)]
        with MonitoredLoop(float, session.model, session.optimizer, hooks=hooks, checkpoint_dir=tmp_path) as loop:
            for _ in loop.until_stop(range(9)):
                loop.run()

    train((0, 1, 2, 3), 3)
    with pytest.raises(CheckpointError, match="in another order"):
        train((2, 3, 0, 1), 6)
    train((0, 1, 2, 3), 6)


@pytest.mark.parametrize("loops", [1, 2])
def test_another_number_of_threads_is_said_once_a_loop(loops: int, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    path = save(tmp_path, Session(nn.Linear(1, 1)))
    other = threads + 1
    torch.set_num_threads(other)
    try:
        with log_lines() as lines:
            for _ in range(loops):
                session = Session(nn.Linear(1, 1))
                Saver().restore(session, path)
                Saver().restore(session, path)  # as in a recovery
    finally:
        torch.set_num_threads(threads)
    assert (
        lines
        == [
            (
                "INFO",
                f"{path} was saved with {threads} threads, and torch has {other} now: on the CPU, sums may differ in "
                "their last bits from a training run without interruption. If that matters, call "
                f"torch.set_num_threads({threads}) first",
            )
        ]
        * loops
    )
    with log_lines() as lines:
        Saver().restore(Session(nn.Linear(1, 1)), path)
    assert lines == []


# -- hooks that came or went -------------------------------------------------------------------------------------------


def stopping(steps: int, name: str | None = None) -> StopIfNoDecreaseHook:
    return StopIfNoDecreaseHook("loss", max_steps_without_decrease=steps, name=name)


def train_with(folder: Path, last_step: int, hooks: list[SessionRunHook], **arguments: Any) -> list[tuple[str, str]]:
    """Return what a loop with ``hooks`` logs about them while it trains up to ``last_step``."""
    losses = iter([5.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0])
    with log_lines() as lines:
        hooks = [*hooks, CheckpointSaverHook(every_n_steps=1), StopAtStepHook(last_step=last_step)]
        with MonitoredLoop(lambda: next(losses), hooks=hooks, checkpoint_dir=folder, **arguments) as loop:
            for _ in loop.until_stop(range(8)):
                loop.run()
    return [(level, text) for level, text in lines if "a state of" in text or "no state of" in text]


def test_a_hook_that_is_added_starts_over(tmp_path: Path) -> None:
    assert train_with(tmp_path, 2, []) == []
    new = stopping(3)
    assert train_with(tmp_path, 4, [new]) == [
        ("INFO", f"{tmp_path}/model.ckpt-2 has no state of StopIfNoDecreaseHook, which starts over")
    ]
    assert new.state_dict()["best"] == 4.0  # of the two runs that this loop made
    assert train_with(tmp_path, 5, [stopping(3)]) == []


def test_hooks_that_are_gone_are_passed_over(tmp_path: Path) -> None:
    train_with(tmp_path, 2, [stopping(3), stopping(3, "other"), stopping(3, "kept")])
    assert train_with(tmp_path, 3, [stopping(3, "kept"), stopping(3, "new")]) == [
        ("INFO", f"{tmp_path}/model.ckpt-2 has no state of new, which starts over"),
        (
            "INFO",
            f"{tmp_path}/model.ckpt-2 has a state of StopIfNoDecreaseHook, other, which the loop does not have: it is "
            "passed over",
        ),
    ]


def test_a_hook_that_only_reports_comes_and_goes_in_silence(tmp_path: Path) -> None:
    assert train_with(tmp_path, 2, [EvaluationHook(lambda: {"value": 1.0}, every_n_steps=1)]) == []
    assert train_with(tmp_path, 3, []) == []
    assert train_with(tmp_path, 4, [EvaluationHook(lambda: {"value": 1.0}, every_n_steps=1)]) == []


class Fails(SessionRunHook):
    def __init__(self) -> None:
        self.left = 1

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if self.left:
            self.left -= 1
            raise ConnectionError


def test_a_recovery_says_it_no_second_time(tmp_path: Path) -> None:
    train_with(tmp_path, 2, [stopping(3)])
    hooks = [stopping(3, "new"), Fails(), StopAtStepHook(last_step=4)]  # and none that saves: it is restored twice
    with (
        log_lines() as lines,
        MonitoredLoop(lambda: 0.5, hooks=hooks, checkpoint_dir=tmp_path, recoverable_errors=(ConnectionError,)) as loop,
    ):
        for _ in loop.until_stop(range(8)):
            loop.run()
    assert len([text for _, text in lines if text.startswith("restored step 2")]) == 2
    assert [text.partition(" has ")[2][:11] for _, text in lines if "state of " in text] == [
        "no state of",
        "a state of ",
    ]
