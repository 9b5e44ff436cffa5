"""Module hooks that stay with their module: copies of it neither have them nor call them.

A step may copy the model while it is watched: to average its weights, to keep the best model, to save it with
``torch.save(model)`` or to send it to a process. Both ``copy`` and ``pickle`` copy the hooks of a module along with it.
"""

from __future__ import annotations

import copyreg
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from torchhooks.fetches.modules import attributes

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


class ModuleHook:
    """A forward hook that passes the calls of ``module`` to ``catch``, unless they are being compiled.

    Calls of other modules are ignored: a shallow copy shares the hooks of its original. The replicas of DataParallel
    share them too, and count as the module.
    """

    def __init__(self, module: torch.nn.Module | None, catch: Callable[..., None] | None) -> None:
        self._module = module
        self._catch = catch

    def __call__(self, module: torch.nn.Module, *args: Any) -> None:
        if self._catch is not None and not torch.compiler.is_compiling() and self._is_of(module):
            self._catch(*args)

    def __reduce__(self) -> Any:
        # Reached only if a class copies its hooks in code of its own, where CleanCopies cannot remove them in time.
        return ModuleHook, (None, None)

    def _is_of(self, module: torch.nn.Module) -> bool:
        return module is self._module or "_is_replica" in attributes(module)


class CleanCopies:
    """Leaves each :class:`ModuleHook` of ``module`` out of its copies, until :meth:`remove`."""

    _lock = threading.Lock()
    _watched: ClassVar[Counter[type]] = Counter()
    _reducers: ClassVar[dict[type, Any]] = {}  # what copyreg had for these classes, or None

    def __init__(self, module: torch.nn.Module) -> None:
        self._own, self._kind = attributes(module), type(module)
        with self._lock:
            self._watched[self._kind] += 1
            if self._watched[self._kind] == 1:
                # Both copy and pickle look here first. Unlike a method on the instance, this leaves no trace in it.
                self._reducers[self._kind] = copyreg.dispatch_table.get(self._kind)
                copyreg.dispatch_table[self._kind] = self._reduce
        # The exception is a class with a method of its own, as torch.fx.GraphModule has, which copy prefers.
        self._deepcopies = hasattr(self._kind, "__deepcopy__") and "__deepcopy__" not in self._own
        if self._deepcopies:
            self._own["__deepcopy__"] = _clean_deepcopy(module)

    def remove(self) -> None:
        if self._deepcopies:
            self._own.pop("__deepcopy__", None)
        with self._lock:
            self._watched[self._kind] -= 1
            if not self._watched[self._kind]:
                del self._watched[self._kind]
                before = self._reducers.pop(self._kind)
                if before is not None:
                    copyreg.dispatch_table[self._kind] = before
                else:
                    copyreg.dispatch_table.pop(self._kind, None)

    @classmethod
    def _reduce(cls, module: torch.nn.Module) -> Any:
        before = cls._reducers.get(type(module))
        return _without_hooks(module.__reduce_ex__(2) if before is None else before(module))


def _clean_deepcopy(module: torch.nn.Module) -> Callable[[Any], Any]:
    def deepcopy(memo: Any) -> Any:
        copied: Any = type(module).__deepcopy__(module, memo)  # type: ignore[attr-defined]
        if isinstance(copied, torch.nn.Module):
            own = attributes(copied)
            own.update(_without_hooks(own))
            own.pop("__deepcopy__", None)
        return copied

    return deepcopy


def _without_hooks(part: Any) -> Any:
    """Return ``part`` of what reduces a module, without each ModuleHook in the attributes of a module."""
    if type(part) is tuple:
        return tuple(map(_without_hooks, part))
    if not isinstance(part, dict):
        return part
    hooks = [part[name] for name in _HOOKS if isinstance(part.get(name), dict)]
    ours = {key for each in hooks for key, hook in each.items() if isinstance(hook, ModuleHook)}
    if not ours:
        return part
    clean = dict(part)
    if getattr(part.get("__deepcopy__"), "__module__", None) == __name__:
        del clean["__deepcopy__"]
    for name in (*_HOOKS, *_FLAGS):
        if name in part:
            clean[name] = type(part[name])((key, value) for key, value in part[name].items() if key not in ours)
    return clean
