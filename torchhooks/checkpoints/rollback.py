"""What a restore changes, to be put back if it fails in the middle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from torchhooks.common.errors import add_note, brief
from torchhooks.common.random_states import random_states, set_random_states
from torchhooks.common.stateful import Stateful
from torchhooks.position.variables import Variables

_Undo = Callable[[], object]


class Rollback:
    """The states of ``parts`` by name, the gradients of ``optimizer``, and the random states, as they are now.

    Tensors of modules are copied to the CPU, so that no memory of their device is needed. The state of an optimizer is
    not copied, because ``load_state_dict()`` replaces it. A part whose state cannot be copied only gets its attributes
    back.
    """

    def __init__(self, parts: Mapping[str, Stateful], optimizer: torch.optim.Optimizer | None) -> None:
        self._undo = [(name, undo) for name, part in parts.items() for undo in _undo(part)]
        groups = [] if optimizer is None else optimizer.param_groups
        self._gradients = [(parameter, parameter.grad) for group in groups for parameter in group["params"]]
        self._random = random_states()

    def put_back(self, error: BaseException) -> None:
        """Put everything back because of ``error``. A note on it names what could not be.

        Raises:
            BaseException: another one that is not an ``Exception``, such as a Ctrl-C, once everything was put back.
        """
        interrupt: BaseException = error
        random: tuple[str, _Undo] = "random", partial(set_random_states, self._random)
        for name, undo in [*reversed(self._undo), random]:
            try:
                undo()
            except BaseException as another:
                add_note(error, f"{name!r} may not be what it was before the restore: {brief(another)}")
                interrupt = interrupt if isinstance(another, Exception) else another
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if interrupt is not error:
            raise interrupt


def _undo(part: Any) -> Iterable[_Undo]:
    """Yield the calls that put the state of ``part`` back, the last one first."""
    while isinstance(part, torch.optim.Optimizer) and isinstance(vars(part).get("optimizer"), torch.optim.Optimizer):
        part = vars(part)["optimizer"]  # Accelerate's wrapper has no state of its own
    try:
        if isinstance(part, torch.nn.Module):
            yield _undo_module(part)
        elif isinstance(part, torch.optim.Optimizer):
            yield _undo_optimizer(part)
        # torchdata's loader starts its workers to tell its state. What Variables have is replaced, so putting their
        # attributes back is enough, and leaves the script the objects that it had.
        elif not isinstance(part, (Iterable, Variables)):
            yield _undo_state(part)
    except Exception:  # the state cannot be read or copied, such as that of a hook before its first session
        pass
    if not isinstance(part, torch.nn.Module) and hasattr(part, "__dict__"):
        yield _undo_attributes(vars(part))


def _undo_module(module: torch.nn.Module) -> _Undo:
    state = {name: value for name, value in module.state_dict().items() if not torch.nn.parameter.is_lazy(value)}
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and not value.is_meta}
    copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors.values()]
    others = {name: copy.deepcopy(value) for name, value in state.items() if not isinstance(value, torch.Tensor)}

    def undo() -> None:
        with torch.no_grad():
            for tensor, values in copies:
                tensor.copy_(values)
        if others:
            module.load_state_dict(others, strict=False)

    return undo


def _undo_optimizer(optimizer: torch.optim.Optimizer) -> _Undo:
    # What torch's load_state_dict() replaces as a whole, another one may change in place.
    inside = [(each, dict(each)) for each in (optimizer.state, *optimizer.state.values(), *optimizer.param_groups)]

    def undo() -> None:
        for each, values in inside:
            each.clear()
            each.update(values)

    return undo


def _undo_state(part: Stateful) -> _Undo:
    state = copy.deepcopy(part.state_dict())
    return lambda: part.load_state_dict(state)


def _undo_attributes(attributes: dict[str, Any]) -> _Undo:
    before = dict(attributes)

    def undo() -> None:
        attributes.clear()
        attributes.update(before)

    return undo
