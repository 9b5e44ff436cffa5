"""Steps as people have them: whatever they return, raise, count, take, and in whatever precision they compute."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.torch_state import is_profiling
from torch import nn
from torch.profiler import profile

from torchhooks import (
    CheckpointSaverHook,
    FeedError,
    FeedFnHook,
    FinalOpsHook,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    RunMetadata,
    RunOptions,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    summary,
)
from torchhooks.testing import RecordingHook, RecordingWriter, log_lines

INPUTS, TARGETS = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8.0).reshape(8, 1)


class Training:
    """A small model, its optimizer, and an ordinary step."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.inputs, self.targets = INPUTS.to(dtype), TARGETS.to(dtype)

    def loss(self) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(self.inputs), self.targets)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss


def all_hooks(writer: RecordingWriter, last_step: int = 3) -> list[SessionRunHook]:
    """Every hook of the library, due in every run, asking for every kind of value."""
    everything = ["loss", "lr", "0.weight", "0.weight.grad", "0:output", ":grad", lambda loss: loss * 2]
    ops = [summary.scalar("loss", "loss"), summary.histogram("w", "0.weight"), summary.histogram("out", ":output")]
    return [
        GlobalStepWaiterHook(0),
        FeedFnHook(dict),
        StepCounterHook(1, summary_writer=writer),
        SummarySaverHook(1, summary_writer=writer, summary_op=ops),
        LoggingTensorHook({"loss": "loss", "lr": "lr", "bias": "0.bias"}, every_n_iter=1, at_end=True),
        NanTensorHook("loss"),
        RecordingHook(everything),
        FinalOpsHook(["loss", "0.bias"]),
        StopAtStepHook(last_step=last_step),
    ]


# -- what a step returns comes back untouched -----------------------------------------------------------------------


def test_the_graph_of_what_the_step_returns_is_whole_after_all_hooks_saw_it(lines: list[Any]) -> None:
    training = Training()
    hooks = [hook for hook in all_hooks(RecordingWriter()) if not isinstance(hook, RecordingHook)]
    with MonitoredLoop(training.loss, training.model, training.optimizer, hooks=hooks) as loop:
        loop.run().backward()
    assert all(parameter.grad is not None for parameter in training.model.parameters())


def test_the_tensors_in_what_the_step_returns_stay_those_of_the_step() -> None:
    weight = nn.Parameter(torch.ones(1))
    with MonitoredLoop(lambda: {"loss": weight * 2}, hooks=[RecordingHook(["loss", lambda loss: loss])]) as loop:
        outputs = loop.run()
        loop.session.run("loss")
    assert outputs["loss"].requires_grad


