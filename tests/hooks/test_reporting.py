"""Hooks that report: steps per second, values in log lines, values at the end."""

from __future__ import annotations

import functools
import math
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.events import curve
from support.packages import import_or_skip

from torchhooks import (
    EverySteps,
    FinalOpsHook,
    LoggingTensorHook,
    MonitoredLoop,
    ProgressBarHook,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    SummaryWriterCache,
    grad_norm,
)
from torchhooks.common.trees import map_leaves
from torchhooks.testing import FakeClock, RecordingHook, RecordingWriter, log_lines, trace

RATE = "global_step/sec"


def lines_of(hook: SessionRunHook, *losses: Any, **arguments: Any) -> list[str]:
    return [text for _, text in trace(hook, losses=losses, **arguments).lines]


# -- StepCounterHook --------------------------------------------------------------------------------------------------


def count_steps(hook: SessionRunHook, moves: Sequence[int | None], secs: float = 1.0) -> list[tuple[str, str]]:
    """Return the lines of a loop whose runs advance the step by the given numbers, or set it back to 0 for None."""
    with FakeClock() as clock, log_lines() as lines:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.0)

        def step(move: int | None) -> None:
            clock.advance(secs)
            if move is None:
                loop.session.global_step = 0
            for _ in range(move or 0):
                optimizer.step()

        with MonitoredLoop(step, None, optimizer, hooks=[hook], step_unit="optimizer_step") as loop:
            for move in moves:
                loop.run(move)
    return lines


def rates(lines: list[tuple[str, str]]) -> list[str]:
    return [text.removeprefix(f"{RATE}: ") for _, text in lines if text.startswith(RATE)]


def warnings(lines: list[tuple[str, str]]) -> list[str]:
    return [text for level, text in lines if level == "WARNING"]


@pytest.mark.parametrize(
    ("moves", "reported"),
    [
        ([1, 4, 4, 4], ["4", "4", "4"]),  # more steps in a run than a period has
        ([1, 0, 0, 2, 1], ["0.75"]),  # the actual steps over the actual time
        ([3, 1, 1, 1], ["1"]),  # the period begins at 3, not at 1
        ([2, 2, 2, 2], ["2"]),
    ],
)
def test_the_rate_is_that_of_the_actual_steps(moves: list[int], reported: list[str]) -> None:
    assert rates(count_steps(StepCounterHook(3), moves)) == reported


def test_a_period_in_which_the_step_went_back_has_no_rate() -> None:
    # From the trigger at 5 to the one at 4, by the clock: minus one step.
    assert rates(count_steps(StepCounterHook(None, 4.0), [5, 1, None, 1, 3, 1, 1, 1, 1])) == ["1"]


def test_a_period_in_which_no_time_passed_has_no_rate() -> None:
    assert lines_of(StepCounterHook(1), 0.1, 0.1, secs=0.0) == []


@pytest.mark.parametrize("hook", [StepCounterHook(3), StepCounterHook(None, 3.0)], ids=repr)
def test_a_whole_period_without_a_step_is_warned_about_once(hook: StepCounterHook) -> None:
    (warning,) = warnings(count_steps(hook, [0] * 20))
    assert "the global step has been 0 for a whole period" in warning
    assert 'step_unit="run"' in warning


@pytest.mark.parametrize("hook", [StepCounterHook(3), StepCounterHook(None, 3.0)], ids=repr)
@pytest.mark.parametrize("moves", [[1, 0] * 10, [0, 0, 1] * 10, [0, 0, 3] * 10, [1] * 10])
def test_a_few_runs_that_start_at_the_same_step_are_not_warned_about(hook: StepCounterHook, moves: list[int]) -> None:
    assert warnings(count_steps(hook, moves)) == []


def test_steps_that_stop_later_are_warned_about() -> None:
    assert len(warnings(count_steps(StepCounterHook(3), [1] * 8 + [0] * 8))) == 1


def test_a_reused_counter_starts_from_scratch() -> None:
    hook = StepCounterHook(2)
    assert lines_of(hook, *[0.1] * 3, secs=1.0) == lines_of(hook, *[0.1] * 3, secs=1.0)


