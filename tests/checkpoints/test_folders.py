"""Folders of checkpoints: whose files count, who else saves into one, and which folder a relative path is."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import Process, start
from support.waiting import wait_until
from torch import nn

from torchhooks import (
    AbortedError,
    BestCheckpointHook,
    CheckpointError,
    CheckpointSaverHook,
    MonitoredLoop,
    MonitoredTrainingLoop,
    Saver,
    Session,
    StopAtStepHook,
    SummarySaverHook,
    best_checkpoint,
    latest_checkpoint,
    list_checkpoints,
)
from torchhooks.checkpoints.folder import FolderCache, FolderLock, list_again
from torchhooks.common.files import Disk

Lines = list[tuple[str, str]]


def save(folder: Path, step: int, saver: Saver | None = None, name: str = "model.ckpt") -> str:
    return (saver or Saver()).save(Session(), folder / name, step)


def warnings_in(lines: Lines) -> list[str]:
    return [text for level, text in lines if level == "WARNING"]


# Whose files count.


def loop_link(path: Path) -> None:
    path.symlink_to(path)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "notes-2024": lambda path: path.write_text("notes"),
    "log-1": lambda path: path.write_bytes(b""),
    "model.ckpt-abc": lambda path: path.write_text("no step"),
    "weights-1": lambda path: torch.save({}, path),
    "model.ckpt-3": lambda path: torch.save({}, path),
    "data-7": lambda path: path.write_bytes(b"PK\x03\x04" + 100 * b"a"),
    "circle-1": loop_link,
    "model.ckpt-4": loop_link,
    "theirs-2": lambda path: (path / "weights").mkdir(parents=True),
    "theirs-3": lambda path: (path / "state.pt").mkdir(parents=True),
    "pipe-1": lambda path: os.mkfifo(path),
    "model.ckpt-5": lambda path: os.mkfifo(path),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_no_saver_wrote_does_not_stop_a_start(tmp_path: Path, name: str) -> None:
    FOREIGN[name](tmp_path / name)
    assert Saver().restore_latest(Session(), tmp_path) is None
    save(tmp_path, 9, Saver(1))
    save(tmp_path, 10, Saver(1))
    assert sorted(os.listdir(tmp_path)) == sorted([name, "model.ckpt-10"])


def test_files_that_are_not_named_like_checkpoints_are_not_logged(tmp_path: Path, lines: Lines) -> None:
    for name, make in FOREIGN.items():
        if ".ckpt-" not in name or name in ("model.ckpt-abc", "model.ckpt-4"):
            make(tmp_path / name)
    save(tmp_path, 9)
    assert list_checkpoints(tmp_path)[0].step == 9
    assert warnings_in(lines) == []


@pytest.mark.parametrize("name", ["log", "model.ckpt"])
def test_a_thousand_files_of_others_do_not_fill_the_log(tmp_path: Path, name: str, lines: Lines) -> None:
    for number in range(1_000):
        (tmp_path / f"{name}-{number}").write_bytes(b"not a checkpoint" * 4)
    assert Saver().restore_latest(Session(), tmp_path) is None
    assert len(warnings_in(lines)) == {"log": 0, "model.ckpt": 2}[name]


@pytest.mark.parametrize("name", ["state.pt", "manifest.json"])
@pytest.mark.parametrize("size", [0, 3, 20, 60])
def test_a_folder_whose_only_checkpoint_was_cut_short_stops_a_start(
    tmp_path: Path, name: str, size: int, lines: Lines
) -> None:
    os.truncate(f"{save(tmp_path, 1)}/{name}", size)
    with pytest.raises(CheckpointError, match="damaged"):
        Saver().restore_latest(Session(), tmp_path)


def test_a_cut_checkpoint_of_another_name_is_logged_if_others_have_the_name(tmp_path: Path, lines: Lines) -> None:
    save(tmp_path, 1, name="mine")
    os.truncate(f"{save(tmp_path, 2, name='mine')}/state.pt", 0)
    (tmp_path / "theirs-2").touch()
    assert [found.step for found in list_checkpoints(tmp_path)] == [1]
    (text,) = warnings_in(lines)
    assert f"{tmp_path}/mine-2 is damaged: state.pt is cut short" in text


# Names.


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../model.ckpt", "/model.ckpt", ".hidden", "events.tfevents", "nul\0"]
)
def test_a_name_that_would_not_be_found_again_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"checkpoint_basename=.*: no checkpoint of this name would be found"):
        CheckpointSaverHook(tmp_path, save_steps=1, checkpoint_basename=name)


@pytest.mark.parametrize("name", ["model-5", "5", "a*b", "a[1]", "a?", "-", "a b", "a\nb", "m.ckpt-3.ckpt"])
def test_every_name_that_is_accepted_is_found_again(tmp_path: Path, name: str) -> None:
    with MonitoredLoop(
        lambda: None,
        hooks=[
            CheckpointSaverHook(tmp_path, save_steps=1, checkpoint_basename=name, saver=Saver(1)),
            StopAtStepHook(3),
        ],
        checkpoint_dir=tmp_path,
    ) as loop:
        while not loop.should_stop():
            loop.run()
    assert [(found.prefix, found.step) for found in list_checkpoints(tmp_path)] == [(name, 3)]


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "/other", "a/../.."])
def test_the_best_checkpoints_are_kept_in_a_folder_of_their_own(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"name=.*: must name a folder in"):
        BestCheckpointHook(tmp_path, "loss", save_steps=1, mode="min", name=name)


# Nothing outside of the folder is changed.


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_links_to_files_elsewhere_are_never_followed_to_write_or_remove(tmp_path: Path, lines: Lines) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
    for step in (1, 2, 3):
        save(other, step)
    (other / ".model.ckpt-9.elsewhere-1-2-01234567.tmp").write_text("theirs")
    for name in os.listdir(other):
        (run / name).symlink_to(other / name)
    before = contents(other)
    saver = Saver(1)
    for step in (3, 4, 5):
        save(run, step, saver)
    assert contents(other) == before
    assert sorted(os.listdir(run)) == [".model.ckpt-9.elsewhere-1-2-01234567.tmp", "model.ckpt-5"]


def test_a_temporary_file_is_created_exclusively_and_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("theirs", "link", "dangling"):
        with pytest.raises(OSError, match=r"File exists|Too many levels"):
            Disk().create(str(tmp_path / name))
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not (tmp_path / "nothing").exists()


# Other processes.


def save_and_stay(folder: Path) -> None:
    saver = Saver()
    save(folder, 1, saver)
    print("saved")
    signal.pause()


@pytest.fixture
def other_process(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A process that has saved into ``tmp_path`` and is still open."""
    process = start(tmp_path_factory.mktemp("other") / "output", save_and_stay, tmp_path)
    wait_until(lambda: process.output.read_text() == "saved\n", process.output.read_text)
    yield process
    process.kill()


