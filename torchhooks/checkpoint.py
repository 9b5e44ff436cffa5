"""Saver: the whole state of a training into one file, and back.

    saver = Saver(max_to_keep=3)
    path = saver.save(session, "run/model.ckpt", session.global_step)       # "run/model.ckpt-700"
    saver.restore(session, path)
    saver.restore_latest(session, "run")                                    # the newest whole one

In the file, by name: ``"model"``, ``"optimizer"``, each entry of ``session.state`` under its own name, each entry of
``session.hooks`` as ``"hooks.<name>"``, ``"global_step"``, in ``"random"`` the states of the random numbers of Python,
NumPy and torch, in ``"position"`` how far the ``until_stop`` of the loop are in their data
(:mod:`torchhooks.position`), and in ``"score"`` how good the state is, if that was said.
``torch.load(path, weights_only=True)`` reads it without this library.

A checkpoint is loaded with ``weights_only=True``, always, so that no file can run code. What could not be loaded so is
refused when it is saved, with its name: a state is made of tensors, numbers, strings, bytes, ``None``, and torch's
dtypes, devices, layouts and sizes, in dicts, lists, tuples and sets. NumPy's numbers are saved as Python's.

How files are kept whole, ordered and found again is in :mod:`torchhooks.checkpoint_files`.
"""

from __future__ import annotations

import errno
import math
import operator
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import NoneType
from typing import Any, BinaryIO, cast

import numpy as np
import torch

from torchhooks.checkpoint_files import (
    Checkpoint,
    Disk,
    Folder,
    Retention,
    Sink,
    has_checkpoints,
    latest_checkpoint,
    list_checkpoints,
    verify,
)
from torchhooks.errors import CheckpointError, DamagedCheckpointError, add_note, brief
from torchhooks.log import logger
from torchhooks.randomness import random_states, set_random_states
from torchhooks.readback import DeviceEvent, copiers
from torchhooks.stateful import Stateful, has_state
from torchhooks.text import call_repr, shortened
from torchhooks.timer import seconds

Session = Any

__all__ = ["Checkpoint", "Saver", "best_checkpoint", "latest_checkpoint", "list_checkpoints", "scored_checkpoints"]

_OWN = ("global_step", "position", "random", "score")
_RESERVED = ("model", "optimizer", *_OWN)
_HOOKS = "hooks."
_Path = str | os.PathLike[str]


