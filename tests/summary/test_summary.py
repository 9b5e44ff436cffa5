"""Summaries: TensorBoard reads back what is written, and a value that cannot be written is an error."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import events as event_files
from support.packages import import_or_skip
from support.processes import run_program
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as ServersAccumulator
from tensorboard.compat.proto.event_pb2 import SessionLog
from torch.utils.tensorboard import SummaryWriter as TensorBoardWriter

from torchhooks import MonitoredLoop, SummarySaverHook, SummaryWriter
from torchhooks.fetches.evaluation import ComposedFetch
from torchhooks.summary.operations import (
    Summary,
    SummaryOp,
    check_writers,
    figure,
    histogram,
    image,
    scalar,
    summary_ops,
    text,
    write_summaries,
)
from torchhooks.summary.tensorboard import EventFile
from torchhooks.summary.writers import SummaryWriterCache, as_writer
from torchhooks.testing import log_lines

NAN, INF = math.nan, math.inf


class Notebook:
    """A user's writer, whose method takes three arguments and no more."""

    def __init__(self) -> None:
        self.points: list[tuple[str, Any, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.points.append((tag, value, step))

    def flush(self) -> None:
        pass


class Gallery(Notebook):
    """A writer that has the method of every op."""

    def keep(self, tag: str, value: Any, step: int) -> None:
        self.points.append((tag, value, step))

    add_histogram = add_image = add_text = add_figure = keep


class Minimal(SummaryWriter):
    """A user's writer that derives from SummaryWriter."""

    def __init__(self) -> None:
        self.points: list[tuple[str, Any, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.points.append((tag, value, step))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TensorBoardWriter]:
    with TensorBoardWriter(str(tmp_path)) as writer:
        yield writer


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    yield
    SummaryWriterCache.clear()


def read(source: TensorBoardWriter | Path) -> Any:
    if isinstance(source, TensorBoardWriter):
        source.flush()
    folder = source if isinstance(source, Path) else source.log_dir
    return event_files.read(folder)


def events(writer: TensorBoardWriter) -> list[Any]:
    writer.flush()
    return [event for file in sorted(Path(writer.log_dir).iterdir()) for event in EventFileLoader(str(file)).Load()]


def written(op: SummaryOp, value: Any) -> Any:
    """Return what a writer with the method of every op gets for ``value``."""
    gallery = Gallery()
    write_summaries([as_writer(gallery)], op.compose(value), 7)
    return gallery.points[0][1] if gallery.points else None


def pixels(writer: TensorBoardWriter, tag: str) -> np.ndarray[Any, Any]:
    """Return the image as TensorBoard shows it, with shape (height, width, channels)."""
    (event,) = read(writer).Images(tag)
    return np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))


# -- scalars ------------------------------------------------------------------------------------------------------

NUMBERS = {
    "float": (0.5, 0.5),
    "int": (3, 3),
    "bool": (True, 1),
    "nan": (NAN, NAN),
    "inf": (INF, INF),
    "minus inf": (-INF, -INF),
    "fraction": (Fraction(1, 4), 0.25),
    "int beyond 2**53": (2**53 + 1, 2**53 + 1),
    "0-d array": (np.array(3.5), 3.5),
    "array of shape (1, 1)": (np.array([[3]]), 3),
    "numpy float16": (np.float16(0.5), 0.5),
    "numpy float64": (np.float64(0.1), 0.1),
    "numpy longdouble": (np.longdouble(0.5), 0.5),
    "numpy int64": (np.int64(2**53 + 1), 2**53 + 1),
    "numpy bool": (np.True_, 1),
    "big-endian array": (np.array(3.5, dtype=">f4"), 3.5),
    "float16": (torch.tensor(0.5, dtype=torch.float16), 0.5),
    "bfloat16": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "bfloat16 beyond float16": (torch.tensor(70144.0, dtype=torch.bfloat16), 70144.0),
    "float8": (torch.tensor(0.5).to(torch.float8_e4m3fn), 0.5),
    "float64": (torch.tensor(0.1, dtype=torch.float64), 0.1),
    "int tensor": (torch.tensor(2**53 + 1), 2**53 + 1),
    "uint8 tensor": (torch.tensor(200, dtype=torch.uint8), 200),
    "bool tensor": (torch.tensor(True), 1),
    "nan tensor": (torch.tensor(NAN), NAN),
    "shape (1,)": (torch.tensor([0.5]), 0.5),
    "shape (1, 1)": (torch.tensor([[0.5]]), 0.5),
    "with a gradient": (torch.tensor(0.5, requires_grad=True), 0.5),
}

NOT_NUMBERS = {
    "many": (torch.ones(3), ValueError, r"scalar 'loss': got shape \(3,\), 3 elements; .*\.mean\(\)"),
    "none at all": (torch.ones(0), ValueError, r"shape \(0,\), 0 elements"),
    "many in an array": (np.ones((2, 2)), ValueError, r"shape \(2, 2\), 4 elements"),
    "None": (None, TypeError, r"scalar 'loss': got None; .*zero_grad"),
    "str": ("0.5", TypeError, r"got '0\.5'; a scalar is one real number"),
    "numpy str": (np.array("x"), TypeError, r"got a value of dtype str"),
    "bytes": (b"1", TypeError, r"got a bytes"),
    "list": ([0.5], TypeError, r"got a list"),
    "dict": ({"a": 0.5}, TypeError, r"got a dict"),
    "object array": (np.array(None), TypeError, r"dtype object"),
    "complex": (1j, TypeError, r"got 1j"),
    "complex tensor": (torch.tensor(1j), TypeError, r"dtype complex64"),
    "complex array": (np.array(1j), TypeError, r"dtype complex128"),
    "datetime": (np.datetime64(5, "s"), TypeError, r"dtype datetime64"),
    "a type": (float, TypeError, r"got a type"),
}


@pytest.mark.parametrize(("value", "number"), NUMBERS.values(), ids=NUMBERS)
def test_every_kind_of_number_reaches_a_writer_as_a_python_number_of_the_same_value(value: Any, number: float) -> None:
    got = written(scalar("loss", "loss"), value)
    assert type(got) in (int, float)
    assert got == number or (math.isnan(got) and math.isnan(number))


@pytest.mark.parametrize(("value", "number"), NUMBERS.values(), ids=NUMBERS)
def test_tensorboard_reads_every_kind_of_number_back(writer: TensorBoardWriter, value: Any, number: float) -> None:
    scalar("loss", "loss").write(as_writer(writer), value, 7)
    (point,) = read(writer).Scalars("loss")
    assert (point.step, point.value) == (7, pytest.approx(number, rel=1e-7, nan_ok=True))


@pytest.mark.parametrize(("value", "error", "message"), NOT_NUMBERS.values(), ids=NOT_NUMBERS)
def test_a_value_that_is_not_one_number_is_an_error_in_its_own_run_and_is_not_written(
    value: Any, error: type[Exception], message: str
) -> None:
    notebook = Notebook()
    with pytest.raises(error, match=message):
        scalar("loss", "loss").compose(value)
    with pytest.raises(error, match=message):
        scalar("loss", "loss").write(as_writer(notebook), value, 7)
    assert not notebook.points


@pytest.mark.parametrize("number", [10**400, Fraction(10**400)])
def test_a_number_that_no_float_can_hold_is_an_error_with_a_way_out(number: Any) -> None:
    with pytest.raises(ValueError, match=r"scalar 'n': got a number beyond 1\.8e308; .*logarithm"):
        scalar("n", "n").write(as_writer(Notebook()), number, 7)


def test_compose_does_not_read_the_elements_of_a_tensor() -> None:
    composed = scalar("loss", "loss").compose(torch.empty((), device="meta"))  # has no elements to read
    assert composed.value.device.type == "meta"


# -- tags ---------------------------------------------------------------------------------------------------------

GOOD_TAGS = [
    "loss",
    "loss %",
    "a b",
    "a/b",
    "ä",
    "損失",
    "/a",
    "a/",
    "a//b",
    "../a",
    "_a",
    " a",
    "a\\b",
    "#?&<>",
    "x" * 300,
]
BAD_TAGS = ["", " ", "a\nb", "a\tb", "a\x00b", "\x7f", "\x85a", "\ud800"]


def test_every_accepted_tag_reaches_tensorboard_as_given(writer: TensorBoardWriter) -> None:
    for tag in GOOD_TAGS:
        scalar(tag, "loss").write(as_writer(writer), 0.5, 7)
    assert read(writer).Tags()["scalars"] == GOOD_TAGS


def test_the_server_of_tensorboard_sees_the_same_tags(writer: TensorBoardWriter, tmp_path: Path) -> None:
    for tag in GOOD_TAGS:
        scalar(tag, "loss").write(as_writer(writer), 0.5, 7)
    writer.flush()
    assert ServersAccumulator(str(tmp_path)).Reload().Tags()["tensors"] == GOOD_TAGS


@pytest.mark.parametrize("tag", BAD_TAGS, ids=ascii)
def test_a_tag_that_cannot_be_shown_is_an_error_when_the_op_is_made(tag: str) -> None:
    with pytest.raises(ValueError, match=r"a tag must not be blank or have control characters"):
        scalar(tag, "loss")


@pytest.mark.parametrize("tag", [None, 3, b"loss"])
def test_a_tag_that_is_not_a_string_is_an_error(tag: Any) -> None:
    with pytest.raises(TypeError, match=r"scalar\(.*: a tag is a str"):
        scalar(tag, "loss")


# -- histograms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_a_histogram_counts_every_element_in_any_precision(writer: TensorBoardWriter, dtype: torch.dtype) -> None:
    histogram("w", "w").write(as_writer(writer), torch.tensor([[0, 1], [1, 1]]).to(dtype), 7)
    (event,) = read(writer).Histograms("w")
    assert (event.step, event.histogram_value.num, event.histogram_value.sum) == (7, 4, 3)


def test_a_histogram_keeps_a_bfloat16_beyond_the_range_of_float16() -> None:
    assert written(histogram("w", "w"), torch.tensor([70144.0], dtype=torch.bfloat16)) == [70144.0]


@pytest.mark.parametrize("value", [torch.tensor(2.0), np.float32(2), torch.tensor([2.0]).to_sparse()])
def test_a_writer_gets_a_histogram_as_a_flat_array(value: Any) -> None:
    got = written(histogram("w", "w"), value)
    assert (got.dtype, got.shape, got[0]) == (np.float64, (1,), 2.0)


def test_a_histogram_leaves_out_what_is_not_finite_and_logs_how_much(
    writer: TensorBoardWriter, caplog: pytest.LogCaptureFixture
) -> None:
    histogram("w", "w").write(as_writer(writer), torch.tensor([1.0, NAN, INF, -INF, 1e30, 2.0]), 7)
    (event,) = read(writer).Histograms("w")
    assert (event.histogram_value.num, event.histogram_value.sum) == (2, 3)
    assert "histogram 'w', step 7: left out 4 of 6 values" in caplog.text


def test_a_histogram_of_only_nan_is_not_written_and_logged_as_left_out(
    writer: TensorBoardWriter, caplog: pytest.LogCaptureFixture
) -> None:
    histogram("w", "w").write(as_writer(writer), torch.full((3,), NAN), 7)
    assert not read(writer).Tags()["histograms"]
    assert "left out 3 of 3 values" in caplog.text


def test_the_largest_value_that_a_histogram_keeps_has_a_bin_in_tensorboard(writer: TensorBoardWriter) -> None:
    histogram("w", "w").write(as_writer(writer), torch.tensor([-8.9e19, 8.9e19]), 7)
    (event,) = read(writer).Histograms("w")
    assert sum(event.histogram_value.bucket) == 2


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (torch.ones(2, dtype=torch.complex64), TypeError, r"dtype complex64"),
        (None, TypeError, r"histogram 'w': got None"),
        ([1.0, 2.0], TypeError, r"got a list; a histogram takes a tensor or array"),
    ],
)
def test_a_value_without_a_distribution_is_an_error(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        histogram("w", "w").compose(value)


@pytest.mark.parametrize("value", [torch.ones(0, 3), np.ones(0), torch.ones(0, dtype=torch.bool)])
def test_a_histogram_of_nothing_is_a_warning(value: Any, tmp_path: Path) -> None:
    hook = SummarySaverHook(1, output_dir=tmp_path, summary_op=[histogram("w", "w"), {"loss": "loss"}])
    with log_lines() as lines, MonitoredLoop(lambda: {"w": value, "loss": 0.5}, hooks=[hook]) as loop:
        loop.run()
    assert ("WARNING", "histogram 'w': got a value without elements; step 1 gets none") in lines
    curves = event_files.read(tmp_path)
    assert curves.Tags()["histograms"] == []
    assert [point.step for point in curves.Scalars("loss")] == [1]


# -- images -------------------------------------------------------------------------------------------------------

BYTES = torch.arange(2 * 3 * 3, dtype=torch.uint8).reshape(2, 3, 3) * 15  # height, width, channels


@pytest.mark.parametrize("dataformats", ["HWC", "CHW", "WCH"])
def test_an_image_is_shown_unchanged_whatever_the_order_of_its_dimensions(
    writer: TensorBoardWriter, dataformats: str
) -> None:
    permuted = BYTES.permute(*("HWC".index(letter) for letter in dataformats))
    image("i", "i", dataformats).write(as_writer(writer), permuted, 7)
    assert (pixels(writer, "i") == BYTES.numpy()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_that_were_scaled_to_floats_in_0_to_1_come_back_unchanged(dtype: torch.dtype) -> None:
    every_byte = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    assert (written(image("i", "i"), every_byte.to(dtype) / 255)[0] == every_byte.numpy()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.bool])
def test_white_is_white_in_every_precision(dtype: torch.dtype) -> None:
    assert (written(image("i", "i"), torch.ones(2, 2, dtype=dtype)) == 255).all()


def test_floats_outside_of_0_to_1_are_clipped_and_nan_is_black() -> None:
    assert written(image("i", "i"), np.array([[-1.0, 2.0], [NAN, INF]])).tolist() == [[[0, 255], [0, 255]]]


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        ((4, 5), (4, 5, 3)),
        ((1, 4, 5), (4, 5, 3)),
        ((3, 4, 5), (4, 5, 3)),
        ((4, 4, 5), (4, 5, 4)),
        ((9, 3, 4, 5), (8, 40, 3)),
    ],
)
def test_the_number_of_dimensions_tells_an_image_from_a_batch(
    writer: TensorBoardWriter, shape: tuple[int, ...], shown: tuple[int, ...]
) -> None:
    image("i", "i").write(as_writer(writer), torch.zeros(shape), 7)
    assert pixels(writer, "i").shape == shown


