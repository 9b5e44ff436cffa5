"""WandbWriter against the real wandb, offline."""

from __future__ import annotations

import json
import math
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchhooks import MonitoredLoop, SummarySaverHook, WandbWriter, summary
from torchhooks.common.files import PLACES
from torchhooks.summary.histograms import as_histogram, count

NEEDED_SECS = 60  # on a machine that does other things as well

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
wandb: Any = None


@pytest.fixture(scope="module", autouse=True)
def _wandb() -> None:
    """Import wandb for the tests only, because it takes seconds, and each process of xdist collects this file."""
    global wandb
    wandb = pytest.importorskip("wandb")


class RecordingRun:
    """A run that keeps what is logged. It has no finish()."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)


def records(folder: Path) -> Iterator[Any]:
    """The records in W&B's offline files, which are logs in the format of LevelDB, oldest first."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        data, position, parts = file.read_bytes(), 7, b""
        while position + 7 <= len(data):
            left = 32768 - position % 32768
            if left < 7:
                position += left
                continue
            _, size, kind = struct.unpack_from("<IHB", data, position)
            parts += data[position + 7 : position + 7 + size]
            position += 7 + size
            if kind in (1, 4):  # whole, or the last part
                record = wandb_internal_pb2.Record()
                record.ParseFromString(parts)
                parts = b""
                yield record


