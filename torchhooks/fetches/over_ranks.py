"""Evaluating fetches that need every rank: ``over_ranks``, and a ``DTensor``.

One rank alone in a collective call waits forever, or ends its process. So a fetch is refused, before it is evaluated,
if its hook may be called in a run in which the same hook of another rank is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from torchhooks.common.checks import explains_wrong_calls
from torchhooks.common.errors import FetchError
from torchhooks.common.requester import Requester
from torchhooks.common.text import shortened, shown
from torchhooks.common.timers import GivenTimer
from torchhooks.common.trees import as_snapshot, map_leaves, snapshot
from torchhooks.fetches.fetch import ComposedFetch, Evaluator, describe
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
    """A fetch whose value is combined from those of all ranks. See :func:`over_ranks`."""

    def __init__(self, fetch: Any, op: str) -> None:
        if op not in RANK_OPS:
            raise ValueError(f"over_ranks({shown(fetch)}, {op!r}): give one of {', '.join(map(repr, RANK_OPS))}")
        self.accumulated = isinstance(fetch, ComposedFetch) and fetch.accumulates
        """Whether the fetch is a running one, so that its value depends on which hook asks."""
        is_other = isinstance(fetch, ComposedFetch) and not self.accumulated and not isinstance(fetch, Evaluated)
        if fetch is None or is_other:
            raise TypeError(
                f"over_ranks({shown(fetch)}, {op!r}): give the fetch to combine, such as 'loss', a running one, or a "
                "result of an evaluation. Another fetch that is made of others cannot be combined"
            )
        self._fetch = fetch
        self.op = op
        name = fetch if isinstance(fetch, str) else type(fetch).__name__
        self.__name__ = getattr(fetch, "__name__", getattr(fetch, "name", name))

    @property
    def fetch(self) -> Any:
        return self._fetch

    def compose(self, value: Any) -> Any:
        """Return ``value``, which is that of all ranks, because there is only one."""
        return value

    def __repr__(self) -> str:
        return f"over_ranks({self._fetch!r}, {self.op!r})"


class EvaluatedOverRanks(OverRanks):
    """A result of an evaluation, combined from those of all ranks. Hooks are due with the evaluation."""

    def __init__(self, fetch: Evaluated, op: str) -> None:
        super().__init__(fetch, op)
        self.name = fetch.name
        self.timer = fetch.timer
        """The timer of the evaluation."""

    @property
    def now(self) -> OverRanks:
        """The same for the step at which it is requested, which is evaluated."""
        return EvaluatedOverRanks(self._fetch.now, self.op)

    def latest(self) -> tuple[int, Any] | None:
        """Return the step of the latest evaluation in this session, and its value on this rank alone."""
        latest: tuple[int, Any] | None = self._fetch.latest()
        return latest


RANK_OPS = ("mean", "sum", "min", "max")


@explains_wrong_calls
def over_ranks(fetch: Any, op: str) -> OverRanks:
    """Return a fetch of the ``"mean"``, ``"sum"``, ``"min"`` or ``"max"`` of what ``fetch`` is on all ranks.

    >>> hook = LoggingTensorHook({"mean loss": over_ranks("loss", "mean")}, every_n_iter=100)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     loss = loop.run(batches[0])
    mean loss = ...

    It is evaluated only in the runs in which a hook requests it, all of a run in one exchange between the ranks. Every
    rank has to request it in the same run. It is refused in a hook that not every rank has, and in one that is due by
    its own clock or by what its step returned. A mean of integers is a float. In a single process, the value is that
    of ``fetch``.

    Args:
        fetch: any fetch of numbers, tensors or arrays, which have the same shapes and dtypes on all ranks; also
            ``running_mean("loss")`` and its siblings, and a result of an EvaluationHook, ``evaluation["accuracy"]``.
        op: how to combine them, element by element.

    Raises:
        ValueError: ``op`` is none of the four.
        TypeError: ``fetch`` is made of other fetches, and is not a running one.
        FetchError: from the run, if the hook cannot request it, or the ranks request different things.
    """
    return (EvaluatedOverRanks if isinstance(fetch, Evaluated) else OverRanks)(fetch, op)


class RanksEvaluator(Evaluator):
    """Evaluates the fetches of one run, in which the other ranks evaluate the same ones.

    ``requests`` are those of the run: who made each, and the request, whose first item is the fetches.
    """

    def __init__(
        self,
        session: Any,
        outputs: Any = None,
        feeds: Mapping[str, Any] = MappingProxyType({}),
        inputs: Callable[[], Mapping[str, Any]] = dict,
        watched: Mapping[str, Any] = MappingProxyType({}),
        requests: Iterable[tuple[Requester, Any]] = (),
    ) -> None:
        super().__init__(session, outputs, feeds, inputs, watched)
        self._ranks: LoopRanks = session.ranks
        self._requests = requests
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
        wanted = {
            _key(each, who): (each, who) for who, request in self._requests for each in _over_ranks_in(request[0])
        }
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
            values.append(map_leaves(self._leaf, each.fetch))
            found: list[Any] = []
            map_leaves(found.append, values[-1])
            parts += [_part(each, self._whole(leaf)) for leaf in found]
        self._requester = requester
        asked = [f"{who} asked for {each!r}" for each, who in wanted.values()]
        results = iter(_combined(self._ranks, parts, f" ({shortened(asked, 4)})"))
        for (key, (each, _)), value in zip(wanted.items(), values, strict=True):
            self._combined[key] = each, map_leaves(lambda _: next(results), value)

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
    name: str
    op: str
    tensor: torch.Tensor
    kind: type
    """What the result has to be: ``torch.Tensor``, ``np.ndarray`` or ``float``, for any number."""

    @property
    def signature(self) -> str:
        return f"{self.op} of {self.name}: {str(self.tensor.dtype).removeprefix('torch.')}{[*self.tensor.shape]}"


def _key(fetch: OverRanks, requester: Requester) -> tuple[int, int]:
    return id(fetch), id(requester) if fetch.accumulated else 0


def _over_ranks_in(fetches: Any) -> list[OverRanks]:
    found: list[Any] = []
    map_leaves(found.append, fetches)
    for leaf in found:
        if isinstance(leaf, ComposedFetch) and not isinstance(leaf, OverRanks) and leaf.is_fixed:
            map_leaves(found.append, leaf.fetch)  # extends the list that the loop iterates over
    return [leaf for leaf in found if isinstance(leaf, OverRanks)]


def _part(fetch: OverRanks, value: Any) -> _Part:
    kind = next((kind for kind in (torch.Tensor, np.ndarray) if isinstance(value, kind)), float)
    try:
        tensor = value.detach().to_dense() if kind is torch.Tensor else torch.from_numpy(np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise FetchError(
            f"{fetch!r} is {shown(value)} on this rank: only numbers, tensors and arrays can be combined over ranks"
        ) from error
    return _Part(fetch.__name__, fetch.op, tensor.long() if tensor.dtype is torch.bool else tensor, kind)


def _combined(ranks: LoopRanks, parts: list[_Part], details: str) -> list[Any]:
    """Return each of ``parts`` combined over the ranks, in one exchange for the CPU and one for each other device.

    ``details`` say which hook asked for what, for the error if another rank does not take part.
    """
    results: dict[int, Any] = {}
    for device in dict.fromkeys(part.tensor.device for part in parts):
        here = {index: part for index, part in enumerate(parts) if part.tensor.device == device}
        tensors = [part.tensor for part in here.values()]
        rows = ranks.gather_on_device(tensors)
        if rows is None:
            signatures = [part.signature for part in here.values()]
            values = [_array(tensor) for tensor in tensors]
            gathered = ranks.gather((signatures, values), "over_ranks", details=details)
            _check_same(gathered)
            rows = [[torch.from_numpy(array).to(device) for array in arrays] for _, arrays in gathered]
        for index, *of_all in zip(here, *rows, strict=True):
            results[index] = _reduced(parts[index], of_all)
    return [results[index] for index in range(len(parts))]


def _check_same(gathered: list[Any]) -> None:
    chiefs = gathered[0][0]
    for rank, (theirs, _) in enumerate(gathered):
        if theirs != chiefs:
            raise FetchError(
                f"rank 0 combines {chiefs} over ranks in this run, and rank {rank} {theirs}: request the same with "
                "over_ranks on every rank"
            )


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    known = tensor.float() if tensor.dtype is torch.bfloat16 else tensor  # which NumPy lacks
    return known.cpu().numpy()  # waits for a device that the default process group does not serve


def _reduced(part: _Part, values: list[torch.Tensor]) -> Any:
    stacked = torch.stack(values)
    dtype = part.tensor.dtype
    exact = stacked.is_floating_point() or stacked.is_complex()
    if part.op == "mean":
        result = (stacked if exact else stacked.double()).mean(0)
    else:
        result = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}[part.op](stacked, 0)  # type: ignore[operator]
    if exact:
        result = result.to(dtype)
    if part.kind is torch.Tensor:
        return as_snapshot(result)
    return result.item() if part.kind is float else result.numpy()
