"""Restoring a checkpoint: ``newest -> read -> compare -> load``, and the second load where its loop continues.

:func:`restore` is the flow. Everything is compared before anything is loaded, and the random states are set last,
because whatever is loaded may draw random numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from torchhooks.checkpoints.comparing import (
    Misfits,
    Pairs,
    changed_hyperparameters,
    changed_metadata,
    compare,
    hooks_of_one,
    lines_of,
)
from torchhooks.checkpoints.contents import (
    ENTRIES_OF_EACH_RANK,
    HOOKS,
    Entries,
    gradients_to_reduce,
    parts_of,
    parts_of_rank,
)
from torchhooks.checkpoints.folder import inspect
from torchhooks.checkpoints.reading import load_file, read_checkpoint
from torchhooks.checkpoints.savers import wait_for_savers
from torchhooks.checkpoints.sharded import like_own
from torchhooks.checkpoints.steps import gather_from_all, run_on_all, writes_for_all
from torchhooks.common.digests import TooManyValuesError, atom_text, digests
from torchhooks.common.errors import CheckpointError, add_note
from torchhooks.common.log import logger
from torchhooks.common.members import is_atom
from torchhooks.common.random_states import set_random_states
from torchhooks.common.stateful import Stateful, deep_copy
from torchhooks.common.text import shortened
from torchhooks.common.trees import Tree
from torchhooks.data.cursor import SavedCursor
from torchhooks.data.position import outer_position
from torchhooks.fetches.names import canonical
from torchhooks.progress.training_state import TrainingState
from torchhooks.ranks.ranks import is_sharded

_NOT_STRICT = "MonitoredLoop(..., scaffold=Scaffold(saver=Saver(strict=False)))"


class RankEntries(NamedTuple):
    """What one rank loads of a checkpoint."""

    path: str
    entries: Entries
    is_whole: bool
    """Whether :attr:`entries` include what belongs to this rank alone."""
    finished: str | None = None
    """Why the training run is finished, if it is."""


def restore(
    training: TrainingState,
    choose: Callable[[], tuple[str, Entries] | None],
    *,
    strict: bool,
) -> str | None:
    """Load the checkpoint that ``choose()`` returns, and return its path; ``None`` if there is none.

    Every rank has to call this.

    Args:
        training: what is restored.
        choose: called on the chief. Returns the path of an undamaged checkpoint and its entries.
        strict: whether a checkpoint that does not match is an error.
    """
    ranks = training.ranks
    checkpoint = read(training, choose)
    if checkpoint is None:
        return None
    pairs = run_on_all(ranks, "compare the checkpoint", lambda: _pairs_to_load(training, checkpoint, strict))

    # Before the load, after which the optimizer has the values of the checkpoint.
    changed = _replaced_hyperparameters(training, pairs)

    def load_here() -> None:
        load(training, checkpoint, pairs, strict)
        # After load(): the loaded position says whether code is repeated. SecondLoad marks what was loaded, to see what
        # the script changes from now on.
        if training.position.repeats_code:
            training.position.repeat_code_before(SecondLoad(training, checkpoint.path, pairs, strict))
        if checkpoint.is_whole:
            set_random_states(checkpoint.entries["random"])  # last, because all else may draw random numbers

    run_on_all(ranks, "load the checkpoint", load_here)
    if checkpoint.is_whole:
        _warn_of_buckets(training)
    _tell_of_threads(training, checkpoint)
    _tell_of_hooks(training, checkpoint)
    if changed:
        logger.info("%s. To use the script's, set it after the loop is created", "; ".join(changed))
    if training.metadata and "metadata" in checkpoint.entries:
        changes = list(changed_metadata(checkpoint.entries["metadata"], training.metadata))
        if changes:
            logger.warning("the loop differs from the checkpoint %s: %s", checkpoint.path, shortened(changes, 8))
    return checkpoint.path


# -- read --------------------------------------------------------------------------------------------------------------


def read(training: TrainingState, choose: Callable[[], tuple[str, Entries] | None]) -> RankEntries | None:
    """Have the chief choose and check a checkpoint, and the other ranks read it; ``None`` if there is none."""
    ranks = training.ranks
    # Only the chief chooses. The ranks might find different checkpoints undamaged, and comparing the checksums on each
    # rank would read the whole checkpoint as many times as there are ranks.
    chosen = run_on_all(ranks, "choose a checkpoint", lambda: choose() if writes_for_all(ranks) else None)
    told = gather_from_all(
        ranks, "tell its path", lambda: None if chosen is None else (chosen[0], inspect(chosen[0]).finished)
    )[0]
    if told is None:
        return None
    path, finished = told
    saved = run_on_all(ranks, "read the checkpoint", lambda: load_file(path, training) if chosen is None else chosen[1])
    checkpoint = _select_for_rank(training, path, saved)._replace(finished=finished)
    if not checkpoint.is_whole and writes_for_all(ranks):
        logger.warning(
            "%s was saved by %s and is restored by %s: random states,%s the position in the data, and the states of "
            "hooks, loaders, Variables and objects with per_rank start as the script set them%s",
            path,
            _number(1 + len(saved.get("ranks", []))),
            _number(ranks.size),
            "" if "sharded_gradients" in saved and "gradients" not in saved else " gradients,",
            ". The outer loops continue, and the epoch in progress begins again"
            if _begins_again(checkpoint.entries)
            else "",
        )
    return checkpoint


def _select_for_rank(training: TrainingState, path: str, saved: Entries) -> RankEntries:
    """Return what this rank loads from ``saved``.

    That does not include what belongs to one rank alone if another number of ranks saved the checkpoint: one part of
    the data of one of them is none of another.
    """
    rank, others = training.ranks.rank, saved.get("ranks", [])
    # The names in the entries of the other ranks count too: what was saved for each rank alone is none of the entries
    # that all ranks share, whatever the script says of it now.
    own = {name for name in saved if name in ENTRIES_OF_EACH_RANK or name.startswith(HOOKS)}.union(*others)
    own.discard("parameter_names")  # the chief's contains those of shared optimizers
    is_whole = len(others) + 1 == training.ranks.size
    for name, part in parts_of_rank(parts_of(training)).items():
        is_shared = is_whole and isinstance(part, (torch.nn.Module, torch.optim.Optimizer))
        if not is_shared or not others:  # else it was saved before the script set its per_rank
            own.add(name)
    shared = {name: value for name, value in saved.items() if name not in own and name != "ranks"}
    if not is_whole:
        position = outer_position([each.get("position") for each in (saved, *others)])
        return RankEntries(path, shared if position is None else {**shared, "position": position}, False)
    mine = dict(others[rank - 1]) if rank else {name: saved[name] for name in own if name in saved}
    if "parameter_names" in mine:
        mine["parameter_names"] = {**shared.get("parameter_names", {}), **mine["parameter_names"]}
    for name, values in mine.pop("rank_tensors", {}).items():
        if name in shared:
            state = shared[name] = copy.copy(shared[name])  # with the versions of the modules, an attribute
            state.update({key: values[canonical(key)] for key in state if canonical(key) in values})
    return RankEntries(path, {**shared, **mine}, True)


def _begins_again(entries: Entries) -> bool:
    """Return whether an inner loop begins again in an item of an outer loop that continues."""
    return "position" in entries and not SavedCursor.from_saved(entries["position"]["path"][-1]).has_begun


def _number(size: int) -> str:
    return "1 process" if size == 1 else f"{size} ranks"


# -- compare -----------------------------------------------------------------------------------------------------------


def _pairs_to_load(training: TrainingState, checkpoint: RankEntries, strict: bool) -> Pairs:
    """Return each object and the state to load into it; raise or, if not ``strict``, warn about what does not match."""
    pairs, misfits = compare(training, checkpoint.entries, without_rank=not checkpoint.is_whole)
    if misfits:
        report = "\n  ".join([f"{checkpoint.path} does not match this session:", *lines_of(misfits)])
        if strict:
            raise CheckpointError(f"{report}\nMake them match, or load what matches: {_NOT_STRICT}")
        logger.warning("%s\nThe rest is loaded.", report)
    return _without_iterated(training, pairs)


def _replaced_hyperparameters(training: TrainingState, pairs: Pairs) -> list[str]:
    """Return which hyperparameters of the script the checkpoint is about to replace; of a loop's first restore only."""
    if "hyperparameters" in training.warned or not writes_for_all(training.ranks):
        return []
    training.warned.add("hyperparameters")  # after a recovery, the optimizer has what the training run made of them
    changed: list[str] = []
    for name, (part, state) in pairs.items():
        if isinstance(part, torch.optim.Optimizer):
            prefix = "" if name == "optimizer" else f"{name}: "
            changed += [f"{prefix}{each}" for each in changed_hyperparameters(part, state)]
    return changed


