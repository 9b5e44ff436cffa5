"""Running fetches: the mean, the sum, the maximum or the minimum of a fetch over all runs since a hook's last report.

They can also be over the epoch so far. :func:`latest` is the value of the last run that had one. The dtypes are in
docs/reference/fetches.md.

This is the way of a value, in the order of the methods of :class:`RunningValues`:

* ``find_in`` finds the running fetches in the attributes of the hooks, when a session was created, and ``declare``
  those in a request. Each hook gets an :class:`Accumulator` for each of them.
* ``add`` evaluates the fetch in every run, without calling the hook. The value waits to be added up: on the host in a
  list, on a device in the row of a buffer, with one launch in a run for all numbers of one dtype. So the host never
  waits, and the value of a CUDA graph is read before the next replay overwrites it.
* ``report`` returns the result to the hook that requests it, and starts over. ``put_back`` undoes this.
* ``epoch_ended`` lets what is over the epoch so far start over with the next run.
* ``state_dict`` goes into checkpoints. ``load_state_dict`` continues from it after a resume and in a recovery, which
  begins a session. With several ranks, each rank accumulates its own values and saves them.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import torch

from torchhooks.common.errors import FetchError, NoRunYetError, add_note
from torchhooks.common.log import logger
from torchhooks.common.members import is_a, values_in_attributes
from torchhooks.common.memory import ordinary
from torchhooks.common.text import kind_of
from torchhooks.common.trees import as_snapshot, snapshot
from torchhooks.device.accelerator import has_float64, host
from torchhooks.device.readback import is_remote
from torchhooks.fetches.evaluation import (
    Caller,
    ComposedFetch,
    Evaluator,
    accumulated_parts,
    watched_names,
)
from torchhooks.fetches.names import Fetch, Value, describe
from torchhooks.progress.training_state import TrainingState

Number = float | torch.Tensor
"""A number of Python, or a tensor without dimensions."""

State = Mapping[str, Value]
"""What a checkpoint holds of one accumulator, or of all of them by their names."""

MOST_NUMBERS = 4096
"""How many numbers on the host wait at most until they are added up."""

_ROWS = 256  # the same on a device, in runs; more would hardly save launches


class RunningFetch(ComposedFetch):
    """A fetch of :func:`running_mean`, its siblings or :func:`latest`. Equal ones are the same fetch.

    ``op`` is ``"mean"``, ``"sum"``, ``"max"``, ``"min"`` or ``"latest"``.
    """

    accumulates = True

    def __init__(self, op: str, fetch: Fetch, weight: Fetch = None, reset: str = "report") -> None:
        self.op = op
        self.fetch = fetch
        self.weight = weight
        self.reset = reset
        self._key = op, _identity(fetch), _identity(weight), reset
        self.accumulated_parts = [self]
        if reset not in ("report", "epoch"):
            raise ValueError(f"{self!r}: reset is 'report' or 'epoch'")
        self._check(fetch)
        if weight is not None:
            self._check(weight)
        self.__name__ = self.text(lambda fetch: getattr(fetch, "__name__", fetch))

    def _check(self, fetch: Fetch) -> None:
        if isinstance(fetch, ComposedFetch) and not fetch.fits_every_run:
            function = self.text(repr).partition("(")[0]
            raise TypeError(
                f"{self!r}: {fetch!r} cannot be evaluated in every run; give what it is composed of, and compose the "
                f"result: scalar('loss', {function}('loss'))"
            )
        is_fetch = isinstance(fetch, (str, torch.Tensor, ComposedFetch)) or callable(fetch) or hasattr(fetch, "compute")
        if isinstance(fetch, (Mapping, list, tuple, set)) or not is_fetch:
            raise TypeError(f"{self!r}: give one fetch, such as 'loss'; for several values, create several of these")
        for name in watched_names(fetch):
            raise ValueError(
                f"{self!r}: {name!r} would have to be caught by a module hook in every run; return it from the step "
                "instead, under a name that does not end in :output, :input or :grad"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunningFetch) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return self.text(repr)

    def text(self, name: Callable[[Fetch], object]) -> str:
        """Return the call that creates this, in which ``name()`` stands for a fetch."""
        function = "latest" if self.op == "latest" else f"running_{self.op}"
        weight = "" if self.weight is None else f", weight={name(self.weight)}"
        reset = "" if self.reset == "report" else f", reset={self.reset!r}"
        return f"{function}({name(self.fetch)}{weight}{reset})"


def running_mean(fetch: Fetch, weight: Fetch = None, reset: str = "report") -> RunningFetch:
    """Return a fetch: the mean of ``fetch`` over all runs since the hook that requests it last did so.

    >>> hook = LoggingTensorHook({"last": "loss", "mean": running_mean("loss")}, timer=EverySteps(2))
    >>> with MonitoredLoop(lambda loss: loss, hooks=[hook]) as loop:  # a step that returns the loss it is given
    ...     for loss in loop.until_stop([3.0, 2.0, 1.0, 0.5]):
    ...         loss = loop.run(loss)
    last = 2.0, mean = 2.5
    last = 0.5, mean = 0.75 (... sec)

    Args:
        fetch: a name, a closure, an object with ``compute()`` or a tensor, whose value is a number or a tensor of one
            element. It is evaluated in every run.
        weight: a fetch of a number, such as the number of examples in the batch. The mean is the sum of the products of
            weight and value, divided by the sum of the weights. It is NaN if that is 0.
        reset: ``"report"``, or ``"epoch"`` for the epoch so far. A report does not reset the latter: it starts over
            with the first run after the end of the epoch.

    Returns:
        A fetch. Its value is a Python number if the values of ``fetch`` are, and otherwise a tensor, which is float32
        for integers and half precision. If one value is NaN, so is the mean.

    Raises:
        TypeError: ``fetch`` is not one fetch; from the run, its value is not one number.
        ValueError: ``fetch`` is the name of what a submodule receives or returns; ``reset`` is neither of the two.
        NoRunYetError: from ``session.run``, no run was made.
    """
    return RunningFetch("mean", fetch, weight, reset)


def running_sum(fetch: Fetch, weight: Fetch = None, reset: str = "report") -> RunningFetch:
    """Return a fetch: the sum of ``fetch`` over all runs since the last report.

    It is like :func:`torchhooks.running_mean` in everything else, with the same arguments and errors. With a
    ``weight``, it is the sum of the products of weight and value. The sum of integer tensors is int64.
    """
    return RunningFetch("sum", fetch, weight, reset)


def running_max(fetch: Fetch, reset: str = "report") -> RunningFetch:
    """Return a fetch: the maximum of ``fetch`` over all runs since the last report.

    It is like :func:`torchhooks.running_mean` in everything else, but has no weight.
    """
    return RunningFetch("max", fetch, reset=reset)


def running_min(fetch: Fetch, reset: str = "report") -> RunningFetch:
    """Return a fetch: the minimum of ``fetch`` over all runs since the last report.

    It is like :func:`torchhooks.running_max` in everything else.
    """
    return RunningFetch("min", fetch, reset=reset)


def latest(fetch: Fetch) -> RunningFetch:
    """Return a fetch: the value of ``fetch`` in the last run that had one, or NaN before there was one.

    It is for what the step returns in some runs only, such as the loss of a GAN's generator, which is trained in every
    fifth run. A name that does not exist in a run, and a value that is ``None``, leave the last value as it is.

    Args:
        fetch: a name, a closure, an object with ``compute()`` or a tensor, whose value is a number or a tensor of one
            element. NumPy values become tensors. A closure has no value in a run in which one of its names has none.

    Raises:
        TypeError: ``fetch`` is not one fetch; from the run, its value is not one number.
        ValueError: ``fetch`` is the name of what a submodule receives or returns.
    """
    return RunningFetch("latest", fetch)


def _identity(fetch: Fetch) -> Hashable:
    """Return the key of ``fetch``: the fetch itself, or its id if it has no hash or is a tensor."""
    if isinstance(fetch, torch.Tensor):  # == of tensors is another tensor
        return id(fetch)
    try:
        hash(fetch)
    except TypeError:
        return id(fetch)
    key: Hashable = fetch
    return key


def _saved_name(fetch: Fetch) -> str:
    """Return the name of ``fetch`` in checkpoints. An address or a line would differ in another process."""
    return str(getattr(fetch, "__qualname__", None) or (fetch if isinstance(fetch, str) else type(fetch).__name__))


class _Owner:
    """A hook and what it asks for."""

    def __init__(self, caller: Caller, name: str) -> None:
        self.caller = caller
        self.name = name
        self.accumulators: dict[RunningFetch, Accumulator | LatestValue] = {}


class RunningValues:
    """The running fetches of all hooks of one loop."""

    def __init__(self) -> None:
        self._session: TrainingState
        self.sources: list[NumberSource] = []
        """What is evaluated in every run; if it is empty, there is nothing to do."""
        # The sources of accumulators, by the identities of fetch and weight.
        self._shared: dict[tuple[Hashable, Hashable], NumberSource] = {}
        self._latest: dict[RunningFetch, LatestValue] = {}
        self._owners: dict[int, _Owner] = {}  # by the id of the hook, which may have no hash
        self._rows: dict[tuple[torch.device, torch.dtype], Rows] = {}
        self._by_name: dict[str, Accumulator | LatestValue] = {}  # by the names that checkpoints have
        self._of_epoch: list[Accumulator] = []
        self._restored: State = {}
        self._starts_over = False  # whether an epoch has ended, so that some of them have to
        self._has_looked = False  # whether the fetches of hooks were looked for

    def begin_session(self, session: TrainingState) -> None:
        """Forget what was accumulated, and evaluate fetches in ``session`` from now on."""
        self._session = session
        # A checkpoint is restored after this, and then calls load_state_dict() with what it has.
        self.load_state_dict(None)

    # -- what to accumulate -----------------------------------------------------------------------------------------

    def find_in(self, callers: Iterable[Caller]) -> None:
        """Accumulate the running fetches that the hooks of ``callers`` declare, or have in their attributes."""
        # The loop calls this once every hook has had its after_create_session, in which it may still set its
        # attributes.
        self._has_looked = True
        for caller in callers:
            wanted: list[RunningFetch] = accumulated_parts(caller.declared_fetches())
            for _, value in values_in_attributes(caller.hook):
                if is_a(type(value), ComposedFetch):  # isinstance() would ask for the __class__, perhaps a property
                    wanted += cast(ComposedFetch, value).accumulated_parts
            self._accumulate(self._owner(caller), wanted)

    def declare(self, caller: Caller, fetches: Fetch, run: int) -> None:
        """Accumulate the running fetches in ``fetches``, which a hook requests in the run with the number ``run``."""
        parts = accumulated_parts(fetches)
        if not parts:
            return
        added = self._accumulate(self._owner(caller), parts)
        if added and run > 1:
            logger.warning(
                "%s requests %s for the first time in run %d: it covers no earlier run. Keep it in an attribute of the "
                "hook, where the loop finds it before the first run",
                caller,
                ", ".join(map(repr, added)),
                run,
            )

    def _owner(self, caller: Caller) -> _Owner:
        hook = caller.hook
        owner = self._owners.get(id(hook))
        if owner is None:
            name = str(getattr(hook, "name", None) or type(hook).__name__)
            name = _unused(name, {owner.name for owner in self._owners.values()})
            owner = self._owners[id(hook)] = _Owner(caller, name)
        return owner

    def _accumulate(self, owner: _Owner, wanted: list[RunningFetch]) -> list[RunningFetch]:
        """Create the accumulators that ``owner`` does not have yet, and return their fetches."""
        added = [fetch for fetch in dict.fromkeys(wanted) if fetch not in owner.accumulators]
        if added:
            # What is waiting belongs to runs before the new ones, which share the sources.
            self._add_up()
        for fetch in added:
            create = self._latest_value if fetch.op == "latest" else self._new_accumulator
            owner.accumulators[fetch] = create(fetch, owner)
        return added

    def _new_accumulator(self, fetch: RunningFetch, owner: _Owner) -> Accumulator:
        source = self._source(fetch, fetch.fetch, fetch.weight, owner.caller)
        weights = None
        if fetch.op == "mean" and fetch.weight is not None:
            weights = self._source(fetch, fetch.weight, None, owner.caller)
        accumulator = Accumulator(fetch.op, source, weights, of_epoch=fetch.reset == "epoch")
        if fetch.reset == "epoch":
            self._of_epoch.append(accumulator)
        self._begin(accumulator, f"{owner.name}: {fetch.text(_saved_name)}")
        # The restored state may be that of an epoch that had ended when the checkpoint was saved.
        self._starts_over = self._starts_over or accumulator.sums.ended
        return accumulator

    def _source(self, asked: RunningFetch, fetch: Fetch, weight: Fetch, caller: Caller) -> NumberSource:
        key = _identity(fetch), _identity(weight)
        if key not in self._shared:
            self._shared[key] = NumberSource(fetch, weight, caller, asked.text(describe))
            self.sources.append(self._shared[key])
        return self._shared[key]

    def _latest_value(self, fetch: RunningFetch, owner: _Owner) -> LatestValue:
        if fetch not in self._latest:
            self._latest[fetch] = LatestValue(fetch.fetch, owner.caller, fetch.text(describe))
            self.sources.append(self._latest[fetch])
            self._begin(self._latest[fetch], fetch.text(_saved_name))
        return self._latest[fetch]

    def _begin(self, accumulator: Accumulator | LatestValue, name: str) -> None:
        """Register ``accumulator`` for checkpoints as ``name``, and load its restored state."""
        name = _unused(name, self._by_name)
        self._by_name[name] = accumulator
        accumulator.load_state_dict(self._restored.get(name))

    # -- every run --------------------------------------------------------------------------------------------------

    def add(
        self, outputs: Value, args: tuple[Value, ...], kwargs: Mapping[str, Value], evaluator: Evaluator | None = None
    ) -> bool:
        """Add the values of one run. ``evaluator`` is the run's, if a hook is due in it.

        Returns false: no hook has to be called because of them.
        """
        if self._starts_over:
            self._start_over()
        others: list[tuple[NumberSource, Value]] | None = None
        is_on_host = host.holds
        is_loss = is_dict = False
        if evaluator is None or not evaluator.feeds:  # a feed may have the name of an output
            is_loss, is_dict = type(outputs) is torch.Tensor, isinstance(outputs, dict)
        for source in self.sources:
            # Fast path for what most steps return: the loss, or a dict.
            name = source.name
            if is_dict and name in outputs:
                value = outputs[name]
            elif is_loss and name == "loss":
                value = outputs
            else:
                if evaluator is None:
                    evaluator = self._evaluator(outputs, args, kwargs)
                value = source.evaluate(evaluator)
            # Fast path for numbers on the host.
            if source.is_number:
                kind = type(value)
                if kind is torch.Tensor and is_on_host(value) and value.numel() == 1:
                    value, kind = value.item(), float  # on the host, so this waits for nothing
                if kind is float or kind is int:
                    source.numbers.append(value)
                    if len(source.numbers) >= MOST_NUMBERS:
                        source.add_up()
                    continue
            others = [] if others is None else others
            others.append((source, value))
        if others is not None:
            self._add_others(others)
        return False

    def _evaluator(self, outputs: Value, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> Evaluator:
        evaluator = Evaluator(self._session, outputs, inputs=partial(self._session.step_function.inputs, args, kwargs))
        evaluator.copies = False
        return evaluator

    def _add_others(self, others: list[tuple[NumberSource, Value]]) -> None:
        on_device: dict[tuple[torch.device, torch.dtype], list[tuple[NumberSource, torch.Tensor]]] = {}
        for source, value in others:
            try:
                number = source.add(value)
            except BaseException as error:
                add_note(error, f"torchhooks: in {source.asked}, which {source.caller} asked for")
                raise
            if number is not None:
                on_device.setdefault((number.device, number.dtype), []).append((source, number))
        for key, pairs in on_device.items():
            sources = [source for source, _ in pairs]
            rows = self._rows.get(key)
            # The columns have changed: a hook has asked later than others, or a value was on the host in the last run.
            if rows is None or rows.sources != sources:
                if rows is not None:
                    rows.add_up()
                rows = self._rows[key] = Rows(sources, pairs[0][1])
            rows.add([number for _, number in pairs])

    def epoch_ended(self) -> None:
        """Reset the values over the epoch in the next run. Until then, they cover the whole epoch."""
        for accumulator in self._of_epoch:
            accumulator.end_epoch()
        self._starts_over = bool(self._of_epoch)

    def _start_over(self) -> None:
        self._add_up()  # what is waiting belongs to the epoch that has ended
        for accumulator in self._of_epoch:
            accumulator.start_over_if_ended()
        self._starts_over = False

    def _add_up(self) -> None:
        for rows in self._rows.values():
            rows.add_up()
        for source in self.sources:
            source.add_up()

    # -- reports and checkpoints ------------------------------------------------------------------------------------

    def report(self, fetch: Fetch, caller: Caller) -> Number:
        """Return the value of ``fetch``, a running fetch, for the hook of ``caller``, and start over.

        Raises:
            NoRunYetError: no run was made.
            FetchError: ``caller`` has no hook for which ``fetch`` is accumulated.
        """
        owner = self._owners.get(id(caller.hook))
        accumulator = None if owner is None else owner.accumulators.get(fetch)
        if accumulator is None:
            raise FetchError(
                f"{caller} asked for {fetch!r}, which is accumulated from run to run for a hook: give it to one, "
                f"such as LoggingTensorHook([{fetch!r}], every_n_steps=100). A hook of your own requests it in "
                "before_run, with SessionRunArgs, or has it in an attribute and passes itself, who=self"
            )
        # Nothing of a latest value waits to be added up.
        if isinstance(accumulator, Accumulator):
            self._add_up()
        value = accumulator.report()
        if value is None:
            raise NoRunYetError(f"{caller} asked for {fetch!r}, but no run was made.")
        return value

    def put_back(self, hook: object) -> None:
        """Take back what ``hook`` was reported in the current run."""
        owner = self._owners.get(id(hook))
        for accumulator in owner.accumulators.values() if owner is not None else ():
            if isinstance(accumulator, Accumulator):
                accumulator.put_back()

    def state_dict(self) -> State | None:
        """Return what has been accumulated since the reports, by hook and fetch; ``None`` if there is nothing."""
        self._add_up()
        # A saver saves a restored session before the hooks are looked at: what was restored is not lost then.
        state = {} if self._has_looked else dict(self._restored)
        return {**state, **{name: each.state_dict() for name, each in self._by_name.items()}} or None

    def load_state_dict(self, state: State | None) -> None:
        """Continue from ``state``. Values that it does not have start over."""
        self._restored = {} if state is None else state
        # What waits belongs to runs that the restored state does not have, and that a recovery makes again.
        self._rows.clear()
        for source in self.sources:
            source.numbers = []
        for name, accumulator in self._by_name.items():
            accumulator.load_state_dict(self._restored.get(name))
        self._starts_over = any(accumulator.sums.ended for accumulator in self._of_epoch)


def _unused(name: str, used: Container[str]) -> str:
    """Return ``name``, with a number after it if it is one of those that are ``used``."""
    number, unused = 1, name
    while unused in used:
        number += 1
        unused = f"{name} {number}"
    return unused


# -- adding up --------------------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """The sums over the runs since a report. Immutable: reported, saved and put back as they are."""

    total: Number | None = None
    """The sum, the maximum or the minimum; ``None`` if there was no run."""
    weight: Number | None = None
    """The sum of the weights, of a mean that has some."""
    runs: int = 0
    """How many runs."""
    ended: bool = False
    """Whether their epoch has ended, so that the next run starts over."""


NO_RUNS = Sums()


class Accumulator:
    """A running mean, sum, maximum or minimum for one hook: of ``source``, divided by ``weights`` for a mean with some.

    With ``of_epoch``, it is over the epoch so far, and a report does not reset it.
    """

    def __init__(
        self, op: str, source: NumberSource, weights: NumberSource | None = None, of_epoch: bool = False
    ) -> None:
        self._op = op
        self._source = source
        self._of_epoch = of_epoch
        self._operation = "sum" if op == "mean" else op
        self.sums = NO_RUNS
        self._reported = self._before_report = NO_RUNS
        source.receivers.append((self._operation, self._add))
        if weights is not None:
            weights.receivers.append(("sum", self._add_weight))

    def _add(self, result: Number, runs: int) -> None:
        total = self.sums.total
        if total is not None:
            result = _OPERATIONS[self._operation].of_two(total, result)
        self.sums = self.sums._replace(total=result, runs=self.sums.runs + runs)

    def _add_weight(self, result: Number, runs: int) -> None:
        weight = self.sums.weight
        self.sums = self.sums._replace(weight=result if weight is None else weight + result)

    def report(self) -> Number | None:
        """Return the value, and start over unless it is over the epoch.

        Without a run since the last report, return that again; ``None`` if there was none.
        """
        if self.sums.runs:
            self._reported, self._before_report = self.sums, self._reported
            if not self._of_epoch:
                self.sums = NO_RUNS
        total, weight, runs, _ = self._reported
        if total is None:
            return None
        if self._op == "mean":
            total = _ratio(total, runs if weight is None else weight)
        return self._source.as_value(total, self._op)

    def put_back(self) -> None:
        """Continue as if the report of the current run had not been made."""
        # The run itself was added before any report. So if there are runs, nothing was reported in the current one.
        if not self._of_epoch and not self.sums.runs:
            self.sums, self._reported = self._reported, self._before_report

    def end_epoch(self) -> None:
        """Note that the epoch so far has ended: :meth:`start_over_if_ended` drops its sums, in the next run."""
        self.sums = self.sums._replace(ended=True)

    def start_over_if_ended(self) -> None:
        if self.sums.ended:
            self.sums = NO_RUNS

    def state_dict(self) -> State:
        # With the dtype: a number that was loaded does not tell whether the hook gets a tensor, nor of which dtype.
        return {**self.sums._asdict(), "dtype": self._source.dtype}

    def load_state_dict(self, state: State | None) -> None:
        self.sums = NO_RUNS
        if state is None or not state["runs"]:
            return
        # A number on the host can be added to one on any device without waiting.
        self.sums = Sums(_as_python(state["total"]), _as_python(state["weight"]), state["runs"], state["ended"])
        if self._source.dtype is None:
            self._source.dtype = state["dtype"]


class NumberSource:
    """A number in each run: the value of a fetch, or its product with a weight.

    It is evaluated once in a run, however many hooks ask for its mean, sum, maximum or minimum. Errors name the first
    of them, ``caller``, and what it ``asked`` for.
    """

    def __init__(self, fetch: Fetch, weight: Fetch, caller: Caller, asked: str) -> None:
        self.fetch = fetch
        self.weight = weight
        self.caller = caller
        self.asked = asked
        self.name = fetch if isinstance(fetch, str) and weight is None else None
        """The name under which the outputs of the step may have the value."""
        self.is_number = False
        """Whether the last value was a number on the host: a fast path."""
        self.numbers: list[float] = []
        """The numbers on the host that wait to be added up."""
        self.dtype: torch.dtype | None = None
        """The dtype of the first value that is a tensor."""
        self.receivers: list[tuple[str, Callable[[Number, int], None]]] = []
        """What gets the result of which operation, and the number of runs, when the numbers are added up."""

    @property
    def operations(self) -> set[str]:
        return {operation for operation, _ in self.receivers}

    def evaluate(self, evaluator: Evaluator) -> Value:
        value = evaluator.evaluate_uncopied(self.fetch, self.caller)
        if self.weight is None:
            return value
        weight = evaluator.evaluate_uncopied(self.weight, self.caller)
        return _in_wide_dtype(as_number(value, self.asked)) * _in_wide_dtype(as_number(weight, self.asked))

    def add(self, value: object) -> torch.Tensor | None:
        """Let the value of one run wait on the host; return it if it is on a device, for :class:`Rows`."""
        number = as_number(value, self.asked)
        self.is_number = False
        if isinstance(number, torch.Tensor):
            if self.dtype is None:
                self.dtype = number.dtype
            if is_remote(number):
                return number
            number = number.item()
        self.is_number = getattr(value, "layout", torch.strided) is torch.strided  # others have no item()
        self.numbers.append(number)
        if len(self.numbers) >= MOST_NUMBERS:
            self.add_up()
        return None

    def add_up(self) -> None:
        """Add up the numbers that wait on the host."""
        if self.numbers:
            waiting, self.numbers = self.numbers, []
            self.distribute({each: _OPERATIONS[each].of_numbers(waiting) for each in self.operations}, len(waiting))

    def distribute(self, results: Mapping[str, Number], runs: int) -> None:
        """Add the ``results`` of some ``runs``, by operation, to the accumulators."""
        for operation, receive in self.receivers:
            receive(results[operation], runs)

    def as_value(self, result: Number, op: str) -> Number:
        """Return the ``result`` of ``op`` with the dtype that a hook gets."""
        dtype = self.dtype
        if dtype is None:
            return result
        if op == "mean" or (op == "sum" and dtype.is_floating_point):
            dtype = _float32_or_wider(dtype)
        elif op == "sum":
            dtype = torch.int64
        value = result if isinstance(result, torch.Tensor) else torch.tensor(result, device="cpu")
        return as_snapshot(value.to(dtype))


class LatestValue(NumberSource):
    """The value of a fetch in the last run that had one. It is the same for all hooks, and no report resets it."""

    def __init__(self, fetch: Fetch, caller: Caller, asked: str) -> None:
        super().__init__(fetch, None, caller, asked)
        # is_number stays false, so that RunningValues.add() does not put the value into the list, but calls add().
        self._value: Number = math.nan

    def evaluate(self, evaluator: Evaluator) -> Value:
        return evaluator.evaluate_if_there(self.fetch, self.caller)

    def add(self, value: object) -> None:
        """Keep a copy of ``value``, where it is, unless it is ``None``."""
        if value is not None:
            self._value = snapshot(as_number(value, self.asked))

    def report(self) -> Number:
        return self._value

    def state_dict(self) -> State:
        return {"value": self._value}

    def load_state_dict(self, state: State | None) -> None:
        self._value = math.nan if state is None else state["value"]


class Rows:
    """The numbers of several sources on one device, in one row for each run."""

    def __init__(self, sources: Sequence[NumberSource], like: torch.Tensor) -> None:
        self.sources = sources
        self._buffer = torch.empty(_ROWS, len(sources), dtype=like.dtype, device=like.device)
        # All views at once, because an index in every run would make a new one each time.
        self._rows = self._buffer.unbind()
        self._used = 0

    def add(self, values: list[torch.Tensor]) -> None:
        """Copy the ``values`` of one run, with one launch."""
        row = self._rows[self._used]
        if len(values) == 1:
            row.copy_(values[0])
        else:
            torch.stack(values, out=row)
        self._used += 1
        if self._used == _ROWS:
            self.add_up()

    def add_up(self) -> None:
        if not self._used:
            return
        rows = self._buffer[: self._used]
        operations = {operation for source in self.sources for operation in source.operations}
        results = {each: _OPERATIONS[each].of_rows(rows) for each in operations}
        for index, source in enumerate(self.sources):
            source.distribute({each: results[each][index] for each in source.operations}, self._used)
        self._used = 0


def as_number(value: Value, asked: str) -> Number:
    """Return ``value``, a number, or a tensor of one element, detached and without dimensions.

    Raises:
        TypeError: it is neither; the message begins with what was ``asked`` for.
    """
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        value = torch.as_tensor(value.astype(np.float64) if value.dtype.itemsize > 8 else value)  # of a long double
    if hasattr(value, "full_tensor"):  # of a DTensor, whose full value is a collective call
        if not all(placement.is_replicate() for placement in value.placements):
            raise TypeError(
                f"{asked} is over a DTensor, which has a part on each rank: give the part of this rank, "
                "lambda loss: loss.to_local(), for example"
            )
        value = value.to_local()
    is_real = isinstance(value, torch.Tensor) and not (value.is_complex() or value.is_quantized or value.is_nested)
    if is_real and value.numel() == 1:
        return (value.detach() if value.layout is torch.strided else ordinary(value)).reshape(())
    is_number = isinstance(value, numbers.Real)
    if not is_number:
        raise TypeError(f"{asked} is over {kind_of(value)}: give one number, such as lambda losses: losses.mean()")
    number: Number = value
    return number


def _as_python(number: Number | None) -> float | None:
    return number.item() if isinstance(number, torch.Tensor) else number


# -- dtypes -------------------------------------------------------------------------------------------------------


def _float32_or_wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _in_wide_dtype(number: Number) -> Number:
    """Return ``number``; a tensor in a dtype in which a product does not overflow."""
    if not isinstance(number, torch.Tensor):
        return number
    return number.to(_float32_or_wider(number.dtype) if number.dtype.is_floating_point else torch.int64)


# -- operations ---------------------------------------------------------------------------------------------------


class _Operation(NamedTuple):
    """How the numbers of several runs become one."""

    of_numbers: Callable[[list[float]], float]
    of_rows: Callable[[torch.Tensor], torch.Tensor]  # of each column of a matrix, whose rows are runs
    of_two: Callable[[Number, Number], Number]


def _sum_of_rows(rows: torch.Tensor) -> torch.Tensor:
    if not rows.is_floating_point():
        return rows.sum(0, dtype=torch.int64)
    # A long period of half precision would lose the small numbers, or overflow. The device mps has no float64.
    return rows.sum(0, dtype=torch.float64 if has_float64(rows.device) else torch.float32)


def _extreme(
    function: Callable[[list[float]], float],
    of_rows: Callable[..., torch.Tensor],
    of_tensors: Callable[..., torch.Tensor],
) -> _Operation:
    """Return the operation of Python's ``max`` or ``min``, and of the functions of torch that do the same."""

    def of_numbers(values: list[float]) -> float:
        # With NaN, the result of Python's functions depends on the order.
        return math.nan if any(value != value for value in values) else function(values)

    def of_two(a: Number, b: Number) -> Number:
        if isinstance(a, torch.Tensor):
            return of_tensors(a, b if isinstance(b, torch.Tensor) else torch.full_like(a, b))
        return of_tensors(torch.full_like(b, a), b) if isinstance(b, torch.Tensor) else of_numbers([a, b])

    return _Operation(of_numbers, partial(of_rows, dim=0), of_two)


_OPERATIONS = {
    "sum": _Operation(sum, _sum_of_rows, operator.add),
    "max": _extreme(max, torch.amax, torch.maximum),
    "min": _extreme(min, torch.amin, torch.minimum),
}


def _ratio(total: Number, divisor: Number) -> Number:
    # All weights are 0. Python would raise an error, where a tensor gives NaN.
    if not isinstance(divisor, torch.Tensor) and not divisor:
        return total * math.nan
    return total / divisor
