"""The usual training script, killed at random moments and resumed: the same bits and lines as if it had not been."""

from __future__ import annotations

import ast
import hashlib
import math
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Container
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from support import processes
from support.disks import DiskOfMoments, copy_folder
from support.examples import shared
from support.packages import import_or_skip
from support.scripts import example
from torch import nn

from torchhooks import (
    BestCheckpointHook,
    CheckpointSaverHook,
    EvaluationHook,
    LoggingTensorHook,
    MonitoredLoop,
    Saver,
    StopIfNoDecreaseHook,
    Variables,
    latest_checkpoint,
    load_weights,
    running_mean,
)

EPOCHS, ITEMS, BATCH = 12, 11, 2
BATCHES = math.ceil(ITEMS / BATCH)
SAVERS = {"epochs": {"every_n_epochs": 1}, "steps": {"every_n_steps": 4}, "both": {"every_n_steps": BATCHES}}


class Moments:
    """The moments of a training run, counted.

    In some of them, ``copied``, its folder is copied, so that the copy is what a kill leaves in this moment. In one of
    them, ``kill_at``, the process is killed.
    """

    def __init__(self, folder: str, copied: Container[int] = (), kill_at: int = 0) -> None:
        self.folder, self.copied, self.kill_at = folder, copied, kill_at
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        if self.count in self.copied:
            copy_folder(self.folder, copy_of(self.folder, self.count))
            print(f"COPIED {self.count}")
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: str,
    seed: int,
    saves: str,
    leaves: bool,
    copied: Container[int] = (),
    kill_at: int = 0,
    kill_after_secs: float = 0.0,
) -> None:
    """Train from the newest checkpoint in ``folder`` to the end, print a line for each epoch, and the final bits.

    With ``leaves``, the script leaves the inner loop by ``break`` in its last batch.
    """
    moment = Moments(folder, copied, kill_at)
    if kill_after_secs:
        timer = threading.Timer(kill_after_secs, os.kill, [os.getpid(), signal.SIGKILL])
        timer.daemon = True
        timer.start()
    torch.manual_seed(1 if latest_checkpoint(folder) is None else seed)  # another one: only the checkpoint can help
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    inputs = torch.arange(ITEMS * 3, dtype=torch.float32).reshape(ITEMS, 3) / ITEMS
    loader: Any = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=BATCH, shuffle=True
    )
    variables = Variables(best=math.inf, seen=0)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        moment()
        optimizer.zero_grad()
        loss: torch.Tensor = (model(inputs) - targets).square().mean()
        loss.backward()
        moment()
        optimizer.step()
        return loss.detach()

    def evaluate(model: nn.Module) -> dict[str, torch.Tensor]:
        moment()
        error = (model(inputs) - inputs.sum(dim=1, keepdim=True)).abs().mean() + torch.rand(()) / 10
        moment()
        return {"val": error}

    def line(values: Any) -> str:
        return f"LINE mean {values['epoch']} {float(values['mean'])!r}"

    saver = Saver()
    saver.disk = DiskOfMoments(lambda _: moment())
    evaluation = EvaluationHook(evaluate, every_n_epochs=1, name="validation")
    hooks = [
        LoggingTensorHook({"epoch": "epoch", "mean": running_mean("loss")}, every_n_epochs=1, formatter=line),
        evaluation,
        StopIfNoDecreaseHook(evaluation["val"], 2 * BATCHES, every_n_epochs=1),
        BestCheckpointHook(folder, evaluation["val"], mode="min", every_n_epochs=1),
        CheckpointSaverHook(folder, saver=saver, **SAVERS[saves]),  # type: ignore[arg-type]
    ]
    state: dict[str, Any] = {"scheduler": scheduler, "variables": variables}
    with MonitoredLoop(step, model, optimizer, hooks=hooks, state=state, checkpoint_dir=folder) as loop:
        for epoch in loop.until_stop(range(EPOCHS)):
            for i, (batch, targets) in loop.enumerate(loader):
                loop.run(batch, targets)
                variables.seen += len(batch)
                if leaves and i == BATCHES - 1:
                    break
            moment()
            value = evaluation.values["val"]
            scheduler.step(value)
            moment()
            variables.best = min(variables.best, value)
            lr = optimizer.param_groups[0]["lr"]
            print(f"LINE {epoch} {loop.epoch} {loop.batch} {value!r} {variables.best!r} {variables.seen} {lr!r}")
            moment()
    model_of_best = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    load_weights(f"{folder}/best", model_of_best)
    bits = [*model.parameters(), *(each["momentum_buffer"] for each in optimizer.state.values())]
    bits += [*model_of_best.parameters(), torch.get_rng_state()]
    digest = hashlib.sha256(b"".join(bytes(str(each.tolist()), "ascii") for each in bits)).hexdigest()
    print(f"END {moment.count} {loop.global_step} {loop.stop_reason} {variables.best!r} {digest}")


