"""Scripts of users with a planted cause of a NaN: the operator, the line, the item and the module have to be right.

The line is the one with the comment ``cause``. It runs in step 13, which gets item 12, whenever the NaN shows.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.rank_threads import Hub, ThreadRanks, in_threads
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchhooks import (
    CheckpointSaverHook,
    EvaluationHook,
    MonitoredLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    PeerError,
    SessionRunHook,
    grad_norm,
)
from torchhooks.tools.autopsy.watching import _uses_compiler

BAD, ITEM = 13, 12


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    torch.use_deterministic_algorithms(False)
    if _uses_compiler(None):
        torch.compiler.reset()
        sys.modules["torch._dynamo.utils"].counters.clear()


class Script:
    """A script of a user. Each process makes another object of it."""

    operation: ClassVar[str | None] = None
    module: ClassVar[str | None] = None
    rank: ClassVar[int] = 0
    tensor: ClassVar[str | None] = None
    said: ClassVar[str | None] = None
    """A line of the report."""
    state_of: ClassVar[int] = BAD - 1
    """The step of the state before the run."""
    line_of: ClassVar[type | None] = None
    """The class in whose source the line is, if it is not the script's own."""
    processes: ClassVar[int] = 2
    arguments: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.is_bad = False
        self.state: dict[str, Any] = {}
        self.model: Any = self.new_model()
        self.optimizer = self.new_optimizer()
        self.data = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(15)]

    def new_model(self) -> Any:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Part(self), nn.Linear(8, 1))

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def part(self, x: torch.Tensor) -> Any:
        """Run in the module 2."""
        return x

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return F.mse_loss(outputs, targets)

    def step(self, inputs: Any, targets: Any) -> Any:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def hooks(self) -> list[Any]:
        return [NanTensorHook("loss")]

    def run(self, loop: Any, *batch: Any) -> None:
        loop.run(*batch)

    def train(self, **arguments: Any) -> BaseException | None:
        """Train as a process does, and return the error."""
        hooks = [*self.hooks(), CheckpointSaverHook("run", save_steps=5)]
        arguments = {"checkpoint_dir": "run", "state": self.state, **self.arguments, **arguments}
        try:
            with MonitoredLoop(self.step, self.model, self.optimizer, hooks=hooks, **arguments) as loop:
                for _ in loop.until_stop(range(2)):
                    for batch in loop.until_stop(self.data):
                        self.is_bad = loop.batch == ITEM and not loop.epoch
                        self.run(loop, *batch)
        except (NanLossDuringTrainingError, AssertionError, PeerError) as error:
            return error
        return None

    def in_turn(self) -> None:
        """Train in one process after the other."""
        for _ in range(self.processes):
            assert isinstance(type(self)().train(), NanLossDuringTrainingError | AssertionError)


