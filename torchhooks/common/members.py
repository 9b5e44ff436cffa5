"""What an object consists of, by value: what is digested of it, and what ``check`` walks through.

One function for each kind of object, chosen by ``type()`` and remembered. No code of the training script is called: no
property, no ``__getattr__``, no ``state_dict()`` or ``__reduce__()`` of its classes. Their attributes are read where
Python keeps them. An object of a library says itself what it is, by its ``state_dict()`` or ``__reduce_ex__()``.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import enum
import functools
import gc
import io
import os
import pathlib
import random
import re
import sys
import threading
import types
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from torchhooks.common.stateful import has_readable_state
from torchhooks.common.user_code import is_own_file, is_users_class, is_users_file

OTHER_PROCESSES = "what other processes hold"

ORDERED, UNORDERED, PAIRS = range(3)
"""Which order of members counts: all, none, or that of a key and its value."""

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)})
"""The types of objects that consist of nothing else."""


_ATOM_IDS = frozenset(map(id, ATOMS))


def is_atom(value: object) -> bool:
    """Return whether ``value`` consists of nothing else. Asks no metaclass for a hash."""
    return id(type(value)) in _ATOM_IDS


def is_a(kind: type, *classes: type) -> bool:
    """Return whether ``kind`` is derived from one of ``classes``. Calls no ``__subclasscheck__``."""
    return any(base is each for base in kind.__mro__ for each in classes)


def defines(kind: type, name: str) -> bool:
    """Return whether ``kind``, or a class that it is derived from, has the attribute ``name``."""
    return any(name in vars(base) for base in kind.__mro__)


T = TypeVar("T")


class ByClass(Generic[T]):
    """Calls a function once for each class, and remembers what it returned.

    By the ids of the classes, because a metaclass of the script may define ``__hash__``.
    """

    def __init__(self, function: Callable[[type], T]) -> None:
        self._function = function
        self._known: dict[int, tuple[type, T]] = {}

    def __call__(self, kind: type) -> T:
        known = self._known.get(id(kind))
        if known is None:
            if len(self._known) > _MOST_TYPES:  # a script that makes classes as it goes
                self._known.clear()
            # With the class itself: as long as it is known here, no other class gets its id.
            self._known[id(kind)] = known = kind, self._function(kind)
        return known[1]


_MOST_TYPES = 4096


class Members(NamedTuple):
    """What an object consists of.

    Args:
        label: what it is, apart from its members.
        children: its members.
        names: what a person calls them, such as ``".total"``; empty where their number or their key says it. What
            begins with ``>`` is a whole name, such as that of a variable of a function.
        order: which order of the members counts.
        unseen: what of the object cannot be seen; empty if all of it can.
    """

    label: str
    children: Sequence[object] = ()
    names: Sequence[str] = ()
    order: int = ORDERED
    unseen: str = ""


Reader = Callable[[Any], Members]


def members_of(value: object) -> Members:
    """Return what ``value`` consists of. It is neither a tensor nor an array of NumPy."""
    return _reader_for(type(value))(value)


def name_of(kind: type) -> str:
    """Return the name of a class with its module, but for those of Python itself."""
    module = vars(kind).get("__module__")
    name = kind.__qualname__
    return f"{module}.{name}" if isinstance(module, str) and module != "builtins" else name


def _reader_of(kind: type) -> Reader:
    label = name_of(kind)
    if label == _VARIABLES:
        return functools.partial(_read_namespace, label=label)
    if is_opaque(kind):
        return functools.partial(_read_opaque, label=label)
    for classes, reader in _readers_of_classes():
        if is_a(kind, *(classes if isinstance(classes, tuple) else (classes,))):
            return functools.partial(reader, label=label)
    if _is_of_interpreter(kind, "__reduce__"):
        return functools.partial(_read_reduced, label=label)
    return functools.partial(_read_object, label=label)


_reader_for = ByClass(_reader_of)


# -- attributes -------------------------------------------------------------------------------------------------------

_NO_ATTRIBUTES: dict[str, Any] = {}
_DATA = (*ATOMS, list, dict, set, tuple)


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of ``value`` where Python keeps them, without a call of a property or ``__getattr__``."""
    for base in type(value).__mro__:
        # By the slot that Python itself uses. value.__dict__ would call a __getattribute__ of the script, or a property
        # that is called __dict__.
        slot: Any = base.__dict__.get("__dict__")
        if type(slot) is types.GetSetDescriptorType or type(slot) is types.MemberDescriptorType:
            found = slot.__get__(value, type(value))
            return found if isinstance(found, dict) else _NO_ATTRIBUTES
    return _NO_ATTRIBUTES


_MOST_ITEMS = 256  # a longer container in an attribute is data
_DEPTH = 4  # of containers in containers


