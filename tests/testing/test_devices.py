"""The fake device, and the audit of the operations that block the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices import FakeDevice, Sync, sync_audit

from torchhooks import (
    CheckpointSaverHook,
    Due,
    FinalOpsHook,
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
from torchhooks.device.host import host
from torchhooks.device.readback import is_remote, to_host
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


# -- sync_audit -------------------------------------------------------------------------------------------------------

LOSSES = [torch.tensor([0.5, 0.25]), torch.tensor([0.25, 0.125])]


def audited(*hooks: SessionRunHook, losses: Any = LOSSES) -> list[Sync]:
    """Return what the audit of a loop with ``hooks`` lists."""
    with sync_audit("cpu") as syncs:
        trace(*hooks, losses=losses)
    return syncs


class Doing(SessionRunHook):
    """Calls a function with the loss after every run."""

    def __init__(self, what: Callable[[torch.Tensor], object]) -> None:
        self.what = what

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs("loss")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.do(run_values.results)

    def do(self, loss: torch.Tensor) -> None:
        self.what(loss)

    def __repr__(self) -> str:
        return "Doing()"


def write_at(loss: torch.Tensor, values: Any) -> None:
    loss[loss > 0] = values


BLOCKING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda loss: loss[0].item(),
    "float": lambda loss: float(loss[0]),
    "if": lambda loss: 1 if loss[0] > 0 else 2,
    "nonzero": lambda loss: loss.nonzero(),
    "where": lambda loss: torch.where(loss > 0),
    "mask": lambda loss: loss[loss > 0],
    "write at a mask": lambda loss: write_at(loss, torch.ones(2)),
    "masked_select": lambda loss: loss.masked_select(loss > 0),
    "unique": lambda loss: loss.unique(),
    "unique_consecutive": lambda loss: loss.unique_consecutive(),
    "equal": lambda loss: torch.equal(loss, loss),
    "allclose": lambda loss: torch.allclose(loss, loss),
    "bincount": lambda loss: loss.int().bincount(),
}
NOT_BLOCKING: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda loss: (loss * 2).mean().isnan(),
    "index": lambda loss: loss[0] + loss[torch.tensor([1, 0])] + loss[None, :1],
    "fill at a mask": lambda loss: write_at(loss, 0.0),
    "write at indexes": lambda loss: loss.__setitem__(torch.tensor([0, 1]), torch.ones(2)),
    "where, three": lambda loss: torch.where(loss > 0, loss, 0.0),
    "copy": lambda loss: loss.detach().clone().add_(1),
}


@pytest.mark.parametrize("what", BLOCKING.values(), ids=BLOCKING)
def test_a_hook_that_blocks_the_host_is_listed(what: Callable[[torch.Tensor], object]) -> None:
    hook = Doing(what)
    syncs = audited(NanTensorHook("loss"), hook)
    assert list(dict.fromkeys(sync[:3] for sync in syncs)) == [(hook, "after_run", 1), (hook, "after_run", 2)]


@pytest.mark.parametrize("what", NOT_BLOCKING.values(), ids=NOT_BLOCKING)
def test_an_operation_that_does_not_block_the_host_is_not_listed(what: Callable[[torch.Tensor], object]) -> None:
    assert audited(Doing(what)) == []


def test_a_sync_reads_as_a_sentence() -> None:
    (sync, _) = audited(Doing(lambda loss: loss[0].item()))
    assert str(sync) == "Doing() in after_run at step 1: aten._local_scalar_dense"


def test_each_method_is_named() -> None:
    class Everywhere(SessionRunHook):
        def before_run(self, run_context: SessionRunContext) -> None:
            torch.ones(()).item()

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            torch.ones(()).item()

        def end(self, session: Any) -> None:
            torch.ones(()).item()

    assert [sync[1:3] for sync in audited(Everywhere(), losses=[0.5])] == [
        ("before_run", 0),
        ("after_run", 1),
        ("end", 1),
    ]


def test_a_hook_whose_due_when_blocks_the_host_is_listed() -> None:
    class Watching(Doing):
        def next_due(self) -> Due:
            return Due(when=lambda loss: loss[0].item() < 0)

    hook = Watching(print)
    assert {sync[:3] for sync in audited(NanTensorHook("loss"), hook)} == {(hook, "Due.when", 1), (hook, "Due.when", 2)}


def test_a_closure_is_attributed_to_the_hook_that_asked_for_it() -> None:
    hook = LoggingTensorHook({"loss": lambda loss: loss[0].item()}, every_n_iter=2)
    assert [sync[:3] for sync in audited(NanTensorHook("loss"), hook)] == [(hook, "fetch", 1)]


def test_a_fetch_that_a_hook_evaluates_itself_is_attributed_to_its_method() -> None:
    class Running(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            run_context.session.run(lambda loss: loss[0].item())

    hook, final = Running(), FinalOpsHook(lambda: torch.ones(()).item())
    assert [sync[:3] for sync in audited(hook, final, losses=LOSSES[:1])] == [(hook, "after_run", 1), (final, "end", 1)]


def test_operations_of_the_step_are_not_listed() -> None:
    with (
        sync_audit("cpu") as syncs,
        MonitoredLoop(lambda: torch.ones(()).item(), hooks=[NanTensorHook("loss")]) as loop,
    ):
        loop.run()
        loop.session.run(lambda: torch.ones(()).item())
    assert syncs == []


class Later(SessionRunHook):
    """Reads the loss when it has arrived on the host."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs("loss")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        run_context.when_ready(run_values.results, lambda loss: self.seen.append(loss[0].item()))


