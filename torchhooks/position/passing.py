"""Items that are passed over: ``skip.json``, which ``python -m torchhooks skip`` writes, says of which runs.

A checkpoint contains how many items of each range were passed over, so that a process that resumes later passes over
none a second time. Passing over an item makes no run and no step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torchhooks.common.errors import CheckpointError
from torchhooks.common.log import logger
from torchhooks.position.place import Place

NAME = "skip.json"


class Steps(NamedTuple):
    """The runs that make the global steps from ``first`` to ``last``."""

    first: int
    last: int

    @property
    def name(self) -> str:
        return f"{self.first}-{self.last}"


def read_skips(folder: str) -> list[Steps]:
    """Return what ``skip.json`` in ``folder`` names, in order.

    Raises:
        CheckpointError: it is not what the command writes.
    """
    path = os.path.join(folder, NAME)
    try:
        with open(path, encoding="utf-8") as file:
            return sorted(Steps(int(first), int(last)) for first, last in json.load(file)["steps"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise CheckpointError(
            f"{path} does not say what to pass over ({error}): write it with python -m torchhooks skip, or remove it"
        ) from error


class Passing:
    """Which items the ``until_stop`` loops of one monitored loop pass over.

    Args:
        skips: of which runs, in order.
        step: returns the global step.
    """

    def __init__(self, skips: list[Steps], step: Callable[[], int]) -> None:
        self._skips, self._step = skips, step
        self._depth = 0
        self.done: dict[str, int] = {}
        """How many items were passed over, by the name of the range."""

    def load(self, done: dict[str, int], depth: int) -> None:
        """Continue after what a checkpoint contains, whose innermost loop is at ``depth``."""
        self.done, self._depth = dict(done), depth
        for steps in self._skips:
            if steps.name not in self.done and self._step() >= steps.first:
                logger.warning(
                    "steps %s were made before the checkpoint of step %d, so their items are not passed over: restore "
                    "an earlier one, checkpoint_dir=.../model.ckpt-N",
                    *(steps.name, self._step()),
                )

    def over(self, iterator: Iterator[Any], place: Place) -> Iterator[Any]:
        """Return the items of ``iterator`` without those to pass over, which count as taken of ``place``."""
        self._depth = max(self._depth, place.depth)
        return _Rest(self, iterator, place)

    def due(self, place: Place) -> Steps | None:
        """Return the range of which the next item of ``place`` is to be passed over."""
        if place.nests or place.nested_before or place.depth < self._depth:
            return None  # its items are epochs
        following = self._step() + 1
        for steps in self._skips:
            done = self.done.get(steps.name, 0)
            if done <= steps.last - steps.first and (following == steps.first or done):
                return steps
        return None


class _Rest(Iterator[Any]):
    def __init__(self, passing: Passing, iterator: Iterator[Any], place: Place) -> None:
        self._passing, self._iterator, self._place = passing, iterator, place

    def __next__(self) -> Any:
        passing, place = self._passing, self._place
        while (steps := passing.due(place)) is not None:
            if place.limit is not None and place.taken >= place.limit:
                raise StopIteration
            next(self._iterator)
            place.taken += 1
            passing.done[steps.name] = passing.done.get(steps.name, 0) + 1
            logger.info(
                "passed over item %d, the one of step %d, because of %s",
                *(place.taken - 1, steps.first + passing.done[steps.name] - 1, NAME),
            )
        if place.limit is not None and place.taken >= place.limit:
            raise StopIteration
        return next(self._iterator)