def values_in_attributes(value: object) -> Iterator[tuple[str, object]]:
    """Yield the values in the attributes of ``value``, each with the name of the attribute.

    Of a list, tuple or dict these are its items, a few levels deep. Other containers are not read: it could run code.
    """
    values: list[tuple[str, Any]] = [*attributes_of(value).items()]
    read: set[int] = set()  # the containers: a list may contain itself
    for _ in range(_DEPTH):
        inside: list[tuple[str, Any]] = []
        for name, each in values:
            kind, items = type(each), None
            if kind is dict:
                items = each.values()
            elif kind is list:
                items = each
            elif is_a(kind, tuple):
                items = tuple.__getitem__(each, slice(None))  # not by the methods of a named tuple's class
            if items is None:
                yield name, each
            elif len(items) <= _MOST_ITEMS and id(each) not in read:
                read.add(id(each))
                # Of a copy, because a thread of the script may change the container meanwhile.
                inside += [(name, item) for item in [*items]]
        values = inside


def slots_of(value: object) -> dict[str, Any]:
    """Return the values of the slots of ``value``, which are the same as members of a class that is written in C."""
    found = {}
    for base in type(value).__mro__:
        for name, slot in [*base.__dict__.items()]:
            if type(slot) is types.MemberDescriptorType and not name.startswith("__"):
                with suppress(Exception):  # a slot without a value
                    found[name] = slot.__get__(value)
    return found


def _all_attributes(value: object) -> dict[str, Any]:
    """Return attributes, slots, and the numbers and containers of classes of the user that an instance may replace."""
    found = {str(name): each for name, each in [*attributes_of(value).items()]}
    if any(type(each) is types.MemberDescriptorType for base in type(value).__mro__ for each in vars(base).values()):
        found |= slots_of(value)
    # An attribute of the class is the value until an instance sets its own, as in "self.total += 1".
    for base in type(value).__mro__:
        if is_users_class(base):
            for name, each in [*vars(base).items()]:
                if name not in found and not name.startswith("__") and any(type(each) is kind for kind in _DATA):
                    found[name] = each
    return found


def _named(label: str, attributes: Mapping[str, Any], *, unseen: str = "") -> Members:
    # Sorted, because the order in which attributes were set does not count. In the label, because values that change
    # their names are another state.
    names = sorted(attributes)
    texts = [f".{name}" for name in names]
    return Members(f"{label} {names}", [attributes[name] for name in names], texts, unseen=unseen)


def _with_attributes(members: Members, value: object) -> Members:
    """Add the attributes of ``value``, an instance of a subclass, to what its base class has."""
    attributes = _all_attributes(value)
    if not attributes:
        return members
    names = sorted(attributes)
    # One member for all of them, whatever the order of the others is.
    extra = Attributes(names, [attributes[name] for name in names])
    key = [_KEY] if members.order == PAIRS else []
    texts = [*members.names, ""] if members.names else ()
    return members._replace(children=[*members.children, *key, extra], names=texts)


class Attributes:
    """The attributes of an instance of a subclass, next to what its base class has."""

    def __init__(self, names: Sequence[str], values: Sequence[object]) -> None:
        self.names, self.values = names, values


class _Pairs:
    """Keys and their values, alternating, as a dict would have them if it had no order."""

    def __init__(self, values: Sequence[object]) -> None:
        self.values = values


def _read_pairs(value: _Pairs, label: str) -> Members:
    return Members("dict", value.values, order=PAIRS)


_KEY = "the attributes of a mapping"


def _read_attributes(value: Attributes, label: str) -> Members:
    return Members(f"attributes {value.names}", value.values, [f".{name}" for name in value.names])


def _read_opaque(value: Any, label: str) -> Members:
    """Return the type of ``value``, and of an object of torchhooks what the script has set, such as ``loop.best``."""
    attributes = attributes_of(value) if label.startswith("torchhooks.") else _NO_ATTRIBUTES
    if not attributes:
        return Members(label)
    names = names_of_libraries(type(value))
    return _named(label, {name: each for name, each in attributes.items() if name not in names})


# -- which class defines what -----------------------------------------------------------------------------------------

