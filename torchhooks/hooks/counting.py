"""A hook that measures how fast the loop runs: steps, examples and tokens per second."""

from __future__ import annotations

import functools
import math
import numbers
import os
import time
from typing import Any, NamedTuple

import torch

from torchhooks.common.errors import NoRunYetError
from torchhooks.common.log import logger
from torchhooks.common.text import shown
from torchhooks.common.timers import NEVER, Due, GivenTimer, called_within, check_one_period, given_timer
from torchhooks.device.readback import DeviceDuration, DeviceTimestamp
from torchhooks.fetches.evaluation import SPEEDS
from torchhooks.fetches.names import Fetch, Value
from torchhooks.fetches.over_ranks import over_ranks
from torchhooks.fetches.running import RunningFetch, running_sum
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import PeriodicHook, SessionRunContext, SessionRunHook, SessionRunValues
from torchhooks.lifecycle.session import Session
from torchhooks.summary import operations as summary
from torchhooks.summary.writers import WriterTarget

_WAITING_SHARE = "waiting_for_data"
_DEVICE_MEMORY, _HOST_MEMORY = "memory/device_peak", "memory/host"
_TAGS = ("global_step/sec", "examples/sec", "tokens/sec", _WAITING_SHARE, _DEVICE_MEMORY, _HOST_MEMORY)
_CURVES = {tag: summary.scalar(tag, tag) for tag in _TAGS}


class _Default(int):
    """A number that holds if the caller gives none: another object than any number of the caller."""


_DEFAULT_STEPS: int = _Default(100)
_MIN_LOGGED_SHARE = 0.01
_MIN_LOGGED_SECS_PER_STEP = 1e-5  # about what it takes to get an item that is ready

# The duration of a period and of each pause within it, in seconds, and the tokens that a fetch counted in it.
_Measured = tuple[float, tuple[float, ...], Any]


class _Rate:
    """Steps, examples or tokens per second.

    Args:
        tag: the tag of the curve, and the name in the log.
        fetch: the name under which other hooks fetch the rate.
        per_step: how many of them this rank has in a step; ``None`` if a fetch counts them.
    """

    def __init__(self, tag: str, fetch: str, per_step: float | None) -> None:
        self.tag = tag
        self.fetch = fetch
        self.per_step = per_step
        self.per_step_of_all: float = 1
        """How many of them all ranks together have in a step."""

    def over(self, steps: int, secs: float, counted: Value) -> Value:
        """Return the rate in a period of so many ``steps`` and ``secs``, in which a fetch ``counted`` so many."""
        return (counted if self.per_step is None else steps * self.per_step_of_all) / secs


class _Period(NamedTuple):
    """The start of a reporting period, and the pauses within it."""

    start: DeviceTimestamp
    step: int
    data_wait_secs: float | None
    pauses: list[DeviceDuration]

    @classmethod
    def from_now(cls, session: Session) -> _Period:
        return cls(DeviceTimestamp(session.device), session.global_step, session.measure_data_wait(), [])

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


