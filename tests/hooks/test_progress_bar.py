"""ProgressBarHook: what it shows, when, and that it neither tears lines nor waits for a device."""

from __future__ import annotations

import importlib.util
import io
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.devices import FakeDevice
from support.processes import fork_program

from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    EvaluationHook,
    LifecycleError,
    LoggingTensorHook,
    MonitoredLoop,
    ProgressBarHook,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
    running_mean,
)
from torchhooks.testing import FakeClock, log_lines, trace

tqdm = pytest.importorskip("tqdm.auto", reason="tqdm comes with the extra 'progress'")


class Terminal(io.StringIO):
    """A stream that says that it is a terminal, and what it shows."""

    def isatty(self) -> bool:
        return True

    @property
    def rows(self) -> list[str]:
        """The rows on the screen, where a carriage return goes back to the beginning of the row."""
        rows = []
        for row in self.getvalue().split("\n"):
            screen = ""
            for part in row.split("\r"):
                screen = part + screen[len(part) :]
            rows.append(screen.rstrip())
        return rows

    @property
    def refreshes(self) -> list[str]:
        """Each bar that was drawn."""
        return [part.strip() for part in re.split(r"[\r\n]", self.getvalue()) if "step" in part]


def shown(*losses: Any, secs: float = 1.0, hooks: tuple[SessionRunHook, ...] = (), **given: Any) -> list[str]:
    """Return each bar that was drawn in a loop with these ``losses``."""
    terminal = Terminal()
    arguments = {name: given.pop(name) for name in ("total", "values") if name in given}
    trace(ProgressBarHook(**arguments, file=terminal), *hooks, losses=losses, secs=secs, **given)
    return terminal.refreshes


# -- the bar ----------------------------------------------------------------------------------------------------------


def test_shows_the_steps_of_a_total_the_rate_and_the_remaining_time() -> None:
    bars = shown(*[0.1] * 4, total=10)
    assert re.search(r"^ *40%\|.*\| 4/10 \[\d\d:\d\d<\d\d:\d\d, [\d.]+step/s\]$", bars[-1])


def test_without_a_total_shows_the_steps_and_the_rate() -> None:
    assert re.search(r"^4step \[\d\d:\d\d, [\d.]+step/s\]$", shown(*[0.1] * 4)[-1])


def test_starts_at_the_step_at_which_the_loop_starts() -> None:
    bars = shown(0.1, 0.1, total=1000, start_step=500)
    assert "500/1000" in bars[0]
    assert "502/1000" in bars[-1]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (["loss"], "loss=0.125"),
        ({"l": "loss", "at": "global_step"}, "l=0.125, at=3"),
        ([lambda loss: float(loss) / 3], "<lambda>=0.04167"),
        ({"both": lambda: (1, 2)}, "both=(1, 2)"),
    ],
    ids=["list", "dict", "closure", "pair"],
)
def test_shows_the_values_of_the_run(values: Any, text: str) -> None:
    assert shown(0.5, 0.25, np.float32(0.125), values=values)[-1].endswith(f", {text}]")


def test_the_last_result_of_an_evaluation_is_shown_without_another_one() -> None:
    steps: list[int] = []

    def evaluate(global_step: int) -> dict[str, float]:
        steps.append(global_step)
        return {"error": 1 / global_step}

    evaluation = EvaluationHook(evaluate, every_n_steps=4)
    terminal = Terminal()
    trace(evaluation, ProgressBarHook(values={"val": evaluation["error"]}, file=terminal), losses=[0.1] * 6)
    bars = [text.rpartition(", ")[2] for text in terminal.refreshes if "val=" in text]
    assert list(dict.fromkeys(bars)) == ["val=nan]", "val=0.25]"]
    assert steps == [4]


def test_is_refreshed_at_most_ten_times_a_second_and_called_in_no_other_run() -> None:
    calls: list[int] = []

    class Counted(ProgressBarHook):
        def before_run(self, run_context: Any) -> Any:
            calls.append(run_context.session.global_step + 1)
            return super().before_run(run_context)

    terminal = Terminal()
    trace(Counted(file=terminal), losses=[0.1] * 100, secs=1 / 64)
    assert calls == [1, *range(8, 101, 7)]  # 7/64 s is the first multiple that is more than 0.1 s
    assert len(terminal.refreshes) == len(calls) + 3  # at the start, at the end, and when it is closed


