"""Random programs around a loop, each of which makes exactly the calls that a small model of the loop predicts.

The model takes from the table at the top of torchhooks/loop/boundaries.py which lines are due at a boundary, and in
which order. So the code does what the table says. The model knows one process, no threads, and values on the CPU:
there, the other lines do nothing that a hook or the script sees.

The script and its hooks are the same with torchhooks and with the model. Each of their calls is an event.
"""

from __future__ import annotations

import logging
import math
import pprint
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
from support.paths import ROOT

from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    Coordinator,
    Due,
    LifecycleError,
    MonitoredLoop,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from torchhooks.loop import boundaries

Event = tuple[Any, ...]
ERRORS: dict[str, type[Exception]] = {each.__name__: each for each in (ValueError, StopIteration, AbortedError)}


# -- a program --------------------------------------------------------------------------------------------------------


class HookPlan(NamedTuple):
    """One hook of a program."""

    is_early: bool
    """Whether it has a before_run."""
    due: tuple[str, int]
    """When it is called: ``("always", 0)``, or every so many ``"steps"``, ``"runs"`` or ``"epochs"``."""
    item: str
    """``"item"`` or ``"last"`` if each after_run asks for a call at the end of the item, otherwise ``""``."""
    leaves_rest: bool
    """Whether that call leaves something to do for the call at a stop."""
    at_stop: bool
    """Whether it asks for a call at a stop."""
    ready: bool
    """Whether each after_run asks for a value."""
    acts: dict[tuple[str, int], str]
    """What it does in the n-th call of a method: it asks to ``"stop"``, asks for the item ``"again"``, or raises."""


@dataclass(frozen=True)
class Program:
    """A script and its hooks."""

    lengths: tuple[int, ...]  # of nested loops, the outermost first
    sized: tuple[bool, ...]  # whether the loop knows these
    runs: int  # in each item of the innermost loop
    in_body: bool  # whether a run is the body of loop.step()
    run_after_inner: bool  # whether an item of an outer loop has a run of its own
    second: int | None  # how many items another inner loop has, after the first one in the same item, without runs
    leaves: tuple[int, int, str] | None  # the depth of a loop that the body leaves by break, from which run on, where
    holds: bool  # whether a variable refers to each generator
    asks: tuple[int, bool] | None  # the depth of a body that calls should_stop(), and whether it then breaks
    reads: int | None  # the depth of a loop after which the script asks for results of the epoch
    step_fault: tuple[int, str] | None  # in which step, and what it raises
    own_fault: int | None  # after which run the script itself raises a ValueError
    caller: tuple[int, str] | None  # the run before, in or after which the caller asks for a stop
    catches: tuple[bool, bool]  # whether the script catches a ValueError of a run, and of an inner loop
    afterwards: str  # what follows the loops: "run", "loop", "ask", or nothing
    is_with: bool  # whether the loop is in a with statement, or closed in a finally
    can_recover: bool  # whether there is a checkpoint
    hooks: tuple[HookPlan, ...]

    @classmethod
    def drawn(cls, seed: int) -> Program:
        draw = random.Random(seed)

        def maybe(share: float) -> bool:
            return draw.random() < share

        depth = draw.choice([1, 2, 2, 2, 3])
        can_recover = maybe(0.15)
        kinds = (
            ["AbortedError", "AbortedError", "ValueError"]
            if can_recover
            else ["ValueError", "ValueError", "StopIteration"]
        )

        def hook() -> HookPlan:
            due = draw.choice(["always", "always", "steps", "runs", "epochs", "epochs"])
            acts: dict[tuple[str, int], str] = {}
            while maybe(0.5):
                place = draw.choice(["before", "after", "after", "item", "item", "at stop", "ready"])
                can = {"at stop": kinds, "item": ["stop", "stop", "again", *kinds]}.get(place, ["stop", "stop", *kinds])
                most = 1 if place == "at stop" else 2 if due == "epochs" else 4
                acts[place, draw.randint(1, most)] = draw.choice(can)
            return HookPlan(
                is_early=maybe(0.5),
                due=(due, {"always": 0, "epochs": draw.choice([1, 1, 1, 2])}.get(due, draw.randint(1, 3))),
                item=draw.choice(["", "item", "item", "last"]),
                leaves_rest=maybe(0.2),
                at_stop=maybe(0.5),
                ready=maybe(0.2),
                acts=acts,
            )

        innermost = depth - 1
        left = draw.choice([innermost, innermost, draw.randrange(depth)]), draw.randint(1, 5)
        return cls(
            lengths=tuple(draw.choice([0, 1, 2, 2, 2, 3, 3, 3]) for _ in range(depth)),
            sized=tuple(maybe(0.7) for _ in range(depth)),
            runs=draw.choice([1, 1, 1, 2]),
            in_body=maybe(0.3),
            run_after_inner=maybe(0.3),
            second=draw.randint(0, 2) if maybe(0.2) else None,
            leaves=(*left, draw.choice(["before", "after", "after"])) if maybe(0.5) else None,
            holds=maybe(0.2),
            asks=(draw.choice([max(innermost - 1, 0), draw.randrange(depth)]), maybe(0.5)) if maybe(0.4) else None,
            reads=draw.randrange(depth) if maybe(0.2) else None,
            step_fault=(draw.randint(1, 8), draw.choice(kinds)) if maybe(0.15) else None,
            own_fault=draw.randint(1, 8) if maybe(0.1) else None,
            caller=(draw.randint(1, 8), draw.choice(["before", "in", "after"])) if maybe(0.2) else None,
            catches=(maybe(0.4), maybe(0.4)),
            afterwards=draw.choice(["", "run", "run", "loop", "ask"]),
            is_with=maybe(0.8),
            can_recover=can_recover,
            hooks=tuple(hook() for _ in range(draw.choice([1, 2, 2, 3]))),
        )


