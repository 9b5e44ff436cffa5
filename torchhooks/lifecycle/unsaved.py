"""Warnings of what a training run trains and its checkpoints lack, such as a model that the loop was not given."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchhooks.common.log import logger
from torchhooks.common.trees import map_leaves


class UnsavedParts:
    """Looks at the optimizers that step in the first runs of a loop, and warns of what no checkpoint will contain.

    Args:
        saved: the model, the optimizer and the state of the loop: what checkpoints contain.
        run: returns the number of the run in progress; ``None`` between two runs.
        later: calls a function when the next run begins in which a hook is due.
    """

    def __init__(
        self, saved: Iterable[Any], run: Callable[[], int | None], later: Callable[[Callable[[], object]], object]
    ) -> None:
        self._saved = [part for part in saved if part is not None]
        self._run = run
        self._later = later
        self._is_done = False
        self._first_run: int | None = None
        self._seen: set[int] = set()
        self._thread = threading.get_ident()
        note_step = weakref.WeakMethod(self._note_step)  # torch would keep the loop alive
        handle = register_optimizer_step_post_hook(lambda optimizer, *_: (note := note_step()) and note(optimizer))
        self.close = weakref.finalize(self, handle.remove)
        """Stop looking."""

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        run = self._run() if not self._is_done and threading.get_ident() == self._thread else None
        if run is None:
            return  # of another loop, or of code between two runs
        if self._first_run is None:
            self._first_run = run
        elif run > self._first_run:
            # What steps in later runs only is not worth a call in each of them. Torch iterates over the hooks now.
            self._is_done = True
            self._later(self.close)
        if id(optimizer) not in self._seen:
            self._seen.add(id(optimizer))
            self._check(optimizer)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        name = type(optimizer).__name__
        if not any(optimizer is each for part in self._saved for each in (part, *_members(part))):
            logger.warning(
                "%s made a step, but the loop was not given it, so checkpoints do not contain its state: a process "
                "that resumes starts it afresh. Pass it, MonitoredLoop(step, model, optimizer), or "
                'state={"optimizer": ...}',
                name,
            )
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        missing = {id(parameter): parameter for parameter in trained}
        for tensor in self._tensors():
            missing.pop(id(tensor), None)
        if missing:
            pointers = {tensor.data_ptr() for part in self._saved for tensor in _tensors_of(part.state_dict())}
            missing = {key: each for key, each in missing.items() if each.data_ptr() not in pointers}
        if missing:
            logger.warning(
                "%s trains %d tensors that checkpoints do not contain, because the loop was not given their module: a "
                "process that resumes trains them from their initial values. Pass the module, "
                'MonitoredLoop(step, model, optimizer), or state={"model": ...}',
                name,
                len(missing),
            )

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of the modules that are saved."""
        for part in self._saved:
            for each in (part, *_members(part)):
                if isinstance(each, torch.nn.Module):
                    yield from each.parameters()


def _members(part: Any) -> list[Any]:
    """Return the attributes of ``part``, such as the optimizer that a wrapper of another library holds."""
    return [*getattr(part, "__dict__", {}).values()]


def _tensors_of(state: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    map_leaves(note, state)
    return found
