"""Probes of data: whether an item depends on random numbers that were drawn for the items before it.

The data and the step draw from the same random states. A resumed process skips the items that are done without the
steps between them, so the data draw other numbers for these items. That does no harm if the numbers matter for the
skipped items alone, as with augmentation. It does if they decide on later items too: in a shuffle buffer, in a wrapper
that fetches an item ahead, or in an endless wrapper that shuffles again.

The items themselves do not tell the two apart, since their values differ in both. So the process that saves records the
random states before some items, and the process that resumes sets them before it takes the same item again. If the item
then differs, it depends on the earlier numbers.

*Rejected:* recording them for every item. This takes 0.1 ms and 13 KB each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torchhooks.common.digests import differ, digest
from torchhooks.common.random_states import random_states, same_random_states, set_random_states
from torchhooks.position.place import Place, Saved

_KEPT = 8  # probes in a checkpoint, of 13 KB each
_PAUSE = 4_000  # items, between two looks at data that draw no numbers: each takes 0.15 ms, or 40 ns an item
_ENDED: Any = object()


def probed(iterator: Iterator[Any], place: Place) -> Iterator[Any]:
    """Return the items of ``iterator``, and record some of those for which it draws random numbers in ``place``."""
    return itertools.chain.from_iterable(_parts(iterator, place))


def _parts(iterator: Iterator[Any], place: Place) -> Iterator[Iterable[Any]]:
    """Yield the items in parts, between which the probes are: an item in a part costs no call of Python."""
    due = max(place.taken, 1)  # the first item depends on no other
    while True:
        yield itertools.islice(iterator, due - place.taken)
        taken = place.taken
        if taken < due:  # the data ended in the part
            return
        if taken == 1 and _drew_nothing(place):
            due = taken + _PAUSE
            continue
        random = random_states()
        item = next(iterator, _ENDED)
        if item is _ENDED:
            return
        if same_random_states(random, random_states()):
            due = taken + _PAUSE
        else:
            probe = {"item": taken + 1, "random": random, "digest": digest(item)}
            place.probes = [*place.probes, probe][-_KEPT:]
            # A probe takes 0.2 ms. So they become rarer, but the last one is never far back.
            due = taken + 1 + taken // 8
        yield (item,)


def _drew_nothing(place: Place) -> bool:
    """Return whether the data drew no random number for their order or the first item, which has just been taken."""
    before, after = place.before, place.random_at_item
    return before is not None and after is not None and same_random_states(before["random"], after)


class Replay(Iterator[Any]):
    """Yields ``count`` items of ``iterator``, which is started again, and compares the recorded ones.

    If all of them were recorded, each is taken with the random states of the first time, so all are the same again.
    Otherwise only the later half of ``probes`` is used: the items before have to differ for the comparison to tell.
    """

    def __init__(self, iterator: Iterator[Any], probes: list[Saved], count: int) -> None:
        self._iterator = iterator
        used = probes if len(probes) == count - 1 else probes[len(probes) // 2 :]
        self._probes = {probe["item"]: probe for probe in used}
        self._taken = 0
        self.differs: int | None = None
        """The number of a recorded item that is another one now, although the random states are the same."""

    def __next__(self) -> Any:
        probe = self._probes.get(self._taken + 1)
        if probe is not None:
            set_random_states(probe["random"])
        item = next(self._iterator)
        self._taken += 1
        if probe is not None and differ(probe["digest"], digest(item)):
            self.differs = self._taken
        return item
