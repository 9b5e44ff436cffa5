"""Variables: the script's own variables, as one object that a checkpoint can hold.

The state is a dict of the variables by name, which ``torch.load(path, weights_only=True)`` reads. Plain data and
tensors are in it as they are. What torch does not read that way is written as a dict with the key ``"torchhooks"``,
which says what it is:

* ``{"torchhooks": "ndarray", "value": tensor}``: a NumPy array, and ``"scalar"`` a NumPy scalar;
* ``{"torchhooks": "tensor", "value": tensor, "device": "cuda:0"}``: a tensor that was not on the CPU;
* ``{"torchhooks": "dict", "value": [(key, value), ...]}``: a dict that could be taken for one of these, or one with
  keys that cannot be written as they are;
* ``{"torchhooks": "set", "value": [...]}``: a set with items that cannot be written as they are;
* ``{"torchhooks": "bytes"}``: empty bytes.

``"pickled"`` has the names of the variables that were pickled, and their bytes in one tensor. So an object to which two
of them refer is one object again.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch

from torchhooks.common.errors import CheckpointError, brief
from torchhooks.common.log import logger
from torchhooks.common.stateful import has_state
from torchhooks.common.text import call_repr, did_you_mean, shortened, shown

_TAG = "torchhooks"
_LEAVES = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout}
)
_CONTAINERS = frozenset({list, tuple, dict, set})
_MOST_BITS = 2000  # torch reads integers of at most 255 bytes
_PROTOCOL = 4  # every supported version of Python reads it


class _Problem(NamedTuple):
    """Why a variable cannot be saved as it is."""

    where: str
    """Where in the variable, such as ``"[3]['when']"``; ``""`` for the variable itself."""
    what: str
    way_out: str
    """With ``{name}`` for the name of the variable."""


_PICKLE = ': name it in Variables(pickled=["{name}"]), which pickles it, or keep plain data'
_STATE = ': pass it to the loop, state={{"{name}": ...}}'


class Variables:
    """A namespace for the script's own variables, which are in every checkpoint.

    >>> vars = Variables(best=float("inf"), hidden=None)
    >>> saver = CheckpointSaverHook("run", save_steps=8)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[saver], state={"vars": vars}, checkpoint_dir="run") as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         vars.best = min(vars.best, loop.run(inputs).item())
    saving a checkpoint of step 0 into run
    saving a checkpoint of step 8 into run
    >>> restarted = Variables(best=float("inf"), hidden=None)
    >>> with MonitoredLoop(step, model, optimizer, state={"vars": restarted}, checkpoint_dir="run") as loop:
    ...     restarted.best == vars.best
    restored step 8 from run/model.ckpt-8
    True

    A variable is plain data or a tensor. Plain data are ``None``, ``bool``, ``int``, ``float``, ``complex``, ``str``,
    ``bytes``, NumPy scalars and arrays, and lists, tuples, dicts and sets of plain data and tensors. A value of another
    type is refused when it is assigned, and an object that the script puts into a list or a dict later, when the
    checkpoint is saved. A tensor that requires a gradient is refused too: assign ``hidden.detach()``. New variables may
    be set at any time.

    Variables named in ``pickled`` may be any objects that Python can pickle, such as an environment of reinforcement
    learning with its generator:

    >>> import random
    >>> vars = Variables(dice=random.Random(0), pickled=["dice"])
    >>> path = Saver().save(Session(state={"vars": vars}), "run/model.ckpt", 100)
    >>> rolled = vars.dice.randint(1, 6)
    >>> Saver().restore(Session(state={"vars": vars}), path)
    >>> vars.dice.randint(1, 6) == rolled
    True

    **Unpickling runs code.** With ``pickled``, restore only checkpoints from sources that you trust. The pickled
    variables are bytes in a checkpoint: ``torch.load(path, weights_only=True)`` reads it without unpickling them. Only
    a Variables object that names all of them in ``pickled`` unpickles them; for another one, the restore fails.

    A restore replaces the variables. So read ``vars.env`` where it is used, and keep no other reference to it. A
    variable that has the value of the checkpoint stays the object that it is. Variables that only the checkpoint has
    are set. Variables that only the script has, such as variables that were added to it later, keep their value, and a
    log line names them. A tensor returns to the device that it was on, or to the device of the tensor which it
    replaces, if this one is on an accelerator.

    With several ranks, each rank has variables of its own. If another number of ranks restores the checkpoint, the
    variables keep the values that the script gave them, and a warning says so.

    Args:
        pickled: the names of the variables to pickle. They need not be set yet.
        variables: the variables and their first values.

    Raises:
        TypeError: a value is neither plain data nor a tensor, and not named in ``pickled``.
        ValueError: a name begins with an underscore, or the class uses it.
        CheckpointError: from a save or a restore, a variable can no longer be saved, cannot be pickled or unpickled, or
            is pickled in the checkpoint and not named in ``pickled``.
    """

    __slots__ = ("__dict__", "__weakref__", "_loaded", "_pickled")

    per_rank = True
    """Each rank has variables of its own."""

    def __init__(self, /, *, pickled: Iterable[str] = (), **variables: Any) -> None:
        names = [pickled] if isinstance(pickled, str) else list(pickled)
        if isinstance(pickled, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"pickled={shown(pickled)}: must be a list of names, such as ['envs']")
        for name in names:
            _check_name(name)
        self._pickled = names
        # Digests of the pickled bytes that were loaded, and of the same objects pickled again right after that.
        self._loaded: tuple[bytes, bytes] | None = None
        for name, value in variables.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in Variables.__slots__:
            if name not in self.__dict__:
                _check_name(name)
            if name not in self._pickled and (problem := _problem(value)) is not None:
                raise TypeError(_message(name, problem))
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        names = list(self.__dict__)
        hint = did_you_mean(name, names) or (f" There are {shortened(names)}." if names else "")
        raise AttributeError(f"there is no variable {name!r}.{hint}")

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the variables in a form that ``torch.load(path, weights_only=True)`` reads.

        Raises:
            CheckpointError: a variable is neither plain data nor a tensor, or cannot be pickled.
        """
        plain = {name: value for name, value in self.__dict__.items() if name not in self._pickled}
        problems = [(name, problem) for name, value in plain.items() if (problem := _problem(value)) is not None]
        if problems:
            raise CheckpointError("\n".join(_message(*problem) for problem in problems))
        state = {name: _encoded(value) for name, value in plain.items()}
        objects = self._objects()
        if objects:
            state["pickled"] = {"names": list(objects), "bytes": _tensor_of(_pickled(objects))}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Set the variables to the values in ``state_dict``, all of them or none.

        Raises:
            CheckpointError: a variable is pickled in it that is not named in ``pickled``, or cannot be unpickled.
        """
        state = dict(state_dict)
        objects = self._unpickled(state.pop("pickled", None))
        for name in state:
            _check_name(name)
        changed = {name: value for name, value in state.items() if not self._has(name, value)}
        # In one call, so that tensors that share memory do so again.
        new = {name: _decoded(value, self._device(name)) for name, value in copy.deepcopy(changed).items()}
        unknown = [name for name in self.__dict__ if name not in state and name not in objects]
        if unknown:
            logger.info(
                "the checkpoint has no variable %s: the value that the script gave stays",
                shortened([repr(name) for name in unknown]),
            )
        self.__dict__.update(new | objects)

    def _objects(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self._pickled if name in self.__dict__}

    def _unpickled(self, saved: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the objects that are pickled in ``saved``, or the script's own objects if they have not changed."""
        if saved is None:
            return {}
        unnamed = [name for name in saved["names"] if name not in self._pickled]
        if unnamed:
            # All are in the same bytes, so none can be unpickled without the others.
            way_out = f"Variables(pickled={[*self._pickled, *unnamed]!r})"
            raise CheckpointError(
                f"the checkpoint has pickled variables, {shortened(unnamed)}, and to unpickle them could run code: if "
                f"you trust the checkpoint, name them, {way_out}"
            )
        data = saved["bytes"].numpy().tobytes()
        digest, objects = _digest(data), self._objects()
        # The script may have taken vars.env out before an until_stop that restores what the code before it changed.
        is_same_set = self._loaded is not None and set(objects) == set(saved["names"])
        if is_same_set and self._loaded == (digest, _digest(_pickled(objects))):
            return objects
        try:
            new: dict[str, Any] = pickle.loads(data)
        except Exception as error:
            raise CheckpointError(
                f"the variables {shortened(saved['names'])} cannot be unpickled: {brief(error)}. Their classes and "
                "modules have to be those with which the checkpoint was saved"
            ) from error
        self._loaded = digest, _digest(_pickled({name: new[name] for name in self._pickled if name in new}))
        return new

    def _has(self, name: str, saved: Any) -> bool:
        """Return whether the variable ``name`` has the value ``saved`` already."""
        if name not in self.__dict__ or _problem(self.__dict__[name]) is not None:
            return False
        return _same(_encoded(self.__dict__[name]), saved)

    def _device(self, name: str) -> torch.device | None:
        """Return the accelerator that the script has put the tensor ``name`` on; ``None`` if it has not."""
        value = self.__dict__.get(name)
        return value.device if isinstance(value, torch.Tensor) and value.device.type != "cpu" else None

    def __repr__(self) -> str:
        pickled = {"pickled": self._pickled} if self._pickled else {}
        return call_repr(self, **self.__dict__, **pickled)


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise ValueError(f"{name!r}: the name of a variable must be an identifier that does not begin with _")
    if name == "pickled" or hasattr(Variables, name):
        raise ValueError(f"{name!r}: Variables uses this name itself. Choose another one")