# -- what a program does, with torchhooks and with the model ----------------------------------------------------------


class View(Protocol):
    """What a hook and the script see of a session."""

    @property
    def global_step(self) -> int: ...
    @property
    def epoch(self) -> int | None: ...
    @property
    def batch(self) -> int | None: ...
    def finish_epoch(self) -> None: ...


class Context(Protocol):
    """What a hook sees of a run."""

    @property
    def session(self) -> View: ...
    def request_stop(self, reason: str | None = None) -> None: ...
    def after_item(self, callback: Callable[[], object], last: bool = False) -> None: ...
    def when_ready(self, values: int, callback: Callable[[int], object]) -> None: ...


class Loop(Protocol):
    """What the script sees of a loop."""

    @property
    def global_step(self) -> int: ...
    @property
    def session(self) -> View: ...
    @property
    def stop_reason(self) -> str | None: ...
    def until_stop(self, iterable: Iterable[int]) -> Generator[int, None, None]: ...
    def run(self) -> object: ...
    def step(self) -> AbstractContextManager[object]: ...
    def should_stop(self) -> bool: ...
    def request_stop(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> object: ...
    def __exit__(self, *error: Any) -> bool: ...


@dataclass
class Actor:
    """What one hook does."""

    name: str
    plan: HookPlan
    note: Callable[..., None]
    counts: Counter[str] = field(default_factory=Counter)

    def call(self, place: str, view: View, context: Context | None = None, *details: object) -> None:
        self.note(self.name, place, view.global_step, view.epoch, view.batch, *details)
        self.counts[place] += 1
        act = self.plan.acts.get((place, self.counts[place]))
        if act in ERRORS:
            raise ERRORS[act](f"{place} of {self.name}")
        if act == "stop" and context is not None:
            context.request_stop(f"{place} of {self.name}")
        if act == "again" and context is not None:
            context.after_item(partial(self.item, context), last=True)

    def after(self, context: Context) -> None:
        if self.plan.item:
            context.after_item(partial(self.item, context), last=self.plan.item == "last")
        self.call("after", context.session, context)
        if self.plan.ready:
            context.when_ready(0, lambda value: self.call("ready", context.session, context))

    def item(self, context: Context) -> bool:
        self.call("item", context.session, context)
        return not self.plan.leaves_rest


class Unsized:
    """Data that do not tell their length."""

    def __init__(self, items: range) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)


