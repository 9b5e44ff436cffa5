"""Iterating over the data until the loop stops: what ``MonitoredLoop.until_stop`` does."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

from torchhooks.ending import Ending
from torchhooks.position import Position
from torchhooks.progress import DataWaits
from torchhooks.schedule import Schedule

T = TypeVar("T")

_DATA_ENDED: Any = object()


class Data:
    """The ``until_stop`` loops of one monitored loop, which ``should_stop()`` ends."""

    def __init__(
        self, schedule: Schedule, position: Position, waits: DataWaits, ending: Ending, should_stop: Callable[[], bool]
    ) -> None:
        self._schedule = schedule
        self._position = position
        self._waits = waits
        self._ending = ending
        self._should_stop = should_stop

    def until_stop(self, iterable: Iterable[T], resume: bool) -> Generator[T, None, None]:
        """Yield the items of ``iterable`` until the loop stops or the data end."""
        if self._should_stop():
            return  # before iter(), which may draw random numbers
        schedule, position, ending, waits = self._schedule, self._position, self._ending, self._waits
        waits.depth = depth = waits.depth + 1
        place = position.begin(iterable, aside=ending.busy)
        try:
            iterator: Iterator[Any] = position.iterator(place, iterable, resume, self._should_stop)
            # An item that was taken is always yielded, even if a stop was requested meanwhile: it would be lost.
            while not (ending.stopping or (schedule.news and self._should_stop())):
                if depth in waits.secs:
                    asked = time.monotonic()
                    item = next(iterator, _DATA_ENDED)
                    waits.secs[depth] += time.monotonic() - asked
                else:
                    item = next(iterator, _DATA_ENDED)
                if item is _DATA_ENDED:
                    place.ended = True
                    if depth == 1:
                        ending.data_ended()
                    return
                if ending.reason is not None:
                    ending.data_continues()
                runs = schedule.runs
                if runs - place.runs > 1:
                    place.several = True
                place.runs = runs
                place.taken += 1
                yield item
            place.through = True
        finally:
            waits.depth -= 1
            position.leave(place, ending.stopping or ending.signal is not None)
