"""Timers that decide when a periodic hook runs.

The rules are TensorFlow's (``tf.train.SecondOrStepTimer``): a timer that has never triggered triggers at once, no timer
triggers twice for one step, and a period starts at the last trigger, not at a multiple of the period.
:class:`EverySteps` has another rule: it triggers at the multiples of its period. :class:`EveryEpochs` triggers at the
end of an epoch, between two runs, and :class:`AtSteps` once at each of some steps. :class:`OnSignal` triggers
when a signal arrives.
"""

import bisect
import copy
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

from torchhooks.common.checks import by_name, period, whole_number
from torchhooks.common.text import shown


class Due(NamedTuple):
    """When a hook is next due: in the first run that meets one of the given conditions; never if none is given.

    A hook returns it from ``next_due``, and is not called before:

    >>> class EveryThreeSteps(SessionRunHook):
    ...     def begin(self):
    ...         self.step = 3
    ...
    ...     def next_due(self):
    ...         return Due(step=self.step)
    ...
    ...     def after_run(self, run_context, run_values):
    ...         self.step += 3
    ...         print("called at step", run_context.session.global_step)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[EveryThreeSteps()]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    called at step 3
    called at step 6

    The loop asks for it once the session is created, and after each run in which it called the hook; see
    :meth:`torchhooks.SessionRunHook.next_due`. A condition on what the step returned is evaluated after every step:

    >>> class ReportSpikes(SessionRunHook):
    ...     def next_due(self):
    ...         return Due(when=lambda loss: loss > 100)
    ...
    ...     def after_run(self, run_context, run_values):
    ...         print("spike at step", run_context.session.global_step)
    >>> batches[2] *= 100
    >>> with MonitoredLoop(step, model, optimizer, hooks=[ReportSpikes()]) as loop:
    ...     for inputs in loop.until_stop(batches[:3]):
    ...         loss = loop.run(inputs)
    spike at step 3

    Args:
        step: the run is about to bring the global step to this number or past it.
        moment: ``time.monotonic()``, in seconds, has reached this number.
        runs: the run is this many runs from now; 1 is the next run.
        when: ``when(outputs)`` is true, where ``outputs`` is what the step returned. It is called after every step for
            which the hook is not due otherwise, possibly twice, so it should be fast and have no side effects. A
            comparison of a tensor on a GPU waits for the device. In a run in which a hook feeds something it is not
            called, and counts as true.
        epochs: an epoch ends, and this number divides the number of epochs that have ended in the whole training run:
            2 is due after epochs 2, 4 and 6. The hook is called between two runs, see
            :meth:`torchhooks.SessionRunHook.next_due`.
        signal: a signal of this name, such as ``"SIGUSR1"``, has arrived; see :class:`OnSignal`.
    """

    step: int | None = None
    moment: float | None = None
    runs: int | None = None
    when: Callable[[Any], object] | None = None
    epochs: int | None = None
    signal: str | None = None


NOW = Due(step=-1)
"""Due in the next run, at any step: the answer of a timer that has never triggered."""

NEVER = Due()
"""Never due again."""


def called_within(runs: int, due: Due) -> Due:
    """Return ``due``, and at the latest ``runs`` runs from now: the loop then calls the hook, which may not be due."""
    return due if due.runs is not None and due.runs <= runs else due._replace(runs=runs)


