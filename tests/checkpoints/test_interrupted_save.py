"""Saver: a thread that cannot be started, and a Ctrl-C at any moment of a save."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import pytest
import torch

from torchhooks.checkpoints import saver as checkpoint
from torchhooks.checkpoints.saver import Saver
from torchhooks.common.errors import CheckpointError, interrupt_in
from torchhooks.common.files import Disk
from torchhooks.device.snapshot import Snapshot, SnapshotMemory
from torchhooks.lifecycle.session import Session

Lines = list[tuple[str, str]]


class Box:
    """An object whose state is several tensors of one number."""

    def __init__(self, number: int) -> None:
        self.tensors = [torch.full((size,), number) for size in (1, 200)]

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tensors = state_dict["tensors"]


def save(saver: Saver, folder: Path, number: int) -> str:
    return saver.save(Session(state={"box": Box(number)}), folder / "model.ckpt", number)


def restored(folder: Path) -> set[int]:
    box = Box(0)
    Saver().restore_latest(Session(state={"box": box}), folder)
    return {int(number) for tensor in box.tensors for number in tensor.unique()}


# A thread that cannot be started.


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    return monkeypatch


def test_without_a_thread_the_checkpoint_is_written_in_the_foreground_with_a_warning(
    tmp_path: Path, no_threads: pytest.MonkeyPatch, lines: Lines
) -> None:
    saver = Saver(async_save=True)
    save(saver, tmp_path, 1)
    assert restored(tmp_path) == {1}
    assert [text for level, text in lines if level == "WARNING"] == [
        "no thread could be started (can't start new thread): the checkpoint of step 1 is written in the foreground"
    ]
    saver.close()


def test_the_save_after_one_without_a_thread_is_made_in_the_background_again(
    tmp_path: Path, no_threads: pytest.MonkeyPatch
) -> None:
    saver = Saver(async_save=True)
    save(saver, tmp_path, 1)
    no_threads.undo()
    save(saver, tmp_path, 2)
    saver.close()
    assert restored(tmp_path) == {2}


def test_an_error_of_a_write_without_a_thread_is_raised_at_once_and_leaves_the_saver_usable(
    tmp_path: Path, no_threads: pytest.MonkeyPatch
) -> None:
    class FullOnce(Disk):
        full = True

        def create(self, path: str) -> BinaryIO:
            if self.full:
                self.full = False
                raise OSError(28, "No space left on device")
            return super().create(path)

    saver = Saver(async_save=True)
    saver.disk = FullOnce()
    with pytest.raises(CheckpointError, match="No space left"):
        save(saver, tmp_path, 1)
    save(saver, tmp_path, 2)
    saver.close()
    assert restored(tmp_path) == {2}


def test_a_large_state_is_copied_without_the_threads_that_cannot_be_started(no_threads: pytest.MonkeyPatch) -> None:
    tensor, snapshot = torch.arange(5_000_000), Snapshot(SnapshotMemory())
    copy = snapshot(tensor)
    no_threads.setattr(torch, "get_num_threads", lambda: 4)
    snapshot.end()
    assert torch.equal(copy, tensor)


# A Ctrl-C.


@contextmanager
def interrupted_at(place: int, *code: Callable[..., Any]) -> Iterator[list[Any]]:
    """Raise KeyboardInterrupt at the ``place``-th line of ``code`` to run, each counted once; yield all counted."""
    codes = {function.__code__ for function in code}
    passed: list[Any] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code not in codes:
            return None
        if event == "line" and (line := (frame.f_code, frame.f_lineno)) not in passed:
            passed.append(line)
            if len(passed) == place:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield passed
    finally:
        sys.settrace(before)


def methods_of(*owners: Any) -> list[Callable[..., Any]]:
    return [method for owner in owners for method in vars(owner).values() if hasattr(method, "__code__")]


def own_code() -> list[Callable[..., Any]]:
    from torchhooks.checkpoints import folder as files
    from torchhooks.checkpoints import saving, steps

    modules = [value for module in (checkpoint, files, saving, steps) for value in vars(module).values()]
    functions = [value for value in modules if getattr(value, "__module__", "").startswith("torchhooks.checkpoints.")]
    return methods_of(Saver, checkpoint.BackgroundWriter, Disk, files.Folder, saving.Sink) + [
        f for f in functions if hasattr(f, "__code__")
    ]


# Tracing also stops at the end of a "with", before it closes the file. A signal does not.
@pytest.mark.slow
@pytest.mark.not_measured
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("async_save", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_ctrl_c_at_any_line_of_a_save_comes_out_as_it_is_and_leaves_the_folder_readable(
    tmp_path: Path, async_save: bool, lines: Lines
) -> None:
    place, passed = 0, list[Any]([None])
    while len(passed) >= place:
        place += 1
        folder = tmp_path / str(place)
        saver = Saver(2, async_save=async_save)
        saver.disk = Unsynced()
        save(saver, folder, 1)
        saver.wait()
        error: BaseException | None = None
        with interrupted_at(place, *own_code()) as passed:
            try:
                save(saver, folder, 2)
                saver.wait()
            except BaseException as raised:
                error = raised
        saver.close()
        assert isinstance(error, KeyboardInterrupt) == (len(passed) >= place), place
        assert restored(folder) in ({1}, {2})
        save(saver, folder, 3)
        saver.close()
        assert restored(folder) == {3}
        assert [name for name in os.listdir(folder) if name.endswith(".tmp")] == []
    assert place > 20


class Unsynced(Disk):
    """A disk that saves the time of syncing, which nothing here depends on."""

    def sync(self, file: BinaryIO) -> None:
        file.flush()

    def sync_folder(self, path: str) -> None:
        pass


def test_a_ctrl_c_while_waiting_for_the_background_leaves_the_write_to_the_next_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(async_save=True)
    save(saver, tmp_path, 1)

    def exception(future: Future[None]) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "exception", exception)
    with pytest.raises(KeyboardInterrupt):
        saver.wait()
    saver.close()
    assert restored(tmp_path) == {1}


def test_the_error_of_an_earlier_save_is_not_lost_in_a_ctrl_c(tmp_path: Path) -> None:
    class Interrupted(Box):
        def state_dict(self) -> dict[str, Any]:
            raise KeyboardInterrupt

    class Full(Disk):
        def create(self, path: str) -> BinaryIO:
            raise OSError(28, "No space left on device")

    saver = Saver(async_save=True)
    saver.disk = Full()
    save(saver, tmp_path, 1)
    with pytest.raises(KeyboardInterrupt):
        saver.save(Session(state={"box": Interrupted(2)}), tmp_path / "model.ckpt", 2)
    with pytest.raises(CheckpointError, match=r"model\.ckpt-1 .*No space left"):
        saver.close()


def test_the_error_of_an_earlier_save_is_a_note_of_the_next_one_if_a_ctrl_c_was_raised_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Disk):
        def create(self, path: str) -> BinaryIO:
            raise OSError(28, "No space left on device")

    start = checkpoint.BackgroundWriter.start

    def interrupted_after(writer: checkpoint.BackgroundWriter, write: Callable[[], None]) -> None:
        start(writer, write)
        raise KeyboardInterrupt

    saver = Saver(async_save=True)
    saver.disk = Full()
    save(saver, tmp_path, 1)
    monkeypatch.setattr(checkpoint.BackgroundWriter, "start", interrupted_after)
    with pytest.raises(KeyboardInterrupt):
        save(saver, tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"model\.ckpt-2 .*No space left") as raised:
        saver.close()
    assert "model.ckpt-1 was not written" in raised.value.__notes__[0]


def test_a_ctrl_c_while_a_checkpoint_is_read_is_not_an_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(Saver(), tmp_path, 1)

    def load(*args: Any, **arguments: Any) -> Any:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("the reader failed")  # as torch does with an error of a callback

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(KeyboardInterrupt):
        Saver().restore(Session(state={"box": Box(0)}), path)


def test_the_interrupt_in_a_chain_of_exceptions_is_found_even_if_the_chain_has_a_circle() -> None:
    one, other = ValueError(), KeyError()
    one.__cause__, other.__context__ = other, one
    assert interrupt_in(one) is None
    interrupt = other.__cause__ = KeyboardInterrupt()
    assert interrupt_in(one) is interrupt
