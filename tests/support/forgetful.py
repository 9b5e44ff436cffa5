"""Training scripts that do not resume exactly, as people write them, and what ``check`` says of each.

``python tests/support/forgetful.py NAME`` runs one of them in the current folder. :mod:`support.defects` has more: ways
of writing the loop that docs/loops.md has a row for.
"""

from __future__ import annotations

import collections
import copy
import itertools
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchhooks import CheckpointSaverHook, MonitoredLoop, StopAtStepHook, Variables, latest_checkpoint

Outputs = dict[str, Tensor]
Train = Callable[[Path], object]

FORGETFUL: dict[str, tuple[Train, str]] = {}
"""By name, the training run, and a regular expression of what ``check`` prints."""

EPOCHS, ITEMS = 3, 6


def forgets(printed: str) -> Callable[[Train], Train]:
    def register(train: Train) -> Train:
        FORGETFUL[train.__name__] = train, printed
        return train

    return register


class Parts:
    """What the scripts have in common: a small model with dropout, its optimizer, its data and its saver."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.examples = [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(ITEMS)]

    def step(self, inputs: Tensor, targets: Tensor) -> Outputs:
        self.optimizer.zero_grad()
        loss = (self.model(inputs) - targets).square().mean()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}

    def loop(self, step: Callable[..., object] | None = None, **options: Any) -> MonitoredLoop[Any]:
        hooks = [CheckpointSaverHook(self.folder, every_n_steps=2)]
        arguments = {"hooks": hooks, "checkpoint_dir": self.folder, **options}
        return MonitoredLoop(self.step if step is None else step, self.model, self.optimizer, **arguments)

    def train(self, step: Callable[..., object] | None = None, **options: Any) -> None:
        """Train with a step that has the defect."""
        with self.loop(step, **options) as loop:
            for _ in loop.until_stop(range(EPOCHS)):
                for inputs, targets in loop.until_stop(self.examples):
                    loop.run(inputs, targets)


# -- the data ---------------------------------------------------------------------------------------------------------


@forgets(r"item DIFFER(.|\n)*look at +parts in .*\.examples is in another order")
def list_shuffled_in_place(folder: Path) -> None:
    parts = Parts(folder)
    with parts.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            random.shuffle(parts.examples)
            for inputs, targets in loop.until_stop(parts.examples):
                loop.run(inputs, targets)


class Counting(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A data set that does something when an example is read for the first time."""

    def __init__(self, examples: list[tuple[Tensor, Tensor]]) -> None:
        self.examples = examples
        self.read: dict[int, int] = collections.Counter()

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read[index] += 1
        inputs, targets = self.examples[index]
        return inputs * (1 + 0.01 * self.read[index]), targets


@forgets(r"item DIFFER(.|\n)*look at +loader in .*\.dataset\.read is another one")
def data_set_that_counts(folder: Path) -> None:
    parts = Parts(folder)
    loader: Any = torch.utils.data.DataLoader(Counting(parts.examples), batch_size=None)
    with parts.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for inputs, targets in loop.until_stop(loader):
                loop.run(inputs, targets)


@forgets(r"item DIFFER(.|\n)*look at +cache in ")
def cache_of_augmented_examples(folder: Path) -> None:
    parts = Parts(folder)
    cache: dict[int, Tensor] = {}

    class Cached(Counting):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            inputs, targets = self.examples[index]
            if index not in cache:
                cache[index] = inputs + 0.1 * torch.randn(2, 4)
            return cache[index], targets

    loader: Any = torch.utils.data.DataLoader(Cached(parts.examples), batch_size=None)
    with parts.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for inputs, targets in loop.until_stop(loader):
                loop.run(inputs, targets)


@forgets(r"item DIFFER(.|\n)*look at +parts in .*\.examples starts over")
def harder_examples_each_epoch(folder: Path) -> None:
    parts = Parts(folder)
    with parts.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for inputs, targets in loop.until_stop(parts.examples):
                loop.run(inputs, targets)
            parts.examples = [(2 * inputs, targets) for inputs, targets in parts.examples]


@forgets(r"arguments DIFFER(.|\n)*look at +mixed in ")
def draws_outside_of_the_loop(folder: Path) -> None:
    parts = Parts(folder)
    mixed = iter(torch.utils.data.DataLoader(range(40), shuffle=True))  # type: ignore[arg-type]
    with parts.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for inputs, targets in loop.until_stop(parts.examples):
                loop.run(inputs, targets * next(mixed))


