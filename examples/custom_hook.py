"""A hook of one's own, what it does in a training, and its tests.

python examples/custom_hook.py
pytest examples/custom_hook.py
"""

import math
from typing import Any

import torch
from torch import Tensor
from torchhooks import MonitoredLoop, SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from torchhooks.testing import FakeDevice, sync_audit, trace


class StopWhenNoBetter(SessionRunHook):
    """Stops when a value, any fetch, has reached no new minimum for ``patience`` runs."""

    def __init__(self, fetch: Any, patience: int) -> None:
        self.fetch, self.patience = fetch, patience

    def begin(self) -> None:
        self.best, self.worse_runs = math.inf, 0

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(self.fetch)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        run_context.when_ready(run_values.results, self.look)  # on a GPU some runs later, so that nobody waits
        if self.worse_runs >= self.patience:
            run_context.request_stop(f"no better than {self.best:.4f} for {self.patience} runs")

    def look(self, value: Any) -> None:
        self.best, self.worse_runs = (float(value), 0) if value < self.best else (self.best, self.worse_runs + 1)


def test_stops_when_the_patience_is_used_up() -> None:
    assert trace(StopWhenNoBetter("loss", patience=2), losses=[3, 2, 2, 4, 1]).steps == [1, 2, 3, 4]


def test_a_new_minimum_renews_the_patience() -> None:
    assert trace(StopWhenNoBetter("loss", patience=2), losses=[3, 4, 2, 4, 1]).stop_reason == "data ended"


def test_says_why_it_stopped() -> None:
    reason = trace(StopWhenNoBetter("loss", patience=2), losses=[0.5, 0.75, 0.5]).stop_reason
    assert reason == "StopWhenNoBetter: no better than 0.5000 for 2 runs"


def test_starts_afresh_in_another_loop() -> None:
    hook = StopWhenNoBetter("loss", patience=2)
    trace(hook, losses=[1])
    assert trace(hook, losses=[3, 2, 1]).stop_reason == "data ended"


def test_makes_nobody_wait_for_a_gpu() -> None:
    with sync_audit("cpu") as waits:
        trace(StopWhenNoBetter("loss", patience=2), losses=[3, 2, 1])
    assert not waits


def test_stops_also_where_values_come_late() -> None:
    with FakeDevice(lag=3):
        seen = trace(StopWhenNoBetter("loss", patience=2), losses=[1] * 100)
    assert seen.stop_reason == "StopWhenNoBetter: no better than 1.0000 for 2 runs"


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

    with MonitoredLoop(step, model, optimizer, hooks=[StopWhenNoBetter("loss", patience=5)]) as loop:
        while not loop.should_stop():
            loop.run()
    print(f"{loop.global_step} steps, ended by {loop.stop_reason}")


if __name__ == "__main__":
    main()
