"""Fetches that need every rank: ``over_ranks``, a ``DTensor``, and the norms of gradients and parameters.

One rank alone in a collective call waits forever, or ends its process. So a fetch is refused, before it is evaluated,
if its hook may be called in a run in which the same hook of another rank is not.
"""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from torchhooks.common.errors import FetchError
from torchhooks.common.text import shortened, shown
from torchhooks.common.timers import GivenTimer
from torchhooks.common.trees import as_snapshot, detached, map_leaves, snapshot
from torchhooks.fetches.evaluation import (
    Caller,
    ComposedFetch,
    Evaluator,
    accumulated_parts,
    watched_names,
)
from torchhooks.fetches.names import Closure, Fetch, Value, describe
from torchhooks.progress.training_state import TrainingState
from torchhooks.ranks.ranks import LoopRanks, is_sharded, without_partial
from torchhooks.ranks.transport import all_gather


@runtime_checkable
class EvaluationResult(Protocol):
    """A result of an EvaluationHook, such as ``evaluation["accuracy"]``, as a fetch."""

    name: str
    timer: GivenTimer
    evaluates_at_end: bool

    @property
    def now(self) -> Fetch: ...

    def latest(self) -> tuple[int, Value] | None: ...


class OverRanks(ComposedFetch):
    """A fetch whose value is combined from the values of all ranks. See :func:`over_ranks`."""

    def __init__(self, fetch: Fetch, op: str, weight: Fetch = None, optional: bool = False) -> None:
        self.fetch = fetch
        self.op = op
        self.weight = weight
        self.optional = optional
        if op not in RANK_OPS:
            raise ValueError(f"over_ranks({shown(fetch)}, {op!r}): give one of {', '.join(map(repr, RANK_OPS))}")
        if weight is not None and op != "mean":
            raise ValueError(f"{self!r}: only a mean has weights. Leave out weight=, or combine with 'mean'")
        self.accumulated = any(isinstance(each, ComposedFetch) and each.accumulates for each in (fetch, weight))
        """Whether the fetch is a running one, so that its value depends on which hook asks."""
        is_composed = isinstance(fetch, ComposedFetch) and not isinstance(fetch, EvaluationResult)
        if fetch is None or (is_composed and not fetch.accumulates):
            raise TypeError(
                f"over_ranks({shown(fetch)}, {op!r}): give the fetch to combine, such as 'loss', a running one, or a "
                "result of an evaluation. Another fetch that is made of others cannot be combined"
            )
        self.watched_names = watched_names([fetch, weight])
        self.accumulated_parts = accumulated_parts([fetch, weight])
        name = fetch if isinstance(fetch, str) else type(fetch).__name__
        self.__name__ = getattr(fetch, "__name__", getattr(fetch, "name", name))

    def compose(self, value: Value) -> Value:
        """Return ``value``, as it is, because there is only one rank."""
        return math.nan if value is None else snapshot(value)

    def __repr__(self) -> str:
        weight = "" if self.weight is None else f", weight={self.weight!r}"
        return f"over_ranks({self.fetch!r}, {self.op!r}{weight}{', optional=True' if self.optional else ''})"


class EvaluationOverRanks(OverRanks):
    """A result of an evaluation, combined from the results of all ranks. Hooks are due with the evaluation."""

    def __init__(self, fetch: EvaluationResult, op: str, weight: Fetch = None, optional: bool = False) -> None:
        super().__init__(fetch, op, weight, optional)
        self.name = fetch.name
        self.timer = fetch.timer
        """The timer of the evaluation."""
        self.evaluates_at_end = fetch.evaluates_at_end

    @property
    def now(self) -> OverRanks:
        """The same fetch, evaluated at the step at which a hook requests it."""
        return EvaluationOverRanks(self.fetch.now, self.op, self.weight, self.optional)

    def latest(self) -> tuple[int, Value] | None:
        """Return the step of the latest evaluation in this session, and its value on this rank alone."""
        latest: tuple[int, Value] | None = self.fetch.latest()
        return latest


RANK_OPS = ("mean", "sum", "min", "max")


