"""What an exception does: which calls are still made, what comes out, and what is written on it."""

import dataclasses
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    CheckpointSaverListener,
    Coordinator,
    Due,
    EvaluationHook,
    FeedError,
    FetchError,
    LifecycleError,
    MonitoredLoop,
    NanLossDuringTrainingError,
    NoRunYetError,
    Scaffold,
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    TorchHooksError,
)
from torchhooks.testing import RecordingHook

Call = tuple[str, str]


class Exhausted(StopIteration):
    """A subclass, and so an error."""


def half() -> float:
    return 0.5


# -- the matrix: every method, every place in the list, every kind of exception ---------------------------------------

NAMES = ("a", "b", "c")
RUN = ("before_run", "step", "after_run")
#: The calls of each hook in a loop that makes two runs; an exception is raised in the second one.
PHASES = ("begin", "after_create_session", *RUN, *RUN, "end", "teardown")
KINDS = (StopIteration, Exhausted, ValueError, KeyboardInterrupt, SystemExit, AbortedError)

# What an exception leads to, by the method it is raised in: the rest of this phase, the phases that still follow, and
# whether it comes out.
#                          rest   then                  comes out
AT_CREATION = {
    "begin":                (False, ("teardown",),        True),
    "after_create_session": (False, ("teardown",),        True),
}  # fmt: skip
CLEAN_END = dict.fromkeys(RUN, (False, ("end", "teardown"), False))  # StopIteration itself
FAILURE = dict.fromkeys(RUN, (False, ("teardown",), True))  # everything else
AT_THE_END = {
    "end":                  (True,  ("teardown",),        True),
    "teardown":             (True,  (),                   True),
}  # fmt: skip


def rules(kind: type[BaseException]) -> dict[str, tuple[bool, tuple[str, ...], bool]]:
    return AT_CREATION | (CLEAN_END if kind is StopIteration else FAILURE) | AT_THE_END


def in_phase(phase: str) -> list[Call]:
    return [("step", "step")] if phase == "step" else [(name, phase) for name in NAMES]


def expected_calls(method: str, position: int, kind: type[BaseException]) -> list[Call]:
    rest, then, _ = rules(kind)[method]
    fatal = len(PHASES) - 1 - PHASES[::-1].index(method)  # the second run's, where there are two
    calls = [call for phase in PHASES[:fatal] for call in in_phase(phase)]
    calls += in_phase(method)[: None if rest else position + 1]
    begun = NAMES[: position + 1] if method == "begin" else NAMES
    return calls + [call for phase in then for call in in_phase(phase) if call[0] in begun]


class Eager(RecordingHook):
    """Says in every run that it is due in the next one, and so goes the way of the hooks that sit out."""

    def next_due(self) -> Due:
        return Due(runs=1)


def failing_at(method: str, position: int, error: BaseException, kind: type[RecordingHook]) -> tuple[list[Call], Any]:
    """The calls made by a loop in which that happens, and what came out of it."""
    calls: list[tuple[Any, ...]] = []
    fault = {(method, 2 if method in RUN else 1): error}
    runs, out = itertools.count(1), None

    def step() -> None:
        calls.append(("step", "step"))
        if method == "step" and next(runs) == 2:
            raise error

    raises = {} if method == "step" else {NAMES[position]: fault}
    hooks = [kind(name=name, calls=calls, raises=raises.get(name)) for name in NAMES]
    try:
        with MonitoredLoop(step, hooks=hooks) as loop:
            loop.run()
            loop.run()
    except BaseException as caught:
        out = caught
    return [call[:2] for call in calls if call[1] != "raises"], out


PLACES = [(method, position) for method in dict.fromkeys(PHASES) for position in range(1 if method == "step" else 3)]
MATRIX = [  # the rules tell only StopIteration from the other kinds, which are tried in one place of the list
    pytest.param(method, position, kind, id=f"{method}-{NAMES[position]}-{kind.__name__}")
    for (method, position), kind in itertools.product(PLACES, KINDS)
    if kind in (StopIteration, ValueError) or position == 1 or method == "step"
]


