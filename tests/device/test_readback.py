"""Values on their way from a device to the host: when they arrive, in which order, and that no run waits for them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.devices import FakeDevice
from support.events import read
from support.examples import examples
from torch.utils._python_dispatch import TorchDispatchMode

from torchhooks import (
    LifecycleError,
    LoggingTensorHook,
    MonitoredLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
)
from torchhooks.common.trees import as_snapshot
from torchhooks.device.accelerator import pack, unpack
from torchhooks.device.readback import BATCH_RUNS, BATCH_SECS, DeviceDuration, DeviceTimestamp, Readback, to_host
from torchhooks.testing import FakeClock, RecordingHook, RecordingWriter, plain, trace

NAN, INF = math.nan, math.inf
FAR = 1000
"""A lag, in runs, that is longer than any test."""


@pytest.fixture
def device(clock: FakeClock) -> Iterator[FakeDevice]:
    """A device whose copies are done at the first poll, and a clock that stands still, so that batches fill."""
    with FakeDevice(lag=0) as device:
        yield device


@pytest.fixture
def readback() -> Readback:
    return Readback()


def on_device(value: Any) -> torch.Tensor:
    """Return a tensor as a fetch returns it."""
    return as_snapshot(torch.tensor(value))


def drained(readback: Readback, values: Any) -> Any:
    """Return ``values`` as a callback gets them."""
    got: list[Any] = []
    readback.request(values, got.append)
    readback.drain()
    (value,) = got
    return value


def deliveries(readback: Readback, runs: int, **arguments: Any) -> list[tuple[int, float]]:
    """Make a request in every run, with one second between them, and return in which run which value arrived."""
    came: list[tuple[int, float]] = []
    with FakeClock() as clock:
        for run in range(1, runs + 1):
            readback.request(on_device(float(run)), lambda value: came.append((run, value.item())), **arguments)  # noqa: B023
            clock.advance(1.0)
            readback.end_run()
    return came


# -- when the callback is called --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.5, None, "text", [1, {"a": 2}], (), torch.tensor(0.5), torch.ones(2, 3)], ids=repr)
def test_values_on_the_host_are_passed_on_at_once(readback: Readback, value: Any) -> None:
    got: list[Any] = []
    readback.request(value, got.append)
    assert plain(got) == plain([value])
    assert not readback.waiting


def test_a_list_that_keeps_growing_is_passed_on_as_it_is_now(readback: Readback) -> None:
    growing: list[float] = []
    got: list[Any] = []
    for _ in range(2):
        growing.append(0.5)
        readback.request(growing, got.append)
    assert got == [[0.5], [0.5, 0.5]]


def test_a_time_on_the_hosts_clock_is_passed_on_at_once(readback: Readback, clock: FakeClock) -> None:
    begin = DeviceTimestamp(torch.device("cpu"))
    clock.advance(2.5)
    got: list[Any] = []
    readback.request([DeviceDuration(begin, DeviceTimestamp(torch.device("cpu")))], got.append)
    assert got == [[2.5]]


@pytest.mark.parametrize("lag", [0, 1, 3, 7])
def test_a_value_arrives_after_as_many_runs_as_the_device_lags(readback: Readback, lag: int) -> None:
    with FakeDevice(lag):
        came = deliveries(readback, 20)
    assert came == [(run + lag, float(run)) for run in range(1, 21 - lag)]


@pytest.mark.parametrize("lag", [0, 1, 5])
def test_callbacks_are_called_in_the_order_of_the_requests(readback: Readback, lag: int) -> None:
    order: list[int] = []
    with FakeDevice(lag):
        for number in range(60):
            readback.request(on_device(float(number)), lambda value: order.append(int(value)))
            if number % 3 == 0:
                readback.end_run()
        readback.drain()
    assert order == list(range(60))


def test_requests_of_several_runs_share_a_batch(device: FakeDevice, readback: Readback) -> None:
    for run in range(BATCH_RUNS):
        assert device.batches == 0
        readback.request(on_device(float(run)), lambda _: None)
        readback.end_run()
    assert (device.batches, device.copies) == (1, BATCH_RUNS)


def test_a_request_does_not_wait_for_others_if_runs_are_long(
    device: FakeDevice, readback: Readback, clock: FakeClock
) -> None:
    readback.request(on_device(0.5), lambda _: None)
    readback.end_run()
    clock.advance(BATCH_SECS)
    readback.end_run()
    assert device.batches == 1


def test_a_tensor_in_several_requests_is_copied_once(device: FakeDevice, readback: Readback) -> None:
    loss, got = on_device(0.5), list[Any]()
    for _ in range(3):
        readback.request({"loss": loss, "again": [loss]}, got.append)
    readback.drain()
    assert device.copies == 1
    assert plain(got) == [{"loss": 0.5, "again": [0.5]}] * 3


def test_no_run_waits_for_the_device(readback: Readback) -> None:
    with FakeDevice(lag=5) as device:
        deliveries(readback, 100)
        assert device.waits == 0


def test_nothing_is_waiting_once_every_value_has_arrived(device: FakeDevice, readback: Readback) -> None:
    deliveries(readback, 1)
    assert not readback.waiting


# -- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0, 1, 2, 5, 40])
def test_a_request_with_a_deadline_blocks_at_the_deadline_and_not_earlier(readback: Readback, bound: int) -> None:
    with FakeDevice(FAR) as device:
        readback.request(on_device(0.5), lambda _: None, max_lag_runs=bound)
        waits = []
        for _ in range(bound + 1):
            readback.end_run()
            waits.append(device.waits)
    assert waits == [0] * bound + [1]
    assert not readback.waiting


@pytest.mark.parametrize(("bound", "lag"), [(1, 1), (2, 1), (4, 2), (9, 5), (40, 20)])
def test_a_device_that_lags_half_of_the_bound_is_not_waited_for(readback: Readback, bound: int, lag: int) -> None:
    with FakeDevice(lag) as device:
        came = deliveries(readback, 100, max_lag_runs=bound)
        assert device.waits == 0
    assert all(run - value <= bound for run, value in came)


def test_every_request_meets_its_deadline(readback: Readback) -> None:
    with FakeDevice(FAR):
        assert deliveries(readback, 9, max_lag_runs=2) == [(run + 2, run) for run in range(1, 8)]


def test_an_earlier_request_without_a_deadline_is_answered_first(readback: Readback, clock: FakeClock) -> None:
    order: list[str] = []
    with FakeDevice(FAR):
        readback.request(on_device(0.5), lambda _: order.append("unbounded"))
        clock.advance(1.0)
        readback.end_run()
        readback.request(on_device(0.5), lambda _: order.append("bounded"), max_lag_runs=0)
        readback.end_run()
    assert order == ["unbounded", "bounded"]


# -- memory -----------------------------------------------------------------------------------------------------------


def megabyte(value: float = 0.5) -> torch.Tensor:
    return as_snapshot(torch.full((1 << 18,), value))


def test_large_values_do_not_wait_for_others_to_share_their_batch(device: FakeDevice, readback: Readback) -> None:
    readback.request(megabyte(), lambda _: None)
    readback.end_run()
    assert device.batches == 1


def test_values_share_a_batch_until_they_are_large_together(device: FakeDevice, readback: Readback) -> None:
    sent: list[int] = []
    for _ in range(9):
        readback.request(as_snapshot(torch.zeros(1 << 16)), lambda _: None)
        readback.end_run()
        sent.append(device.batches)
    assert sent == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_the_memory_of_values_that_wait_is_bounded(readback: Readback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchhooks.device.readback.MAX_BYTES", 4 << 20)
    got: list[float] = []
    waiting: list[int] = []
    with FakeClock(), FakeDevice(FAR) as device:
        for run in range(1, 31):
            readback.request(megabyte(float(run)), lambda value: got.append(value[0].item()))
            readback.end_run()
            waiting.append(run - len(got))
        assert device.waits > 0
        assert max(waiting) == 4
        readback.drain()
    assert got == list(range(1, 31))


def test_a_value_that_is_larger_than_the_bound_is_waited_for_at_once(
    readback: Readback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchhooks.device.readback.MAX_BYTES", 1000)
    got: list[Any] = []
    with FakeDevice(FAR) as device:
        readback.request(megabyte(), got.append)
        readback.end_run()
        assert (device.waits, len(got)) == (1, 1)
        for _ in range(3):
            readback.request(on_device(0.5), got.append)
            readback.end_run()
        assert device.waits == 1


def test_after_an_error_of_a_copy_its_bytes_do_not_count(readback: Readback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchhooks.device.readback.MAX_BYTES", 2 << 20)
    with Breaking(FAR) as device:
        readback.request([megabyte() for _ in range(3)], lambda _: None)
        with pytest.raises(MemoryError):
            readback.end_run()
        readback.request(megabyte(), lambda _: None)
        readback.end_run()
        assert device.waits == 0
        readback.drain()


# -- streams ----------------------------------------------------------------------------------------------------------


def test_each_request_is_copied_on_its_own_stream(device: FakeDevice, readback: Readback) -> None:
    got: list[float] = []
    readback.request(on_device(1.0), got.append)
    with device.on_stream("side"):
        readback.request(on_device(2.0), got.append)
    readback.drain()
    assert (plain(got), device.streams) == ([1.0, 2.0], ["default", "side"])


def test_requests_of_one_stream_share_a_batch(device: FakeDevice, readback: Readback) -> None:
    for stream in ("a", "b", "a"):
        with device.on_stream(stream):
            readback.request(on_device(1.0), lambda _: None)
    readback.drain()
    assert device.streams == ["a", "b"]


def test_the_stream_of_a_callback_does_not_affect_the_next_run(readback: Readback) -> None:
    with FakeDevice(lag=0) as device:
        with device.on_stream("side"):
            readback.request(
                on_device(1.0), lambda value: readback.request(on_device(2.0), lambda _: None), max_lag_runs=0
            )
            readback.end_run()
        readback.request(on_device(3.0), lambda _: None)
        readback.drain()
    assert device.streams == ["side", "side", "default"]


# -- what arrives -----------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A structure."""

    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    """Another structure."""

    loss: Any
    tag: str


