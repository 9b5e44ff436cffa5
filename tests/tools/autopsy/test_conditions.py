"""An autopsy of compiled models, several ranks and errors of the step, and the command."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.devices import FakeDevice
from support.rank_processes import run_ranks
from support.rank_threads import Hub, ThreadRanks, in_threads
from support.schemas import answer
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torchhooks.tools.autopsy.request
from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    EvaluationHook,
    LoggingTensorHook,
    MonitoredLoop,
    MonitoredTrainingLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    PeerError,
    SessionRunHook,
    StopAtStepHook,
    grad_norm,
    list_checkpoints,
)
from torchhooks.__main__ import main
from torchhooks.testing import log_lines
from torchhooks.tools.autopsy.request import leave


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Rooted(nn.Module):
    """Takes the root of a negative number in the call in which it is told to."""

    bad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * ((0 * x).sum() - 1).sqrt() if self.bad else x


class Refusing(torch.Tensor):
    """A tensor that refuses what an examination asks of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.is_floating_point:
            raise TypeError("not of this tensor")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model.insert(1, Rooted())
    return model


def train(
    model: Any,
    bad_at: int | None,
    hooks: Any = None,
    last_step: int = 20,
    rooted: Any = None,
    loop_arguments: Any = None,
    parts: tuple[Any, ...] | None = None,
) -> Any:
    """Train, with a NaN at a step; return the loop, or the error."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inner: Any = rooted if rooted is not None else next(each for each in model.modules() if isinstance(each, Rooted))

    def step(inputs: torch.Tensor) -> torch.Tensor:
        inner.bad = loop.global_step + 1 == bad_at
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    given = [NanTensorHook("loss")] if hooks is None else hooks
    data = [torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    saving = [StopAtStepHook(last_step=last_step), CheckpointSaverHook("run", save_steps=4)]
    arguments = {"checkpoint_dir": "run", **(loop_arguments or {})}
    try:
        with MonitoredLoop(step, model, optimizer, hooks=[*given, *saving], **arguments) as loop:
            for _ in loop.until_stop(range(4)):
                for batch in loop.until_stop(data):
                    loop.run(batch)
    except (NanLossDuringTrainingError, PeerError) as error:
        return error
    return loop


def report(step: int = 10) -> dict[str, Any]:
    return json.loads(Path("run", f"nan-{step}", "report.json").read_text())  # type: ignore[no-any-return]


def test_hooks_have_the_numbers_that_they_have_without_an_autopsy() -> None:
    notes = ["".join(train(new_model(), 10).__notes__) for _ in range(2)]
    assert Path("run", "nan-10").exists()
    assert all("in after_run of NanTensorHook('loss') (hook 0)" in each for each in notes)


def test_a_hook_that_stops_instead_of_failing_has_its_autopsy_too() -> None:
    hooks = [NanTensorHook("loss", fail_on_nan_loss=False)]
    assert train(new_model(), 10, hooks).stop_reason == "NanTensorHook: loss is NaN at step 10"
    hooks = [NanTensorHook("loss", fail_on_nan_loss=False)]
    assert train(new_model(), 10, hooks).stop_reason == "NanTensorHook: loss is NaN at step 10"
    assert (report()["origin"]["operation"], report()["origin"]["module"]) == ("aten.sqrt.default", "1")


@pytest.fixture
def _forgets_compilations() -> Iterator[None]:
    yield
    torch.compiler.reset()
    sys.modules["torch._dynamo.utils"].counters.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("_forgets_compilations")
def test_compiled_code_is_run_in_eager_mode_and_the_report_says_so() -> None:
    for _ in range(2):
        torch.compiler.reset()
        model = new_model()
        assert isinstance(
            train(torch.compile(model, backend="aot_eager"), 10, rooted=model[1]), NanLossDuringTrainingError
        )
    found = report()
    assert found["eager"]
    assert (found["origin"]["operation"], found["origin"]["module"]) == ("aten.sqrt.default", "1")
    assert [each["path"] for each in found["runs"][-1]["modules"]] == ["0", "1", "2", ""]
    assert "in eager mode" in str(found["lines"])


def test_an_evaluation_and_hooks_at_the_end_of_an_epoch_in_between() -> None:
    calls = []

    def evaluate() -> dict[str, float]:
        calls.append(0)
        return {"noise": torch.rand(()).item()}

    def hooks() -> list[Any]:
        evaluation = EvaluationHook(evaluate, every_n_epochs=1)
        return [
            NanTensorHook(lambda loss: loss.log()),
            evaluation,
            LoggingTensorHook(["loss"], every_n_epochs=1),
            LoggingTensorHook({"norm": grad_norm()}, every_n_iter=1),
        ]

    for _ in range(2):
        assert isinstance(train(new_model(), 10, hooks()), NanLossDuringTrainingError)
    assert report()["origin"]["operation"] == "aten.sqrt.default"
    assert report()["digests"] == report()["request"]["digests"]


def test_a_fetch_that_makes_the_nan_is_named() -> None:
    for _ in range(2):
        assert isinstance(train(new_model(), None, [NanTensorHook(the_fetch)]), NanLossDuringTrainingError)
    origin = report(1)["origin"]
    assert (origin["phase"], origin["operation"]) == ("after", "aten.log.default")
    assert origin["source"]["text"] == "return (loss - 100).log()"


def the_fetch(loss: torch.Tensor) -> torch.Tensor:
    return (loss - 100).log()


def test_the_newest_checkpoint_may_come_after_the_nan(tmp_path: Path) -> None:
    train(new_model(), None, [])
    os.rename("run", "other")
    train(new_model(), 10)
    os.rename("other/model.ckpt-12", "run/model.ckpt-12")
    with log_lines() as lines:
        train(new_model(), 10)
    assert ("INFO", "restored step 8 from run/model.ckpt-8") in lines
    assert report()["came_back"]


def test_no_checkpoint_before_the_nan_is_said() -> None:
    train(new_model(), 10)
    for checkpoint in list_checkpoints("run"):
        os.rename(checkpoint.path, f"{checkpoint.name}")
    os.rename("model.ckpt-8", "run/model.ckpt-8")
    request = json.loads(Path("run/nan.json").read_text())
    Path("run/nan.json").write_text(json.dumps({**request, "step": 3}))
    with log_lines() as lines:
        train(new_model(), None)
    assert [text for level, text in lines if level == "WARNING"] == [
        "no autopsy of step 3, about which nan.json is: run has no checkpoint before it to begin with"
    ]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_text("{"), "no autopsy: "),
        (lambda path: (path.unlink(), path.mkdir()), "no autopsy: "),
        (lambda path: path.write_text("{}"), "is not what torchhooks writes: remove it"),
        (
            lambda path: path.write_text(path.read_text().replace("NanTensorHook of loss", "NanTensorHook of other")),
            "nan.json is from NanTensorHook of other, which the loop does not have",
        ),
    ],
)
def test_a_request_that_cannot_be_followed_is_said(damage: Any, message: str) -> None:
    train(new_model(), 10)
    damage(Path("run", "nan.json"))
    with log_lines() as lines:
        assert train(new_model(), None).global_step == 20
    assert message in "\n".join(text for level, text in lines if level == "WARNING")


@pytest.mark.parametrize(("begin", "end"), [(8, 9), (0, 2)], ids=["watched", "before it is watched"])
def test_a_loop_that_ends_before_the_step_says_that_there_was_no_autopsy(begin: int, end: int) -> None:
    train(new_model(), 10)
    request = Path("run/nan.json").read_text()
    with log_lines() as lines:
        train(new_model(), 10, last_step=end, loop_arguments={"checkpoint_dir": f"run/model.ckpt-{begin}"})
    assert ("WARNING", f"no autopsy was made: the loop ended at step {end}, before step 10") in lines
    assert json.loads(Path("run/nan.json").read_text()) == json.loads(request)


def test_a_loop_that_is_not_created_leaves_the_request_as_it_is() -> None:
    class Failing(SessionRunHook):
        def begin(self) -> None:
            raise KeyError("of the hook")

    train(new_model(), 10)
    request = Path("run/nan.json").read_text()
    with pytest.raises(KeyError, match="of the hook"):
        train(new_model(), 10, hooks=[NanTensorHook("loss"), Failing()])
    assert Path("run/nan.json").read_text() == request


def test_a_batch_that_cannot_be_saved_is_said() -> None:
    def script() -> None:
        def step(number: int, counts: Any, augment: Any) -> torch.Tensor:
            return augment(torch.tensor(5.0 - number + counts.sum())).log()  # type: ignore[no-any-return]

        hooks = [NanTensorHook("loss"), CheckpointSaverHook("run", save_steps=2)]
        with MonitoredLoop(step, hooks=hooks, checkpoint_dir="run") as loop:
            for number in loop.until_stop(range(10)):
                loop.run(number, np.zeros(2, "int64"), lambda value: value)

    for _ in range(2):
        with pytest.raises(NanLossDuringTrainingError):
            script()
    assert report(7)["origin"]["operation"] == "aten.log.default"
    assert report(7)["batch_file"]["missing"].startswith("it cannot be saved: ")
    assert not Path("run/nan-7/batch.pt").exists()


def test_an_error_of_the_step_itself_is_looked_at() -> None:
    train(new_model(), 10)
    model = new_model()
    model[2].register_forward_hook(lambda _module, _inputs, output: _assert_finite(output))
    with pytest.raises(AssertionError, match="not finite"):
        train(model, 10)
    assert report()["problem"] == "the step raised an error"
    assert (report()["origin"]["operation"], report()["origin"]["module"]) == ("aten.sqrt.default", "1")


def test_an_error_of_the_step_is_looked_at_in_a_loop_without_a_with_block() -> None:
    """The script has caught it when the loop is closed."""
    train(new_model(), 10)
    model: Any = new_model()

    def step(inputs: torch.Tensor) -> Any:
        model[1].bad = loop.global_step == 9
        _assert_finite(model(inputs))
        return 0.0

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loop = MonitoredLoop(step, model, optimizer, hooks=[NanTensorHook("loss")], checkpoint_dir="run/model.ckpt-8")
    with contextlib.suppress(AssertionError):
        for inputs in loop.until_stop(torch.ones(20, 8, 4), resume=False):
            loop.run(inputs)
    loop.close()
    assert report()["origin"]["operation"] == "aten.sqrt.default"


def test_after_another_error_that_the_script_has_caught_the_autopsy_goes_on() -> None:
    train(new_model(), 10)
    model: Any = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    failures = iter([True])

    def step(inputs: torch.Tensor) -> torch.Tensor:
        if loop.global_step == 8 and next(failures, False):
            raise ValueError("bad batch")
        model[1].bad = loop.global_step == 9
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    hooks = [NanTensorHook("loss")]
    with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir="run/model.ckpt-4") as loop:
        for inputs in loop.until_stop(torch.ones(20, 8, 4), resume=False):
            with contextlib.suppress(ValueError, NanLossDuringTrainingError):
                loop.run(inputs)
    assert loop.global_step == 4 + 19
    assert report()["origin"]["operation"] == "aten.sqrt.default"
    assert report()["state"] == "model.ckpt-9"


def test_an_error_that_a_script_handles_around_the_loop_is_none_of_the_step() -> None:
    train(new_model(), 10)
    try:
        raise ValueError("another attempt")
    except ValueError:
        with log_lines() as lines:
            train(new_model(), 10, last_step=9)
    assert any(level == "WARNING" and "ended at step 9, before step 10" in text for level, text in lines)


def test_a_nan_that_comes_back_earlier_has_its_report_where_it_was_asked_for() -> None:
    train(new_model(), 10)
    train(new_model(), 9)
    assert report(10)["lines"][0] == "autopsy of step 10: loss is NaN at step 9, now at step 9."
    assert sorted(path.name for path in Path("run", "nan-10").iterdir()) == [
        "batch.pt", "model.ckpt-8", "report.json", "report.md", "request.json",
    ]  # fmt: skip
    assert not list(Path("run").glob("nan*.json"))


def test_an_average_that_the_script_updates_between_two_runs_broke_with_the_model() -> None:
    """The average is what the loss is compared with."""

    def script() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(inputs: torch.Tensor) -> Any:
            optimizer.zero_grad()
            (model(inputs).square() * (loop.global_step != 9)).sqrt().sum().backward()
            optimizer.step()
            return average(inputs).sum()

        hooks = [NanTensorHook("loss"), CheckpointSaverHook("run", save_steps=4)]
        arguments: Any = {"state": {"average": average}, "checkpoint_dir": "run"}
        with MonitoredLoop(step, model, optimizer, hooks=hooks, **arguments) as loop:
            for inputs in loop.until_stop(torch.ones(20, 8, 4)):
                loop.run(inputs)
                average.update_parameters(model)

    for _ in range(2):
        with pytest.raises(NanLossDuringTrainingError, match="at step 11"):
            script()
    assert (report(11)["origin"]["operation"], report(11)["origin"]["step"]) == ("aten.div.Tensor", 10)
    assert report(11)["state"] == "model.ckpt-9"


def test_an_interrupt_of_a_run_that_is_watched_is_no_finding() -> None:
    def interrupt(*_: Any) -> None:
        if model[1].bad:
            raise KeyboardInterrupt

    train(new_model(), 10)
    model = new_model()
    model.register_forward_pre_hook(interrupt)
    with log_lines() as lines, pytest.raises(KeyboardInterrupt):
        train(model, 9)
    assert "ended at step 8" in str(lines)
    assert Path("run", "nan.json").exists()


def test_runs_of_an_accumulation_that_make_no_step_are_watched_too() -> None:
    """The NaN is in the first of the two runs that step 8 takes, when 7 steps have been made."""

    def script() -> None:
        model = new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(inputs: torch.Tensor, number: int) -> torch.Tensor:
            rooted.bad = number == 14
            loss: torch.Tensor = model(inputs).square().mean()
            loss.backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        rooted: Any = model[1]
        saver = CheckpointSaverHook("run", save_steps=3)
        arguments: Any = {"checkpoint_dir": "run", "step_unit": "optimizer_step"}
        with MonitoredLoop(step, model, optimizer, hooks=[NanTensorHook("loss"), saver], **arguments) as loop:
            for number, inputs in loop.enumerate(torch.ones(30, 8, 4)):
                loop.run(inputs, number)

    for _ in range(2):
        with pytest.raises(NanLossDuringTrainingError, match="loss is NaN at step 7"):
            script()
    assert (report(7)["origin"]["operation"], report(7)["origin"]["module"]) == ("aten.sqrt.default", "1")
    assert report(7)["restored_step"] == 6
    assert report(7)["runs"][report(7)["run"]]["item"] == 14


def test_a_step_without_a_model_and_an_optimizer_that_the_loop_knows_is_watched_too() -> None:
    def script() -> None:
        def step(number: int) -> dict[str, Any]:
            loss = torch.tensor(5.0 - number).log()
            return {"loss": loss, "parts": [loss, torch.arange(3.0)], "name": "log", "more": {1: 0.5}}

        hooks = [NanTensorHook("loss"), CheckpointSaverHook("run", save_steps=2)]
        with MonitoredLoop(step, hooks=hooks, checkpoint_dir="run") as loop:
            for number in loop.until_stop(range(10)):
                loop.run(number)

    for _ in range(2):
        with pytest.raises(NanLossDuringTrainingError):
            script()
    found = report(7)
    assert found["restored_step"] == 6
    assert (found["origin"]["operation"], found["origin"].get("module")) == ("aten.log.default", None)
    assert (found["runs"][-1]["gradient_norm"], found["runs"][-1]["optimizer_steps"]) == (None, 0)
    assert (found["outputs"]["name"], found["outputs"]["more"]) == ("log", {"1": 0.5})
    assert [isinstance(found["outputs"]["parts"][0], float), found["outputs"]["parts"][1]["max"]] == [True, 2.0]


def test_the_checkpoint_that_the_caller_chose_is_where_an_autopsy_begins() -> None:
    train(new_model(), 10)
    with log_lines() as lines:
        train(new_model(), 10, loop_arguments={"checkpoint_dir": "run/model.ckpt-4"})
    assert ("INFO", "restored step 4 from run/model.ckpt-4") in lines
    assert report()["restored_step"] == 4


def test_a_chosen_checkpoint_that_comes_after_the_nan_is_named() -> None:
    train(new_model(), 10)
    request = json.loads(Path("run/nan.json").read_text())
    Path("run/nan.json").write_text(json.dumps({**request, "step": 8}))
    with log_lines() as lines:
        train(new_model(), None, last_step=9, loop_arguments={"checkpoint_dir": "run/model.ckpt-8"})
    (text,) = [text for level, text in lines if level == "WARNING"]
    assert "model.ckpt-8 has no checkpoint" in text


def test_a_recovery_after_an_autopsy_does_not_begin_it_again() -> None:
    train(new_model(), 10)
    model = new_model()
    calls: list[int] = []

    def fail_once(*_: Any) -> None:
        calls.append(0)
        if len(calls) == 6:  # of step 14
            raise AbortedError("the connection was lost")

    model.register_forward_hook(fail_once)
    with log_lines() as lines:
        assert train(model, None, last_step=18).global_step == 18
    assert ("INFO", "restored step 12 from run/model.ckpt-12") in lines
    begun = [text.split(": ")[1].partition(", to")[0] for _, text in lines if "are made again" in text]
    assert begun == ["the runs from step 8 on are made again"]


def test_a_request_that_cannot_be_written_hides_no_nan() -> None:
    os.makedirs("run/nan.json")
    with log_lines() as lines:
        assert "loss is NaN at step 10" in str(train(new_model(), 10))
    assert [text for level, text in lines if level == "WARNING"][-1].startswith(
        "run/nan.json was not written, so the next process does not look for the cause: "
    )


def _assert_finite(output: torch.Tensor) -> None:
    assert output.isfinite().all(), "not finite"


def test_nothing_is_left_on_the_model_after_an_autopsy() -> None:
    train(new_model(), 10)
    model = new_model()
    train(model, 10)
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    assert not any(vars(each)[kind] for each in model.modules() for kind in kinds)


def test_the_state_before_the_step_and_the_batch_make_the_nan_again() -> None:
    train(new_model(), 10)
    train(new_model(), 10)
    assert torch.load("run/nan-10/batch.pt")["inputs"].shape == (8, 4)
    folder = "run/nan-10/model.ckpt-9"
    Path("run/nan-10/report.md").unlink()
    assert isinstance(train(new_model(), 10, loop_arguments={"checkpoint_dir": folder}), NanLossDuringTrainingError)
    assert train(new_model(), None, [], 10, loop_arguments={"checkpoint_dir": folder}).global_step == 10
    assert not list(Path("run/nan-10").glob("**/report.md"))


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_request_and_then_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkdir("run")
    assert main(["nan", "run"]) == 1
    assert "run has neither nan.json nor a report" in capsys.readouterr().err
    train(new_model(), 10)
    assert main(["nan", "run"]) == 0
    assert "loss is NaN at step 10. Start the script again" in capsys.readouterr().out
    assert main(["nan", "run", "--json"]) == 0
    said = answer("nan", capsys.readouterr().out)
    assert (said["request"]["step"], said["file"], said["report"]) == (10, None, None)
    train(new_model(), 10)
    assert main(["nan", "run"]) == 0
    report = Path("run/nan-10/report.md").read_text()
    assert capsys.readouterr().out == report
    assert main(["nan", "run", "--json"]) == 0
    assert answer("nan", capsys.readouterr().out) == {
        "request": None,
        "caught": [],
        "file": "run/nan-10/report.md",
        "report": report,
    }


@pytest.mark.slow
def test_nothing_of_the_autopsy_is_imported_without_a_nan() -> None:
    program = """
