"""Event files: every event is written at once, no torn record hides others, and a removed file is noticed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.disks import FailingDisk, no_space_after
from support.events import read
from support.processes import fork_program
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

from torchhooks import MonitoredLoop, StopAtStepHook, SummarySaverHook
from torchhooks.summary import tensorboard
from torchhooks.summary.tensorboard import DirectSummaryWriter, EventFile, masked_crc32c
from torchhooks.testing import FakeClock

SMALL, LARGE = 10, 9999  # characters of a text; the checksum of a large event is computed by NumPy
Lines = list[tuple[str, str]]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[DirectSummaryWriter]:
    writer = DirectSummaryWriter(str(tmp_path))
    yield writer
    writer.close()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if "tfevents" in path.name)


def points(folder: Path, tag: str) -> list[int]:
    accumulator = read(folder)
    tags = accumulator.Tags()
    if tag in tags["scalars"]:
        return [point.step for point in accumulator.Scalars(tag)]
    return [point.step for point in accumulator.Tensors(tag)] if tag in tags["tensors"] else []


def texts(folder: Path) -> list[int]:
    return points(folder, "text/text_summary")


# -- records ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 4, 5, 26, 300, 511, 512, 513, 767, 768, 769, 2048, 5000, 100_001])
def test_the_checksum_is_that_of_tensorboard(length: int) -> None:
    for data in (random.Random(length).randbytes(length), bytes(length), b"\xff" * length):
        assert masked_crc32c(data) == pywrap_tensorflow.masked_crc32c(data)


@pytest.mark.parametrize("length", [SMALL, LARGE], ids=["small", "large"])
def test_an_event_is_in_the_file_when_the_call_returns_and_no_thread_was_started(
    length: int, tmp_path: Path, writer: DirectSummaryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for step in range(3):
            writer.add_text("text", "x" * length, step)
            assert texts(tmp_path) == list(range(step + 1))


def test_a_kill_loses_no_event_that_was_added(tmp_path: Path) -> None:
    code = f"""
import os, signal
from torchhooks.summary.tensorboard import DirectSummaryWriter
writer = DirectSummaryWriter({str(tmp_path)!r})
for step in range(3):
    writer.add_text("text", "x" * {LARGE}, step)
    writer.add_scalar("loss", 0.5, step)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert fork_program(code).returncode == -signal.SIGKILL
    assert (texts(tmp_path), points(tmp_path, "loss")) == ([0, 1, 2], [0, 1, 2])


# -- a disk that is full ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("room", [0, 1, 7, 8, 11, 12, 13, 40])
def test_a_record_torn_by_a_full_disk_hides_no_event_from_tensorboard(
    room: int, length: int, tmp_path: Path, writer: DirectSummaryWriter
) -> None:
    writer.add_text("text", "x" * length, 1)
    with no_space_after(files(tmp_path)[0].stat().st_size + room), pytest.raises(OSError, match="File too large"):
        writer.add_text("text", "x" * length, 2)
    writer.add_text("text", "x" * length, 3)
    writer.add_text("text", "x" * length, 4)
    assert texts(tmp_path) == [1, 3, 4]
    assert len(files(tmp_path)) == 2


def test_each_write_fails_until_the_disk_has_space_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FailingDisk(monkeypatch, tensorboard)
    writer = DirectSummaryWriter(str(tmp_path))
    disk.fill()
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            writer.add_scalar("loss", 0.5, 2)
    disk.repair()
    writer.add_scalar("loss", 0.5, 3)
    writer.close()
    assert points(tmp_path, "loss") == [3]


def test_a_record_cut_short_by_an_interrupt_hides_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FailingDisk(monkeypatch, tensorboard)
    writer = DirectSummaryWriter(str(tmp_path))
    disk.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        writer.add_scalar("loss", 0.5, 1)
    disk.repair()
    writer.add_scalar("loss", 0.5, 2)
    writer.close()
    assert points(tmp_path, "loss") == [2]


def test_a_file_that_cannot_be_begun_is_closed(tmp_path: Path) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    with no_space_after(3), pytest.raises(OSError, match="File too large"):
        EventFile(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == opened


def test_the_files_of_one_second_are_read_in_the_order_in_which_they_were_opened(tmp_path: Path) -> None:
    with FakeClock():
        for _ in range(12):
            EventFile(str(tmp_path)).close()
    numbers = [int(path.name.rpartition(".")[2]) for path in files(tmp_path)]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("ahead", [0, 3600])
def test_a_file_is_read_after_the_files_of_a_process_that_ended_in_the_same_second_or_whose_clock_was_ahead(
    ahead: int, tmp_path: Path
) -> None:
    with FakeClock():
        EventFile(str(tmp_path)).close()
        (first,) = files(tmp_path)
        second = first.name.split(".")[3]
        earlier = first.rename(first.with_name(f"events.out.tfevents.{int(second) + ahead:010d}.zzz.9.000000"))
        EventFile(str(tmp_path)).close()
    assert files(tmp_path)[0] == earlier


def test_files_that_other_programs_named_do_not_matter(tmp_path: Path) -> None:
    for name in ("events.out.tfevents.zzz", "events.out.tfevents.17.host", "zzz"):
        (tmp_path / name).touch()
    EventFile(str(tmp_path)).close()
    assert len(files(tmp_path)) == 3


def test_a_new_file_goes_to_the_same_folder_after_the_working_directory_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    file = EventFile("run")
    monkeypatch.chdir("elsewhere")
    file.reopen()
    file.close()
    assert len(files(tmp_path / "run")) == 2


# -- removed files -----------------------------------------------------------------------------------------------------


def test_points_after_a_file_was_removed_go_to_a_new_one_with_a_warning(
    tmp_path: Path, writer: DirectSummaryWriter, lines: Lines
) -> None:
    for step in range(6):
        writer.add_scalar("loss", 0.5, step)
        if step in (1, 3):
            (removed,) = files(tmp_path)
            removed.unlink()
    assert points(tmp_path, "loss") == [4, 5]
    (file,) = files(tmp_path)
    warnings = [text for level, text in lines if level == "WARNING"]
    assert len(warnings) == 2
    assert warnings[-1] == f"{removed} was removed, and with it its points; the next ones go to {file}"


def test_points_after_the_folder_was_removed_go_to_a_new_one(tmp_path: Path, lines: Lines) -> None:
    def step() -> float:
        if loop.global_step == 3:
            shutil.rmtree(tmp_path / "curves")
        return 0.5

    hooks = [SummarySaverHook(1, output_dir=tmp_path / "curves", summary_op="loss"), StopAtStepHook(last_step=6)]
    with MonitoredLoop(step, hooks=hooks) as loop:
        while not loop.should_stop():
            loop.run()
    assert points(tmp_path / "curves", "loss") == [4, 5, 6]
    assert [level for level, text in lines if " was removed, " in text] == ["WARNING"]
