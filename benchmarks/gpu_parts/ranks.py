"""Several ranks: FSDP2 with one, and with NCCL on every GPU that there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from gpu_parts import CUDA, DEVICE, Options, Skip, run, script
from gpu_parts.resuming import bits_in, last_line


def fsdp2(options: Options) -> Iterator[str]:
    """Train with FSDP2 and one rank, at once and in two processes, and compare the bits."""
    yield from compared(options, "fsdp2", 1)


def nccl(options: Options) -> Iterator[str]:
    """Train with FSDP2 and with DDP on every GPU, at once and in two processes, and compare the bits."""
    ranks = torch.cuda.device_count() if CUDA else 0
    if ranks < 2:
        raise Skip(f"needs two CUDA devices, there are {ranks}")
    for wrap in ("fsdp2", "ddp"):
        yield from compared(options, wrap, ranks)


def compared(options: Options, wrap: str, ranks: int) -> Iterator[str]:
    """Yield what a whole training run and a resumed one end with, which has to be the same."""
    if not CUDA:
        yield f"On the CPU with gloo: torch.distributed has no backend of its own for {DEVICE}."
    with TemporaryDirectory(dir=options.results) as folder:
        where = Path(folder, "resumed")
        whole = last_line(run(script("ranks", Path(folder, "whole"), "--wrap", wrap, ranks=ranks), options.secs))
        yield f"In one go: {whole}."
        run(script("ranks", where, "--wrap", wrap, "--stop-at", 25, ranks=ranks), options.secs)
        resumed = last_line(run(script("ranks", where, "--wrap", wrap, ranks=ranks), options.secs))
        yield f"Stopped at step 25, and started again: {resumed}."
    assert bits_in(resumed) == bits_in(whole), "the bits differ"
