"""Comparing a checkpoint with what it is to be loaded into, before anything is loaded: all that does not match."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from torchhooks.checkpoints.contents import (
    HOOKS,
    OPTIONAL,
    OWN_ENTRIES,
    RESERVED,
    Entries,
    Parts,
    parts_of,
    parts_of_rank,
)
from torchhooks.checkpoints.modules import Deciding, renamed
from torchhooks.common.log import logger
from torchhooks.common.stateful import Stateful
from torchhooks.common.text import shortened, shown
from torchhooks.common.trees import Tree
from torchhooks.fetches.names import bare_optimizer, canonical
from torchhooks.progress.training_state import TrainingState

Pairs = dict[str, tuple[Stateful, Any]]
"""By the name of its entry, an object and the state to load into it."""

Misfits = dict[str, list[str]]
"""What does not match, by the name of the object; by an empty one for the names of the objects."""

_ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()


def compare(training: TrainingState, saved: Entries, *, without_rank: bool) -> tuple[Pairs, Misfits]:
    """Return each object of ``training`` with the state to load into it, and what does not match.

    A hook may be in one of both only: see :func:`hooks_of_one`. With ``without_rank``, leave out the objects that have
    another state on each rank.
    """
    parts: Parts = parts_of(training)
    if without_rank:
        own = parts_of_rank(parts)
        parts = {name: part for name, part in parts.items() if name not in own}
    named, saved_named = ([name for name in each if not name.startswith(HOOKS)] for each in (parts, saved))
    names = _compare_names(named, saved_named, OWN_ENTRIES)
    unnamed = [name for name in saved if name not in (*parts, *RESERVED) and not name.startswith(HOOKS)]
    if unnamed:
        entries = [f'"{name}": {name if name.isidentifier() else "..."}' for name in unnamed]
        names[-1] += f". Give the loop state={{{shortened(entries)}}}"
    misfits: Misfits = {"": names} if names else {}
    parameters, saved_parameters = parameter_names(parts), saved.get("parameter_names", {})
    pairs: Pairs = {}
    for name, part in parts.items():
        if name not in saved:
            continue
        state = saved[name]
        if isinstance(part, torch.nn.Module):
            state = renamed(part, state)
            if differences := compare_module(name, part, state):
                misfits[name] = differences
        elif isinstance(part, OF_ONE_CLASS):
            order = parameters.get(name, []), saved_parameters.get(name, [])
            # What does not match in a module is removed from its state, and the rest can be loaded. An optimizer takes
            # its state over as a whole, so one that does not match is left alone.
            if difference := _compare_class(name, part, saved) or _compare_order(*order):
                misfits[name] = [difference]
                continue
        pairs[name] = part, state
    return pairs, misfits


def hooks_of_one(training: TrainingState, saved: Entries) -> tuple[list[str], list[str]]:
    """Return the names of the hooks whose state is only in ``training``, and of those whose state is only ``saved``.

    Not of a hook that only reports, which starts over without a loss.
    """
    own = {f"{HOOKS}{name}" for name, hook in training.hooks.items() if not hook.state_is_optional}
    theirs = {name for name in saved if name.startswith(HOOKS) and not name.startswith(OPTIONAL)}
    new, gone = (sorted(name.removeprefix(HOOKS) for name in names) for names in (own - theirs, theirs - own))
    return new, gone


def lines_of(misfits: Misfits) -> list[str]:
    """Return ``misfits`` as lines of a message."""
    return [f"{name}: {each}" if name else each for name, found in misfits.items() for each in found]


def changed_metadata(old: Tree, new: Tree, path: str = "metadata") -> Iterator[str]:
    """Yield a description of each value that differs between ``old``, the metadata of a checkpoint, and ``new``."""
    old, new = _as_dict(old), _as_dict(new)
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from changed_metadata(old.get(key, _ABSENT), new.get(key, _ABSENT), f"{path}[{key!r}]")
    elif old != new and repr(old) != repr(new):  # NaN differs from itself
        yield f"{path} was {shown(old)} and is {shown(new)}"


def changed_hyperparameters(optimizer: torch.optim.Optimizer, state: Entries) -> Iterator[str]:
    """Yield the hyperparameters of ``optimizer`` that loading ``state`` replaces by others.

    Of a scheduler's, what it began with is compared: what it has changed since is no choice of the script.
    """
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=False)):
        # CyclicLR and OneCycleLR add max_momentum to a group. They change one of these two values in each step.
        by_scheduler = {"momentum", "betas"} if "max_momentum" in saved else set()
        for name in optimizer.defaults:
            if name in _SET_LATER or name in by_scheduler or name not in group or name not in saved:
                continue
            first = "initial_lr" if name == "lr" and "initial_lr" in saved else name
            own, other = (_plain_number(each) for each in (group.get(first, group[name]), saved[first]))
            if repr(own) != repr(other):
                where = f"group {number}: " if len(optimizer.param_groups) > 1 else ""
                yield f"{where}{name} {shown(own)} in the script, {shown(other)} from the checkpoint"


def _plain_number(value: Tree) -> Tree:
    value = value.tolist() if isinstance(value, torch.Tensor) else value
    return list(value) if isinstance(value, tuple) else value


def _as_dict(value: Tree) -> Tree:
    value = value.to_dense().tolist() if isinstance(value, torch.Tensor) else value
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else value


# -- modules -----------------------------------------------------------------------------------------------------------


def compare_module(name: str, module: torch.nn.Module, state: dict[str, Tree]) -> list[str]:
    """Return what does not match, and remove from ``state`` the tensors that cannot be loaded as they are.

    torch does not load tensors of another shape, loads nothing into the meta device, and rounds to the module's dtype.
    """
    own, deciding = module.state_dict(), Deciding(module)
    names, saved_names = ([key for key in keys if not deciding.on_names_at(key)] for keys in (own, state))
    misfits = _compare_names(names, saved_names)
    both = [key for key in own if key in state and not deciding.on_values_at(key)]
    reshaped = [key for key in both if _shape(own[key]) != _shape(state[key])]
    if reshaped:
        shown = [f"{key!r} {_shape(own[key])} instead of {_shape(state[key])}" for key in reshaped]
        misfits.append(f"of another shape than in the file: {shortened(shown)}")
    tensors = [key for key in both if key not in reshaped and isinstance(own[key], torch.Tensor)]
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


def _dtypes(own: Mapping[str, Tree], state: Mapping[str, Tree], keys: list[str]) -> str:
    return shortened([f"{key!r} {own[key].dtype} instead of {state[key].dtype}" for key in keys])


def _converts(dtype: torch.dtype, to: torch.dtype) -> bool:
    # torch.promote_types() answers float32 for int64 and float32, though float32 holds whole numbers exactly only up to
    # 2**24, which is 2 / eps.
    if not dtype.is_floating_point and not dtype.is_complex and (to.is_floating_point or to.is_complex):
        return dtype == torch.bool or torch.iinfo(dtype).max <= 2 / torch.finfo(to).eps
    try:
        return torch.promote_types(dtype, to) == to
    except RuntimeError:  # not defined for these two
        return False


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


# -- optimizers and schedulers -----------------------------------------------------------------------------------------

OF_ONE_CLASS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
"""Classes whose ``load_state_dict()`` takes over the state of another subclass, which then makes other steps."""
# torch sets these itself where an older version has not saved them, and a scheduler the last one.
_SET_LATER = frozenset(
    {
        *("params", "param_names", "initial_lr"),
        *("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"),
    }
)


def class_name(part: object) -> str:
    """Return the name of the class of an optimizer or scheduler, without wrappers."""
    return type(bare_optimizer(part)).__name__


def _compare_class(name: str, part: Stateful, saved: Entries) -> str | None:
    """Return how the optimizer or scheduler ``part`` differs from the one whose state is in the file."""
    # There is no name if the file has an object of another kind under this name, such as a scheduler of the user's.
    own, other = class_name(part), saved.get("classes", {}).get(name)
    if other not in (None, own):
        return f"is of the class {own}, in the file it is of the class {other}"
    return _compare_groups(part, saved[name]) if isinstance(part, torch.optim.Optimizer) else None


ParameterNames = list[list[str | None]]
"""By group of an optimizer, the names of its parameters; ``None`` for one that is in no saved module."""


def parameter_names(parts: Parts) -> dict[str, ParameterNames]:
    """Return the names of the parameters of each optimizer in ``parts``, by the name of its entry.

    A name is that in the bare model, or in a module of the loop's ``state`` after the name of that module.
    """
    names: dict[int, str] = {}
    for part_name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            prefix = "" if part_name == "model" else f"{part_name}."
            for name, parameter in part.named_parameters():
                names.setdefault(id(parameter), f"{prefix}{canonical(name)}")
    return {
        part_name: [[names.get(id(each)) for each in group["params"]] for group in part.param_groups]
        for part_name, part in parts.items()
        if isinstance(part, torch.optim.Optimizer)
    }


def _compare_order(own: ParameterNames, saved: ParameterNames) -> str | None:
    """Return how the order of an optimizer's parameters differs from the file, where its state is by their number.

    A parameter that has another name there, as in a model that was changed since, is not compared.
    """
    places, saved_places = _places(own), _places(saved)
    moved = [name for name, place in places.items() if saved_places.get(name, place) != place]
    if not moved:
        return None
    (group, number), (saved_group, saved_number) = places[moved[0]], saved_places[moved[0]]
    return (
        f"has its parameters in another order than in the file, so they would get the state of others: {moved[0]!r} is "
        f"number {number} of group {group}, and was number {saved_number} of group {saved_group}. Give the optimizer "
        "the same list in every process, such as model.parameters(), and no set"
    )


def _places(names: ParameterNames) -> dict[str, tuple[int, int]]:
    """Return the group and the number in it of each name."""
    return {
        name: (group, number) for group, own in enumerate(names) for number, name in enumerate(own) if name is not None
    }


def _compare_groups(optimizer: torch.optim.Optimizer, state: Entries) -> str | None:
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
    missing = [repr(name) for name in own if name not in saved]
    surplus = [repr(name) for name in saved if name not in own and name not in ignored]
    listed = {"missing in the file": missing, "only in the file": surplus}
    return [f"{what}: {shortened(names)}" for what, names in listed.items() if names]
