"""What a loop does because of ``nan.json``: from which checkpoint it begins, and with which hook."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from torchhooks.autopsy.examination import Examination
from torchhooks.autopsy.request import NAME, checkpoint_before, name_of, read
from torchhooks.checkpoints.files import inspect, list_checkpoints
from torchhooks.common.log import logger
from torchhooks.lifecycle.hook import SessionRunHook


class Plan(NamedTuple):
    """How a loop begins."""

    checkpoint: str | None
    """The name of the checkpoint, ``None`` to begin without one."""
    hook: SessionRunHook


def plan(
    folder: str,
    checkpoint: str | None,
    hooks: Sequence[SessionRunHook],
    counts_runs: bool,
) -> Plan | None:
    """Return how to begin the loop with ``hooks`` whose ``checkpoint_dir`` is ``folder``; ``None`` for as ever.

    Args:
        checkpoint: the name of the one that the caller chose, if any.
        counts_runs: whether each run makes one global step.
    """
    try:
        request = read(folder)
    except (OSError, ValueError) as error:
        logger.warning("no autopsy: %s", error)
        return None
    able = [hook for hook in hooks if hasattr(hook, "why_examined")]
    if request is None or not able:
        return None
    step = request["step"]
    finder = next((hook for hook in able if name_of(hook) == request["hook"]), None)
    if finder is None:
        logger.warning(
            "no autopsy of step %d: %s is from %s, which the loop does not have. Remove the file, or put the hook back",
            *(step, NAME, request["hook"]),
        )
        return None
    if checkpoint is None:
        found = checkpoint_before(folder, step)
        checkpoint, is_before = (None, not list_checkpoints(folder)) if found is None else (found.name, True)
    else:
        is_before = inspect(os.path.join(folder, checkpoint)).step < step
    if not is_before:
        logger.warning(
            "no autopsy of step %d, about which %s is: %s has no checkpoint before it to begin with",
            *(step, NAME, folder if checkpoint is None else checkpoint),
        )
        return None
    return Plan(checkpoint, Examination(request, finder, counts_runs))
