"""Outputs, inputs and gradients of submodules, caught by module hooks that exist only in runs that fetch them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from torchhooks.common.errors import FetchError
from torchhooks.common.text import did_you_mean, shortened
from torchhooks.common.trees import map_leaves, snapshot
from torchhooks.fetches.evaluation import leaves
from torchhooks.fetches.names import Value, modules_on_the_way, named_outputs, submodule_names


class ModuleWatch:
    """Catches the values of submodules from its creation to :meth:`close`, which removes all of its module hooks.

    If a module is called more than once, the value is from the last call, or for ``:grad``, of the last call that a
    gradient reached. If it returns several tensors, ``:grad`` has the same structure, with ``None`` where no gradient
    arrived. If it receives several arguments, ``:input`` is a tuple of them, keyword arguments last.

    Calls from compiled code are ignored, because such code calls module hooks in some runs and not in others. Calls of
    a copy that the step makes of the model are ignored too.
    """

    def __init__(self, model: torch.nn.Module | None, names: Iterable[tuple[str, object]]) -> None:
        """Watch ``names`` in ``model``: pairs of a name and the hook that asked for it.

        A name that cannot be watched may be the name of an output. So its error is raised by :meth:`caught`.
        """
        self._values: dict[str, Value] = {}
        self._callers: dict[str, object] = {}
        self._errors: dict[str, FetchError] = {}
        self._handles: list[RemovableHandle] = []
        try:
            for name, caller in names:
                if name not in self._callers:
                    self._callers[name] = caller
                    try:
                        module = _submodule(model, name, caller)
                    except FetchError as error:
                        self._errors[name] = error
                    else:
                        self._watch(module, name)
        # Also after a Ctrl-C: the caller gets no watch that it could close, and the hooks would stay on the model.
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        # Some handles are those of tensors that the model has returned, which the script may keep after the run.
        while self._handles:
            self._handles.pop().remove()

    def caught(self, fed: Mapping[str, Value], outputs: object) -> dict[str, Value]:
        """Return the values caught in this run, by name, except what is ``fed`` or among the ``outputs``.

        Raises:
            FetchError: there is no such submodule, it was not called, or no gradient reached its output.
        """
        given = named_outputs(outputs) if self._callers else {}
        caught: dict[str, Value] = {}
        for name, caller in self._callers.items():
            if name in fed or name in given:
                continue
            if name in self._errors:
                raise self._errors[name]
            if name not in self._values:
                raise FetchError(f"{caller} asked for {name!r}, but {_why_missing(name)}")
            caught[name] = self._values[name]
        return caught

    def _watch(self, module: torch.nn.Module, name: str) -> None:
        def on_input(args: tuple[Value, ...], kwargs: dict[str, Value]) -> None:
            received = (*args, *kwargs.values())
            self._values[name] = snapshot(received[0] if len(received) == 1 else received)

        def on_output(_args: object, output: object) -> None:
            self._values[name] = snapshot(output)

        if name.endswith(":input"):  # caught before the call, which may change it in place
            self._handles.append(module.register_forward_pre_hook(Catch(module, on_input), with_kwargs=True))
        else:
            catch = on_output if name.endswith(":output") else self._grad_catcher(name)
            self._handles.append(module.register_forward_hook(Catch(module, catch)))

    def _grad_catcher(self, name: str) -> Callable[[object, object], None]:
        calls = itertools.count()
        latest = -1

        def on_output(_args: object, output: object) -> None:
            number = next(calls)
            grads: dict[int, torch.Tensor] = {}
            for leaf in leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    catch = functools.partial(on_grad, number, output, grads, id(leaf))
                    catch.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch drops it, without a warning
                    self._handles.append(leaf.register_hook(catch))

        def on_grad(number: int, output: object, grads: dict[int, torch.Tensor], key: int, grad: torch.Tensor) -> None:
            nonlocal latest
            grads[key] = grad.detach().clone()
            if number >= latest:  # backward() reaches the last call first, and its gradient is the one to keep
                latest = number
                # With each gradient, because nothing tells which one is the last. The hooks refer to the output, so
                # that no other tensor gets an id of one in it.
                self._values[name] = map_leaves(lambda leaf: grads.get(id(leaf)), output)

        return on_output


class Catch:
    """A module hook that passes the calls of ``module`` to ``catch``, unless they are being compiled.

    A copy of the module, which the step may make or save while it is watched, gets a hook that does nothing.
    """

    def __init__(self, module: torch.nn.Module, catch: Callable[..., None]) -> None:
        self._module = module
        self._catch = catch

    def __call__(self, module: torch.nn.Module, *args: object) -> None:
        if module is self._module and not torch.compiler.is_compiling():  # a shallow copy shares the hooks
            self._catch(*args)

    def __reduce__(self) -> Any:
        # Takes any arguments, returns None, and can be loaded without torchhooks.
        return getattr, (contextlib.nullcontext(), "__exit__")


NO_WATCH = ModuleWatch(None, ())
"""A watch without names."""


def _submodule(model: torch.nn.Module | None, name: str, caller: object) -> torch.nn.Module:
    if model is None:
        raise FetchError(f"{caller} asked for {name!r}, but there is no model: give MonitoredLoop(step, model)")
    path = name.rpartition(":")[0]
    way = modules_on_the_way(model, path)
    if not way:
        paths = submodule_names(model)
        available = f"Available: {shortened(paths)}." if paths else "It has no submodules."
        raise FetchError(
            f"{caller} asked for {name!r}, but the model has no submodule {path!r}.{did_you_mean(path, paths)} "
            f"{available}"
        )
    # The wrapper of torch.compile() calls its own hooks, and what module.compile() has compiled calls none.
    wrappers = [each for each in way[:-1] if "_orig_mod" in each._modules]  # noqa: SLF001 - runs no code
    in_place = [each for each in way if each._compiled_call_impl is not None]  # noqa: SLF001 - no other way
    scripted = [each for each in way if isinstance(each, torch.jit.ScriptModule)]
    if compiled := [*wrappers, *in_place, *scripted]:
        kind = type(getattr(compiled[0], "_orig_mod", compiled[0])).__name__
        raise FetchError(
            f"{caller} asked for {name!r}, but {kind} is compiled, and compiled code calls no module hooks: return "
            "the value from the step, or do not compile this part"
        )
    return way[-1]


def _why_missing(name: str) -> str:
    path, _, kind = name.rpartition(":")
    module = path or "the model"
    why = f"{module} was not called in this run"
    if kind == "grad":
        why = f"no gradient reached the output of {module} in this run: the step called no backward() through it"
    return f"{why}. Calls from compiled code are not seen: if the step is compiled, return the value from it instead"
