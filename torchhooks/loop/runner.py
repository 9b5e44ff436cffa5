"""Making the runs of a loop, and what happens between two of them.

A run is the sequence that :mod:`torchhooks.lifecycle.hook` describes. :meth:`Runner.begin` calls ``before_run`` of the
hooks that are due, the caller makes the step, and :meth:`Runner.finish` counts the step, evaluates what the hooks
fetch, and calls ``after_run``. ``loop.run()`` and ``with loop.step()`` both make runs like this. A run in which no hook
is due is ``None``: see :meth:`torchhooks.MonitoredLoop.run`, where its test is written out, because every step pays
for it.

Where an error came from decides which method of :class:`Runner` takes it, and what follows if the loop recovers:

=====================================  ====================================  ================================
an error of                            is taken by                           after the recovery
=====================================  ====================================  ================================
a run by ``loop.run()``                ``recover_or_leave``                  ``loop.run`` makes the run again
``loop.run_step_fn()``                 ``recover_or_leave``                  the function is called again
a run that this function makes         ``recover_or_leave``, which leaves    the function is called again
a hook before the body of ``step()``   ``recover_or_leave_before_next_run``  the run is begun again
that body, or a hook after it          ``recover_or_leave_before_next_run``  the loop goes on without the run
a background thread, between two runs  ``recover_from_thread``               the loop goes on
a call between two items               ``make``                              the item is yielded again
a hook at the end of an epoch          ``make``                              the hooks are called again
the creation of the first session      ``may_recover`` and ``recover``       the session is created again
=====================================  ====================================  ================================

An error that the loop does not recover from goes to the script. If the script catches it, the loop goes on: see
:mod:`torchhooks.loop.caught`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torchhooks.common.errors import FeedError, LifecycleError, add_note, brief
from torchhooks.common.log import logger
from torchhooks.common.timers import EveryEpochs, first_due
from torchhooks.device.readback import Readback
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import (
    NO_KWARGS,
    PeriodicHook,
    RunServices,
    SessionRunContext,
    SessionRunValues,
    StandardHook,
)
from torchhooks.lifecycle.loop_state import NO_OUTPUTS, RUNNING, LoopState, Phase, StoppedBy
from torchhooks.lifecycle.recovery import Recovery
from torchhooks.lifecycle.session import Session
from torchhooks.loop.arguments import LoopArguments, warn_of_late_hooks
from torchhooks.loop.caught import CaughtErrors, Place
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

Run = tuple[SessionRunContext, list[Request], list[HookSlot], Recording | None]
"""A run in which hooks take part, from :meth:`Runner.begin` to :meth:`Runner.finish`.

