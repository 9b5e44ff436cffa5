"""Scripts with an error, a stop or a thread in each place, of which TensorFlow's answers are known.

``data/tf_traces/README.md`` explains the files with the answers. :func:`scripts` yields the scripts by their names, and
:func:`play` makes one of them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torchhooks
from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    CheckpointSaverListener,
    Coordinator,
    FeedFnHook,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    MonitoredLoop,
    MonitoredTrainingLoop,
    Scaffold,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepContext,
    StopAtStepHook,
)
from torchhooks.testing import log_lines

Plan = Mapping[tuple[str, int], str]
"""What happens in the n-th call of a method."""


class SubStop(StopIteration):
    """A subclass, and so an error."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "value": lambda: ValueError("v"),
    "stop": lambda: StopIteration("s"),
    "substop": lambda: SubStop("s"),
    "aborted": lambda: AbortedError("aborted"),
    "kbd": KeyboardInterrupt,
}


def raised(kind: str) -> Any:
    """Return what ``sys.exc_info()`` says of an error."""
    try:
        raise ERRORS[kind]()
    except BaseException:
        return sys.exc_info()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))


class World:
    """The loop of one script, and what happens in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[list[Any]] = []
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.coord = Coordinator()
        self.loop: MonitoredLoop[dict[str, torch.Tensor]] | None = None

    def log(self, *event: Any) -> None:
        self.events.append(list(event))

    def step(self, x: float = 1.0, y: float = 0.0, inc: int = 1) -> dict[str, torch.Tensor]:
        loss = torch.tensor(x) + torch.tensor(y)
        with torch.no_grad():
            self.model.w.add_(loss)
        for _ in range(inc):
            self.optimizer.step()
        return {"loss": loss}

    def make(
        self,
        hooks: Any,
        folder: Path | None = None,
        init_fn: Callable[[Scaffold, Session], object] | None = None,
        recover: bool = True,
    ) -> MonitoredLoop[dict[str, torch.Tensor]]:
        self.loop = MonitoredLoop(
            self.step,
            self.model,
            self.optimizer,
            hooks=hooks,
            checkpoint_dir=folder,
            step_unit="optimizer_step",
            scaffold=Scaffold(init_fn=init_fn),
            recoverable_errors=(AbortedError,) if recover else (),
        )
        return self.loop

    @property
    def running(self) -> MonitoredLoop[dict[str, torch.Tensor]]:
        assert self.loop is not None
        return self.loop

    def run(self, inc: int = 1, x: float = 1.0, by: Callable[..., dict[str, torch.Tensor]] | None = None) -> float:
        return float((by or self.running.run)(inc=inc, x=x)["loss"])

    def saver(self, listeners: Any = (), **period: Any) -> CheckpointSaverHook:
        return CheckpointSaverHook(self.folder, listeners=listeners, **(period or {"save_steps": 1}))

    def newest(self, folder: Path | None = None) -> int | None:
        path = torchhooks.latest_checkpoint(folder or self.folder)
        return None if path is None else int(path.rsplit("-", 1)[1])


Body = Callable[[World], object]
MakeHook = Callable[[World], SessionRunHook]


class Recorder(SessionRunHook):
    """Writes down its calls, and does what the plan says in some of them."""

    def __init__(self, world: World, name: str, plan: Plan | None = None) -> None:
        self.world, self.name, self.plan = world, name, plan or {}
        self.counts: collections.Counter[str] = collections.Counter()

    def act(self, method: str, context: SessionRunContext | None = None, *details: Any) -> None:
        world = self.world
        self.counts[method] += 1
        world.log(self.name, method, *details)
        action = self.plan.get((method, self.counts[method]))
        if action is None:
            return
        world.log(self.name, method, f"!{action}")
        what, _, kind = action.partition(":")
        match what:
            case "reqstop":
                assert context is not None
                context.request_stop()
            case "coord":
                world.coord.request_stop(raised(kind) if kind else None)
            case "thread":
                self.report(kind)
            case "run":
                world.run()
            case "close":
                world.running.close()
            case "should_stop":
                world.log("should_stop", world.running.should_stop())
            case _ if what.startswith("thread+"):  # the thread reports first, and then this method raises
                first, second = what.removeprefix("thread+").split(",")
                self.report(first)
                raise ERRORS[second]()
            case _:
                raise ERRORS[what]()

    def report(self, kind: str) -> None:
        thread = threading.Thread(target=lambda: self.world.coord.request_stop(raised(kind)))
        thread.start()
        thread.join()

    def begin(self) -> None:
        self.act("begin")

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self.world.coord = coord
        self.act("acs", None, session.global_step)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        self.act("before", run_context, run_context.session.global_step, run_context.stop_requested)
        return SessionRunArgs("loss")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.act("after", run_context, run_context.session.global_step, float(run_values.results))

    def end(self, session: Session) -> None:
        self.act("end", None, session.global_step)


class Listener(CheckpointSaverListener):
    """Writes down its calls, and does what the plan says in some of them."""

    def __init__(self, world: World, name: str, plan: Plan | None = None) -> None:
        self.world, self.name, self.plan = world, name, plan or {}
        self.counts: collections.Counter[str] = collections.Counter()

    def act(self, method: str, *details: Any) -> bool | None:
        self.counts[method] += 1
        self.world.log(self.name, method, *details)
        action = self.plan.get((method, self.counts[method]))
        if action == "true":
            return True
        if action == "coord":
            self.world.coord.request_stop()
        elif action is not None:
            raise ERRORS[action]()
        return None

    def begin(self) -> None:
        self.act("begin")

    def before_save(self, session: Session, step: int) -> None:
        self.act("before_save", step)

    def after_save(self, session: Session, step: int) -> bool | None:
        return self.act("after_save", step)

    def end(self, session: Session, step: int) -> None:
        self.act("end", step)


def kind_of(error: BaseException | None) -> str | None:
    match error:
        case None:
            return None
        case AbortedError():
            return "Aborted"
        case BaseExceptionGroup():
            return f"Group({','.join(str(kind_of(one)) for one in error.exceptions)})"
        case RuntimeError():
            return "RuntimeError"
    return type(error).__name__


def play(body: Body, folder: Path) -> dict[str, Any]:
    """Make a script, and return what happened."""
    world, error = World(folder), None
    try:
        body(world)
    except BaseException as caught:
        error = caught
    happened = {
        "error": kind_of(error),
        "ev": world.events[:],
        "newest": world.newest(),
        "stopped": None if world.loop is None else world.loop.should_stop(),
    }
    if world.loop is not None:
        with contextlib.suppress(BaseException):
            world.loop.close()
    return happened


# -- ways to make runs -------------------------------------------------------------------------------------------------


def rec(name: str, plan: Plan | None = None) -> MakeHook:
    return lambda world: Recorder(world, name, plan)


def sav(**period: Any) -> MakeHook:
    return lambda world: world.saver(**period)


def in_with(hooks: list[MakeHook], check: bool = True, runs: int = 4, **given: Any) -> Body:
    """Make runs in a ``with`` block, which looks at ``should_stop()`` if it is to ``check``."""

    def body(world: World) -> None:
        with world.make([make(world) for make in hooks], world.folder, **given) as loop:
            for _ in range(runs):
                if check and loop.should_stop():
                    world.log("body", "should_stop")
                    break
                world.run()
                world.log("body", "ran", loop.global_step)

    return body


def in_close(hooks: list[MakeHook], closes: int = 1, **given: Any) -> Body:
    """Make runs, and close the loop, which an error prevents."""

    def body(world: World) -> None:
        loop = world.make([make(world) for make in hooks], world.folder, **given)
        for _ in range(3):
            if loop.should_stop():
                world.log("body", "should_stop")
                break
            world.run()
            world.log("body", "ran")
        for _ in range(closes):
            loop.close()
            world.log("body", "closed")

    return body


def in_fn(hooks: list[MakeHook], mode: str = "run", **given: Any) -> Body:
    """Make runs with ``run_step_fn``."""

    def body(world: World) -> None:
        def step_fn(step_context: StepContext[dict[str, torch.Tensor]]) -> float:
            run = functools.partial(world.run, by=step_context.run_with_hooks)
            world.log("fn", step_context.session.global_step)
            match mode:
                case "twice":
                    run()
                    return run()
                case "raw":
                    return step_context.session.global_step
                case "runs":
                    return world.run()
                case "nested":
                    return world.running.run_step_fn(lambda inner: world.run(by=inner.run_with_hooks))
            return run()

        with world.make([make(world) for make in hooks], world.folder, **given) as loop:
            for _ in range(3):
                if loop.should_stop():
                    world.log("body", "should_stop")
                    break
                world.log("body", "fn ->", loop.run_step_fn(step_fn))

    return body


# -- the scripts -------------------------------------------------------------------------------------------------------


def scripts() -> Iterator[tuple[str, Body]]:
    """Yield the names of all scripts, with the scripts."""
    yield from errors_of_hooks()
    yield from stops_of_hooks()
    yield from reports_to_the_coordinator()
    yield from calls_inside_of_a_run()
    yield from step_functions()
    yield from listeners()
    yield from errors_at_the_exit()
    yield from errors_while_recovering()
    yield from others()
    yield from arguments_of_the_training_loop()
    yield from log_at_the_end()
    yield from several_things()
    for seed in range(400):
        yield f"fz.{seed}.", made_up(seed)


def errors_of_hooks() -> Iterator[tuple[str, Body]]:
    places = [("begin", 1), ("acs", 1), ("before", 1), ("before", 2), ("after", 1), ("after", 2), ("end", 1)]
    for (method, number), error in itertools.product(places, ERRORS):
        hooks, place = [sav(), rec("a"), rec("b", {(method, number): error}), rec("c")], f"{method}{number}.{error}"
        yield f"err.{place}", in_with(hooks)
        if error != "kbd":
            yield f"fn.{place}", in_fn(hooks)
            yield f"close.{place}", in_close(hooks)
            yield f"norecover.{place}", in_with(hooks, recover=False)


def stops_of_hooks() -> Iterator[tuple[str, Body]]:
    for method in ("before", "after"):
        for name, way in (("with", in_with), ("fn", in_fn), ("close", in_close)):
            yield f"stop.{name}.{method}", way([sav(), rec("a"), rec("b", {(method, 2): "reqstop"}), rec("c")])
        yield f"stop.nocheck.{method}", in_with([sav(), rec("a", {(method, 2): "reqstop"})], check=False)
        yield f"stop.fntwice.{method}", in_fn([sav(), rec("a", {(method, 1): "reqstop"})], mode="twice")
        yield f"stop.fntwice2.{method}", in_fn([sav(), rec("a", {(method, 2): "reqstop"})], mode="twice")


def reports_to_the_coordinator() -> Iterator[tuple[str, Body]]:
    single = ["coord", "coord:value", "coord:aborted", "coord:stop", "thread:value", "thread:aborted", "thread:stop"]
    double = ["aborted,value", "value,aborted", "value,value", "aborted,aborted", "value,stop", "aborted,stop"]
    for method, number in (("acs", 1), ("before", 2), ("after", 2), ("end", 1)):
        for action in single:
            hooks = [sav(), rec("a", {(method, number): action}), rec("b")]
            for name, way in (("with", in_with), ("fn", in_fn), ("close", in_close)):
                yield f"{action}.{name}.{method}", way(hooks)
            yield f"{action}.nocheck.{method}", in_with(hooks, check=False)
            yield f"{action}.norecover.{method}", in_with(hooks, recover=False)
        for errors in double:
            hooks = [sav(), rec("a", {(method, number): f"thread+{errors}"}), rec("b")]
            yield f"thread+{errors}.with.{method}", in_with(hooks)
            yield f"thread+{errors}.fn.{method}", in_fn(hooks)


def calls_inside_of_a_run() -> Iterator[tuple[str, Body]]:
    for method, number in (("before", 2), ("after", 2), ("end", 1)):
        for call in ("run", "close", "should_stop"):
            yield f"inside.{call}.{method}", in_with([sav(), rec("a", {(method, number): call}), rec("b")])


def step_functions() -> Iterator[tuple[str, Body]]:
    for mode in ("run", "twice", "raw", "runs", "nested"):
        yield f"fnmode.{mode}", in_fn([sav(), rec("a"), rec("b")], mode)
        for error in ("value", "aborted", "stop"):
            for method, name in (("before", f"fnmode.{mode}.{error}"), ("after", f"fnmode.{mode}.after.{error}")):
                yield name, in_fn([sav(), rec("a"), rec("b", {(method, 2): error})], mode)


def listeners() -> Iterator[tuple[str, Body]]:
    def saver(plan: Plan, world: World) -> SessionRunHook:
        listening = [Listener(world, name, plan if name == "k" else None) for name in "lkj"]
        return world.saver(listening, save_steps=2)

    for method, numbers in (("begin", [1]), ("before_save", [1, 2, 3]), ("after_save", [1, 2, 3]), ("end", [1])):
        for number, action in itertools.product(numbers, ("value", "stop", "substop", "aborted", "true")):
            if action != "true" or method == "after_save":
                make = functools.partial(saver, {(method, number): action})
                yield f"listener.{method}{number}.{action}", in_with([make, rec("a")])


def errors_at_the_exit() -> Iterator[tuple[str, Body]]:
    def after_close(call: Callable[[MonitoredLoop[Any]], object], world: World) -> None:
        loop = world.make([Recorder(world, "a")])
        world.run()
        loop.close()
        world.log("should_stop", loop.should_stop())
        try:
            call(loop)
        except Exception:
            world.log("raised")

    def leave(of_body: str | None, of_end: str | None, of_thread: str | None, world: World) -> None:
        plan = {("end", 1): of_end} if of_end else {}
        with world.make([world.saver(), Recorder(world, "a", plan), Recorder(world, "b")], world.folder):
            world.run()
            if of_thread:
                world.coord.request_stop(raised(of_thread))
            if of_body:
                raise ERRORS[of_body]()

    def initialize(error: str, world: World) -> None:
        def init_fn(scaffold: Scaffold, session: Session) -> None:
            calls.append(None)
            world.log("init", len(calls))
            if len(calls) == 1:
                raise ERRORS[error]()

        calls: list[None] = []
        with world.make([world.saver(), Recorder(world, "a")], world.folder, init_fn):
            world.run()

    yield "close2", in_close([sav(), rec("a")], closes=2)
    yield "afterclose.run", functools.partial(after_close, lambda loop: loop.run())
    yield "afterclose.fn", functools.partial(after_close, lambda loop: loop.run_step_fn(lambda step_context: 1))
    of_bodies = (None, "value", "stop", "aborted", "substop")
    for errors in itertools.product(of_bodies, (None, "value", "stop"), (None, "value", "aborted", "stop")):
        yield "exit." + ".".join(map(str, errors)), functools.partial(leave, *errors)
    for error in ("value", "stop", "substop", "aborted"):
        yield f"init.{error}", functools.partial(initialize, error)


def errors_while_recovering() -> Iterator[tuple[str, Body]]:
    for error, method in itertools.product(("value", "stop", "substop", "aborted"), ("acs", "begin")):
        plan = {("before", 2): "aborted", (method, 2): error}
        yield f"b2.rec.{method}2.{error}", in_with([sav(), rec("a"), rec("b", plan), rec("c")])
        yield f"b2.recfn.{method}2.{error}", in_fn([sav(), rec("a"), rec("b", plan), rec("c")])
        plan = {("after", 2): "thread:aborted", (method, 2): error}
        yield f"b2.recthread.{method}2.{error}", in_with([sav(), rec("a"), rec("b", plan), rec("c")])
    actions = ("coord", "thread:value", "thread:aborted", "reqstop")
    for method, error, action in itertools.product(("before", "after"), ("aborted", "value", "stop"), actions):
        hooks = [sav(), rec("a", {(method, 2): action}), rec("b", {(method, 2): error}), rec("c")]
        yield f"b2.{action}+{error}.{method}", in_with(hooks)
        yield f"b2.{action}+{error}.{method}.fn", in_fn(hooks)


def feeding(world: World) -> SessionRunHook:
    values = iter([1.0, 2.0, 3.0])
    return FeedFnHook(lambda: {"y": next(values)})


class P(NamedTuple):
    a: Any
    b: Any


def others() -> Iterator[tuple[str, Body]]:
    def reuse(make: MakeHook, runs: int, world: World) -> None:
        hook, recorder = make(world), Recorder(world, "r")
        for _ in range(2):
            with world.make([hook, recorder]) as loop:
                for _ in range(runs):
                    if loop.should_stop():
                        world.log("stopped")
                        break
                    world.run()
            world.log("session over", world.newest())

    def fed_by_the_caller_too(world: World) -> None:
        with world.make([Recorder(world, "a"), feeding(world), Recorder(world, "b")]) as loop:
            loop.run(y=3.0)

    def structures(world: World) -> None:
        class Fetching(SessionRunHook):
            def __init__(self, name: str, structure: Any) -> None:
                self.name, self.structure = name, structure

            def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
                return SessionRunArgs(self.structure)

            def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
                world.log(self.name, repr(as_numbers(run_values.results)))

        for name, structure in STRUCTURES.items():
            with world.make([Fetching(name, structure)]):
                world.run()

    def none(world: World) -> None:
        with world.make(None):
            world.run()
            world.log("ok")

    def twice(world: World) -> None:
        hook = Recorder(world, "a")
        with world.make([hook, hook]):
            world.run()

    yield "reuse.stop_num", functools.partial(reuse, lambda world: StopAtStepHook(num_steps=2), 5)
    yield "reuse.stop_last", functools.partial(reuse, lambda world: StopAtStepHook(last_step=2), 5)
    yield "reuse.saver", functools.partial(reuse, sav(save_steps=2), 3)
    yield "reuse.waiter", functools.partial(reuse, lambda world: GlobalStepWaiterHook(0), 3)
    yield "feed.exhausted", in_with([sav(), feeding, rec("a")], runs=6)
    yield "feed.exhausted.last", in_with([sav(), rec("a"), feeding], runs=6)
    yield "feed.two", in_with([sav(), rec("a"), feeding, feeding, rec("b")], runs=2)
    yield "feed.user", fed_by_the_caller_too
    yield "b2.structs", structures
    yield "b2.hooks_none", none
    yield "b2.same_hook_twice", twice


STRUCTURES: dict[str, Any] = {
    "list": ["loss", "loss"],
    "tuple": ("loss", "loss"),
    "dict": {"k": "loss"},
    "named": P("loss", ["loss"]),
    "nested": {"a": ["loss", {"b": "loss"}]},
    "emptylist": [],
    "emptydict": {},
    "emptytuple": (),
}


def as_numbers(results: Any) -> Any:
    match results:
        case dict():
            return {key: as_numbers(value) for key, value in results.items()}
        case P():
            return P(*map(as_numbers, results))
        case list() | tuple():
            return type(results)(map(as_numbers, results))
    return float(results)


PERIODS: list[dict[str, Any]] = [
    {},
    {"save_checkpoint_steps": 2},
    {"save_checkpoint_secs": None},
    {"save_checkpoint_secs": 0},
    {"save_checkpoint_steps": 0},
    {"save_checkpoint_steps": None},
    {"save_checkpoint_secs": 5, "save_checkpoint_steps": 2},
    {"save_checkpoint_secs": None, "save_checkpoint_steps": 2},
    {"save_checkpoint_secs": None, "save_checkpoint_steps": None},
    {"save_summaries_steps": 2, "save_summaries_secs": 3},
    {"save_summaries_steps": None, "save_summaries_secs": None},
    {"log_step_count_steps": None},
    {"log_step_count_steps": 0},
    {"save_summaries_steps": 0},
    {"chief_only_hooks": None},
    {"scaffold": None},
    {"save_checkpoint_secs": 0, "save_checkpoint_steps": 2},
    {"save_checkpoint_steps": -1},
    {"log_step_count_steps": -5},
    {"save_summaries_secs": 0, "save_summaries_steps": 2},
]


def arguments_of_the_training_loop() -> Iterator[tuple[str, Body]]:
    def train(given: dict[str, Any], world: World) -> None:
        world.loop = MonitoredTrainingLoop(
            world.step,
            world.model,
            world.optimizer,
            checkpoint_dir=world.folder,
            hooks=[Recorder(world, "u")],
            step_unit="optimizer_step",
            **given,
        )
        with world.loop:
            for _ in range(5):
                world.run()
            world.log("newest", world.newest())

    for number, given in enumerate(PERIODS):
        yield f"b2.mts{number}.{given}", functools.partial(train, given)


LOGGING: list[dict[str, Any]] = [
    {"every_n_iter": 2},
    {"every_n_iter": 2, "at_end": True},
    {"at_end": True},
    {"every_n_secs": 1000, "at_end": True},
    {"every_n_iter": 4, "at_end": True},
    {"every_n_iter": 1, "at_end": True},
    {"every_n_iter": 100, "at_end": True},
]


def log_at_the_end() -> Iterator[tuple[str, Body]]:
    def log(given: dict[str, Any], runs: int, world: World) -> None:
        with log_lines() as lines, world.make([LoggingTensorHook({"loss": "loss"}, **given)]):
            for number in range(runs):
                world.run(x=float(number))
                lines.append(("", "-"))
        said = [text for _, text in lines if text == "-" or "loss" in text]
        world.log([f"{text.partition(' (')[0]} (N sec)" if text.endswith(" sec)") else text for text in said])

    for number, given in enumerate(LOGGING):
        yield f"b2.log{number}.{given}", functools.partial(log, given, 5)
        yield f"b2.log0runs{number}.{given}", functools.partial(log, given, 0)


def several_things() -> Iterator[tuple[str, Body]]:
    def restored(world: World) -> None:
        calls: list[int] = []

        def init_fn(scaffold: Scaffold, session: Session) -> None:
            calls.append(session.global_step)

        for period, runs in ((1, 2), (10, 1)):
            with world.make([world.saver(save_steps=period), Recorder(world, "a")], world.folder, init_fn):
                for _ in range(runs):
                    world.run()
            world.log("init calls", calls[:])

    def stop_in_listener(method: str, number: int, world: World) -> None:
        listener = Listener(world, "l", {(method, number): "coord"})
        with world.make([Recorder(world, "a"), world.saver([listener], save_steps=2)], world.folder) as loop:
            for _ in range(5):
                if loop.should_stop():
                    break
                world.run()

    def two_savers(world: World) -> None:
        second = world.folder / "second"
        hooks = [world.saver(save_steps=2), CheckpointSaverHook(second, save_steps=3), Recorder(world, "a")]
        with world.make(hooks, world.folder):
            for _ in range(5):
                world.run()
        world.log(world.newest(), world.newest(second))

    def left_by_break(world: World) -> None:
        with world.make([world.saver(save_steps=3), Recorder(world, "a")], world.folder) as loop:
            while not loop.should_stop():
                world.run()
                if loop.global_step == 2:
                    break

    def caught_in_fn(error: str, world: World) -> None:
        def step_fn(step_context: StepContext[dict[str, torch.Tensor]]) -> float:
            try:
                return world.run(by=step_context.run_with_hooks)
            except (ValueError, AbortedError):
                world.log("caught")
                return world.run(by=step_context.run_with_hooks)

        hooks = [world.saver(), Recorder(world, "a", {("before", 2): error}), Recorder(world, "b")]
        with world.make(hooks, world.folder) as loop:
            for _ in range(3):
                world.log(loop.run_step_fn(step_fn))

    def epochs(world: World) -> None:
        iterators = [iter([1.0, 2.0]), iter([3.0, 4.0])]

        class Feeding(SessionRunHook):
            def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
                return SessionRunArgs(None, {"y": next(iterators[0])})

        with world.make([Feeding(), Recorder(world, "a")]) as loop:
            for _ in range(2):
                try:
                    while not loop.should_stop():
                        world.run()
                except StopIteration:
                    world.log("epoch over")
                    iterators.pop(0)

    def left_by_exit(world: World) -> None:
        with world.make([world.saver(), Recorder(world, "a")], world.folder):
            world.run()
            sys.exit(0)

    def fed_none(world: World) -> None:
        with world.make([FeedFnHook(lambda: None), Recorder(world, "a")]):  # type: ignore[arg-type, return-value]
            world.run()

    def late_thread(error: str, world: World) -> None:
        """The thread raises on its way out, after the loop has asked it to stop."""

        class Ending(SessionRunHook):
            def after_create_session(self, session: Session, coord: Coordinator) -> None:
                def work() -> None:
                    with coord.stop_on_exception():
                        while not coord.should_stop():
                            time.sleep(0.001)
                        raise ERRORS[error]()

                thread = threading.Thread(target=work, daemon=True)
                coord.register_thread(thread)
                thread.start()

        with world.make([Ending(), world.saver(), Recorder(world, "a")], world.folder):
            world.run()

    def never_ready(world: World) -> None:
        scaffold = Scaffold(ready_fn=lambda session: "w")
        hooks = [Recorder(world, "a")]
        world.loop = MonitoredLoop(world.step, world.model, world.optimizer, hooks=hooks, scaffold=scaffold)

    def entered_again(world: World) -> None:
        loop = world.make([Recorder(world, "a")])
        with loop:
            world.run()
        world.log("again")
        try:
            with loop:
                world.run()
        except Exception:
            world.log("raised")

    def stopped_without_with(world: World) -> None:
        loop = world.make([Recorder(world, "a", {("after", 1): "reqstop"})])
        world.run()
        world.log(loop.should_stop())
        try:
            world.run()
        except RuntimeError:
            world.log("RuntimeError")
        loop.run_step_fn(lambda step_context: world.log("fn called"))
        loop.close()

    def fn_after_stop(world: World) -> None:
        def step_fn(step_context: StepContext[dict[str, torch.Tensor]]) -> int:
            world.log("fn called")
            return step_context.session.global_step

        with world.make([Recorder(world, "a", {("after", 1): "reqstop"})]) as loop:
            world.run()
            world.log(loop.run_step_fn(step_fn))

    def both_in_acs(world: World) -> None:
        hooks = [Recorder(world, "a", {("acs", 1): "thread:value"}), Recorder(world, "b", {("acs", 1): "value"})]
        with world.make(hooks):
            world.run()

    def recovered_with_listener(world: World) -> None:
        saver = world.saver([Listener(world, "l")], save_steps=1)
        hooks = [Recorder(world, "a", {("before", 2): "aborted"}), saver, Recorder(world, "b")]
        with world.make(hooks, world.folder):
            for _ in range(3):
                world.run()

    def recovered_often(world: World) -> None:
        plan = {("before", number): "aborted" for number in (2, 4, 6)}
        with world.make([world.saver(), Recorder(world, "a", plan), Recorder(world, "b")], world.folder):
            for _ in range(4):
                world.run()

    def begun_at_a_step(world: World) -> None:
        def init_fn(scaffold: Scaffold, session: Session) -> None:
            session.global_step = 7

        hooks = [world.saver(save_steps=5), StopAtStepHook(num_steps=3), Recorder(world, "a")]
        with world.make(hooks, world.folder, init_fn) as loop:
            while not loop.should_stop():
                world.run()

    stops = [sav(save_steps=100), rec("a", {("before", 2): "reqstop"}), rec("b", {("after", 2): "stop"}), rec("c")]
    yield "b2.restore_init", restored
    for method, number in (("before_save", 2), ("after_save", 2), ("end", 1)):
        yield f"b2.listen.{method}", functools.partial(stop_in_listener, method, number)
    yield "b2.two_savers", two_savers
    yield "b2.break", left_by_break
    yield "b2.caught_in_fn", functools.partial(caught_in_fn, "value")
    yield "b2.caught_aborted_in_fn", functools.partial(caught_in_fn, "aborted")
    yield "b2.epochs_by_stopiteration", epochs
    yield "b3.sysexit", left_by_exit
    yield "b3.feednone", fed_none
    for error in ("value", "aborted", "stop"):
        yield f"b3.late_thread.{error}", functools.partial(late_thread, error)
    yield "b3.notready", never_ready
    yield "b3.reenter", entered_again
    yield "b3.nowith_stop", stopped_without_with
    yield "b3.fn_after_stop", fn_after_stop
    yield "b3.stop_and_stopiteration", in_with_quietly(stops)
    yield "b3.acs_two", both_in_acs
    yield "b3.listeners_recovery", recovered_with_listener
    yield "b3.many_aborts", recovered_often
    yield "b3.init_step", begun_at_a_step


def in_with_quietly(hooks: list[MakeHook]) -> Body:
    """Make runs in a ``with`` block, and write down nothing of the block."""

    def body(world: World) -> None:
        with world.make([make(world) for make in hooks], world.folder) as loop:
            for _ in range(4):
                if loop.should_stop():
                    break
                world.run()

    return body


# -- made up -----------------------------------------------------------------------------------------------------------


def made_up(seed: int) -> Body:
    """Return a script that is made up. The order of the draws is part of the recorded answers."""
    draw = random.Random(seed)
    plans: list[dict[tuple[str, int], str]] = []
    for _ in range(3):
        plan: dict[tuple[str, int], str] = {}
        for _ in range(draw.choice([0, 1, 1, 2])):
            method = draw.choice(["before", "after", "before", "after", "acs"])
            number = draw.randint(2, 5) if method == "acs" else draw.randint(1, 6)
            actions = [
                "aborted",
                "aborted",
                "reqstop" if method != "acs" else "aborted",
                "value" if draw.random() < 0.3 else "aborted",
                "stop" if draw.random() < 0.3 else "aborted",
            ]
            plan[method, number] = draw.choice(actions)
        plans.append(plan)
    place, period = draw.randint(0, 3), draw.choice([1, 2, 3])
    mode, turns = draw.choice(["with", "run", "twice", "nested", "raw", "mix"]), draw.randint(2, 6)
    last, number_of_steps = draw.choice([None, 3, 5]), draw.choice([None, None, 4])
    counts = [draw.choice([1, 1, 1, 2, 0]) for _ in range(40)]
    listening: dict[tuple[str, int], str] = {}
    if draw.random() < 0.4:
        where = draw.choice(["before_save", "after_save"]), draw.randint(2, 4)
        listening = {where: draw.choice(["aborted", "true", "value"])}
    has_listener = draw.random() < 0.5
    allowed = {where: action for where, action in listening.items() if (where[0], action) != ("before_save", "true")}

    def body(world: World) -> None:
        hooks: list[SessionRunHook] = [Recorder(world, name, plan) for name, plan in zip("abc", plans, strict=True)]
        listeners = [Listener(world, "l", allowed)] if has_listener else []
        hooks.insert(place, world.saver(listeners, save_steps=period))
        if last:
            hooks.insert(draw.randint(0, 4), StopAtStepHook(last_step=last))
        elif number_of_steps:
            hooks.insert(draw.randint(0, 4), StopAtStepHook(num_steps=number_of_steps))
        left = iter(counts)

        def step_fn(way: str, step_context: StepContext[dict[str, torch.Tensor]]) -> float:
            world.log("fn")
            match way:
                case "raw":
                    return 0
                case "nested":
                    return world.running.run_step_fn(lambda inner: world.run(next(left), by=inner.run_with_hooks))
            loss = world.run(next(left), by=step_context.run_with_hooks)
            return world.run(next(left), by=step_context.run_with_hooks) if way == "twice" else loss

        def turn(loop: MonitoredLoop[Any], way: str) -> None:
            if way == "with":
                world.log("ran", world.run(next(left)))
            else:
                # It takes exactly one argument.
                world.log("fn ->", loop.run_step_fn(lambda step_context: step_fn(way, step_context)))

        with world.make(hooks, world.folder) as loop:
            for number in range(turns):
                if loop.should_stop():
                    world.log("body", "should_stop")
                    break
                ways = ["with", "run", "twice"]
                turn(loop, random.Random(seed * 100 + number).choice(ways) if mode == "mix" else mode)

    return body
