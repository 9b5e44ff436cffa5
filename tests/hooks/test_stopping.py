"""Hooks that stop a loop, and one that delays its start."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.devices import FakeDevice
from support.dtensors import from_local, mesh_of_two

from torchhooks import (
    CheckpointSaverHook,
    Coordinator,
    EvaluationHook,
    FeedFnHook,
    FetchError,
    GlobalStepWaiterHook,
    LifecycleError,
    LooperThread,
    MonitoredLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    StopAtStepHook,
)
from torchhooks.common.timers import NEVER
from torchhooks.testing import RecordingHook, trace

NAN, INF = math.nan, math.inf


# -- StopAtStepHook ---------------------------------------------------------------------------------------------------


def test_a_loop_that_is_restored_at_its_last_step_makes_no_run_with_until_stop(tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        hooks = [CheckpointSaverHook(tmp_path, save_steps=5), StopAtStepHook(last_step=2)]
        with MonitoredLoop(lambda: runs.append(1), hooks=hooks, checkpoint_dir=tmp_path) as loop:
            for _ in loop.until_stop(range(8)):
                loop.run()
    assert (len(runs), loop.global_step) == (2, 2)


def test_the_stop_reason_names_the_hook_and_the_step() -> None:
    assert trace(StopAtStepHook(last_step=2), losses=[0.1] * 9).stop_reason == "StopAtStepHook: step 2"


class StepsInRun:
    """A step function whose runs count the given numbers of optimizer steps."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = list(counts)
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.0)

    def step(self) -> None:
        for _ in range(self.counts.pop(0)):
            self.optimizer.step()


@pytest.mark.parametrize(
    ("counts", "runs"), [([0, 0, 2, 0, 1, 1], 5), ([5, 1], 1), ([2, 2, 2], 2), ([0, 0, 0, 3], 4), ([1, 1, 1, 1], 3)]
)
def test_the_actual_step_decides_if_runs_count_no_step_or_several(counts: list[int], runs: int) -> None:
    training = StepsInRun(counts)
    hooks = [StopAtStepHook(last_step=3)]
    with MonitoredLoop(training.step, None, training.optimizer, hooks=hooks, step_unit="optimizer_step") as loop:
        while not loop.should_stop():
            loop.run()
    assert len(counts) - len(training.counts) == runs


def test_a_step_that_is_set_back_extends_the_loop() -> None:
    with MonitoredLoop(lambda: None, hooks=[StopAtStepHook(last_step=4)]) as loop:
        for run in loop.until_stop(range(20)):
            loop.run()
            if run == 2:
                loop.session.global_step = 0
    assert run == 6


def test_a_reused_hook_counts_from_the_first_step_of_the_second_loop() -> None:
    hook = StopAtStepHook(num_steps=2)
    trace(hook, losses=[0.1] * 9)
    assert trace(hook, losses=[0.1] * 9, start_step=50).steps == [51, 52]


@pytest.mark.parametrize("num_steps", [0, -1, 2.5, True, "10", NAN])
def test_rejects_an_invalid_number_of_steps(num_steps: Any) -> None:
    with pytest.raises(ValueError, match=f"num_steps={num_steps!r}:"):
        StopAtStepHook(num_steps)


@pytest.mark.parametrize("last_step", [2.0, True, False, "10", NAN])
def test_rejects_an_invalid_last_step(last_step: Any) -> None:
    with pytest.raises(ValueError, match=f"last_step={last_step!r}:"):
        StopAtStepHook(last_step=last_step)


def test_rejects_a_negative_last_step() -> None:
    with pytest.raises(ValueError, match="last_step=-1:"):
        StopAtStepHook(last_step=-1)