Its context; what hooks have requested, in their order; the hooks whose ``before_run`` was called; and what hooks feed,
watch and trace, ``None`` if they do not. A plain tuple, because a hook in every run pays for it.
"""


_NO_VALUES: Mapping[HookSlot, SessionRunValues] = {}

_RUNS_WITHOUT_STEP = 1000  # more than the gradients of one step accumulate over


class Runner:
    """Makes the runs of one loop, takes up stops between them, and recovers from errors.

    One class, because whether a run is made, made again or the last one is decided from the same state.
    :class:`torchhooks.loop.sessions.Sessions` creates the sessions in which the runs are made.
    """

    def __init__(self, arguments: LoopArguments) -> None:
        ranks = arguments.ranks
        self.state = state = LoopState(arguments.signals, arguments.step.function, arguments.steps_per_run)
        stopping = [each.name for each in arguments.signals]
        self.schedule = schedule = Schedule(
            state, arguments.hooks, ranks, arguments.chief_only, stopping, first_index=arguments.first_index
        )
        self.readback = Readback(state.set_pending)
        self.rank_sync = RankSync(ranks, schedule, state) if ranks.size > 1 else None
        self.recovery = Recovery(arguments.recoverable_errors, arguments.max_recoveries, ranks=ranks.size)
        self.sessions = Sessions(arguments, state, schedule, self.readback, self.rank_sync, self.recovery)
        self.deferred = self.sessions.deferred
        self.caught = CaughtErrors(state, self.sessions.position)
        self.in_step_fn = False
        """Whether a function passed to ``run_step_fn`` is being called, which may make several runs."""
        self.is_run_of_step_fn = False
        """Whether that function makes the run with ``run_with_hooks``: after a recovery, the whole function is called
        again, and not the run alone."""
        self._step = arguments.step
        self._accumulated = schedule.accumulated
        self._is_first = True  # the run to come; with step_unit="optimizer_step", until a run has counted a step
        self._misses_step = not arguments.steps_per_run  # until that was logged
        self._checks_epochs_until = 2  # the run: only the second one in an item shows that the item has several
        # Whether the loop recovered, and has made no run since. Only for what is not made again at once, as by step():
        # loop.run() and run_step_fn() make the run again themselves, and then report that it went well.
        self._awaits_success = False
        self._renew()

    @property
    def session(self) -> Session:
        """The current session."""
        return self.sessions.session

    def _renew(self) -> None:
        """Make the next session, in which the runs are made from now on."""
        self.sessions.renew()
        session, coord = self.sessions.session, self.sessions.coord
        self._session, self._new_evaluator = session, session.new_evaluator
        self._services = RunServices(session, self._step, self.readback, self.state, self.deferred)
        coord.on_stop(partial(self._thread_stopped, coord))

    # -- a run --------------------------------------------------------------------------------------------------------

    def run(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        """Make a whole run in which a hook is due, and return what the step function returned."""
        run, function = self._begin_due(args, kwargs), self.state.function
        recording = run[3]
        if recording is None:
            # An empty ** would copy a dict.
            outputs = function(*args, **kwargs) if kwargs else function(*args)
        else:
            try:
                outputs = function(*args, **{**kwargs, **recording.fed})
            except BaseException:
                recording.stop()
                raise
        self.finish(run, outputs)
        return outputs

    def begin(self, args: tuple[object, ...] | None, kwargs: Mapping[str, object]) -> Run | None:
        """Begin a run; return ``None`` if no hook is due in it.

        ``args`` is ``None`` if the step is the body of a ``with`` statement, which has no arguments.
        """
        if self.state.is_idle():
            self.state.outputs = NO_OUTPUTS  # releases the last outputs before the step needs the memory
            return None
        return self._begin_due(args, kwargs)

    def _begin_due(self, args: tuple[object, ...] | None, kwargs: Mapping[str, object]) -> Run:
        """Begin a run in which a hook is due: call each ``before_run``, and start what the hooks record.

        Raises:
            FeedError: a hook feeds what the caller passes, or the body of a ``with`` statement.
        """
        state, schedule, deferred = self.state, self.schedule, self.deferred
        number = state.runs + 1
        if self.rank_sync is not None:
            self.rank_sync.begin_run(number)
        context = state.context = SessionRunContext(self._services, args, kwargs)
        if schedule.is_triggered_externally:
            schedule.take_triggers()
        if deferred.epoch_end is not None:  # of an epoch that was left by break
            deferred.make_owed_epoch_end()
        context.step_before = step = state.global_step  # after the hooks of that epoch, which may set it
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
                        self._accumulated.declare(slot, request.fetches, number)
                    requests.append((slot, request))
                if state.global_step != step:  # the hooks after this one are due by the step that it set
                    step = state.global_step
                    queue.choose_again(participants, slot, step + 1, number)
        except BaseException as error:
            self._note(error, context.caller, "before_run")
            raise
        state.outputs = NO_OUTPUTS  # releases the last outputs before the step needs the memory
        recording = self._start_recording(requests, args, kwargs) if records else None
        return context, requests, participants, recording

    def finish(
        self,
        run: Run | None,
        outputs: object,
        args: tuple[object, ...] | None = None,
        kwargs: Mapping[str, object] = NO_KWARGS,
    ) -> None:
        """Count the step that made ``outputs``, and finish the run that :meth:`begin` began with these arguments."""
        state = self.state
        state.outputs = outputs
        state.global_step = step = state.global_step + state.steps_per_run
        if run is not None:
            self._complete(run, outputs)
        elif step <= state.idle_step and not (state.checks_after and self.schedule.check_after(outputs, args, kwargs)):
            state.runs += 1
        else:
            self.join_after_step(args, kwargs, outputs)

    def join_after_step(self, args: tuple[object, ...] | None, kwargs: Mapping[str, object], outputs: object) -> None:
        """Have hooks take part in a run that began as an idle one, after its step was made and counted."""
        if self.rank_sync is not None:
            self.rank_sync.begin_run(self.state.runs + 1)
        context = self.state.context = SessionRunContext(self._services, args, kwargs)
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
            self._step.check_feeds(recording.feeders, args, kwargs)
        recording.start(self._session.model)
        return recording

    def _complete(self, run: Run, outputs: object) -> None:
        """Make the part of a run that comes after its step: evaluate what hooks fetch, and call their ``after_run``."""
        context, requests, participants, recording = run
        state, schedule = self.state, self.schedule
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
        evaluates = requests or schedule.accumulated.sources
        values = self._evaluate(context, requests, outputs, recorded) if evaluates else _NO_VALUES
        planned = self._after_run(context, participants, values, no_results)
        state.context = None
        context.end()
        if state.stop_requests:
            state.stop_as_requested()  # after every after_run: until then, the run can still fail
        if planned:
            schedule.plan(participants)
        if self.rank_sync is not None:
            self.rank_sync.run_number = 0  # not after an error: see leave()

    def _call_watchers(
        self,
        context: SessionRunContext,
        requests: list[Request],
        participants: list[HookSlot],
        outputs: object,
        recorded: Recorded,
    ) -> None:
        """Call ``before_run`` of the hooks whose ``Due.when`` is true of ``outputs``; they join ``participants``."""
        schedule = self.schedule
        if recorded.fed:  # a feed can have the name of an output, and Due.when sees the outputs only: call all of them
            late = [slot for slot in schedule.watchers if slot not in participants]
        else:
            late = schedule.noticed_by(outputs, participants)
        try:
            for slot in late:
                context.caller = slot
                slot.catch_up(self.state.runs)
                slot.trigger.choose(self.state.global_step, self.state.runs + 1, time.monotonic())
                request = slot.before_run(context)
                if request is not None:
                    if request is not slot.plain_request:
                        check_request(requests, slot, request)
                        check_late(slot, request, outputs)
                        self._accumulated.declare(slot, request.fetches, self.state.runs + 1)
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
        evaluator = self._new_evaluator(self._session, outputs, fed, context.inputs, watched, requests)
        if self._accumulated.sources:
            self._accumulated.add(outputs, (), {}, evaluator)
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
        state, schedule = self.state, self.schedule
        number = state.runs + 1
        step, queue = state.global_step, schedule.after
        if step >= queue.step or number >= queue.run or queue.moment is not None:
            participants += [slot for slot in queue.choose(step, number) if slot not in participants]
            participants.sort(key=by_index)
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
                slot.seen = number
                if state.global_step != step:  # the hooks after this one are due by the step that it set
                    step = state.global_step
                    queue.choose_again(participants, slot, step, number)
        except BaseException as error:
            context.counts = True
            self._note(error, context.caller, "after_run")
            done = [slot for slot in participants if slot.seen == number]
            schedule.fail_at(context.caller)
            with suppress(Exception):  # one that fails now is asked again after its next run
                schedule.plan(done)  # if the script goes on, they are not due in the next run, and the others are
            raise
        return planned

    def run_epoch_hooks(self, participants: list[HookSlot]) -> None:
        """Call the hooks in ``participants`` for the end of an epoch, with the outputs of the last run.

        No step is made, and no run is counted. An output that a hook asks for is NaN, with a warning, if this process
        has made no run: it was resumed where an epoch ends.
        """
        state, schedule = self.state, self.schedule
        enclosing = state.context  # the run that begins, if an epoch was left by a break before it
        context = self.state.context = SessionRunContext(self._services, None, {})
        context.ends_epoch = True
        requests: list[Request] = []
        method = "before_run"
        try:
            for slot in participants:
                context.caller = slot
                slot.catch_up(state.runs)
                slot.trigger.end_epoch()
                slot.hook.force_due()
                request = slot.before_run(context)
                if request is not None:
                    check_request(requests, slot, request)
                    check_late(slot, request, None)
                    self._accumulated.declare(slot, request.fetches, state.runs)
                    requests.append((slot, request))
            evaluator = self._session.evaluator_between_runs([request.fetches for _, request in requests])
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
            self._note(error, context.caller, method)
            raise
        self.state.context = enclosing
        if self.state.stop_requests:
            self.state.stop_as_requested()
        schedule.plan(participants)

    def _note(self, error: BaseException, slot: object, method: str) -> None:
        note_hook(error, slot, method, self.state.global_step)

    # -- between two runs ---------------------------------------------------------------------------------------------

    def end_run(self) -> None:
        """Make the ``when_ready`` calls whose values have arrived, and notice stop requests. Only called if needed."""
        state, schedule, readback = self.state, self.schedule, self.readback
        state.pending = False  # cleared first, because a thread or a signal may set it at any time
        self.caught.look()
        if state.runs <= self._checks_epochs_until and not self.in_step_fn:
            self._check_epochs()
        if self._is_first:
            # Hooks that are due by steps ask in runs that count one, and other runs may return less.
            self._is_first = not state.steps_per_run and state.global_step == state.begun_at
            if self._is_first:
                state.set_pending()
                if state.runs >= _RUNS_WITHOUT_STEP:
                    self.warn_of_no_step()
            else:
                self._look_up_names()
                if not self.deferred.depth() and self.session.ranks.is_chief:
                    warn_of_late_hooks([slot.hook for slot in self.schedule.all_hooks], self.session.hooks)
        if readback.waiting:
            state.set_pending()
            readback.end_run()
        if self.deferred.waiting and not self.deferred.depth():
            self.deferred.make_all()
        if self._awaits_success:
            self._awaits_success = False
            self.recovery.run_went_well()
        self.state.take_up_requests()
        if schedule.is_triggered_externally:
            schedule.take_triggers()
        if self.sessions.coord.should_stop():
            state.set_pending()
        if self.rank_sync is not None:
            self.rank_sync.end_run()
        elif self.session.ranks.may_be_late:
            self.session.ranks.warn_if_late()

    def _check_epochs(self) -> None:
        """Raise, in one of the first runs, if a hook is due by epochs and none can be counted.

        One run before the first ``until_stop`` is only a warning: it may be there to compile the model.
        """
        by_epochs = [
            slot
            for slot in self.schedule.all_hooks
            if isinstance(slot.hook, PeriodicHook) and isinstance(slot.hook.timer, EveryEpochs)
        ]
        if not by_epochs:
            return
        state, position = self.state, self.sessions.position
        why = position.why_no_epoch()
        if why is not None:
            message = f"{by_epochs[0]} is due at the end of an epoch, and {why}"
            if state.runs > 1 or position.has_loops:
                raise LifecycleError(message)
            self._checks_epochs_until += 1
            logger.warning("%s. A second run like this is an error", message)
        if state.runs < self._checks_epochs_until:
            state.set_pending()  # never to False: a thread or a signal may set it at any time

    def _look_up_names(self) -> None:
        """Log which names that a hook of torchhooks will ask for have no value after the first run.

        It would be an error when the hook is due, perhaps an hour later. Nothing is evaluated.
        """
        if not self.session.ranks.is_chief or self.state.outputs is NO_OUTPUTS:
            return
        evaluator = self.session.evaluator_between_runs(None)
        for slot in self.schedule.all_hooks:
            fetches = slot.hook.fetches_to_come if isinstance(slot.hook, StandardHook) else None
            for level, line in evaluator.names_to_come(fetches, slot):
                logger.log(level, "%s", line)

    def warn_of_no_step(self) -> None:
        """Log a warning, once, that the optimizer whose steps count has made none, so that no hook is due by steps."""
        state, optimizer = self.state, self.session.optimizer
        if not (self._misses_step and state.runs and self.session.ranks.is_chief):
            return
        self._misses_step = False
        logger.warning(
            'step_unit="optimizer_step": the step() of the %s that the loop has was not called in %d runs, so the '
            "global step is still %d, and what is due by steps never comes due. Pass the optimizer whose step() the "
            'script calls, which for SAM is the one that it wraps, sam.base_optimizer, or use step_unit="run"',
            *(type(optimizer).__name__, state.runs, state.global_step),
        )

    def tell_never_due(self) -> None:
        """Log which hooks were never due, because the training run, which is over, was shorter than their period."""
        state, session = self.state, self.session
        is_paused = state.stop is not None and state.stop.by in (StoppedBy.SIGNAL, StoppedBy.CALLER)
        if not state.runs or not session.ranks.is_chief or (is_paused and session.why_finished is None):
            return
        lengths = {"steps": state.global_step, "epochs": self.sessions.position.epochs_ended}
        for slot in self.schedule.all_hooks:
            hook = slot.hook
            first = first_due(hook.timer) if isinstance(hook, PeriodicHook) and not hook.works_at_end else None
            if first is not None and first[0] > lengths[first[1]]:
                logger.info("%s was never due: the training run had %d %s", slot, lengths[first[1]], first[1])

    def check_for_stop(self) -> bool:
        """Notice requests to stop, recover from the error of a thread, and return whether the loop is to end."""
        state = self.state
        if state.stop is None and state.pending:
            self.caught.look()
            state.take_up_requests()
            if self.rank_sync is not None:
                self.rank_sync.check()
            self.recover_from_thread()
        return state.stop is not None

    def refuse(self, call: str = "run()") -> None:
        """Raise the reason why no run can be made, except for the one run that is allowed after a thread's stop."""
        self.state.refuse(call, self.sessions.coord.raise_requested_exception, self.in_step_fn)

    # -- errors -------------------------------------------------------------------------------------------------------

    def recover_or_leave(self, error: BaseException, *, in_run: bool = True, of_function: bool = False) -> bool:
        """Recover from ``error``, which interrupted a run, or leave it to the script. Return whether it recovered.

        Args:
            error: what was raised.
            in_run: whether it interrupted a run, or else a call between two runs.
            of_function: whether it comes out of a function of ``run_step_fn``.

        Raises:
            BaseException: what ``error`` is the consequence of: an error of a background thread, or of another rank. Or
                else a recovery failed.
        """
        cause, place = self._cause_of(error), self.caught.place(in_run=in_run)
        self.state.void_run()
        self.schedule.void_run()
        try:
            may_recover = not self.is_run_of_step_fn and self.may_recover(cause)
        except BaseException as another:  # of a save in the background
            self.leave(another, place)
            raise
        if not may_recover:
            self.leave(error, place, of_function=of_function)
            return False
        try:
            self.recover(cause, makes_run_again=True)
        except BaseException as another:
            self._recovery_failed(another)
            raise
        self.caught.recovered(error)
        self.state.run_is_over()
        self.deferred.make_owed_epoch_end()  # if the error came from its hooks, before the run
        return True

    def leave(self, error: BaseException, place: Place, *, of_function: bool = False) -> None:
        """Leave ``error``, which was raised at ``place``, to the script and the other ranks.

        Raises:
            BaseException: what ``error`` is the consequence of: an error of a background thread, or of another rank.
        """
        self.state.run_is_over()
        had_cause = self.sessions.coord.error is not None
        # Not once more when it leaves the function that made the run.
        if self.caught.leaves(error, place, of_function=of_function, had_cause=had_cause):
            if self._is_first and not self.session.was_restored:
                self.state.begun_at = self.state.global_step  # TensorFlow's START is that of a run that did not fail
            self.session.run_failed(error)
            if self.rank_sync is not None:
                self.rank_sync.run_failed(error, in_run=place.in_run)
        cause = self._cause_of(error)
        if cause is not error:
            raise cause

    def _cause_of(self, error: BaseException) -> BaseException:
        """Return the error of a background thread if ``error``, of a run, is its consequence; otherwise ``error``.

        A thread that reads from a server may lose its connection, so that the step gets ``queue.Empty``. The rule is
        TensorFlow's: of two errors of which the loop recovers from one, the one of the thread is the cause.
        """
        thread_error = self.sessions.coord.error
        if thread_error is None or not isinstance(error, Exception):
            return error
        return error if self.recovery.covers(thread_error) is self.recovery.covers(error) else thread_error

    def cause_of_end(self, error: BaseException | None) -> BaseException | None:
        """Return the error of a background thread that came before ``error``, which ends the loop, or ``None``."""
        thread_error = self.sessions.coord.error
        if error is None or type(error) is StopIteration or thread_error is None or thread_error is error:
            return None
        is_earlier = not self.recovery.covers(thread_error) and not self.caught.came_before_thread(error)
        return thread_error if is_earlier else None

    def may_recover(self, error: BaseException) -> bool:
        """Return whether to recover from ``error``, which a run or the creation of a session raised.

        If it is one of ``recoverable_errors`` and the loop does not recover, a note on the error says why.
        """
        if not self.recovery.covers(error):
            return False
        why, stop = None, self.state.stop
        if self.state.signal is not None:
            why = f"signal {self.state.signal} arrived"
        elif stop is not None and stop.by is not StoppedBy.COORDINATOR:  # which the next session knows nothing of
            why = f"the loop stops ({stop.reason})"
        elif not self.recovery.grant(error):
            return False
        else:
            self.session.wait_for_savers()  # the newest checkpoint may still be being written
            if not self.sessions.has_checkpoint():
                why = "there is no checkpoint to restore"
        if why is not None:
            add_note(error, f"torchhooks: not recovered from, because {why}")
        return why is None

    def recover(self, error: BaseException, *, makes_run_again: bool = False) -> None:
        """Close the session, pause unless this is the first recovery in a row, and create the next session.

        An error on the way is recovered from likewise, if that is allowed.
        """
        while True:
            try:
                self.readback.drain()
                self._leave_session(error)
                if makes_run_again:
                    self.sessions.position.run_is_made_again()
                self.recovery.pause(error, self.state.wait_for_signal)
                if self.state.signal is not None:
                    raise error
                self.sessions.create(recovers=True)  # in this process the data continue where they are
            except BaseException as another:
                if not self.may_recover(another):
                    raise
                error = another
            else:
                return

    def _leave_session(self, error: BaseException) -> None:
        """Replace the session that failed with ``error`` by a new one, and wait for its threads.

        Raises:
            BaseException: another error of a thread, which the loop does not recover from.
        """
        session, coord = self.session, self.sessions.coord
        self.deferred.clear()
        self.state.forget_stop_of_session()
        self._renew()
        session.close()
        self.sessions.join_threads(coord, handled=error)
        for later in coord.later_errors:
            if not self.recovery.covers(later):
                raise later

    def recover_or_leave_before_next_run(self, error: BaseException) -> bool:
        """Do what :meth:`recover_or_leave` does, for a run that is not made again.

        The next run that succeeds resets the pause. In a function passed to ``run_step_fn``, the error is left to the
        function, which can be called again.
        """
        outside, self.is_run_of_step_fn = self.is_run_of_step_fn, self.in_step_fn
        try:
            self._awaits_success = recovered = self.recover_or_leave(error)
        finally:
            self.is_run_of_step_fn = outside
        self.state.set_pending()
        return recovered

    def run_of_step_fn(self, run: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        """Make a run with ``run(*args, **kwargs)`` whose errors are left to the function passed to ``run_step_fn``."""
        outside, self.is_run_of_step_fn = self.is_run_of_step_fn, True
        try:
            return run(*args, **kwargs)
        finally:
            self.is_run_of_step_fn = outside

    def recover_from_thread(self) -> None:
        """Recover from a background thread's error between two runs, if it is one to recover from.

        If the loop does not recover from it, the error stops the loop, like any other error of a thread.
        """
        state, sessions = self.state, self.sessions
        error = sessions.coord.error
        if state.stop is not None or state.phase is RUNNING or self.in_step_fn or error is None:
            return
        if error is sessions.fatal or not self.recovery.covers(error):
            return  # it stops the loop
        # First the calls that belong to the session that is about to be replaced. Of several ranks, none replaces it.
        if self.rank_sync is None and not self.make(self.deferred.make_all):
            return
        self._awaits_success = recovers = self.may_recover(error)
        state.set_pending()
        if not recovers:
            sessions.fatal = error
            state.propose_stop(f"a thread failed with {brief(error)}", StoppedBy.COORDINATOR)
            return
        try:
            self.recover(error)
        except BaseException as another:
            self._recovery_failed(another)
            raise

    def _recovery_failed(self, error: BaseException) -> None:
        """End the loop, which has no session any more, so that the script cannot go on after ``error``."""
        if type(error) is StopIteration:
            self.state.end_cleanly(error)
        else:
            self.state.fail(error)

    def make(self, calls: Callable[[], object]) -> bool:
        """Make ``calls`` between two runs, whose errors count as a run's; return whether they succeeded."""
        if self.rank_sync is None:
            return self._make(calls)
        with self.rank_sync.calls_between_runs():
            return self._make(calls)

    def _make(self, calls: Callable[[], object]) -> bool:
        self.state.phase = RUNNING  # none of them may start a run
        try:
            calls()
        except BaseException as error:
            if type(error) is StopIteration:  # no code of the script is there to catch it
                self.state.void_run()
                self.state.end_cleanly(error)
            elif self.recover_or_leave(error, in_run=False):
                return False
            else:
                raise
        finally:
            self.state.run_is_over()
        return True

    def _thread_stopped(self, coord: Coordinator) -> None:
        """Stop the loop because a background thread asked to, unless the loop may recover from the thread's error."""
        state, error = self.state, coord.error
        if state.phase is Phase.CLOSED or coord is not self.sessions.coord:
            return
        if error is not None and self.recovery.covers(error):
            if state.stop is not None or state.data_have_ended:
                return  # the training is over: the error is logged when the threads are joined
            if self.session.checkpoint_dir is not None:
                state.set_pending()  # the end of the run, or should_stop(), recovers
                return
            self.sessions.fatal = error
        state.propose_stop(f"thread {threading.current_thread().name}", StoppedBy.COORDINATOR)
