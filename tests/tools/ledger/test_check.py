"""``python -m torchhooks check``: a script runs as it is, and the verdict is that of the script."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import simulated
from support.examples import shared
from support.forks import check_in_a_process, use_forks
from support.processes import call
from support.schemas import answer
from torch import nn

from torchhooks import CheckpointSaverHook, LoopPlan, MirrorHook, MonitoredLoop, SessionRunHook
from torchhooks.__main__ import main
from torchhooks.common.files import PLACES
from torchhooks.tools.ledger import CHECK_PLAN, checked, keeper, processes
from torchhooks.tools.ledger.check import Options, _has_date, prove
from torchhooks.tools.ledger.keeper import CheckError, Keeper
from torchhooks.tools.ledger.lines import read_ledgers
from torchhooks.tools.ledger.verdict import Verdict, text_of
from torchhooks.tools.ledger.walk import Walker

SCRIPT = """
import argparse, importlib, multiprocessing, os, signal, sys, tempfile, threading, time
import torch
from torch import nn
from torchhooks import (
    CheckpointSaverHook, MonitoredLoop, StopAtStepHook, SummarySaverHook, Variables, latest_checkpoint
)

options = argparse.ArgumentParser()
options.add_argument("--defect", default="")
options.add_argument("--epochs", type=int, default=3)
options.add_argument("--items", type=int, default=6)
chosen = options.parse_args()
rank = int(os.environ.get("RANK", 0))
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
examples = list(torch.randn(chosen.items, 2, 4))
if chosen.defect == "no run":
    examples = []
scale, total, variables = 1.0, 0.0, Variables(total=0.0)

