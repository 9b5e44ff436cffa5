"""Where curves, histograms and pictures go: writers, the summary ops that write to them, and event files.

A summary op is a fetch with a tag. The loop evaluates the fetch, :meth:`SummaryOp.compose` puts op and value together,
and once the value is on the host it is written:

    ops = summary_ops({"loss": "loss", "weights": histogram("fc1/weight", "fc1.weight")})
    composed = [op.compose(value) for op, value in zip(ops, values)]
    write_summaries(SummaryWriterCache.get("runs/1"), composed, step)

Writers are ``torch.utils.tensorboard.SummaryWriter``, or any object with ``add_scalar(tag, value, step)`` and
``flush()``, and ``add_histogram``, ``add_image``, ``add_text``, ``add_figure`` for the ops of these names. They are
called with three positional arguments; only torch's own methods get the wall time too. The values are the same whoever
writes: an ``int`` or ``float``; a flat float64 array; a ``uint8`` array of shape (C, H, W); a ``str``; a figure.

Tags are text, not blank, without control characters and lone surrogates; anything else is an error when the op is made.
Unlike TensorFlow, which puts in underscores, every other tag is read by TensorBoard as it was given: ``"loss %"``,
``"a b"``, ``"ä"``, ``"/a"``, ``"a//b"``. One exception: torch's ``add_text`` appends ``/text_summary``.
"""

from __future__ import annotations

import importlib
import inspect
import logging
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

from torchhooks.fetch import ComposedFetch

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter as TensorBoardWriter

_log = logging.getLogger(__name__)
_Path = str | os.PathLike[str]
_Array = np.ndarray[Any, Any]
_HISTOGRAM_END = 9e19  # torch's outermost bins end a little further out


