"""Saver: what checkpoints contain, which ones are kept, and what happens when writing or reading one fails."""

from __future__ import annotations

import errno
import fcntl
import gc
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import weakref
import zlib
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.accelerators import DEVICE
from support.devices import FakeDevice
from support.disks import no_space_after
from support.processes import call
from support.states import Box
from torch import nn

from torchhooks.checkpoints import folder as checkpoint_files
from torchhooks.checkpoints import saver as saver_module
from torchhooks.checkpoints.folder import Folder, Retention, encoded
from torchhooks.checkpoints.saver import Saver, latest_checkpoint, list_checkpoints
from torchhooks.checkpoints.saving import Contents, save_with_torch, write_checkpoint
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError
from torchhooks.common.files import Disk
from torchhooks.common.processes import process_name
from torchhooks.lifecycle.session import Session
from torchhooks.ranks.ranks import Ranks

Lines = list[tuple[str, str]]


def make_session(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    hooks: Mapping[str, Any] | None = None,
    **state: Any,
) -> Session:
    return Session(model, optimizer, state, hooks=dict(hooks or {}))


def boxed(value: Any) -> Session:
    return make_session(box=Box(value))


def value_in(path: str, saver: Saver | None = None) -> Any:
    session = boxed(None)
    (saver or Saver()).restore(session, path)
    return box_of(session).value


def box_of(session: Session) -> Box:
    return cast(Box, session.state["box"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder)]


def save_steps(folder: Path, *saved: int, saver: Saver | None = None, prefix: str = "model.ckpt") -> list[str]:
    saver = saver or Saver()
    return [saver.save(boxed(step), folder / prefix, step) for step in saved]


def warnings_in(lines: Lines) -> str:
    return "\n".join(text for level, text in lines if level == "WARNING")


# Where checkpoints are.


def test_the_path_has_the_step(tmp_path: Path) -> None:
    assert Saver().save(boxed(1), f"{tmp_path}/model.ckpt", 7) == f"{tmp_path}/model.ckpt-7"


def test_a_checkpoint_is_one_folder_of_two_files_and_nothing_else_is_written(tmp_path: Path) -> None:
    (path,) = save_steps(tmp_path, 7)
    assert names(tmp_path) == ["model.ckpt-7"]
    assert names(Path(path)) == ["manifest.json", "state.pt"]


def test_a_manifest_says_what_the_checkpoint_is_to_any_reader_of_json(tmp_path: Path) -> None:
    session = Session(metadata={"lr": 0.1, "sizes": [1, None]})
    saver = Saver()
    saver.disk = Clock(99.0)
    path = saver.save(session, tmp_path / "model.ckpt", 4, score=0.5)
    state = Path(path, "state.pt").read_bytes()
    manifest = json.loads(Path(path, "manifest.json").read_text())
    assert manifest == {
        "format": 4,
        "name": "model.ckpt-4",
        "order": 1,
        "step": 4,
        "time": 99.0,
        "kept": False,
        "world_size": 1,
        "score": 0.5,
        "finished": None,
        "metadata": {"lr": 0.1, "sizes": [1, None]},
        "files": {"state.pt": [len(state), zlib.crc32(state)]},
        "crc32": ANY,
    }


def test_the_folder_is_created_by_the_first_checkpoint(tmp_path: Path) -> None:
    assert save_steps(tmp_path / "a" / "b", 1) == [latest_checkpoint(tmp_path / "a" / "b")]


def test_a_relative_path_stays_relative(tmp_path: Path) -> None:
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        assert (Saver().save(boxed(1), "model.ckpt", 3), latest_checkpoint(".")) == ("model.ckpt-3", "./model.ckpt-3")
    finally:
        os.chdir(before)


def test_torch_reads_a_checkpoint_without_this_library(tmp_path: Path) -> None:
    (path,) = save_steps(tmp_path, 5)
    saved = torch.load(f"{path}/state.pt", weights_only=True)
    assert (saved["box"], saved["global_step"]) == ({"value": 5}, 0)


def test_the_list_has_step_path_size_and_time(tmp_path: Path) -> None:
    saver = Saver()
    saver.disk = Clock(99.0)
    (path,) = save_steps(tmp_path, 4, saver=saver)
    (found,) = list_checkpoints(tmp_path)
    assert (found.step, found.path, found.bytes, found.time) == (4, path, os.path.getsize(f"{path}/state.pt"), 99.0)


def test_the_latest_is_the_one_written_last_not_the_one_of_the_highest_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 30, 9, 10)
    assert (steps(tmp_path), latest_checkpoint(tmp_path)) == ([30, 9, 10], str(tmp_path / "model.ckpt-10"))


def test_a_folder_that_does_not_exist_has_no_latest_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None


def test_a_file_in_place_of_the_folder_has_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert list_checkpoints(tmp_path / "file") == []


def test_there_is_nothing_to_restore_in_an_empty_folder(tmp_path: Path) -> None:
    assert Saver().restore_latest(boxed(1), tmp_path) is None


# Which ones are kept.


