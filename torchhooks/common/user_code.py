"""Telling the code of a training script from that of Python and of installed packages."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator

_PACKAGES = ("site-packages", "dist-packages")
_HERE = os.path.dirname(os.path.dirname(__file__))


def _library_folders() -> Iterator[str]:
    """Yield the folders of the standard library, of installed packages and of torchhooks.

    Not the prefix of the interpreter: a project may lie below it, such as ``/usr/src/app`` with a Python in ``/usr``.
    """
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    for paths in (sysconfig.get_paths(), sysconfig.get_paths(vars=base)):
        yield from (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    if hasattr(site, "getsitepackages"):  # an old virtual environment has a module of its own
        yield from site.getsitepackages()
    yield _HERE


_FOLDERS = tuple(
    {os.path.join(form(folder), "") for folder in _library_folders() for form in (os.path.abspath, os.path.realpath)}
)
_OWN = os.path.join(_HERE, "")


def is_users_file(file: str) -> bool:
    """Return whether the source file ``file`` belongs to the training script and its project."""
    if file.startswith(("<", *_FOLDERS)):
        return False
    return not any(name in _PACKAGES for name in file.split(os.sep))


def is_own_file(file: str) -> bool:
    """Return whether the source file ``file`` is one of torchhooks."""
    return file.startswith(_OWN)


def is_users_module(name: object) -> bool:
    """Return whether the imported module ``name`` belongs to the training script and its project."""
    module = sys.modules.get(name) if isinstance(name, str) else None
    # Not of a lazy module, which would be imported.
    file = vars(module).get("__file__") if type(module) is types.ModuleType else None
    # Without a file: a notebook, or the command line of Python, if it is the main module.
    return is_users_file(file) if isinstance(file, str) else name == "__main__"


def is_users_class(kind: type) -> bool:
    """Return whether the training script and its project define the class ``kind``."""
    module = vars(kind).get("__module__")
    return type(module) is str and _is_users_module(module)


_is_users_module = functools.lru_cache(4096)(is_users_module)
