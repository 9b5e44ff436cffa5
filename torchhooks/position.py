"""Where a training stands in its data, so that another process goes on with the item that comes next.

Each ``until_stop`` keeps a :class:`Place`. Those that are open, outermost first, are the position. It is in every
checkpoint under ``"position"``, once there has been an ``until_stop``:

* ``"path"``: for each of them, its number among those in the same item of the one around it, how many items it has
  taken, whether the last of them is done, whether it had ended, and from which random numbers it had been started;
* ``"loaders"``: by depth and number, what a loader brings along: the states of its generators, and what its
  ``state_dict()`` says.

An item is done if one run was made in it. Where one item means several runs, it cannot be told how much is left of it:
it counts as not done and is yielded again, and so is an item in which another ``until_stop`` is open.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from torchhooks.log import logger
from torchhooks.randomness import random_states, set_random_states
from torchhooks.stateful import Stateful, has_state


class Schedule(Protocol):
    runs: int


class Stage(Enum):
    OPEN = auto()
    ENDED = auto()  # its data had
    LEFT = auto()  # by a break, say, while the training went on
    STOPPED = auto()  # because the training did


_LEFT_IN_THE_MIDDLE = (Stage.OPEN, Stage.LEFT, Stage.STOPPED)


class Place:
    """How far one ``until_stop`` is. The loop writes ``taken``, ``runs``, ``several``, ``ended`` and ``through``."""

    def __init__(self, iterable: object, outer: Place | None, runs: int) -> None:
        self.iterable = iterable
        """What it iterates, as long as that may be asked for; not what can be iterated only once."""
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.number = 0
        self.item = 0 if outer is None else outer.taken
        """Which item of the outer one this belongs to."""
        self.taken: int = 0
        """How many items were taken, those of earlier processes included."""
        self.runs = runs
        """How many runs had been made when the last item was taken."""
        self.several = False
        """Whether there was an item with more than one run."""
        self.ended = False
        self.through = False
        """Whether what is to be done with the last item has been done to the end."""
        self.done = False
        """Whether the last item need not be yielded again; said when this is left."""
        self.stage = Stage.OPEN
        self.resumed: int | None = None
        """How many items were behind it when it went on from a checkpoint."""
        self.before: dict[str, Any] | None = None
        """The random states right before its iteration began, if that may draw from them."""
        self.last: Any = None
        """The last value of a range."""
        self._inner: Place | None = None
        self._begun = 0

    def add(self, inner: Place) -> None:
        """``inner`` begins in the item in hand."""
        inner.number = self.begun
        self._inner, self._begun = inner, inner.number + 1

    @property
    def inner(self) -> Place | None:
        """The one that has begun last in the item in hand."""
        return self._inner if self._inner is not None and self._inner.item == self.taken else None

    @property
    def begun(self) -> int:
        """How many have begun in the item in hand."""
        return self._begun if self.inner is not None else 0

    @property
    def key(self) -> str:
        return f"{self.depth}.{self.number}"

    @property
    def untouched(self) -> bool:
        """Whether it went on from a checkpoint, and nothing has come of it yet."""
        return self.taken == self.resumed and not self.ended

    def is_done(self, runs: int) -> bool:
        """Whether the item in hand is done when ``runs`` runs have been made."""
        if self.stage is not Stage.OPEN or not self.taken:
            return self.done or not self.taken
        return not self._goes_on(Stage.OPEN, Stage.STOPPED) and runs - self.runs == 1 and not self.several

    def leave(self, runs: int, stopping: bool) -> None:
        """No further item is taken."""
        if self.ended:
            self.stage = Stage.ENDED
            self.note_last()
            self.iterable = None
            return
        made = runs - self.runs
        if not self.through:
            self.done = not self._goes_on(*_LEFT_IN_THE_MIDDLE) and made == 1 and not self.several
        elif self.inner is not None:
            self.done = self.inner.stage is not Stage.STOPPED
        else:
            self.done = made <= 1 and not self.several
        self.stage = Stage.STOPPED if stopping else Stage.LEFT

    def note_last(self) -> None:
        """Read off the last value of a range."""
        fresh = self.taken - (self.resumed or 0)
        if isinstance(self.iterable, range) and fresh:
            self.last = self.iterable[fresh - 1]

    def _goes_on(self, *stages: Stage) -> bool:
        return self.inner is not None and self.inner.stage in stages


class Position:
    """The places of one loop, and those that a checkpoint says to go on from.

    Args:
        schedule: which counts the runs.
        state: what is saved beside it: a loader in there is neither saved nor loaded a second time.
    """

    def __init__(self, schedule: Schedule, state: Mapping[str, Stateful]) -> None:
        self._schedule = schedule
        self._state = state
        self._root = Place(None, None, 0)
        self._root.stage = Stage.LEFT  # nothing is around the outermost that would go on by itself
        self._open: list[Place] = []
        self._path: list[dict[str, Any]] = []
        self._random: dict[str, Any] = {}
        self._owed_loaders: dict[str, dict[str, Any]] = {}
        self._loaders: dict[str, Callable[[], Any]] = {}
        self._settled: list[torch.Generator] = []
        self._warned = False

    # -- for the loop -------------------------------------------------------------------------------------------------

    def begin(self, iterable: Iterable[Any], aside: bool) -> Place:
        """The place of an ``until_stop`` that begins now, inside of those that are open, or ``aside``, for itself."""
        if aside:
            return Place(None, None, self._schedule.runs)
        outer = self._open[-1] if self._open else self._root
        place = Place(None if _is_plain_iterator(iterable) else iterable, outer, self._schedule.runs)
        outer.add(place)
        self._open.append(place)
        return place

    def iterator(
        self, place: Place, iterable: Iterable[Any], resume: bool, halted: Callable[[], bool]
    ) -> Iterator[Any]:
        """What is to be yielded at ``place``: what is left of it, if it is one that a checkpoint says to go on from.

        Skipping ends early once ``halted()``.
        """
        if not place.depth:
            return iter(iterable)
        owed = self._owed_to(self._open[-2] if len(self._open) > 1 else self._root)
        loader = self._owed_loaders.pop(place.key, {})
        self._remember(place.key, iterable)
        if not resume:
            place.resumed = 0 if owed is not None and owed["number"] == place.number else None
            return _started(place, iterable)
        if owed is None or owed["number"] < place.number:
            self._restore_loader(iterable, loader)
            return _started(place, iterable)
        iterator: Iterator[Any] = iter(())  # of those in front of the one that was open, nothing is left
        if owed["number"] == place.number:
            iterator = self._resumed(place, iterable, owed, loader, halted)
        self._restore_loader(iterable, loader, also_settled=True)
        set_random_states(self._random)
        return iterator

    def leave(self, place: Place, stopping: bool) -> None:
        """An ``until_stop`` is over."""
        if place in self._open:
            self._open.remove(place)
            place.leave(self._schedule.runs, stopping)

    def run_is_made_again(self) -> None:
        """The run failed and is made again, with the items that are in hand."""
        for place in self._open:
            place.several = place.several or self._schedule.runs - place.runs > 1
            place.runs = self._schedule.runs

    # -- for checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """The position as it is now; ``None`` if there is none."""
        path, in_hand = self._where()
        if not path:
            return None
        if len(path) < len(self._open) and not self._warned:
            self._warned = True
            logger.warning("%s is iterated beside another until_stop. %s", _name(self._open[-1].iterable), _BESIDE)
        live = [(key, loader) for key, reference in self._loaders.items() if (loader := reference()) is not None]
        loaders = {key: self._loader_state(loader, key in in_hand) for key, loader in live}
        return {"path": path, "loaders": {**self._owed_loaders, **loaders}}

    def load_state_dict(self, state: Mapping[str, Any] | None, random: dict[str, Any]) -> None:
        """Go on from ``state`` with the next ``until_stop``; ``random`` are the random states of the checkpoint.

        If there has been one already, the data go on where they are.
        """
        if self._root.begun:
            return
        self._path = [] if state is None else state["path"]
        self._owed_loaders = {} if state is None else dict(state["loaders"])
        self._random = random

    def iterates(self, part: object) -> bool:
        """Whether ``part`` is being iterated, so that it is not to be set back."""
        return any(place.iterable is part for place in self._open)

    # -- where it is --------------------------------------------------------------------------------------------------

    def _where(self) -> tuple[list[dict[str, Any]], set[str]]:
        """The path, and the keys of those on it whose loader can say itself how to go on."""
        path: list[dict[str, Any]] = []
        in_hand: set[str] = set()
        outer = self._root
        while True:
            owed, place = self._owed_to(outer), outer.inner
            if owed is not None and (place is None or place.number < owed["number"]):
                return path + self._path[outer.depth :], in_hand
            if place is None:
                return path, in_hand
            if place.untouched:
                done = self._path[outer.depth]["done"]
                return path + self._path[outer.depth :], {*in_hand, place.key} if done else in_hand
            entry = self._entry(place, outer)
            path.append(entry)
            if entry["ended"]:
                return path, in_hand
            if entry["done"]:
                return path, {*in_hand, place.key}
            outer = place

    def _entry(self, place: Place, outer: Place) -> dict[str, Any]:
        place.note_last()
        return {
            "number": place.number,
            "taken": place.taken,
            "done": place.is_done(self._schedule.runs),
            # One that was left while the one around it went on will not be gone on with.
            "ended": place.ended or (place.stage is Stage.LEFT and outer.stage is Stage.OPEN),
            "last": place.last,
            "before": place.before,
        }

    def _owed_to(self, outer: Place) -> dict[str, Any] | None:
        """What the checkpoint says of the loops in the item that ``outer`` has in hand, if it was taken in that one."""
        in_hand = outer is self._root or (outer.resumed is not None and outer.taken == outer.resumed + 1)
        return self._path[outer.depth] if in_hand and outer.depth < len(self._path) else None

    # -- loaders ------------------------------------------------------------------------------------------------------

    def _remember(self, key: str, iterable: Any) -> None:
        """Keep ``iterable`` in view, if it has something to save; under the last of its keys."""
        live = {other: loader for other, loader in self._loaders.items() if loader() is not None}
        self._loaders = {other: loader for other, loader in live.items() if loader() is not iterable}
        if has_state(iterable) or _generators(iterable):
            try:
                self._loaders[key] = weakref.ref(iterable)
            except TypeError:  # it has __slots__
                self._loaders[key] = lambda: iterable

    def _loader_state(self, loader: Any, in_hand: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"generators": [generator.get_state() for generator in _generators(loader)]}
        # What a DataLoader says is where it is in an epoch. If none is under way, its generators make the next one.
        if has_state(loader) and not self._is_in_state(loader) and (in_hand or not isinstance(loader, DataLoader)):
            state["state"] = loader.state_dict()
        return state

    def _restore_loader(self, loader: Any, saved: dict[str, Any], also_settled: bool = False) -> None:
        if "state" in saved and has_state(loader):
            loader.load_state_dict(saved.pop("state"))
        for generator, state in zip(_generators(loader), saved.get("generators", ()), strict=False):
            if also_settled or not any(generator is other for other in self._settled):
                generator.set_state(state)
                self._settled.append(generator)

    def _is_in_state(self, loader: object) -> bool:
        return any(loader is part for part in self._state.values())

    # -- going on -----------------------------------------------------------------------------------------------------

    def _resumed(
        self,
        place: Place,
        iterable: Iterable[Any],
        owed: Mapping[str, Any],
        loader: dict[str, Any],
        halted: Callable[[], bool],
    ) -> Iterator[Any]:
        """What is left of ``iterable``, of which ``owed`` says how far it was."""
        done: bool = owed["done"] or owed["ended"]
        place.taken = place.resumed = owed["taken"] if done else owed["taken"] - 1
        place.last, place.before = owed["last"], owed["before"]
        if owed["ended"] and not (place.depth == 1 and isinstance(iterable, _MAY_HAVE_GROWN)):
            if place.depth == 1:
                logger.info("%s had come to its end before. %s", _name(iterable), _AS_IT_IS)
            return iter(())
        if isinstance(iterable, range) and owed["last"] is not None:
            place.iterable = rest = _behind(iterable, owed["last"], done)
            return iter(rest)
        if _is_plain_iterator(iterable):
            place.taken = place.resumed = 0
            logger.info("%s goes on where it stands. %s", _name(iterable), _NOT_AN_ITERATOR)
            return iter(iterable)
        if has_state(iterable) and ("state" in loader or self._is_in_state(iterable)):
            self._restore_loader(iterable, loader)
            if not done:
                place.taken = place.resumed = owed["taken"]
                self._path = self._path[: place.depth]
                logger.warning("%s goes on behind the item that was in hand. %s", _name(iterable), _IN_HAND)
            return iter(iterable)
        return self._skipped(place, iterable, done, halted)

    def _skipped(self, place: Place, iterable: Iterable[Any], done: bool, halted: Callable[[], bool]) -> Iterator[Any]:
        """What is left of ``iterable`` without the items that are done."""
        start = time.monotonic()
        if place.before is not None:
            if place.before["persistent"] and getattr(iterable, "_iterator", None) is None:
                iter(iterable)  # its workers, which draw a number when they are made, were there already
            set_random_states(place.before["random"])
            for generator, state in zip(_generators(iterable), place.before["generators"], strict=False):
                generator.set_state(state)
        iterator = iter(iterable)
        skipped = 0
        while skipped < place.taken:
            if halted():
                return iterator
            if next(iterator, _NOTHING) is _NOTHING:
                break
            skipped += 1
        in_hand = [] if done else list(itertools.islice(iterator, 1))  # taken before, so with the numbers of then
        if skipped < place.taken:
            expected = f"the checkpoint was made after {place.taken} items of {_name(iterable)}"
            logger.warning("%s, which has only %d: it is taken to have ended", expected, skipped)
        elif skipped and not isinstance(iterable, list | tuple):
            secs = time.monotonic() - start
            logger.info("skipped %d items of %s in %.3f sec. %s", skipped, _name(iterable), secs, _NO_NEED)
        return itertools.chain(in_hand, iterator)


_NOTHING: Any = object()
_MAY_HAVE_GROWN = (range, list, tuple)
_AS_IT_IS = "To iterate it once more: until_stop(..., resume=False)."
_NOT_AN_ITERATOR = (
    "To have it resumed, give until_stop what can be iterated anew: the loader itself, or a list; and epochs as "
    "until_stop(range(...)) around it."
)
_IN_HAND = "It may have been left in the middle, for one run or one until_stop did not tell that it was done."
_BESIDE = "A checkpoint has the position of the first only, so give one until_stop an iterable that has both."
_NO_NEED = "A loader with state_dict(), such as torchdata's StatefulDataLoader, goes on without."


def _started(place: Place, iterable: Iterable[Any]) -> Iterator[Any]:
    """``iter(iterable)``; how the random numbers stand before it is noted where it may draw from them."""
    own_way = has_state(iterable) and not isinstance(iterable, DataLoader)
    if not (own_way or isinstance(iterable, _MAY_HAVE_GROWN) or _is_plain_iterator(iterable)):
        place.before = {
            "random": random_states(),
            "generators": [generator.get_state() for generator in _generators(iterable)],
            "persistent": getattr(iterable, "persistent_workers", False) is True
            and getattr(iterable, "_iterator", None) is not None,
        }
    return iter(iterable)


def _behind(values: range, last: int, done: bool) -> range:
    """Those of ``values`` that come behind ``last``, and ``last`` itself if it is not ``done``."""
    passed, between = divmod(last - values.start, values.step)
    return values[max(passed + (done or between != 0), 0) :]


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers hold, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def _is_plain_iterator(iterable: object) -> bool:
    """Whether it stands somewhere, can be iterated only on from there, and cannot say where."""
    return isinstance(iterable, Iterator) and not has_state(iterable)


def _name(iterable: object) -> str:
    return f"until_stop's {type(iterable).__name__}"
