"""Reading checkpoints without a Saver: the newest, the best, the metadata or weights of one, all of its contents."""

from __future__ import annotations

import copy
import os

import torch
from torch.nn.modules.module import _IncompatibleKeys

from torchhooks.checkpoints.comparing import compare_module
from torchhooks.checkpoints.contents import Entries, parts_of
from torchhooks.checkpoints.folder import (
    Checkpoint,
    file_of_rank,
    has_checkpoints,
    inspect,
    is_checkpoint,
    list_checkpoints,
    put_back,
    read_manifest,
    verify,
)
from torchhooks.checkpoints.modules import renamed
from torchhooks.checkpoints.sharded import like_own, read_tensors
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError, brief, interrupt_in
from torchhooks.common.files import place
from torchhooks.common.log import logger
from torchhooks.common.text import shortened, shown
from torchhooks.common.trees import Tree
from torchhooks.progress.training_state import TrainingState
from torchhooks.ranks.ranks import reshard

_Path = str | os.PathLike[str]


def latest_checkpoint(directory: _Path) -> str | None:
    """Return the path of the newest complete checkpoint in ``directory`` (``tf.train.latest_checkpoint``).

    The newest is the one written last, which after a return to an earlier state is not the one of the highest step.
    ``None`` if there is none.

    >>> with MonitoredTrainingLoop(step, model, optimizer, checkpoint_dir="run") as loop:
    ...     loss = loop.run(batches[0])
    saving a checkpoint of step 0 into run
    saving a checkpoint of step 1 into run
    >>> latest_checkpoint("run")
    'run/model.ckpt-1'

    Raises:
        CheckpointError: the folder cannot be read.

    Unlike TensorFlow, which trusts its index, this checks that the files of the checkpoint are complete.
    """
    checkpoints = list_checkpoints(directory)
    return checkpoints[-1].path if checkpoints else None


def best_checkpoint(directory: _Path) -> str:
    """Return the path of the checkpoint in ``directory`` with the highest score.

    Of equal scores the first counts. A BestCheckpointHook keeps its checkpoints in a folder of their own, which is
    ``"run/best"`` if its ``checkpoint_dir`` is ``"run"``: the only such hook's is found with ``"run"`` too.

    >>> saver = Saver()
    >>> with MonitoredLoop(step, model, optimizer) as loop:
    ...     for accuracy in [0.7, 0.9, 0.8]:
    ...         loss = loop.run(batches[0])
    ...         path = saver.save(loop.session, "run/model.ckpt", loop.global_step, score=accuracy)
    >>> best_checkpoint("run")
    'run/model.ckpt-2'

    Raises:
        CheckpointError: the folder does not exist or cannot be read, it has no checkpoint with a score, or several
            folders in it have one.
    """
    folder = place(directory)
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is no folder: pass the one of a BestCheckpointHook, such as 'run/best'")
    scored = scored_checkpoints(folder)
    if not scored:
        inner = {each.name: scored_checkpoints(each.path) for each in os.scandir(folder) if each.is_dir()}
        found = {name: checkpoints for name, checkpoints in sorted(inner.items()) if checkpoints}
        if len(found) != 1:
            names = shortened([repr(os.path.join(folder, name)) for name in found])
            raise CheckpointError(
                f"{folder} has several folders with checkpoints that have a score: pass one of {names}"
                if found
                else f"{folder} has no checkpoint with a score: a BestCheckpointHook saves them, and Saver.save(score=)"
            )
        (scored,) = found.values()
    return max(scored, key=lambda pair: pair[0])[1].path


def scored_checkpoints(directory: _Path) -> list[tuple[float, Checkpoint]]:
    """Return the checkpoints in ``directory`` that have a score, each after its score, in the order of writing."""
    return [(each.score, each) for each in list_checkpoints(directory) if each.score is not None]


def read_metadata(path: _Path) -> dict[str, Tree]:
    """Return the ``metadata`` of the loop that wrote the checkpoint at ``path``; ``{}`` if it had none.

    Needs no model: the metadata can say which one to build. Usually, no tensors of the checkpoint are read.

    >>> metadata = {"width": 4}
    >>> with MonitoredTrainingLoop(step, model, optimizer, checkpoint_dir="run", metadata=metadata) as loop:
    ...     loss = loop.run(batches[0])
    saving a checkpoint of step 0 into run
    saving a checkpoint of step 1 into run
    >>> read_metadata(latest_checkpoint("run"))
    {'width': 4}

    Raises:
        CheckpointError: the checkpoint cannot be read, or is none.
    """
    folder = place(path)
    inspect(folder)
    # The manifest has a checksum of its own, so the metadata in it can be trusted without reading the tensors.
    metadata: dict[str, Tree] | None = read_manifest(folder)["metadata"]
    if metadata is None:  # JSON cannot hold it
        # Now state.pt is read, of which only the checksums of all files tell whether it is what was written.
        verify(folder)
        metadata = load_file(folder)["metadata"]
    return metadata