def test_a_batch_is_laid_out_in_rows_of_eight_in_its_order() -> None:
    batch = torch.arange(1, 10, dtype=torch.uint8).reshape(9, 1, 1, 1)
    assert written(image("i", "i"), batch)[0].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [9, 0, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (torch.zeros(4), ValueError, r"image 'i': got shape \(4,\) for HW, CHW or NCHW"),
        (torch.zeros(5, 5, 3), ValueError, r"shape \(5, 5, 3\) for CHW; .*give dataformats"),
        (torch.zeros(3, 0, 5), ValueError, r"no empty dimension"),
        (torch.zeros(2, 2, dtype=torch.int64), TypeError, r"int64 pixels; give uint8, bool, or floats in 0\.\.1"),
        (torch.zeros(2, 2, dtype=torch.complex64), TypeError, r"dtype complex64"),
        (None, TypeError, r"image 'i': got None"),
    ],
)
def test_a_value_that_is_not_an_image_is_an_error(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        image("i", "i").compose(value)


def test_a_value_must_have_as_many_dimensions_as_dataformats_has_letters() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 2\) for HWC"):
        image("i", "i", "HWC").compose(torch.zeros(2, 2))


@pytest.mark.parametrize("dataformats", ["", "HWX", "hw", "CHWC", "C"])
def test_dataformats_with_other_letters_are_an_error_when_the_op_is_made(dataformats: str) -> None:
    with pytest.raises(ValueError, match=r"dataformats must have the letters of HW, CHW or NCHW"):
        image("i", "i", dataformats)


