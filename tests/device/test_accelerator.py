"""On an accelerator: the host never waits, whatever hooks ask for, and the values they get are right."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import pytest
import torch
from support import simulated
from support.accelerators import BUSY, DEVICE, Reader, Training, keep_busy, no_waits, warm_up

from torchhooks import (
    CheckpointSaverHook,
    Due,
    LoggingTensorHook,
    MonitoredLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    Saver,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    list_checkpoints,
    running_max,
    running_mean,
    running_sum,
    summary,
)
from torchhooks.common.files import Disk
from torchhooks.device.accelerator import AcceleratorCopier
from torchhooks.device.readback import MAX_BYTES, Readback
from torchhooks.testing import RecordingWriter, log_lines
from torchhooks.tools.watch import stalls

pytestmark = pytest.mark.accelerator

NOISE = 10 if DEVICE == simulated.NAME else 1
"""By how much the times of the device vary more than those of a GPU: threads have to wait for a processor."""


def drained(values: Any) -> Any:
    """Return ``values`` as a callback gets them."""
    readback, got = Readback(), list[Any]()
    readback.request(values, got.append)
    readback.drain()
    (value,) = got
    return value


# -- the host never waits ---------------------------------------------------------------------------------------------


def standard_hooks(stop: int, period: int) -> list[SessionRunHook]:
    ops = {
        "loss": "loss",
        "lr": "lr",
        "norm": lambda model: model[0].weight.norm(),
        "weights": summary.histogram("weights", "0.weight"),
    }
    return [
        StepCounterHook(period, summary_writer=RecordingWriter()),
        SummarySaverHook(period, summary_writer=RecordingWriter(), summary_op=ops),
        LoggingTensorHook(["loss", "global_step", "2.bias", "lr"], every_n_iter=period),
        NanTensorHook("loss", also_inf=True),
        NanTensorHook(["2.weight", "2.weight.grad"], fail_on_nan_loss=False),
        StopAtStepHook(last_step=stop),
    ]


@pytest.mark.parametrize("period", [1, 7])
def test_standard_hooks_never_make_the_host_wait(period: int) -> None:
    training = Training()
    loop = MonitoredLoop(training.step, training.model, training.optimizer, hooks=standard_hooks(60, period))
    with loop:
        loop.run()  # one-time initialization may wait
        with no_waits():
            for _ in loop.until_stop(itertools.count()):
                loop.run()
    assert loop.global_step == 60


def test_the_host_runs_ahead_of_a_busy_device() -> None:
    def step() -> torch.Tensor:
        keep_busy()
        return torch.ones((), device=DEVICE)

    done = torch.Event(DEVICE)
    with MonitoredLoop(step, hooks=[Reader(), NanTensorHook("loss")]) as loop:
        for run in range(80):
            if run == 40:
                torch.accelerator.synchronize()  # kernels are loaded at their first use
            loop.run()
        done.record()
        assert not done.query()


def test_a_run_that_waits_for_the_device_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "LOOK_SECS", 0.02)
    lines: list[str] = []

    def step(number: int) -> torch.Tensor:
        if number == 3:
            keep_busy(1.5)
        time.sleep(0.1)  # so that a look sees that the first runs are over
        return torch.ones((), device=DEVICE)

    reader = Reader(max_lag_runs=0)
    with log_lines() as found, MonitoredLoop(step, hooks=[reader], checkpoint_dir=tmp_path, stall_secs=0.3) as loop:
        for number in range(6):
            loop.run(number)
        lines += [text for level, text in found if level == "CRITICAL"]
    assert len(lines) == 1
    assert "It is in run 4: waits for the device, test_accelerator.py:" in lines[0]


def test_a_value_that_has_not_arrived_by_its_deadline_is_waited_for() -> None:
    reader = Reader(max_lag_runs=0)

    def step() -> torch.Tensor:
        keep_busy()
        return torch.ones((), device=DEVICE)

    with MonitoredLoop(step, hooks=[reader]) as loop:
        for run in range(1, 4):
            loop.run()
            assert len(reader.read) == run


# -- the values are right ---------------------------------------------------------------------------------------------


def test_values_are_those_of_their_runs() -> None:
    training, reader = Training(), Reader()
    training.run(reader, runs=200)
    assert reader.read == [(step, loss.cpu()) for step, loss in enumerate(training.losses, 1)]


def test_an_in_place_update_does_not_change_a_value_in_flight() -> None:
    counter, reader = torch.zeros(3, device=DEVICE), Reader(lambda: counter)

    def step() -> None:
        keep_busy()
        counter.add_(1)

    with MonitoredLoop(step, hooks=[reader]) as loop:
        for _ in range(40):
            loop.run()
    assert reader.values == [[float(run)] * 3 for run in range(1, 41)]


def test_a_tensor_that_a_hook_passes_itself_has_the_value_of_that_moment() -> None:
    counter, got = torch.zeros(3, device=DEVICE), list[Any]()

    class Handing(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            run_context.when_ready([counter, counter.view(3, 1)[1:]], got.append)

    def step() -> None:
        keep_busy()
        counter.add_(1)

    with MonitoredLoop(step, hooks=[Handing()]) as loop:
        for _ in range(20):
            loop.run()
    assert [[part.tolist() for part in parts] for parts in got] == [
        [[float(run)] * 3, [[float(run)]] * 2] for run in range(1, 21)
    ]


def test_memory_of_values_in_flight_is_not_reused_too_early() -> None:
    reader, numbers, size = Reader(), itertools.count(1), 1 << 16

    def step() -> torch.Tensor:
        keep_busy()
        torch.full((size,), -1.0, device=DEVICE)  # freed at once, for the next allocation
        return torch.full((size,), float(next(numbers)), device=DEVICE)

    with MonitoredLoop(step, hooks=[reader]) as loop:
        for _ in range(40):
            loop.run()
    assert all(bool((values == step).all()) for step, values in reader.read)


DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_unchanged(dtype: torch.dtype) -> None:
    here = [torch.tensor(values).to(dtype) for values in ([0.0, 1.0, 1.0], [1.0, 0.0, 0.0], 1.0)]
    came = drained([value.to(DEVICE) for value in here])
    assert [value.dtype for value in came] == [dtype] * 3
    assert [value.to(torch.complex128).tolist() for value in came] == [
        value.to(torch.complex128).tolist() for value in here
    ]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda base: base.T,
    "a column": lambda base: base[:, 1],
    "expanded": lambda base: base[0, :1].expand(5, 1),
    "conjugate": lambda base: (base * 1j).conj(),
    "negative": lambda base: (base * 1j).conj().imag,
    "of another dtype": lambda base: base.to(torch.complex64).real,
    "with a graph": lambda base: base.clone().requires_grad_() * 2,
    "many elements": lambda base: base.repeat(1000, 3).T,
    "none": lambda base: base[:0],
    "one": lambda base: base[:1, :1],
}
if DEVICE != simulated.NAME:  # which has strided tensors only
    VIEWS["sparse"] = lambda base: base.to_sparse()


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_every_kind_of_tensor_arrives_unchanged(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    came = drained({"a": view(base.to(DEVICE)), "b": base.to(DEVICE)})
    assert torch.equal(came["a"].to_dense(), view(base).to_dense())
    assert torch.equal(came["b"], base)
    assert not came["a"].requires_grad


def test_values_on_the_host_arrive_with_the_device_values_of_their_request() -> None:
    here = torch.ones(2)
    readback, got = Readback(), list[Any]()
    readback.request({"there": torch.ones(2, device=DEVICE), "here": here, "number": 3}, got.append)
    here.add_(1)
    readback.drain()
    assert {name: torch.as_tensor(value).tolist() for name, value in got[0].items()} == {
        "there": [1.0, 1.0],
        "here": [1.0, 1.0],
        "number": 3,
    }


def test_values_arrive_in_ordinary_memory() -> None:
    came = drained(torch.ones(5, device=DEVICE))
    assert not came.is_pinned()
    assert came.is_cpu


@pytest.mark.parametrize("inference_first", [True, False])
def test_a_loop_in_inference_mode_and_one_outside_share_buffers(inference_first: bool) -> None:
    for inference in (inference_first, not inference_first):
        reader = Reader()
        with (
            torch.inference_mode(inference),
            MonitoredLoop(lambda: torch.ones((), device=DEVICE), hooks=[reader]) as loop,
        ):
            for _ in range(40):
                loop.run()
        assert reader.values == [1.0] * 40


def test_the_default_device_makes_no_difference() -> None:
    with torch.device(DEVICE):
        assert drained(torch.ones(5000)).is_cpu


@contextmanager
def no_pinning() -> Iterator[None]:
    """Fail if memory is pinned."""

    def refuse(nbytes: int) -> torch.Tensor:
        raise AssertionError(f"{nbytes} bytes are pinned")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchhooks.device.accelerator.pinned", refuse)
        yield


def test_copies_are_made_in_one_block_of_pinned_memory() -> None:
    copier = AcceleratorCopier()
    torch.ones(1, device=DEVICE)  # initializes the device
    copier.prepare(1 << 20)
    device = torch.device(DEVICE, torch.accelerator.current_device_index())
    with no_pinning():
        for numel in (10, 10_000, 1_000_000):  # the last one is larger than the block
            transfer = copier.start([torch.full((numel,), 3.0, device=DEVICE)], copier.stream(device))
            transfer.wait()
            (came,) = transfer.tensors()
            assert came.eq(3.0).all()


def test_allocated_memory_does_not_grow() -> None:
    training = Training()
    with MonitoredLoop(training.step, training.model, training.optimizer, hooks=standard_hooks(2000, 1)) as loop:
        for _ in range(200):
            loop.run()
        torch.accelerator.synchronize()
        training.losses.clear()
        before = torch.accelerator.memory_allocated()
        for _ in loop.until_stop(range(300)):
            loop.run()
            training.losses.clear()
        assert torch.accelerator.memory_allocated() <= before + (1 << 20)


# -- checkpoints ------------------------------------------------------------------------------------------------------


class PinnedDisk(Disk):
    """Records the address of each 4 MB block that is written, and whether its memory is pinned."""

    def __init__(self) -> None:
        self.read_from: list[tuple[int, bool]] = []

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        if len(data) == 4_000_000:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the memory is read-only
                memory = torch.frombuffer(data, dtype=torch.uint8)
            self.read_from.append((memory.data_ptr(), memory.is_pinned()))
        super().write(file, data)


def test_an_asynchronous_save_does_not_make_the_host_wait(tmp_path: Path) -> None:
    weight, saver = torch.nn.Parameter(torch.zeros(1_000_000, device=DEVICE)), Saver(async_save=True)
    session = Session(torch.nn.ParameterList([weight]))
    paths, pending = [], []
    for step in (1, 2, 3):
        saver.wait()  # a save waits for the one before it, however slow the disk is
        with torch.no_grad():
            with no_waits():
                keep_busy(40 * BUSY)
                weight.fill_(step)
                paths.append(saver.save(session, tmp_path / "model.ckpt", step))
            queued = torch.Event(DEVICE)
            queued.record()
            pending.append(not queued.query())
            weight.fill_(-1)  # queued after the copy
    saver.close()
    assert all(pending[1:])  # the first save has to allocate pinned memory, for which CUDA may wait
    for step, path in enumerate(paths, 1):
        (saved,) = torch.load(f"{path}/state.pt", weights_only=True)["model"].values()
        assert saved.unique().tolist() == [step]


def test_copies_for_a_checkpoint_reuse_pinned_memory(tmp_path: Path) -> None:
    saver, disk = Saver(async_save=True), PinnedDisk()
    saver.disk = disk
    tied = torch.nn.Parameter(torch.zeros(1_000_000, device=DEVICE))
    session = Session(torch.nn.ParameterList([tied, tied, torch.zeros(1_000_000)]))  # the last one is on the host
    for step in (1, 2, 3):
        path = saver.save(session, tmp_path / "model.ckpt", step)
    saver.close()
    (first, pinned), (second, ordinary) = disk.read_from[:2]
    assert (pinned, ordinary) == (True, False)
    assert disk.read_from == [(first, True), (second, False)] * 3
    saved = torch.load(f"{path}/state.pt", weights_only=True)["model"]
    assert saved["0"].data_ptr() == saved["1"].data_ptr()


def test_an_asynchronous_save_with_a_nan_hook_and_values_in_flight_does_not_make_the_host_wait(tmp_path: Path) -> None:
    saver, training = Saver(async_save=True), Training()

    def step() -> torch.Tensor:
        keep_busy()
        return training.step()

    hooks = [Reader(), NanTensorHook(["loss", "0.weight"]), CheckpointSaverHook(tmp_path, save_steps=30, saver=saver)]
    with MonitoredLoop(step, training.model, training.optimizer, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for _ in range(59):
            loop.run()
        saver.wait()
        torch.accelerator.synchronize()
        done = torch.Event(DEVICE)
        with no_waits():
            keep_busy(40 * BUSY)
            loop.run()  # saves a checkpoint
            done.record()
        assert not done.query()
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0, 30, 60]


def test_a_nan_that_is_still_on_the_device_is_not_committed(tmp_path: Path) -> None:
    saver, numbers = Saver(async_save=True), itertools.count(1)

    def step() -> torch.Tensor:
        keep_busy(4 * BUSY)
        return torch.full((), math.nan if next(numbers) == 5 else 0.5, device=DEVICE)

    hooks = [
        CheckpointSaverHook(tmp_path, save_steps=1, saver=saver),
        NanTensorHook("loss", fail_on_nan_loss=False),
    ]
    with MonitoredLoop(step, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for _ in loop.until_stop(range(8)):
            loop.run()
    saver.close()
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_request_is_copied_on_the_stream_that_was_current() -> None:
    """Without that, the copy on the default stream would be made before the value is computed."""
    side = torch.Stream(device=DEVICE)
    for number in range(100):
        readback, got = Readback(), list[Any]()
        readback.request(torch.ones((), device=DEVICE), got.append)
        with side:
            keep_busy()
            readback.request(torch.full((1000,), float(number), device=DEVICE), got.append)
        readback.drain()
        assert got[1].eq(number).all()


def test_the_memory_of_large_values_in_flight_is_bounded() -> None:
    reader = Reader()

    def step() -> torch.Tensor:
        keep_busy()
        return torch.ones(1 << 20, device=DEVICE)

    with MonitoredLoop(step, hooks=[reader]) as loop:
        loop.run()
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(60):
            loop.run()
            reader.read.clear()
        assert torch.accelerator.max_memory_allocated() <= before + MAX_BYTES + (16 << 20)


# -- streams and devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 3])
def test_each_run_can_use_another_stream(streams: int) -> None:
    pool, reader = [torch.Stream(device=DEVICE) for _ in range(streams)], Reader()
    numbers = itertools.count(1)

    def step() -> torch.Tensor:
        keep_busy()
        return torch.full((), float(next(numbers)), device=DEVICE)

    with MonitoredLoop(step, hooks=[reader, NanTensorHook("loss")]) as loop:
        for run in range(45):
            with pool[run % streams]:
                loop.run()
    assert reader.values == [float(run) for run in range(1, 46)]


def test_a_loop_that_closes_on_another_stream_waits_for_the_values() -> None:
    stream, reader = torch.Stream(device=DEVICE), Reader()

    def step() -> torch.Tensor:
        keep_busy(20 * BUSY)
        return torch.ones((), device=DEVICE)

    with MonitoredLoop(step, hooks=[reader]) as loop, stream:
        loop.run()
    assert reader.values == [1.0]


def test_steps_per_second_if_runs_change_their_stream() -> None:
    writer, streams = RecordingWriter(), [torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)]
    model = torch.nn.Linear(1, 1).to(DEVICE)
    with MonitoredLoop(keep_busy, model, hooks=[StepCounterHook(5, summary_writer=writer)]) as loop:
        for run in range(21):
            with streams[run // 5 % 2]:
                loop.run()
    assert [step for step, _ in writer.scalars["global_step/sec"]] == [6, 11, 16, 21]


# In torch 2.7, device_count() raises an error without a device.
TWO_DEVICES = torch.accelerator.is_available() and torch.accelerator.device_count() > 1


@pytest.mark.skipif(not TWO_DEVICES, reason="needs two devices")
def test_values_of_two_devices_arrive_together() -> None:
    reader = Reader({"one": "one", "both": ["one", "two"]})

    def step() -> dict[str, torch.Tensor]:
        return {"one": torch.ones(2, device=f"{DEVICE}:0"), "two": torch.full((2,), 2.0, device=f"{DEVICE}:1")}

    with MonitoredLoop(step, hooks=[reader]) as loop:
        for _ in range(40):
            loop.run()
    assert [[part.tolist() for part in values["both"]] for _, values in reader.read] == [[[1.0] * 2, [2.0] * 2]] * 40


# -- hooks ------------------------------------------------------------------------------------------------------------


def test_log_lines_have_the_values_of_their_runs() -> None:
    training = Training()
    with log_lines() as lines:
        training.run(LoggingTensorHook(["loss", "global_step"], every_n_iter=3))
    losses = [loss.cpu().numpy()[()] for loss in training.losses]  # np.float32, which prints the digits of a float32
    expected = [f"loss = {losses[step - 1]!s}, global_step = {step}" for step in range(1, 41, 3)]
    assert [text.split(" (")[0] for _, text in lines] == expected


def test_points_have_the_values_of_their_runs() -> None:
    training, writer = Training(), RecordingWriter()
    training.run(SummarySaverHook(1, summary_writer=writer, summary_op="loss"))
    assert writer.scalars["loss"] == [(step, loss.item()) for step, loss in enumerate(training.losses, 1)]


def test_steps_per_second_are_within_one_percent_of_the_devices() -> None:
    writer, period = RecordingWriter(), 20
    events = [torch.Event(DEVICE, enable_timing=True)]  # of no step
    warm_up()

    def step() -> None:
        keep_busy()
        events.append(torch.Event(DEVICE, enable_timing=True))
        events[-1].record()

    hooks = [StepCounterHook(period, summary_writer=writer)]
    with MonitoredLoop(step, torch.nn.Linear(1, 1).to(DEVICE), hooks=hooks) as loop:
        for _ in range(15 * period + 1):
            loop.run()
    torch.accelerator.synchronize()
    rates = writer.scalars["global_step/sec"]
    assert len(rates) == 15
    true = [period * 1e3 / events[end - period].elapsed_time(events[end]) for end, _ in rates]
    errors = sorted(abs(rate / by_events - 1) for (_, rate), by_events in zip(rates, true, strict=True))
    # A period in which the host was interrupted between the two events may be off by more.
    assert median(errors) <= 0.01 * NOISE
    assert errors[11] <= 0.02 * NOISE


def rate_with_pauses(secs: float) -> float:
    """Return the steps per second that are reported if the device has other work to do after every step."""
    writer = RecordingWriter()
    hooks = [StepCounterHook(20, summary_writer=writer)]
    with MonitoredLoop(keep_busy, torch.nn.Linear(1, 1).to(DEVICE), hooks=hooks) as loop:
        for _ in range(21):
            loop.run()
            with loop.session.paused():
                keep_busy(secs)
    return float(writer.scalars["global_step/sec"][0][1])


def test_a_pause_on_the_device_is_not_counted() -> None:
    warm_up()
    # The best of five, because other processes of the machine only slow it down. Pauses that count leave a fifth of it.
    with_pauses, without = (max(rate_with_pauses(secs) for _ in range(5)) for secs in (4 * BUSY, 1e-6))
    assert with_pauses == pytest.approx(without, rel=0.5 if DEVICE == simulated.NAME else 0.1)


@pytest.mark.parametrize("bound", [None, 0, 3])
def test_the_error_names_the_step_of_the_nan(bound: int | None) -> None:
    numbers = itertools.count(1)

    def step() -> torch.Tensor:
        keep_busy()
        return torch.full((2,), math.nan if next(numbers) == 5 else 0.5, device=DEVICE)

    def train() -> None:
        with MonitoredLoop(step, hooks=[NanTensorHook("loss", max_lag_steps=bound)]) as loop:
            for _ in range(60):
                loop.run()

    with pytest.raises(NanLossDuringTrainingError, match="loss is NaN at step 5"):
        train()
    assert bound is None or next(numbers) <= 5 + bound + 1


def test_with_a_grad_scaler_only_completed_optimizer_steps_count() -> None:
    training, scaler = Training(), torch.amp.GradScaler(DEVICE, init_scale=4.0)
    factors = iter([1.0, math.inf, 1.0, 1.0])

    def step() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss: torch.Tensor = training.model(training.batch).square().mean()
        scaler.scale(loss * next(factors)).backward()
        scaler.step(training.optimizer)
        scaler.update()
        return loss

    reader, hooks = Reader("global_step"), [NanTensorHook("loss"), StopAtStepHook(last_step=3)]
    with MonitoredLoop(
        step, training.model, training.optimizer, hooks=[*hooks, reader], step_unit="optimizer_step"
    ) as loop:
        for _ in loop.until_stop(range(4)):
            loop.run()
    assert [step for step, _ in reader.read] == [1, 1, 2, 3]


# -- what waits -------------------------------------------------------------------------------------------------------


def event() -> torch.Event:
    made = torch.Event(DEVICE)
    made.record()
    return made


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "cpu": lambda loss: loss.cpu(),
    "item": lambda loss: loss.item(),
    "tolist": lambda loss: loss.tolist(),
    "numpy": lambda loss: loss.numpy(force=True),
    "float": float,
    "a mask": lambda loss: loss.reshape(1)[loss.reshape(1) > 0],
    "tensor": lambda loss: torch.tensor([1.0], device=DEVICE),
    "to": lambda loss: torch.ones(3).to(DEVICE),
    "copy_": lambda loss: torch.empty(()).copy_(loss),
    "an event": lambda loss: event().synchronize(),
    "a stream": lambda loss: torch.accelerator.current_stream().synchronize(),
    "the device": lambda loss: torch.accelerator.synchronize(),
}


@pytest.mark.skipif(DEVICE != simulated.NAME, reason="other devices do not tell of all of them")
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_the_simulated_device_tells_of_every_wait(wait: Callable[[torch.Tensor], object]) -> None:
    loss = torch.ones((), device=DEVICE)
    with pytest.raises(AssertionError), no_waits():
        wait(loss)


@pytest.mark.parametrize(
    "goes_on",
    [
        lambda loss: loss + torch.ones(()),
        lambda loss: torch.empty(1, pin_memory=True).copy_(loss, non_blocking=True),
        lambda loss: event().query(),
    ],
)
def test_a_device_tells_of_nothing_that_does_not_wait(goes_on: Callable[[torch.Tensor], object]) -> None:
    loss = torch.ones((), device=DEVICE)
    goes_on(loss)  # one-time initialization may wait
    with no_waits():
        goes_on(loss)


# -- running fetches ----------------------------------------------------------------------------------------------


class Reporter(Reader):
    """Requests a value in every tenth run."""

    def __init__(self, fetches: Any) -> None:
        super().__init__(fetches)
        self.request = SessionRunArgs(fetches)

    def next_due(self) -> Due:
        return Due(runs=10)

    def values_of_pairs(self) -> list[Any]:
        return [tuple(value.tolist() for value in values) for _, values in self.read]


def test_running_fetches_are_right_and_never_wait() -> None:
    training = Training()
    fetches = running_mean("loss"), running_max("loss"), running_sum(lambda loss: loss.bfloat16())
    hook = Reporter(fetches)
    with MonitoredLoop(training.step, training.model, training.optimizer, hooks=[hook]) as loop:
        loop.run()
        with no_waits():
            for _ in range(39):
                loop.run()
    losses = torch.stack(training.losses).double().cpu().split(10)
    assert [step for step, _ in hook.read] == [10, 20, 30, 40]
    for (_, (mean, largest, total)), expected in zip(hook.read, losses, strict=True):
        assert mean.item() == pytest.approx(expected.mean().item(), rel=1e-6)
        assert largest.item() == expected.max().item()
        assert total.item() == pytest.approx(expected.sum().item(), rel=0.01)


def running_values_of(outputs: dict[str, torch.Tensor], replay: Callable[[int], object]) -> list[Any]:
    """Return the running mean of "double" and maximum of "same", of steps that write to the memory of ``outputs``."""

    def step(number: int) -> dict[str, torch.Tensor]:
        replay(number)
        return outputs

    hook = Reporter((running_mean("double"), running_max("same")))
    with MonitoredLoop(step, hooks=[hook]) as loop:
        for number in range(1, 21):
            keep_busy(1e-4)
            loop.run(number)
    return hook.values_of_pairs()


def test_running_fetches_of_a_step_that_reuses_its_memory() -> None:
    outputs = {"double": torch.zeros((), device=DEVICE), "same": torch.zeros(1, device=DEVICE)}

    def replay(number: int) -> None:
        outputs["double"].fill_(2 * number)
        outputs["same"].fill_(number)

    assert running_values_of(outputs, replay) == [(11.0, 10.0), (31.0, 20.0)]


@pytest.mark.cuda
def test_running_fetches_of_a_cuda_graph_that_reuses_its_memory() -> None:
    inputs = torch.zeros((), device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    (inputs * 2)  # initialised before the capture
    torch.accelerator.synchronize()
    with torch.cuda.graph(graph):
        outputs = {"double": inputs * 2, "same": inputs * torch.ones(1, device=DEVICE)}

    def replay(number: int) -> None:
        inputs.fill_(number)
        graph.replay()

    assert running_values_of(outputs, replay) == [(11.0, 10.0), (31.0, 20.0)]


@pytest.mark.cuda
def test_one_launch_in_a_run_for_the_means_of_one_dtype() -> None:
    outputs = {str(index): torch.ones((), device=DEVICE, dtype=torch.bfloat16) for index in range(20)}
    hook = Reporter({name: running_mean(name) for name in outputs})
    with MonitoredLoop(lambda: outputs, hooks=[hook]) as loop:
        for _ in range(2):
            loop.run()
        torch.accelerator.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(5):
                loop.run()
            torch.accelerator.synchronize()
    # What the device does, without the points at which the host waits for it.
    work = [event.name for event in profile.events() if "CUDA" in str(event.device_type) and "Sync" not in event.name]
    assert len(work) == 5, work
