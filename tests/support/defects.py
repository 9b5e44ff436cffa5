"""Ways of writing a training loop that do not resume exactly, and what is wrong with each of them.

docs/loops.md has a row for each, which is not "exact". :mod:`support.patterns` has those that are.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from support.patterns import (
    ACCUMULATE,
    BATCH,
    BATCHES,
    EPOCHS,
    EVERY,
    STEPS,
    STEPS_OF_COUNTED,
    STEPS_OF_MOST,
    Bar,
    Environment,
    Growing,
    Job,
    Loop,
    Pattern,
    Points,
    Prefetched,
    Tensor,
    TorchEnvironment,
    Train,
    counted,
    guarded,
    late_signal,
    lengths_of_history,
    nested,
    rollouts,
    try_pattern,
)
from torchhooks import StopAtStepHook

DEFECTS: dict[str, str] = {}
"""What is wrong with each of them, by its name."""


def defect(wrong: str, *, steps: tuple[int, ...] = STEPS_OF_MOST, last: int | None = STEPS) -> Callable[[Train], Train]:
    def register(train: Train) -> Train:
        EVERY[train.__name__], DEFECTS[train.__name__] = Pattern(train, steps, last), wrong
        return train

    return register


def try_defect(directory: Path, name: str) -> None:
    """Train as :func:`support.patterns.try_pattern` does, but several times only where a signal is what goes wrong."""
    try_pattern(directory, name, with_often="signal" in name)


@defect("An iterator cannot be iterated again.")
def zip_of_loaders(job: Job) -> None:
    loaders = job.loader(shuffle=True), job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for one, other in loop.until_stop(zip(*loaders, strict=True)):
                loop.run(one + other)


@defect("An iterator cannot be iterated again.")
def enumerate_inside(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for _, batch in loop.until_stop(enumerate(loader)):
                loop.run(batch)


def endless(loader: Iterable[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from loader


@defect("An iterator cannot be iterated again.", last=None)
def endless_generator(job: Job) -> None:
    with job.loop(after=[StopAtStepHook(last_step=STEPS)]) as loop:
        for batch in loop.until_stop(endless(job.loader(shuffle=True))):
            loop.run(batch)


@defect("An iterator cannot be iterated again.")
def iterator_of_a_loader(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(iter(loader)):
                loop.run(batch)


@defect("A variable of the script starts over.")
def enumerate_outside_counter(job: Job) -> None:
    """The counter decides what happens."""
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for count, batch in enumerate(loop.until_stop(loader)):
                loop.run(batch)
                if count % 2:
                    job.validate()


@defect("A variable of the script starts over.", steps=(2, 3, 4), last=6)
def enumerate_outside_limit(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for count, batch in enumerate(loop.until_stop(loader), 1):
                loop.run(batch)
                if count == 3:
                    break


@defect("A variable of the script starts over.", steps=(2, 4), last=6)
def sliced_outside(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in itertools.islice(loop.until_stop(loader), 3):
                loop.run(batch)


@defect("A variable of the script starts over.")
def zip_outside(job: Job) -> None:
    """Only one of the two loaders goes through until_stop."""
    one, other = job.loader(shuffle=True), job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for pair in zip(loop.until_stop(one), other, strict=False):
                loop.run(pair[0] + pair[1])


@defect("A variable of the script starts over.")
def iterator_in_a_variable(job: Job) -> None:
    """A number of steps goes through until_stop, and the batches come from an iterator that is started again."""
    loader = job.loader(shuffle=True)
    batches = iter(loader)
    with job.loop() as loop:
        for _ in loop.until_stop(range(STEPS)):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                batch = next(batches)
            loop.run(batch)


def sixteen_points() -> Subset[Tensor]:
    """Return more noisy points than those that a checkpoint has the random states of."""
    return Subset(Points(), [*range(8), *range(8)])


@defect("The items depend on what was drawn for earlier items, or on earlier epochs.", steps=(3, 10, 12), last=None)
def prefetched_with_noise(job: Job) -> None:
    with job.loop() as loop:
        for batch in loop.until_stop(Prefetched(DataLoader(sixteen_points(), 1, shuffle=True))):
            loop.run(batch)


class Endless:
    """A loader that starts again when it ends."""

    def __init__(self, loader: Iterable[Tensor]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Tensor]:
        return endless(self.loader)


@defect("The items depend on what was drawn for earlier items, or on earlier epochs.", steps=(3, 10, 14), last=None)
def endless_with_noise(job: Job) -> None:
    with job.loop() as loop:
        for batch in loop.until_stop(Endless(job.loader(shuffle=True)), limit=16):  # type: ignore[call-arg, unused-ignore]
            loop.run(batch)


class ShuffleBuffer(IterableDataset[Tensor]):
    """Points in an order that is drawn on the way, from the global random state."""

    def __iter__(self) -> Iterator[Tensor]:
        buffer = list(torch.linspace(-1, 1, 32).unsqueeze(1))
        while buffer:
            yield buffer.pop(int(torch.randint(len(buffer), ())))


@defect("The items depend on what was drawn for earlier items, or on earlier epochs.", steps=(3, 6, 10), last=None)
def shuffle_buffer(job: Job) -> None:
    with job.loop() as loop:
        for batch in loop.until_stop(DataLoader(ShuffleBuffer(), BATCH)):
            loop.run(batch)


@defect("The order depends on earlier epochs, which are not iterated again.")
def order_shuffled_in_place(job: Job) -> None:
    batches = job.batches()
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            random.shuffle(batches)
            batches.reverse()  # so that no batch is in the same place by chance
            for batch in loop.until_stop(batches):
                loop.run(batch)


class CountsEpochs:
    """An iterable whose order depends on how often it was iterated."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches
        self.epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        yield from self.batches[self.epoch :] + self.batches[: self.epoch]


