"""Writers for experiment trackers: Weights & Biases, and MLflow. Give them to hooks as ``summary_writer``.

    with WandbWriter("runs/1", project="mnist") as tracker:
        hooks = [SummarySaverHook(100, summary_writer=[tracker, JsonLinesWriter("runs/1/curves.jsonl")], ...)]

A background thread makes the calls of the library, so a slow tracker does not slow down the training run. The points of
one step are sent in one call: when a later step has its first point, or when the writer is flushed. Hooks flush it
before each checkpoint and when the loop closes.

The run of the tracker is started when a loop opens the writer, or by the first point. So with several ranks, every rank
can create the writer, and only the one that writes starts a run.

The run of the tracker belongs to a folder. Its id is kept there, so a process that resumes the training run continues
the same run of the tracker. Trackers cannot remove points: those of steps that are repeated after a restore are
written twice.

The libraries are imported when a writer is created: ``pip install torchhooks[wandb]`` or ``torchhooks[mlflow]``.
"""

from __future__ import annotations

import html
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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Self

import numpy as np

from torchhooks.common.errors import add_note
from torchhooks.common.log import logger
from torchhooks.common.text import flat_config, shown
from torchhooks.summary import operations as summary

FLUSH_SECS = 10.0
"""How many seconds ``flush()`` waits at most, so that a tracker that does not answer cannot stop a training run."""

_MAX_QUEUED = 1000  # calls; with more, the next one waits, so that the queue does not grow without limit
_MAX_STEPS = 8  # whose points wait for more of the same step; values from a device arrive a few runs late
_WANDB_BINS = 512  # W&B refuses a histogram with more
_MLFLOW_METRICS, _MLFLOW_PARAMS, _MLFLOW_LENGTH = 1000, 100, 6000  # MLflow refuses more in a call or in a value


class _Media(NamedTuple):
    """A value other than a number: ``kind`` is ``"histogram"``, ``"image"``, ``"text"`` or ``"figure"``."""

    kind: str
    value: Any


class _Points(NamedTuple):
    walltime: float
    values: dict[str, Any]


class _TrackerWriter:
    """Collects the points of each step and sends them from a background thread.

    An error there is raised by the next call of any method, at the latest by :meth:`close`.
    """

    takes_walltime = True  # so hooks pass the wall time of each point

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._collected: dict[int, _Points] = {}
        self._newest = -math.inf
        self._thread: ThreadPoolExecutor | None = None
        self._queued: deque[Future[None]] = deque()
        self._closed = False
        self._is_open = False

    def start_run(self) -> None:
        """Start the run of the tracker, or continue it, unless that is done. Hooks call this in their ``begin``."""
        with self._lock:
            if not self._is_open and not self._closed:
                self._start()
                self._is_open = True

    def add_scalar(self, tag: str, value: Any, step: int, walltime: float | None = None) -> None:
        """Write one point of the curve ``tag``, at ``walltime``, in seconds since 1970; by default, now."""
        self._add(tag, summary.scalar(tag, tag).number(value), step, walltime)

    def add_points(self, points: Iterable[tuple[str, Any]], step: int, walltime: float | None = None) -> None:
        """Write a point of each of several curves, as pairs (tag, value); see :meth:`add_scalar`."""
        for tag, value in points:
            self.add_scalar(tag, value, step, walltime)

    def add_image(self, tag: str, image: Any, step: int, walltime: float | None = None) -> None:
        """Write an image: ``uint8``, of shape (channels, height, width)."""
        pixels = np.array(image).transpose(1, 2, 0)
        self._add(tag, _Media("image", pixels[..., 0] if pixels.shape[2] == 1 else pixels), step, walltime)

    def add_text(self, tag: str, text: str, step: int, walltime: float | None = None) -> None:
        """Write a text, a ``str``."""
        self._add(tag, _Media("text", text), step, walltime)

    def add_figure(self, tag: str, figure: Any, step: int, walltime: float | None = None) -> None:
        """Write a matplotlib figure, which is drawn in the background: it must not be changed any more."""
        self._add(tag, _Media("figure", figure), step, walltime)

    def add_config(self, config: Mapping[str, Any]) -> None:
        """Write what describes the training run as a whole. Hooks pass the ``metadata`` of the loop."""
        with self._lock:
            self._submit(self._send_config, dict(config))

    def flush(self) -> None:
        """Send all points, and wait until the library has them, at most 10 seconds.

        If that takes longer, a warning is logged, and the points are sent later.
        """
        with self._lock:
            self._send_collected()
            queued = list(self._queued)
        if wait(queued, FLUSH_SECS).not_done:
            logger.warning("%r has not sent all of its points in %g seconds: it continues later", self, FLUSH_SECS)
        self._raise_errors()

    def close(self) -> None:
        """Send all points, wait for as long as that takes, and finish the run of the tracker.

        The end of a ``with`` block does this too, and after an exception marks that run as failed. Closing twice is
        harmless.
        """
        self._close(failed=False)

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
        """Start or continue the run of the tracker. Called once, in the thread of the first call."""

    def _send(self, step: int, points: _Points) -> None:
        """Write the points of ``step``. Called in the background, like all methods that follow."""

    def _send_config(self, config: dict[str, Any]) -> None:
        """Write ``config``."""

    def _finish(self, failed: bool) -> None:
        """Finish the run of the tracker."""

    def _add(self, tag: str, value: Any, step: int, walltime: float | None) -> None:
        self._raise_errors()
        with self._lock:
            if step > self._newest or (step not in self._collected and len(self._collected) >= _MAX_STEPS):
                self._send_collected()
                self._newest = step
            points = self._collected.setdefault(step, _Points(time.time() if walltime is None else walltime, {}))
            points.values[tag] = value

    def _send_collected(self) -> None:
        collected, self._collected = self._collected, {}
        for step in sorted(collected):
            self._submit(self._send, step, collected[step])

    def _submit(self, send: Any, *args: Any) -> None:
        if self._closed:
            raise ValueError(f"{self!r} is closed: write before close(), or create another writer")
        self.start_run()
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="torchhooks-tracker")
        if len(self._queued) >= _MAX_QUEUED:
            wait([self._queued[0]])
        try:
            self._queued.append(self._thread.submit(send, *args))
        except RuntimeError:  # no thread can be started, or the interpreter is exiting
            send(*args)

    def _raise_errors(self) -> None:
        """Forget the calls that are done, and raise the first error among them."""
        errors = []
        with self._lock:
            while self._queued and self._queued[0].done():
                error = self._queued.popleft().exception()
                if error is not None:
                    errors.append(error)
        if errors:
            add_note(errors[0], f"torchhooks: {self!r} could not make {len(errors)} of its calls")
            raise errors[0]

    def _close(self, *, failed: bool) -> None:
        if self._closed:
            return
        with self._lock:
            try:
                self._send_collected()
                if self._is_open:
                    self._submit(self._finish, failed)
            finally:
                self._closed = True
                if self._thread is not None:
                    self._thread.shutdown()  # waits for the calls
        self._raise_errors()


