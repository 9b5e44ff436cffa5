"""What a checkpoint contains, and how it compares with what a session has.

A checkpoint is a dict with these entries:

* ``"model"`` and ``"optimizer"``, if the session has them;
* each entry of ``session.state`` under its own name;
* each entry of ``session.hooks`` as ``"hooks.<name>"``;
* ``"global_step"``;
* ``"classes"``: the names of the classes of optimizers and schedulers, by the name of their entry;
* ``"metadata"``: the loop's ``metadata``, if there is any;
* ``"random"``: the random states of Python, NumPy and torch;
* ``"position"``: how far the loop's ``until_stop`` iterations are in their data (:mod:`torchhooks.position.position`);
* ``"gradients"``: the gradients that have accumulated on this rank, by the number of their parameter, and
  ``"sharded_gradients"``: the gradients that are DTensors;
* ``"running_values"``: what running fetches have accumulated since their last reports
  (:mod:`torchhooks.fetches.accumulated`);
* ``"ranks"``: with several ranks, what belongs to each of the others alone, from rank 1 on: its ``"random"``,
  ``"position"`` and ``"gradients"``, the states of its hooks, the states of the loaders in ``session.state``, and
  what differs from rank 0: ``"rank_tensors"``, the tensors of modules by name and the states of optimizers by number,
  and ``"rank_parts"``, whole modules and optimizers with other tensors. The other entries are rank 0's.

Checkpoints are always loaded with ``weights_only=True``, so that no file can run code. State that could not be loaded
this way is refused when it is saved, with its name. It may consist of tensors, numbers, strings, bytes, ``None``, and
torch's dtypes, devices, layouts and sizes, in dicts, lists, tuples and sets. NumPy numbers are saved as Python numbers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy as shallow_copy
from types import NoneType
from typing import Any, Protocol

import numpy as np
import torch

from torchhooks.checkpoints.gradients import Gradients
from torchhooks.checkpoints.sharded import (
    canonical,
    renamed,
    sharded_parts,
    unreduced_gradients,
)
from torchhooks.common.errors import CheckpointError, add_note
from torchhooks.common.log import logger
from torchhooks.common.random_states import random_states
from torchhooks.common.stateful import Stateful, has_state
from torchhooks.common.text import shortened, shown
from torchhooks.position.position import Position, outer_position
from torchhooks.position.variables import Variables
from torchhooks.ranks.dtensors import is_sharded, reshard
from torchhooks.ranks.ranks import LoopRanks

_OWN = (
    *("classes", "global_step", "gradients", "metadata", "position", "random", "rank_parts"),
    *("rank_tensors", "ranks", "running_values", "sharded_gradients"),
)
_OF_EACH_RANK = ("gradients", "position", "random", "running_values")
_RESERVED = ("model", "optimizer", *_OWN)
_HOOKS = "hooks."
_OPTIONAL = "hooks.results of "  # restored where both have it: a hook that only reports can be added and left out
_ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()


class AccumulatedState(Protocol):
    """What running fetches have accumulated; ``None`` stands for nothing."""

    def state_dict(self) -> Mapping[str, Any] | None: ...
    def load_state_dict(self, state: Mapping[str, Any] | None) -> object: ...


class SessionLike(Protocol):
    """The attributes of a :class:`torchhooks.Session` that are saved and restored."""

    global_step: int

    @property
    def model(self) -> torch.nn.Module | None: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...
    @property
    def state(self) -> Mapping[str, Stateful]: ...
    @property
    def hooks(self) -> Mapping[str, Stateful]: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def warned(self) -> set[str]: ...
    @property
    def position(self) -> Position | None: ...
    @property
    def gradients(self) -> Gradients | None: ...
    @property
    def accumulated(self) -> AccumulatedState: ...
    @property
    def ranks(self) -> LoopRanks: ...


def parts_of(session: SessionLike) -> dict[str, Stateful]:
    """Return the objects whose state is saved, by name. A reserved name, or an object without state, is an error.

    Their parameters are put back into the shards of FSDP2, if the script has left whole ones in a module.
    """
    parts: dict[str, Any] = {}
    if session.model is not None:
        reshard(session.model)
        parts["model"] = session.model
    if session.optimizer is not None:
        parts["optimizer"] = session.optimizer
    for name, part in session.state.items():
        if name in _RESERVED or name.startswith(_HOOKS):
            raise CheckpointError(f"state[{name!r}]: this name is reserved in checkpoints. Choose another one.")
        if isinstance(part, torch.nn.Module):
            reshard(part)
        parts[name] = part
    for name, hook in session.hooks.items():
        is_optional = getattr(hook, "state_is_optional", False)
        parts[f"{_OPTIONAL if is_optional else _HOOKS}{name}"] = hook
    for name, part in parts.items():
        if not has_state(part):
            raise CheckpointError(
                f"{name!r} is {_type_of(part)}, without state_dict() and load_state_dict(): add them, or leave it out."
            )
    return parts


def belongs_to_rank(name: str, part: object) -> bool:
    """Return whether each rank has a state of its own of the ``part`` called ``name``.

    A hook has, and so has anything that can be iterated, such as a loader or a sampler, but no module. All ranks
    have the same state of any other object, unless it has a true attribute ``per_rank``, and no DTensors.
    """
    if isinstance(part, (torch.nn.Module, torch.optim.Optimizer)):
        return bool(getattr(part, "per_rank", False)) and not sharded_parts({name: part})
    if name in ("model", "optimizer"):
        return False
    return name.startswith(_HOOKS) or bool(getattr(part, "per_rank", isinstance(part, Iterable)))


def own_parts(parts: Mapping[str, Stateful]) -> dict[str, Stateful]:
    """Return the part of ``parts``, by name, of which each rank has a state of its own."""
    own = {name: part for name, part in parts.items() if belongs_to_rank(name, part)}
    modules = [part for part in own.values() if isinstance(part, torch.nn.Module)]
    parameters = {id(parameter) for module in modules for parameter in module.parameters()}
    for name, part in parts.items() if parameters else ():
        if isinstance(part, torch.optim.Optimizer) and any(id(each) in parameters for each in _parameters(part)):
            own[name] = part
    return own


def shared_tensors(parts: Mapping[str, Stateful]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of which a checkpoint has the values of the chief, by part and by name in the bare module."""
    own = own_parts(parts)
    modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module) and name not in own}
    states = {name: module.state_dict() for name, module in modules.items()}
    return {
        name: {canonical(key): value for key, value in state.items() if isinstance(value, torch.Tensor)}
        for name, state in states.items()
    }


