"""Starting to iterate over data: from the beginning, or after the items that are done."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

from torchhooks.common.digests import differ, digest
from torchhooks.common.log import logger
from torchhooks.common.random_states import random_states, same_random_states, set_random_states
from torchhooks.position.generators import generator_states, matched_generators, set_generator_state
from torchhooks.position.loaders import create_workers, has_workers
from torchhooks.position.place import Entry, Place, Saved, State
from torchhooks.position.resuming import MAY_HAVE_GROWN, is_plain_iterator, length_of, name_of


def started(place: Place, iterable: Iterable[Any]) -> Iterator[Any]:
    """Return ``iter(iterable)``, after recording the random states if the iteration may draw random numbers."""
    # Also if it has a state, because asking for that may fail later.
    if not (isinstance(iterable, MAY_HAVE_GROWN) or is_plain_iterator(iterable)):
        place.before = {
            "random": random_states(),
            "generators": generator_states(iterable),
            "persistent": has_workers(iterable),
            "length": length_of(iterable),
        }
    return iter(iterable)


def skipped(place: Place, iterable: Iterable[Any], entry: Entry, halted: Callable[..., bool]) -> Iterator[Any]:
    """Return what is left of ``iterable`` after skipping the items of ``entry`` that are done.

    ``halted()`` returns whether to skip no further item; ``halted(error)`` is asked after an error.
    """
    begun_at = time.monotonic()
    repeats_item = not entry.state.item_is_done
    if place.before is not None:
        _set_random_before(place.before, iterable)
    iterator = iter(iterable)
    count, item = 0, _NOTHING
    fetching: Saved = {}  # the random states before the item to compare
    while count < place.taken:
        if halted():
            return iterator
        if count == place.taken - 1:
            fetching = random_states()
        try:
            item = next(iterator, _NOTHING)
        except Exception as error:
            if not halted(error):
                raise
            return iterator
        if item is _NOTHING:
            break
        count += 1
    in_progress: list[Any] = []
    if repeats_item:  # taken now, before the caller sets the random states of the checkpoint
        fetching = random_states()
        in_progress = list(itertools.islice(iterator, 1))
        item = in_progress[0] if in_progress else _NOTHING
    # If the data set draws random numbers for each item, the skipped ones have other noise: nothing was run.
    noisy = bool(fetching) and not same_random_states(fetching, random_states())
    if item is not _NOTHING and differ(entry.digest, digest(item), noisy):
        number = count + repeats_item
        logger.warning("item %d of %s is not the one it was before. %s", number, name_of(iterable), _ANOTHER_ORDER)
    elif count == place.taken and place.before is not None:
        length, before = length_of(iterable), place.before.get("length")
        if None not in (length, before) and length != before:
            logger.warning("%s has %d items now, and had %d before. %s", name_of(iterable), length, before, _LENGTH)
    if count < place.taken:
        expected = f"the checkpoint was saved after {place.taken} items of {name_of(iterable)}"
        logger.warning("%s, which now has only %d: it is treated as ended", expected, count)
    elif count and not isinstance(iterable, list | tuple):
        secs = time.monotonic() - begun_at
        logger.info("skipped %d items of %s in %.3f sec. %s", count, name_of(iterable), secs, _NO_NEED)
    return itertools.chain(in_progress, iterator)


def _set_random_before(before: Saved, iterable: Any) -> None:
    """Set the random states of the first time, so that the items of ``iterable`` come in the same order."""
    if before["persistent"]:
        create_workers(iterable)
    set_random_states(before["random"])
    for generator, state in matched_generators(iterable, before["generators"]):
        set_generator_state(generator, state)


def draws_order_first(iterable: object) -> bool:
    """Return whether ``iterable`` is known to draw the order of its items before the first one.

    A loader of torch with a sampler of torch does, which is the usual case: it has to cost nothing. A loader derived
    from it may fetch an item ahead, as Accelerate's does.
    """
    if type(iterable) is not DataLoader or isinstance(iterable.dataset, IterableDataset):
        return False
    batches = iterable.batch_sampler
    samplers = iterable.sampler, batches, getattr(batches, "sampler", None)
    return all(each is None or type(each).__module__ == Sampler.__module__ for each in samplers)


def ends_with_item(place: Place, knows_length: bool) -> bool:
    """Return whether the data of an inner loop are known to end with the current item, and to start over as they are.

    A save that comes due at such an item may wait for the item of the outer loop: the process that resumes there does
    not iterate these data again. Other data may need that. A list may have been shuffled in place, and an iterable may
    count its epochs, which shows only when the same items are taken again.

    ``knows_length`` is False if the end was agreed on with other ranks, so that only ``place.limit`` says where it is.
    """
    data = place.iterable
    if place.depth < 2 or not (isinstance(data, range | tuple) or draws_order_first(data)):
        return False
    items = items_of(place) if knows_length else place.limit
    return items is not None and place.taken >= items


def items_of(place: Place) -> int | None:
    """Return how many items ``place`` has, as far as its data and its limit say; ``None`` if that is not known."""
    if place.state is State.ENDED:
        return place.taken
    length = length_of(place.iterable)
    if length is not None and isinstance(place.iterable, range):
        length += place.resumed or 0  # after a resume, a range is only what was left of it
    limits = [each for each in (length, place.limit) if each is not None]
    return min(limits, default=None)


_NOTHING: Any = object()
_LENGTH = (
    "So the epoch that continues ends earlier or later than it would have. If its length depends on the epoch, set the "
    "epoch in the body of the outer loop, as with sampler.set_epoch(epoch)."
)
_ANOTHER_ORDER = (
    "The data come in another order now, so some items will be missed and others repeated. The usual causes are a list "
    "that is shuffled in place (shuffle a copy), and an iterable that counts its epochs (set its epoch in the body of "
    "the outer loop). A body that changes its items in place looks the same."
)
_NO_NEED = "A loader with state_dict(), such as torchdata's StatefulDataLoader, resumes without skipping."
