"""Fetches: what a hook can ask for in a run, and the value of each.

========================================  ============================================================================
fetch                                     value
========================================  ============================================================================
``"loss"``                                the output of the step with this name (see :func:`named_outputs`)
``"global_step"``                         the global step, which counts this run
``"lr"``                                  the learning rate; a list of them if there are several parameter groups
``"lr/0"``, ``"lr/head"``                 the rate of one group, by its index or its ``"name"``
``"fc1.weight"``                          a parameter or buffer of the model
``"fc1.weight.grad"``                     its gradient; ``None`` if it has none
``"encoder:output"``                      what this submodule of the model returned in this run
``"encoder:input"``, ``"encoder:grad"``   what it received; the gradient of what it returned
``"images"``                              an argument of the step, by the name of its parameter
``"epoch"``, ``"batch"``                  from 0, the pass over the data of ``until_stop``, and the item in it
``"secs"``                                seconds since the session was created
``"steps_per_sec"``, ``"data_secs"``      what a StepCounterHook has measured in the period that ends in this run, or in
                                          the last one; also ``"secs_per_step"``, ``"examples_per_sec"`` and
                                          ``"tokens_per_sec"``
a closure                                 what it returns; its parameters are names: ``lambda loss: loss.log()``
an object with ``compute()``              what ``compute()`` returns: a torchmetrics metric, for example
a tensor                                  its value after this run
``running_mean("loss")``                  the mean over all runs since the hook's last report, or over the epoch so far;
                                          also ``running_sum``, ``running_max`` and ``running_min``
``latest("g_loss")``                      the value in the last run that had one; NaN before
``over_ranks("loss", "mean")``            the mean of what the fetch is on all ranks, or the ``sum``, ``min``, ``max``
a :class:`ComposedFetch`                  a value computed from another fetch: a summary op, for example
a list, tuple, dict, dataclass of these   the same structure, with values in place of fetches
========================================  ============================================================================

Fetches are evaluated after the step, in the runs in which a hook asks for them: a name, a closure or an object once in
a run, however many hooks ask for it. Tensors and arrays in the values are copies, which later updates do not change.
Tensors are detached from the graph and stay on their device. With several ranks, a ``DTensor`` becomes the full tensor,
which every rank has to request in the same run. NanTensorHook and histograms need no full tensor.

A name is looked up in this order: what hooks feed, the outputs of the step, watched submodules, ``global_step``,
``lr``, the model, the arguments of the step, and then what the loop itself knows (``Session.epoch``, ``Session.secs``)
and what a StepCounterHook measures.

No code of the model runs when a name is looked up, because it could change the training run. A parameter that one of
torch's parametrizations computes, such as ``spectral_norm``, has the value that it has in evaluation mode. A tensor
that other code computes is refused: fetch what is stored, such as ``"fc1.parametrizations.weight.original"``. A
property of the model can be read in a closure: ``lambda model: model.scale``.

A closure is called under ``torch.no_grad()``, with the original values instead of copies. Its parameters can also be
``model``, ``optimizer``, ``session`` and ``outputs``, which is everything that the step returned. A parameter whose
name does not exist keeps its default. Two closures are the same fetch if they are equal, as bound methods can be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import numbers
import operator
import os
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from torchhooks.common.errors import FetchError, NoRunYetError, add_note
from torchhooks.common.log import logger
from torchhooks.common.requester import UNKNOWN, Requester
from torchhooks.common.text import did_you_mean, shortened, shown
from torchhooks.common.trees import GroupRates, Leaf, detached, map_leaves, snapshot
from torchhooks.fetches.modules import Computed, find, is_property, submodule_names, tensor_names

_MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()

_EMPTY: Mapping[str, Any] = types.MappingProxyType({})
_OF_LOOP = ("epoch", "batch", "secs")
SPEEDS = ("steps_per_sec", "secs_per_step", "data_secs", "examples_per_sec", "tokens_per_sec")
"""The fetches that a StepCounterHook measures, the last two if it is told how many there are."""
_WATCHED_SUFFIXES = ((":", "output"), (":", "input"), (":", "grad"))


class ComposedFetch(Leaf):
    """A fetch whose value is computed from the value of another fetch, :attr:`fetch`, which must never change."""

    copies: bool = True
    """Whether :meth:`compose` gets copies. A fetch that keeps no part of the value needs none."""
    accumulates: bool = False
    """Whether the value is accumulated from run to run, in ``session.accumulated``; :meth:`compose` is not called."""
    optional: bool = False
    """Whether :attr:`fetch` need not have a value: :meth:`compose` then gets ``None``."""
    fits_every_run: bool = False
    """Whether it can be evaluated in every run: it takes little time, and no other rank has to take part."""

    is_fixed: bool = True
    """Whether :attr:`fetch` is always the same. Otherwise, it decides in each run what to evaluate."""
    fetch: Any = None
    """The fetch to evaluate."""

    @functools.cached_property
    def watched_names(self) -> list[str]:
        """The names in :attr:`fetch` for which a submodule has to be watched during the step."""
        return watched_names(self.fetch)

    @functools.cached_property
    def accumulated_parts(self) -> list[Any]:
        """The parts of :attr:`fetch` that are accumulated from run to run."""
        return accumulated_parts(self.fetch)

    def compose(self, value: Any) -> Any:
        """Return the value of this fetch, given the value of :attr:`fetch`."""


# -- parts --------------------------------------------------------------------------------------------------------


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of ``tree``, with the leaves of :attr:`ComposedFetch.fetch` in place of a composed fetch."""
    found: list[Any] = []
    map_leaves(found.append, tree)
    for leaf in found:
        if isinstance(leaf, ComposedFetch):
            yield from leaves(leaf.fetch)
        else:
            yield leaf


