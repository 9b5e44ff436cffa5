"""Real jobs that stand still, of one to four processes: the rank and the phase of the fault are in the report.

``tests/ranks/test_ranks.py`` has the rank that is stopped by SIGSTOP: it cannot say where it is, and counts as lost.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from support import processes
from support.rank_processes import Ended, run_ranks
from support.waiting import wait_until
from torch import distributed

from torchhooks import AtSteps, CheckpointSaverHook, EvaluationHook, MonitoredLoop, PeerError, Ranks, StopAtStepHook
from torchhooks.__main__ import main
from torchhooks.common.files import Disk
from torchhooks.tools.watch import stalls

ITEMS = 6
CULPRIT = 1  # the rank with the fault


def train(rank: int, folder: str, fault: str, stall_secs: float, **arguments: Any) -> None:
    """Train ``ITEMS`` runs with an all_reduce in each, and a ``fault`` in the fourth run, on one rank."""
    stalls.LOOK_SECS = 0.1
    has_fault = rank == CULPRIT
    others = [None, distributed.new_group()] if fault == "another order" else []

    def step(number: int) -> None:
        value = torch.ones(1)
        if number == 3 and others:
            for group in others if has_fault else others[::-1]:
                distributed.all_reduce(value, group=group)
        elif not (number == 3 and has_fault and fault == "left out"):
            distributed.all_reduce(value)

    def items() -> Iterator[int]:
        for number in range(ITEMS):
            if number == 3 and has_fault and fault == "data":
                time.sleep(1000)
            yield number

    def evaluate() -> dict[str, float]:
        if has_fault and fault == "evaluation":
            time.sleep(1000)
        return {"accuracy": 0.5}

    if fault == "disk" and rank == 0:
        Disk.create = create_blocked  # type: ignore[assignment, method-assign]
    hooks = [CheckpointSaverHook(folder, timer=AtSteps([4])), EvaluationHook(evaluate, timer=AtSteps([4]))]
    model = torch.nn.Linear(1, 1)
    with MonitoredLoop(
        step, model, hooks=hooks, checkpoint_dir=folder, stall_secs=stall_secs, stall_action="abort", **arguments
    ) as loop:
        for number in loop.until_stop(items()):
            loop.run(number)


def create_blocked(disk: Disk, path: str) -> BinaryIO:
    """Stand still, as a disk that does not answer: nobody reads the FIFO."""
    os.mkfifo(path)
    return open(path, "wb")


def the_line(ended: Ended) -> str:
    (line,) = re.findall(r"^CRITICAL:torchhooks:(no run .*)$", ended.output, re.MULTILINE)
    return str(line)


@pytest.mark.parametrize(
    ("fault", "size", "stall_secs", "place"),
    [
        (
            "left out",
            2,
            2,
            r"Rank 1 is not there: .* in run 5: waits for the other ranks, .*\. "
            r"Rank 0 waits in run 4: all_reduce, test_jobs.py:\d+ \(step\)\.",
        ),
        pytest.param(
            "another order",
            2,
            2,
            r"All ranks wait in run 4: all_reduce, test_jobs.py:\d+ \(step\)\.",
            marks=pytest.mark.ranks,
        ),
        pytest.param(
            "data",
            4,
            2,
            r"Rank 1 is not there: .* in run 4: waits for data at depth 1, test_jobs.py:\d+ \(items\)\. "
            r"Ranks 0, 2, 3 wait in run 4: all_reduce, test_jobs.py:\d+ \(step\)\.",
            marks=pytest.mark.ranks,
        ),
        pytest.param(
            "evaluation",
            3,
            1,
            r"Rank 1 is not there: .* in run 4: in an evaluation, test_jobs.py:\d+ \(evaluate\)\. "
            r"Ranks 0, 2 are in run 5: waits for the other ranks, test_jobs.py:\d+ \(train\)\.",
            marks=pytest.mark.release,
        ),
        pytest.param(
            "disk",
            2,
            1,
            r"Rank 0 is not there: .* before its first run: in a save, test_jobs.py:\d+ \(create_blocked\)\. "
            r"Rank 1 is before its first run: in a save, .*",
            marks=pytest.mark.release,
        ),
    ],
)
def test_ranks_that_stand_still_say_why_and_end(
    fault: str, size: int, stall_secs: float, place: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = run_ranks(tmp_path, size, train, str(run), fault, stall_secs)
    assert [each.code for each in ended] == [70] * size, ended[0].output
    line = the_line(ended[0])
    assert re.fullmatch(rf"no run .* \d+ s\. {place}", line)
    (folder,) = run.glob("stall-*")
    files = {file.name for file in folder.iterdir()}
    assert {"report.md", *(f"rank-{rank}.txt" for rank in range(size))} <= files
    assert (folder / "report.md").read_text().startswith(line)
    assert all("no run was completed" not in each.output for each in ended[1:])


def caught(rank: int, folder: str, culprits: tuple[int, ...] = (CULPRIT,)) -> str:
    """Train with an error in the third run of some ranks, which the script catches."""

    def step(number: int) -> None:
        if number == 2 and rank in culprits:
            raise ValueError("bad item")
        distributed.all_reduce(torch.ones(1))

    loop = MonitoredLoop(step, ranks=Ranks(stuck_secs=1))
    for number in range(ITEMS):
        try:
            loop.run(number)
        except PeerError as error:
            return str(error)
        except Exception:
            continue
    return "no rank has failed"


@pytest.mark.ranks
def test_an_error_that_one_rank_raises_and_catches_ends_all_of_them(tmp_path: Path) -> None:
    other, culprit = run_ranks(tmp_path, 2, caught, str(tmp_path))
    assert culprit.value == "rank 1 failed in run 3: ValueError: bad item"
    assert other.code == 70 or isinstance(other.value, str)  # gloo may notice the end of the other process first
    assert "rank 1 failed in run 3: ValueError: bad item" in f"{other.output} {other.value}"


@pytest.mark.ranks
def test_one_that_all_ranks_raise_and_catch_ends_none(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, 3, caught, str(tmp_path), (0, 1, 2))
    assert [each.value for each in ended] == ["no rank has failed"] * 3, ended


def train_until_asked(rank: int, folder: str) -> int:
    """Train until another thread of the chief has made the command ``stacks``; return the exit code of that."""
    codes: list[int] = []
    asking = threading.Thread(target=lambda: codes.append(main(["stacks", folder])))

    def step() -> None:
        distributed.all_reduce(torch.ones(1))
        if codes and len([*Path(folder).glob("stacks-*/rank-*.txt")]) == 2:
            loop.request_stop("asked")

    model, hooks = torch.nn.Linear(1, 1), [CheckpointSaverHook(folder, every_n_steps=10**9)]
    with MonitoredLoop(step, model, hooks=hooks, checkpoint_dir=folder) as loop:
        if not rank:
            asking.start()
        for _ in loop.until_stop(itertools.count()):
            loop.run()
    if not rank:
        asking.join()
    return sum(codes)


@pytest.mark.ranks
def test_all_ranks_of_a_live_job_answer_with_their_stacks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = run_ranks(tmp_path, 2, train_until_asked, str(run))
    assert [each[:2] for each in ended] == [(0, 0)] * 2, ended
    assert re.search(r"\n\| 1 \| \d+ \| 0 s \| .*\n", ended[0].output)
    (folder,) = run.glob("stacks-*")
    texts = [(folder / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert all("train_until_asked" in text for text in texts)
    assert "CRITICAL" not in ended[0].output


# -- one process ------------------------------------------------------------------------------------------------------


def produce(queue: Any) -> None:
    for number in range(3):
        queue.put(number)
    queue.close()
    queue.join_thread()
    os.kill(os.getpid(), signal.SIGKILL)


def items_of_a_worker() -> Iterator[int]:
    queue: Any = multiprocessing.Queue()
    multiprocessing.Process(target=produce, args=(queue,), daemon=True).start()
    while True:
        yield queue.get()


class StopsItsWorker(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return index


def train_alone(folder: str, fault: str, action: str = "abort") -> None:
    stalls.LOOK_SECS = 0.1
    lock = threading.Lock()

    def step(number: int) -> None:
        if fault == "at once":
            keep_the_lock(17)
        if number == 5 and fault == "in the last run":
            keep_the_lock(6)
        time.sleep(0.2)  # so that a look sees the runs before the fault
        if number == 3 and fault == "lock":
            with lock, lock:
                pass
        if number == 3 and fault == "global lock":
            keep_the_lock(6)
        if number == 3 and fault == "for ever":
            keep_the_lock(1000)
        if number == 3 and fault == "pause":
            pause(6)

    data: Any = range(1 if fault == "at once" else ITEMS)
    if fault == "killed worker":
        data = items_of_a_worker()
    if fault == "stopped worker":
        data = torch.utils.data.DataLoader(StopsItsWorker(), batch_size=None, num_workers=1)
    hooks = [CheckpointSaverHook(folder, every_n_steps=100), StopAtStepHook(last_step=ITEMS)]
    model = torch.nn.Linear(1, 1)
    with MonitoredLoop(
        step,
        model,
        hooks=hooks,
        checkpoint_dir=folder,
        stall_secs=2,
        stall_action=action,  # type: ignore[arg-type]
    ) as loop:
        for number in loop.until_stop(data):
            loop.run(int(number))


def keep_the_lock(secs: int) -> None:
    ctypes.PyDLL(None).sleep(secs)  # a PyDLL keeps Python's lock during the call


def pause(secs: int) -> None:
    """Have all threads of this process stopped for ``secs`` seconds."""
    command = f"kill -STOP {os.getpid()}; sleep {secs}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", command]):
        time.sleep(0.5)  # it is stopped in here


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ("lock", r"in the step, test_jobs.py:\d+ \(step\)\."),
        (
            "killed worker",
            r"waits for data at depth 1, Queue.get, test_jobs.py:\d+ \(items_of_a_worker\); "
            r"worker Process-\S+ \(pid (\d+)\) was killed by signal 9\.",
        ),
        (
            "stopped worker",
            r"waits for data at depth 1, _BaseDataLoaderIter.__next__, test_jobs.py:\d+ \(train_alone\); "
            r"worker Process-\S+ \(pid (\d+)\) is stopped\.",
        ),
    ],
)
def test_a_process_that_stands_still_says_why_and_ends(fault: str, place: str, tmp_path: Path) -> None:
    ended = processes.call(train_alone, str(tmp_path), fault, ignored=("",))
    assert ended.code == 70, ended.output
    (line,) = re.findall(r"^CRITICAL:torchhooks:(no run .*)$", ended.output, re.MULTILINE)
    match = re.fullmatch(rf"no run .* \d+ s\. .* run 4: {place}", line)
    assert match is not None, line
    for pid in match.groups():  # no process is left, but perhaps a zombie that nobody has collected
        stat = Path(f"/proc/{pid}/stat")
        wait_until(lambda: not stat.exists() or ") Z " in stat.read_text(), secs=20)  # noqa: B023


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "secs", "run"), [("global lock", 2, "[45]"), ("at once", 10, "[12]"), ("in the last run", 2, "6")]
)
def test_a_call_that_keeps_the_global_lock_is_in_the_report_of_faulthandler(
    fault: str, secs: int, run: str, tmp_path: Path
) -> None:
    ended = processes.call(train_alone, str(tmp_path), fault, "report")
    assert ended.code == 0, ended.output
    (line,) = re.findall(r"^CRITICAL:torchhooks:(.*)$", ended.output, re.MULTILINE)
    assert line.startswith(f"a call kept Python's global lock for more than {secs} s")
    (folder,) = tmp_path.glob("stall-*")
    assert re.fullmatch(f"stall-{run}", folder.name)
    assert re.search(r"test_jobs.py\", line \d+ in keep_the_lock", (folder / "rank-0.lock.txt").read_text())
    assert (folder / "report.md").read_text() == f"{line}\n"
    assert not (tmp_path / ".stall-rank-0.txt").exists()


@pytest.mark.slow
def test_a_call_that_keeps_the_global_lock_is_ended_by_another_process(tmp_path: Path) -> None:
    ended = processes.call(train_alone, str(tmp_path), "for ever")
    assert ended.code == -signal.SIGKILL
    assert f"killing it; {tmp_path}/.stall-rank-0.txt has its stacks" in ended.output
    assert "in keep_the_lock" in (tmp_path / ".stall-rank-0.txt").read_text()


@pytest.mark.slow
def test_a_pause_of_the_whole_process_is_no_stall(tmp_path: Path) -> None:
    ended = processes.call(train_alone, str(tmp_path), "pause")
    assert ended.code == 0, ended.output
    assert "CRITICAL" not in ended.output
    assert not list(tmp_path.glob("stall-*"))


@pytest.mark.parametrize("leaves", ["sys.exit(0)", "os._exit(0)", "train()"])
def test_a_forked_process_ends_while_the_loop_of_its_parent_is_open(leaves: str, tmp_path: Path) -> None:
    program = f"""
    import os, sys
    from pathlib import Path
    from torchhooks import CheckpointSaverHook, MonitoredLoop
    from torchhooks.tools.run_record import read_record

    folder = Path({str(tmp_path)!r})

    def train():
        with MonitoredLoop(bool, hooks=[CheckpointSaverHook(folder / "child", save_steps=9)]) as loop:
            loop.run(1)
        os._exit(0)

    with MonitoredLoop(bool, hooks=[CheckpointSaverHook(folder / "run", save_steps=9)]) as loop:
        child = os.fork()
        if not child:
            {leaves}
        loop.run(1)
        assert os.waitpid(child, 0)[1] == 0
        assert not read_record(folder / "run").ended
    assert read_record(folder / "run").ended
    """
    done = processes.fork_program(program)
    assert done.returncode == 0, done.stderr
