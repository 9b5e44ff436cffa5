"""Event files: whole records only, a bounded queue, and a warning if the file is removed."""

from __future__ import annotations

import errno
import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.disks import FailingDisk, no_space_after
from support.events import read
from tensorboard.summary.writer.record_writer import RecordWriter

from torchhooks.summary import event_files
from torchhooks.summary.event_files import DirectSummaryWriter, EventFile, as_record
from torchhooks.testing import FakeClock

SMALL, LARGE = 10, 9999  # characters of a text that is written at once, and of one that is queued
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


class Gate:
    """Holds the background thread before it writes a large record, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.open, self.reached = threading.Event(), threading.Event()

        def gated(data: bytes) -> bytes:
            if len(data) > LARGE:
                self.reached.set()
                assert self.open.wait(60)
                if error is not None:
                    raise error
            return as_record(data)

        monkeypatch.setattr(event_files, "as_record", gated)


# -- whole records ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 26, 300, 70_000])
def test_a_record_is_that_of_tensorboard(size: int) -> None:
    data, written = bytes(number * 7 % 256 for number in range(size)), io.BytesIO()
    RecordWriter(written).write(data)
    assert as_record(data) == written.getvalue()


@pytest.mark.parametrize("length", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("room", [1, 7, 8, 11, 12, 13, 40])
def test_a_record_torn_by_a_full_disk_is_removed_so_that_tensorboard_reads_what_follows(
    room: int, length: int, tmp_path: Path, writer: DirectSummaryWriter
) -> None:
    def add(step: int) -> None:
        writer.add_text("text", "x" * length, step)
        writer.flush()

    add(1)
    size = files(tmp_path)[0].stat().st_size
    with no_space_after(size + room), pytest.raises(OSError, match="File too large"):
        add(2)
    assert files(tmp_path)[0].stat().st_size == size
    add(3)
    assert texts(tmp_path) == [1, 3]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    return FailingDisk(monkeypatch, event_files)


def test_a_torn_record_that_cannot_be_removed_at_once_is_removed_before_the_next_one(
    disk: FailingDisk, tmp_path: Path, writer: DirectSummaryWriter
) -> None:
    writer.add_scalar("loss", 0.5, 1)
    disk.fill()
    for message in ("No space left", "Input/output error"):
        with pytest.raises(OSError, match=message):
            writer.add_scalar("loss", 0.5, 2)
    disk.repair()
    writer.add_scalar("loss", 0.5, 3)
    assert points(tmp_path, "loss") == [1, 3]


def test_a_torn_record_is_removed_when_the_file_is_closed(
    disk: FailingDisk, tmp_path: Path, writer: DirectSummaryWriter
) -> None:
    size = files(tmp_path)[0].stat().st_size
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        writer.add_scalar("loss", 0.5, 1)
    assert files(tmp_path)[0].stat().st_size == size + disk.PART
    disk.repair()
    writer.close()
    assert files(tmp_path)[0].stat().st_size == size


def test_a_record_cut_short_by_an_interrupt_is_removed(
    disk: FailingDisk, tmp_path: Path, writer: DirectSummaryWriter
) -> None:
    size = files(tmp_path)[0].stat().st_size
    disk.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        writer.add_scalar("loss", 0.5, 1)
    assert files(tmp_path)[0].stat().st_size == size
    disk.repair()


def test_a_file_that_cannot_be_begun_is_closed_and_has_no_part_of_a_record(tmp_path: Path) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    with no_space_after(3), pytest.raises(OSError, match="File too large"):
        EventFile(str(tmp_path))
    assert [path.stat().st_size for path in files(tmp_path)] == [0]
    assert len(os.listdir("/proc/self/fd")) == opened


def test_the_files_of_one_second_are_read_in_the_order_in_which_they_were_opened(tmp_path: Path) -> None:
    with FakeClock():
        for _ in range(12):
            EventFile(str(tmp_path)).close()
    numbers = [int(path.name.rpartition(".")[2]) for path in files(tmp_path)]
    assert numbers == sorted(numbers)


# -- the queue --------------------------------------------------------------------------------------------------------


def test_a_full_queue_has_ten_events_and_the_caller_waits(
    tmp_path: Path, writer: DirectSummaryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    waits = threading.Event()
    added: list[int] = []

    def add() -> None:
        for step in range(15):
            if step == 10:
                waits.set()
            writer.add_text("text", "x" * LARGE, step)
            added.append(step)

    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(add)
        try:
            assert waits.wait(60)
            assert gate.reached.wait(60)
            with pytest.raises(TimeoutError):
                adding.result(timeout=0.2)  # would return if the queue had no bound
            assert len(added) == 10
        finally:
            gate.open.set()
        adding.result(timeout=60)
    writer.flush()
    assert texts(tmp_path) == list(range(15))


def test_a_full_queue_whose_events_all_fail_keeps_no_caller_waiting(
    tmp_path: Path, writer: DirectSummaryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    for step in range(10):
        writer.add_text("text", "x" * LARGE, step)
    gate.open.set()
    with pytest.raises(OSError, match="No space left") as raised:
        writer.flush()
    assert raised.value.__notes__ == [f"10 events were not written to {files(tmp_path)[0]}"]
    writer.flush()  # the errors were raised
    writer.add_scalar("loss", 0.5, 1)
    assert points(tmp_path, "loss") == [1]


def test_closing_again_raises_no_error_of_the_events_that_were_queued(
    writer: DirectSummaryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    file = writer.file_writer
    for step in range(3):
        writer.add_text("text", "x" * LARGE, step)
    gate.open.set()
    with pytest.raises(OSError, match="No space left"):
        file.close()
    file.close()


def test_an_event_is_written_even_if_no_thread_can_be_started(
    tmp_path: Path, writer: DirectSummaryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for step in range(2):
            writer.add_text("text", "x" * LARGE, step)
        assert texts(tmp_path) == [0, 1]
    writer.add_text("text", "x" * LARGE, 2)
    writer.flush()
    assert texts(tmp_path) == [0, 1, 2]


def test_an_interrupted_wait_lets_no_event_overtake_the_one_that_is_being_written(
    tmp_path: Path, writer: DirectSummaryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    writer.add_text("text", "x" * LARGE, 1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Future, "exception", interrupt)
        patch.setattr(Future, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.flush()
    assert gate.reached.wait(60)
    writer.add_scalar("loss", 0.5, 2)
    gate.open.set()
    writer.flush()
    (path,) = files(tmp_path)
    content = path.read_bytes()
    assert content.index(b"text_summary") < content.index(b"loss")


# -- a removed file ---------------------------------------------------------------------------------------------------


def warnings(lines: Lines) -> list[str]:
    return [text for level, text in lines if level == "WARNING" and "was removed while it was open" in text]


def add_after_a_while(writer: DirectSummaryWriter, clock: FakeClock) -> None:
    clock.advance(10)
    writer.add_scalar("loss", 0.5, 2)


def add_after_a_flush(writer: DirectSummaryWriter, clock: FakeClock) -> None:
    writer.flush()
    writer.add_scalar("loss", 0.5, 2)


@pytest.mark.parametrize("notice", [add_after_a_while, add_after_a_flush])
def test_a_folder_that_was_removed_gets_a_new_file_with_a_warning(
    notice: Callable[[DirectSummaryWriter, FakeClock], None], tmp_path: Path, clock: FakeClock, lines: Lines
) -> None:
    writer = DirectSummaryWriter(str(tmp_path / "run"))
    writer.add_scalar("loss", 0.5, 1)
    (path,) = files(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    notice(writer, clock)
    writer.add_scalar("loss", 0.5, 3)
    writer.close()
    assert points(tmp_path / "run", "loss") == [2, 3]
    assert warnings(lines) == [f"{path} was removed while it was open for writing: what was written to it is lost"]


def test_a_folder_that_was_removed_stays_removed_if_nothing_more_is_written(tmp_path: Path, lines: Lines) -> None:
    writer = DirectSummaryWriter(str(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
    writer.flush()
    writer.flush()
    writer.close()
    assert not (tmp_path / "run").exists()
    assert len(warnings(lines)) == 1


def test_a_file_that_was_removed_is_noticed_by_close(tmp_path: Path, lines: Lines) -> None:
    writer = DirectSummaryWriter(str(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
    writer.close()
    assert len(warnings(lines)) == 1


def test_a_folder_that_was_moved_keeps_its_file_without_a_warning(tmp_path: Path, lines: Lines) -> None:
    writer = DirectSummaryWriter(str(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "moved")
    writer.flush()
    writer.add_scalar("loss", 0.5, 1)
    writer.close()
    assert points(tmp_path / "moved", "loss") == [1]
    assert warnings(lines) == []


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