def test_a_reused_counter_can_warn_again() -> None:
    hook = StepCounterHook(2)
    assert warnings(count_steps(hook, [0] * 9)) == warnings(count_steps(hook, [0] * 9)) != []


def test_a_counter_without_a_writer_only_logs() -> None:
    assert lines_of(StepCounterHook(1), 0.1, 0.1) == [f"{RATE}: 1"]


def test_tensorboard_reads_the_curve(tmp_path: Path) -> None:
    trace(StepCounterHook(2, output_dir=tmp_path), losses=[0.1] * 5, secs=0.25)
    assert curve(tmp_path, RATE) == [(3, 4.0), (5, 4.0)]


WAYS_OUT: dict[str, Any] = {
    "the data ends": {},
    "a stop": {"hook": StopAtStepHook(last_step=4)},
    "StopIteration in the step": {"losses": [StopIteration]},
    "an error in the step": {"losses": [ValueError]},
    "an interrupt": {"losses": [KeyboardInterrupt]},
    "an error in a hook": {"hook": RecordingHook(raises={("after_run", 4): ValueError})},
    "an error in an end": {"hook": RecordingHook(raises={"end": ValueError})},
    "an error in a teardown": {"hook": RecordingHook(raises={"teardown": ValueError})},
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_the_curve_is_in_the_file_on_every_way_out(way: str, tmp_path: Path) -> None:
    others = [WAYS_OUT[way]["hook"]] if "hook" in WAYS_OUT[way] else []
    losses = [0.1] * 4 + WAYS_OUT[way].get("losses", [])
    trace(*others, StepCounterHook(1, output_dir=tmp_path), losses=losses, catch=(ValueError, KeyboardInterrupt))
    assert [step for step, _ in curve(tmp_path, RATE)][:2] == [2, 3]


@pytest.mark.parametrize("way", WAYS_OUT)
def test_a_writer_that_the_hook_opened_is_closed_on_every_way_out(way: str, tmp_path: Path) -> None:
    writer = SummaryWriterCache.get(tmp_path)
    others = [WAYS_OUT[way]["hook"]] if "hook" in WAYS_OUT[way] else []
    losses = [0.1] * 4 + WAYS_OUT[way].get("losses", [])
    trace(*others, StepCounterHook(1, output_dir=tmp_path), losses=losses, catch=(ValueError, KeyboardInterrupt))
    assert writer.all_writers is None


@pytest.mark.parametrize("way", WAYS_OUT)
def test_a_writer_that_was_given_is_flushed_and_not_closed_on_every_way_out(way: str) -> None:
    writer = RecordingWriter()
    others = [WAYS_OUT[way]["hook"]] if "hook" in WAYS_OUT[way] else []
    losses = [0.1] * 4 + WAYS_OUT[way].get("losses", [])
    trace(*others, StepCounterHook(1, summary_writer=writer), losses=losses, catch=(ValueError, KeyboardInterrupt))
    assert (writer.flushed, writer.closed) == (1, 0)


def test_a_loop_whose_creation_fails_closes_the_writer_that_was_opened(tmp_path: Path) -> None:
    writer = SummaryWriterCache.get(tmp_path)
    fails = RecordingHook(raises={"after_create_session": ValueError})
    trace(StepCounterHook(1, output_dir=tmp_path), fails, catch=ValueError)
    assert writer.all_writers is None


def test_a_writer_without_add_scalar_is_rejected_at_creation() -> None:
    with pytest.raises(TypeError, match=r"has no add_scalar\(\)"):
        MonitoredLoop(lambda: None, hooks=[StepCounterHook(summary_writer=object())])


def start_steps(*hooks: SessionRunHook, writer: RecordingWriter, start_step: int) -> list[int]:
    trace(*hooks, losses=[0.1] * 4, start_step=start_step)
    return [record[2] for record in writer.records if record[0] == "session_log"]


def test_a_loop_that_continues_from_a_later_step_writes_a_start() -> None:
    writer = RecordingWriter()
    assert set(start_steps(StepCounterHook(1, summary_writer=writer), writer=writer, start_step=7)) == {8}


def test_a_counter_writes_no_start_in_a_loop_that_starts_at_0() -> None:
    writer = RecordingWriter()
    assert start_steps(StepCounterHook(1, summary_writer=writer), writer=writer, start_step=0) == []


@pytest.mark.parametrize("counter_first", [True, False])
def test_only_a_summary_saver_that_writes_to_the_same_place_writes_a_start(counter_first: bool) -> None:
    writer = RecordingWriter()
    hooks = [StepCounterHook(1, summary_writer=writer), SummarySaverHook(1, summary_writer=writer, summary_op="loss")]
    hooks = hooks if counter_first else hooks[::-1]
    assert start_steps(*hooks, writer=writer, start_step=7) == [8]


def test_so_does_one_that_writes_to_the_same_folder_with_another_writer(tmp_path: Path) -> None:
    class Filed(RecordingWriter):
        log_dir = str(tmp_path)

    writer = Filed()
    saver = SummarySaverHook(1, output_dir=tmp_path, summary_op="loss")
    assert start_steps(StepCounterHook(1, summary_writer=writer), saver, writer=writer, start_step=7) == []


def test_a_summary_saver_that_writes_elsewhere_does_not_prevent_the_start() -> None:
    writer = RecordingWriter()
    saver = SummarySaverHook(1, summary_writer=RecordingWriter(), summary_op="loss")
    assert set(start_steps(StepCounterHook(1, summary_writer=writer), saver, writer=writer, start_step=7)) == {8}


def test_a_summary_saver_of_a_loop_that_has_ended_does_not_prevent_the_start() -> None:
    writer = RecordingWriter()
    saver = SummarySaverHook(1, summary_writer=writer, summary_op="loss")
    trace(saver, losses=[])
    assert set(start_steps(StepCounterHook(1, summary_writer=writer), writer=writer, start_step=7)) == {8}


def test_points_of_an_earlier_process_after_the_step_of_the_restart_are_discarded(tmp_path: Path) -> None:
    trace(StepCounterHook(1, output_dir=tmp_path), losses=[0.1] * 9)
    trace(StepCounterHook(1, output_dir=tmp_path), losses=[0.1] * 3, start_step=4)
    assert [step for step, _ in curve(tmp_path, RATE)] == [2, 3, 4, 6, 7]


# -- LoggingTensorHook ------------------------------------------------------------------------------------------------


def accuracy(loss: torch.Tensor) -> torch.Tensor:
    return 1 - loss


def error(loss: torch.Tensor) -> torch.Tensor:
    return loss


def test_counts_runs_and_not_global_steps() -> None:
    lines = lines_of(LoggingTensorHook(["global_step"], every_n_iter=2), *[0.1] * 3, start_step=50)
    assert lines == ["global_step = 51", "global_step = 53 (2.000 sec)"]


def test_logs_in_the_first_run_that_starts_a_period_after_the_last_line() -> None:
    lines = lines_of(LoggingTensorHook(["global_step"], every_n_secs=1.0), *[0.1] * 5, secs=0.5)
    assert lines == ["global_step = 1", "global_step = 4 (1.500 sec)"]


def test_a_list_of_fetches_is_logged_in_its_order_under_their_names() -> None:
    hook = LoggingTensorHook(["loss", accuracy, "global_step"], every_n_iter=1)
    assert lines_of(hook, 0.25) == ["loss = 0.25, accuracy = 0.75, global_step = 1"]


@pytest.mark.parametrize("given", [{"every_n_steps": 1}, {"every_n_epochs": 1}, {"timer": EverySteps(1)}], ids=repr)
def test_with_periods_that_are_not_tensorflows_a_dict_is_logged_in_its_order(given: dict[str, Any]) -> None:
    hook = LoggingTensorHook({"b": lambda: 2, "a": lambda: 1}, **given)
    with log_lines() as lines, MonitoredLoop(lambda batch: None, hooks=[hook], step_unit="run") as loop:
        for batch in loop.until_stop([1]):
            loop.run(batch)
    assert lines == [("INFO", "b = 2, a = 1")]


def test_a_list_with_two_fetches_of_one_name_is_rejected_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="two would be logged as '<lambda>'"):
        LoggingTensorHook([lambda loss: loss, lambda loss: -loss], every_n_iter=1)


