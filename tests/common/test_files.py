"""A file that was removed while it was open is noticed; one that was moved is not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from torchhooks.common import files
from torchhooks.common.files import Disk, warn_if_removed

Lines = list[tuple[str, str]]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[FileIO]:
    with FileIO(tmp_path / "file", "w") as file:
        yield file


def test_a_file_in_its_place_is_not_removed(file: FileIO, tmp_path: Path, lines: Lines) -> None:
    assert (warn_if_removed(file, str(tmp_path / "file")), lines) == (False, [])


def test_a_moved_file_is_not_removed(file: FileIO, tmp_path: Path, lines: Lines) -> None:
    (tmp_path / "file").rename(tmp_path / "moved")
    assert (warn_if_removed(file, str(tmp_path / "file")), lines) == (False, [])


def test_a_removed_file_is_named_in_a_warning(file: FileIO, tmp_path: Path, lines: Lines) -> None:
    path = tmp_path / "file"
    path.unlink()
    assert warn_if_removed(file, str(path))
    assert lines == [
        ("WARNING", f"{path} was removed while it was open for writing: what was written to it is lost"),
    ]


def test_a_file_that_another_one_replaced_is_removed_without_a_warning(
    file: FileIO, tmp_path: Path, lines: Lines
) -> None:
    path = tmp_path / "file"
    path.unlink()
    path.touch()
    assert (warn_if_removed(file, str(path)), lines) == (True, [])


def test_a_file_system_that_counts_no_links_removes_nothing(
    file: FileIO, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = list(os.fstat(file.fileno()))
    fields[3] = 0  # st_nlink
    monkeypatch.setattr(os, "fstat", lambda number: os.stat_result(fields))
    assert (warn_if_removed(file, str(tmp_path / "file")), lines) == (False, [])


def test_a_system_that_opens_no_folders_renames_without_waiting_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)  # as Windows

    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(os, "open", fail)
    Disk().sync_folder(str(tmp_path))