@pytest.mark.parametrize("hook", [RecordingHook, Eager])
@pytest.mark.parametrize(("method", "position", "kind"), MATRIX)
def test_an_exception_leads_to_what_the_table_says(
    method: str, position: int, kind: type[BaseException], hook: type[RecordingHook]
) -> None:
    error = kind("the reason")
    calls, out = failing_at(method, position, error, hook)
    assert calls == expected_calls(method, position, kind)
    assert out is (error if rules(kind)[method][2] else None)


STEP_AT = {"begin": 0, "after_create_session": 0, "before_run": 1, "after_run": 2, "end": 2, "teardown": 2}


@pytest.mark.parametrize(("method", "position"), [place for place in PLACES if place[0] != "step"])
def test_an_exception_gets_one_note_with_the_hook_the_method_and_the_step(method: str, position: int) -> None:
    error = ValueError("the reason")
    failing_at(method, position, error, RecordingHook)
    (note,) = error.__notes__
    assert note.startswith(f"torchhooks: in {method} of RecordingHook(")
    assert note.endswith(f"name={NAMES[position]!r}) (hook {position}), at global step {STEP_AT[method]}")


@pytest.mark.parametrize("method", dict.fromkeys(PHASES))
def test_an_exception_keeps_its_traceback_down_to_where_it_was_raised(method: str) -> None:
    _, out = failing_at(method, 0, ValueError("the reason"), RecordingHook)
    names = [frame.name for frame in traceback.extract_tb(out.__traceback__)]
    assert names[0] == "failing_at"
    assert names[-1] == ("step" if method == "step" else "_note")
    assert out.__cause__ is out.__context__ is None


# -- out of the body --------------------------------------------------------------------------------------------------


def leave_body_by(error: BaseException, hook: SessionRunHook) -> MonitoredLoop[float]:
    loop = MonitoredLoop(half, hooks=[hook])
    with loop:
        loop.run()
        raise error
    return loop


def methods(hook: RecordingHook) -> list[str]:
    return [call[0] for call in hook.calls]


def test_stop_iteration_in_the_body_ends_the_loop_cleanly() -> None:
    hook = RecordingHook()
    loop = leave_body_by(StopIteration("no more"), hook)
    assert methods(hook)[-2:] == ["end", "teardown"]
    assert loop.stop_reason == "StopIteration: no more"


@pytest.mark.parametrize(
    "kind", [Exhausted, StopAsyncIteration, ValueError, KeyboardInterrupt, SystemExit, GeneratorExit]
)
def test_any_other_exception_in_the_body_comes_out_and_nobodys_end_is_called(kind: type[BaseException]) -> None:
    hook, error = RecordingHook(), kind("why")
    with pytest.raises(kind) as raised:
        leave_body_by(error, hook)
    assert raised.value is error
    assert methods(hook)[-2:] == ["after_run", "teardown"]


def test_a_generator_around_a_loop_that_is_closed_early_calls_nobodys_end() -> None:
    hook = RecordingHook()

    def losses() -> Iterator[float]:
        with MonitoredLoop(half, hooks=[hook]) as loop:
            for _ in loop.until_stop(itertools.count()):
                yield loop.run()

    training = losses()
    next(training)
    training.close()  # type: ignore[attr-defined]
    assert methods(hook)[-2:] == ["after_run", "teardown"]


# -- a failed run that the body swallows ------------------------------------------------------------------------------


def swallow_a_failed_run(hook: SessionRunHook) -> MonitoredLoop[Any]:
    def step() -> None:
        raise ValueError("bad batch")

    loop = MonitoredLoop(step, hooks=[hook])
    with pytest.raises(ValueError, match="bad batch"):
        loop.run()
    return loop


def test_after_a_failed_run_that_was_swallowed_the_loop_goes_on() -> None:
    hook = RecordingHook()
    with swallow_a_failed_run(hook) as loop:
        assert not loop.should_stop()
        assert loop.stop_reason is None
        assert list(loop.until_stop("ab")) == ["a", "b"]
    assert methods(hook)[-3:] == ["before_run", "end", "teardown"]


def test_after_a_failed_run_that_was_swallowed_close_calls_end() -> None:
    hook = RecordingHook()
    swallow_a_failed_run(hook).close()
    assert methods(hook)[-3:] == ["before_run", "end", "teardown"]


