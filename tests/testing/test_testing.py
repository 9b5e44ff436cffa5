"""The tools for testing hooks do what their documentation says."""

import logging
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from torchhooks import (
    LoggingTensorHook,
    MonitoredLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    SessionRunArgs,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
)
from torchhooks.testing import FakeClock, RecordingHook, RecordingWriter, log_lines, plain, trace


def test_the_clock_stands_still() -> None:
    with FakeClock(5.0):
        assert [time.monotonic(), time.monotonic()] == [5.0, 5.0]


def test_the_clock_moves_by_the_given_seconds() -> None:
    with FakeClock(5.0) as clock:
        clock.advance(0.25)
        assert time.monotonic() == clock() == 5.25


def test_the_real_clock_is_restored_after_an_error() -> None:
    real = time.monotonic
    with pytest.raises(KeyError), FakeClock():
        raise KeyError
    assert time.monotonic is real


def test_a_clock_inside_another_restores_the_other() -> None:
    with FakeClock(1.0), FakeClock(2.0):
        pass
    with FakeClock(1.0):
        with FakeClock(2.0):
            pass
        assert time.monotonic() == 1.0


def test_a_clock_can_be_entered_inside_itself_and_again() -> None:
    real, clock = time.monotonic, FakeClock(7.0)
    with clock:
        with clock:
            pass
        assert time.monotonic() == 7.0
    with clock:
        assert time.monotonic() == 7.0
    assert time.monotonic is real


@pytest.mark.parametrize("secs", [-1, float("nan"), float("inf")])
def test_the_clock_refuses_to_go_back(secs: float) -> None:
    with pytest.raises(ValueError, match=f"FakeClock.advance\\({secs}\\): .* give 0 or more"):
        FakeClock().advance(secs)


def test_the_clock_shows_its_time() -> None:
    assert repr(FakeClock(3.5)) == "FakeClock(3.5)"


def test_records_every_call_in_order() -> None:
    hook = RecordingHook("loss")
    trace(hook, losses=[0.5], start_step=7)
    assert hook.calls == [
        ("begin",),
        ("after_create_session", 7),
        ("before_run", False),
        ("after_run", 0.5, 8),
        ("end", 8),
        ("teardown",),
    ]


def test_entries_of_several_hooks_in_one_list_start_with_their_names() -> None:
    calls: list[tuple[Any, ...]] = []
    trace(RecordingHook(name="a", calls=calls), RecordingHook(name="b", calls=calls), losses=[])
    assert calls[:2] == [("a", "begin"), ("b", "begin")]


def test_keeps_the_original_results() -> None:
    hook = RecordingHook({"l": "loss"})
    trace(hook, losses=[0.5])
    assert torch.equal(hook.results[0]["l"], torch.tensor(0.5))


def test_requests_a_stop_in_the_given_run() -> None:
    seen = trace(RecordingHook(stop_at=2))
    assert (seen.steps, seen.stop_reason) == ([1, 2], "RecordingHook: run 2")


def test_feeds() -> None:
    hook = RecordingHook("loss", feed_dict={"x": 2.0})
    with MonitoredLoop(lambda x: x, hooks=[hook]) as loop:
        loop.run()
    assert hook.results == [2.0]


METHODS = ["begin", "after_create_session", "before_run", "after_run", "end", "teardown"]


@pytest.mark.parametrize("method", METHODS)
def test_raises_in_the_given_method(method: str) -> None:
    hook = RecordingHook(raises={method: KeyError})
    assert isinstance(trace(hook, losses=[0.5], catch=KeyError).error, KeyError)
    assert hook.calls[hook.calls.index(("raises", "KeyError")) - 1][0] == method


@pytest.mark.parametrize("method", ["before_run", "after_run"])
def test_raises_in_the_given_run(method: str) -> None:
    hook = RecordingHook(raises={(method, 3): ValueError("third")})
    assert trace(hook, losses=[0.5] * 9, catch=ValueError).steps == [1, 2]


def test_raises_once_and_starts_counting_runs_again_in_the_next_loop() -> None:
    hook = RecordingHook(raises={("after_run", 2): ValueError}, stop_at=3)
    assert trace(hook, losses=[0.5] * 9, catch=ValueError).steps == [1]
    assert trace(hook, losses=[0.5] * 9).steps == [1, 2, 3]


def test_refuses_to_raise_in_a_method_that_hooks_do_not_have() -> None:
    with pytest.raises(ValueError, match=r"'after_step'.*after_run"):
        RecordingHook(raises={"after_step": ValueError})


def test_refuses_to_raise_in_run_zero() -> None:
    with pytest.raises(ValueError, match=r"before_run.*=0.*1 or more"):
        RecordingHook(raises={("before_run", 0): ValueError})


def test_refuses_to_stop_at_run_zero() -> None:
    with pytest.raises(ValueError, match=r"stop_at=0.*1 or more"):
        RecordingHook(stop_at=0)


@pytest.mark.parametrize("text", ["RecordingHook()", "RecordingHook('loss', feed_dict={'x': 1}, stop_at=2, name='a')"])
def test_a_recording_hook_can_be_pasted_back(text: str) -> None:
    assert repr(eval(text)) == text


def test_a_writer_keeps_curves_by_tag() -> None:
    writer = RecordingWriter()
    trace(StepCounterHook(2, summary_writer=writer), losses=[0.1] * 5)
    assert writer.scalars == {"global_step/sec": [(3, 1.0), (5, 1.0)]}


@pytest.mark.parametrize("kind", ["scalar", "histogram", "image", "text", "figure"])
def test_a_writer_keeps_everything_with_its_kind(kind: str) -> None:
    writer = RecordingWriter()
    getattr(writer, f"add_{kind}")("tag", torch.tensor([1, 2]), 3)
    assert writer.records == [(kind, "tag", [1, 2], 3)]