def moments_of(optimizer: torch.optim.Optimizer, parameters: Collection[int]) -> dict[int, Any]:
    """Return the entries of the state of ``optimizer`` for the ``parameters`` with these ids, by number."""
    state = optimizer.state_dict()
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    wanted = [number for number, each in zip(numbers, _parameters(optimizer), strict=True) if id(each) in parameters]
    return {number: state["state"][number] for number in wanted if number in state["state"]}


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def of_rank(session: SessionLike, saved: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return what the rank of ``session`` loads from ``saved``, and whether that includes what belongs to it alone.

    It does not if another number of ranks saved the checkpoint: one part of the data of one of them is none of another.
    """
    rank, others = session.ranks.rank, saved.get("ranks", [])
    own = {name for name in saved if name in _OF_EACH_RANK or name.startswith(_HOOKS)}.union(*others)
    is_whole = len(others) + 1 == session.ranks.size
    for name, part in own_parts(parts_of(session)).items():
        is_shared = is_whole and isinstance(part, (torch.nn.Module, torch.optim.Optimizer))
        if not is_shared or not others:  # else it was saved before the script set its per_rank
            own.add(name)
    shared = {name: value for name, value in saved.items() if name not in own and name != "ranks"}
    if not is_whole:
        position = outer_position([each.get("position") for each in (saved, *others)])
        return shared if position is None else {**shared, "position": position}, False
    mine = dict(others[rank - 1]) if rank else {name: saved[name] for name in own if name in saved}
    for name, values in mine.pop("rank_tensors", {}).items():
        if name in shared:
            shared[name] = _with_tensors(shared[name], values)
    return {**shared, **mine, **mine.pop("rank_parts", {})}, True


def _with_tensors(state: Any, values: Mapping[Any, Any]) -> Any:
    """Return the ``state`` of a module or an optimizer with ``values`` in place of the values of the chief."""
    if "param_groups" in state:
        return {**state, "state": {**state["state"], **values}}
    state = shallow_copy(state)  # with the versions of the modules, which are an attribute
    state.update({key: values[canonical(key)] for key in state if canonical(key) in values})
    return state


def collect(
    session: SessionLike,
    copy: Callable[[torch.Tensor], torch.Tensor],
    given: Mapping[str, Any],
    *,
    of_rank_only: bool = False,
) -> dict[str, Any]:
    """Return the contents of a checkpoint, each tensor passed through ``copy``.

    With ``of_rank_only``, leave out what all ranks have in common. ``given`` has the gradients, and states by name that
    are used instead of asking for them. If something could not be loaded again, raise a CheckpointError that lists all
    of it.
    """
    plain = _PlainCopy(copy)
    state: dict[str, Any] = {}
    parts = parts_of(session)
    if of_rank_only:
        parts = own_parts(parts)
    for name, part in parts.items():
        try:
            own = given[name] if name in given else part.state_dict()
        except BaseException as error:
            add_note(error, f"while saving {name!r}")
            raise
        state[name] = plain(own, (name,))
    if not of_rank_only:
        _check_schedulers(session, parts, state)
    if session.metadata and not of_rank_only:
        state["metadata"] = plain(session.metadata, ("metadata",))
    if given["gradients"]:
        state["gradients"] = plain(given["gradients"], ("gradients",))
    accumulated = session.accumulated.state_dict()
    if accumulated is not None:
        state["running_values"] = plain(accumulated, ("running_values",))
    position = None if session.position is None else session.position.state_dict()
    if position is not None:
        state["position"] = {**position, "loaders": plain(position["loaders"], ("position", "loaders"))}
    if plain.problems:
        raise CheckpointError(f"This cannot be saved: {shortened(plain.problems, 8)}.{plain.way_out}")
    if of_rank_only:
        return {**state, "random": random_states()}
    classes = {name: _class_name(part) for name, part in parts.items() if isinstance(part, _OF_ONE_CLASS)}
    return {
        **state,
        **({"classes": classes} if classes else {}),
        "global_step": session.global_step,
        "random": random_states(),
    }


def compare(
    session: SessionLike, saved: Mapping[str, Any], *, without_own: bool = False
) -> tuple[dict[str, tuple[Stateful, Any]], list[str]]:
    """Return, by name, each object of ``session`` and the state to load into it; and a list of what does not match.

    With ``without_own``, leave out the objects of which each rank has a state of its own.
    """
    parts = parts_of(session)
    if without_own:
        own = own_parts(parts)
        parts = {name: part for name, part in parts.items() if name not in own}
    misfits = _compare_names(parts, saved, _OWN)
    unnamed = [name for name in saved if name not in (*parts, *_RESERVED) and not name.startswith(_HOOKS)]
    if unnamed:
        entries = [f'"{name}": {name if name.isidentifier() else "..."}' for name in unnamed]
        misfits[-1] += f". Give the loop state={{{shortened(entries)}}}"
    pairs: dict[str, tuple[Stateful, Any]] = {}
    for name, part in parts.items():
        if name not in saved:
            continue
        if isinstance(part, torch.nn.Module):
            saved = {**saved, name: renamed(part, saved[name])}
            misfits += [f"{name}: {misfit}" for misfit in compare_module(name, part, saved[name])]
        elif isinstance(part, _OF_ONE_CLASS) and (misfit := _compare_class(name, part, saved)):
            misfits.append(f"{name}: {misfit}")
            continue
        pairs[name] = part, saved[name]
    return pairs, misfits


def accumulated_gradients(session: SessionLike) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the gradients that have accumulated on this rank alone, by the number of their parameter, and DTensors."""
    gradients = (None if session.gradients is None else session.gradients.state_dict()) or {}
    shards = {number: gradient for number, gradient in gradients.items() if is_sharded(gradient)}
    return {number: gradient for number, gradient in gradients.items() if number not in shards}, shards


def load_gradients(session: SessionLike, saved: Mapping[str, Any]) -> None:
    """Replace the accumulated gradients by ``saved``, and drop the gradients that FSDP2 has not reduced yet."""
    if session.gradients is None:
        return
    own, shards = saved.get("gradients") or {}, saved.get("sharded_gradients") or {}
    whole = {str(number) for number, each in enumerate(session.gradients.parameters()) if not is_sharded(each)}
    fit = {number: gradient for number, gradient in own.items() if number in whole}
    session.gradients.load_state_dict({**shards, **fit} or None)
    for owner, name in unreduced(session):
        setattr(owner, name, None)
    if len(fit) < len(own):
        logger.warning("gradients that had accumulated in a model that was sharded in another way are dropped")


def unreduced(session: SessionLike) -> list[tuple[Any, str]]:
    """Return where FSDP2 keeps gradients of the optimizer's parameters that it has not reduced over the ranks yet."""
    return [] if session.gradients is None else unreduced_gradients(modules_of(session))


def modules_of(session: SessionLike) -> list[torch.nn.Module]:
    """Return the model and the modules in the loop's state, such as an average of the weights."""
    return [each for each in (session.model, *session.state.values()) if isinstance(each, torch.nn.Module)]


def plain_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Copy ``metadata``, or raise a TypeError that lists what in it could not be loaded again."""
    if not isinstance(metadata, Mapping | None):
        raise TypeError(f"metadata={shown(metadata)}: must be a dict of plain data, such as vars(args)")
    plain = _PlainCopy(lambda tensor: tensor.detach().to("cpu", copy=True))
    copied: dict[str, Any] = plain(dict(metadata or {}), ("metadata",))
    if plain.problems:
        raise TypeError(
            f"{shortened(plain.problems, 8)}: metadata may contain numbers, strings, tensors and None, in dicts, "
            "lists, tuples and sets, such as dataclasses.asdict(config)"
        )
    return copied


def changed_metadata(old: Any, new: Any, path: str = "metadata") -> Iterator[str]:
    """Yield a description of each value that differs between ``old``, the metadata of a checkpoint, and ``new``."""
    old, new = _as_dict(old), _as_dict(new)
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from changed_metadata(old.get(key, _ABSENT), new.get(key, _ABSENT), f"{path}[{key!r}]")
    elif old != new and repr(old) != repr(new):  # NaN differs from itself
        yield f"{path} was {shown(old)} and is {shown(new)}"


def _as_dict(value: Any) -> Any:
    value = value.to_dense().tolist() if isinstance(value, torch.Tensor) else value
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else value


def _check_schedulers(session: SessionLike, parts: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Log a warning, once, if an optimizer has a scheduler, and nothing in ``state`` is the state of one."""
    optimizers = [part for part in parts.values() if hasattr(part, "param_groups")]
    if "scheduler" in session.warned or not any(map(_has_scheduler, optimizers)):
        return
    others = {name: part for name, part in parts.items() if name != "model" and not hasattr(part, "param_groups")}
    others = {name: part for name, part in others.items() if not isinstance(part, Variables)}  # with names of the user
    # A scheduler of another library, such as timm's, may have no last_epoch, but it has its optimizer.
    if any(hasattr(part, "optimizer") or _has_key(state[name], "last_epoch") for name, part in others.items()):
        return
    session.warned.add("scheduler")
    logger.warning(
        "the optimizer has a learning-rate scheduler, whose state is not in the checkpoints: a resumed training run "
        'would start the schedule over. Give the loop state={"scheduler": scheduler}'
    )


def _has_scheduler(optimizer: Any) -> bool:
    """Return whether a scheduler of torch has wrapped the ``step`` of ``optimizer``.

    The ``initial_lr`` of its groups would not do: it is also in the state of an optimizer that once had a scheduler.
    """
    while hasattr(optimizer, "optimizer"):  # a wrapper of Accelerate or Fabric
        optimizer = optimizer.optimizer
    return hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched")  # torch 2.7 to 2.13


def _has_key(value: Any, key: str) -> bool:
    if isinstance(value, dict):
        return key in value or any(_has_key(item, key) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_has_key(item, key) for item in value)


# Exactly these types, which torch's weights_only unpickler accepts in every version since 2.6. It refuses subclasses.
_LEAVES = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout}
)
_CONTAINERS = frozenset({dict, OrderedDict, Counter, list, tuple, set, bytearray})
_MOST_BITS = 2000  # torch reads integers of at most 255 bytes


