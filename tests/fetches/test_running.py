"""Running fetches: what they are the mean, sum or maximum of, in every kind of hook, after a resume and a recovery."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.devices import FakeDevice
from torch.utils._python_dispatch import TorchDispatchMode

from torchhooks import (
    AbortedError,
    BestCheckpointHook,
    CheckpointSaverHook,
    Due,
    EveryEpochs,
    EverySteps,
    FeedFnHook,
    FetchError,
    FinalOpsHook,
    JsonLinesWriter,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    Saver,
    Scaffold,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopIfHigherHook,
    SummarySaverHook,
    best_checkpoint,
    latest,
    latest_checkpoint,
    list_checkpoints,
    running_max,
    running_mean,
    running_min,
    running_sum,
    summary,
)
from torchhooks.fetches.evaluation import ComposedFetch
from torchhooks.fetches.running import MOST_NUMBERS
from torchhooks.testing import RecordingHook, RecordingWriter, Trace, log_lines, plain, trace

Lines = list[tuple[str, str]]
tensor = torch.tensor
half = functools.partial(torch.tensor, dtype=torch.float16)
double = functools.partial(torch.tensor, dtype=torch.float64)


class EveryRuns(SessionRunHook):
    """Reports ``fetch`` in every ``period``-th run, and sits out the others."""

    def __init__(self, fetch: Any, period: int) -> None:
        self.request = SessionRunArgs(fetch)
        self.period = period
        self.reports: list[Any] = []
        self.values: list[Any] = []

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return self.request

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.values.append(run_values.results)
        run_context.when_ready(run_values.results, lambda values: self.reports.append(plain(values)))

    def next_due(self) -> Due:
        return Due(runs=self.period)


class EveryRun(SessionRunHook):
    """Is called in every run, and reports ``fetch`` in every ``period``-th."""

    def __init__(self, fetch: Any, period: int, *, inline: Callable[[], Any] | None = None) -> None:
        self.fetch = fetch
        self.period, self.runs, self.inline = period, 0, inline
        self.reports: list[Any] = []
        self.values: list[Any] = []

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self.runs += 1
        due = self.runs % self.period == 0
        return SessionRunArgs(self.fetch if self.inline is None else self.inline()) if due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_values.results is not None:
            self.values.append(run_values.results)
            self.reports.append(plain(run_values.results))


def report(fetch: Any, outputs: list[Any], period: int | None = None) -> list[Any]:
    """Return the reports of a hook that is due in every ``period``-th run, once at the end by default."""
    hook = EveryRuns(fetch, len(outputs) if period is None else period)
    trace(hook, losses=outputs)
    return hook.reports


# -- values -------------------------------------------------------------------------------------------------------


def test_a_report_covers_the_runs_since_the_last_one() -> None:
    assert report(running_mean("loss"), [1, 2, 3, 5], 2) == [1.5, 4.0]


def test_a_sum_and_a_maximum() -> None:
    assert report((running_sum("loss"), running_max("loss")), [1, 4, 3, 1, -2, 0], 3) == [(8.0, 4.0), (-1.0, 1.0)]


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(
    ("values", "mean", "total", "largest"),
    [
        ([tensor(1.0), tensor(2.0)], tensor(1.5), tensor(3.0), tensor(2.0)),
        ([tensor([1.0]), tensor([[2.0]])], tensor(1.5), tensor(3.0), tensor(2.0)),
        ([tensor(1), tensor(2)], tensor(1.5), tensor(3), tensor(2)),
        ([tensor(True), tensor(False)], tensor(0.5), tensor(1), tensor(True)),
        ([half(1.0), half(2.0)], tensor(1.5), tensor(3.0), half(2.0)),
        ([tensor(1.0).bfloat16(), tensor(2.0).bfloat16()], tensor(1.5), tensor(3.0), tensor(2.0).bfloat16()),
        ([double(1.0), double(2.0)], double(1.5), double(3.0), double(2.0)),
        ([np.float64(1.0), np.float64(2.0)], double(1.5), double(3.0), double(2.0)),
    ],
    ids=str,
)
def test_the_dtype_and_shape_of_a_report(device: bool, values: list[Any], mean: Any, total: Any, largest: Any) -> None:
    hook = EveryRuns((running_mean("x"), running_sum("x"), running_max("x")), 2)
    with fake_device(device):
        trace(hook, losses=[{"x": value} for value in values])
    for value, expected in zip(hook.values[0], (mean, total, largest), strict=True):
        assert torch.equal(value, expected)
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape)


@contextmanager
def fake_device(enters: bool) -> Iterator[None]:
    """Let CPU tensors count as those of a device, if ``enters``."""
    if not enters:
        yield
        return
    with FakeDevice():
        yield


def test_python_numbers_stay_python_numbers() -> None:
    hook = EveryRuns((running_mean("x"), running_sum("x"), running_max("x")), 2)
    trace(hook, losses=[{"x": 10**20}, {"x": 10**20 + 2}])
    assert hook.reports == [(1e20, 2 * 10**20 + 2, 10**20 + 2)]
    assert [type(value) for value in hook.values[0]] == [float, int, int]


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_nan_in_one_run_is_nan_in_its_report_alone(device: bool, where: int) -> None:
    values = [tensor(1.0)] * 6
    values[where] = tensor(math.nan)
    hook = EveryRuns((running_mean("x"), running_sum("x"), running_max("x")), 3)
    with fake_device(device):
        trace(hook, losses=[{"x": value} for value in values])
    assert all(value.isnan().any() for value in hook.values[0])
    assert not any(value.isnan().any() for value in hook.values[1])


def test_nan_of_python_numbers() -> None:
    first, second = report(running_max("x"), [{"x": x} for x in (2.0, math.nan, 3.0, 1.0, 2.0, 1.5)], 3)
    assert math.isnan(first)
    assert second == 2.0


def test_a_long_period_of_half_precision_is_exact() -> None:
    # Added up in bfloat16, the sum would stay at 256.
    for device in (False, True):
        with fake_device(device):
            assert report(running_sum("x"), [{"x": torch.ones((), dtype=torch.bfloat16)}] * 1000) == [1000.0]


def test_more_runs_than_wait_at_most() -> None:
    runs = 9000  # beyond what waits on a host and on a device
    values = [{"x": tensor(float(number % 7))} for number in range(runs)]
    expected = (sum(number % 7 for number in range(runs)), 6.0)
    for device in (False, True):
        with fake_device(device):
            assert report((running_sum("x"), running_max("x")), values) == [expected]


@pytest.mark.parametrize("value", [1.0, True, np.float64(1.0), tensor(1.0)], ids=["float", "bool", "NumPy", "tensor"])
def test_what_waits_on_the_host_is_bounded(value: Any) -> None:
    with MonitoredLoop(lambda: {"x": value}, hooks=[EveryRuns(running_sum("x"), 10**6)]) as loop:
        for _ in range(2 * MOST_NUMBERS - 1):
            loop.run()
        (source,) = loop.session.accumulated.sources
        assert len(source.numbers) == MOST_NUMBERS - 1


def test_values_of_a_memory_that_is_reused_in_every_run() -> None:
    # As the outputs of a CUDA graph.
    for device, static in ((False, torch.zeros(())), (True, torch.zeros(()))):

        def step(number: float, static: torch.Tensor = static) -> torch.Tensor:
            return static.fill_(number)

        hook = EveryRuns(running_mean("loss"), 4)
        with fake_device(device), MonitoredLoop(step, hooks=[hook]) as loop:
            for number in (1.0, 2.0, 3.0, 6.0):
                loop.run(number)
            static.fill_(100.0)
        assert hook.reports[0] == 3.0


def test_a_value_with_a_graph_is_accumulated_without_it() -> None:
    weight = torch.ones(2, requires_grad=True)
    for device in (False, True):
        hook = EveryRuns((running_mean("a"), running_mean("b")), 2)
        with fake_device(device):
            trace(hook, losses=[{"a": weight.sum(), "b": weight[0] * 2}] * 2)
        assert hook.reports == [(2.0, 2.0)]
        assert not any(value.requires_grad for value in hook.values[0])


def test_every_kind_of_fetch_is_accumulated() -> None:
    class Metric:
        value = 0.0

        def compute(self) -> float:
            self.value += 1
            return self.value

    static = torch.zeros(())

    def step(batch: float) -> float:
        static.fill_(batch)
        return batch

    fetches = {
        "name": running_mean("loss"),
        "step": running_max("global_step"),
        "argument": running_sum("batch"),
        "closure": running_mean(lambda loss, batch: loss + batch),
        "metric": running_max(Metric()),
        "tensor": running_mean(static),
    }
    hook = EveryRuns(fetches, 2)
    with MonitoredLoop(step, hooks=[hook]) as loop:
        loop.run(1.0)
        loop.run(batch=3.0)
    assert hook.reports == [{"name": 2.0, "step": 2, "argument": 4.0, "closure": 4.0, "metric": 2.0, "tensor": 2.0}]


def test_a_closure_is_evaluated_once_in_a_run_in_which_a_hook_is_due() -> None:
    calls: list[float] = []

    def closure(loss: Any) -> Any:
        calls.append(float(loss))
        return loss

    trace(EveryRuns(running_mean(closure), 2), EveryRuns(closure, 2), losses=[1, 2, 3, 4])
    assert calls == [1.0, 2.0, 3.0, 4.0]


def test_what_a_hook_feeds_is_what_is_accumulated() -> None:
    values = iter([1.0, 2.0, 6.0])
    hook = EveryRuns(running_mean("x"), 3)
    with MonitoredLoop(lambda x: {"x": x * 100}, hooks=[FeedFnHook(lambda: {"x": next(values)}), hook]) as loop:
        for _ in range(3):
            loop.run()
    assert hook.reports == [3.0]


# -- minima, weights, epochs, the latest value ---------------------------------------------------------------------


@pytest.mark.parametrize("device", [False, True])
def test_a_minimum(device: bool) -> None:
    fetches = (running_min("x"), running_max("x"), running_mean("x"))
    with fake_device(device):
        numbers = report(fetches, [{"x": tensor(x)} for x in (3.0, 1.0, 2.0, 5.0, 4.0, math.nan)], 3)
    assert numbers[0] == (1.0, 3.0, 2.0)
    assert all(map(math.isnan, numbers[1]))
    assert report(running_min("x"), [{"x": x} for x in (3, 1, 2, 5)], 2) == [1, 2]


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(
    ("values", "weights", "mean", "total"),
    [
        ([1.0, 4.0], [2, 1], 2.0, 6.0),
        ([1, 4], [tensor(2), tensor(1)], tensor(2.0), tensor(6)),
        ([0.75, 0.5], [tensor(2), tensor(1)], tensor(2.0 / 3), tensor(2.0)),
        ([tensor(3, dtype=torch.uint8), tensor(2, dtype=torch.uint8)], [0.5, 1.5], tensor(2.25), tensor(4.5)),
        ([tensor(1.0), tensor(4.0)], [2, 1], tensor(2.0), tensor(6.0)),
        ([tensor([1.0]), tensor([4.0])], [2.0, 1.0], tensor(2.0), tensor(6.0)),
        ([half(1.0), half(40000.0)], [2, 2], tensor(20000.5), tensor(80002.0)),
        ([tensor(200, dtype=torch.uint8), tensor(2, dtype=torch.uint8)], [2, 2], tensor(101.0), tensor(404)),
        ([tensor(True), tensor(False)], [tensor(True), tensor(True)], tensor(0.5), tensor(1)),
        ([np.float64(1.0), np.float64(4.0)], [np.int64(2), np.int64(1)], double(2.0), double(6.0)),
    ],
    ids=str,
)
def test_weights(device: bool, values: list[Any], weights: list[Any], mean: Any, total: Any) -> None:
    hook = EveryRuns((running_mean("x", weight="n"), running_sum("x", weight="n")), 2)
    with fake_device(device):
        trace(hook, losses=[{"x": x, "n": n} for x, n in zip(values, weights, strict=True)])
    for value, expected in zip(hook.values[0], (mean, total), strict=True):
        assert type(value) is type(expected)
        assert plain(value) == plain(expected)
        if isinstance(value, torch.Tensor):
            assert (value.dtype, value.shape) == (expected.dtype, expected.shape)


def test_a_weight_can_be_a_closure_and_has_no_gradient() -> None:
    hook = EveryRuns([running_mean("loss", weight=lambda batch: len(batch)), running_mean("loss")], 2)
    weight = torch.ones((), requires_grad=True)
    with MonitoredLoop(lambda batch: weight * sum(batch) / len(batch), hooks=[hook]) as loop:
        for batch in ([3.0, 1.0, 2.0], [6.0]):
            loop.run(batch)
    assert hook.reports == [[3.0, 4.0]]
    assert not hook.values[0][0].requires_grad


@pytest.mark.parametrize("weight", [0, tensor(0)], ids=["number", "tensor"])
@pytest.mark.parametrize("value", [1.0, tensor(1.0)], ids=["number", "tensor"])
def test_a_mean_without_a_weight_that_counts_is_nan(value: Any, weight: Any) -> None:
    assert math.isnan(report(running_mean("x", weight="n"), [{"x": value, "n": weight}] * 2)[0])


def test_a_weight_that_does_not_fit() -> None:
    error = error_of([{"x": 1.0, "n": "many"}], running_mean("x", weight="n"))
    assert "multiplies 'many'" in str(error) or "over 'many'" in str(error)
    assert "running_mean(x, weight=n)" in str(error) + str(getattr(error, "__notes__", ""))
    with pytest.raises(TypeError, match="give one fetch"):
        running_mean("loss", weight=["n"])


def test_what_is_reported_of_a_weighted_mean_can_be_taken_back() -> None:
    class Later(EveryRun):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            super().after_run(run_context, run_values)
            if self.runs == 1:
                run_context.session.accumulated.put_back(self)

    hook = Later(running_mean("x", weight="n"), 1)
    trace(hook, losses=[{"x": 1.0, "n": 3}, {"x": 5.0, "n": 1}, {"x": 7.0, "n": 2}])
    assert hook.reports == [1.0, 2.0, 7.0]


def in_epochs(folder: Path | None, fetch: Any, epochs: list[list[Any]], stop: int | None = None) -> list[Any]:
    """Return what ``fetch`` is in each run, and in a list after each epoch."""
    hook = EveryRun(fetch, 1)
    reports: list[Any] = hook.reports
    saver = [CheckpointSaverHook(folder, save_steps=1)] if folder is not None else []
    with MonitoredLoop(lambda x: {"x": x, "n": int(x)}, hooks=[hook, *saver], checkpoint_dir=folder) as loop:
        for epoch in loop.until_stop(range(len(epochs))):
            for value in loop.until_stop(epochs[epoch]):
                loop.run(value)
                if loop.session.global_step == stop:
                    loop.request_stop()
            if not loop.should_stop():
                reports.append([plain(loop.session.run(fetch, who=hook))])
    return reports


EPOCHS = [[1.0, 3.0, 5.0], [2.0, 4.0], [7.0]]


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(
    ("fetch", "expected"),
    [
        (running_mean("x", reset="epoch"), [1.0, 2.0, 3.0, [3.0], 2.0, 3.0, [3.0], 7.0, [7.0]]),
        (running_sum("x", reset="epoch"), [1.0, 4.0, 9.0, [9.0], 2.0, 6.0, [6.0], 7.0, [7.0]]),
        (running_max("x", reset="epoch"), [1.0, 3.0, 5.0, [5.0], 2.0, 4.0, [4.0], 7.0, [7.0]]),
        (running_min("x", reset="epoch"), [1.0, 1.0, 1.0, [1.0], 2.0, 2.0, [2.0], 7.0, [7.0]]),
        (running_mean("x", weight="n", reset="epoch"), [1.0, 2.5, 35 / 9, [35 / 9], 2.0, 20 / 6, [20 / 6], 7.0, [7.0]]),
    ],
    ids=repr,
)
def test_over_the_epoch_so_far(device: bool, fetch: Any, expected: list[Any]) -> None:
    epochs: list[list[Any]] = [[tensor(x) if device else x for x in epoch] for epoch in EPOCHS]
    with fake_device(device):
        values = in_epochs(None, fetch, epochs)
    flat = [value[0] if isinstance(value, list) else value for value in values]
    assert flat == pytest.approx([value[0] if isinstance(value, list) else value for value in expected])
    assert [type(value) for value in values] == [type(value) for value in expected]


@pytest.mark.parametrize("stop", range(1, 6))
@pytest.mark.parametrize("weight", [None, "n"])
def test_an_epoch_goes_on_after_a_resume(tmp_path: Path, stop: int, weight: Any) -> None:
    fetch = running_mean("x", weight=weight, reset="epoch")
    parts = in_epochs(tmp_path, fetch, EPOCHS, stop) + in_epochs(tmp_path, fetch, EPOCHS)
    assert parts == in_epochs(None, fetch, EPOCHS)


def test_a_hook_at_the_end_of_an_epoch_and_one_of_a_broken_epoch() -> None:
    writer = RecordingWriter()
    hook = SummarySaverHook(
        timer=EveryEpochs(),
        summary_writer=writer,
        summary_op={"epoch": running_sum("loss", reset="epoch"), "report": running_sum("loss")},
    )
    with MonitoredLoop(lambda loss: loss, hooks=[hook]) as loop:
        for _ in loop.until_stop(range(3)):
            for value in loop.until_stop([1.0, 2.0, 4.0]):
                loop.run(value)
                if value == 2.0:
                    break
    assert [dict(curve).keys() for curve in writer.scalars.values()] == [{2, 4, 6}] * 2
    assert [[*dict(curve).values()] for curve in writer.scalars.values()] == [[3.0] * 3] * 2


def test_at_the_end_of_an_epoch_of_which_nothing_is_known_it_is_nan(tmp_path: Path, lines: Lines) -> None:
    in_epochs(tmp_path, "x", [[1.0, 2.0]], stop=2)
    writer = RecordingWriter()
    hook = SummarySaverHook(timer=EveryEpochs(), summary_writer=writer, summary_op={"x": running_mean("x")})
    with MonitoredLoop(lambda x: {"x": x}, hooks=[hook], checkpoint_dir=tmp_path) as loop:
        for _ in loop.until_stop(range(1)):
            for value in loop.until_stop([1.0, 2.0]):
                loop.run(value)
    assert str(writer.scalars) == "{'x': [(2, nan)]}"
    assert any("running_mean('x'), but no run was made. It counts" in text for _, text in lines)


def test_an_epoch_that_is_made_again_after_a_recovery_is_counted_once(tmp_path: Path) -> None:
    hook = EveryRun(running_sum("x", reset="epoch"), 1)
    recovered(tmp_path, hook, save_steps=2, fails_at=3, last=4)
    assert hook.reports == [1.0, 2.0, 3.0, 3.0, 4.0]


@pytest.mark.parametrize("create", [running_mean, running_sum, running_max, running_min])
def test_a_wrong_reset_names_the_right_ones(create: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"reset='step'\): reset is 'report' or 'epoch'"):
        create("loss", reset="step")


@pytest.mark.parametrize("device", [False, True])
def test_the_latest_value(device: bool) -> None:
    hook = EveryRun((latest("g"), latest(lambda g: g * 2), running_mean("loss")), 1)
    outputs = [{"loss": 1.0}, {"loss": 1.0, "g": tensor(3.0)}, {"loss": 1.0, "g": None}, {"loss": 1.0}]
    with fake_device(device):
        trace(hook, losses=outputs[:2] + outputs[3:])
        assert [tuple(map(repr, each)) for each in hook.reports] == [("nan", "nan", "1.0")] + [
            ("3.0", "6.0", "1.0")
        ] * 2
        assert str(report(latest("g"), outputs, 1)) == "[nan, 3.0, 3.0, 3.0]"


def test_the_latest_value_is_a_copy() -> None:
    static = torch.zeros(())
    hook = EveryRuns((latest("x"), latest(static)), 3)

    def step(number: float) -> dict[str, Any]:
        static.fill_(number)
        return {"x": static} if number < 2 else {}

    with MonitoredLoop(step, hooks=[hook]) as loop:
        for number in (0.0, 1.0, 2.0):
            loop.run(number)
    assert hook.reports == [(1.0, 2.0)]


def test_the_latest_value_is_there_before_the_first_run_and_after_a_resume(tmp_path: Path) -> None:
    def run(outputs: list[Any]) -> list[Any]:
        hook = EveryRun(latest("g"), 1)
        with MonitoredLoop(
            lambda value: value, hooks=[hook, CheckpointSaverHook(tmp_path, save_steps=1)], checkpoint_dir=tmp_path
        ) as loop:
            values = [plain(loop.session.run(latest("g"), who=hook))]
            for value in outputs:
                loop.run(value)
        return values + hook.reports

    assert str(run([{"loss": 1.0}, {"loss": 2.0, "g": tensor(2.0)}])) == "[nan, nan, 2.0]"
    assert run([{"loss": 3.0}, {"loss": 4.0, "g": np.ones(1)}]) == [2.0, 2.0, 1.0]
    assert run([{"loss": 3.0}]) == [1.0, 1.0]


def test_the_latest_value_is_the_same_for_a_hook_that_asks_later() -> None:
    first = EveryRuns(latest("g"), 3)
    second = EveryRun(None, 3, inline=lambda: latest("g"))
    trace(first, second, losses=[{"loss": 1.0, "g": 2.0}, {"loss": 1.0}, {"loss": 1.0}])
    assert first.reports == second.reports == [2.0]


def test_the_latest_value_is_restored_for_whichever_hook_asks(tmp_path: Path) -> None:
    saver = CheckpointSaverHook(tmp_path, save_steps=1)
    trace(EveryRuns(latest("g"), 5), saver, losses=[{"loss": 1.0, "g": 2.0}], checkpoint_dir=tmp_path)
    hook = EveryRun(latest("g"), 1)
    trace(hook, losses=[{"loss": 1.0}], checkpoint_dir=tmp_path)
    assert hook.reports == [2.0]


def test_the_latest_value_is_one_value() -> None:
    error = error_of([{"x": [1.0]}], latest("x"))
    assert "latest(x) is over [1.0]: give one number" in str(error)
    with pytest.raises(TypeError, match="give one fetch"):
        latest(["x"])


# -- hooks --------------------------------------------------------------------------------------------------------


def test_hooks_of_different_periods_have_accumulations_of_their_own() -> None:
    two, three = EveryRuns(running_mean("loss"), 2), EveryRuns(running_mean("loss"), 3)
    trace(two, three, losses=[1, 2, 3, 4, 5, 6])
    assert (two.reports, three.reports) == ([1.5, 3.5, 5.5], [2.0, 5.0])


def test_hooks_can_share_a_fetch() -> None:
    mean = running_mean("loss")
    two, three = EveryRuns(mean, 2), EveryRuns(mean, 3)
    trace(two, three, losses=[1, 2, 3, 4, 5, 6])
    assert (two.reports, three.reports) == ([1.5, 3.5, 5.5], [2.0, 5.0])


def test_a_hook_that_is_called_in_every_run_reports_when_it_asks() -> None:
    hook = EveryRun(running_mean("loss"), 3)
    assert trace(hook, losses=[1, 2, 3, 4, 5, 6]).steps == [1, 2, 3, 4, 5, 6]
    assert hook.reports == [2.0, 5.0]


def test_equal_fetches_that_are_created_in_each_request_are_one(lines: Lines) -> None:
    hook = EveryRun(None, 2, inline=lambda: running_mean("loss"))
    trace(hook, losses=[1, 2, 3, 5])
    assert hook.reports == [2.0, 4.0]  # the first covers only the run of its request, and a warning says so
    warnings = [text for level, text in lines if level == "WARNING"]
    assert len(warnings) == 1
    assert "requests running_mean('loss') for the first time in run 2: it covers no earlier run" in warnings[0]


def test_a_fetch_of_the_first_run_needs_no_attribute(lines: Lines) -> None:
    hook = EveryRun(None, 1, inline=lambda: running_mean("loss"))
    trace(hook, losses=[1, 2])
    assert (hook.reports, lines) == ([1.0, 2.0], [])


def test_a_reference_to_another_hook_of_the_loop_takes_nothing_from_it() -> None:
    class Refers(SessionRunHook):
        def __init__(self, other: SessionRunHook) -> None:
            self.other = other

    hook = EveryRuns(running_mean("loss"), 2)
    trace(Refers(hook), hook, losses=[1, 2])
    assert hook.reports == [1.5]


def test_logging_tensor_hook() -> None:
    result = trace(LoggingTensorHook({"loss": running_mean("loss")}, every_n_iter=2, at_end=True), losses=[1, 2, 3, 4])
    assert [text for _, text in result.lines] == ["loss = 1.0", "loss = 2.5 (2.000 sec)", "loss = 4.0 (1.000 sec)"]


def test_logging_tensor_hook_repeats_a_report_after_which_no_run_was_made() -> None:
    result = trace(LoggingTensorHook([running_mean("loss")], every_n_iter=2, at_end=True), losses=[1, 2, 3])
    assert [text for _, text in result.lines][1:] == [
        "running_mean(loss) = 2.5 (2.000 sec)",
        "running_mean(loss) = 2.5 (0.000 sec)",
    ]


def test_at_the_end_of_a_loop_without_a_run_it_is_left_out() -> None:
    result = trace(LoggingTensorHook({"loss": running_mean("loss")}, at_end=True), losses=[])
    no_run, (level, text) = result.lines
    assert no_run[1].startswith("no run was made")
    assert level == "WARNING"
    assert "made. It is left out." in text


def test_final_ops_hook_has_the_mean_of_all_runs() -> None:
    hook = FinalOpsHook({"mean": running_mean("loss"), "last": "loss"})
    trace(hook, losses=[1, 2, 6])
    assert plain(hook.final_ops_values) == {"mean": 3.0, "last": 6.0}


def test_summary_saver_hook() -> None:
    writer = RecordingWriter()
    ops = [summary.scalar("loss", running_mean("loss")), summary.scalar("last", "loss")]
    trace(SummarySaverHook(2, summary_writer=writer, summary_op=ops), losses=[1, 2, 3, 4, 5])
    assert writer.scalars == {"loss": [(1, 1.0), (3, 2.5), (5, 4.5)], "last": [(1, 1.0), (3, 3.0), (5, 5.0)]}


def test_summary_saver_hook_takes_a_mapping_to_running_fetches() -> None:
    writer = RecordingWriter()
    trace(SummarySaverHook(2, summary_writer=writer, summary_op={"a": running_sum("loss")}), losses=[1, 2, 3])
    assert writer.scalars == {"a": [(1, 1.0), (3, 5.0)]}


def test_a_summary_op_in_a_summary_op_is_refused() -> None:
    with pytest.raises(TypeError, match="give one fetch"):
        summary.scalar("a", summary.scalar("b", "loss"))


def test_with_accumulation_a_point_covers_all_runs_of_its_steps() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writer = RecordingWriter()
    hooks = [SummarySaverHook(1, summary_writer=writer, summary_op={"loss": running_mean("loss")})]

    def step(number: int) -> float:
        if number % 3 == 0:
            optimizer.step()
        return float(number)

    with MonitoredLoop(step, model, optimizer, hooks=hooks, step_unit="optimizer_step") as loop:
        for number in range(1, 10):
            loop.run(number)
    assert writer.scalars == {"loss": [(1, 2.0), (2, 5.0), (3, 8.0)]}


def test_a_report_that_is_put_back_continues() -> None:
    class Undecided(EveryRuns):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            super().after_run(run_context, run_values)
            if len(self.reports) % 2:
                run_context.session.accumulated.put_back(self)

    hook = Undecided(running_mean("loss"), 1)
    trace(hook, losses=[1, 3, 5, 9])
    assert hook.reports == [1.0, 2.0, 5.0, 7.0]


def test_with_a_timer_the_first_report_covers_all_runs_before_it() -> None:
    writer = RecordingWriter()
    hooks = [
        LoggingTensorHook({"loss": running_mean("loss")}, timer=EverySteps(3)),
        SummarySaverHook(timer=EverySteps(2), summary_writer=writer, summary_op={"loss": running_mean("loss")}),
    ]
    result = trace(*hooks, losses=[1, 2, 6, 4, 5, 9])
    assert [text for _, text in result.lines] == ["loss = 3.0", "loss = 6.0 (3.000 sec)"]
    assert writer.scalars == {"loss": [(2, 1.5), (4, 5.0), (6, 7.0)]}


def test_with_a_timer_and_accumulation_a_point_covers_all_runs_of_its_steps() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    writer = RecordingWriter()
    hook = SummarySaverHook(timer=EverySteps(2), summary_writer=writer, summary_op={"sum": running_sum("loss")})

    def step(number: int) -> float:
        if number % 3 == 0:
            optimizer.step()
        return float(number)

    with MonitoredLoop(step, optimizer=optimizer, hooks=[hook], step_unit="optimizer_step") as loop:
        for number in range(1, 13):
            loop.run(number)
    assert writer.scalars == {"sum": [(2, 21.0), (4, 57.0)]}


def test_early_stopping_by_a_running_mean() -> None:
    hook = StopIfHigherHook(running_mean("loss"), 3.0, every_n_steps=2)
    assert trace(hook, losses=[1, 4, 2, 5, 1, 1]).steps == [1, 2, 3, 4]


def test_best_checkpoint_hook_takes_a_running_mean(tmp_path: Path) -> None:
    hook = BestCheckpointHook(tmp_path, running_mean("loss"), save_steps=2, mode="min")
    trace(hook, losses=[4, 3, 1, 5, 7], model=torch.nn.Linear(1, 1))
    best = best_checkpoint(tmp_path / "best")
    assert best is not None
    (found,) = list_checkpoints(tmp_path / "best")
    assert (found.path, found.step, found.score) == (best, 4, -3.0)


def test_a_hook_that_watches_the_outputs_does_not_count_a_run_twice() -> None:
    class Watcher(RecordingHook):
        def next_due(self) -> Due:
            return Due(when=lambda outputs: float(outputs) > 2)

    hook = EveryRuns(running_sum("loss"), 4)
    watcher = Watcher("loss")
    trace(watcher, NanTensorHook("loss"), hook, losses=[1, 2, 3, 4])
    assert watcher.results == [3.0, 4.0]
    assert hook.reports == [10.0]


def test_a_watcher_can_ask_for_a_running_fetch() -> None:
    class Watcher(RecordingHook):
        def next_due(self) -> Due:
            return Due(when=lambda outputs: float(outputs) > 3)

    watcher = Watcher(running_mean("loss"))
    trace(watcher, losses=[1, 2, 3, 6])
    assert plain(watcher.results) == [3.0]


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fetch", [None, 5, ["loss"], {"a": "loss"}], ids=str)
def test_what_is_not_one_fetch_is_refused(fetch: Any) -> None:
    with pytest.raises(TypeError, match=r"running_mean\(.*give one fetch, such as 'loss'"):
        running_mean(fetch)


@pytest.mark.parametrize("fetch", [running_mean("loss"), summary.scalar("a", "loss")], ids=str)
def test_a_composed_fetch_is_refused(fetch: Any) -> None:
    with pytest.raises(TypeError, match="cannot be evaluated in every run; give what it is composed of"):
        running_mean(fetch)


def test_a_composed_fetch_that_fits_every_run_is_accumulated() -> None:
    class Doubled(ComposedFetch):
        fits_every_run = True

        @property
        def fetch(self) -> str:
            return "loss"

        def compose(self, value: Any) -> Any:
            return value * 2

    assert report(running_mean(Doubled()), [1, 2]) == [3.0]


class Distributed:
    """What a DTensor has: here a number that each rank has, or a part of."""

    def __init__(self, value: float, replicated: bool) -> None:
        self.value, self.placements, self.replicated = value, [self], replicated

    def is_replicate(self) -> bool:
        return self.replicated

    def to_local(self) -> torch.Tensor:
        return tensor(self.value)

    def full_tensor(self) -> torch.Tensor:
        raise AssertionError("a collective call")


def test_a_dtensor_is_accumulated_if_each_rank_has_all_of_it() -> None:
    assert report(running_mean("x"), [{"x": Distributed(1.0, True)}, {"x": Distributed(3.0, True)}]) == [2.0]
    assert "a part on each rank" in str(error_of([{"x": Distributed(1.0, False)}], running_mean("x")))


def test_a_submodule_is_not_watched_in_every_run() -> None:
    with pytest.raises(ValueError, match="'fc:output' would have to be caught by a module hook in every run"):
        running_mean("fc:output")


def error_of(outputs: list[Any], fetch: Any) -> BaseException:
    result = trace(EveryRuns(fetch, 10), losses=outputs, catch=Exception)
    assert result.error is not None
    return result.error


def test_what_is_not_a_number_is_an_error_that_names_the_hook() -> None:
    error = error_of([{"x": "text"}], running_mean("x"))
    assert str(error) == "running_mean(x) is over 'text': give one number, such as lambda losses: losses.mean()"
    assert "in running_mean(x), which <" in error.__notes__[0]


@pytest.mark.parametrize("value", [tensor([1.0, 2.0]), tensor(1j), 1j, [1.0]], ids=str)
@pytest.mark.parametrize("fetch", [running_max("x"), running_mean("x", weight="x"), latest("x")], ids=repr)
def test_what_is_not_one_number_is_refused(fetch: Any, value: Any) -> None:
    assert "give one number" in str(error_of([{"x": value}], fetch))


def test_a_name_that_does_not_exist_names_the_hook() -> None:
    error = error_of([1.0], running_mean("los"))
    assert isinstance(error, FetchError)
    assert "EveryRuns" in str(error)
    assert "Did you mean 'loss'?" in str(error)


def test_session_run_cannot_know_whose_accumulation_is_meant() -> None:
    with MonitoredLoop(lambda: 1.0, hooks=[EveryRuns(running_mean("loss"), 2)]) as loop:
        loop.run()
        with pytest.raises(FetchError, match=r"Session.run asked for running_mean\('loss'\), which is accumulated"):
            loop.session.run(running_mean("loss"))


def test_a_large_container_in_an_attribute_is_not_searched() -> None:
    hook = EveryRun(None, 2, inline=lambda: running_mean("loss"))
    hook.data = [running_mean("loss")] * 1000  # type: ignore[attr-defined]
    trace(hook, losses=[1, 2])
    assert hook.reports == [2.0]


def test_a_container_that_contains_itself_is_searched_once() -> None:
    hook = EveryRuns(running_mean("loss"), 2)
    hook.reports.append(hook.reports)
    trace(hook, losses=[1, 2])
    assert hook.reports[1] == 1.5


# -- resume and recovery ------------------------------------------------------------------------------------------


def losses_from(step: int, to: int) -> Iterator[float]:
    return (float(number) for number in range(step + 1, to + 1))


class AtMultiples(EveryRuns):
    """Reports when the global step is a multiple of ``period``, also after a resume."""

    def begin(self) -> None:
        self.step = 0

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.step = session.global_step

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        super().after_run(run_context, run_values)
        self.step = run_context.session.global_step

    def next_due(self) -> Due:
        return Due(step=(self.step // self.period + 1) * self.period)


FETCHES = {
    "mean": running_mean("loss"),
    "max": running_max("loss"),
    "sum": running_sum(lambda loss: loss),
}


@pytest.mark.parametrize("kind", ["number", "tensor", "device"])
def test_a_resumed_training_run_reports_what_an_uninterrupted_one_does(tmp_path: Path, kind: str) -> None:
    def train(folder: Path, last: int, *hooks: SessionRunHook) -> None:
        saver = CheckpointSaverHook(folder, save_steps=100)
        with MonitoredLoop(lambda loss: loss, hooks=[*hooks, saver], checkpoint_dir=folder) as loop:
            for number in losses_from(loop.global_step, last):
                loop.run(number if kind == "number" else tensor(number))

    whole, parts = AtMultiples(FETCHES, 4), [AtMultiples(FETCHES, 4) for _ in range(3)]
    with fake_device(kind == "device"):
        train(tmp_path / "whole", 8, whole)
        for last, hook in zip((3, 6, 8), parts, strict=True):
            train(tmp_path / "parts", last, hook)
    assert [len(hook.reports) for hook in parts] == [0, 1, 1]
    assert [*parts[1].reports, *parts[2].reports] == whole.reports
    assert whole.reports[1] == {"mean": 6.5, "max": 8.0, "sum": 26.0}


def test_the_state_of_hooks_of_one_class_is_kept_apart(tmp_path: Path) -> None:
    for first in (True, False):
        two, three = AtMultiples(running_mean("loss"), 3), AtMultiples(running_sum("loss"), 4)
        same = AtMultiples(running_mean("loss"), 4)
        saver = CheckpointSaverHook(tmp_path, save_steps=100)
        with MonitoredLoop(lambda loss: loss, hooks=[two, three, same, saver], checkpoint_dir=tmp_path) as loop:
            for number in losses_from(loop.global_step, 2 if first else 4):
                loop.run(number)
    assert (two.reports, three.reports, same.reports) == ([2.0], [10.0], [2.5])


def test_a_checkpoint_from_before_the_hook_was_added_starts_over(tmp_path: Path) -> None:
    trace(CheckpointSaverHook(tmp_path, save_steps=1), losses=[1.0], checkpoint_dir=tmp_path)
    hook = EveryRuns(running_mean("loss"), 2)
    trace(hook, losses=[2.0, 4.0], checkpoint_dir=tmp_path)
    assert hook.reports == [3.0]


def test_a_checkpoint_without_running_fetches_has_no_entry_for_them(tmp_path: Path) -> None:
    trace(CheckpointSaverHook(tmp_path, save_steps=1), losses=[1.0], checkpoint_dir=tmp_path)
    assert "running_values" not in torch.load(tmp_path / "model.ckpt-1" / "state.pt", weights_only=True)


class FailsOnce(SessionRunHook):
    """Raises an error to recover from, at the end of the run that reaches ``step``, once."""

    def __init__(self, step: int) -> None:
        self.step, self.failed = step, False

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_context.session.global_step == self.step and not self.failed:
            self.failed = True
            raise AbortedError("preempted")


def recovered(folder: Path, *hooks: SessionRunHook, save_steps: int, fails_at: int, last: int = 8) -> Trace:
    """Make runs whose value is their global step, with a failure and a recovery among them."""
    steps: list[int] = []
    saver = CheckpointSaverHook(folder, save_steps=save_steps)
    fails = FailsOnce(fails_at)
    with MonitoredLoop(lambda: {"x": 1.0}, hooks=[*hooks, saver, fails], checkpoint_dir=folder) as loop:
        while loop.global_step < last:
            loop.run()
            steps.append(loop.global_step)
    assert fails.failed
    return Trace(steps, [], None, loop.global_step)


STEP = "global_step"


@pytest.mark.parametrize("fails_at", [4, 5])
def test_runs_that_are_made_again_are_not_counted_twice(tmp_path: Path, fails_at: int) -> None:
    hook = EveryRuns((running_sum(STEP), running_sum("x")), 8)
    recovered(tmp_path, hook, save_steps=3, fails_at=fails_at, last=12)
    # The hook is asked again after the recovery to step 3, so it is due 8 runs after that.
    assert hook.reports == [(sum(range(1, 12)), 11.0)]


def test_a_report_after_a_recovery_covers_what_the_checkpoint_had_too(tmp_path: Path) -> None:
    class AtSteps(AtMultiples):
        def after_create_session(self, session: Any, coord: Any) -> None:
            """Keep the step of the last report, as TensorFlow's hooks do in a recovery."""

    hook = AtSteps(running_sum(STEP), 4)
    # Step 4 is reported; the recovery goes back to step 3, whose checkpoint has the sum of the steps before.
    recovered(tmp_path, hook, save_steps=3, fails_at=5)
    assert hook.reports == [sum(range(1, 5)), sum(range(1, 9))]


