"""A custom hook, its tests, and a training run that it stops.

    python examples/custom_hook.py
    pytest examples/custom_hook.py

A hook asks for values before the step and gets them after it. This one asks for the loss in every run and stops the
loop once the loss no longer improves.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torchhooks import MonitoredLoop, SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from torchhooks.testing import trace


class EarlyStopping(SessionRunHook):
    """Stops the loop when ``fetch`` has not reached a new minimum for ``patience`` runs."""

    def __init__(self, fetch: Any, patience: int) -> None:
        self.fetch, self.patience = fetch, patience

    def begin(self) -> None:
        self.best, self.bad_runs = math.inf, 0

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(self.fetch)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        run_context.when_ready(run_values.results, self.update)  # at once on the CPU, a few runs later on a GPU
        if self.bad_runs >= self.patience:
            run_context.request_stop(f"no improvement on {self.best:.4f} for {self.patience} runs")

    def update(self, value: Any) -> None:
        self.best, self.bad_runs = (float(value), 0) if value < self.best else (self.best, self.bad_runs + 1)


# trace() runs a real loop around a step that returns these losses. It needs no model, no files and no time.


def test_stops_when_patience_runs_out() -> None:
    assert trace(EarlyStopping("loss", patience=2), losses=[3, 2, 2, 4, 1]).steps == [1, 2, 3, 4]


def test_a_new_minimum_resets_the_count() -> None:
    assert trace(EarlyStopping("loss", patience=2), losses=[3, 4, 2, 4, 1]).stop_reason == "data ended"


def test_says_why_it_stopped() -> None:
    reason = trace(EarlyStopping("loss", patience=2), losses=[0.5, 0.75, 0.5]).stop_reason
    assert reason == "EarlyStopping: no improvement on 0.5000 for 2 runs"


def test_starts_over_in_another_loop() -> None:
    hook = EarlyStopping("loss", patience=2)
    trace(hook, losses=[1])
    assert trace(hook, losses=[3, 2, 1]).stop_reason == "data ended"


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(256, 8)
    targets = inputs.sum(dim=1, keepdim=True) + torch.randn(256, 1)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    with MonitoredLoop(step, model, optimizer, hooks=[EarlyStopping("loss", patience=5)]) as loop:
        while not loop.should_stop():
            loop.run()
    print(f"{loop.global_step} steps, stopped by {loop.stop_reason}")


if __name__ == "__main__":
    main()
