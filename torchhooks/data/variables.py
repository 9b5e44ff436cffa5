"""Variables: the script's own variables, as one object that a checkpoint can hold."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchhooks.common.digests import TooManyValuesError, digests
from torchhooks.common.errors import CheckpointError, brief
from torchhooks.common.log import logger
from torchhooks.common.stateful import PlainCopy, deep_copy
from torchhooks.common.text import call_repr, shortened, shown

_PROTOCOL = 4  # every supported version of Python reads it
_ALWAYS_PLAIN = frozenset({float, bool, type(None)})  # a fast path for what is assigned in every step


class Variables:
    """A namespace for the script's own variables, which are in every checkpoint.

    A variable is plain data or a tensor. Plain data are ``None``, numbers, strings and bytes, and lists, tuples, dicts
    and sets of plain data and tensors. An object of another type is refused when it is assigned, or when the checkpoint
    is saved if the script has put it into a list or a dict. NumPy numbers come back as Python numbers.

    >>> vars = Variables(best=float("inf"), hidden=None)
    >>> saver = CheckpointSaverHook("run", save_steps=100)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[saver], state={"vars": vars}, checkpoint_dir="run") as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         vars.best = min(vars.best, loop.run(inputs).item())
    saving a checkpoint of step 0 into run
    saving a checkpoint of step 8 into run

    Variables named in ``pickled`` may be any objects that Python can pickle, such as an environment of reinforcement
    learning. **Unpickling runs code**, so restore such checkpoints only from sources that you trust. They are bytes in
    the checkpoint, which only a Variables object unpickles that names all of them.

    A restore replaces the variables, but for those that have the value of the checkpoint. So read ``vars.hidden`` where
    it is used. Variables that only the script has keep their value, and a log line names them. A tensor returns to the
    device that it was on. Each rank has variables of its own.

    Args:
        pickled: the names of the variables to pickle. They need not be set yet.
        variables: the variables and their first values.

    Raises:
        TypeError: a value is neither plain data nor a tensor, and not named in ``pickled``; or a tensor requires a
            gradient.
        ValueError: a name begins with an underscore, or the class uses it.
        CheckpointError: from a save or a restore, a variable cannot be pickled or unpickled, or is pickled in the
            checkpoint and not named in ``pickled``.
    """

    # With slots for the private attributes, __dict__ has the variables of the script and nothing else.
    __slots__ = ("__dict__", "__weakref__", "_pickled", "_unchanged")

    per_rank = True
    """Each rank has variables of its own."""

    def __init__(self, /, *, pickled: Iterable[str] = (), **variables: Any) -> None:
        names = [pickled] if isinstance(pickled, str) else list(pickled)
        if isinstance(pickled, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"pickled={shown(pickled)}: must be a list of names, such as ['envs']")
        self._pickled = names
        # The pickled bytes that were loaded, and the bytes that the same objects had right after that.
        self._unchanged: tuple[bytes, bytes] | None = None
        for name in self._pickled:
            _check_name(name)
        for name, value in variables.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in Variables.__slots__:
            if name not in self.__dict__:
                _check_name(name)
            if type(value) not in _ALWAYS_PLAIN and name not in self._pickled:
                _check_value(name, value)
        object.__setattr__(self, name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the variables by name, the pickled ones as bytes, and the accelerators that tensors were on.

        Raises:
            CheckpointError: a variable cannot be pickled.
        """
        state = {name: value for name, value in self.__dict__.items() if name not in self._pickled}
        devices = {name: device for name, value in state.items() if (device := _accelerator(value)) is not None}
        if devices:
            state["_devices"] = devices
        if objects := self._objects():
            # The memory of a bytes object is read-only, and torch.from_numpy() warns of that, so it is copied.
            data = np.frombuffer(_pickled(objects), dtype=np.uint8).copy()
            state["_pickled"] = {"names": list(objects), "bytes": torch.from_numpy(data)}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Set the variables to the values in ``state_dict``, all of them or none.

        Raises:
            CheckpointError: a variable is pickled in it that is not named in ``pickled``, or cannot be unpickled.
        """
        state = dict(state_dict)
        devices, saved = state.pop("_devices", {}), state.pop("_pickled", None)
        # First, because this may raise. The variables are set in the last line, so an error leaves all of them as they
        # are.
        objects = {} if saved is None else self._unpickled(saved["names"], saved["bytes"].numpy().tobytes())
        # In one call, so that tensors that share memory do so again.
        new = deep_copy({name: value for name, value in state.items() if not self._has(name, value)})
        for name, value in new.items():
            device = _accelerator(self.__dict__.get(name)) or devices.get(name)
            new[name] = value if device is None else _moved(name, value, device)
        unknown = [repr(name) for name in self.__dict__ if name not in state and name not in objects]
        if unknown:
            logger.info("the checkpoint has no variable %s: the value that the script gave stays", shortened(unknown))
        self.__dict__.update(new | objects)

    def _has(self, name: str, value: Any) -> bool:
        if name not in self.__dict__:
            return False
        try:
            # By contents, so that a variable with the same value stays the object that other code of the script refers
            # to. Two dicts are equal for Python in any order, and the script may iterate over them.
            mine, theirs = digests([self.__dict__[name], value], ordered=True)
        except TooManyValuesError:
            return False
        return mine == theirs

    def _objects(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self._pickled if name in self.__dict__}

    def _unpickled(self, names: list[str], data: bytes) -> dict[str, Any]:
        unnamed = [name for name in names if name not in self._pickled]
        if unnamed:
            # All are in the same bytes, so none can be unpickled without the others.
            raise CheckpointError(
                f"the checkpoint has pickled variables, {shortened(unnamed)}, and to unpickle them could run code: if "
                f"you trust the checkpoint, name them, Variables(pickled={[*self._pickled, *unnamed]!r})"
            )
        objects = self._objects()
        # A resumed script loads the same bytes twice. If nothing has changed the objects since, they stay the same
        # objects. Two pickles of equal objects need not have the same bytes, so the pickle after the load is the one to
        # compare.
        if self._unchanged is not None and self._unchanged == (data, _pickled(objects)):
            return objects
        try:
            new: dict[str, Any] = pickle.loads(data)
        except Exception as error:
            raise CheckpointError(
                f"the variables {shortened(names)} cannot be unpickled: {brief(error)}. Their classes and modules have "
                "to be those with which the checkpoint was saved"
            ) from error
        self._unchanged = data, _pickled({name: new[name] for name in self._pickled if name in new})
        return new

    def __repr__(self) -> str:
        return call_repr(self, **self.__dict__, **({"pickled": self._pickled} if self._pickled else {}))


def _check_name(name: str) -> None:
    if not name.isidentifier() or name.startswith("_"):
        raise ValueError(f"{name!r}: the name of a variable must be an identifier that does not begin with _")
    if name == "pickled" or hasattr(Variables, name):
        raise ValueError(f"{name!r}: Variables uses this name itself. Choose another one")


def _check_value(name: str, value: Any) -> None:
    tensors: list[torch.Tensor] = []
    check = PlainCopy(_noting(tensors))
    check(value, (name,))
    if check.problems:
        raise TypeError(
            f"the variable {shortened(check.problems)}: keep plain data and tensors, or name it in "
            f"Variables(pickled=[{name!r}]), which pickles it"
        )
    if any(tensor.requires_grad for tensor in tensors):
        raise TypeError(f"the variable {name} has a tensor that requires a gradient: assign tensor.detach()")


def _noting(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    return note


def _accelerator(value: Any) -> str | None:
    """Return the accelerator that the first tensor in ``value`` is on; ``None`` if it is on the CPU."""
    tensors: list[torch.Tensor] = []
    PlainCopy(_noting(tensors))(value, ("",))
    return str(tensors[0].device) if tensors and tensors[0].device.type != "cpu" else None


def _moved(name: str, value: Any, device: str) -> Any:
    """Return ``value`` with its tensors on ``device``, or on the current one of its kind; as it is if there is none."""
    for each in (device, device.partition(":")[0]):
        try:
            torch.empty(0, device=each)
        except (AssertionError, RuntimeError):  # torch has no CUDA, or there is no such device
            continue
        return PlainCopy(partial(torch.Tensor.to, device=each))(value, (name,))
    logger.warning("this process has no device %s: the variable %s is on the CPU now", device, name)
    return value


def _pickled(objects: Mapping[str, Any]) -> bytes:
    """Return ``objects`` pickled together, so that what two of them share is shared again."""
    try:
        return pickle.dumps(dict(objects), protocol=_PROTOCOL)
    except Exception as error:
        raise CheckpointError(
            f"the variables {shortened(list(objects))} cannot be pickled: {brief(error)}. Have their classes define "
            "__getstate__() and __setstate__(), which leave out what cannot be pickled"
        ) from error
