"""Summary ops, which write fetched values under a tag, and the writers that they write to.

A summary op is a fetch with a tag. The loop evaluates the fetch, :meth:`SummaryOp.compose` combines the op with the
value, and :func:`write_summaries` writes the result once the value is on the host.

Writers are ``torch.utils.tensorboard.SummaryWriter``, or any other :class:`SummaryWriter`. Their methods are called
with three positional arguments; only torch's own also get the wall time.

A writer whose class also has ``add_histogram_raw``, with the arguments of torch's, gets the counts of the bins instead
of the array. They are computed where the tensor is, so the tensor is not copied. Functions that write or check
summaries also take a tuple of several writers. Each writes what it has methods for.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import numbers
import os
import sys
import threading
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch

from torchhooks.common.attempts import Attempts
from torchhooks.common.log import logger
from torchhooks.common.text import flat_config
from torchhooks.common.trees import GroupRates, snapshot
from torchhooks.fetches.fetch import ComposedFetch
from torchhooks.summary.arrays import dtype_name, grid, number_in
from torchhooks.summary.histograms import END, Counts, as_histogram, count_array, counts_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter as TensorBoardWriter

_Path = str | os.PathLike[str]
_Array = np.ndarray[Any, Any]


class SummaryWriter(Protocol):
    """A writer of curves: TensorBoard's, or one of your own. Pass it to hooks as ``summary_writer``.

    >>> class Printer:
    ...     def add_scalar(self, tag, value, step):
    ...         print(step, tag, value)
    ...     def flush(self):
    ...         pass
    >>> hook = SummarySaverHook(save_steps=4, summary_writer=Printer(), summary_op={"rate": "lr"})
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    1 rate 0.1
    5 rate 0.1

    It may also have ``add_histogram(tag, array, step)``, with a flat float64 array; ``add_image``, with ``uint8``
    pixels of shape (channels, height, width); ``add_text``, with a ``str``; and ``add_figure``. Hooks call
    ``purge_from(step)``, if it has it, when a training run is about to repeat ``step`` and later steps, so that it
    removes the points it has of them. ``step`` is 0 if the run begins at step 0.
    """

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Write one point of the curve ``tag``."""

    def flush(self) -> object:
        """Make everything written so far survive a crash of the process."""


class SummaryWriterCache:
    """One TensorBoard writer per directory, shared by all hooks that write there (``tf.summary.FileWriterCache``).

    >>> writer = SummaryWriterCache.get("runs/1")
    >>> writer.add_scalar("accuracy", 0.9, 100)
    >>> writer is SummaryWriterCache.get("runs/1/")
    True
    >>> SummaryWriterCache.close("runs/1")
    """

    _lock = threading.RLock()  # reentrant, because clear() calls close()
    _open: ClassVar[dict[str, TensorBoardWriter]] = {}
    # A closed writer that is still referenced can be written to, and torch then opens a new file for it. The next close
    # of the directory has to close that file as well.
    _handed_out: ClassVar[weakref.WeakKeyDictionary[TensorBoardWriter, str]] = weakref.WeakKeyDictionary()

    @classmethod
    def get(cls, logdir: _Path) -> TensorBoardWriter:
        """Return the writer of ``logdir``, created at first use.

        All names of a directory are the same: ``"a"``, ``"a/"``, ``Path("a")``, its absolute path, a symbolic link.
        """
        key = shared_name(logdir)
        with cls._lock:
            if key not in cls._open:
                cls._open[key] = writer = _new_writer(key)
                cls._handed_out[writer] = key
            return cls._open[key]

    @classmethod
    def close(cls, logdir: _Path) -> None:
        """Flush, close and forget the writers of ``logdir``. Does nothing if there is none."""
        key = shared_name(logdir)
        with cls._lock, ExitStack() as closing:  # the stack closes all of them, even if closing one fails
            for writer, directory in cls._handed_out.items():
                if directory == key:
                    closing.callback(writer.close)
            cls._open.pop(key, None)  # after the loop, because this may be the only reference to the writer

    @classmethod
    def clear(cls) -> None:
        """Flush, close and forget all writers."""
        with cls._lock, ExitStack() as closing:
            for directory in set(cls._handed_out.values()):
                closing.callback(cls.close, directory)


class Summary(NamedTuple):
    """A summary op with the value that its fetch had in one run. A tensor may still be on its device."""

    op: SummaryOp
    value: Any