def history(folder: Path, runs: int) -> list[dict[str, Any]]:
    """What was logged in ``runs`` processes, or as many writers. W&B's own process may still be writing it."""
    deadline = time.monotonic() + NEEDED_SECS
    while [record.WhichOneof("record_type") for record in records(folder)].count("exit") < runs:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def run_ids(folder: Path) -> set[str]:
    return {record.run.run_id for record in records(folder) if record.WhichOneof("record_type") == "run"}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # it reads the environment once in a process, and another test may have used it


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_wandb_gets_each_value_with_the_global_step_and_resumes_its_run(tmp_path: Path) -> None:
    def train(steps: int, begin: int) -> None:
        with WandbWriter(tmp_path, project="p") as writer:
            ops = {"loss": "loss", "w": summary.histogram("w", "w"), "i": summary.image("i", "i")}
            hook = SummarySaverHook(1, summary_writer=writer, summary_op=ops)
            outputs = {"loss": 0.5, "w": torch.tensor([1.0, 2.0]), "i": torch.ones(2, 2)}
            metadata = {"lr": 0.1, "model": {"width": 3}}
            with MonitoredLoop(lambda: outputs, hooks=[hook], metadata=metadata, step_unit="run") as loop:
                loop.session.global_step = begin
                for _ in range(steps):
                    loop.run()

    train(2, 0)
    second = int(time.time())  # W&B names the folder of an offline run by it, and two runs must not share one
    while int(time.time()) == second:
        time.sleep(0.05)
    train(1, 2)
    logged = history(tmp_path, 2)
    for name in ("loss", "w.values", "w.bins", "i.path"):
        assert [values["global_step"] for values in logged if name in values] == [1, 2, 3]
    assert sum(next(values["w.values"] for values in logged if "w.values" in values)) == 2
    assert run_ids(tmp_path) == {(tmp_path / "wandb-run-id").read_text()}
    configs = [record.config.update for record in records(tmp_path) if record.WhichOneof("record_type") == "config"]
    config = [(item.key, item.value_json) for update in configs for item in update]
    assert {("lr", "0.1"), ("model.width", "3")} <= set(config)


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_wandb_gets_nan_text_and_figures_and_a_failed_run_says_so(tmp_path: Path) -> None:
    def fail() -> None:
        with WandbWriter(tmp_path, project="p") as writer:
            writer.add_scalar("loss", math.nan, 1)
            writer.add_text("note", "a < b", 1)
            writer.add_figure("figure", pytest.importorskip("matplotlib.figure").Figure(figsize=(1, 1)), 1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    loss, note, figure = history(tmp_path, 1)
    assert math.isnan(float(loss["loss"]))
    assert ("note.path" in note, "figure.path" in figure) == (True, True)
    (page,) = tmp_path.glob("wandb/offline-run-*/files/media/html/*.html")
    assert "a &lt; b" in page.read_text()
    (ended,) = [record.exit for record in records(tmp_path) if record.WhichOneof("record_type") == "exit"]
    assert ended.exit_code == 1


@pytest.mark.usefixtures("offline")
def test_the_id_of_a_new_run_may_be_given(tmp_path: Path) -> None:
    with WandbWriter(tmp_path, project="p", id="mine") as writer:
        writer.add_scalar("loss", 0.5, 1)
    history(tmp_path, 1)
    assert run_ids(tmp_path) == {"mine"}
    assert (tmp_path / "wandb-run-id").read_text() == "mine"


def test_a_writer_that_nothing_is_written_to_starts_no_run(tmp_path: Path) -> None:
    with WandbWriter(tmp_path / "run") as writer:
        writer.flush()
    assert not (tmp_path / "run").exists()


def test_the_points_that_a_hook_writes_for_one_step_are_one_call_even_if_they_come_late() -> None:
    run = RecordingRun()
    with WandbWriter(run=run) as writer:
        writer.add_points([("loss", 0.5), ("lr", 0.1)], 10)
        writer.add_scalar("rate", 100, 8)
    assert run.logged == [{"loss": 0.5, "lr": 0.1, "global_step": 10}, {"rate": 100, "global_step": 8}]


def test_a_histogram_of_many_bins_has_fewer_for_wandb_and_the_same_elements() -> None:
    run = RecordingRun()
    raw, _ = as_histogram(count(torch.tensor([-1e19, -1.0, 1e-11, 1.0, 2.0, 1e19])))
    assert raw is not None
    assert len(raw.bucket_counts) > 1000
    WandbWriter(run=run).add_histogram_raw("w", *raw, 1)
    histogram = run.logged[0]["w"]
    assert len(histogram.histogram) <= 512
    assert sum(histogram.histogram) == 6
    assert (histogram.bins[0], histogram.bins[-1]) == (raw.bucket_limits[0], raw.bucket_limits[-1])
    assert (np.diff(histogram.bins) > 0).all()


def test_a_histogram_of_few_bins_keeps_them() -> None:
    run = RecordingRun()
    WandbWriter(run=run).add_histogram("w", torch.tensor([0.0, 0.0, 5e-13]), 1)
    histogram = run.logged[0]["w"]
    assert (histogram.histogram, histogram.bins) == ([3], [0.0, 1e-12])


def test_images_have_the_channels_that_they_are_given() -> None:
    run = RecordingRun()
    writer = WandbWriter(run=run)
    writer.add_image("grey", np.zeros((1, 2, 3), np.uint8), 1)
    writer.add_image("colors", np.zeros((3, 2, 5), np.uint8), 1)
    grey, colors = run.logged[0]["grey"].image, run.logged[1]["colors"].image
    assert (grey.mode, grey.size, colors.mode, colors.size) == ("L", (3, 2), "RGB", (5, 2))


def test_an_error_of_wandb_is_raised_at_once() -> None:
    class BrokenRun(RecordingRun):
        def log(self, values: dict[str, Any]) -> None:
            raise OSError("no route to host")

    with pytest.raises(OSError, match="no route to host"):
        WandbWriter(run=BrokenRun()).add_scalar("loss", 0.5, 1)


def test_without_wandb_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it could not be imported
    with pytest.raises(ImportError, match=r"wandb cannot be imported: pip install torchhooks\[wandb\]"):
        WandbWriter(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [{}, {"folder": "a", "run": RecordingRun()}, {"run": RecordingRun(), "id": "a"}])
def test_a_wandb_writer_needs_either_a_folder_or_only_a_run(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give a folder and arguments of wandb"):
        WandbWriter(**arguments)


@pytest.mark.slow
def test_under_check_nothing_is_sent_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACES, str(tmp_path / "scratch"))
    with WandbWriter(tmp_path / "run", project="mnist", mode="online") as writer:
        writer.add_scalar("loss", 0.5, 1)
        assert writer.start_run().disabled
    assert not (tmp_path / "run").exists()
