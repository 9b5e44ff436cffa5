"""load_weights: the weights of a checkpoint in a model, all of them or none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchhooks import CheckpointError, DamagedCheckpointError, Saver, Session, load_weights

Lines = list[tuple[str, str]]


def filled(number: float, **layers: nn.Module) -> nn.Module:
    """Return a model whose weights are all ``number``."""
    model = nn.ModuleDict(layers or {"first": nn.Linear(2, 3), "norm": nn.BatchNorm1d(3)})
    for tensor in model.state_dict().values():
        tensor.fill_(number)
    return model


def numbers(model: nn.Module) -> set[float]:
    return {number for tensor in model.state_dict().values() for number in tensor.unique().tolist()}


def save(folder: Path, model: nn.Module | None, step: int = 7, **arguments: Any) -> str:
    session = Session(model, **arguments)
    session.global_step = step
    return Saver().save(session, folder / "model.ckpt", step)


@pytest.mark.parametrize("in_folder", [True, False])
def test_the_weights_of_a_checkpoint_or_of_the_newest_in_a_folder_are_loaded(
    in_folder: bool, tmp_path: Path, lines: Lines
) -> None:
    save(tmp_path, filled(1), 9)
    path = save(tmp_path, filled(3), 7)
    model = filled(0)
    result = load_weights(tmp_path if in_folder else path, model)
    assert numbers(model) == {3}
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert lines == [("INFO", f"loaded the weights of step 7 from {path}")]


def test_nothing_but_the_model_changes(tmp_path: Path) -> None:
    path = save(tmp_path, filled(3), state={"other": nn.Linear(1, 1)})
    model = filled(0).eval()
    torch.manual_seed(5)
    before, weight = torch.get_rng_state(), model.get_parameter("first.weight")
    load_weights(path, model)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert model.get_parameter("first.weight") is weight
    assert weight.requires_grad


def test_the_names_that_a_wrapper_adds_do_not_count(tmp_path: Path) -> None:
    class Wrapper(nn.Module):  # as DistributedDataParallel
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    compiled: Any = torch.compile(filled(5), backend="eager")
    for saved, model in [
        (Wrapper(filled(3)), filled(0)),
        (filled(4), Wrapper(filled(0))),
        (compiled, Wrapper(filled(0))),
    ]:
        load_weights(save(tmp_path, saved), model)
        assert numbers(model) == numbers(saved)


def test_a_damaged_one_of_a_folder_is_skipped_with_a_warning(tmp_path: Path, lines: Lines) -> None:
    save(tmp_path, filled(1), 6)
    newest = Path(save(tmp_path, filled(3), 7))
    data = bytearray((newest / "state.pt").read_bytes())
    data[data.index(b"\x00\x00\x40\x40")] ^= 1
    (newest / "state.pt").write_bytes(data)
    model = filled(0)
    load_weights(tmp_path, model)
    assert numbers(model) == {1}
    assert [level for level, _ in lines] == ["WARNING", "INFO"]
    with pytest.raises(DamagedCheckpointError, match=rf"^{re.escape(str(newest))} is damaged: .* Pass an undamaged"):
        load_weights(newest, model)


def test_what_is_no_checkpoint_is_an_error_that_says_the_way_out(tmp_path: Path) -> None:
    model = filled(0)
    missing, plain = tmp_path / "model.ckpt-700", tmp_path / "weights.pt"
    with pytest.raises(DamagedCheckpointError, match=r"model\.ckpt-700 cannot be read.* Pass"):
        load_weights(missing, model)
    torch.save(model.state_dict(), plain)
    with pytest.raises(DamagedCheckpointError, match=r"with model\.load_state_dict\(torch\.load\(path\)\)$"):
        load_weights(plain, model)
    with pytest.raises(CheckpointError, match=r"has no checkpoint: pass a folder .* has written to, or a checkpoint$"):
        load_weights(tmp_path, model)
    save(tmp_path / "best", model)
    with pytest.raises(CheckpointError, match=rf"such as best_checkpoint\({re.escape(repr(str(tmp_path)))}\)$"):
        load_weights(tmp_path, model)
    with pytest.raises(CheckpointError, match=r"has no model, only 'other', .*Give the loop the model"):
        load_weights(save(tmp_path, None, state={"other": nn.Linear(1, 1)}), model)


@pytest.mark.parametrize("arguments", [(3, nn.Linear(1, 1)), (nn.Linear(1, 1), "run"), ("run", {})])
def test_arguments_of_another_type_are_refused(arguments: Any) -> None:
    with pytest.raises(TypeError, match=r"^load_weights\(.*\): pass the path of a checkpoint or of a folder of them"):
        load_weights(*arguments)


def test_a_model_that_does_not_match_is_an_error_that_changes_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, filled(3, one=nn.Linear(2, 2), two=nn.Linear(3, 1)))
    model = filled(0, one=nn.Linear(2, 2), two=nn.Linear(1, 1), three=nn.Linear(1, 1, bias=False))
    with pytest.raises(CheckpointError) as raised:
        load_weights(path, model)
    message = str(raised.value)
    assert message.startswith(f"{path} does not match the model:\n  missing in the file: 'three.weight'\n")
    assert "'two.weight' (1, 1) instead of (1, 3)\n" in message
    assert message.endswith("with strict=False.")
    assert numbers(model) == {0}


def test_what_matches_is_loaded_if_that_is_asked_for(tmp_path: Path, lines: Lines) -> None:
    path = save(tmp_path, filled(3, one=nn.Linear(2, 2), two=nn.Linear(3, 1), four=nn.Linear(1, 1, bias=False)))
    model = filled(0, one=nn.Linear(2, 2), two=nn.Linear(1, 1), three=nn.Linear(1, 1, bias=False))
    result = load_weights(path, model, strict=False)
    assert result.missing_keys == ["two.weight", "three.weight"]
    assert result.unexpected_keys == ["four.weight"]
    assert numbers(model["one"]) == {3}  # type: ignore[index]
    assert model["two"].weight.item() == 0  # type: ignore[index]
    assert model["two"].bias.item() == 3  # type: ignore[index]
    assert [level for level, _ in lines] == ["WARNING", "INFO"]
    assert lines[0][1].endswith("The rest is loaded.")