def over_ranks(fetch: Fetch, op: str, *, weight: Fetch = None, optional: bool = False) -> OverRanks:
    """Return a fetch of the ``"mean"``, ``"sum"``, ``"min"`` or ``"max"`` of ``fetch`` over all ranks.

    >>> hook = LoggingTensorHook({"mean loss": over_ranks("loss", "mean")}, every_n_iter=100)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     loss = loop.run(batches[0])
    mean loss = ...

    Every rank has to request it in the same run. In a single process, the value is the value of ``fetch``. A rank on
    which the value is ``None`` is left out. If it is ``None`` on all of them, the result is NaN. A mean of integers is
    a float.

    Args:
        fetch: any fetch of one number, or of a tensor of one element; also ``running_mean("loss")`` and its siblings,
            and a result of an EvaluationHook, ``evaluation["accuracy"]``.
        op: how to combine them, in float64.
        weight: of a mean, the weight of this rank: a number, or a fetch of one, such as the number of examples.
        optional: whether a rank on which a name in ``fetch`` does not exist is left out too, such as the loss on all
            stages of a pipeline but the last. On a GPU, this is needed for ``None`` as well, and the values are
            exchanged between the hosts.

    Raises:
        ValueError: ``op`` is none of the four, or is no mean and has a ``weight``.
        TypeError: ``fetch`` is made of other fetches, and is not a running one.
        FetchError: from the run, if the hook cannot request it, or the ranks request different things.
    """
    return (EvaluationOverRanks if isinstance(fetch, EvaluationResult) else OverRanks)(fetch, op, weight, optional)


class RanksEvaluator(Evaluator):
    """Evaluates the fetches of one run, in which the other ranks evaluate the same ones.

    ``requests`` are pairs: the caller, and its request, whose first item is the fetches.
    """

    def __init__(self, session: TrainingState, *of_run: Any) -> None:
        super().__init__(session, *of_run)
        self._ranks = session.ranks
        self._combined: dict[tuple[int, int], tuple[OverRanks, Value]] = {}  # with the fetch: its id stays its own
        self._full: dict[int, tuple[object, torch.Tensor]] = {}

    def evaluate(self, fetch: Fetch, caller: Caller) -> Value:
        value = super().evaluate(fetch, caller)
        return value if value is None else map_leaves(self._whole, value)

    def composed(self, fetch: ComposedFetch) -> Value:
        if not isinstance(fetch, OverRanks) or self._ranks.size == 1:
            return super().composed(fetch)
        key = _key(fetch, self._caller)
        if key not in self._combined:
            self._combine(fetch)
        return self._combined[key][1]

    def _kept(self, fetch: Fetch, value: object) -> Value:
        return super()._kept(fetch, map_leaves(self._combined_norm, value))

    def _combined_norm(self, leaf: object) -> Value:
        if not isinstance(leaf, _NormOfShards):
            return leaf
        self._check_every_rank_calls(self._caller, leaf)
        return leaf.combined()

    def _combine(self, fetch: OverRanks) -> None:
        """Combine ``fetch`` with all others that the hooks requested in this run, in one exchange."""
        caller = self._caller
        wanted = {_key(each, who): (each, who) for who, request in self._requests for each in over_ranks_in(request[0])}
        # The fetch may be a part of one that is evaluated by itself: ComposedFetch.is_fixed.
        wanted.setdefault(_key(fetch, caller), (fetch, caller))
        # They are combined now. A later call is for a fetch that is in no request, and must not exchange these again.
        self._requests = ()
        # All are checked before the first is evaluated, which may be a collective call already.
        for each, who in wanted.values():
            self._check_every_rank_calls(who, each)
        parts = [self._part(each, who) for each, who in wanted.values()]
        self._caller = caller  # whose fetches the evaluation goes on with
        asked = shortened([f"{who} asked for {each!r}" for each, who in wanted.values()], 4)
        results = _combined(self._ranks, parts, f" ({asked})")
        for key, part, result in zip(wanted, parts, results, strict=True):
            self._combined[key] = part.fetch, result

    def _part(self, fetch: OverRanks, caller: Caller) -> _Part:
        """Evaluate ``fetch`` on this rank."""
        evaluate = self.evaluate_if_there if fetch.optional else self.evaluate
        value, weight = self._whole(evaluate(fetch.fetch, caller)), fetch.weight
        if weight is not None and not isinstance(weight, numbers.Real):
            weight = self._whole(evaluate(weight, caller))
        if value is None:
            if not fetch.optional and torch.accelerator.is_available():  # the other ranks may exchange on their devices
                raise FetchError(f"{fetch!r} is None on this rank: give over_ranks optional=True to leave the rank out")
            return _Part(fetch, None, None)
        if not _is_number(value):
            raise FetchError(f"{fetch!r} is {shown(value)} on this rank: only one number can be combined over ranks")
        if weight is not None and not _is_number(weight):
            raise FetchError(f"{fetch!r} has the weight {shown(weight)} on this rank: give a fetch of one number")
        return _Part(fetch, detached(value), detached(weight))

    def _whole(self, leaf: object) -> Value:
        """Assemble a ``DTensor`` or a norm; return anything else as it is."""
        leaf = self._combined_norm(leaf)
        if not isinstance(leaf, torch.Tensor) or not hasattr(leaf, "full_tensor"):
            return leaf
        if all(placement.is_replicate() for placement in leaf.placements):  # type: ignore[attr-defined]
            return as_snapshot(leaf.to_local())  # type: ignore[attr-defined]
        # Once for each DTensor, however many hooks ask for it: full_tensor() is a collective call.
        if id(leaf) not in self._full:
            self._check_every_rank_calls(self._caller, f"a DTensor of shape {tuple(leaf.shape)}")
            self._full[id(leaf)] = leaf, as_snapshot(leaf.full_tensor())
        return self._full[id(leaf)][1]

    def _check_every_rank_calls(self, caller: Caller, fetch: object) -> None:
        why: str | None = None
        if self._ranks.has_locally(caller.hook):
            why = "not every rank has the hook with this period: give it to all, or fetch what is on this rank"
        elif self._ranks.size > 1:
            why = caller.why_alone()
        if why is not None:
            raise FetchError(
                f"{caller} asked for {describe(fetch)}, which all ranks have to evaluate in the same run, but {why}"
            )


