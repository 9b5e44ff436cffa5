"""Processes that save at every step and are killed at random moments: what they reported as saved can be restored.

TORCHHOOKS_KILLS is the number of kills for each of the three ways to save, 5 by default: by a Saver, by an
asynchronous one, and by a hook between two items of ``until_stop``, after the body has changed the state once more.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import start
from support.waiting import wait_until
from torch import nn

from torchhooks import CheckpointSaverHook, CheckpointSaverListener, MonitoredLoop, Saver, Session

KILLS = int(os.environ.get("TORCHHOOKS_KILLS", "5"))
MAX_TO_KEEP = 3
MOST_REPORTS = 3
MOST_SECS = 0.04  # about the duration of a start, or of several saves


class Numbers(nn.Module):
    """A model with tensors of several sizes, all filled with one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(size) for size in (1, 1000, 200_000)])

    def fill(self, number: int) -> None:
        with torch.no_grad():
            for weight in self.weights:
                weight.fill_(number)

    def numbers(self) -> set[int]:
        return {int(number) for weight in self.weights for number in weight.unique()}


class Note:
    """A state of plain values: a list of the number, long enough that writing it takes a while."""

    def __init__(self) -> None:
        self.numbers = [0]

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.numbers = list(state_dict["numbers"])


def make_training() -> tuple[Session, Numbers, Note]:
    model, note = Numbers(), Note()
    return Session(model, None, {"note": note}), model, note


# In the process that is killed.


def train_for_ever(folder: str, async_save: bool) -> None:
    """Continue from the newest checkpoint, change everything in place at each step, and report what is saved."""
    session, model, note = make_training()
    say("begins", 0)
    saver = Saver(MAX_TO_KEEP, async_save=async_save)
    saver.restore_latest(session, folder)
    while True:
        session.global_step += 1
        step = session.global_step
        model.fill(step)
        note.numbers[:] = [step] * 1000
        saver.save(session, f"{folder}/model.ckpt", step)
        if async_save and step % 3:
            continue  # the next step overwrites what is being written
        saver.wait()
        say("saved", step)


class Reports(CheckpointSaverListener):
    """Reports what was saved. The first checkpoint of a process repeats the one that was restored."""

    def after_save(self, session: Session, step: int) -> None:
        say("saved", step)


def train_in_a_loop(folder: str) -> None:
    """Continue from the newest checkpoint. The step leaves the state wrong, and the body makes it right."""
    _, model, note = make_training()
    say("begins", 0)

    def step(number: int) -> None:
        model.fill(-1)
        note.numbers[:] = [-1] * 1000

    hook = CheckpointSaverHook(folder, save_steps=1, saver=Saver(MAX_TO_KEEP), listeners=[Reports()])
    with MonitoredLoop(step, model, hooks=[hook], state={"note": note}, checkpoint_dir=folder) as loop:
        for number in loop.until_stop(range(1, 10**9)):
            assert number == loop.global_step + 1, "an item is missing, or came twice"
            loop.run(number)
            model.fill(number)
            note.numbers[:] = [number] * 1000


def say(word: str, number: int) -> None:
    """Write one line atomically, so that a kill does not split it."""
    os.write(sys.stdout.fileno(), f"{word} {number}\n".encode())


# In the test.


def train_and_kill(how: str, folder: Path, reports: int, secs: float) -> int:
    """Kill a training process ``secs`` after so many reports; return the last step reported as saved, or 0."""
    arguments = (train_in_a_loop, str(folder)) if how == "items" else (train_for_ever, str(folder), how == "async")
    process = start(folder.with_name("reports"), *arguments, ignored=None)
    try:
        wait_until(lambda: "begins" in process.output.read_text(), process.output.read_text)
        wait_until(lambda: len(steps_in(process.output)) >= reports, process.output.read_text)
        time.sleep(secs)
        assert process.is_alive(), process.output.read_text()
    finally:
        process.kill()
    return max(steps_in(process.output), default=0)


def steps_in(reports: Path) -> list[int]:
    """Return the steps that were reported as saved."""
    return [int(line.split()[1]) for line in reports.read_text().splitlines() if line.startswith("saved ")]


def restored_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, all parts of which must be of that step."""
    session, model, note = make_training()
    if Saver().restore_latest(session, folder) is None:
        return 0
    assert model.numbers() == set(note.numbers) == {session.global_step}
    return session.global_step


@pytest.mark.parametrize("how", ["sync", "async", "items"])
def test_what_was_reported_as_saved_survives_every_kill(tmp_path: Path, how: str, lines: list[tuple[str, str]]) -> None:
    # After a number of reports, and not only after some time, so that there is progress even on a slow machine.
    moments, newest = random.Random(how), 0
    for _ in range(KILLS):
        reports, secs = moments.randint(0, MOST_REPORTS), moments.uniform(0, MOST_SECS)
        reported = train_and_kill(how, tmp_path / "run", reports, secs)
        found = restored_step(tmp_path / "run")
        assert found >= max(reported, newest)
        newest = found


@pytest.mark.parametrize("how", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_what_kills_leave_in_the_folder_does_not_pile_up(
    tmp_path: Path, how: str, lines: list[tuple[str, str]]
) -> None:
    for life in range(6):
        train_and_kill(how, tmp_path / "run", life % 4, life / 6 * MOST_SECS)
    session, *_ = make_training()
    saver = Saver(MAX_TO_KEEP)
    saver.restore_latest(session, tmp_path / "run")
    saver.save(session, tmp_path / "run" / "model.ckpt", session.global_step + 1)
    assert len(list((tmp_path / "run").iterdir())) == MAX_TO_KEEP
