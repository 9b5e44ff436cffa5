"""Writers for trackers: against the real libraries, offline, and what they have in common against a fake run."""

from __future__ import annotations

import json
import math
import re
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.rank_threads import Hub, ThreadRanks, in_threads
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from torchhooks import (
    EvaluationHook,
    JsonLinesWriter,
    MlflowWriter,
    MonitoredLoop,
    StepCounterHook,
    SummarySaverHook,
    WandbWriter,
    summary,
)
from torchhooks.common.text import flat_config
from torchhooks.summary.histograms import as_histogram, count
from torchhooks.summary.operations import write_config, write_summaries

NAN, INF = math.nan, math.inf
NEEDED_SECS = 60  # on a machine that does other things as well


class FakeRun:
    """A run of W&B that notes the calls, and that can be made to fail."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.config = self
        self.configs: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def update(self, config: dict[str, Any], allow_val_change: bool) -> None:
        self.configs.append(config)

    def log(self, values: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.logged.append({name: value for name, value in values.items() if name != "_timestamp"})


class FakeWandb:
    """The module, as far as the writer makes values with it."""

    def __init__(self) -> None:
        self.Histogram = lambda np_histogram: ("histogram", *np_histogram)
        self.Html = lambda text: ("html", text)
        self.Image = lambda value: ("image", value)


class Call:
    """A call of MLflow that is in flight until it is waited for."""

    def __init__(self, client: FakeClient) -> None:
        self.client = client

    def wait(self) -> None:
        self.client.in_flight -= 1
        if self.client.error is not None:
            raise self.client.error


class FakeClient:
    """MLflow's client, which notes the runs, the parameters and the names of the curves."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.error: Exception | None = None
        self.statuses: list[str] = []
        self.started: list[str] = []
        self.configs: list[dict[str, float]] = []
        self.curves: set[str] = set()

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=name)

    def create_run(self, experiment: str, run_name: str | None) -> Any:
        self.started.append(threading.current_thread().name)
        return SimpleNamespace(info=SimpleNamespace(run_id="1"))

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(params={}))

    def log_batch(self, run_id: str, params: Any = (), metrics: Any = (), synchronous: bool = True) -> Any:
        if params:
            self.configs.append({name: float(value) for name, value in params})
        self.curves.update(name for name, *_ in metrics)
        if synchronous:
            return None
        self.in_flight += 1
        return Call(self)

    def update_run(self, run_id: str, status: str) -> None: ...

    def set_terminated(self, run_id: str, status: str) -> None:
        self.statuses.append(status)


def fake_mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    client = FakeClient()
    entities = SimpleNamespace(Param=lambda *pair: pair, Metric=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda uri: client, entities=entities))
    return client


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    return FakeRun()


# -- what all trackers have in common -------------------------------------------------------------------------------


def test_the_points_that_a_hook_writes_for_one_step_are_one_call(run: FakeRun) -> None:
    writer = WandbWriter(run=run)
    writer.add_points([("loss", 0.5), ("lr", 0.1)], 10)
    writer.add_scalar("rate", 100, 8)  # late
    assert run.logged == [{"loss": 0.5, "lr": 0.1, "global_step": 10}, {"rate": 100, "global_step": 8}]


@pytest.mark.parametrize("library", ["wandb", "mlflow"])
def test_of_several_ranks_only_the_one_that_writes_starts_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    run, client = FakeRun(), fake_mlflow(monkeypatch)
    started = client.started

    def init(**_: Any) -> FakeRun:
        started.append(threading.current_thread().name)
        return run

    fake = FakeWandb()
    fake.init, run.finish = init, lambda exit_code: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    kind: Any = WandbWriter if library == "wandb" else MlflowWriter
    chiefs: list[str] = []

    def main(ranks: ThreadRanks, hub: Hub) -> int:
        if ranks.is_chief:
            chiefs.append(threading.current_thread().name)
        with kind(tmp_path) as writer:
            hooks = [
                SummarySaverHook(1, summary_writer=writer, summary_op="loss"),
                EvaluationHook(lambda: 1.0, every_n_steps=1, summary_writer=writer),
                StepCounterHook(1, summary_writer=writer),
            ]
            with MonitoredLoop(lambda: 0.5, hooks=hooks, metadata={"lr": 0.1}, ranks=ranks) as loop:
                for _ in loop.until_stop(range(3)):
                    loop.run()
        return loop.global_step

    assert in_threads(2, main) == [3, 3]
    assert started == chiefs
    assert run.configs + client.configs == [{"lr": 0.1}]


