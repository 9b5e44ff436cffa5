"""BestCheckpointHook: which states are kept, when the metric is evaluated, and that a better one is never removed."""

from __future__ import annotations

import errno
import math
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from support import events
from support.devices import FakeDevice
from support.disks import use_disk
from support.states import Box

from torchhooks import (
    AbortedError,
    BestCheckpointHook,
    CheckpointError,
    CheckpointSaverHook,
    CheckpointSaverListener,
    Coordinator,
    EvaluationHook,
    EverySteps,
    FetchError,
    MonitoredLoop,
    NanTensorHook,
    Saver,
    Session,
    SessionRunHook,
    StopAtStepHook,
    StopIfNoIncreaseHook,
    best_checkpoint,
    latest_checkpoint,
    list_checkpoints,
)
from torchhooks.checkpoints.saver import scored_checkpoints
from torchhooks.common.files import Disk
from torchhooks.testing import RecordingHook, log_lines, plain, trace


def kept(folder: Path) -> list[int]:
    """Return the steps of the checkpoints that are kept."""
    return sorted(checkpoint.step for checkpoint in list_checkpoints(folder / "best"))


def best_step(folder: Path) -> int:
    path = best_checkpoint(folder / "best")
    assert path is not None
    return int(path.rpartition("-")[2])


def keep_best(folder: Path, losses: list[Any], *others: SessionRunHook, start_step: int = 0, **arguments: Any) -> None:
    """Run a loop whose metric is each of ``losses`` in turn."""
    given: dict[str, Any] = {"save_steps": 1, "mode": "max", **arguments}
    trace(*others, BestCheckpointHook(folder, "loss", **given), losses=losses, start_step=start_step)


class FullDisk(Disk):
    """A disk without free space while ``full`` is set."""

    full = False

    def create(self, path: str) -> BinaryIO:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    """The disk of all savers that a test creates."""
    disk = FullDisk()
    use_disk(monkeypatch, disk)
    return disk


class KilledBeforeRemoval(Disk):
    """A disk that interrupts a save after the checkpoint was written and before the one it replaces is removed."""

    def rename(self, path: str, new_path: str) -> None:
        if new_path.endswith(".tmp"):
            raise KeyboardInterrupt
        super().rename(path, new_path)


# -- which ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "keep", "steps"), [("max", 1, [4]), ("min", 1, [2]), ("max", 3, [3, 4, 5]), ("min", 2, [1, 2])]
)
def test_the_best_stay(mode: str, keep: int, steps: list[int], tmp_path: Path) -> None:
    keep_best(tmp_path, [0.2, 0.1, 0.5, 0.9, 0.7, 0.3], mode=mode, keep=keep)
    assert kept(tmp_path) == steps


@pytest.mark.parametrize(("mode", "step"), [("max", 4), ("min", 2)])
def test_the_best_of_those_kept_is_found_without_the_mode(mode: str, step: int, tmp_path: Path) -> None:
    keep_best(tmp_path, [0.2, 0.1, 0.5, 0.9, 0.7, 0.3], mode=mode, keep=6)
    assert best_step(tmp_path) == step


def test_of_equal_ones_the_first_stay(tmp_path: Path) -> None:
    keep_best(tmp_path, [0.5, 0.5, 0.5, 0.4], keep=2)
    assert (kept(tmp_path), best_step(tmp_path)) == ([1, 2], 1)


def test_of_equal_ones_the_last_is_replaced_first(tmp_path: Path) -> None:
    keep_best(tmp_path, [0.5, 0.5, 0.9], keep=2)
    assert kept(tmp_path) == [1, 3]


def test_nan_is_never_kept(tmp_path: Path) -> None:
    keep_best(tmp_path, [math.nan, 0.1, math.nan], keep=3)
    assert kept(tmp_path) == [2]


def test_infinite_values_are_compared_like_others(tmp_path: Path) -> None:
    keep_best(tmp_path, [math.inf, 3.0, -math.inf], mode="min", keep=3)
    assert [score for score, _ in scored_checkpoints(tmp_path / "best")] == [-math.inf, -3.0, math.inf]