class Timer:
    """Base class of all timers: the policy by which a hook is due, and the last trigger. It never triggers by itself.

    In a loop, nothing but the hook's :class:`torchhooks.lifecycle.trigger.Trigger` asks a timer and tells it of a
    trigger.
    """

    every_steps: int | None = None
    """The period in steps; ``None`` if there is no period, or it is not one in steps."""
    differs_by_rank: bool = False
    """Whether each rank by itself would trigger in other runs: by its clock, or by a signal."""
    signals: tuple[str, ...] = ()
    """The names of the signals that trigger it."""

    _last_step: int | None = None
    _last_time: float | None = None
    _reached: int | None = None  # by the last trigger, or by the start

    def reset(self) -> None:
        """Forget the last trigger and the start."""
        self._last_step = self._last_time = self._reached = None

    def start_at(self, step: int) -> None:
        """Start at ``step``, at which a session starts. Called before ``after_create_session``."""

    def should_trigger_for_step(self, step: int) -> bool:
        """Return whether the timer triggers for ``step`` now; always false for the step of the last trigger."""
        return self.triggers_at(step, time.monotonic())

    def triggers_at(self, step: int, now: float) -> bool:
        """Return whether the timer triggers for ``step`` at the moment ``now``, by ``time.monotonic()``."""
        # Before next_due(), by whose answer a period of 0 seconds would trigger twice for one step.
        if step == self._last_step:
            return False
        # By the same numbers as the loop, which calls the hook from next_due() on. With now - last >= period, both
        # could differ in the last bit of a float, and the hook would be called in runs in which it is not due.
        due = self.next_due()
        return (due.step is not None and step >= due.step) or (due.moment is not None and now >= due.moment)

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Record a trigger now, at ``step``, at which a new period starts.

        Return the seconds and the steps since the last trigger; ``(None, None)`` for the first.
        """
        now = time.monotonic()
        last_step, last_time = self._last_step, self._last_time
        self._last_step, self._last_time, self._reached = step, now, step
        if last_step is None or last_time is None:
            return None, None
        return now - last_time, step - last_step

    def last_triggered_step(self) -> int | None:
        """Return the step of the last trigger, or ``None`` if there was none."""
        return self._last_step

    def next_due(self) -> Due:
        """Return when the timer triggers next."""
        return NEVER


class SecondOrStepTimer(Timer):
    """A timer that triggers at most once every ``every_secs`` seconds, or every ``every_steps`` steps.

    A hook asks it for each step, and tells it when it did its work (``tf.train.SecondOrStepTimer``):

    >>> timer = SecondOrStepTimer(every_steps=10)
    >>> for step in range(1, 31):
    ...     if timer.should_trigger_for_step(step):
    ...         elapsed_secs, elapsed_steps = timer.update_last_triggered_step(step)
    ...         print(step, elapsed_steps)
    1 None
    11 10
    21 10

    A timer that has never triggered triggers at once, and no timer triggers twice for one step. A period starts at the
    last trigger. As the ``timer`` of several hooks, one timer triggers for all of them in the same run.

    Args:
        every_secs: seconds from one trigger to the next, 0 or more and finite.
        every_steps: steps from one trigger to the next, 1 or more and less than 2**63.

    Raises:
        ValueError: both or neither are given, or the period is invalid.

    Unlike TensorFlow, the clock is ``time.monotonic()``, so that setting the system time does not change a period.
    """

    def __init__(self, every_secs: float | None = None, every_steps: int | None = None) -> None:
        if (every_secs is None) == (every_steps is None):
            raise ValueError(
                f"SecondOrStepTimer(every_secs={every_secs!r}, every_steps={every_steps!r}): "
                f"give exactly one of the two, {'not both' if every_secs is not None else 'none was given'}"
            )
        self._every_secs = None if every_secs is None else period(every_secs, "every_secs")
        self.every_steps = None if every_steps is None else whole_number(every_steps, "every_steps", 1)
        # The clocks of the ranks differ, so a hook of all ranks is due by the chief's.
        self.differs_by_rank = every_steps is None

    @classmethod
    def named(cls, **periods: Any) -> Self:
        """Return a timer of the one period that is not ``None``: seconds if its name ends in ``secs``, else steps.

        For a hook whose arguments have other names: ``SecondOrStepTimer.named(every_n_iter=10, every_n_secs=None)``.

        Raises:
            ValueError: not exactly one is given, or it is invalid. The message has the name that was given.
        """
        # Before the constructor, whose errors would have the names every_secs and every_steps.
        given = {name: _checked(name, value) for name, value in periods.items() if value is not None}
        if len(given) != 1:
            listed = ", ".join(f"{name}={shown(value)}" for name, value in periods.items())
            raise ValueError(f"{listed}: give exactly one of them{', and None for the other' if given else ''}")
        ((name, value),) = given.items()
        return cls(**{"every_secs" if name.endswith("secs") else "every_steps": value})

    def next_due(self) -> Due:
        if self._last_step is None or self._last_time is None:
            return NOW
        if self.every_steps is not None:
            return Due(step=self._last_step + self.every_steps)
        assert self._every_secs is not None
        return Due(moment=self._last_time + self._every_secs)

    def __repr__(self) -> str:
        if self.every_steps is not None:
            return f"SecondOrStepTimer(every_steps={self.every_steps})"
        return f"SecondOrStepTimer(every_secs={self._every_secs})"


def _checked(name: str, value: Any) -> Any:
    """Return ``value`` as the period ``name``: seconds if the name ends in ``secs``, else steps."""
    try:
        return period(value, name) if name.endswith("secs") else whole_number(value, name, 1)
    except ValueError as error:
        raise ValueError(f"{error}{by_name(value)}") from None


class _StepTimer(Timer):
    """A timer that triggers when a run reaches or passes certain global steps."""

    def start_at(self, step: int) -> None:
        """Start at ``step``, at which a session starts. Steps that are reached again after a recovery trigger again."""
        # A recovery has restored a step before the last trigger. In a resume, the timer is new and has none: the
        # reached step keeps it from triggering for a multiple before the checkpoint.
        if self._last_step is not None and self._last_step > step:
            self.reset()
        self._reached = step


def first_due(timer: Timer) -> tuple[int, str] | None:
    """Return when ``timer`` triggers first in a training run, and in what that is counted; ``None`` if unknown.

    Not of TensorFlow's periods, which mostly trigger in the first run.
    """
    if isinstance(timer, EverySteps):
        return timer.every_steps, "steps"
    if isinstance(timer, AtSteps):
        return timer.steps[0], "steps"
    return (timer.every_epochs, "epochs") if isinstance(timer, EveryEpochs) else None


class EverySteps(_StepTimer):
    """A timer that triggers when the global step is a multiple of ``n``, also in a training run that was resumed.

    >>> every = EverySteps(4)
    >>> hooks = [
    ...     LoggingTensorHook({"weight": param_norm(), "step": "global_step"}, timer=every),
    ...     SummarySaverHook(output_dir="run", summary_op={"weight": param_norm()}, timer=every),
    ... ]
    >>> with MonitoredLoop(step, model, optimizer, hooks=hooks) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    weight = ..., step = 4
    weight = ..., step = 8 (... sec)

    Both hooks take part in the runs that reach steps 4 and 8, and the norm is evaluated once in each. A run of several
    steps triggers if it reaches or passes a multiple. A hook that is chosen before the step expects one step, and
    triggers in the next run if the multiple was further away. Each hook uses a copy of the timer.

    Args:
        n: the period in steps, 1 or more and less than 2**63.

    Raises:
        ValueError: ``n`` is invalid.
    """

    def __init__(self, n: int) -> None:
        self.every_steps: int = whole_number(n, "n", 1)

    def should_trigger_for_step(self, step: int) -> bool:
        """Return whether a multiple was reached since the last trigger or the start; without either, at ``step``."""
        # The script uses the timer without a loop. In a loop, start_at() was called before.
        if self._reached is None:
            return step > 0 and step % self.every_steps == 0
        return super().should_trigger_for_step(step)

    def next_due(self) -> Due:
        if self._reached is None:
            return NOW
        return Due(step=(self._reached // self.every_steps + 1) * self.every_steps)

    def __repr__(self) -> str:
        return f"EverySteps({self.every_steps})"


class AtSteps(_StepTimer):
    """A timer that triggers once at each of the given global steps.

    >>> hook = LoggingTensorHook(["global_step"], timer=AtSteps([2, 5]))
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    global_step = 2
    global_step = 5 (... sec)

    A run of several steps triggers if it reaches or passes a step. A training run that is resumed after a step does not
    trigger for it again. Each hook uses a copy of the timer.

    Args:
        steps: the global steps, in any order, 1 or more and less than 2**63.

    Raises:
        ValueError: there is none, or one of them is invalid.
        TypeError: ``steps`` is not an iterable.
    """

    def __init__(self, steps: Iterable[int]) -> None:
        if not isinstance(steps, Iterable) or isinstance(steps, str):
            raise TypeError(f"steps={shown(steps)}: give a list of global steps, such as [100, 200]")
        self.steps: list[int] = sorted({whole_number(step, "a step of AtSteps", 1) for step in steps})
        """The steps, in ascending order."""
        if not self.steps:
            raise ValueError("AtSteps([]): give at least one global step, such as [100, 200]")

    def next_due(self) -> Due:
        # To the right of an equal step, which has triggered, or was reached before the resume.
        index = bisect.bisect_right(self.steps, self._reached or 0)
        return Due(step=self.steps[index]) if index < len(self.steps) else NEVER

    def __repr__(self) -> str:
        return f"AtSteps({self.steps})"


class EveryEpochs(Timer):
    """A timer that triggers at the end of every ``n``-th epoch.

    >>> mean = LoggingTensorHook({"epoch": "epoch", "mean loss": running_mean("loss")}, timer=EveryEpochs())
    >>> with MonitoredLoop(lambda loss: loss, hooks=[mean]) as loop:  # a step that returns the loss it is given
    ...     for epoch in loop.until_stop(range(2)):
    ...         for loss in loop.until_stop([4.0, 2.0, 0.0]):
    ...             loss = loop.run(loss)
    epoch = 0, mean loss = 2.0
    epoch = 1, mean loss = 2.0 (... sec)

    An epoch ends when the innermost ``until_stop`` around the runs has no more items, or when its body leaves it with
    ``break``. It does not end when the loop stops in its middle. ``EveryEpochs(2)`` triggers after epochs 2, 4 and 6 of
    the whole training run, also after a resume.

    The hooks are called between two runs, before the code that follows the inner loop: outputs of the step come from
    the last run. Each hook uses a copy of the timer.

    Args:
        n: the period in epochs, 1 or more.

    Raises:
        ValueError: ``n`` is invalid.
    """

    def __init__(self, n: int = 1) -> None:
        self.every_epochs: int = whole_number(n, "n", 1)
        """The period in epochs."""

    def next_due(self) -> Due:
        # No step and no moment, so triggers_at() is always false: only the loop knows when an epoch ends.
        return Due(epochs=self.every_epochs)

    def __repr__(self) -> str:
        return f"EveryEpochs({self.every_epochs})"


class OnSignal(Timer):
    """A timer that triggers in the next run after a signal has arrived, such as SIGUSR1 from ``kill -USR1``.

    >>> import signal
    >>> hook = LoggingTensorHook({"norm": grad_norm(), "step": "global_step"}, timer=OnSignal("SIGUSR1"))
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    ...         if loop.global_step == 4:
    ...             signal.raise_signal(signal.SIGUSR1)
    norm = ..., step = 5

    With several ranks, a signal to any of them triggers on all, in the same run. Several signals before that run are
    one. From ``begin`` of the hooks until the loop is closed, the signal has no other effect in this process. Before
    and after, it does what it would do without this timer: SIGUSR1 and SIGUSR2 end a process. Create the loop in the
    main thread. Each hook uses a copy of the timer.

    Args:
        signal: the name of the signal. Give the loop other ``signals`` to stop at.

    Raises:
        ValueError: this system has no such signal, or no process can handle it.
    """

    differs_by_rank = True

    def __init__(self, signal: str) -> None:
        self.signal = checked_signal(signal, "OnSignal").name
        """The name of the signal."""
        self.signals = (self.signal,)

    def next_due(self) -> Due:
        return Due(signal=self.signal)

    def __repr__(self) -> str:
        return f"OnSignal({self.signal!r})"


class NeverTriggerTimer(Timer):
    """A timer that never triggers, for a hook that only has work to do at the end (``tf.train.NeverTriggerTimer``).

    >>> timer = NeverTriggerTimer()
    >>> timer.should_trigger_for_step(1), timer.next_due()
    (False, Due(step=None, moment=None, runs=None, when=None, epochs=None, signal=None))
    """

    def update_last_triggered_step(self, step: int) -> tuple[None, None]:
        """Return ``(None, None)``: nothing is recorded."""
        return None, None

    def __repr__(self) -> str:
        return "NeverTriggerTimer()"


class _SharedTimer(Timer):
    """The use that one hook makes of a timer that it may share with others.

    A timer triggers once for all of its hooks. So a hook is also due if another one has had the timer trigger since its
    own last trigger, and the elapsed time is this hook's.
    """

    _known: int | None = None  # the last trigger of the timer that this hook took part in

    def __init__(self, timer: SecondOrStepTimer) -> None:
        self._timer = timer
        self.every_steps, self.differs_by_rank = timer.every_steps, timer.differs_by_rank

    def reset(self) -> None:
        super().reset()
        self._known = None
        self._timer.reset()

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        # If the hook missed a trigger, another hook has started the new period already, perhaps in this very run. To
        # start it again would move the next trigger of all of them.
        if not self._missed_a_trigger():
            self._timer.update_last_triggered_step(step)
        self._known = self._timer.last_triggered_step()
        return super().update_last_triggered_step(step)

    def next_due(self) -> Due:
        return NOW if self._missed_a_trigger() else self._timer.next_due()

    def _missed_a_trigger(self) -> bool:
        return self._timer.last_triggered_step() != self._known


GivenTimer = EverySteps | EveryEpochs | AtSteps | OnSignal | SecondOrStepTimer | NeverTriggerTimer
"""What a hook can be given as its timer. Several hooks can be given the same one."""

# All copies of such a timer trigger in the same runs. Those of a SecondOrStepTimer may not, because its period begins
# at the last trigger. So its hooks share it.
_Copied = EverySteps | EveryEpochs | AtSteps | OnSignal | NeverTriggerTimer


def checked_signal(given: str | signal.Signals, argument: str = "signals") -> signal.Signals:
    """Return the signal with the name ``given``.

    Raises:
        ValueError: this system has no such signal, or no process can handle it.
    """
    try:
        number = signal.Signals[given] if isinstance(given, str) else signal.Signals(given)
    except (KeyError, ValueError):
        raise ValueError(f"{argument} has {given!r}: give names of signals of this system, such as 'SIGTERM'") from None
    if number.name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"{argument} has {number.name!r}, which no process can handle: leave it out")
    return number


def given_timer(
    timer: GivenTimer | None,
    every_n_steps: int | None = None,
    every_n_secs: float | None = None,
    every_n_epochs: int | None = None,
    **others: float | None,
) -> GivenTimer | None:
    """Return ``timer``, or the timer with one of the periods that every hook takes; ``None`` if neither was given.

    ``others`` are the periods with TensorFlow's names, of which :func:`hook_timer` makes a timer.

    Raises:
        ValueError: more than one is given, or it is invalid.
        TypeError: ``timer`` is not a timer.
    """
    if timer is not None and not isinstance(timer, GivenTimer):
        raise TypeError(
            f"timer={shown(timer)}: must be an EverySteps, an EveryEpochs, an AtSteps, an OnSignal, a "
            f"SecondOrStepTimer or a NeverTriggerTimer, such as EverySteps(100){by_name(timer)}"
        )
    periods = {"every_n_steps": every_n_steps, "every_n_secs": every_n_secs, "every_n_epochs": every_n_epochs}
    given = {name: value for name, value in periods.items() if value is not None}
    if given or timer is not None:
        check_one_period(timer, **others, **given)
    for name, value in given.items():
        number = _checked(name, value)
        if name == "every_n_secs":
            return SecondOrStepTimer(every_secs=number)
        return EverySteps(number) if name == "every_n_steps" else EveryEpochs(number)
    return timer


def check_one_period(timer: object, **periods: object) -> None:
    """Raise a ValueError, with what was given, if that is more than one of ``periods`` and ``timer``."""
    listed = [f"{name}={shown(value)}" for name, value in periods.items() if value is not None]
    listed += [] if timer is None else [f"timer={shown(timer)}"]
    if len(listed) > 1:
        raise ValueError(f"{', '.join(listed)}: give a period or a timer, not {'both' if timer is not None else 'two'}")


def hook_timer(hook: object, timer: GivenTimer | None, *, at_multiples: bool = False, **periods: float | None) -> Timer:
    """Return the timer of ``hook``, which was given ``timer`` or one of ``periods``, the others being ``None``.

    A period in steps starts at the last trigger, or, with ``at_multiples``, at a multiple of it.

    Raises:
        ValueError: not exactly one of them is given, or the period is invalid.
    """
    given = {name: value for name, value in periods.items() if value is not None}
    if timer is None:
        if not given:
            names = dict.fromkeys([*periods, "every_n_steps", "every_n_secs", "every_n_epochs"])
            listed = ", ".join(f"{name}=" for name in names)
            raise ValueError(f"{type(hook).__name__} has no period: give one of {listed} and timer=")
        chosen = SecondOrStepTimer.named(**periods)
        return chosen if chosen.every_steps is None or not at_multiples else EverySteps(chosen.every_steps)
    check_one_period(timer, **given)
    if not isinstance(timer, _Copied):
        return _SharedTimer(timer)
    # A hook records its triggers in its own timer. With one timer for several hooks, the first of them would keep the
    # others from triggering at the same step.
    own: _Copied = copy.copy(timer)
    own.reset()
    return own
