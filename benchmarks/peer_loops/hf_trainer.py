"""Hugging Face's Trainer. It requires an optimizer and gets one without effect, since the step is the user's own.

The NaN check is ``logging_nan_inf_filter``, which excludes a NaN loss from the mean instead of ending training.
"""

import logging
import os
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from peer_loops import PERIOD, Batches, Job, Rate

PACKAGE = "transformers"
COLUMNS = ("plain", "monitored", "nan", "idle")

logging.getLogger("transformers").setLevel(logging.INFO)


class NoOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class OurTrainer(Trainer):
    job: Job
    rate: Rate

    def get_train_dataloader(self) -> Any:
        return Batches({"batch": self.job.batch}, len(self.job.batches))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return self.job.step(inputs["batch"]).detach()

    def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "steps_per_sec": self.rate()}, *args, **kwargs)


class Idle(TrainerCallback):
    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        pass

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        pass


def train(job: Job) -> None:
    os.environ["TENSORBOARD_LOGGING_DIR"] = job.folder
    arguments = TrainingArguments(
        output_dir=job.folder,
        max_steps=job.steps,
        max_grad_norm=0,
        logging_strategy="steps" if job.monitored else "no",
        logging_steps=PERIOD,
        logging_nan_inf_filter=job.checks_nan,
        report_to="tensorboard" if job.monitored else "none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    optimizer = NoOptimizer(job.model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = OurTrainer(job.model, arguments, optimizers=(optimizer, scheduler))
    trainer.job, trainer.rate = job, Rate()
    for _ in range(job.idle_hooks):
        trainer.add_callback(Idle())
    trainer.train()
