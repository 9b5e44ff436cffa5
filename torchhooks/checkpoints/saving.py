"""Saving a checkpoint: ``collect -> write -> commit``.

:func:`collect` reads the state of the training run, in the training thread. :func:`write_checkpoint` has every rank
write its part into a temporary folder, and commits the folder, in a background thread with ``async_save``. What the
chief and the other ranks write is in the table of :mod:`torchhooks.checkpoints.contents`; when a folder is a
checkpoint, in :mod:`torchhooks.checkpoints.folder`.
"""

from __future__ import annotations

import os
import pickle
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from torchhooks.checkpoints.comparing import OF_ONE_CLASS, class_name, parameter_names
from torchhooks.checkpoints.contents import Entries, Parts, gradients_to_reduce, parts_of, parts_of_rank
from torchhooks.checkpoints.folder import MANIFEST, Files, Folder, as_json, file_of_rank, file_sums
from torchhooks.checkpoints.sharded import ShardWriter, sharded_parts, shards_of, split
from torchhooks.checkpoints.steps import gather_from_all, run_on_all, writes_for_all
from torchhooks.common.digests import digest, digests, has_plain_elements
from torchhooks.common.errors import CheckpointError, add_note
from torchhooks.common.files import CHUNK, Disk
from torchhooks.common.log import logger
from torchhooks.common.random_states import random_states, set_random_states
from torchhooks.common.stateful import PlainCopy
from torchhooks.common.text import shortened
from torchhooks.common.trees import Tree
from torchhooks.data.variables import Variables
from torchhooks.device.snapshot import Snapshot, plain_tensor
from torchhooks.fetches.names import bare_optimizer, canonical
from torchhooks.progress.training_state import TrainingState
from torchhooks.ranks.ranks import Ranks

_VISIBLE_SECS = 10.0  # within which a network file system shows what another process has closed


class Contents(NamedTuple):
    """What one rank writes of a checkpoint."""

    entries: Entries
    """The entries for the file of this rank. Empty if the chief writes them."""
    shards: dict[str, Tree]
    """DTensors and what goes with them, for DCP. Empty without DTensors."""
    manifest: dict[str, object]
    """What the manifest says of the training run."""


# -- collect -----------------------------------------------------------------------------------------------------------


def collect(
    training: TrainingState, parts: Parts, sharded: Parts, score: float | None, snapshot: Snapshot | None
) -> Contents:
    """Return what this rank writes. Every rank has to call this.

    Args:
        training: the state to save.
        parts: the objects in it.
        sharded: those of ``parts`` that have DTensors. Without any, the chief writes everything, also what belongs to
            another rank alone, and the contents of the others are empty.
        score: how good the state is.
        snapshot: what copies the tensors, if training continues while they are written.

    Raises:
        CheckpointError: something could not be loaded again, or a parameter is not the same on all ranks.
    """
    ranks, is_chief = training.ranks, writes_for_all(training.ranks)
    # Before collect_here(), because this gathers. If one rank raised in a step of all ranks before a gather in that
    # step, its next exchange would be another one than that of the other ranks.
    own_buffers = _buffers_of_rank(training, parts)
    _warn_of_unreduced(training)

    def collect_here() -> Contents:
        # What is sent to the chief is on the CPU: the chief would load it to the device with the same number.
        copy = snapshot or (plain_tensor if sharded or is_chief else _on_cpu)
        shards, without_shards = split(sharded, is_chief)
        gradients, sharded_gradients = ({}, {}) if training.gradients is None else training.gradients.split()
        entries = _entries(training, parts, without_shards, gradients, copy) | own_buffers
        if sharded_gradients:
            shards["sharded_gradients"] = sharded_gradients
        if sharded and is_chief:
            entries |= {"sharded_gradients": {}} if sharded_gradients else {}
            entries["sharded"] = list(sharded)
        manifest: dict[str, object] = {
            "world_size": ranks.size if ranks.is_connected else 1,
            "score": None if score is None else float(score),
            "finished": training.why_finished,
            "metadata": as_json(training.metadata),
        }
        return Contents(entries, shards if snapshot is None else _copied_tree(shards), manifest)

    contents = run_on_all(ranks, "collect the state", collect_here)
    if sharded:
        return contents
    # The chief's entries are not sent: they are the largest.
    _, *others = gather_from_all(
        ranks, "send the states of the ranks to the chief", lambda: None if is_chief else contents.entries
    )
    if not is_chief:
        return contents._replace(entries={})
    return contents._replace(entries={**contents.entries, "ranks": others}) if others else contents


