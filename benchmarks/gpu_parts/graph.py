"""A step that is the replay of a CUDA graph: nothing is as short for the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchhooks import (
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    SessionRunHook,
    StepCounterHook,
    SummarySaverHook,
)

from common import median_ratio, table
from gpu_parts import Options, need_cuda, synchronize, time_left

PERIOD = 100
RUNS = 400


class Figure(NamedTuple):
    """Microseconds of a step: of the host, and from an idle device to an idle device."""

    host: float
    whole: float


def captured() -> tuple[Callable[[], Tensor], nn.Module, torch.optim.Optimizer]:
    """Return a step that replays a captured one, with its model and optimizer."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    inputs, targets = torch.randn(256, 512, device="cuda"), torch.randint(10, (256,), device="cuda")

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()

    def replay() -> Tensor:
        graph.replay()
        return static

    return replay, model, optimizer


def reports(folder: str) -> list[SessionRunHook]:
    """Return the hooks that report each hundred steps."""
    return [
        LoggingTensorHook(["loss"], every_n_steps=PERIOD),
        StepCounterHook(PERIOD, output_dir=folder),
        SummarySaverHook(PERIOD, output_dir=folder, summary_op={"loss": "loss"}),
    ]


def measure(run: Callable[[], object]) -> Figure:
    """Measure a step of ``run``."""
    synchronize()
    started = time.perf_counter()
    for _ in range(RUNS):
        run()
    host = time.perf_counter() - started
    synchronize()
    return Figure(host / RUNS * 1e6, (time.perf_counter() - started) / RUNS * 1e6)


def graph(options: Options) -> Iterator[str]:
    """Replay a CUDA graph as the step: bare, and monitored."""
    need_cuda()
    started = time.monotonic()
    replay, model, optimizer = captured()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        hooks: dict[str, list[SessionRunHook]] = {
            "no hooks": [],
            "a NaN check in every run": [NanTensorHook("loss")],
            "reports each 100 runs": reports(f"{folder}/usual"),
            "the same and a NaN check": [*reports(f"{folder}/nan"), NanTensorHook("loss")],
        }
        candidates: dict[str, Callable[[], object]] = {"bare": replay}
        for name, chosen in hooks.items():
            candidates[name] = stack.enter_context(MonitoredLoop(replay, model, optimizer, hooks=chosen)).run
        figures: dict[str, list[Figure]] = {name: [] for name in candidates}
        for number in range(8):
            for name in [*candidates][number % 5 :] + [*candidates][: number % 5]:
                figure = measure(candidates[name])
                if number:  # the first round warms up
                    figures[name].append(figure)
            if number > 1 and time_left(options, started) < 5:
                break
    bare = [each.whole for each in figures["bare"]]
    rows = []
    for name, found in figures.items():
        whole, host = [each.whole for each in found], [each.host for each in found]
        rows.append((name, median(whole), median(host), f"{median_ratio(bare, whole):.3f}"))
    yield table(["a step", "us", "us of the host", "speed, of bare"], rows)