PRINTED = {
    "float32": (torch.tensor(0.1), "0.1"),
    "float64": (torch.tensor(0.1, dtype=torch.float64), "0.1"),
    "half": (torch.tensor(0.1, dtype=torch.float16), "0.1"),
    "bfloat16": (torch.tensor(0.5, dtype=torch.bfloat16), "0.5"),
    "float8": (torch.tensor(0.5).to(torch.float8_e5m2), "0.5"),
    "int tensor": (torch.tensor(7), "7"),
    "bool tensor": (torch.tensor(True), "True"),
    "complex tensor": (torch.tensor(1 + 2j), "(1+2j)"),
    "conjugate": (torch.tensor(1 + 2j).conj(), "(1-2j)"),
    "small": (torch.tensor(1e-10), "1e-10"),
    "nan": (torch.tensor(math.nan), "nan"),
    "array without exponents": (torch.tensor([1e-5, 12345.0]), "[    0.00001 12345.     ]"),
    "bfloat16 array": (torch.tensor([0.5, 2.0], dtype=torch.bfloat16), "[0.5 2. ]"),
    "int array": (torch.tensor([[1, 2], [3, 4]]), "[[1 2]\n [3 4]]"),
    "sparse": (torch.tensor([0.0, 2.0]).to_sparse(), "[0. 2.]"),
    "with a gradient": (torch.tensor(0.1, requires_grad=True), "0.1"),
    "python float": ({"value": 0.1}["value"], "0.1"),
    "string": ("good", "good"),
    "None": (None, "None"),
    "numpy float32": (np.float32(0.1), "0.1"),
    "numpy 0-d": (np.array(0.1, dtype=np.float32), "0.1"),
    "numpy array": (np.array([0.5, 1e-7]), "[0.5       0.0000001]"),
    "list": ([torch.tensor(0.1), np.float32(0.2), "x"], "[0.1, 0.2, 'x']"),
    "dict of arrays": ({"a": torch.tensor([1e-5, 1.0])}, "{'a': [0.00001 1.     ]}"),
    "tuple": ((torch.tensor(0.1), 3), "(0.1, 3)"),
}


