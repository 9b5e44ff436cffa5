"""Optional profiling of hooks. Adds no overhead unless enabled with ``hook_costs=True``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from torchhooks.common.log import logger
from torchhooks.common.requester import Requester
from torchhooks.device.readback import Readback
from torchhooks.loop.schedule import Schedule

_RUNNING = Requester(name="running fetches")


class HookCosts:
    """Counts and times the calls of every hook in ``schedule``, from its creation to :meth:`report`.

    The time is host time: in the hook's ``before_run``, ``after_run``, ``Due.when`` and ``end``, in the evaluation of
    its fetches, and in its ``when_ready`` callbacks. A fetch of two hooks is evaluated once, and counts for the first.
    Running fetches, which hooks share, have a line of their own: the time in which each run evaluates and adds them.
    """

    def __init__(self, schedule: Schedule, readback: Readback) -> None:
        self._hooks = schedule.all_hooks
        self._schedule = schedule
        self._calls: dict[Requester, int] = dict.fromkeys([*self._hooks, _RUNNING], 0)
        self._secs: dict[Requester, float] = dict.fromkeys([*self._hooks, _RUNNING], 0.0)
        self._begin = time.perf_counter()
        for scheduled in self._hooks:
            scheduled.measure(functools.partial(self._timed_method, scheduled))
        schedule.accumulated.measure(functools.partial(self._timed_method, _RUNNING))
        readback.measure(lambda call: self._timed(call, lambda delivery, values: delivery.made_by))

    def report(self) -> None:
        """Log the cost of each hook, most expensive first."""
        total = time.perf_counter() - self._begin
        names: dict[Requester, str] = {
            scheduled: f"{scheduled.index} {type(scheduled.hook).__name__}" for scheduled in self._hooks
        }
        if self._calls[_RUNNING]:
            names[_RUNNING] = str(_RUNNING)
        width = max([4, *map(len, names.values())])
        lines = [
            f"hooks took {_share(sum(self._secs.values()), total)} of {total:.3g} s, {self._schedule.runs} runs",
            f"{'hook':{width}}  {'calls':>8}  {'ms':>10}  {'us/call':>8}  {'share':>7}",
        ]
        for scheduled in sorted(names, key=lambda scheduled: -self._secs[scheduled]):
            calls, secs = self._calls[scheduled], self._secs[scheduled]
            us_per_call = secs / calls * 1e6 if calls else 0.0
            lines.append(
                f"{names[scheduled]:{width}}  {calls:>8}  {secs * 1e3:>10.3f}  {us_per_call:>8.2f}  "
                f"{_share(secs, total):>7}"
            )
        logger.info("%s", "\n".join(lines))

    def timed_evaluation(self, evaluate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return ``evaluate(fetches, scheduled)`` with its time counted for the hook in ``scheduled``."""
        return self._timed(evaluate, lambda fetches, scheduled: scheduled)

    def _timed_method(self, requester: Requester, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``method`` with its calls and its time counted for the line of ``requester``."""
        return self._timed(method, lambda *args: requester, calls=1)

    def _timed(
        self, function: Callable[..., Any], requester_of: Callable[..., Requester], calls: int = 0
    ) -> Callable[..., Any]:
        """Return ``function`` with its time counted for the line of ``requester_of(*args)``, if it has one."""

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                secs = time.perf_counter() - begin
                requester = requester_of(*args)
                if requester in self._secs:
                    self._secs[requester] += secs
                    self._calls[requester] += calls

        return timed


def _share(secs: float, total: float) -> str:
    return f"{100 * secs / total:.2f} %"
