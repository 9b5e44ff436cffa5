"""Writers for experiment trackers: Weights & Biases, and MLflow. Give them to hooks as ``summary_writer``.

    with WandbWriter("runs/1", project="mnist") as tracker:
        hooks = [SummarySaverHook(100, summary_writer=[tracker, JsonLinesWriter("runs/1/curves.jsonl")], ...)]

Both libraries send the points in the background by themselves. The points that a hook writes for one step are one call.
The run of the tracker is started when a loop opens the writer, or by the first point. So with several ranks, every rank
can create the writer, and only the rank that writes starts a run.

The libraries are imported when a writer is created: ``pip install torchhooks[wandb]`` or ``torchhooks[mlflow]``.
"""

from __future__ import annotations

import importlib
import math
import os
import posixpath
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from torchhooks.common.attempts import Attempts
from torchhooks.common.errors import add_note
from torchhooks.common.log import logger
from torchhooks.common.text import flat_config, shown
from torchhooks.summary import operations as summary

_Pixels = np.ndarray[Any, Any]

_WANDB_BINS = 512  # W&B refuses a histogram with more
_MLFLOW_METRICS, _MLFLOW_PARAMS, _MLFLOW_LENGTH = 1000, 100, 6000  # MLflow refuses more in a call or in a value
_MLFLOW_CALLS = 1000  # in flight; with more, the next one waits, so that MLflow's queue does not grow without limit


class _TrackerWriter:
    """Starts the run of the tracker once, and prepares the values."""

    takes_walltime = True  # so hooks pass the wall time of each point

    def __init__(self, **places: Any) -> None:
        given = [f"{name}={shown(value)}" for name, value in places.items() if value is not None]
        self._shown = f"{type(self).__name__}({', '.join(given)})"
        if len(given) != 1:
            raise ValueError(f"{self!r}: give exactly one of {' and '.join(places)}")
        self._lock = threading.RLock()
        self._is_open = self._is_closed = False

    def start_run(self) -> None:
        """Start the run of the tracker, or continue it, unless that is done. Hooks call this in their ``begin``."""
        with self._lock:
            if self._is_closed:
                raise ValueError(f"{self!r} is closed: write before close(), or create another writer")
            if not self._is_open:
                self._start()
                self._is_open = True

    def add_scalar(self, tag: str, value: Any, step: int, walltime: float | None = None) -> None:
        """Write one point of the curve ``tag``, at ``walltime``, in seconds since 1970; by default, now."""
        self.add_points([(tag, value)], step, walltime)

    def add_points(self, points: Iterable[tuple[str, Any]], step: int, walltime: float | None = None) -> None:
        """Write a point of each of several curves, as pairs (tag, value), in one call; see :meth:`add_scalar`."""
        self._log_numbers({tag: summary.scalar(tag, tag).number(value) for tag, value in points}, step, walltime)

    def add_image(self, tag: str, image: Any, step: int, walltime: float | None = None) -> None:
        """Write an image: ``uint8``, of shape (channels, height, width)."""
        pixels = np.array(image).transpose(1, 2, 0)
        self._log_pixels(tag, pixels[..., 0] if pixels.shape[2] == 1 else pixels, step, walltime)

    def add_figure(self, tag: str, figure: Any, step: int, walltime: float | None = None) -> None:
        """Write a matplotlib figure, as an image."""
        canvas = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
        canvas.draw()
        self._log_pixels(tag, np.array(canvas.buffer_rgba()), step, walltime)

    def flush(self) -> None:
        """Wait until the library has all points, if it can tell."""

    def close(self) -> None:
        """Finish the run of the tracker, once it has all points.

        The end of a ``with`` block does this too, and after an exception marks that run as failed. Closing twice is
        harmless.
        """
        self._close(failed=False)

    def __repr__(self) -> str:
        return self._shown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            self._close(failed=True)
        except Exception:  # must not replace the error that the body of the with block raised
            logger.exception("%r could not send all of its points", self)

    def _start(self) -> None:
        """Start or continue the run of the tracker. Called once."""

    def _log_numbers(self, numbers: dict[str, float], step: int, walltime: float | None) -> None:
        """Write the points of ``step``."""

    def _log_pixels(self, tag: str, pixels: _Pixels, step: int, walltime: float | None) -> None:
        """Write an image of shape (height, width) or (height, width, channels)."""

    def _finish(self, failed: bool) -> None:
        """Finish the run of the tracker."""

    def _close(self, *, failed: bool) -> None:
        was_open, self._is_open, self._is_closed = self._is_open, False, True
        if was_open:
            try:
                self.flush()
            finally:
                self._finish(failed)


