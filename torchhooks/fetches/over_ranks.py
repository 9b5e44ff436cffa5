"""Evaluating fetches that need every rank: ``over_ranks``, and a ``DTensor``.

One rank alone in a collective call waits forever, or ends its process. So a fetch is refused, before it is evaluated,
if its hook may be called in a run in which the same hook of another rank is not.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from torchhooks.common.errors import FetchError
from torchhooks.common.requester import Requester
from torchhooks.common.text import shortened, shown
from torchhooks.common.timers import GivenTimer
from torchhooks.common.trees import as_snapshot, map_leaves, snapshot
from torchhooks.fetches.fetch import ComposedFetch, Evaluator, accumulated_parts, describe, watched_names
from torchhooks.ranks.ranks import LoopRanks


class ValueInParts:
    """What a fetch has on this rank of a value whose parts are on several ranks."""

    def combined(self) -> Any:
        """Return the whole value. Every rank has to call this."""


@runtime_checkable
class Evaluated(Protocol):
    """A result of an EvaluationHook, such as ``evaluation["accuracy"]``, as a fetch."""

    name: str
    timer: GivenTimer

    @property
    def now(self) -> Any: ...

    def latest(self) -> tuple[int, Any] | None: ...


class OverRanks(ComposedFetch):
    """A fetch whose value is combined from the values of all ranks. See :func:`over_ranks`."""

    def __init__(self, fetch: Any, op: str, weight: Any = None, optional: bool = False) -> None:
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
        is_composed = isinstance(fetch, ComposedFetch) and not isinstance(fetch, Evaluated)
        if fetch is None or (is_composed and not fetch.accumulates):
            raise TypeError(
                f"over_ranks({shown(fetch)}, {op!r}): give the fetch to combine, such as 'loss', a running one, or a "
                "result of an evaluation. Another fetch that is made of others cannot be combined"
            )
        self.watched_names = watched_names([fetch, weight])
        self.accumulated_parts = accumulated_parts([fetch, weight])
        name = fetch if isinstance(fetch, str) else type(fetch).__name__
        self.__name__ = getattr(fetch, "__name__", getattr(fetch, "name", name))

    def compose(self, value: Any) -> Any:
        """Return ``value``, as it is, because there is only one rank."""
        return math.nan if value is None else snapshot(value)

    def __repr__(self) -> str:
        weight = "" if self.weight is None else f", weight={self.weight!r}"
        return f"over_ranks({self.fetch!r}, {self.op!r}{weight}{', optional=True' if self.optional else ''})"


class EvaluatedOverRanks(OverRanks):
    """A result of an evaluation, combined from the results of all ranks. Hooks are due with the evaluation."""

    def __init__(self, fetch: Evaluated, op: str, weight: Any = None, optional: bool = False) -> None:
        super().__init__(fetch, op, weight, optional)
        self.name = fetch.name
        self.timer = fetch.timer
        """The timer of the evaluation."""

    @property
    def now(self) -> OverRanks:
        """The same for the step at which it is requested, which is evaluated."""
        return EvaluatedOverRanks(self.fetch.now, self.op, self.weight, self.optional)

    def latest(self) -> tuple[int, Any] | None:
        """Return the step of the latest evaluation in this session, and its value on this rank alone."""
        latest: tuple[int, Any] | None = self.fetch.latest()
        return latest


RANK_OPS = ("mean", "sum", "min", "max")


def over_ranks(fetch: Any, op: str, *, weight: Any = None, optional: bool = False) -> OverRanks:
    """Return a fetch of the ``"mean"``, ``"sum"``, ``"min"`` or ``"max"`` of what ``fetch`` is on all ranks.

    >>> hook = LoggingTensorHook({"mean loss": over_ranks("loss", "mean")}, every_n_iter=100)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     loss = loop.run(batches[0])
    mean loss = ...

    It is evaluated only in the runs in which a hook requests it, all of a run in one exchange between the ranks. Every
    rank has to request it in the same run. It is refused in a hook that not every rank has, and in a hook that is due
    by its own clock or by what its step returned. A mean of integers is a float. In a single process, the value is that
    of ``fetch``.

    A rank on which the value is ``None`` is left out. If it is ``None`` on all of them, the result is NaN.

    Args:
        fetch: any fetch of numbers, tensors or arrays, which have the same shapes and dtypes on all ranks; also
            ``running_mean("loss")`` and its siblings, and a result of an EvaluationHook, ``evaluation["accuracy"]``.
        op: how to combine them, element by element.
        weight: of a mean, the weight of this rank: a number, or a fetch of one, such as the number of examples.
        optional: whether a rank on which a name in ``fetch`` does not exist is left out too, such as the loss on all
            stages of a pipeline but the last. On a GPU, this is needed for ``None`` as well, and the values are
            exchanged between the hosts.

    Raises:
        ValueError: ``op`` is none of the four, or is no mean and has a ``weight``.
        TypeError: ``fetch`` is made of other fetches, and is not a running one.
        FetchError: from the run, if the hook cannot request it, or the ranks request different things.
    """
    return (EvaluatedOverRanks if isinstance(fetch, Evaluated) else OverRanks)(fetch, op, weight, optional)


class RanksEvaluator(Evaluator):
    """Evaluates the fetches of one run, in which the other ranks evaluate the same ones.

    Of the ``requests`` of the run, each is who made it, and the request, whose first item is the fetches.
    """

    def __init__(self, session: Any, *of_run: Any) -> None:
        super().__init__(session, *of_run)
        self._ranks: LoopRanks = session.ranks
        self._combined: dict[tuple[int, int], tuple[OverRanks, Any]] = {}  # with the fetch: its id stays its own
        self._full: dict[int, tuple[Any, torch.Tensor]] = {}

    def evaluate(self, fetch: Any, requester: Requester) -> Any:
        value = super().evaluate(fetch, requester)
        return value if value is None else map_leaves(self._whole, value)

    def composed(self, fetch: ComposedFetch) -> Any:
        if not isinstance(fetch, OverRanks) or self._ranks.size == 1:
            return super().composed(fetch)
        key = _key(fetch, self._requester)
        if key not in self._combined:
            self._combine(fetch)
        return self._combined[key][1]

    def _kept(self, value: Any) -> Any:
        value = map_leaves(self._combined_if_in_parts, value)
        return snapshot(value) if self.copies else value

    def _combined_if_in_parts(self, leaf: Any) -> Any:
        if not isinstance(leaf, ValueInParts):
            return leaf
        self._check_every_rank_calls(self._requester, leaf)
        return leaf.combined()

    def _combine(self, fetch: OverRanks) -> None:
        """Combine ``fetch`` with all others that the hooks requested in this run, in one exchange."""
        requester = self._requester
        wanted = {_key(each, who): (each, who) for who, request in self._requests for each in over_ranks_in(request[0])}
        wanted.setdefault(
            _key(fetch, requester), (fetch, requester)
        )  # it may be part of a fetch that decides what to evaluate
        self._requests = ()
        for each, who in wanted.values():
            self._check_every_rank_calls(who, each)
        parts: list[_Part] = []
        values = []
        for each, who in wanted.values():
            self._requester = who  # so that errors name the hook
            if each.optional:
                values.append(self.evaluate_if_there(each.fetch, who))
            else:
                values.append(map_leaves(self._leaf, each.fetch))
            found: list[Any] = []
            map_leaves(found.append, values[-1])
            weight = self._weight_of(each)
            parts += [_part(each, self._whole(leaf), weight) for leaf in found]
        self._requester = requester
        asked = [f"{who} asked for {each!r}" for each, who in wanted.values()]
        results = iter(_combined(self._ranks, parts, f" ({shortened(asked, 4)})"))
        for (key, (each, _)), value in zip(wanted.items(), values, strict=True):
            self._combined[key] = each, map_leaves(lambda _: next(results), value)

    def _weight_of(self, fetch: OverRanks) -> Any:
        if fetch.weight is None or isinstance(fetch.weight, numbers.Real):
            return fetch.weight
        if fetch.optional:
            return self.evaluate_if_there(fetch.weight, self._requester)
        return self._leaf(fetch.weight)

    def _whole(self, leaf: Any) -> Any:
        """Return the full tensor of a ``DTensor``, and the whole of what is shared; anything else as it is."""
        leaf = self._combined_if_in_parts(leaf)
        if not isinstance(leaf, torch.Tensor) or not hasattr(leaf, "full_tensor"):
            return leaf
        if all(placement.is_replicate() for placement in leaf.placements):  # type: ignore[attr-defined]
            return as_snapshot(leaf.to_local())  # type: ignore[attr-defined]
        if id(leaf) not in self._full:
            self._check_every_rank_calls(self._requester, f"a DTensor of shape {tuple(leaf.shape)}")
            self._full[id(leaf)] = leaf, as_snapshot(leaf.full_tensor())
        return self._full[id(leaf)][1]

    def _check_every_rank_calls(self, requester: Requester, fetch: object) -> None:
        why: str | None = None
        if any(requester.hook is each for each in self._ranks.hooks_of_some):
            why = "not every rank has the hook: give it to every rank, or have it fetch what is on this rank"
        elif self._ranks.size > 1:
            why = requester.why_alone()
        if why is not None:
            raise FetchError(
                f"{requester} asked for {describe(fetch)}, which all ranks have to evaluate in the same run, but {why}"
            )


class _Part(NamedTuple):
    fetch: OverRanks
    tensor: torch.Tensor | None
    """The value on this rank; ``None`` if it has none."""
    kind: str
    """What the result has to be, a name in _KINDS; a number is a float."""
    weight: torch.Tensor | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The value, and its weight if there is one."""
        return [each for each in (self.tensor, self.weight) if each is not None]

    @property
    def signature(self) -> str:
        op = self.fetch.op if self.fetch.weight is None else f"weighted {self.fetch.op}"
        dtype = "" if self.tensor is None else str(self.tensor.dtype).removeprefix("torch.")
        return f"{op} of {self.fetch.__name__}: {_NOTHING if self.tensor is None else f'{dtype}{[*self.tensor.shape]}'}"