def test_a_writer_that_nothing_is_written_to_starts_no_run(tmp_path: Path, run: FakeRun) -> None:
    with WandbWriter(tmp_path) as writer:  # whose fake library cannot start one
        writer.flush()
    assert not any(tmp_path.iterdir())


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    return fake_mlflow(monkeypatch)


def test_a_flush_waits_for_the_calls_that_mlflow_makes_in_the_background(client: FakeClient) -> None:
    writer = MlflowWriter(run_id="1")
    writer.add_scalar("loss", 0.5, 1)
    writer.add_scalar("loss", 0.5, 2)
    assert client.in_flight == 2
    writer.flush()
    assert client.in_flight == 0


def test_mlflow_has_no_more_than_a_thousand_calls_in_flight(client: FakeClient) -> None:
    writer = MlflowWriter(run_id="1")
    for step in range(1010):
        writer.add_scalar("loss", 0.5, step)
    assert client.in_flight == 1000


@pytest.mark.parametrize("call", ["flush", "close"])
def test_an_error_in_the_background_of_mlflow_is_raised_once(client: FakeClient, call: str, tmp_path: Path) -> None:
    writer = MlflowWriter(tmp_path)
    for step in range(3):
        writer.add_scalar("loss", 0.5, step)
    client.error = OSError("no route to host")
    with pytest.raises(OSError, match="no route to host") as caught:
        getattr(writer, call)()
    assert caught.value.__notes__ == [f"torchhooks: {writer!r} could not make 3 of its calls"]
    writer.close()
    assert client.statuses == ["FINISHED"]


def test_an_error_of_wandb_is_raised_at_once(run: FakeRun) -> None:
    run.error = OSError("no route to host")
    with pytest.raises(OSError, match="no route to host"):
        WandbWriter(run=run).add_scalar("loss", 0.5, 1)


def test_an_error_of_the_tracker_does_not_replace_that_of_the_training_run(
    client: FakeClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        with MlflowWriter(tmp_path) as writer:
            writer.add_scalar("loss", 0.5, 1)
            raise KeyError

    client.error = OSError("no route to host")
    with pytest.raises(KeyError):
        fail()
    assert "could not send all of its points" in caplog.text
    assert client.statuses == ["FAILED"]


def test_a_closed_writer_can_be_closed_again_but_not_written_to(run: FakeRun) -> None:
    writer = WandbWriter(run=run)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match=r"WandbWriter\(run=.*is closed: write before close\(\)"):
        writer.add_scalar("loss", 0.5, 1)


def test_every_kind_of_value_reaches_the_tracker(run: FakeRun) -> None:
    from matplotlib.figure import Figure

    writer = WandbWriter(run=run)
    drawn = Figure(figsize=(1, 1))
    ops: list[tuple[Any, Any]] = [
        (summary.image("grey", "x"), torch.ones(2, 3)),
        (summary.image("colors", "x"), torch.ones(3, 2, 5)),
        (summary.text("note", "x"), "a < b"),
        (summary.figure("figure", "x"), drawn),
        (summary.histogram("weights", "x"), torch.tensor([0.0, 0.0, 5e-13])),
    ]
    write_summaries(writer, [op.compose(value) for op, value in ops], 3)
    writer.add_histogram("elements", torch.tensor([0.0]), 3)
    logged = {tag: value for values in run.logged for tag, value in values.items()}
    assert logged["grey"][1].shape == (2, 3)
    assert logged["colors"][1].shape == (2, 5, 3)
    assert logged["note"] == ("html", "<pre>a &lt; b</pre>")
    assert logged["figure"][1].shape == (100, 100, 4)
    _, counts, limits = logged["weights"]
    assert (counts.tolist(), limits.tolist()) == ([3], [0.0, 1e-12])
    assert logged["elements"][1].tolist() == [1]


