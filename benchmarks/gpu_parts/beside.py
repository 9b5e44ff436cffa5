"""The same monitoring with other libraries, around the same small step on the device."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from tempfile import TemporaryDirectory

from common import Rounds, Stamped, beyond, mlp, table
from gpu_parts import CUDA, DEVICE, Options, synchronize, time_left
from peer_loops import Job

RUNS = 500
BARE = "bare"
OTHERS = ("fabric", "accelerate", "lightning")  # which know no other devices than those of torch
CANDIDATES = {
    BARE: ("by_hand", "plain"),
    "by hand": ("by_hand", "monitored"),
    "by hand, with a NaN check": ("by_hand", "nan"),
    "torchhooks": ("torchhooks", "monitored"),
    "torchhooks, with a NaN check": ("torchhooks", "nan"),
    "Fabric (own loop)": ("fabric", "monitored"),
    "Accelerate (own loop)": ("accelerate", "monitored"),
    "Lightning": ("lightning", "monitored"),
}
"""The module in ``peer_loops`` and its column, by the name in the table."""

Train = Callable[[Job], object]


def peers(options: Options) -> Iterator[str]:
    """Train with each library that is installed, with a curve and a log line each 100 steps, and measure wall time."""
    started = time.monotonic()
    warnings.simplefilter("ignore")  # of the other libraries
    trains: dict[str, Train] = {}
    for name, (module, _) in CANDIDATES.items():
        if module in OTHERS and not CUDA:
            yield f"{name}: needs a CUDA device."
            continue
        try:
            trains[name] = importlib.import_module(f"peer_loops.{module}").train
        except ImportError as error:
            yield f"{name}: {error}."
    figures: Rounds = {name: [] for name in trains}
    with TemporaryDirectory() as folder:
        for number in range(6):
            for name, train in trains.items():
                figure = us_per_step(train, CANDIDATES[name][1], f"{folder}/{name}-{number}")
                if number:  # the first round warms up
                    figures[name].append(figure)
            if number and time_left(options, started) < 1.5 * (time.monotonic() - started) / (number + 1):
                break
    yield f"A step takes {median(figures[BARE]):.0f} us bare."
    rows = [(name, median(beyond(figures, name, BARE))) for name in trains if name != BARE]
    yield table(["wall time of a step", "us beyond the bare loop"], rows)


def us_per_step(train: Train, column: str, folder: str) -> float:
    """Measure a step, from an idle device to an idle device, with what the library does at its start and end."""
    training = mlp(DEVICE)  # a new one, because Lightning moves the model to the CPU at its end
    job = Job(column, RUNS, Stamped(training.step), training.model, training.optimizer, training.batch, folder)
    synchronize()
    began = time.perf_counter()
    train(job)
    synchronize()
    return (time.perf_counter() - began) / RUNS * 1e6
