"""The calls of the operating system that a save makes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchhooks.common import files
from torchhooks.common.files import Disk

Lines = list[tuple[str, str]]


def test_a_system_that_opens_no_folders_renames_without_waiting_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)  # as Windows

    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(os, "open", fail)
    Disk().sync_folder(str(tmp_path))