@pytest.mark.parametrize(("value", "text"), PRINTED.values(), ids=PRINTED)
def test_values_are_printed_as_numpy_prints_their_dtype(value: Any, text: str) -> None:
    assert lines_of(LoggingTensorHook(["v"], every_n_iter=1), {"v": value}) == [f"v = {text}"]


def test_a_python_number_is_printed_unchanged() -> None:
    with log_lines() as lines, MonitoredLoop(lambda: 0.1, hooks=[LoggingTensorHook(["loss"], every_n_iter=1)]) as loop:
        loop.run()
    assert lines == [("INFO", "loss = 0.1")]


def test_nested_fetches_are_logged_in_their_shape() -> None:
    hook = LoggingTensorHook({"all": ["loss", {"acc": accuracy}]}, every_n_iter=1)
    assert lines_of(hook, 0.25) == ["all = [0.25, {'acc': 0.75}]"]


def test_printing_does_not_change_the_options_of_numpy() -> None:
    before = np.get_printoptions()
    lines_of(LoggingTensorHook(["loss"], every_n_iter=1), torch.ones(3))
    assert np.get_printoptions() == before


def test_a_formatter_gets_numbers_and_arrays() -> None:
    def types(values: Mapping[str, Any]) -> str:
        return " ".join(type(value).__name__ for value in values.values())

    hook = LoggingTensorHook({name: name for name in "abc"}, every_n_iter=1, formatter=types)
    outputs = {"a": torch.tensor(0.1), "b": torch.ones(2, dtype=torch.bfloat16), "c": np.array(0.5)}
    assert lines_of(hook, outputs) == ["float32 ndarray float64"]


def test_a_percent_sign_in_a_line_is_just_a_character() -> None:
    assert lines_of(LoggingTensorHook({"100 %d": "loss"}, every_n_iter=1), 0.5) == ["100 %d = 0.5"]


def test_at_end_does_not_log_after_an_error() -> None:
    seen = trace(LoggingTensorHook(["loss"], at_end=True), losses=[0.1, ValueError], catch=ValueError)
    assert seen.lines == []


def test_at_end_of_a_loop_without_runs_logs_what_is_available() -> None:
    hook = LoggingTensorHook(["global_step", "bias"], at_end=True)
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.bias)
    no_run, line = lines_of(hook, model=model)
    assert no_run.startswith("no run was made")
    assert line == "global_step = 0, bias = [0.]"