def test_the_second_process_that_saves_into_a_folder_logs_one_warning(
    tmp_path: Path, other_process: Process, lines: Lines
) -> None:
    assert latest_checkpoint(tmp_path) is not None  # a process that only reads logs none
    assert warnings_in(lines) == []
    saver = Saver()
    for step in (2, 3):
        save(tmp_path, step, saver)
    (text,) = warnings_in(lines)
    assert text.startswith(f"another process also saves checkpoints into {tmp_path}")


def test_after_a_kill_the_next_process_logs_nothing(tmp_path: Path, other_process: Process, lines: Lines) -> None:
    other_process.kill()
    save(tmp_path, 2)
    assert warnings_in(lines) == []


def locked_elsewhere(folder: Path) -> bool:
    """Return whether a descriptor of its own, as another process has, cannot lock ``folder``."""
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def test_the_folder_is_locked_until_the_last_saver_of_the_process_is_closed(tmp_path: Path, lines: Lines) -> None:
    savers = [Saver(), Saver(async_save=True)]
    for step, saver in enumerate(savers):
        save(tmp_path, step, saver)
        saver.wait()
    locked = [locked_elsewhere(tmp_path)]
    for saver in savers:
        saver.close()
        locked.append(locked_elsewhere(tmp_path))
    save(tmp_path, 5, savers[0])
    locked.append(locked_elsewhere(tmp_path))
    savers.clear()
    del saver
    assert locked == [True, True, False, True]
    assert warnings_in(lines) == []


def test_a_forked_worker_does_not_keep_the_lock_of_its_parent(tmp_path: Path) -> None:
    saver = Saver()
    save(tmp_path, 1, saver)
    read, write = os.pipe()
    worker = os.fork()
    if worker == 0:  # as a worker of a DataLoader, which may outlive a parent that is killed
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        assert locked_elsewhere(tmp_path)
        saver.close()
        deadline = time.monotonic() + 60
        while locked_elsewhere(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.01)  # the worker closes its copy at its start
        assert not locked_elsewhere(tmp_path)
    finally:
        os.close(write)
        os.waitpid(worker, 0)