class SummaryOp(ComposedFetch):
    """A fetch whose value is written under a tag. The subclass ``x`` calls the method ``add_x`` of a writer."""

    def __init__(self, tag: str, fetch: Any) -> None:
        self.kind = type(self).__name__
        self.method = f"add_{self.kind}"
        self.tag = _checked_tag(tag, self.kind)
        if fetch is None or isinstance(fetch, (SummaryOp, Mapping, list, tuple, set)):
            raise TypeError(f"{self.kind}({tag!r}, {fetch!r}): give one fetch; for several values, create several ops")
        self.fetch = fetch

    def compose(self, value: Any) -> Summary:
        """Return ``value`` with this op, after checking all that can be known without waiting for its device."""
        self._check(value)
        return Summary(self, value)

    def write(self, writer: Any, value: Any, step: int, walltime: float | None = None) -> None:
        """Write ``value``, which must be on the host, for ``step`` and ``walltime``, in seconds since 1970.

        Raises:
            TypeError, ValueError: ``value`` cannot be written, or ``writer`` lacks the method for it.
        """
        self._check(value)
        method = _method_of(writer, self.method, self)
        method(self.tag, self._host_value(value), step, **_walltime(writer, self.method, walltime))

    def _check(self, value: Any) -> None:
        """Raise an error if ``value`` cannot be written. Does not read the elements of a tensor."""

    def _host_value(self, value: Any) -> Any:
        return value

    def _check_array(self, value: Any, wanted: str) -> None:
        if not isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
            raise TypeError(self._message(_described(value), wanted))
        if not dtype_name(value).startswith(("float", "bfloat", "int", "uint", "bool")):
            raise TypeError(self._message(f"a value of dtype {dtype_name(value)}", wanted))

    def _message(self, got: str, wanted: str) -> str:
        return f"{self.kind} {self.tag!r}: got {got}; {wanted}"

    def __repr__(self) -> str:
        return f"{self.kind}({self.tag!r}, {self.fetch!r})"


class scalar(SummaryOp):  # noqa: N801 - called like a function, as functools.partial is
    """A point of a curve: a real number, or a tensor or array with exactly one element, of any shape.

    >>> from torchhooks.testing import RecordingWriter, trace
    >>> writer = RecordingWriter()
    >>> ops = [summary.scalar("train/loss", "loss"), summary.scalar("log2", lambda loss: loss.log2())]
    >>> seen = trace(SummarySaverHook(2, summary_writer=writer, summary_op=ops), losses=[8, 4, 2])
    >>> writer.scalars
    {'train/loss': [(1, 8.0), (3, 2.0)], 'log2': [(1, 3.0), (3, 1.0)]}

    NaN and infinities are written. Event files hold float32, so TensorBoard shows integers beyond 2**24 rounded and
    numbers beyond 3.4e38 as infinite. Other writers get the exact number.

    If the fetch is ``"lr"`` and the optimizer has several parameter groups, each group has a curve of its own: for the
    tag ``"lr"``, these are ``"lr/0"``, ``"lr/1"`` and so on. A group with a ``"name"`` has that in place of its index.

    Args:
        tag: the name of the curve, a string that is not blank and has no control characters. It is written as given,
            also ``"loss %"`` and ``"a//b"``.
        fetch: one fetch.

    Unlike TensorFlow, which replaces some characters of a tag with underscores, this writes all of them.
    """

    def compose(self, value: Any) -> Any:
        """Return ``value`` with this op; the rates of several parameter groups as a list, one op for each."""
        if type(value) is GroupRates:
            groups = zip(value.names, value, strict=True)
            return [scalar(f"{self.tag}/{name}", self.fetch).compose(rate) for name, rate in groups]
        self._check(value)
        return Summary(self, value)

    def _check(self, value: Any) -> None:
        if type(value) is torch.Tensor and value.numel() == 1 and value.is_floating_point():
            return  # fast path: most values are such tensors
        if type(value) is float:
            return
        if isinstance(value, numbers.Real) and not isinstance(value, np.generic):
            return
        way_out = "did a closure return nothing, or zero_grad() take a gradient?" if value is None else "convert it"
        self._check_array(value, f"a scalar is one real number: {way_out}")
        shape = tuple(value.shape)
        if math.prod(shape) != 1:
            wanted = "a scalar is one number: reduce it in a closure, with .mean() or .norm(), or use histogram()"
            raise ValueError(self._message(f"shape {shape}, {math.prod(shape)} elements", wanted))

    def number(self, value: Any) -> float:
        """Return ``value``, which must be on the host, as the number to write. Raises the errors of :meth:`write`."""
        self._check(value)
        return self._host_value(value)

    def _host_value(self, value: Any) -> float:
        number = number_in(value)
        try:
            as_float = float(number)
        except OverflowError:
            wanted = "a scalar has to fit into a float: write its logarithm"
            raise ValueError(self._message("a number beyond 1.8e308", wanted)) from None
        return int(number) if isinstance(number, int) else as_float


