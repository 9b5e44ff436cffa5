"""Watching submodules: values of the right run, no hooks left on them, and no wrong values from compiled code."""

from __future__ import annotations

import copy
import io
import multiprocessing.reduction
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.fx
import torch.optim.swa_utils
import torch.utils.checkpoint
from support.torch_state import has_hooks, hooks_on
from torch import nn

from torchhooks import (
    Due,
    FetchError,
    FinalOpsHook,
    LoggingTensorHook,
    MonitoredLoop,
    RunOptions,
    SessionRunArgs,
    SessionRunContext,
    summary,
)
from torchhooks.testing import RecordingHook, plain


class Net(nn.Module):
    """Doubles its input with a submodule whose output is then changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(1, 1, bias=False)
        self.act = nn.ReLU(inplace=True)
        self.unused = nn.Linear(1, 1)
        nn.init.constant_(self.twice.weight, 2.0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(self.twice(inputs))
        return out


INPUTS = torch.tensor([[-1.0], [3.0]])


def backward(model: nn.Module) -> Callable[[], torch.Tensor]:
    """Return a step that computes the gradients of the sum of squares of the outputs for INPUTS."""

    def step() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(INPUTS).square().sum()
        loss.backward()
        return loss.detach()

    return step


def watch(fetches: Any, model: nn.Module | None = None, step: Callable[..., Any] | None = None, runs: int = 1) -> Any:
    """Return the value of ``fetches`` in the last of ``runs`` runs, by default of ``backward(model)``."""
    model = Net() if model is None else model
    hook = RecordingHook(fetches)
    with MonitoredLoop(backward(model) if step is None else step, model, hooks=[hook]) as loop:
        for _ in range(runs):
            loop.run()
    return hook.results[-1]


# -- values ---------------------------------------------------------------------------------------------------------


def test_the_output_of_a_submodule() -> None:
    assert plain(watch("act:output")) == [[0.0], [6.0]]


def test_an_in_place_operation_after_a_submodule_does_not_change_its_output() -> None:
    assert plain(watch("twice:output")) == [[-2.0], [6.0]]


def test_an_in_place_operation_inside_a_submodule_does_not_change_its_input() -> None:
    assert plain(watch("act:input")) == [[-2.0], [6.0]]


def test_the_gradient_of_the_output_of_a_submodule() -> None:
    assert plain(watch("act:grad")) == [[0.0], [12.0]]


def test_an_in_place_operation_after_a_submodule_does_not_change_its_gradient() -> None:
    # It includes the derivative of relu, so it is the gradient of what the submodule returned, before the operation.
    assert plain(watch("twice:grad")) == [[0.0], [12.0]]


def test_the_models_own_output_input_and_gradient() -> None:
    assert plain(watch([":output", ":input", ":grad"])) == [[[0.0], [6.0]], plain(INPUTS), [[0.0], [12.0]]]


def test_watched_names_in_any_structure_and_in_summary_ops() -> None:
    op = summary.histogram("out", "act:output")
    values = watch({"a": ("act:output", [op])})
    assert plain(values["a"]) == ([[0.0], [6.0]], [(op, [[0.0], [6.0]])])


def test_two_hooks_can_watch_one_submodule() -> None:
    model, hooks = Net(), [RecordingHook("act:output"), RecordingHook(["act:output", "act:grad"])]
    with MonitoredLoop(backward(model), model, hooks=hooks) as loop:
        loop.run()
    assert torch.equal(hooks[0].results[0], hooks[1].results[0][0])


def test_each_run_has_its_own_values() -> None:
    model, hook = Net(), RecordingHook("twice:output")
    with MonitoredLoop(lambda value: model(torch.tensor([value])), model, hooks=[hook]) as loop:
        for value in (1.0, 2.0):
            loop.run(value)
    assert plain(hook.results) == [[2.0], [4.0]]


def test_values_are_detached_and_copied() -> None:
    model = nn.Sequential(nn.Identity())
    value = watch("0:output", model, lambda: model(nn.Parameter(INPUTS.clone())).data.zero_())
    assert (value.requires_grad, plain(value)) == (False, plain(INPUTS))


def test_a_submodule_deep_inside_and_of_a_sequential() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Identity(), Net())})
    value = watch("body.1.twice:output", model, backward(model["body"]))
    assert plain(value) == [[-2.0], [6.0]]


def test_a_submodule_under_two_names() -> None:
    shared = nn.Linear(1, 1)
    one, other = watch(["0:output", "1:output"], nn.Sequential(shared, shared))
    assert torch.equal(one, other)


def test_a_submodule_of_a_wrapped_model() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Net()

        def forward(self, *args: Any) -> Any:
            return self.module(*args)

    by_both_names = watch(["twice:output", "module.twice:output"], Wrapper())
    assert plain(by_both_names) == [[[-2.0], [6.0]]] * 2


def test_a_submodule_of_data_parallel() -> None:
    assert plain(watch("twice:output", nn.DataParallel(Net()))) == [[-2.0], [6.0]]


def test_values_of_a_run_that_was_also_traced() -> None:
    model, hook = Net(), Tracing("twice:output")
    with MonitoredLoop(backward(model), model, hooks=[hook]) as loop:
        loop.run()
    assert plain(hook.results[0]) == [[-2.0], [6.0]]


class Tracing(RecordingHook):
    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        request = super().before_run(run_context)
        return None if request is None else request._replace(options=RunOptions(trace=True))


# -- several values, several calls ----------------------------------------------------------------------------------


class Both(nn.Module):
    """Returns all of its arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return {"args": args, **kwargs}