def test_a_histogram_of_many_bins_has_fewer_for_wandb_and_the_same_elements(run: FakeRun) -> None:
    writer = WandbWriter(run=run)
    raw, _ = as_histogram(count(torch.tensor([-1e19, -1.0, 1e-11, 1.0, 2.0, 1e19])))
    assert raw is not None
    assert len(raw.bucket_counts) > 1000
    writer.add_histogram_raw("w", *raw, 1)
    writer.flush()
    _, counts, limits = run.logged[0]["w"]
    assert len(counts) <= 512
    assert len(limits) == len(counts) + 1
    assert sum(counts) == 6
    assert (limits[0], limits[-1]) == (raw.bucket_limits[0], raw.bucket_limits[-1])
    assert (np.diff(limits) > 0).all()


def test_a_loop_writes_to_all_of_its_writers_and_gives_them_its_metadata_once(run: FakeRun, tmp_path: Path) -> None:
    path = tmp_path / "curves.jsonl"
    with JsonLinesWriter(path) as lines, WandbWriter(run=run) as tracker:
        hooks = [
            SummarySaverHook(
                1, summary_writer=[tracker, lines], summary_op={"loss": "loss", "i": summary.image("i", "i")}
            ),
            StepCounterHook(2, summary_writer=(tracker,)),
        ]
        metadata = {"lr": 0.1, "model": {"width": 3}}
        outputs = {"loss": 0.5, "i": torch.ones(2, 2)}
        with MonitoredLoop(lambda: outputs, hooks=hooks, metadata=metadata, step_unit="run") as loop:
            for _ in range(4):
                loop.run()
    losses = [(values["global_step"], values["loss"]) for values in run.logged if "loss" in values]
    assert losses == [(step, 0.5) for step in (1, 2, 3, 4)]
    assert [values["global_step"] for values in run.logged if "global_step/sec" in values] == [3]
    assert [values["global_step"] for values in run.logged if "i" in values] == [1, 2, 3, 4]
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [0.5] * 4
    assert run.configs == [{"lr": 0.1, "model.width": 3}]


def test_an_empty_list_of_writers_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"summary_writer=\[\]: give at least one writer"):
        StepCounterHook(summary_writer=[])


def test_an_error_of_one_writer_keeps_no_point_from_another(run: FakeRun, tmp_path: Path) -> None:
    class Broken:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            raise OSError("broken")

        def flush(self) -> None: ...

    with JsonLinesWriter(tmp_path / "curves.jsonl") as lines, pytest.raises(OSError, match="broken"):
        write_summaries((Broken(), lines), summary.scalar("loss", "loss").compose(0.5), 1)
    assert '"loss": 0.5' in (tmp_path / "curves.jsonl").read_text()


# -- hparams --------------------------------------------------------------------------------------------------------


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


def test_a_writer_that_cannot_take_a_config_is_not_called() -> None:
    write_config(object(), {"lr": 0.1})


def test_a_tensor_in_a_config_is_shown_by_its_type() -> None:
    assert flat_config({"w": torch.ones(3), "empty": {}}) == {"w": "Tensor(...)", "empty": "{}"}


