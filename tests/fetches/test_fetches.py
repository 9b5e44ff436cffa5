"""Fetches: each kind, the order in which names are looked up, snapshots, and error messages."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchhooks import (
    FetchError,
    FinalOpsHook,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    NoRunYetError,
    Scaffold,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopIfHigherHook,
    SummarySaverHook,
    grad_norm,
    latest,
    over_ranks,
    param_norm,
    running_mean,
    summary,
)
from torchhooks.fetches.evaluation import ComposedFetch
from torchhooks.fetches.names import describe
from torchhooks.testing import RecordingHook, RecordingWriter, plain, trace


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.fc1(inputs))
        return out


class Wrapper(nn.Module):
    """Wraps a module as DistributedDataParallel and DataParallel do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Counted:
    """A closure that counts its calls."""

    def __init__(self, value: Any = 1.0) -> None:
        self.value, self.calls = value, 0

    def get(self) -> Any:
        self.calls += 1
        return self.value

    def __call__(self) -> Any:
        return self.get()


class Metric:
    """An object with the interface of a torchmetrics metric."""

    def __init__(self, value: Any = 0.75) -> None:
        self.value, self.calls = value, 0

    def compute(self) -> Any:
        self.calls += 1
        return self.value

    def __repr__(self) -> str:
        return "Metric()"


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Box:
    left: Any
    right: Any = "global_step"


@dataclasses.dataclass(frozen=True)
class FrozenBox:
    left: Any
    right: Any = "global_step"


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedBox:
    left: Any
    right: Any = "global_step"


class ModelOutput(OrderedDict[str, Any]):
    """A mapping with attributes, like those that the models of transformers return."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def sgd(*rates: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates])


def fetch(fetches: Any, outputs: Any = None, **loop_arguments: Any) -> Any:
    """Return the value of ``fetches`` in a run whose step returns ``outputs``."""
    hook = RecordingHook(fetches)
    with MonitoredLoop(lambda: outputs, hooks=[hook], **loop_arguments) as loop:
        loop.run()
    return hook.results[0]


def fetch_in(step: Callable[..., Any], fetches: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the value of ``fetches`` in a run of ``step(*args, **kwargs)``."""
    hook = RecordingHook(fetches)
    with MonitoredLoop(step, hooks=[hook]) as loop:
        loop.run(*args, **kwargs)
    return hook.results[0]


def fetch_error(fetches: Any, outputs: Any = None, **loop_arguments: Any) -> str:
    with pytest.raises(FetchError) as caught:
        fetch(fetches, outputs, **loop_arguments)
    return str(caught.value)


# -- values: one line each ------------------------------------------------------------------------------------------


class CallableMetric(Metric):
    def __call__(self) -> str:
        return "called"


class ModuleMetric(nn.Module):
    def compute(self) -> torch.Tensor:
        return torch.tensor(0.5)


@dataclasses.dataclass
class Ratio:
    hits: int
    total: int

    def compute(self) -> float:
        return self.hits / self.total


class AsksForGradients:
    def compute(self) -> bool:
        return torch.is_grad_enabled()


def computing(kind: type) -> Any:
    """Return an empty structure with the interface of a metric."""
    return type("Metrics", (kind,), {"compute": lambda self: 0.5})()


class Polar(Point):
    """A named tuple with a constructor of its own."""

    def __new__(cls) -> Polar:
        return super().__new__(cls, "loss", "global_step")


@dataclasses.dataclass
class Late:
    loss: float
    extra: float = dataclasses.field(init=False)


class Detached(nn.Module):
    @property
    def trainer(self) -> Any:
        raise RuntimeError("not attached to a trainer")


HALF, LOSS = summary.scalar("half", lambda loss: loss / 2), summary.scalar("loss", "loss")
ROW = torch.tensor([1.0, 2.0])
WEIGHT = nn.Parameter(torch.ones(1))
with torch.inference_mode():
    OF_INFERENCE = torch.ones(1)


def named(optimizer: torch.optim.Optimizer, *names: str) -> torch.optim.Optimizer:
    for group, name in zip(optimizer.param_groups, names, strict=True):
        group["name"] = name
    return optimizer


