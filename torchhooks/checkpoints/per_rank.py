"""Checkpoints of several ranks: every step of saving and restoring is made by all of them, or fails on all of them.

Without DTensors, all ranks have the same model, so a checkpoint is one file, as with one process. The chief writes it,
and what belongs to another rank alone is gathered into it (:mod:`torchhooks.checkpoints.state`). With DTensors, a
checkpoint is a folder (:mod:`torchhooks.checkpoints.manifest`), into which all ranks write.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from torchhooks.checkpoints.files import Folder, Retention
from torchhooks.checkpoints.manifest import Files, file_sums
from torchhooks.checkpoints.sharded import ShardWriter, files_of, read_tensors, split
from torchhooks.checkpoints.state import SessionLike, accumulated_gradients, buffers, collect, of_rank, parts_of
from torchhooks.checkpoints.torch_save import save
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError, PeerError, brief
from torchhooks.common.files import Disk
from torchhooks.common.log import logger
from torchhooks.device.snapshot import plain_tensor
from torchhooks.ranks.ranks import Ranks, mark_as_told

T = TypeVar("T")

_VISIBLE_SECS = 10.0  # within which a network file system shows what another process has closed


def together(ranks: Ranks, call: Callable[[], T]) -> list[T]:
    """Call ``call()`` on every rank, and return what it returned on each; raise on all ranks if it raised on one.

    Each rank has to call this at the same point. What is returned is pickled.

    Raises:
        CheckpointError: ``call`` raised on another rank; a DamagedCheckpointError if it raised one.
    """
    if not ranks.is_connected:
        return [call()]
    value: T | None = None
    error: Exception | None = None
    try:
        value = call()
    except PeerError:
        raise
    except Exception as caught:
        error = caught
    failure = None
    if error is not None:
        text = str(error) if isinstance(error, CheckpointError) else brief(error)
        failure = isinstance(error, DamagedCheckpointError), text
    outcomes = ranks.gather((value, failure), "a checkpoint")
    if error is not None:
        mark_as_told(error)
        raise error
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            is_damaged, text = failure
            raise (DamagedCheckpointError if is_damaged else CheckpointError)(f"on rank {rank}: {text}")
    return [value for value, _ in outcomes]


def leads(ranks: Ranks) -> bool:
    """Return whether this process reads and writes for all ranks: the chief, and any process that is alone."""
    return ranks.is_chief or not ranks.is_connected


def collect_of_all(session: SessionLike, copy: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Return the contents of a checkpoint on the chief, with the parts of the other ranks; elsewhere ``{}``."""
    state: dict[str, Any] = {}
    own_buffers = buffers_of_rank(session)

    def collect_here() -> dict[str, Any] | None:
        if leads(session.ranks):
            state.update(collect(session, copy))
            return None
        # On the CPU, because the chief would otherwise load it to the device with the same number.
        return collect(session, lambda tensor: plain_tensor(tensor).cpu(), of_rank_only=True) | own_buffers

    _, *others = together(session.ranks, collect_here)
    return {**state, "ranks": others} if others and state else state


def buffers_of_rank(session: SessionLike) -> dict[str, Any]:
    """Return the entry for the buffers of this rank that differ from those of the chief; ``{}`` if none does.

    Every rank has to call this. DDP copies the chief's buffers to the other ranks before most steps, and FSDP2 never.
    """
    own: dict[str, dict[str, torch.Tensor]] = {}
    digests: dict[tuple[str, str], str] = {}

    def compute() -> dict[tuple[str, str], str]:
        own.update(buffers(session) if session.ranks.is_connected else {})
        digests.update({(part, name): _digest(value) for part in own for name, value in own[part].items()})
        return digests

    chiefs = together(session.ranks, compute)[0]
    differing: dict[str, dict[str, torch.Tensor]] = {}
    for part, name in digests:
        if digests[part, name] != chiefs.get((part, name)):
            differing.setdefault(part, {})[name] = _copied(own[part][name])
    return {"rank_buffers": differing} if differing else {}


def _digest(tensor: torch.Tensor) -> str:
    special = tensor.is_nested or tensor.is_quantized or tensor.is_meta or tensor.layout != torch.strided
    if special or type(tensor) is not torch.Tensor:
        return ""  # not compared
    data = plain_tensor(tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=16).hexdigest()


class Share(NamedTuple):
    """What one rank contributes to a sharded checkpoint: tensors, and a state that is not sharded."""

    tensors: dict[str, Any]
    state: dict[str, Any]


def share_of(
    session: SessionLike, parts: dict[str, Any], score: float | None, copies: bool, own_buffers: dict[str, Any]
) -> Share:
    """Return the share of this rank. ``parts`` are those that have DTensors, by name.

    With ``copies``, training may continue while the share is written. ``own_buffers`` is from :func:`buffers_of_rank`.
    """
    ranks = session.ranks
    tensors, rest = split(parts, leads(ranks))
    rest["gradients"], sharded_gradients = accumulated_gradients(session)
    state = collect(session, _copied if copies else plain_tensor, of_rank_only=not leads(ranks), given=rest)
    state |= own_buffers
    if sharded_gradients:
        tensors["sharded_gradients"] = sharded_gradients
    if leads(ranks):
        state |= {"sharded_gradients": {}} if sharded_gradients else {}
        state |= {"size": ranks.size, "sharded": list(parts)} | ({} if score is None else {"score": float(score)})
    return Share(_copies_in(tensors) if copies else tensors, state)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return plain_tensor(tensor).to("cpu", copy=True)


