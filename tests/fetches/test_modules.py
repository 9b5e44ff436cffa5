"""Looking up names runs no code of the model, so it changes nothing, and models made by TorchScript have names too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize

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

COMPUTED: dict[str, Callable[[nn.Linear], Any]] = {
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "cayley": functools.partial(parametrizations.orthogonal, orthogonal_map="cayley"),
    "householder": functools.partial(parametrizations.orthogonal, orthogonal_map="householder"),
    "two": lambda linear: parametrizations.spectral_norm(parametrizations.weight_norm(linear)),
    "spectral_norm of a hook": torch.nn.utils.spectral_norm,
    "pruned": lambda linear: torch.nn.utils.prune.l1_unstructured(linear, "weight", 0.5),
}


def trained(kind: str, fetches: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor, RecordingHook, nn.Module]:
    """Train for three runs that request ``fetches``; return the state, the random state, the hook and the model."""
    torch.manual_seed(0)
    model = nn.Sequential(COMPUTED[kind](nn.Linear(4, 4)), nn.Dropout())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.randn(3, 4)).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    hook = RecordingHook(fetches)
    with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
        for _ in range(3):
            loop.run()
    return model.state_dict(), torch.get_rng_state(), hook, model


@pytest.mark.parametrize("kind", COMPUTED)
def test_fetching_a_computed_parameter_does_not_change_the_training_run(kind: str) -> None:
    state, random_state, _, _ = trained(kind, "loss")
    looked_at, random_state_then, _, _ = trained(kind, ["loss", "0.weight", "0.weight.grad", lambda model: None])
    assert {name: value.tolist() for name, value in state.items()} == {
        name: value.tolist() for name, value in looked_at.items()
    }
    assert torch.equal(random_state, random_state_then)


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_computed_parameter_has_the_value_of_evaluation_mode(kind: str) -> None:
    _, _, hook, model = trained(kind, "0.weight")
    expected: Any = model.eval().get_submodule("0").weight
    assert torch.equal(hook.results[-1], expected)
    assert not hook.results[-1].requires_grad


def test_a_spectral_norm_of_a_vector() -> None:
    norm: Any = parametrizations.spectral_norm(nn.LayerNorm(3))
    assert torch.equal(fetched("weight", norm), norm.eval().weight)


def test_a_fetch_calls_no_hooks_on_a_parametrization() -> None:
    called: list[object] = []
    linear: Any = parametrizations.spectral_norm(nn.Linear(2, 2))
    linear.parametrizations.weight[0].register_forward_hook(lambda *args: called.append(args))
    linear.parametrizations.weight.register_forward_hook(lambda *args: called.append(args))
    fetched("weight", linear)
    assert called == []


class Noise(nn.Module):
    """A parametrization that draws random numbers."""

    def forward(self, original: torch.Tensor) -> torch.Tensor:
        return original + torch.randn_like(original)


def noisy(linear: nn.Linear | None = None) -> nn.Module:
    module = nn.Linear(2, 2) if linear is None else linear
    return nn.Sequential(parametrize.register_parametrization(module, "weight", Noise()))


@pytest.mark.parametrize("fetches", ["0.weight", lambda weight: weight])
def test_a_parameter_that_user_code_computes_is_refused_with_the_name_of_the_stored_one(fetches: Any) -> None:
    model = noisy()
    model = model if isinstance(fetches, str) else model.get_submodule("0")
    before = torch.get_rng_state()
    message = fetch_error(fetches, model)
    assert "weight', which Noise computes. A fetch runs no code of the model" in message
    assert "parametrizations.weight.original', which the model stores, or return the value from the step" in message
    assert torch.equal(torch.get_rng_state(), before)


def test_a_parameter_that_user_code_computes_from_one_of_torchs_is_refused() -> None:
    message = fetch_error("0.weight", noisy(parametrizations.weight_norm(nn.Linear(2, 2))))
    assert "which Noise computes" in message
    stored = "'0.parametrizations.weight.original0' and '0.parametrizations.weight.original1'"
    assert f"fetch {stored}, which the model stores" in message


def test_what_a_parametrization_stores_can_be_fetched() -> None:
    model: Any = noisy()
    name = "0.parametrizations.weight.original"
    assert torch.equal(fetched(name, model), model[0].parametrizations.weight.original)


def test_the_gradient_of_a_computed_parameter_is_none() -> None:
    assert fetched("0.weight.grad", noisy()) is None


# -- other code of the model ----------------------------------------------------------------------------------------


class Guarded(nn.Module):
    """Fails when anything but :class:`torch.nn.Module` reads from it by name."""

    armed = False

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1)
        self.register_buffer("mean", torch.zeros(1))
        self.plain = torch.ones(1)
        self.armed = True

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__") and object.__getattribute__(self, "armed"):
            raise AssertionError(f"read {name}")
        return super().__getattribute__(name)


class Unlisted(nn.Module):
    """Has a property, a cached one, a tensor of its class, and its own idea of the names of everything."""

    constant = torch.full((1,), 7.0)

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

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        self.reads.append("named_parameters")
        return super().named_parameters(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        self.reads.append("named_modules")
        return super().named_modules(*args, **kwargs)


def test_the_attributes_of_a_module_are_read_from_where_they_are_stored() -> None:
    model = nn.Sequential(Guarded())
    names = ["0.fc.weight", "0.fc.bias.grad", "0.mean", "0.plain"]
    hook = RecordingHook(names)
    with MonitoredLoop(lambda: None, model, hooks=[hook]) as loop:
        loop.run()
    assert [None if value is None else tuple(value.shape) for value in hook.results[0]] == [(1, 1), None, (1,), (1,)]


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


def test_a_tensor_of_the_class_can_be_fetched() -> None:
    assert fetched("constant", Unlisted()) == 7


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
    assert "is compiled by torch.jit, and compiled code calls no module hooks: return the value" in str(caught.value)


@torchscript
def test_a_traced_model_as_a_whole_can_be_watched() -> None:
    model, hook = SCRIPTED["trace"](), RecordingHook(":output")
    with MonitoredLoop(lambda: model(INPUTS), model, hooks=[hook]) as loop:
        out = loop.run()
    assert torch.equal(hook.results[0], out)
