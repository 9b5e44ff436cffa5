"""MonitoredTrainingLoop: a loop with the hooks that nearly every training run needs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from typing_extensions import TypeVar

from torchhooks.checkpoints.folder import split_checkpoint
from torchhooks.common.checks import check_keywords
from torchhooks.common.errors import add_note
from torchhooks.common.stateful import Stateful, has_state
from torchhooks.common.timers import SecondOrStepTimer
from torchhooks.hooks.counting import StepCounterHook
from torchhooks.hooks.saving import CheckpointSaverHook, SummarySaverHook
from torchhooks.lifecycle.hook import SessionRunHook
from torchhooks.lifecycle.session import Scaffold
from torchhooks.lifecycle.settings import check_hooks
from torchhooks.loop.monitored_loop import MonitoredLoop
from torchhooks.ranks.ranks import checked_ranks

R = TypeVar("R", default=Any)

_Folder = str | os.PathLike[str]


class _UseDefault:
    def __repr__(self) -> str:
        return "USE_DEFAULT"


USE_DEFAULT: Any = _UseDefault()
"""The default of a period. It differs from None, which disables a hook."""


def MonitoredTrainingLoop(  # noqa: N802  (named like tf.train.MonitoredTrainingSession, which it replaces)
    step: Callable[..., R] | None = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    checkpoint_dir: _Folder | None = None,
    hooks: Iterable[SessionRunHook] | None = (),
    chief_only_hooks: Iterable[SessionRunHook] | None = (),
    scaffold: Scaffold | None = None,
    state: Mapping[str, Stateful] | None = None,
    save_checkpoint_secs: float | None = USE_DEFAULT,
    save_checkpoint_steps: int | None = USE_DEFAULT,
    async_save: bool | Literal["skip"] = False,
    save_summaries_steps: int | None = USE_DEFAULT,
    save_summaries_secs: float | None = USE_DEFAULT,
    summary_dir: _Folder | None = None,
    log_step_count_steps: int | None = 100,
    stop_grace_period_secs: float = 120,
    **loop_arguments: Any,
) -> MonitoredLoop[R]:
    """Return a :class:`torchhooks.MonitoredLoop` with the default hooks (``tf.train.MonitoredTrainingSession``).

    >>> hooks = [StopAtStepHook(last_step=5)]
    >>> with MonitoredTrainingLoop(step, model, optimizer, checkpoint_dir="run", hooks=hooks) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    saving a checkpoint of step 0 into run
    saving a checkpoint of step 5 into run

    If the script is run again, it continues from the newest checkpoint in ``run``. The loop calls its hooks in this
    order, which is TensorFlow's:

    1. the ``chief_only_hooks``
    2. a :class:`torchhooks.StepCounterHook`, every 100 steps
    3. a :class:`torchhooks.SummarySaverHook`, every 100 steps, which writes to ``summary_dir``
    4. a :class:`torchhooks.CheckpointSaverHook`, every 600 seconds, which writes to ``checkpoint_dir``
    5. the ``hooks``

    Hooks with a state are moved before the first hook that saves checkpoints, so that their saved state includes the
    run. A period in steps replaces the default period in seconds, and vice versa. ``None`` or 0 disables a hook. Unlike
    TensorFlow, steps per second are logged even if there is no folder to write them to.

    To give a default hook other arguments, such as ``timer=``, disable it and put your own into ``hooks``: for example,
    ``log_step_count_steps=None, hooks=[StepCounterHook(timer=EverySteps(100), output_dir="run")]``.
    ``save_summaries_steps=None`` and ``save_checkpoint_secs=None`` disable the other two.

    Args:
        step: the training step, a function. Without it, runs are made with ``loop.step()``.
        model: the module to save and restore, whose parameters and submodules hooks can fetch.
        optimizer: the optimizer to save and restore, whose learning rate hooks can fetch.
        checkpoint_dir: the folder that checkpoints are restored from and saved to. Without it, neither is done. A
            checkpoint, such as ``"run/model.ckpt-600"``, is restored itself, and others are saved to its folder.
        hooks: the hooks to add to the default ones.
        chief_only_hooks: hooks for the chief only, rank 0. With several ranks, they are due by the chief's clock, and
            cannot fetch what needs every rank. Hooks that save checkpoints are then hooks of every rank, because a save
            needs all of them.
        scaffold: how a session is initialized, its saver, and the ``summary_op`` to write. Without a ``summary_op``,
            the SummarySaverHook only writes ``SessionLog.START``, as in TensorFlow.
        state: additional objects to save and restore, by name.
        save_checkpoint_secs, save_checkpoint_steps: the period of the CheckpointSaverHook, in seconds or steps.
        async_save: write its checkpoints in a background thread; see :class:`torchhooks.Saver`.
        save_summaries_steps, save_summaries_secs: the period of the SummarySaverHook, in steps or seconds.
        summary_dir: the folder for curves and summaries; ``checkpoint_dir`` by default.
        log_step_count_steps: the period of the StepCounterHook, in steps.
        stop_grace_period_secs: how long to wait for background threads at the end, in seconds.
        loop_arguments: further arguments of the MonitoredLoop, such as ``step_unit`` and ``recoverable_errors``.

    Raises:
        TypeError: something in ``hooks`` or ``chief_only_hooks`` is not a hook, or an argument is unknown.
        ValueError: both periods are given for one hook, a period is not valid, or ``async_save`` is given without a
            CheckpointSaverHook.
    """
    # Otherwise the constructor of MonitoredLoop would refuse the keyword, and list only its own.
    check_keywords("MonitoredTrainingLoop", loop_arguments, _KEYWORDS)
    given, chief_only = _checked(hooks, "hooks"), _checked(chief_only_hooks, "chief_only_hooks")
    # One scaffold for the loop and its hooks. So the hook saves with the saver by which the loop restores, and the
    # scaffold of the SummarySaverHook is the one in which the caller has set the summary_op.
    scaffold = Scaffold() if scaffold is None else scaffold
    counting = _period({}, log_step_count_steps=log_step_count_steps)
    summaries = _period(
        {"save_summaries_steps": 100},
        save_summaries_steps=save_summaries_steps,
        save_summaries_secs=save_summaries_secs,
    )
    checkpoints = _period(
        {"save_checkpoint_secs": 600},
        save_checkpoint_secs=save_checkpoint_secs,
        save_checkpoint_steps=save_checkpoint_steps,
    )
    if async_save and not checkpoints:
        raise ValueError(
            "async_save=True: the default CheckpointSaverHook is disabled. Leave out async_save, and give the argument "
            "to your own CheckpointSaverHook(..., async_save=True)"
        )
    ranks = checked_ranks(loop_arguments.get("ranks"))
    if ranks.size > 1:
        savers = [hook for hook in chief_only if hook.saves_checkpoints]
        chief_only = [hook for hook in chief_only if hook not in savers]
        given = [*savers, *given]
    saved_to = None if checkpoint_dir is None else split_checkpoint(os.fspath(checkpoint_dir))[0]
    folder = saved_to if summary_dir is None else summary_dir
    defaults: list[SessionRunHook] = []
    if counting:
        defaults.append(StepCounterHook(log_step_count_steps, output_dir=folder))
    if summaries and folder is not None:
        defaults.append(SummarySaverHook(**summaries, output_dir=folder, scaffold=scaffold))
    if checkpoints and saved_to is not None:
        defaults.append(CheckpointSaverHook(saved_to, **checkpoints, scaffold=scaffold, async_save=async_save))
    given = _states_first([*(chief_only if ranks.is_chief else ()), *defaults, *given])
    return _Loop(
        chief_only,
        step,
        model,
        optimizer,
        hooks=given,
        scaffold=scaffold,
        state=state,
        checkpoint_dir=checkpoint_dir,
        stop_grace_period_secs=stop_grace_period_secs,
        **loop_arguments,
    )


_KEYWORDS = {**inspect.signature(MonitoredTrainingLoop).parameters, **inspect.signature(MonitoredLoop).parameters}
del _KEYWORDS["loop_arguments"]


class _Loop(MonitoredLoop[R]):
    """A loop whose ranks differ in their hooks.

    Args:
        chief_only: hooks that only the chief has, so that its loop calls them alone even if they are ``collective``.
        args, arguments: the arguments of the MonitoredLoop.
    """

    def __init__(self, chief_only: Collection[SessionRunHook], *args: Any, **arguments: Any) -> None:
        # Before the constructor of the base class, which reads it.
        self._chief_only = chief_only
        super().__init__(*args, **arguments)


def _checked(hooks: Iterable[SessionRunHook] | None, name: str) -> list[SessionRunHook]:
    try:
        return [] if hooks is None else list(check_hooks(hooks))
    except TypeError as error:
        add_note(error, f"torchhooks: in {name} of MonitoredTrainingLoop")
        raise


def _period(default: dict[str, float], **periods: Any) -> dict[str, Any]:
    """Return the period to use, as keyword arguments of a saver hook; an empty dict if the hook is disabled."""
    given = {name: period for name, period in periods.items() if period is not USE_DEFAULT} or default
    # None, 0 and negative numbers disable the hook. Anything else that is not a period is an error.
    used = {name: p for name, p in given.items() if p is not None and not (isinstance(p, (int, float)) and p <= 0)}
    if used:
        # The hook checks its period again, but under its own name of the argument. This error has the name that the
        # caller of MonitoredTrainingLoop knows.
        SecondOrStepTimer.named(**used)
    return {f"save_{name.rpartition('_')[2]}": period for name, period in used.items()}


def _states_first(hooks: list[SessionRunHook]) -> list[SessionRunHook]:
    """Return ``hooks`` with stateful hooks moved before the first hook that saves checkpoints."""
    savers = (index for index, hook in enumerate(hooks) if hook.saves_checkpoints)
    first_saver = next(savers, len(hooks))
    # The sort is stable: within each group the order stays as given.
    return hooks[:first_saver] + sorted(hooks[first_saver:], key=has_state, reverse=True)
