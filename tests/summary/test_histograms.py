"""Histograms: the bins are those of torch's writer, and the tensor is neither copied nor waited for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.accelerators import DEVICE
from support.devices import FakeDevice
from support.dtensors import from_local, mesh_of_one
from support.events import read
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.tensorboard import SummaryWriter as TensorBoardWriter
from torch.utils.tensorboard.summary import make_histogram

from torchhooks import MonitoredLoop, SummarySaverHook
from torchhooks.summary.histograms import END, as_histogram, can_count, count, count_array, edges
from torchhooks.summary.operations import (
    Summary,
    check_writers,
    counted,
    histogram,
    image,
    summary_ops,
    takes_counts,
    write_summaries,
)
from torchhooks.summary.writers import as_writer

NAN, INF = math.nan, math.inf
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WHOLE = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.bool]
ODD = [0.0, -0.0, NAN, INF, -INF, 1e-45, -1e-45, 1e-30, -1e-30, END, -END, 8.9e19, -8.9e19]


def edge_cases(dtype: torch.dtype) -> torch.Tensor:
    """Every edge as ``dtype`` rounds it, the numbers next to it, and what has no bin."""
    rounded = torch.tensor(edges(), dtype=torch.float64).to(dtype)
    next_to = [torch.nextafter(rounded, torch.tensor(limit, dtype=dtype)) for limit in (INF, -INF)]
    return torch.cat([rounded, *next_to, torch.tensor(ODD, dtype=torch.float64).to(dtype)])


def torchs(value: torch.Tensor) -> Any:
    """The histogram that torch's writer makes of the elements that have a bin."""
    elements = value.detach().to_dense().to(torch.float64).numpy().reshape(-1)
    return make_histogram(elements[np.abs(elements) < END], edges())


def assert_same(value: torch.Tensor) -> None:
    expected, (got, left_out) = torchs(value), as_histogram(count(value))
    assert got is not None
    assert (got.bucket_limits, got.bucket_counts) == (list(expected.bucket_limit), list(expected.bucket))
    assert (got.min, got.max, got.num) == (expected.min, expected.max, expected.num)
    assert left_out == value.numel() - expected.num
    # Added in another order, so equal up to rounding.
    magnitude = math.sqrt(expected.sum_squares * expected.num)
    assert got.sum == pytest.approx(expected.sum, rel=1e-12, abs=1e-12 * magnitude)
    assert got.sum_squares == pytest.approx(expected.sum_squares, rel=1e-12)