# -- texts and figures --------------------------------------------------------------------------------------------


def test_a_text_is_read_back_by_tensorboard(writer: TensorBoardWriter) -> None:
    text("note", "note").write(as_writer(writer), "learning **ä**", 7)
    (event,) = read(writer).Tensors("note/text_summary")
    assert (event.step, event.tensor_proto.string_val[0].decode()) == (7, "learning **ä**")


@pytest.mark.parametrize("value", [None, 3, b"bytes", ["a"]])
def test_a_value_that_is_not_a_text_is_an_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"text 'note': got .*; a text is a str"):
        text("note", "note").compose(value)


def test_a_figure_becomes_an_image(writer: TensorBoardWriter) -> None:
    drawn = import_or_skip("matplotlib.figure").Figure(figsize=(2, 1), dpi=50)
    figure("f", "f").write(as_writer(writer), drawn, 7)
    assert pixels(writer, "f").shape == (50, 100, 3)


def test_a_figure_is_closed_after_writing_even_if_writing_fails() -> None:
    plt = import_or_skip("matplotlib.pyplot")

    class Full(Gallery):
        def add_figure(self, tag: str, value: Any, step: int) -> None:
            raise OSError("no space left")

    for writer, raised in ((Gallery(), contextlib.nullcontext()), (Full(), pytest.raises(OSError, match="no space"))):
        drawn = plt.figure()
        with raised:
            figure("f", "f").write(as_writer(writer), drawn, 7)
        assert not plt.fignum_exists(drawn.number)