@forgets("arguments DIFFER")
def inner_loop_without_until_stop(folder: Path) -> None:
    parts = Parts(folder)
    with parts.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for inputs, targets in parts.examples:
                loop.run(inputs, targets)


@forgets("not in both +[1-9]")
def epochs_that_variables_count(folder: Path) -> None:
    parts = Parts(folder)
    variables = Variables(epoch=0)
    with parts.loop(state={"variables": variables}) as loop:
        for epoch in range(variables.epoch, EPOCHS):
            variables.epoch = epoch + 1
            for inputs, targets in loop.until_stop(parts.examples):
                loop.run(inputs, targets)


@forgets(r"outputs DIFFER(.|\n)*look at +generator in ")
def seeded_by_the_time_when_it_resumes(folder: Path) -> None:
    parts = Parts(folder)
    generator = torch.Generator().manual_seed(0 if latest_checkpoint(folder) is None else time.time_ns())
    parts.train(lambda inputs, targets: parts.step(inputs + torch.rand(2, 4, generator=generator), targets))


# -- variables --------------------------------------------------------------------------------------------------------


@forgets(r"arguments DIFFER(.|\n)*scale in variable_of_the_body\(\) starts over: 0\.99 after")
def variable_of_the_body(folder: Path) -> None:
    parts, scale = Parts(folder), 1.0
    with parts.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for inputs, targets in loop.until_stop(parts.examples):
                scale *= 0.99
                loop.run(inputs * scale, targets)


@forgets(r"outputs DIFFER(.|\n)*made starts over: 0 after")
def counter_of_the_trainer(folder: Path) -> None:
    class Trainer(Parts):
        made = 0

        def step(self, inputs: Tensor, targets: Tensor) -> Outputs:
            self.made += 1
            return super().step(inputs * min(self.made / 10, 1.0), targets)

    Trainer(folder).train()


@forgets(r"outputs DIFFER(.|\n)*warmup in \w+\(\) starts over")
def warmup_in_a_closure(folder: Path) -> None:
    parts, warmup = Parts(folder), 0.1

    def step(inputs: Tensor, targets: Tensor) -> Outputs:
        nonlocal warmup
        warmup = min(1.0, warmup + 0.1)
        return parts.step(inputs * warmup, targets)

    parts.train(step)


@forgets(r"outputs DIFFER(.|\n)*noise in .*\(\) starts over")
def iterator_in_the_step(folder: Path) -> None:
    parts = Parts(folder)
    noise = iter([torch.full((2, 4), 0.1 * number) for number in range(50)])
    parts.train(lambda inputs, targets: parts.step(inputs + next(noise), targets))


@forgets(r"outputs DIFFER(.|\n)*numbers in ")
def generator_function_in_the_step(folder: Path) -> None:
    def counting() -> Any:
        number = 0
        while True:
            number += 1
            yield number

    parts, numbers = Parts(folder), counting()
    parts.train(lambda inputs, targets: parts.step(inputs / next(numbers), targets))


@forgets(r"outputs DIFFER(.|\n)*count in ")
def itertools_count_in_the_step(folder: Path) -> None:
    parts, count = Parts(folder), itertools.count(1)
    parts.train(lambda inputs, targets: parts.step(inputs / next(count), targets))


@forgets(r"outputs DIFFER(.|\n)*rng in ")
def random_generator_of_its_own(folder: Path) -> None:
    parts, rng = Parts(folder), random.Random(0)
    parts.train(lambda inputs, targets: parts.step(inputs * rng.random(), targets))


@forgets(r"outputs DIFFER(.|\n)*rng in ")
def numpy_generator_of_its_own(folder: Path) -> None:
    parts, rng = Parts(folder), np.random.default_rng(0)
    parts.train(lambda inputs, targets: parts.step(inputs * rng.random(), targets))


@forgets(r"outputs DIFFER(.|\n)*generator in ")
def torch_generator_of_its_own(folder: Path) -> None:
    parts, generator = Parts(folder), torch.Generator().manual_seed(0)
    parts.train(lambda inputs, targets: parts.step(inputs + torch.rand(2, 4, generator=generator), targets))


