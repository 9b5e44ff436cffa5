"""The arguments of a loop, checked: every TypeError and ValueError of its constructor is raised here."""

from __future__ import annotations

import inspect
import itertools
import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

from torchhooks.checkpoints.folder import split_checkpoint
from torchhooks.checkpoints.training_state import StatefulHook, plain_metadata
from torchhooks.common.checks import folder
from torchhooks.common.files import place
from torchhooks.common.stateful import Stateful, has_state
from torchhooks.common.text import shown
from torchhooks.fetches.names import Step
from torchhooks.lifecycle.extension import LoopPlan, planned
from torchhooks.lifecycle.hook import SessionRunHook, StandardHook, overrides
from torchhooks.lifecycle.session import Scaffold
from torchhooks.lifecycle.settings import LoopSettings
from torchhooks.ranks.ranks import Ranks, checked_ranks

_MOST_COLLECTIVE_HOOKS = 60  # a bit each, in an int64 with the bit that asks for a stop


class LoopArguments:
    """The arguments of :class:`torchhooks.MonitoredLoop`, checked and copied. Nothing of them changes later.

    Logs warnings for hooks that probably do not do what their author means.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    def __init__(
        self,
        *,
        step: Callable[..., Any] | None,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        hooks: Iterable[SessionRunHook] | None,
        chief_only: Collection[SessionRunHook],
        scaffold: Scaffold | None,
        state: Mapping[str, Stateful] | None,
        checkpoint_dir: str | os.PathLike[str] | None,
        step_unit: str,
        recoverable_errors: Iterable[type[BaseException]],
        max_recoveries: int,
        signals: Iterable[str | signal.Signals] | None,
        stop_grace_period_secs: float,
        metadata: Mapping[str, Any] | None,
        ranks: Ranks | Literal[False] | None,
        stall_secs: float | None,
        stall_action: str,
    ) -> None:
        self.settings = LoopSettings.checked(
            step_unit=step_unit,
            recoverable_errors=recoverable_errors,
            max_recoveries=max_recoveries,
            signals=signals,
            stop_grace_period_secs=stop_grace_period_secs,
            stall_secs=stall_secs,
            stall_action=stall_action,
        )
        check_model(model)
        check_optimizer(optimizer, step_unit)
        if scaffold is not None and not isinstance(scaffold, Scaffold):
            raise TypeError(
                f"scaffold={shown(scaffold)}: must be a Scaffold, such as Scaffold(saver=Saver(max_to_keep=2))"
            )
        self.model = model
        self.optimizer = optimizer
        self.steps_per_run = 1 if step_unit == "run" else 0
        """How many global steps one run counts; 0 if the optimizer's steps are counted."""
        self.scaffold = Scaffold() if scaffold is None else scaffold
        self.step = Step(step)
        self.state = check_state(state)
        self.script_hooks = script_hooks = check_hooks(() if hooks is None else hooks)
        """The hooks of the script, also those that an extension leaves out."""
        self.chief_only = chief_only
        """The hooks that no other rank has, so that they are called alone, even if they are collective."""
        self.metadata = plain_metadata(metadata)
        self.ranks = checked_ranks(ranks)
        self.checkpoint_dir, checkpoint = checked_place(checkpoint_dir)
        """The folder of checkpoints."""
        plan = LoopPlan(
            hooks=script_hooks,
            step=step,
            folder=self.checkpoint_dir,
            checkpoint=checkpoint,
            counts_runs=bool(self.steps_per_run),
        )
        self.plan, self.extensions = planned(plan)
        """What the loop begins with, and the extensions that join it."""
        check_signatures(self.plan)
        self.checkpoint = self.plan.checkpoint
        """The name of the checkpoint in the folder to begin with; ``None`` for the newest."""
        self.hooks = self.plan.all_hooks
        """The hooks of the script, and those of extensions before and after them."""
        check_collective_hooks(self.hooks, self.ranks)
        for hook in self.hooks:
            if isinstance(hook, StandardHook):
                hook.attach_folder(self.checkpoint_dir)
        self.hook_states = check_hook_states(self.hooks)
        """The hooks that have a state, by the name under which it is saved."""
        self.has_saver = any(hook.saves_checkpoints for hook in self.hooks)
        """Whether a hook saves checkpoints."""
        self.has_checkpoints = self.checkpoint_dir is not None or self.has_saver
        """Whether checkpoints are saved or restored."""
        folders = (hook.checkpoint_dir for hook in self.hooks if hook.saves_checkpoints)
        self.saved_to = next(filter(None, folders), None)
        """The folder of the first CheckpointSaverHook, as an absolute path; ``None`` if there is no such hook."""


def checked_place(checkpoint_dir: str | os.PathLike[str] | None) -> tuple[str | None, str | None]:
    """Return the folder of checkpoints, and the name of the checkpoint in it if ``checkpoint_dir`` is one."""
    if checkpoint_dir is None:
        return None, None
    is_path = isinstance(checkpoint_dir, (str, os.PathLike))
    if not is_path or not os.fspath(checkpoint_dir).rpartition("-")[2].isdecimal():  # as in model.ckpt-700
        folder(checkpoint_dir, "checkpoint_dir")
    return split_checkpoint(place(checkpoint_dir))


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


def check_signatures(plan: LoopPlan) -> None:
    """Raise a TypeError if a hook in ``plan`` overrides a method in such a way that the loop cannot call it."""
    named = {f"hooks[{index}] is a": hook for index, hook in enumerate(plan.hooks)}
    named |= {f"hook {index} of an extension is a": hook for index, hook in enumerate((*plan.first, *plan.last))}
    for name, hook in named.items():
        for method in () if is_of_package(hook) else HOOK_METHODS:
            if overrides(hook, method):
                wanted = [*inspect.signature(getattr(SessionRunHook, method)).parameters]
                try:
                    inspect.signature(getattr(hook, method)).bind(*wanted[1:])
                except TypeError:
                    raise TypeError(
                        f"{name} {type(hook).__name__}, whose {method} does not take what the loop passes: define it "
                        f"as def {method}({', '.join(wanted)})"
                    ) from None
                except ValueError:  # a builtin without a signature
                    continue


def check_collective_hooks(hooks: Iterable[SessionRunHook], ranks: Ranks) -> None:
    """Raise a ValueError if several ranks would have more collective hooks than a tick has bits."""
    count = sum(hook.collective for hook in hooks)
    if ranks.size > 1 and count > _MOST_COLLECTIVE_HOOKS:
        raise ValueError(
            f"{count} collective hooks: a loop of several ranks takes at most {_MOST_COLLECTIVE_HOOKS} of them: "
            "combine some"
        )


def check_hook_states(hooks: Iterable[SessionRunHook]) -> dict[str, StatefulHook]:
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
