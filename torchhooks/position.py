"""The position of a training run in its data, from which another process continues with the next item.

Each ``until_stop`` has a :class:`Place`. The open ones, outermost first, are the position. Once there was an
``until_stop``, every checkpoint contains the position under ``"position"``:

* ``"path"``: for each of them, its number among those in the same item of the outer one, how many items it has taken,
  whether the last of them is done, whether its data had ended, and the random states with which it was started;
* ``"loaders"``: by depth and number, the state of a loader: those of its generators, and its ``state_dict()``.

An item is done if exactly one run was made in it. With several runs in an item it is not known how many are left, so
the item counts as not done and is yielded again: to see a batch twice does less harm than to miss half an epoch. An
item in which another ``until_stop`` is open is not done either.
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


class RunCounter(Protocol):
    """What a :class:`Position` needs of the loop's schedule."""

    @property
    def runs(self) -> int: ...


class Stage(Enum):
    OPEN = auto()
    ENDED = auto()  # its data ended
    LEFT = auto()  # left early, for example by a break, while the loop continued
    STOPPED = auto()  # left because the loop stopped


_UNFINISHED = (Stage.OPEN, Stage.LEFT, Stage.STOPPED)


class Place:
    """How far one ``until_stop`` is. The loop sets ``taken``, ``runs``, ``several``, ``ended`` and ``through``."""

    def __init__(self, iterable: object, outer: Place | None, runs: int) -> None:
        self.iterable = iterable
        """What is iterated, until its data ends; ``None`` for an iterator, which cannot be iterated again."""
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.number = 0
        """How many others began before it in the same item of the outer one."""
        self.item = 0 if outer is None else outer.taken
        """The item of the outer one in which it began."""
        self.taken: int = 0
        """How many items were taken, including those of earlier processes."""
        self.runs = runs
        """How many runs had been made when the last item was taken."""
        self.several = False
        """Whether some item had more than one run, here or in the same place of an earlier item of the outer one."""
        self.cut = False
        """Whether another ``until_stop`` began in the current item, and yielded nothing because the loop stops."""
        self.ended = False
        """Whether the data ended."""
        self.counts = outer is not None
        """Whether it is part of the position: not if it is inside a run, as in the evaluation of a hook."""
        self.finished = False
        """Whether the body of the user's loop is done with the current item."""
        self.through = False
        """Whether ``until_stop`` ended because the loop stops, and not because the body left it."""
        self.done = False
        """Whether the last item does not have to be yielded again. Set by :meth:`leave`."""
        self.stage = Stage.OPEN
        self.resumed: int | None = None
        """How many items were done when it was resumed from a checkpoint."""
        self.before: dict[str, Any] | None = None
        """The random states before the iteration began, if it may draw random numbers."""
        self.last: Any = None
        """The last value of a range."""
        self._inner: Place | None = None
        self._begun = 0

    def add(self, inner: Place) -> None:
        """Record that ``inner`` begins in the current item."""
        inner.number = self.begun
        self._inner, self._begun = inner, inner.number + 1

    @property
    def inner(self) -> Place | None:
        """The inner place that began last in the current item."""
        return self._inner if self._inner is not None and self._inner.item == self.taken else None

    @property
    def begun(self) -> int:
        """How many inner places have begun in the current item."""
        return self._begun if self.inner is not None else 0

    @property
    def key(self) -> str:
        """The name of its loader in a checkpoint."""
        return f"{self.depth}.{self.number}"

    @property
    def untouched(self) -> bool:
        """Whether it was resumed from a checkpoint and has not taken an item since."""
        return self.taken == self.resumed and not self.ended

    def take(self, runs: int) -> None:
        """Record that an item is taken, after ``runs`` runs."""
        self.several = self.several or runs - self.runs > 1
        self.runs = runs
        self.taken += 1
        self.finished = self.cut = False

    def is_done(self, runs: int) -> bool:
        """Return whether the current item is done after ``runs`` runs of the loop."""
        if self.finished and self.stage is Stage.OPEN:
            return True
        if self.stage is not Stage.OPEN or not self.taken:
            return self.done or not self.taken
        return self.inner is None and self._is_single(runs - self.runs)

    def leave(self, runs: int, stopping: bool) -> None:
        """Record that no further item is taken."""
        if self.ended:
            self.stage = Stage.ENDED
            self.note_last()
            self.iterable = None
            return
        made = runs - self.runs
        if not self.through:
            self.done = not self._inner_is(*_UNFINISHED) and self._is_single(made)
        elif self.inner is not None:
            self.done = self.inner.stage is not Stage.STOPPED
        else:
            self.done = self.finished or (made == 0 and not self.several and not self.cut) or self._is_single(made)
        self.stage = Stage.STOPPED if stopping else Stage.LEFT

    def note_last(self) -> None:
        """Update :attr:`last`."""
        fresh = self.taken - (self.resumed or 0)
        if isinstance(self.iterable, range) and fresh:
            self.last = self.iterable[fresh - 1]

    def _is_single(self, made: int) -> bool:
        """Return whether ``made`` runs are all that belong to the current item, as far as one can tell."""
        return made == 1 and not self.several and not self.cut

    def _inner_is(self, *stages: Stage) -> bool:
        return self.inner is not None and self.inner.stage in stages