_REDUCING = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
# What these modules define belongs to the process and not to the training run, such as locks, threads, connections,
# handlers of log lines and progress bars.
_OPAQUE = (
    *("torchhooks", "tqdm", "rich", "logging", "threading", "_thread", "concurrent", "asyncio", "selectors", "socket"),
    *("subprocess", "wandb", "mlflow", "tensorboard", "torch.utils.tensorboard", "accelerate", "matplotlib", "pyarrow"),
    *("torch._dynamo", "torch._inductor", "torch._functorch", "torch._guards", "torch.distributed", "torch.cuda"),
    *("torch.multiprocessing", "multiprocessing.context", "multiprocessing.process", "multiprocessing.synchronize"),
    *("multiprocessing.queues", "multiprocessing.pool", "multiprocessing.managers", "multiprocessing.connection"),
    *("multiprocessing.popen_fork", "multiprocessing.popen_spawn_posix", "tempfile", "lightning_fabric", "importlib"),
    *("torch.profiler", "torch.autograd.profiler", "signal", "inspect", "typing", "unittest.mock", "_frozen_importlib"),
    *("_frozen_importlib_external", "ssl", "http", "urllib3", "requests", "fsspec", "warnings", "contextlib"),
)
_VARIABLES = "torchhooks.data.variables.Variables"
_OWN = ("torchhooks.common.members.Attributes", "torchhooks.common.members._Pairs")
_READ = frozenset({_VARIABLES, *_OWN, "threading.local", "_thread._local"})


def is_opaque(kind: type) -> bool:
    """Return whether only the type counts of an object of ``kind``: a lock, a logger, a progress bar, a writer."""
    module = vars(kind).get("__module__")
    if not isinstance(module, str) or name_of(kind) in _READ:
        return False
    if is_a(kind, torch.nn.Module, torch.optim.Optimizer):
        return False
    if defines(kind, "state_dict") and defines(kind, "load_state_dict") and not module.startswith("torchhooks."):
        return False  # such as torch.cuda's GradScaler
    # The first test is one fast call, which nearly every module fails. The second tells a package from one whose name
    # only begins like it.
    return module.startswith(_OPAQUE) and any(f"{module}.".startswith(f"{each}.") for each in _OPAQUE)


def _definer(kind: type, names: Iterable[str]) -> type | None:
    """Return the first class of ``kind`` that defines one of the methods ``names``; not ``object``."""
    bases = (base for base in kind.__mro__ if base is not object)
    return next((base for base in bases if any(name in vars(base) for name in names)), None)


def _is_of_interpreter(kind: type, name: str) -> bool:
    """Return whether ``kind`` is an iterator of Python, whose ``__reduce__`` says where it is."""
    definer = _definer(kind, _REDUCING)
    return definer is not None and name in vars(definer) and kind.__module__ in ("builtins", "itertools", "collections")


def _hides(kind: type) -> bool:
    """Return whether objects of ``kind`` have memory that no attribute shows: a class that is written in C."""
    for base in kind.__mro__[:-1]:
        parent = base.__base__
        # A slot, __dict__ and __weakref__ take one word of an object each, at most. What is more is memory that only
        # code in C can read.
        size = base.__basicsize__ - (0 if parent is None else parent.__basicsize__)
        shown = sum(
            type(each) is types.MemberDescriptorType or name in ("__dict__", "__weakref__")
            for name, each in vars(base).items()
        )
        if size > _WORD * shown:
            return True
    return False


_WORD = ctypes.sizeof(ctypes.c_void_p)


# -- objects ----------------------------------------------------------------------------------------------------------


def _read_object(value: Any, label: str) -> Members:
    kind = type(value)
    if not is_users_class(kind):
        state = _definer(kind, ("state_dict",))
        if state is not None and not is_users_class(state) and has_readable_state(value):
            return _read_state(value, label)
    definer = _definer(kind, _REDUCING)
    # Only by methods of libraries, as no code of the script is called. The EzPickle of Gymnasium keeps the arguments of
    # the constructor alone, so two environments in different states would look equal.
    if definer is not None and not is_users_class(definer) and definer.__name__ != "EzPickle":
        with suppress(Exception):  # what it is cannot be pickled, such as a lock, or a window
            reduced = _read_reduced(value, label)
            return _with_attributes(reduced, value) if is_users_class(kind) else reduced
    attributes = _all_attributes(value)
    return _named(label, attributes, unseen=f"an object of {label}" if _hides(kind) else "")


def _read_state(value: Any, label: str) -> Members:
    """Return the state of an object of a library, and what it has of the script: functions, above all."""
    users = {name: each for name, each in attributes_of(value).items() if is_of_user(each)}
    names = sorted(users)
    children = [value.state_dict(), *(users[name] for name in names)]
    return Members(f"{label} {names}", children, ["", *(f".{name}" for name in names)])


def is_of_user(value: object) -> bool:
    """Return whether ``value`` is a function or an object of the script, or a container that has one directly."""
    if type(value) is list or type(value) is tuple:
        return any(map(is_of_user, value))
    if type(value) is dict:
        return any(map(is_of_user, value.values()))
    if type(value) is types.FunctionType:
        return is_users_file(value.__code__.co_filename)
    if type(value) is types.MethodType:
        return is_of_user(value.__self__) or is_of_user(value.__func__)
    if type(value) is functools.partial:
        return is_of_user(value.func)
    return is_users_class(type(value))