class Saver:
    """Writes checkpoints, reads them, and removes the old ones (``tf.train.Saver``).

    A checkpoint is there whole or not at all, whenever the process is killed; older ones are removed only once it is.
    Those that an earlier process wrote to the folder count.

    Unlike TensorFlow, the hours between those kept for good go on when the training is resumed, and checkpoints of
    another name in the same folder are counted by themselves.

    Args:
        max_to_keep: how many checkpoints of one name stay in a folder; ``None`` or 0: all of them.
        keep_checkpoint_every_n_hours: of those to be removed, keep one for good each time so many hours have passed.
        async_save: ``save`` copies the state to the CPU's memory and returns; the file is written behind. An error of
            that comes out of the next call. The memory, one copy of the state, is kept for the next save until
            :meth:`close`, which has to be called at the end. For what is on a CUDA device it is pinned, which torch
            rounds up to a power of two for each tensor, and nobody waits for the device but the thread that writes.
        strict: whether a checkpoint that does not fit the training is an error; otherwise what fits is loaded, and the
            rest named in a warning.
    """

    def __init__(
        self,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        *,
        async_save: bool = False,
        strict: bool = True,
    ) -> None:
        self._retention = _checked_retention(max_to_keep, keep_checkpoint_every_n_hours)
        self._async_save = async_save
        self._strict = strict
        self.disk = Disk()
        """What it writes through; a test puts another one here."""
        self._folders: dict[str, Folder] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._held: _Held = []

    def save(self, session: Session, path: _Path, global_step: int, *, score: float | None = None) -> str:
        """Write the state of ``session`` as it is now; the folder is made if this is its first checkpoint.

        With ``async_save`` it first waits for the one before, so that there is one copy of the state at a time. If that
        one failed, its error is raised here, and this one is written all the same.

        Args:
            session: what to save.
            path: of the checkpoint, without the step: ``"run/model.ckpt"``.
            global_step: the number that the checkpoint goes by.
            score: how good the state is, more is better: what :func:`best_checkpoint` goes by.

        Returns:
            Where it is, or will be: ``"run/model.ckpt-700"``.

        Raises:
            CheckpointError: it could not be written, or something in the state cannot be saved. The older checkpoints
                are as they were.
        """
        prefix, step = _checked_path(path), _checked_step(global_step)
        earlier = self._finish()
        try:
            snapshot = _Snapshot(self._held) if self._async_save else None
            self._held = []  # until this snapshot is whole: after an error, copies may still be on their way there
            state = _collect(session, _as_it_is if snapshot is None else snapshot)
            if score is not None:
                state["score"] = float(score)
            self._start(state, snapshot, prefix, step)
        except Exception as error:
            if earlier is not None:
                add_note(error, f"The checkpoint before it was not written either: {brief(earlier)}")
            raise
        if earlier is not None:
            raise earlier
        return f"{prefix}-{step}"

    def restore(self, session: Session, path: _Path) -> None:
        """Load the checkpoint at ``path``, which a ``save`` returned; everything is checked before anything is loaded.

        Tensors go where those of the session are, whatever device they were saved from. Random states are set too, on
        as many CUDA devices as there are.

        Raises:
            DamagedCheckpointError: the file is not what was written. :meth:`restore_latest` then takes an older one.
            CheckpointError: it does not fit the training, or could run code.
        """
        self.wait()
        self._restore(session, os.fspath(path))

    def restore_latest(self, session: Session, directory: _Path) -> str | None:
        """Load the newest checkpoint in ``directory`` that is whole; each one that is not is named in a warning.

        Returns:
            The path of the one that was loaded, ``None`` if the folder has none.

        Raises:
            CheckpointError: there are checkpoints, and none of them is whole; or the newest whole one does not fit.
        """
        self.wait()
        for checkpoint in reversed(list_checkpoints(directory)):
            try:
                self._restore(session, checkpoint.path)
            except DamagedCheckpointError as error:
                logger.warning("%s It is skipped.", error)
            else:
                return checkpoint.path
        if has_checkpoints(directory):
            raise CheckpointError(
                f"{os.fspath(directory)} has checkpoints, but none that is whole; the log says what is wrong with each."
                " To start over, move them away, or choose another folder."
            )
        return None

    def wait(self) -> None:
        """Return once nothing is being written any more; raise the error of what was."""
        error = self._finish()
        if error is not None:
            raise error

    def close(self) -> None:
        """:meth:`wait`, and let go of the memory for copies. It may be called again, and so may ``save``."""
        try:
            self.wait()
        finally:
            self._held = []

    def _start(self, state: dict[str, Any], snapshot: _Snapshot | None, prefix: str, step: int) -> None:
        folder, name = os.path.split(os.path.abspath(prefix))
        if snapshot is None:
            self._write(state, folder, name, step)
            return
        self._held = snapshot.end()
        gate = threading.Lock()
        # Not a daemon: at the end of the process Python waits for it.
        self._thread = threading.Thread(
            target=self._write_behind, args=(gate, snapshot, state, folder, name, step), name=f"save {name}-{step}"
        )
        with gate:  # at which it stops: otherwise start() returns only when Python next changes threads, 5 ms later
            self._thread.start()

    def _write_behind(self, gate: threading.Lock, snapshot: _Snapshot, *args: Any) -> None:
        try:
            with gate:
                pass
            snapshot.wait()
            self._write(*args)
        except BaseException as error:
            self._error = error

    def _write(self, state: dict[str, Any], folder: str, name: str, step: int) -> None:
        writer = self._folders.setdefault(folder, Folder(folder, self.disk))
        try:
            writer.add(name, step, partial(_save, state), self._retention)
        except (OSError, RuntimeError) as error:
            raise _not_written(os.path.join(folder, f"{name}-{step}"), error) from error

    def _finish(self) -> BaseException | None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def _restore(self, session: Session, path: str) -> None:
        saved = _read(path)
        parts = _parts(session)
        for name in getattr(session, "hooks_elsewhere", ()):
            saved.pop(f"{_HOOKS}{name}", None)
        states, misfits = _compare(parts, saved)
        if misfits:
            report = "\n  ".join([f"{path} does not fit this training:", *misfits])
            if self._strict:
                raise CheckpointError(f"{report}\nMake them fit, or load what fits with Saver(strict=False).")
            logger.warning("%s\nThe rest is loaded.", report)
        position = getattr(session, "position", None)
        for name, state in states.items():
            if position is None or not position.iterates(parts[name]):
                self._load(name, parts[name], state, path)
        session.global_step = saved["global_step"]
        set_random_states(saved["random"])
        if position is not None:
            position.load_state_dict(saved.get("position"), saved["random"])

    def _load(self, name: str, part: Stateful, state: Any, path: str) -> None:
        try:
            if isinstance(part, torch.nn.Module):
                part.load_state_dict(state, strict=self._strict)
            else:
                part.load_state_dict(state)
        except BaseException as error:
            add_note(error, f"while loading {name!r} from {path}; what was loaded before it stays loaded")
            raise

    def __repr__(self) -> str:
        max_to_keep, every_n_hours = self._retention
        return call_repr(
            self,
            max_to_keep=max_to_keep,
            keep_checkpoint_every_n_hours=every_n_hours,
            async_save=self._async_save,
            strict=self._strict,
        )