def step(inputs):
    global scale
    if chosen.defect == "scale" or (chosen.defect == "on rank 1" and rank == 1):
        scale *= 0.99
    optimizer.zero_grad()
    loss = (model(inputs) * scale - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    for parameter in model.parameters():
        if "RANK" in os.environ:
            torch.distributed.all_reduce(parameter.grad)
    optimizer.step()
    if chosen.defect == "once" and loop.global_step == 5 and os.path.basename(os.path.dirname(os.environ[
        "TORCHHOOKS_PLACES"])) == "interrupted":
        loss = loss + 1
    book.count()
    if chosen.defect == "has a time in its outputs":
        return {"loss": loss, "secs": time.time()}
    return {"loss": loss}

class Clock:
    def state_dict(self):
        return {"now": time.time()}
    def load_state_dict(self, state):
        pass

class Book:
    seen = 0
    def count(self):
        if chosen.defect == "counts":
            self.seen += 1

book = Book()
if chosen.defect == "has a time in its items":
    examples = [(each, time.time()) for each in examples]
if chosen.defect == "marks its items":
    examples = [(each, latest_checkpoint("run") is None) for each in examples]

hooks = [SummarySaverHook(100, output_dir="run", summary_op="loss")]
if chosen.defect != "no saver":
    period = {"every_n_epochs": 5} if chosen.defect == "saves late" else {"every_n_steps": 1000}
    hooks.append(CheckpointSaverHook("run", **period))
if chosen.defect == "no loop":
    raise SystemExit("no data")
if chosen.defect == "fails" and latest_checkpoint("run"):
    raise RuntimeError("no second start")
if chosen.defect == "writes":
    open("log.csv", "a").close()
    torch.save(model.state_dict(), "model.pt")
if chosen.defect == "is sent its classes":
    assert importlib.import_module("__mp_main__").step is step  # the name that a spawned worker gives them
if chosen.defect == "reads":
    print("read:", sys.stdin.read())
if chosen.defect == "leaves a process" and not os.fork():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
folder = None if chosen.defect == "no folder" else "run"
signals = ["SIGTERM"] if chosen.defect == "has a status" else []
state = {"variables": variables}
if chosen.defect == "has a time in its state":
    state["clock"] = Clock()
if chosen.defect == "stops after its own runs":
    hooks.append(StopAtStepHook(num_steps=14))
made = 0
if chosen.defect == "folds":  # two training runs before this one
    for fold in ("a", "b"):
        saver = CheckpointSaverHook(fold, every_n_steps=3)
        with MonitoredLoop(step, model, optimizer, hooks=[saver], checkpoint_dir=fold) as loop:
            for epoch in loop.until_stop(range(chosen.epochs)):
                for inputs in loop.until_stop(examples):
                    loop.run(inputs)
with MonitoredLoop(step, model, optimizer, hooks=hooks, state=state, checkpoint_dir=folder, signals=signals) as loop:
    while chosen.defect == "prints" and not loop.should_stop():
        print("after run", loop.global_step, loop.run(examples[0])["loss"].item())
    for epoch in loop.until_stop(range(chosen.epochs)):
        variables.total = 0.0
        for inputs in loop.until_stop(examples):
            variables.total += loop.run(inputs if torch.is_tensor(inputs) else inputs[0])["loss"].item()
            made += chosen.defect == "counts to the end"
            if made == 14:
                loop.request_stop()
        if chosen.defect == "remembers at the end of an epoch":
            book.last = variables.total
        print(f"epoch {epoch}: {variables.total:.6f}")
        if chosen.defect == "raises":
            raise RuntimeError("no more")
if chosen.defect == "ends late":
    sys.folder = tempfile.TemporaryDirectory()
    print(sys.folder.name)
    threading.Timer(0.2, print, ["a thread"]).start()
    multiprocessing.get_context("fork").Process(target=lambda: (time.sleep(0.2), print("a process"))).start()
if chosen.defect == "has a status" and loop.global_step < chosen.epochs * chosen.items:
    sys.exit(75)
"""


slow = pytest.mark.slow


@pytest.fixture
def forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_forks(monkeypatch)
    monkeypatch.chdir(tmp_path)


def verdict_of(
    folder: Path,
    defect: str = "",
    steps: int = 14,
    epoch_items: int = 8,
    kills: int = 0,
    ranks: int = 1,
    ignored: Sequence[str] = (),
    **options: int,
) -> Verdict:
    """Return the verdict on the script with a defect, and with options such as the number of its epochs."""
    (folder / "train.py").write_text(SCRIPT)
    scratch = folder / "scratch"
    scratch.mkdir()
    of_script = ["--defect", defect, *(f"--{name}={value}" for name, value in options.items())]
    with Keeper(str(scratch)) as keeper:
        verdict = prove(["train.py", *of_script], keeper, Options(steps, epoch_items, kills, ignored=ignored))
    assert {path.name for path in folder.iterdir()} <= {"train.py", "scratch", "log.csv", "model.pt"}, (
        "nothing of the loop is here"
    )
    return verdict


def runs_of(verdict: Verdict) -> int:
    assert verdict.comparison is not None
    return verdict.comparison.runs


def printed(verdict: Verdict) -> str:
    return "\n".join(text_of(verdict))


@slow
@pytest.mark.usefixtures("forks")
def test_an_exact_script_passes_and_is_resumed_in_several_places(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, steps=14, kills=2)
    assert verdict.is_exact
    assert runs_of(verdict) == 14
    assert [kill.by.name for kill in verdict.kills].count("SIGTERM") == 2
    assert len(verdict.kills) == len({*verdict.resumed_at}) == 6
    assert all(verdict.resumed_at)
    assert printed(verdict).splitlines()[2].startswith("resumes exactly: 14 runs: item, arguments, random, outputs")
    assert printed(verdict).splitlines()[-1] == "not seen       the place of a running for loop"


@slow
@pytest.mark.usefixtures("forks")
def test_a_script_that_ends_within_the_steps_makes_no_run_when_it_is_started_once_more(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, steps=30, epochs=3, items=5)
    assert (verdict.is_exact, runs_of(verdict), verdict.runs_after_end) == (True, 15, 0)
    assert verdict.resumed_at[-1] == 15


@pytest.mark.release
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("items", [5, 0])
def test_epochs_are_shortened_if_none_ends_within_the_steps(items: int, tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, steps=12, items=50, epoch_items=items)
    assert (verdict.is_exact, verdict.epoch_items) == (True, items)
    assert ("(epochs of 5 items)" in printed(verdict)) == bool(items)


@slow
@pytest.mark.parametrize("defect", shared(["on rank 1", ""], 2))
def test_several_ranks_are_started_killed_and_compared(defect: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    found = check_in_a_process(tmp_path, 10, "train.py", "--defect", defect, ranks=2)
    assert found["comparison"]["ranks"] == 2
    assert found["exact"] == (not defect), found["text"]
    assert "what ranks other than 0 hold" in found["not_seen"]
    if defect:
        assert found["comparison"]["difference"]["rank"] == 1


@pytest.mark.release
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("steps", [24, 40])
def test_the_runs_of_several_loops_are_counted_together(steps: int, tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, "folds", steps=steps, kills=3, items=5, epochs=2)
    assert verdict.is_exact, printed(verdict)
    assert runs_of(verdict) == min(steps, 30)


@pytest.mark.usefixtures("forks")
def test_files_that_the_script_writes_itself_are_named(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, "writes", steps=10)
    assert verdict.is_exact
    assert list(verdict.written) == [str(tmp_path / "log.csv"), str(tmp_path / "model.pt")]
    assert "log.csv" in printed(verdict)


@slow
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("way", shared(["is sent its classes", "reads", "prints", "has a status"], 2))
def test_what_a_script_may_do_is_no_difference(way: str, tmp_path: Path) -> None:
    """It reads its input, prints after each run, has a status for a stop, or gets objects from spawned workers."""
    assert verdict_of(tmp_path, way, steps=10).is_exact


@slow
@pytest.mark.usefixtures("forks")
def test_a_process_that_the_script_leaves_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_LEFT_SECS", 0.05)
    read, write = os.pipe()
    try:
        verdict_of(tmp_path, "leaves a process", steps=10)
    finally:
        os.close(write)
    with open(read, "rb") as pipe:
        assert select.select([pipe], [], [], 60)[0], "none has the other end still open"
        assert pipe.read() == b""


@slow
@pytest.mark.usefixtures("forks")
def test_threads_processes_and_temporary_folders_of_a_script_end_as_without_check(tmp_path: Path) -> None:
    assert verdict_of(tmp_path, "ends late", steps=30, epochs=2, items=6).is_exact
    first = (tmp_path / "scratch" / "one" / "1-0.out").read_text().splitlines()
    assert {*first[-2:]} == {"a thread", "a process"}
    assert not os.path.exists(first[-3])


@slow
@pytest.mark.usefixtures("forks")
def test_what_does_not_come_again_is_said_to_be_not_deterministic(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, "once", steps=10)
    assert (verdict.is_exact, verdict.was_reproduced, verdict.status) == (False, False, 2)
    assert "did not come again, so the script is not deterministic" in printed(verdict)


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("defect", "steps", "message"),
    [
        pytest.param("no saver", 10, "saves no checkpoints", marks=slow),
        pytest.param("no folder", 10, "restores no checkpoints", marks=slow),
        ("no run", 10, "made no run, and ended with status 0"),
        ("no loop", 10, "made no loop of torchhooks, and ended with status 1:\nno data"),
        pytest.param("raises", 10, "ended with status 1 without a kill", marks=slow),
        pytest.param("saves late", 10, "no process continued from a checkpoint, so nothing is proved", marks=slow),
        ("", 3, "must be 10 or more"),
    ],
)
def test_what_cannot_be_checked_is_said(defect: str, steps: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=re.escape(message)):
        verdict_of(tmp_path, defect, steps)


@slow
@pytest.mark.usefixtures("forks")
def test_a_script_that_fails_when_it_is_resumed_does_not_resume_exactly(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, "fails", 10)
    assert (verdict.status, verdict.was_reproduced, verdict.failed) == (1, True, "RuntimeError: no second start")
    assert "the script fails when it is resumed:\nRuntimeError: no second start" in printed(verdict)


@slow
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("defect", shared(["stops after its own runs", "counts to the end"], 1))
def test_a_limit_that_counts_the_runs_of_a_process_makes_other_runs(defect: str, tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, defect, 30, epochs=9)
    assert verdict.status == 1, printed(verdict)
    assert "StopAtStepHook(num_steps=)" in printed(verdict)


@slow
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("way", "said"),
    shared(
        [
            ("has a time in its outputs", "not compared: secs in outputs"),
            ("has a time in its state", "not compared: clock in state"),
            ("has a time in its items", "not compared: item, which"),
            ("marks its items", "other item after a resume, and nothing that is computed differs"),
            ("remembers at the end of an epoch", "missing after a resume, and not used: book.last"),
        ],
        3,
    ),
)
def test_what_is_harmless_is_a_note(way: str, said: str, tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, way, 14)
    assert verdict.status == 0, printed(verdict)
    assert f"note           {said}" in printed(verdict)
    assert ("14 runs: item, arguments" in printed(verdict)) == ("item" not in said), (
        "what was not the same is not named"
    )


@slow
@pytest.mark.usefixtures("forks")
def test_what_starts_over_and_was_not_used_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, "counts", 14)
    assert (verdict.status, verdict.is_computed_same) == (1, True)
    assert "starts over    book.seen starts over: 0 after the resume, 2 without an interruption" in printed(verdict)
    assert "--ignore 'book.seen'" in printed(verdict)
    (tmp_path / "scratch").rename(tmp_path / "other")
    shutil.rmtree(tmp_path / "other")
    assert verdict_of(tmp_path, "counts", 14, ignored=["book"]).status == 0


@slow
@pytest.mark.usefixtures("forks")
def test_a_script_whose_variables_take_long_is_read_in_fewer_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "_WALK_SECS", 0.0)
    verdict = verdict_of(tmp_path, "scale", 14)
    assert "look at        scale starts over: 1.0 after" in printed(verdict)
    assert {each.name for each in (tmp_path / "scratch").iterdir()} == {
        *("one", "other", "interrupted", "repeated"),
        *(f"{name}-again-{of}" for name in ("one", "other") for of in ("interrupted", "repeated")),
    }


@slow
def test_the_command_prints_a_verdict_for_people_or_for_a_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code, output = call(run_main, tmp_path, "check", "train.py", "--steps", "12", "--keep", "--", "--defect", "scale")
    assert code == 1
    assert "does NOT resume exactly, and again when repeated:" in output
    assert "look at        scale starts over: 1.0 after the resume, 0." in output
    first, *others = output.splitlines()
    kept = Path(first.split()[-1])
    assert (kept / "interrupted" / "places").is_dir()
    shutil.rmtree(kept)
    started = [line for line in others if re.fullmatch(r" ?\d+  \S.* \d+\.\d s", line)]
    assert re.search(rf"(?m)^train.py was started {len(started)} times, in \d+\.\d s$", output)
    assert re.search(r"about \d+ more, \d+ s in all", output)
    code, output = call(run_main, tmp_path, "check", "train.py", "--steps", "12", "--json")
    assert (code, answer("check", output[output.index("{") :])["exact"]) == (0, True)
    code, output = call(run_main, tmp_path, "check", "train.py", "--steps", "1", "--json")
    assert (code, "must be 10 or more" in answer("check", output[output.index("{") :])["error"]) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def run_main(folder: Path, *arguments: str) -> None:
    """Call the command in a process that has no more than the command has."""
    warnings.resetwarnings()
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_forks(monkeypatch)
        sys.exit(main(arguments))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(number, marks=slow) for number in (signal.SIGTERM, signal.SIGHUP))]
)
def test_a_command_that_a_signal_ends_leaves_nothing(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(training: processes.Training, steps: int, line: str) -> None:
        Path(training.folder).mkdir()
        os.kill(os.getpid(), number)

    monkeypatch.setattr(processes.Training, "start", start)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    default = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, default)  # a process in the background may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            main(["check", "train.py"])
        assert signal.getsignal(number) == default
    finally:
        signal.signal(number, before)
    assert not [*tmp_path.glob("torchhooks-check-*")]


def test_a_loop_under_check_records_everything_saves_often_and_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens in the processes of the script, here without one of its own."""
    ledger, seen_file, walk = (str(tmp_path / "places" / name) for name in ("ledger", "seen", "walk"))
    plan = checked.ProcessPlan(
        ledger, 100, seen_file, walk, kill_after=3, kill_by=0, depth=2, epoch_items=4, places=str(tmp_path / "places")
    )
    (tmp_path / "places").mkdir()
    plan.write(str(tmp_path / "plan"))
    monkeypatch.setenv(CHECK_PLAN, str(tmp_path / "plan"))
    monkeypatch.setenv(PLACES, str(tmp_path / "places"))
    seen = checked.Seen()
    # Of this process: the tests after this one must not find it.
    monkeypatch.setattr(checked.Cut, "_seen", seen)
    monkeypatch.setattr(checked.Cut, "_runs_of_earlier_loops", 0)
    monkeypatch.setattr(checked.Cut, "_walk_secs", 0.0)
    monkeypatch.setattr("torchhooks.tools.ledger.walk.sys", SimpleNamespace(modules={}))  # this process has all tests
    monkeypatch.setattr(checked.Cut, "_walker", Walker())
    monkeypatch.setattr(checked, "placed", files := {"/another/run"})
    monkeypatch.setattr("torchhooks.common.files.placed", files)
    model = nn.Linear(1, 1)
    saver = CheckpointSaverHook(tmp_path / "run", every_n_steps=1000)
    far = MirrorHook(url="memory://another-machine/run")
    with MonitoredLoop(model, model, hooks=[saver, far], checkpoint_dir=tmp_path / "run") as loop:
        for _ in loop.until_stop(range(2)):
            for inputs in loop.until_stop(list(torch.ones(6, 1))):
                loop.run(inputs)
    assert saver.timer.every_steps == 10
    assert not (tmp_path / "run").exists()
    (written,) = read_ledgers(plan.ledger)
    assert [entry.run for entry in written] == [*range(1, 9)], "two epochs of four items"
    assert not memory_files("another-machine")
    folders = ["/another/run", str(tmp_path / "run")]
    expected = checked.Seen(1, 8, 2, True, True, 0, folders, folders[1:], os.getpid())
    assert 0 < seen.secs < time.time()
    assert replace(checked.Seen.read(plan.seen), secs=0.0) == replace(seen, secs=0.0) == expected


def test_hooks_of_scripts_and_extensions_are_left_out_and_save_often_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACES, str(tmp_path / "places"))
    saver, far = CheckpointSaverHook(tmp_path / "run", save_steps=1000), MirrorHook(url="memory://another-machine/run")
    monkeypatch.setattr(checked.Cut, "_seen", checked.Seen())
    plan = checked.ProcessPlan(str(tmp_path / "ledger"), 100, str(tmp_path / "seen"), str(tmp_path / "walk"))
    plan.write(str(tmp_path / "plan"))
    own = type("Uploading", (SessionRunHook,), {"leaves_machine": True})()
    under_check = checked.watched(LoopPlan(first=(saver,), hooks=(own,), last=(far,)), str(tmp_path / "plan"))
    assert [type(hook).__name__ for hook in under_check.all_hooks] == ["LedgerHook", "CheckpointSaverHook", "Cut"]
    assert saver.timer.every_steps == 10


