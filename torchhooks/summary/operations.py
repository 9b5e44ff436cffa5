"""Summary ops, which write fetched values under a tag, and the writers that they write to.

A summary op is a fetch with a tag. The loop evaluates the fetch, :meth:`SummaryOp.compose` combines the op with the
value, and :func:`write_summaries` writes the result once the value is on the host.

This is the way of a value in a run in which it is due: a hook requests the op, ``Evaluator.composed`` evaluates its
fetch, ``compose`` returns a :class:`Summary`, the hook hands it to ``when_ready``, and then to :func:`write_summaries`.
That calls ``add_points`` of each writer with all scalars, and ``write`` of an op of another kind.
"""

from __future__ import annotations

import copy
import inspect
import math
import numbers
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchhooks.common.errors import Attempts
from torchhooks.common.log import logger
from torchhooks.common.memory import array_of, ordinary
from torchhooks.common.trees import GroupRates, Tree, snapshot
from torchhooks.fetches.evaluation import ComposedFetch
from torchhooks.fetches.names import Value
from torchhooks.ranks.ranks import is_sharded
from torchhooks.summary.histograms import END, Counts, as_histogram, can_count, count, count_array
from torchhooks.summary.writers import SummaryWriter

_Array = np.ndarray


class Summary(NamedTuple):
    """A summary op with the value that its fetch had in one run. A tensor may still be on its device."""

    op: SummaryOp
    value: Value


class SummaryOp(ComposedFetch):
    """A fetch whose value is written under a tag. The subclass ``x`` calls the method ``add_x`` of a writer."""

    def __init__(self, tag: str, fetch: object) -> None:
        self.kind = type(self).__name__
        self.tag = _checked_tag(tag, self.kind)
        if fetch is None or isinstance(fetch, (SummaryOp, Mapping, list, tuple, set)):
            raise TypeError(f"{self.kind}({tag!r}, {fetch!r}): give one fetch; for several values, create several ops")
        self.fetch = fetch

    def compose(self, value: Value) -> Summary:
        """Return ``value`` with this op, after checking all that can be known without waiting for its device."""
        self._check(value)
        return Summary(self, value)

    def write(self, writer: SummaryWriter, value: object, step: int, walltime: float | None = None) -> None:
        """Write ``value``, which must be on the host, for ``step`` and ``walltime``, in seconds since 1970.

        Raises:
            TypeError, ValueError: ``value`` cannot be written.
        """
        self._check(value)
        writer.write(self.kind, self.tag, [self._host_value(value)], step, walltime)

    def _check(self, value: object) -> None:
        """Raise an error if ``value`` cannot be written. Does not read the elements of a tensor."""

    def _host_value(self, value: object) -> Value:
        return value

    def _check_array(self, value: object, wanted: str) -> None:
        if not isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
            raise TypeError(self._message(_described(value), wanted))
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise TypeError(self._message("a nested tensor", wanted))
        if not _dtype_name(value).startswith(("float", "bfloat", "int", "uint", "bool")):
            raise TypeError(self._message(f"a value of dtype {_dtype_name(value)}", wanted))

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

    def compose(self, value: Value) -> Value:
        """Return ``value`` with this op; the rates of several parameter groups as a list, one op for each."""
        if type(value) is GroupRates:
            groups = zip(value.names, value, strict=True)
            return [scalar(f"{self.tag}/{name}", self.fetch).compose(rate) for name, rate in groups]
        self._check(value)
        return Summary(self, value)

    def _check(self, value: Value) -> None:
        if type(value) is torch.Tensor and value.numel() == 1 and value.is_floating_point() and not value.is_nested:
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

    def number(self, value: Value) -> float:
        """Return ``value``, which must be on the host, as the number to write. Raises the errors of :meth:`write`."""
        if type(value) is float:
            return value
        self._check(value)
        if isinstance(value, torch.Tensor):
            try:
                # Unlike Tensor.item(), this keeps the GIL, which a writer's background thread would take in between.
                value = (value.reshape(()) if value.ndim else value).tolist()
            except RuntimeError:  # of a layout of which torch has no list
                value = ordinary(value).item()
        elif isinstance(value, (np.ndarray, np.generic)):
            value = value.item()
        try:
            as_float = float(value)
        except OverflowError:
            wanted = "a scalar has to fit into a float: write its logarithm"
            raise ValueError(self._message("a number beyond 1.8e308", wanted)) from None
        # An integer stays one, because a float would round it beyond 2**53.
        return int(value) if isinstance(value, int) else as_float

    def write(self, writer: SummaryWriter, value: object, step: int, walltime: float | None = None) -> None:
        writer.add_points([(self.tag, self.number(value))], step, walltime)


