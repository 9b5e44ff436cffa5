"""The settings of a loop: what its constructor was given, checked."""

from __future__ import annotations

import inspect
import itertools
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torchhooks.checkpoints.contents import StatefulHook, plain_metadata
from torchhooks.common.checks import exception_types, folder, seconds, whole_number
from torchhooks.common.files import place
from torchhooks.common.stateful import Stateful, has_state
from torchhooks.common.text import shown
from torchhooks.fetches.names import Step
from torchhooks.lifecycle.hook import SessionRunHook, overrides
from torchhooks.lifecycle.session import Scaffold
from torchhooks.progress.signals import checked_signals
from torchhooks.ranks.ranks import LoopRanks, checked_ranks

_MOST_COLLECTIVE_HOOKS = 60  # a bit each, in an int64 with the bit that asks for a stop


@dataclass(frozen=True, kw_only=True, eq=False)
class LoopSettings:
    """The arguments of :class:`torchhooks.MonitoredLoop`, checked, with the meaning that they have there.

    What can change is copied, so that nothing of them changes later. Each field has the name of its argument.
    """

    step: Step
    model: torch.nn.Module | None
    optimizer: torch.optim.Optimizer | None
    hooks: tuple[SessionRunHook, ...]
    scaffold: Scaffold
    state: Mapping[str, Stateful]
    checkpoint_dir: str | None
    step_unit: Literal["run", "optimizer_step"]
    recoverable_errors: tuple[type[BaseException], ...]
    max_recoveries: int
    signals: tuple[signal.Signals, ...]
    stop_grace_period_secs: float
    metadata: Mapping[str, Any]
    ranks: LoopRanks
    stall_secs: float | None
    stall_action: Literal["report", "abort"]

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> LoopSettings:
        """Return the settings of a loop whose constructor was ``given`` these arguments, by name.

        Raises:
            TypeError, ValueError: one of them is not valid, or two hooks cannot be in one loop.
        """
        step_unit, stall_action, stall_secs = given["step_unit"], given["stall_action"], given["stall_secs"]
        if step_unit not in ("run", "optimizer_step"):
            raise ValueError(f'step_unit={step_unit!r}: must be "run" or "optimizer_step"')
        if stall_action not in ("report", "abort"):
            raise ValueError(f'stall_action={shown(stall_action)}: must be "report" or "abort"')
        scaffold = given["scaffold"]
        if not isinstance(scaffold, Scaffold | None):
            raise TypeError(
                f"scaffold={shown(scaffold)}: must be a Scaffold, such as Scaffold(saver=Saver(max_to_keep=2))"
            )
        check_model(given["model"])
        check_optimizer(given["optimizer"], step_unit)
        settings = cls(
            step=Step(given["step"]),
            model=given["model"],
            optimizer=given["optimizer"],
            hooks=check_hooks(() if given["hooks"] is None else given["hooks"]),
            scaffold=Scaffold() if scaffold is None else scaffold,
            state=check_state(given["state"]),
            checkpoint_dir=check_place(given["checkpoint_dir"]),
            step_unit=step_unit,
            recoverable_errors=exception_types(given["recoverable_errors"], "recoverable_errors", "(AbortedError,)"),
            max_recoveries=whole_number(given["max_recoveries"], "max_recoveries", 0),
            signals=checked_signals(given["signals"]),
            stop_grace_period_secs=seconds(given["stop_grace_period_secs"], "stop_grace_period_secs"),
            metadata=plain_metadata(given["metadata"]),
            ranks=checked_ranks(given["ranks"]),
            stall_secs=None if stall_secs is None else seconds(stall_secs, "stall_secs"),
            stall_action=stall_action,
        )
        check_signatures({f"hooks[{index}] is a": hook for index, hook in enumerate(settings.hooks)})
        check_together(settings.hooks, settings.ranks)
        return settings


def check_place(checkpoint_dir: str | os.PathLike[str] | None) -> str | None:
    """Return where ``checkpoint_dir`` is, or raise unless it is a folder or a checkpoint, such as model.ckpt-700."""
    if checkpoint_dir is None:
        return None
    is_path = isinstance(checkpoint_dir, (str, os.PathLike))
    if not is_path or not os.fspath(checkpoint_dir).rpartition("-")[2].isdecimal():
        folder(checkpoint_dir, "checkpoint_dir")
    return place(checkpoint_dir)


def check_hooks(hooks: Iterable[SessionRunHook]) -> tuple[SessionRunHook, ...]:
    """Copy ``hooks``, or raise a TypeError that names the item that is not a hook."""
    if not isinstance(hooks, Iterable) or isinstance(hooks, (Mapping, str)):
        example = f"[{hooks!r}]" if isinstance(hooks, SessionRunHook) else "[StopAtStepHook(last_step=1000)]"
        raise TypeError(f"hooks={shown(hooks)}: pass a list of hooks, such as {example}, or [] for none")
    copied = tuple(hooks)
    for index, hook in enumerate(copied):
        if isinstance(hook, type) and issubclass(hook, SessionRunHook):
            raise TypeError(f"hooks[{index}] is the class {hook.__name__}: pass an instance, {hook.__name__}(...)")
        if not isinstance(hook, SessionRunHook):
            raise TypeError(f"hooks[{index}]={shown(hook)} is not a hook: {_hook_instead_of(hook)}")
        if any(hook is other for other in copied[:index]):
            raise ValueError(f"hooks[{index}] is {hook!r}, which the list has already: the loop would call it twice")
    return copied


