"""Hooks with a list of writers, and writers that several ranks create."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from support.rank_threads import Hub, ThreadRanks, in_threads

from torchhooks import EvaluationHook, JsonLinesWriter, MonitoredLoop, StepCounterHook, SummarySaverHook, summary
from torchhooks.summary.operations import write_summaries
from torchhooks.summary.writers import as_writer
from torchhooks.testing import RecordingWriter


def test_a_loop_writes_to_all_of_its_writers_what_they_take(tmp_path: Path) -> None:
    recorded, path = RecordingWriter(), tmp_path / "curves.jsonl"
    with JsonLinesWriter(path) as lines:
        ops = {"loss": "loss", "i": summary.image("i", "i")}
        hooks = [
            SummarySaverHook(1, summary_writer=[recorded, lines], summary_op=ops),
            StepCounterHook(2, summary_writer=(recorded,)),
        ]
        outputs = {"loss": 0.5, "i": torch.ones(2, 2)}
        with MonitoredLoop(lambda: outputs, hooks=hooks, step_unit="run") as loop:
            for _ in range(4):
                loop.run()
    assert recorded.scalars["loss"] == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5)]
    assert [step for step, _ in recorded.scalars["global_step/sec"]] == [3]
    assert [record[3] for record in recorded.records if record[0] == "image"] == [1, 2, 3, 4]
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [0.5] * 4


def test_an_empty_list_of_writers_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"summary_writer=\[\]: give at least one writer"):
        StepCounterHook(summary_writer=[])


def test_an_error_of_one_writer_keeps_no_point_from_another(tmp_path: Path) -> None:
    class Broken:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            raise OSError("broken")

        def flush(self) -> None: ...

    with JsonLinesWriter(tmp_path / "curves.jsonl") as lines, pytest.raises(OSError, match="broken"):
        write_summaries([as_writer(Broken()), lines], summary.scalar("loss", "loss").compose(0.5), 1)
    assert '"loss": 0.5' in (tmp_path / "curves.jsonl").read_text()


def test_of_several_ranks_only_the_chief_starts_the_run_of_a_tracker() -> None:
    started: list[str] = []
    chiefs: list[str] = []

    class Tracker(RecordingWriter):
        def start_run(self) -> None:
            started.append(threading.current_thread().name)

    def main(ranks: ThreadRanks, hub: Hub) -> int:
        if ranks.is_chief:
            chiefs.append(threading.current_thread().name)
        writer = Tracker()
        hooks = [
            SummarySaverHook(1, summary_writer=writer, summary_op="loss"),
            EvaluationHook(lambda: 1.0, every_n_steps=1, summary_writer=writer),
            StepCounterHook(1, summary_writer=writer),
        ]
        with MonitoredLoop(lambda: 0.5, hooks=hooks, ranks=ranks) as loop:
            for _ in loop.until_stop(range(3)):
                loop.run()
        return loop.global_step

    assert in_threads(2, main) == [3, 3]
    assert set(started) == set(chiefs)
