"""Tokens and memory in StepCounterHook, what it and the loop itself know as fetches, and norms."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.accelerators import DEVICE
from support.devices import FakeDevice
from torch import nn

from torchhooks import (
    CheckpointSaverHook,
    EvaluationHook,
    FetchError,
    LoggingTensorHook,
    MonitoredLoop,
    Session,
    SessionRunHook,
    StepCounterHook,
    SummarySaverHook,
    grad_norm,
    param_norm,
)
from torchhooks.hooks import counting
from torchhooks.testing import FakeClock, RecordingHook

NAN = math.nan


class Notebook:
    def __init__(self) -> None:
        self.points: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.points.setdefault(tag, []).append((step, value))

    def flush(self) -> None: ...


def counted(step: Callable[..., Any], runs: int = 5, model: nn.Module | None = None, **arguments: Any) -> Notebook:
    """The curves of a StepCounterHook with a period of 2 steps, where each step takes a second."""
    notebook = Notebook()
    with FakeClock() as clock:

        def timed() -> Any:
            clock.advance(1)
            return step()

        hook = StepCounterHook(2, summary_writer=notebook, **arguments)
        with MonitoredLoop(timed, model=model, hooks=[hook], step_unit="run") as loop:
            for _ in range(runs):
                loop.run()
    return notebook


# -- tokens ---------------------------------------------------------------------------------------------------------


def test_a_number_of_tokens_per_step_is_reported_as_a_rate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert counted(lambda: 0.5, tokens_per_step=512).points["tokens/sec"] == [(3, 512), (5, 512)]
    assert caplog.messages.count("tokens/sec: 512") == 2


@pytest.mark.parametrize("kind", [int, float, torch.tensor, lambda n: torch.tensor([n], dtype=torch.int32)])
def test_tokens_of_a_fetch_are_added_up_over_the_period(kind: Callable[[int], Any]) -> None:
    numbers = iter([1000, 1, 2, 4, 8])
    notebook = counted(lambda: {"tokens": kind(next(numbers))}, tokens_per_step="tokens")
    assert notebook.points["tokens/sec"] == [(3, 1.5), (5, 6)]  # without the first run, which starts the clock


def test_tokens_on_a_device_are_added_up_there_without_waiting() -> None:
    notebook = Notebook()
    hook = StepCounterHook(2, summary_writer=notebook, tokens_per_step="tokens")
    with (
        FakeDevice(lag=2) as device,
        MonitoredLoop(lambda: {"tokens": torch.tensor(7)}, hooks=[hook], step_unit="run") as loop,
    ):
        for _ in range(9):
            loop.run()
        assert device.waits == 0
    rates = zip(notebook.points["tokens/sec"], notebook.points["global_step/sec"], strict=True)
    assert [(step, round(rate / steps_per_sec, 6)) for (step, rate), (_, steps_per_sec) in rates] == [
        (step, 7) for step in (3, 5, 7, 9)
    ]


def test_more_tokens_than_float32_can_count_are_counted_exactly() -> None:
    numbers = iter([1, 2**24, 1, 1, 1])
    notebook = counted(lambda: {"tokens": torch.tensor(next(numbers), dtype=torch.int32)}, tokens_per_step="tokens")
    assert notebook.points["tokens/sec"] == [(3, (2**24 + 1) / 2), (5, 1)]


@pytest.mark.parametrize("number", [0, -1, True, NAN, math.inf])
def test_a_number_of_tokens_that_is_not_positive_is_an_error(number: float) -> None:
    message = rf"tokens_per_step={number}: must be a number of tokens or a fetch, more than 0"
    with pytest.raises(ValueError, match=re.escape(message)):
        StepCounterHook(tokens_per_step=number)


def test_a_fetch_of_several_numbers_is_an_error_that_says_so() -> None:
    with pytest.raises(TypeError, match=r"running_sum\(tokens\) is over a tensor of shape \(3,\): give one number"):
        counted(lambda: {"tokens": torch.ones(3)}, tokens_per_step="tokens")


@pytest.mark.parametrize("tokens", [5, lambda: 5], ids=["number", "fetch"])
def test_counting_tokens_gives_the_hook_work_in_no_more_runs(tokens: Any) -> None:
    plain, also = StepCounterHook(10), StepCounterHook(10, tokens_per_step=tokens, memory=True)
    due = []
    for hook in (plain, also):
        with MonitoredLoop(lambda: None, hooks=[hook], step_unit="run") as loop:
            loop.run()
            due.append(hook.next_due())
    assert due[0] == due[1]


def test_a_loop_that_is_resumed_where_an_epoch_ends_counts_from_there(tmp_path: Path) -> None:
    notebooks = []
    for epochs in (1, 2):
        notebooks.append(Notebook())
        counter = StepCounterHook(every_n_epochs=1, tokens_per_step=lambda: 100, summary_writer=notebooks[-1])
        hooks = [counter, CheckpointSaverHook(tmp_path, save_steps=100)]
        with (
            FakeClock() as clock,
            MonitoredLoop(lambda: clock.advance(1), hooks=hooks, checkpoint_dir=tmp_path) as loop,
        ):
            for _ in loop.until_stop(range(epochs)):
                for _ in loop.until_stop(range(4)):
                    loop.run()
    assert notebooks[1].points["tokens/sec"] == [(8, 100)]


# -- memory ---------------------------------------------------------------------------------------------------------


def test_the_memory_of_the_host_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    points = counted(lambda: 0.5, memory=True).points["memory/host"]
    assert [step for step, _ in points] == [3, 5]
    assert all(2**20 < value < 2**45 for _, value in points)
    assert any(re.fullmatch(r"host memory: [\d.]+ GiB", message) for message in caplog.messages)


def test_a_system_without_proc_reports_no_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_proc(path: str, **_: Any) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(counting, "open", no_proc, raising=False)
    assert "memory/host" not in counted(lambda: 0.5, memory=True).points


@pytest.mark.accelerator
def test_the_peak_of_a_device_is_that_of_the_period(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model, notebook = nn.Linear(1, 1, device=DEVICE), Notebook()
    with MonitoredLoop(lambda: None, model, hooks=[StepCounterHook(1, summary_writer=notebook, memory=True)]) as loop:
        loop.run()
        before = torch.accelerator.memory_allocated()
        del (large := [torch.empty(2**26, dtype=torch.uint8, device=DEVICE)])[:]
        for _ in range(2):
            loop.run()
    (_, first), (_, second) = notebook.points["memory/device_peak"]
    assert first >= before + 2**26 > second
    assert not large
    assert any(re.fullmatch(r"peak device memory: .* GiB, host memory: .* GiB", text) for text in caplog.messages)


def test_the_repr_has_the_arguments_that_were_given() -> None:
    hook = StepCounterHook(2, tokens_per_step=5, memory=True)
    assert repr(eval(repr(hook))) == repr(hook)
    assert "memory=True" in repr(hook)


# -- what the loop itself knows -------------------------------------------------------------------------------------


def passes(loop: MonitoredLoop[Any], data: list[int]) -> None:
    """A function for one epoch, called once for each."""
    for item in loop.until_stop(data):
        loop.run(item)


def test_epoch_and_batch_count_passes_and_items_from_0() -> None:
    hook = RecordingHook(["epoch", "batch"])
    with MonitoredLoop(lambda item: item, hooks=[hook], step_unit="run") as loop:
        for _ in range(2):
            passes(loop, [1, 2])
            for _ in loop.until_stop([1]):  # a validation in between is no epoch
                pass
    assert hook.results == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_the_epoch_is_the_item_of_the_enclosing_loop() -> None:
    hook = RecordingHook(lambda epoch, batch: (epoch, batch))
    with MonitoredLoop(lambda item: item, hooks=[hook], step_unit="run") as loop:
        for _ in loop.until_stop(range(2)):
            for item in loop.until_stop([1, 2]):
                loop.run(item)
    assert hook.results == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_an_argument_of_the_step_comes_before_what_the_loop_knows() -> None:
    hook = RecordingHook("batch")
    with MonitoredLoop(lambda batch: None, hooks=[hook], step_unit="run") as loop:
        for batch in loop.until_stop([10, 20]):
            loop.run(batch)
    assert hook.results == [10, 20]


@pytest.mark.parametrize("name", ["epoch", "batch"])
def test_what_the_loop_does_not_know_does_not_exist(name: str) -> None:
    def train() -> None:
        with MonitoredLoop(lambda: None, hooks=[RecordingHook(name)]) as loop:
            loop.run()

    with pytest.raises(FetchError, match=rf"asked for '{name}', which does not exist"):
        train()


def test_secs_are_those_of_the_session_without_pauses() -> None:
    hook = RecordingHook("secs")
    with FakeClock() as clock, MonitoredLoop(lambda: None, hooks=[hook], step_unit="run") as loop:
        for secs in (3, 4):
            clock.advance(secs)
            with loop.session.paused():
                clock.advance(100)
            loop.run()
    assert hook.results == [3, 7]


# -- what a StepCounterHook measures, as fetches ----------------------------------------------------------------------


def fetched(
    fetch: Any, *hooks: SessionRunHook, secs: float = 0.25, wait: float = 0.0, epochs: int = 1, runs: int = 4
) -> list[Any]:
    """Return what ``fetch`` is in each run, for a hook after the others, in epochs of so many ``runs``."""
    hook = RecordingHook(fetch)
    with FakeClock() as clock, MonitoredLoop(lambda _: clock.advance(secs), hooks=[*hooks, hook]) as loop:

        def batches() -> Iterator[int]:
            for number in range(runs):
                clock.advance(wait)
                yield number

        for _ in loop.until_stop(range(epochs)):
            for batch in loop.until_stop(batches()):
                loop.run(batch)
    return hook.results


def at_the_epochs_ends(fetch: Any, *hooks: SessionRunHook, **given: Any) -> list[Any]:
    """Return what ``fetch`` is at the end of each epoch, for a hook after the others."""
    seen: list[Any] = []

    def line(values: dict[str, Any]) -> str:
        seen.append(values["it"])
        return ""

    display = LoggingTensorHook({"it": fetch}, every_n_epochs=1, formatter=line)
    fetched(None, *hooks, display, epochs=3, **given)
    return seen


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps_per_sec", 2.0),
        ("secs_per_step", 0.5),
        ("data_secs", 0.5),
        ("examples_per_sec", 16.0),
        ("tokens_per_sec", 200.0),
    ],
)
def test_what_is_measured_is_that_of_the_period_that_ends_in_this_run(name: str, value: float) -> None:
    hook = StepCounterHook(2, examples_per_step=8, tokens_per_step=100)
    results = fetched(name, hook, wait=0.25)
    assert [math.isnan(result) or result for result in results] == [True, True, value, value]


@pytest.mark.parametrize("first", [True, False], ids=["counter first", "counter last"])
def test_the_tokens_of_the_run_that_ends_the_period_count(first: bool) -> None:
    counter, hook = StepCounterHook(2, tokens_per_step=lambda batch: 2**batch), RecordingHook("tokens_per_sec")
    hooks = [counter, hook] if first else [hook, counter]
    with FakeClock() as clock, MonitoredLoop(lambda batch: clock.advance(1), hooks=hooks) as loop:
        for batch in range(3):
            loop.run(batch)
    assert hook.results[-1] == (2 + 4) / 2


def test_tokens_that_were_fetched_are_in_the_curve_too() -> None:
    notebook = Notebook()
    hook = StepCounterHook(2, tokens_per_step=lambda batch: 2**batch, summary_writer=notebook)
    rates = fetched("tokens_per_sec", hook, secs=1.0, runs=5)
    assert notebook.points["tokens/sec"] == [(3, 3), (5, 12)]
    assert rates[2:] == [3, 3, 12]


def test_the_last_run_of_an_epoch_counts_its_tokens_once() -> None:
    hook = StepCounterHook(every_n_epochs=1, tokens_per_step=lambda batch: 100)
    assert at_the_epochs_ends("tokens_per_sec", hook, secs=1.0) == [100, 100, 100]


def test_at_the_end_of_an_epoch_what_is_measured_is_that_of_the_epoch() -> None:
    hook = StepCounterHook(every_n_epochs=1, examples_per_step=8)
    results = at_the_epochs_ends(["examples_per_sec", "data_secs"], hook, wait=0.25)
    # The first run of all starts the clock, after its batch was waited for.
    assert results == [[16.0, 0.75], [16.0, 1.0], [16.0, 1.0]]


def test_the_share_of_waiting_for_data_is_known_for_epochs() -> None:
    notebook = Notebook()
    at_the_epochs_ends("epoch", StepCounterHook(every_n_epochs=1, summary_writer=notebook), wait=0.25)
    assert notebook.points["waiting_for_data"] == [(4, 0.5), (8, 0.5), (12, 0.5)]


def test_a_fetch_and_the_curve_of_a_period_are_the_same_number() -> None:
    notebook, hook = Notebook(), RecordingHook("steps_per_sec")
    hooks = [StepCounterHook(2, summary_writer=notebook), hook]
    with MonitoredLoop(lambda: sum(range(1000)), hooks=hooks) as loop:  # by the real clock
        for _ in range(5):
            loop.run()
    assert [hook.results[step - 1] for step in (3, 5)] == [rate for _, rate in notebook.points["global_step/sec"]]


@pytest.mark.parametrize("first", [True, False], ids=["before the fetch", "after the fetch"])
def test_an_evaluation_in_the_run_that_ends_a_period_is_not_counted(first: bool) -> None:
    def error() -> float:
        clock.advance(50.0)
        return 1.0

    rates, evaluation = RecordingHook("steps_per_sec"), EvaluationHook(error, every_n_steps=3)
    hooks = [evaluation, rates] if first else [rates, evaluation]
    clock = FakeClock()
    with clock, MonitoredLoop(lambda: clock.advance(0.25), hooks=[StepCounterHook(2), *hooks]) as loop:
        for _ in range(5):
            loop.run()
    assert rates.results[2:] == [4, 4, 4]


def test_on_a_device_the_host_measures_the_period_that_ends_and_the_device_the_last_one() -> None:
    hook = RecordingHook("steps_per_sec")
    with FakeDevice(lag=1, speed=2.0), FakeClock() as clock:

        def step() -> None:
            clock.advance(1)

        with MonitoredLoop(step, nn.Linear(1, 1), hooks=[StepCounterHook(20), hook], step_unit="run") as loop:
            for _ in range(40):
                loop.run()
    assert hook.results[20] == 1
    assert hook.results[-1] == 0.5  # the device needs twice as long


def test_of_several_hooks_the_period_that_ended_last_counts() -> None:
    long, short = StepCounterHook(every_n_epochs=1, examples_per_step=8), StepCounterHook(2)
    assert at_the_epochs_ends("data_secs", long, short, wait=0.25) == [0.75, 1.0, 1.0]
    assert fetched("data_secs", short, long, wait=0.25)[-1] == 0.5
    assert at_the_epochs_ends("examples_per_sec", short, long) == [32, 32, 32]  # the other one does not know it


@pytest.mark.parametrize(
    ("name", "hooks", "way_out"),
    [
        ("steps_per_sec", [], "add StepCounterHook(log=False) to hooks"),
        ("data_secs", [], "add StepCounterHook(log=False) to hooks"),
        ("examples_per_sec", [], "add StepCounterHook(examples_per_step=..., log=False) to hooks"),
        ("tokens_per_sec", [StepCounterHook()], "add StepCounterHook(tokens_per_step=..., log=False) to hooks"),
        (lambda tokens_per_sec: 0, [], "add StepCounterHook(tokens_per_step=..., log=False) to hooks"),
    ],
)
def test_without_a_step_counter_hook_the_error_says_what_to_add(name: Any, hooks: list[Any], way_out: str) -> None:
    with pytest.raises(FetchError, match=re.escape(f". A StepCounterHook measures it: {way_out}. ")):
        fetched(name, *hooks)


def test_a_step_counter_hook_that_does_not_log_writes_its_curves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    notebook = counted(lambda: 0.5, examples_per_step=8, tokens_per_step=512, memory=True, log=False)
    assert {"global_step/sec", "examples/sec", "tokens/sec", "memory/host"} == notebook.points.keys()
    assert caplog.messages == []


def test_a_session_without_a_loop_knows_no_epoch() -> None:
    assert (Session().epoch, Session().batch) == (None, None)


# -- norms ----------------------------------------------------------------------------------------------------------


def two_layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter, value in zip(model.parameters(), (3.0, 4.0), strict=True):
        nn.init.constant_(parameter, value)
    return model


@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, 5.0), (math.inf, 4.0)])
def test_the_norm_of_the_parameters_is_that_of_one_vector(norm_type: float, expected: float) -> None:
    hook = RecordingHook(param_norm(norm_type))
    with MonitoredLoop(lambda: None, model=two_layers(), hooks=[hook]) as loop:
        loop.run()
    assert float(hook.results[0]) == pytest.approx(expected)


def test_the_norm_of_the_gradients_leaves_out_parameters_without_one() -> None:
    model = two_layers()
    model[1].weight.requires_grad_(False)
    hook = RecordingHook({"grad": grad_norm(), "again": grad_norm()})
    with MonitoredLoop(lambda: model(torch.ones(1, 1)).sum().backward(), model=model, hooks=[hook]) as loop:
        loop.run()
    assert float(hook.results[0]["grad"]) == 4
    assert hook.results[0]["again"] is hook.results[0]["grad"]  # computed once


def test_the_norm_of_sparse_gradients_counts_repeated_indices_once() -> None:
    model = nn.Embedding(5, 1, sparse=True)
    hook = RecordingHook(grad_norm())
    with MonitoredLoop(lambda: model(torch.tensor([1, 1, 2])).sum().backward(), model=model, hooks=[hook]) as loop:
        loop.run()
    assert float(hook.results[0]) == pytest.approx(math.sqrt(5))


def test_without_a_gradient_a_curve_of_the_norm_says_why() -> None:
    hook = SummarySaverHook(1, summary_writer=Notebook(), summary_op=[grad_norm()])

    def train() -> None:
        with MonitoredLoop(lambda: None, model=two_layers(), hooks=[hook], step_unit="run") as loop:
            loop.run()

    with pytest.raises(TypeError, match=r"scalar 'grad_norm': got None; .* did .* zero_grad\(\) take a gradient"):
        train()


def test_norms_do_not_wait_for_a_device() -> None:
    notebook = Notebook()
    ops = [grad_norm(), param_norm()]
    model = two_layers()
    hook = SummarySaverHook(1, summary_writer=notebook, summary_op=ops)
    with (
        FakeDevice() as device,
        MonitoredLoop(
            lambda: model(torch.ones(1, 1)).sum().backward(), model=model, hooks=[hook], step_unit="run"
        ) as loop,
    ):
        loop.run()
        assert device.waits == 0
    assert notebook.points == {"grad_norm": [(1, 5)], "param_norm": [(1, 5)]}


@pytest.mark.parametrize("norm", [grad_norm, param_norm])
@pytest.mark.parametrize("norm_type", ["x", None, True, 0, -1, NAN, nn.Linear(1, 1)], ids=str)
def test_an_order_that_is_no_positive_number_is_refused(norm: Callable[[Any], Any], norm_type: Any) -> None:
    with pytest.raises(ValueError, match=r"norm_type=.*: must be a number, more than 0, such as 2"):
        norm(norm_type)
