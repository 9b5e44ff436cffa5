"""PyTorch-Ignite: an Engine and handlers. A handler computes steps/sec: Ignite's metric would run in every step."""

import logging
from typing import Any

from ignite.engine import Engine, Events
from ignite.handlers import TensorboardLogger, TerminateOnNan

from peer_loops import PERIOD, Job, Rate

PACKAGE = "pytorch-ignite"
COLUMNS = ("plain", "monitored", "nan", "idle")

log = logging.getLogger(__name__)


def monitor(trainer: Engine, job: Job, board: TensorboardLogger) -> None:
    due, rate = Events.ITERATION_COMPLETED(every=PERIOD), Rate()
    board.attach_output_handler(trainer, due, tag="train", output_transform=lambda loss: {"loss": loss})

    @trainer.on(due)
    def tell(engine: Engine) -> None:
        number, per_sec = engine.state.iteration, rate()
        board.writer.add_scalar("steps_per_sec", per_sec, number)
        log.info("step %d: loss %g, %g steps/sec", number, engine.state.output, per_sec)

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=job.steps), trainer.terminate)


def idle(engine: Engine) -> None:
    pass


def train(job: Job) -> None:
    def process(engine: Engine, batch: Any) -> Any:
        return job.step(batch)

    trainer = Engine(process)
    for _ in range(job.idle_hooks):
        trainer.add_event_handler(Events.ITERATION_STARTED, idle)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, idle)
    if not job.monitored:
        trainer.run(job.batches, max_epochs=1)
        return
    with TensorboardLogger(log_dir=job.folder) as board:
        monitor(trainer, job, board)
        if job.checks_nan:
            trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
        trainer.run(job.batches, max_epochs=1)
