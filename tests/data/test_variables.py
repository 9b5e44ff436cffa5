"""Variables: what they accept, what a checkpoint has of them, and what a restore leaves the script with."""

from __future__ import annotations

import copy
import functools
import math
import operator
import os
import pickle
import random
import re
import signal
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.accelerators import DEVICE
from support.rank_threads import Hub, ThreadRanks, in_threads
from support.scripts import start
from torch import nn

from torchhooks import (
    AbortedError,
    CheckpointError,
    CheckpointSaverHook,
    MonitoredLoop,
    Saver,
    Session,
    StopAtStepHook,
    Variables,
)
from torchhooks.testing import RecordingHook, log_lines

Lines = list[tuple[str, str]]


def save(folder: Path, variables: Variables, *, async_save: bool = False) -> str:
    saver = Saver(async_save=async_save)
    path = saver.save(Session(state={"vars": variables}), folder / "model.ckpt", 1)
    saver.close()
    return path


def restore(path: str, variables: Variables) -> Variables:
    Saver().restore(Session(state={"vars": variables}), path)
    return variables


def bits(value: Any) -> Any:
    """Return ``value`` in a form in which two values are equal only if they are of the same types, to the bit."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.shape, value.stride(), value.tolist()
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.shape, value.strides, value.tobytes("A")
    if isinstance(value, dict):
        return "dict", [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [bits(item) for item in value]
    if isinstance(value, set):
        return "set", sorted(map(repr, value))
    return type(value), repr(value)


# -- which values ------------------------------------------------------------------------------------------------------

PLAIN: list[Any] = [
    None,
    True,
    -3,
    2**1999,
    0.1,
    math.nan,
    -0.0,
    math.inf,
    1 + 2j,
    "epoch",
    b"\x00\xff",
    [],
    (1, [2.0, {"a": (None,)}]),
    {"b": 1, "a": 2},
    {1: "one", (2, "x"): "pair", None: 0},
    {1, 2, 3},
    torch.arange(6).reshape(2, 3).t(),
    (torch.zeros(2), [torch.ones(1, dtype=torch.bfloat16)]),
    torch.Size([1, 2]),
    torch.float16,
    torch.device("cpu"),
]


@pytest.mark.parametrize("value", PLAIN, ids=[shown[:40] for shown in map(repr, PLAIN)])
def test_a_variable_comes_back_with_the_same_type_and_bits(value: Any, tmp_path: Path) -> None:
    path = save(tmp_path, Variables(value=value))
    assert bits(restore(path, Variables()).value) == bits(value)


def test_a_number_of_numpy_comes_back_as_one_of_python(tmp_path: Path) -> None:
    path = save(tmp_path, Variables(best=np.float32(0.25), counts=[np.int64(3)]))
    assert bits(vars(restore(path, Variables()))) == bits({"best": 0.25, "counts": [3]})


def test_a_checkpoint_is_readable_without_torchhooks(tmp_path: Path) -> None:
    path = save(tmp_path, Variables(best=0.25, hidden=torch.ones(2), seen={3}, dice=random.Random(0), pickled=["dice"]))
    saved = torch.load(f"{path}/state.pt", weights_only=True)["vars"]
    assert saved["best"] == 0.25
    assert saved["hidden"].tolist() == [1, 1]
    assert saved["seen"] == {3}
    assert saved["_pickled"]["names"] == ["dice"]
    assert saved["_pickled"]["bytes"].dtype == torch.uint8


def test_tensors_that_share_memory_share_it_again(tmp_path: Path) -> None:
    memory = torch.zeros(4)
    found = restore(save(tmp_path, Variables(whole=memory, part=[memory[2:]])), Variables())
    found.whole[3] = 7
    assert found.part[0].tolist() == [0, 7]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (random.Random(0), "of type random.Random"),
        (deque(maxlen=100), "of type collections.deque"),
        (nn.Linear(1, 1), "of type torch.nn.modules.linear.Linear"),
        (np.zeros(2), "a NumPy array"),
        (torch.zeros(1, device="meta"), "on the meta device"),
        (2**2001, "an integer of 2002 bits"),
        (b"", "empty bytes"),
    ],
)
def test_a_value_of_any_other_type_is_refused_when_it_is_assigned(value: Any, what: str) -> None:
    variables = Variables()
    with pytest.raises(TypeError, match=rf"^the variable mine is {re.escape(what)}.*Variables\(pickled=\['mine'\]\)"):
        variables.mine = value
    with pytest.raises(TypeError, match=rf"^the variable mine\[0\]\['x'\] is {re.escape(what)}"):
        Variables(mine=[{"x": value}])
    assert repr(variables) == "Variables()"
    assert Variables(mine=value, pickled=["mine"]).mine is value


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, lambda tensor: [{"x": tensor}]], ids=["bare", "inside"])
def test_a_tensor_that_requires_a_gradient_is_refused_with_the_way_out(wrap: Callable[[Any], Any]) -> None:
    for tensor in (nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True) * 2):
        with pytest.raises(TypeError, match=r"^the variable hidden has .* requires a gradient: assign tensor\.detach"):
            Variables(hidden=wrap(tensor))
        assert Variables(hidden=wrap(tensor.detach())).hidden is not None


def test_what_is_put_into_a_variable_later_is_refused_at_the_save(tmp_path: Path) -> None:
    variables = Variables(history=[])
    variables.history.append({"when": range(3)})
    with pytest.raises(CheckpointError, match=r"vars\['history'\]\[0\]\['when'\] is of type range.*pickled"):
        save(tmp_path, variables)
    variables.history[0] = variables.history
    with pytest.raises(CheckpointError, match=r"vars\['history'\]\[0\] is part of itself"):
        save(tmp_path, variables)


@pytest.mark.parametrize("name", ["_best", "state_dict", "load_state_dict", "per_rank", "pickled"])
def test_a_name_that_the_class_uses_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^'{name}': "):
        setattr(Variables(), name, 1)
    with pytest.raises(ValueError, match=f"^'{name}': "):
        Variables(pickled=[name])


@pytest.mark.parametrize("pickled", ["envs", [3]])
def test_the_names_to_pickle_are_a_list(pickled: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a list of names, such as \['envs'\]"):
        Variables(pickled=pickled)


def test_the_names_to_pickle_may_come_from_a_generator() -> None:
    assert isinstance(Variables(dice=random.Random(0), pickled=(name for name in ["dice"])).dice, random.Random)


def test_every_other_name_can_be_used() -> None:
    variables = Variables(self=1, instance=2, name=3, optimizer="adam")
    variables.state = 4
    assert repr(variables) == "Variables(self=1, instance=2, name=3, optimizer='adam', state=4)"


def test_the_repr_can_be_pasted_back() -> None:
    text = "Variables(best=inf, hidden=None, names=['a'], pickled=['envs'])"
    assert repr(eval(text, {"Variables": Variables, "inf": math.inf})) == text


def test_a_name_that_is_not_set_is_an_attribute_error() -> None:
    variables = Variables(best=1.0)
    with pytest.raises(AttributeError, match="has no attribute 'bets'"):
        _ = variables.bets
    del variables.best
    assert not hasattr(variables, "best")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_variables_can_be_copied(copied: Callable[[Variables], Variables]) -> None:
    variables = copied(Variables(best=0.5, dice=random.Random(3), pickled=["dice"]))
    variables.best = 0.25
    assert variables.dice.random() == random.Random(3).random()


# -- pickled -----------------------------------------------------------------------------------------------------------


class Env:
    """A toy environment with a generator of its own."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.steps = rng, 0

    def step(self, action: float) -> np.ndarray[Any, Any]:
        self.steps += 1
        return self.rng.standard_normal(3) + action