def copy_of(folder: str, moment: int) -> str:
    return f"{folder}-{moment}"


def train_all(folders: list[str], saves: str, leaves: bool, copied: list[list[int]]) -> None:
    """Train in each folder, one after the other, with a seed of its own, and print its number before its lines."""
    for number, (folder, of_folder) in enumerate(zip(folders, copied, strict=True)):
        print(f"BEGIN {number}")
        train(folder, 2 + number, saves, leaves, of_folder)


def attempt(function: Callable[..., None], *arguments: Any) -> tuple[int | None, list[str]]:
    """Call the function, which trains, in a process of its own, and return its exit code and its lines."""
    ended = processes.call(function, *arguments, ignored=("Detected call of `lr_scheduler.step()`",))
    assert ended.code in (0, -signal.SIGKILL), ended.output
    found = (re.search("(LINE|END|COPIED|BEGIN) .*", text) for text in ended.output.splitlines())
    return ended.code, [match[0] for match in found if match]


def result(lines: list[str]) -> str:
    """Return what a training run ended with, without the number of its moments."""
    return lines[-1].split(" ", 2)[2]


def check(folder: Path, saves: str, leaves: bool, copies: int, seed: int) -> None:
    """Resume the script from what a kill leaves in ``copies`` moments, and from what one leaves in a resumed one."""
    code, expected = attempt(train, str(folder / "whole"), 1, saves, leaves)
    assert code == 0
    whole, moments = expected[:-1], int(expected[-1].split()[1])
    rng = random.Random(seed)
    said: dict[str, list[str]] = {str(folder / "0"): []}  # before the kill, by the folder
    for generation in range(3):
        drawn = [sorted({rng.randint(1, rng.choice([20, moments])) for _ in range(copies)})] if not generation else []
        drawn = drawn or [[rng.randint(1, 40)] if generation == 1 else [] for _ in said]
        code, printed = attempt(train_all, [*said], saves, leaves, drawn)
        assert code == 0
        parts = "\n".join(printed).split("BEGIN ")[1:]
        following = {}
        for (path, before), part in zip(said.items(), parts, strict=True):
            lines, now = part.splitlines()[1:], [*before]
            for line in lines:
                if line.startswith("COPIED"):
                    following[copy_of(path, int(line.split()[1]))] = [*now]
                elif line.startswith("LINE"):
                    assert line in whole, (path, line, expected)
                    now.append(line)
            assert set(now) == set(whole), path
            assert result(lines) == result(expected), path
        said = following
        assert said or generation == 2


