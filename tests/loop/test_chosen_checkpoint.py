"""A checkpoint as ``checkpoint_dir``: the loop returns to it, and what was saved later does not come back."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_threads import Hub, ThreadRanks, in_threads
from torch import nn

from torchhooks import (
    AbortedError,
    BestCheckpointHook,
    CheckpointError,
    CheckpointSaverHook,
    DamagedCheckpointError,
    MonitoredLoop,
    MonitoredTrainingLoop,
    Saver,
    Scaffold,
    Session,
    SessionRunHook,
    StopAtStepHook,
    best_checkpoint,
    latest_checkpoint,
    list_checkpoints,
)
from torchhooks.checkpoints.folder import split_checkpoint
from torchhooks.testing import RecordingHook

Lines = list[tuple[str, str]]


class Training:
    """A model with one weight, to which each run adds ``amount``."""

    def __init__(self, amount: float) -> None:
        self.model, self.amount = nn.Linear(1, 1, bias=False), amount
        self.items: list[int] = []
        nn.init.zeros_(self.model.weight)

    def step(self, item: int) -> None:
        self.items.append(item)
        with torch.no_grad():
            self.model.weight += self.amount

    @property
    def weight(self) -> float:
        return self.model.weight.item()


def train(
    checkpoint_dir: Any,
    last_step: int,
    amount: float = 1.0,
    *,
    saved_to: Any = None,
    hooks: tuple[SessionRunHook, ...] = (),
    max_to_keep: int | None = None,
    **arguments: Any,
) -> tuple[float, int]:
    """Train up to a step, saving every two steps; return the weight, and the step that was restored."""
    training = Training(amount)
    saving = CheckpointSaverHook(saved_to or "run", save_steps=2)
    with MonitoredLoop(
        training.step,
        training.model,
        hooks=[StopAtStepHook(last_step=last_step), *hooks, saving],
        checkpoint_dir=checkpoint_dir,
        scaffold=Scaffold(saver=Saver(max_to_keep)),
        **arguments,
    ) as loop:
        restored = loop.global_step
        for item in loop.until_stop(range(100)):
            loop.run(item)
    return training.weight, restored


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_loop_returns_to_the_checkpoint_and_the_next_one_continues_from_there(lines: Lines) -> None:
    assert train("run", 8) == (8.0, 0)
    lines.clear()
    assert train("run/model.ckpt-4", 6, 100.0) == (204.0, 4)
    assert [text for _, text in lines][:2] == [
        "run has checkpoints that were saved after model.ckpt-4: model.ckpt-6, model.ckpt-8. They stay until newer "
        "ones replace them. To continue later from what this loop saves, give the next one checkpoint_dir='run'",
        "restored step 4 from run/model.ckpt-4",
    ]
    assert [checkpoint.step for checkpoint in list_checkpoints("run")] == [0, 2, 8, 4, 6]
    assert train("run", 10, 1000.0) == (4204.0, 6)


def test_the_data_continue_where_the_checkpoint_was_saved() -> None:
    train("run", 8)
    training = Training(1.0)
    with MonitoredLoop(training.step, training.model, checkpoint_dir="run/model.ckpt-4") as loop:
        for item in loop.until_stop(range(7)):
            loop.run(item)
    assert training.items == [4, 5, 6]


def test_the_next_loop_continues_there_even_if_no_run_was_made() -> None:
    class Killed(BaseException):
        pass

    train("run", 8)
    with pytest.raises(Killed):  # noqa: PT012
        training = Training(100.0)
        saving = CheckpointSaverHook("run", save_steps=2)
        with MonitoredLoop(training.step, training.model, hooks=[saving], checkpoint_dir="run/model.ckpt-2"):
            raise Killed
    assert train("run", 3) == (3.0, 2)


def test_the_later_checkpoints_are_removed_first() -> None:
    train("run", 8, max_to_keep=5)
    train("run/model.ckpt-2", 4, 100.0, max_to_keep=3)
    assert [checkpoint.step for checkpoint in list_checkpoints("run")] == [8, 2, 4]


def test_the_newest_checkpoint_is_no_reason_for_a_line(lines: Lines) -> None:
    train("run", 4)
    lines.clear()
    assert train("run/model.ckpt-4", 6) == (6.0, 4)
    assert [text for _, text in lines if "saved after" in text] == []


def test_a_recovery_restores_what_was_saved_since(lines: Lines) -> None:
    train("run", 8)
    failing: Callable[[int], RecordingHook] = lambda call: RecordingHook(raises={("before_run", call): AbortedError})  # noqa: E731
    assert train("run/model.ckpt-4", 9, 100.0, hooks=(failing(4),)) == (504.0, 4)
    restored = [re.findall(r"ckpt-\d+$", text) for _, text in lines if text.startswith("restored")]
    assert restored == [["ckpt-4"], ["ckpt-6"]]


@pytest.mark.parametrize("saved_to", ["run", "elsewhere"])
def test_a_recovery_never_restores_what_was_saved_before(saved_to: str, lines: Lines) -> None:
    class Damaging(SessionRunHook):
        def before_run(self, run_context: Any) -> None:
            if run_context.session.global_step == 7 and not self.failed:
                self.failed = True
                for step in (4, 6):
                    Path(saved_to, f"model.ckpt-{step}", "state.pt").write_bytes(b"cut short")
                raise AbortedError

        failed = False

    train("run", 8)
    if saved_to == "run":
        with pytest.raises(DamagedCheckpointError, match=r"model\.ckpt-4 is damaged.* run has model\.ckpt-0, "):
            train("run/model.ckpt-4", 9, 100.0, hooks=(Damaging(),))
    else:
        training = Training(100.0)
        hooks = [StopAtStepHook(last_step=9), Damaging(), CheckpointSaverHook(saved_to, save_steps=2)]
        with MonitoredLoop(training.step, training.model, hooks=hooks, checkpoint_dir="run/model.ckpt-4") as loop:
            for item in loop.until_stop(range(20)):
                loop.run(item)
        assert training.weight == 504.0


def test_a_recovery_restores_what_the_hook_saved_into_another_folder(lines: Lines) -> None:
    train("run", 8)
    failing = RecordingHook(raises={("before_run", 4): AbortedError})
    assert train("run/model.ckpt-4", 9, 100.0, saved_to="new", hooks=(failing,)) == (504.0, 4)
    assert [text for _, text in lines if text.startswith("restored")] == [
        "restored step 4 from run/model.ckpt-4",
        f"restored step 6 from {os.path.abspath('new')}/model.ckpt-6",
    ]
    assert [checkpoint.step for checkpoint in list_checkpoints("run")] == [0, 2, 4, 6, 8]
    assert train("new", 10, saved_to="new") == (505.0, 9)


def test_a_failure_while_the_session_is_created_restores_it_again(lines: Lines) -> None:
    train("run", 8)
    failing = RecordingHook(raises={("after_create_session", 1): AbortedError})
    assert train("run/model.ckpt-4", 6, 100.0, hooks=(failing,)) == (204.0, 4)


@pytest.mark.parametrize("name", ["model.ckpt-5", "model.ckpt-4"])
def test_a_checkpoint_that_is_missing_or_damaged_is_an_error_that_says_what_there_is(name: str) -> None:
    train("run", 6)
    Path("run/model.ckpt-4/state.pt").write_bytes(b"cut short")
    problem = "cannot be read" if name[-1] == "5" else "is damaged"
    with pytest.raises(DamagedCheckpointError) as raised:
        train(f"run/{name}", 9)
    assert problem in str(raised.value)
    assert str(raised.value).endswith(
        "run has model.ckpt-0, model.ckpt-2, model.ckpt-6; checkpoint_dir='run' restores the newest that is undamaged."
    )


@pytest.mark.parametrize("make", [MonitoredLoop, MonitoredTrainingLoop])
def test_a_checkpoint_in_a_folder_that_does_not_exist_is_an_error(make: Any) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"rnu/model\.ckpt-600 cannot be read.* rnu has no checkpoint\.$"):
        make(lambda: None, checkpoint_dir="rnu/model.ckpt-600")
    assert not os.path.exists("rnu/model.ckpt-600")


def test_a_checkpoint_that_does_not_match_is_an_error() -> None:
    train("run", 6)
    with pytest.raises(CheckpointError, match="does not match"):
        MonitoredLoop(lambda: None, nn.Linear(2, 1), checkpoint_dir="run/model.ckpt-4")


def test_one_that_a_killed_process_had_moved_aside_is_found() -> None:
    train("run", 6)
    os.rename("run/model.ckpt-4", "run/.model.ckpt-4.elsewhere-1-2-01234567.old")
    assert train("run/model.ckpt-4", 5) == (5.0, 4)


def test_a_training_loop_saves_and_writes_into_the_folder_of_the_checkpoint() -> None:
    train("run", 8)
    training = Training(100.0)
    with MonitoredTrainingLoop(
        training.step, training.model, checkpoint_dir=Path("run/model.ckpt-4"), save_checkpoint_steps=2
    ) as loop:
        for item in loop.until_stop(range(7)):
            loop.run(item)
    assert training.weight == 304.0
    assert latest_checkpoint("run") == "run/model.ckpt-7"
    assert os.listdir() == ["run"]
    assert [name for name in os.listdir("run") if "tfevents" in name] != []


def test_a_best_checkpoint_can_begin_another_training_run() -> None:
    best = BestCheckpointHook("run", lambda global_step: -abs(global_step - 4), save_steps=1, mode="max")
    train("run", 8, hooks=(best,))
    assert train(best_checkpoint("run/best"), 6, 100.0, saved_to="new") == (204.0, 4)
    assert train("new", 7, saved_to="new") == (205.0, 6)


def test_every_rank_returns_to_the_checkpoint(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub, name: str, last_step: int) -> tuple[float, int]:
        return train(tmp_path / "run" / name, last_step, 1.0, saved_to=tmp_path / "run", ranks=ranks)

    assert in_threads(2, lambda ranks, hub: main(ranks, hub, "", 8)) == [(8.0, 0)] * 2
    assert in_threads(2, lambda ranks, hub: main(ranks, hub, "model.ckpt-4", 5)) == [(5.0, 4)] * 2
    assert in_threads(2, lambda ranks, hub: main(ranks, hub, "", 7)) == [(7.0, 5)] * 2


def test_what_is_a_checkpoint_and_what_is_a_folder(tmp_path: Path) -> None:
    os.makedirs("run/sub-1/deeper")
    Saver().save(Session(), "run/own", 3)
    os.makedirs("run/model.ckpt-7")
    Path("run/model.ckpt-7/state.pt").touch()
    Path("file").touch()
    checkpoints = ["run/own-3", "run/own-4", "run/model.ckpt-5", "run/model.ckpt-7", "file", "new/model.ckpt-5"]
    for path in [*checkpoints, *(os.path.abspath(path) for path in checkpoints)]:
        assert split_checkpoint(path) == (os.path.dirname(path) or ".", os.path.basename(path))
    for path in ["run", "run/", ".", "/", "", "new", "new-3", "run/sub-1", "run/sub-2", "run/sub-1/deeper", "run/own"]:
        assert split_checkpoint(path) == (path, None)
    assert split_checkpoint("run/own-3/") == ("run", "own-3")
