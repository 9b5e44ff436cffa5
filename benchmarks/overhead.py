"""Measure the overhead of the loop, compared with the smallest possible wrapper and with the same work done by hand.

    python benchmarks/overhead.py [--check]

Each candidate runs around an empty step, timed from outside, and around two steps that measure the time between them
from inside: a small real step, and a step that makes the caches cold by writing 4 MB. Figures are microseconds per run
beyond the bare ``for`` loop of the same round.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torchhooks import (
    GlobalStepWaiterHook,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    SummaryWriterCache,
)

from common import (
    Budget,
    Rounds,
    Stamped,
    Training,
    beyond,
    describe,
    empty,
    evicting,
    finish,
    machine,
    median_ratio,
    mlp,
    parser,
    repeat,
    table,
    take_turns,
    us_per_run,
)

Drive = Callable[[int], object]
Step = Callable[[Tensor], Tensor]

FAR = 10**9
"""A number of runs or seconds that no benchmark reaches."""

BARE = "bare for loop"
WRAPPER = "smallest wrapper"
IDLE = {number: f"{number} standard hooks, none due" for number in (0, 5, 50)}
TIMED = {
    (number, when): f"{number} hooks with a period in seconds, checked {when} the step, none due"
    for when in ("before", "after", "before and after")
    for number in (5, 50)
}
COLD = "cold caches"
UNTIL_STOP = "in until_stop, 5 standard hooks, none due"
NESTED = "in until_stop in until_stop, 100 items each, 5 standard hooks, none due"
BODY = {number: f"loop.step(), {number} standard hooks, none due" for number in (0, 5, 50)}
BODY_USER = "loop.step(), a user's hook, called in every run"
BODY_NAN = "loop.step(), NaN check in every run, NanTensorHook"
NO_RUN_METHODS = "50 hooks without a run method"
CALLS = "the two calls of a user's hook, by hand"
USER = "a user's hook, called in every run"
USER_AND_50 = "the same with 50 standard hooks, none due"
NAN_BY_HAND = "NaN check in every run, by hand"
NAN = "NaN check in every run, NanTensorHook"
DUE_BY_HAND = "by hand"
DUE = "StepCounter, SummarySaver and Logging hooks, all due"


class SmallestWrapper:
    """The least that any object around a step has to do."""

    def __init__(self, f: Step) -> None:
        self.f = f
        self.n = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step and count it."""
        out = self.f(*args, **kwargs)
        self.n += 1
        return out


class UsersHook(SessionRunHook):
    """A hook that is called before and after every run and does nothing."""

    def before_run(self, run_context: Any) -> None:
        pass

    def after_run(self, run_context: Any, run_values: Any) -> None:
        pass


class OnlyEnds(SessionRunHook):
    """A hook that is never called in runs."""

    def end(self, session: Any) -> None:
        pass


def standard_hooks(number: int, folder: Path) -> list[SessionRunHook]:
    """Return hooks that are due in the first run and never again in this benchmark."""
    kinds: list[Callable[[], SessionRunHook]] = [
        lambda: StepCounterHook(FAR),
        lambda: StopAtStepHook(last_step=FAR),
        lambda: SummarySaverHook(FAR, output_dir=folder, summary_op={"loss": "loss"}),
        lambda: LoggingTensorHook(["loss"], every_n_iter=FAR),
        lambda: GlobalStepWaiterHook(0),
    ]
    return [make() for make in islice(cycle(kinds), number)]


def timed_hooks(number: int, when: str, folder: Path) -> list[SessionRunHook]:
    """Return hooks like :func:`standard_hooks`, with periods in seconds that end before the step, after it, or both."""
    before: list[Callable[[], SessionRunHook]] = [
        lambda: SummarySaverHook(save_secs=FAR, output_dir=folder, summary_op={"loss": "loss"}),
        lambda: LoggingTensorHook(["loss"], every_n_secs=FAR),
    ]
    after: list[Callable[[], SessionRunHook]] = [lambda: StepCounterHook(None, every_n_secs=FAR)]
    kinds = {"before": before, "after": after, "before and after": [*before, *after]}[when]
    return [make() for make in islice(cycle(kinds), number)]


