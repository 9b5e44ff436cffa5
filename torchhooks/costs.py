"""What did my hooks cost? Measured on request; when nobody asked, nothing of this is on the path of a run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from torchhooks.log import logger
from torchhooks.readback import Readback, Request
from torchhooks.schedule import Schedule, Seat


class HookCosts:
    """Counts and times the calls of every hook in ``schedule``, from its creation to :meth:`report`.

    The time is the host's, in the hook's ``before_run``, ``after_run``, ``Due.when`` and ``end``, in evaluating what it
    asked for, and in its ``when_ready`` callbacks. What two hooks ask for is on the account of the first.

    Args:
        schedule: whose hooks.
        readback: what makes the callbacks.
    """

    def __init__(self, schedule: Schedule, readback: Readback) -> None:
        self._seats = schedule.all_seats
        self._schedule = schedule
        self._calls = dict.fromkeys(self._seats, 0)
        self._secs = dict.fromkeys(self._seats, 0.0)
        self._begin = time.perf_counter()
        for seat in schedule.all_seats:
            seat.measure(functools.partial(self._timed, seat))
        readback.call = self._timed_call(readback.call)

    def report(self) -> None:
        """Log the table, the dearest hook first."""
        total = time.perf_counter() - self._begin
        names = {seat: f"{seat.index} {type(seat.hook).__name__}" for seat in self._seats}
        width = max([4, *map(len, names.values())])
        lines = [
            f"hooks took {self._share(sum(self._secs.values()), total)} of {total:.3g} s, {self._schedule.runs} runs"
        ]
        lines.append(f"{'hook':{width}}  {'calls':>8}  {'ms':>10}  {'us/call':>8}  {'share':>7}")
        for seat in sorted(self._seats, key=lambda seat: -self._secs[seat]):
            calls, secs = self._calls[seat], self._secs[seat]
            each = secs / calls * 1e6 if calls else 0.0
            lines.append(
                f"{names[seat]:{width}}  {calls:>8}  {secs * 1e3:>10.3f}  {each:>8.2f}  {self._share(secs, total):>7}"
            )
        logger.info("%s", "\n".join(lines))

    def timed_evaluation(self, evaluate: Callable[[Any, object], Any]) -> Callable[[Any, Any], Any]:
        """``evaluate``, its time on the account of the hook that asked."""

        def timed(fetches: Any, seat: Seat) -> Any:
            begin = time.perf_counter()
            try:
                return evaluate(fetches, seat)
            finally:
                self._secs[seat] += time.perf_counter() - begin

        return timed

    def _timed_call(self, call: Callable[[Request, Any], object]) -> Callable[[Request, Any], object]:
        def timed(request: Request, values: Any) -> object:
            begin = time.perf_counter()
            try:
                return call(request, values)
            finally:
                if isinstance(request.made_by, Seat):
                    self._secs[request.made_by] += time.perf_counter() - begin

        return timed

    @staticmethod
    def _share(secs: float, total: float) -> str:
        return f"{100 * secs / total:.2f} %"

    def _timed(self, seat: Seat, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args)
            finally:
                self._secs[seat] += time.perf_counter() - begin
                self._calls[seat] += 1

        return timed