def _read_reduced(value: Any, label: str) -> Members:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # __reduce__ of itertools is deprecated
        try:
            reduced = value.__reduce_ex__(4)
        except TypeError:
            if type(value).__module__ != "itertools":
                raise
            # Since Python 3.14, its iterators say only what they refer to.
            text = repr(value) if type(value).__name__ == "count" else ""
            return Members(f"{label} {text}", gc.get_referents(value))
    if isinstance(reduced, str):
        return Members(f"{label} {reduced}")
    function, args, state, items, pairs = [*reduced, None, None, None][:5]
    if type(args) is tuple and any(map(_is_of_loop, args)):
        return Members(f"{label} around a loop")  # its place is that of a running for
    if getattr(function, "__name__", "") in ("__reduce_ex__", "__newobj__", "__newobj_ex__", "_reconstructor"):
        args = args[1:]  # the class, which the label has
        function = None
    children = [function, args, state, None if items is None else [*items], None if pairs is None else dict(pairs)]
    return Members(label, children)


def _read_module(value: Any, label: str) -> Members:
    """Return the parameters, buffers, submodules, attributes and hooks of a module. Its mode does not count."""
    attributes = attributes_of(value)
    if is_a(type(value), torch.jit.ScriptModule):
        parts = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        return Members(f"{label} {[*parts]}", [*parts.values()], [f".{name}" for name in parts])
    tables = [(name, attributes.get(name) or {}) for name in ("_parameters", "_buffers", "_modules")]
    names = [f"{name}.{key}" for name, table in tables for key in table]
    children = [each for _, table in tables for each in table.values()]
    texts = [f"[{key}]" if key.isdigit() else f".{key}" for _, table in tables for key in table]
    others = module_attributes(value)
    hooks = [each for name, table in attributes.items() if name.endswith("_hooks") and table for each in table.values()]
    return Members(
        f"{label} {names} {sorted(others)} {len(hooks)}",
        [*children, *(others[name] for name in sorted(others)), *hooks],
        [*texts, *(f".{name}" for name in sorted(others)), *(hook_name(each) for each in hooks)],
    )


_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "torch._dynamo.", "accelerate.", "lightning")


def module_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are no parameters, buffers, modules or hooks."""
    is_wrapper = f"{type(module).__module__}.".startswith(_WRAPPERS)
    return {
        name: each
        for name, each in _all_attributes(module).items()
        if name not in _OF_EVERY_MODULE and not (is_wrapper and not is_of_user(each))
    }


def hook_name(hook: object) -> str:
    """Return what a person calls a function that a module, a tensor or an optimizer calls."""
    name = getattr(hook, "__name__", "") if isinstance(hook, (types.FunctionType, types.MethodType)) else ""
    return f".{name}()" if name else ".hook"


def _read_optimizer(value: Any, label: str) -> Members:
    attributes = attributes_of(value)
    groups, state = attributes.get("param_groups"), attributes.get("state")
    if type(groups) is not list or not is_a(type(state), dict):  # a wrapper, such as Accelerate's
        return _named(label, {name: each for name, each in attributes.items() if not is_atom(each)})
    assert isinstance(state, dict)
    parameters = [each for group in groups for each in group["params"]]
    # Not the parameters themselves: they count as those of the model.
    options = [{**group, "params": len(group["params"])} for group in groups]
    # By the places of the parameters: the keys of the state are tensors, whose ids differ in every process.
    states = [state.get(each) for each in parameters]
    others = optimizer_attributes(value)
    names = sorted(others)
    hooks = optimizer_hooks(value)
    return Members(
        f"{label} {names} {len(hooks)}",
        [options, states, *(others[name] for name in names), *hooks],
        [".param_groups", ".state", *(f".{name}" for name in names), *map(hook_name, hooks)],
    )


def optimizer_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that the script has given to ``optimizer``: no class of a library names them."""
    names = names_of_libraries(type(optimizer)) | _names_of_schedulers()
    return {name: each for name, each in _all_attributes(optimizer).items() if name not in names}


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[object]:
    """Return the functions of the script that ``optimizer`` calls."""
    tables = [each for name, each in attributes_of(optimizer).items() if name.endswith("_hooks")]
    return [each for table in tables for each in table.values() if is_of_user(each)]


def _names_of_libraries(kind: type) -> frozenset[str]:
    names: set[str] = set()
    for base in kind.__mro__[:-1]:
        if not is_users_class(base):
            _add_names_of(vars(base), names)
    return frozenset(names)


names_of_libraries = ByClass(_names_of_libraries)
"""Returns the names in the code of the library classes that a class is, or is derived from."""