def env_and_generator() -> Variables:
    rng = np.random.default_rng(0)
    return Variables(rng=rng, env=Env(rng), pickled=["env", "rng"])


def test_a_pickled_variable_continues_and_what_two_of_them_share_is_shared_again(tmp_path: Path) -> None:
    before = env_and_generator()
    before.env.step(1.0)
    path = save(tmp_path, before)
    after = restore(path, Variables(pickled=["rng", "env"]))
    assert after.env.rng is after.rng
    assert [after.env.step(0.5).tolist(), after.rng.random()] == [before.env.step(0.5).tolist(), before.rng.random()]


class Harmful:
    """Runs code when it is unpickled."""

    ran: ClassVar[list[str]] = []

    def __reduce__(self) -> Any:
        return run_harm, ("unpickled",)


def run_harm(word: str) -> None:
    Harmful.ran.append(word)


def test_nothing_is_unpickled_unless_the_script_names_it(tmp_path: Path) -> None:
    path = save(tmp_path, Variables(best=1, mine=3, harmful=Harmful(), pickled=["mine", "harmful"]))
    Harmful.ran.clear()
    torch.load(f"{path}/state.pt", weights_only=True)
    for pickled in ([], ["mine"]):
        variables = Variables(best=2, pickled=pickled)
        with pytest.raises(
            CheckpointError, match=r"harmful.* could run code.*Variables\(pickled=\['mine', 'harmful'\]"
        ):
            restore(path, variables)
        assert vars(variables) == {"best": 2}
    assert Harmful.ran == []
    assert restore(path, Variables(pickled=["harmful", "mine"])).harmful is None
    assert Harmful.ran == ["unpickled"]


