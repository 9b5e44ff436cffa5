"""What waits for a value keeps that value: nothing else that the script passed to a run, or made in it."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.accelerators import DEVICE, Reader, keep_busy
from support.devices import FakeDevice
from support.packages import import_or_skip

import torchhooks
from torchhooks import (
    BestCheckpointHook,
    CallFnHook,
    CheckpointSaverHook,
    EvaluationHook,
    EverySteps,
    FeedFnHook,
    FinalOpsHook,
    GlobalStepWaiterHook,
    LedgerHook,
    LifecycleError,
    LoggingTensorHook,
    MirrorHook,
    MonitoredLoop,
    NanTensorHook,
    ProfilerHook,
    ProgressBarHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
    StopIfHigherHook,
    StopIfLowerHook,
    StopIfNoDecreaseHook,
    StopIfNoIncreaseHook,
    SummarySaverHook,
    running_mean,
    summary,
)
from torchhooks.testing import RecordingWriter

RUNS = 12


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Keeper(SessionRunHook):
    """Keeps every context that it gets, and waits for a value with a callback that stops the loop by it."""

    def __init__(self) -> None:
        self.contexts: list[SessionRunContext] = []

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        self.contexts.append(run_context)
        return SessionRunArgs("loss")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        def stop_if_large(loss: torch.Tensor) -> None:
            if loss > 1e9:
                run_context.request_stop("large")

        run_context.when_ready(run_values.results, stop_if_large)
        run_context.after_item(lambda: run_context.session)


def of_an_evaluation() -> list[SessionRunHook]:
    evaluation = EvaluationHook(lambda model: {"norm": model.weight.norm()}, every_n_steps=1)
    return [evaluation, StopIfHigherHook(evaluation["norm"], 1e9), LoggingTensorHook([evaluation["norm"]], 1)]


def progress_bar(folder: Path) -> list[SessionRunHook]:
    import_or_skip("tqdm")
    return [ProgressBarHook(RUNS, file=Terminal())]


ALL = ["inputs", "random", "outputs", "gradients", "parameters", "optimizers", "state"]
EVERY = EverySteps(1)
OP = {"loss": "loss", "mean": running_mean("loss"), "weights": summary.histogram("h", "weight")}
HOOKS: dict[str, Callable[[Path], list[SessionRunHook]]] = {
    "BestCheckpointHook": lambda folder: [BestCheckpointHook(folder, lambda model: 1.0, mode="max", every_n_steps=1)],
    "CallFnHook": lambda folder: [CallFnHook(lambda loss, step: None, timer=EVERY)],
    "CheckpointSaverHook": lambda folder: [CheckpointSaverHook(folder, save_steps=1, async_save="skip")],
    "EvaluationHook": lambda folder: of_an_evaluation(),
    "FeedFnHook": lambda folder: [FeedFnHook(lambda: {"fed": 1.0})],
    "FinalOpsHook": lambda folder: [FinalOpsHook("loss")],
    "GlobalStepWaiterHook": lambda folder: [GlobalStepWaiterHook(0)],
    "LedgerHook": lambda folder: [LedgerHook(folder, what=ALL)],
    "LoggingTensorHook": lambda folder: [LoggingTensorHook(["loss"], every_n_iter=1, at_end=True)],
    "MirrorHook": lambda folder: [CheckpointSaverHook(save_steps=6), MirrorHook(url=f"file://{folder}/mirror")],
    "NanTensorHook": lambda folder: [NanTensorHook(["loss", "hidden"], also_inf=True)],
    "ProfilerHook": lambda folder: [ProfilerHook(save_steps=6, output_dir=folder)],
    "ProgressBarHook": progress_bar,
    "StepCounterHook": lambda folder: [
        StepCounterHook(1, summary_writer=RecordingWriter(), tokens_per_step=lambda mask: mask.sum(), memory=True)
    ],
    "StopAtStepHook": lambda folder: [StopAtStepHook(last_step=RUNS)],
    "StopIfHigherHook": lambda folder: [StopIfHigherHook("loss", 1e9, timer=EVERY)],
    "StopIfLowerHook": lambda folder: [StopIfLowerHook("loss", -1e9, timer=EVERY)],
    "StopIfNoDecreaseHook": lambda folder: [StopIfNoDecreaseHook("loss", 1000, timer=EVERY)],
    "StopIfNoIncreaseHook": lambda folder: [StopIfNoIncreaseHook("loss", 1000, timer=EVERY)],
    "SummarySaverHook": lambda folder: [SummarySaverHook(1, summary_writer=RecordingWriter(), summary_op=OP)],
    "a hook with callbacks": lambda folder: [Reader(["loss", lambda x: x.sum()])],
    "a hook that keeps contexts": lambda folder: [Keeper()],
}
"""Hooks that ask for something in every run if they can, by the name of the class."""


def test_all_hooks_are_here() -> None:
    names = {name for name in torchhooks.__all__ if name.endswith("Hook")} - {"SessionRunHook", "PeriodicHook"}
    assert names <= set(HOOKS)


class Batch:
    """What the script passes: a tensor on the device, an array on the host, and a mask."""

    def __init__(self, device: str) -> None:
        self.array = np.ones((4, 8), np.float32)
        self.x = torch.from_numpy(self.array) if device == "cpu" else torch.ones(4, 8, device=device)
        self.mask = torch.from_numpy(np.ones(4, np.float32)).to(device)


class Held:
    """Which objects of earlier runs are alive."""

    def __init__(self) -> None:
        self._made: list[list[weakref.ref[Any]]] = []

    def begin_run(self) -> None:
        self._made.append([])

    def add(self, *objects: Any) -> None:
        # An array lives as long as the memory of the tensor that was made of it, also if only a view of that is kept.
        self._made[-1] += map(weakref.ref, objects)

    def of_earlier_runs(self) -> list[object]:
        return [one for made in self._made[:-1] for ref in made if (one := ref()) is not None]


@contextmanager
def late_device(device: str) -> Iterator[None]:
    """Let no value arrive before the loop closes."""
    with FakeDevice(lag=10**9) if device == "cpu" else nullcontext():
        yield


def alive_after_each_run(name: str, device: str, by_body: bool, folder: Path) -> list[int]:
    """Train with hooks, and return how many objects of earlier runs were alive after each run."""
    held, model = Held(), torch.nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    counts: list[int] = []

    def step(x: torch.Tensor, batch: Batch | None = None, *, mask: Any = None, fed: float = 0.0) -> dict[str, Any]:
        optimizer.zero_grad()
        hidden = model(x) * torch.from_numpy(made := np.ones(8, np.float32)).to(device)
        loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        held.add(made, hidden, loss)
        if device != "cpu":
            keep_busy(0.02)
        return {"loss": loss, "hidden": hidden, "step": fed}

    def items() -> Iterator[Batch]:
        for _ in range(RUNS):
            yield Batch(device)

    hooks = HOOKS[name](folder)
    if by_body:  # which has no parameters, for a hook to feed or to ask for
        hooks = [hook for hook in hooks if not isinstance(hook, (FeedFnHook, Reader, StepCounterHook))]
    checkpoint_dir = str(folder / "run") if name == "MirrorHook" else None
    with (
        late_device(device),
        MonitoredLoop(None if by_body else step, model, optimizer, hooks=hooks, checkpoint_dir=checkpoint_dir) as loop,
    ):
        for item in loop.until_stop(items()):
            held.begin_run()
            held.add(item, item.array, item.x, item.mask)
            if by_body:
                with loop.step() as out:
                    out |= step(item.x)
            else:
                loop.run(item.x, item, mask=item.mask)
            counts.append(len(held.of_earlier_runs()))
            del item
    return counts


@pytest.fixture(params=["run", "step"])
def by_body(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "step")


@pytest.mark.parametrize("name", HOOKS)
def test_nothing_of_a_run_outlives_it_while_a_value_is_on_its_way(name: str, by_body: bool, tmp_path: Path) -> None:
    assert alive_after_each_run(name, "cpu", by_body, tmp_path) == [0] * RUNS


@pytest.mark.accelerator
@pytest.mark.parametrize("name", HOOKS)
def test_nothing_of_a_run_outlives_it_on_an_accelerator(name: str, by_body: bool, tmp_path: Path) -> None:
    assert alive_after_each_run(name, DEVICE, by_body, tmp_path) == [0] * RUNS


def test_the_arguments_are_asked_for_too_late() -> None:
    keeper = Keeper()
    with MonitoredLoop(lambda x: x, hooks=[keeper]) as loop:
        loop.run(1.0)
    context = keeper.contexts[0]
    for ask in (lambda: context.original_args, context.inputs):
        with pytest.raises(LifecycleError, match=r"Read run_context.original_args in before_run or after_run"):
            ask()
    assert context.call_arguments == ((), {})


def test_a_run_that_failed_keeps_no_arguments() -> None:
    def fail(x: torch.Tensor) -> None:
        raise RuntimeError("no step")

    keeper, x = Keeper(), torch.ones(3)
    with pytest.raises(RuntimeError, match="no step"), MonitoredLoop(fail, hooks=[keeper]) as loop:
        loop.run(x)
    assert keeper.contexts[0].call_arguments == ((), {})


def test_a_late_callback_stops_the_loop_in_the_name_of_its_hook() -> None:
    class Other(SessionRunHook):
        """Is the last hook that the loop calls in each run."""

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            pass

    class Stops(Keeper):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            run_context.when_ready(run_values.results, lambda loss: run_context.request_stop("late"))

    with FakeDevice(lag=3), MonitoredLoop(lambda: torch.ones(()), hooks=[Stops(), Other()]) as loop:
        while not loop.should_stop():
            loop.run()
    assert loop.stop_reason == "Stops: late"