@functools.cache
def _names_of_schedulers() -> frozenset[str]:
    """Return the names in torch's code for what works with optimizers and sets attributes of them."""
    names: set[str] = set()
    for module in ("torch.optim.lr_scheduler", "torch.amp.grad_scaler"):
        for each in vars(sys.modules[module]).values() if module in sys.modules else ():
            _add_names_of(vars(each) if is_a(type(each), type) else {"": each}, names)
    return frozenset(names)


def _add_names_of(scope: Mapping[str, Any], names: set[str]) -> None:
    names.update(scope)
    for each in [*scope.values()]:  # some of them may be lazy, and import something when they are asked for anything
        kind = type(each)
        if kind is staticmethod or kind is classmethod:
            each = each.__func__
        elif kind is property:
            each = each.fget
        if type(each) is types.FunctionType:
            _add_names(each.__code__, names)


def _add_names(code: object, names: set[str]) -> None:
    work = [code]
    while work:
        each = work.pop()
        if isinstance(each, types.CodeType):
            names.update(each.co_names)
            work += each.co_consts


# -- numbers and containers -------------------------------------------------------------------------------------------


def _base_text(kind: type, value: Any) -> str:
    if kind is bytes:
        return repr(bytes.__getitem__(value, slice(None)))
    if kind is str:
        return repr(str.__str__(value))
    if kind is int:
        return f"{int.__int__(value):x}"
    if kind is float:
        return repr(float.__float__(value))
    # There is no other way to a plain complex without a method of the subclass. Both parts of -0j are -0.0, which added
    # to any number changes nothing, not even the sign of a zero.
    return repr(complex.__add__(value, -0j))


def _read_atom(value: Any, label: str) -> Members:
    kind = next(each for each in (bytes, str, int, float, complex) if is_a(type(value), each))
    return _with_attributes(Members(f"{label} {_base_text(kind, value)}"), value)


def _plain_text(values: Sequence[Any]) -> str | None:
    """Return the values of a sequence of nothing but atoms as one text, which is much faster; ``None`` for others."""
    if not _ATOM_IDS.issuperset(map(id, map(type, values))):
        if not all(is_atom(each) or is_a(type(each), np.generic) for each in values):
            return None
        values = [each if is_atom(each) else each.item() for each in values]
        if not _ATOM_IDS.issuperset(map(id, map(type, values))):
            return None
    try:
        return repr(values if type(values) is list else [*values])
    except ValueError:  # an integer of more than 4300 digits
        return None


def _read_sequence(value: Any, label: str, iterate: Callable[[Any], Iterable[Any]], exact: type) -> Members:
    values = [*iterate(value)]
    text = _plain_text(values)
    members = Members(label, values) if text is None else Members(f"{label} {text}")
    return members if type(value) is exact else _with_attributes(members, value)


def _read_list(value: Any, label: str) -> Members:
    return _read_sequence(value, label, list.__iter__, list)


def _read_tuple(value: Any, label: str) -> Members:
    members = _read_sequence(value, label, tuple.__iter__, tuple)
    fields = next((vars(base)["_fields"] for base in type(value).__mro__ if "_fields" in vars(base)), ())
    if fields and members.children and type(fields) is tuple:
        names = [f".{name}" for name in fields][: len(members.children)]
        return members._replace(names=[*names, *[""] * (len(members.children) - len(names))])
    return members


def _read_deque(value: Any, label: str) -> Members:
    members = _read_sequence(value, label, collections.deque.__iter__, collections.deque)
    most = vars(collections.deque)["maxlen"].__get__(value)
    return members._replace(label=f"{members.label} of at most {most}")


def _read_set(value: Any, label: str) -> Members:
    values = [*(set.__iter__(value) if is_a(type(value), set) else frozenset.__iter__(value))]
    members = Members(label, values, order=UNORDERED)
    return members if type(value) is set or type(value) is frozenset else _with_attributes(members, value)


def _read_weak_set(value: Any, label: str) -> Members:
    return Members(label, [*weakref.WeakSet.__iter__(value)], order=UNORDERED)


def _read_dict(value: Any, label: str) -> Members:
    # An OrderedDict keeps an order of its own: dict.items() does not see what move_to_end() has moved.
    items = collections.OrderedDict.items if is_a(type(value), collections.OrderedDict) else dict.items
    pairs = [*items(value)]
    children = [each for pair in pairs for each in pair]
    if is_a(type(value), collections.defaultdict):
        factory = vars(collections.defaultdict)["default_factory"].__get__(value)
        # Two members, because keys and values alternate.
        children += ["default_factory", factory]
    members = Members(label, children, order=PAIRS)
    is_plain = type(value) is dict or type(value) is collections.OrderedDict
    return members if is_plain else _with_attributes(members, value)


