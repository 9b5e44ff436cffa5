"""Running fetches: the mean, the sum, the maximum or the minimum of a fetch over all runs since a hook's last report.

They can also be over the epoch so far. :func:`latest` is the value of the last run that had one.

The loop adds the value of every run to an accumulator, without calling the hook. A value on a device stays there: it is
copied into the row of a buffer, one launch in a run for all numbers of one dtype, and the rows are added up when a hook
reports. So the host never waits, and the value of a CUDA graph is read before the next replay overwrites it. A number
on the host is added up on the host.

======================  ===============================  =======================================================
value                   accumulated in                   value of the running fetch
======================  ===============================  =======================================================
a Python number         Python numbers                   a Python number
a tensor, one element   float64 (int64, complex128)      a tensor of its shape; float32 for half precision
a tensor, more of them  float32 or its own, if wider     a tensor of its shape; float32 for half precision
======================  ===============================  =======================================================

The mean of integers is float32, their sum int64. A maximum or minimum has the dtype of the value. NumPy values count as
tensors. A device without float64, such as ``mps``, uses float32. NaN in one run makes each of the four NaN. A weight is
multiplied with the value where the value is, and the weights of a mean are added up like any value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from torchhooks.common.errors import FetchError, NoRunYetError, add_note
from torchhooks.common.log import logger
from torchhooks.common.requester import Requester
from torchhooks.device.host import host
from torchhooks.device.readback import is_remote
from torchhooks.fetches.accumulators import (
    KEPT,
    MOST_NUMBERS,
    Accumulator,
    LatestSource,
    LatestValue,
    Rows,
    Source,
    WeightedSource,
    add_tensors,
)
from torchhooks.fetches.fetch import ComposedFetch, Evaluator, accumulated_parts, watched_names
from torchhooks.fetches.step import Step
from torchhooks.position.progress import Progress

_MOST_ITEMS = 256  # a longer container in an attribute of a hook is data, not fetches
_DEPTH = 4


class AccumulatedFetch(ComposedFetch):
    """A fetch that is evaluated in every run. Equal ones are the same fetch."""

    accumulates = True

    def __init__(self, function: str, fetch: Any, *options: Any, shown_options: str = "") -> None:
        self._function = function
        self.fetch = fetch
        self._shown_options = shown_options
        self._key = function, _identity(fetch), *options
        self.accumulated_parts = [self]
        self._check(fetch)
        self.__name__ = f"{function}({getattr(fetch, '__name__', fetch)}{shown_options})"

    def _check(self, fetch: Any) -> None:
        if isinstance(fetch, ComposedFetch) and not fetch.fits_every_run:
            raise TypeError(
                f"{self!r}: {fetch!r} cannot be evaluated in every run; give what it is composed of, and compose the "
                f"result: scalar('loss', {self._function}('loss'))"
            )
        if isinstance(fetch, (Mapping, list, tuple, set)) or not _is_fetch(fetch):
            raise TypeError(f"{self!r}: give one fetch, such as 'loss'; for several values, create several of these")
        for name in watched_names(fetch):
            raise ValueError(
                f"{self!r}: {name!r} would have to be caught by a module hook in every run; return it from the step "
                "instead, under a name that does not end in :output, :input or :grad"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AccumulatedFetch) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"{self._function}({self.fetch!r}{self._shown_options})"


class RunningFetch(AccumulatedFetch):
    """What :func:`running_mean` and its siblings return."""

    def __init__(self, op: str, fetch: Any, reset: str, weight: Any = None) -> None:
        self.op = op
        self.weight = weight
        self.of_epoch = reset == "epoch"
        shown_options = "" if weight is None else f", weight={weight!r}"
        shown_options += "" if reset == "report" else f", reset={reset!r}"
        if reset not in ("report", "epoch"):
            raise ValueError(f"running_{op}({fetch!r}{shown_options}): reset is 'report' or 'epoch'")
        super().__init__(f"running_{op}", fetch, _identity(weight), reset, shown_options=shown_options)
        if weight is not None:
            self._check(weight)


class LatestFetch(AccumulatedFetch):
    """What :func:`latest` returns."""


def running_mean(fetch: Any, weight: Any = None, reset: str = "report") -> RunningFetch:
    """Return a fetch: the mean of ``fetch`` over all runs since the hook that requests it last did so.

    >>> hook = LoggingTensorHook({"last": "loss", "mean": running_mean("loss")}, timer=EverySteps(2))
    >>> with MonitoredLoop(lambda loss: loss, hooks=[hook]) as loop:  # a step that returns the loss it is given
    ...     for loss in loop.until_stop([3.0, 2.0, 1.0, 0.5]):
    ...         loss = loop.run(loss)
    last = 2.0, mean = 2.5
    last = 0.5, mean = 0.75 (... sec)

    A hook with a period of its own, such as ``every_n_iter=100``, reports in its first run, so that its first mean is
    over one run. With ``timer=EverySteps(100)``, each report is a mean of 100 runs.

    Each hook has a mean of its own. It includes the run in which it is requested, and starts over after it, unless the
    hook calls ``run_context.not_reported()``. The first one begins with the first run: the loop finds the running
    fetches that are in attributes of a hook, also in lists, tuples, dicts and ``SessionRunArgs``. A fetch that it first
    sees in a request counts from that run.

    Batches of different sizes need a ``weight``, and a mean over the epoch so far ``reset="epoch"``:

    >>> mean = running_mean("loss", weight=lambda inputs: len(inputs), reset="epoch")
    >>> hook = LoggingTensorHook({"epoch": "epoch", "mean": mean}, timer=EverySteps(1))
    >>> with MonitoredLoop(lambda inputs: sum(inputs) / len(inputs), hooks=[hook]) as loop:
    ...     for epoch in loop.until_stop(range(2)):
    ...         for inputs in loop.until_stop([[3.0, 1.0, 2.0], [6.0]]):
    ...             loss = loop.run(inputs)
    epoch = 0, mean = 2.0
    epoch = 0, mean = 3.0 (... sec)
    epoch = 1, mean = 2.0 (... sec)
    epoch = 1, mean = 3.0 (... sec)

    Means are kept in checkpoints, so that a resumed training run reports the same. After a recovery, runs that are made
    again are not counted twice. In ``end``, ``session.run_available(fetch, who=self)`` returns the mean since the last
    report, or the last report if no run was made since.

    Args:
        fetch: a name, a closure, an object with ``compute()`` or a tensor, whose value is a number or a tensor. It is
            evaluated in every run.
        weight: a fetch, such as the number of examples in the batch, whose value is a number, or a tensor with the
            shape of the value. The mean is the sum of the products of weight and value, divided by the sum of the
            weights. It is NaN if that is 0.
        reset: ``"report"``, or ``"epoch"`` for the epoch so far. A report does not reset the latter: it starts over
            with the first run after the end of the epoch, so that the code after the loop over the data still gets the
            mean of the epoch.

    Returns:
        A fetch. Its value is a Python number if the values of ``fetch`` are, and otherwise a tensor of their shape,
        which is float32 for integers and half precision. If one value is NaN, so is the mean.

    Raises:
        TypeError: ``fetch`` is not one fetch; from the run, its value is neither a number nor a tensor.
        ValueError: ``fetch`` is the name of what a submodule receives or returns; ``reset`` is neither of the two.
        NoRunYetError: from ``session.run``, no run was made.
    """
    return RunningFetch("mean", fetch, reset, weight)


def running_sum(fetch: Any, weight: Any = None, reset: str = "report") -> RunningFetch:
    """Return a fetch: the sum of ``fetch`` over all runs since the last report.

    >>> hook = LoggingTensorHook({"examples": running_sum(lambda inputs: len(inputs))}, timer=EverySteps(4))
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    examples = 64
    examples = 64 (... sec)

    It is like :func:`torchhooks.running_mean` in everything else, with the same arguments and errors. With a
    ``weight``, it is the sum of the products of weight and value. The sum of integer tensors is int64.
    """
    return RunningFetch("sum", fetch, reset, weight)


def running_max(fetch: Any, reset: str = "report") -> RunningFetch:
    """Return a fetch: the maximum of ``fetch`` over all runs since the last report.

    >>> hook = LoggingTensorHook({"highest loss": running_max("loss")}, timer=EverySteps(2))
    >>> with MonitoredLoop(lambda loss: loss, hooks=[hook]) as loop:  # a step that returns the loss it is given
    ...     for loss in loop.until_stop([2.0, 3.0, 1.0, 0.5]):
    ...         loss = loop.run(loss)
    highest loss = 3.0
    highest loss = 1.0 (... sec)

    It is like :func:`torchhooks.running_mean` in everything else, but has no weight, and takes real numbers only. The
    maximum of tensors with several elements is taken element by element, and has their dtype.
    """
    return RunningFetch("max", fetch, reset)


def running_min(fetch: Any, reset: str = "report") -> RunningFetch:
    """Return a fetch: the minimum of ``fetch`` over all runs since the last report.

    >>> hook = LoggingTensorHook({"lowest loss": running_min("loss")}, timer=EverySteps(2))
    >>> with MonitoredLoop(lambda loss: loss, hooks=[hook]) as loop:  # a step that returns the loss it is given
    ...     for loss in loop.until_stop([2.0, 3.0, 1.0, 0.5]):
    ...         loss = loop.run(loss)
    lowest loss = 2.0
    lowest loss = 0.5 (... sec)

    It is like :func:`torchhooks.running_max` in everything else.
    """
    return RunningFetch("min", fetch, reset)


def latest(fetch: Any) -> LatestFetch:
    """Return a fetch: the value of ``fetch`` in the last run that had one, or NaN before there was one.

    It is for what the step returns in some runs only, such as the loss of a GAN's generator, which is trained in every
    fifth run. A name that does not exist in a run, and a value that is ``None``, leave the last value as it is.

    >>> def step(number):
    ...     return {"loss": number, "g_loss": number / 2} if number % 2 == 0 else {"loss": number}
    >>> hook = LoggingTensorHook({"loss": "loss", "g_loss": latest("g_loss")}, timer=EverySteps(1))
    >>> with MonitoredLoop(step, hooks=[hook]) as loop:
    ...     for number in loop.until_stop([1.0, 2.0, 3.0]):
    ...         outputs = loop.run(number)
    loss = 1.0, g_loss = nan
    loss = 2.0, g_loss = 1.0 (... sec)
    loss = 3.0, g_loss = 1.0 (... sec)

    Like :func:`torchhooks.running_mean`, it is evaluated in every run, without calling the hook, and is found in the
    attributes of the hook. The value is a copy, which stays on its device, and is kept in checkpoints.

    Args:
        fetch: a name, a closure, an object with ``compute()`` or a tensor, whose value is a number, a tensor or a
            string. NumPy values become tensors. A closure has no value in a run in which one of its names has none.

    Raises:
        TypeError: ``fetch`` is not one fetch; from the run, its value is none of these.
        ValueError: ``fetch`` is the name of what a submodule receives or returns.
    """
    return LatestFetch("latest", fetch)


def _is_fetch(value: Any) -> bool:
    return isinstance(value, (str, torch.Tensor, ComposedFetch)) or callable(value) or hasattr(value, "compute")


def _identity(fetch: Any) -> Any:
    """Return what is equal for equal fetches: the fetch itself, or its id if it has no hash or is a tensor."""
    if isinstance(fetch, torch.Tensor):  # == of tensors is another tensor
        return id(fetch)
    try:
        hash(fetch)
    except TypeError:
        return id(fetch)
    return fetch


def _name(fetch: Any) -> str:
    """Return what stands for ``fetch`` in a checkpoint."""
    return str(getattr(fetch, "__qualname__", None) or (fetch if isinstance(fetch, str) else type(fetch).__name__))


class _Owner:
    """A hook and its accumulators."""

    def __init__(self, requester: Requester, name: str) -> None:
        self.requester = requester
        self.name = name
        self.accumulators: dict[AccumulatedFetch, Accumulator | LatestValue] = {}


class AccumulatedValues:
    """The running fetches of all hooks of one loop."""

    def __init__(self) -> None:
        self._evaluator: Callable[[Any, Any, Any], Evaluator]
        self._progress = Progress()
        self.sources: list[Source] = []
        """What is accumulated in every run; if it is empty, there is nothing to do."""
        self._by_fetch: dict[Any, Source] = {}
        self._owners: dict[int, _Owner] = {}  # by the id of the hook, which may have no hash
        self._rows: dict[tuple[torch.device, torch.dtype], Rows] = {}
        self._names: set[str] = set()
        self._restored: Mapping[str, Any] = {}
        self._starts_over = False  # whether an accumulator may have to, after a recovery or the end of an epoch
        self._has_looked = False  # whether the fetches of hooks were looked for

    def begin_session(self, session: object, progress: Progress, step: Step) -> None:
        """Forget what was accumulated, and evaluate fetches in ``session`` from now on."""

        def evaluator(outputs: Any, args: Any, kwargs: Any) -> Evaluator:
            evaluator = Evaluator(session, outputs, inputs=partial(step.inputs, args, kwargs))
            evaluator.copies = False
            return evaluator

        self._evaluator, self._progress = evaluator, progress
        self.load_state_dict(None)

    # -- what to accumulate -----------------------------------------------------------------------------------------

    def find_in(self, requesters: Iterable[Requester]) -> None:
        """Accumulate the running fetches that are in the attributes of the hooks of ``requesters``."""
        self._has_looked = True
        for owner in [self._owner(requester) for requester in requesters]:
            found: list[AccumulatedFetch] = []
            for value in self._attributes(owner.requester.hook):
                if isinstance(value, ComposedFetch):
                    found += value.accumulated_parts
                else:
                    self._owners[id(value)] = owner  # a hook that this one calls
            self._accumulate(owner, found)

    def _attributes(self, hook: object) -> Iterator[Any]:
        """Yield the composed fetches in the attributes of ``hook``, the hooks that only it has, and their fetches."""
        # Only containers of Python's own types are searched: looking into others could run code. The depth is limited
        # because a list may contain itself.
        values = [*getattr(hook, "__dict__", {}).values()]
        for _ in range(_DEPTH):
            inside: list[Any] = []
            for value in values:
                if isinstance(value, ComposedFetch):
                    yield value
                elif isinstance(value, tuple) or type(value) in (list, dict):
                    if len(value) <= _MOST_ITEMS:
                        inside += value.values() if type(value) is dict else value
                elif hasattr(type(value), "before_run") and id(value) not in self._owners:
                    yield value
                    inside += getattr(value, "__dict__", {}).values()
            values = inside

    def declare(self, requester: Requester, fetches: Any, run: int) -> None:
        """Accumulate the running fetches in ``fetches``, which a hook requests in the run with the number ``run``."""
        parts = accumulated_parts(fetches)
        if not parts:
            return
        added = self._accumulate(self._owner(requester), parts)
        if added and run > 1:
            logger.warning(
                "%s requests %s for the first time in run %d: it covers no earlier run. Keep it in an attribute of the "
                "hook, where the loop finds it before the first run",
                requester,
                ", ".join(map(repr, added)),
                run,
            )

    def _owner(self, requester: Requester) -> _Owner:
        hook = requester.hook
        owner = self._owners.get(id(hook))
        if owner is None:
            name = getattr(hook, "name", None) or type(hook).__name__
            owner = self._owners[id(hook)] = _Owner(requester, self._unused(str(name)))
        return owner

    def _accumulate(self, owner: _Owner, wanted: list[AccumulatedFetch]) -> list[AccumulatedFetch]:
        """Create the accumulators that ``owner`` does not have yet, and return their fetches."""
        added = [fetch for fetch in dict.fromkeys(wanted) if fetch not in owner.accumulators]
        if added:
            self._take()  # what is waiting does not belong to the new ones
        for fetch in added:
            owner.accumulators[fetch] = self._new_accumulator(fetch, owner)
        return added

    def _new_accumulator(self, fetch: AccumulatedFetch, owner: _Owner) -> Accumulator | LatestValue:
        value, requester = fetch.fetch, owner.requester
        if not isinstance(fetch, RunningFetch):
            source = self._source(("latest", _identity(value)), partial(LatestSource, value, requester))
            latest_value = LatestValue(source, self._unused(f"{owner.name}: latest({_name(value)})"))
            self._begin(latest_value)
            return latest_value
        name = f"running_{fetch.op}({_name(value)}"
        if fetch.weight is None:
            source = self._source(_identity(value), partial(Source, value, requester))
        else:
            name += f", weight={_name(fetch.weight)}"
            key = "weighted", _identity(value), _identity(fetch.weight)
            source = self._source(key, partial(WeightedSource, value, fetch.weight, requester))
        name = f"{owner.name}: {name}{', of the epoch' if fetch.of_epoch else ''})"
        weights = None
        if fetch.op == "mean" and fetch.weight is not None:
            of_weights = self._source(_identity(fetch.weight), partial(Source, fetch.weight, requester))
            weights = Accumulator("sum", of_weights, self._unused(f"{name}: weights"), of_epoch=fetch.of_epoch)
            self._begin(weights)
        accumulator = Accumulator(fetch.op, source, self._unused(name), weights=weights, of_epoch=fetch.of_epoch)
        self._begin(accumulator)
        return accumulator

    def _source(self, key: Any, new: Callable[[], Any]) -> Any:
        if key not in self._by_fetch:
            self._by_fetch[key] = new()
            self.sources.append(self._by_fetch[key])
        return self._by_fetch[key]

    def _begin(self, accumulator: Any) -> None:
        """Add ``accumulator`` to its source, with its state out of the checkpoint."""
        accumulator.source.accumulators.append(accumulator)
        accumulator.load_state_dict(self._restored.get(accumulator.name), self._progress.global_step)
        self._starts_over = self._starts_over or accumulator.ended

    def _unused(self, name: str) -> str:
        """Return ``name``, or with a number after it if it is taken."""
        number, unused = 1, name
        while unused in self._names:
            number += 1
            unused = f"{name} {number}"
        self._names.add(unused)
        return unused

    # -- every run --------------------------------------------------------------------------------------------------

    def add(self, outputs: Any, args: Any, kwargs: Any, evaluator: Evaluator | None = None) -> bool:
        """Add the values of one run. ``evaluator`` is the run's, if a hook is due in it.

        Returns false: no hook has to be called because of them.
        """
        if self._starts_over:
            self._start_over()
        others: list[tuple[Source, Any]] | None = None
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
            if source.is_number:
                kind = type(value)
                if kind is torch.Tensor and is_on_host(value) and value.numel() == 1:
                    value = value.item()  # on the host, so this waits for nothing
                elif kind is not float and kind is not int:
                    others = [] if others is None else others
                    others.append((source, value))
                    continue
                source.numbers.append(value)
                if len(source.numbers) >= MOST_NUMBERS:
                    source.take()
            else:
                others = [] if others is None else others
                others.append((source, value))
        if others is not None:
            self._add_others(others)
        return False

    def _add_others(self, others: list[tuple[Source, Any]]) -> None:
        on_device: dict[tuple[torch.device, torch.dtype], list[tuple[Source, torch.Tensor]]] = {}
        large: dict[tuple[torch.device, torch.dtype], list[tuple[Source, torch.Tensor]]] = {}
        source = others[0][0]
        try:
            for source, value in others:
                value = source.checked(value)
                if not isinstance(value, torch.Tensor):
                    if value is KEPT:
                        continue
                    source.numbers.append(value)
                elif value.numel() != 1:
                    large.setdefault((value.device, value.dtype), []).append((source, value))
                elif is_remote(value):
                    on_device.setdefault((value.device, value.dtype), []).append((source, value))
                else:
                    source.numbers.append(value.item())
                source.is_number = bool(source.numbers)
                if len(source.numbers) >= MOST_NUMBERS:
                    source.take()
        except BaseException as error:
            add_note(error, f"torchhooks: in {source.asked}, which {source.requester} asked for")
            raise
        for key, pairs in on_device.items():
            sources = [source for source, _ in pairs]
            rows = self._rows.get(key)
            if rows is None or rows.sources != sources:
                if rows is not None:
                    rows.take()
                rows = self._rows[key] = Rows(sources, pairs[0][1])
            rows.add([value for _, value in pairs])
        for pairs in large.values():
            add_tensors(pairs)

    def epoch_ended(self) -> None:
        """Let what is over the epoch so far start over with the next run. Until then, it is over the whole epoch."""
        for accumulator in self._accumulators():
            if accumulator.of_epoch:
                accumulator.ended = self._starts_over = True

    def _start_over(self) -> None:
        """Start over where an epoch has ended, or the loop has made all runs again that were reported."""
        step = self._progress.global_step
        waiting = [accumulator for accumulator in self._accumulators() if accumulator.made_again or accumulator.ended]
        over = [accumulator for accumulator in waiting if accumulator.ended or step > accumulator.reported_at]
        if over:
            self._take()
        for accumulator in over:
            accumulator.reset()
        self._starts_over = any(accumulator.made_again for accumulator in waiting)

    def _take(self) -> None:
        for rows in self._rows.values():
            rows.take()
        for source in self.sources:
            source.take()

    # -- reports and checkpoints ------------------------------------------------------------------------------------

    def report(self, fetch: Any, requester: Requester) -> Any:
        """Return the value of ``fetch``, a running fetch, for the hook of ``requester``, and start over.

        Raises:
            NoRunYetError: no run was made.
            FetchError: ``requester`` has no hook for which ``fetch`` is accumulated.
        """
        owner = self._owners.get(id(requester.hook))
        accumulator = None if owner is None else owner.accumulators.get(fetch)
        if accumulator is None:
            raise FetchError(
                f"{requester} asked for {fetch!r}, which is accumulated from run to run for a hook: give it to one, "
                f"such as LoggingTensorHook([{fetch!r}], every_n_steps=100). A hook of your own requests it in "
                "before_run, with SessionRunArgs, or has it in an attribute and passes itself, who=self"
            )
        if not isinstance(accumulator, LatestValue):
            self._take()
        value = accumulator.report(self._progress.global_step)
        if value is None:
            raise NoRunYetError(f"{requester} asked for {fetch!r}, but no run was made.")
        return value

    def keep(self, hook: object) -> None:
        """Take back what ``hook`` was reported in the current run."""
        owner = self._owners.get(id(hook))
        for accumulator in owner.accumulators.values() if owner is not None else ():
            accumulator.keep()

    def state_dict(self) -> dict[str, Any] | None:
        """Return what has been accumulated since the reports, by hook and fetch; ``None`` if there is nothing."""
        self._take()
        # A saver saves a restored session before the hooks are looked at: what was restored is not lost then.
        state = {} if self._has_looked else dict(self._restored)
        return {**state, **{each.name: each.state_dict() for each in self._accumulators()}} or None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from ``state``, which belongs to the current global step. What it does not have starts over."""
        self._restored = {} if state is None else state
        self._rows.clear()
        for source in self.sources:
            source.drop()
        for accumulator in self._accumulators():
            accumulator.load_state_dict(self._restored.get(accumulator.name), self._progress.global_step)
        self._starts_over = any(accumulator.made_again or accumulator.ended for accumulator in self._accumulators())

    def _accumulators(self) -> Iterator[Any]:
        for source in self.sources:
            yield from source.accumulators
