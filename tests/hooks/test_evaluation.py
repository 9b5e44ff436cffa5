"""EvaluationHook: when it evaluates, what it leaves undisturbed, and where the results go."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.devices import FakeDevice
from support.events import steps as steps_of

from torchhooks import (
    AbortedError,
    BestCheckpointHook,
    CheckpointSaverHook,
    EvaluationHook,
    EverySteps,
    FetchError,
    FinalOpsHook,
    JsonLinesWriter,
    LifecycleError,
    LoggingTensorHook,
    MonitoredLoop,
    NeverTriggerTimer,
    SecondOrStepTimer,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    StopIfHigherHook,
    list_checkpoints,
    over_ranks,
)
from torchhooks.testing import FakeClock, RecordingHook, RecordingWriter, log_lines, plain, trace

Timer = EverySteps | SecondOrStepTimer | NeverTriggerTimer


class Evaluating:
    """A function to evaluate, which returns the step, and records the steps at which it was called."""

    def __init__(self, **results: Any) -> None:
        self.results = results
        self.steps: list[int] = []

    def __call__(self, global_step: int) -> dict[str, Any]:
        self.steps.append(global_step)
        return {"accuracy": global_step / 100, **self.results}


def evaluated_at(hook: Callable[[Evaluating], EvaluationHook], runs: int = 9, **given: Any) -> list[int]:
    evaluate = Evaluating()
    trace(hook(evaluate), losses=[0.1] * runs, **given)
    return evaluate.steps


# -- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "steps"), [(0, [4, 8]), (101, [104, 108]), (100, [104, 108])])
@pytest.mark.parametrize("given", [{"every_n_steps": 4}, {"timer": EverySteps(4)}], ids=repr)
def test_evaluates_at_multiples_of_the_period(given: dict[str, Any], start: int, steps: list[int]) -> None:
    assert evaluated_at(lambda evaluate: EvaluationHook(evaluate, **given), start_step=start) == steps


@pytest.mark.parametrize(
    ("timer", "steps"),
    [(SecondOrStepTimer(every_steps=4), [4, 8]), (SecondOrStepTimer(every_secs=3), [4, 8])],
    ids=repr,
)
def test_the_first_period_of_a_timer_begins_with_the_session(timer: Timer, steps: list[int]) -> None:
    # A period in seconds that ends during a run is noticed at the beginning of the next one.
    assert evaluated_at(lambda evaluate: EvaluationHook(evaluate, timer=timer)) == steps


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"at_start": True}, [0]),
        ({"at_end": True}, [9]),
        ({"every_n_steps": 3, "at_start": True, "at_end": True}, [0, 3, 6, 9]),
        ({"timer": NeverTriggerTimer(), "at_end": True}, [9]),
    ],
    ids=repr,
)
def test_evaluates_at_the_start_and_at_the_end(given: dict[str, Any], steps: list[int]) -> None:
    assert evaluated_at(lambda evaluate: EvaluationHook(evaluate, **given)) == steps


def test_a_loop_that_failed_does_not_evaluate_at_its_end() -> None:
    evaluate = Evaluating()
    trace(EvaluationHook(evaluate, at_end=True), losses=[0.1, ValueError], catch=ValueError)
    assert evaluate.steps == []


def test_a_loop_without_a_run_evaluates_its_state_once() -> None:
    evaluate = Evaluating()
    trace(EvaluationHook(evaluate, at_start=True, at_end=True), losses=[])
    assert evaluate.steps == [0]


def test_with_accumulated_gradients_each_step_is_evaluated_once() -> None:
    evaluate, runs = Evaluating(), []
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        runs.append(1)
        if len(runs) % 3 == 0:
            optimizer.step()

    hook = EvaluationHook(evaluate, every_n_steps=2)
    with MonitoredLoop(step, model, optimizer, hooks=[hook], step_unit="optimizer_step") as loop:
        for _ in range(14):
            loop.run()
            assert len(evaluate.steps) == (len(runs) >= 6) + (len(runs) >= 12)
    assert evaluate.steps == [2, 4]


def test_after_a_recovery_a_step_that_is_made_again_is_evaluated_again(tmp_path: Path) -> None:
    evaluate, writer = Evaluating(), JsonLinesWriter(tmp_path / "log")
    hooks = [
        CheckpointSaverHook(tmp_path, save_steps=3),
        EvaluationHook(evaluate, every_n_steps=2, at_start=True, summary_writer=writer),
    ]
    trace(*hooks, losses=[0.1] * 4 + [AbortedError] + [0.1] * 3, checkpoint_dir=tmp_path)
    assert evaluate.steps == [0, 2, 4, 4, 6]


def test_runs_between_two_evaluations_are_idle() -> None:
    calls: list[int] = []

    class Counted(EvaluationHook):
        def before_run(self, run_context: Any) -> Any:
            calls.append(run_context.session.global_step + 1)
            return super().before_run(run_context)

    trace(Counted(Evaluating(), every_n_steps=4), losses=[0.1] * 9)
    assert calls == [1, 4, 8]  # in the first run it opens the curves


# -- what it leaves undisturbed ---------------------------------------------------------------------------------------


class Training:
    """A loop whose evaluation looks at the modes and changes all that an evaluation can change."""

    def __init__(self, *hooks: SessionRunHook, raises: BaseException | None = None, **given: Any) -> None:
        frozen = torch.nn.Dropout().eval()
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout(), frozen)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.raises = raises
        self.seen: list[tuple[bool, bool]] = []
        hook = EvaluationHook(self.evaluate, every_n_steps=2, at_end=True)
        self.loop = MonitoredLoop(self.step, self.model, self.optimizer, hooks=[*hooks, hook], **given)

    def evaluate(self, model: torch.nn.Module) -> torch.Tensor:
        value: torch.Tensor = model(torch.ones(3, 2)).sum()
        self.seen.append((any(module.training for module in model.modules()), value.requires_grad))
        model.train()
        self.optimizer.zero_grad()
        random.random()
        np.random.rand()
        torch.rand(1)
        raises, self.raises = self.raises, None
        if raises is not None:
            raise raises
        return value

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 2)).sum().backward()
        self.optimizer.step()
        self.gradients = [parameter.grad for parameter in self.model.parameters()]
        self.drawn = self.random_states()

    def random_states(self) -> str:
        return repr(plain((random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state())))

    def check_undisturbed(self) -> None:
        assert [module.training for module in self.model.modules()] == [True, True, True, False]
        assert all(p.grad is gradient for p, gradient in zip(self.model.parameters(), self.gradients, strict=True))
        assert self.random_states() == self.drawn


def test_the_model_is_in_evaluation_mode_without_gradients_and_nothing_is_disturbed() -> None:
    training = Training()
    with training.loop as loop:
        for _ in range(3):
            loop.run()
            training.check_undisturbed()
    training.check_undisturbed()
    assert training.seen == [(False, False), (False, False)]  # at step 2 and at the end


@pytest.mark.parametrize("runs", [1, 2])
def test_an_evaluation_that_raises_disturbs_nothing_either(runs: int) -> None:
    training = Training(raises=KeyError("no data"))
    for _ in range(runs - 1):
        training.loop.run()
    with pytest.raises(KeyError), training.loop as loop:  # in the run, or at the end
        loop.run()
    training.check_undisturbed()


def test_an_evaluation_that_failed_is_made_again_after_a_recovery(tmp_path: Path) -> None:
    saver = CheckpointSaverHook(tmp_path, save_steps=1)
    training = Training(saver, raises=AbortedError(), checkpoint_dir=tmp_path)
    with training.loop as loop:
        loop.run()
        loop.run()
        training.check_undisturbed()
    assert len(training.seen) == 2


def test_the_time_of_an_evaluation_is_not_counted() -> None:
    writer = RecordingWriter()
    clock = FakeClock()

    def evaluate() -> float:
        clock.advance(50.0)
        return 0.5

    hooks = [EvaluationHook(evaluate, every_n_steps=1), StepCounterHook(2, summary_writer=writer)]
    with clock, MonitoredLoop(lambda: clock.advance(1.0), hooks=hooks) as loop:
        for _ in range(5):
            loop.run()
    assert writer.scalars == {"global_step/sec": [(3, 1.0), (5, 1.0)]}


# -- the results ------------------------------------------------------------------------------------------------------


def test_the_results_are_logged_written_and_kept() -> None:
    writer = RecordingWriter()
    hook = EvaluationHook(Evaluating(loss=torch.tensor(0.1)), every_n_steps=4, summary_writer=writer)
    ran = trace(hook, losses=[0.1] * 9)
    assert [text for _, text in ran.lines if text.startswith("evaluation")] == [
        "evaluation at step 4: accuracy = 0.04, loss = 0.1",
        "evaluation at step 8: accuracy = 0.08, loss = 0.1",
    ]
    assert {tag: [step for step, _ in points] for tag, points in writer.scalars.items()} == {
        "accuracy": [4, 8],
        "loss": [4, 8],
    }
    assert hook.values == {"accuracy": 0.08, "loss": pytest.approx(0.1)}
    assert all(type(value) is float for value in hook.values.values())


def test_the_results_are_in_an_event_file(tmp_path: Path) -> None:
    trace(EvaluationHook(Evaluating(), every_n_steps=4, output_dir=tmp_path), losses=[0.1] * 9)
    assert steps_of(tmp_path, "accuracy") == [4, 8]


def test_a_resumed_training_run_replaces_the_later_points_of_the_first(tmp_path: Path) -> None:
    for losses, start in (([0.1] * 9, 0), ([0.1] * 4, 3)):
        hook = EvaluationHook(Evaluating(), every_n_steps=2, output_dir=tmp_path)
        trace(hook, losses=losses, start_step=start)
    assert steps_of(tmp_path, "accuracy") == [2, 4, 6]


@pytest.mark.parametrize("start", [0, 3])
def test_the_point_before_the_first_run_stays(start: int, tmp_path: Path) -> None:
    file = JsonLinesWriter(tmp_path / "log.jsonl")
    places: list[dict[str, Any]] = [{"summary_writer": file}, {"output_dir": tmp_path}]
    for writer in places:
        hook = EvaluationHook(Evaluating(), every_n_steps=2, at_start=True, **writer)
        trace(hook, losses=[0.1] * 3, start_step=start)
    steps = [start, *([2] if start == 0 else [4, 6])]
    assert steps_of(tmp_path, "accuracy") == steps
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "accuracy" in line] == steps


def measure() -> float:
    return 0.5


@pytest.mark.parametrize(("evaluate", "name"), [(measure, "measure"), (lambda: 0.5, "evaluation")])
def test_a_single_number_has_the_name_of_the_function(evaluate: Callable[[], float], name: str) -> None:
    hook = EvaluationHook(evaluate, at_end=True)
    trace(hook)
    assert hook.values == {name: 0.5}


@pytest.mark.parametrize("value", [torch.ones(3), "good", None, [1.0]], ids=repr)
def test_a_result_that_is_not_one_number_is_an_error_of_that_run(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"returned \{'accuracy': .* one number"):
        trace(EvaluationHook(Evaluating(accuracy=value), every_n_steps=2))


def test_values_are_forgotten_when_the_hook_is_used_again() -> None:
    hook = EvaluationHook(Evaluating(), at_end=True)
    trace(hook)
    with MonitoredLoop(lambda: None, hooks=[hook]):
        assert hook.values == {}


# -- other hooks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_the_best_checkpoint_shares_the_evaluation(first: bool, tmp_path: Path) -> None:
    evaluate = Evaluating()
    evaluation = EvaluationHook(evaluate, every_n_steps=4)
    best = BestCheckpointHook(tmp_path, evaluation["accuracy"], save_steps=4, mode="max", keep=9)
    ran = trace(*([evaluation, best] if first else [best, evaluation]), losses=[0.1] * 9)
    assert evaluate.steps == [4, 8, 9]
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "best")] == [4, 8, 9]
    assert any(text.startswith("evaluation['accuracy'] = 0.04: saving") for _, text in ran.lines)
    assert evaluation.values == {"accuracy": 0.09}  # at the end, for the best checkpoint


def test_a_request_at_another_step_is_the_latest_result_and_never_evaluates(tmp_path: Path) -> None:
    """Twenty validations in twenty steps, because a log was more frequent than the evaluation."""
    evaluate, hook = Evaluating(), RecordingHook()
    evaluation = EvaluationHook(evaluate, every_n_steps=4)
    fetching = RecordingHook(evaluation["accuracy"])
    trace(fetching, evaluation, hook, losses=[0.1] * 9)
    assert evaluate.steps == [4, 8]
    seen = fetching.results
    assert all(map(math.isnan, seen[:3])), seen
    assert seen[3:] == [0.04] * 4 + [0.08] * 2


def test_the_latest_result_on_a_device_is_read_back() -> None:
    with FakeDevice(lag=2), log_lines() as lines:
        evaluation = EvaluationHook(lambda: {"x": torch.tensor(0.5)}, every_n_steps=2)
        display = LoggingTensorHook([evaluation["x"]], timer=EverySteps(3))
        trace(evaluation, display, losses=[0.1] * 9)
    assert [text.partition(" (")[0] for _, text in lines if text.startswith("x = ")] == ["x = 0.5"] * 3


def test_the_latest_result_is_that_of_the_process_before(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        evaluation = EvaluationHook(Evaluating(), every_n_steps=4)
        fetching = RecordingHook(evaluation["accuracy"])
        saver = CheckpointSaverHook(tmp_path, save_steps=1)
        trace(fetching, evaluation, saver, losses=[0.1] * 5, checkpoint_dir=tmp_path)
        results.append(fetching.results)
    assert results[1] == [0.04, 0.04, 0.08, 0.08, 0.08]


@pytest.mark.parametrize("first", [True, False])
def test_a_request_in_a_run_in_which_the_evaluation_is_due_is_its_result(first: bool) -> None:
    evaluate = Evaluating()
    evaluation = EvaluationHook(evaluate, every_n_steps=2)
    fetching = RecordingHook(evaluation["accuracy"])
    trace(*([evaluation, fetching] if first else [fetching, evaluation]), losses=[0.1] * 4)
    assert evaluate.steps == [2, 4]
    assert fetching.results[1:] == [0.02, 0.02, 0.04]


@pytest.mark.parametrize("metric", [None, "over_ranks"])
def test_the_best_checkpoint_is_due_with_the_evaluation(metric: str | None, tmp_path: Path) -> None:
    evaluate = Evaluating()
    evaluation = EvaluationHook(evaluate, every_n_steps=4)
    value = evaluation["accuracy"] if metric is None else over_ranks(evaluation["accuracy"], "mean")
    best = BestCheckpointHook(tmp_path, value, mode="max", keep=9)
    trace(best, evaluation, losses=[0.1] * 9)
    assert evaluate.steps == [4, 8]
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "best")] == [4, 8]


def test_a_best_checkpoint_of_another_period_keeps_no_state_that_was_not_evaluated(tmp_path: Path) -> None:
    evaluation = EvaluationHook(Evaluating(), every_n_steps=4)
    best = BestCheckpointHook(tmp_path, evaluation["accuracy"], save_steps=2, mode="max", keep=9)
    ran = trace(evaluation, best, losses=[0.1] * 8)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "best")] == [4, 8]
    (warning,) = [text for level, text in ran.lines if level == "WARNING" and "is due" in text]
    assert "is due at step 2, which the evaluation has not evaluated: that state is not compared. Leave out" in warning


def test_an_evaluation_at_the_start_is_not_made_again_in_a_resumed_process(tmp_path: Path) -> None:
    evaluate = Evaluating()
    for _ in range(3):
        evaluation = EvaluationHook(evaluate, every_n_steps=100, at_start=True)
        saver = CheckpointSaverHook(tmp_path, save_steps=100)
        trace(evaluation, saver, losses=[0.1] * 2, checkpoint_dir=tmp_path)
        assert evaluation.values == {"accuracy": 0.0}
    assert evaluate.steps == [0]


def test_modules_in_the_state_are_in_evaluation_mode_too() -> None:
    model = torch.nn.Linear(1, 1)
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Sequential(model, torch.nn.Dropout(0.5)))
    seen = []

    def evaluate() -> float:
        seen.append([module.training for module in [model, *average.modules()]])
        return 0.0

    hooks = [EvaluationHook(evaluate, every_n_steps=1)]
    with MonitoredLoop(lambda: None, model, hooks=hooks, state={"average": average}) as loop:
        loop.run()
    assert seen == [[False] * 5]
    assert all(module.training for module in [model, *average.modules()])


def test_a_request_of_now_evaluates_that_step_and_is_reported_with_the_next(tmp_path: Path) -> None:
    evaluate, writer = Evaluating(), RecordingWriter()
    evaluation = EvaluationHook(evaluate, every_n_steps=4, summary_writer=writer)
    logging = LoggingTensorHook({"a": evaluation.now["accuracy"]}, timer=EverySteps(3))
    trace(logging, evaluation, losses=[0.1] * 9)
    assert evaluate.steps == [3, 4, 6, 8, 9]
    assert writer.scalars == {"accuracy": [(step, step / 100) for step in (3, 4, 6, 8, 9)]}


def test_a_request_at_another_step_is_reported_also_if_a_recovery_follows(tmp_path: Path) -> None:
    evaluate, writer = Evaluating(), RecordingWriter()
    evaluation = EvaluationHook(evaluate, every_n_steps=6, summary_writer=writer)
    logging = LoggingTensorHook({"a": evaluation.now["accuracy"]}, timer=EverySteps(2))
    saver = CheckpointSaverHook(tmp_path, save_steps=3)
    trace(logging, evaluation, saver, losses=[0.1] * 4 + [AbortedError] + [0.1] * 3, checkpoint_dir=tmp_path)
    assert evaluate.steps == [2, 4, 4, 6]
    assert writer.scalars == {"accuracy": [(step, step / 100) for step in (2, 4, 6)]}


def test_a_request_of_a_hook_that_ends_later_is_reported_too() -> None:
    evaluate = Evaluating()
    evaluation = EvaluationHook(evaluate, timer=NeverTriggerTimer())
    final = FinalOpsHook(evaluation.now["accuracy"])
    assert repr(evaluation.now["accuracy"]) == "evaluation.now['accuracy']"
    trace(evaluation, final, losses=[0.1] * 9)
    assert (final.final_ops_values, evaluation.values) == (0.09, {"accuracy": 0.09})


def test_a_result_that_does_not_exist_is_an_error_with_a_suggestion() -> None:
    evaluation = EvaluationHook(Evaluating(), every_n_steps=2)
    with pytest.raises(FetchError, match=r"evaluation\['acuracy'\] was .* Did you mean 'accuracy'\? It returned: acc"):
        trace(evaluation, LoggingTensorHook({"a": evaluation["acuracy"]}, timer=EverySteps(2)))


def no_results() -> dict[str, float]:
    return {}


def test_a_result_of_an_evaluation_without_results_is_an_error() -> None:
    evaluation = EvaluationHook(no_results, every_n_steps=2)
    with pytest.raises(FetchError, match=r"the evaluation returned no 'accuracy'\. It returned an empty dict\."):
        trace(evaluation, LoggingTensorHook({"a": evaluation["accuracy"]}, timer=EverySteps(2)))


def test_an_evaluation_without_results_is_logged() -> None:
    lines = trace(EvaluationHook(no_results, every_n_steps=2), losses=[0.1] * 2).lines
    assert lines == [("INFO", "evaluation at step 2: no values")]


def test_a_result_of_an_evaluation_that_is_not_in_the_loop_is_an_error() -> None:
    evaluation = EvaluationHook(Evaluating(), every_n_steps=2)
    with pytest.raises(LifecycleError, match=r"EvaluationHook\(.*\) is not in this loop: add it to hooks"):
        trace(LoggingTensorHook({"a": evaluation["accuracy"]}, timer=EverySteps(2)))


# -- on a device ------------------------------------------------------------------------------------------------------


def test_results_on_a_device_are_not_waited_for() -> None:
    writer, accuracy = RecordingWriter(), torch.tensor(0.5)
    evaluation = EvaluationHook(lambda: accuracy + 0.25, every_n_steps=2, at_start=True, summary_writer=writer)
    stop = StopIfHigherHook(evaluation["evaluation"], 0.9)
    model, waits = torch.nn.Linear(1, 1), []
    with FakeDevice(lag=3) as device:
        loop = MonitoredLoop(lambda: None, model, hooks=[evaluation, stop])
        for _ in range(9):
            loop.run()
        waits.append(device.waits)
        loop.close()
    assert waits == [0]
    assert writer.scalars == {"evaluation": [(step, 0.75) for step in (0, 2, 4, 6, 8)]}


def test_results_on_a_device_at_the_end_are_read_from_it() -> None:
    evaluation = EvaluationHook(lambda: torch.tensor(0.5), at_end=True)
    with FakeDevice(lag=3), log_lines() as lines, MonitoredLoop(lambda: None, hooks=[evaluation]) as loop:
        loop.run()
    assert evaluation.values == {"evaluation": 0.5}
    assert ("INFO", "evaluation at step 1: evaluation = 0.5") in lines


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "EvaluationHook never evaluates"),
        ({"every_n_steps": 0}, "every_n_steps=0:"),
        ({"every_n_steps": 2, "timer": EverySteps(2)}, "every_n_steps=2, timer=EverySteps(2): give"),
        ({"at_end": True, "output_dir": "a", "summary_writer": 3}, "output_dir='a', summary_writer=3: give one"),
    ],
)
def test_refuses_invalid_arguments_and_shows_them(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        EvaluationHook(measure, **arguments)


def test_refuses_what_is_not_a_function_or_a_timer() -> None:
    with pytest.raises(TypeError, match="evaluate=3: must be a function"):
        EvaluationHook(3, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"<lambda>.*: it would be called without arguments"):
        EvaluationHook(lambda *args: 0.5, 5)
    with pytest.raises(TypeError, match="timer=5: must be an EverySteps"):
        EvaluationHook(measure, timer=5)  # type: ignore[arg-type]


def test_repr_shows_the_arguments() -> None:
    assert re.fullmatch(
        r"EvaluationHook\(<function measure at .*>, every_n_steps=5, at_end=True\)",
        repr(EvaluationHook(measure, 5, at_end=True)),
    )


# -- errors of the function -------------------------------------------------------------------------------------------


def failing(model: Any) -> float:
    raise KeyError("mine")


@pytest.mark.parametrize("requested", [False, True], ids=["its own hook", "another hook"])
def test_a_note_on_an_error_of_the_function_names_the_function(requested: bool) -> None:
    evaluation = EvaluationHook(failing, every_n_steps=1 if not requested else 100)
    hooks = [evaluation, LoggingTensorHook([evaluation.now["failing"]], 1)] if requested else [evaluation]
    error = trace(*hooks, catch=KeyError).error
    assert error is not None
    notes = "".join(error.__notes__)
    asking = "LoggingTensorHook" if requested else "EvaluationHook"
    assert re.search(rf"in the evaluation failing \({re.escape(Path(__file__).name)}:\d+\), which {asking}\(", notes)
    assert "EvaluationHook.current" not in notes
    assert notes.count("available names") == 1


def test_a_value_before_the_first_evaluation_is_an_error_that_names_the_guard() -> None:
    evaluation = EvaluationHook(lambda: {"error": 1.0}, every_n_epochs=1)
    with MonitoredLoop(lambda: None, hooks=[evaluation, StopAtStepHook(last_step=1)]) as loop:
        for _ in loop.until_stop(range(3)):
            loop.run()
        with pytest.raises(KeyError, match=r"nothing was evaluated yet.* if loop\.should_stop\(\): break"):
            evaluation.values["error"]


def test_a_value_that_the_evaluation_does_not_return_is_an_error_that_names_the_values() -> None:
    evaluation = EvaluationHook(lambda: {"error": 1.0, "recall": 0.5}, every_n_steps=1)
    with MonitoredLoop(lambda: None, hooks=[evaluation]) as loop:
        loop.run()
        with pytest.raises(KeyError, match="accuracy: the evaluation returned error, recall"):
            evaluation.values["accuracy"]


def test_without_log_the_results_are_for_other_hooks_only() -> None:
    evaluation = EvaluationHook(lambda global_step: {"error": 1 / global_step}, every_n_steps=2, log=False)
    display = LoggingTensorHook({"error": evaluation["error"]}, every_n_steps=2)
    assert [line for _, line in trace(evaluation, display, losses=[0.1] * 2).lines] == ["error = 0.5"]