class _Part(NamedTuple):
    """The value of a fetch on this rank: a number or a tensor of one element, and its weight; ``None`` for no value."""

    fetch: OverRanks
    value: Value
    weight: Fetch

    @property
    def row(self) -> list[Value]:
        """The value and its weight, which is NaN for no value."""
        # A number also for no value, because the rows of all ranks have to be equally long.
        return [0.0, math.nan] if self.value is None else [self.value, 1.0 if self.weight is None else self.weight]


def _key(fetch: OverRanks, caller: Caller) -> tuple[int, int]:
    return id(fetch), id(caller) if fetch.accumulated else 0


def over_ranks_in(fetches: Fetch) -> list[OverRanks]:
    """Return the fetches of :func:`over_ranks` in ``fetches``, also inside of other fetches."""
    found: list[OverRanks] = []
    map_leaves(found.append, fetches)
    for leaf in found:
        if isinstance(leaf, ComposedFetch) and not isinstance(leaf, OverRanks) and leaf.is_fixed:
            map_leaves(found.append, leaf.fetch)  # extends the list that the loop iterates over
    return [leaf for leaf in found if isinstance(leaf, OverRanks)]


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real) or (isinstance(value, np.ndarray) and value.ndim == 0)


def _combined(ranks: LoopRanks, parts: list[_Part], details: str) -> list[Value]:
    """Return each of ``parts`` combined over the ranks, in one exchange for each device and one for the hosts.

    ``details`` say which hook asked for what, for the error if another rank does not take part.
    """
    on_device: dict[torch.device, list[int]] = {}
    on_host: list[int] = []
    for index, (fetch, value, _) in enumerate(parts):
        # An optional value may be missing on another rank, which then has no device for it either.
        if isinstance(value, torch.Tensor) and not fetch.optional and ranks.serves(value.device):
            on_device.setdefault(value.device, []).append(index)
        else:
            on_host.append(index)
    columns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for device, indices in on_device.items():
        rows = _gathered_on_device(ranks, [parts[index] for index in indices], device)
        columns |= {index: (rows[:, 2 * n], rows[:, 2 * n + 1]) for n, index in enumerate(indices)}
    if on_host:
        rows = _gathered_on_host(ranks, [parts[index] for index in on_host], details)
        columns |= {index: (rows[:, 2 * n], rows[:, 2 * n + 1]) for n, index in enumerate(on_host)}
    return [_reduced(part, *columns[index]) for index, part in enumerate(parts)]


