"""Checkpoints of several ranks: whole on all of them or not there, and restored on any number of them."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed
from support import paths
from support.disks import DiskOfMoments, Moment, killing_at
from support.dtensors import simulated_group
from support.paths import ROOT
from support.rank_processes import run_ranks
from support.rank_threads import Hub, ThreadRanks, in_threads
from support.rank_training import train, train_in_each
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torchhooks.checkpoints.restoring
import torchhooks.checkpoints.saver
import torchhooks.checkpoints.saving
from torchhooks import (
    BestCheckpointHook,
    CheckpointError,
    CheckpointSaverHook,
    CheckpointSaverListener,
    DamagedCheckpointError,
    GlobalStepWaiterHook,
    LifecycleError,
    MonitoredLoop,
    PeerError,
    Ranks,
    Saver,
    Session,
    SessionRunHook,
    StopAtStepHook,
    Variables,
    list_checkpoints,
)
from torchhooks.checkpoints.folder import encoded, read_manifest
from torchhooks.checkpoints.restoring import read
from torchhooks.checkpoints.saving import Contents, check_is_visible, write
from torchhooks.checkpoints.steps import gather_from_all, run_on_all
from torchhooks.common.digests import digests
from torchhooks.common.files import Disk
from torchhooks.ranks.ranks import LoopRanks
from torchhooks.testing import log_lines
from torchhooks.tools.run_record import NAME as RECORD_NAME

QUICK = {"tick_secs": 0.01}


# -- ranks that are threads, which share the random states of their process -------------------------------------------


class Counter:
    """A loader with a position of its own, which differs between ranks."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]


class Shared(Counter):
    """An object of which every rank has the same state."""

    __iter__: Any = None


class PerRank(Shared):
    per_rank = True


class HookWithState(SessionRunHook):
    def __init__(self, number: int = 0) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]


def make_session(ranks: Any, number: int = 0) -> Session:
    """Return a session in which everything is filled with ``number``."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, number)
    state = {"shared": Shared(number), "loader": Counter(number), "own": PerRank(number)}
    return Session(model, state=state, hooks={"hook": HookWithState(number)}, ranks=ranks)


def numbers(session: Session) -> list[float]:
    model, hook = session.model, session.hooks["hook"]
    assert isinstance(model, torch.nn.Linear)
    return [model.weight[0, 0].item(), *(part.number for part in (*session.state.values(), hook))]  # type: ignore[attr-defined]


def connected(given: ThreadRanks) -> LoopRanks:
    """Return the ranks of a new loop, whose other ranks never fail."""
    ranks = LoopRanks(given)
    ranks.connect(lambda: None)
    return ranks


def save_on(size: int, folder: Path, **options: Any) -> list[Any]:
    def main(ranks: ThreadRanks, hub: Hub) -> str:
        session = make_session(connected(ranks), ranks.rank + 1)
        torch.nn.init.ones_(session.model.weight)  # type: ignore[union-attr, arg-type]
        saver = Saver(**options)
        path = saver.save(session, folder / "model.ckpt", 3)
        saver.wait_for_all(session)
        saver.close()
        return path

    return in_threads(size, main)


def restore_on(size: int, folder: Path, **options: Any) -> list[Any]:
    def main(ranks: ThreadRanks, hub: Hub) -> list[float]:
        session = make_session(connected(ranks))
        assert Saver(**options).restore_latest(session, folder) is not None
        return numbers(session)

    return in_threads(size, main)


def test_a_hook_that_fails_at_the_end_on_one_rank_prevents_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two hooks of one process cannot have one folder, so here each rank has its own.
    monkeypatch.setattr(torchhooks.checkpoints.saver, "check_is_visible", lambda ranks, path: True)

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        def metric() -> float:
            if ranks.rank and loop.global_step == 3:
                raise OSError("no validation data")
            return loop.global_step

        best = BestCheckpointHook(tmp_path / f"best on {ranks.rank}", metric, save_steps=2, mode="max")
        hooks = [best, CheckpointSaverHook(tmp_path, save_steps=100)]
        with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path, ranks=ranks) as loop:
            for _ in loop.until_stop(range(3)):
                loop.run()

    chief, other = in_threads(2, main)
    assert repr(other) == "OSError('no validation data')"
    assert isinstance(chief, LifecycleError)
    assert str(chief).startswith(
        "rank 0 gathers values for the best checkpoint, and rank 1 for the end of the next hook"
    )
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0, 3]


def test_all_ranks_skip_a_save_while_one_of_them_still_writes(tmp_path: Path) -> None:
    class Gated(Disk):
        def rename(self, path: str, new_path: str) -> None:
            assert gate.wait(30)
            super().rename(path, new_path)

    def main(ranks: ThreadRanks, hub: Hub) -> int:
        saver = Saver(async_save=True)
        if not ranks.rank:
            saver.disk = Gated()
        hook = CheckpointSaverHook(tmp_path, every_n_steps=1, saver=saver, async_save="skip")
        with MonitoredLoop(lambda: None, hooks=[hook], checkpoint_dir=tmp_path, ranks=ranks) as loop:
            for _ in range(2):
                loop.run()
            if not ranks.rank:
                gate.set()
        return loop.global_step

    gate = threading.Event()
    assert in_threads(2, main) == [2, 2]
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0, 2]


def test_a_rank_that_fails_after_the_last_run_does_not_let_the_others_wait_forever(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        hooks = [StopAtStepHook(2), CheckpointSaverHook(tmp_path, save_steps=100)]
        try:
            with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path, ranks=ranks) as loop:
                for _ in loop.until_stop(range(3)):
                    loop.run()
                    if ranks.rank and loop.global_step == 2:
                        raise OSError("in the body")
        finally:
            if not ranks.rank:
                ended.set()
            assert ended.wait(30)  # the process of the rank that failed goes on

    ended = threading.Event()
    chief, other = in_threads(2, main, stuck_secs=0.2)
    assert repr(other) == "OSError('in the body')"
    assert isinstance(chief, LifecycleError)
    assert "rank 1 left the loop" in str(chief)


def test_the_rank_whose_state_cannot_be_saved_is_named_whatever_its_error(tmp_path: Path) -> None:
    class Broken(Shared):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("sizes do not match")  # the class of errors that torch raises if a rank is gone

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        hooks = [CheckpointSaverHook(tmp_path, save_steps=100)]
        MonitoredLoop(lambda: None, hooks=hooks, state={"it": Broken()}, checkpoint_dir=tmp_path, ranks=ranks).close()

    chief, other = in_threads(2, main)
    assert repr(chief) == "RuntimeError('sizes do not match')"
    assert "on rank 0: RuntimeError: sizes do not match" in str(other)


def test_listeners_of_the_chief_alone_have_every_rank_save_what_another_saver_has_saved(tmp_path: Path) -> None:
    class Noting(CheckpointSaverListener):
        def after_save(self, session: Session, step: int) -> None:
            noted.append(step)

    def main(ranks: ThreadRanks, hub: Hub) -> int:
        listeners = [] if ranks.rank else [Noting()]
        hooks = [
            CheckpointSaverHook(tmp_path, save_steps=2),
            CheckpointSaverHook(tmp_path, save_steps=3, listeners=listeners),
        ]
        with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path, ranks=ranks) as loop:
            for _ in loop.until_stop(range(7)):
                loop.run()
        return loop.global_step

    noted: list[int] = []
    assert in_threads(2, main) == [7, 7]
    assert noted == [0, 3, 6, 7]


def test_a_folder_that_the_ranks_do_not_share_is_named_on_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchhooks.checkpoints.saving, "_VISIBLE_SECS", 0.0)

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        folder = tmp_path / str(ranks.rank)  # the path is the same on both, but not the machine
        if not ranks.rank:
            folder.mkdir()
        write(connected(ranks), Contents({}, {}, {}), str(folder), Disk())

    for error in in_threads(2, main):
        assert isinstance(error, CheckpointError)
        assert "all ranks share" in str(error)


class Statistics(torch.nn.Module):
    """A module of which each rank has its own."""

    per_rank = True

    def __init__(self, number: int) -> None:
        super().__init__()
        self.register_buffer("number", torch.tensor(number))


def session_with_buffers(ranks: Any, number: int = 0) -> tuple[Session, Callable[[], list[int]]]:
    """Return a session, and a function that returns the numbers in its buffers: the first is the same on all ranks."""
    model, statistics = torch.nn.Linear(1, 1, bias=False), Statistics(number + 20)
    torch.nn.init.zeros_(model.weight)
    model.register_buffer("equal", torch.tensor(7 if number else 0))
    model.register_buffer("own", torch.tensor(number))
    model.register_buffer("not saved", torch.tensor(number), persistent=False)
    buffers: Any = (*model.buffers(), *statistics.buffers())
    session = Session(model, state={"statistics": statistics}, ranks=ranks)
    return session, lambda: [buffer.item() for buffer in buffers]


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize(
    ("size", "restored"), [(2, [[7, 1, 0, 21], [7, 2, 0, 22]]), (1, [[7, 1, 0, 20]]), (3, [[7, 1, 0, 20]] * 3)]
)
def test_buffers_belong_to_the_ranks_on_which_they_differ(
    tmp_path: Path, async_save: bool, size: int, restored: list[list[int]]
) -> None:
    def save(ranks: ThreadRanks, hub: Hub) -> None:
        saver = Saver(async_save=async_save)
        saver.save(session_with_buffers(connected(ranks), ranks.rank + 1)[0], tmp_path / "model.ckpt", 3)
        saver.close()

    def restore(ranks: ThreadRanks, hub: Hub) -> list[int]:
        session, numbers = session_with_buffers(connected(ranks))
        assert Saver().restore_latest(session, tmp_path) is not None
        return numbers()

    assert in_threads(2, save) == [None, None]
    saved = torch.load(tmp_path / "model.ckpt-3" / "state.pt", weights_only=True)
    assert "own" in saved["ranks"][0]["rank_tensors"]["model"]
    assert in_threads(size, restore) == restored


# -- weights that differ ----------------------------------------------------------------------------------------------


class Experts(torch.nn.Module):
    """A layer that all ranks share, and one that each rank has for itself."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.trunk, self.expert = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.trunk.weight, 1)
        torch.nn.init.constant_(self.expert.weight, rank + 2)


