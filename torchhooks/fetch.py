"""From what a hook asks for to values: names, closures, tensors, and whatever is built of them.

========================================  ============================================================================
a fetch                                   its value
========================================  ============================================================================
``"loss"``                                the step's output of that name (see :func:`named_outputs`)
``"global_step"``, ``"lr"``               the step count after this run; the learning rate, a list where groups differ
``"fc1.weight"``, ``"fc1.weight.grad"``   a parameter or buffer of the model; its gradient, ``None`` where there is none
``"encoder:output"``                      what that submodule returned in this run; ``:input`` and ``:grad`` likewise
a closure                                 what it returns; its parameters are names: ``lambda loss: loss.log()``
an object with ``compute()``              what that returns: a torchmetrics metric
a tensor                                  its value after this run
a :class:`ComposedFetch`                  a summary op, for instance
a list, tuple, dict, dataclass of these   the same with values in place of fetches
========================================  ============================================================================

A name is looked up in this order: what hooks fed, the step's outputs, ``global_step``, ``lr``, the model's names, the
run's inputs by parameter name. A closure's parameters may also be ``model``, ``optimizer``, ``session`` and
``outputs``, and keep their default if nothing has their name. A closure runs under ``torch.no_grad()``, once a run
however many hooks ask for it: two requests are for the same closure if they are equal, as bound methods can be.

Tensors come back detached and copied, on their device: what happens to them after the run does not reach the copy.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import numbers
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from torchhooks.errors import FetchError, NoRunYetError
from torchhooks.text import did_you_mean, shortened

_MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()

_NO_NAMES: Mapping[str, Any] = types.MappingProxyType({})


_WATCHED = ((":", "output"), (":", "input"), (":", "grad"))


class ComposedFetch:
    """A fetch made out of another one: a summary op, for instance. It does not change once it is made."""

    copies: bool = True
    """Whether :meth:`compose` gets copies. What only looks at the value, and keeps nothing of it, can do without."""

    @functools.cached_property
    def watched_names(self) -> list[str]:
        """The names in :attr:`fetch` that mean a submodule's doing."""
        return watched_names(self.fetch)

    @property
    def fetch(self) -> Any:
        """What has to be evaluated."""

    def compose(self, value: Any) -> Any:
        """The value of this fetch, from the value of :attr:`fetch`."""


# -- structures ---------------------------------------------------------------------------------------------------


_Rebuild = Callable[[Callable[[Any], Any], Any], Any]

_rebuilds: dict[type, _Rebuild | None] = {}


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``function`` applied to everything that is not a list, tuple, mapping or dataclass.

    A mapping of another kind than dict comes back as a dict, as nobody knows how to make one; a list likewise. A
    dataclass that can be called, or anything that has ``compute()``, is no structure.
    """
    kind = type(tree)
    try:
        rebuild = _rebuilds[kind]
    except KeyError:
        rebuild = _rebuilds[kind] = _how_to_rebuild(kind)
    return function(tree) if rebuild is None else rebuild(function, tree)


def is_fixed(tree: Any) -> bool:
    """Whether nobody can put another leaf into ``tree``: it is a leaf, or a tuple of what is fixed."""
    kind = type(tree)
    if kind is tuple:
        return all(map(is_fixed, tree))
    if kind not in _rebuilds:
        _rebuilds[kind] = _how_to_rebuild(kind)
    return _rebuilds[kind] is None


def _how_to_rebuild(kind: type) -> _Rebuild | None:
    """How to make a ``kind`` of new parts, ``None`` if it is no structure; found out once for each class."""
    if issubclass(kind, ComposedFetch) or callable(getattr(kind, "compute", None)):
        return None
    if kind is dict or kind is OrderedDict:
        return _map_dict
    if issubclass(kind, list):
        return _map_list
    if issubclass(kind, tuple):
        return _map_tuple
    if issubclass(kind, Mapping):
        return _map_mapping
    calls = any("__call__" in vars(base) for base in kind.__mro__)
    return _map_dataclass if dataclasses.is_dataclass(kind) and not calls else None


# Comprehensions of lists: a generator would turn a StopIteration out of a closure into a RuntimeError.


def _map_list(function: Callable[[Any], Any], tree: Any) -> Any:
    return [map_leaves(function, item) for item in tree]


def _map_tuple(function: Callable[[Any], Any], tree: Any) -> Any:
    items = [map_leaves(function, item) for item in tree]
    # A named tuple's constructor takes its fields one by one; that of torch.Size and what max(dim) gives, all in one.
    return getattr(tree, "_make", type(tree))(items)


def _map_dict(function: Callable[[Any], Any], tree: Any) -> Any:
    return type(tree)([(key, map_leaves(function, item)) for key, item in tree.items()])


def _map_mapping(function: Callable[[Any], Any], tree: Any) -> Any:
    return {key: map_leaves(function, item) for key, item in tree.items()}


def _map_dataclass(function: Callable[[Any], Any], tree: Any) -> Any:
    result = copy.copy(tree)
    for field in dataclasses.fields(tree):
        # Past the class's own __setattr__, which a frozen dataclass refuses with.
        object.__setattr__(result, field.name, map_leaves(function, getattr(tree, field.name)))
    return result


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in ``tree`` that is not a structure; of a composed fetch, the leaves of what it needs."""
    found: list[Any] = []
    map_leaves(found.append, tree)
    for leaf in found:
        if isinstance(leaf, ComposedFetch):
            yield from leaves(leaf.fetch)
        else:
            yield leaf


