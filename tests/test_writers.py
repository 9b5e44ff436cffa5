"""Where a hook writes to: opened with the loop, flushed and closed with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchhooks import StepCounterHook, SummaryWriterCache
from torchhooks.testing import RecordingWriter, trace
from torchhooks.writers import WriterTarget


def test_there_is_no_writer_before_it_is_opened(tmp_path: Path) -> None:
    assert WriterTarget(tmp_path, None).writer is None
    assert list(tmp_path.iterdir()) == []


def test_a_given_writer_is_the_writer_until_it_is_closed() -> None:
    writer = RecordingWriter()
    target = WriterTarget(None, writer)
    assert target.open() is target.writer is writer
    target.close()
    assert target.writer is None


def test_a_folder_has_the_writer_of_the_cache(tmp_path: Path) -> None:
    assert WriterTarget(tmp_path, None).open() is SummaryWriterCache.get(tmp_path)


def test_two_that_write_to_one_folder_share_a_writer_and_a_file(tmp_path: Path) -> None:
    one, other = WriterTarget(tmp_path, None), WriterTarget(str(tmp_path), None)
    assert one.open() is other.open()
    one.close()
    other.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_nowhere_to_write_to_is_no_writer() -> None:
    target = WriterTarget(None, None)
    assert target.open() is None
    target.close()


def test_a_session_that_goes_on_with_nowhere_to_write_to_needs_no_start() -> None:
    assert trace(StepCounterHook(1), losses=[0.5] * 2, start_step=7).steps == [8, 9]


def test_close_without_an_open_is_harmless(tmp_path: Path) -> None:
    WriterTarget(tmp_path, None).close()
    assert list(tmp_path.iterdir()) == []


def test_close_flushes_a_given_writer_and_leaves_it_open() -> None:
    writer = RecordingWriter()
    target = WriterTarget(None, writer)
    target.open()
    target.close()
    assert (writer.flushed, writer.closed) == (1, 0)


def test_close_again_does_nothing() -> None:
    writer = RecordingWriter()
    target = WriterTarget(None, writer)
    target.open()
    target.close()
    target.close()
    assert writer.flushed == 1


def test_close_closes_the_writer_of_a_folder(tmp_path: Path) -> None:
    target = WriterTarget(tmp_path, None)
    writer = target.open()
    target.close()
    assert writer.all_writers is None


def test_a_folder_opened_again_has_a_new_writer(tmp_path: Path) -> None:
    target = WriterTarget(tmp_path, None)
    writer = target.open()
    target.close()
    assert target.open() is not writer


def test_a_flush_that_fails_leaves_nothing_open() -> None:
    class Full(RecordingWriter):
        def flush(self) -> None:
            raise OSError("no space left")

    target = WriterTarget(None, Full())
    target.open()
    with pytest.raises(OSError, match="no space left"):
        target.close()
    assert target.writer is None


def test_another_that_starts_the_session_in_the_same_place_is_known_while_it_is_open() -> None:
    writer = RecordingWriter()
    mine, other = WriterTarget(None, writer), WriterTarget(None, writer, starts_session=True)
    mine.open()
    known = [mine.session_started_by_another()]
    other.open()
    known.append(mine.session_started_by_another())
    other.close()
    known.append(mine.session_started_by_another())
    assert known == [False, True, False]


def test_one_that_starts_the_session_is_not_another_to_itself() -> None:
    target = WriterTarget(None, RecordingWriter(), starts_session=True)
    target.open()
    assert not target.session_started_by_another()


def test_one_that_was_never_closed_is_forgotten_with_its_hook() -> None:
    writer = RecordingWriter()
    mine = WriterTarget(None, writer)
    mine.open()
    WriterTarget(None, writer, starts_session=True).open()
    assert not mine.session_started_by_another()


def test_refuses_two_places_and_shows_them() -> None:
    with pytest.raises(ValueError, match=r"output_dir='d', summary_writer=5: give one, not both"):
        WriterTarget("d", 5)