# What is asked for, what the step returned, the other arguments of the loop, and the value.
VALUES: list[tuple[str, Any, Any, dict[str, Any], Any]] = [
    ("nothing", None, 1, {}, None),
    ("a single tensor is the loss", "loss", ROW, {}, ROW),
    ("what max returns, by index", ["0", "1"], torch.tensor([3.0, 7.0]).max(0), {}, [7.0, 1]),
    ("a field beside one that was never set", "loss", Late(0.5), {}, 0.5),
    ("the outputs as a whole", lambda outputs: outputs, {"a": [1, {"deep": 2}]}, {}, {"a": [1, {"deep": 2}]}),
    ("a tensor of inference mode", "loss", OF_INFERENCE, {}, torch.ones(1)),
    ("a shape", lambda loss: loss.shape, torch.ones(2, 3), {}, torch.Size([2, 3])),
    ("the rate of one group", "lr", None, {"optimizer": sgd(0.1)}, 0.1),
    ("the rates of groups", "lr", None, {"optimizer": sgd(0.1, 0.2)}, [0.1, 0.2]),
    ("the rates of groups that agree", "lr", None, {"optimizer": sgd(0.1, 0.1)}, [0.1, 0.1]),
    ("a rate that is a tensor", "lr", None, {"optimizer": sgd(torch.tensor(0.5))}, torch.tensor(0.5)),
    ("rates that are tensors", "lr", None, {"optimizer": sgd(*ROW)}, [1.0, 2.0]),
    ("the rate of one group by its index", "lr/0", None, {"optimizer": sgd(0.3)}, 0.3),
    ("rates by their index", ["lr/0", "lr/1"], None, {"optimizer": sgd(0.1, 0.2)}, [0.1, 0.2]),
    ("a rate by its name", "lr/head", None, {"optimizer": named(sgd(0.1, 0.2), "body", "head")}, 0.2),
    ("a gradient that is not there", "fc1.weight.grad", None, {"model": Net()}, None),
    ("a default for a property that raises", lambda trainer="none": trainer, None, {"model": Detached()}, "none"),
    (
        "an output before the step and the rate",
        ["global_step", "lr"],
        {"global_step": 7, "lr": 8},
        {"optimizer": sgd(0.1)},
        [7, 8],
    ),
    ("an output before a gradient", "fc1.weight.grad", {"fc1.weight.grad": 2}, {"model": Net()}, 2),
    ("a closure, without gradients", lambda: (WEIGHT * 2).requires_grad, None, {}, False),
    ("compute()", Metric(), None, {}, 0.75),
    ("compute(), without gradients", AsksForGradients(), None, {}, False),
    ("compute() of what can be called", CallableMetric(), None, {}, 0.75),
    ("compute() of a module", ModuleMetric(), None, {}, torch.tensor(0.5)),
    ("compute() of a dict", computing(dict), None, {}, 0.5),
    ("compute() of a tuple", computing(tuple), None, {}, 0.5),
    ("compute() of a list", computing(list), None, {}, 0.5),
    ("compute() of a dataclass", Ratio(1, 2), None, {}, 0.5),
    ("a parameter", nn.Parameter(ROW), None, {}, ROW),
    ("a summary op, with the value of its fetch", HALF, 3, {}, (HALF, 1.5)),
    ("summary ops in a structure", {"all": [LOSS, "loss"]}, 3, {}, {"all": [(LOSS, 3), 3]}),
    ("a mapping that is not a plain one", defaultdict(list, a="loss"), 3, {}, {"a": 3}),
    ("a named tuple with a constructor", Polar(), 3, {}, (3, 1)),
]


@pytest.mark.parametrize(
    ("fetches", "outputs", "arguments", "value"), [row[1:] for row in VALUES], ids=[row[0] for row in VALUES]
)
def test_fetches(fetches: Any, outputs: Any, arguments: dict[str, Any], value: Any) -> None:
    result = fetch(fetches, outputs, **arguments)
    assert plain(result) == plain(value)
    assert isinstance(result, type(value))
    assert not isinstance(result, defaultdict)


# -- what a step returns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [0.5, 3, True, np.float32(0.5), np.array(0.5), 1 + 2j])
def test_a_single_number_is_the_loss(loss: Any) -> None:
    assert fetch("loss", loss) == loss


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        ({"left": 1, "right": 2}, ["right", "left"]),
        (OrderedDict(left=1, right=2), ["right", "left"]),
        (ModelOutput(left=1, right=2), ["right", "left"]),
        (Box(1, 2), ["right", "left"]),
        (FrozenBox(1, 2), ["right", "left"]),
        (SlottedBox(1, 2), ["right", "left"]),
        (Point(1, 2), ["y", "x"]),
        ((1, 2), ["1", "0"]),
        ([1, 2], ["1", "0"]),
    ],
    ids=repr,
)
def test_the_fields_or_the_indices_of_what_the_step_returned_are_names(outputs: Any, names: list[str]) -> None:
    assert fetch(names, outputs) == [2, 1]


# -- step and learning rate -----------------------------------------------------------------------------------------


def test_global_step_counts_this_run() -> None:
    hook = RecordingHook("global_step")
    with MonitoredLoop(int, hooks=[hook]) as loop:
        loop.run()
        loop.run()
    assert hook.results == [1, 2]


def test_lr_keeps_its_type_when_the_rates_of_the_groups_meet() -> None:
    optimizer, hook = sgd(0.2, 0.1), RecordingHook("lr")

    def step() -> None:
        optimizer.param_groups[0]["lr"] = 0.1

    with MonitoredLoop(step, optimizer=optimizer, hooks=[hook]) as loop:
        before = loop.session.run("lr")
        loop.run()
    assert [before, *hook.results] == [[0.2, 0.1], [0.1, 0.1]]


def test_lr_does_not_read_rates_on_a_device() -> None:
    # Reading a value of a meta tensor is an error; reading one of a CUDA tensor would block the host.
    optimizer = sgd(torch.tensor(0.5, device="meta"), torch.tensor(0.5, device="meta"))
    with MonitoredLoop(int, optimizer=optimizer) as loop:
        assert [rate.device.type for rate in loop.session.run("lr")] == ["meta", "meta"]


# -- the model ------------------------------------------------------------------------------------------------------


LINEAR, NET = nn.Linear(2, 1), Net()


