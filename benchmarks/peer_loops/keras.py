"""Keras 3 on torch, with a custom train_step. Uses torch's SummaryWriter: Keras's callback needs TensorFlow."""

import logging
import os
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
from torch.utils.tensorboard import SummaryWriter

from peer_loops import PERIOD, Job, Rate

PACKAGE = "keras"
COLUMNS = ("plain", "monitored", "nan", "idle")

log = logging.getLogger(__name__)


class Model(keras.Model):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def call(self, inputs: Any) -> Any:
        return inputs

    def train_step(self, data: Any) -> Any:
        return {"loss": self.job.step(data[0])}


class Monitor(keras.callbacks.Callback):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.board, self.rate, self.stop_at = SummaryWriter(job.folder), Rate(), job.steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        number = batch + 1
        if number % PERIOD == 0:
            loss, per_sec = float(logs["loss"]), self.rate()
            self.board.add_scalar("loss", loss, number)
            self.board.add_scalar("steps_per_sec", per_sec, number)
            log.info("step %d: loss %g, %g steps/sec", number, loss, per_sec)
        if number == self.stop_at:
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        self.board.close()


class Idle(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        pass

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


def train(job: Job) -> None:
    callbacks: list[Any] = [Monitor(job)] if job.monitored else [Idle() for _ in range(job.idle_hooks)]
    if job.checks_nan:
        callbacks.append(keras.callbacks.TerminateOnNaN())
    model = Model(job)
    model.compile(jit_compile=False, run_eagerly=True)
    model.fit(((batch,) for batch in job.batches), callbacks=callbacks, verbose=0)
