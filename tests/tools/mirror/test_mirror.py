"""MirrorHook: a training run continues on another machine from its copy in a store."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kills import kill_many
from support import processes
from support import proxy as proxies
from support.copies import FolderPlace, S3Place, new_copy, whole
from support.packages import import_or_skip
from support.rank_processes import run_ranks
from support.s3 import S3Server
from support.waiting import wait_until

import torchhooks.tools.mirror.copy
import torchhooks.tools.mirror.hook
import torchhooks.tools.mirror.layout
from torchhooks import (
    BestCheckpointHook,
    CheckpointError,
    CheckpointSaverHook,
    JsonLinesWriter,
    MirrorHook,
    MonitoredLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    Ranks,
    Saver,
    SessionRunHook,
    SummarySaverHook,
    list_checkpoints,
)

pytest_plugins = ["support.copy_fixtures"]
STEPS, EVERY = 12, 4
LONG_SECS = 60.0  # waited only if something is broken
Lines = list[tuple[str, str]]


def look_often() -> None:
    torchhooks.tools.mirror.copy.LOOK_SECS = torchhooks.tools.mirror.hook.FIRST_PAUSE_SECS = 0.01
    torchhooks.tools.mirror.layout.PAUSES_SECS = (0.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchhooks.tools.mirror.copy, "LOOK_SECS", 0.01)
    monkeypatch.setattr(torchhooks.tools.mirror.hook, "FIRST_PAUSE_SECS", 0.01)
    monkeypatch.setattr(torchhooks.tools.mirror.layout, "PAUSES_SECS", (0.0, 0.0))


class Calls(SessionRunHook):
    """Calls a function after each run, with the step, and one when the loop has ended."""

    def __init__(self, after_run: Callable[[int], object], at_end: Callable[[], object]) -> None:
        self._after_run, self._at_end = after_run, at_end

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._after_run(run_context.session.global_step)

    def teardown(self) -> None:
        self._at_end()


def train(
    folder: str | Path,
    url: str,
    options: Mapping[str, Any],
    after_run: Callable[[int], object] = bool,
    at_end: Callable[[], object] = bool,
    steps: int = STEPS,
    signals: tuple[str, ...] = (),
    hooks: tuple[SessionRunHook, ...] = (),
    **mirror: Any,
) -> str:
    """Train to ``steps``, and return the hash of the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batches = list(torch.randn(steps, 8, 4))

    def step(inputs: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    mirror_hook = MirrorHook(folder, url, storage_options=options, **{"every_n_secs": 0.0, **mirror})
    loss = {"loss": "loss"}
    all_hooks: list[SessionRunHook] = [
        SummarySaverHook(save_steps=1, summary_writer=JsonLinesWriter(f"{folder}/curves.jsonl"), summary_op=loss),
        CheckpointSaverHook(folder, save_steps=EVERY, saver=Saver(max_to_keep=2)),
        *hooks,
        Calls(after_run, at_end),  # before the mirror's teardown, which waits for the upload
        mirror_hook,
    ]
    with MonitoredLoop(step, model, optimizer, hooks=all_hooks, checkpoint_dir=folder, signals=signals) as loop:
        for inputs in loop.until_stop(batches):
            loop.run(inputs)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(weights).hexdigest()


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "curves.jsonl").read_text().splitlines()]


def texts(lines: Lines, level: str) -> list[str]:
    return [text for each, text in lines if each == level]


# -- another machine --------------------------------------------------------------------------------------------------


def kill_at(step: int, folder: str, url: str, options: dict[str, Any], store: str | None) -> None:
    """Train, and kill the process at ``step``, once the copy has all that there was four steps before."""
    look_often()

    def after_run(made: int) -> None:
        if made == step:
            names = new_names(url, options, store)
            wait_until(lambda: any(f"model.ckpt-{step - 1}~" in name and "manifest" in name for name in names()))
            os.kill(os.getpid(), signal.SIGKILL)

    train(folder, url, options, after_run)


