"""The memory of snapshots: how storages are arranged in it, and the thread that gets it before a save needs it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import simulated
from support.accelerators import DEVICE
from support.devices import FakeDevice
from support.examples import examples
from support.waiting import wait_until

import torchhooks.device.snapshot
from torchhooks import (
    BestCheckpointHook,
    CheckpointSaverHook,
    MonitoredLoop,
    Saver,
    Session,
    SessionRunHook,
    list_checkpoints,
)
from torchhooks.device.accelerator import ALIGNMENT
from torchhooks.device.snapshot import Block, SnapshotMemory, arrange

Lines = list[tuple[str, str]]


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a thousand bytes, all of which a thread gets."""
    monkeypatch.setattr(torchhooks.device.snapshot, "_BLOCK", 1000)
    monkeypatch.setattr(torchhooks.device.snapshot, "_AT_ONCE", 0)


# -- how storages are arranged ----------------------------------------------------------------------------------------

SIZES = st.lists(st.tuples(st.sampled_from(["cpu", "cuda"]), st.integers(0, 3000)), max_size=30)


def block(kind: str, nbytes: int) -> Block:
    return kind, torch.empty(nbytes, dtype=torch.uint8)


@examples(200)
@given(SIZES, SIZES)
def test_storages_of_any_sizes_get_memory_of_their_own(sizes: list[Any], before: list[Any]) -> None:
    blocks = [block(*size) for size in before]
    places, added = arrange(sizes, blocks)
    blocks += [block(*size) for size in added]
    taken = sorted(
        (number, start, start + max(size, 1)) for (number, start), (_, size) in zip(places, sizes, strict=True)
    )
    for (number, start), (kind, nbytes) in zip(places, sizes, strict=True):
        assert blocks[number][0] == kind
        assert start % ALIGNMENT == 0
        assert start + nbytes <= blocks[number][1].nbytes
    for (one, _, stop), (other, start, _) in itertools.pairwise(taken):
        assert one != other or stop <= start


@examples(100)
@given(SIZES, st.randoms(use_true_random=False))
def test_memory_for_storages_is_enough_for_a_part_of_them(sizes: list[Any], random: Any) -> None:
    _, added = arrange(sizes, [])
    some = [size for size in sizes if random.random() < 0.8]
    assert arrange(some, [block(*size) for size in added])[1] == []


def test_an_empty_tensor_before_one_of_another_dtype_is_saved(tmp_path: Path) -> None:
    saver, box = Saver(async_save=True), torch.nn.Module()
    box.register_buffer("none", torch.empty(0, dtype=torch.int64))
    box.register_buffer("one", torch.ones(3))
    path = saver.save(Session(box), tmp_path / "model.ckpt", 1)
    saver.close()
    saved = torch.load(f"{path}/state.pt", weights_only=True)["model"]
    assert (saved["none"].numel(), saved["one"].tolist()) == (0, [1.0] * 3)


# -- the thread -------------------------------------------------------------------------------------------------------