def _message(name: str, problem: _Problem) -> str:
    return f"the variable {name}{problem.where} is {problem.what}{problem.way_out.format(name=name)}"


def _problem(value: Any, inside: tuple[int, ...] = ()) -> _Problem | None:
    """Return what in ``value`` could not be loaded again as it is, and where; ``None`` if all could."""
    kind = type(value)
    if kind in _LEAVES:
        if kind is int and value.bit_length() > _MOST_BITS:
            return _Problem("", f"an integer of {value.bit_length()} bits; torch reads up to {_MOST_BITS}", _PICKLE)
        return None
    if kind in _CONTAINERS:
        return _problem_inside(value, inside)
    if isinstance(value, torch.Tensor):
        return _tensor_problem(value)
    if isinstance(value, np.generic) or kind is np.ndarray:
        return None if _is_known(value.dtype) else _Problem("", f"of NumPy's dtype {value.dtype}", _PICKLE)
    if has_state(value):
        return _Problem("", f"{_type_of(value)}, which has a state of its own", _STATE)
    return _Problem("", f"{_type_of(value)}, neither plain data nor a tensor", _PICKLE)


def _problem_inside(container: Any, inside: tuple[int, ...]) -> _Problem | None:
    if id(container) in inside:
        return _Problem("", "part of itself", _PICKLE)
    inside = (*inside, id(container))
    if isinstance(container, dict):
        for key in container:
            if (problem := _problem(key, inside)) is not None:
                return problem._replace(where=f", in a key{problem.where},")
    for place, item in container.items() if isinstance(container, dict) else enumerate(container):
        if (problem := _problem(item, inside)) is not None:
            return problem._replace(where=f"[{shown(place)}]{problem.where}")
    return None


