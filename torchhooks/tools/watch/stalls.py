"""The watch of a loop: a thread that looks once a second whether anything was completed, and reports a stall.

A loop stands still if no run, item, evaluation or save was completed for long. The thread reads counters that exist,
and only if they have not changed, the stack of the training thread. It counts its looks and not the clock, so a process
that was stopped for an hour does not seem to stand still when it goes on.

With several ranks, the rank that notices it first asks all of them where they are, through the tick threads, which go
on while the training threads hang: see :meth:`torchhooks.ranks.peers.Peers.ask_for_states`. Each rank writes the stacks
of its own threads, and the chief logs the line and writes the report.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from torchhooks.common.errors import brief
from torchhooks.common.files import replacing
from torchhooks.common.log import logger
from torchhooks.progress.training_state import TrainingState
from torchhooks.ranks.peers import end_process
from torchhooks.ranks.transport import flight_record
from torchhooks.tools.run_record import Watched
from torchhooks.tools.watch.global_lock import GlobalLockWatch
from torchhooks.tools.watch.places import (
    IN_SCRIPT,
    NOT_WAITING,
    Place,
    children,
    format_stacks,
    is_paused,
    kill_workers,
    locate,
)
from torchhooks.tools.watch.report import RankState, first_line, report, short_line

LOOK_SECS = 1.0
# Without stall_secs, the limit is 30 times the slowest run, which no run that is merely slow reaches, and no less than
# five minutes. That is half of the time after which the watchdog of NCCL ends the process by default.
LEAST_SECS = 300.0
_TIMES_SLOWEST = 30
_TIMES_SLOW = 5  # the limit for what may take long, relative to the limit for a step
_ASK_AGAIN = 1.25  # the rank that was excused has used up so much more of its time, so that few questions are enough
_WRITE_SECS = 10.0  # how long an abort, and the close of the loop, wait for files on a disk that may be what blocks
_LATE_LOOKS = 3  # an answer of all ranks takes two ticks, which is less than a look

_open: weakref.WeakSet[Watch] = weakref.WeakSet()
"""The watches of this process: an outer loop does not stand still while an inner one trains."""


class Watch:
    """Watches one loop. Created in the training thread.

    Args:
        training: the state of the loop. Without a folder, stacks are printed to stderr.
        stall_secs: after how many seconds the loop stands still; ``None`` for 30 times the slowest run, at least 300.
        aborts: whether to end the process after the report.
        on_change: called when what :attr:`watched` says has changed, in a thread that may wait for a disk.
    """

    def __init__(
        self,
        training: TrainingState,
        stall_secs: float | None,
        aborts: bool,
        on_change: Callable[[], object],
    ) -> None:
        self._training, self._folder = training, training.saved_to or training.checkpoint_dir
        self._stall_secs, self._aborts, self._on_change = stall_secs, aborts, on_change
        self._training_thread = threading.get_ident()
        # Four threads use what stands below: the one that looks; the tick thread, in _state_text() and _take_states();
        # the one that writes the run record, in watched and request(); and the one that makes a report, which notes the
        # stall. Each attribute is replaced as a whole, and a thread that reads the value of a moment before makes up
        # for it at the next look, so there is no lock.
        self._closed = threading.Event()
        self._runs = 0
        self._counts: tuple[tuple[int, int], ...] = ()
        self._phase = ""  # at the last look; "" if something was completed since the one before it
        self._is_slow = True
        self._quiet = 0  # how many looks ago something was completed, or a person has paused the thread
        self._was_paused = False  # since something was completed
        self._longest = {False: 0.0, True: 0.0}  # in seconds, by is_slow
        self._next = 0  # how many quiet looks are needed before the ranks are asked again
        self._request = ""  # the folder for the stacks that a command asked for
        self._stall: tuple[str, str] | None = None  # the stall that was reported: in short, and as the line of the log
        self._run_time = time.time()
        self._reporting: threading.Thread | None = None  # the last report that is written
        self._asked_at = math.inf  # when the ranks were asked, by time.monotonic(), until they have answered
        self._lock_secs = 0.0  # after which faulthandler writes
        self._lock = GlobalLockWatch(self._folder, training.ranks.rank, aborts, LOOK_SECS)

    def start(self) -> None:
        """Look once a second, in a thread that does not keep a loop that is dropped."""
        if self._training.peers is not None:
            self._training.peers.exchange_states(self._state_text, self._take_states)
        _open.add(self)
        looking = (weakref.ref(self), self._closed)
        threading.Thread(target=_look_again, args=looking, name="torchhooks watch", daemon=True).start()
        with suppress(OSError, RuntimeError):  # the first look says so
            self._watch_the_lock()  # not only then: what keeps the lock may come before it

    def close(self) -> None:
        """End the thread, once what has stood still until now is reported."""
        self._closed.set()
        _open.discard(self)
        if stacks := self._lock.close():
            self._report_lock(stacks, self._lock_secs)
        if self._reporting is not None:  # a daemon, which would end with the process
            self._reporting.join(_WRITE_SECS)

    @property
    def watched(self) -> Watched:
        """What the record of the run says of it."""
        self._note_runs()
        return Watched(self._run_time, *(self._stall or (None, None)))

    def request(self, folder: str) -> None:
        """Write the stacks of all ranks into ``folder`` in the folder of the training run. Any thread may call this."""
        self._request = folder
        self._ask()

    # -- a look -------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Notice what was completed since the last look, or that nothing was for too long."""
        # First, because this look may end early below, and every look has to set faulthandler's timer again.
        self._watch_the_lock()
        self._note_runs()
        counts = self._counts_now()
        place = self._place() if counts == self._counts else None
        if place is None or place.phase != self._phase:  # an evaluation that is over, too
            self._note_progress(place)
            self._counts = counts
            return
        if self._is_paused(place):
            self._quiet, self._was_paused = 0, True
            return
        self._quiet += 1
        if self._quiet >= self._next and self._stands_still and self._stall is None:
            self._ask()

    @staticmethod
    def _counts_now() -> tuple[tuple[int, int], ...]:
        return tuple((each._training.loop_state.runs, each._items) for each in _open)  # noqa: SLF001 - its own class

    @property
    def _stands_still(self) -> bool:
        return self._secs >= self._limit(self._is_slow)

    def _is_paused(self, place: Place) -> bool:
        """Return whether a person has paused the training thread: in a debugger, at a prompt, or between two runs."""
        frame = self._frame()
        return (place.phase == IN_SCRIPT and _is_interactive()) or (frame is not None and is_paused(frame))

    def _note_runs(self) -> None:
        """Note when a run was last seen to be completed. The thread that writes the record calls this too."""
        state = self._training.loop_state
        if state.runs != self._runs:
            self._runs, self._run_time = state.runs, time.time()

    @property
    def _items(self) -> int:
        return sum(cursor.taken for cursor in self._training.position.open_loops)

    @property
    def _secs(self) -> float:
        return self._quiet * LOOK_SECS

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._training_thread)  # noqa: SLF001 - CPython's

    def _place(self) -> Place | None:
        frame = self._frame()
        return None if frame is None else locate(frame, self._training.loop_state, self._training.position.depth)

    def _why_no_frame(self) -> str:
        is_alive = any(thread.ident == self._training_thread for thread in threading.enumerate())
        return "outside of Python's code, as at its prompt" if is_alive else "its thread has ended"

    def _note_progress(self, place: Place | None) -> None:
        """Count quiet looks from 0 again. ``place`` is None if a run or an item was completed since the last look."""
        self._longest[self._is_slow] = max(self._longest[self._is_slow], self._secs)
        was_stalled = self._stall is not None
        if was_stalled and self._quiet and self._training.ranks.is_chief:
            logger.warning("the loop goes on, after it stood still for %d s", self._secs)
        self._stall, self._quiet, self._next, self._was_paused = None, 0, 0, False
        if was_stalled:
            # This writes the run record, and the thread that looks must not wait for a disk.
            threading.Thread(target=self._on_change, name="torchhooks report", daemon=True).start()
        self._phase = "" if place is None else place.phase
        self._is_slow = not self._training.loop_state.runs or (place is not None and place.is_slow)

    def _limit(self, is_slow: bool) -> float:
        """Return after how many seconds the loop stands still; the first run is slow, too: it may compile."""
        if self._stall_secs is not None:
            return self._stall_secs * (_TIMES_SLOW if is_slow else 1)
        usual = max(LEAST_SECS, _TIMES_SLOWEST * self._longest[False])
        return _TIMES_SLOW * max(usual, self._longest[True]) if is_slow else usual

    # -- a stall ------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Have all ranks say where they are. If one is lost, its PeerError is the report."""
        self._asked_at = min(self._asked_at, time.monotonic())  # the first time, if the answer is late
        if self._training.peers is None:
            self._take_states([self._state_text()])
        elif not self._training.peers.ask_for_states():
            self._next = sys.maxsize  # not in this stall
            if self._training.peers.failure is None:  # the others have ended their loops, and this rank does not
                self._take_states([self._state_text()])

    def _state_text(self) -> str:
        """Return what this rank says of itself. It reads no file: the tick thread must not wait for a disk."""
        try:
            return self._rank_state().to_text()
        except Exception as error:  # the tick thread ends the training run if this raises
            run, phase = self._training.loop_state.total_runs + 1, f"unknown ({brief(error)})"
            return RankState(run, phase=phase, stands_still=True, request=self._request).to_text()

    def _rank_state(self) -> RankState:
        place = self._place() or Place(self._why_no_frame(), "", NOT_WAITING, False, True)
        is_slow = place.is_slow or not self._training.loop_state.runs
        return RankState(
            run=self._run_at(place),
            when="after" if place.is_outside else "in",
            secs=int(self._secs),
            phase=place.phase,
            where=place.where,
            waits=place.waits,
            children="; ".join(each.text for each in children() if not each.is_well),
            # Now, and not at the last look: with several ranks, the answer may be asked for long after the question.
            stands_still=self._stands_still and self._counts_now() == self._counts and place.phase == self._phase,
            is_excused=self._is_paused(place) or ((is_slow or self._was_paused) and self._secs < self._limit(is_slow)),
            is_late=time.monotonic() - self._asked_at > _LATE_LOOKS * LOOK_SECS,
            request=self._request,
        )

    def _run_at(self, place: Place | None) -> int:
        """Return the number of the run that is in progress at ``place``, or of the last one if none is."""
        is_counted = place is None or place.run_counts or place.is_outside
        return self._training.loop_state.total_runs + (not is_counted)

    def _take_states(self, texts: list[str]) -> None:
        """Report what the ranks said, in a thread of its own: this one must not wait for a disk."""
        states = [RankState.from_text(text) for text in texts]
        request = next((state.request for state in states if state.request), "")
        self._request, self._asked_at = "", math.inf
        if not request:
            # Asked twice, because the answer took longer than a look; or a run was completed since it was asked for.
            if self._stall is not None or not any(state.stands_still for state in states):
                return
            if any(state.is_excused for state in states):
                self._next = math.ceil(self._quiet * _ASK_AGAIN) + 1
                return
        is_late = any(state.is_late for state in states)
        if not request and not is_late:
            # At once, and not in the thread that reports: the next look would ask the ranks again.
            self._stall = _described(states)
        reporting = threading.Thread(
            target=self._report, args=(states, request, is_late), name="torchhooks report", daemon=True
        )
        self._reporting = reporting
        reporting.start()

    def _report(self, states: Sequence[RankState], request: str, is_late: bool) -> None:
        """Log where the ranks are, and write it and the stacks into a folder."""
        line = first_line(states)
        if not request:
            if is_late and self._goes_on():
                return
            self._stall = _, line = _described(states)
            if self._speaks(states):
                logger.critical("%s", line)
        folder = request or f"stall-{max(state.run for state in states)}"
        # In another thread, because the disk may be what blocks: an abort does not wait for it longer than _WRITE_SECS.
        writing = threading.Thread(
            target=self._write, args=(states, folder, line), name="torchhooks report", daemon=True
        )
        writing.start()
        writing.join(_WRITE_SECS)
        if self._aborts and not request:
            # end_process() calls os._exit(), so multiprocessing does not end the workers of a DataLoader.
            kill_workers()
            end_process('the loop stands still, and stall_action is "abort"')

    def _speaks(self, states: Sequence[RankState]) -> bool:
        """Return whether this rank says what the ranks with these ``states`` have told it."""
        return self._training.ranks.is_chief or len(states) == 1

    def _goes_on(self) -> bool:
        """Wait for a look, and return whether something was completed meanwhile.

        A rank that could not answer was in a call that keeps Python's global lock, and may have just come out of it.
        """
        counts = self._counts_now()
        return self._closed.wait(LOOK_SECS) or self._counts_now() != counts

    def _write(self, states: Sequence[RankState], name: str, line: str) -> None:
        """Write the stacks of this rank, and on the chief the report."""
        rank, own = self._training.ranks.rank, states[self._training.ranks.rank if len(states) > 1 else 0]
        # First, so that status says so now, and not with the next record, up to ten seconds later.
        self._on_change()
        if self._folder is None:
            # faulthandler needs the number of a file, which an object that replaces sys.stderr may not have.
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
            return
        folder = os.path.join(self._folder, name)
        with _warns_of(folder):
            os.makedirs(folder, exist_ok=True)
            listed = "\n".join(each.text for each in children())
            text = f"rank {rank}: {own.phase}, run {own.run}, {own.where}\n{listed}\n\n{format_stacks()}"
            _write_file(os.path.join(folder, f"rank-{rank}.txt"), text.encode(errors="replace"))
            if record := flight_record():
                _write_file(os.path.join(folder, f"rank-{rank}.flight.json"), record)
            if self._speaks(states):  # last: a reader that waits for it finds this rank's stacks too
                files = "The stacks of rank N are in rank-N.txt, next to this file, or in that folder of its machine."
                _write_file(os.path.join(folder, "report.md"), report(states, line, files).encode(errors="replace"))

    # -- a call that keeps Python's lock, so that no thread can look --------------------------------------------------

    def _watch_the_lock(self) -> None:
        """Have the stacks written unless this is called again in time, and report what was written."""
        before = self._lock_secs
        # One look longer than a stall, which a look finds first if it can.
        self._lock_secs = self._limit(self._is_slow) + LOOK_SECS
        if stacks := self._lock.arm(self._lock_secs):
            self._report_lock(stacks, before)

    def _report_lock(self, stacks: bytes, secs: float) -> None:
        assert self._folder is not None  # or there is no file for the stacks
        folder = os.path.join(self._folder, f"stall-{self._run_at(self._place())}")
        path = os.path.join(folder, f"rank-{self._training.ranks.rank}.lock.txt")
        line = (
            f"a call kept Python's global lock for more than {secs - LOOK_SECS:g} s, so no other thread could run: "
            f"{path} has the stacks"
        )
        logger.critical("%s", line)
        with _warns_of(folder):
            os.makedirs(folder, exist_ok=True)
            _write_file(path, stacks)
            if self._training.ranks.is_chief:
                _write_file(os.path.join(folder, "report.md"), f"{line}\n".encode())


def _look_again(watch: weakref.ref[Watch], closed: threading.Event) -> None:
    while not closed.wait(LOOK_SECS):
        if (found := watch()) is None:
            return
        try:
            found.look()
        except Exception as error:  # a disk that is full, for example: the training run goes on without a watch
            logger.warning("the loop is no longer watched for stalls", exc_info=error)
            return
        # Or this variable would keep the watch for ever, and the thread would not end with a loop that was dropped.
        del found


def _is_interactive() -> bool:
    """Return whether the script is typed by a person, who may think between two runs."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _described(states: Sequence[RankState]) -> tuple[str, str]:
    """Return what ``status`` says of a stall, and the line of the log about it."""
    return short_line(states), f"no run was completed for {max(state.secs for state in states)} s. {first_line(states)}"


@contextmanager
def _warns_of(folder: str) -> Iterator[None]:
    """Log a warning if ``folder`` cannot be written: the training run goes on without a report."""
    try:
        yield
    except OSError as error:
        logger.warning("%s cannot be written (%s)", folder, error.strerror or error)


def _write_file(path: str, data: bytes) -> None:
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(data)