class Part(nn.Module):
    """A module whose forward is a method of the script."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.call = script.part

    def __deepcopy__(self, memo: object) -> Part:
        return self

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(x)


# -- the forward pass -------------------------------------------------------------------------------------------------


class NormWithoutEps(Script):
    operation, module = "aten.div.Tensor", "2"

    def part(self, x: torch.Tensor) -> Any:
        x = x * (not self.is_bad)
        return x / x.square().sum(-1, keepdim=True).sqrt().detach()  # cause


class WeightedLoss(Script):
    operation = "aten.div.Tensor"

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        weights = (targets > (10 if self.is_bad else -10)).float()
        return (weights * (outputs - targets) ** 2).sum() / weights.sum()  # cause


class ReplacedAgain(Script):
    operation, module = "aten.log.default", "2"

    def part(self, x: torch.Tensor) -> Any:
        x = x + (x.detach() * 0 / 0).nan_to_num()
        if self.is_bad:
            x = x + (x.detach() - 9).log()  # cause
        return x


class SoftmaxByHand(Script):
    operation, module = "aten.exp.default", "2"

    def part(self, x: torch.Tensor) -> Any:
        high = (x * (1e4 if self.is_bad else 1)).exp()  # cause
        return high / high.sum(-1, keepdim=True)


class MaskedRow(Script):
    operation, module = "aten.masked_fill.Scalar", "2"

    def part(self, x: torch.Tensor) -> Any:
        mask = torch.ones(4, 4, dtype=torch.bool).triu(0 if self.is_bad else 1)
        scores = (x @ x.T).masked_fill(mask, float("-inf"))  # cause
        return scores.softmax(-1) @ x


class RunningVariance(Script):
    """The statistics of a batch of one are used in the next step."""

    operation, module = "aten.div.Tensor", "2"

    def new_model(self) -> Any:
        self.variance = torch.ones(8)
        model = super().new_model()
        model.register_buffer("variance", self.variance)
        return model

    def part(self, x: torch.Tensor) -> Any:
        scale = self.model.variance.add(1e-5).sqrt()
        rows = x.detach()[: 1 if self.is_bad else 4]
        spread = (rows - rows.mean(0)).square().sum(0) / (len(rows) - 1)  # cause
        self.model.variance.lerp_(spread, 0.1)
        return x / scale.clone()


class LossAsANumber(Script):
    """The step is the body of ``with loop.step()``, and the loss a number of Python."""

    operation = "aten.log.default"

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        loss = super().loss(outputs, targets)
        return (loss * (-1 if self.is_bad else 1)).log()  # cause

    def run(self, loop: Any, *batch: Any) -> None:
        with loop.step() as outputs:
            outputs["loss"] = self.step(*batch).item()


class TwoNumbers(Script):
    """Another number is NaN in every step."""

    operation = "aten.log.default"

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return (super().loss(outputs, targets) * (-1 if self.is_bad else 1)).log()  # cause

    def step(self, inputs: Any, targets: Any) -> Any:
        accuracy = (torch.zeros(()) / 0).item()
        return {"loss": super().step(inputs, targets).item(), "accuracy": accuracy}


class PaddedSequence(Script):
    """Attention to a sequence that has only padding."""

    operation, module = "aten.masked_fill_.Scalar", "2.attention"

    def new_model(self) -> Any:
        model = super().new_model()
        model[2].attention = nn.MultiheadAttention(8, 2, batch_first=True)
        return model

    def part(self, x: torch.Tensor) -> Any:
        x, padding = x[None], torch.full((1, 4), self.is_bad)
        return self.model[2].attention(x, x, x, key_padding_mask=padding)[0][0]  # cause


class AnAssertion(Script):
    """The script notices the NaN itself, when the autopsy is made."""

    operation, module = "aten.sqrt.default", "2"

    def part(self, x: torch.Tensor) -> Any:
        x = x + (x.detach() * 0 - float(self.is_bad)).sqrt()  # cause
        assert x.isfinite().all() or not Path("run/nan.json").exists()
        return x


# -- the backward pass ------------------------------------------------------------------------------------------------


class RootOfZero(Script):
    """What needs no gradient, a mask and a metric, comes after the root."""

    operation, module = "aten.div.Tensor", "2"

    def part(self, x: torch.Tensor) -> Any:
        if self.is_bad:
            x = x * 0
        x = x.square().sqrt()  # cause
        (x.detach() > 0).float().mean()
        return x


class WhereOfALogarithm(Script):
    operation, module = "aten.div.Tensor", "2"

    def part(self, x: torch.Tensor) -> Any:
        x = x * (not self.is_bad)
        high = x.square() + (not self.is_bad)
        logs = high.log()  # cause
        return x + torch.where(high > 0, logs, torch.zeros_like(logs))


class Arctangent(Script):
    operation = "aten.div.Tensor"

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        scale = 0 if self.is_bad else 1
        return torch.hypot(outputs * scale, targets * scale).mean()  # cause


class GradientPenalty(Script):
    """The gradient of a gradient: the norm is that of zeros."""

    operation = "aten.div.Tensor"

    def step(self, inputs: Any, targets: Any) -> Any:
        self.optimizer.zero_grad()
        inputs = inputs.clone().requires_grad_()
        outputs = self.model(inputs) * (not self.is_bad)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        norm = slope.square().sum(1).sqrt()  # cause
        loss = self.loss(outputs, targets) + (norm - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class DoubleBackward(Script):
    """The cause is the derivative of an operator that the first backward pass ran."""

    operation, module = "aten.pow.Tensor_Scalar", "2"

    def new_model(self) -> Any:
        return nn.Sequential(nn.Linear(4, 8), nn.Identity(), Part(self), nn.Linear(8, 1))

    def part(self, x: torch.Tensor) -> Any:
        if self.is_bad:
            x = x * 0
        return (x + (not self.is_bad) * 3).relu().pow(1.5).square().pow(0.75)  # cause

    def step(self, inputs: Any, targets: Any) -> Any:
        self.optimizer.zero_grad()
        inputs = inputs.clone().requires_grad_()
        outputs = self.model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        loss = self.loss(outputs, targets) + slope.square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class HookOnATensor(Script):
    operation, module = "aten.div.Tensor", "2"

    def part(self, x: torch.Tensor) -> Any:
        x = x * 1
        x.register_hook(lambda grad: grad / (not self.is_bad))  # cause
        return x


class ClippedInfinity(Script):
    """An infinite gradient, which the clipping makes a NaN."""

    operation, module = "aten.div.Tensor", "2"

    def part(self, x: torch.Tensor) -> Any:
        if self.is_bad:
            x = x * 0 + torch.tensor([0.0] + [1.0] * 7)
        return x.abs().sqrt()  # cause

    def step(self, inputs: Any, targets: Any) -> Any:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()


class ViewInPlace(Script):
    """The backward pass of an operator that writes to a part of a tensor."""

    operation, module = "aten.div.Tensor", "2"

    def part(self, x: torch.Tensor) -> Any:
        x = x.square() * (not self.is_bad)
        x[:, 0].sqrt_()  # cause
        (x.detach() > 0).float().mean()
        return x


class IndexPut(Script):
    operation, module = "aten.div.Tensor", "2"

    def part(self, x: torch.Tensor) -> Any:
        x = x.clone()
        x[:, 1:3] = x[:, :2].detach() * 0 / (not self.is_bad)  # cause
        return x


# -- the optimizer ----------------------------------------------------------------------------------------------------


class OptimizerScript(Script):
    """A unit that no example has activated, of which the second moment is 0."""

    def part(self, x: torch.Tensor) -> Any:
        return x * (not self.is_bad)

    def step(self, inputs: Any, targets: Any) -> Any:
        if self.is_bad:
            self.optimizer.state.clear()
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()  # cause
        return loss.detach()


class AdamWithoutEps(OptimizerScript):
    operation = "aten.addcdiv_.default"

    def new_optimizer(self) -> Any:
        return torch.optim.Adam(self.model.parameters(), lr=1e-2, eps=0, foreach=False)


class ForeachAdam(OptimizerScript):
    operation = "aten._foreach_addcdiv_.ScalarList"

    def new_optimizer(self) -> Any:
        return torch.optim.Adam(self.model.parameters(), lr=1e-2, eps=0, foreach=True)


class FusedAdam(OptimizerScript):
    operation = "aten._fused_adamw_.default"

    def new_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=0, fused=True)


class RateOfAScheduler(Script):
    operation = "aten.add_.Tensor"
    said = "The learning rate of step 13 was nan."

    def new_optimizer(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=1e-2, foreach=False)

    def step(self, inputs: Any, targets: Any) -> Any:
        self.optimizer.param_groups[0]["lr"] = float("nan") if self.is_bad else 1e-2
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()  # cause
        return loss.detach()


class OptimizerInTheBackwardPass(Script):
    operation = "aten.addcdiv_.default"

    def new_optimizer(self) -> Any:
        optimizers = {each: torch.optim.Adam([each], eps=0, foreach=False) for each in self.model.parameters()}

        def update(parameter: Any) -> None:
            if self.is_bad:
                optimizers[parameter].state.clear()
            optimizers[parameter].step()  # cause
            optimizers[parameter].zero_grad()

        for each in self.model.parameters():
            each.register_post_accumulate_grad_hook(update)
        return torch.optim.SGD(self.model.parameters(), lr=0.0)

    def part(self, x: torch.Tensor) -> Any:
        return x * (not self.is_bad)


class Closure(Script):
    operation = "aten.log.default"

    def new_optimizer(self) -> Any:
        return torch.optim.LBFGS(self.model.parameters(), max_iter=2)

    def step(self, inputs: Any, targets: Any) -> Any:
        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.loss(self.model(inputs), targets)
            loss = (loss - 100 * self.is_bad).log()  # cause
            loss.backward()
            return loss

        return self.optimizer.step(closure)


class ByHand(Script):
    operation, tensor = "aten.div_.Tensor", "parameter 0.weight"

    def step(self, inputs: Any, targets: Any) -> Any:
        loss = super().step(inputs, targets)
        with torch.no_grad():
            self.model[0].weight[0].div_(float(not self.is_bad))  # cause
        return loss


class OwnOptimizer(Script):
    operation = "aten.div_.Tensor"

    def new_optimizer(self) -> Any:
        script = self

        class Own(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                for parameter in self.param_groups[0]["params"]:
                    parameter -= 0.01 * parameter.grad
                    if script.is_bad:
                        parameter.mul_(0).div_(0)  # cause

        return Own(self.model.parameters(), {})


# -- kinds of tensors and of training ---------------------------------------------------------------------------------


class CompiledPart(nn.Module):
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift.sqrt()  # cause


class CompiledRoot(CompiledPart):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.shift).square().sqrt()  # cause


class Half(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return (super().forward(x) * 0).float()  # cause


class Compiled(Script):
    operation, module, line_of = "aten.sqrt.default", "2", CompiledPart

    def new_model(self) -> Any:
        torch.compiler.reset()
        model = super().new_model()
        assert self.line_of is not None
        model[2] = self.line_of()
        self.inner = model[2]
        return torch.compile(model, backend="aot_eager")

    def step(self, inputs: Any, targets: Any) -> Any:
        self.inner.shift.fill_(-float(self.is_bad))
        return super().step(inputs, targets)


class CompiledBackward(Compiled):
    """The step before the NaN is looked at by the third process, because compiled code cannot be watched."""

    operation, processes, line_of = "aten.div.Tensor", 3, CompiledRoot

    def step(self, inputs: Any, targets: Any) -> Any:
        self.inner.shift.fill_(float(not self.is_bad))
        return Script.step(self, inputs, targets)


class HalfPrecision(Script):
    operation, module, line_of = "aten._to_copy.default", "3", Half

    def part(self, x: torch.Tensor) -> Any:
        return x * (1e6 if self.is_bad else 1)

    def new_model(self) -> Any:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Part(self), Half(8, 1))


class SkippedByAScaler(NormWithoutEps):
    """A GradScaler skips a step because of an infinite gradient, which is no NaN of the loss."""

    def new_model(self) -> Any:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        self.steps = 0
        return super().new_model()

    def part(self, x: torch.Tensor) -> Any:
        x = x * (not self.is_bad)
        return x / x.square().sum(-1, keepdim=True).sqrt().detach()  # cause

    def step(self, inputs: Any, targets: Any) -> Any:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets)
        self.scaler.scale(loss).backward()
        if torch.equal(inputs, self.data[10][0]):
            self.model[0].weight.grad[0, 0] = float("inf")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


class Vmapped(Script):
    operation, module = "aten.div.Tensor", "2"

    def part(self, x: torch.Tensor) -> Any:
        x = x * (not self.is_bad)
        return torch.func.vmap(lambda row: row / row.square().sum().detach().sqrt())(x)  # cause


class GradientOfEachExample(Script):
    operation, module = "aten.div.Tensor", "2"

    def part(self, x: torch.Tensor) -> Any:
        def energy(row: torch.Tensor) -> torch.Tensor:
            return row.square().sum().sqrt()  # cause

        return x + torch.func.vmap(torch.func.grad(energy))(x.detach() * (not self.is_bad))


class Nested(Script):
    operation, module = "aten.div.Tensor", "2"

    def part(self, x: torch.Tensor) -> Any:
        rows = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)
        rows = rows / (not self.is_bad) * (not self.is_bad)  # cause
        return torch.cat(list(rows.unbind()))


class SparseEmbedding(Script):
    """The gradient of the embedding is sparse, and the root is the cause."""

    operation = "aten.div.Tensor"

    def new_model(self) -> Any:
        return nn.Embedding(20, 4, sparse=True)

    def new_optimizer(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        outputs = outputs * (not self.is_bad)
        return outputs.square().sum(-1).sqrt().mean()  # cause

    def step(self, inputs: Any, targets: Any) -> Any:
        return super().step(torch.arange(20), targets)


class SparseProduct(Script):
    """An adjacency that is divided by degrees, of which one is 0."""

    operation, module = "aten.div.Tensor", "2"

    def part(self, x: torch.Tensor) -> Any:
        degrees = torch.tensor([1.0, 2, 1, not self.is_bad])
        places = torch.arange(4).expand(2, 4)
        values = torch.tensor([1.0, 1, 1, 0]) / degrees  # cause
        return torch.sparse.mm(torch.sparse_coo_tensor(places, values, (4, 4)), x) + x


class Checkpointed(Script):
    operation, module = "aten.div.Tensor", "2"
    use_reentrant = False

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (not self.is_bad)
        x = x.square().sqrt()  # cause
        return x.tanh()

    def part(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (not self.is_bad)
        x = x.square().sqrt()  # cause
        return x.tanh()


class FunctionBackward(Script):
    operation, module = "aten.div.Tensor", "2"

    def part(self, x: torch.Tensor) -> Any:
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
                ctx.scale = scale
                return x * scale

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return grad / ctx.scale, None  # cause

        return Scaled.apply(x, float(not self.is_bad))  # type: ignore[no-untyped-call]


class FunctionForward(Script):
    operation, module = "aten.log.default", "2"

    def part(self, x: torch.Tensor) -> Any:
        class Logarithm(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.abs().neg().log() if self.is_bad else x.clone()  # cause

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return grad

        return Logarithm.apply(x)  # type: ignore[no-untyped-call]


# -- what stays from step to step -------------------------------------------------------------------------------------


class EmaScript(Script):
    """A teacher, whose outputs are the targets of the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.state = {"ema": self.teacher}

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return F.mse_loss(outputs, targets + self.teacher(self.inputs))

    def update(self) -> None:
        decay = torch.tensor(0.9) if not self.is_bad else torch.zeros(()) / 0  # cause
        for mean, parameter in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 1 - decay)

    def step(self, inputs: Any, targets: Any) -> Any:
        self.inputs = inputs
        return super().step(inputs, targets)


