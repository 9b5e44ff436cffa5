"""The position of a training run in its data, from which another process continues with the next item.

Each ``until_stop`` has a :class:`Place`. The open ones, outermost first, are the position. Once there was an
``until_stop``, every checkpoint contains the position under ``"position"``:

* ``"path"``: for each of them, its number among those in the same item of the outer one, how many items it has taken,
  whether the last of them is done, whether its data had ended, and the random states with which it was started;
* ``"loaders"``: by depth and number, the state of a loader: those of its generators, and its ``state_dict()``.

A checkpoint is usually taken between two items, when the last one is done, however many runs it took. One that is taken
within an item cannot know how many runs are left in it. Such an item counts as done if exactly one run was made in it,
in no inner ``until_stop``. Otherwise it is yielded again: seeing a batch twice does less harm than missing half an
epoch.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset, Sampler

from torchhooks.common.digests import Digest, differ, digest
from torchhooks.common.errors import brief
from torchhooks.common.log import logger
from torchhooks.common.random_states import random_states, same_random_states, set_random_states
from torchhooks.common.stateful import Stateful, has_state
from torchhooks.position.generators import find_generators, generator_states, matched_generators, set_generator_state
from torchhooks.position.place import Place, Saved, Stage
from torchhooks.position.probe import Probing, Replay

Undo = Callable[[], object]


class RunCounter(Protocol):
    """What a :class:`Position` needs of the loop's schedule."""

    runs: int


