"""MonitoredTrainingLoop: which hooks it adds, in which order, how to disable them, and how a worker starts."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.events import curve, read, steps

from torchhooks import (
    BestCheckpointHook,
    CheckpointSaverHook,
    Coordinator,
    EverySteps,
    MonitoredLoop,
    MonitoredTrainingLoop,
    Saver,
    Scaffold,
    Session,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    list_checkpoints,
    summary,
)
from torchhooks.testing import RecordingHook, log_lines


class Remembering(SessionRunHook):
    """A hook whose state is the number of runs that it has seen."""

    def __init__(self, name: str = "remembering") -> None:
        self.name = name
        self.runs = 0

    def after_run(self, *_: Any) -> None:
        self.runs += 1

    def state_dict(self) -> dict[str, int]:
        return {"runs": self.runs}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.runs = state_dict["runs"]

    def __repr__(self) -> str:
        return f"Remembering({self.name!r})"


def hooks_of(**arguments: Any) -> list[SessionRunHook]:
    """Return the hooks of a loop, in their order."""
    hooks: list[SessionRunHook] = []
    create = MonitoredLoop.__init__

    def noted(loop: Any, *args: Any, **given: Any) -> None:
        hooks.extend(given["hooks"])
        create(loop, *args, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MonitoredLoop, "__init__", noted)
        MonitoredTrainingLoop(lambda: 0.5, **arguments).close()
    return hooks


def kinds(**arguments: Any) -> list[str]:
    """Return the class names of the hooks of a loop, in their order."""
    return [type(hook).__name__ for hook in hooks_of(**arguments)]


def default_hooks(**arguments: Any) -> str:
    """Return the reprs of the hooks of a loop, one per line, without their scaffold."""
    return re.sub(r", scaffold=<.*?>", "", "\n".join(map(repr, hooks_of(**arguments))))


def saved_steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder)]


# -- which hooks ------------------------------------------------------------------------------------------------------


def test_the_order_is_that_of_tensorflow(tmp_path: Path) -> None:
    ours, chiefs = StopAtStepHook(5), RecordingHook()
    assert kinds(checkpoint_dir=tmp_path, hooks=[ours], chief_only_hooks=[chiefs]) == [
        "RecordingHook",
        "StepCounterHook",
        "SummarySaverHook",
        "CheckpointSaverHook",
        "StopAtStepHook",
    ]


def test_the_periods_are_those_of_tensorflow(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert default_hooks(checkpoint_dir=folder).splitlines() == [
        f"StepCounterHook(every_n_steps=100, output_dir={folder!r})",
        f"SummarySaverHook(save_steps=100, output_dir={folder!r})",
        f"CheckpointSaverHook({folder!r}, save_secs=600)",
    ]


def test_without_any_folder_steps_per_second_are_logged_and_nothing_is_written() -> None:
    assert default_hooks() == "StepCounterHook(every_n_steps=100)"


def test_a_summary_dir_alone_saves_no_checkpoints(tmp_path: Path) -> None:
    assert kinds(summary_dir=tmp_path) == ["StepCounterHook", "SummarySaverHook"]


def test_curves_go_to_summary_dir_if_it_is_given(tmp_path: Path) -> None:
    scaffold = Scaffold(summary_op={"loss": "loss"})
    with MonitoredTrainingLoop(
        lambda: 0.5, checkpoint_dir=tmp_path / "run", summary_dir=tmp_path / "curves", scaffold=scaffold
    ) as loop:
        loop.run()
    assert curve(tmp_path / "curves", "loss") == [(1, 0.5)]
    assert read(tmp_path / "run").Tags()["scalars"] == []


@pytest.mark.parametrize(
    ("arguments", "hook"),
    [
        ({"save_checkpoint_steps": 7}, "CheckpointSaverHook({}, save_steps=7)"),
        ({"save_checkpoint_secs": 7}, "CheckpointSaverHook({}, save_secs=7)"),
        ({"save_checkpoint_secs": 7, "async_save": True}, "CheckpointSaverHook({}, save_secs=7, async_save=True)"),
        ({"save_checkpoint_secs": 7, "save_checkpoint_steps": None}, "CheckpointSaverHook({}, save_secs=7)"),
        ({"save_checkpoint_secs": None, "save_checkpoint_steps": 7}, "CheckpointSaverHook({}, save_steps=7)"),
        ({"save_checkpoint_secs": 0, "save_checkpoint_steps": 7}, "CheckpointSaverHook({}, save_steps=7)"),
        ({"save_summaries_secs": 7.5}, "SummarySaverHook(save_secs=7.5, output_dir={})"),
        ({"save_summaries_steps": 7}, "SummarySaverHook(save_steps=7, output_dir={})"),
        ({"log_step_count_steps": 7}, "StepCounterHook(every_n_steps=7, output_dir={})"),
    ],
)
def test_a_period_replaces_the_default_one(arguments: dict[str, Any], hook: str, tmp_path: Path) -> None:
    lines = default_hooks(checkpoint_dir=str(tmp_path), **arguments).splitlines()
    assert hook.format(repr(str(tmp_path))) in lines
    assert len(lines) == 3


def test_async_save_without_the_hook_that_it_is_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"async_save=True: the default CheckpointSaverHook is disabled"):
        MonitoredTrainingLoop(lambda: 0.5, checkpoint_dir=tmp_path, save_checkpoint_secs=None, async_save=True)


@pytest.mark.parametrize("off", [None, 0, -1])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("save_checkpoint_secs", "CheckpointSaverHook"),
        ("save_checkpoint_steps", "CheckpointSaverHook"),
        ("save_summaries_steps", "SummarySaverHook"),
        ("save_summaries_secs", "SummarySaverHook"),
        ("log_step_count_steps", "StepCounterHook"),
    ],
)
def test_none_and_zero_disable_a_hook(name: str, kind: str, off: Any, tmp_path: Path) -> None:
    everything = kinds(checkpoint_dir=tmp_path)
    assert set(everything) - set(kinds(checkpoint_dir=tmp_path, **{name: off})) == {kind}


def test_hooks_with_a_timer_of_their_own_replace_the_default_ones(tmp_path: Path) -> None:
    own = [
        StepCounterHook(timer=EverySteps(4), output_dir=tmp_path),
        SummarySaverHook(timer=EverySteps(6), output_dir=tmp_path, summary_op=summary.scalar("loss", "loss")),
        CheckpointSaverHook(tmp_path, timer=EverySteps(5)),
    ]
    off: dict[str, Any] = {"log_step_count_steps": None, "save_summaries_steps": None, "save_checkpoint_secs": None}
    with MonitoredTrainingLoop(lambda: 0.5, checkpoint_dir=tmp_path, hooks=own, **off) as loop:
        for _ in range(12):
            loop.run()
    assert hooks_of(checkpoint_dir=tmp_path, hooks=own, **off) == own
    assert steps(tmp_path, "global_step/sec") == [4, 8, 12]
    assert steps(tmp_path, "loss") == [6, 12]
    assert saved_steps(tmp_path) == [0, 5, 10, 12]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"save_checkpoint_secs": 60, "save_checkpoint_steps": 10},
            "save_checkpoint_secs=60, save_checkpoint_steps=10: give",
        ),
        (
            {"save_summaries_secs": 60, "save_summaries_steps": 10},
            "save_summaries_steps=10, save_summaries_secs=60: give",
        ),
        ({"save_checkpoint_steps": 2.5}, "save_checkpoint_steps=2.5:"),
        ({"save_summaries_secs": "soon"}, "save_summaries_secs='soon':"),
        ({"log_step_count_steps": 0.5}, "log_step_count_steps=0.5:"),
    ],
)
def test_rejects_invalid_periods_and_names_the_arguments_of_the_caller(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MonitoredTrainingLoop(lambda: 0.5, **arguments)


@pytest.mark.parametrize("name", ["hooks", "chief_only_hooks"])
def test_an_item_that_is_not_a_hook_is_rejected_with_the_name_of_its_list(name: str) -> None:
    given: dict[str, Any] = {name: [RecordingHook(), 3]}
    with pytest.raises(TypeError, match=re.escape("hooks[1]=3 is not a hook")) as raised:
        MonitoredTrainingLoop(lambda: 0.5, **given)
    assert raised.value.__notes__ == [f"torchhooks: in {name} of MonitoredTrainingLoop"]


def test_hooks_can_be_a_generator() -> None:
    assert kinds(hooks=(StopAtStepHook(5) for _ in range(1)), log_step_count_steps=None) == ["StopAtStepHook"]


# -- hooks with a state -----------------------------------------------------------------------------------------------


def order(tmp_path: Path, **arguments: Any) -> list[str]:
    with log_lines() as lines:
        found = kinds(checkpoint_dir=tmp_path, save_summaries_steps=None, log_step_count_steps=None, **arguments)
    assert [text for level, text in lines if level == "WARNING" and "will contain" not in text] == []
    return found


def test_hooks_with_a_state_come_before_the_saver(tmp_path: Path) -> None:
    hooks = [RecordingHook(), Remembering("a"), StopAtStepHook(5), Remembering("b")]
    assert order(tmp_path, hooks=hooks) == [
        "Remembering",
        "Remembering",
        "CheckpointSaverHook",
        "RecordingHook",
        "StopAtStepHook",
    ]


def test_hooks_with_a_state_come_before_a_saver_among_the_chief_only_hooks(tmp_path: Path) -> None:
    best = BestCheckpointHook(tmp_path, "loss", save_steps=5, mode="min")
    found = order(tmp_path, hooks=[Remembering()], chief_only_hooks=[RecordingHook(), best])
    assert found == ["RecordingHook", "Remembering", "BestCheckpointHook", "CheckpointSaverHook"]


def test_without_a_saver_the_order_of_hooks_does_not_change() -> None:
    hooks = [RecordingHook(), Remembering()]
    assert kinds(hooks=hooks, log_step_count_steps=None) == ["RecordingHook", "Remembering"]


def test_the_saved_state_of_a_hook_includes_the_run(tmp_path: Path) -> None:
    for expected in (0, 3):
        hook = Remembering()
        with MonitoredTrainingLoop(lambda: 0.5, checkpoint_dir=tmp_path, hooks=[hook]) as loop:
            assert (hook.runs, loop.global_step) == (expected, expected)
            for _ in range(3):
                loop.run()


# -- a whole training run ---------------------------------------------------------------------------------------------


def train(folder: Path, model: torch.nn.Module, last_step: int, **arguments: Any) -> list[int]:
    """Return the steps that were made."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    made: list[int] = []
    hooks = [StopAtStepHook(last_step=last_step)]
    with MonitoredTrainingLoop(step, model, optimizer, checkpoint_dir=folder, hooks=hooks, **arguments) as loop:
        while not loop.should_stop():
            loop.run()
            made.append(loop.global_step)
    return made