@defect("The order depends on earlier epochs, which are not iterated again.")
def counts_its_epochs(job: Job) -> None:
    nested(job, CountsEpochs(job.batches()))


@defect("A variable of the script starts over.")
def scheduler_on_a_loss_in_a_variable(job: Job) -> None:
    loader = job.loader(shuffle=True)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer, patience=0)
    with job.loop(state={"plateau": plateau}) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            total = 0.0
            for batch in loop.until_stop(loader):
                total += loop.run(batch).item()
            plateau.step(total)
            job.saw(total)


@defect("The body is left because should_stop() is true, before its end.")
def signal_in_validation_before_a_guard(job: Job) -> None:
    late_signal(job, guard=True)


@defect("An item with several runs is yielded again, so its runs are made twice.")
def evaluation_until_stop_in_body(job: Job) -> None:
    loader, validation = job.loader(shuffle=True), job.loader()
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
                if loop.global_step % 2 == 0:
                    for other in loop.until_stop(validation):
                        job.saw(other, job.loss(other).item())


@defect("The body is left because should_stop() is true, before its end.")
def guard_before_the_end_of_the_body(job: Job) -> None:
    """What comes after the guard is left out in the process that stops."""
    guarded(job, inner=True, outer=True)


@defect("The loops are not the same in every process.", steps=(6,), last=STEPS)
def phase_skipped_by_hand(job: Job) -> None:
    """The script skips the first phase itself, so the second one counts as the first."""
    with job.loop() as loop:
        if loop.global_step < BATCHES:
            for batch in loop.until_stop(job.loader(shuffle=True)):
                loop.run(batch)
        for batch in loop.until_stop(job.loader(shuffle=True)):
            loop.run(batch)


@defect("A length is computed from what the code before the loop changes.", steps=(5, 10), last=None)
def length_of_a_list_in_state(job: Job) -> None:
    """That code is repeated when the loop is resumed, before its effect is undone."""
    lengths_of_history(job, is_guarded=False)


@defect("The loops are not the same in every process.")
def validation_at_some_epoch_starts(job: Job) -> None:
    """Whether an until_stop begins depends on the step, which is another one when the epoch is yielded again."""
    loader, validation = job.loader(shuffle=True), job.loader()
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            if loop.global_step % BATCHES == 0:
                for batch in loop.until_stop(validation):
                    job.saw(batch)
            for batch in loop.until_stop(loader):
                loop.run(batch)


@defect("An item with several runs is yielded again, so its runs are made twice.", steps=(2, 3, 8, 9, 10), last=16)
def two_runs_per_item(job: Job) -> None:
    """A generator and a discriminator, for example."""
    two_runs(job)


@defect("The body is left because should_stop() is true, before its end.", steps=(1,), last=None)
def two_runs_per_item_stopped_in_the_first(job: Job) -> None:
    two_runs(job)


