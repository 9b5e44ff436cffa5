"""Lightning's Trainer, with manual optimization: the step is the user's own, and Lightning needs no closures."""

import logging
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from peer_loops import PERIOD, Job, Rate

PACKAGE = "lightning"
COLUMNS = ("plain", "monitored", "idle")

log = logging.getLogger(__name__)


class Module(lightning.LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.job = job.model, job

    def configure_optimizers(self) -> Any:
        return self.job.optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.job.step(batch)
        if self.job.monitored:
            self.log("loss", loss)
        return loss


class Monitor(Callback):
    def __init__(self, stop_at: int) -> None:
        self.stop_at, self.rate = stop_at, Rate()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        number = batch_idx + 1
        if number % PERIOD == 0:
            per_sec = self.rate()
            trainer.logger.log_metrics({"steps_per_sec": per_sec}, step=number)
            log.info("step %d: loss %g, %g steps/sec", number, outputs["loss"], per_sec)
        if number == self.stop_at:
            trainer.should_stop = True


class Idle(Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        pass

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def train(job: Job) -> None:
    trainer = lightning.Trainer(
        accelerator=job.accelerator,
        devices=1,
        max_epochs=1,
        logger=TensorBoardLogger(job.folder) if job.monitored else False,
        log_every_n_steps=PERIOD,
        callbacks=[Monitor(job.steps)] if job.monitored else [Idle() for _ in range(job.idle_hooks)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(job), job.batches)
