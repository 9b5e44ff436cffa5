"""Checkpoints of several ranks: every step of saving and restoring is made by all of them, or fails on all of them.

Without DTensors, all ranks have the same model, so the chief writes a checkpoint, as one process does, and what belongs
to another rank alone is gathered into it (:mod:`torchhooks.checkpoints.state`). With DTensors, all ranks write into the
folder of the checkpoint (:mod:`torchhooks.checkpoints.manifest`).
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from torchhooks.checkpoints.files import Folder
from torchhooks.checkpoints.manifest import STATE, Files, file_sums, read_manifest
from torchhooks.checkpoints.sharded import ShardWriter, canonical, read_tensors, sharded_parts, shards_of, split
from torchhooks.checkpoints.state import (
    SessionLike,
    accumulated_gradients,
    collect,
    moments_of,
    of_rank,
    own_parts,
    parts_of,
    shared_tensors,
    unreduced,
)
from torchhooks.checkpoints.torch_save import write_state
from torchhooks.common.digests import fingerprints
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError, PeerError, brief
from torchhooks.common.files import Disk
from torchhooks.common.log import logger
from torchhooks.device.snapshot import Snapshot, plain_tensor
from torchhooks.position.place import State
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


class Share(NamedTuple):
    """What one rank writes of a checkpoint: DTensors and what goes with them, and the state for its own file."""

    tensors: dict[str, Any]
    state: dict[str, Any]


def share_of(session: SessionLike, sharded: dict[str, Any], snapshot: Snapshot | None) -> Share:
    """Return what this rank writes. Every rank has to call this. ``sharded`` are the parts that have DTensors, by name.

    Without such parts, the chief writes everything, also what belongs to another rank alone, and the share of the
    others is empty. With a ``snapshot``, training may continue while the share is written, once the snapshot has ended.
    """
    ranks = session.ranks
    own_differences = differences(session)
    _warn_of_unreduced(session)

    def collect_here() -> Share:
        tensors, given = split(sharded, leads(ranks))
        given["gradients"], sharded_gradients = accumulated_gradients(session)
        # What is sent is on the CPU, because the chief would otherwise load it to the device with the same number.
        copied = snapshot or (plain_tensor if sharded or leads(ranks) else _on_cpu)
        state = collect(session, copied, given, of_rank_only=not leads(ranks)) | own_differences
        if sharded_gradients:
            tensors["sharded_gradients"] = sharded_gradients
        if sharded and leads(ranks):
            state |= {"sharded_gradients": {}} if sharded_gradients else {}
            state["sharded"] = list(sharded)
        return Share(tensors if snapshot is None else _copies_in(tensors), state)

    share = all_or_none(ranks, collect_here)
    if sharded:
        return share
    # The chief's is not sent: it is the largest.
    _, *others = exchange(ranks, lambda: None if leads(ranks) else share.state)
    if leads(ranks):
        return Share({}, {**share.state, "ranks": others} if others else share.state)
    return Share({}, {})


def _warn_of_unreduced(session: SessionLike) -> None:
    """Log a warning, once, if a checkpoint is saved without gradients that FSDP2 has not reduced yet."""
    if leads(session.ranks) and "unreduced" not in session.warned and unreduced(session):
        session.warned.add("unreduced")
        logger.warning(
            "the checkpoint of step %d has no gradients that FSDP2 has not reduced over the ranks yet, so a process "
            "that resumes from it makes the next step of the optimizer without them. Save and stop after a step of the "
            "optimizer, or leave set_requires_gradient_sync(True)",
            session.global_step,
        )


def differences(session: SessionLike) -> dict[str, Any]:
    """Return the entries for what this rank has of modules and optimizers that differs from the chief; often none.

    Every rank has to call this. Parameters differ if the ranks have different models, or if nothing keeps them equal,
    which is worth a warning. Buffers may differ under DDP, and do so under FSDP2.
    """
    ranks = session.ranks
    if not ranks.is_connected:
        return {}
    parts = parts_of(session)
    tensors = shared_tensors(parts)
    optimizers = {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
    optimizers = {name: part for name, part in optimizers.items() if name not in own_parts(parts)}

    def describe() -> dict[str, dict[str, str]]:
        found = {part: dict(zip(own, fingerprints(own.values()), strict=True)) for part, own in tensors.items()}
        groups = {name: [len(group["params"]) for group in each.param_groups] for name, each in optimizers.items()}
        return found | {name: {"": str(sizes)} for name, sizes in groups.items()}

    rows = exchange(ranks, describe)
    chiefs, mine = rows[0], rows[ranks.rank]
    _warn_of_weights(session, parts, rows)
    whole = [part for part, own in mine.items() if own.keys() != chiefs.get(part, {}).keys()]
    whole += [name for name in optimizers if mine[name] != chiefs.get(name) and name not in whole]
    all_or_none(ranks, partial(_check_not_sharded, whole, sharded_parts(parts), ranks.rank))
    copies: dict[str, Any] = {}
    parameters: set[int] = set()
    for part, own in tensors.items():
        names = [name for name in own if part in whole or mine[part][name] != chiefs[part][name]]
        parameters |= {id(value) for name, value in _named_parameters(parts[part]) if name in names}
        if names and part not in whole:
            copies[part] = {name: own[name] for name in names}
    for name, optimizer in optimizers.items():
        if name not in whole and (moments := moments_of(optimizer, parameters)):
            copies[name] = moments
    states = {name: parts[name].state_dict() for name in whole}
    entries = {"rank_tensors": _on_host(copies), "rank_parts": _on_host(states)}
    return {name: entry for name, entry in entries.items() if entry}


def _named_parameters(module: Any) -> list[tuple[str, torch.Tensor]]:
    return [(canonical(name), each) for name, each in module.named_parameters(remove_duplicate=False)]


def _check_not_sharded(whole: list[str], sharded: Container[str], rank: int) -> None:
    found = [name for name in whole if name in sharded]
    if found:
        raise CheckpointError(
            f"{found[0]!r} has DTensors, and other tensors on rank {rank} than on rank 0: a checkpoint has the same "
            "ones of all ranks. Give the ranks with the same model a loop of their own, with Ranks(group=...) and "
            "another folder for each group"
        )


def _warn_of_weights(session: SessionLike, parts: Mapping[str, Any], rows: list[dict[str, dict[str, str]]]) -> None:
    """Log a warning, once, if a parameter is not the same on all ranks. It names the first one."""
    if "weights" in session.warned or not leads(session.ranks):
        return
    for part, own in rows[0].items():
        buffers = parts[part].named_buffers(remove_duplicate=False) if hasattr(parts[part], "named_buffers") else ()
        ignored = {canonical(name) for name, _ in buffers}
        for rank, row in enumerate(rows):
            theirs = row.get(part, {})
            names = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name) and name not in ignored]
            if names:
                session.warned.add("weights")
                logger.warning(
                    "%s of %r is not the same on rank 0 and on rank %d, so checkpoints contain, for each rank, what "
                    "differs. If all ranks should have the same weights, look for what lets them drift apart, such as "
                    "a missing DistributedDataParallel. If not, set per_rank = True on the module",
                    *(f"the parameter {names[0]!r}" if names[0] else "the number of parameters", part, rank),
                )
                return


def _on_host(tree: Any) -> Any:
    """Return a copy of ``tree`` with each tensor in it copied to the CPU."""
    if isinstance(tree, torch.Tensor):
        return _copied(tree)
    if isinstance(tree, dict):
        copied = copy.copy(tree)  # with the versions of the modules, which are an attribute
        copied.update({key: _on_host(value) for key, value in tree.items()})
        return copied
    return [_on_host(value) for value in tree] if isinstance(tree, list) else tree


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return plain_tensor(tensor).to("cpu", copy=True)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return plain_tensor(tensor).cpu()


def _copies_in(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copies_in(value) for key, value in tree.items()}
    return tree.detach().to("cpu", copy=True)


def write_checkpoint(ranks: Ranks, share: Share, folder: Folder, prefix: str, step: int, about: dict[str, Any]) -> None:
    """Have every one of ``ranks`` write its share of the checkpoint ``prefix-step``, whole or not at all."""
    temporary = exchange(ranks, lambda: folder.temporary(f"{prefix}-{step}"))[0]

    def begin() -> None:
        if leads(ranks):
            folder.begin(temporary)

    def commit(files: Files) -> None:
        if leads(ranks):
            _check_visible(temporary, files)
            folder.commit(prefix, step, temporary, files, about)

    try:
        all_or_none(ranks, begin)
        files = write_files(ranks, share, temporary, folder.disk)
        all_or_none(ranks, partial(commit, files))
    finally:
        if leads(ranks):
            folder.end(temporary)


def write_files(ranks: Ranks, share: Share, folder: str, disk: Disk) -> Files:
    """Have every rank write its share of a checkpoint into ``folder``; return all files."""
    rank = ranks.rank if ranks.is_connected else 0
    own_file = _file_of(rank)
    written = exchange(ranks, lambda: {own_file: write_state(share.state, os.path.join(folder, own_file), disk)})
    if share.tensors:
        writer = ShardWriter(share.tensors, folder, leads(ranks))
        wishes = exchange(ranks, writer.plan)
        plans = exchange(ranks, lambda: writer.plan_for_all(wishes) if leads(ranks) else None)[0] or []
        results = exchange(ranks, lambda: writer.write(plans[rank]))

        def sum_up() -> Files:
            if leads(ranks):
                writer.finish(results)
            return file_sums(folder, shards_of(rank, folder))

        written += exchange(ranks, sum_up)
    return {name: sums for files in written for name, sums in files.items()}


def _file_of(rank: int) -> str:
    return f"rank-{rank}.pt" if rank else STATE


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

    Without a session, and for parts that are not sharded in it, tensors are whole. Tensors of modules, which loading
    copies, are read from the file when they are used, and so is everything without a session.
    """
    saved, parts = load_part(folder, 0), {} if session is None else parts_of(session)
    if session is not None:
        kept = [value for name, value in saved.items() if not isinstance(parts.get(name), torch.nn.Module)]
        _move_to_memory(kept, {})
    if "sharded" not in saved:
        return saved
    names, size = saved.pop("sharded"), read_manifest(folder)["world_size"]
    parts = {name: part for name, part in parts.items() if name in names}
    gradients = None if session is None else session.gradients
    parameters = [] if gradients is None else gradients.parameters()
    read_tensors(folder, saved, parts, {("sharded_gradients", str(i)): each for i, each in enumerate(parameters)})
    if size > 1:
        saved["ranks"] = [load_part(folder, rank) for rank in range(1, size)]
    return saved


