"""The other ranks, as one loop sees them: a thread that exchanges ticks with them, and where the loop waits for them.

Two threads share a :class:`Peers`. The *tick thread* calls :meth:`GlooTransport.exchange` every ``tick_secs``, and
derives from the rows of all ranks what happens. It knows rounds, meetings and failures, but neither hooks nor the loop.
The *training thread*, which makes the runs, only looks at what the tick thread found at the end of a run after ``wake``
was called, and between runs. An idle run therefore does exactly what it does in a single process, and takes no lock.

The tick thread asks ``progress`` how far the training thread is. That reads values that the training thread writes
anyway, and needs no lock, because of the order:

* The tick thread calls ``wake``, then reads the number of runs, and promises a run after it.
* The training thread counts the run, and then looks whether it was woken.

If the tick thread has not seen the run counted, the training thread sees the news at the end of that very run. So a
rank that promised the run in progress always holds at its end.

A stop that rank 1 asks for is one :class:`torchhooks.ranks.agreement.Round` on each rank: ``ask`` on rank 1, then
``promise`` after one tick and ``decide`` after the next in the tick threads of all ranks, and ``apply`` in their
training threads at the end of the last run.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torchhooks.common.errors import LifecycleError, PeerError, TorchHooksError, brief
from torchhooks.common.log import logger
from torchhooks.progress.training_state import TrainingState
from torchhooks.ranks.agreement import (
    CLOSE,
    END,
    ENTER,
    FAILED,
    FAILED_LATER,
    GONE,
    IN_LOOPS,
    LEFT,
    LIVE,
    OUTSIDE,
    RUN_FAILED,
    STOP,
    UNKNOWN_LENGTH,
    WHERE,
    Agreement,
    AllLeft,
    CallForPromises,
    Conflict,
    Decision,
    Event,
    Failure,
    Meeting,
    Round,
    RoundPhase,
    Row,
    RunFailed,
    joined_calls,
)
from torchhooks.ranks.transport import ContactLostError, GlooTransport, is_communication_error

# How long the end of the process waits for the last exchange with the other ranks, which takes milliseconds if they are
# alive. A rank that is gone must not keep this one from ending, nor torchrun from restarting it.
_EXIT_SECS = 2.0

# The least time for the training thread to look, once contact is lost. With the time that find_missing() takes, a
# process that is stuck ends within lost_after_secs plus 5 seconds.
_LEAST_STUCK_SECS = 1.0

_STUCK_EXIT_CODE = 70  # "internal software error" in sysexits.h, which no signal and no shell uses


class TrainingProgress(NamedTuple):
    """How far the training thread is in its runs."""

    runs: int
    """How many runs are counted."""
    number: int
    """The number of the run in progress if hooks take part in it, until its last ``after_run`` is over; 0 otherwise."""
    in_step: bool
    """Whether the step of a run is in progress."""


class _RunNumbers(NamedTuple):
    """What this rank says of its runs in a row."""

    made: int
    begun: int
    """The last run that has certainly begun."""
    promise: int
    """The last run that this rank might already be in. A stop cannot take effect before its end."""


class _Arrival(NamedTuple):
    """The last meeting at which this rank has arrived: four numbers of its row."""

    meeting: int = 0
    kind: int = 0
    value: int = UNKNOWN_LENGTH
    detail: int = 0


class _Hold(NamedTuple):
    """Where the training thread waits for the other ranks: at the end of run number ``runs``, or between two runs."""

    runs: int
    at_meeting: bool


class _Outcome(NamedTuple):
    """How the loop ended on this rank; ``LIVE`` before it has."""

    status: int = LIVE
    reason: str = ""
    run: int = 0
    in_run: bool = False
    """Whether it failed in that run, or else after it."""
    counted: int = 0
    """How many runs count, if a run failed whose error the script may catch."""


class Peers:
    """Keeps one rank in step with the others.

    Args:
        training: the state of the loop.
        progress: returns how far the training thread is. The tick thread calls it too.
        new_requests: returns the bits of what this rank asks for, and the reason of a stop. Called in the tick thread;
            a signal is reported at each call, hooks once.
    """

    def __init__(
        self,
        training: TrainingState,
        *,
        progress: Callable[[], TrainingProgress],
        new_requests: Callable[[], tuple[int, str]],
    ) -> None:
        self._training, self._progress, self._new_requests = training, progress, new_requests
        self._training_thread = threading.get_ident()
        self._pid = os.getpid()
        # Both threads change what stands below with this lock held, except where a comment says why not. It is
        # reentrant: a signal handler of the user's, which runs between any two lines of the training thread, may call
        # request_stop(). An idle run never takes it.
        self._changed = threading.Condition()

        # What this rank says in the next tick.
        self._round = Round()  # the one in which this rank can ask; after a stop, the round of the stop
        self._arrival = _Arrival()
        self._outcome = _Outcome()  # replaced as a whole, so that no tick has the status without the run and the reason

        # What the tick thread found. The training thread waits on the lock's condition for a change of it.
        self._agreement = Agreement()
        self._decided: tuple[Round, ...] = ()  # until the training thread applies them
        self._met: Meeting | None = None
        self._why_met = ""  # why a rank has asked for the stop that the meeting made
        self.parting: PeerError | None = None
        """Why this rank cannot continue, though all ranks have stopped at a meeting: one of them has left its loops."""
        self.has_parted = False
        """Whether the ranks have stopped at a meeting where one of them leaves its loops and another one goes on."""
        self._table: list[Row] = []  # of the last tick: replaced as a whole, so a reader without the lock has one tick
        self.failure: PeerError | None = None
        """Why this rank cannot continue, once another one has failed. Set once, so it is read without the lock."""

        # What the training thread does.
        self._hold: _Hold | None = None
        self.is_outside = False
        """Whether the training thread is in code of the script that is not the loop, because the data ended.

        That thread writes it, and the thread that waits after a failure reads it, only to choose what to do: no lock.
        """
        self._failure_is_seen = threading.Event()  # so the training thread hangs in no call
        self.left = ""
        """Where the script has left its loops on this rank, for the message of an error; empty while it has not."""
        self.loops = OUTSIDE
        """What the script does: OUTSIDE, IN_LOOPS or GONE.

        The training thread writes this without the lock, and a row takes it up a tick later at worst. The tick thread
        writes it while the training thread waits at a meeting.
        """
        self.epochs = 0
        """At the ends of how many epochs the hooks were called. Only the training thread writes it."""

        # What a watch of the loop asks for: see ask_for_states().
        self.state_text: Callable[[], str] = str
        """Returns what this rank says of itself, in at most 1,000 bytes. The tick thread calls it."""
        self.on_states: Callable[[list[str]], object] = lambda states: None
        """Takes what all ranks said, on all ranks. The tick thread calls it, so it must not wait for anything."""
        self._states_wanted = self._states_told = 0  # the number of the exchange: equal on all ranks once it is made

        # The tick thread.
        self._transport: GlooTransport | None = None
        self._thread: threading.Thread | None = None
        self._ticks = 0
        self._tick_began = (0.0, TrainingProgress(0, 0, False))  # when, and how far the training thread was
        self._tick_now = threading.Event()  # the next tick does not wait for its time
        self._ticks_ended = threading.Event()  # there will be no further tick
        self._thread_ended = threading.Event()
        self._is_over = False  # the loop is closed, so that the connection is needed for further ticks at most

    # -- called by the loop, in the training thread -------------------------------------------------------------------

    def start(self) -> None:
        """Connect to the other ranks, and start the tick thread.

        Raises:
            LifecycleError: another rank did not create its loop in time.
        """
        self._transport = transport = self._training.ranks.connect(self._why_not_to_wait)
        self._training.ranks.count_runs_with(lambda: self._run_numbers().begun)
        self._thread = threading.Thread(target=self._tick_on, args=(transport,), name="torchhooks ranks", daemon=True)
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        """Whether the tick thread runs: not before :meth:`start`, and not in a forked process."""
        return self._transport is not None and os.getpid() == self._pid

    @property
    def has_stopped(self) -> bool:
        """Whether this rank has made the agreed last run."""
        return self._round.phase is RoundPhase.APPLIED

    @property
    def is_stop_decided(self) -> bool:
        """Whether the ranks have agreed on the last run, and this one has not made it yet."""
        return any(each.stops for each in self._decided)

    @property
    def has_failed(self) -> bool:
        """Whether the other ranks were told that this one failed."""
        return self._outcome.status >= FAILED

    def failure_to_raise(self) -> PeerError | None:
        """Return why this rank cannot continue; ``None`` if it can, or if every rank has made the last run."""
        if self.failure is None or self._agreement.stopped:
            return None
        self._failure_is_seen.set()
        return self.failure

    def check(self) -> None:
        """Raise the PeerError if another rank has failed, and end the loop."""
        failure = self.failure_to_raise()
        if failure is not None:
            self._training.loop_state.fail(failure)
            raise failure

    def ask_to_stop(self, why: str, run: int | None) -> None:
        """Ask the other ranks to stop. Any thread may call this.

        ``run`` is the run in progress if the training thread asks in it. Holding at the end of that run makes it the
        last one if all ranks ask in it.
        """
        with self._changed:
            self._round.ask(STOP, why)
            if run is not None and all(each.last <= run for each in self._decided):
                self._round.asked_in = run
        self._training.loop_state.set_pending()
        self._tick_now.set()

    def exchange_states(self, state_text: Callable[[], str], on_states: Callable[[list[str]], object]) -> None:
        """Have the tick thread tell the others what ``state_text()`` returns, and give all answers to ``on_states``.

        It does so when a rank has called :meth:`ask_for_states`. Neither of the two may wait for anything.
        """
        self.state_text, self.on_states = state_text, on_states

    def ask_for_states(self) -> bool:
        """Have every rank say where it is, to all of them; return whether they can. Any thread may call this."""
        if not self.is_connected or self._ticks_ended.is_set():
            return False
        self._states_wanted = self._states_told + 1
        self._tick_now.set()
        return True

    def end_run(self) -> list[Round]:
        """Hold here if this rank promised to; return the rounds whose last run this is."""
        with self._changed:
            return self._wait(lambda: self._round.asked_in is None)

    def meet(
        self, kind: int, value: int = UNKNOWN_LENGTH, detail: int = 0, why: str = ""
    ) -> tuple[Meeting | None, list[Round]]:
        """Wait for the other ranks between two runs; return what they are told there.

        That is ``None`` if the loop stops at the end of an earlier run instead and, at CLOSE, if another rank makes
        calls that are due here too, according to ``detail``: this rank has then left the meeting, to make them.

        Also return the rounds whose last run is over. ``why`` this rank leaves is the reason if a meeting stops all.
        """
        with self._changed:
            before = self._arrival
            # Not one more than this rank's last one: a meeting may have been over without it, because it was gone.
            self._arrival = _Arrival(self._agreement.meetings + 1, kind, value, detail)
            self._met = None
            if kind == CLOSE:  # it has arrived, also if it now makes calls with another rank, which may take long
                self.loops = OUTSIDE
            joins = detail if kind == CLOSE else 0
            applied = self._wait(lambda: self._is_met(kind) or bool(self.awaited(joins)), at_meeting=True)
            if not self._is_met(kind):
                if self.failure is None and not self.has_stopped:
                    self._arrival = before
                return None, applied
            met = self._met
            assert met is not None
            if met.stop and not self.has_stopped:
                # A stop that was decided for a later run, which the end of the data prevents, takes effect here.
                stop = next((each for each in self._decided if each.stops), None)
                left = f"end rank {met.leaver} left the loop"
                self._apply(stop or Round(), "" if stop else self._why_met or why or left)
                applied.append(self._round)
                self.has_parted = met.stays is not None
            return met, applied

    def _is_met(self, kind: int) -> bool:
        # A rank that leaves waits for all ranks to leave, whatever meetings the others have before that.
        return self._met is not None and (self._met.stop or kind != CLOSE)

    def awaited(self, joins: int) -> int:
        """Return which of the calls in ``joins``, HAS_CALLS and HAS_EPOCH, another rank makes already."""
        return joined_calls(
            Row(detail=joins, gatherings=self._training.ranks.gatherings, epochs=self.epochs), self._table
        )

    def loop_begins(self) -> None:
        """Note that an ``until_stop`` begins."""
        self.is_outside = False  # without the lock: only the training thread writes it

    def data_ended(self) -> None:
        """Note that the data of a loop have ended, after which the script may do anything for long."""
        self.is_outside = True

    def loops_are_over(self, left: str) -> None:
        """Note that the outermost loop is over; ``left`` says where the script has left it, and is empty at its end."""
        self.left, self.loops = left, GONE if left else OUTSIDE
        self.is_outside = True

    def is_leaving(self, left: str) -> None:
        """Note where the script leaves the loop, unless it has left its loops before."""
        self.left = self.left or left

    def note_epoch(self) -> None:
        """Note that the hooks are called for the end of an epoch."""
        self.epochs += 1

    def tell_failure(
        self, error: BaseException, run: int, in_run: bool, counted: int | None = None
    ) -> PeerError | None:
        """Tell the other ranks that this one failed, and wait until they know; return the failure of another one.

        With ``counted``, the number of runs that count, a run failed, and the script may catch ``error``. If the run
        failed on all ranks, :attr:`has_failed` is false afterwards, and the ranks go on.
        """
        if is_communication_error(error) or isinstance(error, PeerError):
            status = FAILED_LATER
        else:
            status = FAILED if counted is None else RUN_FAILED
        with self._changed:
            self._outcome = _Outcome(status, brief(error), run, in_run, counted or 0)
            if status != RUN_FAILED:
                self._failure_is_seen.set()
            self._tick_now.set()
            # The tick thread ends with this failure, or gives up after lost_after_secs.
            while self.has_failed and not self._ticks_ended.is_set():
                self._changed.wait()
            if self.has_failed:
                self._failure_is_seen.set()
        return self.failure

    def leave(self, errors: list[BaseException]) -> None:
        """Tell the other ranks that this one is done. Its thread continues until all ranks are."""
        with self._changed:
            if not self.has_failed:
                runs = self._progress().runs
                self._outcome = _Outcome(FAILED, brief(errors[0]), runs) if errors else _Outcome(LEFT)
            # Three ticks from now, all ranks know, and the process may end. The first of them may be under way with the
            # old row, and the second has the new one. A tick that is complete here began on every rank, so each rank
            # has completed the one before it: when the third is complete here, the second is complete everywhere.
            known = self._ticks + 3
            self._failure_is_seen.set()
            while self._ticks < known and not self._ticks_ended.is_set():
                self._tick_now.set()
                self._changed.wait()
        if self._thread is not None and not self._thread_ended.is_set():
            # An interpreter that ends while the thread is in a call of gloo aborts the process.
            atexit.register(_join, weakref.ref(self._thread))
        self._end_connection()

    def abandon(self) -> None:
        """Tell the other ranks that the loop of this one is gone, though it was never closed.

        The garbage collector calls this, in any thread. It takes no lock, for which that thread would have to wait.
        """
        if self._outcome.status == LIVE:
            self._outcome = _Outcome(LEFT if self.has_stopped else FAILED, "its loop was never closed")
        self._failure_is_seen.set()
        self._tick_now.set()
        self._end_connection()

    def _end_connection(self) -> None:
        """Release the connection to the other ranks, or have the tick thread do so at its end."""
        self._training.ranks.disconnect()
        self._is_over = True  # before looking: the tick thread says that it has ended before it looks at this
        if self._thread_ended.is_set():
            self._release()

    def _release(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- waiting, in the training thread ------------------------------------------------------------------------------

    def _wait(self, is_done: Callable[[], bool], *, at_meeting: bool = False) -> list[Round]:
        """Hold until ``is_done()``, a stop or a failure; return the rounds that are over. The lock is held."""
        runs = self._progress().runs
        applied: list[Round] = []
        self._hold = _Hold(runs, at_meeting)
        self._tick_now.set()
        try:
            while self.failure is None or self._agreement.stopped:
                # A rank that fails in the last run must not find the others past it, with a checkpoint saved: so a stop
                # waits for the tick in which every rank has made that run.
                # Two rounds may be over here: the tick thread decides the second while this thread is at the first.
                while self._is_over_after(runs) and (self._agreement.stopped or not self._decided[0].stops):
                    applied.append(self._decided[0])
                    self._apply(self._decided[0])
                waits_to_stop = self._is_over_after(runs)
                if waits_to_stop:
                    self._tick_now.set()
                # A promise that the tick thread made while this one was waiting has to be kept, unless a meeting
                # stopped the loop, after which nothing is decided any more.
                is_bound = waits_to_stop or (self._round.phase is RoundPhase.PROMISED and not self._agreement.stopped)
                if self.has_stopped or (is_done() and not is_bound):
                    break
                if self._ticks_ended.is_set():  # pragma: no cover  # the thread ends with a failure, or after a stop
                    break
                self._changed.wait()
        finally:
            self._hold = None
        if self._decided and not self.has_stopped:
            self._training.loop_state.set_pending()  # for the end of a later run
        return applied

    def _is_over_after(self, runs: int) -> bool:
        return bool(self._decided) and self._decided[0].last <= runs

    def _apply(self, done: Round, why: str = "") -> None:
        done.apply(why)
        self._decided = tuple(each for each in self._decided if each is not done)
        if done.stops:
            self._round = done

    def _why_not_to_wait(self) -> TorchHooksError | None:
        """Return why the gathering that the calling thread is in will never be complete; ``None`` if it may be.

        If the training thread waits, a rank in a later run, at a later meeting or out of its loop will never take part.
        """
        outcome, this = self._outcome, self._training.ranks.rank
        mine = self._training.ranks.gatherings
        if self.failure is None and outcome.status >= FAILED and outcome.status != RUN_FAILED:
            return PeerError(f"this rank failed: {outcome.reason}", this, outcome.run, outcome.reason)
        if self.failure is not None or threading.get_ident() != self._training_thread:
            return self.failure
        gathering = self._training.ranks.gathering
        if outcome.status == LEFT or gathering is None:  # after the loop, nothing tells where the other ranks are
            return None
        run, is_in_run = self._run_numbers().begun, bool(self._progress().number)
        with self._changed:  # the rows and the number of the meetings of one tick
            table, meetings = self._table, self._agreement.meetings
        # If a rank has not taken part in this gathering before it came to where it is, it never will. Between two runs,
        # one that has left its loops may join, or the agreement says that it does not.
        absent = [(rank, row) for rank, row in enumerate(table) if rank != this and row.gatherings < mine]
        for rank, row in absent:
            may_join = not is_in_run and (row.loops == GONE or row.kind == CLOSE)
            is_past = row.begun > run or (row.begun == run and (row.meeting > meetings or row.kind == CLOSE))
            if row.status == LEFT or (is_past and not may_join):
                what = WHERE[CLOSE if row.status == LEFT else row.kind]
                where = f"is in run {row.begun} already" if row.begun > run else f"{what} after that run"
                return LifecycleError(
                    f"rank {this} waits in run {run} for values of the other ranks for {gathering}, and "
                    f"rank {rank} {where}: call Ranks.gather, and request what needs every rank, on all ranks in the "
                    "same run"
                )
        return None

    # -- the tick thread ----------------------------------------------------------------------------------------------

    def _tick_on(self, transport: GlooTransport) -> None:
        if self._tick_to_the_end(transport):
            # A rank that closed its connections before another one had the last table would be taken for lost.
            with contextlib.suppress(ContactLostError):
                transport.exchange(list(Row()), "the last tick")
        self._thread_ended.set()
        if self._is_over:
            self._release()

    def _tick_to_the_end(self, transport: GlooTransport) -> bool:
        """Exchange ticks until all ranks have left, or one has failed; return whether the ranks are still connected."""
        is_connected = False
        try:
            while not self._tick(transport):
                if not self._agreement.promising:  # promises follow at once: all ranks hold until they are exchanged
                    self._tick_now.wait(self._training.ranks.tick_secs)
                self._tick_now.clear()
            is_connected = True
        except ContactLostError as error:
            self._lose(error, transport)
        except BaseException as error:  # or the training thread would wait for this one forever
            logger.error("the thread that talks to the other ranks failed", exc_info=error)
            self._fail(None, f"the thread that talks to the other ranks failed: {brief(error)}", brief(error))
        with self._changed:
            # With the lock held: _wait() could otherwise look before this, and then miss the notification.
            self._ticks_ended.set()
            self._changed.notify_all()
        if self.failure is not None and not self._agreement.stopped:
            self._end_if_stuck(transport)
        return is_connected

    def _tick(self, transport: GlooTransport) -> bool:
        """Exchange one tick, and return whether it was the last one."""
        self._tick_began = time.monotonic(), self._progress()
        table = [Row(*numbers) for numbers in transport.exchange(list(self._row()))]
        with self._changed:  # so that the training thread sees all changes of the agreement by a tick, or none
            self._table = table
            events = self._agreement.settle(table)
        # Every rank found these events in the same table, so every rank exchanges its reasons. Not with the lock held:
        # it takes a while, and the training thread has to be able to fail meanwhile.
        reasons = [self._exchange_reasons(event, transport) for event in events]
        if any(row.states > self._states_told for row in table):
            self._states_told = self._states_wanted = self._states_told + 1
            self.on_states(transport.exchange_text(self.state_text(), "where each rank is"))
        with self._changed:
            self._ticks += 1
            is_last = False
            for event, texts in zip(events, reasons, strict=True):  # all of them, also after the last one
                is_last = self._handle(event, texts) or is_last
            self._changed.notify_all()
        return is_last

    def _exchange_reasons(self, event: Event, transport: GlooTransport) -> list[str]:
        """Return what all ranks have to say about ``event``; nothing if it says everything itself."""
        match event:
            case Failure():
                return transport.exchange_text(self._outcome.reason, "the reason of a failure")
            case Decision(_, bits) if bits & STOP:
                return transport.exchange_text(self._round.why, "the reason of a stop")
            case Meeting() if event.askers:
                return transport.exchange_text(self._round.why, "the reason of a stop")
            case Meeting() if event.is_parting:
                return transport.exchange_text(self.left, "where a rank left")
            case Conflict(kind=kind) if kind == CLOSE:
                return transport.exchange_text(self.left, "where a rank left")
        return []

    def _row(self) -> Row:
        """Return what this rank says in the next tick."""
        with self._changed:
            self._round.ask(*self._new_requests())  # before the row is made: a signal is told in this very tick
            if self._agreement.promising:
                # Before looking at the run in progress, after which this rank then holds: see the top of this module.
                self._training.loop_state.set_pending()
            while True:  # until both are of one moment, though the training thread goes on meanwhile
                counts = self._counts()
                made, begun, promise = self._run_numbers()
                if counts == self._counts():
                    break
            outcome = self._outcome
            if outcome.status >= FAILED:
                made, begun = outcome.run - outcome.in_run, outcome.run
            what = outcome.status, self._round.bits, promise, made, begun
            return Row(*what, *self._arrival, self._states_wanted, outcome.counted, *counts)

    def _counts(self) -> tuple[int, int, int]:
        return self._training.ranks.gatherings, self.epochs, self.loops

    def _run_numbers(self) -> _RunNumbers:
        """Return how far this rank tells the others it is.

        Both threads call this, while the training thread moves on without the lock.
        """
        runs, number, in_step = self._progress()
        if (hold := self._hold) is not None:
            # A stop at the meeting would save a position in the data that a rank on its way to the meeting has not.
            return _RunNumbers(hold.runs, hold.runs, hold.runs + hold.at_meeting)
        if number:
            return _RunNumbers(number - 1, number, number)
        # The end of the last run of a round is over once this rank has done what was decided for it.
        ends = any(each.last == runs for each in self._decided)
        if (asked_in := self._round.asked_in) is not None:
            return _RunNumbers(runs - ends, runs, asked_in)
        # The step of the next run may begin before this rank looks, so it can only promise to hold at its end.
        return _RunNumbers(runs - ends, runs + in_step, runs + 1)

    def _handle(self, event: Event, reasons: list[str]) -> bool:
        """Note ``event``; return whether it was the last one. The lock is held."""
        match event:
            case CallForPromises():
                self._round.promise()
            case Decision(_, bits, askers):
                why = self._common_reason(askers, reasons) if bits & STOP else ""
                over, self._round = self._round, self._round.decide(event, why)
                self._decided = (*self._decided, over)
                self._training.loop_state.set_pending()
            case Meeting():
                if event.end_passes and self._arrival.kind != END:
                    # This rank has left that loop. If it has come to another one meanwhile, that is the next meeting.
                    if self._arrival.meeting == self._agreement.meetings and self._arrival.kind == ENTER:
                        self._arrival = self._arrival._replace(meeting=self._agreement.meetings + 1)
                    return False
                self._met = event
                if (self._arrival.kind, self._arrival.detail) == (ENTER, 1):
                    # In the tick that ends the meeting: in the next one, another rank may be in a run of this loop.
                    self.left, self.loops = "", IN_LOOPS
                self._why_met = self._common_reason(event.askers, reasons) if event.askers else ""
                if event.is_parting:
                    assert event.leaver is not None
                    message, left = _about_leaver(event.leaver, reasons, event.stays)
                    self._why_met = f"end rank {event.leaver} {left}"
                    self.parting = PeerError(message, event.leaver, self._progress().runs, left)
            case Conflict(rank, run, kind, other, other_run, other_kind):
                is_later = other_run > run
                if kind == CLOSE:
                    message, reason = _about_leaver(rank, reasons, other, other_run if is_later else 0)
                else:
                    where = f"is in run {other_run}" if is_later else WHERE.get(other_kind, "goes on")
                    reason = WHERE[kind]
                    message = (
                        f"rank {rank} {reason} after run {run}, and rank {other} {where}: give every rank the same "
                        "number of items, and begin the same loops on all of them"
                    )
                self._fail(rank, message, reason, run)
                return True
            case Failure(rank, run, _, in_run):
                if self._outcome.status == RUN_FAILED:
                    self._outcome = self._outcome._replace(status=FAILED)
                if not self.has_failed or rank != self._training.ranks.rank:
                    after = f"after run {run}" if run else "before its first run"
                    where = f"in run {run}" if in_run else after
                    self._fail(rank, f"rank {rank} failed {where}: {reasons[rank]}", reasons[rank], run)
                return True
            case RunFailed():
                self._outcome = _Outcome()
            case AllLeft():
                return True
        return False

    def _common_reason(self, askers: Sequence[int], reasons: Sequence[str]) -> str:
        """Return why all ranks stop: the reason of the first one that asked, and which ranks asked for the same."""
        first = reasons[askers[0]]
        same = [rank for rank in askers if _reason_alone(reasons[rank]) == _reason_alone(first)]
        return f"{first} ({rank_names(same, self._training.ranks.size)})"

    def _fail(self, rank: int | None, message: str, reason: str, run: int = 0) -> None:
        """Have the training thread raise a PeerError as soon as it looks."""
        # The failure is set first, so that the training thread finds it however early the interrupt is noticed.
        self.failure = PeerError(message, rank, run or self._progress().runs, reason)
        self._training.loop_state.interrupt()

    def _lose(self, error: ContactLostError, transport: GlooTransport) -> None:
        if any(row.status == LEFT for rank, row in enumerate(self._table) if rank != self._training.ranks.rank):
            return  # that rank made the agreed last run, and its process has ended well
        missing = [] if self._agreement.stopped else transport.find_missing()
        names = "another rank" if not missing else rank_names(missing, math.inf)
        with self._changed:
            self._fail(
                missing[0] if missing else None,
                f"contact with {names} was lost after run {self._progress().runs}: {error}. Its process ended, was "
                "killed or does not answer: look at its log",
                str(error),
            )

    def _end_if_stuck(self, transport: GlooTransport) -> None:
        """End the process if the training thread does not come back from a call that needs the rank that failed."""
        stuck_secs = secs = self._training.ranks.stuck_secs
        began, progress = self._tick_began
        if self._progress() == progress:
            # It has been in the same call since the last tick began, which no rank answered for lost_after_secs. That
            # time counts. stuck_secs itself must not be shorter: it is for a rank that fails and says so at once, while
            # this one is in a step, an evaluation or a save that may take as long, and then ends with a PeerError.
            secs = min(secs, max(secs - (time.monotonic() - began), _LEAST_STUCK_SECS))
        if self._failure_is_seen.wait(secs) or not threading.main_thread().is_alive():
            return
        if self.is_outside:  # the script may be saving or evaluating, which is not to be ended
            logger.critical(
                "%s. For %g s since then, this rank has been in code outside of its runs. If that is a collective, "
                "it ends only with the timeout of its process group",
                *(self.failure, stuck_secs),
            )
            return
        # The whole time once more: an aborted call of NCCL raises its error in the training thread, which then looks.
        if transport.abort() and self._failure_is_seen.wait(stuck_secs):
            return
        end_process(f"{self.failure}. The training thread has not come back for {stuck_secs:g} s from a call")


def end_process(reason: str) -> None:
    """End this process with exit code 70, because nothing in Python gets its training thread out of a blocked call."""
    logger.critical("%s: ending this process with code %d; stderr has the stacks", reason, _STUCK_EXIT_CODE)
    faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
    os._exit(_STUCK_EXIT_CODE)


def _join(thread: weakref.ref[threading.Thread]) -> None:
    """Wait for ``thread``, when the process ends."""
    if (found := thread()) is not None:
        found.join(_EXIT_SECS)


def _about_leaver(rank: int, reasons: Sequence[str], other: int | None, later_run: int = 0) -> tuple[str, str]:
    """Return the message of an error about ``rank``, which has left its loops while ``other`` goes on, and where."""
    left = reasons[rank] or WHERE[CLOSE]
    run = f" with run {later_run}" if later_run else ""
    if later_run and left.startswith(WHERE[END]):
        message = (
            f"rank {rank} {left}; rank {other} goes on{run}: give every rank the same number of items, and make a run "
            "for the same of them"
        )
    else:
        message = f"rank {rank} {left}; rank {other} goes on{run}: leave it on all ranks, or call loop.request_stop()"
    return message, left


def _reason_alone(why: str) -> str:
    """Return the reason without its first word, which says who stopped: a hook on one rank, a thread on another."""
    return why.partition(" ")[2]


def rank_names(ranks: Iterable[int], size: float) -> str:
    """Return ``"rank 1"``, ``"ranks 0, 2"``, or ``"all ranks"`` if there are ``size`` of them."""
    names = [str(rank) for rank in ranks]
    if len(names) == size:
        return "all ranks"
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"