def test_at_end_of_a_loop_without_runs_omits_what_needs_a_run_and_warns() -> None:
    _, warning, line = trace(LoggingTensorHook(["loss", "global_step"], at_end=True), losses=[]).lines
    assert line == ("INFO", "global_step = 0")
    assert warning[0] == "WARNING"
    assert "asked for 'loss'" in warning[1]


def test_at_end_of_a_loop_without_runs_there_may_be_nothing_to_log() -> None:
    no_run, warning = trace(LoggingTensorHook(["loss"], at_end=True), losses=[]).lines
    assert (warning[0], no_run[0]) == ("WARNING", "WARNING")


def test_a_reused_logger_starts_from_scratch() -> None:
    hook = LoggingTensorHook(["loss"], every_n_iter=3)
    assert lines_of(hook, 0.1, 0.2) == lines_of(hook, 0.1, 0.2) == ["loss = 0.1"]


def test_what_is_not_logged_is_not_evaluated() -> None:
    calls: list[int] = []
    hook = LoggingTensorHook({"n": lambda: calls.append(1)}, every_n_iter=3)
    lines_of(hook, *[0.1] * 7)
    assert len(calls) == 3


@pytest.mark.parametrize("tensors", ["loss", None, 5, {"loss"}, torch.ones(2)])
def test_rejects_tensors_that_are_neither_a_dict_nor_a_list(tensors: Any) -> None:
    with pytest.raises(TypeError, match=r"tensors=.*give a dict"):
        LoggingTensorHook(tensors, every_n_iter=1)


@pytest.mark.parametrize("tensors", [[], {}, ()])
def test_rejects_tensors_without_a_fetch(tensors: Any) -> None:
    with pytest.raises(ValueError, match="there is nothing to log"):
        LoggingTensorHook(tensors, every_n_iter=1)


def test_rejects_a_formatter_that_is_not_callable() -> None:
    with pytest.raises(TypeError, match=r"formatter='%s': .* that turns a dict"):
        LoggingTensorHook(["loss"], every_n_iter=1, formatter="%s")  # type: ignore[arg-type]


def test_rejects_neither_a_period_nor_at_end() -> None:
    with pytest.raises(
        ValueError,
        match=r"never logs: .*every_n_epochs, timer or at_end=True",
    ):
        LoggingTensorHook(["loss"])


# -- FinalOpsHook -----------------------------------------------------------------------------------------------------


def test_evaluates_once_at_a_clean_end() -> None:
    calls: list[int] = []
    trace(FinalOpsHook(lambda: calls.append(1)), losses=[0.1] * 5)
    assert calls == [1]


def test_keeps_the_values_in_the_structure_of_the_fetch() -> None:
    hook = FinalOpsHook({"loss": "loss", "rest": ["global_step", accuracy]})
    trace(hook, losses=[0.5, 0.25])
    assert map_leaves(float, hook.final_ops_values) == {"loss": 0.25, "rest": [2.0, 0.75]}


def test_fills_parameters_of_closures_by_name() -> None:
    hook = FinalOpsHook(lambda loss, scale: loss * scale, {"scale": 10})
    trace(hook, losses=[0.5])
    assert hook.final_ops_values == 5.0


def test_has_no_values_before_the_end_and_none_from_an_earlier_loop() -> None:
    hook = FinalOpsHook("global_step")
    assert hook.final_ops_values is None
    trace(hook)
    assert hook.final_ops_values == 3
    trace(hook, losses=[ValueError], catch=ValueError)
    assert hook.final_ops_values is None


def test_final_ops_can_be_none() -> None:
    hook = FinalOpsHook(None)
    trace(hook)
    assert hook.final_ops_values is None


def test_without_a_run_omits_what_needs_a_run() -> None:
    hook = FinalOpsHook({"loss": "loss", "step": "global_step"})
    (warning,) = [text for level, text in trace(hook, losses=[]).lines if level == "WARNING" and "left out" in text]
    assert hook.final_ops_values == {"step": 0}
    assert "'loss'" in warning


