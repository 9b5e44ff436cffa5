"""What trains and is in no checkpoint, and what a resumed script could not load.

The first are parameters, other optimizers, gradient scalers and averages of the weights; the second what is added to a
module or an optimizer after the loop was created.

torch tells of a step of any optimizer and of an update of an average; a GradScaler has no hook for that, so its
``step`` is wrapped while a loop that saves is open. What changed in two different runs is no temporary object, and
:func:`torchhooks.checkpoints.saving.collect` looks whether the checkpoint has it. Nothing of the script is read.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from torchhooks.checkpoints.modules import Deciding
from torchhooks.common.text import shortened
from torchhooks.data.variables import Variables
from torchhooks.fetches.names import parameters_of
from torchhooks.progress.loop_state import LoopState

_MOST_OBJECTS = 100_000  # which takes up to 0.1 s: state may have a replay buffer of millions


class _Changing:
    """An object that changes while the loop trains."""

    def __init__(self, part: weakref.ref[object], run: int) -> None:
        self.part, self.run = part, run
        self.is_lasting = False
        """Whether it changed in two different runs."""
        self.is_settled = False
        """Whether it is saved elsewhere, or a warning was logged."""
        self.handle: RemovableHandle | None = None


class UnsavedParts:
    """Notes which optimizers, scalers and averages change in the runs of one loop, and are of no open loop.

    Args:
        loop_state: counts the runs.
        is_of_a_loop: returns whether an object is part of this loop, or of another open one.
        parts: the objects that the loop saves, as they are when it is created, by name.
    """

    def __init__(
        self, loop_state: LoopState, is_of_a_loop: Callable[[object], bool], parts: Mapping[str, object]
    ) -> None:
        self._loop_state, self._is_of_a_loop = loop_state, is_of_a_loop
        self._created = {name: _signature(part) for name, part in parts.items()}
        self._changing: dict[int, _Changing] = {}
        _observe(self)

    def close(self) -> None:
        """Stop noting."""
        _set_observing([observer for observer in _observing if observer() is not self])
        for each in [*self._changing.values()]:
            if each.handle is not None:
                each.handle.remove()
        self._changing.clear()
        if not _observing:
            _stop_observing()

    def note(self, part: object) -> None:
        """Note that ``part`` changes now. Called for all optimizers, scalers and averages of the process."""
        key, run = id(part), self._loop_state.runs
        known = self._changing.get(key)
        if known is None:
            # Forgotten with the object: another one may get the same id.
            reference = weakref.ref(part, functools.partial(self._changing.pop, key))
            self._changing[key] = _Changing(reference, run)
        elif not known.is_lasting and known.run != run:
            known.is_lasting = True
            known.is_settled = self._is_of_a_loop(part)
            if isinstance(part, torch.optim.Optimizer) and not known.is_settled:
                # A wrapper, such as a trainer of the script, may save it, and so may the script itself.
                settle = functools.partial(_settle, weakref.ref(known))
                known.handle = part.register_state_dict_pre_hook(settle)

    def lacking(self, parts: Mapping[str, object]) -> Iterator[str]:
        """Yield, once for each object, a line about what changes and is in none of ``parts``, which were just saved.

        And a line about what a resumed script could not load, because it was added after the loop was created.
        """
        for name, part in parts.items():
            before = self._created.get(name)
            line = None if before is None else _line_of_added(name, before, part)
            if line is not None:
                self._created[name] = None
                yield line
        # The values are copied first: when an object is freed, also by the garbage collector in the middle of this
        # line, its weak reference removes it from the dict.
        lasting = [each for each in [*self._changing.values()] if each.is_lasting and not each.is_settled]
        if not lasting:
            return
        has_optimizer = any(hasattr(part, "param_groups") for part in parts.values())
        saved = Contents(parts.values())
        states = [id(part.state) for part in parts.values() if hasattr(part, "param_groups") and hasattr(part, "state")]
        for each in lasting:
            part = each.part()
            each.is_settled = True
            if part is None or not (isinstance(part, torch.optim.Optimizer) or saved.lack(part)):
                continue
            if isinstance(part, torch.optim.Optimizer):
                # Without any optimizer, another line has said so. A wrapper may share the state of what it wraps.
                if has_optimizer and id(part.state) not in states:
                    yield _line_of_optimizer(part, saved)
            elif isinstance(part, GradScaler):
                yield _SCALER
            else:
                yield _AVERAGE


def _settle(known: weakref.ref[_Changing], *_: object) -> None:
    changing = known()
    if changing is not None:
        changing.is_settled = True


def _line_of_optimizer(optimizer: torch.optim.Optimizer, saved: Contents) -> str:
    parameters = parameters_of(optimizer)
    lost = sum(map(saved.lack, parameters))
    trained = f", and neither {'are' if lost > 1 else 'is'} {lost} of its {len(parameters)} parameters" if lost else ""
    module = '"model2": model2, ' if lost else ""
    return (
        f"an optimizer other than the loop's, of the class {type(optimizer).__name__}, makes steps, and is in no "
        f"checkpoint{trained}: a resumed training run would start its state over. Give the loop "
        f'state={{{module}"optimizer2": optimizer2}}'
    )


_SCALER = (
    "a GradScaler is in use, and is in no checkpoint: a resumed training run would begin with another scale. Give the "
    'loop state={"scaler": scaler}'
)
_AVERAGE = (
    "an AveragedModel is updated, and is in no checkpoint: a resumed training run would start the average over. Give "
    'the loop state={"average": averaged_model}'
)


# -- what was added after the loop was created, when a resumed script loads its checkpoint ----------------------------

_Signature = list[int] | dict[str, str]
"""How many parameters the groups of an optimizer have, or the shapes of the parameters of a module.

