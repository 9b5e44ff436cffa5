"""What a process leaves for the next one in nan.json, and how the two processes are compared."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import torchhooks.tools.autopsy.request
from torchhooks import Session
from torchhooks.tools.autopsy.request import digests, environment, leave, read_request, write_json


def on(device: str = "cpu") -> Any:
    """Return what an environment asks a session for."""
    return SimpleNamespace(device=torch.device(device))


def test_a_gpu_is_told_from_another_one_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", uuid="6f1b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", {torch.device("cuda", 3): properties}.__getitem__)
    found = environment(on("cuda:3"))
    assert (found.device, found.device_name, found.device_uuid) == ("cuda:3", "NVIDIA H200", "6f1b")


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    taken = tmp_path / "nan.json"
    taken.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_json(str(taken), environment(on()))
    assert list(tmp_path.iterdir()) == [taken]


def session_of(rank: int, folder: Path) -> Any:
    session: Any = Session(torch.nn.Linear(1, 1), checkpoint_dir=str(folder))
    session.ranks = SimpleNamespace(rank=rank, size=2)
    return session


def leave_as(session: Any, step: int) -> None:
    leave(session, step, "loss is NaN", None, {})


def test_arrays_of_a_batch_have_digests(tmp_path: Path) -> None:
    """Of texts, none."""
    session = session_of(0, tmp_path)
    found = [digests(session, 1, {"batch": {"x": np.full(2, value), "of": ["a"]}, "text": "b"}) for value in (1, 2, 2)]
    assert [each.keys() for each in found] == [{"input batch"}] * 3
    assert found[0] != found[1] == found[2]


def kept_in(folder: Path) -> tuple[int, int]:
    request = read_request(str(folder))
    assert request is not None
    return request.step, request.rank


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        ([(10, 0), (10, 1)], (10, 0)),
        ([(10, 1), (10, 0)], (10, 0)),
        ([(11, 0), (10, 1)], (10, 1)),
        ([(9, 1), (10, 0)], (9, 1)),
        ([(9, 0), (10, 0)], (9, 0)),  # the script has caught the error of the first
    ],
)
def test_of_several_ranks_the_request_for_the_earliest_step_is_kept(
    tmp_path: Path, left: list[tuple[int, int]], kept: tuple[int, int]
) -> None:
    sessions = [session_of(rank, tmp_path) for rank in (0, 1)]
    for step, rank in left:
        leave_as(sessions[rank], step)
    assert kept_in(tmp_path) == kept


@pytest.mark.parametrize("rank", [0, 1])
def test_the_request_of_an_older_session_is_replaced(rank: int, tmp_path: Path) -> None:
    leave_as(session_of(rank, tmp_path), 3)
    leave_as(session_of(0, tmp_path), 10)
    assert kept_in(tmp_path) == (10, 0)


def test_ranks_that_find_a_nan_at_once_write_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [session_of(rank, tmp_path) for rank in (0, 1)]
    others: list[threading.Thread] = []

    def read_while_another_writes(folder: str) -> Any:
        found = read_request(folder)
        if not others:
            others.append(threading.Thread(target=leave_as, args=(sessions[1], 10)))
            others[0].start()
            others[0].join(0.2)  # in vain: it waits for this one
        return found

    monkeypatch.setattr(torchhooks.tools.autopsy.request, "read_request", read_while_another_writes)
    leave_as(sessions[0], 11)
    others[0].join()
    assert kept_in(tmp_path) == (10, 1)