class Slow(FakeDevice):
    """A device whose memory a thread gets only when :attr:`go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.threads: list[str] = []

    def __enter__(self) -> Slow:
        super().__enter__()
        return self

    def memory(self, nbytes: int) -> torch.Tensor:
        self.threads.append(threading.current_thread().name)
        if self.threads[-1] == "torchhooks pinning":
            assert self.go.wait(60)
        return super().memory(nbytes)


@pytest.mark.usefixtures("_small")
def test_a_thread_gets_the_memory_block_by_block() -> None:
    memory, sizes = SnapshotMemory(), [("cpu", 600)] * 3
    with Slow() as device:
        assert not memory.prepare(sizes)
        assert not memory.prepare(sizes)  # it is at it
        device.go.set()
        wait_until(lambda: memory.prepare(sizes))
        assert device.allocations == [640] * 3
        assert set(device.threads) == {"torchhooks pinning"}
        blocks, storages = memory.take(sizes)
        assert [storage.nbytes() for storage in storages] == [600] * 3
        memory.give_back(blocks)
        assert memory.prepare(sizes[:2])
        more = [*sizes, ("cpu", 10)]
        assert not memory.prepare(more)  # only what is missing is allocated
        wait_until(lambda: memory.prepare(more))
        memory.release()
    assert device.allocations == [640] * 3 + [64]


@pytest.mark.usefixtures("_small")
def test_what_takes_the_memory_waits_for_the_thread() -> None:
    memory, sizes = SnapshotMemory(), [("cpu", 600)] * 3
    with Slow() as device:
        memory.prepare(sizes)
        threading.Timer(0.05, device.go.set).start()
        assert len(memory.take(sizes)[0]) == 3
    assert set(device.threads) == {"torchhooks pinning"}


@pytest.mark.usefixtures("_small")
def test_release_does_not_wait_for_blocks_that_nothing_needs() -> None:
    memory = SnapshotMemory()
    with Slow() as device:
        memory.prepare([("cpu", 600)] * 100)
        wait_until(lambda: device.threads != [])
        threading.Timer(0.5, device.go.set).start()  # long after release() has begun
        memory.release()
        assert len(device.allocations) == 1
        assert memory.take([("cpu", 5)])[0][0][1].nbytes == 64


@pytest.mark.usefixtures("_small")
def test_a_ctrl_c_while_a_save_waits_for_memory_loses_none() -> None:
    memory, sizes = SnapshotMemory(), [("cpu", 600)] * 3
    with Slow() as device:
        memory.prepare(sizes)
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            memory.take(sizes)
        assert not memory.prepare(sizes)  # the thread is still at it
        device.go.set()
        assert len(memory.take(sizes)[0]) == 3
    assert device.allocations == [640] * 3


@pytest.mark.usefixtures("_small")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    memory, sizes = SnapshotMemory(), [("cpu", 600)] * 3
    with Slow() as device:
        memory.prepare(sizes)
        process = multiprocessing.get_context("fork").Process(target=memory.take, args=(sizes,))
        process.start()
        process.join(30)
        assert process.exitcode == 0
        device.go.set()
        memory.release()


def test_memory_of_a_host_needs_no_thread() -> None:
    assert SnapshotMemory().prepare([("cpu", 1 << 30)])


@pytest.mark.usefixtures("_small")
def test_memory_that_cannot_be_got_is_an_error_of_the_save_that_needs_it(tmp_path: Path) -> None:
    class Full(FakeDevice):
        def memory(self, nbytes: int) -> torch.Tensor:
            raise RuntimeError("out of memory")

    saver, session = Saver(async_save=True), Session(torch.nn.Linear(30, 30))
    with Full():
        assert not saver.prepare(session)
        wait_until(lambda: saver.prepare(session))
        with pytest.raises(RuntimeError, match="out of memory"):
            saver.save(session, tmp_path / "model.ckpt", 1)
        saver.close()


@pytest.mark.usefixtures("_small")
def test_a_process_that_can_start_no_thread_gets_the_memory_when_it_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    memory = SnapshotMemory()
    with FakeDevice() as device:
        assert memory.prepare([("cpu", 600)])
        assert device.allocations == []
        assert len(memory.take([("cpu", 600)])[0]) == 1


def test_memory_is_exchanged_for_less_if_the_state_has_become_much_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchhooks.device.snapshot, "_AT_ONCE", 0)
    memory = SnapshotMemory()
    for nbytes, expected in ((6400, 6400), (6000, 6400), (640, 640)):
        blocks, _ = memory.take([("cpu", nbytes)])
        assert [block.nbytes for _, block in blocks] == [expected]
        memory.give_back(blocks)


# -- a loop -----------------------------------------------------------------------------------------------------------


class Training:
    """A model whose optimizer makes its state in the first step."""

    def __init__(self, device: str = "cpu", width: int = 30) -> None:
        self.model = torch.nn.Linear(width, width, device=device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.after: Callable[[], object] = bool
        self.runs = 0

    def accumulate(self) -> None:
        """Make a step of the optimizer in every fourth run only."""
        self.runs += 1
        if self.runs % 4 == 0:
            self.step()

    def step(self) -> None:
        self.model.weight.grad = torch.ones_like(self.model.weight)
        self.optimizer.step()
        self.after()


@contextmanager
def training_loop(training: Training, folder: Path, *hooks: SessionRunHook, **options: Any) -> Iterator[Any]:
    saver = CheckpointSaverHook(folder, save_steps=4, async_save=True, **options)
    with MonitoredLoop(training.step, training.model, training.optimizer, hooks=[saver, *hooks]) as loop:
        yield loop


def pins() -> bool:
    """Return whether the thread is at work."""
    return any(thread.name == "torchhooks pinning" for thread in threading.enumerate())


def steps_in(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder)]


def step_in(folder: Path, step: int) -> float:
    """Return how many steps the optimizer had made when the checkpoint was saved."""
    saved = torch.load(folder / f"model.ckpt-{step}/state.pt", weights_only=True)
    return float(saved["optimizer"]["state"][0]["step"])


@pytest.mark.usefixtures("_small")
def test_a_save_is_put_off_to_the_first_item_at_which_its_memory_is_there(tmp_path: Path, lines: Lines) -> None:
    with Slow() as device, training_loop(Training(), tmp_path) as loop:
        waited_for = [*device.threads]  # by the save at the creation of the session
        for number in loop.until_stop(range(1, 13)):
            loop.run()
            if number == 6:
                device.go.set()
                wait_until(lambda: not pins())
    assert steps_in(tmp_path) == [0, 6, 10, 12]  # the next period begins with the save
    assert step_in(tmp_path, 6) == 6.0
    assert [text for _, text in lines if "pinned" in text] == [
        "the checkpoint of step 4 is put off until memory for its copy is pinned"
    ]
    assert set(waited_for) == {"MainThread"}
    assert set(device.threads[len(waited_for) :]) == {"torchhooks pinning"}


@pytest.mark.usefixtures("_small")
def test_a_save_that_is_put_off_is_made_between_items_not_in_a_long_one(tmp_path: Path) -> None:
    with Slow() as device, training_loop(Training(), tmp_path) as loop:
        for epoch in loop.until_stop(range(3)):
            for _ in range(5):
                loop.run()
            if epoch == 1:
                device.go.set()
                wait_until(lambda: not pins())
    assert steps_in(tmp_path) == [0, 10, 15]


@pytest.mark.usefixtures("_small")
def test_an_item_that_is_left_by_break_waits_for_the_memory(tmp_path: Path) -> None:
    with Slow() as device, training_loop(Training(), tmp_path) as loop:
        for number in loop.until_stop(range(10)):
            loop.run()
            if number == 4:
                break
        threading.Timer(0.05, device.go.set).start()
        loop.run()
        assert loop.session.saved_step == 6
    assert steps_in(tmp_path) == [0, 6]


@pytest.mark.usefixtures("_small")
def test_without_until_stop_it_is_put_off_to_a_later_run(tmp_path: Path) -> None:
    with Slow() as device, training_loop(Training(), tmp_path) as loop:
        for _ in range(5):
            loop.run()
        device.go.set()
        wait_until(lambda: not pins())
        loop.run()
        assert loop.session.saved_step == 6
    assert steps_in(tmp_path) == [0, 6]


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("saves", ["all", "best"])
def test_the_thread_begins_when_the_optimizer_has_made_its_state(saves: str, tmp_path: Path) -> None:
    best = BestCheckpointHook(tmp_path, lambda: 1.0, mode="max", every_n_steps=1000, async_save=True)
    saver = best if saves == "best" else CheckpointSaverHook(tmp_path, save_steps=1000, async_save=True)
    training = Training()
    with Slow() as device:
        device.go.set()
        with MonitoredLoop(training.accumulate, training.model, training.optimizer, hooks=[saver]) as loop:
            wait_until(lambda: not pins())
            device.go.clear()
            began = []
            for _ in range(8):
                loop.run()
                began.append(pins())
            device.go.set()
    # The optimizer makes its first step in the fourth run, and the hook looks in the runs 1, 3 and 7.
    assert began == [False] * 6 + [True] * 2


@pytest.mark.usefixtures("_small")
def test_a_save_that_finds_its_memory_is_not_put_off(tmp_path: Path, lines: Lines) -> None:
    with Slow() as device, training_loop(Training(), tmp_path) as loop:
        device.go.set()
        for _ in loop.until_stop(range(12)):
            loop.run()
            wait_until(lambda: not pins())
    assert steps_in(tmp_path) == [0, 4, 8, 12]
    assert not any("pinned" in text for _, text in lines)


@pytest.mark.usefixtures("_small")
def test_a_stop_waits_for_the_memory(tmp_path: Path) -> None:
    with Slow() as device, training_loop(Training(), tmp_path) as loop:
        for number in loop.until_stop(range(1, 100)):
            loop.run()
            if number == 5:
                threading.Timer(0.05, device.go.set).start()
                loop.request_stop("enough")
    assert steps_in(tmp_path) == [0, 5]


@pytest.mark.usefixtures("_small")
def test_a_loop_that_fails_while_memory_is_pinned_ends(tmp_path: Path) -> None:
    def fail() -> None:
        threading.Timer(0.05, device.go.set).start()
        raise ZeroDivisionError

    training = Training()
    training.after = fail
    with Slow() as device, pytest.raises(ZeroDivisionError), training_loop(training, tmp_path) as loop:
        loop.run()
    assert steps_in(tmp_path) == [0]


@pytest.mark.usefixtures("_small")
def test_the_best_state_is_saved_with_its_own_score_and_so_waits(tmp_path: Path) -> None:
    hook = BestCheckpointHook(tmp_path, lambda global_step: global_step, mode="max", every_n_steps=2, async_save=True)
    training = Training()
    with Slow() as device, MonitoredLoop(training.step, training.model, training.optimizer, hooks=[hook]) as loop:
        device.go.set()
        for _ in loop.until_stop(range(4)):
            loop.run()
    (best,) = list_checkpoints(tmp_path / "best")
    assert best.step == 4


def test_an_optimizer_with_a_state_of_its_own_kind_is_no_error(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {}

    training = Training()
    optimizer = Own(training.model.parameters(), lr=0.1)
    optimizer.state[training.model.weight] = torch.ones(3)  # not a dict of tensors
    saver = Saver(async_save=True)
    assert saver.prepare(Session(training.model, optimizer))
    saver.save(Session(training.model, optimizer), tmp_path / "model.ckpt", 1)
    saver.close()


@pytest.mark.usefixtures("_small")
def test_what_only_a_save_has_seen_counts_too(tmp_path: Path) -> None:
    class Average:
        """An object of the script's own, whose tensors show only in its state."""

        def __init__(self) -> None:
            self.values = torch.ones(500)

        def state_dict(self) -> dict[str, Any]:
            return {"values": self.values}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values = state["values"]

    training, saver = Training(), Saver(async_save=True)
    session = Session(training.model, training.optimizer, state={"average": Average()})
    with FakeDevice() as device:
        saver.save(session, tmp_path / "model.ckpt", 0)
        training.step()
        wait_until(lambda: saver.prepare(session))
        before = len(device.allocations)
        saver.save(session, tmp_path / "model.ckpt", 1)
        assert len(device.allocations) == before
        saver.close()


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE != simulated.NAME, reason="the time of the allocation is simulated")
def test_no_run_waits_while_memory_is_pinned(tmp_path: Path) -> None:
    training = Training(DEVICE, 2000)  # 16 MB, and twice that for the optimizer
    secs: list[float] = []
    with training_loop(training, tmp_path) as loop:
        loop.session.wait_for_savers()  # a save waits for the one before it
        with simulated.slow_pinning(secs_per_gb=60.0):
            loop.run()
            began = time.monotonic()
            for _ in loop.until_stop(range(1000)):
                began, before = time.monotonic(), began
                secs.append(began - before)  # the save is made between two items
                if loop.session.saved_step:
                    break
                loop.run()
                time.sleep(0.01)
        assert loop.session.saved_step > 4  # it was put off
    states = training.optimizer.state.values()
    pinned_in = 60.0 * sum(int(value.nbytes) for state in states for value in state.values()) / 1e9
    assert pinned_in > 1.9
    assert max(secs) < pinned_in / 2  # 10 ms on a quiet machine