def test_a_hook_that_reports_a_step_again_after_a_recovery_reports_the_same(tmp_path: Path) -> None:
    hook = AtMultiples(running_sum(STEP), 4)
    recovered(tmp_path, hook, save_steps=3, fails_at=5)
    assert hook.reports == [10, 10, 26]


def test_points_that_are_removed_by_a_recovery_are_written_again(tmp_path: Path) -> None:
    with JsonLinesWriter(tmp_path / "curves.jsonl") as writer:
        hook = SummarySaverHook(2, summary_writer=writer, summary_op={"x": running_sum(STEP)})
        recovered(tmp_path, hook, save_steps=2, fails_at=4)
    points = [line for line in (tmp_path / "curves.jsonl").read_text().splitlines() if '"x"' in line]
    assert len(points) == len(set(points))


def test_a_saver_that_does_not_know_running_fetches_starts_them_over(tmp_path: Path) -> None:
    class StepOnly(Saver):
        def restore_latest(self, session: Any, directory: Any) -> str | None:
            path = latest_checkpoint(directory)
            session.global_step = 0 if path is None else int(path.rpartition("-")[2])
            return path

    final = FinalOpsHook(running_sum("x"))
    hooks = [final, CheckpointSaverHook(tmp_path, save_steps=2), FailsOnce(3)]
    scaffold = Scaffold(saver=StepOnly())
    with MonitoredLoop(lambda: {"x": 1.0}, hooks=hooks, checkpoint_dir=tmp_path, scaffold=scaffold) as loop:
        for _ in range(3):
            loop.run()
    assert final.final_ops_values == 1.0