def _tensor_problem(tensor: torch.Tensor) -> _Problem | None:
    if tensor.requires_grad:
        return _Problem("", "a tensor that requires a gradient, which no checkpoint holds", ": assign tensor.detach()")
    if type(tensor) is not torch.Tensor:
        return _Problem("", f"{_type_of(tensor)}, a subclass of Tensor", ": assign a plain tensor")
    return _Problem("", "a tensor on the meta device", ", where it has no values") if tensor.is_meta else None


def _is_known(dtype: np.dtype[Any]) -> bool:
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):  # the second for another byte order
        return False
    return True


def _type_of(value: object) -> str:
    return "of type " + f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _encoded(value: Any) -> Any:
    """Return a copy of ``value``, in which :func:`_problem` has found none, of types that torch reads."""
    kind = type(value)
    if kind in _CONTAINERS:
        return _encoded_container(value)
    if isinstance(value, torch.Tensor):
        on_cpu = value.device.type == "cpu"
        return value if on_cpu else {_TAG: "tensor", "value": value, "device": str(value.device)}
    if isinstance(value, np.generic) or kind is np.ndarray:
        # A copy: torch does not count the changes of an array, and takes none that is read-only or reversed.
        return {_TAG: "ndarray" if kind is np.ndarray else "scalar", "value": torch.from_numpy(np.array(value))}
    return {_TAG: "bytes"} if kind is bytes and not value else value


