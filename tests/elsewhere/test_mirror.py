"""MirrorHook: a training run continues on another machine from its copy in a store."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import processes
from support.events import curve
from support.rank_processes import run_ranks
from support.s3 import S3Server

import torchhooks.common.files
import torchhooks.elsewhere.mirror
from torchhooks import (
    AbortedError,
    BestCheckpointHook,
    CheckpointError,
    CheckpointSaverHook,
    JsonLinesWriter,
    MirrorHook,
    MonitoredLoop,
    Ranks,
    Saver,
    SessionRunHook,
    SummarySaverHook,
    latest_checkpoint,
    list_checkpoints,
)
from torchhooks.__main__ import main
from torchhooks.elsewhere.copy import Copy
from torchhooks.elsewhere.store import Secrets, Store

STEPS, EVERY = 12, 4
PERIOD_SECS = 0.01


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchhooks.elsewhere.mirror, "LOOK_SECS", PERIOD_SECS)
    monkeypatch.setattr(torchhooks.elsewhere.mirror, "FIRST_PAUSE_SECS", PERIOD_SECS)


class ObservedStore(Store):
    """A store that tells ``before`` of each call, and knows which checkpoints are whole in it."""

    def __init__(self, url: str, options: dict[str, Any], before: Callable[[int, str], object] = lambda *_: None):
        super().__init__(url, options)
        self.calls: list[str] = []
        self.whole: list[str] = []
        self._changed = threading.Condition()
        self._before = before

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self._before(len(self.calls), name)

    def sizes(self) -> dict[str, int]:
        self._call("sizes")
        return super().sizes()

    def put(self, path: str, name: str) -> None:
        self._call(f"put {name}")
        super().put(path, name)
        if name.endswith("manifest.json"):
            with self._changed:
                self.whole.append(name.rpartition("~")[0])
                self._changed.notify_all()

    def wait_for(self, is_so: Callable[[list[str]], object]) -> None:
        """Wait until ``is_so`` of the names of the checkpoints that are whole."""
        with self._changed:
            assert self._changed.wait_for(lambda: is_so(self.whole), 30)

    def get(self, name: str, path: str) -> None:
        self._call(f"get {name}")
        super().get(name, path)

    def remove(self, name: str) -> None:
        self._call(f"remove {name}")
        super().remove(name)

    def put_many(self, pairs: Any) -> None:
        self._call("put_many")
        super().put_many(pairs)

    def get_many(self, pairs: Any) -> None:
        self._call("get_many")
        super().get_many(pairs)


class WaitsForCopy(SessionRunHook):
    """Has training wait until each checkpoint is whole in the copy, so that the calls are always the same."""

    def __init__(self, folder: str, store: ObservedStore) -> None:
        self._folder, self._store = folder, store

    def after_run(self, run_context: Any, run_values: Any) -> None:
        newest = latest_checkpoint(self._folder)
        if newest:
            self._store.wait_for(lambda whole: os.path.basename(newest) in whole)


class AtEnd(SessionRunHook):
    """Calls a function when the hooks before it have ended."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def end(self, session: Any) -> None:
        self._call()


class SignalsAt(SessionRunHook):
    """Sends SIGTERM after the run that makes ``step``, once the copy has an earlier checkpoint."""

    def __init__(self, step: int, store: ObservedStore) -> None:
        self._step, self._store = step, store

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if run_context.session.global_step == self._step:
            self._store.wait_for(bool)
            os.kill(os.getpid(), signal.SIGTERM)