def test_a_callback_can_read_values_that_have_arrived() -> None:
    hook = Later()
    assert audited(hook) == []
    assert hook.seen == [0.5, 0.25]


def test_a_callback_that_is_called_at_once_can_read_its_values() -> None:
    class AtOnce(Doing):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            run_context.when_ready(to_host(run_values.results), lambda loss: loss[0].item())

    hook = AtOnce(print)
    assert {sync.operation for sync in audited(hook)} == {"a wait for a tensor that is read at once"}


def test_what_a_hook_does_between_two_items_is_listed() -> None:
    class AfterItem(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            run_context.after_item(lambda: torch.ones(()).item())

    hook = AfterItem()
    with MonitoredLoop(lambda: None, hooks=[hook]) as loop, sync_audit("cpu") as syncs:
        for _ in loop.until_stop(range(2)):
            loop.run()
    assert [sync[:3] for sync in syncs] == [(hook, "after_item", 1), (hook, "after_item", 2)]


def test_the_methods_outside_of_runs_are_named() -> None:
    class Elsewhere(SessionRunHook):
        def begin(self) -> None:
            torch.ones(()).item()

        def after_create_session(self, session: Any, coord: Any) -> None:
            torch.ones(()).item()

        def next_due(self) -> Due:
            torch.ones(()).item()
            return Due(runs=2)

        def sat_out(self, runs: int) -> None:
            torch.ones(()).item()

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            pass

    assert [sync[1:3] for sync in audited(Elsewhere(), losses=[0.5, 0.25])] == [
        ("begin", 0),
        ("after_create_session", 0),
        ("next_due", 0),
        ("sat_out", 2),
        ("next_due", 2),
    ]


def test_a_loop_can_continue_after_the_audit() -> None:
    hook = Later()
    with MonitoredLoop(lambda: torch.ones(1), hooks=[hook]) as loop:
        with sync_audit("cpu"):
            loop.run()
        loop.run()
    assert hook.seen == [1.0, 1.0]


def test_an_audit_uses_a_fake_device_that_is_entered() -> None:
    with FakeDevice() as device:
        audited(Later())
    assert device.copies == 2


@pytest.mark.parametrize("device", ["gpu", "cuda:0", 0])
def test_an_audit_refuses_an_unknown_device(device: Any) -> None:
    with pytest.raises(ValueError, match=rf"device={device!r}\): on this machine, give None"), sync_audit(device):
        pass


@pytest.mark.parametrize(
    ("owner", "function", "operation"),
    [
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.accelerator, "synchronize", "torch.accelerator.synchronize"),
        (torch.cuda.Event, "synchronize", "torch.cuda.Event.synchronize"),
        (torch.cuda.Stream, "synchronize", "torch.cuda.Stream.synchronize"),
        (torch.Tensor, "pin_memory", "Tensor.pin_memory"),
    ],
    ids=str,
)
def test_a_function_that_torch_does_not_report_is_listed(
    owner: Any, function: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, function, lambda *args: None, raising=False)
    hook = Doing(lambda loss: getattr(owner, function)(loss))
    assert audited(hook, losses=LOSSES[:1]) == [(hook, "after_run", 1, operation)]


