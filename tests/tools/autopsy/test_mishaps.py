"""An autopsy that is interrupted, asked for by a damaged file, or has nowhere to write its report."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchhooks import CheckpointSaverHook, MonitoredLoop, NanLossDuringTrainingError, NanTensorHook
from torchhooks.__main__ import main
from torchhooks.testing import log_lines

NAN_AT = 10


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Masked(nn.Module):
    """Has a buffer that is not finite, as the mask of an attention is not."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), -float("inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ (self.mask + 1).softmax(-1)  # type: ignore[no-any-return]


def train(
    before_step: Callable[[int], object] = bool,
    nan_at: int = NAN_AT,
    folder: str = "run",
    model: Callable[[], nn.Module] = Masked,
    hook: type[NanTensorHook] = NanTensorHook,
) -> Any:
    """Train until the loss is NaN at ``nan_at``, and return the error."""
    torch.manual_seed(0)
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        before_step(loop.global_step + 1)
        optimizer.zero_grad()
        loss: torch.Tensor = trained(inputs).square().mean()
        if loop.global_step + 1 == nan_at:
            loss = (loss * 0 - 1).sqrt()
        loss.backward()
        optimizer.step()
        return loss.detach()

    hooks = [hook("loss"), CheckpointSaverHook(folder, save_steps=4)]
    try:
        with MonitoredLoop(step, trained, optimizer, hooks=hooks, checkpoint_dir=folder) as loop:
            for inputs in loop.until_stop(torch.ones(20, 4, 4)):
                loop.run(inputs)
    except NanLossDuringTrainingError as error:
        return error
    raise AssertionError("there was no NaN")


def operation() -> str:
    report = json.loads(Path("run", f"nan-{NAN_AT}", "report.json").read_text())
    return report["origin"]["operation"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("error", "at"), [(KeyboardInterrupt, NAN_AT), (KeyboardInterrupt, 9), (RuntimeError("out of memory"), 9)]
)
def test_an_autopsy_that_is_interrupted_is_made_by_the_next_process(error: Any, at: int) -> None:
    def interrupt(step: int) -> None:
        if step == at:
            raise error

    train()
    with log_lines() as lines, pytest.raises(BaseException, match=r"(?m)^(out of memory)?$"):
        train(interrupt)
    assert f"ended at step {at - 1}" in str(lines)
    assert Path("run/nan.json").exists()
    train()
    assert operation() == "aten.sqrt.default"


def _without(name: str) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != name}))

    return damage


def _with_text_as_step(path: Path) -> None:
    path.write_text(path.read_text().replace(f'"step": {NAN_AT}', f'"step": "{NAN_AT}"'))


