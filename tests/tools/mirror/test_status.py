"""``python -m torchhooks status``, on training runs of other processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import Process, call
from support.processes import start as start_process
from support.schemas import answer
from support.waiting import wait_until
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from torchhooks import (
    CheckpointSaverHook,
    JsonLinesWriter,
    MonitoredLoop,
    Session,
    SessionRunHook,
    StopAtStepHook,
    SummarySaverHook,
    list_checkpoints,
    param_norm,
)
from torchhooks.__main__ import main
from torchhooks.checkpoints.folder import inspect
from torchhooks.common.processes import start_time, system_id
from torchhooks.summary import histogram
from torchhooks.summary.tensorboard import DirectSummaryWriter
from torchhooks.tools import run_record
from torchhooks.tools.mirror import status
from torchhooks.tools.mirror.curves import read_curves
from torchhooks.tools.mirror.status import read_status, span, state_of
from torchhooks.tools.run_record import NAME, Record, read_record


@pytest.fixture(autouse=True)
def _periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what :func:`train` sets if it is called in this process."""
    monkeypatch.setattr(run_record, "PERIOD_SECS", run_record.PERIOD_SECS)


def train(folder: str, last_step: int, fails_at: int = -1, **loop_arguments: Any) -> str | None:
    """Train until ``last_step``, 100 steps a second, and return what stopped the loop."""
    run_record.PERIOD_SECS = 0.02
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> float:
        time.sleep(0.01)  # what the step takes
        if number == fails_at:
            raise ValueError("the data are broken")
        return 1.0 / (1 + loop.global_step)

    hooks = [
        StopAtStepHook(last_step=last_step),
        SummarySaverHook(save_steps=10, output_dir=folder, summary_op={"loss": param_norm()}),
        SummarySaverHook(save_steps=10, summary_writer=JsonLinesWriter(f"{folder}/c.jsonl"), summary_op={"lr": "lr"}),
        CheckpointSaverHook(folder, every_n_steps=20),
    ]
    with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=folder, **loop_arguments) as loop:
        for number in loop.until_stop(range(1_000_000)):
            loop.run(number)
    return loop.stop_reason