@pytest.mark.parametrize(
    ("model", "name", "tensor"),
    [
        (NET, "fc1.weight", NET.fc1.weight),
        (NET, "norm.running_var", torch.ones(3)),
        (LINEAR, "weight", LINEAR.weight),
        (nn.ParameterDict({"grad": torch.ones(2)}), "grad", torch.ones(2)),
        (nn.Sequential(nn.ReLU(), LINEAR), "1.bias", LINEAR.bias),
        (Wrapper(NET), "fc1.weight", NET.fc1.weight),
        (Wrapper(NET), "module.fc1.bias", NET.fc1.bias),
    ],
    ids=["parameter", "buffer", "linear", "dictionary", "sequence", "wrapped", "wrapped by its own name"],
)
def test_a_parameter_or_a_buffer_by_name_is_a_plain_tensor_without_graph(
    model: nn.Module, name: str, tensor: torch.Tensor
) -> None:
    value = fetch(name, model=model)
    assert (type(value), value.requires_grad) == (torch.Tensor, False)
    assert torch.equal(value, tensor)


def test_a_gradient_by_name() -> None:
    model = nn.Linear(2, 1)

    def step() -> None:
        model(torch.tensor([[3.0, 4.0]])).sum().backward()

    hook = RecordingHook("weight.grad")
    with MonitoredLoop(step, model, hooks=[hook]) as loop:
        loop.run()
    assert torch.equal(hook.results[0], torch.tensor([[3.0, 4.0]]))


# -- the run's inputs and feeds -------------------------------------------------------------------------------------


def any_keyword(**batch: Any) -> None: ...


@pytest.mark.parametrize(
    ("step", "names", "args", "kwargs", "values"),
    [
        (lambda images, labels: None, ["labels", "images"], [1], {"labels": 2}, [2, 1]),
        (lambda images, scale=3: None, ["scale"], [1], {}, [3]),
        (any_keyword, ["b", "a"], [], {"a": 1, "b": 2}, [2, 1]),
        (lambda *batch: None, ["batch"], [1, 2], {}, [(1, 2)]),
        (max, ["key"], [3, -4], {"key": abs}, [abs]),
    ],
    ids=["by name", "default", "any keyword", "any number", "without a signature"],
)
def test_inputs_by_parameter_name(step: Any, names: Any, args: Any, kwargs: Any, values: Any) -> None:
    assert fetch_in(step, names, *args, **kwargs) == values


def test_inputs_of_a_step_whose_decorator_takes_more_than_its_signature_shows() -> None:
    def inner(batch: int) -> int:
        return batch

    @functools.wraps(inner)
    def step(device: str, batch: int, *, verbose: bool) -> int:
        return inner(batch)

    assert fetch_in(step, ["loss", "verbose"], "cpu", 7, verbose=True) == [7, True]


def test_what_another_hook_feeds_has_its_name() -> None:
    hook = RecordingHook("scale")
    with MonitoredLoop(lambda scale: None, hooks=[hook, RecordingHook(feed_dict={"scale": 5})]) as loop:
        loop.run()
    assert hook.results == [5]


# -- closures -------------------------------------------------------------------------------------------------------


class Scoring:
    def score(self) -> float:
        return 0.5


@pytest.mark.parametrize("function", [Scoring.score, Scoring().score], ids=["function", "bound method"])
def test_a_closure_is_described_by_its_name_and_the_name_of_its_file(function: Callable[..., Any]) -> None:
    line = Scoring.score.__code__.co_firstlineno
    assert describe(function) == f"Scoring.score (test_fetches.py:{line})"


def test_the_log_line_of_a_hook_names_no_folder_of_a_closure() -> None:
    stopped = trace(StopIfHigherHook(Scoring().score, 0.1), losses=[0.5])
    line = Scoring.score.__code__.co_firstlineno
    (text,) = [text for _, text in stopped.lines]
    assert f'"Scoring.score (test_fetches.py:{line})"' in text


def test_a_closure_gets_model_optimizer_session_and_outputs() -> None:
    model, optimizer = Net(), sgd(0.1)

    def closure(model: Any, optimizer: Any, session: Any, outputs: Any) -> list[str]:
        return [type(value).__name__ for value in (model, optimizer, session, outputs)]

    assert fetch(closure, "text", model=model, optimizer=optimizer) == ["Net", "SGD", "Session", "str"]


def test_an_unbound_and_a_bound_function_keep_their_own_parameters() -> None:
    class Scale:
        def by(self: Any, loss: int) -> Any:
            return self, loss

    scale = Scale()
    unbound = fetch(Scale.by, {"self": 1, "loss": 3})
    assert (unbound, fetch(scale.by, 3)[1]) == ((1, 3), 3)


class Scale:
    def by(self, loss: int) -> int:
        return loss * 2


@dataclasses.dataclass
class Above:
    threshold: float

    def __call__(self, loss: float) -> bool:
        return loss > self.threshold


def keyword_only(*, loss: int, scale: int = 10) -> int:
    return loss * scale


def positional_only(loss: int, /) -> int:
    return loss


def variadic(loss: int, *args: Any, **kwargs: Any) -> Any:
    return loss, args, kwargs


def doubled(function: Callable[..., int]) -> Callable[..., int]:
    return functools.wraps(function)(lambda *args: 2 * function(*args))