class Stage(torch.nn.Module):
    """One stage of a pipeline, with names and numbers of parameters of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for number in range(rank + 1):
            layer = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.constant_(layer.weight, 10 * rank + number)
            self.add_module(f"layer{rank}{number}", layer)


RESTS_OF_OTHERS = rf"tfevents|^{re.escape(RECORD_NAME)}$|^\.stall-rank"


def checkpoints_and_rests(folder: str) -> list[str]:
    """Return the names in ``folder`` of checkpoints, and of what a save has left behind."""
    return sorted(name for name in os.listdir(folder) if not re.search(RESTS_OF_OTHERS, name))


def trained(ranks: ThreadRanks, model: Any, restored: Any = None) -> tuple[Session, list[Any]]:
    """Return a session after a step, or with what ``restored`` has, and its parameters and their moments."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    session = Session(model, optimizer, ranks=connected(ranks))
    if restored is None:
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    else:
        Saver().restore_latest(session, restored)
    moments = [optimizer.state[parameter]["exp_avg"].item() for parameter in model.parameters()]
    return session, [*(parameter.item() for parameter in model.parameters()), *moments]


def save_and_restore(
    folder: Path, make: Callable[[int], torch.nn.Module], *, restored_by: int = 2, async_save: bool = False
) -> tuple[list[Any], list[Any]]:
    """Return the parameters and moments of two ranks when they save, and of all ranks that restore."""

    def save(ranks: ThreadRanks, hub: Hub) -> list[Any]:
        session, values = trained(ranks, make(ranks.rank))
        saver = Saver(async_save=async_save)
        saver.save(session, folder / "model.ckpt", 1)
        saver.close()
        return values

    def restore(ranks: ThreadRanks, hub: Hub) -> list[Any]:
        model = make(ranks.rank)
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        return trained(ranks, model, folder)[1]

    return in_threads(2, save), in_threads(restored_by, restore)


def of_its_own(rank: int) -> torch.nn.Module:
    model = Experts(rank)
    model.per_rank = True  # type: ignore[assignment]
    return model


def stage_of_its_own(rank: int) -> torch.nn.Module:
    model = Stage(rank)
    model.per_rank = True  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("make", [of_its_own, stage_of_its_own])
def test_with_per_rank_each_rank_gets_its_own_weights_and_moments_back(
    tmp_path: Path, make: Callable[[int], torch.nn.Module], async_save: bool
) -> None:
    saved, restored = save_and_restore(tmp_path, make, async_save=async_save)
    assert saved[0] != saved[1]
    assert restored == saved


@pytest.mark.parametrize("changed", [None, 0, 1, "shared"])
def test_with_per_rank_the_order_of_the_parameters_is_that_of_each_rank(tmp_path: Path, changed: Any) -> None:
    def session(ranks: ThreadRanks, *, is_reversed: bool, is_shared_reversed: bool = False) -> Session:
        model = of_its_own(ranks.rank)
        shared = torch.nn.Linear(1, 1)
        for parameter in shared.parameters():
            torch.nn.init.ones_(parameter)  # a seed would be that of all threads
        parameters = [*model.parameters()]
        optimizer = torch.optim.SGD(parameters[::-1] if is_reversed else parameters, 0.1)
        of_shared = torch.optim.SGD([*shared.parameters()][:: -1 if is_shared_reversed else 1], 0.1)
        state: dict[str, Any] = {"shared": shared, "of_shared": of_shared}
        return Session(model, optimizer, state, ranks=connected(ranks))

    def save(ranks: ThreadRanks, hub: Hub) -> str:
        saving = session(ranks, is_reversed=ranks.rank == 1)
        return Saver().save(saving, tmp_path / "model.ckpt", 1)

    def restore(ranks: ThreadRanks, hub: Hub) -> str:
        is_reversed, is_shared_reversed = (ranks.rank == 1) != (ranks.rank == changed), changed == "shared"
        restoring = session(ranks, is_reversed=is_reversed, is_shared_reversed=is_shared_reversed and ranks.rank == 1)
        Saver().restore(restoring, tmp_path / "model.ckpt-1")
        return "restored"

    assert in_threads(2, save) == [str(tmp_path / "model.ckpt-1")] * 2
    results = in_threads(2, restore)
    if changed is None:
        assert results == ["restored"] * 2
    else:
        rank, part = (1, "of_shared") if changed == "shared" else (changed, "optimizer")
        assert f"{part}: has its parameters in another order" in str(results[rank])
        assert all(isinstance(result, CheckpointError) for result in results)


