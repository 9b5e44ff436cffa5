"""The warnings of what trains and is in no checkpoint: other optimizers, gradient scalers, averages, parameters."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import unittest.mock
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import _global_buffer_registration_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torchhooks import (
    CallFnHook,
    CheckpointSaverHook,
    EvaluationHook,
    MonitoredLoop,
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from torchhooks.checkpoints import unsaved
from torchhooks.testing import log_lines

SCALER = (
    "a GradScaler is in use, and is in no checkpoint: a resumed training run would begin with another scale. Give the "
    'loop state={"scaler": scaler}'
)
AVERAGE = (
    "an AveragedModel is updated, and is in no checkpoint: a resumed training run would start the average over. Give "
    'the loop state={"average": averaged_model}'
)
OPTIMIZER = (
    "an optimizer other than the loop's, of the class Adam, makes steps, and is in no checkpoint: a resumed training "
    'run would start its state over. Give the loop state={"optimizer2": optimizer2}'
)
OPTIMIZER_AND_MODEL = (
    "an optimizer other than the loop's, of the class Adam, makes steps, and is in no checkpoint, and neither are 2 of "
    "its 2 parameters: a resumed training run would start its state over. Give the loop "
    'state={"model2": model2, "optimizer2": optimizer2}'
)


class World:
    """A model and a second one, which are trained together."""

    def __init__(self) -> None:
        self.model, self.second = nn.Linear(2, 2), nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.optimizer2 = torch.optim.Adam(self.second.parameters())
        self.scaler = GradScaler("cpu")
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(self, inputs: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def step_of_both(self, inputs: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.optimizer2.zero_grad()
        self.second(self.model(inputs)).mean().backward()
        self.optimizer.step()
        self.optimizer2.step()

    def step_scaled(self, inputs: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(inputs).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step_averaged(self, inputs: torch.Tensor) -> None:
        self.step(inputs)
        self.average.update_parameters(self.model)

    def step_of_everything(self, inputs: torch.Tensor) -> None:
        self.step_of_both(inputs)
        self.step_scaled(inputs)
        self.average.update_parameters(self.model)


class Trainer:
    """Saves its attributes, as a class of the script does, or a wrapper of another library."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in vars(self).items():
            part.load_state_dict(state[name])


class Updating:
    """A function that updates an average."""

    def __init__(self, world: World) -> None:
        self.average, self.model = world.average, world.model

    def __call__(self, global_step: int) -> None:
        self.average.update_parameters(self.model)


def warnings_of(
    folder: Path,
    step: Callable[[torch.Tensor], object],
    model: nn.Module,
    optimizer: Any,
    *hooks: SessionRunHook,
    saves: bool = True,
    after_epoch: Callable[[], object] = bool,
    **state: Any,
) -> list[str]:
    """Train for three epochs of five items, with a save at every fourth step, and return the warnings."""
    saving = [CheckpointSaverHook(every_n_steps=4)] if saves else []
    with (
        log_lines() as lines,
        MonitoredLoop(
            step, model, optimizer, hooks=[*hooks, *saving], state=state, checkpoint_dir=folder if saves else None
        ) as loop,
    ):
        for _ in loop.until_stop(range(3)):
            for inputs in loop.until_stop(list(torch.randn(5, 3, 2))):
                loop.run(inputs)
            after_epoch()
    return [text for level, text in lines if level == "WARNING"]


