"""SummarySaverHook: what it writes, when and where, and that TensorBoard reads it."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.events import read
from support.packages import import_or_skip
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from torchhooks import Coordinator, MonitoredLoop, Scaffold, StepCounterHook, SummarySaverHook, summary
from torchhooks.testing import RecordingWriter, trace

LOSS = {"loss": "loss"}


def written(losses: list[Any], *, start_step: int = 0, secs: float = 1.0, **arguments: Any) -> list[tuple[Any, ...]]:
    """Return what a hook wrote in a loop of its own, without the START."""
    writer = RecordingWriter()
    given: dict[str, Any] = {"summary_op": LOSS, "summary_writer": writer, **arguments}
    hook = SummarySaverHook(**given)
    trace(hook, losses=losses, start_step=start_step, secs=secs)
    return [record for record in writer.records if record[0] != "session_log"]


def steps(records: list[tuple[Any, ...]]) -> list[int]:
    return [record[-1] for record in records]


def events(folder: Path) -> list[Any]:
    return [event for file in sorted(folder.iterdir()) for event in EventFileLoader(str(file)).Load()]


# -- the learning rates of several groups ----------------------------------------------------------------------------


def rate_curves(groups: list[dict[str, Any]], op: Any, then: Any = None) -> dict[str, Any]:
    """Return the points of each curve of ``op`` in two runs, the second after ``then(optimizer)``."""
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], **group} for group in groups])
    writer = RecordingWriter()
    hook = SummarySaverHook(save_steps=1, summary_writer=writer, summary_op=op)
    with MonitoredLoop(lambda: 0.5, optimizer=optimizer, hooks=[hook]) as loop:
        loop.run()
        if then is not None:
            then(optimizer)
        loop.run()
    return dict(writer.scalars)


def set_first_rate(rate: float) -> Any:
    return lambda optimizer: optimizer.param_groups[0].update(lr=rate)


@pytest.mark.parametrize("op", ["lr", {"lr": "lr"}, summary.scalar("lr", "lr"), {"lr": lambda lr: lr}])
@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_each_group_has_a_curve_of_its_own_whether_the_rates_agree_or_not(op: Any, rate: float) -> None:
    curves = rate_curves([{"lr": 0.5}, {"lr": rate}], op, set_first_rate(0.25))
    assert curves == {"lr/0": [(1, 0.5), (2, 0.25)], "lr/1": [(1, rate), (2, rate)]}


def test_the_only_group_has_the_tag_itself() -> None:
    assert rate_curves([{"lr": 0.5, "name": "all"}], {"train/lr": "lr"}) == {"train/lr": [(1, 0.5), (2, 0.5)]}


@pytest.mark.parametrize(
    ("names", "tags"),
    [
        (["head", "body"], ["lr/head", "lr/body"]),
        (["head", None], ["lr/head", "lr/1"]),
        (["head", "head"], ["lr/0", "lr/1"]),
        (["1", None], ["lr/0", "lr/1"]),
        (["", "a\nb"], ["lr/0", "lr/1"]),
        ([3, "body"], ["lr/0", "lr/body"]),
    ],
)
def test_the_name_of_a_group_is_in_its_tag_if_it_is_usable_and_unique(names: Any, tags: list[str]) -> None:
    groups = [{"lr": 0.5, **({} if name is None else {"name": name})} for name in names]
    assert list(rate_curves(groups, "lr")) == tags


def test_a_group_that_is_added_later_gets_a_curve() -> None:
    curves = rate_curves(
        [{"lr": 0.5}],
        "lr",
        lambda optimizer: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.25}),
    )
    assert curves == {"lr": [(1, 0.5)], "lr/0": [(2, 0.5)], "lr/1": [(2, 0.25)]}


def test_rates_that_are_tensors_have_a_curve_each() -> None:
    curves = rate_curves([{"lr": torch.tensor(0.5)}, {"lr": torch.tensor(0.25)}], ["loss", "lr"])
    assert curves == {"loss": [(1, 0.5), (2, 0.5)], "lr/0": [(1, 0.5), (2, 0.5)], "lr/1": [(1, 0.25), (2, 0.25)]}


def test_tensorboard_reads_a_curve_for_each_group(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.5, 0.25)])
    hook = SummarySaverHook(save_steps=1, output_dir=tmp_path, summary_op=["loss", "lr"])
    with MonitoredLoop(lambda: 0.5, optimizer=optimizer, hooks=[hook]) as loop:
        loop.run()
    assert sorted(read(tmp_path).Tags()["scalars"]) == ["loss", "lr/0", "lr/1"]


# -- when -------------------------------------------------------------------------------------------------------------


def saved_with(moves: list[int | None], save_steps: int) -> list[int]:
    """Return the steps of the summaries in a loop whose runs advance the step by ``moves``, or set it to 0 for None."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.0)

    def step(move: int | None) -> float:
        if move is None:
            loop.session.global_step = 0
        for _ in range(move or 0):
            optimizer.step()
        return 0.5

    writer = RecordingWriter()
    hook = SummarySaverHook(save_steps, summary_writer=writer, summary_op=LOSS)
    with MonitoredLoop(step, None, optimizer, hooks=[hook], step_unit="optimizer_step") as loop:
        for move in moves:
            loop.run(move)
    return [step for step, _ in writer.scalars["loss"]]