def load_weights(path: _Path, model: torch.nn.Module, strict: bool = True) -> _IncompatibleKeys:
    """Load the weights of a checkpoint into ``model``, without a loop, and return what ``model.load_state_dict`` does.

    >>> with MonitoredTrainingLoop(step, model, optimizer, checkpoint_dir="run") as loop:
    ...     loss = loop.run(batches[0])
    saving a checkpoint of step 0 into run
    saving a checkpoint of step 1 into run
    >>> for_inference = torch.nn.Linear(4, 1)
    >>> load_weights("run", for_inference)
    loaded the weights of step 1 from run/model.ckpt-1
    <All keys matched successfully>
    >>> torch.equal(for_inference.weight, model.weight)
    True

    ``path`` is a checkpoint, or a folder of checkpoints, whose newest undamaged one is used. To load the best, pass
    ``best_checkpoint("run/best")``.

    The checkpoint may be one of DistributedDataParallel, ``torch.compile`` or FSDP2, and so may ``model``; if it has
    DTensors, each rank calls this. Weights are loaded to the devices of those in the model, once all are checked.

    Args:
        path: the checkpoint, ``"run/model.ckpt-700"``, or the folder.
        model: the model. Its mode, ``train()`` or ``eval()``, stays.
        strict: whether weights that do not match are an error: their name, their shape, or a dtype that cannot hold the
            values. Otherwise what matches is loaded, and a warning names the others.

    Raises:
        TypeError: ``path`` is not a path, or ``model`` not a module.
        DamagedCheckpointError: the checkpoint is missing or damaged.
        CheckpointError: the folder has no checkpoint, the checkpoint has no model, or it does not match.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"load_weights({shown(path)}, {shown(model)}): pass the path of a checkpoint or of a folder of them, and "
            "a torch.nn.Module"
        )
    found, saved = _read_at(place(path))
    if "model" not in saved:
        raise CheckpointError(
            f"{found} has no model, only {shortened([repr(name) for name in saved])}: the loop that wrote it was not "
            "given one. Give the loop the model, or read other entries with torch.load(f'{path}/state.pt')"
        )
    # After a forward pass, FSDP2 may leave whole parameters in the model. The names and shapes that are compared, and
    # the tensors that are loaded, have to be those of the shards.
    reshard(model)
    state = renamed(model, saved["model"])
    misfits = compare_module("model", model, state)
    if misfits:
        report = "\n  ".join([f"{found} does not match the model:", *misfits])
        if strict:
            raise CheckpointError(f"{report}\nMake them match, or load what matches with strict=False.")
        logger.warning("%s\nThe rest is loaded.", report)
    result: _IncompatibleKeys = model.load_state_dict(like_own(model, state), strict=strict)
    logger.info("loaded the weights of step %d from %s", saved["global_step"], found)
    return result


def _read_at(path: str) -> tuple[str, Entries]:
    """Return the path and the contents of the checkpoint at ``path``, or of the newest one in the folder ``path``."""
    if not os.path.isdir(path) or is_checkpoint(path):
        try:
            verify(path)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"{error} Pass an undamaged checkpoint, or its folder for the newest one. A file of "
                "torch.save(model.state_dict()) is loaded with model.load_state_dict(torch.load(path))"
            ) from error
        return path, load_file(path)
    found = read_newest(path)
    if found is None:
        best = f", such as best_checkpoint({path!r})" if has_checkpoints(os.path.join(path, "best")) else ""
        raise CheckpointError(
            f"{path} has no checkpoint: pass a folder that a Saver has written to, or a checkpoint{best}"
        )
    return found


def read_newest(directory: _Path, training: TrainingState | None = None) -> tuple[str, Entries] | None:
    """Return the path of the newest checkpoint that is not damaged, and its entries, as :func:`read_checkpoint` does.

    Logs a warning for each damaged one. Returns ``None`` if there is none at all.

    Raises:
        CheckpointError: all of them are damaged.
    """
    directory = place(directory)
    # Before the list is made: a process that was killed while it replaced the newest checkpoint may have left it under
    # a temporary name.
    put_back(directory)
    for checkpoint in reversed(list_checkpoints(directory)):
        try:
            # list_checkpoints() has only compared sizes. A damaged byte is found here, where an older checkpoint can be
            # used.
            verify(checkpoint.path)
            return checkpoint.path, load_file(checkpoint.path, training)
        except DamagedCheckpointError as error:
            logger.warning("%s It is skipped.", error)
    # If this returned None, the loop would start over at step 0, and the damage would go unnoticed.
    if has_checkpoints(directory):
        raise CheckpointError(
            f"{os.fspath(directory)} has checkpoints, but all of them are damaged; the log says how. To start over,"
            " move them away, or choose another folder."
        )
    return None


def read_checkpoint(path: str, training: TrainingState | None = None) -> Entries:
    """Return the entries of the checkpoint at ``path``, with the parts that this rank of ``training`` needs.

    Without ``training``, all tensors are whole and on the CPU.

    Raises:
        DamagedCheckpointError: it is not what was written.
        CheckpointError: it could run code.
    """
    verify(path)
    return load_file(path, training)


def load_file(path: str, training: TrainingState | None = None) -> Entries:
    """Return what :func:`read_checkpoint` does, without comparing the checksums."""
    try:
        return _read_folder(path, training)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}. With several ranks, all of them have to see its folder."
        ) from error
    except Exception as error:
        # torch may replace a Ctrl-C in the middle of a load by an error of its own. It is no error of the file.
        interrupt = interrupt_in(error)
        if interrupt is not None:
            raise interrupt from None
        raise CheckpointError(
            f"{path} is not damaged, but torch does not load it with weights_only=True: "
            f"{brief(error).splitlines()[0]} Without weights_only it could run code, so it is not loaded."
        ) from error


def _read_folder(folder: str, training: TrainingState | None) -> Entries:
    """Return the entries of the checkpoint ``folder``, with the shards that this rank of ``training`` loads.

    Without ``training``, and for parts that are not sharded in it, tensors are whole. Tensors of modules, which loading
    copies, are read from the file when they are used, and so is everything without ``training``.
    """
    saved, parts = _read_file(folder, 0), {} if training is None else parts_of(training)
    if training is not None:
        # Objects other than modules may keep the tensors that they load, as optimizers do. Those must not stay in the
        # mapped file: if another process cuts the file short later, the system ends this process when it reads there.
        kept = [value for name, value in saved.items() if not isinstance(parts.get(name), torch.nn.Module)]
        _move_to_memory(kept, {})
    if "sharded" not in saved:
        return saved
    names, size = saved.pop("sharded"), read_manifest(folder)["world_size"]
    parts = {name: part for name, part in parts.items() if name in names}
    gradients = None if training is None else training.gradients
    parameters = [] if gradients is None else gradients.parameters()
    read_tensors(folder, saved, parts, {("sharded_gradients", str(i)): each for i, each in enumerate(parameters)})
    if size > 1:
        saved["ranks"] = [_read_file(folder, rank) for rank in range(1, size)]
    return saved


def _read_file(folder: str, rank: int) -> Entries:
    """Return what ``rank`` wrote into the checkpoint ``folder`` apart from shards; tensors stay in the mapped file."""
    path = os.path.join(folder, file_of_rank(rank))
    loaded: Entries = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return loaded


def _move_to_memory(tree: Tree, copies: dict[int, torch.UntypedStorage]) -> None:
    """Copy the tensors in ``tree`` from the mapped file, in place. What shares memory does so afterwards.

    ``copies`` has the memory that was copied, by address.
    """
    if isinstance(tree, dict):
        tree = tree.values()
    elif isinstance(tree, torch.Tensor):
        if tree.layout is not torch.strided or tree.is_quantized:
            # Some quantized tensors have no clone().
            tree.data = copy.deepcopy(tree.detach()) if tree.is_quantized else tree.detach().clone()
            return
        storage = tree.untyped_storage()
        if storage.data_ptr() not in copies:
            new = storage.clone()
            copies[storage.data_ptr()] = copies[new.data_ptr()] = new  # the second for a tensor that comes again
        moved = torch.empty(0, dtype=tree.dtype, device="cpu")
        tree.data = moved.set_(copies[storage.data_ptr()], tree.storage_offset(), tree.size(), tree.stride())
        return
    elif not isinstance(tree, (list, tuple, set)):
        return
    for value in tree:
        _move_to_memory(value, copies)