class Position:
    """The places of one loop, and the restored position that its next ``until_stop`` resumes."""

    def __init__(self, schedule: RunCounter, state: Mapping[str, Stateful]) -> None:
        self._schedule = schedule
        self._state = state  # also in the loop's checkpoints, so a loader in it is not saved or loaded twice
        self._root = Place(None, None, 0)
        self._root.stage = Stage.LEFT  # there is no outer loop that would continue after the outermost until_stop
        self._open: list[Place] = []
        self._several: set[str] = set()
        """The keys of the places in which some item had more than one run."""
        # From the restored checkpoint:
        self._path: list[Saved] = []
        self._random: Saved = {}
        self._saved_loaders: dict[str, Saved] = {}
        self._mark_state: Callable[[], Undo] | None = None
        self._undo: Undo | None = None
        self._begun: Counter[Any] = Counter()  # how often until_stop was called at each place in the code
        self._unreached: str | None = None  # what yielded nothing, as long as the place of the checkpoint has not begun
        self._loaders: dict[str, Callable[[], Any]] = {}
        self._restored_generators: list[Any] = []
        self._reminds = False  # whether to log _VARIABLES if another until_stop begins
        self._warned = False
        self._stateless: set[str] = set()

    # -- for until_stop -----------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """How many ``until_stop`` loops are open."""
        return len(self._open)

    @property
    def epoch(self) -> int | None:
        """The index of the current item of the loop around the innermost one, or how often the latter began before."""
        if not self._open:
            return None
        place = self._open[-1]
        return place.epoch if place.outer is None or place.outer is self._root else place.outer.taken - 1

    @property
    def batch(self) -> int | None:
        """The index of the current item of the innermost loop; ``None`` if none is open."""
        return self._open[-1].taken - 1 if self._open else None

    def begin(self, iterable: Iterable[Any], aside: bool, site: object = None) -> Place:
        """Return a new place: inside of those that are open or, with ``aside``, not part of the position.

        ``site`` is where ``until_stop`` was called: a frame, and a position in its code.
        """
        if aside:
            return Place(None, None, self._schedule.runs)
        self._leave_held(site)
        outer = self._open[-1] if self._open else self._root
        place = Place(None if _is_plain_iterator(iterable) else iterable, outer, self._schedule.runs, site)
        outer.add(place)
        place.several = place.key in self._several
        self._open.append(place)
        # Not of one frame: a function that iterates over one epoch is called once for each.
        where = (site[0].f_code, site[1]) if isinstance(site, tuple) else None
        place.epoch = self._begun[where]
        self._begun[where] += 1
        return place

    def _leave_held(self, site: object) -> None:
        """Leave the place that began at ``site`` too, and those inside of it.

        A loop cannot begin inside of itself. So the body left it, and a variable still holds its generator.
        """
        held = [index for index, place in enumerate(self._open) if site is not None and place.site == site]
        for place in reversed(self._open[held[0] :] if held else []):
            self.leave(place, False)

    def iterator(
        self, place: Place, iterable: Iterable[Any], resume: bool, halted: Callable[..., bool]
    ) -> Iterator[Any]:
        """Return the items to yield at ``place``: those that are left, if the restored position contains it.

        Items that are done are skipped until ``halted()`` returns true, or ``halted(error)`` after an error.
        """
        if not place.depth:
            return iter(iterable)
        self._mark_before(place)
        if self._reminds:
            self._reminds = False
            logger.info("%s comes after a loop that yielded nothing more. %s", _name(iterable), _VARIABLES)
        entry = self._restored_in(self._open[-2] if len(self._open) > 1 else self._root)
        loader = self._saved_loaders.pop(place.key, {})
        self._remember(place.key, iterable)
        if entry is None:
            self.check_reached()
        elif entry["number"] == place.number:
            self._unreached = None
        if not resume:
            place.resumed = 0 if entry is not None and entry["number"] == place.number else None
            return _started(place, iterable)
        if entry is None or entry["number"] < place.number:
            self._restore_loader(iterable, loader)
            return _started(place, iterable)
        iterator: Iterator[Any] = iter(())  # places before the one that was open were finished
        random = entry.get("between")  # for what the body draws between the place before that one and that one
        if entry["number"] == place.number:
            self._undo_repeated(place)
            self._warn_of_runs_before(iterable)
            if entry["taken"] == 0 and entry["before"] is None:  # it was cut short before it began
                set_random_states(self._random)
                self._restore_loader(iterable, loader)
                return _started(place, iterable)
            iterator = self._resumed(place, iterable, entry, loader, halted)
            random, place.between = place.item_random, random
        else:
            self._unreached = _name(iterable)
        # Iterating and skipping drew random numbers. From here on they continue as in the checkpoint.
        self._restore_loader(iterable, loader, again=True)
        set_random_states(random or self._random)
        return iterator

    def leave(self, place: Place, stopping: bool) -> None:
        """Record that an ``until_stop`` is over, and whether because the loop is stopping."""
        if place in self._open:
            self._open.remove(place)
            place.leave(self._schedule.runs, stopping)
            place.site = None
            if place.outer is not None and not stopping:
                place.outer.ended_inside = random_states()
            if place.several or self._schedule.runs - place.runs > 1:
                self._several.add(place.key)

    def check_reached(self) -> None:
        """Log a warning if the ``until_stop`` in which the checkpoint was saved should have begun by now."""
        if self._unreached is not None:
            logger.warning("%s yielded nothing. %s", self._unreached, _NOT_REACHED)
            self._unreached = None

    def cut_short(self) -> None:
        """Record that an ``until_stop`` in the current item yields nothing because the loop stops."""
        outer = self._open[-1] if self._open else self._root
        first = bool(self._open) and outer.inner is None and self._schedule.runs == outer.runs
        between = outer.inner is not None and outer.inner.stage in (Stage.ENDED, Stage.LEFT)
        restored, begun = self._restored_in(outer), -1 if outer.inner is None else outer.inner.number
        if (first or between) and (restored is None or restored["number"] <= begun):
            # A checkpoint that is saved now contains what the body did on its way here, to be undone when it resumes.
            place = Place(None, outer, self._schedule.runs)
            place.stage, place.was_cut = Stage.STOPPED, True
            outer.add(place)
        outer.cut = True
        if self._undo is not None and not self._schedule.runs:  # the body repeats what the restored checkpoint contains
            self._undo()
            self._undo = None
            set_random_states(self._random)

    def run_is_made_again(self) -> None:
        """Record that a run failed and is made again, with the current items."""
        for place in self._open:
            place.several = place.several or self._schedule.runs - place.runs > 1
            place.runs = self._schedule.runs

    # -- for checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> Saved | None:
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

    def load_state_dict(
        self, state: Mapping[str, Any] | None, random: Saved, mark_state: Callable[[], Undo] | None = None
    ) -> None:
        """Resume ``state`` with the next ``until_stop``; ``random`` are the random states of the checkpoint.

        ``mark_state()`` returns a function that undoes what has changed in the training state since that call. It is
        called where the resumed process begins to repeat code that the checkpoint's process had run, and what it
        returns where that ends.

        Does nothing if there was an ``until_stop`` already, as in a recovery: the data continues where it is, because
        the items that were yielded cannot be taken back.
        """
        if self._root.inner is not None:
            return
        self._path = [] if state is None else state["path"]
        self._saved_loaders = {} if state is None else dict(state["loaders"])
        self._random = random
        self._mark_state = mark_state

    def iterates(self, part: object) -> bool:
        """Return whether ``part`` is being iterated, so that its state must not be loaded."""
        return any(place.iterable is part for place in self._open)

    # -- the current position -----------------------------------------------------------------------------------------

    def _current_path(self) -> tuple[list[Saved], set[str]]:
        """Return the path, and the keys of the places whose loaders are to be resumed by their own state."""
        path: list[Saved] = []
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
                return path, current if place.was_cut else {*current, place.key}
            outer = place

    def _entry(self, place: Place, outer: Place) -> Saved:
        place.note_last()
        done = place.is_done(self._schedule.runs)
        return {
            "number": place.number,
            "taken": place.taken,
            "done": done,
            # For the process that resumes, to know what it repeats, and that one run is not the whole item.
            "runs": 0 if done or place.ended else self._schedule.runs - place.runs,
            "several": place.several,
            "left": place.stage is Stage.LEFT,
            # If it was left while the outer loop continued, it is not resumed.
            "ended": place.ended or (place.stage is Stage.LEFT and outer.stage is Stage.OPEN),
            "last": place.last,
            "digest": digest(place.held) if place.stage is Stage.OPEN else place.left_at,
            "before": place.before,
            "probes": place.probes,
            "item_random": place.item_random,
            "between": place.between,
        }

    def _restored_in(self, outer: Place) -> Saved | None:
        """Return the restored entry of a place inside ``outer``, if its current item is the one that had it."""
        same_item = outer is self._root or (outer.resumed is not None and outer.taken == outer.resumed + 1)
        return self._path[outer.depth] if same_item and outer.depth < len(self._path) else None

    # -- loaders ------------------------------------------------------------------------------------------------------

    def _remember(self, key: str, iterable: Any) -> None:
        """Keep a reference to ``iterable``, if it has something to save, under the last of its keys."""
        live = {other: loader for other, loader in self._loaders.items() if loader() is not None}
        self._loaders = {other: loader for other, loader in live.items() if loader() is not iterable}
        if has_state(iterable) or find_generators(iterable):
            try:
                self._loaders[key] = weakref.ref(iterable)
            except TypeError:  # no weak references to classes with __slots__
                self._loaders[key] = lambda: iterable

    def _loader_state(self, loader: Any, current: bool) -> Saved:
        state: Saved = {"generators": generator_states(loader)}
        # The state of a DataLoader is a position within an epoch. Between epochs its generators are enough.
        if has_state(loader) and not self._is_in_state(loader) and (current or not isinstance(loader, DataLoader)):
            state |= self._own_state(loader)
        return state

    def _own_state(self, loader: Any) -> dict[str, Any]:
        """Return the ``state_dict()`` of ``loader``; nothing, with one warning for each kind of loader, if it raises.

        A loader that Accelerate has prepared has the method, but no state.
        """
        try:
            return {"state": loader.state_dict()}
        except Exception as error:
            if (name := _name(loader)) not in self._stateless:
                self._stateless.add(name)
                logger.warning("the state_dict() of %s raised %s. %s", name, brief(error), _AS_PLAIN)
            return {}

    def _restore_loader(self, loader: Any, saved: dict[str, Any], again: bool = False) -> bool:
        """Load ``saved`` into ``loader``, and return whether it accepted its own state, if there is one.

        Generators that were restored already are restored only if ``again``.
        """
        accepted = True
        if "state" in saved and has_state(loader):
            try:
                loader.load_state_dict(saved.pop("state"))
            except Exception:
                if self._own_state(loader):
                    raise
                accepted = False
        for generator, state in matched_generators(loader, saved.get("generators", {})):
            if again or not any(generator is other for other in self._restored_generators):
                set_generator_state(generator, state)
                self._restored_generators.append(generator)
        return accepted

    def _is_in_state(self, loader: object) -> bool:
        return any(loader is part for part in self._state.values())

    # -- resuming -----------------------------------------------------------------------------------------------------

    def _resumed(
        self, place: Place, iterable: Iterable[Any], entry: Saved, loader: Saved, halted: Callable[..., bool]
    ) -> Iterator[Any]:
        """Return what is left of ``iterable`` according to the restored ``entry``."""
        done: bool = entry["done"] or entry["ended"]
        place.taken = place.resumed = entry["taken"] if done else entry["taken"] - 1
        place.last, place.before, place.probes = entry["last"], entry["before"], entry.get("probes", [])
        if not done:  # the item is yielded again, so its body starts with the random states of the first time
            place.item_random = entry.get("item_random")
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
        if place.resumed and len(self._path) == place.depth and not _is_plain_iterator(iterable):
            # The body of an outer loop would continue after this one, with its variables.
            self._reminds = done and place.depth == 1 and not entry.get("left") and _is_at_end(place, iterable)
            hint = _AFTER_A_BREAK if entry.get("left") else _VARIABLES
            ending = ", the last one." if self._reminds else f". {hint}"
            logger.info("%s continues after item %d%s", _name(iterable), place.resumed, ending)
        if isinstance(iterable, range) and entry["last"] is not None:
            if not done and entry["last"] not in iterable:
                self._give_up_item(place, entry, iterable)
            place.iterable = rest = _rest_of_range(iterable, entry["last"], done)
            return iter(rest)
        if _is_plain_iterator(iterable):
            place.taken = place.resumed = 0
            hint = _NOT_AN_ITERATOR + (_NOT_A_SLICE if isinstance(iterable, itertools.islice) else "")
            logger.info("%s is an iterator, so it continues where it is. %s", _name(iterable), hint)
            return iter(iterable)
        own = has_state(iterable) and ("state" in loader or self._is_in_state(iterable))
        if own and self._restore_loader(iterable, loader):
            if not done:
                self._give_up_item(place, entry, iterable)
            return iter(iterable)
        return self._skipped(place, iterable, done, entry.get("digest"), halted)

    def _give_up_item(self, place: Place, entry: Saved, iterable: object) -> None:
        """Continue after the item that was in progress, whose inner places are then not resumed."""
        place.taken = place.resumed = entry["taken"]
        place.item_random = None
        self._path = self._path[: place.depth]
        logger.warning("%s continues after the item that was in progress. %s", _name(iterable), _IN_PROGRESS)

    def _mark_before(self, place: Place) -> None:
        """Mark the training state before the body repeats what it did in the process that saved the checkpoint.

        It does so from the first ``until_stop`` on, up to the one that was interrupted. Changes before the first, such
        as another learning rate for the resumed training run, are not repeated.
        """
        if place.depth == 1 and place.number == 0 and self._mark_state is not None:
            if len(self._path) > 1 or (self._path and self._path[0]["number"]):
                self._undo = self._mark_state()
            self._mark_state = None

    def _undo_repeated(self, place: Place) -> None:
        """Undo what the body changed on its way to ``place``, if this is the one that was interrupted.

        The checkpoint contains it already. Not if there were runs on the way: they changed the state as well.
        """
        if self._undo is not None and place.depth == len(self._path):
            if not self._schedule.runs:
                self._undo()
            self._undo = None

    def _warn_of_runs_before(self, iterable: object) -> None:
        """Log a warning if runs were made in this item of the outer loop already: the checkpoint has them."""
        outer = self._open[-2] if len(self._open) > 1 else self._root
        if runs := self._schedule.runs - outer.runs:
            logger.warning("%d runs were made before %s continued. %s", runs, _name(iterable), _MADE_TWICE)

    def _skipped(
        self, place: Place, iterable: Iterable[Any], done: bool, last: Digest | None, halted: Callable[..., bool]
    ) -> Iterator[Any]:
        """Return what is left of ``iterable`` after skipping the items that are done.

        ``last`` is the digest of the last item that was taken before: the last one to skip, or the one in progress.
        """
        start = time.monotonic()
        if place.before is not None:
            if place.before["persistent"] and getattr(iterable, "_iterator", None) is None:
                iter(iterable)  # creates the persistent workers, which draws a number and had been done before
            set_random_states(place.before["random"])  # so that the items come in the same order
            for generator, state in matched_generators(iterable, place.before["generators"]):
                set_generator_state(generator, state)
        iterator = iter(iterable)
        replay = Replay(iterator, place.probes, place.taken + (not done))
        skipped, item = 0, _NOTHING
        fetching: Saved = {}  # the random states before the item to compare
        while skipped < place.taken:
            if halted():
                return iterator
            if skipped == place.taken - 1:
                fetching = random_states()
            try:
                item = next(replay, _NOTHING)
            except Exception as error:
                if not halted(error):
                    raise
                return iterator
            if item is _NOTHING:
                break
            skipped += 1
        # The item in progress is taken now, before the caller sets the random states of the checkpoint.
        if not done:
            fetching = random_states()
        in_progress = [] if done else list(itertools.islice(replay, 1))
        if not done:
            item = in_progress[0] if in_progress else _NOTHING
        # If the data set draws random numbers for each item, the skipped ones have other noise: nothing was run.
        noisy = bool(fetching) and not same_random_states(fetching, random_states())
        if item is not _NOTHING and differ(last, digest(item), noisy):
            which = skipped + (not done), _name(iterable)
            logger.warning("item %d of %s is not the one it was before. %s", *which, _ANOTHER_ORDER)
        elif replay.differs:
            logger.warning("item %d of %s is not the one it was before. %s", replay.differs, _name(iterable), _DEPENDS)
        if skipped < place.taken:
            expected = f"the checkpoint was saved after {place.taken} items of {_name(iterable)}"
            logger.warning("%s, which now has only %d: it is treated as ended", expected, skipped)
        elif skipped and not isinstance(iterable, list | tuple):
            secs = time.monotonic() - start
            logger.info("skipped %d items of %s in %.3f sec. %s", skipped, _name(iterable), secs, _NO_NEED)
        return itertools.chain(in_progress, _probed(place, iterable, iterator))