def _copies_in(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copies_in(value) for key, value in tree.items()}
    return tree.detach().to("cpu", copy=True)


def write_shards(ranks: Ranks, share: Share, folder: str, disk: Disk) -> Files:
    """Have every rank write its share of a checkpoint into ``folder``; return all files."""
    writer = ShardWriter(share.tensors, folder, leads(ranks))

    def write(plan: Any) -> Any:
        buffer = io.BytesIO()
        save(share.state, buffer)
        with disk.create(os.path.join(folder, f"rank-{ranks.rank}.pt")) as file:
            disk.write(file, buffer.getbuffer())
            disk.sync(file)
        return writer.write(plan)

    plans = together(ranks, writer.plan)
    plans = together(ranks, lambda: writer.plan_for_all(plans) if leads(ranks) else None)[0] or []
    results = together(ranks, lambda: write(plans[ranks.rank if ranks.is_connected else 0]))

    def sum_up() -> Files:
        if leads(ranks):
            writer.finish(results)
        return file_sums(folder, files_of(ranks.rank, folder))

    return {name: about for files in together(ranks, sum_up) for name, about in files.items()}


def commit_shards(
    ranks: Ranks, share: Share, writer: Folder, name: str, step: int, disk: Disk, retention: Retention
) -> None:
    """Have every rank write its share of the checkpoint ``name-step`` with ``writer``, whole or not at all."""

    def begin() -> str:
        return writer.begin_folder(name, step) if leads(ranks) else ""

    def commit() -> None:
        if leads(ranks):
            _check_visible(temporary, files)
            writer.commit_folder(name, step, temporary, files, retention)

    temporary = ""
    try:
        temporary = together(ranks, begin)[0]
        files = write_shards(ranks, share, temporary, disk)
        together(ranks, commit)
    except BaseException:
        if temporary and leads(ranks):
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_visible(folder: str, files: Files) -> None:
    """Raise a CheckpointError if the chief does not see what another rank has written."""
    end = time.monotonic() + _VISIBLE_SECS
    for name, (size, _) in files.items():
        path = os.path.join(folder, name)
        while not os.path.exists(path) or os.path.getsize(path) != size:
            if time.monotonic() > end:
                raise CheckpointError(
                    f"another rank has written {name} into {folder}, where the chief does not see it: give the loop a "
                    "folder that all ranks share, such as one on a network file system"
                )
            time.sleep(0.1)


def read_folder(session: SessionLike | None, folder: str) -> dict[str, Any]:
    """Return the contents of the checkpoint ``folder``, with the shards that the rank of ``session`` loads.

    Without a session, and for parts that are not sharded in it, tensors are whole.
    """
    saved = load_part(folder, 0)
    size, names = saved.pop("size"), saved.pop("sharded")
    parts = {} if session is None else {name: part for name, part in parts_of(session).items() if name in names}
    gradients = None if session is None else session.gradients
    parameters = [] if gradients is None else gradients.parameters()
    read_tensors(folder, saved, parts, {("sharded_gradients", str(i)): each for i, each in enumerate(parameters)})
    if size > 1:
        saved["ranks"] = [load_part(folder, rank) for rank in range(1, size)]
    return saved


def load_part(folder: str, rank: int) -> dict[str, Any]:
    """Return what ``rank`` wrote into the checkpoint ``folder`` that is not sharded."""
    path = os.path.join(folder, f"rank-{rank}.pt")
    loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return loaded


def read_for_all(
    session: SessionLike, choose: Callable[[], tuple[str, dict[str, Any]] | None], read: Callable[[str], dict[str, Any]]
) -> tuple[str, dict[str, Any], bool] | None:
    """Have the chief choose and check a checkpoint, and the others read it.

    Args:
        session: what it will be loaded into.
        choose: returns the path of a checkpoint that is not damaged, and its contents; ``None`` if there is none.
        read: returns the contents of a checkpoint.

    Returns:
        The path, what the rank of ``session`` loads, and whether that includes what belongs to this rank alone.
    """
    ranks = session.ranks
    saved: dict[str, Any] = {}

    def choose_here() -> str | None:
        chosen = choose() if leads(ranks) else None
        if chosen is None:
            return None
        saved.update(chosen[1])
        return chosen[0]

    path = together(ranks, choose_here)[0]
    if path is None:
        return None
    together(ranks, lambda: None if leads(ranks) else saved.update(read(path)))
    own, is_whole = of_rank(session, saved)
    if not is_whole and leads(ranks):
        logger.warning(
            "%s was saved by %s and is restored by %s: random states,%s the position in the data, and the states of "
            "hooks and loaders start as the script set them",
            path,
            _number(1 + len(saved.get("ranks", []))),
            _number(ranks.size),
            "" if "sharded_gradients" in saved and "gradients" not in saved else " gradients,",
        )
    return path, own, is_whole


def _number(size: int) -> str:
    return "1 process" if size == 1 else f"{size} ranks"
