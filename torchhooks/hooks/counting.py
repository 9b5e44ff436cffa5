"""A hook that measures how fast the loop runs: steps per second."""

from __future__ import annotations

import functools
import math
import numbers
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchhooks.common.log import logger
from torchhooks.common.text import shown
from torchhooks.common.timers import (
    NEVER,
    Due,
    GivenTimer,
    differs_by_rank,
    due_now,
    given_timer,
    hook_timer,
)
from torchhooks.device.readback import Elapsed, Moment
from torchhooks.fetches.fetch import SPEEDS
from torchhooks.fetches.over_ranks import over_ranks
from torchhooks.hooks.throughput import (
    DEVICE_MEMORY,
    FLOPS_RATE,
    HOST_MEMORY,
    MFU,
    TOKENS_RATE,
    FlopCount,
    Tokens,
    described,
    known_peak_flops,
    memory,
    positive_number,
)
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import ReportingHook, SessionRunArgs, SessionRunContext, SessionRunValues
from torchhooks.lifecycle.session import Session
from torchhooks.summary import operations as summary
from torchhooks.summary.writers import WriterTarget

_STEPS_RATE, _EXAMPLES_RATE, _WAITING_SHARE = "global_step/sec", "examples/sec", "waiting_for_data"
_TAGS = (_STEPS_RATE, _EXAMPLES_RATE, _WAITING_SHARE, TOKENS_RATE, FLOPS_RATE, MFU, DEVICE_MEMORY, HOST_MEMORY)
_CURVES = {tag: summary.scalar(tag, tag) for tag in _TAGS}

_DEFAULT_STEPS = 100
_MIN_LOGGED_SHARE = 0.01
_MIN_LOGGED_SECS_PER_STEP = 1e-5  # about what it takes to get an item that is ready

# The duration of a period and of each pause within it, in seconds, and the tokens of a fetch.
_Measured = tuple[float, tuple[float, ...], Any]


class _Period(NamedTuple):
    """The start of a reporting period, and the pauses within it."""

    start: Moment
    step: int
    data_wait_secs: float | None
    pauses: list[Elapsed]

    def host_secs(self, end: _Period) -> float:
        """Return the seconds until ``end`` without pauses, on the host's clock."""
        return end.start.secs - self.start.secs - sum(pause.host_secs for pause in self.pauses)

    def data_secs(self, end: _Period) -> float:
        """Return how many of the seconds until ``end`` the loop waited for data; NaN if that is not known."""
        if end.data_wait_secs is None:
            return math.nan
        return end.data_wait_secs - (self.data_wait_secs or 0.0)

    def waiting_share(self, end: _Period) -> float | None:
        """Return the share of the time until ``end`` that the loop waited for data; ``None`` if it did not wait."""
        # The host waits for data, so this is a share of the host's time, also if the rate is measured on a device.
        waited, host_secs = self.data_secs(end), self.host_secs(end)
        return waited / host_secs if waited > 0 and host_secs > 0 else None


