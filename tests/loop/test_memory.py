"""A loop costs nothing on steps on which no hook has work, and keeps nothing of finished steps."""

import logging
import os
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from torchhooks import (
    FeedFnHook,
    FinalOpsHook,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
)
from torchhooks.testing import RecordingWriter

WARM = 1_000


def step(x: float) -> float:
    return x


def half() -> float:
    return 0.5


def test_without_a_period_in_seconds_or_a_report_the_clock_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    with MonitoredLoop(half, hooks=[StopAtStepHook(100), NanTensorHook("loss")]) as loop:
        loop.run()
        monkeypatch.setattr(time, "monotonic", lambda: reads.append("read"))
        for _ in range(5):
            loop.run()
        monkeypatch.undo()
    assert reads == []


# -- what is kept -----------------------------------------------------------------------------------------------------


@contextmanager
def lines_to_nowhere() -> Iterator[None]:
    """Format every line and keep none of them: pytest, too, takes hold of the logger before a test runs."""
    logger = logging.getLogger("torchhooks")
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, level, logger.propagate = before
        logger.setLevel(level)


def all_hooks(folder: Path, steps: int) -> list[SessionRunHook]:
    feeds = {"x": 0.5}
    return [
        StepCounterHook(100, output_dir=folder),
        SummarySaverHook(save_steps=100, output_dir=folder, summary_op={"loss": "loss", "x": "x"}),
        LoggingTensorHook({"loss": "loss", "twice": lambda loss: loss * 2}, every_n_iter=100, at_end=True),
        NanTensorHook("loss"),
        FeedFnHook(lambda: feeds),
        GlobalStepWaiterHook(0),
        FinalOpsHook("global_step"),
        StopAtStepHook(last_step=steps),
    ]


def growth(folder: Path, steps: int, measure: Callable[[], int]) -> int:
    """How much more there is at the last step than once everything has been used for a while."""
    with lines_to_nowhere(), MonitoredLoop(step, hooks=all_hooks(folder, steps)) as loop:
        while loop.global_step < WARM:
            loop.run()
        before = measure()
        while not loop.should_stop():
            loop.run()
        grown = measure() - before
    assert loop.global_step == steps
    return grown


def traced_bytes() -> int:
    if not tracemalloc.is_tracing():
        tracemalloc.start()  # only here: what was there before is none of what has grown
    return tracemalloc.get_traced_memory()[0]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.not_measured  # which would take three times as long
def test_many_steps_with_all_hooks_leave_no_objects_behind(tmp_path: Path) -> None:
    try:
        # Five bytes a step: no object is so small, and the caches of the interpreter may fill up meanwhile.
        assert growth(tmp_path, 10_000, traced_bytes) < 50_000
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.not_measured
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say in /proc how much it gave")
def test_fifty_thousand_steps_with_all_hooks_leave_the_process_as_big_as_it_was(tmp_path: Path) -> None:
    assert growth(tmp_path, 50_000, resident_bytes) < 2 << 20


# -- what an idle run costs -------------------------------------------------------------------------------------------


def far_away() -> list[SessionRunHook]:
    """Fifty standard hooks, each with work in its first run at most and then not for long."""
    far, writer = 10**9, RecordingWriter()
    return [
        hook
        for _ in range(10)
        for hook in (
            StepCounterHook(far),
            SummarySaverHook(save_steps=far, summary_writer=writer, summary_op={"loss": "loss"}),
            LoggingTensorHook(["loss"], every_n_iter=far),
            StopAtStepHook(last_step=far),
            FinalOpsHook("loss"),
        )
    ]


def calls_of_an_idle_run(hooks: list[SessionRunHook]) -> Counter[tuple[str, str]]:
    """Every call that one run makes, in Python and out of it."""
    calls: Counter[tuple[str, str]] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls[event, frame.f_code.co_name if event == "call" else argument.__name__] += 1

    with MonitoredLoop(half, hooks=hooks) as loop:
        loop.run()
        sys.setprofile(count)
        loop.run()
        sys.setprofile(None)
    return calls


def test_an_idle_run_makes_the_same_calls_with_fifty_hooks_as_with_none() -> None:
    hooks = far_away()
    assert len(hooks) == 50
    assert calls_of_an_idle_run(hooks) == calls_of_an_idle_run([])


def test_an_idle_run_calls_nothing_but_the_step() -> None:
    calls = calls_of_an_idle_run([])
    del calls["c_call", "setprofile"]  # the end of the count
    assert calls == {("call", "run"): 1, ("call", "half"): 1}