_NOTHING: Any = object()
_MAY_HAVE_GROWN = (range, list, tuple)
_AGAIN = "To iterate it again, use until_stop(..., resume=False)."
_NOT_AN_ITERATOR = (
    "To have it resumed, pass until_stop an iterable, such as the loader itself or a list, and write epochs as "
    "until_stop(range(...)) around it."
)
_NOT_A_SLICE = " For its first n items, use until_stop(loader, limit=n)."
_VARIABLES = "Variables of the script outside the loop's state, such as a counter or another iterator, start over."
_AFTER_A_BREAK = (
    "The process that saved the checkpoint left it with a break. If that was the end of the training run, do not start "
    "it again."
)
_NOT_REACHED = (
    "Loops are told apart by their order, and the checkpoint was saved in a later one, which this process has not "
    "begun. Begin the same loops in every process: one that had finished yields nothing, so do not skip it by hand."
)
_IN_PROGRESS = "That item cannot be yielded again, and may have been processed only in part."
_ANOTHER_ORDER = (
    "The data come in another order now, so some items will be missed and others repeated. The usual causes are a list "
    "that is shuffled in place (shuffle a copy), and an iterable that counts its epochs (set its epoch in the body of "
    "the outer loop). A body that changes its items in place looks the same."
)
_DEPENDS = (
    "It depends on random numbers that were drawn for the items before it, in turns with the body of the loop, as in a "
    "shuffle buffer, in a wrapper that fetches an item ahead, or in one that shuffles again when its data end. So some "
    "items may be missed, repeated or have other values. Draw them from a generator of their own in an attribute, or "
    "give the data a state_dict() and load_state_dict()."
)
_AS_PLAIN = "So it is treated as a loader without a state, and is resumed by skipping the items that are done."
_REPEATED = (
    "It is yielded again, so these runs are made twice. To continue within an item, iterate over its parts with "
    "another until_stop, and make one run for each."
)
_MADE_TWICE = "The checkpoint contains them already: make them in an until_stop of their own."
_USE_ONE = "Checkpoints contain the position of the first one only: pass one until_stop an iterable of both."
_NO_NEED = "A loader with state_dict(), such as torchdata's StatefulDataLoader, resumes without skipping."


