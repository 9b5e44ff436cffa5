"""AcceleratorCopier: which device, stream and memory it uses, what it does for CUDA only, and what interrupts it."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import simulated
from support.accelerators import DEVICE, keep_busy, no_waits
from support.devices import FakeDevice
from support.events import read

from torchhooks import (
    CheckpointSaverHook,
    Due,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    Saver,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    SummarySaverHook,
    list_checkpoints,
    running_mean,
    summary,
)
from torchhooks.device import accelerator
from torchhooks.device.accelerator import AcceleratorCopier, Piece, Ring, _Event, copier_of, has_float64, host
from torchhooks.device.readback import MAX_BYTES, DeviceDuration, DeviceTimestamp, Readback
from torchhooks.testing import RecordingWriter

needs_simulation = pytest.mark.skipif(DEVICE != simulated.NAME, reason="needs pytest --simulated")

# -- on CUDA ----------------------------------------------------------------------------------------------------------

ONE = torch.device("cuda", 1)


class SimulatedCuda:
    """What events use of ``torch.cuda``: the current device of each thread.

    Attributes:
        log: what was done, each with the index of the device that was current: ``("query", 1)``.
        blocking: for each event, whether a thread that waits for it sleeps.
        done: whether queries find that the device has completed its work.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, int]] = []
        self.blocking: list[bool] = []
        self.done = True
        self._current = threading.local()
        patch.setattr(torch.cuda, "device", self.on_device)
        patch.setattr(torch.cuda, "Event", self.new_event)

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        before = self.current_device
        self._current.device = device.index
        try:
            yield
        finally:
            self._current.device = before

    @property
    def current_device(self) -> int:
        """The current device of this thread: 0 in a new one, as in CUDA."""
        return getattr(self._current, "device", 0)

    def new_event(self, enable_timing: bool = False, blocking: bool = False) -> SimulatedEvent:
        self.blocking.append(blocking)
        return SimulatedEvent(self)

    def note(self, what: str) -> None:
        self.log.append((what, self.current_device))


class SimulatedEvent:
    def __init__(self, cuda: SimulatedCuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.cuda.note("record")

    def query(self) -> bool:
        self.cuda.note("query")
        return self.cuda.done

    def synchronize(self) -> None:
        self.cuda.note("synchronize")

    def elapsed_time(self, end: SimulatedEvent) -> float:
        self.cuda.note("elapsed_time")
        return 250.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    return SimulatedCuda(monkeypatch)


def in_another_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_thread_that_waits_stays_on_the_device_of_the_event(cuda: SimulatedCuda) -> None:
    event = _Event(ONE)
    cuda.done = False
    in_another_thread(event.done)
    in_another_thread(event.wait)
    assert cuda.log == [("record", 1), ("query", 1), ("query", 1), ("synchronize", 1)]


def test_an_event_that_has_passed_is_not_synchronized(cuda: SimulatedCuda) -> None:
    _Event(ONE).wait()
    assert ("synchronize", 1) not in cuda.log


def test_the_time_between_two_events_is_read_on_their_device(cuda: SimulatedCuda) -> None:
    start, end = _Event(ONE), _Event(ONE)
    assert end.secs_since(start) == 0.25
    assert cuda.log[-1] == ("elapsed_time", 1)


def test_a_thread_that_waits_for_an_event_sleeps(cuda: SimulatedCuda) -> None:
    _Event(ONE)
    assert cuda.blocking == [True]


# -- memory -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=60))
def test_pieces_of_a_ring_never_overlap(moves: list[tuple[bool, int]]) -> None:
    ring = Ring(torch.zeros(1024, dtype=torch.uint8))
    taken: list[Piece] = []
    for takes, number in moves:
        if takes:
            piece = ring.take(number)
            if piece is not None:
                assert number <= piece.stop - piece.start
                assert piece.stop <= 1024
                assert piece.start % 64 == 0
                assert all(piece.stop <= other.start or other.stop <= piece.start for other in taken)
                taken.append(piece)
        elif taken:
            taken.pop(number % len(taken)).give_back()
    for piece in taken:
        piece.give_back()
    assert ring.take(1024) is not None


def prepared(nbytes: int) -> AcceleratorCopier:
    copier = AcceleratorCopier()
    copier.prepare(nbytes)
    return copier


def is_whole(copier: AcceleratorCopier, nbytes: int) -> bool:
    """Return whether no piece of the memory of ``copier`` is lost, after waiting for the device."""
    torch.accelerator.synchronize()
    ring = copier._ring  # noqa: SLF001 - otherwise a lost piece shows only when all are
    return ring is not None and ring.take(nbytes) is not None


def values(number: int = 3, numel: int = 100) -> list[torch.Tensor]:
    return [torch.full((numel + each,), float(each), device=DEVICE) for each in range(number)]


def current_stream() -> Any:
    return torch.accelerator.current_stream()


@pytest.mark.accelerator
def test_a_transfer_that_is_dropped_gives_its_memory_back_when_its_copies_are_done() -> None:
    copier = prepared(4096)
    keep_busy(0.5)
    copier.start(values(), current_stream())  # and dropped at once
    ring = copier._ring  # noqa: SLF001 - whether it is given back too early
    assert ring is not None
    assert ring.take(4096) is None
    assert is_whole(copier, 4096)


@pytest.mark.accelerator
def test_a_readback_that_is_dropped_loses_no_memory() -> None:
    with own_copier(8192) as copier:
        readback = Readback()
        readback.request(values(), print)
        readback.send()
        del readback
        gc.collect()
        assert is_whole(copier, 8192)


@contextmanager
def own_copier(nbytes: int) -> Iterator[AcceleratorCopier]:
    """Use a copier of its own, with so much memory, and the host that knows of no other one."""
    copier = prepared(nbytes)
    with host.simulating(DEVICE, copier, host.holds):
        yield copier


@pytest.mark.accelerator
def test_a_transfer_that_cannot_be_started_loses_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    copier, real = prepared(4096), accelerator.pack

    def failing(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], torch.Tensor]]:
        yield next(real(tensors))
        raise MemoryError("no memory for the others")

    monkeypatch.setattr(accelerator, "pack", failing)
    with pytest.raises(MemoryError):
        copier.start(values(), current_stream())
    gc.collect()
    assert is_whole(copier, 4096)