class EmaInAHook(EmaScript):
    operation = "aten.div.Tensor"

    def update(self) -> None:
        decay = torch.tensor(0.9) if not self.is_bad else torch.zeros(()) / 0  # cause
        for mean, parameter in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 1 - decay)

    def hooks(self) -> list[Any]:
        script = self

        class Averaging(SessionRunHook):
            def after_run(self, run_context: Any, run_values: Any) -> None:
                script.update()

        return [NanTensorHook("loss"), Averaging()]


class EmaInTheStep(EmaScript):
    operation = "aten.div.Tensor"

    def step(self, inputs: Any, targets: Any) -> Any:
        loss = super().step(inputs, targets)
        decay = torch.tensor(0.9) if not self.is_bad else torch.zeros(()) / 0  # cause
        for mean, parameter in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 1 - decay)
        return loss


class AccumulatedRuns(Script):
    """The NaN of the first of two gradients shows when both were used."""

    operation, module = "aten.div.Tensor", "2"

    def part(self, x: torch.Tensor) -> Any:
        x = x * (not self.is_bad)
        return x.square().sqrt()  # cause

    def step(self, inputs: Any, targets: Any) -> Any:
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        if self.steps % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def run(self, loop: Any, *batch: Any) -> None:
        self.steps = loop.batch
        loop.run(*batch)