def memory_files(bucket: str) -> list[str]:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    return [*memory.find(f"/{bucket}")]


# -- scripts of other styles ------------------------------------------------------------------------------------------

TRAINING = """
import torch
from torchhooks import CheckpointSaverHook, LoggingTensorHook, MonitoredLoop
torch.manual_seed(0)
device = globals().get("device", "cpu")
examples = torch.randn(40, 4).to(device)
model = torch.nn.Linear(4, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(inputs):
    optimizer.zero_grad()
    loss = (model(inputs) * model(inputs)).mean()
    loss.backward()
    optimizer.step()
    return loss

def train(folder="run", at_end_of_epoch=lambda epoch: None, hooks=()):
    hooks = [CheckpointSaverHook(every_n_steps=4), *hooks]
    with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=folder) as loop:
        for epoch in loop.until_stop(range(4)):
            for number in loop.until_stop(range(5)):
                loop.run(examples[8 * number : 8 * number + 8])
            at_end_of_epoch(epoch)
"""

RANKS = """
import os, socket, sys
import torch
from torchhooks import CheckpointSaverHook, MonitoredLoop

def work(rank, port):
    if "apart" not in sys.argv:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(inputs):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        if "apart" not in sys.argv:
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        return loss
    folder = f"run{rank}" if "apart" in sys.argv else "run"
    hooks = [CheckpointSaverHook(every_n_steps=4)]
    signals = ["SIGTERM"] if "saves" in sys.argv else []
    with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=folder, signals=signals) as loop:
        for epoch in loop.until_stop(range(3)):
            for inputs in loop.until_stop(list(torch.arange(20.0).reshape(5, 1, 4) / 20 + rank)):
                loop.run(inputs)

if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(work, (port,), nprocs=2, start_method="fork")
    print("all ranks have ended")
"""


