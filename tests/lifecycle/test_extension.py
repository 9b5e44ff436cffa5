"""Extensions: when their methods are called, what a plan changes, and what an error of one does."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    Extension,
    Finding,
    LoopPlan,
    MonitoredLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
    register_extension,
    unregister_extension,
)
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.settings import LoopSettings
from torchhooks.progress.training_state import TrainingState

Lines = list[tuple[str, str]]


@contextmanager
def registered(factory: Callable[[LoopPlan], Extension | None]) -> Iterator[None]:
    register_extension(factory)
    try:
        yield
    finally:
        unregister_extension(factory)


class Hook(SessionRunHook):
    """Appends its calls to ``calls``."""

    def __init__(self, calls: list[str], name: str = "hook") -> None:
        self.calls, self.prefix = calls, name

    def begin(self) -> None:
        self.calls.append(f"{self.prefix}.begin")

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self.calls.append(f"{self.prefix}.after_create_session")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.calls.append(f"{self.prefix}.after_run")

    def end(self, session: Session) -> None:
        self.calls.append(f"{self.prefix}.end")

    def teardown(self) -> None:
        self.calls.append(f"{self.prefix}.teardown")


class Recording(Extension):
    """Appends its calls to ``calls``, and raises a ``fails`` error in one of them."""

    def __init__(self, calls: list[Any], fails: str = "", name: str = "") -> None:
        self.calls, self.fails, self.prefix = calls, fails, name

    def note(self, method: str, *what: object) -> None:
        self.calls.append((f"{self.prefix}{method}", *what) if what else f"{self.prefix}{method}")
        if method == self.fails:
            raise ValueError(f"{self.prefix}{method}")

    def plan(self, plan: LoopPlan) -> LoopPlan:
        self.note("plan")
        return plan

    def begin(self, training: TrainingState, settings: LoopSettings) -> None:
        self.note("begin")

    def start(self, session: Session) -> None:
        self.note("start", session.global_step)

    def found(self, session: Session, finding: Finding) -> None:
        self.note("found", finding.message)

    def finish(self, reason: str, failed: bool) -> None:
        self.note("finish", reason, failed)

    def close(self, reason: str, failed: bool) -> None:
        self.note("close", reason, failed)


def test_the_methods_are_called_around_those_of_the_hooks() -> None:
    calls: list[Any] = []
    with (
        registered(lambda plan: Recording(calls)),
        MonitoredLoop(lambda: None, hooks=[Hook(calls), StopAtStepHook(last_step=1)]) as loop,
    ):
        loop.run()
    assert calls == [
        "plan",
        "begin",
        "hook.begin",
        "hook.after_create_session",
        ("start", 0),
        "hook.after_run",
        "hook.end",
        ("finish", "StopAtStepHook: step 1", False),
        "hook.teardown",
        ("close", "StopAtStepHook: step 1", False),
    ]


def test_the_error_of_a_run_is_the_reason() -> None:
    calls: list[Any] = []

    def step() -> None:
        raise ZeroDivisionError("of the step")

    with (
        registered(lambda plan: Recording(calls)),
        pytest.raises(ZeroDivisionError),
        MonitoredLoop(step) as loop,
    ):
        loop.run()
    assert calls[-2:] == [(method, "ZeroDivisionError: of the step", True) for method in ("finish", "close")]


def test_each_loop_has_an_extension_of_its_own_until_the_factory_is_unregistered() -> None:
    made: list[Extension] = []

    def make(plan: LoopPlan) -> Extension:
        made.append(Extension())
        return made[-1]

    with registered(make):
        for _ in range(2):
            MonitoredLoop(lambda: None).close()
    MonitoredLoop(lambda: None).close()
    assert len({id(each) for each in made}) == 2


def test_a_factory_chooses_the_loops_that_get_an_extension(tmp_path: Path) -> None:
    calls: list[Any] = []
    with registered(lambda plan: Recording(calls) if plan.folder is not None else None):
        MonitoredLoop(lambda: None).close()
        assert not calls
        MonitoredLoop(lambda: None, checkpoint_dir=tmp_path).close()
        assert calls[0] == "plan"


def test_a_factory_may_be_registered_by_a_decorator() -> None:
    calls: list[Any] = []

    @register_extension
    def make(plan: LoopPlan) -> Extension:
        return Recording(calls)

    try:
        MonitoredLoop(lambda: None).close()
    finally:
        unregister_extension(make)
    assert calls[0] == "plan"


def test_a_recovery_starts_the_extension_with_the_new_session(tmp_path: Path) -> None:
    calls: list[Any] = []
    sessions: list[Session] = []
    failures = iter([False, False, True])

    class Keeping(Recording):
        def start(self, session: Session) -> None:
            super().start(session)
            sessions.append(session)

    def step() -> None:
        if next(failures, False):
            raise AbortedError("preempted")

    saver = CheckpointSaverHook(tmp_path, save_steps=1)
    with (
        registered(lambda plan: Keeping(calls)),
        MonitoredLoop(step, hooks=[saver, StopAtStepHook(last_step=4)], checkpoint_dir=tmp_path) as loop,
    ):
        while not loop.should_stop():
            loop.run()
        assert sessions[-1] is loop.session
    assert [call for call in calls if call[0] == "start"] == [("start", 0), ("start", 2)]
    assert [call for call in calls if call == "begin"] == ["begin"]


def test_an_extension_has_six_methods_and_no_seventh() -> None:
    methods = [name for name in vars(Extension) if not name.startswith("_")]
    assert methods == ["plan", "begin", "start", "found", "finish", "close"]


# -- the plan ---------------------------------------------------------------------------------------------------------


class Planning(Extension):
    def __init__(self, change: Callable[[LoopPlan], LoopPlan]) -> None:
        self.change = change

    def plan(self, plan: LoopPlan) -> LoopPlan:
        return self.change(plan)


def test_hooks_are_added_before_and_after_those_of_the_script() -> None:
    calls: list[str] = []

    def change(plan: LoopPlan) -> LoopPlan:
        return replace(plan, first=(Hook(calls, "first"), *plan.first), last=(*plan.last, Hook(calls, "last")))

    with registered(lambda plan: Planning(change)), MonitoredLoop(lambda: None, hooks=[Hook(calls)]) as loop:
        loop.run()
    for method in ("begin", "after_create_session", "after_run", "end", "teardown"):
        assert [call for call in calls if call.endswith(f".{method}")] == [
            f"{name}.{method}" for name in ("first", "hook", "last")
        ]


@pytest.mark.parametrize(("place", "noted"), [("first", False), ("hooks", True), ("last", False)])
def test_messages_number_the_hooks_of_the_script_alone(place: str, noted: bool) -> None:
    class Failing(SessionRunHook):
        def __repr__(self) -> str:
            return "Failing()"

        def begin(self) -> None:
            raise ZeroDivisionError

    def change(plan: LoopPlan) -> LoopPlan:
        first, last = (Failing() if place == name else SessionRunHook() for name in ("first", "last"))
        return replace(plan, first=(first,), last=(last,))

    script = [SessionRunHook(), Failing() if place == "hooks" else SessionRunHook()]
    with registered(lambda plan: Planning(change)), pytest.raises(ZeroDivisionError) as caught:
        MonitoredLoop(lambda: None, hooks=script)
    number = " (hook 1)" if noted else ""
    assert caught.value.__notes__ == [f"torchhooks: in begin of Failing(){number}, at global step 0"]


def test_a_hook_of_the_script_is_left_out() -> None:
    calls: list[str] = []
    left_out = Hook(calls)

    def change(plan: LoopPlan) -> LoopPlan:
        return replace(plan, hooks=tuple(hook for hook in plan.hooks if hook is not left_out))

    with registered(lambda plan: Planning(change)), MonitoredLoop(lambda: None, hooks=[left_out]) as loop:
        loop.run()
    assert not calls


def test_the_plan_says_what_the_script_has_given(tmp_path: Path) -> None:
    plans: list[LoopPlan] = []
    hook = SessionRunHook()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None: ...

    def make(plan: LoopPlan) -> None:
        plans.append(plan)

    MonitoredLoop(step, hooks=[CheckpointSaverHook(tmp_path, save_steps=1)]).close()
    with registered(make):
        MonitoredLoop(step, hooks=[hook], checkpoint_dir=tmp_path).close()
        MonitoredLoop(step, model, optimizer, step_unit="optimizer_step").close()
        MonitoredLoop(step, checkpoint_dir=tmp_path / "model.ckpt-0").close()
    assert plans == [
        LoopPlan(hooks=(hook,), step=step, folder=str(tmp_path)),
        LoopPlan(step=step, counts_runs=False),
        LoopPlan(step=step, folder=str(tmp_path), checkpoint="model.ckpt-0"),
    ]


def test_the_extension_that_was_registered_first_is_the_outermost() -> None:
    calls: list[Any] = []

    def adding(name: str) -> Callable[[LoopPlan], Extension]:
        class Adding(Recording):
            def plan(self, plan: LoopPlan) -> LoopPlan:
                self.note("plan")
                first, last = Hook(calls, f"{name}.first"), Hook(calls, f"{name}.last")
                return replace(plan, first=(first, *plan.first), last=(*plan.last, last))

        return lambda plan: Adding(calls, name=f"{name}.")

    with registered(adding("a")), registered(adding("b")), MonitoredLoop(lambda: None) as loop:
        loop.run()
    names = [call if isinstance(call, str) else call[0] for call in calls]
    order = [name for name in names if name[2:] in ("plan", "begin", "start", "finish", "close")]
    assert order == [
        *("b.plan", "a.plan", "a.begin", "b.begin", "a.start", "b.start"),
        *("a.finish", "b.finish", "b.close", "a.close"),
    ]
    runs = [name for name in names if name.endswith("after_run")]
    assert runs == [f"{name}.after_run" for name in ("a.first", "b.first", "b.last", "a.last")]


def test_a_loop_begins_with_the_checkpoint_of_the_plan(tmp_path: Path) -> None:
    def train() -> int:
        saver = CheckpointSaverHook(tmp_path, save_steps=1)
        with MonitoredLoop(lambda: None, hooks=[saver], checkpoint_dir=tmp_path) as loop:
            began = loop.global_step
            for _ in range(3):
                loop.run()
        return began

    assert train() == 0
    with registered(lambda plan: Planning(lambda plan: replace(plan, checkpoint="model.ckpt-2"))):
        assert train() == 2


@pytest.mark.parametrize(("limit", "items"), [(None, 2), (5, 2), (1, 1)])
def test_the_loops_of_one_depth_take_so_many_items(limit: int | None, items: int) -> None:
    taken = []
    with (
        registered(lambda plan: Planning(lambda plan: replace(plan, most_items=(2, 2)))),
        MonitoredLoop(lambda: None) as loop,
    ):
        for epoch in loop.until_stop(range(3)):
            for item in loop.until_stop(range(9), limit=limit):
                loop.run()
                taken.append((epoch, item))
    assert taken == [(epoch, item) for epoch in range(3) for item in range(items)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda plan: Planning(lambda plan: None), r"plan of <.*Planning .*> returned None: return the plan"),  # type: ignore[arg-type, return-value]
        (lambda plan: plan, r"returned LoopPlan.*: return an Extension, or None"),
    ],
)
def test_what_is_no_plan_and_no_extension_is_an_error(make: Any, message: str) -> None:
    with registered(make), pytest.raises(TypeError, match=message):
        MonitoredLoop(lambda: None)


HOOK = SessionRunHook()


class Strange(SessionRunHook):
    """Does not take what the loop passes."""

    def after_run(self) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"last": (print,)}, "as a hook: a hook is an instance of SessionRunHook"),
        ({"last": HOOK}, "a plan with last=<.*>: it must be a tuple of hooks"),
        ({"first": None}, "a plan with first=None: it must be a tuple of hooks"),
        ({"first": (HOOK,), "last": (HOOK,)}, "twice: the loop would call it twice"),
        ({"last": (Strange(),)}, "hook 0 of an extension is a Strange, whose after_run does not take"),
        ({"folder": "elsewhere"}, "folder='elsewhere': folder says what the script has given"),
        ({"step": print}, "step says what the script has given"),
        ({"counts_runs": False}, "counts_runs says what the script has given"),
        ({"checkpoint": "model.ckpt-1"}, "checkpoint='model.ckpt-1': it must be the name of a checkpoint in folder"),
        ({"checkpoint": 7}, "it must be the name of a checkpoint"),
        ({"most_items": 3}, r"most_items=3: it must be \(depth, items\), both from 1 on"),
        ({"most_items": (1, 0)}, "both from 1 on"),
    ],
)
def test_what_a_plan_cannot_have_is_an_error(change: dict[str, Any], message: str) -> None:
    with (
        registered(lambda plan: Planning(lambda plan: replace(plan, **change))),
        pytest.raises((TypeError, ValueError), match=message),
    ):
        MonitoredLoop(lambda: None)


def test_what_is_no_factory_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"register_extension\(7\): give a function"):
        register_extension(7)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="is an extension: give a function that makes one for each loop"):
        register_extension(Extension())  # type: ignore[type-var]
    with pytest.raises(ValueError, match="is not registered"):
        unregister_extension(lambda plan: None)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["plan", "begin", "start"])
def test_an_error_while_the_loop_is_created_is_that_of_its_constructor(fails: str) -> None:
    calls: list[Any] = []
    with registered(lambda plan: Recording(calls, fails)), pytest.raises(ValueError, match=fails) as caught:
        MonitoredLoop(lambda: None, hooks=[Hook(calls)])
    assert f"torchhooks: in {fails} of Recording" in caught.value.__notes__
    closed = [] if fails == "plan" else [(method, f"ValueError: {fails}", True) for method in ("finish", "close")]
    assert [call for call in calls if call[0] in ("finish", "close")] == closed
    assert ("hook.begin" in calls) == (fails == "start")
    assert ("hook.teardown" in calls) == (fails == "start")


def test_what_did_not_begin_is_not_closed() -> None:
    calls: list[Any] = []
    with (
        registered(lambda plan: Recording(calls, "begin", "a.")),
        registered(lambda plan: Recording(calls, "", "b.")),
        pytest.raises(ValueError, match=r"a\.begin"),
    ):
        MonitoredLoop(lambda: None)
    assert calls == [
        *("b.plan", "a.plan", "a.begin"),
        *((f"a.{method}", "ValueError: a.begin", True) for method in ("finish", "close")),
    ]


def test_errors_at_the_end_are_raised_once_everything_is_closed() -> None:
    calls: list[Any] = []
    with (
        registered(lambda plan: Recording(calls, "finish", "a.")),
        registered(lambda plan: Recording(calls, "close", "b.")),
    ):
        loop = MonitoredLoop(lambda: None, hooks=[Hook(calls)])
        with pytest.raises(ExceptionGroup) as caught:
            loop.close()
    assert [str(error) for error in caught.value.exceptions] == ["a.finish", "b.close"]
    assert calls[-5:] == [
        ("a.finish", "closed", False),
        ("b.finish", "ValueError: a.finish", True),
        "hook.teardown",
        ("b.close", "ValueError: a.finish", True),
        ("a.close", "ValueError: a.finish", True),
    ]


# -- findings ---------------------------------------------------------------------------------------------------------


def nan() -> torch.Tensor:
    return torch.tensor(float("nan"))


def test_a_nan_is_a_finding() -> None:
    calls: list[Any] = []
    with (
        registered(lambda plan: Recording(calls)),
        pytest.raises(NanLossDuringTrainingError),
        MonitoredLoop(nan, hooks=[NanTensorHook("loss")]) as loop,
    ):
        loop.run()
    assert ("found", "loss is NaN at step 1") in calls


def test_a_finding_has_the_hook_and_what_the_step_got() -> None:
    findings: list[Finding] = []

    class Keeping(Extension):
        def found(self, session: Session, finding: Finding) -> None:
            findings.append(finding)

    hook = NanTensorHook("loss", fail_on_nan_loss=False)
    with registered(lambda plan: Keeping()), MonitoredLoop(lambda scale: nan() * scale, hooks=[hook]) as loop:
        loop.run(3)
    assert findings == [Finding(1, "loss is NaN at step 1", hook, {"scale": 3})]
    assert loop.stop_reason == "NanTensorHook: loss is NaN at step 1"


@pytest.mark.parametrize("error", [ValueError, StopIteration, AbortedError])
def test_an_error_of_an_extension_does_not_take_the_place_of_a_nan(error: type[Exception], lines: Lines) -> None:
    calls: list[Any] = []

    class Failing(Extension):
        def found(self, session: Session, finding: Finding) -> None:
            raise error("of the extension")

    with (
        registered(lambda plan: Failing()),
        registered(lambda plan: Recording(calls)),
        pytest.raises(NanLossDuringTrainingError),
        MonitoredLoop(nan, hooks=[NanTensorHook("loss")]) as loop,
    ):
        loop.run()
    assert ("found", "loss is NaN at step 1") in calls
    assert ("ERROR", "an extension that was told of a finding has failed: loss is NaN at step 1") in lines


def test_an_error_at_the_end_is_logged_before_a_signal_ends_the_process(lines: Lines) -> None:
    received = []

    def train() -> None:
        with MonitoredLoop(lambda: None, signals=["SIGTERM"]) as loop:
            for _ in loop.until_stop(range(3)):
                loop.run()
                os.kill(os.getpid(), signal.SIGTERM)

    old = signal.signal(signal.SIGTERM, lambda number, frame: received.append(len(lines)))
    try:
        with registered(lambda plan: Recording([], "close")), pytest.raises(ValueError, match="close"):
            train()
    finally:
        signal.signal(signal.SIGTERM, old)
    logged = lines.index(("ERROR", "an error, logged now because signal SIGTERM may end the process"))
    assert received == [logged + 1]


def test_a_method_without_a_name_may_fail_too() -> None:
    class Partial(Extension):
        begin = functools.partial(int, "no number")  # type: ignore[assignment]

    with registered(lambda plan: Partial()), pytest.raises(TypeError) as caught:
        MonitoredLoop(lambda: None)
    assert caught.value.__notes__ == ["torchhooks: in a method of Partial"]
