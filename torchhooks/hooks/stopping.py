"""Hooks that stop a loop, and a hook that delays its start."""

from __future__ import annotations

import cmath
import functools
import itertools
import math
import threading
from typing import NamedTuple

import numpy as np
import torch

from torchhooks.checkpoints.savers import Refusal
from torchhooks.common.checks import whole_number
from torchhooks.common.errors import LifecycleError, NanLossDuringTrainingError
from torchhooks.common.log import logger
from torchhooks.common.memory import ordinary
from torchhooks.common.text import shown
from torchhooks.common.timers import NEVER, Due
from torchhooks.common.trees import as_snapshot, copied, is_snapshot
from torchhooks.device.accelerator import host
from torchhooks.device.readback import Arrival, is_remote, to_host
from torchhooks.fetches.evaluation import ComposedFetch, leaves, watched_names
from torchhooks.fetches.names import Fetch, Value, describe, named_outputs
from torchhooks.hooks.evaluation import NOT_EVALUATED
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import SessionRunArgs, SessionRunContext, SessionRunValues, StandardHook
from torchhooks.lifecycle.session import Finding, Session

_POLL_SECS = 0.1


class _CheckResult(NamedTuple):
    """What the check of a value that is not known to be finite needs to have read on the host.

    Args:
        flags: for ``"NaN"``, and with ``also_inf`` for ``"infinite"``, flags of which one is true if the value is that.
        numbers: tensors of one element each, which are on a device, for the host to check.
    """

    flags: dict[str, list[Value]]
    numbers: list[torch.Tensor]


_Finding = tuple[int, _CheckResult]  # with the global step of its run


