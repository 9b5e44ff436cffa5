"""What a loop does because of the other ranks: it tells them how far it is, and stops and calls hooks with them.

:mod:`torchhooks.ranks.peers` has the thread that talks to the other ranks. It knows neither the hooks nor the state of
the loop: this module tells it how far the loop is, and applies what the ranks have decided.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from torchhooks.common.errors import LifecycleError, PeerError, TorchHooksError, add_note, brief
from torchhooks.common.log import logger
from torchhooks.common.random_states import random_states, set_random_states
from torchhooks.common.source import lines_of_script
from torchhooks.common.stateful import has_state
from torchhooks.common.timers import AtSteps, EveryEpochs, EverySteps, Timer
from torchhooks.data.cursor import length_of
from torchhooks.lifecycle.hook import PeriodicHook, SessionRunHook
from torchhooks.loop.schedule import Schedule
from torchhooks.progress.loop_state import NO_OUTPUTS, RUNNING, Stop, StoppedBy
from torchhooks.progress.training_state import TrainingState
from torchhooks.ranks.agreement import (
    BY_STOP_ITERATION,
    CLOSE,
    END,
    ENTER,
    ITEM,
    STOP,
    UNKNOWN_LENGTH,
    WHERE,
    Meeting,
    Round,
)
from torchhooks.ranks.peers import Peers, TrainingProgress
from torchhooks.ranks.ranks import OtherPurposeError
from torchhooks.ranks.transport import is_communication_error

T = TypeVar("T")


class CallsAtClose(Protocol):
    """What a rank that leaves its loops does with the others: :class:`torchhooks.loop.boundaries.Boundaries`."""

    def due_at_close(self) -> int: ...
    def make_at_close(self, calls: int) -> None: ...
    def save_at_parting(self) -> None: ...


class RankSync:
    """Keeps one loop in step with the same loop on the other ranks. Called in the training thread.

    Args:
        training: the state of the loop. A stop that it proposes takes effect once all ranks have agreed.
        schedule: the hooks of the loop.
    """

    def __init__(self, training: TrainingState, schedule: Schedule) -> None:
        self._training, self._schedule = training, schedule
        self._training_thread = threading.get_ident()
        self._calls = 0  # odd while calls are made between two runs
        self.run_number = 0
        """The number of the run in progress if hooks take part in it, until its last ``after_run`` is over."""
        self._last_number = 0
        self._agreed_lengths: list[bool] = []  # of the open loops, from the outermost
        self._warned_of: set[tuple[int, int]] = set()  # lengths of the data, here and on the rank with the fewest
        self._limited: dict[int, int] = {}  # by the address of data without a length, the number that may be taken
        self.peers = Peers(training, progress=self._progress, new_requests=self._new_requests)
        training.attach_peers(self.peers)
        training.loop_state.agree_by(self._propose)

    # -- the start ----------------------------------------------------------------------------------------------------

    def start(self, step_unit: str, checkpoint_dir: str | None, checkpoint: str | None = None) -> None:
        """Connect to the other ranks, and check that they have created the same loop.

        Raises:
            LifecycleError: another rank did not create its loop in time, or created a different one.
        """
        self.peers.start()
        slots, collective = self._schedule.all_hooks, [slot.hook for slot in self._schedule.collective]
        mine = {
            "step_unit is": step_unit,
            "the checkpoint to restore is": f"{checkpoint}",
            "the collective hooks are": f"[{', '.join(map(_class_and_period, collective))}]",
            "checkpoint_dir is": "None" if checkpoint_dir is None else os.path.realpath(checkpoint_dir),
            "the hooks save into": f"[{', '.join(map(_folder, collective))}]",
        }
        hooks = [(_class_and_period(slot.hook), _description(slot.hook)) for slot in slots]
        brings = any(slot.hook.brings_checkpoints for slot in slots)
        others = self._training.ranks.gather((mine, hooks, brings), "the loop")
        # With a copy from which each rank gets the checkpoint, as a MirrorHook has it, each may have its own disk.
        share_folder = not all(brings for _, _, brings in others)
        for rank, (other, their_hooks, _) in enumerate(others):
            for name, value in mine.items():
                if other[name] != value and (share_folder or name not in _WAYS_OUT):
                    raise LifecycleError(
                        f"{name} {value} on rank {self._training.ranks.rank} and {other[name]} on rank {rank}: "
                        f"{_WAYS_OUT.get(name, 'create the loop with the same arguments on every rank')}"
                    )
            self._check_order(hooks, rank, their_hooks)
        counts = [Counter(text for text, _ in texts) for _, texts, _ in others]
        local = [
            slot.hook for slot, (text, _) in zip(slots, hooks, strict=True) if len({each[text] for each in counts}) > 1
        ]
        self._training.ranks.note_loop(share_folder=share_folder, local_hooks=local)

    def _check_order(self, hooks: list[tuple[str, str]], rank: int, others: list[tuple[str, str]]) -> None:
        """Raise a LifecycleError if the hooks that this rank and another one have come in another order there.

        What they call in the same run, such as an evaluation, may need all ranks.
        """
        # First their classes and periods, then what tells hooks of one class and period apart.
        for which in range(2):
            differ = _common_in_order([hook[which] for hook in hooks], [hook[which] for hook in others])
            if differ is None:
                continue
            mine, theirs = (f"[{', '.join(order)}]" for order in differ)
            raise LifecycleError(
                f"the hooks are {mine} on rank {self._training.ranks.rank} and {theirs} on rank {rank}: give every "
                "rank the same hooks, in the same order"
            )

    # -- runs ---------------------------------------------------------------------------------------------------------

    def begin_run(self, number: int) -> None:
        """Begin a run in which hooks take part. Raise the PeerError if another rank has failed."""
        self.check()  # first: the others may also have asked for a stop in this run
        self.run_number = self._last_number = number

    def end_hooks_of_run(self) -> None:
        """Note that the last ``after_run`` of a run is over."""
        self.run_number = 0

    def end_run(self) -> None:
        """Hold here if this rank promised to, and stop or call hooks if this run is the last one of a round."""
        self._apply(self.peers.end_run())

    def check(self) -> None:
        """Raise the PeerError if another rank has failed, and end the loop."""
        self.peers.check()

    def why_no_checkpoint(self) -> str | None:
        """Return why nothing may be saved any more, or ``None``."""
        failure = self.peers.failure
        return None if failure is None or self.peers.has_stopped else str(failure)

    def _apply(self, rounds: list[Round]) -> None:
        """Do what the ranks have decided in ``rounds``, and raise the failure of another rank."""
        self._carry_out(rounds)
        if not self.peers.has_stopped:
            self.check()

    def _carry_out(self, rounds: list[Round]) -> None:
        """Do what the ranks have decided in ``rounds``, whose last run is over."""
        for each in rounds:
            for number, slot in enumerate(self._schedule.collective):
                if each.bits & _bit(number):
                    self._schedule.force(slot)
            if each.stops:
                self._training.loop_state.decide(Stop.from_text(each.why))

    # -- data ---------------------------------------------------------------------------------------------------------

    def enter(self, iterable: Iterable[object], limit: int | None, depth: int) -> int | None:
        """Meet the other ranks at the start of an ``until_stop``, and return the ``limit`` to use for its items.

        ``depth`` is that of the loop: 1 outside of all others. If some ranks know how many items they have, all of them
        make as many as the one with the fewest.
        """
        self._limited.pop(id(iterable), None)  # of a loop that was left before its end
        known = length_of(iterable)
        length = UNKNOWN_LENGTH if known is None else known
        if limit is not None and (length == UNKNOWN_LENGTH or limit < length):
            length = limit
        self.peers.loop_begins()
        met = self._meet(ENTER, length, depth)
        self._agreed_lengths[depth - 1 :] = [met is not None and met.all_known]
        if met is None or met.least == UNKNOWN_LENGTH:
            return limit
        if met.least == length:
            return limit  # not the number of items, which a range that is what is left of one has fewer of
        if length == UNKNOWN_LENGTH:
            self._limited[id(iterable)] = met.least
        else:
            self._warn_of_limit(f"{length} items of data", length, met.least)
        return met.least

    def warn_of_items_left(self, iterable: Iterable[T], rest: Iterator[T], taken: int) -> None:
        """Log a warning if data without a length have more items than this rank may take, as many as another rank has.

        One item is taken of ``rest``, which is left of the ``iterable`` after ``taken`` items, unless a later loop may
        take it: from an iterator, or from what saves where it is.
        """
        least = self._limited.pop(id(iterable), None)
        if least is None or taken < least or (UNKNOWN_LENGTH, least) in self._warned_of:
            return
        if isinstance(iterable, Iterator) or has_state(iterable):
            self._warn_of_limit("an unknown number of items of data", UNKNOWN_LENGTH, least)
            return
        # The item is taken for the warning alone: what the script draws after the loop has to be the same without it.
        before = random_states()
        with contextlib.suppress(Exception):  # the script has not asked for this item, nor for its error
            next(rest)
            self._warn_of_limit("more items of data", UNKNOWN_LENGTH, least)
        set_random_states(before)

    def _warn_of_limit(self, items: str, length: int, least: int) -> None:
        if (length, least) not in self._warned_of:
            self._warned_of.add((length, least))  # once, and not in every epoch
            logger.warning(
                "rank %d has %s and another rank only %d: until_stop yields %d on every rank",
                *(self._training.ranks.rank, items, least, least),
            )

    def next_item(self) -> None:
        """Meet the other ranks where the body asks for the next item of a loop that has inner ones."""
        self._meet(ITEM)

    def loops_are_over(self, left: str = "") -> None:
        """Tell the other ranks that the outermost loop is over; ``left`` says where the script has left it."""
        self.peers.loops_are_over(left)

    def epoch_ends(self, due: Iterable[SessionRunHook]) -> None:
        """Tell the other ranks that hooks are called for the end of an epoch, unless this rank alone has them."""
        if not all(map(self._training.ranks.has_locally, due)):
            self.peers.note_epoch()

    def data_ended(self, depth: int) -> None:
        """Meet the other ranks at the end of the data of a loop, unless all of them knew where that is."""
        if not self._agreed_lengths[depth - 1]:
            self._meet(END)
        self.peers.data_ended()

    def is_same_everywhere(self, place: object) -> bool:
        """Return whether all ranks part at the same ``place`` in their data."""
        places = self._training.ranks.gather(place, "where the ranks part")
        return places.count(places[0]) == len(places)

    def raise_parting(self) -> None:
        """Raise the PeerError, and end the loop, if all ranks have stopped because one of them has left its loops.

        Called once they have saved what they have in common.
        """
        if self.peers.parting is not None:
            self._training.loop_state.fail(self.peers.parting)
            raise self.peers.parting

    def _meet(self, kind: int, value: int = UNKNOWN_LENGTH, detail: int = 0, why: str = "") -> Meeting | None:
        """Wait for the other ranks; return ``None`` if the loop stops."""
        met, rounds = self.peers.meet(kind, value, detail, why)
        try:
            self._apply(rounds)
        except PeerError as error:
            if kind != CLOSE or error.rank != self._training.ranks.rank:  # the error says where this rank has left
                add_note(
                    error, f"torchhooks: rank {self._training.ranks.rank} waited for the others where it {WHERE[kind]}"
                )
            raise
        return None if self.peers.has_stopped else met

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None, calls: CallsAtClose) -> BaseException | None:
        """Meet the other ranks before the loop closes without an agreed stop; return why it must not end well.

        Until all of them have left it, this one makes the ``calls`` that the others may make.
        """
        state = self._training.loop_state
        if not self.peers.is_connected:
            return None
        clean = error is None or type(error) is StopIteration
        failure = state.failure if clean else error
        try:
            if failure is not None:
                self._tell_failure(failure, state.runs, in_run=False)
                if clean and failure.__traceback__ is None:  # it was never raised: the script has caught its cause
                    return failure
            elif not self.peers.has_stopped:
                reason = brief(error) if error is not None else state.reason or "closed"
                self.peers.is_leaving(self._how_left(error))
                self._meet_to_leave(Stop(reason, StoppedBy.END).to_text(), calls, by_error=error is not None)
        except BaseException as another:  # such as KeyboardInterrupt: the loop has to be closed in any case
            return None if another is failure else another
        return None

    def _how_left(self, error: BaseException | None) -> str:
        """Return how the script has left the loop, if it was not by leaving an ``until_stop``."""
        state = self._training.loop_state
        after = f"after run {state.runs}"
        how = "closed its loop" if error is None else f"ended its loop by {brief(error)}"
        if error is None and state.data_have_ended:
            how = f"{WHERE[END]}, and closed its loop,"
        return f"{how} {after}, {lines_of_script()[0]}"

    def _meet_to_leave(self, why: str, calls: CallsAtClose, *, by_error: bool) -> None:
        peers = self.peers
        while not peers.has_stopped:
            joins = calls.due_at_close()
            self._meet(CLOSE, detail=joins | (BY_STOP_ITERATION if by_error else 0), why=why)
            if not peers.has_stopped:
                # Another rank makes them, where the script has left its loops on this one.
                calls.make_at_close(peers.awaited(joins))
        if self.has_parted:
            calls.save_at_parting()
        self.raise_parting()

    @property
    def has_parted(self) -> bool:
        """Whether all ranks make the calls for a stop where they are, because one of them has left its loops there."""
        return self.peers.has_parted

    def run_failed(self, error: BaseException, *, in_run: bool) -> None:
        """Tell the other ranks that a run, or a call between two runs, failed here with ``error``, and wait for them.

        If the same failed on all ranks, all of them leave it to their scripts. Otherwise no rank can go on: the others
        raise a PeerError, and so does the next call to this loop if the script catches ``error``.

        Raises:
            PeerError: ``error`` looks like the consequence of another rank's failure.
        """
        state, run = self._training.loop_state, self._training.loop_state.runs
        if in_run:
            # While the step is made, the run is one more than were counted. With hooks, it is counted only when
            # after_run begins. Until then, begin_run() has noted its number.
            run = max(run + (state.outputs is NO_OUTPUTS), self._last_number)
        self.run_number = 0  # the run is over, also for the others
        failure = self._tell_failure(error, run, in_run=in_run, counted=state.runs)
        if self.peers.has_failed and not isinstance(error, PeerError):
            if failure is None:
                where = f"{'in' if in_run else 'after'} run {run}"
                message = f"rank {self._training.ranks.rank} failed {where}: {brief(error)}"
                failure = PeerError(message, self._training.ranks.rank, run, brief(error))
            failure.__cause__ = error
            state.fail(failure, error)
        elif not self.peers.has_stopped and not isinstance(error, PeerError):
            # It failed on all ranks, which may have agreed that it is the last one. If another rank has ended with its
            # error by now, the next call says so: the error that this run raises is this rank's.
            self._carry_out(self.peers.end_run())

    def _tell_failure(
        self, error: BaseException, run: int, *, in_run: bool, counted: int | None = None
    ) -> PeerError | None:
        """Tell the other ranks that this one failed with ``error``; return the failure of another one.

        Raises:
            PeerError: ``error`` looks like the consequence of another rank's failure.
        """
        peers = self.peers
        if not peers.is_connected or peers.has_stopped or peers.has_failed:
            return None
        failure = peers.tell_failure(error, run, in_run, counted)
        if failure is None or failure is error:
            return None
        if not is_communication_error(error):
            add_note(error, f"torchhooks: meanwhile, {failure}")
            return failure
        self._training.loop_state.fail(failure)
        raise failure from error

    def align(self) -> None:
        """Wait until every rank is here, where the ``end`` of a collective hook follows.

        A rank whose ``end`` before that failed may have left the others in a gathering, which then fails on them too.
        """
        while True:
            try:
                self._training.ranks.gather(None, "the end of the next hook")
                return
            except OtherPurposeError:
                continue  # the others come here too
            except TorchHooksError:
                return  # the hook will get it if it needs the other ranks

    def leave(self, errors: list[BaseException]) -> None:
        """Tell the other ranks that this one is done."""
        if self.peers.is_connected:
            self.peers.leave(errors)

    # -- what the thread that talks to the other ranks asks for -------------------------------------------------------

    def _propose(self, stop: Stop) -> None:
        """Ask the other ranks to stop. Any thread may call this."""
        state = self._training.loop_state
        # Another thread cannot say in which run it asks: the run that it sees may be over by the time of the request.
        is_in_run = state.phase is RUNNING and threading.get_ident() == self._training_thread
        self.peers.ask_to_stop(stop.to_text(), (self.run_number or state.runs) if is_in_run else None)

    def _progress(self) -> TrainingProgress:
        """Return how far the loop is. Any thread may call this: the training thread writes without a lock."""
        state = self._training.loop_state
        while True:  # until none of the numbers has changed while the others were read
            runs, number, calls = state.runs, self.run_number, self._calls
            # Before the first run, and after one that failed, calls between two runs have no outputs either.
            in_step = state.phase is RUNNING and state.outputs is NO_OUTPUTS and not calls % 2
            if (runs, number, calls) == (state.runs, self.run_number, self._calls):
                return TrainingProgress(runs, number, in_step)

    @contextlib.contextmanager
    def calls_between_runs(self) -> Iterator[None]:
        """Tell the other ranks that this one is in no run, though nothing can begin one."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls += 1

    def _new_requests(self) -> tuple[int, str]:
        """Return the bits of what this rank asks for: a stop if a signal has arrived, and hooks since the last call.

        On the chief, these are the hooks that are due by the clock; on all ranks, those that a signal triggers.
        """
        state = self._training.loop_state
        bits, why = 0, ""
        if state.signal is not None:
            bits, why = STOP, Stop(f"signal {state.signal}", StoppedBy.SIGNAL).to_text()
        now = time.monotonic()  # one look for all, so that hooks that share a timer in seconds are due together
        for number, slot in enumerate(self._schedule.collective):
            is_moment = self._training.ranks.is_chief and slot.trigger.take_moment(now)
            if slot.trigger.take_signal() or is_moment:
                bits |= _bit(number)
        return bits, why