def test_an_object_that_cannot_be_pickled_is_an_error(tmp_path: Path) -> None:
    variables = Variables(fine=3, items=(i for i in range(3)), pickled=["fine", "items"])
    with pytest.raises(CheckpointError, match=r"^the variables fine, items cannot be pickled: TypeError: .*generator"):
        save(tmp_path, variables)


def test_an_object_whose_class_is_gone_is_an_error_that_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, env_and_generator())
    monkeypatch.delattr(sys.modules[__name__], "Env")
    variables = Variables(best=3, pickled=["env", "rng"])
    with pytest.raises(CheckpointError, match=r"^the variables env, rng cannot be unpickled: AttributeError: "):
        restore(path, variables)
    assert vars(variables) == {"best": 3}


def test_a_variable_may_be_pickled_later_than_the_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, Variables(value=[1]))
    assert restore(path, Variables(pickled=["value"])).value == [1]


# -- what a restore does -----------------------------------------------------------------------------------------------


def test_names_that_one_side_has_not(tmp_path: Path, lines: Lines) -> None:
    path = save(tmp_path, Variables(best=0.25, later=[1]))
    variables = restore(path, Variables(best=math.inf, added=7, other=8))
    assert vars(variables) == {"best": 0.25, "later": [1], "added": 7, "other": 8}
    assert lines == [
        ("INFO", "the checkpoint has no variable 'added', 'other': the value that the script gave stays"),
    ]


def test_a_variable_that_has_the_saved_value_stays_the_object_that_it_is(tmp_path: Path) -> None:
    variables = env_and_generator()
    variables.total, variables.hidden, variables.history = 1.0, torch.tensor([math.nan, 1.0]), [1.0]
    path = save(tmp_path, variables)
    restore(path, variables)
    kept = dict(vars(variables))
    variables.total = 2.0
    restore(path, variables)
    assert variables.total == 1.0
    assert all(value is vars(variables)[name] for name, value in kept.items() if name != "total")
    variables.env.step(1.0)
    variables.hidden += 1
    restore(path, variables)
    assert variables.env is not kept["env"]
    assert variables.env.steps == 0
    assert variables.hidden[1] == 1


def test_a_dict_in_another_order_is_replaced(tmp_path: Path) -> None:
    path = save(tmp_path, Variables(ranking={"b": 1, "a": 2}))
    assert list(restore(path, Variables(ranking={"a": 2, "b": 1})).ranking) == ["b", "a"]


def test_a_restore_leaves_no_reference_to_what_was_loaded(tmp_path: Path) -> None:
    state = Variables(history=[1], hidden=torch.zeros(1)).state_dict()
    first, second = Variables(), Variables()
    for variables in (first, second):
        variables.load_state_dict(state)
        variables.history.append(2)
        variables.hidden += 1
    assert first.history == second.history == [1, 2]
    assert state["history"] == [1]
    assert state["hidden"].item() == 0


