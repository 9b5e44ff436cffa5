"""The contract: what a hook is, when it is called, and what it receives.

A hook watches a training loop. Subclass :class:`SessionRunHook`, override the methods you need, and pass an instance to
:class:`torchhooks.MonitoredLoop`. This hook requests the loss, and stops the loop once it is small enough::

    class StopWhenGood(SessionRunHook):
        def __init__(self, target):
            self.target = target

        def before_run(self, run_context):
            return SessionRunArgs("loss")

        def after_run(self, run_context, run_values):
            if run_values.results < self.target:
                run_context.request_stop(f"loss {run_values.results:.3f}")

Order of calls (``tf.train.MonitoredSession``'s)
------------------------------------------------
::

    for hook in hooks: hook.begin()
    session = Session(...)                               # initialized, or restored
    for hook in hooks: hook.after_create_session(session, coord)
    while the body of the `with` calls loop.run(...):
        for hook in hooks: requests += hook.before_run(context)
        outputs = step(...)                              # the user's function, or the body of `with loop.step()`
        values = evaluate(requests)                      # each distinct fetch once
        for hook in hooks: hook.after_run(context, values for this hook)
        stop, if a hook requested it in this run
    for hook in hooks: hook.end(session)                 # only if nothing failed
    for hook in hooks: hook.teardown()                   # always

Every method is called in the order of the list of hooks, ``after_run`` and ``end`` too. The loop calls ``begin`` once
in its life. It calls ``after_create_session`` for every session, so again after a recovery.

Stop
----
``context.request_stop()`` does not cut the run short: the step and every ``after_run`` are still called. After that,
``loop.should_stop()`` is true for good, and another ``run()`` is an error.

Exceptions
----------
Only what leaves the ``with`` block of the loop ends it. After an error that the script catches, the loop goes on. The
interrupted run gets no further ``after_run`` either way.

* Exactly ``StopIteration``, not a subclass, from a hook, the step, a closure or the body of the ``with`` block: the
  loop ends cleanly. Every ``end`` is called. The ``with`` block raises nothing. The same holds for
  ``after_create_session`` in a recovery.
* A ``StopIteration`` from the constructor of the loop, where hooks get ``begin`` and the first
  ``after_create_session``, or from ``end`` or ``teardown`` is an error like any other.
* Any other exception, ``KeyboardInterrupt`` included: no ``end``. It propagates with its type and traceback, and with a
  note that names the hook, the method and the step, or else the run, the epoch and the item.
* Of the errors of ``end``, one propagates as it is, several as an ``ExceptionGroup``.
* ``teardown`` is always called, so that a hook can close what it opened in ``begin``.

Skipped runs
------------
A hook that has work only now and then can say when: see :meth:`SessionRunHook.next_due`. Until then the loop skips its
run methods. A run in which no hook is due costs next to nothing. :class:`PeriodicHook` does this for a period.

Several ranks
-------------
Under ``torchrun``, each rank calls the hooks of its own list. The hook's ``next_due()`` decides in which runs:

* A hook without ``next_due`` is called in every run, and a hook that says ``Due.step`` or ``Due.runs`` in the same runs
  on every rank. It may call collectives, such as ``session.ranks.gather`` or an ``all_reduce``, and fetch
  :func:`torchhooks.over_ranks` or a ``DTensor``, if every rank has the hook and makes the calls in the same order.
* A hook that says ``Due.moment`` is called when the clock of its rank says so, and a hook that says ``Due.when``
  depends on what the step of its rank returned. It must not call collectives. With :attr:`SessionRunHook.collective`,
  the chief's clock decides for all ranks.
* ``begin``, ``after_create_session`` and ``end`` are called on every rank, in the order of the list. ``teardown`` and
  ``when_ready`` callbacks must not call collectives, because another rank may have failed, or be in another run.

A hook writes files and logs on the chief only: ``if session.ranks.is_chief``. Of the other ranks, only warnings and
errors are logged, with the rank. Any rank may request a stop: all make the same last run.

Unlike TensorFlow, an ``end`` that raises does not prevent the other hooks' ``end``, and there is ``teardown``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from torchhooks.common.checks import suggests_keywords
from torchhooks.common.errors import LifecycleError
from torchhooks.common.text import bound_arguments, bound_repr
from torchhooks.common.timers import Due, GivenTimer, Timer, given_timer, hook_timer
from torchhooks.fetches.evaluation import UNKNOWN, Caller
from torchhooks.fetches.names import Fetch, Value
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.session import Session
from torchhooks.lifecycle.trigger import Trigger
from torchhooks.progress.loop_state import RunInProgress
from torchhooks.ranks.ranks import Ranks

NO_KWARGS: Mapping[str, object] = MappingProxyType({})


class RunOptions(NamedTuple):
    """How to execute one run, from a hook to the loop (``tf.RunOptions``). The options of several hooks are merged.

    >>> class Profile(SessionRunHook):
    ...     def before_run(self, run_context):
    ...         return SessionRunArgs(options=RunOptions(trace=True))
    ...
    ...     def after_run(self, run_context, run_values):
    ...         operations = {event.key for event in run_values.run_metadata.profile.key_averages()}
    ...         print("aten::linear" in operations)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[Profile()]) as loop:
    ...     loss = loop.run(batches[0])
    True

    An option that one hook turns on is on for the run. A run of ``loop.step()`` can be traced too.

    Args:
        trace: profile the step of this run; :class:`torchhooks.RunMetadata` has the profile.
        memory: record in the profile what memory tensors use.
    """

    trace: bool = False
    memory: bool = False


class RunMetadata(NamedTuple):
    """What was recorded about a run in addition to its values, from the loop to the hooks (``tf.RunMetadata``).

    >>> class Show(SessionRunHook):
    ...     def after_run(self, run_context, run_values):
    ...         print(run_values.run_metadata)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[Show()]) as loop:
    ...     loss = loop.run(batches[0])
    RunMetadata(profile=None)

    :class:`torchhooks.RunOptions` has an example with a profile.

    Args:
        profile: the finished ``torch.profiler.profile`` of the step if a hook requested a trace, otherwise ``None``.
    """

    profile: Any = None


class SessionRunArgs(NamedTuple):
    """What a hook requests of a run; returned by ``before_run`` (``tf.train.SessionRunArgs``).

    >>> class Report(SessionRunHook):
    ...     def before_run(self, run_context):
    ...         return SessionRunArgs({"loss": "loss", "lr": "lr", "examples": lambda inputs: len(inputs)})
    ...
    ...     def after_run(self, run_context, run_values):
    ...         print(run_values.results)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[Report()]) as loop:
    ...     loss = loop.run(batches[0])
    {'loss': tensor(...), 'lr': 0.1, 'examples': 16}

    Args:
        fetches: what to evaluate after the step: a name, a closure, a tensor, an object with ``compute()``, or these in
            lists, tuples, dicts and dataclasses. ``None`` for nothing. A fetch that has no value in this run is a
            :class:`torchhooks.FetchError`.
        feed_dict: keyword arguments for the step, by parameter name. They must not be passed by another hook or by the
            caller of ``run`` too: that is a :class:`torchhooks.FeedError`.
        options: how to execute the run.
    """

    fetches: Fetch = None
    feed_dict: Mapping[str, Value] | None = None
    options: RunOptions | None = None


class SessionRunValues(NamedTuple):
    """What a hook requested, with values; passed to its ``after_run`` (``tf.train.SessionRunValues``).

    >>> class Report(SessionRunHook):
    ...     def before_run(self, run_context):
    ...         return SessionRunArgs(["global_step", "weight"])
    ...
    ...     def after_run(self, run_context, run_values):
    ...         global_step, weight = run_values.results
    ...         print(global_step, weight.shape, weight.requires_grad)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[Report()]) as loop:
    ...     loss = loop.run(batches[0])
    1 torch.Size([1, 4]) False

    Args:
        results: the values, in the structure of the hook's ``fetches``; ``None`` if it requested none. Tensors are
            detached copies on their device, with the values at the end of this run.
        options: the merged options of this run.
        run_metadata: what was recorded about this run.
    """

    results: Value
    options: RunOptions
    run_metadata: RunMetadata


class SessionRunContext(RunInProgress):
    """One run, as its hooks see it: the same object in every ``before_run`` and ``after_run`` of the run.

    The loop creates it (``tf.train.SessionRunContext``).

    >>> class StopWhenGood(SessionRunHook):
    ...     def before_run(self, run_context):
    ...         return SessionRunArgs("loss")
    ...
    ...     def after_run(self, run_context, run_values):
    ...         def stop_if_good(loss):  # called at once on a CPU, and a few runs later on a GPU
    ...             if loss < 0.5:
    ...                 run_context.request_stop(f"loss {loss:.2f}")
    ...
    ...         run_context.when_ready(run_values.results, stop_if_good)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[StopWhenGood()]) as loop:
    ...     while not loop.should_stop():
    ...         loss = loop.run(batches[0])
    >>> loop.stop_reason
    'StopWhenGood: loss 0...'
    """

    session: Session
    """The raw session, which evaluates fetches without calling hooks."""
    # Class attributes are defaults: a context is created in every run with hooks, and each assignment costs time.
    stop_requested: bool = False
    """Whether a hook has requested a stop in this run."""
    stop_reason: str | None = None
    """The reason given by the first hook that requested a stop."""
    _stopped_by: Caller = UNKNOWN  # the hook whose method was running when the stop was requested
    caller: Caller = UNKNOWN
    """The hook whose method is running. The loop sets this before each call."""
    step_before: int = -1
    """The global step when the run began; -1 at the end of an epoch, and if hooks join the run after its step."""
    ends_epoch: bool = False
    """Whether the hooks are called for the end of an epoch. No step is made then, and no run is counted."""

    def __init__(self, session: Session, args: tuple[object, ...] | None, kwargs: Mapping[str, object]) -> None:
        self.session = session
        self._args = args  # None in a run of loop.step(), which has none
        self._kwargs = kwargs

    @classmethod
    def at_end_of_epoch(cls, session: Session) -> Self:
        """Return a context for the calls at the end of an epoch, in which no step is made."""
        context = cls(session, None, NO_KWARGS)
        context.ends_epoch = True
        return context

    @property
    def original_args(self) -> SessionRunArgs:
        """``SessionRunArgs(step, inputs)``, with the step function and what the caller of ``run`` passed, by name.

        ``SessionRunArgs(None, {})`` in a run of ``loop.step()``, and at the end of an epoch.

        Raises:
            LifecycleError: the run is over. A ``when_ready`` callback may be called that late.

        Unlike TensorFlow, only the run itself has them: a hook that keeps the context would keep a batch in the memory
        of the device.
        """
        inputs = self.inputs()  # first, because it raises an error after the run
        return SessionRunArgs(None if self._args is None else self.session.step_function.function, inputs)

    def inputs(self) -> dict[str, Value]:
        """Return what the caller of ``run`` passed, by parameter name, with the step's defaults.

        It is empty in a run of ``loop.step()``, and at the end of an epoch. What hooks feed is not part of it.

        Raises:
            LifecycleError: the run is over.
        """
        if self.finished:
            raise LifecycleError(
                "the arguments of a run were asked for after it: the context lets go of them when the run is over. "
                "Read run_context.original_args in before_run or after_run, and keep what you need of it"
            )
        return {} if self._args is None else self.session.step_function.inputs(self._args, self._kwargs)

    @property
    def call_arguments(self) -> tuple[tuple[object, ...], Mapping[str, object]]:
        """What the caller of ``run`` passed, by position and by name; both are empty in a run of ``loop.step()``."""
        return self._args or (), self._kwargs

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self.session.loop_state.context is not self

    def end(self) -> None:
        """Let go of what the caller passed. The loop calls this when the run is over, also after an error."""
        # What waits for a value of this run, or for the end of its item, may keep the context for many runs.
        self._args, self._kwargs = None, NO_KWARGS

    @property
    def _current_caller(self) -> Caller:
        """The hook whose method is running, or whose ``when_ready`` callback is, of which the context knows nothing."""
        delivering = self.session.readback.caller
        return delivering if isinstance(delivering, Caller) else self.caller

    @property
    def why_stopped(self) -> str:
        """The hook that requested the stop and its reason, such as ``"StopAtStepHook: step 1000"``."""
        name = "request_stop" if self._stopped_by.hook is None else type(self._stopped_by.hook).__name__
        return f"{name}: {self.stop_reason or f'step {self.session.global_step}'}"

    def request_stop(self, reason: str | None = None) -> None:
        """Stop the loop after this run. This cannot be undone. ``loop.stop_reason`` contains ``reason``.

        The run is completed: the step is made, if this is ``before_run``, and every hook's ``after_run`` is called. A
        ``when_ready`` callback may run during a later run; then the loop stops after that one.

        Args:
            reason: why, in a few words. By default, the global step. The first reason of a run counts.
        """
        if not self.stop_requested:
            self.stop_requested, self.stop_reason, self._stopped_by = True, reason, self._current_caller
            self.session.loop_state.request(self)

    def after_item(self, callback: Callable[[], object], last: bool = False) -> None:
        """Call ``callback()`` when the body of the ``for`` loop is done with the current item of ``until_stop``.

        That is when the next item is requested, when the data end, or when the loop closes. At the last item of an
        inner loop it is when the item of the outer loop is done, if the loop can know that the data end there. Outside
        of ``until_stop``, the callback is called at once. A callback that the same hook requested earlier is replaced.
        An exception from ``callback`` comes out of the ``for`` statement, and the loop does not recover from it. If the
        body left the item by ``break`` and no other loop is open, it is one of the next run.

        With ``last``, the callback is called after the callbacks of the other hooks, wherever those are in the list. A
        checkpoint from which a process resumes is saved in such a callback, so that no other callback is missed.
        """
        caller = self._current_caller

        def call() -> object:
            self.caller = caller
            return callback()

        self.session.agenda.after_item(callback if caller.hook is None else caller.hook, call, last)

    @property
    def waits_for_item(self) -> bool:
        """Whether a callback that this hook gave to :meth:`after_item` waits since an earlier run of the same item."""
        return self.session.agenda.waits(self._current_caller.hook)

    def when_ready(
        self, values: Value, callback: Callable[[Value], object], *, max_lag_runs: int | None = None
    ) -> None:
        """Call ``callback(host_values)`` once ``values`` are on the host, without blocking the host or the device.

        ``host_values`` has the structure of ``values``, with CPU tensors in place of device tensors. If everything is
        on the CPU already, the callback is called at once. Otherwise it is called after the copy has arrived, in the
        order of the requests, and at the latest before ``end``, before a checkpoint is written, and when the loop
        closes, even after an error. A Saver with ``async_save`` does not wait for it, unless a hook has a state, which
        the callback may change. An exception from ``callback`` propagates from the run in which it is called.

        Args:
            values: what arrived in ``run_values.results``, or any other structure of tensors.
            callback: the function to call.
            max_lag_runs: make the call at most this many runs later, and wait for the device if necessary. 0 means at
                the end of this run.
        """
        session = self.session
        session.readback.request(values, callback, self.caller, session.loop_state.global_step, max_lag_runs)


class SessionRunHook:
    """Base class of all hooks (``tf.train.SessionRunHook``). Override what you need: every method is a no-op here.

    >>> class StopWhenGood(SessionRunHook):
    ...     def before_run(self, run_context):
    ...         return SessionRunArgs("loss")
    ...
    ...     def after_run(self, run_context, run_values):
    ...         if run_values.results < 0.5:  # on a GPU, this waits for the value; when_ready does not
    ...             run_context.request_stop(f"loss {run_values.results:.2f}")
    >>> with MonitoredLoop(step, model, optimizer, hooks=[StopWhenGood()]) as loop:
    ...     while not loop.should_stop():
    ...         loss = loop.run(batches[0])
    >>> loop.stop_reason
    'StopWhenGood: loss 0...'

    The loop calls ``begin`` and ``after_create_session`` when it starts, ``before_run`` and ``after_run`` around the
    step of each run, and ``end`` and ``teardown`` when it ends, in the order of the list of hooks. If an exception
    leaves the ``with`` block, ``end`` is not called. A ``StopIteration`` ends the loop as a stop does.

    One instance can serve several loops, one after the other: ``begin`` resets its counters.
    """

    collective: bool = False
    """Whether all ranks have to call this hook in the same run, even if it is due by the clock.

    The chief's clock then decides about ``Due.moment``. Before that run, :meth:`force_due` is called on every rank.
    Every rank needs the hook, which is checked when the loop is created. No effect in a single process.
    """
    needs_step: bool = False
    """Whether values are evaluated only in runs that count a step. In other runs, ``results`` is ``None``.

    With ``step_unit="optimizer_step"``, a run may count none. A hook whose work belongs to a step then asks again in
    the next run, and nothing is evaluated in vain.
    """
    name: str = ""
    """The name of the hook's state in checkpoints; if it is empty, the name of its class."""
    state_is_optional: bool = False
    """Whether a checkpoint can be restored that has no state of this hook, or has one without the hook."""
    saves_checkpoints: bool = False
    """Whether the hook saves checkpoints, so that hooks with a state have to precede it in the list."""
    checkpoint_dir: str | None = None
    """The folder of the checkpoints that the hook saves for the loop to resume from, as an absolute path."""
    brings_checkpoints: bool = False
    """Whether the hook brings the newest checkpoint to each rank, whose folder may then be another one."""
    due_signals: Collection[str] = ()
    """The names of the signals that ``next_due`` will ask for, so that none is missed before the first run."""

    def begin(self) -> None:
        """Called once, before the session exists: open files, reset counters."""

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Called for every new session, initialized or restored, before its first run; again after a recovery.

        Args:
            session: the raw session; ``session.global_step`` is the restored step, or 0.
            coord: manages the loop's background threads; see :class:`torchhooks.LooperThread`.
        """

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before the step of a run: return what to fetch and feed, or ``None``."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after the step, with what ``before_run`` requested; not called if the run failed.

        ``session.global_step`` already counts this run, and parameters have their updated values.
        """

    def why_finished(self, session: Session) -> str | None:
        """Return why the training run is finished already, if it is, before the first run of a restored session.

        The first ``until_stop`` of a loop asks, and then yields nothing. ``should_stop`` and ``run`` keep TensorFlow's
        rule: a training run that is started again makes one more run.
        """
        return None

    def end(self, session: Session) -> None:
        """Called once, after the loop ended without an error. The session still works; a stop has no effect."""

    def teardown(self) -> None:
        """Called last, after success and failure alike, even if another hook's ``begin`` raised. Close what you opened.

        Unlike TensorFlow, where a hook never learns that the loop failed, and buffered events are lost.
        """

    def next_due(self) -> Due | None:
        """Return when this hook next has work in a run. ``None``, the default, means in every run.

        The loop asks after ``after_create_session``, and after each run or end of an epoch in which it called the hook.
        Until then it skips the hook's ``before_run`` and ``after_run``. Being called earlier than requested must be
        harmless.

        A hook that overrides ``before_run`` is chosen before the step: once ``global_step + 1`` has reached
        ``Due.step``. A hook that overrides only ``after_run`` is chosen after the step: once ``global_step`` has
        reached it, however many steps the run counted. The clock is read at the same point.

        ``Due.when`` is evaluated after the step, whatever the hook overrides. Both methods of the hook are then called:
        it can still fetch values, but not feed the step, trace it, or watch a submodule. Its ``before_run`` sees the
        state after the step, including the global step.

        At the end of an epoch for which ``Due.epochs`` asks, :meth:`force_due`, ``before_run`` and ``after_run`` are
        called between two runs. The last run's outputs of the step are fetched then, and nothing can be fed.
        """
        return None

    def sat_out(self, runs: int) -> None:
        """Called with the number of runs that were skipped, before this hook is called again and before ``end``.

        For hooks that count their runs.
        """

    def force_due(self) -> None:
        """Called on every rank before the run in which a :attr:`collective` hook is due by the chief's clock.

        The hook must then not look at its own clock to decide whether it has work in that run. Also called at the end
        of an epoch that ``Due.epochs`` asks for, and before the first run after a signal that ``Due.signal`` names.
        """