class histogram(SummaryOp):  # noqa: N801
    """The distribution of the elements of a tensor or array of any shape; the arguments are as for :class:`scalar`.

    >>> ops = {"loss": "loss", "weight": summary.histogram("weight", "weight")}
    >>> hook = SummarySaverHook(save_steps=100, output_dir="runs/1", summary_op=ops)

    Elements that have no bin in TensorBoard (NaN, infinities, numbers beyond 9e19) are left out, and a warning with
    their number is logged. If no element is left, nothing is written.
    """

    _about: Mapping[str, bool] = {}

    def counted(self, **about: bool) -> histogram:
        """Return an op whose value is the counts of the bins, as ``histograms.counts_of`` finds them."""
        counted = copy.copy(self)
        counted.copies, counted._about = False, about  # noqa: SLF001 - its own class
        return counted

    def compose(self, value: Any) -> Summary:
        self._check(value)
        if self.copies:
            return Summary(self, value)
        counts = counts_of(value, **self._about)
        return Summary(self, snapshot(value) if counts is None else counts)

    def _check(self, value: Any) -> None:
        self._check_array(value, "a histogram takes a tensor or array of real numbers")
        if 0 in value.shape:
            raise ValueError(self._message(f"shape {tuple(value.shape)}", "a histogram needs at least one element"))

    def write(self, writer: Any, value: Any, step: int, walltime: float | None = None) -> None:
        if type(value) is not Counts:
            self._check(value)
        if type(value) is Counts or _takes_counts(writer):
            self._write_counts(writer, _counts(value), step, walltime)
            return
        values = _array(value).astype(np.float64).reshape(-1)
        kept = values[np.abs(values) < END]
        self._warn_of(values.size - kept.size, values.size, step)
        if kept.size:
            super().write(writer, kept, step, walltime)

    def _write_counts(self, writer: Any, counts: Counts, step: int, walltime: float | None) -> None:
        raw, left_out = as_histogram(counts)
        self._warn_of(left_out, left_out + (0 if raw is None else raw.num), step)
        if raw is not None:
            method = _method_of(writer, "add_histogram_raw", self)
            method(self.tag, *raw, step, **_walltime(writer, "add_histogram_raw", walltime))

    def _warn_of(self, left_out: int, size: int, step: int) -> None:
        if left_out:
            message = "histogram %r, step %s: left out %d of %d values, which are NaN, infinite or beyond 9e19"
            logger.warning(message, self.tag, step, left_out, size)


class image(SummaryOp):  # noqa: N801
    """An image with 1, 3 or 4 channels, or a batch of images, written as one image with up to eight per row.

    Pixels are ``uint8``, ``bool``, or floats in 0..1; floats outside of this range are clipped, and NaN is black.
    ``dataformats`` has the letters of HW, CHW or NCHW in the order of the dimensions. By default it is the one of these
    three that has as many letters as the value has dimensions.

    >>> op = summary.image("inputs", lambda inputs: inputs.sigmoid(), dataformats="HW")
    >>> hook = SummarySaverHook(save_steps=100, output_dir="runs/1", summary_op=op)
    """

    def __init__(self, tag: str, fetch: Any, dataformats: str | None = None) -> None:
        super().__init__(tag, fetch)
        self.dataformats = dataformats
        if dataformats is not None and "".join(sorted(dataformats)) not in ("HW", "CHW", "CHNW"):
            raise ValueError(f"{self!r}: dataformats must have the letters of HW, CHW or NCHW, one per dimension")

    def _check(self, value: Any) -> None:
        self._check_array(value, "an image is a tensor or array of pixels")
        if not dtype_name(value).startswith(("uint8", "bool", "float", "bfloat")):
            raise TypeError(self._message(f"{dtype_name(value)} pixels", "give uint8, bool, or floats in 0..1"))
        layout, shape = self._layout(value), tuple(value.shape)
        channels = dict(zip(layout, shape, strict=False)).get("C", 1)
        if len(layout) != len(shape) or 0 in shape or channels not in (1, 3, 4):
            wanted = "an image has 1, 3 or 4 channels and no empty dimension; for another order, give dataformats"
            raise ValueError(self._message(f"shape {shape} for {layout or 'HW, CHW or NCHW'}", wanted))

    def _layout(self, value: Any) -> str:
        return self.dataformats or {2: "HW", 3: "CHW", 4: "NCHW"}.get(value.ndim, "")

    def _host_value(self, value: Any) -> _Array:
        pixels, layout = _array(value), self._layout(value)
        if pixels.dtype != np.uint8:
            # Rounded, not truncated as in torch, so that bytes that were divided by 255 come out unchanged.
            pixels = np.rint(np.nan_to_num(pixels.astype(np.float32)).clip(0, 1) * 255).astype(np.uint8)
        pixels = pixels.transpose([layout.index(letter) for letter in "NCHW" if letter in layout])
        return grid(pixels.reshape((1,) * (4 - pixels.ndim) + pixels.shape))

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + (f", dataformats={self.dataformats!r})" if self.dataformats else ")")