class AccumulatedSteps(AccumulatedRuns):
    arguments: ClassVar[dict[str, Any]] = {"step_unit": "optimizer_step"}
    state_of = 6

    def part(self, x: torch.Tensor) -> Any:
        x = x * (not self.is_bad)
        return x.square().sqrt()  # cause


class SumOfGradients(Script):
    """Two gradients that are finite, and whose sum is not."""

    operation = "aten.add_.Tensor"
    tensor = "the gradient of parameter 3.bias"

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return F.mse_loss(outputs, targets) + outputs.sum() * (2e38 / 4 if self.is_bad else 0)

    def step(self, inputs: Any, targets: Any) -> Any:
        self.optimizer.zero_grad()
        for _ in range(2):
            loss = self.loss(self.model(inputs), targets)
            loss.backward()  # cause
        self.optimizer.step()
        return loss.detach() * 0


# -- data -------------------------------------------------------------------------------------------------------------


class DataScript(Script):
    """The data have a NaN: there is no operator and no line."""

    figures: ClassVar[str] = "float32 4x4 from -1.244 to 2.345, mean of |x| 0.882, 6.25 % not finite"
    said = f"Cause: the data. There is a NaN in input inputs ({figures})."

    def __init__(self) -> None:
        super().__init__()
        self.data[ITEM][0][1, 2] = float("nan")