def has_begun(folder: Path) -> bool:
    """Return whether the training run in ``folder`` has made some steps, and has written their speed down."""
    checkpoints, record = list_checkpoints(folder), read_record(str(folder))
    return bool(checkpoints) and checkpoints[-1].step >= 40 and record is not None and (record.step or 0) >= 40


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start a training run in a process of its own, and return once it has made some steps."""
    running = []

    def start(*arguments: Any) -> Process:
        process = start_process(tmp_path / "output", train, str(tmp_path / "run"), *arguments)
        running.append(process)
        wait_until(lambda: has_begun(tmp_path / "run"), lambda: (tmp_path / "output").read_text())
        return process

    yield start
    for process in running:
        process.kill()


def printed_status(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    capsys.readouterr()
    code = main(["status", str(folder)])
    return code, dict(re.split(r"\s{2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())


def test_a_running_one_says_how_far_it_is(
    started: Callable[..., Process], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = started(100_000)
    code, said = printed_status(tmp_path / "run", capsys)
    assert code == 0
    assert re.fullmatch(rf"running, process {process.pid} on .*, since \d+ s ago", said["state"])
    assert re.fullmatch(r"\d+ of 100000 \(0%\), \d s ago", said["step"])
    assert int(said["step"].split()[0]) >= 40
    assert re.fullmatch(r"[\d.]+ steps/s, \d+ \w+ left", said["speed"])
    assert re.fullmatch(r"model.ckpt-\d+, whole, [\d,]+ bytes, \d s ago", said["checkpoint"])
    assert re.fullmatch(r"[\d.]+ at step \d+", said["loss"])
    assert re.fullmatch(r"0.1 at step \d+", said["lr"])


def test_a_killed_one_is_said_to_be(
    started: Callable[..., Process], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = started(100_000)
    process.kill()
    code, said = printed_status(tmp_path / "run", capsys)
    assert code == 1
    assert re.fullmatch(rf"killed: process {process.pid} on .* is gone, \d+ s ago or later", said["state"])


def test_a_finished_one_says_why_it_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(train, str(tmp_path), 30)
    code, said = printed_status(tmp_path, capsys)
    assert code == 0
    assert re.fullmatch(r"ended \d+ s ago: StopAtStepHook: step 30", said["state"])
    assert said["step"].startswith("30 of 30 (100%)")
    assert said["checkpoint"].startswith("model.ckpt-30, whole")


def test_the_status_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(train, str(tmp_path), 30)
    capsys.readouterr()
    assert main(["status", str(tmp_path), "--json"]) == 0
    said = answer("status", capsys.readouterr().out)
    assert (said["step"], said["state"], said["checkpoint"]["name"]) == (30, "ended", "model.ckpt-30")
    assert said["message"].endswith(" ago: StopAtStepHook: step 30")
    assert not said["is_alive"]
    assert said["record"]["stopped"] == "StopAtStepHook: step 30"
    assert said["values"]["lr"]["value"] == 0.1


def test_a_step_that_was_made_again_has_one_point(tmp_path: Path) -> None:
    train(str(tmp_path), 15)
    train(str(tmp_path), 40)
    assert [point.step for point in read_status(str(tmp_path)).curves["loss"]] == [1, 11, 16, 26, 36]


def test_the_newest_points_of_an_event_file_are_read_also_while_it_is_written(tmp_path: Path) -> None:
    writer = DirectSummaryWriter(str(tmp_path))
    ends = []
    for step in (1, 2, 3):
        writer.add_scalar("loss", 0.5, step)
        writer.flush()
        (path,) = tmp_path.iterdir()
        ends.append(path.stat().st_size)
    writer.close()
    whole = path.read_bytes()

    def steps(data: bytes) -> list[int]:
        found = read_curves({"a.tfevents": len(data)}, lambda name, start, end: data[start:end])
        return [point.step for point in found.get("loss", [])]

    assert steps(whole) == [1, 2, 3]
    assert steps(whole[:-1]) == [1, 2], "the last record is being written"
    for place in (ends[0], ends[0] + 20, ends[1] - 1):  # the length of the second record, what it is of, its checksum
        damaged = bytearray(whole)
        damaged[place] ^= 1
        assert steps(bytes(damaged)) == [1], "TensorBoard stops at a damaged record too"


def test_a_value_that_tensorflow_writes_as_a_tensor_is_a_point_too(tmp_path: Path) -> None:
    writer = EventFileWriter(str(tmp_path))
    for number, array in enumerate([np.float32(0.5), np.zeros(2, "f"), np.asarray("text"), np.int64(3)]):
        value = Summary.Value(tag=f"of {number}", tensor=make_tensor_proto(array))
        writer.add_event(Event(step=7, summary=Summary(value=[value])))
    writer.close()
    (path,) = tmp_path.iterdir()
    found = read_curves({path.name: path.stat().st_size}, lambda name, start, end: path.read_bytes()[start:end])
    assert {tag: (points[0].step, points[0].value) for tag, points in found.items()} == {
        "of 0": (7, 0.5),
        "of 3": (7, 3.0),
    }


def test_of_a_step_that_was_made_twice_the_later_point_counts() -> None:
    lines = [{"step": step, "time": 0.0, "loss": value} for step, value in [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.4)]]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    found = read_curves({"c.jsonl": len(data)}, lambda name, start, end: data[start:end])
    assert [(point.step, point.value) for point in found["loss"]] == [(1, 0.1), (2, 0.4)]


def test_the_thread_that_writes_the_record_ends_with_a_loop_that_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_record, "PERIOD_SECS", 0.02)
    training = Session()
    training.saved_to = str(tmp_path)
    record = run_record.RunRecord(training, lambda: run_record.Watched(0.0), list)
    record.begin_session(Session)
    record.start()
    del record
    wait_until(lambda: all(thread.name != "torchhooks run record" for thread in threading.enumerate()))


def test_the_thread_that_writes_the_record_ends_with_the_loop(tmp_path: Path) -> None:
    train(str(tmp_path), 5)
    wait_until(lambda: all(thread.name != "torchhooks run record" for thread in threading.enumerate()))


def test_a_failed_one_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(train, str(tmp_path), 30, 25)
    code, said = printed_status(tmp_path, capsys)
    assert code == 1
    assert re.fullmatch(r"failed \d+ s ago: ValueError: the data are broken.*", said["state"])


def test_a_checkpoint_that_is_not_whole_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(train, str(tmp_path), 50)
    os.truncate(tmp_path / "model.ckpt-50/state.pt", 100)
    _, said = printed_status(tmp_path, capsys)
    assert said["checkpoint"].startswith("model.ckpt-40, whole")
    assert "model.ckpt-50 is damaged" in said["damaged"]


def test_a_folder_without_a_run_has_the_newest_point_of_its_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"step": step, "time": 1000.0 + step, "loss": 0.5} for step in range(0, 100, 10)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "curves.jsonl").write_text(text + '{"step": 100, "ti')
    code, said = printed_status(tmp_path, capsys)
    assert code == 1
    assert said["state"] == "no process says that it trains here"
    assert said["step"].startswith("90, ")
    assert said["speed"] == "1 steps/s"
    assert said["loss"] == "0.5 at step 90"


def test_an_empty_folder_has_no_step_and_no_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = printed_status(tmp_path, capsys)
    assert (code, list(said), said["checkpoint"]) == (1, ["state", "checkpoint"], "none that is whole")


def test_a_checkpoint_that_the_saver_removes_meanwhile_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def inspect_late(path: str) -> Any:
        if path.endswith("model.ckpt-20"):
            shutil.rmtree(path)
        return inspect(path)

    train(str(tmp_path), 30)
    monkeypatch.setattr(status, "inspect", inspect_late)
    _, said = printed_status(tmp_path, capsys)
    assert said["checkpoint"].startswith("model.ckpt-30, whole")
    assert "damaged" not in said


def test_a_file_that_is_renamed_meanwhile_hides_no_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "curves.jsonl").write_text('{"step": 7, "time": 1.0, "loss": 0.5}\n')
    scandir = os.scandir

    class Entries(list[Any]):
        def __enter__(self) -> list[Any]:
            return self

        def __exit__(self, *error: object) -> None:
            """Nothing is open."""

    def with_gone(path: str) -> Any:
        gone = tmp_path / ".run.json.tmp"
        gone.touch()
        with scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        gone.unlink()
        return Entries(found)

    monkeypatch.setattr(os, "scandir", with_gone)
    assert list(read_status(str(tmp_path)).curves) == ["loss"]


def test_a_histogram_is_no_curve(tmp_path: Path) -> None:
    model, ops = torch.nn.Linear(4, 1), {"weights": histogram("weights", "weight"), "norm": param_norm()}
    saving = SummarySaverHook(save_steps=1, output_dir=tmp_path, summary_op=ops)
    with MonitoredLoop(lambda: None, model, hooks=[saving]) as loop:
        loop.run()
    assert list(read_status(str(tmp_path)).curves) == ["norm"]


def test_a_loop_that_saves_nothing_writes_no_record(tmp_path: Path) -> None:
    train(str(tmp_path), 20)
    (tmp_path / NAME).unlink()
    model = torch.nn.Linear(4, 1)
    with MonitoredLoop(lambda: 0, model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoint_dir=tmp_path):
        pass
    assert not (tmp_path / NAME).exists()


def test_a_record_that_cannot_be_written_is_a_warning(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    (tmp_path / f"{NAME}.tmp").mkdir()
    assert train(str(tmp_path), 20) == "StopAtStepHook: step 20"
    assert len([text for level, text in lines if level == "WARNING" and f"{NAME} cannot be written" in text]) == 1


def test_a_silent_process_of_another_machine_is_out_of_reach() -> None:
    now = time.time()
    record = Record(1, "another", 1, now - 500, 0, now - 100, 7, now - 100)
    silent = state_of(record)
    assert silent.word == "silent"
    assert "since 100 s ago" in silent.text
    assert state_of(record._replace(time=now)).word == "running"
    stalled = record._replace(time=now, run_time=now - 400, stalled="in run 8 (waits for data)")
    assert state_of(stalled) == (
        "stalled",
        "stalled for 6 min in run 8 (waits for data), process 1 on another",
    )


class Hangs(SessionRunHook):
    """Calls a function in one of its methods."""

    def __init__(self, method: str, call: Callable[[], object]) -> None:
        setattr(self, method, lambda *_: call())


def train_with(hook: SessionRunHook, folder: Path) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = [CheckpointSaverHook(folder, save_steps=100), hook]
    with MonitoredLoop(bool, model, optimizer, hooks=hooks, checkpoint_dir=folder) as loop:
        for number in loop.until_stop(range(1, 4)):
            loop.run(number)


@pytest.mark.parametrize(
    ("method", "word", "text", "step"),
    [
        ("begin", "running", "running, process", None),
        ("after_create_session", "running", "running, process", None),
        ("end", "running", "running, process", 0),
        ("teardown", "closing", "closes after data ended, process", 3),
    ],
)
def test_the_record_is_true_from_the_first_call_of_a_hook_to_the_last(
    method: str, word: str, text: str, step: int | None, tmp_path: Path
) -> None:
    found: list[Any] = []
    folder = tmp_path / "run"
    train_with(Hangs(method, lambda: found.append(read_status(str(folder)))), folder)
    (status,) = found
    assert (status.state.word, status.is_well) == (word, True)
    assert status.state.text.startswith(text)
    assert status.record.step == step
    assert read_status(str(folder)).state.word == "ended"


def test_a_process_that_fails_at_once_leaves_the_record_of_the_one_that_trains_there(
    record: Record, tmp_path: Path
) -> None:
    def fail() -> None:
        raise OSError("started by mistake")

    with subprocess.Popen(["sleep", "60"]) as process:
        training = record._replace(pid=process.pid, process_start=start_time(process.pid))
        (tmp_path / NAME).write_text(json.dumps(training._asdict()))
        with pytest.raises(OSError, match="started by mistake"):
            train_with(Hangs("begin", fail), tmp_path)
        assert read_record(str(tmp_path)) == training
        train_with(Hangs("begin", bool), tmp_path)  # it trains there too: a WARNING says so
        assert read_status(str(tmp_path)).state.word == "ended"
        process.kill()
    (tmp_path / NAME).write_text(json.dumps(training._asdict()))
    with pytest.raises(OSError, match="started by mistake"):
        train_with(Hangs("begin", fail), tmp_path)
    assert read_status(str(tmp_path)).state.word == "failed"


def test_a_teardown_that_fails_is_a_failure(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("the store is full")

    with pytest.raises(OSError, match="the store is full"):
        train_with(Hangs("teardown", fail), tmp_path)
    status = read_status(str(tmp_path))
    assert status.state.word == "failed"
    assert status.state.text.endswith("OSError: the store is full")


@pytest.fixture
def record() -> Record:
    """What this process would write of a loop now."""
    now = time.time()
    made = Record(os.getpid(), socket.gethostname(), 2, now - 500, 0, now, 7, now)
    return made._replace(process_start=start_time(os.getpid()), system=system_id())


def test_a_process_is_known_by_more_than_its_number(record: Record) -> None:
    assert state_of(record).word == "running"
    assert state_of(record._replace(process_start=record.process_start + 1)).word == "killed"
    assert state_of(record._replace(system="another boot pid:[1]")).word == "running", "as fresh as it is"
    closing = record._replace(process_start=record.process_start + 1, stopped="data ended")
    assert state_of(closing).text.startswith("killed while it closes (data ended): process")


def test_what_a_process_that_writes_nothing_may_do(record: Record) -> None:
    old = record._replace(time=record.time - 40)
    assert state_of(old).word == "silent"
    assert "is there, but has written nothing for 40 s" in state_of(old).text
    assert state_of(old._replace(stopped="data ended")) == (
        "stalled",
        f"stalled for 40 s while it closes (data ended), process {os.getpid()} on {record.host}",
    )
    elsewhere = old._replace(system="another boot pid:[1]", stopped="data ended")
    assert "since 40 s ago while it closes (data ended): killed, or out of reach" in state_of(elsewhere).text
    in_teardown = record._replace(stopped="data ended", run_time=record.time - 400, stalled="after run 7 (in teardown)")
    assert state_of(in_teardown).text.startswith("stalled for 6 min after run 7 (in teardown) while it closes")


def test_a_killed_process_may_have_stood_still(record: Record, tmp_path: Path) -> None:
    gone = record._replace(process_start=record.process_start + 1, stalled="in run 8 (in the step)", report="no run")
    assert state_of(gone).text.startswith("killed, stalled in run 8 (in the step): process")
    (tmp_path / NAME).write_text(json.dumps(gone._asdict()))
    stacks = tmp_path / ".stall-rank-1.txt"
    stacks.write_text("stacks")
    os.utime(stacks, (time.time() - 10,) * 2)
    status = read_status(str(tmp_path))
    assert status.state.word == "killed"
    assert status.state.text.endswith(f"; a call kept Python's global lock on rank 1, {stacks} has its stacks")
    (tmp_path / NAME).write_text(json.dumps(gone._replace(world_size=1)._asdict()))
    assert "global lock" not in read_status(str(tmp_path)).state.text, "an earlier job had that rank"


def test_a_time_that_is_left_for_ever_is_not_known(record: Record, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps(record._replace(steps_per_sec=1e-310, last_step=10**9)._asdict()))
    assert read_status(str(tmp_path)).secs_left is None
    assert main(["status", str(tmp_path)]) == 0


@pytest.mark.parametrize(("failed", "code"), [(False, 0), (True, 1)])
def test_the_exit_status_of_a_loop_that_closes(failed: bool, code: int, record: Record, tmp_path: Path) -> None:
    closing = record._replace(stopped="data ended", failed=failed)
    (tmp_path / NAME).write_text(json.dumps(closing._asdict()))
    assert main(["status", str(tmp_path)]) == code


def test_a_stopped_process_is_said_to_be(record: Record) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        stopped = record._replace(pid=process.pid, process_start=start_time(process.pid))
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(stopped).word == "stalled")
        assert "is stopped by a signal, and has written nothing for 0 s" in state_of(stopped).text
        process.kill()
        wait_until(lambda: state_of(stopped).word == "killed")  # nobody has waited for it


def test_a_record_of_an_earlier_version_is_read(record: Record, tmp_path: Path) -> None:
    known = record._asdict()
    for name in ("ended", "process_start", "system"):
        del known[name]
    (tmp_path / NAME).write_text(json.dumps(known))
    assert read_status(str(tmp_path)).state.word == "running"


@pytest.mark.parametrize("between", ["has_manifest", "is_checkpoint"])
def test_a_status_that_a_save_comes_in_between_has_a_checkpoint(
    between: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saver replaces the only checkpoint after the folder was listed, and before what is in it is read."""
    train(str(tmp_path), 10)
    old, new = tmp_path / "model.ckpt-0", tmp_path / "model.ckpt-10"
    new.rename(tmp_path / ".later")
    called = getattr(status, between)

    def replace(path: str) -> bool:
        if old.exists():
            shutil.rmtree(old)
            (tmp_path / ".later").rename(new)
        return bool(called(path))

    monkeypatch.setattr(status, between, replace)
    found = read_status(str(tmp_path))
    assert found.checkpoint is not None
    assert (found.checkpoint.name in (old.name, new.name), found.damaged) == (True, [])


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: value} for name in ("pid", "time", "world_size", "failed") for value in ("x", None)),
        {"step": "x"},
        {"last_step": "x"},
        {"steps_per_sec": "x"},
        {"stopped": 5},
    ],
)
def test_a_damaged_record_is_none(tmp_path: Path, wrong: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    train(str(tmp_path), 10)
    path = tmp_path / NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "stopped": None, **wrong}))
    assert main(["status", str(tmp_path)]) == 1
    assert "no process" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("secs", "text"), [(0.4, "0 s"), (119, "119 s"), (7199, "119 min"), (8e4, "22 h"), (2e5, "2 d")]
)
def test_a_length_of_time_has_one_unit(secs: float, text: str) -> None:
    assert span(secs) == text
