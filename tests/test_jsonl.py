"""JsonLinesWriter: what a line is, what a kill leaves, what is removed, and who may write."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    JsonLinesWriter,
    LifecycleError,
    MonitoredLoop,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    SummarySaverHook,
    jsonl,
    summary,
)
from torchhooks.checkpoint_files import Disk
from torchhooks.testing import RecordingWriter, trace

ROOT = Path(__file__).parents[1]
LINE = b'{"step": 1, "time": 5.0, "loss": 0.5}\n'
Lines = list[tuple[str, str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "curves.jsonl"


def strict(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=strict) for line in path.read_text().splitlines()]


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read(path)]


def beside(path: Path) -> set[str]:
    """What is in the folder but the file and what is locked for it."""
    return set(os.listdir(path.parent)) - {path.name, f".{path.name}.lock"}


def filled(path: Path, *steps: int) -> JsonLinesWriter:
    writer = JsonLinesWriter(path)
    for step in steps:
        writer.add_scalar("loss", 0.5, step)
    return writer


# -- a line -----------------------------------------------------------------------------------------------------------


def test_a_point_is_a_line_that_is_in_the_file_at_once(path: Path) -> None:
    writer = JsonLinesWriter(path)
    writer.add_scalar("loss", 0.25, 10, walltime=1763712000.5)
    assert path.read_text() == '{"step": 10, "time": 1763712000.5, "loss": 0.25}\n'


def test_the_points_that_a_hook_has_together_are_one_line(path: Path) -> None:
    ops = {"loss": "loss", "twice": lambda loss: 2 * loss}
    trace(SummarySaverHook(1, summary_writer=JsonLinesWriter(path), summary_op=ops), losses=[0.5, 0.25])
    lines = [{name: value for name, value in line.items() if name != "time"} for line in read(path)]
    assert lines == [{"step": 1, "loss": 0.5, "twice": 1.0}, {"step": 2, "loss": 0.25, "twice": 0.5}]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (3, 3),
        (True, 1),
        (0.1, 0.1),
        (1e300, 1e300),
        (np.float32(0.5), 0.5),
        (np.array([7]), 7),
        (torch.tensor([[0.5]], requires_grad=True), 0.5),
        (torch.tensor(3.0, dtype=torch.bfloat16), 3.0),
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (torch.tensor(-math.inf), "-Infinity"),
    ],
    ids=repr,
)
def test_every_number_is_valid_json_of_the_same_value(value: Any, written: Any, path: Path) -> None:
    JsonLinesWriter(path).add_scalar("loss", value, 1)
    (line,) = read(path)
    assert (line["loss"], type(line["loss"])) == (written, type(written))


@pytest.mark.parametrize("tag", ["train/loss", "ä", 'a "b"', "a\u2028b"])
def test_a_tag_is_read_as_it_was_given(tag: str, path: Path) -> None:
    JsonLinesWriter(path).add_scalar(tag, 0.5, 1)
    assert read(path)[0][tag] == 0.5


@pytest.mark.parametrize(
    ("tag", "value", "step", "message"),
    [
        ("w", torch.ones(3), 1, r"scalar 'w': got shape \(3,\), 3 elements"),
        ("w", "high", 1, "scalar 'w': got 'high'; a scalar is one real number"),
        ("a\nb", 0.5, 1, "a tag must not be blank or have control characters"),
        ("step", 0.5, 1, "tag 'step': every line has a 'step' of its own; give the curve another name"),
        ("time", 0.5, 1, "tag 'time': every line has"),
        ("loss", 0.5, 1.5, "step=1.5: must be a whole number"),
    ],
)
def test_what_is_no_point_is_refused_and_nothing_is_written(
    tag: str, value: Any, step: Any, message: str, path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        JsonLinesWriter(path).add_scalar(tag, value, step)
    assert path.read_bytes() == b""


def test_what_is_no_curve_is_refused_when_the_loop_is_created(path: Path) -> None:
    op = summary.histogram("weights", "weight")
    hook = SummarySaverHook(1, summary_writer=JsonLinesWriter(path), summary_op=op)
    with pytest.raises(TypeError, match=r"JsonLinesWriter has no add_histogram\(\), which histogram\('weights'"):
        MonitoredLoop(lambda: None, hooks=[hook])


# -- the file ---------------------------------------------------------------------------------------------------------


def test_the_folder_is_made(tmp_path: Path) -> None:
    filled(tmp_path / "a" / "b" / "curves.jsonl", 1)
    assert steps(tmp_path / "a" / "b" / "curves.jsonl") == [1]


def test_what_is_there_is_appended_to(path: Path) -> None:
    path.write_bytes(LINE)
    filled(path, 2)
    assert steps(path) == [1, 2]


def test_two_writers_of_a_process_share_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    one, other = filled(path, 1, 2), filled(Path("curves.jsonl"), 3)
    one.purge_from(2)
    other.add_scalar("loss", 0.5, 2)
    assert steps(path) == [1, 2]


def test_closed_again_is_harmless_and_what_is_written_then_is_appended(path: Path) -> None:
    with filled(path, 1) as writer:
        writer.close()
    writer.flush()
    writer.add_scalar("loss", 0.5, 2)
    assert steps(path) == [1, 2]


def test_a_repr_can_be_pasted_back(path: Path) -> None:
    text = f"JsonLinesWriter({str(path)!r})"
    assert repr(eval(text)) == text


@pytest.mark.parametrize("length", range(1, len(LINE) - 1))
def test_a_line_that_was_cut_short_anywhere_is_removed_and_said_to_be(length: int, path: Path, lines: Lines) -> None:
    path.write_bytes(LINE + LINE[:length])
    filled(path, 2)
    assert steps(path) == [1, 2]
    assert ("WARNING", f"{path}: removed its last line, {length} bytes, which a kill had cut short") in lines


def test_a_last_line_that_only_lacks_its_end_stays(path: Path) -> None:
    path.write_bytes(LINE[:-1])
    filled(path, 2)
    assert steps(path) == [1, 2]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"step,loss\n1,0.5\n", 1),
        (b'{\n  "step": 1\n}\n', 1),
        (b"[1, 2]\n", 1),
        (LINE + b"\x00\xff" + LINE, 2),
        (LINE + LINE[:20] + b"\n" + LINE, 2),
        (LINE + b"epoch 2", 2),
        (LINE + b"[" * 100_000, 2),
        (b'{"step": ' + b" " * (65 << 20), 1),
    ],
    ids=["csv", "json", "array", "binary", "torn in the middle", "text", "deep", "long"],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(content: bytes, line: int, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"curves.jsonl: line {line} is no JSON object, .*or choose another path"):
        JsonLinesWriter(path)
    assert path.read_bytes() == content


def test_a_line_of_very_many_points_is_read_again_and_mended_when_it_is_cut_short(path: Path, lines: Lines) -> None:
    points = [(f"layers.{layer}.weight/grad_norm", 0.123456789) for layer in range(25_000)]
    with JsonLinesWriter(path) as writer:
        writer.add_points(points, 1)
        writer.add_points(points, 2)
    os.truncate(path, path.stat().st_size - 10)
    filled(path, 3)
    assert [(line["step"], len(line)) for line in read(path)] == [(1, 25_002), (3, 3)]


def test_a_line_is_refused_from_the_length_on_that_could_not_be_read_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_LONGEST_LINE", len(LINE))
    writer = JsonLinesWriter(path)
    writer.add_points([("loss", 0.5)], 1, 5.0)
    with pytest.raises(ValueError, match=r"step 2: a line with 1 tags has 39 bytes, at most 38 can be read again: w"):
        writer.add_points([("loss", 0.25)], 2, 5.0)
    writer.close()
    JsonLinesWriter(path).add_scalar("loss", 0.5, 3, 5.0)
    assert steps(path) == [1, 3]


# -- removing ---------------------------------------------------------------------------------------------------------

FOREIGN = b'{"note": "a longer rate"}\n\n{"step": null}\n{"step": true}\n{"step": "9"}\n'


def test_lines_of_the_step_and_beyond_are_removed_wherever_they_are(path: Path) -> None:
    writer = filled(path, 1, 3, 2, 4, 3, 2)
    writer.purge_from(3)
    writer.add_scalar("loss", 0.5, 3)
    assert steps(path) == [1, 2, 2, 3]


def test_what_has_no_step_stays(path: Path) -> None:
    path.write_bytes(LINE + FOREIGN + LINE)
    JsonLinesWriter(path).purge_from(0)
    assert path.read_bytes() == FOREIGN


def test_a_step_that_is_a_float_is_a_step(path: Path) -> None:
    path.write_bytes(LINE + b'{"step": 2.0}\n')
    JsonLinesWriter(path).purge_from(2)
    assert path.read_bytes() == LINE


def test_the_file_is_not_touched_if_nothing_is_to_be_removed(path: Path) -> None:
    writer = filled(path, 1, 2)
    before = path.stat()
    writer.purge_from(3)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_the_file_keeps_its_mode_and_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    writer = filled(link, 1, 2)
    path.chmod(0o640)
    writer.purge_from(2)
    assert (path.stat().st_mode & 0o777, link.is_symlink(), steps(path)) == (0o640, True, [1])


def test_a_large_file_is_not_read_into_memory(path: Path) -> None:
    path.write_bytes(b"".join(LINE.replace(b"1", b"%d" % step, 1) for step in range(200_000)))
    tracemalloc.start()
    try:
        JsonLinesWriter(path).purge_from(199_999)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 2


def test_a_line_that_somebody_spoiled_meanwhile_is_an_error_and_the_file_left_as_it_is(path: Path) -> None:
    writer = filled(path, 1, 2)
    with path.open("ab") as file:
        file.write(b"done\n")
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"line 3 is no JSON object, b'done\\n'"):
        writer.purge_from(2)
    assert (path.read_bytes(), beside(path)) == (content, set())


def test_a_disk_that_fails_leaves_the_file_as_it_is_and_nothing_beside_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Disk):
        def sync(self, file: BinaryIO) -> None:
            raise OSError(errno.ENOSPC, "no space left")

    writer = filled(path, 1, 2)
    monkeypatch.setattr(jsonl, "_disk", Full())
    with pytest.raises(OSError, match="no space left"):
        writer.purge_from(2)
    writer.add_scalar("loss", 0.5, 3)
    assert (steps(path), beside(path)) == ([1, 2, 3], set())


def test_a_line_that_does_not_fit_on_the_disk_is_not_begun(path: Path) -> None:
    writer = JsonLinesWriter(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(LINE) + 20, hard))
    try:
        writer.add_scalar("loss", 0.5, 1, 5.0)
        with pytest.raises(OSError, match="File too large"):
            writer.add_scalar("loss", 0.5, 1, 5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == LINE
    writer.add_scalar("loss", 0.5, 1, 5.0)
    assert path.read_bytes() == LINE * 2


# -- with hooks -------------------------------------------------------------------------------------------------------


def summaries(writer: JsonLinesWriter) -> SummarySaverHook:
    return SummarySaverHook(1, summary_writer=writer, summary_op="loss")


def test_a_training_that_begins_at_0_removes_everything_and_says_how_much(path: Path, lines: Lines) -> None:
    trace(summaries(JsonLinesWriter(path)), losses=[0.5] * 5)
    trace(summaries(JsonLinesWriter(path)), losses=[0.25] * 2)
    assert [(line["step"], line["loss"]) for line in read(path)] == [(1, 0.25), (2, 0.25)]
    said = f"{path}: removed 5 lines of step 0 and beyond, which the training now makes again"
    assert [line for line in lines if "removed" in line[1]] == [("WARNING", said)]


def test_a_counter_that_is_alone_removes_everything_too(path: Path) -> None:
    for losses in ([0.5] * 5, [0.5] * 3):
        trace(StepCounterHook(1, summary_writer=JsonLinesWriter(path)), losses=losses)
    assert steps(path) == [2, 3]


def test_a_training_that_goes_on_removes_what_it_makes_again_and_says_so_quietly(path: Path, lines: Lines) -> None:
    trace(summaries(JsonLinesWriter(path)), losses=[0.5] * 5)
    trace(summaries(JsonLinesWriter(path)), losses=[0.25] * 2, start_step=4)
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    said = f"{path}: removed 1 line of step 5 and beyond, which the training now makes again"
    assert [line for line in lines if "removed" in line[1]] == [("INFO", said)]


def test_a_step_that_was_set_by_hand_counts_as_restored(path: Path) -> None:
    filled(path, 1, 2, 3)
    with MonitoredLoop(lambda: 0.5, hooks=[summaries(JsonLinesWriter(path))]) as loop:
        loop.session.global_step = 2
        loop.run()
    assert steps(path) == [1, 2, 3]
    assert read(path)[-1]["time"] > read(path)[0]["time"]


def test_a_loop_without_a_run_removes_nothing(path: Path) -> None:
    filled(path, 1, 2)
    trace(summaries(JsonLinesWriter(path)), StepCounterHook(1, summary_writer=JsonLinesWriter(path)), losses=[])
    assert steps(path) == [1, 2]


def test_hooks_with_a_writer_each_for_one_file_write_one_curve(path: Path) -> None:
    for losses in ([0.5] * 4, [0.25] * 2):
        counter = StepCounterHook(1, summary_writer=JsonLinesWriter(path))
        trace(counter, summaries(JsonLinesWriter(path)), losses=losses)
    assert steps(path) == [1, 2, 2]


def test_a_writer_of_ones_own_that_can_purge_is_told_like_this_one() -> None:
    class Tracker:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.calls.append(step)

        def purge_from(self, step: int) -> None:
            self.calls.append(f"from {step}")

        def flush(self) -> None: ...

    tracker = Tracker()
    trace(SummarySaverHook(1, summary_writer=tracker, summary_op="loss"), losses=[0.5], start_step=7)
    trace(StepCounterHook(1, summary_writer=tracker), losses=[0.5])
    assert tracker.calls[:2] == ["from 8", 8]
    assert set(tracker.calls[2:]) == {"from 0"}


# -- a loop within a step of another ----------------------------------------------------------------------------------


class Outer:
    """A training that goes on from a step, and in one of its steps makes another training of two steps."""

    def __init__(self, path: Path, inner: Callable[[], list[Any]], at: int, begun_at: int = 0) -> None:
        self._inner, self._at = inner, at
        with MonitoredLoop(self._step, hooks=[summaries(JsonLinesWriter(path))]) as self._loop:
            self._loop.session.global_step = begun_at
            for _ in self._loop.until_stop(range(4)):
                self._loop.run()

    def _step(self) -> float:
        if self._loop.global_step == self._at - 1:
            trace(*self._inner(), losses=[0.25] * 2)
        return 0.5


def losses(path: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read(path) if "loss" in line]


@pytest.mark.parametrize(
    "inner",
    [
        lambda path: [summaries(JsonLinesWriter(path)), StepCounterHook(1, summary_writer=JsonLinesWriter(path))],
        lambda path: [StepCounterHook(1, summary_writer=JsonLinesWriter(path)), summaries(JsonLinesWriter(path))],
    ],
    ids=["summaries first", "counter first"],
)
def test_the_lines_of_a_training_stay_when_one_within_it_begins_at_0(
    inner: Callable[[Path], list[Any]], path: Path
) -> None:
    filled(path, 1, 2, 3, 4, 5)
    Outer(path, lambda: inner(path), at=3)
    assert losses(path) == [(1, 0.5), (2, 0.5), (1, 0.25), (2, 0.25), (3, 0.5), (4, 0.5)]


def test_the_lines_of_a_training_stay_when_a_counter_within_it_begins_at_0(path: Path) -> None:
    Outer(path, lambda: [StepCounterHook(1, summary_writer=JsonLinesWriter(path))], at=3)
    assert losses(path) == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5)]
    assert steps(path) == [1, 2, 2, 3, 4]


def test_what_was_restored_stays_when_one_within_the_first_run_begins_at_0(path: Path) -> None:
    filled(path, 1, 2, 3, 4, 5)
    Outer(path, lambda: [summaries(JsonLinesWriter(path))], at=4, begun_at=3)
    assert losses(path) == [(1, 0.5), (2, 0.5), (3, 0.5), (1, 0.25), (2, 0.25), (4, 0.5), (5, 0.5), (6, 0.5), (7, 0.5)]


def test_a_training_within_one_within_another_leaves_both(path: Path) -> None:
    def inner() -> list[Any]:
        return [summaries(JsonLinesWriter(path)), Within(path)]

    Outer(path, inner, at=3)
    assert losses(path) == [(1, 0.5), (2, 0.5), (1, 0.25), (1, 0.125), (2, 0.25), (3, 0.5), (4, 0.5)]


class Within(SessionRunHook):
    """Makes a training of one step after the first."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_context.session.global_step == 1:
            trace(summaries(JsonLinesWriter(self._path)), losses=[0.125])


