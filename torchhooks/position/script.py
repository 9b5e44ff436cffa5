"""What a script's own ``for`` loop carries from item to item, and no checkpoint has: found in its source.

A counter, a sum, the best loss so far: a process that resumes in the middle of the data begins with new ones. Python
does not say which variables a loop carries, but its source does: variables that the body reads before it sets them.
This is read once, when an ``until_stop`` continues after a resume, for a warning. What another function changes is not
seen.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from torchhooks.common.errors import brief
from torchhooks.common.log import logger
from torchhooks.position.generators import find_generators

_COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
_COUNTS = "enumerate", "zip", "islice"
_CHANGES = "add", "append", "appendleft", "extend", "insert", "pop", "popleft", "setdefault", "update"
_CHANGED = list, set, deque, MutableMapping, np.ndarray, torch.Tensor


def _global_generators() -> list[Any]:
    """Return the generators whose states every checkpoint has. Naming NumPy's imports numpy.random."""
    return [random.random.__self__, np.random.mtrand._rand, torch.default_generator]  # type: ignore[attr-defined]  # noqa: SLF001


class Kept(NamedTuple):
    """What checkpoints have."""

    ids: frozenset[int]
    """Of objects, and of the generators that they hold."""
    paths: tuple[str, ...] = ()
    """How the paths of other generators end: of loaders that have not been iterated yet."""

    @classmethod
    def of(cls, objects: Iterable[object], paths: tuple[str, ...] = ()) -> Kept:
        """Return what is kept with ``objects``, which includes the global generators."""
        holders = [*objects, *_global_generators()]
        return cls(frozenset(id(each) for one in holders for each in (one, *find_generators(one).values())), paths)

    def has(self, value: object) -> bool:
        return id(value) in self.ids

    def lacks(self, holder: object, name: str = "") -> list[str]:
        """Return the names of the generators of ``holder``, which is called ``name``, that are not kept."""
        found = ((f"{name}{path}", each) for path, each in find_generators(holder).items())
        left = [path for path, each in found if not self.has(each) and not path.endswith(self.paths)]
        return [path.removeprefix(".__self__").removeprefix(".") for path in left]


def carried(site: Any, step: object, kept: Kept) -> list[str] | None:
    """Return what the loop over the ``until_stop`` that was called at ``site`` carries from item to item, as text.

    Returns ``None`` if that is not known, because there is no source, or no loop is found in it.

    Args:
        site: the frame of the call, and its position in the code; with ``repeat=True`` in a pair.
        step: the step function, whose generators are carried too.
        kept: what checkpoints have.
    """
    while isinstance(site, tuple) and not isinstance(site[0], FrameType):
        site = site[0]
    try:
        frame, instruction = site
        found = _of_site(frame, instruction, kept)
    except Exception as error:  # no source, another one by now, or code that is not foreseen here: it is only a hint
        logger.debug("the source of the loop could not be read: %s", brief(error))
        found = None
    # A loader that is not iterated yet, whose generators checkpoints have, may be an attribute of the step's object.
    own = [] if kept.paths else [f"the generator {_in_closure(path, step)} of the step" for path in kept.lacks(step)]
    return found if found is None and not own else list(dict.fromkeys([*(found or ()), *own]))


def _of_site(frame: FrameType, instruction: int, kept: Kept) -> list[str] | None:
    """Return what the loops carry over the call that ``frame`` made with its ``instruction``; ``None`` without one."""
    line, end_line, column, end_column = list(frame.f_code.co_positions())[instruction // 2]
    tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    nodes: list[Any] = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
    place = line, column, end_line, end_column
    calls = [node for node in nodes if (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset) == place]
    if not calls:
        return None
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and _contains(node, calls[0])]
    scope = functions[-1] if functions else tree  # the walk comes to the outer ones first
    loops = list(_loops_over(calls[0], scope))
    return list(itertools.chain(*(_of_loop(*loop, frame, kept) for loop in loops))) if loops else None


def _loops_over(call: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, Callable[[ast.AST], bool]]]:
    """Yield each loop over the ``call`` or over a variable that holds it.

    With it, the expression that it iterates, and a function that says whether an expression contains the call.
    """
    names = {
        target.id
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign) and _contains(node.value, call)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def iterates(node: ast.AST) -> bool:
        return _contains(node, call) or any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))

    for node in ast.walk(scope):
        if isinstance(node, ast.While):
            if iterates(node) and not _contains(node, call):
                yield node, node.test, iterates
        elif (expression := _iterated(node)) is not None and iterates(expression):
            yield node, expression, iterates


def _contains(node: ast.AST, other: ast.AST) -> bool:
    return any(each is other for each in ast.walk(node))


def _iterated(node: Any) -> ast.AST | None:
    """Return what ``node`` iterates, if it is a loop or a comprehension."""
    if isinstance(node, ast.For):
        return node.iter
    return node.generators[0].iter if isinstance(node, _COMPREHENSIONS) else None


