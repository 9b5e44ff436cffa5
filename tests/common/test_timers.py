"""Timers: recorded answers of TensorFlow, a model to compare with, and errors."""

import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import TRACES

from torchhooks import (
    AtSteps,
    CheckpointSaverHook,
    EveryEpochs,
    LoggingTensorHook,
    NeverTriggerTimer,
    SecondOrStepTimer,
    StepCounterHook,
    SummarySaverHook,
)
from torchhooks.common.timers import NEVER, NOW, Due
from torchhooks.testing import FakeClock

SCENARIOS = json.loads((TRACES / "timer.json").read_text())

Timer = SecondOrStepTimer | NeverTriggerTimer


def apply(timer: Timer, op: str, step: int) -> Any:
    if op == "should":
        return timer.should_trigger_for_step(step)
    if op == "update":
        return list(timer.update_last_triggered_step(step))
    return timer.last_triggered_step() if op == "last" else timer.reset()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario["name"])
def test_answers_as_tensorflow_did(scenario: dict[str, Any], clock: FakeClock) -> None:
    timer, out = SecondOrStepTimer(**scenario["timer"]), []
    for op in scenario["ops"]:
        clock.advance(op["secs"])
        out.append(apply(timer, op["op"], op["step"]))
    assert out == scenario["expect"]["out"]


class Model:
    """A timer that spells out the rules: it remembers one trigger, and the time is an argument."""

    def __init__(self, secs: float | None, steps: int | None) -> None:
        self.secs, self.steps = secs, steps
        self.last: tuple[int, float] | None = None

    def should(self, step: int, now: float) -> bool:
        if self.last is None:
            return True
        steps_since, secs_since = step - self.last[0], now - self.last[1]
        full = secs_since >= self.secs if self.secs is not None else steps_since >= (self.steps or 0)
        return full and steps_since != 0

    def update(self, step: int, now: float) -> tuple[float | None, int | None]:
        last, self.last = self.last, (step, now)
        return (None, None) if last is None else (now - last[1], step - last[0])


STEPS = range(12)
# Quarters of a second are exact in binary, so that the model can compare differences.
quarters = st.integers(0, 12).map(lambda n: n / 4)
periods = st.one_of(
    st.fixed_dictionaries({"every_secs": quarters}), st.fixed_dictionaries({"every_steps": st.integers(1, 4)})
)
# Steps also go back, as they do after a recovery.
moves = st.lists(st.tuples(st.sampled_from(["update", "wait", "reset"]), st.sampled_from(STEPS), quarters), max_size=20)


@given(period=periods, moves=moves)
def test_agrees_with_the_model(period: dict[str, Any], moves: list[tuple[str, int, float]]) -> None:
    with FakeClock() as clock:
        timer, model = SecondOrStepTimer(**period), Model(period.get("every_secs"), period.get("every_steps"))
        for op, step, secs in moves:
            clock.advance(secs)
            if op == "reset":
                timer.reset()
                model.last = None
            elif op == "update":
                assert timer.update_last_triggered_step(step) == model.update(step, clock())
            assert list(map(timer.should_trigger_for_step, STEPS)) == [model.should(step, clock()) for step in STEPS]
            assert timer.last_triggered_step() == (None if model.last is None else model.last[0])


def has_come(due: Due, step: int, now: float) -> bool:
    by_step = due.step is not None and step >= due.step
    by_time = due.moment is not None and now >= due.moment
    return by_step or by_time or due.runs == 1


@given(period=periods, moves=moves)
def test_no_step_triggers_before_it_is_due(period: dict[str, Any], moves: list[tuple[str, int, float]]) -> None:
    with FakeClock() as clock:
        timer = SecondOrStepTimer(**period)
        for op, last_step, secs in moves:
            clock.advance(secs)
            if op == "update":
                timer.update_last_triggered_step(last_step)
            triggers = set(filter(timer.should_trigger_for_step, STEPS))
            assert triggers <= {step for step in STEPS if has_come(timer.next_due(), step, clock())}


# Any floats: both sides have to round alike, or the due moment and the trigger would differ in the last bit.
@given(start=st.floats(0, 1e6), secs=st.floats(0, 1e4))
def test_triggers_at_the_moment_it_is_due_and_not_a_float_earlier(start: float, secs: float) -> None:
    timer = SecondOrStepTimer(every_secs=secs)
    with FakeClock(start):
        timer.update_last_triggered_step(1)
    moment = timer.next_due().moment
    assert moment is not None
    with FakeClock(moment):
        assert timer.should_trigger_for_step(2)
    with FakeClock(math.nextafter(moment, -math.inf)):
        assert not timer.should_trigger_for_step(2)