def check_script(folder: Path, text: str, *arguments: str, steps: int = 12, **options: Any) -> Verdict:
    """Return the verdict on the script ``text``, or on the end of one that begins with TRAINING."""
    (folder / "train.py").write_text(text)
    (folder / "scratch").mkdir()
    with Keeper(str(folder / "scratch")) as keeper:
        return prove(["train.py", *arguments], keeper, Options(steps, **options))


@slow
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("way", shared(["", "saves"], 1))
def test_a_script_that_starts_its_ranks_is_checked_as_one_of_torchrun(way: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    found = check_in_a_process(tmp_path, 12, "train.py", way)
    assert (found["exact"], found["comparison"]["ranks"], found["comparison"]["runs"]) == (True, 2, 24), found["text"]
    assert found["resumed_at"][:3] != [0, 0, 0]


@slow
@pytest.mark.usefixtures("forks")
def test_processes_that_are_no_ranks_are_refused_with_a_word_of_torchrun(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"several processes that are no ranks of one process group.*torchrun"):
        check_script(tmp_path, RANKS, "apart")


@slow
@pytest.mark.usefixtures("forks")
def test_a_script_finds_its_checkpoints_where_they_are_placed(tmp_path: Path) -> None:
    """It lists its folder, reads and writes there, and a real training run has left something of that name."""
    (tmp_path / "run").mkdir()
    for name in ("model.ckpt-90", "config.txt"):
        (tmp_path / "run" / name).write_text("real")
    verdict = check_script(
        tmp_path,
        TRAINING
        + """
import glob, os, pathlib, shutil
found = sorted(glob.glob("run/model.ckpt-*"))
print(len(found), "run/model.ckpt-90" in found)
assert open("run/config.txt").read() == "real"
os.makedirs("run", exist_ok=True)

def look(epoch):
    torch.save(model.state_dict(), "run/best.pt")
    torch.load("run/best.pt")
    pathlib.Path("run/epoch.txt").write_text(str(epoch))
    os.makedirs("run/a/b")
    os.replace("run/epoch.txt", "run/a/epoch.txt")
    shutil.rmtree("run/a")
    newest = max(os.listdir("run"), key=lambda name: int(name.rpartition("-")[2]) if "ckpt-" in name else 0)
    print("epoch", epoch, newest, pathlib.Path("run", newest).exists(), len([*os.scandir("run")]) > 1)

train(at_end_of_epoch=look)
""",
    )
    assert verdict.is_exact, printed(verdict)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"model.ckpt-90", "config.txt"}
    assert not verdict.written
    output = (tmp_path / "scratch/placed/1-0.out").read_text()
    assert output.startswith("0 False\nepoch 0 model.ckpt-4 True True\nepoch 1 model.ckpt-9 True True\n")


