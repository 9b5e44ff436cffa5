"""A loop that is resumed continues with the next item, whatever it iterates over and however its loops are nested.

Whole training runs are resumed in other processes in test_patterns.py.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support import shapes
from support.examples import examples
from support.packages import import_or_skip
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from torchhooks import (
    AbortedError,
    CheckpointError,
    CheckpointSaverHook,
    MonitoredLoop,
    Saver,
    Scaffold,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
    Variables,
    latest_checkpoint,
)
from torchhooks.common.files import Disk
from torchhooks.data.cursor import SavedCursor
from torchhooks.data.position import outer_position
from torchhooks.data.resuming import rest_of_range
from torchhooks.testing import RecordingHook

Lines = list[tuple[str, str]]

# -- loops over data --------------------------------------------------------------------------------------------------

BATCHES, BATCH = 4, 3


class Points(Dataset[torch.Tensor]):
    """A dataset of points. If it is ``noisy``, a point differs each time that it is read."""

    def __init__(self, noisy: bool) -> None:
        self.points = torch.linspace(-1, 1, BATCHES * BATCH - 1).unsqueeze(1)  # so that the last batch is smaller
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.points[index] + (0.01 * torch.rand(1) if self.noisy else 0.0)


def stateful(noisy: bool) -> Iterable[torch.Tensor]:
    stateful_dataloader = import_or_skip("torchdata.stateful_dataloader")
    loader: Iterable[torch.Tensor] = stateful_dataloader.StatefulDataLoader(Points(noisy), BATCH, shuffle=True)
    return loader


class QuickDisk(Disk):
    """A disk that does not sync, since no test here simulates a power failure."""

    def sync(self, file: Any) -> None:
        file.flush()

    def sync_folder(self, path: str) -> None: ...


def looped(
    directory: Path,
    last_step: int | None = None,
    *,
    step: Callable[..., None] = lambda *args: None,
    hooks: Iterable[SessionRunHook] = (),
    save_steps: int = 99,
    **arguments: Any,
) -> MonitoredLoop[None]:
    """Return a loop that resumes from ``directory``, stops at ``last_step``, and saves at creation and at its end."""
    saver = Saver(max_to_keep=None)
    saver.disk = QuickDisk()
    stop = [] if last_step is None else [StopAtStepHook(last_step=last_step)]
    saving = CheckpointSaverHook(directory, save_steps=save_steps)
    scaffold = Scaffold(saver=saver)
    arguments.setdefault("checkpoint_dir", directory)
    return MonitoredLoop(step, hooks=[*stop, *hooks, saving], scaffold=scaffold, **arguments)


def after_a_break(directory: Path) -> MonitoredLoop[None]:
    """Return a loop that continues from the newest checkpoint, although a break has finished the training run."""
    return looped(directory, checkpoint_dir=latest_checkpoint(directory))


def killed_at(directory: Path, step: int) -> Path:
    """Return a folder with only the checkpoint of ``step``, as if the process had been killed right after it."""
    folder = directory / f"killed-{step}"
    folder.mkdir()
    shutil.copytree(directory / f"model.ckpt-{step}", folder / f"model.ckpt-{step}")
    return folder


def over(loop: MonitoredLoop[None], iterable: Iterable[Any], **arguments: Any) -> list[Any]:
    """Return the items with which runs were made."""
    made = []
    with loop:
        for item in loop.until_stop(iterable, **arguments):
            loop.run()
            made.append(item)
    return made


def in_two(directory: Path, stop: int, first: Iterable[Any], second: Iterable[Any], **arguments: Any) -> list[Any]:
    """Return the items that a second loop takes from ``second``, after the first one was stopped in ``first``."""
    over(looped(directory, stop), first)
    return over(looped(directory), second, **arguments)


def logged(lines: Lines) -> list[tuple[str, str]]:
    """Return what was logged about the data, without the line that says where they continue."""
    about_data = [line for line in lines if "until_stop" in line[1] and "continues at item" not in line[1]]
    return [(level, re.sub(r"[\d.]+ sec", "... sec", text)) for level, text in about_data]


Program = list[tuple[str, int, Any]]
"""Consecutive phases: the kind of data, the number of items, and the program for each item; [] is one run."""


def items(kind: str, number: int) -> Iterable[Any]:
    match kind:
        case "list":
            return list(range(number))
        case "loader":
            return DataLoader(range(number), batch_size=None, shuffle=number > 0)  # type: ignore[arg-type]
    return range(number)


def execute(loop: MonitoredLoop[None], program: Program, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the runs made, by their places in the program."""
    made = []
    for phase, (kind, number, body) in enumerate(program):
        for item in loop.until_stop(items(kind, number)):
            here = (*where, phase, int(item))
            if body:
                made += execute(loop, body, here)
            else:
                loop.run()
                made.append(here)
    return made


def phases(bodies: st.SearchStrategy[Program]) -> st.SearchStrategy[Program]:
    phase = st.tuples(st.sampled_from(["range", "list", "loader"]), st.integers(0, 2), bodies)
    return st.lists(phase, min_size=1, max_size=2)


PROGRAMS = phases(st.just([]) | phases(st.just([]) | phases(st.just([]))))


class SavingAt(SessionRunHook):
    """A hook that saves once, which is what a folder contains if the process is killed after this step."""

    def __init__(self, directory: Path, step: int) -> None:
        self.directory, self.step = directory, step

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_context.session.global_step == self.step:
            run_context.session.saver.save(run_context.session, self.directory / "model.ckpt", self.step)