def test_is_due_at_once_before_the_first_trigger() -> None:
    assert SecondOrStepTimer(every_steps=5).next_due() == NOW


def test_is_due_a_period_of_steps_after_the_last_trigger() -> None:
    timer = SecondOrStepTimer(every_steps=5)
    timer.update_last_triggered_step(7)
    assert timer.next_due() == Due(step=12)


def test_is_due_a_period_of_seconds_after_the_last_trigger(clock: FakeClock) -> None:
    timer = SecondOrStepTimer(every_secs=2.5)
    timer.update_last_triggered_step(7)
    assert timer.next_due() == Due(moment=1002.5)


def test_a_period_of_zero_seconds_triggers_at_every_new_step(clock: FakeClock) -> None:
    timer = SecondOrStepTimer(every_secs=0)
    timer.update_last_triggered_step(1)
    assert [timer.should_trigger_for_step(step) for step in (1, 2)] == [False, True]


def test_any_integer_type_is_a_number_of_steps() -> None:
    assert repr(SecondOrStepTimer(every_steps=np.int64(3))) == "SecondOrStepTimer(every_steps=3)"  # type: ignore[arg-type]


def test_refuses_two_periods() -> None:
    with pytest.raises(ValueError, match=r"SecondOrStepTimer\(every_secs=1, every_steps=2\): .* not both"):
        SecondOrStepTimer(every_secs=1, every_steps=2)


@pytest.mark.parametrize(
    ("create", "periods"),
    [
        (lambda: CheckpointSaverHook("run", save_steps=5, every_n_epochs=1), "save_steps=5, every_n_epochs=1"),
        (lambda: SummarySaverHook(5, summary_op="loss", every_n_steps=1), "save_steps=5, every_n_steps=1"),
        (lambda: LoggingTensorHook(["loss"], 5, every_n_epochs=2), "every_n_iter=5, every_n_epochs=2"),
        (lambda: LoggingTensorHook(["loss"], every_n_secs=5, every_n_steps=2), "every_n_secs=5, every_n_steps=2"),
        (lambda: StepCounterHook(50, every_n_epochs=2), "every_n_steps=50, every_n_epochs=2"),
    ],
)
def test_two_periods_are_named_as_they_were_given(create: Callable[[], object], periods: str) -> None:
    with pytest.raises(ValueError, match=f"^{periods}: .* not two$"):
        create()


def test_refuses_no_period() -> None:
    with pytest.raises(ValueError, match="none was given"):
        SecondOrStepTimer()


@pytest.mark.parametrize("steps", [0, -3, 2.5, True, "ten", math.inf])
def test_refuses_an_invalid_number_of_steps(steps: Any) -> None:
    with pytest.raises(ValueError, match=f"every_steps={steps!r}: .* 1 or more"):
        SecondOrStepTimer(every_steps=steps)


@pytest.mark.parametrize("secs", [-0.5, math.nan, -math.inf, "soon", [1], True])
def test_refuses_an_invalid_number_of_seconds(secs: Any) -> None:
    with pytest.raises(ValueError, match=r"every_secs=.*: .* 0 or more"):
        SecondOrStepTimer(every_secs=secs)


HUGE = [10**400, 10**5000, Fraction(10**400)]
"""Numbers beyond the range of floats; Python refuses to print the second."""
PERIODS_IN_SECS: dict[str, Callable[[Any], object]] = {
    "every_secs": lambda secs: SecondOrStepTimer(every_secs=secs),
    "every_n_secs": lambda secs: StepCounterHook(None, every_n_secs=secs),
    "save_secs": lambda secs: CheckpointSaverHook("ckpt", save_secs=secs),
}
PERIODS_IN_STEPS: dict[str, Callable[[Any], object]] = {
    "every_steps": lambda steps: SecondOrStepTimer(every_steps=steps),
    "every_n_iter": lambda steps: LoggingTensorHook(["loss"], every_n_iter=steps),
    "save_steps": lambda steps: CheckpointSaverHook("ckpt", save_steps=steps),
}


