"""Making the runs of a loop in which hooks take part.

A run is the sequence that :mod:`torchhooks.lifecycle.hook` describes. :meth:`Runner.begin` calls ``before_run`` of the
hooks that are due, the caller makes the step, and :meth:`Runner.finish` counts the step, evaluates what the hooks
fetch, and calls ``after_run``. ``loop.run()`` and ``with loop.step()`` both make runs like this. A run in which no hook
is due is ``None``: see :meth:`torchhooks.MonitoredLoop.run`, where its test is written out, because every step pays
for it.

What happens between two runs stands in :mod:`torchhooks.loop.boundaries`, and what follows an error in
:mod:`torchhooks.loop.recoveries`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torchhooks.common.errors import FeedError
from torchhooks.lifecycle.hook import (
    NO_KWARGS,
    SessionRunContext,
    SessionRunValues,
)
from torchhooks.loop.rank_sync import RankSync
from torchhooks.loop.requests import (
    NO_RESULTS,
    NOTHING_RECORDED,
    Recorded,
    Recording,
    Request,
    check_late,
    check_request,
)
from torchhooks.loop.schedule import HookSlot, Schedule, by_index, note_hook
from torchhooks.loop.sessions import Sessions
from torchhooks.progress.loop_state import NO_OUTPUTS
from torchhooks.progress.training_state import TrainingState

Run = tuple[SessionRunContext, list[Request], list[HookSlot], Recording | None]
"""A run in which hooks take part, from :meth:`Runner.begin` to :meth:`Runner.finish`.