def watched_names(fetches: Any) -> list[str]:
    """Return the names in ``fetches`` for which a submodule has to be watched: ``"encoder.layer1:output"``."""
    if isinstance(fetches, ComposedFetch):
        return fetches.watched_names
    if type(fetches) is str and ":" not in fetches:
        return []
    return [leaf for leaf in leaves(fetches) if isinstance(leaf, str) and leaf.rpartition(":")[1:] in _WATCHED_SUFFIXES]


def accumulated_parts(fetches: Any) -> list[Any]:
    """Return the parts of ``fetches`` that are accumulated from run to run."""
    if type(fetches) is str:
        return []
    found: list[Any] = []

    def look(leaf: Any) -> None:
        if isinstance(leaf, ComposedFetch):
            found.extend(leaf.accumulated_parts)

    map_leaves(look, fetches)
    return found


# -- names --------------------------------------------------------------------------------------------------------


def named_outputs(outputs: Any) -> Mapping[str, Any]:
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


def check_feed_names(feeds: Mapping[Any, Any], feeder: object) -> None:
    """Raise a TypeError unless all keys of ``feeds`` are names."""
    for name in feeds:
        if not isinstance(name, str):
            raise TypeError(
                f"{feeder} feeds {shown(name)}, which is not a name: a feed is given by the name of a parameter, a str"
            )


def _has_rate(optimizer: torch.optim.Optimizer | None) -> bool:
    groups = [] if optimizer is None else optimizer.param_groups
    return bool(groups) and all("lr" in group for group in groups)