def test_while_the_error_of_the_last_run_is_on_its_way_close_calls_nobodys_end() -> None:
    def train() -> None:
        loop = MonitoredLoop(lambda: 1 / 0, hooks=[hook])
        try:
            loop.run()
        finally:
            loop.close()

    hook = RecordingHook()
    with pytest.raises(ZeroDivisionError) as raised:
        train()
    assert methods(hook)[-2:] == ["before_run", "teardown"]
    assert raised.value.__notes__ == ["torchhooks: in run 1"]


def test_so_it_is_while_an_error_that_was_raised_from_it_is_on_its_way() -> None:
    def train() -> None:
        loop = MonitoredLoop(lambda: 1 / 0, hooks=[hook])
        try:
            try:
                loop.run()
            except ZeroDivisionError as error:
                raise ValueError("training failed") from error
        finally:
            loop.close()

    hook = RecordingHook()
    with pytest.raises(ValueError, match="training failed"):
        train()
    assert methods(hook)[-2:] == ["before_run", "teardown"]


def test_an_error_of_the_script_that_is_on_its_way_does_not_make_the_loop_fail() -> None:
    """``close()`` cannot know that it has to do with the loop: a ``with`` statement does."""

    def train() -> None:
        loop = swallow_a_failed_run(hook)
        try:
            raise KeyError
        finally:
            loop.close()

    hook = RecordingHook()
    with pytest.raises(KeyError):
        train()
    assert methods(hook)[-2:] == ["end", "teardown"]


def test_stop_iteration_after_a_failed_run_that_was_swallowed_is_a_clean_end() -> None:
    hook = RecordingHook()
    with swallow_a_failed_run(hook):
        raise StopIteration
    assert methods(hook)[-2:] == ["end", "teardown"]


def test_stop_iteration_out_of_a_run_that_was_caught_does_not_end_the_loop() -> None:
    hook = RecordingHook(raises={"before_run": StopIteration})
    with MonitoredLoop(half, hooks=[hook]) as loop:
        with pytest.raises(StopIteration):
            loop.run()
        assert not loop.should_stop()
        loop.run()
    assert methods(hook)[2:] == ["before_run", "raises", "before_run", "after_run", "end", "teardown"]


# -- StopIteration out of other places of a run -----------------------------------------------------------------------


def exhausted() -> Any:
    return next(iter(()))


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


@pytest.mark.parametrize(
    "fetches",
    [exhausted, [exhausted], ("loss", exhausted), {"x": exhausted}, Pair("loss", exhausted), [{"x": (exhausted,)}]],
    ids=["alone", "list", "tuple", "dict", "dataclass", "nested"],
)
def test_stop_iteration_in_a_closure_is_a_clean_end(fetches: Any) -> None:
    asking, other = RecordingHook(fetches), RecordingHook()
    with MonitoredLoop(half, hooks=[asking, other]) as loop:
        loop.run()
        pytest.fail("the body went on")
    assert methods(asking) == methods(other) == ["begin", "after_create_session", "before_run", "end", "teardown"]


class Guarding(SessionRunHook):
    """Guards checkpoints, or listens to pauses, with a function that raises StopIteration once there were two runs."""

    def __init__(self, register: str) -> None:
        self.register = register

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        def call(*_: object) -> None:
            if session.global_step == 2:
                raise StopIteration("enough")

        getattr(session, self.register)(call)


@pytest.mark.parametrize("register", ["guard_checkpoints", "on_pause"])
@pytest.mark.parametrize("save_steps", [1, 2])
def test_stop_iteration_around_a_checkpoint_is_a_clean_end(register: str, save_steps: int, tmp_path: Path) -> None:
    recorder, saver = RecordingHook(), CheckpointSaverHook(tmp_path, save_steps=save_steps)
    with MonitoredLoop(half, hooks=[Guarding(register), saver, recorder], checkpoint_dir=tmp_path) as loop:
        for _ in range(9):
            loop.run()
    assert (loop.global_step, loop.stop_reason) == (2, "StopIteration: enough")
    assert methods(recorder)[-2:] == ["end", "teardown"]


@pytest.mark.parametrize("register", ["guard_checkpoints", "on_pause"])
def test_stop_iteration_around_a_checkpoint_between_two_items_is_a_clean_end(register: str, tmp_path: Path) -> None:
    recorder, saver = RecordingHook(), CheckpointSaverHook(tmp_path, save_steps=2)
    with MonitoredLoop(half, hooks=[Guarding(register), saver, recorder], checkpoint_dir=tmp_path) as loop:
        for _ in loop.until_stop(range(9)):
            loop.run()
    assert (loop.global_step, loop.stop_reason) == (2, "StopIteration: enough")
    assert methods(recorder)[-2:] == ["end", "teardown"]