def load_part(folder: str, rank: int) -> dict[str, Any]:
    """Return what ``rank`` wrote into the checkpoint ``folder`` apart from shards; tensors stay in the mapped file."""
    path = os.path.join(folder, _file_of(rank))
    loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return loaded


def _move_to_memory(tree: Any, copies: dict[int, torch.UntypedStorage]) -> None:
    """Copy the tensors in ``tree`` from the mapped file, in place. What shares memory does so afterwards.

    ``copies`` has the memory that was copied, by address.
    """
    if isinstance(tree, dict):
        tree = tree.values()
    elif isinstance(tree, torch.Tensor):
        if tree.layout is not torch.strided or tree.is_quantized:
            tree.data = tree.detach().clone()
            return
        storage = tree.untyped_storage()
        if storage.data_ptr() not in copies:
            copy = storage.clone()
            copies[storage.data_ptr()] = copies[copy.data_ptr()] = copy  # the second for a tensor that comes again
        moved = torch.empty(0, dtype=tree.dtype, device="cpu")
        tree.data = moved.set_(copies[storage.data_ptr()], tree.storage_offset(), tree.size(), tree.stride())
        return
    elif not isinstance(tree, (list, tuple, set)):
        return
    for value in tree:
        _move_to_memory(value, copies)


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
        _warn_of_dropped_weights(path, saved)
        logger.warning(
            "%s was saved by %s and is restored by %s: random states,%s the position in the data, and the states of "
            "hooks, loaders, Variables and objects with per_rank start as the script set them%s",
            path,
            _number(1 + len(saved.get("ranks", []))),
            _number(ranks.size),
            "" if "sharded_gradients" in saved and "gradients" not in saved else " gradients,",
            ". The outer loops continue, and the epoch in progress begins again" if _begins_again(own) else "",
        )
    return path, own, is_whole


