"""The lifecycle of one run with hooks: ``before_run``, the step, the fetches, ``after_run``.

:meth:`Lifecycle.run` reads as :mod:`torchhooks.lifecycle.hook` describes it. A run in which no hook is due never gets
here: see :meth:`torchhooks.MonitoredLoop.run`, and :class:`torchhooks.loop.body.Body` for a step that is not a
function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from torchhooks.common.errors import FeedError, LifecycleError, add_note
from torchhooks.common.text import shown
from torchhooks.common.trees import is_fixed
from torchhooks.fetches.fetch import check_feed_names, named_outputs, watched_names
from torchhooks.fetches.watch import NO_WATCH, ModuleWatch
from torchhooks.lifecycle.hook import (
    RunMetadata,
    RunOptions,
    RunServices,
    SessionRunArgs,
    SessionRunContext,
    SessionRunValues,
)
from torchhooks.loop.schedule import Schedule, ScheduledHook, in_order
from torchhooks.position.progress import NO_OUTPUTS, Progress

Request = tuple[ScheduledHook, SessionRunArgs]


class _Made(NamedTuple):
    """How a step was made, where hooks had a say in it."""

    fed: Mapping[str, Any]
    watched: Mapping[str, Any]
    options: RunOptions
    metadata: RunMetadata


class Recording:
    """What hooks feed, watch and trace in one step."""

    def __init__(self, requests: list[Request]) -> None:
        self.fed: dict[str, Any] = {}
        self.feeders: dict[str, object] = {}
        """The hook that feeds each parameter."""
        self._names: list[tuple[str, object]] = []
        trace = memory = False
        for scheduled, (fetches, feed_dict, options) in requests:
            self.fed.update(feed_dict or {})
            self.feeders.update(dict.fromkeys(feed_dict or (), scheduled))
            self._names += [(name, scheduled) for name in watched_names(fetches)]
            if options is not None:
                trace, memory = trace or options.trace, memory or options.memory
        self._options = RunOptions(trace, memory)
        self._watch = NO_WATCH
        self._profile: Any = None
        self._started = ExitStack()

    def start(self, model: torch.nn.Module | None) -> None:
        """Watch submodules of ``model``, and trace, until :meth:`stop`."""
        with ExitStack() as stack:
            if self._names:
                self._watch = ModuleWatch(model, self._names)
                stack.callback(self._watch.close)
            if self._options.trace:
                from torch.profiler import profile

                self._profile = stack.enter_context(profile(profile_memory=self._options.memory))
            self._started = stack.pop_all()

    def stop(self) -> None:
        """Remove what :meth:`start` added."""
        self._started.close()

    def made(self, outputs: Any) -> _Made:
        """Return what is known of the step now that it has returned ``outputs``."""
        caught = self._watch.caught(self.fed, outputs)
        metadata = RunMetadata(self._profile) if self._options.trace else _PLAIN.metadata
        return _Made(self.fed, caught, self._options, metadata)


class Begun(NamedTuple):
    """A run whose hooks were called before a step that is not a function."""

    context: SessionRunContext
    requests: list[Request]
    participants: list[ScheduledHook]
    recording: Recording | None


_PLAIN = _Made({}, {}, RunOptions(), RunMetadata())
_NOTHING = SessionRunValues(None, _PLAIN.options, _PLAIN.metadata)
_NO_VALUES: Mapping[ScheduledHook, SessionRunValues] = {}
_new_tuple: Any = tuple.__new__  # builds a named tuple twice as fast as calling the class


class Lifecycle:
    """Makes the runs of one session in which hooks take part.

    ``steps_per_run`` is 0 if the optimizer's steps are counted.
    """

    def __init__(
        self,
        *,
        services: RunServices,
        progress: Progress,
        schedule: Schedule,
        steps_per_run: int,
    ) -> None:
        self._services = services
        self._session, self._step = services.session, services.step
        self._items, self._ending = services.items, services.ending
        self._function = services.step.function
        self._new_evaluator = services.session.new_evaluator
        self._progress = progress
        self._schedule = schedule
        self._accumulated = schedule.accumulated
        self._steps_per_run = steps_per_run

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make a whole run, and return what the step returned."""
        context = self.new_context(args, kwargs)
        requests: list[Request] = []
        participants = self._before_run(context, requests)
        outputs, made = self._make_step(requests, args, kwargs)
        self.complete(context, requests, participants, outputs, made)
        return outputs

    def finish(self, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Finish a run whose step was made and counted, because no hook was due before it, but one is due after it.

        ``args`` is ``None`` if the step is the body of a ``with`` statement, which has no arguments.
        """
        self.complete(self.new_context(args, kwargs), [], [], outputs, _PLAIN)

    def begin_body(self) -> Begun:
        """Make the part of a run that comes before a body. :meth:`finish_body` makes the rest.

        Raises:
            FeedError: a hook feeds the step, which has no parameters.
        """
        context = self.new_context(None, {})
        requests: list[Request] = []
        participants = self._before_run(context, requests)
        self._progress.outputs = NO_OUTPUTS  # releases the last outputs before the step needs the memory
        recording = None
        for scheduled, request in requests:
            if request is not scheduled.plain_request:
                recording = self._start_recording(requests)
                break
        begun: Begun = _new_tuple(Begun, (context, requests, participants, recording))
        return begun

    def finish_body(self, begun: Begun, outputs: Any) -> None:
        """Count the step of a run that :meth:`begin_body` began, whose body made ``outputs``, and finish the run."""
        context, requests, participants, recording = begun
        if recording is not None:
            recording.stop()
        self._progress.outputs = outputs
        self._progress.global_step += self._steps_per_run
        self.complete(
            context, requests, participants, outputs, _PLAIN if recording is None else recording.made(outputs)
        )

    def end_epoch(self, participants: list[ScheduledHook]) -> None:
        """Call the hooks in ``participants`` for the end of an epoch, with the outputs of the last run.

        No step is made, and no run is counted. An output that a hook asks for is NaN, with a warning, if this process
        has made no run: it was resumed where an epoch ends.
        """
        schedule = self._schedule
        enclosing = self._ending.run  # the run that begins, if an epoch was left by a break before it
        context = self._ending.run = SessionRunContext(self._services, None, {})
        context.ends_epoch = True
        requests: list[Request] = []
        method = "before_run"
        try:
            for scheduled in participants:
                context.caller = scheduled
                scheduled.catch_up(schedule.runs)
                scheduled.hook.trigger()
                request = scheduled.before_run(context)
                if request is not None:
                    _check_request(requests, scheduled, request)
                    _check_late(scheduled, request, None)
                    self._accumulated.declare(scheduled, request.fetches, schedule.runs)
                    requests.append((scheduled, request))
            evaluator = self._session.evaluator_between_runs([request.fetches for _, request in requests])
            evaluator.before_first_run = math.nan
            values = {
                scheduled: SessionRunValues(evaluator.evaluate(fetches, scheduled), _PLAIN.options, _PLAIN.metadata)
                for scheduled, (fetches, _, _) in requests
                if fetches is not None
            }
            method = "after_run"
            for scheduled in participants:
                context.caller = scheduled
                scheduled.after_run(context, values.get(scheduled, _NOTHING))
        except BaseException as error:
            self._note(error, context.caller, method)
            raise
        self._ending.run = enclosing
        if self._ending.requests:
            self._ending.stop_as_requested()
        schedule.ask(participants)

    def abandon(self) -> None:
        """Forget the run in progress, which does not count."""

    def new_context(self, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any]) -> SessionRunContext:
        """Begin a run in which hooks take part."""
        context = self._ending.run = SessionRunContext(self._services, args, kwargs)
        return context

    def complete(
        self,
        context: SessionRunContext,
        requests: list[Request],
        participants: list[ScheduledHook],
        outputs: Any,
        made: _Made,
    ) -> None:
        """Make the part of a run that comes after its step: evaluate what hooks fetch, and call their ``after_run``."""
        ending, schedule = self._ending, self._schedule
        if schedule.watchers:
            self._call_watchers(context, requests, participants, outputs, made)
        evaluates = requests or schedule.accumulated.sources
        values = self._evaluate(context, requests, outputs, made) if evaluates else _NO_VALUES
        planned = self._after_run(context, participants, values)
        ending.run = None
        if ending.requests:
            ending.stop_as_requested()
        if planned:
            schedule.ask(participants)

    def _start_recording(self, requests: list[Request]) -> Recording:
        recording = Recording(requests)
        for name, feeder in recording.feeders.items():
            raise FeedError(
                f"{feeder} feeds {name!r}, but the body of step() has no parameters: put its lines into a function, "
                "pass that to MonitoredLoop(step, ...), and call loop.run(...)"
            )
        recording.start(self._session.model)
        return recording

    def _before_run(self, context: SessionRunContext, requests: list[Request]) -> list[ScheduledHook]:
        """Call ``before_run`` of the hooks that are due, append what they request, and return them."""
        progress, schedule = self._progress, self._schedule
        number = schedule.runs + 1
        if schedule.is_asked:
            schedule.take_requests()
        if self._items.before_run:
            self._items.begin_run()
        step = progress.global_step
        queue = schedule.before
        if step + 1 < queue.step and number < queue.run and queue.moment is None:
            participants = [*queue.always]
        else:
            participants = queue.due(step + 1, number)
        try:
            for scheduled in participants:
                context.caller = scheduled
                if scheduled.says_when:
                    scheduled.catch_up(number - 1)
                before_run = scheduled.before_run  # CPython calls a local faster than an attribute
                request = before_run(context)
                if request is not None:
                    if request is not scheduled.plain_request:
                        _check_request(requests, scheduled, request)
                        self._accumulated.declare(scheduled, request.fetches, number)
                    requests.append((scheduled, request))
                if progress.global_step != step:  # the hooks after this one are due by the step that it set
                    step = progress.global_step
                    schedule.insert_due(participants, scheduled, queue, step + 1, number)
        except BaseException as error:
            self._note(error, context.caller, "before_run")
            raise
        return participants

    def _make_step(self, requests: list[Request], args: Any, kwargs: Any) -> tuple[Any, _Made]:
        """Call the step and count it, with what the hooks feed, trace and watch."""
        progress = self._progress
        progress.outputs = NO_OUTPUTS  # releases the last outputs before the step needs the memory
        for scheduled, request in requests:
            if request is not scheduled.plain_request:
                return self._make_special_step(requests, args, kwargs)
        # An empty ** would copy a dict.
        outputs = progress.outputs = self._function(*args, **kwargs) if kwargs else self._function(*args)
        progress.global_step += self._steps_per_run
        return outputs, _PLAIN

    def _make_special_step(self, requests: list[Request], args: Any, kwargs: Any) -> tuple[Any, _Made]:
        recording = Recording(requests)
        if recording.feeders:
            self._step.check_feeds(recording.feeders, args, kwargs)
        recording.start(self._session.model)
        try:
            outputs = self._function(*args, **{**kwargs, **recording.fed})
        finally:
            recording.stop()
        self._progress.outputs = outputs
        self._progress.global_step += self._steps_per_run
        return outputs, recording.made(outputs)

    def _call_watchers(
        self,
        context: SessionRunContext,
        requests: list[Request],
        participants: list[ScheduledHook],
        outputs: Any,
        made: _Made,
    ) -> None:
        """Call ``before_run`` of the hooks whose ``Due.when`` is true of ``outputs``; they join ``participants``."""
        schedule = self._schedule
        if made.fed:  # a feed can have the name of an output, and Due.when sees the outputs only: call all of them
            late = [scheduled for scheduled in schedule.watchers if scheduled not in participants]
        else:
            late = schedule.noticed_by(outputs, participants)
        try:
            for scheduled in late:
                context.caller = scheduled
                scheduled.catch_up(schedule.runs)
                request = scheduled.before_run(context)
                if request is not None:
                    if request is not scheduled.plain_request:
                        _check_request(requests, scheduled, request)
                        _check_late(scheduled, request, outputs)
                        self._accumulated.declare(scheduled, request.fetches, schedule.runs + 1)
                    requests.append((scheduled, request))
        except BaseException as error:
            self._note(error, context.caller, "before_run")
            raise
        requests.sort(key=lambda request: request[0].index)
        participants[:] = in_order([*participants, *late])

    def _evaluate(
        self, context: SessionRunContext, requests: list[Request], outputs: Any, made: _Made
    ) -> Mapping[ScheduledHook, SessionRunValues]:
        """Evaluate every distinct fetch once, in the structure in which each hook requested it."""
        fed, watched, options, metadata = made
        evaluator = self._new_evaluator(self._session, outputs, fed, context.inputs, watched, requests)
        if self._accumulated.sources:
            self._accumulated.add(outputs, (), {}, evaluator)
        values: dict[ScheduledHook, SessionRunValues] = {}
        for scheduled, (fetches, _, _) in requests:
            results = None if fetches is None else evaluator.evaluate(fetches, scheduled)
            values[scheduled] = _new_tuple(SessionRunValues, (results, options, metadata))
        return values

    def _after_run(
        self,
        context: SessionRunContext,
        participants: list[ScheduledHook],
        values: Mapping[ScheduledHook, SessionRunValues],
    ) -> bool:
        """Call ``after_run`` of the hooks that take part; return whether one of them has to be asked when it is due."""
        progress, schedule = self._progress, self._schedule
        number = schedule.runs + 1
        step, queue = progress.global_step, schedule.after
        if step >= queue.step or number >= queue.run or queue.moment is not None:
            late = [scheduled for scheduled in queue.due(step, number) if scheduled not in participants]
            participants[:] = in_order([*participants, *late]) if participants else late
        schedule.runs = number
        planned = False
        try:
            for scheduled in participants:
                context.caller = scheduled
                if scheduled.says_when:
                    scheduled.catch_up(number - 1)
                    planned = True
                after_run = scheduled.after_run  # CPython calls a local faster than an attribute
                after_run(context, values.get(scheduled, _NOTHING) if values else _NOTHING)
                scheduled.seen = number
                if progress.global_step != step:  # the hooks after this one are due by the step that it set
                    step = progress.global_step
                    schedule.insert_due(participants, scheduled, queue, step, number)
        except BaseException as error:
            self._note(error, context.caller, "after_run")
            schedule.fail_at(context.caller)
            raise
        return planned

    def _note(self, error: BaseException, scheduled: object, method: str) -> None:
        note_hook(error, scheduled, method, self._progress)


def note_hook(error: BaseException, scheduled: object, method: str, progress: Progress) -> None:
    """Add a note to ``error`` that names the hook, its method and the global step."""
    add_note(error, f"torchhooks: in {method} of {scheduled}, at global step {progress.global_step}")


def _check_request(requests: list[Request], scheduled: ScheduledHook, request: Any) -> None:
    """Raise if what ``scheduled`` returned is not a request, or feeds what an earlier hook feeds."""
    if not isinstance(request, SessionRunArgs):
        raise TypeError(f"before_run of {scheduled} returned {shown(request)}: return SessionRunArgs(fetches) or None")
    fetches, feed_dict, options = request
    if feed_dict:
        if not isinstance(feed_dict, Mapping):
            raise TypeError(
                f"before_run of {scheduled} feeds {shown(feed_dict)}: return a mapping, parameter name to value"
            )
        check_feed_names(feed_dict, scheduled)
        for other, (_, fed, _) in requests:
            for name in feed_dict.keys() & (fed or {}):
                raise FeedError(
                    f"{scheduled} feeds {name!r}, which {other} feeds too: two hooks cannot feed one parameter, remove "
                    "one of them"
                )
    if feed_dict is None and options is None and is_fixed(fetches) and not watched_names(fetches):
        scheduled.plain_request = request  # it cannot change, so the next run need not check it again


def _check_late(scheduled: ScheduledHook, request: SessionRunArgs, outputs: Any) -> None:
    """Raise if ``scheduled``, which is asked after the step, requests something that has to happen during the step."""
    fetches, feed_dict, options = request
    given = named_outputs(outputs)
    watched = [name for name in watched_names(fetches) if name not in given]
    wishes = [f"feeds {name!r}" for name in feed_dict or ()] + [f"fetches {name!r}" for name in watched]
    wishes += ["requests a trace"] if options is not None and options.trace else []
    if wishes:
        raise LifecycleError(
            f"{scheduled} {wishes[0]}, but its Due.when is evaluated after the step: let next_due() return None, or a "
            "step, a moment or a number of runs, so that before_run is called before the step"
        )
