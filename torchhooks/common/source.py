"""The lines of the script that call the package: where they are, and how they leave a loop. For messages only."""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import NamedTuple

from torchhooks.common.user_code import is_own_file


class Line(NamedTuple):
    """A line of the script."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number}"

    def way_out(self) -> str:
        """Return ``"by break"`` or ``"by return"`` if the line has that statement; ``"early"`` if it has neither."""
        # By linecache, because it also has the cells of a notebook, which are in no file. Not what follows a #: a
        # comment may have the word.
        found = re.search(r"\b(break|return)\b", linecache.getline(*self).partition("#")[0])
        return f"by {found[1]}" if found else "early"


def lines_of_script() -> list[Line]:
    """Return the lines in which the calling thread is, the innermost first, from the one that calls the package."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as logging does
    while frame is not None and is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    lines = []
    while frame is not None:
        lines.append(Line(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return lines


def leaves_at_end_of_body(asked: Iterable[Line], left: Line) -> bool:
    """Return whether a loop is left at ``left``, in the last statement of its body, by an ``if`` that has ``asked``.

    Nothing of the body is missing then. False if the source of the script is not known.
    """
    numbers = {line.number for line in asked if line.file == left.file}
    try:
        tree = ast.parse("".join(linecache.getlines(left.file)))
    # In a notebook, a cell may have lines that are no Python. CPython 3.11 may fail where a generator is closed.
    except (SyntaxError, ValueError, SystemError):
        return False
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While | ast.AsyncFor))
    return any(_is_last(loop.body, numbers, left.number) for loop in loops)


def _is_last(body: Sequence[ast.stmt], asked: Iterable[int], left: int | None) -> bool:
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.With):  # a break in it has its line, which is where it is left
        return _is_last(last.body, asked, None if left == last.lineno else left)
    if not isinstance(last, ast.If):
        return False
    if any(_has(last.test, number) for number in asked):
        ways_out = [node for node in last.body if isinstance(node, ast.Break | ast.Return)]
        return any(left is None or _has(node, left) for node in ways_out)
    return _is_last(last.body, asked, left) or _is_last(last.orelse, asked, left)


def _has(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