def _entries(
    training: TrainingState,
    parts: Parts,
    without_shards: Mapping[str, Tree],
    gradients: Mapping[str, torch.Tensor],
    copy: Callable[[torch.Tensor], torch.Tensor],
) -> Entries:
    """Return the entries of this rank, each tensor passed through ``copy``.

    On another rank than the chief, these are only what belongs to it alone. ``without_shards`` are states by name that
    are used instead of asking for them. If something could not be loaded again, raise a CheckpointError that lists all
    of it.
    """
    is_chief = writes_for_all(training.ranks)
    plain = PlainCopy(copy)
    entries: Entries = {}
    for name, part in (parts if is_chief else parts_of_rank(parts)).items():
        try:
            state = without_shards[name] if name in without_shards else part.state_dict()
        except BaseException as error:
            add_note(error, f"while saving {name!r}")
            raise
        entries[name] = plain(state, (name,))
    if is_chief:
        _warn_of_schedulers(training, parts, entries)
        for line in () if training.unsaved is None else training.unsaved.lacking(parts):
            logger.warning(line)
        if training.metadata:
            entries["metadata"] = plain(training.metadata, ("metadata",))
    if gradients:
        entries["gradients"] = plain(gradients, ("gradients",))
    running_values = training.accumulated.state_dict()
    if running_values is not None:
        entries["running_values"] = plain(running_values, ("running_values",))
    position = training.position.state_dict()
    if position is not None:
        entries["position"] = {**position, "loaders": plain(position["loaders"], ("position", "loaders"))}
    if plain.problems:
        raise CheckpointError(f"This cannot be saved: {shortened(plain.problems, 8)}.{plain.way_out}")
    if is_chief:
        classes = {name: class_name(part) for name, part in parts.items() if isinstance(part, OF_ONE_CLASS)}
        entries |= {"classes": classes} if classes else {}
        entries["global_step"], entries["runs"] = training.global_step, training.total_runs
        entries["num_threads"] = torch.get_num_threads()
    # Also of an optimizer that belongs to another rank alone.
    if names := {name: each for name, each in parameter_names(parts).items() if name in entries}:
        entries["parameter_names"] = names
    # Last: a state_dict() above may have drawn random numbers, and this process continues with the states after that.
    entries["random"] = random_states()
    return entries


def digest_of_state(training: TrainingState) -> str | None:
    """Return a digest of what this rank has in a checkpoint, but for random states; ``None`` if there is none.

    Equal digests mean equal contents: a change through ``.data``, of which torch tells nothing, is another content. The
    random states of a checkpoint are those of its stop, and stay so when code of the script draws numbers after it.

    Every rank has to call this, because the state of a part may be collected by all of them.
    """
    before = random_states()
    try:
        parts = parts_of(training)
        own = parts if writes_for_all(training.ranks) else parts_of_rank(parts)
        states = {name: part.state_dict() for name, part in {**own, **sharded_parts(parts)}.items()}
        gradients = None if training.gradients is None else training.gradients.state_dict()
        position = training.position.state_dict()
        return digest([states, gradients, training.accumulated.state_dict(), position, training.total_runs])
    except Exception:  # a part that has no state just now, or more values than are read: its contents are unknown
        return None
    finally:
        set_random_states(before)


def _buffers_of_rank(training: TrainingState, parts: Parts) -> Entries:
    """Return the entry for the buffers of this rank that differ from the chief's; often none.

    Every rank has to call this. Buffers may differ under DDP, and do so under FSDP2. Parameters must not: the first
    saves of a loop compare them.

    Raises:
        CheckpointError: a parameter is not the same on all ranks.
    """
    ranks = training.ranks
    if not ranks.is_connected:
        return {}
    tensors = _replicated_tensors(parts)
    _compare_replicas(training, parts, tensors)
    buffers = {
        part: {name: own[name] for name in own if name in _buffer_names(parts[part])} for part, own in tensors.items()
    }
    if not any(buffers.values()):
        return {}
    chiefs, *_ = rows = gather_from_all(
        ranks, "compare the buffers", lambda: {part: _digests(own) for part, own in buffers.items()}
    )
    mine = rows[ranks.rank]
    copies = {
        part: {name: _copied(own[name]) for name in own if mine[part][name] != chiefs[part][name]}
        for part, own in buffers.items()
    }
    differing = {part: values for part, values in copies.items() if values}
    return {"rank_tensors": differing} if differing else {}