# -- on a device --------------------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts the operators that would launch a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("detach", "view", "unbind", "select", "slice", "_unsafe_view", "alias", "reshape"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [1, 2, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_one_launch_in_a_run_however_many_means_of_one_dtype(number: int, dtype: torch.dtype) -> None:
    outputs = {str(index): torch.ones((), dtype=dtype) for index in range(number)}
    hooks = [
        EveryRuns({name: running_mean(name) for name in outputs}, 10**6),
        EveryRuns({name: running_max(name) for name in outputs}, 10**6),
    ]
    with FakeDevice(), MonitoredLoop(lambda: outputs, hooks=hooks) as loop:
        for _ in range(3):
            loop.run()
        with Launches() as launches:
            for _ in range(10):
                loop.run()
    assert len(launches.names) == 10, launches.names


@pytest.mark.parametrize(
    ("fetches", "expected"),
    [
        ((running_min("x"), running_mean("x", reset="epoch"), running_max("x")), ["copy_"]),
        ((running_mean("x", weight="n"), running_sum("x", weight="n")), ["mul", "copy_"]),
        ((latest("x"),), ["clone"]),
        ((latest("y"),), []),
    ],
    ids=repr,
)
def test_what_is_launched_in_a_run(fetches: Any, expected: list[str]) -> None:
    outputs = {"x": torch.ones(()), "n": 2}
    with FakeDevice(), MonitoredLoop(lambda: outputs, hooks=[EveryRuns(fetches, 10**6)]) as loop:
        loop.run()
        with Launches() as launches:
            loop.run()
    assert launches.names == expected


