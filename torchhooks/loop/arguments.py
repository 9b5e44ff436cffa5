"""Checks of the arguments of a loop: each returns the checked value, or raises an error that says what to pass."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchhooks.common.log import logger
from torchhooks.common.stateful import Stateful, has_state
from torchhooks.common.text import shortened, shown
from torchhooks.lifecycle.hook import SessionRunHook, overrides


def check_hooks(hooks: Iterable[SessionRunHook]) -> tuple[SessionRunHook, ...]:
    """Copy ``hooks``, or raise a TypeError that names the item that is not a hook."""
    if not isinstance(hooks, Iterable):
        example = f"[{hooks!r}]" if isinstance(hooks, SessionRunHook) else "[StopAtStepHook(last_step=1000)]"
        raise TypeError(f"hooks={shown(hooks)}: pass a list of hooks, {example}")
    copied = tuple(hooks)
    for index, hook in enumerate(copied):
        if isinstance(hook, type) and issubclass(hook, SessionRunHook):
            raise TypeError(f"hooks[{index}] is the class {hook.__name__}: pass an instance, {hook.__name__}(...)")
        if not isinstance(hook, SessionRunHook):
            raise TypeError(f"hooks[{index}]={shown(hook)} is not a hook: a hook is an instance of SessionRunHook")
    return copied


def check_methods(hooks: Iterable[SessionRunHook]) -> None:
    """Log a warning for each hook that overrides no method of SessionRunHook, but has others, which nothing calls."""
    methods = [name for name, value in vars(SessionRunHook).items() if callable(value) and not name.startswith("_")]
    for index, hook in enumerate(hooks):
        others = [name for name, value in inspect.getmembers_static(type(hook), callable) if not name.startswith("_")]
        unused = [name for name in others if name not in (*methods, "state_dict", "load_state_dict")]
        if unused and not any(overrides(hook, method) for method in methods):
            logger.warning(
                "hooks[%d] is a %s, which has %s, but overrides no method of SessionRunHook, so the loop calls none of "
                "its methods. Those that it would call are %s",
                index,
                type(hook).__name__,
                shortened([f"{name}()" for name in unused], 4),
                shortened([f"{name}()" for name in methods]),
            )


def check_hook_states(hooks: Iterable[SessionRunHook]) -> dict[str, Stateful]:
    """Return the hooks that have a state, by the name under which it is saved: ``hook.name``, or that of its class.

    Logs a warning for a hook that comes after one that saves checkpoints.

    Raises:
        ValueError: two hooks have the same name.
    """
    named: dict[str, Any] = {}
    saver: SessionRunHook | None = None
    for hook in hooks:
        if getattr(hook, "saves_checkpoints", False):
            saver = saver or hook
        if has_state(hook):
            name = getattr(hook, "name", None) or type(hook).__name__
            if name in named:
                raise ValueError(
                    f"{named[name]!r} and {hook!r} would both save their state as {name!r}: give one of them another "
                    "name, in an attribute called name"
                )
            named[name] = hook
            if saver is not None:
                logger.warning(
                    "%r comes after %r, so without until_stop, checkpoints contain its state from before the run: "
                    "move it to the front",
                    hook,
                    saver,
                )
    return named


def check_model(model: Any) -> None:
    """Raise a TypeError unless ``model`` is a module or None."""
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model={shown(model)}: must be a torch.nn.Module; put several into one torch.nn.ModuleDict")


def check_optimizer(optimizer: Any, step_unit: str) -> None:
    """Raise unless ``optimizer`` is an optimizer or None, and can count steps if ``step_unit`` requires it."""
    if step_unit not in ("run", "optimizer_step"):
        raise ValueError(f'step_unit={step_unit!r}: must be "run" or "optimizer_step"')
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer={shown(optimizer)}: must be a torch.optim.Optimizer. Of several, pass the one whose steps "
            'count, and the others in state={"name": optimizer}'
        )
    if step_unit == "optimizer_step" and not hasattr(optimizer, "register_step_post_hook"):
        raise ValueError(
            f'step_unit="optimizer_step" counts the steps of an optimizer, and optimizer={shown(optimizer)}: pass the '
            'torch.optim.Optimizer that the step uses, or step_unit="run"'
        )


def check_state(state: Mapping[str, Stateful] | None) -> dict[str, Stateful]:
    """Copy ``state``, or raise a TypeError that names the entry without a state."""
    copied = dict(state or {})
    for name, part in copied.items():
        if not has_state(part):
            raise TypeError(f"state[{name!r}]={shown(part)}: must have state_dict() and load_state_dict()")
    return copied