def test_a_step_can_be_any_kind_of_integer() -> None:
    assert trace(StopAtStepHook(last_step=np.int64(2)), losses=[0.1] * 9).steps == [1, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize("num_steps", [0, 5])
def test_rejects_both_arguments_and_shows_them(num_steps: int) -> None:
    with pytest.raises(ValueError, match=rf"StopAtStepHook\(num_steps={num_steps}, last_step=9\): give one .*not both"):
        StopAtStepHook(num_steps=num_steps, last_step=9)


def test_rejects_neither_argument() -> None:
    with pytest.raises(ValueError, match=r"^StopAtStepHook\(\): give one"):
        StopAtStepHook()


# -- NanTensorHook ----------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


def first_bad_run(value: Any, **arguments: Any) -> int | None:
    """Return after how many good runs a hook that checks ``value`` fails; ``None`` if it never does."""
    hook = NanTensorHook("watched", **arguments)
    losses = [{"watched": 0.5}, {"watched": value}, {"watched": 0.5}]
    seen = trace(hook, losses=losses, catch=NanLossDuringTrainingError)
    return None if seen.error is None else len(seen.steps)


def halves(dtype: torch.dtype, bad: float) -> torch.Tensor:
    return torch.tensor([0.5, bad, 0.5]).to(dtype)


WITH_NAN = {
    "float": NAN,
    "complex": complex(0.0, NAN),
    "numpy scalar": np.float32(NAN),
    "numpy float64": np.float64(NAN),
    "numpy 0-d": np.array(NAN),
    "numpy array": np.array([[0.5, NAN]]),
    "tensor": torch.tensor(NAN),
    "complex tensor": torch.tensor(complex(NAN, 0.0)),
    "tensor of one": torch.tensor([[NAN]]),
    "tensor of many": halves(torch.float32, NAN),
    "bfloat16": halves(torch.bfloat16, NAN),
    "half": halves(torch.float16, NAN),
    "float64": halves(torch.float64, NAN),
    "float8": halves(torch.float8_e4m3fn, NAN),
    "complex of many": torch.tensor([1.0, complex(NAN, 0.0)]),
    "sparse": halves(torch.float32, NAN).to_sparse(),
    "nan next to inf": torch.tensor([INF, NAN]),
    "nested": {"a": [0.5, Point(0.5, torch.tensor([NAN]))]},
    "with a gradient": torch.tensor(NAN, requires_grad=True),
}
WITH_INF = {
    "float": INF,
    "minus": -INF,
    "complex": complex(0.0, -INF),
    "numpy array": np.array([0.5, INF]),
    "tensor": torch.tensor(-INF),
    "bfloat16": halves(torch.bfloat16, INF),
    "nested": [0.5, {"a": torch.tensor([INF])}],
}
FINE = {
    "float": 0.5,
    "int": 7,
    "huge int": 10**400,
    "bool": True,
    "numpy int": np.int64(3),
    "numpy bools": np.array([True, False]),
    "int tensor": torch.tensor([1, 2]),
    "int tensor of one": torch.tensor(2**60),
    "bool tensor": torch.tensor([True, False]),
    "nothing at all": torch.ones(0),
    "empty list": [],
    "nested": Point([0.5], {"a": torch.ones(3)}),
}


@pytest.mark.parametrize("value", WITH_NAN.values(), ids=WITH_NAN)
def test_a_single_nan_is_found_in_any_kind_of_value(value: Any) -> None:
    assert first_bad_run(value) == 1


@pytest.mark.parametrize("value", WITH_INF.values(), ids=WITH_INF)
def test_an_infinity_counts_with_also_inf(value: Any) -> None:
    assert first_bad_run(value, also_inf=True) == 1


@pytest.mark.parametrize("value", FINE.values(), ids=FINE)
def test_finite_numbers_pass(value: Any) -> None:
    assert first_bad_run(value, also_inf=True) is None


@pytest.mark.parametrize(
    "value",
    [None, "nan", object(), np.array("nan"), np.array(None), [0.5, None]],
    ids=["None", "str", "object", "array of str", "array of None", "list with None"],
)
def test_a_value_without_numbers_is_an_error_that_says_what_to_watch(value: Any) -> None:
    with pytest.raises(TypeError, match=r"NanTensorHook got .*: watch numbers, tensors or arrays"):
        first_bad_run(value)


def test_checks_any_fetch() -> None:
    hook = NanTensorHook({"twice": lambda loss: loss * 2, "bias": "bias"})
    seen = trace(hook, losses=[0.5, NAN], model=torch.nn.Linear(1, 1), catch=NanLossDuringTrainingError)
    assert seen.steps == [1]


def test_the_error_names_the_fetch_the_step_and_the_way_out() -> None:
    with pytest.raises(NanLossDuringTrainingError, match=r"loss is NaN at step 8\. .*fail_on_nan_loss=False"):
        trace(NanTensorHook("loss"), losses=[NAN], start_step=7)


def test_the_error_distinguishes_an_infinity_from_nan() -> None:
    with pytest.raises(NanLossDuringTrainingError, match="loss is infinite at step 1"):
        trace(NanTensorHook("loss", also_inf=True), losses=[INF])


def test_the_error_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError):
        trace(NanTensorHook("loss"), losses=[NAN])