@pytest.mark.parametrize("secs", HUGE, ids=["printable", "too long", "fraction"])
@pytest.mark.parametrize("name", PERIODS_IN_SECS)
def test_refuses_a_number_of_seconds_beyond_the_range_of_floats(name: str, secs: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.*: must fit into a float, whose largest number is 1\.8e308"):
        PERIODS_IN_SECS[name](secs)


@pytest.mark.parametrize("secs", [math.inf, np.longdouble("1e4000")], ids=repr)
@pytest.mark.parametrize("name", PERIODS_IN_SECS)
def test_refuses_an_infinite_number_of_seconds(name: str, secs: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.*: a period must be finite; 1e9 seconds"):
        PERIODS_IN_SECS[name](secs)


@pytest.mark.parametrize("steps", [2**63, 10**400, 10**5000], ids=["2**63", "printable", "too long"])
@pytest.mark.parametrize("name", PERIODS_IN_STEPS)
def test_refuses_a_number_of_steps_that_no_global_step_can_reach(name: str, steps: int) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.*: must be less than 2\*\*63, as every global step is"):
        PERIODS_IN_STEPS[name](steps)


@pytest.mark.parametrize("steps", [-(10**400), -(10**5000)], ids=["printable", "too long"])
def test_refuses_a_hugely_negative_number_of_steps(steps: int) -> None:
    with pytest.raises(ValueError, match=r"every_steps=.*: must be a whole number, 1 or more"):
        SecondOrStepTimer(every_steps=steps)


@pytest.mark.parametrize("period", [{"every_secs": 1e308}, {"every_steps": 2**63 - 1}], ids=repr)
def test_the_longest_periods_do_not_trigger_again(period: dict[str, Any], clock: FakeClock) -> None:
    timer = SecondOrStepTimer(**period)
    timer.update_last_triggered_step(2**62)
    clock.advance(1e9)
    assert not timer.should_trigger_for_step(2**63 - 1)
    assert timer.next_due() not in (NOW, NEVER)


@pytest.mark.parametrize("op", ["should", "update", "last", "reset"])
def test_never_trigger_timer_answers_false_or_none(op: str) -> None:
    assert apply(NeverTriggerTimer(), op, 1) in (False, None, [None, None])


def test_never_trigger_timer_is_never_due_even_after_an_update() -> None:
    timer = NeverTriggerTimer()
    timer.update_last_triggered_step(1)
    assert (timer.should_trigger_for_step(99), timer.next_due()) == (False, NEVER)


# -- at steps, and at the end of epochs -------------------------------------------------------------------------------


def test_at_steps_triggers_once_at_each_step_also_if_a_run_passes_it() -> None:
    timer, triggered = AtSteps([7, 2, 2]), []
    for step in (1, 2, 3, 6, 9, 10):
        if timer.should_trigger_for_step(step):
            triggered.append((step, timer.update_last_triggered_step(step)[1]))
    assert triggered == [(2, None), (9, 7)]
    assert (timer.next_due(), timer.last_triggered_step()) == (NEVER, 9)


def test_at_steps_does_not_trigger_again_after_a_resume_and_does_after_a_recovery() -> None:
    timer = AtSteps([2, 5])
    timer.start_at(3)
    assert timer.next_due() == Due(step=5)
    timer.update_last_triggered_step(5)
    timer.start_at(1)
    assert (timer.next_due(), timer.last_triggered_step()) == (Due(step=2), None)


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        ([], ValueError, r"AtSteps\(\[\]\): give at least one global step, such as \[100, 200\]"),
        ([0], ValueError, "a step of AtSteps=0: .* 1 or more"),
        (100, TypeError, r"steps=100: give a list of global steps, such as \[100, 200\]"),
        ("100", TypeError, "steps='100': give a list"),
    ],
)
def test_at_steps_refuses_what_is_not_a_list_of_steps(steps: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AtSteps(steps)


def test_a_timer_of_epochs_measures_from_one_trigger_to_the_next(clock: FakeClock) -> None:
    timer = EveryEpochs()
    assert not timer.should_trigger_for_step(4)  # by itself: the loop says that an epoch has ended
    assert timer.update_last_triggered_step(4) == (None, None)
    assert not timer.should_trigger_for_step(5)
    clock.advance(2.0)
    assert timer.update_last_triggered_step(8) == (2.0, 4)
    assert timer.last_triggered_step() == 8


def test_every_hook_gets_a_copy_of_a_timer_of_steps() -> None:
    timer = AtSteps([1])
    hooks = [LoggingTensorHook(["global_step"], timer=timer) for _ in range(2)]
    assert [hook.next_due() for hook in hooks] == [Due(step=1)] * 2
    assert timer.last_triggered_step() is None
    assert not timer.should_trigger_for_step(0)
