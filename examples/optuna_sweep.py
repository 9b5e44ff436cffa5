"""A sweep of Optuna in which every trial is a training run with its own checkpoints.

    python examples/optuna_sweep.py runs/sweep

Kill it at any time and start it again: the interrupted trial continues where it was, and the study ends with the same
trials as one that was never interrupted. The script is the only one that works on the study.
"""

from __future__ import annotations

import sys
from pathlib import Path

import optuna
import torch
from optuna.trial import FrozenTrial, TrialState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchhooks import CheckpointSaverHook, EvaluationHook, MonitoredLoop, PeriodicHook, SessionRunContext

TRIALS, EPOCHS = 8, 6


class PruningHook(PeriodicHook):
    """Reports a loss to a trial after each epoch, and stops the loop when the pruner of the study says so."""

    def __init__(self, trial: optuna.Trial, loss: object) -> None:
        super().__init__(every_n_epochs=1)
        self.trial, self.fetches = trial, loss

    def run_due(self, run_context: SessionRunContext, loss: float) -> None:
        self.trial.report(loss, run_context.session.epoch)
        if self.trial.should_prune():
            run_context.request_stop(f"pruned after epoch {run_context.session.epoch}")


def train(trial: optuna.Trial, folder: str) -> float:
    """Train with the parameters of ``trial``, and return the validation loss of the last epoch."""
    width = trial.suggest_int("width", 2, 64, log=True)
    lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    torch.manual_seed(0)
    points = torch.randn(600, 2)
    inside = (points.norm(dim=1) < 1.2).long()
    loader = DataLoader(TensorDataset(points[:400], inside[:400]), batch_size=25, shuffle=True)
    model = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    def validate(model: nn.Module) -> float:
        return F.cross_entropy(model(points[400:]), inside[400:]).item()

    evaluation = EvaluationHook(validate, every_n_epochs=1, log=False)
    hooks = [evaluation, PruningHook(trial, evaluation["validate"]), CheckpointSaverHook(every_n_steps=10)]
    with MonitoredLoop(
        step, model, optimizer, hooks=hooks, checkpoint_dir=folder, signals=["SIGTERM", "SIGINT"]
    ) as loop:
        for _ in loop.until_stop(range(EPOCHS)):
            for inputs, targets in loop.until_stop(loader):
                loop.run(inputs, targets)
    return evaluation.values["validate"]


def queue_again(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue an interrupted trial with its parameters and reports. Optuna gives it a new number."""
    study.tell(trial.number, state=TrialState.FAIL)
    again = optuna.create_trial(
        state=TrialState.WAITING,
        params=trial.params,
        distributions=trial.distributions,
        intermediate_values=trial.intermediate_values,
    )
    study.add_trial(again)


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    storage, pruner = f"sqlite:///{folder}/study.db", optuna.pruners.MedianPruner(n_startup_trials=3)
    study = optuna.create_study(study_name="sweep", storage=storage, pruner=pruner, load_if_exists=True)
    for interrupted in study.get_trials(states=[TrialState.RUNNING]):
        queue_again(study, interrupted)

    finished = TrialState.COMPLETE, TrialState.PRUNED
    while (number := len(study.get_trials(states=finished))) < TRIALS:
        # The storage has no random state. With one seed for each trial, a new process suggests the same parameters.
        study.sampler = optuna.samplers.TPESampler(seed=number, n_startup_trials=4)
        trial = study.ask()
        # A trial can be killed after its last report, before Optuna was told that it is pruned.
        loss = None if trial.should_prune() else train(trial, f"{folder}/trial-{number}")
        pruned = trial.should_prune()
        study.tell(trial, None if pruned else loss, state=TrialState.PRUNED if pruned else TrialState.COMPLETE)
        print(f"trial {number}: {trial.params}, {'pruned' if pruned else f'loss {loss:.4f}'}")
    print(f"best: {study.best_params}, loss {study.best_value:.4f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/sweep")