import sys, torch
from torchhooks import CheckpointSaverHook, MonitoredLoop, NanTensorHook
model = torch.nn.Linear(1, 1)
hooks = [NanTensorHook("loss"), CheckpointSaverHook("run", save_steps=2)]
for _ in range(2):
    with MonitoredLoop(lambda x: model(x).mean(), model, hooks=hooks, checkpoint_dir="run") as loop:
        for x in loop.until_stop([torch.ones(1)] * 5):
            loop.run(x)
print([name for name in sys.modules if name.startswith("torchhooks.tools.autopsy")])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


# -- several ranks ----------------------------------------------------------------------------------------------------


def _train_rank(rank: int, folder: str, kind: str) -> str:
    os.chdir(folder)
    model: Any = new_model()
    rooted = model[1]
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    return repr(train(model, 10 if rank == 1 else None, rooted=rooted))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_rank_replays_and_the_report_names_the_rank(kind: str, tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        ended = run_ranks(folder, 2, _train_rank, str(tmp_path), kind)
        assert [each.code for each in ended] == [0, 0], "\n".join(each.output for each in ended)
    found = report()
    assert found["rank"] == 1
    assert "(rank 1 of 2)" in found["lines"][0]
    assert (found["origin"]["operation"], found["origin"]["module"]) == ("aten.sqrt.default", "1")
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    if kind == "fsdp":
        assert found["runs"][-1]["state"]["parameter 0.weight"]["shape"] == [4, 4]
        assert found["runs"][-1]["state"]["parameter 0.weight"]["part"] == [2, 4]


def test_the_chief_writes_the_report_about_the_rank_that_made_the_nan() -> None:
    def train_rank(ranks: ThreadRanks, hub: Hub) -> Any:
        return train(models[ranks.rank], 10 if ranks.rank == 1 else None, loop_arguments={"ranks": ranks})

    with log_lines() as lines:
        for _ in range(2):
            models = [new_model(), new_model()]  # here, because the threads share torch's generator
            in_threads(2, train_rank)
    assert len([text for _, text in lines if text.startswith("autopsy of step 10: ")]) == 1
    found = report()
    assert (found["rank"], found["origin"]["module"]) == (1, "1")
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    assert sorted(path.name for path in Path("run", "nan-10").iterdir()) == [
        "batch-1.pt", "batch.pt", "model.ckpt-9", "report.json", "report.md", "request.json",
    ]  # fmt: skip


def test_ranks_whose_steps_raise_at_once_write_a_report_each() -> None:
    def train_rank(ranks: ThreadRanks, hub: Hub) -> Any:
        model: Any = models[ranks.rank]
        if Path("run", "nan.json").exists():
            model[2].register_forward_hook(lambda _module, _inputs, output: check(output))
        return train(model, 10, loop_arguments={"ranks": ranks})

    def check(output: torch.Tensor) -> None:
        if not output.isfinite().all():
            both.wait()
            raise PermissionError("not finite")

    both = threading.Barrier(2, timeout=60)
    for _ in range(2):
        models = [new_model(), new_model()]
        in_threads(2, train_rank)
    folder = Path("run", "nan-10")
    assert sorted(path.name for path in folder.glob("report*")) == [
        "report-1.json", "report-1.md", "report.json", "report.md",
    ]  # fmt: skip
    for name in ("report.json", "report-1.json"):
        assert json.loads((folder / name).read_text())["origin"]["operation"] == "aten.sqrt.default"


def test_an_examination_that_fails_on_one_rank_ends_on_all() -> None:
    def train_rank(ranks: ThreadRanks, hub: Hub) -> Any:
        return train(models[ranks.rank], 10, loop_arguments={"ranks": ranks})

    for _ in range(2):
        models = [new_model(), new_model()]
        odd = torch.ones(2).as_subclass(Refusing)
        models[1].register_buffer("odd", odd, persistent=False)
        with log_lines() as lines:
            errors = in_threads(2, train_rank)
        assert "loss is NaN at step 10" in str(errors[0]) + str(errors[1])
        assert {type(each) for each in errors} <= {NanLossDuringTrainingError, PeerError}
    said = [text for level, text in lines if level == "WARNING" and "has failed on rank 1" in text]
    assert len(said) == 2
    assert "TypeError: not of this tensor" in Path("run/nan-10/failed.txt").read_text()
    assert sorted(path.name for path in Path("run").glob("nan*/*")) == ["failed.txt", "request.json"]


def test_the_request_of_the_first_of_several_ranks_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_together(*arguments: Any, **given: Any) -> None:
        both.wait()
        leave(*arguments, **given)
        both.wait()  # neither of them fails before the other one has found its own NaN

    both = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(torchhooks.tools.autopsy.request, "leave", leave_together)

    def train_rank(ranks: ThreadRanks, hub: Hub) -> Any:
        return train(models[ranks.rank], 10, loop_arguments={"ranks": ranks})

    models = [new_model(), new_model()]
    errors = in_threads(2, train_rank)
    assert [type(each) for each in errors] == [NanLossDuringTrainingError] * 2
    assert json.loads(Path("run", "nan.json").read_text())["rank"] == 0


@pytest.mark.compile
@pytest.mark.usefixtures("_forgets_compilations")
def test_what_compiled_code_broke_before_is_looked_at_by_the_third_process() -> None:
    """A weight becomes NaN in step 9, of which only the last run before the NaN is not compiled."""

    class Breaking(Rooted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def breaks(model: Any) -> Any:
        def step(*_: Any) -> None:
            if model[1].bad:
                model[0].weight.grad.fill_(float("nan"))

        return step

    for _ in range(3):
        torch.compiler.reset()
        model = new_model()
        model[1] = Breaking()
        hook = register_optimizer_step_pre_hook(breaks(model))
        assert isinstance(train(torch.compile(model, backend="aot_eager"), 7, rooted=model[1]), Exception)
        hook.remove()
    assert report(8)["origin"]["tensor"] == "parameter 0.weight"
    assert "look at step 7" in str(report(8)["lines"])
    assert report(7)["origin"]["operation"] == "aten.fill_.Scalar"


def test_a_nan_that_is_noticed_some_runs_later_is_looked_at_in_its_own_run() -> None:
    """On a device, the hook notices the NaN when its value has been read."""
    with FakeDevice(lag=3):
        error = train(new_model(), 10)
        assert "loss is NaN at step 10" in str(error)
        request = json.loads(Path("run", "nan.json").read_text())
        assert (request["step"], request["noticed_at"], request["checkpoint"]) == (10, 12, 8)
        train(new_model(), 10)
    assert (report()["origin"]["operation"], report()["origin"]["step"]) == ("aten.sqrt.default", 10)
    assert "input inputs" not in request["digests"]  # the arguments are let go of when their run is over
    assert not Path("run", "nan.json").exists()


def test_the_default_hooks_of_a_training_loop() -> None:
    def script() -> None:
        model: Any = new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(inputs: torch.Tensor) -> torch.Tensor:
            model[1].bad = loop.global_step == 9
            optimizer.zero_grad()
            loss: torch.Tensor = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        arguments: Any = {"save_checkpoint_steps": 4, "save_summaries_steps": 1, "hooks": [NanTensorHook("loss")]}
        with MonitoredTrainingLoop(step, model, optimizer, checkpoint_dir="run", **arguments) as loop:
            for inputs in loop.until_stop(torch.ones(20, 8, 4)):
                loop.run(inputs)

    for _ in range(2):
        with pytest.raises(NanLossDuringTrainingError):
            script()
    assert report()["origin"]["module"] == "1"
