"""Log lines appear once, whether logging is configured or not, and whenever it is configured."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from support.processes import fork_program, run_program

from torchhooks import (
    CheckpointSaverHook,
    LoggingTensorHook,
    MonitoredLoop,
    latest_checkpoint,
)
from torchhooks.common.log import logger

OURS = logging.getLogger("torchhooks")
LINE = "INFO:torchhooks:{} = 0.5"


class FolderCache:
    """What is printed."""

    def __init__(self) -> None:
        self.stdout, self.stderr = io.StringIO(), io.StringIO()

    @property
    def out(self) -> list[str]:
        return self.stdout.getvalue().splitlines()

    @property
    def err(self) -> list[str]:
        return self.stderr.getvalue().splitlines()


@contextmanager
def unconfigured() -> Iterator[FolderCache]:
    """Reset logging to what a new process has. Not a fixture, because pytest adds its handlers after fixtures run."""
    children = [logging.getLogger(name) for name in ("torchhooks.hooks", "torchhooks.mine.deeper", "torch")]
    loggers = [logging.getLogger(), OURS, *children]
    before = [(each, each.level, list(each.handlers)) for each in loggers]
    for each in loggers:
        each.handlers.clear()
        each.setLevel(logging.WARNING if each is logging.root else logging.NOTSET)
    seen = FolderCache()
    try:
        with redirect_stdout(seen.stdout), redirect_stderr(seen.stderr):
            yield seen
    finally:
        for each, level, handlers in before:
            each.handlers[:] = handlers
            each.setLevel(level)


def loop(tag: str) -> None:
    with MonitoredLoop(lambda: 0.5, hooks=[LoggingTensorHook({tag: "loss"}, every_n_iter=1)]) as loop:
        loop.run()


def to_stdout(level: str) -> None:
    """Configure logging as an application does."""
    logging.basicConfig(level=level, stream=sys.stdout, format="%(message)s")


def test_without_configured_logging_each_line_appears_once_on_stderr() -> None:
    with unconfigured() as seen:
        loop("a")
        loop("b")
    assert (seen.out, seen.err) == ([], [LINE.format("a"), LINE.format("b")])


def test_with_configured_logging_each_line_appears_once_where_it_says() -> None:
    with unconfigured() as seen:
        to_stdout("INFO")
        loop("a")
        loop("b")
    assert (seen.out, seen.err) == (["a = 0.5", "b = 0.5"], [])


def test_logging_configured_between_two_loops_applies_to_the_second() -> None:
    with unconfigured() as seen:
        loop("a")
        to_stdout("INFO")
        loop("b")
    assert (seen.out, seen.err) == (["b = 0.5"], [LINE.format("a")])


def test_a_higher_configured_level_hides_the_lines() -> None:
    with unconfigured() as seen:
        to_stdout("WARNING")
        loop("a")
    assert (seen.out, seen.err) == ([], [])


def test_a_handler_on_the_logger_counts_as_configured() -> None:
    with unconfigured() as seen:
        OURS.addHandler(logging.NullHandler())
        loop("a")
    assert (seen.out, seen.err) == ([], [])


def test_a_handler_on_the_logger_gets_each_line_once() -> None:
    with unconfigured() as seen:
        OURS.addHandler(logging.StreamHandler(sys.stdout))
        OURS.setLevel("INFO")
        loop("a")
    assert (seen.out, seen.err) == (["a = 0.5"], [])


def test_a_handler_on_the_logger_of_another_library_does_not_count() -> None:
    with unconfigured() as seen:
        logging.getLogger("torch").addHandler(logging.NullHandler())
        loop("a")
    assert (seen.out, seen.err) == ([], [LINE.format("a")])


def test_a_level_set_on_the_logger_is_kept() -> None:
    with unconfigured() as seen:
        OURS.setLevel("WARNING")
        loop("a")
    assert (seen.out, seen.err) == ([], [])


def test_without_configured_logging_a_level_set_on_the_logger_hides_or_shows_lines() -> None:
    with unconfigured() as seen:
        logger.debug("hidden")
        OURS.setLevel("DEBUG")
        logger.debug("shown")
        OURS.setLevel("WARNING")
        logger.info("hidden")
    assert (seen.out, seen.err) == ([], ["DEBUG:torchhooks:shown"])


def test_a_level_that_is_disabled_is_hidden() -> None:
    with unconfigured() as seen:
        logging.disable(logging.INFO)
        try:
            loop("a")
        finally:
            logging.disable(logging.NOTSET)
    assert (seen.out, seen.err) == ([], [])


def test_the_logger_of_the_application_is_left_alone() -> None:
    with unconfigured():
        loop("a")
        assert (OURS.level, OURS.handlers, OURS.filters) == (logging.NOTSET, [], [])


def test_a_replaced_stderr_gets_the_lines() -> None:
    with unconfigured() as seen:
        loop("a")
        with redirect_stderr(sys.stdout):
            loop("b")
    assert (seen.out, seen.err) == ([LINE.format("b")], [LINE.format("a")])


PROGRAM = """
import logging, sys
from torchhooks import LoggingTensorHook, MonitoredLoop
{}
with MonitoredLoop(lambda: 0.5, hooks=[LoggingTensorHook(["loss"], every_n_iter=1)]) as loop:
    loop.run()
"""


@pytest.mark.parametrize(
    ("configured", "out", "err"),
    [
        ("", "", "INFO:torchhooks:loss = 0.5\n"),
        ("logging.basicConfig(level='INFO', stream=sys.stdout)", "INFO:torchhooks:loss = 0.5\n", ""),
    ],
)
def test_lines_appear_once_in_a_new_process(configured: str, out: str, err: str) -> None:
    code = PROGRAM.format(configured)
    ran = fork_program(code)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, out, err)


def test_a_line_names_the_place_that_logged_it() -> None:
    with unconfigured() as seen:
        logging.basicConfig(level="INFO", stream=sys.stdout, format="%(module)s.%(funcName)s: %(message)s")
        loop("a")
    assert seen.out == ["reporting._log: a = 0.5"]


@pytest.mark.slow
def test_importing_the_library_leaves_logging_alone() -> None:
    code = """
