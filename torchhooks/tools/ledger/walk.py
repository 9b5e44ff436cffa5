"""What a script holds that no checkpoint contains: where ``check`` looks when two training runs differ.

Before a run, all is read that can be reached from the script: the variables of its modules and of its functions that
are being called, what functions have in closures, the attributes of its objects, its iterators and generators, its
hooks. Nothing of the script is called for that: see :mod:`torchhooks.common.members`. What checkpoints contain counts
as a constant, so that only the rest can differ.

A moment is the digests of the variables before a run. The digests of what they consist of are kept once, with what is
under which name, so that a difference can be followed down to the variable that it comes from.
"""

from __future__ import annotations

import gc
import itertools
import json
import marshal
import os
import pathlib
import queue
import random
import sys
import types
import zlib
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch

from torchhooks.common.digests import MOST_VALUES, TooManyValuesError, ValueGraph, atom_text, digests
from torchhooks.common.errors import brief
from torchhooks.common.members import (
    PAIRS,
    UNORDERED,
    Attributes,
    ByClass,
    Members,
    attributes_of,
    defines,
    hook_name,
    is_a,
    is_atom,
    is_of_user,
    is_opaque,
    members_of,
    module_attributes,
    name_of,
    names_of_libraries,
    optimizer_attributes,
    optimizer_hooks,
)
from torchhooks.common.text import shown
from torchhooks.common.user_code import is_users_class, is_users_file
from torchhooks.data.variables import Variables
from torchhooks.fetches.names import bare_optimizer
from torchhooks.tools.ledger.code import names_dead_at, names_set_by_for
from torchhooks.tools.ledger.parts import is_readable, state_of

RUNNING_FOR = "the place of a running for loop"