CLOSURES: dict[str, tuple[Any, Any, Any]] = {
    "parameters are names": (lambda logits, target: logits - target, {"logits": 5, "target": 3}, 2),
    "without parameters": (lambda: 7, None, 7),
    "the session evaluates fetches": (lambda session: session.run("loss") * 2, 3, 6),
    "a default is kept if its name does not exist": (lambda loss, scale=10: loss * scale, 3, 30),
    "a name that exists wins over a default": (lambda loss=10: loss, 3, 3),
    "keyword-only parameters are names": (keyword_only, 3, 30),
    "positional-only parameters are names": (positional_only, 3, 3),
    "variadic parameters are left empty": (variadic, {"loss": 3, "args": 4, "kwargs": 5}, (3, (), {})),
    "a bound method": (Scale().by, 3, 6),
    "a callable object": (Counted(4), None, 4),
    "a callable dataclass": (Above(0.5), 0.75, True),
    "a partial": (functools.partial(lambda scale, loss: scale * loss, 4), 3, 12),
    "a keyword argument of a partial is not a name": (
        functools.partial(lambda loss, scale: scale * loss, scale=4),
        {"loss": 3, "scale": 100},
        12,
    ),
    "a builtin": (math.sqrt, {"x": 9.0}, 3.0),
    "a builtin without a signature is called without arguments": (dict, None, {}),
    "what is decorated has the names": (doubled(lambda loss: loss), 3, 6),
    "a module has the names of its forward": (
        nn.MSELoss(),
        {"input": torch.tensor([1.0, 2.0]), "target": torch.tensor([1.0, 4.0])},
        2.0,
    ),
}


@pytest.mark.parametrize(("closure", "outputs", "value"), CLOSURES.values(), ids=CLOSURES)
def test_what_can_be_called_is_a_closure_whose_parameters_are_names(closure: Any, outputs: Any, value: Any) -> None:
    assert fetch(closure, outputs) == value


def test_a_class_as_a_closure_is_called() -> None:
    assert fetch(Counted, {"value": 8}).value == 8


def test_a_closure_gets_live_values() -> None:
    loss = torch.tensor(1.0)
    seen: list[torch.Tensor] = []
    fetch(lambda loss: seen.append(loss), loss)
    assert seen[0] is loss


# -- once a run -----------------------------------------------------------------------------------------------------


def run_with(*fetches: Any, runs: int = 1) -> None:
    with MonitoredLoop(int, hooks=[RecordingHook(each) for each in fetches]) as loop:
        for _ in range(runs):
            loop.run()


class Unhashable(Counted):
    __hash__ = None  # type: ignore[assignment]


partial = functools.partial

# What is asked for, what each hook asks for, the number of runs, and how often it is called.
CALLED: list[tuple[str, Callable[[], Any], Callable[[Any], list[Any]], int, int]] = [
    ("by two hooks", Counted, lambda closure: [closure.__call__, closure.__call__], 1, 1),
    ("by one hook twice", Counted, lambda closure: [[closure, {"again": closure}]], 1, 1),
    ("bound methods that are equal", Counted, lambda counted: [counted.get, counted.get], 1, 1),
    ("without a hash", Unhashable, lambda closure: [closure, closure], 1, 1),
    ("one partial", Counted, lambda counted: [partial(counted.get)] * 2, 1, 1),
    ("equal partials", Counted, lambda counted: [partial(counted.get), partial(counted.get)], 1, 2),
    ("in two runs", Counted, lambda closure: [closure], 2, 2),
    ("with the value None", lambda: Counted(None), lambda closure: [closure, closure], 1, 1),
    ("an object with compute()", Metric, lambda metric: [metric, [metric]], 1, 1),
]


@pytest.mark.parametrize(("make", "asks", "runs", "calls"), [row[1:] for row in CALLED], ids=[row[0] for row in CALLED])
def test_a_closure_is_called(make: Callable[[], Any], asks: Callable[[Any], list[Any]], runs: int, calls: int) -> None:
    closure = make()
    run_with(*asks(closure), runs=runs)
    assert closure.calls == calls


def test_methods_of_two_objects_are_two_closures() -> None:
    one, other = Counted(), Counted()
    run_with(one.get, other.get)
    assert (one.calls, other.calls) == (1, 1)