def train(
    folder: str,
    url: str,
    options: dict[str, Any],
    before: Callable[[int, str], object] = lambda *_: None,
    steps: int = STEPS,
    waits: bool = True,
    at_end: Callable[[], object] = lambda: None,
    terminated_at: int = 0,
    **mirror: Any,
) -> tuple[str, ObservedStore]:
    """Train to ``steps``, and return the hash of the weights, and the store."""
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

    hook = MirrorHook(folder, url, storage_options=options, every_n_secs=0.0, **mirror)
    hook.store = store = ObservedStore(url, options, before)
    loss = {"loss": "loss"}
    hooks: list[SessionRunHook] = [
        SummarySaverHook(save_steps=1, output_dir=folder, summary_op=loss),
        SummarySaverHook(save_steps=1, summary_writer=JsonLinesWriter(f"{folder}/curves.jsonl"), summary_op=loss),
        CheckpointSaverHook(folder, save_steps=EVERY, saver=Saver(max_to_keep=2)),
        hook,
    ]
    if waits:
        hooks.append(WaitsForCopy(folder, store))
    signals = ["SIGTERM"] if terminated_at else []
    hooks += [AtEnd(at_end), SignalsAt(terminated_at, store)]
    with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=folder, signals=signals) as loop:
        for inputs in loop.until_stop(batches):
            loop.run(inputs)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(weights).hexdigest(), store


def train_and_tell(
    result: str,
    folder: str,
    url: str,
    options: dict[str, Any],
    kill_at: int | str = 0,
    resumed: threading.Barrier | None = None,
) -> None:
    """Call :func:`train` in a process of its own, and kill the process in a call of the store.

    The call is a number, or a pattern of its name. The process uploads once it and the others are ``resumed``.
    """
    torchhooks.elsewhere.mirror.LOOK_SECS = torchhooks.elsewhere.mirror.FIRST_PAUSE_SECS = PERIOD_SECS
    waiting = [] if resumed is None else [resumed]

    def before(number: int, name: str) -> None:
        if number == kill_at or (isinstance(kill_at, str) and re.match(kill_at, name)):
            os.kill(os.getpid(), signal.SIGKILL)
        if waiting and name.startswith(("put", "remove")):
            waiting.pop().wait(60)

    weights, store = train(folder, url, options, before)
    Path(result).write_text(json.dumps([weights, store.calls]))


def killed_at(kill_at: int | str, result: str, folder: str, url: str, options: dict[str, Any]) -> None:
    train_and_tell(result, folder, url, options, kill_at)