class _PlainCopy:
    """Copies containers, and lists in ``problems`` whatever in them could not be loaded again."""

    def __init__(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.problems: list[str] = []
        self.way_out = ""
        """What to return instead of an object of another type, if a problem is one."""
        self._copy = copy
        self._inside: set[int] = set()

    def __call__(self, value: Any, keys: tuple[Any, ...]) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        problem = _problem(value)
        if problem is None and id(value) in self._inside:
            problem = "part of itself"
        if problem is not None:
            if problem == _type_of(value):
                self.way_out = (
                    " Loading an object of another type could run code: have state_dict() return tensors, numbers, "
                    "strings and None, in dicts, lists, tuples and sets."
                )
            self.problems.append(f"{keys[0]}{''.join(f'[{key!r}]' for key in keys[1:])} is {problem}")
            return None
        if isinstance(value, torch.Tensor):
            return self._copy(value)
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
        if isinstance(value, OrderedDict):  # the state of a module has its version in an attribute, _metadata
            vars(copy).update(self._dict(vars(value), keys))
        return copy


def _problem(value: Any) -> str | None:
    """Return why ``value``, apart from its contents, could not be loaded again; ``None`` if it could."""
    if isinstance(value, torch.Tensor):
        return _tensor_problem(value)
    if type(value) is int and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length()} bits, torch reads up to {_MOST_BITS}"
    if type(value) is bytes and not value:
        return "empty bytes, which torch does not read: use None"
    if isinstance(value, np.ndarray):
        return "a NumPy array: convert it with torch.from_numpy()"
    return None if type(value) in _LEAVES or type(value) in _CONTAINERS else _type_of(value)