class StepCounterHook(PeriodicHook):
    """Reports steps per second (``tf.train.StepCounterHook``) as a log line and as the curve ``global_step/sec``.

    >>> hook = StepCounterHook(every_n_steps=4, output_dir="run", examples_per_step=16)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[hook]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    global_step/sec: ...
    examples/sec: ...

    The first run starts the clock, and a report follows each time a full period has passed since the previous one, so
    ``every_n_steps=4`` reports at steps 5, 9 and 13. Other hooks can fetch ``"steps_per_sec"``, ``"secs_per_step"``,
    ``"data_secs"``, ``"examples_per_sec"`` and ``"tokens_per_sec"``. :doc:`Measure speed </built-in-hooks>` says what
    is measured, and when.

    Args:
        every_n_steps, every_n_secs, every_n_epochs, timer: when to report; see
            :doc:`Choose a period </built-in-hooks>`. Every 100 steps if none is given.
        output_dir, summary_writer: where to write; see :doc:`Write curves </built-in-hooks>`. Without either, the rate
            is only logged.
        examples_per_step: the number of examples in a step, on one rank, to report ``examples/sec`` as well.
        tokens_per_step: the number of tokens in a step, on one rank, to report ``tokens/sec``. For sequences of
            different lengths, a fetch: the number of tokens in a run.
        memory: whether to report ``memory/device_peak``, the most that torch has allocated on the model's GPU during
            the period, and ``memory/host``, the resident memory of the process at its end. The curves are in bytes, the
            log line in GiB. This resets torch's peak.
        log: whether to log what is measured. Warnings are always logged.

    Raises:
        ValueError: not exactly one period or more than one place to write to is given, or a number is not valid.
        TypeError: ``tokens_per_step`` is not one fetch; from the run, its value is not one number.

    Unlike TensorFlow, the time on a GPU is measured by the GPU, between two events that are read after they have
    passed. The host never waits for it, and the report arrives a few runs later.

    Unlike TensorFlow, there is no rate for a period without a step, whose time counts for the next one. And
    ``every_n_secs`` needs no ``every_n_steps=None``.

    Unlike TensorFlow, the first run of a resumed training run has the writer discard the points that an earlier process
    wrote after this step, also without a SummarySaverHook.
    """

    triggers_at_once = True  # the first run starts the clock

    def __init__(
        self,
        every_n_steps: int | None = _DEFAULT_STEPS,
        every_n_secs: float | None = None,
        output_dir: object = None,
        summary_writer: object = None,
        *,
        every_n_epochs: int | None = None,
        examples_per_step: float | None = None,
        timer: GivenTimer | None = None,
        tokens_per_step: Fetch = None,
        memory: bool = False,
        log: bool = True,
    ) -> None:
        if every_n_steps is _DEFAULT_STEPS:
            others = every_n_secs, every_n_epochs, timer
            every_n_steps = int(_DEFAULT_STEPS) if all(each is None for each in others) else None
        if timer is not None or every_n_epochs is not None:
            check_one_period(
                timer, every_n_steps=every_n_steps, every_n_secs=every_n_secs, every_n_epochs=every_n_epochs
            )
        timer = given_timer(timer, every_n_epochs=every_n_epochs)
        self.set_timer(timer, every_n_steps=every_n_steps, every_n_secs=every_n_secs)
        self._rates = [_Rate("global_step/sec", "steps_per_sec", 1)]
        if examples_per_step is not None:
            examples = _positive("examples_per_step", examples_per_step, "a number of examples")
            self._rates.append(_Rate("examples/sec", "examples_per_sec", examples))
        self._tokens: RunningFetch | None = None
        if isinstance(tokens_per_step, numbers.Real):
            tokens = _positive("tokens_per_step", tokens_per_step, "a number of tokens or a fetch")
            self._rates.append(_Rate("tokens/sec", "tokens_per_sec", tokens))
        elif tokens_per_step is not None:
            self._tokens = running_sum(tokens_per_step)
            self._rates.append(_Rate("tokens/sec", "tokens_per_sec", None))
        # Every rank counts the tokens of a fetch, and they are added up at the report.
        self.collective = self._tokens is not None and self.timer.differs_by_rank
        self._reports_memory = memory
        self._logs = log
        self._target = WriterTarget(output_dir, summary_writer)

    before_run = SessionRunHook.before_run  # so the loop chooses the hook after the step, by the step it has reached

    def begin(self) -> None:
        super().begin()
        self._run_count = 0  # those that the hook sat out included
        self._checked_run, self._checked_step = 0, -1  # where it was last checked that the step count advances
        self._warned = False
        self._period: _Period | None = None
        self._next_period: _Period | None = None  # if a fetch in this run was the first to see that a period ends
        self._speeds: dict[str, Value] = dict.fromkeys([*SPEEDS[:3], *(rate.fetch for rate in self._rates)], math.nan)
        self._speeds_at = -math.inf  # when the period ended that they are about
        if self.writes:
            self._target.open()

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._session, self._next_period = session, None
        self._compare_ranks(session)
        if self.writes:
            self._target.session_created(session)
            session.on_pause(self._add_pause)
        super().after_create_session(session, coord)
        if self._takes_part and self._period is None:
            self.trigger.force()  # whatever the timer is: the first run starts the clock

    def _compare_ranks(self, session: Session) -> None:
        """Add up the examples and tokens in a step over the ranks. Ranks without the hook count as like this one."""
        ranks = session.ranks
        is_on_all_ranks = ranks.size > 1 and not ranks.has_locally(self)
        mine = {rate.tag: rate.per_step or 0 for rate in self._rates}
        of_ranks = ranks.gather(mine, "the examples in a step") if is_on_all_ranks else [mine] * ranks.size
        for rate in self._rates[1:]:
            rate.per_step_of_all = sum(each.get(rate.tag, 0) for each in of_ranks)
        self._adds_up_tokens = is_on_all_ranks and self._tokens is not None
        # The other ranks only help to add up the tokens.
        self._takes_part = self.writes or self._adds_up_tokens

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._run_count += 1
        if self._run_count == 1:
            self._target.start_session()
        step = run_context.session.global_step
        if not self.trigger.due and self._stall_check_is_due(step):
            self._check_step_count(step)

    def run_due(self, run_context: SessionRunContext, values: Value) -> None:
        self._start_period(run_context)
        self._checked_run, self._checked_step = self._run_count, run_context.session.global_step

    def teardown(self) -> None:
        self._target.close()

    def next_due(self) -> Due:
        if not self._takes_part:
            return NEVER
        due = super().next_due()
        if self.timer.every_steps is None or self._run_count == 0:
            return due
        # Also called after that many runs, because a step count that does not advance never reaches due.step.
        return called_within(self._checked_run + self.timer.every_steps - self._run_count, due)

    def sat_out(self, runs: int) -> None:
        self._run_count += runs

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _add_pause(self, pause: DeviceDuration) -> None:
        period = self._period if self._next_period is None else self._next_period
        if period is not None:
            period.pauses.append(pause)

    def _start_period(self, run_context: SessionRunContext) -> None:
        """Start a period, and report on the period that ends here as soon as its duration is known."""
        session = run_context.session
        ended, started = self._period, self._next_period or _Period.from_now(session)
        if ended is not None and started.step == ended.step:
            # No rate, and the period goes on: as a part of the next one, its time counts.
            ended.pauses.extend(started.pauses)
            self._next_period = None
            return
        self._period, self._next_period = started, None
        tokens = self._take_tokens()
        if not self.writes:
            return
        memory = _memory(session.device) if self._reports_memory else {}  # also if unused: starts a new period
        if ended is None or started.step < ended.step:
            return  # this run starts the clock, or the step went back
        duration = DeviceDuration(ended.start, started.start)
        if any(elapsed.across_devices for elapsed in (duration, *ended.pauses)):
            return  # the model was moved, so no clock has measured the period
        report = functools.partial(self._report, ended, started, time.time(), memory)
        # On a GPU, the report is made when the device has passed both moments. A plain number takes a fast path.
        secs = duration if duration.events else duration.host_secs
        run_context.when_ready((secs, tuple(ended.pauses), tokens), report)

    def _take_tokens(self) -> Value:
        """Return the tokens of all ranks since the last call, a number or a tensor, without waiting for a device."""
        if self._tokens is None:
            return 0
        try:
            if self._adds_up_tokens:
                return self._session.run(over_ranks(self._tokens, "sum"), who=self)
            return self._session.run(self._tokens, who=self) * self._session.ranks.size
        except NoRunYetError:  # the loop was resumed where an epoch ends
            return 0

    def _report(
        self, ended: _Period, started: _Period, wall_time: float, memory: dict[str, float], measured: _Measured
    ) -> None:
        """Log and write what was measured from ``ended`` to ``started``, which was at ``wall_time``."""
        duration, pauses, tokens = measured
        secs, steps = duration - sum(pauses), started.step - ended.step
        if secs <= 0:
            return  # shorter than the resolution of the clock, or the pauses were measured on another stream
        self._set_speeds(ended, started, secs, float(tokens))
        values: dict[str, float] = {rate.tag: self._speeds[rate.fetch] for rate in self._rates}
        lines = [f"{tag}: {value:g}" for tag, value in values.items()]
        waiting_share = ended.waiting_share(started)
        if waiting_share is not None:
            values[_WAITING_SHARE] = waiting_share
            if waiting_share >= _MIN_LOGGED_SHARE and waiting_share * secs >= _MIN_LOGGED_SECS_PER_STEP * steps:
                lines.append(f"waiting for data: {100 * waiting_share:.1f}% of the time")
        if memory:
            values |= memory
            lines.append(_memory_line(memory))
        for line in lines if self._logs else ():
            logger.info("%s", line)
        if self._target.writers:
            points = [summary.Summary(_CURVES[tag], value) for tag, value in values.items()]
            summary.write_summaries(self._target.writers, points, started.step, wall_time)

    # -- what other hooks fetch ---------------------------------------------------------------------------------------

    def measured_speed(self, name: str) -> tuple[float, Value] | None:
        """Return when the last period ended, which may be now, and the fetch ``name``, or ``None`` if it is unknown."""
        ended = self._period
        if self.writes and ended is not None and self._next_period is None:
            self._measure_if_it_ends(ended)
        return (self._speeds_at, self._speeds[name]) if name in self._speeds else None

    def _measure_if_it_ends(self, period: _Period) -> None:
        """Set the fetches to the speeds of ``period`` if it ends in this run, by the host: the device is not done."""
        session = self._session
        # Asked before the loop decides, which it does after the evaluation: the hook is chosen by the step reached.
        if not (self.trigger.due or self.trigger.is_due_at(session.global_step, 0, time.monotonic())):
            return
        end = self._next_period = _Period.from_now(session)
        tokens = 0
        if self._tokens is not None:
            # What the other ranks have counted is known with the report, for which these tokens are kept.
            tokens = session.run(self._tokens, who=self) * session.ranks.size
            session.accumulated.put_back(self)
        self._set_speeds(period, end, period.host_secs(end), tokens)

    def _set_speeds(self, ended: _Period, end: _Period, secs: float, tokens: Value) -> None:
        """Set the fetches to the speeds from ``ended`` to ``end``, which took ``secs``."""
        steps = end.step - ended.step
        if secs <= 0 or steps <= 0:
            return  # the period is not reported
        self._speeds |= {rate.fetch: rate.over(steps, secs, tokens) for rate in self._rates}
        self._speeds["secs_per_step"] = secs / steps
        self._speeds["data_secs"] = ended.data_secs(end)
        self._speeds_at = end.start.secs

    # -- a step count that stands still -------------------------------------------------------------------------------

    def _stall_check_is_due(self, step: int) -> bool:
        """Return whether a period has passed since the last check, in runs if the period is one in steps."""
        period = self.timer.every_steps
        if period is not None:
            return self._run_count >= self._checked_run + period
        return self.trigger.is_due_at(step + 1, 0, time.monotonic())  # it would be due if a step had been counted

    def _check_step_count(self, step: int) -> None:
        if self.writes and step == self._checked_step and not self._warned:
            self._warned = True
            logger.warning(
                "the global step has been %d for a whole period of %r: if the step calls no optimizer.step(), count "
                'runs with MonitoredLoop(..., step_unit="run")',
                step,
                self,
            )
        self._checked_run, self._checked_step = self._run_count, step


