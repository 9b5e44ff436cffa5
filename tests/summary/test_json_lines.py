"""JsonLinesWriter: the format of a line, the file after a kill, and the removal of repeated steps."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
import signal
import threading
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import processes
from support.disks import FailingDisk, no_space_after
from support.waiting import wait_until

from torchhooks import CheckpointSaverHook, JsonLinesWriter, MonitoredLoop, StepCounterHook, SummarySaverHook, summary
from torchhooks.summary import json_lines
from torchhooks.testing import RecordingWriter, trace

LINE = b'{"step": 1, "time": 5.0, "loss": 0.5}\n'
Lines = list[tuple[str, str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "curves.jsonl"


def strict(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=strict) for line in path.read_text().splitlines()]


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read(path)]


def other_files(path: Path) -> set[str]:
    """Return the names of the other files in the folder."""
    return set(os.listdir(path.parent)) - {path.name}


def filled(path: Path, *steps: int) -> JsonLinesWriter:
    writer = JsonLinesWriter(path)
    for step in steps:
        writer.add_scalar("loss", 0.5, step)
    return writer


# -- a line -----------------------------------------------------------------------------------------------------------


def test_a_point_is_a_line_that_is_in_the_file_when_the_call_returns(path: Path) -> None:
    writer = JsonLinesWriter(path)
    writer.add_scalar("loss", 0.25, 10, walltime=1763712000.5)
    assert path.read_text() == '{"step": 10, "time": 1763712000.5, "loss": 0.25}\n'


def test_the_points_that_a_hook_writes_for_one_step_are_one_line(path: Path) -> None:
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
def test_a_tag_is_read_back_as_given(tag: str, path: Path) -> None:
    JsonLinesWriter(path).add_scalar(tag, 0.5, 1)
    assert read(path)[0][tag] == 0.5


@pytest.mark.parametrize(
    ("tag", "value", "step", "message"),
    [
        ("w", torch.ones(3), 1, r"scalar 'w': got shape \(3,\), 3 elements"),
        ("w", "high", 1, "scalar 'w': got 'high'; a scalar is one real number"),
        ("a\nb", 0.5, 1, "must not be blank"),
        ("step", 0.5, 1, "tag 'step': every line has a 'step' of its own; give the curve another name"),
        ("time", 0.5, 1, "tag 'time': every line has"),
        ("loss", 0.5, 1.5, "step=1.5: .* whole"),
    ],
)
def test_an_invalid_point_is_refused_and_nothing_is_written(
    tag: str, value: Any, step: Any, message: str, path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        JsonLinesWriter(path).add_scalar(tag, value, step)
    assert path.read_bytes() == b""


def test_an_op_other_than_a_scalar_is_refused_when_the_loop_is_created(path: Path) -> None:
    op = summary.histogram("weights", "weight")
    hook = SummarySaverHook(1, summary_writer=JsonLinesWriter(path), summary_op=op)
    with pytest.raises(TypeError, match=r"JsonLinesWriter has no add_histogram\(\), which histogram\('weights'"):
        MonitoredLoop(lambda: None, hooks=[hook])


# -- the file ---------------------------------------------------------------------------------------------------------


def test_the_folder_is_created(tmp_path: Path) -> None:
    filled(tmp_path / "a" / "b" / "curves.jsonl", 1)
    assert steps(tmp_path / "a" / "b" / "curves.jsonl") == [1]


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"this is a folder: give a file, such as '.*curves\.jsonl'"):
        JsonLinesWriter(tmp_path)


def test_lines_are_appended_to_an_existing_file(path: Path) -> None:
    path.write_bytes(LINE)
    filled(path, 2)
    assert steps(path) == [1, 2]


def test_writers_with_one_path_continue_in_the_new_file_after_a_purge_without_a_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    monkeypatch.chdir(path.parent)
    one, other = filled(path, 1, 2), filled(Path("curves.jsonl"), 3)
    one.purge_from(2)
    other.add_scalar("loss", 0.5, 2)
    one.add_scalar("loss", 0.5, 3)
    assert steps(path) == [1, 2, 3]
    assert [text for _, text in lines if "while it was open" in text] == []


def test_a_writer_removes_the_lines_of_another_one_with_its_path(path: Path) -> None:
    one, other = filled(path, 1), filled(path, 1, 2)
    one.purge_from(2)
    other.purge_from(1)
    one.add_scalar("loss", 0.5, 1)
    other.add_scalar("loss", 0.5, 2)
    assert steps(path) == [1, 2]


def test_a_line_that_another_thread_writes_during_a_purge_is_not_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def interrupted(path: str, new_path: str) -> None:
        thread.start()
        thread.join(0.1)  # it is waiting for the end of the purge
        replace(path, new_path)

    one, other = filled(path, 1, 2), JsonLinesWriter(path)
    thread = threading.Thread(target=other.add_scalar, args=("loss", 0.5, 3))
    monkeypatch.setattr(os, "replace", interrupted)
    one.purge_from(2)
    thread.join()
    assert steps(path) == [1, 3]


def test_a_writer_can_write_after_it_was_closed(path: Path) -> None:
    one, other = JsonLinesWriter(path), JsonLinesWriter(path)
    one.close()
    one.close()
    one.add_scalar("loss", 0.5, 1)
    other.add_scalar("loss", 0.5, 2)
    assert steps(path) == [1, 2]


def test_a_file_or_a_folder_that_was_removed_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "run" / "curves.jsonl"
    writer = filled(path, 1)
    shutil.rmtree(path.parent)
    writer.add_scalar("loss", 0.5, 2)
    path.unlink()
    writer.add_scalar("loss", 0.5, 3)
    assert steps(path) == [3]


def test_a_repr_can_be_pasted_back(path: Path) -> None:
    text = f"JsonLinesWriter({str(path)!r})"
    assert repr(eval(text)) == text


@pytest.mark.parametrize("length", range(1, len(LINE) - 1))
def test_an_incomplete_last_line_of_any_length_is_removed_with_a_warning(length: int, path: Path, lines: Lines) -> None:
    path.write_bytes(LINE + LINE[:length])
    filled(path, 2)
    assert steps(path) == [1, 2]
    assert (
        "WARNING",
        f"{path}: removed an incomplete last line of {length} bytes, left by a write that was interrupted",
    ) in lines


def test_a_last_line_that_only_lacks_its_line_break_stays(path: Path) -> None:
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
    ],
    ids=["csv", "json", "array", "binary", "torn in the middle", "text"],
)
def test_no_line_is_removed_from_a_file_with_a_line_that_is_not_a_json_object(
    content: bytes, line: int, path: Path
) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"curves.jsonl: line {line} is not a JSON object: .*or choose another path"):
        JsonLinesWriter(path).purge_from(0)
    assert path.read_bytes() == content


def test_a_very_long_line_is_read_again_and_removed_if_it_is_incomplete(path: Path, lines: Lines) -> None:
    points = [(f"layers.{layer}.weight/grad_norm", 0.123456789) for layer in range(25_000)]
    with JsonLinesWriter(path) as writer:
        writer.add_points(points, 1)
        writer.add_points(points, 2)
    os.truncate(path, path.stat().st_size - 10)
    filled(path, 3)
    assert [(line["step"], len(line)) for line in read(path)] == [(1, 25_002), (3, 3)]


# -- purging ----------------------------------------------------------------------------------------------------------

FOREIGN = b'{"note": "a longer rate"}\n{"step": null}\n{"step": "9"}\n'


def test_lines_of_the_step_and_later_are_removed_wherever_they_are_in_the_file(path: Path) -> None:
    writer = filled(path, 1, 3, 2, 4, 3, 2)
    writer.purge_from(3)
    writer.add_scalar("loss", 0.5, 3)
    assert steps(path) == [1, 2, 2, 3]


def test_lines_without_a_step_stay(path: Path) -> None:
    path.write_bytes(LINE + FOREIGN + LINE)
    JsonLinesWriter(path).purge_from(0)
    assert path.read_bytes() == FOREIGN


def test_a_step_that_is_a_float_is_a_step(path: Path) -> None:
    path.write_bytes(LINE + b'{"step": 2.0}\n')
    JsonLinesWriter(path).purge_from(2)
    assert path.read_bytes() == LINE


def test_the_file_is_not_touched_if_there_is_nothing_to_remove(path: Path) -> None:
    writer = filled(path, 1, 2)
    before = path.stat()
    writer.purge_from(3)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert other_files(path) == set()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_the_file_keeps_its_mode_and_a_link_stays_a_link(mode: int, path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    writer = filled(link, 1, 2)
    path.chmod(mode)
    writer.purge_from(2)
    assert (path.stat().st_mode & 0o777, link.is_symlink(), steps(path)) == (mode, True, [1])


@pytest.mark.not_measured  # which would take twice as long
def test_a_large_file_is_not_read_into_memory(path: Path) -> None:
    path.write_bytes(b"".join(LINE.replace(b"1", b"%d" % step, 1) for step in range(40_000)))
    tracemalloc.start()
    try:
        JsonLinesWriter(path).purge_from(39_999)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 2


def test_a_line_that_is_not_a_json_object_fails_a_purge_and_the_file_is_not_changed(path: Path) -> None:
    writer = filled(path, 1, 2)
    with path.open("ab") as file:
        file.write(b"done\n")
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"line 3 .*: b'done\\n'"):
        writer.purge_from(2)
    assert (path.read_bytes(), other_files(path)) == (content, set())


def fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no space left")


@pytest.mark.parametrize("operation", ["fsync", "replace"])
def test_a_disk_that_fails_leaves_the_file_unchanged_and_no_other_file(
    operation: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = filled(path, 1, 2)
    monkeypatch.setattr(os, operation, fail)
    with pytest.raises(OSError, match="no space left"):
        writer.purge_from(2)
    writer.add_scalar("loss", 0.5, 3)
    assert (steps(path), other_files(path)) == ([1, 2, 3], set())


def test_a_line_that_does_not_fit_on_the_disk_is_removed_before_the_next_line(path: Path) -> None:
    writer = JsonLinesWriter(path)
    with no_space_after(len(LINE) + 20):
        writer.add_scalar("loss", 0.5, 1, 5.0)
        with pytest.raises(OSError, match="File too large"):
            writer.add_scalar("loss", 0.5, 1, 5.0)
    writer.add_scalar("loss", 0.5, 1, 5.0)
    assert path.read_bytes() == LINE * 2


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    return FailingDisk(monkeypatch, json_lines)


def tear(writer: JsonLinesWriter, disk: FailingDisk) -> None:
    """Leave a part of a line at the end of the file, on a disk that refuses to truncate it."""
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        writer.add_scalar("loss", 0.5, 2)


def add_again(path: Path, writer: JsonLinesWriter) -> None:
    writer.add_scalar("loss", 0.5, 3)


def add_by_another(path: Path, writer: JsonLinesWriter) -> None:
    JsonLinesWriter(path).add_scalar("loss", 0.5, 3)


def purge_and_add(path: Path, writer: JsonLinesWriter) -> None:
    writer.purge_from(2)
    writer.add_scalar("loss", 0.5, 3)


@pytest.mark.parametrize("then", [add_again, add_by_another, purge_and_add])
def test_a_part_of_a_line_is_removed_once_the_disk_works_again(
    then: Callable[[Path, JsonLinesWriter], None], disk: FailingDisk, path: Path, lines: Lines
) -> None:
    writer = filled(path, 1)
    tear(writer, disk)
    with pytest.raises(OSError, match="Input/output error"):
        writer.add_scalar("loss", 0.5, 2)
    disk.repair()
    then(path, writer)
    assert steps(path) == [1, 3]


# -- with hooks -------------------------------------------------------------------------------------------------------


def summaries(writer: JsonLinesWriter) -> SummarySaverHook:
    return SummarySaverHook(1, summary_writer=writer, summary_op="loss")


def test_a_training_run_that_begins_at_0_removes_no_lines(path: Path) -> None:
    trace(summaries(JsonLinesWriter(path)), losses=[0.5] * 3)
    trace(summaries(JsonLinesWriter(path)), losses=[0.25] * 2)
    assert [(line["step"], line["loss"]) for line in read(path)] == [(1, 0.5), (2, 0.5), (3, 0.5), (1, 0.25), (2, 0.25)]


def test_a_training_run_that_is_restored_at_step_0_removes_the_steps_that_it_repeats(path: Path) -> None:
    def train(loss: float) -> None:
        hooks = [summaries(JsonLinesWriter(path)), CheckpointSaverHook(path.parent, save_steps=100)]
        with MonitoredLoop(lambda: loss, hooks=hooks, checkpoint_dir=path.parent) as loop:
            loop.run()
            loop.run()
            raise KeyboardInterrupt

    for loss in (0.5, 0.25):
        with pytest.raises(KeyboardInterrupt):
            train(loss)
    assert [(line["step"], line["loss"]) for line in read(path)] == [(1, 0.25), (2, 0.25)]


def test_a_counter_without_other_hooks_removes_the_steps_that_are_repeated_too(path: Path) -> None:
    for losses, start_step in (([0.5] * 5, 0), ([0.5] * 3, 3)):
        trace(StepCounterHook(1, summary_writer=JsonLinesWriter(path)), losses=losses, start_step=start_step)
    assert steps(path) == [2, 3, 5, 6]


def test_a_resumed_training_run_removes_the_steps_that_it_repeats_and_logs_it_as_info(path: Path, lines: Lines) -> None:
    trace(summaries(JsonLinesWriter(path)), losses=[0.5] * 5)
    trace(summaries(JsonLinesWriter(path)), losses=[0.25] * 2, start_step=4)
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    message = f"{path}: removed 1 line of step 5 and later, which the training run repeats"
    assert [line for line in lines if "removed" in line[1]] == [("INFO", message)]


def test_a_step_that_is_set_by_hand_counts_as_restored(path: Path) -> None:
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


def test_hooks_with_separate_writers_for_one_file_write_one_curve(path: Path) -> None:
    for losses, start_step in (([0.5] * 4, 0), ([0.25] * 2, 1)):
        counter = StepCounterHook(1, summary_writer=JsonLinesWriter(path))
        trace(counter, summaries(JsonLinesWriter(path)), losses=losses, start_step=start_step)
    assert steps(path) == [1, 2, 3, 3]


def test_a_users_writer_that_can_purge_is_called_like_this_one() -> None:
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
    trace(StepCounterHook(1, summary_writer=tracker), losses=[0.5], start_step=7)
    trace(StepCounterHook(1, summary_writer=tracker), losses=[0.5])
    assert tracker.calls == ["from 8", 8, "from 8"]


def test_a_loop_within_a_step_of_another_removes_none_of_its_lines(path: Path) -> None:
    with MonitoredLoop(lambda: 0.5, hooks=[summaries(JsonLinesWriter(path))]) as outer:
        outer.run()
        outer.run()
        trace(summaries(JsonLinesWriter(path)), losses=[0.25], start_step=1)
        outer.run()
    assert [(line["step"], line["loss"]) for line in read(path)] == [(1, 0.5), (2, 0.5), (2, 0.25), (3, 0.5)]


def test_a_counter_within_a_step_of_another_loop_voids_none_of_its_points_in_event_files() -> None:
    writer = RecordingWriter()
    with MonitoredLoop(lambda: 0.5, hooks=[SummarySaverHook(1, summary_writer=writer, summary_op="loss")]) as loop:
        loop.run()
        trace(StepCounterHook(1, summary_writer=writer), losses=[0.25] * 2, start_step=1)
    assert len([record for record in writer.records if record[0] == "session_log"]) == 1


def test_hooks_write_every_scalar_through_the_add_points_of_a_subclass(path: Path) -> None:
    class Prefixing(JsonLinesWriter):
        def add_points(self, points: Iterable[tuple[str, Any]], step: int, walltime: float | None = None) -> None:
            super().add_points([(f"mine/{tag}", value) for tag, value in points], step, walltime)

    with Prefixing(path) as writer:
        hooks = [
            StepCounterHook(1, summary_writer=writer),
            SummarySaverHook(1, summary_writer=writer, summary_op={"loss": "loss"}),
        ]
        with MonitoredLoop(lambda: 0.5, hooks=hooks) as loop:
            loop.run()
            loop.run()
    tags = [tag for line in read(path) for tag in line if tag not in ("step", "time")]
    assert tags == ["mine/loss", "mine/global_step/sec", "mine/loss"]


# -- kills ------------------------------------------------------------------------------------------------------------


def write_for_ever(path: Path) -> None:
    writer = JsonLinesWriter(path)
    for step in itertools.count():
        writer.add_points([(f"tag{i}", 0.5) for i in range(50)], step)


def purge_and_be_killed(path: Path) -> None:
    writer: Any = filled(path, *range(5))
    os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
    writer.purge_from(2)


def write_and_be_killed(path: Path, size: int) -> None:
    """Let another process write until the file has ``size`` bytes, and kill it."""
    output = path.with_name("output")
    writing = processes.start(output, write_for_ever, path)
    try:
        wait_until(lambda: path.exists() and path.stat().st_size >= size, output.read_text)
    finally:
        writing.kill()
        writing.join()


def test_a_kill_at_any_moment_leaves_whole_lines_and_at_most_one_incomplete_line(path: Path) -> None:
    for life in range(3):
        write_and_be_killed(path, (life + 1) * 100_000)
        JsonLinesWriter(path)
        assert all(len(line) == 52 for line in read(path))


def test_a_kill_before_the_new_file_replaces_the_old_one_leaves_the_old_one(path: Path) -> None:
    assert processes.call(purge_and_be_killed, path).code == -signal.SIGKILL
    assert other_files(path) == {f"{path.name}.tmp"}
    assert steps(path) == [0, 1, 2, 3, 4]
    filled(path, 5).purge_from(2)  # the next process is restored at the same step
    assert (steps(path), other_files(path)) == ([0, 1], set())