class text(SummaryOp):  # noqa: N801
    """A ``str``, which TensorBoard shows as Markdown. torch's writer appends ``/text_summary`` to the tag.

    >>> op = summary.text("report", lambda loss: f"The loss is **{loss:.3f}**.")
    >>> hook = SummarySaverHook(save_steps=100, output_dir="runs/1", summary_op=op)
    """

    def _check(self, value: Any) -> None:
        if not isinstance(value, str):
            raise TypeError(self._message(_described(value), "a text is a str: format the value in a closure"))


class figure(SummaryOp):  # noqa: N801
    """A matplotlib figure. It is closed after it is written, so the fetch has to draw a new one each time.

    >>> import matplotlib.figure
    >>> def weights(model):
    ...     chart = matplotlib.figure.Figure()
    ...     chart.subplots().bar(range(4), model.weight[0])
    ...     return chart
    >>> op = summary.figure("weights", weights)
    >>> hook = SummarySaverHook(save_steps=100, output_dir="runs/1", summary_op=op)
    """

    def _check(self, value: Any) -> None:
        if not isinstance(value, getattr(sys.modules.get("matplotlib.figure"), "Figure", ())):
            raise TypeError(self._message(_described(value), "give a matplotlib Figure, or pixels to image()"))

    def write(self, writer: Any, value: Any, step: int, walltime: float | None = None) -> None:
        try:
            super().write(writer, value, step, walltime)
        finally:
            # pyplot keeps a reference to every figure that it created until the figure is closed.
            if pyplot := sys.modules.get("matplotlib.pyplot"):
                pyplot.close(value)


def summary_ops(summary_op: Any) -> tuple[SummaryOp, ...]:
    """Return the summary ops that the argument ``summary_op`` of a hook stands for, in its order.

    It is a mapping from tag to fetch, for scalars, where a summary op in place of a fetch keeps its own tag; or one
    summary op; or a fetch that has a name (``"loss"``, a function), which becomes its tag; or a list or tuple of these.

    Raises:
        TypeError: a fetch without a name was given without a tag.
        ValueError: two ops have the same tag, even if of different kinds: TensorBoard has one kind of value per tag.
    """
    by_tag: dict[str, SummaryOp] = {}
    for op in _ops(summary_op):
        if op.tag in by_tag:
            raise ValueError(f"{by_tag[op.tag]!r} and {op!r} both write {op.tag!r}: give one of them another tag")
        by_tag[op.tag] = op
    return tuple(by_tag.values())


def write_summaries(writer: Any, composed: Any, step: int, walltime: float | None = None) -> None:
    """Write one :class:`Summary`, or all in nested lists, tuples and mappings. Their values must be on the host.

    If the writer has ``add_points``, several scalars are written in one call, as one event. Of several writers, each
    gets its summaries even if another one raises an error.
    """
    summaries = _summaries(composed)
    if type(writer) is not tuple:
        _write_to_one(writer, summaries, step, walltime)
        return
    attempt = Attempts(Exception)
    for one in writer:
        written = [each for each in summaries if callable(getattr(one, each.op.method, None))]
        attempt(_write_to_one, one, written, step, walltime)
    attempt.raise_errors("several writers raised an error")