@slow
@pytest.mark.usefixtures("forks")
def test_values_on_their_way_from_a_device_are_waited_for(tmp_path: Path) -> None:
    simulated.needs_compiler()
    begin = f"import sys; sys.path.insert(0, {str(Path(simulated.__file__).parent.parent)!r})\n"
    begin += "from support import simulated; simulated.register(); device = 'simulated'\n"
    (tmp_path / "train.py").write_text(begin + TRAINING + "train(hooks=[LoggingTensorHook(['loss'], 1)])")
    found = check_in_a_process(tmp_path, 12, "train.py")
    assert found["exact"], found["text"]
    assert found["comparison"]["runs"] == 12
    lines = (tmp_path / "scratch/one/1-0.err").read_text()
    assert lines.count("loss = ") == 12, "what a hook says of the last run has arrived too"


@slow
@pytest.mark.usefixtures("forks")
def test_a_script_that_stands_still_is_ended_and_its_place_is_named(tmp_path: Path) -> None:
    end = """
import threading
lock = threading.Lock()
def load(epoch):
    if epoch == 1:
        lock.acquire(); lock.acquire()
train(at_end_of_epoch=load)
"""
    line = (TRAINING + end).splitlines().index("        lock.acquire(); lock.acquire()") + 1
    message = f"train.py has not ended within 2 s, and made 10 runs: it stands at line {line} of train.py (load)"
    with pytest.raises(CheckError, match=re.escape(message)):
        check_script(tmp_path, TRAINING + end, steps=20, timeout=2.0)