Its context; what hooks have requested, in their order; the hooks whose ``before_run`` was called; and what hooks feed,
watch and trace, ``None`` if they do not. A plain tuple, because a hook in every run pays for it.
"""

_NO_VALUES: Mapping[HookSlot, SessionRunValues] = {}


class Runner:
    """Makes the runs of one loop.

    Args:
        training: the state of the loop.
        schedule: the hooks, and when one is due.
        sessions: has the session in which a run is made.
        rank_sync: keeps the loop in step with the other ranks; ``None`` in a process that is alone.
    """

    def __init__(
        self,
        training: TrainingState,
        schedule: Schedule,
        sessions: Sessions,
        rank_sync: RankSync | None,
    ) -> None:
        self._training, self._schedule, self._sessions, self.rank_sync = training, schedule, sessions, rank_sync

    def run(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        """Make a whole run in which a hook is due, and return what the step function returned."""
        run, function = self._begin_due(args, kwargs), self._training.loop_state.function
        recording = run[3]
        if recording is None:
            # An empty ** would copy a dict.
            outputs = function(*args, **kwargs) if kwargs else function(*args)
        else:
            try:
                outputs = function(*args, **{**kwargs, **recording.fed})
            except BaseException:
                # Also after a Ctrl-C, which the script may catch: the model would keep what watches it, and the
                # profiler would go on.
                recording.stop()
                raise
        self.finish(run, outputs)
        return outputs

    def begin(self, args: tuple[object, ...] | None, kwargs: Mapping[str, object]) -> Run | None:
        """Begin a run; return ``None`` if no hook is due in it.

        ``args`` is ``None`` if the step is the body of a ``with`` statement, which has no arguments.
        """
        state = self._training.loop_state
        if state.is_idle():
            state.outputs = NO_OUTPUTS  # releases the last outputs before the step needs the memory
            return None
        return self._begin_due(args, kwargs)

    def _begin_due(self, args: tuple[object, ...] | None, kwargs: Mapping[str, object]) -> Run:
        """Begin a run in which a hook is due: call each ``before_run``, and start what the hooks record.

        Raises:
            FeedError: a hook feeds what the caller passes, or the body of a ``with`` statement.
        """
        training, schedule = self._training, self._schedule
        state = training.loop_state
        number = state.runs + 1
        if self.rank_sync is not None:
            self.rank_sync.begin_run(number)
        # Before the hooks of this run are chosen: a signal handler only leaves a mark, and asks for the next run.
        if schedule.is_triggered_externally:
            schedule.take_triggers()
        # That epoch was left by break. Its hooks come before this run chooses its own: they may set the global step,
        # and say afterwards when they are next due.
        if training.agenda.epochs_ended is not None:
            training.call_epoch_hooks()
        step = state.global_step  # after the hooks of that epoch, which may set it
        context = state.context = SessionRunContext(self._sessions.session, args, kwargs)
        context.step_before = step
        queue = schedule.before
        if step + 1 < queue.step and number < queue.run and queue.moment is None:  # a hook in every run pays for this
            participants = [*queue.always]
        else:
            participants = queue.choose(step + 1, number)
        requests: list[Request] = []
        records = False
        try:
            for slot in participants:
                context.caller = slot
                if slot.seen + 1 < number:
                    slot.catch_up(number - 1)
                before_run = slot.before_run  # CPython calls a local faster than an attribute
                request = before_run(context)
                if request is not None:
                    if request is not slot.plain_request:
                        if check_request(requests, slot, request):
                            slot.plain_request = request  # it cannot change, so later runs skip the check
                        else:
                            records = True
                        training.accumulated.declare(slot, request.fetches, number)
                    requests.append((slot, request))
                if state.global_step != step:  # the hooks after this one are due by the step that it set
                    step = state.global_step
                    queue.choose_again(participants, slot, step + 1, number)
        except BaseException as error:
            self._note(error, context.caller, "before_run")
            raise
        # Releases the last outputs before the step needs the memory, but after every before_run, which may evaluate
        # them. Without outputs, the thread that talks to the other ranks takes the step for begun.
        state.outputs = NO_OUTPUTS
        recording = self._start_recording(requests, args, kwargs) if records else None
        # No line may come in between: only the caller can remove what the recording has added to the model.
        return context, requests, participants, recording

    def finish(
        self,
        run: Run | None,
        outputs: object,
        args: tuple[object, ...] | None = None,
        kwargs: Mapping[str, object] = NO_KWARGS,
    ) -> None:
        """Count the step that made ``outputs``, and finish the run that :meth:`begin` began with these arguments."""
        state = self._training.loop_state
        state.outputs = outputs
        state.global_step = step = state.global_step + state.steps_per_run
        # An idle run is compared once more: its step may have counted several steps, and another thread or a signal
        # handler may have called interrupt() meanwhile.
        if run is not None:
            self._complete(run, outputs)
        elif step <= state.idle_step and not (state.checks_after and self._schedule.check_after(outputs, args, kwargs)):
            state.runs += 1
        else:
            self.join_after_step(args, kwargs, outputs)

    def join_after_step(self, args: tuple[object, ...] | None, kwargs: Mapping[str, object], outputs: object) -> None:
        """Have hooks take part in a run that began as an idle one, after its step was made and counted."""
        state = self._training.loop_state
        if self.rank_sync is not None:
            self.rank_sync.begin_run(state.runs + 1)
        context = SessionRunContext(self._sessions.session, args, kwargs)
        state.begin_with_hooks(context)
        self._complete((context, [], [], None), outputs)

    def abandon(self, run: Run | None) -> None:
        """Remove what watches and traces the step of ``run``, whose body was left by an error."""
        recording = None if run is None else run[3]
        if recording is not None:
            recording.stop()

    def _start_recording(
        self, requests: list[Request], args: tuple[object, ...] | None, kwargs: Mapping[str, object]
    ) -> Recording:
        recording = Recording(requests)
        if recording.feeders:
            if args is None:
                name, feeder = next(iter(recording.feeders.items()))
                raise FeedError(
                    f"{feeder} feeds {name!r}, but the body of step() has no parameters: put its lines into a "
                    "function, pass that to MonitoredLoop(step, ...), and call loop.run(...)"
                )
            self._training.step_function.check_feeds(recording.feeders, args, kwargs)
        recording.start(self._sessions.session.model)
        return recording

    def _complete(self, run: Run, outputs: object) -> None:
        """Make the part of a run that comes after its step: evaluate what hooks fetch, and call their ``after_run``."""
        context, requests, participants, recording = run
        state, schedule = self._training.loop_state, self._schedule
        recorded, no_results = NOTHING_RECORDED, NO_RESULTS
        if recording is not None:
            recording.stop()  # first: evaluating a fetch may call the model
            recorded = recording.recorded(outputs)
            no_results = SessionRunValues(None, recorded.options, recorded.metadata)
        if schedule.watchers:
            self._call_watchers(context, requests, participants, outputs, recorded)
        if state.global_step <= context.step_before:  # the run counted no step: before anything is evaluated in vain
            requests = [request for request in requests if not request[0].hook.needs_step]
            for slot in participants:
                if slot.hook.needs_step:
                    slot.trigger.withdraw()
        # Also without a request: of an idle run, check_after() adds the values that are accumulated, and of this run
        # the evaluation does.
        if requests or self._training.accumulated.sources:
            values = self._evaluate(context, requests, outputs, recorded)
        else:
            values = _NO_VALUES
        planned = self._after_run(context, participants, values, no_results)
        state.context = None
        context.end()
        # After every after_run, because until then the run can still fail. But before end_hooks_of_run(): while the run
        # has its number, this rank promises no later run, so all ranks can stop in this one.
        if state.stop_requests:
            state.stop_as_requested()
        if planned:
            schedule.plan(participants)
        if self.rank_sync is not None:
            # Not in a finally: after an error, RankSync.run_failed() does it, and until then the run is in progress for
            # the other ranks.
            self.rank_sync.end_hooks_of_run()

    def _call_watchers(
        self,
        context: SessionRunContext,
        requests: list[Request],
        participants: list[HookSlot],
        outputs: object,
        recorded: Recorded,
    ) -> None:
        """Call ``before_run`` of the hooks whose ``Due.when`` is true of ``outputs``; they join ``participants``."""
        training, schedule = self._training, self._schedule
        state = training.loop_state
        if recorded.fed:  # a feed can have the name of an output, and Due.when sees the outputs only: call all of them
            late = [slot for slot in schedule.watchers if slot not in participants]
        else:
            late = schedule.noticed_by(outputs, participants)
        try:
            for slot in late:
                context.caller = slot
                slot.catch_up(state.runs)
                slot.trigger.choose(state.global_step, state.runs + 1, time.monotonic())
                request = slot.before_run(context)
                if request is not None:
                    if request is not slot.plain_request:
                        check_request(requests, slot, request)
                        check_late(slot, request, outputs)
                        training.accumulated.declare(slot, request.fetches, state.runs + 1)
                    requests.append((slot, request))
        except BaseException as error:
            self._note(error, context.caller, "before_run")
            raise
        requests.sort(key=lambda request: request[0].index)
        participants += late
        participants.sort(key=by_index)

    def _evaluate(
        self, context: SessionRunContext, requests: list[Request], outputs: object, recorded: Recorded
    ) -> Mapping[HookSlot, SessionRunValues]:
        """Evaluate every distinct fetch once, in the structure in which each hook requested it."""
        fed, watched, options, metadata = recorded
        session = self._sessions.session
        evaluator = session.new_evaluator(session, outputs, fed, context.inputs, watched, requests)
        if session.accumulated.sources:
            session.accumulated.add(outputs, (), {}, evaluator)
        values: dict[HookSlot, SessionRunValues] = {}
        for slot, (fetches, _, _) in requests:
            results = None if fetches is None else evaluator.evaluate(fetches, slot)
            values[slot] = SessionRunValues(results, options, metadata)
        return values

    def _after_run(
        self,
        context: SessionRunContext,
        participants: list[HookSlot],
        values: Mapping[HookSlot, SessionRunValues],
        no_results: SessionRunValues,
    ) -> bool:
        """Call ``after_run`` of the hooks that take part; return whether one of them has to be asked when it is due.

        A hook that has requested nothing gets ``no_results``, with the options and metadata of the run, as in
        TensorFlow.
        """
        state, schedule = self._training.loop_state, self._schedule
        number = state.runs + 1
        step, queue = state.global_step, schedule.after
        if step >= queue.step or number >= queue.run or queue.moment is not None:
            participants += [slot for slot in queue.choose(step, number) if slot not in participants]
            participants.sort(key=by_index)
        # Before the calls: a checkpoint that an after_run saves contains the step of this run, so it has to count the
        # run.
        state.runs = number
        planned = False
        try:
            for slot in participants:
                context.caller = slot
                if slot.seen + 1 < number:  # not called before the step
                    slot.catch_up(number - 1)
                planned = planned or slot.says_when
                after_run = slot.after_run  # CPython calls a local faster than an attribute
                after_run(context, values.get(slot, no_results) if values else no_results)
                # Only after the call: if a hook raises, this tells the hooks that know of the run from the others.
                slot.seen = number
                if state.global_step != step:  # the hooks after this one are due by the step that it set
                    step = state.global_step
                    queue.choose_again(participants, slot, step, number)
        except BaseException as error:
            context.counts = True
            self._note(error, context.caller, "after_run")
            # Before fail_at(), which moves ``seen`` on for the hooks that were not called.
            done = [slot for slot in participants if slot.seen == number]
            schedule.fail_at(context.caller)
            with suppress(Exception):  # one that fails now is asked again after its next run
                schedule.plan(done)  # if the script goes on, they are not due in the next run, and the others are
            raise
        return planned

    def _note(self, error: BaseException, slot: object, method: str) -> None:
        note_hook(error, slot, method, self._training.global_step)
