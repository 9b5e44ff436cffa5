"""Ways of writing a training loop, each of which is interrupted and resumed in new processes.

Each pattern is a function that trains a tiny model. :func:`try_pattern` computes nothing itself, and forks a process
for every attempt.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import itertools
import json
import logging
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.serialization.config
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)

import torchhooks.summary.tensorboard
from torchhooks import (
    CheckpointSaverHook,
    EvaluationHook,
    LifecycleError,
    LoggingTensorHook,
    MonitoredLoop,
    MonitoredTrainingLoop,
    Saver,
    Scaffold,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepContext,
    StopAtStepHook,
    StopIfNoDecreaseHook,
    Variables,
    latest,
    running_mean,
)
from torchhooks.common.files import Disk
from torchhooks.testing import plain

# Imported by the first save and event file: here once, and not in every process.
IMPORTED = torch.utils.serialization.config, torchhooks.summary.tensorboard

EPOCHS, BATCHES, BATCH = 2, 4, 2
STEPS = EPOCHS * BATCHES
NEVER = 10**6

Tensor = torch.Tensor
Loop = MonitoredLoop[Tensor]


# -- what a training run consists of ----------------------------------------------------------------------------------


class Points(Dataset[Tensor]):
    """A dataset of points, with noise from the global random state of torch."""

    def __init__(self, noisy: bool = True) -> None:
        self.points = torch.linspace(-1, 1, BATCHES * BATCH).unsqueeze(1)
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index] + (0.01 * torch.rand(1) if self.noisy else 0.0)


class History:
    """What happened, in order. It is part of the loop's state, so a resumed run continues that of its checkpoint."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"events": list(self.events)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.events = list(state["events"])


class QuickDisk(Disk):
    """A disk that does not sync, since no test here simulates a power failure."""

    def sync(self, file: Any) -> None:
        file.flush()

    def sync_folder(self, path: str) -> None: ...


class Interruption(NamedTuple):
    """How an attempt ends: ``"stop"``, ``"signal"`` or ``"kill"`` in the run that makes ``step``, or ``"end"``."""

    way: str
    step: int = 0

    @property
    def exit_code(self) -> int:
        return {"kill": -signal.SIGKILL, "signal": -signal.SIGTERM}.get(self.way, 0)


class AfterRun(SessionRunHook):
    """Calls ``action`` with the step after each run, as the last hook."""

    def __init__(self, action: Callable[[int], object]) -> None:
        self.action = action

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.action(run_context.session.global_step)


AFTER_AN_EPOCH = "kill after an epoch"
"""The scenario in which the newest checkpoint is one that was saved at the end of an epoch."""
SIGNALS = {"kill": signal.SIGKILL, "signal": signal.SIGTERM}
END = Interruption("end")


class Job:
    """One attempt to train. A resumed attempt has other seeds, so that only the checkpoint can make it end the same."""

    def __init__(
        self,
        folder: Path | None = None,
        seed: int = 1,
        interruption: Interruption = END,
        save_steps: int | None = NEVER,
        after_run: Callable[[int], object] | None = None,
    ) -> None:
        self.folder, self.seed, self.interruption, self.save_steps = folder, seed, interruption, save_steps
        self.after_run = after_run
        self.signal_comes_late = False
        """Whether a signal comes in :meth:`validate`, and not in a run."""
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.history = History()
        self.state: dict[str, Any] = {"scheduler": self.scheduler, "history": self.history}
        self.generators: list[Any] = []

    # -- what patterns use --------------------------------------------------------------------------------------------

    def saw(self, *values: Any) -> None:
        """Record an event."""
        self.history.events += [value.flatten().tolist() if isinstance(value, Tensor) else value for value in values]

    def step(self, inputs: Tensor) -> Tensor:
        """Make an ordinary training step, with noise from three sources."""
        self.saw(inputs)
        self.optimizer.zero_grad()
        loss = self.loss(inputs)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        self.optimizer.step()
        return loss

    def loss(self, inputs: Tensor) -> Tensor:
        noise = 0.01 * torch.randn_like(inputs) + 0.01 * random.random() + 0.01 * np.random.rand()
        return F.mse_loss(self.model(inputs + noise), inputs.sin())

    def validate(self) -> float:
        """Evaluate the model with random numbers from three sources, and record the result."""
        with torch.no_grad():
            value = float(self.loss(torch.rand(2, 1)))
        self.saw("validated", value)
        if self.signal_comes_late and self.interruption.way == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        return value

    def loader(self, noisy: bool = True, **arguments: Any) -> DataLoader[Tensor]:
        if "batch_sampler" not in arguments:
            arguments["batch_size"] = BATCH
        return DataLoader(Points(noisy), **arguments)

    def batches(self) -> list[Tensor]:
        return list(self.loader(noisy=False))

    def generator(self) -> torch.Generator:
        """Return a new generator, which must end in the same state."""
        generator = torch.Generator().manual_seed(self.seed)
        self.generators.append(generator)
        return generator

    def loop(
        self,
        step: Callable[..., Tensor] | None = None,
        *,
        before: Sequence[SessionRunHook] = (),
        after: Sequence[SessionRunHook] = (),
        state: Mapping[str, Any] | None = None,
        async_save: bool = False,
        **arguments: Any,
    ) -> Loop:
        """Return the loop, with hooks that interrupt it and save, and ``before`` and ``after`` the latter."""
        self.state.update(state or {})
        saver = Saver(max_to_keep=None, async_save=async_save)
        saver.disk = QuickDisk()
        return MonitoredLoop(
            self.step if step is None else step,
            self.model,
            self.optimizer,
            hooks=[*before, *self.stopping(), *self.saving(), *after, *self.interrupting()],
            scaffold=Scaffold(saver=saver),
            state=self.state,
            checkpoint_dir=self.folder,
            signals=["SIGTERM"],
            **arguments,
        )

    def saving(self) -> list[SessionRunHook]:
        """Return a saver, at the end of each epoch if ``save_steps`` is ``None``."""
        if self.folder is None:
            return []
        if self.save_steps is None:
            return [CheckpointSaverHook(self.folder, every_n_epochs=1)]
        return [CheckpointSaverHook(self.folder, save_steps=self.save_steps)]

    def stopping(self) -> list[SessionRunHook]:
        way, step = self.interruption
        return [StopAtStepHook(last_step=step)] if way == "stop" else []

    def interrupting(self) -> list[SessionRunHook]:
        hooks = [] if self.after_run is None else [AfterRun(self.after_run)]
        late = self.signal_comes_late and self.interruption.way == "signal"
        return [*hooks, AfterRun(self.send)] if self.interruption.way in SIGNALS and not late else list(hooks)

    def send(self, step: int) -> None:
        if step == self.interruption.step:
            os.kill(os.getpid(), SIGNALS[self.interruption.way])

    # -- the result ---------------------------------------------------------------------------------------------------

    def outcome(self) -> dict[str, Any]:
        """Return a digest of each thing that matters, and the history in full, to compare by eye."""
        parts = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **{name: part.state_dict() for name, part in self.state.items() if name != "history"},
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "generators": [generator_state(generator) for generator in self.generators],
        }
        digests = {name: hashlib.sha256(repr(plain(part)).encode()).hexdigest() for name, part in parts.items()}
        return {**digests, "history": self.history.events}


def generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.getstate()


