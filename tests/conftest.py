"""Fixtures for all tests: a fake clock, the log, random seeds, and checks for leftovers."""

import gc
import multiprocessing
import os
import random
import threading
from collections.abc import Iterator

# One thread for torch, here and in the processes that tests start. For such small operations, threads that wait for
# each other are slower, 30 times so on a busy machine. OpenMP reads the variable when it is loaded.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch
from hypothesis import settings

import torchhooks.ranks.ranks
from torchhooks import SummaryWriterCache
from torchhooks.common.log import speak_as
from torchhooks.testing import FakeClock, log_lines

settings.register_profile("torchhooks", derandomize=True, deadline=None)
settings.load_profile("torchhooks")


@pytest.hookimpl(tryfirst=True)  # before fixtures of modules
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("fsdp2") and torch.__version__ < "2.7":  # compared as versions
        pytest.skip("FSDP2 on a CPU needs torch 2.7")


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    """A clock in place of ``time.monotonic``. It shows 1000.0 until it is advanced."""
    with FakeClock() as clock:
        yield clock


@pytest.fixture
def lines() -> Iterator[list[tuple[str, str]]]:
    """The lines logged to ``"torchhooks"``, as ``(level, text)``."""
    with log_lines() as lines:
        yield lines


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_stray_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    started = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in started:
        thread.join(timeout=1)
    stray = [thread.name for thread in started if thread.is_alive()]
    assert not stray, f"the test left threads running: {stray}"


@pytest.fixture(autouse=True)
def _no_stray_workers() -> Iterator[None]:
    """Let the workers of a DataLoader end that is in a cycle of references, as torch's are.

    Later, a test may have stopped the clock, and torch waits five seconds for each worker that does not answer.
    """
    yield
    if multiprocessing.active_children():
        gc.collect()


@pytest.fixture(autouse=True)
def _no_connected_ranks() -> Iterator[None]:
    """Let the process log as the chief again, after a test that has connected ranks without a loop."""
    yield
    torchhooks.ranks.ranks._connected.clear()  # noqa: SLF001 - no loop disconnects them
    speak_as(0)


@pytest.fixture(autouse=True)
def _no_shared_writers(_no_stray_threads: None) -> Iterator[None]:
    yield
    SummaryWriterCache.clear()
