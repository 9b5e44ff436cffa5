"""What a process leaves for the next one in nan.json, and how the two processes are compared."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
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


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that writes the module ``layers`` next to the script that this process runs, and imports it."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(folder / "train.py"), raising=False)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(text: str) -> None:
        sys.modules.pop("layers", None)
        (folder / "layers.py").write_text(text)
        importlib.invalidate_caches()
        monkeypatch.setitem(sys.modules, "layers", importlib.import_module("layers"))

    return write


def test_a_module_of_the_script_that_was_changed_is_another_code(script: Callable[[str], None]) -> None:
    digests = []
    for text in ("width = 8", "width = 16", "width = 8"):
        script(text)
        digests.append(environment(on())["code"])
    assert digests[0] == digests[2] != digests[1]


def test_a_module_that_is_gone_leaves_the_code_comparable(script: Callable[[str], None]) -> None:
    script("width = 8")
    Path(sys.modules["layers"].__file__ or "").unlink()
    assert environment(on())["code"] == "00000000"


def test_code_that_was_typed_has_no_script_and_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    found = environment(on())
    assert found["script"] is None
    assert "code" not in found


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
