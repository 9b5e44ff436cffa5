"""The order of what happens between two runs: a test for each line of the table of ``loop/boundaries.py``."""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import logging
import os
import re
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from support.devices import FakeDevice

from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    Coordinator,
    Due,
    LifecycleError,
    LoggingTensorHook,
    MonitoredLoop,
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepContext,
)
from torchhooks.loop import boundaries
from torchhooks.loop.boundaries import Boundaries
from torchhooks.progress.loop_state import Stop, StoppedBy

Loop = MonitoredLoop[Any]


def one() -> torch.Tensor:
    return torch.tensor(1.0)


class Doing(SessionRunHook):
    """Calls ``after_run(context)`` after each run, and notes the sessions, and the coordinator of the last one."""

    def __init__(self, after_run: Callable[[SessionRunContext], object] = lambda context: None) -> None:
        self._after_run = after_run
        self.contexts: list[SessionRunContext] = []
        self.sessions: list[Session] = []

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self.sessions.append(session)
        self.coord = coord

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.contexts.append(run_context)
        self._after_run(run_context)


class OfEpochs(SessionRunHook):
    """Calls ``at_end(context)`` at the end of each epoch."""

    def __init__(self, at_end: Callable[[SessionRunContext], object]) -> None:
        self._at_end = at_end

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._at_end(run_context)

    def next_due(self) -> Due:
        return Due(epochs=1)


class OfSignal(SessionRunHook):
    """Notes in ``events`` that another process has asked for it."""

    due_signals = ("SIGUSR1",)

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def force_due(self) -> None:
        self._events.append("trigger")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        pass

    def next_due(self) -> Due:
        return Due(signal="SIGUSR1")


class AtStop(SessionRunHook):
    """Calls ``at_stop()`` where a stop is noticed."""

    def __init__(self, at_stop: Callable[[], object]) -> None:
        self._at_stop = at_stop

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        session.at_stop(self, self._at_stop)


