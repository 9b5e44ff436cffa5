"""Metadata of a loop: plain data in every checkpoint, compared when it is restored, and read without a model."""

from __future__ import annotations

import argparse
import enum
import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.torch_state import hooks_on_optimizer
from torch import nn

from torchhooks import (
    AbortedError,
    BestCheckpointHook,
    CheckpointError,
    CheckpointSaverHook,
    DamagedCheckpointError,
    MonitoredLoop,
    MonitoredTrainingLoop,
    Saver,
    Scaffold,
    Session,
    best_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    read_metadata,
)
from torchhooks.testing import RecordingHook

Lines = list[tuple[str, str]]


def half() -> float:
    return 0.5


def saved(folder: Path, metadata: Mapping[str, Any] | None) -> str:
    return Saver().save(Session(metadata=metadata), folder / "model.ckpt", 3)


def differences(lines: Lines) -> list[str]:
    return [text for level, text in lines if level == "WARNING" and "differs from the checkpoint" in text]


# -- what a checkpoint contains -------------------------------------------------------------------------------------

CONFIG: dict[Any, Any] = {
    "lr": 0.1,
    "layers": [64, 32],
    "name": "net",
    "nested": {"shape": (3, 4), "seed": None},
    5: {True, "a"},
}


@pytest.mark.parametrize("async_save", [False, True])
def test_every_checkpoint_of_a_loop_has_its_metadata(async_save: bool, tmp_path: Path) -> None:
    hooks = [
        CheckpointSaverHook(tmp_path, save_steps=1),
        BestCheckpointHook(tmp_path, lambda loss: loss, save_steps=1, mode="min"),
    ]
    scaffold = Scaffold(saver=Saver(async_save=async_save))
    with MonitoredLoop(half, hooks=hooks, scaffold=scaffold, metadata=CONFIG) as loop:
        loop.run()
        loop.run()
    best = best_checkpoint(tmp_path / "best")
    assert best is not None
    paths = [*(checkpoint.path for checkpoint in list_checkpoints(tmp_path)), best]
    assert [read_metadata(path) for path in paths] == [CONFIG] * 4
    assert torch.load(f"{paths[0]}/state.pt", weights_only=True)["metadata"] == CONFIG


def test_a_training_loop_passes_it_on(tmp_path: Path) -> None:
    MonitoredTrainingLoop(half, checkpoint_dir=tmp_path, metadata={"lr": 0.1}).close()
    assert read_metadata(latest_checkpoint(tmp_path) or "") == {"lr": 0.1}


def test_a_checkpoint_after_a_recovery_has_it_too(tmp_path: Path) -> None:
    failing = RecordingHook(raises={("before_run", 2): AbortedError})
    hooks = [failing, CheckpointSaverHook(tmp_path, save_steps=1)]
    with MonitoredLoop(half, hooks=hooks, checkpoint_dir=tmp_path, metadata={"lr": 0.1}) as loop:
        for _ in range(3):
            loop.run()
    assert [call[0] for call in failing.calls].count("after_create_session") == 2
    assert read_metadata(f"{tmp_path}/model.ckpt-3") == {"lr": 0.1}


def test_it_is_copied_when_the_loop_is_created(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"layers": [64], "weight": torch.zeros(1)}
    with MonitoredLoop(half, hooks=[CheckpointSaverHook(tmp_path, save_steps=1)], metadata=metadata) as loop:
        metadata["layers"] += [32]
        metadata["weight"] += 1
        loop.run()
    found = read_metadata(f"{tmp_path}/model.ckpt-1")
    assert found == {"layers": [64], "weight": torch.zeros(1)}


@pytest.mark.parametrize("metadata", [None, {}])
def test_without_metadata_a_checkpoint_has_no_entry(metadata: Mapping[str, Any] | None, tmp_path: Path) -> None:
    path = saved(tmp_path, metadata)
    assert "metadata" not in torch.load(f"{path}/state.pt", weights_only=True)
    assert read_metadata(path) == {}


def test_the_name_is_reserved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\['metadata'\]: this name is reserved"):
        Saver().save(Session(state={"metadata": nn.Linear(1, 1)}), tmp_path / "model.ckpt", 1)


# -- what it may contain ----------------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"path": Path("run")}, f"metadata['path'] is of type {type(Path()).__module__}.PosixPath:"),
        ({"a": {"b": [1, half]}}, "metadata['a']['b'][1] is of type function"),
        ({"act": nn.ReLU()}, "metadata['act'] is of type torch.nn.modules.activation.ReLU"),
        ({"big": 2**2001}, "metadata['big'] is an integer of 2002 bits"),
        ({"args": argparse.Namespace(lr=0.1)}, "metadata['args'] is of type argparse.Namespace"),
    ],
)
def test_what_a_file_cannot_hold_is_an_error_at_creation_that_names_its_keys(
    metadata: dict[str, Any], said: str
) -> None:
    hook = RecordingHook()
    with pytest.raises(TypeError) as raised:
        MonitoredLoop(half, hooks=[hook], metadata=metadata)
    assert str(raised.value).startswith(said)
    assert str(raised.value).endswith("sets, such as dataclasses.asdict(config)")
    assert hook.calls == []


def test_all_problems_are_listed() -> None:
    with pytest.raises(TypeError, match=r"^metadata\['a'\] is .*, metadata\['b'\] is of type"):
        MonitoredLoop(half, metadata={"a": half, "b": Color.RED})