def test_the_host_never_waits() -> None:
    outputs = {"a": tensor(1.0), "b": tensor(2)}
    fetches: dict[str, Any] = {name: fetch(name) for name in outputs for fetch in (running_mean,)}
    fetches |= {f"{name} max": running_max(name) for name in outputs}
    fetches |= {f"{name} of the epoch": running_mean(name, weight="b", reset="epoch") for name in outputs}
    fetches |= {f"{name} latest": latest(name) for name in outputs}
    fetches["closure"] = running_mean(lambda a: a * 2)
    hooks = [
        EveryRuns(fetches, 3),
        LoggingTensorHook(dict(fetches), every_n_iter=2),
        SummarySaverHook(2, summary_writer=RecordingWriter(), summary_op={"a": running_mean("a")}),
    ]
    with FakeDevice(lag=3) as device, MonitoredLoop(lambda: outputs, hooks=hooks) as loop:
        for _ in range(20):
            loop.run()
        assert device.waits == 0


def test_values_that_move_between_host_and_device() -> None:
    hook = EveryRuns((running_sum("x"), running_max("x")), 3)
    with MonitoredLoop(lambda x: {"x": x}, hooks=[hook]) as loop:
        loop.run(tensor(1.0))
        with FakeDevice():
            loop.run(tensor(5.0))
        loop.run(2.0)
    assert hook.reports == [(8.0, 5.0)]