def test_a_figure_needs_no_pyplot(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = import_or_skip("matplotlib.figure").Figure(figsize=(1, 1))
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    assert written(figure("f", "f"), drawn) is drawn


@pytest.mark.parametrize("value", [None, torch.zeros(3, 4, 4)])
def test_a_value_that_is_not_a_figure_is_an_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"figure 'f': got .*; give a matplotlib Figure"):
        figure("f", "f").compose(value)


# -- the normal form ----------------------------------------------------------------------------------------------


def accuracy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(1) == target).float().mean()


class Metric:
    def compute(self) -> float:
        return 0.5

    def value(self) -> float:
        return 0.5


SHOWN = histogram("shown", "fc.weight")

FORMS = {
    "mapping": ({"a": "loss", "b": accuracy}, ["a", "b"]),
    "op in a mapping": ({"a": "loss", "ignored": SHOWN}, ["a", "shown"]),
    "one op": (SHOWN, ["shown"]),
    "name": ("loss", ["loss"]),
    "function": (accuracy, ["accuracy"]),
    "method": (Metric().value, ["value"]),
    "list": ([SHOWN, "loss", {"a": "lr"}], ["shown", "loss", "a"]),
    "nested": ([[SHOWN], ("loss", [{"a": "lr"}])], ["shown", "loss", "a"]),
    "nothing": ([], []),
}


