"""Following values that are not finite through operators, without changing a bit."""

from __future__ import annotations

import _thread
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from support.dtensors import from_local, mesh_of_two
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchhooks import Session, Variables
from torchhooks.tools.autopsy.figures import Figures, is_finite, kind_of, not_finite
from torchhooks.tools.autopsy.operations import Operations
from torchhooks.tools.autopsy.watching import ModuleCall, Modules, named_state

NAN, INF = float("nan"), float("inf")


def called(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


@contextmanager
def watched(model: nn.Module | None = None, **named: torch.Tensor) -> Iterator[Operations]:
    @contextmanager
    def paused() -> Iterator[None]:
        operations.is_paused = True
        yield
        operations.is_paused = False

    modules = Modules(model, paused, called)
    operations = Operations(modules.path, lambda: False)
    modules.open([])
    operations.begin(0, 1, named.items(), ())
    with operations:
        yield operations
    modules.close()


class Checkpointed(nn.Sequential):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.use_reentrant)


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> Any:
        def energy(row: torch.Tensor) -> torch.Tensor:
            return (row @ self.weight).tanh().sum()

        return torch.func.vmap(torch.func.grad(energy))(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True, num_layers=2, dropout=0.3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.lstm(x[None])[0]


class Mixed(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "normed": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.LayerNorm(8)),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3), nn.MaxPool1d(2), nn.Flatten()),
    "recurrent": Recurrent,
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
    "functional": Mapped,
    "autocast": lambda: Mixed(8, 8),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
}


def bits(name: str, is_watched: bool) -> list[bytes]:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(6, 8)[None] if name == "attention" else torch.randn(6, 8)

        def step(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss

        if is_watched:
            with watched(model) as operations:
                step()
            assert operations._places  # noqa: SLF001 - it has seen them
            assert operations.unreadable == 0
            assert operations.found == []
        else:
            step()
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    return [tensor.numpy().tobytes() for tensor in tensors]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", MODELS)
def test_watching_changes_no_bits(name: str) -> None:
    assert bits(name, True) == bits(name, False)


def test_memory_that_was_never_written_has_no_origin() -> None:
    with watched() as operations:
        empty = torch.empty(3).fill_(NAN)  # as any memory may contain
        first = operations.origin_of(empty)
        fresh = torch.empty(3)
        fresh.copy_(torch.ones(3))
    assert first is not None
    assert first.operation == "aten.fill_.Scalar"
    assert operations.found == [first]
    assert operations.origin_of(fresh) is None


def test_an_origin_survives_views_and_changes_of_other_rows() -> None:
    with watched() as operations:
        x = torch.zeros(2, 3)
        x[0].div_(0)
        x[1].add_(1)
        origin = operations.origin_of(x.T.reshape(-1))
    assert origin is not None
    assert (origin.operation, origin.kind) == ("aten.div_.Tensor", "NaN")


def test_what_was_there_before_has_its_name() -> None:
    weight = torch.tensor([1.0, INF])
    with watched(weight=weight) as operations:
        product = weight * 2
        other = torch.tensor([NAN])  # made by no operator
        known, unknown = operations.origin_of(product - product), operations.origin_of(other * 2)
    assert known is not None
    assert unknown is not None
    assert (known.phase, known.tensor, known.kind) == ("before", "weight", "infinity")
    assert known.became_nan is not None
    assert known.became_nan.operation == "aten.sub.Tensor"
    assert (unknown.phase, unknown.tensor) == ("before", None)


def test_a_number_that_the_script_read_has_its_origin() -> None:
    with watched() as operations:
        torch.zeros(1).log().item()
    assert (origin := operations.read()) is not None
    assert origin.operation == "aten.log.default"


def test_a_closure_that_an_optimizer_calls_is_the_forward_pass() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([parameter], max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter - 2).log().sum()
        loss.backward()
        return loss

    with watched() as operations:
        optimizer.step(closure)
    assert [operations.found[0].phase, operations.found[0].operation] == ["forward", "aten.log.default"]


def test_an_optimizer_of_the_script_is_one() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.param_groups[0]["params"][0].div_(0)

    weight = nn.Parameter(torch.zeros(2))
    with watched(weight=weight) as operations:
        Own([weight]).step()
    (found,) = operations.found
    assert (found.phase, found.tensor, found.source and found.source.file) == ("optimizer", "weight", __file__)


def test_figures_are_those_of_the_finite_elements() -> None:
    values = torch.tensor([[1.0, -3.0], [NAN, INF]])
    assert Figures.of(values) == Figures([2, 2], "float32", None, -3.0, 1.0, 2.0, 0.5)
    assert Figures.of(torch.tensor([3, 4])) == Figures([2], "int64")
    assert Figures.of(torch.full((2,), NAN)) == Figures([2], "float32", not_finite=1.0)
    assert Figures.of(torch.tensor([3 + 4j])).max == 5.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2])
