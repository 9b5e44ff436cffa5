"""What a process leaves for the next one in nan.json, and how the two processes are compared."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchhooks.autopsy.request
from torchhooks import Session
from torchhooks.autopsy.request import environment, leave, read, write_json


def on(device: str = "cpu") -> Any:
    """Return what an environment asks a session for."""
    return SimpleNamespace(device=torch.device(device))


def test_a_gpu_is_told_from_another_one_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", uuid="6f1b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", {torch.device("cuda", 3): properties}.__getitem__)
    found = environment(on("cuda:3"))
    assert (found["device"], found["device_name"], found["device_uuid"]) == ("cuda:3", "NVIDIA H200", "6f1b")


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    taken = tmp_path / "nan.json"
    taken.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_json(str(taken), {})
    assert list(tmp_path.iterdir()) == [taken]


def leave_as(rank: int, step: int, folder: Path) -> None:
    session: Any = Session(torch.nn.Linear(1, 1), checkpoint_dir=str(folder))
    session.ranks = SimpleNamespace(rank=rank, size=2)
    leave(session, step, "loss is NaN", None, {})


def kept_in(folder: Path) -> tuple[int, int]:
    request = read(str(folder))
    assert request is not None
    return request["step"], request["rank"]


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        ([(10, 0), (10, 1)], (10, 0)),
        ([(10, 1), (10, 0)], (10, 0)),
        ([(11, 0), (10, 1)], (10, 1)),
        ([(9, 1), (10, 0)], (9, 1)),
        ([(9, 0), (10, 0)], (10, 0)),  # one rank has found a later one after a recovery
    ],
)
def test_of_several_ranks_the_request_for_the_earliest_step_is_kept(
    tmp_path: Path, left: list[tuple[int, int]], kept: tuple[int, int]
) -> None:
    for step, rank in left:
        leave_as(rank, step, tmp_path)
    assert kept_in(tmp_path) == kept


def test_ranks_that_find_a_nan_at_once_write_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[threading.Thread] = []

    def read_while_another_writes(folder: str) -> Any:
        found = read(folder)
        if not others:
            others.append(threading.Thread(target=leave_as, args=(1, 10, tmp_path)))
            others[0].start()
            others[0].join(0.2)  # in vain: it waits for this one
        return found

    monkeypatch.setattr(torchhooks.autopsy.request, "read", read_while_another_writes)
    leave_as(0, 11, tmp_path)
    others[0].join()
    assert kept_in(tmp_path) == (10, 1)
