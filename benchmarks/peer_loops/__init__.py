"""The same training job for each peer, written in the way that the peer intends: one file per peer.

Each file defines ``PACKAGE``, the name of its distribution; ``COLUMNS``, the modes that it supports; and
``train(job)``, which calls ``job.step(batch)`` ``job.steps`` times in the mode ``job.column``:

``"plain"``      with everything switched off that can be
``"monitored"``  with steps/sec and the loss to TensorBoard and a log line every 100 steps, and with a stop at
                 ``job.steps``, although there are more batches
``"nan"``        like ``"monitored"``, with a check of the loss for NaN in every step
``"idle"``       like ``"plain"``, with ``job.idle_hooks`` hooks that do nothing before and after every step

The step is the user's own. It calls backward and the optimizer itself wherever the peer allows it.
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
    """What to train, and how to monitor it."""

    column: str
    steps: int
    step: Stamped
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batch: Tensor
    folder: str
    """The folder for TensorBoard files."""

    @property
    def accelerator(self) -> str:
        """The type of device that the model is on."""
        return self.batch.device.type

    @property
    def monitored(self) -> bool:
        """Whether to write curves, log and stop."""
        return self.column in ("monitored", "nan")

    @property
    def checks_nan(self) -> bool:
        """Whether to check every step for NaN."""
        return self.column == "nan"

    @property
    def idle_hooks(self) -> int:
        """How many hooks that do nothing to add."""
        return IDLE_HOOKS if self.column == "idle" else 0

    @property
    def batches(self) -> Batches:
        """The data: one batch per step, or more if the loop is to be stopped at a step."""
        return Batches(self.batch, self.steps + PERIOD if self.monitored else self.steps)


class Batches(DataLoader[Any]):
    """The same batch ``number`` times. A DataLoader, since some peers require one, without its cost."""

    def __init__(self, batch: Any, number: int) -> None:
        super().__init__([None] * number, batch_size=None)  # type: ignore[arg-type]  # a list is a valid dataset
        self._batch = batch
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch declares its own iterator class
        batch = self._batch
        return (batch for _ in range(self._number))


class Rate:
    """Steps per second since the last call, for peers that do not measure it."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, steps: int = PERIOD) -> float:
        """Return the rate, given that ``steps`` steps were made since the last call."""
        now = time.monotonic()
        secs, self._last = now - self._last, now
        return steps / secs