def due_hooks(folder: Path) -> list[SessionRunHook]:
    """Return hooks that together write two log lines and two events in every run."""
    return [
        StepCounterHook(1, output_dir=folder),
        SummarySaverHook(1, output_dir=folder, summary_op={"loss": "loss"}),
        LoggingTensorHook(["loss", "global_step"], every_n_iter=1),
    ]


# -- the candidates -------------------------------------------------------------------------------------------------


def with_calls(hook: SessionRunHook, step: Step, batch: Tensor) -> Drive:
    """Call the two methods of a hook around the step, without a loop."""
    before_run, after_run = hook.before_run, hook.after_run
    context: Any = None
    values: Any = None

    def drive(runs: int) -> None:
        for _ in range(runs):
            before_run(context)
            step(batch)
            after_run(context, values)

    return drive


def with_nan_check(step: Step, batch: Tensor) -> Drive:
    """Check for NaN as it is usually written by hand."""

    def drive(runs: int) -> None:
        for _ in range(runs):
            loss = step(batch)
            if torch.isnan(loss):
                raise FloatingPointError

    return drive


def by_hand(step: Step, batch: Tensor, writer: SummaryWriter, log: logging.Logger) -> Drive:
    """Write the log lines and events of :func:`due_hooks` by hand."""
    number, last = 0, 0.0

    def drive(runs: int) -> None:
        nonlocal number, last
        for _ in range(runs):
            loss = step(batch).item()
            number += 1
            now = time.monotonic()
            secs, last = now - last, now
            writer.add_scalar("loss", loss, number)
            if number > 1:
                writer.add_scalar("global_step/sec", 1 / secs, number)
                log.info("global_step/sec: %g", 1 / secs)
                log.info("loss = %s, global_step = %s (%.3f sec)", loss, number, secs)
        writer.flush()

    return drive


def due(loop: MonitoredLoop[Tensor], batch: Tensor, writer: SummaryWriter) -> Drive:
    """Run the loop with :func:`due_hooks`. As in :func:`by_hand`, a round includes flushing the writer."""
    drive = repeat(loop.run, batch)

    def drive_and_flush(runs: int) -> None:
        drive(runs)
        writer.flush()

    return drive_and_flush


def with_body(loop: MonitoredLoop[Any], step: Step, batch: Tensor) -> Drive:
    """Make the step in the body of ``loop.step()``."""

    def drive(runs: int) -> None:
        for _ in range(runs):
            with loop.step() as outputs:
                outputs["loss"] = step(batch)

    return drive


def over_items(loop: MonitoredLoop[Any], batch: Tensor) -> Drive:
    """Run over the items of ``until_stop``."""

    def drive(runs: int) -> None:
        for item in loop.until_stop([batch] * runs):
            loop.run(item)

    return drive


