"""The lines of a LedgerHook, what a resume says of them, and ``python -m torchhooks diff``."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.accelerators import DEVICE, keep_busy, no_waits
from support.processes import call
from support.rank_processes import run_ranks
from support.rank_threads import Hub, ThreadRanks, in_threads
from support.schemas import answer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchhooks import AbortedError, CheckpointSaverHook, LedgerHook, MonitoredLoop, Saver
from torchhooks.__main__ import main
from torchhooks.common.digests import WIDTH
from torchhooks.testing import log_lines
from torchhooks.tools.ledger.hook import environment
from torchhooks.tools.ledger.lines import NO_GRADIENT, Entry, read_ledgers

EVERYTHING = ("inputs", "random", "outputs", "gradients", "parameters", "optimizers", "state")


def train(
    folder: Path,
    steps: int = 12,
    killed_in: int | None = None,
    flipped: tuple[str, int, int] | None = None,
    rank: int = 0,
    **options: Any,
) -> None:
    """Train a small model with dropout, with one bit of one quantity ``flipped`` in one run."""
    torch.manual_seed(rank)
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    if torch.distributed.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    examples = [torch.randn(2, 3) for _ in range(5)]
    made = 0

    def step(inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal made
        made += 1
        if made == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        quantity, run, bit = flipped or ("", 0, 0)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        if made == run and quantity == "gradients":
            flip(next(iter(model.parameters())).grad, bit)
        optimizer.step()
        if made == run and quantity == "parameters":
            flip(next(iter(model.parameters())), bit)
        if made == run and quantity == "outputs":
            loss = loss.detach().clone()
            flip(loss, bit)
        return {"loss": loss}

    hooks = [LedgerHook(folder, what=EVERYTHING), CheckpointSaverHook(folder, every_n_steps=4)]
    with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=folder, **options) as loop:
        for _ in loop.until_stop(range(steps // 5 + 1)):
            for number, inputs in loop.enumerate(examples):
                if loop.session.total_runs == steps:
                    loop.request_stop()
                    break
                if flipped is not None and flipped[0] == "item" and flipped[1] == made + 1:
                    inputs = inputs.clone()
                    flip(inputs, flipped[2])
                assert number == loop.batch
                loop.run(inputs)


def flip(tensor: Any, bit: int) -> None:
    """Change one bit of the first element."""
    number = tensor.detach().flatten()[0].item()
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    (changed,) = struct.unpack("<f", struct.pack("<I", bits ^ (1 << bit)))
    with torch.no_grad():
        tensor.flatten()[0] = changed


def entries(folder: Path, rank: int = 0) -> list[Entry]:
    return [*read_ledgers(folder)[rank]]


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main([*map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out + err


# -- lines ------------------------------------------------------------------------------------------------------------


def test_each_run_has_a_line_with_what_was_asked_for(tmp_path: Path) -> None:
    train(tmp_path, 7)
    found = entries(tmp_path)
    assert [(each.run, each.step, each.epoch, each.batch) for each in found] == [
        *((number + 1, number + 1, 0, number) for number in range(5)),
        *((6, 6, 1, 0), (7, 7, 1, 1)),
    ]
    digests = found[0].digests
    assert [*digests] == ["item", "arguments", "random", "outputs", "gradients", "parameters", "optimizers", "state"]
    assert len(digests["parameters"]) == len(digests["gradients"]) == 4 * WIDTH
    assert found[0].values.keys() == {"loss"}
    assert [each.drawn for each in found[:2]] == [[], ["torch"]], "the first step has drawn"
    (environment,) = read_ledgers(tmp_path)[0].environments
    assert environment["torch"] == torch.__version__


def test_a_period_leaves_out_lines(tmp_path: Path) -> None:
    with MonitoredLoop(lambda: None, hooks=[LedgerHook(tmp_path, 3, what="random")]) as loop:
        for _ in range(10):
            loop.run()
    assert [(each.run, [*each.digests]) for each in entries(tmp_path)] == [(run, ["random"]) for run in (3, 6, 9)]


def test_a_generator_that_nobody_draws_from_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, draws in {"one": False, "other": False, "drawn": True}.items():
        random.seed(name)
        np.random.seed(len(name))
        with MonitoredLoop(np.random.random if draws else bool, hooks=[LedgerHook(tmp_path / name)]) as loop:
            loop.run()
            loop.run()
    assert printed(capsys, "diff", tmp_path / "one", tmp_path / "other")[0] == 0
    code, text = printed(capsys, "diff", tmp_path / "one", tmp_path / "drawn")
    assert code == 1
    assert "random DIFFER: numpy" not in text.partition("first differs  step 2")[0]


def test_a_torn_line_is_passed_over_and_never_rewritten(tmp_path: Path) -> None:
    train(tmp_path, 4)
    path = tmp_path / "ledger" / "rank-0.jsonl"
    whole = path.read_bytes()
    torn = whole[:-30]
    path.write_bytes(torn)
    assert [each.run for each in entries(tmp_path)] == [1, 2, 3]
    train(tmp_path, 6)
    assert path.read_bytes().startswith(torn + b"\n")
    assert [each.run for each in entries(tmp_path)] == [1, 2, 3, 5, 6]


def unreadable() -> torch.Tensor:
    """Return a tensor of which no digest can be made: its memory is gone."""
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_an_argument_that_cannot_be_read_has_no_digest(tmp_path: Path) -> None:
    with log_lines() as lines, MonitoredLoop(lambda item: None, hooks=[LedgerHook(tmp_path)]) as loop:
        loop.run(unreadable())
        loop.run(unreadable())
    assert [*entries(tmp_path)[0].digests] == ["random", "outputs"]
    (said,) = [text for _, text in lines if "no digest" in text]
    assert said.startswith("the ledger has no digest of a value in arguments: RuntimeError: a tensor of shape (2,)")


class OddState:
    """A part of the loop's state that no digest can be made of."""

    def state_dict(self) -> dict[str, Any]:
        return {"lazy": unreadable()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Loader(OddState):
    """A loader, which may start its workers to tell its state."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_each_part_has_what_can_be_read_of_it(tmp_path: Path) -> None:
    head = nn.Linear(2, 1)
    head.requires_grad_(False)
    head.weight.requires_grad_(True)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)

    def step(inputs: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        optimizer.zero_grad()
        loss = head(inputs).sum() * scale
        loss.backward()
        optimizer.step()
        return {"loss": loss, "each": inputs, "name": "a", "done": True}

    hooks = [LedgerHook(tmp_path, what=EVERYTHING)]
    state: dict[str, Any] = {"head": head, "sgd": optimizer, "odd": OddState(), "loader": Loader()}
    with MonitoredLoop(step, hooks=hooks, state=state) as loop:
        loop.run(torch.ones(1, 2), scale=2.0)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})  # which has no name yet
        loop.run(torch.ones(1, 2))
    first, second = entries(tmp_path)
    assert first.values == {"loss": pytest.approx(first.values["loss"])}
    assert first.digests["arguments"] != second.digests["arguments"]
    assert [*first.digests["optimizers"]] == ["sgd"]
    assert [*first.digests["state"]] == ["head"]
    assert first.digests["gradients"].endswith(NO_GRADIENT)
    assert not first.digests["gradients"].startswith(NO_GRADIENT)
    assert read_ledgers(tmp_path)[0].names["gradients"] == ["head.weight", "head.bias"]


def test_another_generator_of_numpy_is_read_too(tmp_path: Path) -> None:
    ours = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        with MonitoredLoop(np.random.random, hooks=[LedgerHook(tmp_path, what="random")]) as loop:
            loop.run()
            loop.run()
    finally:
        np.random.set_bit_generator(ours)  # type: ignore[attr-defined]
    assert [each.drawn for each in entries(tmp_path)] == [[], ["numpy"]]


def test_a_script_in_no_folder_is_of_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/nowhere/<stdin>"])
    found = environment(torch.device("cpu"))
    assert (found["commit"], found["dirty"]) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"what": ["weights"]}, "'weights' is none of"), ({"output_dir": 3}, "output_dir=3: .* folder")],
)
def test_a_wrong_argument_is_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        LedgerHook(**arguments)


def test_without_a_folder_it_is_the_one_of_the_loop(tmp_path: Path) -> None:
    with MonitoredLoop(lambda: None, hooks=[LedgerHook()], checkpoint_dir=tmp_path) as loop:
        loop.run()
    assert len(entries(tmp_path)) == 1
    with pytest.raises(ValueError, match="give LedgerHook"):
        MonitoredLoop(lambda: None, hooks=[LedgerHook()])


# -- resuming ---------------------------------------------------------------------------------------------------------


def test_a_resume_says_that_the_runs_made_again_have_the_same_bits(tmp_path: Path) -> None:
    assert call(train, tmp_path / "killed", 12, 8).code == -signal.SIGKILL
    with log_lines() as lines:
        train(tmp_path / "killed", 12)
    same = "made again with the same bits: item, arguments, random states, outputs, gradients, parameters, optimizers"
    assert f"{same}, state (3 runs)" in [text for _, text in lines]
    train(tmp_path / "whole", 12)
    killed, whole = entries(tmp_path / "killed"), entries(tmp_path / "whole")
    for each in (*killed, *whole):
        each.process, each.drawn = 0, []
    assert killed == whole, "all but the process is the same, in the last line of each run"


def test_a_resume_that_ends_before_it_has_made_all_of_them_again_says_how_many_it_has(tmp_path: Path) -> None:
    assert call(train, tmp_path, 12, 8).code == -signal.SIGKILL
    with log_lines() as lines:
        train(tmp_path, 6)
    assert any("same bits" in text and "(2 runs)" in text for _, text in lines)


def test_a_resume_names_the_first_run_that_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(train, tmp_path, 12, 8).code == -signal.SIGKILL
    monkeypatch.setattr(sys, "argv", read_ledgers(tmp_path)[0].environments[0]["argv"])
    with log_lines() as lines:
        train(tmp_path, 12, flipped=("parameters", 2, 3))
    (warning,) = [text for level, text in lines if level == "WARNING"]
    assert re.match(r"run 6 \(epoch 1, item 0\) is not what it was before the restart: .*parameters DIFFER", warning)
    assert "DIFFER: 0.weight. The gradients are the same: look for" in warning


def test_a_resume_with_other_arguments_names_them_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(train, tmp_path, 12, 8).code == -signal.SIGKILL
    monkeypatch.setattr(sys, "argv", [*read_ledgers(tmp_path)[0].environments[0]["argv"], "--lr", "0.2"])
    with log_lines() as lines:
        train(tmp_path, 12, flipped=("parameters", 2, 3))
    (warning,) = [text for level, text in lines if level == "WARNING"]
    assert "DIFFER: 0.weight. argv: nothing / --lr 0.2. If that is meant to make no difference: the grad" in warning


def test_runs_that_are_made_again_after_a_recovery_are_compared(tmp_path: Path) -> None:
    calls = []

    def step() -> None:
        calls.append(1)
        if len(calls) == 6:
            raise AbortedError

    hooks = [LedgerHook(tmp_path), CheckpointSaverHook(tmp_path, every_n_steps=3, saver=Saver())]
    with log_lines() as lines, MonitoredLoop(step, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        while loop.global_step < 8:
            loop.run()
    (same,) = [text for _, text in lines if "same bits" in text]
    assert same == "made again with the same bits: arguments, random states, outputs (2 runs)"


def test_what_was_not_compared_is_named(tmp_path: Path) -> None:
    def train(steps: int, **options: Any) -> list[str]:
        model, head = nn.Linear(1, 1), nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        hooks = [LedgerHook(tmp_path, **options), CheckpointSaverHook(tmp_path, every_n_steps=4)]
        with log_lines() as lines, suppress(KeyError):
            arguments: Any = {"hooks": hooks, "state": {"head": head}, "checkpoint_dir": tmp_path}
            with MonitoredLoop(float, model, optimizer, **arguments) as loop:
                for number in loop.until_stop(range(8)):
                    loop.run(number)
                    if number == steps:
                        raise KeyError
        return [text.partition(": ")[2] for _, text in lines if "same bits" in text]

    train(5)
    rest = "random states, outputs, parameters"
    assert train(9, what=["outputs"]) == [
        "outputs (2 runs); not compared: item, arguments, random states, gradients, parameters, optimizers, state"
    ], "one process has written fewer of them"
    shutil.rmtree(tmp_path)
    train(5)
    assert train(9) == [f"item, arguments, {rest} (2 runs); not compared: gradients, optimizers, state"]


def test_parameters_are_digested_if_nobody_says_what_and_the_model_is_small(tmp_path: Path) -> None:
    small, large, lazy = nn.Linear(1, 1), nn.Linear(1025, 1024), nn.LazyLinear(1)
    for model, has in ((small, True), (large, False), (lazy, False)):
        for what in (None, ["outputs"]):
            folder = tmp_path / f"{type(model).__name__}-{has}-{what}"
            with MonitoredLoop(lambda: None, model, hooks=[LedgerHook(folder, what=what)]) as loop:
                loop.run()
            assert ("parameters" in entries(folder)[0].digests) == (has and what is None)


def of_format_1(folder: Path) -> None:
    """Make the lines of a ledger those of the format before."""
    path = folder / "ledger" / "rank-0.jsonl"
    lines = []
    for line in map(json.loads, path.read_text().splitlines()):
        if "ledger" in line:
            line["ledger"] = 1
        line.pop("format", None)
        lines.append(json.dumps(line))
    path.write_text("".join(f"{line}\n" for line in lines))


def test_lines_of_the_format_before_are_compared_with_nothing(tmp_path: Path) -> None:
    assert call(train, tmp_path, 12, 8).code == -signal.SIGKILL
    of_format_1(tmp_path)
    with log_lines() as lines:
        train(tmp_path, 12)
    said = [text for _, text in lines if "ledger" in text or "same bits" in text or "is not what" in text]
    assert said == [
        "the ledger has lines of an older format of 3 runs that are made again: nothing is compared with them"
    ]
    assert [each.run for each in entries(tmp_path)] == [*range(5, 13)]


def test_diff_leaves_out_lines_of_the_format_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "a", 9)
    assert call(train, tmp_path / "b", 9, 8).code == -signal.SIGKILL
    of_format_1(tmp_path / "b")
    code, text = printed(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert (code, "has lines of format 1 only" in text) == (2, True)
    train(tmp_path / "b", 9)
    code, text = printed(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert "left out       7 lines of an older format, which have other digests for the same values" in text
    assert answer("diff", printed(capsys, "diff", tmp_path / "a", tmp_path / "b", "--json")[1])["old_lines"] == 7


def test_of_several_ranks_the_chief_says_that_the_runs_have_the_same_bits(tmp_path: Path) -> None:
    def train(ranks: ThreadRanks, hub: Hub) -> int:
        hooks = [LedgerHook(tmp_path, what="outputs"), CheckpointSaverHook(tmp_path, every_n_steps=4)]
        with MonitoredLoop(float, hooks=hooks, checkpoint_dir=tmp_path, ranks=ranks) as loop:
            for number in loop.until_stop(range(8)):
                loop.run(number)
                if number == fails_in[0]:
                    both_are_here.wait(60)  # or the failure of one would end the other in an earlier run
                    raise KeyError("of the script")
        return loop.global_step

    fails_in, both_are_here = [5], threading.Barrier(2)
    in_threads(2, train)
    fails_in[0] = 9
    with log_lines() as lines:
        assert in_threads(2, train) == [8, 8]
    (same,) = [text for _, text in lines if "same bits" in text]
    assert "outputs (2 runs)" in same


# -- diff -------------------------------------------------------------------------------------------------------------


def test_diff_says_where_two_training_runs_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "a", 9)
    train(tmp_path / "same", 12)
    train(tmp_path / "b", 9, flipped=("outputs", 7, 4))
    code, text = printed(capsys, "diff", tmp_path / "a", tmp_path / "same")
    assert (code, text) == (
        0,
        "environment    the same\n"
        "the same bits  9 runs: item, arguments, random, outputs, gradients, parameters, optimizers, state\n"
        "not in both    0 runs of the first, 3 of the second\n",
    )
    code, text = printed(capsys, "diff", tmp_path / "a", tmp_path / "same", "--json")
    found = answer("diff", text)
    assert (code, found["same"], found["difference"], found["only_in_other"]) == (0, True, None, 3)
    code, text = printed(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "first differs  step 7 (epoch 1, item 1)" in text
    assert re.search(r"item same · arguments same · random same · outputs DIFFER: loss [\d.]+ / [\d.]+\n", text)
    assert printed(capsys, "diff", tmp_path / "a", tmp_path / "b", "--rtol", "1e-3")[0] == 0
    code, text = printed(capsys, "diff", tmp_path / "a", tmp_path / "b", "--json")
    found = answer("diff", text)
    assert (code, found["same"], found["difference"]["run"], found["difference"]["quantity"]) == (
        1,
        False,
        7,
        "outputs",
    )
    code, text = printed(capsys, "diff", tmp_path / "a", tmp_path / "none")
    assert (code, "has no ledger" in text) == (2, True)
    code, text = printed(capsys, "diff", tmp_path / "a", tmp_path / "none", "--json")
    assert (code, "has no ledger" in answer("diff", text)["error"]) == (2, True)


MORE = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("outputs", "gradients")]


@pytest.mark.parametrize("quantity", ["item", "parameters", *MORE])
def test_every_flipped_bit_is_located(quantity: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "a", 6)
    draw = random.Random(0)
    for number in range(8):
        run, bit = draw.randint(1, 6), draw.randint(0, 22)
        train(tmp_path / str(number), 6, flipped=(quantity, run, bit))
        code, text = printed(capsys, "diff", tmp_path / "a", tmp_path / str(number), "--json")
        found = answer("diff", text)["difference"]
        expected = "arguments" if quantity == "item" else quantity  # the body gives the step another tensor
        assert (code, found["run"], found["quantity"]) == (1, run, expected)
        assert found["parts"] == ({"arguments": [], "outputs": ["loss"]}.get(expected, ["0.weight"]))


def _train_rank(rank: int, folder: str, flipped: tuple[str, int, int] | None) -> None:
    train(Path(folder), 6, flipped=flipped if rank == 1 else None)


@pytest.mark.ranks
def test_diff_names_the_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, flipped in {"a": None, "b": ("outputs", 4, 5)}.items():
        (tmp_path / f"{name}-files").mkdir()
        ended = run_ranks(tmp_path / f"{name}-files", 2, _train_rank, str(tmp_path / name), flipped)
        assert [each.code for each in ended] == [0, 0], ended
    code, text = printed(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "first differs  step 4 (epoch 0, item 3), rank 1" in text
    train(tmp_path / "alone", 6)
    assert printed(capsys, "diff", tmp_path / "a", tmp_path / "alone")[0] == 2


def test_of_several_ranks_the_one_that_differs_first_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledgers = {}
    for run in (0, 2, 4):
        train(tmp_path / "training", 6, flipped=("outputs", run, 5))
        ledgers[run] = (tmp_path / "training/ledger/rank-0.jsonl").read_bytes()
        shutil.rmtree(tmp_path / "training")
    for name, runs in {"same": (0, 0), "b": (4, 2), "c": (2, 4)}.items():
        (tmp_path / name).mkdir()
        for rank, run in enumerate(runs):
            (tmp_path / name / f"rank-{rank}.jsonl").write_bytes(ledgers[run])
    for name, rank in {"b": 1, "c": 0}.items():
        code, text = printed(capsys, "diff", tmp_path / "same", tmp_path / name)
        assert (code, f"first differs  step 2 (epoch 0, item 1), rank {rank}" in text) == (1, True)


@pytest.mark.parametrize(
    ("of_other", "message"),
    [
        ('{"ledger": 3}', "has format 3, "),
        ('{"ledger": "x"}', "has format 'x', "),
        ('{"ledger": 2}\n{"run": 1, "of_a_later_version": true}', "have no run in common"),
    ],
)
def test_what_cannot_be_compared_is_an_error(
    of_other: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"a": '{"ledger": 2}', "b": of_other}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.jsonl").write_text(text + "\n")
    code, text = printed(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert (code, message in text) == (2, True)


# -- a device ---------------------------------------------------------------------------------------------------------


@pytest.mark.accelerator
def test_digests_of_a_device_are_read_back_without_a_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, last in {"a": 1.0, "same": 1.0, "b": 2.0}.items():
        model = nn.Linear(3, 1).to(DEVICE)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        values = [torch.full((2, 3), 1.0 if number < 7 else last, device=DEVICE) for number in range(8)]

        def step(inputs: torch.Tensor, model: nn.Module = model) -> dict[str, torch.Tensor]:
            keep_busy(0.01)
            return {"loss": model(inputs).sum()}

        hook = LedgerHook(tmp_path / name, what=EVERYTHING)
        with MonitoredLoop(step, model, hooks=[hook]) as loop:
            loop.run(values[0])
            with no_waits():
                for inputs in values[1:]:
                    loop.run(inputs)
    assert printed(capsys, "diff", tmp_path / "a", tmp_path / "same")[0] == 0
    code, text = printed(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert (code, "first differs  step 8" in text, "arguments DIFFER" in text) == (1, True, True)


@pytest.mark.parametrize("by_name", [True, False])
def test_gradients_of_a_closure_are_those_that_it_computes(by_name: bool, tmp_path: Path) -> None:
    """What an earlier run has left is dropped by the closure, and no checkpoint has it."""
    digests = []
    for name, left in (("a", 1.0), ("b", 2.0), ("c", None)):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        model.weight.grad = None if left is None else torch.full_like(model.weight, left)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            return loss

        def step(optimizer: torch.optim.Optimizer = optimizer, closure: Any = closure) -> Any:
            return optimizer.step(closure=closure) if by_name else optimizer.step(closure)

        with MonitoredLoop(step, model, optimizer, hooks=[LedgerHook(tmp_path / name, what="gradients")]) as loop:
            loop.run()
        digests += [entry.digests["gradients"] for entry in entries(tmp_path / name)]
    assert digests[0] == digests[1] == digests[2]
    assert NO_GRADIENT not in digests[0]