def test_a_second_loop_continues_where_the_first_ended(tmp_path: Path) -> None:
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    assert train(tmp_path, first, 3) == [1, 2, 3]
    assert train(tmp_path, second, 5) == [4, 5]
    train(tmp_path / "other", first, 2)  # two more steps of the first one
    assert torch.equal(first.weight, second.weight)


def test_the_saver_of_the_scaffold_saves_and_restores(tmp_path: Path) -> None:
    scaffold = Scaffold(saver=Saver(max_to_keep=2))
    train(tmp_path, torch.nn.Linear(2, 1), 5, scaffold=scaffold, save_checkpoint_steps=1)
    assert saved_steps(tmp_path) == [4, 5]


def test_other_arguments_are_those_of_the_loop(tmp_path: Path) -> None:
    losses = iter([0.5, TimeoutError(), 0.25])

    def step() -> Any:
        loss = next(losses)
        if isinstance(loss, Exception):
            raise loss
        return loss

    with MonitoredTrainingLoop(step, checkpoint_dir=tmp_path, recoverable_errors=[TimeoutError]) as loop:
        assert [loop.run(), loop.run()] == [0.5, 0.25]


def test_an_unknown_argument_is_an_error() -> None:
    with pytest.raises(TypeError, match="save_checkpoints_steps"):
        MonitoredTrainingLoop(lambda: 0.5, save_checkpoints_steps=5)


