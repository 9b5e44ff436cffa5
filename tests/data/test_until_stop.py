"""until_stop: what it takes, when it ends, how it nests, and in which state it leaves the data and the loop."""

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchhooks import (
    LifecycleError,
    MonitoredLoop,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
)
from torchhooks.device.readback import DeviceDuration
from torchhooks.testing import FakeClock, RecordingHook


def half() -> float:
    return 0.5


def raising(error: Exception) -> Callable[[], float]:
    def step() -> float:
        raise error

    return step


def stopping_at(step: int) -> MonitoredLoop[float]:
    return MonitoredLoop(half, hooks=[StopAtStepHook(last_step=step)])


class Counted:
    """An iterable that counts the items taken from it, and records when it is closed."""

    def __init__(self, items: int) -> None:
        self.items = items
        self.taken = 0
        self.closed = False

    def __iter__(self) -> Iterator[int]:
        try:
            for item in range(self.items):
                self.taken += 1
                yield item
        finally:
            self.closed = True


def test_yields_every_item_in_order() -> None:
    with MonitoredLoop(half) as loop:
        assert list(loop.until_stop("abc")) == ["a", "b", "c"]


@pytest.mark.parametrize("falsy", [None, False, 0, ""])
def test_items_may_be_falsy(falsy: object) -> None:
    with MonitoredLoop(half) as loop:
        assert list(loop.until_stop([falsy, falsy])) == [falsy, falsy]


def test_ends_when_a_hook_asks_to_stop() -> None:
    with stopping_at(3) as loop:
        items = [item for item in loop.until_stop(itertools.count()) if loop.run()]
    assert items == [0, 1, 2]
    assert loop.stop_reason == "StopAtStepHook: step 3"


def test_takes_no_item_that_will_not_be_used() -> None:
    batches = Counted(9)
    with stopping_at(3) as loop:
        for _ in loop.until_stop(batches):
            loop.run()
    assert batches.taken == 3


def test_takes_an_item_only_when_it_is_asked_for() -> None:
    batches = Counted(9)
    with MonitoredLoop(half) as loop:
        items = loop.until_stop(batches)
        assert batches.taken == 0
        next(items)
        assert batches.taken == 1
        items.close()


def test_takes_nothing_once_the_loop_has_stopped() -> None:
    batches = Counted(9)
    with stopping_at(1) as loop:
        loop.run()
        assert list(loop.until_stop(batches)) == []
    assert batches.taken == 0


def test_refuses_data_once_the_loop_is_closed() -> None:
    batches = Counted(9)
    loop = MonitoredLoop(half)
    loop.close()
    with pytest.raises(LifecycleError, match=r"until_stop\(\) .* closed loop"):
        next(loop.until_stop(batches))
    assert batches.taken == 0


@pytest.mark.parametrize("limit", [0, 1, 3, 5, 9])
def test_yields_at_most_as_many_items_as_the_limit(limit: int) -> None:
    batches = Counted(5)
    with MonitoredLoop(half) as loop:
        assert len(list(loop.until_stop(batches, limit=limit))) == min(limit, 5)
        assert loop.stop_reason == "data ended"
    assert batches.taken <= limit


@pytest.mark.parametrize("limit", [-1, 1.5, "3", True])
def test_rejects_a_limit_that_is_not_a_number_of_items(limit: Any) -> None:
    with MonitoredLoop(half) as loop, pytest.raises(ValueError, match="limit="):
        loop.until_stop(range(3), limit=limit)


def test_a_stop_requested_by_the_caller_between_runs_takes_effect_now() -> None:
    made = []
    with MonitoredLoop(half) as loop:
        for item in loop.until_stop(range(5)):
            loop.run()
            made.append(item)
            if item == 1:
                loop.request_stop("seen enough")
    assert (made, loop.stop_reason) == ([0, 1], "request_stop: seen enough")


def test_a_stop_requested_by_the_step_takes_effect_after_its_run() -> None:
    recorder = RecordingHook()

    def step() -> float:
        loop.request_stop()
        return 0.5

    with MonitoredLoop(step, hooks=[recorder]) as loop:
        assert loop.run() == 0.5
        assert loop.should_stop()
    assert ("after_run", None, 1) in recorder.calls
    assert loop.stop_reason == "request_stop"