_KINDS = {"tensor": torch.Tensor, "array": np.ndarray}
_NOTHING = "nothing"


def _key(fetch: OverRanks, requester: Requester) -> tuple[int, int]:
    return id(fetch), id(requester) if fetch.accumulated else 0


def over_ranks_in(fetches: Any) -> list[OverRanks]:
    """Return the fetches of :func:`over_ranks` in ``fetches``, also inside of other fetches."""
    found: list[Any] = []
    map_leaves(found.append, fetches)
    for leaf in found:
        if isinstance(leaf, ComposedFetch) and not isinstance(leaf, OverRanks) and leaf.is_fixed:
            map_leaves(found.append, leaf.fetch)  # extends the list that the loop iterates over
    return [leaf for leaf in found if isinstance(leaf, OverRanks)]


def _part(fetch: OverRanks, value: Any, weight: Any) -> _Part:
    kind = next((name for name, kind in _KINDS.items() if isinstance(value, kind)), "float")
    if value is None:
        if not fetch.optional and torch.accelerator.is_available():  # the other ranks may exchange on their devices
            raise FetchError(f"{fetch!r} is None on this rank: give over_ranks optional=True to leave the rank out")
        return _Part(fetch, None, kind, None)
    try:
        tensor = value.detach().to_dense() if kind == "tensor" else torch.from_numpy(np.asarray(value))
        factor = None if fetch.weight is None else torch.as_tensor(weight, dtype=torch.float64, device=tensor.device)
    except (TypeError, ValueError, RuntimeError) as error:
        weighted = "" if fetch.weight is None else f", with the weight {shown(weight)}"
        raise FetchError(
            f"{fetch!r} is {shown(value)}{weighted} on this rank: only numbers, tensors and arrays can be combined "
            "over ranks"
        ) from error
    if factor is not None and factor.numel() != 1:
        raise FetchError(f"{fetch!r} has the weight {shown(weight)} on this rank: give a fetch of one number")
    return _Part(fetch, tensor.long() if tensor.dtype is torch.bool else tensor, kind, factor)