def test_checkpoints_of_another_name_are_counted_separately(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    save_steps(tmp_path, 7, 8, saver=Saver(1), prefix="best")
    assert [Path(found.path).name for found in list_checkpoints(tmp_path)] == ["model.ckpt-1", "model.ckpt-2", "best-8"]


def test_a_step_saved_again_replaces_its_checkpoint_and_is_the_newest(tmp_path: Path) -> None:
    saver = Saver()
    save_steps(tmp_path, 1, 2, saver=saver)
    path = saver.save(boxed("again"), tmp_path / "model.ckpt", 1)
    assert (steps(tmp_path), value_in(path)) == ([2, 1], "again")


class Clock(Disk):
    """A disk with a clock that tests set."""

    def __init__(self, secs: float) -> None:
        self.secs = secs

    def now(self) -> float:
        return self.secs


# Savers, one after the other, as in processes that resume: how many they keep, one in how many hours for good, and the
# steps that they save, each so many half hours after midnight; and which are left.
KEPT: list[tuple[str, list[tuple[int | None, int | None, list[int]]], list[int]]] = [
    ("the newest by writing", [(3, None, [9, 10, 100, 8])], [10, 100, 8]),
    ("all", [(None, None, [0, 1, 2, 3, 4, 5, 6, 7])], [0, 1, 2, 3, 4, 5, 6, 7]),
    ("all, with 0", [(0, None, [0, 1, 2, 3, 4, 5, 6, 7])], [0, 1, 2, 3, 4, 5, 6, 7]),
    ("those of an earlier process count", [(5, None, [1, 2, 3]), (2, None, [4])], [3, 4]),
    ("the first, and one an hour", [(2, 1, [0, 1, 2, 3, 4, 5, 6, 7])], [0, 2, 4, 6, 7]),
    ("the hours continue in the next process", [(2, 1, [0, 1]), (2, 1, [2, 3]), (2, 1, [4, 5])], [0, 2, 4, 5]),
    ("one after a pause of many hours", [(1, 1, [0, 101, 102, 103, 104])], [0, 101, 103, 104]),
    ("for good, also by a saver that keeps none", [(1, 1, [0, 1, 2, 3]), (1, None, [50])], [0, 2, 50]),
    ("for good, also with a longer period", [(1, 1, [0, 1, 2, 3, 4]), (1, 2, [5, 6, 7, 8, 9, 10])], [0, 2, 4, 8, 10]),
    ("for good by a period that comes later", [(None, None, [0, 1, 2, 3, 4]), (1, 1, [5, 6])], [0, 2, 4, 6]),
    ("for good when the clock is set back", [(1, 1, [100, 101, 0, 1, 2, 3])], [100, 0, 2, 3]),
]


@pytest.mark.parametrize(("savers", "left"), [row[1:] for row in KEPT], ids=[row[0] for row in KEPT])
def test_keeps(savers: list[tuple[int | None, int | None, list[int]]], left: list[int], tmp_path: Path) -> None:
    clock = Clock(0)
    for number, hours, saved in savers:
        saver = Saver(number, keep_checkpoint_every_n_hours=hours)
        saver.disk = clock
        for step in saved:
            clock.secs = 1800.0 * step
            save_steps(tmp_path, step, saver=saver)
    assert steps(tmp_path) == left


def test_a_checkpoint_says_whether_it_is_kept_for_good(tmp_path: Path) -> None:
    saver = Saver(1, keep_checkpoint_every_n_hours=1)
    saver.disk = clock = Clock(0)
    for step in range(2):
        save_steps(tmp_path, step, saver=saver)
        clock.secs += 1800
    assert [(found.step, found.kept) for found in list_checkpoints(tmp_path)] == [(0, True), (1, False)]


def test_each_name_has_its_own_checkpoints_that_are_kept_for_good(tmp_path: Path) -> None:
    clock, saver = Clock(0), Saver(1, keep_checkpoint_every_n_hours=1)
    saver.disk = clock
    for name in ("model", "other"):
        save_steps(tmp_path, 1, 2, saver=saver, prefix=name)
        clock.secs += 1800
    assert names(tmp_path) == ["model-1", "model-2", "other-1", "other-2"]


# What a checkpoint contains.


class Tied(nn.Module):
    """Two layers that share one weight; a weight that is not contiguous; an extra state."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.turned = nn.Parameter(torch.full((3, 2), fill).t())
        self.short = nn.Parameter(torch.full((5,), fill, dtype=torch.bfloat16))
        self.norm = nn.BatchNorm1d(4)
        self.extra = fill

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_model_comes_back_whatever_its_tensors_are_like(tmp_path: Path, async_save: bool) -> None:
    saved, fresh = Tied(1.0), Tied(2.0)
    saver = Saver(async_save=async_save)
    saver.save(make_session(saved), tmp_path / "model.ckpt", 1)
    assert saver.restore_latest(make_session(fresh), tmp_path) is not None
    assert fresh.extra == saved.extra
    for one, other in zip(saved.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


@pytest.mark.parametrize("async_save", [False, True])
def test_what_shares_memory_is_in_the_file_once(tmp_path: Path, async_save: bool) -> None:
    whole = torch.zeros(1000)
    saver = Saver(async_save=async_save)
    path = saver.save(boxed([whole, whole[10:20], whole.view(10, 100).t()]), tmp_path / "model.ckpt", 1)
    saver.close()
    again, part, turned = value_in(path)
    again += 1
    assert (part.sum(), turned.sum(), turned.stride()) == (10, 1000, (1, 100))


def test_what_is_restored_stays_when_its_file_is_cut_short(tmp_path: Path) -> None:
    whole = torch.arange(100_000)
    box = Box({"whole": whole, "part": whole[5:9], "sparse": whole.to_sparse()})
    path = Saver().save(make_session(box=box), tmp_path / "model.ckpt", 1)
    box.value = None
    Saver().restore(make_session(box=box), path)
    os.truncate(f"{path}/state.pt", 0)  # to read a mapped tensor would end the process
    value = box.value
    assert torch.equal(value["whole"], whole)
    assert torch.equal(value["sparse"].to_dense(), whole)
    value["whole"] += 1
    assert value["part"].tolist() == [6, 7, 8, 9]


PLAIN: list[Any] = [
    None,
    True,
    2**200,
    1.5,
    float("inf"),
    1 + 2j,
    "text \udcff",
    b"\x00\xff",
    bytearray(b"ab"),
    [1, [2, (3, 4, 5, 6), ()]],
    {1: "a", "b": {2, 3}, (1, "a"): None, None: 0},
    set(),
    OrderedDict(b=1, a=2),
    Counter("aab"),
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.device("cuda:1"),
    torch.Size([1, 2]),
    torch.strided,
    {},
]


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_a_plain_value_comes_back_as_it_was(tmp_path: Path, value: Any, async_save: bool) -> None:
    saver = Saver(async_save=async_save)
    back = value_in(saver.save(boxed(value), tmp_path / "model.ckpt", 1), saver)
    assert (back, type(back)) == (value, type(value))


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(2.5),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "expanded": lambda: torch.ones(1).expand(4),
    "bfloat16": lambda: torch.arange(3.0).bfloat16(),
    "uint16": lambda: torch.tensor([1, 2], dtype=torch.uint16),
    "bool": lambda: torch.tensor([True, False]),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negative view": lambda: torch.tensor([1 + 2j]).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "needs grad": lambda: torch.ones(2, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_tensor_comes_back_as_it_was(tmp_path: Path, name: str, async_save: bool) -> None:
    tensor, saver = TENSORS[name](), Saver(async_save=async_save)
    back = value_in(saver.save(boxed(tensor), tmp_path / "model.ckpt", 1), saver)
    assert (back.dtype, back.layout, back.shape) == (tensor.dtype, tensor.layout, tensor.shape)
    assert torch.equal(back.to_dense(), tensor.detach().to_dense())


@pytest.mark.parametrize(
    ("number", "plain"), [(np.float64(0.1), 0.1), (np.float32(0.5), 0.5), (np.int64(3), 3), (np.True_, True)]
)
def test_a_numpy_number_comes_back_as_a_python_number(tmp_path: Path, number: Any, plain: Any) -> None:
    back = value_in(Saver().save(boxed(number), tmp_path / "model.ckpt", 1))
    assert (back, type(back)) == (plain, type(plain))


def test_a_saved_module_keeps_the_versions_of_its_parts(tmp_path: Path) -> None:
    path = Saver().save(make_session(nn.BatchNorm1d(2)), tmp_path / "model.ckpt", 1)
    saved, of_another = torch.load(f"{path}/state.pt", weights_only=True)["model"], nn.BatchNorm1d(2).state_dict()
    assert saved._metadata == of_another._metadata  # type: ignore[attr-defined]  # noqa: SLF001 - torch's


def test_hooks_are_saved_and_restored_by_name(tmp_path: Path) -> None:
    path = Saver().save(make_session(hooks={"EMA": Box(3)}), tmp_path / "model.ckpt", 1)
    hook = Box()
    Saver().restore(make_session(hooks={"EMA": hook}), path)
    assert hook.value == 3


def test_the_global_step_is_that_of_the_session(tmp_path: Path) -> None:
    session, fresh = make_session(), make_session()
    session.global_step = 12
    Saver().restore(fresh, Saver().save(session, tmp_path / "model.ckpt", 1))
    assert fresh.global_step == 12


def draw() -> tuple[Any, ...]:
    return random.gauss(0, 1), np.random.randn(), torch.randn(1).item()


def test_random_numbers_continue_where_they_were(tmp_path: Path) -> None:
    draw()
    path = Saver().save(make_session(), tmp_path / "model.ckpt", 1)
    expected = draw()
    Saver().restore(make_session(), path)
    assert draw() == expected


@pytest.mark.accelerator
@pytest.mark.parametrize("async_save", [False, True])
def test_a_checkpoint_of_device_tensors_loads_on_the_cpu(tmp_path: Path, async_save: bool) -> None:
    saver = Saver(async_save=async_save)
    session = make_session(nn.Linear(2, 2).to(DEVICE), box=Box(torch.ones(3, device=DEVICE)))
    path = saver.save(session, tmp_path / "model.ckpt", 1)
    cpu = make_session(nn.Linear(2, 2), box=Box())
    saver.restore(cpu, path)
    assert torch.equal(box_of(cpu).value, torch.ones(3))


@pytest.mark.accelerator
def test_random_numbers_of_a_device_continue_where_they_were(tmp_path: Path) -> None:
    torch.randn(1, device=DEVICE)
    path = Saver().save(make_session(), tmp_path / "model.ckpt", 1)
    expected = torch.randn(3, device=DEVICE)
    Saver().restore(make_session(), path)
    assert torch.equal(torch.randn(3, device=DEVICE), expected)


TAGS: list[str] = []  # if not empty, the device that torch.save records for every storage


@pytest.fixture
def tagged_as_cuda() -> Iterator[None]:
    torch.serialization.register_package(0, lambda storage: TAGS[0] if TAGS else None, lambda storage, location: None)
    TAGS.append("cuda:0")
    yield
    TAGS.clear()


def test_tensors_of_a_missing_device_load_on_the_cpu(tmp_path: Path, tagged_as_cuda: None) -> None:
    path = Saver().save(boxed(torch.ones(2)), tmp_path / "model.ckpt", 1)
    TAGS.clear()
    assert b"cuda:0" in Path(path, "state.pt").read_bytes()
    assert value_in(path).device.type == "cpu"


class Unpicklable:
    def __reduce__(self) -> str:
        raise RuntimeError("cannot be pickled")


def test_memory_of_the_state_is_freed_without_a_garbage_collection() -> None:
    gc.disable()
    try:
        array = np.zeros(1000)  # a storage cannot be referred to weakly, but it keeps the array that it is made of
        reference = weakref.ref(array)
        save_with_torch({"value": torch.from_numpy(array)}, io.BytesIO())
        del array
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("before", [False, True])
def test_the_option_for_checksums_is_put_back_even_after_an_error(before: bool) -> None:
    torch.serialization.set_crc32_options(before)
    try:
        with pytest.raises(RuntimeError, match="cannot be pickled"):
            save_with_torch({"value": Unpicklable()}, io.BytesIO())
        assert torch.serialization.get_crc32_options() is before
    finally:
        torch.serialization.set_crc32_options(True)


# Bit-exact resumption in another process.


class Net(nn.Module):
    """A model with dropout, a norm with running statistics, and a bfloat16 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 2, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(self.layers(x).bfloat16()).float())


def make_training() -> Session:
    model = Net()
    groups: list[dict[str, Any]] = [
        {"params": model.layers.parameters()},
        {"params": model.head.parameters(), "lr": 0.01},
    ]
    optimizer = torch.optim.Adam(groups, lr=0.05, amsgrad=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=50)
    return make_session(model, optimizer, schedule=schedule, scaler=torch.amp.GradScaler("cpu", growth_interval=2))