def new_names(url: str, options: dict[str, Any], store: str | None) -> Callable[[], list[str]]:
    found = torchhooks.tools.mirror.store.Store(url, options)
    return lambda: list(found.list())


def test_an_empty_machine_continues_with_the_same_bits_and_curves(place: FolderPlace, tmp_path: Path) -> None:
    expected = train(tmp_path / "whole", (tmp_path / "other").as_uri(), {})
    arguments = (9, str(tmp_path / "one"), place.url, place.options, None)
    ended = processes.call(kill_at, *arguments)
    assert ended.code == -signal.SIGKILL, ended.output
    assert train(tmp_path / "two", place.url, place.options) == expected
    assert steps_in(tmp_path / "two")[-STEPS + 8 :] == list(range(9, STEPS + 1))
    assert set(whole(place)) == {"model.ckpt-8", "model.ckpt-12"}


@pytest.mark.slow
def test_kills_at_drawn_moments_cost_neither_bits_nor_whole_checkpoints_of_the_copy(server: S3Server) -> None:
    counted = kill_many(3, server)
    assert counted["kills"] >= 3


def rank_main(rank: int, folder: str, url: str) -> list[str]:
    os.makedirs(f"{folder}/node-{rank}", exist_ok=True)
    os.chdir(f"{folder}/node-{rank}")
    hooks = [CheckpointSaverHook("run", save_steps=EVERY), MirrorHook("run", url)]
    model = torch.nn.Linear(1, 1)
    with MonitoredLoop(lambda: 0.0, model, hooks=hooks, checkpoint_dir="run", ranks=Ranks()) as loop:
        found = [checkpoint.name for checkpoint in list_checkpoints("run") if checkpoint.step]
        for _ in loop.until_stop(range(EVERY), resume=False):
            loop.run()
    return [*found, f"step {loop.global_step}"]


@pytest.mark.ranks
def test_each_rank_with_a_folder_of_its_own_gets_the_checkpoint(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/copy"
    for number, expected in enumerate([["step 4"], ["model.ckpt-4", "step 8"]]):
        nodes = tmp_path / f"nodes-{number}"
        nodes.mkdir()
        ended = run_ranks(nodes, 2, rank_main, str(nodes), url)
        assert [(rank.code, rank.value[-2:]) for rank in ended] == [(0, expected[-2:])] * 2, ended


def test_best_checkpoints_are_copied_and_come_back(place: FolderPlace, tmp_path: Path) -> None:
    def hooks(folder: Path) -> list[SessionRunHook]:
        return [
            BestCheckpointHook(folder, "loss", mode="min", every_n_steps=1),
            CheckpointSaverHook(folder, save_steps=EVERY),
            MirrorHook(folder, place.url, storage_options=place.options),
        ]

    model = torch.nn.Linear(1, 1)
    losses = iter([3.0, 1.0, 2.0, 4.0])
    with MonitoredLoop(lambda: next(losses), model, hooks=hooks(tmp_path / "a"), checkpoint_dir=tmp_path / "a") as loop:
        while loop.global_step < 4:
            loop.run()
    with MonitoredLoop(lambda: 2.5, model, hooks=hooks(tmp_path / "b"), checkpoint_dir=tmp_path / "b") as loop:
        assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "b/best")] == [2]
        loop.run()
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "b/best")] == [2]


