"""Processes that save at every step and are killed at random moments: what they reported as saved can be restored.

TORCHHOOKS_KILLS is the number of kills for each of the three ways to save, 12 by default: by a Saver, by an
asynchronous one, and by a hook between two items of ``until_stop``, after the body has changed the state once more.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import environment
from torch import nn

from torchhooks import CheckpointSaverHook, CheckpointSaverListener, MonitoredLoop, Saver, Session

KILLS = int(os.environ.get("TORCHHOOKS_KILLS", "12"))
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


def serve() -> None:
    """Import torch once. For each line, a way to save and a folder, fork a training process and wait for it."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        how, folder = line.rstrip("\n").split(" ", 1)
        process = os.fork()
        if process == 0:
            if how == "items":
                train_in_a_loop(folder)
            train_for_ever(folder, how == "async")
        say("pid", process)
        os.waitpid(process, 0)
        say("dead", process)


# In the test.


class Server:
    """Starts training processes and kills them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )
        self._unread = b""

    def train_and_kill(self, how: str, folder: Path, reports: int, secs: float) -> int:
        """Kill a training process ``secs`` after so many reports; return the last step reported as saved, or 0."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{how} {folder}\n".encode())
        self._process.stdin.flush()
        pid, saved, end, killed = 0, [0], float("inf"), False
        while True:
            for word, number in self._lines(None if end == float("inf") else max(0.0, end - time.monotonic())):
                if word == "pid":
                    pid = number
                elif word == "saved":
                    saved.append(number)
                else:
                    assert killed, "the training process ended by itself"
                    return saved[-1]
            if end == float("inf") and pid and len(saved) > reports and not killed:
                end = time.monotonic() + secs
            if time.monotonic() >= end:
                os.kill(pid, signal.SIGKILL)
                end, killed = float("inf"), True

    def _lines(self, timeout: float | None) -> list[tuple[str, int]]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return []
        read = os.read(self._process.stdout.fileno(), 1 << 16)
        assert read, "the server ended"
        *lines, self._unread = (self._unread + read).split(b"\n")
        return [(word, int(number)) for word, number in (line.decode().split() for line in lines)]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def restored_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, all parts of which must be of that step."""
    session, model, note = make_training()
    if Saver().restore_latest(session, folder) is None:
        return 0
    assert model.numbers() == set(note.numbers) == {session.global_step}
    return session.global_step


@pytest.mark.parametrize("how", ["sync", "async", "items"])
def test_what_was_reported_as_saved_survives_every_kill(
    tmp_path: Path, how: str, server: Server, lines: list[tuple[str, str]]
) -> None:
    # After a number of reports, and not only after some time, so that there is progress even on a slow machine.
    moments, newest = random.Random(how), 0
    for _ in range(KILLS):
        reports, secs = moments.randint(0, MOST_REPORTS), moments.uniform(0, MOST_SECS)
        reported = server.train_and_kill(how, tmp_path, reports, secs)
        found = restored_step(tmp_path)
        assert found >= max(reported, newest)
        newest = found


@pytest.mark.parametrize("how", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_what_kills_leave_in_the_folder_does_not_pile_up(
    tmp_path: Path, how: str, server: Server, lines: list[tuple[str, str]]
) -> None:
    for life in range(6):
        server.train_and_kill(how, tmp_path, life % 4, life / 6 * MOST_SECS)
    session, *_ = make_training()
    saver = Saver(MAX_TO_KEEP)
    saver.restore_latest(session, tmp_path)
    saver.save(session, tmp_path / "model.ckpt", session.global_step + 1)
    assert len(list(tmp_path.iterdir())) == MAX_TO_KEEP


if __name__ == "__main__":
    serve()
