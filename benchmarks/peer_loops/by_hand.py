"""No library: monitoring written by hand, with ``if step % 100 == 0``."""

import logging

import torch
from torch.utils.tensorboard import SummaryWriter

from peer_loops import PERIOD, Job, Rate

PACKAGE = None
COLUMNS = ("plain", "monitored", "nan")

log = logging.getLogger(__name__)


def train(job: Job) -> None:
    if not job.monitored:
        for batch in job.batches:
            job.step(batch)
        return
    writer, rate = SummaryWriter(job.folder), Rate()
    for number, batch in enumerate(job.batches, start=1):
        loss = job.step(batch)
        if job.checks_nan and torch.isnan(loss):
            raise FloatingPointError(f"the loss is NaN at step {number}")
        if number % PERIOD == 0:
            value, per_sec = loss.item(), rate()
            writer.add_scalar("loss", value, number)
            writer.add_scalar("steps_per_sec", per_sec, number)
            log.info("step %d: loss %g, %g steps/sec", number, value, per_sec)
        if number == job.steps:
            break
    writer.close()