@pytest.mark.parametrize(
    ("step", "saved", "expected"),
    [
        (World.step_of_both, (), [OPTIMIZER_AND_MODEL]),
        (World.step_of_both, ("second",), [OPTIMIZER]),
        (World.step_of_both, ("second", "optimizer2"), []),
        (World.step_scaled, (), [SCALER]),
        (World.step_scaled, ("scaler",), []),
        (World.step_averaged, (), [AVERAGE]),
        (World.step_averaged, ("average",), []),
        (World.step_of_everything, (), [OPTIMIZER_AND_MODEL, SCALER, AVERAGE]),
        (World.step_of_everything, ("second", "scaler"), [OPTIMIZER, AVERAGE]),
        (World.step_of_everything, ("second", "optimizer2", "scaler", "average"), []),
        (World.step, (), []),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_changes_and_is_in_no_checkpoint_is_a_warning_once(
    step: Callable[[World, torch.Tensor], None],
    saved: tuple[str, ...],
    expected: list[str],
    wrapped: bool,
    tmp_path: Path,
) -> None:
    world = World()
    parts = {name: getattr(world, name) for name in saved}
    state = {"trainer": Trainer(**parts)} if wrapped else parts
    found = warnings_of(tmp_path, functools.partial(step, world), world.model, world.optimizer, **state)
    assert sorted(found) == sorted(expected)


def test_a_buffer_that_a_module_in_no_checkpoint_assigns_is_nothing_to_save(tmp_path: Path) -> None:
    world, other = World(), nn.BatchNorm1d(1)

    def step(inputs: torch.Tensor) -> None:
        world.step(inputs)
        other.running_mean = torch.ones(1)

    assert warnings_of(tmp_path, step, world.model, world.optimizer) == []


def test_a_loop_that_saves_nothing_does_not_look(tmp_path: Path) -> None:
    world = World()
    assert warnings_of(tmp_path, world.step_of_everything, world.model, world.optimizer, saves=False) == []


def test_a_loop_without_any_optimizer_or_model_says_so_once(tmp_path: Path) -> None:
    world = World()
    (line,) = warnings_of(tmp_path / "a", world.step, world.model, None)
    assert line.startswith("checkpoints will contain no optimizer")
    (line,) = created(tmp_path / "b", None, world.optimizer)
    assert line.startswith("checkpoints will contain no model")


def test_a_scaler_that_is_switched_off_has_no_state(tmp_path: Path) -> None:
    world = World()
    world.scaler = GradScaler("cpu", enabled=False)
    assert warnings_of(tmp_path, world.step_scaled, world.model, world.optimizer) == []


def test_an_average_that_is_updated_once_an_epoch_counts(tmp_path: Path) -> None:
    world = World()
    update = functools.partial(world.average.update_parameters, world.model)
    assert warnings_of(tmp_path, world.step, world.model, world.optimizer, after_epoch=update) == [AVERAGE]


def test_the_averaged_weights_alone_are_not_the_average(tmp_path: Path) -> None:
    world = World()  # without the number of updates, the next one copies the model
    found = warnings_of(tmp_path, world.step_averaged, world.model, world.optimizer, average=world.average.module)
    assert found == [AVERAGE]


def test_an_average_in_the_model_is_saved(tmp_path: Path) -> None:
    world = World()
    both = nn.ModuleDict({"model": world.model, "average": world.average})
    assert warnings_of(tmp_path, world.step_averaged, both, world.optimizer) == []


@pytest.mark.parametrize("has_state", [False, True])
def test_an_average_in_a_hook_is_saved_if_the_hook_has_a_state(has_state: bool, tmp_path: Path) -> None:
    world = World()

    class Averaging(SessionRunHook):
        def __init__(self) -> None:
            self.average = world.average

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            self.average.update_parameters(world.model)

    class Saving(Averaging):
        def state_dict(self) -> dict[str, Any]:
            return {"average": self.average.state_dict()}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.average.load_state_dict(state["average"])

    hook = Saving() if has_state else Averaging()
    assert warnings_of(tmp_path, world.step, world.model, world.optimizer, hook) == [AVERAGE] * (not has_state)


def test_what_a_hook_with_a_state_reaches_through_its_session_is_not_saved_by_that(tmp_path: Path) -> None:
    world = World()

    class Keeping(SessionRunHook):
        def after_create_session(self, session: Session, coord: Any) -> None:
            self.session, self.averaging = session, call

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            pass

    call = CallFnHook(Updating(world), every_n_steps=1)
    assert warnings_of(tmp_path, world.step, world.model, world.optimizer, Keeping(), call) == [AVERAGE]


def test_an_optimizer_whose_state_the_script_saves_itself_is_not_forgotten(tmp_path: Path) -> None:
    world = World()

    def step(inputs: torch.Tensor) -> None:
        world.step_of_both(inputs)
        torch.save(world.optimizer2.state_dict(), tmp_path / "second.pt")

    assert warnings_of(tmp_path, step, world.model, world.optimizer, second=world.second) == []


class SharpnessAware(torch.optim.Optimizer):
    """Steps with another optimizer, whose state it does not save, as a well-known SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base_optimizer = torch.optim.Adam(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    def second_step(self) -> None:
        self.base_optimizer.step()


class Averaged(torch.optim.Optimizer):
    """Steps with another optimizer, and shares its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner, self.state, self.param_groups = optimizer, optimizer.state, optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_the_optimizer_in_a_wrapper_that_does_not_save_it_is_forgotten(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = SharpnessAware(model.parameters())

    def step(inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.second_step()

    assert warnings_of(tmp_path, step, model, optimizer) == [OPTIMIZER]


def test_the_optimizer_in_a_wrapper_that_has_its_state_is_not(tmp_path: Path) -> None:
    world = World()
    optimizer = Averaged(world.optimizer)
    assert warnings_of(tmp_path, world.step, world.model, optimizer) == []


@pytest.mark.parametrize("kept", [False, True])
def test_an_optimizer_that_makes_its_steps_in_one_run_is_a_temporary_one(kept: bool, tmp_path: Path) -> None:
    world = World()
    optimizers: list[torch.optim.Optimizer] = []

    def evaluate(model: nn.Module) -> float:
        probe = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(probe.parameters(), 0.1)
        optimizers[:] = [optimizer] if kept else []
        with torch.enable_grad():
            for _ in range(3):
                probe(torch.ones(2)).sum().backward()
                optimizer.step()
        return 0.5

    evaluation = EvaluationHook(evaluate, every_n_steps=2)
    assert warnings_of(tmp_path, world.step, world.model, world.optimizer, evaluation) == []


def test_an_object_that_gets_the_id_of_another_is_another(tmp_path: Path) -> None:
    world = World()
    ids: set[int] = set()

    def step(inputs: torch.Tensor) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
        optimizer.step()
        ids.add(id(optimizer))
        world.step(inputs)

    assert warnings_of(tmp_path, step, world.model, world.optimizer) == []
    assert len(ids) < 15  # as many runs


def test_the_inner_steps_of_each_run_are_temporary_too(tmp_path: Path) -> None:
    world = World()
    kept: list[torch.optim.Optimizer] = []

    def step(inputs: torch.Tensor) -> None:
        fast = copy.deepcopy(world.model)
        optimizer = torch.optim.SGD(fast.parameters(), 0.1)
        for _ in range(2):
            fast(inputs).mean().backward()
            optimizer.step()
        kept[:] = [optimizer]
        world.step(inputs)

    assert warnings_of(tmp_path, step, world.model, world.optimizer) == []


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("stays_open", [False, True])
def test_the_optimizer_of_another_loop_is_not_forgotten(stays_open: bool, saves: bool, tmp_path: Path) -> None:
    world, other = World(), World()
    hooks = [CheckpointSaverHook(tmp_path / "other", every_n_steps=100)] if saves else []

    def open_loop() -> MonitoredLoop[None]:
        folder = tmp_path / "other" if saves else None
        return MonitoredLoop(other.step, other.model, other.optimizer, hooks=[*hooks], checkpoint_dir=folder)

    opened = [open_loop()] if stays_open else []

    def step(inputs: torch.Tensor) -> None:
        world.step(inputs)
        if opened:
            opened[0].run(inputs)
        else:
            with open_loop() as loop:
                loop.run(inputs)

    assert warnings_of(tmp_path / "run", step, world.model, world.optimizer) == []
    for loop in opened:
        loop.close()


def test_the_optimizer_of_a_loop_that_was_closed_meanwhile_is_forgotten(tmp_path: Path) -> None:
    world = World()
    other = MonitoredLoop(world.step, world.second, world.optimizer2)
    found = warnings_of(tmp_path, world.step_of_both, world.model, world.optimizer, CloseAtFirstRun(other))
    assert found == [OPTIMIZER_AND_MODEL]


class CloseAtFirstRun(SessionRunHook):
    def __init__(self, loop: MonitoredLoop[Any]) -> None:
        self.loop = loop

    def before_run(self, run_context: SessionRunContext) -> None:
        self.loop.close()


def test_nothing_of_torch_stays_changed_when_the_last_loop_is_closed(tmp_path: Path) -> None:
    world = World()
    changes = []
    for _ in range(2):  # another test may have dropped a loop without closing it
        hooks = [CheckpointSaverHook(tmp_path, save_steps=9)]
        with MonitoredLoop(world.step, world.model, world.optimizer, hooks=hooks, checkpoint_dir=tmp_path):
            opened = GradScaler.step, len(_global_optimizer_post_hooks), len(_global_buffer_registration_hooks)
        changes.append((opened[0] is not GradScaler.step, opened[1:]))
        assert not _global_optimizer_post_hooks
        assert not _global_buffer_registration_hooks
    assert changes == [(True, (1, 1))] * 2


COMPILED = """
import torch, torchhooks
from torch._dynamo.utils import counters
class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, inputs):
        self.calls = self.calls + 1
        return super().forward(inputs)
model, second = Model(), torch.nn.Linear(2, 2)
optimizers = [torch.optim.Adam(each.parameters()) for each in (model, second)]
compiled = torch.compile(model, backend="eager", fullgraph=True)
steps = torch.compile(lambda: [each.step() for each in optimizers], backend="eager")
def step(inputs):
    (compiled(inputs) + second(inputs)).sum().backward()
    steps()
hooks = [torchhooks.CheckpointSaverHook("run", every_n_steps=12)]
graphs = []
with torchhooks.MonitoredLoop(step, model, optimizers[0], hooks=hooks, checkpoint_dir="run") as loop:
    for inputs in loop.until_stop(list(torch.ones(30, 2))):
        loop.run(inputs)
        graphs.append(counters["stats"]["unique_graphs"])
assert graphs[4] == graphs[-1] > 0, graphs
"""


@pytest.mark.compile
def test_a_compiled_step_of_an_optimizer_is_noticed_and_compiled_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("an optimizer other than the loop's, of the class Adam, makes steps") == 1


# -- parameters --------------------------------------------------------------------------------------------------------

NONE = "trains no parameter of the model or of a module in state"


def created(folder: Path, model: nn.Module | None, optimizer: Any, saves: bool = True, **state: Any) -> list[str]:
    """Return the warnings of a loop that makes no run."""
    hooks = [CheckpointSaverHook(folder, save_steps=9)] if saves else []
    with log_lines() as lines:
        MonitoredLoop(
            float, model, optimizer, hooks=hooks, state=state, checkpoint_dir=folder if saves else None
        ).close()
    return [text for level, text in lines if level == "WARNING"]


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], 0.1)


def test_a_model_that_the_optimizer_does_not_train_is_a_warning(tmp_path: Path) -> None:
    model, trained = nn.Linear(2, 2), nn.Linear(2, 2)
    (line,) = created(tmp_path / "a", model, sgd(trained))
    assert line == (
        f"the optimizer {NONE}, so checkpoints will not contain what it trains. Pass the model that the step trains, "
        "and make the optimizer after the model is replaced by another, such as a copy"
    )
    assert created(tmp_path / "b", copy.deepcopy(trained), sgd(trained)) == [line]
    assert created(tmp_path / "c", model, sgd(trained), saves=False) == []
    assert created(tmp_path / "d", model, sgd(trained), trained=trained) == []
    assert created(tmp_path / "e", model, sgd(trained), trainer=Trainer(net=trained)) == []
    assert created(tmp_path / "f", nn.ModuleList([model, trained]), sgd(trained)) == []
    compiled: Any = torch.compile(trained, backend="eager")
    assert created(tmp_path / "g", compiled, sgd(trained)) == []
    assert created(tmp_path / "h", model, torch.optim.SGD([nn.Parameter(torch.ones(1))]), other=sgd(model)) == [line]


def test_a_frozen_backbone_and_a_frozen_model_are_not_such_cases(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    assert created(tmp_path / "a", model, sgd(model[1])) == []
    assert created(tmp_path / "b", model, sgd(model)) == []


def test_a_second_optimizer_is_named(tmp_path: Path) -> None:
    model, second = nn.Linear(2, 2), nn.Linear(2, 2)
    (line,) = created(tmp_path / "a", model, sgd(model), second=sgd(second))
    assert line.startswith(f"state['second'] {NONE}")
    assert created(tmp_path / "b", model, sgd(second), of_model=sgd(model), second=second) == []


def test_some_parameters_that_no_checkpoint_contains_are_a_warning(tmp_path: Path) -> None:
    model, criterion = nn.Linear(2, 2), nn.Linear(2, 1)
    assert created(tmp_path / "a", model, sgd(model, criterion)) == [
        "the optimizer trains 4 parameters, and checkpoints will not contain 2 of them: put the module of these into "
        "the model, or into state={...}"
    ]
    assert created(tmp_path / "b", model, sgd(model, criterion), criterion=criterion) == []
    assert created(tmp_path / "c", model, sgd(model, criterion), trainer=Trainer(criterion=criterion)) == []
    assert created(tmp_path / "d", model, sgd(model, criterion.requires_grad_(False))) == []


def test_a_parameter_of_no_module_is_saved_in_a_list_of_parameters(tmp_path: Path) -> None:
    model, temperature = nn.Linear(2, 2), nn.Parameter(torch.zeros(1))
    second = torch.optim.SGD([temperature], 0.1)
    (line,) = created(tmp_path / "a", model, sgd(model), second=second)
    assert NONE in line
    assert created(tmp_path / "b", model, sgd(model), second=second, temperature=nn.ParameterList([temperature])) == []


class Config:
    """Answers any name with another config, as some libraries of configs do, and mocks."""

    def __getattr__(self, name: str) -> Config:
        if name.startswith("__"):
            raise AttributeError(name)
        return Config()


def test_nothing_of_an_object_is_called(tmp_path: Path) -> None:
    model, trained = nn.Linear(2, 2), nn.Linear(2, 2)
    kept = Trainer(net=model)
    kept.state_dict = dict  # type: ignore[method-assign]
    vars(kept).update(config=Config(), mock=unittest.mock.MagicMock(), words={"a", "b"})
    (line,) = created(tmp_path, model, sgd(trained), kept=kept)
    assert NONE in line


def test_a_large_buffer_in_state_is_not_walked_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsaved, "_MOST_OBJECTS", 10)
    model, trained = nn.Linear(2, 2), nn.Linear(2, 2)
    kept = Trainer(buffer=[*range(100, 200)], parts={"inner": {"net": trained}})
    kept.state_dict = dict  # type: ignore[method-assign]
    assert created(tmp_path, model, sgd(trained), kept=kept) == []  # it may be there, so nothing is said