def _combined(ranks: LoopRanks, parts: list[_Part], details: str) -> list[Any]:
    """Return each of ``parts`` combined over the ranks, in one exchange for each device and one for the hosts.

    ``details`` say which hook asked for what, for the error if another rank does not take part.
    """
    results: dict[int, Any] = {}
    on_device: dict[torch.device, list[int]] = {}
    on_host: list[int] = []
    for index, part in enumerate(parts):
        if part.fetch.optional or part.tensor is None or not ranks.serves(part.tensor.device):
            on_host.append(index)
        else:
            on_device.setdefault(part.tensor.device, []).append(index)
    for here in on_device.values():
        rows = ranks.gather_on_device([tensor for index in here for tensor in parts[index].tensors])
        columns = iter(zip(*rows, strict=True))
        for index in here:
            results[index] = _reduced(parts[index], *(list(next(columns)) for _ in parts[index].tensors))
    if on_host:
        signatures = [parts[index].signature for index in on_host]
        arrays = [[_array(tensor) for tensor in parts[index].tensors] for index in on_host]
        kinds = [parts[index].kind for index in on_host]
        gathered = ranks.gather((signatures, arrays, kinds), "over_ranks", details=details)
        _check_same(gathered)
        for place, index in enumerate(on_host):
            found = [(row[place], kinds[place]) for _, row, kinds in gathered if row[place]]
            results[index] = _reduced_on_host(parts[index], found)
    return [results[index] for index in range(len(parts))]


