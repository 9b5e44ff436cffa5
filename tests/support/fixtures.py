"""Fixtures for all tests, and checks for leftovers. A plugin of the processes that run tests: see tests/conftest.py."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

import torchhooks.ranks.ranks
from torchhooks import SummaryWriterCache
from torchhooks.common.log import speak_as
from torchhooks.loop.advice import CREATED, missing_parts
from torchhooks.testing import FakeClock, log_lines

SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2

settings.register_profile("all", derandomize=True, deadline=None)
settings.register_profile("quick", settings.get_profile("all"), max_examples=25)  # see support.examples


tracers: tuple[Any, Any] = None, None
"""What measures coverage while a test is called, in this thread and in others."""


def trace(of_this_thread: Any = None, of_others: Any = None) -> tuple[Any, Any]:
    """Set what traces Python code, by default nothing, and return what did so before."""
    before = sys.gettrace(), threading.gettrace()
    sys.settrace(of_this_thread)
    threading.settrace(of_others)
    return before


os.register_at_fork(after_in_child=trace)  # what is measured there is lost, and takes twice as long
os.fsync = lambda fd: None  # no test simulates a power failure, and a kill loses nothing that was written


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("all" if config.option.all else "quick")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what exists by now, a million objects, out of all collections, each of which would take 0.3 s."""
    global tracers
    gc.collect()
    gc.freeze()
    if session.config.getoption("cov_source", None):
        tracers = trace()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("cov_source", None):
        trace(*tracers)


@pytest.hookimpl(tryfirst=True)  # before fixtures of modules
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("accelerator") and not torch.accelerator.is_available():
        pytest.skip("needs an accelerator: pytest --simulated has one")
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Measure coverage here, and not in what pytest does around it, which would take longer than most tests.

    A test marked not_measured goes without. The marker of pytest-cov for that has no effect in a process of xdist.
    """
    if tracers == (None, None) or item.get_closest_marker("not_measured"):
        return (yield)
    trace(*tracers)
    try:
        return (yield)
    finally:
        trace()


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    """A clock in place of ``time.monotonic``. It shows 1000.0 until it is advanced."""
    with FakeClock() as clock:
        yield clock


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """The lines logged to ``"torchhooks"``, as ``(level, text)``.

    Most tests train a function without a model: tests/loop/test_missing_parts.py has the warning of that.
    """
    advice = tuple(each for each in CREATED if each is not missing_parts)
    monkeypatch.setattr("torchhooks.loop.life.CREATED", advice)
    with log_lines() as lines:
        yield lines


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.accelerator.is_available():  # else torch.manual_seed() keeps the stack for when a device is initialized
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
def _same_signal_handlers() -> Iterator[None]:
    """Let signals do for the next test what they did before this one."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


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