class Failing:
    """Loads nothing, and raises."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        raise OSError("the disk is gone")


@pytest.mark.parametrize("async_save", [False, True])
def test_what_the_next_run_changes_is_not_in_a_save(async_save: bool, tmp_path: Path) -> None:
    variables = Variables(hidden=torch.zeros(100_000), history=[0])
    saver = Saver(async_save=async_save)
    path = saver.save(Session(state={"vars": variables}), tmp_path / "model.ckpt", 1)
    variables.hidden += 1
    variables.history[0] = 1
    saver.close()
    found = restore(path, Variables())
    assert (found.hidden.max().item(), found.history) == (0, [0])


def test_a_recovery_restores_them(tmp_path: Path) -> None:
    variables = Variables(total=0)

    def step(number: int) -> None:
        variables.total += number

    failing = RecordingHook(raises={("after_run", 3): AbortedError})
    hooks = [failing, CheckpointSaverHook(tmp_path, save_steps=1)]
    with MonitoredLoop(step, hooks=hooks, checkpoint_dir=tmp_path, state={"vars": variables}) as loop:
        for number in loop.until_stop([1, 10, 100, 1000]):
            loop.run(number)
    assert variables.total == 1111


def test_what_the_code_before_an_interrupted_item_repeats_is_undone_and_aliases_stay(tmp_path: Path) -> None:
    def train(last_step: int) -> tuple[Variables, list[list[float]]]:
        variables = Variables(env=Env(np.random.default_rng(3)), total=0.0, totals=[], pickled=["env"])
        hooks = [StopAtStepHook(last_step=last_step), CheckpointSaverHook(tmp_path, save_steps=100)]
        seen = []
        with MonitoredLoop(lambda: None, hooks=hooks, state={"vars": variables}, checkpoint_dir=tmp_path) as loop:
            env = variables.env
            for _ in loop.until_stop(range(3)):
                variables.total = 0.0
                for _ in loop.until_stop(range(4)):
                    loop.run()
                    seen.append(env.step(0.0).tolist())
                    variables.total += float(sum(seen[-1]))
                if not loop.should_stop():
                    variables.totals.append(variables.total)
        return variables, seen

    _, first = train(6)
    resumed, second = train(100)
    rng = np.random.default_rng(3)
    expected = [rng.standard_normal(3).tolist() for _ in range(12)]
    assert first + second == expected
    # Not sum(), which rounds once for all its floats from Python 3.12 on.
    assert resumed.totals == [functools.reduce(operator.add, map(sum, expected[at : at + 4])) for at in (0, 4, 8)]


def test_names_of_the_user_are_no_sign_of_a_scheduler(tmp_path: Path, lines: Lines) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    variables = Variables(last_epoch=3, optimizer="SGD")
    Saver().save(Session(optimizer=optimizer, state={"vars": variables}), tmp_path / "model.ckpt", 1)
    assert [level for level, text in lines if "scheduler" in text] == ["WARNING"]


def test_each_rank_has_its_own(tmp_path: Path) -> None:
    def main(ranks: ThreadRanks, hub: Hub, first: int) -> int:
        variables = Variables(number=first + ranks.rank)
        hooks = [CheckpointSaverHook(tmp_path, save_steps=1)]
        with MonitoredLoop(
            lambda: None, hooks=hooks, state={"vars": variables}, checkpoint_dir=tmp_path, ranks=ranks
        ) as loop:
            loop.run()
        number: int = variables.number
        return number

    assert in_threads(3, partial(main, first=10)) == [10, 11, 12]
    assert in_threads(3, partial(main, first=0)) == [10, 11, 12]


# -- devices -----------------------------------------------------------------------------------------------------------


def test_a_tensor_from_a_device_that_this_process_has_not_is_on_the_cpu(lines: Lines) -> None:
    if torch.cuda.is_available():
        pytest.skip("this process has the device")
    state = {"hidden": torch.ones(2), "_devices": {"hidden": "cuda:1"}}
    variables = Variables()
    variables.load_state_dict(state)
    assert variables.hidden.tolist() == [1, 1]
    assert lines == [
        ("WARNING", "this process has no device cuda:1: the variable hidden is on the CPU now"),
    ]


@pytest.mark.accelerator
def test_a_tensor_on_a_device_returns_to_it(tmp_path: Path) -> None:
    path = save(tmp_path, Variables(hidden=(torch.ones(2, device=DEVICE),), other=torch.ones(2)))
    found = restore(path, Variables(hidden=None, other=torch.zeros(1, device=DEVICE)))
    assert [found.hidden[0].device.type, found.other.device.type] == [DEVICE, DEVICE]


# -- a process that is killed ------------------------------------------------------------------------------------------

STEPS = 60


def train_recurrent(folder: str, killed_at: int | None) -> None:
    """Train a recurrent policy in the environment, one step a run, and print what there is in the end."""
    torch.manual_seed(0)
    cell, head = nn.GRUCell(3, 8), nn.Linear(8, 1)
    model = nn.ModuleList([cell, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    variables = Variables(best=math.inf, hidden=None, env=Env(np.random.default_rng(0)), pickled=["env"])
    variables.observed = torch.from_numpy(variables.env.step(0.0)).float()

    def step() -> torch.Tensor:
        inputs = variables.observed[None]
        optimizer.zero_grad()
        hidden = cell(inputs, variables.hidden)
        action = head(hidden).sum()
        loss: torch.Tensor = (action - inputs.sum()) ** 2
        loss.backward()
        optimizer.step()
        variables.hidden = hidden.detach()
        variables.observed = torch.from_numpy(variables.env.step(action.item())).float()
        return loss

    hooks = [CheckpointSaverHook(folder, save_steps=7)]
    with MonitoredLoop(step, model, optimizer, hooks=hooks, state={"vars": variables}, checkpoint_dir=folder) as loop:
        for _ in loop.until_stop(range(STEPS)):
            loss = loop.run()
            variables.best = min(variables.best, loss.item())
            if loop.global_step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
    weights = [weight.flatten().tolist() for weight in model.state_dict().values()]
    print("end", [weights, variables.best, variables.hidden.tolist(), variables.env.step(0.0).tolist()])


def outputs(folder: Path, kills: list[int]) -> list[str]:
    """Train in processes that kill themselves at these steps and in one that does not; return what each has printed."""
    folder.mkdir()
    printed = []
    for step in [*kills, None]:
        process = start(Path(__file__), folder / f"until {step}", str(folder / "run"), str(step))
        process.join(60)
        assert process.exitcode == (0 if step is None else -signal.SIGKILL)
        printed.append((folder / f"until {step}").read_text())
    return printed


@pytest.mark.slow
def test_a_training_run_that_is_killed_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    [whole] = outputs(tmp_path / "whole", [])
    killed = outputs(tmp_path / "killed", [3, 20, 22, 49])
    assert [re.findall("restored step ([0-9]+)", text) for text in killed] == [[], ["0"], ["14"], ["21"], ["42"]]
    assert killed[-1].splitlines()[-1] == whole.splitlines()[-1]
    assert whole.splitlines()[-1].startswith("end [")


if __name__ == "__main__":
    train_recurrent(sys.argv[1], None if sys.argv[2] == "None" else int(sys.argv[2]))


ODD: dict[str, Callable[[float], torch.Tensor]] = {
    "csr": lambda value: (torch.eye(40) * value).to_sparse_csr(),
    "csc": lambda value: (torch.eye(40) * value).to_sparse_csc(),
    "bsr": lambda value: (torch.eye(40) * value).to_sparse_bsr((2, 2)),
    "coo": lambda value: (torch.eye(40) * value).to_sparse(),
    "quantized": lambda value: torch.quantize_per_tensor(torch.full((2000,), value), 0.5, 0, torch.quint8),
}


@pytest.mark.filterwarnings("ignore")  # torch says that some are in beta
@pytest.mark.parametrize("name", ODD)
def test_a_sparse_or_quantized_variable_continues(name: str, tmp_path: Path) -> None:
    def train(last_step: int, value: float) -> tuple[Variables, list[str]]:
        variables = Variables(odd=ODD[name](value))
        hooks = [CheckpointSaverHook(tmp_path, save_steps=100), StopAtStepHook(last_step=last_step)]
        with (
            log_lines() as lines,
            MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path, state={"vars": variables}) as loop,
        ):
            for _ in loop.until_stop(range(2)):
                for _ in loop.until_stop(range(3)):
                    loop.run()
        return variables, [text for _, text in lines if "the script changed" in text]

    train(2, 2.0)
    variables, changed = train(4, 1.0)
    assert variables.odd.layout is ODD[name](2.0).layout
    whole = variables.odd.dequantize() if variables.odd.is_quantized else variables.odd.to_dense()
    assert whole.max() == 2.0
    assert changed == []