@pytest.mark.parametrize(
    ("moves", "saved"),
    [
        ([1] * 9, [1, 5, 9]),
        ([3] * 6, [3, 9, 15]),  # before the run that ends at 6, the next step could be 4, which is not due
        ([1, 1, 1, 1, 0, 0, 1], [1, 5]),  # a run that was due and made no step: the next one is due
    ],
)
def test_decides_before_the_run_on_the_step_that_would_be_next(moves: list[int | None], saved: list[int]) -> None:
    assert saved_with(moves, 4) == saved


def test_after_the_step_was_set_back_nothing_is_due_before_the_next_period() -> None:
    assert saved_with([1, 1, None, 1, 1, 1, 1, 1], 3) == [1, 4]


def test_what_is_not_saved_is_not_evaluated() -> None:
    calls: list[int] = []

    def count_calls() -> float:
        calls.append(1)
        return 0.5

    written([0.5] * 9, save_steps=4, summary_op={"n": count_calls})
    assert len(calls) == 3


# -- START ------------------------------------------------------------------------------------------------------------


def test_the_first_run_writes_a_start_before_its_summaries() -> None:
    writer = RecordingWriter()
    trace(SummarySaverHook(2, summary_writer=writer, summary_op=LOSS), losses=[0.5] * 3, start_step=7)
    assert writer.records == [
        ("session_log", "START", 8),
        ("scalar", "loss", 0.5, 8),
        ("scalar", "loss", 0.5, 10),
    ]


def test_a_start_is_written_once_for_each_begin() -> None:
    writer = RecordingWriter()
    hook = SummarySaverHook(1, summary_writer=writer, summary_op=LOSS)
    for _ in range(2):
        trace(hook, losses=[0.5] * 3)
    assert [record for record in writer.records if record[0] == "session_log"] == [("session_log", "START", 1)] * 2


def test_a_second_session_within_a_loop_has_no_start_of_its_own() -> None:
    writer = RecordingWriter()
    hook = SummarySaverHook(1, summary_writer=writer, summary_op=LOSS)
    with MonitoredLoop(lambda: 0.5, hooks=[hook]) as loop:
        loop.run()
        hook.after_create_session(loop.session, Coordinator())
        loop.run()
    assert [kind for kind, *_ in writer.records] == ["session_log", "scalar", "scalar"]


def test_a_loop_without_a_run_has_no_start() -> None:
    writer = RecordingWriter()
    trace(SummarySaverHook(1, summary_writer=writer, summary_op=LOSS), losses=[])
    assert writer.records == []


def test_tensorboard_forgets_what_an_earlier_process_wrote_beyond_the_restored_step(tmp_path: Path) -> None:
    trace(SummarySaverHook(1, output_dir=tmp_path, summary_op=LOSS), losses=[0.5] * 6)
    trace(SummarySaverHook(1, output_dir=tmp_path, summary_op=LOSS), losses=[0.25] * 2, start_step=3)
    assert [(point.step, point.value) for point in read(tmp_path).Scalars("loss")] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.5),
        (4, 0.25),
        (5, 0.25),
    ]


# -- what -------------------------------------------------------------------------------------------------------------