class histogram(SummaryOp):  # noqa: N801
    """The distribution of the elements of a tensor or array of any shape; the arguments are as for :class:`scalar`.

    >>> ops = {"loss": "loss", "weight": summary.histogram("weight", "weight")}
    >>> hook = SummarySaverHook(save_steps=100, output_dir="runs/1", summary_op=ops)

    Elements that have no bin in TensorBoard (NaN, infinities, numbers beyond 9e19) are left out, and a warning with
    their number is logged. If no element is left, nothing is written, nor for a value without elements, which is a
    warning too.
    """

    _is_written = True

    def counted(self, *, is_written: bool) -> histogram:
        """Return an op whose value is the counts of the bins, unless this rank does not write it."""
        counted = copy.copy(self)
        counted.copies, counted._is_written = False, is_written  # noqa: SLF001 - its own class
        return counted

    def compose(self, value: Value) -> Summary:
        self._check(value)
        if self.copies or not self._is_written:
            return Summary(self, value)
        # Counted now, because the value is no copy: the next run may change it before it is written.
        return Summary(self, count(value) if can_count(value) and 0 not in value.shape else snapshot(value))

    def _check(self, value: Value) -> None:
        self._check_array(value, "a histogram takes a tensor or array of real numbers")
        if is_sharded(value):
            wanted = "fetch the whole on every rank, lambda model: model.weight.full_tensor(), for example"
            raise TypeError(self._message(f"a DTensor of shape {tuple(value.shape)}", wanted))

    def write(self, writer: SummaryWriter, value: object, step: int, walltime: float | None = None) -> None:
        if type(value) is not Counts:
            self._check(value)
            if 0 in value.shape:  # type: ignore[attr-defined]
                logger.warning("%s", self._message("a value without elements", f"step {step} gets none"))
                return
        if type(value) is Counts or writer.takes_counts:
            raw, left_out = as_histogram(_counts(value))
            self._warn_of(left_out, left_out + (0 if raw is None else raw.num), step)
            if raw is not None:
                writer.write("histogram_raw", self.tag, raw, step, walltime)
            return
        values = _array(value).astype(np.float64).reshape(-1)
        kept = values[np.abs(values) < END]
        self._warn_of(values.size - kept.size, values.size, step)
        if kept.size:
            writer.write(self.kind, self.tag, [kept], step, walltime)

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

    def __init__(self, tag: str, fetch: object, dataformats: str | None = None) -> None:
        super().__init__(tag, fetch)
        self.dataformats = dataformats
        if dataformats is not None and "".join(sorted(dataformats)) not in ("HW", "CHW", "CHNW"):
            raise ValueError(f"{self!r}: dataformats must have the letters of HW, CHW or NCHW, one per dimension")

    def _check(self, value: Value) -> None:
        self._check_array(value, "an image is a tensor or array of pixels")
        if not _dtype_name(value).startswith(("uint8", "bool", "float", "bfloat")):
            raise TypeError(self._message(f"{_dtype_name(value)} pixels", "give uint8, bool, or floats in 0..1"))
        layout, shape = self._layout(value), tuple(value.shape)
        channels = dict(zip(layout, shape, strict=False)).get("C", 1)
        if len(layout) != len(shape) or 0 in shape or channels not in (1, 3, 4):
            wanted = "an image has 1, 3 or 4 channels and no empty dimension; for another order, give dataformats"
            raise ValueError(self._message(f"shape {shape} for {layout or 'HW, CHW or NCHW'}", wanted))

    def _layout(self, value: Value) -> str:
        return self.dataformats or {2: "HW", 3: "CHW", 4: "NCHW"}.get(value.ndim, "")

    def _host_value(self, value: object) -> _Array:
        pixels, layout = _array(value), self._layout(value)
        if pixels.dtype != np.uint8:
            # Rounded, not truncated as in torch, so that bytes that were divided by 255 come out unchanged.
            pixels = np.rint(np.nan_to_num(pixels.astype(np.float32)).clip(0, 1) * 255).astype(np.uint8)
        pixels = pixels.transpose([layout.index(letter) for letter in "NCHW" if letter in layout])
        return _grid(pixels.reshape((1,) * (4 - pixels.ndim) + pixels.shape))

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + (f", dataformats={self.dataformats!r})" if self.dataformats else ")")


class text(SummaryOp):  # noqa: N801
    """A ``str``, which TensorBoard shows as Markdown. torch's writer appends ``/text_summary`` to the tag.

    >>> op = summary.text("report", lambda loss: f"The loss is **{loss:.3f}**.")
    >>> hook = SummarySaverHook(save_steps=100, output_dir="runs/1", summary_op=op)
    """

    def _check(self, value: object) -> None:
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

    def _check(self, value: object) -> None:
        if not isinstance(value, getattr(sys.modules.get("matplotlib.figure"), "Figure", ())):
            raise TypeError(self._message(_described(value), "give a matplotlib Figure, or pixels to image()"))

    def write(self, writer: SummaryWriter, value: object, step: int, walltime: float | None = None) -> None:
        try:
            super().write(writer, value, step, walltime)
        finally:
            # pyplot keeps a reference to every figure that it created until the figure is closed.
            if pyplot := sys.modules.get("matplotlib.pyplot"):
                pyplot.close(value)