class GuardingSession(SessionRunHook):
    """Guards the checkpoints of one session with a function that raises StopIteration."""

    def __init__(self, number: int) -> None:
        self.number, self.created = number, 0

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self.created += 1
        session.guard_checkpoints(self.refusal)

    def refusal(self) -> None:
        if self.created == self.number:
            raise StopIteration("enough")


def by_run(loop: MonitoredLoop[Any], step: Callable[[], None]) -> None:
    loop.run()


def by_step_function(loop: MonitoredLoop[Any], step: Callable[[], None]) -> None:
    loop.run_step_fn(lambda context: context.run_with_hooks())


def by_body(loop: MonitoredLoop[Any], step: Callable[[], None]) -> None:
    with loop.step():
        step()


@pytest.mark.parametrize("make_run", [by_run, by_step_function, by_body])
def test_stop_iteration_around_the_first_checkpoint_after_a_recovery_is_a_clean_end(
    make_run: Callable[[MonitoredLoop[Any], Callable[[], None]], None], tmp_path: Path
) -> None:
    def step() -> None:
        if loop.global_step == 1:
            raise AbortedError("preempted")

    recorder, saver = RecordingHook(), CheckpointSaverHook(tmp_path, save_steps=9)
    with MonitoredLoop(step, hooks=[GuardingSession(2), saver, recorder], checkpoint_dir=tmp_path) as loop:
        for _ in range(2):
            make_run(loop, step)
        pytest.fail("the loop did not recover")
    assert loop.stop_reason == "StopIteration: enough"
    assert methods(recorder)[-2:] == ["end", "teardown"]


def test_stop_iteration_around_the_first_checkpoint_of_the_constructor_is_an_error(tmp_path: Path) -> None:
    recorder, saver = RecordingHook(), CheckpointSaverHook(tmp_path, save_steps=9)
    with pytest.raises(StopIteration, match="enough"):
        MonitoredLoop(half, hooks=[recorder, GuardingSession(1), saver], checkpoint_dir=tmp_path)
    assert methods(recorder) == ["begin", "after_create_session", "teardown"]


def test_stop_iteration_of_a_pause_listener_in_the_body_is_a_clean_end() -> None:
    recorder, after = RecordingHook(), []
    with MonitoredLoop(half, hooks=[Guarding("on_pause"), recorder]) as loop:
        loop.run()
        loop.run()
        with loop.paused(), loop.paused():
            after.append(1)
        after.append(2)
    assert (after, loop.stop_reason) == ([1], "StopIteration: enough")
    assert methods(recorder)[-2:] == ["end", "teardown"]


class Source:
    """Data of which ``failing`` raises ``error``."""

    def __init__(self, failing: str, error: BaseException) -> None:
        self.failing, self.error = failing, error

    def __iter__(self) -> Iterator[int]:
        self.fail("__iter__")
        return iter(range(3))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fail("load_state_dict")

    def fail(self, method: str) -> None:
        if method == self.failing:
            raise self.error


@pytest.mark.parametrize("failing", ["__iter__", "load_state_dict"])
def test_stop_iteration_while_an_iteration_begins_is_a_clean_end(failing: str, tmp_path: Path) -> None:
    def loop(recorder: RecordingHook) -> MonitoredLoop[float]:
        saver = CheckpointSaverHook(tmp_path, save_steps=1)
        return MonitoredLoop(half, hooks=[saver, recorder], checkpoint_dir=tmp_path)

    with loop(RecordingHook()) as first:
        for _ in first.until_stop(Source("nothing", StopIteration())):
            first.run()
            first.request_stop()
    recorder = RecordingHook()
    with loop(recorder) as second:
        for _ in second.until_stop(Source(failing, StopIteration("no more"))):
            pytest.fail("there was an item")
    assert second.stop_reason == "StopIteration: no more"
    assert methods(recorder) == ["begin", "after_create_session", "end", "teardown"]