@pytest.mark.parametrize(("summary_op", "tags"), FORMS.values(), ids=FORMS)
def test_every_form_of_summary_op_gives_a_flat_tuple_of_ops(summary_op: Any, tags: list[str]) -> None:
    ops = summary_ops(summary_op)
    assert [op.tag for op in ops] == tags
    assert isinstance(ops, tuple)


def test_a_mapping_means_scalars_of_its_fetches() -> None:
    (op,) = summary_ops({"accuracy": accuracy})
    assert (type(op), op.fetch) == (scalar, accuracy)


@pytest.mark.parametrize(
    "nameless", [lambda loss: loss, torch.ones(1), Metric(), None, 3, {"a"}], ids=lambda it: type(it).__name__
)
def test_a_fetch_without_a_name_to_use_as_a_tag_is_an_error(nameless: Any) -> None:
    with pytest.raises(TypeError, match=r"has no name to use as a tag; give \{tag: fetch\}"):
        summary_ops(nameless)


@pytest.mark.parametrize("fetch", [None, {"b": "loss"}, ["loss", "lr"], histogram("h", "w")])
def test_an_op_takes_exactly_one_fetch(fetch: Any) -> None:
    with pytest.raises(TypeError, match=r"give one fetch"):
        scalar("a", fetch)


