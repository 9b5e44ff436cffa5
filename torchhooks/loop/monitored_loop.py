"""The loop: TensorFlow's monitored session around a PyTorch training step.

    with MonitoredLoop(step, model, optimizer, hooks=[StopAtStepHook(last_step=1000)]) as loop:
        for inputs, targets in loop.until_stop(loader):
            loop.run(inputs, targets)

:mod:`torchhooks.lifecycle.hook` describes the order of calls, what stops a loop and what an exception does.
:mod:`torchhooks.loop.runner` makes the runs in which hooks take part, :mod:`torchhooks.loop.boundaries` says what
happens between two of them, and :mod:`torchhooks.loop.life` how a loop starts and ends.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from types import TracebackType
from typing import Any, Generic, Literal, NoReturn, Self

import torch
from typing_extensions import TypeVar

from torchhooks.common.checks import suggests_keywords, whole_number
from torchhooks.common.errors import AbortedError, LifecycleError
from torchhooks.common.log import logger
from torchhooks.common.stateful import Stateful
from torchhooks.common.text import shortened, shown
from torchhooks.fetches.names import takes_one_argument
from torchhooks.lifecycle.extension import planned
from torchhooks.lifecycle.hook import SessionRunHook, overrides
from torchhooks.lifecycle.recovery import Recovery
from torchhooks.lifecycle.session import Scaffold, Session
from torchhooks.lifecycle.settings import LoopSettings
from torchhooks.loop.advice import Advice, LoopParts
from torchhooks.loop.body import Body
from torchhooks.loop.boundaries import Boundaries
from torchhooks.loop.caught import CaughtErrors
from torchhooks.loop.epoch_end import EpochEnd
from torchhooks.loop.first_runs import FirstRuns
from torchhooks.loop.life import Life
from torchhooks.loop.rank_sync import RankSync
from torchhooks.loop.recoveries import Recoveries
from torchhooks.loop.runner import Runner
from torchhooks.loop.schedule import Schedule, attach_hooks
from torchhooks.loop.sessions import Sessions, new_training_state
from torchhooks.loop.until_stop import DataLoops
from torchhooks.progress.loop_state import IDLE, NO_OUTPUTS, RUNNING, Ending, LeftBySignalError, Phase
from torchhooks.progress.signals import print_no_traceback_of
from torchhooks.ranks.ranks import Ranks

R = TypeVar("R", default=Any)  # the default is for a loop without a step function
T = TypeVar("T")


class MonitoredLoop(Generic[R]):
    """Runs a training step with hooks around it (``tf.train.MonitoredSession``).

    The constructor calls the hooks' ``begin``, creates the session, and calls the hooks' ``after_create_session``.

    >>> with MonitoredLoop(step, model, optimizer, hooks=[StopAtStepHook(last_step=5)]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    >>> loop.global_step, loop.stop_reason
    (5, 'StopAtStepHook: step 5')

    Args:
        step: the user's function. It may take and return anything. Hooks fetch what it returns by :doc:`these names
            </reference/fetches>`; a single tensor is ``"loss"``. Without it, runs are made with :meth:`step`.
        model: the module to save and restore, whose parameters, buffers and submodules hooks can fetch.
        optimizer: the optimizer to save and restore, whose learning rate is ``"lr"``.
        hooks: any iterable of hooks, or ``None``. It is copied; its order is the order of every call.
        scaffold: how a session is initialized, and its saver.
        state: further objects with ``state_dict`` and ``load_state_dict`` to save and restore, by name.
        step_unit: what one global step is: ``"run"``, a run whose step returned, or ``"optimizer_step"``, a completed
            ``optimizer.step()``, so that one run counts zero, one or several.
        checkpoint_dir: the folder whose newest undamaged checkpoint is restored, here and when recovering. A
            :class:`torchhooks.CheckpointSaverHook` writes the checkpoints. If the last process ended with a NaN, the
            loop looks for :doc:`its cause </autopsy>` there. A checkpoint, such as
            ``"run/model.ckpt-600"``, is restored itself. A recovery then restores the newest one saved since.
        recoverable_errors: exceptions, of a run or a background thread, after which the loop restores the newest
            checkpoint and makes the failed run again. Without a checkpoint to restore, they propagate.
        max_recoveries: the limit within an hour. The first recovery is made at once, later ones after growing pauses.
        signals: signals after which the loop stops, such as ``["SIGTERM", "SIGINT"]``; ``None`` for no signals. At the
            end of the item, a CheckpointSaverHook saves once more, and ``until_stop`` leaves the ``with`` block at
            once. When the loop closes, the signals are delivered to their previous handlers, on all ranks.
        stop_grace_period_secs: how long to wait for background threads at the end, in seconds.
        metadata: plain data that every checkpoint contains: a config, the arguments that rebuild the model. It is
            copied. :func:`torchhooks.read_metadata` reads it. A restored loop logs which values differ.
        ranks: the processes that train together. ``None`` means the ranks of ``torch.distributed``, if it is
            initialized; False means this process alone. A :class:`torchhooks.Ranks` sets periods. With several ranks,
            each creates the same loop, all make the same last run, and if one fails, the others raise a PeerError.
        stall_secs: after how many seconds without a completed run or item :doc:`a report </troubleshooting>` says where
            the loop stands still. ``None`` means 30 times the slowest run, at least 300; ``math.inf`` means never. The
            first run, evaluations, saves, hooks and code of the script get five times as long.
        stall_action: ``"report"``, or ``"abort"`` to end the process with exit code 70 after the report, on all ranks.

    Raises:
        TypeError, ValueError: an item of ``hooks`` is not a hook, or another argument is not valid.
        CheckpointError: every checkpoint in ``checkpoint_dir`` is damaged, or the newest one does not match the loop.
        DamagedCheckpointError: ``checkpoint_dir`` is a checkpoint that is missing or damaged.
    """

    _chief_only: Collection[SessionRunHook] = ()  # hooks that no other rank has, even if they are collective

    @suggests_keywords
    def __init__(
        self,
        step: Callable[..., R] | None = None,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        hooks: Iterable[SessionRunHook] | None = (),
        scaffold: Scaffold | None = None,
        state: Mapping[str, Stateful] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        step_unit: str = "run",
        recoverable_errors: Iterable[type[BaseException]] = (AbortedError,),
        max_recoveries: int = 10,
        signals: Iterable[str | signal.Signals] | None = (),
        stop_grace_period_secs: float = 120,
        metadata: Mapping[str, Any] | None = None,
        ranks: Ranks | Literal[False] | None = None,
        stall_secs: float | None = None,
        stall_action: Literal["report", "abort"] = "report",
    ) -> None:
        given = dict(locals())  # first, while there is nothing but self and the arguments
        settings = LoopSettings.checked(given)
        self._make_parts(settings)
        if step is None:  # replaces the method, so that a run does not have to check
            self.run = settings.step.function  # type: ignore[method-assign]
        try:
            self._life.start(self)
        except BaseException as error:
            # The script gets no loop that it could close, so what has begun ends here. First the loop is marked as
            # failed: close() alone would take a StopIteration for a clean end, and call end() of the hooks.
            self._training.loop_state.fail_to_begin(error)
            self._life.close(Ending(error))
            raise
        self._training.loop_state.note_open(True)

    def _make_parts(self, settings: LoopSettings) -> None:
        """Make what the loop consists of. Each part knows those above it."""
        plan, extensions = planned(settings)
        collective = attach_hooks(plan, settings.ranks, self._chief_only)  # first: a hook that saves names the folder
        note_open = _note_open() if any(overrides(hook, "end") for hook in plan.all_hooks) else _note_nothing
        # A lambda, because the boundaries are made below, and need the state that is made here.
        self._training = training = new_training_state(
            settings, plan, extensions, lambda: boundaries.end_epoch(), note_open
        )
        stopping = [each.name for each in settings.signals]
        self._schedule = schedule = Schedule(training, plan, collective, stopping)
        rank_sync = RankSync(training, schedule) if settings.ranks.size > 1 else None
        policy = Recovery(settings.recoverable_errors, settings.max_recoveries, ranks=settings.ranks.size)
        self._sessions = sessions = Sessions(training, settings, plan, extensions, schedule, rank_sync, policy)
        self._caught = caught = CaughtErrors(training)
        advice = Advice(LoopParts(training, plan, settings.hooks, schedule, sessions, caught))
        first_runs = FirstRuns(training, schedule, advice)
        self._recoveries = recoveries = Recoveries(training, schedule, sessions, rank_sync, policy, caught, first_runs)
        epoch_end = EpochEnd(training, schedule, sessions, rank_sync, first_runs)
        self._boundaries = boundaries = Boundaries(training, schedule, rank_sync, recoveries, epoch_end)
        self._runner = runner = Runner(training, schedule, sessions, rank_sync)
        self._data = data = DataLoops(training, schedule, sessions, rank_sync, boundaries, plan.most_items)
        self._body = Body(training, runner, boundaries, recoveries, data)
        self._life = Life(
            training,
            settings,
            plan,
            extensions,
            schedule,
            sessions,
            rank_sync,
            advice,
            recoveries,
            boundaries,
            data,
        )

    # -- public methods -----------------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> R:
        """Make one step with the hooks around it, and return what the step returned, untouched.

        Raises:
            LifecycleError: the loop has stopped or is closed, has no step function, or ``run`` was called inside a run.
            FetchError: a hook requested something that does not exist.
            FeedError: a parameter was fed twice.
        """
        state = self._training.loop_state
        # Both are compared: another thread that decides a stop sets ``stop`` only. The phase follows when this thread
        # looks.
        if state.phase is not IDLE or state.stop is not None:
            self._data.refuse_run("run()")
        state.phase = RUNNING
        try:
            # Fast path: no hook is due. Inlined because it runs on every step.
            if (
                state.global_step < state.idle_step
                and state.runs < state.idle_runs
                and (state.moment is None or time.monotonic() < state.moment)
            ):
                state.outputs = NO_OUTPUTS  # releases the last outputs before the step needs the memory
                # An empty ** would copy a dict.
                outputs: R = state.function(*args, **kwargs) if kwargs else state.function(*args)
                state.outputs = outputs
                state.global_step = step = state.global_step + state.steps_per_run
                if step <= state.idle_step and not (
                    state.checks_after and self._schedule.check_after(outputs, args, kwargs)
                ):
                    state.runs += 1
                else:
                    self._runner.join_after_step(args, kwargs, outputs)
            else:
                outputs = self._runner.run(args, kwargs)
            # Read only now that the run is counted. The thread that talks to the other ranks sets it, then reads the
            # number of runs, and relies on this order: see torchhooks.ranks.peers.
            if not state.pending:
                state.phase = IDLE
                return outputs
            self._boundaries.end_run()
        except BaseException as error:
            if not self._recoveries.recover_or_leave(error):
                raise
        else:
            self._boundaries.after_run()
            return outputs
        # Not in the except clause: the error that is handled there keeps the frames of the failed run, and so what the
        # step has made in them, in memory while the step is made again.
        outputs = self.run(*args, **kwargs)
        self._recoveries.policy.run_went_well()  # also in a function of run_step_fn: this run alone was made again
        return outputs

    def step(self) -> Body:
        """Return the context manager of a run whose step is the body of a ``with`` statement.

        >>> with MonitoredLoop(hooks=[LoggingTensorHook(["loss"], every_n_iter=2)]) as loop:
        ...     for inputs in loop.until_stop(batches[:2]):
        ...         with loop.step() as outputs:
        ...             outputs["loss"] = step(inputs)
        loss = ...

        ``outputs`` is a new dict; hooks can fetch what the body puts into it. The run counts if the body ends without
        an exception, also by ``break``, ``continue`` or ``return``. All else is as in :meth:`run`, but that a hook
        cannot feed the body, and that the body is not made again :doc:`after a recovery </lifecycle>`.

        Raises:
            LifecycleError, FetchError, FeedError: as in :meth:`run`, or the returned object was entered twice.
        """
        self._body.offered = True
        return self._body

    def run_step_fn(self, step_fn: Callable[[StepContext[R]], T]) -> T:
        """Call ``step_fn`` with a :class:`torchhooks.StepContext`, and return what it returned.

        ``step_fn`` decides what to run with hooks and what without. It may make several runs, or none.

        Raises:
            ValueError: ``step_fn`` does not take exactly one argument (``tf.train.MonitoredSession``'s rule).
            LifecycleError: as :meth:`run`.
        """
        if not callable(step_fn) or not takes_one_argument(step_fn):
            raise ValueError(f"step_fn={shown(step_fn)}: must be a function of exactly one argument, the step context")
        state, recoveries = self._training.loop_state, self._recoveries
        # The one run that is allowed after a thread's stop can be a call of this method, however many runs the function
        # makes. A stop that a thread asks for during the call leaves one more run for after it.
        allowed = state.last_run_allowed
        state.check_may_call("run_step_fn()")  # also after a stop the function is called, and only its runs are refused
        while True:
            state.allow_last_run(allowed)  # the function may make more than one run
            try:
                result = recoveries.call_step_fn(step_fn, StepContext(self, recoveries))
            except BaseException as error:
                if not recoveries.recover_or_leave(error, of_function=True):
                    raise
            else:
                self._boundaries.end_step_fn()
                return result
            finally:
                state.allow_last_run(state.last_run_allowed and not allowed)

    def should_stop(self) -> bool:
        """Return whether the loop is to end: a hook, a thread or a signal asked for it, or it is closed."""
        return self._boundaries.should_stop()

    def until_stop(
        self, iterable: Iterable[T], *, resume: bool = True, limit: int | None = None, repeat: bool = False
    ) -> Generator[T, None, None]:
        """Yield the items of ``iterable`` until the loop stops or the data end. Nests: epochs around batches.

        >>> with MonitoredLoop(step, model, optimizer, hooks=[StopAtStepHook(last_step=10)]) as loop:
        ...     for epoch in loop.until_stop(range(3)):
        ...         for inputs in loop.until_stop(batches):  # eight of them
        ...             loss = loop.run(inputs)
        >>> epoch, loop.global_step
        (1, 10)

        An item that was taken is always yielded, even if a stop is requested meanwhile. When the outermost
        ``until_stop`` runs out of items, ``stop_reason`` is ``"data ended"``.

        Checkpoints contain the position in the data. A process that resumes does not yield items that are done, and its
        random numbers continue as they would have. :doc:`This page </loops>` has the rules, and
        :doc:`this table </checkpoints>` what each kind of data does.

        Args:
            iterable: the items.
            resume: whether to continue from the position in the checkpoint. False takes ``iterable`` as it is.
            limit: the greatest number of items to yield, including the items of earlier processes.
            repeat: whether to start over when the data end, until the loop stops. Each pass is an epoch.

        Raises:
            LifecycleError: the loop has failed or is closed.
            ValueError: ``limit`` is not a whole number, 0 or more, or is given with ``repeat``.
        """
        return self._items_of(iterable, resume, limit, repeat)

    def enumerate(
        self,
        iterable: Iterable[T],
        start: int = 0,
        *,
        resume: bool = True,
        limit: int | None = None,
        repeat: bool = False,
    ) -> Generator[tuple[int, T], None, None]:
        """Yield ``(number, item)`` as :func:`enumerate` does, until the loop stops. Otherwise like :meth:`until_stop`.

        With ``repeat``, each pass begins with ``start``: for a number over all passes, use ``loop.global_step``.

        >>> with MonitoredLoop(step, model, optimizer) as loop:
        ...     for i, inputs in loop.enumerate(batches):
        ...         loss = loop.run(inputs)
        ...         if (i + 1) % 4 == 0:
        ...             print("after batch", i)
        after batch 3
        after batch 7

        After a resume the numbers continue, unlike with ``enumerate(loop.until_stop(...))``, where they begin at 0.

        Args:
            iterable: the items.
            start: the number of the first item.
            resume, limit, repeat: as in :meth:`until_stop`.
        """
        return self._items_of(iterable, resume, limit, repeat, whole_number(start, "start", 0))

    def _items_of(
        self,
        iterable: Iterable[Any],
        resume: bool,
        limit: int | None,
        repeat: bool,
        start: int | None = None,
    ) -> Generator[Any, None, None]:
        # This method is no generator, so that a wrong argument is an error of the call, and not of the first item.
        if not hasattr(type(iterable), "__iter__") and not hasattr(type(iterable), "__getitem__"):
            epochs = f"; for {iterable} epochs, until_stop(range({iterable}))" if isinstance(iterable, int) else ""
            raise TypeError(
                f"until_stop({shown(iterable)}): give what the items come from, such as a DataLoader or a list{epochs}"
            )
        if limit is not None:
            whole_number(limit, "limit", 0)
            if repeat:
                raise ValueError(
                    f"limit={limit}, repeat=True: give one of them; to end at step {limit}, also after a restart, use "
                    f"StopAtStepHook(last_step={limit})"
                )
        data = self._data
        if repeat:
            return data.repeated(iterable, resume, start)
        return data.until_stop(iterable, resume, limit, start)

    def request_stop(self, reason: str | None = None) -> None:
        """Stop the loop after the run in progress, or now if there is none. Any thread may call this.

        This cannot be undone. ``stop_reason`` is ``"request_stop: <reason>"``, or ``"request_stop"`` without one.
        """
        self._training.loop_state.request_by_caller("request_stop" if reason is None else f"request_stop: {reason}")

    def paused(self) -> AbstractContextManager[None]:
        """Do not count the time inside this ``with`` block as training time: an evaluation, for example. Nests."""
        return self.session.paused()

    @property
    def session(self) -> Session:
        """The raw session, which evaluates fetches without a step and without hooks. A recovery replaces it."""
        return self._sessions.session

    @property
    def global_step(self) -> int:
        """The number of steps made, also in earlier processes."""
        return self._training.loop_state.global_step

    @property
    def epoch(self) -> int | None:
        """The number of the epoch in progress, or of the last one, from 0 on; ``None`` before the first.

        Epochs are counted over the whole training run. An epoch begins when an innermost ``until_stop`` yields its
        first item. In the code after that loop, this is still the epoch that ended.
        """
        return self.session.epoch

    @property
    def batch(self) -> int | None:
        """The number of the current item of the innermost ``until_stop``, from 0 on; ``None`` outside of one."""
        return self.session.batch

    @property
    def stop_reason(self) -> str | None:
        """What ended the loop, ``"StopAtStepHook: step 1000"`` or ``"data ended"``; ``None`` while it continues."""
        return self._training.loop_state.reason

    def close(self) -> None:
        """End the loop: call every hook's ``end``, then ``teardown``. Closing twice is harmless.

        If the error of the last run is on its way out, as in a ``finally``, the loop has failed: ``end`` is not called,
        as after an error that leaves a ``with`` block.

        Raises:
            Exception: what an ``end``, a ``teardown`` or a background thread raised; several as an ExceptionGroup.
            LifecycleError: ``close`` was called inside a run.
        """
        if self._training.loop_state.phase is RUNNING:
            raise LifecycleError("close() was called inside a run: to end the loop after it, call request_stop()")
        # Without a ``with`` statement, no argument says whether the loop failed: close() in a ``finally`` is called in
        # the same way after an error as at the end of the training run.
        error = self._caught.on_its_way()
        unraised = None if error is not None else self._data.unraised
        cause = unraised if error is None else error
        self._life.close(Ending(cause, self._data.decide_finish(leaves_with_block=False) if cause is None else None))
        if unraised is not None:
            raise unraised

    def __iter__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} has no items: iterate over the data with for batch in loop.until_stop(loader), and call "
            "loop.run(*batch)"
        )

    def __repr__(self) -> str:
        step, reason, hooks = self.global_step, self.stop_reason, self._schedule.all_hooks
        state = {Phase.IDLE: "running", Phase.STOPPING: "stopped"}.get(
            self._training.loop_state.phase, self._training.loop_state.phase.value
        )
        names = shortened([type(slot.hook).__name__ for slot in hooks], 8)
        return (
            f"<{type(self).__name__} at step {step}, {state}{'' if reason is None else f' ({reason})'}, "
            f"{len(hooks)} hook{'' if len(hooks) == 1 else 's'}{': ' if names else ''}{names}>"
        )

    def __enter__(self) -> Self:
        self._data.enter_with_block()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if isinstance(error, LeftBySignalError):
            interrupt = self._close_at_signal()
            if interrupt is not None:  # a line has said where the loop stopped
                print_no_traceback_of(interrupt)
                raise interrupt.with_traceback(None) from None
            return True
        unraised: BaseException | None = self._body.abandon(error)
        if unraised is None and (error is None or type(error) is StopIteration):
            unraised = self._data.unraised
        cause = error if unraised is None else unraised
        if type(error) is StopIteration and self._caught.is_of_step(error):
            _warn_of_stop_iteration(error)
        self._life.close(Ending(cause, self._data.decide_finish(leaves_with_block=True) if cause is None else None))
        if unraised is not None:
            raise unraised
        return kind is StopIteration

    def _close_at_signal(self) -> KeyboardInterrupt | None:
        """Close the loop, whose ``with`` block a signal has left. Return the Ctrl-C, if it was one."""
        try:
            self._life.close(Ending(None, self._data.decide_finish(leaves_with_block=True), left_by_signal=True))
        except KeyboardInterrupt as interrupt:
            if interrupt.__cause__ is not None:  # other errors
                raise
            return interrupt
        return None


def _warn_of_stop_iteration(error: BaseException) -> None:
    """Log where the step raised ``error``, which ends the loop without an error, as in TensorFlow."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    where = "" if tb is None else f" ({os.path.basename(tb.tb_frame.f_code.co_filename)}:{tb.tb_lineno})"
    logger.warning(
        "the step raised StopIteration%s, which ends the loop. If the data ended, iterate over them with "
        "until_stop, which starts over with repeat=True",
        where,
    )


def _note_nothing(is_open: bool) -> None:
    """Do nothing: no hook has an ``end`` that could be missed."""


_open: set[object] = set()  # one mark for each loop that has not ended, which keeps nothing of the loop alive


def _note_open() -> Callable[[bool], object]:
    """Return what to call with whether a loop is open."""
    _look_at_exit()
    mark = object()
    return lambda is_open: _open.add(mark) if is_open else _open.discard(mark)


@cache
def _look_at_exit() -> None:
    """Log a warning at the end of the process about the loops that are still open."""
    process = os.getpid()

    def warn() -> None:
        if _open and os.getpid() == process:  # a forked process has created none of them
            loops = "a loop was" if len(_open) == 1 else f"{len(_open)} loops were"
            logger.warning(
                "%s never closed, so end() of the hooks was not called: the last save and the last reports are "
                "missing. Write with MonitoredLoop(...) as loop, or call loop.close()",
                loops,
            )

    atexit.register(warn)


class StepContext(Generic[R]):
    """The argument of the function passed to ``run_step_fn`` (``tf.train.MonitoredSession.StepContext``).

    >>> def fit_one_batch(step_context):
    ...     if step_context.run_with_hooks(batches[0]) < 0.5:
    ...         step_context.request_stop()
    >>> with MonitoredLoop(step, model, optimizer) as loop:
    ...     while not loop.should_stop():
    ...         loop.run_step_fn(fit_one_batch)
    >>> loop.stop_reason
    'StopIteration: step_fn asked to stop'
    """

    def __init__(self, loop: MonitoredLoop[R], recoveries: Recoveries) -> None:
        self._loop, self._recoveries = loop, recoveries

    @property
    def session(self) -> Session:
        """The raw session, without hooks."""
        return self._loop.session

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> R:
        """Make one run, like :meth:`torchhooks.MonitoredLoop.run`, and return what the step returned.

        After a recovery from an error of this run, the whole function is called again.
        """
        return self._recoveries.run_of_step_fn(self._loop.run, args, kwargs)

    def request_stop(self) -> NoReturn:
        """End the loop cleanly: raise ``StopIteration``, which leaves the function and the ``with`` block."""
        raise StopIteration("step_fn asked to stop")
