"""Reading the memory of a tensor changes nothing about it: its storage can still be resized."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.packages import import_or_skip

import torchhooks
from torchhooks import (
    BestCheckpointHook,
    CallFnHook,
    CheckpointSaverHook,
    EvaluationHook,
    FeedFnHook,
    FinalOpsHook,
    LedgerHook,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    ProfilerHook,
    ProgressBarHook,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    StopIfHigherHook,
    StopIfLowerHook,
    StopIfNoDecreaseHook,
    StopIfNoIncreaseHook,
    SummarySaverHook,
    Variables,
    grad_norm,
    param_norm,
    running_mean,
    summary,
)
from torchhooks.common.digests import digest
from torchhooks.common.memory import array_of, bytes_of

# -- arrays and bytes --------------------------------------------------------------------------------------------------

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: torch.tensor(1.5),
    "small": lambda: torch.arange(12.0).reshape(3, 4),
    "large": lambda: torch.arange(4000.0).reshape(40, 100),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "large, transposed": lambda: torch.arange(4000.0).reshape(40, 100).t(),
    "of a part": lambda: torch.arange(4000.0)[17:2999:3],
    "expanded": lambda: torch.zeros(1).expand(5, 5),
    "empty": lambda: torch.empty(0, 3),
    "with a gradient": lambda: torch.arange(3.0, requires_grad=True),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1 + 2j]),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j]).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_an_array_has_the_values_and_leaves_the_storage_as_it_is(name: str) -> None:
    tensor = TENSORS[name]()
    got, wanted = array_of(tensor), tensor.detach().clone().resolve_conj().resolve_neg().numpy()
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(got, wanted)
    digest(tensor)
    assert tensor.untyped_storage().resizable()


def test_a_digest_is_of_the_values_and_not_of_what_is_in_the_memory() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert digest(value.conj()) == digest(value.conj().resolve_conj()) != digest(value)
    assert digest(value.conj().imag) == digest(-value.imag) != digest(value.imag)


def test_an_array_outlives_its_tensor() -> None:
    arrays = [array_of(torch.full((size,), 7.0)) for size in (2, 5000)]
    others = [torch.zeros(size) for size in (2, 5000) for _ in range(20)]
    assert all((array == 7).all() for array in arrays)
    assert len(others) == 40


def test_dtypes_and_layouts_that_numpy_lacks_are_type_errors() -> None:
    for tensor in (torch.zeros(2, dtype=torch.bfloat16), torch.eye(2).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises(TypeError):
            array_of(tensor)


def test_a_storage_that_was_resized_to_nothing_is_not_read() -> None:
    tensor = torch.zeros(64)
    tensor.untyped_storage().resize_(0)
    for read in (bytes_of, array_of, digest):
        with pytest.raises(RuntimeError, match=r"shape \(64,\) has no memory: its storage may have been"):
            read(tensor)


# -- all hooks ---------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Has a buffer that it resizes in each step, as torch's fake quantization does."""

    range: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.register_buffer("range", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = self.range.numel() % 6 + 2
        self.range.resize_(size)
        self.range.zero_()
        output: torch.Tensor = self.linear(x)
        return output

    def _load_from_state_dict(self, state: dict[str, torch.Tensor], prefix: str, *args: Any) -> None:
        self.range.resize_(state[f"{prefix}range"].shape)
        super()._load_from_state_dict(state, prefix, *args)


class Keep(SessionRunHook):
    """Keeps the results that the loop hands out, and the values that arrive later."""

    def __init__(self) -> None:
        self.kept: list[object] = []

    def before_run(self, run_context: Any) -> torchhooks.SessionRunArgs:
        return torchhooks.SessionRunArgs(["loss", "prediction", "linear.weight", "range"])

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.kept.append(run_values.results)
        run_context.when_ready(run_values.results, self.kept.append)


def hooks(folder: str, last_step: int) -> list[SessionRunHook]:
    fetches: list[Any] = ["loss", "linear.weight", "range", "prediction", "x", lambda model: model.linear.bias]
    return [
        CheckpointSaverHook(every_n_steps=2, async_save=True),
        CheckpointSaverHook(f"{folder}/others", every_n_steps=3),
        BestCheckpointHook(metric="loss", mode="min", every_n_steps=2, async_save=True),
        SummarySaverHook(
            2,
            output_dir=folder,
            summary_op=[
                *(summary.histogram(str(number), fetch) for number, fetch in enumerate(fetches)),
                summary.image("image", lambda x: x[None]),
                {"norm": param_norm(), "gradients": grad_norm(), "loss": running_mean("loss"), "wide": "wide"},
            ],
        ),
        LoggingTensorHook(fetches[:5], every_n_steps=2, at_end=True),
        NanTensorHook(["loss", "prediction", "range"]),
        EvaluationHook(lambda model: {"weight": model.linear.weight.sum()}, every_n_steps=2),
        FinalOpsHook(fetches[:5]),
        CallFnHook(lambda loss, prediction, x: None, every_n_steps=2),
        FeedFnHook(lambda: {"noise": torch.zeros(1)}),
        StepCounterHook(2),
        ProfilerHook(save_steps=5, output_dir=folder),
        ProgressBarHook(values=["loss", "prediction"]),
        LedgerHook(folder),
        StopIfHigherHook("loss", 1e9),
        StopIfLowerHook("loss", -1.0),
        StopIfNoDecreaseHook("loss", 100),
        StopIfNoIncreaseHook("loss", 100),
        StopAtStepHook(last_step=last_step),
        Keep(),
    ]


# They need another process, or a store.
NOT_TRIED = {"GlobalStepWaiterHook", "MirrorHook", "PeriodicHook", "SessionRunHook"}


def test_all_hooks_are_tried() -> None:
    import_or_skip("tqdm")
    names = {name for name in torchhooks.__all__ if name.endswith("Hook")}
    assert {type(hook).__name__ for hook in hooks("run", 1)} == (names - NOT_TRIED) | {"Keep"}


def test_no_hook_no_checkpoint_and_no_resume_makes_a_storage_non_resizable(tmp_path: Path) -> None:
    import_or_skip("tqdm")
    before = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    for last_step in (7, 12):
        kept: list[object] = []
        model, batches, variables = Model(), [torch.randn(3, 4) for _ in range(6)], Variables(history=torch.zeros(5))
        optimizer = torch.optim.Adam(model.parameters(), 0.01)

        def step(
            x: torch.Tensor,
            noise: torch.Tensor,
            model: Model = model,
            optimizer: torch.optim.Optimizer = optimizer,
            kept: list[object] = kept,
        ) -> dict[str, torch.Tensor]:
            if len(kept) % 4 == 0:  # in between, gradients accumulate and are saved
                optimizer.zero_grad()
            prediction = model(x) + noise
            loss = prediction.square().mean()
            loss.backward()
            if len(kept) % 4 == 2:
                optimizer.step()
            outputs = {"loss": loss, "prediction": prediction, "wide": torch.tensor([[1.0]], dtype=torch.float64)}
            kept.append(outputs)
            return outputs

        with MonitoredLoop(
            step,
            model,
            optimizer,
            hooks=hooks(str(tmp_path), last_step),
            checkpoint_dir=str(tmp_path),
            state={"variables": variables},
        ) as loop:
            for _ in loop.until_stop(range(4)):
                for batch in loop.until_stop(batches):
                    variables.history += 1
                    kept.append(loop.run(batch))
        assert loop.global_step == last_step
        after = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about storages
            new = [each for each in after if not any(each is one for one in before)]
            assert len(new) > 40
            assert [each for each in new if each.is_cpu and not each.untyped_storage().resizable()] == []
