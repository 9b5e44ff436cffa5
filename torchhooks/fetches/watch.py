"""Outputs, inputs and gradients of submodules, caught by module hooks that exist only in runs that fetch them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from torchhooks.common.errors import FetchError
from torchhooks.common.text import did_you_mean, shortened
from torchhooks.common.trees import map_leaves, snapshot
from torchhooks.fetches.copying import CleanCopies, ModuleHook
from torchhooks.fetches.fetch import leaves, named_outputs
from torchhooks.fetches.modules import attributes, stored, submodule_names


class ModuleWatch:
    """Catches the values of submodules from its creation to :meth:`close`, which removes all of its module hooks.

    If a module is called more than once, the value is from the last call, or for ``:grad``, of the last call that a
    gradient reached. If it returns several tensors, ``:grad`` has the same structure, with ``None`` where no gradient
    arrived. If it receives several arguments, ``:input`` is a tuple of them, keyword arguments last.

    Calls from compiled code are ignored, because such code calls module hooks in some runs and not in others. Calls of
    a copy that the step makes of the model are ignored too, and copies have none of these module hooks.
    """

    def __init__(self, model: torch.nn.Module | None, names: Iterable[tuple[str, object]]) -> None:
        """Watch ``names`` in ``model``, each given with the hook that asked for it.

        A name that cannot be watched may be the name of an output. So its error is raised by :meth:`caught`.
        """
        self._values: dict[str, Any] = {}
        self._requesters: dict[str, object] = {}
        self._errors: dict[str, FetchError] = {}
        self._handles: list[Any] = []
        try:
            for name, requester in names:
                if name not in self._requesters:
                    self._requesters[name] = requester
                    try:
                        module = _submodule(model, name, requester)
                    except FetchError as error:
                        self._errors[name] = error
                    else:
                        self._watch(module, name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def caught(self, fed: Mapping[str, Any], outputs: Any) -> dict[str, Any]:
        """Return the values caught in this run, by name, except what is ``fed`` or among the ``outputs``.

        Raises:
            FetchError: there is no such submodule, it was not called, or no gradient reached its output.
        """
        given = named_outputs(outputs) if self._requesters else {}
        caught: dict[str, Any] = {}
        for name, requester in self._requesters.items():
            if name in fed or name in given:
                continue
            if name in self._errors:
                raise self._errors[name]
            if name not in self._values:
                raise FetchError(f"{requester} asked for {name!r}, but {_why_missing(name)}")
            caught[name] = self._values[name]
        return caught

    def _watch(self, module: torch.nn.Module, name: str) -> None:
        def on_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            received = (*args, *kwargs.values())
            self._values[name] = snapshot(received[0] if len(received) == 1 else received)

        def on_output(_args: Any, output: Any) -> None:
            self._values[name] = snapshot(output)

        if not self._handles:
            self._handles.append(CleanCopies())
        if name.endswith(":input"):  # caught before the call, which may change it in place
            hook = ModuleHook(module, on_input)
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            # Torch only looks for the key here, and this value stays out of copies too.
            module._forward_pre_hooks_with_kwargs[handle.id] = hook  # type: ignore[assignment]  # noqa: SLF001 - torch has no other way
        else:
            catch = on_output if name.endswith(":output") else self._grad_catcher(name)
            handle = module.register_forward_hook(ModuleHook(module, catch))
        self._handles.append(handle)

    def _grad_catcher(self, name: str) -> Callable[[Any, Any], None]:
        calls = itertools.count()
        latest = -1

        def on_output(_args: Any, output: Any) -> None:
            number = next(calls)
            grads: dict[int, torch.Tensor] = {}
            for leaf in leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    catch = functools.partial(on_grad, number, output, grads, id(leaf))
                    catch.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch drops it, without a warning
                    self._handles.append(leaf.register_hook(catch))

        def on_grad(number: int, output: Any, grads: dict[int, Any], key: int, grad: torch.Tensor) -> None:
            nonlocal latest
            grads[key] = grad.detach().clone()
            if number >= latest:  # backward() reaches the last call first, and its gradient is the one to keep
                latest = number
                self._values[name] = map_leaves(lambda leaf: grads.get(id(leaf)), output)

        return on_output


NO_WATCH = ModuleWatch(None, ())
"""A watch without names."""


def _submodule(model: torch.nn.Module | None, name: str, requester: object) -> torch.nn.Module:
    if model is None:
        raise FetchError(f"{requester} asked for {name!r}, but there is no model: give MonitoredLoop(step, model)")
    module, path = model, name.rpartition(":")[0]
    for part in filter(None, path.split(".")):
        child, wrapped = stored(module, part, torch.nn.Module), stored(module, "module", torch.nn.Module)
        if _is_compiled(module) and (child is not None or wrapped is not None):
            raise _inside_compiled(module, name, requester)
        if child is None and wrapped is not None:  # DistributedDataParallel's wrapper
            module, child = wrapped, stored(wrapped, part, torch.nn.Module)
            if _is_compiled(module):
                raise _inside_compiled(module, name, requester)
        if child is None:
            paths = submodule_names(model)
            available = f"Available: {shortened(paths)}." if paths else "It has no submodules."
            raise FetchError(
                f"{requester} asked for {name!r}, but the model has no submodule {path!r}.{did_you_mean(path, paths)} "
                f"{available}"
            )
        module = child
    scripted = isinstance(module, torch.jit.ScriptModule) and "_actual_script_module" not in attributes(module)
    if scripted or _is_compiled_in_place(module):  # a traced module has a wrapper, whose own hooks are called
        raise _inside_compiled(module, name, requester)
    return module


def _is_compiled(module: torch.nn.Module) -> bool:
    """Return whether calls of the submodules of ``module`` are compiled."""
    # torch.compile(module) returns a wrapper, and so does torch.jit.trace(module): their own hooks are called.
    wraps = "_orig_mod" in attributes(module).get("_modules", ())
    return wraps or isinstance(module, torch.jit.ScriptModule) or _is_compiled_in_place(module)


def _is_compiled_in_place(module: torch.nn.Module) -> bool:
    return attributes(module).get("_compiled_call_impl") is not None  # module.compile() was called


def _inside_compiled(module: torch.nn.Module, name: str, requester: object) -> FetchError:
    kind, by = type(stored(module, "_orig_mod", torch.nn.Module) or module).__name__, ""
    if isinstance(module, torch.jit.ScriptModule):
        kind, by = str(module.original_name), " by torch.jit"
    return FetchError(
        f"{requester} asked for {name!r}, but {kind} is compiled{by}, and compiled code calls no module hooks: return "
        "the value from the step, or do not compile this part"
    )


def _why_missing(name: str) -> str:
    path, _, kind = name.rpartition(":")
    module = path or "the model"
    why = f"{module} was not called in this run"
    if kind == "grad":
        why = f"no gradient reached the output of {module} in this run: the step called no backward() through it"
    return f"{why}. Calls from compiled code are not seen: if the step is compiled, return the value from it instead"
