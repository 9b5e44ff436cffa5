"""Lightning Fabric: the user's own loop, with Fabric's loggers. Callbacks are called through ``fabric.call``."""

import logging
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.loggers import TensorBoardLogger

from peer_loops import PERIOD, Job, Rate

PACKAGE = "lightning"
COLUMNS = ("plain", "monitored", "idle")

log = logging.getLogger(__name__)


class Idle:
    def on_train_batch_start(self, batch: Any) -> None:
        pass

    def on_train_batch_end(self, outputs: Any) -> None:
        pass


def train(job: Job) -> None:
    loggers = [TensorBoardLogger(job.folder)] if job.monitored else []
    fabric = Fabric(
        accelerator=job.accelerator, devices=1, loggers=loggers, callbacks=[Idle() for _ in range(job.idle_hooks)]
    )
    fabric.launch()
    rate = Rate()
    for number, batch in enumerate(job.batches, start=1):
        if job.idle_hooks:
            fabric.call("on_train_batch_start", batch=batch)
        loss = job.step(batch)
        if job.idle_hooks:
            fabric.call("on_train_batch_end", outputs=loss)
        if job.monitored and number % PERIOD == 0:
            value, per_sec = loss.item(), rate()
            fabric.log_dict({"loss": value, "steps_per_sec": per_sec}, step=number)
            log.info("step %d: loss %g, %g steps/sec", number, value, per_sec)
        if job.monitored and number == job.steps:
            break
    for logger in loggers:
        logger.finalize("success")