def _gathered_on_device(ranks: LoopRanks, parts: list[_Part], device: torch.device) -> torch.Tensor:
    """Return the values and weights of each rank, one rank in a row, without waiting for ``device``."""

    def there(number: float | torch.Tensor) -> torch.Tensor:
        if isinstance(number, torch.Tensor) and number.device == device:
            return number.double().reshape(())
        # Filled there: a copy from memory that is not pinned waits for the device.
        return torch.full((), float(number), dtype=torch.float64, device=device)

    row = torch.stack([there(number) for part in parts for number in part.row])
    return torch.stack([row for (row,) in ranks.gather_on_device([row])])


def _gathered_on_host(ranks: LoopRanks, parts: list[_Part], details: str) -> torch.Tensor:
    """Return the values and weights of each rank, one rank in a row. Waits for the devices that have them."""
    names = [f"{part.fetch.op} of {part.fetch.__name__}" for part in parts]
    row = [float(number) for part in parts for number in part.row]
    gathered = ranks.gather((names, row), "over_ranks", details=details)
    for rank, (theirs, _) in enumerate(gathered):
        if theirs != gathered[0][0]:
            raise FetchError(
                f"rank 0 combines {gathered[0][0]} over ranks in this run, and rank {rank} {theirs}: request the "
                "same with over_ranks on every rank"
            )
    return torch.tensor([row for _, row in gathered], dtype=torch.float64, device="cpu")


def _reduced(part: _Part, values: torch.Tensor, weights: torch.Tensor) -> Value:
    """Return the values of the ranks combined, as a tensor if this rank's is one. Does not wait for a device."""
    op, there = part.fetch.op, ~weights.isnan()
    if op == "mean":
        # A rank with the weight 0 is left out, because 0 times its value is NaN if that is infinite. By torch.where(),
        # because an index by a mask waits for the device.
        counted = there & (weights != 0)
        result = torch.where(counted, values * weights, 0).sum() / torch.where(counted, weights, 0).sum()
    elif op == "sum":
        result = torch.where(there, values, 0).sum()
    elif op == "min":
        result = torch.where(there, values, math.inf).amin()
    else:
        result = torch.where(there, values, -math.inf).amax()
    result = torch.where(there.any(), result, math.nan)
    if isinstance(part.value, torch.Tensor):
        dtype = part.value.dtype
        if not dtype.is_floating_point:
            dtype = torch.float64 if op == "mean" else torch.int64
        return as_snapshot(result.to(part.value.device, dtype))
    is_whole = isinstance(part.value, numbers.Integral) and op != "mean" and bool(result.isfinite())
    return int(result) if is_whole else float(result)


# -- norms -------------------------------------------------------------------------------------------------------------


# Cached, so that several hooks that ask for the same norm share one value: equal fetches are evaluated once in a run.
@functools.cache
def grad_norm(norm_type: float = 2.0) -> Closure:
    """Return a fetch for the norm of all gradients of the model, as one vector.

    >>> hook = LoggingTensorHook({"gradient": grad_norm(), "largest": grad_norm(float("inf"))}, every_n_iter=4)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    gradient = ..., largest = ...
    gradient = ..., largest = ... (... sec)

    Fetches are evaluated after the step, so these are the gradients that the step leaves: clipped, if it clips them.
    The value is ``None`` if there is no gradient, as after ``optimizer.zero_grad()``: call it first in the step.

    Args:
        norm_type: the order of the norm, more than 0, such as 2 or ``float("inf")``.

    Returns:
        A fetch, whose value is a tensor without dimensions, or ``None``. It is computed on the device of the model.

    Raises:
        ValueError: ``norm_type`` is not such a number.
    """
    _check_order(norm_type)

    # The inner function has the same name, because it is the tag under which hooks log the value.
    def grad_norm(model: torch.nn.Module, session: TrainingState | None = None) -> Value:
        return _norm([each.grad for each in model.parameters() if each.grad is not None], norm_type, session)

    return grad_norm


