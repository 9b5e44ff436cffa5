"""CallFnHook: when it calls, and with what."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices import FakeDevice

from torchhooks import (
    AbortedError,
    CallFnHook,
    CheckpointSaverHook,
    EvaluationHook,
    EveryEpochs,
    EverySteps,
    FetchError,
    MonitoredLoop,
    SecondOrStepTimer,
    Session,
)
from torchhooks.testing import RecordingHook, log_lines, trace


def called_at(runs: int = 9, start_step: int = 0, **given: Any) -> list[int]:
    steps: list[int] = []
    trace(
        CallFnHook(lambda global_step: steps.append(global_step), **given), losses=[0.1] * runs, start_step=start_step
    )
    return steps


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"at_end": True}, [9]),
        ({"every_n_steps": 4, "at_end": True}, [4, 8, 9]),
        ({"every_n_steps": 3, "at_end": True}, [3, 6, 9]),
        ({"timer": SecondOrStepTimer(every_steps=4), "at_end": True}, [4, 8, 9]),
    ],
    ids=repr,
)
def test_calls_at_the_end_unless_that_step_was_called(given: dict[str, Any], steps: list[int]) -> None:
    assert called_at(**given) == steps


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"at_start": True}, [0]),
        ({"every_n_steps": 4, "at_start": True}, [0, 4, 8]),
        ({"every_n_secs": 4, "at_start": True}, [0, 5]),
        ({"every_n_secs": 4}, [5]),
        ({"timer": SecondOrStepTimer(every_steps=4)}, [4, 8]),
        ({"timer": EveryEpochs(), "at_start": True}, [0, 9]),
        ({"at_start": True, "at_end": True}, [0, 9]),
    ],
    ids=repr,
)
def test_calls_at_the_times_at_which_an_evaluation_hook_evaluates(given: dict[str, Any], steps: list[int]) -> None:
    evaluated: list[int] = []
    hook = EvaluationHook(lambda global_step: evaluated.append(global_step) or 0.0, **given)  # type: ignore[func-returns-value]
    trace(hook, losses=[0.1] * 9)
    assert called_at(**given) == evaluated == steps


@pytest.mark.parametrize(
    ("given", "steps"), [({"every_n_steps": 4}, [1, 4, 8]), ({"every_n_secs": 4}, [1, 6]), ({}, [1])]
)
def test_what_names_an_output_is_called_at_the_start_in_the_first_run(given: dict[str, Any], steps: list[int]) -> None:
    seen: list[int] = []
    hook = CallFnHook(lambda loss, global_step: seen.append(global_step), at_start=True, **given)
    for _ in range(2):  # it can be used again
        trace(hook, losses=[0.1] * 9)
    assert seen == steps * 2


def test_after_a_recovery_the_start_is_not_called_again(tmp_path: Path) -> None:
    steps: list[int] = []
    hooks = [
        CallFnHook(lambda global_step: steps.append(global_step), 2, at_start=True),
        CheckpointSaverHook(tmp_path, save_steps=1),
    ]
    trace(*hooks, losses=[0.1, 0.1, AbortedError, 0.1], checkpoint_dir=tmp_path)
    assert steps == [0, 2]


def test_the_hook_can_be_used_again() -> None:
    steps: list[int] = []
    hook = CallFnHook(lambda global_step: steps.append(global_step), at_end=True)
    for _ in range(2):
        trace(hook, losses=[0.1] * 3)
    assert steps == [3, 3]


def arguments_of(function: Callable[[list[Any]], Callable[..., object]], **given: Any) -> Any:
    """Return what ``function``, created with a list to append to, was called with in a run with several inputs."""
    seen: list[Any] = []
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    hook = CallFnHook(function(seen), every_n_steps=1)
    with MonitoredLoop(lambda inputs: {"loss": inputs * 2}, model, optimizer, hooks=[hook]) as loop:
        loop.run(torch.tensor(1.5))
    (arguments,) = seen
    return arguments


def test_the_parameters_are_names_of_fetches() -> None:
    found = arguments_of(
        lambda seen: lambda loss, lr, inputs, global_step: seen.append((loss, lr, inputs, global_step))
    )
    assert found == (torch.tensor(3.0), 0.25, torch.tensor(1.5), 1)


def test_a_parameter_can_be_the_model_or_the_session() -> None:
    model, session, outputs = arguments_of(
        lambda seen: lambda model, session, outputs: seen.append((model, session, outputs))
    )
    assert isinstance(model, torch.nn.Linear)
    assert isinstance(session, Session)
    assert outputs == {"loss": torch.tensor(3.0)}


def test_a_parameter_with_a_default_keeps_it_if_there_is_no_such_name() -> None:
    def keeping(seen: list[Any]) -> Callable[..., object]:
        def call(loss: Any, /, scale: float = 0.5, *rest: Any, lr: float = 9.0, **others: Any) -> None:
            seen.append((loss.item(), scale, rest, lr, others))

        return call

    assert arguments_of(keeping) == (3.0, 0.5, (), 0.25, {})


def test_a_parameter_that_a_partial_function_was_given_is_not_a_fetch() -> None:
    def call(seen: list[Any], loss: Any, lr: float) -> None:
        seen.append((loss.item(), lr))

    assert arguments_of(lambda seen: functools.partial(call, seen, lr=7.0)) == (3.0, 7.0)


def test_an_unknown_parameter_is_an_error_that_names_the_function() -> None:
    def report(los: Any) -> None:
        """Has a typing error."""

    with pytest.raises(
        FetchError, match=r"asked for the arguments of .*report .*'los' is not an .*Did you mean 'loss'"
    ):
        trace(CallFnHook(report, every_n_steps=1))


def any_arguments(*args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    "function",
    [print, any_arguments, lambda *values: None, lambda **values: None, lambda *values, sep=" ": None],
    ids=["print", "args and kwargs", "args", "kwargs", "an option"],
)
def test_a_function_that_takes_any_arguments_and_names_none_is_refused(function: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match=r"^function=.*: .* such as lambda loss: print\(loss\)$"):
        CallFnHook(function, 4)


class Silent(torch.nn.Module):
    def forward(self) -> None: ...


@pytest.mark.parametrize(
    "function",
    [
        lambda: None,
        functools.partial(any_arguments, 3),
        Silent(),
        lambda *values, loss: None,
        lambda loss=None, *_: None,
    ],
    ids=["no parameters", "partial", "module", "after any", "before any"],
)
def test_a_function_without_parameters_or_with_a_named_one_is_called(function: Callable[..., object]) -> None:
    assert trace(CallFnHook(function, 1)).error is None


def test_an_error_of_the_function_is_one_of_the_run_and_names_the_hook() -> None:
    def fail(loss: Any) -> None:
        raise KeyError("mine")

    ran = trace(CallFnHook(fail, every_n_steps=2), losses=[0.1] * 3, catch=KeyError)
    assert ran.steps == [1]
    assert "in after_run of CallFnHook" in "".join(ran.error.__notes__)  # type: ignore[union-attr]


def test_a_function_that_raises_stop_iteration_ends_the_loop_cleanly() -> None:
    def stop(loss: Any) -> None:
        raise StopIteration

    other = RecordingHook()
    trace(CallFnHook(stop, every_n_steps=2), other, losses=[0.1] * 9)
    assert ("end", 2) in other.calls


def test_at_the_end_of_a_loop_without_a_run_it_is_left_out_with_a_warning() -> None:
    seen: list[Any] = []
    with log_lines() as lines:
        trace(CallFnHook(lambda loss: seen.append(loss), at_end=True), losses=[])
    assert seen == []
    assert any(level == "WARNING" and "It is left out" in text for level, text in lines)


def test_values_on_a_device_are_not_waited_for() -> None:
    seen: list[tuple[int, float]] = []
    hook = CallFnHook(lambda loss, global_step: seen.append((global_step, loss.item())), every_n_steps=2)
    loss, waits = torch.tensor(0.0), []

    def step() -> torch.Tensor:
        loss.add_(1.0)
        return loss

    with FakeDevice(lag=3) as device, MonitoredLoop(step, hooks=[hook]) as loop:
        for _ in range(9):
            loop.run()
        waits.append(device.waits)
    assert waits == [0]
    assert seen == [(2, 2.0), (4, 4.0), (6, 6.0), (8, 8.0)]


def test_values_on_a_device_at_the_end_are_read_from_it() -> None:
    seen: list[float] = []
    hook = CallFnHook(lambda loss: seen.append(loss.numpy().item()), at_end=True)
    with FakeDevice(lag=3), MonitoredLoop(lambda: torch.tensor(0.5), hooks=[hook]) as loop:
        loop.run()
    assert seen == [0.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {},
            "CallFnHook never calls its function: give every_n_steps, every_n_secs, every_n_epochs, timer, "
            "at_start=True or at_end=True",
        ),
        ({"every_n_steps": 0}, "every_n_steps=0:"),
        ({"every_n_steps": 2, "timer": EverySteps(2)}, "every_n_steps=2, timer=EverySteps(2): give"),
    ],
)
def test_refuses_invalid_arguments_and_shows_them(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        CallFnHook(len, **arguments)


def test_refuses_what_is_not_a_function() -> None:
    with pytest.raises(TypeError, match="function=3: must be a function"):
        CallFnHook(3, every_n_steps=5)  # type: ignore[arg-type]


def test_repr_shows_the_arguments() -> None:
    assert repr(CallFnHook(len, 5, at_end=True)) == (
        "CallFnHook(<built-in function len>, every_n_steps=5, at_end=True)"
    )