def test_the_audit_leaves_the_functions_as_they_were() -> None:
    before = [torch.cuda.synchronize, torch.cuda.Event.synchronize, torch.Tensor.pin_memory]
    audited()
    assert [torch.cuda.synchronize, torch.cuda.Event.synchronize, torch.Tensor.pin_memory] == before
    assert "pin_memory" not in vars(torch.Tensor)


class Hurried(Doing):
    """Requests the loss, to arrive by a deadline."""

    def __init__(self, max_lag_runs: int) -> None:
        super().__init__(lambda loss: None)
        self.max_lag_runs = max_lag_runs

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        run_context.when_ready(run_values.results, self.do, max_lag_runs=self.max_lag_runs)


def audited_on(device: FakeDevice, *hooks: SessionRunHook, losses: Any = LOSSES) -> list[Sync]:
    """Return what the audit of a loop on ``device`` lists."""
    with device:
        return audited(*hooks, losses=losses)


def test_a_wait_at_a_deadline_is_listed_with_the_hook_and_the_step_of_the_value() -> None:
    hook = Hurried(max_lag_runs=1)
    syncs = audited_on(FakeDevice(lag=1000), Later(), hook, losses=LOSSES * 2)
    # When the device has completed the first copy, it has completed the second one too.
    assert syncs == [(hook, "when_ready", step, "a wait for copies") for step in (1, 3)]


def test_the_wait_of_a_nan_hook_without_a_lag_is_listed() -> None:
    hook = NanTensorHook("loss", max_lag_steps=0)
    assert {sync[:3] for sync in audited_on(FakeDevice(), hook)} == {(hook, "after_run", 1), (hook, "after_run", 2)}


def test_a_value_that_cannot_be_copied_without_a_wait_is_listed() -> None:
    class Sparse(Doing):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            run_context.when_ready(run_values.results.to_sparse(), lambda loss: None)

    hook = Sparse(print)
    assert ("a wait for a tensor that is read at once", hook) in {
        (sync.operation, sync.hook) for sync in audited_on(FakeDevice(), hook)
    }


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("driven", [True, False])
def test_the_wait_before_a_synchronous_save_is_listed(async_save: bool, driven: bool, tmp_path: Path) -> None:
    saving = CheckpointSaverHook(tmp_path, save_steps=2, saver=Saver(async_save=async_save))
    with (
        FakeDevice(1000),
        sync_audit("cpu") as syncs,
        MonitoredLoop(lambda: LOSSES[0], hooks=[Later(), saving], checkpoint_dir=tmp_path) as loop,
    ):
        for _ in loop.until_stop(range(3)) if driven else range(3):
            loop.run()
        listed = syncs.copy()
    method = "after_item" if driven else "after_run"
    assert listed == ([] if async_save else [(saving, method, 2, "a wait for copies")])


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
    with FakeDevice(lag) as device, sync_audit("cpu") as syncs:
        loop = MonitoredLoop(training.step, training.model, training.optimizer, hooks=standard_hooks(40))
        for _ in loop.until_stop(range(50)):
            loop.run()
        waited = device.waits
        loop.close()
    assert (loop.global_step, waited, syncs) == (40, 0, [])
