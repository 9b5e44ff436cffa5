"""Training runs with a planted cause of a NaN, which the second process finds by name, and three that do not repeat."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from torchhooks import CheckpointSaverHook, MonitoredLoop, NanLossDuringTrainingError, NanTensorHook

Found = dict[str, Any]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Case:
    """A small training run. Each process makes another object of it."""

    batch_size = 4

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.number = 0
        self.build()
        self.optimizer = self.new_optimizer()
        self.data = torch.utils.data.TensorDataset(torch.randn(60, 4), torch.randn(60, 1))

    def build(self) -> None: ...

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, targets)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return self.loss(self.model(inputs), targets)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = self.forward(inputs, targets)
        loss.backward()
        self.optimizer.step()
        return loss

    def hooks(self) -> list[Any]:
        return [NanTensorHook("loss"), CheckpointSaverHook("run", save_steps=5)]

    def loader(self) -> Any:
        return torch.utils.data.DataLoader(self.data, batch_size=self.batch_size, shuffle=True)

    def train(self) -> list[str]:
        """Train until the NaN, as a process of its own would; return the bits of the loss after each step."""
        losses: list[str] = []
        loop: Any = None
        try:
            with MonitoredLoop(self.step, self.model, self.optimizer, hooks=self.hooks(), checkpoint_dir="run") as loop:
                self.number = loop.global_step
                for _ in loop.until_stop(range(2)):
                    for inputs, targets in loop.until_stop(self.loader()):
                        self.number = loop.global_step + 1
                        loss = float(torch.as_tensor(self.run(loop, inputs, targets)).detach())
                        losses.append(f"{self.number} {loss.hex()}")
        except NanLossDuringTrainingError:
            losses.append("failed")
        return losses

    def run(self, loop: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return loop.run(inputs, targets)


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.pow(2).sum(-1, keepdim=True).sqrt()


class InAModule(Case):
    """A norm without eps gets zeros."""

    expected: ClassVar[Found] = {"phase": "forward", "module": "2.norm", "operation": "aten.div.Tensor", "kind": "NaN"}
    text = "return x / x.pow(2).sum(-1, keepdim=True).sqrt()"

    def build(self) -> None:
        inner = nn.Sequential()
        inner.add_module("norm", Root())
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), inner, nn.Linear(8, 1))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        if self.number == 13:
            with torch.no_grad():
                self.model[0].bias.fill_(-50.0)
        return super().step(inputs, targets)


class InAGradient(Case):
    """The square root of zero is finite, and its derivative is not. The loss shows it one step later."""

    expected: ClassVar[Found] = {
        "phase": "backward",
        "module": "last",
        "operation": "aten.div.Tensor",
        "node": "SqrtBackward0",
        "step": 13,
    }
    text = "return self.linear(x).square().sqrt()"

    def build(self) -> None:
        class Last(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear: Any = nn.Linear(8, 1)

            def forward(self, x: torch.Tensor) -> Any:
                return self.linear(x).square().sqrt()

        self.model = nn.Sequential()
        self.model.add_module("first", nn.Linear(4, 8))
        self.model.add_module("last", Last())

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        if self.number == 13:
            for parameter in self.model.parameters():
                torch.nn.init.zeros_(parameter)
        return super().step(inputs, targets)


class InTheFirstStep(Case):
    expected: ClassVar[Found] = {
        "phase": "forward",
        "module": None,
        "operation": "aten.log.default",
        "kind": "NaN",
        "step": 1,
    }
    text = "return (outputs - targets - 100).log().mean()"

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets - 100).log().mean()


class TooLargeARate(Case):
    """The learning rate is far too large: the sum of products overflows to both sides."""

    expected: ClassVar[Found] = {"phase": "forward", "module": "1", "operation": "aten.addmm.default", "kind": "NaN"}

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=1e3)

    def build(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


CASES = [InAModule, InAGradient, InTheFirstStep, TooLargeARate]


class _Once(Case):
    """A NaN that only the first process has, in step 13."""

    @property
    def is_first(self) -> bool:
        return self.number == 13 and not Path("run", "nan.json").exists()


class ABrokenDevice(_Once):
    """A device that returned a wrong bit once."""

    said = "The digests are the same", "a fault of the hardware"

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return super().forward(inputs, targets) + (float("nan") if self.is_first else 0.0)


class UnseededNoise(_Once):
    """Noise of a generator that the script has seeded by the clock, and that no checkpoint contains."""

    said = "noise or a variable of the script", "a fault of the hardware"

    def build(self) -> None:
        self.noise = random.Random(os.urandom(8))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        noise = self.noise.uniform(-1, 1) * 1e-3
        return super().forward(inputs + noise, targets) / (0.0 if self.is_first else 1.0) * (not self.is_first)


class UnseededData(_Once):
    """Data that are augmented by a generator of their own."""

    said = ("The data are not the same: input inputs",)

    def run(self, loop: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4))))
        if self.is_first:
            noise[0, 0] = float("nan")
        return loop.run(inputs + noise, targets)


def report() -> dict[str, Any]:
    (folder,) = Path("run").glob("nan-*")
    return dict(json.loads((folder / "report.json").read_text()))


@pytest.mark.parametrize("case", CASES)
def test_the_second_process_finds_the_cause(case: type[Any]) -> None:
    first = case().train()
    second = case().train()
    assert first[-1] == second[-1] == "failed"
    assert [each for each in first if each in second] == second  # the same bits, from the checkpoint on
    found = report()
    origin = found["origin"]
    assert {name: origin.get(name) for name in case.expected} == case.expected, found["lines"]
    if (text := getattr(case, "text", None)) is not None:
        assert origin["source"]["text"] == text
    assert found["came_back"]
    assert found["digests"] == found["request"]["digests"]
    assert not Path("run", "nan.json").exists()


@pytest.mark.parametrize("case", [ABrokenDevice, UnseededNoise, UnseededData])
def test_a_nan_that_does_not_come_back_is_called_so_and_the_training_run_goes_on(case: type[Any]) -> None:
    assert case().train()[-1] == "failed"
    second = case().train()
    assert second[0].startswith("11 ")
    assert second[-1].startswith("30 ")
    found = report()
    assert not found["came_back"]
    assert "not this time" in found["lines"][0]
    text = "\n".join(found["lines"])
    assert [each for each in case.said if each not in text] == [], text
    assert not Path("run", "nan.json").exists()


def test_the_process_after_the_autopsy_trains_as_ever() -> None:
    first = InAModule().train()
    InAModule().train()
    third = InAModule().train()
    assert third == first[10:]
    assert Path("run", "nan.json").exists()


def test_the_report_says_what_autograd_hooks_see() -> None:
    """The figures of each module, the norms of the gradients, and the first gradient that is not finite."""
    InAGradient().train()
    InAGradient().train()
    found = report()
    seen: dict[str, list[Any]] = {}
    case = InAGradient()
    for name, module in case.model.named_modules():
        module.register_forward_hook(
            lambda _module, _args, out, name=name: seen.setdefault(name, []).append(out.detach())
        )
    norms = []

    def note_norm(optimizer: Any, *_: Any) -> None:
        grads = [parameter.grad for parameter in case.model.parameters()]
        norms.append(torch.cat([grad.reshape(-1) for grad in grads]).norm().item())

    case.optimizer.register_step_pre_hook(note_norm)
    case.data = torch.utils.data.TensorDataset(*case.data.tensors)
    Path("run").rename("elsewhere")
    case.train()
    runs = {run["step"]: run for run in found["runs"]}
    assert sorted(runs) == [11, 12, 13, 14] == list(runs)
    for step, run in runs.items():
        for module in run["modules"]:
            (shown,), value = module["outputs"], seen[module["path"]][step - 1]
            finite = value[value.isfinite()]
            assert shown["shape"] == list(value.shape)
            assert shown["not_finite"] == 1 - len(finite) / value.numel()
            if len(finite):
                assert shown["min"] == finite.min().item()
                assert shown["max"] == finite.max().item()
                assert shown["mean_abs"] == pytest.approx(finite.abs().mean().item(), rel=1e-5)
        assert run["gradient_norm"] == pytest.approx(norms[step - 1], rel=1e-5, nan_ok=True)
    assert [each["path"] for each in found["runs"][found["run"]]["modules"]] == ["first", "last.linear", "last", ""]


class BrokenLongBefore(Case):
    """A weight that becomes infinite, and is used some steps later."""

    def build(self) -> None:
        self.model = nn.ModuleDict({"early": nn.Linear(4, 1), "late": nn.Linear(4, 1)})

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        if self.number == 7:
            with torch.no_grad():
                self.model["late"].weight.mul_(float("inf"))
        return self.loss(self.model["late" if self.number == 18 else "early"](inputs), targets)


def test_a_weight_that_was_broken_long_before_is_looked_at_by_the_third_process() -> None:
    for _ in range(3):
        BrokenLongBefore().train()
    reports = {path.parent.name: json.loads(path.read_text()) for path in Path("run").glob("nan-*/report.json")}
    second, third = reports["nan-18"], reports["nan-7"]
    assert second["origin"]["tensor"] == "parameter late.weight"
    assert second["not_finite_first"] == {"when": "since step 7", "step": 7, "names": ["parameter late.weight"]}
    assert "Start the script again to look at step 7 in the same way." in second["lines"]
    assert (third["origin"]["step"], third["origin"]["operation"]) == (7, "aten.mul_.Tensor")
    assert third["origin"]["source"]["text"] == 'self.model["late"].weight.mul_(float("inf"))'
    # The checkpoints of steps 10 and 15 have the infinite weight.
    assert second["restored_step"] == third["restored_step"] == 5