def test_a_kept_one_is_restored_with_the_state_of_its_step(tmp_path: Path) -> None:
    box = Box()
    hook = BestCheckpointHook(tmp_path, lambda value: value, save_steps=1, mode="max")
    with MonitoredLoop(lambda value: vars(box).update(value=value), state={"box": box}, hooks=[hook]) as loop:
        for value in [0.3, 0.8, 0.5]:
            loop.run(value)
    session, path = Session(state={"box": box}), best_checkpoint(tmp_path / "best")
    assert path is not None
    Saver().restore(session, path)
    assert (session.global_step, box.value) == (2, 0.8)


@pytest.mark.parametrize(
    "value", [0.5, 1, True, np.float32(0.5), np.array(0.5), torch.tensor(0.5), torch.ones(1, 1)], ids=repr
)
def test_every_kind_of_number_is_a_metric(value: Any, tmp_path: Path) -> None:
    keep_best(tmp_path, [{"loss": value}])
    assert [score for score, _ in scored_checkpoints(tmp_path / "best")] == [float(value)]


def test_a_metric_on_a_device_is_that_of_the_state_that_is_kept(tmp_path: Path) -> None:
    with FakeDevice(lag=50):
        keep_best(tmp_path, [0.2, 0.9, 0.5])
    assert [(score, c.step) for score, c in scored_checkpoints(tmp_path / "best")] == [(float(np.float32(0.9)), 2)]


@pytest.mark.parametrize("value", [torch.ones(3), {"accuracy": 0.5}, None, "good"], ids=repr)
def test_what_is_not_one_number_is_an_error_of_that_run(value: Any, tmp_path: Path) -> None:
    is_what = "a tensor of shape (3,)" if isinstance(value, torch.Tensor) else repr(value)
    message = "loss is " + re.escape(is_what) + ": the metric of a BestCheckpointHook must be one number"
    with pytest.raises(TypeError, match=message):
        keep_best(tmp_path, [{"loss": value}])


# -- when -------------------------------------------------------------------------------------------------------------


def evaluations(losses: int, folder: Path, **arguments: Any) -> list[int]:
    """Return the steps at which the metric was evaluated."""
    seen: list[int] = []

    def metric(global_step: int) -> float:
        seen.append(global_step)
        return 0.5

    start_step, secs = arguments.pop("start_step", 0), arguments.pop("secs", 1.0)
    hook = BestCheckpointHook(folder, metric, mode="max", **arguments)
    trace(hook, losses=[0.1] * losses, start_step=start_step, secs=secs)
    return seen


def test_the_metric_is_evaluated_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    assert evaluations(10, tmp_path, save_steps=4) == [4, 8, 10]


def test_the_end_evaluates_nothing_twice(tmp_path: Path) -> None:
    assert evaluations(8, tmp_path, save_steps=4) == [4, 8]


@pytest.mark.parametrize(("start_step", "steps"), [(101, [104, 106]), (100, [104, 105]), (103, [104, 108])])
def test_after_a_resume_the_metric_is_due_at_multiples_of_the_period(
    start_step: int, steps: list[int], tmp_path: Path
) -> None:
    assert evaluations(5, tmp_path, save_steps=4, start_step=start_step) == steps


def test_a_period_of_seconds_goes_by_the_clock(tmp_path: Path) -> None:
    # A period begins at the end of a run, and whether it is over is decided at the beginning of the next ones.
    assert evaluations(7, tmp_path, save_secs=2.0) == [3, 6, 7]


@pytest.mark.parametrize("save_steps", [1, 4])
def test_a_loop_without_a_run_evaluates_nothing(save_steps: int, tmp_path: Path) -> None:
    assert evaluations(0, tmp_path, save_steps=save_steps, start_step=6) == []


def test_a_loop_that_failed_does_not_evaluate_at_its_end(tmp_path: Path) -> None:
    seen: list[int] = []
    hook = BestCheckpointHook(tmp_path, lambda global_step: seen.append(global_step), save_steps=9, mode="max")
    trace(hook, losses=[0.1, ValueError], catch=ValueError)
    assert seen == []


