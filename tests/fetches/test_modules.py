"""Looking up names runs no code of the model, so it changes nothing, and models made by TorchScript have names too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

from torchhooks import FetchError, MonitoredLoop
from torchhooks.testing import RecordingHook

torchscript = pytest.mark.filterwarnings("ignore:`?torch.jit:DeprecationWarning")


def fetched(fetches: Any, model: nn.Module) -> Any:
    with MonitoredLoop(lambda: None, model) as loop:
        return loop.session.run(fetches)


def fetch_error(fetches: Any, model: nn.Module) -> str:
    with pytest.raises(FetchError) as caught:
        fetched(fetches, model)
    return str(caught.value)


# -- computed parameters --------------------------------------------------------------------------------------------


def test_a_parameter_that_a_parametrization_computes_is_refused_with_the_stored_one_and_nothing_changes() -> None:
    model: Any = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = fetch_error("0.weight", model)
    assert "A parametrization computes it" in message
    assert "such as '0.parametrizations.weight.original', or return it from the step" in message
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    name = "0.parametrizations.weight.original"
    assert torch.equal(fetched(name, model), model[0].parametrizations.weight.original)


# -- other code of the model ----------------------------------------------------------------------------------------


class Unlisted(nn.Module):
    """Has a property, a cached one, and notes which attributes are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1)
        self.reads: list[str] = []

    @property
    def scale(self) -> torch.Tensor:
        self.reads.append("scale")
        return torch.ones(1)

    @functools.cached_property
    def cached(self) -> torch.Tensor:
        self.reads.append("cached")
        return torch.ones(1)

    def __getattr__(self, name: str) -> Any:
        vars(self)["reads"].append(name)
        return super().__getattr__(name)


@pytest.mark.parametrize(
    "name", ["inner.scale", "inner.cached", "inner.nothing", "inner.fc.wieght", "inner.nope:output"]
)
def test_a_lookup_that_fails_runs_no_code_of_the_model(name: str) -> None:
    model = nn.ModuleDict({"inner": Unlisted()})
    model.get_submodule("inner").reads.clear()  # type: ignore[operator, union-attr]
    hook = RecordingHook(name)
    with pytest.raises(FetchError), MonitoredLoop(lambda: None, model, hooks=[hook]) as loop:
        loop.run()
    assert vars(model["inner"])["reads"] == []


@pytest.mark.parametrize("name", ["scale", "cached"])
def test_the_error_for_a_property_names_the_closure_that_reads_it(name: str) -> None:
    message = fetch_error(f"inner.{name}", nn.ModuleDict({"inner": Unlisted()}))
    assert (
        f"It is a property, and a fetch runs no code of the model: fetch lambda model: model.inner.{name}." in message
    )


def test_an_error_lists_shared_modules_once() -> None:
    shared = nn.Linear(1, 1)
    assert "Available: global_step, 0.weight, 0.bias." in fetch_error("nothing", nn.Sequential(shared, shared))


def test_a_wrapper_for_activation_checkpointing_has_the_names_of_what_it_wraps() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(1, 1))))
    hook = RecordingHook(["0.0.weight", "0.0:output"])
    with MonitoredLoop(lambda: model(torch.ones(1, 1)), model, hooks=[hook]) as loop:
        loop.run()
    assert [value.shape for value in hook.results[0]] == [(1, 1), (1, 1)]
    assert "Available: global_step, 0.0.weight, 0.0.bias." in fetch_error("nothing", model)


# -- TorchScript ----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1)
        self.register_buffer("mean", torch.full((1,), 3.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(inputs)
        return out


INPUTS = torch.ones(2, 2)

SCRIPTED: dict[str, Callable[[], Any]] = {
    "script": lambda: torch.jit.script(Net()),
    "trace": lambda: torch.jit.trace(Net(), INPUTS),
}


@torchscript
@pytest.mark.parametrize("make", SCRIPTED.values(), ids=SCRIPTED)
def test_a_torchscript_model_has_the_names_of_the_original(make: Callable[[], Any]) -> None:
    model = make()
    model(INPUTS).sum().backward()
    values = fetched(["fc.weight", "mean", "fc.weight.grad"], model)
    assert torch.equal(values[0], model.fc.weight)
    assert torch.equal(values[1], model.mean)
    assert values[2].shape == (1, 2)


@torchscript
@pytest.mark.parametrize("make", SCRIPTED.values(), ids=SCRIPTED)
def test_a_torchscript_part_of_a_model_has_the_names_of_the_original(make: Callable[[], Any]) -> None:
    assert fetched("0.fc.bias", nn.Sequential(make())).shape == (1,)


@torchscript
@pytest.mark.parametrize("make", SCRIPTED.values(), ids=SCRIPTED)
def test_an_error_suggests_the_names_of_a_torchscript_model(make: Callable[[], Any]) -> None:
    assert "Did you mean 'fc.weight'?" in fetch_error("fc.wieght", make())


@torchscript
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (SCRIPTED["script"], ":output"),
        (SCRIPTED["script"], "fc:grad"),
        (SCRIPTED["trace"], "fc:input"),
        (lambda: nn.Sequential(SCRIPTED["script"]()), "0:input"),
        (lambda: nn.Sequential(SCRIPTED["script"]()), "0.fc:output"),
    ],
)
def test_a_torchscript_module_cannot_be_watched_and_the_error_says_why(make: Callable[[], Any], name: str) -> None:
    model, hook = make(), RecordingHook(name)
    with pytest.raises(FetchError) as caught, MonitoredLoop(lambda: None, model, hooks=[hook]) as loop:
        loop.run()
    assert str(caught.value).startswith(f"RecordingHook({name!r}) (hook 0) asked for {name!r}, but ")
    assert "is compiled" in str(caught.value)