class DataOfTorch(DataScript):
    tensor = "input inputs"


class DataOfNumPy(DataScript):
    tensor = "input inputs"

    def __init__(self) -> None:
        super().__init__()
        self.data = [(inputs.numpy(), targets.numpy()) for inputs, targets in self.data]  # type: ignore[misc]

    def step(self, inputs: Any, targets: Any) -> Any:
        return super().step(torch.from_numpy(inputs), torch.from_numpy(targets))


class CopiedFromNumPy(DataScript):
    tensor, said = "input inputs", DataScript.said.replace("float32", "float64")

    def __init__(self) -> None:
        super().__init__()
        self.data = [(x.double().numpy(), y.double().numpy()) for x, y in self.data]  # type: ignore[misc]

    def step(self, inputs: Any, targets: Any) -> Any:
        return super().step(torch.tensor(np.asarray(inputs), dtype=torch.float32), torch.as_tensor(targets).float())


class Unwritten(Script):
    """A part of a buffer that nothing wrote to. torch fills it with NaN if algorithms are to be deterministic."""

    operation, module = "aten.empty.memory_format", "2"

    def part(self, x: torch.Tensor) -> Any:
        torch.use_deterministic_algorithms(True)
        rows = torch.empty(4, 8)  # cause
        rows[: 3 if self.is_bad else 4] = x.detach()[: 3 if self.is_bad else 4]
        return x + rows