@pytest.mark.not_measured
@examples(50)
@given(program=PROGRAMS, choice=st.data())
def test_whatever_the_nesting_a_resumed_loop_makes_the_runs_that_were_not_made(
    program: Program, choice: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    torch.manual_seed(1)
    with MonitoredLoop(lambda: None) as loop:
        whole = execute(loop, program)
    assume(whole)
    directory = tmp_path_factory.mktemp("program")
    killed = choice.draw(st.integers(1, len(whole)), "killed at")
    torch.manual_seed(1)
    with MonitoredLoop(lambda: None, hooks=[SavingAt(directory, killed)]) as loop:
        assert execute(loop, program) == whole
    stop = choice.draw(st.integers(killed, len(whole)), "then stopped at")
    made = whole[:killed]
    if stop > killed:
        with looped(directory, stop, save_steps=99) as loop:
            made += execute(loop, program)
    assert made == whole[:stop]
    with looped(directory, save_steps=99) as loop:
        made += execute(loop, program)
    assert made == whole


# -- what the next process yields -------------------------------------------------------------------------------------

# The script, or the script of each process (see support.shapes); how each process but the last one ends: at this step,
# killed (k) right after the checkpoint of this step, with its data (-), or by a break (b); what the processes do.
RESUMED = [
    ("a range", "5{r}", "2", "0 1 / 2 3 4"),
    ("had ended", "3{r}", "-", "0 1 2 /"),
    ("had ended, a list", "L3{r}", "-", "0 1 2 /"),
    ("has grown since", "3{r} / 5{r} / 6{r} / 6{r}", "- - -", "0 1 2 / 3 4 / 5 /"),
    ("has grown since, a list", "L3{r} / L5{r} / L6{r} / L6{r}", "- - -", "0 1 2 / 3 4 / 5 /"),
    ("more epochs", "3{L2{r}} / 3{L2{r}} / 5{L2{r}}", "- -", "00 01 10 11 20 21 / / 30 31 40 41"),
    # An item of several runs is not done before its last run, and comes again.
    ("in several runs", "3{ppp}", "2", "0 0 / 0 0 0 1 1 1 2 2 2"),
    ("in the first of several runs", "3{ppp}", "4", "0 0 0 1 / 1 1 1 2 2 2"),
    ("in the middle of several runs", "3{ppp}", "5", "0 0 0 1 1 / 1 1 1 2 2 2"),
    ("after the last of several runs", "3{ppp}", "6", "0 0 0 1 1 1 / 2 2 2"),
    ("killed in several runs", "3{ppp}", "k2", "0 0 / 0 0 0 1 1 1 2 2 2"),
    ("killed after several runs", "3{ppp}", "k3", "0 0 0 / 1 1 1 2 2 2"),
    ("killed in the next item", "3{ppp}", "k5", "0 0 0 1 1 / 1 1 1 2 2 2"),
    ("killed after the next item", "3{ppp}", "k6", "0 0 0 1 1 1 / 2 2 2"),
    ("several runs in a later epoch and process", "3{ab{pp}}", "5 6", "0a 0a 0b 0b 1a / 1a / 1a 1a 1b 1b 2a 2a 2b 2b"),
    # A run before the inner loop is made again, and undone.
    ("after a run before the inner loop", "ab{r2{r}}", "1", "a / a a0 a1 b b0 b1"),
    ("in an inner loop after a run", "ab{r2{r}}", "2", "a a0 / a a1 b b0 b1"),
    ("in a later inner loop after a run", "ab{r2{r}}", "5", "a a0 a1 b b0 / b b1"),
    ("a run after the inner loop", "2{L2{r!1}r}", "k3", "00 01 0 / 10 11 1"),
    ("a run after an inner loop that is left", "2{L5{r!1}r}", "k3", "00 01 0 / 10 11 1"),
    # A break.
    ("left before the run of an item", "5{!2r} / 5{r}", "b", "0 1 / 2 3 4"),
    ("left after the run of an item", "5{r!2} / 5{r}", "b", "0 1 2 / 3 4"),
    ("in an inner loop that is left", "2{L3{r!1}xyz{r}}", "1", "00 / 01 0x 0y 0z 10 11 1x 1y 1z"),
    ("after an inner loop that is left", "2{L3{r!1}xyz{r}}", "2", "00 01 / 0x 0y 0z 10 11 1x 1y 1z"),
    ("in the loop after one that is left", "2{L3{r!1}xyz{r}}", "3", "00 01 0x / 0y 0z 10 11 1x 1y 1z"),
    # A break out of both loops goes on with the next item of the outermost.
    ("both left in the first batch", "3{L2{r!0}!0} / 3{L2{r}}", "b", "00 / 10 11 20 21"),
    ("both left in the last batch", "3{L2{r!1}!0} / 3{L2{r}}", "b", "00 01 / 10 11 20 21"),
    ("both left in a later epoch", "3{L2{r!1}!1} / 3{L2{r}}", "b", "00 01 10 11 / 20 21"),
    ("before the code behind the batches", "2{L2{r}?L2{,}}", "2", "00 01 / , , 10 11 , ,"),
]


@pytest.mark.parametrize(("script", "ends", "done"), [row[1:] for row in RESUMED], ids=[row[0] for row in RESUMED])
def test_the_next_process_continues_where_the_one_before_it_ended(
    script: str, ends: str, done: str, tmp_path: Path
) -> None:
    scripts, folder, left, traces = script.split(" / "), tmp_path, False, []
    for number, end in enumerate([*ends.split(), "-"]):
        trace: list[str] = []
        step, killed = int(end[1:] or 0) if end[0] in "kb-" else int(end), end[0] == "k"
        place = latest_checkpoint(folder) if left else folder
        loop = looped(folder, None if killed else step or None, save_steps=1 if killed else 99, checkpoint_dir=place)
        shapes.train(loop, scripts[min(number, len(scripts) - 1)], trace)
        traces.append(" ".join(trace[:step] if killed else trace))
        folder, left = killed_at(folder, step) if killed else folder, end == "b"
    assert " ".join(" / ".join(traces).split()) == done


@pytest.mark.parametrize("script", ["2{L3{r!1}xyz{r}}", "3{ab{r}cd{r}}", "2{2{2{r}}ab{r}}"])
def test_wherever_it_is_stopped_the_rest_is_done(script: str, tmp_path: Path) -> None:
    whole: list[str] = []
    shapes.train(looped(tmp_path / "whole"), script, whole)
    for stop in range(1, len(whole)):
        made: list[str] = []
        for last_step in (stop, None):
            shapes.train(looped(tmp_path / f"{stop}", last_step), script, made)
        assert made == whole, stop


@pytest.mark.parametrize("stop", [1, 2, 5])
def test_a_run_that_is_made_again_is_undone(stop: int, tmp_path: Path) -> None:
    shapes.train(looped(tmp_path, stop), "ab{r2{r}}", [])
    loop = looped(tmp_path)
    shapes.train(loop, "ab{r2{r}}", [])
    assert loop.global_step == 6


@pytest.mark.parametrize("stop", [3, 7])
def test_numbers_that_are_drawn_between_two_loops_of_an_item_come_again(stop: int, tmp_path: Path) -> None:
    def train(loop: MonitoredLoop[None], seed: int) -> list[float]:
        torch.manual_seed(seed)
        made = []
        with loop:
            for _ in loop.until_stop(range(2)):
                for _ in loop.until_stop([0, 1]):
                    loop.run()
                number = torch.rand(()).item()
                for _ in loop.until_stop([0, 1]):
                    loop.run()
                    made.append(number)
        return made

    whole = train(looped(tmp_path / "whole"), 1)
    assert train(looped(tmp_path / "parts", stop), 1) + train(looped(tmp_path / "parts"), 2) == whole


# -- ranges -----------------------------------------------------------------------------------------------------------


def test_a_range_from_the_global_step_makes_the_same(tmp_path: Path) -> None:
    over(looped(tmp_path, 2), range(5))
    loop = looped(tmp_path)
    assert over(loop, range(loop.global_step, 5)) == [2, 3, 4]


@given(
    start=st.integers(-9, 9),
    stop=st.integers(-9, 9),
    stride=st.integers(-4, 4).filter(bool),
    last=st.integers(-12, 12),
    done=st.booleans(),
)
def test_the_rest_of_a_range_is_what_comes_after_a_value(
    start: int, stop: int, stride: int, last: int, done: bool
) -> None:
    values, sign = range(start, stop, stride), 1 if stride > 0 else -1
    left = [value for value in values if sign * value > sign * last or (value == last and not done)]
    assert list(rest_of_range(values, last, done)) == left


# -- data that are resumed, and what is said -------------------------------------------------------------------------


class Unlimited(IterableDataset[int]):
    """An iterable dataset that yields more items than its length says."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))

    def __len__(self) -> int:
        return 4


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def loader_of(data: Any, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None, **arguments)


def unlimited() -> DataLoader[Any]:
    return loader_of(Unlimited())


def unsized() -> DataLoader[Any]:
    return loader_of([0, 1, 2, 3], sampler=Unsized())


def batches_of_two() -> Iterable[Any]:
    return DataLoader(range(6), 2, collate_fn=list)  # type: ignore[arg-type]


NO_NEED = "A loader with state_dict(), such as torchdata's StatefulDataLoader, resumes without skipping."
FOR_AN_ITERATOR = (
    "is an iterator, so it continues where it is. To have it resumed, pass until_stop an iterable, such as the loader "
    "itself or a list, and write epochs as until_stop(range(...)) around it."
)

# What a resume says of its data, by the word that stands for it below.
SENTENCES = {
    "continues": ("INFO", r"until_stop's NAME continues at item (\d+); sums over its items must be in Variables"),
    "skipped": ("INFO", rf"skipped (\d+) items of until_stop's NAME in [\d.]+ sec\. {re.escape(NO_NEED)}"),
    "fewer": (
        "WARNING",
        r"the checkpoint was saved after \d+ items of until_stop's NAME, which now has only (\d+): it is treated as "
        r"ended",
    ),
    "none": (
        "WARNING",
        r"no run was made, because until_stop's NAME has no item after the last one of the checkpoint\. To train on, "
        r"give it more items, or use until_stop\(\.\.\., resume=False\)()",
    ),
    "iterator": ("WARNING", rf"until_stop's NAME {re.escape(FOR_AN_ITERATOR)}()"),
    "islice": (
        "WARNING",
        rf"until_stop's NAME {re.escape(FOR_AN_ITERATOR)} For its first n items, use until_stop\(loader, limit=n\)\.()",
    ),
    "finished": ("WARNING", r"this training run is finished: the data ended, at step (\d+)\. So until_stop yields .*"),
}

# The data of two processes, the step at which the first one stops, arguments of until_stop in the second one, the items
# that it makes runs with, and what it says.
RESUMES: list[tuple[str, Callable[[], Any], Callable[[], Any], int | None, dict[str, Any], list[Any], str]] = [
    ("range", lambda: range(5), lambda: range(5), 2, {}, [2, 3, 4], "continues 2"),
    ("list", lambda: [*range(5)], lambda: [*range(5)], 2, {}, [2, 3, 4], "continues 2"),
    ("tuple", lambda: (*range(5),), lambda: (*range(5),), 2, {}, [2, 3, 4], "continues 2"),
    ("loader", batches_of_two, batches_of_two, 2, {}, [[4, 5]], "continues 2, skipped 2"),
    ("range at its end", lambda: range(4), lambda: range(4), 4, {}, [], "none"),
    ("list at its end", lambda: [0, 1, 2], lambda: [0, 1, 2], 3, {}, [], "none"),
    ("tuple at its end", lambda: (0, 1, 2), lambda: (0, 1, 2), 3, {}, [], "none"),
    ("loader at its end", lambda: loader_of([0, 1]), lambda: loader_of([0, 1]), 2, {}, [], "skipped 2, none"),
    ("limit", unlimited, unlimited, 4, {"limit": 4}, [], "skipped 4, none"),
    ("more items", lambda: range(4), lambda: range(5), 4, {}, [4], "continues 4"),
    ("fewer items", lambda: [*range(5)], lambda: [*range(3)], 4, {}, [], "continues 4, fewer 3, none"),
    ("fewer keys", lambda: {0: 0, 1: 1, 2: 2}, lambda: {0: 0}, 2, {}, [], "continues 2, fewer 1, none"),
    ("no items", lambda: [0, 1, 2], list, 2, {}, [], "continues 2, fewer 0, none"),
    # They may yield more.
    ("sampler without a length", unsized, unsized, 4, {}, [], "continues 4, skipped 4, none"),
    ("iterable dataset", unlimited, unlimited, 4, {}, [4, 5, 6, 7, 8], "continues 4, skipped 4"),
    ("iterator", lambda: iter([0, 1, 2, 3]), lambda: iter("ab"), 2, {}, ["a", "b"], "iterator"),
    ("islice", lambda: itertools.islice([0, 1, 2], 3), lambda: itertools.islice("ab", 3), 2, {}, ["a", "b"], "islice"),
    ("iterator that had ended", lambda: iter([0, 1]), lambda: iter([0, 1]), None, {}, [], "finished 2"),
    ("not resumed", lambda: range(4), lambda: range(4), 2, {"resume": False}, [0, 1, 2, 3], ""),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("first", "second", "stop", "arguments", "made", "said"),
    [row[1:] for row in RESUMES],
    ids=[row[0] for row in RESUMES],
)
def test_what_a_resume_makes_of_data_and_says_of_them(
    first: Callable[[], Any],
    second: Callable[[], Any],
    stop: int | None,
    arguments: dict[str, Any],
    made: list[Any],
    said: str,
    tmp_path: Path,
    lines: Lines,
) -> None:
    over(looped(tmp_path, stop), first())
    lines.clear()
    assert over(looped(tmp_path), second(), **arguments) == made
    name, words = type(second()).__name__, []
    for level, text in lines:
        if "until_stop" in text:
            sentences = {word: line[1].replace("NAME", name) for word, line in SENTENCES.items() if line[0] == level}
            found = {word: re.fullmatch(sentence, text) for word, sentence in sentences.items()}
            words += [f"{word} {match[1]}".strip() for word, match in found.items() if match] or [text]
    assert ", ".join(words) == said


def test_nothing_is_logged_where_nothing_was_skipped(tmp_path: Path, lines: Lines) -> None:
    with looped(tmp_path, 2, save_steps=1) as loop:
        execute(loop, [("range", 3, [("loader", 2, [])])])
    with looped(killed_at(tmp_path, 2)) as loop:
        execute(loop, [("range", 3, [("loader", 2, [])])])
    with looped(tmp_path) as loop:
        assert len(execute(loop, [("range", 3, [("loader", 2, [])])])) == 4
    assert [text.split(" in ")[0] for _, text in logged(lines)] == ["skipped 2 items of until_stop's DataLoader"] * 2


class Interrupted:
    """Nine numbers, the second of which may come with a signal."""

    def __init__(self, signal_comes: bool) -> None:
        self.signal_comes = signal_comes
        self.taken = 0

    def __iter__(self) -> Iterator[int]:
        for self.taken in range(1, 10):
            if self.signal_comes and self.taken == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
            yield self.taken


@pytest.fixture
def _harmless_signal() -> Iterator[None]:
    old = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGUSR1, old)


@pytest.mark.usefixtures("_harmless_signal")
def test_a_stop_ends_the_skipping_and_keeps_the_position(tmp_path: Path) -> None:
    over(looped(tmp_path, 4), Interrupted(False))
    data = Interrupted(True)
    with looped(tmp_path, signals=["SIGUSR1"]) as loop:
        assert list(loop.until_stop(data)) == []
        loop.session.saver.save(loop.session, tmp_path / "model.ckpt", 4)
    assert (data.taken, loop.stop_reason) == (2, "signal SIGUSR1")
    assert over(looped(tmp_path), Interrupted(False)) == [5, 6, 7, 8, 9]


# -- data in another order --------------------------------------------------------------------------------------------

OTHER_ITEMS = (
    "is not the one it was before. So some items will be missed and others repeated. The usual causes are another "
    "batch size or another length of the data set, a list that is shuffled in place (shuffle a copy), and an iterable "
    "that counts its epochs (set its epoch in the body of the outer loop). A body that changes its items in place "
    "looks the same."
)


class Epochs:
    """Four tensors, in an order that depends on how often it was iterated."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.epoch += 1
        yield from torch.arange(4).roll(self.epoch)


@pytest.mark.parametrize("save_steps", [1, 99])
@pytest.mark.parametrize("make", [list, lambda values: torch.tensor(values).split(1), Epochs])
def test_data_that_come_in_another_order_are_warned_of_once(
    make: Any, save_steps: int, tmp_path: Path, lines: Lines
) -> None:
    def train(loop: MonitoredLoop[None]) -> None:
        data, shuffled = (make() if make is Epochs else None), random.Random(1)
        values = list(range(20))
        with loop:
            for _ in loop.until_stop(range(3)):
                shuffled.shuffle(values)  # in place: what comes out depends on how often this was done
                for _ in loop.until_stop(make(values) if data is None else data):
                    loop.run()

    train(looped(tmp_path, 23 if make is not Epochs else 6, save_steps=save_steps))
    train(looped(tmp_path, 25 if make is not Epochs else 7))
    kind = {list: "list", Epochs: "Epochs"}.get(make, "tuple")
    number = 2 if make is Epochs else 3
    assert [line for line in logged(lines) if line[0] == "WARNING"] == [
        ("WARNING", f"item {number} of until_stop's {kind} {OTHER_ITEMS}")
    ]


def test_another_length_of_the_data_is_named_with_the_item_that_differs(tmp_path: Path, lines: Lines) -> None:
    for batch_size in (2, 3):
        with looped(tmp_path, 2 if batch_size == 2 else None) as loop:
            for _ in loop.until_stop(torch.utils.data.DataLoader(range(12), batch_size)):  # type: ignore[arg-type]
                loop.run()
    first = next(text for level, text in lines if level == "WARNING" and "not the one" in text)
    assert first.startswith("item 2 of until_stop's DataLoader, which has 4 items now and had 6 before, is not the one")
    assert "usual causes are another batch size" in first


def test_the_item_in_progress_is_compared_too(tmp_path: Path, lines: Lines) -> None:
    for name in ("ab", "cb"):
        with looped(tmp_path, 3 if name == "ab" else None) as loop:
            for _ in loop.until_stop(list(name)):
                for _ in loop.until_stop([0, 1, 2, 3, 4]):
                    loop.run()
    assert logged(lines) == [("WARNING", f"item 1 of until_stop's list {OTHER_ITEMS}")]


def test_the_item_at_which_a_loop_was_left_is_compared(tmp_path: Path, lines: Lines) -> None:
    with looped(tmp_path) as loop:
        for value in loop.until_stop([1, 2, 3]):
            loop.run()
            if value == 2:
                break
    over(after_a_break(tmp_path), [1, 4, 3])
    assert logged(lines) == [("WARNING", f"item 2 of until_stop's list {OTHER_ITEMS}")]


def test_a_body_that_takes_its_item_apart_causes_no_warning(tmp_path: Path, lines: Lines) -> None:
    for stop in (2, None):
        with looped(tmp_path, stop) as loop:
            for inputs, labels in loop.until_stop([(torch.zeros(3), {"y": number}) for number in range(4)]):
                labels.pop("y")
                inputs.add_(1)
                loop.run()
    assert logged(lines) == []


def test_an_item_whose_digest_could_not_be_read_is_not_compared(tmp_path: Path, lines: Lines) -> None:
    over(looped(tmp_path, 2), [1, 2, 3])
    saved = torch.load(f"{latest_checkpoint(tmp_path)}/state.pt", weights_only=True)
    assert saved["position"]["path"][0]["digest"] is not None
    saved["position"]["path"][0]["digest"] = None
    with MonitoredLoop(lambda: None) as loop:
        loop.session.position.load_state_dict(saved["position"], saved["random"], None)
        assert over(loop, [4, 5, 6]) == [6]
    assert logged(lines) == []


def test_an_item_is_not_kept_longer_than_the_loop_has_it() -> None:
    alive = []
    with MonitoredLoop(lambda: None) as loop:
        for _ in loop.until_stop(range(1)):
            items: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
            for item in loop.until_stop(torch.zeros(1) for _ in range(5)):
                items.add(item)
                alive.append(len(items))
                loop.run()
                if len(alive) == 4:
                    break
            del item
            alive.append(len(items))
    assert alive == [1, 1, 1, 1, 0]


# -- the reminder of variables ----------------------------------------------------------------------------------------


def reminders(lines: Lines) -> list[str]:
    """Return the lines that say where the data continue."""
    return [text for _, text in lines if "continues a" in text]


def test_an_inner_loop_at_its_last_item_is_not_said_to_be_at_its_end(tmp_path: Path, lines: Lines) -> None:
    """The body of the outer loop continues after it, with its variables."""
    for last_step in (4, None):
        with looped(tmp_path, last_step) as loop:
            for _ in loop.until_stop(range(2)):
                for _ in loop.until_stop(range(2)):
                    loop.run()
    assert reminders(lines) == ["until_stop's range continues at item 2; sums over its items must be in Variables"]


def test_a_loop_after_one_that_stopped_at_its_last_item_is_not_said_to_continue(tmp_path: Path, lines: Lines) -> None:
    for last_step in (2, None):
        with looped(tmp_path, last_step) as loop:
            for _ in range(3):
                for _ in loop.until_stop([0, 1]):
                    loop.run()
    assert reminders(lines) == []


# -- iterators --------------------------------------------------------------------------------------------------------


def test_an_iterator_that_continues_in_a_later_epoch_is_warned_of_once(tmp_path: Path, lines: Lines) -> None:
    for epochs in (1, 4):
        lines.clear()
        numbers = itertools.count()
        hooks = [CheckpointSaverHook(tmp_path, every_n_epochs=1)]
        with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path) as loop:
            for _ in loop.until_stop(range(epochs)):
                for _ in loop.until_stop(numbers, limit=2):
                    loop.run()
    said = [level for level, text in lines if "is an iterator" in text]
    assert said == ["WARNING"]


