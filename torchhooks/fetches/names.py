"""The names that a fetch can have: outputs and arguments of the step, tensors and submodules of the model, rates.

Reading a name runs no code of the model, because it could change the training run: ``spectral_norm`` advances its power
iteration whenever its weight is read in training mode, and a property can do anything.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import os
import re
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from torchhooks.common.errors import FeedError, LifecycleError
from torchhooks.common.text import shortened, shown
from torchhooks.common.trees import GroupRates

Fetch = Any
"""What a hook can ask for: any row of the table in docs/reference/fetches.md, or a structure of them."""

Value = Any
"""The value of a fetch or of a name in one run."""

Closure = Callable[..., Value]
"""A function as a fetch."""

# -- the step ---------------------------------------------------------------------------------------------------------


def named_outputs(outputs: object) -> Mapping[str, Value]:
    """Return the parts of what a step returned, by the names under which they can be fetched.

    The items of a mapping and the fields of a named tuple or dataclass keep their names. A single tensor, array or
    number is ``"loss"``. The items of any other tuple or list are ``"0"``, ``"1"`` and so on. Anything else has no
    name.
    """
    if type(outputs) is dict:  # before the checks of abstract classes, because it is the type of a body's outputs
        return outputs
    if type(outputs) is torch.Tensor or isinstance(outputs, (torch.Tensor, numbers.Number, np.generic, np.ndarray)):
        return {"loss": outputs}
    if isinstance(outputs, Mapping):
        return outputs
    if isinstance(outputs, (tuple, list)):
        names = getattr(outputs, "_fields", None) or map(str, range(len(outputs)))
        return dict(zip(names, outputs, strict=True))
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        names = [field.name for field in dataclasses.fields(outputs) if hasattr(outputs, field.name)]
        return {name: getattr(outputs, name) for name in names}
    return {}


def check_feed_names(feeds: Mapping[Any, object], feeder: object) -> None:
    """Raise a TypeError unless all keys of ``feeds`` are names."""
    for name in feeds:
        if not isinstance(name, str):
            raise TypeError(
                f"{feeder} feeds {shown(name)}, which is not a name: a feed is given by the name of a parameter, a str"
            )


class Step:
    """The user's function, and what its signature says.

    Args:
        function: any callable; ``None`` for a loop without one, which has :func:`no_step`. For a module, the signature
            is its ``forward``'s.

    Raises:
        TypeError: ``function`` is not callable.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        if function is not None and not callable(function):
            raise TypeError(f"step={shown(function)}: must be a function, called as step(*args, **kwargs)")
        self.given = function
        """The function as the script has it; ``None`` without one."""
        self.function = no_step if function is None else function
        self._signature = None if function is None else _signature(function)
        parameters = {} if self._signature is None else self._signature.parameters
        self.parameters = frozenset(parameters)
        """The names of its parameters."""
        self._takes_any = self._signature is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._feedable = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

    def inputs(self, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> dict[str, Value]:
        """Return the arguments of the step by parameter name, defaults included."""
        # Only partially: a missing argument is an error of the call of the step, not of this.
        bound = self._bound(args, kwargs)
        if bound is None:
            return dict(kwargs)
        bound.apply_defaults()
        inputs = dict(bound.arguments)
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                inputs.update(inputs.pop(name, {}))
        return inputs

    def check_feeds(self, feeders: Mapping[str, object], args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> None:
        """Check what hooks feed against the signature and against what the caller of ``run`` passed.

        Args:
            feeders: the hook that feeds each parameter, by parameter name.
            args: the positional arguments of ``run``.
            kwargs: the keyword arguments of ``run``.

        Raises:
            TypeError: the step has no such parameter.
            FeedError: the caller passed it too, by name or by position.
        """
        by_position = self._bound(args, {})
        given = {*kwargs, *(() if by_position is None else by_position.arguments)}
        for name, who in feeders.items():
            if name in given:
                raise FeedError(
                    f"{who} feeds {name!r}, which the caller of run() passed too: leave it out of the call, or the "
                    "hook out of the loop"
                )
            if not self._takes_any and name not in self._feedable:
                takes = f": {shortened(self._feedable)}" if self._feedable else " no arguments by name"
                raise TypeError(f"{who} feeds {name!r}, which the step does not take. It takes{takes}.")

    def _bound(self, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> inspect.BoundArguments | None:
        try:
            return None if self._signature is None else self._signature.bind_partial(*args, **kwargs)
        except TypeError:  # functools.wraps shows the signature of the wrapped function, which may take other arguments
            return None


def no_step(*args: object, **kwargs: object) -> NoReturn:
    """Raise an error: the step function of a loop that has none."""
    raise LifecycleError(
        "run() was called on a loop without a step function: make the step in the body of with loop.step(), or pass a "
        "function to MonitoredLoop(step, ...)"
    )


def takes_one_argument(function: Callable[..., object]) -> bool:
    """Return whether ``function`` can be called with exactly one positional argument, as far as its signature says."""
    signature = _signature(function)
    if signature is None:
        return True
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return len(kinds) == 1 and kinds[0] not in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


def _signature(function: Callable[..., object]) -> inspect.Signature | None:
    function = getattr(function, "_orig_mod", function)  # torch.compile's wrapper hides the signature
    try:
        return inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except (TypeError, ValueError):  # some builtins have no signature
        return None


# -- closures ---------------------------------------------------------------------------------------------------------

_parameters: weakref.WeakKeyDictionary[types.FunctionType, dict[bool, tuple[inspect.Parameter, ...]]] = (
    weakref.WeakKeyDictionary()
)


def closure_parameters(closure: Closure) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of ``closure`` that are names. Cached by function, because ``inspect`` is slow."""
    function = closure.__func__ if isinstance(closure, types.MethodType) else closure
    if not isinstance(function, types.FunctionType):
        return _read_parameters(closure)
    bound = function is not closure
    # By the function, weakly: a closure that a hook creates for each request is freed after it. A bound method has one
    # parameter less than its function.
    known = _parameters.setdefault(function, {})
    if bound not in known:
        known[bound] = _read_parameters(closure)
    return known[bound]


def _read_parameters(closure: Closure) -> tuple[inspect.Parameter, ...]:
    try:
        function = closure.forward if isinstance(closure, torch.nn.Module) else closure
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature is called without arguments
        return ()
    given = closure.keywords if isinstance(closure, functools.partial) else ()
    return tuple(p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in given)


def describe(fetch: Fetch) -> str:
    """Return a description of ``fetch`` for errors and log lines: of a function, its name, file and line."""
    code = getattr(getattr(fetch, "__wrapped__", fetch), "__code__", None)
    if code is not None:
        # Without the folders of the file, which would make up most of a log line.
        return f"{fetch.__qualname__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    return fetch if isinstance(fetch, str) else repr(fetch)


def reads_gradients(fetch: Fetch) -> bool:
    """Return whether ``fetch`` is the gradient of a parameter, or a function in which ``.grad`` stands."""
    if isinstance(fetch, str):
        return fetch.endswith(".grad")
    code = getattr(fetch, "__code__", None)
    codes = [] if code is None else [code]
    for each in codes:
        codes += [inner for inner in each.co_consts if isinstance(inner, types.CodeType)]  # of a comprehension
    return any("grad" in each.co_names for each in codes)


# -- the optimizer ----------------------------------------------------------------------------------------------------


def bare_optimizer(part: Any) -> object:
    """Return the optimizer in a wrapper of Accelerate or Fabric, whose state is its state; anything else as it is."""
    while hasattr(part, "param_groups") and hasattr(part, "optimizer"):
        part = part.optimizer
    return part


def parameters_of(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Return the parameters of ``optimizer``, in the order of the numbers that its ``state_dict()`` gives them."""
    return [] if optimizer is None else [each for group in optimizer.param_groups for each in group["params"]]


def learning_rates(optimizer: torch.optim.Optimizer | None) -> dict[str, Value]:
    """Return the fetch ``"lr"``, and one for each parameter group: ``"lr/0"``, and ``"lr/head"`` if it has a name.

    ``"lr"`` is the rate of the only group, or all rates if there are several groups. Whether these agree does not
    matter. If it did, a schedule could change the type of ``"lr"`` in the middle of a training run. There is no fetch
    if a group has no rate.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    if not groups or not all("lr" in group for group in groups):
        return {}
    rates, names = [group["lr"] for group in groups], _group_names(groups)
    by_index = {f"lr/{index}": rate for index, rate in enumerate(rates)}
    by_name = {f"lr/{name}": rate for name, rate in zip(names, rates, strict=True)}
    return {"lr": rates[0] if len(groups) == 1 else GroupRates(rates, names), **by_index, **by_name}


def _group_names(groups: list[dict[str, object]]) -> list[str]:
    """Return the ``"name"`` of each group, or its index; only indices if two names are the same."""
    indices = [str(index) for index in range(len(groups))]
    given = [group.get("name") for group in groups]
    names = [
        name if isinstance(name, str) and name.strip() and name.isprintable() else index
        for name, index in zip(given, indices, strict=True)
    ]
    return names if len(set(names)) == len(names) else indices


# -- the model --------------------------------------------------------------------------------------------------------

# What the wrappers of torch.compile, FullyShardedDataParallel, checkpoint_wrapper and DistributedDataParallel call the
# module that they wrap.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
_WRAPPER = r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
_PREFIXES = re.compile(rf"^(?:module\.|{_WRAPPER})+|(?<=\.){_WRAPPER}")


def canonical(name: str) -> str:
    """Return the name of a tensor or a submodule in the bare model, without the names of wrappers.

    A model may have a submodule that is called ``module``. So that name counts as the name of a wrapper only at the
    beginning, and after other wrappers.
    """
    return _PREFIXES.sub("", name)


def modules_on_the_way(model: torch.nn.Module, path: str) -> list[torch.nn.Module]:
    """Return ``model`` and the modules on the way to the submodule ``path``, wrappers too; ``[]`` if there is none."""
    way = [model]
    # Not by get_submodule(), whose getattr() would run a property or a __getattr__ of the model.
    for part in path.split(".") if path else ():
        while part not in _children(way[-1]) and (inner := _wrapped(way[-1])) is not None:
            way.append(inner)
        if part not in _children(way[-1]):
            return []
        way.append(_children(way[-1])[part])
    return way


def find(model: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return the parameter or buffer ``name`` of ``model``; ``None`` if there is none."""
    owner = _owner(model, name)
    return None if owner is None else _tensors(owner).get(name.rpartition(".")[2])


def why_not_stored(model: torch.nn.Module, name: str) -> str:
    """Say why ``model`` computes ``name`` and how to fetch it, after a period; ``""`` if nothing is known."""
    owner = _owner(model, name)
    path, _, leaf = name.rpartition(".")
    if owner is None:
        return ""
    if leaf in _children(_children(owner).get("parametrizations")):
        return (
            ". A parametrization computes it, and a fetch runs no code of the model: fetch what it is computed from, "
            f"such as '{path + '.' * bool(path)}parametrizations.{leaf}.original', or return it from the step"
        )
    if isinstance(inspect.getattr_static(owner, leaf, None), (property, functools.cached_property)):
        return f". It is a property, and a fetch runs no code of the model: fetch lambda model: model.{name}"
    return ""


def tensor_names(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters of ``model``, then of its buffers."""
    return [canonical(name) for name, _ in (*model.named_parameters(), *model.named_buffers())]


def submodule_names(model: torch.nn.Module) -> list[str]:
    """Return the names of the submodules of ``model``, without its own, which is empty."""
    names = [canonical(f"{name}.").removesuffix(".") for name, _ in model.named_modules()]
    return [*filter(None, dict.fromkeys(names))]


def _owner(model: torch.nn.Module, name: str) -> torch.nn.Module | None:
    path, _, leaf = name.rpartition(".")
    way = modules_on_the_way(model, path)
    while way and leaf not in _tensors(way[-1]) and (inner := _wrapped(way[-1])) is not None:
        way.append(inner)
    return way[-1] if way else None


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    # With duplicates: a parameter that two names share can be fetched by both.
    options: dict[str, Any] = {"recurse": False, "remove_duplicate": False}
    return {**dict(module.named_parameters(**options)), **dict(module.named_buffers(**options))}


def _children(module: torch.nn.Module | None) -> dict[str, torch.nn.Module]:
    if module is None:
        return {}
    return {name: child for name, child in module._modules.items() if child is not None}  # noqa: SLF001 - runs no code


def _wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    children = _children(module)
    return next((children[name] for name in _WRAPPED if name in children), None)