def watched_names(fetches: Any) -> list[str]:
    """The names in ``fetches`` that mean a submodule's doing: ``"encoder.layer1:output"``."""
    if isinstance(fetches, ComposedFetch):
        return fetches.watched_names
    if type(fetches) is str and ":" not in fetches:
        return []
    return [leaf for leaf in leaves(fetches) if isinstance(leaf, str) and leaf.rpartition(":")[1:] in _WATCHED]


def snapshot(value: Any) -> Any:
    """``value`` with every tensor and array in it detached and copied, so that no later update reaches it."""
    kind = type(value)
    if kind is float or kind is int:
        return value
    return map_leaves(_copy_leaf, value)


def _copy_leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return as_snapshot(value.detach().clone())
    return value.copy() if isinstance(value, np.ndarray) else value


def as_snapshot(fresh: torch.Tensor) -> torch.Tensor:
    """``fresh``, marked as one that nobody else has and so nobody updates."""
    fresh._is_snapshot = True  # type: ignore[attr-defined]
    return fresh


def is_snapshot(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is one that nobody updates, as :func:`as_snapshot` marks them."""
    return hasattr(tensor, "_is_snapshot")


def detached(value: Any) -> Any:
    """``value`` with every tensor in it detached, not copied."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)


def _computes(value: Any) -> bool:
    return callable(getattr(value, "compute", None)) and not isinstance(value, type)


# -- names --------------------------------------------------------------------------------------------------------


def named_outputs(outputs: Any) -> Mapping[str, Any]:
    """The names under which what a step returned can be fetched.

    The fields of a mapping, named tuple or dataclass have their own names; a single tensor, array or number is
    ``"loss"``; the items of another tuple or list are ``"0"``, ``"1"`` and so on. Anything else has no names.
    """
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


def _has_rate(optimizer: torch.optim.Optimizer | None) -> bool:
    return optimizer is not None and all("lr" in group for group in optimizer.param_groups)


def learning_rate(optimizer: torch.optim.Optimizer) -> Any:
    """The learning rate of ``optimizer``: one value where its groups agree, else a list with one a group."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return rates[0] if all(_same_rate(rate, rates[0]) for rate in rates[1:]) else rates


def _same_rate(one: Any, other: Any) -> bool:
    if any(isinstance(rate, torch.Tensor) and rate.device.type != "cpu" for rate in (one, other)):
        return one is other  # comparing the numbers would wait for the device
    return bool(one == other)


def model_value(model: torch.nn.Module | None, name: str) -> Any:
    """The parameter or buffer ``name`` of ``model``, the gradient of one (``"fc.weight.grad"``), or ``_MISSING``."""
    if model is None:
        return _MISSING
    tensor = _model_tensor(model, name)
    if tensor is _MISSING and name.endswith(".grad"):
        parameter = _model_tensor(model, name.removesuffix(".grad"))
        if parameter is not _MISSING:
            # One that is computed (torch.nn.utils.parametrize) has no gradient of its own, and warns when asked.
            return parameter.grad if parameter.is_leaf or parameter.retains_grad else None
    return tensor


def _model_tensor(model: torch.nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    for root in (model, getattr(model, "module", None)):  # the second is what DistributedDataParallel wraps
        try:
            value = getattr(root.get_submodule(path), leaf)  # type: ignore[union-attr]
        except Exception:  # a property that cannot be read now is no name either
            continue
        if isinstance(value, torch.Tensor):
            return value
    return _MISSING


# -- closures -----------------------------------------------------------------------------------------------------

_parameters: weakref.WeakKeyDictionary[Any, dict[bool, tuple[inspect.Parameter, ...]]] = weakref.WeakKeyDictionary()


def closure_parameters(closure: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """The parameters of ``closure`` that are names, looked up once for each function."""
    bound = isinstance(closure, types.MethodType)
    function = closure.__func__ if isinstance(closure, types.MethodType) else closure
    if not isinstance(function, types.FunctionType):
        return _read_parameters(closure)
    known = _parameters.setdefault(function, {})
    if bound not in known:
        known[bound] = _read_parameters(closure)
    return known[bound]


def _read_parameters(closure: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    try:
        function = closure.forward if isinstance(closure, torch.nn.Module) else closure
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not say what it takes is called without anything
        return ()
    given = closure.keywords if isinstance(closure, functools.partial) else ()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p for p in parameters if p.kind not in variable and p.name not in given)


def describe(fetch: Any) -> str:
    """A fetch as an error or a log line names it: a closure by its name and, where it has one, its line."""
    code = getattr(fetch, "__code__", None)
    if code is not None:
        return f"{fetch.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
    return fetch if isinstance(fetch, str) else repr(fetch)


# -- evaluation ---------------------------------------------------------------------------------------------------


class Evaluator:
    """Everything that has a name at one moment, and the fetches of that moment, each distinct one evaluated once.

    Args:
        session: what closures get as ``session``; its ``model``, ``optimizer`` and ``global_step`` have names.
        outputs: what the step returned.
        feeds: what was fed, by name.
        inputs: called when an input of the run is asked for, for all of them by parameter name.
        watched: what submodules did in this run, by name (``"fc1:output"``), copied already.

    Attributes:
        ran: whether there are outputs of a run.
        gone: names that mean something during a run only: what the step takes.
    """

    ran = True
    gone: Collection[str] = ()
    _who: object = ""

    def __init__(
        self,
        session: Any,
        outputs: Any = None,
        feeds: Mapping[str, Any] = _NO_NAMES,
        inputs: Callable[[], Mapping[str, Any]] = dict,
        watched: Mapping[str, Any] = _NO_NAMES,
    ) -> None:
        self.session = session
        self.outputs = outputs
        self.feeds = feeds
        self.watched = watched
        self._inputs = inputs
        self._values: dict[Any, Any] = {}  # by name, by closure, and by the id of other objects
        self._outputs = {"loss": outputs} if type(outputs) is torch.Tensor else named_outputs(outputs)

    def evaluate(self, fetch: Any, who: object) -> Any:
        """The value of ``fetch``, in its shape. ``who`` asked for it: errors say so, with its ``str``.

        Raises:
            FetchError: a name that nothing has, or something that is no fetch.
        """
        self._who = who
        if type(fetch) is str:
            return self._name(fetch)
        return self._compose(fetch) if isinstance(fetch, ComposedFetch) else map_leaves(self._leaf, fetch)

    def _leaf(self, fetch: Any) -> Any:
        if isinstance(fetch, str):
            return self._name(fetch)
        if isinstance(fetch, ComposedFetch):
            return self._compose(fetch)
        if isinstance(fetch, torch.Tensor):
            return self._once(fetch, lambda: fetch)
        if _computes(fetch):
            return self._once(fetch, lambda: self._call(fetch, fetch.compute))
        if callable(fetch):
            return self._closure(fetch)
        raise FetchError(
            f"{self._who} asked for {fetch!r}, which is no fetch: a fetch is a name, a closure, an object with "
            "compute(), a tensor, or these in lists, tuples, dicts and dataclasses"
        )

    def _name(self, name: str) -> Any:
        if name in self.watched:
            return self.watched[name]
        if name not in self._values:
            self._values[name] = snapshot(self._find(name))
        return self._values[name]

    def _uncopied(self, fetch: Any) -> Any:
        return self._find(fetch) if type(fetch) is str and fetch not in self.watched else self._leaf(fetch)

    def _find(self, name: str) -> Any:
        value = self._look_up(name)
        if value is _MISSING:
            raise self._unknown(name, f"{self._who} asked for {name!r}, which nothing has")
        return value

    def _once(self, fetch: Any, value: Callable[[], Any]) -> Any:
        if id(fetch) not in self._values:
            self._values[id(fetch)] = fetch, snapshot(value())  # kept with it, so that no other object gets its id
        return self._values[id(fetch)][1]

    def _closure(self, closure: Callable[..., Any]) -> Any:
        try:
            hash(closure)
        except TypeError:  # cannot be compared by value, so by identity
            return self._once(closure, lambda: self._call_by_name(closure))
        if closure not in self._values:
            self._values[closure] = snapshot(self._call_by_name(closure))
        return self._values[closure]

    def _call_by_name(self, closure: Callable[..., Any]) -> Any:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in closure_parameters(closure):
            value = self._argument(closure, parameter)
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return self._call(closure, functools.partial(closure, *args, **kwargs))

    def _argument(self, closure: Callable[..., Any], parameter: inspect.Parameter) -> Any:
        value = self._look_up_parameter(parameter.name)
        if value is not _MISSING:
            return value
        if parameter.default is not inspect.Parameter.empty:
            return parameter.default
        raise self._unknown(
            parameter.name,
            f"{self._who} asked for {describe(closure)}, whose parameter {parameter.name!r} is a name that nothing has",
        )

    def _compose(self, fetch: ComposedFetch) -> Any:
        evaluate, parts = self._leaf if fetch.copies else self._uncopied, fetch.fetch
        value = evaluate(parts) if type(parts) is str else map_leaves(evaluate, parts)
        try:
            return fetch.compose(value)
        except BaseException as error:
            self._note(error, fetch)
            raise

    def _call(self, fetch: Any, function: Callable[[], Any]) -> Any:
        try:
            with torch.no_grad():
                return function()
        except BaseException as error:
            self._note(error, fetch)
            raise

    def _note(self, error: BaseException, fetch: Any) -> None:
        with contextlib.suppress(Exception):  # what cannot be printed, or takes no note, must not hide the error
            names = shortened([*self._all_names(), "model", "optimizer", "session", "outputs"])
            error.add_note(f"torchhooks: in {describe(fetch)}, which {self._who} asked for; names here: {names}")

    def _unknown(self, name: str, message: str) -> FetchError:
        if name in self.gone:
            return NoRunYetError(f"{message} now: it is an input of a run, and there is none at the moment.")
        names = self._all_names()
        message += f".{did_you_mean(name, names)} There is: {shortened(names)}."
        if self.ran:
            return FetchError(message)
        return NoRunYetError(f"{message} What a step returns has a name only after a run in which it did.")

    def _look_up(self, name: str) -> Any:
        """What ``name`` stands for, or ``_MISSING``."""
        if name in self.feeds:
            return self.feeds[name]
        if name in self._outputs:
            return self._outputs[name]
        if name == "global_step":
            return self.session.global_step
        if name == "lr" and _has_rate(self.session.optimizer):
            return learning_rate(self.session.optimizer)
        value = model_value(self.session.model, name)
        return self._inputs().get(name, _MISSING) if value is _MISSING else value

    def _look_up_parameter(self, name: str) -> Any:
        """What a closure's parameter ``name`` stands for, or ``_MISSING``."""
        value = self._look_up(name)
        if value is not _MISSING:
            return value
        if name in ("model", "optimizer"):
            return getattr(self.session, name)
        return {"session": self.session, "outputs": self.outputs}.get(name, _MISSING)

    def _all_names(self) -> list[str]:
        """Every name there is, in the order in which they are looked up."""
        names = [*self.feeds, *map(str, self._outputs), "global_step"]
        names += ["lr"] if _has_rate(self.session.optimizer) else []
        names += [*self.watched]
        if self.session.model is not None:
            tensors = [*self.session.model.named_parameters(), *self.session.model.named_buffers()]
            names += [name.replace("_orig_mod.", "") for name, _ in tensors]  # torch.compile's name for what it wraps
        return [*dict.fromkeys([*names, *self._inputs()])]
