"""Ranks that are at different places after the same run: which of them go on, and what the errors of the others say."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_threads
from support.rank_threads import Hub, ThreadRanks, in_threads

from torchhooks import (
    CallFnHook,
    CheckpointSaverHook,
    CheckpointSaverListener,
    EvaluationHook,
    LifecycleError,
    MonitoredLoop,
    PeerError,
    Session,
    list_checkpoints,
)

PLACES = ("ENTER", "ITEM", "END", "CLOSE", "gathering", "a later run")

# What follows for the rank at one place and for the rank at another: they go on; both raise a PeerError; one that
# gathers raises a LifecycleError, and the other a PeerError.
GO_ON, BOTH_FAIL, GATHERER_FAILS = "go on", "both fail", "the gatherer fails"


def expected(one: str, another: str) -> str:
    if one == another or {one, another} == {"CLOSE", "END"}:
        return GO_ON
    return GATHERER_FAILS if "gathering" in (one, another) and "CLOSE" not in (one, another) else BOTH_FAIL


def train(ranks: ThreadRanks, hub: Hub, places: tuple[str, str]) -> list[int]:
    """Make two runs, and come to a place; return the epochs whose body has begun."""
    place, begun = places[ranks.rank], []
    with MonitoredLoop(step_with(ranks, hub, 2), ranks=ranks) as loop:
        for epoch in loop.until_stop(range(2)):
            begun.append(epoch)
            for _ in loop.until_stop(iter(range(2 if place == "END" else 3))):
                loop.run()
                if loop.global_step == 2 and place not in ("END", "a later run"):
                    break
            if epoch:
                break
            if place == "ENTER":
                for _ in loop.until_stop([]):
                    loop.run()
            if place == "gathering":
                ranks.gather(0, "a test")
            if place in ("CLOSE", "END"):
                break
    return begun


def step_with(ranks: ThreadRanks, hub: Hub, most: int = 1000) -> Any:
    """Return a step that needs the other rank in the first ``most`` runs."""
    runs = [0]

    def step() -> None:
        runs[0] += 1
        if runs[0] <= most:
            hub.gather("step", ranks.rank, runs[0])

    return step


@pytest.mark.parametrize("another", PLACES)
@pytest.mark.parametrize("one", PLACES)
def test_two_ranks_at_two_places_go_on_or_both_raise_an_error(one: str, another: str) -> None:
    results = in_threads(2, functools.partial(train, places=(one, another)), stuck_secs=60)
    match expected(one, another):
        case "go on":
            assert results[0] == results[1] == ([0] if one in ("CLOSE", "END") else [0, 1])
        case "both fail":
            assert [type(result) for result in results] == [PeerError] * 2
            assert str(results[0]) == str(results[1])
        case _:
            gatherer = (one, another).index("gathering")
            assert [type(results[gatherer]), type(results[1 - gatherer])] == [LifecycleError, PeerError]
            assert "waits in run 2 for values of the other ranks for a test, and rank" in str(results[gatherer])


WITH = "with MonitoredLoop(step_with(ranks, hub), model, hooks=hooks, checkpoint_dir=folder, ranks=ranks) as loop:"

Script = Callable[[MonitoredLoop[Any], int], object]


def epochs(loop: MonitoredLoop[Any], rank: int, leave: Callable[[MonitoredLoop[Any]], bool]) -> None:
    """Make two runs in each of three epochs. After the second, rank 0 calls ``leave``, and breaks if that is true."""
    for epoch in loop.until_stop(range(3)):
        for _ in loop.until_stop(range(2)):
            loop.run()
        if epoch == 1 and rank == 0 and leave(loop):
            break


def breaks(loop: MonitoredLoop[Any], rank: int) -> None:
    epochs(loop, rank, lambda loop: True)


def breaks_after_asking(loop: MonitoredLoop[Any], rank: int) -> None:
    def ask(loop: MonitoredLoop[Any]) -> bool:
        loop.request_stop("good enough")
        return True

    epochs(loop, rank, ask)


def returns(loop: MonitoredLoop[Any], rank: int) -> None:
    for epoch in loop.until_stop(range(3)):
        for _ in loop.until_stop(range(2)):
            loop.run()
        if epoch == 1 and rank == 0:
            return


def breaks_out_of_one_loop(loop: MonitoredLoop[Any], rank: int) -> None:
    for number in loop.until_stop(range(6)):
        loop.run()
        if number == 3 and rank == 0:
            break


def leaves_a_plain_loop(loop: MonitoredLoop[Any], rank: int) -> None:
    for epoch in range(3):
        for _ in loop.until_stop(range(2)):
            loop.run()
        if epoch == 1 and rank == 0:
            break


def begins_another_loop(loop: MonitoredLoop[Any], rank: int) -> None:
    breaks(loop, rank)
    for _ in loop.until_stop(range(2)):
        loop.run()


def ends_by_stop_iteration(loop: MonitoredLoop[Any], rank: int) -> None:
    data = iter(range(4 - rank))
    while not loop.should_stop():
        next(data)
        loop.run()


def breaks_in_the_last_epoch(loop: MonitoredLoop[Any], rank: int) -> None:
    for epoch in loop.until_stop(range(2)):
        for _ in loop.until_stop(range(2)):
            loop.run()
        if epoch == 1 and rank == 0:
            break


def ends(script: Script, folder: Path | None, **period: Any) -> list[BaseException | None]:
    """Return how ``script`` ends on two ranks, with a hook that saves."""

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        hooks = [] if folder is None else [CheckpointSaverHook(folder, **period)]
        model = torch.nn.BatchNorm1d(1)  # whose weights are the same on all ranks, which share their random states
        with MonitoredLoop(step_with(ranks, hub), model, hooks=hooks, checkpoint_dir=folder, ranks=ranks) as loop:
            script(loop, ranks.rank)

    return in_threads(2, main, stuck_secs=60)


def line_of(script: Callable[..., object], statement: str) -> str:
    lines, first = inspect.getsourcelines(script)
    return f"{Path(__file__).name}:{first + next(i for i, line in enumerate(lines) if line.strip() == statement)}"


ENDED = "came to the end of its data, and closed its loop,"
LEAVE = "rank 1 goes on: leave it on all ranks, or call loop.request_stop()"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (breaks, f"left the loop over epochs by break after run 4, {line_of(epochs, 'break')}; {LEAVE}"),
        (returns, f"left the loop over epochs by return after run 4, {line_of(returns, 'return')}; {LEAVE}"),
        (begins_another_loop, f"left the loop over epochs by break after run 4, {line_of(epochs, 'break')}; {LEAVE}"),
        (leaves_a_plain_loop, f"{ENDED} after run 4, {line_of(ends, WITH)}; {LEAVE}"),
    ],
)
@pytest.mark.parametrize("period", [{}, {"save_steps": 2}, {"save_steps": 3}, {"save_secs": 1000}], ids=str)
def test_a_rank_that_leaves_its_loops_alone_is_named_and_the_last_common_place_is_saved(
    script: Script, message: str, period: dict[str, int], tmp_path: Path
) -> None:
    errors = ends(script, tmp_path if period else None, **period)
    assert [type(error) for error in errors] == [PeerError] * 2
    assert [str(error) for error in errors] == [f"rank 0 {message}"] * 2
    if period and script is not begins_another_loop:
        assert list_checkpoints(tmp_path)[-1].step == 4


def test_a_rank_in_a_run_that_the_others_have_left_is_named(tmp_path: Path) -> None:
    errors = ends(breaks_out_of_one_loop, tmp_path, save_steps=2)
    where = line_of(breaks_out_of_one_loop, "break")
    stays = LEAVE.replace("goes on", "goes on with run 5")
    assert str(errors[0]) == f"rank 0 left its loop by break after run 4, {where}; {stays}"
    assert [type(error) for error in errors] == [PeerError] * 2
    assert list_checkpoints(tmp_path)[-1].step == 4  # it was due on both, and rank 0 has joined


def test_a_rank_that_ends_by_stop_iteration_is_named() -> None:
    errors = ends(ends_by_stop_iteration, None)
    assert str(errors[0]).startswith("rank 1 ended its loop by StopIteration after run 3, ")
    assert str(errors[0]).endswith("; rank 0 goes on with run 4: leave it on all ranks, or call loop.request_stop()")


@pytest.mark.parametrize("script", [breaks_after_asking, breaks_in_the_last_epoch])
@pytest.mark.parametrize("period", [{}, {"save_steps": 2}, {"save_secs": 1000}], ids=str)
def test_ranks_that_leave_at_the_same_place_end_well(script: Script, period: dict[str, int], tmp_path: Path) -> None:
    assert ends(script, tmp_path if period else None, **period) == [None, None]
    if period:
        assert list_checkpoints(tmp_path)[-1].step == 4


def train_with_evaluation(ranks: ThreadRanks, hub: Hub, script: Script, folder: Path) -> None:
    """Evaluate on all ranks together at the end of each epoch, and save."""

    def evaluate() -> dict[str, float]:
        return {"accuracy": sum(hub.gather("evaluation", ranks.rank, 0.5))}

    hooks = [EvaluationHook(evaluate, every_n_epochs=1), CheckpointSaverHook(folder, save_steps=2)]
    model = torch.nn.BatchNorm1d(1)
    with MonitoredLoop(step_with(ranks, hub), model, hooks=hooks, checkpoint_dir=folder, ranks=ranks) as loop:
        script(loop, ranks.rank)


def numbers(end_secs: float = 0.0) -> Iterator[int]:
    yield from range(4)
    time.sleep(end_secs)


def breaks_where_the_data_of_others_end(loop: MonitoredLoop[Any], rank: int, end_secs: float = 0.0) -> None:
    for number in loop.until_stop(numbers(end_secs)):
        loop.run()
        if number == 3 and rank == 0:
            break


def breaks_in_an_epoch(loop: MonitoredLoop[Any], rank: int) -> None:
    for _ in loop.until_stop(range(2)):
        for number in loop.until_stop(range(4)):
            loop.run()
            if number == 2 and rank == 0:
                break


def test_a_rank_that_breaks_where_the_data_of_the_others_end_joins_their_evaluation(tmp_path: Path) -> None:
    main = functools.partial(train_with_evaluation, script=breaks_where_the_data_of_others_end, folder=tmp_path)
    assert in_threads(2, main, stuck_secs=60) == [None, None]
    assert list_checkpoints(tmp_path)[-1].step == 4


class SlowAtRun4(CheckpointSaverListener):
    def __init__(self, rank: int) -> None:
        self._secs = 0.0 if rank else 0.3

    def before_save(self, session: Session, step: int) -> None:
        time.sleep(self._secs if step == 4 else 0)


def test_a_rank_that_left_its_loops_has_time_for_the_save_that_it_joins(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        saver = CheckpointSaverHook(tmp_path, save_steps=2, listeners=[SlowAtRun4(ranks.rank)])
        with MonitoredLoop(step_with(ranks, hub), hooks=[saver], ranks=ranks) as loop:
            breaks_where_the_data_of_others_end(loop, ranks.rank)

    # Rank 0 is in that save for many more than the fifty ticks which it would have to arrive.
    assert in_threads(2, main, stuck_secs=60) == [None, None]
    assert list_checkpoints(tmp_path)[-1].step == 4


# The rank that breaks comes to the next loop before and after the data of the other one end.
@pytest.mark.parametrize(("break_secs", "end_secs"), [(0.0, 0.1), (0.1, 0.0), (0.0, 0.0)])
def test_a_rank_that_breaks_where_the_data_of_the_others_end_goes_on_with_them(
    break_secs: float, end_secs: float, tmp_path: Path
) -> None:
    def script(loop: MonitoredLoop[Any], rank: int) -> None:
        breaks_where_the_data_of_others_end(loop, rank, end_secs)
        time.sleep(0 if rank else break_secs)
        for _ in loop.until_stop(range(2)):
            loop.run()

    assert ends(script, tmp_path, save_secs=1000) == [None, None]
    assert list_checkpoints(tmp_path)[-1].step == 6


def test_a_rank_that_evaluates_for_an_epoch_in_which_another_goes_on_is_an_error_on_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_threads, "HANG_SECS", 0.5)  # in the evaluation and in the step, until their process ends
    errors = in_threads(
        2, functools.partial(train_with_evaluation, script=breaks_in_an_epoch, folder=tmp_path), stuck_secs=60
    )
    message = (
        "rank 0 came to the end of an epoch after run 3, and rank 1 is in run 4: give every rank the same number of "
        "items, and begin the same loops on all of them"
    )
    assert message in {str(error) for error in errors}


def test_the_end_of_an_epoch_for_which_one_rank_alone_has_a_hook_is_none_of_the_others() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> int:
        hooks = [] if ranks.rank else [CallFnHook(lambda: time.sleep(0.01), every_n_epochs=1)]
        with MonitoredLoop(step_with(ranks, hub), hooks=hooks, ranks=ranks) as loop:
            for _ in range(3):
                for _ in loop.until_stop(range(2)):
                    loop.run()
        return loop.global_step

    assert in_threads(2, main, stuck_secs=60) == [6, 6]


def breaks_with_an_inner_loop(loop: MonitoredLoop[Any], rank: int) -> None:
    for _ in loop.until_stop(range(2)):
        for number in loop.until_stop(range(4)):
            loop.run()
            if number == 1 and rank == 0:
                return


def test_nothing_is_saved_where_the_ranks_are_at_different_places_in_their_data(tmp_path: Path) -> None:
    errors = ends(breaks_with_an_inner_loop, tmp_path, save_steps=2)
    assert all(str(error).startswith("rank 0 left the loop over epochs by return after run 2") for error in errors)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0]

    def resumed(ranks: ThreadRanks, hub: Hub) -> int:
        step, model = step_with(ranks, hub), torch.nn.BatchNorm1d(1)
        with MonitoredLoop(step, model, checkpoint_dir=tmp_path, ranks=ranks) as loop:
            for _ in loop.until_stop(range(2)):
                for _ in loop.until_stop(range(4)):
                    loop.run()
        return loop.global_step

    assert in_threads(2, resumed, stuck_secs=60) == [8, 8]


def breaks_out_of_an_epoch(loop: MonitoredLoop[Any], rank: int) -> None:
    for _ in loop.until_stop(range(2)):
        for number in loop.until_stop(range(4)):
            loop.run()
            if number == 2 and rank == 0 and loop.global_step == 3:
                break


def test_a_save_that_is_due_where_the_ranks_are_in_different_loops_is_refused(
    tmp_path: Path, lines: list[tuple[str, str]]
) -> None:
    errors = ends(breaks_out_of_an_epoch, tmp_path, save_steps=1)
    assert [type(error) for error in errors] == [PeerError] * 2
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [0, 1, 2]
    assert any(text.startswith("no checkpoint of step 3: the ranks are in different loops") for _, text in lines)
    assert ends(lambda loop, rank: breaks_out_of_an_epoch(loop, 1), tmp_path, save_steps=1) == [None, None]
    assert list_checkpoints(tmp_path)[-1].step == 8


@pytest.mark.parametrize("script", [breaks, leaves_a_plain_loop])
def test_what_is_saved_where_the_ranks_part_is_resumed(script: Script, tmp_path: Path) -> None:
    errors = ends(script, tmp_path, save_secs=1000)
    assert [type(error) for error in errors] == [PeerError] * 2
    assert list_checkpoints(tmp_path)[-1].step == 4
    # The third epoch, for which rank 0 has no reason to leave any more.
    assert ends(lambda loop, rank: script(loop, 1), tmp_path, save_secs=1000) == [None, None]
    assert list_checkpoints(tmp_path)[-1].step == 6


class Slow(CheckpointSaverListener):
    """Lets the chief be in a save for some ticks more than the others, after they have taken part in it."""

    def __init__(self, rank: int) -> None:
        self._secs = 0.0 if rank else 0.05

    def after_save(self, session: Session, step: int) -> None:
        time.sleep(self._secs)


def test_a_rank_in_a_save_before_its_first_run_is_in_no_run(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub, epochs: int) -> int:
        hooks = [CheckpointSaverHook(tmp_path, every_n_epochs=1, listeners=[Slow(ranks.rank)])]
        with MonitoredLoop(step_with(ranks, hub), hooks=hooks, checkpoint_dir=tmp_path, ranks=ranks) as loop:
            for epoch in loop.until_stop(range(epochs)):
                for _ in loop.until_stop(range(2)):
                    loop.run()
                    if (epoch, epochs) == (1, 2):
                        loop.close()  # in the last item of an epoch, which ends in the next process
                        return loop.global_step
        return loop.global_step

    first = in_threads(2, functools.partial(main, epochs=2), stuck_secs=60)
    assert first == [3, 3]
    assert in_threads(2, functools.partial(main, epochs=3), stuck_secs=60) == [6, 6]


# -- a stop between two epochs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [{}, {"save_steps": 2}, {"save_secs": 1000}], ids=str)
@pytest.mark.parametrize("delays", [(0.0, 0.0), (0.05, 0.0), (0.0, 0.05)], ids=str)
def test_no_body_begins_on_any_rank_after_a_stop_between_two_epochs(
    period: dict[str, int], delays: tuple[float, float], tmp_path: Path
) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> list[Any]:
        hooks = [CheckpointSaverHook(tmp_path, **period)] if period else []  # type: ignore[arg-type]
        bodies: list[Any] = []
        folder = tmp_path if period else None
        with MonitoredLoop(step_with(ranks, hub), hooks=hooks, checkpoint_dir=folder, ranks=ranks) as loop:
            for epoch in loop.until_stop(range(4)):
                runs = 0
                for _ in loop.until_stop(range(2)):
                    loop.run()
                    runs += 1
                bodies.append((epoch, runs))
                if epoch == 1 and ranks.rank == 0:
                    loop.request_stop("good enough")
                time.sleep(delays[ranks.rank])
        return [*bodies, loop.stop_reason]

    for _ in range(2 if period else 1):  # the second time, resumed after that stop
        bodies = [*in_threads(2, main, stuck_secs=60)]
        assert bodies[0] == bodies[1]
        if bodies[0][0] == (0, 2):
            assert bodies[0] == [(0, 2), (1, 2), "request_stop: good enough (rank 0)"]
        else:
            assert bodies[0] == [(2, 2), (3, 2), "data ended"]


def test_a_stop_before_a_loop_without_an_outer_one_lets_it_yield_nothing() -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> list[int]:
        runs = []
        with MonitoredLoop(step_with(ranks, hub), ranks=ranks) as loop:
            for epoch in range(4):
                runs.append(len([loop.run() for _ in loop.until_stop(range(2))]))
                if epoch == 1 and ranks.rank == 0:
                    loop.request_stop("good enough")
        return runs

    assert in_threads(2, main) == [[2, 2, 0, 0]] * 2


# -- resuming --------------------------------------------------------------------------------------------------------


def test_a_range_that_is_what_is_left_of_one_is_resumed_to_its_end(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub, first: int) -> list[int]:
        hooks, items = [CheckpointSaverHook(tmp_path, save_steps=1)], []
        with MonitoredLoop(step_with(ranks, hub), hooks=hooks, checkpoint_dir=tmp_path, ranks=ranks) as loop:
            for item in loop.until_stop(range(first, 10)):
                items.append(item)
                loop.run()
                if item == 2:
                    loop.request_stop()
        return items

    begun = in_threads(2, functools.partial(main, first=0))
    assert begun[0] == begun[1]
    done = begun[0][-1] + 1
    assert in_threads(2, functools.partial(main, first=done)) == [[*range(done, 10)]] * 2