def _read_proxy(value: Any, label: str) -> Members:
    return Members(label, ({**value},))


def _read_keys(value: Any, label: str) -> Members:
    return Members(label, [*value], order=UNORDERED)


def _read_values(value: Any, label: str) -> Members:
    return Members(label, [*value])


def _read_bytes(value: Any, label: str) -> Members:
    text = f"{value.typecode} " if is_a(type(value), array.array) else ""
    data = memoryview(value)
    plain = data if data.contiguous else memoryview(data.tobytes())
    members = Members(f"{label} {text}{len(value)} {zlib.crc32(plain):08x}")
    return _with_attributes(members, value) if is_users_class(type(value)) else members


def _read_repr(value: Any, label: str) -> Members:
    return Members(f"{label} {value!r}")


def _read_enum(value: Any, label: str) -> Members:
    attributes = attributes_of(value)
    others = {name: each for name, each in attributes.items() if name not in _OF_ENUM}
    return _named(f"{label}.{attributes.get('_name_')}", others)


_OF_ENUM = frozenset({"_name_", "_value_", "__objclass__", "_sort_order_"})


def _read_path(value: Any, label: str) -> Members:
    return Members(f"{label} {pathlib.PurePath.__str__(value)!r}")


# -- random generators ------------------------------------------------------------------------------------------------


def _read_random(value: Any, label: str) -> Members:
    # Not value.getstate(), which a class of the script may override.
    members = Members(label, (random.Random.getstate(value),))
    return _with_attributes(members, value) if is_users_class(type(value)) else members


def _read_torch_generator(value: Any, label: str) -> Members:
    return Members(label, (value.get_state(),))


def _read_numpy_state(value: Any, label: str) -> Members:
    return Members(label, (value.get_state(legacy=False),))


# -- functions, generators, iterators ---------------------------------------------------------------------------------


def _read_function(value: Any, label: str) -> Members:
    code = value.__code__
    # What a function of torchhooks refers to is no state of the script.
    if is_own_file(code.co_filename):
        return Members(f"function {value.__module__}.{value.__qualname__}")
    cells = dict(zip(code.co_freevars, value.__closure__ or (), strict=True))
    children: list[object] = [*cells.values()]
    names = [f">{name} in {value.__name__}()" for name in cells]
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(value, name):
            children.append(getattr(value, name))
            names.append(f".{name}")
    attributes = attributes_of(value)
    for name in sorted(attributes):
        children.append(attributes[name])
        names.append(f".{name}")
    if is_users_file(code.co_filename):
        children.append(code)
        names.append("")
    return Members(f"function {value.__module__}.{value.__qualname__} {names}", children, names)


def _read_code(value: Any, label: str) -> Members:
    # Without the file and the lines: a function that has only moved is the same.
    return Members(f"code {value.co_name} {value.co_names} {value.co_code.hex()}", value.co_consts)


def _read_cell(value: Any, label: str) -> Members:
    try:
        return Members("cell", (value.cell_contents,), ("",))
    except ValueError:  # a variable that has no value yet
        return Members("empty cell")


def _read_method(value: Any, label: str) -> Members:
    return Members("method", (value.__self__, value.__func__), (f">{type(value.__self__).__name__}", ""))


def _read_builtin(value: Any, label: str) -> Members:
    of = getattr(value, "__self__", None)
    name = f"builtin {getattr(value, '__module__', '')}.{value.__qualname__}"
    return Members(name) if of is None or is_a(type(of), type, types.ModuleType) else Members(name, (of,), ("",))


def _read_class(value: Any, label: str) -> Members:
    """Return the name of a class, and of one of the script what it holds: data, and functions that hold something."""
    name = name_of(value)
    if not is_users_class(value):
        return Members(f"class {name}")
    members = vars(value).get("_member_map_") if is_a(value, enum.Enum) else vars(value)
    held = {key: each for key, each in [*(members or {}).items()] if not key.startswith("__") and _holds(each)}
    return _named(f"class {name}", held)


def _holds(value: Any) -> bool:
    kind = type(value)
    if is_atom(value) or is_users_class(kind):
        return True
    if kind is staticmethod or kind is classmethod:
        return _holds(value.__func__)
    if kind is property:
        return any(map(_holds, filter(None, (value.fget, value.fset, value.fdel))))
    if kind is types.FunctionType:
        return bool(value.__closure__ or attributes_of(value) or value.__defaults__ or value.__kwdefaults__)
    return not (defines(kind, "__call__") or defines(kind, "__get__") or kind.__module__ in ("_abc", "functools"))


def _read_module_of_python(value: Any, label: str) -> Members:
    return Members(f"module {value.__name__}")