def test_a_stop_requested_by_a_thread_allows_one_more_run() -> None:
    with MonitoredLoop(half) as loop:
        thread = threading.Thread(target=loop.request_stop, args=("enough",))
        thread.start()
        thread.join()
        assert loop.run() == 0.5
        with pytest.raises(LifecycleError, match="enough"):
            loop.run()


def test_a_pause_of_the_loop_is_one_of_its_session() -> None:
    pauses: list[DeviceDuration] = []
    with FakeClock() as clock, MonitoredLoop(half) as loop:
        loop.session.on_pause(pauses.append)
        with loop.paused():
            clock.advance(2.0)
    assert [pause.host_secs for pause in pauses] == [2.0]


def test_a_call_after_an_item_may_ask_for_one_after_the_next() -> None:
    steps: list[int] = []

    class Asking(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            def call() -> None:
                steps.append(run_context.session.global_step)
                if len(steps) == 1:
                    run_context.after_item(call)

            if run_context.session.global_step == 1:
                run_context.after_item(call)

    with MonitoredLoop(half, hooks=[Asking()]) as loop:
        for _ in loop.until_stop(range(3)):
            loop.run()
    assert steps == [1, 2]


def test_a_generator_that_a_variable_still_holds_is_left_when_the_loop_around_it_goes_on() -> None:
    with MonitoredLoop(half) as loop:
        held = []
        for epoch in loop.until_stop(range(3)):
            held.append(loop.until_stop([7, 8, 9]))
            for _ in held[-1]:
                loop.run()
                assert (loop.epoch, loop.batch) == (epoch, 0)
                break
        position = loop.session.position
        assert position is not None
        assert position.depth == 0


def test_the_end_of_the_data_is_a_reason_but_not_a_stop() -> None:
    with MonitoredLoop(half) as loop:
        for _ in loop.until_stop(range(2)):
            loop.run()
        assert (loop.stop_reason, loop.should_stop()) == ("data ended", False)
    assert loop.stop_reason == "data ended"


def test_no_data_is_the_end_of_the_data() -> None:
    with MonitoredLoop(half) as loop:
        assert list(loop.until_stop([])) == []
    assert loop.stop_reason == "data ended"


def test_a_stop_in_the_run_of_the_last_item_is_the_reason() -> None:
    with stopping_at(3) as loop:
        for _ in loop.until_stop(range(3)):
            loop.run()
    assert loop.stop_reason == "StopAtStepHook: step 3"


def test_two_phases_one_after_the_other() -> None:
    reasons = []
    with MonitoredLoop(half) as loop:
        for _ in loop.until_stop(range(2)):
            loop.run()
        for _ in loop.until_stop(range(3)):
            reasons.append(loop.stop_reason)
            loop.run()
    assert reasons == [None, None, None]
    assert (loop.global_step, loop.stop_reason) == (5, "data ended")


def test_a_stop_in_the_first_phase_leaves_nothing_to_the_second() -> None:
    second = Counted(9)
    with stopping_at(2) as loop:
        for _ in loop.until_stop(range(9)):
            loop.run()
        for _ in loop.until_stop(second):
            loop.run()
    assert (loop.global_step, second.taken) == (2, 0)


# -- nesting ----------------------------------------------------------------------------------------------------------


def epochs_of(loop: MonitoredLoop[float], epochs: int, batches: int) -> list[tuple[int, int]]:
    """Return the runs made, as (epoch, batch)."""
    made = []
    for epoch in loop.until_stop(range(epochs)):
        for batch in loop.until_stop(range(batches)):
            loop.run()
            made.append((epoch, batch))
    return made


def test_epochs_around_batches() -> None:
    with MonitoredLoop(half) as loop:
        assert epochs_of(loop, 2, 2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert loop.stop_reason == "data ended"


def test_a_stop_ends_the_epochs_too() -> None:
    with stopping_at(3) as loop:
        assert epochs_of(loop, 90, 2) == [(0, 0), (0, 1), (1, 0)]
    assert loop.stop_reason == "StopAtStepHook: step 3"


def test_a_stop_in_the_last_batch_of_an_epoch_starts_no_other() -> None:
    with stopping_at(2) as loop:
        assert epochs_of(loop, 90, 2) == [(0, 0), (0, 1)]


def test_only_the_outermost_end_of_data_is_a_reason() -> None:
    reasons = []
    with MonitoredLoop(half) as loop:
        for _ in loop.until_stop(range(2)):
            for _ in loop.until_stop(range(1)):
                loop.run()
            reasons.append(loop.stop_reason)
    assert reasons == [None, None]
    assert loop.stop_reason == "data ended"


def test_after_the_inner_loop_was_left_early_the_outer_one_continues() -> None:
    with MonitoredLoop(half) as loop:
        for _ in loop.until_stop(range(3)):
            for _ in loop.until_stop(itertools.count()):
                loop.run()
                break
    assert (loop.global_step, loop.stop_reason) == (3, "data ended")


def test_leaving_the_outermost_early_is_no_end_of_data() -> None:
    with MonitoredLoop(half) as loop:
        for _ in loop.until_stop(range(3)):
            break
        assert loop.stop_reason is None


def test_after_one_that_was_left_early_the_next_is_outermost_again() -> None:
    with MonitoredLoop(half) as loop:
        for _ in loop.until_stop(range(3)):
            break
        for _ in loop.until_stop(range(3)):
            loop.run()
    assert loop.stop_reason == "data ended"


# -- errors and closing -----------------------------------------------------------------------------------------------


def test_an_error_in_the_data_is_raised_and_fails_the_loop() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    hook = RecordingHook()

    def train() -> None:
        with MonitoredLoop(half, hooks=[hook]) as loop:
            for _ in loop.until_stop(batches()):
                loop.run()

    with pytest.raises(OSError, match="disk"):
        train()
    assert [call[0] for call in hook.calls][-2:] == ["after_run", "teardown"]


def test_after_an_error_in_the_data_that_was_caught_the_next_is_outermost_again() -> None:
    with MonitoredLoop(half) as loop:
        with pytest.raises(ZeroDivisionError):
            list(loop.until_stop(1 // item for item in (1, 0)))
        assert list(loop.until_stop("ab")) == ["a", "b"]
    assert loop.stop_reason == "data ended"


def test_what_cannot_be_iterated_is_a_type_error() -> None:
    with (
        MonitoredLoop(half) as loop,
        pytest.raises(TypeError, match=r"until_stop\(3\): .*until_stop\(range\(3\)\)"),
    ):
        next(loop.until_stop(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("leave", ["stop", "break", "end"])
def test_a_generator_is_closed_when_the_loop_over_it_is_left(leave: str) -> None:
    batches = Counted(4)
    with stopping_at(2 if leave == "stop" else 9) as loop:
        for _ in loop.until_stop(batches):
            loop.run()
            if leave == "break":
                break
        assert batches.closed


def test_an_iterator_continues_where_an_earlier_loop_over_it_was_left() -> None:
    batches = iter(range(5))
    with stopping_at(2) as loop:
        for _ in loop.until_stop(batches):
            loop.run()
    assert list(batches) == [2, 3, 4]


def test_the_end_of_another_iterator_in_the_body_ends_the_loop_cleanly() -> None:
    hook, labels = RecordingHook(), iter([1])
    with MonitoredLoop(half, hooks=[hook]) as loop:
        for _ in loop.until_stop(range(9)):
            next(labels)
            loop.run()
    assert hook.calls[-2:] == [("end", 1), ("teardown",)]
    assert loop.stop_reason == "StopIteration"


def test_there_is_no_reason_for_an_end_while_data_iterated_alongside_continue() -> None:
    reasons = []
    with MonitoredLoop(lambda: None) as loop:
        for _ in itertools.zip_longest(loop.until_stop([1, 2]), loop.until_stop([1, 2, 3, 4])):
            loop.run()
            reasons.append(loop.stop_reason)
    assert reasons == [None] * 4
