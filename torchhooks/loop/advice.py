"""Advice: what a script probably does not mean, though nothing of it is an error.

It is said at four moments: before the hooks begin, when the loop was created, at the end of its first run that has
counted a step, and when it is closed. Each has a tuple of functions below, which yield log lines. The chief logs them,
once in a loop.

A function here only reads what the loop and its hooks have in their attributes. What has to call ``state_dict()``,
which may be a collective or draw random numbers, stays at the save; what changes something or raises stays in its flow.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torchhooks.checkpoints.contents import modules_of
from torchhooks.checkpoints.unsaved import Contents
from torchhooks.common.log import logger
from torchhooks.common.members import is_a, values_in_attributes
from torchhooks.common.text import shortened
from torchhooks.common.timers import first_due
from torchhooks.data.position import Return
from torchhooks.fetches.names import parameters_of
from torchhooks.lifecycle.extension import LoopPlan
from torchhooks.lifecycle.hook import PeriodicHook, SessionRunHook, StandardHook, overrides
from torchhooks.lifecycle.settings import HOOK_METHODS, is_of_package
from torchhooks.loop.caught import CaughtErrors
from torchhooks.loop.schedule import Schedule
from torchhooks.loop.sessions import Sessions
from torchhooks.progress.loop_state import NO_OUTPUTS, StoppedBy
from torchhooks.progress.training_state import TrainingState

Line = tuple[int, str]
"""The level of a log line, and its text."""


class LoopParts(NamedTuple):
    """What the functions read."""

    training: TrainingState
    plan: LoopPlan
    script_hooks: tuple[SessionRunHook, ...]
    schedule: Schedule
    sessions: Sessions
    caught: CaughtErrors


class Advice:
    """Logs advice about the loop with these ``parts``."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts

    def say(self, functions: tuple[Callable[[LoopParts], Iterator[Line]], ...]) -> None:
        """Log the lines of ``functions``. Chief only."""
        if not self._parts.training.ranks.is_chief:
            return
        for function in functions:
            try:
                for level, line in function(self._parts):
                    logger.log(level, "%s", line)
            except Exception as error:  # of a __repr__ of the script, for example, which must not end the training run
                logger.warning("a check of the loop, which only gives advice, has failed", exc_info=error)


def _named(hook: SessionRunHook) -> str:
    """Return the ``repr`` of ``hook``; its class if that fails, which must not hide the advice."""
    try:
        return repr(hook)
    except Exception:
        return f"a {type(hook).__name__}"


# -- before the hooks begin -------------------------------------------------------------------------------------------


def unused_methods(parts: LoopParts) -> Iterator[Line]:
    """Name each hook that overrides no method of SessionRunHook, but has others, which nothing calls."""
    for index, hook in enumerate(parts.script_hooks):
        others = [name for name, value in inspect.getmembers_static(type(hook), callable) if not name.startswith("_")]
        unused = [name for name in others if name not in (*HOOK_METHODS, "state_dict", "load_state_dict")]
        if unused and not any(overrides(hook, method) for method in HOOK_METHODS):
            has = shortened([f"{name}()" for name in unused], 4)
            wanted = shortened([f"{name}()" for name in HOOK_METHODS])
            yield (
                logging.WARNING,
                f"hooks[{index}] is a {type(hook).__name__}, which has {has}, but overrides no method of "
                f"SessionRunHook, so the loop calls none of its methods. The methods that it would call are {wanted}",
            )


def inner_hooks(parts: LoopParts) -> Iterator[Line]:
    """Name each periodic hook that a hook of the script has in an attribute, and that is none of the loop's."""
    hooks = parts.script_hooks
    for index, hook in enumerate(hooks):
        if is_of_package(hook):
            continue
        inner = {
            id(value): (value, name)
            for name, value in values_in_attributes(hook)
            # Not isinstance(), which would ask the value for its __class__, perhaps a property.
            if is_a(type(value), PeriodicHook) and all(value is not each for each in hooks)
        }
        for value, name in inner.values():
            yield (
                logging.WARNING,
                f"hooks[{index}] is a {type(hook).__name__}, which has a {type(value).__name__} in its attribute "
                f"{name} that is not in hooks: the loop calls only the hooks in hooks=[...], and one that another hook "
                "calls is never due. To have this loop call it, put it into the list. A hook that has to give it "
                "something can be a subclass of it, or share an object with it",
            )


GIVEN = (unused_methods, inner_hooks)


# -- when the loop was created ----------------------------------------------------------------------------------------


def no_saver(parts: LoopParts) -> Iterator[Line]:
    """Say that the training run cannot be resumed, though the script has named a folder for it."""
    plan, session = parts.plan, parts.sessions.session
    if plan.folder is not None and not (session.was_restored or plan.savers):
        given = plan.folder
        way_out = f"add CheckpointSaverHook({given!r}, save_secs=600)"
        yield logging.WARNING, f"{given} has no checkpoint, and no hook saves one: {way_out}"


def missing_parts(parts: LoopParts) -> Iterator[Line]:
    """Say if the checkpoints of the loop will contain no model or no optimizer."""
    training = parts.training
    if not parts.plan.has_checkpoints:
        return
    objects = [training.model, training.optimizer, *training.state.values()]
    # A wrapper of another library, or a trainer in state, has its model and optimizer in attributes.
    objects += [member for part in objects for member in getattr(part, "__dict__", {}).values()]
    missing = [
        *(() if any(isinstance(each, torch.nn.Module) for each in objects) else ("model",)),
        *(() if any(hasattr(each, "param_groups") for each in objects) else ("optimizer",)),
    ]
    if missing:
        lacks = " and no ".join(missing)
        yield (
            logging.WARNING,
            f"checkpoints will contain no {lacks}: a process that resumes starts with what the script makes. Pass what "
            "the step trains, MonitoredLoop(step, model, optimizer), or put it into state={...}",
        )