class StopAtStepHook(StandardHook):
    """Stops the loop at a global step (``tf.train.StopAtStepHook``): the run that reaches it is the last one.

    >>> with MonitoredLoop(step, model, optimizer, hooks=[StopAtStepHook(last_step=3)]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    >>> loop.global_step, loop.stop_reason
    (3, 'StopAtStepHook: step 3')

    Args:
        num_steps: the number of steps to make, counted from the step at which the first session starts. A recovery does
            not restart the count, but each process has a count of its own: with a ``checkpoint_dir``, this is a limit
            of the process, and a training run that is resumed makes as many steps more.
        last_step: the global step to stop at: the limit of the whole training run.

    Raises:
        ValueError: not exactly one of the two is given, or it is not a valid number of steps.

    Unlike TensorFlow, which predicts the step before the run, the hook compares the step that the run has reached, even
    if a run counts no step or several. A loop that is restored at or after its last step makes no run with
    ``until_stop``, and one with ``should_stop`` and ``run``, as in TensorFlow.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        self._num_steps, self._given_last_step = num_steps, last_step
        if (num_steps is None) == (last_step is None):
            both = "" if num_steps is None else ", not both"
            raise ValueError(f"{self!r}: give one of num_steps and last_step{both}")
        if num_steps is not None:
            whole_number(num_steps, "num_steps", 1)
        else:
            whole_number(last_step, "last_step", 0)

    def begin(self) -> None:
        self.stops_at_step = self._given_last_step

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        if self.stops_at_step is None and self._num_steps is not None:  # a recovery must not move it
            self.stops_at_step = session.global_step + self._num_steps
        if self.stops_at_step is not None and session.global_step >= self.stops_at_step:
            logger.info("%r: the global step is %d already", self, session.global_step)

    def why_finished(self, session: Session) -> str | None:
        if self.stops_at_step is None or session.global_step < self.stops_at_step:
            return None
        return f"step {session.global_step}, with last_step={self.stops_at_step}"

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = run_context.session.global_step
        assert self.stops_at_step is not None
        if step >= self.stops_at_step:
            run_context.request_stop(f"step {step}")

    def next_due(self) -> Due:
        return Due(step=self.stops_at_step)


class NanTensorHook(StandardHook):
    """Raises an error or stops the loop when a value is NaN (``tf.train.NanTensorHook``). It checks every run.

    >>> batches[2] = float("nan")
    >>> try:
    ...     with MonitoredLoop(step, model, optimizer, hooks=[NanTensorHook("loss")]) as loop:
    ...         for inputs in loop.until_stop(batches):
    ...             loss = loop.run(inputs)
    ... except NanLossDuringTrainingError as error:
    ...     print("failed:", error)
    loss is NaN at step 3: training fails
    failed: loss is NaN at step 3. NanTensorHook(..., fail_on_nan_loss=False) stops at such a step instead of failing.

    If the loop has a ``checkpoint_dir``, the hook leaves ``nan.json`` there, and the process that starts next
    :doc:`finds where the NaN came from </autopsy>`. :doc:`Check for NaN </built-in-hooks>` says what happens on a GPU
    and on several ranks.

    Args:
        loss_tensor: what to check: any fetch of real or complex numbers, such as ``"loss"`` or
            :func:`torchhooks.grad_norm`. A single NaN among them is enough.
        fail_on_nan_loss: whether to raise an error; otherwise the hook logs a warning and stops the loop after the run.
        also_inf: whether to treat infinities like NaN.
        max_lag_steps: how many runs later than on the CPU, where the check is immediate, a NaN on a device may be
            noticed. With 0, every run waits for the device. With ``None``, the NaN is noticed as soon as the result can
            be read without waiting.

    Raises:
        NanLossDuringTrainingError: from the run in which the NaN is noticed, with ``fail_on_nan_loss``.
        ValueError: ``max_lag_steps`` is not a whole number, 0 or more.
        TypeError: from the run, the value is not made of numbers.
        FetchError: from the run, the fetch has no value.

    Unlike TensorFlow, the host does not wait for a value on a GPU, so the loop ends a few runs after the NaN. The
    message names the step at which the value was NaN.

    Unlike TensorFlow, no checkpoint is saved from the run with the NaN or a later one, wherever the saver is listed. If
    the script catches the error and goes on, checkpoints are saved again after a run whose value is finite.
    """

    def __init__(
        self,
        loss_tensor: Fetch,
        fail_on_nan_loss: bool = True,
        *,
        also_inf: bool = False,
        max_lag_steps: int | None = None,
    ) -> None:
        self._loss_tensor = loss_tensor
        self._fail_on_nan_loss = fail_on_nan_loss
        if max_lag_steps is not None:
            whole_number(max_lag_steps, "max_lag_steps", 0)
        self._max_lag_steps = max_lag_steps
        self._also_inf = also_inf
        self._check = _NonFiniteCheck(loss_tensor, also_inf)
        self._request = SessionRunArgs(self._check)
        self._findings = itertools.count()  # never restarts: a late callback must not report on another run

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        # A recovery restores a state from before the NaN.
        self._message: str | None = None
        self._calls = self._reported_in = 0  # of after_run: the last one, and the one after which a NaN was reported
        self._check.found = None
        # What was found in runs that have not been reported on yet: the run's step and flags, by a running number.
        self._unreported: dict[int, _Finding] = {}
        # A subclass that overrides a run method expects it to be called in every run.
        cls = type(self)
        overrides = (cls.before_run, cls.after_run) != (NanTensorHook.before_run, NanTensorHook.after_run)
        # Only an output of the step that is fetched by name can be examined without joining the run.
        is_output_name = type(self._loss_tensor) is str and not watched_names(self._loss_tensor)
        self._joins_every_run = overrides or not is_output_name
        session.guard_checkpoints(
            functools.partial(self._why_no_checkpoint, session),
            background_refusal=functools.partial(self._refuse_in_background, session),
        )

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return self._request

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        found = run_values.results
        self._calls += 1
        if found is None:
            self._is_finite()
        else:
            if self._max_lag_steps == 0:
                found = to_host(found)
            # With the step of this run, because the callback may run several steps later.
            number, finding = next(self._findings), (run_context.session.global_step, found)
            self._unreported[number] = finding
            self._check.found = None
            report = functools.partial(self._report, run_context, number)
            run_context.when_ready(finding, report, max_lag_runs=self._max_lag_steps)

    def next_due(self) -> Due | None:
        return None if self._joins_every_run else Due(when=self._check_outputs)

    @property
    def examined(self) -> Fetch:
        return self._loss_tensor

    def why_examined(self, step: int, value: Value) -> str | None:
        found = _NonFiniteCheck(self._loss_tensor, self._also_inf).compose(value)
        return None if found is None else self._problem([(step, found)])

    def _check_outputs(self, outputs: object) -> bool:
        """Return whether to join the run with these ``outputs``: not if the value in them is a finite number.

        If it is one, forget what an earlier run found. If it is no number on the CPU, join every run from now on.
        """
        name, value = self._loss_tensor, outputs  # called after every step, so the usual "loss" has a fast path
        if name != "loss" or type(outputs) is not torch.Tensor:
            named = named_outputs(outputs)
            value = named[name] if name in named else None  # noqa: SIM401 - the user's mapping may have no get()
        if type(value) is torch.Tensor and host.holds(value) and value.numel() == 1:
            try:
                value = value.item()
            except RuntimeError:  # of a layout that has no item(): the check reads it
                value = None
        if type(value) is float and math.isfinite(value):
            self._check.found = None  # forget the finding of an earlier run
            return False
        if self._check.found is None:
            self._is_finite()  # in the runs since the NaN that was reported, if there was one
        # What is not a number on the CPU can only be checked by joining the run. Assume that it stays that way.
        self._joins_every_run = self._joins_every_run or type(value) is not float
        return True

    @property
    def _reported(self) -> str | None:
        """What was found and reported; ``None`` again after a finite value, if the script has caught the error.

        In a run that the hook does not join, a finite value only removes what the check has found.
        """
        is_kept = not self._fail_on_nan_loss or self._joins_every_run or self._check.found is not None
        return self._message if is_kept else None

    def _is_finite(self) -> None:
        """Note that the value of a run is finite. Only a loop that fails can make one after a NaN."""
        if self._fail_on_nan_loss:
            self._message = None

    def _why_no_checkpoint(self, session: Session) -> str | None:
        """Return why the current state must not be saved, or ``None``."""
        return self._reported or self._problem(to_host(self._all_unreported(session)))

    def _refuse_in_background(self, session: Session) -> str | Refusal | None:
        """Return why the current state must not be saved, or ``None``, or a function that waits to find out."""
        if self._reported is not None:
            return self._reported
        arrival = Arrival(self._all_unreported(session))
        return self._problem(arrival.wait()) if arrival.on_host else lambda: self._problem(arrival.wait())

    def _all_unreported(self, session: Session) -> list[_Finding]:
        findings = list(self._unreported.values())
        # A saver before this hook in the list asks before after_run, when only the check knows of the NaN.
        return findings if self._check.found is None else [*findings, (session.global_step, self._check.found)]

    def _report(self, run_context: SessionRunContext, number: int, finding: _Finding) -> None:
        """Fail or stop the loop if ``finding``, which is on the host now, is a problem.

        Each is reported, as in TensorFlow, if the script catches the error and makes another run; otherwise the first.
        """
        self._unreported.pop(number, None)
        message = self._problem([finding])
        if message is None:
            self._is_finite()
            return
        if self._message is not None and (not self._fail_on_nan_loss or self._reported_in == self._calls):
            return
        self._message, self._reported_in = message, self._calls
        if not self._joins_every_run:  # so that the next finite value, which only removes this, is enough to go on
            self._check.found = finding[1]
        # A value that was on a device arrives after its run, whose arguments have been let go.
        inputs = {} if run_context.finished else run_context.inputs()
        run_context.session.found(Finding(finding[0], message, self, inputs))
        if self._fail_on_nan_loss:
            logger.error("%s: training fails", message)
            raise NanLossDuringTrainingError(
                f"{message}. NanTensorHook(..., fail_on_nan_loss=False) stops at such a step instead of failing."
            )
        logger.warning("%s: training stops", message)
        run_context.request_stop(message)

    def _problem(self, findings: list[_Finding]) -> str | None:
        """Return a message about the first of ``findings`` that is a problem. All of them are on the host."""
        for step, found in findings:
            for kind, flags in found.flags.items():
                if any(flags) or any(_passes(number, _TESTS[kind]) for number in found.numbers):
                    return f"{describe(self._loss_tensor)} is {kind} at step {step}"
        return None


_TESTS = {"NaN": "isnan", "infinite": "isinf"}


class _NonFiniteCheck(ComposedFetch):
    """The result of checking the value of a fetch: ``None`` if it is finite, or what has to be read on the host first.

    :attr:`found` keeps it from the evaluation to ``after_run``, so that a hook that saves before that can ask.
    """

    fetch: Fetch = None

    def __init__(self, fetch: Fetch, also_inf: bool) -> None:
        self.fetch = fetch
        self.found: _CheckResult | None = None
        self.copies = False
        """Whether the value consists of numbers on a device. Their copies are the copies that other hooks request.

        Known from the previous evaluation. A larger value is only read, without a copy.
        """
        self._kinds = tuple(_TESTS) if also_inf else ("NaN",)

    def __repr__(self) -> str:
        return f"the check of {describe(self.fetch)} for NaN"

    def compose(self, value: Value) -> _CheckResult | None:
        self.found = None
        if type(value) is torch.Tensor and not is_remote(value) and value.numel() == 1:
            value = _number(value)
        if type(value) is float and (math.isfinite(value) or value is NOT_EVALUATED):
            return None  # fast path: nearly every run on a CPU
        here: list[Value] = []
        there: list[torch.Tensor] = []
        numbers: list[torch.Tensor] = []
        for leaf in (value,) if type(value) is torch.Tensor else leaves(value):
            # Of a DTensor, the local part: any operation on the whole may be a collective, and this process may be the
            # only one that makes it.
            part = leaf.to_local() if hasattr(leaf, "to_local") else leaf
            if not is_remote(part):
                here.append(part)
            elif type(leaf) is torch.Tensor and leaf.numel() == 1:
                # Copying a number takes one kernel fewer than checking it, and none if another hook requests it too.
                numbers.append(part if is_snapshot(part) else copied(part))
            else:
                there.append(part)
        self.copies = bool(numbers) and not there and not here
        flags = {kind: _flags(here, there, _TESTS[kind]) for kind in self._kinds}
        if numbers or any(flags.values()):  # any flag at all, whatever it says: those on a device cannot be read yet
            self.found = _CheckResult(flags, numbers)
        return self.found


def _flags(here: list[Value], there: list[torch.Tensor], test: str) -> list[Value]:
    """Return flags of which one is true if an element of ``here``, on the host, or ``there`` passes ``test``.

    That is ``[True]`` if a part on the host passes, or else one boolean tensor per device, computed without waiting.
    """
    if any(_passes(part, test) for part in here):
        return [True]
    flags: dict[torch.device, torch.Tensor] = {}
    for part in there:
        flag = getattr(part.detach(), test)().any()
        flags[part.device] = flag if part.device not in flags else flags[part.device].logical_or(flag)
    return [as_snapshot(flag) for flag in flags.values()]


def _number(tensor: torch.Tensor) -> Value:
    """Return the one element of ``tensor``, or ``tensor`` itself if it is of a layout that has no ``item()``."""
    try:
        return tensor.item()
    except RuntimeError:
        return tensor


def _passes(value: Value, test: str) -> bool:
    """Return whether ``value``, which is on the host, or one of its elements passes ``"isnan"`` or ``"isinf"``."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return any(_passes(part, test) for part in value.unbind())
        if value.layout is not torch.strided or value.is_quantized:
            value = ordinary(value)
        if value.numel() != 1:
            return bool(getattr(value, test)().any())
        value = value.item()
    if isinstance(value, (float, complex)):
        return bool(getattr(cmath, test)(value))
    if isinstance(value, int):
        return False
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return bool(getattr(np, test)(value).any())
    raise TypeError(f"NanTensorHook got {shown(value)}: watch numbers, tensors or arrays, or these in lists and dicts")


