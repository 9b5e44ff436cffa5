"""What event files and files of JSON lines have in common."""

from __future__ import annotations

import io
import os

from torchhooks.log import logger


def warn_if_removed(file: io.FileIO, path: str) -> bool:
    """Return whether the open ``file`` at ``path`` was removed, and log a warning if it was.

    Without this, writes to it succeed and are lost. A file that was moved is not removed: what is written to it stays.
    """
    status = os.fstat(file.fileno())
    if status.st_nlink or _is_at(path, status):  # some file systems count no links at all
        return False
    logger.warning("%s was removed while it was open for writing: what was written to it is lost", path)
    return True


def _is_at(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), status)
    except FileNotFoundError:
        return False