def _learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the fetch ``"lr"``, and one for each parameter group: ``"lr/0"``, and ``"lr/head"`` if it has a name.

    ``"lr"`` is the rate of the only group, or all rates if there are several groups. Whether these agree does not
    matter. If it did, a schedule could change the type of ``"lr"`` in the middle of a training run.
    """
    groups = optimizer.param_groups
    rates, names = [group["lr"] for group in groups], _group_names(groups)
    by_index = {f"lr/{index}": rate for index, rate in enumerate(rates)}
    by_name = {f"lr/{name}": rate for name, rate in zip(names, rates, strict=True)}
    return {"lr": rates[0] if len(groups) == 1 else GroupRates(rates, names), **by_index, **by_name}


def _group_names(groups: list[dict[str, Any]]) -> list[str]:
    """Return the ``"name"`` of each group, or its index; only indices if two names are the same."""
    indices = [str(index) for index in range(len(groups))]
    given = [group.get("name") for group in groups]
    names = [
        name if isinstance(name, str) and name.strip() and name.isprintable() else index
        for name, index in zip(given, indices, strict=True)
    ]
    return names if len(set(names)) == len(names) else indices


def _model_value(model: torch.nn.Module | None, name: str) -> Any:
    """Return a parameter, a buffer or a gradient (``"fc.weight.grad"``) of ``model``, or ``_MISSING``.

    Returns a :class:`~torchhooks.fetches.modules.Computed` for a tensor that a parametrization computes with the
    user's code.
    """
    if model is None:
        return _MISSING
    found = find(model, name)
    if found is None and name.endswith(".grad"):
        parameter = find(model, name.removesuffix(".grad"))
        # A computed one (torch.nn.utils.spectral_norm) keeps no gradient, and reading its .grad is a warning.
        if isinstance(parameter, Computed) or (
            parameter is not None and not parameter.is_leaf and not parameter.retains_grad
        ):
            return None
        return _MISSING if parameter is None else parameter.grad
    if not isinstance(found, Computed):
        return _MISSING if found is None else found
    value = found.value()
    return found if value is None else value


# -- closures -----------------------------------------------------------------------------------------------------

_parameters: weakref.WeakKeyDictionary[Any, dict[bool, tuple[inspect.Parameter, ...]]] = weakref.WeakKeyDictionary()


def closure_parameters(closure: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of ``closure`` that are names. Cached by function, because ``inspect`` is slow."""
    function = closure.__func__ if isinstance(closure, types.MethodType) else closure
    if not isinstance(function, types.FunctionType):
        return _read_parameters(closure)
    bound = function is not closure
    known = _parameters.setdefault(function, {})
    if bound not in known:
        known[bound] = _read_parameters(closure)
    return known[bound]


def _read_parameters(closure: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    try:
        function = closure.forward if isinstance(closure, torch.nn.Module) else closure
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature is called without arguments
        return ()
    given = closure.keywords if isinstance(closure, functools.partial) else ()
    return tuple(p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in given)


def describe(fetch: Any) -> str:
    """Return a description of ``fetch`` for errors and log lines: of a function, its name, file and line."""
    code = getattr(getattr(fetch, "__wrapped__", fetch), "__code__", None)
    if code is not None:
        # Without the folders of the file, which would make up most of a log line.
        return f"{fetch.__qualname__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    return fetch if isinstance(fetch, str) else repr(fetch)


# -- evaluation ---------------------------------------------------------------------------------------------------

_NOT_VALUES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, ComposedFetch)
"""What no closure returns as its value, but a function that creates a fetch does, such as ``grad_norm``."""


class _NotThereError(Exception):
    """A name has no value, in a fetch that need not have one."""