def _tensor_problem(tensor: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "without a shape yet: call the model first"
    if is_sharded(tensor):
        return (
            "a DTensor: return its to_local(), and give the object an attribute per_rank = True, so that each rank "
            "saves its own shard"
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"{_type_of(tensor)}, a subclass of Tensor: convert it to a plain tensor"
    return "on the meta device, where it has no values: give it some with to_empty()" if tensor.is_meta else None


def _type_of(value: object) -> str:
    return "of type " + f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def compare_module(name: str, module: torch.nn.Module, state: dict[str, Any]) -> list[str]:
    """Return what does not match, and remove from ``state`` the tensors that cannot be loaded as they are.

    torch does not load tensors of another shape, loads nothing into the meta device, and rounds to the module's dtype.
    """
    if any(getattr(part, "_load_state_dict_pre_hooks", None) for part in module.modules()):
        return []  # the module rewrites the state before it is loaded, so only torch can tell
    own = module.state_dict()
    misfits = _compare_names(own, state)
    reshaped = [key for key in own if key in state and _shape(own[key]) != _shape(state[key])]
    if reshaped:
        shown = [f"{key!r} {_shape(own[key])} instead of {_shape(state[key])}" for key in reshaped]
        misfits.append(f"of another shape than in the file: {shortened(shown)}")
    tensors = [key for key in own if key in state and key not in reshaped and isinstance(own[key], torch.Tensor)]
    without_values = [key for key in tensors if own[key].is_meta]
    if without_values:
        listed = shortened([repr(key) for key in without_values])
        misfits.append(f"on the meta device, where nothing can be loaded, so call to_empty() first: {listed}")
    others = [key for key in tensors if key not in without_values and own[key].dtype != state[key].dtype]
    rounded = [key for key in others if not _converts(state[key].dtype, own[key].dtype)]
    if rounded:
        misfits.append(f"of a dtype that cannot hold what is in the file: {_dtypes(own, state, rounded)}")
    widened = [key for key in others if key not in rounded]
    if widened:
        logger.warning("%s: of another dtype than in the file: %s", name, _dtypes(own, state, widened))
    for key in (*reshaped, *without_values, *rounded):
        del state[key]
    return misfits


def _dtypes(own: Mapping[str, Any], state: Mapping[str, Any], keys: list[str]) -> str:
    return shortened([f"{key!r} {own[key].dtype} instead of {state[key].dtype}" for key in keys])


def _converts(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Return whether every value of ``dtype`` is one of ``to``."""
    if not dtype.is_floating_point and not dtype.is_complex and (to.is_floating_point or to.is_complex):
        return dtype == torch.bool or torch.iinfo(dtype).max <= 2 / torch.finfo(to).eps
    try:
        return torch.promote_types(dtype, to) == to
    except RuntimeError:  # not defined for these two
        return False


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


_OF_ONE_CLASS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
"""Classes whose ``load_state_dict()`` takes over the state of another subclass, which then makes other steps."""
# torch sets these itself where an older version has not saved them, and a scheduler the last one.
_SET_LATER = frozenset(
    {
        *("params", "param_names", "initial_lr"),
        *("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"),
    }
)


def _class_name(part: Any) -> str:
    while isinstance(part, torch.optim.Optimizer) and isinstance(vars(part).get("optimizer"), torch.optim.Optimizer):
        part = vars(part)["optimizer"]  # Accelerate's wrapper, whose state is the state of the optimizer in it
    return type(part).__name__


def _compare_class(name: str, part: Any, saved: Mapping[str, Any]) -> str | None:
    """Return how the optimizer or scheduler ``part`` differs from the one whose state is in the file."""
    own, other = _class_name(part), saved.get("classes", {}).get(name)  # an earlier version did not save the names
    if other not in (None, own):
        return f"is of the class {own}, in the file it is of the class {other}"
    return _compare_groups(part, saved[name]) if isinstance(part, torch.optim.Optimizer) else None


def _compare_groups(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str | None:
    groups, saved_groups = optimizer.param_groups, state["param_groups"]
    saved, own = [len(group["params"]) for group in saved_groups], [len(group["params"]) for group in groups]
    if saved != own:
        return f"has groups of {own} parameters, those in the file have {saved}"
    for number, (group, other) in enumerate(zip(groups, saved_groups, strict=True)):
        names, other_names = group.get("param_names"), other.get("param_names")
        if names and other_names and names != other_names:
            return f"group {number} has the parameters {shortened(names)}, in the file {shortened(other_names)}"
        # Some optimizers add to a group in their first step, so later only what they were created with is required.
        required = [key for key in (optimizer.defaults if optimizer.state else group) if key not in _SET_LATER]
        missing = [repr(key) for key in required if key not in other]
        if missing:
            surplus = [repr(key) for key in other if key not in group and key not in _SET_LATER]
            found = f"; only in the file: {shortened(surplus)}" if surplus else ""
            return f"group {number} has other hyperparameters, missing in the file: {shortened(missing)}{found}"
    return None


def _compare_names(own: Collection[str], saved: Collection[str], ignored: Collection[str] = ()) -> list[str]:
    missing = [repr(name) for name in own if name not in saved and not name.startswith(_OPTIONAL)]
    surplus = [name for name in saved if name not in own and name not in ignored]
    surplus = [repr(name) for name in surplus if not name.startswith(_OPTIONAL)]
    listed = {"missing in the file": missing, "only in the file": surplus}
    return [f"{what}: {shortened(names)}" for what, names in listed.items() if names]