def test_a_hook_that_asks_later_changes_what_is_copied_on_a_device() -> None:
    first = EveryRuns(running_sum("a"), 4)
    second = EveryRun(None, 2, inline=lambda: (running_sum("b"), running_max("a")))
    with FakeDevice():
        trace(first, second, losses=[{"a": tensor(float(n)), "b": tensor(10.0 * n)} for n in range(1, 5)])
    assert first.reports == [10.0]
    assert [tuple(map(float, each)) for each in second.values] == [(20.0, 2.0), (70.0, 4.0)]


def test_loops_without_running_fetches_accumulate_nothing() -> None:
    with MonitoredLoop(lambda: 1.0, hooks=[EveryRuns("loss", 2)]) as loop:
        loop.run()
        assert loop.session.accumulated.sources == []
        assert loop.session.accumulated.state_dict() is None


def test_the_repr_can_be_pasted_back() -> None:
    assert repr(running_mean("loss")) == "running_mean('loss')"
    assert eval(repr(running_max("loss"))) == running_max("loss")
    assert eval(repr(latest("loss"))) == latest("loss") != running_max("loss")
    weighted = running_mean("loss", weight="n", reset="epoch")
    assert repr(weighted) == "running_mean('loss', weight='n', reset='epoch')"
    assert eval(repr(weighted)) == weighted != running_mean("loss", weight="n")
    assert running_mean("loss") != running_max("loss")
    assert running_mean("loss") != "loss"


def test_tensors_and_objects_without_a_hash_are_fetches_of_their_own() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def compute(self) -> float:
            return 1.0

    ones, metric = torch.ones(()), Unhashable()
    assert running_mean(ones) == running_mean(ones)
    assert running_mean(ones) != running_mean(torch.ones(()))
    assert report((running_sum(metric), running_sum(ones)), [1, 2]) == [(2.0, 2.0)]


def test_a_mean_of_the_rates_of_several_groups_names_the_fetches_of_one() -> None:
    first, second = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "name": "head"}]
    optimizer = torch.optim.SGD(groups, 0.1)

    def train(fetch: str) -> list[str]:
        hook = LoggingTensorHook({"mean": running_mean(fetch)}, every_n_steps=1)
        with log_lines() as lines, MonitoredLoop(lambda: 0.5, optimizer=optimizer, hooks=[hook]) as loop:
            loop.run()
        return [text for _, text in lines if text.startswith("mean")]

    with pytest.raises(TypeError, match=r'over the learning rates of 2 parameter groups, which are "lr/0", "lr/head"'):
        train("lr")
    assert train("lr/0") == train("lr/head") == ["mean = 0.1"]