def other_parameters(parts: LoopParts) -> Iterator[Line]:
    """Name each optimizer in the checkpoints that trains parameters which these will not contain."""
    training = parts.training
    if not parts.plan.has_checkpoints:
        return
    optimizers: dict[str, Any] = {"the optimizer": training.optimizer}
    optimizers |= {f"state[{name!r}]": part for name, part in training.state.items() if hasattr(part, "param_groups")}
    modules = modules_of(training)
    contents = Contents([training.model, *training.state.values(), *training.hooks.values()])
    for name, optimizer in optimizers.items():
        trained = [each for each in parameters_of(optimizer) if each.requires_grad]
        lost = sum(map(contents.lack, trained))
        if lost == len(trained) > 0 and modules:  # without a module, another line says that the model is missing
            yield (
                logging.WARNING,
                f"{name} trains no parameter of the model or of a module in state, so checkpoints will not contain "
                "what it trains. Pass the model that the step trains, and make the optimizer after the model is "
                "replaced by another, such as a copy",
            )
        elif 0 < lost < len(trained):
            yield (
                logging.WARNING,
                f"{name} trains {len(trained)} parameters, and checkpoints will not contain {lost} of them: put the "
                "module of these into the model, or into state={...}",
            )


def another_folder(parts: LoopParts) -> Iterator[Line]:
    """Say if every hook that saves does so in another folder than the one from which the loop resumes."""
    plan = parts.plan
    folder = plan.folder
    if folder is None or plan.checkpoint is not None:  # a chosen checkpoint may begin a training run elsewhere
        return
    saving = [hook for hook in plan.all_hooks if hook.saves_checkpoints and hook.checkpoint_dir is not None]
    places = [os.path.realpath(hook.checkpoint_dir) for hook in saving if hook.checkpoint_dir is not None]
    if places and os.path.realpath(folder) not in places:
        yield (
            logging.WARNING,
            f"checkpoint_dir={folder!r}: the loop will never resume from what {_named(saving[0])} saves: leave out the "
            "hook's checkpoint_dir, and it takes the loop's",
        )


CREATED = (no_saver, missing_parts, other_parameters, another_folder)


# -- at the end of the first run that has counted a step --------------------------------------------------------------


def names_to_come(parts: LoopParts) -> Iterator[Line]:
    """Say which names that a hook of torchhooks will ask for have no value after the first run.

    It would be an error when the hook is due, perhaps an hour later. Nothing is evaluated.
    """
    if parts.training.loop_state.outputs is NO_OUTPUTS:
        return
    evaluator = parts.sessions.session.evaluator_between_runs(None)
    for slot in parts.schedule.all_hooks:
        fetches = slot.hook.fetches_to_come if isinstance(slot.hook, StandardHook) else None
        yield from evaluator.names_to_come(fetches, slot)


def late_hooks(parts: LoopParts) -> Iterator[Line]:
    """Name each hook that has a state and comes after a hook that saves checkpoints.

    In an ``until_stop``, a checkpoint is saved after all hooks.
    """
    if parts.training.position.depth:
        return
    hooks, states = parts.plan.hooks, [*parts.training.hooks.values()]
    saver = next((hook for hook in hooks if hook.saves_checkpoints), None)
    if saver is None:
        return
    for hook in hooks[hooks.index(saver) :]:
        if any(each is hook and not each.state_is_optional for each in states):  # type: ignore[comparison-overlap]
            yield (
                logging.WARNING,
                f"{_named(hook)} comes after {_named(saver)}, so without until_stop, checkpoints contain its state "
                "from before the run: move it to the front",
            )


FIRST_RUN = (names_to_come, late_hooks)


# -- when the loop is closed without an error -------------------------------------------------------------------------


def no_run(parts: LoopParts) -> Iterator[Line]:
    """Say if the data ended and no run was made, and why that may be."""
    position, state = parts.training.position, parts.training.loop_state
    if parts.caught.count:
        return  # there were runs, which failed
    # A stop may come before the loop that is to be resumed.
    had_time = state.reason in ("data ended", "closed")
    is_explained = not had_time or position.way_back is Return.MISSED or position.why_finished is not None
    if position.items_without_run and not state.global_step:
        yield (
            logging.WARNING,
            f"until_stop yielded {position.items_without_run} items until the data ended, but there was no run, so no "
            "hook was called and no step was counted: call loop.run(...) instead of the step, or put the step into "
            "with loop.step()",
        )
    elif position.why_no_item and not state.runs and not is_explained:
        yield logging.WARNING, f"no run was made, because {position.why_no_item}"


def never_due(parts: LoopParts) -> Iterator[Line]:
    """Name each hook that was never due, because the training run, which is over, was shorter than its period."""
    state, training = parts.training.loop_state, parts.training
    is_paused = state.stop is not None and state.stop.by in (StoppedBy.SIGNAL, StoppedBy.CALLER)
    if not state.runs or (is_paused and training.why_finished is None):
        return
    lengths = {"steps": state.global_step, "epochs": training.position.epochs_ended}
    for slot in parts.schedule.all_hooks:
        hook = slot.hook
        first = first_due(hook.timer) if isinstance(hook, PeriodicHook) and not hook.works_at_end else None
        if first is not None and first[0] > lengths[first[1]]:
            yield logging.INFO, f"{slot} was never due: the training run had {lengths[first[1]]} {first[1]}"


CLOSED = (no_run, never_due)