def takes_counts(writer: Any) -> bool:
    """Return whether ``writer`` needs no elements of a histogram. Of several writers, none may need them."""
    return all(_takes_counts(one) for one in _writers(writer) if hasattr(one, "add_histogram"))


def counted(ops: tuple[SummaryOp, ...], **about: bool) -> tuple[SummaryOp, ...]:
    """Return what to evaluate for a writer that takes the counts of histograms; see :meth:`histogram.counted`."""
    return tuple(op.counted(**about) if isinstance(op, histogram) else op for op in ops)


def _write_to_one(writer: Any, summaries: list[Summary], step: int, walltime: float | None) -> None:
    scalars = [(one.op, one.value) for one in summaries if isinstance(one.op, scalar)]
    if len(scalars) > 1 and hasattr(writer, "add_points"):
        writer.add_points([(op.tag, op.number(value)) for op, value in scalars], step, walltime)
        summaries = [one for one in summaries if not isinstance(one.op, scalar)]
    for op, value in summaries:
        op.write(writer, value, step, walltime)


def _summaries(composed: Any) -> list[Summary]:
    if type(composed) is Summary:  # checked first, because a Summary is a tuple too
        return [composed]
    flat: list[Summary] = []
    # isinstance(..., Mapping) is slow, and most hooks give a tuple.
    parts = composed.values() if not isinstance(composed, (list, tuple)) and isinstance(composed, Mapping) else composed
    for part in parts:
        flat += [part] if type(part) is Summary else _summaries(part)
    return flat


def check_writer(writer: Any, ops: Iterable[SummaryOp] = ()) -> None:
    """Raise a TypeError if ``writer`` cannot write all of ``ops``. Of several writers, one has to be able to."""
    writers = _writers(writer)
    for one in writers:
        for name in ("add_scalar", "flush"):
            _method_of(one, name, "every hook that writes")
    for op in ops:
        if not any(callable(getattr(one, op.method, None)) for one in writers):
            _method_of(writers[0], op.method, op)


def add_session_log(writer: Any, status: str, step: int, checkpoint_path: _Path | None = None) -> None:
    """Write a TensorBoard ``SessionLog``: a session started (``"START"``) or was saved (``"CHECKPOINT"``) at ``step``.

    On a START, TensorBoard discards what it has read for ``step`` and later, so write it before the summaries of that
    step. The writer must be torch's, or have ``add_session_log(session_log, step)``, as TensorFlow's does; with any
    other writer this is a no-op.
    """
    if status not in ("START", "CHECKPOINT"):
        raise ValueError(f"status={status!r}: must be 'START' or 'CHECKPOINT'")
    takes_logs = callable(getattr(writer, "add_session_log", None))
    if not takes_logs and not _has_events(writer):
        return
    events = _tensorboard("tensorboard.compat.proto.event_pb2")
    log = events.SessionLog(status=status, checkpoint_path=checkpoint_path and os.fspath(checkpoint_path))
    if takes_logs:
        writer.add_session_log(log, step)
    else:
        # torch's SummaryWriter has no public method that writes an event and opens a new file after a close.
        writer._get_file_writer().add_event(events.Event(session_log=log), step)  # noqa: SLF001 - torch has no public way to add an event


def write_config(writer: Any, config: Mapping[str, Any]) -> None:
    """Write what describes a training run as a whole, the ``metadata`` of its loop.

    A writer with ``add_config(config)`` gets it as it is. torch's writer writes TensorBoard's hparams, into the same
    event file as the curves. With any other writer this is a no-op.
    """
    if callable(getattr(writer, "add_config", None)):
        writer.add_config(config)
    elif _has_events(writer):
        hparams = _tensorboard("torch.utils.tensorboard.summary").hparams
        # Without the first part, which has a list of metrics, TensorBoard's dashboard lists all curves. The last part
        # says that the training run is over. torch's add_hparams would write all of it into a folder of its own.
        _, started, _ = hparams(flat_config(config), {})
        writer._get_file_writer().add_summary(started)  # noqa: SLF001 - torch has no public way to add an event


def _ops(summary_op: Any) -> Iterator[SummaryOp]:
    if isinstance(summary_op, SummaryOp):
        yield summary_op
    elif isinstance(summary_op, Mapping):
        yield from (op if isinstance(op, SummaryOp) else scalar(tag, op) for tag, op in summary_op.items())
    elif isinstance(summary_op, (list, tuple)):
        for part in summary_op:
            yield from _ops(part)
    else:
        yield scalar(_name_of(summary_op), summary_op)


