"""A loop that stands still, watched by calls in place of a thread that looks once a second."""

from __future__ import annotations

import builtins
import faulthandler
import gc
import inspect
import json
import math
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.rank_threads import Hub, ThreadRanks, in_threads
from support.schemas import answer
from support.waiting import wait_until

from torchhooks import (
    AtSteps,
    CheckpointSaverHook,
    EvaluationHook,
    LoggingTensorHook,
    MonitoredLoop,
    PeerError,
    SessionRunHook,
)
from torchhooks.__main__ import main
from torchhooks.common.processes import process_state, start_time, system_id
from torchhooks.lifecycle.session import Session
from torchhooks.loop.advice import CREATED, missing_parts
from torchhooks.progress.loop_state import LoopState
from torchhooks.testing import log_lines
from torchhooks.tools import run_record
from torchhooks.tools.mirror.status import read_status
from torchhooks.tools.run_record import Record, read_record
from torchhooks.tools.watch import commands, places, stalls
from torchhooks.tools.watch.global_lock import GlobalLockWatch
from torchhooks.tools.watch.places import (
    AT_MEETING,
    IN_COLLECTIVE,
    NOT_WAITING,
    _child,
    children,
    is_paused,
    kill_workers,
    locate,
)
from torchhooks.tools.watch.report import RankState, first_line, report, short_line
from torchhooks.tools.watch.stalls import Watch

SECS = 100.0  # each look counts as so many


class Gate:
    """Where the training thread stands still, until the test lets it go on."""

    def __init__(self) -> None:
        self._here, self._open = threading.Event(), threading.Event()

    def stand_still(self) -> None:
        self._here.set()
        assert self._open.wait(60)

    def wait(self) -> None:
        assert self._here.wait(60)

    def open(self) -> None:
        self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()


class Job:
    """A loop in a thread of its own, and its watch, which looks only when it is told to."""

    def __init__(self, folder: Path, main: Callable[[Gate, dict[str, Any]], object], **arguments: Any) -> None:
        self.folder, self.gate = folder, Gate()
        self._watches: list[Watch] = []
        self._arguments = {"checkpoint_dir": str(folder), **arguments}
        self._main = main
        self._thread = threading.Thread(target=lambda: main(self.gate, self._arguments))

    def __enter__(self) -> Job:
        self._thread.start()
        self.gate.wait()
        (self.watch,) = watches
        return self

    def __exit__(self, *error: object) -> None:
        self.gate.open()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def look(self, times: int) -> None:
        for _ in range(times):
            self.watch.look()

    def report(self) -> str:
        file = self.folder / "stall-3/report.md"
        wait_until(file.exists)
        return file.read_text()


watches: list[Watch] = []