@pytest.mark.accelerator
def test_what_the_memory_has_no_room_for_is_copied_on_another_stream_than_that_of_the_step() -> None:
    copier, value = prepared(1024), torch.arange(2000.0, device=DEVICE)
    transfer = copier.start([value], current_stream())
    transfer.wait()
    keep_busy(0.5)  # the next step
    (came,) = transfer.tensors()
    assert not current_stream().query()
    assert came.tolist() == list(range(2000))


@pytest.mark.accelerator
def test_late_copies_share_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    copier, made, real = prepared(1024), list[torch.device](), accelerator.private_stream

    def counted(device: torch.device) -> torch.Stream:
        made.append(device)
        return real(device)

    monkeypatch.setattr(accelerator, "private_stream", counted)
    for _ in range(100):
        transfer = copier.start([torch.ones(2000, device=DEVICE)], current_stream())
        transfer.wait()
        transfer.tensors()
    assert len(made) == 1


@pytest.mark.accelerator
def test_threads_can_wait_for_late_copies_at_the_same_time() -> None:
    copier, step, right = prepared(1024), current_stream(), list[bool]()

    def fetch(number: int) -> None:
        for _ in range(50):
            transfer = copier.start([torch.full((3000,), float(number), device=DEVICE)], step)
            transfer.wait()
            right.append(bool(transfer.tensors()[0].eq(number).all()) and current_stream() == step)

    threads = [threading.Thread(target=fetch, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 200


# -- an interruption --------------------------------------------------------------------------------------------------


class Interrupted(FakeDevice):
    """A device for which the first wait is interrupted by Ctrl-C."""

    def note_wait(self) -> None:
        super().note_wait()
        if self.waits == 1:
            raise KeyboardInterrupt


def test_callbacks_of_a_wait_that_is_interrupted_are_called_by_the_next_one() -> None:
    got: list[float] = []
    with Interrupted(lag=1000):
        readback = Readback()
        for value in (1.0, 2.0):
            readback.request(torch.tensor(value), lambda value: got.append(value.item()))
        with pytest.raises(KeyboardInterrupt):
            readback.drain()
        readback.drain()
    assert got == [1.0, 2.0]


# -- which devices have a copier --------------------------------------------------------------------------------------


def test_the_cpu_has_no_copier() -> None:
    assert host.copier("cpu") is None
    assert copier_of("meta") is None


@pytest.mark.accelerator
@pytest.mark.parametrize("lacks", ["pinned", "private_stream", "_Event"])
def test_without_what_the_copies_need_the_host_waits(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr(accelerator, lacks, refuse)
    assert copier_of(DEVICE) is None


@pytest.mark.accelerator
def test_a_type_of_device_can_be_waited_for_by_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copier_of(DEVICE) is not None
    monkeypatch.setattr(accelerator, "WAITED_FOR", {DEVICE})
    assert copier_of(DEVICE) is None


def test_values_of_mps_are_waited_for_by_default() -> None:
    assert {"mps"} == accelerator.WAITED_FOR


@pytest.mark.accelerator
def test_values_that_are_waited_for_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "WAITED_FOR", {DEVICE})
    monkeypatch.setattr(host, "_copiers", {"cpu": None})
    got: list[Any] = []
    Readback().request([value[0] for value in values()], got.append)
    assert got == [[0.0, 1.0, 2.0]]


# -- values -----------------------------------------------------------------------------------------------------------

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda base: base,
    "transposed": lambda base: base.T,
    "a column": lambda base: base[:, 1],
    "expanded": lambda base: base[0, :1].expand(5, 1),
    "one": lambda base: base[1, 2],
}


@pytest.mark.accelerator
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_value_is_that_of_its_request_when_it_is_updated_in_place(
    dtype: torch.dtype, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    here = torch.arange(12).reshape(3, 4).to(torch.float32).to(dtype)
    there, got, readback = here.to(DEVICE), list[torch.Tensor](), Readback()
    keep_busy()
    readback.request(layout(there), got.append)
    readback.send()
    there.zero_()
    readback.drain()
    assert got[0].dtype == dtype
    assert torch.equal(got[0].to(torch.complex128), layout(here).to(torch.complex128))


@pytest.mark.accelerator
def test_values_travel_through_the_memory_and_none_is_overwritten() -> None:
    readback, got = Readback(), list[float]()
    for run in range(200):
        if run % 7 == 6:
            keep_busy(0.002)
        value = torch.full((5000,), float(run), device=DEVICE)
        readback.request(value, lambda value: got.append(value[0].item()), max_lag_runs=20)
        readback.end_run()
    readback.drain()
    assert got == [float(run) for run in range(200)]


# -- what goes to the device ------------------------------------------------------------------------------------------


@needs_simulation
@pytest.mark.accelerator
def test_the_tables_of_histograms_reach_the_device_without_a_wait_and_from_pinned_memory() -> None:
    from torchhooks.summary import histograms

    histograms._edges_on.cache_clear()  # noqa: SLF001 - they are sent once per process
    value, expected = torch.linspace(-1, 1, 100), histograms.count(torch.linspace(-1, 1, 100))
    there, before = value.to(DEVICE), simulated.hazards()
    host.prepare(MAX_BYTES)
    with no_waits():
        keep_busy(0.05)
        counted = histograms.count(there)
    assert simulated.hazards() == before
    assert torch.equal(counted.bins.cpu(), expected.bins)


class MeanOfThree(SessionRunHook):
    """Requests a running mean, every third run."""

    def __init__(self, fetch: Any = "loss", weight: Any = None) -> None:
        self.request = SessionRunArgs(running_mean(fetch, weight))
        self.means: list[Any] = []

    def next_due(self) -> Due:
        return Due(runs=3)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return self.request

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        run_context.when_ready(run_values.results, lambda value: self.means.append(value.tolist()))


@needs_simulation
@pytest.mark.accelerator
def test_the_total_of_a_running_fetch_that_was_restored_reaches_the_device_from_pinned_memory(tmp_path: Path) -> None:
    before, hook, numbers = simulated.hazards(), MeanOfThree(), itertools.count(1)

    def step() -> dict[str, torch.Tensor]:
        return {"loss": torch.full((), float(next(numbers)), device=DEVICE)}

    for runs in (2, 3):
        saving = CheckpointSaverHook(tmp_path, save_steps=2)
        with MonitoredLoop(step, hooks=[hook, saving], checkpoint_dir=tmp_path) as loop:
            for _ in range(runs):
                loop.run()
    assert hook.means == [3.0]  # of five runs, two of them before the restore
    assert simulated.hazards() == before


@pytest.mark.accelerator
def test_weights_on_the_host_count_on_the_device_without_a_wait() -> None:
    hook = MeanOfThree(weight="n")
    values, weights = torch.tensor([1.0, 2.0, 6.0], device=DEVICE), (1, torch.tensor(2), torch.tensor([1.0]))
    outputs = iter([{"loss": value, "n": weight} for value, weight in zip(values, weights, strict=True)])
    with MonitoredLoop(lambda: next(outputs), hooks=[hook]) as loop:
        loop.run()
        with no_waits():
            keep_busy(0.05)
            loop.run()
            loop.run()
    assert hook.means == [2.75]


@needs_simulation
@pytest.mark.accelerator
def test_what_has_no_room_in_the_memory_is_sent_by_waiting() -> None:
    value, before = torch.arange(1000.0), simulated.hazards()
    assert torch.equal(prepared(64).send(value, torch.device(DEVICE, 0)).cpu(), value)
    assert torch.equal(host.send(value[3], torch.device(DEVICE, 0)).cpu(), value[3])
    assert simulated.hazards() == before


# -- times ------------------------------------------------------------------------------------------------------------


@pytest.mark.accelerator
def test_the_time_between_moments_on_two_streams_is_that_of_the_device() -> None:
    device, other = torch.device(DEVICE, torch.accelerator.current_device_index()), torch.Stream(device=DEVICE)
    keep_busy(0.2)
    start = DeviceTimestamp(device)
    with other:
        at_once = DeviceDuration(start, DeviceTimestamp(device))  # on a stream that has nothing to do
        keep_busy(0.4)
        later = DeviceDuration(start, DeviceTimestamp(device))
    later.wait()
    assert 0 <= at_once.secs() < 0.1
    assert later.secs() == pytest.approx(0.2, rel=0.3)


@pytest.mark.accelerator
def test_the_rate_of_runs_that_alternate_between_two_streams_is_that_of_the_device() -> None:
    writer, streams = RecordingWriter(), [torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)]
    work = itertools.cycle([0.04, 0.0001])  # of the runs on the first stream, and on the second
    counter = StepCounterHook(5, summary_writer=writer)
    with MonitoredLoop(lambda: keep_busy(next(work)), torch.nn.Linear(1, 1).to(DEVICE), hooks=[counter]) as loop:
        for run in range(31):
            with streams[run % 2]:
                loop.run()
    rates = [rate for _, rate in writer.scalars["global_step/sec"]]
    assert len(rates) == 6
    assert sum(5 / rate for rate in rates) == pytest.approx(15 * 0.04, rel=0.3)  # the time of the first stream


# -- what devices lack ------------------------------------------------------------------------------------------------


@pytest.fixture
def no_float64() -> Iterator[None]:
    if DEVICE != simulated.NAME:
        pytest.skip("needs pytest --simulated")
    simulated.support_float64(False)
    has_float64.cache_clear()
    yield
    simulated.support_float64(True)
    has_float64.cache_clear()


@pytest.mark.accelerator
def test_running_means_and_histograms_work_on_a_device_without_float64(no_float64: None, tmp_path: Path) -> None:
    hook, of_numbers = MeanOfThree(lambda output: output[0]), MeanOfThree(lambda output: output.sum())
    saving = SummarySaverHook(1, output_dir=str(tmp_path), summary_op=summary.histogram("values", "output"))
    with MonitoredLoop(lambda: {"output": torch.ones(5, device=DEVICE)}, hooks=[hook, of_numbers, saving]) as loop:
        loop.run()
        with no_waits():
            for _ in range(2):
                keep_busy(0.05)
                loop.run()
    assert (hook.means, of_numbers.means) == ([1.0], [5.0])
    assert [event.histogram_value.sum for event in read(tmp_path).Histograms("values")] == [5.0] * 3


# -- hooks ------------------------------------------------------------------------------------------------------------


def in_every_run(name: str, folder: Path) -> list[SessionRunHook]:
    """Return hooks that are due in every run."""
    writer = RecordingWriter()
    histograms = {name: summary.histogram(name, name) for name in ("0.weight", "0.bias")}
    saving = Saver(async_save=name == "async save")
    hooks: dict[str, SessionRunHook] = {
        "logging": LoggingTensorHook(["loss", "0.bias"], every_n_iter=1),
        "NaN guard": NanTensorHook(["loss", "0.weight"], also_inf=True),
        "histograms": SummarySaverHook(1, output_dir=str(folder), summary_op=histograms),
        "scalars": SummarySaverHook(1, summary_writer=writer, summary_op={"loss": "loss"}),
        "counter": StepCounterHook(1, summary_writer=writer, memory=True, tokens_per_step=10),
        "mean": MeanOfThree(),
    }
    if name in hooks:
        return [hooks[name]]
    if name == "six hooks":
        return list(hooks.values())
    return [CheckpointSaverHook(folder, save_steps=1, saver=saving)]


class Step:
    """A step of a small network, after ``secs`` of other work on the device."""

    def __init__(self, secs: float) -> None:
        self.secs = secs
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.batch = torch.randn(32, 8, device=DEVICE)

    def __call__(self) -> dict[str, torch.Tensor]:
        keep_busy(self.secs)
        self.optimizer.zero_grad()
        output = self.model(self.batch)
        loss = output.square().mean()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss, "output": output.detach()}