def test_the_first_save_refuses_an_optimizer_whose_parameters_come_in_another_order_on_a_rank(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        model = torch.nn.Linear(1, 1)
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        optimizer = torch.optim.SGD([*model.parameters()][:: -1 if ranks.rank else 1], 0.1)
        Saver().save(Session(model, optimizer, ranks=connected(ranks)), tmp_path / "model.ckpt", 1)

    for error in in_threads(2, main):
        assert isinstance(error, CheckpointError)
        assert str(error).startswith(
            "the order of the parameters of 'optimizer' is not the same on rank 0 and on rank 1"
        )
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Experts, "the parameter 'expert.weight' of 'model'"),
        (Stage, "the parameter 'layer00.weight' of 'model'"),
        (lambda rank: torch.nn.Linear(1 + rank, 1), "the parameter 'weight' of 'model'"),
    ],
)
def test_the_first_save_refuses_parameters_that_differ_between_ranks_and_names_the_first(
    tmp_path: Path, make: Callable[[int], torch.nn.Module], what: str
) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        Saver().save(Session(make(ranks.rank), ranks=connected(ranks)), tmp_path / "model.ckpt", 1)

    for error in in_threads(2, main):
        assert isinstance(error, CheckpointError)
        assert str(error).startswith(
            f"{what} is not the same on rank 0 and on rank 1, and a checkpoint has one for all"
        )
        assert "set per_rank = True on the module, or give the ranks with the same model a loop" in str(error)
    assert list_checkpoints(tmp_path) == []


def test_the_first_save_refuses_optimizers_with_other_groups(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD([*model.parameters()][: 1 + ranks.rank], lr=0.1)
        Saver().save(Session(model, optimizer, ranks=connected(ranks)), tmp_path / "model.ckpt", 1)

    for error in in_threads(2, main):
        assert "the order of the parameters of 'optimizer' is not the same" in str(error)


def test_parameters_are_compared_until_runs_have_changed_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def noted(values: Any) -> list[str]:
        compared.append((number[threading.get_ident()], len(values)))
        return digests(values)

    monkeypatch.setattr(torchhooks.checkpoints.saving, "digests", noted)
    number: dict[int, int] = {}

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        model, saver = Experts(0), Saver()
        session = Session(model, ranks=connected(ranks))
        # After the first two saves, no run was made; after the third one, none that changed a parameter, as while
        # gradients accumulate. The last two do not compare.
        for save, (runs, weight) in enumerate([(0, 0.0), (0, 0.0), (1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]):
            number[threading.get_ident()], session.loop_state.runs = save, runs
            torch.nn.init.constant_(model.expert.weight, weight)
            saver.save(session, tmp_path / "model.ckpt", save)

    assert in_threads(2, main) == [None, None]
    assert sorted(compared) == [(save, 2) for save in (0, 2, 3) for _ in range(2)]


@pytest.mark.parametrize("steps", [1, 3])
def test_ranks_that_train_apart_are_noticed_at_the_first_save_after_a_run(tmp_path: Path, steps: int) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        reduced, alone = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        model = torch.nn.ModuleDict({"reduced": reduced, "alone": alone})
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)

        def step() -> None:
            hub.gather("step", ranks.rank, 0)
            with torch.no_grad():
                reduced.weight += 1
                alone.weight += ranks.rank + 1

        hooks = [CheckpointSaverHook(tmp_path, save_steps=steps)]
        with MonitoredLoop(step, model, hooks=hooks, checkpoint_dir=tmp_path, ranks=ranks) as loop:
            for _ in loop.until_stop(range(5)):
                loop.run()

    errors = in_threads(2, main)
    message = (
        "the parameter 'alone.weight' of 'model' is not the same on rank 0 and on rank 1, and a checkpoint has one for "
        "all: look for a missing DistributedDataParallel, or for another seed."
    )
    # The second rank may hear of the error of the first one before it comes to its own.
    assert any(isinstance(error, CheckpointError) for error in errors)
    assert all(message in str(error) for error in errors)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0]


@pytest.mark.parametrize("having", [0, 1])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("state['average']", lambda: torch.nn.Linear(1, 1)),
        ("state['average']", lambda: Variables(epoch=0)),
        ("state['average']", lambda: torch.optim.SGD([torch.zeros(1)], 0.1)),
    ],
)
def test_a_part_that_one_rank_alone_has_is_named(
    tmp_path: Path, having: int, name: str, make: Callable[[], Any]
) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> str:
        state = {"average": make()} if ranks.rank == having else {}
        return Saver().save(Session(None, None, state, ranks=connected(ranks)), tmp_path / "model.ckpt", 1)

    results = in_threads(2, main)
    if isinstance(make(), Variables):  # which belong to each rank
        assert results == [str(tmp_path / "model.ckpt-1")] * 2
        return
    for error in results:
        assert str(error).startswith(
            f"{name} exists on rank {having} and not on rank {1 - having}, and a checkpoint has one for all: "
        )


@pytest.mark.parametrize("in_background", [False, True])
def test_a_rank_that_does_not_see_the_folder_says_so_after_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    monkeypatch.setattr(torchhooks.checkpoints.saving, "_VISIBLE_SECS", 0.2)

    def main(ranks: ThreadRanks, hub: Hub) -> list[str]:
        saver, session = Saver(async_save=in_background), Session(ranks=connected(ranks))
        folder = tmp_path / f"disk of {ranks.rank}"
        try:
            saved = [saver.save(session, folder / "model.ckpt", 1)]
            return [*saved, saver.save(session, folder / "model.ckpt", 2)]
        finally:
            saver.close()

    chief, other = in_threads(2, main)
    assert isinstance(other, CheckpointError)
    assert str(other) == (
        f"{tmp_path}/disk of 1/model.ckpt-1 cannot be seen here, though rank 0 has written it: give the loop a folder "
        "that all ranks share, such as one on a network file system"
    )
    assert str(chief) == f"on rank 1: {other}"


def test_a_rank_that_sees_another_checkpoint_of_the_same_name_does_not_see_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchhooks.checkpoints.saving, "_VISIBLE_SECS", 0.2)
    Saver().save(Session(), tmp_path / "disk of 1" / "model.ckpt", 1)

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        Saver().save(Session(ranks=connected(ranks)), tmp_path / f"disk of {ranks.rank}" / "model.ckpt", 1)

    assert all("cannot be seen here, though rank 0" in str(error) for error in in_threads(2, main))


def test_the_ranks_look_for_the_first_checkpoint_of_a_folder_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def look(ranks: Ranks, path: str) -> bool:
        looked.append(os.path.relpath(path, tmp_path))
        return check_is_visible(ranks, path)

    monkeypatch.setattr(torchhooks.checkpoints.saver, "check_is_visible", look)

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        saver, session = Saver(), Session(ranks=connected(ranks))
        saver.save(session, tmp_path / "a" / "model.ckpt", 1, refusals=[lambda: "no"])  # it writes nothing
        for step in range(2, 5):
            saver.save(session, tmp_path / "a" / "model.ckpt", step)
        saver.save(session, tmp_path / "b" / "model.ckpt", 5, async_save=True)
        saver.wait_for_all(session)
        saver.close()

    assert in_threads(2, main) == [None, None]
    assert sorted(looked) == sorted(["a/model.ckpt-1", "a/model.ckpt-2", "b/model.ckpt-5"] * 2)