@pytest.fixture(autouse=True)
def _watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Note each watch, and keep its thread from looking."""

    def make(*arguments: Any) -> Watch:
        watches.append(Watch(*arguments))
        return watches[-1]

    monkeypatch.setattr("torchhooks.tools.watch.stalls.Watch", make)
    monkeypatch.setattr(stalls, "LOOK_SECS", SECS)
    advice = tuple(each for each in CREATED if each is not missing_parts)
    monkeypatch.setattr("torchhooks.loop.life.CREATED", advice)
    yield
    watches.clear()


# -- where a loop stands still: in its third run, or after two --------------------------------------------------------


def in_the_step(gate: Gate, arguments: dict[str, Any]) -> None:
    def step(number: int) -> None:
        if number == 2:
            gate.stand_still()

    with MonitoredLoop(step, **arguments) as loop:
        for number in loop.until_stop(range(4)):
            loop.run(number)


def in_the_body(gate: Gate, arguments: dict[str, Any]) -> None:
    with MonitoredLoop(**arguments) as loop:
        for number in loop.until_stop(range(4)):
            with loop.step():
                if number == 2:
                    gate.stand_still()


def waiting_for_data(gate: Gate, arguments: dict[str, Any]) -> None:
    def items() -> Iterator[int]:
        yield from range(2)
        gate.stand_still()
        yield 2

    with MonitoredLoop(bool, **arguments) as loop:
        for _ in loop.until_stop(range(1)):
            for number in loop.until_stop(items()):
                loop.run(number)


def in_the_script(gate: Gate, arguments: dict[str, Any]) -> None:
    with MonitoredLoop(bool, **arguments) as loop:
        for number in loop.until_stop(range(4)):
            if number == 2:
                gate.stand_still()
            loop.run(number)


class Stands(SessionRunHook):
    """Stands still in one method, once two runs are over."""

    def __init__(self, gate: Gate, method: str) -> None:
        self._gate, self._method, self._runs = gate, method, 0

    def before_run(self, run_context: Any) -> None:
        if self._runs == 2 and self._method == "before_run" and not self._gate.is_open:
            self._gate.stand_still()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if self._runs == 2 and self._method == "after_run" and not self._gate.is_open:
            self._gate.stand_still()
        self._runs += 1

    def end(self, session: Any) -> None:
        if self._method == "end":
            self._gate.stand_still()

    def teardown(self) -> None:
        if self._method == "teardown":
            self._gate.stand_still()


def in_a_hook(method: str) -> Callable[[Gate, dict[str, Any]], None]:
    def run(gate: Gate, arguments: dict[str, Any]) -> None:
        with MonitoredLoop(bool, hooks=[Stands(gate, method)], **arguments) as loop:
            for number in loop.until_stop(range(3 if method in ("end", "teardown") else 4)):
                loop.run(number)

    return run


def in_an_evaluation(gate: Gate, arguments: dict[str, Any]) -> None:
    def evaluate() -> dict[str, float]:
        if len(made) == 3:
            gate.stand_still()
        return {"accuracy": 0.5}

    made: list[int] = []
    hooks = [EvaluationHook(evaluate, timer=AtSteps([3]))]
    with MonitoredLoop(made.append, hooks=hooks, **arguments) as loop:
        for number in loop.until_stop(range(3)):
            loop.run(number)


def in_a_save(gate: Gate, arguments: dict[str, Any]) -> None:
    class Slow:
        def state_dict(self) -> dict[str, int]:
            if len(made) == 2:
                gate.stand_still()
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            """Nothing is restored."""

    made: list[int] = []
    hooks = [CheckpointSaverHook(arguments["checkpoint_dir"], every_n_steps=2)]
    with MonitoredLoop(made.append, hooks=hooks, state={"slow": Slow()}, **arguments) as loop:
        for number in loop.until_stop(range(3)):
            loop.run(number)


def in_a_fetch(gate: Gate, arguments: dict[str, Any]) -> None:
    made: list[int] = []

    def fetch() -> float:
        if len(made) == 3:
            gate.stand_still()
        return 0.5

    hooks = [LoggingTensorHook({"value": fetch}, every_n_iter=1)]
    with MonitoredLoop(made.append, hooks=hooks, **arguments) as loop:
        for number in loop.until_stop(range(3)):
            loop.run(number)


@pytest.mark.parametrize(
    ("main", "phase", "looks"),
    [
        (in_the_step, "in the step, Event.wait, test_stalls.py:", 5),
        (in_the_body, "in the step, Event.wait, test_stalls.py:", 5),
        (waiting_for_data, "waits for data at depth 2, Event.wait, test_stalls.py:", 5),
        (in_the_script, "in code of the script, Event.wait, test_stalls.py:", 17),
        (in_a_hook("before_run"), "in before_run of Stands, Event.wait, test_stalls.py:", 17),
        (in_a_hook("after_run"), "in after_run of Stands, Event.wait, test_stalls.py:", 17),
        (in_a_hook("end"), "in end of Stands, Event.wait, test_stalls.py:", 17),
        (in_a_hook("teardown"), "in teardown of Stands, Event.wait, test_stalls.py:", 17),
        (in_a_fetch, "in a fetch, Event.wait, test_stalls.py:", 17),
        (in_an_evaluation, "in an evaluation, Event.wait, test_stalls.py:", 17),
        (in_a_save, "in a save, Event.wait, test_stalls.py:", 17),
    ],
)
def test_the_report_names_the_place(
    main: Callable[[Gate, dict[str, Any]], None], phase: str, looks: int, tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    with Job(tmp_path, main) as job:
        job.look(looks - 1)
        assert not list(tmp_path.glob("stall-*"))
        job.look(3)  # one report for one stall
        when = "after" if "end" in phase or "teardown" in phase else "in"
        line = f"no run was completed for {(looks - 2) * 100} s. It is {when} run 3: {phase}"
        assert job.report().startswith(line)
        assert "(stand_still)" in job.report().splitlines()[0]
        assert "gate.stand_still()" in (tmp_path / "stall-3/rank-0.txt").read_text()
        assert [text[: len(line)] for level, text in lines if level == "CRITICAL"] == [line]
    assert not list(tmp_path.glob(".stall*"))


def test_a_loop_that_goes_on_says_so(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    with Job(tmp_path, in_the_step) as job:
        job.look(5)
        assert job.watch.watched.stalled == "in run 3 (in the step)"
        job.gate.open()
        wait_until(lambda: job.watch._training.loop_state.runs == 4)  # noqa: SLF001
        job.look(1)
        assert job.watch.watched.stalled is None
        assert ("WARNING", "the loop goes on, after it stood still for 300 s") in lines


# -- no alarm ---------------------------------------------------------------------------------------------------------


def is_quiet(job: Job, looks: int, lines: list[tuple[str, str]]) -> bool:
    job.look(looks)
    return not [text for level, text in lines if level == "CRITICAL"]


def test_a_first_run_may_take_five_times_as_long(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    def run(gate: Gate, arguments: dict[str, Any]) -> None:
        with MonitoredLoop(gate.stand_still, **arguments) as loop:
            loop.run()

    with Job(tmp_path, run) as job:
        assert is_quiet(job, 16, lines)
        job.look(1)
        wait_until(lambda: not is_quiet(job, 0, lines))


def test_a_long_evaluation_is_none_and_makes_the_next_one_free_to_take_as_long(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    with Job(tmp_path, in_an_evaluation) as job:
        assert is_quiet(job, 14, lines)
        assert job.watch._limit(True) == 1500  # noqa: SLF001
        job.gate.open()
        wait_until(lambda: job.watch._training.loop_state.runs == 3 and not job._thread.is_alive())  # noqa: SLF001
        job.look(1)
        assert job.watch._limit(True) == 6000  # noqa: SLF001


def test_a_step_that_is_slow_but_alive_is_none(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    looked = []

    def run(gate: Gate, arguments: dict[str, Any]) -> None:
        def step(number: int) -> None:
            (watch,) = watches
            for _ in range(3):
                watch.look()
            looked.append(watch._limit(False))  # noqa: SLF001

        with MonitoredLoop(step, **arguments) as loop:
            for number in loop.until_stop(range(6)):
                loop.run(number)
            gate.stand_still()

    with Job(tmp_path, run):
        assert looked == [300, 300, 3000, 3000, 3000, 3000]
        assert not [text for level, text in lines if level == "CRITICAL"]


def test_a_breakpoint_is_none(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    def run(gate: Gate, arguments: dict[str, Any]) -> None:
        at_breakpoint = eval("lambda: gate.stand_still()", {"__name__": "bdb", "gate": gate})

        def step(number: int) -> None:
            if number == 2:
                at_breakpoint()

        with MonitoredLoop(step, **arguments) as loop:
            for number in loop.until_stop(range(4)):
                loop.run(number)

    with Job(tmp_path, run) as job:
        assert is_quiet(job, 30, lines)


def test_a_pause_at_an_interactive_prompt_is_none(
    tmp_path: Path, lines: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with Job(tmp_path, in_the_script) as job:
        assert is_quiet(job, 30, lines)


class StandardInput:
    """A standard input that calls a function when ``input()`` asks it for a line."""

    encoding, errors = "utf-8", "strict"

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def fileno(self) -> int:
        raise OSError("it has no number")

    def readline(self, *_: object) -> str:
        self._call()
        return "x\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("input('? ')", True),
        ("text = [input()]", True),
        ("ask('? ')", True),
        ("builtins.input(*[])", True),
        ("console(note)", True),
        ("other(note)", False),
        ("note()", False),
    ],
)
def test_a_prompt_is_none(line: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []

    def note() -> None:
        frame: Any = sys._getframe()  # noqa: SLF001
        while frame.f_code.co_filename == __file__:  # up to the frame that would call C code
            frame = frame.f_back
        said.append(is_paused(frame))

    monkeypatch.setattr(sys, "stdin", StandardInput(note))
    names = {
        "ask": input,
        "builtins": builtins,
        "console": collective("code", "raw_input", threading.__file__),
        "other": collective("threading", "run", threading.__file__),
        "note": note,
    }
    script = f"def step():\n    {line}\nfor _ in range(20):\n    step()"  # so often that Python specializes the call
    exec(compile(script, "script.py", "exec"), {"__name__": "__main__", **names})
    assert said == [expected] * 20


def test_a_script_that_runs_in_a_debugger_is_not_paused(tmp_path: Path) -> None:
    def run(gate: Gate, arguments: dict[str, Any]) -> None:
        debugger = eval("lambda call: call()", {"__name__": "bdb"})
        debugger(partial(in_the_step, gate, arguments))

    with Job(tmp_path, run) as job:
        job.look(5)
        job.report()


def test_the_time_of_a_pause_does_not_count_afterwards(
    tmp_path: Path, lines: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Job(tmp_path, in_the_step) as job:
        monkeypatch.setattr(job.watch, "_is_paused", lambda place: True)
        assert is_quiet(job, 30, lines)
        monkeypatch.setattr(job.watch, "_is_paused", lambda place: False)
        assert is_quiet(job, 2, lines)
        assert RankState.from_text(job.watch._state_text()).is_excused  # noqa: SLF001
        job.look(1)
        job.report()


def test_a_limit_without_end_is_none(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    with Job(tmp_path, in_the_step, stall_secs=math.inf) as job:
        assert is_quiet(job, 100, lines)
        assert not list(tmp_path.iterdir())


def test_an_outer_loop_does_not_stand_still_while_an_inner_one_trains(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    with Job(tmp_path, in_the_step) as job, MonitoredLoop(bool) as other:
        for _ in range(10):
            assert is_quiet(job, 1, lines)
            other.run()


def test_a_thread_that_is_gone_is_none(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    kept = []

    def run(gate: Gate, arguments: dict[str, Any]) -> None:
        kept.append(MonitoredLoop(bool, **arguments))
        gate.stand_still()

    with Job(tmp_path, run) as job:
        pass
    assert is_quiet(job, 100, lines)
    kept.pop().close()


# -- what else --------------------------------------------------------------------------------------------------------


def test_an_abort_ends_the_process_after_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[list[str]] = []
    monkeypatch.setattr(stalls, "end_process", lambda reason: ended.append(os.listdir(tmp_path / "stall-3")))
    with Job(tmp_path, in_the_step, stall_secs=100, stall_action="abort") as job:
        job.look(3)
        wait_until(lambda: bool(ended))
    assert sorted(ended[0]) == ["rank-0.txt", "report.md"]


def test_arguments_that_are_not_valid() -> None:
    with pytest.raises(ValueError, match='stall_action=\'ends\': must be "report" or "abort"'):
        MonitoredLoop(bool, stall_action="ends")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"stall_secs=-1: .* 0 or more"):
        MonitoredLoop(bool, stall_secs=-1)


def test_what_torch_has_recorded_is_next_to_the_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "flight_record", lambda: b'{"entries": []}')
    with Job(tmp_path, in_the_step) as job:
        job.look(5)
        job.report()
    assert (tmp_path / "stall-3/rank-0.flight.json").read_bytes() == b'{"entries": []}'


def test_a_hook_that_stands_still_where_the_loop_is_created(tmp_path: Path) -> None:
    def run(gate: Gate, arguments: dict[str, Any]) -> None:
        class Begins(SessionRunHook):
            def begin(self) -> None:
                gate.stand_still()

        MonitoredLoop(bool, hooks=[Begins()], **arguments).close()

    with Job(tmp_path, run) as job:
        job.look(17)
        assert job.watch.watched.stalled == "before its first run (in begin of Begins)"


def test_without_a_folder_the_stacks_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[tuple[str, str]]
) -> None:
    file = (tmp_path / "stderr").open("w+")
    monkeypatch.setattr(sys, "__stderr__", file)
    with file, Job(tmp_path, in_the_step, checkpoint_dir=None) as job:
        job.look(5)
        wait_until(lambda: "stand_still" in (tmp_path / "stderr").read_text())
    assert "CRITICAL" in dict(lines)


def test_a_folder_that_cannot_be_written(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    (tmp_path / "stall-3").touch()
    with Job(tmp_path, in_the_step) as job:
        job.look(5)
        wait_until(lambda: any("cannot be written" in text for level, text in lines if level == "WARNING"))


def test_a_call_that_kept_the_lock_is_reported_once(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    with Job(tmp_path, in_the_step) as job:
        job.look(2)
        stacks = tmp_path / ".stall-rank-0.txt"
        stacks.write_text("stacks")  # as faulthandler does
        os.utime(stacks, (time.time() - 10,) * 2)
        own = Record(os.getpid(), socket.gethostname(), 1, 0.0, 0, 0.0, 7, 0.0)
        (tmp_path / ".run.json").write_text(json.dumps(own._asdict()))
        status = read_status(str(tmp_path))
        assert not status.is_alive
        text = f"stalled: a call keeps Python's global lock in process {os.getpid()}, {stacks} has its stacks"
        assert status.state == ("stalled", text)
        job.look(2)
        assert (tmp_path / "stall-3/rank-0.lock.txt").read_text() == "stacks"
        said = [text for level, text in lines if level == "CRITICAL"]
        assert [text.partition(":")[0] for text in said] == [
            "a call kept Python's global lock for more than 300 s, so no other thread could run"
        ]
    assert not list(tmp_path.glob(".stall*"))


def test_a_folder_that_is_only_read_is_no_reason_to_look_away(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    (tmp_path / ".stall-rank-0.txt").mkdir()  # so that the file cannot be opened
    with Job(tmp_path, in_the_step) as job:
        job.look(5)
        job.report()


def test_a_look_after_the_end_leaves_no_file(tmp_path: Path) -> None:
    with Job(tmp_path, in_the_step) as job:
        job.look(1)
    job.look(1)
    assert not list(tmp_path.iterdir())


def test_a_report_is_complete_before_the_loop_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = stalls._write_file  # noqa: SLF001

    def write_slowly(path: str, data: bytes) -> None:
        time.sleep(0.2)
        write(path, data)

    monkeypatch.setattr(stalls, "_write_file", write_slowly)
    with Job(tmp_path, in_a_hook("teardown")) as job:
        job.look(17)
    assert {each.name for each in (tmp_path / "stall-3").iterdir()} == {"rank-0.txt", "report.md"}


def test_a_call_that_kept_the_lock_until_the_end_is_reported_at_the_close(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    with Job(tmp_path, in_the_step) as job:
        job.look(2)
        stacks = tmp_path / ".stall-rank-0.txt"
        stacks.write_text("stacks")
        os.utime(stacks, (time.time() - 10,) * 2)
    assert (tmp_path / "stall-4/rank-0.lock.txt").read_text() == "stacks"
    assert "(run" not in (tmp_path / "stall-4/report.md").read_text()
    assert len([text for level, text in lines if level == "CRITICAL"]) == 1


def test_what_was_written_after_a_pause_of_the_process_is_no_stall(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    with Job(tmp_path, in_the_step) as job:
        job.look(2)
        (tmp_path / ".stall-rank-0.txt").write_text("stacks")
        assert read_status(str(tmp_path)).state.word == "unknown"
        job.look(1)
        assert (tmp_path / ".stall-rank-0.txt").read_text() == ""
    assert not list(tmp_path.glob("*stall*"))
    assert not [text for level, text in lines if level == "CRITICAL"]


def test_a_file_for_the_stacks_that_another_process_has_removed_is_made_again(tmp_path: Path) -> None:
    with Job(tmp_path, in_the_step) as job:
        (tmp_path / ".stall-rank-0.txt").unlink()
        job.look(1)
        assert (tmp_path / ".stall-rank-0.txt").exists()


def test_without_another_process_faulthandler_ends_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[dict[str, Any]] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda secs, **given: armed.append(given))
    for pid in (os.getpid(), 1):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        watch = GlobalLockWatch(str(tmp_path), 0, aborts=True, look_secs=1.0)
        watch.arm(100.0)
        assert (watch._guard is None) == (pid == 1)  # noqa: SLF001
        watch.close()
    assert [given["exit"] for given in armed] == [False, True]


def test_a_guard_that_cannot_be_started_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[dict[str, Any]] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda secs, **given: armed.append(given))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    watch = GlobalLockWatch(str(tmp_path), 0, aborts=True, look_secs=1.0)
    watch.arm(100.0)
    watch.close()
    assert [given["exit"] for given in armed] == [True]


def test_a_timer_that_cannot_be_set_keeps_no_loop_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unable to start watchdog thread")

    monkeypatch.setattr(faulthandler, "dump_traceback_later", refuse)
    with MonitoredLoop(bool, checkpoint_dir=tmp_path) as loop:
        loop.run()


def test_a_guard_ends_with_a_loop_that_was_dropped(tmp_path: Path) -> None:
    watch = GlobalLockWatch(str(tmp_path), 0, aborts=True, look_secs=1.0)
    watch.arm(100.0)
    process = watch._guard  # noqa: SLF001
    assert process is not None
    assert process.poll() is None
    del watch
    assert process.poll() is not None
    assert not list(tmp_path.iterdir())


def test_a_watch_that_fails_ends_and_the_loop_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(watch: Watch) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(stalls, "LOOK_SECS", 0.001)
    monkeypatch.setattr(Watch, "look", fail)
    with log_lines() as lines, MonitoredLoop(bool) as loop:
        wait_until(lambda: ("WARNING", "the loop is no longer watched for stalls") in lines)
        loop.run()


def test_the_thread_of_a_loop_that_was_dropped_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "LOOK_SECS", 0.001)
    before = threading.enumerate()
    loop = MonitoredLoop(bool)
    watches.clear()
    threads = [each for each in threading.enumerate() if each not in before]
    del loop
    gc.collect()  # a loop is part of a reference cycle
    wait_until(lambda: not any(thread.is_alive() for thread in threads))


def test_a_state_that_cannot_be_found_out_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[tuple[str, str]]
) -> None:
    def fail() -> None:
        raise RuntimeError("changed")

    with Job(tmp_path, in_the_step) as job:
        monkeypatch.setattr(job.watch, "_rank_state", fail)
        job.look(5)
        wait_until(lambda: any(level == "CRITICAL" for level, _ in lines))
        (line,) = [text for level, text in lines if level == "CRITICAL"]
        assert line.endswith("It is in run 3: unknown (RuntimeError: changed).")


def test_the_status_says_at_once_that_a_loop_stands_still_and_that_it_goes_on(tmp_path: Path) -> None:
    with Job(tmp_path, in_a_save) as job:
        job.look(17)
        wait_until(lambda: read_status(str(tmp_path)).state.word == "stalled")  # and not ten seconds later
        assert read_status(str(tmp_path)).secs_left is None
        job.gate.open()
        wait_until(lambda: job.watch._training.loop_state.runs == 3)  # noqa: SLF001
        job.look(1)
        wait_until(lambda: read_status(str(tmp_path)).state.word in ("running", "closing", "ended"))


def test_a_thread_without_a_frame_may_be_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(tmp_path, in_the_step) as job:
        monkeypatch.setattr(job.watch, "_frame", lambda: None)
        state = RankState.from_text(job.watch._state_text())  # noqa: SLF001
        assert (state.phase, state.run_text) == ("outside of Python's code, as at its prompt", "after run 2")
    state = RankState.from_text(job.watch._state_text())  # noqa: SLF001
    assert state.phase == "its thread has ended"


def test_the_stacks_that_a_killed_process_has_left_are_kept(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    (tmp_path / ".stall-rank-0.txt").write_text("stacks")
    with Job(tmp_path, in_the_step):
        pass
    kept = tmp_path / ".stall-rank-0.killed.txt"
    assert kept.read_text() == "stacks"
    said = f"a call kept Python's global lock in the last process here: {kept} has its stacks"
    assert ("WARNING", said) in lines


def test_the_status_of_a_loop_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_record, "PERIOD_SECS", 0.02)
    with Job(tmp_path, in_a_save) as job:
        job.look(17)

        def is_written() -> bool:
            record = read_record(str(tmp_path))
            return record is not None and record.stalled is not None

        wait_until(is_written)
        capsys.readouterr()
        assert main(["status", str(tmp_path)]) == 1
        printed = capsys.readouterr().out
        assert re.search(r"state +stalled for \d+ s in run 3 \(in a save\), process \d+ on ", printed)
        assert re.search(r"report +no run .* 1500 s\. .* run 3: in a save, ", printed)
        assert main(["status", "--json", str(tmp_path)]) == 1
        said = answer("status", capsys.readouterr().out)
        assert (said["state"], said["record"]["stalled"]) == ("stalled", "in run 3 (in a save)")


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_stacks_asks_a_live_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(run_record, "PERIOD_SECS", 0.02)
    with Job(tmp_path, in_a_save):
        wait_until(lambda: read_record(str(tmp_path)) is not None)
        capsys.readouterr()
        assert main(["stacks", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        (folder,) = tmp_path.glob("stacks-*")
        assert printed.startswith("It is in run 3: in a save, Event.wait, test_stalls.py:")
        assert printed.endswith(f"{folder} has the stacks\n")
        assert "gate.stand_still()" in (folder / "rank-0.txt").read_text()
        assert main(["stacks", str(tmp_path), "--json"]) == 0
        said = answer("stacks", capsys.readouterr().out)
        assert said["files"] == [f"{said['folder']}/rank-0.txt"]
        assert said["report"].startswith("It is in run 3: in a save, ")
        assert Path(said["folder"]) != folder
    assert not (tmp_path / ".stacks").exists()
    assert not [text for level, text in lines if level == "CRITICAL"]


def test_the_command_stacks_without_a_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stacks", str(tmp_path)]) == 1
    assert "names no loop that trains here" in capsys.readouterr().err
    assert main(["stacks", str(tmp_path), "--json"]) == 1
    assert "names no loop that trains here" in answer("stacks", capsys.readouterr().out)["error"]


def test_the_command_stacks_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Record(1, "another", 1, 1.0, 0, 1.0, 7, 1.0)
    (tmp_path / ".run.json").write_text(json.dumps(record._asdict()))
    monkeypatch.setattr(commands, "_WAIT_SECS", 0.2)
    assert main(["stacks", str(tmp_path)]) == 1
    assert "process 1 on another has not answered for 0.2 s" in capsys.readouterr().err
    assert not (tmp_path / ".stacks").exists()


@pytest.mark.parametrize("how", ["gone", "stopped", "keeps the lock"])
def test_the_command_stacks_does_not_wait_for_a_process_that_cannot_answer(
    how: str, worker: BaseProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = worker.pid
    assert pid is not None
    now = time.time()
    record = Record(
        pid, socket.gethostname(), 1, now, 0, now, 7, now, process_start=start_time(pid), system=system_id()
    )
    (tmp_path / ".run.json").write_text(json.dumps(record._asdict()))
    if how == "keeps the lock":
        (tmp_path / ".stall-rank-0.txt").write_text("stacks")
        os.utime(tmp_path / ".stall-rank-0.txt", (now - 10,) * 2)
    else:
        os.kill(pid, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        wait_until(lambda: process_state(pid) == ("T" if how == "stopped" else "Z"))
    assert main(["stacks", str(tmp_path)]) == 1
    said = {
        "gone": "is gone, so there are no stacks",
        "stopped": "is stopped by a signal: it answers after kill -CONT",
        "keeps the lock": f"keeps Python's global lock: {tmp_path}/.stall-rank-0.txt has its stacks",
    }
    assert said[how] in capsys.readouterr().err
    assert not (tmp_path / ".stacks").exists()


def test_a_request_for_a_folder_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "PERIOD_SECS", 0.02)
    with Job(tmp_path, in_a_save):
        (tmp_path / ".stacks").write_text("../stacks-12345678")
        wait_until(lambda: not (tmp_path / ".stacks").exists())
    assert not list(tmp_path.parent.glob("stacks*"))


# -- child processes --------------------------------------------------------------------------------------------------


@pytest.fixture
def worker() -> Iterator[BaseProcess]:
    """A child process that sleeps, such as a worker of a DataLoader that waits for something."""
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    worker.start()
    yield worker
    worker.kill()
    worker.join()


def test_child_processes_that_are_gone_or_stopped(worker: BaseProcess) -> None:
    process = worker
    name = f"worker {process.name} (pid {process.pid})"

    def said() -> tuple[str, bool] | None:
        return next(((each.text, each.is_well) for each in children() if each.text.startswith(name)), None)

    wait_until(lambda: said() == (f"{name} is alive and sleeps", True))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: said() == (f"{name} is stopped", False))
    process.kill()
    wait_until(lambda: said() == (f"{name} was killed by signal 9", False))
    process.join()
    assert said() is None


def test_a_living_worker_stands_next_to_the_stacks_with_its_pid(tmp_path: Path, worker: BaseProcess) -> None:
    with Job(tmp_path, waiting_for_data) as job:
        job.look(5)
        assert "pid" not in job.report()
    text = (tmp_path / "stall-3/rank-0.txt").read_text()
    assert f"\nworker {worker.name} (pid {worker.pid}) is alive" in text


def test_a_child_that_has_ended_is_not_collected() -> None:
    child = subprocess.Popen(["sh", "-c", "exit 3"])
    process: Any = SimpleNamespace(name="Process-1", pid=child.pid)
    wait_until(lambda: _child(process).text == f"worker Process-1 (pid {child.pid}) ended with exit code 3")
    assert child.wait() == 3


# -- several ranks ----------------------------------------------------------------------------------------------------


def test_the_rank_that_the_others_wait_for_is_named_first() -> None:
    waits = RankState(81234, 300, "in the step", "all_reduce, train.py:88 (step)", IN_COLLECTIVE)
    missing = RankState(
        81234, 300, "waits for data at depth 1", "Queue.get, loader.py:40 (get)", NOT_WAITING, "w is gone"
    )
    states = [waits, missing, waits, waits]
    assert first_line(states) == (
        "Rank 1 is not there: it is in run 81234: waits for data at depth 1, Queue.get, loader.py:40 (get); w is gone. "
        "Ranks 0, 2, 3 wait in run 81234: all_reduce, train.py:88 (step)."
    )
    assert short_line(states) == "in run 81234 (rank 1: waits for data at depth 1)"
    assert "| 3 | 81234 | 300 s | in the step | all_reduce, train.py:88 (step) | - |" in report(states, "line", "files")


def test_ranks_that_all_wait_or_do_not_are_named_the_fewest_first() -> None:
    one = RankState(7, 9, "in the step", "all_reduce, a.py:1 (step)", IN_COLLECTIVE)
    other = RankState(7, 9, "in the step", "broadcast, a.py:2 (step)", IN_COLLECTIVE)
    assert first_line([one, one, other]) == (
        "Rank 2 waits in run 7: broadcast, a.py:2 (step). Ranks 0, 1 wait in run 7: all_reduce, a.py:1 (step)."
    )
    idle = [each._replace(waits=NOT_WAITING) for each in (other, one, one)]
    assert first_line(idle).startswith("Rank 0 is in run 7: in the step, broadcast")
    assert first_line([one, one]) == "All ranks wait in run 7: all_reduce, a.py:1 (step)."
    meeting = RankState(8, 9, "waits for the other ranks", "", AT_MEETING)
    assert first_line([meeting, one]).startswith("Rank 0 is not there")
    assert " in run 8: waits for the other ranks. Rank 1 waits" in first_line([meeting, one])
    states = [meeting, meeting, one]
    assert first_line(states).startswith("Ranks 0, 1 are not there: they are in run 8")
    assert ". Rank 2" in first_line(states)


def test_a_state_survives_its_way_as_text() -> None:
    state = RankState(7, 9, "p" * 500, "wö" * 300, IN_COLLECTIVE, "c" * 500, True, True, True, "stacks-1")
    text = state.to_text()
    assert len(text.encode()) < 1000
    assert RankState.from_text(text) == state._replace(phase="p" * 240, where="w?" * 120, children="c" * 240)


def collective(module: str, name: str, file: str) -> Any:
    """Return a function that another library would have, which calls what it is given."""
    found: dict[str, Any] = {"__name__": module}
    exec(compile(f"def {name}(call): return call()", file, "exec"), found)
    return found[name]


def test_what_a_rank_waits_for_is_known_by_its_frames() -> None:
    place = locate(sys._getframe(), LoopState(), 0)  # noqa: SLF001
    assert (place.phase, place.waits) == ("in code of the script", NOT_WAITING)
    frames: list[Any] = []

    def note() -> None:
        frame = sys._getframe()  # noqa: SLF001
        assert frame.f_back is not None
        frames.append(locate(frame.f_back, LoopState(), 0))

    library = torch.__file__
    wrapper = collective("torch.distributed.c10d_logger", "wrapper", library)
    wrapper(lambda: None)
    all_reduce = collective("torch.distributed.distributed_c10d", "all_reduce", library)
    wrapper(partial(all_reduce, note))
    collective("torch.autograd.graph", "_engine_run_backward", library)(note)
    collective("torchhooks.ranks.peers", "_wait", stalls.__file__)(note)
    assert [place.waits for place in frames] == [IN_COLLECTIVE, IN_COLLECTIVE, AT_MEETING]
    assert frames[0].where.startswith("all_reduce, test_stalls.py:")
    assert frames[2].phase == "waits for the other ranks"


def test_a_wait_for_the_device_is_known_by_its_frames() -> None:
    frames: list[Any] = []

    def note() -> None:
        frame = sys._getframe().f_back  # noqa: SLF001
        assert frame is not None
        frames.append(locate(frame, LoopState(), 0))

    receive = collective("torchhooks.device.readback", "_receive", stalls.__file__)
    write = collective("torchhooks.summary.tensorboard", "_write", stalls.__file__)
    receive(note)
    receive(lambda: note())  # a callback of the script
    receive(partial(write, note))
    assert [place.phase for place in frames] == ["waits for the device", *["in code of the script"] * 2]
    assert not frames[0].is_slow


@pytest.mark.parametrize(
    "name",
    [
        *places.HOOK_METHODS,
        places.HOOK_CALL,
        places.ITEMS,
        places.EVALUATE,
        *places.OUTSIDE,
        *places.RUN_PARTS,
        *places.AFTER_STEP,
    ],
)
def test_the_functions_by_which_a_place_is_known_exist(name: str) -> None:
    module, owner, method = name.rsplit(".", 2)
    function = getattr(getattr(import_module(module), owner), method)
    assert f"{function.__module__}.{function.__qualname__}" == name
    if name == places.HOOK_CALL:
        assert {"slot", "name"} <= {*inspect.signature(function).parameters}


def after_a_look(watch: Watch, is_so: bool) -> bool:
    watch.look()
    return is_so


def with_ranks(folder: Path, fault: Callable[[Watch, list[Watch]], None], at: int = 1) -> None:
    """Make four runs on three ranks that are threads. Rank ``at`` calls ``fault`` in its third run.

    Meanwhile the others wait for it there; rank 0 waits in code of the script if ``at`` is 2.
    """
    folder.mkdir(exist_ok=True)
    is_there, go_on = threading.Event(), threading.Event()

    def run(ranks: ThreadRanks, hub: Hub) -> None:
        def step(number: int) -> None:
            if number == 2 and ranks.rank == at:
                mine = next(watch for watch in watches if watch._training.ranks.rank == at)  # noqa: SLF001
                assert at == 1 or is_there.wait(60)
                fault(mine, watches)
                go_on.set()
            hub.gather("step", ranks.rank, None)

        with MonitoredLoop(step, checkpoint_dir=str(folder), ranks=ranks) as loop:
            for number in loop.until_stop(range(4)):
                if number == 2 and ranks.rank == 0 and at == 2:
                    is_there.set()
                    go_on.wait(60)
                loop.run(number)

    assert in_threads(3, run) == [None] * 3


def test_ranks_tell_each_other_where_they_are(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    def stand_still(mine: Watch, all_watches: list[Watch]) -> None:
        # Not a number of looks: the others may still be on their way.
        wait_until(lambda: after_a_look(mine, len(list((tmp_path / "run").glob("stall-3/*"))) == 4))
        wait_until(lambda: all(watch.watched.stalled for watch in all_watches))

    with_ranks(tmp_path / "run", stand_still)
    assert {file.name for file in (tmp_path / "run/stall-3").iterdir()} == {
        *("report.md", "rank-0.txt", "rank-1.txt", "rank-2.txt"),
    }
    (line,) = [text for level, text in lines if level == "CRITICAL"]
    assert re.match(r"no run .* s\. Rank 1 is in run 3: in the step, ", line)
    assert ". Ranks 0, 2 are in run 3: in the step, " in line


def test_a_rank_that_may_take_long_excuses_the_others_until_its_own_time_is_over(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    said: list[bool] = []

    def stand_still(mine: Watch, all_watches: list[Watch]) -> None:
        in_script = next(watch for watch in all_watches if watch._training.ranks.is_chief)  # noqa: SLF001
        wait_until(lambda: after_a_look(mine, mine._next > 3))  # noqa: SLF001 - the others have answered
        said.append(any(level == "CRITICAL" for level, _ in lines))
        for _ in range(17):
            in_script.look()
        wait_until(lambda: (tmp_path / "run/stall-3/report.md").exists())

    with_ranks(tmp_path / "run", stand_still, at=2)
    assert said == [False]
    (line,) = [text for level, text in lines if level == "CRITICAL"]
    assert "Rank 0 is in run 3: in code of the script" in line


def meets(watch: Watch, peers: Any, ranks: Any = None) -> None:
    """Have ``watch`` alone, and not its loop, meet other ranks."""
    training = Session.of(watch._training)  # noqa: SLF001
    training.attach_peers(peers)
    training.ranks = training.ranks if ranks is None else ranks
    watch._training = training  # noqa: SLF001


@contextmanager
def job_that_has_asked(folder: Path) -> Iterator[Job]:
    """Stand still in the step, on one of several ranks, which has asked the others where they are."""
    peers: Any = SimpleNamespace(ask_for_states=lambda: True)
    with Job(folder, in_the_step) as job:
        meets(job.watch, peers)
        job.look(5)
        yield job


@pytest.mark.parametrize("is_late", [False, True])
def test_a_stall_that_is_over_when_the_ranks_answer_is_not_reported(
    is_late: bool, tmp_path: Path, lines: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_that_has_asked(tmp_path) as job:
        watch = job.watch
        asked_at = watch._asked_at  # noqa: SLF001
        assert asked_at < time.monotonic()
        monkeypatch.setattr(stalls, "LOOK_SECS", 0.2)
        if is_late:  # the rank that could not answer goes on an instant later
            watch._asked_at -= 1000  # noqa: SLF001
            states = [watch._state_text()]  # noqa: SLF001
            threading.Timer(0.05, job.gate.open).start()
        else:
            job.gate.open()
            wait_until(lambda: watch._training.loop_state.runs == 4)  # noqa: SLF001
            states = [watch._state_text()]  # noqa: SLF001
        watch._take_states(states)  # noqa: SLF001
        if watch._reporting is not None:  # noqa: SLF001
            watch._reporting.join()  # noqa: SLF001
        assert watch.watched.stalled is None
    assert not [text for level, text in lines if level == "CRITICAL"]
    assert not list(tmp_path.glob("stall-*"))


def test_an_answer_that_comes_late_is_reported_if_the_loop_still_stands_still(
    tmp_path: Path, lines: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_that_has_asked(tmp_path) as job:
        watch = job.watch
        watch._asked_at -= 1000  # noqa: SLF001
        states = [watch._state_text()]  # noqa: SLF001
        monkeypatch.setattr(stalls, "LOOK_SECS", 0.01)
        watch._take_states(states)  # noqa: SLF001
        job.report()
    assert len([text for level, text in lines if level == "CRITICAL"]) == 1


def test_a_rank_that_lost_the_others_asks_no_more(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    peers: Any = SimpleNamespace(ask_for_states=lambda: False, failure=PeerError("rank 1 is lost", 1))
    with Job(tmp_path, in_the_step) as job:
        meets(job.watch, peers)
        assert is_quiet(job, 50, lines)


def test_a_rank_that_others_have_left_reports_alone(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    peers: Any = SimpleNamespace(ask_for_states=lambda: False, failure=None)
    ranks: Any = SimpleNamespace(rank=1, is_chief=False)
    with Job(tmp_path, in_a_hook("teardown")) as job:
        meets(job.watch, peers, ranks)
        job.look(50)
        assert "It is after run 3: in teardown of Stands" in job.report()
        assert (tmp_path / "stall-3/rank-1.txt").exists()
        assert len([text for level, text in lines if level == "CRITICAL"]) == 1


def test_workers_are_killed(worker: BaseProcess) -> None:
    kill_workers()
    assert worker.is_alive()  # it is no daemon
    worker._config["daemon"] = True  # type: ignore[attr-defined]  # noqa: SLF001 - not possible once it runs
    kill_workers()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