def make_step(session: Session) -> None:
    assert session.model is not None
    assert session.optimizer is not None
    scaler, schedule = cast(Any, session.state["scaler"]), cast(Any, session.state["schedule"])
    rows = torch.randn(8, 6)[torch.randperm(8)] * random.random() * np.random.rand()
    session.optimizer.zero_grad()
    scaler.scale(session.model(rows).square().mean()).backward()
    scaler.step(session.optimizer)
    scaler.update()
    schedule.step()
    session.global_step += 1


def resume_and_finish(folder: str) -> None:
    torch.manual_seed(1234)
    session = make_training()
    Saver().restore_latest(session, folder)
    for _ in range(3):
        make_step(session)
    Saver().save(session, f"{folder}/resumed", session.global_step)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_training_run_resumed_in_a_new_process_ends_with_the_same_bits(tmp_path: Path) -> None:
    session = make_training()
    for _ in range(3):
        make_step(session)
    Saver().save(session, tmp_path / "model.ckpt", 3)
    ended = call(resume_and_finish, str(tmp_path))
    assert ended.code == 0, ended.output
    for _ in range(3):
        make_step(session)
    straight = Saver().save(session, tmp_path / "straight", 6)
    resumed = str(tmp_path / "resumed-6")
    assert same(torch.load(f"{resumed}/state.pt"), torch.load(f"{straight}/state.pt"))


# What cannot be saved.

Pair = namedtuple("Pair", "a b")
LOOP: list[Any] = []
LOOP.append(LOOP)

REFUSED = [
    (Path("a"), r"box\['value'\] is of type pathlib\.\w+"),
    ([1, {"deep": len}], r"box\['value'\]\[1\]\['deep'\] is of type builtin_function_or_method"),
    (np.ones(2), r"a NumPy array: convert it with torch\.from_numpy"),
    (np.datetime64("2020"), r"of type datetime\.date"),
    (defaultdict(int), r"of type collections\.defaultdict"),
    (frozenset(), "of type frozenset"),
    (Pair(1, 2), "of type .*Pair"),
    (b"", "empty bytes"),
    (2**3000, "an integer of 3001 bits"),
    ({Path("key"): 1}, "of type pathlib"),
    (torch.ones(2, device="meta"), "on the meta device"),
    (nn.UninitializedParameter(), "without a shape yet"),
    (torch.Generator(), r"of type torch\._C\.Generator"),
    (LOOP, "part of itself"),
]


@pytest.mark.parametrize(("value", "reason"), REFUSED, ids=lambda part: part if isinstance(part, str) else "")
def test_what_could_not_be_loaded_is_refused_with_its_key_when_it_is_saved(
    tmp_path: Path, value: Any, reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        Saver().save(boxed(value), tmp_path / "model.ckpt", 1)
    assert names(tmp_path) == []


def test_everything_that_cannot_be_saved_is_listed(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"box\['value'\]\[0\] is of type type, box\['value'\]\[2\] is of type type\. "
    ):
        Saver().save(boxed([int, 1, str]), tmp_path / "model.ckpt", 1)


def test_a_subclass_of_tensor_is_refused(tmp_path: Path) -> None:
    class Tagged(torch.Tensor):
        pass

    with pytest.raises(CheckpointError, match="Tagged, a subclass of Tensor"):
        Saver().save(boxed(torch.ones(2).as_subclass(Tagged)), tmp_path / "model.ckpt", 1)


@pytest.mark.parametrize("name", ["model", "optimizer", "global_step", "random", "sharded", "hooks.EMA"])
def test_a_reserved_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"state.'{name}'.: this name is reserved"):
        Saver().save(Session(state={name: Box()}), tmp_path / "model.ckpt", 1)


def test_an_object_without_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'thing' is of type int, without state_dict"):
        Saver().save(make_session(thing=3), tmp_path / "model.ckpt", 1)


def test_an_error_of_a_state_dict_is_noted_with_its_name(tmp_path: Path) -> None:
    class Broken(Box):
        def state_dict(self) -> dict[str, Any]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        Saver().save(make_session(box=Broken()), tmp_path / "model.ckpt", 1)
    assert caught.value.__notes__ == ["while saving 'box'"]


@pytest.mark.parametrize("async_save", [False, True])
def test_views_of_two_dtypes_are_refused_with_both_names(tmp_path: Path, async_save: bool) -> None:
    data = torch.ones(4)
    with pytest.raises(CheckpointError) as caught:
        Saver(async_save=async_save).save(boxed([data, data.view(torch.int32)]), tmp_path / "model.ckpt", 1)
    assert str(caught.value) == (
        "This cannot be saved: box['value'][1] is a view of the memory of box['value'][0] as another dtype: leave it "
        "out, or clone() it."
    )


EMPTY: list[list[torch.Tensor]] = [
    [torch.empty(0), torch.empty(0, dtype=torch.int32)],
    [torch.empty(0), torch.arange(3, dtype=torch.float64)],
    [torch.arange(3), torch.empty(2, 0), torch.empty(0, dtype=torch.bool), torch.arange(2.0)],
    [torch.arange(3.0)[:0], torch.arange(2)],
]


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("values", EMPTY, ids=map(str, range(len(EMPTY))))
def test_empty_tensors_of_any_dtype_are_saved(tmp_path: Path, values: list[torch.Tensor], async_save: bool) -> None:
    saver = Saver(async_save=async_save)
    path = saver.save(boxed(values), tmp_path / "model.ckpt", 1)
    saver.close()
    fresh = boxed(None)
    Saver().restore(fresh, path)
    loaded = box_of(fresh).value
    assert [(each.dtype, each.tolist(), each.stride()) for each in loaded] == [
        (each.dtype, each.tolist(), each.stride()) for each in values
    ]


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "sparse_bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8),
    "by channel": lambda: torch.quantize_per_channel(
        torch.ones(3, 2), torch.full((3,), 0.5), torch.tensor([0, 0, 0]), 0, torch.qint8
    ),
    "by channel, float": lambda: torch.quantize_per_channel(
        torch.ones(3, 2), torch.full((3,), 0.5), torch.zeros(3), 0, torch.quint8
    ),
    "complex32": lambda: torch.ones(3, dtype=torch.complex32),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_tensors_of_many_kinds_are_saved_and_restored(tmp_path: Path, name: str, async_save: bool) -> None:
    saver, value = Saver(async_save=async_save), KINDS[name]()
    path = saver.save(boxed(value), tmp_path / "model.ckpt", 1)
    saver.close()
    fresh = boxed(None)
    Saver().restore(fresh, path)
    assert repr(box_of(fresh).value) == repr(value)


UNSAVED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "a nested tensor, which cannot be loaded again: use the list of its unbind()",
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        "a nested tensor, which cannot be loaded again: use the list of its unbind()",
    ),
    "mkldnn": (
        lambda: torch.eye(3).to_mkldnn(),
        "of the layout torch._mkldnn, which torch does not save: convert it with to_dense()",
    ),
    "zero": (
        lambda: torch._efficientzerotensor(3),  # noqa: SLF001 - what forward-mode differentiation has
        "a tensor whose memory cannot be read: Attempted to access the data pointer on an invalid python storage.",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("name", UNSAVED)
def test_tensors_that_could_not_be_restored_are_refused_when_they_are_saved(
    tmp_path: Path, name: str, async_save: bool
) -> None:
    make, problem = UNSAVED[name]
    with pytest.raises(CheckpointError, match=re.escape(f"box['value'][0] is {problem}")):
        Saver(async_save=async_save).save(boxed([make()]), tmp_path / "model.ckpt", 1)
    assert list_checkpoints(tmp_path) == []


# Checkpoints that do not match the session.


def test_all_keys_of_a_model_that_do_not_match_are_listed(tmp_path: Path) -> None:
    path = Saver().save(make_session(nn.Sequential(nn.Linear(2, 3), nn.PReLU())), tmp_path / "model.ckpt", 1)
    with pytest.raises(CheckpointError) as caught:
        Saver().restore(make_session(nn.Sequential(nn.Linear(2, 4, bias=False), nn.Identity(), nn.PReLU())), path)
    first, *differences, last = str(caught.value).splitlines()
    assert str(path) in first
    assert differences == [
        "  model: missing in the file: '2.weight'",
        "  model: only in the file: '0.bias', '1.weight'",
        "  model: of another shape than in the file: '0.weight' (4, 2) instead of (3, 2)",
    ]
    assert "strict=False" in last


def test_groups_of_an_optimizer_that_do_not_match_are_shown(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    two = torch.optim.SGD(groups, lr=0.1)
    path = Saver().save(make_session(optimizer=one), tmp_path / "model.ckpt", 1)
    with pytest.raises(
        CheckpointError, match=r"optimizer: has groups of \[1, 1\] parameters, those in the file have \[2\]"
    ):
        Saver().restore(make_session(optimizer=two), path)


def test_entries_that_only_one_side_has_are_listed(tmp_path: Path) -> None:
    path = Saver().save(make_session(a=Box(), b=Box(), hooks={"EMA": Box()}), tmp_path / "model.ckpt", 1)
    with pytest.raises(CheckpointError, match=r"missing in the file: 'model', 'c'\n  only in the file: 'a'\. "):
        Saver().restore(make_session(nn.Linear(1, 1), b=Box(), c=Box()), path)


def test_nothing_is_loaded_when_something_does_not_match(tmp_path: Path) -> None:
    path = Saver().save(make_session(a=Box(1), b=Box(2)), tmp_path / "model.ckpt", 1)
    fresh = Box("fresh")
    before = torch.get_rng_state()
    torch.randn(1)
    with pytest.raises(CheckpointError, match="only in the file: 'b'"):
        Saver().restore(make_session(a=fresh), path)
    assert (fresh.value, torch.equal(torch.get_rng_state(), before)) == ("fresh", False)


def test_what_matches_is_loaded_on_request_and_the_rest_is_named_in_a_warning(tmp_path: Path, lines: Lines) -> None:
    saved = make_session(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)), a=Box(1), b=Box(2))
    path = Saver().save(saved, tmp_path / "model.ckpt", 1)
    fresh = make_session(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4)), a=Box(), c=Box("fresh"))
    Saver(strict=False).restore(fresh, path)
    assert saved.model is not None
    assert fresh.model is not None
    assert torch.equal(fresh.model[0].weight, saved.model[0].weight)  # type: ignore[index]
    assert (cast(Box, fresh.state["a"]).value, cast(Box, fresh.state["c"]).value) == (1, "fresh")
    assert "only in the file: 'b'" in warnings_in(lines)


