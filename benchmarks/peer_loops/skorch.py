"""skorch: a NeuralNet and callbacks."""

import logging
from typing import Any

import torch
from skorch import NeuralNet
from skorch.callbacks import Callback
from torch.utils.tensorboard import SummaryWriter

from peer_loops import PERIOD, Job, Rate

PACKAGE = "skorch"
COLUMNS = ("plain", "monitored", "idle")

log = logging.getLogger(__name__)


class Net(NeuralNet):
    def __init__(self, *args: Any, job: Job, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.job = job

    def get_dataset(self, X: Any, y: Any = None) -> Any:  # noqa: N803  # skorch's parameter name
        return X

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        return dataset

    def train_step(self, batch: Any, **fit_params: Any) -> Any:
        return {"loss": self.job.step(batch), "y_pred": None}


class Monitor(Callback):
    def __init__(self, job: Job) -> None:
        self.board, self.rate, self.stop_at, self.number = SummaryWriter(job.folder), Rate(), job.steps, 0

    def on_batch_end(self, net: Any, loss: Any = None, **kwargs: Any) -> None:
        self.number += 1
        if self.number % PERIOD == 0:
            value, per_sec = loss.item(), self.rate()
            self.board.add_scalar("loss", value, self.number)
            self.board.add_scalar("steps_per_sec", per_sec, self.number)
            log.info("step %d: loss %g, %g steps/sec", self.number, value, per_sec)
        if self.number == self.stop_at:
            self.board.close()
            raise KeyboardInterrupt  # how skorch ends fit() early


class Idle(Callback):
    def on_batch_begin(self, net: Any, batch: Any = None, training: Any = None, **kwargs: Any) -> None:
        pass

    def on_batch_end(self, net: Any, batch: Any = None, training: Any = None, **kwargs: Any) -> None:
        pass


def train(job: Job) -> None:
    callbacks = [Monitor(job)] if job.monitored else [Idle() for _ in range(job.idle_hooks)]
    net = Net(
        job.model,
        job=job,
        criterion=torch.nn.MSELoss,
        max_epochs=1,
        train_split=None,
        callbacks=[(f"callback_{number}", callback) for number, callback in enumerate(callbacks)],
        callbacks__print_log=None,
        callbacks__train_loss=None,
        callbacks__valid_loss=None,
        callbacks__epoch_timer=None,
        verbose=0,
    )
    net.fit(job.batches)