class Evaluator:
    """Evaluates the fetches of one run, each distinct one once."""

    ran = True
    """Whether a run has produced outputs."""
    gone: Collection[str] = ()
    """The names that exist only during a run: the parameters of the step."""
    detaches = False
    """Whether closures get detached outputs, as outside of a run."""
    copies = True
    """Whether what closures and objects return is copied. If it is used at once and not kept, it need not be."""
    before_first_run: Any = _MISSING
    """What stands for a name without a value before the first run, instead of an error."""
    _may_be_missing = False
    _requester: Requester = UNKNOWN

    def __init__(
        self,
        session: Any,
        outputs: Any = None,
        feeds: Mapping[str, Any] = _EMPTY,
        inputs: Callable[[], Mapping[str, Any]] = dict,
        watched: Mapping[str, Any] = _EMPTY,
        requests: Iterable[tuple[Requester, Any]] = (),
    ) -> None:
        self.session = session
        self.outputs = outputs
        self.feeds = feeds
        self.watched = watched  # "fc1:output" and its like, already copied
        self._requests = requests  # of the run, for the subclass for several ranks
        self._inputs = inputs  # called only when a fetch needs the arguments of the step
        self._values: dict[Any, Any] = {}  # by name, by closure, and by id for other objects
        self._outputs = {"loss": outputs} if type(outputs) is torch.Tensor else named_outputs(outputs)

    def evaluate(self, fetch: Any, requester: Requester) -> Any:
        """Return the value of ``fetch``, in its structure. A FetchError names the ``requester``."""
        self._requester = requester
        if type(fetch) is str:
            return self._named(fetch)
        return self.composed(fetch) if isinstance(fetch, ComposedFetch) else map_leaves(self._leaf, fetch)

    def evaluate_uncopied(self, fetch: Any, requester: Requester) -> Any:
        """Return the value of ``fetch`` for a use in which it is neither kept nor changed."""
        self._requester = requester
        return self._leaf_uncopied(fetch)

    def evaluate_if_there(self, fetch: Any, requester: Requester) -> Any:
        """Return the value of ``fetch``, not copied, or ``None`` if a name in it has no value in this run."""
        self._requester, self._may_be_missing = requester, True
        try:
            return self._leaf_uncopied(fetch)
        except _NotThereError:
            return None
        finally:
            self._may_be_missing = False

    def is_given(self, name: str) -> bool:
        """Return whether a feed or an output of the step has this ``name``."""
        return name in self.feeds or name in self._outputs

    def _leaf(self, fetch: Any) -> Any:
        if isinstance(fetch, str):
            return self._named(fetch)
        if isinstance(fetch, ComposedFetch):
            return self.composed(fetch)
        if isinstance(fetch, torch.Tensor):
            return self._once(fetch, lambda: fetch)
        if callable(getattr(fetch, "compute", None)) and not isinstance(fetch, type):
            return self._once(fetch, lambda: self._call(fetch, fetch.compute))
        if callable(fetch):
            return self._closure(fetch)
        raise FetchError(
            f"{self._requester} asked for {shown(fetch)}, which is not a fetch: a fetch is a name, a closure, an "
            "object with compute(), a tensor, or these in lists, tuples, dicts and dataclasses"
        )

    def _leaf_uncopied(self, fetch: Any) -> Any:
        return self._find(fetch) if type(fetch) is str and fetch not in self.watched else self._leaf(fetch)

    def _named(self, name: str) -> Any:
        if name in self.watched:
            return self.watched[name]
        if name not in self._values:
            self._values[name] = snapshot(self._find(name))
        return self._values[name]

    def _find(self, name: str) -> Any:
        value = self._look_up(name)
        if value is _MISSING:
            if self._may_be_missing:
                raise _NotThereError(name)
            message = f"{self._requester} asked for {name!r}, which does not exist"
            error = self._unknown(name, message, self._elsewhere(name))
            return self._instead_of(error)
        return value

    def _instead_of(self, error: FetchError) -> Any:
        """Return what stands for a value that only a run would have, or raise ``error``."""
        if self.before_first_run is _MISSING or not isinstance(error, NoRunYetError):
            raise error
        logger.warning("%s It counts as %s.", error, self.before_first_run)
        return self.before_first_run

    def _once(self, fetch: Any, value: Callable[[], Any]) -> Any:
        if id(fetch) not in self._values:
            self._values[id(fetch)] = fetch, self._kept(value())  # with the fetch, so that its id stays its own
        return self._values[id(fetch)][1]

    def _closure(self, closure: Callable[..., Any]) -> Any:
        try:
            hash(closure)
        except TypeError:  # not hashable: identified by id instead
            return self._once(closure, lambda: self._call_by_name(closure))
        if closure not in self._values:
            self._values[closure] = self._kept(self._call_by_name(closure))
        return self._values[closure]

    def _kept(self, value: Any) -> Any:
        return snapshot(value) if self.copies else value

    def _call_by_name(self, closure: Callable[..., Any]) -> Any:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in closure_parameters(closure):
            value = self._argument(closure, parameter)
            if parameter.kind is parameter.KEYWORD_ONLY:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return self._call(closure, functools.partial(closure, *args, **kwargs))

    def _argument(self, closure: Callable[..., Any], parameter: inspect.Parameter) -> Any:
        name, session = parameter.name, self.session
        value = self._look_up(name)
        if value is not _MISSING:
            return value
        if name in ("model", "optimizer"):
            return getattr(session, name)
        if name == "outputs":
            return self._as_asked(self.outputs)
        value = session if name == "session" else parameter.default
        if value is not inspect.Parameter.empty:
            return value
        if self._may_be_missing:
            raise _NotThereError(name)
        asked = f"{self._requester} asked for {describe(closure)}"
        way_out, hint = "", " Give another parameter a default, or bind it with functools.partial."
        if isinstance(closure, (types.FunctionType, type)) and f"{closure.__module__}.".startswith("torchhooks."):
            way_out, hint = f": call it, {closure.__name__}(...)", ""
        error = self._unknown(name, f"{asked}, whose parameter {name!r} is not an available name{way_out}", hint)
        return self._instead_of(error)

    def composed(self, fetch: ComposedFetch) -> Any:
        """Return the value of ``fetch``."""
        if fetch.accumulates:
            try:
                return self.session.accumulated.report(fetch, self._requester)
            except NoRunYetError as error:
                return self._instead_of(error)
        evaluate, parts = self._leaf if fetch.copies else self._leaf_uncopied, fetch.fetch
        if fetch.optional:
            value = self.evaluate_if_there(parts, self._requester)
        else:
            value = evaluate(parts) if type(parts) is str else map_leaves(evaluate, parts)
        try:
            return fetch.compose(value)
        except BaseException as error:
            self._note(error, fetch)
            raise

    def _call(self, fetch: Any, function: Callable[[], Any]) -> Any:
        try:
            with torch.no_grad():
                value = function()
        except BaseException as error:
            self._note(error, fetch)
            raise
        if isinstance(value, _NOT_VALUES) or (isinstance(fetch, type) and hasattr(value, "compute")):
            raise FetchError(
                f"{self._requester} asked for {describe(inspect.unwrap(fetch))}, whose value is of type "
                f"{type(value).__name__}: a value is neither a function nor a fetch. If it creates a fetch, "
                f"call it: {getattr(fetch, '__name__', 'fetch')}()"
            )
        return value

    def _note(self, error: BaseException, fetch: Any) -> None:
        with contextlib.suppress(Exception):  # a fetch that cannot be printed must not replace the error
            names = shortened([*self._all_names(), "model", "optimizer", "session", "outputs"])
            where = f"in {describe(fetch)}, which {self._requester} asked for"
            add_note(error, f"torchhooks: {where}; available names: {names}")

    def _unknown(self, name: str, message: str, hint: str = "") -> FetchError:
        if name in self.gone:
            return NoRunYetError(f"{message} outside of a run: it is an argument of the step.")
        if self.session.model is not None and is_property(self.session.model, name):
            message += f". It is a property, and a fetch runs no code of the model: fetch lambda model: model.{name}"
        if name in SPEEDS:
            given = name.removesuffix("_per_sec") + "_per_step"
            option = f"{given}=..., " if name in SPEEDS[3:] else ""
            message += f". A StepCounterHook measures it: add StepCounterHook({option}log=False) to hooks"
        names = self._all_names()
        message += f".{did_you_mean(name, names)}{hint} Available: {shortened(names)}."
        if self.ran:
            return FetchError(message + self._unnamed_outputs())
        return NoRunYetError(f"{message} The outputs of the step exist only after a run in which it returned.")

    def _elsewhere(self, name: str) -> str:
        """Return how to get a value that is not fetched by its name, after a space; ``""`` if nothing is known."""
        if name == "lr":
            optimizer = self.session.optimizer
            if optimizer is None:
                return " The loop has no optimizer: pass it, MonitoredLoop(step, model, optimizer)."
            return f" Not every parameter group of {type(optimizer).__name__} has a learning rate."
        if self.session.model is not None and name in submodule_names(self.session.model):
            return f" It is a submodule: to fetch what it returns, write '{name}:output'."
        evaluations = [hook for hook in self.session.hooks.values() if hasattr(hook, "may_return")]
        if any(hook.may_return(name) for hook in evaluations):
            return f" If it is a result of an EvaluationHook, fetch evaluation[{name!r}]."
        if name.isidentifier() and isinstance(self.outputs, Mapping) and self.outputs:
            return f" If the step returns it in some runs only, fetch latest({name!r})."
        return ""

    def _unnamed_outputs(self) -> str:
        """Return what to know of the outputs if they have no names of the user's choice, after a space."""
        outputs = self.outputs
        if type(outputs) is dict and not outputs:
            return ' The outputs are an empty dict: put what hooks ask for into it, such as outputs["loss"] = loss.'
        if outputs is None:
            return " The step returned None: return what hooks ask for, such as the loss."
        kind = type(outputs).__name__
        if not self._outputs and not isinstance(outputs, Mapping):
            return f" The step returned {shown(outputs)}, of type {kind}, which has no names: return a dict instead."
        if isinstance(outputs, (tuple, list)) and not hasattr(outputs, "_fields"):
            return f" The step returned a {kind}, whose items are named {shortened([*map(repr, self._outputs)])}."
        return ""

    def _look_up(self, name: str) -> Any:
        """Return the value of ``name``, not copied, or ``_MISSING``."""
        if name in self.feeds:
            return self.feeds[name]
        if name in self._outputs:
            return self._as_asked(self._outputs[name])
        if name == "global_step":
            return self.session.global_step
        if name in SPEEDS:  # before the model and the arguments, which take longer to search
            measured = [speed(name, self._leaf_uncopied) for speed in self.session.speeds]
            found = [each for each in measured if each is not None]
            if found:
                return max(found, key=operator.itemgetter(0))[1]
        if name.startswith("lr") and _has_rate(self.session.optimizer):
            rates = _learning_rates(self.session.optimizer)
            if name in rates:
                return rates[name]
        value = _model_value(self.session.model, name)
        if type(value) is Computed:
            stored_names = " and ".join(map(repr, value.originals))
            raise FetchError(
                f"{self._requester} asked for {name!r}, which {' and '.join(value.computed_by)} computes. A fetch runs "
                f"no code of the model, which could change the training run: fetch {stored_names}, which the model "
                "stores, or return the value from the step."
            )
        if value is _MISSING:
            value = self._inputs().get(name, _MISSING)
        if value is _MISSING and name in _OF_LOOP:  # last, because steps have parameters with these names
            known = getattr(self.session, name, None)
            value = _MISSING if known is None else known
        return value

    def _as_asked(self, output: Any) -> Any:
        return detached(output) if self.detaches else output

    def _all_names(self) -> list[str]:
        names = [*self.feeds, *map(str, self._outputs), "global_step"]
        if _has_rate(self.session.optimizer):
            rates = _learning_rates(self.session.optimizer)
            names += rates if isinstance(rates["lr"], GroupRates) else ["lr"]
        names += self.watched
        if self.session.model is not None:
            names += tensor_names(self.session.model)
        return [*dict.fromkeys([*names, *self._inputs()])]
