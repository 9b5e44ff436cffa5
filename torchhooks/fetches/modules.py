"""Reading parameters, buffers and submodules by name, without running any code of the model.

Such code can change the training run. A parametrization like ``torch.nn.utils.parametrizations.spectral_norm`` advances
its power iteration whenever its weight is read in training mode, and a property or a ``__getattr__`` can do anything.
So attributes are read from where :class:`torch.nn.Module` stores them, never with ``getattr``. Only torch's own
parametrizations are computed, in copies of them that are in evaluation mode.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.utils.parametrize import ParametrizationList

_TORCHS_OWN = "torch.nn.utils.parametrizations"
# What the wrappers of torch.compile, FullyShardedDataParallel and checkpoint_wrapper call the module that they wrap.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

_Kind = TypeVar("_Kind", torch.Tensor, torch.nn.Module, ParametrizationList)


def stored(module: torch.nn.Module, name: str, kind: type[_Kind]) -> _Kind | None:
    """Return the attribute ``name`` of ``module`` if a ``kind`` is stored under it; otherwise ``None``.

    A wrapper that shows the attributes of the module that it wraps as its own, as ``torch.compile`` does, has
    them too.
    """
    own = attributes(module)
    for space in ("_parameters", "_buffers", "_modules"):
        values = own.get(space, ())
        if name in values and isinstance(values[name], kind):  # the containers of TorchScript have no get()
            return values[name]  # type: ignore[no-any-return]
    value = own.get(name)
    if isinstance(value, kind):
        return value
    for base in type(module).__mro__:
        if name in base.__dict__ and isinstance(base.__dict__[name], kind):
            return base.__dict__[name]  # type: ignore[no-any-return]
    inner = _wrapped(own)
    return None if inner is None else stored(inner, name, kind)


def attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the ``__dict__`` of ``module``, even if its class overrides how attributes are read."""
    own: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return own


class Computed(NamedTuple):
    """A tensor that a parametrization computes (``torch.nn.utils.parametrize``)."""

    originals: Mapping[str, torch.Tensor]
    """The tensors from which it is computed, by name."""
    steps: list[torch.nn.Module]
    """The modules that compute it, one after the other."""

    @property
    def computed_by(self) -> list[str]:
        """The classes of those steps whose code is not torch's."""
        return [type(step).__name__ for step in self.steps if type(step).__module__ != _TORCHS_OWN]

    def value(self) -> torch.Tensor | None:
        """Return the tensor, or ``None`` if computing it would run code that is not torch's.

        As in evaluation mode, it depends on the state of the parametrization and does not change it.
        """
        if self.computed_by:
            return None
        values: Iterable[Any] = self.originals.values()
        with torch.no_grad():
            for step in self.steps:
                still = copy.copy(step)
                still.training = False
                values = [type(step).forward(still, *values)]  # calling the module would run the hooks on it
        (value,) = values
        return value  # type: ignore[no-any-return]


def find(model: torch.nn.Module, name: str) -> torch.Tensor | Computed | None:
    """Return the parameter, buffer or other tensor that ``model`` stores as ``name``; ``None`` if there is none.

    Returns a :class:`Computed` for a tensor that a parametrization computes.
    """
    owners = [*_owners(model, name)]
    for module, leaf in owners:
        value = stored(module, leaf, torch.Tensor)
        if value is not None:
            return value
    for module, leaf in owners:
        parametrizations = stored(module, "parametrizations", torch.nn.Module)
        if parametrizations is not None and (steps := stored(parametrizations, leaf, ParametrizationList)) is not None:
            own, path = attributes(steps), name.removesuffix(leaf)
            tensors = sorted([*own["_parameters"].items(), *own["_buffers"].items()])  # original0, original1
            originals = {f"{path}parametrizations.{leaf}.{stem}": tensor for stem, tensor in tensors}
            return Computed(originals, [*own["_modules"].values()])
    return None


def is_property(model: torch.nn.Module, name: str) -> bool:
    """Return whether ``name`` is a property of ``model`` or of one of its submodules."""
    found = [inspect.getattr_static(module, leaf, None) for module, leaf in _owners(model, name)]
    return any(isinstance(attribute, (property, functools.cached_property)) for attribute in found)


def tensor_names(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters of ``model``, then of its buffers."""
    modules = list(_walk(model))
    return [
        f"{path}.{name}" if path else name
        for space in ("_parameters", "_buffers")
        for path, module in modules
        for name, value in attributes(module).get(space, {}).items()
        if value is not None
    ]


def submodule_names(model: torch.nn.Module) -> list[str]:
    """Return the names of the submodules of ``model``, without its own, which is empty."""
    return [path for path, _ in _walk(model) if path]


def _owners(model: torch.nn.Module, name: str) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yield each module that may have ``name``, with the last part of the name."""
    path, _, leaf = name.rpartition(".")
    for root in (model, stored(model, "module", torch.nn.Module)):  # .module is what DistributedDataParallel wraps
        module = root
        for part in path.split(".") if path else ():
            module = None if module is None else stored(module, part, torch.nn.Module)
        if module is not None:
            yield module, leaf


def _wrapped(own: dict[str, Any]) -> torch.nn.Module | None:
    """Return what the module with the attributes ``own`` wraps, if it shows its attributes as its own."""
    modules = own.get("_modules", ())
    inner = next((modules[name] for name in _WRAPPED if name in modules), own.get("_actual_script_module"))
    return inner if isinstance(inner, torch.nn.Module) else None


def _walk(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield ``model`` and its submodules with their names, each once. A module may override ``named_modules()``."""
    seen: set[int] = set()
    pending: list[tuple[str, torch.nn.Module]] = [("", model)]
    while pending:
        path, module = pending.pop()
        own = attributes(module)
        inner = _wrapped(own)
        if inner is not None:
            pending.append((path, inner))
        elif id(module) not in seen:
            seen.add(id(module))
            yield path, module
            children = [(name, child) for name, child in own.get("_modules", {}).items() if child is not None]
            pending += [(f"{path}.{name}" if path else name, child) for name, child in reversed(children)]
