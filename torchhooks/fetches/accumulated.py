"""Running fetches: the mean, the sum or the maximum of a fetch over all runs since a hook's last report.

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

The mean of integers is float32, their sum int64. A maximum has the dtype of the value. NumPy values count as tensors.
A device without float64, such as ``mps``, uses float32. NaN in one run makes the mean, the sum and the maximum NaN.
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
from torchhooks.fetches.accumulators import MOST_NUMBERS, Accumulator, Rows, Source, add_tensors
from torchhooks.fetches.fetch import ComposedFetch, Evaluator, accumulated_parts, watched_names
from torchhooks.fetches.step import Step
from torchhooks.position.progress import Progress

_MOST_ITEMS = 256  # a longer container in an attribute of a hook is data, not fetches
_DEPTH = 4


class RunningFetch(ComposedFetch):
    """What :func:`running_mean`, :func:`running_sum` and :func:`running_max` return. Equal ones are the same fetch."""

    accumulates = True

    def __init__(self, op: str, fetch: Any) -> None:
        self.op = op
        self._fetch = fetch
        self._key = op, _identity(fetch)
        self.accumulated_parts = [self]
        if isinstance(fetch, ComposedFetch) and not fetch.fits_every_run:
            raise TypeError(
                f"{self!r}: {fetch!r} cannot be evaluated in every run; give what it is composed of, and compose the "
                f"result: scalar('loss', running_{op}('loss'))"
            )
        if isinstance(fetch, (Mapping, list, tuple, set)) or not _is_fetch(fetch):
            raise TypeError(f"{self!r}: give one fetch, such as 'loss'; for several values, create several of these")
        for name in watched_names(fetch):
            raise ValueError(
                f"{self!r}: {name!r} would have to be caught by a module hook in every run; return it from the step "
                "instead, under a name that does not end in :output, :input or :grad"
            )
        self.__name__ = f"running_{op}({getattr(fetch, '__name__', fetch)})"

    @property
    def fetch(self) -> Any:
        return self._fetch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunningFetch) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"running_{self.op}({self._fetch!r})"


def running_mean(fetch: Any) -> RunningFetch:
    """Return a fetch: the mean of ``fetch`` over all runs since the hook that requests it last did so.

    >>> hook = LoggingTensorHook({"last": "loss", "mean": running_mean("loss")}, timer=EverySteps(2))
    >>> with MonitoredLoop(lambda loss: loss, hooks=[hook]) as loop:  # a step that returns the loss it is given
    ...     for loss in loop.until_stop([3.0, 2.0, 1.0, 0.5]):
    ...         loss = loop.run(loss)
    last = 2.0, mean = 2.5
    last = 0.5, mean = 0.75 (... sec)

    A hook with a period of its own, such as ``every_n_iter=100``, reports in its first run, so that its first mean is
    that of one run. With ``timer=EverySteps(100)``, each report is a mean of 100 runs.

    Each hook has a mean of its own. It includes the run in which it is requested, and starts over after it, unless the
    hook calls ``run_context.not_reported()``. The first one begins with the first run: the loop finds the running
    fetches that are in attributes of a hook, also in lists, tuples, dicts and ``SessionRunArgs``. One that it first
    sees in a request counts from that run.

    Means are kept in checkpoints, so that a resumed training run reports the same. After a recovery, runs that are made
    again are not counted twice. In ``end``, ``session.run_available(fetch, who=self)`` returns the mean since the last
    report, or the last report if no run was made since.

    Args:
        fetch: a name, a closure, an object with ``compute()`` or a tensor, whose value is a number or a tensor. It is
            evaluated in every run.

    Returns:
        A fetch. Its value is a Python number if those of ``fetch`` are, and otherwise a tensor of their shape, which is
        float32 for integers and half precision. If one value is NaN, so is the mean.

    Raises:
        TypeError: ``fetch`` is not one fetch; from the run, its value is neither a number nor a tensor.
        ValueError: ``fetch`` is the name of what a submodule receives or returns.
        NoRunYetError: from ``session.run``, no run was made.
    """
    return RunningFetch("mean", fetch)


def running_sum(fetch: Any) -> RunningFetch:
    """Return a fetch: the sum of ``fetch`` over all runs since the last report.

    >>> hook = LoggingTensorHook({"examples": running_sum(lambda inputs: len(inputs))}, timer=EverySteps(4))
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    examples = 64
    examples = 64 (... sec)

    It is like :func:`torchhooks.running_mean` in everything else. The sum of integer tensors is int64.

    Args:
        fetch: one fetch, whose value is a number or a tensor. It is evaluated in every run.

    Raises:
        TypeError: ``fetch`` is not one fetch; from the run, its value is neither a number nor a tensor.
        ValueError: ``fetch`` is the name of what a submodule receives or returns.
    """
    return RunningFetch("sum", fetch)


def running_max(fetch: Any) -> RunningFetch:
    """Return a fetch: the maximum of ``fetch`` over all runs since the last report.

    >>> hook = LoggingTensorHook({"highest loss": running_max("loss")}, timer=EverySteps(2))
    >>> with MonitoredLoop(lambda loss: loss, hooks=[hook]) as loop:  # a step that returns the loss it is given
    ...     for loss in loop.until_stop([2.0, 3.0, 1.0, 0.5]):
    ...         loss = loop.run(loss)
    highest loss = 3.0
    highest loss = 1.0 (... sec)

    It is like :func:`torchhooks.running_mean` in everything else. The maximum of tensors with several elements is taken
    element by element, and has their dtype. If a value is NaN, so is the maximum.

    Args:
        fetch: one fetch, whose value is a real number or a tensor of them. It is evaluated in every run.

    Raises:
        TypeError: ``fetch`` is not one fetch; from the run, its value is neither a number nor a tensor.
        ValueError: ``fetch`` is the name of what a submodule receives or returns.
    """
    return RunningFetch("max", fetch)


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


class _Owner:
    """A hook and its accumulators."""

    def __init__(self, requester: Requester, name: str) -> None:
        self.requester = requester
        self.name = name
        self.accumulators: dict[RunningFetch, Accumulator] = {}


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
        self._has_looked = False  # whether the fetches of hooks were looked for
        self._made_again = False  # whether an accumulator may have to start over; only after a recovery

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
            found: list[RunningFetch] = []
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

    def _accumulate(self, owner: _Owner, running: list[RunningFetch]) -> list[RunningFetch]:
        """Create the accumulators that ``owner`` does not have yet, and return their fetches."""
        added = [fetch for fetch in dict.fromkeys(running) if fetch not in owner.accumulators]
        if added:
            self._take()  # what is waiting does not belong to the new ones
        for fetch in added:
            key = _identity(fetch.fetch)
            if key not in self._by_fetch:
                self._by_fetch[key] = Source(fetch.fetch, owner.requester)
                self.sources.append(self._by_fetch[key])
            source = self._by_fetch[key]
            name = getattr(fetch.fetch, "__qualname__", None) or (source.name or type(fetch.fetch).__name__)
            accumulator = Accumulator(fetch.op, source, self._unused(f"{owner.name}: running_{fetch.op}({name})"))
            source.accumulators.append(accumulator)
            owner.accumulators[fetch] = accumulator
            accumulator.load_state_dict(self._restored.get(accumulator.name), self._progress.global_step)
        return added

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
        """Add the values of one run. ``evaluator`` is that of the run, if a hook is due in it.

        Returns false: no hook has to be called because of them.
        """
        if self._made_again:
            self._forget_reported()
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
                value = evaluator.evaluate_uncopied(source.fetch, source.requester)
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

    def measure(self, measured: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Wrap :meth:`add` in ``measured(add)``, for profiling."""
        self.add = measured(self.add)  # type: ignore[method-assign]

    def _add_others(self, others: list[tuple[Source, Any]]) -> None:
        on_device: dict[tuple[torch.device, torch.dtype], list[tuple[Source, torch.Tensor]]] = {}
        large: dict[tuple[torch.device, torch.dtype], list[tuple[Source, torch.Tensor]]] = {}
        source = others[0][0]
        try:
            for source, value in others:
                value = source.checked(value)
                if not isinstance(value, torch.Tensor):
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

    def _forget_reported(self) -> None:
        """Start over where the loop has made all runs again that a hook reported before a recovery."""
        step = self._progress.global_step
        again = [accumulator for accumulator in self._accumulators() if accumulator.made_again]
        if any(step > accumulator.reported_at for accumulator in again):
            self._take()
        for accumulator in again:
            if step > accumulator.reported_at:
                accumulator.reset()
        self._made_again = any(accumulator.made_again for accumulator in again)

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
                f"{requester} asked for {fetch!r}, which is accumulated for a hook, from run to run: request it in "
                "before_run, with SessionRunArgs, or pass the hook that has it in an attribute as who="
            )
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
        self._made_again = any(accumulator.made_again for accumulator in self._accumulators())

    def _accumulators(self) -> Iterator[Accumulator]:
        for source in self.sources:
            yield from source.accumulators