def _of_loop(
    loop: ast.AST, expression: ast.AST, iterates: Callable[[ast.AST], bool], frame: FrameType, kept: Kept
) -> Iterator[str]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and any(map(iterates, node.args)):
            name = _path(node.func).rpartition(".")[2]
            yield from [f"{name}(...)"] if name in _COUNTS and not _is_unused(name, loop) else []
    reading = _Reading()
    if isinstance(loop, (ast.For, ast.While)):
        reading.visit(loop.target if isinstance(loop, ast.For) else loop.test)
        reading.block(loop.body)
    else:
        yield "what the comprehension has collected"
        reading.visit(loop)
    is_over = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}  # a generator in a variable
    certainly = reading.read & reading.set | reading.taken - is_over
    for path in sorted(certainly | reading.changed):
        holders = list(_objects(path, frame))
        is_known = len(holders) > path.count(".")
        is_changed = path in certainly or (is_known and isinstance(holders[-1], _CHANGED))
        if is_changed and not any(map(kept.has, holders)):
            yield path
    for path in sorted(reading.read):
        holders = list(_objects(path, frame))
        if holders and not any(kept.has(each) or _is_library(each) for each in holders):
            known = ".".join(path.split(".")[: len(holders)])
            yield from (f"the generator {name}" for name in kept.lacks(holders[-1], known))


def _in_closure(path: str, function: Any) -> str:
    """Return ``path``, which may begin with ``__closure__[0]``, with the name of that variable of ``function``."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for index, name in enumerate(names):
        path = path.replace(f"__closure__[{index}]", name)
    return path


def _is_unused(name: str, loop: Any) -> bool:
    """Return whether the body of ``loop``, which is over ``name(...)``, does not use the numbers of an enumerate."""
    target = getattr(loop, "target", None)
    if name != "enumerate" or not isinstance(target, ast.Tuple) or not isinstance(target.elts[0], ast.Name):
        return False
    used = {each.id for statement in loop.body for each in ast.walk(statement) if isinstance(each, ast.Name)}
    return target.elts[0].id not in used


def _is_library(value: object) -> bool:
    """Return whether ``value`` is a module, or an object of torchhooks, such as the loop."""
    return isinstance(value, ModuleType) or type(value).__module__.partition(".")[0] == "torchhooks"


def _path(node: ast.AST) -> str:
    """Return the dotted name that ``node`` is; ``""`` if it is another expression."""
    if isinstance(node, ast.Name):
        return node.id
    value = _path(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{value}.{node.attr}" if isinstance(node, ast.Attribute) and value else ""


def _objects(path: str, frame: FrameType) -> Iterator[Any]:
    """Yield the objects along the dotted ``path``, as far as they are known without running code of the script."""
    name, *attributes = path.split(".")
    names = {**frame.f_globals, **frame.f_locals}
    if name not in names:
        return
    yield (value := names[name])
    for attribute in attributes:
        members = getattr(value, "__dict__", {})
        if attribute not in members or isinstance(value, ModuleType):
            return
        yield (value := members[attribute])


class _Reading(ast.NodeVisitor):
    """Reads the body of a loop in the order of its execution, and notes dotted names."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        """Read before they were certainly set in the same item."""
        self.set: set[str] = set()
        self.changed: set[str] = set()
        """Of which a member is set or added."""
        self.taken: set[str] = set()
        """From which ``next`` takes an item."""
        self._certain: set[str] = set()  # set in any case

    def block(self, statements: Iterable[ast.stmt]) -> bool:
        """Read statements, and return whether the last of them leaves the item."""
        leaves = False
        for statement in statements:
            self.visit(statement)
            leaves = isinstance(statement, (ast.Continue, ast.Break, ast.Return, ast.Raise))
        return leaves

    def _branches(self, *branches: Iterable[ast.stmt]) -> None:
        before, after = self._certain, []
        for branch in branches:
            self._certain = set(before)
            if not self.block(branch):
                after.append(self._certain)
        self._certain = set.intersection(*after) if after else before

    def _set(self, path: str) -> None:
        self.set.add(path)
        self._certain.add(path)

    def _note(self, node: ast.AST, notes: set[str]) -> None:
        if (path := _path(node)) and not any(prefix in self._certain for prefix in _prefixes(path)):
            notes.add(path)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node, self.read) if isinstance(node.ctx, ast.Load) else self._set(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not _path(node):
            self.generic_visit(node)
        elif isinstance(node.ctx, ast.Load):
            self._note(node, self.read)
        else:
            self._set(_path(node))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            self._note(node.value, self.changed)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            self._note(node.func.value, self.changed)
        elif _path(node.func) == "next" and node.args:
            self._note(node.args[0], self.taken)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._note(node.target, self.read)
        self.visit(node.value)
        self.visit(node.target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.visit(node.target)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._branches(node.body, node.orelse)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._branches([ast.Assign(targets=[node.target], value=ast.Constant(None)), *node.body], node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._branches(node.body, node.orelse)

    def visit_Try(self, node: ast.Try) -> None:
        self._branches([*node.body, *node.orelse], *(handler.body for handler in node.handlers))
        self.block(node.finalbody)

    def _comprehension(self, node: Any) -> None:
        before = set(self._certain)
        for generator in node.generators:
            self.visit(generator.iter)
            own = {each.id for each in ast.walk(generator.target) if isinstance(each, ast.Name)}
            self._certain |= own
            for condition in generator.ifs:
                self.visit(condition)
        for name in ("key", "value", "elt"):
            if hasattr(node, name):
                self.visit(getattr(node, name))
        self._certain = before

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> None: ...

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._set(node.name)


def _prefixes(path: str) -> Iterator[str]:
    return itertools.accumulate(path.split("."), "{}.{}".format)
