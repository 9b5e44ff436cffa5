"""The states of modules: under any order of wrappers, and of modules that decide for themselves what they load."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dtensors import mesh_of_one
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from torchhooks import (
    BestCheckpointHook,
    CheckpointError,
    CheckpointSaverHook,
    MonitoredLoop,
    Saver,
    Session,
    StopAtStepHook,
    load_weights,
)
from torchhooks.__main__ import main
from torchhooks.checkpoints.modules import bare_state, renamed
from torchhooks.testing import log_lines

# -- wrappers ----------------------------------------------------------------------------------------------------------

WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compile": torch.compile,
    "parallel": nn.DataParallel,
    "checkpoint": checkpoint_wrapper,
}
ORDERS = [order for size in range(len(WRAPPERS) + 1) for order in itertools.permutations(WRAPPERS, size)]


class Versioned(nn.Module):
    """Loads the state of an older version in another way, as torch's quantized layers do."""

    _version = 7

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(1))
        self.loaded_version: object = None

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *args: Any
    ) -> None:
        self.loaded_version = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *args)


def bare(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), Versioned(), Mean()))
    model[1][2].mean = torch.zeros(()) if value else None  # type: ignore[index]
    for tensor in model.state_dict().values():
        tensor.fill_(value)
    return model


def wrapped(model: nn.Module, order: Sequence[str]) -> nn.Module:
    for name in order:
        model = WRAPPERS[name](model)
    return model


def values(model: nn.Module) -> set[float]:
    return {number for tensor in model.state_dict().values() for number in tensor.unique().tolist()}


def save(model: nn.Module, folder: Path) -> str:
    return Saver().save(Session(model), folder / "model.ckpt", 1)


@pytest.mark.parametrize("order", ORDERS, ids=" of ".join)
def test_weights_are_loaded_under_any_order_of_wrappers(order: Sequence[str], tmp_path: Path) -> None:
    path = save(wrapped(bare(3), order), tmp_path)
    for other in ORDERS:
        for load in (load_weights, lambda path, model: Saver().restore(Session(model), path)):
            inner = bare(0)
            load(path, wrapped(inner, other))
            assert values(inner) == {3}, other
            assert inner[1][1].loaded_version == 7, other  # type: ignore[index]


@pytest.mark.parametrize("order", ORDERS, ids=" of ".join)
def test_weights_are_exported_with_the_names_of_the_bare_model(order: Sequence[str], tmp_path: Path) -> None:
    path, file = save(wrapped(bare(3), order), tmp_path), str(tmp_path / "weights.pt")
    assert main(["checkpoints", path, "--export", file]) == 0
    model = bare(0)
    model.load_state_dict(torch.load(file, weights_only=True))
    assert values(model) == {3}
    assert model[1][1].loaded_version == 7  # type: ignore[index]


def test_a_part_of_a_model_may_be_wrapped_too(tmp_path: Path) -> None:
    def model(value: float, order: Sequence[str]) -> nn.Module:
        return nn.ModuleDict({"encoder": wrapped(bare(value), order), "head": nn.Linear(1, 1)})

    for order, other in itertools.product(ORDERS, ORDERS):
        saved, loaded = model(3, order), model(0, other)
        nn.init.constant_(saved["head"].weight, 3)  # type: ignore[index]
        nn.init.constant_(saved["head"].bias, 3)  # type: ignore[index]
        loaded.load_state_dict(renamed(loaded, saved.state_dict()))
        assert values(loaded) == {3}, (order, other)


def test_a_real_distributed_model_that_is_compiled_is_loaded_without_both(tmp_path: Path) -> None:
    with mesh_of_one():
        path = save(WRAPPERS["compile"](nn.parallel.DistributedDataParallel(bare(3))), tmp_path)
    model = bare(0)
    load_weights(path, model)
    assert values(model) == {3}


def test_a_module_of_the_model_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 1)
            for tensor in self.parameters():
                nn.init.constant_(tensor, value)

    average = AveragedModel(nn.Linear(2, 2))
    for model in (Net(3), average):
        for order in ORDERS:
            state = bare_state(wrapped(model, order).state_dict())
            assert state.keys() == model.state_dict().keys(), order
    saved, fresh = Net(3), Net(0)
    load_weights(save(saved, tmp_path), fresh)
    assert values(fresh) == {3}


def test_names_that_would_become_the_same_are_left_alone() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.module = nn.Linear(1, 1)

    state = {"weight": torch.ones(1), "module.weight": torch.ones(1, 1), "other": torch.ones(1)}
    assert renamed(Net(), state) is state
    part = {"weight": torch.ones(1), "other": torch.ones(1)}
    assert renamed(Net(), part) is part
    with pytest.raises(RuntimeError, match="Missing key"):
        Net().load_state_dict(renamed(Net(), state))