def _started(place: Place, iterable: Iterable[Any]) -> Iterator[Any]:
    """Return ``iter(iterable)``, after recording the random states if the iteration may draw random numbers."""
    # Also if it has a state, because asking for that may fail later.
    if not (isinstance(iterable, _MAY_HAVE_GROWN) or _is_plain_iterator(iterable)):
        place.before = {
            "random": random_states(),
            "generators": generator_states(iterable),
            "persistent": getattr(iterable, "persistent_workers", False) is True
            and getattr(iterable, "_iterator", None) is not None,
        }
    return _probed(place, iterable, iter(iterable))


def _probed(place: Place, iterable: Iterable[Any], iterator: Iterator[Any]) -> Iterator[Any]:
    """Return the items of ``iterator``, with probes if what it draws for an item may decide on later ones."""
    return iterator if place.before is None or _draws_order_first(iterable) else Probing(iterator, place)


def _draws_order_first(iterable: Iterable[Any]) -> bool:
    """Return whether ``iterable`` is known to draw the order of its items before the first one.

    A loader of torch with a sampler of torch does, which is the usual case: it has to cost nothing. A loader derived
    from it may fetch an item ahead, as Accelerate's does.
    """
    if type(iterable) is not DataLoader or isinstance(iterable.dataset, IterableDataset):
        return False
    batches = iterable.batch_sampler
    samplers = iterable.sampler, batches, getattr(batches, "sampler", None)
    return all(each is None or type(each).__module__ == Sampler.__module__ for each in samplers)


def _rest_of_range(values: range, last: int, done: bool) -> range:
    """Return those of ``values`` that come after ``last``, and ``last`` itself if it is not ``done``."""
    passed, between = divmod(last - values.start, values.step)
    return values[max(passed + (done or between != 0), 0) :]


def _is_at_end(place: Place, iterable: Iterable[Any]) -> bool:
    """Return whether ``place``, whose last item is done, is known to yield nothing more of ``iterable``."""
    if place.limit is not None and place.taken >= place.limit:
        return True
    if isinstance(iterable, range):
        return place.last is not None and not _rest_of_range(iterable, place.last, True)
    if isinstance(iterable, DataLoader) and isinstance(iterable.dataset, IterableDataset):
        return False  # asking for its length makes torch warn if it yields more items than that
    try:
        return isinstance(iterable, (*_MAY_HAVE_GROWN, DataLoader)) and len(iterable) == place.taken
    except Exception:  # a sampler need not have a length
        return False


def _is_plain_iterator(iterable: object) -> bool:
    """Return whether ``iterable`` is an iterator, which cannot be iterated again, and has no state."""
    return isinstance(iterable, Iterator) and not has_state(iterable)


def _name(iterable: object) -> str:
    return f"until_stop's {type(iterable).__name__}"
