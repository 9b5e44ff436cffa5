"""The warning that checkpoints will contain no model, or no optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchhooks import CheckpointSaverHook, MonitoredLoop
from torchhooks.testing import log_lines

MODEL = torch.nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters())


class Trainer:
    """Holds both, as a class of the script does, or a wrapper of another library."""

    def __init__(self) -> None:
        self.model, self.optimizer = MODEL, OPTIMIZER

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ({}, "no model and no optimizer"),
        ({"model": MODEL}, "no optimizer"),
        ({"optimizer": OPTIMIZER}, "no model"),
        ({"model": MODEL, "optimizer": OPTIMIZER}, None),
        ({"model": MODEL, "state": {"sgd": OPTIMIZER}}, None),
        ({"state": {"a": MODEL, "b": OPTIMIZER}}, None),
        ({"state": {"trainer": Trainer()}}, None),
    ],
)
def test_a_loop_warns_once_of_what_no_checkpoint_will_contain(
    arguments: dict[str, Any], missing: str | None, saves: bool, tmp_path: Path
) -> None:
    hooks = [CheckpointSaverHook(tmp_path, save_steps=1)] if saves else []
    with log_lines() as lines, MonitoredLoop(float, hooks=hooks, checkpoint_dir=tmp_path, **arguments) as loop:
        loop.run()
    found = [text for level, text in lines if level == "WARNING" and "will contain" in text]
    assert [text.partition(":")[0] for text in found] == ([f"checkpoints will contain {missing}"] if missing else [])


def test_a_loop_without_checkpoints_does_not() -> None:
    with log_lines() as lines, MonitoredLoop(float) as loop:
        loop.run()
    assert lines == []