@pytest.mark.parametrize(
    ("metadata", "shown"), [([1], "[1]"), (argparse.Namespace(lr=0.1), "Namespace(lr=0.1)"), (nn.ReLU(), "ReLU(...)")]
)
def test_what_is_not_a_dict_is_an_error(metadata: Any, shown: str) -> None:
    with pytest.raises(TypeError) as raised:
        MonitoredLoop(half, metadata=metadata)
    assert str(raised.value) == f"metadata={shown}: must be a dict of plain data, such as vars(args)"


def test_an_error_leaves_no_hook_on_the_optimizer(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(TypeError):
        MonitoredLoop(half, None, optimizer, checkpoint_dir=tmp_path, metadata={"a": half})
    assert hooks_on_optimizer(optimizer) == 0


# -- restoring --------------------------------------------------------------------------------------------------------


def restored(folder: Path, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    path = saved(folder, old)
    MonitoredLoop(half, checkpoint_dir=folder, metadata=new).close()
    return path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ({"lr": 0.1, "depth": 3}, {"lr": 0.01, "depth": 3}, "metadata['lr'] was 0.1 and is 0.01"),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 5]}}, "metadata['a']['b'][1] was 2 and is 5"),
        ({"a": 1}, {"b": "x"}, "metadata['a'] was 1 and is absent, metadata['b'] was absent and is 'x'"),
        ({"a": [1]}, {"a": [1, 2]}, "metadata['a'][1] was absent and is 2"),
        ({"a": {"b": 1}}, {"a": None}, "metadata['a'] was {'b': 1} and is None"),
        ({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 3.0])}, "metadata['w'][1] was 2.0 and is 3.0"),
        ({"w": torch.tensor(1)}, {"w": "none"}, "metadata['w'] was 1 and is 'none'"),
    ],
)
def test_values_that_differ_are_logged_by_key_in_one_warning(
    old: dict[str, Any], new: dict[str, Any], said: str, tmp_path: Path, lines: Lines
) -> None:
    path = restored(tmp_path, old, new)
    assert differences(lines) == [f"the loop differs from the checkpoint {path}: {said}"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (CONFIG, CONFIG),
        ({"a": math.nan, "t": (1, 2)}, {"a": math.nan, "t": [1, 2]}),
        ({"d": {"a": 1, "b": 2}}, {"d": OrderedDict(b=2, a=1)}),
        ({"w": torch.ones(2), "s": {"x", "y", "z"}}, {"w": torch.ones(2), "s": {"z", "y", "x"}}),
        ({"w": torch.eye(2).to_sparse()}, {"w": torch.eye(2).to_sparse()}),
        (None, {"lr": 0.1}),  # from before the loop had any
        ({"lr": 0.1}, None),  # in a loop that does not say
    ],
)
def test_equal_values_are_not_logged(old: Any, new: Any, tmp_path: Path, lines: Lines) -> None:
    restored(tmp_path, old, new)
    assert differences(lines) == []


def test_a_long_difference_is_shortened(tmp_path: Path, lines: Lines) -> None:
    restored(tmp_path, {"text": "x" * 5000, **dict.fromkeys("abcdefghij", 1)}, dict.fromkeys("abcdefghij", 2))
    (text,) = differences(lines)
    assert text.endswith("and 3 more")
    assert len(text) < 800


# -- reading ----------------------------------------------------------------------------------------------------------


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_metadata_is_read_without_reading_the_tensors(tmp_path: Path) -> None:
    session = Session(nn.Linear(1000, 4000), metadata={"sizes": [1000, 4000]})
    path = Saver().save(session, tmp_path / "model.ckpt", 1)
    before = bytes_read()
    assert read_metadata(Path(path)) == {"sizes": [1000, 4000]}
    assert bytes_read() - before < 1_000_000 < Path(path, "state.pt").stat().st_size


def test_damaged_tensors_do_not_matter_and_damaged_metadata_are_an_error(tmp_path: Path) -> None:
    path = Path(Saver().save(Session(nn.Linear(100, 100), metadata={"name": "abcdefgh"}), tmp_path / "model.ckpt", 1))
    change(path / "state.pt", len((path / "state.pt").read_bytes()) // 2)
    assert read_metadata(path) == {"name": "abcdefgh"}
    change(path / "manifest.json", (path / "manifest.json").read_bytes().index(b"abcdefgh"))
    with pytest.raises(DamagedCheckpointError, match=r"model\.ckpt-1 has a damaged manifest\.json: .*checksum"):
        read_metadata(path)


def change(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "metadata",
    [{"w": torch.ones(2)}, {"t": (1, 2)}, {1: "a"}, {"s": {1}}, {"d": OrderedDict(a=1)}, {"b": b"a"}],
    ids=repr,
)
def test_what_json_cannot_hold_is_read_from_the_state_which_is_verified(
    tmp_path: Path, metadata: dict[Any, Any]
) -> None:
    path = Path(Saver().save(Session(metadata=metadata), tmp_path / "model.ckpt", 1))
    assert repr(read_metadata(path)) == repr(metadata)
    change(path / "state.pt", 100)
    with pytest.raises(DamagedCheckpointError, match=r"state\.pt is not"):
        read_metadata(path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none", "cannot be read"),
        (".", "has no manifest.json"),
        ("text", "is no folder"),
    ],
)
def test_what_is_not_a_checkpoint_is_an_error(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CheckpointError, match=why):
        read_metadata(tmp_path / name)
