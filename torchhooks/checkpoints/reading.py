"""Reading checkpoints without a Saver: the newest, the best, the metadata of one, all of its contents."""

from __future__ import annotations

import os
import zipfile
from typing import Any, cast

import torch

from torchhooks.checkpoints.files import Checkpoint, list_checkpoints, verify
from torchhooks.checkpoints.per_rank import load_part, read_folder
from torchhooks.checkpoints.state import SessionLike
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError, brief, interrupt_in
from torchhooks.common.log import logger

_Path = str | os.PathLike[str]


def latest_checkpoint(directory: _Path) -> str | None:
    """Return the path of the newest complete checkpoint in ``directory`` (``tf.train.latest_checkpoint``).

    The newest is the one written last, which after a return to an earlier state is not the one of the highest step.
    ``None`` if there is none. Unlike TensorFlow, which trusts its index, this checks that the file is complete.

    >>> with MonitoredTrainingLoop(step, model, optimizer, checkpoint_dir="run") as loop:
    ...     loss = loop.run(batches[0])
    saving a checkpoint of step 0 into run
    saving a checkpoint of step 1 into run
    >>> latest_checkpoint("run")
    'run/model.ckpt-1'

    Raises:
        CheckpointError: the folder cannot be read.
    """
    checkpoints = list_checkpoints(directory)
    return checkpoints[-1].path if checkpoints else None


def best_checkpoint(directory: _Path) -> str | None:
    """Return the path of the checkpoint in ``directory`` with the highest score, ``None`` if none has a score.

    Of equal scores the first counts. A BestCheckpointHook keeps its checkpoints in their own folder, ``"run/best"``.

    >>> saver = Saver()
    >>> with MonitoredLoop(step, model, optimizer) as loop:
    ...     for accuracy in [0.7, 0.9, 0.8]:
    ...         loss = loop.run(batches[0])
    ...         path = saver.save(loop.session, "run/model.ckpt", loop.global_step, score=accuracy)
    >>> best_checkpoint("run")
    'run/model.ckpt-2'

    Raises:
        CheckpointError: the folder cannot be read.
    """
    scored = scored_checkpoints(directory)
    return max(scored, key=lambda pair: pair[0])[1].path if scored else None


def scored_checkpoints(directory: _Path) -> list[tuple[float, Checkpoint]]:
    """Return the checkpoints in ``directory`` that have a score, each after its score, in the order of writing."""
    scored = [(_score(checkpoint.path), checkpoint) for checkpoint in list_checkpoints(directory)]
    return [(score, checkpoint) for score, checkpoint in scored if score is not None]


def read_metadata(path: _Path) -> dict[str, Any]:
    """Return the ``metadata`` of the loop that wrote the checkpoint at ``path``; ``{}`` if it had none.

    Needs no model, and reads no tensors of the checkpoint: the metadata can say which model to build for them.

    >>> metadata = {"width": 4}
    >>> with MonitoredTrainingLoop(step, model, optimizer, checkpoint_dir="run", metadata=metadata) as loop:
    ...     loss = loop.run(batches[0])
    saving a checkpoint of step 0 into run
    saving a checkpoint of step 1 into run
    >>> read_metadata(latest_checkpoint("run"))
    {'width': 4}

    Raises:
        CheckpointError: the file cannot be read, or is not a checkpoint.
    """
    try:
        saved = _read_without_tensors(os.fspath(path))
        if "global_step" not in saved:
            raise ValueError("it has no global_step")
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a checkpoint, or cannot be read: {brief(error).splitlines()[0]}"
        ) from error
    return cast("dict[str, Any]", saved.get("metadata", {}))


def read_checkpoint(path: _Path) -> dict[str, Any]:
    """Return the contents of the checkpoint at ``path``, a file or a folder, with whole tensors on the CPU.

    Raises:
        DamagedCheckpointError: it is not what was written.
        CheckpointError: it could run code.
    """
    return read_for(os.fspath(path))


def _read_without_tensors(path: str) -> dict[str, Any]:
    if os.path.isdir(path):
        return load_part(path, 0)  # only small data that is not sharded
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith("/data.pkl"):
                archive.read(name)  # raises if its checksum does not match, which torch does not compare with mmap
    return cast("dict[str, Any]", torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def _score(path: str) -> float | None:
    try:
        saved = _read_without_tensors(path)
    except Exception as error:
        logger.warning("%s is damaged, or cannot be read: %s. It is skipped.", path, brief(error).splitlines()[0])
        return None
    return saved.get("score")


def read_for(path: str, session: SessionLike | None = None) -> dict[str, Any]:
    """Return the contents of the checkpoint at ``path``, with the parts that this rank of ``session`` needs.

    Raises the errors of :func:`read_checkpoint`.
    """
    verify(path)
    return load_file(path, session)


def load_file(path: str, session: SessionLike | None = None) -> dict[str, Any]:
    """Return what :func:`read_for` does, without a check of the checksum."""
    try:
        if os.path.isdir(path):
            return read_folder(session, path)
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except DamagedCheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}. With several ranks, all of them have to see its folder."
        ) from error
    except Exception as error:
        interrupt = interrupt_in(error)
        if interrupt is not None:
            raise interrupt from None
        raise CheckpointError(
            f"{path} is not damaged, but torch does not load it with weights_only=True: "
            f"{brief(error).splitlines()[0]} Without weights_only it could run code, so it is not loaded."
        ) from error
    return saved