def _of_another_kind(path: Path) -> None:
    path.write_text(path.read_text().replace('"kind": "NaN"', '"kind": "spike"'))


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(""),
        lambda path: path.write_bytes(path.read_bytes()[:200]),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text("[1]"),
        _with_text_as_step,
        _of_another_kind,
        _without("message"),
        _without("environment"),
        _as_folder,
    ],
)
def test_a_damaged_request_is_named_and_replaced_by_the_next_one(
    damage: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    train()
    path = Path("run", "nan.json")
    damage(path)
    assert main(["nan", "run"]) == 1
    assert f"{path} " in capsys.readouterr().err
    with log_lines() as lines:
        train()
    (warning,) = [text for _, text in lines if text.startswith("no autopsy: ")]
    assert warning.startswith(f"no autopsy: {path} ")
    assert warning.endswith(": remove it")
    if path.is_dir():
        path.rmdir()
        train()
    train()
    assert operation() == "aten.sqrt.default"


def test_a_script_that_has_removed_its_current_directory_leaves_a_request(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")

    def remove_the_folder(step: int) -> None:
        if step == NAN_AT:
            os.rmdir(tmp_path / "gone")

    train(remove_the_folder, folder=str(tmp_path / "run"))
    os.chdir(tmp_path)
    assert Path("run", "nan.json").exists()


def test_what_an_autopsy_found_is_said_where_its_report_cannot_be_written() -> None:
    train()
    Path("run", f"nan-{NAN_AT}").touch()
    with log_lines() as lines:
        train()
    assert any(text.startswith("Cause: aten.sqrt.default made a NaN") for _, text in lines)
    assert any(text.startswith("the report of the autopsy was not written into ") for _, text in lines)
    assert not any(text.startswith("The report is") for _, text in lines)
    os.remove(f"run/nan-{NAN_AT}")
    train()
    assert operation() == "aten.sqrt.default"


# -- an examination that fails ----------------------------------------------------------------------------------------


class Refusing(torch.Tensor):
    """A tensor that refuses what an examination asks of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.is_floating_point:
            raise TypeError("not of this tensor")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class WrappedTensor(torch.Tensor):
    """A tensor without memory of its own, which can be multiplied and nothing else."""

    whole: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001
        wrapped = make(cls, inner.shape, dtype=inner.dtype)
        wrapped.whole = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.mul.Tensor:
            return cls(func(args[0].whole, args[1]))
        raise RuntimeError(f"{func} of a wrapper")


class Unprintable:
    """What a step returns, and cannot be printed once there is a request for an autopsy."""

    def __repr__(self) -> str:
        raise KeyError("not printed")


def test_an_examination_that_fails_at_its_end_is_said_and_not_made_again() -> None:
    def script() -> None:
        def step(number: int) -> dict[str, Any]:
            return {"loss": torch.tensor(5.0 - number).log(), "odd": Unprintable()}

        hooks = [NanTensorHook("loss"), CheckpointSaverHook("run", save_steps=2)]
        with MonitoredLoop(step, hooks=hooks, checkpoint_dir="run") as loop:
            for number in loop.until_stop(range(10)):
                loop.run(number)

    with log_lines() as lines:
        for _ in range(2):
            with pytest.raises(NanLossDuringTrainingError):
                script()
    (warning,) = [text for level, text in lines if level == "WARNING" and "has failed" in text]
    assert warning.startswith("the autopsy of step 7 has failed. The training run goes on")
    assert "KeyError: 'not printed'" in Path("run/nan-7/failed.txt").read_text()


class Refused(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("odd", torch.ones(2).as_subclass(Refusing), persistent=False)


def test_an_examination_that_fails_is_said_once_and_not_made_again() -> None:
    errors = [str(train(model=Refused)), ""]
    with log_lines() as lines:
        errors[1] = str(train(model=Refused))
    assert errors[0] == errors[1]
    (warning,) = [text for level, text in lines if level == "WARNING" and "has failed" in text]
    assert warning.startswith(f"the autopsy of step {NAN_AT} has failed")
    folder = Path("run", f"nan-{NAN_AT}")
    assert sorted(path.name for path in folder.iterdir()) == ["failed.txt", "request.json"]
    assert "TypeError: not of this tensor" in (folder / "failed.txt").read_text()
    assert not Path("run", "nan.json").exists()
    for _ in range(2):
        with log_lines() as lines:
            assert str(train(model=Refused)) == errors[0]
        assert (
            "INFO",
            f"step {NAN_AT} is not examined again: {folder}/failed.txt says why. Remove it to try once more",
        ) in lines
        assert not Path("run", "nan.json").exists()


def test_a_step_that_two_processes_did_not_reach_is_not_examined_by_a_third() -> None:
    """As when to watch the step ends the process."""

    def fail(step: int) -> None:
        if step == 9:
            raise RuntimeError("out of memory")

    train()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            train(fail)
        assert not list(Path("run", f"nan-{NAN_AT}").glob(".run-*"))
    Path("run", f"nan-{NAN_AT}", ".run-1").mkdir(parents=True, exist_ok=True)  # as of a process that was killed
    with log_lines() as lines:
        train()
    assert not list(Path("run").glob("nan-*/.run-*"))
    why = f"2 processes began to look at step {NAN_AT}, and ended before it"
    assert ("WARNING", f"no autopsy of step {NAN_AT}: {why}. No further one tries") in lines
    assert not Path("run", "nan.json").exists()


class Silent(NanTensorHook):
    """Cannot say what it looks at, in a loop that begins with a request."""

    @property
    def examined(self) -> str:
        if Path("run", "nan.json").exists():
            raise AttributeError("no name yet")
        return "loss"


def test_a_hook_that_cannot_say_what_it_looks_at_ends_no_start() -> None:
    first = train(hook=Silent)
    with log_lines() as lines:
        second = train(hook=Silent)
    assert str(first) == str(second)
    assert ("WARNING", "no autopsy: nan.json, which is put aside, cannot be followed") in lines
    assert Path("run", f"nan-{NAN_AT}", "failed.txt").read_text() == "AttributeError: no name yet"


class Wrapped(Masked):
    """Calls a submodule with tensors of kinds that cannot be looked at as others can."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.inner: Any = torch.jit.script(nn.Tanh()) if kind == "script" else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        rows = [*x.detach()]
        if self.kind == "vmap":
            torch.func.vmap(self.inner)(x)
        elif self.kind == "jvp":
            torch.func.jvp(lambda x: self.inner(x) * 2, (x,), (torch.ones(4, 4),))
        elif self.kind == "nested":
            self.inner(torch.nested.as_nested_tensor(rows, layout=torch.strided))
        elif self.kind == "jagged":
            self.inner(torch.nested.as_nested_tensor(rows, layout=torch.jagged) * 2)
        elif self.kind == "sparse":
            self.inner(x.detach().to_sparse() * 2)
        elif self.kind == "masked":
            self.inner(torch.masked.masked_tensor(x.detach(), x > 0))
        elif self.kind == "wrapper":
            WrappedTensor(x.detach()) * 2
        elif self.kind == "refusing":
            self.inner(x.detach().as_subclass(Refusing))
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
@pytest.mark.parametrize(
    "kind", ["vmap", "jvp", "nested", "jagged", "sparse", "masked", "script", "refusing", "wrapper"]
)
def test_tensors_of_odd_kinds_do_not_end_an_examination(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            train(model=lambda: Wrapped(kind))
    assert operation() == "aten.sqrt.default"
    notes = json.loads(Path("run", f"nan-{NAN_AT}", "report.json").read_text())["notes"]
    assert any("operators could not be looked at" in note for note in notes) == (kind == "wrapper")
