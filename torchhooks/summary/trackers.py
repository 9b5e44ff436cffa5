"""Writers for Weights & Biases, MLflow and Prometheus, whose libraries are imported when a writer is created."""

from __future__ import annotations

import html
import importlib
import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchhooks.common.checks import import_optional
from torchhooks.common.files import is_checked, place
from torchhooks.common.log import logger
from torchhooks.common.text import flat_config
from torchhooks.summary import operations as summary
from torchhooks.summary.writers import SummaryWriter

_MOST_CALLS = 1000  # in flight, because MLflow's queue has no limit


class MlflowWriter(SummaryWriter):
    """A ``summary_writer`` for MLflow.

    >>> writer = MlflowWriter("runs/1", tracking_uri="sqlite:///mlflow.db", experiment="mnist")  # doctest: +SKIP
    >>> with writer:  # doctest: +SKIP
    ...     hook = SummarySaverHook(save_steps=4, summary_writer=writer, summary_op={"loss": "loss"})
    ...     with MonitoredLoop(step, model, optimizer, hooks=[hook], metadata={"lr": 0.1}) as loop:
    ...         for inputs in loop.until_stop(batches):
    ...             loss = loop.run(inputs)

    Points of steps that are repeated after a restore are written twice. Under ``python -m torchhooks check``, nothing
    is written. See :doc:`W&B and MLflow </logging-and-trackers>`.

    Args:
        folder: a folder whose file ``mlflow-run-id`` holds the id of the run, which the next writer with this folder
            resumes.
        run_id: an existing run, in place of ``folder``. The writer does not end it.
        tracking_uri: where MLflow keeps its runs; by default what MLflow is configured to use.
        experiment: the name of the experiment of a new run, which is created if it does not exist.
        run_name: the name of a new run; by default MLflow invents one.

    Raises:
        ImportError: mlflow is not installed.
        ValueError: not exactly one of ``folder`` and ``run_id`` is given.
    """

    def __new__(cls, *args: object, **keywords: object) -> Any:
        # The server may be another machine, and must not get the runs of a script that is only checked.
        return super().__new__(_Unsent if is_checked() else cls)

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        experiment: str = "Default",
        run_name: str | None = None,
    ) -> None:
        if (folder is None) == (run_id is None):
            raise ValueError("MlflowWriter: give exactly one of folder and run_id")
        mlflow = import_optional("mlflow", "mlflow")
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient(tracking_uri)
        self._folder, self._given_id, self._experiment, self._run_name = folder, run_id, experiment, run_name
        # No run is started here, because every rank creates the writer. Only hooks of the chief open it.
        self._run_id: str | None = None
        self._calls: list[Any] = []  # in flight

    def start_run(self) -> Any:
        """Start or resume the run, unless that is done, and return its id. Hooks call this in their ``begin``."""
        if self._run_id is None:
            self._run_id = self._given_id if self._folder is None else self._create_run(self._folder)
        return self._run_id

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.add_points([(tag, value)], step)

    def add_points(self, points: Iterable[tuple[str, float]], step: int, walltime: float | None = None) -> None:
        if len(self._calls) == _MOST_CALLS:
            self.flush()
        millis = int(1000 * (time.time() if walltime is None else walltime))
        metrics = [self._entities.Metric(_allowed(tag), value, millis, step) for tag, value in points]
        self._calls.append(self._client.log_batch(self.start_run(), metrics, synchronous=False))

    def add_image(self, tag: str, image: np.ndarray, step: int) -> None:
        pixels = image.transpose(1, 2, 0)
        # Synchronous, because MLflow returns nothing that would tell of an error in the background.
        self._client.log_image(self.start_run(), pixels, key=_allowed(tag), step=step, synchronous=True)

    def add_figure(self, tag: str, figure: object, step: int) -> None:
        self._client.log_figure(self.start_run(), figure, f"{_allowed(tag)}/{step}.png")

    def add_text(self, tag: str, text: str, step: int) -> None:
        self._client.log_text(self.start_run(), text, f"{_allowed(tag)}/{step}.txt")

    def add_config(self, config: Mapping[str, object]) -> None:
        wanted = {_allowed(name): str(value) for name, value in flat_config(config).items()}
        kept = self._client.get_run(self.start_run()).data.params
        if changed := [name for name, value in wanted.items() if kept.get(name, value) != value]:
            logger.warning("MLflow changes no parameters: the resumed run keeps its %s", ", ".join(changed))
        new = [self._entities.Param(name, value) for name, value in wanted.items() if name not in kept]
        self._client.log_batch(self.start_run(), params=new, synchronous=True)

    def flush(self) -> None:
        """Wait until MLflow has all points, and raise the first of its errors. MLflow itself logs each of them."""
        calls, self._calls = self._calls, []
        for call in calls:
            call.wait()

    def close(self, status: str = "FINISHED") -> None:
        """Flush, and end the run, unless it was given. After an exception, a ``with`` block passes ``"FAILED"``."""
        # First, so that a point after this starts or resumes a run, also if the flush raises an error.
        run_id, self._run_id = self._run_id, None
        try:
            self.flush()
        finally:
            if run_id is not None and self._folder is not None:
                self._client.set_terminated(run_id, status)

    def __exit__(self, kind: object, *_: object) -> None:
        self.close("FINISHED" if kind is None else "FAILED")

    def _create_run(self, folder: str | os.PathLike[str]) -> str:
        id_file = Path(folder, "mlflow-run-id")
        # A process that was killed while it wrote the file may have left it empty.
        if id_file.exists() and (run_id := id_file.read_text().strip()):
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        found = self._client.get_experiment_by_name(self._experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(self._experiment)
        run_id = str(self._client.create_run(experiment_id, run_name=self._run_name).info.run_id)
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(run_id)
        return run_id


class _Unsent(SummaryWriter):
    """Takes the place of a writer that would send what it is given to another machine."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        pass

    def add_image(self, tag: str, image: np.ndarray, step: int) -> None:
        pass

    def add_figure(self, tag: str, figure: object, step: int) -> None:
        pass

    def add_text(self, tag: str, text: str, step: int) -> None:
        pass


def _allowed(tag: str) -> str:
    return re.sub(r"[^/\w.\- ]", "_", tag)


_MOST_BINS = 512  # W&B refuses a histogram with more


class WandbWriter(SummaryWriter):
    """A ``summary_writer`` for Weights & Biases.

    >>> with WandbWriter("runs/1", project="mnist", mode="disabled") as writer:  # or "online", "offline"
    ...     hook = SummarySaverHook(save_steps=4, summary_writer=writer, summary_op={"loss": "loss"})
    ...     with MonitoredLoop(step, model, optimizer, hooks=[hook], metadata={"lr": 0.1}) as loop:
    ...         for inputs in loop.until_stop(batches):
    ...             loss = loop.run(inputs)

    Points of steps that are repeated after a restore are written twice. See
    :doc:`W&B and MLflow </logging-and-trackers>`.

    Args:
        folder: the folder of W&B's files. The file ``wandb-run-id`` in it holds the id of the run, which the next
            writer with this folder resumes.
        run: what ``wandb.init`` returned, in place of ``folder``. The writer does not finish it.
        init: further arguments of ``wandb.init`` for a run of ``folder``, such as ``project``, ``mode`` and ``id``.

    Raises:
        ImportError: wandb is not installed.
        ValueError: not exactly one of ``folder`` and ``run`` is given, or ``run`` and further arguments.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, run: object = None, **init: object) -> None:
        if (folder is None) == (run is None) or (run is not None and init):
            raise ValueError("WandbWriter: give a folder and arguments of wandb.init, or only a run")
        self._wandb = import_optional("wandb", "wandb")
        self._folder, self._given_run, self._init = folder, run, init
        if is_checked():
            self._folder = None if folder is None else place(folder)
            self._init = init | {"mode": "disabled"}
        self._run: Any = None

    def start_run(self) -> Any:
        """Start or resume the run, unless that is done, and return it. Hooks call this in their ``begin``."""
        if self._run is None:
            self._run = self._given_run if self._folder is None else self._init_run(self._folder)
            # The step that W&B counts cannot go back, but hooks write values of a device a few runs later.
            self._run.define_metric("global_step")
            self._run.define_metric("*", step_metric="global_step")
        return self._run

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._log({tag: value}, step)

    def add_points(self, points: Iterable[tuple[str, float]], step: int, walltime: float | None = None) -> None:
        self._log(dict(points), step)

    def add_histogram(self, tag: str, values: object, step: int) -> None:
        """Write the distribution of the elements of a tensor or array."""
        summary.histogram(tag, tag).write(self, values, step)

    def add_histogram_raw(self, tag: str, *raw: Any) -> None:
        *_, limits, counts, step = raw
        joined = math.ceil((len(counts) - 1) / _MOST_BINS)
        # The first bin is empty: its upper limit is the lower limit of the second bin.
        counts, edges = np.add.reduceat(counts, range(1, len(counts), joined)), [*limits[:-1:joined], limits[-1]]
        self._log({tag: self._wandb.Histogram(np_histogram=(counts, edges))}, step)

    def add_image(self, tag: str, image: np.ndarray, step: int) -> None:
        self._log({tag: self._wandb.Image(image.transpose(1, 2, 0))}, step)

    def add_figure(self, tag: str, figure: object, step: int) -> None:
        """Write a matplotlib figure, as an image."""
        importlib.import_module("matplotlib.pyplot")  # wandb.Image expects it to be imported
        self._log({tag: self._wandb.Image(figure)}, step)

    def add_text(self, tag: str, text: str, step: int) -> None:
        self._log({tag: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step)

    def add_config(self, config: Mapping[str, object]) -> None:
        self.start_run().config.update(flat_config(config), allow_val_change=True)

    # No flush(): W&B's own process already has the values, and cannot be waited for before the run is finished.

    def close(self, exit_code: int = 0) -> None:
        """Finish the run, unless it was given. After an exception, a ``with`` block passes 1."""
        run, self._run = self._run, None
        if run is not None and self._folder is not None:
            run.finish(exit_code=exit_code)

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(exit_code=0 if kind is None else 1)

    def _init_run(self, folder: str | os.PathLike[str]) -> Any:
        id_file = Path(folder, "wandb-run-id")
        id_file.parent.mkdir(parents=True, exist_ok=True)
        run_id = id_file.read_text().strip() if id_file.exists() else ""
        # The arguments of the caller come last, so that they may name another run.
        run = self._wandb.init(**{"dir": os.fspath(folder), "id": run_id or None, "resume": "allow", **self._init})
        if run.id != run_id:  # otherwise the file stays as it is, because a kill could leave it empty
            id_file.write_text(run.id)
        return run

    def _log(self, values: Mapping[str, object], step: int) -> None:
        self.start_run().log({**values, "global_step": step})


class PrometheusWriter(SummaryWriter):
    """A ``summary_writer`` whose newest points Prometheus reads from a port of this process.

    >>> with PrometheusWriter(9400, run="mnist") as writer:
    ...     hook = SummarySaverHook(save_steps=4, summary_writer=writer, summary_op={"loss": "loss"})
    ...     with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...         for inputs in loop.until_stop(batches):
    ...             loss = loop.run(inputs)

    ``http://host:9400/metrics`` then has ``torchhooks_loss{run="mnist",rank="0"} 0.25``. Other characters of a tag than
    letters and digits become ``_``. ``torchhooks_step`` is the step of the newest point. ``torchhooks_time_seconds`` is
    the time when it was written; before the first point, the time when the port was opened.

    A thread of prometheus_client answers. Every rank can create the writer, because the port is opened when a loop
    opens the writer, or by the first point. Anyone who can reach the port can read the values.

    Args:
        port: the port to listen on; 0 chooses a free one, which :attr:`port` is then.
        run: the name of the training run, the label ``run``.
        rank: the label ``rank``.
        addr: the address to listen on; ``"127.0.0.1"`` answers only this machine.

    Raises:
        ImportError: prometheus_client is not installed.
        OSError: from the start of the loop, another process listens on the port.
    """

    def __init__(self, port: int, run: str = "", rank: int = 0, *, addr: str = "0.0.0.0") -> None:
        self._client = import_optional("prometheus_client", "prometheus")
        # Not the registry of the process, in which two writers could not have the same tag.
        self._registry = self._client.CollectorRegistry()
        self._labels = {"run": run, "rank": str(rank)}
        self._gauges: dict[str, Any] = {}
        self._step, self._time = self._new_gauge("step"), self._new_gauge("time_seconds")
        if is_checked():  # the port may be that of the real training run
            port, addr = 0, "127.0.0.1"
        self._addr = addr
        self._server: Any = None
        self.port: int = port
        """The port."""

    def start_run(self) -> None:
        """Open the port, unless it is open. Hooks call this in their ``begin``."""
        if self._server is None:
            # Before the port is open, so that no reader gets the time 0.
            self._time.set_to_current_time()
            self._server, _ = self._client.start_http_server(self.port, self._addr, self._registry)
            self.port = self._server.server_port

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Set the value of ``tag``.

        Raises:
            ValueError: another tag has the same name in Prometheus.
        """
        self.start_run()
        if tag not in self._gauges:
            self._gauges[tag] = self._new_gauge(tag)
        self._gauges[tag].set(value)
        self._step.set(step)
        self._time.set_to_current_time()

    def close(self) -> None:
        """Close the port. A later point opens it again."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def _new_gauge(self, tag: str) -> Any:
        name = "torchhooks_" + re.sub(r"\W", "_", tag, flags=re.ASCII)
        gauge = self._client.Gauge(name, f"the curve {tag}", list(self._labels), registry=self._registry)
        return gauge.labels(**self._labels)