# -- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("wandb", WandbWriter), ("mlflow", MlflowWriter)])
def test_without_the_library_the_error_says_how_to_install_it(
    name: str, kind: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it could not be imported
    with pytest.raises(ImportError, match=rf"{name} cannot be imported: pip install torchhooks\[{name}\]"):
        kind(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [{}, {"folder": "a", "run": FakeRun()}])
def test_a_wandb_writer_needs_a_folder_or_a_run(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"WandbWriter\(.*\): give exactly one of folder and run"):
        WandbWriter(**arguments)


def test_arguments_for_a_new_run_have_no_effect_on_an_existing_one(run: FakeRun) -> None:
    with pytest.raises(
        ValueError, match=r"WandbWriter\(run=\.\.\., project=\.\.\.\): these are arguments for a new run"
    ):
        WandbWriter(run=run, project="p")


# -- the real wandb, offline ----------------------------------------------------------------------------------------


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


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # it reads the environment once in a process, and another test may have used it


wandb_warns = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@wandb_warns
@pytest.mark.usefixtures("offline")
def test_wandb_gets_each_value_with_the_global_step_and_resumes_its_run(tmp_path: Path) -> None:
    def train(steps: int, begin: int) -> None:
        with WandbWriter(tmp_path, project="p") as writer:
            ops = {"loss": "loss", "w": summary.histogram("w", "w"), "i": summary.image("i", "i")}
            hook = SummarySaverHook(1, summary_writer=writer, summary_op=ops)
            outputs = {"loss": 0.5, "w": torch.tensor([1.0, 2.0]), "i": torch.ones(2, 2)}
            with MonitoredLoop(lambda: outputs, hooks=[hook], metadata={"lr": 0.1}, step_unit="run") as loop:
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
    assert all("_timestamp" in values for values in logged)
    assert sum(next(values["w.values"] for values in logged if "w.values" in values)) == 2
    ids = [record.run.run_id for record in records(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert set(ids) == {(tmp_path / "wandb-run-id").read_text().strip()}
    configs = [record.config.update for record in records(tmp_path) if record.WhichOneof("record_type") == "config"]
    assert ("lr", "0.1") in [(item.key, item.value_json) for update in configs for item in update]


@wandb_warns
@pytest.mark.usefixtures("offline")
def test_wandb_gets_nan_text_and_figures_and_a_failed_run_says_so(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    def fail() -> None:
        with WandbWriter(tmp_path, project="p") as writer:
            writer.add_scalar("loss", NAN, 1)
            writer.add_text("note", "hello", 1)
            writer.add_figure("figure", Figure(figsize=(1, 1)), 1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    loss, note, figure = history(tmp_path, 1)
    assert math.isnan(float(loss["loss"]))
    assert ("note.path" in note, "figure.path" in figure) == (True, True)
    (ended,) = [record.exit for record in records(tmp_path) if record.WhichOneof("record_type") == "exit"]
    assert ended.exit_code == 1


# -- the real mlflow, on SQLite -------------------------------------------------------------------------------------


def end_threads_of_mlflow(store: str) -> None:
    """Wait until MLflow has made its calls, which it does by itself when the process exits."""
    from mlflow.tracking._tracking_service.utils import _artifact_repos_cache, _get_store

    _get_store(store).flush_async_logging()
    for artifacts in _artifact_repos_cache.values():
        artifacts.flush_async_logging()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)  # where MLflow puts its artifacts
    store = f"sqlite:///{tmp_path}/mlflow.db"
    yield store
    end_threads_of_mlflow(store)


mlflow_warns = pytest.mark.filterwarnings("ignore")  # of its own dependencies


@mlflow_warns
def test_mlflow_gets_one_call_a_step_and_resumes_its_run(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import mlflow

    calls: list[int] = []
    log_batch = mlflow.MlflowClient.log_batch

    def counted(self: Any, run_id: str, metrics: Any = (), **rest: Any) -> Any:
        calls.append(len(metrics))
        return log_batch(self, run_id, metrics=metrics, **rest)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", counted)

    def train(steps: int, begin: int, rate: float) -> Any:
        with MlflowWriter(tmp_path / "run", tracking_uri=store, experiment="mnist", run_name="a") as writer:
            hook = SummarySaverHook(1, summary_writer=writer, summary_op={"loss": "loss", "acc %": "acc"})
            metadata = {"lr": rate, "model": {"width": 3}}
            outputs = {"loss": 0.5, "acc": NAN}
            with MonitoredLoop(lambda: outputs, hooks=[hook], metadata=metadata, step_unit="run") as loop:
                loop.session.global_step = begin
                for _ in range(steps):
                    loop.run()

    train(2, 0, 0.1)
    train(1, 2, 0.2)
    run_id = (tmp_path / "run" / "mlflow-run-id").read_text().strip()
    client = mlflow.MlflowClient(store)
    run = client.get_run(run_id)
    assert [(point.step, point.value) for point in client.get_metric_history(run_id, "loss")] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.5),
    ]
    assert math.isnan(run.data.metrics["acc _"])
    assert calls == [0, 2, 2, 2]  # the params, and then each step; no param is new after the resume
    assert run.data.params == {"lr": "0.1", "model.width": "3"}
    assert "keeps the parameter 'lr' at '0.1', because it allows no change to '0.2'" in caplog.text
    assert run.info.status == "FINISHED"
    experiment = client.get_experiment_by_name("mnist")
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 1


@mlflow_warns
def test_mlflow_gets_images_texts_and_figures_and_a_failed_run_says_so(store: str, tmp_path: Path) -> None:
    import mlflow
    from matplotlib.figure import Figure

    def fail() -> None:
        with MlflowWriter(tmp_path / "run", tracking_uri=store) as writer:
            writer.add_image("i", np.zeros((3, 4, 5), np.uint8), 7)
            writer.add_text("a//note", "hello", 7)
            writer.add_figure("figure", Figure(figsize=(1, 1)), 7)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    client = mlflow.MlflowClient(store)
    run = client.get_run((tmp_path / "run" / "mlflow-run-id").read_text().strip())
    assert [each.path for each in client.list_artifacts(run.info.run_id, "a/note")] == ["a/note/7.txt"]
    end_threads_of_mlflow(store)
    images = [each.path for each in client.list_artifacts(run.info.run_id, "images")]
    for name in ("i", "figure"):
        assert [path for path in images if re.match(f"images/{name}[%+]step[%+]7", path)] != [], images
    assert run.info.status == "FAILED"


@mlflow_warns
def test_an_existing_run_of_mlflow_is_continued_and_not_ended(store: str) -> None:
    import mlflow

    client = mlflow.MlflowClient(store)
    run_id = client.create_run(client.create_experiment("mine")).info.run_id
    with MlflowWriter(run_id=run_id, tracking_uri=store) as writer:
        assert repr(writer) == f"MlflowWriter(run_id={run_id!r})"
        writer.add_scalar("loss", 0.5, 7)
    assert client.get_run(run_id).data.metrics == {"loss": 0.5}
    assert client.get_run(run_id).info.status == "RUNNING"


@mlflow_warns
def test_mlflow_has_no_histograms_but_another_writer_of_the_list_may_have(store: str, tmp_path: Path) -> None:
    with MlflowWriter(tmp_path / "run", tracking_uri=store) as writer:
        hook = SummarySaverHook(1, summary_writer=writer, summary_op=summary.histogram("w", "w"))
        with pytest.raises(TypeError, match=r"MlflowWriter has no add_histogram\(\)"):
            MonitoredLoop(lambda: {"w": torch.ones(3)}, hooks=[hook]).__enter__()


@pytest.mark.parametrize(
    ("tag", "name"), [("loss %", "loss _"), ("a//b", "a/b"), ("/a", "a"), ("../a", "a"), ("a:b", "a_b"), ("//", "_")]
)
def test_a_tag_becomes_a_name_that_mlflow_accepts(tag: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = fake_mlflow(monkeypatch)
    with MlflowWriter(run_id="1") as writer:
        writer.add_scalar(tag, 0.5, 1)
    assert client.curves == {name}