def test_an_optimizer_that_does_not_match_is_left_alone_on_request(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = Saver().save(make_session(optimizer=torch.optim.SGD(model.parameters(), lr=0.5)), tmp_path / "m", 1)
    fresh = torch.optim.SGD([model.weight], lr=0.1)
    Saver(strict=False).restore(make_session(optimizer=fresh), path)
    assert fresh.param_groups[0]["lr"] == 0.1


def test_a_model_that_rewrites_what_it_loads_is_judged_by_torch(tmp_path: Path) -> None:
    class Scale(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.rand(3)))

    def rename(model: nn.Module, state: dict[str, Any], *args: Any) -> None:
        state["new"] = state.pop("old")

    old, new = Scale("old"), Scale("new")
    path = Saver().save(make_session(old), tmp_path / "model.ckpt", 1)
    nn.Module.register_load_state_dict_pre_hook(new, rename)
    Saver().restore(make_session(new), path)
    assert torch.equal(new.get_parameter("new"), old.get_parameter("old"))


def test_an_error_of_a_load_state_dict_is_noted_with_its_name(tmp_path: Path) -> None:
    class Broken(Box):
        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            raise ZeroDivisionError

    path = Saver().save(boxed(1), tmp_path / "model.ckpt", 1)
    with pytest.raises(ZeroDivisionError) as caught:
        Saver().restore(make_session(box=Broken()), path)
    assert caught.value.__notes__[0].startswith(f"while loading 'box' from {path}")


# Damaged and foreign files.


def restored(folder: Path) -> Any:
    session = boxed(None)
    path = Saver().restore_latest(session, folder)
    return None if path is None else box_of(session).value


def cut(path: Path, size: int) -> None:
    os.truncate(path, size % path.stat().st_size)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x20
    path.write_bytes(data)


def rewrite_manifest(path: Path, **entries: Any) -> None:
    """Change entries of a manifest, and its checksum."""
    manifest = json.loads(path.read_text())
    del manifest["crc32"]
    path.write_bytes(encoded({**manifest, **entries}))


def write_manifest(path: Path, text: str, with_checksum: bool) -> None:
    data = text.encode("latin1")
    path.write_bytes(data + (b', "crc32": %d}\n' % zlib.crc32(data) if with_checksum else b""))


def leave_temporary(folder: Path, process: str = "elsewhere-1-2") -> Path:
    path = folder / f".model.ckpt-9.{process}-01234567.tmp"
    path.mkdir()
    (path / "state.pt").write_bytes(b"half")
    return path


STATE, MANIFEST = "model.ckpt-2/state.pt", "model.ckpt-2/manifest.json"
BAD_STATE, BAD_MANIFEST = "model.ckpt-2 is damaged: state.pt", "model.ckpt-2 has a damaged manifest.json"

# What happens to a folder with checkpoints of steps 1 and 2, the steps that it lists then, the one that is restored,
# and what a warning says, if there is one.
FOLDERS: list[tuple[str, Callable[[Path], object], list[int], int, str]] = [
    ("nothing", lambda folder: None, [1, 2], 2, ""),
    ("a changed byte", lambda folder: flip(folder / STATE, 1000), [1, 2], 1, f"{BAD_STATE} is not what was"),
    ("no state", lambda folder: os.remove(folder / STATE), [1], 1, BAD_STATE),
    ("no manifest", lambda folder: os.remove(folder / MANIFEST), [1], 1, "model.ckpt-2 has no manifest.json"),
    ("no byte of the state", lambda folder: cut(folder / STATE, 0), [1], 1, BAD_STATE),
    ("one byte of the state", lambda folder: cut(folder / STATE, 1), [1], 1, BAD_STATE),
    ("100 bytes of the state", lambda folder: cut(folder / STATE, 100), [1], 1, BAD_STATE),
    ("all but one byte of the state", lambda folder: cut(folder / STATE, -1), [1], 1, BAD_STATE),
    ("no byte of the manifest", lambda folder: cut(folder / MANIFEST, 0), [1], 1, BAD_MANIFEST),
    ("one byte of the manifest", lambda folder: cut(folder / MANIFEST, 1), [1], 1, BAD_MANIFEST),
    ("100 bytes of the manifest", lambda folder: cut(folder / MANIFEST, 100), [1], 1, BAD_MANIFEST),
    ("all but one byte of the manifest", lambda folder: cut(folder / MANIFEST, -1), [1], 1, BAD_MANIFEST),
    *(
        (
            f"a manifest of {text[:9]}{' and a checksum' * of}",
            partial(lambda text, of, folder: write_manifest(folder / MANIFEST, text, of), text, of),
            [1],
            1,
            BAD_MANIFEST,
        )
        for text in ("", "{", "[]", "[" * 100_000, '{"a": 1', "\xff")
        for of in (False, True)
    ),
    ("the same manifest", lambda folder: rewrite_manifest(folder / MANIFEST), [1, 2], 2, ""),
    *(
        (
            f"a manifest with {str(entry)[:40]}",
            partial(lambda entry, folder: rewrite_manifest(folder / MANIFEST, **entry), entry),
            [1],
            1,
            f"it has format {entry['format']}, " if "format" in entry else BAD_MANIFEST,
        )
        for entry in (
            {"format": 3},
            {"format": 5},
            {"order": "2"},
            {"step": "2"},
            {"step": True},
            {"step": 1.0},
            {"time": None},
            {"time": 10**400},
            {"time": 1e300},
            {"score": "good"},
            {"files": None},
            {"files": ["state.pt"]},
            {"files": {"state.pt": 3}},
            {"files": {"state.pt": ["many", 3]}},
        )
    ),
    (
        "a copy under another name",
        lambda folder: shutil.copytree(folder / "model.ckpt-1", folder / "model.ckpt-999"),
        [1, 2],
        2,
        "model.ckpt-999 is a copy of model.ckpt-1",
    ),
    ("a file", lambda folder: torch.save({}, folder / "model.ckpt-0"), [1, 2], 2, "model.ckpt-0 is no folder"),
    ("a pipe", lambda folder: os.mkfifo(folder / "model.ckpt-9"), [1, 2], 2, ""),
    ("a folder of something else", lambda folder: (folder / "version-9").mkdir(), [1, 2], 2, ""),
    ("a temporary folder", leave_temporary, [1, 2], 2, ""),
]


