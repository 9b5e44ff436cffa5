"""The other ranks, as one loop sees them: a thread that exchanges ticks with them, and where the loop waits for them.

Two threads share a :class:`Peers`. The *tick thread* calls :meth:`GlooTransport.exchange` every ``tick_secs``, and
derives from the rows of all ranks what happens. The *training thread*, which makes the runs, only looks at what the
tick thread found, at the end of a run whose ``schedule.pending`` is set, and between runs. An idle run therefore does
exactly what it does in a single process, and takes no lock.

The tick thread reads how far the training thread is from values that the training thread writes anyway:
``schedule.runs`` and ``run_number``. This needs no lock, because of the order:

* The tick thread sets ``schedule.pending``, then reads ``schedule.runs``, and promises a run after it.
* The training thread counts the run, and then reads ``schedule.pending``.

If the tick thread has not seen the run counted, the training thread sees the news at the end of that very run. So a
rank that promised the run in progress always holds at its end.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

from torchhooks.common.errors import LifecycleError, PeerError, TorchHooksError, add_note, brief
from torchhooks.common.log import logger
from torchhooks.lifecycle.ending import RUNNING, Ending, Stop, StoppedBy
from torchhooks.lifecycle.hook import SessionRunContext
from torchhooks.loop.run import Lifecycle
from torchhooks.loop.same_loops import compare_loops
from torchhooks.loop.schedule import Schedule
from torchhooks.position.progress import NO_OUTPUTS, Progress
from torchhooks.ranks.agreement import (
    CLOSE,
    END,
    ENTER,
    FAILED,
    FAILED_LATER,
    LEFT,
    LIVE,
    STOP,
    UNKNOWN_LENGTH,
    WHERE,
    Agreement,
    Conflict,
    Decided,
    Event,
    Failed,
    Finished,
    Met,
    Row,
)
from torchhooks.ranks.failures import end_process, is_communication_error
from torchhooks.ranks.ranks import LoopRanks, OtherPurposeError
from torchhooks.ranks.transport import ContactLostError, GlooTransport

_EXIT_SECS = 2.0  # how long the end of the process waits for the last exchange with the other ranks


def _join(thread: weakref.ref[threading.Thread]) -> None:
    """Wait for ``thread``, when the process ends."""
    if (found := thread()) is not None:
        found.join(_EXIT_SECS)


class Peers:
    """Keeps one loop in step with the same loop on the other ranks.

    Args:
        ranks: which rank this is, and how to reach the others.
        schedule: of the loop. Its ``runs`` tell how far this rank is, and its ``news`` make it look.
        ending: of the loop. A stop that it proposes becomes one once all ranks have agreed.
    """

    def __init__(self, ranks: LoopRanks, schedule: Schedule, ending: Ending) -> None:
        self._ranks = ranks
        self._schedule = schedule
        self._ending = ending
        self._transport: GlooTransport | None = None
        self._progress = Progress()
        self._training_thread = threading.get_ident()
        self._pid = os.getpid()
        self.run_number = 0
        """The number of the run in progress if hooks take part in it, until its last ``after_run`` is over."""
        self._last_number = 0
        # Everything below is shared by the two threads, and changed with the lock held, except where a comment says why
        # not. The lock is reentrant: a signal handler of the user's, which runs between any two lines of the training
        # thread, may call request_stop(). An idle run never takes it.
        self._changed = threading.Condition()

        # What this rank says in the next tick. The tick thread takes it into a Row.
        self._status = LIVE
        self._asked = 0
        self._asked_in: int | None = None  # the run in which the training thread asked, so that it holds at its end
        self._why = Stop("", StoppedBy.ERROR)  # this rank asked for a stop, or failed
        self._failed_in = 0
        self._failed_in_run = False  # or else after that run
        self._arrival = (0, 0, UNKNOWN_LENGTH)  # the meetings so far, and the kind and the value of the last
        self._waits_after: int | None = None  # the run after which the training thread holds, or is at a meeting
        self._is_at_meeting = False
        self._tick_now = threading.Event()  # the next tick does not wait for its time

        # What the tick thread found. The training thread waits on the lock's condition for a change of it.
        self._agreement = Agreement()
        self._promising = False  # a promise was made, and what happens after it is not decided yet
        self._decision: Decided | None = None  # the training thread removes it once it has done what was decided
        self._agreed_stop: Stop | None = None
        self._met: Met | None = None
        self._ticks = 0
        # Replaced without the lock, and never changed: a reader has one tick or the next.
        self._last_table: list[Row] = []
        self._ticks_ended = threading.Event()  # there will be no further tick
        self.failure: PeerError | None = None
        """Why this rank cannot continue, once another one has failed. Set once, so it is read without the lock."""
        self._is_over = False  # the loop is closed, so that the connection is needed for further ticks at most
        self._thread: threading.Thread | None = None
        self._thread_ended = threading.Event()
        self._failure_is_seen = threading.Event()  # by the training thread, which therefore hangs in no call

        # Only changed by the training thread, and at most read by the tick thread.
        self._stopped = False  # on this rank: the agreed last run is over
        self._agreed_length = False
        self._warned_of: set[tuple[int, int]] = set()  # lengths of the data, here and on the rank with the fewest
        self._data_is_over = False  # so that the training thread is in code of the user's that is not the loop
        ending.propose = self._propose

    # -- called by the loop, in the training thread -------------------------------------------------------------------

    def start(self, step_unit: str, checkpoint_dir: str | None) -> None:
        """Connect to the other ranks, start the tick thread, and compare the loops.

        Raises:
            LifecycleError: another rank did not create its loop in time, or created a different one.
        """
        self._transport = transport = self._ranks.connect(self._why_not_to_wait)
        self._thread = threading.Thread(target=self._tick_on, args=(transport,), name="torchhooks ranks", daemon=True)
        self._thread.start()
        self._ranks.hooks_of_some = compare_loops(
            self._ranks, self._schedule, step_unit=step_unit, checkpoint_dir=checkpoint_dir
        )

    def lifecycle(self, *, progress: Progress, **parts: Any) -> Lifecycle:
        """Return a Lifecycle of a new session that looks at the other ranks before each step with hooks."""
        self._progress = progress
        return _LifecycleOverRanks(self, progress=progress, **parts)

    def begin_run(self, number: int) -> None:
        """Note that a run in which hooks take part begins."""
        self.run_number = self._last_number = number

    def check(self) -> None:
        """Raise the PeerError if another rank has failed, and end the loop."""
        failure = self.failure
        if failure is not None and not self._agreement.stopped:  # then every rank has made the last run
            self._failure_is_seen.set()
            self._ending.fail(failure)
            raise failure

    @property
    def is_stop_decided(self) -> bool:
        """Whether the ranks have agreed on the last run, and this one has not made it yet."""
        decision = self._decision
        return decision is not None and bool(decision.bits & STOP)

    def why_no_checkpoint(self) -> str | None:
        """Return why nothing may be saved any more, or ``None``."""
        return None if self.failure is None or self._stopped else str(self.failure)

    def end_run(self) -> None:
        """Hold here if this rank promised to, and stop or trigger hooks if this run is the last one of a round."""
        with self._changed:
            self._wait(lambda: self._asked_in is None)

    def enter(self, iterable: Iterable[Any], limit: int | None) -> int | None:
        """Meet the other ranks at the start of an ``until_stop``, and return the ``limit`` to use for its items.

        If some ranks know how many items they have, all of them make as many as the one with the fewest.
        """
        length = _length(iterable)
        if limit is not None and (length == UNKNOWN_LENGTH or limit < length):
            length = limit
        self._data_is_over = False
        met = self._meet(ENTER, length)
        self._agreed_length = met is not None and met.all_known
        if met is None or met.least == UNKNOWN_LENGTH:
            return limit
        if met.least != length != UNKNOWN_LENGTH and (length, met.least) not in self._warned_of:
            self._warned_of.add((length, met.least))  # once, and not in every epoch
            logger.warning(
                "rank %d has %d items of data and another rank only %d: until_stop yields %d on every rank",
                *(self._ranks.rank, length, met.least, met.least),
            )
        return met.least

    def data_ended(self) -> None:
        """Meet the other ranks at the end of the data, unless all of them knew where that is."""
        if not self._agreed_length:
            self._meet(END)
        self._data_is_over = True

    def close(self, error: BaseException | None) -> BaseException | None:
        """Meet the other ranks before the loop closes without an agreed stop; return why it must not end well."""
        if not self._is_connected():
            return None
        clean = error is None or type(error) is StopIteration
        failure = self._ending.failure if clean else error
        try:
            if failure is not None:
                self.failed(failure, in_run=False)
            elif not self._stopped:
                self._meet(CLOSE, closed=brief(error) if error is not None else self._ending.reason or "closed")
        except BaseException as another:  # such as KeyboardInterrupt: the loop has to be closed in any case
            return None if another is failure else another
        return None

    def failed(self, error: BaseException, *, in_run: bool = True) -> None:
        """Tell the other ranks that this one failed with ``error``, in a run or else between two runs.

        Raises:
            PeerError: ``error`` looks like the consequence of another rank's failure.
        """
        if not self._is_connected() or self._stopped or type(error) is StopIteration or self._status >= FAILED:
            return
        consequence = is_communication_error(error)
        with self._changed:  # so that no tick has the new status without the run and the reason
            self._failed_in = self._schedule.runs
            if in_run:
                self._failed_in = max(self._failed_in + (self._progress.outputs is NO_OUTPUTS), self._last_number)
            self._failed_in_run = in_run
            self._why = Stop(brief(error), StoppedBy.ERROR)
            self._status = FAILED_LATER if consequence or isinstance(error, PeerError) else FAILED
        self._failure_is_seen.set()
        self._tick_now.set()
        # Not held here: the tick thread needs the lock. It ends with this failure, or gives up after lost_after_secs.
        self._ticks_ended.wait()
        failure = self.failure
        if failure is None or failure is error:
            return
        if not consequence:
            add_note(error, f"torchhooks: meanwhile, {failure}")
            return
        self._ending.blame(failure)
        raise failure from error

    def align(self) -> None:
        """Wait until every rank is here, where the ``end`` of a collective hook follows.

        A rank whose ``end`` before that failed may have left the others in a gathering, which then fails on them too.
        """
        while True:
            try:
                self._ranks.gather(None, "the end of the next hook")
                return
            except OtherPurposeError:
                continue  # the others come here too
            except TorchHooksError:
                return  # the hook will get it if it needs the other ranks

    def leave(self, errors: list[BaseException]) -> None:
        """Tell the other ranks that this one is done. Its thread continues until all ranks are."""
        if not self._is_connected():
            return
        with self._changed:
            self._status = max(self._status, FAILED if errors else LEFT)
            if errors:
                self._why, self._failed_in = Stop(brief(errors[0]), StoppedBy.ERROR), self._schedule.runs
            # When a tick is complete here, each rank has completed the one before it. The process may end then.
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

        The garbage collector calls this, in any thread. It takes no lock, for which that thread would have to wait: the
        reason is set before the status, so no tick has the status without the reason.
        """
        self._why = Stop("its loop was never closed", StoppedBy.ERROR)
        self._status = max(self._status, LEFT if self._stopped else FAILED)
        self._failure_is_seen.set()
        self._tick_now.set()
        self._end_connection()

    def _end_connection(self) -> None:
        """Release the connection to the other ranks, or have the tick thread do so at its end."""
        self._ranks.disconnect()
        self._is_over = True  # before looking: the tick thread says that it has ended before it looks at this
        if self._thread_ended.is_set():
            self._release()

    def _release(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _is_connected(self) -> bool:
        """Return whether the thread runs: not before :meth:`start`, and not in a forked process."""
        return self._transport is not None and os.getpid() == self._pid

    def _why_not_to_wait(self) -> TorchHooksError | None:
        """Return why the gathering that the calling thread is in will never be complete; ``None`` if it may be.

        If the training thread waits, a rank in a later run, at a later meeting or out of its loop will never take part.
        """
        if self.failure is None and self._status >= FAILED:
            return PeerError(
                f"this rank failed: {self._why.reason}", self._ranks.rank, self._failed_in, self._why.reason
            )
        if self.failure is not None or threading.get_ident() != self._training_thread:
            return self.failure
        if self._status == LEFT:  # after the loop, nothing tells where the other ranks are
            return None
        place = self._runs()[1], self._arrival[0]
        rows = [(rank, row) for rank, row in enumerate(self._last_table) if rank != self._ranks.rank]
        later = [(rank, row) for rank, row in rows if (row.begun, row.meeting) > place or row.status == LEFT]
        details, now = self._ranks.gathers_for, time.monotonic()
        if not later or details is None:
            return None
        if self._ranks.unanswered_since is None:
            self._ranks.unanswered_since = now
        if now < self._ranks.unanswered_since + self._ranks.stuck_secs:
            return None  # this rank may just not have noticed yet that the gathering is complete
        rank, row = later[0]
        what = WHERE[CLOSE if row.status == LEFT else row.kind]
        where = f"is in run {row.begun} already" if row.begun > place[0] else f"{what} after that run"
        return LifecycleError(
            f"rank {self._ranks.rank} waits in run {place[0]} for values of the other ranks{details}, "
            f"and rank {rank} {where}: call Ranks.gather, and request what needs every rank, on all ranks in the same "
            "run"
        )

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _meet(self, kind: int, value: int = UNKNOWN_LENGTH, closed: str = "") -> Met | None:
        """Wait for the other ranks between two runs; return ``None`` if the loop stops here instead."""
        with self._changed:
            number = self._arrival[0] + 1
            self._arrival = number, kind, value
            self._met = None
            self._is_at_meeting = True
            try:
                self._wait(lambda: self._met is not None)
            finally:
                self._is_at_meeting = False
            met = self._met
            if met is not None and met.stop and not self._stopped:
                self._stop(self._agreed_stop or Stop(closed or f"rank {met.leaver} left the loop", StoppedBy.END))
            return None if self._stopped else met

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Hold until ``is_done()``, a stop or a failure; then do what was decided for this run. The lock is held."""
        self._waits_after = runs = self._schedule.runs
        self._tick_now.set()
        try:
            while self.failure is None or self._agreement.stopped:
                decision = self._decision
                stops_here = False
                if decision is not None and decision.last <= runs:
                    # A rank that fails in the last run must not find the others past it, with a checkpoint saved.
                    stops_here = bool(decision.bits & STOP) and not self._agreement.stopped
                    if stops_here:
                        self._tick_now.set()
                    else:
                        self._decision = None
                        self._apply(decision)
                # A promise that the thread made while this one was waiting has to be kept.
                if self._stopped or (is_done() and not self._promising and not stops_here):
                    break
                if self._ticks_ended.is_set():  # pragma: no cover  # the thread ends with a failure, or after a stop
                    break
                self._changed.wait()
        finally:
            self._waits_after = None
        if not self._stopped:
            if self._decision is not None:
                self._schedule.set_pending()  # it is for the end of a later run
            self.check()

    def _apply(self, decision: Decided) -> None:
        """Do what was decided, at the end of its run."""
        for number, scheduled in enumerate(self._schedule.collective):
            if decision.bits & (STOP << number + 1):
                self._schedule.trigger(scheduled)
        if decision.bits & STOP:
            assert self._agreed_stop is not None
            self._stop(self._agreed_stop)

    def _stop(self, stop: Stop) -> None:
        self._stopped = True
        self._ending.decide(stop)

    def _propose(self, stop: Stop) -> None:
        """Ask the other ranks to stop. Any thread may call this."""
        with self._changed:
            if not self._asked & STOP:
                self._why = stop
                self._asked |= STOP
            # Holding at the end of this run makes it the last one if all ranks ask in it.
            if self._ending.state is RUNNING and threading.get_ident() == self._training_thread:
                run = self.run_number or self._schedule.runs
                if self._decision is None or self._decision.last <= run:
                    self._asked_in = run
        self._schedule.set_pending()
        self._tick_now.set()

    # -- the tick thread ----------------------------------------------------------------------------------------------

    def _tick_on(self, transport: GlooTransport) -> None:
        if self._tick_to_the_end(transport):
            # A rank that closed its connections before another one had the last table would be taken for lost.
            with contextlib.suppress(ContactLostError):
                transport.exchange(list(Row()))
        self._thread_ended.set()
        if self._is_over:
            self._release()

    def _tick_to_the_end(self, transport: GlooTransport) -> bool:
        """Exchange ticks until all ranks have left, or one has failed; return whether the ranks are still connected."""
        is_connected = False
        try:
            while not self._tick(transport):
                if not self._agreement.promising:
                    self._tick_now.wait(self._ranks.tick_secs)
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
        table = [Row(*numbers) for numbers in transport.exchange(list(self._row()))]
        self._last_table = table
        agreement = self._agreement
        with self._changed:  # so that the training thread sees all changes of the agreement by a tick, or none
            events = agreement.settle(table)
        asked = next((event for event in events if isinstance(event, (Decided, Failed))), None)
        reasons: list[Stop] = []
        if isinstance(asked, Failed) or (asked is not None and asked.bits & STOP):
            # Every rank found this event in the same table, so every rank calls this. Not with the lock held: it takes
            # a while, and the training thread has to be able to fail meanwhile.
            reasons = [Stop.from_text(text) for text in transport.exchange_text(self._why.to_text())]
        over = False
        with self._changed:
            self._ticks += 1
            for event in events:
                over = self._handle(event, table, reasons) or over
            if agreement.promising:
                self._promising = True
            self._changed.notify_all()
        return over

    def _row(self) -> Row:
        """Return what this rank says in the next tick."""
        with self._changed:
            self._ask_for_due()
            if self._agreement.promising:
                # Before looking at the run in progress, after which this rank then holds: see the top of this module.
                self._schedule.set_pending()
            made, begun, promise = self._runs()
            if self._status >= FAILED:
                made, begun = self._failed_in - self._failed_in_run, self._failed_in
            return Row(self._status, self._asked, promise, made, begun, *self._arrival)

    def _runs(self) -> tuple[int, int, int]:
        """Return the runs made, the last run that has certainly begun, and the last one that may have begun.

        The last one is what the tick thread promises. Both threads call this; the training thread changes the values
        without the lock.
        """
        schedule = self._schedule
        while True:  # until none of them has changed while the others were read
            runs, number = schedule.runs, self.run_number
            in_step = self._ending.state is RUNNING and self._progress.outputs is NO_OUTPUTS
            if (runs, number) == (schedule.runs, self.run_number):
                break
        if self._waits_after is not None:
            # A stop at the meeting would save a position in the data that a rank on its way to the meeting has not.
            return runs, runs, runs + self._is_at_meeting
        if number:
            return number - 1, number, number
        # The end of the last run of a round is over once this rank has done what was decided for it.
        ends = self._decision is not None and self._decision.last == runs
        if self._asked_in is not None:
            return runs - ends, runs, self._asked_in
        return runs - ends, runs + in_step, runs + 1

    def _ask_for_due(self) -> None:
        """Ask for what this rank noticed: a signal, or a request to a hook; on the chief, a hook due by the clock."""
        signal = self._ending.signal
        if signal is not None and not self._asked & STOP:
            self._why = Stop(f"signal {signal}", StoppedBy.SIGNAL)
            self._asked |= STOP
        for number, scheduled in enumerate(self._schedule.collective):
            if self._ranks.is_chief and time.monotonic() >= scheduled.chief_moment:
                scheduled.chief_moment = math.inf  # asked for once; it is set again after the hook's next run
                self._asked |= STOP << number + 1
            if scheduled.is_asked:
                scheduled.is_asked = False
                self._asked |= STOP << number + 1

    def _handle(self, event: Event, table: list[Row], reasons: list[Stop]) -> bool:
        """Note ``event``; return whether it was the last one. The lock is held."""
        match event:
            case Decided(_, bits, askers):
                if self._decision is not None:  # of the round before, whose end the training thread is about to notice
                    self._apply(self._decision)
                self._decision, self._promising = event, False
                self._asked &= ~bits
                if self._asked_in is not None and event.last > self._asked_in:
                    self._asked_in = None  # holding earlier than the other ranks would make them wait forever
                if bits & STOP:
                    self._asked_in = None
                    first = reasons[askers[0]]
                    named = _named([rank for rank in askers if reasons[rank].reason == first.reason], self._ranks.size)
                    self._agreed_stop = Stop(f"{first.reason} ({named})", first.by)
                self._schedule.set_pending()
            case Met():
                self._met = event
                self._promising = self._promising and not event.stop
            case Conflict(rank, run, kind, other, other_run):
                self._fail(
                    rank,
                    f"rank {rank} {WHERE[kind]} after run {run}, while rank {other} is at run {other_run}: give every "
                    "rank the same number of items, and leave the loop on all ranks or on none",
                    WHERE[kind],
                    run,
                )
                return True
            case Failed(rank, run, _, in_run):
                if self._status < FAILED or rank != self._ranks.rank:
                    reason = reasons[rank].reason
                    after = f"after run {run}" if run else "before its first run"
                    where = f"in run {run}" if in_run else after
                    self._fail(rank, f"rank {rank} failed {where}: {reason}", reason, run)
                return True
            case Finished():
                return True
        return False

    def _fail(self, rank: int | None, message: str, reason: str, run: int = 0) -> None:
        """Have the training thread raise a PeerError as soon as it looks."""
        # The failure is set first, so that the training thread finds it however early the interrupt is noticed.
        self.failure = PeerError(message, rank, run or self._schedule.runs, reason)
        self._schedule.interrupt()

    def _lose(self, error: ContactLostError, transport: GlooTransport) -> None:
        if any(row.status == LEFT for rank, row in enumerate(self._last_table) if rank != self._ranks.rank):
            return  # that rank made the agreed last run, and its process has ended well
        missing = [] if self._agreement.stopped else transport.missing()
        names = "another rank" if not missing else _named(missing, math.inf)
        run = self._schedule.runs
        with self._changed:
            self._fail(
                missing[0] if missing else None,
                f"contact with {names} was lost after run {run}: {error}. Its process ended, was killed or does not "
                "answer: look at its log",
                str(error),
            )

    def _end_if_stuck(self, transport: GlooTransport) -> None:
        """End the process if the training thread does not come back from a call that needs the rank that failed."""
        secs = self._ranks.stuck_secs
        if self._failure_is_seen.wait(secs) or not threading.main_thread().is_alive():
            return
        if self._data_is_over:  # the script may be saving or evaluating, which is not to be ended
            logger.critical(
                "%s. For %g s since then, this rank has been in code outside of its runs. If that is a collective, "
                "it ends only with the timeout of its process group",
                *(self.failure, secs),
            )
            return
        if transport.abort() and self._failure_is_seen.wait(secs):
            return
        end_process(f"{self.failure}. The training thread has not come back for {secs:g} s from a call")


class _LifecycleOverRanks(Lifecycle):
    """A Lifecycle that lets the tick thread know the run in progress, and makes none after a failure."""

    def __init__(self, peers: Peers, **parts: Any) -> None:
        super().__init__(**parts)
        self._peers = peers

    def new_context(self, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any]) -> SessionRunContext:
        self._peers.check()
        self._peers.begin_run(self._schedule.runs + 1)
        return super().new_context(args, kwargs)

    def abandon(self) -> None:
        self._peers.run_number = 0

    def complete(self, *run: Any) -> None:
        super().complete(*run)
        self._peers.run_number = 0  # not after an error: the run was not made


def _length(iterable: Iterable[Any]) -> int:
    try:
        return len(iterable) if isinstance(iterable, Sized) else UNKNOWN_LENGTH
    except (TypeError, RuntimeError):  # a DataLoader over an iterable dataset has a len() that raises
        return UNKNOWN_LENGTH


def _named(ranks: Iterable[int], size: float) -> str:
    names = [str(rank) for rank in ranks]
    if len(names) == size:
        return "all ranks"
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"
