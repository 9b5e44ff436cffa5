"""A training run that is killed after its checkpoint and resumed in another process has one curve.

:func:`live_twice` forks the training runs, which kill themselves with SIGKILL.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.events import curve as by_tensorboard
from support.processes import call
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as ServersAccumulator
from tensorboard.util.tensor_util import make_ndarray

from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    CheckpointSaverListener,
    JsonLinesWriter,
    MonitoredLoop,
    MonitoredTrainingLoop,
    Scaffold,
    Session,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
)
from torchhooks.testing import FakeClock, RecordingWriter

SAVED, KILLED, STEPS = 8, 11, 20  # the restored checkpoint, the unfinished step, the last step
RATE = "global_step/sec"
Curve = list[tuple[int, float]]

ONE_LOSS = [(step, 1.0 if step <= SAVED else 2.0) for step in range(1, STEPS + 1)]
"""Each step once: those up to the checkpoint from the first process, later ones from the second."""
ONE_RATE = [step for step in range(2, STEPS + 1) if step != SAVED + 1]
"""Each step once, except for the first step of each process, which starts its clock."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KillAfterSave(CheckpointSaverListener):
    """Kills the process as soon as a checkpoint is written."""

    def after_save(self, session: Session, step: int) -> None:
        if step == SAVED:
            kill()


class Training:
    """A training run whose loss is 1 in the first process, and 2 in the second or after a recovery."""

    def __init__(self, folder: Path, life: int, end: Callable[[], object] = kill) -> None:
        self.folder, self.life, self.end = folder, life, end
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.runs = 0

    def step(self) -> float:
        if self.life == 1 and self.loop.global_step == KILLED - 1:
            self.life = 2
            self.end()
        return float(self.life)

    def accumulating_step(self) -> float:
        """Make an optimizer step in every third run."""
        loss = self.step()
        self.runs += 1
        if self.runs % 3 == 0:
            self.optimizer.step()
        return loss

    def writing(self) -> dict[str, list[SessionRunHook]]:
        """Return hooks that write every step to event files, next to the checkpoints, and to lines of JSON."""
        lines = JsonLinesWriter(self.folder / "curves.jsonl")
        return {
            "summaries": [
                SummarySaverHook(1, output_dir=self.folder, summary_op={"loss": "loss"}),
                SummarySaverHook(1, summary_writer=lines, summary_op={"loss": "loss"}),
            ],
            "counters": [StepCounterHook(1, output_dir=self.folder), StepCounterHook(1, summary_writer=lines)],
        }

    def train(self, hooks: list[SessionRunHook], step: Callable[[], float] | None = None, **arguments: Any) -> None:
        with MonitoredLoop(
            step or self.step,
            self.model,
            self.optimizer,
            hooks=[*hooks, StopAtStepHook(last_step=STEPS)],
            checkpoint_dir=self.folder,
            **arguments,
        ) as self.loop:
            while not self.loop.should_stop():
                self.loop.run()


def saver(training: Training, listeners: Any = ()) -> CheckpointSaverHook:
    return CheckpointSaverHook(training.folder, save_steps=4, listeners=listeners)


def in_order(training: Training, order: tuple[str, ...]) -> None:
    parts = training.writing()
    parts["checkpoints"] = [saver(training)]
    training.train([hook for part in order for hook in parts[part]])


def counting_alone(training: Training) -> None:
    training.train([*training.writing()["counters"], saver(training)])


def accumulating(training: Training) -> None:
    hooks = [hook for part in training.writing().values() for hook in part]
    training.train([*hooks, saver(training)], training.accumulating_step, step_unit="optimizer_step")


def killed_after_the_checkpoint(training: Training) -> None:
    hooks = [hook for part in training.writing().values() for hook in part]
    training.train([*hooks, saver(training, [KillAfterSave()] if training.life == 1 else [])])


def with_the_usual_hooks(training: Training) -> None:
    with MonitoredTrainingLoop(
        training.step,
        training.model,
        training.optimizer,
        hooks=[*training.writing()["summaries"][1:], StopAtStepHook(last_step=STEPS)],
        checkpoint_dir=training.folder,
        scaffold=Scaffold(summary_op={"loss": "loss"}),
        save_checkpoint_steps=4,
        save_summaries_steps=1,
        log_step_count_steps=1,
    ) as training.loop:
        while not training.loop.should_stop():
            training.loop.run()


ORDERS = {"-".join(order): order for order in itertools.permutations(("summaries", "counters", "checkpoints"))}
CASES: dict[str, Callable[[Training], None]] = {
    **{name: lambda training, order=order: in_order(training, order) for name, order in ORDERS.items()},  # type: ignore[misc]
    "counting_alone": counting_alone,
    "accumulating": accumulating,
    "killed_after_the_checkpoint": killed_after_the_checkpoint,
    "with_the_usual_hooks": with_the_usual_hooks,
}


# -- the processes ----------------------------------------------------------------------------------------------------