def test_no_thread_refreshes_the_bar() -> None:
    before = set(threading.enumerate())
    with MonitoredLoop(lambda: None, hooks=[ProgressBarHook(file=Terminal())]) as loop:
        loop.run()
        assert {each.name for each in threading.enumerate() if each not in before} == {"torchhooks watch"}


def test_after_a_recovery_the_same_bar_goes_back(tmp_path: Path) -> None:
    saver = CheckpointSaverHook(tmp_path, save_steps=2)
    losses = [0.1] * 3 + [AbortedError] + [0.1] * 3
    bars = shown(*losses, hooks=(saver,), total=9, checkpoint_dir=tmp_path)
    steps = [int(match[1]) for bar in bars if (match := re.search(r"(\d)/9", bar))]
    assert steps == [0, 1, 2, 3, 3, 4, 5, 5]  # the last one when the bar is closed


def test_a_loop_that_failed_leaves_the_bar_at_its_last_step() -> None:
    terminal = Terminal()
    trace(ProgressBarHook(9, file=terminal), losses=[0.1, 0.1, ValueError], catch=ValueError)
    assert "2/9" in terminal.rows[-2]
    assert terminal.rows[-1] == ""


def test_the_hook_can_be_used_again() -> None:
    terminal = Terminal()
    hook = ProgressBarHook(5, file=terminal)
    for _ in range(2):
        trace(hook, losses=[0.1] * 5)
    assert len([row for row in terminal.rows if "5/5" in row]) == 2


# -- log lines on the same terminal -----------------------------------------------------------------------------------


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """A terminal to which the root logger writes."""
    terminal = Terminal()
    handler = logging.StreamHandler(terminal)
    logging.root.addHandler(handler)
    yield terminal
    logging.root.removeHandler(handler)
    assert handler.filters == []


def test_log_lines_do_not_tear_the_bar(terminal: Terminal) -> None:
    with MonitoredLoop(lambda: 0.5, hooks=[ProgressBarHook(9, ["loss"], file=terminal)]) as loop:
        for _ in range(3):
            loop.run()
        logging.getLogger("mine").warning("a line")
    assert "a line" in terminal.rows
    (bar,) = [row for row in terminal.rows if "/9" in row]
    assert "3/9" in bar


def test_a_line_between_two_epochs_finds_no_bar_to_remove(terminal: Terminal) -> None:
    hook = ProgressBarHook(per="epoch", file=terminal)
    with MonitoredLoop(lambda item: None, hooks=[hook]) as loop:
        for epoch in loop.until_stop(range(2)):
            logging.getLogger("mine").warning("epoch %d begins", epoch)
            for item in loop.until_stop(range(3)):
                loop.run(item)
    rows = [row for row in terminal.rows if row]
    assert [row for row in rows if "begins" in row] == ["epoch 0 begins", "epoch 1 begins"]
    assert len([row for row in rows if "3/3" in row]) == 2


def test_lines_do_not_tear_the_bar_where_no_logging_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(logging.root, "handlers", [])
    hooks = [ProgressBarHook(9), LoggingTensorHook(["loss"], at_end=True)]
    with MonitoredLoop(lambda: 0.5, hooks=hooks) as loop:
        loop.run()
    assert [row for row in terminal.rows if "loss" in row] == ["INFO:torchhooks:loss = 0.5"]


def test_a_handler_of_a_file_is_left_alone(tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "log")
    logging.root.addHandler(handler)
    try:
        with MonitoredLoop(lambda: 0.5, hooks=[ProgressBarHook(file=Terminal())]):
            assert handler.filters == []
    finally:
        logging.root.removeHandler(handler)
        handler.close()


# -- where there is no terminal ---------------------------------------------------------------------------------------


def without_times(line: str) -> str:
    """Return ``line`` with T for each time and R for the rate, which are tqdm's."""
    return re.sub(r"[\d.]+(?=(step|batch)/s)", "R", re.sub(r"\d\d:\d\d", "T", line))


def lines_of(*losses: Any, secs: float, file: Any = None, **given: Any) -> list[str]:
    ran = trace(ProgressBarHook(file=file or io.StringIO(), **given), losses=losses, secs=secs)
    return [without_times(text) for _, text in ran.lines]


def test_without_a_terminal_lines_are_logged() -> None:
    assert lines_of(*[0.125] * 5, secs=20.0, total=8, values=["loss"]) == [
        "12% 1/8 [T<T, Rstep/s, loss=0.125]",
        "38% 3/8 [T<T, Rstep/s, loss=0.125]",
        "62% 5/8 [T<T, Rstep/s, loss=0.125]",
    ]