@pytest.mark.parametrize(
    ("options", "warnings"),
    [({}, 1), ({"static_graph": True}, 1), ({"find_unused_parameters": True}, 0)],
)
def test_a_restored_ddp_of_three_ranks_that_will_add_in_another_order_is_named_once(
    tmp_path: Path, lines: list[tuple[str, str]], options: dict[str, Any], warnings: int
) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        of_loop = connected(ranks)
        session = Session(state={"teacher": models[ranks.rank]}, ranks=of_loop)
        session.global_step = 3
        saver = Saver()
        saver.save(session, tmp_path / "model.ckpt", 3)
        for _ in range(2):
            saver.restore_latest(session, tmp_path)

    with simulated_group(3):
        parallel = torch.nn.parallel.DistributedDataParallel
        linear = torch.nn.Linear(1, 1)
        models = [parallel(copy.deepcopy(linear), **options) for _ in range(3)]
    assert in_threads(3, main) == [None] * 3
    said = [text for _, text in lines if "adds gradients in another order in its first step" in text]
    assert len(said) == warnings
    assert all(text.startswith("'teacher' is a DistributedDataParallel on 3 ranks") for text in said)


def resumed_with_ddp(rank: int, folder: str, way: str) -> tuple[bool, bool]:
    """Return whether a resumed training run ends with the bits of an uninterrupted one, and whether that is warned."""

    def train(steps: int, run: str) -> tuple[list[Any], list[str]]:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        model = torch.nn.parallel.DistributedDataParallel(
            layers, bucket_cap_mb=0.01, find_unused_parameters=way == "find_unused_parameters"
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator()

        def step() -> None:
            generator.manual_seed(3 * loop.global_step + rank)
            forward_and_backward()
            optimizer.step()

        def forward_and_backward() -> None:
            optimizer.zero_grad()
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()

        for _ in range(2 if way == "steps" else 0):
            forward_and_backward()
        hooks = [CheckpointSaverHook(run, save_steps=100), StopAtStepHook(last_step=steps)]
        ranks = Ranks(tick_secs=0.01)
        with (
            log_lines() as lines,
            MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=run, ranks=ranks) as loop,
        ):
            while not loop.should_stop():
                loop.run()
        return [parameter.tolist() for parameter in model.parameters()], [text for _, text in lines]

    expected, _ = train(6, f"{folder}/whole")
    train(3, f"{folder}/resumed")
    found, lines = train(6, f"{folder}/resumed")
    return found == expected, any("in another order in its first step" in text for text in lines)


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=pytest.mark.ranks) for way in ("as it is", "find_unused_parameters", "steps")],
)
def test_ddp_on_three_ranks_is_resumed_with_the_same_bits_or_a_warning(tmp_path: Path, way: str) -> None:
    ended = run_ranks(tmp_path, 3, resumed_with_ddp, str(tmp_path), way)
    assert [each.value[1] for each in ended] == [way == "as it is", False, False], ended
    if way != "as it is":
        assert [each.value[0] for each in ended] == [True] * 3


def norm_with_two_names() -> torch.nn.Module:
    norm = torch.nn.BatchNorm1d(1)
    return torch.nn.ModuleDict({"first": norm, "second": norm})


def norm_in_a_wrapper() -> torch.nn.Module:
    return torch.nn.Sequential(checkpoint_wrapper(torch.nn.Sequential(torch.nn.BatchNorm1d(1))))


@pytest.mark.parametrize("make", [norm_with_two_names, norm_in_a_wrapper])
def test_the_buffers_of_a_rank_are_found_in_any_module(tmp_path: Path, make: Callable[[], torch.nn.Module]) -> None:
    def mean(module: torch.nn.Module) -> torch.Tensor:
        return next(buffer for name, buffer in module.named_buffers() if name.endswith("running_mean"))

    def main(ranks: ThreadRanks, hub: Hub) -> float:
        module, after = make(), make()
        mean(module).fill_(ranks.rank + 1)
        Saver().save(Session(module, ranks=connected(ranks)), tmp_path / "model.ckpt", 3)
        Saver().restore_latest(Session(after, ranks=ranks), tmp_path)
        return mean(after).item()

    assert in_threads(2, main) == [1.0, 2.0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_sparse_buffer_is_that_of_the_chief(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> list[float]:
        def session(value: float) -> Session:
            module = torch.nn.Identity()
            module.register_buffer("sparse", (torch.eye(2) * value).to_sparse())
            return Session(module, ranks=connected(ranks))

        path = Saver().save(session(1.0 + ranks.rank), tmp_path / "model.ckpt", 3)
        restored = session(0.0)
        Saver().restore(restored, path)
        assert restored.model is not None
        values: list[float] = restored.model.get_buffer("sparse").to_dense().diag().tolist()
        return values

    assert in_threads(2, main) == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.filterwarnings("ignore")  # torch says that nested tensors are a prototype
def test_a_nested_buffer_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        module = torch.nn.Identity()
        module.register_buffer("nested", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))
        with pytest.raises(CheckpointError, match=r"model\['nested'\] is a nested tensor"):
            Saver().save(Session(module, ranks=connected(ranks)), tmp_path / "model.ckpt", 3)

    assert in_threads(2, main) == [None, None]
    assert list_checkpoints(tmp_path) == []


class AsksWhenTheOtherIsFurther(SessionRunHook):
    """Requests a stop in run 6 once the other rank is on its way to the next epoch."""

    def __init__(self, next_epoch: threading.Event) -> None:
        self._next_epoch = next_epoch

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if run_context.session.global_step == 6:
            assert self._next_epoch.wait(30)
            run_context.request_stop("asked")


@pytest.mark.parametrize("epochs", [2, 3], ids=["in the last epoch", "in the second epoch of three"])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("asks", [0, 1])
def test_a_stop_in_the_last_run_of_an_epoch_is_resumed(tmp_path: Path, asks: int, sized: bool, epochs: int) -> None:
    def main(ranks: ThreadRanks, hub: Hub, epochs: int, first: bool) -> list[tuple[int, int]]:
        hooks: list[SessionRunHook] = [CheckpointSaverHook(tmp_path, save_steps=100)]
        hooks += [AsksWhenTheOtherIsFurther(next_epoch)] if first and ranks.rank == asks else []
        seen = []
        with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path, ranks=ranks) as loop:
            for epoch in loop.until_stop(range(epochs)):
                for item in loop.until_stop([0, 1, 2] if sized else iter([0, 1, 2])):
                    loop.run()
                    seen.append((epoch, item))
                    if ranks.rank != asks and loop.global_step == 6:
                        next_epoch.set()
        return seen

    next_epoch = threading.Event()
    before = in_threads(2, lambda ranks, hub: main(ranks, hub, epochs, True))
    after = in_threads(2, lambda ranks, hub: main(ranks, hub, 4, False))
    whole = [(epoch, item) for epoch in range(4) for item in range(3)]
    assert [begin + end for begin, end in zip(before, after, strict=True)] == [whole] * 2


def three_epochs(rank: int) -> range:
    return range(3)


