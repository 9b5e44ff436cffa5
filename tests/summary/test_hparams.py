"""The metadata of a loop: as hparams of TensorBoard, and for a writer with add_config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from torchhooks import MonitoredLoop, StepCounterHook, SummarySaverHook
from torchhooks.common.text import flat_config
from torchhooks.testing import RecordingWriter


class Tracker(RecordingWriter):
    """A writer that takes metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.configs: list[Any] = []

    def add_config(self, config: Any) -> None:
        self.configs.append(config)


def hparams(folder: Path) -> list[dict[str, Any]]:
    """What each event of TensorBoard's hparams in ``folder`` says, as the plugin reads it."""
    from tensorboard.plugins.hparams import metadata

    found = []
    for file in sorted(folder.glob("events*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == metadata.PLUGIN_NAME:
                    info = metadata.parse_session_start_info_plugin_data(value.metadata.plugin_data.content)
                    found.append({name: each.ListFields()[0][1] for name, each in info.hparams.items()})
    return found


def test_metadata_is_written_once_as_tensorboards_hparams(tmp_path: Path) -> None:
    hooks = [SummarySaverHook(1, output_dir=tmp_path, summary_op="loss"), StepCounterHook(1, output_dir=tmp_path)]
    metadata: dict[Any, Any] = {
        "lr": 0.5,
        "layers": [64, 32],
        "name": "net",
        "model": {"width": 3, "bias": True},
        5: None,
    }
    with MonitoredLoop(lambda: 0.5, hooks=hooks, metadata=metadata, step_unit="run") as loop:
        loop.run()
    assert hparams(tmp_path) == [
        {"lr": 0.5, "layers": "[64, 32]", "name": "net", "model.width": 3.0, "model.bias": True, "5": "None"}
    ]


def test_without_metadata_there_are_no_hparams(tmp_path: Path) -> None:
    hook = SummarySaverHook(1, output_dir=tmp_path, summary_op="loss")
    with MonitoredLoop(lambda: 0.5, hooks=[hook], step_unit="run") as loop:
        loop.run()
    assert hparams(tmp_path) == []


def test_a_tensor_in_a_config_is_shown_by_its_type() -> None:
    assert flat_config({"w": torch.ones(3), "empty": {}}) == {"w": "Tensor(...)", "empty": "{}"}


def test_hooks_that_share_a_writer_give_it_the_metadata_once() -> None:
    writer = Tracker()
    hooks = [SummarySaverHook(1, summary_writer=writer, summary_op="loss"), StepCounterHook(1, summary_writer=writer)]
    with MonitoredLoop(lambda: 0.5, hooks=hooks, metadata={"lr": 0.1}, step_unit="run") as loop:
        loop.run()
    assert writer.configs == [{"lr": 0.1}]