@pytest.mark.parametrize("error", [ValueError("broken"), Exhausted("broken")])
def test_another_error_while_an_iteration_begins_comes_out(error: Exception) -> None:
    recorder = RecordingHook()
    with pytest.raises(type(error)) as caught, MonitoredLoop(half, hooks=[recorder]) as loop:
        next(loop.until_stop(Source("__iter__", error)))
    assert caught.value is error, "although no generator can raise an Exhausted"
    assert methods(recorder)[-1] == "teardown"
    assert "end" not in methods(recorder)


@pytest.mark.parametrize("kind", [Exhausted, StopIteration])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("left", [True, False], ids=["by break", "at its end"])
def test_and_one_out_of_a_hook_at_the_end_of_an_epoch(kind: type[StopIteration], nested: bool, left: bool) -> None:
    def fail(model: object) -> float:
        raise error

    def train() -> None:
        with loop:
            for epoch in loop.until_stop(range(2)) if nested else range(2):
                for _ in loop.until_stop(range(3)):
                    loop.run()
                    if left:
                        break
                epochs.append(epoch)

    error, recorder = kind("no quota"), RecordingHook()
    epochs: list[int] = []
    hooks = [EvaluationHook(fail, every_n_epochs=1), recorder]
    loop = MonitoredLoop(half, torch.nn.Linear(1, 1), hooks=hooks)
    if kind is StopIteration:
        train()
        assert methods(recorder)[-2:] == ["end", "teardown"]
        assert loop.stop_reason == "StopIteration: no quota"
    else:
        with pytest.raises(Exhausted) as caught:
            train()
        assert caught.value is error
        assert "end" not in methods(recorder)
    assert epochs == ([0] if nested else [0, 1])


@pytest.mark.parametrize("closes", [True, False], ids=["close", "with"])
def test_a_subclass_of_stop_iteration_out_of_a_save_between_two_items_comes_out_when_the_loop_closes(
    closes: bool, tmp_path: Path
) -> None:
    class Listener(CheckpointSaverListener):
        def before_save(self, session: Session, step: int) -> None:
            if step:
                raise error

    def train() -> None:
        for _ in loop.until_stop(range(9)):
            loop.run()
        with pytest.raises(Exhausted, match="no quota"):
            loop.run()

    error, recorder = Exhausted("no quota"), RecordingHook()
    saver = CheckpointSaverHook(tmp_path, save_steps=2, listeners=[Listener()])
    loop = MonitoredLoop(half, hooks=[saver, recorder])
    if closes:
        train()
        with pytest.raises(Exhausted) as caught:
            loop.close()
    else:
        with pytest.raises(Exhausted) as caught, loop:
            train()
    assert caught.value is error
    assert "end" not in methods(recorder)
    assert loop.global_step == 2


class Creating(SessionRunHook):
    """Its thread fails once, and the session that is created after that raises ``error``."""

    def __init__(self, error: BaseException) -> None:
        self.errors = iter([None, error])

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        error = next(self.errors)
        if error is not None:
            raise error
        self.coord = coord

    def report(self) -> None:
        self.coord.request_stop(AbortedError("thread"))


@pytest.mark.parametrize("items", [0, 1])
def test_stop_iteration_in_a_recovery_between_two_items_is_a_clean_end(items: int, tmp_path: Path) -> None:
    creating, saver = Creating(StopIteration("no more")), CheckpointSaverHook(tmp_path, save_steps=9)
    with MonitoredLoop(half, hooks=[saver, creating], checkpoint_dir=tmp_path) as loop:
        if not items:
            creating.report()
        for _ in loop.until_stop(range(9)):
            creating.report()
    assert loop.stop_reason == "StopIteration: no more"


class CallingBack(SessionRunHook):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        run_context.when_ready(0.5, self.call_back)

    def call_back(self, value: Any) -> None:
        raise self.error

    def __repr__(self) -> str:
        return "CallingBack()"


def test_an_error_in_a_callback_comes_out_as_one_of_the_hook_that_asked_for_it() -> None:
    recorder, error = RecordingHook(), ValueError("full")
    with pytest.raises(ValueError, match="full"), MonitoredLoop(half, hooks=[CallingBack(error), recorder]) as loop:
        loop.run()
    assert methods(recorder)[-2:] == ["before_run", "teardown"]
    assert "CallingBack() (hook 0)" in error.__notes__[0]


