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
from functools import partial
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
from torchhooks.ranks.failures import mark_as_known
from torchhooks.ranks.ranks import Ranks

T = TypeVar("T")
S = TypeVar("S")

_VISIBLE_SECS = 10.0  # within which a network file system shows what another process has closed


def all_or_none(ranks: Ranks, call: Callable[[], T]) -> T:
    """Call ``call()`` on every rank, and return its result on this rank; raise on all ranks if it raised on one.

    Each rank has to call this at the same point. The results stay where they are.

    Raises:
        CheckpointError: ``call`` raised on another rank; a DamagedCheckpointError if it raised one.
    """
    return _outcomes(ranks, call, lambda result: None)[0]


def exchange(ranks: Ranks, call: Callable[[], T]) -> list[T]:
    """Call ``call()`` on every rank, and return the results of all ranks; raise on all ranks if it raised on one.

    Each rank has to call this at the same point. The results are pickled and sent to every rank.

    Raises:
        CheckpointError: ``call`` raised on another rank; a DamagedCheckpointError if it raised one.
    """
    return _outcomes(ranks, call, lambda result: result)[1]


def _outcomes(ranks: Ranks, call: Callable[[], T], sent: Callable[[T], S]) -> tuple[T, list[S]]:
    """Return the result of ``call()`` on this rank, and ``sent(result)`` of every rank."""
    if not ranks.is_connected:
        result = call()
        return result, [sent(result)]
    try:
        result = call()
    except PeerError:
        raise  # the other ranks do not wait for this one: they get the same error, or are the reason for it
    except Exception as error:
        # The other ranks wait for the outcome of this one, so it is sent before the error goes on its way.
        text = str(error) if isinstance(error, CheckpointError) else brief(error)
        ranks.gather((None, (isinstance(error, DamagedCheckpointError), text)), "a checkpoint")
        mark_as_known(error)
        raise
    outcomes = ranks.gather((sent(result), None), "a checkpoint")
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            is_damaged, text = failure
            raise (DamagedCheckpointError if is_damaged else CheckpointError)(f"on rank {rank}: {text}")
    return result, [value for value, _ in outcomes]


def leads(ranks: Ranks) -> bool:
    """Return whether this process reads and writes for all ranks: the chief, and any process that is alone."""
    return ranks.is_chief or not ranks.is_connected


def collect_of_all(session: SessionLike, copy: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Return the contents of a checkpoint on the chief, with the parts of the other ranks; elsewhere ``{}``."""
    ranks = session.ranks
    own_buffers = buffers_of_rank(session)

    def collect_here() -> dict[str, Any]:
        if leads(ranks):
            return collect(session, copy)
        # On the CPU, because the chief would otherwise load it to the device with the same number.
        return collect(session, lambda tensor: plain_tensor(tensor).cpu(), of_rank_only=True) | own_buffers

    state = all_or_none(ranks, collect_here)
    _, *others = exchange(ranks, lambda: None if leads(ranks) else state)  # the chief's is not sent: it is the largest
    if not leads(ranks):
        return {}
    return {**state, "ranks": others} if others else state


def buffers_of_rank(session: SessionLike) -> dict[str, Any]:
    """Return the entry for the buffers of this rank that differ from those of the chief; ``{}`` if none does.

    Every rank has to call this. DDP copies the chief's buffers to the other ranks before most steps, and FSDP2 never.
    """
    ranks = session.ranks
    if not ranks.is_connected:
        return {}
    digests = exchange(ranks, partial(_buffer_digests, session))
    chiefs, mine = digests[0], digests[ranks.rank]
    differing = [key for key, digest in mine.items() if digest != chiefs.get(key)]
    if not differing:
        return {}
    own = buffers(session)
    copies: dict[str, dict[str, torch.Tensor]] = {}
    for part, name in differing:
        copies.setdefault(part, {})[name] = _copied(own[part][name])
    return {"rank_buffers": copies}


def _buffer_digests(session: SessionLike) -> dict[tuple[str, str], str]:
    return {(part, name): _digest(value) for part, own in buffers(session).items() for name, value in own.items()}


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

    wishes = exchange(ranks, writer.plan)
    plans = exchange(ranks, lambda: writer.plan_for_all(wishes) if leads(ranks) else None)[0] or []
    results = exchange(ranks, lambda: write(plans[ranks.rank if ranks.is_connected else 0]))

    def sum_up() -> Files:
        if leads(ranks):
            writer.finish(results)
        return file_sums(folder, files_of(ranks.rank, folder))

    return {name: about for files in exchange(ranks, sum_up) for name, about in files.items()}


def commit_shards(
    ranks: Ranks, share: Share, writer: Folder, name: str, step: int, disk: Disk, retention: Retention
) -> None:
    """Have every rank write its share of the checkpoint ``name-step`` with ``writer``, whole or not at all."""

    def begin() -> str:
        return writer.begin_folder(name, step) if leads(ranks) else ""

    def commit(files: Files) -> None:
        if leads(ranks):
            _check_visible(temporary, files)
            writer.commit_folder(name, step, temporary, files, retention)

    temporary = exchange(ranks, begin)[0]
    try:
        all_or_none(ranks, partial(commit, write_shards(ranks, share, temporary, disk)))
    except BaseException:
        if leads(ranks):
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
    chosen = all_or_none(ranks, lambda: choose() if leads(ranks) else None)
    path = exchange(ranks, lambda: None if chosen is None else chosen[0])[0]
    if path is None:
        return None
    saved = all_or_none(ranks, lambda: read(path) if chosen is None else chosen[1])
    own, is_whole = of_rank(session, saved)
    if not is_whole and leads(ranks):
        logger.warning(
            "%s was saved by %s and is restored by %s: random states,%s the position in the data, and the states of "
            "hooks, loaders and Variables start as the script set them",
            path,
            _number(1 + len(saved.get("ranks", []))),
            _number(ranks.size),
            "" if "sharded_gradients" in saved and "gradients" not in saved else " gradients,",
        )
    return path, own, is_whole


def _number(size: int) -> str:
    return "1 process" if size == 1 else f"{size} ranks"