@pytest.mark.parametrize("make", [list, lambda values: DataLoader(values, batch_size=1)])
@pytest.mark.parametrize("epochs", [0, 2])
def test_a_loop_without_items_says_so(make: Any, epochs: int, lines: Lines) -> None:
    data = make([])
    with MonitoredLoop(lambda: None) as loop:
        for _ in loop.until_stop(range(epochs)) if epochs else [0]:
            for _ in loop.until_stop(data):
                loop.run()
    assert logged(lines) == [
        (
            "WARNING",
            f"no run was made, because until_stop's {type(data).__name__} yielded no item: check that its data are not "
            "empty, and not an iterator that is used up",
        )
    ]


@pytest.mark.parametrize("way", ["nothing", "stop"])
def test_a_loop_that_is_not_meant_to_run_is_not_warned_of(way: str, lines: Lines) -> None:
    with MonitoredLoop(lambda: None) as loop:
        if way == "stop":
            loop.request_stop("enough")
            assert list(loop.until_stop([])) == []
    assert logged(lines) == []


def test_epochs_that_are_an_iterator_leave_the_batches_where_they_were(tmp_path: Path) -> None:
    def train(loop: MonitoredLoop[None], first: int) -> list[Any]:
        made = []
        with loop:
            for epoch in loop.until_stop(itertools.count(first)):
                for batch in loop.until_stop("abc"):
                    loop.run()
                    made.append((epoch, batch))
        return made

    train(looped(tmp_path, 5), 0)
    assert train(looped(tmp_path, 8), 1) == [(1, "c"), (2, "a"), (2, "b")]


