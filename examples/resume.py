"""Interrupt a training run, resume it, and check that it ends with exactly the same bits as an uninterrupted run.

    python examples/resume.py

Starts three processes that train the same model, with dropout and shuffled data. The first runs from start to finish.
The second gets SIGTERM in the middle of an epoch, as if a cluster scheduler preempted it. The third is started with the
same command and resumes where the second stopped. Then the final checkpoints are compared bit by bit.

To try it by hand, kill this command at any time and run it again:

    python examples/resume.py --train runs/resume
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchhooks import (
    CheckpointSaverHook,
    FinalOpsHook,
    LoggingTensorHook,
    MonitoredLoop,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    StopAtStepHook,
    latest_checkpoint,
)

STEPS = 300
EPOCHS = 11  # of 29 batches each, more than enough for STEPS
KILLED_AT = 137


class Preemption(SessionRunHook):
    """Sends SIGTERM to this process before a step. The loop finishes that step before it stops."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        if run_context.session.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
        return None


def train(folder: str, killed_at: int | None = None) -> None:
    """Train to step STEPS, from the newest checkpoint in ``folder`` if there is one, and print the last loss."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    points = torch.randn(1800, 2)
    loader = DataLoader(TensorDataset(points, (points.norm(dim=1) < 1.2).long()), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    final = FinalOpsHook("loss")
    hooks: list[SessionRunHook] = [
        StopAtStepHook(last_step=STEPS),
        LoggingTensorHook(["global_step", "loss"], every_n_steps=100, at_end=True),
        # Save every 50 steps, and when the loop stops without an error. A signal is such a stop.
        CheckpointSaverHook(folder, every_n_steps=50),
        final,
    ]
    if killed_at is not None:
        hooks.append(Preemption(killed_at))

    with MonitoredLoop(
        step,
        model,
        optimizer,
        hooks=hooks,
        checkpoint_dir=folder,
        state={"scheduler": scheduler},  # model, optimizer, data position and random state are always saved
        signals=["SIGTERM"],
    ) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for inputs, targets in loop.until_stop(loader):  # after a restore, starts at the next batch
                loop.run(inputs, targets)
    # Not reached after a signal: once the loop is closed, the signal ends the process.
    print(f"loss {final.final_ops_values.item()!r} at step {loop.global_step}")


def start(folder: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run this script with ``--train folder`` and ``options`` in a new process."""
    shown = ["python", "examples/resume.py", "--train", Path(folder).name, *options]
    print(f"$ {' '.join(shown)}", flush=True)
    process = subprocess.run([sys.executable, __file__, "--train", folder, *options], stdout=subprocess.PIPE, text=True)
    print(f"{process.stdout}exit code {process.returncode}\n", flush=True)
    return process


def end_of(folder: str) -> dict[str, Any]:
    """Return the contents of the newest checkpoint in ``folder``."""
    path = latest_checkpoint(folder)
    if path is None:
        raise SystemExit(f"{folder} has no checkpoint: the training run did not finish")
    saved: dict[str, Any] = torch.load(f"{path}/state.pt", weights_only=True)
    return saved


def same(one: Any, other: Any) -> bool:
    """Return whether two states are equal bit by bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def bits(tensor: Tensor) -> bytes:
    """Return the raw bytes of ``tensor``, since ``torch.equal`` considers 0.0 and -0.0 equal."""
    return bytes(tensor.numpy().tobytes())


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Print the names of the entries that are identical; exit with an error if one is not."""
    names = sorted(one.keys() | other.keys())
    different = [name for name in names if not same(one.get(name), other.get(name))]
    if different:
        raise SystemExit(f"NOT identical: {', '.join(different)}")
    print(f"Bit-identical: {', '.join(names)}.")


def demonstrate() -> None:
    """Train once without interruption and once with, and compare the results."""
    with TemporaryDirectory() as name:
        whole, parts = f"{name}/whole", f"{name}/parts"
        uninterrupted = start(whole)
        killed = start(parts, "--killed-at", str(KILLED_AT))
        resumed = start(parts)
        codes = [process.returncode for process in (uninterrupted, killed, resumed)]
        if codes != [0, -signal.SIGTERM, 0]:
            raise SystemExit(f"exit codes {codes}: SIGTERM should end the second process, the others should succeed")
        if uninterrupted.stdout != resumed.stdout:
            raise SystemExit("NOT the same loss")
        print(f"Same result: {resumed.stdout}", end="")
        compare(end_of(whole), end_of(parts))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Check that a resumed training run ends like an uninterrupted one.")
    parser.add_argument("--train", metavar="FOLDER", help="only train, saving checkpoints to this folder")
    parser.add_argument("--killed-at", metavar="STEP", type=int, help="with --train: get SIGTERM in this step")
    options = parser.parse_args(argv)
    if options.train is None:
        demonstrate()
    else:
        train(options.train, options.killed_at)


if __name__ == "__main__":
    main()