class WandbWriter(_TrackerWriter):
    """A ``summary_writer`` for Weights & Biases.

    >>> with WandbWriter("runs/1", project="mnist", mode="disabled") as writer:  # or "online", "offline"
    ...     hook = SummarySaverHook(save_steps=4, summary_writer=writer, summary_op={"loss": "loss"})
    ...     with MonitoredLoop(step, model, optimizer, hooks=[hook], metadata={"lr": 0.1}) as loop:
    ...         for inputs in loop.until_stop(batches):
    ...             loss = loop.run(inputs)

    A background thread makes the calls of the library. The points of one step are sent in one call: when a later step
    has its first point, or when the writer is flushed, as hooks do before each checkpoint and when the loop closes. An
    error of the thread is raised by the next call of any method, at the latest by :meth:`close`.

    The x-axis of every curve is ``global_step``, which each call has, so points may also arrive late. The ``metadata``
    of the loop becomes the config of the run. Points of steps that are repeated after a restore are written twice.

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
        super().__init__()
        self._place = _given_one("WandbWriter", folder=folder, run=run)
        if run is not None and init:
            raise ValueError(f"WandbWriter(run=..., {', '.join(init)}=...): these are arguments for a new run only")
        self._wandb = _library("wandb")
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

    def add_histogram_raw(
        self,
        tag: str,
        min: float,
        max: float,
        num: int,
        sum: float,
        sum_squares: float,
        bucket_limits: list[float],
        bucket_counts: list[int],
        step: int,
        walltime: float | None = None,
    ) -> None:
        """Write a distribution, given as torch's ``SummaryWriter.add_histogram_raw`` takes it."""
        # The first limit is the lower one of the first bin, as that of an empty bin before it.
        together = math.ceil((len(bucket_limits) - 1) / _WANDB_BINS)
        counts = np.add.reduceat(bucket_counts[1:], range(0, len(bucket_counts) - 1, together))
        limits = [*bucket_limits[:-1:together], bucket_limits[-1]]
        self._add(tag, _Media("histogram", (counts, np.array(limits))), step, walltime)

    def _send(self, step: int, points: _Points) -> None:
        values = {tag: self._logged(value) for tag, value in points.values.items()}
        self._run.log({**values, "global_step": step, "_timestamp": points.walltime})

    def _send_config(self, config: dict[str, Any]) -> None:
        self._run.config.update(flat_config(config), allow_val_change=True)

    def _finish(self, failed: bool) -> None:
        if self._owns_run:
            self._run.finish(exit_code=1 if failed else 0)

    def _logged(self, value: Any) -> Any:
        if not isinstance(value, _Media):
            return value
        if value.kind == "histogram":
            return self._wandb.Histogram(np_histogram=value.value)
        if value.kind == "text":
            return self._wandb.Html(f"<pre>{html.escape(value.value)}</pre>")
        return self._wandb.Image(_drawn(value.value) if value.kind == "figure" else value.value)

    def __repr__(self) -> str:
        return f"WandbWriter({self._place})"