# -- resume=False -----------------------------------------------------------------------------------------------------


def test_inside_of_data_that_are_not_resumed_the_inner_data_are(tmp_path: Path) -> None:
    def train(loop: MonitoredLoop[None], epochs: Iterable[int]) -> list[Any]:
        made = []
        with loop:
            for epoch in loop.until_stop(epochs, resume=False):
                for batch in loop.until_stop("abc"):
                    loop.run()
                    made.append((epoch, batch))
        return made

    train(looped(tmp_path, 5), range(3))
    assert train(looped(tmp_path), range(1, 3)) == [(1, "c"), (2, "a"), (2, "b"), (2, "c")]


def test_with_resume_false_a_phase_that_was_over_is_iterated_again(tmp_path: Path) -> None:
    with looped(tmp_path, 3) as loop:
        execute(loop, [("range", 2, []), ("range", 4, [])])
    with looped(tmp_path) as loop:
        first = [loop.run() for _ in loop.until_stop(range(2), resume=False)]
        second = [item for item in loop.until_stop(range(4)) if loop.run() is None]
    assert (len(first), second) == (2, [1, 2, 3])


# -- which items are done ---------------------------------------------------------------------------------------------


def plain_batches(loop: MonitoredLoop[None], epochs: int = 3, batches: int = 3) -> list[tuple[int, int]]:
    """Make runs in epochs of until_stop with plain batches, so that one item means several runs."""
    made = []
    with loop:
        for epoch in loop.until_stop(range(epochs)):
            for batch in range(batches):
                if loop.should_stop():
                    break
                loop.run()
                made.append((epoch, batch))
    return made