@pytest.mark.parametrize("second", [scalar("w", "lr"), histogram("w", "fc.weight")])
def test_one_tag_for_two_ops_is_an_error_that_names_both(second: SummaryOp) -> None:
    with pytest.raises(ValueError, match=r"scalar\('w', 'loss'\) and .* both write 'w'"):
        summary_ops([{"w": "loss"}, second])


def test_tensorboard_mixes_up_two_kinds_under_one_tag(writer: TensorBoardWriter, tmp_path: Path) -> None:
    """The reason why two ops of different kinds may not share a tag."""
    scalar("w", "loss").write(as_writer(writer), 0.5, 7)
    histogram("w", "w").write(as_writer(writer), torch.ones(3), 7)
    writer.flush()
    seen = ServersAccumulator(str(tmp_path)).Reload()
    assert (len(seen.Tensors("w")), seen.SummaryMetadata("w").plugin_data.plugin_name) == (2, "scalars")


@pytest.mark.parametrize(
    "op", [scalar("a", "loss"), histogram("b", "fc.weight"), image("c", "x"), image("d", "x", "HWC"), text("e", "note")]
)
def test_the_repr_of_an_op_evaluates_to_an_equal_op(op: SummaryOp) -> None:
    again = eval(repr(op))
    assert (type(again), vars(again)) == (type(op), vars(op))


def test_a_summary_op_is_a_fetch_whose_value_is_a_summary() -> None:
    op = scalar("loss", "loss")
    assert isinstance(op, ComposedFetch)
    assert op.compose(0.5) == Summary(op, 0.5)


# -- writing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [list, tuple, lambda pair: dict(zip("ab", pair, strict=True)), lambda pair: [[*pair]]]
)
def test_summaries_in_any_structure_are_written_in_order(shape: Any) -> None:
    notebook = Notebook()
    write_summaries([as_writer(notebook)], shape([scalar("a", "a").compose(1.5), scalar("b", "b").compose(2)]), 7)
    assert notebook.points == [("a", 1.5, 7), ("b", 2, 7)]


def drawn() -> Any:
    return import_or_skip("matplotlib.figure").Figure(figsize=(1, 1))


EVERY_KIND: list[tuple[SummaryOp, Callable[[], Any]]] = [
    (scalar("t", "t"), lambda: 0.5),
    (histogram("t", "t"), lambda: torch.ones(2)),
    (image("t", "t"), lambda: torch.ones(2, 2)),
    (text("t", "t"), lambda: "word"),
    (figure("t", "t"), drawn),
]
every_kind = pytest.mark.parametrize(
    ("op", "value"), EVERY_KIND, ids=["scalar", "histogram", "image", "text", "figure"]
)


@every_kind
def test_the_wall_time_of_the_run_reaches_the_event_file(
    writer: TensorBoardWriter, op: SummaryOp, value: Callable[[], Any]
) -> None:
    write_summaries([as_writer(writer)], op.compose(value()), 7, walltime=1000.5)
    assert [(event.step, event.wall_time) for event in events(writer)][1:] == [(7, 1000.5)]


@every_kind
def test_a_users_writer_is_never_given_more_than_tag_value_and_step(op: SummaryOp, value: Callable[[], Any]) -> None:
    gallery = Gallery()
    write_summaries([as_writer(gallery)], op.compose(value()), 7, walltime=1000.5)
    assert [(tag, step) for tag, _, step in gallery.points] == [("t", 7)]


def test_a_subclass_of_torchs_writer_with_narrower_methods_is_given_three_arguments(tmp_path: Path) -> None:
    class Doubling(TensorBoardWriter):
        def add_scalar(self, tag: str, value: float, step: int) -> None:  # type: ignore[override]
            super().add_scalar(tag, 2 * value, step)

        def add_text(self, tag: str, value: str, step: int) -> None:  # type: ignore[override]
            super().add_text(tag, 2 * value, step)

    with Doubling(str(tmp_path)) as doubling:
        summaries = [scalar("loss", "loss").compose(0.5), text("note", "note").compose("ab")]
        write_summaries([as_writer(doubling)], summaries, 7, walltime=1000.5)
        assert [point.value for point in read(doubling).Scalars("loss")] == [1.0]
        (note,) = read(doubling).Tensors("note/text_summary")
    assert note.tensor_proto.string_val[0] == b"abab"