def _replicated_tensors(parts: Parts) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors that a checkpoint takes from the chief alone, by part and by name in the bare module."""
    own = parts_of_rank(parts)
    modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module) and name not in own}
    states = {name: module.state_dict() for name, module in modules.items()}
    return {
        name: {canonical(key): value for key, value in state.items() if isinstance(value, torch.Tensor)}
        for name, state in states.items()
    }


def _compare_replicas(training: TrainingState, parts: Parts, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Compare the parts that all ranks should have in common: their names, and their parameters.

    At the first save of a loop, and at the first one after runs have changed the parameters: after one seed they are
    the same at step 0, whether or not something reduces the gradients.
    """
    replicas, ranks = training.replicas, training.ranks
    if not replicas.are_due(training.total_runs):
        return

    def describe() -> dict[str, dict[str, str]]:
        of_rank, names = parts_of_rank(parts), parameter_names(parts)
        described: dict[str, dict[str, str]] = {part: {} for part in parts if part not in of_rank}
        for part, own in tensors.items():
            sums = _digests({name: each for name, each in own.items() if name not in _buffer_names(parts[part])})
            described[part] = {name: f"{tuple(own[name].shape)} {each}" for name, each in sums.items()}
        for part, each in parts.items():
            if isinstance(each, torch.optim.Optimizer) and part not in of_rank:
                described[part] = {"": str(names[part])}
        return described

    chiefs, *rows = gather_from_all(ranks, "compare the parameters", describe)
    for rank, row in enumerate(rows, start=1):
        for part in {**chiefs, **row}:
            if part not in chiefs or part not in row:
                here, elsewhere = (0, rank) if part in chiefs else (rank, 0)
                named = part if part in ("model", "optimizer") else f"state[{part!r}]"
                raise CheckpointError(
                    f"{named} exists on rank {here} and not on rank {elsewhere}, and a checkpoint has one for all: "
                    "give the loop the same state on all ranks. An average of the weights is the same on all of them"
                )
            own, theirs = chiefs[part], row[part]
            for name in {**own, **theirs}:
                if own.get(name) != theirs.get(name):
                    what = f"the parameter {name!r}" if name else "the order of the parameters"
                    raise CheckpointError(
                        f"{what} of {part!r} is not the same on rank 0 and on rank {rank}, and a checkpoint has one "
                        "for all: look for a missing DistributedDataParallel, or for another seed. If each rank has "
                        "its own on purpose, set per_rank = True on the module, or give the ranks with the same model "
                        "a loop of their own, with Ranks(group=...) and a folder for each group"
                    )
    replicas.are_the_same(chiefs, training.total_runs)