class Position:
    """The places of one loop, and the restored position that its next ``until_stop`` resumes.

    Args:
        schedule: counts the runs.
        state: the other objects in the loop's checkpoints; a loader among them is not saved or loaded twice.
    """

    def __init__(self, schedule: RunCounter, state: Mapping[str, Stateful]) -> None:
        self._schedule = schedule
        self._state = state
        self._root = Place(None, None, 0)
        self._root.stage = Stage.LEFT  # there is no outer loop that would continue after the outermost until_stop
        self._open: list[Place] = []
        self._several: set[str] = set()
        """The keys of the places in which some item had more than one run."""
        # From the restored checkpoint:
        self._path: list[dict[str, Any]] = []
        self._random: dict[str, Any] = {}
        self._saved_loaders: dict[str, dict[str, Any]] = {}

        self._loaders: dict[str, Callable[[], Any]] = {}
        self._restored_generators: list[torch.Generator] = []
        self._warned = False

    # -- for until_stop -----------------------------------------------------------------------------------------------

    def begin(self, iterable: Iterable[Any], aside: bool) -> Place:
        """Return a place for an ``until_stop`` that begins now.

        It is inside of those that are open, or, with ``aside``, not part of the position.
        """
        if aside:
            return Place(None, None, self._schedule.runs)
        outer = self._open[-1] if self._open else self._root
        place = Place(None if _is_plain_iterator(iterable) else iterable, outer, self._schedule.runs)
        outer.add(place)
        place.several = place.key in self._several
        self._open.append(place)
        return place

    def iterator(
        self, place: Place, iterable: Iterable[Any], resume: bool, halted: Callable[[], bool]
    ) -> Iterator[Any]:
        """Return the items to yield at ``place``: those that are left, if the restored position contains it.

        Items that are done are skipped until ``halted()`` returns true.
        """
        if not place.depth:
            return iter(iterable)
        entry = self._restored_in(self._open[-2] if len(self._open) > 1 else self._root)
        loader = self._saved_loaders.pop(place.key, {})
        self._remember(place.key, iterable)
        if not resume:
            place.resumed = 0 if entry is not None and entry["number"] == place.number else None
            return _started(place, iterable)
        if entry is None or entry["number"] < place.number:
            self._restore_loader(iterable, loader)
            return _started(place, iterable)
        iterator: Iterator[Any] = iter(())  # places before the one that was open were finished
        if entry["number"] == place.number:
            self._warn_of_runs_before(iterable)
            iterator = self._resumed(place, iterable, entry, loader, halted)
        # Iterating and skipping drew random numbers. From here on they continue as in the checkpoint.
        self._restore_loader(iterable, loader, again=True)
        set_random_states(self._random)
        return iterator

    def leave(self, place: Place, stopping: bool) -> None:
        """Record that an ``until_stop`` is over, and whether because the loop is stopping."""
        if place in self._open:
            self._open.remove(place)
            place.leave(self._schedule.runs, stopping)
            if place.several or self._schedule.runs - place.runs > 1:
                self._several.add(place.key)

    def cut_short(self) -> None:
        """Record that an ``until_stop`` in the current item yields nothing because the loop stops."""
        if self._open:
            self._open[-1].cut = True

    def run_is_made_again(self) -> None:
        """Record that a run failed and is made again, with the current items."""
        for place in self._open:
            place.several = place.several or self._schedule.runs - place.runs > 1
            place.runs = self._schedule.runs

    # -- for checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position as it is now; ``None`` if there was no ``until_stop``."""
        path, current = self._current_path()
        if not path:
            return None
        if len(path) < len(self._open) and not self._warned:
            self._warned = True
            logger.warning("%s is iterated alongside another until_stop. %s", _name(self._open[-1].iterable), _USE_ONE)
        live = [(key, loader) for key, reference in self._loaders.items() if (loader := reference()) is not None]
        loaders = {key: self._loader_state(loader, key in current) for key, loader in live}
        return {"path": path, "loaders": {**self._saved_loaders, **loaders}}

    def load_state_dict(self, state: Mapping[str, Any] | None, random: dict[str, Any]) -> None:
        """Resume ``state`` with the next ``until_stop``; ``random`` are the random states of the checkpoint.

        Does nothing if there was an ``until_stop`` already, as in a recovery: the data continues where it is, because
        the items that were yielded cannot be taken back.
        """
        if self._root.begun:
            return
        self._path = [] if state is None else state["path"]
        self._saved_loaders = {} if state is None else dict(state["loaders"])
        self._random = random

    def iterates(self, part: object) -> bool:
        """Return whether ``part`` is being iterated, so that its state must not be loaded."""
        return any(place.iterable is part for place in self._open)

    # -- the current position -----------------------------------------------------------------------------------------

    def _current_path(self) -> tuple[list[dict[str, Any]], set[str]]:
        """Return the path, and the keys of the places whose loaders are to be resumed by their own state."""
        path: list[dict[str, Any]] = []
        current: set[str] = set()
        outer = self._root
        while True:
            restored, place = self._restored_in(outer), outer.inner
            if restored is not None and (place is None or place.number < restored["number"]):
                return path + self._path[outer.depth :], current
            if place is None:
                return path, current
            if place.untouched:
                done = self._path[outer.depth]["done"]
                return path + self._path[outer.depth :], {*current, place.key} if done else current
            entry = self._entry(place, outer)
            path.append(entry)
            if entry["ended"]:
                return path, current
            if entry["done"]:
                return path, {*current, place.key}
            outer = place

    def _entry(self, place: Place, outer: Place) -> dict[str, Any]:
        place.note_last()
        done = place.is_done(self._schedule.runs)
        return {
            "number": place.number,
            "taken": place.taken,
            "done": done,
            # For the process that resumes, to know what it repeats, and that one run is not the whole item.
            "runs": 0 if done or place.ended else self._schedule.runs - place.runs,
            "several": place.several,
            # If it was left while the outer loop continued, it is not resumed.
            "ended": place.ended or (place.stage is Stage.LEFT and outer.stage is Stage.OPEN),
            "last": place.last,
            "before": place.before,
        }

    def _restored_in(self, outer: Place) -> dict[str, Any] | None:
        """Return the restored entry of a place inside ``outer``, if its current item is the one that had it."""
        same_item = outer is self._root or (outer.resumed is not None and outer.taken == outer.resumed + 1)
        return self._path[outer.depth] if same_item and outer.depth < len(self._path) else None

    # -- loaders ------------------------------------------------------------------------------------------------------

    def _remember(self, key: str, iterable: Any) -> None:
        """Keep a reference to ``iterable``, if it has something to save, under the last of its keys."""
        live = {other: loader for other, loader in self._loaders.items() if loader() is not None}
        self._loaders = {other: loader for other, loader in live.items() if loader() is not iterable}
        if has_state(iterable) or _generators(iterable):
            try:
                self._loaders[key] = weakref.ref(iterable)
            except TypeError:  # no weak references to classes with __slots__
                self._loaders[key] = lambda: iterable

    def _loader_state(self, loader: Any, current: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"generators": [generator.get_state() for generator in _generators(loader)]}
        # The state of a DataLoader is a position within an epoch. Between epochs its generators are enough.
        if has_state(loader) and not self._is_in_state(loader) and (current or not isinstance(loader, DataLoader)):
            state["state"] = loader.state_dict()
        return state

    def _restore_loader(self, loader: Any, saved: dict[str, Any], again: bool = False) -> None:
        """Load ``saved`` into ``loader``; generators that were restored already are restored only if ``again``."""
        if "state" in saved and has_state(loader):
            loader.load_state_dict(saved.pop("state"))
        for generator, state in zip(_generators(loader), saved.get("generators", ()), strict=False):
            if again or not any(generator is other for other in self._restored_generators):
                generator.set_state(state)
                self._restored_generators.append(generator)

    def _is_in_state(self, loader: object) -> bool:
        return any(loader is part for part in self._state.values())

    # -- resuming -----------------------------------------------------------------------------------------------------

    def _resumed(
        self,
        place: Place,
        iterable: Iterable[Any],
        entry: Mapping[str, Any],
        loader: dict[str, Any],
        halted: Callable[[], bool],
    ) -> Iterator[Any]:
        """Return what is left of ``iterable`` according to the restored ``entry``."""
        done: bool = entry["done"] or entry["ended"]
        place.taken = place.resumed = entry["taken"] if done else entry["taken"] - 1
        place.last, place.before = entry["last"], entry["before"]
        place.several = entry.get("several", False)
        if not done and entry.get("runs", 0) and len(self._path) == place.depth and not _is_plain_iterator(iterable):
            runs = entry["runs"]
            logger.warning(
                "the last item of %s had %d runs when the checkpoint was saved. %s", _name(iterable), runs, _REPEATED
            )
        if entry["ended"] and not (place.depth == 1 and isinstance(iterable, _MAY_HAVE_GROWN)):
            if place.depth == 1:
                logger.info("%s had already ended. %s", _name(iterable), _AGAIN)
            return iter(())
        if isinstance(iterable, range) and entry["last"] is not None:
            place.iterable = rest = _rest_of_range(iterable, entry["last"], done)
            return iter(rest)
        if _is_plain_iterator(iterable):
            place.taken = place.resumed = 0
            logger.info("%s is an iterator, so it continues where it is. %s", _name(iterable), _NOT_AN_ITERATOR)
            return iter(iterable)
        if has_state(iterable) and ("state" in loader or self._is_in_state(iterable)):
            self._restore_loader(iterable, loader)
            if not done:
                place.taken = place.resumed = entry["taken"]
                self._path = self._path[: place.depth]
                logger.warning("%s continues after the item that was in progress. %s", _name(iterable), _IN_PROGRESS)
            return iter(iterable)
        return self._skipped(place, iterable, done, halted)

    def _warn_of_runs_before(self, iterable: object) -> None:
        """Log a warning if runs were made in this item of the outer loop already: the checkpoint has them."""
        outer = self._open[-2] if len(self._open) > 1 else self._root
        if runs := self._schedule.runs - outer.runs:
            logger.warning("%d runs were made before %s continued. %s", runs, _name(iterable), _MADE_TWICE)

    def _skipped(self, place: Place, iterable: Iterable[Any], done: bool, halted: Callable[[], bool]) -> Iterator[Any]:
        """Return what is left of ``iterable`` after skipping the items that are done."""
        start = time.monotonic()
        if place.before is not None:
            if place.before["persistent"] and getattr(iterable, "_iterator", None) is None:
                iter(iterable)  # creates the persistent workers, which draws a number and had been done before
            set_random_states(place.before["random"])  # so that the items come in the same order
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
        # The item in progress is taken now, before the caller sets the random states of the checkpoint.
        in_progress = [] if done else list(itertools.islice(iterator, 1))
        if skipped < place.taken:
            expected = f"the checkpoint was saved after {place.taken} items of {_name(iterable)}"
            logger.warning("%s, which now has only %d: it is treated as ended", expected, skipped)
        elif skipped and not isinstance(iterable, list | tuple):
            secs = time.monotonic() - start
            logger.info("skipped %d items of %s in %.3f sec. %s", skipped, _name(iterable), secs, _NO_NEED)
        return itertools.chain(in_progress, iterator)


