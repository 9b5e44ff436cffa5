"""Module hooks that stay with their module: copies of it neither have them nor call them.

A step may copy the model while it is watched: to average its weights, to keep the best model, to save it with
``torch.save(model)`` or to send it to a process. Both ``copy`` and ``pickle`` copy the hooks of a module along with it.
"""

from __future__ import annotations

import copyreg
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from torchhooks.fetches.modules import attributes


class ModuleHook:
    """A forward hook that passes the calls of ``module`` to ``catch``, unless they are being compiled.

    Calls of other modules are ignored: a shallow copy shares the hooks of its original. The replicas of DataParallel
    share them too, and count as the module.
    """

    def __init__(self, module: torch.nn.Module, catch: Callable[..., None]) -> None:
        self._module = module
        self._catch = catch

    def __call__(self, module: torch.nn.Module, *args: Any) -> None:
        is_of = module is self._module or "_is_replica" in attributes(module)
        if is_of and not torch.compiler.is_compiling():
            self._catch(*args)


class CleanCopies:
    """Leaves each :class:`ModuleHook` out of all copies, from its creation to :meth:`remove`."""

    _lock = threading.Lock()
    _count = 0
    _before: Any = None  # what copyreg had for OrderedDict

    def __init__(self) -> None:
        with self._lock:
            CleanCopies._count += 1
            if self._count == 1:
                # Both copy and pickle look here first. Torch keeps the hooks of a module in an OrderedDict.
                CleanCopies._before = copyreg.dispatch_table.get(OrderedDict)
                copyreg.pickle(OrderedDict, _without_hooks)

    def remove(self) -> None:
        with self._lock:
            CleanCopies._count -= 1
            if not self._count:
                del copyreg.dispatch_table[OrderedDict]
                if CleanCopies._before is not None:  # read from the class, because an instance would bind it
                    copyreg.pickle(OrderedDict, CleanCopies._before)


def _without_hooks(mapping: OrderedDict[Any, Any]) -> Any:
    """Return how to make a copy of ``mapping``, as ``mapping.__reduce__()`` does, without each ModuleHook in it."""
    items = [(key, value) for key, value in mapping.items() if type(value) is not ModuleHook]
    return (*mapping.__reduce__()[:4], iter(items))