class Reads(Mapping[str, Any]):
    """Outputs that record which of them were read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.read.append(name)
        return torch.ones(1)

    def __iter__(self) -> Iterator[str]:
        return iter(["loss", "accuracy"])

    def __len__(self) -> int:
        return 2

    def __contains__(self, name: object) -> bool:
        return name in list(self)


def test_a_name_that_two_hooks_ask_for_is_evaluated_once_and_the_others_never() -> None:
    outputs = Reads()
    with MonitoredLoop(lambda: outputs, hooks=[RecordingHook("loss"), RecordingHook(["loss"])]) as loop:
        loop.run()
    assert outputs.read == ["loss"]


def test_nothing_is_evaluated_for_a_hook_that_did_not_ask_in_this_run() -> None:
    closure = Counted()

    class EverySecond(RecordingHook):
        def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
            return SessionRunArgs(closure) if run_context.session.global_step % 2 else None

    with MonitoredLoop(int, hooks=[EverySecond()]) as loop:
        for _ in range(4):
            loop.run()
    assert closure.calls == 2


def test_temporary_objects_are_not_mistaken_for_one_another() -> None:
    class Fresh(ComposedFetch):
        def __init__(self, value: int) -> None:
            self.value = value

        @property
        def fetch(self) -> Any:
            return Metric(self.value)

        def compose(self, value: Any) -> Any:
            return value

    assert fetch([Fresh(number) for number in range(9)]) == list(range(9))


# -- compute(), tensors, summary ops ------------------------------------------------------------------------------


def test_a_tensor_is_its_value_after_the_run() -> None:
    total = torch.zeros(())
    hook = RecordingHook(total)
    with MonitoredLoop(lambda: total.add_(1), hooks=[hook]) as loop:
        loop.run()
        loop.run()
    assert plain(hook.results) == [1.0, 2.0]


def test_an_error_in_a_summary_op_names_the_hook() -> None:
    with pytest.raises(ValueError, match="2 elements") as caught:
        fetch(summary.scalar("loss", "loss"), torch.ones(2))
    assert "RecordingHook(scalar('loss', 'loss')) (hook 0) asked for" in caught.value.__notes__[0]


# -- structures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fetches", "values"),
    [
        (["loss"], [3]),
        ((), ()),
        (("loss", "global_step"), (3, 1)),
        ({"a": "loss", 2: "global_step"}, {"a": 3, 2: 1}),
        (OrderedDict(b="loss", a="global_step"), OrderedDict(b=3, a=1)),
        (Point("loss", ["global_step"]), Point(3, [1])),
        (Box("loss"), Box(3, 1)),
        (FrozenBox("loss"), FrozenBox(3, 1)),
        (SlottedBox("loss"), SlottedBox(3, 1)),
        ([{"a": ("loss", [Box("loss", Point("loss", "loss"))])}], [{"a": (3, [Box(3, Point(3, 3))])}]),
    ],
    ids=repr,
)
def test_results_have_the_structure_of_the_fetches(fetches: Any, values: Any) -> None:
    results = fetch(fetches, 3)
    assert (type(results), results) == (type(values), values)


def test_the_fetches_themselves_are_not_changed() -> None:
    box = Box(["loss"])
    fetch(box, 3)
    assert box == Box(["loss"], "global_step")


names = st.text("ab ", max_size=3)
leaves = st.sampled_from(["loss", "global_step"]) | st.integers().map(lambda value: Counted(value))
structures = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(names | st.integers(), inner, max_size=3),
        st.dictionaries(names, inner, max_size=3).map(OrderedDict),
        st.builds(Point, inner, inner),
        st.builds(Box, inner, inner),
        st.builds(FrozenBox, inner, inner),
    ),
    max_leaves=12,
)


def expected(fetches: Any) -> Any:
    """Return what ``fetches`` should give if the loss is 3 and the step 1, without the library."""
    if isinstance(fetches, str):
        return {"loss": 3, "global_step": 1}[fetches]
    if isinstance(fetches, Counted):
        return fetches.value
    if isinstance(fetches, dict):
        return type(fetches)((key, expected(item)) for key, item in fetches.items())
    if isinstance(fetches, (Box, FrozenBox)):
        return type(fetches)(expected(fetches.left), expected(fetches.right))
    if isinstance(fetches, Point):
        return Point(expected(fetches.x), expected(fetches.y))
    return type(fetches)(expected(item) for item in fetches)


def kinds(tree: Any) -> Any:
    """Return the types in a structure, which ``==`` does not compare."""
    if isinstance(tree, dict):
        return type(tree), [kinds(item) for item in tree.values()]
    if isinstance(tree, (list, tuple)):
        return type(tree), [kinds(item) for item in tree]
    return (type(tree), kinds(tree.left), kinds(tree.right)) if isinstance(tree, (Box, FrozenBox)) else None


@given(structures)
def test_any_structure_is_returned_with_the_right_values(fetches: Any) -> None:
    results, wanted = fetch(fetches, 3), expected(fetches)
    assert (results, kinds(results)) == (wanted, kinds(wanted))


@given(st.lists(structures, max_size=3))
def test_a_closure_in_any_structure_is_called_once(fetches: list[Any]) -> None:
    closure = Counted()
    run_with(*[[closure, each] for each in fetches])
    assert closure.calls == min(len(fetches), 1)


# -- which name wins ------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """A model whose buffers have the names of everything else."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("fed", "out", "global_step", "lr", "own", "model"):
            self.register_buffer(name, torch.tensor(4.0))


def fetch_with_all(fetches: Any) -> Any:
    """Fetch in a run in which feeds are 1, outputs 2, the learning rate 3, the model's buffers 4 and the inputs 5."""
    hook = RecordingHook(fetches)

    def step(fed: float, **inputs: float) -> dict[str, float]:
        return {"fed": 2.0, "out": 2.0}

    inputs = dict.fromkeys(["out", "global_step", "lr", "own", "mine", "outputs"], 5.0)
    feeding = RecordingHook(feed_dict={"fed": 1.0})
    with MonitoredLoop(step, Everything(), sgd(3.0), hooks=[hook, feeding]) as loop:
        loop.run(**inputs)
    return hook.results[0]


ORDER = [
    ("fed", lambda fed: fed, 1),
    ("out", lambda out: out, 2),
    ("lr", lambda lr: lr, 3),
    ("own", lambda own: own, 4),
    ("model", lambda model: model, 4),
    ("mine", lambda mine: mine, 5),
    ("outputs", lambda outputs: outputs, 5),
    ("global_step", lambda global_step: global_step, 1),
]


