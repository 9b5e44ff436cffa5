"""Fetches: what a hook can ask for in a run, and the value of each.

docs/reference/fetches.md lists them, and the order in which a name is looked up. An :class:`Evaluator` evaluates the
fetches of one run after its step: a name, a closure or an object once, however many hooks ask for it. Tensors and
arrays in the values are copies, which later updates do not change. Tensors are detached, and stay on their device.

This is the way of a value: ``evaluate`` maps the leaves of what one hook asks for. A name goes through ``_named`` and
``_look_up``, a closure through ``_closure`` and ``_call_by_name``, and a :class:`ComposedFetch`, such as a summary op,
through ``composed``.

No code of the model runs when a name is looked up, because it could change the training run. A closure is called under
``torch.no_grad()``, with the original values instead of copies.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from torchhooks.common.errors import FetchError, NoRunYetError, add_note
from torchhooks.common.log import logger
from torchhooks.common.text import did_you_mean, kind_of, shortened, shown
from torchhooks.common.trees import GroupRates, Leaf, detached, map_leaves, snapshot
from torchhooks.fetches.names import (
    Closure,
    Fetch,
    Value,
    closure_parameters,
    describe,
    find,
    learning_rates,
    named_outputs,
    submodule_names,
    tensor_names,
    why_not_stored,
)
from torchhooks.progress.training_state import TrainingState

if TYPE_CHECKING:
    pass

_AVAILABLE = "; available names: "
# Not None, which is a value: of an output, and of a gradient before the first backward().
_MISSING: Value = type("Missing", (), {"__repr__": lambda self: "<missing>"})()

_EMPTY: Mapping[str, Value] = types.MappingProxyType({})
SPEEDS = ("steps_per_sec", "secs_per_step", "data_secs", "examples_per_sec", "tokens_per_sec")
"""The fetches that a StepCounterHook measures, the last two if it is told how many there are."""
_WATCHED_SUFFIXES = ((":", "output"), (":", "input"), (":", "grad"))


class Caller:
    """A hook, or a call such as ``Session.run``, that asks for values. Its ``str`` is what errors name.

    A hook in a loop has a subclass, :class:`torchhooks.loop.schedule.HookSlot`.
    """

    def __init__(self, hook: object = None, name: str = "") -> None:
        self.hook = hook
        """The hook that asks; ``None`` if it is another call."""
        self._name = name

    def declared_fetches(self) -> Fetch:
        """Return what the hook will fetch when it is due; ``None`` if it does not say."""
        return None

    def why_alone(self) -> str | None:
        """Return why one rank may ask in a run in which others do not, and the way out; ``None`` if all ask."""
        return None

    def __str__(self) -> str:
        return self._name or str(self.hook)  # not earlier, because the repr of a hook can be slow


@runtime_checkable
class _Evaluation(Protocol):
    """A hook whose results may be what an unknown name means."""

    def may_return(self, name: str) -> bool: ...


_OF_SESSION: Mapping[str, Callable[[TrainingState], Value]] = {
    "model": lambda session: session.model,
    "optimizer": lambda session: session.optimizer,
}
_OF_CLOSURES = (*_OF_SESSION, "session", "outputs")
_OF_LOOP: Mapping[str, Callable[[TrainingState], float | None]] = {
    "epoch": lambda session: session.epoch,
    "batch": lambda session: session.last_batch,
    "secs": lambda session: session.secs,
}

UNKNOWN = Caller(name="an unknown caller")
"""Asks if neither a hook nor a call is known."""


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
    """Whether :attr:`fetch` may be evaluated before this fetch, together with others; not with :meth:`prepare`."""
    fetch: Fetch = None
    """The fetch to evaluate."""
    prepare: Callable[[TrainingState], Callable[[], object]] | None = None
    """Called before :attr:`fetch` is evaluated. What it returns is called afterwards, also if that raises."""

    @functools.cached_property
    def watched_names(self) -> list[str]:
        """The names in :attr:`fetch` for which a submodule has to be watched during the step."""
        return watched_names(self.fetch)

    @functools.cached_property
    def accumulated_parts(self) -> list[Fetch]:
        """The parts of :attr:`fetch` that are accumulated from run to run."""
        return accumulated_parts(self.fetch)

    def compose(self, value: Value) -> Value:
        """Return the value of this fetch, given the value of :attr:`fetch`."""


# -- parts --------------------------------------------------------------------------------------------------------


def leaves(tree: Fetch) -> Iterator[Fetch]:
    """Yield the leaves of ``tree``, with the leaves of :attr:`ComposedFetch.fetch` in place of a composed fetch."""
    found: list[Value] = []
    map_leaves(found.append, tree)
    for leaf in found:
        if isinstance(leaf, ComposedFetch):
            yield from leaves(leaf.fetch)
        else:
            yield leaf


def watched_names(fetches: Fetch) -> list[str]:
    """Return the names in ``fetches`` for which a submodule has to be watched: ``"encoder.layer1:output"``."""
    if isinstance(fetches, ComposedFetch):
        return fetches.watched_names
    if type(fetches) is str and ":" not in fetches:
        return []
    return [leaf for leaf in leaves(fetches) if isinstance(leaf, str) and leaf.rpartition(":")[1:] in _WATCHED_SUFFIXES]


def accumulated_parts(fetches: Fetch) -> list[Fetch]:
    """Return the parts of ``fetches`` that are accumulated from run to run."""
    if type(fetches) is str:
        return []
    found: list[Fetch] = []

    def look(leaf: object) -> None:
        if isinstance(leaf, ComposedFetch):
            found.extend(leaf.accumulated_parts)

    map_leaves(look, fetches)
    return found


def _asked_names(fetches: Fetch) -> Iterator[tuple[str, Closure | None]]:
    """Yield the names that an evaluation of ``fetches`` needs, each with the closure whose parameter it is.

    Not those of accumulated fetches, which ask in every run, nor those that need not have a value, as of ``latest``.
    """
    found: list[Fetch] = []
    map_leaves(found.append, fetches)
    for leaf in found:
        if isinstance(leaf, ComposedFetch):
            if not (leaf.accumulates or leaf.optional):
                yield from _asked_names(leaf.fetch)
        elif isinstance(leaf, str):
            yield leaf, None
        elif callable(leaf) and not hasattr(leaf, "compute") and not isinstance(leaf, torch.Tensor):
            for parameter in closure_parameters(leaf):
                if parameter.default is parameter.empty:
                    yield parameter.name, leaf


def _model_value(model: torch.nn.Module | None, name: str) -> Value:
    """Return a parameter, a buffer or a gradient (``"fc.weight.grad"``) of ``model``, or ``_MISSING``."""
    if model is None:
        return _MISSING
    # First the whole name, because a parameter or a buffer may be called grad.
    found = find(model, name)
    if found is None and name.endswith(".grad"):
        parameter = find(model, name.removesuffix(".grad"))
        return _MISSING if parameter is None else parameter.grad
    return _MISSING if found is None else found


# -- evaluation ---------------------------------------------------------------------------------------------------

_NOT_VALUES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, ComposedFetch)
"""What no closure returns as its value, but a function that creates a fetch does, such as ``grad_norm``."""


class _NotThereError(Exception):
    """Raised where a name in an optional fetch has no value."""


class Evaluator:
    """Evaluates the fetches of one run, each of them once."""

    ran = True
    """Whether a run has produced outputs."""
    gone: Collection[str] = ()
    """The names that exist only during a run: the parameters of the step."""
    detaches = False
    """Whether closures get detached outputs, as outside of a run. Each when asked for: some cannot be rebuilt."""
    copies = True
    """Whether what closures and objects return is copied. If it is used at once and not kept, it need not be."""
    before_first_run: Value = _MISSING
    """What stands for a name without a value before the first run, instead of an error."""
    _may_be_missing = False
    _caller: Caller = UNKNOWN

    def __init__(
        self,
        session: TrainingState,
        outputs: object = None,
        feeds: Mapping[str, Value] = _EMPTY,
        inputs: Callable[[], Mapping[str, Value]] = dict,
        watched: Mapping[str, Value] = _EMPTY,
        requests: Iterable[tuple[Caller, tuple[Fetch, ...]]] = (),
    ) -> None:
        self.session = session
        self.outputs = outputs
        self.feeds = feeds
        self.watched = watched  # "fc1:output" and the like
        self._requests = requests  # of the run, for the subclass for several ranks
        self._inputs = inputs  # called only when a fetch needs the arguments of the step
        # By name, by closure, and by id for other objects. What was watched is copied already.
        self._values: dict[Value, Value] = {**watched}
        self._outputs = {"loss": outputs} if type(outputs) is torch.Tensor else named_outputs(outputs)

    def evaluate(self, fetch: Fetch, caller: Caller) -> Value:
        """Return the value of ``fetch``, in its structure. A FetchError names the ``caller``."""
        self._caller = caller
        if type(fetch) is str:
            return self._named(fetch)
        return self.composed(fetch) if isinstance(fetch, ComposedFetch) else map_leaves(self._leaf, fetch)

    def evaluate_uncopied(self, fetch: Fetch, caller: Caller) -> Value:
        """Return the value of ``fetch`` for a use in which it is neither kept nor changed."""
        self._caller = caller
        return self._leaf_uncopied(fetch)

    def evaluate_if_there(self, fetch: Fetch, caller: Caller) -> Value:
        """Return the value of ``fetch``, not copied, or ``None`` if a name in it has no value in this run."""
        self._caller, self._may_be_missing = caller, True
        try:
            return self._leaf_uncopied(fetch)
        except _NotThereError:
            return None
        # Always, because the evaluator goes on with the fetches of other hooks, for which a missing name is an error.
        finally:
            self._may_be_missing = False

    def is_given(self, name: str) -> bool:
        """Return whether a feed or an output of the step has this ``name``."""
        return name in self.feeds or name in self._outputs

    def names_to_come(self, fetches: Fetch, caller: Caller) -> Iterator[tuple[int, str]]:
        """Yield a log line, after its level, for each name in ``fetches`` that has no value after the last run.

        It is an INFO for what may be an output that the step returns in some runs only. Nothing is evaluated.
        """
        for name, closure in _asked_names(fetches):
            if name in self.gone or name in _OF_CLOSURES or name in _OF_LOOP or name in SPEEDS:
                continue
            module, *suffix = name.rpartition(":")
            if tuple(suffix) in _WATCHED_SUFFIXES and self.session.model is not None:
                has_value = not module or module in submodule_names(self.session.model)
            else:
                has_value = self.is_given(name) or self._look_up(name) is not _MISSING
            if not has_value:
                of_closure = "" if closure is None else f", a parameter of {describe(closure)}"
                may_be_output = name.isidentifier() or any("." in output for output in self._outputs)
                missing = "the first run did not return" if may_be_output else "does not exist"
                message = f"{caller} will ask for {name!r}{of_closure}, which {missing}"
                error = self._unknown(name, message, self._elsewhere(name))
                yield logging.INFO if may_be_output else logging.WARNING, str(error)

    def _leaf(self, fetch: Fetch) -> Value:
        if isinstance(fetch, str):
            return self._named(fetch)
        if isinstance(fetch, ComposedFetch):
            return self.composed(fetch)
        if isinstance(fetch, torch.Tensor):
            return self._once(fetch, lambda: fetch)
        # Before callable(): a metric of torchmetrics is a module, and a call would update it.
        if callable(getattr(fetch, "compute", None)) and not isinstance(fetch, type):
            return self._once(fetch, lambda: self._call(fetch, fetch.compute))
        if callable(fetch):
            return self._closure(fetch)
        raise FetchError(
            f"{self._caller} asked for {shown(fetch)}, which is not a fetch: a fetch is a name, a closure, an "
            "object with compute(), a tensor, or these in lists, tuples, dicts and dataclasses"
        )

    def _leaf_uncopied(self, fetch: Fetch) -> Value:
        if type(fetch) is not str or fetch in self._values:
            return self._leaf(fetch)
        value = self._look_up(fetch)
        return self._instead_of_missing(fetch) if value is _MISSING else value

    def _named(self, name: str) -> Value:
        if name not in self._values:
            value = self._look_up(name)
            self._values[name] = self._instead_of_missing(name) if value is _MISSING else self._copied(name, value)
        return self._values[name]

    def _instead_of_missing(self, name: str) -> Value:
        if self._may_be_missing:
            raise _NotThereError(name)
        message = f"{self._caller} asked for {name!r}, which does not exist"
        return self._instead_of(self._unknown(name, message, self._elsewhere(name)))

    def _instead_of(self, error: FetchError) -> Value:
        """Return :attr:`before_first_run` in place of a value that needs a run, or raise ``error``."""
        if self.before_first_run is _MISSING or not isinstance(error, NoRunYetError):
            raise error
        logger.warning("%s It counts as %s.", error, self.before_first_run)
        return self.before_first_run

    def _once(self, fetch: Fetch, value: Callable[[], Value]) -> Value:
        if id(fetch) not in self._values:
            # With the fetch, which is kept alive by that: a fetch that a hook creates for one request could be freed,
            # and another one in the same run get its id, and with it its value.
            self._values[id(fetch)] = fetch, self._kept(fetch, value())
        return self._values[id(fetch)][1]

    def _closure(self, closure: Closure) -> Value:
        try:
            hash(closure)
        except TypeError:  # not hashable: identified by id instead
            return self._once(closure, lambda: self._call_by_name(closure))
        # By equality, because each access to a method makes a new object. It is equal to the one before, and evaluated
        # once.
        if closure not in self._values:
            self._values[closure] = self._kept(closure, self._call_by_name(closure))
        return self._values[closure]

    def _kept(self, fetch: Fetch, value: object) -> Value:
        return self._copied(fetch, value) if self.copies else value

    def _copied(self, fetch: Fetch, value: object) -> Value:
        try:
            return snapshot(value)
        except Exception as error:
            self._note(error, fetch, value)
            raise

    def _call_by_name(self, closure: Closure) -> Value:
        args: list[Value] = []
        kwargs: dict[str, Value] = {}
        for parameter in closure_parameters(closure):
            value = self._argument(closure, parameter)
            # All others by position, because some functions take parameters by position only.
            if parameter.kind is parameter.KEYWORD_ONLY:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return self._call(closure, functools.partial(closure, *args, **kwargs))

    def _argument(self, closure: Closure, parameter: inspect.Parameter) -> Value:
        name, session = parameter.name, self.session
        value = self._look_up(name)
        if value is not _MISSING:
            return value
        if name in _OF_SESSION:
            return _OF_SESSION[name](session)
        if name == "outputs":
            return detached(self.outputs) if self.detaches else self.outputs
        value = session if name == "session" else parameter.default
        if value is not inspect.Parameter.empty:
            return value
        if self._may_be_missing:
            raise _NotThereError(name)
        asked = f"{self._caller} asked for {describe(closure)}"
        way_out, hint = (
            "",
            " A parameter called model gets the model. Give others a default, or bind them with functools.partial.",
        )
        if isinstance(closure, (types.FunctionType, type)) and f"{closure.__module__}.".startswith("torchhooks."):
            way_out, hint = f": call it, {closure.__name__}(...)", ""
        error = self._unknown(name, f"{asked}, whose parameter {name!r} is not an available name{way_out}", hint)
        return self._instead_of(error)

    def composed(self, fetch: ComposedFetch) -> Value:
        """Return the value of ``fetch``."""
        if fetch.accumulates:
            try:
                return self.session.accumulated.report(fetch, self._caller)
            except NoRunYetError as error:
                return self._instead_of(error)
        parts = fetch.fetch
        put_back = None if fetch.prepare is None else fetch.prepare(self.session)
        try:
            if fetch.optional:
                value = self.evaluate_if_there(parts, self._caller)
            elif type(parts) is str and fetch.copies:
                value = self._named(parts)
            else:
                value = map_leaves(self._leaf if fetch.copies else self._leaf_uncopied, parts)
        finally:
            if put_back is not None:
                put_back()
        try:
            return fetch.compose(value)
        except BaseException as error:
            self._note(error, fetch, value)
            raise

    def _call(self, fetch: Fetch, function: Callable[[], Value]) -> Value:
        try:
            # Without a graph, which would keep the activations of the run in memory as long as the value.
            with torch.no_grad():
                value = function()
        except BaseException as error:
            self._note(error, fetch)
            raise
        if isinstance(value, _NOT_VALUES) or (isinstance(fetch, type) and hasattr(value, "compute")):
            raise FetchError(
                f"{self._caller} asked for {describe(inspect.unwrap(fetch))}, whose value is of type "
                f"{type(value).__name__}: a value is neither a function nor a fetch. If it creates a fetch, "
                f"call it: {getattr(fetch, '__name__', 'fetch')}()"
            )
        return value

    def _note(self, error: BaseException, fetch: Fetch, value: Value = None) -> None:
        with contextlib.suppress(Exception):  # a fetch that cannot be printed must not replace the error
            got = f", of {kind_of(value)}" if isinstance(value, torch.Tensor) else ""
            note = f"torchhooks: in {describe(fetch)}{got}, which {self._caller} asked for"
            # Once: a FetchError has the names itself, and so has the note of a part of this fetch.
            if not isinstance(error, FetchError) and _AVAILABLE not in "".join(getattr(error, "__notes__", ())):
                note += _AVAILABLE + shortened([*self._all_names(), "model", "optimizer", "session", "outputs"])
            add_note(error, note)

    def _unknown(self, name: str, message: str, hint: str = "") -> FetchError:
        if name in self.gone:
            return NoRunYetError(f"{message} outside of a run: it is an argument of the step.")
        if self.session.model is not None:
            message += why_not_stored(self.session.model, name)
        if name in SPEEDS:
            given = name.removesuffix("_per_sec") + "_per_step"
            option = f"{given}=..., " if name in SPEEDS[3:] else ""
            message += f". A StepCounterHook measures it: add StepCounterHook({option}log=False) to hooks"
        names = self._all_names()
        message += f".{did_you_mean(name, names)}{hint} Available: {shortened(names)}."
        if self.ran:
            return FetchError(message + self._unnamed_outputs(name))
        return NoRunYetError(f"{message} The outputs of the step exist only after a run in which it returned.")

    def _elsewhere(self, name: str) -> str:
        """Return a hint where else ``name`` may have its value, after a space; ``""`` without one."""
        if name == "lr":
            optimizer = self.session.optimizer
            if optimizer is None:
                return " The loop has no optimizer: pass it, MonitoredLoop(step, model, optimizer)."
            return f" Not every parameter group of {type(optimizer).__name__} has a learning rate."
        if self.session.model is not None and name in submodule_names(self.session.model):
            return f" It is a submodule: to fetch what it returns, write '{name}:output'."
        if any(isinstance(hook, _Evaluation) and hook.may_return(name) for hook in self.session.hooks.values()):
            return f" If it is a result of an EvaluationHook, fetch evaluation[{name!r}]."
        if name.isidentifier() and isinstance(self.outputs, Mapping) and self.outputs:
            return f" If the step returns it in some runs only, fetch latest({name!r})."
        return ""

    def _unnamed_outputs(self, name: str) -> str:
        """Return a hint for outputs that have no names of the user's choice, after a space."""
        outputs = self.outputs
        # Nothing may also be what the step returns from a run whose error it has caught.
        latest = f" If it is so in some runs only, fetch latest({name!r})." if name.isidentifier() else ""
        if type(outputs) is dict and not outputs:
            wanted = 'put what hooks ask for into it, such as outputs["loss"] = loss.'
            return f" The outputs are an empty dict: {wanted}{latest}"
        if outputs is None:
            return f" The step returned None: return what hooks ask for, such as the loss.{latest}"
        kind = type(outputs).__name__
        if not self._outputs and not isinstance(outputs, Mapping):
            return f" The step returned {shown(outputs)}, of type {kind}, which has no names: return a dict instead."
        if isinstance(outputs, (tuple, list)) and not hasattr(outputs, "_fields"):
            return f" The step returned a {kind}, whose items are named {shortened([*map(repr, self._outputs)])}."
        return ""

    def _look_up(self, name: str) -> Value:
        """Return the value of ``name``, not copied, or ``_MISSING``."""
        if name in self.feeds:
            return self.feeds[name]
        if name in self._outputs:
            return self._detached(name) if self.detaches else self._outputs[name]
        if name == "global_step":
            return self.session.global_step
        # Before the model and the arguments, which take longer to search. Of several StepCounterHooks, the one that has
        # measured last counts.
        if name in SPEEDS:
            measured = [hook.measured_speed(name) for hook in self.session.loop_hooks]
            found = [each for each in measured if each is not None]
            if found:
                return max(found, key=operator.itemgetter(0))[1]
        if name.startswith("lr"):
            rates = learning_rates(self.session.optimizer)
            if name in rates:
                return rates[name]
        # The arguments come after the model, because the signature of the step is bound for them, which takes longer.
        value = _model_value(self.session.model, name)
        if value is _MISSING:
            value = self._inputs().get(name, _MISSING)
        # Last, because steps have parameters with these names, such as batch, and the script means these.
        if value is _MISSING and name in _OF_LOOP:
            known = _OF_LOOP[name](self.session)
            value = _MISSING if known is None else known
        return value

    def _detached(self, name: str) -> Value:
        value = self._outputs[name]
        try:
            return detached(value)
        except Exception as error:
            self._note(error, name, value)
            raise

    def _all_names(self) -> list[str]:
        names = [*self.feeds, *map(str, self._outputs), "global_step"]
        rates = learning_rates(self.session.optimizer)
        names += rates if isinstance(rates.get("lr"), GroupRates) else [*rates][:1]
        names += self.watched
        if self.session.model is not None:
            names += tensor_names(self.session.model)
        return [*dict.fromkeys([*names, *self._inputs()])]