@functools.cache
def param_norm(norm_type: float = 2.0) -> Closure:
    """Return a fetch for the norm of all parameters of the model, as one vector.

    >>> model = torch.nn.Linear(4, 1, bias=False)
    >>> weight = torch.nn.init.ones_(model.weight)
    >>> Session(model).run(param_norm())
    tensor(2.)

    In a hook, it is a fetch like any other: ``LoggingTensorHook({"norm": param_norm()}, every_n_iter=100)``. Fetches
    are evaluated after the step, so the parameters are the updated ones. It is computed on the device of the
    model.

    Args:
        norm_type: the order of the norm, more than 0, such as 2 or ``float("inf")``.

    Returns:
        A fetch, whose value is a tensor without dimensions; ``None`` for a model without parameters.

    Raises:
        ValueError: ``norm_type`` is not such a number.
    """
    _check_order(norm_type)

    def param_norm(model: torch.nn.Module, session: TrainingState | None = None) -> Value:
        return _norm(list(model.parameters()), norm_type, session)

    return param_norm


def _check_order(norm_type: object) -> None:
    if isinstance(norm_type, bool) or not isinstance(norm_type, numbers.Real) or not float(norm_type) > 0:
        raise ValueError(f'norm_type={shown(norm_type)}: must be a number, more than 0, such as 2 or float("inf")')


def _norm(tensors: list[torch.Tensor], norm_type: float, session: TrainingState | None) -> Value:
    dense = [each.coalesce().values() if each.is_sparse else each for each in tensors]
    if not any(map(is_sharded, dense)):
        return torch.nn.utils.get_total_norm(dense, norm_type) if dense else None
    # With several ranks, the evaluator combines it. Only there it is known which hook asks, and so whether the other
    # ranks ask too.
    norm = _NormOfShards(dense, norm_type)
    return norm if session is not None and session.ranks.size > 1 else norm.combined()


class _NormOfShards:
    """The norm of tensors with DTensors among them, possibly of several meshes, which torch's operators do not mix."""

    def __init__(self, tensors: list[Value], norm_type: float) -> None:
        self._tensors = tensors
        self._norm_type = norm_type

    def combined(self) -> torch.Tensor:
        """Return the norm. Every rank has to call this."""
        # Tensors with the same mesh and sharding share one exchange.
        parts: dict[tuple[object, tuple[int, ...]], list[torch.Tensor]] = {}
        for tensor in self._tensors:
            where: tuple[Value, tuple[int, ...]] = (None, ())  # the mesh, and its dimensions over which it is sharded
            if is_sharded(tensor):
                tensor = without_partial(tensor.detach())
                sharded = [i for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
                where, tensor = (tensor.device_mesh, tuple(sharded)), tensor.to_local()
            parts.setdefault(where, []).append(tensor.detach())
        return self._total([self._whole(tensors, *where) for where, tensors in parts.items()])

    def _whole(self, tensors: list[torch.Tensor], mesh: Value, sharded: tuple[int, ...]) -> torch.Tensor:
        """Return the norm of the whole tensors whose local parts are ``tensors``."""
        filled = [tensor for tensor in tensors if tensor.numel()]  # a rank may have no part of a small tensor
        norm = torch.nn.utils.get_total_norm(filled, self._norm_type) if filled else tensors[0].new_zeros(())
        for dimension in sharded:
            # One number of each rank: the norm of the norms of the parts is the norm of the whole.
            rows = all_gather([norm], mesh.size(dimension), mesh.get_group(dimension))
            norm = self._total([part for (part,) in rows])
        return norm

    def _total(self, norms: list[torch.Tensor]) -> torch.Tensor:
        norm: torch.Tensor = torch.linalg.vector_norm(
            torch.stack([norm.to(norms[0].device) for norm in norms]), self._norm_type
        )
        return norm

    def __repr__(self) -> str:
        return f"the norm of {len(self._tensors)} tensors with DTensors among them"
