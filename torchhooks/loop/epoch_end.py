"""Calling the hooks for the end of an epoch, which makes no step and counts no run."""

from __future__ import annotations

import math

from torchhooks.lifecycle.hook import SessionRunContext, SessionRunValues
from torchhooks.loop.first_runs import FirstRuns
from torchhooks.loop.rank_sync import RankSync
from torchhooks.loop.requests import NO_RESULTS, NOTHING_RECORDED, Request, check_late, check_request
from torchhooks.loop.schedule import HookSlot, Schedule, note_hook
from torchhooks.loop.sessions import Sessions
from torchhooks.progress.training_state import TrainingState


class EpochEnd:
    """Calls the hooks of one loop that are due at the end of an epoch.

    The way of an epoch's end: :meth:`torchhooks.loop.boundaries.Boundaries.close_loop` closes the cursor,
    ``DataPosition.count_epoch`` says whether that ends an epoch, the agenda keeps its number, and the next boundary, or
    the next run if that comes first, calls the hooks here.
    """

    def __init__(
        self,
        training: TrainingState,
        schedule: Schedule,
        sessions: Sessions,
        rank_sync: RankSync | None,
        first_runs: FirstRuns,
    ) -> None:
        self._training, self._schedule, self._sessions, self._rank_sync = training, schedule, sessions, rank_sync
        self._first_runs = first_runs

    def call(self, ended: int) -> None:
        """Call the hooks that are due now that ``ended`` epochs have ended."""
        if not self._training.global_step:  # in a later epoch, the few runs since a resume say nothing
            self._first_runs.warn_of_no_step()
        schedule = self._schedule
        self._training.accumulated.epoch_ended()  # first, so that a checkpoint from a call below says so
        due = schedule.due_at_end_of(ended)
        # Before the calls: a rank that has left its loops sees by this that the other ranks make them, and joins.
        if self._rank_sync is not None:
            self._rank_sync.epoch_ends([slot.hook for slot in due])
        if due:
            self._call(due)
        schedule.plan(due)  # also of none: after a break, no run is idle until the schedule is made again

    def _call(self, participants: list[HookSlot]) -> None:
        """Call the hooks in ``participants``, with the outputs of the last run.

        An output that a hook asks for is NaN, with a warning, if this process has made no run: it was resumed where an
        epoch ends.
        """
        state, session = self._training.loop_state, self._sessions.session
        enclosing = state.context  # the run that begins, if an epoch was left by a break before it
        context = SessionRunContext.at_end_of_epoch(session)
        state.begin_with_hooks(context)
        requests: list[Request] = []
        method = "before_run"
        try:
            for slot in participants:
                context.caller = slot
                slot.catch_up(state.runs)
                # Before before_run, in which a periodic hook looks whether it is due.
                slot.trigger.end_epoch()
                slot.hook.force_due()
                request = slot.before_run(context)
                if request is not None:
                    check_request(requests, slot, request)
                    check_late(slot, request, None)
                    session.accumulated.declare(slot, request.fetches, state.runs)
                    requests.append((slot, request))
            evaluator = session.evaluator_between_runs([request.fetches for _, request in requests])
            evaluator.before_first_run = math.nan
            values = {
                slot: SessionRunValues(
                    evaluator.evaluate(fetches, slot), NOTHING_RECORDED.options, NOTHING_RECORDED.metadata
                )
                for slot, (fetches, _, _) in requests
                if fetches is not None
            }
            method = "after_run"
            for slot in participants:
                context.caller = slot
                slot.after_run(context, values.get(slot, NO_RESULTS))
        except BaseException as error:
            note_hook(error, context.caller, method, state.global_step)
            raise
        # Not in a finally: after an error, void_run() drops this context, together with a stop that was requested in
        # it.
        state.end_with_hooks(enclosing)
        if state.stop_requests:
            state.stop_as_requested()