def epochs_and_items(
    folder: Path, size: int, stop_at: int | None, *, nested: bool = True, outer: Callable[[int], Any] = three_epochs
) -> list[Any]:
    """Return what each rank trains on in a run that ends after ``stop_at`` steps, and how often it counted an epoch."""

    def main(ranks: ThreadRanks, hub: Hub) -> Any:
        hooks: list[SessionRunHook] = [CheckpointSaverHook(folder, save_steps=100)]
        hooks += [] if stop_at is None else [StopAtStepHook(stop_at)]
        begun, seen, data = Shared(), [], [10, 11, 12]
        state = {"begun": begun}
        with MonitoredLoop(lambda: None, hooks=hooks, state=state, checkpoint_dir=folder, ranks=ranks) as loop:
            for epoch in loop.until_stop(outer(ranks.rank)) if nested else [0]:
                begun.number += 1  # as a scheduler does that steps at the start of an epoch
                for item in loop.until_stop(data):
                    loop.run()
                    seen.append((epoch, item))
        return seen, begun.number

    return in_threads(size, main)


@pytest.mark.parametrize(("saved_by", "restored_by"), [(2, 3), (2, 1), (1, 2)])
def test_another_number_of_ranks_continues_with_the_epoch(
    tmp_path: Path, saved_by: int, restored_by: int, lines: list[tuple[str, str]]
) -> None:
    epochs_and_items(tmp_path, saved_by, 4)
    seen = [(epoch, item) for epoch in (1, 2) for item in (10, 11, 12)]
    assert epochs_and_items(tmp_path, restored_by, None) == [(seen, 3)] * restored_by
    (warning,) = [text for level, text in lines if level == "WARNING" and "start over" not in text]
    assert "The outer loops continue, and the epoch in progress begins again" in warning