def test_a_recovery_of_a_training_within_another_leaves_what_both_have_written(path: Path, tmp_path: Path) -> None:
    def inner() -> None:
        failing = iter([False, False, True])

        def step() -> float:
            if next(failing, False):
                raise AbortedError("the machine is back")
            return 0.25

        hooks = [summaries(JsonLinesWriter(path)), CheckpointSaverHook(tmp_path / "inner", save_steps=100)]
        with MonitoredLoop(step, hooks=hooks, checkpoint_dir=tmp_path / "inner") as loop:
            while loop.global_step < 3:
                loop.run()

    with MonitoredLoop(lambda: 0.5, hooks=[summaries(JsonLinesWriter(path))]) as loop:
        for _ in range(3):
            loop.run()
        inner()
        loop.run()
    of_the_inner = [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert losses(path) == [(1, 0.5), (2, 0.5), (3, 0.5), *of_the_inner, (4, 0.5)]


def test_of_two_loops_that_take_turns_the_one_that_was_created_first_removes_what_was_there(path: Path) -> None:
    filled(path, 8, 9)
    with (
        MonitoredLoop(lambda: 0.5, hooks=[StepCounterHook(1, summary_writer=JsonLinesWriter(path))]) as one,
        MonitoredLoop(lambda: 0.25, hooks=[summaries(JsonLinesWriter(path))]) as other,
    ):
        for _ in range(2):
            one.run()
            other.run()
    assert steps(path) == [1, 2, 2]


def sessions(writer: RecordingWriter) -> list[tuple[Any, ...]]:
    return [record for record in writer.records if record[0] == "session_log"]


def test_a_counter_within_a_training_voids_none_of_its_points_in_event_files() -> None:
    writer = RecordingWriter()
    with MonitoredLoop(lambda: 0.5, hooks=[SummarySaverHook(1, summary_writer=writer, summary_op="loss")]) as loop:
        loop.run()
        before = len(sessions(writer))
        trace(StepCounterHook(1, summary_writer=writer), losses=[0.25] * 2, start_step=1)
    assert len(sessions(writer)) == before == 1


def test_a_training_that_begins_when_the_other_is_closed_removes_its_lines_as_ever(path: Path) -> None:
    Outer(path, lambda: [summaries(JsonLinesWriter(path))], at=3)
    trace(summaries(JsonLinesWriter(path)), losses=[0.25])
    assert losses(path) == [(1, 0.25)]


# -- processes --------------------------------------------------------------------------------------------------------


class Process:
    """Another process that runs ``code`` on the file and says, in a line, when it is ready."""

    def __init__(self, code: str, path: Path) -> None:
        start = "import os, sys\nfrom torchhooks import JsonLinesWriter, jsonl\npath = sys.argv[1]\n"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start + code, str(path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def wait_for_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        return self._process.wait(60)

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def run(path: Path) -> Iterator[Any]:
    processes: list[Process] = []

    def start(code: str) -> Process:
        processes.append(Process(code, path))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


HOLD = """
writer = JsonLinesWriter(path)
writer.add_scalar("loss", 0.5, 1)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(path: Path, run: Any) -> None:
    first = run(HOLD)
    first.wait_for_line()
    with pytest.raises(LifecycleError, match=r"curves.jsonl: another process is writing to this file.*End it, have"):
        JsonLinesWriter(path)
    assert steps(path) == [1]
    first.kill()
    filled(path, 2)
    assert steps(path) == [1, 2]


MEANWHILE = {
    "lines are removed": "writer.purge_from(0)",
    "the process reads the file": "open(path).read()",
    "a child ends": "os.fork() or os._exit(0); os.wait()",
    "a failed attempt is forgotten": """
writer.close()
open(path, "a").write("no JSON\\n")
try:
    JsonLinesWriter(path)
except ValueError as error:
    kept = error
open(path, "w").close()
writer = JsonLinesWriter(path)
del kept
""",
}


@pytest.mark.parametrize("meanwhile", MEANWHILE.values(), ids=MEANWHILE)
def test_the_claim_stays_when(meanwhile: str, path: Path, run: Any) -> None:
    assert run(HOLD.replace("print", f"{meanwhile}\nprint")).wait_for_line() == "ready"
    with pytest.raises(LifecycleError, match="another process is writing"):
        JsonLinesWriter(path)


def test_children_that_outlive_a_killed_process_do_not_hold_the_file(path: Path, run: Any) -> None:
    parent = run(HOLD.replace("print", "os.fork()\nprint"))
    parent.wait_for_line()
    parent.wait_for_line()
    parent.kill()
    filled(path, 2)
    assert steps(path) == [1, 2]


def test_a_kill_at_any_moment_leaves_whole_lines_and_perhaps_the_beginning_of_one(path: Path, run: Any) -> None:
    for life in range(3):
        process = run(
            'writer, step = JsonLinesWriter(path), 0\nprint("ready", flush=True)\n'
            'while True:\n    writer.add_points([(f"tag{i}", 0.5) for i in range(50)], step)\n    step += 1\n'
        )
        process.wait_for_line()
        while path.stat().st_size < (life + 1) * 100_000:
            pass
        process.kill()
        JsonLinesWriter(path)
        assert all(len(line) == 52 for line in read(path))


def test_a_kill_before_the_new_file_is_in_place_leaves_the_old_one(path: Path, run: Any) -> None:
    process = run(
        "class Killing(jsonl.Disk):\n    def rename(self, *paths):\n        os.kill(os.getpid(), 9)\n"
        "jsonl._disk = Killing()\nwriter = JsonLinesWriter(path)\n"
        'for step in range(5):\n    writer.add_scalar("loss", 0.5, step)\nwriter.purge_from(2)\n'
    )
    assert process.wait() == -signal.SIGKILL
    assert beside(path) == {f".{path.name}.tmp"}
    filled(path, 5)
    assert (steps(path), beside(path)) == ([0, 1, 2, 3, 4, 5], set())


class NoLocks:
    """A system whose files cannot be locked."""

    LOCK_EX, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB

    def lockf(self, file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")


def test_where_files_cannot_be_locked_it_goes_without(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for locks in (NoLocks(), None):
        monkeypatch.setattr(jsonl, "fcntl", locks)
        filled(path, 1)
    assert steps(path) == [1, 1]


def test_a_single_curve_goes_by_the_add_scalar_of_a_subclass(tmp_path: Path) -> None:
    class Prefixing(JsonLinesWriter):
        def add_scalar(self, tag: str, value: Any, step: int, walltime: float | None = None) -> None:
            super().add_scalar(f"mine/{tag}", value, step, walltime)

    with Prefixing(tmp_path / "curves.jsonl") as writer:
        hooks = [
            StepCounterHook(1, summary_writer=writer),
            SummarySaverHook(1, summary_writer=writer, summary_op={"loss": "loss"}),
        ]
        with MonitoredLoop(lambda: 0.5, hooks=hooks) as loop:
            loop.run()
            loop.run()
    lines = (tmp_path / "curves.jsonl").read_text(encoding="utf-8").splitlines()
    assert [tag for line in lines for tag in json.loads(line) if tag not in ("step", "time")] == [
        "mine/loss",
        "mine/global_step/sec",
        "mine/loss",
    ]