class Script:
    """The script of a program."""

    def __init__(self, program: Program, note: Callable[..., None]) -> None:
        self.program, self.note = program, note
        self.held: list[object] = []
        self.tries = self.steps = 0
        self.loop: Loop

    def step(self) -> None:
        self.steps += 1
        self.note("step", self.steps)
        self.caller_asks("in")
        if self.program.step_fault is not None and self.program.step_fault[0] == self.steps:
            raise ERRORS[self.program.step_fault[1]]("step")

    def caller_asks(self, where: str) -> None:
        if self.program.caller == (self.tries, where):
            self.loop.request_stop("caller")

    def run(self) -> None:
        self.tries += 1
        self.caller_asks("before")
        try:
            if self.program.in_body:
                with self.loop.step():
                    self.step()
            else:
                self.loop.run()
        except ValueError as error:
            if not self.program.catches[0]:
                raise
            self.note("caught", str(error))
        self.see("ran", self.tries)
        self.caller_asks("after")
        if self.program.own_fault == self.tries:
            raise ValueError("script")

    def run_if_possible(self) -> None:
        if self.loop.stop_reason in (None, "data ended"):  # unlike should_stop(), this is no boundary
            self.run()

    def see(self, *where: object) -> None:
        view = self.loop.session
        self.note(*where, view.global_step, view.epoch, view.batch, self.loop.stop_reason)

    def leaves(self, depth: int, where: str) -> bool:
        leaves = self.program.leaves
        return leaves is not None and (leaves[0], leaves[2]) == (depth, where) and self.tries >= leaves[1]

    def go_through(self, depth: int) -> None:
        program, loop = self.program, self.loop
        data = range(program.lengths[depth])
        loops = [loop.until_stop(data if program.sized[depth] else Unsized(data))]
        if program.holds:
            self.held += loops
        for item in loops.pop():  # no variable refers to it otherwise, so that a break closes it
            self.see("item", depth, item)
            if self.leaves(depth, "before"):
                break
            self.work(depth)
            if program.asks is not None and program.asks[0] == depth and loop.should_stop():
                self.see("told", depth)
                if program.asks[1]:
                    break
            if self.leaves(depth, "after"):
                break
        self.see("left", depth)
        if program.reads == depth:
            loop.session.finish_epoch()
            self.see("read", depth)

    def work(self, depth: int) -> None:
        program = self.program
        if depth == len(program.lengths) - 1:
            for _ in range(program.runs):
                self.run()
            return
        try:
            self.go_through(depth + 1)
        except ValueError as error:
            if not program.catches[1]:
                raise
            self.note("caught", str(error))
        if program.second is not None and not depth:
            for item in self.loop.until_stop(range(program.second)):
                self.see("second", item)
        if program.run_after_inner:
            self.run_if_possible()

    def everything(self) -> None:
        self.go_through(0)
        if self.program.afterwards == "loop":
            self.go_through(0)
        elif self.program.afterwards == "ask":
            self.note("asked", self.loop.should_stop())
        elif self.program.afterwards == "run":
            self.run_if_possible()
            self.run_if_possible()


def brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


Make = Callable[[Program, list[Actor], Script], Loop]


def record(program: Program, make: Make) -> list[Event]:
    """Return what happens in ``program`` around the loop that ``make`` returns."""
    events: list[Event] = []

    def note(*event: object) -> None:
        events.append(event)

    script = Script(program, note)
    actors = [Actor(name, plan, note) for name, plan in zip("abc", program.hooks, strict=False)]
    try:
        script.loop = loop = make(program, actors, script)
        if program.is_with:
            with loop:
                script.everything()
        else:
            try:
                script.everything()
            finally:
                loop.close()
    except BaseException as error:
        every = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
        note("error", *("LifecycleError" if type(each) is LifecycleError else brief(each) for each in every))
    note("closed", loop.global_step, loop.stop_reason)
    script.held.clear()  # a generator that the garbage collector closes may do so in the middle of another program
    return events


# -- with torchhooks --------------------------------------------------------------------------------------------------


