"""TorchTNT: a TrainUnit and callbacks."""

import logging
from typing import Any

from torchtnt.framework.callback import Callback
from torchtnt.framework.train import train as torchtnt_train
from torchtnt.framework.unit import TrainUnit
from torchtnt.utils.loggers import TensorBoardLogger

from peer_loops import PERIOD, Job, Rate

PACKAGE = "torchtnt"
COLUMNS = ("plain", "monitored", "idle")

log = logging.getLogger(__name__)


class Unit(TrainUnit[Any]):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.module, self.step = job.model, job.step

    def train_step(self, state: Any, data: Any) -> Any:
        return self.step(data)


class Monitor(Callback):
    def __init__(self, folder: str) -> None:
        self.board, self.rate = TensorBoardLogger(folder), Rate()

    def on_train_step_end(self, state: Any, unit: Any) -> None:
        number = unit.train_progress.num_steps_completed
        if number % PERIOD == 0:
            loss, per_sec = state.train_state.step_output.item(), self.rate()
            self.board.log_dict({"loss": loss, "steps_per_sec": per_sec}, number)
            log.info("step %d: loss %g, %g steps/sec", number, loss, per_sec)

    def on_train_end(self, state: Any, unit: Any) -> None:
        self.board.close()


class Idle(Callback):
    def on_train_step_start(self, state: Any, unit: Any) -> None:
        pass

    def on_train_step_end(self, state: Any, unit: Any) -> None:
        pass


def train(job: Job) -> None:
    callbacks = [Monitor(job.folder)] if job.monitored else [Idle() for _ in range(job.idle_hooks)]
    stop = {"max_steps": job.steps} if job.monitored else {"max_epochs": 1}
    torchtnt_train(Unit(job), job.batches, callbacks=callbacks, **stop)