def test_a_save_waits_while_another_until_stop_runs_in_the_same_item(tmp_path: Path) -> None:
    saved = []
    with looped(tmp_path, save_steps=1) as loop:
        for _ in loop.until_stop("ab"):
            saved.append((tmp_path / f"model.ckpt-{loop.global_step}").exists())
            loop.run()
            for _ in loop.until_stop([1, 2]):
                saved.append((tmp_path / f"model.ckpt-{loop.global_step}").exists())
    assert saved == [True, False, False] * 2


def test_an_item_that_was_passed_over_is_done(tmp_path: Path) -> None:
    def train(loop: MonitoredLoop[None]) -> list[int]:
        made = []
        with loop:
            for item in loop.until_stop(range(8)):
                if item % 2:
                    continue
                loop.run()
                made.append(item)
        return made

    train(looped(tmp_path, 2))
    assert train(looped(tmp_path)) == [4, 6]


@pytest.mark.usefixtures("_harmless_signal")
def test_after_a_stop_that_comes_after_the_batches_the_epoch_is_done(tmp_path: Path) -> None:
    with looped(tmp_path, signals=["SIGUSR1"]) as loop:
        for _ in loop.until_stop(range(3)):
            for _ in loop.until_stop([0, 1]):
                loop.run()
            os.kill(os.getpid(), signal.SIGUSR1)
    with looped(tmp_path) as loop:
        assert execute(loop, [("range", 3, [("list", 2, [])])])[0] == (0, 1, 0, 0)


def test_a_loop_closed_in_an_epoch_continues_in_that_epoch(tmp_path: Path) -> None:
    with looped(tmp_path, 2) as loop:
        for _ in loop.until_stop(range(3)):
            for _ in loop.until_stop([0, 1, 2]):
                loop.run()
            loop.close()
    with looped(tmp_path) as loop:
        assert execute(loop, [("range", 3, [("list", 3, [])])])[:2] == [(0, 0, 0, 2), (0, 1, 0, 0)]