def test_the_edges_are_those_of_torchs_writer(tmp_path: Path) -> None:
    with TensorBoardWriter(str(tmp_path)) as writer:
        assert edges() == writer.default_bins


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_numbers_at_and_next_to_every_edge_are_in_torchs_bins(dtype: torch.dtype, on_device: bool) -> None:
    value = edge_cases(dtype)
    if not on_device:
        assert_same(value)
        return
    with FakeDevice() as device:
        assert_same(value)
    assert device.waits == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_bits_are_in_torchs_bins(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    unsigned = torch.randint(0, 256, (80_000 * dtype.itemsize,), dtype=torch.uint8, generator=random)
    assert_same(unsigned.view(dtype))


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_whole_numbers_are_in_torchs_bins(dtype: torch.dtype) -> None:
    assert_same(torch.tensor([0, 0, 1, 3, 100, 127]).to(dtype))


def test_int64_beyond_float32_is_in_torchs_bins() -> None:
    assert_same(torch.tensor([2**62 + 1, -(2**62), 2**53 + 1, -1]))


SHAPES = {
    "0-d": torch.tensor(2.0),
    "transposed": torch.randn(5, 7).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": torch.randn(20)[::3],
    "negated view": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
    "sparse": torch.tensor([0.0, 2.0]).to_sparse(),
    "parameter": torch.nn.Parameter(torch.randn(3)),
    "float8": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
    "several chunks": torch.randn(100_000),
    "nan in the second chunk": torch.cat([torch.randn(40_000), torch.tensor([NAN, 3.0])]),
}


@pytest.mark.parametrize("value", SHAPES.values(), ids=SHAPES)
def test_every_shape_and_layout_is_counted_completely(value: torch.Tensor) -> None:
    assert_same(value)


def test_counting_changes_no_element() -> None:
    value = torch.tensor([1.0, -2.0, NAN], dtype=torch.float64)
    before = value.clone()
    count(value)
    assert torch.equal(value.nan_to_num(7.0), before.nan_to_num(7.0))


def test_nothing_is_left_of_a_tensor_without_a_bin() -> None:
    assert as_histogram(count(torch.tensor([NAN, INF]))) == (None, 2)


@pytest.mark.parametrize("array", [np.array([1, 2], ">f4"), np.array([1, 2], np.longdouble), np.arange(3)[::2]])
def test_an_array_is_counted_whatever_its_dtype(array: np.ndarray[Any, Any]) -> None:
    got, left_out = as_histogram(count_array(array))
    assert got is not None
    assert (got.num, got.sum, left_out) == (2, array.sum(), 0)


def test_tensors_on_devices_without_a_copier_are_not_counted_there() -> None:
    assert not can_count(torch.empty(3, device="meta"))


class Sizes(TorchDispatchMode):
    """Notes the largest memory that an operator allocated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, each.untyped_storage().nbytes())
        return result


def weights(shape: tuple[int, ...] = (1000, 1000)) -> torch.nn.Module:
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.randn(shape))
    return model


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_fetched_tensor_is_not_copied(tmp_path: Path, layout: str) -> None:
    model = weights()
    if layout == "transposed":
        model.w = torch.nn.Parameter(torch.randn(1000, 1000).t())
    hook = SummarySaverHook(1, output_dir=tmp_path, summary_op=histogram("w", "w"))
    with MonitoredLoop(lambda: None, model=model, hooks=[hook]) as loop, Sizes() as sizes:
        loop.run()
    assert sizes.largest < model.w.nbytes / 4  # type: ignore[operator]
    (event,) = read(tmp_path).Histograms("w")
    assert event.histogram_value.num == 1_000_000


def test_only_the_counts_travel_from_a_device_and_the_host_never_waits(tmp_path: Path) -> None:
    model = weights((1000, 10))
    hook = SummarySaverHook(1, output_dir=tmp_path, summary_op={"w": histogram("w", "w")})
    with FakeDevice(lag=2) as device, MonitoredLoop(lambda: None, model=model, hooks=[hook], step_unit="run") as loop:
        for value in (1.0, 2.0, 3.0):
            model.w.data.fill_(value)  # type: ignore[operator]
            loop.run()
        assert device.waits == 0
    written = read(tmp_path).Histograms("w")
    assert [(event.step, event.histogram_value.max) for event in written] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert device.copies == 6  # of each step, the bins and the moments


@pytest.mark.accelerator
def test_counting_on_a_device_finds_torchs_bins() -> None:
    for dtype in FLOATS:
        value = edge_cases(dtype)
        on_device, on_host = count(value.to(DEVICE)), count(value)
        assert torch.equal(on_device.bins.cpu(), on_host.bins)
        assert on_device.moments.cpu().numpy() == pytest.approx(on_host.moments.numpy(), rel=1e-12, abs=1e12)


# -- writers ------------------------------------------------------------------------------------------------------


class Arrays:
    """A user's writer that takes the elements."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Any, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None: ...

    def flush(self) -> None: ...

    def add_histogram(self, tag: str, values: Any, step: int) -> None:
        self.got.append((tag, values, step))


class Bins(Arrays):
    """A user's writer that takes the counts as well."""

    def add_histogram_raw(self, tag: str, *args: Any) -> None:
        self.got.append((tag, args[2], args[-1]))


class OnlyNumbers:
    def add_scalar(self, tag: str, value: float, step: int) -> None: ...

    def flush(self) -> None: ...


class Overriding(Bins):
    def add_histogram(self, tag: str, values: Any, step: int) -> None:
        super().add_histogram(tag, values, step)


def evaluated(value: Any, *writers: Any) -> Summary:
    ops = summary_ops(histogram("w", "w"))
    (op,) = counted(ops, is_written=True) if takes_counts([*map(as_writer, writers)]) else ops
    summary = op.compose(value)
    assert isinstance(summary, Summary)
    return summary


@pytest.mark.parametrize("writer", [Arrays(), Overriding()], ids=["without", "overridden"])
def test_a_writer_that_takes_no_counts_gets_the_elements(writer: Arrays) -> None:
    write_summaries([as_writer(writer)], evaluated(torch.tensor([1.0, 2.0]), writer), 7)
    ((tag, values, step),) = writer.got
    assert (tag, values.tolist(), step) == ("w", [1.0, 2.0], 7)


def test_a_writer_that_takes_no_counts_gets_no_histogram_without_a_bin(lines: list[tuple[str, str]]) -> None:
    writer = Arrays()
    write_summaries([as_writer(writer)], evaluated(torch.tensor([math.inf, math.nan]), writer), 7)
    assert writer.got == []
    assert [level for level, text in lines if "2 of 2" in text] == ["WARNING"]


def test_a_dtensor_is_refused_with_the_way_out() -> None:
    with mesh_of_one() as mesh, pytest.raises(TypeError, match=r"a DTensor of shape \(3,\).*full_tensor\(\)"):
        histogram("w", "w").compose(from_local(torch.ones(3), mesh))


def test_a_method_of_the_writer_itself_counts_as_overriding() -> None:
    writer, got = Bins(), []
    writer.add_histogram = lambda tag, values, step: got.append(values)  # type: ignore[method-assign]
    write_summaries([as_writer(writer)], evaluated(torch.tensor([1.0, 2.0]), writer), 7)
    assert got[0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("value", [torch.tensor([1.0, 2.0]), np.array([1.0, 2.0]), np.float32(1)], ids=type)
def test_a_writer_that_takes_counts_gets_them_of_tensors_and_arrays(value: Any) -> None:
    writer = Bins()
    write_summaries([as_writer(writer)], evaluated(value, writer), 7)
    assert writer.got == [("w", value.size if isinstance(value, np.generic) else len(value), 7)]


def test_an_op_that_was_not_asked_to_count_is_counted_when_it_is_written() -> None:
    writer = Bins()
    write_summaries([as_writer(writer)], histogram("w", "w").compose(torch.tensor([1.0, NAN])), 7)
    assert writer.got == [("w", 1, 7)]


def test_a_value_that_cannot_be_counted_is_copied_before_it_changes() -> None:
    value = np.array([1.0, 2.0])
    summary = evaluated(value, Bins())
    value += 100
    assert summary.value.tolist() == [1.0, 2.0]


def test_of_several_writers_each_gets_what_it_takes() -> None:
    arrays, bins = Arrays(), Bins()
    several = [as_writer(each) for each in (arrays, bins, OnlyNumbers())]
    write_summaries(several, evaluated(torch.ones(2), *several), 7)
    assert arrays.got[0][1].tolist() == [1.0, 1.0]
    assert bins.got == [("w", 2, 7)]


def test_several_writers_that_all_take_counts_share_one_count() -> None:
    assert takes_counts([*map(as_writer, (Bins(), OnlyNumbers(), Bins()))])
    (op,) = counted(summary_ops(histogram("w", "w")), is_written=True)
    assert not op.copies


def test_of_several_writers_one_has_to_be_able_to_write_an_op() -> None:
    several = [as_writer(OnlyNumbers()), as_writer(Bins())]
    check_writers(several, [histogram("w", "w")])
    with pytest.raises(TypeError, match=r"writer OnlyNumbers has no add_image\(\)"):
        check_writers(several, [image("i", "i")])