def test_the_last_line_has_the_values_of_the_last_run() -> None:
    assert lines_of(0.5, 0.25, 0.125, secs=1.0, values={"z": "loss", "a": "global_step"}) == [
        "1step [T, Rstep/s, z=0.5, a=1]",
        "3step [T, Rstep/s, z=0.125, a=3]",
    ]


def test_the_last_line_leaves_out_what_only_a_run_has() -> None:
    stream, model = io.StringIO(), torch.nn.Linear(1, 1)
    with (
        log_lines() as lines,
        MonitoredLoop(
            lambda inputs: model(inputs).sum() * 0,
            model,
            hooks=[ProgressBarHook(values={"out": ":output", "in": lambda inputs: 1, "loss": "loss"}, file=stream)],
        ) as loop,
    ):
        for _ in range(2):
            loop.run(torch.zeros(1))
    assert [(level, without_times(text)) for level, text in lines[1:]] == [("INFO", "2step [T, Rstep/s, loss=0]")]


def test_a_loop_that_makes_no_run_logs_no_line() -> None:
    assert [line for line in lines_of(secs=1.0, values=["global_step"]) if "step [" in line] == []


def test_lines_are_logged_where_the_environment_turns_bars_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert lines_of(0.5, 0.25, secs=20.0) == ["1step [T, Rstep/s]", "2step [T, Rstep/s]"]


def test_the_period_of_the_lines_can_be_chosen() -> None:
    assert len(lines_of(*[0.125] * 9, secs=1.0, log_every_secs=2)) == 5


def test_nothing_is_written_to_a_stream_that_is_no_terminal() -> None:
    stream = io.StringIO()
    lines_of(*[0.125] * 9, secs=1.0, file=stream)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("stderr", [None, io.StringIO()], ids=["none", "closed"])