@pytest.mark.parametrize(("name", "closure", "value"), ORDER, ids=[name for name, _, _ in ORDER])
def test_feeds_win_over_outputs_over_step_and_rate_over_the_model_over_inputs(
    name: str, closure: Callable[..., Any], value: float
) -> None:
    assert fetch_with_all([name, closure]) == [value, value]


def test_a_measured_speed_wins_over_an_argument_of_the_same_name_where_it_is_measured() -> None:
    for counters, expected in (([], 5.0), ([StepCounterHook(log=False)], math.nan)):
        hook = RecordingHook("data_secs")
        with MonitoredLoop(lambda data_secs: None, hooks=[*counters, hook]) as loop:
            loop.run(5.0)
        assert hook.results == pytest.approx([expected], nan_ok=True)


# -- snapshots ------------------------------------------------------------------------------------------------------


def test_a_parameter_keeps_the_value_of_its_run() -> None:
    model = nn.Linear(1, 1)
    hook = RecordingHook("weight")

    def step(value: float) -> None:
        model.weight.data.fill_(value)

    with MonitoredLoop(step, model, hooks=[hook]) as loop:
        for value in (5.0, 6.0):
            loop.run(value)
    assert plain(hook.results) == [[[5.0]], [[6.0]]]


@pytest.mark.parametrize("fetches", ["loss", ["loss"], lambda loss: loss, lambda outputs: {"nested": [outputs]}])
def test_an_output_that_is_updated_in_place_keeps_the_value_of_its_run(fetches: Any) -> None:
    total = torch.zeros(())
    hook = RecordingHook(fetches)
    with MonitoredLoop(lambda: total.add_(1), hooks=[hook]) as loop:
        loop.run()
        first = plain(hook.results[0])
        loop.run()
    assert plain(hook.results[0]) == first


def test_snapshots_are_detached() -> None:
    weight = nn.Parameter(torch.ones(1))
    assert not fetch("loss", weight * 2).requires_grad


def test_what_compute_returns_is_copied() -> None:
    metric = Metric(torch.zeros(1))
    value = fetch(metric)
    metric.value += 1
    assert value == 0


class Tensors(list[torch.Tensor]):
    pass


pack = nn.utils.rnn.pack_sequence

# What a closure returns of something, how that is changed afterwards, and what the fetch still is.
COPIED: list[tuple[str, Any, Callable[[Any], Any], Callable[[Any], object], Any]] = [
    ("an array", np.zeros(2), lambda array: array, lambda array: array.fill(1), [0, 0]),
    ("an array in a list", np.zeros(2), lambda array: [array], lambda array: array.fill(1), [[0, 0]]),
    ("an array in a dict", np.zeros(2), lambda array: {"a": (array,)}, lambda array: array.fill(1), {"a": ([0, 0],)}),
    ("an array in a named tuple", np.zeros(2), lambda a: Point(a, 1), lambda array: array.fill(1), Point([0, 0], 1)),
    ("what max returns", torch.tensor([[3.0]]).max(1), lambda pair: pair, lambda pair: pair.values.add_(1), ([3], [0])),
    (
        "a list of a class of its own",
        Tensors([torch.zeros(1)]),
        lambda tensors: tensors,
        lambda tensors: tensors[0].add_(1),
        [[0]],
    ),
    ("a packed sequence", pack([torch.zeros(2)]), lambda packed: packed, lambda packed: packed.data.add_(1), [0, 0]),
]


@pytest.mark.parametrize(
    ("source", "closure", "change", "was"), [row[1:] for row in COPIED], ids=[row[0] for row in COPIED]
)
def test_what_a_closure_returned_is_a_copy(
    source: Any, closure: Callable[[Any], Any], change: Callable[[Any], object], was: Any
) -> None:
    value = fetch(lambda: closure(source))
    assert type(value) in (type(closure(source)), list)
    change(source)
    assert plain(value.data if isinstance(value, nn.utils.rnn.PackedSequence) else value) == was


# -- errors ---------------------------------------------------------------------------------------------------------


def test_the_error_for_an_unknown_name_lists_the_inputs_too() -> None:
    with pytest.raises(FetchError, match="Available: global_step, images, labels"):
        fetch_in(lambda images, labels: None, "?", 1, 2)


def without(optimizer: torch.optim.Optimizer, what: str) -> torch.optim.Optimizer:
    if what == "groups":
        optimizer.param_groups.clear()
    else:
        del optimizer.param_groups[0][what]
    return optimizer


def accuracy(logit: Any) -> None: ...


