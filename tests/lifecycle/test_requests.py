"""Signals by which other processes ask a hook for something: OnSignal."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_processes import run_ranks
from support.rank_threads import Hub, ThreadRanks, in_threads

from torchhooks import (
    BestCheckpointHook,
    CallFnHook,
    CheckpointSaverHook,
    EvaluationHook,
    LoggingTensorHook,
    MonitoredLoop,
    OnSignal,
    ProfilerHook,
    Ranks,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SummarySaverHook,
    latest_checkpoint,
    over_ranks,
    param_norm,
)
from torchhooks.common.timers import Due
from torchhooks.lifecycle.trigger import Trigger
from torchhooks.progress.loop_state import LoopState

MODEL = torch.nn.Linear(1, 1)


@pytest.fixture(autouse=True)
def killed_by() -> Iterator[list[str]]:
    """The signals that reached the handlers from before the loop."""
    names: list[str] = []

    def handle(number: int, frame: Any) -> None:
        names.append(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield names
    for number, handler in before.items():
        signal.signal(number, handler)


class Steps(SessionRunHook):
    """Keeps the steps of the runs that it takes part in."""

    def __init__(self, due: Due, before: bool = False) -> None:
        self.steps: list[int] = []
        self._due = due
        if before:
            self.before_run = lambda run_context: None  # type: ignore[method-assign]

    def next_due(self) -> Due:
        return self._due

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.steps.append(run_context.session.global_step)


def raise_in(*steps: int) -> Callable[[int], int]:
    def step(number: int) -> int:
        if number in steps:
            signal.raise_signal(signal.SIGUSR1)
        return number

    return step


def steps_logged(lines: list[tuple[str, str]]) -> list[str]:
    return [text for _, text in lines if text.startswith("global_step = ")]


@pytest.mark.parametrize("before", [False, True])
def test_a_signal_in_a_run_makes_a_hook_due_in_the_next_one(before: bool) -> None:
    hook = Steps(Due(signal="SIGUSR1"), before)
    with MonitoredLoop(raise_in(3, 4, 7), hooks=[hook]) as loop:
        for number in loop.until_stop(range(1, 11)):
            loop.run(number)
    assert hook.steps == [4, 5, 8]


@pytest.mark.parametrize("before", [False, True])
def test_a_signal_between_two_runs_makes_a_hook_due_in_the_next_one(before: bool) -> None:
    hook = Steps(Due(signal="SIGUSR1"), before)
    with MonitoredLoop(lambda: 0, hooks=[hook]) as loop:
        for number in loop.until_stop(range(1, 7)):
            if number == 4:
                signal.raise_signal(signal.SIGUSR1)
            loop.run()
    assert hook.steps == [4]


def test_a_signal_while_hooks_begin_makes_a_hook_due_in_the_first_run() -> None:
    class Early(SessionRunHook):
        def begin(self) -> None:
            signal.raise_signal(signal.SIGUSR1)

    calls: list[int] = []
    hook = CallFnHook(lambda global_step: calls.append(global_step), timer=OnSignal("SIGUSR1"))
    with MonitoredLoop(lambda: 0, hooks=[Early(), hook]) as loop:
        for _ in loop.until_stop(range(3)):
            loop.run()
    assert calls == [1]


def test_the_signal_reaches_its_old_handler_before_and_after_the_loop_only(killed_by: list[str]) -> None:
    old = signal.getsignal(signal.SIGUSR1)
    loop = MonitoredLoop(lambda: 0, hooks=[CallFnHook(lambda global_step: None, timer=OnSignal("SIGUSR1"))])
    signal.raise_signal(signal.SIGUSR1)
    assert killed_by == []
    loop.close()
    assert signal.getsignal(signal.SIGUSR1) is old
    signal.raise_signal(signal.SIGUSR1)
    assert killed_by == ["SIGUSR1"]


def test_a_handler_on_top_of_that_of_a_closed_loop_passes_the_signal_on(killed_by: list[str]) -> None:
    loop = MonitoredLoop(lambda: 0, hooks=[CallFnHook(lambda global_step: None, timer=OnSignal("SIGUSR1"))])
    ours: Any = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *arguments: ours(*arguments))
    loop.close()
    signal.raise_signal(signal.SIGUSR1)
    assert killed_by == ["SIGUSR1"]


def test_a_forked_process_ignores_the_signal() -> None:
    with MonitoredLoop(lambda: 0, hooks=[CallFnHook(lambda global_step: None, timer=OnSignal("SIGUSR1"))]):
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGUSR1)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_signal_that_stops_the_loop_is_refused() -> None:
    hook = CallFnHook(lambda global_step: None, timer=OnSignal("SIGUSR1"))
    with pytest.raises(ValueError, match=r"OnSignal\('SIGUSR1'\): SIGUSR1 stops this loop.*another signal"):
        MonitoredLoop(lambda: 0, hooks=[hook], signals=["SIGUSR1"])


def test_unknown_signals_are_refused() -> None:
    with pytest.raises(ValueError, match="OnSignal has 'SIGNONE'"):
        OnSignal("SIGNONE")
    with pytest.raises(ValueError, match=r"SIGKILL.*no process can handle"):
        OnSignal("SIGKILL")


def test_a_loop_in_another_thread_warns_that_no_signal_reaches_it(lines: list[tuple[str, str]]) -> None:
    def make() -> None:
        MonitoredLoop(lambda: 0, hooks=[CallFnHook(lambda global_step: None, timer=OnSignal("SIGUSR1"))]).close()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert [level for level, text in lines if "SIGUSR1 will reach no OnSignal" in text] == ["WARNING"]


HOOKS: dict[str, Callable[[Path, OnSignal], SessionRunHook]] = {
    "CallFnHook": lambda folder, timer: CallFnHook(lambda global_step: None, timer=timer),
    "CheckpointSaverHook": lambda folder, timer: CheckpointSaverHook(folder, timer=timer),
    "BestCheckpointHook": lambda folder, timer: BestCheckpointHook(folder, "loss", mode="min", timer=timer),
    "EvaluationHook": lambda folder, timer: EvaluationHook(lambda model: {"a": 1.0}, timer=timer, output_dir=folder),
    "LoggingTensorHook": lambda folder, timer: LoggingTensorHook(["global_step"], timer=timer),
    "ProfilerHook": lambda folder, timer: ProfilerHook(output_dir=folder, timer=timer),
    "SummarySaverHook": lambda folder, timer: SummarySaverHook(
        output_dir=folder, summary_op={"norm": param_norm()}, timer=timer
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_takes_the_timer(
    name: str, tmp_path: Path, lines: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    triggered: list[int] = []
    fire = Trigger.fire

    def recorded(trigger: Trigger, step: int, run: int = 0) -> None:
        if trigger.is_forced:
            triggered.append(step)
        fire(trigger, step, run)

    monkeypatch.setattr(Trigger, "fire", recorded)
    hook = HOOKS[name](tmp_path / "out", OnSignal("SIGUSR1"))
    raises = raise_in(3, 6)

    def step(number: int) -> dict[str, torch.Tensor]:
        return {"loss": torch.tensor(float(raises(number)))}

    with MonitoredLoop(step, MODEL, hooks=[hook], checkpoint_dir=tmp_path / "out") as loop:
        for number in loop.until_stop(range(1, 10)):
            loop.run(number)
    assert triggered == [4, 7]


def test_a_second_saver_saves_now(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    savers = [CheckpointSaverHook(tmp_path, save_steps=100), CheckpointSaverHook(tmp_path, timer=OnSignal("SIGUSR1"))]
    seen = []
    with MonitoredLoop(raise_in(3), MODEL, hooks=savers, checkpoint_dir=tmp_path) as loop:
        for number in loop.until_stop(range(1, 8)):
            seen.append(latest_checkpoint(tmp_path))
            loop.run(number)
    assert seen[-1] == str(tmp_path / "model.ckpt-4")
    saves = [re.findall(r"step \d+", text)[0] for _, text in lines if text.startswith("saving")]
    assert saves == [f"step {step}" for step in (0, 4, 7)]  # once each, not once a saver


@pytest.mark.parametrize("asked", [0, 1, 2])
@pytest.mark.parametrize("name", ["CallFnHook", "CheckpointSaverHook", "LoggingTensorHook", "ProfilerHook"])
def test_a_request_to_one_rank_makes_the_hook_due_on_all_ranks_in_the_same_run(
    name: str, asked: int, tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    def train(ranks: ThreadRanks, hub: Hub) -> list[int]:
        triggered: list[int] = []

        hook = HOOKS[name](tmp_path / "out", OnSignal("SIGUSR1"))
        hook.force_due = lambda: triggered.append(loop.global_step)  # type: ignore[method-assign]

        def step() -> dict[str, torch.Tensor]:
            hub.gather("step", ranks.rank, None)
            if ranks.rank == asked and loop.global_step == 20:
                loop._schedule._arrive("SIGUSR1")  # noqa: SLF001 - what the handler of the signal calls in the main thread
            if triggered:
                loop.request_stop()
            return {"loss": torch.tensor(1.0)}

        with MonitoredLoop(step, MODEL, hooks=[hook], ranks=ranks, checkpoint_dir=tmp_path / "out") as loop:
            while not loop.should_stop() and loop.global_step < 20_000:
                loop.run()
        return triggered

    first, *others = in_threads(3, train)
    assert len(first) == 1
    assert first[0] >= 20
    assert others == [first, first]


def test_a_signal_that_arrives_while_the_hooks_of_an_epoch_say_when_they_are_due_is_taken_in_the_next_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    epochs: list[int] = []
    hooks = [
        CallFnHook(lambda epoch: epochs.append(epoch), every_n_epochs=1),
        CallFnHook(lambda global_step: calls.append(global_step), timer=OnSignal("SIGUSR1")),
    ]

    def expect(state: LoopState, **numbers: Any) -> None:
        if epochs == [0]:
            epochs.clear()
            signal.raise_signal(signal.SIGUSR1)
        expect_as_before(state, **numbers)

    expect_as_before = LoopState.expect
    monkeypatch.setattr(LoopState, "expect", expect)
    with MonitoredLoop(lambda: None, hooks=hooks) as loop:
        for _ in loop.until_stop(range(2)):
            for _ in loop.until_stop(range(3)):
                loop.run()
    assert calls == [4]


def rank_main(rank: int) -> list[int]:
    calls: list[int] = []
    hook = CallFnHook(lambda global_step: calls.append(global_step), timer=OnSignal("SIGUSR1"))
    total = torch.zeros(1)

    def step(number: int) -> None:
        torch.distributed.all_reduce(total)
        if rank == 1 and number == 20:
            signal.raise_signal(signal.SIGUSR1)

    with MonitoredLoop(step, hooks=[hook], ranks=Ranks()) as loop:
        for number in loop.until_stop(range(1, 3000)):
            loop.run(number)
            if calls:
                loop.request_stop()
    return calls


@pytest.mark.ranks
def test_a_signal_to_one_process_makes_the_hook_due_in_all_of_them_in_the_same_run(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, rank_main)
    assert (first.code, second.code) == (0, 0), (first, second)
    assert first.value == second.value
    assert len(first.value) == 1
    assert first.value[0] > 20


@pytest.mark.parametrize("asked", [0, 1])
def test_a_hook_that_a_signal_triggers_can_combine_values_of_all_ranks(
    asked: int, lines: list[tuple[str, str]]
) -> None:
    def train(ranks: ThreadRanks, hub: Hub) -> None:
        hook = LoggingTensorHook({"mean": over_ranks("loss", "mean")}, timer=OnSignal("SIGUSR1"))
        triggered: list[int] = []
        hook.force_due = lambda: triggered.append(loop.global_step)  # type: ignore[method-assign]

        def step() -> dict[str, float]:
            hub.gather("step", ranks.rank, None)
            if ranks.rank == asked and loop.global_step == 5:
                loop._schedule._arrive("SIGUSR1")  # noqa: SLF001 - what the handler of the signal calls in the main thread
            if triggered:
                loop.request_stop()
            return {"loss": float(ranks.rank)}

        with MonitoredLoop(step, hooks=[hook], ranks=ranks) as loop:
            while not loop.should_stop() and loop.global_step < 20_000:
                loop.run()

    assert in_threads(2, train) == [None, None]
    assert [text for _, text in lines if text.startswith("mean")] == ["mean = 0.5"]


@pytest.mark.parametrize("before", [False, True])
def test_a_signal_at_the_end_of_an_epoch_makes_a_hook_due_in_the_next_run(before: bool) -> None:
    hook = Steps(Due(signal="SIGUSR1"), before)
    with MonitoredLoop(lambda: 0, hooks=[hook]) as loop:
        for epoch in loop.until_stop(range(3)):
            for batch in loop.until_stop(range(3)):
                loop.run()
                if (epoch, batch) == (0, 2):
                    signal.raise_signal(signal.SIGUSR1)  # before the end of the epoch is noticed
    assert hook.steps == [4]
