"""The loop: TensorFlow's monitored session around a step of the user's own.

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    with MonitoredLoop(step, model, optimizer, hooks=[StopAtStepHook(last_step=1000)]) as loop:
        for inputs, targets in loop.until_stop(loader):
            loop.run(inputs, targets)

The order of calls, what stops a loop and what an exception does is written down in :mod:`torchhooks.hook`; it happens
in :meth:`MonitoredLoop._run_with_hooks`, which reads from top to bottom like that text.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, NamedTuple, NoReturn, Self, TypeVar

import torch

from torchhooks.checkpoint import latest_checkpoint
from torchhooks.coordinator import Coordinator
from torchhooks.costs import HookCosts
from torchhooks.errors import AbortedError, FeedError, LifecycleError, add_note, brief
from torchhooks.fetch import Evaluator, is_fixed, watched_names
from torchhooks.hook import (
    RunMetadata,
    RunOptions,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from torchhooks.log import logger, show_lines
from torchhooks.position import Position
from torchhooks.preemption import SignalWatch
from torchhooks.readback import Readback
from torchhooks.recovery import Recovery
from torchhooks.schedule import Schedule, Seat, in_order
from torchhooks.session import NO_OUTPUTS, DataWait, Scaffold, Session
from torchhooks.stateful import Stateful
from torchhooks.step import (
    Step,
    check_hook_states,
    check_hooks,
    check_model,
    check_optimizer,
    check_state,
    takes_one_argument,
)
from torchhooks.watch import NO_WATCH, ModuleWatch

R = TypeVar("R")
T = TypeVar("T")

_Asked = list[tuple[Seat, SessionRunArgs]]
_Values = Mapping[Seat, SessionRunValues]


class _Made(NamedTuple):
    """What hooks had to do with how a step was made."""

    fed: Mapping[str, Any]
    watched: Mapping[str, Any]
    options: RunOptions
    metadata: RunMetadata


_NO_OPTIONS = RunOptions()
_NO_METADATA = RunMetadata()
_MADE = _Made({}, {}, _NO_OPTIONS, _NO_METADATA)
_NOTHING = SessionRunValues(None, _NO_OPTIONS, _NO_METADATA)
_NO_VALUES: _Values = {}
_SIGNAL_POLL_SECS = 0.1
_new_tuple: Any = tuple.__new__
"""Makes a named tuple in half of the time that its class takes."""
_DATA_ENDED: Any = object()
_NOT_MADE: Any = object()


class MonitoredLoop(Generic[R]):
    """Runs ``step`` with hooks around it (``tf.train.MonitoredSession``).

    Hooks' ``begin``, the session and hooks' ``after_create_session`` happen here, at creation.

    Args:
        step: the user's function. It may take and return anything; :func:`torchhooks.fetch.named_outputs` says under
            which names what it returns can be fetched.
        model: whose parameters, buffers and submodules hooks can ask for.
        optimizer: where ``"lr"`` comes from, and what counts with ``step_unit="optimizer_step"``.
        hooks: any iterable of hooks. It is copied; their order is the order of every call.
        scaffold: how a session is initialised.
        state: further objects of the training that have ``state_dict`` and ``load_state_dict``, by name.
        step_unit: what one global step is: ``"run"``, a call of :meth:`run` whose step returned, or
            ``"optimizer_step"``, a completed ``optimizer.step()``, counted at that moment, so that a run may count none
            or several.
        checkpoint_dir: the folder whose newest whole checkpoint is restored, at creation and when recovering. It is not
            written to: that is a CheckpointSaverHook's part.
        recoverable_errors: exceptions after which, out of a run, the newest checkpoint is restored and the run made
            again. From one that a background thread reported the loop recovers when that run is over, or in
            :meth:`should_stop`. With nothing to restore from they come out as any other.
        max_recoveries: how often that is done within an hour; the first is made at once, the next ones after a growing
            pause.
        signals: signals at which to stop cleanly after the run that is being made, so that a CheckpointSaverHook saves
            once more: ``["SIGTERM", "SIGINT"]``, say. When the loop is closed they go to whom they went before; see
            :mod:`torchhooks.preemption`.
        stop_grace_period_secs: how long to wait for background threads at the end, in seconds.
        hook_costs: whether to log, at the end, what each hook cost: calls, host time, its share of the whole.

    Raises:
        TypeError: something in ``hooks`` is no hook, or another argument is of the wrong kind.
    """

    def __init__(
        self,
        step: Callable[..., R],
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        hooks: Iterable[SessionRunHook] = (),
        scaffold: Scaffold | None = None,
        state: Mapping[str, Stateful] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        step_unit: str = "run",
        recoverable_errors: Iterable[type[BaseException]] = (AbortedError,),
        max_recoveries: int = 10,
        signals: Iterable[str | signal.Signals] = (),
        stop_grace_period_secs: float = 120,
        hook_costs: bool = False,
    ) -> None:
        check_model(model)
        check_optimizer(optimizer, step_unit)
        if scaffold is not None and not isinstance(scaffold, Scaffold):
            raise TypeError(f"scaffold={scaffold!r}: must be a Scaffold")
        self._step = step
        self._about_step = Step(step)
        self._scaffold = Scaffold() if scaffold is None else scaffold
        self._parts = model, optimizer, check_state(state), self._scaffold.saver
        self._checkpoint_dir = None if checkpoint_dir is None else os.fspath(checkpoint_dir)
        self._recovery = Recovery(recoverable_errors, max_recoveries)
        self._per_run = 1 if step_unit == "run" else 0
        self._grace_secs = stop_grace_period_secs

        copied = check_hooks(hooks)
        self._stateful = check_hook_states(copied)
        self._schedule = Schedule(copied)
        self._readback = Readback(self._schedule.wake)
        self._position = Position(self._schedule, self._parts[2] or {})
        self._costs = HookCosts(self._schedule, self._readback) if hook_costs else None
        self._busy = False
        self._stopping = False
        self._stopped_by_thread = False
        self._closed = False
        self._failure: BaseException | None = None
        self._stop_reason: str | None = None
        self._unproven = False  # recovered from a thread's error, and no run made since
        self._begun = 0
        self._iterating = 0
        self._step_counter: Any = None
        self._in_step_fn = False
        self._signals = SignalWatch(signals, self._schedule.wake)
        self._new_session()
        show_lines()
        try:
            self._signals.install()
            self._start()
        except BaseException as error:
            self._failure = error
            self._close(error)
            raise

    # -- what the caller uses ---------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> R:
        """Make one step with the hooks around it, and return what the step returned, untouched.

        Raises:
            LifecycleError: the loop has stopped or is closed, or this is called from inside a run.
            FetchError: a hook asked for something that does not exist.
            FeedError: one parameter was fed twice.
        """
        if self._busy or self._stopping:
            self._refuse()
        session, schedule = self._session, self._schedule
        number = schedule.runs + 1
        self._busy = True
        try:
            if (
                session._global_step + 1 < schedule.step
                and number < schedule.run
                and (schedule.moment is None or time.monotonic() < schedule.moment)
            ):  # Nobody is due. This is all that an idle run costs, so it is written out.
                session._outputs = NO_OUTPUTS
                outputs = session._outputs = self._step(*args, **kwargs)
                session._global_step = step = session._global_step + self._per_run
                if step < schedule.step and not (schedule.looks and schedule.finds_somebody(outputs)):
                    schedule.runs = number
                else:
                    self._run_with_hooks(args, kwargs, outputs)
            else:
                outputs = self._run_with_hooks(args, kwargs)
            if schedule.news:
                self._end_run()
        except BaseException as error:
            if not self._recovered_from(error):
                raise
        else:
            self._busy = False
            if schedule.news:
                self._heed_thread()
            return outputs
        outputs = self.run(*args, **kwargs)
        self._went_well()
        return outputs

    def run_step_fn(self, step_fn: Callable[[StepContext[R]], T]) -> T:
        """Call ``step_fn(step_context)``, which decides itself what to run with hooks and what without.

        Raises:
            ValueError: ``step_fn`` does not take exactly one argument (``tf.train.MonitoredSession``'s rule).
            LifecycleError: as :meth:`run`.
        """
        if not callable(step_fn) or not takes_one_argument(step_fn):
            raise ValueError(f"step_fn={step_fn!r}: must be a function of exactly one argument, the step context")
        inside, by_thread = self._in_step_fn, self._stopped_by_thread
        while True:
            if self._busy or self._stopping:
                self._refuse()
            self._in_step_fn, self._stopped_by_thread = True, by_thread  # the function may make more than one run
            try:
                result = step_fn(StepContext(self))
            except BaseException as error:
                self._in_step_fn = inside
                if self._stopping:
                    self._run_failed(error)
                    raise
                if not self._recovered_from(error):
                    raise
            else:
                self._in_step_fn = inside
                self._went_well()
                self._heed_thread()
                return result
            finally:
                self._stopped_by_thread = self._stopped_by_thread and not by_thread

    def should_stop(self) -> bool:
        """Whether the loop is to end: a hook, a thread or a signal asked for it, something failed, or it is closed.

        Raises:
            Exception: one of ``recoverable_errors`` that a background thread reported, if it is not recovered from.
        """
        if not self._stopping and self._schedule.news:
            self._notice()
            self._heed_thread()
        return self._stopping

    def until_stop(self, iterable: Iterable[T], *, resume: bool = True) -> Generator[T, None, None]:
        """Yield the items of ``iterable`` until the loop is to stop or the data ends. Nests: epochs around batches.

        No item is taken and then dropped: one that was waited for while a signal or a thread asked to stop is still
        yielded, and its run made. When the outermost one ends, ``stop_reason`` is "data ended".

        Checkpoints have the position in the data in them. In a loop that was restored from one, what was done is not
        yielded again, and the random numbers go on as they would have:

        * What has ``state_dict()`` and ``load_state_dict()``, such as torchdata's StatefulDataLoader, goes on by them.
          It need not be in the loop's ``state``.
        * A ``range`` goes on behind the last value; a longer one than before makes what it has more.
        * Anything else, a DataLoader or a list, is iterated anew, with the random numbers of then, and the items that
          were done are dropped. Unless it is a list, a line says how many they were and how long that took.
        * An iterator, such as ``enumerate(loader)`` or a generator, is taken where it stands. A line says so.

        An item is done once a run was made in it. Where one item means several runs it cannot be told how much is left:
        it is yielded again. So is the item of an outer ``until_stop``, and the inner one goes on in it. Phases one
        after the other are told apart by their number: those that were over yield nothing. After a recovery within the
        process the data go on where they are. What is called inside of a run, an evaluation by a hook say, does not
        count.

        What stands behind an inner ``until_stop`` is also reached when that ended because of a stop, and once more when
        the training goes on. ``if loop.should_stop(): break`` between them leaves it to then.

        Args:
            iterable: the items.
            resume: False: take it as it is, whatever a checkpoint says.
        """
        if self.should_stop():
            return  # without iter(), which may draw random numbers
        self._session._depth = self._iterating = depth = self._iterating + 1
        wait = self._session._data_waits.setdefault(depth, DataWait())
        schedule, position = self._schedule, self._position
        place = position.begin(iterable, aside=self._busy)
        try:
            iterator: Iterator[Any] = position.iterator(place, iterable, resume, self.should_stop)
            while not (self._stopping or (schedule.news and self.should_stop())):
                if wait.secs is None:
                    item = next(iterator, _DATA_ENDED)
                else:  # somebody wants to know
                    asked = time.monotonic()
                    item = next(iterator, _DATA_ENDED)
                    wait.secs += time.monotonic() - asked
                if item is _DATA_ENDED:
                    place.ended = True
                    if depth == 1 and not self._stopping:
                        self._stop_reason = "data ended"
                    return
                if self._stop_reason is not None and not self._stopping:
                    self._stop_reason = None  # the data of another loop had ended
                runs = schedule.runs
                if runs - place.runs > 1:
                    place.several = True
                place.runs = runs
                place.taken += 1
                yield item
            place.through = True
        finally:
            self._iterating -= 1
            self._session._depth = self._iterating
            position.leave(place, self._stopping or self._signals.received is not None)

    @property
    def session(self) -> Session:
        """The raw session: evaluates fetches without a step and without hooks."""
        return self._session

    @property
    def global_step(self) -> int:
        """How many steps were made, those of an earlier process included."""
        return self._session.global_step

    @property
    def stop_reason(self) -> str | None:
        """Who ended the loop, and why: ``"StopAtStepHook: step 1000"``, ``"data ended"``. ``None`` while it goes on."""
        return self._stop_reason

    def close(self) -> None:
        """End the loop: every hook's ``end`` unless something failed, then ``teardown``. Again is harmless.

        Raises:
            Exception: what an ``end``, a ``teardown`` or a background thread raised; several as an ExceptionGroup.
            LifecycleError: this is called from inside a run.
        """
        if self._busy:
            raise LifecycleError("close() was called inside of a run: a hook ends the loop with request_stop()")
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        self._close(error)
        return kind is StopIteration

    # -- start ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        for seat in self._schedule.everybody:
            self._begun += 1
            self._call(seat, "begin", seat.hook.begin)
        if not self._per_run:
            optimizer = self._session.optimizer
            assert optimizer is not None
            self._step_counter = optimizer.register_step_post_hook(self._count_optimizer_step)
        try:
            self._create_session()
        except BaseException as error:
            if not self._may_recover(error):
                raise
            self._recover(error)
            self._recovery.run_went_well()

    def _new_session(self) -> None:
        model, optimizer, state, saver = self._parts
        self._session = session = Session(model, optimizer, state, saver)
        session.hooks = self._stateful
        session.checkpoint_dir = self._checkpoint_dir
        session.position = self._position
        session._inputs = self._about_step.parameters
        session._drain, session._wake = self._readback.drain, self._schedule.wake
        session._is_interrupted = lambda: self._signals.received is not None
        self._contexts = SessionRunContext.of(session, self._about_step, self._readback)
        self._coord = Coordinator()

    def _create_session(self) -> None:
        """Restore or initialise the session, and show it to every hook."""
        session, restored = self._session, None
        if self._checkpoint_dir is not None:
            restored = session.saver.restore_latest(session, self._checkpoint_dir)
        if restored is not None:
            logger.info("restored step %d from %s", session.global_step, restored)
        self._scaffold.prepare(session, restored is not None)
        self._coord.on_stop(functools.partial(self._thread_stopped, self._coord))
        for seat in self._schedule.everybody:
            self._call(seat, "after_create_session", seat.hook.after_create_session, session, self._coord)
        self._schedule.start()

    # -- recovery ---------------------------------------------------------------------------------------------

    def _may_recover(self, error: BaseException) -> bool:
        """Whether to recover from ``error``, which has come out of a run or of the making of a session."""
        if self._in_step_fn or self._stopping or not self._recovery.allows(error):
            return False
        if self._signals.received is not None:
            add_note(error, f"torchhooks: not recovered from, because signal {self._signals.received} came")
            return False
        self._session.wait_for_savers()  # the newest checkpoint, or the only one, may not be whole yet
        if self._checkpoint_dir is None or latest_checkpoint(self._checkpoint_dir) is None:
            add_note(error, "torchhooks: not recovered from, because there is no checkpoint to restore")
            return False
        return True

    def _recover(self, error: BaseException) -> None:
        """Close the session, wait if this is not the first time in a row, create another; as often as that takes."""
        while True:
            try:
                self._readback.drain()
                self._leave_session(error)
                self._recovery.pause(error, self._wait)
                if self._signals.received is not None:
                    raise error
                self._create_session()
            except BaseException as another:
                if not self._may_recover(another):
                    raise
                error = another
            else:
                return

    def _wait(self, secs: float) -> None:
        """Wait so many seconds, or until a signal comes."""
        end = time.monotonic() + secs
        while self._signals.received is None and (left := end - time.monotonic()) > 0:
            threading.Event().wait(min(left, _SIGNAL_POLL_SECS))

    def _leave_session(self, error: BaseException) -> None:
        """Put a new session in the place of the one that failed with ``error``, and wait for its threads.

        Raises:
            BaseException: what else a thread has failed with, and is not recovered from.
        """
        old, coord = self._session, self._coord
        self._new_session()
        self._session._data_waits, self._session._depth = old._data_waits, old._depth
        self._session._stops = old._stops  # of earlier runs, which went well
        old._closed, old._outputs = True, NO_OUTPUTS
        try:
            self._join_threads(coord)
        except BaseException as another:
            if another is not error:
                raise
        else:  # otherwise it was a thread that failed, and not a run
            self._position.run_is_made_again()
        for later in coord.later_errors:
            if not self._recovery.covers(later):
                raise later

    def _heed_thread(self) -> None:
        """Recover from what a background thread has failed with, if that is to be recovered from: between two runs."""
        if self._stopping or self._busy or self._in_step_fn or not self._coord.should_stop():
            return
        try:
            self._coord.raise_requested_exception()
        except BaseException as error:
            if not self._recovery.covers(error):
                return  # the loop is about to be stopped for it
            if not self._recovered_from(error):
                self._coord.clear_stop()  # it is not to come out of the join too
                raise
            self._unproven = True
            self._schedule.wake()

    def _went_well(self) -> None:
        """What was tried again, or may have been, has been done."""
        self._recovery.run_went_well()
        self._notice()

    def _count_optimizer_step(self, *_: Any) -> None:
        self._session._global_step += 1

    # -- one run in which somebody takes part -----------------------------------------------------------------

    def _run_with_hooks(self, args: Any, kwargs: Any, outputs: Any = _NOT_MADE) -> R:
        """A run in which somebody takes part; or the rest of one, if that was seen only behind the step."""
        session, schedule = self._session, self._schedule
        number = schedule.runs + 1
        new_context = self._contexts
        context = new_context()
        context._args, context._kwargs = args, kwargs
        session._live = context
        asked: _Asked = []
        seats: list[Seat] = []
        made = _MADE
        if outputs is _NOT_MADE:
            before = schedule.before
            plain = True
            step = session._global_step
            seats = before.always
            if step >= before.step - 1 or number >= before.run or before.moment is not None:
                seats = before.due(step + 1, number)
            pending = seats
            try:
                while pending:
                    for seat in pending:
                        context.caller = seat
                        if seat.schedules:
                            seat.catch_up(number - 1)
                        before_run = seat.before_run  # Python calls a name faster than what it finds in a slot
                        request = before_run(context)
                        if request is not None:
                            if request is not seat.plain:
                                _check_request(asked, seat, request)
                                plain = plain and request is seat.plain
                            asked.append((seat, request))
                        if session._global_step != step:  # this hook set it, and those behind it go by what they find
                            step = session._global_step
                            pending = schedule.behind(seat, pending, before, step + 1, number)
                            seats = in_order(seats, [late for late in pending if late not in seats])
                            break
                    else:
                        break
            except BaseException as error:
                self._note(error, context.caller, "before_run")
                raise
            session._outputs = NO_OUTPUTS
            if plain:
                outputs = session._outputs = self._step(*args, **kwargs)
                session._global_step += self._per_run
            else:
                outputs, made = self._make_with_wishes(asked, args, kwargs)

        if schedule.watchers:
            seats = self._ask_watchers(seats, asked, context, outputs, made)
        values = self._evaluate(asked, context, outputs, made) if asked else _NO_VALUES

        after = schedule.after
        step = session._global_step
        if step >= after.step or number >= after.run or after.moment is not None:
            seats = in_order(seats, [late for late in after.due(step, number) if late not in seats])
        schedule.runs = number
        told = pending = seats
        changed = False
        try:
            while pending:
                for seat in pending:
                    context.caller = seat
                    if seat.schedules:
                        seat.catch_up(number - 1)
                        changed = True
                    after_run = seat.after_run
                    after_run(context, values.get(seat, _NOTHING) if values else _NOTHING)
                    seat.seen = number
                    if session._global_step != step:
                        step = session._global_step
                        pending = schedule.behind(seat, pending, after, step, number)
                        told = [*told, *pending]
                        break
                else:
                    break
        except BaseException as error:
            self._note(error, context.caller, "after_run")
            schedule.fail_at(context.caller)
            raise
        session._live = None
        if session._stops:
            self._stop(_who_and_why(session._stops[0]))
        if changed:
            schedule.ask(told)
        return outputs  # type: ignore[no-any-return]

    def _make_with_wishes(self, asked: _Asked, args: Any, kwargs: Any) -> tuple[R, _Made]:
        """The step, counted, with what hooks feed, watched for what they want to see of submodules."""
        session = self._session
        fed: dict[str, Any] = {}
        names: list[tuple[str, object]] = []
        trace = False
        for seat, (fetches, feed_dict, options) in asked:
            fed.update(feed_dict or {})
            names += [(name, seat) for name in watched_names(fetches)]
            trace = trace or (options is not None and options.trace)
        if fed:
            self._about_step.check_feeds(asked, args, kwargs)
            kwargs = {**kwargs, **fed}
        watch, metadata = NO_WATCH, _NO_METADATA
        if names or trace:
            watch = ModuleWatch(session.model, names)
            outputs, metadata = self._about_step.make(args, kwargs, watch, trace)
        else:
            outputs = self._step(*args, **kwargs)
        session._outputs = outputs
        session._global_step += self._per_run
        if names:
            watch.check()
        return outputs, _Made(fed, watch.values, RunOptions(trace) if trace else _NO_OPTIONS, metadata)

    def _ask_watchers(
        self, seats: list[Seat], asked: _Asked, context: SessionRunContext, outputs: Any, made: _Made
    ) -> list[Seat]:
        """``seats``, and those who have noticed something in ``outputs``: their ``before_run`` is called now."""
        schedule = self._schedule
        if made.fed:  # and what is fed may have the name of an output, which is all that they look at
            late = [seat for seat in schedule.watchers if seat not in seats]
        else:
            late = schedule.noticed_by(outputs, seats)
        try:
            for seat in late:
                context.caller = seat
                seat.catch_up(schedule.runs)
                request = seat.before_run(context)
                if request is not None:
                    if request is not seat.plain:
                        _check_request(asked, seat, request)
                        _check_late(seat, request)
                    asked.append((seat, request))
        except BaseException as error:
            self._note(error, context.caller, "before_run")
            raise
        asked.sort(key=lambda pair: pair[0].index)
        return in_order(seats, late)

    def _evaluate(self, asked: _Asked, context: SessionRunContext, outputs: Any, made: _Made) -> _Values:
        evaluate: Callable[[Any, Any], Any]
        evaluate = Evaluator(self._session, outputs, made.fed, context._inputs, made.watched).evaluate
        if self._costs is not None:
            evaluate = self._costs.timed_evaluation(evaluate)
        _, _, options, metadata = made
        values: dict[Seat, SessionRunValues] = {}
        for seat, (fetches, _, _) in asked:
            results = None if fetches is None else evaluate(fetches, seat)
            values[seat] = _new_tuple(SessionRunValues, (results, options, metadata))
        return values

    def _end_run(self) -> None:
        """Make the late calls that can be made, and notice whoever asks for a stop."""
        self._schedule.news = False  # first, since there may be news at any time
        readback = self._readback
        if readback.waiting:
            self._schedule.news = True
            readback.end_run()
        if self._unproven:
            self._unproven = False
            self._recovery.run_went_well()
        self._notice()
        if self._coord.should_stop():
            self._schedule.news = True

    def _notice(self) -> None:
        """Stop if a signal came, or if a stop was asked for after its run was over."""
        for context in self._session._stops:
            if context.finished:
                self._stop(_who_and_why(context))
        if self._signals.received is not None:
            self._stop(f"signal {self._signals.received}")

    # -- stop and end -----------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        """Raise what stands in the way of another run."""
        if self._busy:
            raise LifecycleError(
                "run() was called inside of a run: a step or a hook cannot start another; session.run(fetches) "
                "evaluates without a step"
            )
        if self._closed:
            raise LifecycleError("run() was called on a closed loop: make a new one")
        if self._failure is not None:
            raise LifecycleError(
                f"run() was called after a run that failed with {brief(self._failure)}: the loop has ended, make a "
                "new one"
            ) from self._failure
        try:
            self._coord.raise_requested_exception()
        except BaseException as error:
            self._failure = error
            raise
        if self._stopped_by_thread:
            self._stopped_by_thread = self._in_step_fn
            return  # the caller may have looked at should_stop() just before, so this run is one that is still made
        raise LifecycleError(
            f"run() was called after a stop ({self._stop_reason}): check should_stop() first, or iterate with "
            "until_stop()"
        )

    def _stop(self, reason: str, by_thread: bool = False) -> None:
        self._stopped_by_thread = by_thread and (self._stopped_by_thread or not self._stopping)
        if not self._stopping:
            self._stop_reason = reason
            self._stopping = True

    def _thread_stopped(self, coord: Coordinator) -> None:
        if self._closed or coord is not self._coord:
            return
        try:
            coord.raise_requested_exception()
        except BaseException as error:
            if self._recovery.covers(error) and self._checkpoint_dir is not None:
                self._schedule.wake()  # for should_stop(), or the end of the run
                return
        self._stop(f"thread {threading.current_thread().name}", by_thread=True)

    def _recovered_from(self, error: BaseException) -> bool:
        """The run was left by ``error``: recover, or else the loop is over. Whether the run is to be made again."""
        failed, self._session._live = self._session._live, None
        if failed is not None:
            failed._void = True  # and so is a stop that was asked for in it
            if failed in self._session._stops:
                self._session._stops.remove(failed)
        try:
            if self._may_recover(error):
                self._recover(error)
                self._busy = False
                return True
        except BaseException as another:
            self._run_failed(another)
            raise
        if not self._in_step_fn or not self._recovery.covers(error):
            self._run_failed(error)
        self._busy = False
        return False

    def _run_failed(self, error: BaseException) -> None:
        """The loop is over, cleanly if the error is StopIteration."""
        self._busy = False
        if type(error) is not StopIteration:
            self._failure = error
        self._stop(brief(error))

    def _close(self, error: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        if type(error) is StopIteration:
            self._stop(brief(error))
            error = None
        elif error is not None:
            self._failure = self._failure or error
            self._stop(brief(error))
        self._stop(self._stop_reason or "closed")
        traceback = None if error is None else error.__traceback__
        errors = self._ending_errors()
        self._session._closed = True
        self._session._outputs, self._session._live = NO_OUTPUTS, None
        if error is not None:
            error.with_traceback(traceback)  # a thread's error has been raised once more by the join
            for other in errors:
                if other is not error:
                    add_note(error, f"torchhooks: and while the loop was closed after this: {brief(other)}")
                    logger.error("while the loop was closed after an error", exc_info=other)
        elif len(errors) == 1:
            raise errors[0]
        elif errors:
            raise BaseExceptionGroup("several errors while the loop was closed", errors)

    def _ending_errors(self) -> list[BaseException]:
        """Take the loop down: everybody is visited, whatever the others raise. What they raised is returned."""
        errors: list[BaseException] = []
        seats = self._schedule.everybody

        def attempt(function: Callable[..., Any], *args: Any) -> None:
            try:
                function(*args)
            except BaseException as error:
                errors.append(error)

        attempt(self._readback.drain)
        if self._failure is None and not errors:
            for seat in seats:
                attempt(self._call, seat, "sat_out", seat.catch_up, self._schedule.runs)
                attempt(self._call, seat, "end", seat.end, self._session)
        attempt(self._readback.close)
        if self._costs is not None:
            attempt(self._costs.report)
        for saver in self._session.savers:
            if hasattr(saver, "close"):
                attempt(saver.close)
        attempt(self._join_threads, self._coord)
        for seat in seats[: self._begun]:
            attempt(self._call, seat, "teardown", seat.hook.teardown)
        if self._step_counter is not None:
            self._step_counter.remove()
        if self._signals.received is not None:
            for error in errors:  # to deliver the signal may be the end of the process
                logger.error("while the loop was closed", exc_info=error)
        attempt(self._signals.restore)
        return errors

    def _join_threads(self, coord: Coordinator) -> None:
        coord.request_stop()
        coord.join(stop_grace_period_secs=self._grace_secs, ignore_live_threads=True)

    def _call(self, seat: Seat, name: str, method: Callable[..., object], *args: Any) -> None:
        try:
            method(*args)
        except BaseException as error:
            self._note(error, seat, name)
            raise

    def _note(self, error: BaseException, seat: object, method: str) -> None:
        add_note(error, f"torchhooks: in {method} of {seat}, at global step {self._session._global_step}")


class StepContext(Generic[R]):
    """What ``run_step_fn`` gives to its function (``tf.train.MonitoredSession.StepContext``)."""

    def __init__(self, loop: MonitoredLoop[R]) -> None:
        self._loop = loop

    @property
    def session(self) -> Session:
        """The raw session, without hooks."""
        return self._loop.session

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> R:
        """One run, as ``loop.run``."""
        return self._loop.run(*args, **kwargs)

    def request_stop(self) -> NoReturn:
        """End the loop cleanly, by leaving the function at this point."""
        raise StopIteration("step_fn asked to stop")


def _check_request(asked: _Asked, seat: Seat, request: Any) -> None:
    """Raise if what ``seat`` asks for is no request, or feeds what is fed already."""
    if not isinstance(request, SessionRunArgs):
        raise TypeError(f"before_run of {seat} returned {request!r}: return SessionRunArgs(fetches) or None")
    fetches, feed_dict, options = request
    if feed_dict:
        if not isinstance(feed_dict, Mapping):
            raise TypeError(f"before_run of {seat} feeds {feed_dict!r}: give a mapping, parameter name to value")
        for other, (_, fed, _) in asked:
            for name in feed_dict.keys() & (fed or {}):
                raise FeedError(
                    f"{seat} feeds {name!r}, which {other} feeds too: two hooks cannot feed one parameter, take one "
                    "of them out"
                )
    if feed_dict is None and options is None and is_fixed(fetches) and not watched_names(fetches):
        seat.plain = request  # and stays so, since none of it can change


def _check_late(seat: Seat, request: SessionRunArgs) -> None:
    """Raise if ``seat``, which is asked only now that the step has been made, wants to have a part in that."""
    fetches, feed_dict, options = request
    wishes = [f"feeds {name!r}" for name in feed_dict or ()] + [f"wants {name!r}" for name in watched_names(fetches)]
    wishes += ["wants a trace"] if options is not None and options.trace else []
    if wishes:
        raise LifecycleError(
            f"{seat} {wishes[0]}, but what its Due.when noticed is known only behind the step: let next_due() return "
            "None, or a step, a moment or a number of runs, so that before_run is called in front of it"
        )


def _who_and_why(context: SessionRunContext) -> str:
    who = context.stopped_by
    name = type(who.hook).__name__ if isinstance(who, Seat) else "request_stop"
    return f"{name}: {context.stop_reason or f'step {context.session.global_step}'}"
