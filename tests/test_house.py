"""The architecture: which module imports which, who owns an attribute, what is public, and what an import does."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import torchhooks

ROOT = Path(__file__).parents[1]

# From the ground up. A module imports only from floors below its own, so those on one floor do not know each other.
FLOORS: list[set[str]] = [
    # values
    {
        "agreement",
        "arrays",
        "closing",
        "errors",
        "log",
        "manifest",
        "modules",
        "randomness",
        "roster",
        "saving",
        "stateful",
        "text",
    },
    {"checks", "claim", "files", "throughput"},
    {"digest", "generators", "gradients", "items", "progress", "timer"},
    {"place"},
    {"probe"},
    # mechanisms
    {
        "changes",
        "checkpoint_files",
        "coordinator",
        "copying",
        "cuda",
        "events",
        "fetch",
        "position",
        "preemption",
        "ranks",
        "recovery",
        "sharded",
    },
    {"accumulators", "ending", "evaluating", "lines", "readback", "reduction", "step", "watch"},
    {"histograms", "norms"},
    {"summary"},
    {"jsonl", "rollback", "running", "snapshot", "state", "trackers", "writers"},
    {"rank_checkpoints"},
    {"checkpoint_reading"},
    {"checkpoint"},
    # the session and the contract
    {"session"},
    {"hook"},
    # the parts of the loop
    {"arguments", "schedule"},
    {"costs", "data"},
    {"run"},
    {"peers"},
    {"sessions"},
    {"body"},
    # the loop, and the hooks, which do not know it; "hooks" is each module of torchhooks/hooks/
    {"hooks", "loop"},
    # the roof
    {"training"},
    {"devices"},
    {"testing"},
    {"torchhooks"},
    {"__main__"},
]

# Private attributes that another class may touch, by module and expression, with the reason.
PRIVATE_ACCESS = {
    ("torchhooks.accumulators", "torch._foreach_add_"): "torch's only way to add several tensors in one launch",
    ("torchhooks.accumulators", "torch._foreach_maximum_"): "torch's only way to compare several tensors in one launch",
    ("torchhooks.digest", "value._version"): "torch's own name for how often a tensor was changed in place",
    ("torchhooks.gradients", "grad._version"): "torch's own name for how often a tensor was changed in place",
    ("torchhooks.loop", "sys._getframe"): "CPython's only way to the frame of the caller",
    ("torchhooks.ranks", "c10d._get_default_store"): "torch's only way to the store that the ranks share",
    ("torchhooks.ranks", "os._exit"): "Python's only way to end a process whose main thread does not return",
    ("torchhooks.devices", "sys._getframe"): "CPython's only way to a frame of the stack",
    ("torchhooks.hooks.profiling", "torch.autograd._profiler_enabled"): "torch's only way to ask whether it profiles",
    ("torchhooks.sharded", "each._get_fsdp_state"): "torch's only way to gradients that FSDP2 has not reduced",
    ("torchhooks.sharded", "group._partial_reduce_output"): "torch's only way to gradients that FSDP2 has not reduced",
    ("torchhooks.sharded", "each._unsharded_param"): "torch's only way to gradients that FSDP2 has not reduced",
    ("torchhooks.sharded", "state._fsdp_param_group"): "torch's only way to gradients that FSDP2 has not reduced",
    ("torchhooks.summary", "writer._get_file_writer"): "torch's SummaryWriter has no public way to add an event",
}

MOST_LINES = {"a class": 500, "torchhooks.loop": 600}

IMPORT_BUDGET = 0.05 / 1.5  # of the time that torch takes: a slow machine is slow for both


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


def room(module: str) -> str:
    return module.removeprefix("torchhooks.").split(".")[0]


def floor(module: str) -> int:
    return next((height for height, rooms in enumerate(FLOORS) if room(module) in rooms), len(FLOORS))


def names_reached(code: str) -> set[str]:
    """Return the dotted names that ``code`` imports, wherever it does, or reaches as an attribute.

    An import under ``if TYPE_CHECKING:`` counts too: a reader follows it like any other.
    """
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


def module_of(name: str) -> str:
    """The module that a dotted name of ours lives in: the longest part of it that is one."""
    parts = name.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next(prefix for prefix in prefixes if prefix in modules())


def test_every_module_has_a_floor() -> None:
    homeless = [module for module in modules() if floor(module) == len(FLOORS)]
    assert homeless == [], "give them a place in FLOORS"


def test_the_design_has_every_module() -> None:
    table = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("| floor |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)(?:/\*)?`", table))
    assert named == {room for rooms in FLOORS for room in rooms} - {"torchhooks"} | {"__init__"}


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_from_floors_below_its_own(module: str) -> None:
    ours = {module_of(name) for name in within("torchhooks", names_reached(source(module)))}
    assert {other for other in ours - {module} if floor(other) >= floor(module)} == set()


def test_no_module_imports_by_a_relative_name() -> None:
    # The test of the floors looks at absolute ones.
    relative = {module: {name for name in names_reached(source(module)) if name[0] == "."} for module in modules()}
    assert {module for module, names in relative.items() if names} == set()


def test_only_ranks_and_sharded_checkpoints_know_torch_distributed() -> None:
    knows = {module for module in modules() if within("torch.distributed", names_reached(source(module)))}
    assert knows - {"torchhooks.ranks", "torchhooks.sharded"} == set()


def test_an_import_inside_a_function_counts() -> None:
    assert names_reached("def f():\n    from torchhooks.loop import MonitoredLoop") == {"torchhooks.loop.MonitoredLoop"}


def test_an_import_for_type_checkers_counts() -> None:
    assert names_reached("if TYPE_CHECKING:\n    import a\nelse:\n    import b") >= {"a", "b"}


def private_accesses(code: str) -> set[str]:
    """Return the expressions in ``code`` that reach a private attribute of another class.

    ``self`` and ``cls`` are the class itself; so is another instance, if the class assigns an attribute of that name.
    """
    found: set[str] = set()

    def visit(node: ast.AST, own: set[str]) -> None:
        nonlocal found
        if isinstance(node, ast.ClassDef):
            own = {name.attr for name in ast.walk(node) if isinstance(name, ast.Attribute) and is_self(name.value)}
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr) and node.attr not in own:
            found |= set() if is_self(node.value) else {ast.unparse(node)}
        for child in ast.iter_child_nodes(node):
            visit(child, own)

    visit(ast.parse(code), set())
    return found


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_a_private_attribute_of_another_class_is_found() -> None:
    code = "class A:\n    def f(self, other):\n        self._a = other._a + other._b\n        self.loop._c = f()._d"
    assert private_accesses(code) == {"other._b", "self.loop._c", "f()._d"}


@pytest.mark.parametrize("module", modules())
def test_no_module_touches_a_private_attribute_of_another_class(module: str) -> None:
    excepted = {expression for where, expression in PRIVATE_ACCESS if where == module}
    assert private_accesses(source(module)) == excepted


def test_no_class_is_longer_than_500_lines() -> None:
    sizes = {
        f"{module}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module in modules()
        for node in ast.walk(ast.parse(source(module)))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: size for name, size in sizes.items() if size > MOST_LINES["a class"]} == {}


def test_the_loop_has_at_most_600_lines() -> None:
    assert source("torchhooks.loop").count("\n") <= MOST_LINES["torchhooks.loop"]


def test_the_run_reads_as_the_lifecycle() -> None:
    # About twenty lines, and each phase is a call of a method with its name.
    run = next(
        node
        for node in ast.walk(ast.parse(source("torchhooks.run")))
        if isinstance(node, ast.FunctionDef) and node.name == "run"
    )
    _, *body = run.body
    assert (body[-1].end_lineno or 0) - body[0].lineno + 1 <= 24
    phases = ["_before_run", "_make_step", "_evaluate", "_after_run"]
    called = [node for node in ast.walk(run) if isinstance(node, ast.Attribute) and node.attr in phases]
    assert [node.attr for node in sorted(called, key=lambda node: node.lineno)] == phases


def test_the_roof_is_names_and_no_code_but_that_of_the_version() -> None:
    docstring, typing, *statements, version, exported = ast.parse(source("torchhooks")).body
    assert isinstance(docstring, ast.Expr)
    assert ast.unparse(typing) == "import typing"
    assert all(isinstance(statement, ast.ImportFrom) for statement in statements)
    assert isinstance(version, ast.If)
    [annotation], [function] = version.body, version.orelse
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
    ran = subprocess.run([sys.executable, "-c", PROBE], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    *printed, report = ran.stdout.splitlines()
    return {**json.loads(report), "printed": "".join(printed) + ran.stderr}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return import_in_a_new_process(tmp_path_factory.mktemp("empty"))


@pytest.mark.parametrize(
    "heavy", ["tensorboard", "torch.utils.tensorboard", "torch.distributed", "matplotlib", "mlflow", "tqdm", "wandb"]
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


def test_an_import_takes_at_most_50_ms_where_torch_takes_a_second_and_a_half(tmp_path: Path) -> None:
    # The best of several, one after the other until one is good: others may be using this machine, and its caches.
    shares = (import_in_a_new_process(tmp_path)["share"] for _ in range(5))
    assert any(share <= IMPORT_BUDGET for share in shares)


def test_nothing_is_left_for_later() -> None:
    # Brackets, so that this file does not find itself.
    unfinished = re.compile("TOD[O]|FIXM[E]|XX[X]|NotImplementedErro[r]")
    assert [file for file in python_files() if unfinished.search(file.read_text(encoding="utf-8"))] == []