@slow
@pytest.mark.usefixtures("forks")
def test_a_script_that_stands_still_when_it_is_resumed_does_not_resume_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchhooks.tools.ledger.check._LEAST_TIMEOUT", 2.0)
    monkeypatch.setattr("torchhooks.tools.ledger.check._SLOWER", 0)
    end = "import os, time\nif os.path.exists('run'):\n    time.sleep(600)\ntrain()"
    verdict = check_script(tmp_path, TRAINING + end, steps=10)
    assert (verdict.status, verdict.was_reproduced) == (1, True)
    assert re.match(r"TimeoutError: after 2 s, it stands at line \d+ of train.py \(<module>\)", verdict.failed)


@slow
@pytest.mark.usefixtures("forks")
def test_a_folder_with_the_time_in_its_name_is_said(tmp_path: Path) -> None:
    end = "import time\ntrain(f'run-{time.time()}')"
    with pytest.raises(CheckError, match=r"the name of the checkpoint folder has the date or time in it, .*/run-"):
        check_script(tmp_path, TRAINING + end)


@slow
@pytest.mark.usefixtures("forks")
def test_the_date_in_the_name_of_a_folder_is_a_note_and_so_is_another_machine(tmp_path: Path) -> None:
    end = """
import datetime, socket
try:
    socket.create_connection(("192.0.2.1", 9), timeout=0.01)  # an address for documentation
except OSError:
    pass
train(f"run-{datetime.date.today()}")
"""
    verdict = check_script(tmp_path, TRAINING + end)
    assert verdict.is_exact
    assert re.search(r"note +the date or time is in the name of /.*/run-2\d\d\d-\d\d-\d\d: ", printed(verdict))
    assert "not held back  what the script itself sends to 192.0.2.1:9" in printed(verdict)


