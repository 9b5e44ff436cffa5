"""The architecture: what each package says of itself, what is public, and what an import does.

The layers of the packages are checked by import-linter, and private attributes by ruff: see pyproject.toml.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.processes import run_program

import torchhooks
from torchhooks import checkpoints, data, hooks, loop
from torchhooks.progress.loop_state import LoopState
from torchhooks.progress.training_state import TrainingState

IMPORT_BUDGET = 0.05  # of the time that torch takes: a slow machine is slow for both


def modules() -> list[str]:
    files = sorted((ROOT / "torchhooks").rglob("*.py"))
    return [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]


def source(module: str) -> str:
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


def names_reached(code: str) -> set[str]:
    """Return the dotted names that ``code`` imports, wherever it does, or reaches as an attribute."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return names


def within(package: str, names: Iterable[str]) -> set[str]:
    return {name for name in names if f"{name}.".startswith(f"{package}.")}


@pytest.mark.slow
def test_only_the_ranks_their_transport_and_sharded_checkpoints_know_torch_distributed() -> None:
    knows = {module for module in modules() if within("torch.distributed", names_reached(source(module)))}
    assert knows == {"torchhooks.checkpoints.sharded", "torchhooks.ranks.ranks", "torchhooks.ranks.transport"}


def test_all_names_everything_public() -> None:
    public = {
        name
        for name, value in vars(torchhooks).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - set(torchhooks.__all__) == set()


def test_everything_in_all_exists() -> None:
    assert [name for name in torchhooks.__all__ if not hasattr(torchhooks, name)] == []


PROBE = """
import gc, json, logging, os, sys, time
start = time.process_time()
import torch
secs_of_torch = time.process_time() - start

def handlers():
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return sum(len(getattr(logger, "handlers", ())) for logger in loggers)

sys.dont_write_bytecode = False  # compiled once and kept, as it is by default
modules, handlers_before, environment = set(sys.modules), handlers(), dict(os.environ)
# A collection takes 0.1 s with the objects of torch, and whether one is due by now depends on the version of Python.
gc.disable()
start = time.process_time()
import torchhooks
secs = time.process_time() - start
print(json.dumps({
    "share": secs / secs_of_torch,
    "loaded": sorted(set(sys.modules) - modules),
    "handlers": handlers() - handlers_before,
    "environment_changed": dict(os.environ) != environment,
    "files": os.listdir(),
}))
"""


def import_in_a_new_process(folder: Path) -> dict[str, Any]:
    """What ``import torchhooks`` does after ``import torch``, in a process of its own, in an empty folder."""
    ran = run_program(PROBE, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    *printed, report = ran.stdout.splitlines()
    return {**json.loads(report), "printed": "".join(printed) + ran.stderr}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return import_in_a_new_process(tmp_path_factory.mktemp("empty"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "heavy",
    [
        "tensorboard",
        "torch.utils.tensorboard",
        "torch.distributed",
        "matplotlib",
        "mlflow",
        "numpy.random",
        "tqdm",
        "wandb",
    ],
)
def test_an_import_leaves_out_what_only_some_need(imported: dict[str, Any], heavy: str) -> None:
    assert within(heavy, imported["loaded"]) == set()


@pytest.mark.slow
def test_an_import_adds_no_logging_handler(imported: dict[str, Any]) -> None:
    assert imported["handlers"] == 0


@pytest.mark.slow
def test_an_import_leaves_the_environment_alone(imported: dict[str, Any]) -> None:
    assert not imported["environment_changed"]


@pytest.mark.slow
def test_an_import_writes_no_file(imported: dict[str, Any]) -> None:
    assert imported["files"] == []


@pytest.mark.slow
def test_an_import_prints_nothing(imported: dict[str, Any]) -> None:
    assert imported["printed"] == ""


@pytest.mark.slow
def test_an_import_takes_at_most_a_twentieth_of_the_time_that_torch_takes(tmp_path: Path) -> None:
    # The best of several, one after the other until one is good: others may be using this machine, and its caches.
    shares = (import_in_a_new_process(tmp_path)["share"] for _ in range(5))
    assert any(share <= IMPORT_BUDGET for share in shares)


@pytest.mark.parametrize(
    ("package", "most"),
    [(hooks, 25), (loop, 18), (checkpoints, 20), (data, 25)],
    ids=["a hook", "what is between two runs", "a save", "a resume"],
)
def test_what_to_know_before_a_change_is_one_list_of_a_few_facts(package: types.ModuleType, most: int) -> None:
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", package.__doc__ or "", re.MULTILINE)]
    assert numbers == [*range(1, len(numbers) + 1)]
    assert 10 < len(numbers) <= most


def test_only_the_trigger_asks_a_timer() -> None:
    methods = "should_trigger_for_step|triggers_at|next_due|last_triggered_step|update_last_triggered_step|start_at"
    asks = {module for module in modules() if re.search(rf"timer\.({methods})\(", source(module))}
    assert asks - {"torchhooks.common.timers", "torchhooks.testing.recording"} == {
        "torchhooks.lifecycle.trigger",
        "torchhooks.lifecycle.hook",  # PeriodicHook.next_due(), which the loop asks for the trigger
        "torchhooks.hooks.profiling",  # TensorFlow's guess of the step
        "torchhooks.hooks.progress_bar",  # which is no periodic hook: it draws as often as a person can see
    }


def assigned(module: str) -> Iterable[tuple[str, str, str]]:
    """Yield each assignment of ``module`` to an attribute: the function, the object, and the attribute."""
    for scope in [node for node in ast.walk(ast.parse(source(module))) if isinstance(node, ast.ClassDef)]:
        for function in scope.body:
            for node in ast.walk(function):
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                for target in targets if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else ():
                    for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                        if isinstance(each, ast.Attribute):
                            name = f"{scope.name}.{getattr(function, 'name', '')}"
                            yield name, ast.unparse(each.value), each.attr


def test_the_state_of_a_loop_is_set_by_its_methods_but_at_the_places_that_its_docstring_lists() -> None:
    rows = re.findall(r"^    (``[A-Z].*?``|  ) +(.+)$", LoopState.__doc__ or "", re.MULTILINE)
    listed: dict[str, set[str]] = {}
    for where, what in rows:
        place = where.strip("` ") or [*listed][-1]
        listed.setdefault(place, set()).update(re.findall("``([a-z_]+)``", what))
    parts = {"_begin_due": "begin", "_complete": "finish", "_after_run": "finish"}
    found: dict[str, set[str]] = {}
    for module in modules():
        for function, owner, name in assigned(module):
            if owner.rpartition(".")[2] in ("state", "loop_state", "_state") and name in LoopState.__slots__:
                kind, _, method = function.partition(".")
                place = "Body" if kind == "Body" else f"{kind}.{parts.get(method, method)}"
                found.setdefault(place, set()).add(name)
    assert found == {place: {name for name in names if name in LoopState.__slots__} for place, names in listed.items()}


def test_no_part_of_a_training_state_is_replaced_from_outside() -> None:
    names = {field.name for field in dataclasses.fields(TrainingState)}
    owners = {"training", "session", "_training", "_session"}
    replaced = [
        (module, function, name)
        for module in modules()
        for function, owner, name in assigned(module)
        if owner.rpartition(".")[2] in owners and name in names
    ]
    assert replaced == []