class SummaryWriter(Protocol):
    """What people bring to have curves written: TensorBoard's writer, or one for a tracker of their own.

    One that also has ``purge_from(step)`` is told to take back the points of ``step`` and beyond when a training goes
    on from before them, or begins anew, with 0.
    """

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Take one point of the curve ``tag``."""
        ...

    def flush(self) -> object:
        """Put everything taken so far where it survives a crash."""
        ...


class SummaryWriterCache:
    """One TensorBoard writer a directory, shared by everybody who writes there (``tf.summary.FileWriterCache``)."""

    _lock = threading.RLock()  # clear() closes
    _open: ClassVar[dict[str, TensorBoardWriter]] = {}
    # Whoever holds on to a closed writer may write to it, and torch then opens a new file behind it: the next close of
    # the directory has to reach that one too.
    _handed_out: ClassVar[weakref.WeakKeyDictionary[TensorBoardWriter, str]] = weakref.WeakKeyDictionary()

    @classmethod
    def get(cls, logdir: _Path) -> TensorBoardWriter:
        """The writer of ``logdir``, made at first use; ``"a"``, ``"a/"`` and ``Path("a")`` are one directory."""
        key = _directory(logdir)
        with cls._lock:
            if key not in cls._open:
                cls._open[key] = writer = _new_writer(key)
                cls._handed_out[writer] = key
            return cls._open[key]

    @classmethod
    def close(cls, logdir: _Path) -> None:
        """Flush and close what was handed out for ``logdir`` and forget it; harmless if that is nothing."""
        key = _directory(logdir)
        with cls._lock, ExitStack() as closing:  # the stack goes through all of them, also when one raises
            for writer, directory in cls._handed_out.items():
                if directory == key:
                    closing.callback(writer.close)
            cls._open.pop(key, None)  # last: it may hold the only reference

    @classmethod
    def clear(cls) -> None:
        """Flush and close every writer and forget them all."""
        with cls._lock, ExitStack() as closing:
            for directory in set(cls._handed_out.values()):
                closing.callback(cls.close, directory)


class Summary(NamedTuple):
    """A summary op and the value of its fetch in one run; a tensor may still be on its device."""

    op: SummaryOp
    value: Any


class SummaryOp(ComposedFetch):
    """A fetch whose value is written under a tag; the subclass ``x`` does so by the ``add_x`` of a writer."""

    def __init__(self, tag: str, fetch: Any) -> None:
        self.kind = type(self).__name__
        self.method = f"add_{self.kind}"
        self.tag = _checked_tag(tag, self.kind)
        if fetch is None or isinstance(fetch, (ComposedFetch, Mapping, list, tuple, set)):
            raise TypeError(f"{self.kind}({tag!r}, {fetch!r}): give one fetch; for several values make several ops")
        self._fetch = fetch

    @property
    def fetch(self) -> Any:
        """What has to be evaluated."""
        return self._fetch

    def compose(self, value: Any) -> Summary:
        """``value`` with this op. Checks all that can be known of the value without waiting for its device."""
        self._check(value)
        return Summary(self, value)

    def write(self, writer: Any, value: Any, step: int, walltime: float | None = None) -> None:
        """Write ``value``, which is on the host, as that of ``step`` and of ``walltime``, in seconds since the epoch.

        A value that cannot be written, or not by this writer, is a TypeError or a ValueError.
        """
        self._check(value)
        extra = {"walltime": walltime} if walltime is not None and _takes_walltime(writer, self.method) else {}
        _method_of(writer, self.method, self)(self.tag, self._host_value(value), step, **extra)

    def _check(self, value: Any) -> None:
        """Raise if ``value`` cannot be written, as far as can be told without reading the numbers of a tensor."""

    def _host_value(self, value: Any) -> Any:
        return value

    def _check_array(self, value: Any, wanted: str) -> None:
        if not isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
            raise TypeError(self._message(_described(value), wanted))
        if not _dtype(value).startswith(("float", "bfloat", "int", "uint", "bool")):
            raise TypeError(self._message(f"a value of dtype {_dtype(value)}", wanted))

    def _message(self, got: str, wanted: str) -> str:
        return f"{self.kind} {self.tag!r}: got {got}; {wanted}"

    def __repr__(self) -> str:
        return f"{self.kind}({self.tag!r}, {self._fetch!r})"


class scalar(SummaryOp):  # noqa: N801 - used as a function is, like functools.partial
    """A point of a curve: a real number, or a tensor or array with exactly one element, of any shape.

    NaN and the infinities are written. Event files hold float32, so that TensorBoard shows integers beyond 2**24
    rounded, and what is beyond 3.4e38 as infinite; other writers get the number as it is.
    """

    def _check(self, value: Any) -> None:
        if type(value) is torch.Tensor and value.numel() == 1 and value.is_floating_point():
            return  # nearly all are
        if type(value) is float:
            return
        if isinstance(value, numbers.Real) and not isinstance(value, np.generic):
            return
        way_out = "did a closure return nothing, or zero_grad() take a gradient?" if value is None else "convert it"
        self._check_array(value, f"a scalar is one real number: {way_out}")
        shape = tuple(value.shape)
        if math.prod(shape) != 1:
            wanted = "a scalar is one number: reduce it in a closure, as by .mean() or .norm(), or use histogram()"
            raise ValueError(self._message(f"shape {shape}, {math.prod(shape)} elements", wanted))

    def number(self, value: Any) -> float:
        """``value``, which is on the host, as the number that is written; errors as those of :meth:`write`."""
        self._check(value)
        return self._host_value(value)

    def _host_value(self, value: Any) -> float:
        number = _number(value)
        try:
            as_float = float(number)
        except OverflowError:
            wanted = "a scalar has to fit a float: write its logarithm"
            raise ValueError(self._message("a number beyond 1.8e308", wanted)) from None
        return int(number) if isinstance(number, int) else as_float


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        try:
            # Unlike item(), this does not let go of the interpreter, which a writer's thread is waiting for.
            return value.numpy().item()
        except (TypeError, RuntimeError):  # a precision that numpy lacks, or sparse
            return value.item()
    return value.item() if isinstance(value, (np.ndarray, np.generic)) else value


class histogram(SummaryOp):  # noqa: N801
    """How the elements of a tensor or array of any shape are distributed.

    What has no place in TensorBoard's bins (NaN, the infinities, numbers beyond 9e19) is left out, and a logged warning
    says how much it was; torch would make the sum NaN, or stop the run. If that is all there is, nothing is written.
    """

    def _check(self, value: Any) -> None:
        self._check_array(value, "a histogram is made of a tensor or array of real numbers")
        if 0 in value.shape:
            raise ValueError(self._message(f"shape {tuple(value.shape)}", "a histogram needs at least one element"))

    def write(self, writer: Any, value: Any, step: int, walltime: float | None = None) -> None:
        self._check(value)
        values = _array(value).astype(np.float64).reshape(-1)
        kept = values[np.abs(values) < _HISTOGRAM_END]
        if kept.size < values.size:
            line = "histogram %r, step %s: left out %d of %d values, which are NaN, infinite or beyond 9e19"
            _log.warning(line, self.tag, step, values.size - kept.size, values.size)
        if kept.size:
            super().write(writer, kept, step, walltime)


class image(SummaryOp):  # noqa: N801
    """A picture of 1, 3 or 4 channels, or a batch of them in one picture with up to eight in a row.

    Pixels are ``uint8``, ``bool``, or floats in 0..1; floats outside are clipped, NaN is black. ``dataformats`` is HW,
    CHW or NCHW in any order, one letter a dimension; without it, the one of these that has as many letters.
    """

    def __init__(self, tag: str, fetch: Any, dataformats: str | None = None) -> None:
        super().__init__(tag, fetch)
        self.dataformats = dataformats
        if dataformats is not None and "".join(sorted(dataformats)) not in ("HW", "CHW", "CHNW"):
            raise ValueError(f"{self!r}: dataformats has the letters of HW, CHW or NCHW, one for each dimension")

    def _check(self, value: Any) -> None:
        self._check_array(value, "an image is a tensor or array of pixels")
        if not _dtype(value).startswith(("uint8", "bool", "float", "bfloat")):
            raise TypeError(self._message(f"{_dtype(value)} pixels", "give uint8, bool, or floats in 0..1"))
        layout, shape = self._layout(value), tuple(value.shape)
        channels = dict(zip(layout, shape, strict=False)).get("C", 1)
        if len(layout) != len(shape) or 0 in shape or channels not in (1, 3, 4):
            wanted = "there are 1, 3 or 4 channels and no empty dimension; if the order is another, give dataformats"
            raise ValueError(self._message(f"shape {shape} for {layout or 'HW, CHW or NCHW'}", wanted))

    def _layout(self, value: Any) -> str:
        return self.dataformats or {2: "HW", 3: "CHW", 4: "NCHW"}.get(value.ndim, "")

    def _host_value(self, value: Any) -> _Array:
        pixels, layout = _array(value), self._layout(value)
        if pixels.dtype != np.uint8:
            # Rounded, not cut off as torch does it: bytes that were divided by 255 come back as they were.
            pixels = np.rint(np.nan_to_num(pixels.astype(np.float32)).clip(0, 1) * 255).astype(np.uint8)
        pixels = pixels.transpose([layout.index(letter) for letter in "NCHW" if letter in layout])
        return _grid(pixels.reshape((1,) * (4 - pixels.ndim) + pixels.shape))

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + (f", dataformats={self.dataformats!r})" if self.dataformats else ")")


class text(SummaryOp):  # noqa: N801
    """A ``str``, which TensorBoard reads as Markdown."""

    def _check(self, value: Any) -> None:
        if not isinstance(value, str):
            raise TypeError(self._message(_described(value), "a text is a str: format the value in a closure"))


class figure(SummaryOp):  # noqa: N801
    """A matplotlib figure, closed once it is written: the fetch is to draw a new one each time."""

    def _check(self, value: Any) -> None:
        if not isinstance(value, getattr(sys.modules.get("matplotlib.figure"), "Figure", ())):
            raise TypeError(self._message(_described(value), "give a matplotlib Figure, or pixels to image()"))

    def write(self, writer: Any, value: Any, step: int, walltime: float | None = None) -> None:
        try:
            super().write(writer, value, step, walltime)
        finally:
            # pyplot keeps every figure that it made until it is told; without pyplot nobody keeps one.
            if pyplot := sys.modules.get("matplotlib.pyplot"):
                pyplot.close(value)


def summary_ops(summary_op: Any) -> tuple[SummaryOp, ...]:
    """The summary ops in what people give as ``summary_op``, in its order.

    That is a mapping from tag to fetch, for scalars, in which a summary op is taken as it is, with its own tag; one
    summary op; a bare fetch that has a name (``"loss"``, a function), which is its tag; or a list or tuple of these.

    Two ops with one tag are a ValueError, whatever their kinds: TensorBoard knows one kind a tag and mixes up the rest.
    """
    taken: dict[str, SummaryOp] = {}
    for op in _flattened(summary_op):
        if op.tag in taken:
            raise ValueError(f"{taken[op.tag]!r} and {op!r} both write {op.tag!r}: give one of them another tag")
        taken[op.tag] = op
    return tuple(taken.values())


def write_summaries(writer: Any, composed: Any, step: int, walltime: float | None = None) -> None:
    """Write each :class:`Summary` in ``composed``: one, or lists, tuples and mappings of them, on the host by now.

    A writer with ``add_points`` gets all scalars in one call, which makes one event of them.
    """
    summaries = _each(composed)
    scalars = [(one.op, one.value) for one in summaries if isinstance(one.op, scalar)]
    if len(scalars) > 1 and hasattr(writer, "add_points"):
        writer.add_points([(op.tag, op.number(value)) for op, value in scalars], step, walltime)
        summaries = [one for one in summaries if not isinstance(one.op, scalar)]
    for op, value in summaries:
        op.write(writer, value, step, walltime)


def _each(composed: Any) -> list[Summary]:
    if type(composed) is Summary:
        return [composed]
    flat: list[Summary] = []
    parts = composed.values() if not isinstance(composed, (list, tuple)) and isinstance(composed, Mapping) else composed
    for part in parts:
        flat += [part] if type(part) is Summary else _each(part)
    return flat


def check_writer(writer: Any, ops: Iterable[SummaryOp] = ()) -> None:
    """Raise a TypeError now, rather than in the middle of the training, if ``writer`` cannot write all of ``ops``."""
    for name in ("add_scalar", "flush"):
        _method_of(writer, name, "every hook that writes")
    for op in ops:
        _method_of(writer, op.method, op)


def add_session_log(writer: Any, status: str, step: int, checkpoint_path: _Path | None = None) -> None:
    """Tell TensorBoard that a session started (``"START"``) or saved a checkpoint (``"CHECKPOINT"``) at ``step``.

    On a START TensorBoard forgets what it has read so far for ``step`` and beyond: write it before the summaries of
    that step. A writer gets the log by ``add_session_log(session_log, step)`` if it has that, as TensorFlow's do, or
    by being torch's; for others nothing happens.
    """
    if status not in ("START", "CHECKPOINT"):
        raise ValueError(f"status={status!r}: a session log says 'START' or 'CHECKPOINT'")
    takes_logs = callable(getattr(writer, "add_session_log", None))
    if not takes_logs and not _takes_walltime(writer, "_get_file_writer"):
        return
    events = _tensorboard("tensorboard.compat.proto.event_pb2")
    log = events.SessionLog(status=status, checkpoint_path=checkpoint_path and os.fspath(checkpoint_path))
    if takes_logs:
        writer.add_session_log(log, step)
    else:
        writer._get_file_writer().add_event(events.Event(session_log=log), step)


def _flattened(summary_op: Any) -> Iterator[SummaryOp]:
    if isinstance(summary_op, SummaryOp):
        yield summary_op
    elif isinstance(summary_op, Mapping):
        yield from (op if isinstance(op, SummaryOp) else scalar(tag, op) for tag, op in summary_op.items())
    elif isinstance(summary_op, (list, tuple)):
        for part in summary_op:
            yield from _flattened(part)
    else:
        yield scalar(_name_of(summary_op), summary_op)


def _name_of(fetch: Any) -> str:
    name = fetch if isinstance(fetch, str) else getattr(fetch, "__name__", None) if inspect.isroutine(fetch) else None
    if name is None or name == "<lambda>":
        got = "a lambda" if name else _described(fetch)
        raise TypeError(f"summary_op: {got} has no name to be the tag; give {{tag: fetch}} or histogram(tag, fetch)")
    return str(name)


def _checked_tag(tag: str, kind: str) -> str:
    if not isinstance(tag, str):
        raise TypeError(f"{kind}({tag!r}, ...): a tag is a str, such as 'loss' or 'train/loss'")
    if not tag.strip() or any(unicodedata.category(character) in ("Cc", "Cs") for character in tag):
        raise ValueError(f"{kind}({tag!r}, ...): a tag is not blank and has no control characters or lone surrogates")
    return tag


def _described(value: Any) -> str:
    small = value is None or isinstance(value, (int, float, complex, str))
    return repr(value) if small else f"a {type(value).__name__}"


def _dtype(value: Any) -> str:
    """The dtype of a tensor or array, by the name that torch and numpy share."""
    return getattr(value.dtype, "name", None) or str(value.dtype).removeprefix("torch.")


def _array(value: Any) -> _Array:
    """A host value as an array; the precisions and layouts that numpy lacks become float32 and dense."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    known = not value.is_floating_point() or value.dtype in (torch.float16, torch.float32, torch.float64)
    return np.asarray((value if known else value.float()).detach().to_dense().numpy())