def _read_partial(value: Any, label: str) -> Members:
    children = [value.func, value.args, value.keywords, attributes_of(value)]
    return Members(label, children, (".func", ".args", ".keywords", ""))


def _read_cache(value: Any, label: str) -> Members:
    """Return the function and the cache of ``functools.lru_cache``, in the order in which entries were used."""
    function = value.__wrapped__
    attributes = attributes_of(value)
    entries = [each for each in gc.get_referents(value) if each is not function and each is not attributes]
    tables = [each for each in entries if type(each) is dict]
    if not any(map(_is_table, tables)):
        return Members("lru_cache", (function, *tables), ("", ".cache"))
    # With a limit, it has the keys and their results, in the order of their use, and a table of the keys.
    pairs = [each for each in entries if type(each) is not dict and type(each) is not object and type(each) is not type]
    return Members("lru_cache", (function, _Pairs(pairs)), ("", ".cache"))


def _is_of_loop(value: object) -> bool:
    """Return whether ``value`` is a generator of torchhooks, such as that of until_stop, or a tuple with one."""
    if type(value) is tuple:
        return any(map(_is_of_loop, value))
    return type(value) is types.GeneratorType and is_own_file(value.gi_code.co_filename)


def _is_table(value: object) -> bool:
    return type(value) is dict and any(type(each).__name__ == "_lru_list_elem" for each in value.values())


_FRAMES = {types.GeneratorType: "gi", types.CoroutineType: "cr", types.AsyncGeneratorType: "ag"}


def _read_generator(value: Any, label: str) -> Members:
    prefix = _FRAMES[type(value)]
    frame = getattr(value, f"{prefix}_frame")
    name = f"{label} {getattr(value, f'{prefix}_code').co_name}"
    if is_own_file(getattr(value, f"{prefix}_code").co_filename):
        return Members(name)  # of until_stop, say, whose place is in the checkpoint
    if frame is None:
        return Members(f"{name} ended")
    variables = frame.f_locals
    # A generator that has not begun has no iterators yet, and one that runs does not show its stack.
    if frame.f_lasti < 0 or getattr(value, f"{prefix}_running"):
        stack = []
    else:
        # What the frame has on its stack: the iterators of its running for loops, and what it awaits.
        known = {*map(id, variables.values()), id(frame), id(value)}
        stack = [each for each in gc.get_referents(value) if id(each) not in known and _is_iterator(each)]
    names = sorted(variables)
    return Members(
        f"{name} {frame.f_lasti} {names}",
        [*(variables[each] for each in names), *stack],
        [*(f".{each}" for each in names), *(".for" for _ in stack)],
    )


def _is_iterator(value: object) -> bool:
    return defines(type(value), "__next__") or any(type(value) is each for each in _FRAMES)


def _read_set_iterator(value: Any, label: str) -> Members:
    # What is left of the set. As a set, because the order of its items differs between processes.
    return Members(label, (frozenset(value.__reduce__()[1][0]),))


# -- files and others -------------------------------------------------------------------------------------------------


def _read_file(value: Any, label: str) -> Members:
    """Return the name, the mode and the place of a file; of one that is written, no place."""
    if isinstance(value, (io.BytesIO, io.StringIO)):
        content = None if value.closed else (value.getvalue(), value.tell())
        return Members(label, (content,))
    name, mode = (_quiet(value, each) for each in ("name", "mode"))
    if _quiet(value, "closed") is not False or not isinstance(mode, str) or set(mode) & set("wax+"):
        return Members(f"{label} {name!r} {mode!r}")
    try:
        return Members(f"{label} {name!r} {mode!r} {value.tell()}")
    except (OSError, ValueError):
        return Members(f"{label} {name!r} {mode!r}", unseen="the place in a text file that is being read")


