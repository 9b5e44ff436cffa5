"""A small training run of each kind, and the checkpoints of released versions that were recorded in the middle of it.

    PYTHONPATH=.:tests python -m support.recorded

writes tests/data/checkpoints/VERSION/KIND, the folder of a training run that stopped at step 8 of 18, and
expected.json, what each training run ends with if nothing stops it. Run it once for a version whose format of
checkpoints is new, and never for a version that has been recorded. See docs/stability.md.

All arithmetic is exact, whatever the order of its operations: the numbers are multiples of powers of two, in float64.
So one machine gives the same bits as another. Random numbers come from randint, which is the same everywhere.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchhooks
from support.paths import ROOT
from support.rank_processes import run_ranks
from torchhooks import (
    BestCheckpointHook,
    CheckpointSaverHook,
    EvaluationHook,
    MonitoredLoop,
    PeriodicHook,
    StopAtStepHook,
    Variables,
    best_checkpoint,
    running_mean,
)

RECORDED = ROOT / "tests" / "data" / "checkpoints"
KINDS = {"plain": 1, "variables": 1, "best": 1, "ranks": 2, "sharded": 2}
"""The kinds of training runs, and how many ranks each has."""
EPOCHS, ITEMS, RECORDED_STEP, SEED = 3, 6, 8, 7


class Report(PeriodicHook):
    """Note the mean loss of each epoch, in the state of the hook."""

    fetches = running_mean("loss", reset="epoch")

    def __init__(self) -> None:
        super().__init__(every_n_epochs=1)
        self.means: list[float] = []

    def run_due(self, run_context: Any, values: Any) -> None:
        self.means.append(float(values))

    def state_dict(self) -> dict[str, Any]:
        return {"means": list(self.means)}

    def load_state_dict(self, state_dict: Any) -> None:
        self.means = list(state_dict["means"])


def train(rank: int, kind: str, folder: str, seed: int, last_step: int = 100) -> dict[str, Any]:
    """Train from the newest checkpoint in ``folder`` to the end of the data or ``last_step``, and return the outcome.

    All of the outcome depends on ``seed``, unless the training run is resumed.
    """
    torch.manual_seed(seed)
    model: Any = nn.Linear(4, 2).double()
    for parameter in model.parameters():
        parameter.data = torch.randint(-8, 8, parameter.shape).double() / 8
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)
    if kind == "sharded":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    elif kind == "ranks":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    data: Any = range(rank * 100, rank * 100 + 2 * ITEMS)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    variables = Variables(epoch_sum=0, seen=[])

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        inputs = torch.stack([batch, batch % 2, batch % 3, torch.full_like(batch, random.randrange(4))], dim=1)
        mask = torch.randint(0, 2, (2,))
        loss: torch.Tensor = (model(inputs.double()) * mask).sum() / 2
        loss.backward()
        optimizer.step()
        return loss

    def evaluate(model: nn.Module) -> dict[str, torch.Tensor]:
        return {"score": torch.stack([parameter.sum() for parameter in model.parameters()]).sum()}

    report = Report()
    hooks: list[Any] = [report, StopAtStepHook(last_step=last_step)]
    if kind == "best":
        evaluation = EvaluationHook(evaluate, every_n_epochs=1, log=False)
        hooks += [evaluation, BestCheckpointHook(metric=evaluation["score"], mode="max", keep=1)]
    hooks.append(CheckpointSaverHook(every_n_steps=1000))
    state: dict[str, Any] = {"scheduler": scheduler, **({"variables": variables} if kind == "variables" else {})}
    with MonitoredLoop(step, model, optimizer, hooks=hooks, state=state, checkpoint_dir=folder) as loop:
        for _epoch in loop.until_stop(range(EPOCHS)):
            variables.epoch_sum = 0
            for batch in loop.until_stop(loader):
                loop.run(batch)
                if kind == "variables":
                    variables.epoch_sum += int(batch.sum())
                    variables.seen.append(batch.tolist())
            scheduler.step()
    outcome = {
        "step": loop.global_step,
        "weights": [_plain(parameter) for parameter in model.parameters()],
        "momenta": [_plain(slots["momentum_buffer"]) for slots in optimizer.state.values()],
        "lr": scheduler.get_last_lr(),
        "means": report.means,
        "random": [torch.randint(1 << 30, (2,)).tolist(), random.randrange(1 << 30)],
    }
    if kind == "variables":
        outcome.update(epoch_sum=variables.epoch_sum, seen=variables.seen)
    if kind == "best":
        best = best_checkpoint(folder)
        assert best is not None
        weights = torch.load(Path(best) / "state.pt", weights_only=True)["model"]
        outcome.update(best=Path(best).name, best_weights=[_plain(weight) for weight in weights.values()])
    return outcome


def train_ranks(kind: str, folder: Path, scratch: Path, seed: int, last_step: int = 100) -> list[Any]:
    """Train in as many processes as ``kind`` has ranks, and return the outcome of each rank."""
    scratch.mkdir()
    ended = run_ranks(scratch, KINDS[kind], train, kind, str(folder), seed, last_step)
    assert [rank.code for rank in ended] == [0] * KINDS[kind], "\n".join(rank.output for rank in ended)
    return [rank.value for rank in ended]


def _plain(tensor: Any) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist()


def record(folder: Path) -> None:
    """Record all kinds in ``folder``, which must not exist."""
    folder.mkdir(parents=True)
    expected = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for kind in KINDS:
            expected[kind] = train_ranks(kind, scratch / f"{kind}-whole", scratch / f"{kind}-1", SEED)
            train_ranks(kind, folder / kind, scratch / f"{kind}-2", SEED, RECORDED_STEP)
            others = {*folder.glob(f"{kind}/*")} - {
                folder / kind / f"model.ckpt-{RECORDED_STEP}",
                folder / kind / "best",
            }
            for path in others:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    record(RECORDED / torchhooks.__version__)
