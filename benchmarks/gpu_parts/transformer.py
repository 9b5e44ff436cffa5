"""A transformer of 124 million parameters: what monitoring costs, what waits, whether the rate is right; its saves."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from support import simulated
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from torchhooks import (
    CheckpointSaverHook,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    Saver,
    Session,
    SessionRunHook,
    StepCounterHook,
    SummarySaverHook,
)
from torchhooks.testing import RecordingWriter

from common import Rounds, median_ratio, table
from gpu_parts import ACCELERATOR, CUDA, DEVICE, IS_SIMULATED, Options, Skip, synchronize, time_left, waits_of

PERIOD = 10
STEPS = 40
BARE, BY_HAND, USUAL, ALL_DUE = "bare", "by hand, each 10 steps", "torchhooks, the same and a NaN check", "all due"

Drive = Callable[[int], None]


class Size(NamedTuple):
    """How large the transformer is, and its batch."""

    layers: int
    width: int
    vocabulary: int
    batch: int
    block: int


# GPT-2 in its smallest size; without a GPU, one to try the script out.
SIZE = Size(12, 768, 50304, 8, 1024) if CUDA else Size(2, 64, 500, 2, 32)


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        width = SIZE.width
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = max(SIZE.width // 64, 1)
        q, k, v = self.attention(self.norms[0](x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(2))
        output: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return output


class Transformer(nn.Module):
    """Predicts the next token; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SIZE.vocabulary, SIZE.width)
        self.positions = nn.Embedding(SIZE.block, SIZE.width)
        self.blocks = nn.Sequential(*(Block() for _ in range(SIZE.layers)))
        self.norm, self.head = nn.LayerNorm(SIZE.width), nn.Linear(SIZE.width, SIZE.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.tokens(inputs) + self.positions.weight)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Training:
    """The model, its optimizer, and eight batches that take turns."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        self.model = Transformer().to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=CUDA)
        shape = SIZE.batch, SIZE.block + 1
        self.batches = [torch.randint(SIZE.vocabulary, shape, device=DEVICE) for _ in range(8)]

    def step(self, batch: Tensor) -> Tensor:
        """Make a step, in bfloat16 on CUDA."""
        self.optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
            loss: Tensor = self.model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        self.optimizer.step()
        return loss

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def flops(self) -> float:
        """How many operations on floats a step makes, roughly."""
        tokens = SIZE.batch * SIZE.block
        return tokens * (6.0 * self.parameters + 12 * SIZE.layers * SIZE.width * SIZE.block)

    def drive(self, run: Callable[[Tensor], object]) -> Drive:
        """Return what calls ``run`` for the batches in turn."""

        def drive(steps: int) -> None:
            for number in range(steps):
                run(self.batches[number % len(self.batches)])

        return drive


def by_hand(training: Training, writer: SummaryWriter) -> Drive:
    """Monitor as it is usually written by hand."""
    log, number, last = logging.getLogger("by_hand"), 0, time.monotonic()

    def run(batch: Tensor) -> None:
        nonlocal number, last
        loss = training.step(batch)
        number += 1
        if number % PERIOD == 0:
            value, now = loss.item(), time.monotonic()
            rate, last = PERIOD / (now - last), now
            if math.isnan(value):
                raise FloatingPointError(f"the loss is NaN at step {number}")
            writer.add_scalar("loss", value, number)
            writer.add_scalar("steps/sec", rate, number)
            log.info("step %d: loss %g, %g steps/sec", number, value, rate)

    return training.drive(run)


def hooks(folder: str, every: int) -> list[SessionRunHook]:
    """Return the usual hooks, which report each ``every`` steps, and check for NaN in all of them."""
    return [
        NanTensorHook("loss"),
        LoggingTensorHook({"loss": "loss", "lr": "lr"}, every_n_steps=every),
        StepCounterHook(every, output_dir=folder, tokens_per_step=SIZE.batch * SIZE.block),
        SummarySaverHook(every, output_dir=folder, summary_op={"loss": "loss", "lr": "lr"}),
    ]


def transformer(options: Options) -> Iterator[str]:
    """Train a transformer bare, monitored by hand and with hooks, in turns; count waits; compare rates with events."""
    started, training = time.monotonic(), Training()
    yield f"{training.parameters / 1e6:.1f} million parameters, {SIZE}, on {DEVICE}."
    with TemporaryDirectory() as folder, ExitStack() as stack:

        def hooked(name: str, every: int) -> Drive:
            loop = MonitoredLoop(training.step, training.model, training.optimizer, hooks=hooks(folder + name, every))
            return training.drive(stack.enter_context(loop).run)

        candidates = {
            BARE: training.drive(training.step),
            BY_HAND: by_hand(training, stack.enter_context(SummaryWriter(folder + "/hand"))),
            USUAL: hooked("/usual", PERIOD),
            ALL_DUE: hooked("/all", 1),
        }
        figures: Rounds = {name: [] for name in candidates}
        for number in range(6):
            names = [*candidates][number % 4 :] + [*candidates][: number % 4]
            for name in names:
                secs = secs_per_step(candidates[name])
                if number:  # the first round warms up
                    figures[name].append(secs)
            if number and time_left(options, started) < 3 * (time.monotonic() - started) / (number + 1):
                break
        rows = []
        for name, found in figures.items():
            ratio, tflops = median_ratio(figures[BARE], found), training.flops / median(found) / 1e12
            rows.append((name, median(found) * 1e3, f"{ratio:.4f}", tflops))
        yield table(["a step", "ms", "speed, of bare", "TFLOP/s"], rows)
        waits = {name: waits_of(partial(drive, STEPS)) for name, drive in candidates.items()}
        counts = [(name, str(len(places))) for name, places in waits.items()]
        yield table([f"waits of the host in {STEPS} steps", ""], counts)
        assert not waits[USUAL], f"hooks made the host wait: {waits[USUAL]}"
    if not CUDA:
        yield "The rate is compared with CUDA events on CUDA only."
        return
    errors = rate_errors(training)
    yield f"Reported steps/sec against CUDA events over the same steps: at most {max(map(abs, errors)):.3f} % off."
    assert max(map(abs, errors)) < 1, errors


def secs_per_step(drive: Drive) -> float:
    """Measure seconds per step, from an idle device to an idle device."""
    synchronize()
    started = time.perf_counter()
    drive(STEPS)
    synchronize()
    return (time.perf_counter() - started) / STEPS


def rate_errors(training: Training) -> list[float]:
    """Return by how many percent each reported rate is off, compared with events at both ends of its period."""
    events: list[torch.cuda.Event] = []

    def step(batch: Tensor) -> Tensor:
        loss = training.step(batch)
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        return loss

    writer = RecordingWriter()
    counter = StepCounterHook(PERIOD, summary_writer=writer)
    with MonitoredLoop(step, training.model, training.optimizer, hooks=[NanTensorHook("loss"), counter]) as loop:
        training.drive(loop.run)(6 * PERIOD + 1)
    synchronize()
    periods = [(rate, events[at - PERIOD - 1], events[at - 1]) for at, rate in writer.scalars["global_step/sec"]]
    return [(rate * begin.elapsed_time(end) / PERIOD / 1e3 - 1) * 100 for rate, begin, end in periods]


# -- saves ------------------------------------------------------------------------------------------------------------


def saves(options: Options) -> Iterator[str]:
    """Save the transformer and its AdamW, in the background and not, next to torch.save with and without fsync."""
    training = Training()
    training.drive(training.step)(2)
    session = Session(training.model, training.optimizer)
    with TemporaryDirectory(dir=options.results) as folder:
        rows = []
        for async_save in (True, False):
            saver = Saver(1, async_save=async_save)
            for number in (1, 2):
                synchronize()
                started = time.perf_counter()
                saver.save(session, Path(folder, f"{async_save}.ckpt"), number)
                returned = time.perf_counter() - started
                saver.wait()
                who = f"Saver(async_save={async_save}), save {number}"
                rows.append((who, returned, time.perf_counter() - started))
            saver.close()
        for syncs in (False, True):
            started = time.perf_counter()
            with open(f"{folder}/plain.pt", "wb") as file:
                torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, file)
                if syncs:
                    file.flush()
                    os.fsync(file.fileno())
            secs = time.perf_counter() - started
            rows.append(("torch.save and fsync" if syncs else "torch.save", secs, secs))
            size = os.path.getsize(f"{folder}/plain.pt")
    yield f"A file of {size / 1e9:.2f} GB:"
    yield table(["", "s until it returns", "s until the file is there"], rows)


def first_save(options: Options) -> Iterator[str]:
    """Find the longest step until the first save in the background is made, whose memory is pinned meanwhile."""
    if not ACCELERATOR:
        raise Skip("needs an accelerator, for which memory is pinned")
    elements, pause = (16_000_000, 0.0) if CUDA else (4_000_000, 0.01)
    weights = nn.ParameterList(torch.zeros(elements, device=DEVICE) for _ in range(12 if CUDA else 1))
    optimizer = torch.optim.Adam(weights)
    products = torch.randn(2048, 2048, device=DEVICE) if CUDA else torch.ones(1, device=DEVICE)

    def step() -> None:
        nonlocal products
        for _ in range(40 if CUDA else 0):  # about 20 ms
            products = (products @ products).clamp(-1, 1)
        for weight in weights:
            weight.grad = torch.ones_like(weight) if weight.grad is None else weight.grad
        optimizer.step()

    secs: list[float] = []
    with TemporaryDirectory(dir=options.results) as folder, ExitStack() as stack:
        saver = CheckpointSaverHook(folder, save_steps=20, async_save=True, saver=Saver(None))
        loop = stack.enter_context(MonitoredLoop(step, weights, optimizer, hooks=[saver]))
        loop.session.wait_for_savers()  # a save waits for the one before it
        if IS_SIMULATED:
            stack.enter_context(simulated.slow_pinning(secs_per_gb=40.0))
        last = time.perf_counter()
        for _ in loop.until_stop(range(500)):
            last, before = time.perf_counter(), last
            secs.append(last - before - pause)
            if loop.session.saved_step:  # the next one would wait until this one is written
                break
            loop.run()
            time.sleep(pause)
        saved = loop.session.saved_step
    pinned = sum(state["exp_avg"].nbytes * 2 for state in optimizer.state.values())
    longest = max(secs[2:])  # the first step makes the state of the optimizer
    yield f"{pinned / 1e9:.2f} GB are pinned after the first step. The save due at step 20 was made at step {saved}."
    yield table(["from item to item, ms", ""], [("median", median(secs) * 1e3), ("longest", longest * 1e3)])
    yield f"The longest is {'within' if longest <= 0.05 + median(secs) else 'OVER'} 50 ms beyond the median."
