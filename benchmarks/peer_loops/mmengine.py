"""MMEngine: a Runner and its hooks. It reports the time per iteration in place of steps/sec."""

from typing import Any

from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner

from peer_loops import PERIOD, Job

PACKAGE = "mmengine"
COLUMNS = ("plain", "monitored", "idle")

NO_DEFAULTS: dict[str, Any] = {
    "runtime_info": None,
    "timer": None,
    "sampler_seed": None,
    "logger": None,
    "param_scheduler": None,
    "checkpoint": None,
}
MONITOR: dict[str, Any] = {
    "runtime_info": {"type": "RuntimeInfoHook"},
    "timer": {"type": "IterTimerHook"},
    "logger": {"type": "LoggerHook", "interval": PERIOD, "log_metric_by_epoch": False},
}


class Model(BaseModel):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model, self.step = job.model, job.step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the step calls the model")

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        return {"loss": self.step(data)}


class Idle(Hook):
    def before_train_iter(self, *args: Any, **kwargs: Any) -> None:
        pass

    def after_train_iter(self, *args: Any, **kwargs: Any) -> None:
        pass


def train(job: Job) -> None:
    boards = [{"type": "TensorboardVisBackend"}] if job.monitored else []
    Runner(
        model=Model(job),
        work_dir=job.folder,
        train_dataloader=job.batches,
        train_cfg={"by_epoch": False, "max_iters": job.steps},
        optim_wrapper={"optimizer": job.optimizer},
        default_hooks=NO_DEFAULTS | (MONITOR if job.monitored else {}),
        custom_hooks=[Idle() for _ in range(job.idle_hooks)],
        log_processor={"by_epoch": False},
        visualizer={"type": "Visualizer", "vis_backends": boards, "name": job.folder},
        experiment_name=job.folder.replace("/", "_"),
    ).train()