def steps_in(folder: Path) -> tuple[list[int], list[int]]:
    lines = (folder / "curves.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines], [step for step, _ in curve(folder, "loss")]


@pytest.fixture(scope="module")
def uninterrupted(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """The weights of a training run that nothing happened to, and its calls of the store."""
    folder = tmp_path_factory.mktemp("whole")
    processes.call(train_and_tell, f"{folder}/result", f"{folder}/run", server.new_url(), server.options)
    weights, calls = json.loads((folder / "result").read_text())
    return weights, calls


def check_continues(server: S3Server, url: str, folder: Path, uninterrupted: tuple[str, list[str]]) -> None:
    ended = processes.call(train_and_tell, f"{folder}.result", str(folder), url, server.options)
    assert ended.code == 0, ended.output
    assert json.loads(Path(f"{folder}.result").read_text())[0] == uninterrupted[0]
    every = list(range(1, STEPS + 1))
    assert steps_in(folder) == (every, every)


def test_an_empty_machine_continues_with_the_same_bits_and_curves(
    server: S3Server, tmp_path: Path, uninterrupted: tuple[str, list[str]]
) -> None:
    url = server.new_url()
    second = "put model.ckpt-8~.*manifest"
    ended = processes.call(killed_at, second, f"{tmp_path}/result", f"{tmp_path}/one", url, server.options)
    assert ended.code == -signal.SIGKILL, ended.output
    check_continues(server, url, tmp_path / "two", uninterrupted)


KILLS = [pytest.param(number, marks=() if number % 8 == 3 else pytest.mark.exhaustive) for number in range(1, 36)]


@pytest.mark.parametrize("number", KILLS)
def test_two_machines_in_a_row_that_are_killed_at_any_call_of_the_store(
    server: S3Server, tmp_path: Path, uninterrupted: tuple[str, list[str]], number: int
) -> None:
    url = server.new_url()
    for machine in ("one", "two"):
        arguments = (f"{tmp_path}/result", f"{tmp_path}/{machine}", url, server.options)
        processes.call(killed_at, number, *arguments)
    check_continues(server, url, tmp_path / "three", uninterrupted)


def test_the_kills_reach_every_call(uninterrupted: tuple[str, list[str]]) -> None:
    assert len(uninterrupted[1]) <= len(KILLS)


def test_two_processes_resume_from_one_copy(
    server: S3Server, tmp_path: Path, uninterrupted: tuple[str, list[str]]
) -> None:
    url = server.new_url()
    processes.call(killed_at, "put model.ckpt-12~", f"{tmp_path}/result", f"{tmp_path}/one", url, server.options)
    resumed = processes.context.Barrier(2)
    started = [
        processes.start(
            tmp_path / f"{name}.output",
            train_and_tell,
            *(f"{tmp_path}/{name}.result", f"{tmp_path}/{name}", url, server.options, 0, resumed),
        )
        for name in ("two", "three")
    ]
    for process in started:
        process.join()
    for name in ("two", "three"):
        weights, calls = json.loads((tmp_path / f"{name}.result").read_text())
        assert weights == uninterrupted[0]
        assert any(call.startswith("get model.ckpt-8~") for call in calls)


def test_a_machine_that_comes_back_continues_from_what_another_one_has_done(
    server: S3Server, tmp_path: Path, uninterrupted: tuple[str, list[str]]
) -> None:
    url = server.new_url()
    arguments = (url, server.options)
    processes.call(killed_at, "put model.ckpt-8~", f"{tmp_path}/result", f"{tmp_path}/one", *arguments)
    processes.call(train_and_tell, f"{tmp_path}/result", f"{tmp_path}/two", *arguments)
    # Killed in the download: the next start must not take the folder for complete.
    processes.call(killed_at, 4, f"{tmp_path}/result", f"{tmp_path}/one", *arguments)
    check_continues(server, url, tmp_path / "one", uninterrupted)
    assert latest_checkpoint(tmp_path / "one") == str(tmp_path / "one/model.ckpt-12")


@pytest.mark.parametrize("number", range(1, 6))
def test_a_kill_in_the_download_leaves_a_folder_that_the_next_start_completes(
    server: S3Server, tmp_path: Path, uninterrupted: tuple[str, list[str]], number: int
) -> None:
    url = server.new_url()
    train(str(tmp_path / "one"), url, server.options)
    processes.call(killed_at, number, f"{tmp_path}/result", f"{tmp_path}/two", url, server.options)
    check_continues(server, url, tmp_path / "two", uninterrupted)


def test_the_copy_has_what_the_folder_has(server: S3Server, tmp_path: Path) -> None:
    url, run = server.new_url(), tmp_path / "run"
    train(str(run), url, server.options)
    sizes = Store(url, server.options).sizes()
    assert {re.sub(r"~\d+/.*", "", name) for name in sizes if "~" in name} == {"model.ckpt-8", "model.ckpt-12"}
    logs = {path.name: path.stat().st_size for path in run.iterdir() if path.is_file() and path.name != ".mirror.lock"}
    assert {name: size for name, size in sizes.items() if "~" not in name} == logs
    assert ".run.json" in logs


def test_keep_remote_keeps_more_than_the_folder(server: S3Server, tmp_path: Path) -> None:
    url = server.new_url()
    train(str(tmp_path / "run"), url, server.options, keep_remote=3)
    places = {name.partition("~")[0] for name in Store(url, server.options).sizes() if "~" in name}
    assert places == {"model.ckpt-4", "model.ckpt-8", "model.ckpt-12"}


def test_uploads_that_fall_behind_skip_checkpoints_but_not_the_newest(server: S3Server, tmp_path: Path) -> None:
    free = threading.Event()

    def before(number: int, name: str) -> None:
        if name.startswith("put model.ckpt-0~"):
            free.wait(30)

    _, store = train(str(tmp_path / "run"), server.new_url(), server.options, before, waits=False, at_end=free.set)
    assert store.whole == ["model.ckpt-12"]


def test_training_does_not_wait_for_the_store(server: S3Server, tmp_path: Path) -> None:
    free = threading.Event()

    def before(number: int, name: str) -> None:
        if name.startswith("put "):
            free.wait(30)

    _, store = train(str(tmp_path / "run"), server.new_url(), server.options, before, waits=False, grace_secs=0.0)
    record = json.loads((tmp_path / "run/.run.json").read_text())
    assert (record["step"], store.whole) == (STEPS, [])
    free.set()
    for thread in threading.enumerate():
        if thread.name == "torchhooks mirror":
            thread.join(30)


def test_one_failing_call_in_five_is_a_warning_and_the_copy_is_complete(
    server: S3Server, tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    def before(number: int, name: str) -> None:
        if number % 5 == 0:
            raise OSError("the server failed")

    url = server.new_url()
    _, store = train(str(tmp_path / "run"), url, server.options, before)
    assert store.whole[-1] == "model.ckpt-12"
    failed = [level for level, text in lines if "cannot be written (OSError: the server failed)" in text]
    worked = [level for level, text in lines if "can be written again" in text]
    assert set(failed) == {"WARNING"}
    assert set(worked) == {"INFO"}
    assert len(failed) == len(worked) >= 1
    shutil.rmtree(tmp_path / "run")
    train(str(tmp_path / "run"), url, server.options)
    assert steps_in(tmp_path / "run")[0] == list(range(1, STEPS + 1))


def test_a_server_that_is_gone_is_one_warning_and_an_error_with_the_command_at_the_end(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    server = S3Server()
    url = server.new_url()
    run = str(tmp_path / "run")

    def before(number: int, name: str) -> None:
        if number == 4:
            server.stop()

    try:
        train(run, url, server.options, before, waits=False, grace_secs=1.0)
        warnings = [text for level, text in lines if level == "WARNING" and "cannot be written" in text]
        assert len(warnings) == 1
        [error] = [text for level, text in lines if level == "ERROR"]
        assert "is not complete after 1 s, it lacks model.ckpt-12, " in error
        assert error.endswith(f"python -m torchhooks mirror {run} {url}")
        assert "secret" not in str(lines)
    finally:
        server.stop()


def test_a_server_that_comes_back_gets_everything(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    server = S3Server()
    url = server.new_url()
    begun: list[int] = []

    def before(number: int, name: str) -> None:
        if name.startswith("put model.ckpt-4~") and not begun:
            server.stop()
            begun.append(number)
        elif begun and number == begun[0] + 2:  # one more call has failed
            server.start()
            server.new_url(url)

    try:
        _, store = train(str(tmp_path / "run"), url, server.options, before, grace_secs=40.0)
        assert store.whole[-1] == "model.ckpt-12"
        assert any("can be written again, and has model.ckpt-" in text for level, text in lines)
    finally:
        server.stop()


def test_an_empty_folder_does_not_start_over_while_the_store_is_gone(tmp_path: Path) -> None:
    server = S3Server()
    url = server.new_url()
    server.stop()
    with pytest.raises(CheckpointError, match=f"{url} cannot be read .*run has no checkpoint: make the copy readable"):
        train(str(tmp_path / "run"), url, server.options)


def test_a_folder_with_a_checkpoint_continues_with_a_warning_while_the_store_is_gone(
    server: S3Server, tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    run = str(tmp_path / "run")
    train(run, server.new_url(), server.options)

    def before(number: int, name: str) -> None:
        if name == "sizes":
            raise OSError("gone")

    train(run, server.new_url(), server.options, before, waits=False, grace_secs=0.0)
    assert any("the loop continues from" in text and "older than the copy" in text for _, text in lines)


def test_a_damaged_checkpoint_in_the_copy_is_passed_over_for_an_older_one(
    server: S3Server, tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    url = server.new_url()
    train(str(tmp_path / "run"), url, server.options)
    store = Store(url, server.options)
    place = next(name for name in store.sizes() if name.startswith("model.ckpt-12~") and name.endswith("state.pt"))
    data = bytearray((tmp_path / "run/model.ckpt-12/state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "broken").write_bytes(data)
    store.put(str(tmp_path / "broken"), place)
    lines.clear()
    train(str(tmp_path / "new"), url, server.options)
    assert ("WARNING", "model.ckpt-12 in the copy is damaged (state.pt): an older one is used") in lines
    assert any(text.startswith("restored step 8 from") for _, text in lines)


def damage(store: Path, pattern: str) -> None:
    """Cut the files of checkpoints short in a store that is a folder."""
    for path in store.glob(pattern):
        os.truncate(path, 10)


def test_a_copy_with_nothing_but_damaged_checkpoints_starts_nothing_over(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    train(str(tmp_path / "run"), url, {})
    damage(tmp_path / "store", "model.ckpt-*/state.pt")
    with pytest.raises(CheckpointError, match=r"all checkpoints model\.ckpt in the copy are damaged") as raised:
        train(str(tmp_path / "new"), url, {})
    assert "make the copy readable, or, to start over, give another address" in str(raised.value)


def test_a_folder_with_an_older_checkpoint_continues_from_it_if_all_newer_ones_of_the_copy_are_damaged(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/store"
    train(str(run), url, {})
    shutil.rmtree(run / "model.ckpt-12")
    damage(tmp_path / "store", "model.ckpt-12~*/state.pt")
    lines.clear()
    train(str(run), url, {})
    assert [text for level, text in lines if level == "WARNING"] == [
        "model.ckpt-12 in the copy is damaged (state.pt): an older one is used"
    ]
    assert any(text.startswith("restored step 8 from") for _, text in lines)


def test_a_newer_checkpoint_of_the_same_step_replaces_the_own_one(tmp_path: Path) -> None:
    one, two, url = tmp_path / "one", tmp_path / "two", f"file://{tmp_path}/store"
    train(str(one), url, {})
    for path in (tmp_path / "store").glob("model.ckpt-12~*"):
        shutil.rmtree(path)
    train(str(two), url, {})  # continues from step 8, and makes step 12 again
    manifests = [folder / "model.ckpt-12/manifest.json" for folder in (one, two)]
    assert manifests[0].read_text() != manifests[1].read_text()
    assert Copy(str(one), Store(url)).pull() == ["model.ckpt-12"]
    assert manifests[0].read_text() == manifests[1].read_text()
    assert [path.name for path in one.iterdir() if path.name.endswith(".tmp")] == []


def test_an_upload_ends_for_a_newer_checkpoint_when_there_is_little_time(tmp_path: Path) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/store"
    train(str(run), f"file://{tmp_path}/other", {})
    (run / "model.ckpt-12").rename(tmp_path / "newer")

    def before(number: int, name: str) -> None:
        if name.startswith("put model.ckpt-8~") and not closing:
            (tmp_path / "newer").rename(run / "model.ckpt-12")
            closing.append(True)

    closing: list[bool] = []
    store = ObservedStore(url, {}, before)
    copy = Copy(str(run), store, is_closing=lambda: bool(closing))
    assert (copy.push(), store.whole) == ([], [])
    assert (copy.push(), store.whole) == (["model.ckpt-12"], ["model.ckpt-12"])
    assert not [name for name in store.sizes() if name.startswith("model.ckpt-8~")]


def test_a_checkpoint_that_is_replaced_while_it_is_copied_is_copied_again(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    train(str(one), f"file://{tmp_path}/other", {})
    shutil.copytree(one, two)
    shutil.rmtree(two / "model.ckpt-12")
    train(str(two), f"file://{tmp_path}/another", {})  # saves step 8, and then step 12, once more

    def before(number: int, name: str) -> None:
        if name.startswith("put model.ckpt-12~") and (two / "model.ckpt-12").exists():
            shutil.rmtree(one / "model.ckpt-12")
            (two / "model.ckpt-12").rename(one / "model.ckpt-12")

    store = ObservedStore(f"file://{tmp_path}/store", {}, before)
    copy = Copy(str(one), store)
    assert (copy.push(), store.whole) == ([], [])
    assert copy.push() == ["model.ckpt-12"]
    assert Copy(str(tmp_path / "new"), store).pull() == ["model.ckpt-12"]
    assert (tmp_path / "new/model.ckpt-12/manifest.json").read_text() == (
        one / "model.ckpt-12/manifest.json"
    ).read_text()


def test_a_recovery_starts_no_second_upload(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    def step(number: int) -> float:
        if number == 3 and not uploading:
            uploading.extend(thread for thread in threading.enumerate() if thread.name == "torchhooks mirror")
            raise AbortedError("the connection was lost")
        return 0.0

    uploading: list[threading.Thread] = []
    run = tmp_path / "run"
    hooks = [CheckpointSaverHook(run, save_steps=2), MirrorHook(run, f"file://{tmp_path}/store")]
    with MonitoredLoop(step, torch.nn.Linear(1, 1), hooks=hooks, checkpoint_dir=run) as loop:
        for number in loop.until_stop(range(6)):
            loop.run(number)
        assert [thread for thread in threading.enumerate() if thread.name == "torchhooks mirror"] == uploading
    assert any("recovering now from AbortedError" in text for _, text in lines)
    assert len(uploading) == 1


def test_a_store_that_stops_answering_when_the_copy_is_complete_is_no_error(
    tmp_path: Path, lines: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    free, url = threading.Event(), f"file://{tmp_path}/store"
    train(str(tmp_path / "run"), url, {})
    monkeypatch.setattr(torchhooks.elsewhere.mirror, "LOOK_SECS", 60.0)  # the rest is uploaded at the end

    def before(number: int, name: str) -> None:
        if name.startswith("remove model.ckpt-8~"):
            removing.append(name)
            free.wait(30)

    removing: list[str] = []
    lines.clear()
    _, store = train(str(tmp_path / "run"), url, {}, before, steps=16, waits=False, grace_secs=1.0)
    assert (store.whole[-1:], len(removing)) == (["model.ckpt-16"], 1)
    assert [text for level, text in lines if level in ("WARNING", "ERROR")] == []
    free.set()


def test_a_system_without_locks_for_files_downloads_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchhooks.common.files, "fcntl", None)
    url = f"file://{tmp_path}/store"
    train(str(tmp_path / "run"), url, {})
    train(str(tmp_path / "new"), url, {})
    assert latest_checkpoint(tmp_path / "new") == str(tmp_path / "new/model.ckpt-12")
    assert not (tmp_path / "new/.mirror.lock").exists()


def test_best_checkpoints_are_copied_and_come_back(server: S3Server, tmp_path: Path) -> None:
    url, options = server.new_url(), server.options

    def hooks(folder: Path) -> list[SessionRunHook]:
        return [
            BestCheckpointHook(folder, "loss", mode="min", every_n_steps=1),
            CheckpointSaverHook(folder, save_steps=EVERY),
            MirrorHook(folder, url, storage_options=options),
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


def stopped_by_sigterm(folder: str, url: str, options: dict[str, Any]) -> None:
    torchhooks.elsewhere.mirror.LOOK_SECS = 60.0  # only the begin and the end of the loop upload
    train(folder, url, options, waits=False, terminated_at=6)


def test_a_signal_uploads_the_last_checkpoint_before_the_process_ends(server: S3Server, tmp_path: Path) -> None:
    url = server.new_url()
    ended = processes.call(stopped_by_sigterm, str(tmp_path / "run"), url, server.options)
    assert ended.code == -signal.SIGTERM, ended.output
    assert latest_checkpoint(tmp_path / "run") == f"{tmp_path}/run/model.ckpt-6"
    sizes = Store(url, server.options).sizes()
    assert any(re.fullmatch(r"model.ckpt-6~\d+/manifest.json", name) for name in sizes)


def test_the_command_copies_to_the_store_and_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/store"
    train(str(tmp_path / "run"), f"file://{tmp_path}/other", {})
    assert main(["mirror", str(tmp_path / "run"), url]) == 0
    assert f"run was copied to {url}: model.ckpt-12" in capsys.readouterr().out
    assert main(["mirror", url, str(tmp_path / "back")]) == 0
    assert latest_checkpoint(tmp_path / "back") == str(tmp_path / "back/model.ckpt-12")
    assert steps_in(tmp_path / "back")[0] == list(range(1, STEPS + 1))
    assert main(["mirror", str(tmp_path / "none"), url]) == 1
    assert main(["mirror", str(tmp_path / "run"), str(tmp_path / "back")]) == 1
    assert main(["mirror", str(tmp_path / "run"), "nosuch://KEY12:SECRET34@bucket/run"]) == 1
    assert "SECRET34" not in capsys.readouterr().err
    assert main(["status", "nosuch://KEY12:SECRET34@bucket/run"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, "SECRET34" in captured.err) == ("", False)
    assert captured.err.startswith("nosuch://***@bucket/run: ValueError: ")


def test_a_mirrored_run_has_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(str(tmp_path / "run"), f"file://{tmp_path}/store", {})
    assert main(["status", f"file://{tmp_path}/store"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"state +ended \d+ s ago: data ended", said)
    assert re.search(r"checkpoint +model.ckpt-12, whole", said)
    assert re.search(r"loss +\S+ at step 12", said)


def test_a_folder_of_10_000_files_is_copied_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "traces").mkdir(parents=True)
    for number in range(10_000):
        (run / "traces" / f"{number}.json").write_text("{}")
    old = time.time() - 100
    for path in (run / "traces").iterdir():
        os.utime(path, (old, old))
    _, store = train(str(run), f"file://{tmp_path}/store", {})
    assert len(store.sizes()) > 10_000
    _, again = train(str(run), f"file://{tmp_path}/store", {})
    assert again.calls.count("put_many") < store.calls.count("put_many") - 100


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


@pytest.mark.parametrize(
    "url", ["s3://KEY12:SECRET34@bucket/run", "ftp://user:SECRET34@host/run", "https://host/run?sig=SECRET34"]
)
def test_credentials_in_the_address_are_in_no_text(url: str) -> None:
    secrets = Secrets(url, {"key": "KEY56", "client_kwargs": {"password": "SECRET78"}})
    for text in (secrets.url, secrets.hide(f"failed: {url} with KEY56 and SECRET78")):
        assert not re.search("SECRET|KEY", text)
    assert "bucket/run" in secrets.url or "host/run" in secrets.url


def test_credentials_are_in_no_line_no_error_and_no_repr(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    options = {"secret": "SECRET78", "endpoint_url": "http://127.0.0.1:9"}
    hook = MirrorHook(tmp_path / "run", "s3://KEY12:SECRET34@bucket/run", storage_options=options, grace_secs=0.2)
    assert repr(hook) == f"MirrorHook({str(tmp_path / 'run')!r}, 's3://bucket/run', grace_secs=0.2)"
    with pytest.raises(TypeError) as wrong:
        MirrorHook(tmp_path, "s3://KEY12:SECRET34@bucket/run", every_secs=3)  # type: ignore[call-arg]
    assert "SECRET" not in str(wrong.value)

    def fail(*_: Any) -> Any:
        raise OSError("403 for KEY12:SECRET34 with SECRET78")

    hook.store.sizes = fail  # type: ignore[method-assign]
    model = torch.nn.Linear(1, 1)
    with pytest.raises(CheckpointError) as raised:
        MonitoredLoop(lambda: 0.0, model, hooks=[hook], checkpoint_dir=tmp_path / "run")
    assert raised.value.__suppress_context__
    saver = CheckpointSaverHook(tmp_path / "run", save_steps=1)
    with MonitoredLoop(lambda: 0.0, model, hooks=[saver], checkpoint_dir=tmp_path / "run") as loop:
        loop.run()
    with MonitoredLoop(lambda: 0.0, model, hooks=[saver, hook], checkpoint_dir=tmp_path / "run") as loop:
        loop.run()
    assert any("cannot be written" in text for _, text in lines)
    assert not re.search("SECRET|KEY12", f"{lines}{raised.value}{hook!r}")


def test_wrong_arguments_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be an address, such as 's3://bucket/run-17'"):
        MirrorHook(tmp_path, "bucket/run-17")
    with pytest.raises(ValueError, match="nosuch"):
        MirrorHook(tmp_path, "nosuch://bucket")
    with pytest.raises(ValueError, match="keep_remote=0"):
        MirrorHook(tmp_path, "memory://bucket", keep_remote=0)


def test_a_name_that_leads_out_of_the_folder_is_ignored(tmp_path: Path) -> None:
    store = Store("memory://bucket/escape")
    (tmp_path / "evil").write_text("evil")
    store.put(str(tmp_path / "evil"), "../evil")
    store.put(str(tmp_path / "evil"), "good")
    assert store.sizes() == {"good": 4}