def test_an_error_in_a_fetch_calls_nobodys_after_run() -> None:
    hooks = [RecordingHook(), RecordingHook("los")]
    with (
        pytest.raises(FetchError, match=r"RecordingHook\('los'\).*Did you mean 'loss'"),
        MonitoredLoop(half, hooks=hooks) as loop,
    ):
        loop.run()
    assert methods(hooks[0])[-2:] == methods(hooks[1])[-2:] == ["before_run", "teardown"]


# -- several errors ---------------------------------------------------------------------------------------------------


def close_with(*faults: Mapping[str, BaseException]) -> BaseException | None:
    """What comes out of closing a loop whose hooks raise these."""
    loop = MonitoredLoop(half, hooks=[RecordingHook(raises=fault) for fault in faults])
    try:
        loop.close()
    except BaseException as error:
        return error
    return None


def test_one_error_at_the_end_comes_out_as_it_is() -> None:
    error = KeyError("one")
    assert close_with({}, {"end": error}, {}) is error


def test_several_errors_at_the_end_come_out_as_a_group_in_the_order_of_the_hooks() -> None:
    errors: list[BaseException] = [KeyError("first"), ValueError("second"), OSError("third")]
    group = close_with(*[{"end": error} for error in errors])
    assert isinstance(group, ExceptionGroup)
    assert list(group.exceptions) == errors
    assert all("in end of RecordingHook" in error.__notes__[0] for error in errors)


def test_errors_in_end_and_in_teardown_come_out_together() -> None:
    end, teardown = KeyError("end"), ValueError("teardown")
    group = close_with({"teardown": teardown}, {"end": end})
    assert isinstance(group, ExceptionGroup)
    assert group.exceptions == (end, teardown)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_among_the_errors_at_the_end_comes_out_itself_with_the_others_as_its_cause(
    kind: type[BaseException],
) -> None:
    interrupt, errors = kind(), [KeyError("first"), ValueError("last")]
    assert close_with({"end": errors[0]}, {"end": interrupt}, {"teardown": errors[1]}) is interrupt
    assert isinstance(interrupt.__cause__, ExceptionGroup)
    assert list(interrupt.__cause__.exceptions) == errors


def test_one_error_that_two_methods_raise_comes_out_once() -> None:
    error = KeyError("one")
    assert close_with({"end": error}, {"teardown": error}) is error


@pytest.mark.parametrize("method", ["end", "teardown"])
def test_everybody_is_visited_when_everybody_raises(method: str) -> None:
    hooks = [RecordingHook(raises={method: KeyError}) for _ in range(3)]
    with pytest.raises(ExceptionGroup):
        MonitoredLoop(half, hooks=hooks).close()
    assert all([call[0] for call in hook.calls].count(method) == 1 for hook in hooks)
    assert all(hook.calls[-1][0] in ("teardown", "raises") for hook in hooks)


@pytest.mark.parametrize("method", ["end", "teardown"])
def test_closing_again_after_an_error_while_closing_is_harmless(method: str) -> None:
    hook = RecordingHook(raises={method: KeyError})
    loop = MonitoredLoop(half, hooks=[hook])
    with pytest.raises(KeyError):
        loop.close()
    calls = list(hook.calls)
    loop.close()
    assert hook.calls == calls


def fail_and_fail_again(first: BaseException, *later: BaseException) -> None:
    with MonitoredLoop(half, hooks=[RecordingHook(raises={"teardown": error}) for error in later]):
        raise first


def test_the_error_of_the_body_stays_the_one_that_comes_out() -> None:
    body, teardown = ValueError("body"), KeyError("teardown")
    with pytest.raises(ValueError, match="body") as raised:
        fail_and_fail_again(body, teardown)
    assert raised.value is body


def test_errors_in_teardown_after_one_in_the_body_are_noted_on_it_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    body, later = ValueError("body"), [KeyError("one"), OSError("two")]
    with pytest.raises(ValueError, match="body"):
        fail_and_fail_again(body, *later)
    notes = "\n".join(body.__notes__)
    assert "KeyError: 'one'" in notes
    assert "OSError: two" in notes
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == later


def test_an_error_at_the_end_after_stop_iteration_in_the_body_comes_out() -> None:
    with pytest.raises(KeyError), MonitoredLoop(half, hooks=[RecordingHook(raises={"end": KeyError})]):
        raise StopIteration