@pytest.mark.accelerator
@pytest.mark.parametrize("name", ["logging", "NaN guard", "histograms", "scalars", "counter", "mean", "six hooks"])
def test_no_hook_that_is_due_in_every_run_waits(name: str, tmp_path: Path) -> None:
    step = Step(0.01)
    with MonitoredLoop(step, step.model, step.optimizer, hooks=in_every_run(name, tmp_path)) as loop:
        loop.run()
        with no_waits():
            for _ in range(12):
                loop.run()


# -- random numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.accelerator
def test_a_step_that_draws_on_the_device_resumes_exactly(tmp_path: Path) -> None:
    def drawn(runs: int, folder: Path) -> list[list[float]]:
        got: list[list[float]] = []

        def step() -> None:
            got.append(torch.rand(3, device=DEVICE).tolist())

        with MonitoredLoop(step, hooks=[CheckpointSaverHook(folder, save_steps=1)], checkpoint_dir=folder) as loop:
            for _ in range(runs):
                loop.run()
        return got

    torch.manual_seed(0)
    whole = drawn(6, tmp_path / "whole")
    torch.manual_seed(0)
    first = drawn(3, tmp_path / "parts")
    torch.manual_seed(1)  # another process
    assert [*first, *drawn(3, tmp_path / "parts")] == whole


