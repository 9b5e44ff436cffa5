"""The architecture: what each package says of itself, what is public, and what an import does.

The layers of the packages are checked by import-linter, and private attributes by ruff: see pyproject.toml.
"""

from __future__ import annotations

import ast
import json
import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.programs import run_program

import torchhooks

IMPORT_BUDGET = 0.05  # of the time that torch takes: a slow machine is slow for both


def modules() -> list[str]:
    files = sorted((ROOT / "torchhooks").rglob("*.py"))
    return [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]


def python_files() -> list[Path]:
    return [
        file for folder in ("torchhooks", "examples", "tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")
    ]


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


def packages() -> list[Path]:
    return sorted(file for file in (ROOT / "torchhooks").glob("*/__init__.py"))


@pytest.mark.parametrize("package", packages(), ids=lambda file: file.parent.name)
def test_a_package_says_which_file_to_read_first(package: Path) -> None:
    docstring = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or ""
    (first,) = re.findall(r"Read\s``(\w+)``\s+first", docstring)
    assert (package.parent / f"{first}.py").exists()


def test_only_the_ranks_their_transport_and_sharded_checkpoints_know_torch_distributed() -> None:
    knows = {module for module in modules() if within("torch.distributed", names_reached(source(module)))}
    assert knows == {"torchhooks.checkpoints.sharded", "torchhooks.ranks.ranks", "torchhooks.ranks.transport"}


def test_the_roof_is_names_and_no_code_but_that_of_what_is_read_on_request() -> None:
    docstring, typing, *statements, version, exported = ast.parse(source("torchhooks")).body
    assert isinstance(docstring, ast.Expr)
    assert ast.unparse(typing) == "import typing"
    assert all(isinstance(statement, ast.ImportFrom) for statement in statements)
    assert isinstance(version, ast.If)
    [on_request, annotation], [function] = version.body, version.orelse
    assert ast.unparse(on_request) == "from torchhooks.ledger.hook import LedgerHook"
    assert ast.unparse(version.test) == "typing.TYPE_CHECKING"
    assert ast.unparse(annotation) == "__version__: str"
    assert isinstance(function, ast.FunctionDef)
    assert function.name == "__getattr__"
    assert ast.unparse(exported).startswith("__all__ = ")


def test_all_is_sorted() -> None:
    assert sorted(torchhooks.__all__) == torchhooks.__all__


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


def test_an_import_adds_no_logging_handler(imported: dict[str, Any]) -> None:
    assert imported["handlers"] == 0


def test_an_import_leaves_the_environment_alone(imported: dict[str, Any]) -> None:
    assert not imported["environment_changed"]


def test_an_import_writes_no_file(imported: dict[str, Any]) -> None:
    assert imported["files"] == []


def test_an_import_prints_nothing(imported: dict[str, Any]) -> None:
    assert imported["printed"] == ""


@pytest.mark.slow
def test_an_import_takes_at_most_a_twentieth_of_the_time_that_torch_takes(tmp_path: Path) -> None:
    # The best of several, one after the other until one is good: others may be using this machine, and its caches.
    shares = (import_in_a_new_process(tmp_path)["share"] for _ in range(5))
    assert any(share <= IMPORT_BUDGET for share in shares)


def test_nothing_is_left_for_later() -> None:
    # Brackets, so that this file does not find itself.
    unfinished = re.compile("TOD[O]|FIXM[E]|XX[X]|NotImplementedErro[r]")
    assert [file for file in python_files() if unfinished.search(file.read_text(encoding="utf-8"))] == []
