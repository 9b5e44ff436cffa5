"""What submodules return, receive and get as gradients: watched in the runs that ask, and only in these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from torchhooks.errors import FetchError
from torchhooks.fetch import leaves, map_leaves, shortened, snapshot
from torchhooks.hook import SessionRunArgs

_KINDS = ((":", "output"), (":", "input"), (":", "grad"))


def watched_names(fetches: Any) -> list[str]:
    """The names in ``fetches`` that mean a submodule's doing: ``"encoder.layer1:output"``."""
    if type(fetches) is str and ":" not in fetches:
        return []
    return [leaf for leaf in leaves(fetches) if isinstance(leaf, str) and leaf.rpartition(":")[1:] in _KINDS]


def watched_by(asked: Mapping[Any, SessionRunArgs]) -> list[tuple[str, object]]:
    """The watched names in what was asked for, each with who asked."""
    return [(name, who) for who, request in asked.items() for name in watched_names(request.fetches)]


class ModuleWatch:
    """Watches submodules from its creation to :meth:`close`, which leaves nothing behind on them.

    Where a module is called several times, the last call counts. Of a module that returns several tensors, ``:grad`` is
    the same structure with the gradient of each, ``None`` where none came.

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
        if kind == "grad":
            self._handles.append(module.register_forward_hook(self._grad_catcher(name)))
            return

        def see(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            inputs = args[0] if len(args) == 1 and not kwargs else (*args, *kwargs.values())
            self.values[name] = snapshot(output if kind == "output" else inputs)

        def see_input(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            see(_module, args, kwargs, None)

        if kind == "output":
            self._handles.append(module.register_forward_hook(see, with_kwargs=True))
        else:  # before the module had a chance to change its input in place
            self._handles.append(module.register_forward_pre_hook(see_input, with_kwargs=True))

    def _grad_catcher(self, name: str) -> Callable[[Any, Any, Any], None]:
        def on_output(_module: Any, _args: Any, output: Any) -> None:
            tensors = [leaf for leaf in leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            grads: dict[int, torch.Tensor] = {}
            for tensor in tensors:
                self._handles.append(tensor.register_hook(catcher(id(tensor), output, grads)))

        def catcher(key: int, output: Any, grads: dict[int, torch.Tensor]) -> Callable[[torch.Tensor], None]:
            def on_grad(grad: torch.Tensor) -> None:
                grads[key] = grad.detach().clone()
                self.values[name] = map_leaves(lambda leaf: grads.get(id(leaf)), output)

            return on_grad

        return on_output


NO_WATCH = ModuleWatch(None, ())
"""Watches nothing."""


def _submodule(model: torch.nn.Module | None, name: str, who: object) -> torch.nn.Module:
    if model is None:
        raise FetchError(f"{who} asked for {name!r}, but there is no model: give MonitoredLoop(step, model)")
    path = name.rpartition(":")[0]
    module = model
    for part in [None, *filter(None, path.split("."))]:
        module = module if part is None else _child(model, module, part, name, who)
        if _is_compiled(module):
            raise FetchError(
                f"{who} asked for {name!r}, but {type(module).__name__} is compiled, and inside of compiled code no "
                "hook is called: return the value from the step, or do not compile this part"
            )
    return module


def _child(model: torch.nn.Module, module: torch.nn.Module, part: str, name: str, who: object) -> torch.nn.Module:
    child = getattr(module, part, None)
    if child is None and hasattr(module, "module"):  # DistributedDataParallel's own name for what it wraps
        child = getattr(module.module, part, None)
    if isinstance(child, torch.nn.Module):
        return child
    modules = [path for path, _ in model.named_modules() if path]
    raise FetchError(f"{who} asked for {name!r}, but the model has no such submodule. There is: {shortened(modules)}.")


def _is_compiled(module: torch.nn.Module) -> bool:
    # torch.compile(module) wraps it; module.compile() swaps the call of the module itself.
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _why_unseen(name: str) -> str:
    path, _, kind = name.rpartition(":")
    module = path or "the model"
    if kind == "grad":
        return f"no gradient reached the output of {module} in this run: the step made no backward() through it"
    return (
        f"{module} was not called in this run. If the step or a function in it is compiled, no hook inside is ever "
        "called: return the value from the step instead"
    )
