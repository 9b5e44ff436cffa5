"""The variables of a script that no checkpoint contains: where ``check`` looks when two training runs differ.

Before a run, everything that can be reached from the script is digested: the variables of its modules and of the
functions that are being called, what functions have in closures, the attributes of its objects, its iterators and
generators. A variable that is the same in two uninterrupted training runs and another one after a resume is what a
difference comes from, or what the next one will come from.
"""

from __future__ import annotations

import collections
import functools
import gc
import inspect
import itertools
import os
import random
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from torchhooks.common.digests import digest
from torchhooks.common.stateful import has_readable_state
from torchhooks.common.text import shown

_MOST_OBJECTS = 5000
_MOST_MEMBERS = 256  # of a container: enough for an order that is another one
_MOST_DEPTH = 8
_MOST_ELEMENTS = 1 << 16  # of a tensor or an array
_HERE = os.path.dirname(os.path.dirname(__file__))
_OTHERS = tuple(
    os.path.join(form(path), "")
    for path in (sys.prefix, sys.base_prefix, sysconfig.get_paths()["purelib"], _HERE)
    for form in (os.path.abspath, os.path.realpath)
)
"""The folders of Python, of installed packages and of torchhooks."""

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_GENERATORS = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)
# Iterators that say, by __reduce__, what they iterate over and where they are.
_EMPTY: tuple[Any, ...] = ([], (), range(0), "", {}, {}.values(), {}.items(), set())
_ITERATORS: tuple[type, ...] = (
    *(type(iter(each)) for each in _EMPTY),
    *(enumerate, zip, map, filter, reversed, type(reversed([]))),
    *(itertools.count, itertools.cycle, itertools.chain, itertools.islice, itertools.repeat),
)


def _place_of(iterator: Any) -> Sequence[Any]:
    """Return what ``iterator`` iterates over, and where it is, as far as that can be read."""
    try:
        return cast(tuple[Any, ...], iterator.__reduce__()[1:])
    except TypeError:  # of itertools, since Python 3.14
        text = repr(iterator) if isinstance(iterator, itertools.count) else None
        return [text, *gc.get_referents(iterator)]


class Found(NamedTuple):
    """What the probe has found under one name.

    Args:
        digest: the digest of the value.
        text: the value of a number or a string; empty for others.
        is_part: whether it is a module, an optimizer, or another object with a ``state_dict()``, which a checkpoint
            could have.
    """

    digest: str
    text: str = ""
    is_part: bool = False


def reachable(frame: types.FrameType | None, saved: Iterable[object]) -> dict[str, Found]:
    """Return what can be reached from ``frame`` and its callers, and from the script's modules, by its name.

    Args:
        frame: the frame in which the loop was called, or a caller of it.
        saved: what checkpoints contain, which is left out.
    """
    walk = _Walk(saved)
    while frame is not None:
        code = frame.f_code
        if _is_users(code.co_filename) and code.co_name != "<module>":
            for name, value in frame.f_locals.items():
                # An attribute of self has the same name in each method, and for who comes in from elsewhere.
                walk.add(type(value).__name__ if name == "self" else f"{name} in {code.co_name}()", value)
        frame = frame.f_back
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        # torch.ops and torch.classes, of types of their own, have relative file names, as a script may have.
        if type(module) is types.ModuleType and isinstance(file, str) and _is_users(file):
            for name, value in [*vars(module).items()]:
                if not name.startswith("__"):
                    walk.add(name, value)
    return walk.found


def _is_users(file: str) -> bool:
    return not file.startswith(("<", *_OTHERS))