_NOTHING: Any = object()
_MAY_HAVE_GROWN = (range, list, tuple)
_AGAIN = "To iterate it again, use until_stop(..., resume=False)."
_NOT_AN_ITERATOR = (
    "To have it resumed, pass until_stop an iterable, such as the loader itself or a list, and write epochs as "
    "until_stop(range(...)) around it."
)
_IN_PROGRESS = "That item cannot be yielded again, and may have been processed only in part."
_REPEATED = (
    "It is yielded again, so these runs are made twice. To continue within an item, iterate over its parts with "
    "another until_stop, and make one run for each."
)
_MADE_TWICE = "The checkpoint contains them already: make them in an until_stop of their own."
_USE_ONE = "Checkpoints contain the position of the first one only: pass one until_stop an iterable of both."
_NO_NEED = "A loader with state_dict(), such as torchdata's StatefulDataLoader, resumes without skipping."


def _started(place: Place, iterable: Iterable[Any]) -> Iterator[Any]:
    """Return ``iter(iterable)``, after recording the random states if the iteration may draw random numbers."""
    resumes_itself = has_state(iterable) and not isinstance(iterable, DataLoader)
    if not (resumes_itself or isinstance(iterable, _MAY_HAVE_GROWN) or _is_plain_iterator(iterable)):
        place.before = {
            "random": random_states(),
            "generators": [generator.get_state() for generator in _generators(iterable)],
            "persistent": getattr(iterable, "persistent_workers", False) is True
            and getattr(iterable, "_iterator", None) is not None,
        }
    return iter(iterable)


def _rest_of_range(values: range, last: int, done: bool) -> range:
    """Return those of ``values`` that come after ``last``, and ``last`` itself if it is not ``done``."""
    passed, between = divmod(last - values.start, values.step)
    return values[max(passed + (done or between != 0), 0) :]


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the distinct generators of a loader and its samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def _is_plain_iterator(iterable: object) -> bool:
    """Return whether ``iterable`` is an iterator, which cannot be iterated again, and has no state."""
    return isinstance(iterable, Iterator) and not has_state(iterable)


def _name(iterable: object) -> str:
    return f"until_stop's {type(iterable).__name__}"