def test_the_structure_is_kept(device: FakeDevice, readback: Readback) -> None:
    one, two = on_device(1.0), on_device([1, 2])
    values = {"pair": Pair(one, [two, ()]), "record": Record(one, "a"), "rest": (None, 0.25, "text", {"deep": [two]})}
    expected = {
        "pair": Pair(1.0, [[1, 2], ()]),
        "record": Record(1.0, "a"),
        "rest": (None, 0.25, "text", {"deep": [[1, 2]]}),
    }
    assert plain(drained(readback, values)) == expected


DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool),
    *(torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_unchanged(device: FakeDevice, readback: Readback, dtype: torch.dtype) -> None:
    values = [torch.tensor(values).to(dtype) for values in ([0.0, 1.0], [1.0, 0.0], 1.0)]
    came = drained(readback, values)
    assert [value.dtype for value in came] == [dtype] * 3
    assert plain([value.to(torch.complex128) for value in came]) == [[0, 1], [1, 0], 1]


BASE = torch.arange(12.0).reshape(3, 4)
VIEWS = {
    "transposed": BASE.T,
    "a column": BASE[:, 1],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "of another dtype": torch.ones(2, dtype=torch.complex64).real,
    "with a graph": torch.ones(2, requires_grad=True) * 2,
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "many elements": torch.arange(100_000).reshape(10, -1).T,
    "none": torch.empty(0),
    "none, with a shape": torch.empty(2, 0, 3),
    "one": torch.ones(1, 1, 1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_every_kind_of_tensor_arrives_unchanged(device: FakeDevice, readback: Readback, view: torch.Tensor) -> None:
    came = drained(readback, view)
    assert came.shape == view.shape
    assert torch.equal(came, view)
    assert not came.requires_grad


tensors = st.builds(
    lambda shape, dtype, turned: torch.rand(shape).mul(9).to(dtype).mT if turned else torch.rand(shape).to(dtype),
    st.lists(st.sampled_from([0, 1, 2, 40]), min_size=2, max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16]),
    st.booleans(),
)


@given(st.lists(tensors, max_size=8))
def test_tensors_that_share_copies_stay_themselves(originals: list[torch.Tensor]) -> None:
    copies = unpack(pack(originals))
    assert [(copy.dtype, copy.shape) for copy in copies] == [(one.dtype, one.shape) for one in originals]
    assert all(map(torch.equal, copies, originals))


def test_small_tensors_of_one_dtype_and_shape_share_a_copy() -> None:
    losses = [torch.ones(()) for _ in range(9)]
    assert [indexes for indexes, _ in pack([*losses, torch.ones(1), torch.ones((), dtype=torch.bool)])] == [
        [*range(9)],
        [9],
        [10],
    ]


def test_a_value_is_that_of_the_request_even_if_the_tensor_is_updated(device: FakeDevice, readback: Readback) -> None:
    weight, got = torch.ones(2), list[Any]()
    readback.request(weight, got.append)
    weight.add_(1)
    readback.drain()
    assert plain(got) == [[1.0, 1.0]]


@pytest.mark.parametrize("here", [np.zeros(2), torch.zeros(2).to_sparse()], ids=["array", "sparse tensor"])
def test_a_value_on_the_host_is_that_of_the_request_too(device: FakeDevice, readback: Readback, here: Any) -> None:
    got: list[Any] = []
    readback.request([on_device(0.5), here], got.append)
    here += here + 1 if isinstance(here, np.ndarray) else torch.ones(2).to_sparse()
    readback.drain()
    assert torch.as_tensor(got[0][1]).to_dense().tolist() == [0.0, 0.0]


def test_a_list_that_is_changed_after_the_request_arrives_as_it_was(device: FakeDevice, readback: Readback) -> None:
    losses, got = [on_device(0.5)], list[Any]()
    readback.request(losses, got.append)
    losses.clear()
    readback.drain()
    assert plain(got) == [[0.5]]


def test_a_value_that_arrived_can_be_written_to(device: FakeDevice, readback: Readback) -> None:
    one, other = drained(readback, [on_device(0.5), on_device(0.5)])
    one += 1
    assert (one.item(), other.item()) == (1.5, 0.5)


def test_a_value_that_arrived_is_passed_on_at_once_if_it_is_requested_again(
    device: FakeDevice, readback: Readback
) -> None:
    got: list[Any] = []
    readback.request(drained(readback, on_device(0.5)), got.append)
    assert plain(got) == [0.5]


class Marked(torch.Tensor):
    """A subclass of Tensor."""


@pytest.mark.parametrize(
    "value", [torch.tensor([0.0, 1.0]).to_sparse(), torch.tensor([0.0, 1.0]).as_subclass(Marked)], ids=["sparse", "own"]
)
def test_a_tensor_without_one_block_of_memory_is_waited_for(device: FakeDevice, readback: Readback, value: Any) -> None:
    assert drained(readback, value).to_dense().tolist() == [0.0, 1.0]
    assert (device.copies, device.waits) == (0, 1)


def test_elapsed_time_is_that_of_the_device(readback: Readback, clock: FakeClock) -> None:
    cpu = torch.device("cpu")
    with FakeDevice(lag=2, speed=3.0):
        begin = DeviceTimestamp(cpu)
        clock.advance(1.5)
        assert drained(readback, {"secs": DeviceDuration(begin, DeviceTimestamp(cpu))}) == {"secs": 4.5}


def test_to_host_waits(device: FakeDevice) -> None:
    device.lag = 1
    assert plain(to_host([torch.ones(2), 3])) == [[1.0, 1.0], 3]
    assert device.waits == 1


# -- draining and errors ----------------------------------------------------------------------------------------------


def test_draining_waits_for_everything(readback: Readback) -> None:
    got: list[float] = []
    with FakeDevice(FAR) as device:
        for value in range(40):
            readback.request(on_device(float(value)), got.append)
            readback.end_run()
        readback.drain()
        assert device.waits == device.batches == 3
    assert plain(got) == [float(value) for value in range(40)]


def test_draining_an_idle_readback_does_nothing(device: FakeDevice, readback: Readback) -> None:
    readback.drain()
    assert device.batches == 0


def test_a_request_on_a_device_is_answered_after_leaving_it(readback: Readback) -> None:
    got: list[Any] = []
    with FakeDevice(FAR):
        readback.request(on_device(0.5), got.append)
    readback.drain()
    assert plain(got) == [0.5]


def raising(error: BaseException) -> Callable[[Any], None]:
    def callback(_: Any) -> None:
        raise error

    return callback


def test_an_error_in_a_callback_names_the_hook_and_the_step_of_the_value(
    device: FakeDevice, readback: Readback
) -> None:
    readback.request(on_device(0.5), raising(ValueError("on purpose")), "MyHook()", 7)
    with pytest.raises(ValueError, match="on purpose") as caught:
        readback.drain()
    assert caught.value.__notes__ == ["torchhooks: in a when_ready callback of MyHook(), for step 7"]


def test_an_error_in_a_callback_does_not_affect_the_others(device: FakeDevice, readback: Readback) -> None:
    got: list[float] = []
    readback.request(on_device(1.0), raising(ValueError()))
    readback.request(on_device(2.0), got.append, max_lag_runs=0)
    with pytest.raises(ValueError):  # noqa: PT011
        readback.end_run()
    assert readback.waiting
    readback.drain()
    assert plain(got) == [2.0]


def test_several_errors_are_raised_as_a_group(device: FakeDevice, readback: Readback) -> None:
    for error in (ValueError("one"), KeyError("two")):
        readback.request(on_device(0.5), raising(error))
    with pytest.raises(ExceptionGroup) as caught:
        readback.drain()
    assert list(map(repr, caught.value.exceptions)) == ["ValueError('one')", "KeyError('two')"]


def test_after_an_interrupt_close_calls_the_other_callbacks(device: FakeDevice, readback: Readback) -> None:
    got: list[float] = []
    readback.request(on_device(1.0), raising(KeyboardInterrupt()))
    readback.request(on_device(2.0), got.append)
    with pytest.raises(KeyboardInterrupt):
        readback.drain()
    readback.close()
    assert plain(got) == [2.0]


class Breaking(FakeDevice):
    """A device whose first copy fails."""

    broken = True

    def start(self, tensors: Sequence[torch.Tensor], stream: Any) -> Any:
        if self.broken:
            self.broken = False
            raise MemoryError("no room for the copies")
        return super().start(tensors, stream)


def test_an_error_of_a_copy_is_raised_and_does_not_affect_other_requests(readback: Readback) -> None:
    got: list[float] = []
    with Breaking():
        readback.request(on_device(1.0), got.append, max_lag_runs=0)
        with pytest.raises(MemoryError):
            readback.end_run()
        readback.request(on_device(2.0), got.append)
        readback.close()
    assert plain(got) == [2.0]


def test_a_callback_can_make_a_request(device: FakeDevice, readback: Readback) -> None:
    got: list[Any] = []
    readback.request(on_device(1.0), lambda first: readback.request([first, on_device(2.0)], got.append))
    readback.close()
    assert plain(got) == [[1.0, 2.0]]


def test_a_request_by_a_callback_is_attributed_to_its_hook(device: FakeDevice, readback: Readback) -> None:
    def ask_again(_: Any) -> None:
        readback.request(on_device(2.0), raising(ValueError()), "the last hook of the run", 9)

    readback.request(on_device(1.0), ask_again, "MyHook()", 7)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        readback.drain()
    assert caught.value.__notes__ == ["torchhooks: in a when_ready callback of MyHook(), for step 7"]


@pytest.mark.parametrize("value", [0.5, torch.ones(2)], ids=repr)
def test_a_closed_readback_refuses(device: FakeDevice, readback: Readback, value: Any) -> None:
    readback.close()
    with pytest.raises(LifecycleError, match="the loop is closed"):
        readback.request(value, print)


# -- in a loop --------------------------------------------------------------------------------------------------------


class Reader(SessionRunHook):
    """Requests the loss in every run and records its step, its value, and the step at which it arrived."""

    def __init__(self, max_lag_runs: int | None = None, fails_for: Sequence[int] = ()) -> None:
        self.max_lag_runs, self.fails_for = max_lag_runs, fails_for

    def begin(self) -> None:
        self.read: list[tuple[int, float]] = []
        self.came_at: list[int] = []
        self.read_at_end = -1
        self.context: SessionRunContext | None = None

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs("loss")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.context = run_context
        note = partial(self.note, run_context.session.global_step)
        run_context.when_ready(run_values.results, note, max_lag_runs=self.max_lag_runs)

    def note(self, step: int, loss: torch.Tensor) -> None:
        assert self.context is not None
        self.read.append((step, round(loss.item(), 4)))
        self.came_at.append(self.context.session.global_step)
        if step in self.fails_for:
            raise ValueError(f"on purpose, {step}")

    def end(self, session: Any) -> None:
        self.read_at_end = len(self.read)

    def __repr__(self) -> str:
        return "Reader()"


LOSSES = [0.5, 0.25, 0.125]
READ = [(1, 0.5), (2, 0.25), (3, 0.125)]


def test_every_value_has_arrived_when_end_is_called() -> None:
    reader = Reader()
    with FakeDevice(FAR):
        trace(reader, losses=LOSSES)
    assert (reader.read, reader.read_at_end) == (READ, 3)


@pytest.mark.parametrize("lag", [1, FAR])
@pytest.mark.parametrize("others", [[], [RecordingHook(raises={("before_run", 4): ValueError})]], ids=["step", "hook"])
def test_values_in_flight_when_a_run_fails_arrive(lag: int, others: list[SessionRunHook]) -> None:
    reader = Reader()
    with FakeDevice(lag):
        traced = trace(reader, *others, losses=[*LOSSES, ValueError], catch=ValueError)
    assert isinstance(traced.error, ValueError)
    assert reader.read == READ


def test_values_requested_by_a_failed_run_arrive() -> None:
    reader, fails = Reader(), RecordingHook(raises={("after_run", 3): ValueError})
    with FakeDevice(FAR):
        trace(reader, fails, losses=LOSSES, catch=ValueError)
    assert reader.read == READ


def test_an_error_in_a_callback_is_raised_by_the_run_that_called_it() -> None:
    reader = Reader(max_lag_runs=1, fails_for=[1])
    with FakeDevice(FAR):
        traced = trace(RecordingHook(), reader, losses=[*LOSSES, 0.0], catch=ValueError)
    assert traced.steps == [1]
    assert traced.error is not None
    assert traced.error.__notes__ == ["torchhooks: in a when_ready callback of Reader() (hook 1), for step 1"]


def test_values_after_an_error_in_a_callback_are_passed_on_when_the_loop_closes() -> None:
    reader = Reader(fails_for=[1])
    with FakeDevice(FAR), pytest.raises(ValueError, match="on purpose, 1"):
        trace(reader, losses=LOSSES)
    assert reader.read == READ


def test_errors_in_callbacks_on_close_are_raised_as_a_group_and_no_end_is_called() -> None:
    reader = Reader(fails_for=[1, 3])
    with FakeDevice(FAR), pytest.raises(ExceptionGroup) as caught:
        trace(reader, losses=LOSSES)
    assert list(map(str, caught.value.exceptions)) == ["on purpose, 1", "on purpose, 3"]
    assert reader.read_at_end == -1


def test_a_context_refuses_requests_once_the_loop_is_closed() -> None:
    reader = Reader()
    trace(reader, losses=LOSSES)
    assert reader.context is not None
    with pytest.raises(LifecycleError, match="the loop is closed"):
        reader.context.when_ready(0.5, print)


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_a_hook_gets_its_values_within_its_bound(bound: int) -> None:
    reader = Reader(max_lag_runs=bound)
    with FakeDevice(FAR):
        trace(reader, losses=[0.5] * 9)
    assert all(came <= step + bound for step, came in enumerate(reader.came_at, 1))


class Asking(SessionRunHook):
    """Requests the weight of the model itself."""

    def begin(self) -> None:
        self.got: list[Any] = []

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        assert run_context.session.model is not None
        run_context.when_ready(run_context.session.model.weight, self.got.append)


def test_the_next_step_does_not_change_a_value_in_flight() -> None:
    model, asking = torch.nn.Linear(1, 1), Asking()
    torch.nn.init.zeros_(model.weight)

    def step() -> None:
        with torch.no_grad():
            model.weight.add_(1)

    with FakeDevice(FAR), MonitoredLoop(step, model, hooks=[asking]) as loop:
        for _ in range(3):
            loop.run()
    assert plain(asking.got) == [[[1.0]], [[2.0]], [[3.0]]]


# -- hooks that report, on a device -----------------------------------------------------------------------------------


def test_a_line_has_the_values_and_the_seconds_of_its_run() -> None:
    with FakeDevice(lag=2):
        lines = trace(LoggingTensorHook(["loss", "global_step"], every_n_iter=1), losses=LOSSES, secs=2.0).lines
    assert [text for _, text in lines] == [
        "loss = 0.5, global_step = 1",
        "loss = 0.25, global_step = 2 (2.000 sec)",
        "loss = 0.125, global_step = 3 (2.000 sec)",
    ]


def test_a_point_has_the_value_and_the_step_of_its_run() -> None:
    writer = RecordingWriter()
    with FakeDevice(lag=2):
        trace(SummarySaverHook(1, summary_writer=writer, summary_op="loss"), losses=LOSSES)
    assert writer.scalars == {"loss": READ}


def test_a_point_has_the_wall_time_of_its_run(tmp_path: Path) -> None:
    hooks = [SummarySaverHook(1, output_dir=tmp_path, summary_op="loss")]
    times = [time.time()]
    with FakeDevice(FAR), MonitoredLoop(lambda: torch.tensor(0.5), hooks=hooks) as loop:
        for _ in range(3):
            loop.run()
            times.append(time.time())
    points = read(tmp_path).Scalars("loss")
    assert all(times[point.step - 1] <= point.wall_time <= times[point.step] for point in points)


class World:
    """The hooks of one loop and what they report to: each has its own writer, tag and list."""

    def __init__(self) -> None:
        self.writers: list[RecordingWriter] = []
        self.readers: list[Reader] = []

    def writer(self) -> RecordingWriter:
        self.writers.append(RecordingWriter())
        return self.writers[-1]

    def hook(self, kind: str, period: int) -> SessionRunHook:
        if kind == "lines":
            return LoggingTensorHook({f"every {period}": "loss", "twice": lambda loss: loss * 2}, every_n_iter=period)
        if kind == "points":
            return SummarySaverHook(period, summary_writer=self.writer(), summary_op={"loss": "loss"})
        if kind == "rates":
            return StepCounterHook(period, summary_writer=self.writer())
        if kind == "nan":
            return NanTensorHook("loss", max_lag_steps=period)
        self.readers.append(Reader(max_lag_runs=period))
        return self.readers[-1]


def outcome(recipe: list[tuple[str, int]], losses: list[Any], secs: float, stop: int) -> dict[str, Any]:
    """Return everything that the hooks report about a loop, with the log lines grouped by hook."""
    world = World()
    hooks = [world.hook(kind, period) for kind, period in recipe]
    traced = trace(
        *hooks,
        StopAtStepHook(last_step=stop),
        losses=losses,
        secs=secs,
        catch=ValueError,
        model=torch.nn.Linear(1, 1),
    )
    by_hook: dict[str, list[str]] = {}
    for _, text in traced.lines:
        by_hook.setdefault(text.split(":" if text.startswith("global_step/sec") else " =")[0], []).append(text)
    return {
        "lines": by_hook,
        "records": [writer.records for writer in world.writers],
        "read": [reader.read for reader in world.readers],
        "steps": traced.steps,
        "stop_reason": traced.stop_reason,
        "error": repr(traced.error),
    }


kinds = st.tuples(st.sampled_from(["lines", "points", "rates", "nan", "reader"]), st.integers(1, 5))


@examples(200)
@given(
    recipe=st.lists(kinds, max_size=5, unique=True),
    losses=st.lists(st.sampled_from([0.5, 0.25, 2.0, INF] * 4 + [ValueError]), max_size=40),
    secs=st.sampled_from([0.0, 0.02, 1.0]),
    lag=st.sampled_from([0, 1, 2, 5, 20, FAR]),
    stop=st.integers(1, 40),
)
def test_a_device_changes_nothing_that_hooks_report(
    recipe: list[tuple[str, int]], losses: list[Any], secs: float, lag: int, stop: int
) -> None:
    with FakeDevice(lag):
        late = outcome(recipe, losses, secs, stop)
    assert late == outcome(recipe, losses, secs, stop)


# -- NanTensorHook on a device ----------------------------------------------------------------------------------------


def nan_trace(
    hook: SessionRunHook, losses: Sequence[Any], lag: int = 3, others: Sequence[SessionRunHook] = ()
) -> tuple[list[int], str, list[str]]:
    """Return the steps of a loop, its error or the reason why it stopped, and its log lines."""
    with FakeDevice(lag):
        traced = trace(hook, *others, losses=losses, catch=NanLossDuringTrainingError)
    why = traced.stop_reason if traced.error is None else str(traced.error).split(".")[0]
    return traced.steps, str(why), [text for _, text in traced.lines]


@pytest.mark.parametrize("where", [1, 2, 7, 8])
@pytest.mark.parametrize("lag", [0, 3])
def test_the_error_names_the_step_of_the_nan(where: int, lag: int) -> None:
    losses = [0.1] * (where - 1) + [NAN] + [0.1] * 30
    steps, why, _ = nan_trace(NanTensorHook("loss"), losses, lag)
    assert why == f"loss is NaN at step {where}"
    assert len(steps) < where + lag + 3


def test_in_stop_mode_the_message_names_the_step_of_the_nan() -> None:
    steps, why, lines = nan_trace(NanTensorHook("loss", fail_on_nan_loss=False), [0.1, NAN] + [0.1] * 30)
    assert why == "NanTensorHook: loss is NaN at step 2"
    assert lines == ["loss is NaN at step 2: training stops"]
    assert steps[-1] < 9


@pytest.mark.parametrize("fail", [True, False])
def test_without_a_lag_it_is_as_exact_as_on_the_cpu(fail: bool) -> None:
    losses = [0.1, NAN, 0.1, 0.1]
    hook = NanTensorHook("loss", fail, max_lag_steps=0)
    here = trace(hook, losses=losses, catch=NanLossDuringTrainingError)
    with FakeDevice(FAR) as device:
        there = trace(hook, losses=losses, catch=NanLossDuringTrainingError)
    assert (there.steps, there.stop_reason, there.lines) == (here.steps, here.stop_reason, here.lines)
    assert device.waits == 2


@pytest.mark.parametrize("bound", [1, 2, 5])
def test_a_nan_is_noticed_within_the_bound(bound: int) -> None:
    steps, _, _ = nan_trace(NanTensorHook("loss", max_lag_steps=bound), [0.1, NAN] + [0.1] * 30, FAR)
    assert 1 <= len(steps) <= 1 + bound


def test_looking_for_nans_never_waits() -> None:
    with FakeDevice(lag=3) as device, MonitoredLoop(lambda: torch.tensor(0.1), hooks=[NanTensorHook("loss")]) as loop:
        for _ in range(50):
            loop.run()
        assert device.waits == 0


def test_a_nan_in_the_last_run_fails_the_loop_when_it_closes() -> None:
    other = RecordingHook()
    steps, why, _ = nan_trace(NanTensorHook("loss"), [0.1, NAN], FAR, [other])
    assert (steps, why) == ([1, 2], "loss is NaN at step 2")
    assert [method for method, *_ in other.calls if method in ("end", "teardown")] == ["teardown"]


def test_a_nan_in_the_last_run_logs_a_warning_in_stop_mode() -> None:
    other = RecordingHook()
    _, why, lines = nan_trace(NanTensorHook("loss", fail_on_nan_loss=False), [0.1, NAN], FAR, [other])
    assert (why, lines) == ("data ended", ["loss is NaN at step 2: training stops"])
    assert ("end", 2) in other.calls


class Operators(TorchDispatchMode):
    """Lists the operators that hooks call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in ("detach", "alias"):  # views, which launch nothing
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def launched(*hooks: SessionRunHook, value: Any, runs: int = 4) -> tuple[list[str], int]:
    """Return the operators that hooks call in the last of ``runs``, and how many tensors are copied for each run."""
    values = [torch.tensor(value) for _ in range(runs)]
    losses = iter(values)
    with FakeClock(), FakeDevice(FAR) as device, MonitoredLoop(lambda: next(losses), hooks=hooks) as loop:
        for _ in range(runs - 1):
            loop.run()
        with Operators() as operators:
            loop.run()
        names = operators.names.copy()
    return names, device.copies // runs


def test_a_number_is_checked_on_the_host_in_the_copy_that_other_hooks_request() -> None:
    writing = SummarySaverHook(1, summary_writer=RecordingWriter(), summary_op={"loss": "loss"})
    assert launched(NanTensorHook("loss", also_inf=True), writing, value=0.5) == (["clone"], 1)


def test_checking_a_number_that_nothing_else_requests_takes_one_kernel() -> None:
    assert launched(NanTensorHook("loss", also_inf=True), value=0.5) == (["clone"], 1)


def test_a_large_value_is_checked_on_the_device_without_a_copy_of_it() -> None:
    names, copies = launched(NanTensorHook("loss"), value=[0.5, 0.5])
    assert "clone" not in names
    assert copies == 1


def test_a_value_that_grows_and_shrinks_is_checked_in_every_run() -> None:
    for where in range(6):
        losses: list[Any] = [torch.tensor([0.5] * count) for count in (1, 1, 2, 2, 1, 1)]
        losses[where][0] = NAN
        assert nan_trace(NanTensorHook("loss"), losses)[1] == f"loss is NaN at step {where + 1}"


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([[0.1, NAN], [0.1, 0.1]]),
        {"a": torch.tensor(0.1), "b": torch.tensor([0.1, NAN])},
        {"a": torch.tensor(NAN), "b": torch.tensor([INF, 0.1])},
        {"a": torch.tensor(0.1), "b": NAN},
        {"a": torch.tensor(0.1), "b": np.array([NAN])},
        {"a": torch.tensor(complex(0, NAN)), "b": torch.tensor(3)},
    ],
    ids=repr,
)
def test_one_nan_anywhere_in_the_watched_value_is_enough(value: Any) -> None:
    fetch = ["a", "b"] if isinstance(value, dict) else "loss"
    _, why, _ = nan_trace(NanTensorHook(fetch), [value])
    assert why.endswith("is NaN at step 1")


@pytest.mark.parametrize(("value", "kind"), [(INF, "infinite"), (-INF, "infinite"), (NAN, "NaN"), (0.5, None)])
def test_infinity_counts_with_also_inf(value: float, kind: str | None) -> None:
    _, why, _ = nan_trace(NanTensorHook("loss", also_inf=True), [0.1, value])
    assert why == ("data ended" if kind is None else f"loss is {kind} at step 2")


def test_infinity_does_not_count_by_default() -> None:
    assert nan_trace(NanTensorHook("loss"), [INF] * 5)[1] == "data ended"


@pytest.mark.parametrize("fail", [False, True])
def test_many_nans_are_reported_once(fail: bool) -> None:
    _, _, lines = nan_trace(NanTensorHook("loss", fail), [0.1] + [NAN] * 9)
    assert lines == [f"loss is NaN at step 2: training {'fails' if fail else 'stops'}"]