def test_every_kind_of_op_reaches_tensorboard_through_the_loop(tmp_path: Path) -> None:
    ops = [
        {"loss": "loss"},
        summary.histogram("weights", "weight"),
        summary.image("picture", lambda: torch.rand(3, 4, 4)),
        summary.text("note", lambda loss: f"loss {loss:.1f}"),
        summary.figure("plot", import_or_skip("matplotlib.figure").Figure),
    ]
    trace(SummarySaverHook(1, output_dir=tmp_path, summary_op=ops), losses=[0.5], model=torch.nn.Linear(4, 4))
    tags = read(tmp_path).Tags()
    assert tags["scalars"] == ["loss"]
    assert tags["histograms"] == ["weights"]
    assert sorted(tags["images"]) == ["picture", "plot"]
    assert tags["tensors"] == ["note/text_summary"]


def test_the_step_and_the_wall_time_are_those_of_the_run(tmp_path: Path) -> None:
    before = time.time()
    trace(SummarySaverHook(1, output_dir=tmp_path, summary_op=LOSS), losses=[0.5], start_step=6)
    (event,) = [event for event in events(tmp_path) if event.summary.value]
    assert event.step == 7
    assert before <= event.wall_time <= time.time()


def test_the_values_are_those_of_the_run_although_they_change_later() -> None:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.bias)

    def step() -> None:
        with torch.no_grad():
            model.bias.add_(1)

    writer = RecordingWriter()
    hook = SummarySaverHook(1, summary_writer=writer, summary_op={"bias": "bias"})
    with MonitoredLoop(step, model, hooks=[hook]) as loop:
        loop.run()
        loop.run()
    assert writer.scalars == {"bias": [(1, 1.0), (2, 2.0)]}


@pytest.mark.parametrize(
    "value",
    [math.nan, True, 3, np.array(3.0), torch.tensor(3.0, dtype=torch.bfloat16), torch.tensor([[3.0]])],
    ids=repr,
)
def test_every_kind_of_number_is_a_point_of_the_curve(value: Any, tmp_path: Path) -> None:
    trace(SummarySaverHook(1, output_dir=tmp_path, summary_op={"v": "v"}), losses=[{"v": value}])
    (point,) = read(tmp_path).Scalars("v")
    assert point.value == pytest.approx(float(value), nan_ok=True)


def test_a_scalar_of_many_elements_is_an_error_of_that_run_that_says_so() -> None:
    with pytest.raises(ValueError, match=r"scalar 'loss': got shape \(3,\), 3 elements"):
        written([torch.ones(3)], save_steps=1)


def test_a_scaffold_has_the_op() -> None:
    scaffold = Scaffold(summary_op={"twice": lambda loss: loss * 2})
    assert written([0.5], save_steps=1, scaffold=scaffold, summary_op=None) == [("scalar", "twice", 1.0, 1)]


def test_the_op_of_a_scaffold_is_looked_up_when_the_loop_begins() -> None:
    scaffold, writer = Scaffold(), RecordingWriter()
    hook = SummarySaverHook(1, summary_writer=writer, scaffold=scaffold)
    scaffold.summary_op = LOSS
    trace(hook, losses=[0.5])
    assert writer.scalars == {"loss": [(1, 0.5)]}


def test_a_scaffold_without_an_op_writes_only_the_start() -> None:
    writer = RecordingWriter()
    trace(SummarySaverHook(1, summary_writer=writer, scaffold=Scaffold()), losses=[0.5] * 3)
    assert writer.records == [("session_log", "START", 1)]


# -- where ------------------------------------------------------------------------------------------------------------


def test_a_counter_and_a_saver_share_the_writer_of_a_folder(tmp_path: Path) -> None:
    counter = StepCounterHook(1, output_dir=tmp_path)
    trace(counter, SummarySaverHook(1, output_dir=tmp_path, summary_op=LOSS), losses=[0.5] * 3)
    assert len(list(tmp_path.iterdir())) == 1
    assert {tag: len(read(tmp_path).Scalars(tag)) for tag in ("loss", "global_step/sec")} == {
        "loss": 3,
        "global_step/sec": 2,
    }


FAILURES: dict[str, Any] = {
    "none": [],
    "in the step": [ValueError],
    "StopIteration in the step": [StopIteration],
    "an interrupt": [KeyboardInterrupt],
}


@pytest.mark.parametrize("failure", FAILURES)
def test_the_summaries_are_in_the_file_on_every_way_out(failure: str, tmp_path: Path) -> None:
    losses = [0.5, 0.5, 0.5, *FAILURES[failure]]
    trace(
        SummarySaverHook(1, output_dir=tmp_path, summary_op=LOSS), losses=losses, catch=(ValueError, KeyboardInterrupt)
    )
    assert [point.step for point in read(tmp_path).Scalars("loss")] == [1, 2, 3]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_writer_that_was_given_is_flushed_and_not_closed(failure: str) -> None:
    writer = RecordingWriter()
    hook = SummarySaverHook(1, summary_writer=writer, summary_op=LOSS)
    trace(hook, losses=[0.5, *FAILURES[failure]], catch=(ValueError, KeyboardInterrupt))
    assert (writer.flushed, writer.closed) == (1, 0)