def test_data_iterated_in_a_run_are_not_part_of_the_position(tmp_path: Path) -> None:
    def evaluating() -> None:
        assert list(loops[-1].until_stop([7, 8])) == [7, 8]

    loops: list[MonitoredLoop[None]] = []
    made = []
    for stop in (2, 4, None):
        loops.append(looped(tmp_path, stop, step=evaluating))
        made.append(over(loops[-1], [0, 1, 2, 3, 4]))
    assert made == [[0, 1], [2, 3], [4]]


def test_data_iterated_in_a_run_have_no_number(tmp_path: Path) -> None:
    def evaluating_once() -> None:
        if not loop.global_step:
            assert list(loop.until_stop([7, 8])) == [7, 8]

    made = []
    for stop in (3, None):
        with looped(tmp_path, stop, step=evaluating_once) as loop:
            if not loop.global_step:
                loop.run()
            made.append([item for item in loop.until_stop(range(4)) if loop.run() is None])
    assert made == [[0, 1], [2, 3]]


def test_a_checkpoint_of_a_loop_that_has_not_begun_has_the_position_of_the_one_before(tmp_path: Path) -> None:
    over(looped(tmp_path, 2), Stream())
    looped(tmp_path).close()  # saves at creation
    stream = Stream()
    assert over(looped(tmp_path, 4), stream) == [2, 3]
    assert stream.loaded == 1


def test_nothing_is_saved_before_the_loop_of_the_checkpoint_has_begun(tmp_path: Path) -> None:
    program: Program = [("range", 3, [("list", 1, []), ("list", 3, [])])]
    with looped(tmp_path, 7) as loop:
        execute(loop, program)
    with looped(tmp_path) as loop:
        for _ in loop.until_stop(range(3)):  # the current epoch is 1
            loop.session.saver.save(loop.session, tmp_path / "model.ckpt", 7)
            break
        loop.session.saver.save(loop.session, tmp_path / "between" / "model.ckpt", 7)
    assert not (tmp_path / "between").exists()
    with looped(tmp_path) as loop:
        assert execute(loop, program)[0] == (0, 1, 1, 2)


def test_of_ranks_that_had_begun_no_loop_there_is_no_outer_position() -> None:
    assert outer_position([None, {"path": []}]) is None
    assert outer_position([{"path": []}, {"path": []}]) is None


def test_an_error_of_the_data_while_items_are_passed_over_is_raised(tmp_path: Path) -> None:
    class Failing:
        def __init__(self, fails_at: int) -> None:
            self.fails_at = fails_at

        def __iter__(self) -> Iterator[int]:
            for number in range(6):
                if number == self.fails_at:
                    raise OSError("not there")
                yield number

    with looped(tmp_path, 4) as loop:
        for _ in loop.until_stop(Failing(9)):
            loop.run()
    with pytest.raises(OSError, match="not there"), looped(tmp_path) as loop:
        list(loop.until_stop(Failing(2)))


def test_data_iterated_side_by_side_are_warned_of_once(tmp_path: Path, lines: Lines) -> None:
    with looped(tmp_path, save_steps=1) as loop:
        for _ in zip(loop.until_stop([0, 1, 2, 3]), loop.until_stop([4, 5, 6, 7]), strict=True):
            loop.run()
    text = (
        "until_stop's list is iterated side by side with another until_stop, as zip() does. A checkpoint has the place "
        "of the first one only, and the second starts over when it is resumed: pass one until_stop an object that "
        "iterates over both"
    )
    assert logged(lines) == [("WARNING", text)]


def test_loops_side_by_side_train_on_when_they_are_resumed(tmp_path: Path) -> None:
    def train(stop: int | None = None) -> list[tuple[int, int]]:
        made = []
        with looped(tmp_path, stop, save_steps=1) as loop:
            both = [loop.until_stop(data) for data in ([0, 1, 2, 3], [4, 5, 6, 7])]
            for pair in zip(*both, strict=False):
                loop.run()
                made.append(pair)
        return made

    assert train(2) == [(0, 4), (1, 5)]
    assert train() == [(2, 4), (3, 5)]


# -- loaders with a state ---------------------------------------------------------------------------------------------

ignore_set_vital = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Stream:
    """Endless numbers. The state is the next number, and ``loaded`` counts how often it was loaded."""

    __slots__ = ("loaded", "next", "odd")

    def __init__(self, odd: Any = None) -> None:
        self.next = self.loaded = 0
        self.odd = odd

    def __iter__(self) -> Iterator[int]:
        while True:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "odd": self.odd}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]
        self.loaded += 1


def test_a_loader_with_a_state_continues_by_it_and_nothing_is_skipped(tmp_path: Path, lines: Lines) -> None:
    over(looped(tmp_path, 2), Stream())
    second = Stream()
    assert over(looped(tmp_path, 4), second) == [2, 3]
    assert (second.loaded, logged(lines)) == (1, [])


def test_a_loader_in_the_state_of_the_loop_is_not_saved_or_loaded_twice(tmp_path: Path) -> None:
    for stop, made in ((2, [0, 1]), (4, [2, 3])):
        stream = Stream()
        assert over(looped(tmp_path, stop, state={"stream": stream}), stream) == made
    assert stream.loaded == 1
    saved = torch.load(f"{latest_checkpoint(tmp_path)}/state.pt", weights_only=True)
    assert saved["stream"] == {"next": 4, "odd": None}
    assert saved["position"]["loaders"] == {"1.0": {"generators": {}}}


def test_a_state_that_cannot_be_saved_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"position\['loaders'\]\['1\.0'\]\['state'\]\['odd'\] is of type object"):
        over(looped(tmp_path), Stream(odd=object()))


def test_a_stream_cannot_yield_the_item_in_progress_again_which_is_warned_of(tmp_path: Path, lines: Lines) -> None:
    def train(loop: MonitoredLoop[None]) -> list[tuple[int, int]]:
        made = []
        with loop:
            for shard in loop.until_stop(Stream()):
                for batch in loop.until_stop([0, 1, 2]):
                    loop.run()
                    made.append((shard, batch))
        return made

    train(looped(tmp_path, 4))
    assert train(looped(tmp_path, 6)) == [(2, 0), (2, 1)]
    assert logged(lines) == [
        (
            "WARNING",
            "until_stop's Stream continues after the item that was in progress. That item cannot be yielded again, "
            "and may have been processed only in part.",
        )
    ]