class Hook(SessionRunHook):
    def __init__(self, actor: Actor) -> None:
        self.actor, self.plan = actor, actor.plan
        if not self.plan.is_early:
            self.before_run = super().before_run  # type: ignore[method-assign]

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self.session = session
        self.actor.note(self.actor.name, "created", session.global_step)
        if self.plan.at_stop:
            session.at_stop(self, lambda: self.actor.call("at stop", session))

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self.actor.call("before", run_context.session, run_context)
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.actor.after(run_context)

    def next_due(self) -> Due | None:
        kind, period = self.plan.due
        if kind == "steps":
            return Due(step=(self.session.global_step // period + 1) * period)
        return {"always": None, "runs": Due(runs=period), "epochs": Due(epochs=period)}[kind]

    def end(self, session: Session) -> None:
        self.actor.note(self.actor.name, "end")

    def teardown(self) -> None:
        self.actor.note(self.actor.name, "teardown")


def with_torchhooks(folder: Path, program: Program, actors: list[Actor], script: Script) -> Loop:
    hooks = [Hook(actor) for actor in actors]
    return MonitoredLoop(
        None if program.in_body else script.step, hooks=hooks, checkpoint_dir=folder if program.can_recover else None
    )


# -- with the model ---------------------------------------------------------------------------------------------------


def read_table(text: str) -> dict[str, list[str]]:
    """Return the lines that are due at each boundary, in the order of the table in ``text``."""
    ruler = re.search(r"^=[= ]+$", text, re.MULTILINE)
    assert ruler is not None
    columns = [each.span() for each in re.finditer("=+", ruler[0])]
    head, _, *rows = ([row[start:end].strip() for start, end in columns] for row in text[ruler.end() + 1 :].split("\n"))
    rows = rows[: next(index for index, row in enumerate(rows) if row[0].startswith("="))]
    return {name: [row[1] for row in rows if row[column] == "x"] for column, name in enumerate(head)}


DUE_AT = read_table(boundaries.__doc__ or "")


@dataclass(eq=False)
class OpenLoop:
    """One until_stop of the model."""

    length: int | None
    runs_before: int
    taken: int = 0
    nests: bool = False  # so that it is no epoch

    @property
    def is_epoch(self) -> bool:
        return self.taken > 0 and not self.nests


class ItemCall(NamedTuple):
    """A call of one hook that waits for the end of the item at ``depth``."""

    depth: int
    callback: Callable[[], object]
    last: bool


class ModelContext:
    """The context of a run, or of the end of an epoch, in the model."""

    def __init__(self, model: Model) -> None:
        self.session = model
        self.is_void = self.has_asked = False

    def request_stop(self, reason: str | None = None) -> None:
        """Ask for a stop, which takes effect when the requests are taken up, unless the run has failed."""
        if not self.is_void and not self.has_asked:
            self.has_asked = True
            self.session.requests.append((self, f"Hook: {reason}"))

    def after_item(self, callback: Callable[[], object], last: bool = False) -> None:
        """Call ``callback`` at the end of the item; now, if there is none. The latest one of a hook counts."""
        model = self.session
        if model.loops:
            model.item_calls[model.caller] = ItemCall(len(model.loops), callback, last)
        else:
            callback()

    def when_ready(self, values: int, callback: Callable[[int], object]) -> None:
        callback(values)


class ModelBody:
    """A run whose step is the body of a ``with`` statement."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.model.refuse()
        while True:
            try:
                self.context = self.model.begin()
                return
            except BaseException as error:
                if not self.model.recovers(error):
                    raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            return self.model.recovers(error)
        try:
            self.model.finish(self.context)
        except BaseException as failure:  # the body cannot be made again
            if not self.model.recovers(failure):
                raise
        return False


class Model:
    """The loop, as the table and the documentation describe it."""

    def __init__(self, program: Program, actors: list[Actor], script: Script) -> None:
        self.actors, self.note, self.step_function = actors, script.note, script.step
        self.can_recover = program.can_recover
        self.runs = self.epochs_ended = 0
        self.loops: list[OpenLoop] = []
        self.ended_epoch: int | None = None  # an epoch for whose end the hooks were not called yet
        self.item_calls: dict[str, ItemCall] = {}
        self.saved: list[str] = []  # whose calls for the item were just made, and left nothing to do
        self.requests: list[tuple[ModelContext | None, str]] = []
        self.stop: str | None = None
        self.stopped_in_epoch: bool | None = None  # once a stop has a place, which is the end of all epochs
        self.context: ModelContext | None = None
        self.in_run = self.data_have_ended = False
        # How many have left the loop. The last one has a note, because to keep it would keep its frames.
        self.errors = 0
        self.has_to_save = False  # whether a stop has just got its place
        self.caller = ""
        self.collected: list[BaseException] | None = None  # the errors of the close, once that has begun
        self.create_session()

    def create_session(self) -> None:
        self.global_step = 0  # also that of the checkpoint
        self.item_calls.clear()
        for actor in self.actors:
            self.note(actor.name, "created", 0)
        self.next_call = {actor.name: self.planned(actor) for actor in self.actors}

    # -- the lines of the table, at any boundary at which one is due --

    def reach(self, boundary: str, loop: OpenLoop | None = None) -> None:
        """Do what is due at ``boundary``; ``loop`` is the one whose body asks for its next item."""
        self.saved = []
        lines: dict[str, Callable[..., object]] = {
            "inner loops left by break": self.close_inner,
            "hooks of the epoch": self.end_epoch,
            "calls of the item": self.end_item,
            "caught errors, stop requests": self.take_requests,
            "place of the stop": self.keep_place,
            "calls for the stop": self.save_at_stop,
        }
        for line in DUE_AT[boundary]:
            if line in lines:
                self.attempt(lines[line], loop)

    def attempt(self, function: Callable[..., object], *args: object) -> None:
        """Call ``function(*args)``. While the loop closes, each call is made though others fail."""
        try:
            function(*args)
        except BaseException as error:
            if self.collected is None:
                raise
            self.collected.append(error)

    def close_inner(self, loop: OpenLoop) -> None:
        for inner in self.loops[: self.loops.index(loop) : -1]:
            self.close_loop(inner)

    def end_epoch(self, loop: OpenLoop | None = None) -> None:
        ended, self.ended_epoch = self.ended_epoch, None
        if ended is not None:
            self.make(partial(self.call_for_epoch, ended))

    def end_item(self, loop: OpenLoop | None) -> None:
        depth = len(self.loops)
        if loop is None:  # the end of a run, or the close
            if not depth or self.collected is not None:
                self.call_for_item(0)
            return
        if loop.length == loop.taken and depth > 1 and self.stop is None:
            for name in self.due_in(depth):  # the code after the loop still belongs to the item of the outer loop
                self.item_calls[name] = self.item_calls[name]._replace(depth=depth - 1)
        self.make(partial(self.call_for_item, depth))

    def take_requests(self, loop: OpenLoop | None = None) -> None:
        if self.stop is None and self.requests:
            self.stop = self.requests[0][1]

    def keep_place(self, loop: OpenLoop | None) -> None:
        if self.stop is not None and self.loops and self.stopped_in_epoch is None:
            self.stopped_in_epoch = self.is_in_epoch
            self.has_to_save = True

    def save_at_stop(self, loop: OpenLoop | None) -> None:
        if self.has_to_save:
            self.has_to_save = False
            self.make(self.call_for_stop)

    # -- what these lines call --

    def make(self, calls: Callable[[], object]) -> None:
        """Make calls of hooks between two runs, which are never recovered from. StopIteration ends the loop cleanly."""
        try:
            calls()
        except BaseException as error:
            if self.collected is not None:
                raise
            self.leave(error)
            if self.in_run or type(error) is not StopIteration:
                raise
            self.stop = self.stop or brief(error)

    def call_for_epoch(self, number: int) -> None:
        due = [actor for actor in self.actors if actor.plan.due[0] == "epochs" and number % actor.plan.due[1] == 0]
        context = self.context = ModelContext(self)
        self.call_each(due, "before", context)
        self.call_each(due, "after", context)
        self.take_requests()

    def call_for_item(self, depth: int) -> None:
        for name in self.due_in(depth):
            self.attempt(self.make_item_call, name)

    def make_item_call(self, name: str) -> None:
        waiting, self.caller = self.item_calls.pop(name), name
        if waiting.callback() is not False:
            self.saved.append(name)

    def due_in(self, depth: int) -> list[str]:
        due = [name for name, waiting in self.item_calls.items() if waiting.depth >= depth]
        return sorted(due, key=lambda name: self.item_calls[name].last)

    def call_for_stop(self) -> None:
        for actor in self.actors:
            if actor.plan.at_stop and actor.name not in self.saved:
                self.item_calls.pop(actor.name, None)
                actor.call("at stop", self)

    def call_each(self, actors: Iterable[Actor], method: str, context: ModelContext) -> None:
        for actor in actors:
            self.caller = actor.name
            if method == "after":
                actor.after(context)
            elif actor.plan.is_early:
                actor.call("before", self, context)

    # -- a run --

    def planned(self, actor: Actor) -> float:
        """Return the global step, or the number of the run, from which on ``actor`` is called."""
        kind, period = actor.plan.due
        if kind == "steps":
            return (self.global_step // period + 1) * period
        return {"always": 0, "runs": self.runs + period, "epochs": math.inf}[kind]

    def due_now(self) -> list[Actor]:
        now = {"steps": self.global_step + 1, "runs": self.runs + 1}
        return [actor for actor in self.actors if now.get(actor.plan.due[0], 0) >= self.next_call[actor.name]]

    def begin(self) -> ModelContext:
        self.in_run = True
        self.end_epoch()  # one that was left by break, unless a boundary came before the run
        context = self.context = ModelContext(self)
        self.call_each(self.due_now(), "before", context)
        return context

    def finish(self, context: ModelContext) -> None:
        due = self.due_now()
        self.global_step += 1
        self.runs += 1
        for actor in due:
            self.call_each([actor], "after", context)
            self.next_call[actor.name] = self.planned(actor)
        self.take_requests()  # those of these calls: an error at the end of the run, below, does not drop them any more
        self.reach("run")
        self.in_run = False

    def recovers(self, error: BaseException) -> bool:
        """Return whether the loop recovers from ``error``, which has interrupted a run, or leaves it to the script."""
        self.in_run = False
        if self.is_last(error):
            return False  # of a call between two runs, which was made where this run began
        self.leave(error)
        if not isinstance(error, AbortedError) or not self.can_recover or self.stop is not None:
            return False
        self.create_session()
        return True

    def leave(self, error: BaseException) -> None:
        """Note that ``error`` leaves the loop. A stop that was requested in the run goes with it."""
        self.errors += 1
        error.add_note(f"error {self.errors}")
        if self.context is not None:
            self.context.is_void = True
            self.requests = [request for request in self.requests if request[0] is not self.context]

    def is_last(self, error: BaseException | None) -> bool:
        return error is not None and f"error {self.errors}" in getattr(error, "__notes__", ())

    def refuse(self) -> None:
        if self.stop is not None:
            raise LifecycleError

    # -- what the script calls --

    def run(self) -> None:
        self.refuse()
        while True:
            try:
                context = self.begin()
                self.step_function()
                self.finish(context)
                return
            except BaseException as error:
                if not self.recovers(error):
                    raise

    def step(self) -> ModelBody:
        return ModelBody(self)

    def until_stop(self, iterable: Iterable[int]) -> Generator[int, None, None]:
        self.reach("stop")  # the script notices a stop here too, before the loop begins
        if self.stop is not None:
            return
        if self.loops:
            self.loops[-1].nests = True
        loop = OpenLoop(len(iterable) if isinstance(iterable, range) else None, self.runs)
        self.loops.append(loop)
        try:
            self.reach("item", loop)
            if self.stop is None:
                for item in iterable:
                    loop.taken += 1
                    self.data_have_ended = False
                    yield item
                    self.reach("item", loop)
                    if self.stop is not None:
                        break
                else:
                    self.data_have_ended = len(self.loops) == 1
        finally:
            self.close_loop(loop)
        if self.stopped_in_epoch is None:
            self.reach("epoch")

    def close_loop(self, loop: OpenLoop) -> None:
        """Close a loop that is over, perhaps left by break. At a stop, its epoch goes on in another process."""
        if loop in self.loops:
            self.loops.remove(loop)
            if self.stopped_in_epoch is None and loop.is_epoch and self.runs > loop.runs_before:
                self.epochs_ended += 1
                self.ended_epoch = self.epochs_ended

    def should_stop(self) -> bool:
        self.reach("stop")
        return self.stop is not None

    def finish_epoch(self) -> None:
        self.reach("epoch")

    def request_stop(self, reason: str) -> None:
        self.requests.append((None, f"request_stop: {reason}"))
        if not self.in_run:
            self.take_requests()

    @property
    def session(self) -> Model:
        return self

    @property
    def is_in_epoch(self) -> bool:
        if self.stopped_in_epoch is not None:
            return self.stopped_in_epoch
        return bool(self.loops) and self.loops[-1].is_epoch

    @property
    def epoch(self) -> int | None:
        number = self.epochs_ended - (not self.is_in_epoch)
        return number if number >= 0 else None

    @property
    def batch(self) -> int | None:
        if not self.loops or self.loops[-1].nests or not self.loops[-1].taken:
            return None
        return self.loops[-1].taken - 1

    @property
    def stop_reason(self) -> str | None:
        return self.stop or ("data ended" if self.data_have_ended else None)

    # -- the end --

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if error is None:
            for loop in self.loops[::-1]:  # those that a variable holds
                self.close_loop(loop)
        self.end(error)
        return type(error) is StopIteration

    def close(self) -> None:
        error = sys.exception()
        self.end(error if self.is_last(error) else None)

    def end(self, error: BaseException | None) -> None:
        is_clean = error is None or type(error) is StopIteration
        self.stop = self.stop or (self.stop_reason or "closed" if error is None else brief(error))
        errors = self.collected = []
        if is_clean:
            self.reach("close")
        for actor in self.actors if is_clean else []:
            self.note(actor.name, "end")
        for actor in self.actors:
            self.note(actor.name, "teardown")
        if errors:
            raise errors[0] if len(errors) == 1 else BaseExceptionGroup("several", errors)


# -- the comparison ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of step 0."""
    folder = tmp_path_factory.mktemp("run")
    with MonitoredLoop(hooks=[CheckpointSaverHook(folder, save_steps=1)]):
        pass
    return folder


def difference(program: Program, real: list[Event], expected: list[Event]) -> str:
    """Return the program, and the first event that differs, after those before it."""
    same = next((n for n, pair in enumerate(zip(real, expected, strict=False)) if pair[0] != pair[1]), None)
    first = min(len(real), len(expected)) if same is None else same
    shown = [f"  {event}" for event in expected[:first]]
    return "\n".join(
        [pprint.pformat(program), *shown, f"expected: {expected[first:][:2]}", f"happened: {real[first:][:2]}"]
    )


KINDS = [
    *("created", "before", "after", "ready", "item", "at stop", "end", "teardown"),
    *("step", "ran", "left", "read", "told", "asked", "second", "caught", "error"),
]


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 3000), marks=pytest.mark.exhaustive)], ids=repr)
def test_a_random_program_makes_the_calls_that_the_table_says(
    seeds: range, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.CRITICAL, "torchhooks")  # a record keeps an error, and with it the frames that it left
    monkeypatch.setattr("torchhooks.lifecycle.recovery._FIRST_PAUSE_SECS", 0.0)  # of a second recovery in a row
    seen = set[object]()
    for seed in seeds:
        program = Program.drawn(seed)
        real, expected = record(program, partial(with_torchhooks, folder)), record(program, Model)
        assert real == expected, f"seed {seed}: {difference(program, real, expected)}"
        seen.update(part for event in real for part in event[:2])
    assert seen.issuperset(KINDS)


def test_the_table_of_the_documentation_is_the_same() -> None:
    text = (ROOT / "docs" / "lifecycle.md").read_text("utf-8").split("## Between two runs")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n") if line.startswith("| ")][1:]
    columns = ["run", "item", "epoch", "stop", "func", "close"]
    lines = re.findall(r"^\d+ +(\S.*?)  ", boundaries.__doc__ or "", re.MULTILINE)
    for line, (name, *marks) in zip(lines, rows, strict=True):
        assert name.startswith(line)
        assert [column for column, mark in zip(columns, marks, strict=True) if mark] == [
            column for column in columns if line in DUE_AT[column]
        ]
