"""What submodules return, receive and get as gradients: watched in the runs that ask, and only in these."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchhooks.errors import FetchError
from torchhooks.fetch import leaves, map_leaves, snapshot
from torchhooks.text import did_you_mean, shortened


class ModuleWatch:
    """Watches submodules from its creation to :meth:`close`, which leaves nothing behind on them.

    Where a module is called several times, the last call counts; for ``:grad``, the last one that a gradient reached.
    Of a module that returns several tensors, ``:grad`` is the same structure with the gradient of each, ``None`` where
    none came. Of one that receives several things, ``:input`` is a tuple of all of them, those given by keyword last.

    A call made by compiled code is never seen, so that it cannot be seen in one run and missed in the next.

    Args:
        model: what the names are relative to; ``":output"`` is its own.
        names: what to watch, with who asked for it.

    Raises:
        FetchError: no such submodule, or one inside a compiled one, where no hook is ever called.
    """

    def __init__(self, model: torch.nn.Module | None, names: Iterable[tuple[str, object]]) -> None:
        self.values: dict[str, Any] = {}
        """What was seen, by name."""
        self._asked: dict[str, object] = {}
        self._handles: list[Any] = []
        try:
            for name, who in names:
                if name not in self._asked:
                    self._watch(_submodule(model, name, who), name)
                    self._asked[name] = who
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take every hook off again."""
        while self._handles:
            self._handles.pop().remove()

    def check(self) -> None:
        """Raise if something that was asked for was not seen.

        Raises:
            FetchError: the module was not called in this run, or no gradient reached it.
        """
        for name, who in self._asked.items():
            if name not in self.values:
                raise FetchError(f"{who} asked for {name!r}, but {_why_unseen(name)}")

    def _watch(self, module: torch.nn.Module, name: str) -> None:
        kind = name.rpartition(":")[2]
        if kind == "input":  # before the module has a chance to change it in place
            self._handles.append(module.register_forward_pre_hook(self._input_catcher(name), with_kwargs=True))
        else:
            catcher = self._output_catcher(name) if kind == "output" else self._grad_catcher(name)
            self._handles.append(module.register_forward_hook(catcher))

    def _input_catcher(self, name: str) -> Callable[[Any, Any, Any], None]:
        def on_input(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            received = (*args, *kwargs.values())
            if not torch.compiler.is_compiling():
                self.values[name] = snapshot(received[0] if len(received) == 1 else received)

        return on_input

    def _output_catcher(self, name: str) -> Callable[[Any, Any, Any], None]:
        def on_output(_module: Any, _args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                self.values[name] = snapshot(output)

        return on_output

    def _grad_catcher(self, name: str) -> Callable[[Any, Any, Any], None]:
        calls = itertools.count()
        newest = -1

        def on_output(_module: Any, _args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            number = next(calls)
            grads: dict[int, torch.Tensor] = {}
            for leaf in leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    catch = functools.partial(on_grad, number, output, grads, id(leaf))
                    self._handles.append(leaf.register_hook(catch))

        def on_grad(number: int, output: Any, grads: dict[int, Any], key: int, grad: torch.Tensor) -> None:
            nonlocal newest
            grads[key] = grad.detach().clone()
            if number >= newest:  # backward() goes through the calls from the last to the first
                newest = number
                self.values[name] = map_leaves(lambda leaf: grads.get(id(leaf)), output)

        return on_output


NO_WATCH = ModuleWatch(None, ())
"""Watches nothing."""


def _submodule(model: torch.nn.Module | None, name: str, who: object) -> torch.nn.Module:
    if model is None:
        raise FetchError(f"{who} asked for {name!r}, but there is no model: give MonitoredLoop(step, model)")
    module = model
    for part in filter(None, name.rpartition(":")[0].split(".")):
        if not _has_child(module, part) and _has_child(module, "module"):
            module = module.module  # type: ignore[assignment]  # what DistributedDataParallel wraps
        if _is_compiled(module):
            raise _inside_compiled(module, name, who)
        if not _has_child(module, part):
            raise _no_submodule(model, name, who)
        module = getattr(module, part)
    if _is_compiled(module) and not hasattr(module, "_orig_mod"):
        raise _inside_compiled(module, name, who)
    return module


def _has_child(module: torch.nn.Module, part: str) -> bool:
    return isinstance(getattr(module, part, None), torch.nn.Module)


def _is_compiled(module: torch.nn.Module) -> bool:
    # torch.compile(module) wraps it, and calls what is on the wrapper; module.compile() compiles those calls too.
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _inside_compiled(module: torch.nn.Module, name: str, who: object) -> FetchError:
    kind = type(getattr(module, "_orig_mod", module)).__name__
    return FetchError(
        f"{who} asked for {name!r}, but {kind} is compiled, and inside of compiled code no hook is called: return the "
        "value from the step, or do not compile this part"
    )


def _no_submodule(model: torch.nn.Module, name: str, who: object) -> FetchError:
    path = name.rpartition(":")[0]
    paths = [path.replace("_orig_mod.", "") for path, _ in model.named_modules() if path not in ("", "_orig_mod")]
    return FetchError(
        f"{who} asked for {name!r}, but the model has no submodule {path!r}.{did_you_mean(path, paths)} There is: "
        f"{shortened(paths)}."
    )


def _why_unseen(name: str) -> str:
    path, _, kind = name.rpartition(":")
    module = path or "the model"
    why = f"{module} was not called in this run"
    if kind == "grad":
        why = f"no gradient reached the output of {module} in this run: the step made no backward() through it"
    return f"{why}. Calls in compiled code are not seen: if the step is compiled, return the value from it instead"
