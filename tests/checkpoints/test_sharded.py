"""Sharded checkpoints in one process, whose group has no other rank, and the command that reads checkpoints."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed
from support.dtensors import fully_shard
from support.schemas import answer

import torchhooks.checkpoints.saving
from torchhooks import (
    CheckpointError,
    CheckpointSaverHook,
    DamagedCheckpointError,
    EvaluationHook,
    MonitoredLoop,
    Saver,
    Session,
    SessionRunArgs,
    SessionRunHook,
    StopAtStepHook,
    grad_norm,
    list_checkpoints,
    load_weights,
)
from torchhooks.__main__ import main
from torchhooks.checkpoints.contents import Gradients, belongs_to_rank, gradients_to_reduce
from torchhooks.checkpoints.folder import Files, encoded, file_sums, read_manifest, verify
from torchhooks.checkpoints.modules import renamed
from torchhooks.checkpoints.restoring import load_gradients
from torchhooks.common.files import Disk
from torchhooks.fetches.names import canonical
from torchhooks.ranks.ranks import is_sharded

distributed: Any = torch.distributed


@pytest.fixture(autouse=True)
def _group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def make_session(number: float, shards: bool = True, **arguments: Any) -> Session:
    """Return a session with a model that is filled with ``number``, and an optimizer that has made a step."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, number)
    if shards:
        model = fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    if number:
        (model(torch.arange(8.0).reshape(4, 2)) * torch.arange(3.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    session = Session(model, optimizer, **arguments)
    session.global_step = int(number)
    return session


def contents(session: Session) -> dict[str, Any]:
    """Return the whole tensors of a session as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        value = value.full_tensor() if is_sharded(value) else value
        return value.tolist() if isinstance(value, torch.Tensor) else value

    assert session.model is not None
    assert session.optimizer is not None
    return {
        "model": plain(dict(session.model.state_dict())),
        "optimizer": plain(session.optimizer.state_dict()["state"]),
    }


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("from_shards", [True, False])
@pytest.mark.parametrize("to_shards", [True, False])
def test_a_state_is_restored_sharded_or_whole(
    tmp_path: Path, from_shards: bool, to_shards: bool, async_save: bool
) -> None:
    before = make_session(3, from_shards)
    saver = Saver(async_save=async_save)
    path = saver.save(before, tmp_path / "model.ckpt", 3)
    saver.close()
    assert os.path.exists(f"{path}/.metadata") == from_shards
    after = make_session(0, to_shards)
    assert Saver().restore_latest(after, tmp_path) == path
    assert contents(after) == contents(before)
    assert after.global_step == 3
    assert contents(after)["optimizer"]["0"]["step"] == 1


@pytest.mark.parametrize("from_shards", [True, False])
@pytest.mark.parametrize("to_shards", [True, False])
def test_weights_are_loaded_sharded_or_whole(tmp_path: Path, from_shards: bool, to_shards: bool) -> None:
    before, after = make_session(3, from_shards), make_session(0, to_shards)
    path = Saver().save(before, tmp_path / "model.ckpt", 3)
    assert after.model is not None
    for given in (path, tmp_path):
        load_weights(given, after.model)
        assert contents(after)["model"] == contents(before)["model"]


def train(
    folder: Path,
    last_step: int,
    reduces: tuple[str, ...],
    shards: bool = True,
    async_save: bool = False,
    fails_at: int | None = None,
) -> Any:
    """Make a step of the optimizer after each three runs, and return the tensors of the model.

    Args:
        folder: the folder of checkpoints, one after each run.
        last_step: the run after which to stop.
        reduces: for each of the three runs, whether its gradients are reduced over the ranks: ``"yes"``, ``"no"``, or
            ``"in part"``.
        shards: whether the model has DTensors.
        async_save: whether a thread writes the checkpoints.
        fails_at: the batch whose step raises.
    """
    if shards and torch.__version__ < "2.8":  # compared as versions
        pytest.skip("FSDP2 of torch 2.7 cannot replicate shards on a CPU: gloo has no average")
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    if shards:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicates", "shards"))
        model = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: int) -> None:
        if batch == fails_at:
            raise ZeroDivisionError
        if shards:
            model.set_requires_gradient_sync(reduces[batch % 3] != "no")
            model.set_requires_all_reduce(reduces[batch % 3] == "yes")
        model(torch.full((2, 2), float(batch % 5))).square().mean().backward()
        if batch % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    hooks = [
        CheckpointSaverHook(folder, save_steps=1, saver=Saver(async_save=async_save)),
        StopAtStepHook(last_step=last_step),
    ]
    with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=folder) as loop:
        for batch in loop.until_stop(range(20)):
            loop.run(batch)
    return contents(Session(model, optimizer))["model"]


@pytest.mark.parametrize("async_save", [False, True])
def test_an_accumulation_of_shards_continues_in_the_next_process(tmp_path: Path, async_save: bool) -> None:
    reduces = ("yes", "yes", "yes")
    whole = train(tmp_path / "whole", 9, reduces)
    for stop in (1, 2, 3, 5, 6, 7, 9):
        resumed = train(tmp_path / "resumed", stop, reduces, async_save=async_save)
    assert resumed == whole


@pytest.mark.parametrize(
    ("reduces", "saved", "async_save"),
    [
        (("no", "no", "yes"), [0, 3, 6, 9], True),
        # What is reduced can be saved in the middle. The newest five are kept.
        (("yes", "no", "yes"), [3, 4, 6, 7, 9], False),
        (("in part", "no", "yes"), [0, 3, 6, 9], False),
    ],
)
def test_a_save_waits_until_gradients_are_reduced(
    tmp_path: Path, lines: list[tuple[str, str]], reduces: tuple[str, ...], saved: list[int], async_save: bool
) -> None:
    whole = train(tmp_path / "whole", 9, reduces)
    assert [each.step for each in list_checkpoints(tmp_path / "whole")] == saved
    (line,) = [f"{level} {text}" for level, text in lines if "waits for the next" in text]
    assert line.startswith("INFO the checkpoint of step ")
    assert not [text for level, text in lines if level == "WARNING"]
    for fails_at in (1, 4, 8):
        with pytest.raises(ZeroDivisionError):
            train(tmp_path / "resumed", 9, reduces, async_save=async_save, fails_at=fails_at)
    assert train(tmp_path / "resumed", 9, reduces, async_save=async_save) == whole


def test_a_stop_before_gradients_are_reduced_is_saved_without_them_and_says_so(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    train(tmp_path, 5, ("no", "no", "yes"))
    assert [each.step for each in list_checkpoints(tmp_path)] == [0, 3, 5]
    (warning,) = [text for level, text in lines if level == "WARNING"]
    assert warning.startswith("the checkpoint of step 5 has no gradients that FSDP2 has not reduced over the ranks yet")


def test_a_save_does_not_wait_for_gradients_that_a_step_of_the_optimizer_leaves_unreduced(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    train(tmp_path, 9, ("no", "no", "no"))
    assert [each.step for each in list_checkpoints(tmp_path)] == [0, 3, 6, 9]
    assert len([text for level, text in lines if level == "WARNING"]) == 1


def test_an_accumulation_continues_in_a_model_that_is_sharded_or_no_longer_is(tmp_path: Path) -> None:
    reduces = ("yes", "yes", "yes")
    whole = train(tmp_path / "whole", 9, reduces, shards=False)
    for stop, shards in [(1, True), (3, False), (4, True), (6, False), (9, True)]:
        resumed = train(tmp_path / "resumed", stop, reduces, shards)
    assert resumed == whole


def test_gradients_that_have_not_been_reduced_are_dropped_by_a_restore(tmp_path: Path) -> None:
    session = make_session(1)
    model: Any = session.model
    session.gradients = Gradients(session.optimizer)  # type: ignore[arg-type]
    path = Saver().save(session, tmp_path / "model.ckpt", 1)
    model.set_requires_gradient_sync(False)
    model(torch.ones(4, 2)).sum().backward()
    assert gradients_to_reduce(session)
    Saver().restore(session, path)
    assert not gradients_to_reduce(session)
    assert session.gradients.split() == ({}, {})


def test_gradients_that_a_model_with_dtensors_has_no_place_for_are_dropped_with_a_warning(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    model = torch.nn.Linear(1, 1)
    model.weight = torch.nn.Parameter(distributed.tensor.distribute_tensor(model.weight.detach(), mesh))
    session = Session(model, torch.optim.SGD(model.parameters()))
    session.gradients = Gradients(session.optimizer)  # type: ignore[arg-type]
    load_gradients(session, {"gradients": {"0": torch.ones(1, 1), "1": torch.ones(1)}})
    assert model.weight.grad is None
    assert model.bias.grad is not None
    assert lines == [
        ("WARNING", "gradients that had accumulated in a model that was sharded in another way are dropped")
    ]


def test_an_evaluation_leaves_the_parameters_in_their_shards(tmp_path: Path) -> None:
    session = make_session(1)
    model, optimizer = session.model, session.optimizer
    assert model is not None
    assert optimizer is not None
    norms: list[Any] = []

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()

    def evaluate(model: Any) -> float:
        return float(model(torch.ones(4, 2)).sum())

    class Norms(SessionRunHook):
        def before_run(self, run_context: Any) -> SessionRunArgs:
            return SessionRunArgs([evaluation["evaluate"], grad_norm()])

        def after_run(self, run_context: Any, run_values: Any) -> None:
            norms.append(run_values.results[1])

    evaluation = EvaluationHook(evaluate, every_n_steps=1)
    hooks = [evaluation, Norms(), CheckpointSaverHook(tmp_path, save_steps=1)]
    with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        loop.run()
    assert all(map(is_sharded, model.parameters()))
    assert norms[0] is not None
    assert [each.step for each in list_checkpoints(tmp_path)] == [0, 1]


def test_a_model_with_whole_parameters_after_a_forward_pass_is_saved_and_restored_in_shards(tmp_path: Path) -> None:
    before = make_session(3)
    assert before.model is not None
    before.model(torch.ones(4, 2))
    assert not any(map(is_sharded, before.model.parameters()))
    path = Saver().save(before, tmp_path / "model.ckpt", 3)
    after = make_session(0)
    assert after.model is not None
    after.model(torch.ones(4, 2))
    Saver().restore(after, path)
    assert contents(after) == contents(before)


def test_an_optimizer_without_a_state_is_not_stepped(tmp_path: Path) -> None:
    session = make_session(0)
    assert session.optimizer is not None
    Saver().save(session, tmp_path / "model.ckpt", 0)
    assert not session.optimizer.state
    after = make_session(3)
    Saver().restore_latest(after, tmp_path)
    assert not contents(after)["optimizer"]


def test_a_sharded_checkpoint_replaces_one_of_the_same_step(tmp_path: Path) -> None:
    for number, shards in [(1, True), (2, True), (3, False), (4, True)]:
        Saver().save(make_session(number, shards), tmp_path / "model.ckpt", 7)
        assert os.listdir(tmp_path) == ["model.ckpt-7"]
        after = make_session(0, shards)
        Saver().restore_latest(after, tmp_path)
        assert after.global_step == number


def test_what_a_kill_left_is_taken_back_or_removed(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    Saver().save(make_session(5), tmp_path / "model.ckpt", 5)
    (tmp_path / "model.ckpt-5").rename(tmp_path / ".model.ckpt-5.elsewhere-1-2-01234567.old")
    (tmp_path / ".model.ckpt-6.elsewhere-1-2-01234567.tmp").mkdir()
    after = make_session(0)
    saver = Saver()
    assert saver.restore_latest(after, tmp_path) == str(tmp_path / "model.ckpt-5")
    (tmp_path / ".model.ckpt-5.elsewhere-1-2-01234567.old").mkdir()
    (tmp_path / ".model.ckpt-5.elsewhere-1-2-11234567.old").touch()
    saver.save(after, tmp_path / "model.ckpt", 6)
    assert sorted(os.listdir(tmp_path)) == ["model.ckpt-5", "model.ckpt-6"]
    assert lines == [
        ("WARNING", f"removed {tmp_path}/.model.ckpt-6.elsewhere-1-2-01234567.tmp, left by a killed process"),
    ]


class NoSpaceAt(Disk):
    def __init__(self, name: str) -> None:
        self._name = name

    def create(self, path: str) -> BinaryIO:
        if os.path.basename(path) == self._name:
            raise OSError(28, "No space left on device")
        return super().create(path)

    def rename(self, path: str, new_path: str) -> None:
        if os.path.basename(new_path) == self._name:
            raise OSError(28, "No space left on device")
        super().rename(path, new_path)


@pytest.mark.parametrize("name", ["state.pt", "manifest.json", "model.ckpt-5"])
def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, name: str) -> None:
    Saver().save(make_session(5), tmp_path / "model.ckpt", 5)
    saver = Saver()
    saver.disk = NoSpaceAt(name)
    with pytest.raises(CheckpointError, match=r"model\.ckpt-5 .*No space left"):
        saver.save(make_session(6), tmp_path / "model.ckpt", 5)
    saver.disk = Disk()
    after = make_session(0)
    Saver().restore_latest(after, tmp_path)
    assert after.global_step == 5


def test_a_folder_that_the_ranks_do_not_share_is_an_error_of_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = torchhooks.checkpoints.saving.write
    elsewhere = {"__1_0.distcp": (100, 0)}  # which rank 1 has written on its own machine
    monkeypatch.setattr(torchhooks.checkpoints.saving, "write", lambda *args: write(*args) | elsewhere)
    monkeypatch.setattr(torchhooks.checkpoints.saving, "_VISIBLE_SECS", 0.2)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp cannot be seen here"):
        Saver().save(make_session(5), tmp_path / "model.ckpt", 5)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(("model", ".model"))]


@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp", "state.pt", ".metadata"])
def test_a_damaged_folder_is_skipped(tmp_path: Path, name: str, lines: list[tuple[str, str]]) -> None:
    for step in (1, 2):
        Saver().save(make_session(step), tmp_path / "model.ckpt", step)
    file = tmp_path / "model.ckpt-2" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    after = make_session(0)
    assert Saver().restore_latest(after, tmp_path) == str(tmp_path / "model.ckpt-1")
    assert name in lines[0][1]


def add_to_manifest(path: str, files: Files) -> None:
    """Have the manifest of a checkpoint name ``files`` too."""
    manifest = read_manifest(path)
    del manifest["crc32"]
    manifest["files"] |= files
    Path(path, "manifest.json").write_bytes(encoded(manifest))


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    path = Saver().save(make_session(1), tmp_path / "model.ckpt", 1)
    add_to_manifest(path, {"../other": (0, 0)})
    with pytest.raises(DamagedCheckpointError, match="other cannot be read"):
        verify(path)


def test_metadata_that_could_run_code_is_refused(tmp_path: Path) -> None:
    path = Saver().save(make_session(1), tmp_path / "model.ckpt", 1)
    Path(path, ".metadata").write_bytes(pickle.dumps(os.getcwd))
    add_to_manifest(path, file_sums(path, [".metadata"]))
    with pytest.raises(CheckpointError, match="it could run code, so it is not loaded"):
        Saver().restore(make_session(0), path)


def test_metadata_that_another_python_wrote_are_read(tmp_path: Path) -> None:
    path = Saver().save(make_session(1), tmp_path / "model.ckpt", 1)
    metadata: Any = pickle.loads(Path(path, ".metadata").read_bytes())
    # Of Python 3.13, in a protocol without frames, whose lengths would change.
    pickled = pickle.dumps(metadata, protocol=2).replace(b"cpathlib\n", b"cpathlib._local\n")
    assert b"pathlib._local" in pickled
    Path(path, ".metadata").write_bytes(pickled)
    add_to_manifest(path, file_sums(path, [".metadata"]))
    session = make_session(0)
    Saver().restore(session, path)
    assert session.global_step == 1


def test_tensors_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    theirs = Saver().save(make_session(1), tmp_path / "theirs" / "model.ckpt", 1)
    path = Saver().save(make_session(2), tmp_path / "run" / "model.ckpt", 1)
    metadata: Any = pickle.loads(Path(path, ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        stored.relative_path = os.path.relpath(os.path.join(theirs, stored.relative_path), path)
    Path(path, ".metadata").write_bytes(pickle.dumps(metadata))
    add_to_manifest(path, file_sums(path, [".metadata"]))
    with pytest.raises(DamagedCheckpointError, match="outside of the folder"):
        Saver().restore(make_session(0), path)


def test_a_save_replaces_a_link_to_a_folder_and_leaves_the_folder(tmp_path: Path) -> None:
    theirs = Saver().save(make_session(1), tmp_path / "theirs" / "model.ckpt", 1)
    before = sorted(os.listdir(theirs))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.ckpt-1").symlink_to(theirs)
    path = Saver().save(make_session(2), tmp_path / "run" / "model.ckpt", 1)
    assert path is not None
    assert not os.path.islink(path)
    assert os.listdir(tmp_path / "run") == ["model.ckpt-1"]
    assert sorted(os.listdir(theirs)) == before


def test_a_refusal_writes_no_folder(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    Saver().save(make_session(1), tmp_path / "model.ckpt", 1, refusals=[lambda: None, lambda: "bad"])
    assert lines == [("WARNING", "no checkpoint of step 1: bad")]
    assert list_checkpoints(tmp_path) == []


def test_a_background_save_has_the_values_of_its_time(tmp_path: Path) -> None:
    session, saver, disk = make_session(3), Saver(async_save=True), Waits()
    saver.disk = disk
    before = contents(session)
    saver.save(session, tmp_path / "model.ckpt", 3)
    with torch.no_grad():
        assert session.model is not None
        for parameter in session.model.parameters():
            parameter.fill_(7)
    disk.may_write.set()
    saver.close()
    after = make_session(0)
    Saver().restore_latest(after, tmp_path)
    assert contents(after) == before


class Waits(Disk):
    def __init__(self) -> None:
        self.may_write = threading.Event()

    def create(self, path: str) -> BinaryIO:
        assert self.may_write.wait(60)
        return super().create(path)


def test_another_shape_is_a_misfit(tmp_path: Path) -> None:
    Saver().save(make_session(1), tmp_path / "model.ckpt", 1)
    other = Session(fully_shard(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4))))
    with pytest.raises(CheckpointError, match=r"'0\.weight' \(4, 2\) instead of \(3, 2\)"):
        Saver().restore_latest(other, tmp_path)


def test_another_module_in_the_state_is_sharded_too(tmp_path: Path) -> None:
    def make(number: float) -> Session:
        average: Any = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(average.weight, number)
        return make_session(number, state={"average": fully_shard(average)})

    Saver().save(make(2), tmp_path / "model.ckpt", 2)
    after = make(0)
    Saver().restore_latest(after, tmp_path)
    assert after.state["average"].state_dict()["weight"].full_tensor().tolist() == [[2, 2]]


def test_a_sharded_module_belongs_to_all_ranks() -> None:
    module = torch.nn.Linear(2, 1)
    module.per_rank = True  # type: ignore[assignment]
    assert belongs_to_rank("it", module)
    assert not belongs_to_rank("it", fully_shard(module))


def test_what_wraps_the_model_or_the_optimizer_belongs_to_all_ranks_and_a_loader_to_one() -> None:
    assert [belongs_to_rank(name, [1]) for name in ("model", "optimizer", "loader")] == [False, False, True]


class Averages:
    """Averages of a sharded model: of its DTensors, or of this rank's shards."""

    def __init__(self, model: Any, to_local: bool) -> None:
        self._values = {name: value.to_local() if to_local else value for name, value in model.state_dict().items()}
        self.per_rank = to_local

    def state_dict(self) -> dict[str, Any]:
        return self._values

    def load_state_dict(self, state: Any) -> None:
        self._values = dict(state)


def test_dtensors_of_an_object_are_refused_with_the_way_out_which_works(tmp_path: Path) -> None:
    model: Any = fully_shard(torch.nn.Linear(2, 1))
    session = make_session(2, state={"averages": Averages(model, to_local=False)})
    with pytest.raises(CheckpointError, match=r"averages\['weight'\] is a DTensor: return its to_local\(\), and give"):
        Saver().save(session, tmp_path / "model.ckpt", 2)
    Saver().save(make_session(2, state={"averages": Averages(model, to_local=True)}), tmp_path / "model.ckpt", 2)
    other: Any = fully_shard(torch.nn.Linear(2, 1))
    after = make_session(0, state={"averages": Averages(other, to_local=True)})
    Saver().restore_latest(after, tmp_path)
    assert torch.equal(after.state["averages"].state_dict()["weight"], model.weight.to_local())


# -- names ----------------------------------------------------------------------------------------------------------


def test_names_are_those_of_the_bare_model() -> None:
    assert canonical("module._orig_mod.layers._orig_mod.0.weight") == "layers.0.weight"
    assert canonical("layers.module.weight") == "layers.module.weight"


def test_a_state_is_renamed_for_a_wrapped_model_and_back() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    bare = torch.nn.Linear(1, 1)
    wrapped = Wrapper(bare)
    assert list(renamed(wrapped, dict(bare.state_dict()))) == ["module.weight", "module.bias"]
    assert list(renamed(bare, dict(wrapped.state_dict()))) == ["weight", "bias"]
    both = {"weight": 1, "module.weight": 2}
    assert renamed(bare, both) == both


# -- the command ----------------------------------------------------------------------------------------------------


def test_an_export_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Saver().save(make_session(1, False), tmp_path / "run" / "model.ckpt", 1)
    taken = tmp_path / "weights.pt"
    taken.mkdir()
    assert main(["checkpoints", str(tmp_path / "run"), "--export", str(taken)]) == 1
    assert "Is a directory" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "weights.pt"]


@pytest.mark.parametrize("shards", [True, False])
def test_the_command_lists_and_exports(tmp_path: Path, shards: bool, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        Saver(keep_checkpoint_every_n_hours=1).save(make_session(step, shards), tmp_path / "model.ckpt", step)
    weights = tmp_path / "weights.pt"
    assert main(["checkpoints", str(tmp_path), "--export", str(weights)]) == 0
    first, second, exported = capsys.readouterr().out.splitlines()
    assert first.startswith("model.ckpt-1  step 1  ")
    assert first.endswith("  intact, kept for good")
    assert second.endswith("  intact")
    assert exported == f"{weights}: the model of {tmp_path}/model.ckpt-2"
    bare: Any = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    bare.load_state_dict(torch.load(weights, weights_only=True))
    assert bare[0].weight.tolist() == [[2, 2]] * 3
    assert not (tmp_path / "weights.pt.tmp").exists()
    assert main(["checkpoints", str(tmp_path), "--export", str(tmp_path / "gone" / "weights.pt")]) == 1
    assert capsys.readouterr().err == f"{tmp_path}/gone does not exist\n"
    assert main(["checkpoints", str(tmp_path), "--export", str(weights), "--json"]) == 0
    said = answer("checkpoints", capsys.readouterr().out)
    assert said["exported"] == str(weights)
    assert [(each["step"], each["kept"], each["damage"]) for each in said["checkpoints"]] == [
        (1, True, None),
        (2, False, None),
    ]


@pytest.mark.parametrize("shards", [True, False])
def test_the_command_takes_one_checkpoint(tmp_path: Path, shards: bool, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        path = Saver().save(make_session(step, shards), tmp_path / "model.ckpt", step)
    assert main(["checkpoints", f"{path}/"]) == 0
    assert capsys.readouterr().out.startswith("model.ckpt-2  step 2")


def test_the_command_fails_for_a_damaged_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[tuple[str, str]]
) -> None:
    for step in (1, 2):
        path = Saver().save(make_session(step), tmp_path / "model.ckpt", step)
    data = Path(path, "state.pt").read_bytes()
    Path(path, "state.pt").write_bytes(data[:-1] + b"x")
    assert main(["checkpoints", str(tmp_path)]) == 1
    assert "model.ckpt-2 is damaged" in capsys.readouterr().out
    assert main(["checkpoints", str(tmp_path), "--json"]) == 1
    intact, damaged = answer("checkpoints", capsys.readouterr().out)["checkpoints"]
    assert (intact["damage"], "model.ckpt-2 is damaged" in damaged["damage"]) == (None, True)
    Path(path, "state.pt").write_bytes(data[:-1])
    assert main(["checkpoints", str(tmp_path)]) == 1
    assert "state.pt is cut short" in lines[0][1]
    capsys.readouterr()
    assert main(["checkpoints", str(tmp_path), "--json"]) == 1
    said = answer("checkpoints", capsys.readouterr().out)
    assert ([each["step"] for each in said["checkpoints"]], said["unreadable"]) == ([1], [path])


def test_the_command_fails_where_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{tmp_path} has no undamaged checkpoint\n"
    assert main(["checkpoints", str(tmp_path), "--json"]) == 1
    assert answer("checkpoints", capsys.readouterr().out) == {"checkpoints": [], "unreadable": [], "exported": None}
    assert main(["checkpoints", str(tmp_path), "--json", "--export", str(tmp_path / "weights.pt")]) == 1
    assert answer("checkpoints", capsys.readouterr().out) == {"error": f"{tmp_path} has no undamaged checkpoint"}


def test_the_command_fails_where_there_is_no_such_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(tmp_path / "misspelled")]) == 1
    assert capsys.readouterr().err == f"{tmp_path}/misspelled does not exist\n"


def test_the_command_exports_no_checkpoint_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Saver().save(Session(), tmp_path / "model.ckpt", 1)
    assert main(["checkpoints", str(tmp_path), "--export", str(tmp_path / "weights.pt")]) == 1
    assert "has no model: nothing is exported" in capsys.readouterr().err


def test_the_command_is_run_by_the_name_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import runpy

    monkeypatch.setattr(sys, "argv", ["torchhooks", "checkpoints", str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torchhooks.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("torchhooks", run_name="__main__")
    assert ended.value.code == 1