def best_checkpoint(directory: _Path) -> str | None:
    """The path of the checkpoint in ``directory`` with the highest score, ``None`` if there is none with a score.

    Of equal ones it is the first. A BestCheckpointHook keeps them in a folder of their own: ``"run/best"``.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    scored = scored_checkpoints(directory)
    return max(scored, key=lambda pair: pair[0])[1].path if scored else None


def scored_checkpoints(directory: _Path) -> list[tuple[float, Checkpoint]]:
    """The whole checkpoints in ``directory`` that were saved with a score, with it, in the order of writing."""
    scored = [(_score(checkpoint.path), checkpoint) for checkpoint in list_checkpoints(directory)]
    return [(score, checkpoint) for score, checkpoint in scored if score is not None]


def _score(path: str) -> float | None:
    try:
        # Mapped into memory, so that no tensor is read.
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        logger.warning("%s is damaged, or cannot be read: %s. It is skipped.", path, brief(error).splitlines()[0])
        return None
    return cast("float | None", saved.get("score"))


def _checked_retention(max_to_keep: int | None, every_n_hours: float | None) -> Retention:
    number = _whole_number(0 if max_to_keep is None else max_to_keep)
    if number is None:
        raise ValueError(f"max_to_keep={max_to_keep!r}: must be a whole number, 1 or more; None or 0 keeps all")
    if every_n_hours is not None and not 0 < seconds(every_n_hours, "keep_checkpoint_every_n_hours") < math.inf:
        raise ValueError(f"keep_checkpoint_every_n_hours={every_n_hours!r}: must be more than 0; None is never")
    return Retention(max_to_keep, every_n_hours)


def _checked_path(path: _Path) -> str:
    prefix = os.fspath(path)
    name = os.path.basename(prefix)
    if not name or name.startswith("."):
        raise ValueError(f"path={path!r}: must end in a name that does not begin with a dot, as 'run/model.ckpt' does")
    return prefix


def _checked_step(global_step: int) -> int:
    step = _whole_number(global_step)
    if step is None:
        raise ValueError(f"global_step={global_step!r}: must be a whole number, 0 or more")
    return step


def _whole_number(value: int) -> int | None:
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return None if number < 0 or isinstance(value, bool) else number


_WAYS_OUT = {
    errno.ENOSPC: "Free some space, or keep fewer with max_to_keep.",
    errno.EDQUOT: "Free some space, or keep fewer with max_to_keep.",
    errno.EFBIG: "Raise the limit on the size of files, or save less.",
    errno.EACCES: "Make the folder writable, or choose another.",
    errno.EPERM: "Make the folder writable, or choose another.",
    errno.EROFS: "Choose a folder that can be written to.",
    errno.ENOENT: "The folder is gone, with the checkpoints in it: put it back, or choose another.",
    errno.EEXIST: "A file has the name that a folder should have: choose another path.",
    errno.ENOTDIR: "A file has the name that a folder should have: choose another path.",
    errno.EISDIR: "A folder has the name that the checkpoint should have: choose another path.",
}


def _save(state: dict[str, Any], sink: Sink) -> None:
    sums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # by default they are on; damage is found by them
    try:
        torch.save(state, cast(BinaryIO, sink))
    finally:
        torch.serialization.set_crc32_options(sums)


def _not_written(path: str, error: OSError | RuntimeError) -> CheckpointError:
    if not isinstance(error, OSError):
        return CheckpointError(f"{path} was not written: {error}")
    way_out = _WAYS_OUT.get(error.errno or 0, "The older checkpoints are as they were.")
    return CheckpointError(f"{path} was not written: {error.strerror or error}. {way_out}")


def _parts(session: Session) -> dict[str, Stateful]:
    """What is saved, by the name that it goes by in the file."""
    parts: dict[str, Any] = {}
    if session.model is not None:
        parts["model"] = session.model
    if session.optimizer is not None:
        parts["optimizer"] = session.optimizer
    for name, part in session.state.items():
        if name in _RESERVED or name.startswith(_HOOKS):
            raise CheckpointError(f"state[{name!r}]: this name has a meaning in a checkpoint. Give it another one.")
        parts[name] = part
    parts |= {f"{_HOOKS}{name}": hook for name, hook in getattr(session, "hooks", {}).items()}
    for name, part in parts.items():
        if not has_state(part):
            raise CheckpointError(
                f"{name!r} is {_a(part)}, without state_dict() and load_state_dict(): add them, or leave it out."
            )
    return parts


def _collect(session: Session, take: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """The state of everything, made of what can be loaded again."""
    plain = _Plain(take)
    state: dict[str, Any] = {}
    for name, part in _parts(session).items():
        try:
            own = part.state_dict()
        except BaseException as error:
            add_note(error, f"while saving {name!r}")
            raise
        state[name] = plain(own, (name,))
    position = getattr(session, "position", None)
    where = None if position is None else position.state_dict()
    if where is not None:
        state["position"] = {**where, "loaders": plain(where["loaders"], ("position", "loaders"))}
    if plain.problems:
        raise CheckpointError(
            f"This cannot be saved, because loading it again could run code: {shortened(plain.problems, 8)}. Let "
            "state_dict() give tensors, numbers, strings and None, in dicts, lists, tuples and sets."
        )
    return {**state, "global_step": session.global_step, "random": random_states()}


# Exactly these: what torch's unpickler for weights_only takes in every version from 2.6 on. A subclass is another type.
_LEAVES = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout}
)
_CONTAINERS = frozenset({dict, OrderedDict, Counter, list, tuple, set, bytearray})
_MOST_BITS = 2000  # torch reads integers of at most 255 bytes


class _Plain:
    """Copies what can be loaded again, container by container, and lists what cannot in ``problems``."""

    def __init__(self, take: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.problems: list[str] = []
        self._take = take
        self._inside: set[int] = set()

    def __call__(self, value: Any, keys: tuple[Any, ...]) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        problem = _problem(value)
        if problem is None and id(value) in self._inside:
            problem = "part of itself"
        if problem is not None:
            self.problems.append(f"{keys[0]}{''.join(f'[{key!r}]' for key in keys[1:])} is {problem}")
            return None
        if isinstance(value, torch.Tensor):
            return self._take(value)
        return self._container(value, keys) if type(value) in _CONTAINERS else value

    def _container(self, value: Any, keys: tuple[Any, ...]) -> Any:
        self._inside.add(id(value))
        try:
            if isinstance(value, dict):
                return self._dict(value, keys)
            return type(value)([self(item, (*keys, place)) for place, item in enumerate(value)])
        finally:
            self._inside.discard(id(value))

    def _dict(self, value: dict[Any, Any], keys: tuple[Any, ...]) -> dict[Any, Any]:
        copy = type(value)()
        for key, item in value.items():
            copy[self(key, (*keys, key))] = self(item, (*keys, key))
        if isinstance(value, OrderedDict):  # a module's has its version in an attribute, _metadata
            vars(copy).update(self._dict(vars(value), keys))
        return copy


def _problem(value: Any) -> str | None:
    """Why ``value`` could not be loaded again; ``None`` if it can, as far as it goes without what is in it."""
    if isinstance(value, torch.Tensor):
        return _tensor_problem(value)
    if type(value) is int and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length()} bits, torch reads up to {_MOST_BITS}"
    if type(value) is bytes and not value:
        return "empty bytes, which torch does not read: give None"
    if isinstance(value, np.ndarray):
        return "a NumPy array: give torch.from_numpy() of it"
    return None if type(value) in _LEAVES or type(value) in _CONTAINERS else _a(value)


def _tensor_problem(tensor: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "without a shape yet: make a run first"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"{_a(tensor)}, a subclass of Tensor: give a plain one"
    return "on the meta device, where it has no values" if tensor.is_meta else None


def _a(value: object) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg()


_Held = list[tuple[tuple[torch.device, int], torch.UntypedStorage]]  # memory, and where and how large its original is
_PIECE = 1 << 22  # bytes


class _Snapshot:
    """Copies tensors to the CPU, with the values of now; those that share memory share it in the copy.

    Args:
        held: what the snapshot before this one had returned from :meth:`end`. Its memory is used again, place by place
            in the order of the state: the system takes longer to provide memory than to copy.
    """

    def __init__(self, held: _Held) -> None:
        self._held = held
        # With the originals: where a temporary one is freed, another one may come to lie.
        self._copies: dict[tuple[torch.device, int, int], tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._pieces: list[tuple[np.ndarray, np.ndarray]] = []  # of copies and originals, both on the CPU
        self._events: list[DeviceEvent] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = _as_it_is(tensor)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return tensor.to("cpu", copy=True)  # waits for the device
        storage = tensor.untyped_storage()
        where = (storage.device, storage.data_ptr(), storage.nbytes())
        if where not in self._copies:
            self._copies[where] = storage, self._copy_of(storage)
        copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return copy.set_(self._copies[where][1], tensor.storage_offset(), tensor.size(), tensor.stride())

    def end(self) -> _Held:
        """All has been asked for; returns the memory. Copies from devices may still be on their way into it."""
        _copy(self._pieces)
        self._pieces.clear()
        del self._held[len(self._copies) :]
        devices = {storage.device for storage, _ in self._copies.values()}
        self._events = [copiers[device.type].event(device) for device in devices if device.type in copiers]
        return self._held

    def wait(self) -> None:
        """Return once all copies are there. Waits for the device."""
        for event in self._events:
            event.wait()
        self._copies.clear()

    def _copy_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        place, like, kind = len(self._copies), (storage.device, storage.nbytes()), storage.device.type
        if [kept for kept, _ in self._held[place : place + 1]] != [like]:
            self._held[place : place + 1] = []  # goes before the other comes
            memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=kind == "cuda")
            self._held.insert(place, (like, memory.untyped_storage()))
        copy = self._held[place][1]
        if kind == "cpu" and kind not in copiers:
            to, of = _bytes(copy), _bytes(storage)
            self._pieces += [(to[at : at + _PIECE], of[at : at + _PIECE]) for at in range(0, len(of), _PIECE)]
        else:
            # Not waited for where streams keep the order: what the next step does to the original comes after this.
            copy.copy_(storage, non_blocking=kind in copiers)
        return copy


def _bytes(storage: torch.UntypedStorage) -> np.ndarray:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


def _copy(pieces: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Fill the first of each pair from the second, in as many threads as torch has for one operator.

    Each takes a next piece when it is done with one. In torch's own copy every thread waits for all others at every
    tensor, which takes several times as long when another process, as one that loads data, has one of the cores.
    """
    left = iter(pieces)

    def work() -> None:
        for to, of in left:
            np.copyto(to, of)  # lets go of the interpreter

    number = min(torch.get_num_threads(), sum(len(of) for _, of in pieces) // _PIECE)
    helpers = [threading.Thread(target=work) for _ in range(number - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()


def _read(path: str) -> dict[str, Any]:
    verify(path)
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} is whole, but torch does not load it with weights_only=True: {brief(error).splitlines()[0]} "
            "Loaded otherwise it could run code, so it is not."
        ) from error
    return saved


def _compare(parts: Mapping[str, Stateful], saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The states that can be loaded, by name, and what does not fit."""
    states = {name: saved[name] for name in parts if name in saved}
    misfits = [
        *_listing("missing in the file", (name for name in parts if name not in saved)),
        *_listing("in the file only", (name for name in saved if name not in parts and name not in _OWN)),
    ]
    for name, state in list(states.items()):
        part = parts[name]
        if isinstance(part, torch.nn.Module):
            misfits += [f"{name}: {misfit}" for misfit in _compare_module(part, state)]
        elif isinstance(part, torch.optim.Optimizer) and (misfit := _compare_groups(part, state)):
            misfits.append(f"{name}: {misfit}")
            del states[name]
    return states, misfits


def _compare_module(module: torch.nn.Module, state: dict[str, Any]) -> list[str]:
    """What does not fit; tensors of another shape are taken out of ``state``, for torch never loads them."""
    if any(getattr(part, "_load_state_dict_pre_hooks", None) for part in module.modules()):
        return []  # it rewrites what it loads, so torch has to judge
    own = module.state_dict()
    reshaped = {key: (_shape(state[key]), _shape(own[key])) for key in own if key in state}
    reshaped = {key: shapes for key, shapes in reshaped.items() if shapes[0] != shapes[1]}
    misfits = [
        *_listing("missing in the file", (key for key in own if key not in state)),
        *_listing("in the file only", (key for key in state if key not in own)),
    ]
    if reshaped:
        shown = [f"{key!r} {ours} instead of {theirs}" for key, (theirs, ours) in reshaped.items()]
        misfits.append(f"of another shape than in the file: {shortened(shown)}")
    for key in reshaped:
        del state[key]
    return misfits


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _compare_groups(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str | None:
    saved = [len(group["params"]) for group in state["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if saved == own:
        return None
    return f"has groups of {own} parameters, in the file they are of {saved}"


def _listing(what: str, names: Iterable[str]) -> list[str]:
    listed = [repr(name) for name in names]
    return [f"{what}: {shortened(listed)}"] if listed else []