@pytest.mark.accelerator
def test_states_of_more_devices_than_there_are_are_dropped(tmp_path: Path) -> None:
    from torchhooks.common.random_states import random_states, set_random_states

    torch.rand(1, device=DEVICE)
    states = random_states()
    expected = torch.rand(3, device=DEVICE).tolist()
    states[DEVICE] += [states[DEVICE][0]] * 3
    set_random_states(states)
    assert torch.rand(3, device=DEVICE).tolist() == expected


# -- errors of the device ---------------------------------------------------------------------------------------------


@needs_simulation
@pytest.mark.accelerator
@pytest.mark.parametrize("waits", [False, True])
def test_an_error_of_the_device_comes_out_of_the_loop(waits: bool) -> None:
    def step() -> torch.Tensor:
        simulated.fail("an operator failed")
        return torch.ones((), device=DEVICE)

    def train() -> None:
        with MonitoredLoop(step, hooks=[NanTensorHook("loss", max_lag_steps=0 if waits else None)]) as loop:
            loop.run()

    with pytest.raises(torch.AcceleratorError, match="an operator failed"):
        train()


@pytest.mark.accelerator
def test_a_save_that_is_skipped_does_not_wait_for_the_device(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    step = Step(0.1)
    saving = CheckpointSaverHook(tmp_path, save_steps=1, async_save="skip")
    with MonitoredLoop(step, step.model, step.optimizer, hooks=[saving], checkpoint_dir=tmp_path) as loop:
        loop.run()
        torch.accelerator.synchronize()
        start = time.monotonic()
        with no_waits():
            for _ in range(6):
                loop.run()
            assert time.monotonic() - start < 0.45  # of 0.6 s that the device takes
    assert any("still being written" in text for _, text in lines)
    assert list_checkpoints(tmp_path)[-1].step == 7


@pytest.mark.accelerator
def test_a_save_has_the_weights_of_its_step(tmp_path: Path) -> None:
    weight, saver = torch.nn.Parameter(torch.zeros(100_000, device=DEVICE)), Saver(async_save=True)
    session = Session(torch.nn.ParameterList([weight]))
    paths = []
    with torch.no_grad():
        for step in range(1, 6):
            keep_busy(0.02)
            weight.fill_(step)
            paths.append(saver.save(session, tmp_path / "model.ckpt", step))
            weight.fill_(-1)
    saver.close()
    for step, path in enumerate(paths, 1):
        (saved,) = torch.load(f"{path}/state.pt", weights_only=True)["model"].values()
        assert saved.unique().tolist() == [step]