def _name_of(fetch: Any) -> str:
    if isinstance(fetch, str):
        return str(fetch)
    name = getattr(fetch, "__name__", None) if inspect.isroutine(fetch) else None
    if name is None or name == "<lambda>":
        got = "a lambda" if name else _described(fetch)
        raise TypeError(f"summary_op: {got} has no name to use as a tag; give {{tag: fetch}} or histogram(tag, fetch)")
    return str(name)


def _checked_tag(tag: str, kind: str) -> str:
    if not isinstance(tag, str):
        raise TypeError(f"{kind}({tag!r}, ...): a tag is a str, such as 'loss' or 'train/loss'")
    if not tag.strip() or any(unicodedata.category(character) in ("Cc", "Cs") for character in tag):
        raise ValueError(f"{kind}({tag!r}, ...): a tag must not be blank or have control characters or lone surrogates")
    return tag


def _described(value: Any) -> str:
    small = value is None or isinstance(value, (int, float, complex, str))
    return repr(value) if small else f"a {type(value).__name__}"


def _array(value: Any) -> _Array:
    """Return a host value as an array. Dtypes that numpy does not have become float32; sparse tensors become dense."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    known = not value.is_floating_point() or value.dtype in (torch.float16, torch.float32, torch.float64)
    return np.asarray((value if known else value.float()).detach().to_dense().numpy())


def _method_of(writer: Any, name: str, wanted_by: object) -> Callable[..., Any]:
    method: Callable[..., Any] | None = getattr(writer, name, None)
    if not callable(method):
        needs = f"summary writer {type(writer).__name__} has no {name}(), which {wanted_by} needs"
        raise TypeError(f"{needs}; add one with TensorBoard's signature, or give torch.utils.tensorboard.SummaryWriter")
    return method


def _writers(writer: Any) -> tuple[Any, ...]:
    return writer if type(writer) is tuple else (writer,)


def _takes_counts(writer: Any) -> bool:
    """Return whether ``writer`` takes the counts of a histogram."""
    for names in (getattr(writer, "__dict__", {}), *map(vars, type(writer).__mro__)):
        # A subclass of torch's writer may override add_histogram alone, and wants to be called then.
        if "add_histogram_raw" in names:
            return True
        if "add_histogram" in names:
            return False
    return False


def _counts(value: Any) -> Counts:
    """Return the counts of a host value."""
    counts = value if type(value) is Counts else counts_of(value)
    return count_array(_array(value)) if counts is None else counts


def _walltime(writer: Any, method: str, walltime: float | None) -> dict[str, float]:
    """Return the keyword arguments that ``method`` takes in addition to tag, value and step."""
    return {"walltime": walltime} if walltime is not None and _takes_walltime(writer, method) else {}


def _takes_walltime(writer: Any, method: str) -> bool:
    """Return whether ``method`` takes a wall time: it is torch's own, or the class of ``writer`` says so."""
    if getattr(type(writer), "takes_walltime", False):
        return True
    # Not imported here: if the module is not loaded, the writer cannot be torch's. A subclass of torch's writer may
    # override the method and take fewer arguments.
    torchs = getattr(sys.modules.get("torch.utils.tensorboard.writer"), "SummaryWriter", None)
    return torchs is not None and getattr(type(writer), method, None) is getattr(torchs, method)


def _has_events(writer: Any) -> bool:
    """Return whether ``writer`` is torch's, or one of ours that derives from it, so that it takes events."""
    return hasattr(writer, "_get_file_writer") and _takes_walltime(writer, "_get_file_writer")


def shared_name(logdir: _Path) -> str:
    """Return the one name that all names of the directory ``logdir`` stand for; ``gs://...`` stays as it is."""
    path = os.fsdecode(logdir)
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def _new_writer(folder: str) -> TensorBoardWriter:
    if "://" in folder:  # a remote store, such as gs://, which TensorBoard's own writer supports
        return _tensorboard("torch.utils.tensorboard").SummaryWriter(folder)  # type: ignore[no-any-return]
    return _tensorboard("torchhooks.summary.event_files").DirectSummaryWriter(folder)  # type: ignore[no-any-return]


def _tensorboard(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        way_out = "pip install tensorboard, or give a summary_writer of your own"
        raise ImportError(f"event files need tensorboard, which cannot be imported: {way_out}") from error
