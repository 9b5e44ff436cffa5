"""Which tests run, and in how many processes. The fixtures for all tests are in support/fixtures.py.

This file imports nothing large: under xdist, it is the first thing that the process does which starts the others.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

# One thread for torch, here and in the processes that tests start. For such small operations, threads that wait for
# each other are slower, 30 times so on a busy machine. OpenMP reads the variable when it is loaded.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from support.processes import start_server

# What a plain pytest leaves out, by marker: see pyproject.toml.
LEFT_OUT = ("release", "exhaustive", "slow", "ranks", "compile")
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
        "--rest",
        action="store_true",
        help="run what --all adds to a plain pytest, and nothing else, without the tests marked release",
    )
    parser.addoption(
        "--simulated",
        action="store_true",
        help="register a simulated accelerator, for the tests that need one; see tests/support/simulated.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.option.all |= config.option.rest or names_tests(config)
    config.stash[left_out_key] = {}
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        start_server()  # before the processes of xdist, which then find it
    else:
        config.pluginmanager.import_plugin("support.fixtures")
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
    processors = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(processors + int(config.option.rest), MOST_PROCESSES)  # many of the rest wait for other processes


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.all and not config.option.rest:
        return
    reasons = {item: next(filter(item.get_closest_marker, LEFT_OUT), None) for item in items}
    if config.option.rest:  # a property is tried with more examples than in a plain pytest
        chosen = [item for item, reason in reasons.items() if (reason or has_examples(item)) and reason != "release"]
        for item in chosen:
            if reasons[item] in (None, "exhaustive"):  # one more of what a plain pytest covers
                item.add_marker("not_measured")
    else:
        chosen = [item for item, reason in reasons.items() if not reason]
        config.stash[left_out_key] = dict(Counter(reason for reason in reasons.values() if reason))
    config.hook.pytest_deselected(items=[*reasons.keys() - set(chosen)])
    items[:] = chosen


def has_examples(item: pytest.Item) -> bool:
    """Return whether the test is a property, of which Hypothesis tries examples."""
    return isinstance(item, pytest.Function) and getattr(item.obj, "is_hypothesis_test", False)


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