# -- the table of patterns --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A way of writing the loop.

    Args:
        train: trains with a :class:`Job`.
        steps: the steps at which it is interrupted.
        last: whether it is stopped in its last step too. Not if it ends with a StopAtStepHook, because a loop that
            starts at its last step makes one run.
        needs: a module that it imports, which need not be installed.
    """

    train: Callable[[Job], None]
    steps: tuple[int, ...]
    last: int | None
    needs: str | None = None

    @property
    def stops(self) -> tuple[int, ...]:
        return self.steps if self.last is None else (*self.steps, self.last)

    @property
    def kills(self) -> tuple[int, ...]:
        """The steps after whose runs it is killed. The newest checkpoint is that of the step before."""
        return self.steps if self.steps != STEPS_OF_MOST else (2, BATCHES + 1)

    @property
    def scenarios(self) -> list[str]:
        return [f"stop {step}" for step in self.stops] + [f"kill {step}" for step in self.kills]

    @property
    def often(self) -> tuple[int, int]:
        """The steps at which one training run is killed, and then stopped by a signal."""
        return self.kills[0], self.kills[-1]


STEPS_OF_MOST = BATCHES, BATCHES + 1
PATTERNS: dict[str, Pattern] = {}
"""The ways that resume exactly, by name."""
EVERY: dict[str, Pattern] = {}
"""The same, and the defects of :mod:`support.defects`, if that is imported."""

Train = Callable[[Job], None]


def pattern(
    *, steps: tuple[int, ...] = STEPS_OF_MOST, last: int | None = STEPS, needs: str | None = None
) -> Callable[[Train], Train]:
    def register(train: Train) -> Train:
        EVERY[train.__name__] = PATTERNS[train.__name__] = Pattern(train, steps, last, needs)
        return train

    return register


# -- what is iterated -------------------------------------------------------------------------------------------------


def nested(job: Job, data: Iterable[Any], **arguments: Any) -> None:
    """Epochs around batches, the plainest loop."""
    with job.loop(**arguments) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(data):
                loop.run(batch)


@pattern(steps=(1, 3, 4, 5, 7))
def nested_shuffled_loader(job: Job) -> None:
    nested(job, job.loader(shuffle=True))


@pattern()
def nested_plain_loader(job: Job) -> None:
    nested(job, job.loader())


@pattern()
def nested_list(job: Job) -> None:
    nested(job, job.batches())


@pattern()
def nested_range(job: Job) -> None:
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for _ in loop.until_stop(range(BATCHES)):
                loop.run(torch.randn(2, 1))


@pattern(steps=(2, 3), last=BATCHES)
def single_loader(job: Job) -> None:
    with job.loop() as loop:
        for batch in loop.until_stop(job.loader(shuffle=True)):
            loop.run(batch)


@pattern()
def single_range(job: Job) -> None:
    with job.loop() as loop:
        for _ in loop.until_stop(range(STEPS)):
            loop.run(torch.randn(2, 1))


@pattern(steps=(3, 5), last=None)
def workers(job: Job) -> None:
    nested(job, job.loader(shuffle=True, num_workers=2))


@pattern(steps=(3, 5), last=None)
def persistent_workers(job: Job) -> None:
    nested(job, job.loader(noisy=False, shuffle=True, num_workers=2, persistent_workers=True))


@pattern()
def loader_generator(job: Job) -> None:
    nested(job, job.loader(shuffle=True, generator=job.generator()))


@pattern()
def sampler_generator(job: Job) -> None:
    nested(job, job.loader(sampler=RandomSampler(Points(), generator=job.generator())))


@pattern()
def batch_sampler(job: Job) -> None:
    nested(job, job.loader(batch_sampler=BatchSampler(RandomSampler(Points()), BATCH, drop_last=False)))


@pattern()
def batch_sampler_generator(job: Job) -> None:
    sampler = RandomSampler(Points(), generator=job.generator())
    nested(job, job.loader(batch_sampler=BatchSampler(sampler, BATCH, drop_last=False)))


@pattern()
def weighted_sampler(job: Job) -> None:
    sampler = WeightedRandomSampler(torch.arange(1.0, 9.0).tolist(), BATCHES * BATCH, generator=job.generator())
    nested(job, job.loader(sampler=sampler))


class Stream(IterableDataset[Tensor]):
    """Points in an order drawn when the iteration starts, and noise drawn on the way."""

    def __iter__(self) -> Iterator[Tensor]:
        for index in np.random.permutation(BATCHES * BATCH):
            yield torch.tensor([float(index), random.random()]).mean(0, keepdim=True)


@pattern()
def iterable_dataset(job: Job) -> None:
    nested(job, DataLoader(Stream(), batch_size=BATCH))


@pattern(needs="torchdata.stateful_dataloader")
def stateful_loader(job: Job) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    nested(job, StatefulDataLoader(Points(), BATCH, shuffle=True))


@pattern(steps=(3, 5), last=None, needs="torchdata.stateful_dataloader")
def stateful_loader_workers(job: Job) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    nested(job, StatefulDataLoader(Points(noisy=False), BATCH, shuffle=True, num_workers=2))


class OwnIterable:
    """An iterable of the script's own, which shuffles at the start of each epoch."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        for index in torch.randperm(len(self.batches)).tolist():
            yield self.batches[index]
        torch.rand(1)


@pattern()
def own_iterable(job: Job) -> None:
    nested(job, OwnIterable(job.batches()))


class Bar:
    """A progress bar like tqdm's: iterates another iterable."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        yield from self.iterable


@pattern()
def bar_inside(job: Job) -> None:
    nested(job, Bar(job.loader(shuffle=True)))


@pattern()
def bar_inside_generator(job: Job) -> None:
    nested(job, Bar(job.loader(shuffle=True, generator=job.generator())))


@pattern()
def bar_outside(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in Bar(loop.until_stop(range(EPOCHS))):
            for batch in Bar(loop.until_stop(loader)):
                loop.run(batch)


class NoisyPoints(Points):
    """A dataset with a generator of its own."""

    def __init__(self, generator: Any) -> None:
        super().__init__(noisy=False)
        self.generator = generator

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index] + float(self.generator.random())


@pattern()
def dataset_numpy_generator(job: Job) -> None:
    generator = np.random.default_rng(job.seed)
    job.generators.append(generator)
    nested(job, DataLoader(NoisyPoints(generator), BATCH, shuffle=True))


@pattern()
def dataset_python_generator(job: Job) -> None:
    generator = random.Random(job.seed)
    job.generators.append(generator)
    nested(job, DataLoader(NoisyPoints(generator), BATCH, shuffle=True))


class OwnSampler:
    """A sampler of the script's own, with a generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self.rng = generator

    def __len__(self) -> int:
        return BATCHES * BATCH

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(BATCHES * BATCH, generator=self.rng).tolist()


@pattern()
def own_sampler_generator(job: Job) -> None:
    nested(job, job.loader(sampler=OwnSampler(job.generator())))


class Pairs:
    """Two loaders in parallel, an iterable and not an iterator."""

    def __init__(self, *loaders: Iterable[Any]) -> None:
        self.loaders = loaders

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return zip(*self.loaders, strict=True)


@pattern()
def pairs_of_loaders(job: Job) -> None:
    pairs = Pairs(job.loader(shuffle=True), job.loader(shuffle=True))
    nested(job, pairs, step=lambda pair: job.step(pair[0] + pair[1]))


@pattern()
def enumerate_outside(job: Job) -> None:
    """The counter is only used for display."""
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for _, batch in enumerate(loop.until_stop(loader)):
                loop.run(batch)