def test_a_folder_that_was_replaced_is_locked_again(tmp_path: Path) -> None:
    saver, folder = Saver(), tmp_path / "run"
    save(folder, 1, saver)
    folder.rename(tmp_path / "old")
    folder.mkdir()
    save(folder, 2, saver)
    assert (locked_elsewhere(folder), locked_elsewhere(tmp_path / "old")) == (True, False)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_gets_one_warning(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    savers = [Saver(2), Saver(2)]
    for step in range(4):
        save(tmp_path, step, savers[step % 2])
    (text,) = warnings_in(lines)
    assert f"the file system of {tmp_path} has no locks ({os.strerror(number)})" in text
    assert [found.step for found in list_checkpoints(tmp_path)] == [2, 3]


# Relative folders.


class MovesAway:
    """A step that changes the current directory in its first run."""

    def __init__(self, away: Path) -> None:
        self.away = away

    def __call__(self) -> dict[str, Any]:
        os.chdir(self.away)
        return {"loss": torch.tensor(0.5)}


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another folder than the current directory, which is ``tmp_path / "here"``."""
    for name in ("here", "away"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "away"


def run(loop: MonitoredLoop[Any]) -> None:
    with loop:
        while not loop.should_stop():
            loop.run()


def test_a_change_of_the_current_directory_in_training_changes_no_folder(
    tmp_path: Path, away: Path, lines: Lines
) -> None:
    model = nn.Linear(1, 1)
    hooks = [
        StopAtStepHook(4),
        SummarySaverHook(1, output_dir="curves", summary_op={"loss": "loss"}),
        BestCheckpointHook("run", "loss", save_steps=2, mode="min"),
    ]
    loop = MonitoredTrainingLoop(
        MovesAway(away), model, checkpoint_dir="run", save_checkpoint_steps=2, hooks=hooks, log_step_count_steps=1
    )
    run(loop)
    here = tmp_path / "here"
    assert list(away.iterdir()) == []
    assert [found.step for found in list_checkpoints(here / "run")] == [0, 2, 4]
    assert best_checkpoint(here / "run" / "best") == f"{here}/run/best/model.1.ckpt-2"
    assert any("tfevents" in name for name in os.listdir(here / "curves"))
    assert any("tfevents" in name for name in os.listdir(here / "run"))
    assert any(level == "INFO" and "step 4 into run" in text for level, text in lines)


def test_a_recovery_restores_from_the_folder_in_which_the_loop_began(tmp_path: Path, away: Path, lines: Lines) -> None:
    step, failures = MovesAway(away), [AbortedError()]

    def failing() -> dict[str, Any]:
        if os.getcwd() == str(away) and failures:
            raise failures.pop()
        return step()

    run(MonitoredTrainingLoop(failing, checkpoint_dir="run", save_checkpoint_steps=1, hooks=[StopAtStepHook(3)]))
    assert failures == []
    assert list(away.iterdir()) == []
    assert ("INFO", "restored step 1 from run/model.ckpt-1") in lines


def test_a_session_has_the_resolved_folder_and_a_hook_shows_it_as_it_was_given(tmp_path: Path, away: Path) -> None:
    hook = CheckpointSaverHook("run", save_steps=1)
    with MonitoredLoop(lambda: None, hooks=[hook], checkpoint_dir="run") as loop:
        assert loop.session.checkpoint_dir == f"{tmp_path}/here/run"
    assert repr(hook) == "CheckpointSaverHook('run', save_steps=1)"


def test_a_look_at_the_same_folder_again_logs_only_what_has_changed(tmp_path: Path, lines: Lines) -> None:
    seen: FolderCache = {}
    for step in (1, 2):
        os.truncate(f"{save(tmp_path, step)}/state.pt", 100)
        lines.clear()
        assert list_again(str(tmp_path), seen) == list_again(str(tmp_path), seen) == []
        (text,) = warnings_in(lines)
        assert f"model.ckpt-{step} is damaged" in text


def test_a_save_does_not_say_again_what_the_restore_has_said(tmp_path: Path, lines: Lines) -> None:
    save(tmp_path, 1)
    os.truncate(f"{save(tmp_path, 2)}/state.pt", 100)
    lines.clear()
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/model.ckpt-1"
    save(tmp_path, 3)
    (text,) = warnings_in(lines)
    assert "model.ckpt-2 is damaged" in text


def test_an_interrupted_lock_leaves_no_lock(tmp_path: Path) -> None:
    def lock_interrupted_at(line: int, folder: str) -> FolderLock | None:
        """Return the lock on ``folder``; ``None`` if a Ctrl-C came before the given line of its module was run."""
        left = iter(range(line))

        def interrupt(frame: Any, event: str, _: object) -> Any:
            if frame.f_globals.get("__name__") != FolderLock.__module__:
                return None
            if event == "line" and next(left, None) is None:
                raise KeyboardInterrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            return FolderLock.acquire(folder)
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(before)

    for line in range(100):
        folder = tmp_path / str(line)
        folder.mkdir()
        if lock_interrupted_at(line, str(folder)) is not None:
            break
        assert FolderLock.acquire(str(folder)).is_on(str(folder))  # not BlockingIOError
    assert line > 5