class WandbWriter(_TrackerWriter):
    """A ``summary_writer`` for Weights & Biases.

    >>> with WandbWriter("runs/1", project="mnist", mode="disabled") as writer:  # or "online", "offline"
    ...     hook = SummarySaverHook(save_steps=4, summary_writer=writer, summary_op={"loss": "loss"})
    ...     with MonitoredLoop(step, model, optimizer, hooks=[hook], metadata={"lr": 0.1}) as loop:
    ...         for inputs in loop.until_stop(batches):
    ...             loss = loop.run(inputs)

    W&B sends the points from a process of its own. The x-axis of every curve is ``global_step``, which each call has,
    so points may also arrive late. The ``metadata`` of the loop becomes the config of the run. Points of steps that are
    repeated after a restore are written twice.

    Args:
        folder: the folder of the run. The file ``wandb-run-id`` in it has the id of the run, which is resumed if there
            is one. W&B's own files are also in this folder.
        run: what ``wandb.init`` returned, in place of ``folder``. Closing the writer does not finish it.
        init: further arguments of ``wandb.init``, such as ``project`` and ``mode``.

    Raises:
        ImportError: wandb is not installed.
        ValueError: not exactly one of ``folder`` and ``run`` is given, or ``run`` and further arguments.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, run: Any = None, **init: Any) -> None:
        super().__init__(folder=folder, run=run)
        if run is not None and init:
            raise ValueError(f"WandbWriter(run=..., {', '.join(init)}=...): these are arguments for a new run only")
        self._wandb = library("wandb")
        self._owns_run = run is None
        self._run, self._folder, self._init = run, folder, init

    def _start(self) -> None:
        if self._folder is not None:
            run_id = _kept_id(self._folder, "wandb-run-id") or self._init.pop("id", None) or uuid.uuid4().hex[:12]
            _keep_id(self._folder, "wandb-run-id", run_id)
            given = {"dir": os.fspath(self._folder), "resume": "allow", **self._init, "id": run_id}
            self._run = self._wandb.init(**given)
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def add_histogram(self, tag: str, values: Any, step: int, walltime: float | None = None) -> None:
        """Write the distribution of the elements of a tensor or array."""
        summary.histogram(tag, tag).write(self, values, step, walltime)

    def add_histogram_raw(self, tag: str, *raw: Any, walltime: float | None = None) -> None:
        """Write a distribution; ``raw`` are the further arguments of torch's ``SummaryWriter.add_histogram_raw``."""
        *_, bucket_limits, bucket_counts, step = raw
        # The first limit is the lower one of the first bin, as if an empty bin were before it.
        together = math.ceil((len(bucket_limits) - 1) / _WANDB_BINS)
        counts = np.add.reduceat(bucket_counts[1:], range(0, len(bucket_counts) - 1, together))
        limits = np.array([*bucket_limits[:-1:together], bucket_limits[-1]])
        self._log({tag: self._wandb.Histogram(np_histogram=(counts, limits))}, step, walltime)

    def add_text(self, tag: str, text: str, step: int, walltime: float | None = None) -> None:
        """Write a text, a ``str``."""
        import html  # a twentieth of what it takes to import torchhooks

        self._log({tag: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step, walltime)

    def add_config(self, config: Mapping[str, Any]) -> None:
        """Write what describes the training run as a whole. Hooks pass the ``metadata`` of the loop."""
        self.start_run()
        self._run.config.update(flat_config(config), allow_val_change=True)

    def _log_numbers(self, numbers: dict[str, float], step: int, walltime: float | None) -> None:
        self._log(numbers, step, walltime)

    def _log_pixels(self, tag: str, pixels: _Pixels, step: int, walltime: float | None) -> None:
        self._log({tag: self._wandb.Image(pixels)}, step, walltime)

    def _log(self, values: Mapping[str, Any], step: int, walltime: float | None) -> None:
        self.start_run()
        self._run.log({**values, "global_step": step, "_timestamp": time.time() if walltime is None else walltime})

    def _finish(self, failed: bool) -> None:
        if self._owns_run:
            self._run.finish(exit_code=1 if failed else 0)


class MlflowWriter(_TrackerWriter):
    """A ``summary_writer`` for MLflow.

    >>> writer = MlflowWriter("runs/1", tracking_uri="sqlite:///mlflow.db", experiment="mnist")  # doctest: +SKIP
    >>> with writer:  # doctest: +SKIP
    ...     hook = SummarySaverHook(save_steps=4, summary_writer=writer, summary_op={"loss": "loss"})
    ...     with MonitoredLoop(step, model, optimizer, hooks=[hook], metadata={"lr": 0.1}) as loop:
    ...         for inputs in loop.until_stop(batches):
    ...             loss = loop.run(inputs)

    MLflow sends points and images from threads of its own. :meth:`flush`, which hooks call before each checkpoint and
    when the loop closes, waits for the points, and raises their errors. MLflow logs the errors of images. A text is
    sent at once.

    The ``metadata`` of the loop becomes the parameters of the run, which MLflow never changes: a warning names those
    that differ in a resumed training run. Points of steps that are repeated after a restore are written twice.

    MLflow has no histograms. Give such an op to a hook that has several writers, one of which has them. Characters that
    a name must not have in MLflow are replaced: ``"loss %"`` becomes ``"loss _"``. Texts are artifacts.

    Args:
        folder: the folder of the run. The file ``mlflow-run-id`` in it has the id of the run, which is resumed if there
            is one.
        run_id: an existing run, in place of ``folder``. Closing the writer does not end it.
        tracking_uri: where MLflow keeps its runs; by default what MLflow is configured to use.
        experiment: the name of the experiment of a new run, which is created if it does not exist.
        run_name: the name of a new run; by default MLflow invents one.

    Raises:
        ImportError: mlflow is not installed.
        ValueError: not exactly one of ``folder`` and ``run_id`` is given.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        experiment: str = "Default",
        run_name: str | None = None,
    ) -> None:
        super().__init__(folder=folder, run_id=run_id)
        mlflow = library("mlflow")
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient(tracking_uri)
        self._owns_run = run_id is None
        self._calls: deque[Any] = deque()  # in flight
        self._run_id, self._folder, self._experiment, self._run_name = run_id, folder, experiment, run_name

    def _start(self) -> None:
        if self._folder is None:
            return
        self._run_id = _kept_id(self._folder, "mlflow-run-id")
        if self._run_id is None:
            found = self._client.get_experiment_by_name(self._experiment)
            parent = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
            self._run_id = str(self._client.create_run(parent, run_name=self._run_name).info.run_id)
            _keep_id(self._folder, "mlflow-run-id", self._run_id)
        else:
            self._client.update_run(self._run_id, status="RUNNING")

    def add_text(self, tag: str, text: str, step: int, walltime: float | None = None) -> None:
        """Write a text, a ``str``."""
        self.start_run()
        self._client.log_text(self._run_id, text, f"{_mlflow_name(tag)}/{step}.txt")

    def add_config(self, config: Mapping[str, Any]) -> None:
        """Write what describes the training run as a whole. Hooks pass the ``metadata`` of the loop."""
        self.start_run()
        known = self._client.get_run(self._run_id).data.params
        wanted = {_mlflow_name(name): str(value)[:_MLFLOW_LENGTH] for name, value in flat_config(config).items()}
        for name in wanted.keys() & known.keys():
            if wanted[name] != known[name]:
                message = "%r: MLflow keeps the parameter %r at %s, because it allows no change to %s"
                logger.warning(message, self, name, shown(known[name]), shown(wanted[name]))
        params = [self._entities.Param(name, value) for name, value in wanted.items() if name not in known]
        for batch in _batches(params, _MLFLOW_PARAMS):
            self._client.log_batch(self._run_id, params=batch, synchronous=True)

    def flush(self) -> None:
        """Wait until MLflow has all points, and raise the first of the errors that it had."""
        attempt = Attempts(Exception)
        calls, self._calls = self._calls, deque()  # at once, because the loop of another thread may flush too
        for call in calls:
            attempt(call.wait)
        if attempt.errors:
            add_note(attempt.errors[0], f"torchhooks: {self!r} could not make {len(attempt.errors)} of its calls")
            raise attempt.errors[0]

    def _log_numbers(self, numbers: dict[str, float], step: int, walltime: float | None) -> None:
        self.start_run()
        millis = _millis(walltime)
        metrics = [self._entities.Metric(_mlflow_name(tag), value, millis, step) for tag, value in numbers.items()]
        for batch in _batches(metrics, _MLFLOW_METRICS):
            if len(self._calls) >= _MLFLOW_CALLS:
                self._calls.popleft().wait()
            self._calls.append(self._client.log_batch(self._run_id, metrics=batch, synchronous=False))

    def _log_pixels(self, tag: str, pixels: _Pixels, step: int, walltime: float | None) -> None:
        self.start_run()
        where = {"key": _mlflow_name(tag), "step": step, "timestamp": _millis(walltime)}
        self._client.log_image(self._run_id, pixels, **where, synchronous=False)

    def _finish(self, failed: bool) -> None:
        if self._owns_run:
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def library(name: str, extra: str | None = None) -> Any:
    """Return the library ``name``, which the extra of torchhooks of that name installs, or ``extra``."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} cannot be imported: pip install torchhooks[{extra or name}], or pip install {name}"
        ) from error


def _kept_id(folder: str | os.PathLike[str], name: str) -> str | None:
    """Return the id that an earlier process kept in ``folder``, if any."""
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return file.read().strip() or None
    except FileNotFoundError:
        return None


def _keep_id(folder: str | os.PathLike[str], name: str, run_id: str) -> None:
    """Write the id atomically: a part of it would be another id."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, name)
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        file.write(run_id + "\n")
    os.replace(f"{path}.tmp", path)


def _millis(walltime: float | None) -> int:
    return int(1000 * (time.time() if walltime is None else walltime))


def _mlflow_name(tag: str) -> str:
    """Return ``tag`` as MLflow accepts it: some characters are not allowed, nor is a path with empty parts."""
    name = posixpath.normpath(re.sub(r"[^/\w.\- ]", "_", tag)).lstrip("./")
    return name or "_"


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
