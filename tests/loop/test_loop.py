"""The loop, in both ways to make a run, ``loop.run()`` and ``with loop.step()``.

The order of calls, stops, what a hook is given, nested use, threads, what counts as a step.
"""

import contextlib
import functools
import itertools
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from support import shapes
from support.devices import FakeDevice

import torchhooks
import torchhooks.testing.recording
from torchhooks import (
    AbortedError,
    Coordinator,
    Due,
    FeedError,
    FeedFnHook,
    FinalOpsHook,
    LifecycleError,
    LoggingTensorHook,
    LooperThread,
    MonitoredLoop,
    RunOptions,
    Scaffold,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepContext,
    StopAtStepHook,
    Variables,
)
from torchhooks.testing import FakeClock, RecordingHook, trace

Calls = list[tuple[Any, ...]]


class LoopWithBody(torchhooks.MonitoredLoop[Any]):
    """A loop whose ``run`` calls the function in the body of ``with loop.step()``."""

    def __init__(self, step: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(None, *args, **kwargs)
        self.function = step
        self.run = self.run_body  # type: ignore[method-assign]

    def run_body(self, *args: Any, **kwargs: Any) -> Any:
        with self.step() as outputs:
            result = self.function(*args, **kwargs)
            outputs.update(result if isinstance(result, dict) else {"loss": result})
        return result


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    only = metafunc.definition.get_closest_marker("function_only")
    metafunc.parametrize("way", ["run"] if only else ["run", "step"])


@pytest.fixture(autouse=True)
def _way_in(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test makes its runs with ``loop.run()``, and with ``with loop.step()``."""
    if way == "step":
        monkeypatch.setitem(globals(), "MonitoredLoop", LoopWithBody)
        monkeypatch.setattr(torchhooks.testing.recording, "MonitoredLoop", LoopWithBody)


def half() -> float:
    return 0.5


class During(SessionRunHook):
    """Does something in one of its methods."""

    def __init__(self, **what: Callable[[], object]) -> None:
        self.what = what

    def do(self, method: str) -> None:
        self.what.get(method, lambda: None)()

    def before_run(self, run_context: SessionRunContext) -> None:
        self.do("before_run")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.do("after_run")

    def end(self, session: Session) -> None:
        self.do("end")


class Asking(SessionRunHook):
    """Asks to stop, for a reason, in the method it was told."""

    def __init__(self, method: str, reason: str | None = None) -> None:
        self.method, self.reason = method, reason

    def before_run(self, run_context: SessionRunContext) -> None:
        if self.method == "before_run":
            run_context.request_stop(self.reason)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self.method == "after_run":
            run_context.request_stop(self.reason)


class Keeping(SessionRunHook):
    """Keeps the contexts it is given."""

    def __init__(self) -> None:
        self.contexts: list[SessionRunContext] = []

    def before_run(self, run_context: SessionRunContext) -> None:
        self.contexts.append(run_context)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.contexts.append(run_context)


def methods(calls: Calls) -> list[tuple[Any, ...]]:
    return [call[:2] for call in calls]


# -- order ------------------------------------------------------------------------------------------------------------


def test_every_call_goes_through_the_hooks_in_the_order_of_the_list() -> None:
    calls: Calls = []
    a, b = RecordingHook(name="a", calls=calls), RecordingHook(name="b", calls=calls)
    with MonitoredLoop(lambda: calls.append(("step", "step")), hooks=[a, b]) as loop:
        loop.run()
    per_run = [("a", "before_run"), ("b", "before_run"), ("step", "step"), ("a", "after_run"), ("b", "after_run")]
    start = [("a", "begin"), ("b", "begin"), ("a", "after_create_session"), ("b", "after_create_session")]
    assert methods(calls) == [*start, *per_run, ("a", "end"), ("b", "end"), ("a", "teardown"), ("b", "teardown")]


def test_begin_and_after_create_session_happen_at_creation() -> None:
    hook = RecordingHook()
    loop = MonitoredLoop(half, hooks=[hook])
    assert hook.calls == [("begin",), ("after_create_session", 0)]
    loop.close()


def test_every_begin_comes_before_the_session_is_initialised() -> None:
    calls: Calls = []
    hooks = [RecordingHook(name=name, calls=calls) for name in "ab"]
    scaffold = Scaffold(init_fn=lambda scaffold, session: calls.append(("init", "init")))
    MonitoredLoop(half, hooks=hooks, scaffold=scaffold).close()
    assert methods(calls)[:4] == [("a", "begin"), ("b", "begin"), ("init", "init"), ("a", "after_create_session")]


def test_hooks_get_the_session_of_the_loop_and_a_coordinator() -> None:
    given: list[Any] = []

    class Noting(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            given.extend([session, coord])

        def end(self, session: Session) -> None:
            given.append(session)

    with MonitoredLoop(half, hooks=[Noting()]) as loop:
        pass
    assert given[0] is given[2] is loop.session
    assert isinstance(given[1], Coordinator)


def test_the_step_is_counted_before_after_run_and_not_before_before_run() -> None:
    seen: list[int] = []
    loop: MonitoredLoop[float]
    note = During(before_run=lambda: seen.append(loop.global_step), after_run=lambda: seen.append(loop.global_step))
    with MonitoredLoop(half, hooks=[note]) as loop:
        loop.run()
    assert seen == [0, 1]


def test_the_session_still_works_at_the_end() -> None:
    hook = FinalOpsHook({"loss": "loss", "step": "global_step"})
    with MonitoredLoop(half, hooks=[hook]) as loop:
        loop.run()
    assert hook.final_ops_values == {"loss": 0.5, "step": 1}


# -- the life of a loop -----------------------------------------------------------------------------------------------

# The script (see support.shapes), what happens where in its first run, at its end or in a thread, the calls of the hook
# behind, and the reason why the loop has stopped.
#
# In a script, r is a run, y is run_step_fn() with a run in it, c is close(), w waits until the thread has acted, and a
# dot before one of them catches its error, which is traced. The calls are B for begin, C for after_create_session, b
# for before_run, s for the step, a for after_run, E for end and T for teardown. An error that the with statement raises
# comes last.
LIVES: list[tuple[str, str, dict[str, str], str, str]] = [
    ("without a run", "", {}, "BC ET", "closed"),
    ("two runs", "rr", {}, "BC bsa bsa ET", "closed"),
    ("a step function", "ry", {}, "BC bsa bsa ET", "closed"),
    ("over data", "2{r}", {}, "BC bsa bsa ET", "data ended"),
    ("closed", "rc", {}, "BC bsa ET", "closed"),
    ("closed twice", "rcc", {}, "BC bsa ET", "closed"),
    ("a run after the end", "rc.r", {}, "BC bsa ET closed", "closed"),
    ("a step function after the end", "rc.y", {}, "BC bsa ET closed", "closed"),
    ("a stop before the step", "9{r}", {"before_run": "stop"}, "BC bsa ET", "Acting: enough"),
    ("a stop behind the step", "9{r}", {"after_run": "stop"}, "BC bsa ET", "Acting: enough"),
    ("a run after a stop", "r.r.r", {"before_run": "stop"}, "BC bsa after-stop after-stop ET", "Acting: enough"),
    ("a step function after a stop", "r.y", {"after_run": "stop"}, "BC bsa after-stop ET", "Acting: enough"),
    ("an error before the step", "r", {"before_run": "KeyError"}, "BC T KeyError", "KeyError: 'x'"),
    ("an error in the step", "r", {"step": "KeyError"}, "BC b T KeyError", "KeyError: 'x'"),
    ("an error behind the step", "r", {"after_run": "KeyError"}, "BC bs T KeyError", "KeyError: 'x'"),
    ("an error at the end", "r", {"end": "KeyError"}, "BC bsa ET KeyError", "closed"),
    ("an error after a stop", "r", {"before_run": "stop", "step": "KeyError"}, "BC b T KeyError", "KeyError: 'x'"),
    ("the end of the data of the step", "9{r}", {"step": "StopIteration"}, "BC b ET", "StopIteration: x"),
    ("a run before the step", "r", {"before_run": "run"}, "BC T inside-run", "LifecycleError"),
    ("a run in the step", "r", {"step": "run"}, "BC b T inside-run", "LifecycleError"),
    ("a run behind the step", "r", {"after_run": "run"}, "BC bs T inside-run", "LifecycleError"),
    ("a run at the end", "r", {"end": "run"}, "BC bsa ET closed", "closed"),
    ("closed before the step", "r", {"before_run": "close"}, "BC T inside-run", "LifecycleError"),
    ("closed in the step", "r", {"step": "close"}, "BC b T inside-run", "LifecycleError"),
    ("closed behind the step", "r", {"after_run": "close"}, "BC bs T inside-run", "LifecycleError"),
    ("a stop by a thread", "9{rw}", {"thread": "stop"}, "BC bsa ET", "thread background"),
    # A thread cannot know where the loop is, so its stop between should_stop() and run() is no error.
    ("a stop by a thread before a run", "9{wr}", {"thread": "stop"}, "BC bsa ET", "thread background"),
    ("two runs after a stop by a thread", "rwr.r", {"thread": "stop"}, "BC bsa bsa after-stop ET", "thread background"),
    ("a stop by a thread in a run", "9{r}", {"step": "wait", "thread": "stop"}, "BC bsa ET", "thread background"),
    ("an error in a thread", "9{rw}", {"thread": "KeyError"}, "BC bsa ET KeyError", "thread background"),
    ("a run after an error in a thread", "rwr", {"thread": "KeyError"}, "BC bsa bsa ET KeyError", "thread background"),
    (
        "an error in a thread in a run",
        "rr",
        {"step": "wait", "thread": "KeyError"},
        "BC bsa bsa ET KeyError",
        "thread background",
    ),
    ("two runs after an error in a thread", "rwrr", {"thread": "KeyError"}, "BC bsa bsa T KeyError", "thread"),
    ("an error in a thread, twice", "wr.rc", {"thread": "KeyError"}, "BC bsa KeyError ET KeyError", "thread"),
    ("an error in the step that is caught", ".rrr", {"step": "KeyError"}, "BC b KeyError bsa bsa ET", "closed"),
]


class Acting(SessionRunHook):
    """Does once what a line says, in its methods, in the step, and in a thread that begins when it is waited for."""

    loop: MonitoredLoop[float]

    def __init__(self, acts: dict[str, str]) -> None:
        self.acts = dict(acts)

    def act(self, where: str, stop: Callable[[], object]) -> None:
        match self.acts.pop(where, None):
            case None:
                pass
            case "stop":
                stop()
            case "run":
                self.loop.run()
            case "close":
                self.loop.close()
            case "wait":
                self.wait()
            case "KeyError":
                raise KeyError("x")
            case "StopIteration":
                raise StopIteration("x")
            case other:
                raise ValueError(other)

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        act = functools.partial(self.act, "thread", coord.request_stop)
        self.thread = LooperThread(coord, None, target=act)
        self.thread.name = "background"

    def wait(self) -> None:
        if self.thread.ident is None:
            self.thread.start()
            self.thread.join()

    def step(self) -> None:
        self.act("step", pytest.fail)

    def before_run(self, run_context: SessionRunContext) -> None:
        self.act("before_run", lambda: run_context.request_stop("enough"))

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.act("after_run", lambda: run_context.request_stop("enough"))

    def end(self, session: Session) -> None:
        self.act("end", pytest.fail)


class Traced(SessionRunHook):
    """Adds a letter for each call to a trace."""

    def __init__(self, trace: list[str]) -> None:
        self.trace = trace

    def begin(self) -> None:
        self.trace.append(" B")

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self.trace.append("C")

    def before_run(self, run_context: SessionRunContext) -> None:
        self.trace.append(" b")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.trace.append("a")

    def end(self, session: Session) -> None:
        self.trace.append(" E")

    def teardown(self) -> None:
        self.trace.append("T" if self.trace[-1] == " E" else " T")


def shown(error: Exception) -> str:
    """Return the kind of an error in one word."""
    if not isinstance(error, LifecycleError):
        return type(error).__name__
    said = re.search("inside a run|after a stop|closed", str(error))
    assert said, error
    return said[0].replace(" a ", "-")


@pytest.mark.parametrize(
    ("script", "acts", "calls", "reason"), [row[1:] for row in LIVES], ids=[row[0] for row in LIVES]
)
def test_the_life_of_a_loop(script: str, acts: dict[str, str], calls: str, reason: str) -> None:
    calls_made: list[str] = []
    acting = Acting(acts)

    def step() -> float:
        acting.step()
        calls_made.append("s")
        return 0.5

    loop = acting.loop = MonitoredLoop(step, hooks=[acting, Traced(calls_made)])

    def step_fn(context: StepContext[float]) -> None:
        context.run_with_hooks()

    def catching(call: Callable[[], object]) -> None:
        try:
            call()
        except (KeyError, LifecycleError) as error:
            calls_made.append(f" {shown(error)}")

    letters: dict[str, Callable[[], object]] = {
        "r": loop.run,
        "y": lambda: loop.run_step_fn(step_fn),
        "c": loop.close,
        "w": acting.wait,
    }
    letters |= {f".{letter}": functools.partial(catching, call) for letter, call in letters.items()}
    catching(lambda: shapes.train(loop, script, [], letters))
    assert "".join(calls_made).strip() == calls
    assert str(loop.stop_reason).startswith(reason)
    assert loop.should_stop()
    assert acting.acts == {}, "what has not happened"


# -- what may be a hook -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collect", [list, tuple, iter, set, lambda hooks: (hook for hook in hooks)])
def test_hooks_may_be_any_iterable(collect: Callable[[list[RecordingHook]], Iterable[RecordingHook]]) -> None:
    hook = RecordingHook()
    with MonitoredLoop(half, hooks=collect([hook])) as loop:
        loop.run()
    assert [call[0] for call in hook.calls][-3:] == ["after_run", "end", "teardown"]


def test_hooks_are_copied() -> None:
    late, hooks = RecordingHook(), [RecordingHook()]
    with MonitoredLoop(half, hooks=hooks) as loop:
        hooks.append(late)
        loop.run()
    assert late.calls == []


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        ([RecordingHook(), "loss"], r"hooks\[1\]='loss' is not a hook: .*instance of SessionRunHook"),
        ([half], r"hooks\[0\]=<function half.*is not a hook"),
        ([[RecordingHook()]], r"hooks\[0\]=.* is not a hook: pass one list, and put a star before a list in it"),
        ([RecordingHook], r"hooks\[0\] is the class RecordingHook: pass an instance, RecordingHook\(\.\.\.\)"),
        (RecordingHook(), r"hooks=.*, such as \[RecordingHook\(\)\]"),
        (RecordingHook, "hooks=.*RecordingHook"),
    ],
    ids=["a name", "a function", "a list", "a class", "one hook alone", "a class alone"],
)
def test_what_is_no_hook_is_refused_by_name(hooks: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        MonitoredLoop(half, hooks=hooks)


def test_nobody_begins_when_one_is_no_hook() -> None:
    hook = RecordingHook()
    with pytest.raises(TypeError):
        MonitoredLoop(half, hooks=[hook, "loss"])  # type: ignore[list-item]
    assert hook.calls == []


@pytest.mark.parametrize("arguments", [{}, {"hooks": []}, {"hooks": [SessionRunHook() for _ in range(50)]}])
def test_runs_without_hooks_and_with_hooks_that_do_nothing(arguments: dict[str, Any]) -> None:
    with MonitoredLoop(half, **arguments) as loop:
        assert [loop.run() for _ in range(3)] == [0.5] * 3
    assert loop.global_step == 3


def test_fifty_hooks_are_all_called() -> None:
    hooks = [RecordingHook() for _ in range(50)]
    with MonitoredLoop(half, hooks=hooks) as loop:
        loop.run()
    assert all(hook.calls == hooks[0].calls for hook in hooks)
    assert len(hooks[0].calls) == 6


def test_a_hook_may_serve_a_second_loop() -> None:
    hook = StopAtStepHook(num_steps=2)
    for _ in range(2):
        with MonitoredLoop(half, hooks=[hook]) as loop:
            for _item in loop.until_stop(range(9)):
                loop.run()
        assert loop.global_step == 2


def test_a_hook_that_is_in_the_list_twice_is_an_error() -> None:
    hook = RecordingHook("loss")
    with pytest.raises(ValueError, match=r"hooks\[2\] is RecordingHook\('loss'\), which the list has already"):
        MonitoredLoop(half, hooks=[hook, RecordingHook("loss"), hook])


def test_a_hook_of_another_open_loop_is_an_error() -> None:
    hook = RecordingHook("loss")
    with MonitoredLoop(half, hooks=[hook]) as loop:
        with pytest.raises(ValueError, match=r"RecordingHook\('loss'\) is in another loop, which is still open: close"):
            MonitoredLoop(half, hooks=[RecordingHook("loss"), hook])
        loop.run()
    with MonitoredLoop(half, hooks=[hook]) as loop:
        loop.run()
    assert hook.results == [0.5, 0.5]


def test_a_hook_of_a_loop_that_failed_or_was_dropped_can_be_used_again() -> None:
    hook = RecordingHook("loss")
    with pytest.raises(ZeroDivisionError), MonitoredLoop(lambda: 1 / 0, hooks=[hook]) as failing:
        failing.run()
    dropped = MonitoredLoop(half, hooks=[hook])
    del dropped
    with MonitoredLoop(half, hooks=[hook]) as loop:
        loop.run()
    failing.close()
    assert hook.results[-1] == 0.5


@pytest.mark.function_only
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step": 3}, "step=3: must be a function"),
        ({"model": "net"}, "model='net': must be a torch.nn.Module"),
        ({"optimizer": [1]}, r"optimizer=\[1\]: must be a torch.optim.Optimizer"),
        ({"optimizer": torch.optim.SGD}, r"Pass an instance, SGD\(model.parameters\(\), lr=...\)"),
        ({"scaffold": half}, "scaffold=<function half.*: must be a Scaffold"),
        ({"state": {"best": 3}}, r"state\['best'\]=3: must have state_dict"),
        ({"state": {"head": torch.nn.Linear}}, r"state\['head'\] is the class Linear: pass an instance"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_of_the_wrong_kind_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        MonitoredLoop(**{"step": half, **arguments})


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.function_only
@pytest.mark.parametrize("hooks", [[], [RecordingHook()], [RecordingHook({"s": "global_step"})]])
@pytest.mark.parametrize(
    "outputs",
    [None, 0.5, "text", (1, 2), {"loss": 0.5}, [], object(), torch.ones(2)],
    ids=lambda outputs: type(outputs).__name__,
)
def test_run_returns_the_very_object_that_the_step_returned(outputs: Any, hooks: list[RecordingHook]) -> None:
    with MonitoredLoop(lambda: outputs, hooks=hooks) as loop:
        assert loop.run() is outputs


@pytest.mark.function_only
def test_what_run_returns_still_has_its_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    with MonitoredLoop(lambda: weight * 3, hooks=[RecordingHook("loss")]) as loop:
        loop.run().backward()
    assert weight.grad == torch.tensor(3.0)


@pytest.mark.function_only
def test_positional_and_keyword_arguments_reach_the_step() -> None:
    with MonitoredLoop(lambda *args, **kwargs: (args, kwargs)) as loop:
        assert loop.run(1, 2, x=3) == ((1, 2), {"x": 3})


@pytest.mark.function_only
def test_a_hook_that_asked_for_nothing_gets_none() -> None:
    hooks = [RecordingHook(), RecordingHook("loss"), RecordingHook(feed_dict={"x": 1})]
    with MonitoredLoop(lambda x: 0.5, hooks=hooks) as loop:
        loop.run()
    assert [hook.results for hook in hooks] == [[None], [0.5], [None]]


def test_a_hook_that_asks_for_nothing_in_so_many_words_gets_none() -> None:
    class AskingForNothing(RecordingHook):
        def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
            return SessionRunArgs(None)

    hook = AskingForNothing()
    with MonitoredLoop(half, hooks=[hook]) as loop:
        loop.run()
    assert hook.results == [None]


def test_a_request_that_is_none_of_ours_is_refused_by_the_name_of_the_hook() -> None:
    class Wrong(SessionRunHook):
        def before_run(self, run_context: SessionRunContext) -> Any:
            return "loss"

        def __repr__(self) -> str:
            return "Wrong()"

    with MonitoredLoop(half, hooks=[Wrong()]) as loop, pytest.raises(TypeError, match=r"Wrong\(\).*returned 'loss'"):
        loop.run()


# -- feeds ------------------------------------------------------------------------------------------------------------


def add(x: float, y: float = 0.0) -> float:
    return x + y


@pytest.mark.function_only
def test_a_feed_is_an_argument_of_the_step() -> None:
    with MonitoredLoop(add, hooks=[RecordingHook(feed_dict={"y": 2.0})]) as loop:
        assert loop.run(1.0) == 3.0


@pytest.mark.function_only
def test_two_hooks_that_feed_one_name_are_refused_and_the_later_ones_not_asked() -> None:
    first, second = RecordingHook(feed_dict={"y": 1.0}), RecordingHook(feed_dict={"y": 2.0})
    later = RecordingHook()
    with MonitoredLoop(add, hooks=[first, second, later]) as loop, pytest.raises(FeedError, match=r"'y'.*feeds too"):
        loop.run(1.0)
    assert ("before_run", False) in second.calls
    assert ("before_run", False) not in later.calls


@pytest.mark.function_only
@pytest.mark.parametrize(("args", "kwargs"), [((1.0, 2.0), {}), ((1.0,), {"y": 2.0})], ids=["by position", "by name"])
def test_a_hook_that_feeds_what_the_caller_gave_is_refused(args: tuple[float], kwargs: dict[str, float]) -> None:
    feeding, later = RecordingHook(feed_dict={"y": 1.0}), RecordingHook()
    with MonitoredLoop(add, hooks=[feeding, later]) as loop, pytest.raises(FeedError, match=r"'y'.*caller of run"):
        loop.run(*args, **kwargs)
    assert ("before_run", False) in later.calls


@pytest.mark.function_only
def test_a_feed_that_the_step_does_not_take_is_refused_by_the_name_of_the_hook() -> None:
    hook = RecordingHook(feed_dict={"z": 1.0})
    with MonitoredLoop(add, hooks=[hook]) as loop, pytest.raises(TypeError, match=r"RecordingHook.*'z'.*takes: x, y"):
        loop.run(1.0)


# -- stop -------------------------------------------------------------------------------------------------------------


def test_a_stop_takes_effect_after_the_last_after_run() -> None:
    seen: list[bool] = []
    loop: MonitoredLoop[float]
    with MonitoredLoop(
        half, hooks=[Asking("before_run"), During(after_run=lambda: seen.append(loop.should_stop()))]
    ) as loop:
        loop.run()
        seen.append(loop.should_stop())
    assert seen == [False, True]


def test_hooks_see_that_an_earlier_one_asked_to_stop_in_this_run() -> None:
    hooks = [RecordingHook(), Asking("before_run"), RecordingHook()]
    with MonitoredLoop(half, hooks=hooks) as loop:
        loop.run()
    assert ("before_run", False) in hooks[0].calls  # type: ignore[attr-defined]
    assert ("before_run", True) in hooks[2].calls  # type: ignore[attr-defined]


def test_another_run_after_a_stop_is_a_runtime_error() -> None:
    with MonitoredLoop(half, hooks=[StopAtStepHook(last_step=1)]) as loop:
        loop.run()
        with pytest.raises(RuntimeError, match=r"after a stop \(StopAtStepHook: step 1\).*should_stop\(\)"):
            loop.run()


def test_the_reason_names_the_hook_and_why() -> None:
    assert trace(StopAtStepHook(last_step=2)).stop_reason == "StopAtStepHook: step 2"


def test_a_hook_that_gives_no_reason_is_named_with_the_step() -> None:
    assert trace(Asking("before_run")).stop_reason == "Asking: step 1"


def test_the_first_who_asks_is_the_reason() -> None:
    hooks = [Asking("after_run", "late"), Asking("before_run", "early"), Asking("before_run", "second")]
    assert trace(*hooks).stop_reason == "Asking: early"


def test_there_is_no_reason_while_the_loop_goes_on() -> None:
    with MonitoredLoop(half) as loop:
        loop.run()
        assert loop.stop_reason is None


# -- the context of a run ---------------------------------------------------------------------------------------------


def test_all_hooks_share_one_context_a_run() -> None:
    hooks = [Keeping(), Keeping()]
    with MonitoredLoop(half, hooks=hooks) as loop:
        loop.run()
        loop.run()
    first, second = hooks[0].contexts[:2], hooks[0].contexts[2:]
    assert hooks[1].contexts == hooks[0].contexts
    assert first[0] is first[1] is not second[0]


def test_the_context_has_the_session_of_the_loop() -> None:
    hook = Keeping()
    with MonitoredLoop(half, hooks=[hook]) as loop:
        loop.run()
    assert hook.contexts[0].session is loop.session


class AsksForArguments(SessionRunHook):
    def __init__(self) -> None:
        self.asked: list[SessionRunArgs] = []

    def before_run(self, run_context: SessionRunContext) -> None:
        self.asked.append(run_context.original_args)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.asked.append(run_context.original_args)


@pytest.mark.function_only
@pytest.mark.parametrize(
    ("step", "call", "inputs"),
    [
        (add, lambda run: run(1.0), {"x": 1.0, "y": 0.0}),
        (add, lambda run: run(y=2.0, x=1.0), {"x": 1.0, "y": 2.0}),
        (lambda *batch: 0, lambda run: run(1, 2), {"batch": (1, 2)}),
        (lambda x, **more: 0, lambda run: run(1, z=3), {"x": 1, "z": 3}),
    ],
    ids=["by position", "by name", "variable", "keywords"],
)
def test_original_args_are_the_step_and_its_inputs_by_name(step: Any, call: Any, inputs: dict[str, Any]) -> None:
    hook = AsksForArguments()
    with MonitoredLoop(step, hooks=[hook]) as loop:
        call(loop.run)
    assert hook.asked == [SessionRunArgs(step, inputs)] * 2


@pytest.mark.function_only
def test_original_args_are_what_the_caller_gave_and_not_what_hooks_feed() -> None:
    hook = AsksForArguments()
    with MonitoredLoop(add, hooks=[hook, FeedFnHook(lambda: {"y": 5.0})]) as loop:
        loop.run(1.0)
    assert hook.asked == [SessionRunArgs(add, {"x": 1.0, "y": 0.0})] * 2


def test_a_hook_may_evaluate_in_the_middle_of_a_run_without_a_step() -> None:
    seen: list[int] = []
    loop: MonitoredLoop[float]
    with MonitoredLoop(half, hooks=[During(before_run=lambda: seen.append(loop.session.run("global_step")))]) as loop:
        loop.run()
    assert (seen, loop.global_step) == ([0], 1)


class WhenReady(SessionRunHook):
    def __init__(self, callback: Callable[[Any], object], fetches: Any = "loss") -> None:
        self.callback, self.fetches = callback, fetches

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(self.fetches)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        run_context.when_ready(run_values.results, self.callback)


def test_what_is_on_the_cpu_is_ready_at_once() -> None:
    order: list[Any] = []
    hooks = [WhenReady(order.append), During(after_run=lambda: order.append("the next hook"))]
    with MonitoredLoop(half, hooks=hooks) as loop:
        loop.run()
    assert order == [0.5, "the next hook"]


def test_callbacks_come_in_the_order_of_the_requests() -> None:
    order: list[tuple[str, float]] = []
    hooks = [WhenReady(lambda value: order.append(("a", value))), WhenReady(lambda value: order.append(("b", value)))]
    losses = iter([0.5, 0.25])
    with MonitoredLoop(lambda: next(losses), hooks=hooks) as loop:
        loop.run()
        loop.run()
    assert order == [("a", 0.5), ("b", 0.5), ("a", 0.25), ("b", 0.25)]


def test_what_is_ready_keeps_its_structure() -> None:
    got: list[Any] = []
    fetches = {"l": ["loss", ("global_step",)]}
    with MonitoredLoop(lambda: torch.tensor(0.5), hooks=[WhenReady(got.append, fetches)]) as loop:
        loop.run()
    assert got == [{"l": [torch.tensor(0.5), (1,)]}]


# -- sitting out ------------------------------------------------------------------------------------------------------


class Sitting(SessionRunHook):
    """Sits out as it is told, and notes the runs in which it took part and what it was told that it missed."""

    def __init__(self, due: Callable[[int], Due | None]) -> None:
        self.due = due
        self.took_part: list[int] = []
        self.missed: list[int] = []
        self.step = 0

    def next_due(self) -> Due | None:
        return self.due(self.step)

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self.step = session.global_step

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.step = run_context.session.global_step
        self.took_part.append(self.step)

    def sat_out(self, runs: int) -> None:
        self.missed.append(runs)


class SittingEarly(Sitting):
    """Is looked at before the step, because it has a before_run."""

    def before_run(self, run_context: SessionRunContext) -> None:
        pass


def run_times(times: int, *hooks: SessionRunHook, step: Callable[[], object] = half) -> None:
    with MonitoredLoop(step, hooks=hooks) as loop:
        for _ in range(times):
            loop.run()


@pytest.mark.parametrize("kind", [Sitting, SittingEarly])
@pytest.mark.parametrize(
    ("due", "took_part"),
    [
        (lambda step: None, [1, 2, 3, 4, 5, 6, 7]),
        (lambda step: Due(step=-1), [1, 2, 3, 4, 5, 6, 7]),
        (lambda step: Due(step=step + 3), [3, 6]),
        (lambda step: Due(step=5) if step < 5 else Due(), [5]),
        (lambda step: Due(runs=1), [1, 2, 3, 4, 5, 6, 7]),
        (lambda step: Due(runs=2), [2, 4, 6]),
        (lambda step: Due(step=step + 4, runs=3), [3, 6]),
        (lambda step: Due(step=step + 3, runs=4), [3, 6]),
        (lambda step: Due(), []),
    ],
    ids=["always", "now", "every 3 steps", "once", "every run", "every 2 runs", "runs first", "steps first", "never"],
)
def test_a_hook_takes_part_when_it_is_due(kind: type[Sitting], due: Any, took_part: list[int]) -> None:
    hook = kind(due)
    run_times(7, hook)
    assert hook.took_part == took_part


@pytest.mark.parametrize("kind", [Sitting, SittingEarly])
def test_a_hook_takes_part_once_its_moment_has_come(kind: type[Sitting], clock: FakeClock) -> None:
    hook = kind(lambda step: Due(moment=clock() + 2.5))
    with MonitoredLoop(half, hooks=[hook]) as loop:
        for _ in range(7):
            clock.advance(1.0)
            loop.run()
    assert hook.took_part == [3, 6]


@pytest.mark.parametrize(("kind", "took_part"), [(Sitting, [1]), (SittingEarly, [])])
def test_the_clock_is_read_before_the_step_only_for_who_has_a_before_run(
    kind: type[Sitting], took_part: list[int], clock: FakeClock
) -> None:
    hook = kind(lambda step: Due(moment=1001.0))
    run_times(1, hook, step=lambda: clock.advance(1.0))
    assert hook.took_part == took_part


@pytest.mark.parametrize(("kind", "took_part"), [(Sitting, [4, 8, 12]), (SittingEarly, [8, 12])])
def test_runs_of_several_steps_are_foreseen_as_one_by_who_is_looked_at_before_the_step(
    kind: type[Sitting], took_part: list[int]
) -> None:
    step, hook = Stepping(), kind(lambda step: Due(step=step + 4 if step < 8 else 9))
    with MonitoredLoop(step, optimizer=step.optimizer, hooks=[hook], step_unit="optimizer_step") as loop:
        for _ in range(3):
            loop.run(4)
    assert hook.took_part == took_part


def test_a_hook_is_told_how_many_runs_went_by_without_it_before_it_takes_part_again_and_before_the_end() -> None:
    hook = Sitting(lambda step: Due(step=step + 3))
    run_times(7, hook)
    assert hook.missed == [2, 2, 1]


def test_a_hook_that_never_sat_out_is_told_nothing() -> None:
    hook = SittingEarly(lambda step: Due(runs=1))
    run_times(3, hook)
    assert hook.missed == []


def test_hooks_that_sit_out_keep_their_place_in_the_order() -> None:
    order: list[str] = []

    class Named(Sitting):
        def __init__(self, name: str, period: int) -> None:
            super().__init__(lambda step: Due(runs=period) if period > 1 else None)
            self.name = name

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            order.append(self.name)

    class NamedEarly(Named):
        def before_run(self, run_context: SessionRunContext) -> None:
            pass

    run_times(2, NamedEarly("a", 2), Named("b", 1), Named("c", 2), NamedEarly("d", 1), NamedEarly("e", 2))
    assert order == ["b", "d", "a", "b", "c", "d", "e"]


class Jumping(SessionRunHook):
    """Sets the global step from 2 to 10, after the step of the second run."""

    def before_run(self, run_context: SessionRunContext) -> None:
        pass

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_context.session.global_step == 2:
            run_context.session.global_step = 10


def test_a_hook_behind_one_that_moves_the_step_takes_part_in_that_run_and_goes_on_from_there() -> None:
    hook = Sitting(lambda step: Due(step=step + 5))
    run_times(12, Jumping(), hook)
    assert hook.took_part == [10, 15, 20]


def test_a_request_that_another_hook_adds_to_is_taken_as_it_is_before_the_step() -> None:
    shared: list[Any] = ["loss"]
    asking = RecordingHook(shared)

    class Adding(SessionRunHook):
        def before_run(self, run_context: SessionRunContext) -> None:
            shared[1:] = [":output"]

    model = torch.nn.Identity()
    with MonitoredLoop(model, model, hooks=[asking, Adding()]) as loop:
        loop.run(torch.tensor(0.5))
    assert asking.results == [[0.5, 0.5]]


# -- taking part because of what the step returned --------------------------------------------------------------------


class Noticing(Sitting):
    """Takes part in runs whose step returned one of the values it is told, and notes what it was given."""

    def __init__(self, *values: object) -> None:
        super().__init__(lambda step: Due(when=lambda outputs: outputs in values))
        self.given: list[Any] = []

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        super().after_run(run_context, run_values)
        self.given.append(run_values.results)


class NoticingEarly(Noticing):
    """Asks for something in its before_run."""

    request: Any = SessionRunArgs(["loss", "global_step"])

    def before_run(self, run_context: SessionRunContext) -> Any:
        return self.request


def counting() -> Callable[[], int]:
    return itertools.count(1).__next__


@pytest.mark.function_only
def test_a_hook_takes_part_in_the_runs_whose_outputs_it_is_waiting_for() -> None:
    hook = Noticing(2, 5)
    run_times(7, hook, step=counting())
    assert (hook.took_part, hook.missed, hook.given) == ([2, 5], [1, 2, 2], [None, None])


@pytest.mark.function_only
def test_what_such_a_hook_asks_for_is_evaluated_although_it_is_asked_behind_the_step() -> None:
    hook = NoticingEarly(2, 5)
    run_times(7, hook, step=counting())
    assert (hook.took_part, hook.missed, hook.given) == ([2, 5], [1, 2, 2], [[2, 2], [5, 5]])


@pytest.mark.function_only
def test_a_hook_may_ask_for_the_same_at_a_step_and_behind_one() -> None:
    class Both(Sitting):
        request = SessionRunArgs("loss")

        def __init__(self) -> None:
            super().__init__(lambda step: Due(step=2 if step < 2 else None, when=lambda outputs: outputs == 5))
            self.given: list[Any] = []

        def before_run(self, run_context: SessionRunContext) -> Any:
            return self.request

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            super().after_run(run_context, run_values)
            self.given.append(run_values.results)

    hook = Both()
    run_times(7, hook, step=counting())
    assert hook.given == [2, 5]


@pytest.mark.function_only
def test_who_notices_something_is_called_in_its_place_among_the_others() -> None:
    order: list[tuple[str, Any]] = []

    class Named(NoticingEarly):
        def __init__(self, name: str, *values: object) -> None:
            super().__init__(*values)
            self.name = name

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            order.append((self.name, run_values.results))

    class Always(Named):
        def next_due(self) -> None:
            return None

    class LateOnly(Named):
        before_run = SessionRunHook.before_run

    run_times(2, Named("a", 2), Always("b"), LateOnly("c", 2), Named("d", 1), step=counting())
    assert order == [("b", [1, 1]), ("d", [1, 1]), ("a", [2, 2]), ("b", [2, 2]), ("c", None)]


@pytest.mark.function_only
def test_a_hook_is_due_at_the_first_of_its_step_and_what_it_notices() -> None:
    hook = Sitting(lambda step: Due(step=step + 3, when=lambda outputs: outputs == 2))
    run_times(9, hook, step=counting())
    assert hook.took_part == [2, 5, 8]


@pytest.mark.function_only
def test_in_a_run_that_is_fed_everybody_who_watches_takes_part() -> None:
    hook = Noticing()
    with MonitoredLoop(lambda bonus: bonus, hooks=[FeedFnHook(lambda: {"bonus": 1.0}), hook]) as loop:
        loop.run()
        loop.run()
    assert hook.took_part == [1, 2]


@pytest.mark.function_only
@pytest.mark.parametrize(
    ("request_", "wish"),
    [
        (SessionRunArgs(None, {"x": 1}), "feeds 'x'"),
        (SessionRunArgs("layer:output"), "fetches 'layer:output'"),
        (SessionRunArgs(None, None, RunOptions(trace=True)), "requests a trace"),
    ],
)
def test_who_is_asked_behind_the_step_can_have_no_part_in_it(request_: SessionRunArgs, wish: str) -> None:
    hook = NoticingEarly(2)
    hook.request = request_
    with pytest.raises(
        LifecycleError, match=rf"\(hook 0\) {wish}, but its Due.when is evaluated after the step"
    ) as raised:
        run_times(3, hook, step=counting())
    assert any("in before_run of" in note and "at global step 2" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("also", [[], [RecordingHook()]], ids=["alone", "with another"])
def test_an_error_in_when_names_the_hook(also: list[SessionRunHook]) -> None:
    hook = Sitting(lambda step: Due(when=lambda outputs: 1 / 0))
    with pytest.raises(ZeroDivisionError) as raised:
        run_times(1, hook, *also)
    assert any("in Due.when of" in note and "Sitting" in note for note in raised.value.__notes__)


def test_a_hook_without_run_methods_is_not_asked_when_it_is_due() -> None:
    class Idle(SessionRunHook):
        def next_due(self) -> Due:
            raise AssertionError

    run_times(2, Idle())


def test_an_error_in_next_due_names_the_hook() -> None:
    class Broken(Sitting):
        def next_due(self) -> Due | None:
            raise KeyError("due")

        def __repr__(self) -> str:
            return "Broken()"

    with pytest.raises(KeyError) as raised:
        MonitoredLoop(half, hooks=[Broken(lambda step: None)])
    assert any("next_due of Broken()" in note for note in getattr(raised.value, "__notes__", ()))


# -- nested use, and use after the end --------------------------------------------------------------------------------


def nested(loop: MonitoredLoop[Any], errors: list[BaseException]) -> None:
    try:
        loop.run()
    except LifecycleError as error:
        errors.append(error)


@pytest.mark.function_only
@pytest.mark.parametrize("where", ["before_run", "step", "after_run"])
def test_a_run_inside_of_a_run_is_refused_and_the_outer_one_goes_on(where: str) -> None:
    errors: list[BaseException] = []
    loop: MonitoredLoop[Any]
    step = (lambda: nested(loop, errors)) if where == "step" else half
    with MonitoredLoop(step, hooks=[During(**{where: lambda: nested(loop, errors)})]) as loop:
        loop.run()
        loop.run()
    assert ["inside a run" in str(error) for error in errors] == [True, True]
    assert loop.global_step == 2


def test_run_step_fn_inside_of_a_run_is_refused() -> None:
    loop: MonitoredLoop[Any]
    with MonitoredLoop(lambda: loop.run_step_fn(lambda context: None)) as loop, pytest.raises(LifecycleError):
        loop.run()


def test_a_run_in_another_thread_meanwhile_is_refused_and_the_first_one_goes_on() -> None:
    errors: list[BaseException] = []
    loop: MonitoredLoop[Any]

    def step() -> float:
        thread = threading.Thread(target=nested, args=(loop, errors))
        thread.start()
        thread.join()
        return 0.5

    with MonitoredLoop(step, hooks=[RecordingHook("loss")]) as loop:
        assert loop.run() == 0.5
    assert "inside a run" in str(errors[0])
    assert loop.global_step == 1


def test_a_closed_loop_still_says_how_far_it_got() -> None:
    with MonitoredLoop(half) as loop:
        loop.run()
    assert (loop.global_step, loop.session.global_step, loop.should_stop()) == (1, 1, True)


# -- run_step_fn ------------------------------------------------------------------------------------------------------


def test_run_step_fn_returns_what_the_function_returned() -> None:
    with MonitoredLoop(half) as loop:
        assert loop.run_step_fn(lambda context: "anything") == "anything"


def test_run_step_fn_has_the_raw_session() -> None:
    with MonitoredLoop(half) as loop:
        assert loop.run_step_fn(lambda context: context.session) is loop.session


def test_only_what_is_run_with_hooks_calls_hooks_and_counts() -> None:
    hook = RecordingHook()
    with MonitoredLoop(half, hooks=[hook]) as loop:
        loop.run_step_fn(lambda context: context.session.run("global_step"))
        loop.run_step_fn(lambda context: None)
        loop.run_step_fn(lambda context: context.run_with_hooks())
    assert [call[0] for call in hook.calls].count("before_run") == 1
    assert loop.global_step == 1


def test_run_with_hooks_is_a_run() -> None:
    def twice(context: StepContext[float]) -> list[float]:
        return [context.run_with_hooks(1.0), context.run_with_hooks(x=1.0, y=1.0)]

    with MonitoredLoop(add) as loop:
        assert loop.run_step_fn(twice) == [1.0, 2.0]


def test_a_stop_out_of_a_step_fn_leaves_it_at_once_and_ends_the_loop_cleanly() -> None:
    reached: list[str] = []
    hook = RecordingHook()

    def stopping(context: StepContext[float]) -> None:
        context.run_with_hooks()
        context.request_stop()
        reached.append("beyond")

    with MonitoredLoop(half, hooks=[hook]) as loop:
        loop.run_step_fn(stopping)
        reached.append("the body")
    assert reached == []
    assert hook.calls[-2:] == [("end", 1), ("teardown",)]
    assert loop.stop_reason == "StopIteration: step_fn asked to stop"


@pytest.mark.parametrize(
    "step_fn",
    [
        None,
        "run",
        lambda: None,
        lambda context, more: None,
        lambda context, more=1: None,
        lambda *, context: None,
        lambda **contexts: None,
    ],
    ids=["None", "text", "none", "two", "two, one of them optional", "by keyword", "keywords"],
)
def test_a_step_fn_that_does_not_take_exactly_one_argument_is_a_value_error(step_fn: Any) -> None:
    with MonitoredLoop(half) as loop, pytest.raises(ValueError, match="exactly one argument"):
        loop.run_step_fn(step_fn)


def test_a_method_may_be_a_step_fn() -> None:
    class Trainer:
        def step_fn(self, step_context: StepContext[float]) -> float:
            return step_context.run_with_hooks()

    with MonitoredLoop(half) as loop:
        assert loop.run_step_fn(Trainer().step_fn) == 0.5


# -- what counts as a step --------------------------------------------------------------------------------------------


class Stepping:
    """A step that steps its optimizer so often, and raises before or after that."""

    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    def __call__(self, times: int, raises: str = "") -> None:
        if raises == "before":
            raise ValueError(raises)
        for _ in range(times):
            self.optimizer.step()
        if raises == "after":
            raise ValueError(raises)


def stepping_loop(step_unit: str, *hooks: SessionRunHook) -> MonitoredLoop[None]:
    step = Stepping()
    return MonitoredLoop(step, optimizer=step.optimizer, hooks=hooks, step_unit=step_unit)


@pytest.mark.parametrize(("step_unit", "steps"), [("run", [1, 2, 3]), ("optimizer_step", [0, 3, 4])])
def test_a_run_counts_what_the_step_unit_says(step_unit: str, steps: list[int]) -> None:
    hook = RecordingHook("global_step")
    with stepping_loop(step_unit, hook) as loop:
        for times in (0, 3, 1):
            loop.run(times)
    assert hook.results == steps


@pytest.mark.parametrize("hooks", [(), (RecordingHook("loss"),)], ids=["idle", "asked"])
@pytest.mark.parametrize(
    ("step_unit", "raises", "steps"),
    [("run", "before", 0), ("run", "after", 0), ("optimizer_step", "before", 0), ("optimizer_step", "after", 2)],
)
def test_only_optimizer_steps_stay_counted_when_the_run_raises(
    step_unit: str, raises: str, steps: int, hooks: tuple[RecordingHook, ...]
) -> None:
    loop = stepping_loop(step_unit, *hooks)
    with pytest.raises(ValueError, match=raises), loop:
        loop.run(2, raises=raises)
    assert loop.global_step == steps


def test_an_optimizer_step_counts_at_its_moment() -> None:
    seen: list[int] = []
    loop: MonitoredLoop[None]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    def step() -> None:
        for _ in range(2):
            optimizer.step()
            seen.append(loop.global_step)

    with MonitoredLoop(step, optimizer=optimizer, step_unit="optimizer_step") as loop:
        loop.run()
    assert seen == [1, 2]


def test_only_the_given_optimizer_counts() -> None:
    one, other = Stepping(), Stepping()

    def step() -> None:
        one(1)
        other(2)

    with MonitoredLoop(step, optimizer=one.optimizer, step_unit="optimizer_step") as loop:
        loop.run()
    assert loop.global_step == 1


def test_a_scaler_that_skips_a_step_counts_none() -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step(loss_scale: float) -> None:
        optimizer.zero_grad()
        scaler.scale((weight * loss_scale).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    with MonitoredLoop(step, optimizer=optimizer, step_unit="optimizer_step") as loop:
        for loss_scale in (1.0, math.inf, 1.0):
            loop.run(loss_scale)
    assert loop.global_step == 2


def test_accumulation_counts_one_step_in_so_many_runs() -> None:
    step = Stepping()
    with MonitoredLoop(step, optimizer=step.optimizer, step_unit="optimizer_step") as loop:
        steps = []
        for micro in range(6):
            loop.run(1 if micro % 3 == 2 else 0)
            steps.append(loop.global_step)
    assert steps == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("fails", [False, True])
def test_a_closed_loop_has_left_the_optimizer(fails: bool) -> None:
    step = Stepping()
    loop = MonitoredLoop(step, optimizer=step.optimizer, step_unit="optimizer_step")
    with pytest.raises(ValueError, match="after") if fails else loop, loop:
        loop.run(1, raises="after" if fails else "")
    step.optimizer.step()
    assert loop.global_step == 1


def test_a_loop_that_could_not_begin_has_left_the_optimizer() -> None:
    step, sessions = Stepping(), []

    class Failing(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            sessions.append(session)
            raise KeyError

    with pytest.raises(KeyError):
        MonitoredLoop(step, optimizer=step.optimizer, hooks=[Failing()], step_unit="optimizer_step")
    step.optimizer.step()
    assert sessions[0].global_step == 0


def test_an_unknown_step_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="step_unit='epoch': "):
        MonitoredLoop(half, step_unit="epoch")


@pytest.mark.parametrize("optimizer", [None, type("Custom", (), {"param_groups": []})()])
def test_counting_optimizer_steps_needs_an_optimizer_that_can_be_watched(optimizer: Any) -> None:
    with pytest.raises(ValueError, match='step_unit="optimizer_step" counts the steps of an optimizer'):
        MonitoredLoop(half, optimizer=optimizer, step_unit="optimizer_step")


def test_a_step_that_is_set_counts_on_from_there() -> None:
    with MonitoredLoop(half, hooks=[StopAtStepHook(last_step=12)]) as loop:
        loop.session.global_step = 10
        for _ in loop.until_stop(range(9)):
            loop.run()
    assert loop.global_step == 12


# -- threads ----------------------------------------------------------------------------------------------------------


class Background(SessionRunHook):
    """Runs ``work`` in a background thread once ``go`` is set; ``wait`` sets it and waits for the thread to end."""

    def __init__(self, work: Callable[[Coordinator], object]) -> None:
        self.work = work
        self.go = threading.Event()

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self.thread = LooperThread(coord, None, target=self._work, args=(coord,))
        self.thread.name = "background"
        self.thread.start()

    def _work(self, coord: Coordinator) -> None:
        self.go.wait()
        self.work(coord)

    def wait(self) -> None:
        self.go.set()
        self.thread.join()

    def teardown(self) -> None:
        self.go.set()


def fail(coord: Coordinator) -> None:
    raise KeyError("disk")


def stop(coord: Coordinator) -> None:
    coord.request_stop()


def run_and_run_again(hook: Background, *others: SessionRunHook, step: Callable[[], object] = half) -> None:
    """A run, then what happens in the thread, then the next run."""
    with MonitoredLoop(step, hooks=[hook, *others]) as loop:
        loop.run()
        hook.wait()
        loop.run()


@pytest.mark.function_only
def test_an_error_in_a_thread_keeps_the_traceback_of_the_thread() -> None:
    with pytest.raises(KeyError) as raised:
        run_and_run_again(Background(fail))
    assert [entry.name for entry in raised.traceback][-1] == "fail"


def test_or_one_call_of_run_step_fn_however_many_runs_it_makes() -> None:
    hook = Background(stop)
    with MonitoredLoop(half, hooks=[hook]) as loop:
        hook.wait()
        loop.run_step_fn(lambda context: (context.run_with_hooks(), context.run_with_hooks()))
        assert loop.run_step_fn(lambda context: context.session.global_step) == 2  # only runs are refused
        with pytest.raises(LifecycleError, match="after a stop"):
            loop.run_step_fn(lambda context: context.run_with_hooks())
    assert loop.global_step == 2


@pytest.mark.parametrize("error", [KeyError, AbortedError])
def test_a_run_that_fails_inside_of_run_step_fn_after_a_stop_is_no_clean_end(error: type[Exception]) -> None:
    hook, recorder = Background(stop), RecordingHook()

    def step() -> None:
        hook.wait()
        raise error("disk")

    with pytest.raises(error, match="disk"), MonitoredLoop(step, hooks=[hook, recorder]) as loop:
        loop.run_step_fn(lambda context: context.run_with_hooks())
    assert [call[0] for call in recorder.calls][2:] == ["before_run", "teardown"]


class Reminded(SessionRunHook):
    """Takes part in one run, and later asks to stop by what it has kept of that."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.kept = run_context

    def next_due(self) -> Due:
        return Due() if hasattr(self, "kept") else Due(runs=1)


def test_a_stop_that_is_asked_for_after_its_run_stops_the_loop_though_nobody_is_due() -> None:
    hook = Reminded()
    with MonitoredLoop(half, hooks=[hook]) as loop:
        for _ in loop.until_stop(range(9)):
            loop.run()
            if loop.global_step == 3:
                hook.kept.request_stop("time is up")
    assert (loop.global_step, loop.stop_reason) == (3, "Reminded: time is up")


def test_an_error_in_the_step_after_one_in_a_thread_is_its_context() -> None:
    hook = Background(fail)

    def step() -> None:
        hook.wait()
        raise ValueError("step")

    with pytest.raises(KeyError, match="disk") as raised:
        run_and_run_again(hook, step=step)
    assert isinstance(raised.value.__context__, ValueError)


def test_an_error_in_a_thread_after_one_in_the_step_is_noted_and_logged(lines: list[tuple[str, str]]) -> None:
    hook = Background(fail)

    def train() -> None:
        with MonitoredLoop(lambda: 1 / 0, hooks=[hook]) as loop:
            try:
                loop.run()
            finally:
                hook.wait()

    with pytest.raises(ZeroDivisionError) as raised:
        train()
    assert "KeyError: 'disk'" in raised.value.__notes__[-1]
    assert ("ERROR", "while the loop was closed after an error") in lines


def test_an_item_that_is_fetched_while_a_thread_stops_is_the_last_and_still_used() -> None:
    hook = Background(stop)

    def batches() -> Iterator[int]:
        yield 1
        hook.wait()
        yield 2
        yield 3

    with MonitoredLoop(half, hooks=[hook]) as loop:
        for _ in loop.until_stop(batches()):
            loop.run()
    assert loop.global_step == 2


# A thread cannot know where the loop is: a stop between the look at should_stop() and run() must not be an error.


def test_a_thread_that_stops_between_should_stop_and_run_stops_cleanly() -> None:
    hook, recorder = Background(stop), RecordingHook()
    with MonitoredLoop(half, hooks=[hook, recorder]) as loop:
        while not loop.should_stop():
            hook.wait()
            loop.run()
    assert recorder.calls[-2:] == [("end", loop.global_step), ("teardown",)]


def test_a_thread_that_does_not_stop_is_named_and_not_waited_for(lines: list[tuple[str, str]]) -> None:
    release = threading.Event()

    class Stuck(Background):
        def teardown(self) -> None:
            pass

    hook = Stuck(lambda coord: release.wait())
    hook.go.set()
    with MonitoredLoop(half, hooks=[hook], stop_grace_period_secs=0.01) as loop:
        loop.run()
    release.set()
    hook.thread.join()
    assert [level for level, text in lines if "'background'" in text and "0.01 s" in text] == ["WARNING"]


def test_a_thread_that_listens_is_stopped_by_close() -> None:
    hook = Background(lambda coord: coord.wait_for_stop())
    hook.go.set()
    with MonitoredLoop(half, hooks=[hook]):
        pass
    assert not hook.thread.is_alive()


# -- at the end, after a clean stop out of the middle of a run --------------------------------------------------------


@pytest.mark.function_only
def test_the_last_outputs_are_still_there_at_the_end_when_the_feed_ran_out(lines: list[tuple[str, str]]) -> None:
    feeds = iter([{"x": 1.0}, {"x": 2.0}])
    hooks = [FeedFnHook(lambda: next(feeds)), LoggingTensorHook(["loss"], at_end=True)]
    with MonitoredLoop(add, hooks=hooks) as loop:
        while not loop.should_stop():
            loop.run()
    assert lines == [("INFO", "loss = 2.0")]


def test_an_output_that_the_last_run_did_not_get_to_is_left_out_at_the_end(lines: list[tuple[str, str]]) -> None:
    batches = iter([0.5, 0.25])
    with MonitoredLoop(lambda: next(batches), hooks=[LoggingTensorHook(["loss"], at_end=True)]) as loop:
        while not loop.should_stop():
            loop.run()
    assert [level for level, text in lines if "'loss'" in text] == ["WARNING"]


def test_an_empty_loop_leaves_out_what_only_a_run_could_give(lines: list[tuple[str, str]]) -> None:
    with MonitoredLoop(half, hooks=[LoggingTensorHook({"loss": "loss", "step": "global_step"}, at_end=True)]):
        pass
    assert lines[0][0] == "WARNING"
    assert lines[1:] == [("INFO", "step = 0")]


# -- a stop asked for late -------------------------------------------------------------------------------------------


class LowEnough(SessionRunHook):
    """Asks to stop in a when_ready callback, which on a device is called in a later run."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs("loss")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        def look(loss: torch.Tensor) -> None:
            if loss < 0.3:
                run_context.request_stop("low enough")

        run_context.when_ready(run_values.results, look, max_lag_runs=2)


@pytest.mark.parametrize(("lag", "last_step"), [(None, 2), (1, 4), (9, 4)])
def test_a_stop_asked_for_in_a_callback_takes_effect_when_the_callback_is_called(
    lag: int | None, last_step: int
) -> None:
    with contextlib.nullcontext() if lag is None else FakeDevice(lag):
        seen = trace(LowEnough(), losses=[0.5, 0.2, *[0.9] * 9], model=torch.nn.Linear(1, 1))
    assert seen.stop_reason == "LowEnough: low enough"
    assert seen.global_step <= last_step


@pytest.mark.function_only
def test_the_repr_says_the_step_the_state_the_hooks_and_the_reason() -> None:
    hooks = [StopAtStepHook(last_step=2), RecordingHook()]
    with MonitoredLoop(half, hooks=hooks) as loop:
        assert repr(loop) == "<MonitoredLoop at step 0, running, 2 hooks: StopAtStepHook, RecordingHook>"
        loop.run()
        loop.run()
        reason = "(StopAtStepHook: step 2)"
        assert repr(loop) == f"<MonitoredLoop at step 2, stopped {reason}, 2 hooks: StopAtStepHook, RecordingHook>"
    assert repr(loop) == f"<MonitoredLoop at step 2, closed {reason}, 2 hooks: StopAtStepHook, RecordingHook>"


@pytest.mark.function_only
def test_the_repr_says_what_ended_the_loop_and_shortens_a_long_list_of_hooks() -> None:
    hooks = [RecordingHook() for _ in range(10)]
    with pytest.raises(ZeroDivisionError), MonitoredLoop(lambda: 1 / 0, hooks=hooks) as loop:
        loop.run()
    assert repr(loop).startswith("<MonitoredLoop at step 0, closed (ZeroDivisionError: division by zero), 10 hooks: ")
    assert repr(loop).endswith("RecordingHook and 2 more>")


def test_the_repr_of_a_session_says_the_step_and_what_it_holds() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MonitoredLoop(half, model, optimizer, state={"vars": Variables(best=0.0)}) as loop:
        loop.run()
        assert repr(loop.session) == "<Session at step 1, open: Linear, SGD, vars>"
    assert repr(loop.session) == "<Session at step 1, closed: Linear, SGD, vars>"


@pytest.mark.function_only
def test_the_repr_of_a_loop_without_anything() -> None:
    with MonitoredLoop() as loop:
        assert repr(loop) == "<MonitoredLoop at step 0, running, 0 hooks>"
        assert repr(loop.session) == "<Session at step 0, open>"