@pytest.mark.parametrize(
    ("happens", "listed", "restores", "said"), [row[1:] for row in FOLDERS], ids=[row[0] for row in FOLDERS]
)
def test_what_is_no_checkpoint_is_skipped_and_named(
    happens: Callable[[Path], object], listed: list[int], restores: int, said: str, tmp_path: Path, lines: Lines
) -> None:
    save_steps(tmp_path, 1, 2)
    happens(tmp_path)
    assert (steps(tmp_path), restored(tmp_path)) == (listed, restores)
    assert bool(warnings_in(lines)) == bool(said)
    assert said in warnings_in(lines)
    save_steps(tmp_path, 3)
    assert (steps(tmp_path), restored(tmp_path)) == ([*listed, 3], 3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path / "state.pt", 1000),
        lambda path: os.remove(path / "state.pt"),
        lambda path: os.remove(path / "manifest.json"),
    ],
    ids=["a changed byte", "no state", "no manifest"],
)
def test_starting_over_is_refused_where_every_checkpoint_is_damaged(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    for path in save_steps(tmp_path, 1, 2):
        damage(Path(path))
    with pytest.raises(CheckpointError, match=r"all of them are damaged.* To start over, move them away"):
        Saver().restore_latest(boxed(None), tmp_path)


# The process that a temporary folder is of, whether somebody has locked the folder around it, and whether a save in
# this process removes it. A container may have the name of this machine, and then its process looks like an earlier
# one of the same number.
TEMPORARY = [
    ("of another machine", "elsewhere-1-2", False, True),
    ("of a process that lives", "{parent}", False, False),
    ("of an earlier process of the same number", "{parent}1", False, True),
    ("of another machine, which has locked it", "elsewhere-1-2", True, False),
    ("of a container, which has locked it", "{parent}1", True, False),
]


@pytest.mark.parametrize(
    ("process", "locked", "removed"), [row[1:] for row in TEMPORARY], ids=[row[0] for row in TEMPORARY]
)
def test_a_temporary_folder_is_removed_and_named_if_nobody_writes_it(
    process: str, locked: bool, removed: bool, tmp_path: Path, lines: Lines
) -> None:
    path = leave_temporary(tmp_path, process.format(parent=process_name(os.getppid())))
    file = os.open(tmp_path, os.O_RDONLY)  # as a process that saves into the folder has it
    if locked:
        fcntl.flock(file, fcntl.LOCK_EX)
    save_steps(tmp_path, 1)
    os.close(file)
    assert path.exists() != removed
    assert (str(path) in warnings_in(lines)) == removed
    if locked:
        save_steps(tmp_path, 2)
        assert not path.exists()


def test_a_changed_byte_is_found_wherever_it_is(tmp_path: Path) -> None:
    path = Saver().save(boxed(torch.arange(50)), tmp_path / "model.ckpt", 1)
    for name, every in [("state.pt", 29), ("manifest.json", 3)]:
        for place in range(0, os.path.getsize(f"{path}/{name}"), every):
            flip(Path(path, name), place)
            with pytest.raises(DamagedCheckpointError, match=re.escape(path)):
                Saver().restore(boxed(None), path)
            flip(Path(path, name), place)
    assert value_in(path).sum() == sum(range(50))


def test_a_missing_file_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"model.ckpt-1 cannot be read: No such file"):
        Saver().restore(boxed(None), tmp_path / "model.ckpt-1")


def test_a_file_of_plain_torch_save_is_not_a_checkpoint(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / "model.ckpt-1")
    with pytest.raises(DamagedCheckpointError, match="is no folder"):
        Saver().restore(boxed(None), tmp_path / "model.ckpt-1")


def test_an_old_file_put_back_is_not_the_newest(tmp_path: Path, lines: Lines) -> None:
    (path,) = save_steps(tmp_path, 1)
    shutil.copytree(path, tmp_path / "away")
    save_steps(tmp_path, 2, 3, saver=Saver(1))
    (tmp_path / "away").rename(path)
    assert restored(tmp_path) == 3


def test_after_the_newest_was_moved_away_the_next_is_the_newest_also_when_it_is_put_back(tmp_path: Path) -> None:
    *_, path = save_steps(tmp_path, 1, 3)
    os.rename(path, tmp_path / "away")
    save_steps(tmp_path, 2)
    assert steps(tmp_path) == [1, 2]
    os.rename(tmp_path / "away", path)
    assert steps(tmp_path) == [1, 3, 2]


def test_a_file_that_is_not_a_checkpoint_is_never_removed(tmp_path: Path, lines: Lines) -> None:
    torch.save({"model": {}}, tmp_path / "model.ckpt-0")
    save_steps(tmp_path, 1, 2, saver=Saver(1))
    assert names(tmp_path) == ["model.ckpt-0", "model.ckpt-2"]
    assert "model.ckpt-0 is no folder" in warnings_in(lines)


def test_a_file_of_an_earlier_version_is_named_in_one_line(tmp_path: Path, lines: Lines) -> None:
    torch.save({"global_step": 5}, tmp_path / "model.ckpt-5")
    assert Saver().restore_latest(boxed(None), tmp_path) is None
    assert warnings_in(lines) == (
        f"{tmp_path}/model.ckpt-5 is no folder, as a checkpoint is: an earlier version of torchhooks or another "
        "program wrote it. It is skipped."
    )


def test_a_save_reads_only_the_manifests_that_it_has_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    inspect = checkpoint_files.inspect
    monkeypatch.setattr(checkpoint_files, "inspect", lambda path: seen.append(Path(path).name) or inspect(path))  # type: ignore[func-returns-value]
    save_steps(tmp_path, 1, 2, 3)
    seen.clear()
    saver, read = Saver(), []
    for step in (4, 5):
        save_steps(tmp_path, step, saver=saver)
        read.append(list(seen))
        seen.clear()
    assert read == [["model.ckpt-1", "model.ckpt-2", "model.ckpt-3"], ["model.ckpt-4"]]


def test_a_file_that_was_changed_between_two_saves_is_read_again(tmp_path: Path, lines: Lines) -> None:
    saver = Saver(2)
    first, *_ = save_steps(tmp_path, 1, 2, saver=saver)
    shutil.rmtree(first)
    Path(first).write_bytes(b"a file of the user's")
    save_steps(tmp_path, 3, 4, saver=saver)
    assert names(tmp_path) == ["model.ckpt-1", "model.ckpt-3", "model.ckpt-4"]
    assert warnings_in(lines).count(first) == 1


def test_a_folder_that_ranks_of_this_process_write_into_is_left_alone(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), Disk(), Retention(5, None))
    path = folder.temporary("model.ckpt-9")
    folder.begin(path)
    save_steps(tmp_path, 1)
    assert os.path.exists(path)
    folder.end(path)
    assert names(tmp_path) == ["model.ckpt-1"]


def test_a_checkpoint_that_another_process_has_just_moved_aside_is_not_put_back(tmp_path: Path) -> None:
    (path,) = save_steps(tmp_path, 1)
    aside = tmp_path / f".model.ckpt-1.{process_name(os.getppid())}-01234567.old"
    os.rename(path, aside)
    assert restored(tmp_path) is None
    assert aside.exists()
    os.rename(aside, tmp_path / ".model.ckpt-1.elsewhere-1-2-01234567.old")
    assert restored(tmp_path) == 1