# What is asked for, what the step returned, the other arguments of the loop, and what the error says.
UNKNOWN: list[tuple[str, Any, Any, dict[str, Any], str]] = [
    ("names the hook", "los", 1, {}, r"^RecordingHook\('los'\) \(hook 0\) asked for 'los', which does not exist"),
    ("a similar name", "los", 1, {}, r"Did you mean 'loss'\?"),
    ("a similar group", "lr/2", None, {"optimizer": sgd(0.1, 0.2)}, r"'lr/1' or 'lr/0' or 'lr'\?"),
    (
        "the available names",
        "?",
        {"logits": 1},
        {"model": nn.Linear(1, 1), "optimizer": sgd(0.1)},
        r"Available: logits, global_step, lr, weight, bias\.$",
    ),
    ("some of many names", "?", dict.fromkeys(map(str, range(50))), {}, r"22, 23 and 27 more\.$"),
    (
        "a parameter of a closure",
        accuracy,
        {"logits": 1},
        {},
        r"accuracy \(test_fetches\.py:\d+\).*parameter 'logit' is .* Did you mean 'logits'\?",
    ),
    ("None", "loss", None, {}, "'loss'"),
    ("a text", "loss", "text", {}, "'loss'"),
    ("an object", "loss", object(), {}, "'loss'"),
    ("a set", "loss", {1, 2}, {}, "'loss'"),
    ("a dataclass, not an instance", "loss", Box, {}, "'loss'"),
    ("a rate without an optimizer", "lr", None, {}, "'lr'"),
    ("a rate without a group", "lr", None, {"optimizer": without(sgd(0.1), "groups")}, "'lr'"),
    ("a rate of a group without one", "lr", None, {"optimizer": without(sgd(0.1), "lr")}, "'lr'"),
    ("a gradient of nothing", "fc9.weight.grad", None, {"model": Net()}, r"'fc9\.weight\.grad'"),
    ("a submodule", "fc1", None, {"model": Net()}, "'fc1'"),
]


@pytest.mark.parametrize(
    ("fetches", "outputs", "arguments", "words"), [row[1:] for row in UNKNOWN], ids=[row[0] for row in UNKNOWN]
)
def test_the_error_for_a_name_that_does_not_exist(
    fetches: Any, outputs: Any, arguments: dict[str, Any], words: str
) -> None:
    message = fetch_error(fetches, outputs, **arguments)
    assert re.search(words, message)
    assert "does not exist" in message or "not an available name" in message


@pytest.mark.parametrize("bad", [None, 3, 0.5, {1}, b"loss", np.zeros(2), object(), [None], {"a": 1}])
def test_the_error_for_something_that_is_not_a_fetch_says_what_is(bad: Any) -> None:
    with pytest.raises(FetchError, match="which is not a fetch: a fetch is a name, a closure") as caught:
        fetch(["loss", bad], 1)
    assert "RecordingHook(" in str(caught.value)


def fail(loss: float) -> None:
    raise ZeroDivisionError("in the closure")


def closure_error(closure: Callable[..., Any] = fail) -> ZeroDivisionError:
    with pytest.raises(ZeroDivisionError) as caught:
        fetch(closure, 1)
    return caught.value


def test_an_error_in_a_closure_keeps_its_traceback() -> None:
    assert traceback.extract_tb(closure_error().__traceback__)[-1].name == "fail"


def test_an_error_in_a_closure_is_not_replaced_or_chained() -> None:
    error = closure_error()
    assert (str(error), error.__cause__, error.__context__) == ("in the closure", None, None)


def test_an_error_in_a_closure_gets_a_note_with_the_closure_the_hook_and_the_names() -> None:
    (note,) = closure_error().__notes__
    assert "in fail (" in note
    assert "which RecordingHook(" in note
    assert "available names: loss, global_step, model, optimizer, session, outputs" in note


def test_an_error_in_compute_gets_a_note() -> None:
    class Broken(Metric):
        def compute(self) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fetch(Broken())
    assert "in Metric(), which RecordingHook(" in caught.value.__notes__[0]


def test_an_error_that_takes_no_note_is_raised_as_it_is() -> None:
    @dataclasses.dataclass(frozen=True)
    class FrozenError(Exception):
        code: int

    def closure() -> None:
        raise FrozenError(3)

    with MonitoredLoop(int) as loop, pytest.raises(FrozenError):
        loop.session.run(closure)


def test_an_error_in_a_closure_that_cannot_be_printed_is_raised_as_it_is() -> None:
    class Unprintable:
        def __call__(self) -> None:
            raise ZeroDivisionError

        def __repr__(self) -> str:
            raise RuntimeError("cannot be printed")

    with MonitoredLoop(int) as loop, pytest.raises(ZeroDivisionError):
        loop.session.run(Unprintable())


def test_stop_iteration_in_a_closure_ends_the_loop_cleanly() -> None:
    hook = RecordingHook([lambda: next(iter(()))])
    with MonitoredLoop(int, hooks=[hook]) as loop:
        loop.run()
    assert [call[0] for call in hook.calls][-2:] == ["end", "teardown"]


def test_only_the_hook_with_the_wrong_fetch_is_named() -> None:
    with (
        pytest.raises(FetchError, match=r"RecordingHook\('bad'\) \(hook 1\) asked"),
        MonitoredLoop(int, hooks=[RecordingHook("loss"), RecordingHook("bad")]) as loop,
    ):
        loop.run()


# -- outside of a run -----------------------------------------------------------------------------------------------


def test_session_run_evaluates_without_a_run() -> None:
    model = Net()
    with MonitoredLoop(int, model, sgd(0.1)) as loop:
        assert loop.session.run(["global_step", "lr", lambda: 7]) == [0, 0.1, 7]


def test_session_run_takes_feeds_for_names() -> None:
    with MonitoredLoop(int) as loop:
        assert loop.session.run(["k", lambda k: k + 1], {"k": 4}) == [4, 5]


def test_an_output_before_the_first_run_is_a_no_run_yet_error() -> None:
    with MonitoredLoop(int) as loop, pytest.raises(NoRunYetError, match="outputs of the step exist only after a run"):
        loop.session.run("loss")