@ignore_set_vital
def test_a_stateful_loader_that_is_iterated_is_not_set_back_by_a_recovery(tmp_path: Path) -> None:
    loader, calls = stateful(noisy=False), itertools.count()

    def step() -> None:
        if next(calls) == BATCHES + 1:
            raise AbortedError

    epochs: list[list[float]] = []
    with looped(tmp_path, step=step, state={"loader": loader}) as loop:
        for _ in loop.until_stop(range(3)):
            epochs.append([])
            for batch in loop.until_stop(loader):
                loop.run()
                epochs[-1] += batch.flatten().tolist()
    whole = Points(False).points.flatten().tolist()
    assert [sorted(epoch) for epoch in epochs] == [whole] * 3


@ignore_set_vital
def test_more_epochs_of_a_stateful_loader_are_those_that_would_have_come(tmp_path: Path) -> None:
    def train(name: str, epochs: int, seed: int) -> list[Any]:
        torch.manual_seed(seed)
        loader, seen = stateful(noisy=True), []
        with looped(tmp_path / name) as loop:
            for _ in loop.until_stop(range(epochs)):
                for batch in loop.until_stop(loader):
                    loop.run()
                    seen.append(batch.tolist())
        return seen

    assert train("parts", 1, seed=1) + train("parts", 3, seed=2) == train("whole", 3, seed=1)


@ignore_set_vital
def test_a_loader_that_has_no_state_any_more_skips(tmp_path: Path, lines: Lines) -> None:
    over(looped(tmp_path, 2), stateful(noisy=False))
    assert len(over(looped(tmp_path), DataLoader(Points(False), BATCH))) == BATCHES - 2
    assert logged(lines) == [
        ("WARNING", f"item 2 of until_stop's DataLoader {OTHER_ITEMS}"),  # which is not shuffled
        ("INFO", f"skipped 2 items of until_stop's DataLoader in ... sec. {NO_NEED}"),
    ]


@ignore_set_vital
def test_a_stateful_loader_yields_a_batch_that_was_not_done_again(tmp_path: Path) -> None:
    def train(loop: MonitoredLoop[None], enough: int) -> list[list[float]]:
        torch.manual_seed(4)
        loader, seen = stateful(noisy=False), []
        with loop:
            for _ in loop.until_stop(range(1)):
                for batch in loop.until_stop(loader):
                    seen.append(batch.flatten().tolist())
                    if loop.global_step == enough:
                        loop.close()
                        break
                    loop.run()
        return seen

    whole = train(looped(tmp_path / "whole"), 99)
    assert train(looped(tmp_path / "parts"), 2) == whole[:3]
    assert train(looped(tmp_path / "parts"), 99) == whole[2:]


@pytest.mark.parametrize("shared", [False, True])
def test_the_generators_of_all_loaders_continue(shared: bool, tmp_path: Path) -> None:
    def train(loop: MonitoredLoop[None], seed: int) -> list[tuple[int, str, int]]:
        one = torch.Generator().manual_seed(seed)
        other = one if shared else torch.Generator().manual_seed(seed + 1)
        values: Any = range(5)
        loaders: dict[str, DataLoader[Any]] = {
            name: DataLoader(values, batch_size=None, shuffle=True, generator=generator)
            for name, generator in (("a", one), ("b", other))
        }
        made = []
        with loop:
            for epoch in loop.until_stop(range(3)):
                for name, loader in loaders.items():
                    for item in loop.until_stop(loader):
                        loop.run()
                        made.append((epoch, name, int(item)))
        return made

    whole = train(looped(tmp_path / "whole"), 1)
    for stop in (8, 10, 12, 17, 20, 25):  # both loaders have begun by then
        made = train(looped(tmp_path / str(stop), stop), 1)
        assert made + train(looped(tmp_path / str(stop)), 2) == whole


def test_loaders_that_are_gone_are_not_kept(tmp_path: Path) -> None:
    with looped(tmp_path) as loop:
        for _ in range(5):
            generator = torch.Generator()
            for _ in loop.until_stop(DataLoader(range(2), generator=generator)):  # type: ignore[arg-type]
                loop.run()
    saved = torch.load(f"{latest_checkpoint(tmp_path)}/state.pt", weights_only=True)
    assert list(saved["position"]["loaders"]) == []


@pytest.mark.slow
def test_with_persistent_workers_the_order_is_the_same(tmp_path: Path) -> None:
    def train(loop: MonitoredLoop[None], seed: int) -> list[int]:
        torch.manual_seed(seed)
        values: Any = range(8)
        made = []
        loader = DataLoader(values, batch_size=None, shuffle=True, num_workers=1, persistent_workers=True)
        with loop:
            for _ in loop.until_stop(range(2)):
                for item in loop.until_stop(loader):
                    loop.run()
                    made.append(int(item))
        return made

    whole = train(looped(tmp_path / "whole"), 1)
    made = train(looped(tmp_path / "parts", 11), 1)
    assert made + train(looped(tmp_path / "parts"), 2) == whole


# -- recovery ---------------------------------------------------------------------------------------------------------


def failing_at(call: int) -> Any:
    calls = itertools.count(1)

    def step() -> None:
        if next(calls) == call:
            raise AbortedError

    return step


def test_after_a_recovery_the_data_continue_where_they_are(tmp_path: Path) -> None:
    assert over(looped(tmp_path, step=failing_at(3), save_steps=1), range(5)) == [0, 1, 2, 3, 4]


def test_in_the_checkpoint_of_a_recovery_the_current_item_is_not_done(tmp_path: Path) -> None:
    class Copying(SessionRunHook):
        """A hook that copies the checkpoint that was saved when the session was created again."""

        def before_run(self, run_context: Any) -> None:
            if run_context.session.global_step == 2:
                ignored = shutil.ignore_patterns(".run.json.tmp")  # of another thread
                shutil.copytree(tmp_path / "run", tmp_path / "copy", ignore=ignored, dirs_exist_ok=True)

    over(looped(tmp_path / "run", step=failing_at(3), hooks=[Copying()], save_steps=1), range(5))
    assert over(looped(tmp_path / "copy"), range(5)) == [2, 3, 4]


def test_several_runs_before_a_recovery_count(tmp_path: Path) -> None:
    plain_batches(looped(tmp_path, 3, step=failing_at(3), save_steps=1), batches=4)
    assert plain_batches(looped(tmp_path), batches=4)[0] == (0, 0)