class Evil:
    """An object whose unpickling creates a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    folder, proof = tmp_path / "run", tmp_path / "proof"
    contents = Contents({"box": Evil(proof)}, {}, {"score": None})
    write_checkpoint(Ranks(), contents, Folder(str(folder), Disk(), Retention(5, None)), "model.ckpt", 1)
    with pytest.raises(CheckpointError, match=r"model\.ckpt-1 is not damaged, but torch does not load it"):
        Saver().restore_latest(boxed(None), folder)
    assert not proof.exists()
    torch.load(f"{latest_checkpoint(folder)}/state.pt", weights_only=False)
    assert proof.exists(), "the pickle was harmless, so nothing was tested"


# Saving in the background.


class GatedDisk(Disk):
    """A disk that creates no file until the gate is open, and then raises ``errors``, one for each file."""

    def __init__(self, *errors: OSError | None) -> None:
        self.gate = threading.Event()
        self.errors = list(errors)

    def create(self, path: str) -> BinaryIO:
        self.gate.wait(timeout=60)
        if self.errors and (error := self.errors.pop(0)):
            raise error
        return super().create(path)


def gated(*errors: OSError | None) -> tuple[Saver, GatedDisk]:
    saver, disk = Saver(async_save=True), GatedDisk(*errors)
    saver.disk = disk
    return saver, disk


def test_save_returns_before_the_file_exists(tmp_path: Path) -> None:
    saver, disk = gated()
    path = saver.save(boxed(1), tmp_path / "model.ckpt", 1)
    assert latest_checkpoint(tmp_path) is None
    disk.gate.set()
    saver.wait()
    assert latest_checkpoint(tmp_path) == path


def test_the_background_writes_the_state_at_the_time_of_the_call(tmp_path: Path) -> None:
    saver, disk = gated()
    value = {"tensor": torch.zeros(5), "list": [1], "bytes": bytearray(b"a"), "set": {1}}
    path = saver.save(boxed(value), tmp_path / "model.ckpt", 1)
    value["tensor"] += 1  # type: ignore[operator]
    for name, more in (("list", 2), ("bytes", 98)):
        cast(Any, value[name]).append(more)
    cast(Any, value["set"]).add(2)
    disk.gate.set()
    back = value_in(path, saver)
    assert (back["tensor"].sum(), back["list"], back["bytes"], back["set"]) == (0, [1], b"a", {1})


def test_restore_waits_for_the_background(tmp_path: Path) -> None:
    saver, disk = gated()
    saver.save(boxed("newest"), tmp_path / "model.ckpt", 1)
    disk.gate.set()
    session = boxed(None)
    saver.restore_latest(session, tmp_path)
    assert box_of(session).value == "newest"


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("end", ["wait", "close"])
def test_an_error_of_the_background_is_raised_at_the_end_once(tmp_path: Path, end: str) -> None:
    saver, disk = gated(FULL)
    saver.save(boxed(1), tmp_path / "model.ckpt", 1)
    disk.gate.set()
    with pytest.raises(CheckpointError, match=r"model\.ckpt-1 .*No space left"):
        getattr(saver, end)()
    saver.close()


def test_an_error_of_the_background_is_raised_by_the_next_save_which_is_written_all_the_same(tmp_path: Path) -> None:
    saver, disk = gated(FULL)
    saver.save(boxed(1), tmp_path / "model.ckpt", 1)
    disk.gate.set()
    with pytest.raises(CheckpointError, match=r"model\.ckpt-1 was not written"):
        saver.save(boxed(2), tmp_path / "model.ckpt", 2)
    saver.close()
    assert restored(tmp_path) == 2


def test_of_two_errors_in_a_row_both_are_reported(tmp_path: Path) -> None:
    saver, disk = gated(FULL)
    saver.save(boxed(1), tmp_path / "model.ckpt", 1)
    disk.gate.set()
    with pytest.raises(CheckpointError, match="of type type") as caught:
        saver.save(boxed(int), tmp_path / "model.ckpt", 2)
    assert "model.ckpt-1 was not written" in caught.value.__notes__[0]
    saver.close()


@pytest.mark.parametrize("is_taken_up", [False, True])
def test_an_interrupt_while_a_write_is_handed_over_writes_it_as_a_whole_or_not_at_all(
    is_taken_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **options: Any) -> Any:
            if is_taken_up:
                super().submit(*arguments, **options).result()
            else:
                handed_over.append((self, arguments))
            raise KeyboardInterrupt

    handed_over: list[Any] = []
    written: list[int] = []
    monkeypatch.setattr(saver_module, "ThreadPoolExecutor", Interrupted)
    writer = saver_module.BackgroundWriter()
    with pytest.raises(KeyboardInterrupt):
        writer.start(lambda: written.append(1))
    for executor, arguments in handed_over:  # the thread comes to it after all
        ThreadPoolExecutor.submit(executor, *arguments).result()
    assert (written, writer.is_busy, writer.wait()) == ([1] if is_taken_up else [], False, None)
    writer.end()


def test_an_error_of_the_background_is_forgotten_by_whom_it_was_raised_to() -> None:
    writer, error = saver_module.BackgroundWriter(), KeyError("of the write")

    def fail() -> None:
        raise error

    writer.start(fail)
    assert writer.wait() is error
    writer.forget(None)
    assert writer.wait() is error
    writer.forget(error)
    assert writer.wait() is None


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_the_thread_of_its_parent(tmp_path: Path) -> None:
    saver, disk = gated()
    saver.save(boxed(1), tmp_path / "model.ckpt", 1)
    worker = os.fork()
    if worker == 0:
        try:
            saver.disk = Disk()
            saver.save(boxed(2), tmp_path / "of the worker" / "model.ckpt", 2)
            saver.close()
        finally:
            os._exit(0)
    os.waitpid(worker, 0)
    disk.gate.set()
    saver.close()
    assert (restored(tmp_path), restored(tmp_path / "of the worker")) == (1, 2)


def test_close_may_be_called_again_and_save_after_it(tmp_path: Path) -> None:
    saver = Saver(async_save=True)
    save_steps(tmp_path, 1, saver=saver)
    saver.close()
    saver.close()
    save_steps(tmp_path, 2, saver=saver)
    saver.close()
    assert steps(tmp_path) == [1, 2]


def test_a_save_looks_at_the_state_only_when_the_one_before_is_written(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Looking(Box):
        def state_dict(self) -> dict[str, Any]:
            seen.append(steps(tmp_path))
            return super().state_dict()

    saver, session = Saver(async_save=True), make_session(box=Looking(torch.zeros(100_000)))
    for step in (1, 2, 3):
        saver.save(session, tmp_path / "model.ckpt", step)
    saver.close()
    assert seen == [[], [1], [1, 2]]


class ReadingDisk(Disk):
    """A disk that records the memory addresses of what is written in one piece of ``nbytes`` bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.read_from: list[int] = []

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        if len(data) == self.nbytes:
            self.read_from.append(np.frombuffer(data, np.uint8).ctypes.data)
        super().write(file, data)


def test_the_memory_of_the_copies_is_reused(tmp_path: Path) -> None:
    saver, disk = Saver(async_save=True), ReadingDisk(4_000_000)
    saver.disk = disk
    tensors = [torch.zeros(1_000_000), torch.zeros(2), torch.ones(1_000_000)]
    for step in (1, 2, 3):
        saver.save(boxed(tensors), tmp_path / "model.ckpt", step)
    saver.close()
    first, second = disk.read_from[:2]
    assert disk.read_from == [first, second] * 3
    assert not {first, second} & {tensor.data_ptr() for tensor in tensors}


@pytest.mark.parametrize("numel", [10, 1000])
def test_the_copies_of_many_tensors_share_one_block_of_memory(numel: int, tmp_path: Path) -> None:
    saver, tensors = Saver(async_save=True), [torch.full((numel,), float(number)) for number in range(50)]
    with FakeDevice() as device:
        for step in (1, 2):
            path = saver.save(boxed(tensors), tmp_path / "model.ckpt", step)
        saver.close()
    assert len(device.allocations) == 1
    assert 50 * 4 * numel <= device.allocations[0] <= 50 * (4 * numel + 64)
    assert [value.tolist() for value in value_in(path)] == [tensor.tolist() for tensor in tensors]
    assert os.path.getsize(f"{path}/state.pt") < 50 * (4 * numel + 300) + 50_000  # each tensor is written on its own


def test_a_block_of_memory_has_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchhooks.device.snapshot._BLOCK", 1000)
    saver = Saver(async_save=True)
    with FakeDevice() as device:
        path = saver.save(boxed([torch.ones(numel) for numel in (100, 100, 100, 1000, 1)]), tmp_path / "model.ckpt", 1)
        saver.close()
    assert device.allocations == [4032, 896, 512]
    assert [value.numel() for value in value_in(path)] == [100, 100, 100, 1000, 1]


def resident_megabytes() -> float:
    text = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", text)
    return int(kilobytes) / 1000


@pytest.mark.slow
def test_one_copy_of_the_state_is_held_until_close(tmp_path: Path) -> None:
    saver, tensors = Saver(async_save=True), [torch.ones(10_000_000) for _ in range(3)]
    before = resident_megabytes()
    for step in (1, 2, 3):
        saver.save(boxed(tensors), tmp_path / "model.ckpt", step)
    saver.wait()
    held = resident_megabytes()
    saver.save(boxed(tensors[:2]), tmp_path / "model.ckpt", 4)
    saver.wait()
    less = resident_megabytes()
    saver.close()
    after = resident_megabytes()
    assert 110 < held - before < 150
    assert 70 < less - before < 110
    assert after - before < 30


def test_the_copies_are_freed_when_close_returns(tmp_path: Path) -> None:
    def tensors() -> int:
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    session, interval = boxed([torch.ones(1000)]), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # the thread is stopped at as many places as possible
    try:
        gc.collect()  # or what earlier tests have left is collected meanwhile
        before = tensors()
        for _ in range(15):
            saver = Saver(async_save=True)
            saver.save(session, tmp_path / "model.ckpt", 1)
            saver.close()
            assert tensors() == before
    finally:
        sys.setswitchinterval(interval)


def test_temporary_tensors_of_a_state_dict_are_freed_while_their_copies_are_written(tmp_path: Path) -> None:
    class Fresh(Box):
        def state_dict(self) -> dict[str, Any]:
            return {"value": torch.ones(30_000_000)}

    class WeighingDisk(Disk):
        def create(self, path: str) -> BinaryIO:
            megabytes.append(resident_megabytes())
            return super().create(path)

    saver, megabytes = Saver(async_save=True), [resident_megabytes()]
    saver.disk = WeighingDisk()
    saver.save(make_session(box=Fresh()), tmp_path / "model.ckpt", 1)
    saver.wait()
    before, writing, *_ = megabytes
    assert 110 < writing - before < 150