# -- fetches, evaluation and ranks ------------------------------------------------------------------------------------


class Fetched(Script):
    operation = "aten.log.default"

    def hooks(self) -> list[Any]:
        def entropy(loss: torch.Tensor) -> Any:
            return (loss - 1e3 * self.is_bad).log()  # cause

        return [NanTensorHook(entropy)]


class NormOfGradients(RootOfZero):
    """The norm of the gradients is looked at, so that the NaN shows in the same step."""

    def part(self, x: torch.Tensor) -> Any:
        if self.is_bad:
            x = x * 0
        return x.square().sqrt()  # cause

    def hooks(self) -> list[Any]:
        return [NanTensorHook(grad_norm())]


class BrokenByAnEvaluation(Script):
    """An evaluation of one example, with a model that updates its statistics."""

    operation = "aten.div.Tensor"

    def hooks(self) -> list[Any]:
        self.model.register_buffer("spread", torch.ones(1))

        def evaluate() -> dict[str, float]:
            outputs = self.model(self.data[0][0][: 1 if self.is_bad else 4]).detach()
            spread = (outputs - outputs.mean()).square().sum() / (len(outputs) - 1)  # cause
            self.model.spread.lerp_(spread, 0.5)
            return {"spread": 0.0}

        return [NanTensorHook("loss"), EvaluationHook(evaluate, every_n_steps=1)]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return F.mse_loss(outputs, targets) / self.model.spread.clone()


