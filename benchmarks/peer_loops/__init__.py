"""The same training, run by each peer in its own way: one file a peer.

A file has ``PACKAGE``, the distribution that it is of; ``COLUMNS``, what of it can be measured; and ``train(job)``,
which makes ``job.steps`` steps of ``job.step(batch)``:

``"plain"``      with everything off that can be off
``"monitored"``  with steps/sec and loss to TensorBoard and a log line every 100 steps, and a stop at ``job.steps``,
                 where there are more batches than that
``"nan"``        the same, and a look at the loss of every step whether it is NaN
``"idle"``       as plain, and ``job.idle_hooks`` hooks that are called before and after every step and do nothing

The step is the user's own: it does backward and optimizer itself where a peer lets it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from common import Stamped

PERIOD = 100
IDLE_HOOKS = 10


@dataclass
class Job:
    """What is to be trained, and how it is to be watched."""

    column: str
    steps: int
    step: Stamped
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batch: Tensor
    folder: str
    """Where the TensorBoard files go."""

    @property
    def monitored(self) -> bool:
        """Whether to write, log and stop."""
        return self.column in ("monitored", "nan")

    @property
    def checks_nan(self) -> bool:
        """Whether to look for NaN in every step."""
        return self.column == "nan"

    @property
    def idle_hooks(self) -> int:
        """How many hooks that do nothing."""
        return IDLE_HOOKS if self.column == "idle" else 0

    @property
    def batches(self) -> Batches:
        """The data: as many as there are steps, or more than that where something is to stop the loop."""
        return Batches(self.batch, self.steps + PERIOD if self.monitored else self.steps)


class Batches(DataLoader[Any]):
    """The same batch so many times: a DataLoader for those who insist on one, without the cost of one."""

    def __init__(self, batch: Any, number: int) -> None:
        super().__init__([None] * number, batch_size=None)  # type: ignore[arg-type]  # a list does for a dataset
        self._batch = batch
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own has a class for it
        batch = self._batch
        return (batch for _ in range(self._number))


class Rate:
    """Steps per second since it was last asked, for peers that have none."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, steps: int = PERIOD) -> float:
        """The rate, ``steps`` having been made."""
        now = time.monotonic()
        secs, self._last = now - self._last, now
        return steps / secs