def test_every_dtype_can_be_looked_at(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 2.0]).to(dtype)
    assert is_finite(values)
    assert not is_finite(torch.tensor([1.0, NAN]).to(dtype))
    assert not_finite([("fine", values), ("bad", torch.tensor([1.0, INF]).to(dtype))]) == ["bad"]
    assert [kind_of(torch.tensor([NAN, INF])), kind_of(torch.tensor([1.0, INF]))] == ["NaN", "infinity"]


def test_code_that_was_typed_has_no_line() -> None:
    """As in ``python -c``, where no file has the code that runs."""
    typed: dict[str, Any] = {"torch": torch, "watched": watched, "found": queue.SimpleQueue()}
    code = """
def script():
    try:
        with watched() as operations:
            torch.zeros(1).log()
        found.put(operations.found)
    except BaseException as error:
        found.put(error)
"""
    exec(compile(code, "<string>", "exec"), typed)
    _thread.start_new_thread(typed["script"], ())  # a thread of threading has its files on the stack
    (origin,) = typed["found"].get(timeout=30)
    assert (origin.operation, origin.phase, origin.source) == ("aten.log.default", "forward", None)


def test_a_module_whose_call_raised_is_not_the_module_of_what_follows() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("not today")

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Fails(), nn.Identity()

        def forward(self, x: torch.Tensor) -> Any:
            try:
                return self.first(x)
            except ValueError:
                return self.second(x)

    model = nn.Sequential(Tries(), nn.Tanh())
    modules, calls = Modules(model, nullcontext, called), list[ModuleCall]()
    modules.open(calls)
    model(torch.ones(3))
    assert modules.path() is None
    assert [(call.path, len(call.inputs)) for call in calls] == [("0.second", 1), ("0", 1), ("1", 1), ("", 1)]
    modules.close()


def test_of_a_module_that_is_called_often_the_first_calls_are_kept() -> None:
    layer = nn.Identity()
    modules, calls = Modules(layer, nullcontext, called), list[ModuleCall]()
    modules.open(calls)
    for number in range(9):
        layer(torch.tensor([float(number)]))
    assert [call.outputs[0].max for call in calls] == [0.0, 1.0, 2.0, 3.0]
    modules.close()


def test_figures_of_a_sharded_tensor_are_of_the_part_of_this_rank() -> None:
    with mesh_of_two() as mesh:
        tensor = from_local(torch.tensor([[1.0, -3.0], [2.0, NAN]]), mesh)
        assert Figures.of(tensor) == Figures([4, 2], "float32", [2, 2], -3.0, 2.0, 2.0, 0.25)
        assert not_finite([("weight", tensor)]) == ["weight"]


def test_a_nan_comes_before_a_mask_of_infinities_that_it_meets() -> None:
    """The mask of an attention is there first, and is no cause: the NaN is."""
    mask = torch.full((4, 4), -INF).triu(1)
    with watched(mask=mask) as operations:
        scores = (torch.ones(4, 4) - 2).sqrt() + mask
        weights = scores.softmax(-1)
    origin = operations.origin_of((mask, weights))
    assert origin is not None
    assert (origin.operation, origin.kind, origin.became_nan) == ("aten.sqrt.default", "NaN", None)
    assert operations.first_alive() is origin


def test_a_mask_of_infinities_that_makes_the_nan_itself_is_the_cause() -> None:
    mask = torch.full((4, 4), -INF)
    with watched(mask=mask) as operations:
        weights = (torch.ones(4, 4) + mask).softmax(-1)
    origin = operations.origin_of(weights)
    assert origin is not None
    assert origin.became_nan is not None
    assert (origin.tensor, origin.became_nan.operation) == ("mask", "aten._softmax.default")


def test_a_value_that_no_operator_made_has_the_line_that_uses_it_first() -> None:
    with watched() as operations:
        rows = torch.ones(4)
        rows[2] = NAN
        total = rows.sum()
    origin = operations.origin_of(total)
    assert origin is not None
    assert (origin.phase, origin.source and origin.source.text) == ("before", "rows[2] = NAN")


def test_an_operator_of_the_backward_pass_has_the_line_of_its_own_forward() -> None:
    """What needs no gradient, a mask or a metric, makes no node, so autograd's count of nodes stays."""
    x = torch.zeros(2, requires_grad=True)
    with watched() as operations:
        root = x.sqrt()
        (x.detach() > 0).sum()
        root.backward(torch.zeros(2))
    (origin,) = operations.found
    assert (origin.phase, origin.node) == ("backward", "SqrtBackward0")
    assert origin.source is not None
    assert origin.source.text == "root = x.sqrt()"


def test_what_stays_from_step_to_step_has_names() -> None:
    model, other = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.Adam(other.parameters())
    other.weight.grad = torch.ones(1, 2)
    optimizer.step()
    variables = Variables(hidden=torch.zeros(3), scales=[torch.ones(1), 2], step=5)
    session = Session(model, state={"teacher": other, "optimizer": optimizer, "vars": variables})
    assert [name for name, _ in named_state(session)] == [
        "parameter weight",
        "teacher.weight",
        "optimizer: step of parameter 0",
        "optimizer: exp_avg of parameter 0",
        "optimizer: exp_avg_sq of parameter 0",
        "vars['hidden']",
        "vars['scales'][0]",
    ]