class Accumulating:
    """A step that calls ``optimizer.step()`` in every fourth run, and the loop around it."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.runs = 0

    def __call__(self, inputs: torch.Tensor) -> dict[str, Any]:
        self.runs += 1
        loss = self.model(inputs).sum()
        loss.backward()
        if self.runs % 4 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"loss": loss, "runs": self.runs}

    def train(self, runs: int, *hooks: SessionRunHook) -> None:
        given: dict[str, Any] = {"hooks": hooks, "step_unit": "optimizer_step"}
        with MonitoredLoop(self, self.model, self.optimizer, **given) as loop:
            for _ in range(runs):
                loop.run(torch.ones(1, 1))


def test_with_accumulated_gradients_the_metric_is_evaluated_at_the_same_steps_once_each(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def metric(global_step: int, runs: int) -> float:
        seen.append((global_step, runs))
        return global_step

    Accumulating().train(4 * 11, BestCheckpointHook(tmp_path, metric, save_steps=5, mode="max", keep=9))
    assert (seen, kept(tmp_path)) == ([(5, 20), (10, 40), (11, 44)], [5, 10, 11])


@pytest.mark.parametrize(
    "metric",
    ["runs", "0:output", lambda inputs, runs: inputs.sum() * runs],
    ids=["an output", "a submodule", "an input"],
)
def test_with_accumulated_gradients_what_only_a_run_knows_is_a_metric_too(metric: Any, tmp_path: Path) -> None:
    Accumulating().train(4 * 4, BestCheckpointHook(tmp_path, metric, save_steps=2, mode="max", keep=9))
    assert kept(tmp_path) == [2, 4]


def test_what_a_submodule_returned_is_a_metric(tmp_path: Path) -> None:
    training = Accumulating()
    hook = BestCheckpointHook(tmp_path, "0:output", save_steps=1, mode="max")
    with MonitoredLoop(training, training.model, hooks=[hook]) as loop:
        loss = float(loop.run(torch.ones(1, 1))["loss"].detach())
    assert [score for score, _ in scored_checkpoints(tmp_path / "best")] == [loss]


def test_a_stop_by_a_signal_evaluates_nothing_because_the_training_run_is_resumed(tmp_path: Path) -> None:
    seen: list[int] = []

    def metric(global_step: int) -> float:
        seen.append(global_step)
        return 0.5

    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    hook = BestCheckpointHook(tmp_path, metric, save_steps=2, mode="max")
    evaluation = EvaluationHook(metric, every_n_steps=2, at_end=True)
    with MonitoredLoop(lambda: None, hooks=[hook, evaluation], signals=["SIGUSR1"], step_unit="run") as loop:
        while not loop.should_stop():
            loop.run()
            if loop.global_step == 3:
                signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, handler)
    assert loop.stop_reason == "signal SIGUSR1"
    assert seen == [2, 2]
    assert kept(tmp_path) == [2]


def test_what_only_a_run_knows_is_left_out_at_the_end_with_a_warning(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    hook = BestCheckpointHook(tmp_path, lambda inputs: inputs, save_steps=2, mode="max")
    with MonitoredLoop(lambda inputs: None, hooks=[hook]) as loop:
        for value in [0.1, 0.2, 0.3]:
            loop.run(value)
    assert kept(tmp_path) == [2]
    (warning,) = (text for level, text in lines if level == "WARNING")
    assert warning.startswith("the last state, of step 3, is not compared with the best: ")


def test_an_unknown_metric_is_an_error_of_the_first_evaluation(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="'los'"):
        trace(BestCheckpointHook(tmp_path, "los", save_steps=1, mode="min"))


# -- when the state is saved ------------------------------------------------------------------------------------------


def scores_and_values(folder: Path) -> list[tuple[float, Any]]:
    """Return the score and the state of each checkpoint that is kept."""
    return [
        (
            score,
            torch.load(f"{checkpoint.path}/state.pt", weights_only=True)["box"]["value"],
        )
        for score, checkpoint in scored_checkpoints(folder / "best")
    ]


def boxed(folder: Path, box: Box, **arguments: Any) -> MonitoredLoop[Any]:
    """Return a loop whose step puts its argument into ``box``, whose value is the metric."""
    hook = BestCheckpointHook(folder, lambda: box.value, mode="max", **{"save_steps": 1, **arguments})
    return MonitoredLoop(lambda value: vars(box).update(value=value), state={"box": box}, hooks=[hook])


@pytest.mark.parametrize("async_save", [False, True])
def test_the_state_is_saved_once_the_body_is_done_with_the_item(async_save: bool, tmp_path: Path) -> None:
    box = Box()
    with boxed(tmp_path, box, keep=9, async_save=async_save) as loop:
        for item in loop.until_stop([1, 2, 3]):
            loop.run(item)
            assert len(kept(tmp_path)) < item
            box.value = 10 * item
    assert scores_and_values(tmp_path) == [(1, 10), (2, 20), (3, 30)]


def test_with_several_runs_in_an_item_each_state_is_saved_with_its_own_score(tmp_path: Path) -> None:
    with boxed(tmp_path, Box(), keep=9, save_steps=2) as loop:
        for epoch in loop.until_stop(range(2)):
            for batch in range(5):
                loop.run(10 * epoch + batch)
    assert scores_and_values(tmp_path) == [(1, 1), (3, 3), (10, 10), (12, 12), (14, 14)]


def test_a_state_that_waits_is_forgotten_in_a_recovery(tmp_path: Path) -> None:
    box = Box(0)

    def step(value: int) -> None:
        box.value = value

    class FailingOnce(SessionRunHook):
        done = False

        def after_run(self, run_context: Any, run_values: Any) -> None:
            if box.value == 9 and not self.done:
                self.done = True
                raise AbortedError

    saver = CheckpointSaverHook(tmp_path, save_steps=1)
    best = BestCheckpointHook(tmp_path, lambda: box.value, save_steps=1, mode="max")
    with MonitoredLoop(step, state={"box": box}, hooks=[saver, best, FailingOnce()], checkpoint_dir=tmp_path) as loop:
        for item in loop.until_stop([1, 9, 3]):
            loop.run(item)
            if loop.global_step == 2:
                box.value = 5
    assert scores_and_values(tmp_path) == [(9, 5)]


# -- what the metric may do -------------------------------------------------------------------------------------------


class Disturbing:
    """A metric that changes all that an evaluation can change, and may raise."""

    def __init__(self, raises: BaseException | None = None) -> None:
        self.raises = raises
        self.calls = 0

    def __call__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        self.calls += 1
        model.eval()
        optimizer.zero_grad()
        random.random()
        np.random.rand()
        torch.rand(1)
        raises, self.raises = self.raises, None
        if raises is not None:
            raise raises
        return 0.5


class Merging(torch.nn.Linear):
    """A module that merges its weights for evaluation, as adapters do, and has to be told when that is over."""

    merged = False

    def train(self, mode: bool = True) -> Any:
        self.merged = not mode
        return super().train(mode)


class Disturbed:
    """A loop with a Disturbing metric at step 2 of 3."""

    def __init__(self, folder: Path, metric: Disturbing, *hooks: SessionRunHook, **arguments: Any) -> None:
        dropout = torch.nn.Dropout()
        frozen = torch.nn.Sequential(dropout).eval()  # but not the module in it, which is in the model twice
        dropout.train()
        self.metric = metric
        self.model = torch.nn.Sequential(Merging(2, 1), dropout, frozen)
        unknown = torch.nn.Parameter(torch.ones(1))  # to the model
        self.parameters = [*self.model.parameters(), unknown]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        best = BestCheckpointHook(folder, metric, save_steps=2, mode="max")
        self.loop = MonitoredLoop(self.step, self.model, self.optimizer, hooks=[*hooks, best], **arguments)

    def step(self) -> None:
        self.optimizer.zero_grad()
        (self.model(torch.ones(3, 2)).sum() * self.parameters[-1]).backward()
        self.optimizer.step()
        self.gradients = [parameter.grad for parameter in self.parameters]
        self.drawn = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()

    def check_undisturbed(self) -> None:
        assert self.metric.calls
        assert [module.training for module in self.model.modules()] == [True, True, True, False]
        assert not self.model[0].merged
        assert all(p.grad is gradient for p, gradient in zip(self.parameters, self.gradients, strict=True))
        drawn = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
        assert repr(plain(drawn)) == repr(plain(self.drawn))


def test_an_evaluation_does_not_disturb_training(tmp_path: Path) -> None:
    training = Disturbed(tmp_path, Disturbing())
    with training.loop as loop:
        for calls in (0, 1, 1):
            loop.run()
            assert training.metric.calls == calls
            if calls:
                training.check_undisturbed()
    assert training.metric.calls == 2  # at the end
    training.check_undisturbed()


@pytest.mark.parametrize("runs", [1, 2])
def test_an_evaluation_that_raises_does_not_disturb_training(runs: int, tmp_path: Path) -> None:
    training = Disturbed(tmp_path, Disturbing(KeyError("no data")))
    for _ in range(runs - 1):
        training.loop.run()
    with pytest.raises(KeyError), training.loop as loop:  # in the run, or at the end
        loop.run()
    training.check_undisturbed()


def test_after_a_recovery_from_its_error_the_run_begins_as_before(tmp_path: Path) -> None:
    saver, seen = CheckpointSaverHook(tmp_path, save_steps=1), []

    class Looking(SessionRunHook):
        def before_run(self, run_context: Any) -> None:
            seen.append((torch.rand(1).item(), [module.training for module in training.model.modules()]))

    training = Disturbed(tmp_path, Disturbing(AbortedError()), saver, Looking(), checkpoint_dir=tmp_path)
    with training.loop as loop:
        loop.run()
        loop.run()
    assert len(seen) == 3
    assert seen[0] != seen[1] == seen[2]


# -- what is left alone -----------------------------------------------------------------------------------------------


def test_a_loop_does_not_restore_from_the_best(tmp_path: Path) -> None:
    saver = CheckpointSaverHook(tmp_path, save_steps=2)
    best = BestCheckpointHook(tmp_path, "loss", save_steps=1, mode="max")
    trace(saver, best, losses=[0.1, 0.2, 0.9], checkpoint_dir=tmp_path)
    assert (latest_checkpoint(tmp_path), best_step(tmp_path)) == (f"{tmp_path}/model.ckpt-3", 3)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0, 2, 3]


def test_a_metric_is_needed(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="BestCheckpointHook has no metric: give it one"):
        BestCheckpointHook(tmp_path, save_steps=1, mode="min")


def test_two_hooks_keep_their_own(tmp_path: Path) -> None:
    least = BestCheckpointHook(tmp_path, "loss", save_steps=1, mode="min", name="least")
    keep_best(tmp_path, [0.5, 0.9, 0.1], least)
    assert (kept(tmp_path), [c.step for c in list_checkpoints(tmp_path / "least")]) == ([2], [3])


def best_hook(folder: Any, **arguments: Any) -> BestCheckpointHook:
    return BestCheckpointHook(folder, "loss", save_steps=1, mode="max", **arguments)


def test_two_hooks_with_one_folder_are_refused_before_anything_is_restored(tmp_path: Path) -> None:
    first, second, create = best_hook(tmp_path), best_hook(tmp_path, keep=2), RecordingHook()
    message = f"{second!r}: {first!r} already keeps checkpoints in {tmp_path}/best,"
    with pytest.raises(ValueError, match=f"{re.escape(message)}.*give one of them another name="):
        MonitoredLoop(lambda: 0.5, hooks=[create, first, second])
    assert create.calls == [("begin",), ("teardown",)]


def test_two_hooks_with_two_names_of_one_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    with pytest.raises(ValueError, match=r"already keeps checkpoints in .*/run/\.\./run/best,"):
        MonitoredLoop(
            lambda: 0.5, hooks=[best_hook(tmp_path / "link"), best_hook(tmp_path / "run" / "..", name="run/best")]
        )


def test_the_folder_of_a_loop_that_is_open_is_refused_to_every_other(tmp_path: Path) -> None:
    with MonitoredLoop(lambda: 0.5, hooks=[best_hook(tmp_path)]) as loop:
        for _ in range(2):  # a refusal does not release the folder
            with pytest.raises(ValueError, match="close the other's loop first"):
                MonitoredLoop(lambda: 0.5, hooks=[best_hook(tmp_path)])
        loop.run()
    assert kept(tmp_path) == [1]


def test_the_folder_of_a_loop_that_failed_is_free_again(tmp_path: Path, full_disk: FullDisk) -> None:
    full_disk.full = True
    with pytest.raises(CheckpointError, match="No space left"):
        trace(best_hook(tmp_path, async_save=True), losses=[0.5])
    full_disk.full = False
    keep_best(tmp_path, [0.5])
    assert kept(tmp_path) == [1]


def test_nothing_is_kept_of_a_state_that_a_nan_hook_refused(tmp_path: Path) -> None:
    losses = [{"loss": 0.5, "accuracy": 0.5}, {"loss": math.nan, "accuracy": 0.9}]
    best = BestCheckpointHook(tmp_path, "accuracy", save_steps=1, mode="max")
    seen = trace(best, NanTensorHook("loss", fail_on_nan_loss=False), losses=losses)
    assert kept(tmp_path) == [1]
    assert "no checkpoint of step 2" in str(seen.lines)


def test_the_time_that_saving_takes_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Noting(Disk):
        def rename(self, path: str, new_path: str) -> None:
            super().rename(path, new_path)
            seen.append(Path(new_path).name)

    class Listening(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            session.on_pause(lambda pause: seen.append("end of a pause"))

    use_disk(monkeypatch, Noting())
    trace(Listening(), best_hook(tmp_path), losses=[0.1])
    assert seen == ["model.1.ckpt-1", "end of a pause"]


def test_a_hook_with_a_state_after_it_is_warned_of(tmp_path: Path) -> None:
    class Counting(SessionRunHook, Box):
        pass

    hooks = [BestCheckpointHook(tmp_path, "loss", save_steps=1, mode="max"), Counting()]
    with log_lines() as lines, MonitoredLoop(lambda: 0.5, hooks=hooks) as loop:
        loop.run()
    assert [text for level, text in lines if level == "WARNING" and "comes after" in text] != []


# -- resuming ---------------------------------------------------------------------------------------------------------


def test_a_resumed_training_run_continues_with_what_is_in_the_folder(tmp_path: Path) -> None:
    keep_best(tmp_path, [0.5, 0.9], keep=2)
    keep_best(tmp_path, [0.4, 0.6, 0.1], keep=2, start_step=2)
    assert kept(tmp_path) == [2, 4]


def test_places_that_are_added_later_are_filled(tmp_path: Path) -> None:
    keep_best(tmp_path, [0.5, 0.9], keep=1)
    keep_best(tmp_path, [0.1], keep=2, start_step=2)
    assert kept(tmp_path) == [2, 3]


def test_with_a_smaller_keep_the_checkpoints_in_other_places_count(tmp_path: Path) -> None:
    keep_best(tmp_path, [0.1, 0.2, 0.9], keep=3)
    keep_best(tmp_path, [0.3], keep=1, start_step=3)
    assert (kept(tmp_path), best_step(tmp_path)) == ([1, 2, 3], 3)


def test_with_a_smaller_keep_a_state_among_the_best_replaces_the_worst(tmp_path: Path) -> None:
    keep_best(tmp_path, [0.1, 0.9, 0.2, 0.5], keep=4)
    keep_best(tmp_path, [0.3, 0.7, 0.5], keep=2, start_step=4)
    assert kept(tmp_path) == [2, 3, 4, 6]
    keep_best(tmp_path, [1.0], keep=1, start_step=7)
    assert kept(tmp_path) == [2, 4, 6, 8]


def test_with_a_smaller_keep_a_place_beyond_it_counts_as_one_that_is_kept(tmp_path: Path) -> None:
    keep_best(tmp_path, [0.1, 0.2, 0.9], keep=3)
    for place in (1, 2):
        shutil.rmtree(tmp_path / "best" / f"model.{place}.ckpt-{place}")
    keep_best(tmp_path, [0.3, 0.4, 0.2], keep=2, start_step=3)
    assert kept(tmp_path) == [3, 5]


def test_other_checkpoints_in_the_folder_are_not_touched_and_not_counted(tmp_path: Path) -> None:
    Saver().save(Session(), tmp_path / "best" / "mine.ckpt", 7, score=0.8)
    keep_best(tmp_path, [0.5, 0.6])
    assert kept(tmp_path) == [2, 7]


def test_a_step_that_is_made_again_is_not_kept_twice(tmp_path: Path) -> None:
    keep_best(tmp_path, [0.5, 0.9], keep=3)
    keep_best(tmp_path, [0.9, 0.3], keep=3, start_step=1)
    assert kept(tmp_path) == [1, 2, 3]


def test_a_step_that_is_made_again_and_better_is_kept(tmp_path: Path) -> None:
    keep_best(tmp_path, [0.5, 0.75])
    keep_best(tmp_path, [1.0], start_step=1)
    assert [(score, c.step) for score, c in scored_checkpoints(tmp_path / "best")] == [(1.0, 2)]


def test_a_recovered_session_continues_with_what_is_in_the_folder(tmp_path: Path) -> None:
    saver = CheckpointSaverHook(tmp_path, save_steps=1)
    best = BestCheckpointHook(tmp_path, "loss", save_steps=1, mode="max")
    trace(saver, best, losses=[0.5, 0.9, AbortedError, 0.7], checkpoint_dir=tmp_path)
    assert kept(tmp_path) == [2]


def test_a_damaged_one_is_skipped_with_a_warning_and_its_place_is_free(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    keep_best(tmp_path, [0.9])
    Path(best_checkpoint(tmp_path / "best"), "state.pt").write_bytes(b"cut short")
    keep_best(tmp_path, [0.1], start_step=1)
    assert best_step(tmp_path) == 2
    assert any("model.1.ckpt-1 is damaged" in text for _, text in lines)


def test_no_folder_has_no_best(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"best is no folder: pass the one of a BestCheckpointHook"):
        best_checkpoint(tmp_path / "best")


def test_the_only_best_is_found_in_the_folder_of_the_training_run(tmp_path: Path) -> None:
    keep_best(tmp_path, [0.9, 0.5])
    Saver().save(Session(), tmp_path / "model.ckpt", 3)
    assert best_checkpoint(tmp_path) == best_checkpoint(tmp_path / "best")
    Saver().save(Session(), tmp_path / "other" / "model.ckpt", 3, score=1)
    with pytest.raises(CheckpointError, match=r"several folders .* pass one of '.*/best', '.*/other'"):
        best_checkpoint(tmp_path)


def test_checkpoints_without_a_score_are_not_compared(tmp_path: Path) -> None:
    Saver().save(Session(), tmp_path / "model.ckpt", 3)
    with pytest.raises(CheckpointError, match=r"has no checkpoint with a score: a BestCheckpointHook saves them"):
        best_checkpoint(tmp_path)


# -- when writing fails -----------------------------------------------------------------------------------------------


def test_a_better_one_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, full_disk: FullDisk) -> None:
    loop = MonitoredLoop(lambda loss: loss, hooks=[best_hook(tmp_path)])
    loop.run(0.5)
    full_disk.full = True
    with pytest.raises(CheckpointError, match="No space left"):
        loop.run(0.9)
    loop.close()
    assert kept(tmp_path) == [1]


def test_a_better_one_that_was_written_counts_even_if_the_old_one_was_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_best(tmp_path, [0.5])
    with monkeypatch.context() as patch:
        use_disk(patch, KilledBeforeRemoval())
        trace(best_hook(tmp_path), losses=[0.9], start_step=1, catch=KeyboardInterrupt)
    assert kept(tmp_path) == [1, 2]
    keep_best(tmp_path, [0.7, 1.0], start_step=2)
    assert kept(tmp_path) == [4]


def test_saved_in_the_background_the_same_ones_stay(tmp_path: Path) -> None:
    keep_best(tmp_path, [0.2, 0.1, 0.5, 0.9, 0.7, 0.3], keep=3, async_save=True)
    assert kept(tmp_path) == [3, 4, 5]


def test_an_error_in_the_background_is_raised_at_the_end(tmp_path: Path, full_disk: FullDisk) -> None:
    full_disk.full = True
    with pytest.raises(CheckpointError, match="No space left"):
        trace(best_hook(tmp_path, async_save=True), RecordingHook(), losses=[0.5])


@pytest.mark.parametrize("best_is_first", [True, False])
@pytest.mark.parametrize("saves", [{"every_n_steps": 2}, {"every_n_epochs": 1}], ids=["steps", "epochs"])
def test_the_best_is_saved_before_the_checkpoint_from_which_a_killed_process_resumes(
    tmp_path: Path, saves: dict[str, Any], best_is_first: bool
) -> None:
    seen: list[tuple[int, list[int]]] = []

    class Listener(CheckpointSaverListener):
        def before_save(self, session: Session, step: int) -> None:
            seen.append((step, kept(tmp_path)))

    best = BestCheckpointHook(tmp_path, "loss", mode="min", **saves)
    saver = CheckpointSaverHook(tmp_path, listeners=[Listener()], **saves)
    hooks: list[SessionRunHook] = [best, saver] if best_is_first else [saver, best]
    with MonitoredLoop(lambda loss: loss, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for epoch in loop.until_stop(range(2)):
            for batch in loop.until_stop(range(2)):
                loop.run(1.0 - 0.1 * (2 * epoch + batch))
    assert seen == [(0, []), (2, [2]), (4, [4]), (4, [4])]  # and once more at the end, which has finished the run


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_steps": 1, "mode": "least"}, "mode='least': "),
        ({"save_steps": 1, "mode": "max", "keep": 0}, "keep=0:"),
        ({"mode": "max"}, "give BestCheckpointHook a period too"),
        ({"save_steps": 1, "save_secs": 2.5, "mode": "max"}, "save_secs=2.5, save_steps=1: give"),
    ],
)
def test_refuses_invalid_arguments_and_shows_them(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        BestCheckpointHook("run", "accuracy", **arguments)


def trained_by_epochs(
    folder: Path, stops: list[int], *, at_end: bool = False, period: Any = None
) -> tuple[list[int], list[tuple[int, float]]]:
    """Train for five epochs of ten steps, with an interruption at each of ``stops``.

    Returns:
        The steps of the best checkpoints, and the points of the evaluation's curve. The score is best at step 15, which
        is no end of an epoch.
    """
    for last_step in (*stops, None):
        evaluation = EvaluationHook(
            lambda global_step: {"score": 0.9 if global_step == 15 else 0.5 - abs(global_step - 30) / 100},
            every_n_epochs=1,
            at_end=at_end,
            output_dir=folder,
        )
        best = BestCheckpointHook(metric=evaluation["score"], mode="max", keep=2, **(period or {}))
        stopping = StopIfNoIncreaseHook(evaluation["score"], max_epochs_without_increase=9)
        hooks: list[SessionRunHook] = [evaluation, stopping, CheckpointSaverHook(every_n_epochs=1), best]
        if last_step is not None:
            hooks.append(StopAtStepHook(last_step=last_step))
        with MonitoredLoop(lambda: torch.ones(()), hooks=hooks, checkpoint_dir=folder) as loop:
            for _ in loop.until_stop(range(5)):
                for _ in loop.until_stop(range(10)):
                    loop.run()
    return kept(folder), events.curve(folder, "score")


@pytest.mark.parametrize("stops", [[15], [10], [7, 15, 23], [30, 35], [49], [50]])
def test_the_best_checkpoints_do_not_depend_on_interruptions(stops: list[int], tmp_path: Path) -> None:
    plain_steps, plain_points = trained_by_epochs(tmp_path / "plain", [])
    assert plain_steps == [20, 30]
    assert trained_by_epochs(tmp_path / "interrupted", stops) == (plain_steps, plain_points)


def test_with_an_evaluation_at_the_end_the_last_state_of_each_process_is_compared(tmp_path: Path) -> None:
    steps, points = trained_by_epochs(tmp_path, [15], at_end=True)
    assert 15 in steps
    assert 15 in [step for step, _ in points]


def test_with_a_period_of_its_own_the_last_state_is_compared_too(tmp_path: Path) -> None:
    assert 15 in trained_by_epochs(tmp_path, [15], period={"every_n_steps": 10})[0]


def test_the_timer_of_the_evaluation_is_no_period_of_its_own(tmp_path: Path) -> None:
    every: list[dict[str, Any]] = [{"every_n_steps": 4}, {"timer": EverySteps(4)}, {"every_n_epochs": 1}]
    for period in every:
        evaluation = EvaluationHook(lambda: {"score": 1.0}, **period)
        best = BestCheckpointHook(tmp_path, evaluation["score"], mode="max", timer=evaluation.given_timer)
        assert not best.works_at_end


@pytest.mark.parametrize("at_end", [False, True])
def test_a_training_run_shorter_than_the_period_of_the_evaluation_has_no_best(at_end: bool, tmp_path: Path) -> None:
    evaluation = EvaluationHook(lambda: {"score": 1.0}, every_n_steps=100, at_end=at_end)
    best = BestCheckpointHook(tmp_path, evaluation["score"], mode="max")
    ran = trace(evaluation, best, losses=[0.1] * 9)
    assert kept(tmp_path) == ([9] if at_end else [])
    assert any("was never due: the training run had 9 steps" in text for _, text in ran.lines) == (not at_end)