def kill(folder: Path, saves: str, kills: int, seed: int, by_clock: bool = False) -> None:
    """Kill the script ``kills`` times, at drawn moments or ``by_clock``, and compare it with one that is not killed."""
    code, expected = attempt(train, str(folder / "whole"), 1, saves, False)
    moments = int(expected[-1].split()[1])
    rng = random.Random(seed)
    seen: set[str] = set()
    killed = 0
    for number in range(kills + 1):
        kill_at = 0 if by_clock or number == kills else rng.randint(1, rng.choice([20, moments // (2 * kills)]))
        kill_after = rng.random() * 0.2 if by_clock and number < kills else 0.0
        code, lines = attempt(train, str(folder / "parts"), 2 + number, saves, False, (), kill_at, kill_after)
        assert {line for line in lines if line.startswith("LINE")} <= set(expected), (number, lines, expected)
        seen |= set(lines)
        killed += code == -signal.SIGKILL
    assert killed == kills or (by_clock and killed)  # a time may come after the end
    assert code == 0
    assert result(lines) == result(expected)
    assert {line for line in seen if line.startswith("LINE")} == set(expected[:-1])


def test_the_usual_script_resumes_exactly_from_what_a_kill_leaves_in_some_moments(tmp_path: Path) -> None:
    check(tmp_path, "epochs", leaves=False, copies=4, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "leaves"), shared([("epochs", True), ("steps", True), ("both", False)], 3))
def test_the_usual_script_resumes_exactly_from_what_a_kill_leaves_in_many_moments(
    tmp_path: Path, saves: str, leaves: bool
) -> None:
    check(tmp_path, saves, leaves, copies=10, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("by_clock", [False, True], ids=["moments", "times"])
def test_the_usual_script_that_is_killed_three_times(tmp_path: Path, by_clock: bool) -> None:
    kill(tmp_path, "both", kills=3, seed=3, by_clock=by_clock)


# -- examples/usual.py ------------------------------------------------------------------------------------------------

PLACES = {  # where a signal arrives: in a call of one of these functions
    "anywhere": None,
    "in the validation": "main.<locals>.validate",
    "after the inner loop": "ReduceLROnPlateau.step",
    "while saving": "Agenda.make_item_calls",  # by both savers, one after the other
}


class SignalAt:
    """A profiler that sends a signal to its own process when an event of a place is the one with a given number.

    The events are the beginnings and ends of all calls, also of functions in C, such as those that write a file.
    """

    def __init__(self, place: str = "", number: int = 0, number_of_signal: int = 0) -> None:
        self._target, self._signal = (place, number), number_of_signal
        self.counts = dict.fromkeys(PLACES, 0)
        self._places = {function: place for place, function in PLACES.items()}
        self._inside: tuple[str, FrameType] | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self._count("anywhere")
        if self._inside is None and event == "call" and frame.f_code.co_qualname in self._places:
            self._inside = self._places[frame.f_code.co_qualname], frame
        if self._inside is not None:
            self._count(self._inside[0])
            if event == "return" and frame is self._inside[1]:
                self._inside = None

    def _count(self, place: str) -> None:
        self.counts[place] = count = self.counts[place] + 1
        if count == self._target[1] and place == self._target[0]:
            os.kill(os.getpid(), self._signal)


def run_example(folder: str, *signal_at: Any) -> None:
    """Run ``examples/usual.py`` for a few epochs, with a signal, and print a digest of what it has trained."""
    script = example("usual")
    vars(script).update(EPOCHS=12, PATIENCE=3)
    profiler = SignalAt(*signal_at)
    sys.setprofile(profiler)
    best_model = script.main(folder)
    sys.setprofile(None)
    path = latest_checkpoint(folder)
    assert path is not None
    saved = torch.load(f"{path}/state.pt", weights_only=True)
    tensors = [*best_model.state_dict().values(), *saved["model"].values(), torch.get_rng_state()]
    tensors += [value for of_parameter in saved["optimizer"]["state"].values() for value in of_parameter.values()]
    bits = "".join(str(each.tolist()) for each in tensors) + str(saved["scheduler"])
    print(f"END {hashlib.sha256(bits.encode()).hexdigest()}")
    print(f"COUNTS {profiler.counts}")


class Example(NamedTuple):
    """What a process with the example printed, and its exit code."""

    code: int | None
    lines: list[str]
    digest: str | None
    output: str


def example_in_process(folder: Path, *signal_at: Any) -> Example:
    ended = processes.call(run_example, str(folder), *signal_at, ignored=("Detected call of `lr_scheduler.step()`",))
    lines = re.findall("^INFO:torchhooks:(epoch .*)$", ended.output, re.MULTILINE)
    digest = re.search("^END (.*)$", ended.output, re.MULTILINE)
    return Example(ended.code, lines, digest and digest[1], ended.output)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Example:
    """The example without a signal."""
    import_or_skip("tqdm")
    whole = example_in_process(tmp_path_factory.mktemp("whole"))
    assert whole.code == 0, whole.output
    return whole


def check_example(folder: Path, whole: Example, place: str, number_of_signal: int, times: int, seed: int) -> None:
    """Send the example the signal ``times`` times, each time in a process that resumes, and compare it with ``whole``.

    When it is finished, it is begun again in another folder. In the end, it is finished.
    """
    counts = ast.literal_eval(re.findall("^COUNTS (.*)$", whole.output, re.MULTILINE)[0])
    rng = random.Random(seed)
    sent = reported = 0
    is_finished = True
    while sent < times or not is_finished:
        if is_finished:
            run, reported = folder / str(sent), 0
        number = rng.randint(1, counts[place] // 6) if sent < times else 0
        ended = example_in_process(run, place, number, number_of_signal)
        context = f"seed {seed}, process {sent + 1}, {number} of {place!r}:\n{ended.output}"
        assert ended.code in (0, -number_of_signal), context
        # The line of an epoch whose checkpoint was not written is reported again, and no other.
        firsts = (reported - 1, reported) if number_of_signal == signal.SIGKILL else (reported,)
        assert ended.lines in [whole.lines[max(first, 0) :][: len(ended.lines)] for first in firsts], context
        reported = whole.lines.index(ended.lines[-1]) + 1 if ended.lines else reported
        is_finished = ended.code == 0
        if is_finished:
            assert (reported, ended.digest) == (len(whole.lines), whole.digest), context
        else:
            sent += 1


@pytest.mark.release
@pytest.mark.parametrize(
    ("number_of_signal", "place"),
    [(signal.SIGKILL, "while saving"), (signal.SIGTERM, "anywhere")],
)
def test_the_example_that_gets_a_few_signals(tmp_path: Path, whole: Example, number_of_signal: int, place: str) -> None:
    check_example(tmp_path, whole, place, number_of_signal, times=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("place", shared(PLACES, 4))
def test_the_example_that_is_killed_at_random_moments(tmp_path: Path, whole: Example, place: str) -> None:
    check_example(tmp_path, whole, place, signal.SIGKILL, times=5, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("place", shared(PLACES, 4))
def test_the_example_that_is_terminated_at_random_moments(tmp_path: Path, whole: Example, place: str) -> None:
    check_example(tmp_path, whole, place, signal.SIGTERM, times=3, seed=3)