@forgets(r"outputs DIFFER(.|\n)*replay in ")
def replay_buffer(folder: Path) -> None:
    parts = Parts(folder)
    replay: collections.deque[Tensor] = collections.deque(maxlen=4)

    def step(inputs: Tensor, targets: Tensor) -> Outputs:
        replay.append(inputs)
        return parts.step(torch.stack([*replay]).mean(0), targets)

    parts.train(step)


@forgets(r"outputs DIFFER(.|\n)*baseline")
def running_baseline(folder: Path) -> None:
    class Trainer(Parts):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.baseline = torch.zeros(())

        def step(self, inputs: Tensor, targets: Tensor) -> Outputs:
            outputs = super().step(inputs, targets - self.baseline)
            self.baseline = 0.9 * self.baseline + 0.1 * outputs["loss"].detach()
            return outputs

    Trainer(folder).train()


@forgets(r"not printed +epoch \d(.|\n)*total in mean_of_an_epoch\(\) starts over")
def mean_of_an_epoch(folder: Path) -> None:
    parts = Parts(folder)
    with parts.loop() as loop:
        for epoch in loop.until_stop(range(EPOCHS)):
            total = 0.0
            for inputs, targets in loop.until_stop(parts.examples):
                total += loop.run(inputs, targets)["loss"].item()
            print(f"epoch {epoch}: {total / ITEMS:.6f}")


@forgets(r"not printed +best(.|\n)*best in best_loss\(\)")
def best_loss(folder: Path) -> None:
    parts, best = Parts(folder), float("inf")
    with parts.loop() as loop:
        for epoch in loop.until_stop(range(EPOCHS)):
            for inputs, targets in loop.until_stop(parts.examples):
                best = min(best, loop.run(inputs, targets)["loss"].item())
            print(f"best in epoch {epoch}: {best:.6f}")


# -- objects ----------------------------------------------------------------------------------------------------------


@forgets(r"parameters DIFFER(.|\n)*other in ")
def second_optimizer(folder: Path) -> None:
    parts = Parts(folder)
    other = torch.optim.SGD(parts.model.parameters(), 0.01, momentum=0.9)

    def step(inputs: Tensor, targets: Tensor) -> Outputs:
        outputs = parts.step(inputs, targets)
        other.step()
        return outputs

    parts.train(step)


@forgets(r"parameters DIFFER(.|\n)*look at +scheduler in ")
def scheduler_per_step(folder: Path) -> None:
    parts = Parts(folder)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(parts.optimizer, 0.5)

    def step(inputs: Tensor, targets: Tensor) -> Outputs:
        parts.optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
        outputs = parts.step(inputs, targets)
        scheduler.step()
        return outputs

    parts.train(step)


@forgets("starts over +scheduler in ")
def scheduler_that_acts_later(folder: Path) -> None:
    """Its first change would come in epoch 30."""
    parts = Parts(folder)
    scheduler = torch.optim.lr_scheduler.StepLR(parts.optimizer, 30)
    with parts.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for inputs, targets in loop.until_stop(parts.examples):
                loop.run(inputs, targets)
            scheduler.step()


@forgets("starts over +average in ")
def average_of_the_weights(folder: Path) -> None:
    parts = Parts(folder)
    average = torch.optim.swa_utils.AveragedModel(parts.model)

    def step(inputs: Tensor, targets: Tensor) -> Outputs:
        outputs = parts.step(inputs, targets)
        average.update_parameters(parts.model)
        return outputs

    parts.train(step)


@forgets(r"outputs DIFFER(.|\n)*teacher in ")
def teacher_of_moving_averages(folder: Path) -> None:
    parts = Parts(folder)
    teacher = copy.deepcopy(parts.model).eval()

    def step(inputs: Tensor, targets: Tensor) -> Outputs:
        with torch.no_grad():
            wanted = 0.5 * (targets + teacher(inputs))
        outputs = parts.step(inputs, wanted)
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), parts.model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        return outputs

    parts.train(step)


