"""MonitoredTrainingLoop: a loop with the hooks that nearly every training wants.

    with MonitoredTrainingLoop(step, model, optimizer, checkpoint_dir="run", hooks=[StopAtStepHook(1000)]) as loop:
        for inputs, targets in loop.until_stop(loader):
            loop.run(inputs, targets)

Run it again and it goes on from the newest checkpoint in ``run``. Its hooks, in the order of every call:

    the chief_only_hooks
    StepCounterHook          every 100 steps
    SummarySaverHook         every 100 steps, into summary_dir
    CheckpointSaverHook      every 600 seconds, into checkpoint_dir
    the hooks

but for those that have a state: they come before the first hook that saves checkpoints, so that what is saved of them
includes the run.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch

from torchhooks.arguments import check_hook_states, check_hooks
from torchhooks.checkpoint import latest_checkpoint
from torchhooks.errors import CheckpointError, add_note
from torchhooks.hook import SessionRunHook
from torchhooks.hooks.counting import StepCounterHook
from torchhooks.hooks.saving import CheckpointSaverHook, SummarySaverHook
from torchhooks.log import logger, show_lines
from torchhooks.loop import MonitoredLoop
from torchhooks.session import Scaffold
from torchhooks.stateful import Stateful, has_state
from torchhooks.timer import SecondOrStepTimer, seconds

R = TypeVar("R")

_Folder = str | os.PathLike[str]

_FIRST_PAUSE_SECS = 0.1
_LONGEST_PAUSE_SECS = 10.0


class _UseDefault:
    def __repr__(self) -> str:
        return "USE_DEFAULT"


USE_DEFAULT: Any = _UseDefault()
"""What a period is that was not given, which is not the same as one that was switched off with None."""


def MonitoredTrainingLoop(  # noqa: N802  (it stands in for tf.train.MonitoredTrainingSession)
    step: Callable[..., R],
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    checkpoint_dir: _Folder | None = None,
    hooks: Iterable[SessionRunHook] = (),
    chief_only_hooks: Iterable[SessionRunHook] = (),
    scaffold: Scaffold | None = None,
    state: Mapping[str, Stateful] | None = None,
    save_checkpoint_secs: float | None = USE_DEFAULT,
    save_checkpoint_steps: int | None = USE_DEFAULT,
    save_summaries_steps: int | None = USE_DEFAULT,
    save_summaries_secs: float | None = USE_DEFAULT,
    summary_dir: _Folder | None = None,
    log_step_count_steps: int | None = 100,
    stop_grace_period_secs: float = 120,
    is_chief: bool = True,
    max_wait_secs: float = 7200,
    **loop_arguments: Any,
) -> MonitoredLoop[R]:
    """A :class:`torchhooks.MonitoredLoop` with the default hooks (``tf.train.MonitoredTrainingSession``).

    A period in steps takes the place of the default one in seconds, and the other way round. ``None`` or 0 switches a
    hook off. Unlike TensorFlow, steps per second are logged also where there is no folder to write them to.

    Args:
        step: the user's function.
        model: whose state is saved and restored, and what hooks can ask for.
        optimizer: likewise.
        checkpoint_dir: where checkpoints are restored from and saved to; without it, neither.
        hooks: the user's own hooks.
        chief_only_hooks: hooks that a worker leaves out, and their states in the chief's checkpoints too.
        scaffold: how a session is initialised, its saver, and the ``summary_op`` of the summaries; without that, a
            SummarySaverHook writes the session's START and nothing else, as in TensorFlow.
        state: further objects that belong into checkpoints, by name.
        save_checkpoint_secs: seconds from one checkpoint to the next; 600 if neither period is given.
        save_checkpoint_steps: steps from one to the next.
        save_summaries_steps: steps from one summary to the next; 100 if neither period is given.
        save_summaries_secs: seconds from one to the next.
        summary_dir: where curves and summaries go, if not into ``checkpoint_dir``.
        log_step_count_steps: steps from one report of steps per second to the next.
        stop_grace_period_secs: how long to wait for background threads at the end, in seconds.
        is_chief: whether this process is the one that saves and reports. Another, a worker, has ``hooks`` only. It
            waits for the chief's first checkpoint in ``checkpoint_dir`` and starts from that; unlike in TensorFlow,
            whose workers get their variables from a server. Without ``checkpoint_dir`` it starts at once.
        max_wait_secs: how long a worker waits, at most.
        loop_arguments: further arguments of the MonitoredLoop, such as ``step_unit`` and ``recoverable_errors``.

    Raises:
        ValueError: both periods were given for one hook, or one that cannot be.
        CheckpointError: the chief saved nothing for as long as a worker waits.
    """
    given, chief_only = _checked(hooks, "hooks"), _checked(chief_only_hooks, "chief_only_hooks")
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
    longest_wait = seconds(max_wait_secs, "max_wait_secs")
    elsewhere = () if is_chief else check_hook_states(_states_first(chief_only))
    if is_chief:
        folder = checkpoint_dir if summary_dir is None else summary_dir
        defaults: list[SessionRunHook] = []
        if counting:
            defaults.append(StepCounterHook(log_step_count_steps, output_dir=folder))
        if summaries and folder is not None:
            defaults.append(SummarySaverHook(**summaries, output_dir=folder, scaffold=scaffold))
        if checkpoints and checkpoint_dir is not None:
            defaults.append(CheckpointSaverHook(checkpoint_dir, **checkpoints, scaffold=scaffold))
        given = _states_first([*chief_only, *defaults, *given])
    elif checkpoint_dir is not None:
        _wait_for_chief(os.fspath(checkpoint_dir), longest_wait)
    return _Loop(
        elsewhere,
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


class _Loop(MonitoredLoop[R]):
    """A loop whose checkpoints have the states of hooks that it does not have itself.

    Args:
        hooks_elsewhere: their names.
        arguments: of the MonitoredLoop.
    """

    def __init__(self, hooks_elsewhere: Collection[str], *args: Any, **arguments: Any) -> None:
        self._hooks_elsewhere = hooks_elsewhere
        super().__init__(*args, **arguments)


def _checked(hooks: Iterable[SessionRunHook], name: str) -> list[SessionRunHook]:
    try:
        return list(check_hooks(hooks))
    except TypeError as error:
        add_note(error, f"torchhooks: in {name} of MonitoredTrainingLoop")
        raise


def _period(default: dict[str, float], **periods: Any) -> dict[str, Any]:
    """The one period to use, as an argument of a saver; nothing if it is switched off."""
    given = {name: period for name, period in periods.items() if period is not USE_DEFAULT} or default
    used = {name: period for name, period in given.items() if not _is_off(period)}
    if used:
        SecondOrStepTimer.named(**used)  # which says what is wrong, in the names that the caller knows
    return {f"save_{name.rpartition('_')[2]}": period for name, period in used.items()}


def _is_off(period: Any) -> bool:
    return period is None or (isinstance(period, (int, float)) and period <= 0)


def _states_first(hooks: list[SessionRunHook]) -> list[SessionRunHook]:
    """``hooks``, with those that have a state before the first that saves checkpoints."""
    savers = [place for place, hook in enumerate(hooks) if getattr(hook, "saves_checkpoints", False)]
    first = savers[0] if savers else len(hooks)
    behind = [(has_state(hook), hook) for hook in hooks[first:]]
    late = [hook for has_state, hook in behind if has_state]
    return [*hooks[:first], *late, *(hook for has_state, hook in behind if not has_state)]


def _wait_for_chief(checkpoint_dir: str, max_wait_secs: float) -> None:
    """Return once there is a checkpoint in ``checkpoint_dir``; look now and then, ever less often."""
    show_lines()
    begin, pause = time.monotonic(), _FIRST_PAUSE_SECS
    while latest_checkpoint(checkpoint_dir) is None:
        left = begin + max_wait_secs - time.monotonic()
        if left <= 0:
            raise CheckpointError(
                f"{checkpoint_dir} has had no checkpoint for {max_wait_secs:g} seconds, and a worker (is_chief=False) "
                "starts from one that the chief saves there: start the chief with the same checkpoint_dir and with "
                "checkpoints switched on, or wait longer with max_wait_secs."
            )
        if pause == _FIRST_PAUSE_SECS:
            logger.info(
                "waiting for the chief's first checkpoint in %s, at most %g seconds", checkpoint_dir, max_wait_secs
            )
        threading.Event().wait(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_SECS)