class StandardHook(SessionRunHook):
    """Base class of the hooks of torchhooks: it keeps the constructor's arguments for ``repr``, and knows who writes.

    A keyword that a constructor does not take gets an error that lists the right ones.
    """

    created_with: inspect.BoundArguments | None = None
    """The arguments of the constructor, without ``self``: of the subclass, if it has a constructor of its own."""
    writes: bool = True
    """Whether this process writes files and log lines: of several ranks, the chief. Known in ``begin``."""
    stops_at_step: int | None = None
    """The global step at which the hook will stop the loop; ``None`` if it does not know one."""
    saved_step: int | None = None
    """The step of the last checkpoint that the hook has saved in this session, for the loop to resume from."""

    def attach_to_loop(self, ranks: Ranks, collective: bool, checkpoint_dir: str | None) -> None:
        """Called once a loop, before ``begin`` and in the order of the hooks, with what the loop knows by then.

        Args:
            ranks: the ranks of the loop, which can be one.
            collective: whether all ranks call this hook in the same runs, by the chief's clock.
            checkpoint_dir: the loop's folder of checkpoints, as the script writes it, if it has one. A hook whose
                folder the script does not say takes this one.
        """
        self.writes = ranks.is_chief

    def measured_speed(self, name: str) -> tuple[float, Value] | None:
        """Return the value of the fetch ``name``, after the moment of its measurement; ``None`` if not measured here.

        The names are :data:`torchhooks.fetches.evaluation.SPEEDS`.
        """
        return None

    @property
    def fetches_to_come(self) -> Fetch:
        """What the hook will fetch, perhaps much later: names without a value are logged after the first run."""
        return None

    @property
    def examined(self) -> Fetch | None:
        """The fetch that an :doc:`autopsy </autopsy>` looks at, of a hook that asks for one."""
        return None

    def why_examined(self, step: int, value: Value) -> str | None:
        """Return what is wrong with ``value`` of :attr:`examined` at ``step``, on the host; ``None`` if nothing is."""
        return None

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "__init__" not in vars(cls):
            return
        create: Callable[..., None] = cls.__init__

        @functools.wraps(create)
        def keep_arguments(self: StandardHook, *args: object, **kwargs: object) -> None:
            if self.created_with is None:  # the first constructor that Python calls is the subclass's
                with contextlib.suppress(TypeError):  # of a wrong call, which raises below
                    self.created_with = bound_arguments(create, self, *args, **kwargs)
            create(self, *args, **kwargs)

        cls.__init__ = suggests_keywords(keep_arguments)  # type: ignore[assignment, method-assign]

    def __repr__(self) -> str:
        return super().__repr__() if self.created_with is None else bound_repr(self, self.created_with)


