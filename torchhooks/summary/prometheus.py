"""A writer that answers Prometheus: the newest value of each curve, for dashboards and alerts over many training runs.

prometheus_client is imported when a writer is created: ``pip install torchhooks[prometheus]``.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable
from typing import Any, Self

from torchhooks.common.checks import whole_number
from torchhooks.summary import operations as summary
from torchhooks.summary.trackers import library

_PREFIX = "torchhooks_"


class PrometheusWriter:
    """A ``summary_writer`` whose newest points Prometheus reads from a port of this process.

    >>> with PrometheusWriter(9400, run="mnist") as writer:
    ...     hook = SummarySaverHook(save_steps=4, summary_writer=writer, summary_op={"loss": "loss"})
    ...     with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...         for inputs in loop.until_stop(batches):
    ...             loss = loop.run(inputs)

    ``http://host:9400/metrics`` then has ``torchhooks_loss{run="mnist",rank="0"} 0.25``, and ``torchhooks_step`` and
    ``torchhooks_time_seconds``, the step and the time of the newest point. Other characters of a tag than letters and
    digits become ``_``. Prometheus keeps the history; with a writer of event files or JSON lines next to this one, the
    training run has it too. A thread of prometheus_client answers, which the training thread does not wait for.

    The port is opened when a loop opens the writer, or by the first point. So with several ranks, every rank can create
    the writer, and only the rank that writes opens the port. Anyone who can reach the port can read the values.

    Args:
        port: the port to listen on; 0 chooses a free one, which :attr:`port` is then.
        run: the name of the training run, the label ``run``.
        rank: the label ``rank``.
        addr: the address to listen on; ``"127.0.0.1"`` answers only this machine.

    Raises:
        ImportError: prometheus_client is not installed.
        ValueError: ``port`` is not a number of a port.
        OSError: from the start of the loop, another process listens on the port.
    """

    takes_walltime = True  # so hooks pass the wall time of each point

    def __init__(self, port: int, run: str = "", rank: int = 0, *, addr: str = "0.0.0.0") -> None:
        self._client = library("prometheus_client", "prometheus")
        self.port = whole_number(port, "port", 0)
        """The port."""
        if self.port > 65535:
            raise ValueError(f"port={port}: must be a number of a port, at most 65535")
        self._addr = addr
        self._labels = {"run": run, "rank": str(rank)}
        self._registry = self._client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._tags: dict[str, str] = {}  # by the name of the gauge
        self._lock = threading.Lock()
        self._server: Any = None
        self._is_closed = False

    def start_run(self) -> None:
        """Open the port, unless it is open. Hooks call this in their ``begin``."""
        with self._lock:
            if self._is_closed:
                raise ValueError(f"{self!r} is closed: write before close(), or create another writer")
            if self._server is None:
                self._server, _ = self._client.start_http_server(self.port, self._addr, self._registry)
                self.port = self._server.server_port

    def add_scalar(self, tag: str, value: Any, step: int, walltime: float | None = None) -> None:
        """Set the value of ``tag``, at ``walltime``, in seconds since 1970; by default, now."""
        self.add_points([(tag, value)], step, walltime)

    def add_points(self, points: Iterable[tuple[str, Any]], step: int, walltime: float | None = None) -> None:
        """Set the values of several tags, as pairs (tag, value); see :meth:`add_scalar`.

        Raises:
            ValueError: two tags have the same name in Prometheus, or the writer is closed.
        """
        self.start_run()
        values = {tag: summary.scalar(tag, tag).number(value) for tag, value in points}
        moment = time.time() if walltime is None else walltime
        for tag, number in {**values, "step": step, "time_seconds": moment}.items():
            self._gauge(tag).set(number)

    def flush(self) -> None:
        """Do nothing: Prometheus reads the values when it wants to."""

    def close(self) -> None:
        """Close the port. Closing twice is harmless."""
        with self._lock:
            server, self._server, self._is_closed = self._server, None, True
        if server is not None:
            server.shutdown()
            server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PrometheusWriter({self.port}, run={self._labels['run']!r})"

    def _gauge(self, tag: str) -> Any:
        if tag not in self._gauges:
            name = _PREFIX + re.sub(r"\W", "_", tag, flags=re.ASCII)
            if name in self._tags:
                raise ValueError(
                    f"tag {tag!r}: {self._tags[name]!r} is {name} in Prometheus already: give the curve another name"
                )
            gauge = self._client.Gauge(name, f"the curve {tag}", list(self._labels), registry=self._registry)
            self._gauges[tag], self._tags[name] = gauge.labels(**self._labels), tag
        return self._gauges[tag]