def test_the_copy_brings_no_request_for_an_autopsy_back_that_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin again before the step with the NaN, and abandon what was trained since."""
    monkeypatch.chdir(tmp_path)

    def begin(steps: int, nan_at: int | None = None) -> int:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)

        def step(inputs: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(inputs).square().mean()
            return (loss * 0 - 1).sqrt() if loop.global_step + 1 == nan_at else loss

        hooks = [NanTensorHook("loss"), CheckpointSaverHook("run", save_steps=10)]
        hooks.append(MirrorHook("run", (tmp_path / "copy").as_uri()))
        with MonitoredLoop(step, model, hooks=hooks, checkpoint_dir="run") as loop:
            begun_at = loop.global_step
            for inputs in loop.until_stop(torch.ones(steps, 4, 4)):
                loop.run(inputs)
        return begun_at

    for _ in range(2):
        with pytest.raises(NanLossDuringTrainingError):
            begin(30, nan_at=15)
    assert Path("run/nan-15/report.md").exists()
    assert [begin(30), begin(40)] == [10, 30]


@pytest.mark.slow
def test_a_folder_of_1_000_files_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    (run / "traces").mkdir(parents=True)
    for number in range(1_000):
        (run / "traces" / f"{number}.json").write_text("{}")
    place = FolderPlace(tmp_path / "store")
    monkeypatch.setattr(torchhooks.tools.mirror.copy, "LOOK_SECS", 5.0)
    train(run, place.url, {})
    assert len(place.names()) > 1_000
    written = {name: os.stat(place.path / name).st_mtime_ns for name in place.names() if "traces" in name}
    train(run, place.url, {})
    assert {name: os.stat(place.path / name).st_mtime_ns for name in written} == written


# -- the start --------------------------------------------------------------------------------------------------------


def test_a_store_that_does_not_answer_at_the_start_is_named_and_a_signal_ends_the_wait(
    s3: S3Place, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchhooks.tools.mirror.hook, "_LINE_SECS", 0.1)
    free = threading.Event()
    delivered: list[signal.Signals] = []
    s3.fault("GET", "mirror.json", proxies.waiting_for(free))
    monkeypatch.setattr(signal, "raise_signal", delivered.append)

    def interrupt() -> None:
        wait_until(lambda: any("still waiting" in text for _, text in lines))
        os.kill(os.getpid(), signal.SIGTERM)

    sending = threading.Thread(target=interrupt)
    sending.start()
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=f"SIGTERM has ended the wait for {s3.url}"):
        train(tmp_path / "run", s3.url, s3.options, signals=("SIGTERM",))
    assert time.monotonic() - began < LONG_SECS / 2
    assert delivered == [signal.SIGTERM]
    assert ("INFO", f"still waiting for {s3.url}, since 0.1 s") in lines
    assert list_checkpoints(tmp_path / "run") == []
    sending.join()
    free.set()
    wait_for_threads()


def wait_for_threads() -> None:
    wait_until(lambda: all(thread.name != "torchhooks mirror" for thread in threading.enumerate()))


def test_a_store_that_is_gone_at_the_start_starts_nothing_over(s3: S3Place, tmp_path: Path, lines: Lines) -> None:
    s3.proxy.fault = lambda method, path: proxies.unavailable
    run = tmp_path / "run"
    with pytest.raises(CheckpointError, match=f"{s3.url} cannot be read .*, and {run} has no checkpoint") as raised:
        train(run, s3.url, s3.options)
    assert raised.value.__context__ is None or raised.value.__suppress_context__

    train(run, (tmp_path / "other").as_uri(), {}, steps=2)
    train(run, s3.url, s3.options, steps=4, grace_secs=0.1)  # it has a checkpoint of its own
    assert any(f"the loop continues from {run}, which may be older than the copy" in text for _, text in lines)
    [error] = texts(lines, "ERROR")
    assert f"{s3.url} is not complete after 0.1 s, it lacks model.ckpt-4, curves.jsonl" in error
    wait_for_threads()

    def come_back(step: int) -> None:
        s3.proxy.fault = lambda method, path: None

    train(run, s3.url, s3.options, come_back)
    assert whole(s3)[-1] == "model.ckpt-12"


# -- while it trains --------------------------------------------------------------------------------------------------


def test_training_does_not_wait_for_the_store_and_the_end_names_what_is_missing(
    s3: S3Place, tmp_path: Path, lines: Lines
) -> None:
    free = threading.Event()
    s3.fault("PUT", "state.pt", proxies.waiting_for(free))
    run = tmp_path / "my run"
    train(run, s3.url, s3.options, grace_secs=0.1)
    assert json.loads((run / ".run.json").read_text())["step"] == STEPS
    [error] = texts(lines, "ERROR")
    assert error.startswith(f"{s3.url} is not complete after 0.1 s, it lacks model.ckpt-12, ")
    assert error.endswith(
        f"python -m torchhooks mirror '{run}' {s3.url} (configure fsspec for it with the storage options "
        "client_kwargs, config_kwargs, endpoint_url, key, secret, skip_instance_cache)"
    )
    free.set()
    wait_for_threads()


def test_what_is_missing_is_named_if_the_thread_ends_for_lack_of_time_before_the_loop_looks(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = property(lambda self: self.deadline is not None)
    monkeypatch.setattr(torchhooks.tools.mirror.copy.Copy, "is_over", is_over)
    # Neither checkpoints nor files: whether the thread comes to the files before the end is a matter of luck.
    monkeypatch.setattr(torchhooks.tools.mirror.copy.Copy, "push_checkpoints", lambda self: [])
    monkeypatch.setattr(torchhooks.tools.mirror.copy.Copy, "push_files", lambda self, is_last: None)
    copy = (tmp_path / "copy").as_uri()
    train(tmp_path / "run", copy, {}, grace_secs=20)
    [error] = texts(lines, "ERROR")
    assert error.startswith(f"{copy} is not complete after 20 s, it lacks model.ckpt-12, curves.jsonl, ")


def test_a_server_that_fails_and_comes_back_is_one_warning_and_one_line_and_gets_everything(
    s3: S3Place, tmp_path: Path, lines: Lines
) -> None:
    def after_run(step: int) -> None:
        if step == 2:
            s3.proxy.fault = lambda method, path: proxies.unavailable
            (tmp_path / "run/new.txt").write_text("to copy")
            wait_until(lambda: any("cannot be written" in text for _, text in lines))
        if step == 10:
            s3.proxy.fault = lambda method, path: None

    train(tmp_path / "run", s3.url, s3.options, after_run)
    [warning] = [text for text in texts(lines, "WARNING") if "is late" not in text]  # as it is, then
    assert re.match(rf"{s3.url} cannot be written \(\w+: .*\): training goes on, and it is tried again", warning)
    assert sum(f"{s3.url} can be written again" in text for text in texts(lines, "INFO")) == 1
    assert whole(s3)[-1] == "model.ckpt-12"
    assert s3.read("curves.jsonl") == (tmp_path / "run/curves.jsonl").read_bytes()
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not re.search("a-key-of-tests|a-secret-of-tests", f"{lines}{files}")


def test_a_newer_job_ends_the_copying_of_an_older_one_with_a_line(
    place: FolderPlace, tmp_path: Path, lines: Lines
) -> None:
    def after_run(step: int) -> None:
        if step == 6:
            wait_until(lambda: whole(place)[-1:] == ["model.ckpt-4"])  # no file is on its way
            new_copy(tmp_path / "other", place)

    train(tmp_path / "run", place.url, place.options, after_run)
    assert texts(lines, "ERROR") == [f"another job writes to {place.url}: this one copies nothing to it any more"]


def test_what_the_loop_says_of_itself_is_copied_whatever_the_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchhooks.tools.mirror.hook, "RECORD_SECS", 0.0)
    place = FolderPlace(tmp_path / "store")

    def after_run(step: int) -> None:
        if step == 2:
            wait_until(lambda: "files.json" in place.names())  # of the first round
            (tmp_path / "run/.run.json").write_text("{}")
            (tmp_path / "run/other.txt").write_text("not yet")
            wait_until(lambda: ".run.json" in place.names() and place.read(".run.json") == b"{}")
            assert "other.txt" not in place.names()

    train(tmp_path / "run", place.url, {}, after_run, every_n_secs=1e6)
    assert json.loads(place.read(".run.json"))["stopped"] == "data ended"


# -- the end ----------------------------------------------------------------------------------------------------------


def stopped_by_sigterm(folder: str, url: str, options: dict[str, Any]) -> None:
    look_often()
    torchhooks.tools.mirror.copy.LOOK_SECS = LONG_SECS  # only the begin and the end of the loop upload

    def after_run(step: int) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    train(folder, url, options, after_run, signals=("SIGTERM",))


def test_a_signal_uploads_the_last_checkpoint_before_the_process_ends(place: FolderPlace, tmp_path: Path) -> None:
    ended = processes.call(stopped_by_sigterm, str(tmp_path / "run"), place.url, place.options)
    assert ended.code == -signal.SIGTERM, ended.output
    assert whole(place)[-1] == "model.ckpt-6"
    assert b'"stopped": "signal SIGTERM"' in place.read(".run.json")


# -- arguments --------------------------------------------------------------------------------------------------------


class WithToken(MirrorHook):
    def __init__(self, token: str) -> None:
        super().__init__("run", "memory://KEY12:SECRET34@bucket/run", storage_options={"x": token}, grace_secs=0.2)


def test_credentials_are_in_no_repr_and_no_error() -> None:
    import_or_skip("s3fs")
    options = {"secret": "SECRET78", "endpoint_url": "http://127.0.0.1:9"}
    hook = MirrorHook("run", "s3://KEY12:SECRET34@bucket/run", storage_options=options, grace_secs=0.2)
    assert repr(hook) == "MirrorHook('run', url='s3://bucket/run', grace_secs=0.2)"
    subclassed = WithToken("SECRET56")
    assert repr(subclassed) == "WithToken('run', url='memory://bucket/run', grace_secs=0.2)"
    assert "SECRET" not in str(subclassed.created_with)
    with pytest.raises(TypeError) as wrong:
        MirrorHook("run", "s3://KEY12:SECRET34@bucket/run", every_secs=3)  # type: ignore[call-arg]
    assert "SECRET" not in str(wrong.value)


def test_wrong_arguments_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be an address, such as 's3://bucket/run-17'"):
        MirrorHook(tmp_path, "bucket/run-17")
    with pytest.raises(ValueError, match=r"MirrorHook\(url=...\)"):
        MirrorHook("s3://bucket/run-17")
    with pytest.raises(ValueError, match="nosuch"):
        MirrorHook(tmp_path, "nosuch://bucket")
    with pytest.raises(ValueError, match="keep_remote=0"):
        MirrorHook(tmp_path, "memory://bucket", keep_remote=0)
    with pytest.raises(ValueError, match=r"MirrorHook\(url='memory://bucket'\) has no checkpoint_dir"):
        MonitoredLoop(print, hooks=[MirrorHook(url="memory://bucket")])


def test_a_hook_that_did_not_begin_or_has_ended_has_nothing_to_tear_down(tmp_path: Path) -> None:
    hook = MirrorHook(tmp_path / "run", (tmp_path / "store").as_uri())
    hook.teardown()
    with MonitoredLoop(lambda: 0, torch.nn.Linear(2, 1), hooks=[CheckpointSaverHook(tmp_path / "run", 9), hook]):
        pass
    hook.teardown()
    wait_for_threads()


def test_without_a_folder_that_of_the_loop_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = FolderPlace(tmp_path / "store")
    hooks = [CheckpointSaverHook(save_steps=1), MirrorHook(url=place.url)]
    for begin, place_given in enumerate(["run", "run/model.ckpt-1"]):  # a checkpoint is in the folder
        with MonitoredLoop(lambda: 0, torch.nn.Linear(2, 1), hooks=hooks, checkpoint_dir=place_given) as loop:
            assert loop.global_step == begin
            loop.run()
        assert whole(place)[-1] == f"model.ckpt-{begin + 1}"


@pytest.mark.parametrize(("folder", "warns"), [("other", True), ("run/best", True), ("run", False), (".", False)])
def test_a_copy_of_another_folder_than_the_one_with_the_checkpoints_is_a_warning(
    folder: str, warns: bool, lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"memory://copies/{folder.strip('.')}/{warns}"
    hooks = [CheckpointSaverHook("run", save_steps=10), MirrorHook(folder, url)]
    with MonitoredLoop(print, torch.nn.Linear(1, 1), hooks=hooks, checkpoint_dir="run"):
        pass
    text = f"the checkpoints of this loop are in {Path('run').absolute()}, of which {url} is no copy"
    assert any(line.startswith(text) for _, line in lines) == warns
