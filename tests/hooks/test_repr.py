"""What can be created from arguments keeps them, and shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.packages import import_or_skip

import torchhooks
from torchhooks import CheckpointSaverHook, LoggingTensorHook, StopAtStepHook, SummarySaverHook

REPRS = [
    "AtSteps([2, 5])",
    "BestCheckpointHook('run', 'accuracy', save_steps=100, mode='max')",
    "BestCheckpointHook('run', 'loss', save_secs=2.5, mode='min', keep=3, name='least', async_save=True)",
    "CheckpointSaverHook('run', save_steps=5, saver=Saver(max_to_keep=3), checkpoint_basename='net')",
    "EveryEpochs(3)",
    "EverySteps(10)",
    "FinalOpsHook('loss', final_ops_feed_dict={'x': 1})",
    "FinalOpsHook({'a': 'loss'})",
    "GlobalStepWaiterHook(10)",
    "LoggingTensorHook(['loss', 'lr'], every_n_iter=10)",
    "LoggingTensorHook({'a': 'loss'}, every_n_secs=0.5, at_end=True)",
    "NanTensorHook('loss')",
    "NanTensorHook(['loss', 'fc.weight'], fail_on_nan_loss=False, also_inf=True)",
    "NeverTriggerTimer()",
    "ProfilerHook(save_secs=2.5, output_dir='a', runs=3)",
    "ProfilerHook(save_steps=5)",
    "ProgressBarHook()",
    "ProgressBarHook(per='epoch')",
    "ProgressBarHook(total=9, values=['loss'])",
    "Saver()",
    "Saver(keep_checkpoint_every_n_hours=2, async_save=True, strict=False)",
    "Saver(max_to_keep=None)",
    "SecondOrStepTimer(every_secs=0.5)",
    "SecondOrStepTimer(every_steps=10)",
    "StepCounterHook()",
    "StepCounterHook(every_n_steps=10, output_dir='runs')",
    "StepCounterHook(every_n_steps=None, every_n_secs=2.5)",
    "StopAtStepHook(last_step=0)",
    "StopAtStepHook(num_steps=5)",
    "StopIfHigherHook('loss', threshold=0.5)",
    "StopIfLowerHook('loss', threshold=0.5, min_steps=3, every_n_steps=2)",
    "StopIfNoDecreaseHook('loss', max_steps_without_decrease=5)",
    "StopIfNoIncreaseHook('loss', max_steps_without_increase=5, timer=EverySteps(3), name='loss', min_delta=0.5)",
    "SummarySaverHook(save_secs=2.5, summary_op='loss')",
    "SummarySaverHook(save_steps=10, output_dir='runs', summary_op={'loss': 'loss'})",
]


def test_a_repr_of_a_hook_a_timer_or_a_saver_can_be_pasted_back() -> None:
    import_or_skip("tqdm")
    assert [repr(eval(text, vars(torchhooks).copy())) for text in REPRS] == REPRS


class LogLoss(LoggingTensorHook):
    def __init__(self, every: int, at_end: bool = False) -> None:
        super().__init__(["loss"], every_n_steps=every, at_end=at_end)


class Forwarding(LoggingTensorHook):
    def __init__(self, label: str, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Plain(LoggingTensorHook):
    pass


@pytest.mark.parametrize(
    "text",
    [
        "LogLoss(5)",
        "LogLoss(5, at_end=True)",
        "Forwarding('a', ['loss'], 5, prefix='>', at_end=True)",
        "Plain(['loss'], every_n_iter=5)",
    ],
)
def test_a_users_subclass_shows_its_own_arguments(text: str) -> None:
    assert repr(eval(text)) == text


def test_an_argument_that_equals_its_default_is_not_shown() -> None:
    assert repr(LoggingTensorHook(["loss"], every_n_iter=5, at_end=False, timer=None)) == (
        "LoggingTensorHook(['loss'], every_n_iter=5)"
    )


@pytest.mark.parametrize("kind", [CheckpointSaverHook, SummarySaverHook])
def test_a_path_is_shown_as_text(kind: Any) -> None:
    hook = kind(Path("run"), 5) if kind is CheckpointSaverHook else kind(5, output_dir=Path("run"), summary_op="loss")
    assert "'run'" in repr(hook)
    assert "Path" not in repr(hook)


def test_a_subclass_can_be_shown_before_it_has_called_the_constructor_of_its_base() -> None:
    shown = []

    class Late(StopAtStepHook):
        def __init__(self, epochs: int) -> None:
            shown.append(repr(self))
            super().__init__(last_step=100 * epochs)

    Late(3)
    assert shown == ["Late(3)"]


def test_a_wrong_keyword_of_a_subclass_names_its_arguments() -> None:
    with pytest.raises(TypeError, match=r"LogLoss takes no evry=\. Did you mean 'every'\? It takes every=, at_end="):
        LogLoss(evry=5)  # type: ignore[call-arg]