@forgets(r"(parameters|optimizers|outputs|gradients) DIFFER(.|\n)*made in ")
def optimizer_replaced_in_the_middle(folder: Path) -> None:
    parts = Parts(folder)
    made = 0

    def step(inputs: Tensor, targets: Tensor) -> Outputs:
        nonlocal made
        made += 1
        if made == ITEMS + 2:
            parts.optimizer = torch.optim.SGD(parts.model.parameters(), 0.1)  # type: ignore[assignment]
        return parts.step(inputs, targets)

    parts.train(step)


@forgets(r"outputs DIFFER(.|\n)*head in ")
def head_outside_of_the_model(folder: Path) -> None:
    parts = Parts(folder)
    head = nn.Linear(1, 1)
    parts.optimizer.add_param_group({"params": head.parameters()})

    def step(inputs: Tensor, targets: Tensor) -> Outputs:
        parts.optimizer.zero_grad()
        loss = (head(parts.model(inputs)) - targets).square().mean()
        loss.backward()
        parts.optimizer.step()
        return {"loss": loss}

    parts.train(step)


@forgets(r"(gradients|parameters) DIFFER(.|\n)*look at +kept in ")
def gradients_in_a_buffer_of_its_own(folder: Path) -> None:
    parts = Parts(folder)
    kept = [torch.zeros_like(each) for each in parts.model.parameters()]

    def step(inputs: Tensor, targets: Tensor) -> Outputs:
        parts.optimizer.zero_grad()
        loss = (parts.model(inputs) - targets).square().mean()
        loss.backward()
        for buffer, parameter in zip(kept, parts.model.parameters(), strict=True):
            assert parameter.grad is not None
            buffer.mul_(0.9).add_(parameter.grad)
            parameter.grad.copy_(buffer)
        parts.optimizer.step()
        return {"loss": loss}

    parts.train(step)


@forgets(r"DIFFER(.|\n)*look at +seen in ")
def gradients_that_are_dropped_at_a_start(folder: Path) -> None:
    parts = Parts(folder)
    seen = 0

    def step(inputs: Tensor, targets: Tensor) -> Outputs:
        nonlocal seen
        if seen % 4 == 0:  # also in the first run of a process
            parts.optimizer.zero_grad()
        seen += 1
        loss = (parts.model(inputs) - targets).square().mean()
        loss.backward()
        if seen % 4 == 0:
            parts.optimizer.step()
        return {"loss": loss}

    parts.train(step)


@forgets(r"DIFFER(.|\n)*optimizer is another one before run \d+: code between two runs changes it")
def rate_set_by_code_between_the_runs(folder: Path) -> None:
    parts, rate = Parts(folder), 0.01
    with parts.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for inputs, targets in loop.until_stop(parts.examples):
                parts.optimizer.param_groups[0]["lr"] = rate
                loop.run(inputs, targets)
                rate *= 0.9


@forgets(r"outputs DIFFER(.|\n)*temperature")
def number_in_an_attribute_of_the_model(folder: Path) -> None:
    class Scaled(nn.Linear):
        temperature = 1.0

        def forward(self, inputs: Tensor) -> Tensor:
            self.temperature *= 0.9
            return super().forward(inputs) * self.temperature

    parts = Parts(folder)
    parts.model = nn.Sequential(Scaled(4, 1))
    parts.optimizer = torch.optim.Adam(parts.model.parameters(), 0.01)
    parts.train()


# -- the end ----------------------------------------------------------------------------------------------------------


@forgets(r"after its end +1 run was made|not in both")
def one_more_run_at_each_start(folder: Path) -> None:
    parts = Parts(folder)
    hooks = [CheckpointSaverHook(folder, every_n_steps=2), StopAtStepHook(last_step=13)]
    with parts.loop(hooks=hooks) as loop:
        while not loop.should_stop():
            loop.run(*parts.examples[loop.global_step % ITEMS])


# -- not deterministic ------------------------------------------------------------------------------------------------


@forgets("two training runs without an interruption differ")
def no_seed(folder: Path) -> None:
    parts = Parts(folder)
    torch.seed()
    parts.train()


@forgets("two training runs without an interruption differ")
def order_of_a_set(folder: Path) -> None:
    parts = Parts(folder)
    words = {f"word {number}" for number in range(20)}
    order = [int(word.split()[1]) % ITEMS for word in words]
    with parts.loop() as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for number in loop.until_stop(order):
                loop.run(*parts.examples[number])


if __name__ == "__main__":
    FORGETFUL[sys.argv[1]][0](Path("run"))
