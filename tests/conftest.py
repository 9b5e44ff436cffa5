"""Which tests run and in how many processes; fixtures for all tests; checks for leftovers."""

import gc
import multiprocessing
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

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

settings.register_profile("all", derandomize=True, deadline=None)
settings.register_profile("quick", settings.get_profile("all"), max_examples=25)  # see support.examples

# -- which tests run --------------------------------------------------------------------------------------------------

# What a plain pytest leaves out, by marker: see pyproject.toml.
LEFT_OUT = ("exhaustive", "slow", "ranks", "compile")
MOST_PROCESSES = 8  # each imports torch
left_out_key = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help=f"also run the tests marked {', '.join(LEFT_OUT)}, and more examples of each property."
        " Naming a file, a test or a marker (-m) does the same.",
    )
    parser.addoption(
        "--simulated",
        action="store_true",
        help="register a simulated accelerator, for the tests that need one; see tests/support/simulated.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.option.all |= names_tests(config)
    settings.load_profile("all" if config.option.all else "quick")
    config.stash[left_out_key] = {}
    if config.option.simulated:
        from support import simulated

        simulated.register()


def names_tests(config: pytest.Config) -> bool:
    """Return whether the command line names a marker, a file or a test, not only folders."""
    paths = (config.invocation_params.dir / argument.partition("::")[0] for argument in config.args)
    return bool(config.option.markexpr) or not all(path.is_dir() for path in paths)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes of ``-n auto``, or 0 for none but this one.

    A few tests start sooner without others, and only this one can show what tests print.
    """
    if config.option.capture == "no" or names_tests(config):
        return 0
    # By default, xdist counts cores, of which a virtual machine with two processors may have one.
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, MOST_PROCESSES)


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.all:
        return
    reasons = {item: next(filter(item.get_closest_marker, LEFT_OUT), None) for item in items}
    config.stash[left_out_key] = dict(Counter(reason for reason in reasons.values() if reason))
    config.hook.pytest_deselected(items=[item for item, reason in reasons.items() if reason])
    items[:] = [item for item, reason in reasons.items() if not reason]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # of a process of xdist, for the one that prints
        session.config.workeroutput["left_out"] = session.config.stash[left_out_key]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if hasattr(node, "workeroutput"):  # not if it crashed; each process has collected all tests
        node.config.stash[left_out_key] = node.workeroutput["left_out"]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after everything else that is printed, except for the line of counts
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    yield
    counts = [f"{count:,} {reason}" for reason in LEFT_OUT if (count := config.stash[left_out_key].get(reason))]
    if counts:
        terminalreporter.write_line(f"left out: {', '.join(counts)}; run all tests with pytest --all", yellow=True)


# -- fixtures ---------------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)  # before fixtures of modules
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("accelerator") and not torch.accelerator.is_available():
        pytest.skip("needs an accelerator: pytest --simulated has one")
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


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
    monkeypatch.setattr("torchhooks.loop.monitored_loop.warn_of_missing_parts", lambda arguments: None)
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
def _no_connected_ranks() -> Iterator[None]:
    """Let the process log as the chief again, after a test that has connected ranks without a loop."""
    yield
    torchhooks.ranks.ranks._connected.clear()  # noqa: SLF001 - no loop disconnects them
    speak_as(0)


@pytest.fixture(autouse=True)
def _no_shared_writers(_no_stray_threads: None) -> Iterator[None]:
    yield
    SummaryWriterCache.clear()
