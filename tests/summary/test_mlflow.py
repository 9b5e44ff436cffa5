"""MlflowWriter against the real MLflow, on SQLite."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchhooks import MlflowWriter, MonitoredLoop, SummarySaverHook, summary
from torchhooks.common.files import PLACES

# MLflow takes seconds to import, and its dependencies warn.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
mlflow: Any = None


@pytest.fixture(scope="module", autouse=True)
def _mlflow() -> None:
    """Import MLflow for the tests only, because it takes seconds, and each process of xdist collects this file."""
    global mlflow
    mlflow = pytest.importorskip("mlflow")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all tests, because MLflow takes seconds to create one."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(autouse=True)
def quiet_end(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep artifacts in a folder of the test, and end MLflow's threads, which otherwise end with the process."""
    monkeypatch.chdir(tmp_path)
    yield
    from mlflow.tracking._tracking_service.utils import _get_store

    _get_store(store).flush_async_logging()


def recorded_run(store: str, folder: Path) -> Any:
    return mlflow.MlflowClient(store).get_run((folder / "mlflow-run-id").read_text())


def points(store: str, run: Any, curve: str) -> list[tuple[int, float]]:
    return [
        (point.step, point.value) for point in mlflow.MlflowClient(store).get_metric_history(run.info.run_id, curve)
    ]


def artifacts(store: str, run: Any, folder: str) -> list[str]:
    return [file.path for file in mlflow.MlflowClient(store).list_artifacts(run.info.run_id, folder)]