def _encoded_container(value: Any) -> Any:
    if isinstance(value, dict):
        pairs = [(_encoded(key), _encoded(item)) for key, item in value.items()]
        readable = _TAG not in value and _are_plain(key for key, _ in pairs)
        return dict(pairs) if readable else {_TAG: "dict", "value": pairs}
    items = [_encoded(item) for item in value]
    if isinstance(value, set):
        return set(items) if _are_plain(items) else {_TAG: "set", "value": items}
    return type(value)(items)


def _are_plain(values: Iterable[Any]) -> bool:
    """Return whether keys or the items of a set are written as they are."""
    return all(_are_plain(value) if type(value) is tuple else type(value) in _LEAVES for value in values)


def _decoded(value: Any, device: torch.device | None) -> Any:
    """Return what :func:`_encoded` had got, with tensors on ``device`` unless that is ``None``."""
    if isinstance(value, torch.Tensor):
        return value if device is None else value.to(device)
    if isinstance(value, dict):
        if _TAG in value:
            return _decoded_tag(value, device)
        return {key: _decoded(item, device) for key, item in value.items()}
    if type(value) in _CONTAINERS:
        return type(value)([_decoded(item, device) for item in value])
    return value


def _decoded_tag(tagged: dict[str, Any], device: torch.device | None) -> Any:
    kind: str = tagged[_TAG]
    value: Any = tagged.get("value")
    if kind == "ndarray":
        return value.numpy()
    if kind == "scalar":
        return value.numpy()[()]
    if kind == "tensor":
        return _moved(value, tagged["device"]) if device is None else value.to(device)
    if kind == "dict":
        return {_decoded(key, device): _decoded(item, device) for key, item in value}
    return {_decoded(item, device) for item in value} if kind == "set" else b""


def _moved(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return ``tensor`` on the device ``name``, or on the current one of its kind; on the CPU if there is none."""
    for device in (name, name.partition(":")[0]):
        try:
            return tensor.to(device)
        except (AssertionError, RuntimeError):  # torch has no CUDA, or there is no such device
            pass
    logger.warning("this process has no device %s: a variable that was there is on the CPU now", name)
    return tensor


def _same(one: Any, other: Any) -> bool:
    """Return whether two results of :func:`_encoded` are the same, to the bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        # In the same order, too: a script may iterate over it.
        return list(one) == list(other) and all(_same(item, other[key]) for key, item in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return repr(one) == repr(other)  # NaN differs from itself, and 0.0 does not from -0.0


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return tensor  # torch compares its values, if it can
    return tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _pickled(objects: Mapping[str, Any]) -> bytes:
    """Return ``objects`` pickled together; raise a CheckpointError that names the object that cannot be."""
    try:
        return pickle.dumps(dict(objects), protocol=_PROTOCOL)
    except Exception as error:
        for name, value in objects.items():
            try:
                pickle.dumps(value, protocol=_PROTOCOL)
            except Exception as cause:
                raise CheckpointError(
                    f"the variable {name} is {_type_of(value)}, and cannot be pickled: {brief(cause)}. Have its class "
                    "define __getstate__() and __setstate__(), which leave out what cannot be pickled"
                ) from cause
        raise CheckpointError(f"the variables {shortened(list(objects))} cannot be pickled: {brief(error)}") from error


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
