"""Values that are no ordinary tensors: they are shown, or the error names the hook, the fetch and the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.packages import import_or_skip

from torchhooks import (
    BestCheckpointHook,
    CallFnHook,
    EvaluationHook,
    FinalOpsHook,
    LedgerHook,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    ProgressBarHook,
    SessionRunHook,
    StopIfHigherHook,
    SummarySaverHook,
    running_mean,
    summary,
)
from torchhooks.testing import RecordingWriter, log_lines

pytestmark = pytest.mark.filterwarnings("ignore")  # torch says that some of these are deprecated, and some in beta


class Wrapper(torch.Tensor):
    """A tensor that has another one, and no operations."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - as the documentation of torch has it
        wrapper: Wrapper = make(cls, inner.shape, dtype=inner.dtype)
        return wrapper

    def __init__(self, inner: torch.Tensor) -> None:
        self.wrapped = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return "Wrapper"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"no {func}")


VALUES: dict[str, Callable[[], Any]] = {
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "nested, one": lambda: torch.nested.nested_tensor([torch.ones(1)]),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "csr, one": lambda: torch.ones(1, 1).to_sparse_csr(),
    "coo, one": lambda: torch.ones(1).to_sparse(),
    "complex32": lambda: torch.ones(2, dtype=torch.complex32),
    "long double": lambda: np.longdouble(1.5),
    "long doubles": lambda: np.ones(2, np.longdouble),
    "wrapper": lambda: Wrapper(torch.ones(())),
    "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "dates": lambda: np.datetime64("2020"),
}

HOOKS: dict[str, Callable[[str], SessionRunHook]] = {
    "log": lambda folder: LoggingTensorHook(["v"], every_n_steps=1),
    "final": lambda folder: FinalOpsHook("v"),
    "bar": lambda folder: ProgressBarHook(values=["v"]),
    "scalar": lambda folder: SummarySaverHook(1, summary_writer=RecordingWriter(), summary_op={"v": "v"}),
    "histogram": lambda folder: SummarySaverHook(
        1, summary_writer=RecordingWriter(), summary_op=[summary.histogram("v", "v")]
    ),
    "image": lambda folder: SummarySaverHook(1, summary_writer=RecordingWriter(), summary_op=[summary.image("v", "v")]),
    "nan": lambda folder: NanTensorHook("v"),
    "mean": lambda folder: LoggingTensorHook({"m": running_mean("v")}, every_n_steps=1),
    "call": lambda folder: CallFnHook(lambda v: None, every_n_steps=1),
    "stop": lambda folder: StopIfHigherHook("v", threshold=5.0),
    "best": lambda folder: BestCheckpointHook(folder, "v", mode="min", every_n_steps=1),
    "ledger": lambda folder: LedgerHook(folder),
}


def train(hook: SessionRunHook, value: Any) -> list[str]:
    """Return the lines of a loop whose step returns ``value``."""
    with log_lines() as lines, MonitoredLoop(lambda: {"v": value}, torch.nn.Linear(1, 1), hooks=[hook]) as loop:
        for _ in loop.until_stop(range(2)):
            loop.run()
    return [text for _, text in lines]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", VALUES)
def test_an_odd_value_is_taken_or_named_with_its_hook(name: str, hook: str, tmp_path: Any) -> None:
    import_or_skip("tqdm")
    made = HOOKS[hook](str(tmp_path))
    try:
        train(made, VALUES[name]())
    except (TypeError, ValueError, NotImplementedError) as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        assert repr(made).partition("(")[0] in text
        assert "'v'" in text or " v" in text
        is_raw = "aten::" in text or "Internal error" in text or "ScalarType" in text or "np.ndarray of type" in text
        assert not is_raw, text
        # The last two are called with values that are in a structure.
        kinds = (
            "a tensor of shape",
            "a Wrapper of",
            "a nested tensor",
            "an array of",
            "dtype",
            "got shape",
            "datetime",
        )
        assert any(words in text for words in kinds) or (name == "wrapper" and hook in ("mean", "call")), text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("quantized", "v = [1. 1. 1.]"),
        ("nested", "v = a nested tensor"),
        ("jagged", "v = a nested tensor"),
        ("csr", "v = [[1. 0.]\n     [0. 1.]]"),
        ("complex32", "v = [1.+0.j 1.+0.j]"),
        ("long double", "v = 1.5"),
        ("float8", "v = [1. 1.]"),
    ],
)
def test_what_can_be_printed_is_printed(name: str, text: str) -> None:
    lines = train(LoggingTensorHook(["v"], every_n_steps=1), VALUES[name]())
    assert "".join(lines[0].split()) == "".join(text.split())
    assert len(lines) == 2


@pytest.mark.parametrize("name", ["csr, one", "coo, one", "long double"])
def test_a_number_in_an_odd_form_is_a_number(name: str, tmp_path: Any) -> None:
    value = float(VALUES[name]().sum() if "double" in name else VALUES[name]().to_dense())
    assert train(LoggingTensorHook({"m": running_mean("v")}, every_n_steps=2), VALUES[name]())[0] == f"m = {value}"
    writer = RecordingWriter()
    train(SummarySaverHook(1, summary_writer=writer, summary_op={"v": "v"}), VALUES[name]())
    assert writer.scalars == {"v": [(1, value), (2, value)]}
    assert train(EvaluationHook(lambda: {"e": VALUES[name]()}, every_n_steps=2), 1.0) != []


@pytest.mark.parametrize("name", ["csr", "nested", "jagged", "csr, one"])
def test_a_nan_in_an_odd_tensor_is_seen(name: str) -> None:
    value = VALUES[name]()
    train(NanTensorHook("v"), value)
    for part in value.unbind() if value.is_nested else [value.values()]:
        part.fill_(float("nan"))
    with pytest.raises(Exception, match="NaN"):
        train(NanTensorHook("v"), value)


def test_a_nested_result_of_an_evaluation_is_named() -> None:
    with pytest.raises(TypeError, match="a nested tensor: an evaluation returns one number"):
        train(EvaluationHook(lambda: {"e": VALUES["nested"]()}, every_n_steps=1), 1.0)