def _buffer_names(module: Tree) -> set[str]:
    # state_dict() has a shared buffer under each of its names, so all of them are needed here.
    return {canonical(name) for name, _ in module.named_buffers(remove_duplicate=False)}


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the digest of each of ``tensors``, and an empty one for a DTensor, of which each rank has another part."""
    whole = {name: tensor for name, tensor in tensors.items() if has_plain_elements(tensor)}
    return dict.fromkeys(tensors, "") | dict(zip(whole, digests(whole.values()), strict=True))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return plain_tensor(tensor).to("cpu", copy=True)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return plain_tensor(tensor).cpu()


def _copied_tree(tree: Tree) -> Tree:
    if isinstance(tree, dict):
        return {key: _copied_tree(value) for key, value in tree.items()}
    # Of these tensors no Snapshot makes copies. The thread that writes gives them to DCP, while the training thread
    # changes the originals.
    return tree.detach().to("cpu", copy=True)


def _warn_of_unreduced(training: TrainingState) -> None:
    """Log a warning, once, if a checkpoint is saved without gradients that FSDP2 has not reduced yet."""
    if "unreduced" in training.warned or not writes_for_all(training.ranks) or not gradients_to_reduce(training):
        return
    training.warned.add("unreduced")
    logger.warning(
        "the checkpoint of step %d has no gradients that FSDP2 has not reduced over the ranks yet, so a process "
        "that resumes from it makes the next step of the optimizer without them. Save and stop after a step of the "
        "optimizer, or leave set_requires_gradient_sync(True)",
        training.global_step,
    )


def _warn_of_schedulers(training: TrainingState, parts: Parts, entries: Entries) -> None:
    """Log a warning, once, if an optimizer has a scheduler, and nothing in ``entries`` is the state of that."""
    optimizers = {name: part for name, part in parts.items() if hasattr(part, "param_groups")}
    scheduled = [name for name, part in optimizers.items() if _has_scheduler(part)]
    if "scheduler" in training.warned or not scheduled:
        return
    others = {name: part for name, part in parts.items() if name != "model" and not hasattr(part, "param_groups")}
    others = {name: part for name, part in others.items() if not isinstance(part, Variables)}  # with names of the user
    schedulers = {name: part for name, part in others.items() if isinstance(part, LRScheduler)}
    # A scheduler of another library, such as timm's, may have no last_epoch, but it has its optimizer. Like a trainer
    # of the script, it may contain the state of several.
    others = {name: part for name, part in others.items() if name not in schedulers}
    if any(hasattr(part, "optimizer") or _has_key(entries[name], "last_epoch") for name, part in others.items()):
        return
    saved = [bare_optimizer(part.optimizer) for part in schedulers.values()]
    missing = [name for name in scheduled if not any(bare_optimizer(optimizers[name]) is each for each in saved)]
    if not missing:
        return
    training.warned.add("scheduler")
    logger.warning(
        "%s has a learning-rate scheduler, whose state is not in the checkpoints: a resumed training run would start "
        'the schedule over. Give the loop state={"%s": scheduler}',
        " and ".join("the optimizer" if name == "optimizer" else f"state[{name!r}]" for name in missing),
        "scheduler" if "scheduler" not in parts else "scheduler2",
    )


def _has_scheduler(optimizer: object) -> bool:
    """Return whether a scheduler of torch has wrapped the ``step`` of ``optimizer``.

    The ``initial_lr`` of its groups would not do: it is also in the state of an optimizer that once had a scheduler.
    """
    return hasattr(getattr(bare_optimizer(optimizer), "step", None), "_wrapped_by_lr_sched")  # torch 2.7 to 2.13


def _has_key(value: Tree, key: str) -> bool:
    if isinstance(value, dict):
        return key in value or any(_has_key(item, key) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_has_key(item, key) for item in value)


# -- write and commit --------------------------------------------------------------------------------------------------


def write_checkpoint(ranks: Ranks, contents: Contents, folder: Folder, name: str, step: int) -> None:
    """Have every one of ``ranks`` write its contents of the checkpoint ``name-step``, whole or not at all.

    Until the commit, only a temporary folder changes, and whatever happens it is removed.
    """
    is_chief = writes_for_all(ranks)
    # Each rank would choose another name, with its own process in it. The chief's counts, because the chief creates the
    # folder: a later save looks at this process to tell whether the folder is abandoned.
    temporary = gather_from_all(ranks, "name the folder", lambda: folder.temporary(f"{name}-{step}"))[0]
    try:
        run_on_all(ranks, "create the folder", lambda: folder.begin(temporary) if is_chief else None)
        files = write(ranks, contents, temporary, folder.disk)
        # Every rank has synced its files: the manifest, which makes them a checkpoint, comes last.
        run_on_all(
            ranks,
            "commit the folder",
            lambda: commit(folder, temporary, name, step, files, contents.manifest) if is_chief else None,
        )
    finally:
        if is_chief:
            folder.end(temporary)


def write(ranks: Ranks, contents: Contents, folder: str, disk: Disk) -> Files:
    """Have every rank write its contents into ``folder``; return all files."""
    rank, is_chief = ranks.rank if ranks.is_connected else 0, writes_for_all(ranks)
    own_file = file_of_rank(rank)

    def write_here() -> Files:
        if not is_chief:
            _wait_until_visible(folder, lambda: os.path.isdir(folder), "the chief has created it")
        return {own_file: write_entries(contents.entries, os.path.join(folder, own_file), disk)}

    written = gather_from_all(ranks, "write the files of the ranks", write_here)
    if contents.shards:
        # The steps of torch.distributed.checkpoint, whose own gather would not notice a rank that fails.
        writer = ShardWriter(contents.shards, folder, is_chief)
        plans = gather_from_all(ranks, "plan the shards", writer.plan)
        assigned = gather_from_all(
            ranks, "assign the shards to the ranks", lambda: writer.assign(plans) if is_chief else []
        )[0]
        results = gather_from_all(ranks, "write the shards", lambda: writer.write(assigned[rank]))

        def finish() -> Files:
            if is_chief:
                writer.finish(results)
            return file_sums(folder, shards_of(rank, folder))

        written += gather_from_all(ranks, "sum up the shards", finish)
    return {name: sums for files in written for name, sums in files.items()}


def commit(folder: Folder, temporary: str, name: str, step: int, files: Files, manifest: Mapping[str, object]) -> None:
    """Make ``temporary``, which has all ``files``, the checkpoint ``name-step``. Chief only."""
    for file, (size, _) in files.items():
        # The manifest makes the folder a checkpoint, so first the chief has to see each file whole.
        path = os.path.join(temporary, file)
        _wait_until_visible(path, partial(_has_size, path, size), "another rank has written it")
    folder.commit(name, step, temporary, files, manifest)


def check_is_visible(ranks: Ranks, path: str) -> bool:
    """Have every rank look for the checkpoint at ``path``, which the chief has written; return whether it has.

    Raises:
        CheckpointError: a rank does not see it, because its folder of this name is another one.
    """

    def manifest() -> bytes:
        with suppress(OSError):
            # Listed first: a network file system may remember that there was no such file until it reads the folder.
            os.listdir(os.path.dirname(path))
            with open(os.path.join(path, MANIFEST), "rb") as file:
                return file.read()
        return b""

    is_chief = writes_for_all(ranks)
    written = gather_from_all(ranks, "tell the ranks of the checkpoint", lambda: manifest() if is_chief else b"")[0]

    def look() -> None:
        # The contents are compared: the folder of this name on another machine may have a checkpoint of the same step
        # from an earlier training run.
        if written and not is_chief:
            _wait_until_visible(path, lambda: manifest() == written, "rank 0 has written it")

    run_on_all(ranks, "look for the checkpoint", look)
    return bool(written)


def _has_size(path: str, size: int) -> bool:
    return os.path.exists(path) and os.path.getsize(path) == size


def _wait_until_visible(path: str, is_visible: Callable[[], bool], who: str) -> None:
    """Wait for what another rank has written to ``path``: a network file system may show it a few seconds later.

    Raises:
        CheckpointError: it is still not visible. ``who`` says who has written it.
    """
    end = time.monotonic() + _VISIBLE_SECS
    while not is_visible():
        if time.monotonic() > end:
            raise CheckpointError(
                f"{path} cannot be seen here, though {who}: give the loop a folder that all ranks share, such as "
                "one on a network file system"
            )
        time.sleep(0.1)  # each look is a request to the file server


# -- the file of a rank ------------------------------------------------------------------------------------------------


def write_entries(entries: Entries, path: str, disk: Disk) -> tuple[int, int]:
    """Write ``entries`` to a new file at ``path``, sync it, and return its size and its CRC-32."""
    with disk.create(path) as file:
        sink = Sink(disk, file)
        save_with_torch(entries, sink)
        sink.finish()
        disk.sync(file)
    return sink.size, sink.checksum


def save_with_torch(entries: Entries, file: Any) -> None:
    """Write ``entries`` to the open ``file``, which ``torch.load`` reads. Keep no reference to their tensors."""
    # Before torch 2.10, the class that torch.save derives from Pickler has a method that refers to every storage. A
    # class is part of a reference cycle, so all of them stayed in memory until the garbage collector ran.
    derived: list[type] = []

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls) -> None:
            derived.append(cls)

    sums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # every byte is in the sum that the manifest has
    try:
        torch.save(entries, file, pickle_module=SimpleNamespace(__name__="pickle", Pickler=Pickler))
    finally:
        torch.serialization.set_crc32_options(sums)
        for pickler in derived:
            pickler.persistent_id = None  # type: ignore[attr-defined]


class Sink:
    """A file that is being written, as ``torch.save`` sees it.

    torch replaces an error of ``write`` by one about positions in the file. So the first error is stored until
    :meth:`finish` raises it, and nothing is written after it.
    """

    def __init__(self, disk: Disk, file: BinaryIO) -> None:
        self.size = self.checksum = 0
        self._file = file
        self._disk = disk
        self._error: BaseException | None = None
        self._small = bytearray()  # torch makes five small writes for each tensor: these are passed on together

    def write(self, data: bytes | memoryview) -> int:
        if len(data) < CHUNK:
            self._small += data
            if len(self._small) >= CHUNK:
                self._pass_on_small()
        else:
            self._pass_on_small()
            self._pass_on(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is synced as a whole."""

    def finish(self) -> None:
        """Write what is left, and raise the first error, if there was one."""
        self._pass_on_small()
        if self._error is not None:
            raise self._error

    def _pass_on_small(self) -> None:
        small, self._small = self._small, bytearray()
        self._pass_on(memoryview(small))

    def _pass_on(self, data: bytes | memoryview) -> None:
        if self._error is None:
            try:
                self._disk.write(self._file, data)
            except BaseException as error:  # a Ctrl-C arrives here too
                self._error = error
        self.size, self.checksum = self.size + len(data), zlib.crc32(data, self.checksum)
