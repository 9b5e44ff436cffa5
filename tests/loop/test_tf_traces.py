"""What TensorFlow's MonitoredSession and hooks did, recorded: the same is done here, and the same must come out.

``data/tf_traces/README.md`` explains the files. Every scenario is replayed in several ways, see ``WAYS``.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.paths import TRACES
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.util.tensor_util import make_ndarray

import torchhooks
from torchhooks import MonitoredLoop, Scaffold, Session, SessionRunHook, list_checkpoints
from torchhooks.common.trees import map_leaves
from torchhooks.testing import FakeClock, RecordingHook, log_lines, plain

DATA = TRACES

Scenario = dict[str, Any]
Calls = list[tuple[Any, ...]]
Loop = MonitoredLoop[torch.Tensor]


def load(file: str) -> list[Scenario]:
    scenarios: list[Scenario] = json.loads((DATA / file).read_text())
    return scenarios


SCENARIOS = load("loop.json") + load("random.json") + load("caught.json")
INVALID = load("invalid.json")
PROFILER = load("profiler.json")


# -- the model --------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """The variable ``w``, and something for an optimizer to hold."""

    w: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.zeros(()))
        self.held = torch.nn.Parameter(torch.zeros(()))


class Training:
    """The step of all scenarios: ``loss = x + y``, added to ``w``; the optimizer steps ``inc`` times."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.inc = 1
        self.fails = False

    def step(self, x: float, y: float = 0.0) -> torch.Tensor:
        if self.fails:
            raise ValueError("planned")
        loss = torch.tensor(x) + torch.tensor(y)
        self.model.w += loss
        for _ in range(self.inc):
            self.optimizer.step()
        return loss


# -- the hooks --------------------------------------------------------------------------------------------------------

ERRORS = {"exhausted": StopIteration, "error": ValueError, "aborted": torchhooks.AbortedError}
KINDS = {error.__name__: kind for kind, error in ERRORS.items()}


def twice(loss: torch.Tensor) -> torch.Tensor:
    return loss * 2


def recorder(calls: Calls, directory: str, name: str, fetch: Any = None, **told: Any) -> RecordingHook:
    fetches = None if fetch is None else map_leaves(lambda leaf: twice if leaf == "twice" else leaf, fetch)
    raises = {(fault["phase"], fault["run"]): ERRORS[fault["error"]] for fault in told.get("raise", ())}
    return RecordingHook(fetches, stop_at=told.get("stop_at"), raises=raises, name=name, calls=calls)


def logging_hook(calls: Calls, directory: str, formatter: bool = False, **kwargs: Any) -> SessionRunHook:
    def format_step(values: Mapping[str, Any]) -> str:
        return "step = " + ", ".join(f"{tag}:{value:.2f}" for tag, value in values.items())

    return torchhooks.LoggingTensorHook(**kwargs, formatter=format_step if formatter else None)


def feed_fn_hook(calls: Calls, directory: str, y: list[float]) -> SessionRunHook:
    values = iter(y)
    return torchhooks.FeedFnHook(lambda: {"y": next(values)})


class Listener(torchhooks.CheckpointSaverListener):
    """Writes down its calls."""

    def __init__(self, calls: Calls, name: str, stop_at_step: int | None = None) -> None:
        self.calls, self.name, self.stop_at_step = calls, name, stop_at_step

    def begin(self) -> None:
        self.calls.append((self.name, "begin"))

    def before_save(self, session: Session, step: int) -> None:
        self.calls.append((self.name, "before_save", step))

    def after_save(self, session: Session, step: int) -> bool | None:
        self.calls.append((self.name, "after_save", step))
        return None if self.stop_at_step is None else step >= self.stop_at_step

    def end(self, session: Session, step: int) -> None:
        self.calls.append((self.name, "end", step))


def saver_hook(calls: Calls, directory: str, listeners: Any = (), **kwargs: Any) -> SessionRunHook:
    watching = [Listener(calls, **listener) for listener in listeners]
    return torchhooks.CheckpointSaverHook(f"{directory}/ckpt", listeners=watching, **kwargs)


