"""Items of some runs that are passed over after a resume: the same ones, each once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_processes import run_ranks
from torchdata.stateful_dataloader import StatefulDataLoader

from torchhooks import CheckpointSaverHook, MirrorHook, MonitoredLoop, SessionRunHook, StopAtStepHook
from torchhooks.__main__ import main


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loader(kind: str) -> Any:
    class Numbers(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            return index

    if kind == "list":
        return list(range(12))
    cls: Any = StatefulDataLoader if kind == "stateful" else torch.utils.data.DataLoader
    return cls(Numbers(), shuffle=True)


def train(
    kind: str, last_step: int, folder: str = "run", seed: int = 0, hooks: Iterable[SessionRunHook] = ()
) -> dict[int, str]:
    """Train up to a step; return the epoch and the item of each step."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(1, 1)
    made: dict[int, str] = {}

    def step(item: int) -> None:
        made[loop.global_step + 1] = f"{loop.epoch}:{item}"

    hooks = [StopAtStepHook(last_step=last_step), CheckpointSaverHook(folder, save_steps=3), *hooks]
    with MonitoredLoop(step, model, hooks=hooks, checkpoint_dir=folder) as loop:
        data = loader(kind)
        for _ in loop.until_stop(range(4)):
            for item in loop.until_stop(data):
                loop.run(int(item))
    return made


pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
KINDS = ["list", "loader", "stateful"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stops", [(17, 20, 30), (15, 16, 30), (15, 22, 30), (15, 19, 20, 21, 30)])
def test_the_items_of_the_runs_are_passed_over_once_however_often_the_script_resumes(
    kind: str, stops: tuple[int, ...]
) -> None:
    whole = train(kind, 30 + 4, "whole")
    made = train(kind, stops[0])
    assert main(["skip", "run", "--steps", f"{stops[0] + 2}-{stops[0] + 5}"]) == 0
    for last_step in stops[1:]:
        made |= train(kind, last_step)
    skipped = range(stops[0] + 2, stops[0] + 6)
    assert list(made.values()) == [item for step, item in whole.items() if step not in skipped]


def test_a_range_may_end_in_the_next_epoch_and_begin_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    whole, made = train("list", 40, "whole"), train("list", 9)
    assert main(["skip", "run", "--steps", "11-14"]) == 0
    assert "it passes over the 4 items of steps 11-14" in capsys.readouterr().out
    made |= train("list", 20)
    assert main(["skip", "run", "--steps", "21-22"]) == 0  # items 0 and 1 of the epoch after next
    made |= train("list", 30)
    left = [item for step, item in whole.items() if step not in (11, 12, 13, 14, 25, 26)]
    assert list(made.values()) == left[:30]
    assert json.loads(Path("run", "skip.json").read_text()) == {"steps": [[11, 14], [21, 22]]}


def test_one_step_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    whole, made = train("list", 9, "whole"), train("list", 3)
    assert main(["skip", "run", "--steps", "5"]) == 0
    assert capsys.readouterr().out.endswith("it passes over the item of step 5.\n")
    made |= train("list", 8)
    assert list(made.values()) == [item for step, item in whole.items() if step != 5]


@pytest.mark.parametrize("last", [10, 11])
def test_items_beyond_the_limit_of_an_epoch_are_neither_passed_over_nor_taken(last: int) -> None:
    """Each epoch takes 5 of the items: the last two of an epoch are passed over, and the first of the next epoch."""

    def train_limited(last_step: int, folder: str = "run") -> dict[int, str]:
        made: dict[int, str] = {}
        hooks = [StopAtStepHook(last_step=last_step), CheckpointSaverHook(folder, save_steps=3)]
        with MonitoredLoop(
            lambda item: made.update({loop.global_step + 1: f"{loop.epoch}:{item}"}), hooks=hooks, checkpoint_dir=folder
        ) as loop:
            for _ in loop.until_stop(range(5)):
                for item in loop.until_stop(list(range(12)), limit=5):
                    loop.run(item)
        return made

    whole, made = train_limited(20, "whole"), train_limited(7)
    assert main(["skip", "run", "--steps", f"9-{last}"]) == 0
    made |= train_limited(15)
    assert list(made.values()) == [item for step, item in whole.items() if not 9 <= step <= last][:15]


def test_each_item_that_is_passed_over_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    train("list", 6)
    main(["skip", "run", "--steps", "8-9"])
    train("list", 10)
    said = [record.message for record in caplog.records if "passed over" in record.message]
    assert said == [
        "passed over item 7, the one of step 8, because of skip.json",
        "passed over item 8, the one of step 9, because of skip.json",
    ]


def test_a_checkpoint_that_contains_the_runs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    train("list", 3)
    main(["skip", "run", "--steps", "5-6"])
    Path("run", "skip.json").rename("skip.json")
    train("list", 9)
    Path("skip.json").rename("run/skip.json")
    assert list(train("list", 11).values()) == ["0:9", "0:10"]
    assert "steps 5-6 were made before the checkpoint of step 9" in caplog.text


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("7", "run has model.ckpt-9, which comes after them, to resume from"),
        ("20-10", "give two steps, 2 or more, the smaller first"),
        ("1-2", "give two steps, 2 or more"),
        ("x", "give two steps"),
        ("11-14", "names 12-13 already"),
    ],
)
def test_the_command_says_what_is_wrong(steps: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    train("list", 9)
    assert main(["skip", "run", "--steps", "12-13"]) == 0
    assert main(["skip", "run", "--steps", steps]) == 1
    assert message in capsys.readouterr().err


def test_a_loop_that_counts_the_steps_of_the_optimizer_refuses() -> None:
    train("list", 3)
    main(["skip", "run", "--steps", "5-6"])
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match='of which each run has to make one: use step_unit="run"'):
        MonitoredLoop(
            None, model, torch.optim.SGD(model.parameters()), checkpoint_dir="run", step_unit="optimizer_step"
        )


def test_a_new_machine_passes_over_what_its_copy_of_skip_json_names() -> None:
    def train_mirrored(last_step: int) -> dict[int, str]:
        return train("list", last_step, hooks=[MirrorHook("run", Path("copy").absolute().as_uri())])

    whole, made = train("list", 15, "whole"), train_mirrored(3)
    assert main(["skip", "run", "--steps", "8-9"]) == 0
    made |= train_mirrored(6)
    shutil.rmtree("run")
    made |= train_mirrored(13)
    assert list(made.values()) == [item for step, item in whole.items() if step not in (8, 9)]


def _train_ranks(rank: int, folder: str) -> list[dict[int, str]]:
    os.chdir(folder)
    found = [train("loader", 34, "whole", seed=rank), train("loader", 15, seed=rank)]
    torch.distributed.barrier()
    if rank == 0:
        assert main(["skip", "run", "--steps", "17-19"]) == 0
    torch.distributed.barrier()
    return [*found, train("loader", 22, seed=rank), train("loader", 30, seed=rank)]


@pytest.mark.ranks
def test_each_rank_passes_over_its_own_items(tmp_path: Path) -> None:
    for ended in run_ranks(tmp_path, 2, _train_ranks, str(tmp_path)):
        assert ended.code == 0, ended.output
        whole, *parts = ended.value
        made = {step: item for part in parts for step, item in part.items()}
        assert list(made.values()) == [item for step, item in whole.items() if step not in (17, 18, 19)][:30]