class StepCounterHook(ReportingHook):
    """Reports steps per second (``tf.train.StepCounterHook``) as a log line and as the curve ``global_step/sec``.

    >>> hook = StepCounterHook(every_n_steps=4, output_dir="run", examples_per_step=16)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    global_step/sec: ...
    examples/sec: ...

    The first run starts the clock, and a report follows each time a full period has passed since the previous one, so
    ``every_n_steps=10`` reports at steps 11, 21 and 31. The rate thus excludes the first step, with its compilation and
    warm-up, and also all time inside ``with session.paused():``. A period is not reported if the step went back, if the
    model moved to another device, or if no time passed by the clock. If a whole period passes without any step, the
    hook logs a warning, once.

    In a loop that is driven by ``until_stop``, the hook also reports the share of the time that the loop waited for
    data, as the curve ``waiting_for_data``. A share of at least 1 % and 10 us per step is also logged.

    Tokens, floating-point operations and memory are logged in one line:

    >>> tokens = StepCounterHook(4, tokens_per_step=lambda inputs: inputs.numel(), flops_per_step="measure")
    >>> with MonitoredLoop(step, model, optimizer, hooks=[tokens]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    global_step/sec: ...
    tokens/sec: ..., flops/sec: ...

    Other hooks can fetch what is measured, for a line of their own; ``log=False`` then turns off the hook's lines:

    >>> line = "step {step}: {steps_per_sec:.0f} steps/s, {data_secs:.3f} s of them waiting for data"
    >>> names = {"step": "global_step", "steps_per_sec": "steps_per_sec", "data_secs": "data_secs"}
    >>> hooks = [
    ...     StepCounterHook(timer=EverySteps(4), log=False),
    ...     LoggingTensorHook(names, timer=EverySteps(4), formatter=line.format_map),
    ... ]
    >>> with MonitoredLoop(step, model, optimizer, hooks=hooks) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    step 4: ... steps/s, ... s of them waiting for data
    step 8: ... steps/s, ... s of them waiting for data

    In a run that ends a period, and at the end of an epoch that does, ``"steps_per_sec"``, ``"secs_per_step"``,
    ``"data_secs"``, ``"examples_per_sec"`` and ``"tokens_per_sec"`` are about this period, whose time on a GPU is then
    measured by the host, since the GPU has not finished it. In other runs, they are about the last period that was
    reported; NaN before the first one, and on ranks other than the chief. With several of these hooks, the period that
    ended last counts. The last two need ``examples_per_step`` and ``tokens_per_step``.

    With several ranks, the chief alone measures and reports. ``examples/sec`` and ``tokens/sec`` are the rates of all
    ranks together, if every rank has the hook; the other rates are the chief's.

    Args:
        every_n_steps, every_n_secs, every_n_epochs, timer: when to report; see
            :doc:`Choose a period </built-in-hooks>`. ``every_n_secs`` requires ``every_n_steps=None``, as in
            TensorFlow.
        output_dir, summary_writer: where to write; see :doc:`Write curves </built-in-hooks>`. Without either, the rate
            is only logged.
        examples_per_step: the number of examples in a step, on one rank, to report ``examples/sec`` as well.
        tokens_per_step: the number of tokens in a step, on one rank, to report ``tokens/sec``. For sequences of
            different lengths, a fetch: the number of tokens in a run. It is evaluated in every run and added up where
            it is.
        flops_per_step: the number of floating-point operations in a step, to report ``flops/sec``, or ``"measure"`` to
            have ``torch.utils.flop_counter`` count them in the first step. In that step, compiled code may run
            uncompiled.
        peak_flops: the number of these operations that the device can perform in a second, to report the share that is
            achieved as ``mfu``. By default, the number for common GPUs in bfloat16.
        memory: whether to report ``memory/device_peak``, the most that torch has allocated on the model's GPU during
            the period, and ``memory/host``, the resident memory of the process at its end. The curves are in bytes, the
            log line in GiB. This resets torch's peak.
        log: whether to log what is measured. Warnings are always logged.

    Raises:
        ValueError: not exactly one period or more than one place to write to is given, or a number is not valid.

    Unlike TensorFlow, the time on a GPU is measured by the GPU, between two events that are read after they have
    passed. The host never waits for it, and steps that are only queued are not counted as made. The report therefore
    arrives a few runs later.

    Unlike TensorFlow, in a loop that continues from a step after 0, the first run writes ``SessionLog.START``, which
    makes TensorBoard discard the points that an earlier process wrote after this step. A SummarySaverHook that writes
    to the same place does so instead. If the writer has a method ``purge_from(step)``, as
    :class:`torchhooks.JsonLinesWriter` has, the hook calls that instead, in every loop and after a recovery.
    """

    def __init__(
        self,
        every_n_steps: int | None = _DEFAULT_STEPS,
        every_n_secs: float | None = None,
        output_dir: Any = None,
        summary_writer: Any = None,
        *,
        every_n_epochs: int | None = None,
        examples_per_step: float | None = None,
        timer: GivenTimer | None = None,
        tokens_per_step: Any = None,
        flops_per_step: float | str | None = None,
        peak_flops: float | None = None,
        memory: bool = False,
        log: bool = True,
    ) -> None:
        timer = given_timer(timer, every_n_epochs=every_n_epochs)
        if timer is not None and every_n_steps == _DEFAULT_STEPS:
            every_n_steps = None  # not given, as far as the hook can tell
        if isinstance(every_n_secs, numbers.Real) and every_n_steps == _DEFAULT_STEPS:
            raise ValueError(
                f"every_n_secs={shown(every_n_secs)}: every_n_steps has the default {_DEFAULT_STEPS}, and a hook has "
                "one period: pass every_n_steps=None"
            )
        self._timer = hook_timer(self, timer, every_n_steps=every_n_steps, every_n_secs=every_n_secs)
        self._every_n_steps: int | None = self._timer.every_steps
        self._examples_per_step = _number("examples_per_step", examples_per_step, "a number of examples")
        self._peak_flops = _number("peak_flops", peak_flops, "a number of operations per second")
        self._reports_memory = memory
        self._logs = log
        self._measures_flops = flops_per_step == "measure"
        self._flops_per_step: float | None = None
        if not self._measures_flops:
            self._flops_per_step = _number("flops_per_step", flops_per_step, 'a number of operations or "measure"')
        self._tokens_per_step: float | None = None
        self._token_op: summary.SummaryOp | None = None
        if isinstance(tokens_per_step, numbers.Real):
            self._tokens_per_step = _number("tokens_per_step", tokens_per_step, "a number of tokens or a fetch")
        elif tokens_per_step is not None:
            self._token_op = summary.scalar(TOKENS_RATE, tokens_per_step)
        self._token_request = SessionRunArgs(self._token_op)
        if self._token_op is not None or self._measures_flops:
            # Only for these, because a hook with this method is chosen before the step.
            self.before_run = self._before_run  # type: ignore[method-assign]
        # Every rank counts the tokens of a fetch, and they are added up at the report.
        self.collective = self._token_op is not None and (every_n_secs is not None or differs_by_rank(timer))
        self._target = WriterTarget(output_dir, summary_writer)

    def begin(self) -> None:
        self._timer.reset()
        self._runs = 0
        self._checked_run, self._checked_step = 0, -1  # where it was last checked that the step count advances
        self._warned = False
        self._period: _Period | None = None
        self._is_on_all_ranks = False
        self._next_period: _Period | None = None  # if a fetch in this run was the first to see that a period ends
        self._speeds = dict.fromkeys(SPEEDS[:3], math.nan)
        if self._examples_per_step is not None:
            self._speeds["examples_per_sec"] = math.nan
        if self._tokens_per_step is not None or self._token_op is not None:
            self._speeds["tokens_per_sec"] = math.nan
        self._speeds_at = -math.inf  # when the period ended of which they are
        self._counts_tokens = False  # whether the tokens of the run in progress are still to be added
        self._tokens, self._flop_count = Tokens(), FlopCount()
        if self.writes and self._target.open() is not None:
            summary.check_writer(self._target.writer)

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._session, self._next_period = session, None
        session.speeds.append(self._speed)
        ranks = session.ranks
        self._is_on_all_ranks = ranks.size > 1 and not any(self is hook for hook in ranks.hooks_of_some)
        counts = [(self._examples_per_step or 0, self._tokens_per_step or 0)]
        counts = ranks.gather(counts[0], "the examples in a step") if self._is_on_all_ranks else counts * ranks.size
        self._examples_of_all, self._tokens_of_all = (sum(column) for column in zip(*counts, strict=True))
        if not self.writes:
            self._timer.start_at(session.global_step)
            return
        last_step = self._timer.last_triggered_step()
        if self._target.session_created(session.global_step, last_step, session.metadata):
            self._timer.reset()
            self._period = None
        self._timer.start_at(session.global_step)
        session.on_pause(self._add_pause)
        self._flop_count.abandon()  # of a run that failed

    def _before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self._counts_tokens = not run_context.ends_epoch  # the last run of an epoch has counted its own
        if not self._counts_tokens:
            return None
        if self._measures_flops and self.writes:
            self._flop_count.start(run_context.session.global_step)
        return self._token_request

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        session = run_context.session
        if not self.writes:
            self._count_elsewhere(session, run_values)
            return
        step = session.global_step
        self._flop_count.stop(step)
        if self._token_op is not None and run_values.results is not None:
            self._tokens.add(run_values.results.value)
        self._counts_tokens = False
        self._runs += 1
        if self._runs == 1:
            self._target.start_session_alone(session.begun_at, step)
        if self._period is None or self._timer.should_trigger_for_step(step):
            self._timer.update_last_triggered_step(step)
            self._start_period(run_context)
        elif self._stall_check_is_due():
            self._warn_if_stalled(step)
        else:
            return
        self._checked_run, self._checked_step = self._runs, step

    def _count_elsewhere(self, session: Session, run_values: SessionRunValues) -> None:
        """Count the tokens of a rank that is not the chief, and add them up where the chief does."""
        if self._token_op is None or not self._is_on_all_ranks:
            return  # called by a subclass
        if run_values.results is not None:
            self._tokens.add(run_values.results.value)
        self._runs += 1
        if self._runs == 1 or self._timer.should_trigger_for_step(session.global_step):
            self._timer.update_last_triggered_step(session.global_step)
            self._take_tokens(session)

    def _take_tokens(self, session: Session) -> Any:
        """Return the tokens since the last call on all ranks, a number or a tensor, without waiting for a device."""
        tokens = self._tokens.take()
        if self._token_op is None or not self._is_on_all_ranks:
            return tokens * session.ranks.size
        return session.run(over_ranks(lambda: tokens, "sum"))

    def teardown(self) -> None:
        self._flop_count.abandon()
        self._target.close()

    def next_due(self) -> Due:
        if not self.writes and not (self._token_op is not None and self._is_on_all_ranks):
            return NEVER
        if self._token_op is not None or (self._measures_flops and self._flop_count.per_step is None):
            return due_now(self._timer)._replace(moment=self._timer.next_due().moment)  # at which the chief reports
        due: Due = due_now(self._timer) if self._period is None else self._timer.next_due()
        if self._every_n_steps is None or self._runs == 0:
            return due
        # Also due after that many runs, because a step count that does not advance never reaches due.step.
        return Due(due.step, due.moment, runs=self._checked_run + self._every_n_steps - self._runs)

    def sat_out(self, runs: int) -> None:
        self._runs += runs

    def _add_pause(self, pause: Elapsed) -> None:
        period = self._period if self._next_period is None else self._next_period
        if period is not None:
            period.pauses.append(pause)

    def _speed(self, name: str, evaluate: Callable[[Any], Any]) -> tuple[float, Any] | None:
        """Return when the last period ended, which may be now, and its fetch ``name``; ``None`` if it is not measured.

        ``evaluate`` returns the value that the fetch of the tokens has in the run in progress.
        """
        ended, is_known = self._period, self._next_period is not None or not self.writes
        if ended is not None and not is_known and self._timer.should_trigger_for_step(self._session.global_step):
            end = self._next_period = self._period_from_now()
            tokens = self._tokens.total
            if self._token_op is not None and self._counts_tokens:
                tokens = tokens + evaluate(self._token_op).value
            # What the other ranks have counted is known with the report.
            self._set_speeds(ended, end, ended.host_secs(end), tokens * self._session.ranks.size)
        return (self._speeds_at, self._speeds[name]) if name in self._speeds else None

    def _set_speeds(self, ended: _Period, end: _Period, secs: float, tokens: Any) -> None:
        """Set the fetches to what was measured from ``ended`` to ``end``, which took ``secs``.

        ``tokens`` are the tokens of all ranks.
        """
        steps = end.step - ended.step
        rate = steps / secs if secs > 0 and steps > 0 else math.nan
        self._speeds_at = end.start.secs
        self._speeds["steps_per_sec"], self._speeds["secs_per_step"] = rate, 1 / rate
        self._speeds["data_secs"] = ended.data_secs(end)
        if self._examples_per_step is not None:
            self._speeds["examples_per_sec"] = rate * self._examples_of_all
        if self._token_op is not None:
            self._speeds["tokens_per_sec"] = tokens / secs if secs > 0 else math.nan
        elif self._tokens_per_step is not None:
            self._speeds["tokens_per_sec"] = rate * self._tokens_of_all

    def _period_from_now(self) -> _Period:
        session = self._session
        return _Period(Moment(session.device), session.global_step, session.data_wait_secs, [])

    def _start_period(self, run_context: SessionRunContext) -> None:
        """Start a period, and report on the period that ends here as soon as its duration is known."""
        session = run_context.session
        ended, started = self._period, self._next_period or self._period_from_now()
        self._period, self._next_period = started, None
        tokens = self._take_tokens(session)
        used = dict(memory(session.device)) if self._reports_memory else {}  # also if unused: starts a new period
        if ended is None or started.step < ended.step:
            return  # this run starts the clock, or the step went back
        duration = Elapsed(ended.start, started.start)
        if any(elapsed.across_devices for elapsed in (duration, *ended.pauses)):
            return  # the model was moved, so no clock has measured the period
        report = functools.partial(self._report, ended, started, time.time(), used)
        # On a GPU, the report is made when the device has passed both moments. A plain number takes a fast path.
        secs = duration if duration.events else duration.host_secs
        run_context.when_ready((secs, tuple(ended.pauses), tokens), report)

    def _report(
        self, ended: _Period, started: _Period, wall_time: float, used: dict[str, float], measured: _Measured
    ) -> None:
        """Log and write the rates of the period from ``ended`` to ``started``, which was at ``wall_time``."""
        duration, pauses, tokens = measured
        secs, steps = duration - sum(pauses), started.step - ended.step
        if secs <= 0:
            return  # shorter than the resolution of the clock, or the pauses were measured on another stream
        self._set_speeds(ended, started, secs, float(tokens))
        rate = steps / secs
        values = {_STEPS_RATE: rate}
        lines = [f"{_STEPS_RATE}: {rate:g}"]
        if self._examples_per_step is not None:
            values[_EXAMPLES_RATE] = rate * self._examples_of_all
            lines.append(f"{_EXAMPLES_RATE}: {values[_EXAMPLES_RATE]:g}")
        waiting_share = ended.waiting_share(started)
        if waiting_share is not None:
            values[_WAITING_SHARE] = waiting_share
            if waiting_share >= _MIN_LOGGED_SHARE and waiting_share * secs >= _MIN_LOGGED_SECS_PER_STEP * steps:
                lines.append(f"waiting for data: {100 * waiting_share:.1f}% of the time")
        throughput = {**self._throughput(rate, secs, tokens), **used}
        if throughput:
            lines.append(described(throughput))
        for line in lines if self._logs else ():
            logger.info("%s", line)
        values |= throughput
        if self._target.writer is not None:
            points = [summary.Summary(_CURVES[tag], value) for tag, value in values.items()]
            summary.write_summaries(self._target.writer, points, started.step, wall_time)

    def _throughput(self, rate: float, secs: float, tokens: Any) -> dict[str, float]:
        """Return the curves of tokens and floating-point operations that were asked for."""
        values: dict[str, float] = {}
        if self._token_op is not None:
            values[TOKENS_RATE] = float(tokens) / secs
        elif self._tokens_per_step is not None:
            values[TOKENS_RATE] = self._tokens_of_all * rate
        flops = self._flop_count.per_step if self._measures_flops else self._flops_per_step
        if flops is not None:
            values[FLOPS_RATE] = flops * rate
            device = self._session.device
            peak = self._peak_flops
            if peak is None and device.type == "cuda":
                peak = known_peak_flops(torch.cuda.get_device_name(device))
            if peak is not None:
                values[MFU] = values[FLOPS_RATE] / peak
        return values

    def _stall_check_is_due(self) -> bool:
        """Return whether a period has passed since the last check, in runs if the period is one in steps."""
        if self._every_n_steps is not None:
            return self._runs >= self._checked_run + self._every_n_steps
        moment: float | None = self._timer.next_due().moment
        return moment is not None and time.monotonic() >= moment

    def _warn_if_stalled(self, step: int) -> None:
        if step == self._checked_step and not self._warned:
            self._warned = True
            logger.warning(
                "the global step has been %d for a whole period of %r: if the step calls no optimizer.step(), count "
                'runs with MonitoredLoop(..., step_unit="run")',
                step,
                self,
            )


def _number(name: str, value: Any, what: str) -> float | None:
    return None if value is None else positive_number(name, value, what)