def writing(hook: Callable[..., SessionRunHook], **arguments: Any) -> Callable[..., SessionRunHook]:
    return lambda calls, directory, **kwargs: hook(output_dir=directory, **arguments, **kwargs)


def as_it_is(hook: Callable[..., SessionRunHook], *arguments: Any) -> Callable[..., SessionRunHook]:
    return lambda calls, directory, **kwargs: hook(*arguments, **kwargs)


HOOKS: dict[str, Callable[..., SessionRunHook]] = {
    "Recorder": recorder,
    "LoggingTensorHook": logging_hook,
    "FeedFnHook": feed_fn_hook,
    "StepCounterHook": writing(torchhooks.StepCounterHook),
    "SummarySaverHook": writing(torchhooks.SummarySaverHook, summary_op={"loss": "loss"}),
    "StopAtStepHook": as_it_is(torchhooks.StopAtStepHook),
    "NanTensorHook": as_it_is(torchhooks.NanTensorHook, "loss"),
    "GlobalStepWaiterHook": as_it_is(torchhooks.GlobalStepWaiterHook),
    "CheckpointSaverHook": saver_hook,
    "FinalOpsHook": as_it_is(torchhooks.FinalOpsHook, {"w": "w", "step": "global_step"}),
}


def make_hook(description: Mapping[str, Any], calls: Calls, directory: str) -> SessionRunHook:
    arguments = dict(description)
    return HOOKS[arguments.pop("type")](calls, directory, **arguments)


def only_watches(description: Mapping[str, Any]) -> bool:
    return description["type"] == "Recorder" and not {"stop_at", "raise"} & set(description)