class MlflowWriter(_TrackerWriter):
    """A ``summary_writer`` for MLflow.

    >>> writer = MlflowWriter("runs/1", tracking_uri="sqlite:///mlflow.db", experiment="mnist")  # doctest: +SKIP
    >>> with writer:  # doctest: +SKIP
    ...     hook = SummarySaverHook(save_steps=4, summary_writer=writer, summary_op={"loss": "loss"})
    ...     with MonitoredLoop(step, model, optimizer, hooks=[hook], metadata={"lr": 0.1}) as loop:
    ...         for inputs in loop.until_stop(batches):
    ...             loss = loop.run(inputs)

    It sends points and raises errors as :class:`torchhooks.WandbWriter` does. The ``metadata`` of the loop becomes the
    parameters of the run, which MLflow never changes: a warning names those that differ in a resumed training run.

    MLflow has no histograms. Give such an op to a hook that has several writers, one of which has them. Characters that
    a name must not have in MLflow are replaced: ``"loss %"`` becomes ``"loss _"``. Texts and figures are artifacts.

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
        super().__init__()
        self._place = _given_one("MlflowWriter", folder=folder, run_id=run_id)
        mlflow = _library("mlflow")
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient(tracking_uri)
        self._owns_run = run_id is None
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

    def _send(self, step: int, points: _Points) -> None:
        millis = int(points.walltime * 1000)
        numbers = {tag: value for tag, value in points.values.items() if not isinstance(value, _Media)}
        metrics = [self._entities.Metric(_mlflow_name(tag), value, millis, step) for tag, value in numbers.items()]
        for batch in _batches(metrics, _MLFLOW_METRICS):
            self._client.log_batch(self._run_id, metrics=batch, synchronous=True)
        for tag, value in points.values.items():
            if isinstance(value, _Media):
                self._send_media(_mlflow_name(tag), value, step, millis)

    def _send_media(self, name: str, media: _Media, step: int, millis: int) -> None:
        if media.kind == "image":
            where = {"key": name, "step": step, "timestamp": millis}
            self._client.log_image(self._run_id, media.value, **where, synchronous=True)
        elif media.kind == "text":
            self._client.log_text(self._run_id, media.value, f"{name}/{step}.txt")
        else:
            self._client.log_figure(self._run_id, media.value, f"{name}/{step}.png")

    def _send_config(self, config: dict[str, Any]) -> None:
        known = self._client.get_run(self._run_id).data.params
        wanted = {_mlflow_name(name): str(value)[:_MLFLOW_LENGTH] for name, value in flat_config(config).items()}
        for name in wanted.keys() & known.keys():
            if wanted[name] != known[name]:
                message = "%r: MLflow keeps the parameter %r at %s, because it allows no change to %s"
                logger.warning(message, self, name, shown(known[name]), shown(wanted[name]))
        params = [self._entities.Param(name, value) for name, value in wanted.items() if name not in known]
        for batch in _batches(params, _MLFLOW_PARAMS):
            self._client.log_batch(self._run_id, params=batch, synchronous=True)

    def _finish(self, failed: bool) -> None:
        if self._owns_run:
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")

    def __repr__(self) -> str:
        return f"MlflowWriter({self._place})"


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} cannot be imported: pip install torchhooks[{name}], or pip install {name}"
        ) from error


def _given_one(kind: str, **places: Any) -> str:
    """Return the only place that is given, as an argument in a repr."""
    given = [f"{name}={shown(value)}" for name, value in places.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"{kind}({', '.join(given)}): give exactly one of {' and '.join(places)}")
    return given[0]


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


def _drawn(figure: Any) -> Any:
    """Return a matplotlib figure as pixels. Unlike pyplot, this may be called from any thread."""
    canvas = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())


def _mlflow_name(tag: str) -> str:
    """Return ``tag`` as MLflow accepts it: some characters are not allowed, nor is a path with empty parts."""
    name = posixpath.normpath(re.sub(r"[^/\w.\- ]", "_", tag)).lstrip("./")
    return name or "_"


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