import logging
import torchhooks
logger = logging.getLogger("torchhooks")
print(logger.handlers, logger.filters, logger.level, "callHandlers" in vars(logger))
"""
    ran = run_program(code)
    assert (ran.returncode, ran.stdout) == (0, "[] [] 0 False\n")


# -- lines from before the first loop ---------------------------------------------------------------------------------


def test_a_warning_about_the_arguments_of_the_first_loop_has_the_prefix(tmp_path: Path) -> None:
    with unconfigured() as seen:
        MonitoredLoop(lambda: 1.0, hooks=[CheckpointSaverHook(tmp_path, save_steps=10)]).close()
    (line,) = [line for line in seen.err if "will contain no" in line]
    assert line.startswith("WARNING:torchhooks:checkpoints will contain no model")


def damage_a_checkpoint(folder: Path) -> str:
    path = folder / "model.ckpt-1"
    path.write_bytes(b"damaged")
    return str(path)


def test_a_warning_of_a_process_without_a_loop_has_the_prefix(tmp_path: Path) -> None:
    path = damage_a_checkpoint(tmp_path)
    with unconfigured() as seen:
        latest_checkpoint(tmp_path)
    (line,) = seen.err
    assert line.startswith(f"WARNING:torchhooks:{path}")


def test_a_warning_of_a_process_without_a_loop_goes_where_logging_is_configured(tmp_path: Path) -> None:
    damage_a_checkpoint(tmp_path)
    with unconfigured() as seen:
        to_stdout("WARNING")
        latest_checkpoint(tmp_path)
    assert (len(seen.out), seen.err) == (1, [])


# -- logging that is configured while a loop runs ---------------------------------------------------------------------


@contextmanager
def running(tag: str = "a") -> Iterator[MonitoredLoop[Any]]:
    with MonitoredLoop(lambda: 0.5, hooks=[LoggingTensorHook({tag: "loss"}, every_n_iter=1)]) as loop:
        yield loop


def lines_of(out: list[str]) -> list[str]:
    return [line.partition(" (")[0] for line in out]


def test_logging_configured_after_the_loop_was_created_gets_each_line_once() -> None:
    with unconfigured() as seen, running() as loop:
        loop.run()
        to_stdout("INFO")
        loop.run()
        loop.run()
    assert (lines_of(seen.out), seen.err) == (["a = 0.5"] * 2, [LINE.format("a")])


def test_a_level_configured_after_the_loop_was_created_hides_the_lines() -> None:
    with unconfigured() as seen, running() as loop:
        to_stdout("WARNING")
        loop.run()
        assert OURS.level == logging.NOTSET
    assert (seen.out, seen.err) == ([], [])


def test_a_handler_added_to_the_logger_after_the_loop_was_created_gets_each_line_once() -> None:
    with unconfigured() as seen, running() as loop:
        OURS.addHandler(logging.StreamHandler(sys.stdout))
        OURS.setLevel("DEBUG")
        loop.run()
        loop.run()
    assert (lines_of(seen.out), seen.err) == (["a = 0.5"] * 2, [])


def test_a_filter_of_the_application_sees_each_line_once_logging_is_configured() -> None:
    def hide(record: logging.LogRecord) -> bool:
        return False

    with unconfigured() as seen, running() as loop:
        to_stdout("INFO")
        OURS.addFilter(hide)
        try:
            loop.run()
        finally:
            OURS.removeFilter(hide)
    assert (seen.out, seen.err) == ([], [])


# -- a stderr that cannot be written to -------------------------------------------------------------------------------


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


class BrokenPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def detached() -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BytesIO())
    stream.detach()
    return stream


class NotAStream:
    """What some applications put in place of stderr."""


STREAMS = {
    "closed": closed,
    "None": lambda: None,
    "a broken pipe": BrokenPipe,
    "detached": detached,
    "no stream": NotAStream,
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("while_running", [False, True], ids=["before the loop", "in a run"])
def test_a_stderr_that_cannot_be_written_to_ends_no_training_run(
    stream: Callable[[], Any], while_running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unconfigured():
        if not while_running:
            monkeypatch.setattr(sys, "stderr", stream())
        with running() as loop:
            loop.run()
            monkeypatch.setattr(sys, "stderr", stream())
            loop.run()
            assert loop.global_step == 2
        monkeypatch.undo()


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_a_stderr_that_the_application_logs_to_and_closes_ends_no_training_run(
    stream: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with unconfigured():
        monkeypatch.setattr(sys, "stderr", stream())
        logging.basicConfig(level="INFO")  # to stderr
        with running() as loop:
            loop.run()
            assert loop.global_step == 1
        monkeypatch.undo()


def test_an_error_that_a_handler_raises_on_purpose_is_not_hidden() -> None:
    class Strict(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError(f"unexpected line: {record.getMessage()}")

    with unconfigured():
        OURS.addHandler(Strict())
        OURS.setLevel("INFO")
        with pytest.raises(ValueError, match=r"unexpected line: a = 0\.5"), running() as loop:
            loop.run()


@pytest.mark.parametrize("configured", ["", "logging.basicConfig(level='INFO')"])
def test_a_process_whose_stderr_is_closed_trains_to_the_end(configured: str) -> None:
    code = PROGRAM.format(f"{configured}\nsys.stderr.close()") + "print(loop.global_step)"
    ran = fork_program(code)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "1\n", "")