def test_evaluates_in_evaluation_mode_and_puts_back_what_that_disturbs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(), torch.nn.BatchNorm1d(1))
    model[0].eval()

    def draws(model: torch.nn.Module) -> torch.Tensor:
        torch.rand(1)
        assert not any(module.training for module in model.modules())
        return model(torch.ones(2, 1)).sum()  # type: ignore[no-any-return]

    hook = FinalOpsHook(draws)
    with MonitoredLoop(lambda: None, model, hooks=[hook]) as loop:
        loop.run()
        before = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    assert not hook.final_ops_values.requires_grad
    assert [module.training for module in model] == [False, True, True]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())


def test_logs_the_final_values_and_writes_a_last_point_of_each_number() -> None:
    writer = RecordingWriter()
    ops = {"loss": "loss", "matrix": lambda: torch.ones(20, 20), "pair": ["global_step", "loss"]}
    lines = trace(FinalOpsHook(ops, summary_writer=writer), losses=[0.5, 0.25]).lines
    assert [text for _, text in lines][-1] == (
        "final ops at step 2: loss = 0.25, matrix = a tensor of shape (20, 20), pair = [2, 0.25]"
    )
    assert writer.scalars == {"loss": [(2, 0.25)]}


@pytest.mark.parametrize(
    ("ops", "line"),
    [("loss", "loss = 0.5"), (["loss", accuracy], "loss = 0.5, accuracy = 0.5"), (accuracy, "accuracy = 0.5")],
)
def test_final_values_are_logged_under_the_names_of_their_fetches(ops: Any, line: str) -> None:
    assert trace(FinalOpsHook(ops), losses=[0.5]).lines[-1][1] == f"final ops at step 1: {line}"


def test_a_stop_by_a_signal_evaluates_nothing_because_the_training_run_is_resumed() -> None:
    hook = FinalOpsHook("global_step")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with MonitoredLoop(lambda: None, hooks=[hook], signals=["SIGUSR1"]) as loop:
        for _ in loop.until_stop(range(3)):
            loop.run()
            signal.raise_signal(signal.SIGUSR1)
    assert hook.final_ops_values is None


@pytest.mark.parametrize("kind", [ValueError, StopIteration])
def test_an_error_in_a_final_op_is_raised_and_the_other_ends_run(kind: type[Exception]) -> None:
    def fails() -> None:
        raise kind("on purpose")

    after = RecordingHook()
    seen = trace(FinalOpsHook(fails), after, catch=kind)
    assert isinstance(seen.error, kind)
    assert ("end", 3) in after.calls


@pytest.mark.parametrize("feed_dict", [["scale"], 5, "scale"])
def test_rejects_a_feed_dict_that_is_not_a_mapping(feed_dict: Any) -> None:
    with pytest.raises(TypeError, match=r"final_ops_feed_dict=.*: give a mapping from parameter name to value"):
        FinalOpsHook("loss", feed_dict)


# -- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(LoggingTensorHook, ["fc:output"], at_end=True),
        functools.partial(FinalOpsHook, {"a": ["fc:grad"]}),
    ],
)
def test_a_value_that_is_available_only_while_a_step_runs_is_rejected_at_creation(make: Any) -> None:
    with pytest.raises(ValueError, match=r"'fc:(output|grad)' is available only while a step runs"):
        make()


logging_hook = functools.partial(LoggingTensorHook, ["loss"])
NOT_A_NUMBER_OF_STEPS = [0, -1, 2.5, True, "10", math.nan]


@pytest.mark.parametrize("steps", NOT_A_NUMBER_OF_STEPS)
@pytest.mark.parametrize(("make", "argument"), [(StepCounterHook, "every_n_steps"), (logging_hook, "every_n_iter")])
def test_rejects_an_invalid_number_of_steps(make: Any, argument: str, steps: Any) -> None:
    with pytest.raises(ValueError, match=f"{argument}={steps!r}:"):
        make(**{argument: steps})


@pytest.mark.parametrize("secs", [-1, math.nan, "soon"])
@pytest.mark.parametrize("make", [functools.partial(StepCounterHook, None), logging_hook])
def test_rejects_an_invalid_number_of_seconds(make: Any, secs: Any) -> None:
    with pytest.raises(ValueError, match=f"every_n_secs={secs!r}:"):
        make(every_n_secs=secs)