def _bit(number: int) -> int:
    """Return the bit that asks for the collective hook with this number: STOP is the lowest one."""
    return STOP << number + 1


_WAYS_OUT = dict.fromkeys(
    ("checkpoint_dir is", "the hooks save into"),
    "give all ranks the same folder, on a disk that all of them see. A checkpoint has the states of all ranks",
)


def _common_in_order(mine: list[str], theirs: list[str]) -> tuple[list[str], list[str]] | None:
    """Return both lists without what the other one has another number of; ``None`` if they are in the same order."""
    counts, their_counts = Counter(mine), Counter(theirs)
    orders = [[each for each in texts if counts[each] == their_counts[each]] for texts in (mine, theirs)]
    return None if orders[0] == orders[1] else (orders[0], orders[1])


def _folder(hook: SessionRunHook) -> str:
    return "no folder" if hook.checkpoint_dir is None else os.path.realpath(hook.checkpoint_dir)


def _description(hook: object) -> str:
    try:
        return re.sub(" at 0x[0-9a-f]+", "", repr(hook))  # an address is another one in each process
    except Exception:  # a broken __repr__ of a user
        return type(hook).__name__


def _class_and_period(hook: object) -> str:
    name, timer = type(hook).__name__, hook.timer if isinstance(hook, PeriodicHook) else None
    if isinstance(timer, EverySteps | EveryEpochs | AtSteps):
        return f"{name} with {timer!r}"
    # A period in seconds may differ: the chief's clock decides.
    return f"{name} every {timer.every_steps} steps" if isinstance(timer, Timer) and timer.every_steps else name