# -- the replay -------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """How to replay a scenario.

    Args:
        step_unit: the loop's.
        calls_all: every hook is called in every run, due or not.
        unwatched: without the recorders that only watch, which are due in every run, so that there are idle runs.
        body: with ``loop.step()`` in place of ``loop.run()``.
    """

    step_unit: str
    calls_all: bool = False
    unwatched: bool = False
    body: bool = False

    def __str__(self) -> str:
        words = ["all-called" if self.calls_all else "idle-skipped"] + ["unwatched"] * self.unwatched
        words += ["body"] * self.body
        return "-".join([self.step_unit, *words])


WAYS = [
    Way(unit, calls_all, unwatched, body)
    for unit in ("run", "optimizer_step")
    for calls_all, unwatched, body in itertools.product((False, True), repeat=3)
    if not (calls_all and (unwatched or body))
]


def ways(scenario: Scenario) -> Iterator[Way]:
    several_steps = any("inc" in turn for turn in scenario["steps"])
    watched = any(map(only_watches, scenario["hooks"]))
    fed = any(hook["type"] == "FeedFnHook" for hook in scenario["hooks"])
    for way in WAYS:
        if (way.body and fed) or (way.step_unit == "run" and several_steps) or (way.unwatched and not watched):
            continue
        yield way


def start_at(step: int, scaffold: Scaffold, session: Session) -> None:
    session.global_step = step


def make_loop(scenario: Scenario, way: Way, training: Training, hooks: list[SessionRunHook], directory: str) -> Loop:
    init_fn = functools.partial(start_at, scenario["start_step"]) if "start_step" in scenario else None
    return MonitoredLoop(
        training.step,
        training.model,
        training.optimizer,
        hooks=hooks,
        scaffold=Scaffold(init_fn=init_fn),
        checkpoint_dir=f"{directory}/ckpt" if "restore" in scenario else None,
        recoverable_errors=(torchhooks.AbortedError,) if scenario.get("recover", True) else (),
        step_unit=way.step_unit,
    )


def run_body(loop: Loop, training: Training, x: float, y: float = 0.0) -> None:
    """Make a run with the step in a body, again after each recovery, as ``loop.run()`` does by itself."""
    session = None
    while session is not loop.session:
        with loop.step() as outputs:
            session = loop.session  # which the loop replaces when it recovers
            outputs["loss"] = training.step(x, y)


def drive(
    loop: Loop,
    way: Way,
    training: Training,
    scenario: Scenario,
    clock: FakeClock,
    runs: list[int],
    caught: list[list[Any]],
) -> None:
    run = functools.partial(run_body, loop, training) if way.body else loop.run
    for turn in scenario["steps"]:
        if loop.should_stop():
            break
        if "raise" in turn:
            raise ERRORS[turn["raise"]]
        clock.advance(turn["secs"])
        training.inc, training.fails = turn.get("inc", 1), turn.get("fail", False)
        try:
            run(float(turn["x"]), **({"y": turn["feed_y"]} if "feed_y" in turn else {}))
        except Exception as error:
            if type(error) is StopIteration or not scenario.get("catch", False):
                raise
            caught.append([type(error).__name__, loop.global_step, loop.should_stop()])
        else:
            runs.append(loop.global_step)


def replay(scenario: Scenario, way: Way, directory: str) -> dict[str, Any]:
    calls: Calls = []
    described = [hook for hook in scenario["hooks"] if not (way.unwatched and only_watches(hook))]
    hooks = [make_hook(description, calls, directory) for description in described]
    for hook in hooks if way.calls_all else ():
        hook.next_due = lambda: None  # type: ignore[method-assign]
    runs: list[int] = []
    stopped: list[bool] = []
    caught_errors: list[list[Any]] = []
    error: BaseException | None = None
    training = Training()
    with FakeClock() as clock, log_lines() as lines:
        try:
            with make_loop(scenario, way, training, hooks, directory) as loop:
                drive(loop, way, training, scenario, clock, runs, caught_errors)
                stopped.append(loop.should_stop())
        except Exception as caught:
            error = caught
    return {
        "runs": runs,
        "stopped": stopped,
        "error": error,
        "caught": caught_errors,
        "events": list(map(event, calls)),
        "log": values_and_rates(lines),
        "summaries": sorted(summaries(directory), key=json.dumps),
        "checkpoints": sorted(checkpoint.step for checkpoint in list_checkpoints(f"{directory}/ckpt")),
        "final": [comparable(hook.final_ops_values) for hook in hooks if isinstance(hook, torchhooks.FinalOpsHook)],
    }


# -- what came out, in the words of the traces ------------------------------------------------------------------------


def comparable(values: Any) -> Any:
    return map_leaves(lambda leaf: "nan" if isinstance(leaf, float) and math.isnan(leaf) else leaf, plain(values))


def event(call: tuple[Any, ...]) -> list[Any]:
    name, method, *details = call
    return [name, method, *([KINDS[details[0]]] if method == "raises" else comparable(details))]


def values_and_rates(lines: list[tuple[str, str]]) -> list[list[str]]:
    found = []
    for level, text in lines:
        if "the script caught" in text:
            continue  # ours, which quotes the error
        if level in ("WARNING", "ERROR") and re.search(r"\bnan\b", text, re.IGNORECASE):
            found.append([level, "<nan loss>"])
        elif re.match(r"global_step/sec: |[\w.:]+ = ", text):
            found.append([level, text])
    return found


def summaries(directory: str) -> Iterator[list[Any]]:
    for file in sorted(Path(directory).rglob("*.tfevents.*")):
        for record in EventFileLoader(str(file)).Load():
            yield from summary_rows(record)


def summary_rows(record: Event) -> Iterator[list[Any]]:
    if record.HasField("session_log"):
        yield ["session_log", SessionLog.SessionStatus.Name(record.session_log.status), record.step]
    for value in record.summary.value:
        yield ["scalar", value.tag, record.step, comparable(make_ndarray(value.tensor).item())]


def expected(scenario: Scenario, way: Way) -> dict[str, Any]:
    expect = scenario["expect"]
    passive = {hook["name"] for hook in scenario["hooks"] if only_watches(hook)}
    return {
        "runs": expect["runs"],
        "stopped": expect["stopped"],
        "error": expect["error"],
        "caught": expect.get("caught", []),
        "events": [event for event in expect["events"] if not (way.unwatched and event[0] in passive)],
        "log": expect["log"],
        "summaries": sorted(expect["summaries"], key=json.dumps),
        "checkpoints": expect["checkpoints"],
        "final": [expect["final"]] if "final" in expect else [],
    }


def without_extras(happened: dict[str, Any], scenario: Scenario) -> dict[str, Any]:
    """``happened`` without what we do on purpose and TensorFlow did not: teardown, and a START without a saver."""
    wanted = scenario["expect"]["error"]
    kinds = [kind.__name__ for kind in type(happened["error"]).__mro__]
    saver = any(hook["type"] == "SummarySaverHook" for hook in scenario["hooks"])
    return happened | {
        "error": None if happened["error"] is None else wanted if wanted in kinds else repr(happened["error"]),
        "events": [event for event in happened["events"] if event[1] != "teardown"],
        "summaries": [row for row in happened["summaries"] if saver or row[:2] != ["session_log", "START"]],
    }


def pairs(way: Way) -> set[Any]:
    """Return each two settings of ``way``."""
    return set(itertools.combinations(way._asdict().items(), 2))


def covering(ways: list[Way]) -> list[Way]:
    """Return a few of ``ways`` in which each two settings meet that meet in any of them."""
    chosen: list[Way] = []
    left = set().union(*map(pairs, ways))
    while left:
        chosen.append(max(ways, key=lambda way: len(left & pairs(way))))
        left -= pairs(chosen[-1])
    return chosen


def cases(number: int, scenario: Scenario) -> Iterator[Any]:
    """Return a scenario in a few ways, of which a plain pytest takes one, another one than for its neighbours."""
    covered = covering(list(ways(scenario)))
    for way_number, way in enumerate(covered):
        marks = [pytest.mark.exhaustive] if (number + way_number) % len(covered) else []
        yield pytest.param(scenario, way, marks=marks, id=f"{scenario['name']}-{way}")


CASES = list(itertools.chain.from_iterable(itertools.starmap(cases, enumerate(SCENARIOS))))


@pytest.mark.parametrize(("scenario", "way"), CASES)
def test_does_what_tensorflow_did(scenario: Scenario, way: Way, tmp_path: Path) -> None:
    happened = replay(scenario, way, str(tmp_path))
    assert without_extras(happened, scenario) == expected(scenario, way)


def constructor_arguments(case: Scenario) -> dict[str, Any]:
    arguments = {"tensors": ["loss"]} if case["hook"] == "LoggingTensorHook" else {}
    summary_op = {"summary_op": {"loss": "loss"}} if "summary_op" in case["kwargs"] else {}
    return {**arguments, **case["kwargs"], **summary_op}


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case["name"])
def test_constructors_refuse_what_tensorflow_refused(case: Scenario) -> None:
    error = None
    try:
        getattr(torchhooks, case["hook"])(**constructor_arguments(case))
    except Exception as caught:
        error = type(caught).__name__
    assert error == case["expect"]["error"]


@pytest.mark.parametrize("calls_all", [False, True], ids=["idle-skipped", "all-called"])
@pytest.mark.parametrize("scenario", PROFILER, ids=lambda scenario: scenario["name"])
def test_profiles_the_runs_that_tensorflow_profiled(scenario: Scenario, calls_all: bool, tmp_path: Path) -> None:
    hook = torchhooks.ProfilerHook(output_dir=tmp_path, **scenario["kwargs"])
    if calls_all:
        hook.next_due = lambda: None  # type: ignore[method-assign, assignment, return-value]
    training = Training()
    training.inc = scenario["inc"]
    with FakeClock() as clock, make_loop(scenario, Way("optimizer_step"), training, [hook], str(tmp_path)) as loop:
        for secs in scenario["secs"]:
            clock.advance(secs)
            loop.run(0.0)
    timelines = [int(path.stem.removeprefix("timeline-")) for path in tmp_path.iterdir()]
    assert sorted(timelines) == scenario["timelines"]


def test_all_scenarios_are_there() -> None:
    files = [path.name for path in DATA.glob("*.json") if path.name != "errors_on_purpose.json"]
    counts = {name: len(load(name)) for name in files}
    assert counts == {
        "loop.json": 79,
        "random.json": 80,
        "caught.json": 56,
        "invalid.json": 20,
        "timer.json": 20,
        "profiler.json": 30,
    }