@pytest.mark.parametrize(
    ("name", "has_date"),
    [
        ("run-%Y-%m-%d_%H-%M-%S", True),
        ("%Y%m%d%H%M%S", True),
        ("runs/%b%d_node7", True),
        ("run", False),
        ("run-2001-01-01", False),
        ("run-%Y", False),
    ],
)
def test_a_date_in_a_path_is_known(name: str, has_date: bool) -> None:
    assert _has_date(time.strftime(name)) == has_date


@pytest.mark.parametrize("chosen", ["0", None])
def test_a_hash_seed_that_the_user_has_set_stays(
    chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[str | None] = []

    def start(training: processes.Training, steps: int, line: str) -> processes.Ended:
        seeds.append(training.hash_seed)
        if len(seeds) == 2:
            raise CheckError("that is all")
        seen = checked.Seen(1, 12, 1, True, True)
        training.processes.append(processes.Ended(0, [], "", seen, steps, 1.0, ""))
        os.makedirs(os.path.join(training.ledger, "ledger"))
        Path(training.ledger, "ledger", "rank-0.jsonl").write_text(
            '{"ledger": 2}\n{"loop": 1, "run": 1, "step": 1, "epoch": 0, "batch": 0, "process": 1, "format": 2}\n'
        )
        return training.processes[0]

    monkeypatch.setattr(processes.Training, "start", start)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if chosen is not None:
        monkeypatch.setenv("PYTHONHASHSEED", chosen)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckError, match="that is all"):
        check_script(tmp_path, TRAINING)
    assert seeds == [None, chosen or "1"]


@pytest.mark.parametrize("arguments", [["check"], ["check", "train.py", "-m", "train"], ["check", "missing.py"]])
def test_a_script_or_a_module_is_needed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert re.search("give a script, or -m and the name of a module", capsys.readouterr().err)