def test_another_number_of_ranks_continues_after_an_epoch(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    epochs_and_items(tmp_path, 2, None, outer=lambda rank: range(2))
    assert epochs_and_items(tmp_path, 3, None) == [([(2, 10), (2, 11), (2, 12)], 3)] * 3
    assert not any("begins again" in text for _, text in lines)


def test_another_number_of_ranks_begins_again_with_data_that_are_divided_over_the_ranks(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    epochs_and_items(tmp_path, 2, 2, nested=False)
    assert epochs_and_items(tmp_path, 3, None, nested=False) == [([(0, 10), (0, 11), (0, 12)], 2)] * 3
    assert not any("outer loops" in text for _, text in lines)


def test_outer_items_that_differ_between_ranks_are_not_continued_by_another_number_of_them(tmp_path: Path) -> None:
    def files(rank: int) -> list[str]:
        return [f"file {rank}", f"file {rank + 2}"]

    epochs_and_items(tmp_path, 2, 4, outer=files)
    seen, _ = epochs_and_items(tmp_path, 1, None, outer=files)[0]
    assert seen[0] == ("file 0", 10)


@pytest.mark.parametrize("async_save", [False, True])
def test_the_chief_writes_one_file_for_all(tmp_path: Path, async_save: bool) -> None:
    assert save_on(3, tmp_path, async_save=async_save) == [str(tmp_path / "model.ckpt-3")] * 3
    assert [each.name for each in list_checkpoints(tmp_path)] == ["model.ckpt-3"]
    saved = torch.load(tmp_path / "model.ckpt-3" / "state.pt", weights_only=True)
    assert saved["model"]["weight"].tolist() == [[1, 1]]
    assert [sorted(part) for part in saved["ranks"]] == [["hooks.hook", "loader", "own", "random"]] * 2


def test_each_rank_gets_back_what_is_its_own(tmp_path: Path) -> None:
    save_on(3, tmp_path)
    # The model and the shared object of the chief, and the loader, the object and the hook of each rank.
    assert restore_on(3, tmp_path) == [[1, 1, 1, 1, 1], [1, 1, 2, 2, 2], [1, 1, 3, 3, 3]]


@pytest.mark.parametrize(("saved_by", "restored_by"), [(2, 3), (3, 2), (1, 2)])
def test_another_number_of_ranks_restores_what_all_have_in_common(
    tmp_path: Path, saved_by: int, restored_by: int, lines: list[tuple[str, str]]
) -> None:
    save_on(saved_by, tmp_path)
    assert restore_on(restored_by, tmp_path) == [[1, 1, 0, 0, 0]] * restored_by
    by = "1 process" if saved_by == 1 else f"{saved_by} ranks"
    assert [text for level, text in lines if level == "WARNING"] == [
        f"{tmp_path}/model.ckpt-3 was saved by {by} and is restored by {restored_by} ranks: random states, gradients, "
        "the position in the data, and the states of hooks, loaders, Variables and objects with per_rank start as the "
        "script set them"
    ]


def test_one_process_restores_what_all_ranks_have_in_common(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    save_on(2, tmp_path)
    session, before = make_session(None), torch.get_rng_state()
    Saver().restore_latest(session, tmp_path)
    assert numbers(session) == [1, 1, 0, 0, 0]
    assert torch.equal(torch.get_rng_state(), before)
    assert "was saved by 2 ranks and is restored by 1 process" in lines[-1][1]


def test_one_process_restores_its_own_checkpoint_whole(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    Saver().save(make_session(None, 5), tmp_path / "model.ckpt", 1)
    session = make_session(None)
    Saver().restore_latest(session, tmp_path)
    assert numbers(session) == [5] * 5
    assert lines == []


class FullDisk(Disk):
    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk_on_the_chief_raises_on_all(tmp_path: Path, async_save: bool) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        saver = Saver(async_save=async_save)
        saver.disk = FullDisk()
        session = make_session(connected(ranks))
        try:
            saver.save(session, tmp_path / "model.ckpt", 3)
            saver.wait_for_all(session)
        finally:
            saver.close()

    chief, other = in_threads(2, main)
    message = f"{tmp_path}/model.ckpt-3 was not written: No space left on device. Free some space, or keep fewer with "
    assert isinstance(chief, CheckpointError)
    assert isinstance(other, CheckpointError)
    assert str(chief) == f"{message}max_to_keep."
    assert str(other) == f"on rank 0: {message}max_to_keep."
    assert list_checkpoints(tmp_path) == []


class FullOnce(Disk):
    """A disk on which there is no space for the first checkpoint."""

    full = True

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        super().write(file, data)

    def remove(self, path: str) -> None:
        self.full = False
        super().remove(path)


def test_a_failed_write_in_the_background_raises_on_all_in_the_next_save(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        saver, session = Saver(async_save=True), make_session(connected(ranks))
        saver.disk = FullOnce()
        saver.save(session, tmp_path / "model.ckpt", 3)
        try:
            saver.save(session, tmp_path / "model.ckpt", 4)
        finally:
            saver.close()

    assert all("model.ckpt-3 was not written" in str(error) for error in in_threads(2, main))
    assert [each.step for each in list_checkpoints(tmp_path)] == [4]


class Unsaveable(Counter):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state")


def test_a_state_that_one_rank_cannot_save_raises_on_all(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        session = make_session(connected(ranks))
        if ranks.rank == 1:
            session.state["loader"] = Unsaveable()  # type: ignore[index]
        Saver().save(session, tmp_path / "model.ckpt", 3)

    chief, other = in_threads(2, main)
    assert (str(chief), repr(other)) == ("on rank 1: ValueError: no state", "ValueError('no state')")
    assert list_checkpoints(tmp_path) == []


def test_a_damaged_checkpoint_is_skipped_by_all(tmp_path: Path) -> None:
    save_on(2, tmp_path)
    newest = tmp_path / "model.ckpt-9"
    Saver().save(make_session(None, 9), tmp_path / "model.ckpt", 9)
    data = bytearray((newest / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "state.pt").write_bytes(data)
    with log_lines():
        assert restore_on(2, tmp_path) == [[1] * 5, [1, 1, 2, 2, 2]]


def test_a_checkpoint_that_is_asked_for_and_damaged_raises_on_all(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        Saver().restore(make_session(connected(ranks)), tmp_path / "model.ckpt-3")

    names = [type(error).__name__ for error in in_threads(2, main)]
    assert names == ["DamagedCheckpointError"] * 2


def test_a_rank_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    """The chief has read it already, and the other rank finds no file in it."""
    path = Saver().save(make_session(None, 3), tmp_path / "model.ckpt", 3)
    (tmp_path / "model.ckpt-3" / "state.pt").unlink()
    manifest = {**read_manifest(path), "files": {}}
    del manifest["crc32"]
    (tmp_path / "model.ckpt-3" / "manifest.json").write_bytes(encoded(manifest))

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        read(make_session(connected(ranks)), lambda: (path, {}))

    chief, other = in_threads(2, main)
    assert str(other).startswith(f"{path} cannot be read")
    assert str(other).endswith("With several ranks, all of them have to see its folder.")
    assert str(chief) == f"on rank 1: {other}"


def test_all_ranks_start_at_0_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> str | None:
        return Saver().restore_latest(make_session(connected(ranks)), tmp_path)

    assert in_threads(2, main) == [None, None]


@pytest.mark.parametrize("function", [run_on_all, gather_from_all])
def test_an_error_of_another_rank_is_not_hidden_by_an_outcome(function: Callable[..., object]) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        def call() -> None:
            raise PeerError("rank 1 failed", 1)

        function(connected(ranks), "the step", call)

    assert [type(error) for error in in_threads(2, main)] == [PeerError] * 2


def test_a_step_of_all_ranks_returns_the_result_of_this_one_which_need_not_be_pickled() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> bool:
        result = threading.Lock()
        return run_on_all(connected(ranks), "the step", lambda: result) is result

    assert in_threads(2, main) == [True, True]


def test_an_exchange_returns_the_results_of_all_ranks() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> list[int]:
        return gather_from_all(connected(ranks), "the step", lambda: 10 * ranks.rank)

    assert in_threads(3, main) == [[0, 10, 20]] * 3


@pytest.mark.parametrize("function", [run_on_all, gather_from_all])
def test_an_error_on_one_rank_is_raised_on_all(function: Callable[..., object]) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        def call() -> None:
            if ranks.rank == 1:
                raise DamagedCheckpointError("cut off")

        function(connected(ranks), "the step", call)

    chief, other = in_threads(2, main)
    assert (type(chief), str(chief)) == (DamagedCheckpointError, "on rank 1: cut off")
    assert chief.__notes__ == ["torchhooks: in the step 'a checkpoint: the step', which all ranks make together"]
    assert (type(other), str(other)) == (DamagedCheckpointError, "cut off")


def test_a_session_without_a_loop_saves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = LoopRanks(Ranks())
    ranks.rank, ranks.size = 1, 2
    Saver().save(make_session(ranks, 4), tmp_path / "model.ckpt", 1)
    assert torch.load(tmp_path / "model.ckpt-1" / "state.pt", weights_only=True)["model"]["weight"].tolist() == [[4, 4]]


# -- loops ----------------------------------------------------------------------------------------------------------


class Steps(CheckpointSaverListener):
    def __init__(self) -> None:
        self.saved: list[int] = []

    def after_save(self, session: Session, step: int) -> None:
        self.saved.append(step)


@pytest.mark.parametrize("guided", [False, True])
def test_the_clock_of_the_chief_decides_when_all_save(tmp_path: Path, guided: bool) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> list[int]:
        steps = Steps()
        # On rank 1 every run would be due by its own clock, or none.
        secs = 0.005 if ranks.is_chief else (0.0 if guided else 1e6)
        hook = CheckpointSaverHook(tmp_path, save_secs=secs, listeners=[steps])
        with MonitoredLoop(lambda: hub.gather("step", ranks.rank, 0), hooks=[hook], ranks=ranks) as loop:
            while not loop.should_stop():
                loop.run()
                if len(steps.saved) == 4 and ranks.is_chief:
                    loop.request_stop()
        return steps.saved

    first, second = in_threads(2, main)
    assert first == second
    assert len(first) >= 4


def test_a_hook_that_refuses_on_one_rank_refuses_for_all(tmp_path: Path) -> None:
    class Refuses(SessionRunHook):
        def after_create_session(self, session: Session, coord: Any) -> None:
            session.guard_checkpoints(lambda: "it is bad" if session.ranks.rank == 1 else None)

    def main(ranks: ThreadRanks, hub: Hub) -> int:
        hooks = [Refuses(), CheckpointSaverHook(tmp_path, save_steps=1), StopAtStepHook(2)]
        with MonitoredLoop(lambda: hub.gather("step", ranks.rank, 0), hooks=hooks, ranks=ranks) as loop:
            while not loop.should_stop():
                loop.run()
        return loop.global_step

    with log_lines() as lines:
        assert in_threads(2, main) == [2, 2]
    assert lines.count(("WARNING", "no checkpoint of step 1: it is bad")) == 2
    assert list_checkpoints(tmp_path) == []


def test_a_hook_that_waits_for_a_step_waits_no_longer_than_the_other_ranks_run() -> None:
    waits, over = threading.Event(), threading.Event()

    class Waits(GlobalStepWaiterHook):
        def after_create_session(self, session: Session, coord: Any) -> None:
            super().after_create_session(session, coord)
            thread = threading.Thread(target=over.wait)
            coord.register_thread(thread)
            thread.start()

        def before_run(self, run_context: Any) -> None:
            waits.set()
            super().before_run(run_context)

    def main(ranks: ThreadRanks, hub: Hub) -> tuple[int, str | None]:
        def step() -> None:
            hub.gather("step", ranks.rank, 0)

        with MonitoredLoop(step, hooks=[Waits(100)] if ranks.rank == 1 else [], ranks=ranks) as loop:
            if ranks.is_chief:
                assert waits.wait(60)
                loop.request_stop("enough")
            while not loop.should_stop():
                loop.run()
            over.set()
        return loop.global_step, loop.stop_reason

    first, second = in_threads(2, main)
    assert first == second
    assert first[1] == "request_stop: enough (rank 0)"


def test_a_hook_that_waits_for_a_step_raises_when_another_rank_fails() -> None:
    waits = threading.Event()

    class Waits(SessionRunHook):
        def before_run(self, run_context: Any) -> None:
            waits.set()
            while not run_context.session.interrupted:
                time.sleep(0.001)

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        with MonitoredLoop(lambda: None, hooks=[Waits()] if ranks.rank == 1 else [], ranks=ranks) as loop:
            if ranks.is_chief:
                waits.wait(60)
                raise ValueError("boom")
            loop.run()

    error, peer = in_threads(2, main)
    assert isinstance(error, ValueError)
    assert isinstance(peer, PeerError)


# -- real processes -------------------------------------------------------------------------------------------------


def in_folder(folder: Path, name: str) -> Path:
    """Return a new folder for the processes of one attempt, whose process group has a store in it."""
    (folder / name).mkdir()
    return folder / name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    ended = run_ranks(folder, 2, train, str(folder / "run"))
    assert [each.code for each in ended] == [0, 0], ended
    return [each.value for each in ended]


# The moments of a save of a new process, which also removes the oldest checkpoint.
OF_A_SAVE = [
    Moment("create", 1, "before", 5),
    Moment("write", 1, "after", 5),
    Moment("write", 3, "after", 5),
    Moment("sync", 1, "before", 5),
    Moment("sync", 1, "after", 5),  # of the file of the chief
    Moment("create", 2, "before", 5),  # of the manifest
    Moment("create", 2, "after", 5),
    Moment("sync_folder", 1, "after", 5),
    Moment("rename", 1, "before", 5),
    Moment("rename", 1, "after", 5),
    Moment("sync_folder", 2, "after", 5),
    Moment("rename", 2, "before", 5),  # of the checkpoint that is removed
    Moment("remove", 1, "before", 5),
    Moment("remove", 1, "after", 5),
]
# Those of the first save of a resumed process, which replaces the checkpoint that was restored.
OF_A_FIRST_SAVE = [Moment("rename", 1, "after", 1), Moment("rename", 2, "after", 1)]


def check_copies(folder: Path, expected: list[Any], async_save: bool, sharded: bool) -> None:
    """Copy the folder in each moment of a save, as a kill would leave it, and compare what is resumed from there."""
    folders = [str(folder / "run")]
    of_a_save = OF_A_SAVE[:: 3 if async_save else 1]
    if sharded:  # whose state.pt is small
        of_a_save = [moment for moment in of_a_save if moment.number < 3][::2]
    for number, moments in enumerate([of_a_save, OF_A_FIRST_SAVE, []]):
        ended = run_ranks(in_folder(folder, str(number)), 2, train_in_each, folders, async_save, sharded, moments)
        assert [each.code for each in ended] == [0, 0], ended
        for place, path in enumerate(folders):
            assert [each.value[place] for each in ended] == expected, path
            # A save of shards waits until the optimizer steps, because gradients have not been reduced.
            steps = (12, 14, 18) if sharded else (14, 16, 18)
            assert checkpoints_and_rests(path) == [f"model.ckpt-{step}" for step in steps], path
        folders = [f"{path}-{place}" for path in folders[:2] for place in range(len(moments))]
        assert all(os.path.exists(path) for path in folders)


@pytest.mark.ranks
@pytest.mark.parametrize("async_save", [pytest.param(False, marks=pytest.mark.release), True])
def test_what_a_kill_at_any_point_of_a_save_leaves_is_resumed_to_the_same_bits(
    tmp_path: Path, uninterrupted: list[Any], async_save: bool
) -> None:
    check_copies(tmp_path, uninterrupted, async_save, sharded=False)


@pytest.mark.parametrize(
    ("async_save", "sharded"),
    [
        (False, False),
        pytest.param(True, False, marks=pytest.mark.release),
        pytest.param(False, True, marks=pytest.mark.release),
        pytest.param(True, True, marks=pytest.mark.ranks),
    ],
)
def test_a_training_run_whose_ranks_are_killed_in_a_save_ends_with_the_same_bits(
    tmp_path: Path, async_save: bool, sharded: bool, request: pytest.FixtureRequest
) -> None:
    expected = request.getfixturevalue("uninterrupted_fsdp" if sharded else "uninterrupted")
    run = str(tmp_path / "run")
    for number, moment in enumerate([Moment("rename", 1, "before", 4), Moment("rename", 1, "after", 1)]):
        killed = run_ranks(in_folder(tmp_path, str(number)), 2, train, run, async_save, sharded, (), moment)
        assert [each.code for each in killed] == [-signal.SIGKILL] * 2, killed
    ended = run_ranks(in_folder(tmp_path, "resumed"), 2, train, run, async_save, sharded)
    assert "restored step" in ended[0].output
    assert [each.value for each in ended] == expected


def test_random_states_differ_between_ranks_after_a_resume(uninterrupted: list[Any]) -> None:
    first, second = uninterrupted
    assert first["random"] != second["random"]
    assert not set(first["seen"]) & set(second["seen"])


# -- torchrun -------------------------------------------------------------------------------------------------------


def start_torchrun(folder: Path, way: str, *options: str, **environment: str) -> subprocess.Popen[str]:
    script = str(ROOT / "tests" / "support" / "rank_training.py")
    environment |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see docs/ranks.md
    }
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*agent, *options, script, way, str(folder)],
        env=paths.environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.ranks
def test_torchrun_restarts_from_the_newest_checkpoint_and_ends_with_the_same_bits(
    tmp_path: Path, uninterrupted: list[Any]
) -> None:
    agent = start_torchrun(tmp_path, "train", "--max-restarts", "1", DIES_AT="1 7 0")
    output, _ = agent.communicate(timeout=120)
    assert agent.returncode == 0, output
    assert "restored step 6 from" in output
    assert [(tmp_path / f"result-{rank}").read_text() for rank in range(2)] == [repr(each) for each in uninterrupted]


@pytest.mark.release
def test_a_signal_to_torchrun_ends_with_a_whole_checkpoint_within_the_grace_period(tmp_path: Path) -> None:
    agent = start_torchrun(tmp_path, "signal")
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"begun-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        assert agent.poll() is None, agent.communicate()
        time.sleep(0.02)
    agent.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    output, _ = agent.communicate(timeout=60)
    assert time.monotonic() - begun < 30, output  # after which the agent kills its workers
    steps = [(tmp_path / f"stopped-{rank}").read_text().split(" ", 1) for rank in range(2)]
    assert steps[0] == steps[1]
    assert steps[0][1].startswith("signal SIGTERM (")
    newest = list_checkpoints(tmp_path / "run")[-1]
    assert newest.step == int(steps[0][0])
    session = Session(torch.nn.Linear(1, 1))
    Saver().restore(session, newest.path)
    assert session.global_step == newest.step


class FullLater(Disk):
    """A disk on which there is space for one checkpoint."""

    saves = 0

    def create_folder(self, path: str) -> None:
        self.saves += 1
        if self.saves > 1:
            raise OSError(28, "No space left on device")
        super().create_folder(path)


def train_on_a_full_disk(rank: int, folder: str) -> str:
    saver = Saver()
    saver.disk = FullLater()
    hook = CheckpointSaverHook(folder, save_steps=2, saver=saver)
    try:
        with MonitoredLoop(lambda: None, torch.nn.Linear(1, 1), hooks=[hook], ranks=Ranks(**QUICK)) as loop:
            while not loop.should_stop():
                loop.run()
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_full_disk_of_the_chief_ends_the_loop_on_all_ranks(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, 2, train_on_a_full_disk, str(tmp_path / "run"))
    assert [each.code for each in ended] == [0, 0], ended
    assert ended[0].value.startswith(f"{tmp_path}/run/model.ckpt-2 was not written")
    assert ended[1].value == f"on rank 0: {ended[0].value}"
    assert [each.step for each in list_checkpoints(tmp_path / "run")] == [0]


# -- sharded states -------------------------------------------------------------------------------------------------


def make_model(wrapped: str) -> tuple[Any, Any]:
    """Return a model and its optimizer, as FSDP2, DistributedDataParallel or nothing wraps it."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    if wrapped == "fsdp":
        model = torch.distributed.fsdp.fully_shard(model)
    elif wrapped == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist()


def train_as(rank: int, folder: str, wrapped: str, last_step: int) -> dict[str, Any]:
    """Train to ``last_step`` from the newest checkpoint in ``folder``, on the same data in every rank.

    The gradients of two steps accumulate.
    """
    model, optimizer = make_model(wrapped)

    def step() -> None:
        data = torch.arange(12.0).reshape(4, 3) * (loop.global_step + 1) / 10
        model(data).square().mean().backward()
        if loop.global_step % 2:
            optimizer.step()
            optimizer.zero_grad()

    hooks = [CheckpointSaverHook(folder, save_steps=100), StopAtStepHook(last_step=last_step)]
    with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=folder) as loop:
        begun = contents(model, optimizer)
        while not loop.should_stop():
            loop.run()
        ended = contents(model, optimizer)
    return {"begun": begun, "step": loop.global_step, "ended": ended}


def contents(model: Any, optimizer: Any) -> list[Any]:
    moments = [dict(sorted(optimizer.state[parameter].items())) for parameter in model.parameters()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [whole(each) for state in (model.state_dict(), *moments) for each in state.values()] + [
        *map(whole, gradients)
    ]


def alone(rank: int, folder: str, wrapped: str, last_step: int) -> dict[str, Any]:
    torch.distributed.destroy_process_group()
    return train_as(rank, folder, wrapped, last_step)


@pytest.mark.ranks
def test_a_state_is_resharded_between_fsdp2_ddp_and_a_bare_model(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    before = None
    # After an odd step, gradients have accumulated. Those that are not sharded belong to one rank each.
    kinds = [(2, "fsdp", 3), (3, "fsdp", 5), (2, "ddp", 6), (2, "fsdp", 9), (1, "bare", 10), (2, "fsdp", 12)]
    for number, (size, wrapped, step) in enumerate(kinds):
        function = alone if size == 1 else train_as
        ended = run_ranks(in_folder(tmp_path, str(number)), size, function, run, wrapped, step)
        assert [each.code for each in ended] == [0] * size, (number, wrapped, ended)
        assert [each.value["step"] for each in ended] == [step] * size, (number, ended)
        if before is not None:
            assert [each.value["begun"] for each in ended] == [before] * size, (number, wrapped)
        before = ended[0].value["ended"]
        assert len(before) > 20


def train_unreduced(rank: int, folder: str, fails_at: int | None) -> list[Any]:
    """Train an FSDP2 model whose gradients are reduced in every second run only, with a save after each run."""
    model, optimizer = make_model("fsdp")

    def step() -> None:
        if loop.global_step == fails_at:
            os._exit(3)
        model.set_requires_gradient_sync(loop.global_step % 2 == 1)
        data = torch.arange(12.0).reshape(4, 3) * (loop.global_step + 1 + rank) / 10
        model(data).square().mean().backward()
        if loop.global_step % 2:
            optimizer.step()
            optimizer.zero_grad()

    hooks = [CheckpointSaverHook(folder, save_steps=1), StopAtStepHook(last_step=6)]
    with MonitoredLoop(
        *(step, model, optimizer), hooks=hooks, checkpoint_dir=folder, ranks=Ranks(tick_secs=0.01)
    ) as loop:
        while not loop.should_stop():
            loop.run()
    return [[each.step for each in list_checkpoints(folder)], contents(model, optimizer)]


@pytest.mark.ranks
def test_all_ranks_let_a_save_wait_until_fsdp2_has_reduced_the_gradients(tmp_path: Path) -> None:
    whole = run_ranks(in_folder(tmp_path, "a"), 2, train_unreduced, str(tmp_path / "whole"), None)
    assert [each.code for each in whole] == [0, 0], whole
    assert [each.value[0] for each in whole] == [[0, 2, 4, 6]] * 2
    killed = run_ranks(in_folder(tmp_path, "b"), 2, train_unreduced, str(tmp_path / "resumed"), 3)
    assert killed[0].code == 3
    resumed = run_ranks(in_folder(tmp_path, "c"), 2, train_unreduced, str(tmp_path / "resumed"), None)
    assert [each.value for each in resumed] == [each.value for each in whole]


@pytest.fixture(scope="module")
def uninterrupted_fsdp(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    ended = run_ranks(folder, 2, train, str(folder / "run"), False, True)
    assert [each.code for each in ended] == [0, 0], ended
    return [each.value for each in ended]


@pytest.mark.ranks
@pytest.mark.parametrize("async_save", [False, pytest.param(True, marks=pytest.mark.release)])
def test_what_a_kill_at_any_point_of_a_sharded_save_leaves_is_resumed_to_the_same_bits(
    tmp_path: Path, uninterrupted_fsdp: list[Any], async_save: bool
) -> None:
    check_copies(tmp_path, uninterrupted_fsdp, async_save, sharded=True)
    assert sorted(os.listdir(tmp_path / "run" / "model.ckpt-18")) == [
        *(".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "rank-1.pt", "state.pt")
    ]


class NoSpaceForRank1(Disk):
    def create(self, path: str) -> BinaryIO:
        if path.endswith("rank-1.pt"):
            raise OSError(28, "No space left on device")
        return super().create(path)


def save_shards_on_a_full_disk(rank: int, folder: str, async_save: bool) -> str:
    model, optimizer = make_model("fsdp")
    saver = Saver(async_save=async_save)
    saver.disk = NoSpaceForRank1()
    try:
        with MonitoredLoop(
            lambda: None, model, optimizer, hooks=[CheckpointSaverHook(folder, save_steps=2, saver=saver)]
        ):
            pass
    except CheckpointError as error:
        return str(error)
    return "no error"


def chief_is_killed_in_a_save(rank: int, folder: str, wrapped: str, async_save: bool) -> str:
    model, optimizer = make_model(wrapped)
    saver = Saver(async_save=async_save)
    if rank == 0:
        saver.disk = DiskOfMoments(killing_at(Moment("create", 1, "after", 2), [os.getpid()]))
    hook = CheckpointSaverHook(folder, save_steps=1, saver=saver)
    try:
        with MonitoredLoop(lambda: None, model, optimizer, hooks=[hook], ranks=Ranks(**QUICK)) as loop:
            while not loop.should_stop():
                loop.run()
    except PeerError as error:
        return f"PeerError of rank {error.rank}"
    return "no error"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("wrapped", "async_save"),
    [("ddp", False), ("fsdp", False), ("fsdp", True)],
)
def test_a_rank_does_not_wait_for_a_chief_that_is_killed_in_a_save(
    tmp_path: Path, wrapped: str, async_save: bool
) -> None:
    run = tmp_path / "run"
    ended = run_ranks(tmp_path, 2, chief_is_killed_in_a_save, str(run), wrapped, async_save)
    assert [each.code for each in ended] == [-signal.SIGKILL, 0], ended
    assert ended[1].value == "PeerError of rank 0"
    assert [each.step for each in list_checkpoints(run)] == [0]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk_of_another_rank_raises_on_all(tmp_path: Path, async_save: bool) -> None:
    ended = run_ranks(tmp_path, 2, save_shards_on_a_full_disk, str(tmp_path / "run"), async_save)
    assert ended[0].value == "on rank 1: OSError: [Errno 28] No space left on device"
    assert ended[1].value.startswith(f"{tmp_path}/run/model.ckpt-0 was not written")
    assert checkpoints_and_rests(str(tmp_path / "run")) == []
