"""Which module is running, and figures of what each received and returned."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from torchhooks.autopsy.figures import Figures, figures_of
from torchhooks.checkpoints.sharded import canonical
from torchhooks.fetches.copying import CleanCopies, ModuleHook

_MOST_CALLS = 4  # whose figures are kept of one module in one run


class Call(NamedTuple):
    """One call of a module."""

    path: str
    inputs: list[Figures]
    outputs: list[Figures]


class Modules:
    """Watches the calls of ``model`` and of its submodules from :meth:`open` to :meth:`close`.

    ``paused()`` is entered while figures are computed.
    """

    def __init__(self, model: torch.nn.Module | None, paused: Callable[[], AbstractContextManager[None]]) -> None:
        self._model, self._paused = model, paused
        self.calls: list[Call] = []
        """The calls of the run, in the order in which they ended."""
        self.kinds: dict[str, str] = {}
        """The class of each module, by its path; that of the model is empty."""
        self._open: list[tuple[str, list[Figures]]] = []
        self._count: dict[str, int] = {}
        self._handles: list[Any] = []

    def open(self) -> None:
        """Begin to watch, and forget earlier calls."""
        self.calls, self._open, self._count = [], [], {}
        self._handles.append(CleanCopies())
        named = [] if self._model is None else self._model.named_modules()
        # Of a wrapper and the module in it, which have one path, the module comes last.
        for path, module in {canonical(f"{name}.").removesuffix("."): module for name, module in named}.items():
            self.kinds[path] = type(module).__name__
            self._watch(module, path)

    def path(self) -> str | None:
        """Return the path of the module that is running; ``None`` outside of the model."""
        return self._open[-1][0] if self._open else None

    def close(self) -> None:
        """Remove all hooks on modules."""
        while self._handles:
            self._handles.pop().remove()

    def _watch(self, module: torch.nn.Module, path: str) -> None:
        def on_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._count[path] = self._count.get(path, 0) + 1
            with self._paused():
                self._open.append((path, figures_of((args, kwargs)) if self._count[path] <= _MOST_CALLS else []))

        def on_return(_args: Any, output: Any) -> None:
            while self._open and self._open[-1][0] != path:  # of a module whose call raised
                self._open.pop()
            inputs = self._open.pop()[1] if self._open else []
            if self._count.get(path, 0) <= _MOST_CALLS:
                with self._paused():
                    self.calls.append(Call(path, inputs, figures_of(output)))

        hook = ModuleHook(module, on_call)
        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        # Torch only looks for the key here, and this value stays out of copies too.
        module._forward_pre_hooks_with_kwargs[handle.id] = hook  # type: ignore[assignment]  # noqa: SLF001 - torch has no other way
        self._handles.append(handle)
        self._handles.append(module.register_forward_hook(ModuleHook(module, on_return)))