def test_an_error_in_teardown_after_a_swallowed_failure_comes_out() -> None:
    loop = swallow_a_failed_run(RecordingHook(raises={"teardown": KeyError}))
    with pytest.raises(KeyError):
        loop.close()


# -- at creation ------------------------------------------------------------------------------------------------------


def test_a_session_that_could_not_be_initialised_is_torn_down() -> None:
    hook, error = RecordingHook(), KeyError("weights")

    def init_fn(*_: object) -> None:
        raise error

    with pytest.raises(KeyError) as raised:
        MonitoredLoop(half, hooks=[hook], scaffold=Scaffold(init_fn=init_fn))
    assert raised.value is error
    assert methods(hook) == ["begin", "teardown"]


def test_stop_iteration_while_the_session_is_initialised_comes_out_and_nobodys_end_is_called() -> None:
    hook = RecordingHook()
    with pytest.raises(StopIteration):
        MonitoredLoop(half, hooks=[hook], scaffold=Scaffold(init_fn=lambda *_: exhausted()))
    assert methods(hook) == ["begin", "teardown"]


@pytest.mark.parametrize("answer", [False, "no weights", None])
def test_a_session_that_is_not_ready_is_torn_down(answer: Any) -> None:
    hook = RecordingHook()
    with pytest.raises(LifecycleError, match=r"not ready: (no weights|ready_fn returned (False|None))"):
        MonitoredLoop(half, hooks=[hook], scaffold=Scaffold(ready_fn=lambda session: answer))
    assert methods(hook) == ["begin", "teardown"]


def test_an_error_in_teardown_after_one_at_creation_is_noted_on_it() -> None:
    begin = ValueError("begin")
    hooks = [RecordingHook(raises={"teardown": KeyError("teardown")}), RecordingHook(raises={"begin": begin})]
    with pytest.raises(ValueError, match="begin"):
        MonitoredLoop(half, hooks=hooks)
    assert "KeyError: 'teardown'" in begin.__notes__[-1]


# -- exceptions and hooks that are hard to handle ---------------------------------------------------------------------


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot be printed")


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):  # a frozen dataclass refuses notes too
    code: int = 3


@pytest.mark.parametrize("kind", [UnprintableError, FrozenError])
@pytest.mark.parametrize("method", ["begin", "before_run", "step", "after_run", "end", "teardown"])
def test_an_exception_that_cannot_be_printed_or_noted_comes_out_all_the_same(
    method: str, kind: type[Exception]
) -> None:
    error = kind()
    _, out = failing_at(method, 0, error, RecordingHook)
    assert out is error


def test_a_hook_that_cannot_be_printed_does_not_hide_its_error() -> None:
    class NoRepr(RecordingHook):
        def __repr__(self) -> str:
            raise RuntimeError("cannot be printed")

    with (
        pytest.raises(KeyError) as raised,
        MonitoredLoop(half, hooks=[NoRepr(raises={"before_run": KeyError})]) as loop,
    ):
        loop.run()
    assert "before_run of a NoRepr (hook 0)" in raised.value.__notes__[0]


def test_an_exception_group_comes_out_whole() -> None:
    group = ExceptionGroup("several", [KeyError("a"), ValueError("b")])
    with (
        pytest.raises(ExceptionGroup) as raised,
        MonitoredLoop(half, hooks=[RecordingHook(raises={"after_run": group})]) as loop,
    ):
        loop.run()
    assert raised.value is group


def test_an_error_that_was_raised_from_another_keeps_its_cause() -> None:
    cause, error = OSError("disk"), ValueError("batch")
    error.__cause__ = cause
    with (
        pytest.raises(ValueError, match="batch") as raised,
        MonitoredLoop(half, hooks=[RecordingHook(raises={"before_run": error})]) as loop,
    ):
        loop.run()
    assert raised.value.__cause__ is cause


# -- the tree ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (AbortedError, Exception),
        (FeedError, RuntimeError),
        (FetchError, LookupError),
        (NoRunYetError, FetchError),
        (LifecycleError, RuntimeError),
        (NanLossDuringTrainingError, RuntimeError),
    ],
)
def test_our_own_errors_are_of_one_family_and_of_a_builtin_kind(
    error: type[TorchHooksError], builtin: type[Exception]
) -> None:
    assert issubclass(error, TorchHooksError)
    assert issubclass(error, builtin)
