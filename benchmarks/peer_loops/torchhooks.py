"""torchhooks: a MonitoredLoop and standard hooks."""

from typing import Any

from torchhooks import (
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
)

from peer_loops import PERIOD, Job

PACKAGE = "torchhooks"
COLUMNS = ("plain", "monitored", "nan", "idle")
LOGGED = ["global_step", "loss", "steps_per_sec"]
LINE = "step {global_step}: loss {loss:g}, {steps_per_sec:g} steps/sec"


class Idle(SessionRunHook):
    def before_run(self, run_context: Any) -> None:
        pass

    def after_run(self, run_context: Any, run_values: Any) -> None:
        pass


def hooks(job: Job) -> list[SessionRunHook]:
    chosen: list[SessionRunHook] = [Idle() for _ in range(job.idle_hooks)]
    if job.monitored:
        chosen += [
            StopAtStepHook(last_step=job.steps),
            StepCounterHook(PERIOD, output_dir=job.folder, log=False),
            SummarySaverHook(PERIOD, output_dir=job.folder, summary_op={"loss": "loss"}),
            LoggingTensorHook(LOGGED, every_n_iter=PERIOD, formatter=LINE.format_map),
        ]
    if job.checks_nan:
        chosen.append(NanTensorHook("loss"))
    return chosen


def train(job: Job) -> None:
    with MonitoredLoop(job.step, job.model, job.optimizer, hooks=hooks(job)) as loop:
        for batch in loop.until_stop(job.batches):
            loop.run(batch)