@pytest.mark.parametrize(("make", "argument"), [(StepCounterHook, "every_n_steps"), (logging_hook, "every_n_iter")])
def test_rejects_two_periods_and_shows_them(make: Any, argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument}=5, every_n_secs=2.5: give"):
        make(**{argument: 5}, every_n_secs=2.5)


def test_a_counter_rejects_two_places_to_write_to(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"output_dir='d', summary_writer=<RecordingWriter.*: give one, not both"):
        StepCounterHook(output_dir="d", summary_writer=RecordingWriter())


# -- learning rates and outputs that were not asked for ---------------------------------------------------------------


def test_the_line_shows_the_rates_of_several_groups_as_one_number_where_they_are_equal(
    lines: list[tuple[str, str]],
) -> None:
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.5, 0.25)])

    def step(rate: float) -> None:
        optimizer.param_groups[0]["lr"] = rate

    hooks = [
        LoggingTensorHook(["lr"], every_n_iter=1),
        LoggingTensorHook(["lr", "lr/0"], every_n_iter=1, formatter="lr {lr:.1e}, first {lr/0:.2f}".format_map),
    ]
    with MonitoredLoop(step, optimizer=optimizer, hooks=hooks) as loop:
        loop.run(0.5)
        loop.run(0.25)
    assert [line.partition(" (")[0] for _, line in lines if line.startswith("lr")] == [
        "lr = [0.5, 0.25]",
        "lr [5.0e-01, 2.5e-01], first 0.50",
        "lr = 0.25",
        "lr 2.5e-01, first 0.25",
    ]


class Pair(tuple[Any, ...]):
    """A tuple that cannot be created from its items."""

    def __new__(cls, left: Any, right: Any) -> Any:
        return super().__new__(cls, (left, right))


def cyclic() -> dict[str, Any]:
    outputs: dict[str, Any] = {"loss": torch.ones(1), "n": 7}
    outputs["again"] = outputs
    return outputs


@pytest.mark.parametrize("outputs", [Pair(1, 2), {"loss": 1, "n": 7, "pair": Pair(1, 2)}, cyclic()], ids=range(3))
def test_outputs_that_cannot_be_rebuilt_do_not_matter_to_other_fetches(outputs: Any) -> None:
    hook = FinalOpsHook({"step": "global_step", "weight": "weight", "closure": lambda session: 5})
    with MonitoredLoop(lambda: outputs, torch.nn.Linear(1, 1), hooks=[hook]) as loop:
        loop.run()
        assert loop.session.run(["global_step", lambda model: 3]) == [1, 3]
        if isinstance(outputs, dict):
            assert loop.session.run(["n", lambda loss, n: n]) == [7, 7]
    assert hook.final_ops_values["step"] == 1


# -- gradients ---------------------------------------------------------------------------------------------------------


def norm_of_weight(model: torch.nn.Module) -> Any:
    gradients = [each.grad for each in model.parameters()]
    return None if gradients[0] is None else gradients[0].norm()


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("fetch", ["weight.grad", grad_norm(), norm_of_weight])
@pytest.mark.parametrize("hook", ["log", "bar"])
def test_gradients_that_the_step_has_removed_are_warned_of_once(fetch: Any, at_end: bool, hook: str) -> None:
    import_or_skip("tqdm")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> torch.Tensor:
        if not at_end:
            optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step()
        if at_end:
            optimizer.zero_grad()
        return loss

    values = {"g": fetch, "none": lambda: None}
    made: Any = LoggingTensorHook(values, every_n_steps=1) if hook == "log" else ProgressBarHook(values=values)
    with log_lines() as lines, MonitoredLoop(step, model, optimizer, hooks=[made]) as loop:
        for _ in loop.until_stop(range(3)):
            loop.run()
    warnings = [text for level, text in lines if level == "WARNING"]
    assert [text.partition(":")[0] for text in warnings] == ["g is None"] * at_end
    assert all("call that at its beginning instead" in text for text in warnings)


def test_a_value_of_none_that_is_no_gradient_is_no_warning() -> None:
    with log_lines() as lines, MonitoredLoop(lambda: {"loss": None}, hooks=[LoggingTensorHook(["loss"], 1)]) as loop:
        loop.run()
    assert [text for level, text in lines if level == "WARNING"] == []