@pytest.mark.parametrize(
    ("args", "kwargs", "received"),
    [
        ((), {}, ()),
        ((1,), {}, 1),
        ((), {"a": 1}, 1),
        ((1, 2), {}, (1, 2)),
        ((1,), {"a": 2}, (1, 2)),
        (([1, 2],), {}, [1, 2]),
    ],
)
def test_the_input_is_the_argument_or_a_tuple_of_several(args: Any, kwargs: Any, received: Any) -> None:
    model = Both()
    assert watch(":input", model, lambda: model(*args, **kwargs)) == received


def test_an_output_of_any_shape() -> None:
    model = Both()
    assert plain(watch(":output", model, lambda: model(INPUTS, b=[INPUTS]))) == plain(
        {"args": (INPUTS,), "b": [INPUTS]}
    )


def test_an_output_that_is_the_pair_of_max_is_copied() -> None:
    class Max(nn.Module):
        def forward(self, inputs: torch.Tensor) -> Any:
            return inputs.max(0)

    model = Max()
    value = watch(":output", model, lambda: model(INPUTS).values.zero_())
    assert plain(value.values) == [3.0]


class Halves(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Split(nn.Module):
    def forward(self, inputs: torch.Tensor) -> Halves:
        return Halves(inputs * 2, inputs * 3)


def test_the_gradients_of_several_outputs_have_their_structure_with_none_where_none_arrived() -> None:
    model = Split()
    value = watch(":grad", model, lambda: model(nn.Parameter(INPUTS)).right.sum().backward())
    assert plain(value) == Halves(None, [[1.0], [1.0]])  # type: ignore[arg-type]


def test_the_last_call_counts() -> None:
    model = nn.Linear(1, 1)

    def step() -> None:
        for value in (1.0, 2.0):
            model(torch.full((1,), value))

    assert watch(":input", model, step) == 2


def test_the_gradient_of_the_last_call_counts() -> None:
    model = nn.Linear(1, 1)

    def step() -> None:
        (model(torch.ones(1)) * 3 + model(torch.ones(1)) * 5).backward()

    assert watch(":grad", model, step) == 5


def test_an_in_place_operation_after_the_backward_does_not_change_the_gradient() -> None:
    class Shift(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs + 1

    model = Shift()

    def step() -> None:
        weight = nn.Parameter(torch.ones(1))
        (model(weight) * 3).backward()
        assert weight.grad is not None
        weight.grad.zero_()  # autograd shares its memory with the gradient of the output

    assert watch(":grad", model, step) == 3


def test_a_later_call_without_gradient_does_not_hide_the_gradient() -> None:
    model = nn.Linear(1, 1)

    def step() -> None:
        (model(torch.ones(1)) * 3).backward()
        model(torch.ones(1))
        with torch.no_grad():
            model(torch.ones(1))

    assert watch(":grad", model, step) == 3


def test_the_last_of_several_backwards_counts() -> None:
    model = nn.Linear(1, 1)

    def step() -> None:
        for factor in (3, 5):
            (model(torch.ones(1)) * factor).backward()

    assert watch(":grad", model, step) == 5


def test_the_gradient_is_seen_through_activation_checkpointing() -> None:
    model = nn.Linear(1, 1)
    weight = nn.Parameter(torch.ones(1))

    def step() -> None:
        out: Any = torch.utils.checkpoint.checkpoint(model, weight, use_reentrant=False)
        (out * 3).backward()

    assert watch(":grad", model, step) == 3


# -- what cannot be watched -----------------------------------------------------------------------------------------


def watch_error(fetches: Any, model: nn.Module | None = None, step: Callable[..., Any] | None = None) -> str:
    with pytest.raises(FetchError) as caught:
        watch(fetches, model, step)
    return str(caught.value)


def test_a_submodule_that_does_not_exist() -> None:
    message = watch_error("twcie:output")
    assert message.startswith("RecordingHook('twcie:output') (hook 0) asked for 'twcie:output', but the model")
    assert message.endswith("the model has no submodule 'twcie'. Did you mean 'twice'? Available: twice, act, unused.")


def test_a_submodule_of_a_model_without_submodules() -> None:
    message = watch_error("fc:output", nn.Linear(1, 1))
    assert message.endswith("'fc'. It has no submodules.")


@pytest.mark.parametrize("name", ["twice.weight:output", "forward:output", "twice.deeper:grad"])
def test_something_else_than_a_submodule(name: str) -> None:
    assert "no submodule" in watch_error(name)


def test_a_submodule_of_a_loop_without_model() -> None:
    with (
        pytest.raises(FetchError, match=r"there is no model: give MonitoredLoop\(step, model\)"),
        MonitoredLoop(int, hooks=[RecordingHook(":output")]) as loop,
    ):
        loop.run()


@pytest.mark.parametrize("kind", ["output", "input"])
def test_a_submodule_that_was_not_called_in_this_run(kind: str) -> None:
    assert f"asked for 'unused:{kind}', but unused was not called in this run" in watch_error(f"unused:{kind}")


def test_a_submodule_that_was_called_only_in_the_last_run_has_no_value() -> None:
    model = Net()
    loop = MonitoredLoop(lambda call: model(INPUTS) if call else None, model, hooks=[RecordingHook("twice:output")])
    loop.run(True)
    with pytest.raises(FetchError, match="was not called"), loop:
        loop.run(False)


def test_a_gradient_that_did_not_arrive() -> None:
    model = Net()
    assert "no gradient reached the output of act in this run" in watch_error("act:grad", model, lambda: model(INPUTS))


def test_an_unknown_suffix_is_an_unknown_name() -> None:
    assert "asked for 'act:outptu', which does not exist" in watch_error("act:outptu")


def test_a_submodule_cannot_be_watched_outside_of_a_run() -> None:
    with (
        MonitoredLoop(int, Net()) as loop,
        pytest.raises(FetchError, match="'act:output', which has a value only during"),
    ):
        loop.session.run({"a": ["act:output"]})


def test_a_submodule_that_does_not_exist_fails_the_first_run_before_any_after_run() -> None:
    # Only the step knows whether it returns an output of that name, so it is made.
    made: list[int] = []
    first, second = RecordingHook(), RecordingHook("nowhere:output")
    with (
        pytest.raises(FetchError, match="no submodule 'nowhere'"),
        MonitoredLoop(lambda: made.append(1), Net(), hooks=[first, second]) as loop,
    ):
        loop.run()
    assert made == [1]
    assert "after_run" not in [call[0] for call in first.calls]


# -- outputs whose names look like those of submodules --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["output", "input", "grad"])
@pytest.mark.parametrize("path", ["nowhere", "twice", "unused", ""])
@pytest.mark.parametrize("model", [Net, lambda: None], ids=["model", "no model"])
def test_an_output_of_that_name_is_found_first(model: Callable[[], Any], path: str, kind: str) -> None:
    name, made = f"{path}:{kind}", model()

    def step() -> Any:
        loss = None if made is None else backward(made)()
        return {name: 7, "loss": loss}

    hooks = [RecordingHook([name]), RecordingHook(summary.scalar("tag", name)), RecordingHook(name)]
    with MonitoredLoop(step, made, hooks=hooks) as loop:
        loop.run()
        later = loop.session.run({"a": name})
    assert [hook.results[0] for hook in hooks] == [[7], (hooks[1].results[0].op, 7), 7]
    assert later == {"a": 7}


def test_a_feed_of_that_name_is_found_first() -> None:
    model, hook = Net(), RecordingHook("twice:output", feed_dict={"twice:output": 7})
    with MonitoredLoop(lambda **fed: model(INPUTS), model, hooks=[hook]) as loop:
        loop.run()
        assert loop.session.run("twice:output", {"twice:output": 8}) == 8
    assert hook.results == [7]


def test_submodules_are_watched_in_a_run_that_returns_an_output_of_that_name_too() -> None:
    model = Net()
    value = watch(["twice:output", "act:output"], model, lambda: {"twice:output": 7, "out": model(INPUTS)})
    assert plain(value) == [7, [[0.0], [6.0]]]


def test_a_hook_that_is_asked_after_the_step_can_fetch_an_output_of_that_name() -> None:
    class AfterStep(RecordingHook):
        def next_due(self) -> Due:
            return Due(when=lambda outputs: True)

    hook = AfterStep("twice:output")
    with MonitoredLoop(lambda: {"twice:output": 7}, Net(), hooks=[hook]) as loop:
        loop.run()
        loop.run()
    assert hook.results == [7, 7]


@pytest.mark.parametrize("create", [FinalOpsHook, lambda name: LoggingTensorHook([name], at_end=True)])
def test_a_hook_that_reports_at_the_end_needs_another_name(create: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match="under a name that does not end in :output, :input or :grad"):
        create("twice:output")


# -- no hooks are left ----------------------------------------------------------------------------------------------


def test_hooks_are_on_the_submodule_during_the_run_and_gone_after_it() -> None:
    model, during = Net(), []

    def step() -> None:
        during.append(hooks_on(model))
        model(INPUTS).sum().backward()

    watch(["twice:output", "act:input", "act:grad"], model, step)
    assert (during, hooks_on(model)) == ([["twice", "act"]], [])


def test_hooks_are_on_the_submodule_only_in_runs_that_fetch_it() -> None:
    model, during = Net(), []

    class EverySecond(RecordingHook):
        def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
            return super().before_run(run_context) if run_context.session.global_step % 2 else None

    def step() -> None:
        during.append(hooks_on(model))
        model(INPUTS)

    with MonitoredLoop(step, model, hooks=[EverySecond("twice:output")]) as loop:
        for _ in range(4):
            loop.run()
    assert during == [[], ["twice"], [], ["twice"]]


def test_other_fetches_add_no_hooks() -> None:
    model, during = Net(), []
    watch(["twice.weight", lambda model: 1, model.twice.weight], model, lambda: during.append(hooks_on(model)))
    assert during == [[]]


def test_hooks_are_gone_when_the_step_raised() -> None:
    model = Net()

    def step() -> None:
        model(INPUTS)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watch(["twice:output", "twice:input", "twice:grad"], model, step)
    assert hooks_on(model) == []


@pytest.mark.parametrize("bad", ["nowhere:output", "nothing", 3])
def test_hooks_are_gone_when_a_later_request_was_bad(bad: Any) -> None:
    model = Net()
    with (
        pytest.raises(FetchError),
        MonitoredLoop(
            backward(model), model, hooks=[RecordingHook(["twice:output", "act:grad"]), RecordingHook(bad)]
        ) as loop,
    ):
        loop.run()
    assert hooks_on(model) == []


def test_no_hook_stays_on_the_outputs_of_a_run() -> None:
    model, outputs = Net(), []

    def step() -> None:
        outputs.append(model(INPUTS))
        outputs[0].sum().backward()

    watch(":grad", model, step)
    assert not has_hooks(outputs[0])


def test_the_users_own_hooks_stay() -> None:
    model, seen = Net(), []
    model.twice.register_forward_hook(lambda *args: seen.append(1))
    watch("twice:output", model, runs=2)
    assert (seen, hooks_on(model)) == ([1, 1], ["twice"])


def test_watching_keeps_no_output_alive() -> None:
    model = Net()
    references = []

    def step() -> None:
        output = model(INPUTS)
        output.sum().backward()
        references.append(weakref.ref(output))

    watch([":output", ":grad"], model, step)
    assert references[0]() is None


def test_watching_changes_no_gradient() -> None:
    watched, alone = Net(), Net()
    watch(["twice:output", "twice:input", "twice:grad"], watched)
    backward(alone)()
    assert torch.equal(watched.twice.weight.grad, alone.twice.weight.grad)  # type: ignore[arg-type]


# -- copies that the step makes of the model ------------------------------------------------------------------------


def averaged(model: nn.Module) -> nn.Module:
    average: nn.Module = torch.optim.swa_utils.AveragedModel(model).module
    return average


def pickled(protocol: int) -> Callable[[nn.Module], Any]:
    return lambda model: pickle.loads(pickle.dumps(model, protocol))


def saved(model: nn.Module | torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def sent(model: nn.Module) -> Any:
    return pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(model))


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "AveragedModel": averaged,
    **{f"pickle {protocol}": pickled(protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)},
    "torch.save": saved,
    "to a process": sent,
    "a list": lambda model: copy.deepcopy([model])[0],
}

EVERYTHING = ["twice:output", "twice:input", "twice:grad", ":output", ":input", ":grad", "act:input"]


def step_with(copies: list[Any], make: Callable[[Any], Any], model: nn.Module) -> Callable[[], torch.Tensor]:
    """Return ``backward(model)`` with a copy made before it, which is called with other inputs after it."""

    def step() -> torch.Tensor:
        copies.append(make(model))
        loss = backward(model)()
        if make is not copy.copy:  # a shallow copy has the submodules of the original
            copies[-1](INPUTS * 10).sum().backward()
        return loss

    return step


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_watched_model_gives_no_values_and_has_no_hooks_of_ours(make: Callable[[Any], Any]) -> None:
    alone = plain(watch(EVERYTHING, Net()))
    copies: list[Any] = []
    model = Net()
    values = watch(EVERYTHING, model, step_with(copies, make, model))
    assert plain(values) == alone
    assert all("torchhooks" not in str(value) for module in copies[0].modules() for value in vars(module).values())


def test_a_shallow_copy_of_a_watched_model_gives_no_values() -> None:
    model = Net()

    def step() -> None:
        shallow = Net.__new__(Net)
        vars(shallow).update(vars(model))
        model(INPUTS)
        shallow(INPUTS * 10)

    assert plain(watch(":output", model, step)) == [[0.0], [6.0]]


def test_saving_a_tensor_whose_gradient_is_watched_logs_no_warning() -> None:
    inputs = INPUTS.clone().requires_grad_()
    copies: list[Any] = []
    model = nn.Identity()

    def step() -> None:
        copies.append(model(inputs))
        copies.append(saved(inputs))  # a warning is an error in these tests
        inputs.sum().backward()

    assert plain(watch(":grad", model, step)) == [[1.0], [1.0]]
    assert not has_hooks(copies[1])


# -- compiled code --------------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    from torch._inductor import config  # takes a second

    with config.patch(compile_threads=1):  # worker processes would outlive the test
        yield
    torch.compiler.reset()


def compiled(test: Any) -> Any:
    """Decorate a test that compiles: reset the compiler before and after it."""
    # For a compiled function with code after its backward(), the compiler itself reads the gradient of the loss.
    ignored = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    return ignored(pytest.mark.usefixtures("_fresh_compiler")(test))


def eager(model_or_step: Any) -> Any:
    """Compile with a backend that takes no time."""
    return torch.compile(model_or_step, backend="eager")


@compiled
@pytest.mark.parametrize("name", ["twice.weight", "_orig_mod.twice.weight"])
def test_parameters_of_a_compiled_model_have_their_plain_names(name: str) -> None:
    model = Net()
    assert torch.equal(watch(name, eager(model)), model.twice.weight)


@compiled
def test_the_gradients_of_a_compiled_model_have_their_plain_names() -> None:
    model = Net()
    value = watch("twice.weight.grad", eager(model))
    assert torch.equal(value, model.twice.weight.grad)  # type: ignore[arg-type]


@compiled
def test_errors_show_the_plain_names_of_a_compiled_model() -> None:
    message = watch_error("twice.wieght", eager(Net()))
    assert "Did you mean 'twice.weight'?" in message
    assert "_orig_mod" not in message


@compiled
def test_parameters_of_a_compiled_submodule_have_their_plain_names() -> None:
    model = Net()
    model.twice = eager(model.twice)
    assert plain(watch("twice.weight", model)) == [[2.0]]


@compiled
def test_a_compiled_model_as_a_whole_can_be_watched_in_every_run() -> None:
    model: Any = eager(Net())
    assert plain(watch([":output", ":input", ":grad"], model, runs=3)) == [
        [[0.0], [6.0]],
        plain(INPUTS),
        [[0.0], [12.0]],
    ]


@compiled
def test_a_compiled_submodule_as_a_whole_can_be_watched_in_every_run() -> None:
    model = Net()
    model.twice = eager(model.twice)
    assert plain(watch("twice:output", model, runs=3)) == [[-2.0], [6.0]]


def in_place() -> nn.Module:
    model = Net()
    model.compile(backend="eager")
    return model


INSIDE_COMPILED: list[tuple[Callable[[], Any], str]] = [
    (lambda: eager(Net()), "twice"),
    (lambda: nn.DataParallel(eager(Net())), "twice"),
    (lambda: nn.Sequential(eager(Net())), "0.twice"),
    (in_place, "twice"),
    (in_place, ""),
    (lambda: nn.Sequential(in_place()), "0"),
]


@compiled
@pytest.mark.parametrize("kind", ["output", "input", "grad"])
@pytest.mark.parametrize(("make", "path"), INSIDE_COMPILED)
def test_the_inside_of_a_compiled_model_cannot_be_watched(make: Callable[[], nn.Module], path: str, kind: str) -> None:
    model = make()
    message = watch_error(f"{path}:{kind}", model)
    assert f"asked for '{path}:{kind}', but Net is compiled, and compiled code calls no module hooks" in message
    assert hooks_on(model) == []


@compiled
@pytest.mark.parametrize(("kind", "runs_before"), [("output", 0), ("input", 1), ("grad", 3)])
def test_in_a_compiled_step_nothing_can_be_watched_before_or_after_compilation(kind: str, runs_before: int) -> None:
    model = Net()
    step = eager(backward(model))
    for _ in range(runs_before):
        step()
    for _ in range(2):
        assert "Calls from compiled code are not seen" in watch_error(f"twice:{kind}", model, step)


@compiled
def test_a_model_that_is_compiled_without_the_loop_knowing_is_an_error() -> None:
    model = Net()
    step = backward(eager(model))
    assert "compiled code" in watch_error("twice:output", model, step)


@compiled
def test_what_a_compiled_step_returns_can_be_fetched_in_every_run() -> None:
    model = Net()
    assert watch("loss", model, eager(backward(model)), runs=3) == 36


@compiled
def test_watching_a_compiled_step_does_not_recompile_it_each_time() -> None:
    model, compilations = Net(), []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    step = torch.compile(lambda: model(INPUTS).sum(), backend=backend)
    for _ in range(10):
        watch_error("twice:output", model, step)
        step()
    assert len(compilations) <= 2


@pytest.mark.compile
@compiled
def test_with_the_default_compiler_a_model_gives_its_parameters_outputs_and_gradients() -> None:
    model: Any = torch.compile(Net())
    values = watch(["loss", "twice.weight", ":output", ":grad"], model, runs=2)
    assert plain(values) == [36.0, [[2.0]], [[0.0], [6.0]], [[0.0], [12.0]]]