def test_the_grace_period_of_the_threads_is_passed_on() -> None:
    release = threading.Event()
    straggler = threading.Thread(target=release.wait, name="straggler")

    class StartsStraggler(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            coord.register_thread(straggler)
            straggler.start()

    with (
        log_lines() as lines,
        MonitoredTrainingLoop(lambda: 0.5, hooks=[StartsStraggler()], stop_grace_period_secs=0.0625),
    ):
        pass
    release.set()
    assert [text for _, text in lines if "straggler" in text and "0.0625 s after" in text]


def test_a_state_of_a_hook_that_is_gone_is_passed_over(tmp_path: Path) -> None:
    with MonitoredTrainingLoop(lambda: 0.5, checkpoint_dir=tmp_path, chief_only_hooks=[Remembering()]) as loop:
        loop.run()
    with log_lines() as lines, MonitoredTrainingLoop(lambda: 0.5, checkpoint_dir=tmp_path) as loop:
        assert loop.global_step == 1
    path = tmp_path / "model.ckpt-1"
    assert ("INFO", f"{path} has a state of remembering, which the loop does not have: it is passed over") in lines


def test_a_saver_among_the_hooks_is_used_in_addition_to_the_default_one(tmp_path: Path) -> None:
    own = CheckpointSaverHook(tmp_path / "own", save_steps=1)
    with MonitoredTrainingLoop(lambda: 0.5, checkpoint_dir=tmp_path, hooks=[own], save_checkpoint_steps=2) as loop:
        for _ in range(2):
            loop.run()
    assert (saved_steps(tmp_path), saved_steps(tmp_path / "own")) == ([0, 2], [0, 1, 2])