def live(case: str, folder: Path, life: int) -> str:
    """Train in a process of its own, and return how it ended."""
    process = os.fork()
    if process == 0:
        try:
            CASES[case](Training(folder, life))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(process, 0)
    return "killed" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else f"{status}"


def live_twice(directory: Path) -> None:
    endings = {case: [live(case, directory / case, life) for life in (1, 2)] for case in CASES}
    (directory / "endings.json").write_text(json.dumps(endings))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that has a folder for each case, after both processes."""
    directory = tmp_path_factory.mktemp("lives")
    ended = call(live_twice, directory)
    assert ended.code == 0, ended.output
    endings = json.loads((directory / "endings.json").read_text())
    assert endings == {case: ["killed", "0"] for case in CASES}, ended.output
    return directory


# -- the readers ------------------------------------------------------------------------------------------------------


def by_tensorboards_server(folder: Path, tag: str) -> Curve:
    events = ServersAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return [(point.step, float(make_ndarray(point.tensor_proto).item())) for point in events.Tensors(tag)]


def by_json(folder: Path, tag: str) -> Curve:
    lines = [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]
    return [(line["step"], line[tag]) for line in lines if tag in line]


READERS = {reader.__name__: reader for reader in (by_tensorboard, by_tensorboards_server, by_json)}


def steps(curve: Curve) -> list[int]:
    return [step for step, _ in curve]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "order", [pytest.param(each, marks=[pytest.mark.exhaustive] if index else []) for index, each in enumerate(ORDERS)]
)
def test_the_curve_of_a_killed_training_run_has_each_step_once_in_any_order_of_hooks(
    order: str, reader: str, trained: Path
) -> None:
    assert READERS[reader](trained / order, "loss") == ONE_LOSS
    assert steps(READERS[reader](trained / order, RATE)) == ONE_RATE


@pytest.mark.parametrize("reader", READERS)
def test_the_curve_of_a_counter_without_other_hooks_has_each_step_once(reader: str, trained: Path) -> None:
    assert steps(READERS[reader](trained / "counting_alone", RATE)) == ONE_RATE


@pytest.mark.parametrize("reader", READERS)
def test_a_first_run_that_makes_no_step_neither_repeats_nor_loses_the_restored_step(reader: str, trained: Path) -> None:
    losses, rates = (READERS[reader](trained / "accumulating", tag) for tag in ("loss", RATE))
    assert losses == ONE_LOSS
    assert steps(rates) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("reader", READERS)
def test_a_kill_right_after_a_checkpoint_loses_no_step(reader: str, trained: Path) -> None:
    assert READERS[reader](trained / "killed_after_the_checkpoint", "loss") == ONE_LOSS


def test_a_writer_is_flushed_before_a_checkpoint_is_saved(tmp_path: Path) -> None:
    class Queue(RecordingWriter):
        def flush(self) -> None:
            written.extend(step for step, _ in self.scalars.get("loss", []))
            self.records.clear()

    class Watching(CheckpointSaverListener):
        def before_save(self, session: Session, step: int) -> None:
            seen.append((step, written[-1:]))

    written: list[int] = []
    seen: list[tuple[int, list[int]]] = []
    training = Training(tmp_path, life=2)
    training.train([SummarySaverHook(1, summary_writer=Queue(), summary_op="loss"), saver(training, [Watching()])])
    assert seen == [(0, []), *((step, [step]) for step in (4, 8, 12, 16, 20))]


@pytest.mark.parametrize("reader", READERS)
def test_the_usual_hooks_write_one_curve(reader: str, trained: Path) -> None:
    assert READERS[reader](trained / "with_the_usual_hooks", "loss") == ONE_LOSS


# -- a recovery in the process ----------------------------------------------------------------------------------------


class TickingClock(FakeClock):
    """A clock that moves on by a millisecond at each look, so that every period has a rate."""

    def __call__(self) -> float:
        self.advance(0.001)
        return super().__call__()


def abort() -> None:
    raise AbortedError("the machine was restarted")


@pytest.mark.parametrize("order", ORDERS)
def test_after_a_recovery_the_steps_that_were_written_are_not_written_again(order: str, tmp_path: Path) -> None:
    with TickingClock():
        in_order(Training(tmp_path, 1, abort), ORDERS[order])
    losses = [(step, 1.0 if step < KILLED else 2.0) for step in range(1, STEPS + 1)]
    rates = [*range(2, STEPS + 1)]
    for read in (by_json, by_tensorboard):
        assert read(tmp_path, "loss") == losses
        assert steps(read(tmp_path, RATE)) == rates


def test_after_a_recovery_a_hook_keeps_its_period(tmp_path: Path) -> None:
    lines = JsonLinesWriter(tmp_path / "curves.jsonl")
    training = Training(tmp_path, 1, abort)
    training.train([SummarySaverHook(7, summary_writer=lines, summary_op={"loss": "loss"}), saver(training)])
    assert by_json(tmp_path, "loss") == [(1, 1.0), (8, 1.0), (15, 2.0)]