def _grid(batch: _Array) -> _Array:
    """(N, C, H, W) as one (C, rows x H, columns x W), black where no image is left."""
    count, channels, height, width = batch.shape
    columns = min(count, 8)
    padded = np.pad(batch, ((0, -count % columns), (0, 0), (0, 0), (0, 0)))
    cells = padded.reshape(-1, columns, channels, height, width).transpose(2, 0, 3, 1, 4)
    return cells.reshape(channels, -1, columns * width)


def _method_of(writer: Any, name: str, wanted_by: object) -> Callable[..., Any]:
    method: Callable[..., Any] | None = getattr(writer, name, None)
    if not callable(method):
        needs = f"summary writer {type(writer).__name__} has no {name}(), which {wanted_by} needs"
        raise TypeError(f"{needs}; add one, called as TensorBoard's is, or give torch.utils.tensorboard.SummaryWriter")
    return method


def _takes_walltime(writer: Any, method: str) -> bool:
    """Whether ``method`` is the one that torch wrote, or as good: a subclass may have one that takes less."""
    if getattr(type(writer), "takes_walltime", False):
        return True
    torchs = getattr(sys.modules.get("torch.utils.tensorboard.writer"), "SummaryWriter", None)  # if anybody has one
    return torchs is not None and getattr(type(writer), method, None) is getattr(torchs, method)


def _directory(logdir: _Path) -> str:
    path = os.fspath(logdir)
    return path.rstrip("/") if "://" in path else os.path.abspath(path)


def _new_writer(folder: str) -> TensorBoardWriter:
    if "://" in folder:  # a store that only TensorBoard knows how to write to
        return _tensorboard("torch.utils.tensorboard").SummaryWriter(folder)  # type: ignore[no-any-return]
    return _tensorboard("torchhooks.events").DirectSummaryWriter(folder)  # type: ignore[no-any-return]


def _tensorboard(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        way_out = "pip install tensorboard, or give a summary_writer of your own"
        raise ImportError(f"event files are written by TensorBoard, which cannot be imported: {way_out}") from error