class Saved(torch.autograd.Function):
    """Keeps an object of its own on the graph, whose death tells that of the graph."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, canary: Any) -> torch.Tensor:
        ctx.canary = canary
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2, None


class Canary:
    pass


@pytest.mark.parametrize(
    "hooks",
    [
        [],
        [StopAtStepHook(last_step=100)],
        [RecordingHook()],
        [RecordingHook("loss"), NanTensorHook("loss")],
        [RecordingHook(lambda loss, outputs: [loss, outputs])],
        [LoggingTensorHook(["loss"], every_n_iter=1)],
    ],
    ids=["none", "stop", "nothing fetched", "loss and NaN", "closure", "log"],
)
def test_the_graph_of_a_run_is_gone_when_the_next_step_is_made(hooks: list[SessionRunHook], lines: list[Any]) -> None:
    weight, alive = nn.Parameter(torch.ones(1)), []
    canaries: list[weakref.ref[Canary]] = []

    def step() -> Any:
        alive.append([ref() for ref in canaries if ref() is not None])
        canary = Canary()
        canaries.append(weakref.ref(canary))
        return Saved.apply(weight, canary)  # type: ignore[no-untyped-call]

    gc.disable()  # a cycle that only the collector frees would hold the graph for many runs
    try:
        with MonitoredLoop(step, hooks=hooks) as loop:
            for _ in range(3):
                loop.run()
    finally:
        gc.enable()
    assert alive == [[], [], []]


def test_the_outputs_of_a_run_are_gone_when_the_loop_is() -> None:
    loop = MonitoredLoop(lambda: Training().loss())
    with loop:
        reference = weakref.ref(loop.run())
    del loop
    gc.collect()
    assert reference() is None


# -- what counts as a step ------------------------------------------------------------------------------------------


def steps_of(loop: MonitoredLoop[Any], runs: int) -> list[int]:
    """The global step after each run."""
    steps = []
    with loop:
        for run in range(runs):
            loop.run(run)
            steps.append(loop.global_step)
    return steps


def test_grad_scaler_and_accumulation_together() -> None:
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(run: int) -> None:
        scaler.scale(training.loss() * (math.inf if run == 3 else 1.0)).backward()
        if run % 2:
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()

    loop = MonitoredLoop(step, training.model, training.optimizer, step_unit="optimizer_step")
    assert steps_of(loop, 6) == [0, 1, 1, 1, 1, 2]


def test_hooks_see_the_count_of_the_run_and_stop_at_it() -> None:
    training, hook = Training(), RecordingHook("global_step")

    def step(run: int) -> None:
        if run % 2:
            training.step()

    hooks = [hook, StopAtStepHook(last_step=2)]
    loop = MonitoredLoop(step, training.model, training.optimizer, hooks=hooks, step_unit="optimizer_step")
    with loop:
        for run in loop.until_stop(range(100)):
            loop.run(run)
    assert hook.results == [0, 1, 1, 2]


def test_of_two_optimizers_the_first_counts_and_gives_the_rate() -> None:
    first, second = Training(), Training()
    second.optimizer.param_groups[0]["lr"] = 0.5
    hook = RecordingHook(["lr", "global_step"])

    def step(run: int) -> None:
        second.step()
        if run % 2:
            first.step()

    state = {"critic": second.optimizer}
    loop = MonitoredLoop(step, first.model, first.optimizer, hooks=[hook], state=state, step_unit="optimizer_step")
    steps_of(loop, 4)
    assert hook.results == [[0.01, 0], [0.01, 1], [0.01, 1], [0.01, 2]]


def test_the_rate_is_that_after_the_schedulers_step() -> None:
    training = Training()
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, step_size=2, gamma=0.5)
    hook = RecordingHook("lr")

    def step(run: int) -> None:
        training.step()
        scheduler.step()

    loop = MonitoredLoop(
        step,
        training.model,
        training.optimizer,
        hooks=[hook],
        state={"scheduler": scheduler},
        step_unit="optimizer_step",
    )
    assert (steps_of(loop, 4), hook.results) == ([1, 2, 3, 4], [0.01, 0.005, 0.005, 0.0025])


def test_an_optimizer_that_calls_a_closure_counts_one_step() -> None:
    training = Training()
    optimizer = torch.optim.LBFGS(training.model.parameters(), max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        return loss.item()

    loop = MonitoredLoop(lambda run: optimizer.step(closure), None, optimizer, step_unit="optimizer_step")
    assert steps_of(loop, 2) == [1, 2]


# -- precision and compilation, with all hooks ----------------------------------------------------------------------


def train_with_all_hooks(training: Training, step: Callable[[], Any]) -> tuple[RecordingHook, RecordingWriter]:
    writer = RecordingWriter()
    hooks = all_hooks(writer)
    with MonitoredLoop(step, training.model, training.optimizer, hooks=hooks) as loop:
        while not loop.should_stop():
            loop.run()
    assert loop.stop_reason == "StopAtStepHook: step 3"
    (recording,) = [hook for hook in hooks if isinstance(hook, RecordingHook)]
    return recording, writer


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_come_in_the_precision_of_the_model(dtype: torch.dtype, lines: list[Any]) -> None:
    training = Training(dtype)
    recording, _ = train_with_all_hooks(training, training.step)
    values = [value for value in recording.results[-1] if isinstance(value, torch.Tensor)]
    assert {value.dtype for value in values} == {dtype}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_curves_have_the_losses_of_the_steps_in_any_precision(dtype: torch.dtype, lines: list[Any]) -> None:
    training, alone = Training(dtype), Training(dtype)
    alone.model.load_state_dict(training.model.state_dict())
    _, writer = train_with_all_hooks(training, training.step)
    assert writer.scalars["loss"] == [(number, alone.step().item()) for number in (1, 2, 3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_with_all_hooks_is_bit_identical_to_training_without(dtype: torch.dtype, lines: list[Any]) -> None:
    training, alone = Training(dtype), Training(dtype)
    alone.model.load_state_dict(training.model.state_dict())
    train_with_all_hooks(training, training.step)
    for _ in range(3):
        alone.step()
    pairs = zip(training.model.parameters(), alone.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_line_is_logged_in_any_precision(dtype: torch.dtype, lines: list[tuple[str, str]]) -> None:
    training = Training(dtype)
    train_with_all_hooks(training, training.step)
    assert len([text for _, text in lines if text.startswith("bias = [") and ", loss = " in text]) == 4


def test_a_step_under_autocast_gives_its_values() -> None:
    training, hook = Training(), RecordingHook(["loss", ":output"])

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return training.loss()

    with MonitoredLoop(step, training.model, hooks=[hook]) as loop:
        loop.run()
    assert [value.dtype for value in hook.results[0]] == [torch.float32, torch.bfloat16]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.compile
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings(  # the compiler itself looks at it where a compiled function goes on after its backward()
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
def test_a_compiled_step_with_all_hooks_that_need_not_look_inside(lines: list[tuple[str, str]]) -> None:
    training, writer = Training(), RecordingWriter()
    step = torch.compile(training.step, backend="eager")
    op = {"loss": "loss", "norm": lambda model: model[0].weight.norm()}
    hooks = [
        StepCounterHook(1, summary_writer=writer),
        SummarySaverHook(1, summary_writer=writer, summary_op=op),
        LoggingTensorHook(["loss", "lr", "global_step"], every_n_iter=1),
        NanTensorHook("loss"),
        StopAtStepHook(last_step=3),
    ]
    with MonitoredLoop(step, training.model, training.optimizer, hooks=hooks) as loop:
        while not loop.should_stop():
            loop.run()
    assert [step for step, _ in writer.scalars["loss"]] == [1, 2, 3]
    assert len({value for _, value in writer.scalars["loss"]}) == 3


# -- what may be a step ---------------------------------------------------------------------------------------------


def both(a: Any, b: Any = None) -> Any:
    return a, b


def inputs_of(step: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What ``original_args`` says of the inputs of a run."""
    seen = []

    class Look(SessionRunHook):
        def before_run(self, run_context: SessionRunContext) -> None:
            seen.append(run_context.original_args)

    with MonitoredLoop(step, hooks=[Look()]) as loop:
        loop.run(*args, **kwargs)
    assert seen[0].fetches is step
    return dict(seen[0].feed_dict or {})