STATES: list[Any] = [
    [torch.full((size,), float(size)) for size in (5, 2_500_000, 0, 7)],
    [torch.full((size,), float(-size)) for size in (5, 2_500_000, 0, 7)],
    [
        torch.full((size,), float(size)) for size in (5, 7, 2_500_000, 0, 9)
    ],  # other sizes in these places, and more of them
    [torch.full((size,), float(-size)) for size in (6, 7)],
    [],
    [torch.arange(3 * 2**22 + 1, dtype=torch.int8)],  # not a multiple of the size of a piece
]


def test_every_checkpoint_has_its_own_values_however_the_state_changes(tmp_path: Path) -> None:
    saver = Saver(async_save=True, max_to_keep=None)
    paths = [saver.save(boxed(state), tmp_path / "model.ckpt", step) for step, state in enumerate(STATES)]
    saver.close()
    for path, state in zip(paths, STATES, strict=True):
        back = value_in(path)
        assert [(tensor.dtype, tensor.shape) for tensor in back] == [(tensor.dtype, tensor.shape) for tensor in state]
        assert all(map(torch.equal, back, state))


@pytest.mark.parametrize("async_save", [False, True])
def test_temporary_tensors_of_a_state_dict_are_not_mistaken_for_one_another(tmp_path: Path, async_save: bool) -> None:
    class Fresh(Box):
        def state_dict(self) -> dict[str, Any]:
            return {
                "value": torch.full((100_000,), self.value),
                "conjugate": torch.full((1000,), self.value * 1j).conj(),
            }

    saver, numbers = Saver(async_save=async_save), [float(number) for number in range(10)]
    session = make_session(hooks={str(number): Fresh(number) for number in numbers})
    path = saver.save(session, tmp_path / "model.ckpt", 1)
    saver.close()
    saved = torch.load(f"{path}/state.pt", weights_only=True)
    assert [saved[f"hooks.{number}"]["value"][-1].item() for number in numbers] == numbers
    assert [saved[f"hooks.{number}"]["conjugate"][-1].item() for number in numbers] == [-1j * n for n in numbers]


def test_everything_is_copied_when_the_call_returns(tmp_path: Path) -> None:
    saver, tensor = Saver(async_save=True), torch.zeros(2_000_000)
    for step in range(1, 4):
        tensor.fill_(step)
        path = saver.save(boxed(tensor), tmp_path / "model.ckpt", step)
        tensor[-1_000_000:] = -1
        assert value_in(path, saver).unique().tolist() == [step]


@pytest.mark.parametrize("device", [nullcontext(), FakeDevice()])
def test_conjugates_are_not_mistaken_for_one_another(tmp_path: Path, device: AbstractContextManager[object]) -> None:
    saver, numbers = Saver(async_save=True), [1j * number for number in range(10)]
    with device:
        path = saver.save(boxed([torch.full((9000,), n).conj() for n in numbers]), tmp_path / "model.ckpt", 1)
    assert [tensor[0].item() for tensor in value_in(path, saver)] == [-n for n in numbers]


def test_the_save_after_one_that_was_refused_is_correct(tmp_path: Path) -> None:
    saver, tensor = Saver(async_save=True), torch.zeros(1000)
    for step in (1, 2):
        tensor += 1
        saver.save(boxed(tensor), tmp_path / "model.ckpt", step)
        with pytest.raises(CheckpointError, match="of type type"):
            saver.save(boxed([tensor, int]), tmp_path / "model.ckpt", 9)
    assert value_in(f"{tmp_path}/model.ckpt-2", saver).sum() == 2000


@pytest.mark.parametrize("async_save", [False, True])
def test_the_users_default_device_changes_nothing(tmp_path: Path, async_save: bool) -> None:
    saver, tensor = Saver(async_save=async_save), torch.ones(5)
    with torch.device("meta"):
        path = saver.save(boxed(tensor), tmp_path / "model.ckpt", 1)
        saver.close()
    assert torch.equal(value_in(path), tensor)


def test_memory_allocated_in_inference_mode_is_reused_outside_of_it_and_back(tmp_path: Path) -> None:
    saver, tensor = Saver(async_save=True), torch.zeros(1000)
    for step, mode in enumerate([True, False, True]):
        tensor += 1
        with torch.inference_mode(mode):
            path = saver.save(boxed(tensor), tmp_path / "model.ckpt", step)
        assert value_in(path, saver).sum() == 1000 * (step + 1)