def test_a_run_that_was_made_again_counts_once(tmp_path: Path) -> None:
    failing = RecordingHook(raises={("after_run", 3): AbortedError})
    assert over(looped(tmp_path, 3, hooks=[failing], save_steps=1), range(5)) == [0, 1, 2]
    assert over(looped(tmp_path), range(5)) == [3, 4]


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_without_a_position_leaves_the_data_as_they_are(tmp_path: Path) -> None:
    with looped(tmp_path) as loop:
        loop.run()
    assert "position" not in torch.load(tmp_path / "model.ckpt-1" / "state.pt", weights_only=True)
    assert over(looped(tmp_path), range(3)) == [0, 1, 2]


def test_a_checkpoint_restored_by_hand_before_the_data_begin_is_resumed(tmp_path: Path) -> None:
    over(looped(tmp_path, 2), range(5))
    with MonitoredLoop(lambda: None) as loop:
        loop.session.saver.restore(loop.session, tmp_path / "model.ckpt-2")
        assert list(loop.until_stop(range(5))) == [2, 3, 4]


def test_a_checkpoint_restored_later_leaves_the_data_where_they_are(tmp_path: Path) -> None:
    with looped(tmp_path, 5) as loop:
        execute(loop, [("range", 1, []), ("range", 1, []), ("range", 5, [])])
    with MonitoredLoop(lambda: None) as loop:
        assert list(loop.until_stop(range(3))) == [0, 1, 2]
        loop.session.saver.restore(loop.session, tmp_path / "model.ckpt-5")
        assert list(loop.until_stop(range(5))) == [0, 1, 2, 3, 4]


def test_the_name_position_is_reserved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\['position'\]: this name is reserved"):
        looped(tmp_path, state={"position": Stream()})


# -- another length ----------------------------------------------------------------------------------------------------

LENGTH = (
    "So the loop that continues ends earlier or later than it would have. A length may depend on the number of the "
    "epoch, as with sampler.set_epoch(epoch) in the body of the outer loop, and not on what code before the loop "
    "changes: that code runs again when the loop is resumed."
)


def of_length(kind: str, length: int) -> tuple[Any, dict[str, Any]]:
    """Return data of ``length`` items, and the arguments of ``until_stop``."""
    values = range(20 if kind == "limit" else length)
    makes: dict[str, Any] = {"list": list, "tuple": tuple, "limit": list, "loader": DataLoader}
    return makes.get(kind, lambda values: values)(values), {"limit": length} if kind == "limit" else {}


@ignore_set_vital
@pytest.mark.parametrize("kind", ["range", "list", "tuple", "limit", "loader", "stateful"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("length", [3, 5, 8])
def test_a_loop_that_continues_with_another_length_is_a_warning(
    kind: str, nested: bool, length: int, tmp_path: Path, lines: Lines
) -> None:
    for number, last_step in ((5, 2), (length, None)):
        data, arguments = of_length(kind, number)
        if kind == "stateful":
            stateful_dataloader: Any = import_or_skip("torchdata.stateful_dataloader")
            data = stateful_dataloader.StatefulDataLoader(data)
        with looped(tmp_path, last_step) as loop:
            for _ in loop.until_stop(range(3)) if nested else [0]:
                for _ in loop.until_stop(data, **arguments):
                    loop.run()
    name = {"range": "range", "loader": "DataLoader", "stateful": "StatefulDataLoader"}.get(kind, "list")
    name = "tuple" if kind == "tuple" else "list with its limit" if kind == "limit" else name
    # To train on, an outermost loop gets more items: of a loader, whose items may be others then, that is said too.
    trains_on = not nested and length > 5 and kind not in ("loader", "stateful")
    line = f"until_stop's {name} has {length} items now, and had 5 before. {LENGTH}"
    expected = [] if length == 5 or trains_on else [line]
    assert [text for level, text in lines if level == "WARNING"] == expected


@pytest.mark.parametrize("length", [2, 4, 6])
def test_the_length_is_that_of_all_processes(length: int, tmp_path: Path, lines: Lines) -> None:
    for number, last_step in ((4, 1), (4, 2), (4, 3), (length, None)):
        over(looped(tmp_path, last_step), range(number))
    warned = [text for level, text in lines if level == "WARNING" and "now" in text]
    assert warned == ([f"until_stop's range has 2 items now, and had 4 before. {LENGTH}"] if length == 2 else [])


def test_a_range_that_begins_where_the_script_continues_has_the_same_end(tmp_path: Path, lines: Lines) -> None:
    assert in_two(tmp_path, 2, range(5), range(2, 5)) == [2, 3, 4]
    assert [text for level, text in lines if level == "WARNING"] == []


def test_a_range_of_other_values_is_named_with_what_it_yields(tmp_path: Path, lines: Lines) -> None:
    for values, last_step in ((range(5), 2), (range(3, 8), None)):
        with looped(tmp_path, last_step) as loop:
            for _ in loop.until_stop(range(1)):
                for _ in loop.until_stop(values):
                    loop.run()
    assert [text for level, text in lines if level == "WARNING"] == [
        f"until_stop's range has 7 items now, and had 5 before. {LENGTH}"
    ]


@pytest.mark.parametrize("limited", [False, True])
def test_data_that_had_ended_and_are_shorter_now_are_finished_and_no_more(
    limited: bool, tmp_path: Path, lines: Lines
) -> None:
    for length in (5, 3):
        data, arguments = of_length("limit" if limited else "range", length)
        assert len(over(looped(tmp_path), data, **arguments)) == (5 if length == 5 else 0)
    (line,) = [text for level, text in lines if level == "WARNING"]
    assert line.startswith("this training run is finished: the data ended")


def test_a_checkpoint_without_the_length_is_resumed_as_before(tmp_path: Path, lines: Lines) -> None:
    over(looped(tmp_path, 2), range(5))
    path = latest_checkpoint(tmp_path)
    assert path is not None
    cursor = torch.load(f"{path}/state.pt", weights_only=True)["position"]["path"][0]
    assert SavedCursor.from_saved(cursor).total == 5
    del cursor["total"]
    assert SavedCursor.from_saved(cursor).total is None


def test_a_length_that_is_computed_from_the_state_is_a_warning(tmp_path: Path, lines: Lines) -> None:
    for last_step in (4, None):
        variables = Variables(done=[])
        with looped(tmp_path, last_step, state={"vars": variables}) as loop:
            for epoch in loop.until_stop(range(2)):
                for _ in loop.until_stop(range(3)):
                    loop.run()
                variables.done.append(epoch)
                for _ in loop.until_stop(range(1 + len(variables.done))):
                    loop.run()
    assert [text for level, text in lines if level == "WARNING"] == [
        f"until_stop's range has 3 items now, and had 2 before. {LENGTH}"
    ]