def test_the_failure_is_logged_as_an_error() -> None:
    seen = trace(NanTensorHook("loss"), losses=[NAN], catch=NanLossDuringTrainingError)
    assert seen.lines == [("ERROR", "loss is NaN at step 1: training fails")]


def test_stops_instead_of_failing_on_request() -> None:
    seen = trace(NanTensorHook("loss", fail_on_nan_loss=False), losses=[0.5, NAN, 0.5])
    assert (seen.steps, seen.stop_reason) == ([1, 2], "NanTensorHook: loss is NaN at step 2")


def test_a_stop_is_logged_as_a_warning() -> None:
    lines = trace(NanTensorHook("loss", fail_on_nan_loss=False), losses=[NAN]).lines
    assert lines == [("WARNING", "loss is NaN at step 1: training stops")]


def test_a_hook_that_found_nan_can_be_reused() -> None:
    hook = NanTensorHook("loss", fail_on_nan_loss=False)
    trace(hook, losses=[NAN])
    assert trace(hook, losses=[0.5, 0.5]).steps == [1, 2]


@pytest.mark.parametrize(
    ("name", "outputs", "times"),
    [
        ("loss", torch.tensor(1.0), 0),
        ("loss", torch.tensor([1.0], requires_grad=True), 0),
        ("loss", 1.0, 0),
        ("loss", {"loss": torch.tensor(1.0), "other": NAN}, 0),
        ("1", (NAN, 1.0), 0),
        ("loss", torch.ones(2), 9),
        ("loss", 1, 9),
        ("weight", torch.tensor(NAN), 9),
        ("x", torch.tensor(NAN), 9),
        (lambda loss: loss, torch.tensor(1.0), 9),
        (["loss"], torch.tensor(1.0), 9),
        (":output", torch.tensor(1.0), 9),
    ],
)
def test_joins_no_run_in_which_the_output_of_that_name_is_one_finite_number(
    name: Any, outputs: Any, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    before_run = NanTensorHook.before_run

    def counted(hook: NanTensorHook, run_context: SessionRunContext) -> SessionRunArgs:
        asked.append(run_context.session.global_step)
        return before_run(hook, run_context)

    monkeypatch.setattr(NanTensorHook, "before_run", counted)
    model = torch.nn.Linear(1, 1)

    def step(x: float) -> Any:
        model(torch.ones(1))
        return outputs

    with MonitoredLoop(step, model, hooks=[NanTensorHook(name)]) as loop:
        for _ in range(9):
            loop.run(0.5)
    assert len(asked) == times


@pytest.mark.parametrize("method", ["before_run", "after_run"])
def test_a_subclass_that_overrides_a_run_method_joins_every_run(method: str) -> None:
    runs: list[int] = []

    def own(hook: NanTensorHook, run_context: SessionRunContext, *values: Any) -> Any:
        runs.append(run_context.session.global_step)
        return getattr(NanTensorHook, method)(hook, run_context, *values)

    subclass = type("Own", (NanTensorHook,), {method: own})
    trace(subclass("loss"), losses=[0.5] * 3)
    assert len(runs) == 3


def test_an_output_mapping_needs_no_get() -> None:
    class Outputs:
        def __getitem__(self, name: str) -> float:
            return 1.0

        def __contains__(self, name: object) -> bool:
            return name == "loss"

    Mapping.register(Outputs)
    assert trace(NanTensorHook("loss"), losses=[Outputs()] * 3).steps == [1, 2, 3]


def test_an_output_that_is_missing_in_one_run_is_a_fetch_error() -> None:
    outputs = [{"loss": 1.0}, {"loss": 2.0}, {"other": 1.0}]
    seen = trace(NanTensorHook("loss"), losses=outputs, catch=FetchError)
    assert seen.steps == [1, 2]
    assert "NanTensorHook('loss') (hook 0) asked for 'loss', which does not exist" in str(seen.error)


def test_a_fed_value_takes_precedence_over_an_output_of_the_same_name() -> None:
    feeds = FeedFnHook(lambda: {"loss": NAN})
    with (
        pytest.raises(NanLossDuringTrainingError),
        MonitoredLoop(lambda loss: 1.0, hooks=[feeds, NanTensorHook("loss")]) as loop,
    ):
        loop.run()


@pytest.fixture
def mesh() -> Iterator[Any]:
    with mesh_of_two() as mesh:
        yield mesh


@pytest.mark.parametrize("device", [None, FakeDevice(lag=2)], ids=repr)
@pytest.mark.parametrize("placement", ["Shard(0)", "Partial()", "Replicate()"])
@pytest.mark.parametrize("number", [True, False])
def test_checking_distributed_tensors_calls_no_collective(
    number: bool, placement: str, device: FakeDevice | None, mesh: Any
) -> None:
    from torch.distributed.tensor.debug import CommDebugMode  # takes a second

    local = torch.tensor([0.5] if number else [0.5, 0.25])
    outputs = {name: from_local(local, mesh, placement) for name in "ab"}
    hook = NanTensorHook(["a", "b"], also_inf=True)
    with device or nullcontext(), CommDebugMode() as collectives:
        trace(hook, losses=[outputs] * 4, ranks=False)
    assert collectives.get_total_counts() == 0


@pytest.mark.parametrize("device", [None, FakeDevice(lag=2)], ids=repr)
def test_a_nan_in_the_local_part_of_a_distributed_tensor_is_noticed(device: FakeDevice | None, mesh: Any) -> None:
    good, bad = (from_local(torch.tensor([0.5, value]), mesh) for value in (0.5, NAN))
    with device or nullcontext():
        traced = trace(
            NanTensorHook("loss"), losses=[good, bad] + [good] * 9, catch=NanLossDuringTrainingError, ranks=False
        )
    assert str(traced.error).startswith("loss is NaN at step 2")


def test_a_result_is_no_nan_before_the_first_evaluation() -> None:
    results = [0.5, NAN]
    evaluation = EvaluationHook(lambda: {"loss": results.pop(0)}, every_n_steps=3)
    hooks = [evaluation, NanTensorHook(evaluation["loss"], fail_on_nan_loss=False)]
    with MonitoredLoop(bool, hooks=hooks) as loop:
        for _ in loop.until_stop(range(10)):
            loop.run()
    assert loop.stop_reason == "NanTensorHook: evaluation['loss'] is NaN at step 6"


# -- GlobalStepWaiterHook ---------------------------------------------------------------------------------------------


class Advances(SessionRunHook):
    """Advances the step in the background, as other workers would."""

    def __init__(self, up_to: int, raises: Exception | None = None) -> None:
        self.up_to, self.raises = up_to, raises

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        def advance() -> None:
            if session.global_step < self.up_to:
                session.global_step += 1
            elif self.raises is not None:
                raise self.raises

        LooperThread.loop(coord, 0.001, advance)


def first_step_seen(*hooks: SessionRunHook) -> int:
    seen = RecordingHook(stop_at=1)
    trace(*hooks, seen)
    return int(seen.calls[3][2])


def test_the_first_run_waits_for_the_step() -> None:
    assert first_step_seen(Advances(20), GlobalStepWaiterHook(20)) == 21


@pytest.mark.parametrize("step", [0, -5])
def test_zero_or_less_disables_the_wait(step: int) -> None:
    assert trace(GlobalStepWaiterHook(step), losses=[0.1]).lines == []


def test_a_step_that_was_already_reached_is_not_waited_for() -> None:
    assert trace(GlobalStepWaiterHook(5), losses=[0.1], start_step=5).lines == []


def test_the_wait_is_logged() -> None:
    lines = trace(GlobalStepWaiterHook(5), start_step=2, catch=LifecycleError).lines
    assert lines == [("INFO", "waiting for global step 5")]


def test_waits_in_the_first_run_only() -> None:
    hook = GlobalStepWaiterHook(3)
    with MonitoredLoop(lambda: None, hooks=[Advances(3), hook, RecordingHook(stop_at=2)]) as loop:
        loop.run()
        loop.session.global_step = 0
        loop.run()
    assert hook.next_due() == NEVER


def test_waiting_is_an_error_if_no_thread_can_advance_the_step() -> None:
    with pytest.raises(LifecycleError, match=r"GlobalStepWaiterHook\(5\): the global step is 2, and no thread"):
        trace(GlobalStepWaiterHook(5), start_step=2)


def test_waiting_is_an_error_once_the_thread_that_advanced_the_step_has_ended() -> None:
    class Ends(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            thread = threading.Thread(target=lambda: None)
            coord.register_thread(thread)
            thread.start()

    with pytest.raises(LifecycleError, match="no thread that is registered with the coordinator can advance it"):
        trace(Ends(), GlobalStepWaiterHook(5))


def test_a_thread_that_reaches_the_step_and_ends_is_no_error() -> None:
    class ReachesTheStep(threading.Thread):
        """Reaches the step between the two moments at which the hook looks at the step and at the threads."""

        session: Session

        def is_alive(self) -> bool:
            self.session.global_step = 5
            return False

    class Registers(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            thread = ReachesTheStep()
            thread.session = session
            coord.register_thread(thread)

    assert trace(Registers(), GlobalStepWaiterHook(5), losses=[0.1]).steps == [6]


def test_the_error_of_a_thread_ends_the_wait() -> None:
    with pytest.raises(OSError, match="gone"):
        trace(Advances(3, raises=OSError("gone")), GlobalStepWaiterHook(1000))


def test_a_stop_ends_the_wait_and_the_run_is_the_last() -> None:
    class Stops(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            LooperThread.loop(coord, 0.001, coord.request_stop)

    assert trace(Stops(), GlobalStepWaiterHook(1000), losses=[0.1] * 9).steps in ([], [1])


def test_waits_again_in_a_second_loop() -> None:
    hook = GlobalStepWaiterHook(3)
    trace(hook, losses=[0.1], start_step=3)
    assert first_step_seen(Advances(3), hook) == 4


@pytest.mark.parametrize("step", [None, 2.5, True, "10", NAN])
def test_rejects_an_invalid_step_to_wait_for(step: Any) -> None:
    with pytest.raises(ValueError, match=f"wait_until_step={step!r}: .* whole"):
        GlobalStepWaiterHook(step)


# -- all of them ------------------------------------------------------------------------------------------------------


def test_the_repr_shows_the_given_arguments_after_a_loop_too() -> None:
    hook = StopAtStepHook(num_steps=2)
    trace(hook, losses=[0.1] * 9)
    assert repr(hook) == "StopAtStepHook(num_steps=2)"