def _without_iterated(training: TrainingState, pairs: Pairs) -> Pairs:
    """Leave out loaders that are being iterated: they continue where they are, and cannot take back their items."""
    return {name: pair for name, pair in pairs.items() if not training.position.iterates(pair[0])}


def _without_hooks(training: TrainingState, pairs: Pairs) -> Pairs:
    hooks = [*training.hooks.values()]
    return {name: pair for name, pair in pairs.items() if not any(pair[0] is each for each in hooks)}


# -- load --------------------------------------------------------------------------------------------------------------


def load(training: TrainingState, checkpoint: RankEntries, pairs: Pairs, strict: bool) -> None:
    """Load ``pairs``, and all of the checkpoint that is not the state of an object, but for the random states."""
    saved = checkpoint.entries
    for name, (part, state) in pairs.items():
        _load_part(name, part, like_own(part, state), checkpoint.path, strict)
    load_gradients(training, saved)
    training.loop_state.restore(saved["global_step"], saved["runs"])
    if checkpoint.is_whole:
        training.accumulated.load_state_dict(saved.get("running_values"))
    training.position.load_state_dict(saved.get("position"), saved.get("random"), checkpoint.finished)


def _load_part(name: str, part: Stateful, state: Tree, path: str, strict: bool) -> None:
    try:
        if isinstance(part, torch.nn.Module):
            part.load_state_dict(state, strict=strict)
        elif isinstance(part, torch.optim.Optimizer):
            _load_optimizer(part, state)
        else:
            part.load_state_dict(state)
    except BaseException as error:
        add_note(error, f"while loading {name!r} from {path}: what comes before it is loaded already")
        raise


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Entries) -> None:
    """Load ``state`` into the dicts of ``param_groups`` that exist: the script may have references to them."""
    groups = [*optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, loaded in zip(groups, [dict(each) for each in optimizer.param_groups], strict=True):
        group.clear()
        group.update(loaded)
    optimizer.param_groups[:] = groups


def load_gradients(training: TrainingState, saved: Entries) -> None:
    """Replace the accumulated gradients by ``saved``, and drop the gradients that FSDP2 has not reduced yet."""
    gradients = training.gradients
    if gradients is None:
        return
    own, shards = saved.get("gradients") or {}, saved.get("sharded_gradients") or {}
    whole = {str(number) for number, each in enumerate(gradients.parameters()) if not is_sharded(each)}
    fit = {number: gradient for number, gradient in own.items() if number in whole}
    gradients.load_state_dict({**shards, **fit} or None)
    for owner, name in gradients_to_reduce(training):
        setattr(owner, name, None)
    if len(fit) < len(own):
        logger.warning("gradients that had accumulated in a model that was sharded in another way are dropped")


def _warn_of_buckets(training: TrainingState) -> None:
    """Log a warning, once, if DistributedDataParallel will not add gradients in the order in which it did before.

    It puts gradients into other buckets after its first backward pass in a process. The sum of two numbers does not
    depend on their order, but the sum of three does, in its last bit.
    """
    ranks = training.ranks
    if ranks.size < 3 or not writes_for_all(ranks) or not training.global_step or "buckets" in training.warned:
        return
    for name, part in parts_of(training).items():
        if not isinstance(part, torch.nn.parallel.DistributedDataParallel):
            continue
        is_fixed = part.find_unused_parameters and not part.static_graph
        if not is_fixed and not getattr(part, "_has_rebuilt_buckets", False):
            training.warned.add("buckets")
            logger.warning(
                "%r is a DistributedDataParallel on %d ranks, which adds gradients in another order in its first step "
                "than later, so the weights will differ in their last bits from a training run without interruption. "
                "If that matters, give it find_unused_parameters=True, or make two steps before the loop is created",
                *(name, ranks.size),
            )
            return


def _tell_of_threads(training: TrainingState, checkpoint: RankEntries) -> None:
    """Log, once, if sums on the CPU are divided over another number of threads than before."""
    threads, saved = torch.get_num_threads(), checkpoint.entries.get("num_threads")
    if saved in (None, threads) or not writes_for_all(training.ranks) or "threads" in training.warned:
        return
    training.warned.add("threads")
    logger.info(
        "%s was saved with %d threads, and torch has %d now: on the CPU, sums may differ in their last bits from a "
        "training run without interruption. If that matters, call torch.set_num_threads(%d) first",
        *(checkpoint.path, saved, threads, saved),
    )


def _tell_of_hooks(training: TrainingState, checkpoint: RankEntries) -> None:
    """Log, once, which hooks with a state the training run did not have before, and which it has no longer."""
    if not checkpoint.is_whole or not writes_for_all(training.ranks) or "hooks" in training.warned:
        return
    training.warned.add("hooks")  # after a recovery, the loop may have saved with its own hooks
    new, gone = hooks_of_one(training, checkpoint.entries)
    if new:
        logger.info("%s has no state of %s, which starts over", checkpoint.path, shortened(new, 8))
    if gone:
        logger.info(
            "%s has a state of %s, which the loop does not have: it is passed over", checkpoint.path, shortened(gone, 8)
        )


# -- the second load ---------------------------------------------------------------------------------------------------

_UNCHANGED: Any = type("Unchanged", (), {})()


class SecondLoad:
    """Loads a checkpoint a second time where its loop continues.

    A resumed script repeats code on its way to the loop in which the checkpoint was saved: a scheduler's step at the
    start of an epoch, the epochs of a plain ``for`` that are done. The checkpoint contains what that code did. So the
    state is loaded again once the loop is reached, and the repeated code has had no effect on it.

    What the script changes on purpose, between the creation of the loop and its first ``until_stop``, such as another
    learning rate, is kept. It is noted entry by entry of each ``state_dict()``, by contents.

    Args:
        training: what was restored.
        path: the checkpoint.
        pairs: what was loaded of it.
        strict: whether what does not match any more is left alone.
    """

    def __init__(self, training: TrainingState, path: str, pairs: Pairs, strict: bool) -> None:
        self._training, self._path, self._strict = training, path, strict
        # Not the loaders: one may start its workers to tell its state.
        loaded = {name: part for name, (part, _) in _without_hooks(training, pairs).items()}
        self._parts = {name: part for name, part in loaded.items() if not _is_loader(part)}
        self._marks = {name: _marked(part.state_dict()) for name, part in self._parts.items()}
        self._kept: dict[str, Tree] = {}

    def note_changes(self) -> None:
        """Keep what the script has changed since the checkpoint was loaded, before its first ``until_stop``."""
        states = {name: part.state_dict() for name, part in self._parts.items()}
        changes = {name: _changes(self._marks[name], _marked(state), state) for name, state in states.items()}
        self._marks = {}
        self._kept = {name: changed for name, changed in changes.items() if changed is not _UNCHANGED}
        if self._kept:
            logger.info(
                "the script changed %s after the checkpoint was restored: that is kept", shortened([*self._kept], 8)
            )

    def load(self, runs_were_made: bool) -> None:
        """Load the checkpoint again, except for what is kept, hooks, and data that are being iterated."""
        training, path = self._training, self._path
        # The first save of the session may be replacing the checkpoint in the background. Wait for all savers: a hook
        # may save with another one than the session's.
        run_on_all(training.ranks, "wait for the savers", partial(wait_for_savers, training))
        # It is read again: optimizers keep the tensors that they were given, and have changed them in place.
        checkpoint = read(training, lambda: (path, read_checkpoint(path, training)))
        assert checkpoint is not None  # choosing it returned a path
        pairs, misfits = compare(training, checkpoint.entries, without_rank=not checkpoint.is_whole)
        if self._strict and misfits:
            pairs = self._without_misfits(pairs, misfits)

        def load_here() -> None:
            for name, (part, state) in _without_hooks(training, _without_iterated(training, pairs)).items():
                state = _with_changes(self._kept.get(name, _UNCHANGED), like_own(part, state))
                _load_part(name, part, state, path, self._strict)
            load_gradients(training, checkpoint.entries)

        run_on_all(training.ranks, "load the checkpoint again", load_here)
        # Runs on the way have counted steps, which are undone. Without such a run, a step that the script has set since
        # the restore stays.
        if runs_were_made:
            training.loop_state.restore(checkpoint.entries["global_step"], checkpoint.entries["runs"])
            if checkpoint.is_whole:
                training.accumulated.load_state_dict(checkpoint.entries.get("running_values"))

    def _without_misfits(self, pairs: Pairs, misfits: Misfits) -> Pairs:
        """Leave out, with a warning, what no longer fits, such as an optimizer with one more parameter group."""
        logger.warning(
            "what the script has changed no longer matches %s, and stays as it is:\n  %s",
            self._path,
            "\n  ".join(lines_of(misfits)),
        )
        return {name: pair for name, pair in pairs.items() if name not in misfits}


def _is_loader(part: object) -> bool:
    return isinstance(part, Iterable) and not isinstance(part, torch.nn.Module)


def _marked(state: Tree) -> Tree:
    """Return the structure of ``state`` with a mark in place of each leaf, which is another one for other contents.

    Not torch's count of changes: it leaves out those of ``parameter.data``, of memory that is shared with an array, and
    in inference mode. Not copies, which might not fit into memory.
    """
    leaves = [*_leaves(state)]
    try:
        # In one call, which waits once for a device. A list may have a million numbers, which are quicker as text.
        others = iter(digests(leaf for leaf in leaves if not is_atom(leaf)))
    except TooManyValuesError:
        return object()  # equal to no other mark: the state counts as changed, and all of it is kept
    return _with_leaves(state, iter([atom_text(leaf) if is_atom(leaf) else next(others) for leaf in leaves]))


def _leaves(state: Tree) -> Iterator[object]:
    if isinstance(state, Mapping) or type(state) in (list, tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _leaves(value)
    else:
        yield state


def _with_leaves(state: Tree, leaves: Iterator[object]) -> Tree:
    """Return the structure of ``state``, as dicts and lists, with the next of ``leaves`` in place of each leaf."""
    if isinstance(state, Mapping):
        return {key: _with_leaves(value, leaves) for key, value in state.items()}
    return [_with_leaves(value, leaves) for value in state] if type(state) in (list, tuple) else next(leaves)


def _changes(before: Tree, after: Tree, now: Tree) -> Tree:
    """Return ``now`` with copies of the leaves that have changed, and ``_UNCHANGED`` for the others.

    ``before`` and ``after`` are what :func:`_marked` returned, ``after`` for ``now``.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        changes = {key: _changes(before.get(key), after[key], value) for key, value in now.items()}
        same = changes.keys() == before.keys() and all(each is _UNCHANGED for each in changes.values())
        return _UNCHANGED if same else changes
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        items = [_changes(*each) for each in zip(before, after, now, strict=True)]
        return _UNCHANGED if all(each is _UNCHANGED for each in items) else type(now)(items)
    return _UNCHANGED if before == after else deep_copy(now)


def _with_changes(changes: Tree, state: Tree) -> Tree:
    """Return ``state``, with the leaves of ``changes`` that have changed."""
    if changes is _UNCHANGED:
        return state
    if isinstance(changes, Mapping) and isinstance(state, Mapping):
        result = copy.copy(state)  # with the versions of the modules, which are an attribute
        result.clear()  # type: ignore[attr-defined]
        # Without what the file lacks and the script has left alone, such as the bias of a new head.
        kept = {key: value for key, value in changes.items() if key in state or value is not _UNCHANGED}
        result.update(  # type: ignore[attr-defined]
            {key: _with_changes(value, state.get(key, {})) for key, value in kept.items()}
        )
        return result
    if type(changes) in (list, tuple) and isinstance(state, (list, tuple)) and len(changes) == len(state):
        return type(changes)(_with_changes(*each) for each in zip(changes, state, strict=True))
    return changes
