"""The device that the CPU stands for, in tests without an accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.devices import FakeDevice

from torchhooks import (
    CheckpointSaverHook,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    Saver,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    summary,
)
from torchhooks.device.accelerator import host
from torchhooks.device.readback import is_remote
from torchhooks.testing import RecordingWriter, trace

# -- FakeDevice -------------------------------------------------------------------------------------------------------


def test_a_tensor_is_on_a_device_while_one_is_entered() -> None:
    tensor = torch.ones(2)
    with FakeDevice():
        assert is_remote(tensor)
    assert not is_remote(tensor)


def test_leaving_a_device_restores_the_copiers() -> None:
    before = host.copier("cpu")
    device = FakeDevice()
    with device, FakeDevice(), device:
        assert host.copier("cpu") is device
    assert host.copier("cpu") is before


def test_the_device_that_was_entered_last_is_the_one_in_use() -> None:
    with FakeDevice() as outer:
        with FakeDevice() as inner:
            assert host.copier("cpu") is inner
        assert host.copier("cpu") is outer


def test_a_device_counts_what_it_copies() -> None:
    with FakeDevice() as device:
        trace(LoggingTensorHook({"one": "loss", "two": lambda loss: loss * 2}, every_n_iter=1))
    assert (device.copies, device.batches) == (6, 2)


def test_a_wait_at_the_end_is_counted() -> None:
    with FakeDevice(lag=1000) as device:
        trace(LoggingTensorHook(["loss"], every_n_iter=1))
    assert device.waits == device.batches


def test_a_value_that_has_arrived_is_not_waited_for() -> None:
    with FakeDevice(lag=0) as device:
        trace(LoggingTensorHook(["loss"], every_n_iter=1), secs=0.0)
        assert device.waits == 0


def test_the_time_between_two_events_is_unknown_until_the_device_has_reached_both() -> None:
    device = FakeDevice(lag=2)
    first, second = device.moment(torch.device("cpu")), device.moment(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="the device has not reached both events"):
        second.secs_since(first)
    second.wait()
    assert second.secs_since(first) >= 0


@pytest.mark.parametrize("device", [FakeDevice(), FakeDevice(lag=3, speed=2.0)])
def test_the_repr_makes_the_device_again(device: FakeDevice) -> None:
    again = eval(repr(device))
    assert (again.lag, again.speed) == (device.lag, device.speed)


# -- what waits for it ------------------------------------------------------------------------------------------------


class Later(SessionRunHook):
    """Reads the loss when it has arrived on the host."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs("loss")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        run_context.when_ready(run_values.results, lambda loss: None)


@pytest.mark.parametrize(("lag", "waits"), [(0, 2), (None, 0)])
def test_a_nan_hook_waits_only_if_it_may_not_lag(lag: int | None, waits: int) -> None:
    hook = NanTensorHook("loss", max_lag_steps=lag)
    with FakeDevice(1000) as device, MonitoredLoop(lambda: torch.ones(()), hooks=[hook]) as loop:
        for _ in range(2):
            loop.run()
        assert device.waits == waits


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("driven", [True, False])
def test_only_a_synchronous_save_waits_for_values_in_flight(async_save: bool, driven: bool, tmp_path: Path) -> None:
    saving = CheckpointSaverHook(tmp_path, save_steps=2, saver=Saver(async_save=async_save))
    with (
        FakeDevice(1000) as device,
        MonitoredLoop(lambda: torch.ones(()), hooks=[Later(), saving], checkpoint_dir=tmp_path) as loop,
    ):
        for _ in loop.until_stop(range(3)) if driven else range(3):
            loop.run()
        assert device.waits == (not async_save)


class Small:
    """A small but complete training run: two weights, a loss, an optimizer."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(4, 2)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss  # type: ignore[no-any-return]


def standard_hooks(stop: int) -> list[SessionRunHook]:
    """Return all standard hooks, due in every run."""
    ops = {
        "loss": "loss",
        "lr": "lr",
        "norm": lambda model: model.weight.norm(),
        "weights": summary.histogram("weights", "weight"),
        "gradients": summary.histogram("gradients", "weight.grad"),
    }
    return [
        StepCounterHook(1, summary_writer=RecordingWriter(), examples_per_step=4),
        SummarySaverHook(1, summary_writer=RecordingWriter(), summary_op=ops),
        LoggingTensorHook(["loss", "global_step", "bias", "lr"], every_n_iter=1),
        NanTensorHook("loss", also_inf=True),
        NanTensorHook(["weight", "weight.grad"], fail_on_nan_loss=False),
        StopAtStepHook(last_step=stop),
    ]


@pytest.mark.parametrize("lag", [0, 5, 1000])
def test_standard_hooks_never_make_the_host_wait(lag: int) -> None:
    training = Small()
    with FakeDevice(lag) as device:
        loop = MonitoredLoop(training.step, training.model, training.optimizer, hooks=standard_hooks(40))
        for _ in loop.until_stop(range(50)):
            loop.run()
        waited = device.waits
        loop.close()
    assert (loop.global_step, waited) == (40, 0)