A shape is "" where the module itself decides what it loads, or has no shape yet.
"""


def _signature(part: Any) -> _Signature | None:
    if isinstance(part, torch.nn.Module):
        deciding = Deciding(part)
        return {
            name: "" if is_lazy(each) or deciding.on_values_at(name) else str(tuple(each.shape))
            for name, each in part.named_parameters()
        }
    return [len(group["params"]) for group in part.param_groups] if hasattr(part, "param_groups") else None


def _line_of_added(name: str, before: _Signature, part: object) -> str | None:
    now = _signature(part)
    if isinstance(before, list):
        what = f"{name} has groups of {now} parameters, and had {before} when the loop was created"
        way_out = "Give the optimizer all groups before that, and unfreeze parameters with requires_grad_(True)"
        is_same = now == before
    else:
        assert isinstance(now, dict)
        shapes = {key: (before.get(key), now.get(key)) for key in {**before, **now}}
        changed = [key for key, (old, new) in shapes.items() if old != new and "" not in (old, new)]
        what = f"{name} has other parameters than when the loop was created: {shortened(changed)}"
        way_out = "Make it whole before that"
        is_same = not changed
    return (
        None if is_same else f"{what}, so a script that is started again cannot resume from this checkpoint. {way_out}"
    )


# -- what objects refer to ---------------------------------------------------------------------------------------------

# That an optimizer trains a parameter does not save it.
_LEAVES = (
    *(torch.Tensor, torch.optim.Optimizer, type, types.ModuleType, types.FunctionType, types.MethodType),
    *(str, bytes, int, float),
)


class Contents:
    """What ``parts`` refer to: modules, tensors and other objects.

    Objects refer to their attributes, and containers to their items. Nothing of the objects is called.
    """

    def __init__(self, parts: Iterable[object]) -> None:
        self._ids: set[int] = set()
        self._to_do = deque(parts)  # attributes before what they contain, which may be a large buffer
        while self._to_do and len(self._ids) < _MOST_OBJECTS:
            part = self._to_do.popleft()
            if id(part) not in self._ids:
                self._ids.add(id(part))
                self._look_into(part)
        self._is_complete = not self._to_do

    def lack(self, part: object) -> bool:
        """Return whether ``part`` is certainly not among them."""
        return self._is_complete and id(part) not in self._ids

    def _look_into(self, part: object) -> None:
        if isinstance(part, torch.nn.Module):
            for members in (part.modules(), part.parameters(), part.buffers()):
                self._ids.update(map(id, members))
        elif isinstance(part, dict):
            self._to_do += part.values()
        elif isinstance(part, (list, tuple, set)):
            self._to_do += part
        elif isinstance(part, Variables) or not (isinstance(part, _LEAVES) or _is_of_torchhooks(part)):
            self._to_do += _attributes(part).values()


def _attributes(part: object) -> dict[str, object]:
    """Return the attributes of ``part`` as they are: its own ``__getattr__`` may do anything."""
    try:
        attributes: dict[str, object] = object.__getattribute__(part, "__dict__")
    except AttributeError:
        return {}
    return attributes


def _is_of_torchhooks(part: object) -> bool:
    """Return whether the class of ``part`` is one of this package."""
    return type(part).__module__.startswith("torchhooks.")


# -- what torch tells --------------------------------------------------------------------------------------------------

_observing: list[weakref.ref[UnsavedParts]] = []
_undo: list[Callable[[], object]] = []


def _tell(part: object, *_: object) -> None:
    for observer in _observing:
        parts = observer()
        if parts is not None:
            parts.note(part)


def _tell_of_buffer(module: torch.nn.Module, _: str, __: object) -> None:
    if isinstance(module, AveragedModel):  # which counts its updates in a buffer
        _tell(module)


def _observe(parts: UnsavedParts) -> None:
    """Have ``parts`` told of all optimizers, scalers and averages that change, as long as it exists."""
    _set_observing([*_observing, weakref.ref(parts)])
    if _undo:
        return
    _undo.append(register_optimizer_step_post_hook(_tell).remove)
    _undo.append(register_module_buffer_registration_hook(_tell_of_buffer).remove)
    original = GradScaler.step

    @functools.wraps(original)
    def step(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # A scaler that is switched off has an empty state, so nothing of it gets lost.
        if self.is_enabled():
            _tell(self)
        return result

    def put_back() -> None:
        if GradScaler.step is step:  # not if another library has wrapped it since
            GradScaler.step = original  # type: ignore[method-assign]

    GradScaler.step = step  # type: ignore[method-assign]
    _undo.append(put_back)


def _set_observing(observers: list[weakref.ref[UnsavedParts]]) -> None:
    global _observing  # replaced and not changed: an optimizer may make a step in another thread
    _observing = [observer for observer in observers if observer() is not None]


def _stop_observing() -> None:
    while _undo:
        _undo.pop()()