_NUMBERS = (bool, int, float, complex, type(None), np.number, np.bool_)
_TEXTS = (str, bytes, pathlib.PurePath)
_ARRAYS = (torch.Tensor, np.ndarray)
_CONTAINERS: tuple[type, ...] = (
    *(list, tuple, dict, set, frozenset, deque, bytearray, UserDict, UserList, queue.Queue, WeakSet),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
_IN_ORDER = (list, tuple, deque)
_GENERATORS = (
    *(random.Random, torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState),
    *(types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
)
_LONG = 60
_WHOLE = (torch.nn.Module, torch.optim.Optimizer)
_WITHOUT_EDGES = frozenset({"generator", "iterator", "number", "text", "tensor"})
_MOST_MEMBERS = MOST_VALUES
_MOST_NODES = 4 * MOST_VALUES
_MOST_EDGES = 256  # of plain data, which is named as a whole if it has more members


def _kind_of(kind: type) -> str:
    """Return what an object of the class ``kind`` is: a ``"number"``, a ``"generator"``, a ``"part"``..."""
    if is_a(kind, *_NUMBERS, *_TEXTS):
        return "number" if is_a(kind, *_NUMBERS) else "text"
    for name, classes in (("tensor", _ARRAYS), ("container", _CONTAINERS), ("generator", _GENERATORS)):
        if is_a(kind, *classes):
            return name
    if is_a(kind, *_WHOLE):
        return "part"
    if defines(kind, "__next__"):
        return "iterator"
    if defines(kind, "state_dict") and defines(kind, "load_state_dict") and not defines(kind, "__iter__"):
        return "part"
    return "object"


kind_of = ByClass(_kind_of)


class Node(NamedTuple):
    """What is kept of a value.

    Args:
        kind: what it is, see :func:`kind_of`; ``"saved"`` if checkpoints contain it.
        text: the value of a number or a string; empty for others.
        edges: by the name of a member, its digest; empty where the value is a difference as a whole.
        bag: of a list, the digest that it has in any order.
        is_part: whether it is, or has in it, what a checkpoint could have: a module, an optimizer, a scheduler.
        is_plain: whether it consists of numbers, strings, tensors and containers of these.
        of_library: the names of the members that are numbers or strings, and that the code of a library names: they
            are its own, such as how often a loader was iterated.
        size: of a dict, how many keys it has; -1 for others.
    """

    kind: str
    text: str = ""
    edges: Mapping[str, str] = {}
    bag: str = ""
    is_part: bool = False
    is_plain: bool = False
    of_library: Sequence[str] = ()
    size: int = -1


class Moment(NamedTuple):
    """What the script holds before one run.

    Args:
        run: the number of the run.
        is_first: whether it is the first run of its process.
        roots: by the name of a variable, its digest.
        targets: the variables that running ``for`` loops set.
        saved: by name, the digest of what checkpoints contain.
        unseen: what cannot be seen of the script.
        dead: the variables that are set again before they are read.
    """

    run: int
    is_first: bool
    roots: Mapping[str, str]
    targets: Sequence[str] = ()
    saved: Mapping[str, str] = {}
    unseen: Sequence[str] = ()
    dead: Sequence[str] = ()


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass
class Held:
    """What a walk begins with.

    Args:
        frame: the frame in which the loop was called, or one that it called.
        saved: by name, what checkpoints contain.
        hooks: the hooks of the loop.
        step: the step function.
        item: the item that the body of the loop works on.
    """

    frame: types.FrameType | None
    saved: Mapping[str, object] = field(default_factory=dict)
    hooks: Sequence[object] = ()
    step: object = None
    item: object = None


class Walker:
    """Reads moments, and returns what is new of each."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._sums: Sums = {}

    def read(self, held: Held, run: int, is_first: bool) -> tuple[Moment, dict[str, Node]]:
        """Return what the script holds, and the nodes that no earlier moment of this process had."""
        try:
            return self._read(held, run, is_first)
        except TooManyValuesError:
            unseen = f"the variables, which hold more than {_MOST_NODES:,} values"
        except Exception as error:  # what cannot be read must not end the script
            unseen = f"the variables: {brief(error)}"
        return Moment(run, is_first, {}, unseen=[unseen]), {}

    def _read(self, held: Held, run: int, is_first: bool) -> tuple[Moment, dict[str, Node]]:
        with _without_collections():
            graph = _Graph(held, self._sums)
            item = {id(each) for each in _data_of(held.item)}
            roots = {name: graph.add(_ITEM if id(value) in item else value) for name, value in _roots(held)}
            readable = {name: state_of(part) for name, part in held.saved.items() if is_readable(part)}
            saved = dict(zip(readable, digests(readable.values()), strict=True))
            targets = _names(held.frame, lambda frame: names_set_by_for(frame.f_code))
            dead = _names(held.frame, lambda frame: names_dead_at(frame.f_code, frame.f_lasti))
            hashes = graph.digests()
        nodes = {key: node for key, node in graph.nodes(roots.values(), hashes).items() if key not in self._known}
        self._known |= nodes.keys()
        # Only those of this moment, because another object may get the id of one that is gone.
        self._sums = {key: bytes.fromhex(hashes[node]) for key, node in graph.large.items()}
        moment = Moment(
            run,
            is_first,
            {name: hashes[node] for name, node in roots.items()},
            targets,
            saved,
            sorted(graph.unseen),
            dead,
        )
        return moment, nodes


@contextmanager
def _without_collections() -> Iterator[None]:
    """Have Python collect no garbage: what it finalizes could be code of the script."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_ITEM = "the item of the loop"
"""In place of a variable that has the item, or what is directly in it: it is compared with the inputs of the run."""


def _roots(held: Held) -> Iterator[tuple[str, object]]:
    frame = held.frame
    names: set[str] = set()

    def new(name: str) -> bool:
        return not (name in names or names.add(name))  # type: ignore[func-returns-value]

    # From the inside out: of two variables with one name, that of the innermost call has it.
    while frame is not None:
        code = frame.f_code
        if is_users_file(code.co_filename) and code.co_name != "<module>":
            for name, value in [*frame.f_locals.items()]:
                # An attribute of self has the same name in each method, and for who comes in from elsewhere.
                root = type(value).__name__ if name == "self" else f"{name} in {code.co_name}()"
                if not name.startswith((".", "__")) and new(root):
                    yield root, value
        frame = frame.f_back
    seen: set[int] = set()
    # A copy, because another thread may import something meanwhile. A module of another class may be a lazy one, which
    # a look at its attributes would import.
    for name, module in [*sys.modules.items()]:
        file = vars(module).get("__file__") if type(module) is types.ModuleType else None
        is_main = name in ("__main__", "__mp_main__")
        # The script is in sys.modules under two names, see run() of as_main.
        if id(module) in seen or not (isinstance(file, str) and is_users_file(file)):
            continue
        seen.add(id(module))
        for key, value in [*vars(module).items()]:
            root = key if is_main else f"{name}.{key}"
            if not key.startswith("__") and type(value) is not types.ModuleType and new(root):
                yield root, value
    if held.step is not None and new("step"):
        yield "step", held.step
    for hook in held.hooks:
        root = type(hook).__name__
        if is_users_class(type(hook)):
            if new(root):
                yield root, hook
            continue
        for key, value in [*attributes_of(hook).items()]:
            if is_of_user(value) and new(f"{root}.{key}"):
                yield f"{root}.{key}", value
    for name, part in held.saved.items():
        if new(f'state["{name}"]'):
            yield f'state["{name}"]', part


def _names(frame: types.FrameType | None, find: Callable[[types.FrameType], Iterable[str]]) -> list[str]:
    """Return the roots that are variables which ``find`` returns of a calling function or of the script."""
    names: set[str] = set()
    while frame is not None:
        code = frame.f_code
        is_main = code.co_name == "<module>"
        if is_users_file(code.co_filename) and not (is_main and frame.f_globals.get("__name__") != "__main__"):
            form = "{}" if is_main else f"{{}} in {code.co_name}()"
            names |= {form.format(name) for name in find(frame)}
        frame = frame.f_back
    return sorted(names)


Sums = dict[tuple[int, int], bytes]
"""By the id of a large container of plain data, and the sum of its bytes, its hash. So it is read whole only once."""

_LARGE = 1000
_SERIALIZED = (list, tuple, dict, set, frozenset, deque)


class _Graph(ValueGraph):
    """The graph of all that a script holds. What cannot be read has its type only."""

    def __init__(self, held: Held, sums: Sums) -> None:
        self._sums = sums
        self.large: dict[tuple[int, int], int] = {}
        """The nodes of large containers of plain data."""
        super().__init__(read=self._read_noted, most=_MOST_NODES)
        self.kinds: list[str] = []
        self.names: dict[int, Sequence[str]] = {}
        self.unseen: set[str] = set()
        self._reading = 0
        self._constants: dict[int, str] = {}
        self._saved: dict[int, object] = {}
        self._alive: list[object] = []
        self._names_of_saved: set[frozenset[str]] = set()
        for part in held.saved.values():
            self._add_saved(part)

    def _add_saved(self, part: Any) -> None:
        self._saved[id(part)] = part
        if is_a(type(part), torch.nn.Module):
            for names in (part.state_dict(), dict(part.named_parameters())):
                self._names_of_saved.add(frozenset(map(atom_text, names)))
            for module in part.modules():
                self._saved[id(module)] = module
                table = attributes_of(module)
                forgotten = table.get("_non_persistent_buffers_set", ())
                for name, each in [*(table.get("_parameters") or {}).items(), *(table.get("_buffers") or {}).items()]:
                    if each is not None and name not in forgotten:
                        self._constants[id(each)] = "saved"
        bare: Any = bare_optimizer(part)
        if is_a(type(bare), torch.optim.Optimizer):
            self._saved[id(bare)] = bare
            values = [bare.state, *bare.state.values(), bare.param_groups, *bare.param_groups, bare.defaults]
            values += [each for state in bare.state.values() if isinstance(state, dict) for each in state.values()]
            # Some of these are made by the call. An id stands for one object only as long as that is alive.
            self._alive += values
            self._constants |= {id(each): "saved" for each in values if not is_atom(each)}

    def _node(self, value: object) -> int:
        node = super()._node(value)
        if node == len(self.kinds):
            self.kinds.append(kind_of(type(value)))
        return node

    def _text(self, node: int) -> str:
        """Return the value of a number or a string, as its label has it; empty for others."""
        if self.kinds[node] not in ("number", "text"):
            return ""
        kind, _, text = self.labels[node].partition(" ")
        if kind == "int":
            return shown(int(text, 16))
        return text if len(text) <= _LONG else f"{text[:_LONG]}..."

    def _expand(self, node: int, value: Any) -> None:
        constant = self._constants.get(id(value))
        if constant is not None:
            self.labels[node], self.kinds[node] = constant, "saved"
            return
        self._reading = node
        # Not of a class that is derived from these: it may have attributes, and define __len__().
        if any(type(value) is each for each in _SERIALIZED) and len(value) >= _LARGE:
            with suppress(ValueError):  # it has something that is not plain
                # marshal calls no code of the script, and refuses what is not plain. From version 3 on, its bytes
                # depend on which equal objects are one object.
                data = marshal.dumps([*value] if type(value) is deque else value, 2)
                key = id(value), zlib.crc32(data, len(data))
                self.large[key] = node
                if key in self._sums:
                    self.labels[node], self.fixed[node] = "the same as before", self._sums[key]
                    return
        try:
            super()._expand(node, value)
        except TooManyValuesError:
            raise
        except Exception:  # a value that changes while it is read, or whose library cannot say what it is
            label = name_of(type(value))
            self.labels[node], self.children[node] = f"{label} unread", ()
            self.unseen.add(f"an object of {label}, which cannot be read")

    def _read_noted(self, value: object) -> Members:
        members = self._members_of(value)
        if members.names:
            self.names[self._reading] = members.names
        if members.unseen:
            self.unseen.add(members.unseen)
        if len(members.children) > _MOST_MEMBERS:
            label = name_of(type(value))
            self.unseen.add(f"a {label} of {len(members.children):,} values")
            return Members(f"{label}, too large")
        return members

    def _members_of(self, value: Any) -> Members:
        members = self._members_of_object(value)
        kind = type(value)
        if (
            not is_users_class(kind)
            or kind_of(kind) not in ("object", "part")
            or (members.children and not members.names)
        ):
            return members  # of an object whose members have no names, they are not looked at
        return members._replace(children=[*members.children, kind], names=[*members.names, f">{kind.__name__}"])

    def _members_of_object(self, value: Any) -> Members:
        is_saved = id(value) in self._saved
        if is_a(type(value), torch.nn.Module):
            return self._module(value, is_saved)
        if not is_saved:
            return members_of(value)
        self.kinds[self._reading] = "saved"
        label = f"saved {name_of(type(value))}"
        if is_a(type(value), torch.optim.Optimizer):
            hooks = optimizer_hooks(value)
            attributes = optimizer_attributes(value)
        elif type(value) is Variables or is_opaque(type(value)):
            return Members(label)
        else:
            hooks, attributes = [], attributes_of(value)
            if not is_users_class(type(value)):  # its numbers are its own, and in its state
                attributes = {name: each for name, each in attributes.items() if is_of_user(each)}
        names = sorted(attributes)
        texts = [*(f".{name}" for name in names), *map(hook_name, hooks)]
        return Members(f"{label} {names}", [*(attributes[name] for name in names), *hooks], texts)

    def _module(self, module: torch.nn.Module, is_saved: bool) -> Members:
        """Return what checkpoints do not contain of a module, its mode, and which parameters require gradients."""
        table = attributes_of(module)
        named = {name: each for name, each in (table.get("_parameters") or {}).items() if each is not None}
        parameters = [*named.values()]
        own = {name: attributes_of(each) for name, each in named.items()}
        attributes = {name: Attributes([*each], [*each.values()]) for name, each in own.items() if each}
        modes: list[object] = [table.get("training"), tuple(each.requires_grad for each in parameters)]
        hooks = [
            hook
            for each in parameters
            for hooks in (each._backward_hooks, each._post_accumulate_grad_hooks)  # noqa: SLF001 - nothing public has them
            for hook in (hooks or {}).values()
        ]
        names = [".training", ".requires_grad", *map(hook_name, hooks)]
        modes += attributes.values()
        names[2:2] = [f".{name}" for name in attributes]
        if not is_saved:
            members = members_of(module)
            return members._replace(children=[*members.children, *modes, *hooks], names=[*members.names, *names])
        self.kinds[self._reading] = "saved"
        for name, each in table.items():
            if name.endswith("_hooks") and each:
                hooks += each.values()
                names += map(hook_name, each.values())
        others = {**(table.get("_modules") or {})}
        forgotten = table.get("_non_persistent_buffers_set", ())
        others |= {name: each for name, each in (table.get("_buffers") or {}).items() if name in forgotten}
        others |= module_attributes(module)
        texts = [f"[{name}]" if name.isdigit() else f".{name}" for name in others]
        return Members(
            f"saved {name_of(type(module))} {[*others]} {len(hooks)}",
            [*others.values(), *modes, *hooks],
            [*texts, *names],
        )

    def digests(self) -> list[str]:
        """Return the digest of each node. Waits for the devices that tensors are on."""
        numbers: dict[int, int] = {}
        for device in {each.device for each in self.sums}:
            # One copy from each device, instead of a wait for each tensor.
            there = [each for each in self.sums if each.device == device]
            numbers |= zip(map(id, there), torch.stack(there).tolist(), strict=True)
        return [each.hex() for each in self.hashes([numbers[id(each)] for each in self.sums])]

    def nodes(self, roots: Iterable[int], hashes: Sequence[str]) -> dict[str, Node]:
        """Return what is kept of all nodes that a comparison can come to, by their digests."""
        leading: list[list[int]] = [[] for _ in self.kinds]
        for node, children in enumerate(self.children):
            for child in children:
                leading[child].append(node)
        plain = {"number", "text", "tensor", "container"}
        strange = _reached((node for node, kind in enumerate(self.kinds) if kind not in plain), leading)
        parts = _reached(
            (node for node, kind in enumerate(self.kinds) if kind == "part" or self._is_weights(node)), leading
        )
        found: dict[str, Node] = {}
        work = deque(roots)
        while work:
            node = work.popleft()
            if hashes[node] in found:
                continue
            kind, children = self.kinds[node], self.children[node]
            is_plain = node not in strange
            edges = self._edges(node, is_plain, hashes) if children else {}
            bag = ""
            value = self._objects[node]
            if any(type(value) is each for each in _IN_ORDER):
                bag = _bag(value, [hashes[child] for child in children])
            found[hashes[node]] = Node(
                kind,
                self._text(node),
                {name: hashes[child] for name, child in edges.items()},
                bag,
                node in parts and kind not in ("saved", "function"),
                is_plain,
                self._of_library(value, edges) if kind in ("object", "part", "saved") else (),
                len(value) if type(value) is dict else len(children) // 2 if self.orders[node] == PAIRS else -1,
            )
            work += edges.values()
        return found

    def _of_library(self, value: object, edges: Mapping[str, int]) -> list[str]:
        names = names_of_libraries(type(value))
        return [key for key, node in edges.items() if self.kinds[node] in ("number", "text") and key[1:] in names]

    def _is_weights(self, node: int) -> bool:
        """Return whether a value has a tensor for each name in a saved module, such as the best weights so far."""
        keys = self.children[node][::2]
        return self.orders[node] == PAIRS and frozenset(self.labels[key] for key in keys) in self._names_of_saved

    def _edges(self, node: int, is_plain: bool, hashes: Sequence[str]) -> dict[str, int]:
        kind, children, value = self.kinds[node], self.children[node], self._objects[node]
        names, order = self.names.get(node, ()), self.orders[node]
        # A state is long. Of an object of the script, its attributes are named.
        is_whole = is_a(type(value), *_WHOLE) or not (is_users_class(type(value)) or type(value) is Variables)
        is_long = is_plain and len(children) > _MOST_EDGES
        if kind in _WITHOUT_EDGES or is_long or (kind == "part" and is_whole):
            return {}
        if order == UNORDERED:
            # An object in a set has no place there. If it is the only one of its type, it is the same one later.
            named = [name_of(type(self._objects[child])) for child in children]
            return {
                f"[...{name}]": child for name, child in zip(named, children, strict=True) if named.count(name) == 1
            }
        if order == PAIRS:
            pairs = zip(children[::2], children[1::2], strict=True)
            return {f"[{self._text(key) or '...' + hashes[key]}]": each for key, each in pairs}
        if names:
            return {name or f"#{place}": child for place, (name, child) in enumerate(zip(names, children, strict=True))}
        if kind != "container" or is_plain:
            return {}
        return {f"[{place}]": child for place, child in enumerate(children)}


def _reached(start: Iterable[int], leading: Sequence[Sequence[int]]) -> set[int]:
    reached = {*start}
    work = [*reached]
    while work:
        for node in leading[work.pop()]:
            if node not in reached:
                reached.add(node)
                work.append(node)
    return reached


def _bag(values: Any, hashes: Sequence[str]) -> str:
    parts = sorted(hashes) if hashes else sorted(map(repr, values))
    return blake2b("\n".join(parts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _data_of(item: object) -> Iterator[object]:
    """Yield the item of the loop and its direct members, if they are data."""
    if item is None or kind_of(type(item)) not in ("tensor", "container"):
        return
    yield item
    if kind_of(type(item)) == "container":
        with suppress(Exception):
            for each in members_of(item).children:
                if not is_atom(each) and kind_of(type(each)) in ("tensor", "container"):
                    yield each


# -- the file ---------------------------------------------------------------------------------------------------------


def append(path: str, moment: Moment, nodes: Mapping[str, Node]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps([moment, nodes]) + "\n")


@dataclass
class Walked:
    """The moments of all processes of a training run, in the order of time."""

    moments: list[Moment] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)

    @classmethod
    def of(cls, path: str) -> Walked:
        walked = cls()
        for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines() if os.path.exists(path) else []:
            moment, nodes = json.loads(line)
            walked.moments.append(Moment(*moment))
            walked.nodes |= {key: Node(*node) for key, node in nodes.items()}
        return walked

    @property
    def judged(self) -> set[int]:
        """The first two runs of each process, and the last run of all."""
        runs = {each.run for each in self.moments[-1:]}
        for one, other in itertools.zip_longest(self.moments, self.moments[1:]):
            if one.is_first:
                runs |= {one.run} if other is None or other.is_first else {one.run, other.run}
        return runs

    def before(self, run: int) -> Moment | None:
        """Return the last moment before the run with this number."""
        # A run that was made again has a moment for each time. The last one is of the process that went on from it.
        return next((each for each in reversed(self.moments) if each.run == run), None)


# -- comparing --------------------------------------------------------------------------------------------------------

Steps = tuple[str, ...]
"""How a value is reached: the name of a variable, and then of one member after the other."""


class Differing(NamedTuple):
    """A value that differs between two moments.

    Args:
        name: how a person reaches it, such as ``"Trainer.total"``.
        steps: how it is reached.
        one, other: what is kept of it at both moments; ``None`` where it is missing.
        is_of_library: whether it is an attribute that a library has for itself.
        lacks: of a dict that lacks keys at the other moment, and has the others with equal values, how many it lacks.
    """

    name: str
    steps: Steps
    one: Node | None
    other: Node | None
    is_of_library: bool = False
    lacks: int = 0


def differing(nodes: Mapping[str, Node], one: Moment, other: Moment) -> list[Differing]:
    """Return what differs between two moments, from the variables down, the shortest paths first."""
    found: list[Differing] = []
    seen: set[tuple[str, str]] = set()
    names = {**one.roots, **other.roots}
    dead = {*one.dead, *other.dead}
    # First what is alive: what can be reached by it is not dead, although a dead variable has it too.
    for roots in ([each for each in names if each not in dead], [each for each in names if each in dead]):
        work: deque[tuple[str, Steps, str | None, str | None, bool]] = deque(
            (name, (name,), one.roots.get(name), other.roots.get(name), False) for name in roots
        )
        while work:
            name, steps, mine, theirs, is_own = work.popleft()
            if mine == theirs:
                continue
            if mine is None or theirs is None:
                found.append(Differing(name, steps, nodes.get(mine or ""), nodes.get(theirs or ""), is_own))
                continue
            a, b = nodes[mine], nodes[theirs]
            if a.kind not in ("number", "text"):  # two numbers may be equal, and are not the same
                if (mine, theirs) in seen:
                    continue
                seen.add((mine, theirs))
            lacks = _lacks(a, b)
            inner = [] if lacks else _inner(a, b)
            for key in inner:
                is_of_library = key in a.of_library or key in b.of_library
                path = _joined(name, key)
                work.append((path, (*steps, key), a.edges.get(key), b.edges.get(key), is_of_library))
            if not inner:
                found.append(Differing(name, steps, a, b, is_own, lacks))
    return found


def _lacks(one: Node, other: Node) -> int:
    """Return how many keys a dict lacks, if that is all that is different of it: a cache, say."""
    if not 0 <= other.size < one.size:
        return 0
    if other.edges or other.size == 0:  # of a large one, the keys are not known
        is_same = all(one.edges.get(key) == digest for key, digest in other.edges.items())
        if one.edges and not is_same:
            return 0
    return one.size - other.size


def _inner(one: Node, other: Node) -> list[str]:
    """Return the members that differ, if the difference is one of them and not of the whole."""
    if one.kind != other.kind or (one.kind == "container" and not (one.edges and other.edges)):
        return []
    if one.kind == "container" and one.edges.keys() != other.edges.keys() and one.is_plain and other.is_plain:
        return []
    return [key for key in {**one.edges, **other.edges} if one.edges.get(key) != other.edges.get(key)]


def _joined(path: str, key: str) -> str:
    if key.startswith(">"):  # a variable of a function, or an attribute of the object of a method
        return key[1:]
    if key.startswith("#"):
        return path
    return f"{path}[...]" if key.startswith("[...") else f"{path}{key}"


def at(nodes: Mapping[str, Node], moment: Moment | None, steps: Steps) -> str | None:
    """Return the digest of what ``steps`` lead to at ``moment``; ``None`` if it is missing."""
    if moment is None:
        return None
    digest = moment.roots.get(steps[0])
    for step in steps[1:]:
        node = nodes.get(digest or "")
        digest = None if node is None else node.edges.get(step)
    return digest
