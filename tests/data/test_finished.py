"""A training run is finished when its loop is left because the data ended, or by a break or return of the script."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import call
from support.rank_threads import Hub, ThreadRanks, in_threads
from torch.utils.data import DataLoader, TensorDataset

from torchhooks import (
    CallFnHook,
    CheckpointSaverHook,
    EvaluationHook,
    LoggingTensorHook,
    MonitoredLoop,
    Saver,
    SessionRunHook,
    StopAtStepHook,
    Variables,
    list_checkpoints,
)
from torchhooks.testing import log_lines

Lines = list[tuple[str, str]]
BATCHES = 2


def messages(lines: Lines, level: str) -> list[str]:
    return [text for each, text in lines if each == level]


def looped(
    directory: Path, *hooks: SessionRunHook, checkpoint: str | None = None, **arguments: Any
) -> MonitoredLoop[None]:
    hooks = (*hooks, CheckpointSaverHook(directory, save_steps=BATCHES))
    place = directory if checkpoint is None else directory / checkpoint
    return MonitoredLoop(lambda *args: None, hooks=hooks, checkpoint_dir=place, **arguments)


class EarlyStopping:
    """The usual script: the validation never improves, so it leaves the outermost loop in epoch 3 of 9."""

    def __init__(self, directory: Path, patience: int = 3, epochs: int = 9, **arguments: Any) -> None:
        self.variables = Variables(bad=0)
        self.patience, self.epochs = patience, epochs
        self.loop = looped(directory, state={"vars": self.variables}, **arguments)
        self.last_epoch: int | None = None

    def train(self, in_validation: Callable[[], object] = bool, in_test: Callable[[], object] = bool) -> list[int]:
        """Return the numbers of the epochs in which runs were made."""
        made = []
        with self.loop as loop:
            for epoch in loop.until_stop(range(self.epochs)):
                for _ in loop.until_stop(range(BATCHES)):
                    loop.run()
                    made.append(epoch)
                self.variables.bad += 1
                if self.variables.bad == self.patience:
                    in_validation()
                    break
            in_test()
            self.last_epoch = loop.epoch
        return sorted(set(made))


def finishes(directory: Path) -> list[str | None]:
    """Return what the checkpoints say of the end, oldest first."""
    return [checkpoint.finished for checkpoint in list_checkpoints(directory)]


def fail() -> None:
    raise KeyboardInterrupt


# -- what finishes a training run -------------------------------------------------------------------------------------


def test_a_break_out_of_the_outermost_loop_finishes_the_training_run(tmp_path: Path, lines: Lines) -> None:
    assert EarlyStopping(tmp_path).train() == [0, 1, 2]
    why = "the script left the outermost loop in epoch 3 of 9"
    line = f"finished: {why}; for a pause, such as a time limit, call loop.request_stop() instead"
    assert [text for text in messages(lines, "INFO") if text.startswith("finished")] == [line]
    assert finishes(tmp_path)[-1] == why
    again = EarlyStopping(tmp_path)
    assert again.train() == []
    assert (again.variables.bad, again.last_epoch, again.loop.global_step) == (3, 2, 3 * BATCHES)
    assert messages(lines, "WARNING") == [
        f"this training run is finished: {why}, at step 6. So until_stop yields nothing, and no run is made. "
        f"To train on, name its checkpoint, checkpoint_dir={str(tmp_path / 'model.ckpt-6')!r}; for a new training run, "
        "give another checkpoint_dir. If this loop is for the next epoch, create one loop for all epochs instead"
    ]


def test_its_checkpoint_by_name_continues_with_the_next_item(tmp_path: Path, lines: Lines) -> None:
    EarlyStopping(tmp_path).train()
    assert EarlyStopping(tmp_path, patience=5, checkpoint="model.ckpt-6").train() == [3, 4]
    assert messages(lines, "WARNING") == []
    assert EarlyStopping(tmp_path, patience=5).train() == []


def test_a_return_out_of_it_finishes_it_too(tmp_path: Path) -> None:
    def train(loop: MonitoredLoop[None]) -> None:
        with loop:
            for item in loop.until_stop([1, 2, 3, 4]):
                loop.run()
                if item == 3:
                    return

    for _ in range(2):
        train(looped(tmp_path))
    assert str(finishes(tmp_path)[-1]).endswith("loop at item 3 of 4")


@pytest.mark.parametrize(
    "data", [range, lambda n: [0] * n, torch.zeros, lambda n: DataLoader(TensorDataset(torch.zeros(n)))]
)
def test_data_of_any_kind_continue_after_their_end_if_they_have_more_items(data: Any, tmp_path: Path) -> None:
    made = []
    for number in (2, 2, 3):
        with looped(tmp_path) as loop:
            made.append(len([loop.run() for _ in loop.until_stop(data(number))]))
    assert made == [2, 0, 1]


def test_more_data_than_before_continue_when_the_data_had_ended(tmp_path: Path, lines: Lines) -> None:
    made = [EarlyStopping(tmp_path, 99, epochs).train() for epochs in (2, 2, 4)]
    assert made == [[0, 1], [], [2, 3]]
    (warning,) = messages(lines, "WARNING")
    assert "finished: the data ended, at step 4" in warning
    assert "give it more data than before, such as a longer range" in warning


def test_a_last_test_that_iterates_in_the_with_block_yields_nothing_in_a_finished_run(tmp_path: Path) -> None:
    def train(epochs: int) -> tuple[list[int], int]:
        with looped(tmp_path) as loop:
            made = [epoch for epoch in loop.until_stop(range(epochs)) for _ in loop.until_stop("ab") if not loop.run()]
            tested = len([*loop.until_stop("abc")])
        return made, tested

    assert [train(1), train(1), train(2)] == [([0, 0], 3), ([], 0), ([1, 1], 3)]


def test_a_loop_whose_generator_a_variable_holds_was_left_too(tmp_path: Path) -> None:
    with looped(tmp_path) as loop:
        items = loop.until_stop(range(5))
        next(items)
        loop.run()
    assert "at item 1 of 5" in str(finishes(tmp_path)[-1])


@pytest.mark.parametrize("ends", ["stop", "request_stop", "error", "no run", "close"])
def test_nothing_else_finishes_it(ends: str, tmp_path: Path) -> None:
    loop = looped(tmp_path, *[StopAtStepHook(last_step=3)] * (ends == "stop"))
    try:
        with loop:
            for item in loop.until_stop(range(4)):
                if ends == "no run":
                    break
                loop.run()
                if item == 2 and ends == "error":
                    fail()
                if item == 2 and ends != "stop":
                    loop.request_stop() if ends == "request_stop" else loop.close() if ends == "close" else None
                    break
    except KeyboardInterrupt:
        pass
    assert set(finishes(tmp_path)) == {None}


def test_what_the_script_does_behind_the_loops_is_in_the_checkpoint_of_the_end(tmp_path: Path) -> None:
    for tested in (0, 1):
        variables = Variables(tests=0)
        with looped(tmp_path, state={"vars": variables}) as loop:
            assert variables.tests == tested
            for _ in loop.until_stop(range(BATCHES)):
                loop.run()
            variables.tests = 1


def test_without_a_with_block_only_the_end_of_the_data_finishes_it(tmp_path: Path) -> None:
    for _ in range(2):
        loop = looped(tmp_path)
        try:
            assert len([None for _ in loop.until_stop(range(3)) if loop.run() is None]) in (0, 3)
        finally:
            loop.close()
    assert finishes(tmp_path)[-1] == "data ended"


# -- signals and kills ------------------------------------------------------------------------------------------------


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.fixture
def delivered() -> Iterable[list[int]]:
    numbers: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, old)


def test_a_signal_in_the_last_validation_is_delivered_after_the_save(tmp_path: Path, delivered: list[int]) -> None:
    EarlyStopping(tmp_path, signals=["SIGUSR1"]).train(interrupt, lambda: delivered.append(0))
    assert delivered == [0, signal.SIGUSR1]
    assert "in epoch 3 of 9" in str(finishes(tmp_path)[-1])


def test_if_the_data_ended_there_only_the_manifest_changes(tmp_path: Path, delivered: list[int]) -> None:
    saved: list[int] = []

    class CountingSaver(Saver):
        def save(self, *args: Any, **kwargs: Any) -> str:
            saved.append(args[2])
            return super().save(*args, **kwargs)

    hooks = [CheckpointSaverHook(tmp_path, save_steps=99, saver=CountingSaver())]
    tested = []
    for _ in range(2):
        with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path, signals=["SIGUSR1"]) as loop:
            for epoch in loop.until_stop(range(2)):
                for _ in loop.until_stop(range(BATCHES)):
                    loop.run()
                if epoch == 1:
                    interrupt()
            tested.append(loop.stop_reason)
    assert (saved, finishes(tmp_path)[-1], delivered) == ([0, 4], "data ended", [signal.SIGUSR1])
    assert tested == ["data ended"]  # the signal leaves the block before the test, which the second process makes


def test_a_signal_in_the_last_batch_does_not_finish_it(tmp_path: Path, delivered: list[int]) -> None:
    validated = []
    for _ in range(2):
        with looped(tmp_path, signals=["SIGUSR1"]) as loop:
            for epoch in loop.until_stop(range(2)):
                for batch in loop.until_stop(range(BATCHES)):
                    if (epoch, batch) == (1, BATCHES - 1):
                        interrupt()
                    loop.run()
                validated.append(epoch)
    assert validated == [0, 1]


def train_and_die(directory: Path) -> None:
    EarlyStopping(directory).train(in_test=lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_after_a_kill_in_the_last_test_the_end_of_the_last_epoch_is_repeated_exactly(tmp_path: Path) -> None:
    assert call(train_and_die, tmp_path).code == -signal.SIGKILL
    repeated = EarlyStopping(tmp_path)
    assert (repeated.train(), repeated.variables.bad, repeated.loop.global_step) == ([2], 3, 6)
    assert EarlyStopping(tmp_path).train() == []


def test_marking_a_checkpoint_as_finished_that_somebody_has_removed_does_nothing(tmp_path: Path) -> None:
    saver, path = Saver(), tmp_path / "model.ckpt"
    with MonitoredLoop(lambda: None) as loop:
        shutil.rmtree(saver.save(loop.session, path, 0))
        assert loop.session.position is not None
        saver.mark_finished(loop.session, path, 0)  # it is not finished
        loop.session.position.finish("data ended")
        saver.mark_finished(loop.session, path, 0)
    assert os.listdir(tmp_path) == []


def test_of_several_ranks_the_chief_says_that_the_training_run_is_finished(tmp_path: Path) -> None:
    def train(ranks: ThreadRanks, hub: Hub) -> int:
        hooks = [CheckpointSaverHook(tmp_path, save_steps=10)]
        with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path, ranks=ranks) as loop:
            for _ in loop.until_stop(range(3)):
                loop.run()
        return loop.session.total_runs

    assert in_threads(2, train) == [3, 3]
    with log_lines() as lines:
        assert in_threads(2, train) == [3, 3]
    assert len([text for _, text in lines if "is finished: the data ended" in text]) == 1


# -- what a finished training run reports -----------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
def test_a_finished_run_reports_nothing_twice_and_saves_nothing(every: int, tmp_path: Path, lines: Lines) -> None:
    calls: list[int] = []

    def train() -> MonitoredLoop[torch.Tensor]:
        hooks = [
            EvaluationHook(lambda global_step: float(global_step), every_n_epochs=1, at_end=True),
            LoggingTensorHook(["epoch", "batch", "loss"], every_n_epochs=1, at_end=True),
            CallFnHook(lambda global_step: calls.append(global_step), every_n_epochs=1, at_end=True),
            CheckpointSaverHook(tmp_path, every_n_epochs=every),
        ]
        with MonitoredLoop(lambda: torch.ones(()), hooks=hooks, checkpoint_dir=tmp_path) as loop:
            for _ in loop.until_stop(range(3)):
                for _ in loop.until_stop(range(BATCHES)):
                    loop.run()
        return loop

    train()
    files = [(checkpoint.path, checkpoint.order) for checkpoint in list_checkpoints(tmp_path)]
    calls.clear()
    lines.clear()
    assert train().epoch == 2
    assert [level for level, _ in lines] == ["INFO", "WARNING"]  # the restored step, and that it is finished
    assert [(checkpoint.path, checkpoint.order) for checkpoint in list_checkpoints(tmp_path)] == files
    assert calls == []


# -- a finished training run in a notebook, and a loop for each epoch --------------------------------------------------


def two_cells(directory: Path, first: Any = range(3), second: Any = range(4), *, resume: bool = True) -> list[int]:
    """Return the items in which a loop over two ``until_stop``, one after the other, made runs, and its last step."""
    loop, made = looped(directory), []
    for data in (first, second):
        for item in loop.until_stop(data, resume=resume):
            loop.run()
            made.append(item)
    loop.close()
    return [*made, loop.global_step]


def test_a_new_loop_over_two_cells_says_how_to_train_on(tmp_path: Path, lines: Lines) -> None:
    assert two_cells(tmp_path) == [0, 1, 2, 0, 1, 2, 3, 7]
    assert two_cells(tmp_path) == [7]
    (warning,) = messages(lines, "WARNING")
    assert "or use until_stop(..., resume=False); for a new training run, give another checkpoint_dir" in warning
    lines.clear()
    assert two_cells(tmp_path, resume=False) == [0, 1, 2, 0, 1, 2, 3, 14]
    assert two_cells(tmp_path, resume=False)[-1] == 21
    assert messages(lines, "WARNING") == []


def test_more_data_than_before_undo_what_is_repeated_on_the_way(tmp_path: Path) -> None:
    two_cells(tmp_path)
    assert two_cells(tmp_path, second=range(6)) == [4, 5, 9]


def test_a_loop_with_more_data_goes_on_from_the_checkpoint_after_one_that_begins_again(tmp_path: Path) -> None:
    two_cells(tmp_path)
    loop, made = looped(tmp_path), []
    for data, resume in ((range(3), False), (range(6), True)):
        for item in loop.until_stop(data, resume=resume):
            loop.run()
            made.append(item)
    loop.close()
    assert (made, loop.global_step) == ([0, 1, 2, 4, 5], 9)


def test_what_a_resumed_loop_repeats_is_undone_with_resume_false_too(tmp_path: Path) -> None:
    """The training run was not finished: the first loop is on the way to the second."""
    loop = looped(tmp_path)
    for data in (range(3), range(4)):
        for item in loop.until_stop(data, resume=False):
            loop.run()
            if (loop.global_step, item) == (5, 1):
                loop.request_stop()
    loop.close()
    assert two_cells(tmp_path, resume=False) == [0, 1, 2, 0, 1, 2, 3, 9]


def test_a_loop_for_each_epoch_is_told_of_one_loop_for_all(tmp_path: Path, lines: Lines) -> None:
    for _ in range(2):
        with looped(tmp_path) as loop:
            for _ in loop.until_stop(range(BATCHES)):
                loop.run()
    (warning,) = messages(lines, "WARNING")
    assert warning.endswith(". If this loop is for the next epoch, create one loop for all epochs instead")


def finish(directory: str) -> None:
    with looped(Path(directory)) as loop:
        for _ in loop.until_stop(range(BATCHES)):
            loop.run()


def test_a_script_that_is_started_again_is_not(tmp_path: Path, lines: Lines) -> None:
    assert call(finish, str(tmp_path)).code == 0
    finish(str(tmp_path))
    (warning,) = messages(lines, "WARNING")
    assert warning.endswith("give another checkpoint_dir")