class OtherRanks:
    """Stands for other ranks in a ``with`` block: notes in ``events`` where the boundaries of ``loop`` meet them."""

    def __init__(self, loop: Loop, events: list[Any]) -> None:
        self._loop, self._events = loop, events
        self._parts: Any = vars(vars(loop)["_boundaries"])  # the rest of the loop knows nothing of these ranks
        self.has_parted = False
        self.on_meeting: Callable[[], object] = lambda: None
        self.parting: Exception | None = None

    def __enter__(self) -> Self:
        self._parts["_rank_sync"] = self
        return self

    def __exit__(self, *_: object) -> None:
        self._parts["_rank_sync"] = None

    def stop(self) -> None:
        """Decide on a stop, as the ranks do at a meeting."""
        self._loop._training.loop_state.decide(Stop("asked", StoppedBy.HOOK))  # noqa: SLF001 - no other rank is there to do it

    def end_run(self) -> None:
        self._events.append(("agreement", self._loop.stop_reason))

    def check(self) -> None:
        self._events.append(("agreement", self._loop.stop_reason))

    def next_item(self) -> None:
        self._events.append("meeting")
        self.on_meeting()

    def raise_parting(self) -> None:
        if self.parting is not None:
            raise self.parting

    def is_same_everywhere(self, place: object) -> bool:
        self._events.append("parting")
        return True

    def loops_are_over(self, left: str) -> None:
        pass

    @contextlib.contextmanager
    def calls_between_runs(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def catching_logs() -> Iterator[list[str]]:
    """Collect what is logged. A fixture would not do: a test here is called several times in one."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchhooks").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("torchhooks").removeHandler(handler)


def saver(folder: Path) -> CheckpointSaverHook:
    return CheckpointSaverHook(folder, save_steps=1)


# -- at the end of a run ----------------------------------------------------------------------------------------------


def what_is_pending_is_cleared_first_so_that_a_check_may_ask_for_another_look(folder: Path) -> None:
    def two_runs_in_an_item(loop: Loop) -> None:
        for _ in loop.until_stop(range(2)):
            loop.run()
            loop.run()  # only this one, in which no hook is due, shows that the item has several

    with (
        pytest.raises(LifecycleError, match="several runs"),
        MonitoredLoop(one, hooks=[LoggingTensorHook(["loss"], every_n_epochs=1)]) as loop,
    ):
        two_runs_in_an_item(loop)
    assert loop.global_step == 2


def the_checks_of_the_first_runs_come_before_the_values(folder: Path) -> None:
    def fail(value: object) -> None:
        raise ValueError("of a callback")

    def after_run(context: SessionRunContext) -> None:
        if context.session.global_step == 2:
            context.when_ready(one(), fail, max_lag_runs=0)

    def outside_of_until_stop(loop: Loop) -> None:
        loop.run()
        loop.run()

    hooks = [LoggingTensorHook(["loss"], every_n_epochs=1), Doing(after_run)]
    with FakeDevice(), pytest.raises(LifecycleError, match="outside of every until_stop"):  # noqa: SIM117
        with MonitoredLoop(one, hooks=hooks) as loop:
            outside_of_until_stop(loop)


def a_callback_may_ask_for_a_stop_after_this_very_run(folder: Path) -> None:
    def after_run(context: SessionRunContext) -> None:
        context.when_ready(one(), lambda value: context.request_stop("of a value"), max_lag_runs=0)

    with FakeDevice(), MonitoredLoop(one, hooks=[Doing(after_run)]) as loop:
        loop.run()
        assert loop.stop_reason == "Doing: of a value"


def values_come_before_triggers(folder: Path) -> None:
    events: list[Any] = []

    def step() -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGUSR1)
        return one()

    def after_run(context: SessionRunContext) -> None:
        context.when_ready(one(), lambda value: events.append("value"), max_lag_runs=0)

    with FakeDevice(), MonitoredLoop(step, hooks=[Doing(after_run), OfSignal(events)]) as loop:
        loop.run()
        assert events == ["value", "trigger"]


def triggers_come_before_the_calls_of_an_item_that_was_left(folder: Path) -> None:
    events: list[Any] = []

    def step() -> torch.Tensor:
        if loop.global_step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return one()

    def after_run(context: SessionRunContext) -> None:
        if context.session.global_step == 1:
            context.after_item(lambda: events.append("item"))

    with MonitoredLoop(step, hooks=[Doing(after_run), OfSignal(events)]) as loop:
        for _ in loop.until_stop(range(2)):
            loop.run()
            break
        loop.run()
        assert events == ["trigger", "item"]


def a_call_of_an_item_that_was_left_may_ask_for_a_stop_after_this_very_run(folder: Path) -> None:
    def after_run(context: SessionRunContext) -> None:
        if context.session.global_step == 1:
            context.after_item(lambda: context.request_stop("of an item"))

    with MonitoredLoop(one, hooks=[Doing(after_run)]) as loop:
        for _ in loop.until_stop(range(2)):
            loop.run()
            break
        assert loop.stop_reason is None
        loop.run()
        assert loop.stop_reason == "Doing: of an item"


def requests_to_stop_come_before_the_agreement_of_the_ranks(folder: Path) -> None:
    events: list[Any] = []

    def after_run(context: SessionRunContext) -> None:
        context.when_ready(one(), lambda value: context.request_stop("of a value"), max_lag_runs=0)

    with FakeDevice(), MonitoredLoop(one, hooks=[Doing(after_run)]) as loop, OtherRanks(loop, events):
        loop.run()
    assert events == [("agreement", "Doing: of a value")]


def an_error_that_was_caught_is_told_at_the_end_of_the_next_run(folder: Path) -> None:
    def step(fails: bool) -> torch.Tensor:
        if fails:
            raise ValueError("bad batch")
        return one()

    with catching_logs() as lines, MonitoredLoop(step, hooks=[]) as loop:
        with contextlib.suppress(ValueError):
            loop.run(True)
        assert not lines  # as far as the loop knows, the error may be on its way
        loop.run(False)
        assert "the script caught the error" in lines[0]


def a_run_is_over_before_the_errors_of_threads(folder: Path) -> None:
    hook = Doing(lambda context: hook.coord.request_stop(AbortedError()) if len(hook.contexts) == 1 else None)
    with MonitoredLoop(one, hooks=[saver(folder), hook], checkpoint_dir=folder) as loop:
        loop.run()
        assert [loop.session] == hook.sessions[1:]  # recovered at once, and not in the next run
        loop.run()


def an_error_of_the_end_of_a_run_is_one_of_the_run_and_one_after_it_is_not(folder: Path) -> None:
    made = []

    def step() -> torch.Tensor:
        made.append(loop.global_step)
        return one()

    def after_run(context: SessionRunContext) -> None:
        if made == [0]:
            context.when_ready(one(), fail, max_lag_runs=0)

    def fail(value: object) -> None:
        raise AbortedError

    with FakeDevice(), MonitoredLoop(step, hooks=[saver(folder), Doing(after_run)], checkpoint_dir=folder) as loop:
        loop.run()
    assert made == [0, loop.global_step - 1]


# -- where the body asks for its next item ----------------------------------------------------------------------------


def inner_loops_left_by_break_come_before_the_hooks_of_the_epoch(folder: Path) -> None:
    events: list[Any] = []
    with MonitoredLoop(one, hooks=[OfEpochs(lambda context: events.append("epoch"))]) as loop:
        held = []  # so that Python does not close the generator at the break
        for epoch in loop.until_stop(range(2)):
            events.append(epoch)
            held.append(loop.until_stop(range(3)))
            for _ in held[-1]:
                loop.run()
                break
    assert events == [0, "epoch", 1, "epoch"]


def hooks_of_the_epoch_come_before_the_calls_of_the_item(folder: Path) -> None:
    events: list[Any] = []
    hooks = [
        Doing(lambda context: context.after_item(lambda: events.append("item"))),
        OfEpochs(lambda context: events.append("epoch")),
    ]
    with MonitoredLoop(one, hooks=hooks) as loop:
        for _ in loop.until_stop(range(2)):
            for _ in loop.until_stop(range(3)):
                loop.run()
                break
    assert events == ["epoch", "item"] * 2


def the_item_is_done_for_a_checkpoint_that_one_of_its_calls_saves(folder: Path) -> None:
    states: list[str] = []

    def note() -> None:
        position = loop.session.position
        assert position is not None
        saved = position.state_dict()
        assert saved is not None
        states.append(saved["path"][-1]["state"])

    with MonitoredLoop(one, hooks=[Doing(lambda context: context.after_item(note))]) as loop:
        for _ in loop.until_stop(range(2)):
            loop.run()
            loop.run()  # without these calls, the item would count as one in progress
            loop.session.finish_epoch()
    assert states == ["between items"] * 2


def calls_of_the_item_come_before_the_meeting_of_the_ranks(folder: Path) -> None:
    events: list[Any] = []
    hook = Doing(lambda context: context.after_item(lambda: events.append("item")))
    with MonitoredLoop(one, hooks=[hook]) as loop, OtherRanks(loop, events):
        for _ in loop.until_stop(range(2)):
            for _ in loop.until_stop(range(1)):
                loop.run()
                break
    assert [event for event in events if isinstance(event, str)] == ["item", "meeting", "item"]


def the_meeting_of_the_ranks_comes_before_the_stop_that_it_decides(folder: Path) -> None:
    events: list[Any] = []
    hook = AtStop(lambda: events.append("stop"))
    with MonitoredLoop(one, hooks=[hook]) as loop, OtherRanks(loop, events) as ranks:
        ranks.on_meeting = ranks.stop
        for _ in loop.until_stop(range(3)):
            for _ in loop.until_stop(range(1)):
                loop.run()
    assert [event for event in events if isinstance(event, str)] == ["meeting", "stop"]


def a_stop_saves_only_what_the_calls_of_the_item_have_not_saved_just_now(folder: Path) -> None:
    events: list[Any] = []

    class Saving(SessionRunHook):
        def __init__(self, name: str, saves: bool) -> None:
            self._name, self._saves = name, saves

        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            session.at_stop(self, lambda: events.append((self._name, "stop")))

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            run_context.after_item(self._call)
            run_context.request_stop()

        def _call(self) -> bool:
            events.append((self._name, "item"))
            return self._saves

    with MonitoredLoop(one, hooks=[Saving("a", True), Saving("b", False)]) as loop:
        for _ in loop.until_stop(range(3)):
            loop.run()
    assert events == [("a", "item"), ("b", "item"), ("b", "stop")]


def the_calls_for_a_stop_come_after_its_place_which_they_save(folder: Path) -> None:
    places: list[Any] = []

    def note() -> None:
        position = loop.session.position
        assert position is not None
        places.append(position.is_at_stop and position.place_of_stop[0][1:])

    with MonitoredLoop(one, hooks=[AtStop(note)]) as loop:
        for item in loop.until_stop(range(3)):
            loop.run()
            if item == 1:
                loop.request_stop()
    assert [(taken, state.value) for taken, state in places] == [(2, "between items")]


def the_ranks_part_after_the_calls_for_the_stop(folder: Path) -> None:
    events: list[Any] = []
    loop: Loop = MonitoredLoop(one, hooks=[AtStop(lambda: events.append("stop"))])

    def train(ranks: OtherRanks) -> None:
        for _ in loop.until_stop(range(3)):
            loop.run()
            ranks.parting, ranks.has_parted = ConnectionError("rank 1 left"), True
            loop.request_stop()

    with OtherRanks(loop, events) as ranks, pytest.raises(ConnectionError):
        train(ranks)
    assert [event for event in events if isinstance(event, str)] == ["parting", "stop"]
    loop.close()


# -- where the script asks whether to stop ----------------------------------------------------------------------------


def hooks_of_the_epoch_may_ask_for_the_stop_that_the_script_asks_about(folder: Path) -> None:
    with MonitoredLoop(one, hooks=[OfEpochs(lambda context: context.request_stop("of an epoch"))]) as loop:
        for _ in loop.until_stop(range(3)):
            loop.run()
            break
        assert loop.should_stop()


def the_calls_for_a_stop_come_before_the_answer_that_there_is_one(folder: Path) -> None:
    events: list[Any] = []
    with MonitoredLoop(one, hooks=[AtStop(lambda: events.append("stop"))]) as loop:
        for _ in loop.until_stop(range(3)):
            loop.run()
            loop.request_stop()
            events.append(loop.should_stop())
    assert events == ["stop", True]


def an_epoch_is_taken_before_its_hooks_which_may_come_back(folder: Path) -> None:
    ends = []

    def at_end(context: SessionRunContext) -> None:
        ends.append(context.session.global_step)
        context.session.finish_epoch()

    with MonitoredLoop(one, hooks=[OfEpochs(at_end)]) as loop:
        for _ in loop.until_stop(range(3)):
            loop.run()
            break
        loop.session.finish_epoch()
    assert ends == [1]


def requests_to_stop_come_before_the_check_of_the_ranks(folder: Path) -> None:
    events: list[Any] = []
    hook = Doing()
    with MonitoredLoop(one, hooks=[hook]) as loop:
        loop.run()
        with OtherRanks(loop, events):
            hook.contexts[-1].request_stop("late")
            assert loop.should_stop()
    assert events == [("agreement", "Doing: late")]


def the_check_of_the_ranks_comes_before_the_errors_of_threads(folder: Path) -> None:
    events: list[Any] = []

    class Created(SessionRunHook):
        def after_create_session(self, session: Session, coord: Coordinator) -> None:
            events.append("session")

    hook = Doing()
    with MonitoredLoop(one, hooks=[saver(folder), hook, Created()], checkpoint_dir=folder) as loop:
        loop.run()
        events.clear()
        with OtherRanks(loop, events):
            hook.coord.request_stop(AbortedError())
            assert not loop.should_stop()
    assert events == [("agreement", None), "session"]


def requests_to_stop_come_before_the_errors_of_threads(folder: Path) -> None:
    hook = Doing()

    def step_fn(context: StepContext[torch.Tensor]) -> None:
        context.run_with_hooks()
        hook.contexts[-1].request_stop("late")
        hook.coord.request_stop(AbortedError())

    with MonitoredLoop(one, hooks=[saver(folder), hook], checkpoint_dir=folder) as loop:
        loop.run_step_fn(step_fn)
        assert loop.stop_reason == "Doing: late"
        assert len(hook.sessions) == 1  # a stop ends the threads: there is nothing to recover


def before_an_error_of_a_thread_the_calls_of_its_session_are_made_and_may_end_the_loop(folder: Path) -> None:
    events: list[Any] = []

    def end() -> None:
        events.append("item")
        raise StopIteration

    def after_run(context: SessionRunContext) -> None:
        context.after_item(end)
        hook.coord.request_stop(AbortedError())

    hook = Doing(after_run)
    with MonitoredLoop(one, hooks=[saver(folder), hook], checkpoint_dir=folder) as loop:
        for _ in loop.until_stop(range(3)):
            loop.run()
    assert (events, loop.stop_reason, len(hook.sessions)) == (["item"], "StopIteration", 1)


# -- the close --------------------------------------------------------------------------------------------------------


def at_the_close_the_hooks_of_the_epoch_come_before_the_calls_of_the_item(folder: Path) -> None:
    events: list[Any] = []
    hooks = [
        Doing(lambda context: context.after_item(lambda: events.append("item"))),
        OfEpochs(lambda context: events.append("epoch")),
    ]
    with MonitoredLoop(one, hooks=hooks) as loop:
        for _ in loop.until_stop(range(3)):
            loop.run()
            break
    assert events == ["epoch", "item"]


def at_the_close_each_call_is_made_though_others_fail(folder: Path) -> None:
    events: list[Any] = []

    def fail(context: SessionRunContext) -> None:
        raise ValueError("of an epoch")

    def failing() -> None:
        raise ValueError("of an item")

    hooks = [
        OfEpochs(fail),
        Doing(lambda context: context.after_item(failing)),
        Doing(lambda context: context.after_item(lambda: events.append("item"))),
    ]
    loop: Loop = MonitoredLoop(one, hooks=hooks)
    for _ in loop.until_stop(range(3)):
        loop.run()
        break
    with pytest.raises(ExceptionGroup) as caught:
        loop.close()
    assert [str(error) for error in caught.value.exceptions] == ["of an epoch", "of an item"]
    assert events == ["item"]


# -- the table --------------------------------------------------------------------------------------------------------

Test = Callable[[Path], None]

LINES: dict[str, list[Test]] = {
    "checks of the first runs": [
        what_is_pending_is_cleared_first_so_that_a_check_may_ask_for_another_look,
        the_checks_of_the_first_runs_come_before_the_values,
    ],
    "values": [a_callback_may_ask_for_a_stop_after_this_very_run, values_come_before_triggers],
    "triggers": [triggers_come_before_the_calls_of_an_item_that_was_left],
    "inner loops left by break": [inner_loops_left_by_break_come_before_the_hooks_of_the_epoch],
    "hooks of the epoch": [
        hooks_of_the_epoch_come_before_the_calls_of_the_item,
        hooks_of_the_epoch_may_ask_for_the_stop_that_the_script_asks_about,
        an_epoch_is_taken_before_its_hooks_which_may_come_back,
        at_the_close_the_hooks_of_the_epoch_come_before_the_calls_of_the_item,
    ],
    "calls of the item": [
        the_item_is_done_for_a_checkpoint_that_one_of_its_calls_saves,
        calls_of_the_item_come_before_the_meeting_of_the_ranks,
        a_call_of_an_item_that_was_left_may_ask_for_a_stop_after_this_very_run,
        a_stop_saves_only_what_the_calls_of_the_item_have_not_saved_just_now,
        at_the_close_each_call_is_made_though_others_fail,
    ],
    "meeting of the ranks": [the_meeting_of_the_ranks_comes_before_the_stop_that_it_decides],
    "caught errors, stop requests": [
        an_error_that_was_caught_is_told_at_the_end_of_the_next_run,
        requests_to_stop_come_before_the_agreement_of_the_ranks,
        requests_to_stop_come_before_the_check_of_the_ranks,
        requests_to_stop_come_before_the_errors_of_threads,
    ],
    "agreement of the ranks": [the_check_of_the_ranks_comes_before_the_errors_of_threads],
    "the run is over": [
        a_run_is_over_before_the_errors_of_threads,
        an_error_of_the_end_of_a_run_is_one_of_the_run_and_one_after_it_is_not,
    ],
    "errors of threads": [
        requests_to_stop_come_before_the_errors_of_threads,
        before_an_error_of_a_thread_the_calls_of_its_session_are_made_and_may_end_the_loop,
    ],
    "place of the stop": [the_calls_for_a_stop_come_after_its_place_which_they_save],
    "calls for the stop": [
        the_calls_for_a_stop_come_before_the_answer_that_there_is_one,
        the_calls_for_a_stop_come_after_its_place_which_they_save,
        a_stop_saves_only_what_the_calls_of_the_item_have_not_saved_just_now,
    ],
    "parting of the ranks": [the_ranks_part_after_the_calls_for_the_stop],
}
"""By the line of the table, in its order: what is wrong if the line is moved."""
TESTS = {test.__name__: test for tests in LINES.values() for test in tests}


@pytest.mark.parametrize("name", TESTS)
def test_line(name: str, tmp_path: Path) -> None:
    TESTS[name](tmp_path)


def test_each_line_of_the_table_has_a_test() -> None:
    rows = re.findall(r"^\d+ +(\S.*?)  ", boundaries.__doc__ or "", re.MULTILINE)
    assert rows == list(LINES)


METHODS = [
    "end_run",
    "after_run",
    "end_item",
    "end_epoch",
    "should_stop",
    "end_step_fn",
    "close",
    "_notice_stop",
    "stop_at",
]
"""The methods whose statements are the lines of the table."""
CONDITIONS = {"stop_at": 3}
"""How many statements at the beginning of a method say whether there is something to do."""


def blocks(function: ast.FunctionDef) -> list[list[ast.stmt]]:
    """Return the blocks of ``function``, without its docstring: its body, and those of its ``if`` statements."""
    if ast.get_docstring(function) is not None:
        del function.body[0]
    return [function.body, *(each.body for each in function.body if isinstance(each, ast.If))]


def swapped(method: str, block: int, index: int) -> Callable[..., Any]:
    """Return the method of ``Boundaries`` with two neighbouring statements swapped."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(Boundaries, method))))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    lines = blocks(function)[block]
    lines[index], lines[index + 1] = lines[index + 1], lines[index]
    names = dict(vars(boundaries))
    exec(compile(ast.unparse(tree), f"<{method} with lines {index} and {index + 1} swapped>", "exec"), names)
    made: Callable[..., Any] = names[method]
    return made


def pairs() -> Iterator[tuple[str, int, int, str]]:
    """Yield each pair of neighbouring statements: the method, the block, the index, and what is swapped."""
    for method in METHODS:
        function = ast.parse(textwrap.dedent(inspect.getsource(getattr(Boundaries, method)))).body[0]
        assert isinstance(function, ast.FunctionDef)
        first = CONDITIONS.get(method, 0)
        for block, lines in enumerate(blocks(function)[: 1 if first else None]):
            for index, (line, following) in list(enumerate(itertools.pairwise(lines)))[first:]:
                texts = (ast.unparse(each).splitlines()[0] for each in (line, following))
                yield method, block, index, f"{method}: {' <-> '.join(texts)}"


PAIRS = {text: (method, block, index) for method, block, index, text in pairs()}


@pytest.mark.parametrize("pair", PAIRS)
def test_two_neighbouring_lines_that_are_swapped_are_noticed(
    pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, block, index = PAIRS[pair]
    monkeypatch.setattr(Boundaries, method, swapped(method, block, index))
    noticed = []
    for name, test in TESTS.items():
        folder = tmp_path / name
        folder.mkdir()
        try:
            test(folder)
        except BaseException as error:  # that of pytest.raises is not an Exception
            noticed.append((name, type(error).__name__))
    print(f"{pair}: {noticed}")
    assert noticed
