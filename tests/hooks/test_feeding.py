"""Hooks that pass values to the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchhooks import FeedFnHook, FinalOpsHook, MonitoredLoop
from torchhooks.testing import RecordingHook


def run(*hooks: Any, times: int = 1) -> list[Any]:
    """Return what the step ``x -> x`` returned in each run."""
    returned = []
    with MonitoredLoop(lambda x: x, hooks=hooks) as loop:
        for _ in loop.until_stop(range(times)):
            returned.append(loop.run())
    return returned


def test_the_function_is_called_before_each_step() -> None:
    numbers = iter([1, 2, 3])
    assert run(FeedFnHook(lambda: {"x": next(numbers)}), times=3) == [1, 2, 3]


def test_other_hooks_can_fetch_what_was_fed() -> None:
    hook = RecordingHook("x")
    run(FeedFnHook(lambda: {"x": 5}), hook)
    assert hook.results == [5]


def test_an_error_in_the_function_is_raised_with_a_note_that_names_the_hook() -> None:
    def reads() -> dict[str, Any]:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk") as caught:
        run(FeedFnHook(reads))
    assert "in before_run of FeedFnHook(" in caught.value.__notes__[0]


@pytest.mark.parametrize("fed", [5, [("x", 1)], "x"])
def test_a_result_that_is_not_a_mapping_is_an_error_that_names_the_hook(fed: Any) -> None:
    with pytest.raises(TypeError, match=r"before_run of FeedFnHook\(.*return a mapping, parameter name to value"):
        run(FeedFnHook(lambda: fed))


@pytest.mark.parametrize("key", [1, None, ("x",), torch.ones(2)], ids=["int", "None", "tuple", "tensor"])
@pytest.mark.parametrize("step", [lambda x=7: x, lambda **fed: fed, max], ids=["one", "any", "no signature"])
def test_a_key_that_is_not_a_name_is_refused_by_the_name_of_the_hook(step: Any, key: Any) -> None:
    hook = FeedFnHook(lambda: {"x": 1, key: 1})
    with (
        pytest.raises(TypeError, match=r"^FeedFnHook\(.*\) \(hook 0\) feeds .*, which is not a name: .* a str\n"),
        MonitoredLoop(step, hooks=[hook]) as loop,
    ):
        loop.run()


@pytest.mark.parametrize("key", [1, None])
def test_a_session_and_a_hook_at_the_end_take_names_only(key: Any) -> None:
    with MonitoredLoop(int) as loop, pytest.raises(TypeError, match=r"Session\.run feeds"):
        loop.session.run("global_step", {key: 1})
    with pytest.raises(TypeError, match="FinalOpsHook feeds"):
        FinalOpsHook("global_step", {key: 1})


@pytest.mark.parametrize("feed_fn", [None, {"x": 1}, "x"])
def test_rejects_a_feed_fn_that_is_not_callable(feed_fn: Any) -> None:
    with pytest.raises(TypeError, match=r"feed_fn=.* returns a mapping, from parameter to value"):
        FeedFnHook(feed_fn)


def test_a_hook_can_be_reused() -> None:
    hook = FeedFnHook(lambda: {"x": 1})
    assert run(hook) == run(hook) == [1]


def test_the_repr_shows_the_function() -> None:
    assert repr(FeedFnHook(dict)) == "FeedFnHook(<class 'dict'>)"