def _reduced_on_host(part: _Part, found: list[tuple[list[Any], str]]) -> Any:
    """Return what the ranks that have a value have sent, combined; NaN if there is none."""
    if not found:
        return math.nan
    arrays, kinds = zip(*found, strict=True)
    if part.tensor is None:
        part = part._replace(tensor=torch.from_numpy(arrays[0][0]), kind=kinds[0])
    assert part.tensor is not None
    device = part.tensor.device
    return _reduced(
        part, *([torch.from_numpy(each).to(device) for each in column] for column in zip(*arrays, strict=True))
    )


def _check_same(gathered: list[Any]) -> None:
    seen: list[str] = gathered[0][0]
    for rank, (theirs, *_) in enumerate(gathered):
        if len(theirs) != len(seen) or not all(map(_is_same, theirs, seen)):
            raise FetchError(
                f"rank 0 combines {seen} over ranks in this run, and rank {rank} {theirs}: request the same with "
                "over_ranks on every rank"
            )
        seen = [other if each.endswith(_NOTHING) else each for each, other in zip(seen, theirs, strict=True)]


def _is_same(one: str, other: str) -> bool:
    nothing = one.endswith(_NOTHING) or other.endswith(_NOTHING)
    return one == other or (nothing and one.rpartition(": ")[0] == other.rpartition(": ")[0])


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    known = tensor.float() if tensor.dtype is torch.bfloat16 else tensor  # which NumPy lacks
    return known.cpu().numpy()  # waits for a device that the default process group does not serve


def _reduced(part: _Part, values: list[torch.Tensor], weights: list[torch.Tensor] | None = None) -> Any:
    assert part.tensor is not None
    stacked = torch.stack(values)
    dtype = part.tensor.dtype
    exact = stacked.is_floating_point() or stacked.is_complex()
    if weights is not None:
        wide = stacked.to(torch.complex128 if stacked.is_complex() else torch.float64)
        factors = torch.stack(weights).reshape(-1, *[1] * part.tensor.dim())
        result = (wide * factors).sum(0) / factors.sum(0)
    elif part.fetch.op == "mean":
        result = (stacked if exact else stacked.double()).mean(0)
    else:
        result = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}[part.fetch.op](stacked, 0)  # type: ignore[operator]
    if exact:
        result = result.to(dtype)
    if part.kind == "tensor":
        return as_snapshot(result)
    return result.item() if part.kind == "float" else result.numpy()