def test_without_a_usable_stderr_lines_are_logged(stderr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if stderr is not None:
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    assert [without_times(text) for _, text in trace(ProgressBarHook(), losses=[0.1]).lines] == ["1step [T, Rstep/s]"]


def hook_of_another_process() -> type[ProgressBarHook]:
    """Return the hook as a process has it that has not looked for tqdm yet."""
    spec = importlib.util.find_spec("torchhooks.hooks.progress_bar")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hook: type[ProgressBarHook] = module.ProgressBarHook
    return hook


def test_in_a_notebook_the_bar_is_shown_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    base: Any = tqdm.tqdm

    class tqdm_notebook(base):  # type: ignore[misc]  # noqa: N801 - tqdm's name
        """Has the name by which tqdm's widget is known."""

    monkeypatch.setattr(tqdm, "tqdm", tqdm_notebook)
    stream = io.StringIO()
    trace(hook_of_another_process()(3, file=stream), losses=[0.1] * 3)
    assert "3/3" in stream.getvalue()


# -- totals that are known --------------------------------------------------------------------------------------------


def totals(iterate: Callable[[MonitoredLoop], Iterable[Any]], *hooks: SessionRunHook, runs: int = 1) -> list[str]:
    """Return the distinct totals of the bars in a loop with so many ``runs`` for each of what ``iterate`` yields."""
    terminal = Terminal()
    with (
        FakeClock() as clock,
        MonitoredLoop(
            lambda: clock.advance(1.0), hooks=[ProgressBarHook(file=terminal), *hooks], step_unit="run"
        ) as loop,
    ):
        for _ in iterate(loop):
            for _ in range(runs):
                if not loop.should_stop():
                    loop.run()
    found = [re.search(r"\d/(\d+) ", bar) for bar in terminal.refreshes[1:]]
    return list(dict.fromkeys(match[1] if match else "?" for match in found))


def nested(*data: Any, **given: Any) -> Callable[[MonitoredLoop], Iterable[Any]]:
    def iterate(loop: MonitoredLoop, depth: int = 0) -> Iterator[Any]:
        last = depth == len(data) - 1
        for item in loop.until_stop(data[depth], **(given if last else {})):
            yield from [item] if last else iterate(loop, depth + 1)

    return iterate


@pytest.mark.parametrize(
    ("iterate", "hooks", "total"),
    [
        (nested([1, 2, 3]), [], "3"),
        (nested(range(3), "abcd"), [], "12"),
        (nested(range(2), range(2), "abcd"), [], "16"),
        (nested(range(3), "abcd", limit=2), [], "6"),
        (nested(range(3), "abcd"), [StopAtStepHook(last_step=9)], "9"),
        (nested(range(3), "abcd"), [StopAtStepHook(last_step=99)], "12"),
        (nested(range(3), "abcd"), [StopAtStepHook(num_steps=8), StopAtStepHook(5)], "5"),
        (nested(range(3), iter("abcd")), [StopAtStepHook(last_step=9)], "9"),
        (nested(range(3), iter("abcd")), [], "?"),
        (nested("abcd", repeat=True), [StopAtStepHook(last_step=9)], "9"),
        (nested("abc", limit=2), [], "2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_total_is_taken_from_the_last_step_or_the_lengths_of_the_data(
    iterate: Any, hooks: list[SessionRunHook], total: str
) -> None:
    assert totals(iterate, *hooks) == [total]


def test_a_total_that_was_known_is_shown_at_the_end() -> None:
    terminal = Terminal()
    hooks = [ProgressBarHook(values=["global_step"], file=terminal)]
    with FakeClock(), MonitoredLoop(lambda: None, hooks=hooks, step_unit="run") as loop:
        for _ in nested(range(3), "abcd")(loop):
            loop.run()  # none but the first is shown
    assert re.search(r"100%\|.*\| 12/12 .*, global_step=12\]$", terminal.refreshes[-1])


def test_without_a_last_step_data_that_are_repeated_have_no_total() -> None:
    terminal = Terminal()
    with MonitoredLoop(lambda: None, hooks=[ProgressBarHook(file=terminal)], step_unit="run") as loop:
        for _ in loop.until_stop([1, 2], repeat=True):
            loop.run()
            if loop.global_step == 5:
                break
    assert terminal.refreshes[-1].startswith("5step")


def test_lengths_tell_no_total_if_an_item_is_several_steps() -> None:
    assert totals(nested([1, 2, 3]), runs=2)[1:] == ["?"]


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_first_item_with_a_step_of_the_optimizer_tells_no_total(accumulate: int, first: int) -> None:
    terminal, parameter = Terminal(), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], 0.1)
    with FakeClock() as clock:

        def step(item: int) -> None:
            clock.advance(1.0)
            if (item + first) % accumulate == 0:
                optimizer.step()

        hooks = [ProgressBarHook(file=terminal)]
        with MonitoredLoop(step, optimizer=optimizer, hooks=hooks, step_unit="optimizer_step") as loop:
            for item in loop.until_stop(range(9)):
                loop.run(item)
    found = [re.search(r"\d/(\d+) ", bar) for bar in terminal.refreshes[1:]]
    known = [match[1] for match in found if match]
    assert set(known) == ({"9"} if accumulate == 1 else set())


def test_a_total_that_was_given_counts() -> None:
    bars = shown(0.1, 0.1, total=9, hooks=(StopAtStepHook(last_step=5),))
    assert "2/9" in bars[-1]


# -- a bar for each epoch ---------------------------------------------------------------------------------------------


class Epochs(NamedTuple):
    rows: list[str]
    lines: list[str]
    hook: ProgressBarHook


def in_epochs(
    *epochs: Iterable[Any],
    secs: float = 1.0,
    leave_at: float | None = None,
    hooks: tuple[SessionRunHook, ...] = (),
    file: Any = None,
    values: Any = None,
    **given: Any,
) -> Epochs:
    """Return the last state of each bar, and the lines, of a loop over ``epochs`` of losses."""
    terminal = Terminal() if file is None else file
    values = {"mean": running_mean("loss", reset="epoch")} if values is None else values
    hook = ProgressBarHook(values=values, per="epoch", file=terminal)

    def step(loss: Any) -> Any:
        clock.advance(secs)
        return loss

    with (
        FakeClock() as clock,
        log_lines() as lines,
        MonitoredLoop(step, hooks=[hook, *hooks], step_unit="run", **given) as loop,
    ):
        for epoch in loop.until_stop(range(len(epochs))):
            for loss in loop.until_stop(epochs[epoch]):
                if loss == leave_at:
                    break
                loop.run(loss)
    rows = [row for row in getattr(terminal, "rows", []) if row]
    return Epochs(rows, [without_times(text) for _, text in lines if text.startswith("epoch ")], hook)


def test_each_epoch_has_a_bar_with_its_number_its_length_and_its_values() -> None:
    rows = in_epochs([1.0, 3.0], [5.0, 6.0, 7.0]).rows
    assert [re.sub(r"\|.*\|", "", without_times(row)) for row in rows] == [
        "epoch 0: 100% 2/2 [T<T, Rbatch/s, mean=2]",
        "epoch 1: 100% 3/3 [T<T, Rbatch/s, mean=6]",
    ]


def test_the_bar_of_an_epoch_that_is_shorter_than_a_refresh_is_complete() -> None:
    rows = in_epochs([1.0, 3.0], [5.0, 6.0, 7.0], secs=1 / 64).rows
    assert [re.findall(r"\d/\d|mean=\d", row) for row in rows] == [["2/2", "mean=2"], ["3/3", "mean=6"]]


def test_without_a_terminal_each_epoch_has_a_line_at_its_end() -> None:
    assert in_epochs([1.0, 3.0], [5.0, 6.0, 7.0], [8.0], file=io.StringIO()).lines == [
        "epoch 0:  50% 1/2 [T<?, ?batch/s, mean=1]",
        "epoch 0: 100% 2/2 [T<T, Rbatch/s, mean=2]",
        "epoch 1: 100% 3/3 [T<T, Rbatch/s, mean=6]",
        "epoch 2: 100% 1/1 [T<?, ?batch/s, mean=8]",  # the rate is measured from the epoch's first run on
    ]


def test_lines_continue_by_the_clock_after_the_end_of_an_epoch() -> None:
    assert [line.partition(" [")[0] for line in in_epochs([1.0], [2.0] * 5, secs=16.0, file=io.StringIO()).lines] == [
        "epoch 0: 100% 1/1",
        "epoch 0: 100% 1/1",
        "epoch 1:  40% 2/5",
        "epoch 1:  80% 4/5",
        "epoch 1: 100% 5/5",
    ]


def test_an_epoch_of_unknown_length_counts_its_batches() -> None:
    assert in_epochs(iter([1.0, 3.0]), file=io.StringIO()).lines == [
        "epoch 0: 1batch [T, ?batch/s, mean=1]",
        "epoch 0: 100% 2/2 [T<T, Rbatch/s, mean=2]",
    ]
    assert "epoch 0: 2batch [" in in_epochs(iter([1.0, 3.0]), hooks=(StopAtStepHook(2),)).rows[0]


def test_the_bar_of_an_epoch_that_the_body_leaves_stays_where_it_is() -> None:
    epochs = in_epochs([1.0, 3.0, 9.0, 9.0], [5.0], leave_at=9.0)
    assert [re.findall(r"\d/\d|mean=\d", row) for row in epochs.rows] == [["3/4", "mean=2"], ["1/1", "mean=5"]]


def test_a_stop_in_an_epoch_leaves_its_bar_with_the_last_values() -> None:
    given: dict[str, Any] = {"secs": 1 / 64, "hooks": (StopAtStepHook(4),)}
    rows = in_epochs([1.0, 3.0], [5.0, 7.0, 9.0], **given).rows
    assert [re.findall(r"\d/\d|mean=\d", row) for row in rows] == [["2/2", "mean=2"], ["2/3", "mean=6"]]
    assert (
        in_epochs([1.0, 3.0], [5.0, 7.0, 9.0], file=io.StringIO(), **given).lines[-1].startswith("epoch 1:  67% 2/3 ")
    )


def test_an_epoch_continues_in_its_middle(tmp_path: Path) -> None:
    def given(last_step: int) -> dict[str, Any]:
        hooks = (StopAtStepHook(last_step), CheckpointSaverHook(tmp_path, save_steps=100))
        return {"hooks": hooks, "checkpoint_dir": tmp_path}

    in_epochs([1.0, 3.0], [5.0, 7.0, 9.0], **given(3))
    terminal = Terminal()
    rows = in_epochs([1.0, 3.0], [5.0, 7.0, 9.0], **given(99), file=terminal).rows
    assert [re.findall(r"epoch \d|\d/\d|mean=\d", row) for row in rows] == [["epoch 1", "3/3", "mean=7"]]
    assert re.findall(r"\d/3", terminal.getvalue())[0] == "2/3"


def test_a_recovery_in_an_epoch_keeps_its_bar(tmp_path: Path) -> None:
    class Failing(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            if run_context.session.global_step == 4 and not failed:
                failed.append(4)
                raise AbortedError

    failed: list[int] = []
    saver = CheckpointSaverHook(tmp_path, save_steps=1)
    rows = in_epochs([1.0, 3.0], [5.0, 7.0, 9.0], hooks=(Failing(), saver), checkpoint_dir=tmp_path).rows
    assert failed
    assert [re.findall(r"epoch \d|\d/\d", row) for row in rows] == [["epoch 0", "2/2"], ["epoch 1", "3/3"]]


def test_bars_of_epochs_are_drawn_when_their_values_arrive_from_a_device() -> None:
    with FakeDevice(lag=3):
        epochs = in_epochs([torch.tensor(1.0)] * 2, [torch.tensor(2.0)] * 4, values=["loss"])
    assert [re.findall(r"\d/\d|loss=\d", row) for row in epochs.rows] == [["2/2", "loss=1"], ["4/4", "loss=2"]]


def test_a_bar_for_each_epoch_needs_epochs() -> None:
    def train() -> None:
        with MonitoredLoop(lambda: None, hooks=[ProgressBarHook(per="epoch", file=Terminal())]) as loop:
            loop.run()

    with pytest.raises(LifecycleError, match=r"there is no epoch: iterate with loop.until_stop\(data\), or leave out"):
        train()


def test_the_hook_of_a_loop_without_runs_shows_no_epoch() -> None:
    assert in_epochs([], file=io.StringIO()).lines == []


# -- devices ----------------------------------------------------------------------------------------------------------


def test_values_of_a_device_are_not_waited_for() -> None:
    terminal, clock, waits = Terminal(), FakeClock(), []
    loss = torch.tensor(0.125)

    def step() -> torch.Tensor:
        clock.advance(1.0)
        return loss

    hooks = [ProgressBarHook(9, ["loss"], file=terminal), StopAtStepHook(9)]
    with (
        FakeDevice(lag=3) as device,
        clock,
        MonitoredLoop(step, torch.nn.Linear(1, 1), hooks=hooks) as loop,
    ):
        while not loop.should_stop():
            loop.run()
        waits.append(device.waits)
    assert waits == [0]
    assert terminal.refreshes[-1].endswith(", loss=0.125]")


# -- arguments --------------------------------------------------------------------------------------------------------


def test_without_tqdm_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"ProgressBarHook needs tqdm.*pip install 'torchhooks\[progress\]'"):
        hook_of_another_process()()


@pytest.mark.parametrize(
    ("create", "error", "message"),
    [
        (lambda: ProgressBarHook(0), ValueError, "total=0: .* 1 or more"),
        (lambda: ProgressBarHook(log_every_secs=-1), ValueError, "log_every_secs=-1: .* seconds"),
        (lambda: ProgressBarHook(values="loss"), TypeError, "'loss': give a dict"),
        (lambda: ProgressBarHook(values=["loss", "loss"]), ValueError, "logged as 'loss'"),
        (lambda: ProgressBarHook(per="step"), ValueError, "per='step': must be \"epoch\", for a bar for each epoch"),
        (lambda: ProgressBarHook(9, per="epoch"), ValueError, "total=9, per='epoch': the data tell how many items"),
        (lambda: ProgressBarHook(values=[":output"], per="epoch"), ValueError, "':output' is available only while"),
    ],
)
def test_refuses_invalid_arguments_and_shows_them(
    create: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        create()


def test_lines_are_not_logged_while_there_is_a_bar() -> None:
    with log_lines() as lines:
        shown(0.1, 0.1)
    assert lines == []


NOTEBOOK_WITHOUT_WIDGETS = """
import sys, types, warnings
warnings.simplefilter("always")
sys.modules["ipykernel.zmqshell"] = types.ModuleType("ipykernel.zmqshell")
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython"].get_ipython = lambda: None
sys.modules["ipywidgets"] = None
from torchhooks import MonitoredLoop, ProgressBarHook
with MonitoredLoop(lambda: 0.5, hooks=[ProgressBarHook(2, ["loss"])]) as loop:
    for _ in loop.until_stop(range(2)):
        loop.run()
"""


def test_a_notebook_without_ipywidgets_gets_lines_and_no_warning() -> None:
    program = fork_program(NOTEBOOK_WITHOUT_WIDGETS)
    assert program.returncode == 0
    first, last = program.stderr.splitlines()
    assert first.startswith("INFO:torchhooks:50% 1/2 [")
    assert last.startswith("INFO:torchhooks:100% 2/2 [")


@pytest.mark.parametrize(("rates", "text"), [((1 / 3, 1 / 3), "lr=0.3333"), ((1 / 3, 0.25), "lr=[0.3333, 0.25]")])
def test_shows_the_rates_of_several_groups_with_four_digits(rates: tuple[float, float], text: str) -> None:
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])
    assert shown(0.1, values=["lr"], optimizer=optimizer, step_unit="run")[-1].endswith(f", {text}]")