class Doubling(nn.Module):
    def forward(self, inputs: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return inputs * scale

    def bound(self, inputs: Any) -> Any:
        return inputs


def test_a_module_may_be_the_step() -> None:
    assert inputs_of(Doubling(), 1.5) == {"inputs": 1.5, "scale": 2.0}


@pytest.mark.compile
@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_module_may_be_the_step() -> None:
    step: Any = torch.compile(Doubling(), backend="eager")
    assert inputs_of(step, torch.ones(()))["inputs"] == 1


def test_a_partial_may_be_the_step() -> None:
    assert inputs_of(functools.partial(both, b=3), 1) == {"a": 1, "b": 3}


def test_a_builtin_may_be_the_step() -> None:
    assert inputs_of(operator.add, 1, 2) == {"a": 1, "b": 2}


def test_a_builtin_that_does_not_say_what_it_takes_may_be_the_step() -> None:
    assert inputs_of(max, 1, 2, key=abs) == {"key": abs}


def test_a_bound_method_may_be_the_step() -> None:
    step = Doubling().bound
    assert inputs_of(step, 1) == {"inputs": 1}


def test_a_step_may_be_called_by_keyword() -> None:
    assert inputs_of(lambda a, b=2, *, c=3: None, a=1, c=4) == {"a": 1, "b": 2, "c": 4}


def test_a_step_may_take_anything() -> None:
    assert inputs_of(lambda *args, **kwargs: None, 1, 2, c=3) == {"args": (1, 2), "c": 3}


def test_a_step_may_be_decorated_with_more_arguments_than_it_says() -> None:
    @functools.wraps(Doubling.bound)
    def step(*args: Any, verbose: bool) -> Any:
        return args

    assert inputs_of(step, 1, 2, 3, verbose=True) == {"verbose": True}


@pytest.mark.parametrize("step", [3, "step", nn.Linear(1, 1).weight])
def test_what_cannot_be_called_is_no_step(step: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a function, called as step\(\*args, \*\*kwargs\)"):
        MonitoredLoop(step)


# -- feeds ----------------------------------------------------------------------------------------------------------


def run_fed(step: Callable[..., Any], feeds: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
    """What ``step`` returns where each of ``feeds`` comes from a hook of its own and the rest from the caller."""
    with MonitoredLoop(step, hooks=[RecordingHook(feed_dict=feed) for feed in feeds]) as loop:
        return loop.run(*args, **kwargs)


def test_hooks_may_feed_beside_one_another_and_the_caller() -> None:
    assert run_fed(lambda a, b, c: (a, b, c), [{"b": 2}, {"c": 3}], 1) == (1, 2, 3)


def test_a_feed_replaces_a_default() -> None:
    assert run_fed(both, [{"b": 2}], 1) == (1, 2)


def test_a_feed_that_the_step_does_not_take_names_the_hook_and_what_it_takes() -> None:
    with pytest.raises(TypeError, match=r"RecordingHook\(feed_dict=\{'c': 1\}\) \(hook 0\) feeds 'c', which the step"):
        run_fed(both, [{"c": 1}], 1)


def test_a_feed_that_the_step_does_not_take_says_what_it_takes() -> None:
    with pytest.raises(TypeError, match=r"(?m)It takes: a, b\.$"):
        run_fed(both, [{"c": 1}], 1)


@pytest.mark.parametrize(
    "step", [lambda: 1, lambda a, /: a, lambda *a: a], ids=["no parameters", "positional only", "variable"]
)
def test_what_cannot_be_given_by_keyword_cannot_be_fed(step: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"(?m)It takes no arguments by name\.$"):
        run_fed(step, [{"a": 1}])


def test_a_step_with_variable_keywords_takes_any_feed() -> None:
    assert run_fed(lambda **kwargs: kwargs, [{"a": 1}], b=2) == {"a": 1, "b": 2}


@pytest.mark.parametrize(("args", "kwargs"), [((), {"a": 1}), ((1,), {}), ((1, 2), {})])
def test_a_feed_that_the_caller_gave_too_is_refused(args: Any, kwargs: Any) -> None:
    with pytest.raises(FeedError, match=r"RecordingHook\(.*\) \(hook 0\) feeds 'a', which the caller"):
        run_fed(both, [{"a": 1}], *args, **kwargs)


def test_a_step_with_variable_keywords_refuses_what_the_caller_gave_too() -> None:
    with pytest.raises(FeedError, match="which the caller"):
        run_fed(lambda **kwargs: None, [{"a": 1}], a=1)


def test_a_feed_error_is_a_runtime_error_as_tensorflows() -> None:
    assert issubclass(FeedError, RuntimeError)


def test_a_module_is_fed_what_its_forward_takes() -> None:
    assert run_fed(Doubling(), [{"scale": 3.0}], 2.0) == 6.0


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_module_refuses_a_feed_that_its_forward_does_not_take() -> None:
    with pytest.raises(TypeError, match=r"(?m)It takes: inputs, scale\.$"):
        run_fed(torch.compile(Doubling(), backend="eager"), [{"factor": 3.0}], 2.0)


def test_a_partial_is_fed_what_is_left() -> None:
    assert run_fed(functools.partial(both, 1), [{"b": 2}]) == (1, 2)


def test_a_partial_is_fed_what_it_gave_by_keyword() -> None:
    assert run_fed(functools.partial(both, b=5), [{"b": 2}], 1) == (1, 2)


def test_a_builtin_that_does_not_say_what_it_takes_is_fed_anything() -> None:
    assert run_fed(max, [{"key": abs}], 3, -4) == -4


def test_original_args_have_no_feeds() -> None:
    seen = []

    class Look(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            seen.append(run_context.original_args.fetches)

    step = both
    with MonitoredLoop(step, hooks=[RecordingHook(feed_dict={"a": 1}), Look()]) as loop:
        loop.run(b=2)
    assert seen == [step]


# -- one-step profiles ----------------------------------------------------------------------------------------------


class Asks(SessionRunHook):
    """Asks for a trace in the runs it is told to, and keeps the metadata and options of all."""

    def __init__(self, request: SessionRunArgs | None, runs: tuple[int, ...] = (0,)) -> None:
        self.request, self.runs = request, runs
        self.seen: list[SessionRunValues] = []

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        return self.request if run_context.session.global_step in self.runs else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.seen.append(run_values)


TRACE = SessionRunArgs(options=RunOptions(trace=True))


def test_a_traced_run_gives_a_finished_profile_of_the_step() -> None:
    hook, training = Asks(TRACE), Training()
    with MonitoredLoop(training.step, hooks=[hook]) as loop:
        loop.run()
    recorded = hook.seen[0].run_metadata.profile
    assert isinstance(recorded, profile)
    assert "aten::mse_loss" in {event.key for event in recorded.key_averages()}


@pytest.mark.parametrize("request_of_other", [SessionRunArgs("loss"), None])
def test_every_hook_that_is_called_in_a_traced_run_gets_the_profile_and_the_merged_options(
    request_of_other: SessionRunArgs | None,
) -> None:
    asker, other = Asks(TRACE), Asks(request_of_other)
    with MonitoredLoop(int, hooks=[other, asker]) as loop:
        loop.run()
    assert other.seen[0].run_metadata.profile is asker.seen[0].run_metadata.profile is not None
    assert other.seen[0].options == asker.seen[0].options == RunOptions(trace=True)


def test_only_runs_in_which_somebody_asked_are_traced() -> None:
    hook = Asks(TRACE, runs=(1,))
    with MonitoredLoop(int, hooks=[hook, Asks(SessionRunArgs("loss"), runs=(0, 1, 2))]) as loop:
        for _ in range(3):
            loop.run()
    traced = [values.run_metadata.profile is not None for values in hook.seen]
    assert (traced, hook.seen[0].run_metadata) == ([False, True, False], RunMetadata())


def test_a_traced_step_is_fed_and_returns_as_any_other() -> None:
    with MonitoredLoop(both, hooks=[Asks(TRACE), RecordingHook(feed_dict={"b": 2})]) as loop:
        assert loop.run(1) == (1, 2)


def test_a_traced_step_that_raises_leaves_no_profiler_running() -> None:
    running = []

    def step() -> None:
        running.append(is_profiling())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), MonitoredLoop(step, hooks=[Asks(TRACE)]) as loop:
        loop.run()
    assert (running, is_profiling()) == ([True], False)


# -- an optimizer that makes no step -----------------------------------------------------------------------------------


def no_step(runs: int, step: int = 0) -> str:
    return (
        f'step_unit="optimizer_step": the step() of the SGD that the loop has was not called in {runs} runs, so the '
        f"global step is still {step}, and what is due by steps never comes due. Pass the optimizer whose step() the "
        'script calls, which for SAM is the one that it wraps, sam.base_optimizer, or use step_unit="run"'
    )


def warned(loop: MonitoredLoop[Any], *data: Iterable[Any]) -> list[str]:
    """Make a run with each item of ``data``, one epoch after the other, and return the warnings."""
    with log_lines() as lines, loop:
        for items in data:
            for _ in loop.until_stop(items):
                loop.run()
    return [text for level, text in lines if level == "WARNING"]


@pytest.mark.parametrize("hooks", [[], [LoggingTensorHook(["global_step"], every_n_steps=5)], [RecordingHook()]])
def test_an_optimizer_that_never_steps_is_a_warning_when_the_first_epoch_ends(hooks: list[Any]) -> None:
    training, other = Training(), Training()
    loop = MonitoredLoop(other.step, training.model, training.optimizer, hooks=hooks, step_unit="optimizer_step")
    assert warned(loop, range(7), range(5)) == [no_step(7)]


def test_without_an_end_of_an_epoch_it_comes_after_1000_runs() -> None:
    training = Training()
    loop = MonitoredLoop(lambda: None, training.model, training.optimizer, step_unit="optimizer_step")
    with log_lines() as lines, loop:
        for run in range(2500):
            assert bool(lines) == (run >= 1000)
            loop.run()
    assert lines == [("WARNING", no_step(1000))]


@pytest.mark.parametrize("accumulate", [2, 5])
def test_gradients_that_accumulate_within_an_epoch_are_no_such_case(accumulate: int) -> None:
    training, runs = Training(), itertools.count(1)

    def step() -> None:
        if next(runs) % accumulate == 0:
            training.step()

    loop = MonitoredLoop(step, training.model, training.optimizer, step_unit="optimizer_step")
    assert warned(loop, range(6), range(6)) == []


def test_an_epoch_that_was_resumed_before_its_last_run_is_none_either(tmp_path: Path) -> None:
    for last in (True, False):
        training, runs = Training(), itertools.count(1)

        def step(training: Training = training, runs: Iterator[int] = runs, last: bool = last) -> None:
            if last or next(runs) > 2:
                training.step()

        hooks = [CheckpointSaverHook(every_n_steps=100), *([StopAtStepHook(last_step=5)] if last else [])]
        loop = MonitoredLoop(
            step, training.model, training.optimizer, hooks=hooks, checkpoint_dir=tmp_path, step_unit="optimizer_step"
        )
        assert warned(loop, range(6), range(6)) == []


def test_with_a_run_as_the_unit_nothing_is_said() -> None:
    training = Training()
    assert warned(MonitoredLoop(lambda: None, training.model, training.optimizer), range(1200), range(5)) == []