class _Walk:
    def __init__(self, saved: Iterable[object]) -> None:
        self.found: dict[str, Found] = {}
        self._saved_tensors: set[int] = set()
        # Objects are kept as long as their ids are compared.
        self._seen: dict[int, object] = {}
        for part in saved:
            self._seen[id(part)] = part
            if isinstance(part, torch.nn.Module):
                self._saved_tensors |= {id(each) for each in itertools.chain(part.parameters(), part.buffers())}
                self._add_modules_of(part)

    def _add_modules_of(self, module: torch.nn.Module) -> None:
        """Look through the attributes of a saved module: checkpoints have its parameters and buffers only."""
        for name, each in module.named_modules():
            self._seen[id(each)] = each
            if _is_of_user(type(each)):
                for key, value in _members(each):
                    if key not in _OF_MODULES:
                        self.add(".".join(filter(None, [type(module).__name__, name, key])), value)

    def add(self, name: str, value: Any, depth: int = 0) -> None:
        """Add ``value``, or what is in it."""
        if isinstance(value, _NUMBERS):
            self._put(name, value, shown(value))
            return
        if id(value) in self._seen or depth > _MOST_DEPTH or len(self._seen) > _MOST_OBJECTS:
            return
        self._seen[id(value)] = value
        with suppress(Exception):  # a property, a lazy object or an iterator of the user that cannot be read
            self._add_object(name, value, depth + 1)

    def _put(self, name: str, value: object, text: str = "", is_part: bool = False) -> None:
        self.found.setdefault(name, Found(digest(value), text, is_part))

    def _add_object(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            if id(value) not in self._saved_tensors:
                self._put(name, _part_of(value))
        elif isinstance(value, torch.nn.Module):
            state = {key: each for key, each in _tensors_of(value) if id(each) not in self._saved_tensors}
            if state:
                self._put(name, state, is_part=True)
            self._add_modules_of(value)
        elif isinstance(value, _GENERATORS):
            self._put(name, value)
        elif isinstance(value, (dict, list, tuple, set, frozenset, collections.deque)):
            self._add_container(name, value, depth)
        elif isinstance(value, types.GeneratorType):
            if value.gi_frame is not None:
                self._put(f"{name} (a generator)", value.gi_frame.f_lasti)
                self._add_each(name, value.gi_frame.f_locals.items(), depth)
        elif isinstance(value, _ITERATORS):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # __reduce__ of itertools is deprecated
                self._add_each(f"{name} (an iterator)", enumerate(_place_of(value)), depth)
        elif isinstance(value, range):
            self._put(name, (value.start, value.stop, value.step))
        elif isinstance(value, functools.partial):
            self._add_each(name, (("func", value.func), ("args", value.args), ("keywords", value.keywords)), depth)
        elif isinstance(value, types.MethodType):
            self.add(type(value.__self__).__name__, value.__self__, depth)
        elif isinstance(value, types.FunctionType):
            if _is_users(value.__code__.co_filename):
                self._add_function(name, value, depth)
        elif isinstance(value, type):
            if _is_of_user(value):
                members = {key: each for key, each in vars(value).items() if not key.startswith("__")}
                self._add_each(name, members.items(), depth)
        elif isinstance(value, torch.utils.data.DataLoader):
            self._add_each(name, ((key, getattr(value, key)) for key in ("dataset", "sampler", "generator")), depth)
        elif type(value).__module__.partition(".")[0] == "torchhooks":
            return  # its state is in the checkpoint, or it has none
        elif has_readable_state(value):
            self._put(name, value.state_dict(), is_part=True)
        elif hasattr(value, "_num_yielded"):  # the iterator of a DataLoader
            self._put(f"{name} (an iterator)", value._num_yielded)  # noqa: SLF001 - nothing public says where it is
        elif _is_of_user(type(value)) or isinstance(value, (types.SimpleNamespace, torch.utils.data.Dataset)):
            self._add_each(name, _members(value), depth)

    def _add_function(self, name: str, function: types.FunctionType, depth: int) -> None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for key, cell in cells.items():
            with suppress(ValueError):  # a variable that has no value yet
                self.add(f"{key} in {function.__name__}()", cell.cell_contents, depth)
        self._add_each(name, function.__dict__.items(), depth)
        self.add(f"{name}.__defaults__", function.__defaults__ or (), depth)

    def _add_container(self, name: str, value: Any, depth: int) -> None:
        members = [*itertools.islice(value.items() if isinstance(value, dict) else value, _MOST_MEMBERS)]
        flat = itertools.chain.from_iterable(members) if isinstance(value, dict) else members
        if all(isinstance(each, (*_NUMBERS, torch.Tensor, np.ndarray)) for each in flat):
            # As a whole, so that an order that is another one is a difference.
            self._put(name, [_part_of(each) if isinstance(each, torch.Tensor) else each for each in members])
        elif isinstance(value, (set, frozenset)):
            return  # of objects, in no order
        else:
            pairs = members if isinstance(value, dict) else enumerate(members)
            for key, each in pairs:
                self.add(f"{name}[{key!r}]" if isinstance(key, (int, str)) else f"{name}[...]", each, depth)

    def _add_each(self, name: str, members: Iterable[tuple[object, object]], depth: int) -> None:
        for key, each in [*members]:
            self.add(f"{name}.{key}", each, depth)


_OF_MODULES = frozenset(vars(torch.nn.Module()))


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _members(value: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an object by name, and the numbers that its classes have for those that it lacks."""
    own = getattr(value, "__dict__", {})
    yield from own.items()
    for base in filter(_is_of_user, type(value).__mro__):
        for name, each in vars(base).items():
            if isinstance(each, _NUMBERS) and name not in own and not name.startswith("__"):
                yield name, each
    for base in type(value).__mro__:
        slots = getattr(base, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if not name.startswith("__") and hasattr(value, name):
                yield name, getattr(value, name)


def _is_of_user(kind: type) -> bool:
    try:
        return _is_users(inspect.getfile(kind))
    except (TypeError, OSError):  # a builtin, or a class of a module that is gone
        return False


def _part_of(array: torch.Tensor | np.ndarray) -> torch.Tensor | np.ndarray:
    """Return what is digested of ``array``: all of it, or the first elements of a large one."""
    if isinstance(array, torch.Tensor) and hasattr(array, "to_local"):
        array = array.to_local()
    size = array.numel() if isinstance(array, torch.Tensor) else array.size
    return array if size <= _MOST_ELEMENTS else array.reshape(-1)[:_MOST_ELEMENTS]


# -- what differs ------------------------------------------------------------------------------------------------------


class Probed(NamedTuple):
    """What the probe has found before one run.

    Args:
        run: the number of the run.
        is_first: whether it is the first run of its process.
        variables: what the script has that no checkpoint contains, by name.
        saved: the digests of what checkpoints contain, by name.
    """

    run: int
    is_first: bool
    variables: dict[str, Found]
    saved: dict[str, str]


class Suspect(NamedTuple):
    """What is another one before a run that was made after a resume.

    Args:
        name: how the script reaches it.
        run: the number of the run.
        without, after: its value without an interruption, and after the resume; empty but for numbers and strings.
        starts_over: whether it is what it was before the first run of all.
        is_part: whether it has a ``state_dict()``, and could be in ``state``.
        is_saved: whether checkpoints contain it, so that code between two runs has changed it.
    """

    name: str
    run: int
    without: str = ""
    after: str = ""
    starts_over: bool = False
    is_part: bool = False
    is_saved: bool = False

    def __str__(self) -> str:
        if self.is_saved:
            return f"{self.name} is another one before run {self.run}: code between two runs changes it"
        what = "starts over" if self.starts_over else "is another one"
        values = f": {self.after} after the resume, {self.without} without an interruption" if self.without else ""
        return f"{self.name} {what}{values}"


def suspects(one: list[Probed], other: list[Probed], stopped: list[Probed], run: int | None) -> list[Suspect]:
    """Return what may have made run number ``run`` another one: what differs when its process began.

    Args:
        one, other: two training runs without an interruption.
        stopped: the one that was interrupted.
        run: the first run that differs; ``None`` if only what is printed does.
    """
    begun = [each for each in stopped if each.is_first and each.run > 1 and (run is None or each.run <= run)]
    for resumed in reversed(begun) if run is not None else begun:
        found = _differing(one, other, resumed)
        if found or run is not None:
            return found
    return []


def forgotten(one: list[Probed], other: list[Probed], stopped: list[Probed]) -> list[Suspect]:
    """Return the objects with a state that are in no checkpoint, and still other ones before the last run."""
    if not one or not stopped or stopped[-1].run != one[-1].run:
        return []
    return [each for each in _differing(one, other, stopped[-1]) if each.is_part]


def _differing(one: list[Probed], other: list[Probed], resumed: Probed) -> list[Suspect]:
    mine, again = ({each.run: each for each in run}.get(resumed.run) for run in (one, other))
    if mine is None or again is None:
        return []
    changed = [
        Suspect(name, resumed.run, is_saved=True)
        for name, state in resumed.saved.items()
        if name in mine.saved and mine.saved[name] == again.saved.get(name) != state
    ]
    at_start = one[0].variables
    for name, found in resumed.variables.items():
        expected, repeated = mine.variables.get(name), again.variables.get(name)
        if expected is None or repeated is None or expected.digest != repeated.digest:
            continue  # a time, or what the operating system has seeded
        if found.digest != expected.digest:
            starts_over = name in at_start and at_start[name].digest == found.digest
            texts = (expected.text, found.text)
            changed.append(Suspect(name, resumed.run, *texts, starts_over, found.is_part or expected.is_part))
    return sorted(changed, key=lambda each: (not each.is_saved, not each.starts_over))