@pattern(steps=(2, 3, 4), last=6)
def limit(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader, limit=3):  # type: ignore[call-arg, unused-ignore]
                loop.run(batch)


@pattern(steps=(2, 4, 5, 6))
def chained_outside(job: Job) -> None:
    one, other = job.loader(shuffle=True), job.loader()
    with job.loop() as loop:
        for batch in itertools.chain(loop.until_stop(one), loop.until_stop(other)):
            loop.run(batch)


@pattern()
def loader_of_each_epoch(job: Job) -> None:
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(job.loader(shuffle=True)):
                loop.run(batch)


@pattern()
def list_of_loaders(job: Job) -> None:
    with job.loop() as loop:
        for loader in loop.until_stop([job.loader(shuffle=True), job.loader()]):
            for batch in loop.until_stop(loader):
                loop.run(batch)


@pattern(steps=(3, 4, 8, 9), last=16)
def three_levels(job: Job) -> None:
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for _ in loop.until_stop(["a", "b"]):
                for batch in loop.until_stop(job.loader(shuffle=True)):
                    loop.run(batch)
                job.validate()


class Prefetched:
    """A loader of which one batch is always fetched ahead."""

    def __init__(self, loader: Iterable[Tensor]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Tensor]:
        iterator = iter(self.loader)
        ahead = next(iterator, None)
        while ahead is not None:
            batch, ahead = ahead, next(iterator, None)
            yield batch


@pattern()
def prefetched(job: Job) -> None:
    nested(job, Prefetched(job.loader(noisy=False, shuffle=True)))


# -- what an epoch draws itself ---------------------------------------------------------------------------------------


@pattern()
def order_randperm(job: Job) -> None:
    points = Points().points
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            order = torch.randperm(len(points))
            for indices in loop.until_stop(order.split(BATCH)):
                loop.run(points[indices])


@pattern()
def order_shuffled_new_list(job: Job) -> None:
    batches = job.batches()
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            order = list(range(len(batches)))
            random.shuffle(order)
            for index in loop.until_stop(order):
                loop.run(batches[index])


@pattern()
def order_numpy(job: Job) -> None:
    batches = job.batches()
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for index in loop.until_stop(np.random.permutation(len(batches))):
                loop.run(batches[index])


@pattern(steps=(2, 3, 4), last=6)
def order_subset(job: Job) -> None:
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            subset = Subset(Points(), torch.randperm(8)[:6].tolist())
            for batch in loop.until_stop(DataLoader(subset, BATCH, shuffle=True)):
                loop.run(batch)


@pattern()
def order_seeded_by_epoch(job: Job) -> None:
    points = Points().points
    with job.loop() as loop:
        for epoch in loop.until_stop(range(EPOCHS)):
            order = torch.randperm(len(points), generator=torch.Generator().manual_seed(epoch))
            for indices in loop.until_stop(order.split(BATCH)):
                loop.run(points[indices])


@pattern()
def set_epoch(job: Job) -> None:
    sampler: DistributedSampler[Tensor] = DistributedSampler(Points(), num_replicas=1, rank=0)
    loader = job.loader(sampler=sampler)
    with job.loop() as loop:
        for epoch in loop.until_stop(range(EPOCHS)):
            sampler.set_epoch(epoch)
            for batch in loop.until_stop(loader):
                loop.run(batch)


# -- schedulers -------------------------------------------------------------------------------------------------------


