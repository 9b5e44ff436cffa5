"""ProfilerHook: which runs it profiles, and what is in the files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices import FakeDevice
from support.torch_state import is_profiling

from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    EverySteps,
    MonitoredLoop,
    NeverTriggerTimer,
    OnSignal,
    ProfilerHook,
    SecondOrStepTimer,
    SessionRunHook,
    StepCounterHook,
)
from torchhooks.testing import RecordingWriter, log_lines, trace


def timelines(folder: Path) -> list[int]:
    """Return the steps of the files in ``folder``, and check that nothing else is there."""
    return sorted(int(path.stem.removeprefix("timeline-")) for path in folder.iterdir())


def events(folder: Path, step: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"timeline-{step}.json").read_text())["traceEvents"]
    return found


class Training:
    """A small model, and whether the profiler was on in each step."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 3)
        self.profiled: list[bool] = []

    def step(self) -> torch.Tensor:
        self.profiled.append(is_profiling())
        loss: torch.Tensor = self.model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    def train(self, runs: int, *hooks: SessionRunHook) -> None:
        with MonitoredLoop(self.step, self.model, hooks=hooks) as loop:
            for _ in range(runs):
                loop.run()


# -- which runs -------------------------------------------------------------------------------------------------------


def test_a_relative_folder_is_that_of_the_creation_of_the_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    hook = ProfilerHook(save_steps=1, output_dir="profiles")
    with MonitoredLoop(Training().step, hooks=[hook]) as loop:
        loop.run()
        loop.run()
        monkeypatch.chdir(tmp_path / "second")
        loop.run()
    assert timelines(tmp_path / "first" / "profiles") == [2, 3]
    assert not list((tmp_path / "second").iterdir())


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"save_steps": 2}, [2, 4, 6]),
        ({"save_steps": 3}, [3, 6]),
        ({"save_secs": 3.0}, [5]),
        ({"timer": EverySteps(3)}, [3, 6]),
        ({"timer": EverySteps(1)}, [2, 3, 4, 5, 6, 7]),
        ({"timer": SecondOrStepTimer(every_steps=3)}, [3, 6]),
        ({"timer": NeverTriggerTimer()}, []),
    ],
    ids=repr,
)
def test_profiles_periodically_but_never_the_first_run(given: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    trace(ProfilerHook(output_dir=tmp_path, **given), losses=[0.1] * 7)
    assert timelines(tmp_path) == steps


def test_a_signal_before_the_first_run_asks_for_a_profile_of_it(tmp_path: Path) -> None:
    training = Training()
    hook = ProfilerHook(output_dir=tmp_path, timer=OnSignal("SIGUSR1"))
    with MonitoredLoop(training.step, training.model, hooks=[hook]) as loop:
        signal.raise_signal(signal.SIGUSR1)
        for _ in range(3):
            loop.run()
    assert timelines(tmp_path) == [1]


def test_profiles_at_multiples_after_a_resume(tmp_path: Path) -> None:
    trace(ProfilerHook(output_dir=tmp_path, timer=EverySteps(4)), losses=[0.1] * 9, start_step=101)
    assert timelines(tmp_path) == [104, 108]


def test_with_accumulated_gradients_the_run_that_reaches_a_multiple_is_profiled_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer, runs = torch.optim.SGD(model.parameters()), [0]

    def step() -> None:
        runs[0] += 1
        if runs[0] % 3 == 0:
            optimizer.step()

    hook = ProfilerHook(output_dir=tmp_path, timer=EverySteps(2))
    with MonitoredLoop(step, model, optimizer, hooks=[hook], step_unit="optimizer_step") as loop:
        for _ in range(14):
            loop.run()
    assert timelines(tmp_path) == [2, 4]
    assert any(event["name"].startswith("Optimizer.step") for event in events(tmp_path, 2))


def test_only_the_step_of_that_run_is_profiled(tmp_path: Path) -> None:
    training = Training()
    training.train(5, ProfilerHook(save_steps=3, output_dir=tmp_path))
    assert training.profiled == [False, False, True, False, False]
    assert not is_profiling()


@pytest.mark.parametrize(
    ("given", "calls"),
    [({"save_steps": 4}, [1, 3, 4, 7, 8]), ({"timer": EverySteps(4)}, [1, 4, 8]), ({"save_secs": 4.0}, [1, 6])],
    ids=repr,
)
def test_runs_between_two_profiles_are_idle(given: dict[str, Any], calls: list[int], tmp_path: Path) -> None:
    called: list[int] = []

    class Counted(ProfilerHook):
        def before_run(self, run_context: Any) -> Any:
            called.append(run_context.session.global_step + 1)
            return super().before_run(run_context)

    trace(Counted(output_dir=tmp_path, **given), losses=[0.1] * 9)
    assert called == calls


# -- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_is_a_chrome_trace_of_the_step(tmp_path: Path) -> None:
    with log_lines() as lines:
        Training().train(2, ProfilerHook(save_steps=2, output_dir=tmp_path / "new" / "folder"))
    names = {event["name"] for event in events(tmp_path / "new" / "folder", 2)}
    assert {"aten::linear", "aten::mean"} <= names
    assert ("INFO", f"wrote the profile of step 2 to {tmp_path}/new/folder/timeline-2.json") in lines


def test_the_default_folder_is_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace(ProfilerHook(save_steps=2), losses=[0.1] * 3)
    assert timelines(tmp_path) == [2]


@pytest.mark.parametrize("given", ["", "profiles", "./here/.."])
def test_the_log_has_the_folder_as_it_was_given(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with log_lines() as lines:
        trace(ProfilerHook(save_steps=2, output_dir=given), losses=[0.1] * 3)
    assert ("INFO", os.path.join(given, "timeline-2.json")) in [
        (level, text.split(" to ")[-1]) for level, text in lines
    ]


def test_a_hook_that_was_never_due_says_so_at_the_end(tmp_path: Path) -> None:
    hook = ProfilerHook(save_steps=100, output_dir=tmp_path)
    with log_lines() as lines:
        trace(hook, losses=[0.1] * 3)
    assert [line for line in lines if "profile" in line[1]] == [
        ("INFO", f"{hook!r} wrote no profile: it was not due in this loop")
    ]


def test_a_hook_whose_only_profile_is_of_a_run_that_counted_no_step_says_so_at_the_end(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(counts: bool) -> None:
        if counts:
            optimizer.step()

    hook = ProfilerHook(every_n_steps=2, output_dir=tmp_path)
    unit = "optimizer_step"
    with log_lines() as lines, MonitoredLoop(step, model, optimizer, hooks=[hook], step_unit=unit) as loop:
        loop.run(True)
        loop.run(False)
    assert lines[-1] == ("INFO", f"{hook!r} wrote no profile: the run that was profiled counted no step")
    assert timelines(tmp_path) == []


def test_a_hook_that_found_the_profiler_in_use_says_so_at_the_end(tmp_path: Path) -> None:
    hook = ProfilerHook(save_steps=2, output_dir=tmp_path)
    with log_lines() as lines, torch.profiler.profile():
        trace(hook, losses=[0.1] * 3)
    assert ("INFO", f"{hook!r} wrote no profile: the profiler was in use when it was due") in lines


@pytest.mark.parametrize("losses", [[0.1] * 3, [0.1] * 2 + [KeyError]])
def test_a_hook_that_wrote_a_profile_or_a_loop_that_failed_logs_no_more(losses: list[Any], tmp_path: Path) -> None:
    hook = ProfilerHook(save_steps=2 if len(set(losses)) == 1 else 100, output_dir=tmp_path)
    with log_lines() as lines:
        trace(hook, losses=losses, catch=KeyError)
    assert [text for _, text in lines if "wrote no profile" in text or "is lost" in text] == []


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("show", [True, False])
def test_memory_is_shown_if_asked_for(show: bool, runs: int, tmp_path: Path) -> None:
    Training().train(5, ProfilerHook(save_steps=2, output_dir=tmp_path, show_memory=show, runs=runs))
    (file, *_) = timelines(tmp_path)
    assert any(event["name"] == "[memory]" for event in events(tmp_path, file)) is show


def test_a_file_that_cannot_be_written_leaves_nothing_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, new_path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        trace(ProfilerHook(save_steps=2, output_dir=tmp_path), losses=[0.1] * 3)
    assert timelines(tmp_path) == []


def test_a_folder_that_cannot_be_written_to_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(profile: Any, path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fail)
    with pytest.raises(PermissionError, match="Permission denied"):
        trace(ProfilerHook(save_steps=2, output_dir=tmp_path), losses=[0.1] * 3)


def test_the_time_that_writing_takes_is_not_counted(tmp_path: Path) -> None:
    pauses: list[Any] = []

    class Listening(SessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            session.on_pause(pauses.append)

    trace(Listening(), ProfilerHook(save_steps=2, output_dir=tmp_path), losses=[0.1] * 3)
    assert len(pauses) == 1


# -- several runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("runs", "steps"), [(1, [4]), (2, [4, 5]), (3, [4, 5, 6])])
def test_the_run_that_is_due_is_the_first_of_those_in_the_file(runs: int, steps: list[int], tmp_path: Path) -> None:
    training = Training()
    training.train(7, ProfilerHook(save_steps=4, output_dir=tmp_path, runs=runs))
    assert timelines(tmp_path) == steps[-1:]
    assert [step for step, is_profiled in enumerate(training.profiled, 1) if is_profiled] == steps
    marks = {event["name"] for event in events(tmp_path, steps[-1]) if "ProfilerStep" in event["name"]}
    assert len(marks) == (runs if runs > 1 else 0)
    assert not is_profiling()


@pytest.mark.parametrize("runs", [4, 5])
def test_a_loop_that_ends_in_the_middle_leaves_no_profiler_running(runs: int, tmp_path: Path) -> None:
    hook = ProfilerHook(save_steps=4, output_dir=tmp_path, runs=3)
    with log_lines() as lines:
        Training().train(runs, hook)
    assert (timelines(tmp_path), is_profiling()) == ([], False)
    assert [line for line in lines if "profile" in line[1]] == [
        ("INFO", f"{hook!r}: the loop ended in the middle of the 3 runs of a profile, which is lost")
    ]


def test_a_recovery_in_the_middle_starts_another_profile(tmp_path: Path) -> None:
    hooks = [
        CheckpointSaverHook(tmp_path / "run", save_steps=1),
        ProfilerHook(save_steps=3, output_dir=tmp_path / "profiles", runs=2),
    ]
    losses = [0.1] * 3 + [AbortedError] + [0.1] * 6
    trace(*hooks, losses=losses, checkpoint_dir=tmp_path / "run")
    assert (timelines(tmp_path / "profiles"), is_profiling()) == ([5, 9], False)


# -- several hooks ----------------------------------------------------------------------------------------------------


def test_of_two_hooks_that_are_due_in_one_run_the_second_profiles_the_next_one(tmp_path: Path) -> None:
    hooks = [ProfilerHook(save_steps=2, output_dir=tmp_path / name) for name in ("a", "b")]
    Training().train(3, *hooks)
    assert [timelines(tmp_path / name) for name in ("a", "b")] == [[2], [3]]


@pytest.mark.parametrize("several_first", [True, False])
def test_a_hook_that_is_due_while_another_one_profiles_several_runs_waits(several_first: bool, tmp_path: Path) -> None:
    hooks = [
        ProfilerHook(save_steps=3, output_dir=tmp_path / "several", runs=2),
        ProfilerHook(save_steps=3, output_dir=tmp_path / "single"),
    ]
    training = Training()
    training.train(7, *(hooks if several_first else hooks[::-1]))
    found = timelines(tmp_path / "several"), timelines(tmp_path / "single")
    assert found == (([4], [5]) if several_first else ([5], [3, 6]))
    assert not is_profiling()


def test_a_hook_that_is_due_while_the_script_profiles_waits(tmp_path: Path) -> None:
    training = Training()
    with MonitoredLoop(training.step, training.model, hooks=[ProfilerHook(save_steps=2, output_dir=tmp_path)]) as loop:
        with torch.profiler.profile():
            for _ in range(3):
                loop.run()
        loop.run()
    assert timelines(tmp_path) == [4]


# -- other hooks and devices ------------------------------------------------------------------------------------------


def test_nothing_waits_for_a_device_but_the_profiler(tmp_path: Path) -> None:
    writer, waits = RecordingWriter(), []
    hooks = [ProfilerHook(save_steps=3, output_dir=tmp_path), StepCounterHook(2, summary_writer=writer)]
    loss = torch.tensor(0.5)
    with FakeDevice(lag=3) as device, MonitoredLoop(lambda: loss, hooks=hooks) as loop:
        for _ in range(9):
            loop.run()
        waits.append(device.waits)
    assert waits == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "has no period: .* save_steps=, save_secs=, every_n_steps="),
        ({"save_steps": 1, "save_secs": 1}, "save_steps=1, save_secs=1: .* one of them"),
        ({"save_steps": 1, "timer": EverySteps(2)}, r"save_steps=1, timer=EverySteps\(2\): .* timer"),
        ({"save_steps": 1, "runs": 0}, "runs=0: .* 1 or more"),
    ],
)
def test_refuses_invalid_arguments_and_shows_them(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProfilerHook(**arguments)


def test_after_a_run_that_failed_and_was_caught_the_next_one_is_profiled(tmp_path: Path) -> None:
    failures = iter([False, True, False, False])

    def step() -> float:
        if next(failures):
            raise ValueError("bad batch")
        return 0.5

    hooks = [ProfilerHook(every_n_steps=2, output_dir=folder) for folder in (tmp_path, tmp_path / "b")]
    with MonitoredLoop(step, hooks=hooks) as loop:
        for _ in loop.until_stop(range(4)):
            with contextlib.suppress(ValueError):
                loop.run()
    assert [path.name for path in tmp_path.glob("timeline-*")] == ["timeline-2.json"]
    assert [path.name for path in tmp_path.glob("b/timeline-*")] == ["timeline-3.json"]