def test_a_closure_with_an_output_before_the_first_run_is_a_no_run_yet_error() -> None:
    with MonitoredLoop(int) as loop, pytest.raises(NoRunYetError, match="parameter 'loss'"):
        loop.session.run(lambda loss: loss)


def test_outputs_outside_of_a_run_are_those_of_the_last_run() -> None:
    with MonitoredLoop(lambda x: {"loss": x}) as loop:
        loop.run(1)
        loop.run(2)
        assert loop.session.run("loss") == 2


def test_outputs_in_after_run_are_those_of_this_run() -> None:
    seen = []

    class Look(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            seen.append(run_context.session.run("loss"))

    with MonitoredLoop(lambda x: {"loss": x}, hooks=[Look()]) as loop:
        loop.run(1)
    assert seen == [1]


def test_outputs_outside_of_a_run_are_detached_for_closures_too() -> None:
    weight = nn.Parameter(torch.ones(1))
    with MonitoredLoop(lambda: weight * 2) as loop:
        loop.run()
        assert loop.session.run(lambda loss, outputs: (loss.requires_grad, outputs.requires_grad)) == (False, False)


def test_the_error_for_an_unknown_name_outside_of_a_run_names_session_run() -> None:
    with MonitoredLoop(int) as loop:
        loop.run()
        with pytest.raises(FetchError, match=r"Session\.run asked for 'los'.*Did you mean 'loss'"):
            loop.session.run("los")


def double(factor: float = 2.0) -> Callable[..., Any]:
    return lambda loss: factor * loss


def mean_of_loss() -> Any:
    return running_mean("loss")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (grad_norm, r"asked for grad_norm \(.*of type function: a value is neither .* call it: grad_norm\(\)\n"),
        (param_norm, r"asked for param_norm \(.*of type function: a value is neither .* call it: param_norm\(\)\n"),
        (double, r"asked for double \(.*of type function: a value is neither .* call it: double\(\)\n"),
        (mean_of_loss, r"of type RunningFetch: a value is neither .* call it: mean_of_loss\(\)\n"),
        (Metric, r"of type Metric: a value is neither .* call it: Metric\(\)\n"),
        (running_mean(grad_norm), r"a value is neither .* call it: grad_norm\(\)\n"),
        (running_mean, r"parameter 'fetch' is not an available name: call it, running_mean\(\.\.\.\)\. Available"),
        (over_ranks, r"parameter 'fetch' is not an available name: call it, over_ranks\(\.\.\.\)\. Available"),
        (summary.scalar, r"parameter 'tag' is not an available name: call it, scalar\(\.\.\.\)\. Available"),
    ],
    ids=[
        "grad_norm",
        "param_norm",
        "double",
        "mean_of_loss",
        "Metric",
        "running_mean(grad_norm)",
        "running_mean",
        "over_ranks",
        "summary.scalar",
    ],
)
@pytest.mark.parametrize(
    "hook",
    [
        lambda fetch: LoggingTensorHook({"fetch": fetch}, 1),
        lambda fetch: SummarySaverHook(1, summary_writer=RecordingWriter(), summary_op={"fetch": fetch}),
        NanTensorHook,
    ],
    ids=["log", "summary", "nan"],
)
def test_a_function_that_creates_a_fetch_is_no_fetch(
    factory: Any, message: str, hook: Callable[[Any], SessionRunHook]
) -> None:
    loop = MonitoredLoop(lambda: 0.5, nn.Linear(1, 1), hooks=[hook(factory)])
    with pytest.raises(FetchError, match=message), loop:
        loop.run()


def test_the_inputs_of_a_run_do_not_exist_outside_of_it() -> None:
    with MonitoredLoop(lambda x: None) as loop:
        loop.run(1)
        with pytest.raises(FetchError, match="'x', which does not exist outside of a run: it is an argument of"):
            loop.session.run("x")


def test_an_output_at_the_end_of_a_loop_without_runs_is_left_out_with_a_warning(lines: list[tuple[str, str]]) -> None:
    hook = FinalOpsHook({"loss": "loss", "step": "global_step"})
    with MonitoredLoop(int, hooks=[hook]):
        pass
    assert hook.final_ops_values == {"step": 0}
    assert [level for level, text in lines if "'loss'" in text] == ["WARNING"]


def test_an_init_fn_can_evaluate_fetches() -> None:
    seen = []

    def init_fn(scaffold: Scaffold, session: Session) -> None:
        seen.append(session.run("weight").shape)

    with MonitoredLoop(int, nn.Linear(2, 1), scaffold=Scaffold(init_fn)):
        pass
    assert seen == [(1, 2)]


@pytest.mark.parametrize("returned", [{}, None])
@pytest.mark.parametrize("failed", [0, 2])
def test_a_step_that_catches_its_error_gets_the_hint_of_latest(returned: Any, failed: int) -> None:
    def step(number: int) -> Any:
        try:
            if number == failed:
                raise ValueError
        except ValueError:
            return returned
        return {"loss": 0.5}

    def train(fetch: Any) -> None:
        with MonitoredLoop(step, hooks=[LoggingTensorHook({"loss": fetch}, every_n_steps=1)]) as loop:
            for number in loop.until_stop(range(4)):
                loop.run(number)

    with pytest.raises(FetchError, match=r"If it is so in some runs only, fetch latest\('loss'\)\."):
        train("loss")
    if failed:
        train(latest("loss"))