def test_a_writer_keeps_session_logs() -> None:
    writer = RecordingWriter()
    writer.add_session_log("START", 4)
    assert (writer.records, writer.scalars) == ([("session_log", "START", 4)], {})


def test_a_writer_counts_flushes_and_closes() -> None:
    writer = RecordingWriter()
    writer.flush()
    writer.flush()
    writer.close()
    assert repr(writer) == "<RecordingWriter: 0 records, flushed 2, closed 1 times>"


def test_trace_returns_the_steps_the_reason_and_the_last_step() -> None:
    seen = trace(StopAtStepHook(last_step=3), losses=[0.1] * 9)
    assert (seen.steps, seen.global_step, seen.stop_reason) == ([1, 2, 3], 3, "StopAtStepHook: step 3")


def test_trace_ends_with_the_losses() -> None:
    seen = trace(losses=[0.1, 0.2], start_step=10)
    assert (seen.steps, seen.stop_reason) == ([11, 12], "data ended")


def test_trace_returns_the_log_lines() -> None:
    hook = LoggingTensorHook(["loss"], every_n_iter=2)
    lines = trace(hook, losses=[0.1, 0.2, 0.3], secs=0.5).lines
    assert lines == [("INFO", "loss = 0.1"), ("INFO", "loss = 0.3 (1.000 sec)")]


def test_steps_of_a_trace_take_the_given_seconds() -> None:
    assert trace(StepCounterHook(1), losses=[0.1] * 2, secs=0.25).lines == [("INFO", "global_step/sec: 4")]


def test_trace_raises_errors() -> None:
    with pytest.raises(NanLossDuringTrainingError):
        trace(NanTensorHook("loss"), losses=[float("nan")])


def test_trace_returns_an_error_that_it_is_to_catch() -> None:
    seen = trace(NanTensorHook("loss"), losses=[0.1, float("nan")], catch=NanLossDuringTrainingError)
    assert (seen.steps, type(seen.error)) == ([1], NanLossDuringTrainingError)


@pytest.mark.parametrize("error", [KeyError, KeyError("gone")])
def test_trace_raises_a_loss_that_is_an_exception(error: type[KeyError] | KeyError) -> None:
    assert trace(losses=[0.1, error, 0.2], catch=KeyError).steps == [1]


def test_trace_returns_losses_that_are_not_numbers_unchanged() -> None:
    hook = RecordingHook("accuracy")
    trace(hook, losses=[{"loss": 0.1, "accuracy": 0.9}])
    assert hook.results == [0.9]


def test_trace_gives_activations_without_a_model() -> None:
    hook = RecordingHook(["fc:output", "fc:grad", "loss"])
    activations: dict[str, list[Any]] = {"fc:output": [torch.ones(2), torch.zeros(2)], "fc:grad": [0.25, 0.5]}
    trace(hook, losses=[0.5, {"loss": 0.75}], activations=activations)
    assert [plain(each) for each in hook.results] == [[[1.0, 1.0], 0.25, 0.5], [[0.0, 0.0], 0.5, 0.75]]


def test_a_loss_that_raises_has_its_activations() -> None:
    hook = RecordingHook("fc:output")
    trace(hook, losses=[1, KeyError, 2], activations={"fc:output": [1, 2, 3]}, catch=KeyError)
    assert [plain(each) for each in hook.results] == [1.0]


@pytest.mark.parametrize(
    ("activations", "message"),
    [
        ({"hidden": [1, 2]}, "activations={'hidden': ...}: name the output"),
        ({"fc:output": [1]}, "activations={'fc:output': ...} has 1 values, and there are 2 losses"),
    ],
)
def test_trace_refuses_activations_that_fit_no_run(activations: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        trace(losses=[1, 2], activations=activations)


def test_trace_passes_other_arguments_to_the_loop() -> None:
    hook = RecordingHook("bias")
    trace(hook, losses=[0.1], model=torch.nn.Linear(1, 2))
    assert hook.results[0].shape == (2,)


def test_trace_returns_an_error_from_before_the_loop_exists() -> None:
    seen = trace(RecordingHook(raises={"begin": OSError}), start_step=5, catch=OSError)
    assert (seen.steps, seen.stop_reason, seen.global_step) == ([], None, 5)


def test_log_lines_are_those_of_the_library_and_its_children() -> None:
    with log_lines() as lines:
        logging.getLogger("torchhooks.hooks").warning("careful")
        logging.getLogger("another").warning("else")
    assert lines == [("WARNING", "careful")]


def test_log_lines_restores_the_logger() -> None:
    logger = logging.getLogger("torchhooks")
    before = (logger.level, list(logger.handlers))
    with log_lines():
        pass
    assert (logger.level, logger.handlers) == before


def test_plain_values_keep_their_structure() -> None:
    values: Mapping[str, Any] = {"a": [torch.ones(2), np.float32(0.5)], "b": ("text", None)}
    assert plain(values) == {"a": [[1.0, 1.0], 0.5], "b": ("text", None)}


def test_the_example_in_the_docstring_runs() -> None:
    import textwrap

    from torchhooks import testing
    from torchhooks.lifecycle import hook

    assert hook.__doc__ is not None
    assert testing.__doc__ is not None
    names: dict[str, Any] = {"SessionRunArgs": SessionRunArgs, "SessionRunHook": SessionRunHook}
    for document, end in (hook.__doc__, "\n\nOrder of calls"), (testing.__doc__, "\n\nThese are"):
        example = document.split("\n\n    ", 1)[1].split(end)[0]
        exec(textwrap.dedent("    " + example), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert [test() for test in tests] == [None, None, None]
    assert issubclass(names["StopWhenGood"], SessionRunHook)