def summary_ops(summary_op: object) -> tuple[SummaryOp, ...]:
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


def write_summaries(writers: Sequence[SummaryWriter], composed: Tree, step: int, walltime: float | None = None) -> None:
    """Write one :class:`Summary`, or all in nested lists, tuples and mappings. Their values must be on the host.

    Of several writers, each gets what it can write, even if another one raises an error.
    """
    summaries = _summaries(composed)
    if len(writers) == 1:
        _write_to_one(writers[0], summaries, step, walltime)
        return
    attempt = Attempts(Exception)
    for writer in writers:
        written = [each for each in summaries if writer.writes(each.op.kind)]
        attempt(_write_to_one, writer, written, step, walltime)
    attempt.raise_errors("several writers raised an error")


def _write_to_one(writer: SummaryWriter, summaries: list[Summary], step: int, walltime: float | None) -> None:
    # All scalars in one call: one event, and one line of JSON.
    points = [(op.tag, op.number(value)) for op, value in summaries if isinstance(op, scalar)]
    if points:
        writer.add_points(points, step, walltime)
    if len(points) < len(summaries):
        for op, value in summaries:
            if not isinstance(op, scalar):
                op.write(writer, value, step, walltime)


def _summaries(composed: Tree) -> list[Summary]:
    if type(composed) is Summary:  # checked first, because a Summary is a tuple too
        return [composed]
    flat: list[Summary] = []
    # isinstance(..., Mapping) is slow, and most hooks give a tuple.
    parts = composed.values() if not isinstance(composed, (list, tuple)) and isinstance(composed, Mapping) else composed
    for part in parts:
        flat += [part] if type(part) is Summary else _summaries(part)
    return flat


def check_writers(writers: Sequence[SummaryWriter], ops: Iterable[SummaryOp]) -> None:
    """Raise a TypeError unless each of ``ops`` has a writer that can write it."""
    for op in ops:
        if not any(writer.writes(op.kind) for writer in writers):
            raise TypeError(writers[0].why_not(op.kind, op))


def takes_counts(writers: Iterable[SummaryWriter]) -> bool:
    """Return whether no writer needs the elements of a histogram."""
    return all(writer.takes_counts for writer in writers if writer.writes("histogram"))


def counted(ops: tuple[SummaryOp, ...], *, is_written: bool) -> tuple[SummaryOp, ...]:
    """Return what to evaluate for a writer that takes the counts of histograms; see :meth:`histogram.counted`."""
    return tuple(op.counted(is_written=is_written) if isinstance(op, histogram) else op for op in ops)


def _ops(summary_op: object) -> Iterator[SummaryOp]:
    if isinstance(summary_op, SummaryOp):
        yield summary_op
    elif isinstance(summary_op, Mapping):
        yield from (op if isinstance(op, SummaryOp) else scalar(tag, op) for tag, op in summary_op.items())
    elif isinstance(summary_op, (list, tuple)):
        for part in summary_op:
            yield from _ops(part)
    else:
        yield scalar(_name_of(summary_op), summary_op)


def _name_of(fetch: object) -> str:
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
    # A lone surrogate cannot be written as UTF-8, in which event files have their tags.
    if not tag.strip() or any(unicodedata.category(character) in ("Cc", "Cs") for character in tag):
        raise ValueError(f"{kind}({tag!r}, ...): a tag must not be blank or have control characters or lone surrogates")
    return tag


def _described(value: object) -> str:
    small = value is None or isinstance(value, (int, float, complex, str))
    return repr(value) if small else f"a {type(value).__name__}"


def _array(value: object) -> _Array:
    """Return a host value as an array. Dtypes that numpy does not have become float32; sparse tensors become dense."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = ordinary(value)
    known = not value.is_floating_point() or value.dtype in (torch.float16, torch.float32, torch.float64)
    return array_of(value if known else value.float())


def _counts(value: Value) -> Counts:
    if type(value) is Counts:
        return value
    return count(value) if can_count(value) else count_array(_array(value))


def _dtype_name(value: Value) -> str:
    """Return the name of the dtype of a tensor or array; torch and numpy use the same names."""
    return getattr(value.dtype, "name", None) or str(value.dtype).removeprefix("torch.")


def _grid(batch: _Array) -> _Array:
    """Return a batch of shape (N, C, H, W) as one image of shape (C, rows x H, columns x W), padded with black."""
    count, channels, height, width = batch.shape
    columns = min(count, 8)
    padded = np.pad(batch, ((0, -count % columns), (0, 0), (0, 0), (0, 0)))
    cells = padded.reshape(-1, columns, channels, height, width).transpose(2, 0, 3, 1, 4)
    return cells.reshape(channels, -1, columns * width)