def test_mlflow_gets_the_points_and_metadata_of_a_loop_and_resumes_its_run(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(steps: int, begin: int, rate: float) -> None:
        with MlflowWriter(tmp_path / "run", tracking_uri=store, experiment="mnist", run_name="a") as writer:
            hook = SummarySaverHook(1, summary_writer=writer, summary_op={"loss": "loss", "acc %": "acc"})
            metadata = {"lr": rate, "model": {"width": 3}}
            outputs = {"loss": 0.5, "acc": math.nan}
            with MonitoredLoop(lambda: outputs, hooks=[hook], metadata=metadata, step_unit="run") as loop:
                loop.session.global_step = begin
                for _ in range(steps):
                    loop.run()

    train(2, 0, 0.1)
    train(1, 2, 0.2)
    run = recorded_run(store, tmp_path / "run")
    assert points(store, run, "loss") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert math.isnan(run.data.metrics["acc _"])
    assert run.data.params == {"lr": "0.1", "model.width": "3"}
    assert "MLflow changes no parameters: the resumed run keeps its lr" in caplog.text
    assert (run.info.status, run.info.run_name) == ("FINISHED", "a")
    assert mlflow.MlflowClient(store).get_experiment(run.info.experiment_id).name == "mnist"


def test_a_run_that_was_never_closed_is_resumed(store: str, tmp_path: Path) -> None:
    killed = MlflowWriter(tmp_path / "run", tracking_uri=store)
    killed.add_scalar("loss", 0.5, 1)
    killed.flush()
    with MlflowWriter(tmp_path / "run", tracking_uri=store) as resumed:
        resumed.add_scalar("loss", 0.25, 2)
    run = recorded_run(store, tmp_path / "run")
    assert points(store, run, "loss") == [(1, 0.5), (2, 0.25)]
    assert run.info.status == "FINISHED"


def test_a_file_without_an_id_is_that_of_a_process_killed_at_the_start(store: str, tmp_path: Path) -> None:
    (tmp_path / "mlflow-run-id").touch()
    with MlflowWriter(tmp_path, tracking_uri=store) as writer:
        writer.add_scalar("loss", 0.5, 1)
    assert points(store, recorded_run(store, tmp_path), "loss") == [(1, 0.5)]


def test_mlflow_gets_images_texts_and_figures_and_a_failed_run_says_so(store: str, tmp_path: Path) -> None:
    def fail() -> None:
        with MlflowWriter(tmp_path / "run", tracking_uri=store) as writer:
            writer.add_image("i", np.zeros((3, 4, 5), np.uint8), 7)
            writer.add_image("grey", np.zeros((1, 4, 5), np.uint8), 7)
            writer.add_text("a/note", "hello", 7)
            writer.add_figure("figure", pytest.importorskip("matplotlib.figure").Figure(figsize=(1, 1)), 7)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    run = recorded_run(store, tmp_path / "run")
    assert artifacts(store, run, "a/note") == ["a/note/7.txt"]
    assert artifacts(store, run, "figure") == ["figure/7.png"]
    names = {path.partition("+timestamp")[0] for path in artifacts(store, run, "images")}
    assert names == {"images/i+step+7", "images/grey+step+7"}
    assert run.info.status == "FAILED"


def test_an_existing_run_of_mlflow_is_continued_and_not_ended(store: str) -> None:
    client = mlflow.MlflowClient(store)
    run_id = client.create_run(client.create_experiment("mine")).info.run_id
    with MlflowWriter(run_id=run_id, tracking_uri=store) as writer:
        writer.add_scalar("loss", 0.5, 7)
    assert client.get_run(run_id).data.metrics == {"loss": 0.5}
    assert client.get_run(run_id).info.status == "RUNNING"


def test_a_flush_waits_for_the_points_that_mlflow_sends_in_the_background(store: str, tmp_path: Path) -> None:
    with MlflowWriter(tmp_path, tracking_uri=store) as writer:
        for step in range(20):
            writer.add_points([("loss", 0.5), ("lr", 0.1)], step)
        writer.flush()
        run = recorded_run(store, tmp_path)
        assert sorted(points(store, run, "loss")) == [(step, 0.5) for step in range(20)]
        assert len(points(store, run, "lr")) == 20


@pytest.mark.parametrize("call", ["flush", "close"])
def test_an_error_in_the_background_of_mlflow_is_raised(store: str, call: str, tmp_path: Path) -> None:
    writer = MlflowWriter(tmp_path, tracking_uri=store)
    writer.add_scalar("a//b", 0.5, 1)  # a name that MLflow refuses
    with pytest.raises(mlflow.MlflowException, match="a//b"):
        getattr(writer, call)()
    writer.close()
    assert recorded_run(store, tmp_path).info.status == "FINISHED"


def test_an_error_of_mlflow_comes_with_that_of_the_training_run(store: str, tmp_path: Path) -> None:
    def fail() -> None:
        with MlflowWriter(tmp_path, tracking_uri=store) as writer:
            writer.add_scalar("a//b", 0.5, 1)
            raise KeyError

    with pytest.raises(mlflow.MlflowException, match="a//b") as caught:
        fail()
    assert isinstance(caught.value.__context__, KeyError)
    assert recorded_run(store, tmp_path).info.status == "FAILED"


def test_no_more_than_a_thousand_calls_are_in_flight(
    monkeypatch: pytest.MonkeyPatch, store: str, tmp_path: Path
) -> None:
    in_flight: list[int] = []

    class Call:
        def wait(self) -> None:
            in_flight.pop()

    def log_batch(*_: object, **__: object) -> Call:
        in_flight.append(1)
        assert len(in_flight) <= 1000
        return Call()

    with MlflowWriter(tmp_path, tracking_uri=store) as writer:
        writer.start_run()
        monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
        for step in range(1010):
            writer.add_scalar("loss", 0.5, step)
        assert len(in_flight) == 10


def test_a_writer_that_nothing_is_written_to_starts_no_run_of_mlflow(store: str, tmp_path: Path) -> None:
    with MlflowWriter(tmp_path / "run", tracking_uri=store) as writer:
        writer.flush()
    assert not (tmp_path / "run").exists()


def test_mlflow_has_no_histograms(store: str, tmp_path: Path) -> None:
    with MlflowWriter(tmp_path, tracking_uri=store) as writer:
        hook = SummarySaverHook(1, summary_writer=writer, summary_op=summary.histogram("w", "w"))
        with pytest.raises(TypeError, match=r"MlflowWriter has no add_histogram\(\)"):
            MonitoredLoop(lambda: {"w": torch.ones(3)}, hooks=[hook]).__enter__()


def test_without_mlflow_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:  # over before the end of the fixture, which may import parts of mlflow
        patch.setitem(sys.modules, "mlflow", None)  # as if it could not be imported
        with pytest.raises(ImportError, match=r"mlflow cannot be imported: pip install torchhooks\[mlflow\]"):
            MlflowWriter(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [{}, {"folder": "a", "run_id": "b"}])
def test_an_mlflow_writer_needs_either_a_folder_or_a_run_id(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give exactly one of folder and run_id"):
        MlflowWriter(**arguments)


def test_under_check_nothing_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACES, str(tmp_path / "scratch"))
    monkeypatch.setattr(mlflow, "MlflowClient", None)
    for writer in (MlflowWriter(tmp_path / "run", tracking_uri="http://192.0.2.1"), MlflowWriter(run_id="of a server")):
        hook = SummarySaverHook(1, summary_writer=writer, summary_op={"loss": "loss"})
        with writer, MonitoredLoop(lambda: {"loss": 0.5}, hooks=[hook], metadata={"lr": 0.1}) as loop:
            loop.run()
            writer.add_image("image", np.zeros((3, 2, 2), np.uint8), 1)
            writer.add_text("text", "words", 1)
            writer.add_figure("figure", None, 1)
            writer.flush()
    assert not [*tmp_path.iterdir()]