class TwoRanks(Script):
    operation, module, rank = "aten.div.Tensor", "2", 1

    def part(self, x: torch.Tensor) -> Any:
        x = x * (not self.is_bad)
        return x / x.square().sum(-1, keepdim=True).sqrt().detach()  # cause

    def in_turn(self) -> None:
        for _ in range(2):
            scripts = [NothingBad(), type(self)()]
            for script in scripts:  # nothing reduces their gradients
                script.model.per_rank = True

            def train_rank(ranks: ThreadRanks, hub: Hub, scripts: list[Any] = scripts) -> Any:
                return scripts[ranks.rank].train(ranks=ranks)

            errors = in_threads(2, train_rank)
            assert NanLossDuringTrainingError in map(type, errors) or AssertionError in map(type, errors)


class NothingBad(Script):
    """What the other rank does."""


class TwoRanksLater(TwoRanks):
    operation = "aten.div.Tensor"

    def part(self, x: torch.Tensor) -> Any:
        x = x * (not self.is_bad)
        return x.square().sqrt()  # cause


def _scripts(base: type[Script]) -> Iterator[type[Script]]:
    for each in base.__subclasses__():
        yield from _scripts(each)
        if each not in (NothingBad, OptimizerScript, DataScript, EmaScript):
            yield each


SCRIPTS = list(dict.fromkeys(_scripts(Script)))
FAST = ("NormWithoutEps", "RootOfZero")  # the others are slow together


def _cause_line(script: type[Any]) -> int:
    """Return the number of the line with the comment in the source of ``script``."""
    kinds = [script.line_of] if script.line_of is not None else [each for each in script.__mro__ if each is not object]
    for kind in kinds:
        lines, first = inspect.getsourcelines(kind)
        found = [first + number for number, line in enumerate(lines) if line.endswith("# cause\n")]
        if found:
            (line,) = found
            return line
    raise AssertionError(f"{script} has no cause")


def grade(script: type[Any]) -> dict[str, Any]:
    """Train until the cause is known, and return what the report should say, and what else it says."""
    script().in_turn()
    path = max(Path("run").glob("nan-*/report*.json"), key=lambda path: path.stat().st_mtime_ns)
    report = json.loads(path.read_text())
    origin = report["origin"]
    expected = {
        "operation": script.operation,
        "line": None if script.operation is None else _cause_line(script),
        "item": ITEM,
        "module": script.module,
        "rank": script.rank,
        # What only some scripts say; of the others, whatever it is.
        "tensor": script.tensor or origin["tensor"],
        "said": script.said or report["lines"][0],
        # The state before the step, and what the step got.
        "state": f"model.ckpt-{script.state_of}",
        "files": True,
    }
    found = {
        "operation": origin["operation"],
        "line": origin["source"] and origin["source"]["line"],
        "item": report["runs"][report["run"]]["item"],
        "module": origin["module"],
        "rank": report["rank"],
        "tensor": origin["tensor"],
        "said": expected["said"] if expected["said"] in report["lines"] else report["lines"],
        "state": report["state"],
        "files": (path.parent / str(report["state"])).is_dir()
        and (path.parent / report["batch_file"]["file"]).exists(),
    }
    return {key: (found[key], value) for key, value in expected.items() if found[key] != value}


SLOW = [script for script in SCRIPTS if script.__name__ not in FAST]
# The gate takes some of those, and pytest --all takes all.
CASES: list[Any] = [script for script in SCRIPTS if script.__name__ in FAST]
CASES += [pytest.param(each, marks=pytest.mark.release if n % 4 else pytest.mark.slow) for n, each in enumerate(SLOW)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("script", CASES)
def test_the_operator_the_line_the_item_and_the_module_are_right(script: type[Any]) -> None:
    assert grade(script) == {}