class PeriodicHook(StandardHook):
    """Base class of hooks with a period: fetches :attr:`fetches` when a run is due, and calls :meth:`run_due` after it.

    >>> class Report(PeriodicHook):
    ...     fetches = {"loss": "loss", "step": "global_step"}
    ...
    ...     def run_due(self, run_context, values):
    ...         print(values)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[Report(every_n_steps=4)]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    {'loss': tensor(...), 'step': 4}
    {'loss': tensor(...), 'step': 8}

    ``every_n_steps=100`` calls :meth:`run_due` at steps 100, 200 and 300, also in a training run that was resumed. The
    hook is asked before the step, for ``global_step + 1``. A run that then counts no step, as with
    ``step_unit="optimizer_step"``, does not trigger: nothing is evaluated, and the next run is due. In runs that are
    not due, the hook costs nothing.

    With several ranks, every rank calls the hook in the same runs, so ``fetches`` may contain
    :func:`torchhooks.over_ranks`, and ``run_due`` may call collectives. The clock of the chief measures a period in
    seconds. Write files and log lines only if ``self.writes``.

    Most subclasses have ``fetches`` and override :meth:`run_due`. One that overrides another method calls that of this
    class too. :meth:`run_due` is called after an overridden ``after_run``.

    Called is not due: an overridden ``next_due`` may have the hook called in more runs than its timer triggers in.
    ``self.trigger.due`` says whether the run is due. ``self.trigger.withdraw()`` puts the work off to a later run.

    Args:
        every_n_steps, every_n_secs, every_n_epochs, timer: when it is due; give exactly one, see
            :doc:`Choose a period </built-in-hooks>`.

    Raises:
        ValueError: not exactly one period is given, or it is not valid.
        TypeError: ``timer`` is not a timer; from the loop, a subclass does not call this constructor.
    """

    fetches: Fetch = None
    """What to fetch in a run that is due. A class attribute, or set in the constructor or before a run."""
    needs_step: bool = True
    triggers_at_once: bool = False
    """Whether a timer that has never triggered triggers in the first run, as in TensorFlow.

    Otherwise a period in seconds, or one that is counted from the last trigger, begins when the session is created.
    """
    timer: Timer
    """The timer of the hook. Only ``self.trigger`` asks it."""
    trigger: Trigger
    """When the loop calls the hook, and whether it is due; a new one in every loop."""
    counts_runs: bool = False
    """Whether the timer counts the runs of the loop instead of global steps."""
    works_at_end: bool = False
    """Whether the hook does at the end of the loop, too, what it does when it is due."""

    _request = SessionRunArgs()

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
    ) -> None:
        self.set_timer(given_timer(timer, every_n_steps, every_n_secs, every_n_epochs))

    def set_timer(self, timer: GivenTimer | None, *, at_multiples: bool = False, **periods: float | None) -> None:
        """Take ``timer``, or one of ``periods``, which have TensorFlow's names and begin at the last trigger.

        Constructors call this. With ``at_multiples``, a period in steps is due at its multiples.

        Raises:
            ValueError: not exactly one is given, or the period is invalid.
        """
        self.timer = hook_timer(self, timer, at_multiples=at_multiples, **periods)
        self.trigger = Trigger()  # never due: that of a hook outside of a loop
        self.collective = self.collective or self.timer.differs_by_rank

    def attach_to_loop(self, ranks: Ranks, collective: bool, checkpoint_dir: str | None) -> None:
        super().attach_to_loop(ranks, collective, checkpoint_dir)
        if "timer" not in vars(self):
            raise TypeError(
                f"{type(self).__name__} has no timer: call super().__init__(every_n_steps=...), or another period, in "
                "its constructor"
            )
        if hasattr(type(self), "trigger") or not isinstance(self.trigger, Trigger):
            raise TypeError(
                f"{type(self).__name__}.trigger: every PeriodicHook has an attribute of this name, which says whether "
                "the hook is due: choose another name"
            )

    def attach_trigger(self, trigger: Trigger) -> None:
        """Called before ``begin``, with the trigger of the hook in a new loop."""
        self.timer.reset()
        self.trigger = trigger

    @property
    def elapsed_secs(self) -> float | None:
        """In :meth:`run_due`, the seconds since the last trigger, or since the session was created."""
        return self.trigger.elapsed_secs

    @property
    def fetches_to_come(self) -> Fetch:
        return self.fetches

    @property
    def due_signals(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.timer.signals

    def run_due(self, run_context: SessionRunContext, values: Value) -> None:
        """Called after a run that is due, with the values of :attr:`fetches` in its structure.

        Tensors are on their device: ``run_context.when_ready(values, callback)`` does not wait for it.
        """

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        if not self.trigger.due or self.fetches is None:
            return None
        if self._request.fetches is not self.fetches:  # the same request every time, because the loop checks it once
            self._request = SessionRunArgs(self.fetches)
        return self._request

    def next_due(self) -> Due:
        return self.timer.next_due()


def loop_folder(hook: SessionRunHook, checkpoint_dir: str | None) -> str:
    """Return ``checkpoint_dir``, the folder of the loop, for a ``hook`` that was given none.

    Raises:
        ValueError: the loop has none.
    """
    if checkpoint_dir is None:
        raise ValueError(
            f"{hook!r} has no checkpoint_dir, and the loop has none: give MonitoredLoop(..., checkpoint_dir='run')"
        )
    return checkpoint_dir


def overrides(hook: SessionRunHook, method: str) -> bool:
    """Return whether ``hook`` has its own ``method`` instead of the one of SessionRunHook, which does nothing."""
    # Of the instance and not of its class: a function that was assigned to an attribute of the hook overrides the
    # method too.
    return getattr(getattr(hook, method), "__func__", None) is not getattr(SessionRunHook, method)
