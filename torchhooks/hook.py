"""What a hook is, when it is called, and what it is given: the contract of the whole library.

A hook watches a training loop. Subclass :class:`SessionRunHook`, override what you need, and pass an instance to
:class:`torchhooks.MonitoredLoop`. A hook that asks for the loss and stops the loop when it is small enough:

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

    for hook in hooks: hook.begin()
    session = Session(...)                               # initialised, or restored
    for hook in hooks: hook.after_create_session(session, coord)
    while the body of the `with` calls loop.run(...):
        for hook in hooks: requests += hook.before_run(context)
        outputs = step(...)                              # the user's own function
        values = evaluate(requests)                      # each distinct one once
        for hook in hooks: hook.after_run(context, values for this hook)
        stop, if anybody asked for it in this run
    for hook in hooks: hook.end(session)                 # only if nothing failed
    for hook in hooks: hook.teardown()                   # whatever happened

Every loop above goes through the hooks in the order of the list, ``after_run`` and ``end`` too. ``begin`` is called
once in a loop's life; ``after_create_session`` once for each session, so again after a recovery.

Stop
----
``context.request_stop()`` lets the run finish: the step is still made and every ``after_run`` is still called. Then
``loop.should_stop()`` is true, for good, and another ``run()`` is an error.

Exceptions
----------
* Exactly ``StopIteration`` (a subclass does not count), out of a hook, the step, a closure or the body of the
  ``with``: the loop ends cleanly. The run that it left gets no (further) ``after_run``; every ``end`` is called;
  nothing comes out of the ``with``.
* Anything else, ``KeyboardInterrupt`` included: no further ``after_run``, no ``end``; it comes out with its type and
  its traceback, and a note that names the hook, the method and the step.
* Unlike TensorFlow, an ``end`` that raises keeps nobody else's ``end`` from being called. One error comes out as it is,
  several as an ``ExceptionGroup``.
* Unlike TensorFlow, there is ``teardown``, called on every way out, so that what ``begin`` opened can be closed.

Sitting out
-----------
A hook that has work only now and then may say when: see :meth:`SessionRunHook.next_due`. Until then the loop does
not call its run methods, and a run in which nobody takes part costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from torchhooks.timer import Due

if TYPE_CHECKING:
    from torchhooks.coordinator import Coordinator
    from torchhooks.readback import Readback
    from torchhooks.session import Session
    from torchhooks.step import Step


class RunOptions(NamedTuple):
    """A hook to the loop: how this one run is to be executed. The wishes of several hooks are joined.

    Args:
        trace: profile the step of this run; the profile comes back in :class:`RunMetadata`.
    """

    trace: bool = False


class RunMetadata(NamedTuple):
    """The loop to the hooks: what was recorded about a run beside its values.

    Args:
        profile: the finished ``torch.profiler.profile`` of the step if a hook asked for a trace, else ``None``.
    """

    profile: Any = None


class SessionRunArgs(NamedTuple):
    """A hook to the loop, returned by ``before_run``: what it wants of this run (``tf.train.SessionRunArgs``).

    Args:
        fetches: what to evaluate after the step: a name, a closure, a tensor, an object with ``compute()``, or these in
            lists, tuples, dicts and dataclasses. :mod:`torchhooks.fetch` has the whole table.
        feed_dict: keyword arguments for the step, by parameter name.
        options: how to execute the run.
    """

    fetches: Any = None
    feed_dict: Mapping[str, Any] | None = None
    options: RunOptions | None = None


class SessionRunValues(NamedTuple):
    """The loop to one hook, given to ``after_run``: what it asked for (``tf.train.SessionRunValues``).

    Args:
        results: the values, in the shape of the hook's ``fetches``; ``None`` if it asked for nothing. Tensors are
            detached copies, on their device, as they were at the end of this run.
        options: the joined options of this run.
        run_metadata: what was recorded about this run.
    """

    results: Any
    options: RunOptions
    run_metadata: RunMetadata


class SessionRunContext:
    """One run, as all its hooks see it: the same object in every ``before_run`` and ``after_run`` of the run."""

    # One of these is made in every run, so all that need not be set then is on the class: that of one session, of().
    session: Session
    """The raw session: evaluates fetches without calling hooks."""
    stop_requested: bool = False
    """Whether a hook has asked to stop in this run."""
    stop_reason: str | None = None
    """What the first hook that asked to stop gave as its reason."""
    stopped_by: object = None
    """Whose method was being called when the stop was asked for."""
    caller: object = None
    """Whose method is being called."""
    _step: Step
    _readback: Readback
    _args: tuple[Any, ...]
    _kwargs: Mapping[str, Any]
    _void: bool = False  # the run has failed: what is asked for in it does not count

    @classmethod
    def of(cls, session: Session, step: Step, readback: Readback) -> type[Self]:
        """The class of the contexts of one session; whoever makes one sets ``_args`` and ``_kwargs``."""
        return type(cls.__name__, (cls,), {"session": session, "_step": step, "_readback": readback})

    @property
    def original_args(self) -> SessionRunArgs:
        """What the caller of ``run`` passed: ``SessionRunArgs(step, the run's inputs by parameter name)``."""
        return SessionRunArgs(self._step.function, self._inputs())

    def _inputs(self) -> dict[str, Any]:
        return self._step.inputs(self._args, self._kwargs)

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self.session._live is not self

    def request_stop(self, reason: str | None = None) -> None:
        """Stop the loop after this run. It cannot be taken back; ``reason`` ends up in ``loop.stop_reason``.

        In a ``when_ready`` callback, which may be called in a later run, it stops the loop after that one.
        """
        if not self.stop_requested:
            self.stop_requested, self.stop_reason, self.stopped_by = True, reason, self.caller
            if not self._void:
                self.session._stops.append(self)
                if self.finished:
                    self.session._wake()

    def when_ready(self, values: Any, callback: Callable[[Any], object], *, max_lag_runs: int | None = None) -> None:
        """Call ``callback(host_values)`` as soon as ``values`` are on the host, without making anybody wait.

        ``host_values`` has the structure of ``values``, with CPU tensors in place of device tensors. If everything is
        on the CPU already, the call is made at once. Otherwise it is made once the copy has arrived, in the order of
        the requests, and at the latest before ``end``, before a checkpoint is written and when the loop closes, also
        after an error. An error out of ``callback`` comes out of the run in which the call was made.

        Args:
            values: what came in ``run_values.results``, or any structure of tensors.
            callback: called with them.
            max_lag_runs: make the call at most this many runs later, and wait for the device if need be; 0 is the end
                of this run.
        """
        caller = self.caller

        def call(host_values: Any) -> None:
            self.caller = caller
            callback(host_values)

        self._readback.request(values, call, caller, self.session.global_step, max_lag_runs)


class SessionRunHook:
    """Base class of all hooks (``tf.train.SessionRunHook``). Override what you need; every method does nothing here.

    An instance may serve several loops, one after the other: ``begin`` is where its counters go back to their start.
    """

    def begin(self) -> None:
        """Called once, before there is a session: open files, reset counters."""

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Called for every new session, initialised or restored, before its first run; again after a recovery.

        Args:
            session: the raw session; ``session.global_step`` is the step that was restored, or 0.
            coord: keeps track of the loop's background threads; see :class:`torchhooks.LooperThread`.
        """

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before the step of a run: return what is wanted of it, or ``None``."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after the step, with what ``before_run`` asked for; not called when the run failed.

        ``session.global_step`` counts this run already, and parameters are those after the update.
        """

    def end(self, session: Session) -> None:
        """Called once, when the loop ended without an error. The session still works; a stop cannot be asked for."""

    def teardown(self) -> None:
        """Called last, whatever happened, also when the ``begin`` of another hook raised: close what ``begin`` opened.

        Unlike TensorFlow, which tells hooks nothing about a loop that failed, so that buffered events are lost.
        """

    def next_due(self) -> Due | None:
        """When this hook next takes part in a run. ``None``, the default: in every run.

        Asked after ``after_create_session`` and after every run in which the hook took part. Until what it returned
        comes up, its ``before_run`` and ``after_run`` are not called. Being called sooner must do no harm.

        A hook that overrides ``before_run`` is looked at before the step: it takes part if ``global_step + 1`` has
        reached ``Due.step``. A hook that overrides only ``after_run`` is looked at after the step: it takes part if
        ``global_step`` has, however many steps the run counted. The clock is read at the same point.

        ``Due.when`` is looked at after the step, whatever the hook overrides. A hook that takes part because of it has
        both methods called then: it can still ask for values, but not feed, trace, or watch a submodule, and its
        ``before_run`` sees what the step has left, the global step included.
        """
        return None

    def sat_out(self, runs: int) -> None:
        """Told before a hook takes part again, and before ``end``: so many runs went by without it.

        For hooks that count their runs.
        """