def test_a_writer_that_lacks_what_an_op_needs_is_refused_when_the_loop_is_created() -> None:
    class Curves:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            """Do nothing."""

        def flush(self) -> None:
            """Do nothing."""

    hook = SummarySaverHook(1, summary_writer=Curves(), summary_op=summary.histogram("w", "weight"))
    with pytest.raises(TypeError, match=r"Curves has no add_histogram\(\), which histogram\('w', 'weight'\) needs"):
        MonitoredLoop(lambda: None, hooks=[hook])


def test_without_a_writer_there_is_a_warning_and_nothing_is_evaluated() -> None:
    calls: list[int] = []
    hook = SummarySaverHook(1, summary_op={"n": lambda: calls.append(1)})
    ((level, text),) = trace(hook).lines
    assert (level, calls) == ("WARNING", [])
    assert "has neither output_dir nor summary_writer: it writes nothing" in text


def test_a_hook_that_is_reused_starts_over(tmp_path: Path) -> None:
    hook = SummarySaverHook(4, output_dir=tmp_path, summary_op=LOSS)
    trace(hook, losses=[0.5] * 2)
    trace(hook, losses=[0.5] * 2, start_step=2)
    assert [point.step for point in read(tmp_path).Scalars("loss")] == [1, 3]


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_steps", [0, -1, 2.5, True, "10"])
def test_refuses_an_invalid_number_of_steps(save_steps: Any) -> None:
    with pytest.raises(ValueError, match=f"save_steps={save_steps!r}:"):
        SummarySaverHook(save_steps, summary_op=LOSS)


@pytest.mark.parametrize("save_secs", [-1, math.nan, "soon"])
def test_refuses_an_invalid_period(save_secs: Any) -> None:
    with pytest.raises(ValueError, match=f"save_secs={save_secs!r}: a period is a number of seconds, 0 or more"):
        SummarySaverHook(save_secs=save_secs, summary_op=LOSS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_steps": 1}, "scaffold=None, summary_op=None: give SummarySaverHook exactly one"),
        ({"save_steps": 1, "scaffold": Scaffold(), "summary_op": LOSS}, "give SummarySaverHook exactly one"),
        ({"summary_op": LOSS}, "has no period"),
        ({"save_steps": 1, "save_secs": 2.5, "summary_op": LOSS}, "save_steps=1, save_secs=2.5: give"),
        ({"save_steps": 1, "output_dir": "d", "summary_writer": 5, "summary_op": LOSS}, "'d', summary_writer=5: give"),
    ],
)
def test_refuses_contradictory_arguments_and_shows_them(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SummarySaverHook(**arguments)


def test_refuses_two_ops_with_one_tag_at_construction() -> None:
    with pytest.raises(ValueError, match="both write 'loss'"):
        SummarySaverHook(1, summary_op=["loss", summary.text("loss", "note")])


@pytest.mark.parametrize("given", [0.5, -1, float("nan"), "two", torch.tensor([1, 2])])
def test_what_is_on_the_x_axis_has_to_be_a_whole_number(given: Any, tmp_path: Path) -> None:
    hook = SummarySaverHook(every_n_steps=1, output_dir=tmp_path, summary_op={"loss": "loss"}, step="x")
    with (
        pytest.raises(
            TypeError, match=r"x is .*: the step of a SummarySaverHook, which is what is on the x axis, must"
        ),
        MonitoredLoop(lambda: {"loss": 0.5, "x": given}, hooks=[hook]) as loop,
    ):
        loop.run()


def test_curves_can_be_over_a_number_of_the_step(tmp_path: Path) -> None:
    hook = SummarySaverHook(save_steps=1, output_dir=tmp_path, summary_op={"loss": "loss"}, step=lambda frames: frames)
    frames = iter([100, 250])
    with MonitoredLoop(lambda: {"loss": 0.5, "frames": torch.tensor(next(frames))}, hooks=[hook]) as loop:
        loop.run()
        loop.run()
    assert [point.step for point in read(tmp_path).Scalars("loss")] == [100, 250]