class OrderedDevice(FakeDevice):
    """A device that records when its copies are waited for."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order = order

    def event(self, device: torch.device) -> Any:
        order = self.order

        class Event:
            def wait(self) -> None:
                order.append("the device was waited for")

        order.append("an event was recorded")
        return Event()


def test_the_background_waits_for_copies_from_a_device_before_it_begins_the_file(tmp_path: Path) -> None:
    order: list[str] = []

    class OrderedDisk(Disk):
        def create(self, path: str) -> BinaryIO:
            order.append("a file was begun")
            return super().create(path)

    saver = Saver(async_save=True)
    saver.disk = OrderedDisk()
    with OrderedDevice(order):
        path = saver.save(boxed([torch.ones(2), torch.ones(3)]), tmp_path / "model.ckpt", 1)
        saver.wait()
    assert order[:3] == ["an event was recorded", "the device was waited for", "a file was begun"]
    assert order.count("the device was waited for") == 1
    assert [tensor.sum() for tensor in value_in(path)] == [2, 3]


def test_an_error_of_the_device_is_raised_by_the_next_call(tmp_path: Path) -> None:
    class Broken(FakeDevice):
        def event(self, device: torch.device) -> Any:
            event = super().event(device)
            vars(event)["wait"] = lambda: 1 // 0
            return event

    saver = Saver(async_save=True)
    with Broken():
        saver.save(boxed(torch.ones(2)), tmp_path / "model.ckpt", 1)
        with pytest.raises(ZeroDivisionError):
            saver.close()
    assert not latest_checkpoint(tmp_path)


def test_two_savers_may_write_to_one_folder_at_once(tmp_path: Path) -> None:
    savers = {name: Saver(async_save=True, max_to_keep=2) for name in ("model.ckpt", "best")}
    for step in range(5):
        for name, saver in savers.items():
            save_steps(tmp_path, step, saver=saver, prefix=name)
    for saver in savers.values():
        saver.close()
    found = [Path(found.path).name for found in list_checkpoints(tmp_path)]
    assert sorted(found) == ["best-3", "best-4", "model.ckpt-3", "model.ckpt-4"]


# A disk that fails.


class Crash(BaseException):
    """The process is killed here."""


class FaultyDisk(Disk):
    """A disk whose operation number ``fault_at`` fails with ``error``.

    If that is a write, half of its bytes are written. After a :class:`Crash` every operation fails. To save time,
    nothing is synced.
    """

    def __init__(self, fault_at: int, error: BaseException) -> None:
        self.fault_at = fault_at
        self.error = error
        self.count = 0

    def _next(self) -> None:
        self.count += 1
        if self.count == self.fault_at or (self.count > self.fault_at and isinstance(self.error, Crash)):
            raise self.error

    def create_folder(self, path: str) -> None:
        self._next()
        super().create_folder(path)

    def create(self, path: str) -> BinaryIO:
        self._next()
        return super().create(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        try:
            self._next()
        except BaseException:
            if self.count == self.fault_at:
                file.write(data[: len(data) // 2])
            raise
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self._next()
        file.flush()

    def rename(self, path: str, new_path: str) -> None:
        self._next()
        super().rename(path, new_path)

    def sync_folder(self, path: str) -> None:
        self._next()

    def remove(self, path: str) -> None:
        for name in sorted(os.listdir(path)) if os.path.isdir(path) else []:  # a kill may leave a part of a folder
            self._next()
            os.remove(os.path.join(path, name))
        self._next()
        super().remove(path)


class History:
    """The checkpoints of a training run on a disk that failed. Each state is its number, in several tensors."""

    def __init__(self, folder: Path, disk: FaultyDisk, saved: list[int], max_to_keep: int) -> None:
        self.folder, self.max_to_keep = folder, max_to_keep
        self.disk = disk
        self.reported = 0
        saver = Saver(max_to_keep)
        saver.disk = disk
        for number, step in enumerate(saved, start=1):
            try:
                saver.save(self.state(number), folder / "model.ckpt", step)
                self.reported = number
            except CheckpointError:
                continue
            except Crash:
                break

    @staticmethod
    def state(number: int) -> Session:
        return boxed([torch.full((size,), number) for size in (1, 30, 200)])

    def found(self) -> int:
        """Return the number of the state that a new process restores, 0 if there is none."""
        session = boxed(None)
        if Saver().restore_latest(session, self.folder) is None:
            return 0
        (number,) = {int(number) for tensor in box_of(session).value for number in tensor}
        return number

    def save_again(self) -> list[str]:
        """Save once more in a new process, and return the names of all files after that."""
        Saver(self.max_to_keep).save(self.state(1000), self.folder / "model.ckpt", 1000)
        return names(self.folder)


def check(history: History) -> None:
    assert history.found() >= history.reported
    left = history.save_again()
    assert history.found() == 1000
    assert len(left) <= history.max_to_keep, "there are checkpoints and nothing else"


FAULTS = {"kill": Crash(), "full": FULL, "read-only": OSError(errno.EROFS, "Read-only file system")}


@pytest.mark.not_measured
@pytest.mark.parametrize("fault", ["kill", pytest.param("full", marks=pytest.mark.exhaustive)])
def test_nothing_that_was_reported_is_lost_whichever_operation_fails(tmp_path: Path, fault: str, lines: Lines) -> None:
    saved = [1, 2, 1]
    operations = History(tmp_path / "all", FaultyDisk(-1, FULL), saved, max_to_keep=1).disk.count
    assert operations > 30
    for place in range(1, operations + 1):
        check(History(tmp_path / str(place), FaultyDisk(place, FAULTS[fault]), saved, max_to_keep=1))


@pytest.mark.not_measured
@given(
    saved=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    max_to_keep=st.integers(1, 3),
    place=st.floats(0, 1),
    fault=st.sampled_from(sorted(FAULTS)),
)
def test_nothing_that_was_reported_is_lost_whatever_was_saved_before(
    saved: list[int], max_to_keep: int, place: float, fault: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        operations = History(Path(folder) / "all", FaultyDisk(-1, FULL), saved, max_to_keep).disk.count
        disk = FaultyDisk(1 + round(place * (operations - 1)), FAULTS[fault])
        check(History(Path(folder) / "run", disk, saved, max_to_keep))


class Diary(Disk):
    """A disk that records its operations; several writes in a row are one."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def create_folder(self, path: str) -> None:
        self.entries.append("create a folder")
        super().create_folder(path)

    def create(self, path: str) -> BinaryIO:
        self.entries.append(f"create {Path(path).name}")
        return super().create(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        if self.entries[-1] != "write":
            self.entries.append("write")
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self.entries.append("sync")
        super().sync(file)

    def rename(self, path: str, new_path: str) -> None:
        self.entries.append(f"rename to {shown_name(new_path)}")
        super().rename(path, new_path)

    def sync_folder(self, path: str) -> None:
        self.entries.append(f"sync the folder {shown_name(path)}")
        super().sync_folder(path)

    def remove(self, path: str) -> None:
        self.entries.append(f"remove {shown_name(path)}")
        super().remove(path)


def test_each_part_is_on_disk_before_the_next_is_begun(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    saver, diary = Saver(1), Diary()
    saver.disk = diary
    save_steps(tmp_path, 2, saver=saver)
    assert diary.entries == [
        "create a folder",
        *("create state.pt", "write", "sync"),
        *("create manifest.json", "write", "sync"),
        "sync the folder .model.ckpt-2.tmp",
        *("rename to model.ckpt-2", f"sync the folder {tmp_path.name}"),
        *("rename to .model.ckpt-1.tmp", "remove .model.ckpt-1.tmp"),
    ]
    diary.entries.clear()
    save_steps(tmp_path, 2, saver=saver)
    assert diary.entries[7:] == [
        "sync the folder .model.ckpt-2.tmp",
        *("rename to .model.ckpt-2.old", "rename to model.ckpt-2", f"sync the folder {tmp_path.name}"),
        "remove .model.ckpt-2.old",
    ]


def shown_name(path: str) -> str:
    """Return the name of a file or folder, without the random part of a temporary one."""
    return re.sub(rf"\.{process_name(os.getpid())}-[0-9a-f]{{8}}\.", ".", Path(path).name)


def test_an_interrupt_in_a_write_that_torch_called_is_raised_as_it_is(tmp_path: Path) -> None:
    saver = Saver()
    saver.disk = FaultyDisk(4, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        save_steps(tmp_path, 1, saver=saver)
    assert names(tmp_path) == []


def test_nothing_is_written_after_an_error(tmp_path: Path) -> None:
    saver, disk = Saver(), FaultyDisk(4, FULL)
    saver.disk = disk
    with pytest.raises(CheckpointError):
        save_steps(tmp_path, 1, saver=saver)
    assert disk.count == 6, "the failed write, and the removal of the file and of the folder"


def contents(path: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(path).iterdir()}


def test_a_failed_save_leaves_no_temporary_file_and_the_older_one_as_it_was(tmp_path: Path) -> None:
    def save_twice(folder: Path, place: int) -> int:
        (path,) = save_steps(folder, 1)
        before = contents(path)
        saver, disk = Saver(), FaultyDisk(place, FULL)
        saver.disk = disk
        try:
            save_steps(folder, 2, saver=saver)
        finally:
            assert contents(path) == before
            assert [name for name in names(folder) if name.endswith("tmp")] == []
        return disk.count

    message = r"model\.ckpt-2 .*No space left"
    operations = save_twice(tmp_path / "all", -1)  # their number depends on the version of torch
    assert operations > 8
    for place in range(1, operations + 1):
        with pytest.raises(CheckpointError, match=message):
            save_twice(tmp_path / str(place), place)


def test_an_old_one_that_cannot_be_removed_is_named_and_removed_later(tmp_path: Path, lines: Lines) -> None:
    class Sticky(Disk):
        def rename(self, path: str, new_path: str) -> None:
            if path.endswith("-1") and not lines:
                raise PermissionError(errno.EACCES, "Permission denied")
            super().rename(path, new_path)

    saver = Saver(1)
    saver.disk = Sticky()
    save_steps(tmp_path, 1, 2, saver=saver)
    assert f"{tmp_path}/model.ckpt-1 could not be removed" in warnings_in(lines)
    save_steps(tmp_path, 3, saver=saver)
    assert names(tmp_path) == ["model.ckpt-3"]


def test_a_checkpoint_is_written_though_the_one_of_the_same_step_cannot_be_removed(
    tmp_path: Path, lines: Lines
) -> None:
    class Sticky(Disk):
        def remove(self, path: str) -> None:
            if path.endswith(".old"):
                raise PermissionError(errno.EACCES, "Permission denied")
            super().remove(path)

    saver = Saver()
    saver.disk = Sticky()
    save_steps(tmp_path, 1, 1, saver=saver)
    assert "could not be removed" in warnings_in(lines)
    assert [checkpoint.order for checkpoint in list_checkpoints(tmp_path)] == [2]


def test_a_file_where_the_folder_should_be_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(CheckpointError, match="A file has the name"):
        save_steps(tmp_path / "run", 1)


def test_a_folder_where_the_checkpoint_should_be_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt-1" / "theirs").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="A folder has the name"):
        save_steps(tmp_path, 1)
    assert names(tmp_path) == ["model.ckpt-1"]


def test_a_folder_that_vanished_is_an_error_and_not_created_again(tmp_path: Path) -> None:
    saver, folder = Saver(), tmp_path / "run"
    save_steps(folder, 1, saver=saver)
    folder.rename(tmp_path / "elsewhere")
    for step in (2, 3):
        with pytest.raises(CheckpointError, match="The folder is gone, with the checkpoints in it"):
            save_steps(folder, step, saver=saver)
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_an_error_that_says_so(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="Make the folder writable"):
            save_steps(tmp_path, 2)
        assert restored(tmp_path) == 1
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_real_limit_is_an_error_that_leaves_the_older_one_and_nothing_else(tmp_path: Path, async_save: bool) -> None:
    saver = Saver(async_save=async_save)
    save_steps(tmp_path, 1, saver=saver)
    saver.wait()

    def save() -> None:
        with no_space_after(300_000):
            saver.save(boxed(torch.zeros(100_000)), tmp_path / "model.ckpt", 2)
            saver.close()

    with pytest.raises(CheckpointError, match=r"File too large\. Raise the limit"):
        save()
    assert (names(tmp_path), restored(tmp_path)) == (["model.ckpt-1"], 1)


# Arguments.


@pytest.mark.parametrize("number", [-1, 2.5, True, "ten"])
def test_refuses_an_invalid_number_of_checkpoints(number: Any) -> None:
    with pytest.raises(ValueError, match=f"max_to_keep={number!r}: .* whole"):
        Saver(number)


@pytest.mark.parametrize("hours", [0, -1, float("nan"), float("inf"), "soon"])
def test_refuses_an_invalid_number_of_hours(hours: Any) -> None:
    with pytest.raises(ValueError, match=f"keep_checkpoint_every_n_hours={hours!r}"):
        Saver(keep_checkpoint_every_n_hours=hours)


@pytest.mark.parametrize("step", [-1, 2.5, True, "ten", None])
def test_refuses_an_invalid_step(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ValueError, match=f"global_step={step!r}: .* whole"):
        Saver().save(boxed(1), tmp_path / "model.ckpt", step)


@pytest.mark.parametrize("path", ["", "run/", ".hidden"])
def test_refuses_a_path_without_a_name(path: str) -> None:
    with pytest.raises(ValueError, match=r"must end in a name"):
        Saver().save(boxed(1), path, 1)