@pattern(steps=(1, 3, 4, 5, 7))
def scheduler_per_batch(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
                job.scheduler.step()


@pattern(steps=(1, 3, 4, 5, 7))
def scheduler_per_epoch(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            job.scheduler.step()


@pattern()
def scheduler_in_step(job: Job) -> None:
    def step(batch: Tensor) -> Tensor:
        loss = job.step(batch)
        job.scheduler.step()
        return loss

    nested(job, job.loader(shuffle=True), step=step)


@pattern()
def scheduler_at_epoch_start(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for epoch in loop.until_stop(range(EPOCHS)):
            if epoch:
                job.scheduler.step()
            for batch in loop.until_stop(loader):
                loop.run(batch)


@pattern()
def scheduler_on_plateau(job: Job) -> None:
    loader = job.loader(shuffle=True)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer, patience=0)
    with job.loop(state={"plateau": plateau}) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            plateau.step(job.validate())


@pattern()
def rate_by_global_step(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                for group in job.optimizer.param_groups:
                    group["lr"] = 0.01 / (1 + loop.global_step)
                loop.run(batch)


@pattern()
def scheduler_on_a_loss_in_variables(job: Job) -> None:
    loader = job.loader(shuffle=True)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer, patience=0)
    variables = Variables(best=math.inf)
    with job.loop(state={"plateau": plateau, "vars": variables}) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            variables.total = 0.0
            for batch in loop.until_stop(loader):
                variables.total += loop.run(batch).item()
            plateau.step(variables.total)
            variables.best = min(variables.best, variables.total)
            job.saw(variables.best)


# -- what else the body does ------------------------------------------------------------------------------------------


@pattern(steps=(1, 3, 4, 5, 7))
def validation_per_epoch(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            job.validate()


@pattern()
def signal_in_validation(job: Job) -> None:
    late_signal(job, guard=False)


@pattern()
def signal_between_inner_loops(job: Job) -> None:
    """The scheduler and a validation come between two inner loops, and the signal in the latter."""
    job.signal_comes_late = True
    one, other = job.loader(shuffle=True), job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(one, limit=2):
                loop.run(batch)
            job.scheduler.step()
            job.validate()
            for batch in loop.until_stop(other, limit=2):
                loop.run(batch)


@pattern(steps=(2, 4, 5), last=8)
def signal_between_phases(job: Job) -> None:
    """The same between two outermost loops."""
    job.signal_comes_late = True
    with job.loop() as loop:
        for batch in loop.until_stop(job.loader(shuffle=True)):
            loop.run(batch)
        job.scheduler.step()
        job.validate()
        for batch in loop.until_stop(job.loader(shuffle=True)):
            loop.run(batch)


def late_signal(job: Job, guard: bool) -> None:
    """Validate after each inner loop. The signal of the scenario comes then."""
    job.signal_comes_late = True
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS + 1)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            job.validate()
            if guard and loop.should_stop():
                break
            job.scheduler.step()


@pattern()
def validation_loader(job: Job) -> None:
    loader, validation = job.loader(shuffle=True), job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            for batch in validation:
                job.saw(batch)


@pattern()
def validation_until_stop(job: Job) -> None:
    loader, validation = job.loader(shuffle=True), job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            for batch in loop.until_stop(validation):
                job.saw(batch, job.loss(batch).item())


@pattern()
def evaluation_in_body(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
                if loop.global_step % 2 == 0:
                    job.validate()


@pattern()
def work_before_the_run(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                batch += 0.1 * torch.randn_like(batch)
                loop.run(batch)


@pattern()
def average_in_body(job: Job) -> None:
    loader = job.loader(shuffle=True)
    average = torch.optim.swa_utils.AveragedModel(job.model)
    with job.loop(state={"average": average}) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
                average.update_parameters(job.model)


@pattern()
def adversary_in_body(job: Job) -> None:
    """A second model, whose optimizer steps in the body before the run."""
    loader, adversary = job.loader(shuffle=True), nn.Linear(1, 1)
    optimizer = torch.optim.Adam(adversary.parameters(), lr=0.01)
    with job.loop(state={"adversary": adversary, "its optimizer": optimizer}) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                optimizer.zero_grad()
                loss = adversary(job.model(batch).detach()).mean() - adversary(batch).mean()
                loss.backward()
                optimizer.step()
                loop.run(batch)


@pattern()
def teacher_copied_into_state(job: Job) -> None:
    """Each epoch starts with a copy of the model, which the steps use."""
    loader, teacher = job.loader(shuffle=True), copy.deepcopy(job.model).eval()

    def step(batch: Tensor) -> Tensor:
        return job.step(batch + teacher(batch).detach())

    with job.loop(step, state={"teacher": teacher}) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            teacher.load_state_dict(job.model.state_dict())
            for batch in loop.until_stop(loader):
                loop.run(batch)


class Buffer:
    """A replay buffer with a state."""

    def __init__(self) -> None:
        self.values: deque[Tensor] = deque(maxlen=3)

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = deque(state["values"], maxlen=3)


@pattern()
def replay_buffer(job: Job) -> None:
    buffer = Buffer()
    with job.loop(state={"buffer": buffer}) as loop:
        for _ in loop.until_stop(range(STEPS)):
            buffer.values.append(torch.randn(1))
            loop.run(torch.stack([random.choice(buffer.values) for _ in range(2)]))


class Environment:
    """Moves a point by random numbers of a generator of its own, and by what a policy says."""

    def __init__(self, seed: int) -> None:
        self.generator, self.place = np.random.default_rng(seed), 0.0

    def move(self, action: float) -> Tensor:
        self.place += 0.1 * action + float(self.generator.standard_normal())
        return torch.tensor([[self.place]])


@pattern()
def environment_in_variables(job: Job) -> None:
    variables = Variables(env=Environment(job.seed), seen=torch.zeros(1, 1), pickled=["env"])
    with job.loop(state={"vars": variables}) as loop:
        for _ in loop.until_stop(range(STEPS)):
            loss = loop.run(variables.seen)
            variables.seen = variables.env.move(loss.item())


@pattern()
def model_changed_in_body(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
                with torch.no_grad():
                    for parameter in job.model.parameters():
                        parameter.clamp_(-0.5, 0.5).add_(0.01 * torch.rand(1))


@pattern()
def unfreezing_by_epoch(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for epoch in loop.until_stop(range(EPOCHS)):
            job.model[0].requires_grad_(epoch > 0)
            for batch in loop.until_stop(loader):
                loop.run(batch)


@pattern()
def event_at_epoch_start(job: Job) -> None:
    """What is done to the state at the start of an epoch is done again when the epoch is yielded again."""
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for epoch in loop.until_stop(range(EPOCHS)):
            job.saw("epoch", epoch)
            for batch in loop.until_stop(loader):
                loop.run(batch)


@pattern()
def helper_function(job: Job) -> None:
    loader = job.loader(shuffle=True)

    def train_epoch(loop: Loop) -> float:
        losses = [loop.run(batch).item() for batch in loop.until_stop(loader)]
        return sum(losses)

    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            train_epoch(loop)
            job.scheduler.step()


@pattern()
def closed_by_hand(job: Job) -> None:
    loader = job.loader(shuffle=True)
    loop = job.loop()
    try:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            job.validate()
    finally:
        loop.close()


# -- guards, break and continue ---------------------------------------------------------------------------------------


def guarded(job: Job, inner: bool, outer: bool, before: bool = False) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
                if before:
                    job.scheduler.step()
                if inner and loop.should_stop():
                    break
                if not before:
                    job.scheduler.step()
            if outer and loop.should_stop():
                break
            job.validate()


@pattern(steps=(1, 3, 4, 5, 7))
def guard_in_inner_body(job: Job) -> None:
    """The guard comes last in the body."""
    guarded(job, inner=True, outer=False, before=True)


@pattern(steps=(1, 3, 4, 5, 7))
def guard_after_inner_loop(job: Job) -> None:
    guarded(job, inner=False, outer=True)


@pattern(steps=(1, 3, 4, 5, 7))
def guard_in_both(job: Job) -> None:
    guarded(job, inner=True, outer=True, before=True)


@pattern(steps=(2, 3, 4), last=6)
def own_break(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
                if loop.global_step % 3 == 0:
                    break
            job.validate()


@pattern(steps=(2, 3, 4), last=6)
def own_break_before_the_run(job: Job) -> None:
    """The last item of each epoch is taken, and then left without a run."""
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for epoch in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                if loop.global_step == 3 * (epoch + 1):
                    break
                loop.run(batch)
            job.validate()


@pattern(steps=(2, 3, 4), last=6)
def own_break_and_guard(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
                if loop.global_step % 3 == 0 or loop.should_stop():
                    break
            if loop.should_stop():
                break
            job.validate()


@pattern()
def own_continue(job: Job) -> None:
    loader = DataLoader(Points(), 1, shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for number in loop.until_stop(loader):
                if abs(float(number)) > 0.6:
                    job.saw("skipped", number)
                    continue
                loop.run(number)


@pattern()
def caught_and_continued(job: Job) -> None:
    loader = DataLoader(Points(), 1, shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for number in loop.until_stop(loader):
                try:
                    if abs(float(number)) > 0.6:
                        raise ValueError("a bad example")
                    loop.run(number)
                except ValueError:
                    job.saw("caught", number)


def half_of_a_step(job: Job, number: Tensor) -> Tensor:
    """Make an ordinary training step, which fails in its middle for half of the numbers."""
    job.saw(number)
    job.optimizer.zero_grad()
    loss = job.loss(number)
    loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
    if abs(float(number)) > 0.6:
        raise ValueError("a bad example")
    job.optimizer.step()
    return loss


@pattern()
def caught_out_of_the_run(job: Job) -> None:
    loader = DataLoader(Points(), 1, shuffle=True)
    with job.loop(lambda number: half_of_a_step(job, number)) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for number in loop.until_stop(loader):
                try:
                    loop.run(number)
                except ValueError:
                    job.saw("caught", number)
            job.scheduler.step()


@pattern()
def caught_out_of_the_body(job: Job) -> None:
    loader = DataLoader(Points(), 1, shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for number in loop.until_stop(loader):
                try:
                    with loop.step() as outputs:
                        outputs["loss"] = half_of_a_step(job, number)
                except ValueError:
                    job.saw("caught", number)
            job.validate()


@pattern()
def caught_out_of_a_hook(job: Job) -> None:
    class Refusing(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            if run_context.session.global_step in (3, 6):
                raise ValueError("a bad loss")

    loader = job.loader(shuffle=True)
    with job.loop(after=[Refusing()]) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                try:
                    loop.run(batch)
                except ValueError:
                    job.saw("caught", batch)


@pattern(steps=(2, 3, 4, 5), last=None)
def caught_around_until_stop(job: Job) -> None:
    """An error ends one epoch early."""
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            try:
                for batch in loop.until_stop(loader):
                    loop.run(batch)
                    if loop.global_step == 3:
                        raise ValueError("a bad epoch")
            except ValueError:
                job.saw("caught")
            job.validate()


@pattern(steps=(2, 3, 4), last=6)
def held_generator(job: Job) -> None:
    """A variable holds the generator of until_stop after the ``break``."""
    loader = job.loader(shuffle=True)
    held = []
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            batches = loop.until_stop(loader)
            held.append(batches)
            for batch in batches:
                loop.run(batch)
                if loop.global_step % 3 == 0:
                    break
            job.validate()


@pattern()
def taken_by_next(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            batches = loop.until_stop(loader)
            while (batch := next(batches, None)) is not None:
                loop.run(batch)
            job.validate()


@pattern(last=None)
def started_again_at_its_end(job: Job) -> None:
    """The script calls next(), and until_stop again when the data have ended."""
    loader = job.loader(shuffle=True)
    with job.loop(after=[StopAtStepHook(last_step=STEPS)]) as loop:
        batches = loop.until_stop(loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                if loop.should_stop():
                    break
                job.scheduler.step()
                batches = loop.until_stop(loader)
                continue
            loop.run(batch)


@pattern()
def generator_of_the_script(job: Job) -> None:
    """The nested loops are in a generator function, and the runs outside of it."""
    loader = job.loader(shuffle=True)

    def batches(loop: Loop) -> Iterator[Tensor]:
        for _ in loop.until_stop(range(EPOCHS)):
            yield from loop.until_stop(loader)
            job.scheduler.step()

    with job.loop() as loop:
        for batch in batches(loop):
            loop.run(batch)


# -- the step in the body of loop.step() ------------------------------------------------------------------------------


@pattern(steps=(1, 3, 4, 5, 7))
def step_in_body(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                with loop.step() as outputs:
                    outputs["loss"] = job.step(batch)
                    job.saw("stepped", outputs["loss"])
            job.scheduler.step()
            job.validate()


@pattern(steps=(2, 3, 4), last=6)
def step_in_body_left_by_break(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for number, batch in enumerate(loop.until_stop(loader), loop.global_step % 3 + 1):
                with loop.step() as outputs:
                    outputs["loss"] = job.step(batch)
                    if number == 3:
                        break
            job.validate()


@pattern()
def step_in_body_then_scheduler(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                with loop.step():
                    job.step(batch)
                job.scheduler.step()


@pattern(steps=(1, 2, 3), last=4)
def step_in_body_accumulated(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop(step_unit="optimizer_step") as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for number, batch in enumerate(loop.until_stop(loader)):
                with loop.step() as outputs:
                    job.saw(batch)
                    outputs["loss"] = loss = job.loss(batch)
                    loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                    if number % 2:
                        job.optimizer.step()
                        job.optimizer.zero_grad()


# -- phases, and several runs -----------------------------------------------------------------------------------------


@pattern(steps=(2, 4, 5, 6))
def two_phases(job: Job) -> None:
    with job.loop() as loop:
        for batch in loop.until_stop(job.loader(shuffle=True)):
            loop.run(batch)
        job.validate() if loop.global_step == BATCHES else None
        job.model[0].requires_grad_(False)
        for batch in loop.until_stop(job.loader(shuffle=True)):
            loop.run(batch)


@pattern(steps=(2, 4, 5, 6))
def two_phases_change_between(job: Job) -> None:
    """The code between the phases changes the state, relative to what it was."""
    with job.loop() as loop:
        for batch in loop.until_stop(job.loader(shuffle=True)):
            loop.run(batch)
        for group in job.optimizer.param_groups:
            group["lr"] *= 0.5
        for batch in loop.until_stop(job.loader(shuffle=True)):
            loop.run(batch)


@pattern(steps=(2, 4, 5, 8, 9), last=16)
def two_phases_of_epochs(job: Job) -> None:
    with job.loop() as loop:
        for frozen in (True, False):
            job.model[0].requires_grad_(not frozen)
            for _ in loop.until_stop(range(EPOCHS)):
                for batch in loop.until_stop(job.loader(shuffle=True)):
                    loop.run(batch)
                job.scheduler.step()


@pattern(steps=(2, 4, 5, 8, 9), last=16)
def two_phases_in_an_epoch(job: Job) -> None:
    one, other = job.loader(shuffle=True), job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(one):
                loop.run(batch)
            job.validate()
            for batch in loop.until_stop(other):
                loop.run(batch)
            job.scheduler.step()


@pattern(steps=(2, 4, 5, 6, 9, 10), last=11)
def length_of_a_list_that_a_guard_keeps(job: Job) -> None:
    """The code between the loops is repeated, and does nothing the second time, so that the length is the same."""
    lengths_of_history(job, is_guarded=True)


def lengths_of_history(job: Job, is_guarded: bool) -> None:
    """Two loops in each epoch, of which the second is as long as a list that the code before it makes longer."""
    history = Variables(epochs=[])
    with job.loop(state={"lengths": history}) as loop:
        for epoch in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(job.loader(shuffle=True)):
                loop.run(batch)
            if not is_guarded or len(history.epochs) <= epoch:
                history.epochs.append(epoch)
            for _ in loop.until_stop(range(len(history.epochs))):
                loop.run(torch.randn(2, 1))


@pattern(steps=(2, 4, 8, 10), last=16)
def two_steps_in_one_run(job: Job) -> None:
    def step(batch: Tensor) -> Tensor:
        job.step(batch)
        return job.step(-batch)

    nested(job, job.loader(shuffle=True), step=step, step_unit="optimizer_step")


@pattern(steps=(1, 2, 3, 5, 6, 7), last=10)
def run_before_the_inner_loop(job: Job) -> None:
    """The run is made again on the way to the inner loop, where the checkpoint is loaded again."""
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            loop.run(torch.randn(2, 1))
            for batch in loop.until_stop(loader):
                loop.run(batch)


@pattern(steps=(2, 4, 5, 6), last=10)
def run_after_the_inner_loop(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            if not loop.should_stop():
                loop.run(torch.randn(2, 1))


@pattern(last=None)
def batches_with_while(job: Job) -> None:
    """Only the batches go through until_stop."""
    loader = job.loader(shuffle=True)
    with job.loop(after=[StopAtStepHook(last_step=STEPS)]) as loop:
        while not loop.should_stop():
            for batch in loop.until_stop(loader):
                loop.run(batch)


@pattern()
def epochs_by_a_plain_for(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in range(EPOCHS):
            for batch in loop.until_stop(loader):
                loop.run(batch)


@pattern()
def epochs_by_a_plain_for_with_scheduler(job: Job) -> None:
    """The code after an inner loop that had ended runs again."""
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in range(EPOCHS):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            job.scheduler.step()


@pattern(last=None)
def while_not_should_stop(job: Job) -> None:
    with job.loop(after=[StopAtStepHook(last_step=STEPS)]) as loop:
        while not loop.should_stop():
            loop.run(torch.randn(2, 1))


@pattern()
def step_function_context(job: Job) -> None:
    loader = job.loader(shuffle=True)

    def step_fn(batch: Tensor, context: StepContext[Tensor]) -> None:
        context.run_with_hooks(batch)
        job.validate()

    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run_step_fn(partial(step_fn, batch))


# -- gradient accumulation --------------------------------------------------------------------------------------------


def accumulated(job: Job, every: int, **arguments: Any) -> None:
    loader = DataLoader(Points(), 1, shuffle=True)
    counts = job.state["counts"] = History()

    def step(batch: Tensor) -> Tensor:
        job.saw(batch)
        counts.events.append(0)
        loss = job.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        if len(counts.events) % every == 0:
            job.optimizer.step()
            job.optimizer.zero_grad()
        return loss

    nested(job, loader, step=step, **arguments)


@pattern(steps=(2, 3, 8, 9), last=16)
def accumulation_by_run(job: Job) -> None:
    accumulated(job, 4)


@pattern(steps=(1, 2, 3), last=4)
def accumulation_by_optimizer_step(job: Job) -> None:
    accumulated(job, 4, step_unit="optimizer_step")


@pattern(steps=(2, 4, 5), last=8)
def accumulation_in_one_run(job: Job) -> None:
    """One run takes all micro-batches of an optimizer step."""

    def step(batch: Tensor) -> Tensor:
        job.saw(batch)
        job.optimizer.zero_grad()
        for part in batch.split(1):
            loss = job.loss(part)
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        job.optimizer.step()
        return loss

    nested(job, job.loader(shuffle=True), step=step)


# -- hooks, savers and loops ------------------------------------------------------------------------------------------


class Average(SessionRunHook):
    """A hook with a state: a moving average of the loss, with noise."""

    def __init__(self) -> None:
        self.value = 0.0

    def before_run(self, run_context: SessionRunContext) -> Any:
        from torchhooks import SessionRunArgs

        return SessionRunArgs("loss")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.value += 0.5 * (float(run_values.results) + random.random() - self.value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


@pattern()
def stateful_hook_before_saver(job: Job) -> None:
    hook = Average()
    nested(job, job.loader(shuffle=True), before=[hook])
    job.state["hook"] = hook


@pattern()
def stateful_hook_after_saver(job: Job) -> None:
    hook = Average()
    nested(job, job.loader(shuffle=True), after=[hook])
    job.state["hook"] = hook


@pattern()
def async_save(job: Job) -> None:
    nested(job, job.loader(shuffle=True), async_save=True)


@pattern()
def monitored_training_loop(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with MonitoredTrainingLoop(
        job.step,
        job.model,
        job.optimizer,
        checkpoint_dir=job.folder,
        hooks=[*job.stopping(), *job.interrupting()],
        state=job.state,
        save_checkpoint_steps=job.save_steps,
        save_summaries_steps=None,
        log_step_count_steps=None,
        signals=["SIGTERM"],
    ) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            job.scheduler.step()


@pattern(last=None)
def stopped_by_a_hook_in_an_epoch(job: Job) -> None:
    """The last epoch is not complete, and the code after it runs."""
    loader = job.loader(shuffle=True)
    with job.loop(before=[StopAtStepHook(last_step=7)]) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            job.scheduler.step()


# -- counting batches, and the script's own variables -----------------------------------------------------------------

STEPS_OF_COUNTED = 2, 3, 8, 9
ACCUMULATE = 3


def counted(job: Job, **arguments: Any) -> tuple[Iterable[Tensor], Loop]:
    """Return a loader of eight batches, and a loop that runs ``(batch, whether the optimizer steps)``."""

    def step(batch: Tensor, steps: bool) -> Tensor:
        job.saw(batch, steps)
        loss = job.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        if steps:
            job.optimizer.step()
            job.optimizer.zero_grad()
        return loss

    return DataLoader(Points(), 1, shuffle=True), job.loop(step, **arguments)


@pattern(steps=STEPS_OF_COUNTED, last=2 * STEPS)
def counted_by_the_loop(job: Job) -> None:
    loader, loop = counted(job)
    with loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for i, batch in loop.enumerate(loader):
                loop.run(batch, (i + 1) % ACCUMULATE == 0)


@pattern(steps=STEPS_OF_COUNTED, last=2 * STEPS)
def counted_by_the_loop_from_one(job: Job) -> None:
    loader, loop = counted(job)
    with loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for i, batch in loop.enumerate(loader, 1):
                loop.run(batch, i % ACCUMULATE == 0)
                if i == 7:
                    break


@pattern(steps=(2, 3, 8, 9), last=None)
def counted_by_the_loop_repeating(job: Job) -> None:
    loader, loop = counted(job, after=[StopAtStepHook(last_step=2 * STEPS)])
    with loop:
        for i, batch in loop.enumerate(loader, repeat=True):
            loop.run(batch, (i + 1) % ACCUMULATE == 0)


@pattern(steps=(1, 2, 3), last=4)
def counted_by_the_loop_in_body(job: Job) -> None:
    with job.loop(step_unit="optimizer_step") as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for i, batch in loop.enumerate(job.loader(shuffle=True)):
                with loop.step() as outputs:
                    job.saw(batch)
                    outputs["loss"] = loss = job.loss(batch) / 2
                    loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                    if (i + 1) % 2 == 0:
                        job.optimizer.step()
                        job.optimizer.zero_grad()


@pattern(steps=STEPS_OF_COUNTED, last=2 * STEPS)
def counted_in_variables(job: Job) -> None:
    variables = Variables(i=0)
    loader, loop = counted(job, state={"vars": variables})
    with loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                variables.i += 1
                loop.run(batch, variables.i % ACCUMULATE == 0)


@pattern(steps=STEPS_OF_COUNTED, last=2 * STEPS)
def counted_in_variables_of_each_epoch(job: Job) -> None:
    variables = Variables()
    loader, loop = counted(job, state={"vars": variables})
    with loop:
        for _ in loop.until_stop(range(EPOCHS)):
            variables.i = 0
            for batch in loop.until_stop(loader):
                loop.run(batch, (variables.i + 1) % ACCUMULATE == 0)
                variables.i += 1


@pattern(last=STEPS + BATCHES)
def best_in_variables(job: Job) -> None:
    loader = job.loader(shuffle=True)
    variables = Variables(best=math.inf, worse=0)
    with job.loop(state={"vars": variables}) as loop:
        for epoch in loop.until_stop(range(EPOCHS + 1)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            value = job.validate() * (epoch + 1)
            if value < variables.best:
                variables.best = value
            else:
                variables.worse += 1
            job.saw(variables.best, variables.worse)


@pattern()
def hidden_state_in_variables(job: Job) -> None:
    loader, variables = job.loader(shuffle=True), Variables(hidden=torch.zeros(2, 1))
    with job.loop(state={"vars": variables}) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch + variables.hidden)
                variables.hidden = 0.5 * variables.hidden + batch


# -- an iterator that starts again when the data end ------------------------------------------------------------------


@pattern(last=None)
def repeated(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop(after=[StopAtStepHook(last_step=STEPS)]) as loop:
        for batch in loop.until_stop(loader, repeat=True):
            loop.run(batch)


@pattern(last=None)
def repeated_in_the_body_of_step(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop(after=[StopAtStepHook(last_step=STEPS)]) as loop:
        for batch in loop.until_stop(loader, repeat=True):
            with loop.step() as outputs:
                outputs["loss"] = job.step(batch)
            job.scheduler.step()


@pattern(last=None)
def repeated_and_left_by_break(job: Job) -> None:
    """An epoch is a number of steps, not a pass over the data."""
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader, repeat=True):
                loop.run(batch)
                if loop.global_step % 5 == 0:
                    break
            job.validate()


@pattern(last=None)
def repeated_by_next(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop(after=[StopAtStepHook(last_step=STEPS)]) as loop:
        batches = loop.until_stop(loader, repeat=True)
        while (batch := next(batches, None)) is not None:
            loop.run(batch)


# -- what the step returns in some runs only, and metrics at the end of an epoch --------------------------------------


def saying(job: Job, tensors: Any, **period: Any) -> LoggingTensorHook:
    """Return a hook whose lines are in the history."""

    def line(values: dict[str, Any]) -> str:
        job.saw(*(f"{name} = {value}" for name, value in values.items()))
        return "said"

    return LoggingTensorHook(tensors, formatter=line, **period)


def adversarial(job: Job, hook: SessionRunHook) -> None:
    """The generator is trained in every third run, and only these return its loss."""
    loader = job.loader(shuffle=True)

    def step(batch: Tensor, step: int) -> Any:
        loss = job.step(batch)
        return {"loss": loss, "g_loss": 2 * loss} if step % 3 == 2 else {"loss": loss}

    with job.loop(step, before=[hook]) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch, loop.global_step)


@pattern()
def sometimes_returned_and_latest(job: Job) -> None:
    adversarial(job, saying(job, {"loss": "loss", "g": latest("g_loss")}, every_n_steps=2))


@pattern()
def sometimes_returned_and_latest_of_the_epoch(job: Job) -> None:
    adversarial(
        job, saying(job, {"loss": running_mean("loss", reset="epoch"), "g": latest("g_loss")}, every_n_epochs=1)
    )


@pattern()
def sometimes_returned_and_fetched(job: Job) -> None:
    """The period is that of the runs that return it."""
    adversarial(job, saying(job, {"g": "g_loss"}, every_n_steps=3))


def plateau(job: Job, metric: Callable[[], float], *hooks: SessionRunHook, guard: bool = False, **state: Any) -> None:
    """Step the scheduler with the metric of the epoch. Without the guard, also after the part of an epoch."""
    loader = job.loader(shuffle=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer, patience=0)
    with job.loop(before=hooks, state={"plateau": scheduler, **state}) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            if guard and loop.should_stop():
                break
            scheduler.step(metric())
            job.saw(scheduler.best)


def evaluating(job: Job, **period: Any) -> EvaluationHook:
    return EvaluationHook(lambda: {"val_loss": job.loss(torch.ones(2, 1)).item()}, **period)


@pattern()
def plateau_by_an_evaluation_of_each_epoch(job: Job) -> None:
    evaluation = evaluating(job, every_n_epochs=1)
    plateau(job, lambda: evaluation.values["val_loss"], evaluation, guard=True)


@pattern(steps=(5, 7))
def plateau_by_an_evaluation_without_a_guard(job: Job) -> None:
    evaluation = evaluating(job, every_n_epochs=1)
    plateau(job, lambda: evaluation.values["val_loss"], evaluation)


@pattern()
def plateau_by_an_evaluation_every_n_steps(job: Job) -> None:
    evaluation = evaluating(job, every_n_steps=2)
    plateau(job, lambda: evaluation.values["val_loss"], evaluation)


@pattern()
def plateau_by_a_variable(job: Job) -> None:
    variables = Variables(metric=math.inf)

    def metric() -> float:
        variables.metric = min(variables.metric, job.validate())
        return float(variables.metric)

    plateau(job, metric, vars=variables)


@pattern()
def plateau_by_an_evaluation_in_epochs_left_by_break(job: Job) -> None:
    evaluation = evaluating(job, every_n_epochs=1)
    loader = job.loader(shuffle=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer, patience=0)
    with job.loop(before=[evaluation], state={"plateau": scheduler}) as loop:
        for _ in loop.until_stop(range(EPOCHS + 1)):
            for i, batch in loop.enumerate(loader, 1):
                loop.run(batch)
                if i == 3:
                    break
            if loop.should_stop():
                break
            scheduler.step(evaluation.values["val_loss"])


@pattern(last=None)
def stopped_by_a_metric_of_the_epoch(job: Job) -> None:
    evaluation = evaluating(job, every_n_epochs=1)
    loader = job.loader(shuffle=True)
    hooks = [evaluation, StopIfNoDecreaseHook(evaluation["val_loss"], max_steps_without_decrease=6)]
    with job.loop(before=hooks) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            job.saw(evaluation.values.get("val_loss"))


# -- how long epochs are, and how they are left -----------------------------------------------------------------------


class Growing:
    """A sampler that yields more points in each later epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 4 + 2 * self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(BATCHES * BATCH)[: len(self)].tolist()


class RandomlyLong(Growing):
    """A sampler that draws how many points it yields."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(BATCHES * BATCH)[: int(torch.randint(4, 8, ()))].tolist()


@pattern(steps=(1, 2, 3, 5), last=9)
def growing_epochs(job: Job) -> None:
    sampler = Growing()
    loader = job.loader(sampler=sampler)
    with job.loop() as loop:
        for epoch in loop.until_stop(range(3)):
            sampler.set_epoch(epoch)
            for batch in loop.until_stop(loader):
                loop.run(batch)
            job.validate()


@pattern(steps=(1, 2, 3, 5), last=None)
def epochs_of_random_length(job: Job) -> None:
    loader = job.loader(sampler=RandomlyLong())
    with job.loop() as loop:
        for _ in loop.until_stop(range(3)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            job.validate()


@pattern(steps=(1, 2, 3, 5), last=9)
def growing_limit(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for epoch in loop.until_stop(range(3)):
            for batch in loop.until_stop(loader, limit=2 + epoch):
                loop.run(batch)
            job.scheduler.step()


@pattern(steps=(2, 3, 4), last=None)
def own_break_out_of_both(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
                if loop.global_step == 5:
                    break
            if loop.global_step == 5:
                break
        job.saw("broke out") if loop.global_step == 5 else None


@pattern(steps=(2, 6), last=None)
def stopped_early_by_a_break(job: Job) -> None:
    """Early stopping by a counter in Variables, and a last test in the ``with`` block."""
    loader, variables = job.loader(shuffle=True), Variables(bad=0)
    with job.loop(state={"vars": variables}) as loop:
        for _ in loop.until_stop(range(EPOCHS + 3)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            job.validate()
            variables.bad += 1
            if variables.bad == EPOCHS:
                break
        job.validate()


@pattern(steps=(2, 3, 4), last=None)
def returned_from_the_training_run(job: Job) -> None:
    loader = job.loader(shuffle=True)

    def train(loop: Loop) -> None:
        for _ in loop.until_stop(range(EPOCHS + 1)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
                if loop.global_step == 5:
                    job.saw("returned")
                    return

    with job.loop() as loop:
        train(loop)


@pattern(steps=(2, 3, 4), last=6)
def returned_from_an_epoch(job: Job) -> None:
    loader = job.loader(shuffle=True)

    def train_epoch(loop: Loop) -> float:
        for i, batch in loop.enumerate(loader, 1):
            loss = loop.run(batch)
            if i == 3:
                return loss.item()
        return 0.0

    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            train_epoch(loop)
            job.scheduler.step()
            job.validate()


@pattern()
def continue_in_an_enumeration(job: Job) -> None:
    loader = DataLoader(Points(), 1, shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for i, number in loop.enumerate(loader):
                if i % 2:
                    job.saw("skipped", number)
                    continue
                loop.run(number)


# -- data without an end ----------------------------------------------------------------------------------------------


class Chain:
    """An infinite iterator with a state: each point depends on the one before."""

    def __init__(self, seed: int) -> None:
        self.generator, self.point = torch.Generator().manual_seed(seed), torch.zeros(2, 1)

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        self.point = 0.5 * self.point + torch.randn(2, 1, generator=self.generator)
        return self.point

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "point": self.point.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.point = state["point"].clone()


@pattern(last=None)
def infinite_with_a_state(job: Job) -> None:
    with job.loop(after=[StopAtStepHook(last_step=STEPS)]) as loop:
        for batch in loop.until_stop(Chain(job.seed)):
            loop.run(batch)


@pattern(last=None)
def infinite_in_state(job: Job) -> None:
    data = Chain(job.seed)
    with job.loop(after=[StopAtStepHook(last_step=STEPS)], state={"data": data}) as loop:
        for batch in loop.until_stop(data):
            loop.run(batch)


@pattern()
def infinite_in_state_with_limit(job: Job) -> None:
    data = Chain(job.seed)
    with job.loop(state={"data": data}) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(data, limit=BATCHES):
                loop.run(batch)
            job.validate()


@pattern()
def infinite_in_state_by_next(job: Job) -> None:
    data = Chain(job.seed)
    with job.loop(state={"data": data}) as loop:
        for _ in loop.until_stop(range(STEPS)):
            loop.run(next(data))


@pattern(last=None)
def infinite_in_state_without_until_stop(job: Job) -> None:
    data = Chain(job.seed)
    with job.loop(after=[StopAtStepHook(last_step=STEPS)], state={"data": data}) as loop:
        while not loop.should_stop():
            loop.run(next(data))


# -- an environment of reinforcement learning -------------------------------------------------------------------------


class TorchEnvironment:
    """The same with a generator of torch, which cannot be pickled, and a state."""

    def __init__(self, seed: int) -> None:
        self.generator, self.place = torch.Generator().manual_seed(seed), 0.0

    def move(self, action: float) -> Tensor:
        self.place += 0.1 * action + float(torch.randn(1, generator=self.generator))
        return torch.tensor([[self.place]])

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.place = state["place"]


class PickledEnvironment(TorchEnvironment):
    """The same, with what Python needs to pickle it."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "generator": self.generator.get_state().tolist()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "generator": torch.Generator()}
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


def rollouts(job: Job, move: Callable[[float], Tensor], **state: Any) -> None:
    """Collect a rollout in each item, and train with it."""
    with job.loop(state=state) as loop:
        for _ in loop.until_stop(range(STEPS)):
            rollout = torch.cat([move(action) for action in (0.0, 1.0)])
            loop.run(rollout)


@pattern()
def torch_environment_in_variables(job: Job) -> None:
    variables = Variables(env=PickledEnvironment(job.seed), pickled=["env"])
    rollouts(job, lambda action: variables.env.move(action), vars=variables)


@pattern()
def environment_in_state(job: Job) -> None:
    environment = TorchEnvironment(job.seed)
    rollouts(job, environment.move, environment=environment)


# -- the server -------------------------------------------------------------------------------------------------------


def trained(name: str, job: Job) -> dict[str, Any]:
    EVERY[name].train(job)
    return job.outcome()


def make_originals(folder: Path, name: str) -> None:
    """Train without interruption, with a checkpoint in every step, and up to each stop.

    While it saves in every step, copy what is in the folder after the runs in which it is to be killed.
    """
    steps, saving, epochs = EVERY[name].kills, folder / "saving", folder / "epochs"

    def copy(source: Path, copied: Path) -> None:
        while not copied.exists():
            try:
                shutil.copytree(source, copied, copy_function=os.link)
            except shutil.Error:  # a thread that saves has renamed or removed a file meanwhile
                shutil.rmtree(copied)

    def copy_at(step: int) -> None:
        if step in steps:
            copy(saving, folder / f"kill {step}")

    def copy_epoch(step: int) -> None:
        """Copy in the first run after the first checkpoint of an epoch."""
        if {each.name for each in epochs.glob("model.ckpt-*")} - {"model.ckpt-0"}:
            copy(epochs, folder / AFTER_AN_EPOCH)

    with logging_to(io.StringIO()) as lines:
        outcomes = {
            "whole": trained(name, Job()),
            "saving": trained(name, Job(saving, save_steps=1, after_run=copy_at)),
        }
    logged = {f"kill {step}": lines.getvalue() for step in steps}
    with logging_to(io.StringIO()) as lines:
        try:
            outcomes["saving epochs"] = trained(name, Job(epochs, save_steps=None, after_run=copy_epoch))
        except LifecycleError as error:
            if "is due at the end of an epoch" not in str(error):
                raise
    logged[AFTER_AN_EPOCH] = lines.getvalue()
    for step in EVERY[name].stops:
        with logging_to(io.StringIO()) as lines:
            trained(name, Job(folder / f"stop {step}", interruption=Interruption("stop", step)))
        logged[f"stop {step}"] = lines.getvalue()
    (folder / "originals").write_text(json.dumps({**outcomes, "logged": logged}))


@contextmanager
def logging_to(lines: io.StringIO) -> Iterator[io.StringIO]:
    """Write what torchhooks logs to ``lines``."""
    handler = logging.StreamHandler(lines)
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    logger = logging.getLogger("torchhooks")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def resume_all(folder: Path, name: str) -> None:
    """Resume each training run that was stopped or killed. None of them was made in this process."""
    pattern, results = EVERY[name], {}
    before = json.loads((folder / "originals").read_text())["logged"]
    after_epoch = [AFTER_AN_EPOCH] if (folder / AFTER_AN_EPOCH).exists() else []
    for number, scenario in enumerate([*pattern.scenarios, *after_epoch], start=1):
        try:
            with logging_to(io.StringIO(before.get(scenario, ""))) as logged:
                logged.seek(0, io.SEEK_END)
                outcome = trained(name, Job(folder / scenario, 100 + number))
            results[scenario] = {"outcome": outcome, "logged": logged.getvalue()}
        except Exception:
            results[scenario] = {"error": traceback.format_exc()}
    (folder / "resumed").write_text(json.dumps(results))


def in_a_process(function: Callable[..., None], *arguments: Any) -> tuple[int, str]:
    """Call the function in a new process. Return its exit code, negative if it died of a signal, and its stderr."""
    with tempfile.TemporaryFile() as errors:
        process = os.fork()
        if not process:
            code = 1
            try:
                os.dup2(errors.fileno(), 2)
                torch.set_num_threads(1)
                function(*arguments)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        errors.seek(0)
        return code, errors.read().decode()


def attempt(folder: Path, name: str, seed: int, interruption: Interruption, save_steps: int) -> None:
    """Train in this process. Write the outcome into ``folder``."""
    outcome = trained(name, Job(folder, seed, interruption, save_steps))
    (folder / "outcome").write_text(json.dumps(outcome))


def often(folder: Path, name: str) -> dict[str, Any]:
    """Train, interrupted several times, each attempt in a process of its own. Return the outcome, or an error."""
    logged = ""
    ways = zip(("kill", "signal"), EVERY[name].often, strict=True)
    for number, interruption in enumerate([*(Interruption(way, step) for way, step in ways), END]):
        save_steps = NEVER if interruption.way == "signal" else 1
        code, errors = in_a_process(attempt, folder, name, 1 + 100 * number, interruption, save_steps)
        if code != interruption.exit_code:
            return {"error": f"attempt {number}, {interruption}: exit code {code}\n{errors}"}
        logged += errors
    return {"outcome": json.loads((folder / "outcome").read_text()), "logged": logged}


def try_pattern(directory: Path, name: str, with_often: bool = True) -> None:
    """Train in all the ways, the last of which is :func:`often`, and write the results into a file."""
    folder = directory / name
    folder.mkdir()
    for part in (make_originals, resume_all):
        code, errors = in_a_process(part, folder, name)
        if code:
            results: dict[str, Any] = {"error": errors}
            break
    else:
        originals, resumed = (json.loads((folder / part).read_text()) for part in ("originals", "resumed"))
        saving = {
            each: {"outcome": originals[each], "logged": ""}
            for each in ("saving", "saving epochs")
            if each in originals
        }
        results = {"whole": originals["whole"], **saving, **resumed}
        if with_often:
            results["often"] = often(folder / "often", name)
    shutil.rmtree(folder)
    (directory / f"{name}.json").write_text(json.dumps(results))
