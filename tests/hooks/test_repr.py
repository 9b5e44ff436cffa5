"""A hook keeps the arguments it was created with, and shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchhooks import CheckpointSaverHook, LoggingTensorHook, StopAtStepHook, SummarySaverHook


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