def test_torchs_writer_passes_the_check_for_every_op(writer: TensorBoardWriter) -> None:
    check_writers([as_writer(writer)], [op for op, _ in EVERY_KIND])


@pytest.mark.parametrize("op", [op for op, _ in EVERY_KIND[1:]], ids=repr)
@pytest.mark.parametrize("kind", [Notebook, Minimal])
def test_a_writer_without_the_method_of_an_op_is_refused_before_anything_is_written(
    kind: type[Any], op: SummaryOp
) -> None:
    message = rf"writer {kind.__name__} has no add_{op.kind}\(\), which {op.kind}\('t', 't'\) needs"
    with pytest.raises(TypeError, match=message):
        check_writers([as_writer(kind())], [scalar("loss", "loss"), op])


def test_a_folder_given_as_a_writer_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"summary writer str has no add_scalar\(\), which every hook that writes needs"
    ):
        as_writer("runs/1")


def test_a_writer_that_cannot_flush_is_refused() -> None:
    class Careless:
        def add_scalar(self, tag: str, value: float, step: int) -> None: ...

    with pytest.raises(TypeError, match=r"writer Careless has no flush\(\)"):
        as_writer(Careless())


def test_a_writer_that_derives_from_summarywriter_needs_one_method_and_is_used_as_it_is() -> None:
    with Minimal() as minimal:
        assert as_writer(minimal) is minimal
        write_summaries([minimal], [scalar("a", "a").compose(1.5), scalar("b", "b").compose(2)], 7, walltime=1000.5)
        minimal.add_session_log("START", 7)
        minimal.purge_from(7)
        minimal.add_config({})
        minimal.start_run()
    assert minimal.points == [("a", 1.5, 7), ("b", 2, 7)]


# -- session logs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["START", "CHECKPOINT"])
def test_a_session_log_is_in_the_file_with_its_step(writer: TensorBoardWriter, status: Any) -> None:
    as_writer(writer).add_session_log(status, 7)
    (event,) = [event for event in events(writer) if event.HasField("session_log")]
    assert (event.step, SessionLog.SessionStatus.Name(event.session_log.status)) == (7, status)


@pytest.mark.parametrize("path", ["ckpt/model.ckpt-7", Path("ckpt") / "model.ckpt-7"])
def test_a_session_log_says_where_the_checkpoint_is(writer: TensorBoardWriter, path: str | Path) -> None:
    as_writer(writer).add_session_log("CHECKPOINT", 7, checkpoint_path=path)
    assert events(writer)[-1].session_log.checkpoint_path == str(Path("ckpt") / "model.ckpt-7")


def test_a_start_at_a_lower_step_purges_the_curves_from_there_on(writer: TensorBoardWriter) -> None:
    for step in range(1, 6):
        scalar("loss", "loss").write(as_writer(writer), 0.5, step)
    as_writer(writer).add_session_log("START", 3)
    scalar("loss", "loss").write(as_writer(writer), 0.25, 3)
    assert [(point.step, point.value) for point in read(writer).Scalars("loss")] == [(1, 0.5), (2, 0.5), (3, 0.25)]


def test_a_checkpoint_at_a_lower_step_purges_nothing(writer: TensorBoardWriter) -> None:
    scalar("loss", "loss").write(as_writer(writer), 0.5, 5)
    as_writer(writer).add_session_log("CHECKPOINT", 3)
    assert len(read(writer).Scalars("loss")) == 1


# -- the cache ----------------------------------------------------------------------------------------------------