class GlobalStepWaiterHook(StandardHook):
    """Delays the first run until the loop has reached a global step (``tf.train.GlobalStepWaiterHook``).

    TensorFlow uses it to start workers one after the other. Here, only a thread that is registered with the
    coordinator, such as a :class:`torchhooks.LooperThread`, can advance the step during the wait. A stop request or a
    signal ends the wait.

    >>> class OtherWorker(SessionRunHook):  # advances the global step a hundred times a second
    ...     def after_create_session(self, session, coord):
    ...         LooperThread.loop(coord, 0.01, self.advance, args=[session])
    ...
    ...     def advance(self, session):
    ...         if session.global_step < 20:
    ...             session.global_step += 1
    >>> with MonitoredLoop(step, model, optimizer, hooks=[OtherWorker(), GlobalStepWaiterHook(20)]) as loop:
    ...     loss = loop.run(batches[0])
    waiting for global step 20
    >>> loop.global_step
    21

    Args:
        wait_until_step: the step to wait for; 0 or less disables the wait.

    Raises:
        ValueError: ``wait_until_step`` is not a whole number.
        LifecycleError: from the run, if no such thread is alive, so that the wait would never end.
    """

    def __init__(self, wait_until_step: int) -> None:
        self._wait_until_step = whole_number(wait_until_step, "wait_until_step")

    def begin(self) -> None:
        self._awaited_step = self._wait_until_step

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._coord = coord

    def before_run(self, run_context: SessionRunContext) -> None:
        session, step = run_context.session, self._awaited_step
        if session.global_step < step:
            logger.info("waiting for global step %d", step)
        while session.global_step < step:
            if session.interrupted:
                return
            alone = set(self._coord.live_threads()) <= {threading.current_thread()}
            if alone and session.global_step < step:  # compared again: a thread may have reached it before it ended
                raise LifecycleError(
                    f"{self!r}: the global step is {session.global_step}, and no thread that is registered with the "
                    "coordinator can advance it: register the thread that does, or remove the hook"
                )
            # A thread sets session.global_step without telling this hook, so the step is looked at again and again.
            # Waiting on the coordinator has a stop end the wait at once.
            if self._coord.wait_for_stop(_POLL_SECS):
                return
        self._awaited_step = 0  # reached: later runs do not wait, whatever the step is then

    def next_due(self) -> Due | None:
        return None if self._awaited_step > 0 else NEVER