def _positive(name: str, value: Any, what: str) -> float:
    """Return ``value`` as a float, or raise a ValueError that calls it ``name``."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name}={shown(value)}: must be {what}, more than 0 and at most 1.8e308")
    return number


def _memory(device: torch.device) -> dict[str, float]:
    """Return the peak of the memory of ``device`` since the last call, and the host's memory at present, in bytes."""
    memory = {}
    peak = _device_peak(device)
    if peak:
        memory[_DEVICE_MEMORY] = float(peak)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            memory[_HOST_MEMORY] = float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # a system without /proc
        pass
    return memory


def _device_peak(device: torch.device) -> int:
    """Return the peak of the memory of ``device`` since the last call, in bytes; 0 if torch does not tell it."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return 0
    # torch.accelerator has it since torch 2.9, also for a device whose module has not. It answers 0 on mps.
    for module in (torch.accelerator, torch.get_device_module(device)):
        if hasattr(module, "max_memory_allocated"):
            peak: int = module.max_memory_allocated(device)
            module.reset_peak_memory_stats(device)
            return peak
    return 0


def _memory_line(memory: dict[str, float]) -> str:
    texts = {_DEVICE_MEMORY: "peak device memory", _HOST_MEMORY: "host memory"}
    return ", ".join(f"{texts[tag]}: {value / 2**30:.4g} GiB" for tag, value in memory.items())