def over_epochs(loop: MonitoredLoop[Any], batch: Tensor) -> Drive:
    """Run over the items of an ``until_stop`` in another one."""

    def drive(runs: int) -> None:
        for _ in loop.until_stop(range(max(runs // 100, 1))):
            for item in loop.until_stop([batch] * min(runs, 100)):
                loop.run(item)

    return drive


def idle_candidates(training: Training, folder: Path, stack: ExitStack) -> dict[str, Drive]:
    """Return the candidates for runs in which there is nothing to report."""
    step, batch = training.step, training.batch

    def new(hooks: Sequence[SessionRunHook]) -> MonitoredLoop[Tensor]:
        return stack.enter_context(MonitoredLoop(step, training.model, training.optimizer, hooks=hooks))

    def loop(hooks: Sequence[SessionRunHook]) -> Drive:
        return repeat(new(hooks).run, batch)

    def body(hooks: Sequence[SessionRunHook]) -> Drive:
        loop: MonitoredLoop[Any] = MonitoredLoop(model=training.model, optimizer=training.optimizer, hooks=hooks)
        return with_body(stack.enter_context(loop), step, batch)

    return {
        BARE: repeat(step, batch),
        WRAPPER: repeat(SmallestWrapper(step).run, batch),
        **{name: loop(standard_hooks(number, folder)) for number, name in IDLE.items()},
        **{name: loop(timed_hooks(number, when, folder)) for (number, when), name in TIMED.items()},
        UNTIL_STOP: over_items(new(standard_hooks(5, folder)), batch),
        NESTED: over_epochs(new(standard_hooks(5, folder)), batch),
        NO_RUN_METHODS: loop([OnlyEnds() for _ in range(50)]),
        CALLS: with_calls(UsersHook(), step, batch),
        USER: loop([UsersHook()]),
        USER_AND_50: loop([UsersHook(), *standard_hooks(50, folder)]),
        NAN_BY_HAND: with_nan_check(step, batch),
        NAN: loop([NanTensorHook("loss")]),
        **{name: body(standard_hooks(number, folder)) for number, name in BODY.items()},
        BODY_USER: body([UsersHook()]),
        BODY_NAN: body([NanTensorHook("loss")]),
    }


def due_candidates(training: Training, folder: Path, stack: ExitStack) -> dict[str, Drive]:
    """Return the candidates for runs that write two log lines and two events, to ``folder/due`` and ``folder/hand``."""
    step, batch = training.step, training.batch
    hooks = due_hooks(folder / "due")
    loop = stack.enter_context(MonitoredLoop(step, training.model, training.optimizer, hooks=hooks))
    writer = stack.enter_context(SummaryWriter(str(folder / "hand")))
    return {
        BARE: repeat(step, batch),
        DUE_BY_HAND: by_hand(step, batch, writer, logging.getLogger("by_hand")),
        DUE: due(loop, batch, SummaryWriterCache.get(folder / "due")),
    }


# -- measuring ------------------------------------------------------------------------------------------------------


def log_to(folder: Path, stack: ExitStack) -> None:
    """Send the log lines of the hooks and those written by hand to files, in the same way."""
    for name, file in (("torchhooks", "due.log"), ("by_hand", "hand.log")):
        handler = logging.FileHandler(folder / file)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log = logging.getLogger(name)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
        stack.callback(handler.close)
        stack.callback(log.removeHandler, handler)


def timed(candidates: dict[str, Drive], runs: int, rounds: int) -> Rounds:
    """Measure microseconds per run, including the step."""
    return take_turns({name: partial(us_per_run, drive, runs) for name, drive in candidates.items()}, rounds)


def timed_from_inside(candidates: dict[str, Drive], step: Stamped, runs: int, rounds: int) -> Rounds:
    """Measure microseconds between two steps; the figure of a round is the median of its runs."""

    def around(drive: Drive) -> float:
        step.reset()
        drive(runs)
        return median(step.gaps) / 1e3

    return take_turns({name: partial(around, drive) for name, drive in candidates.items()}, rounds)


Candidates = Callable[[Training, Path, ExitStack], dict[str, Drive]]


def measure(make: Candidates, runs: int, rounds: int) -> dict[str, Rounds]:
    """Measure the candidates around each step: the empty one and, with a twentieth of the runs, the others."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        log_to(folder, stack)
        around_empty = timed(make(empty(), folder, stack), runs, rounds)
        stack.pop_all().close()
        if make is due_candidates:
            check_same(folder)
    figures = {"empty step": around_empty}
    for title, training in (("real step", mlp()), (COLD, evicting())):
        with TemporaryDirectory() as name, ExitStack() as stack:
            log_to(Path(name), stack)
            step = Stamped(training.step)
            candidates = make(training._replace(step=step), Path(name), stack)
            figures[title] = timed_from_inside(candidates, step, max(runs // 20, 20), rounds)
    return figures


def check_same(folder: Path) -> None:
    """Raise if the hooks and the loop by hand did not write the same, apart from numbers that are times."""

    def written(name: str) -> tuple[Counter[str], dict[str, int]]:
        text = (folder / f"{name}.log").read_text(encoding="utf-8")
        lines = re.sub(r"(sec: |\()[\d.e+]+", r"\1", text).splitlines()
        events = EventAccumulator(str(folder / name), {"scalars": 0}).Reload()
        return Counter(lines), {tag: len(events.Scalars(tag)) for tag in events.Tags()["scalars"]}

    ours, hand = written("due"), written("hand")
    # In the first run LoggingTensorHook logs a line without seconds. The loop by hand does not imitate that.
    ours[0].subtract(["loss = 0.125, global_step = 1"])
    if (+ours[0], ours[1]) != hand:
        raise AssertionError(f"the hooks wrote {ours}, the loop by hand wrote {hand}")


# -- reporting ------------------------------------------------------------------------------------------------------


def shown(title: str, figures: dict[str, Rounds]) -> str:
    """Return the minimum and median of the rounds around each step, with a table of its own for cold caches."""
    cold = {COLD: figures[COLD]}
    warm = {step: rounds for step, rounds in figures.items() if step != COLD}
    return f"{_table(title, warm)}\n\n{_table(title, cold)}"


def _table(title: str, figures: dict[str, Rounds]) -> str:
    header = [f"us per run beyond the bare loop, {title}"]
    rows: dict[str, list[str | float | None]] = {}
    for step, rounds in figures.items():
        header += [f"{step}: min", "median"]
        for name in rounds:
            of_name = rounds[BARE] if name == BARE else beyond(rounds, name, BARE)
            rows.setdefault(name, [f"{BARE}, in total" if name == BARE else name]).extend(
                (min(of_name), median(of_name))
            )
    return table(header, rows.values())


def budgets(idle: Rounds, due: Rounds) -> list[Budget]:
    """Return the budgets on a CPU, for the empty step."""
    wrapper = beyond(idle, WRAPPER, BARE)
    loops = {number: beyond(idle, name, BARE) for number, name in IDLE.items()}
    medians = [median(loop) for loop in loops.values()]
    calls = median(beyond(idle, USER, CALLS))
    by_hand = median_ratio(beyond(due, DUE, BARE), beyond(due, DUE_BY_HAND, BARE))
    return [
        *(
            Budget(
                f"idle run with {number} standard hooks, relative to the smallest wrapper",
                median_ratio(loop, wrapper),
                3,
                "x",
            )
            for number, loop in loops.items()
        ),
        Budget("slowest of these relative to the fastest", max(medians) / min(medians), 1.1, "x"),
        *(
            Budget(
                f"idle run of loop.step() with {number} standard hooks, relative to the smallest wrapper",
                median_ratio(beyond(idle, name, BARE), wrapper),
                6,
                "x",
            )
            for number, name in BODY.items()
        ),
        *(
            Budget(
                f"{name}, relative to the smallest wrapper", median_ratio(beyond(idle, name, BARE), wrapper), 2.5, "x"
            )
            for name in TIMED.values()
        ),
        Budget(
            "user's hook with both run methods, beyond its two calls, relative to the smallest wrapper",
            calls / median(wrapper),
            9,
            "x",
        ),
        Budget("due run, relative to the same lines and events by hand", by_hand, 1.2, "x"),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=10_000, help="runs per round and candidate (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=30, help="number of rounds (default: %(default)s)")
    chosen = options.parse_args()
    where = machine()
    torch.set_num_threads(1)
    print(describe(where), end="\n\n")
    idle = measure(idle_candidates, chosen.runs, chosen.rounds)
    print(shown("nothing to report", idle), end="\n\n")
    due = measure(due_candidates, max(chosen.runs // 50, 20), chosen.rounds)
    print(shown("two log lines and two events", due), end="\n\n")
    figures = {
        f"{title}, {step}": rounds for title, steps in (("idle", idle), ("due", due)) for step, rounds in steps.items()
    }
    finish(
        chosen.results,
        "overhead",
        check=chosen.check,
        budgets=budgets(idle["empty step"], due["empty step"]),
        machine=where,
        us=figures,
    )


if __name__ == "__main__":
    main()
