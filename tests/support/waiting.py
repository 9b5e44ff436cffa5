"""Waiting for what another thread or another process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], bool], why: Callable[[], str] = str, secs: float = 60.0) -> None:
    """Wait until ``is_so()``; fail after ``secs`` with the text that ``why()`` returns."""
    end = time.monotonic() + secs
    while not is_so():
        assert time.monotonic() < end, why()
        time.sleep(0.01)
