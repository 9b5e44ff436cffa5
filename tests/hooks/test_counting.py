"""StepCounterHook: the clock of the device, pauses, examples per second, and the share spent waiting for data."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices import FakeDevice
from support.events import read

from torchhooks import (
    AtSteps,
    EvaluationHook,
    LoggingTensorHook,
    MonitoredLoop,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
)
from torchhooks.common.text import shown
from torchhooks.testing import FakeClock, RecordingWriter, log_lines, trace

RATE, WAITING, EXAMPLES = "global_step/sec", "waiting_for_data", "examples/sec"

Curves = dict[str, list[tuple[int, float]]]
Loop = MonitoredLoop[None]


class Training:
    """A loop on a simulated clock: each step takes a second, and every two steps are reported."""

    step_secs = 1.0

    def __init__(self, *others: SessionRunHook, **arguments: Any) -> None:
        self.clock = FakeClock()
        self.writer = RecordingWriter()
        self.lines: list[str] = []
        self.hooks = [*others, StepCounterHook(2, summary_writer=self.writer, **arguments)]

    def drive(self, body: Callable[[Loop], object]) -> Curves:
        """Return what was written while ``body`` drove the loop."""
        with self.clock, log_lines() as lines:
            with MonitoredLoop(
                lambda: self.clock.advance(self.step_secs), torch.nn.Linear(1, 1), hooks=self.hooks
            ) as loop:
                body(loop)
            self.lines = [text for _, text in lines]
        return self.writer.scalars

    def waiting(self, secs: float, items: int) -> Iterator[int]:
        """Yield ``items`` items, each of which takes ``secs`` seconds to arrive."""
        for item in range(items):
            self.clock.advance(secs)
            yield item


def five_runs(loop: Loop) -> None:
    for _ in range(5):
        loop.run()


# -- which clock ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 3, 1000])
def test_the_time_is_that_of_the_device(lag: int) -> None:
    with FakeDevice(lag, speed=2.0):
        assert Training().drive(five_runs) == {RATE: [(3, 0.5), (5, 0.5)]}


def test_the_host_does_not_wait_for_the_time_of_the_device() -> None:
    waits = []

    def drive(loop: Loop) -> None:
        for _ in range(50):
            loop.run()
        waits.append(device.waits)

    with FakeDevice(lag=3) as device:
        Training().drive(drive)
    assert waits == [0]


def test_without_a_device_the_time_is_that_of_the_host() -> None:
    assert Training().drive(five_runs) == {RATE: [(3, 1.0), (5, 1.0)]}


def test_the_duration_of_the_first_run_is_not_counted() -> None:
    training = Training()

    def compile_first(loop: Loop) -> None:
        training.clock.advance(500.0)
        five_runs(loop)

    assert training.drive(compile_first) == {RATE: [(3, 1.0), (5, 1.0)]}


@pytest.mark.parametrize("device", [None, FakeDevice(lag=2)], ids=repr)
def test_after_a_resume_only_the_steps_of_this_process_count(device: FakeDevice | None) -> None:
    writer = RecordingWriter()
    counter, model = StepCounterHook(2, summary_writer=writer), torch.nn.Linear(1, 1)
    with device or nullcontext():
        trace(counter, losses=[0.1] * 5, secs=0.5, start_step=100, model=model)
    assert writer.scalars == {RATE: [(103, 2.0), (105, 2.0)]}


def test_a_late_report_has_the_step_and_the_wall_time_of_its_run(tmp_path: Path) -> None:
    times = [time.time()]
    with FakeDevice(lag=1000), MonitoredLoop(lambda: None, hooks=[StepCounterHook(1, output_dir=tmp_path)]) as loop:
        for _ in range(3):
            loop.run()
            times.append(time.time())
    points = read(tmp_path).Scalars(RATE)
    assert [point.step for point in points] == [2, 3]
    assert all(times[point.step - 1] <= point.wall_time <= times[point.step] for point in points)


@pytest.mark.parametrize("secs", [0.0, 1.0], ids=["no time passed", "only pauses"])
def test_a_period_that_takes_no_time_is_not_reported(secs: float) -> None:
    training = Training(examples_per_step=8)
    training.step_secs = 0.0

    def pause_in_every_run(loop: Loop) -> None:
        for _ in range(5):
            loop.run()
            with loop.session.paused():
                training.clock.advance(secs)

    assert training.drive(pause_in_every_run) == {}
    assert training.lines == []


def test_a_period_that_is_shorter_than_its_pauses_is_not_reported() -> None:
    with FakeDevice(lag=0) as device:

        def pause(loop: Loop) -> None:
            five_runs(loop)
            device.speed = 10.0  # the device's clock jumps within the pause
            with loop.session.paused():
                device.speed = 20.0
            device.speed = 1.0
            five_runs(loop)

        rates = [rate for _, rate in Training().drive(pause)[RATE]]
    assert rates
    assert all(0 < rate < 2 for rate in rates)


class Elsewhere(torch.nn.Module):
    """A model whose only parameter is on the device that it is told."""

    where = torch.device("cpu")

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        with self.where:
            yield torch.nn.Parameter(torch.ones(1))


def test_a_period_in_which_the_model_moved_to_another_device_is_not_reported() -> None:
    model, writer = Elsewhere(), RecordingWriter()
    with (
        FakeClock() as clock,
        MonitoredLoop(lambda: clock.advance(1.0), model, hooks=[StepCounterHook(2, summary_writer=writer)]) as loop,
    ):
        for run in range(9):
            model.where = torch.device("cpu" if run < 4 else "meta")
            loop.run()
    assert writer.scalars == {RATE: [(3, 1.0), (7, 1.0), (9, 1.0)]}


def test_a_period_with_a_pause_in_which_the_model_moved_is_not_reported() -> None:
    model, writer = Elsewhere(), RecordingWriter()
    hooks = [StepCounterHook(2, summary_writer=writer)]
    with FakeClock() as clock, MonitoredLoop(lambda: clock.advance(1.0), model, hooks=hooks) as loop:
        loop.run()
        with loop.session.paused():
            model.where = torch.device("meta")
        model.where = torch.device("cpu")
        for _ in range(4):
            loop.run()
    assert writer.scalars == {RATE: [(5, 1.0)]}


def test_the_start_of_a_period_is_not_waited_for_either() -> None:
    """The start is an event of a stream that lags further than the one of the end."""
    waits: list[int] = []

    def two_streams(loop: Loop) -> None:
        with device.on_stream("slow", lag=6):
            loop.run()
        for _ in range(20):
            loop.run()
        waits.append(device.waits)

    with FakeDevice(lag=1) as device:
        curves = Training().drive(two_streams)
    assert waits == [0]
    assert curves[RATE] == [(step, 1.0) for step in range(3, 22, 2)]


# -- pauses -----------------------------------------------------------------------------------------------------------


class Evaluating(SessionRunHook):
    """Pauses the loop for some seconds after every run."""

    def __init__(self, clock: FakeClock, secs: float) -> None:
        self.clock, self.secs = clock, secs

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        with run_context.session.paused():
            self.clock.advance(self.secs)


@pytest.fixture(params=[None, 1.0, 4.0], ids=["host", "device", "slow device"])
def speed(request: pytest.FixtureRequest) -> Iterator[float]:
    """Run without a device, and on two with different clocks. The value is device seconds per second of the host."""
    if request.param is None:
        yield 1.0
        return
    with FakeDevice(lag=2, speed=request.param):
        yield request.param


def test_a_pause_between_runs_is_not_counted(speed: float) -> None:
    training = Training()

    def drive(loop: Loop) -> None:
        for _ in range(5):
            loop.run()
            with loop.session.paused():
                training.clock.advance(30.0)

    assert training.drive(drive) == {RATE: [(3, 1.0 / speed), (5, 1.0 / speed)]}


@pytest.mark.parametrize("before", [True, False])
def test_a_pause_inside_a_hook_is_not_counted(speed: float, before: bool) -> None:
    training = Training()
    training.hooks.insert(0 if before else 1, Evaluating(training.clock, 30.0))
    assert training.drive(five_runs) == {RATE: [(3, 1.0 / speed), (5, 1.0 / speed)]}


def test_a_pause_inside_a_pause_is_subtracted_once(speed: float) -> None:
    training = Training()

    def drive(loop: Loop) -> None:
        for _ in range(5):
            loop.run()
            with loop.session.paused():
                training.clock.advance(10.0)
                with loop.session.paused():
                    training.clock.advance(10.0)

    assert training.drive(drive) == {RATE: [(3, 1.0 / speed), (5, 1.0 / speed)]}


def test_a_pause_ends_with_an_error_in_its_block() -> None:
    training = Training()

    def drive(loop: Loop) -> None:
        for _ in range(5):
            loop.run()
            with suppress(ValueError), loop.session.paused():
                training.clock.advance(30.0)
                raise ValueError("bad data")

    assert training.drive(drive) == {RATE: [(3, 1.0), (5, 1.0)]}


def test_time_between_runs_without_a_pause_is_counted() -> None:
    training = Training()

    def drive(loop: Loop) -> None:
        for _ in range(5):
            loop.run()
            training.clock.advance(1.0)

    assert training.drive(drive) == {RATE: [(3, 0.5), (5, 0.5)]}


# -- examples ---------------------------------------------------------------------------------------------------------


def test_examples_per_second_are_reported_as_well() -> None:
    training = Training(examples_per_step=32)
    assert training.drive(five_runs) == {RATE: [(3, 1.0), (5, 1.0)], EXAMPLES: [(3, 32.0), (5, 32.0)]}
    assert training.lines == [f"{RATE}: 1", f"{EXAMPLES}: 32"] * 2


@pytest.mark.parametrize("number", [0, -1, math.nan, math.inf, 10**400, 10**5000, True, "32"], ids=shown)
def test_rejects_an_invalid_number_of_examples(number: Any) -> None:
    message = re.escape(f"examples_per_step={shown(number)}: must be a number of examples, more than 0")
    with pytest.raises(ValueError, match=message):
        StepCounterHook(examples_per_step=number)


# -- waiting for data -------------------------------------------------------------------------------------------------


def over(*nested: Callable[[], Iterable[object]]) -> Callable[[Loop], None]:
    """Return a function that drives a loop with ``until_stop`` over these, each nested in the previous one."""

    def drive(loop: Loop) -> None:
        first, *rest = nested
        for _ in loop.until_stop(first()):
            over(*rest)(loop) if rest else loop.run()

    return drive


def test_the_share_of_the_time_that_the_loop_waited_for_data_is_reported() -> None:
    training = Training()
    assert training.drive(over(lambda: training.waiting(3.0, 5))) == {
        RATE: [(3, 0.25), (5, 0.25)],
        WAITING: [(3, 0.75), (5, 0.75)],
    }
    assert training.lines == [f"{RATE}: 0.25", "waiting for data: 75.0% of the time"] * 2


def test_a_share_below_one_percent_is_not_logged() -> None:
    training = Training()
    curves = training.drive(over(lambda: training.waiting(1 / 128, 3)))
    ((step, share),) = curves[WAITING]
    assert (step, round(share, 6)) == (3, round(1 / 129, 6))
    assert [line.split(":")[0] for line in training.lines] == [RATE]


@pytest.mark.parametrize(("waited_secs", "lines"), [(2**-17, 0), (2**-16, 1)])
def test_waiting_less_than_ten_microseconds_per_step_is_not_logged(waited_secs: float, lines: int) -> None:
    training = Training()
    training.step_secs = waited_secs
    assert training.drive(over(lambda: training.waiting(waited_secs, 3)))[WAITING] == [(3, 0.5)]
    assert sum(line.startswith("waiting") for line in training.lines) == lines


def test_there_is_no_share_if_the_loop_did_not_wait() -> None:
    assert WAITING not in Training().drive(over(lambda: range(5)))


def test_there_is_no_share_without_until_stop() -> None:
    training = Training()

    def drive(loop: Loop) -> None:
        for _ in training.waiting(3.0, 5):
            loop.run()

    assert training.drive(drive) == {RATE: [(3, 0.25), (5, 0.25)]}


def test_with_epochs_around_batches_only_waiting_for_batches_counts() -> None:
    training = Training()
    curves = training.drive(over(lambda: training.waiting(96.0, 2), lambda: training.waiting(1.0, 3)))
    assert curves[WAITING] == [(3, 0.5), (5, 2 / 100)]


@pytest.mark.parametrize("device", [None, FakeDevice(lag=2, speed=5.0)], ids=repr)
def test_the_share_is_one_of_the_time_without_pauses(device: FakeDevice | None) -> None:
    training = Training()
    training.hooks.insert(0, Evaluating(training.clock, 30.0))
    with device or nullcontext():
        curves = training.drive(over(lambda: training.waiting(3.0, 3)))
    assert curves[WAITING] == [(3, 0.75)]


# -- a default period, and periods without steps -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "period", [{"every_n_secs": 5}, {"every_n_secs": 0.5}, {"every_n_epochs": 2}, {"timer": AtSteps([3])}, {}]
)
def test_the_default_period_holds_only_where_none_is_given(period: dict[str, Any]) -> None:
    hook = StepCounterHook(**period)
    assert hook.timer.every_steps == (None if period else 100)
    with pytest.raises(ValueError, match="100"):
        StepCounterHook(100, **(period or {"every_n_secs": 5}))


def test_none_is_no_period_as_in_tensorflow() -> None:
    with pytest.raises(ValueError, match="give one of every_n_steps=, every_n_secs="):
        StepCounterHook(every_n_steps=None)


@pytest.mark.parametrize("tokens", [8, lambda: 8])
def test_an_epoch_of_one_run_has_no_rate_and_its_time_counts_for_the_next(tokens: Any) -> None:
    def epochs(loop: Loop) -> None:
        for epoch in loop.until_stop(range(3)):
            for _ in loop.until_stop(range(3 if epoch else 1)):
                loop.run()
            training.clock.advance(0.5)  # what the script does between two epochs

    training = Training(examples_per_step=4, tokens_per_step=tokens)
    training.hooks = [
        StepCounterHook(every_n_epochs=1, summary_writer=training.writer, examples_per_step=4, tokens_per_step=tokens)
    ]
    curves = training.drive(epochs)
    assert {tag: [(step, round(value, 3)) for step, value in points] for tag, points in curves.items()} == {
        RATE: [(4, round(3 / 3.5, 3)), (7, round(3 / 3.5, 3))],
        EXAMPLES: [(4, round(12 / 3.5, 3)), (7, round(12 / 3.5, 3))],
        "tokens/sec": [(4, round(24 / 3.5, 3)), (7, round(24 / 3.5, 3))],
    }


def an_epoch_of_one_run_and_one_of_two(loop: Loop) -> None:
    for epoch in loop.until_stop(range(2)):
        for _ in loop.until_stop(range(2 if epoch else 1)):
            loop.run()


def test_a_rate_is_nan_before_the_first_period_with_steps() -> None:
    training = Training()
    training.hooks = [
        StepCounterHook(every_n_epochs=1, log=False),
        LoggingTensorHook(["steps_per_sec", "secs_per_step"], every_n_epochs=1),
    ]
    training.drive(an_epoch_of_one_run_and_one_of_two)
    assert training.lines == [
        "steps_per_sec = nan, secs_per_step = nan",
        "steps_per_sec = 1.0, secs_per_step = 1.0 (2.000 sec)",
    ]


def test_a_pause_at_the_end_of_an_epoch_without_a_rate_counts_for_no_other() -> None:
    def evaluate() -> dict[str, float]:
        training.clock.advance(10.0)
        return {"value": 1.0}

    training = Training()
    # The first one asks for the rate, so that the next period begins before the pause.
    training.hooks = [
        LoggingTensorHook(["steps_per_sec"], every_n_epochs=1),
        EvaluationHook(evaluate, every_n_epochs=1),
        StepCounterHook(every_n_epochs=1, summary_writer=training.writer),
    ]
    assert training.drive(an_epoch_of_one_run_and_one_of_two)[RATE] == [(3, 1.0)]
