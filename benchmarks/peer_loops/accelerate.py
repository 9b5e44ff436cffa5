"""Hugging Face Accelerate: the user's own loop, with Accelerate's gradient accumulation and trackers."""

import logging

from accelerate import Accelerator

from peer_loops import PERIOD, Job, Rate

PACKAGE = "accelerate"
COLUMNS = ("plain", "monitored")

log = logging.getLogger(__name__)


def train(job: Job) -> None:
    accelerator = Accelerator(
        cpu=job.accelerator == "cpu",
        log_with="tensorboard" if job.monitored else None,
        project_dir=job.folder if job.monitored else None,
    )
    model = accelerator.prepare(job.model)
    if job.monitored:
        accelerator.init_trackers("run")
    rate = Rate()
    for number, batch in enumerate(job.batches, start=1):
        with accelerator.accumulate(model):
            loss = job.step(batch)
        if job.monitored and number % PERIOD == 0:
            value, per_sec = loss.item(), rate()
            accelerator.log({"loss": value, "steps_per_sec": per_sec}, step=number)
            log.info("step %d: loss %g, %g steps/sec", number, value, per_sec)
        if job.monitored and number == job.steps:
            break
    accelerator.end_training()