def warn_of_buckets(session: SessionLike) -> None:
    """Log a warning, once, if DistributedDataParallel will not add gradients in the order in which it did before.

    It puts gradients into other buckets after its first backward pass in a process. The sum of two numbers does not
    depend on their order, but the sum of three does, in its last bit.
    """
    ranks = session.ranks
    if ranks.size < 3 or not leads(ranks) or not session.global_step or "buckets" in session.warned:
        return
    for name, part in parts_of(session).items():
        if not isinstance(part, torch.nn.parallel.DistributedDataParallel):
            continue
        is_fixed = part.find_unused_parameters and not part.static_graph
        if not is_fixed and not getattr(part, "_has_rebuilt_buckets", False):
            session.warned.add("buckets")
            logger.warning(
                "%r is a DistributedDataParallel on %d ranks, which adds gradients in another order in its first step "
                "than later, so the weights will differ in their last bits from a training run without interruption. "
                "If that matters, give it find_unused_parameters=True, or make two steps before the loop is created",
                *(name, ranks.size),
            )
            return


def _begins_again(saved: Mapping[str, Any]) -> bool:
    """Return whether an inner loop begins again in an item of an outer loop that continues."""
    return "position" in saved and saved["position"]["path"][-1]["state"] == State.NOT_BEGUN.value


def _warn_of_dropped_weights(path: str, saved: dict[str, Any]) -> None:
    """Log a warning if the checkpoint has tensors that were not the same on all ranks, of which rank 0's are loaded."""
    for rank, row in enumerate(saved.get("ranks", []), 1):
        found = [*row.get("rank_parts", {}), *row.get("rank_tensors", {})]
        if found:
            logger.warning(
                "%s: %r was not the same on rank 0 and on rank %d. Another number of ranks restores what rank 0 had",
                *(path, found[0], rank),
            )
            return


def _number(size: int) -> str:
    return "1 process" if size == 1 else f"{size} ranks"
