"""``loop.step()``: a run whose step is the body of a ``with`` statement."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices import FakeDevice
from support.torch_state import hooks_on
from torch import nn

from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    Coordinator,
    Due,
    FeedError,
    FeedFnHook,
    FetchError,
    LifecycleError,
    LoggingTensorHook,
    MonitoredLoop,
    MonitoredTrainingLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    RunOptions,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepContext,
    StopAtStepHook,
    list_checkpoints,
    running_mean,
)
from torchhooks.loop.body import Body
from torchhooks.testing import RecordingHook

Lines = list[tuple[str, str]]


class Count(nn.Module):
    """Counts steps in a buffer, which shows a step that was undone."""

    w: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.zeros(()))


class Often(SessionRunHook):
    """Is due in every n-th run only, so that there are idle runs; before the step, or only after it."""

    def __init__(self, every: int, before: bool) -> None:
        self.every, self.runs = every, list[int]()
        if before:
            self.before_run = self.fetch  # type: ignore[method-assign]

    def fetch(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs("loss")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.runs.append(run_context.session.global_step)

    def next_due(self) -> Due:
        return Due(step=self.runs[-1] + self.every if self.runs else self.every)


class During(SessionRunHook):
    """Calls a function in one of its methods."""

    def __init__(self, **actions: Callable[[SessionRunContext], object]) -> None:
        self.actions = actions

    def before_run(self, run_context: SessionRunContext) -> None:
        self.actions.get("before_run", bool)(run_context)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.actions.get("after_run", bool)(run_context)


def methods(hook: RecordingHook) -> list[str]:
    return [call[0] for call in hook.calls]


def make(loop: MonitoredLoop[Any], *losses: float) -> None:
    """Make a run with each of ``losses``, until the loop stops."""
    for loss in loop.until_stop(losses):
        with loop.step() as outputs:
            outputs["loss"] = loss


# -- the lifecycle ----------------------------------------------------------------------------------------------------


def test_the_outputs_are_a_new_dict_in_each_run() -> None:
    seen = []
    with MonitoredLoop() as loop:
        for _ in range(2):
            with loop.step() as outputs:
                seen.append(outputs)
                assert outputs == {}
                outputs["loss"] = 1
    assert type(seen[0]) is dict
    assert seen[0] is not seen[1]


def test_due_when_sees_the_outputs_of_the_body() -> None:
    class Watching(RecordingHook):
        def next_due(self) -> Due:
            return Due(when=lambda outputs: outputs["loss"] > 1)

    hook = Watching("loss")
    with MonitoredLoop(hooks=[hook]) as loop:
        make(loop, 1, 2, 1, 3)
    assert hook.results == [2, 3]


def test_the_last_outputs_are_released_before_the_next_body() -> None:
    with MonitoredLoop() as loop:
        with loop.step() as outputs:
            outputs["loss"] = torch.ones(3)
        kept = weakref.ref(outputs["loss"])
        with loop.step() as outputs:
            assert kept() is None


def test_the_outputs_are_released_when_the_loop_is_closed() -> None:
    with MonitoredLoop() as loop:
        with loop.step() as outputs:
            outputs["loss"] = torch.ones(3)
        kept = weakref.ref(outputs["loss"])
        del outputs
        assert kept() is not None
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("way", ["break", "continue", "return"])
def test_a_body_that_is_left_early_counts(way: str) -> None:
    hook = RecordingHook("loss")

    def train() -> None:
        for _ in range(1):
            with loop.step() as outputs:
                outputs["loss"] = 0.5
                if way == "break":
                    break
                if way == "continue":
                    continue
                return

    with MonitoredLoop(hooks=[hook]) as loop:
        train()
    assert hook.results == [0.5]
    assert "end" in methods(hook)


# -- values -----------------------------------------------------------------------------------------------------------


def test_any_fetch_works() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    hook = RecordingHook(["loss", "0.weight", "lr", "global_step", lambda loss: loss * 2, lambda outputs: len(outputs)])
    with MonitoredLoop(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), hooks=[hook]) as loop:
        make(loop, 2)
    loss, weight, *others = hook.results[0]
    assert (loss, others) == (2, [0.5, 1, 4, 1])
    assert torch.equal(weight, next(model.parameters()))


def test_submodules_are_watched_during_the_body() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    hook = RecordingHook(["0:input", "0:output", "0:grad"])
    with MonitoredLoop(model=model, hooks=[hook]) as loop, loop.step():
        result = model(torch.ones(1, 1))
        result.sum().backward()
    received, returned, grad = hook.results[0]
    assert (received.item(), returned.item(), grad.item()) == (1, result.item(), 1)
    assert hooks_on(model) == []


def test_a_body_is_traced_on_request() -> None:
    class Traces(SessionRunHook):
        def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
            return SessionRunArgs(options=RunOptions(trace=True))

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            self.options, self.profile = run_values.options, run_values.run_metadata.profile

    hook = Traces()
    with MonitoredLoop(hooks=[hook]) as loop, loop.step():
        torch.ones(2).add(1)
    assert hook.options == RunOptions(trace=True)
    assert "aten::add" in {event.key for event in hook.profile.key_averages()}


def test_session_run_sees_the_outputs_of_the_last_body() -> None:
    with MonitoredLoop() as loop:
        make(loop, 1, 2)
        assert loop.session.run("loss") == 2


def test_the_outputs_do_not_exist_before_the_body_has_ended() -> None:
    with MonitoredLoop() as loop:
        make(loop, 1)
        with loop.step() as outputs:
            outputs["loss"] = 2
            with pytest.raises(FetchError, match="only after a run"):
                loop.session.run("loss")


def test_a_fetch_that_the_body_did_not_put_into_the_outputs_is_an_error_that_says_how() -> None:
    with (
        pytest.raises(FetchError, match=r'outputs are an empty .* outputs\["loss"\] = loss'),
        MonitoredLoop(hooks=[RecordingHook("loss")]) as loop,
        loop.step() as outputs,
    ):
        outputs = {"loss": 0.5}  # noqa: F841 - the mistake
    assert loop.global_step == 1


def test_the_caller_passed_no_arguments() -> None:
    asked = []
    hook = During(before_run=lambda context: asked.append((context.original_args, context.inputs())))
    with MonitoredLoop(lambda x=7: x, hooks=[hook]) as loop, loop.step():
        pass
    assert asked == [(SessionRunArgs(None, {}), {})]


def test_an_argument_of_the_step_function_is_no_fetch_in_a_body() -> None:
    with (
        pytest.raises(FetchError, match="asked for 'x', which does not exist"),
        MonitoredLoop(lambda x=7: x, hooks=[RecordingHook("x")]) as loop,
        loop.step(),
    ):
        pass


# -- what only a function allows --------------------------------------------------------------------------------------


def test_a_hook_that_feeds_is_an_error_that_names_it_and_the_way_out() -> None:
    after, ran = RecordingHook(), False
    with (
        pytest.raises(
            FeedError, match=r"^FeedFnHook\(.*\) \(hook 0\) feeds 'x', but the body of step\(\) has no param"
        ),
        MonitoredLoop(hooks=[FeedFnHook(lambda: {"x": 1}), after]) as loop,
        loop.step(),
    ):
        ran = True
    assert not ran
    assert methods(after) == ["begin", "after_create_session", "before_run", "teardown"]


def test_an_empty_mapping_feeds_nothing() -> None:
    with MonitoredLoop(hooks=[FeedFnHook(dict)]) as loop, loop.step():
        pass
    assert loop.global_step == 1


def test_run_without_a_step_function_is_an_error_that_names_step_and_leaves_the_loop_alone() -> None:
    hook = RecordingHook()
    with MonitoredLoop(hooks=[hook]) as loop:
        with pytest.raises(
            LifecycleError, match=r"without a step function: make the step in the body of with loop\.st"
        ):
            loop.run(1, x=2)
        make(loop, 1)
    assert [method for method in methods(hook) if "run" in method] == ["before_run", "after_run"]


def test_run_with_hooks_without_a_step_function_is_the_same_error() -> None:
    with pytest.raises(LifecycleError, match="without a step function"), MonitoredLoop() as loop:
        loop.run_step_fn(lambda context: context.run_with_hooks())


def test_a_loop_with_a_step_function_makes_runs_of_both_kinds() -> None:
    hook = RecordingHook("loss")
    with MonitoredLoop(lambda loss: loss, hooks=[hook]) as loop:
        assert loop.run(1) == 1
        make(loop, 2)
        assert loop.run(3) == 3
    assert hook.results == [1, 2, 3]


def test_a_training_loop_needs_no_step_function_either(tmp_path: Path) -> None:
    with MonitoredTrainingLoop(model=Count(), checkpoint_dir=tmp_path) as loop:
        make(loop, 1, 2)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0, 2]


# -- stop -------------------------------------------------------------------------------------------------------------


def test_a_stop_that_the_body_requests_takes_effect_after_it() -> None:
    hook = RecordingHook("loss")
    with MonitoredLoop(hooks=[hook]) as loop:
        for loss in loop.until_stop([1, 2, 3]):
            with loop.step() as outputs:
                loop.request_stop("enough")
                outputs["loss"] = loss
    assert hook.results == [1]
    assert loop.stop_reason == "request_stop: enough"


@pytest.mark.parametrize("where", ["before_run", "body", "after_run"])
def test_stop_iteration_ends_the_loop_cleanly(where: str) -> None:
    def stop(*_: object) -> None:
        raise StopIteration

    first, hook = (During(**{where: stop}) if where != "body" else During()), RecordingHook()
    with MonitoredLoop(hooks=[first, hook]) as loop, loop.step():
        if where == "body":
            raise StopIteration
    assert "after_run" not in methods(hook)
    assert methods(hook)[-2:] == ["end", "teardown"]
    assert loop.global_step == (1 if where == "after_run" else 0)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_of_the_body_propagates_and_its_run_does_not_count(kind: type[BaseException]) -> None:
    hook, error = RecordingHook("0:output"), kind("broken")
    model = nn.Sequential(nn.Linear(1, 1))
    with MonitoredLoop(model=model, hooks=[hook]) as loop:
        with pytest.raises(kind) as raised, loop.step():
            raise error
        assert raised.value is error
        assert hooks_on(model) == []
        with loop.step():
            model(torch.ones(1))
    assert methods(hook)[2:] == ["before_run", "before_run", "after_run", "end", "teardown"]
    assert loop.global_step == 1


@pytest.mark.parametrize("method", ["before_run", "after_run"])
def test_an_error_of_a_hook_has_a_note_that_names_it(method: str) -> None:
    hook = RecordingHook(raises={method: ValueError("broken")})
    with pytest.raises(ValueError, match="broken") as raised, MonitoredLoop(hooks=[hook]) as loop, loop.step():
        pass
    assert f"in {method} of RecordingHook(" in raised.value.__notes__[0]
    assert "end" not in methods(hook)


def test_a_hook_that_fails_stops_watching_the_model() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    hooks = [RecordingHook("0:output"), FeedFnHook(lambda: {"x": 1})]
    with pytest.raises(FeedError), MonitoredLoop(model=model, hooks=hooks) as loop, loop.step():
        pass
    assert hooks_on(model) == []


def test_a_recording_that_cannot_be_stopped_is_noted_on_the_error_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(recording: object) -> None:
        raise OSError("profiler")

    monkeypatch.setattr("torchhooks.loop.requests.Recording.stop", stop)
    model = nn.Sequential(nn.Linear(1, 1))
    with (
        pytest.raises(ValueError, match="broken") as raised,
        MonitoredLoop(model=model, hooks=[RecordingHook("0:output")]) as loop,
        loop.step(),
    ):
        raise ValueError("broken")
    assert raised.value.__notes__[0] == "torchhooks: and while the body was left after this: OSError: profiler"


@pytest.mark.parametrize("loss", [math.nan, torch.tensor(math.nan)])
def test_a_nan_in_the_outputs_is_noticed_and_not_saved(loss: Any, tmp_path: Path) -> None:
    hooks = [CheckpointSaverHook(tmp_path, save_steps=1), NanTensorHook("loss")]
    with pytest.raises(NanLossDuringTrainingError, match="step 2"), MonitoredLoop(model=Count(), hooks=hooks) as loop:
        make(loop, 1.0, loss, 1.0)
    assert max(checkpoint.step for checkpoint in list_checkpoints(tmp_path)) == 1


def test_a_value_on_a_device_arrives_in_a_later_run() -> None:
    arrived: list[float] = []

    class Late(SessionRunHook):
        def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
            return SessionRunArgs("loss")

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            run_context.when_ready(run_values.results, lambda loss: arrived.append(loss.item()))

    with FakeDevice(lag=2), MonitoredLoop(hooks=[Late()]) as loop:
        for number in range(3):
            with loop.step() as outputs:
                outputs["loss"] = torch.tensor(float(number))
    assert arrived == [0, 1, 2]


# -- recovery ---------------------------------------------------------------------------------------------------------


def recoverable(folder: Path, model: nn.Module, *hooks: SessionRunHook, **arguments: Any) -> MonitoredLoop[Any]:
    saver = CheckpointSaverHook(folder, save_steps=1)
    return MonitoredLoop(model=model, hooks=[*hooks, saver], checkpoint_dir=folder, **arguments)


def made_again(lines: Lines) -> list[str]:
    return [text for level, text in lines if level == "WARNING" and "is not made again" in text]


def test_an_aborted_body_restores_the_session_and_the_loop_continues_with_the_next_item(
    tmp_path: Path, lines: Lines
) -> None:
    model, hook, items = Count(), RecordingHook("loss"), []
    with recoverable(tmp_path, model, hook) as loop:
        for item in loop.until_stop([1, 2, 3]):
            items.append(item)
            with loop.step() as outputs:
                model.w += item
                if item == 2:
                    raise AbortedError("lost")
                outputs["loss"] = item
    assert items == [1, 2, 3]
    assert hook.results == [1, 3]
    assert (model.w.item(), loop.global_step) == (4, 2)
    assert made_again(lines) == [
        "the run that failed is not made again, because only a step function can be called again: the loop continues "
        "after the body of step(), at global step 1"
    ]
    assert methods(hook).count("after_create_session") == 2


def test_an_aborted_after_run_restores_the_session_and_the_loop_continues(tmp_path: Path, lines: Lines) -> None:
    fails, hook = RecordingHook(raises={("after_run", 2): AbortedError}), RecordingHook("loss")
    with recoverable(tmp_path, Count(), fails, hook) as loop:
        make(loop, 1, 2, 3)
    assert hook.results == [1, 3]
    assert loop.global_step == 2
    assert len(made_again(lines)) == 1


def test_an_aborted_before_run_is_called_again_because_the_body_has_not_begun(tmp_path: Path, lines: Lines) -> None:
    bodies, hook = 0, RecordingHook(raises={("before_run", 2): AbortedError})
    with recoverable(tmp_path, Count(), hook) as loop:
        for _ in range(3):
            with loop.step():
                bodies += 1
    assert (bodies, loop.global_step) == (3, 3)
    assert methods(hook).count("raises") == 1
    assert made_again(lines) == []


def test_without_a_checkpoint_an_aborted_body_is_an_error() -> None:
    with pytest.raises(AbortedError), MonitoredLoop() as loop, loop.step():
        raise AbortedError


def test_a_body_that_succeeds_resets_the_pause_between_recoveries(tmp_path: Path, lines: Lines) -> None:
    with recoverable(tmp_path, Count()) as loop:
        for number in range(6):
            with loop.step():
                if number % 2:
                    raise AbortedError
    in_a_row = [text.rpartition("(")[2] for _, text in lines if text.startswith("recovering")]
    assert in_a_row == ["recovery 1 in a row)"] * 3


def test_recoveries_of_bodies_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchhooks.lifecycle.recovery._FIRST_PAUSE_SECS", 1e-4)
    with recoverable(tmp_path, Count(), max_recoveries=2) as loop:
        for _ in range(2):
            with loop.step():
                raise AbortedError
        with pytest.raises(AbortedError) as raised, loop.step():
            raise AbortedError
    assert "not recovered from, because of max_recoveries=2" in raised.value.__notes__[0]


def test_the_error_of_a_thread_is_recovered_from_after_the_body(tmp_path: Path) -> None:
    class Thread(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            self.coord = coord

    hook, model = Thread(), Count()
    with recoverable(tmp_path, model, hook) as loop:
        with loop.step():
            model.w += 1
            hook.coord.request_stop(AbortedError("in a thread"))
        assert not loop.should_stop()
        with loop.step():
            model.w += 1
    assert (model.w.item(), loop.global_step) == (2, 2)


def test_run_step_fn_calls_its_function_again_after_an_aborted_body(tmp_path: Path, lines: Lines) -> None:
    calls = 0

    def function(context: StepContext[Any]) -> int:
        nonlocal calls
        calls += 1
        with loop.step():
            if calls == 1:
                raise AbortedError
        return calls

    with recoverable(tmp_path, Count()) as loop:
        assert loop.run_step_fn(function) == 2
    assert loop.global_step == 1
    assert made_again(lines) == []


# -- wrong use --------------------------------------------------------------------------------------------------------


def nested_run(loop: MonitoredLoop[Any]) -> None:
    loop.run()


def nested_body(loop: MonitoredLoop[Any]) -> None:
    with loop.step():
        pytest.fail("the inner body was entered")


@pytest.mark.parametrize(("nested", "call"), [(nested_run, "run()"), (nested_body, "step()")])
def test_a_run_inside_a_body_is_refused_and_the_outer_one_continues(nested: Any, call: str) -> None:
    hook = RecordingHook("loss")
    with MonitoredLoop(lambda: 1, hooks=[hook]) as loop, loop.step() as outputs:
        with pytest.raises(LifecycleError) as raised:
            nested(loop)
        outputs["loss"] = 0.5
    assert str(raised.value).startswith(f"{call} was called inside")
    assert hook.results == [0.5]


@pytest.mark.parametrize("where", ["before_run", "step", "after_run"])
def test_a_body_inside_a_run_is_refused(where: str) -> None:
    loop: MonitoredLoop[Any]

    def nest(*_: object) -> None:
        with pytest.raises(LifecycleError, match=r"^step\(\) .* inside a run"):
            nested_body(loop)

    hooks = [During(**{where: nest})] if where != "step" else []
    with MonitoredLoop(nest if where == "step" else bool, hooks=hooks) as loop:
        loop.run()
    assert loop.global_step == 1


def test_the_object_can_be_entered_once() -> None:
    with MonitoredLoop() as loop:
        step = loop.step()
        with step:
            pass
        with (
            pytest.raises(LifecycleError, match=r"step\(\) returned was entered twice: write with loop\.step\(\)"),
            step,
        ):
            pytest.fail("the body was entered")
        make(loop, 1)
    assert loop.global_step == 2


def test_closing_the_loop_inside_a_body_is_refused() -> None:
    with MonitoredLoop() as loop, loop.step(), pytest.raises(LifecycleError, match="inside a run: to end the loop"):
        loop.close()
    assert loop.global_step == 1


def test_a_body_that_is_not_left_before_the_loop_is_an_error() -> None:
    hook, model = RecordingHook("0:output"), nn.Sequential(nn.Linear(1, 1))
    with contextlib.ExitStack() as stack:
        with (
            pytest.raises(LifecycleError, match=r"closed inside a body of step\(\), whose run does not count"),
            MonitoredLoop(model=model, hooks=[hook]) as loop,
        ):
            stack.enter_context(loop.step())
        assert hooks_on(model) == []
    assert methods(hook) == ["begin", "after_create_session", "before_run", "teardown"]
    assert loop.global_step == 0


def test_an_error_that_leaves_a_loop_with_an_unfinished_body_stays_the_error() -> None:
    hook = RecordingHook()
    loop = MonitoredLoop[Any](hooks=[hook])
    body = loop.step()
    body.__enter__()
    with pytest.raises(ValueError, match="broken") as raised, loop:
        raise ValueError("broken")
    assert not hasattr(raised.value, "__notes__")
    assert methods(hook)[-2:] == ["before_run", "teardown"]


def test_the_run_of_a_generator_that_is_closed_in_its_body_does_not_count_and_a_line_says_so(lines: Lines) -> None:
    hook = RecordingHook()

    def bodies(loop: MonitoredLoop[Any]) -> Iterator[dict[str, Any]]:
        while True:
            with loop.step() as outputs:
                yield outputs

    with MonitoredLoop(hooks=[hook]) as loop:
        for _ in bodies(loop):
            break
    assert methods(hook) == ["begin", "after_create_session", "before_run", "end", "teardown"]
    assert loop.global_step == 0
    assert [level for level, text in lines if "because the generator that contains it was closed" in text] == ["ERROR"]


def test_an_evaluation_in_a_body_iterates_over_until_stop() -> None:
    with MonitoredLoop() as loop:
        for _ in loop.until_stop(range(2)):
            with loop.step() as outputs:
                outputs["loss"] = sum(loop.until_stop([1, 2]))
    assert (loop.global_step, loop.stop_reason) == (2, "data ended")


def test_data_without_a_run_are_warned_about(lines: Lines) -> None:
    with MonitoredLoop() as loop:
        for _ in loop.until_stop(range(3)):
            pass
    assert "with loop.step()" in lines[-1][1]


def test_a_loop_returns_the_same_object_each_time() -> None:
    # Creating one in each run would double the cost of an idle run.
    with MonitoredLoop() as loop:
        assert isinstance(loop.step(), Body)
        assert loop.step() is loop.step()


def test_running_values_are_added_up_in_every_body(lines: list[tuple[str, str]]) -> None:
    hook = LoggingTensorHook({"mean": running_mean("loss")}, every_n_iter=3)
    with MonitoredLoop(hooks=[hook]) as loop:
        for loss in loop.until_stop([1.0, 2.0, 3.0, 6.0]):
            with loop.step() as outputs:
                outputs["loss"] = loss
    assert [text.split(" (")[0] for _, text in lines if text.startswith("mean")] == ["mean = 1.0", f"mean = {11 / 3}"]


# -- StopIteration ----------------------------------------------------------------------------------------------------


def test_a_stop_iteration_of_the_body_reaches_the_try_of_the_caller_and_the_loop_goes_on() -> None:
    data, passes, hook = iter([1.0, 2.0]), 0, RecordingHook("loss")
    with MonitoredLoop(hooks=[hook, StopAtStepHook(last_step=5)]) as loop:
        while not loop.should_stop():
            try:
                with loop.step() as outputs:
                    outputs["loss"] = next(data)
            except StopIteration:
                data, passes = iter([1.0, 2.0]), passes + 1
    assert (loop.global_step, passes, loop.stop_reason) == (5, 2, "StopAtStepHook: step 5")
    assert [call[0] for call in hook.calls].count("after_run") == 5
    assert [call[0] for call in hook.calls].count("end") == 1


def test_a_stop_iteration_of_the_step_function_is_a_clean_end_with_a_warning(lines: list[tuple[str, str]]) -> None:
    data = iter([1.0])
    with MonitoredLoop(lambda: next(data)) as loop:
        for _ in range(3):
            loop.run()
    assert loop.global_step == 1
    (warning,) = [text for level, text in lines if level == "WARNING"]
    assert warning.startswith("the step raised StopIteration (test_body.py:")