def test_all_names_of_a_directory_share_one_writer(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    relative = os.path.relpath(folder)
    names: list[str | Path] = [folder, str(folder), f"{folder}/", relative, Path(relative), tmp_path / "b" / ".." / "a"]
    assert len({SummaryWriterCache.get(name) for name in names}) == 1


def test_many_threads_that_ask_at_once_get_one_writer_and_one_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        writers = set(pool.map(SummaryWriterCache.get, [tmp_path] * 32))
    assert (len(writers), len(list(tmp_path.iterdir()))) == (1, 1)


def test_clear_flushes_every_writer_and_forgets_it(tmp_path: Path) -> None:
    writers = [SummaryWriterCache.get(tmp_path / name) for name in "ab"]
    for writer in writers:
        writer.add_scalar("loss", 0.5, 7)
    SummaryWriterCache.clear()
    assert [len(read(tmp_path / name).Scalars("loss")) for name in "ab"] == [1, 1]
    assert not {SummaryWriterCache.get(tmp_path / name) for name in "ab"} & set(writers)


def test_close_flushes_one_directory_and_leaves_the_others_alone(tmp_path: Path) -> None:
    closed, other = (SummaryWriterCache.get(tmp_path / name) for name in "ab")
    closed.add_scalar("loss", 0.5, 7)
    SummaryWriterCache.close(f"{tmp_path}/a/")
    assert len(read(tmp_path / "a").Scalars("loss")) == 1
    assert SummaryWriterCache.get(tmp_path / "a") is not closed
    assert SummaryWriterCache.get(tmp_path / "b") is other


def test_close_of_an_unused_directory_does_nothing(tmp_path: Path) -> None:
    SummaryWriterCache.close(tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_write_after_a_close_is_flushed_by_the_next_close(tmp_path: Path) -> None:
    held = SummaryWriterCache.get(tmp_path)
    SummaryWriterCache.close(tmp_path)  # for example by a hook of another loop
    held.add_scalar("loss", 0.5, 7)
    SummaryWriterCache.close(tmp_path)
    assert len(read(tmp_path).Scalars("loss")) == 1


def test_an_error_in_one_close_keeps_no_other_writer_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = EventFile.close

    def stale(file: EventFile) -> None:
        close(file)
        if file.get_logdir() == str(tmp_path / "b"):
            raise OSError(errno.ESTALE, "Stale file handle")

    writers = [SummaryWriterCache.get(tmp_path / name) for name in "abc"]
    with monkeypatch.context() as patch:
        patch.setattr(EventFile, "close", stale)
        with pytest.raises(OSError, match="Stale file handle"):
            SummaryWriterCache.clear()
    files = os.listdir("/proc/self/fd")
    assert not [file for file in files if os.path.realpath(f"/proc/self/fd/{file}").startswith(str(tmp_path))]
    for writer in writers:
        writer.add_scalar("loss", 0.5, 7)
    assert [len(read(tmp_path / name).Scalars("loss")) for name in "abc"] == [1, 1, 1]


def test_a_closed_writer_without_other_references_is_freed(tmp_path: Path) -> None:
    writer = weakref.ref(SummaryWriterCache.get(tmp_path))
    SummaryWriterCache.close(tmp_path)
    gc.collect()
    assert writer() is None


# -- imports ------------------------------------------------------------------------------------------------------


def python(code: str) -> str:
    ran = run_program(code)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.slow
def test_importing_summary_loads_neither_tensorboard_nor_matplotlib() -> None:
    code = "import sys, torch; before = set(sys.modules); import torchhooks.summary; print(*set(sys.modules) - before)"
    loaded = {name.split(".")[0] for name in python(code).split()}
    assert loaded.isdisjoint({"tensorboard", "google", "matplotlib", "PIL"})


def test_without_tensorboard_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as if it could not be imported
    monkeypatch.delitem(sys.modules, "torchhooks.summary.tensorboard", raising=False)
    message = r"event files need tensorboard, .*: pip install tensorboard, or give a summary_writer of your own"
    with pytest.raises(ImportError, match=message):
        SummaryWriterCache.get(tmp_path)


@pytest.mark.slow
def test_without_tensorboard_a_users_writer_works() -> None:
    code = """
import sys
sys.modules["tensorboard"] = None
from torchhooks.summary.writers import as_writer
from torchhooks.summary.operations import scalar
class Printing:
    def add_scalar(self, *point): print(*point)
    def flush(self): ...
as_writer(Printing()).add_session_log("START", 7)
scalar("loss", "loss").write(as_writer(Printing()), 0.5, 7, walltime=1.0)
"""
    assert python(code) == "loss 0.5 7"