def _hook_instead_of(value: object) -> str:
    """Return what to put into the list of hooks in place of ``value``."""
    if isinstance(value, (list, tuple)):
        return "pass one list, and put a star before a list in it, hooks=[*more, ...]"
    if callable(value) and not isinstance(value, type):
        return "CallFnHook(function, every_n_steps=1) calls a function"
    return "a hook is an instance of SessionRunHook"


def is_of_package(hook: SessionRunHook) -> bool:
    """Return whether the package defines the class of ``hook``."""
    return type(hook).__module__.partition(".")[0] == "torchhooks"


HOOK_METHODS = [name for name, value in vars(SessionRunHook).items() if callable(value) and not name.startswith("_")]
"""The names of the methods that a loop calls."""


def check_signatures(named: Mapping[str, SessionRunHook]) -> None:
    """Raise a TypeError if a hook overrides a method in such a way that the loop cannot call it.

    ``named`` are the hooks, by the beginning of the message.
    """
    for name, hook in named.items():
        for method in () if is_of_package(hook) else HOOK_METHODS:
            if overrides(hook, method):
                wanted = [*inspect.signature(getattr(SessionRunHook, method)).parameters]
                try:
                    # By position, as the loop passes them: a hook may give its parameters other names.
                    inspect.signature(getattr(hook, method)).bind(*wanted[1:])
                except TypeError:
                    raise TypeError(
                        f"{name} {type(hook).__name__}, whose {method} does not take what the loop passes: define it "
                        f"as def {method}({', '.join(wanted)})"
                    ) from None
                except ValueError:  # a builtin without a signature
                    continue


def check_together(hooks: Iterable[SessionRunHook], ranks: LoopRanks) -> None:
    """Raise a ValueError if two of ``hooks`` have one name, or are more collective ones than a tick has bits."""
    named_states(hooks)
    count = sum(hook.collective for hook in hooks)
    if ranks.size > 1 and count > _MOST_COLLECTIVE_HOOKS:
        raise ValueError(
            f"{count} collective hooks: a loop of several ranks takes at most {_MOST_COLLECTIVE_HOOKS} of them: "
            "combine some"
        )


def named_states(hooks: Iterable[SessionRunHook]) -> dict[str, StatefulHook]:
    """Return the hooks that have a state, by the name under which it is saved: ``hook.name``, or its class's.

    Raises:
        ValueError: two hooks have the same name.
    """
    named: dict[str, Any] = {}
    for hook in hooks:
        if has_state(hook):
            name = hook.name or type(hook).__name__
            if hook.state_is_optional:
                name = next(each for each in _numbered(name) if each not in named)
            if name in named:
                raise ValueError(
                    f"{named[name]!r} and {hook!r} would both save their state as {name!r}: give one of them another "
                    "name, in an attribute called name"
                )
            named[name] = hook
    return named


def _numbered(name: str) -> Iterator[str]:
    """Yield ``name``, and then ``name`` with a number after it."""
    yield name
    yield from (f"{name} {number}" for number in itertools.count(2))


def check_model(model: object) -> None:
    """Raise a TypeError unless ``model`` is a module or None."""
    if model is not None and not isinstance(model, torch.nn.Module):
        way_out = "put several into one torch.nn.ModuleDict"
        if isinstance(model, type):
            way_out = "pass an instance, not the class"
        if hasattr(model, "param_groups"):
            way_out = "the order is MonitoredLoop(step, model, optimizer)"
        raise TypeError(f"model={shown(model)}: must be a torch.nn.Module; {way_out}")


def check_optimizer(optimizer: Any, step_unit: str) -> None:
    """Raise unless ``optimizer`` is an optimizer or None, and can count steps if ``step_unit`` requires it."""
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        way_out = 'Of several, pass the one whose steps count, and the others in state={"name": optimizer}'
        if isinstance(optimizer, type):
            way_out = f"Pass an instance, {optimizer.__name__}(model.parameters(), lr=...)"
        elif has_state(optimizer):
            way_out = 'Pass another object with a state, such as a scheduler, in state={"scheduler": scheduler}'
        raise TypeError(f"optimizer={shown(optimizer)}: must be a torch.optim.Optimizer. {way_out}")
    check_not_divided("optimizer", optimizer)
    if step_unit == "optimizer_step" and not hasattr(optimizer, "register_step_post_hook"):
        raise ValueError(
            f'step_unit="optimizer_step" counts the steps of an optimizer, and optimizer={shown(optimizer)}: pass the '
            'torch.optim.Optimizer that the step uses, or step_unit="run"'
        )


def check_not_divided(name: str, part: object) -> None:
    """Raise a ValueError if no rank alone can tell the state of ``part``, as of a ZeroRedundancyOptimizer."""
    if hasattr(part, "consolidate_state_dict"):
        raise ValueError(
            f"{name} is a {type(part).__name__}, whose state each rank has a part of, so checkpoints cannot contain "
            "it: divide the model too, with FSDP2's fully_shard and an ordinary optimizer, or leave it out of the loop"
        )


def check_state(state: Mapping[str, Stateful] | None) -> dict[str, Stateful]:
    """Copy ``state``, or raise a TypeError that names the entry without a state."""
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(
            f"state={shown(state)}: must be a dict that names each object, under which its state is saved, such as "
            'state={"scheduler": scheduler}'
        )
    copied = dict(state or {})
    for name, part in copied.items():
        if isinstance(part, type):
            raise TypeError(f"state[{name!r}] is the class {part.__name__}: pass an instance, {part.__name__}(...)")
        if not has_state(part):
            raise TypeError(
                f"state[{name!r}]={shown(part)}: must have state_dict() and load_state_dict(). Numbers and other plain "
                'data can be variables: state={"vars": Variables(...)}'
            )
        check_not_divided(f"state[{name!r}]", part)
    return copied
