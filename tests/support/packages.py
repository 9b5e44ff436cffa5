"""The packages that only some tests need: all but torch, tensorboard, pytest, pytest-xdist and hypothesis.

A test asks for such a package with :func:`import_or_skip` when it runs, so that all tests can be collected without it.
To prove that, a process of its own calls :func:`refuse_all_but` before it imports pytest.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.machinery import ModuleSpec
from typing import Any

import pytest


def import_or_skip(name: str) -> Any:
    """Import the module ``name`` for a test, which is skipped if it is not installed, and fails in the gate."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        why = f"needs {name}, which cannot be imported: {error}"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)


_IN_NAMES = {"ProgressBarHook": "tqdm", "PrometheusWriter": "prometheus_client", "WandbWriter": "wandb"}


def import_or_skip_all(script: str) -> None:
    """Call :func:`import_or_skip` for all that the text of a ``script`` imports, or has torchhooks import."""
    for imported in re.findall(r"^\s*(?:from (\w+)[\w.]* import|import (\w+))", script, re.MULTILINE):
        import_or_skip("".join(imported))
    for name, module in _IN_NAMES.items():
        if name in script:
            import_or_skip(module)


class FilteredFinder:
    """A finder of ``sys.meta_path`` that finds nothing of some distributions, as if they were not installed.

    Args:
        finder: the finder.
        kept: the distributions to find, by their normalized names.
        refused: the modules not to find.
    """

    def __init__(self, finder: Any, kept: set[str], refused: set[str]) -> None:
        self._finder, self._kept, self._refused = finder, kept, refused

    def find_spec(self, fullname: str, *args: Any) -> ModuleSpec | None:
        found: ModuleSpec | None = None
        if fullname.partition(".")[0] not in self._refused:
            found = self._finder.find_spec(fullname, *args)
        return found

    def find_distributions(self, *args: Any) -> Iterator[metadata.Distribution]:
        found = self._finder.find_distributions(*args) if hasattr(self._finder, "find_distributions") else ()
        return (each for each in found if normalized(each.metadata["Name"]) in self._kept)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def refuse_all_but(distributions: Iterable[str]) -> set[str]:
    """Have nothing found of what is installed but ``distributions`` and what they require; return the other modules."""
    kept = with_requirements(distributions)
    refused = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not kept & set(map(normalized, owners)) and module not in sys.modules
    }
    sys.meta_path[:] = [FilteredFinder(finder, kept, refused) for finder in sys.meta_path]
    return refused


def with_requirements(distributions: Iterable[str]) -> set[str]:
    """Return ``distributions`` and all that they require, without extras, by their normalized names."""
    found: set[str] = set()
    left = [*distributions]
    while left:
        name = normalized(left.pop())
        if name in found:
            continue
        found.add(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        left += [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in requirements if "extra ==" not in each]
    return found


def normalized(name: str) -> str:
    """Return the name of a distribution as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