def _quiet(value: object, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # of a file that is closed or detached
        return None


def _read_ctypes(value: Any, label: str) -> Members:
    # A pointer is an address, which says nothing in another process.
    if isinstance(value, ctypes._Pointer) or getattr(type(value), "_type_", "") in ("P", "z", "Z", "O"):  # noqa: SLF001
        return Members(label, unseen=f"an object of {label}")
    return Members(f"{label} {ctypes.string_at(ctypes.addressof(value), ctypes.sizeof(value)).hex()}")


def _read_synchronized(value: Any, label: str) -> Members:
    return Members(label, (attributes_of(value).get("_obj"),), ("",))


def _read_context_variable(value: Any, label: str) -> Members:
    return Members(f"{label} {value.name}", (value.get(None),), ("",))


def _read_thread_local(value: Any, label: str) -> Members:
    # The values of the calling thread. Those of other threads cannot be reached.
    return _named(label, dict(threading.local.__getattribute__(value, "__dict__")))


def _read_reference(value: Any, label: str) -> Members:
    return Members("weak reference", (value(),), ("",))


def _read_csv(value: Any, label: str) -> Members:
    return _named(label, {**slots_of(value), **{str(n): each for n, each in enumerate(gc.get_referents(value))}})


def _read_loader(value: Any, label: str) -> Members:
    # The iterator that it keeps is that of its workers, or of a loop.
    attributes = {name: each for name, each in _all_attributes(value).items() if not name.startswith("_")}
    if not attributes.get("num_workers"):
        # It is drawn from for the seed of the workers. What shuffles has it as the generator of the sampler.
        attributes.pop("generator", None)
        return _named(label, attributes)
    return _named(label, attributes, unseen=OTHER_PROCESSES)


def _read_namespace(value: Any, label: str) -> Members:
    return _named(label, attributes_of(value))


def _read_type_only(value: Any, label: str) -> Members:
    return Members(label)


def _reading(*names: str) -> Callable[..., Members]:
    """Return what reads objects of Python or NumPy that consist of the attributes ``names``."""

    def read(value: Any, label: str) -> Members:
        return Members(label, [getattr(value, name) for name in names], [""] * len(names))

    return read


@functools.cache
def _readers_of_classes() -> list[tuple[Any, Callable[..., Members]]]:
    """Return what reads the objects of some classes, the first that fits.

    Made when the first object is read: an import of torchhooks would import what few scripts need.
    """
    import _csv
    import multiprocessing.sharedctypes

    plain_c = type.mro(ctypes.c_int)[2]  # what all types of ctypes are derived from has no public name
    # The same of files: io.IOBase is an abstract class that they are only registered with.
    file = io.TextIOWrapper.__mro__[-2]
    return [
        (Attributes, _read_attributes),
        (_Pairs, _read_pairs),
        (torch.nn.Module, _read_module),
        (torch.optim.Optimizer, _read_optimizer),
        (
            (torch.dtype, torch.device, torch.layout, torch.memory_format, range, re.Pattern, types.GenericAlias),
            _read_repr,
        ),
        # Before the numbers and strings, because an IntEnum is both.
        (enum.Enum, _read_enum),
        ((bytes, str, int, float, complex), _read_atom),
        (list, _read_list),
        (tuple, _read_tuple),
        (dict, _read_dict),
        (collections.deque, _read_deque),
        ((set, frozenset), _read_set),
        ((bytearray, memoryview, array.array), _read_bytes),
        (slice, _reading("start", "stop", "step")),
        (types.MappingProxyType, _read_proxy),
        ((type({}.keys()), type({}.items())), _read_keys),
        (type({}.values()), _read_values),
        (pathlib.PurePath, _read_path),
        (random.Random, _read_random),
        (torch.Generator, _read_torch_generator),
        (np.random.Generator, _reading("bit_generator")),
        (np.random.BitGenerator, _reading("state")),
        (np.random.RandomState, _read_numpy_state),
        (types.FunctionType, _read_function),
        (types.CodeType, _read_code),
        (types.CellType, _read_cell),
        (types.MethodType, _read_method),
        (
            (
                types.BuiltinFunctionType,
                types.MethodWrapperType,
                types.WrapperDescriptorType,
                types.MethodDescriptorType,
            ),
            _read_builtin,
        ),
        ((staticmethod, classmethod), _reading("__func__")),
        (property, _reading("fget", "fset", "fdel")),
        (functools.cached_property, _reading("func")),
        (type, _read_class),
        (types.ModuleType, _read_module_of_python),
        (types.SimpleNamespace, _read_namespace),
        (torch.utils.data.DataLoader, _read_loader),
        (functools.partial, _read_partial),
        (type(functools.lru_cache(int)), _read_cache),
        ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), _read_generator),
        (type(iter(set())), _read_set_iterator),
        (file, _read_file),
        (type(_csv.reader([])), _read_csv),
        (plain_c, _read_ctypes),
        (multiprocessing.sharedctypes.SynchronizedBase, _read_synchronized),
        (threading.local, _read_thread_local),
        ((type(threading.Lock()), type(threading.RLock())), _read_type_only),
        (contextvars.ContextVar, _read_context_variable),
        (weakref.ref, _read_reference),
        (weakref.WeakSet, _read_weak_set),
        (
            (
                *(types.FrameType, types.TracebackType, types.GetSetDescriptorType, torch.utils.hooks.RemovableHandle),
                *(types.MemberDescriptorType, types.ClassMethodDescriptorType, types.UnionType, np.ufunc, torch.finfo),
                *(torch.iinfo, torch.Stream, torch.Event),
            ),
            _read_type_only,
        ),
        (type(os.environ), _read_type_only),
    ]