# -- modules that decide for themselves --------------------------------------------------------------------------------


class Bank(nn.Module):
    """A memory that grows by one row in each pass."""

    bank: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.empty(0, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bank = torch.cat([self.bank, x.detach()[:1]])
        return x + self.bank.mean()

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.bank = torch.empty_like(state[f"{prefix}bank"])
        super()._load_from_state_dict(state, prefix, *args)


class Mean(nn.Module):
    """A moving mean that does not exist before the first pass."""

    mean: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = x.detach().mean()
        self.mean = new if self.mean is None else 0.9 * self.mean + 0.1 * new
        return x + self.mean

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}mean" in state:
            self.mean = torch.zeros(())
        super()._load_from_state_dict(state, prefix, *args)


class Renamed(nn.Module):
    """Loads the states of its first version, in which the layer had another name."""

    def __init__(self, name: str = "layer") -> None:
        super().__init__()
        self.add_module(name, nn.Linear(2, 2))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", "layer.")] = state.pop(key)
        super()._load_from_state_dict(state, prefix, *args)


def quantized() -> nn.Module:
    from torch.ao import quantization

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its deprecation
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        prepared: nn.Module = quantization.prepare_qat(model)
    return prepared


def train(model: nn.Module, folder: Path, last_step: int, async_save: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    optimizer = torch.optim.Adam([*model.parameters()] or [torch.zeros(1, requires_grad=True)], 0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        return loss

    hooks = [CheckpointSaverHook(every_n_steps=4, async_save=async_save), StopAtStepHook(last_step=last_step)]
    with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=folder) as loop:
        for _ in loop.until_stop(range(4)):
            for x in loop.until_stop([torch.full((3, 2), float(number)) for number in range(4)]):
                loop.run(x)
    return model.state_dict()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("make", [Bank, Mean, quantized, lambda: nn.Sequential(nn.Linear(2, 2), Bank(), Mean())])
def test_modules_that_size_their_buffers_are_resumed(
    make: Callable[[], nn.Module], async_save: bool, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    wanted = train(make(), tmp_path / "whole", 13, async_save)
    torch.manual_seed(1)
    train(make(), tmp_path / "parts", 6, async_save)
    model = make()
    got = train(model, tmp_path / "parts", 13, async_save)
    assert got.keys() == wanted.keys()
    for key in wanted:
        torch.testing.assert_close(got[key], wanted[key], rtol=0, atol=0, equal_nan=True)
    fresh = make()
    load_weights(tmp_path / "parts", fresh)
    assert str(fresh.state_dict()) == str(wanted)


def test_a_module_may_rename_what_its_submodules_load(tmp_path: Path) -> None:
    path = save(nn.Sequential(Renamed("old")), tmp_path)
    model = nn.Sequential(Renamed())
    load_weights(path, model)
    assert str([*model.state_dict().values()]) == str([*torch.load(f"{path}/state.pt")["model"].values()])


def test_a_module_that_decides_may_have_two_names(tmp_path: Path) -> None:
    def model(rows: int) -> nn.Module:
        bank = Bank()
        bank.bank = torch.ones(rows, 2)
        return nn.ModuleDict({"first": bank, "second": bank})

    fresh = model(0)
    load_weights(save(model(3), tmp_path), fresh)
    assert fresh["second"].bank.shape == (3, 2)  # type: ignore[index]


def test_a_wrapper_may_decide_for_what_it_wraps(tmp_path: Path) -> None:
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}module.bias"] = state.pop(f"{prefix}module.offset")

    class Wrapper(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.module = nn.Module()
            self.module.register_parameter(name, nn.Parameter(torch.ones(2)))

    path, model = save(Wrapper("offset"), tmp_path), Wrapper("bias")
    nn.Module.register_load_state_dict_pre_hook(model, rename)
    nn.init.zeros_(model.module.get_parameter("bias"))
    load_weights(path, model)
    assert model.module.get_parameter("bias").tolist() == [1.0, 1.0]


def test_the_other_submodules_are_compared_as_ever(tmp_path: Path) -> None:
    path = save(nn.ModuleDict({"bank": Bank(), "head": nn.Linear(2, 3), "norm": nn.BatchNorm1d(3)}), tmp_path)
    others = {
        "'head.weight' (4, 2) instead of (3, 2)": {"head": nn.Linear(2, 4), "norm": nn.BatchNorm1d(3)},
        "missing in the file: 'more.weight', 'more.bias'": {
            "head": nn.Linear(2, 3),
            "norm": nn.BatchNorm1d(3),
            "more": nn.Linear(1, 1),
        },
        "only in the file: 'head.bias'": {"head": nn.Linear(2, 3, bias=False), "norm": nn.BatchNorm1d(3)},
        "'norm.weight' (4,) instead of (3,)": {"head": nn.Linear(2, 3), "norm": nn.BatchNorm1d(4)},
        "of a dtype that cannot hold what is in the file: 'head.weight' torch.float16": {
            "head": nn.Linear(2, 3).half(),
            "norm": nn.BatchNorm1d(3),
        },
    }
    for text, layers in others.items():
        with pytest.raises(CheckpointError) as caught:
            load_weights(path, nn.ModuleDict({"bank": Bank(), **layers}))
        assert text in str(caught.value)


def test_a_layer_below_a_module_that_decides_has_to_have_its_shape(tmp_path: Path) -> None:
    class Wide(Renamed):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.layer = nn.Linear(size, size)

    path = save(Wide(2), tmp_path)
    with pytest.raises(CheckpointError, match=r"'layer.weight' \(3, 3\) instead of \(2, 2\)"):
        load_weights(path, Wide(3))
    with log_lines():
        load_weights(path, Wide(3), strict=False)


def test_what_a_deciding_module_does_not_take_is_an_error_of_torch(tmp_path: Path) -> None:
    path = save(Renamed("other"), tmp_path)
    with pytest.raises(RuntimeError, match="Missing key"):
        load_weights(path, Renamed())


# -- what is added after the loop was created --------------------------------------------------------------------------


def grow(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [*model[1].parameters()]})


def run(
    change: Callable[[nn.Sequential, torch.optim.Optimizer], object], folder: Path, model: nn.Sequential | None = None
) -> list[str]:
    """Return the warnings of a loop in whose fourth run the script calls ``change``."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) if model is None else model
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)

    def step() -> None:
        if loop.global_step == 3:
            change(model, optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with log_lines() as lines:
        hooks = [CheckpointSaverHook(every_n_steps=2), StopAtStepHook(last_step=8)]
        with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=folder) as loop:
            for _ in loop.until_stop(range(9)):
                loop.run()
    return [text for level, text in lines if level == "WARNING" and "trains 2 of" not in text]


def test_a_group_that_is_added_is_told_of_once(tmp_path: Path) -> None:
    assert run(grow, tmp_path) == [
        "optimizer has groups of [2, 2] parameters, and had [2] when the loop was created, so a script that is started "
        "again cannot resume from this checkpoint. Give the optimizer all groups before that, and unfreeze parameters "
        "with requires_grad_(True)"
    ]
    with pytest.raises(CheckpointError, match=r"has groups of \[2\] parameters, those in the file have \[2, 2\]"):
        run(grow, tmp_path)


def test_a_layer_that_is_added_or_replaced_is_told_of_once(tmp_path: Path) -> None:
    line = (
        "model has other parameters than when the loop was created: {}, so a script that is started again cannot "
        "resume from this checkpoint. Make it whole before that"
    )
    added = run(lambda model, _: model.append(nn.Linear(2, 1)), tmp_path / "added")
    assert added == [line.format("2.weight, 2.bias")]
    other = run(lambda model, _: model.__setitem__(1, nn.Linear(2, 3)), tmp_path / "other")
    assert other == [line.format("1.weight, 1.bias")]
    gone = run(lambda model, _: model.__delitem__(1), tmp_path / "gone")
    assert gone == [line.format("1.weight, 1.bias")]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_resumed_script_can_load_is_no_change(tmp_path: Path) -> None:
    def freeze(model: nn.Sequential, _: object) -> None:
        model.requires_grad_(False)
        model[0].requires_grad_(True)

    assert run(freeze, tmp_path / "frozen") == []
    assert run(lambda model, _: model.half().float(), tmp_path / "moved") == []
    assert run(lambda model, _: None, tmp_path / "bank", nn.Sequential(nn.Linear(2, 2), Bank())) == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_lazy_layer_gets_its_shape_in_the_first_run(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(1, 3)).sum()
        loss.backward()
        optimizer.step()
        return loss

    hooks = [BestCheckpointHook(metric="loss", mode="min", every_n_steps=1), StopAtStepHook(last_step=3)]
    with log_lines() as lines, MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for _ in loop.until_stop(range(9)):
            loop.run()
    assert [text for level, text in lines if level == "WARNING"] == []


def test_a_parameter_without_a_shape_in_any_module_is_no_error(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_parameter("weight", nn.UninitializedParameter())  # type: ignore[arg-type]
    hooks = [BestCheckpointHook(metric="loss", mode="min", every_n_steps=1)]
    with MonitoredLoop(lambda: 0.5, model, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        assert loop.global_step == 0
