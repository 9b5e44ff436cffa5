"""Trigger: when the loop calls a hook, and whether the hook is due."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from torchhooks import (
    AtSteps,
    CallFnHook,
    CheckpointSaverHook,
    Due,
    EveryEpochs,
    EverySteps,
    LoggingTensorHook,
    MonitoredLoop,
    NeverTriggerTimer,
    OnSignal,
    PeriodicHook,
    SecondOrStepTimer,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    StepCounterHook,
    SummarySaverHook,
)
from torchhooks.common.timers import NEVER, called_within
from torchhooks.lifecycle.trigger import NEVER_STEP, Trigger
from torchhooks.testing import FakeClock, RecordingWriter, trace

NOT_YET = -math.inf


def started(timer: Any, step: int = 0, **arguments: Any) -> Trigger:
    """Return the trigger of a session that begins at ``step``."""
    trigger = Trigger(timer, **arguments)
    trigger.start_at(step)
    trigger.plan(timer.next_due(), 0)
    return trigger


# -- when the loop calls the hook -------------------------------------------------------------------------------------


def test_before_the_first_plan_the_hook_is_not_called() -> None:
    trigger = Trigger()
    assert (trigger.step, trigger.run, trigger.moment, trigger.due) == (NEVER_STEP, NEVER_STEP, math.inf, False)


def test_a_plan_is_absolute() -> None:
    trigger = Trigger()
    trigger.plan(Due(step=7, moment=12.5, runs=3, epochs=2), run=10)
    assert (trigger.step, trigger.moment, trigger.run, trigger.epochs) == (7, 12.5, 13, 2)
    trigger.plan(NEVER, run=11)
    assert (trigger.step, trigger.moment, trigger.run, trigger.epochs) == (NEVER_STEP, math.inf, NEVER_STEP, None)


def test_none_means_every_run() -> None:
    trigger = Trigger()
    trigger.plan(None, run=10)
    assert trigger.step == -1


def test_the_step_of_a_timer_that_counts_runs_is_a_run() -> None:
    timer = SecondOrStepTimer(every_steps=4)
    trigger = started(timer, triggers_at_once=True, counts_runs=True)
    assert trigger.is_due_at(100, 1, NOT_YET)
    trigger.fire(100, 1)
    trigger.plan(timer.next_due(), 1)
    assert (trigger.step, trigger.run) == (NEVER_STEP, 5)
    assert [run for run in range(2, 7) if trigger.is_due_at(1000, run, NOT_YET)] == [5, 6]


def test_a_timer_of_runs_does_not_count_a_run_that_failed_before_the_hook_was_done() -> None:
    timer = SecondOrStepTimer(every_steps=4)
    trigger = started(timer, triggers_at_once=True, counts_runs=True)
    trigger.fire(1, 1)
    trigger.miss_run()
    trigger.miss_run()
    trigger.plan(timer.next_due(), 3)
    assert trigger.run == 7
    assert [trigger.is_due_at(0, run, NOT_YET) for run in (6, 7)] == [False, True]


@pytest.mark.parametrize(
    ("due", "runs", "expected"),
    [(NEVER, 1, Due(runs=1)), (Due(step=5), 3, Due(step=5, runs=3)), (Due(runs=2), 3, Due(runs=2))],
)
def test_a_hook_is_called_within_some_runs(due: Due, runs: int, expected: Due) -> None:
    assert called_within(runs, due) == expected


# -- whether it is due ------------------------------------------------------------------------------------------------


def test_without_a_timer_the_hook_decides_by_itself() -> None:
    trigger = Trigger()
    trigger.plan(None, 0)
    trigger.force()
    assert not trigger.is_due_at(1, 1, math.inf)


@pytest.mark.parametrize(
    ("timer", "due"),
    [
        (EverySteps(4), [4, 5, 6]),
        (AtSteps([3]), [3, 4, 5, 6]),
        (SecondOrStepTimer(every_steps=5), [5, 6]),
        (EveryEpochs(), []),
        (OnSignal("SIGUSR1"), []),
        (NeverTriggerTimer(), []),
    ],
    ids=repr,
)
def test_a_timer_says_from_which_step_on_a_run_is_due(timer: Any, due: list[int]) -> None:
    trigger = started(timer)
    assert [step for step in range(1, 7) if trigger.is_due_at(step, step, NOT_YET)] == due


def test_to_ask_changes_nothing() -> None:
    trigger = started(EverySteps(2))
    before = {name: getattr(trigger, name) for name in Trigger.__slots__}
    assert all(trigger.is_due_at(2, 2, NOT_YET) for _ in range(3))
    assert {name: getattr(trigger, name) for name in Trigger.__slots__} == before


@pytest.mark.parametrize("forced", [False, True])
def test_never_twice_for_one_step(forced: bool, clock: FakeClock) -> None:
    trigger = started(SecondOrStepTimer(every_secs=10))
    clock.advance(10)
    trigger.fire(3)
    clock.advance(10)
    if forced:
        trigger.force()
    assert [step for step in range(3, 5) if trigger.is_due_at(step, step, clock())] == [4]


def test_force_holds_until_the_hook_works_also_over_a_plan() -> None:
    trigger = started(NeverTriggerTimer())
    trigger.force()
    for run in range(1, 4):
        assert trigger.run <= run
        assert trigger.is_due_at(1, run, NOT_YET)
        trigger.plan(NEVER, run)
    trigger.fire(1)
    trigger.plan(NEVER, 4)
    assert (trigger.run, trigger.is_due_at(2, 5, NOT_YET)) == (NEVER_STEP, False)


def test_between_the_work_and_the_plan_it_is_not_due() -> None:
    trigger = started(EverySteps(2))
    trigger.due = trigger.is_due_at(2, 2, NOT_YET)
    assert trigger.due
    trigger.fire(2)
    assert not trigger.due


def test_a_collective_trigger_looks_at_no_clock(clock: FakeClock) -> None:
    trigger = started(SecondOrStepTimer(every_secs=10), is_collective=True)
    assert (trigger.moment, trigger.chief_moment) == (math.inf, clock() + 10)
    assert not trigger.is_due_at(5, 5, clock() + 100)


def test_a_new_session_goes_on_with_the_period(clock: FakeClock) -> None:
    trigger = started(SecondOrStepTimer(every_steps=10), 5)
    trigger.due = True
    trigger.start_at(3)  # a recovery
    assert not trigger.due
    assert [step for step in (13, 14, 15) if trigger.is_due_at(step, step, clock())] == [15]


@pytest.mark.parametrize(("at_once", "due"), [(True, [1, 2, 3, 4]), (False, [3, 4])])
def test_the_first_period_begins_with_the_session_or_the_first_run(at_once: bool, due: list[int]) -> None:
    trigger = started(SecondOrStepTimer(every_steps=3), triggers_at_once=at_once)
    assert [step for step in range(1, 5) if trigger.is_due_at(step, step, NOT_YET)] == due


# -- in a loop --------------------------------------------------------------------------------------------------------


class Diary(PeriodicHook):
    """Writes down in which runs it is called, and in which of them it is due."""

    fetches: Any = "global_step"

    def begin(self) -> None:
        self.called: list[int] = []
        self.due: list[int] = []

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self.called.append(run_context.session.global_step + 1)
        return super().before_run(run_context)

    def run_due(self, run_context: SessionRunContext, values: Any) -> None:
        assert not self.trigger.due  # the work has begun
        self.due.append(values)


def test_called_is_not_due() -> None:
    class Often(Diary):
        def next_due(self) -> Due:
            return called_within(1, super().next_due())

    hook = Often(4)
    trace(hook, losses=[0.5] * 6)
    assert (hook.called, hook.due) == ([1, 2, 3, 4, 5, 6], [4])


def test_a_hook_that_is_called_in_every_run_is_due_in_some() -> None:
    class Always(Diary):
        def next_due(self) -> Any:
            return None

    hook = Always(4)
    trace(hook, losses=[0.5] * 9)
    assert (hook.called, hook.due) == ([*range(1, 10)], [4, 8])


def test_a_hook_that_withdraws_is_due_in_a_later_run() -> None:
    class Reluctant(Diary):
        def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
            if run_context.session.global_step < 5:
                self.trigger.withdraw()
            return super().before_run(run_context)

    hook = Reluctant(4)
    trace(hook, losses=[0.5] * 9)
    assert (hook.called, hook.due) == ([4, 5, 6, 8], [6, 8])


def test_the_work_comes_after_an_overridden_after_run() -> None:
    calls: list[str] = []

    class Both(PeriodicHook):
        def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            calls.append(f"after_run, due: {self.trigger.due}")

        def run_due(self, run_context: SessionRunContext, values: Any) -> None:
            calls.append("run_due")

    trace(Both(2), losses=[0.5] * 3)
    assert calls == ["after_run, due: True", "run_due"]


def test_methods_that_do_not_call_those_of_the_base_class_lose_no_trigger() -> None:
    class Forgetful(Diary):
        def after_create_session(self, session: Any, coord: Any) -> None:
            pass

        def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            pass

        def force_due(self) -> None:
            pass

    hook = Forgetful(4)
    trace(hook, losses=[0.5] * 9)
    assert hook.due == [4, 8]


@pytest.mark.parametrize("at", ["before_run", "after_run"])
def test_hooks_after_one_that_sets_the_step_are_decided_anew(at: str) -> None:
    class Jump(SessionRunHook):
        def before_run(self, run_context: SessionRunContext) -> None:
            if at == "before_run" and run_context.session.global_step == 1:
                run_context.session.global_step = 9

        def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            if at == "after_run" and run_context.session.global_step == 2:
                run_context.session.global_step = 10

    class Late(Diary):
        before_run = SessionRunHook.before_run  # chosen after the step

        def run_due(self, run_context: SessionRunContext, values: Any) -> None:
            self.due.append(run_context.session.global_step)

    early, late = Diary(10), Late(10)
    with MonitoredLoop(lambda: 0.5, hooks=[Jump(), early, late]) as loop:
        for _ in range(4):
            loop.run()
    expected = {"before_run": ([10], [10]), "after_run": ([11], [10])}  # the first is chosen before the step
    assert (early.due, late.due) == expected[at]


def test_a_hook_before_the_one_that_sets_the_step_keeps_its_decision() -> None:
    class Back(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            if run_context.session.global_step == 4:
                run_context.session.global_step = 1

    hook = Diary(4)
    with MonitoredLoop(lambda: 0.5, hooks=[hook, Back()]) as loop:
        for _ in range(5):
            loop.run()
    assert hook.due == [4]


def test_a_run_that_fails_leaves_no_hook_due() -> None:
    hook = Diary(2)

    class Looks(SessionRunHook):
        def before_run(self, run_context: SessionRunContext) -> None:
            due.append(hook.trigger.due)

    def step(number: int) -> float:
        if number == 2:
            raise ValueError
        return 0.5

    due: list[bool] = []
    with MonitoredLoop(step, hooks=[Looks(), hook]) as loop:
        for number in range(1, 4):
            try:
                loop.run(number)
            except ValueError:
                assert not hook.trigger.due
    assert due == [False, True, True]  # the step after the failed run has its number
    assert hook.due == [2]


def test_every_loop_has_a_new_trigger() -> None:
    hook = Diary(every_n_secs=3)
    triggers = []
    for _ in range(2):
        trace(hook, losses=[0.5] * 5)
        triggers.append(hook.trigger)
        assert hook.due == [4]
    assert triggers[0] is not triggers[1]


def test_a_loop_that_is_refused_takes_no_trigger_from_the_one_that_has_the_hook() -> None:
    hook = Diary(2)
    with MonitoredLoop(lambda: 0.5, hooks=[hook]) as loop:
        for run in range(1, 7):
            loop.run()
            if run == 3:
                with pytest.raises(ValueError, match="is in another loop, which is still open"):
                    MonitoredLoop(lambda: 0.5, hooks=[hook])
    assert hook.due == [2, 4, 6]


def test_the_name_of_the_trigger_is_taken() -> None:
    class Method(Diary):
        def trigger(self) -> None:  # type: ignore[override]
            pass

    class Attribute(Diary):
        def __init__(self) -> None:
            super().__init__(2)
            self.trigger = 0.5  # type: ignore[assignment]

    for hook in (Method(2), Attribute()):
        with pytest.raises(TypeError, match=r"(Method|Attribute)\.trigger: .* choose another name"):
            MonitoredLoop(lambda: 0.5, hooks=[hook])


def test_outside_of_a_loop_a_hook_is_never_due() -> None:
    hook = PeriodicHook(1)
    hook.fetches = "loss"
    assert hook.before_run(None) is None  # type: ignore[arg-type]
    assert hook.elapsed_secs is None


def test_hooks_that_share_a_timer_in_seconds_are_due_in_the_same_runs(clock: FakeClock) -> None:
    timer = SecondOrStepTimer(every_secs=3)
    hooks = [Diary(timer=timer), Diary(timer=timer), Diary(timer=timer)]

    def step() -> float:
        clock.advance(1)
        return 0.5

    with MonitoredLoop(step, hooks=hooks) as loop:
        for _ in range(9):
            loop.run()
    assert [hook.due for hook in hooks] == [[4, 8]] * 3


def test_the_end_of_an_epoch_is_due_without_a_decision() -> None:
    hook = Diary(every_n_epochs=2)
    with MonitoredLoop(lambda loss: loss, hooks=[hook]) as loop:
        for _ in loop.until_stop(range(4)):
            for loss in loop.until_stop([0.5, 0.25]):
                loop.run(loss)
                assert not hook.trigger.due
    assert hook.due == [4, 8]


def test_an_error_at_the_end_of_an_epoch_leaves_no_hook_due() -> None:
    class Fails(SessionRunHook):
        def next_due(self) -> Due:
            return Due(epochs=1)

        failures = iter([ValueError("at the end")])

        def before_run(self, run_context: SessionRunContext) -> None:
            for failure in self.failures:
                raise failure

    hook = Diary(every_n_epochs=1)

    def epoch(loop: MonitoredLoop[Any]) -> None:
        for loss in loop.until_stop([0.5, 0.25]):
            loop.run(loss)

    with MonitoredLoop(lambda loss: loss, hooks=[hook, Fails()]) as loop:
        with pytest.raises(ValueError, match="at the end"):
            epoch(loop)
        assert not hook.trigger.due
        loop.run(0.5)
    assert hook.due == []  # nor is it called again for that epoch


def test_the_first_run_starts_the_clock_of_a_step_counter_whatever_its_timer_is() -> None:
    writer = RecordingWriter()
    hook = StepCounterHook(timer=EverySteps(4), summary_writer=writer)
    trace(hook, losses=[0.5] * 9)
    assert [step for step, _ in writer.scalars["global_step/sec"]] == [4, 8]


def test_a_hook_forces_the_first_run_before_it() -> None:
    steps: list[int] = []
    trace(CallFnHook(lambda loss, global_step: steps.append(global_step), 100, at_start=True), losses=[0.5] * 3)
    assert steps == [1]


def test_a_period_of_runs_goes_on_after_an_error_of_another_hook() -> None:
    class Fails(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            if run_context.session.global_step == 2:
                raise ValueError

    seen: list[int] = []
    log = LoggingTensorHook(["global_step"], every_n_iter=2, formatter=lambda values: seen.append(1) or "")  # type: ignore[func-returns-value]
    runs: list[int] = []
    with MonitoredLoop(lambda: 0.5, hooks=[Fails(), log]) as loop:
        for run in range(1, 8):
            before = len(seen)
            try:
                loop.run()
            except ValueError:
                continue
            runs += [run] * (len(seen) - before)
    assert runs == [1, 4, 6]  # TensorFlow's hook counts its own runs, and run 2 was none


def test_a_formatter_that_fails_does_not_count_its_run() -> None:
    runs: list[int] = []

    def formatter(values: dict[str, Any]) -> str:
        if values["global_step"] == 1:
            raise ValueError("the first run")
        runs.append(values["global_step"])
        return ""

    log = LoggingTensorHook(["global_step"], every_n_iter=4, formatter=formatter)
    with MonitoredLoop(lambda: 0.5, hooks=[log]) as loop:
        with pytest.raises(ValueError, match="the first run"):
            loop.run()
        for _ in range(9):
            loop.run()
    assert runs == [6, 10]  # as in TensorFlow: its timer has triggered for the count of that run, which is made again


def test_a_save_by_hand_of_the_period_moves_the_next_one(tmp_path: Path) -> None:
    class Saves(SessionRunHook):
        """A hook of the epoch whose stop saves, so that the saver begins a period between two runs."""

    saver = CheckpointSaverHook(tmp_path, every_n_steps=4)
    model = torch.nn.Linear(1, 1)
    steps: list[int] = []
    with MonitoredLoop(lambda x: 0.5, model, hooks=[saver, Saves()], checkpoint_dir=tmp_path) as loop:
        for _ in loop.until_stop(range(3)):
            for _ in range(3):  # items of three runs: a save waits for the end of its item
                loop.run(1)
            steps.append(saver.saved_step or 0)
    assert steps == [0, 0, 6]  # step 4 is saved at 6, and 8 at 9


def test_a_summary_hook_is_called_in_the_first_run_and_due_later() -> None:
    writer = RecordingWriter()
    hook = SummarySaverHook(summary_writer=writer, summary_op={"loss": "loss"}, every_n_steps=3)
    trace(hook, losses=[0.5] * 4)
    assert writer.scalars == {"loss": [(3, 0.5)]}
