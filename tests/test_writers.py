"""The writer of a hook is opened with the loop, and flushed and closed with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchhooks import StepCounterHook, SummarySaverHook, SummaryWriterCache
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


def test_the_writer_of_a_folder_comes_from_the_cache(tmp_path: Path) -> None:
    assert WriterTarget(tmp_path, None).open() is SummaryWriterCache.get(tmp_path)


def test_two_targets_with_one_folder_share_a_writer_and_a_file(tmp_path: Path) -> None:
    one, other = WriterTarget(tmp_path, None), WriterTarget(str(tmp_path), None)
    assert one.open() is other.open()
    one.close()
    other.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_target_without_a_place_has_no_writer() -> None:
    target = WriterTarget(None, None)
    assert target.open() is None
    target.close()


def test_a_restored_session_without_a_place_to_write_needs_no_start() -> None:
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


def test_a_folder_that_is_opened_again_has_a_new_writer(tmp_path: Path) -> None:
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


def test_a_target_knows_another_that_starts_the_session_while_that_is_open() -> None:
    writer = RecordingWriter()
    mine, other = WriterTarget(None, writer), WriterTarget(None, writer, starts_session=True)
    mine.open()
    known = [mine.session_started_by_another()]
    other.open()
    known.append(mine.session_started_by_another())
    other.close()
    known.append(mine.session_started_by_another())
    assert known == [False, True, False]


def test_a_target_that_starts_the_session_does_not_count_itself() -> None:
    target = WriterTarget(None, RecordingWriter(), starts_session=True)
    target.open()
    assert not target.session_started_by_another()


def test_a_target_that_was_never_closed_is_forgotten_when_it_is_freed() -> None:
    writer = RecordingWriter()
    mine = WriterTarget(None, writer)
    mine.open()
    WriterTarget(None, writer, starts_session=True).open()
    assert not mine.session_started_by_another()


@pytest.mark.parametrize(("begun_at", "step", "start"), [(0, 0, 0), (0, 1, 1), (0, 3, 1), (7, 7, 8), (7, 9, 8)])
def test_a_start_has_the_first_step_that_the_session_makes(begun_at: int, step: int, start: int) -> None:
    writer = RecordingWriter()
    target = WriterTarget(None, writer, starts_session=True)
    target.open()
    target.start_session(begun_at, step)
    assert writer.records == [("session_log", "START", start)]


def test_the_starts_of_all_hooks_with_one_writer_come_before_the_first_point() -> None:
    writer = RecordingWriter()
    trace(*(SummarySaverHook(1, summary_writer=writer, summary_op={tag: "loss"}) for tag in "ab"), losses=[0.5])
    assert [kind for kind, *_ in writer.records] == ["session_log", "session_log", "scalar", "scalar"]


def test_refuses_two_places_and_shows_them() -> None:
    with pytest.raises(ValueError, match=r"output_dir='d', summary_writer=5: give one, not both"):
        WriterTarget("d", 5)