def two_runs(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
                if loop.should_stop():
                    break
                loop.run(-batch)


@defect("Runs after the data had ended are made again.", steps=(2, 4, 5, 6), last=10)
def run_after_an_epoch_of_a_plain_for(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in range(EPOCHS):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            if not loop.should_stop():
                loop.run(torch.randn(2, 1))


@defect("An item with several runs is yielded again, so its runs are made twice.")
def epochs_only(job: Job) -> None:
    """Only the epochs go through until_stop, the batches do not."""
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loader:
                if loop.should_stop():
                    break
                loop.run(batch)


@defect("An item with several runs is yielded again, so its runs are made twice.", steps=(BATCHES,))
def epochs_only_interrupted_at_an_end(job: Job) -> None:
    """Only the epochs go through until_stop, and the loop is only interrupted at their ends."""
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loader:
                loop.run(batch)


@defect("The data are not given to until_stop.", last=None)
def while_not_should_stop_around_a_loader(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop(after=[StopAtStepHook(last_step=STEPS)]) as loop:
        while not loop.should_stop():
            for batch in loader:
                if loop.should_stop():
                    break
                loop.run(batch)


@defect("The state changes outside of the run.", last=None)
def while_not_should_stop_with_scheduler(job: Job) -> None:
    """Without until_stop, a checkpoint is saved inside the run."""
    with job.loop(after=[StopAtStepHook(last_step=STEPS)]) as loop:
        while not loop.should_stop():
            loop.run(torch.randn(2, 1))
            job.scheduler.step()


@defect("A variable of the script starts over.", steps=STEPS_OF_COUNTED, last=2 * STEPS)
def counted_by_enumerate(job: Job) -> None:
    loader, loop = counted(job)
    with loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for i, batch in enumerate(loop.until_stop(loader)):
                loop.run(batch, (i + 1) % ACCUMULATE == 0)


@defect("A variable of the script starts over.", steps=STEPS_OF_COUNTED, last=2 * STEPS)
def counted_by_enumerate_in_a_bar(job: Job) -> None:
    loader, loop = counted(job)
    with loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for i, batch in Bar(enumerate(loop.until_stop(loader))):
                loop.run(batch, (i + 1) % ACCUMULATE == 0)


@defect("A variable of the script starts over.", steps=STEPS_OF_COUNTED, last=2 * STEPS)
def counted_by_zip(job: Job) -> None:
    loader, loop = counted(job)
    with loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for i, batch in zip(itertools.count(), loop.until_stop(loader), strict=False):
                loop.run(batch, (i + 1) % ACCUMULATE == 0)


@defect("A variable of the script starts over.", steps=STEPS_OF_COUNTED, last=2 * STEPS)
def counted_by_enumerate_of_a_variable(job: Job) -> None:
    loader, loop = counted(job)
    with loop:
        for _ in loop.until_stop(range(EPOCHS)):
            batches = loop.until_stop(loader)
            for i, batch in enumerate(batches):
                loop.run(batch, (i + 1) % ACCUMULATE == 0)


@defect("A variable of the script starts over.", steps=STEPS_OF_COUNTED, last=2 * STEPS)
def counted_by_hand(job: Job) -> None:
    loader, loop = counted(job)
    with loop:
        for _ in loop.until_stop(range(EPOCHS)):
            i = 0
            for batch in loop.until_stop(loader):
                i += 1  # noqa: SIM113 - the way that is tried
                loop.run(batch, i % ACCUMULATE == 0)


@defect("A variable of the script starts over.", steps=STEPS_OF_COUNTED, last=2 * STEPS)
def counted_by_hand_over_epochs(job: Job) -> None:
    loader, loop = counted(job)
    i = 0
    with loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                i = i + 1
                loop.run(batch, i % ACCUMULATE == 0)


@defect("A variable of the script starts over.", steps=STEPS_OF_COUNTED, last=2 * STEPS)
def counted_by_next(job: Job) -> None:
    loader, loop = counted(job)
    numbers = itertools.count(1)
    with loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch, next(numbers) % ACCUMULATE == 0)


@defect("A variable of the script starts over.")
def mean_of_a_list(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            losses = []
            for batch in loop.until_stop(loader):
                losses.append(loop.run(batch).item())
            job.saw(sum(losses) / len(losses)) if losses else job.saw("none")


@defect("A variable of the script starts over.")
def mean_of_a_comprehension(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            losses = [loop.run(batch).item() for batch in loop.until_stop(loader)]
            job.saw(sum(losses))


@defect("A variable of the script starts over.")
def total_in_a_dict(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            totals = {"loss": 0.0}
            for batch in loop.until_stop(loader):
                totals["loss"] += loop.run(batch).item()
            job.saw(totals["loss"])


@defect("A variable of the script starts over.")
def total_in_a_function(job: Job) -> None:
    """A function trains one epoch and returns the mean loss."""
    loader = job.loader(shuffle=True)

    def train_epoch(loop: Loop) -> float:
        total, count = 0.0, 0
        for batch in loop.until_stop(loader):
            total += loop.run(batch).item()
            count += 1
        return total / max(count, 1)

    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            job.saw(train_epoch(loop))


@defect("A variable of the script starts over.", last=STEPS + BATCHES)
def best_in_a_variable(job: Job) -> None:
    loader = job.loader(shuffle=True)
    best, worse = math.inf, 0
    with job.loop() as loop:
        for epoch in loop.until_stop(range(EPOCHS + 1)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            value = job.validate() * (epoch + 1)
            if value < best:
                best = value
            else:
                worse += 1
            job.saw(best, worse)


@defect("A variable of the script starts over.")
def hidden_state_in_a_variable(job: Job) -> None:
    """As truncated backpropagation through time does."""
    loader, hidden = job.loader(shuffle=True), torch.zeros(2, 1)
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch + hidden)
                hidden = 0.5 * hidden + batch


@defect("The data are not given to until_stop.", last=None)
def next_around_the_run(job: Job) -> None:
    loader = job.loader(shuffle=True)
    batches = iter(loader)
    with job.loop(after=[StopAtStepHook(last_step=STEPS)]) as loop:
        while not loop.should_stop():
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                batch = next(batches)
            loop.run(batch)


@defect("The data are not given to until_stop.", last=None)
def next_in_the_body_of_step(job: Job) -> None:
    loader = job.loader(shuffle=True)
    batches = iter(loader)
    with job.loop(after=[StopAtStepHook(last_step=STEPS)]) as loop:
        while not loop.should_stop():
            try:
                with loop.step() as outputs:
                    outputs["loss"] = job.step(next(batches))
            except StopIteration:
                batches = iter(loader)


@defect("The data are not given to until_stop.", last=None)
def next_within_the_body_of_step(job: Job) -> None:
    loader = job.loader(shuffle=True)
    batches = iter(loader)
    with job.loop(after=[StopAtStepHook(last_step=STEPS)]) as loop:
        while not loop.should_stop():
            with loop.step() as outputs:
                try:
                    batch = next(batches)
                except StopIteration:
                    batches = iter(loader)
                    batch = next(batches)
                outputs["loss"] = job.step(batch)


@defect("A variable of the script starts over.")
def next_in_the_body_of_step_and_until_stop(job: Job) -> None:
    loader = job.loader(shuffle=True)
    with job.loop() as loop:
        batches = iter(loader)
        for _ in loop.until_stop(range(STEPS)):
            try:
                with loop.step() as outputs:
                    outputs["loss"] = job.step(next(batches))
            except StopIteration:
                batches = iter(loader)
                with loop.step() as outputs:
                    outputs["loss"] = job.step(next(batches))


class GrowingByItself(Growing):
    """The same, and it counts its epochs."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.epoch += 1


@defect(
    "The order depends on earlier epochs, which are not iterated again.",
    steps=(1, 2, 3, 5),
    last=9,
)
def growing_epochs_counted_by_the_sampler(job: Job) -> None:
    loader = job.loader(sampler=GrowingByItself())
    with job.loop() as loop:
        for _ in loop.until_stop(range(3)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
            job.validate()


@defect("A variable of the script starts over.")
def infinite_by_next(job: Job) -> None:
    batches = endless(job.loader(shuffle=True))
    with job.loop() as loop:
        for _ in loop.until_stop(range(STEPS)):
            loop.run(next(batches))


@defect("An iterator cannot be iterated again.")
def infinite_generator_with_limit(job: Job) -> None:
    batches = endless(job.loader(shuffle=True))
    with job.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(batches, limit=3):
                loop.run(batch)


@defect("A variable of the script starts over.")
def environment_in_nothing(job: Job) -> None:
    environment = Environment(job.seed)
    with job.loop() as loop:
        for _ in loop.until_stop(range(STEPS)):
            rollout = torch.cat([environment.move(action) for action in (0.0, 1.0)])
            loop.run(rollout)


@defect("A variable of the script starts over.")
def torch_environment_in_nothing(job: Job) -> None:
    environment = TorchEnvironment(job.seed)
    seen = environment.move(0.0)
    with job.loop() as loop:
        for _ in loop.until_stop(range(STEPS)):
            loss = loop.run(seen)
            seen = environment.move(loss.item())


@defect("A variable of the script starts over.")
def environment_in_a_function(job: Job) -> None:
    """The environment is used by a function that the body calls."""
    rollouts(job, Environment(job.seed).move)


@defect("A variable of the script starts over.")
def environment_in_the_step(job: Job) -> None:
    """The environment is used by the step function."""
    environment = Environment(job.seed)
    with job.loop(lambda: job.step(environment.move(0.0))) as loop:
        for _ in loop.until_stop(range(STEPS)):
            loop.run()


if __name__ == "__main__":  # for ``check``
    EVERY[sys.argv[1]].train(Job(Path("run"), save_steps=3))
